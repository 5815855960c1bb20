/* CPU kernels of Penstock: the arithmetic of kernels/reference.py, fast and batch-invariant.
 *
 * One source, compiled several times with different -m flags; cpu.py loads the best library that the
 * processor runs. No torch header, no OpenMP (torch brings its own copy of that runtime, and two of
 * them would fight for the cores): a pool of plain threads.
 *
 * Invariant that everything here keeps: the value of an output element is a function of its own row
 * (and its own sequence's K and V) alone. Which rows share a call, how rows are tiled and which thread
 * computes them never changes the order of a floating-point sum. Integer sums are exact in any order.
 */
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* ---------------------------------------------------------------- threads */

typedef void (*task_fn)(void *context, int64_t task);

static struct {
    pthread_mutex_t caller; /* one parallel region at a time, whoever calls */
    pthread_mutex_t lock;
    pthread_cond_t wake, resized;
    int num_workers;      /* there are so many, */
    atomic_int num_wanted; /* and so many take part; the others sleep */
    atomic_uint generation;
    atomic_long next, num_tasks;
    atomic_bool is_open; /* fn, context and num_tasks are those of a region that has tasks left */
    atomic_int num_inside;
    task_fn fn;
    void *context;
} pool = {.caller = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER,
          .resized = PTHREAD_COND_INITIALIZER};

INLINE void relax(void) {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

static void run_tasks(void) {
    int64_t num_tasks = atomic_load(&pool.num_tasks), task;
    while ((task = atomic_fetch_add(&pool.next, 1)) < num_tasks) pool.fn(pool.context, task);
}

/* A worker spins for about 0.1 ms after a region (the next one is usually that near: a step is a chain of
 * short regions, and waking up takes as long), then sleeps. */
enum { SPINS = 10000 };

static void *worker(void *argument) {
    const int index = (int)(uintptr_t)argument;
    unsigned seen = atomic_load(&pool.generation);
    for (;;) {
        if (index >= atomic_load(&pool.num_wanted)) {
            pthread_mutex_lock(&pool.lock);
            while (index >= atomic_load(&pool.num_wanted)) pthread_cond_wait(&pool.resized, &pool.lock);
            pthread_mutex_unlock(&pool.lock);
        }
        for (int i = 0; i < SPINS && atomic_load(&pool.generation) == seen; i++) relax();
        if (atomic_load(&pool.generation) == seen) {
            pthread_mutex_lock(&pool.lock);
            while (atomic_load(&pool.generation) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
            pthread_mutex_unlock(&pool.lock);
        }
        seen = atomic_load(&pool.generation);
        /* Whoever comes late finds the region closed, or the next one open: either is fine. */
        atomic_fetch_add(&pool.num_inside, 1);
        if (atomic_load(&pool.is_open)) run_tasks();
        atomic_fetch_sub(&pool.num_inside, 1);
    }
    return NULL;
}

/* Threads for arithmetic, the calling one included; returns how many there are, which is less only where the
 * system gives no more. */
EXPORT int penstock_set_num_threads(int num_threads) {
    pthread_mutex_lock(&pool.caller);
    while (pool.num_workers < num_threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, (void *)(uintptr_t)pool.num_workers)) break;
        pthread_detach(thread);
        pool.num_workers++;
    }
    pthread_mutex_lock(&pool.lock);
    atomic_store(&pool.num_wanted, MAX(0, MIN(num_threads - 1, pool.num_workers)));
    pthread_cond_broadcast(&pool.resized);
    pthread_mutex_unlock(&pool.lock);
    int have = atomic_load(&pool.num_wanted) + 1;
    pthread_mutex_unlock(&pool.caller);
    return have;
}

/* A forked child has the parent's counters and none of its threads. */
static void forget_workers(void) {
    pthread_mutex_init(&pool.caller, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.resized, NULL);
    pool.num_workers = 0;
    atomic_store(&pool.num_wanted, 0);
    atomic_store(&pool.is_open, false);
    atomic_store(&pool.num_inside, 0);
}

__attribute__((constructor)) static void at_load(void) { pthread_atfork(NULL, NULL, forget_workers); }

static void parallel(int64_t num_tasks, task_fn fn, void *context) {
    if (num_tasks <= 1 || atomic_load(&pool.num_wanted) == 0) {
        for (int64_t task = 0; task < num_tasks; task++) fn(context, task);
        return;
    }
    pthread_mutex_lock(&pool.caller);
    pool.fn = fn;
    pool.context = context;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.num_tasks, num_tasks);
    atomic_store(&pool.is_open, true);
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.generation, 1);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    run_tasks();
    /* Wait for those who are inside; a worker that has not woken up yet has missed nothing. */
    atomic_store(&pool.is_open, false);
    for (int spins = 0; atomic_load(&pool.num_inside) > 0; spins++)
        if (spins < 10 * SPINS) relax();
        else sched_yield();
    pthread_mutex_unlock(&pool.caller);
}

/* Rows of `width` elements, some operations each: below this many elements a second thread costs more than
 * it brings. */
enum { SMALL = 1 << 16 };

