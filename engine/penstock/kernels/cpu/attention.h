/* Attention over the blocks of the cache, and writing into them. Part of cpu.c. */
#pragma once

#include "attention_tile.h"

typedef struct {
    kv_layout kv;
    const float *k, *v;
    int64_t k_stride, v_stride, num_tokens, tokens_per_task;
    const int64_t *slot_mapping;
    atomic_bool *has_clamped; /* set where float16 can't hold a number */
} kv_write;

/* Whether float16 can't hold one of these numbers. A plain loop, which GCC vectorizes. */
INLINE bool exceeds_half(const float *x, int64_t d) {
    int32_t found = 0;
    for (int64_t i = 0; i < d; i++) found |= (x[i] > 65504.0f) | (x[i] < -65504.0f);
    return found;
}

/* One head's keys of a token lie `stride` apart, its values side by side. */
INLINE void write_halves(const float *k, const float *v, uint16_t *k_out, uint16_t *v_out, int64_t d, int64_t stride) {
    int64_t i = 0;
    for (; i + LANES <= d; i += LANES) {
        uint16_t halves[LANES];
        store_half(halves, load(k + i));
        store_half(v_out + i, load(v + i));
        for (int lane = 0; lane < LANES; lane++) k_out[(i + lane) * stride] = halves[lane];
    }
    for (; i < d; i++) k_out[i * stride] = float_to_half(k[i]), v_out[i] = float_to_half(v[i]);
}

/* A vector's integers, `stride` apart, and its scale: quantize_kv() of reference.py. */
INLINE void write_int8(const float *x, int8_t *codes, int64_t stride, uint16_t *scale, int64_t d) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds half to even */
    int32_t largest = 0, bits;       /* the bits have the order of the numbers; NaN is the largest */
    for (int64_t i = 0; i < d; i++) largest = MAX(largest, bits_of(x[i]) & 0x7fffffff);
    float s;
    memcpy(&s, &largest, 4);
    const bool is_number = s < INFINITY;
    s /= 127.0f;
    bits = s < 1.17549435e-38f ? 0 : is_number ? (bits_of(s) + 0xffff) & ~0xffff : 0x7fc00000;
    memcpy(&s, &bits, 4);
    *scale = (uint16_t)(bits >> 16);
    const float divisor = s > 0.0f ? s : INFINITY;
    const int32_t magic_bits = bits_of(magic), kept = is_number ? 0xff : 0;
    for (int64_t i = 0; i < d; i++) codes[i * stride] = (int8_t)((bits_of(x[i] / divisor + magic) - magic_bits) & kept);
}

/* A token's head: integers as they lie with the other forms, and the scales behind all integers of the block's head. */
INLINE void write_int8_head(const kv_write *c, int64_t block, int64_t offset, int64_t head, const float *k,
                            const float *v) {
    const int64_t d = c->kv.head_dim, bs = c->kv.block_size;
    const int64_t base = (block * c->kv.num_kv_heads + head) * (d + scale_size(FORM_INT8)) * bs;
    int8_t *keys = (int8_t *)c->kv.k_cache + base, *values = (int8_t *)c->kv.v_cache + base;
    write_int8(k, keys + offset, bs, (uint16_t *)(keys + d * bs) + offset, d);
    write_int8(v, values + offset * d, 1, (uint16_t *)(values + d * bs) + offset, d);
}

