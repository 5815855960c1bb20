/* Layers with experts that follow each other, for one token, in one call: as many as find their experts in memory. Part
 * of cpu.c.
 *
 * Between the calls of a layer, Python takes a fifth of the time that a token of a large mixture takes. */
#pragma once

/* A router, and where its layer's experts are. */
typedef struct {
    const float *weight, *bias, *correction;
    const expert_weights **experts; /* by their numbers; NULL: not in memory */
} expert_router;

/* An expert that is being read, as kernels/sublayers/mixture_layer.py describes it. */
typedef struct {
    const expert_weights **experts; /* of its layer */
    int64_t number;
    const expert_weights *weights;
    int64_t ticket; /* of its read, for a wait_fn */
} coming_expert;

/* The experts that are being read, with what tells of the ends of the reads. */
typedef struct {
    const coming_expert *experts;
    int64_t num_experts;
    wait_fn wait;
    void *reads;
} coming_experts;

/* Of kernels/sublayers/mixture_layer.py. All members have eight bytes. */
typedef struct {
    whole_layer layer; /* whose mlp is the shared expert; NULL: there is none */
    const float *shared_gate; /* weights of the sigmoid that multiplies the shared expert; NULL: nothing does */
    const expert_router *router, *next; /* `next`: the router of which a choice is guessed; NULL: none is */
} mixture_layer;

/* What a layer takes in place of what its router chooses, and of what it guesses. */
typedef struct {
    const int64_t *experts;
    const float *scores;
    const int64_t *guess;
} given_choice;

/* What the layers of a step share, and where they work. */
typedef struct {
    const mixture_layer *layers;
    const given_choice *given; /* of each layer; NULL: routers choose */
    int64_t num_layers;
    const routing *how;
    const layers_step *step; /* of one token */
    int64_t kind;
    float *y;        /* [4, width]: see penstock_mixture_layers() */
    int64_t *chosen; /* [num_layers + 1, num_chosen] */
    float *scores;   /* [num_chosen] */
    float *routing;  /* scratch memory of penstock_route */
    float sharpness, limit;
    float factor; /* of what is added to the hidden state */
} mixture_sweep;

/* Where an expert's weights are; NULL: not in memory. What has arrived since the last look is put into its table. */
static const expert_weights *find_expert(const expert_router *r, int64_t number, const coming_experts *coming) {
    const coming_expert *e = coming->experts, *end = e + coming->num_experts;
    for (; !r->experts[number] && e < end; e++)
        if (e->experts == r->experts && e->number == number && coming->wait(coming->reads, (int)e->ticket, false) > 0)
            r->experts[number] = e->weights;
    return r->experts[number];
}

enum { ARE_THERE = 1, HAS_CLAMPED = 2 };

/* Chooses experts with their scores, and finds their weights. False: one of them is not in memory. */
static bool choose_experts(const mixture_sweep *s, const expert_router *r, const float *x, int64_t width,
                           const int64_t *given, const coming_experts *coming, int64_t *experts, float *scores,
                           const expert_weights **weights) {
    bool are_there = true;
    penstock_route(x, width, 1, width, r->weight, r->bias, r->correction, s->how, experts, scores, s->routing);
    if (given) memcpy(experts, given, s->how->num_chosen * sizeof *experts);
    for (int64_t i = 0; i < s->how->num_chosen; i++) {
        weights[i] = find_expert(r, experts[i], coming);
        are_there &= weights[i] != NULL;
    }
    return are_there;
}

/* y += the shared expert of `normed`, times the sigmoid of its gate. `shared` is [width]. */
static void add_shared(const mixture_sweep *s, const mixture_layer *m, const float *normed, int64_t width, float *y,
                       float *shared, void *scratch) {
    const int64_t row = 0;
    const expert whole = {m->layer.mlp, 0, 1};
    gated_experts(normed, width, &row, &whole, 1, (int)s->kind, s->sharpness, s->limit, (int)s->step->activation_bits,
                  shared, scratch);
    if (m->shared_gate) {
        float score;
        penstock_router_scores(normed, width, 1, width, m->shared_gate, NULL, 1, SIGMOID, &score);
        penstock_weighted_sum(shared, &row, &score, NULL, 1, 1, width, shared);
    }
    for (int64_t i = 0; i < width; i++) y[i] += shared[i];
}

/* Computes layers from layer i on, up to one whose experts, or those that are guessed for the layer behind it, are not
 * all in memory. Returns that layer, or num_layers.
 *
 * The first part of y becomes the hidden state behind the last layer that was computed, and the next parts are
 * `summed` and `normed` of the layer that is returned. Row i of `chosen` is what layer i chose, with the scores of the
 * last layer that chose, and the next row is what it guessed. `notes` gets ARE_THERE if the layer's own experts are in
 * memory, and HAS_CLAMPED by penstock_write_kv. `is_begun`: layer i is the one that an earlier call returned, whose
 * experts are in memory. `expert_scratch` is that of penstock_token_experts, and of a shared expert's gated_experts. */
EXPORT int64_t penstock_mixture_layers(const mixture_sweep *s, int64_t i, int is_begun, const float *hidden,
                                       const coming_experts *coming, void *expert_scratch, int *notes) {
    const int64_t width = width_of(&s->layers[0].layer), n = s->how->num_chosen;
    float *summed = s->y + width, *normed = summed + width, *shared = normed + width, guessed_scores[n];
    const expert_weights *weights[n], *guessed_weights[n];
    for (*notes = 0; i < s->num_layers; i++, hidden = s->y, is_begun = false) {
        const mixture_layer *m = s->layers + i;
        const whole_layer *l = &m->layer;
        const given_choice *given = s->given ? s->given + i : NULL;
        int64_t *chosen = s->chosen + i * n;
        if (is_begun) {
            for (int64_t e = 0; e < n; e++)
                if (!(weights[e] = m->router->experts[chosen[e]])) return i;
        } else {
            if (begin_layer(l, s->step, hidden, summed, normed)) *notes |= HAS_CLAMPED;
            const bool are_there = choose_experts(s, m->router, normed, width, given ? given->experts : NULL,
                                                  coming, chosen, s->scores, weights);
            if (given) memcpy(s->scores, given->scores, n * sizeof *s->scores);
            if (are_there) *notes |= ARE_THERE;
            else *notes &= ~ARE_THERE;
            if (m->next && !choose_experts(s, m->next, normed, width, given ? given->guess : NULL, coming,
                                           chosen + n, guessed_scores, guessed_weights))
                return i;
            if (!are_there) return i;
        }
        const bool is_added = !l->mlp && s->factor == 1.0f;
        penstock_token_experts(normed, weights, n, (int)s->kind, s->sharpness, s->limit, (int)s->step->activation_bits,
                               s->scores, is_added ? summed : NULL, s->y, expert_scratch);
        if (l->mlp) add_shared(s, m, normed, width, s->y, shared, expert_scratch);
        if (!is_added) add_branch(summed, s->y, s->factor, width, s->y);
    }
    return i;
}
