/* Products with pmaddwd, which every x86-64 has, on vectors as wide as there are: it multiplies int16 activations by
 * weights sign-extended to int16, and adds pairs of products in 32 bits. Part of linear.h. */
#pragma once

typedef double vec4 __attribute__((vector_size(32)));

#if defined(__AVX2__)
#if defined(__AVX512BW__)
typedef __m512i wide;
#define WIDE(operation) _mm512_##operation
INLINE wide load_weights(const int8_t *w) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)w)); }
INLINE wide load_integers(const int16_t *x) { return _mm512_loadu_si512(x); }
INLINE __m256i add_halves(wide v) {
    return _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
}
INLINE __m256d to_doubles(wide v) {
    const __m512d sums = _mm512_add_pd(_mm512_cvtepi32_pd(_mm512_castsi512_si256(v)),
                                       _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(v, 1)));
    return _mm256_add_pd(_mm512_castpd512_pd256(sums), _mm512_extractf64x4_pd(sums, 1));
}
#else
typedef __m256i wide;
#define WIDE(operation) _mm256_##operation
INLINE wide load_weights(const int8_t *w) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)w)); }
INLINE wide load_integers(const int16_t *x) { return _mm256_loadu_si256((const wide *)x); }
INLINE __m256i add_halves(wide v) { return v; }
INLINE __m256d to_doubles(wide v) {
    return _mm256_add_pd(_mm256_cvtepi32_pd(_mm256_castsi256_si128(v)),
                         _mm256_cvtepi32_pd(_mm256_extracti128_si256(v, 1)));
}
#endif
/* The sums of four accumulators' lanes, which fit 32 bits. */
INLINE __m128i add_lanes(__m256i a, __m256i b, __m256i c, __m256i d) {
    const __m256i abcd = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
    return _mm_add_epi32(_mm256_castsi256_si128(abcd), _mm256_extracti128_si256(abcd, 1));
}
/* Add four accumulators' sums to `sums`, exact in double. 512 inputs fit 32 bits (512 * 32512 * 128). */
INLINE void add_sums(wide a, wide b, wide c, wide d, int64_t inputs, vec4 *sums) {
    if (inputs <= 512) {
        *sums += (vec4)_mm256_cvtepi32_pd(add_lanes(add_halves(a), add_halves(b), add_halves(c), add_halves(d)));
        return;
    }
    __m256d ab = _mm256_hadd_pd(to_doubles(a), to_doubles(b)), cd = _mm256_hadd_pd(to_doubles(c), to_doubles(d));
    __m256d total = _mm256_add_pd(_mm256_permute2f128_pd(ab, cd, 0x21), _mm256_blend_pd(ab, cd, 12));
    *sums += (vec4)total;
}
#else
typedef __m128i wide;
#define WIDE(operation) _mm_##operation
INLINE wide load_weights(const int8_t *w) {
    const wide bytes = _mm_loadl_epi64((const wide *)w);
    return _mm_srai_epi16(_mm_unpacklo_epi8(bytes, bytes), 8);
}
INLINE wide load_integers(const int16_t *x) { return _mm_loadu_si128((const wide *)x); }
INLINE void add_sums(wide a, wide b, wide c, wide d, int64_t inputs, vec4 *sums) {
    (void)inputs;
    const wide v[4] = {a, b, c, d};
    for (int j = 0; j < 4; j++) {
        int32_t lanes[4];
        memcpy(lanes, &v[j], sizeof lanes);
        (*sums)[j] += ((double)lanes[0] + lanes[1]) + ((double)lanes[2] + lanes[3]);
    }
}
#endif

/* Two products are at most 2 * 32512 * 128, and 256 such pairs fit 32 bits. While all tokens meet them, a tile's
 * weights stay in the L1 cache and a panel of channels stays in the L2. */
enum { STEP = sizeof(wide) / 2, MAX_INPUTS = 256 * STEP, TOKENS = 3, CHANNELS = 4, PANEL_BYTES = 128 << 10 };

/* Weights that are needed soon: `rate` bytes are prefetched with each input. One token meets channels that lie far from
 * each other, four streams, which are prefetched in turns, or found by the processor itself. */
typedef struct {
    const int8_t *w;
    int64_t rate;
} ahead;
#define FETCH_NEXT _mm_prefetch(next.w, _MM_HINT_T0);
#define FETCH_FAR _mm_prefetch(next.w + k / STEP % CHANNELS * stride, _MM_HINT_T0);
#define FETCH_NOTHING

/* The accumulators are separate variables, because GCC keeps arrays of vectors in memory. The empty asm generates
 * no code, but its operand has to be in a register. */