INLINE void write_kv_head(const kv_write *c, int64_t token, int64_t head) {
    const int64_t d = c->kv.head_dim, bs = c->kv.block_size;
    const int64_t block = c->slot_mapping[token] / bs, offset = c->slot_mapping[token] % bs;
    const int64_t base = (block * c->kv.num_kv_heads + head) * d * bs;
    const float *k = c->k + token * c->k_stride + head * d, *v = c->v + token * c->v_stride + head * d;
    const bool is_half = c->kv.form == FORM_HALF;
    if (is_half && (exceeds_half(k, d) || (c->kv.v_cache && exceeds_half(v, d))))
        atomic_store_explicit(c->has_clamped, true, memory_order_relaxed);
    if (c->kv.form == FORM_INT8) {
        write_int8_head(c, block, offset, head, k, v);
    } else if (!c->kv.v_cache) { /* with a latent, keys alone */
        uint16_t *halves = (uint16_t *)c->kv.k_cache + base + offset;
        float *floats = (float *)c->kv.k_cache + base + offset;
        for (int64_t i = 0; i < d; i++)
            if (is_half) halves[i * bs] = float_to_half(k[i]);
            else floats[i * bs] = k[i];
    } else if (is_half) {
        uint16_t *k_out = (uint16_t *)c->kv.k_cache + base + offset,
                 *v_out = (uint16_t *)c->kv.v_cache + base + offset * d;
        write_halves(k, v, k_out, v_out, d, bs);
    } else {
        float *k_out = (float *)c->kv.k_cache + base + offset, *v_out = (float *)c->kv.v_cache + base + offset * d;
        for (int64_t i = 0; i < d; i++) k_out[i * bs] = k[i], v_out[i] = v[i];
    }
}

/* Some tokens that follow one another. Keys of neighbouring tokens lie in the same cache lines: a thread fills the
 * lines of one head before it goes on to the next head. */
static void write_kv_task(void *context, int64_t task) {
    const kv_write *c = context;
    const int64_t begin = task * c->tokens_per_task, end = MIN(begin + c->tokens_per_task, c->num_tokens);
    for (int64_t head = 0; head < c->kv.num_kv_heads; head++)
        for (int64_t token = begin; token < end; token++) write_kv_head(c, token, head);
}

/* Returns whether a number was too large for float16 and became the largest float16. */
EXPORT int penstock_write_kv(const float *k, int64_t k_stride, const float *v, int64_t v_stride, int64_t num_tokens,
                             const int64_t *slot_mapping, void *k_cache, void *v_cache, int form,
                             int64_t num_kv_heads, int64_t head_dim, int64_t block_size) {
    /* A block's tokens together, but tasks for all threads. */
    const int64_t share = num_tokens / (2 * (atomic_load(&pool.num_wanted) + 1));
    const int64_t tokens_per_task = MAX(1, MIN(block_size, share));
    atomic_bool has_clamped = false;
    kv_write c = {{k_cache, v_cache, (kv_form)form, num_kv_heads, head_dim, block_size, 0, 0, 0}, k, v, k_stride,
                  v_stride, num_tokens, tokens_per_task, slot_mapping, &has_clamped};
    const int64_t num_tasks = (num_tokens + tokens_per_task - 1) / tokens_per_task;
    for_rows(num_tasks, 2 * num_kv_heads * head_dim * tokens_per_task, write_kv_task, &c);
    return has_clamped;
}

/* merge() is never inlined: two copies of it could round differently. */
NOINLINE void merge(float *restrict total, const float *restrict part, int64_t d) {
    const int64_t width = padded(d);
    if (part[width] == -INFINITY) return; /* a part that saw no key changes nothing */
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

/* A head's sink is merged as a last part: one key of the weight 1 and with a value of zeros. */
NOINLINE void add_sink(float *total, float sink, int64_t d) {
    float part[part_width(d)];
    memset(part, 0, sizeof part);
    part[padded(d)] = LOG2_E * sink, part[padded(d) + 1] = 1.0f;
    merge(total, part, d);
}
static void finish_row(const attention *c, int64_t token, int64_t head, float *total) {
    const int64_t d = c->kv.value_dim;
    if (c->sinks) add_sink(total, c->sinks[head], d);
    divide_by_sum(c->y + token * c->y_stride + head * d, total, d);
}

/* A thread's scratch, which is kept from call to call: otherwise the system would have to find its pages each
 * time. NULL if there is no memory. */
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
    return c->partials + ((token * c->num_heads + head) * c->num_splits + split) * part_width(c->kv.value_dim);
}

/* Keys that every token of a sequence sees, whatever its position is. */
INLINE int64_t prefix_of(const attention *c, int64_t seq) { return c->prefix_lens ? c->prefix_lens[seq] : 0; }

