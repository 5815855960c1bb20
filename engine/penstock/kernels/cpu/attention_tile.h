/* A tile of queries meets one split of its keys. Part of attention.h. */
#pragma once

#include "attention_rows.h"

/* A row is one head's query of one token. TILE_ROWS rows meet a KV head's keys together. A thread takes TASK_ROWS
 * rows of all KV heads at once: a block holds the keys of all heads side by side, and memory is fastest when it is
 * read in long pieces. */
enum { TILE_ROWS = 16, TASK_ROWS = 64 };

/* Floats of a partial result: padded(d) weighted values, the largest score, the sum, and padding up to a new cache
 * line. */
INLINE int64_t part_width(int64_t d) { return (d + 15) / 16 * 16 + 16; }

typedef struct {
    kv_layout kv;
    const float *q;
    float *y;
    int64_t q_stride, y_stride, num_heads, tokens_per_tile, heads_per_task, max_blocks;
    const int32_t *block_tables, *query_start, *context_lens, *prefix_lens;
    const int32_t *tile_seq, *tile_begin; /* per tile: its sequence, its first token in the batch */
    float scale, softcap;
    int64_t window, chunk;
    const float *alibi_slopes;
    const float *distance_bias; /* [num_heads, 2 * max_distance + 1] */
    int64_t max_distance, boundary;
    const float *across_bias; /* [2, num_heads]: for queries before the boundary, then for those behind */
    const float *sinks; /* [num_heads] */
    float *partials; /* [num_tokens, num_heads, num_splits] parts; NULL: a tile's thread computes all splits */
    int64_t num_splits;
} attention;

/* A few tokens of one sequence, some KV heads with all their query heads, and one split of the keys. */
typedef struct {
    const attention *c;
    const int32_t *blocks;
    int64_t first_head, num_heads;   /* KV heads */
    int64_t group, num_rows;         /* query heads of a KV head; tokens times group */
    int64_t position, last_position; /* of the first token and the last */
    int64_t prefix;                  /* keys that every token sees */
    int64_t begin, end;              /* of the split, the keys that some row sees; `begin` is a multiple of GROUP */
    /* queries [num_heads, head_dim, num_rows]; scores [num_heads, num_rows, SCORES_STRIDE]; weights [num_rows, CHUNK];
     * parts and totals [num_heads, num_rows, part_width]; values [CHUNK, padded value_dim] */
    float *queries, *scores, *weights, *parts, *totals, *values;
    vec *largest, *sums; /* of each row, lane by lane; then the largest in every lane */
} query_tile;

/* Where each group of a chunk's keys begins, in the tile's first head, and with INT8 where the keys' scales begin.
 * Groups beyond the last one repeat it. */
typedef struct {
    const char *at[CHUNK / GROUP], *scales[CHUNK / GROUP];
} places;

static places find(const query_tile *t, int64_t key, const int is_k) {
    const kv_layout *kv = &t->c->kv;
    const int64_t bs = kv->block_size, last = (t->end - 1) / GROUP * GROUP;
    const bool in_keys = is_k || !kv->v_cache;
    places found;
    for (int g = 0; g < CHUNK / GROUP; g++) {
        const uint32_t k = (uint32_t)MIN(key + g * GROUP, last), block = k / (uint32_t)bs, offset = k % (uint32_t)bs;
        const int64_t index = t->blocks[block] * kv->all_heads_size + t->first_head * kv->head_size;
        const char *head = (const char *)(in_keys ? kv->k_cache : kv->v_cache) + index * item_size(kv->form);
        found.at[g] = head + offset * (in_keys ? 1 : kv->value_dim) * item_size(kv->form);
        found.scales[g] = head + kv->head_dim * bs + offset * scale_size(FORM_INT8);
    }
    return found;
}

/* Keys `key` to `end` in one of the two caches, and the keys or values that are read after them. */
typedef struct {
    int64_t key, end;
    places here, next;
    const char *ahead; /* prefetched next: in next.at[group], `left` bytes before its end */
    int64_t group, left;
} chunk;

