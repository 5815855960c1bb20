/* INT8 weights whose upper and lower four bits lie apart: w + 128 = 16 * upper + lower, two inputs to a byte of each
 * plane, the first in the low half. Part of linear.h. */
#pragma once

/* JOINED bytes of each plane -> twice as many integers. A nibble that moves within 16 bits also comes into the next
 * byte, where the mask leaves it out. */
#if defined(__AVX512BW__)
enum { JOINED = 64 };
INLINE __m512i choose_upper(__m512i upper, __m512i lower) {
    return _mm512_ternarylogic_epi32(_mm512_set1_epi8((char)0xf0), upper, lower, 0xca);
}
INLINE __m512i even_weights(__m512i upper, __m512i lower) { return choose_upper(_mm512_slli_epi16(upper, 4), lower); }
INLINE __m512i odd_weights(__m512i upper, __m512i lower) { return choose_upper(upper, _mm512_srli_epi16(lower, 4)); }
INLINE void join_bytes(const uint8_t *upper, const uint8_t *lower, int8_t *to) {
    const __m512i u = _mm512_loadu_si512(upper), l = _mm512_loadu_si512(lower), sign = _mm512_set1_epi8((char)0x80);
    const __m512i even = _mm512_xor_si512(even_weights(u, l), sign), odd = _mm512_xor_si512(odd_weights(u, l), sign);
    const __m512i first = _mm512_unpacklo_epi8(even, odd), second = _mm512_unpackhi_epi8(even, odd);
    const __m512i low = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), high = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi64(first, low, second));
    _mm512_storeu_si512(to + 64, _mm512_permutex2var_epi64(first, high, second));
}
#elif defined(__AVX2__)
enum { JOINED = 32 };
INLINE void join_bytes(const uint8_t *upper, const uint8_t *lower, int8_t *to) {
    const __m256i u = _mm256_loadu_si256((const __m256i *)upper), l = _mm256_loadu_si256((const __m256i *)lower);
    const __m256i mask = _mm256_set1_epi8((char)0xf0), sign = _mm256_set1_epi8((char)0x80);
    const __m256i even = _mm256_or_si256(_mm256_and_si256(mask, _mm256_slli_epi16(u, 4)), _mm256_andnot_si256(mask, l));
    const __m256i odd = _mm256_or_si256(_mm256_and_si256(mask, u), _mm256_andnot_si256(mask, _mm256_srli_epi16(l, 4)));
    const __m256i first = _mm256_xor_si256(_mm256_unpacklo_epi8(even, odd), sign);
    const __m256i second = _mm256_xor_si256(_mm256_unpackhi_epi8(even, odd), sign);
    _mm256_storeu_si256((__m256i *)to, _mm256_permute2x128_si256(first, second, 0x20));
    _mm256_storeu_si256((__m256i *)(to + 32), _mm256_permute2x128_si256(first, second, 0x31));
}
#elif defined(__aarch64__)
enum { JOINED = 16 };
INLINE void join_bytes(const uint8_t *upper, const uint8_t *lower, int8_t *to) {
    const uint8x16_t u = vld1q_u8(upper), l = vld1q_u8(lower), sign = vdupq_n_u8(0x80);
    const uint8x16x2_t both = {{veorq_u8(vsliq_n_u8(l, u, 4), sign), veorq_u8(vsriq_n_u8(u, l, 4), sign)}};
    vst2q_u8((uint8_t *)to, both);
}
#else
enum { JOINED = 16 };
INLINE void join_bytes(const uint8_t *upper, const uint8_t *lower, int8_t *to) {
    for (int i = 0; i < JOINED; i++) {
        to[2 * i] = (int8_t)((uint8_t)(upper[i] << 4 | (lower[i] & 15)) ^ 0x80);
        to[2 * i + 1] = (int8_t)(((upper[i] & 0xf0) | lower[i] >> 4) ^ 0x80);
    }
}
#endif

INLINE int8_t joined_weight(const linear *l, int64_t column, int64_t k) {
    const int upper = (uint8_t)l->qweight[column * l->row_bytes + k / 2], shift = k % 2 * 4;
    const int lower = l->lower[column * l->lower_bytes + k / 2];
    return (int8_t)(((upper >> shift & 15) << 4 | (lower >> shift & 15)) ^ 0x80);
}

/* The weights of a channel's inputs from k on, an even number of them. `k` is even. */
INLINE void join_weights(const linear *l, int64_t column, int64_t k, int64_t inputs, int8_t *to) {
    const uint8_t *upper = (const uint8_t *)l->qweight + column * l->row_bytes + k / 2;
    const uint8_t *lower = l->lower + column * l->lower_bytes + k / 2;
    const int64_t bytes = inputs / 2;
    int64_t i = 0;
    for (; i + JOINED <= bytes; i += JOINED) join_bytes(upper + i, lower + i, to + 2 * i);
    if (i == bytes) return;
    uint8_t rest[2][JOINED] = {{0}};
    int8_t both[2 * JOINED];
    memcpy(rest[0], upper + i, bytes - i), memcpy(rest[1], lower + i, bytes - i);
    join_bytes(rest[0], rest[1], both);
    memcpy(to + 2 * i, both, 2 * (bytes - i));
}