/* One split of a tile and of some KV heads, or all splits. */
static void attention_task(void *context, int64_t task) {
    const attention *c = context;
    const int64_t d = c->kv.head_dim, value_dim = c->kv.value_dim, group = c->num_heads / c->kv.num_kv_heads;
    const int64_t num_parts = (c->kv.num_kv_heads + c->heads_per_task - 1) / c->heads_per_task;
    const int64_t first_head = task % num_parts * c->heads_per_task;
    const int64_t the_split = c->partials ? task / num_parts % c->num_splits : -1;
    const int64_t index = task / num_parts / (c->partials ? c->num_splits : 1);
    const int64_t num_heads = MIN(c->heads_per_task, c->kv.num_kv_heads - first_head);
    const int64_t seq = c->tile_seq[index], first = c->tile_begin[index];
    const int64_t num_tokens = MIN(c->tokens_per_tile, c->query_start[seq + 1] - first), num_rows = num_tokens * group;
    /* The position of the batch's token t of this sequence is t + shift. */
    const int64_t shift = c->context_lens[seq] - c->query_start[seq + 1], prefix = prefix_of(c, seq);
    const int64_t num_keys = num_seen(first + num_tokens - 1 + shift, prefix);
    const int64_t first_key = first_seen(c, first + shift) / GROUP * GROUP;
    int64_t split = first_key / SPLIT, split_end = (num_keys + SPLIT - 1) / SPLIT;
    if (the_split >= 0) {
        if (the_split < split || the_split >= split_end) return;
        split = the_split, split_end = the_split + 1;
    }

    const int64_t all_rows = num_heads * num_rows, width = part_width(value_dim);
    float *scratch = scratch_of(all_rows * (2 * LANES + SCORES_STRIDE + 2 * width + d) + num_rows * CHUNK +
                                CHUNK * padded(value_dim));
    if (!scratch) abort(); /* a machine without some hundred KB can do nothing */
    vec *largest = (vec *)scratch, *sums = largest + all_rows;
    float *scores = (float *)(sums + all_rows), *weights = scores + all_rows * SCORES_STRIDE;
    float *parts = weights + num_rows * CHUNK, *totals = parts + all_rows * width, *values = totals + all_rows * width;
    float *queries = values + CHUNK * padded(value_dim);
    query_tile t = {c, c->block_tables + seq * c->max_blocks, first_head, num_heads, group, num_rows, first + shift,
                    first + num_tokens - 1 + shift, prefix, 0, 0, queries, scores, weights, parts, totals, values,
                    largest, sums};
    const float factor = c->softcap > 0.0f ? c->scale : c->scale * LOG2_E;
    for (int64_t r = 0; r < all_rows; r++) {
        const int64_t head = r / num_rows, row = r % num_rows;
        const float *q = c->q + (first + row / group) * c->q_stride + ((first_head + head) * group + row % group) * d;
        for (int64_t i = 0; i < d; i++) queries[(head * d + i) * num_rows + row] = q[i] * factor;
        start(totals + r * width, value_dim);
    }
    for (; split < split_end; split++) {
        t.begin = MAX(first_key, split * SPLIT);
        t.end = MIN(num_keys, (split + 1) * SPLIT);
        if (c->kv.form == FORM_INT8) attend(&t, FORM_INT8);
        else if (c->kv.form == FORM_HALF) attend(&t, FORM_HALF);
        else attend(&t, FORM_FLOAT);
        for (int64_t r = 0; r < all_rows; r++) {
            const int64_t token = first + r % num_rows / group, head = first_head + r / num_rows;
            if (c->partials) memcpy(part_of(c, token, head * group + r % group, split), parts + r * width, 4 * width);
            else merge(totals + r * width, parts + r * width, value_dim);
        }
    }
    if (!c->partials)
        for (int64_t r = 0; r < all_rows; r++) {
            const int64_t token = first + r % num_rows / group, head = first_head + r / num_rows;
            finish_row(c, token, head * group + r % group, totals + r * width);
        }
}

