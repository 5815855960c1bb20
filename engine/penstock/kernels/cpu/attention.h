/* Attention over the block-structured cache, and writing into it. Part of cpu.c. */
#pragma once

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

/* Keys and values are fetched so many groups of 16 ahead as come to AHEAD_BYTES: blocks lie anywhere, and the
 * processor's own prefetcher stops at the end of each. */
enum { GROUP = 16, TILE_ROWS = 16, AHEAD_BYTES = 12 << 10 };
INLINE int64_t groups_ahead(int64_t head_dim, int is_half) {
    return MAX(1, AHEAD_BYTES / (GROUP * head_dim * (is_half ? 2 : 4)));
}

/* Sums that registers hold at a time beside what they are made of. */
#if defined(__AVX512F__)
enum { SUMS = 16 };
#else
enum { SUMS = 8 };
#endif

INLINE vec load_cached(const void *cache, int64_t at, const int is_half) {
    return is_half ? load_half((const uint16_t *)cache + at) : load((const float *)cache + at);
}
INLINE void fetch_cached(const void *cache, int64_t at, const int is_half) {
    __builtin_prefetch((const char *)cache + at * (is_half ? 2 : 4));
}

/* Scores of `rows` rows of queries [head_dim, q_stride] against `num` registers of keys, whose first dimensions lie
 * at keys[n]: one chain of multiply-adds per row and key, over the dimensions in order. */
INLINE void score_rows(const attention *c, const int64_t *keys, const int64_t *ahead, const float *q,
                       int64_t q_stride, vec *out, const int is_half, const int rows, const int num) {
    const int64_t d = c->kv.head_dim, bs = c->kv.block_size;
    vec sum[SUMS];
#pragma GCC unroll 16
    for (int n = 0; n < rows * num; n++) sum[n] = (vec){};
    for (int64_t i = 0; i < d; i++) {
        vec k[SUMS];
#pragma GCC unroll 16
        for (int n = 0; n < num; n++) {
            if (!is_half || i % 2 == 0) fetch_cached(c->kv.k_cache, ahead[n] + i * bs, is_half); /* half a line */
            k[n] = load_cached(c->kv.k_cache, keys[n] + i * bs, is_half);
            IN_REGISTER(k[n]);
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const vec x = splat(q[i * q_stride + r]);
#pragma GCC unroll 16
            for (int n = 0; n < num; n++) sum[r * num + n] += x * k[n];
        }
    }
#pragma GCC unroll 16
    for (int n = 0; n < rows * num; n++) out[n] = sum[n];
}

/* y += p[key] * values[key], keys in order, for `rows` rows and `num` registers of dimensions. */
INLINE void mix_rows(const void *values, int64_t at, int64_t stride, int64_t ahead, int64_t num_keys, float *const *p,
                     float *const *y, const int is_half, const int rows, const int num) {
    vec sum[SUMS];
#pragma GCC unroll 16
    for (int n = 0; n < rows * num; n++) sum[n] = load(y[n / num] + n % num * LANES);
    for (int64_t key = 0; key < num_keys; key++) {
        vec v[SUMS];
#pragma GCC unroll 16
        for (int i = 0; i < num; i++) {
            if (!is_half || LANES < 16 || i % 2 == 0) fetch_cached(values, ahead + key * stride + i * LANES, is_half);
            v[i] = load_cached(values, at + key * stride + i * LANES, is_half);
            IN_REGISTER(v[i]);
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const vec weight = splat(p[r][key]);
#pragma GCC unroll 16
            for (int i = 0; i < num; i++) sum[r * num + i] += weight * v[i];
        }
    }
#pragma GCC unroll 16
    for (int n = 0; n < rows * num; n++) store(y[n / num] + n % num * LANES, sum[n]);
}

/* A few tokens of one sequence, all query heads of one KV head. */
typedef struct {
    const attention *c;
    const int32_t *blocks;
    int64_t kv_head, group;    /* query heads of a KV head */
    int64_t position, num_rows; /* of the first token; tokens times query heads */
    int64_t first_key, num_keys, num_groups;
    float *scores, *queries, *mixed, *values; /* queries [head_dim, num_rows] */
    float *weights;                           /* [num_rows, GROUP] */
    vec *largest, *sums;                      /* of each row: lane by lane */
} query_tile;

/* Where a key begins, or the last group of 16 if there is no such key: in K its first dimension, in V itself. */
INLINE int64_t key_at(const query_tile *t, int64_t key, const int is_k) {
    const kv_layout *kv = &t->c->kv;
    const int64_t bs = kv->block_size;
    key = t->first_key + MIN(key, (t->num_groups - 1) * GROUP + key % GROUP);
    return (t->blocks[key / bs] * kv->num_kv_heads + t->kv_head) * kv->head_dim * bs +
           key % bs * (is_k ? 1 : kv->head_dim);
}

