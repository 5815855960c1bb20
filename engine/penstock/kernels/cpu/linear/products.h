/* Whole products: how their activations lie, their tasks, and the functions that cpu.py calls. Part of linear.h. */
#pragma once

/* The blocks of inputs in which activations lie as words where they meet 4-bit codes; 0: they lie in their order. */
INLINE int64_t code_block(int64_t num_tokens, int activation_bits) {
#if HAS_VNNI
    return num_tokens == 1 && activation_bits == 16 ? CODE_BLOCK : 0;
#else
    return (void)num_tokens, (void)activation_bits, CODE_BLOCK;
#endif
}

/* The same where groups have 16 inputs: panels (panel_avx2.h) add up one group after the other. */
INLINE int64_t fine_block(int64_t num_tokens) {
#if HAS_PANELS
    if (num_tokens >= PANEL_FROM_TOKENS) return FINE_GROUP;
#endif
    return (void)num_tokens, FINE_BLOCK;
}

INLINE int64_t num_tiles_of(int64_t num_tokens, int rows_per_token) {
    return (num_tokens * rows_per_token + TILE - 1) / TILE;
}

/* Whether planes are joined as words: one token's, with AVX2 and without dot products of bytes. */
INLINE bool joins_words(const linear *l, int64_t num_tokens, int64_t in_features) {
    const int64_t size = in_features / l->num_groups;
    const bool has_blocks = l->num_groups == 1 ? size % 32 == 0 : size == 32 || size == 64 || size == 128;
    return HAS_PLANE_WORDS && num_tokens == 1 && has_blocks;
}

/* What is added to rows of `padded` activations of 16 bits: at most 64. Rows that are a multiple of 4 KB apart would
 * take each other's place in the L1 cache when the tiles of a panel meet them. */
INLINE int64_t row_padding(int64_t padded, int64_t num_tokens) {
    return HAS_PANELS && num_tokens >= 64 && padded % 2048 == 0 ? 64 : 0;
}

static void *plan_linear(linear *l, activations *a, int64_t num_tokens, int64_t in_features, int32_t offset,
                         int activation_bits, void *scratch);

/* plan_linear() of codes that become INT8: activations lie as they do for a matrix of INT8. */
static void *plan_expanded(linear *l, activations *a, int64_t num_tokens, int64_t in_features, int activation_bits,
                           void *scratch) {
    linear whole = {.out_features = l->out_features, .num_groups = 1, .kind = INT8, .row_bytes = in_features};
    void *end = plan_linear(&whole, a, num_tokens, in_features, WEIGHT_OFFSET, activation_bits, scratch);
    l->a = a, l->is_few = whole.is_few, l->is_tiled = whole.is_tiled, l->is_expanded = true;
    return end;
}

/* Decides how the activations `a` of a product lie, from `scratch` on. `x`, its stride and its order are set already.
 * Returns where they end. */
