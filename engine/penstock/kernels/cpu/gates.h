/* Gates of recurrent layers: a sigmoid, and the decay of a state, in float64 and rounded to float32. A state keeps what
 * an error of its decay makes of it over a whole text. Part of cpu.c. */
#pragma once

typedef double dvec __attribute__((vector_size(4 * LANES)));
typedef int64_t dmask __attribute__((vector_size(4 * LANES)));
enum { HALF_LANES = LANES / 2 };

INLINE dvec splat_double(double x) {
    dvec v;
    for (int i = 0; i < HALF_LANES; i++) v[i] = x;
    return v;
}
INLINE dvec select_double(dmask mask, dvec a, dvec b) { return (dvec)(((dmask)a & mask) | ((dmask)b & ~mask)); }

/* e^x = 2^n times a polynomial on [-ln2/2, ln2/2] (Cody and Waite's reduction; Taylor to degree 13, error below 5e-18
 * on this interval). The result is 0 below -708; from 709 on it saturates. NaN stays NaN. */
INLINE dvec exp_double(dvec x) {
    static const double factors[] = {1 / 6227020800.0, 1 / 479001600.0, 1 / 39916800.0, 1 / 3628800.0, 1 / 362880.0,
                                     1 / 40320.0, 1 / 5040.0, 1 / 720.0, 1 / 120.0, 1 / 24.0, 1 / 6.0, 0.5, 1.0, 1.0};
    const dvec least = splat_double(-708.0), most = splat_double(709.0);
    dvec r = select_double(x < least, least, x);
    r = select_double(r > most, most, r);
    /* Adding 1.5 * 2^52 rounds to an integer and leaves it in the low bits. */
    const dvec magic = splat_double(6755399441055744.0), shifted = r * splat_double(1.4426950408889634) + magic;
    const dvec n = shifted - magic;
    r = r - n * splat_double(6.93147180369123816490e-01);
    r = r - n * splat_double(1.90821492927058770002e-10);
    dvec p = splat_double(factors[0]);
#pragma GCC unroll 16
    for (int i = 1; i < 14; i++) p = p * r + splat_double(factors[i]);
    const dmask exponent = ((dmask)shifted - (dmask)magic) << 52;
    return select_double(x < least, splat_double(0.0), (dvec)((dmask)p + exponent));
}

/* log(1 + e^x) = max(x, 0) + log(1 + v) with v = e^-|x|. log(1 + v) = 2 artanh(v / (2 + v)), whose series of 18 terms
 * has an error below 2e-18 here. Above 20 it is x, as torch has it. */
INLINE dvec softplus_double(dvec x) {
    const dvec zero = splat_double(0.0), v = exp_double(select_double(x > zero, -x, x));
    const dvec s = v / (v + splat_double(2.0)), z = s * s;
    dvec p = splat_double(1 / 35.0);
#pragma GCC unroll 32
    for (int i = 33; i > 0; i -= 2) p = p * z + splat_double(1.0 / i);
    const dvec y = select_double(x > zero, x, zero) + splat_double(2.0) * s * p;
    return select_double(x > splat_double(20.0), x, select_double(x == x, y, x));
}

typedef struct {
    const float *x, *bias, *a_log;
    float *steps, *y;
    int64_t x_stride, num_heads, head_dim;
    double least, most, bound, factor;
} gates;

INLINE void decay_lanes(const gates *g, const float *x, const float *bias, int64_t n, double rate, float *steps,
                        float *y) {
    dvec v = splat_double(0.0), own;
    for (int64_t i = 0; i < n; i++) v[i] = (double)x[i] + (bias ? (double)bias[i] : 0.0);
    if (g->bound) {
        const dvec one = splat_double(1.0);
        own = exp_double(splat_double(g->bound) * (one / (one + exp_double(splat_double(rate) * v))));
        for (int64_t i = 0; i < n; i++) y[i] = (float)own[i];
        return;
    }
    v = softplus_double(v);
    v = select_double(v < splat_double(g->least), splat_double(g->least), v);
    v = select_double(v > splat_double(g->most), splat_double(g->most), v);
    own = exp_double(splat_double(rate) * v);
    for (int64_t i = 0; i < n; i++) y[i] = (float)own[i];
    for (int64_t i = 0; steps && i < n; i++) steps[i] = (float)v[i];
}

static void decay_row(void *context, int64_t row) {
    const gates *g = context;
    const int64_t d = g->head_dim, width = g->num_heads * d;
    const float *x = g->x + row * g->x_stride;
    float *steps = g->steps ? g->steps + row * width : NULL, *y = g->y + row * width;
    for (int64_t head = 0; head < g->num_heads; head++) {
        const double rate = -exp_double(splat_double(g->a_log[head]))[0];
        for (int64_t i = head * d, end = i + d; i < end; i += HALF_LANES)
            decay_lanes(g, x + i, g->bias ? g->bias + i : NULL, MIN(HALF_LANES, end - i), rate,
                        steps ? steps + i : NULL, y + i);
    }
}

/* steps = softplus(x + bias), from `least` to `most`, and y = exp(-e^a_log steps), each [num_rows, num_heads,
 * head_dim]; a_log is [num_heads]. With a bound other than 0, y = exp(bound * sigmoid(e^a_log (x + bias))), and there
 * are no steps. `bias` and `steps` may be NULL. */
EXPORT void penstock_decays(const float *x, int64_t x_stride, int64_t num_rows, int64_t num_heads, int64_t head_dim,
                            const float *bias, const float *a_log, double least, double most, double bound,
                            float *steps, float *y) {
    gates g = {x, bias, a_log, steps, y, x_stride, num_heads, head_dim, least, most, bound, 1.0};
    for_rows(num_rows, 16 * num_heads * head_dim, decay_row, &g);
}

static void gate_row(void *context, int64_t row) {
    const gates *g = context;
    const float *x = g->x + row * g->x_stride;
    float *y = g->y + row * g->num_heads;
    for (int64_t i = 0; i < g->num_heads; i += HALF_LANES) {
        const int64_t n = MIN(HALF_LANES, g->num_heads - i);
        dvec v = splat_double(0.0);
        for (int64_t j = 0; j < n; j++) v[j] = (double)x[i + j];
        v = splat_double(g->factor) * (splat_double(1.0) / (splat_double(1.0) + exp_double(-v)));
        for (int64_t j = 0; j < n; j++) y[i + j] = (float)v[j];
    }
}

/* y = factor * sigmoid(x), [num_rows, width]. */
EXPORT void penstock_gates(const float *x, int64_t x_stride, int64_t num_rows, int64_t width, double factor, float *y) {
    gates g = {x, NULL, NULL, NULL, y, x_stride, width, 1, 0.0, 0.0, 0.0, factor};
    for_rows(num_rows, 8 * width, gate_row, &g);
}
