/* The INT8 arithmetic of one core and nothing else: independent dot products of registers. */
#include <immintrin.h>
#include <stdint.h>

#define ALL(DO) DO(a) DO(b) DO(c) DO(d) DO(e) DO(f) DO(g) DO(h) DO(i) DO(j) DO(k) DO(l)
#define DECLARE(v) __m512i v = x;
/* The empty asm keeps each in a register and forbids to compute it ahead. */
#define STEP(v) v = _mm512_dpbusd_epi32(v, x, y); __asm__("" : "+v"(v));
#define ADD(v) total = _mm512_add_epi32(total, v);

/* 12 * rounds dot products of 64 pairs. */
int32_t penstock_peak(int64_t rounds) {
    const __m512i x = _mm512_set1_epi8(3), y = _mm512_set1_epi8(5);
    __m512i total = x;
    ALL(DECLARE)
    for (int64_t r = 0; r < rounds; r++) { ALL(STEP) }
    ALL(ADD)
    return _mm512_reduce_add_epi32(total);
}