/* Merge the splits of a tile's tokens, for all heads. */
static void merge_tile(void *context, int64_t index) {
    const attention *c = context;
    const int64_t d = c->kv.value_dim, seq = c->tile_seq[index], first = c->tile_begin[index];
    const int64_t end = MIN(first + c->tokens_per_tile, c->query_start[seq + 1]);
    const int64_t shift = c->context_lens[seq] - c->query_start[seq + 1], prefix = prefix_of(c, seq);
    float total[part_width(d)];
    for (int64_t token = first; token < end; token++)
        for (int64_t head = 0; head < c->num_heads; head++) {
            start(total, d);
            for (int64_t split = first_seen(c, token + shift) / SPLIT; split * SPLIT < num_seen(token + shift, prefix);
                 split++)
                merge(total, part_of(c, token, head, split), d);
            finish_row(c, token, head, total);
        }
}

/* Query heads that share a latent are cut into parts, so that threads can share them: the fewest equal parts that fill
 * at most a tile of one token. */
static int64_t query_parts(int64_t num_heads) {
    int64_t parts = (num_heads + TILE_ROWS - 1) / TILE_ROWS;
    while (num_heads % parts) parts++;
    return parts;
}

/* Attention of new tokens over all cached tokens of their sequences: causal, but for a prefix.
 *
 * q and y are [num_tokens, num_heads, head_dim], block_tables [num_seqs, max_blocks], query_start [num_seqs + 1].
 * The batch's tokens query_start[s] .. query_start[s + 1] are the last of the context_lens[s] tokens of sequence s.
 * Every token of sequence s also sees the first prefix_lens[s] keys; with prefix_lens NULL, attention is causal.
 * window 0, chunk 0, softcap 0, alibi_slopes NULL, distance_bias NULL, across_bias NULL and sinks NULL mean none;
 * AttentionSpec and DistanceBias in operands.py say what these are. With a latent, v_cache is NULL, latent_dim the
 * number of a key's first dimensions that are its value, and y is [num_tokens, num_heads, latent_dim]. tiles is scratch
 * of 2 * num_tokens. partials is scratch of num_tokens * num_heads * part_width for each SPLIT keys of the longest
 * context; with NULL, threads do not share the splits of a sequence. */
EXPORT void penstock_paged_attention(const float *q, int64_t q_stride, float *y, int64_t y_stride, int64_t num_heads,
                                     void *k_cache, void *v_cache, int form, int64_t num_kv_heads, int64_t head_dim,
                                     int64_t block_size, const int32_t *block_tables, int64_t max_blocks,
                                     const int32_t *query_start, const int32_t *context_lens,
                                     const int32_t *prefix_lens, int64_t num_seqs, float scale, float softcap,
                                     int64_t window, int64_t chunk, const float *alibi_slopes,
                                     const float *distance_bias, int64_t max_distance, int64_t boundary,
                                     const float *across_bias, const float *sinks, int64_t latent_dim,
                                     int32_t *tiles, float *partials) {
    const int64_t size = (head_dim + scale_size((kv_form)form)) * block_size;
    kv_layout kv = {k_cache, v_cache, (kv_form)form, num_kv_heads, head_dim, block_size, head_dim, size,
                    num_kv_heads * size};
    if (!v_cache) {
        num_kv_heads = query_parts(num_heads);
        kv.num_kv_heads = num_kv_heads, kv.value_dim = latent_dim, kv.head_size = 0;
    }
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
    /* KV heads of a task: many, so that memory is read in long pieces, and few enough for two tasks a thread. */
    const int64_t num_tasks = num_tiles * (partials ? num_splits : 1), wanted = 2 * (atomic_load(&pool.num_wanted) + 1);
    const int64_t at_most = MAX(1, num_kv_heads * num_tasks / wanted);
    const int64_t heads_per_task = MIN(at_most, MAX(1, TASK_ROWS / (MIN(most_tokens, tokens_per_tile) * group)));
    attention c = {kv, q, y, q_stride, y_stride, num_heads, tokens_per_tile, heads_per_task, max_blocks,
                   block_tables, query_start, context_lens, prefix_lens, tiles, tile_begin,
                   scale, softcap, window, chunk, alibi_slopes, distance_bias, max_distance, boundary, across_bias,
                   sinks, partials, num_splits};
    parallel(num_tasks * ((num_kv_heads + heads_per_task - 1) / heads_per_task), attention_task, &c);
    if (partials) parallel(num_tiles, merge_tile, &c);
}
