/* One token with AVX512-VNNI: weights are used as they lie. Part of vnni.h. */
#pragma once

/* One row of integers, or the two rows of one token, spread over lanes. Memory is the limit. So each thread reads four
 * streams, quarters of its channels: one stream alone brings fewer bytes a second. The processor's own prefetcher
 * follows each stream, and stops at the end of a page; our prefetches go on across it. */

/* Four accumulators -> in each quarter, a part of their four sums. */
INLINE __m512i sum4(__m512i a, __m512i b, __m512i c, __m512i d) {
    __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

/* The eight sums of two such vectors. */
INLINE __m256i sum8(__m512i low, __m512i high) {
    __m512i even = _mm512_shuffle_i32x4(low, high, 0x88), odd = _mm512_shuffle_i32x4(low, high, 0xdd);
    __m512i halves = _mm512_add_epi32(even, odd);
    __m256i first = _mm512_castsi512_si256(halves), second = _mm512_extracti64x4_epi64(halves, 1);
    return _mm256_add_epi32(_mm256_permute2x128_si256(first, second, 0x20),
                            _mm256_permute2x128_si256(first, second, 0x31));
}

/* The exact sums of the channels column, column + apart, ..., times their scales, to y. */
INLINE void store_exact(const linear *l, int64_t column, int64_t apart, __m256d exact, const float scales[4]) {
    const __m256d both = _mm256_mul_pd(_mm256_set1_pd(l->a->token_scales[0]), _mm256_cvtps_pd(_mm_loadu_ps(scales)));
    float y[4];
    _mm_storeu_ps(y, _mm256_cvtpd_ps(_mm256_mul_pd(exact, both)));
    for (int64_t i = 0, c = column; i < 4; i++, c += apart) l->y[c] = l->bias ? y[i] + l->bias[c] : y[i];
}

/* The same of the sums of hi (or of all) and of lo, each in four parts. */
INLINE void store_four(const linear *l, int64_t column, int64_t apart, __m512i hi, __m512i lo, const float scales[4],
                       const int rows) {
    const int32_t *corrections = l->a->corrections;
    const __m256i sums = sum8(hi, lo);
    __m256d exact = _mm256_cvtepi32_pd(_mm_add_epi32(_mm256_castsi256_si128(sums), _mm_set1_epi32(corrections[0])));
    if (rows > 1) { /* at most 40 bits */
        const __m128i second = _mm_add_epi32(_mm256_extracti128_si256(sums, 1), _mm_set1_epi32(corrections[1]));
        exact = _mm256_fmadd_pd(exact, _mm256_set1_pd(256), _mm256_cvtepi32_pd(second));
    }
    store_exact(l, column, apart, exact, scales);
}

/* The sum of all groups of one token. */
INLINE void store_total(const linear *l, int64_t column, double total) {
    const float y = (float)(total * (double)l->a->token_scales[0]);
    l->y[column] = l->bias ? y + l->bias[column] : y;
}

/* The products of a token and the channels column, column + apart, ...: four streams through the weights, which bring
 * more bytes a second than one. */
INLINE void four_channels(const linear *l, int64_t column, int64_t apart, const int rows) {
    const activations *a = l->a;
    const int64_t k_end = a->in_features, whole = k_end / 64 * 64, prefetch = tuning.prefetch_bytes;
    const __mmask64 tail = ((__mmask64)1 << (k_end - whole)) - 1;
    const int8_t *x = a->rows, *x2 = x + (rows - 1) * a->padded, *w = l->qweight + column * k_end;
    const int8_t *w0 = w, *w1 = w + apart * k_end, *w2 = w + 2 * apart * k_end, *w3 = w + 3 * apart * k_end;
    __m512i a0 = {}, a1 = {}, a2 = {}, a3 = {}, b0 = {}, b1 = {}, b2 = {}, b3 = {};
#define STEP(n, mask)                                                                              \
    {                                                                                              \
        const __m512i ws = as_unsigned(_mm512_maskz_loadu_epi8(mask, w##n + k));                   \
        a##n = _mm512_dpbusd_epi32(a##n, ws, xs);                                                  \
        if (rows > 1) b##n = _mm512_dpbusd_epi32(b##n, ws, xs2);                                   \
        _mm_prefetch(w##n + k + prefetch, _MM_HINT_T0);                                            \
        __asm__("" : "+v"(a##n), "+v"(b##n));                                                      \
    }
#define STEPS(mask)                                                                                \
    {                                                                                              \
        const __m512i xs = _mm512_loadu_si512(x + k), xs2 = _mm512_loadu_si512(x2 + k);            \
        STEP(0, mask) STEP(1, mask) STEP(2, mask) STEP(3, mask)                                    \
    }
    int64_t k = 0;
    for (; k < whole; k += 64) STEPS(~(__mmask64)0)
    if (k < k_end) STEPS(tail)
#undef STEPS
#undef STEP
    const float *scale = l->scale + column;
    const float scales[4] = {scale[0], scale[apart], scale[2 * apart], scale[3 * apart]};
    store_four(l, column, apart, sum4(a0, a1, a2, a3), sum4(b0, b1, b2, b3), scales, rows);
}

INLINE void one_token_whole(const linear *l, int64_t column, int64_t column_end, const int rows) {
    const int64_t apart = (column_end - column) / 4;
    for (int64_t i = 0; i < apart; i++) four_channels(l, column + i, apart, rows);
    linear_rest(l, column + 4 * apart, column_end);
}

/* Eight accumulators are summed up together. */
#define EACH_OF_8(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#define CLEAR(j) __m512i a##j = {}, b##j = {};

/* The sums of both halves of all eight accumulators, in order. */
INLINE __m512i sum16(__m512i low, __m512i high) {
    const __m512i order = _mm512_set_epi32(15, 11, 14, 10, 13, 9, 12, 8, 7, 3, 6, 2, 5, 1, 4, 0);
    __m512i even = _mm512_shuffle_i32x4(low, high, 0x88), odd = _mm512_shuffle_i32x4(low, high, 0xdd);
    return _mm512_permutexvar_epi32(order, _mm512_add_epi32(even, odd));
}

/* The sums of up to eight groups of one token, corrected, times their scales. All of this is exact. */
INLINE void scale_groups(const linear *l, int64_t column, int64_t group, __m256i sums, __m256i second, double *parts,
                         const int rows) {
    const int64_t n = l->num_groups;
    const int32_t *corrections = l->a->corrections + group;
    const __mmask8 mask = n - group >= 8 ? 0xff : (1 << (n - group)) - 1;
    sums = _mm256_add_epi32(sums, _mm256_maskz_loadu_epi32(mask, corrections));
    __m512d exact = _mm512_cvtepi32_pd(sums);
    if (rows > 1) {
        second = _mm256_add_epi32(second, _mm256_maskz_loadu_epi32(mask, corrections + n));
        exact = _mm512_fmadd_pd(exact, _mm512_set1_pd(256), _mm512_cvtepi32_pd(second));
    }
    const __m256 scales = _mm256_maskz_loadu_ps(mask, l->scale + column * n + group);
    _mm512_storeu_pd(parts, _mm512_mul_pd(exact, _mm512_cvtps_pd(scales)));
}

/* One token, groups of 128, 64 or (halves of vectors) 32 inputs: eight or sixteen groups of one channel, then of the
 * next one of four far channels, which are four streams here, too. Groups are added in their order. */
#define MULTIPLY_GROUP(j)                                                                          \
    for (int64_t k = begin + j * span, stop = MIN(k + span, k_end); k < stop; k += 64) {           \
        const __m512i ws = as_unsigned(_mm512_maskz_loadu_epi8(k < whole ? ~(__mmask64)0 : tail, w + k)); \
        _mm_prefetch(w + k + prefetch, _MM_HINT_T0);                                               \
        a##j = _mm512_dpbusd_epi32(a##j, ws, _mm512_loadu_si512(x + k));                           \
        if (rows > 1) b##j = _mm512_dpbusd_epi32(b##j, ws, _mm512_loadu_si512(x2 + k));            \
    }
INLINE void add_groups(const linear *l, int64_t column, int64_t g, double *total, const int rows, const bool is_half) {
    const activations *a = l->a;
    const int64_t k_end = a->in_features, whole = k_end / 64 * 64, n = l->num_groups, prefetch = tuning.prefetch_bytes;
    const __mmask64 tail = ((__mmask64)1 << (k_end - whole)) - 1;
    const int64_t span = is_half ? 64 : a->group_size, num_sums = is_half ? 16 : 8, begin = g * a->group_size;
    const int8_t *x = a->rows, *x2 = x + (rows - 1) * a->padded, *w = l->qweight + column * k_end;
    double parts[16];
    EACH_OF_8(CLEAR)
    EACH_OF_8(MULTIPLY_GROUP)
    const __m512i a_low = sum4(a0, a1, a2, a3), a_high = sum4(a4, a5, a6, a7);
    const __m512i b_low = sum4(b0, b1, b2, b3), b_high = sum4(b4, b5, b6, b7);
    if (is_half) {
        const __m512i sums = sum16(a_low, a_high), second = sum16(b_low, b_high);
        scale_groups(l, column, g, _mm512_castsi512_si256(sums), _mm512_castsi512_si256(second), parts, rows);
        if (g + 8 < n)
            scale_groups(l, column, g + 8, _mm512_extracti64x4_epi64(sums, 1), _mm512_extracti64x4_epi64(second, 1),
                         parts + 8, rows);
    } else scale_groups(l, column, g, sum8(a_low, a_high), sum8(b_low, b_high), parts, rows);
    for (int64_t i = 0; i < MIN(num_sums, n - g); i++) *total += parts[i];
}
INLINE void one_token_groups(const linear *l, int64_t column, int64_t column_end, const int rows, const bool is_half) {
    const int64_t apart = (column_end - column) / 4, num_sums = is_half ? 16 : 8;
    for (int64_t i = 0; i < apart; i++) {
        double totals[4] = {};
        for (int64_t g = 0; g < l->num_groups; g += num_sums)
            for (int j = 0; j < 4; j++) add_groups(l, column + i + j * apart, g, totals + j, rows, is_half);
        for (int j = 0; j < 4; j++) store_total(l, column + i + j * apart, totals[j]);
    }
    linear_rest(l, column + 4 * apart, column_end);
}

#include "vnni_codes.h"
#include "vnni_factors.h"
static void one_token_planes(const linear *l, int64_t column, int64_t column_end);

/* All channels of one token. */
static void one_token(const linear *l, int64_t column, int64_t column_end) {
    const bool is_split = l->a->rows_per_token == 2, is_half = l->a->group_size == 32;
    if (l->lower) one_token_planes(l, column, column_end);
    else if (l->kind == INT4_STEPS || l->kind == INT4_SHIFTS) one_token_factors(l, column, column_end);
    else if (l->kind != INT8) one_token_codes(l, column, column_end);
    else if (l->num_groups == 1 && is_split) one_token_whole(l, column, column_end, 2);
    else if (l->num_groups == 1) one_token_whole(l, column, column_end, 1);
    else if (is_split && is_half) one_token_groups(l, column, column_end, 2, true);
    else if (is_split) one_token_groups(l, column, column_end, 2, false);
    else if (is_half) one_token_groups(l, column, column_end, 1, true);
    else one_token_groups(l, column, column_end, 1, false);
}