INLINE int64_t head_bytes(const query_tile *t, const kv_form form) { return t->c->kv.head_size * item_size(form); }

/* Bytes of a group of keys in all the tile's heads. */
INLINE int64_t group_bytes(const query_tile *t) {
    const kv_layout *kv = &t->c->kv;
    return (kv->v_cache ? t->num_heads : 1) * GROUP * (kv->head_dim * item_size(kv->form) + scale_size(kv->form));
}

static void enter(const query_tile *t, chunk *c, int64_t key, places here, places next) {
    c->key = key, c->end = MIN(key + CHUNK, t->end);
    c->here = here, c->next = next;
    c->group = 0, c->ahead = next.at[0], c->left = group_bytes(t);
}

/* Where to prefetch while `bytes` of this chunk are read: the same number of bytes of the next chunk, in the order
 * in which they lie in memory (all heads of a block, then the next block; a block usually has GROUP keys), and not in
 * the order in which they will be computed. Memory is fastest with one stream of ascending addresses. */
INLINE const char *look_ahead(const query_tile *t, chunk *c, int64_t bytes) {
    const char *at = c->ahead;
    c->ahead += bytes, c->left -= bytes;
    if (c->left <= 0) {
        c->group = (c->group + 1) % (CHUNK / GROUP);
        c->ahead = c->next.at[c->group], c->left = group_bytes(t);
    }
    return at;
}

/* Keys that a token sees, counted from the sequence's beginning. */
INLINE int64_t num_seen(int64_t position, int64_t prefix) { return MAX(position + 1, prefix); }

/* The first key that a token at this position sees. */
INLINE int64_t first_seen(const attention *c, int64_t position) {
    if (c->chunk) return position / c->chunk * c->chunk;
    return c->window ? MAX(0, position - c->window + 1) : 0;
}

/* The biases of LANES keys from `key` on, for a head's query at `position`. */
static vec distance_biases(const attention *c, int64_t head, int64_t position, int64_t key) {
    const int64_t most = c->max_distance, first = key - position, last = first + LANES - 1;
    const float *table = c->distance_bias + head * (2 * most + 1) + most;
    vec v;
    if (first >= -most && last <= most) v = load(table + first);
    else if (last <= -most) v = splat(table[-most]);
    else if (first >= most) v = splat(table[most]);
    else
        for (int i = 0; i < LANES; i++) v[i] = table[MAX(-most, MIN(most, first + i))];
    if (!c->across_bias) return v;
    const ivec is_before = LANE_INDEX + (int32_t)key < (int32_t)c->boundary;
    const bool is_first = position < c->boundary;
    const float across = c->across_bias[is_first ? head : c->num_heads + head];
    return select_vec(is_first ? ~is_before : is_before, splat(across), v);
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
    if (c->distance_bias)
        v += splat(LOG2_E) * distance_biases(c, (t->first_head + head) * t->group + row % t->group, position, key);
    ivec seen = key_positions < (int32_t)num_seen(position, t->prefix);
    if (c->window || c->chunk) seen &= key_positions >= (int32_t)first_seen(c, position);
    return select_vec(seen, v, splat(-INFINITY));
}

/* Scores of some rows of a head against a chunk of keys, and the largest score of each row. Most keys are seen by
 * all rows, and their scores need no more work: the queries are scaled already. */
