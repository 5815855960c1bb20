/* Products with 4-bit codes in groups of 16 inputs, by pmaddwd. Part of linear.h.
 *
 * Activations lie as words: of each 32 inputs the even ones, then the odd ones. 16 bytes have the codes of 32 inputs;
 * widened to words, the lower half of a vector belongs to the first group and the upper half to the second. So both
 * halves of a sum are kept apart, and one step computes two groups. A tile is up to three tokens by four channels. */
#pragma once

enum { FINE_GROUP = 16, FINE_BLOCK = 32, CODE_TOKENS = 3, CODE_CHANNELS = 4, CODE_PANEL_BYTES = 128 << 10 };

#if defined(__AVX2__)
#define HAS_FINE 1

/* The scales and minima of four channels, side by side for each group. */
typedef struct {
    float scales[GROUPS_AT_ONCE][CODE_CHANNELS];
    double minima[GROUPS_AT_ONCE][CODE_CHANNELS];
} fine_scales;
INLINE void find_fine_scales(const linear *l, int64_t column, int64_t apart, int channels, int64_t group,
                             fine_scales *found, const bool has_minimum) {
    const int64_t count = MIN(GROUPS_AT_ONCE, l->num_groups - group);
    float scales[CODE_CHANNELS][GROUPS_AT_ONCE];
    double minima[CODE_CHANNELS][GROUPS_AT_ONCE];
    for (int j = 0; j < CODE_CHANNELS; j++)
        find_scales(l, column + MIN(j, channels - 1) * apart, group, count, scales[j], minima[j]);
    for (int64_t g = 0; g < GROUPS_AT_ONCE; g += 4) { /* numbers behind `count` are of no group */
        __m128 a = _mm_loadu_ps(scales[0] + g), b = _mm_loadu_ps(scales[1] + g), c = _mm_loadu_ps(scales[2] + g),
               d = _mm_loadu_ps(scales[3] + g);
        _MM_TRANSPOSE4_PS(a, b, c, d);
        _mm_storeu_ps(found->scales[g], a), _mm_storeu_ps(found->scales[g + 1], b);
        _mm_storeu_ps(found->scales[g + 2], c), _mm_storeu_ps(found->scales[g + 3], d);
    }
    for (int64_t g = 0; has_minimum && g < count; g++)
        for (int j = 0; j < CODE_CHANNELS; j++) found->minima[g][j] = minima[j][g];
}

/* 16 bytes of codes as words: those of even inputs (the low halves), and of odd ones. */
typedef struct {
    __m256i even, odd;
} code_words;
INLINE code_words code_words_at(const int8_t *w, __m128i table, const bool has_table) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)w), low = _mm_set1_epi8(15);
    if (!has_table) {
        const __m256i pairs = _mm256_cvtepu8_epi16(bytes);
        return (code_words){_mm256_and_si256(pairs, _mm256_set1_epi16(15)), _mm256_srli_epi16(pairs, 4)};
    }
    const __m128i even = _mm_and_si128(bytes, low), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), low);
    return (code_words){_mm256_cvtepu8_epi16(_mm_shuffle_epi8(table, even)),
                        _mm256_cvtepu8_epi16(_mm_shuffle_epi8(table, odd))};
}
INLINE __m256i fine_dot(code_words codes, __m256i even, __m256i odd) {
    return _mm256_add_epi32(_mm256_madd_epi16(codes.even, even), _mm256_madd_epi16(codes.odd, odd));
}

/* A group's exact sums, times its scales. Only the additions of groups round: see grouped_sum(). */
INLINE __m256d add_fine_group(__m256d total, __m128i sums, const float *scales, const double *minima, int32_t minus,
                              const bool has_minimum) {
    const __m256d scale = _mm256_cvtps_pd(_mm_loadu_ps(scales));
    if (!has_minimum) sums = _mm_add_epi32(sums, _mm_set1_epi32(minus));
    __m256d part = _mm256_mul_pd(_mm256_cvtepi32_pd(sums), scale);
    if (has_minimum)
        part = _mm256_add_pd(part, _mm256_mul_pd(_mm256_set1_pd((double)minus), _mm256_loadu_pd(minima)));
    return _mm256_add_pd(total, part);
}