static void for_rows(int64_t num_rows, int64_t width, task_fn fn, void *context) {
    if (num_rows * width > SMALL) parallel(num_rows, fn, context);
    else
        for (int64_t row = 0; row < num_rows; row++) fn(context, row);
}

/* ---------------------------------------------------------------- vectors of 16 floats */

/* GCC's vector type: one register with AVX-512, two with AVX2, four with SSE or NEON. The lanes of a
 * sum are the same everywhere. */
typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
enum { LANES = 16 };

INLINE vec load(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store(float *p, vec v) { memcpy(p, &v, sizeof v); }
INLINE vec splat(float x) { return (vec){} + x; }
/* n < 16 elements, the other lanes 0. */
INLINE vec load_some(const float *p, int64_t n) {
    vec v = {};
    memcpy(&v, p, n * sizeof(float));
    return v;
}
INLINE vec select_vec(ivec mask, vec a, vec b) { return (vec)(((ivec)a & mask) | ((ivec)b & ~mask)); }
INLINE vec max_vec(vec a, vec b) { return select_vec(a > b, a, b); }
/* NaN, once there, stays. */
INLINE vec max_or_nan(vec a, vec b) { return select_vec((a > b) | (a != a), a, b); }
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

/* e^x: 2^n times a polynomial on [-ln2/2, ln2/2] (Cody and Waite's reduction; Taylor to degree 7, error
 * below 2e-8 there). 0 below -87, the smallest normal result; +88 and above saturate. */
INLINE vec exp_vec(vec x) {
    vec clamped = max_vec(x, splat(-87.0f));
    clamped = select_vec(clamped < splat(88.0f), clamped, splat(88.0f));
    /* Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits. */
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

/* tanh x = 1 - 2 / (e^2x + 1): absolute error below 2e-7, which is what its users need. */
INLINE vec tanh_vec(vec x) { return splat(1.0f) - splat(2.0f) / (exp_vec(x + x) + splat(1.0f)); }

/* ---------------------------------------------------------------- float16 */

INLINE float half_to_float(uint16_t h) {
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
}

/* Rounds to nearest even; what exceeds float16 becomes its largest finite value. */
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
#else
    vec v;
#if defined(__F16C__)
    __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
    __m256 high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)));
    memcpy(&v, &low, 32);
    memcpy((char *)&v + 32, &high, 32);
#else
    for (int i = 0; i < LANES; i++) v[i] = half_to_float(p[i]);
#endif
    return v;
#endif
}

/* ---------------------------------------------------------------- INT8 linear */

/* Rows of integers: one row per token ("int8"), or two ("int16": hi, lo with q = 256 hi + lo). Each row
 * is padded with zeros to a multiple of 64. */
typedef struct {
    const float *x;
    int64_t x_stride, num_tokens, in_features, padded;
    int64_t group_size, num_groups; /* of inputs that share a scale of the weights: all of them, or 64 n */
    int rows_per_token;
    int8_t *rows;
    int32_t *row_sums; /* [num_rows, num_groups] */
    float *token_scales;
} activations;

INLINE int32_t sum_integers(ivec v) {
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}

static void quantize_token(void *context, int64_t token) {
    const activations *a = context;
    const float *x = a->x + token * a->x_stride;
    const int64_t k_end = a->in_features, whole = k_end / LANES * LANES;
    vec largest = {};
    for (int64_t k = 0; k < whole; k += LANES) largest = max_or_nan(largest, abs_vec(load(x + k)));
    if (whole < k_end) largest = max_or_nan(largest, abs_vec(load_some(x + whole, k_end - whole)));
    const float limit = a->rows_per_token == 2 ? 32512.0f : 127.0f;
    float s = max_lanes(largest) / limit;
    if (s < 1.17549435e-38f) s = 0.0f; /* subnormal: too coarse to divide by; the row counts as 0 */
    if (!(s < INFINITY)) s = NAN;      /* what is no number makes the whole row so */
    a->token_scales[token] = s;
    int8_t *hi = a->rows + token * a->rows_per_token * a->padded, *lo = hi + a->padded;
    const vec divisor = splat(s > 0.0f ? s : INFINITY), magic = splat(12582912.0f);
    int32_t *hi_sums = a->row_sums + token * a->rows_per_token * a->num_groups, *lo_sums = hi_sums + a->num_groups;
    ivec hi_sum = {}, lo_sum = {};
    for (int64_t k = 0, group_end = a->group_size; k < a->padded; k += LANES) {
        vec v = k < whole ? load(x + k) : k < k_end ? load_some(x + k, k_end - k) : (vec){};
        /* |v / s| is at most 32512 (one rounding more in the worst case), so the addition of 1.5 * 2^23
         * rounds half to even and leaves the integer in the low bits. */
        ivec q = (ivec)(v / divisor + magic) - (ivec)magic;
        ivec h = q;
        if (a->rows_per_token == 2) {
            h = (q + 128) >> 8;
            ivec l = q - (h << 8);
            lo_sum += l;
            for (int i = 0; i < LANES; i++) lo[k + i] = (int8_t)l[i];
        }
        hi_sum += h;
        for (int i = 0; i < LANES; i++) hi[k + i] = (int8_t)h[i];
        if (k + LANES < group_end) continue;
        group_end += a->group_size;
        *hi_sums++ = sum_integers(hi_sum);
        if (a->rows_per_token == 2) *lo_sums++ = sum_integers(lo_sum);
        hi_sum = lo_sum = (ivec){};
    }
}

