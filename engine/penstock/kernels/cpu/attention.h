/* Attention over the block-structured cache, and writing into it. Part of cpu.c. */
#pragma once

#include "attention_rows.h"

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

/* Rows (of queries: a head's of a token) that meet a KV head's keys together, and rows of all KV heads that a thread
 * takes at once: a block holds all heads' keys side by side, and memory gives most where it is read in long pieces. */
enum { TILE_ROWS = 16, TASK_ROWS = 64 };

/* Floats of a partial result: padded(d) weighted values, the largest score, the sum; the next begins on a new line. */
INLINE int64_t part_width(int64_t d) { return (d + 15) / 16 * 16 + 16; }

typedef struct {
    kv_layout kv;
    const float *q;
    float *y;
    int64_t q_stride, y_stride, num_heads, tokens_per_tile, heads_per_task, max_blocks;
    const int32_t *block_tables, *query_start, *context_lens;
    const int32_t *tile_seq, *tile_begin; /* per tile: its sequence, its first token in the batch */
    float scale, softcap;
    int64_t window;
    const float *alibi_slopes;
    float *partials; /* [num_tokens, num_heads, num_splits] parts, or NULL: who begins a tile walks through all */
    int64_t num_splits;
} attention;

/* A few tokens of one sequence, and some of its KV heads with all their query heads; one split of the keys. */
typedef struct {
    const attention *c;
    const int32_t *blocks;
    int64_t first_head, num_heads;   /* KV heads */
    int64_t group, num_rows;         /* query heads of a KV head; tokens times that */
    int64_t position, last_position; /* of the first token and the last */
    int64_t begin, end;              /* of the split, the keys that some row sees; `begin` is a multiple of GROUP */
    /* queries [num_heads, head_dim, num_rows]; scores [num_heads, num_rows, SCORES_STRIDE]; weights [num_rows, CHUNK];
     * parts and totals [num_heads, num_rows, part_width]; values [CHUNK, padded head_dim] */
    float *queries, *scores, *weights, *parts, *totals, *values;
    vec *largest, *sums; /* of each row, lane by lane; then the largest in every lane */
} query_tile;

/* Where each group of a chunk's keys begins, in the block's first head. What is beyond the last group is that. */
typedef struct {
    const char *at[CHUNK / GROUP];
} places;

static places find(const query_tile *t, int64_t key, const int is_k) {
    const kv_layout *kv = &t->c->kv;
    const int64_t bs = kv->block_size, last = (t->end - 1) / GROUP * GROUP;
    places found;
    for (int g = 0; g < CHUNK / GROUP; g++) {
        const uint32_t k = (uint32_t)MIN(key + g * GROUP, last), block = k / (uint32_t)bs, offset = k % (uint32_t)bs;
        const int64_t index = (t->blocks[block] * kv->num_kv_heads + t->first_head) * kv->head_dim * bs +
                              offset * (is_k ? 1 : kv->head_dim);
        found.at[g] = (const char *)(is_k ? kv->k_cache : kv->v_cache) + index * (kv->is_half ? 2 : 4);
    }
    return found;
}

/* Keys `key` to `end` in one of the two caches, and what is read after them. */
typedef struct {
    int64_t key, end;
    places here, next;
    const char *ahead; /* to be fetched now: in next.at[group], of which so many bytes are left */
    int64_t group, left;
} chunk;

INLINE int64_t head_bytes(const query_tile *t, const int is_half) {
    return t->c->kv.head_dim * t->c->kv.block_size * (is_half ? 2 : 4);
}

/* Of all the tile's heads. */
INLINE int64_t group_bytes(const query_tile *t) {
    return t->num_heads * GROUP * t->c->kv.head_dim * (t->c->kv.is_half ? 2 : 4);
}

static void enter(const query_tile *t, chunk *c, int64_t key, places here, places next) {
    c->key = key, c->end = MIN(key + CHUNK, t->end);
    c->here = here, c->next = next;
    c->group = 0, c->ahead = next.at[0], c->left = group_bytes(t);
}

/* While `bytes` of this chunk are read: as many of the next one, in the order in which they lie in memory (all heads
 * of a block, then the next block; blocks are of GROUP keys as a rule), whatever order it will be computed in. One
 * stream of addresses that goes straight on is what memory serves best. */
