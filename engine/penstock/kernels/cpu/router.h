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
            for (int e = 0; e < num_experts; e++)
                sums[t][e] += load(x + t * r->x_stride + i) * load(weight + e * width + i);
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
                                   const float *weight, const float *bias, int64_t num_experts, int function,
                                   float *y) {
    router r = {x, weight, bias, y, x_stride, num_tokens, in_features, num_experts, function};
    const int64_t num_tiles = (num_experts + ROUTER_EXPERTS - 1) / ROUTER_EXPERTS;
    for_rows(num_tiles, num_tokens * ROUTER_EXPERTS * in_features, router_experts, &r);
    if (function == SOFTMAX) for_rows(num_tokens, 8 * num_experts, softmax_row, &r);
    if (function == SIGMOID) for_rows(num_tokens, 8 * num_experts, sigmoid_row, &r);
}

/* How a router chooses, as routing.py describes it. */
typedef struct {
    int64_t num_experts, num_chosen, num_groups, num_chosen_groups, num_counted;
    int function, is_renormalized;
    float least_sum, scaling;
} routing;

typedef struct {
    const routing *how;
    const router *scores; /* whose rows are logits, and then scores */
    const float *correction;
    float *ranked;
    int64_t *experts;
    float *chosen;
} choice;

/* The order of experts: NaN comes first, then the larger number, of equal ones the lower place. */
INLINE bool comes_before(float a, int64_t place, float b, int64_t other) {
    const bool is_better = a > b || (a != a && b == b), is_worse = b > a || (b != b && a == a);
    return is_better || (!is_worse && place < other);
}

/* The places of the `number` (at most n) best values, best first. */
static void find_best(const float *values, int64_t n, int64_t number, int64_t *places) {
    for (int64_t i = 0, count = 0; i < n; i++) {
        if (count == number && !comes_before(values[i], i, values[places[count - 1]], places[count - 1])) continue;
        int64_t at = count < number ? count++ : count - 1;
        for (; at && comes_before(values[i], i, values[places[at - 1]], places[at - 1]); at--)
            places[at] = places[at - 1];
        places[at] = i;
    }
}

/* A group is worth the sum of its best values, added best first. All values outside of the best groups become
 * -infinity. */
static void keep_best_groups(const routing *how, float *ranked) {
    const int64_t size = how->num_experts / how->num_groups, num_counted = MIN(how->num_counted, size);
    float worth[how->num_groups];
    int64_t places[MAX(num_counted, how->num_groups)];
    bool is_kept[how->num_groups];
    for (int64_t g = 0; g < how->num_groups; g++) {
        const float *own = ranked + g * size;
        find_best(own, size, num_counted, places);
        worth[g] = own[places[0]];
        for (int64_t i = 1; i < num_counted; i++) worth[g] += own[places[i]];
        is_kept[g] = false;
    }
    find_best(worth, how->num_groups, how->num_chosen_groups, places);
    for (int64_t i = 0; i < how->num_chosen_groups; i++) is_kept[places[i]] = true;
    for (int64_t e = 0; e < how->num_experts; e++)
        if (!is_kept[e / size]) ranked[e] = -INFINITY;
}

static void route_row(void *context, int64_t row) {
    const choice *c = context;
    const routing *how = c->how;
    const int64_t n = how->num_experts;
    float *scores = c->scores->y + row * n, *ranked = c->ranked + row * n, *chosen = c->chosen + row * how->num_chosen;
    int64_t *experts = c->experts + row * how->num_chosen;
    memcpy(ranked, scores, n * sizeof(float)); /* of a sigmoid the logits: large ones have the same score, 1 */
    if (how->function == SOFTMAX) softmax_row((void *)c->scores, row);
    if (how->function == SIGMOID) sigmoid_row((void *)c->scores, row);
    if (c->correction)
        for (int64_t e = 0; e < n; e++) ranked[e] = scores[e] + c->correction[e];
    else if (how->function == SOFTMAX) memcpy(ranked, scores, n * sizeof(float));
    if (how->num_groups > 1) keep_best_groups(how, ranked);
    find_best(ranked, n, how->num_chosen, experts);
    float sum = 0.0f;
    for (int64_t i = 0; i < how->num_chosen; i++) chosen[i] = scores[experts[i]], sum = i ? sum + chosen[i] : chosen[i];
    if (sum < how->least_sum) sum = how->least_sum;
    for (int64_t i = 0; i < how->num_chosen; i++) {
        if (how->is_renormalized) chosen[i] /= sum;
        chosen[i] *= how->scaling;
    }
}

/* Kernels.route(): the experts of each token and their scores, each [num_tokens, num_chosen]. A row of x has
 * `in_features` columns; weight is [num_experts, in_features]. `bias` and `correction` may be NULL. `scratch` is [2,
 * num_tokens, num_experts]. */
EXPORT void penstock_route(const float *x, int64_t x_stride, int64_t num_tokens, int64_t in_features,
                           const float *weight, const float *bias, const float *correction, const routing *how,
                           int64_t *experts, float *chosen, float *scratch) {
    const int64_t n = how->num_experts;
    const router scores = {x, weight, bias, scratch, x_stride, num_tokens, in_features, n, how->function};
    penstock_router_scores(x, x_stride, num_tokens, in_features, weight, bias, n, NO_FUNCTION, scratch);
    choice c = {how, &scores, correction, scratch + num_tokens * n, experts, chosen};
    for_rows(num_tokens, 16 * n, route_row, &c);
}