/* Some tokens by the channels column, column + apart, ..., of which `channels` are there. */
INLINE void fine_tile(const linear *l, int64_t token, const int tokens, int64_t column, int64_t apart, int channels,
                      const bool has_table, const bool has_minimum) {
    const activations *a = l->a;
    const int64_t n = l->num_groups;
    const int16_t *x = (const int16_t *)a->rows + token * a->padded;
    const __m128i table = _mm_loadu_si128((const __m128i *)l->table);
    const int32_t *minus = a->corrections + token * n;
    const int8_t *w[CODE_CHANNELS];
    for (int j = 0; j < CODE_CHANNELS; j++) w[j] = l->qweight + (column + MIN(j, channels - 1) * apart) * l->row_bytes;
    fine_scales found;
    __m256d totals[CODE_TOKENS];
    for (int i = 0; i < tokens; i++) totals[i] = _mm256_setzero_pd();
    for (int64_t g = 0; g < n; g += 2) {
        const int64_t at = g % GROUPS_AT_ONCE, bytes = g * (FINE_GROUP / 2);
        if (at == 0) find_fine_scales(l, column, apart, channels, g, &found, has_minimum);
        if (tuning.prefetch_bytes && bytes % 64 == 0)
            for (int j = 0; j < CODE_CHANNELS; j++)
                _mm_prefetch(w[j] + bytes + tuning.prefetch_bytes / 2, _MM_HINT_T0);
        code_words codes[CODE_CHANNELS];
        for (int j = 0; j < CODE_CHANNELS; j++) codes[j] = code_words_at(w[j] + bytes, table, has_table);
        for (int i = 0; i < tokens; i++) {
            const int16_t *at_token = x + i * a->padded + g * FINE_GROUP;
            const __m256i even = _mm256_loadu_si256((const __m256i *)at_token);
            const __m256i odd = _mm256_loadu_si256((const __m256i *)(at_token + FINE_GROUP));
            const __m256i ab = _mm256_hadd_epi32(fine_dot(codes[0], even, odd), fine_dot(codes[1], even, odd));
            const __m256i cd = _mm256_hadd_epi32(fine_dot(codes[2], even, odd), fine_dot(codes[3], even, odd));
            const __m256i both = _mm256_hadd_epi32(ab, cd);
            totals[i] = add_fine_group(totals[i], _mm256_castsi256_si128(both), found.scales[at], found.minima[at],
                                       minus[i * n + g], has_minimum);
            totals[i] = add_fine_group(totals[i], _mm256_extracti128_si256(both, 1), found.scales[at + 1],
                                       found.minima[at + 1], minus[i * n + g + 1], has_minimum);
        }
    }
    for (int i = 0; i < tokens; i++) {
        double of[CODE_CHANNELS];
        _mm256_storeu_pd(of, totals[i]);
        for (int j = 0; j < channels; j++) {
            const float y = (float)(of[j] * (double)a->token_scales[token + i]);
            const int64_t c = column + j * apart;
            l->y[(token + i) * l->out_features + c] = l->bias ? y + l->bias[c] : y;
        }
    }
}

#define DEFINE_FINE(name, has_table, has_minimum)                                                  \
    NOINLINE void name(const linear *l, int64_t token, int64_t tokens, int64_t column, int64_t apart, int channels) { \
        if (tokens >= 3) fine_tile(l, token, 3, column, apart, channels, has_table, has_minimum);  \
        else if (tokens == 2) fine_tile(l, token, 2, column, apart, channels, has_table, has_minimum); \
        else fine_tile(l, token, 1, column, apart, channels, has_table, has_minimum);              \
    }
DEFINE_FINE(fine_plain, false, false)
DEFINE_FINE(fine_minimum, false, true)
DEFINE_FINE(fine_table, true, false)

/* All channels by tiles of codes. While all tokens meet them, a panel of channels stays in the L2 cache. One token meets
 * far channels first: four streams. */
typedef void (*code_tile_fn)(const linear *, int64_t token, int64_t tokens, int64_t column, int64_t apart, int channels);
INLINE void for_code_tiles(const linear *l, int64_t column, int64_t column_end, code_tile_fn tile) {
    const int64_t num_tokens = l->a->num_tokens, apart = num_tokens == 1 ? (column_end - column) / CODE_CHANNELS : 0;
    const int64_t panel = MAX(CODE_CHANNELS, CODE_PANEL_BYTES / l->row_bytes / CODE_CHANNELS * CODE_CHANNELS);
    for (int64_t c = column; c < column + apart; c++) tile(l, 0, 1, c, apart, CODE_CHANNELS);
    for (int64_t stop, first = column + CODE_CHANNELS * apart; first < column_end; first = stop) {
        stop = MIN(first + (num_tokens > CODE_TOKENS ? panel : CODE_CHANNELS), column_end);
        for (int64_t t = 0; t < num_tokens; t += CODE_TOKENS)
            for (int64_t c = first; c < stop; c += CODE_CHANNELS)
                tile(l, t, num_tokens - t, c, 1, (int)MIN(CODE_CHANNELS, stop - c));
    }
}
static void linear_fine(const linear *l, int64_t column, int64_t column_end) {
    for_code_tiles(l, column, column_end,
                   l->kind == INT4_TABLE ? fine_table : l->has_minimum ? fine_minimum : fine_plain);
}
#else
#define HAS_FINE 0
static void linear_fine(const linear *l, int64_t column, int64_t column_end) { (void)l, (void)column, (void)column_end; }
#endif
