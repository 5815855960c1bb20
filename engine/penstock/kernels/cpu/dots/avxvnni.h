/* Steps of 32 inputs with AVX-VNNI. Part of linear/dots.h. vpdpbusd multiplies unsigned weights by signed activations:
 * linear/vnni.h says how INT8 weights become unsigned. */
#pragma once

typedef __m256i step, lanes;
typedef __m256i code_table;

INLINE step load_step(const int8_t *from) { return _mm256_loadu_si256((const __m256i *)from); }
INLINE step load_weights(const int8_t *from) {
    return _mm256_xor_si256(load_step(from), _mm256_set1_epi8((char)0x80));
}
INLINE code_table load_table(const uint8_t *table) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
}

/* 16 bytes with 32 codes -> the integers that the codes stand for, in the inputs' order. */
INLINE step load_codes(const int8_t *from, code_table table, const int kind) {
    const __m256i pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from));
    const __m256i codes =
        _mm256_and_si256(_mm256_or_si256(pairs, _mm256_slli_epi16(pairs, 4)), _mm256_set1_epi8(15));
    return kind == INT4 ? codes : _mm256_shuffle_epi8(table, codes);
}

INLINE lanes no_lanes(void) { return _mm256_setzero_si256(); }
INLINE lanes dot(lanes sums, step w, step x) { return _mm256_dpbusd_avx_epi32(sums, w, x); }

INLINE lanes plus(lanes a, lanes b) { return _mm256_add_epi32(a, b); }
INLINE lanes merge_rows(lanes hi, lanes lo) { return _mm256_add_epi32(_mm256_slli_epi32(hi, 8), lo); }

/* The sums of four accumulators' lanes. */
INLINE sums4 add_lanes(const lanes *a) {
    const lanes quarters = _mm256_hadd_epi32(_mm256_hadd_epi32(a[0], a[1]), _mm256_hadd_epi32(a[2], a[3]));
    return (sums4)_mm_add_epi32(_mm256_castsi256_si128(quarters), _mm256_extracti128_si256(quarters, 1));
}
