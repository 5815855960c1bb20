/* A few tokens by INT8 as it lies, with a scale per channel, by pmaddwd on vectors of 256 bits. Part of int16.h.
 *
 * Two channels by up to six tokens: twelve sums, two vectors of weights, one of activations and one of products fill
 * the 16 registers. Each tile widens its weights again, which costs less than packing them into a panel (panel_avx2.h),
 * as that pays only when many tokens meet it. The weights of a second tile lie in the L1 cache, and activations in the
 * L2 cache. */
#pragma once

enum { FEW_FROM_TOKENS = 4, FEW_LEAST = 3, FEW_TOKENS = 24, FEW_ROWS = 6, FEW_CHANNELS = 2 };

/* Adds the products of two channels' weights and the same activations, which `load` reads from memory, to the sums a
 * and b. Twelve sums, two vectors of weights and these two vectors are all registers there are; from intrinsics, GCC
 * makes code that copies some of them, or keeps sums in memory. Both vectors are written before the weights are read
 * last. */
#define ADD_TWO_CHANNELS(load, a, b, first, second, inputs)                                        \
    {                                                                                              \
        __m256i other, own;                                                                        \
        __asm__(load " %[x], %[own]\n\t"                                                           \
                     "vpmaddwd %[own], %[w], %[other]\n\t"                                         \
                     "vpmaddwd %[own], %[v], %[own]\n\t"                                           \
                     "vpaddd %[other], %[sum], %[sum]\n\t"                                         \
                     "vpaddd %[own], %[sums], %[sums]"                                             \
                : [sum] "+x"(a), [sums] "+x"(b), [own] "=&x"(own), [other] "=&x"(other)            \
                : [w] "x"(first), [v] "x"(second), [x] "m"(inputs));                               \
    }

#define FEW_3(DO) DO(0) DO(1) DO(2)
#define FEW_4(DO) FEW_3(DO) DO(3)
#define FEW_5(DO) FEW_4(DO) DO(4)
#define FEW_6(DO) FEW_5(DO) DO(5)
#define CLEAR_FEW(i) __m256i a##i = {}, b##i = {};
#define MULTIPLY_FEW(i) ADD_TWO_CHANNELS("vmovdqu", a##i, b##i, first, second, *(const __m256i_u *)(x + i * padded))
#define FEW_STEP(R)                                                                                \
    {                                                                                              \
        const __m256i first = load_weights(w), second = load_weights(w + stride);                  \
        FEW_##R(MULTIPLY_FEW)                                                                      \
        x += STEP, w += STEP;                                                                      \
    }
#define STORE_FEW(i) all[0][i] = a##i, all[1][i] = b##i;
/* What is read next: with each line of inputs, a line of each of `rows` rows is prefetched. */
typedef struct {
    const int8_t *at;
    int64_t stride;
    int rows;
} row_fetch;
/* Adds the sums of two channels, `stride` bytes apart, by R tokens and a multiple of STEP inputs to `totals`: those of
 * the first channel, then those of the second. */
typedef void (*few_fn)(const int16_t *x, int64_t padded, const int8_t *w, int64_t stride, int64_t num_inputs,
                       const row_fetch *next, vec4 *totals);
#define DEFINE_FEW(R)                                                                              \
    NOINLINE void few_##R(const int16_t *x, int64_t padded, const int8_t *w, int64_t stride, int64_t num_inputs, \
                          const row_fetch *next, vec4 *totals) {                                   \
        const int8_t *at = next->at;                                                               \
        const int64_t next_row = next->stride, rows = next->rows;                                  \
        FEW_##R(CLEAR_FEW)                                                                         \
        for (int64_t left = num_inputs; left > 0; left -= LINE, at += LINE) {                      \
            if (rows > 0) _mm_prefetch(at, _MM_HINT_T0);                                           \
            if (rows > 1) _mm_prefetch(at + next_row, _MM_HINT_T0);                                \
            if (left >= LINE) {                                                                    \
                FEW_STEP(R) FEW_STEP(R) FEW_STEP(R) FEW_STEP(R)                                    \
            } else                                                                                 \
                for (int64_t k = left; k > 0; k -= STEP) { FEW_STEP(R) }                           \
        }                                                                                          \
        __m256i all[FEW_CHANNELS][R];                                                              \
        FEW_##R(STORE_FEW)                                                                         \
        const __m256i *one = all[0], none = {};                                                    \
        for (int i = 0; i + 4 <= 2 * R; i += 4, one += 4)                                          \
            add_sums(one[0], one[1], one[2], one[3], num_inputs, totals++);                        \
        if (R % 2) add_sums(one[0], one[1], none, none, num_inputs, totals);                       \
    }
DEFINE_FEW(3)
DEFINE_FEW(4)
DEFINE_FEW(5)
DEFINE_FEW(6)

