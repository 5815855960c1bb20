/* One token times 4-bit codes with AVX512-VNNI. Part of vnni_few.h.
 *
 * A byte has two codes, so a vector of bytes, widened to words, gives the codes of even inputs (the low halves) and
 * those of odd inputs. 16-bit activations lie as words, even ones and odd ones of 64 inputs apart (`words` of
 * activations), and vpdpwssd multiplies words by words: hi and lo need not be combined. 8-bit activations lie in their
 * order and meet the codes as bytes. */
#pragma once

enum { CODE_BLOCK = 64 };

/* Add the products of 64 inputs, whose activations begin at x, to a vector of sums. A table of words has each integer
 * twice: vpermw looks at five bits, of which the fifth belongs to the other code. */
INLINE __m512i multiply_codes(__m512i sums, __m256i bytes, const int8_t *x, __m512i table, const int kind,
                              const bool is_words) {
    if (!is_words) return _mm512_dpbusd_epi32(sums, codes_of(bytes, table, kind), _mm512_loadu_si512(x));
    const __m512i pairs = _mm512_cvtepu8_epi16(bytes), high = _mm512_srli_epi16(pairs, 4);
    const __m512i even =
        kind == INT4 ? _mm512_and_si512(pairs, _mm512_set1_epi16(15)) : _mm512_permutexvar_epi16(pairs, table);
    const __m512i odd = kind == INT4 ? high : _mm512_permutexvar_epi16(high, table);
    sums = _mm512_dpwssd_epi32(sums, even, _mm512_loadu_si512(x));
    return _mm512_dpwssd_epi32(sums, odd, _mm512_loadu_si512(x + 64));
}

/* Eight groups' sums times their scales, less the sums of their activations times the minima. */
INLINE void scale_codes(const activations *a, int64_t group, __m256i sums, const float *scales, const double *minima,
                        double *parts, const bool has_minimum) {
    const int64_t n = a->num_groups;
    const __mmask8 mask = n - group >= 8 ? 0xff : (1 << (n - group)) - 1;
    const __m256i corrections = _mm256_maskz_loadu_epi32(mask, a->corrections + group);
    const __m512d scale = _mm512_cvtps_pd(_mm256_loadu_ps(scales));
    if (!has_minimum) {
        const __m512d exact = _mm512_cvtepi32_pd(_mm256_add_epi32(sums, corrections));
        _mm512_storeu_pd(parts, _mm512_mul_pd(exact, scale));
        return;
    }
    const __m512d less = _mm512_mul_pd(_mm512_cvtepi32_pd(corrections), _mm512_loadu_pd(minima));
    _mm512_storeu_pd(parts, _mm512_fmadd_pd(_mm512_cvtepi32_pd(sums), scale, less));
}

/* Eight vectors of sums, each over `span` inputs, up to the input `left`. Weights and activations have so many inputs
 * more, or `left` is a number of whole vectors and a half. */
#define MULTIPLY_WHOLE(j)                                                                          \
    if (span > 64 || j % 2 == 0) _mm_prefetch(w + j * span / 2 + prefetch, _MM_HINT_T0);           \
    for (int k = j * span; k < (j + 1) * span; k += 64)                                            \
        a##j = multiply_codes(a##j, _mm256_loadu_si256((const __m256i *)(w + k / 2)), x + k * width, table, kind, \
                              is_words);
#define MULTIPLY_SOME(j)                                                                           \
    for (int k = j * span; k < MIN((j + 1) * span, left); k += 64) {                               \
        const __mmask32 bytes = left - k >= 64 ? ~(__mmask32)0 : 0xffff;                           \
        a##j = multiply_codes(a##j, _mm256_maskz_loadu_epi8(bytes, w + k / 2), x + k * width, table, kind, is_words); \
    }
