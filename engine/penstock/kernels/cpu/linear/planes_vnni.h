/* Weights in planes with AVX512-VNNI. Those of one token are joined in registers, which leaves them as unsigned bytes.
 * Part of vnni.h. */
#pragma once

/* 128 weights in their order. */
typedef struct {
    __m512i first, second;
} weights_128;
INLINE weights_128 in_order(__m512i upper, __m512i lower) {
    const __m512i even = even_weights(upper, lower), odd = odd_weights(upper, lower);
    const __m512i a = _mm512_unpacklo_epi8(even, odd), b = _mm512_unpackhi_epi8(even, odd);
    const __m512i low = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), high = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    return (weights_128){_mm512_permutex2var_epi64(a, low, b), _mm512_permutex2var_epi64(a, high, b)};
}
INLINE __mmask64 first_bytes(int64_t n) { return n >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << n) - 1; }

/* Add the products of a vector of weights and one or two rows. */
#define ADD_PRODUCTS(a, b, weights, x, x2)                                                         \
    a = _mm512_dpbusd_epi32(a, weights, x);                                                        \
    if (rows > 1) b = _mm512_dpbusd_epi32(b, weights, x2);
#define MULTIPLY_PLANES(n)                                                                         \
    {                                                                                              \
        const __m512i upper = _mm512_loadu_si512(u##n + k / 2), lower = _mm512_loadu_si512(w##n + k / 2); \
        _mm_prefetch(u##n + k / 2 + prefetch, _MM_HINT_T0);                                        \
        if (is_whole) _mm_prefetch(w##n + k / 2 + prefetch, _MM_HINT_T0);                          \
        ADD_PRODUCTS(a##n, b##n, even_weights(upper, lower), x_even, x2_even)                      \
        ADD_PRODUCTS(a##n, b##n, odd_weights(upper, lower), x_odd, x2_odd)                         \
        __asm__("" : "+v"(a##n), "+v"(b##n));                                                      \
    }
#define MULTIPLY_REST(n)                                                                           \
    {                                                                                              \
        const weights_128 w = in_order(_mm512_maskz_loadu_epi8(bytes, u##n + k / 2),               \
                                       _mm512_maskz_loadu_epi8(bytes, w##n + k / 2));              \
        ADD_PRODUCTS(a##n, b##n, w.first, x_first, x2_first)                                       \
        ADD_PRODUCTS(a##n, b##n, w.second, x_second, x2_second)                                    \
    }
/* Four channels, `apart` channels from each other, as four_channels() has them: each has two streams of weights, or one
 * where the lower plane is the same for all. The activations are `halved`. */
INLINE void four_planes(const linear *l, int64_t column, int64_t apart, const int rows, const bool is_whole) {
    const activations *a = l->a;
    const int64_t prefetch = tuning.prefetch_bytes, up = apart * l->row_bytes, down = apart * l->lower_bytes;
    const int8_t *x = a->rows, *x2 = x + (rows - 1) * a->padded, *u0 = l->qweight + column * l->row_bytes;
    const int8_t *u1 = u0 + up, *u2 = u1 + up, *u3 = u2 + up;
    const uint8_t *w0 = l->lower + column * l->lower_bytes, *w1 = w0 + down, *w2 = w1 + down, *w3 = w2 + down;
    __m512i a0 = {}, a1 = {}, a2 = {}, a3 = {}, b0 = {}, b1 = {}, b2 = {}, b3 = {};
    int64_t k = 0;
    for (; k < a->halved; k += 128) {
        const __m512i x_even = _mm512_loadu_si512(x + k), x_odd = _mm512_loadu_si512(x + k + 64);
        const __m512i x2_even = _mm512_loadu_si512(x2 + k), x2_odd = _mm512_loadu_si512(x2 + k + 64);
        MULTIPLY_PLANES(0) MULTIPLY_PLANES(1) MULTIPLY_PLANES(2) MULTIPLY_PLANES(3)
    }
    if (k < a->in_features) {
        const int64_t left = a->in_features - k;
        const __mmask64 bytes = first_bytes(left / 2), low = first_bytes(left), high = first_bytes(MAX(left, 64) - 64);
        const __m512i x_first = _mm512_maskz_loadu_epi8(low, x + k),
                      x_second = _mm512_maskz_loadu_epi8(high, x + k + 64);
        const __m512i x2_first = _mm512_maskz_loadu_epi8(low, x2 + k),
                      x2_second = _mm512_maskz_loadu_epi8(high, x2 + k + 64);
        MULTIPLY_REST(0) MULTIPLY_REST(1) MULTIPLY_REST(2) MULTIPLY_REST(3)
    }
    const float *s = l->scale + column, scales[4] = {s[0], s[apart], s[2 * apart], s[3 * apart]};
    store_four(l, column, apart, sum4(a0, a1, a2, a3), sum4(b0, b1, b2, b3), scales, rows);
}
INLINE void token_by_planes(const linear *l, int64_t column, int64_t column_end, const int rows, const bool is_whole) {
    const int64_t apart = (column_end - column) / 4;
    for (int64_t i = 0; i < apart; i++) four_planes(l, column + i, apart, rows, is_whole);
    linear_rest(l, column + 4 * apart, column_end);
}

/* Groups of 128, 64 or (halves of vectors) 32 inputs, as add_groups() has them. */
#define LOAD_PLANES(at)                                                                            \
    const int64_t at_byte = (at) / 2;                                                              \
    const __mmask64 bytes = first_bytes(l->row_bytes - at_byte);                                   \
    _mm_prefetch(u + at_byte + prefetch, _MM_HINT_T0);                                             \
    if (is_whole) _mm_prefetch(v + at_byte + prefetch, _MM_HINT_T0);                               \
    const weights_128 w = in_order(_mm512_maskz_loadu_epi8(bytes, u + at_byte),                    \
                                   _mm512_maskz_loadu_epi8(bytes, v + at_byte));
#define ADD_ROWS(j, weights, at) ADD_PRODUCTS(a##j, b##j, weights, _mm512_loadu_si512(x + (at)), \
                                              _mm512_loadu_si512(x2 + (at)))
/* Two sums of 64 inputs each. */
#define MULTIPLY_TWO(i, j)                                                                         \
    if (begin + 64 * i < k_end) {                                                                  \
        LOAD_PLANES(begin + 64 * i)                                                                \
        ADD_ROWS(i, w.first, begin + 64 * i)                                                       \
        if (begin + 64 * j < k_end) { ADD_ROWS(j, w.second, begin + 64 * j) }                      \
    }
/* One sum of 128 inputs. */
#define MULTIPLY_ONE(j)                                                                            \
    if (begin + 128 * j < k_end) {                                                                 \
        LOAD_PLANES(begin + 128 * j)                                                               \
        ADD_ROWS(j, w.first, begin + 128 * j)                                                      \
        ADD_ROWS(j, w.second, begin + 128 * j + 64)                                                \
    }
INLINE void add_plane_groups(const linear *l, int64_t column, int64_t g, double *total, const int rows, const int size,
                             const bool is_whole) {
    const activations *a = l->a;
    const int64_t k_end = a->in_features, n = l->num_groups, prefetch = tuning.prefetch_bytes, begin = g * size;
    const int8_t *x = a->rows, *x2 = x + (rows - 1) * a->padded, *u = l->qweight + column * l->row_bytes;
    const uint8_t *v = l->lower + column * l->lower_bytes;
    double parts[16];
    EACH_OF_8(CLEAR)
    if (size == 128) { EACH_OF_8(MULTIPLY_ONE) }
    else { MULTIPLY_TWO(0, 1) MULTIPLY_TWO(2, 3) MULTIPLY_TWO(4, 5) MULTIPLY_TWO(6, 7) }
    const __m512i a_low = sum4(a0, a1, a2, a3), a_high = sum4(a4, a5, a6, a7);
    const __m512i b_low = sum4(b0, b1, b2, b3), b_high = sum4(b4, b5, b6, b7);
    if (size == 32) {
        const __m512i sums = sum16(a_low, a_high), second = sum16(b_low, b_high);
        scale_groups(l, column, g, _mm512_castsi512_si256(sums), _mm512_castsi512_si256(second), parts, rows);
        if (g + 8 < n)
            scale_groups(l, column, g + 8, _mm512_extracti64x4_epi64(sums, 1), _mm512_extracti64x4_epi64(second, 1),
                         parts + 8, rows);
    } else scale_groups(l, column, g, sum8(a_low, a_high), sum8(b_low, b_high), parts, rows);
    for (int64_t i = 0; i < MIN(size == 32 ? 16 : 8, n - g); i++) *total += parts[i];
}
INLINE void token_by_plane_groups(const linear *l, int64_t column, int64_t column_end, const int rows, const int size,
                                  const bool is_whole) {
    const int64_t apart = (column_end - column) / 4, num_sums = size == 32 ? 16 : 8;
    for (int64_t i = 0; i < apart; i++) {
        double totals[4] = {};
        for (int64_t g = 0; g < l->num_groups; g += num_sums)
            for (int j = 0; j < 4; j++)
                add_plane_groups(l, column + i + j * apart, g, totals + j, rows, size, is_whole);
        for (int j = 0; j < 4; j++) store_total(l, column + i + j * apart, totals[j]);
    }
    linear_rest(l, column + 4 * apart, column_end);
}

/* A function for each number of rows, with and without a lower plane, and for each size of groups. */
#define DEFINE_PLANES(name, rows, is_whole)                                                        \
    NOINLINE void name(const linear *l, int64_t column, int64_t column_end) {                      \
        if (l->num_groups == 1) token_by_planes(l, column, column_end, rows, is_whole);            \
        else if (l->a->group_size == 32) token_by_plane_groups(l, column, column_end, rows, 32, is_whole); \
        else if (l->a->group_size == 64) token_by_plane_groups(l, column, column_end, rows, 64, is_whole); \
        else token_by_plane_groups(l, column, column_end, rows, 128, is_whole);                            \
    }
DEFINE_PLANES(split_by_both, 2, true)
DEFINE_PLANES(split_by_upper, 2, false)
DEFINE_PLANES(row_by_both, 1, true)
DEFINE_PLANES(row_by_upper, 1, false)
static void one_token_planes(const linear *l, int64_t column, int64_t column_end) {
    const bool is_split = l->a->rows_per_token == 2;
    if (l->lower_bytes) (is_split ? split_by_both : row_by_both)(l, column, column_end);
    else (is_split ? split_by_upper : row_by_upper)(l, column, column_end);
}

/* More rows: 16 channels by 128 inputs are joined at a time, and packed as pack() does it. */
NOINLINE void pack_planes(const linear *l, const int8_t *w, int channels, int64_t first, int64_t inputs,
                          streams *next) {
    int8_t room[16][128] __attribute__((aligned(64)));
    const int64_t column = (w - l->qweight) / l->row_bytes;
    for (int64_t k = 0, some; k < inputs; k += 128) {
        some = MIN(128, inputs - k);
        fetch_streams(next), fetch_streams(next);
        for (int c = 0; c < PANEL; c += 16) {
            const int there = MAX(0, MIN(16, channels - c));
            for (int i = 0; i < there; i++) join_weights(l, column + c + i, first + k, some, room[i]);
            for (int64_t half = 0; half < some; half += 64)
                pack_square(room[0] + half, 128, there, first_bytes(some - half),
                            panel.weights + PANEL * (k + half) + 4 * c, table_of(l), 0, NULL, 0, 0, INT8);
        }
    }
}
