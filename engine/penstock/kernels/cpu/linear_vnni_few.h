/* Few rows with AVX512-VNNI: they stay in the L1 cache while the weights pass by once, as they are. Part of
 * linear_vnni.h. */
#pragma once

/* One row of integers, or the two of one token, spread over lanes: memory is the limit, so each thread reads its
 * weights from front to end, which is what the processor's own prefetcher follows best; ours goes ahead across
 * the ends of pages, where it stops. */
enum { PREFETCH_BYTES = 2048 };

INLINE int32_t sum_lanes_epi32(__m512i a, __m512i b, __m512i c, __m512i d) {
    return _mm512_reduce_add_epi32(_mm512_add_epi32(_mm512_add_epi32(a, b), _mm512_add_epi32(c, d)));
}

INLINE void one_token(const linear *l, int64_t token, int64_t column, int64_t column_end, const int rows) {
    const activations *a = l->a;
    const int64_t k_end = a->in_features, whole = k_end / 64 * 64;
    const __mmask64 tail = ((__mmask64)1 << (k_end - whole)) - 1;
    const int8_t *x = a->rows + token * rows * a->padded, *x2 = x + (rows - 1) * a->padded;
    const int32_t *corrections = a->corrections + token * rows;
    for (; column < column_end; column++) {
        const int8_t *w = l->qweight + column * k_end;
        const __m512i zero = _mm512_setzero_si512();
        __m512i a0 = zero, a1 = zero, a2 = zero, a3 = zero, b0 = zero, b1 = zero, b2 = zero, b3 = zero;
        int64_t k = 0;
        for (; k + 256 <= whole; k += 256) {
#define STEP(n)                                                                                    \
    {                                                                                              \
        __m512i ws = as_unsigned(_mm512_loadu_si512(w + k + 64 * n));                              \
        _mm_prefetch(w + k + 64 * n + PREFETCH_BYTES, _MM_HINT_T0);                                \
        a##n = _mm512_dpbusd_epi32(a##n, ws, _mm512_loadu_si512(x + k + 64 * n));                  \
        if (rows > 1) b##n = _mm512_dpbusd_epi32(b##n, ws, _mm512_loadu_si512(x2 + k + 64 * n));   \
    }
            STEP(0) STEP(1) STEP(2) STEP(3)
#undef STEP
        }
        for (; k < k_end; k += 64) {
            __m512i ws = as_unsigned(_mm512_maskz_loadu_epi8(k < whole ? ~(__mmask64)0 : tail, w + k));
            a0 = _mm512_dpbusd_epi32(a0, ws, _mm512_loadu_si512(x + k));
            if (rows > 1) b0 = _mm512_dpbusd_epi32(b0, ws, _mm512_loadu_si512(x2 + k));
        }
        int64_t sum = (int32_t)((uint32_t)sum_lanes_epi32(a0, a1, a2, a3) + (uint32_t)corrections[0]);
        if (rows > 1)
            sum = sum * 256 + (int32_t)((uint32_t)sum_lanes_epi32(b0, b1, b2, b3) + (uint32_t)corrections[1]);
        float y = scaled(sum, a->token_scales[token], l->scale[column]);
        l->y[token * l->out_features + column] = l->bias ? y + l->bias[column] : y;
    }
}

/* More rows: tiles of up to six of them by four channels; each weight meets all of them while it is in a
 * register. */
enum { COLUMNS = 4 };

