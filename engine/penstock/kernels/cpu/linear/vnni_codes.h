/* One token times 4-bit codes with AVX512-VNNI. Part of vnni_one.h.
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

/* Some groups of a token and a channel, whose scales and minima are there: eight, or sixteen of 32 inputs. A group's
 * sum of 16-bit activations fits 32 bits. */
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

/* Groups of 128, 64 or (halves of vectors) 32 inputs, of four far channels in turns: four streams. A channel's groups
 * are added in their order. */
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
