/* Vectors of floats, float16, and the functions that every kernel shares. Part of cpu.c. */
#pragma once

/* GCC's vector types, as wide as one register: GCC keeps wider vectors in memory. Keys and values of attention come
 * in groups of 16, which every width divides. */
#if defined(__AVX512F__)
enum { LANES = 16 };
#define ALL_LANES(x) {x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}
#define COUNT_LANES {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif defined(__AVX2__)
enum { LANES = 8 };
#define ALL_LANES(x) {x, x, x, x, x, x, x, x}
#define COUNT_LANES {0, 1, 2, 3, 4, 5, 6, 7}
#else
enum { LANES = 4 };
#define ALL_LANES(x) {x, x, x, x}
#define COUNT_LANES {0, 1, 2, 3}
#endif
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
static const ivec LANE_INDEX = COUNT_LANES;

INLINE vec load(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store(float *p, vec v) { memcpy(p, &v, sizeof v); }
INLINE vec splat(float x) { return (vec)ALL_LANES(x); } /* not (vec){} + x: that adds */
/* n < LANES elements, the other lanes 0. */
INLINE vec load_some(const float *p, int64_t n) {
    vec v = {};
    memcpy(&v, p, n * sizeof(float));
    return v;
}
INLINE vec select_vec(ivec mask, vec a, vec b) { return (vec)(((ivec)a & mask) | ((ivec)b & ~mask)); }
/* max_vec and min_vec give b where a or b is NaN. */
#if defined(__AVX512F__)
INLINE vec max_vec(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vec min_vec(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
/* Keeps v in a register, where GCC might keep it in memory. The asm itself generates no code. */
#define IN_REGISTER(v) __asm__("" : "+v"(v))
#elif defined(__AVX2__)
INLINE vec max_vec(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vec min_vec(vec a, vec b) { return (vec)_mm256_min_ps((__m256)a, (__m256)b); }
#define IN_REGISTER(v) __asm__("" : "+x"(v))
#else
INLINE vec max_vec(vec a, vec b) { return select_vec(a > b, a, b); }
INLINE vec min_vec(vec a, vec b) { return select_vec(a < b, a, b); }
#if defined(__aarch64__)
#define IN_REGISTER(v) __asm__("" : "+w"(v))
#else
#define IN_REGISTER(v) (void)0
#endif
#endif
INLINE float sum_lanes(vec v) {
    float s[LANES];
    store(s, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) s[i] += s[i + width];
    return s[0];
}
INLINE float max_lanes(vec v) {
    float m = v[0];
    for (int i = 1; i < LANES; i++) m = m > v[i] || m != m ? m : v[i];
    return m;
}
INLINE vec abs_vec(vec v) { return (vec)((ivec)v & 0x7fffffff); }

/* e^x = 2^n times a polynomial on [-ln2/2, ln2/2] (Cody and Waite's reduction; Taylor to degree 7, error below 2e-8
 * on this interval). Below -87, which gives the smallest normal number, the result is 0; from 88 on it saturates. */
INLINE vec exp_vec(vec x) {
    vec clamped = max_vec(splat(-87.0f), x); /* NaN stays NaN */
    clamped = min_vec(splat(88.0f), clamped);
    /* Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits. */
    const vec magic = splat(12582912.0f);
    vec shifted = clamped * splat(1.44269504f) + magic;
    vec n = shifted - magic;
    vec r = clamped - n * splat(0.693359375f);
    r = r + n * splat(2.12194440e-4f);
    vec p = splat(1.0f / 5040.0f);
    p = p * r + splat(1.0f / 720.0f);
    p = p * r + splat(1.0f / 120.0f);
    p = p * r + splat(1.0f / 24.0f);
    p = p * r + splat(1.0f / 6.0f);
    p = p * r + splat(0.5f);
    p = p * r + splat(1.0f);
    p = p * r + splat(1.0f);
    ivec exponent = ((ivec)shifted - (ivec)magic) << 23;
    vec result = (vec)((ivec)p + exponent);
    return select_vec(x < splat(-87.0f), splat(0.0f), result);
}

static const float LOG2_E = 1.44269504f;

/* 2^x for x <= 0 is 2^n times a polynomial on [-1/2, 1/2] (through Chebyshev's points, relative error below 3e-9).
 * Where no normal number can hold the result, the result is 0, or with AVX512 a subnormal number. */
INLINE vec exp2_vec(vec x) {
    const vec clamped = max_vec(splat(-200.0f), x), magic = splat(12582912.0f);
    const vec shifted = clamped + magic, n = shifted - magic, r = clamped - n;
    vec p = splat(1.54614449e-4f);
    p = p * r + splat(1.34004280e-3f);
    p = p * r + splat(9.61805694e-3f);
    p = p * r + splat(5.55032715e-2f);
    p = p * r + splat(2.40226507e-1f);
    p = p * r + splat(6.93147182e-1f);
    p = p * r + splat(1.0f);
#if defined(__AVX512F__)
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const ivec exponent = ((ivec)shifted - (ivec)magic) << 23;
    return select_vec(x < splat(-126.0f), splat(0.0f), (vec)((ivec)p + exponent));
#endif
}

/* tanh x = 1 - 2 / (e^2x + 1), with an absolute error below 2e-7, which is enough for its callers. */
INLINE vec tanh_vec(vec x) { return splat(1.0f) - splat(2.0f) / (exp_vec(x + x) + splat(1.0f)); }

/* float16 */

INLINE float half_to_float(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023, bits;
    if (exponent == 31) bits = sign | 0x7f800000 | mantissa << 13;
    else if (exponent) bits = sign | (exponent + 112) << 23 | mantissa << 13;
    else {
        float f = (float)mantissa * 5.9604644775390625e-8f; /* 2^-24 */
        memcpy(&bits, &f, 4);
        bits |= sign;
    }
    float f;
    memcpy(&f, &bits, 4);
    return f;
#endif
}

/* Rounds to nearest even. A value beyond float16's range becomes its largest finite value. */
INLINE uint16_t float_to_half(float f) {
    f = MIN(MAX(f, -65504.0f), 65504.0f);
#if defined(__F16C__)
    return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT);
#else
    uint32_t bits, sign;
    memcpy(&bits, &f, 4);
    sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits < 0x38800000) { /* below 2^-14: subnormal, unit 2^-24 */
        float a;
        memcpy(&a, &bits, 4);
        return sign | (uint16_t)nearbyintf(a * 16777216.0f);
    }
    bits += 0xfff + (bits >> 13 & 1);
    return sign | (uint16_t)((bits >> 13) - (112 << 10));
#endif
}

INLINE vec load_half(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    vec v;
    for (int i = 0; i < LANES; i++) v[i] = half_to_float(p[i]);
    return v;
#endif
}

/* float_to_half() of every lane. */
INLINE void store_half(uint16_t *p, vec v) {
#if defined(__AVX2__) || defined(__aarch64__)
    v = min_vec(max_vec(v, splat(-65504.0f)), splat(65504.0f));
#endif
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__)
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
#else
    for (int i = 0; i < LANES; i++) p[i] = float_to_half(v[i]);
#endif
}

/* int8, and bfloat16, which is the upper half of a float32 */

/* LANES integers as floats. */
INLINE vec load_int8(const int8_t *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    vec v;
    for (int i = 0; i < LANES; i++) v[i] = p[i];
    return v;
#endif
}

INLINE float bfloat_to_float(uint16_t h) {
    const uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE vec load_bfloat(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    vec v;
    for (int i = 0; i < LANES; i++) v[i] = bfloat_to_float(p[i]);
    return v;
#endif
}
