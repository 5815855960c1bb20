/* Splits of keys that lie in the host's memory beside a card, attended here with the bits of the card's kernels
 * (cuda/attention.cu, which says what a split and a partial result are). Part of cpu.c.
 *
 * The order of sums is the card's, and so is each rounding: a fused multiply-add is fused_vec(), and what is multiplied
 * and added without being fused goes through IN_REGISTER(), which keeps the compiler from fusing it. */
#pragma once

/* As in attention.cu; rows of a task, which share the loads of keys and values. */
enum { TILE_KEYS = 32, SPLIT_KEYS = 256, TILE_VECS = TILE_KEYS / LANES, ATTENDED_ROWS = 4, ATTENDED_DIM = 256 };

/* AttendedRecord of attended.py. All members have eight bytes, but for the last ones, which have four. */
typedef struct {
    const void *k_cache, *v_cache; /* of the layer; the blocks are counted from here */
    int64_t form, num_heads, num_kv_heads, head_dim, block_size, window, chunk;
    /* An item is a split of a token: the token's row in q, its position, the split, the place of its results. */
    const int32_t *items;  /* [num_items, 4] */
    const int32_t *blocks; /* [num_items, SPLIT_KEYS / block_size] */
    int64_t num_items;
    float scale, softcap;
} attended;

typedef struct {
    const attended *a;
    const float *q; /* [num_tokens, num_heads, head_dim] */
    float *y;       /* [places, num_heads, head_dim + 2]: each largest, sum, values */
} attending;