typedef struct {
    const activations *a;
    const int8_t *qweight; /* [out_features, in_features] */
    const float *scale; /* [out_features, num_groups] */
    const float *bias;
    float *y; /* [num_tokens, out_features] */
    int64_t out_features, num_groups, columns_per_task, tokens_per_block;
} linear;

/* The exact integer sum, scaled: one rounding to double (53 bits hold both factors), one to float. */
INLINE float scaled(int64_t sum, float token_scale, float weight_scale) {
    return (float)((double)sum * ((double)token_scale * (double)weight_scale));
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__)

/* vpdpbusd multiplies unsigned by signed bytes. The weights are made unsigned (w + 128, a flip of the
 * top bit), so sum(w * x) = sum((w + 128) * x) - 128 * sum(x): the correction belongs to the row of
 * activations, not to the weights. It holds modulo 2^32, and the true sum fits 32 bits up to 131072
 * inputs. */
enum { COLUMNS = 4 };

/* Four accumulators -> their four sums. */
INLINE __m128i sum4(__m512i a, __m512i b, __m512i c, __m512i d) {
    __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    __m512i abcd = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(abcd), _mm512_extracti64x4_epi64(abcd, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

/* Sums of `rows` rows of activations (whole tokens) times 4 output channels, still spread over lanes
 * -> y. */
INLINE void finish(const linear *l, int64_t row, int64_t column, __m512i sums[][COLUMNS], const int rows) {
    const activations *a = l->a;
    const int step = a->rows_per_token;
    const __m256d weight_scale = _mm256_cvtps_pd(_mm_loadu_ps(l->scale + column));
    for (int i = 0; i < rows; i++) {
        __m512i *s = sums[i];
        __m128i total = _mm_sub_epi32(sum4(s[0], s[1], s[2], s[3]), _mm_set1_epi32(128 * a->row_sums[row + i]));
        __m256i exact = _mm256_cvtepi32_epi64(total);
        if (rows > 1 && step == 2) {
            s = sums[++i];
            total = _mm_sub_epi32(sum4(s[0], s[1], s[2], s[3]), _mm_set1_epi32(128 * a->row_sums[row + i]));
            exact = _mm256_add_epi64(_mm256_slli_epi64(exact, 8), _mm256_cvtepi32_epi64(total));
        }
        const int64_t token = (row + i) / step;
        __m256d both = _mm256_mul_pd(_mm256_set1_pd(a->token_scales[token]), weight_scale);
        __m128 y = _mm256_cvtpd_ps(_mm256_mul_pd(_mm256_cvtepi64_pd(exact), both));
        if (l->bias) y = _mm_add_ps(y, _mm_loadu_ps(l->bias + column));
        _mm_storeu_ps(l->y + token * l->out_features + column, y);
    }
}

/* One group's sums, made exact and scaled, onto `totals` (whole tokens): with at most 128
 * inputs integers of 29 bits, times a scale of 24 in double: exact, so that only adding groups rounds. */
INLINE void add_group(const linear *l, int64_t row, int64_t column, int64_t group, __m512i sums[][COLUMNS],
                      __m256d *totals, const int rows) {
    const activations *a = l->a;
    const int64_t n = l->num_groups;
    const float *scale = l->scale + column * n + group;
    const __m256d weight_scale = _mm256_set_pd(scale[3 * n], scale[2 * n], scale[n], scale[0]);
    const int32_t *row_sums = a->row_sums + row * n + group;
    for (int i = 0; i < rows; i++) {
        __m512i *s = sums[i];
        __m128i total = _mm_sub_epi32(sum4(s[0], s[1], s[2], s[3]), _mm_set1_epi32(128 * row_sums[i * n]));
        __m256i exact = _mm256_cvtepi32_epi64(total);
        if (rows > 1 && a->rows_per_token == 2) {
            s = sums[++i];
            total = _mm_sub_epi32(sum4(s[0], s[1], s[2], s[3]), _mm_set1_epi32(128 * row_sums[i * n]));
            exact = _mm256_add_epi64(_mm256_slli_epi64(exact, 8), _mm256_cvtepi32_epi64(total));
        }
        totals[i] = _mm256_add_pd(totals[i], _mm256_mul_pd(_mm256_cvtepi64_pd(exact), weight_scale));
    }
}

INLINE void finish_groups(const linear *l, int64_t row, int64_t column, const __m256d *totals, const int rows) {
    const activations *a = l->a;
    for (int i = a->rows_per_token - 1; i < rows; i += a->rows_per_token) {
        const int64_t token = (row + i) / a->rows_per_token;
        __m128 y = _mm256_cvtpd_ps(_mm256_mul_pd(totals[i], _mm256_set1_pd(a->token_scales[token])));
        if (l->bias) y = _mm_add_ps(y, _mm_loadu_ps(l->bias + column));
        _mm_storeu_ps(l->y + token * l->out_features + column, y);
    }
}

INLINE __m512i load_weights(const int8_t *w) {
    return _mm512_xor_si512(_mm512_loadu_si512(w), _mm512_set1_epi8((char)0x80));
}
INLINE __m512i load_some_weights(const int8_t *w, int64_t n) {
    return _mm512_xor_si512(_mm512_maskz_loadu_epi8(((__mmask64)1 << n) - 1, w), _mm512_set1_epi8((char)0x80));
}

/* One or two rows: memory is the limit, so each thread reads its weights from front to end, which is what
 * the processor's own prefetcher follows best; ours goes ahead across the ends of pages, where it stops. */
enum { PREFETCH_BYTES = 2048 };

INLINE void few_rows(const linear *l, int64_t row, int64_t column, const int rows) {
    const activations *a = l->a;
    const int64_t k_end = a->in_features, whole = k_end / 64 * 64;
    const int8_t *x = a->rows + row * a->padded, *x2 = x + (rows - 1) * a->padded;
    __m512i sums[2][COLUMNS];
    for (int j = 0; j < COLUMNS; j++) {
        const int8_t *w = l->qweight + (column + j) * k_end;
        const __m512i zero = _mm512_setzero_si512();
        __m512i a0 = zero, a1 = zero, a2 = zero, a3 = zero, b0 = zero, b1 = zero, b2 = zero, b3 = zero;
        int64_t k = 0;
        for (; k + 256 <= whole; k += 256) {
#define STEP(n)                                                                                    \
    {                                                                                              \
        __m512i ws = load_weights(w + k + 64 * n);                                                 \
        _mm_prefetch(w + k + 64 * n + PREFETCH_BYTES, _MM_HINT_T0);                                \
        a##n = _mm512_dpbusd_epi32(a##n, ws, _mm512_loadu_si512(x + k + 64 * n));                  \
        if (rows > 1) b##n = _mm512_dpbusd_epi32(b##n, ws, _mm512_loadu_si512(x2 + k + 64 * n));   \
    }
            STEP(0) STEP(1) STEP(2) STEP(3)
#undef STEP
        }
        for (; k < k_end; k += 64) {
            __m512i ws = k < whole ? load_weights(w + k) : load_some_weights(w + k, k_end - k);
            a0 = _mm512_dpbusd_epi32(a0, ws, _mm512_loadu_si512(x + k));
            if (rows > 1) b0 = _mm512_dpbusd_epi32(b0, ws, _mm512_loadu_si512(x2 + k));
        }
        sums[0][j] = _mm512_add_epi32(_mm512_add_epi32(a0, a1), _mm512_add_epi32(a2, a3));
        sums[1][j] = _mm512_add_epi32(_mm512_add_epi32(b0, b1), _mm512_add_epi32(b2, b3));
    }
    finish(l, row, column, sums, rows);
}

/* More rows: each weight meets all of them while it is in a register. The accumulators are variables of
 * their own, because GCC keeps arrays of vectors in memory. */
#define ROWS_1(DO) DO(0)
#define ROWS_2(DO) DO(0) DO(1)
#define ROWS_4(DO) ROWS_2(DO) DO(2) DO(3)
#define ROWS_6(DO) ROWS_4(DO) DO(4) DO(5)
#define CLEAR(i) __m512i a##i = zero, b##i = zero, c##i = zero, d##i = zero;
#define MULTIPLY(i)                                                                                \
    {                                                                                              \
        __m512i xs = _mm512_loadu_si512(x + i * a->padded + k);                                    \
        a##i = _mm512_dpbusd_epi32(a##i, wa, xs), b##i = _mm512_dpbusd_epi32(b##i, wb, xs);        \
        c##i = _mm512_dpbusd_epi32(c##i, wc, xs), d##i = _mm512_dpbusd_epi32(d##i, wd, xs);        \
    }
/* Generates nothing; an operand of an asm has to be in a register. */
#define STAY(i) __asm__("" : "+v"(a##i), "+v"(b##i), "+v"(c##i), "+v"(d##i));
#define KEEP(i) sums[i][0] = a##i, sums[i][1] = b##i, sums[i][2] = c##i, sums[i][3] = d##i;
/* While a tile is computed it fetches a part of the next four channels: `lines` of them, from `w` on, so
 * that memory and arithmetic work at the same time. */
typedef struct {
    const int8_t *w;
    int lines;
} ahead;
#define DEFINE_TILE(R)                                                                             \
    INLINE void sums_##R(const linear *l, int64_t row, int64_t column, int64_t k, int64_t stop, ahead next, \
                         __m512i sums[R][COLUMNS]) {                                               \
        const activations *a = l->a;                                                               \
        const int64_t k_end = a->in_features, whole = k + (stop - k) / 64 * 64;                    \
        const int8_t *x = a->rows + row * a->padded, *w = l->qweight + column * k_end;             \
        const __m512i zero = _mm512_setzero_si512();                                               \
        ROWS_##R(CLEAR)                                                                            \
        for (; k < whole; k += 64) {                                                               \
            const int8_t *v = w + k;                                                               \
            for (int i = 0; i < next.lines; i++) _mm_prefetch(next.w + next.lines * k + 64 * i, _MM_HINT_T0); \
            __m512i wa = load_weights(v), wb = load_weights(v + k_end);                            \
            __m512i wc = load_weights(v + 2 * k_end), wd = load_weights(v + 3 * k_end);            \
            ROWS_##R(MULTIPLY) ROWS_##R(STAY)                                                      \
        }                                                                                          \
        if (k < stop) {                                                                            \
            const int8_t *v = w + k;                                                               \
            const int64_t n = stop - k;                                                            \
            __m512i wa = load_some_weights(v, n), wb = load_some_weights(v + k_end, n);            \
            __m512i wc = load_some_weights(v + 2 * k_end, n), wd = load_some_weights(v + 3 * k_end, n); \
            ROWS_##R(MULTIPLY)                                                                     \
        }                                                                                          \
        ROWS_##R(KEEP)                                                                             \
    }                                                                                              \
    static void tile_##R(const linear *l, int64_t row, int64_t column, ahead next) {               \
        __m512i sums[R][COLUMNS];                                                                  \
        if (l->num_groups == 1) {                                                                  \
            sums_##R(l, row, column, 0, l->a->in_features, next, sums);                            \
            finish(l, row, column, sums, R);                                                       \
            return;                                                                                \
        }                                                                                          \
        __m256d totals[R] = {};                                                                    \
        for (int64_t g = 0, k = 0; g < l->num_groups; g++, k += l->a->group_size) {                \
            sums_##R(l, row, column, k, k + l->a->group_size, next, sums);                         \
            add_group(l, row, column, g, sums, totals, R);                                         \
        }                                                                                          \
        finish_groups(l, row, column, totals, R);                                                  \
    }
