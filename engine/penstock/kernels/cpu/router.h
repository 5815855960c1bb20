/* Scores of a router, which chooses the experts of a token. Part of cpu.c. */
#pragma once

/* Experts and tokens that are computed side by side: each load serves several sums. */
enum { ROUTER_EXPERTS = 4, ROUTER_TOKENS = LANES == 16 ? 4 : 2 };
enum { NO_FUNCTION = 0, SOFTMAX = 1, SIGMOID = 2 };

typedef struct {
    const float *x, *weight, *bias;
    float *y;
    int64_t x_stride, num_tokens, in_features, num_experts;
    int function;
} router;

/* y[t, e] = x[t] . weights of expert e. A sum adds the same numbers in the same order in a tile of any size. */
INLINE void router_dots(const router *r, int64_t token, int64_t expert, const int num_tokens, const int num_experts) {
    const int64_t width = r->in_features, whole = width / LANES * LANES;
    const float *x = r->x + token * r->x_stride, *weight = r->weight + expert * width;
    vec sums[ROUTER_TOKENS][ROUTER_EXPERTS] = {};
    for (int64_t i = 0; i < whole; i += LANES)
        for (int t = 0; t < num_tokens; t++)
            for (int e = 0; e < num_experts; e++) sums[t][e] += load(x + t * r->x_stride + i) * load(weight + e * width + i);
    for (int t = 0; t < num_tokens; t++)
        for (int e = 0; e < num_experts; e++) {
            const vec rest = load_some(x + t * r->x_stride + whole, width - whole);
            sums[t][e] += rest * load_some(weight + e * width + whole, width - whole);
            const float logit = sum_lanes(sums[t][e]);
            r->y[(token + t) * r->num_experts + expert + e] = r->bias ? logit + r->bias[expert + e] : logit;
        }
}

INLINE void router_tile(const router *r, int64_t token, int64_t expert) {
    const int64_t num_tokens = MIN(ROUTER_TOKENS, r->num_tokens - token);
    const int64_t num_experts = MIN(ROUTER_EXPERTS, r->num_experts - expert);
    if (num_tokens == ROUTER_TOKENS && num_experts == ROUTER_EXPERTS)
        router_dots(r, token, expert, ROUTER_TOKENS, ROUTER_EXPERTS);
    else if (num_experts == ROUTER_EXPERTS)
        for (int64_t t = 0; t < num_tokens; t++) router_dots(r, token + t, expert, 1, ROUTER_EXPERTS);
    else
        for (int64_t t = 0; t < num_tokens; t++)
            for (int64_t e = 0; e < num_experts; e++) router_dots(r, token + t, expert + e, 1, 1);
}

static void router_experts(void *context, int64_t tile) {
    const router *r = context;
    for (int64_t token = 0; token < r->num_tokens; token += ROUTER_TOKENS)
        router_tile(r, token, tile * ROUTER_EXPERTS);
}

/* Lanes beyond the last expert have `beyond`. */
INLINE vec load_scores(const float *y, int64_t n, float beyond) {
    vec v = splat(beyond);
    memcpy(&v, y, MIN(n, LANES) * sizeof(float));
    return v;
}

static void softmax_row(void *context, int64_t row) {
    const router *r = context;
    float *y = r->y + row * r->num_experts;
    const int64_t n = r->num_experts;
    vec largest = splat(-INFINITY), sum = {};
    for (int64_t i = 0; i < n; i += LANES) largest = max_vec(largest, load_scores(y + i, n - i, -INFINITY));
    const vec most = splat(max_lanes(largest));
    for (int64_t i = 0; i < n; i += LANES) {
        const vec e = exp_vec(load_scores(y + i, n - i, -INFINITY) - most);
        sum += e;
        memcpy(y + i, &e, MIN(n - i, LANES) * sizeof(float));
    }
    const float whole = sum_lanes(sum);
    for (int64_t i = 0; i < n; i++) y[i] /= whole;
}

static void sigmoid_row(void *context, int64_t row) {
    const router *r = context;
    float *y = r->y + row * r->num_experts;
    const int64_t n = r->num_experts;
    for (int64_t i = 0; i < n; i += LANES) {
        const vec s = splat(1.0f) / (splat(1.0f) + exp_vec(-load_scores(y + i, n - i, 0.0f)));
        memcpy(y + i, &s, MIN(n - i, LANES) * sizeof(float));
    }
}

/* y [num_tokens, num_experts] = function(x weight^T + bias). A row of x has `in_features` columns; weight is
 * [num_experts, in_features]. */
EXPORT void penstock_router_scores(const float *x, int64_t x_stride, int64_t num_tokens, int64_t in_features,
                                   const float *weight, const float *bias, int64_t num_experts, int function, float *y) {
    router r = {x, weight, bias, y, x_stride, num_tokens, in_features, num_experts, function};
    const int64_t num_tiles = (num_experts + ROUTER_EXPERTS - 1) / ROUTER_EXPERTS;
    for_rows(num_tiles, num_tokens * ROUTER_EXPERTS * in_features, router_experts, &r);
    if (function == SOFTMAX) for_rows(num_tokens, 8 * num_experts, softmax_row, &r);
    if (function == SIGMOID) for_rows(num_tokens, 8 * num_experts, sigmoid_row, &r);
}

typedef struct {
    const float *scores, *ranked;
    int64_t num_experts, num_chosen;
    bool is_renormalized;
    float least_sum, scaling;
    int64_t *experts;
    float *chosen;
} choice;

/* The order of experts: NaN comes first, then the larger number, of equal ones the lower place. */
INLINE bool comes_before(float a, int64_t place, float b, int64_t other) {
    const bool is_better = a > b || (a != a && b == b), is_worse = b > a || (b != b && a == a);
    return is_better || (!is_worse && place < other);
}

static void choose_row(void *context, int64_t row) {
    const choice *c = context;
    const float *ranked = c->ranked + row * c->num_experts, *scores = c->scores + row * c->num_experts;
    int64_t *experts = c->experts + row * c->num_chosen, before = -1;
    float *chosen = c->chosen + row * c->num_chosen, sum = 0.0f;
    for (int64_t i = 0; i < c->num_chosen; i++) {
        int64_t best = -1;
        for (int64_t e = 0; e < c->num_experts; e++)
            if ((before < 0 || comes_before(ranked[before], before, ranked[e], e)) &&
                (best < 0 || comes_before(ranked[e], e, ranked[best], best)))
                best = e;
        experts[i] = before = best, chosen[i] = scores[best];
        sum = i ? sum + chosen[i] : chosen[i];
    }
    if (sum < c->least_sum) sum = c->least_sum;
    for (int64_t i = 0; i < c->num_chosen; i++) {
        if (c->is_renormalized) chosen[i] /= sum;
        chosen[i] *= c->scaling;
    }
}

/* The num_chosen (at most num_experts) best experts of each token, and their scores: ExpertKernels.choose(). */
EXPORT void penstock_choose_experts(const float *scores, const float *ranked, int64_t num_tokens, int64_t num_experts,
                                    int64_t num_chosen, int is_renormalized, float least_sum, float scaling,
                                    int64_t *experts, float *chosen) {
    choice c = {scores, ranked, num_experts, num_chosen, is_renormalized, least_sum, scaling, experts, chosen};
    for_rows(num_tokens, num_chosen * num_experts, choose_row, &c);
}