static void *plan_linear(linear *l, activations *a, int64_t num_tokens, int64_t in_features, int32_t offset,
                         int activation_bits, void *scratch) {
    /* Groups of other sizes are computed in plain C, which needs no sums of rows. */
    const int64_t size = in_features / l->num_groups;
    const bool has_groups = l->num_groups > 1 && size % 16 == 0 && size <= 128;
    const bool has_fine = l->shift && !l->lower && has_groups && size < 32; /* no other kernel of codes takes them */
    l->is_fine = HAS_FINE && has_fine && size == FINE_GROUP && in_features % FINE_BLOCK == 0;
    const bool may_step = l->kind == INT4 && !has_fine && offset == SIGNED_CODES && has_groups;
    const bool may_expand = num_tokens >= STEPS_FROM_TOKENS && in_features <= MOST_STEPPED_INPUTS;
    const bool is_stepped = is_low(l) || (may_step && (HAS_CODE_BYTES || may_expand) && seems_stepped(l));
    const bool in_bytes = takes_bytes(l, num_tokens, in_features, activation_bits, is_stepped);
    if (is_low(l) && !in_bytes) return plan_expanded(l, a, num_tokens, in_features, activation_bits, scratch);
    if (is_stepped && !in_bytes && may_expand) {
        l->kind = INT4_STEPS, l->is_grouped = false;
        for (int i = 0; i < 16; i++) l->table[i] += WEIGHT_OFFSET - offset;
        offset = WEIGHT_OFFSET;
    } else if (l->kind == INT4_TABLE && has_groups && size >= 32 && num_tokens == 1 && seems_shifted(l, in_features))
        l->kind = INT4_SHIFTS, l->is_grouped = false;
    const bool by_factors = l->kind == INT4_STEPS || l->kind == INT4_SHIFTS;
    const bool sums_groups = has_groups && !by_factors, in_amx = !has_fine && takes_tiles(l, num_tokens, size);
    const bool in_lanes = !in_amx && takes_lanes(l, num_tokens, activation_bits / 8), in_tiles = in_amx || in_lanes;
    const bool has_words = l->lower ? joins_words(l, num_tokens, in_features)
                                    : l->kind == INT4 || l->kind == INT4_TABLE;
    const bool may_block = has_words && !has_fine && !in_bytes && !in_tiles;
    const int64_t words = l->is_fine ? fine_block(num_tokens) : may_block ? code_block(num_tokens, activation_bits) : 0;
    const int rows_per_token = HAS_BYTES && activation_bits == 16 && !words ? 2 : 1;
    const bool has_halves = by_factors || (l->lower && l->num_groups == 1);
    const bool is_halved = in_tiles ? in_amx && l->kind != INT8 : HAS_VNNI && has_halves && num_tokens == 1;
    const bool has_blocks = is_halved && by_factors; /* the last block is filled up with zeros */
    const int64_t whole = in_tiles || has_blocks ? (in_features + 127) / 128 * 128 : (in_features + 63) / 64 * 64;
    const int64_t padded = is_low(l) ? whole_low_blocks(l, in_features) : whole + row_padding(whole, num_tokens);
    const int64_t num_rows = in_tiles ? num_tiles_of(num_tokens, rows_per_token) * TILE : num_tokens * rows_per_token;
    a->num_tokens = num_tokens, a->in_features = in_features, a->padded = padded;
    a->group_size = sums_groups ? size : in_features, a->num_groups = sums_groups ? l->num_groups : 1;
    a->rows_per_token = rows_per_token, a->words = words, a->in_bytes = in_bytes;
    a->is_split = activation_bits == 16, a->in_tiles = in_tiles, a->offset = offset;
    a->halved_by = !is_halved ? 0 : has_halves ? 128 : size;
    a->halved = !is_halved ? 0 : has_blocks ? padded : in_amx ? in_features : in_features / 128 * 128;
    a->limit = activation_bits == 16 ? 32512.0f : 127.0f;
    a->rows = scratch;
    a->corrections = (int32_t *)((int8_t *)scratch + num_rows * padded * (words ? 2 : sizeof(integer)));
    a->token_scales = (float *)(a->corrections + num_rows * l->num_groups);
    l->is_tiled = l->num_groups == 1 || (has_groups && (l->is_fine || !has_fine));
    l->has_steps = in_bytes && is_stepped;
    l->a = a;
    l->is_few = l->is_tiled && !in_tiles && takes_few(l);
    a->flip = in_lanes || (l->is_few && num_tokens > 1) ? 0x80 : 0;
    return a->token_scales + num_tokens;
}

/* Rows of activations, or tiles of rows, are quantized one by one. */
static int64_t num_quantized(const activations *a) {
    return a->in_tiles ? num_tiles_of(a->num_tokens, a->rows_per_token) : a->num_tokens;
}
static void quantize_some(void *context, int64_t index) {
    const activations *a = context;
    if (a->in_tiles) quantize_tile(context, index);
    else quantize_token(context, index);
}

/* Tasks balance cores that other work slows down: eight a thread with one token, whose tasks are long streams, else 24.
 * A task of 64 channels is worth starting, or of 48, the channels of whole strips, where lanes are rows. */
static int64_t task_columns(int64_t num_columns, const activations *a) {
    const int64_t least = a->in_tiles && a->flip ? LANE_TASK : 64;
    const int64_t num_tasks = (a->num_tokens > 1 ? 24 : 8) * (atomic_load(&pool.num_wanted) + 1);
    return MAX(least, num_columns / num_tasks / least * least);
}

/* Quantizes the activations into `scratch`, and computes what `l` has of weights and results. */
static void compute_linear(linear *l, const float *x, int64_t x_stride, int64_t num_tokens, int64_t in_features,
                           int32_t offset, int activation_bits, void *scratch) {
    if (num_tokens == 0 || l->out_features == 0) return; /* the head has no rows in a step that ends no prompt */
    activations a = {.x = x, .x_stride = x_stride};
    plan_linear(l, &a, num_tokens, in_features, offset, activation_bits, scratch);
    const int64_t quantized = num_quantized(&a);
    for_rows(quantized, num_tokens / quantized * in_features, quantize_some, &a);
    l->columns_per_task = task_columns(l->out_features, &a);
    parallel_on(num_tokens == 1 && tuning.read_threads ? tuning.read_threads : INT_MAX,
                (l->out_features + l->columns_per_task - 1) / l->columns_per_task, linear_task, l);
}

/* y = x W^T (+ bias). The inputs of an output channel form num_groups groups of equal size, each with a scale of
 * its own. `scratch` holds num_tokens * (2 * padded + 8 * num_groups + 4) bytes, where padded is in_features rounded up
 * to 256, and 64 more, and num_tokens is rounded up to 8 if it is more than 1. */