INLINE void score(const query_tile *t, chunk *c, int64_t head, int64_t row, const kv_form form, const int rows) {
    const attention *a = t->c;
    const int num = SCORE_REGISTERS(rows);
    const int64_t first_row = head * t->num_rows + row, size = item_size(form);
    const int64_t bytes = num * LANES * (a->kv.head_dim * size + scale_size(form));
    const bool is_finished = a->softcap == 0.0f && !a->alibi_slopes && !a->distance_bias &&
                             c->end == c->key + CHUNK && c->end <= num_seen(t->position, t->prefix) &&
                             c->key >= first_seen(a, t->last_position);
    const bool is_read_first = row == 0 && (head == 0 || a->kv.v_cache);
    const float *q = t->queries + head * a->kv.head_dim * t->num_rows + row;
#define OF_FORM(rows) (form == FORM_INT8 ? score_##rows##_int8 : form ? score_##rows##_half : score_##rows##_float)
    score_fn *add = rows == 1 ? OF_FORM(1) : rows == 2 ? OF_FORM(2) : rows == 4 ? OF_FORM(4) : rows == 8 ? OF_FORM(8)
                  : OF_FORM(16);
#undef OF_FORM
    vec unfinished[SUMS], *largest = t->largest + first_row;
    if (!is_finished)
        for (int r = 0; r < rows; r++) unfinished[r] = largest[r];
    for (int64_t key = c->key; key < c->end; key += num * LANES) {
        const char *keys[SUMS], *scales[SUMS], *ahead[2];
        for (int n = 0; n < num; n++) {
            const int64_t at = key - c->key + n * LANES, of_head = head * head_bytes(t, form);
            keys[n] = c->here.at[at / GROUP] + of_head + at % GROUP * size;
            scales[n] = c->here.scales[at / GROUP] + of_head + at % GROUP * scale_size(form);
        }
        for (int part = 0; part < 2; part++) /* only the first rows prefetch */
            ahead[part] = is_read_first ? look_ahead(t, c, bytes / 2) : keys[0];
        float *scores = t->scores + first_row * SCORES_STRIDE + key - t->begin;
        add(&a->kv, keys, scales, ahead, q, t->num_rows, scores, is_finished ? largest : unfinished);
        if (is_finished) continue;
        for (int r = 0; r < rows; r++, scores += SCORES_STRIDE)
            for (int n = 0; n < num && key + n * LANES < c->end; n++) { /* keys from here on belong to another split */
                const vec v = finish_score(t, head, row + r, key + n * LANES, load(scores + n * LANES));
                largest[r] = max_vec(largest[r], v);
                store(scores + n * LANES, v);
            }
    }
}

/* Whether values are first copied as floats in whole vectors: where value_dim is no multiple of a register's lanes,
 * and where values are the beginning of keys, which lie in another order. */
INLINE bool is_widened(const kv_layout *kv) { return !kv->v_cache || kv->value_dim % LANES; }

INLINE void mix(const query_tile *t, chunk *c, int64_t head, int64_t row, int64_t num_keys, const kv_form form,
                const int rows) {
    const int most = MIN(8, SUMS / rows);
    const int64_t size = item_size(form);
    const int64_t d = t->c->kv.value_dim, width = padded(d);
    const bool widened = is_widened(&t->c->kv);
    const char *values[CHUNK / GROUP], *ahead[CHUNK / GROUP];
    float *y[SUMS];
    for (int64_t g = 0; g < CHUNK / GROUP; g++)
        values[g] = ahead[g] = widened ? (const char *)(t->values + g * GROUP * width)
                                       : c->here.at[g] + head * head_bytes(t, form);
    for (int r = 0; r < rows; r++) y[r] = t->parts + (head * t->num_rows + row + r) * part_width(d);
    const float *p = t->weights + row * CHUNK;
    int64_t i = 0;
#define SLICES(num)                                                                                    \
    for (; num <= most && i + num * LANES <= width; i += num * LANES) {                                \
        if (row == 0 && !widened)                                                                      \
            for (int64_t g = 0; g < CHUNK / GROUP; g++)                                                \
                ahead[g] = look_ahead(t, c, GROUP * num * LANES * size);                               \
        mix_rows(values, ahead, i, width, num_keys, p, y, form, rows, num);                            \
    }
    SLICES(8)
    SLICES(4)
    SLICES(2)
    SLICES(1)
#undef SLICES
    if (row == 0 && !widened && form == FORM_INT8)
        for (int64_t g = 0; g < CHUNK / GROUP; g++) fetch_lines(look_ahead(t, c, GROUP * scale_size(form)), 1);
}

