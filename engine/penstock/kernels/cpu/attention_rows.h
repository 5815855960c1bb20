/* Attention's inner loops: scores of keys, the softmax of scores, the weighted sum of values. Part of
 * attention_tile.h. */
#pragma once

/* K is [num_blocks, num_kv_heads, head_dim, block_size]: 16 keys of one dimension lie together, so that a vector
 * holds 16 keys and scores need no sum over lanes. V is [num_blocks, num_kv_heads, block_size, head_dim].
 *
 * With a latent, v_cache is NULL: the first value_dim dimensions of a key are its value, and all query heads share
 * the one KV head. num_kv_heads counts the parts into which the query heads are cut then, and all parts read the
 * same keys: head_size is 0.
 *
 * With INT8, a head's integers in a block are followed by a bfloat16 scale for each of the block's tokens. An integer
 * times its scale is exact in float32. A score is the sum of the query times the key's integers, times the key's scale;
 * a value's scale is multiplied with the value's weight. */
typedef enum { FORM_FLOAT, FORM_HALF, FORM_INT8 } kv_form; /* KV_CODES in operands.py */
typedef struct {
    void *k_cache, *v_cache;
    kv_form form;
    int64_t num_kv_heads, head_dim, block_size, value_dim;
    int64_t head_size, all_heads_size; /* elements from a KV head of a block to the next, from a block to the next */
} kv_layout;

/* The keys of a sequence are cut by position. SPLIT keys add up to one partial result: the weighted values, the
 * largest score, and the sum of the exponentials relative to the largest score. Partial results are merged in order
 * (arXiv 1805.02867, 2205.14135). Keys that a row does not see change no bit of the row's result. So this result
 * depends neither on the rows beside it nor on whether one thread computes all splits or many threads share them.
 * Rows of scores are a chunk longer than a split: rows 4096 bytes apart would share the same sets of the L1 cache. */
enum { GROUP = 16, CHUNK = 2 * GROUP, SPLIT = 32 * CHUNK, SCORES_STRIDE = SPLIT + CHUNK };

/* Sums that registers hold at a time, beside the operands. */
#if defined(__AVX512F__) || defined(__aarch64__)
enum { SUMS = 16 };
#else
enum { SUMS = 8 };
#endif

INLINE int64_t padded(int64_t d) { return (d + LANES - 1) / LANES * LANES; }

/* Bytes of an element, and of the scales of a token's head. */
INLINE int64_t item_size(const kv_form form) { return 4 >> form; }
INLINE int64_t scale_size(const kv_form form) { return form == FORM_INT8 ? 2 : 0; }

INLINE vec load_cached(const char *at, int64_t index, const kv_form form) {
    if (form == FORM_INT8) return load_int8((const int8_t *)at + index);
    return form == FORM_HALF ? load_half((const uint16_t *)at + index) : load((const float *)at + index);
}
INLINE float load_one(const char *at, int64_t index, const kv_form form) {
    if (form == FORM_INT8) return ((const int8_t *)at)[index];
    return form == FORM_HALF ? half_to_float(((const uint16_t *)at)[index]) : ((const float *)at)[index];
}
/* Prefetch `size` bytes that are read next, a line at a time. */
INLINE void fetch_lines(const char *at, int64_t size) {
    for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(at + i);
}

/* Scores of `rows` rows of queries [head_dim, q_stride] against `num` registers of keys, and the largest scores, lane
 * by lane. The first dimensions of the keys lie at keys[n], the keys' scales at scales[n]. A row and a key have one
 * chain of multiply-adds, over the dimensions in order. */
INLINE void score_rows(const kv_layout *kv, const char *const *keys, const char *const *scales,
                       const char *const *ahead, const float *q, int64_t q_stride, float *scores, vec *largest,
                       const kv_form form, const int rows, const int num) {
    const int64_t d = kv->head_dim, size = item_size(form), step = kv->block_size * size, fetched = num * LANES * size;
    vec sum[SUMS];
#pragma GCC unroll 16
    for (int n = 0; n < rows * num; n++) sum[n] = (vec){};
    int64_t i = 0, at = 0;
    for (int part = 0; part < 2; part++) {
        const char *next = ahead[part];
        for (const int64_t end = part ? d : d / 2; i < end; i++, at += step, q += q_stride, next += fetched) {
            vec k[SUMS];
            fetch_lines(next, fetched);
#pragma GCC unroll 16
            for (int n = 0; n < num; n++) {
                k[n] = load_cached(keys[n] + at, 0, form);
                IN_REGISTER(k[n]);
            }
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                const vec x = splat(q[r]);
#pragma GCC unroll 16
                for (int n = 0; n < num; n++) sum[r * num + n] += x * k[n];
            }
        }
        fetch_lines(next, num * LANES * scale_size(form) / 2);
    }
    if (form == FORM_INT8) {
#pragma GCC unroll 16
        for (int n = 0; n < num; n++) {
            const vec scale = load_bfloat((const uint16_t *)scales[n]);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) sum[r * num + n] *= scale;
        }
    }
