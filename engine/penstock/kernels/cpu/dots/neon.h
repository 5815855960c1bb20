/* Steps of 32 inputs with ARM's dot products (sdot). Part of linear/dots.h. Weights stay signed. */
#pragma once

typedef struct {
    int8x16_t first, second;
} step;
typedef int32x4_t lanes;
typedef int8x16_t code_table;

INLINE step load_step(const int8_t *from) { return (step){vld1q_s8(from), vld1q_s8(from + 16)}; }
INLINE step load_weights(const int8_t *from) { return load_step(from); }
INLINE code_table load_table(const uint8_t *table) { return vreinterpretq_s8_u8(vld1q_u8(table)); }

/* 16 bytes with 32 codes -> the integers that the codes stand for, in the inputs' order. */
INLINE step load_codes(const int8_t *from, code_table table, const int kind) {
    const uint8x16_t pairs = vld1q_u8((const uint8_t *)from);
    int8x16_t even = vreinterpretq_s8_u8(vandq_u8(pairs, vdupq_n_u8(15)));
    int8x16_t odd = vreinterpretq_s8_u8(vshrq_n_u8(pairs, 4));
    if (kind == INT4_TABLE) {
        even = vqtbl1q_s8(table, vreinterpretq_u8_s8(even));
        odd = vqtbl1q_s8(table, vreinterpretq_u8_s8(odd));
    }
    return (step){vzip1q_s8(even, odd), vzip2q_s8(even, odd)};
}

INLINE lanes no_lanes(void) { return vdupq_n_s32(0); }
INLINE lanes dot(lanes sums, step w, step x) {
    return vdotq_s32(vdotq_s32(sums, w.first, x.first), w.second, x.second);
}

INLINE lanes plus(lanes a, lanes b) { return vaddq_s32(a, b); }
INLINE lanes merge_rows(lanes hi, lanes lo) { return vaddq_s32(vshlq_n_s32(hi, 8), lo); }

/* The sums of four accumulators' lanes. */
INLINE sums4 add_lanes(const lanes *a) {
    return (sums4)vpaddq_s32(vpaddq_s32(a[0], a[1]), vpaddq_s32(a[2], a[3]));
}
