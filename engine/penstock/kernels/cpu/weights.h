/* Quantizing weights to INT8, as weights/quantize.py does it with torch. Part of cpu.c. */
#pragma once

typedef uint16_t half_bits __attribute__((vector_size(2 * LANES)));
typedef int8_t bytes_vec __attribute__((vector_size(LANES)));

enum { FLOAT32_WEIGHTS = 0, FLOAT16_WEIGHTS = 1, BFLOAT16_WEIGHTS = 2 };

INLINE vec load_unquantized(const void *weights, int64_t i, int code) {
    if (code == FLOAT32_WEIGHTS) return load((const float *)weights + i);
    const uint16_t *p = (const uint16_t *)weights + i;
    if (code == FLOAT16_WEIGHTS) return load_half(p);
    half_bits bits;
    memcpy(&bits, p, sizeof bits);
    return (vec)(__builtin_convertvector(bits, ivec) << 16);
}

/* n < LANES weights, the other lanes 0. */
INLINE vec load_some_unquantized(const void *weights, int64_t i, int64_t n, int code) {
    const int64_t width = code == FLOAT32_WEIGHTS ? 4 : 2;
    _Alignas(64) char some[4 * LANES] = {}; /* char may be read as any type */
    memcpy(some, (const char *)weights + i * width, n * width);
    return load_unquantized(some, 0, code);
}

/* The scale of `width` weights: max|w| / 127. A subnormal scale has too few bits to divide by and becomes 0. NaN if a
 * weight is no finite number. */
INLINE float weight_scale(const void *weights, int64_t width, int code) {
    const int64_t whole = width / LANES * LANES;
    vec v = load_some_unquantized(weights, whole, width - whole, code);
    vec most = abs_vec(v), not_finite = v * splat(0.0f); /* infinity times 0 is NaN */
    for (int64_t i = 0; i < whole; i += LANES) {
        v = load_unquantized(weights, i, code);
        most = max_vec(abs_vec(v), most);
        not_finite += v * splat(0.0f);
    }
    if (sum_lanes(not_finite) != 0.0f) return NAN;
    const float scale = max_lanes(most) / 127.0f;
    return scale >= 0x1p-126f ? scale : 0.0f;
}

/* Quantizes LANES weights in units of their scale: `quotient` is rounded to the nearest, half to even. No quotient is
 * beyond 127 (1 + 2^-23). */
INLINE bytes_vec round_weights(vec quotient, vec *lost, vec *of) {
    const vec magic = splat(12582912.0f); /* adding 1.5 * 2^23 rounds to an integer */
    const vec rounded = quotient + magic - magic, error = quotient - rounded;
    *lost += error * error;
    *of += quotient * quotient;
    return __builtin_convertvector(__builtin_convertvector(rounded, ivec), bytes_vec);
}

/* `sums` gets the squares that rounding lost, and those of the weights. Computed in units of the scale, the sums can
 * neither overflow nor vanish. */
INLINE void quantize_weights(const void *weights, int64_t width, int code, float scale, int8_t *q, double *sums) {
    const int64_t whole = width / LANES * LANES;
    const vec divisor = splat(scale > 0.0f ? scale : INFINITY);
    vec lost = {}, of = {};
    for (int64_t i = 0; i < whole; i += LANES) {
        const bytes_vec rounded = round_weights(load_unquantized(weights, i, code) / divisor, &lost, &of);
        memcpy(q + i, &rounded, LANES);
    }
    const vec rest = load_some_unquantized(weights, whole, width - whole, code) / divisor;
    const bytes_vec rounded = round_weights(rest, &lost, &of);
    memcpy(q + whole, &rounded, width - whole);
    const double square = (double)scale * scale;
    sums[0] += sum_lanes(lost) * square;
    sums[1] += sum_lanes(of) * square;
}

INLINE void quantize_all(const void *weights, int64_t num_scales, int64_t width, int code, int8_t *q, float *scales,
                         double *sums) {
    const int64_t row_bytes = width * (code == FLOAT32_WEIGHTS ? 4 : 2);
    for (int64_t row = 0; row < num_scales; row++, q += width) {
        const char *row_weights = (const char *)weights + row * row_bytes;
        scales[row] = weight_scale(row_weights, width, code);
        quantize_weights(row_weights, width, code, scales[row], q, sums);
    }
}

/* weights [num_scales, width] -> q of the same shape, and scales [num_scales]. `sums` are set to the sums of squares of
 * all rows; the second is NaN if a weight is no finite number. Computes in the caller's thread, several of which may
 * be here at the same time. */
EXPORT void penstock_quantize_weights(const void *weights, int code, int64_t num_scales, int64_t width, int8_t *q,
                                      float *scales, double *sums) {
    sums[0] = sums[1] = 0.0;
    if (code == FLOAT32_WEIGHTS) quantize_all(weights, num_scales, width, FLOAT32_WEIGHTS, q, scales, sums);
    else if (code == FLOAT16_WEIGHTS) quantize_all(weights, num_scales, width, FLOAT16_WEIGHTS, q, scales, sums);
    else quantize_all(weights, num_scales, width, BFLOAT16_WEIGHTS, q, scales, sums);
}
