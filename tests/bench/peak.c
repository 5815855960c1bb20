/* The arithmetic of one core and nothing else, on registers: independent dot products of integers (with VNNI or AVX2),
 * and multiply-adds of floats. */
#include <immintrin.h>
#include <stdint.h>

#define ALL(DO) DO(a) DO(b) DO(c) DO(d) DO(e) DO(f) DO(g) DO(h) DO(i) DO(j) DO(k) DO(l)
#if defined(__AVX512VNNI__)
typedef __m512i wide;
typedef __m512 floats;
#define DOT(v) v = _mm512_dpbusd_epi32(v, x, y);
#else
typedef __m256i wide;
typedef __m256 floats;
#define DOT(v)                                                                                     \
    {                                                                                              \
        wide products = _mm256_madd_epi16(x, y);                                                   \
        __asm__("" : "+x"(products));                                                              \
        v = _mm256_add_epi32(v, products);                                                         \
    }
#endif
#define DECLARE(v) wide v = x;
/* The empty asm keeps each in a register and forbids to compute it ahead. */
#define STEP(v) DOT(v) __asm__ volatile("" : "+x"(v), "+x"(x));
#define ADD(v) total += v[0];

/* 12 * rounds dot products of 64 pairs, or of 16. */
int32_t penstock_peak(int64_t rounds) {
    wide x = {3, 3, 3, 3}, y = {5, 5, 5, 5};
    int64_t total = 0;
    ALL(DECLARE)
    for (int64_t r = 0; r < rounds; r++) { ALL(STEP) }
    ALL(ADD)
    return (int32_t)total;
}

#define DECLARE_FLOATS(v) floats v = x;
#define MULTIPLY_ADD(v) v += x * y;                                                                \
    __asm__ volatile("" : "+x"(v), "+x"(x));

/* 12 * rounds multiply-adds of 16 floats, or of 8. */
float penstock_peak_floats(int64_t rounds) {
    floats x = {3, 3, 3, 3}, y = {5, 5, 5, 5};
    float total = 0;
    ALL(DECLARE_FLOATS)
    for (int64_t r = 0; r < rounds; r++) { ALL(MULTIPLY_ADD) }
    ALL(ADD)
    return total;
}
