/* Experts of a layer, computed together: down(f(gate x) * up x) of each expert and its rows. Part of cpu.c.
 *
 * All threads share the work of all experts, in four regions of the pool: inputs are quantized, multiplied by gate and
 * up, activated and quantized, and multiplied by down. An expert's products are those of penstock_int8_linear and
 * penstock_int4_linear with the same rows, so that their bits are the same. */
#pragma once

/* A matrix as expert_records.py describes it. */
typedef struct {
    const int8_t *qweight; /* of planes the upper one */
    const int8_t *table; /* the integers of 16 codes; NULL: the weights are INT8 */
    group_numbers numbers; /* INT8: `scale` alone, float32 */
    int64_t num_groups, in_features, out_features;
    const uint8_t *lower; /* INT8 in planes: the lower one, whose channels lie `lower_bytes` apart; else NULL */
    int64_t lower_bytes;
} expert_matrix;

typedef struct {
    const expert_matrix *gate_up, *down;
    const float *gate_up_bias, *down_bias;
} expert_weights;

typedef struct {
    const expert_weights *weights;
    int64_t first, end; /* rows */
} expert;

/* A product of one expert. */
typedef struct {
    linear l;
    activations a;
    int64_t first_quantized, first_task; /* of the region that quantizes, and of the one that multiplies */
    int64_t first_row;                   /* of all experts' rows */
    bool is_shared;                      /* another product quantizes the same row */
} product;

typedef struct {
    product *products;
    int64_t num_products, num_quantized, num_tasks;
    const activation *gate;
} products;

/* What expert_records.py reserves for a product. */
enum { PRODUCT_BYTES = 512, ALIGNED = 64 };
_Static_assert(sizeof(product) <= PRODUCT_BYTES, "expert_records.py reserves too little");

static void *aligned_at(void *p) { return (void *)(((uintptr_t)p + ALIGNED - 1) / ALIGNED * ALIGNED); }

static void *plan_product(product *p, const expert_matrix *m, const float *bias, float *y, int64_t num_tokens,
                          int activation_bits, void *scratch) {
    int32_t offset = WEIGHT_OFFSET;
    if (m->table)
        p->l = int4_linear(m->qweight, m->table, m->numbers, m->num_groups, m->in_features, m->out_features, &offset);
    else if (m->lower)
        p->l = planes_linear(m->qweight, m->lower, m->lower_bytes, m->numbers.scale, m->num_groups, m->in_features,
                             m->out_features);
    else
        p->l = (linear){.qweight = m->qweight, .scale = m->numbers.scale, .out_features = m->out_features,
                        .num_groups = m->num_groups, .kind = INT8, .row_bytes = m->in_features,
                        .is_grouped = m->num_groups > 1};
    p->l.bias = bias, p->l.y = y;
    return plan_linear(&p->l, &p->a, num_tokens, m->in_features, offset, activation_bits, aligned_at(scratch));
}

/* Whether two products take one token's activations in the same form. */
static bool takes_same(const activations *a, const activations *b) {
    return a->num_tokens == 1 && b->num_tokens == 1 && a->order[0] == b->order[0] && a->in_features == b->in_features &&
           a->group_size == b->group_size && a->words == b->words && a->in_bytes == b->in_bytes &&
           a->halved == b->halved && a->offset == b->offset;
}

/* Divides the work into tasks. */
static void plan_tasks(products *all) {
    int64_t columns = 0;
    for (int64_t i = 0; i < all->num_products; i++) columns += all->products[i].l.out_features;
    all->num_quantized = all->num_tasks = 0;
    for (int64_t i = 0; i < all->num_products; i++) {
        product *p = all->products + i;
        const int64_t at_once = task_columns(columns, p->l.a);
        p->l.columns_per_task = at_once, p->l.first_task = p->first_task = all->num_tasks;
        p->first_quantized = all->num_quantized;
        all->num_quantized += p->is_shared ? 0 : num_quantized(&p->a);
        all->num_tasks += (p->l.out_features + at_once - 1) / at_once;
    }
}

