/* The sums of codes_stepped.h with codes of 3 or 2 bits: pairs of slots (low_codes.h) are multiplied as pairs of halves
 * of bytes are. Part of codes_stepped.h. */
#pragma once

/* Pair `i` of a block, by all tokens. */
#define LOW_PAIR_OF(R, j, i)                                                                       \
    {                                                                                              \
        const low_pair codes = low_pair_at(block, i, of_bits);                                     \
        const code_bytes first = {codes.even, codes.odd}, second = first;                          \
        const __m256i step = step_words(at + j * apart + g + i * LOW_PAIR / size, size);           \
        const int8_t *x = at_block + i * x_block;                                                  \
        TOKENS_##R(MULTIPLY_STEPPED, j)                                                            \
    }
#define LOW_CHANNEL(R, j)                                                                          \
    {                                                                                              \
        const int8_t *block = w + j * stride;                                                      \
        LOW_PAIR_OF(R, j, 0)                                                                       \
        LOW_PAIR_OF(R, j, 1)                                                                       \
        if (of_bits == 3) {                                                                        \
            LOW_PAIR_OF(R, j, 2)                                                                   \
            LOW_PAIR_OF(R, j, 3)                                                                   \
        }                                                                                          \
    }
/* As DEFINE_STEPPED(). Pairs behind the last group have steps of 0. */
#define DEFINE_LOW(name, R, C, bits, of_size, of_split)                                            \
    NOINLINE void low_##name##_##R##_##bits##_##of_size##_##of_split(const stepped_pairs *p, vec4 *sums) { \
        enum { of_bits = bits, size = of_size, is_split = of_split, has_streams = IS_##name };     \
        enum { inputs = bits == 3 ? LOW_BLOCK_3 : LOW_BLOCK_2, bytes = inputs / 8 * bits };        \
        const int64_t x_block = is_split ? 2 * BYTE_BLOCK : BYTE_BLOCK;                            \
        const int64_t stride = p->stride, row_bytes = p->row_bytes, g_end = p->g_end;              \
        const int64_t apart = has_streams ? p->apart : stride ? PLACES : 0;                        \
        const int8_t *at_block = p->x, *w = p->w;                                                  \
        const uint16_t *at = p->at;                                                                \
        const code_fetch fetch = next_pairs(p, C, has_streams);                                    \
        CHANNELS_##C(CLEAR_CHANNEL, R)                                                             \
        if (p->g == 0) {                                                                           \
            const int16_t *zero_parts = p->zero_parts;                                             \
            for (int64_t h = 0; h < p->num_groups; h += 16) { CHANNELS_##C(BEGIN_CHANNEL, R) }     \
        }                                                                                          \
        for (int64_t g = p->g, k = 0; g < g_end; g += inputs / size, k += bytes, w += bytes) {     \
            if (C == 4 && !has_streams) fetch_codes(fetch, C * k, C * bytes);                      \
            else if (bits == 3 || k % 64 == 0)                                                     \
                for (int j = 0; j < C; j++) fetch_codes(fetch, j * stride + k, bytes);             \
            CHANNELS_##C(LOW_CHANNEL, R)                                                           \
            at_block += inputs / BYTE_BLOCK * x_block;                                             \
        }                                                                                          \
        vec4 part = (vec4)_mm256_cvtepi32_pd(FOUR_OF_##R(lo));                                     \
        if (is_split) part += 256.0 * (vec4)_mm256_cvtepi32_pd(FOUR_OF_##R(hi));                   \
        *sums = p->g == 0 ? part : *sums + part;                                                   \
    }
#define DEFINE_LOW_OF(name, R, C, bits)                                                            \
    DEFINE_LOW(name, R, C, bits, 32, 0) DEFINE_LOW(name, R, C, bits, 32, 1)                        \
    DEFINE_LOW(name, R, C, bits, 64, 0) DEFINE_LOW(name, R, C, bits, 64, 1)
#define LOW_OF(name, R, bits)                                                                      \
    {{low_##name##_##R##_##bits##_32_0, low_##name##_##R##_##bits##_32_1},                         \
     {low_##name##_##R##_##bits##_64_0, low_##name##_##R##_##bits##_64_1}}
#define LOW_TILES(bits) {LOW_OF(stepped, 1, bits), LOW_OF(stepped, 2, bits), LOW_OF(stepped, 3, bits), LOW_OF(stepped, 4, bits)}
#define DEFINE_LOW_BITS(bits)                                                                      \
    DEFINE_LOW_OF(stepped, 1, 4, bits) DEFINE_LOW_OF(stepped, 2, 2, bits)                          \
    DEFINE_LOW_OF(stepped, 3, 1, bits) DEFINE_LOW_OF(stepped, 4, 1, bits)                          \
    DEFINE_LOW_OF(streams, 1, 4, bits)
DEFINE_LOW_BITS(2)
DEFINE_LOW_BITS(3)
static const stepped_fn low_tiles[2][STEPPED_TOKENS][2][2] = {LOW_TILES(2), LOW_TILES(3)};
static const stepped_fn low_streams[2][2][2] = {LOW_OF(streams, 1, 2), LOW_OF(streams, 1, 3)};