#define CLEAR_SUMS(j) __m512i a##j = {};
INLINE void eight_sums(const int8_t *w, const int8_t *x, int64_t left, int64_t prefetch, __m512i table, __m512i sums[2],
                       const int span, const int kind, const bool is_words) {
    const int width = is_words ? 2 : 1; /* bytes of an activation */
    EACH_OF_8(CLEAR_SUMS)
    if (left >= 8 * span) { EACH_OF_8(MULTIPLY_WHOLE) }
    else { EACH_OF_8(MULTIPLY_SOME) }
    sums[0] = sum4(a0, a1, a2, a3), sums[1] = sum4(a4, a5, a6, a7);
}

/* Some groups of a token and a channel, whose scales and minima are there: eight, or sixteen of 32 inputs. A group's sum
 * of 16-bit activations fits 32 bits. */
INLINE void add_coded_groups(const linear *l, int64_t column, int64_t g, const float *scales, const double *minima,
                             __m512i table, double *total, const int span, const bool is_half, const int kind,
                             const bool is_words, const bool has_minimum) {
    const activations *a = l->a;
    const int64_t k = g * a->group_size, n = l->num_groups, num_sums = is_half ? 16 : 8;
    const int8_t *w = l->qweight + column * l->row_bytes + k / 2, *x = (const int8_t *)a->rows + k * (is_words ? 2 : 1);
    double parts[16];
    __m512i sums[2];
    eight_sums(w, x, a->in_features - k, tuning.prefetch_bytes, table, sums, span, kind, is_words);
    if (is_half) {
        const __m512i both = sum16(sums[0], sums[1]);
        scale_codes(a, g, _mm512_castsi512_si256(both), scales, minima, parts, has_minimum);
        if (g + 8 < n)
            scale_codes(a, g + 8, _mm512_extracti64x4_epi64(both, 1), scales + 8, minima + 8, parts + 8, has_minimum);
    } else scale_codes(a, g, sum8(sums[0], sums[1]), scales, minima, parts, has_minimum);
    if (n - g >= num_sums)
        for (int i = 0; i < num_sums; i++) *total += parts[i];
    else
        for (int64_t i = 0; i < n - g; i++) *total += parts[i];
}

/* Groups of 128, 64 or (halves of vectors) 32 inputs, of four far channels in turns: four streams. A channel's groups are
 * added in their order. */
INLINE void token_by_codes(const linear *l, int64_t column, int64_t column_end, const int span, const bool is_half,
                           const int kind, const bool is_words, const bool has_minimum) {
    const int64_t apart = (column_end - column) / 4, rest = column + 4 * apart, n = l->num_groups;
    const __m512i bytes = table_of(l);
    const __m512i table = is_words ? _mm512_cvtepu8_epi16(_mm512_castsi512_si256(bytes)) : bytes;
    float scales[4][GROUPS_AT_ONCE];
    double minima[4][GROUPS_AT_ONCE];
    for (int64_t first = column; first < column_end; first = first + 1 == column + apart ? rest : first + 1) {
        const int count = first < rest ? 4 : 1;
        double totals[4] = {};
        for (int64_t g = 0; g < n; g += is_half ? 16 : 8) {
            const int64_t at = g % GROUPS_AT_ONCE;
            for (int j = 0; j < count; j++) {
                const int64_t c = first + j * apart;
                if (at == 0) find_scales(l, c, g, MIN(GROUPS_AT_ONCE, n - g), scales[j], minima[j]);
                add_coded_groups(l, c, g, scales[j] + at, minima[j] + at, table, totals + j, span, is_half, kind,
                                 is_words, has_minimum);
            }
        }
        for (int j = 0; j < count; j++) store_total(l, first + j * apart, totals[j]);
    }
}

/* A function for each size of groups, kind of codes and form of activations. */
#define DEFINE_CODES(name, span, is_half, kind, is_words, has_minimum)                             \
    NOINLINE void name(const linear *l, int64_t column, int64_t column_end) {                      \
        token_by_codes(l, column, column_end, span, is_half, kind, is_words, has_minimum);         \
    }
