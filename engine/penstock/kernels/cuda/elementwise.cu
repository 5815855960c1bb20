/* CUDA kernels of Penstock: the arithmetic of kernels/reference.py for compute capability 6.1 and later.
 *
 * The files that nvrtc.py lists (SOURCES) are one program in that order, of which this one is the first. nvrtc.py
 * compiles the program without any header. The files also compile as C++: tests/engine/emulated_cuda.h runs them on the
 * CPU, thread by thread.
 *
 * Invariant of all kernels: the value of an output element depends on its own row (and its own sequence's K and V)
 * alone. Which rows share a launch, and how they are tiled, never changes the order of a floating-point sum. The
 * compiler must not fuse multiplications with additions (--fmad=false), so that all copies of a piece of code round
 * the same; a fused multiply-add is written as fmaf. Integer sums are exact in any order. */

/* This file has what the others share, then norms, activations, rope, and the writing of K and V. */

#define KERNEL extern "C" __global__ void
#define ALL_LANES 0xffffffffu
#define MAX_HALF 65504.0f

typedef signed char int8;
typedef long long int64;
typedef unsigned short half_bits;

__device__ inline float infinity() { return __int_as_float(0x7f800000); }

/* float16 is used for storage only: sm_61 computes with float16 at 1/64 of the rate of float32. */
#ifdef __CUDA_ARCH__
__device__ inline float half_to_float(half_bits bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ inline half_bits float_to_half(float value) {
    half_bits bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

/* Sums and maxima over a warp, in the order of a butterfly, so that every lane ends with the same bits. */
__device__ inline float warp_sum(float value) {
    for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
    return value;
}
__device__ inline float warp_max(float value) {
    for (int distance = 16; distance; distance /= 2)
        value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, distance));
    return value;
}
__device__ inline int warp_sum(int value) {
    for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
    return value;
}
__device__ inline unsigned warp_max(unsigned value) {
    for (int distance = 16; distance; distance /= 2)
        value = max(value, __shfl_xor_sync(ALL_LANES, value, distance));
    return value;
}

/* The sum over the block; `shared` has room for one number per warp. */
__device__ inline float block_sum(float value, float *shared) {
    value = warp_sum(value);
    __syncthreads(); /* a thread may still read an earlier sum */
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0.0f;
    for (int warp = 0; warp < blockDim.x / 32; warp++) total += shared[warp];
    return total;
}

/* Norms have one block per row. The row's width alone decides the number of threads, and so the order of a sum.
 * x_stride is the number of elements from row to row; y is contiguous. */

KERNEL rms_norm(const float *x, int64 x_stride, int width, const float *weight, float eps, float offset,
                float *y) {
    __shared__ float shared[32];
    const float *row = x + blockIdx.x * x_stride;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) squares += row[i] * row[i];
    const float inverse = 1.0f / sqrtf(block_sum(squares, shared) / width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        y[(int64)blockIdx.x * width + i] = row[i] * inverse * (weight[i] + offset);
}

/* weight and bias may be null. */
KERNEL layer_norm(const float *x, int64 x_stride, int width, const float *weight, const float *bias,
                  float eps, float *y) {
    __shared__ float shared[32];
    const float *row = x + blockIdx.x * x_stride;
    float sum = 0.0f, squares = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum += row[i];
    const float mean = block_sum(sum, shared) / width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const float centred = row[i] - mean;
        squares += centred * centred;
    }
    const float inverse = 1.0f / sqrtf(block_sum(squares, shared) / width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float normed = (row[i] - mean) * inverse;
        if (weight) normed *= weight[i];
        y[(int64)blockIdx.x * width + i] = bias ? normed + bias[i] : normed;
    }
}

enum { SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3, RELU_SQUARED = 4, SIGMOID_OF = 5 };