/* Four dimensions of LANES keys at a time: [value_dim, keys] -> [keys, value_dim]. All heads share the copy. */
static void turn_latents(const query_tile *t, const chunk *c) {
    const kv_layout *kv = &t->c->kv;
    const int64_t d = kv->value_dim, width = padded(d);
    for (int64_t i = 0; i < d; i += 4)
        for (int64_t key = 0; key < CHUNK; key += LANES) {
            const int64_t num = MIN(4, d - i), from = i * kv->block_size + key % GROUP;
            float *to = t->values + key * width + i, rows[4][LANES];
            for (int64_t r = 0; r < num; r++)
                store(rows[r], load_cached(c->here.at[key / GROUP], from + r * kv->block_size, kv->form));
            if (num == 4)
                for (int64_t lane = 0; lane < LANES; lane++)
                    for (int r = 0; r < 4; r++) to[lane * width + r] = rows[r][lane];
            else
                for (int64_t lane = 0; lane < LANES; lane++)
                    for (int64_t r = 0; r < num; r++) to[lane * width + r] = rows[r][lane];
        }
}

/* The values of a head as floats in whole vectors. */
static void widen_values(const query_tile *t, const chunk *c, int64_t head, int64_t num_keys) {
    const kv_layout *kv = &t->c->kv;
    const int64_t d = kv->value_dim, width = padded(d);
    if (!kv->v_cache) {
        if (head == 0) turn_latents(t, c);
        return;
    }
    for (int64_t j = 0; j < num_keys; j++) {
        const char *at = c->here.at[j / GROUP] + head * head_bytes(t, kv->form);
        for (int64_t i = 0; i < d; i++) t->values[j * width + i] = load_one(at, j % GROUP * d + i, kv->form);
    }
}

/* The weights of a chunk's keys in a head. */
INLINE void weigh(query_tile *t, const chunk *c, int64_t head, const kv_form form) {
    const int64_t row = head * t->num_rows;
    const float *scores = t->scores + row * SCORES_STRIDE + c->key - t->begin;
    const int num = (int)((c->end - c->key + LANES - 1) / LANES);
    if (form != FORM_INT8) {
        exponentiate(scores, t->largest + row, t->sums + row, t->weights, t->num_rows, num);
        return;
    }
    const char *scales[CHUNK / GROUP];
    for (int64_t g = 0; g < CHUNK / GROUP; g++) scales[g] = c->here.scales[g] + head * head_bytes(t, form);
    exponentiate_scaled(scores, t->largest + row, t->sums + row, t->weights, t->num_rows, num, scales);
}

/* DO(rows) for all rows; registers limit how many rows are done at a time. */
#define FOR_ROWS(t, DO)                                                                            \
    for (int64_t row = 0, left; (left = (t)->num_rows - row) > 0;) {                               \
        if (SUMS >= 16 && left >= 16) { DO(MIN(SUMS, 16)); row += 16; }                            \
        else if (SUMS >= 8 && left >= 8) { DO(MIN(SUMS, 8)); row += 8; }                           \
        else if (left >= 4) { DO(4); row += 4; }                                                   \
        else if (left >= 2) { DO(2); row += 2; }                                                   \
        else { DO(1); row += 1; }                                                                  \
    }

/* The partial results of a split. Two passes over the keys: first scores, then values. */
INLINE void attend(query_tile *t, const kv_form form) {
    const int64_t d = t->c->kv.value_dim, all_rows = t->num_heads * t->num_rows, begin = t->begin, end = t->end;
    for (int64_t r = 0; r < all_rows; r++) t->largest[r] = splat(-INFINITY), t->sums[r] = (vec){};
    chunk c;
    places here = find(t, begin, 1), next;
    for (int64_t key = begin; key < end; key += CHUNK, here = next) {
        next = key + CHUNK < end ? find(t, key + CHUNK, 1) : find(t, begin, 0);
        enter(t, &c, key, here, next);
        for (int64_t head = 0; head < t->num_heads; head++) {
#define SCORE(rows) score(t, &c, head, row, form, rows)
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
            weigh(t, &c, head, form);
#define MIX(rows) mix(t, &c, head, row, c.end - c.key, form, rows)
#define MIX_WIDENED(rows) mix(t, &c, head, row, c.end - c.key, FORM_FLOAT, rows)
            if (!is_widened(&t->c->kv)) FOR_ROWS(t, MIX)
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