INLINE const char *look_ahead(const query_tile *t, chunk *c, int64_t bytes) {
    const char *at = c->ahead;
    c->ahead += bytes, c->left -= bytes;
    if (c->left <= 0) {
        c->group = (c->group + 1) % (CHUNK / GROUP);
        c->ahead = c->next.at[c->group], c->left = group_bytes(t);
    }
    return at;
}

/* Sums of products -> scores times log2(e), -infinity where a row does not see a key. */
INLINE vec finish_score(const query_tile *t, int64_t head, int64_t row, int64_t key, vec v) {
    const attention *c = t->c;
    const int64_t position = t->position + row / t->group;
    const ivec key_positions = LANE_INDEX + (int32_t)key;
    if (c->softcap > 0.0f) v = splat(LOG2_E * c->softcap) * tanh_vec(v / splat(c->softcap));
    if (c->alibi_slopes)
        v += splat(LOG2_E * c->alibi_slopes[(t->first_head + head) * t->group + row % t->group]) *
             __builtin_convertvector(key_positions - (int32_t)position, vec);
    ivec seen = key_positions <= (int32_t)position;
    if (c->window) seen &= key_positions > (int32_t)(position - c->window);
    return select_vec(seen, v, splat(-INFINITY));
}

/* Scores of some rows of a head against a chunk of keys, and the largest of each. Most keys are seen by all rows and
 * need nothing more: the scale is in the queries. */
INLINE void score(const query_tile *t, chunk *c, int64_t head, int64_t row, const int is_half, const int rows) {
    const attention *a = t->c;
    const int num = SCORE_REGISTERS(rows), size = is_half ? 2 : 4;
    const int64_t first_row = head * t->num_rows + row, bytes = num * LANES * a->kv.head_dim * size;
    const bool is_finished = a->softcap == 0.0f && !a->alibi_slopes && c->end == c->key + CHUNK &&
                             c->end - 1 <= t->position && (!a->window || c->key > t->last_position - a->window);
    const float *q = t->queries + head * a->kv.head_dim * t->num_rows + row;
    score_fn *add = rows == 1 ? (is_half ? score_1_half : score_1_float)
                  : rows == 2 ? (is_half ? score_2_half : score_2_float)
                  : rows == 4 ? (is_half ? score_4_half : score_4_float)
                  : rows == 8 ? (is_half ? score_8_half : score_8_float)
                              : (is_half ? score_16_half : score_16_float);
    vec unfinished[SUMS], *largest = t->largest + first_row;
    if (!is_finished)
        for (int r = 0; r < rows; r++) unfinished[r] = largest[r];
    for (int64_t key = c->key; key < c->end; key += num * LANES) {
        const char *keys[SUMS], *ahead[2];
        for (int n = 0; n < num; n++) {
            const int64_t at = key - c->key + n * LANES;
            keys[n] = c->here.at[at / GROUP] + head * head_bytes(t, is_half) + at % GROUP * size;
        }
        for (int part = 0; part < 2; part++) /* the first rows fetch for all */
            ahead[part] = row ? keys[0] : look_ahead(t, c, bytes / 2);
        float *scores = t->scores + first_row * SCORES_STRIDE + key - t->begin;
        add(&a->kv, keys, ahead, q, t->num_rows, scores, is_finished ? largest : unfinished);
        if (is_finished) continue;
        for (int r = 0; r < rows; r++, scores += SCORES_STRIDE)
            for (int n = 0; n < num && key + n * LANES < c->end; n++) { /* what follows is another split's */
                const vec v = finish_score(t, head, row + r, key + n * LANES, load(scores + n * LANES));
                largest[r] = max_vec(largest[r], v);
                store(scores + n * LANES, v);
            }
    }
}

