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