DEFINE_TILE(1)
DEFINE_TILE(2)
DEFINE_TILE(4)
DEFINE_TILE(6)

static void linear_block(const linear *l, int64_t row, int64_t row_end, int64_t column, int64_t column_end) {
    for (; column < column_end; column += COLUMNS) {
        int64_t r = row;
        if (row_end - r == 2 && l->num_groups == 1) {
            few_rows(l, r, column, 2);
            continue;
        }
        const int64_t tiles = (row_end - row + 5) / 6;
        ahead next = {l->qweight + (column + COLUMNS) * l->a->in_features, tiles == 1 ? 4 : tiles <= 3 ? 2 : 1};
        for (int done = 0; r < row_end - 1; r += 6) {
            const int64_t left = row_end - r;
            (left >= 6 ? tile_6 : left >= 4 ? tile_4 : tile_2)(l, r, column, next);
            next.w += next.lines * l->a->in_features;
            done += next.lines;
            next.lines = MIN(tiles == 3 ? 1 : next.lines, COLUMNS - done);
            if (left < 6) r += left / 2 * 2 - 6;
        }
        if (r < row_end && l->num_groups == 1) few_rows(l, r, column, 1);
        else if (r < row_end) tile_1(l, r, column, (ahead){});
    }
}
enum { COLUMN_MULTIPLE = COLUMNS };

