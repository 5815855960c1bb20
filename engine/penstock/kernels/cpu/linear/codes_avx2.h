/* Products with 4-bit codes by pmaddwd. Part of int16.h.
 *
 * 16 bytes have the codes of 32 inputs. Widened to words, they give the codes of even inputs (the low halves) and those
 * of odd inputs; activations lie so as well (`words` of activations). A tile is up to three tokens by four channels,
 * and its weights are unpacked once for all tokens. */
#pragma once

enum { CODE_INPUTS = 32 };

INLINE __m256i load_words(const void *x) { return _mm256_loadu_si256((const __m256i *)x); }
#define CLEAR_CODES(i, j) __m256i a##i##j = {};
#define MULTIPLY_CODES(i, j)                                                                       \
    a##i##j = _mm256_add_epi32(a##i##j, _mm256_madd_epi16(codes.even, load_words(x + i * padded))); \
    a##i##j = _mm256_add_epi32(a##i##j, _mm256_madd_epi16(codes.odd, load_words(x + i * padded + 16)));
#define CODE_CHANNEL(R, j)                                                                         \
    {                                                                                              \
        const code_words codes = code_words_at(w[j] + k / 2, table, kind == INT4_TABLE);                         \
        TOKENS_##R(MULTIPLY_CODES, j)                                                              \
    }
#define STORE_SUMS(i, j) sums[i] = add_lanes(a##i##0, a##i##1, a##i##2, a##i##3);
/* One group of R tokens by four channels: sums of 32 bits, which hold up to 128 inputs. */
#define DEFINE_CODE_SUMS(R)                                                                        \
    INLINE void code_sums_##R(const int16_t *x, int64_t padded, const int8_t *const *w, int64_t k, int64_t stop, \
                              __m128i table, __m128i *sums, const int kind) {                      \
        TOKENS_##R(CLEAR_CODES, 0) TOKENS_##R(CLEAR_CODES, 1) TOKENS_##R(CLEAR_CODES, 2) TOKENS_##R(CLEAR_CODES, 3) \
        for (x += k; k < stop; k += CODE_INPUTS, x += CODE_INPUTS) {                               \
            CODE_CHANNEL(R, 0) CODE_CHANNEL(R, 1) CODE_CHANNEL(R, 2) CODE_CHANNEL(R, 3)            \
        }                                                                                          \
        TOKENS_##R(STORE_SUMS, )                                                                   \
    }
DEFINE_CODE_SUMS(1)
DEFINE_CODE_SUMS(2)
DEFINE_CODE_SUMS(3)

/* Scales and minima of four channels' groups. */
typedef struct {
    float scales[CHANNELS][GROUPS_AT_ONCE];
    double minima[CHANNELS][GROUPS_AT_ONCE];
} tile_scales;

/* Some tokens by the channels column, column + apart, ..., of which `channels` are there. */
INLINE void code_tile(const linear *l, int64_t token, const int tokens, int64_t column, int64_t apart, int channels,
                      const int kind, const bool has_minimum) {
    const activations *a = l->a;
    const int64_t n = l->num_groups, size = a->group_size;
    const int16_t *x = a->rows + token * a->padded;
    const __m128i table = _mm_loadu_si128((const __m128i *)l->table);
    const int8_t *w[CHANNELS];
    for (int j = 0; j < CHANNELS; j++) w[j] = l->qweight + (column + MIN(j, channels - 1) * apart) * l->row_bytes;
    tile_scales found;
    vec4 totals[TOKENS] = {};
    for (int64_t g = 0; g < n; g++) {
        const int64_t at = g % GROUPS_AT_ONCE;
        for (int j = 0; at == 0 && j < CHANNELS; j++)
            find_scales(l, column + MIN(j, channels - 1) * apart, g, MIN(GROUPS_AT_ONCE, n - g), found.scales[j],
                        found.minima[j]);
        for (int j = 0; tuning.prefetch_bytes && j < CHANNELS; j++)
            _mm_prefetch(w[j] + g * size / 2 + tuning.prefetch_bytes / 2, _MM_HINT_T0);
        __m128i sums[TOKENS];
        if (tokens == 3) code_sums_3(x, a->padded, w, g * size, (g + 1) * size, table, sums, kind);
        else if (tokens == 2) code_sums_2(x, a->padded, w, g * size, (g + 1) * size, table, sums, kind);
        else code_sums_1(x, a->padded, w, g * size, (g + 1) * size, table, sums, kind);
        const vec4 scales = load_scales(&found.scales[0][at], GROUPS_AT_ONCE);
        for (int i = 0; i < tokens; i++) {
            const int32_t minus = a->corrections[(token + i) * n + g];
            if (has_minimum) {
                const vec4 minima = {found.minima[0][at], found.minima[1][at], found.minima[2][at],
                                     found.minima[3][at]};
                const vec4 part = (vec4)_mm256_cvtepi32_pd(sums[i]) * scales + (double)minus * minima;
                totals[i] += part;
            } else
                totals[i] += (vec4)_mm256_cvtepi32_pd(_mm_add_epi32(sums[i], _mm_set1_epi32(minus))) * scales;
        }
    }
    for (int i = 0; i < tokens; i++)
        for (int j = 0; j < MIN(channels, CHANNELS); j++) {  // GCC sees that no index leaves the vector
            const float y = (float)(totals[i][j] * (double)a->token_scales[token + i]);
            const int64_t c = column + j * apart;
            l->y[(token + i) * l->out_features + c] = l->bias ? y + l->bias[c] : y;
        }
}

#define DEFINE_CODE_TILE(name, kind, has_minimum)                                                  \
    NOINLINE void name(const linear *l, int64_t token, int64_t tokens, int64_t column, int64_t apart, int channels) { \
        if (tokens >= 3) code_tile(l, token, 3, column, apart, channels, kind, has_minimum);       \
        else if (tokens == 2) code_tile(l, token, 2, column, apart, channels, kind, has_minimum);  \
        else code_tile(l, token, 1, column, apart, channels, kind, has_minimum);                   \
    }
DEFINE_CODE_TILE(plain_tile, INT4, false)
DEFINE_CODE_TILE(minimum_tile, INT4, true)
DEFINE_CODE_TILE(table_tile, INT4_TABLE, false)

static int64_t linear_codes(const linear *l, int64_t column, int64_t column_end) {
    for_code_tiles(l, column, column_end,
                   l->kind == INT4_TABLE ? table_tile : l->has_minimum ? minimum_tile : plain_tile);
    return column_end;
}