INLINE void mix(const query_tile *t, chunk *c, int64_t head, int64_t row, int64_t num_keys, const int is_half,
                const int rows) {
    const int most = MIN(8, SUMS / rows), size = is_half ? 2 : 4;
    const int64_t d = t->c->kv.head_dim, width = padded(d);
    const char *values[CHUNK / GROUP], *ahead[CHUNK / GROUP];
    float *y[SUMS];
    for (int64_t g = 0; g < CHUNK / GROUP; g++)
        values[g] = ahead[g] = d % LANES ? (const char *)(t->values + g * GROUP * width)
                                         : c->here.at[g] + head * head_bytes(t, is_half);
    for (int r = 0; r < rows; r++) y[r] = t->parts + (head * t->num_rows + row + r) * part_width(d);
    const float *p = t->weights + row * CHUNK;
    int64_t i = 0;
#define SLICES(num)                                                                                    \
    for (; num <= most && i + num * LANES <= width; i += num * LANES) {                                \
        if (row == 0 && d % LANES == 0)                                                                \
            for (int64_t g = 0; g < CHUNK / GROUP; g++)                                                \
                ahead[g] = look_ahead(t, c, GROUP * num * LANES * size);                               \
        mix_rows(values, ahead, i, width, num_keys, p, y, is_half, rows, num);                         \
    }
    SLICES(8)
    SLICES(4)
    SLICES(2)
    SLICES(1)
#undef SLICES
}

