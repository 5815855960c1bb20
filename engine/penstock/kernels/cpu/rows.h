/* Norms, activations and rope, which work row by row. Part of cpu.c. */
#pragma once

typedef struct {
    const float *x, *weight, *bias;
    float *y;
    int64_t x_stride, width;
    float eps, offset;
} norm;

static void rms_norm_row(void *context, int64_t row) {
    const norm *n = context;
    const float *x = n->x + row * n->x_stride;
    float *y = n->y + row * n->width;
    const int64_t whole = n->width / LANES * LANES;
    vec sum = {};
    for (int64_t i = 0; i < whole; i += LANES) sum += load(x + i) * load(x + i);
    vec rest = load_some(x + whole, n->width - whole);
    sum += rest * rest;
    const float inverse = 1.0f / sqrtf(sum_lanes(sum) / (float)n->width + n->eps);
    for (int64_t i = 0; i < n->width; i++) y[i] = x[i] * inverse * (n->weight[i] + n->offset);
}

static void layer_norm_row(void *context, int64_t row) {
    const norm *n = context;
    const float *x = n->x + row * n->x_stride;
    float *y = n->y + row * n->width;
    const int64_t whole = n->width / LANES * LANES;
    vec sum = load_some(x + whole, n->width - whole);
    for (int64_t i = 0; i < whole; i += LANES) sum += load(x + i);
    const float mean = sum_lanes(sum) / (float)n->width;
    vec squares = {};
    for (int64_t i = 0; i < whole; i += LANES) {
        vec d = load(x + i) - splat(mean);
        squares += d * d;
    }
    for (int64_t i = whole; i < n->width; i++) squares[i - whole] += (x[i] - mean) * (x[i] - mean);
    const float inverse = 1.0f / sqrtf(sum_lanes(squares) / (float)n->width + n->eps);
    for (int64_t i = 0; i < n->width; i++) {
        float normed = (x[i] - mean) * inverse;
        if (n->weight) normed *= n->weight[i];
        y[i] = n->bias ? normed + n->bias[i] : normed;
    }
}

EXPORT void penstock_rms_norm(const float *x, int64_t x_stride, int64_t num_rows, int64_t width, const float *weight,
                              float offset, float eps, float *y) {
    norm n = {x, weight, NULL, y, x_stride, width, eps, offset};
    for_rows(num_rows, width, rms_norm_row, &n);
}

EXPORT void penstock_layer_norm(const float *x, int64_t x_stride, int64_t num_rows, int64_t width,
                                const float *weight, const float *bias, float eps, float *y) {
    norm n = {x, weight, bias, y, x_stride, width, eps, 0.0f};
    for_rows(num_rows, width, layer_norm_row, &n);
}

enum { SILU = 0, GELU_TANH = 1, GELU_ERF = 2, RELU = 3, RELU_SQUARED = 4, SIGMOID_OF = 5, CLAMPED_GATE = 6,
       LIMITED_GATE = 7 };

INLINE vec activate(vec x, int kind) {
    switch (kind) {
    case SILU:
        return x / (splat(1.0f) + exp_vec(-x));
    case GELU_TANH: {
        vec inner = splat(0.7978845608f) * (x + splat(0.044715f) * x * x * x);
        return splat(0.5f) * x * (splat(1.0f) + tanh_vec(inner));
    }
    case GELU_ERF: {
        vec e;
        for (int i = 0; i < LANES; i++) e[i] = erff(x[i] * 0.70710678f);
        return splat(0.5f) * x * (splat(1.0f) + e);
    }
    case SIGMOID_OF:
        return splat(1.0f) / (splat(1.0f) + exp_vec(-x));
    case RELU_SQUARED: /* max_vec gives its second operand where that is NaN */
        x = max_vec(splat(0.0f), x);
        return x * x;
    default:
        return max_vec(splat(0.0f), x);
    }
}

typedef struct {
    const float *x;
    float *y;
    int64_t x_stride, width;
    int kind, is_gated;
    float sharpness, limit; /* of CLAMPED_GATE; LIMITED_GATE has is_behind as `sharpness` */
} activation;