#define DEFINE_CODES_OF(name, kind, is_words, has_minimum)                                         \
    DEFINE_CODES(name##_32, 64, true, kind, is_words, has_minimum)                                 \
    DEFINE_CODES(name##_64, 64, false, kind, is_words, has_minimum)                                \
    DEFINE_CODES(name##_128, 128, false, kind, is_words, has_minimum)
#define CODES_OF(name) {name##_32, name##_64, name##_128}
DEFINE_CODES_OF(bytes_plain, INT4, false, false)
DEFINE_CODES_OF(bytes_minimum, INT4, false, true)
DEFINE_CODES_OF(bytes_table, INT4_TABLE, false, false)
DEFINE_CODES_OF(words_plain, INT4, true, false)
DEFINE_CODES_OF(words_minimum, INT4, true, true)
DEFINE_CODES_OF(words_table, INT4_TABLE, true, false)

static void one_token_codes(const linear *l, int64_t column, int64_t column_end) {
    static void (*const functions[2][3][3])(const linear *, int64_t, int64_t) = {
        {CODES_OF(bytes_plain), CODES_OF(bytes_minimum), CODES_OF(bytes_table)},
        {CODES_OF(words_plain), CODES_OF(words_minimum), CODES_OF(words_table)},
    };
    const int kind = l->kind == INT4_TABLE ? 2 : l->has_minimum, size = (int)l->a->group_size;
    functions[l->a->words > 0][kind][size == 32 ? 0 : size == 64 ? 1 : 2](l, column, column_end);
}

/* What the codes of 128 inputs stand for, whose first group's step has its place at `at`. A lane has the codes of 32
 * inputs. */
INLINE __m512i step_tables(const uint16_t *at, const int shift) {
    __m512i tables = _mm512_broadcast_i32x4(step_table(at[0]));
    if (shift == 5) tables = _mm512_mask_broadcast_i32x4(tables, 0x00f0, step_table(at[1]));
    if (shift <= 6) tables = _mm512_mask_broadcast_i32x4(tables, 0xff00, step_table(at[64 >> shift]));
    if (shift == 5) tables = _mm512_mask_broadcast_i32x4(tables, 0xf000, step_table(at[3]));
    return tables;
}

/* Four channels with steps as INT8 of whole rows, times one or two rows of one token: four streams through the codes. The
 * low halves of bytes are the codes of even inputs, so the activations are `halved`. */
INLINE void four_stepped(const linear *l, int64_t column, int64_t apart, int place, const int rows, const int shift) {
    const activations *a = l->a;
    const int64_t k_end = a->in_features, prefetch = tuning.prefetch_bytes / 2, bytes = apart * l->row_bytes;
    const int8_t *x = a->rows, *x2 = x + (rows - 1) * a->padded, *w = l->qweight + column * l->row_bytes;
    const int8_t *w0 = w, *w1 = w + bytes, *w2 = w + 2 * bytes, *w3 = w + 3 * bytes;
    const uint16_t *at0 = steps.at[place], *at1 = at0 + PLACES, *at2 = at1 + PLACES, *at3 = at2 + PLACES;
    const __m512i low = _mm512_set1_epi8(15);
    __m512i a0 = {}, a1 = {}, a2 = {}, a3 = {}, b0 = {}, b1 = {}, b2 = {}, b3 = {};
    int64_t k = 0;
#define MULTIPLY_HALVES(n)                                                                         \
    {                                                                                              \
        const __m512i codes = _mm512_loadu_si512(w##n + k / 2), tables = step_tables(at##n + (k >> shift), shift); \
        const __m512i even = _mm512_shuffle_epi8(tables, _mm512_and_si512(codes, low));            \
        const __m512i odd = _mm512_shuffle_epi8(tables, _mm512_and_si512(_mm512_srli_epi16(codes, 4), low)); \
        _mm_prefetch(w##n + k / 2 + prefetch, _MM_HINT_T0);                                        \
        a##n = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(a##n, even, x_even), odd, x_odd);           \
        if (rows > 1) b##n = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(b##n, even, x2_even), odd, x2_odd); \
        __asm__("" : "+v"(a##n), "+v"(b##n));                                                      \
    }
    for (; k < a->halved; k += 128) {
        const __m512i x_even = _mm512_loadu_si512(x + k), x_odd = _mm512_loadu_si512(x + k + 64);
        const __m512i x2_even = _mm512_loadu_si512(x2 + k), x2_odd = _mm512_loadu_si512(x2 + k + 64);
        MULTIPLY_HALVES(0) MULTIPLY_HALVES(1) MULTIPLY_HALVES(2) MULTIPLY_HALVES(3)
    }
#undef MULTIPLY_HALVES
#define MULTIPLY_REST(n)                                                                           \
    {                                                                                              \
        const __m512i ws = stepped_at(w##n + k / 2, k, some, at##n, shift);                        \
        a##n = _mm512_dpbusd_epi32(a##n, ws, _mm512_loadu_si512(x + k));                           \
        if (rows > 1) b##n = _mm512_dpbusd_epi32(b##n, ws, _mm512_loadu_si512(x2 + k));            \
    }
    for (; k < k_end; k += 64) {
        const __mmask64 some = k_end - k >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << (k_end - k)) - 1;
        MULTIPLY_REST(0) MULTIPLY_REST(1) MULTIPLY_REST(2) MULTIPLY_REST(3)
    }
#undef MULTIPLY_REST
    store_four(l, column, apart, sum4(a0, a1, a2, a3), sum4(b0, b1, b2, b3), steps.units + place, rows);
}

/* The scales lie in streams of their own, which are fetched long before. The steps of the next four channels are found
 * beside the products of these. */
enum { FETCHED_SCALES = 16 };
INLINE void fetch_scales(const char *scales, int64_t apart_bytes, int64_t num_bytes) {
    for (int j = 0; j < 4; j++)
        for (int64_t b = 0; b < num_bytes; b += 64) _mm_prefetch(scales + j * apart_bytes + b, _MM_HINT_T0);
}
INLINE void token_by_steps(const linear *l, int64_t column, int64_t column_end, const int rows, const int shift) {
    const int64_t apart = (column_end - column) / 4, scale_bytes = l->num_groups * (l->numbers.dtype == 0 ? 4 : 2);
    const char *scales = (const char *)l->numbers.scale + column * scale_bytes;
    fetch_scales(scales, apart * scale_bytes, FETCHED_SCALES * scale_bytes);
    scales += FETCHED_SCALES * scale_bytes;
    bool has_steps = apart && find_far_steps(l, column, apart, 4, 0);
    for (int64_t i = 0; i < apart; i++, scales += scale_bytes) {
        const bool had_steps = has_steps;
        fetch_scales(scales, apart * scale_bytes, scale_bytes);
        if (i + 1 < apart) has_steps = find_far_steps(l, column + i + 1, apart, 4, (i + 1) % 2 * 4);
        if (had_steps) four_stepped(l, column + i, apart, i % 2 * 4, rows, shift);
        else
            for (int j = 0; j < 4; j++) linear_rest(l, column + i + j * apart, column + i + j * apart + 1);
    }
    linear_rest(l, column + 4 * apart, column_end);
}
static void one_token_steps(const linear *l, int64_t column, int64_t column_end) {
    const int shift = group_shift(l), rows = l->a->rows_per_token;
    if (rows == 2 && shift == 5) token_by_steps(l, column, column_end, 2, 5);
    else if (rows == 2 && shift == 6) token_by_steps(l, column, column_end, 2, 6);
    else if (rows == 2) token_by_steps(l, column, column_end, 2, 7);
    else if (shift == 5) token_by_steps(l, column, column_end, 1, 5);
    else if (shift == 6) token_by_steps(l, column, column_end, 1, 6);
    else token_by_steps(l, column, column_end, 1, 7);
}