/* Values of a head dimension that is no multiple of a register's, as floats in whole vectors. */
static void widen_values(const query_tile *t, const chunk *c, int64_t head, int64_t num_keys) {
    const kv_layout *kv = &t->c->kv;
    const int64_t d = kv->head_dim, width = padded(d);
    for (int64_t j = 0; j < num_keys; j++) {
        const char *at = c->here.at[j / GROUP] + head * head_bytes(t, kv->is_half);
        for (int64_t i = 0; i < d; i++)
            t->values[j * width + i] = kv->is_half ? half_to_float(((const uint16_t *)at)[j % GROUP * d + i])
                                                   : ((const float *)at)[j % GROUP * d + i];
    }
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

/* The partial results of a split: two passes over its keys, scores first, then the values. */
INLINE void attend(query_tile *t, const int is_half) {
    const int64_t d = t->c->kv.head_dim, all_rows = t->num_heads * t->num_rows, begin = t->begin, end = t->end;
    for (int64_t r = 0; r < all_rows; r++) t->largest[r] = splat(-INFINITY), t->sums[r] = (vec){};
    chunk c;
    places here = find(t, begin, 1), next;
    for (int64_t key = begin; key < end; key += CHUNK, here = next) {
        next = key + CHUNK < end ? find(t, key + CHUNK, 1) : find(t, begin, 0);
        enter(t, &c, key, here, next);
        for (int64_t head = 0; head < t->num_heads; head++) {
#define SCORE(rows) score(t, &c, head, row, is_half, rows)
            FOR_ROWS(t, SCORE)
#undef SCORE
        }
    }
    for (int64_t r = 0; r < all_rows; r++) {
        float *part = t->parts + r * part_width(d);
        const float largest = max_lanes(t->largest[r]);
        memset(part, 0, padded(d) * sizeof(float));
        part[padded(d)] = largest;
        t->largest[r] = splat(largest == -INFINITY ? 0.0f : largest); /* where a row sees nothing */
    }
    for (int64_t key = begin; key < end; key += CHUNK, here = next) {
        next = find(t, key + CHUNK, 0);
        enter(t, &c, key, here, next);
        for (int64_t head = 0; head < t->num_heads; head++) {
            const int64_t row = head * t->num_rows;
            exponentiate(t->scores + row * SCORES_STRIDE + key - begin, t->largest + row, t->sums + row, t->weights,
                         t->num_rows, (int)((c.end - key + LANES - 1) / LANES));
#define MIX(rows) mix(t, &c, head, row, c.end - c.key, is_half, rows)
#define MIX_WIDENED(rows) mix(t, &c, head, row, c.end - c.key, 0, rows)
            if (d % LANES == 0) FOR_ROWS(t, MIX)
            else {
                widen_values(t, &c, head, c.end - c.key);
                FOR_ROWS(t, MIX_WIDENED)
            }
#undef MIX
#undef MIX_WIDENED
        }
    }
    for (int64_t r = 0; r < all_rows; r++) t->parts[r * part_width(d) + padded(d) + 1] = sum_lanes(t->sums[r]);
}

/* What follows has one copy, so that the compiler can't round it differently here and there. */
NOINLINE void merge(float *restrict total, const float *restrict part, int64_t d) {
    const int64_t width = padded(d);
    if (part[width] == -INFINITY) return; /* saw nothing: changes nothing */
    const float largest = part[width] < total[width] ? total[width] : part[width];
    const float old = exp2_vec(splat(total[width] - largest))[0], new = exp2_vec(splat(part[width] - largest))[0];
    for (int64_t i = 0; i < width; i++) total[i] = total[i] * old + part[i] * new;
    total[width] = largest;
    total[width + 1] = total[width + 1] * old + part[width + 1] * new;
}

static void start(float *total, int64_t d) {
    memset(total, 0, part_width(d) * sizeof(float));
    total[padded(d)] = -INFINITY;
}

NOINLINE void divide_by_sum(float *y, const float *total, int64_t d) {
    for (int64_t i = 0; i < d; i++) y[i] = total[i] / total[padded(d) + 1];
}

/* Kept from call to call: the system would have to find its pages anew each time. NULL if there is no memory. */
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

INLINE float *part_of(const attention *c, int64_t token, int64_t head, int64_t split) {
    return c->partials + ((token * c->num_heads + head) * c->num_splits + split) * part_width(c->kv.head_dim);
}

/* The first key that a token at this position sees. */
INLINE int64_t first_seen(const attention *c, int64_t position) {
    return c->window ? MAX(0, position - c->window + 1) : 0;
}

/* One split of a tile and some KV heads, or all of them. */
static void attention_task(void *context, int64_t task) {
    const attention *c = context;
    const int64_t d = c->kv.head_dim, group = c->num_heads / c->kv.num_kv_heads;
    const int64_t num_parts = (c->kv.num_kv_heads + c->heads_per_task - 1) / c->heads_per_task;
    const int64_t first_head = task % num_parts * c->heads_per_task;
    const int64_t the_split = c->partials ? task / num_parts % c->num_splits : -1;
    const int64_t index = task / num_parts / (c->partials ? c->num_splits : 1);
    const int64_t num_heads = MIN(c->heads_per_task, c->kv.num_kv_heads - first_head);
    const int64_t seq = c->tile_seq[index], first = c->tile_begin[index];
    const int64_t num_tokens = MIN(c->tokens_per_tile, c->query_start[seq + 1] - first), num_rows = num_tokens * group;
    /* The position of the batch's token t of this sequence is t + shift. */
    const int64_t shift = c->context_lens[seq] - c->query_start[seq + 1], num_keys = first + num_tokens + shift;
    const int64_t first_key = first_seen(c, first + shift) / GROUP * GROUP;
    int64_t split = first_key / SPLIT, split_end = (num_keys + SPLIT - 1) / SPLIT;
    if (the_split >= 0) {
        if (the_split < split || the_split >= split_end) return;
        split = the_split, split_end = the_split + 1;
    }

    const int64_t all_rows = num_heads * num_rows, width = part_width(d);
    float *scratch = scratch_of(all_rows * (2 * LANES + SCORES_STRIDE + 2 * width + d) + num_rows * CHUNK +
                                CHUNK * padded(d));
    if (!scratch) abort(); /* some hundred KB: nothing else would get any either */
    vec *largest = (vec *)scratch, *sums = largest + all_rows;
    float *scores = (float *)(sums + all_rows), *weights = scores + all_rows * SCORES_STRIDE;
    float *parts = weights + num_rows * CHUNK, *totals = parts + all_rows * width, *values = totals + all_rows * width;
    float *queries = values + CHUNK * padded(d);
    query_tile t = {c, c->block_tables + seq * c->max_blocks, first_head, num_heads, group, num_rows, first + shift,
                    num_keys - 1, 0, 0, queries, scores, weights, parts, totals, values, largest, sums};
    const float factor = c->softcap > 0.0f ? c->scale : c->scale * LOG2_E;
    for (int64_t r = 0; r < all_rows; r++) {
        const int64_t head = r / num_rows, row = r % num_rows;
        const float *q = c->q + (first + row / group) * c->q_stride + ((first_head + head) * group + row % group) * d;
        for (int64_t i = 0; i < d; i++) queries[(head * d + i) * num_rows + row] = q[i] * factor;
        start(totals + r * width, d);
    }
    for (; split < split_end; split++) {
        t.begin = MAX(first_key, split * SPLIT);
        t.end = MIN(num_keys, (split + 1) * SPLIT);
        if (c->kv.is_half) attend(&t, 1);
        else attend(&t, 0);
        for (int64_t r = 0; r < all_rows; r++) {
            const int64_t token = first + r % num_rows / group, head = first_head + r / num_rows;
            if (c->partials) memcpy(part_of(c, token, head * group + r % group, split), parts + r * width, 4 * width);
            else merge(totals + r * width, parts + r * width, d);
        }
    }
    if (!c->partials)
        for (int64_t r = 0; r < all_rows; r++) {
            const int64_t token = first + r % num_rows / group, head = first_head + r / num_rows;
            divide_by_sum(c->y + token * c->y_stride + (head * group + r % group) * d, totals + r * width, d);
        }
}

/* All heads of a tile's tokens. */
static void merge_tile(void *context, int64_t index) {
    const attention *c = context;
    const int64_t d = c->kv.head_dim, seq = c->tile_seq[index], first = c->tile_begin[index];
    const int64_t end = MIN(first + c->tokens_per_tile, c->query_start[seq + 1]);
    const int64_t shift = c->context_lens[seq] - c->query_start[seq + 1];
    float total[part_width(d)];
    for (int64_t token = first; token < end; token++)
        for (int64_t head = 0; head < c->num_heads; head++) {
            start(total, d);
            for (int64_t split = first_seen(c, token + shift) / SPLIT; split * SPLIT <= token + shift; split++)
                merge(total, part_of(c, token, head, split), d);
            divide_by_sum(c->y + token * c->y_stride + head * d, total, d);
        }
}

/* Attention of new tokens over everything their sequences have cached, causal.
 *
 * q, y: [num_tokens, num_heads, head_dim]; block_tables [num_seqs, max_blocks]; query_start [num_seqs + 1]:
 * the batch's tokens query_start[s] .. query_start[s + 1] are the last of the context_lens[s] tokens of
 * sequence s. window 0, softcap 0, alibi_slopes NULL: without. tiles is scratch of 2 * num_tokens, partials (NULL: a
 * sequence's splits are not shared among threads) of num_tokens * num_heads * part_width for each SPLIT keys of the
 * longest context. */
EXPORT void penstock_paged_attention(const float *q, int64_t q_stride, float *y, int64_t y_stride, int64_t num_heads,
                                     void *k_cache, void *v_cache, int is_half, int64_t num_kv_heads, int64_t head_dim,
                                     int64_t block_size, const int32_t *block_tables, int64_t max_blocks,
                                     const int32_t *query_start, const int32_t *context_lens, int64_t num_seqs,
                                     float scale, float softcap, int64_t window, const float *alibi_slopes,
                                     int32_t *tiles, float *partials) {
    const int64_t group = num_heads / num_kv_heads, tokens_per_tile = MAX(1, TILE_ROWS / group);
    int32_t *tile_begin = tiles + query_start[num_seqs];
    int64_t num_tiles = 0, num_keys = 0, most_tokens = 1;
    for (int64_t s = 0; s < num_seqs; s++) {
        num_keys = MAX(num_keys, context_lens[s]);
        most_tokens = MAX(most_tokens, query_start[s + 1] - query_start[s]);
        for (int32_t t = query_start[s]; t < query_start[s + 1]; t += (int32_t)tokens_per_tile) {
            tiles[num_tiles] = (int32_t)s;
            tile_begin[num_tiles++] = t;
        }
    }
    const int64_t num_splits = (num_keys + SPLIT - 1) / SPLIT;
    if (num_splits == 1) partials = NULL;
    /* Long pieces of memory, and at least two tasks for each thread. */
    const int64_t num_tasks = num_tiles * (partials ? num_splits : 1), wanted = 2 * (atomic_load(&pool.num_wanted) + 1);
    const int64_t at_most = MAX(1, num_kv_heads * num_tasks / wanted);
    const int64_t heads_per_task = MIN(at_most, MAX(1, TASK_ROWS / (MIN(most_tokens, tokens_per_tile) * group)));
    attention c = {{k_cache, v_cache, is_half, num_kv_heads, head_dim, block_size},
                   q, y, q_stride, y_stride, num_heads, tokens_per_tile, heads_per_task, max_blocks,
                   block_tables, query_start, context_lens, tiles, tile_begin,
                   scale, softcap, window, alibi_slopes, partials, num_splits};
    parallel(num_tasks * ((num_kv_heads + heads_per_task - 1) / heads_per_task), attention_task, &c);
    if (partials) parallel(num_tiles, merge_tile, &c);
}