EXPORT void penstock_int8_linear(const float *x, int64_t x_stride, int64_t num_tokens, int64_t in_features,
                                 const int8_t *qweight, const float *scale, int64_t num_groups, const float *bias,
                                 int64_t out_features, int activation_bits, float *y, void *scratch) {
    linear l = {.qweight = qweight, .scale = scale, .bias = bias, .y = y, .out_features = out_features,
                .num_groups = num_groups, .kind = INT8, .row_bytes = in_features, .is_grouped = num_groups > 1};
    compute_linear(&l, x, x_stride, num_tokens, in_features, WEIGHT_OFFSET, activation_bits, scratch);
}

/* A product with weights in planes, but for bias and results: the number of inputs is even, and channels of the lower
 * plane lie `lower_bytes` apart. */
static linear planes_linear(const int8_t *upper, const uint8_t *lower, int64_t lower_bytes, const float *scale,
                            int64_t num_groups, int64_t in_features, int64_t out_features) {
    return (linear){.qweight = upper, .lower = lower, .lower_bytes = lower_bytes, .scale = scale,
                    .out_features = out_features, .num_groups = num_groups, .kind = INT8, .shift = 1,
                    .row_bytes = in_features / 2, .is_grouped = num_groups > 1};
}

/* The same as penstock_int8_linear with weights in planes. */
EXPORT void penstock_planes_linear(const float *x, int64_t x_stride, int64_t num_tokens, int64_t in_features,
                                   const int8_t *upper, const uint8_t *lower, int64_t lower_bytes, const float *scale,
                                   int64_t num_groups, const float *bias, int64_t out_features, int activation_bits,
                                   float *y, void *scratch) {
    linear l = planes_linear(upper, lower, lower_bytes, scale, num_groups, in_features, out_features);
    l.bias = bias, l.y = y;
    compute_linear(&l, x, x_stride, num_tokens, in_features, WEIGHT_OFFSET, activation_bits, scratch);
}

/* A product with codes, which stand for the 16 integers of `table` (8 or 4 of them have fewer bits). Minima belong to codes that stand for
 * themselves. Sets what is added to the integers so that they are unsigned. */
static linear int4_linear(const int8_t *codes, const int8_t *table, group_numbers numbers, int64_t num_groups,
                          int64_t in_features, int64_t out_features, int32_t *offset) {
    const bool has_minimum = numbers.minimum || numbers.sub_minimum;
    if (numbers.bits < 4) { /* groups have 32 or 64 inputs, and scales are steps */
        *offset = SIGNED_CODES;
        linear low = {.qweight = codes, .out_features = out_features, .num_groups = num_groups, .kind = INT4,
                      .is_grouped = true, .numbers = numbers};
        low.row_bytes = whole_low_blocks(&low, in_features) / 8 * numbers.bits;
        return low;
    }
    bool is_plain = true;
    int least = 0, most = 0;
    for (int i = 0; i < 16; i++) {
        is_plain &= table[i] == table[0] + i;
        least = MIN(least, table[i]), most = MAX(most, table[i]);
    }
    const bool is_small = HAS_CODE_BYTES && !is_plain && most - least < 32;
    /* Corrections of groups with minima are the sums themselves, since the codes are unsigned already. */
    *offset = has_minimum ? 1 : is_plain ? -table[0] : is_small ? -least : WEIGHT_OFFSET;
    linear l = {.qweight = codes, .out_features = out_features, .num_groups = num_groups,
                .kind = is_plain ? INT4 : INT4_TABLE, .shift = 1, .row_bytes = in_features / 2, .is_grouped = true,
                .has_minimum = has_minimum, .has_small_table = is_small, .numbers = numbers};
    for (int i = 0; i < 16; i++) l.table[i] = (uint8_t)(table[i] + (has_minimum ? 0 : *offset));
    return l;
}

/* The same as penstock_int8_linear with codes of 4, 3 or 2 bits. Groups have 16, 32, 64 or 128 inputs; those of codes of
 * fewer bits than 4 have 32 or 64. */
EXPORT void penstock_int4_linear(const float *x, int64_t x_stride, int64_t num_tokens, int64_t in_features,
                                 const int8_t *codes, const int8_t *table, const void *scale, const void *minimum,
                                 const int8_t *sub_scale, const uint8_t *sub_minimum, int dtype, int bits,
                                 int64_t block_groups, int64_t num_groups, const float *bias, int64_t out_features,
                                 int activation_bits, float *y, void *scratch) {
    const group_numbers numbers = {scale, minimum, sub_scale, sub_minimum, block_groups, dtype, bits};
    int32_t offset;
    linear l = int4_linear(codes, table, numbers, num_groups, in_features, out_features, &offset);
    l.bias = bias, l.y = y;
    compute_linear(&l, x, x_stride, num_tokens, in_features, offset, activation_bits, scratch);
}

/* Whether 8-bit activations have products of their own; else they are computed as 16-bit ones. */
EXPORT int penstock_multiplies_bytes(void) { return HAS_BYTES; }

/* Whether products with many tokens use AMX: the processor has AMX, the system lends its registers, and a trial
 * computes as expected. */
EXPORT int penstock_has_tiles(void) {
    return has_tiles;
}