#define TOKENS_1(DO, j) DO(0, j)
#define TOKENS_2(DO, j) DO(0, j) DO(1, j)
#define TOKENS_3(DO, j) TOKENS_2(DO, j) DO(2, j)
#if defined(__AVX512BW__)
#define INTEGERS_IN_REGISTER(v) __asm__("" : "+v"(v))
#else
#define INTEGERS_IN_REGISTER(v) __asm__("" : "+x"(v))
#endif
#define CLEAR(i, j) wide a##i##j = {};
#define MULTIPLY(i, j)                                                                             \
    a##i##j = WIDE(add_epi32)(a##i##j, WIDE(madd_epi16)(weights, load_integers(x + i * padded)));  \
    INTEGERS_IN_REGISTER(a##i##j);
#define CHANNEL(R, j)                                                                              \
    {                                                                                              \
        const wide weights = load_weights(w + j * stride);                                         \
        TOKENS_##R(MULTIPLY, j)                                                                    \
    }
#define ADD_UP(i, j) add_sums(a##i##0, a##i##1, a##i##2, a##i##3, inputs, sums + i);
/* Add R tokens by 4 channels, over a multiple of STEP inputs, to `sums`. */
#define DEFINE_SUMS(name, R, FETCH)                                                                \
    INLINE void name(const int16_t *x, int64_t padded, const int8_t *w, int64_t stride, int64_t inputs, ahead next, \
                     vec4 *sums) {                                                                 \
        TOKENS_##R(CLEAR, 0) TOKENS_##R(CLEAR, 1) TOKENS_##R(CLEAR, 2) TOKENS_##R(CLEAR, 3)        \
        for (int64_t k = 0; k < inputs; k += STEP, x += STEP, w += STEP, next.w += next.rate * STEP) { \
            FETCH                                                                                  \
            CHANNEL(R, 0) CHANNEL(R, 1) CHANNEL(R, 2) CHANNEL(R, 3)                                \
        }                                                                                          \
        TOKENS_##R(ADD_UP, )                                                                       \
    }
DEFINE_SUMS(sums_1, 1, FETCH_NEXT)
DEFINE_SUMS(sums_2, 2, FETCH_NEXT)
DEFINE_SUMS(sums_3, 3, FETCH_NEXT)
DEFINE_SUMS(far_sums, 1, FETCH_FAR)
DEFINE_SUMS(plain_sums, 1, FETCH_NOTHING)

/* The exact sums of inputs k to k_end. The last few weights are copied, so that nothing behind them is read. */
typedef void (*sums_fn)(const int16_t *, int64_t, const int8_t *, int64_t, int64_t, ahead, vec4 *);
INLINE void sums_of(const linear *l, int64_t token, sums_fn add, int64_t column, int64_t apart, int64_t k,
                    int64_t k_end, ahead next, vec4 *sums) {
    const activations *a = l->a;
    const int64_t stride = apart * a->in_features;
    const int8_t *w = l->qweight + column * a->in_features;
    const int16_t *x = a->rows + token * a->padded;
    for (int64_t stop; k_end - k >= STEP; k = stop) {
        stop = MIN(k + MAX_INPUTS, k + (k_end - k) / STEP * STEP);
        add(x + k, a->padded, w + k, stride, stop - k, (ahead){next.w + next.rate * k, next.rate}, sums);
    }
    if (k == k_end) return;
    int8_t last[CHANNELS][STEP] = {};
    for (int j = 0; j < CHANNELS; j++) memcpy(last[j], w + j * stride + k, k_end - k);
    add(x + k, a->padded, last[0], STEP, STEP, (ahead){next.w, 0}, sums);
}

/* Write the sums of 4 channels, times their scales, to y. */
INLINE void store_scaled(const linear *l, int64_t token, int64_t column, int64_t apart, vec4 sums, vec4 scales) {
    float y[CHANNELS];
    const vec4 products = sums * scales;
    for (int j = 0; j < CHANNELS; j++) y[j] = (float)products[j];
    for (int64_t j = 0, c = column; j < CHANNELS; j++, c += apart)
        l->y[token * l->out_features + c] = l->bias ? y[j] + l->bias[c] : y[j];
}
INLINE vec4 load_scales(const float *scale, int64_t stride) {
    return (vec4){scale[0], scale[stride], scale[2 * stride], scale[3 * stride]};
}

/* Some tokens by the channels column, column + apart, ... */
INLINE void tile(const linear *l, int64_t token, const int tokens, sums_fn add, int64_t column, int64_t apart,
                 ahead next) {
    const activations *a = l->a;
    const int64_t n = l->num_groups;
    const float *scale = l->scale + column * n;
    vec4 totals[TOKENS] = {};
    if (n == 1) {
        sums_of(l, token, add, column, apart, 0, a->in_features, next, totals);
        const vec4 scales = load_scales(scale, apart);
        for (int i = 0; i < tokens; i++)
            store_scaled(l, token + i, column, apart, totals[i], (double)a->token_scales[token + i] * scales);
        return;
    }
    /* With at most 128 inputs, a group's sum (29 bits) times a scale (24 bits) is exact in double, so only the
     * additions of groups round. */
    const int64_t size = a->group_size;
    for (int64_t g = 0; g < n; g++) {
        vec4 sums[TOKENS] = {};
        sums_of(l, token, add, column, apart, g * size, (g + 1) * size, next, sums);
        const vec4 scales = load_scales(scale + g, apart * n);
        for (int i = 0; i < tokens; i++) totals[i] += sums[i] * scales;
    }
    for (int i = 0; i < tokens; i++)
        store_scaled(l, token + i, column, apart, totals[i], (vec4){} + (double)a->token_scales[token + i]);
}

static void tile_1(const linear *l, int64_t token, int64_t column, ahead next) {
    tile(l, token, 1, sums_1, column, 1, next);
}
static void tile_2(const linear *l, int64_t token, int64_t column, ahead next) {
    tile(l, token, 2, sums_2, column, 1, next);
}
static void tile_3(const linear *l, int64_t token, int64_t column, ahead next) {
    tile(l, token, 3, sums_3, column, 1, next);
}

/* Quarters of the channels are four streams, which bring more bytes a second than one. Returns where they end. */
static int64_t one_token(const linear *l, int64_t column, int64_t column_end) {
    const int64_t apart = (column_end - column) / CHANNELS, ahead_by = tuning.prefetch_bytes;
    for (int64_t c = column; c < column + apart; c++)
        if (ahead_by) tile(l, 0, 1, far_sums, c, apart, (ahead){l->qweight + c * l->row_bytes + ahead_by, 1});
        else tile(l, 0, 1, plain_sums, c, apart, (ahead){NULL, 0});
    return column + CHANNELS * apart;
}

#if defined(__AVX2__)
#include "codes_avx2.h"
#include "codes_bytes.h"
#include "planes_avx2.h"
#if HAS_PANELS
#include "few_avx2.h"
#include "panel_avx2.h"
#endif
enum { CODE_BLOCK = CODE_INPUTS };
#else
enum { CODE_BLOCK = 0 }; /* plain C serves */
static int64_t linear_codes(const linear *l, int64_t column, int64_t column_end) {
    return (void)l, (void)column_end, column;
}
#endif

/* Computes the channels that fill tiles, and returns where they end. */
static int64_t linear_fast(const linear *l, int64_t column, int64_t column_end) {
    const activations *a = l->a;
    if (!l->is_tiled) return column;
#if defined(__AVX2__)
    if (a->in_bytes) return linear_bytes(l, column, column_end);
#endif
#if HAS_PANELS
    if (takes_few_rows(l)) return linear_few_rows(l, column, column_end);
    if (a->num_tokens >= PANEL_FROM_TOKENS) return linear_panels(l, column, column_end);
#endif
    if (l->kind != INT8) return linear_codes(l, column, column_end);
    if (a->num_tokens == 1) return one_token(l, column, column_end);
    column_end -= (column_end - column) % CHANNELS;
    const int64_t k_end = a->in_features, tiles = (a->num_tokens + TOKENS - 1) / TOKENS;
    const int64_t panel = tiles == 1 ? CHANNELS : MAX(CHANNELS, PANEL_BYTES / k_end / CHANNELS * CHANNELS);
    const int64_t rate = (CHANNELS + tiles - 1) / tiles;
    for (int64_t stop; column < column_end; column = stop) {
        stop = MIN(column + panel, column_end);
        const int8_t *next = l->qweight + next_column(l, stop) * k_end;
        for (int64_t t = 0, fetched = 0; t < a->num_tokens; t += TOKENS, fetched += rate) {
            const int64_t left = a->num_tokens - t;
            const int64_t first = MIN(fetched, CHANNELS - 1) - column; /* prefetched: of the next panel's channels */
            for (int64_t c = column; c < stop; c += CHANNELS) {
                const ahead part = {next + (c + first) * k_end, fetched < CHANNELS ? rate : 0};
                (left >= 3 ? tile_3 : left == 2 ? tile_2 : tile_1)(l, t, c, part);
            }
        }
    }
    return column_end;
}
