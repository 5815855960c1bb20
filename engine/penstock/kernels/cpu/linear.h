/* Products of INT8 weights and integer activations. Part of cpu.c. */
#pragma once

/* Rows of integers: one row per token ("int8"), or two ("int16": hi, lo with q = 256 hi + lo). Each row
 * is padded with zeros to a multiple of 64. */
typedef struct {
    const float *x;
    int64_t x_stride, num_tokens, in_features, padded;
    int64_t group_size, num_groups; /* of inputs that share a scale of the weights: all of them, or 16 n */
    int rows_per_token;
    int8_t *rows;
    int32_t *corrections; /* -128 * the sum of a row's integers: [num_rows, num_groups] */
    float *token_scales;
} activations;

INLINE int32_t sum_integers(ivec v) {
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}

static void quantize_token(void *context, int64_t token) {
    const activations *a = context;
    const float *x = a->x + token * a->x_stride;
    const int64_t k_end = a->in_features, whole = k_end / LANES * LANES;
    vec largest = {};
    for (int64_t k = 0; k < whole; k += LANES) largest = max_or_nan(largest, abs_vec(load(x + k)));
    if (whole < k_end) largest = max_or_nan(largest, abs_vec(load_some(x + whole, k_end - whole)));
    const float limit = a->rows_per_token == 2 ? 32512.0f : 127.0f;
    float s = max_lanes(largest) / limit;
    if (s < 1.17549435e-38f) s = 0.0f; /* subnormal: too coarse to divide by; the row counts as 0 */
    if (!(s < INFINITY)) s = NAN;      /* what is no number makes the whole row so */
    a->token_scales[token] = s;
    int8_t *hi = a->rows + token * a->rows_per_token * a->padded, *lo = hi + a->padded;
    const vec divisor = splat(s > 0.0f ? s : INFINITY), magic = splat(12582912.0f);
    int32_t *hi_sums = a->corrections + token * a->rows_per_token * a->num_groups, *lo_sums = hi_sums + a->num_groups;
    ivec hi_sum = {}, lo_sum = {};
    for (int64_t k = 0, group_end = a->group_size; k < a->padded; k += LANES) {
        vec v = k < whole ? load(x + k) : k < k_end ? load_some(x + k, k_end - k) : (vec){};
        /* |v / s| is at most 32512 (one rounding more in the worst case), so the addition of 1.5 * 2^23
         * rounds half to even and leaves the integer in the low bits. */
        ivec q = (ivec)(v / divisor + magic) - (ivec)magic;
        ivec h = q;
        if (a->rows_per_token == 2) {
            h = (q + 128) >> 8;
            ivec l = q - (h << 8);
            lo_sum += l;
            for (int i = 0; i < LANES; i++) lo[k + i] = (int8_t)l[i];
        }
        hi_sum += h;
        for (int i = 0; i < LANES; i++) hi[k + i] = (int8_t)h[i];
        if (k >= k_end || k + LANES < group_end) continue;
        group_end += a->group_size;
        *hi_sums++ = -128 * sum_integers(hi_sum);
        if (a->rows_per_token == 2) *lo_sums++ = -128 * sum_integers(lo_sum);
        hi_sum = lo_sum = (ivec){};
    }
}

typedef struct {
    const activations *a;
    const int8_t *qweight; /* [out_features, in_features] */
    const float *scale; /* [out_features, num_groups] */
    const float *bias;
    float *y; /* [num_tokens, out_features] */
    int64_t out_features, num_groups, columns_per_task;
} linear;

/* The exact integer sum, scaled: one rounding to double (53 bits hold both factors), one to float. */
INLINE float scaled(int64_t sum, float token_scale, float weight_scale) {
    return (float)((double)sum * ((double)token_scale * (double)weight_scale));
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#include "linear_vnni.h"
#else
static bool linear_fast(const linear *l, int64_t column, int64_t column_end) {
    (void)l, (void)column, (void)column_end;
    return false;
}
#endif

/* Of one token and one output channel, over some of the inputs. */
INLINE int64_t exact_sum(const activations *a, const int8_t *restrict w, int64_t token, int64_t k, int64_t k_end) {
    int64_t sum = 0;
    for (int part = 0; part < a->rows_per_token; part++) {
        const int8_t *restrict x = a->rows + (token * a->rows_per_token + part) * a->padded;
        int32_t dot = 0;
        for (int64_t i = k; i < k_end; i++) dot += (int16_t)w[i] * (int16_t)x[i];
        sum = sum * 256 + dot;
    }
    return sum;
}

/* Plain C, which the compiler vectorizes: the columns that tiles leave over, and other processors. */
static void linear_rest(const linear *l, int64_t token, int64_t token_end, int64_t column, int64_t column_end) {
    const activations *a = l->a;
    for (int64_t n = column; n < column_end; n++) {
        const int8_t *w = l->qweight + n * a->in_features;
        const float *scale = l->scale + n * l->num_groups;
        for (int64_t t = token; t < token_end; t++) {
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
    if (!linear_fast(l, begin, end)) linear_rest(l, 0, l->a->num_tokens, begin, end);
}

/* y = x W^T (+ bias). The inputs of an output channel fall into num_groups groups of equal size, each with a
 * scale of its own. `scratch` holds num_tokens * (rows_per_token * (padded + 4 * num_groups) + 4) bytes, where
 * padded is in_features rounded up to 64. */
EXPORT void penstock_int8_linear(const float *x, int64_t x_stride, int64_t num_tokens, int64_t in_features,
                                 const int8_t *qweight, const float *scale, int64_t num_groups, const float *bias,
                                 int64_t out_features, int rows_per_token, float *y, int8_t *scratch) {
    const int64_t padded = (in_features + 63) / 64 * 64, num_rows = num_tokens * rows_per_token;
    int32_t *corrections = (int32_t *)(scratch + num_rows * padded);
    /* Other sizes of groups need no sums of rows: one for all, then. */
    const int64_t size = in_features / num_groups;
    const bool has_sums = num_groups > 1 && size % 16 == 0;
    activations a = {x, x_stride, num_tokens, in_features, padded, has_sums ? size : in_features, has_sums ? num_groups : 1,
                     rows_per_token, scratch, corrections, (float *)(corrections + num_rows * num_groups)};
    for_rows(num_tokens, in_features, quantize_token, &a);
    /* Eight tasks a thread even out cores that others slow down; 64 channels keep a task worth its start. */
    const int64_t share = out_features / (8 * (atomic_load(&pool.num_wanted) + 1));
    const int64_t columns_per_task = MAX(64, share / 64 * 64);
    linear l = {&a, qweight, scale, bias, y, out_features, num_groups, columns_per_task};
    parallel((out_features + columns_per_task - 1) / columns_per_task, linear_task, &l);
}
