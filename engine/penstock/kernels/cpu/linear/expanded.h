/* Stepped codes without kernels of their own: the codes of some channels become INT8, and the kernels of INT8 multiply
 * these. Part of linear.h. */
#pragma once

/* With fewer tokens, the codes' own kernels are faster; takes_bytes() is asked first, which has more tokens of most
 * shapes. The expanded channels stay in the L2 cache, beside activations: with AVX2, 16 channels at once, a panel
 * (panel_avx2.h), are faster than 64. */
enum { STEPS_FROM_TOKENS = HAS_CODE_BYTES ? 5 : 4 };
#if HAS_PANELS
enum { EXPANDED_CHANNELS = 16 };
#else
enum { EXPANDED_CHANNELS = STEPPED_CHANNELS };
#endif
enum { EXPANDED_BYTES = 256 << 10, LEAST_EXPANDED = 8, MOST_STEPPED_INPUTS = EXPANDED_BYTES / LEAST_EXPANDED };
static _Thread_local int8_t expanded[EXPANDED_BYTES] __attribute__((aligned(64)));

/* 16 bytes of codes -> 32 integers, which `table` has for each code. */
INLINE void expand_32(const int8_t *codes, const uint8_t *table, int8_t *restrict to) {
#if defined(__AVX2__)
    const __m256i pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)codes));
    const __m256i each = _mm256_and_si256(_mm256_or_si256(pairs, _mm256_slli_epi16(pairs, 4)), _mm256_set1_epi8(15));
    const __m256i tables = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)table));
    _mm256_storeu_si256((__m256i *)to, _mm256_shuffle_epi8(tables, each));
#elif defined(__aarch64__)
    const uint8x16_t pairs = vld1q_u8((const uint8_t *)codes), integers = vld1q_u8(table);
    const uint8x16x2_t halves = {{vqtbl1q_u8(integers, vandq_u8(pairs, vdupq_n_u8(15))),
                                  vqtbl1q_u8(integers, vshrq_n_u8(pairs, 4))}};
    vst2q_u8((uint8_t *)to, halves);
#else
    for (int i = 0; i < 16; i++)
        to[2 * i] = (int8_t)table[codes[i] & 15], to[2 * i + 1] = (int8_t)table[(uint8_t)codes[i] >> 4];
#endif
}

/* A channel, whose groups have multiples of 32 inputs. */
INLINE void expand_channel(const linear *l, const channel_steps *own, int64_t column, int8_t *to) {
    const int8_t *codes = l->qweight + column * l->row_bytes;
    const uint16_t *at = own->at[column % STEPPED_CHANNELS];
    for (int64_t g = 0, size = l->a->in_features / l->num_groups; g < l->num_groups; g++)
        for (int64_t k = 0; k < size; k += 32, codes += 16, to += 32) expand_32(codes, stepped_codes[0] + at[g], to);
}

/* The channels from `column` on, whose steps have been found. Returns where the computed ones end. */
static int64_t stepped_channels(const linear *l, int64_t column, int64_t column_end) {
    const channel_steps *own = own_steps();
    const int64_t width = l->a->in_features; /* tiles have two or four channels */
    const int64_t at_once = MIN(EXPANDED_CHANNELS, EXPANDED_BYTES / width / 4 * 4);
    for (int64_t stop; column < column_end; column = stop) {
        stop = MIN(column + at_once, column_end);
        linear some = *l;
        some.kind = INT8, some.shift = 0, some.row_bytes = width, some.num_groups = 1;
        some.qweight = expanded, some.scale = own->units + column % STEPPED_CHANNELS;
        some.y = l->y + column, some.bias = l->bias ? l->bias + column : NULL;
        some.columns_per_task = INT64_MAX;
        some.after = l->qweight + stop * l->row_bytes, some.after_bytes = l->row_bytes;
        for (int64_t c = column; c < stop; c++) expand_channel(l, own, c, expanded + (c - column) * width);
        linear_rest(&some, linear_fast(&some, 0, stop - column), stop - column);
    }
    return column_end;
}