/* ClampedGate of operands.py: columns of gate and up lie by turns. What is no number stays so. */
static void clamped_gate_row(const activation *a, int64_t row) {
    const float *x = a->x + row * a->x_stride, limit = a->limit;
    for (int64_t i = 0; i < a->width; i += LANES) {
        const int64_t n = MIN(LANES, a->width - i);
        float gate[LANES] = {0}, up[LANES] = {0};
        for (int64_t j = 0; j < n; j++) {
            const float g = x[2 * (i + j)], u = x[2 * (i + j) + 1];
            gate[j] = (g > limit ? limit : g) * a->sharpness, up[j] = u > limit ? limit : u < -limit ? -limit : u;
        }
        const vec y = activate(load(gate), SILU) / splat(a->sharpness) * (load(up) + splat(1.0f));
        memcpy(a->y + row * a->width + i, &y, n * sizeof(float));
    }
}

/* LimitedGate of operands.py. min_vec and max_vec give their second operand where that is NaN. */
static void limited_gate_row(const activation *a, int64_t row) {
    const float *x = a->x + row * a->x_stride;
    const vec limit = splat(a->limit);
    const bool is_behind = a->sharpness != 0.0f;
    for (int64_t i = 0; i < a->width; i += LANES) {
        const int64_t n = MIN(LANES, a->width - i);
        const vec gate = n < LANES ? load_some(x + i, n) : load(x + i);
        const vec up = n < LANES ? load_some(x + a->width + i, n) : load(x + a->width + i);
        vec y = activate(is_behind ? gate : min_vec(limit, gate), SILU);
        y = (is_behind ? min_vec(limit, y) : y) * max_vec(-limit, min_vec(limit, up));
        memcpy(a->y + row * a->width + i, &y, n * sizeof(float));
    }
}

static void activation_row(void *context, int64_t row) {
    const activation *a = context;
    if (a->kind == CLAMPED_GATE || a->kind == LIMITED_GATE) {
        (a->kind == CLAMPED_GATE ? clamped_gate_row : limited_gate_row)(a, row);
        return;
    }
    const float *x = a->x + row * a->x_stride, *up = x + a->width;
    float *y = a->y + row * a->width;
    int64_t i = 0;
    for (; i + LANES <= a->width; i += LANES) {
        vec v = activate(load(x + i), a->kind);
        store(y + i, a->is_gated ? v * load(up + i) : v);
    }
    const int64_t n = a->width - i;
    vec v = activate(load_some(x + i, n), a->kind);
    if (a->is_gated) v *= load_some(up + i, n);
    memcpy(y + i, &v, n * sizeof(float));
}

/* y is [num_rows, width]. x has width columns or, if gated, 2 * width: then y = f(first half) * second half. */
EXPORT void penstock_activation(const float *x, int64_t x_stride, int64_t num_rows, int64_t width, int kind,
                                float sharpness, float limit, int is_gated, float *y) {
    activation a = {x, y, x_stride, width, kind, is_gated, sharpness, limit};
    for_rows(num_rows, 4 * width, activation_row, &a);
}

typedef struct {
    float *x;
    int64_t x_stride, num_heads, head_dim, half;
    const float *cos, *sin;
    int is_interleaved;
} rope;

static void rope_row(void *context, int64_t token) {
    const rope *r = context;
    const float *cos = r->cos + token * r->half, *sin = r->sin + token * r->half;
    for (int64_t head = 0; head < r->num_heads; head++) {
        float *x = r->x + token * r->x_stride + head * r->head_dim;
        for (int64_t i = 0; i < r->half; i++) {
            const int64_t first = r->is_interleaved ? 2 * i : i, second = r->is_interleaved ? 2 * i + 1 : i + r->half;
            const float a = x[first], b = x[second];
            x[first] = a * cos[i] - b * sin[i];
            x[second] = b * cos[i] + a * sin[i];
        }
    }
}

/* Rotates in place x [num_tokens, num_heads, head_dim]; cos and sin are [num_tokens, half]. */
EXPORT void penstock_rope(float *x, int64_t x_stride, int64_t num_tokens, int64_t num_heads, int64_t head_dim,
                          int64_t half, const float *cos, const float *sin, int is_interleaved) {
    rope r = {x, x_stride, num_heads, head_dim, half, cos, sin, is_interleaved};
    for_rows(num_tokens, num_heads * head_dim, rope_row, &r);
}
