/* AVX-VNNI's instruction with AVX2 alone, in the place of the compiler's intrinsic: included before cpu.c, so that its
 * AVX-VNNI build runs on any processor with AVX2. As Intel's manual (volume 2, VPDPBUSD) has it: unsigned bytes times
 * signed bytes, four products a lane, added without saturation. */
#include <immintrin.h>

#define __AVXVNNI__ 1
#define _mm256_dpbusd_avx_epi32(sums, w, x) emulated_dpbusd(sums, w, x)

/* Bytes at even and at odd places become words, whose products are added up in pairs: no sum leaves 32 bits. */
static inline __m256i emulated_dpbusd(__m256i sums, __m256i w, __m256i x) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
    return _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
}
