/* Two rows by two channels at once with ARM's smmla. Part of linear/dots.h.
 *
 * A token's rows hi and lo lie in turns of eight inputs (HAS_PAIRS in linear/linear.h), so that a vector has eight
 * inputs of both; two channels' weights are brought together so. The four sums of a vector are those of hi and of
 * lo. */
#pragma once

typedef struct {
    int8x16_t of[4]; /* eight inputs of two channels each */
} channel_pair;
INLINE int8x16_t both_first(int8x16_t a, int8x16_t b) {
    return vreinterpretq_s8_s64(vtrn1q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}
INLINE int8x16_t both_second(int8x16_t a, int8x16_t b) {
    return vreinterpretq_s8_s64(vtrn2q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}
INLINE channel_pair pair_up(step a, step b) {
    return (channel_pair){{both_first(a.first, b.first), both_second(a.first, b.first),
                           both_first(a.second, b.second), both_second(a.second, b.second)}};
}

#define TOKENS_1(DO, c) DO(0, c)
#define TOKENS_2(DO, c) DO(0, c) DO(1, c)
#define TOKENS_3(DO, c) TOKENS_2(DO, c) DO(2, c)
#define CLEAR_PAIR(i, c) lanes a##i##c = no_lanes(), b##i##c = no_lanes();
#define MULTIPLY_PAIR(i, c)                                                                        \
    {                                                                                              \
        const int8_t *x = t->x + 2 * (i * t->padded + k);                                          \
        a##i##c = vmmlaq_s32(a##i##c, vld1q_s8(x), w.of[0]);                                       \
        b##i##c = vmmlaq_s32(b##i##c, vld1q_s8(x + 16), w.of[1]);                                  \
        a##i##c = vmmlaq_s32(a##i##c, vld1q_s8(x + 32), w.of[2]);                                  \
        b##i##c = vmmlaq_s32(b##i##c, vld1q_s8(x + 48), w.of[3]);                                  \
        IN_REGISTER(a##i##c);                                                                      \
        IN_REGISTER(b##i##c);                                                                      \
    }
#define CHANNEL_PAIR(T, c)                                                                         \
    {                                                                                              \
        const channel_pair w = pair_up(weights_at(t, 2 * c, k, kind), weights_at(t, 2 * c + 1, k, kind)); \
        TOKENS_##T(MULTIPLY_PAIR, c)                                                               \
    }
#define STORE_PAIR(i, c)                                                                           \
    {                                                                                              \
        const lanes first = plus(a##i##0, b##i##0), second = plus(a##i##1, b##i##1);               \
        sums[2 * i][0] = vcombine_s32(vget_low_s32(first), vget_low_s32(second));                  \
        sums[2 * i + 1][0] = vcombine_s32(vget_high_s32(first), vget_high_s32(second));            \
    }
/* The sums of four channels are the lanes of sums[row][0]. */
#define DEFINE_PAIRS(T)                                                                            \
    INLINE void pair_sums_##T(const tile_inputs *t, lanes (*sums)[CHANNELS], const int kind) {     \
        const int8_t *next = t->next;                                                              \
        TOKENS_##T(CLEAR_PAIR, 0) TOKENS_##T(CLEAR_PAIR, 1)                                        \
        for (int64_t k = 0; k < t->inputs; k += STEP) {                                            \
            next = fetch(t, next, k, CHANNELS, kind);                                              \
            CHANNEL_PAIR(T, 0) CHANNEL_PAIR(T, 1)                                                  \
        }                                                                                          \
        TOKENS_##T(STORE_PAIR, )                                                                   \
    }
DEFINE_PAIRS(1)
DEFINE_PAIRS(2)
DEFINE_PAIRS(3)

INLINE void pair_sums(const tile_inputs *t, const int tokens, const int kind, lanes (*sums)[CHANNELS]) {
    if (tokens == 3) pair_sums_3(t, sums, kind);
    else if (tokens == 2) pair_sums_2(t, sums, kind);
    else pair_sums_1(t, sums, kind);
}