/* Writes the results of up to four tokens by two channels, whose sums are given. */
INLINE void store_few(const linear *l, int64_t token, int64_t tokens, int64_t column, const double *first,
                      const double *second) {
    const __m128i there = _mm_cmpgt_epi32(_mm_set1_epi32((int)tokens), _mm_setr_epi32(0, 1, 2, 3));
    const __m256d of_tokens = _mm256_cvtps_pd(_mm_maskload_ps(l->a->token_scales + token, there));
    const __m256d scale = _mm256_set1_pd(l->scale[column]), next_scale = _mm256_set1_pd(l->scale[column + 1]);
    __m128 own = _mm256_cvtpd_ps(_mm256_mul_pd(_mm256_loadu_pd(first), _mm256_mul_pd(of_tokens, scale)));
    __m128 next = _mm256_cvtpd_ps(_mm256_mul_pd(_mm256_loadu_pd(second), _mm256_mul_pd(of_tokens, next_scale)));
    if (l->bias) {
        own = _mm_add_ps(own, _mm_set1_ps(l->bias[column]));
        next = _mm_add_ps(next, _mm_set1_ps(l->bias[column + 1]));
    }
    const __m128 two = _mm_unpacklo_ps(own, next), others = _mm_unpackhi_ps(own, next);
    float *y = l->y + token * l->out_features + column;
    _mm_storel_pi((__m64 *)y, two);
    if (tokens > 1) _mm_storeh_pi((__m64 *)(y + l->out_features), two);
    if (tokens > 2) _mm_storel_pi((__m64 *)(y + 2 * l->out_features), others);
    if (tokens > 3) _mm_storeh_pi((__m64 *)(y + 3 * l->out_features), others);
}

/* Some tokens by two channels. */
static void few_tile(const linear *l, int64_t token, int64_t tokens, int64_t column, row_fetch *next) {
    static const few_fn tiles[] = {few_3, few_4, few_5, few_6};
    enum { WHOLE = FEW_CHANNELS * FEW_ROWS / 4 }; /* store_few() loads four sums, also where fewer are left */
    const activations *a = l->a;
    vec4 totals[WHOLE + 1];
    for (int i = 0; i <= WHOLE; i++) totals[i] = (vec4){}; /* "= {}" becomes a slow `rep stos` */
    for (int64_t k = 0, stop; k < a->in_features; k = stop) {
        stop = MIN(k + MAX_INPUTS, a->in_features);
        tiles[tokens - FEW_LEAST](a->rows + token * a->padded + k, a->padded, l->qweight + column * l->row_bytes + k,
                                  l->row_bytes, stop - k, next, totals);
        next->at += stop - k;
    }
    const double *sums = (const double *)totals;
    for (int64_t i = 0; i < tokens; i += 4)
        store_few(l, token + i, MIN(4, tokens - i), column, sums + i, sums + tokens + i);
}

static bool takes_few_rows(const linear *l) {
    const activations *a = l->a;
    const bool is_whole = l->kind == INT8 && l->num_groups == 1 && a->in_features % STEP == 0;
    return is_whole && a->num_tokens >= FEW_FROM_TOKENS && a->num_tokens <= FEW_TOKENS;
}

/* The rows from `column` on; at a task's end, those of the next task. Or, if something is read after these weights, as
 * many bytes of that. */
INLINE row_fetch next_rows(const linear *l, int64_t column, int64_t column_end) {
    if (l->after) return (row_fetch){l->after + (column - FEW_CHANNELS) * l->after_bytes, 0, 1};
    const int64_t next = column < column_end ? column : next_column(l, column);
    return (row_fetch){l->qweight + next * l->row_bytes, l->row_bytes, FEW_CHANNELS};
}

/* The i-th row, if there is one. */
INLINE row_fetch one_row(row_fetch next, int64_t i) {
    return (row_fetch){next.at + i * next.stride, next.stride, i < next.rows};
}

/* Returns where the computed channels end. */
static int64_t linear_few_rows(const linear *l, int64_t column, int64_t column_end) {
    const int64_t num_tokens = l->a->num_tokens, num_tiles = (num_tokens + FEW_ROWS - 1) / FEW_ROWS;
    column_end -= (column_end - column) % FEW_CHANNELS;
    for (; column < column_end; column += FEW_CHANNELS) {
        const row_fetch all = next_rows(l, column + FEW_CHANNELS, column_end);
        for (int64_t i = 0, t = 0, end; i < num_tiles; i++, t = end) {
            end = (i + 1) * num_tokens / num_tiles;
            row_fetch next = num_tiles == 1 ? all : one_row(all, i);
            few_tile(l, t, end - t, column, &next);
        }
    }
    return column_end;
}