static void quantize_inputs_of(void *context, int64_t index) {
    const products *all = context;
    int64_t i = all->num_products - 1;
    while (all->products[i].first_quantized > index || all->products[i].is_shared) i--;
    product *p = all->products + i;
    const int64_t own = index - p->first_quantized;
    if (all->gate) {
        const int64_t at_once = p->a.in_tiles ? TILE / p->a.rows_per_token : 1,
                      end = MIN((own + 1) * at_once, p->a.num_tokens);
        for (int64_t t = own * at_once; t < end; t++) activation_row((void *)all->gate, p->first_row + t);
    }
    quantize_some(&p->a, own);
}

static void multiply_some(void *context, int64_t task) {
    const products *all = context;
    int64_t i = all->num_products - 1;
    while (all->products[i].first_task > task) i--;
    linear_task(&all->products[i].l, task - all->products[i].first_task);
}

static void compute_products(products *all, int64_t num_rows, int64_t num_threads) {
    plan_tasks(all);
    for_rows(all->num_quantized, all->products[0].a.in_features * num_rows / MAX(1, all->num_quantized),
             quantize_inputs_of, all);
    parallel_on(num_threads, all->num_tasks, multiply_some, all);
}

/* Row r of an expert is row tokens[r] of x; the expert's result for it is row r of y. All experts have matrices of the
 * same sizes. expert_records.py says how large `scratch` is. */
static void gated_experts(const float *x, int64_t x_stride, const int64_t *tokens, const expert *experts,
                                   int64_t num_experts, int kind, float sharpness, float limit, int activation_bits,
                                   float *y, void *scratch) {
    const int64_t hidden = experts[0].weights->down->out_features, width = experts[0].weights->down->in_features;
    int64_t num_rows = 0;
    for (int64_t i = 0; i < num_experts; i++) num_rows += experts[i].end - experts[i].first;
    products all = {.products = aligned_at(scratch), .num_products = num_experts};
    float *gate_up = aligned_at(all.products + num_experts), *inner = gate_up + 2 * width * num_rows;
    void *const rows = inner + width * num_rows;
    const activation gate = {gate_up, inner, 2 * width, width, kind, true, sharpness, limit};
    const int64_t threads = num_rows == num_experts && tuning.read_threads ? tuning.read_threads : INT_MAX;
    void *to = rows;
    int64_t row = 0;
    for (int64_t i = 0; i < num_experts; row += experts[i].end - experts[i].first, i++) {
        const expert *e = experts + i;
        product *p = all.products + i;
        *p = (product){.a = {.x = x, .x_stride = x_stride, .order = tokens + e->first}, .first_row = row};
        void *end = plan_product(p, e->weights->gate_up, e->weights->gate_up_bias, gate_up + 2 * width * row,
                                 e->end - e->first, activation_bits, to);
        p->is_shared = i > 0 && takes_same(&all.products[0].a, &p->a);
        if (p->is_shared) p->l.a = &all.products[0].a;
        else to = end;
    }
    compute_products(&all, num_rows, threads);
    all.gate = &gate, to = rows;
    for (int64_t i = 0; i < num_experts; i++) {
        const expert *e = experts + i;
        product *p = all.products + i;
        const int64_t first = p->first_row;
        *p = (product){.a = {.x = inner + width * first, .x_stride = width}, .first_row = first};
        to = plan_product(p, e->weights->down, e->weights->down_bias, y + hidden * e->first, e->end - e->first,
                          activation_bits, to);
    }
    compute_products(&all, num_rows, threads);
}

/* Says of a read whether its bytes are there (1), will never be (-1), or are on their way and the caller is not patient
 * (0). */
typedef int (*wait_fn)(void *reads, int ticket, int is_patient);