#else
static void linear_block(const linear *l, int64_t row, int64_t row_end, int64_t column, int64_t column_end) {
    (void)l, (void)row, (void)row_end, (void)column, (void)column_end; /* all columns are "rest" below */
}
enum { COLUMN_MULTIPLE = 1 << 30 };
#endif

/* Of one token and one output channel, over some of the inputs. */
INLINE int64_t exact_sum(const activations *a, const int8_t *restrict w, int64_t token, int64_t k, int64_t k_end) {
    int64_t sum = 0;
    for (int part = 0; part < a->rows_per_token; part++) {
        const int8_t *restrict x = a->rows + (token * a->rows_per_token + part) * a->padded;
        int32_t dot = 0;
        for (int64_t i = k; i < k_end; i++) dot += (int16_t)w[i] * (int16_t)x[i];
        sum = sum * 256 + dot;
    }
    return sum;
}

/* Plain C, which the compiler vectorizes: the columns that tiles leave over, and other processors. */
static void linear_rest(const linear *l, int64_t token, int64_t token_end, int64_t column, int64_t column_end) {
    const activations *a = l->a;
    for (int64_t n = column; n < column_end; n++) {
        const int8_t *w = l->qweight + n * a->in_features;
        const float *scale = l->scale + n * l->num_groups;
        for (int64_t t = token; t < token_end; t++) {
            float y;
            if (l->num_groups == 1) y = scaled(exact_sum(a, w, t, 0, a->in_features), a->token_scales[t], *scale);
            else {
                const int64_t size = a->in_features / l->num_groups;
                double total = 0;
                for (int64_t g = 0; g < l->num_groups; g++)
                    total += (double)exact_sum(a, w, t, g * size, (g + 1) * size) * (double)scale[g];
                y = (float)(total * (double)a->token_scales[t]);
            }
            l->y[t * l->out_features + n] = l->bias ? y + l->bias[n] : y;
        }
    }
}