/* Four accumulators -> their four sums. */
INLINE __m128i sum4(__m512i a, __m512i b, __m512i c, __m512i d) {
    __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    __m512i abcd = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(abcd), _mm512_extracti64x4_epi64(abcd, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

/* A token's exact sums in one group, from its accumulators. */
INLINE __m256d exact4(const activations *a, int64_t row, int64_t group, __m512i sums[][COLUMNS], bool is_split) {
    __m256d exact = {};
    for (int i = 0; i <= is_split; i++) {
        __m128i total = sum4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
        total = _mm_add_epi32(total, _mm_set1_epi32(a->corrections[(row + i) * a->num_groups + group]));
        exact = _mm256_fmadd_pd(exact, _mm256_set1_pd(256), _mm256_cvtepi32_pd(total));
    }
    return exact;
}
INLINE void store4(const linear *l, int64_t token, int64_t column, __m256d sums, __m256d scales) {
    __m128 y = _mm256_cvtpd_ps(_mm256_mul_pd(sums, scales));
    if (l->bias) y = _mm_add_ps(y, _mm_loadu_ps(l->bias + column));
    _mm_storeu_ps(l->y + token * l->out_features + column, y);
}
INLINE __m256d scales4(const linear *l, int64_t column, int64_t group) {
    const int64_t n = l->num_groups;
    const float *scale = l->scale + column * n + group;
    return _mm256_set_pd(scale[3 * n], scale[2 * n], scale[n], scale[0]);
}

/* The asm keeps accumulators in registers: GCC needs it with six rows, and is slower by a fifth with fewer. */
#define MULTIPLY_VECTOR(i)                                                                         \
    {                                                                                              \
        __m512i xs = _mm512_loadu_si512(x + i * a->padded + k);                                    \
        a##i = _mm512_dpbusd_epi32(a##i, wa, xs), b##i = _mm512_dpbusd_epi32(b##i, wb, xs);        \
        c##i = _mm512_dpbusd_epi32(c##i, wc, xs), d##i = _mm512_dpbusd_epi32(d##i, wd, xs);        \
        if (is_full) __asm__("" : "+v"(a##i), "+v"(b##i), "+v"(c##i), "+v"(d##i));                 \
    }
#define CLEAR(i) __m512i a##i = {}, b##i = {}, c##i = {}, d##i = {};
#define HAND_OVER(i) sums[i][0] = a##i, sums[i][1] = b##i, sums[i][2] = c##i, sums[i][3] = d##i;
#define WEIGHTS(mask, j) as_unsigned(_mm512_maskz_loadu_epi8(mask, w + j * k_end + k))
#define DEFINE_FEW(R)                                                                              \
    INLINE void dots_##R(const linear *l, int64_t row, int64_t column, int64_t k, int64_t stop, const ahead *next, \
                         __m512i sums[R][COLUMNS]) {                                               \
        const activations *a = l->a;                                                               \
        const int64_t k_end = a->in_features;                                                      \
        const int8_t *x = a->rows + row * a->padded, *w = l->qweight + column * k_end;             \
        const bool is_full = R == 6;                                                               \
        ROWS_##R(CLEAR)                                                                            \
        for (; k + 64 <= stop; k += 64) {                                                          \
            fetch(next, next->lines * k);                                                          \
            __m512i wa = WEIGHTS(~(__mmask64)0, 0), wb = WEIGHTS(~(__mmask64)0, 1);                \
            __m512i wc = WEIGHTS(~(__mmask64)0, 2), wd = WEIGHTS(~(__mmask64)0, 3);                \
            ROWS_##R(MULTIPLY_VECTOR)                                                              \
        }                                                                                          \
        if (k < stop) {                                                                            \
            const __mmask64 tail = ((__mmask64)1 << (stop - k)) - 1;                               \
            __m512i wa = WEIGHTS(tail, 0), wb = WEIGHTS(tail, 1), wc = WEIGHTS(tail, 2), wd = WEIGHTS(tail, 3); \
            ROWS_##R(MULTIPLY_VECTOR)                                                              \
        }                                                                                          \
        ROWS_##R(HAND_OVER)                                                                        \
    }                                                                                              \
    INLINE void few_as_##R(const linear *l, int64_t row, int64_t column, const ahead *next, const bool is_split) { \
        const activations *a = l->a;                                                               \
        const int64_t token = row >> is_split;                                                     \
        __m512i sums[R][COLUMNS];                                                                  \
        __m256d totals[R] = {};                                                                    \
        for (int64_t g = 0, k = 0; g < l->num_groups; g++, k += a->group_size) {                   \
            dots_##R(l, row, column, k, k + a->group_size, next, sums);                            \
            const __m256d scales = scales4(l, column, g);                                          \
            for (int i = 0; i < R >> is_split; i++) {                                              \
                const __m256d exact = exact4(a, row + (i << is_split), g, sums + (i << is_split), is_split); \
                const __m256d both = _mm256_mul_pd(_mm256_set1_pd(a->token_scales[token + i]), scales); \
                if (l->num_groups == 1) store4(l, token + i, column, exact, both);                 \
                else totals[i] = _mm256_add_pd(totals[i], _mm256_mul_pd(exact, scales));           \
            }                                                                                      \
        }                                                                                          \
        for (int i = 0; l->num_groups > 1 && i < R >> is_split; i++)                               \
            store4(l, token + i, column, totals[i], _mm256_set1_pd(a->token_scales[token + i]));   \
    }                                                                                              \
    static void few_##R(const linear *l, int64_t row, int64_t column, const ahead *next) {         \
        if (R > 1 && l->a->rows_per_token == 2) few_as_##R(l, row, column, next, true);            \
        else few_as_##R(l, row, column, next, false);                                              \
    }
DEFINE_FEW(1)
DEFINE_FEW(2)
DEFINE_FEW(4)
DEFINE_FEW(6)

/* All tokens by whole fours of channels; where those end. While a tile is computed, it fetches its part of the next
 * four channels. */
static int64_t few_rows(const linear *l, int64_t column, int64_t column_end) {
    const int64_t k_end = l->a->in_features, num_rows = l->a->num_tokens * l->a->rows_per_token;
    const int64_t tiles = (num_rows + 5) / 6, lines = (COLUMNS + tiles - 1) / tiles;
    for (; column + COLUMNS <= column_end; column += COLUMNS) {
        const int8_t *next = l->qweight + next_column(l, column + COLUMNS, column_end) * k_end;
        for (int64_t r = 0, rows, fetched = 0; r < num_rows; r += rows, fetched += lines) {
            rows = num_rows - r >= 6 ? 6 : num_rows - r >= 4 ? 4 : num_rows - r >= 2 ? 2 : 1;
            const ahead part = {next + fetched * k_end, 64, MAX(0, MIN(lines, COLUMNS - fetched))};
            (rows == 6 ? few_6 : rows == 4 ? few_4 : rows == 2 ? few_2 : few_1)(l, r, column, &part);
        }
    }
    return column;
}