#pragma GCC unroll 16
    for (int n = 0; n < rows * num; n++) {
        store(scores + n / num * SCORES_STRIDE + n % num * LANES, sum[n]);
        largest[n / num] = max_vec(largest[n / num], sum[n]);
    }
}

/* Each case is a function of its own: in a larger function GCC runs out of registers and keeps counters in
 * memory. */
#define SCORE_REGISTERS(rows) MIN(CHUNK / LANES, SUMS / (rows))
typedef void score_fn(const kv_layout *, const char *const *, const char *const *, const char *const *, const float *,
                      int64_t, float *, vec *);
#define SCORE_FN(name, form, rows)                                                                                 \
    NOINLINE void name(const kv_layout *kv, const char *const *keys, const char *const *scales,                    \
                       const char *const *ahead, const float *q, int64_t q_stride, float *scores, vec *largest) {  \
        score_rows(kv, keys, scales, ahead, q, q_stride, scores, largest, form, rows, SCORE_REGISTERS(rows));      \
    }
#define SCORE_FNS(rows)                        \
    SCORE_FN(score_##rows##_half, FORM_HALF, rows) \
    SCORE_FN(score_##rows##_float, FORM_FLOAT, rows) \
    SCORE_FN(score_##rows##_int8, FORM_INT8, rows)
SCORE_FNS(1)
SCORE_FNS(2)
SCORE_FNS(4)
SCORE_FNS(8)
#if defined(__AVX512F__) || defined(__aarch64__)
SCORE_FNS(16)
#else
#define score_16_half score_8_half
#define score_16_float score_8_float
#define score_16_int8 score_8_int8
#endif

/* y += p[key] * values[key], keys in order, for `rows` rows and `num` registers of dimensions from `first` on. */
INLINE void mix_rows(const char *const *values, const char *const *ahead, int64_t first, int64_t stride,
                     int64_t num_keys, const float *p, float *const *y, const kv_form form, const int rows,
                     const int num) {
    vec sum[SUMS];
#pragma GCC unroll 16
    for (int n = 0; n < rows * num; n++) sum[n] = load(y[n / num] + first + n % num * LANES);
    for (int group = 0; group * GROUP < num_keys; group++, p += GROUP) {
        const char *at = values[group], *next = ahead[group];
        const int64_t end = MIN(GROUP, num_keys - group * GROUP), fetched = num * LANES * item_size(form);
        for (int64_t key = 0; key < end; key++, next += fetched) {
            vec v[SUMS];
            fetch_lines(next, fetched);
#pragma GCC unroll 16
            for (int i = 0; i < num; i++) {
                v[i] = load_cached(at, key * stride + first + i * LANES, form);
                IN_REGISTER(v[i]);
            }
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                const vec weight = splat(p[r * CHUNK + key]);
#pragma GCC unroll 16
                for (int i = 0; i < num; i++) sum[r * num + i] += weight * v[i];
            }
        }
    }
#pragma GCC unroll 16
    for (int n = 0; n < rows * num; n++) store(y[n / num] + first + n % num * LANES, sum[n]);
}

/* Scores of a chunk of keys -> weights of the split, not yet divided by their sum: `num` registers of each row. With
 * INT8, the weights that are stored are multiplied by the scales of the values, of which each group's lie at
 * scales[group]. */
INLINE void exponentiate_rows(const float *scores, const vec *largest, vec *sums, float *weights, int64_t num_rows,
                              int num, const char *const *scales, const kv_form form) {
    for (int64_t r = 0; r < num_rows; r++, scores += SCORES_STRIDE, weights += CHUNK) {
        vec sum = sums[r];
#pragma GCC unroll 4
        for (int n = 0; n < CHUNK / LANES; n++) {
            if (n >= num) break;
            const int key = n * LANES;
            vec p = exp2_vec(load(scores + key) - largest[r]);
            sum += p;
            if (form == FORM_INT8) p *= load_bfloat((const uint16_t *)scales[key / GROUP] + key % GROUP);
            store(weights + key, p);
        }
        sums[r] = sum;
    }
}
NOINLINE void exponentiate(const float *scores, const vec *largest, vec *sums, float *weights, int64_t num_rows,
                           int num) {
    exponentiate_rows(scores, largest, sums, weights, num_rows, num, NULL, FORM_FLOAT);
}
NOINLINE void exponentiate_scaled(const float *scores, const vec *largest, vec *sums, float *weights, int64_t num_rows,
                                  int num, const char *const *scales) {
    exponentiate_rows(scores, largest, sums, weights, num_rows, num, scales, FORM_INT8);
}