static void linear_task(void *context, int64_t task) {
    const linear *l = context;
    const activations *a = l->a;
    const int64_t begin = task * l->columns_per_task, end = MIN(begin + l->columns_per_task, l->out_features);
    /* Tiles take 64 inputs at a time, all of one group. */
    const bool is_tiled = l->num_groups == a->num_groups;
    const int64_t tiled_end = begin + (is_tiled ? (end - begin) / COLUMN_MULTIPLE * COLUMN_MULTIPLE : 0);
    for (int64_t token = 0; token < a->num_tokens; token += l->tokens_per_block) {
        const int64_t token_end = MIN(token + l->tokens_per_block, a->num_tokens);
        linear_block(l, token * a->rows_per_token, token_end * a->rows_per_token, begin, tiled_end);
        linear_rest(l, token, token_end, tiled_end, end);
    }
}

/* y = x W^T (+ bias). The inputs of an output channel fall into num_groups groups of equal size, each with a
 * scale of its own. `scratch` holds num_tokens * (rows_per_token * (padded + 4 * num_groups) + 4) bytes, where
 * padded is in_features rounded up to 64. */
EXPORT void penstock_int8_linear(const float *x, int64_t x_stride, int64_t num_tokens, int64_t in_features,
                                 const int8_t *qweight, const float *scale, int64_t num_groups, const float *bias,
                                 int64_t out_features, int rows_per_token, float *y, int8_t *scratch) {
    const int64_t padded = (in_features + 63) / 64 * 64, num_rows = num_tokens * rows_per_token;
    int32_t *row_sums = (int32_t *)(scratch + num_rows * padded);
    /* Other sizes of groups need no sums of rows: one for all, then. */
    const int64_t size = in_features / num_groups;
    const bool has_sums = num_groups > 1 && size % 64 == 0;
    activations a = {x, x_stride, num_tokens, in_features, padded, has_sums ? size : padded, has_sums ? num_groups : 1,
                     rows_per_token, scratch, row_sums, (float *)(row_sums + num_rows * num_groups)};
    for_rows(num_tokens, in_features, quantize_token, &a);
    /* A block of activations that stays in a core's L2 while all weights pass by. */
    const int64_t tokens_per_block = MAX(6, (384 << 10) / (padded * rows_per_token) / 6 * 6);
    /* Eight tasks a thread even out cores that others slow down; 64 channels keep a task worth its start. */
    const int64_t share = out_features / (8 * (atomic_load(&pool.num_wanted) + 1));
    const int64_t columns_per_task = MAX(64, share / 64 * 64);
    linear l = {&a, qweight, scale, bias, y, out_features, num_groups, columns_per_task, tokens_per_block};
    parallel((out_features + columns_per_task - 1) / columns_per_task, linear_task, &l);
}

/* ---------------------------------------------------------------- norms, activations, rope */

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

enum { SILU = 0, GELU_TANH = 1, GELU_ERF = 2, RELU = 3 };

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
    default:
        return max_vec(x, splat(0.0f));
    }
}

typedef struct {
    const float *x;
    float *y;
    int64_t x_stride, width;
    int kind, is_gated;
} activation;