/* gated_experts() of the first `num_there` experts, and then of the others in their order, each as soon as the read
 * with its ticket (below 0: none) has ended. Returns how many experts were computed: all up to the first one whose read
 * has failed. */
EXPORT int64_t penstock_gated_experts(const float *x, int64_t x_stride, const int64_t *tokens, const expert *experts,
                                      int64_t num_experts, int kind, float sharpness, float limit, int activation_bits,
                                      float *y, void *scratch, int64_t num_there, const int32_t *tickets, wait_fn wait,
                                      void *reads) {
    for (int64_t first = 0, end = num_there; first < num_experts; first = end) {
        for (; end < num_experts; end++) {
            const int ticket = tickets[end - num_there];
            if (ticket >= 0 && wait(reads, ticket, end == first) <= 0) break;
        }
        if (end == first) return first;
        gated_experts(x, x_stride, tokens, experts + first, end - first, kind, sharpness, limit, activation_bits, y,
                      scratch);
    }
    return num_experts;
}

typedef struct {
    const float *parts, *scores, *onto;
    const int64_t *rows;
    float *y;
    int64_t num_chosen, width;
} weighted_sum;

/* Ranks are added one after the other, and their sum to what is there; a product rounds before it is added. */
static void weighted_sum_row(void *context, int64_t token) {
    const weighted_sum *w = context;
    const int64_t *rows = w->rows + token * w->num_chosen;
    for (int64_t i = 0; i < w->width; i += LANES) {
        const int64_t n = MIN(LANES, w->width - i);
        vec sum = {};
        for (int64_t r = 0; r < w->num_chosen; r++) {
            const float *part = w->parts + rows[r] * w->width + i;
            vec own = n == LANES ? load(part) : load_some(part, n);
            if (w->scores) own *= splat(w->scores[token * w->num_chosen + r]);
            IN_REGISTER(own); /* GCC would make one operation of both */
            sum = r ? sum + own : own;
        }
        if (w->onto) {
            const float *there = w->onto + token * w->width + i;
            sum += n == LANES ? load(there) : load_some(there, n);
        }
        memcpy(w->y + token * w->width + i, &sum, n * sizeof(float));
    }
}

/* y[t] = onto[t] + the sum of parts[rows[t, r]] * scores[t, r] over r, of [num_tokens, num_chosen] rows. `scores` and
 * `onto` may be NULL. */
EXPORT void penstock_weighted_sum(const float *parts, const int64_t *rows, const float *scores, const float *onto,
                                  int64_t num_tokens, int64_t num_chosen, int64_t width, float *y) {
    weighted_sum w = {parts, scores, onto, rows, y, num_chosen, width};
    for_rows(num_tokens, num_chosen * width, weighted_sum_row, &w);
}

/* The sum of one token's experts, best first, times their scores: penstock_weighted_sum of what gated_experts gives.
 * `scratch` has room for that of gated_experts, for the results of all experts, and for what token_scratch_bytes() of
 * kernels/expert_records.py says of each expert. */
EXPORT void penstock_token_experts(const float *x, const expert_weights *const *weights, int64_t num_experts, int kind,
                                   float sharpness, float limit, int activation_bits, const float *scores,
                                   const float *onto, float *y, void *scratch) {
    const int64_t width = weights[0]->down->out_features;
    expert *experts = scratch;
    int64_t *rows = (int64_t *)(experts + num_experts), *tokens = rows + num_experts;
    float *parts = (float *)(tokens + num_experts);
    for (int64_t i = 0; i < num_experts; i++) experts[i] = (expert){weights[i], i, i + 1}, rows[i] = i, tokens[i] = 0;
    gated_experts(x, weights[0]->gate_up->in_features, tokens, experts, num_experts, kind, sharpness, limit,
                  activation_bits, parts, parts + num_experts * width);
    penstock_weighted_sum(parts, rows, scores, onto, 1, num_experts, width, y);
}