/* Sums of products -> scores, -infinity where a row does not see a key. */
INLINE vec finish_score(const query_tile *t, int64_t row, int64_t key, vec v) {
    const attention *c = t->c;
    const int64_t position = t->position + row / t->group;
    const ivec key_positions = LANE_INDEX + (int32_t)(t->first_key + key);
    v *= splat(c->scale);
    if (c->softcap > 0.0f) v = splat(c->softcap) * tanh_vec(v / splat(c->softcap));
    if (c->alibi_slopes)
        v += splat(c->alibi_slopes[t->kv_head * t->group + row % t->group]) *
             __builtin_convertvector(key_positions - (int32_t)position, vec);
    ivec seen = key_positions <= (int32_t)position;
    if (c->window) seen &= key_positions > (int32_t)(position - c->window);
    return select_vec(seen, v, splat(-INFINITY));
}

/* Scores of some rows and the largest of each. Most keys are seen and need nothing but the scale. */
INLINE void score(const query_tile *t, int64_t row, const int is_half, const int rows) {
    const attention *c = t->c;
    const int num = MIN(8, SUMS / rows);
    const int64_t row_width = t->num_groups * GROUP;
    const int64_t num_ahead = MAX(num * LANES, groups_ahead(c->kv.head_dim, is_half) * GROUP);
    const bool is_scaled_only = c->softcap == 0.0f && !c->alibi_slopes;
    for (int64_t key = 0; key < row_width; key += num * LANES) {
        int64_t keys[SUMS], ahead[SUMS];
        vec out[SUMS];
        for (int n = 0; n < num; n++) {
            keys[n] = key_at(t, key + n * LANES, 1);
            ahead[n] = key_at(t, key + n * LANES + num_ahead, 1);
        }
        score_rows(t->c, keys, ahead, t->queries + row, t->num_rows, out, is_half, rows, num);
        const int64_t num_left = MIN(num, (row_width - key) / LANES);
        for (int r = 0; r < rows; r++) {
            const int64_t position = t->position + (row + r) / t->group - t->first_key;
            const int64_t first = !is_scaled_only ? row_width : c->window ? position - c->window + 1 : 0;
            for (int64_t n = 0, k = key; n < num_left; n++, k += LANES) {
                const bool is_plain = k >= first && k + LANES - 1 <= position;
                const vec sum = out[r * num + n];
                const vec v = is_plain ? sum * splat(c->scale) : finish_score(t, row + r, k, sum);
                t->largest[row + r] = max_vec(t->largest[row + r], v);
                store(t->scores + (row + r) * row_width + k, v);
            }
        }
    }
}

/* Scores of a group of keys -> softmax, not yet divided by the sums. */
INLINE void exponentiate(const query_tile *t, int64_t g, const float *largest) {
    for (int64_t row = 0; row < t->num_rows; row++)
        for (int64_t key = 0; key < GROUP; key += LANES) {
            const float *score = t->scores + (row * t->num_groups + g) * GROUP + key;
            const vec p = exp_vec(load(score) - splat(largest[row]));
            store(t->weights + row * GROUP + key, p);
            t->sums[row] += p;
        }
}

INLINE void mix(const query_tile *t, int64_t row, int64_t g, const int is_half, const int rows) {
    const int num = MIN(8, SUMS / rows);
    const kv_layout *kv = &t->c->kv;
    const int64_t d = kv->head_dim, padded_d = (d + LANES - 1) / LANES * LANES;
    const int64_t count = MIN(GROUP, t->num_keys - g * GROUP);
    const int is_whole = d % LANES == 0;
    const void *values = is_whole ? kv->v_cache : t->values;
    const int64_t at = is_whole ? key_at(t, g * GROUP, 0) : 0, stride = is_whole ? d : padded_d;
    const int64_t ahead = is_whole ? key_at(t, (g + groups_ahead(d, is_half)) * GROUP, 0) : 0;
    float *p[SUMS], *y[SUMS];
    for (int r = 0; r < rows; r++) {
        p[r] = t->weights + (row + r) * GROUP;
        y[r] = t->mixed + (row + r) * padded_d;
    }
    int64_t i = 0;
    for (; i + num * LANES <= padded_d; i += num * LANES) {
        mix_rows(values, at + i, stride, ahead + i, count, p, y, is_half, rows, num);
        for (int r = 0; r < rows; r++) y[r] += num * LANES;
    }
    for (; i < padded_d; i += LANES) {
        mix_rows(values, at + i, stride, ahead + i, count, p, y, is_half, rows, 1);
        for (int r = 0; r < rows; r++) y[r] += LANES;
    }
}

/* Values of a head dimension that is no multiple of a register's, as floats in whole vectors. */
static void widen_values(const query_tile *t, int64_t g) {
    const kv_layout *kv = &t->c->kv;
    const int64_t d = kv->head_dim, padded_d = (d + LANES - 1) / LANES * LANES, at = key_at(t, g * GROUP, 0);
    for (int64_t j = 0; j < MIN(GROUP, t->num_keys - g * GROUP); j++)
        for (int64_t i = 0; i < d; i++)
            t->values[j * padded_d + i] = kv->is_half ? half_to_float(((const uint16_t *)kv->v_cache)[at + j * d + i])
                                                      : ((const float *)kv->v_cache)[at + j * d + i];
}

