/* Products of INT8 weights and integer activations. Part of cpu.c. */
#pragma once

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define HAS_VNNI 1
typedef int8_t integer;
#else
#define HAS_VNNI 0
typedef int16_t integer;
#endif

/* Rows of integers, padded with zeros to a multiple of 64. A token has one row; with VNNI and "int16" a token has two
 * INT8 rows, hi and lo, where q = 256 hi + lo. */
typedef struct {
    const float *x;
    int64_t x_stride, num_tokens, in_features, padded;
    int64_t group_size, num_groups; /* of inputs that share a scale of the weights: all of them, or 16 n */
    int rows_per_token;
    float limit;
    integer *rows;
    int32_t *corrections; /* -128 * the sum of a row's integers: [num_rows, num_groups] */
    float *token_scales;
} activations;

/* These are plain loops, which GCC vectorizes for any build. With GCC's vector types, comparisons and conversions
 * of vectors wider than a register become scalar. */
INLINE int32_t bits_of(float f) {
    int32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

/* One group of a token's inputs. |x / divisor| is at most 32512 (in the worst case one rounding more). So adding
 * 1.5 * 2^23 rounds half to even and leaves the integer in the low bits. */
INLINE void quantize_group(const float *restrict x, int64_t size, float divisor, integer *restrict hi,
                           integer *restrict lo, int32_t *hi_sum, int32_t *lo_sum, const bool is_split) {
    const float magic = 12582912.0f;
    const int32_t magic_bits = bits_of(magic);
    uint32_t sum = 0, sum_of_lo = 0; /* integers of a row with NaN wrap around, and don't matter */
    for (int64_t k = 0; k < size; k++) {
        const int32_t q = bits_of(x[k] / divisor + magic) - magic_bits;
        const int32_t h = is_split ? (q + 128) >> 8 : q, l = q - h * 256;
        hi[k] = (integer)h, sum += (uint32_t)h;
        if (is_split) lo[k] = (integer)l, sum_of_lo += (uint32_t)l;
    }
    *hi_sum = (int32_t)(-128u * sum);
    if (is_split) *lo_sum = (int32_t)(-128u * sum_of_lo);
}

static void quantize_token(void *context, int64_t token) {
    const activations *a = context;
    const float *x = a->x + token * a->x_stride;
    const int64_t k_end = a->in_features, size = a->group_size, n = a->num_groups, row = token * a->rows_per_token;
    int32_t largest = 0; /* the bits have the order of the numbers; NaN is the largest */
    for (int64_t k = 0; k < k_end; k++) largest = MAX(largest, bits_of(x[k]) & 0x7fffffff);
    float s;
    memcpy(&s, &largest, 4);
    s /= a->limit;
    if (s < 1.17549435e-38f) s = 0.0f; /* subnormal, too coarse to divide by: the row counts as 0 */
    if (!(s < INFINITY)) s = NAN;      /* NaN or infinity makes the whole row NaN */
    a->token_scales[token] = s;
    const float divisor = s > 0.0f ? s : INFINITY;
    integer *hi = a->rows + row * a->padded, *lo = hi + a->padded;
    int32_t *sums = a->corrections + row * n;
    for (int64_t g = 0, k = 0; g < n; g++, k += size)
        if (a->rows_per_token == 2)
            quantize_group(x + k, size, divisor, hi + k, lo + k, sums + g, sums + n + g, true);
        else quantize_group(x + k, size, divisor, hi + k, NULL, sums + g, NULL, false);
    for (int part = 0; part < a->rows_per_token; part++)
        memset(hi + part * a->padded + k_end, 0, (a->padded - k_end) * sizeof(integer));
}

typedef struct {
    const activations *a;
    const int8_t *qweight; /* [out_features, in_features] */
    const float *scale; /* [out_features, num_groups] */
    const float *bias;
    float *y; /* [num_tokens, out_features] */
    int64_t out_features, num_groups, columns_per_task;
    bool is_tiled; /* one group, or groups that tiles can compute */
} linear;

/* The exact integer sum, scaled. It rounds once to double (53 bits hold both factors) and once to float. */
INLINE float scaled(int64_t sum, float token_scale, float weight_scale) {
    return (float)((double)sum * ((double)token_scale * (double)weight_scale));
}

/* The first of the channels that a thread at `column` most likely computes next. */
INLINE int64_t next_column(const linear *l, int64_t column, int64_t column_end) {
    return column < column_end ? column : atomic_load(&pool.next) * l->columns_per_task;
}

#if HAS_VNNI
#include "linear_vnni.h"
#elif defined(__x86_64__)
#include "linear_int16.h"
#else
static int64_t linear_fast(const linear *l, int64_t column, int64_t column_end) {
    return (void)l, (void)column_end, column;
}
#endif

/* The sum of one token and one output channel, over some of the inputs. */
INLINE int64_t exact_sum(const activations *a, const int8_t *restrict w, int64_t token, int64_t k, int64_t k_end) {
    int64_t sum = 0;
    for (int part = 0; part < a->rows_per_token; part++) {
        const integer *restrict x = a->rows + (token * a->rows_per_token + part) * a->padded;
        int64_t dot = 0;
        for (int64_t i = k; i < k_end;) {
            int32_t some = 0; /* 256 products of at most 2^15 * 2^7 */
            for (const int64_t stop = MIN(i + 256, k_end); i < stop; i++) some += (int16_t)w[i] * (int16_t)x[i];
            dot += some;
        }
        sum = sum * 256 + dot;
    }
    return sum;
}

/* Plain C, which the compiler vectorizes, for the columns that tiles leave over and for other processors. */
static void linear_rest(const linear *l, int64_t column, int64_t column_end) {
    const activations *a = l->a;
    for (int64_t n = column; n < column_end; n++) {
        const int8_t *w = l->qweight + n * a->in_features;
        const float *scale = l->scale + n * l->num_groups;
        for (int64_t t = 0; t < a->num_tokens; t++) {
            float y;
            if (l->num_groups == 1) y = scaled(exact_sum(a, w, t, 0, a->in_features), a->token_scales[t], *scale);
            else {
                const int64_t size = a->in_features / l->num_groups;
                double total = 0;
                for (int64_t g = 0; g < l->num_groups; g++)
                    total += (double)exact_sum(a, w, t, g * size, (g + 1) * size) * (double)scale[g];
                y = (float)(total * (double)a->token_scales[t]);
            }
            l->y[t * l->out_features + n] = l->bias ? y + l->bias[n] : y;
        }
    }
}

static void linear_task(void *context, int64_t task) {
    const linear *l = context;
    const int64_t begin = task * l->columns_per_task, end = MIN(begin + l->columns_per_task, l->out_features);
    linear_rest(l, linear_fast(l, begin, end), end);
}

/* y = x W^T (+ bias). The inputs of an output channel form num_groups groups of equal size, each with a scale of
 * its own. `scratch` holds num_tokens * (2 * padded + 8 * num_groups + 4) bytes, where padded is
 * in_features rounded up to 64. */
EXPORT void penstock_int8_linear(const float *x, int64_t x_stride, int64_t num_tokens, int64_t in_features,
                                 const int8_t *qweight, const float *scale, int64_t num_groups, const float *bias,
                                 int64_t out_features, int activation_bits, float *y, void *scratch) {
    if (num_tokens == 0) return; /* the head has no rows in a step that ends no prompt */
    const int rows_per_token = HAS_VNNI && activation_bits == 16 ? 2 : 1;
    const float limit = activation_bits == 16 ? 32512.0f : 127.0f;
    const int64_t padded = (in_features + 63) / 64 * 64, num_rows = num_tokens * rows_per_token;
    int32_t *corrections = (int32_t *)((integer *)scratch + num_rows * padded);
    float *token_scales = (float *)(corrections + num_rows * num_groups);
    /* Groups of other sizes are computed in plain C, which needs no sums of rows. */
    const int64_t size = in_features / num_groups;
    const bool is_grouped = num_groups > 1 && size % 16 == 0 && size <= 128;
    activations a = {x, x_stride, num_tokens, in_features, padded, is_grouped ? size : in_features,
                     is_grouped ? num_groups : 1, rows_per_token, limit, scratch, corrections, token_scales};
    for_rows(num_tokens, in_features, quantize_token, &a);
    /* Eight tasks a thread balance cores that other work slows down. A task of 64 channels is worth starting. */
    const int64_t share = out_features / (8 * (atomic_load(&pool.num_wanted) + 1));
    const int64_t columns_per_task = MAX(64, share / 64 * 64);
    const bool is_tiled = num_groups == 1 || is_grouped;
    linear l = {&a, qweight, scale, bias, y, out_features, num_groups, columns_per_task, is_tiled};
    parallel((out_features + columns_per_task - 1) / columns_per_task, linear_task, &l);
}

/* Whether products with many tokens use AMX: the processor has AMX, the system lends its registers, and a trial
 * computes as expected. */
EXPORT int penstock_has_tiles(void) {
#if HAS_VNNI
    return has_tiles;
#else
    return 0;
#endif
}
