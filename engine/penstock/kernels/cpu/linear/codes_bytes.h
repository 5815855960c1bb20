/* Products with 4-bit codes by pmaddubsw, which multiplies unsigned bytes by signed ones and adds pairs of products in
 * 16 bits. Part of int16.h.
 *
 * A code is 0 to 15 (or stands for an integer of a table, 0 to 31), and a byte of an activation is -128 to 127. So
 * eight products fit 16 bits (8 * 31 * 128), and the sums of a group are widened once: by pmaddwd, which multiplies
 * them at the same time by the group's step where scales are steps (steps.h). 16-bit activations are two bytes, q = 256
 * hi + lo. They lie in blocks of 64 inputs, lo of even inputs, lo of odd ones, hi of even ones, hi of odd ones
 * (`in_bytes` of activations), as 32 bytes have the codes of 64 inputs in their low and high halves. 8-bit activations
 * are the bytes lo alone. */
#pragma once

/* Sums of so many inputs, each at most 15 * 15 * 128 (a code, a step and a byte; 7 * 31 * 128 with 3 bits), fit 32 bits
 * together with what they begin with in codes_stepped.h (at most 8 * 15 * 255 for each of 1024 groups). */
enum { BYTE_BLOCK = 64, MOST_BYTE_INPUTS = 1 << 16 };

/* The most tokens, with 16-bit activations, for which stepped codes are multiplied as bytes. A build without panels has
 * vectors of 512 bits for INT8; those of bytes have 256. */
enum { STEPPED_AS_BYTES = HAS_PANELS ? 8 : 4 };

/* Whether codes are multiplied as bytes. With more tokens, packing codes into panels (panel_avx2.h) or expanding
 * stepped ones into INT8 (expanded.h) is faster; 8-bit activations are half the work. */
static bool takes_bytes(const linear *l, int64_t num_tokens, int64_t in_features, int activation_bits,
                        bool is_stepped) {
    const int64_t n = l->num_groups, size = in_features / n;
    const bool has_blocks = (size == 32 || size == 64 || size == 128) && in_features % BYTE_BLOCK == 0;
    if (!(l->kind == INT4 || l->has_small_table) || !has_blocks || n == 1 || in_features > MOST_BYTE_INPUTS)
        return false;
    if (is_low(l) && n > MOST_STEPPED_GROUPS) return false;
    if (activation_bits == 8) return is_stepped || num_tokens <= 4;
    return num_tokens <= (is_stepped ? STEPPED_AS_BYTES : size == 128 ? 4 : 2);
}

typedef struct {
    __m256i even, odd;
} code_bytes;
INLINE code_bytes code_bytes_at(const int8_t *w) {
    const __m256i both = _mm256_loadu_si256((const __m256i *)w), low = _mm256_set1_epi8(15);
    return (code_bytes){_mm256_and_si256(both, low), _mm256_and_si256(_mm256_srli_epi16(both, 4), low)};
}
/* The products of a block's codes and 64 bytes of activations, in 16 bits: four of them in each sum. */
INLINE __m256i byte_products(code_bytes codes, const int8_t *x) {
    return _mm256_add_epi16(_mm256_maddubs_epi16(codes.even, _mm256_loadu_si256((const __m256i *)x)),
                            _mm256_maddubs_epi16(codes.odd, _mm256_loadu_si256((const __m256i *)(x + 32))));
}
INLINE const int8_t *bytes_of_token(const activations *a, int64_t token) {
    return (const int8_t *)(a->rows + token * a->padded);
}

/* Later channels' codes, which are fetched line after line while some channels are multiplied: those of the next
 * channels to the L1 cache, or those behind them to the L2 cache where the L1 cache has no room for two tiles. */
typedef struct {
    const int8_t *codes;
    bool is_near;
} code_fetch;
enum { NEAR_BYTES = 4096 };
INLINE code_fetch next_codes(const int8_t *w, int64_t channels, int64_t row_bytes) {
    const int64_t bytes = channels * row_bytes;
    const bool is_near = bytes <= NEAR_BYTES;
    const int8_t *codes = w + (is_near ? NEAR_BYTES : 2 * bytes);
    return (code_fetch){tuning.prefetch_bytes_int4 ? codes : NULL, is_near};
}
INLINE void fetch_codes(code_fetch fetch, int64_t from, int64_t bytes) {
    if (!fetch.codes) return;
    for (int64_t i = from; i < from + bytes; i += 64)
        if (fetch.is_near) _mm_prefetch(fetch.codes + i, _MM_HINT_T0);
        else _mm_prefetch(fetch.codes + i, _MM_HINT_T1);
}

typedef struct {
    int64_t size; /* of groups */
    bool is_split, has_minimum, has_table;
} byte_kind;

/* 64 inputs of a channel, or 128, times one token: eight sums. Those of groups of 32 are four and four. */
INLINE __m256i byte_sums(const int8_t *w, const int8_t *x, __m256i table, const byte_kind kind) {
    const int64_t x_block = kind.is_split ? 2 * BYTE_BLOCK : BYTE_BLOCK;
    __m256i lo, hi;
    for (int i = 0; i < (kind.size == 128 ? 2 : 1); i++, w += BYTE_BLOCK / 2, x += x_block) {
        code_bytes codes = code_bytes_at(w);
        if (kind.has_table)
            codes = (code_bytes){_mm256_shuffle_epi8(table, codes.even), _mm256_shuffle_epi8(table, codes.odd)};
        const __m256i low = byte_products(codes, x);
        lo = i ? _mm256_add_epi16(lo, low) : low;
        if (!kind.is_split) continue;
        const __m256i high = byte_products(codes, x + BYTE_BLOCK);
        hi = i ? _mm256_add_epi16(hi, high) : high;
    }
    lo = _mm256_madd_epi16(lo, _mm256_set1_epi16(1));
    return kind.is_split ? _mm256_add_epi32(lo, _mm256_madd_epi16(hi, _mm256_set1_epi16(256))) : lo;
}