#if defined(__AVX512F__)
INLINE vec fused_vec(vec a, vec b, vec c) { return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif defined(__AVX2__)
INLINE vec fused_vec(vec a, vec b, vec c) { return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#elif defined(__aarch64__)
INLINE vec fused_vec(vec a, vec b, vec c) {
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#else
INLINE vec fused_vec(vec a, vec b, vec c) {
    for (int i = 0; i < LANES; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
}
#endif
INLINE vec times_vec(vec a, vec b) {
    vec product = a * b;
    IN_REGISTER(product);
    return product;
}

/* power_of_2() of attention.cu. */
INLINE vec power_of_2(vec x) {
    const vec magic = splat(12582912.0f), clamped = max_vec(x, splat(-126.0f));
    const vec shifted = clamped + magic, r = clamped - (shifted - magic);
    vec p = splat(1.53533707e-4f);
    p = fused_vec(p, r, splat(1.33988739e-3f));
    p = fused_vec(p, r, splat(9.61843692e-3f));
    p = fused_vec(p, r, splat(5.55033237e-2f));
    p = fused_vec(p, r, splat(2.40226477e-1f));
    p = fused_vec(p, r, splat(6.93147182e-1f));
    p = fused_vec(p, r, splat(1.0f));
    return (vec)((ivec)p + ((ivec)shifted << 23));
}

/* tanh_of() of attention.cu. */
INLINE vec tanh_of(vec x) {
    const vec less = power_of_2(times_vec(abs_vec(x), splat(-2.0f * LOG2_E)));
    const vec y = (splat(1.0f) - less) / (splat(1.0f) + less);
    return select_vec(x < splat(0.0f), -y, select_vec(x == x, y, x));
}

/* warp_sum() of a card: lanes 16 apart are added first. */
INLINE float sum_tile(const vec *weights) {
    vec sums[TILE_VECS];
    for (int n = 0; n < TILE_VECS; n++) sums[n] = weights[n];
    for (int width = TILE_VECS / 2; width; width /= 2)
        for (int n = 0; n < width; n++) sums[n] += sums[n + width];
    return sum_lanes(sums[0]);
}

/* One KV head of a block. */
typedef struct {
    const char *k, *v, *k_scales, *v_scales;
} attended_head;

INLINE attended_head find_head(const attended *a, int64_t block, int64_t kv_head, const kv_form form) {
    const int64_t plane = a->head_dim * a->block_size * item_size(form);
    const int64_t at = (block * a->num_kv_heads + kv_head) * (plane + a->block_size * scale_size(form));
    const char *k = (const char *)a->k_cache + at, *v = (const char *)a->v_cache + at;
    return (attended_head){k, v, k + plane, v + plane};
}

/* Scores of LANES keys of a block, of which `offset` is the first, for `rows` rows. */
INLINE void score_attended(const attended *a, const attended_head *from, int64_t offset, const float *q, vec *scores,
                           int64_t apart, const kv_form form, const int rows) {
    const int64_t d = a->head_dim, size = item_size(form);
    const vec scales = form == FORM_INT8 ? load_bfloat((const uint16_t *)from->k_scales + offset) : splat(1.0f);
    vec sums[ATTENDED_ROWS];
    for (int r = 0; r < rows; r++) sums[r] = splat(0.0f);
    const char *at = from->k + offset * size;
    for (int64_t i = 0; i < d; i++, at += a->block_size * size) {
        vec keys = load_cached(at, 0, form);
        if (form == FORM_INT8) keys *= scales; /* exact */
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) sums[r] = fused_vec(splat(q[r * d + i]), keys, sums[r]);
    }
    for (int r = 0; r < rows; r++) scores[r * apart] = sums[r];
}

typedef struct {
    float largest, sum;
} attended_part;

/* weigh() of attention.cu: a tile's scores become weights. Returns the factor of the earlier values. */
INLINE float weigh_tile(const attended *a, vec *scores, int64_t first_key, int64_t first_seen, attended_part *part) {
    vec met = splat(-INFINITY);
    ivec is_seen[TILE_VECS];
    for (int n = 0; n < TILE_VECS; n++) {
        vec score = times_vec(scores[n], splat(a->scale));
        if (a->softcap > 0.0f) score = times_vec(splat(a->softcap), tanh_of(score / splat(a->softcap)));
        score = times_vec(score, splat(LOG2_E));
        is_seen[n] = LANE_INDEX >= (int32_t)(first_seen - first_key - n * LANES);
        scores[n] = select_vec(is_seen[n], score, splat(-INFINITY));
        met = max_vec(scores[n], met);
    }
    float largest = part->largest;
    for (int lane = 0; lane < LANES; lane++) largest = met[lane] > largest ? met[lane] : largest;
    for (int n = 0; n < TILE_VECS; n++) {
        const vec below = scores[n] - splat(largest), rest = select_vec(scores[n] < splat(0.0f), splat(0.0f), below);
        const vec weights = select_vec(below == below, power_of_2(below), rest);
        scores[n] = select_vec(is_seen[n], weights, splat(0.0f));
    }
    const float keep = power_of_2(splat(part->largest - largest))[0];
    part->sum = times_vec(splat(part->sum), splat(keep))[0] + sum_tile(scores);
    part->largest = largest;
    return keep;
}

/* values = values * keep, plus the weights times the keys' values, keys in order: `num` registers of dimensions. */
INLINE void mix_attended(const attended *a, const attended_head *const *from, const int64_t *offsets, int64_t dim,
                         const float *weights, const float *keep, float *values, const kv_form form, const int rows,
                         const int num) {
    vec sums[2 * ATTENDED_ROWS];
#pragma GCC unroll 8
    for (int n = 0; n < rows * num; n++)
        sums[n] = times_vec(load(values + n / num * ATTENDED_DIM + dim + n % num * LANES), splat(keep[n / num]));
    for (int64_t key = 0; key < TILE_KEYS; key++) {
        const attended_head *head = from[key / GROUP];
        const int64_t offset = offsets[key / GROUP] + key % GROUP, at = offset * a->head_dim + dim;
        vec v[2];
#pragma GCC unroll 2
        for (int n = 0; n < num; n++) {
            v[n] = load_cached(head->v, at + n * LANES, form);
            if (form == FORM_INT8)
                v[n] *= splat(bfloat_to_float(((const uint16_t *)head->v_scales)[offset])); /* exact */
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const vec weight = splat(weights[r * TILE_KEYS + key]);
#pragma GCC unroll 2
            for (int n = 0; n < num; n++) sums[r * num + n] = fused_vec(weight, v[n], sums[r * num + n]);
        }
    }
#pragma GCC unroll 8
    for (int n = 0; n < rows * num; n++)
        store(values + n / num * ATTENDED_DIM + dim + n % num * LANES, sums[n]);
}

/* The same of one dimension, behind the last whole register. */
static void mix_one(const attended *a, const attended_head *const *from, const int64_t *offsets, int64_t dim,
                    const float *weights, const float *keep, float *values, const kv_form form, int rows) {
    for (int r = 0; r < rows; r++) {
        float sum = values[r * ATTENDED_DIM + dim] * keep[r];
        for (int64_t key = 0; key < TILE_KEYS; key++) {
            const attended_head *head = from[key / GROUP];
            const int64_t offset = offsets[key / GROUP] + key % GROUP;
            float value = load_one(head->v, offset * a->head_dim + dim, form);
            if (form == FORM_INT8) value *= bfloat_to_float(((const uint16_t *)head->v_scales)[offset]);
            sum = fmaf(weights[r * TILE_KEYS + key], value, sum);
        }
        values[r * ATTENDED_DIM + dim] = sum;
    }
}

/* `rows` heads from `head` on, of one KV head, meet the split of an item. */
INLINE void attend_rows(const attending *c, int64_t item, int64_t kv_head, int64_t head, const kv_form form,
                        const int rows) {
    const attended *a = c->a;
    const int64_t d = a->head_dim, bs = a->block_size;
    const int32_t *facts = a->items + 4 * item, *blocks = a->blocks + item * (SPLIT_KEYS / bs);
    const int64_t position = facts[1], begin = (int64_t)facts[2] * SPLIT_KEYS;
    const int64_t first_seen = a->chunk ? position / a->chunk * a->chunk
                                        : a->window ? MAX(0, position - a->window + 1) : 0;
    const float *q = c->q + (facts[0] * a->num_heads + head) * d;
    float values[ATTENDED_ROWS * ATTENDED_DIM] = {0}, weights[ATTENDED_ROWS * TILE_KEYS], keep[ATTENDED_ROWS];
    attended_part parts[ATTENDED_ROWS];
    for (int r = 0; r < rows; r++) parts[r] = (attended_part){-INFINITY, 0.0f};
    for (int64_t first = 0; first < SPLIT_KEYS; first += TILE_KEYS) {
        if (begin + first + TILE_KEYS <= first_seen) continue;
        attended_head heads[TILE_KEYS / GROUP];
        const attended_head *from[TILE_KEYS / GROUP];
        int64_t offsets[TILE_KEYS / GROUP];
        for (int g = 0; g < TILE_KEYS / GROUP; g++) {
            const int64_t key = first + g * GROUP;
            heads[g] = find_head(a, blocks[key / bs], kv_head, form);
            from[g] = heads + g, offsets[g] = key % bs;
        }
        vec scores[ATTENDED_ROWS * TILE_VECS];
        for (int n = 0; n < TILE_VECS; n++) {
            const int g = n * LANES / GROUP;
            score_attended(a, from[g], offsets[g] + n * LANES % GROUP, q, scores + n, TILE_VECS, form, rows);
        }
        for (int r = 0; r < rows; r++) {
            keep[r] = weigh_tile(a, scores + r * TILE_VECS, begin + first, first_seen, parts + r);
            for (int n = 0; n < TILE_VECS; n++) store(weights + r * TILE_KEYS + n * LANES, scores[r * TILE_VECS + n]);
        }
        int64_t dim = 0;
        for (; dim + 2 * LANES <= d; dim += 2 * LANES)
            mix_attended(a, from, offsets, dim, weights, keep, values, form, rows, 2);
        for (; dim + LANES <= d; dim += LANES)
            mix_attended(a, from, offsets, dim, weights, keep, values, form, rows, 1);
        for (; dim < d; dim++) mix_one(a, from, offsets, dim, weights, keep, values, form, rows);
    }
    for (int r = 0; r < rows; r++) {
        float *to = c->y + (facts[3] * a->num_heads + head + r) * (d + 2);
        to[0] = parts[r].largest, to[1] = parts[r].sum;
        /* The card merges its split into an empty part, and so makes 0 of -0. */
        for (int64_t i = 0; i < d; i++) to[2 + i] = values[r * ATTENDED_DIM + i] + 0.0f;
    }
}

/* Each case is a function of its own. */
typedef void attend_fn(const attending *, int64_t, int64_t, int64_t);
#define ATTEND_FN(name, form, rows)                                                            \
    NOINLINE void name(const attending *c, int64_t item, int64_t kv_head, int64_t head) {      \
        attend_rows(c, item, kv_head, head, form, rows);                                       \
    }
#define ATTEND_FNS(rows)                             \
    ATTEND_FN(attend_##rows##_float, FORM_FLOAT, rows) \
    ATTEND_FN(attend_##rows##_half, FORM_HALF, rows)   \
    ATTEND_FN(attend_##rows##_int8, FORM_INT8, rows)
ATTEND_FNS(1)
ATTEND_FNS(2)
ATTEND_FNS(4)

INLINE int64_t row_tasks(const attended *a) {
    return (a->num_heads / a->num_kv_heads + ATTENDED_ROWS - 1) / ATTENDED_ROWS;
}

/* Some heads of one KV head, and one item. */
static void attended_task(void *context, int64_t task) {
    static attend_fn *const all[3][3] = {{attend_1_float, attend_2_float, attend_4_float},
                                         {attend_1_half, attend_2_half, attend_4_half},
                                         {attend_1_int8, attend_2_int8, attend_4_int8}};
    const attending *c = context;
    const attended *a = c->a;
    const int64_t group = a->num_heads / a->num_kv_heads, part = task % row_tasks(a);
    const int64_t kv_head = task / row_tasks(a) % a->num_kv_heads, item = task / row_tasks(a) / a->num_kv_heads;
    int64_t head = part * ATTENDED_ROWS;
    const int64_t end = MIN(head + ATTENDED_ROWS, group);
    while (head < end) {
        const int size = end - head >= 4 ? 2 : end - head >= 2 ? 1 : 0;
        all[a->form][size](c, item, kv_head, kv_head * group + head);
        head += 1 << size;
    }
}

/* head_dim is at most ATTENDED_DIM, and SPLIT_KEYS a multiple of block_size. */
EXPORT void penstock_attend(const attended *a, const float *q, float *y) {
    attending c = {a, q, y};
    parallel(a->num_items * a->num_kv_heads * row_tasks(a), attended_task, &c);
}
