/* Products of INT8 weights and integer activations. Part of cpu.c. */
#pragma once

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