/* A token by four channels from `column` on, of which `channels` are there. A group's sum times its scale is exact in
 * double, so that only the additions of groups round. */
INLINE void bytes_tile(const linear *l, int64_t token, int64_t column, int channels, const byte_kind kind) {
    const activations *a = l->a;
    const int64_t n = l->num_groups, at_once = kind.size == 32 ? 2 : 1, bytes = at_once * kind.size / 2;
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)l->table));
    const int8_t *x = bytes_of_token(a, token), *w[CHANNELS];
    const code_fetch fetch = next_codes(l->qweight + column * l->row_bytes, CHANNELS, l->row_bytes);
    const int32_t *minus = a->corrections + token * n;
    for (int j = 0; j < CHANNELS; j++) w[j] = l->qweight + (column + MIN(j, channels - 1)) * l->row_bytes;
    tile_scales found;
    vec4 total = {};
    for (int64_t g = 0, k = 0; g < n; g += at_once, k += bytes, x += bytes * (kind.is_split ? 4 : 2)) {
        const int64_t at = g % GROUPS_AT_ONCE;
        for (int j = 0; at == 0 && j < CHANNELS; j++)
            find_scales(l, column + MIN(j, channels - 1), g, MIN(GROUPS_AT_ONCE, n - g), found.scales[j],
                        found.minima[j]);
        if (token == 0) fetch_codes(fetch, CHANNELS * k, CHANNELS * bytes);
        const __m256i a0 = byte_sums(w[0] + k, x, table, kind), a1 = byte_sums(w[1] + k, x, table, kind);
        const __m256i a2 = byte_sums(w[2] + k, x, table, kind), a3 = byte_sums(w[3] + k, x, table, kind);
        const __m256i halves = _mm256_hadd_epi32(_mm256_hadd_epi32(a0, a1), _mm256_hadd_epi32(a2, a3));
        const __m128i lower = _mm256_castsi256_si128(halves), upper = _mm256_extracti128_si256(halves, 1);
#pragma GCC unroll 2
        for (int i = 0; i < at_once; i++) {
            const __m128i sums = kind.size > 32 ? _mm_add_epi32(lower, upper) : i ? upper : lower;
            const vec4 scales = load_scales(&found.scales[0][at + i], GROUPS_AT_ONCE);
            if (kind.has_minimum) {
                const double(*m)[GROUPS_AT_ONCE] = found.minima;
                const vec4 minima = {m[0][at + i], m[1][at + i], m[2][at + i], m[3][at + i]};
                const vec4 part = (vec4)_mm256_cvtepi32_pd(sums) * scales + (double)minus[g + i] * minima;
                total += part;
            } else
                total += (vec4)_mm256_cvtepi32_pd(_mm_add_epi32(sums, _mm_set1_epi32(minus[g + i]))) * scales;
        }
    }
    for (int j = 0; j < MIN(channels, CHANNELS); j++) { // GCC sees that no index leaves the vector
        const float y = (float)(total[j] * (double)a->token_scales[token]);
        l->y[token * l->out_features + column + j] = l->bias ? y + l->bias[column + j] : y;
    }
}

typedef void (*bytes_fn)(const linear *, int64_t, int64_t, int);
#define DEFINE_BYTES(size, is_split, has_minimum, has_table)                                       \
    NOINLINE void bytes_##size##_##is_split##has_minimum##has_table(const linear *l, int64_t token, int64_t column, \
                                                                    int channels) {                \
        bytes_tile(l, token, column, channels, (byte_kind){size, is_split, has_minimum, has_table}); \
    }
#define DEFINE_BYTES_OF(size)                                                                      \
    DEFINE_BYTES(size, 0, 0, 0) DEFINE_BYTES(size, 0, 1, 0) DEFINE_BYTES(size, 0, 0, 1)            \
    DEFINE_BYTES(size, 1, 0, 0) DEFINE_BYTES(size, 1, 1, 0) DEFINE_BYTES(size, 1, 0, 1)
#define BYTES_OF(size)                                                                             \
    {{bytes_##size##_000, bytes_##size##_010, bytes_##size##_001},                                 \
     {bytes_##size##_100, bytes_##size##_110, bytes_##size##_101}}
DEFINE_BYTES_OF(32)
DEFINE_BYTES_OF(64)
DEFINE_BYTES_OF(128)
static const bytes_fn bytes_tiles[3][2][3] = {BYTES_OF(32), BYTES_OF(64), BYTES_OF(128)};

#include "codes_stepped.h"

/* Computes all channels. */
static int64_t linear_bytes(const linear *l, int64_t column, int64_t column_end) {
    if (l->has_steps && l->a->num_tokens == 1) column = stepped_streams(l, column, column_end);
    bytes_channels(l, column, column_end);
    return column_end;
}