static void activation_row(void *context, int64_t row) {
    const activation *a = context;
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

/* y [num_rows, width]; x has width columns, or twice that if gated: y = f(first half) * second half. */
EXPORT void penstock_activation(const float *x, int64_t x_stride, int64_t num_rows, int64_t width, int kind,
                                int is_gated, float *y) {
    activation a = {x, y, x_stride, width, kind, is_gated};
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

/* In place on x [num_tokens, num_heads, head_dim]; cos and sin are [num_tokens, half]. */
EXPORT void penstock_rope(float *x, int64_t x_stride, int64_t num_tokens, int64_t num_heads, int64_t head_dim,
                          int64_t half, const float *cos, const float *sin, int is_interleaved) {
    rope r = {x, x_stride, num_heads, head_dim, half, cos, sin, is_interleaved};
    for_rows(num_tokens, num_heads * head_dim, rope_row, &r);
}

/* ---------------------------------------------------------------- paged attention */

/* K is [num_blocks, num_kv_heads, head_dim, block_size] (16 keys of one dimension lie together, so that a
 * vector holds 16 keys and scores need no sum over lanes), V is [num_blocks, num_kv_heads, block_size,
 * head_dim]. */
typedef struct {
    void *k_cache, *v_cache;
    int is_half;
    int64_t num_kv_heads, head_dim, block_size;
} kv_layout;

typedef struct {
    kv_layout kv;
    const float *k, *v;
    int64_t k_stride, v_stride;
    const int64_t *slot_mapping;
} kv_write;

static void write_kv_token(void *context, int64_t token) {
    const kv_write *c = context;
    const int64_t d = c->kv.head_dim, bs = c->kv.block_size;
    const int64_t block = c->slot_mapping[token] / bs, offset = c->slot_mapping[token] % bs;
    for (int64_t head = 0; head < c->kv.num_kv_heads; head++) {
        const float *k = c->k + token * c->k_stride + head * d, *v = c->v + token * c->v_stride + head * d;
        const int64_t base = (block * c->kv.num_kv_heads + head) * d * bs;
        if (c->kv.is_half) {
            uint16_t *k_out = (uint16_t *)c->kv.k_cache + base + offset;
            uint16_t *v_out = (uint16_t *)c->kv.v_cache + base + offset * d;
            for (int64_t i = 0; i < d; i++) k_out[i * bs] = float_to_half(k[i]), v_out[i] = float_to_half(v[i]);
        } else {
            float *k_out = (float *)c->kv.k_cache + base + offset, *v_out = (float *)c->kv.v_cache + base + offset * d;
            for (int64_t i = 0; i < d; i++) k_out[i * bs] = k[i], v_out[i] = v[i];
        }
    }
}

EXPORT void penstock_write_kv(const float *k, int64_t k_stride, const float *v, int64_t v_stride, int64_t num_tokens,
                              const int64_t *slot_mapping, void *k_cache, void *v_cache, int is_half,
                              int64_t num_kv_heads, int64_t head_dim, int64_t block_size) {
    kv_write c = {{k_cache, v_cache, is_half, num_kv_heads, head_dim, block_size}, k, v, k_stride, v_stride,
                  slot_mapping};
    for_rows(num_tokens, 2 * num_kv_heads * head_dim, write_kv_token, &c);
}

typedef struct {
    kv_layout kv;
    const float *q;
    float *y;
    int64_t q_stride, y_stride, num_heads, tokens_per_tile, max_blocks;
    const int32_t *block_tables, *query_start, *context_lens;
    const int32_t *tile_seq, *tile_begin; /* per tile: its sequence, its first token in the batch */
    float scale, softcap;
    int64_t window;
    const float *alibi_slopes;
} attention;

enum { MAX_HEAD_DIM = 256, ROWS = 8 };

/* Scores of up to ROWS rows against 16 keys: one chain of multiply-adds per row and key, over the
 * dimensions in order. */
INLINE void score_rows(const vec *keys, float *const *q, vec *out, int64_t d, const int rows) {
    vec sum[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) sum[r] = splat(0.0f);
    for (int64_t i = 0; i < d; i++)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sum[r] += splat(q[r][i]) * keys[i];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) out[r] = sum[r];
}

/* y += p[key] * values[key], keys in order, 16 dimensions at a time, for up to four rows. */
INLINE void mix_rows(const float *values, int64_t num_keys, float *const *p, float *const *y, int64_t d,
                     const int rows) {
    for (int64_t i = 0; i < d; i += LANES) {
        vec sum[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sum[r] = load(y[r] + i);
        for (int64_t key = 0; key < num_keys; key++) {
            vec v = load(values + key * d + i);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) sum[r] += splat(p[r][key]) * v;
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) store(y[r] + i, sum[r]);
    }
}

static const ivec LANE_INDEX = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* One tile: a few tokens of one sequence, all query heads of one KV head, two passes over the keys. */
static void attention_tile(void *context, int64_t task) {
    const attention *c = context;
    const int64_t d = c->kv.head_dim, bs = c->kv.block_size, kv_heads = c->kv.num_kv_heads;
    const int64_t padded_d = (d + LANES - 1) / LANES * LANES;
    const int64_t index = task / kv_heads, kv_head = task % kv_heads, group = c->num_heads / kv_heads;
    const int64_t seq = c->tile_seq[index], begin = c->tile_begin[index];
    const int64_t end = MIN(begin + c->tokens_per_tile, c->query_start[seq + 1]);
    const int64_t num_rows = (end - begin) * group;
    /* The position of the batch's token t of this sequence is t + shift. */
    const int64_t shift = c->context_lens[seq] - c->query_start[seq + 1];
    const int64_t first_key = c->window ? MAX(0, begin + shift - c->window + 1) / LANES * LANES : 0;
    const int64_t num_keys = end + shift - first_key, num_groups = (num_keys + LANES - 1) / LANES;
    const int32_t *blocks = c->block_tables + seq * c->max_blocks;

    const int64_t row_width = num_groups * LANES;
    float *scratch = aligned_alloc(64, (num_rows * (row_width + 2 * padded_d) + LANES * padded_d) * sizeof(float));
    if (!scratch) abort(); /* some tens of kilobytes: nothing else would get any either */
    float *scores = scratch, *queries = scores + num_rows * row_width, *mixed = queries + num_rows * padded_d;
    float *values = mixed + num_rows * padded_d;
    memset(queries, 0, (2 * num_rows + LANES) * padded_d * sizeof(float));
    for (int64_t r = 0; r < num_rows; r++)
        memcpy(queries + r * padded_d, c->q + (begin + r / group) * c->q_stride + (kv_head * group + r % group) * d,
               d * sizeof(float));

    for (int64_t g = 0; g < num_groups; g++) {
        const int64_t key = first_key + g * LANES;
        const int64_t base = (blocks[key / bs] * kv_heads + kv_head) * d * bs + key % bs;
        vec keys[MAX_HEAD_DIM];
        if (c->kv.is_half)
            for (int64_t i = 0; i < d; i++) keys[i] = load_half((const uint16_t *)c->kv.k_cache + base + i * bs);
        else
            for (int64_t i = 0; i < d; i++) keys[i] = load((const float *)c->kv.k_cache + base + i * bs);
        const ivec key_positions = LANE_INDEX + (int32_t)key;
        for (int64_t r = 0; r < num_rows;) {
            const int64_t left = num_rows - r;
            float *q[ROWS];
            vec s[ROWS];
            const int rows = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
            for (int i = 0; i < rows; i++) q[i] = queries + (r + i) * padded_d;
            if (rows == 8) score_rows(keys, q, s, d, 8);
            else if (rows == 4) score_rows(keys, q, s, d, 4);
            else if (rows == 2) score_rows(keys, q, s, d, 2);
            else score_rows(keys, q, s, d, 1);
            for (int i = 0; i < rows; i++) {
                const int64_t row = r + i, position = begin + row / group + shift;
                vec v = s[i] * splat(c->scale);
                if (c->softcap > 0.0f) v = splat(c->softcap) * tanh_vec(v / splat(c->softcap));
                if (c->alibi_slopes)
                    v += splat(c->alibi_slopes[kv_head * group + row % group]) *
                         __builtin_convertvector(key_positions - (int32_t)position, vec);
                ivec seen = key_positions <= (int32_t)position;
                if (c->window) seen &= key_positions > (int32_t)(position - c->window);
                store(scores + row * row_width + g * LANES, select_vec(seen, v, splat(-INFINITY)));
            }
            r += rows;
        }
    }

    float sums[num_rows];
    for (int64_t r = 0; r < num_rows; r++) {
        float *s = scores + r * row_width;
        vec largest = splat(-INFINITY), sum = {};
        for (int64_t k = 0; k < row_width; k += LANES) largest = max_vec(largest, load(s + k));
        const vec top = splat(max_lanes(largest));
        for (int64_t k = 0; k < row_width; k += LANES) {
            vec p = exp_vec(load(s + k) - top);
            store(s + k, p);
            sum += p;
        }
        sums[r] = sum_lanes(sum);
    }

    for (int64_t g = 0; g < num_groups; g++) {
        const int64_t key = first_key + g * LANES, count = MIN(LANES, num_keys - g * LANES);
        const int64_t base = (blocks[key / bs] * kv_heads + kv_head) * d * bs + (key % bs) * d;
        for (int64_t j = 0; j < count; j++)
            for (int64_t i = 0; i < d; i += LANES) {
                vec v = {};
                if (!c->kv.is_half) v = load_some((const float *)c->kv.v_cache + base + j * d + i, MIN(LANES, d - i));
                else if (i + LANES <= d) v = load_half((const uint16_t *)c->kv.v_cache + base + j * d + i);
                else
                    for (int64_t e = i; e < d; e++)
                        v[e - i] = half_to_float(((const uint16_t *)c->kv.v_cache)[base + j * d + e]);
                store(values + j * padded_d + i, v);
            }
        for (int64_t r = 0; r < num_rows;) {
            const int64_t left = num_rows - r;
            float *p[ROWS], *y[ROWS];
            const int rows = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
            for (int i = 0; i < rows; i++)
                p[i] = scores + (r + i) * row_width + g * LANES, y[i] = mixed + (r + i) * padded_d;
            if (rows == 8) mix_rows(values, count, p, y, padded_d, 8);
            else if (rows == 4) mix_rows(values, count, p, y, padded_d, 4);
            else if (rows == 2) mix_rows(values, count, p, y, padded_d, 2);
            else mix_rows(values, count, p, y, padded_d, 1);
            r += rows;
        }
    }
    for (int64_t r = 0; r < num_rows; r++) {
        float *y = c->y + (begin + r / group) * c->y_stride + (kv_head * group + r % group) * d;
        for (int64_t i = 0; i < d; i++) y[i] = mixed[r * padded_d + i] / sums[r];
    }
    free(scratch);
}

/* Attention of new tokens over everything their sequences have cached, causal.
 *
 * q, y: [num_tokens, num_heads, head_dim]; block_tables [num_seqs, max_blocks]; query_start [num_seqs + 1]:
 * the batch's tokens query_start[s] .. query_start[s + 1] are the last of the context_lens[s] tokens of
 * sequence s. window 0, softcap 0, alibi_slopes NULL: without. tiles is scratch of 2 * num_tokens. */
EXPORT void penstock_paged_attention(const float *q, int64_t q_stride, float *y, int64_t y_stride, int64_t num_heads,
                                     void *k_cache, void *v_cache, int is_half, int64_t num_kv_heads, int64_t head_dim,
                                     int64_t block_size, const int32_t *block_tables, int64_t max_blocks,
                                     const int32_t *query_start, const int32_t *context_lens, int64_t num_seqs,
                                     float scale, float softcap, int64_t window, const float *alibi_slopes,
                                     int32_t *tiles) {
    const int64_t group = num_heads / num_kv_heads, tokens_per_tile = MAX(1, 2 * ROWS / group);
    int32_t *tile_begin = tiles + query_start[num_seqs];
    int64_t num_tiles = 0;
    for (int64_t s = 0; s < num_seqs; s++)
        for (int32_t t = query_start[s]; t < query_start[s + 1]; t += (int32_t)tokens_per_tile) {
            tiles[num_tiles] = (int32_t)s;
            tile_begin[num_tiles++] = t;
        }
    attention c = {{k_cache, v_cache, is_half, num_kv_heads, head_dim, block_size},
                   q, y, q_stride, y_stride, num_heads, tokens_per_tile, max_blocks,
                   block_tables, query_start, context_lens, tiles, tile_begin,
                   scale, softcap, window, alibi_slopes};
    parallel(num_tiles * num_kv_heads, attention_tile, &c);
}