/* No form subtracts numbers that are nearly equal, so large negative inputs keep their precision. */
__device__ inline float activate(float x, int function) {
    switch (function) {
    case SILU:
        return x / (1.0f + expf(-x));
    case GELU_TANH: /* (1 + tanh u) / 2 = 1 / (1 + e^-2u) */
        return x / (1.0f + expf(-1.5957691216f * (x + 0.044715f * x * x * x)));
    case GELU:
        return 0.5f * x * erfcf(-0.70710678f * x);
    case SIGMOID_OF:
        return 1.0f / (1.0f + expf(-x));
    case RELU_SQUARED:
        return x < 0.0f ? 0.0f : x * x;
    default:
        return x < 0.0f ? 0.0f : x;
    }
}

/* y is [num_rows, width]. x has width columns or, if gated, 2 * width: then y = f(first half) * second half.
 * Grid: rows, then blocks of columns. */
KERNEL activation(const float *x, int64 x_stride, int width, int function, int is_gated, float *y) {
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= width) return;
    const float *row = x + blockIdx.x * x_stride;
    const float value = activate(row[i], function);
    y[(int64)blockIdx.x * width + i] = is_gated ? value * row[width + i] : value;
}

/* y[token, expert] = x . weight + bias, for a router (weight float32 [num_experts, width]; bias may be null).
 * Grid: tokens, then blocks of experts. A warp has one expert. */
KERNEL router_logits(const float *x, int64 x_stride, int width, const float *weight, const float *bias, int num_experts,
                     float *y) {
    const int expert = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (expert >= num_experts) return;
    const float *row = x + blockIdx.x * x_stride, *own = weight + (int64)expert * width;
    float sum = 0.0f;
    for (int i = lane; i < width; i += 32) sum = fmaf(row[i], own[i], sum);
    sum = warp_sum(sum);
    if (lane == 0) y[(int64)blockIdx.x * num_experts + expert] = bias ? sum + bias[expert] : sum;
}

enum { NO_FUNCTION = 0, SOFTMAX = 1, SIGMOID = 2 };

/* In place on the logits [num_tokens, num_experts] of a router. One warp per token. */
KERNEL router_scores(float *y, int num_experts, int function) {
    float *row = y + (int64)blockIdx.x * num_experts;
    const int lane = threadIdx.x;
    if (function == SIGMOID) {
        for (int i = lane; i < num_experts; i += 32) row[i] = 1.0f / (1.0f + expf(-row[i]));
        return;
    }
    float largest = -infinity(), sum = 0.0f;
    for (int i = lane; i < num_experts; i += 32) largest = fmaxf(largest, row[i]);
    largest = warp_max(largest);
    for (int i = lane; i < num_experts; i += 32) sum += row[i] = expf(row[i] - largest);
    sum = warp_sum(sum);
    for (int i = lane; i < num_experts; i += 32) row[i] /= sum;
}

/* In place on x [num_tokens, num_heads, head_dim]; cos and sin are [num_tokens, half]. One block per token.
 */
KERNEL rope(float *x, int64 x_stride, int num_heads, int head_dim, int half, const float *cos,
            const float *sin, int is_interleaved) {
    const int64 token = blockIdx.x;
    for (int n = threadIdx.x; n < num_heads * half; n += blockDim.x) {
        const int i = n % half;
        float *head = x + token * x_stride + n / half * head_dim;
        float *first = head + (is_interleaved ? 2 * i : i), *second = first + (is_interleaved ? 1 : half);
        const float a = *first, b = *second, c = cos[token * half + i], s = sin[token * half + i];
        *first = a * c - b * s;
        *second = b * c + a * s;
    }
}

/* A value beyond float16's range becomes its largest finite value; NaN stays NaN. */
__device__ inline half_bits clamp_to_half(float value) {
    return float_to_half(value > MAX_HALF ? MAX_HALF : value < -MAX_HALF ? -MAX_HALF : value);
}

/* Forms of keys and values: KV_CODES in operands.py. An element has 4 >> form bytes. */
enum { FORM_FLOAT, FORM_HALF, FORM_INT8, SCALE_BYTES = 2 };

/* bfloat16 is the upper half of a float32. */
__device__ inline float bfloat_to_float(unsigned bits) { return __uint_as_float(bits << 16); }