/* DO(rows) for all rows, as many at a time as registers hold. */
#define FOR_ROWS(t, DO)                                                                            \
    for (int64_t row = 0, left; (left = (t)->num_rows - row) > 0;) {                               \
        if (SUMS >= 16 && left >= 16) { DO(MIN(SUMS, 16)); row += 16; }                            \
        else if (SUMS >= 8 && left >= 8) { DO(MIN(SUMS, 8)); row += 8; }                           \
        else if (left >= 4) { DO(4); row += 4; }                                                   \
        else if (left >= 2) { DO(2); row += 2; }                                                   \
        else { DO(1); row += 1; }                                                                  \
    }

/* Two passes over the keys: scores first, then the values. */
INLINE void attend(query_tile *t, const int is_half) {
    float largest[t->num_rows];
    for (int64_t r = 0; r < t->num_rows; r++) t->largest[r] = splat(-INFINITY), t->sums[r] = (vec){};
#define SCORE(rows) score(t, row, is_half, rows)
    FOR_ROWS(t, SCORE)
#undef SCORE
    const int64_t d = t->c->kv.head_dim, padded_d = (d + LANES - 1) / LANES * LANES;
    for (int64_t r = 0; r < t->num_rows; r++) largest[r] = max_lanes(t->largest[r]);
    for (int64_t g = 0; g < t->num_groups; g++) {
        exponentiate(t, g, largest);
#define MIX(rows) mix(t, row, g, is_half, rows)
#define MIX_WIDENED(rows) mix(t, row, g, 0, rows)
        if (d % LANES == 0) FOR_ROWS(t, MIX)
        else {
            widen_values(t, g);
            FOR_ROWS(t, MIX_WIDENED)
        }
#undef MIX
#undef MIX_WIDENED
    }
    for (int64_t r = 0; r < t->num_rows; r++) {
        const float sum = sum_lanes(t->sums[r]);
        for (int64_t i = 0; i < d; i++) t->mixed[r * padded_d + i] /= sum;
    }
}

/* Kept from call to call: the system would have to find its pages anew each time. What the longest context took
 * stays: 4 bytes for each of its keys and each row of a tile. NULL if there is no memory. */
static float *scratch_of(int64_t num_floats) {
    static _Thread_local float *scratch;
    static _Thread_local int64_t size;
    if (num_floats > size) {
        free(scratch);
        scratch = aligned_alloc(64, (num_floats + 15) / 16 * 64);
        size = scratch ? num_floats : 0;
    }
    return scratch;
}

static void attention_tile(void *context, int64_t task) {
    const attention *c = context;
    const int64_t d = c->kv.head_dim, kv_heads = c->kv.num_kv_heads, padded_d = (d + LANES - 1) / LANES * LANES;
    const int64_t index = task / kv_heads, kv_head = task % kv_heads, group = c->num_heads / kv_heads;
    const int64_t seq = c->tile_seq[index], begin = c->tile_begin[index];
    const int64_t end = MIN(begin + c->tokens_per_tile, c->query_start[seq + 1]), num_rows = (end - begin) * group;
    /* The position of the batch's token t of this sequence is t + shift. */
    const int64_t shift = c->context_lens[seq] - c->query_start[seq + 1];
    const int64_t first_key = c->window ? MAX(0, begin + shift - c->window + 1) / GROUP * GROUP : 0;
    const int64_t num_keys = end + shift - first_key, num_groups = (num_keys + GROUP - 1) / GROUP;
    const int64_t num_floats = num_rows * (num_groups * GROUP + 2 * padded_d + GROUP + 2 * LANES) + GROUP * padded_d;
    float *scratch = scratch_of(num_floats);
    if (!scratch) abort(); /* a megabyte or so: nothing else would get any either */
    float *weights = scratch + num_rows * num_groups * GROUP;
    vec *largest = (vec *)(weights + num_rows * GROUP), *sums = largest + num_rows;
    float *queries = (float *)(sums + num_rows), *mixed = queries + num_rows * padded_d;
    query_tile t = {c, c->block_tables + seq * c->max_blocks, kv_head, group, begin + shift, num_rows, first_key, num_keys,
                    num_groups, scratch, queries, mixed, mixed + num_rows * padded_d, weights, largest, sums};
    memset(mixed, 0, (num_rows + GROUP) * padded_d * sizeof(float));
    for (int64_t r = 0; r < num_rows; r++) {
        const float *q = c->q + (begin + r / group) * c->q_stride + (kv_head * group + r % group) * d;
        for (int64_t i = 0; i < d; i++) queries[i * num_rows + r] = q[i];
    }
    if (c->kv.is_half) attend(&t, 1);
    else attend(&t, 0);
    for (int64_t r = 0; r < num_rows; r++)
        memcpy(c->y + (begin + r / group) * c->y_stride + (kv_head * group + r % group) * d, mixed + r * padded_d,
               d * sizeof(float));
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
    const int64_t group = num_heads / num_kv_heads, tokens_per_tile = MAX(1, TILE_ROWS / group);
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