/* Rows of y = source, which has `count` numbers without gaps and may lie in the host's pinned memory. Another processor
 * has written it, so that no cache of the card may answer (volatile). */
KERNEL fetch(const volatile float *source, int count, int width, float *y, int64 y_stride) {
    const int step = gridDim.x * blockDim.x;
    for (int n = blockIdx.x * blockDim.x + threadIdx.x; n < count; n += step)
        y[n / width * y_stride + n % width] = source[n];
}

/* k and v are [num_tokens, num_kv_heads, head_dim], with strides between tokens; the caches are as in attention.cu. One
 * block per token. */
KERNEL write_kv(const float *k, int64 k_stride, const float *v, int64 v_stride, const int64 *slot_mapping,
                void *k_cache, void *v_cache, int form, int num_kv_heads, int head_dim, int block_size) {
    const int64 token = blockIdx.x, block = slot_mapping[token] / block_size;
    const int slot = slot_mapping[token] % block_size;
    for (int n = threadIdx.x; n < num_kv_heads * head_dim; n += blockDim.x) {
        const int head = n / head_dim, i = n % head_dim;
        const int64 base = (block * num_kv_heads + head) * head_dim * block_size;
        const int64 k_at = base + (int64)i * block_size + slot, v_at = base + (int64)slot * head_dim + i;
        const float key = k[token * k_stride + n];
        if (form == FORM_HALF)
            ((half_bits *)k_cache)[k_at] = clamp_to_half(key);
        else
            ((float *)k_cache)[k_at] = key;
        if (!v_cache) continue; /* the beginning of a key is the value */
        const float value = v[token * v_stride + n];
        if (form == FORM_HALF)
            ((half_bits *)v_cache)[v_at] = clamp_to_half(value);
        else
            ((float *)v_cache)[v_at] = value;
    }
}

/* A vector as integers, `stride` apart, and their scale: quantize_kv() of reference.py, by one warp. */
__device__ inline void write_int8(const float *x, int8 *codes, int stride, half_bits *scale, int head_dim) {
    unsigned largest = 0; /* the bits have the order of the numbers; NaN is the largest */
    for (int i = threadIdx.x % 32; i < head_dim; i += 32)
        largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
    largest = warp_max(largest);
    const bool is_number = largest < 0x7f800000u;
    float s = __uint_as_float(largest) / 127.0f;
    s = s < 1.17549435e-38f ? 0.0f : __uint_as_float((__float_as_uint(s) + 0xffffu) & 0xffff0000u);
    if (threadIdx.x % 32 == 0) *scale = is_number ? __float_as_uint(s) >> 16 : 0x7fc0u;
    const float divisor = is_number && s > 0.0f ? s : infinity();
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < head_dim; i += 32)
        codes[i * stride] = is_number ? __float2int_rn(x[i] / divisor) : 0;
}

/* write_kv() for int8. Grid: tokens; 2, for keys and for values. A warp has a head. */
KERNEL write_kv_int8(const float *k, int64 k_stride, const float *v, int64 v_stride, const int64 *slot_mapping,
                     int8 *k_cache, int8 *v_cache, int num_kv_heads, int head_dim, int block_size) {
    const int64 token = blockIdx.x, block = slot_mapping[token] / block_size;
    const int slot = slot_mapping[token] % block_size;
    const bool is_k = blockIdx.y == 0;
    const float *x = is_k ? k + token * k_stride : v + token * v_stride;
    for (int head = threadIdx.x / 32; head < num_kv_heads; head += blockDim.x / 32) {
        const int64 base = (block * num_kv_heads + head) * (head_dim + SCALE_BYTES) * block_size;
        int8 *codes = (is_k ? k_cache : v_cache) + base;
        half_bits *scales = (half_bits *)(codes + head_dim * block_size);
        write_int8(x + head * head_dim, codes + (is_k ? slot : slot * head_dim), is_k ? block_size : 1, scales + slot,
                   head_dim);
    }
}
