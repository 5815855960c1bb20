/* Attention of new tokens over all cached tokens of their sequences, causal but for a prefix, in float32.
 * kernels/reference.py has the definition. The softmax over parts of the keys follows arXiv 1805.02867 and 2205.14135.
 *
 * K is [num_blocks, num_kv_heads, head_dim, block_size], V [num_blocks, num_kv_heads, block_size, head_dim],
 * float16, float32 or int8; block_size is a multiple of 16. With int8, a head's integers in a block are followed by a
 * bfloat16 scale for each of the block's tokens; integer times scale is exact in float32. A row is one head's query of
 * one token.
 *
 * The keys of a sequence are cut by position. TILE_KEYS keys are computed at a time. SPLIT_KEYS keys add up to one
 * partial result: the largest score, the sum of the exponentials relative to the largest score, and the weighted
 * values. Partial results are merged in order. A tile that a row may not see changes no bit of the row's result. So
 * this result does not depend on the other rows of the block, nor on whether one block computes all splits or each
 * split has a block of its own and merge_splits follows. */
enum { TILE_KEYS = 32, SPLIT_KEYS = 256 };

typedef struct {
    const float *q; /* [num_tokens, num_heads, head_dim], tokens apart by q_stride */
    int64 q_stride;
    const void *k_cache, *v_cache;
    int form, num_heads, num_kv_heads, head_dim, block_size;
    const int *block_tables; /* [num_seqs, max_blocks] */
    int max_blocks;
    const int *query_start, *context_lens; /* as in BatchLayout */
    const int *prefix_lens;                /* as in BatchLayout, or null */
    int num_seqs;
    float scale, softcap;      /* 0: none */
    int window, chunk;         /* 0: none */
    const float *alibi_slopes; /* [num_heads], or null */
    /* DistanceBias in operands.py says what these are. */
    const float *distance_bias; /* [num_heads, 2 * max_distance + 1], or null */
    int max_distance, boundary;
    const float *across_bias; /* [2, num_heads], or null */
    const float *sinks;       /* [num_heads], or null: AttentionSpec in operands.py says what these are */
    float *y;                  /* [num_tokens, num_heads, value_dim] */
    /* Partial results [num_tokens, num_heads, num_splits, value_dim + 2], each largest, sum, values; or null. */
    float *partials;
    int num_splits;
    int value_dim; /* head_dim, or less with a latent (attention_latent.cu) */
} attention;

/* The softmax of a part of the keys. Merged parts give the softmax of all their keys. */
typedef struct {
    float largest, sum; /* the largest in powers of 2 */
} softmax_part;

#define LOG2_E 1.44269504f

/* 2^x for x <= 0, at least 2^-126: 2^n times a polynomial on [-1/2, 1/2] (relative error below 8e-8). The processor's
 * attended.h computes the same bits, which expf would not let it. */
__device__ inline float power_of_2(float x) {
    x = fmaxf(x, -126.0f); /* also NaN */
    const float shifted = x + 12582912.0f; /* 1.5 * 2^23: rounds, and leaves the integer in the low bits */
    const float r = x - (shifted - 12582912.0f);
    float p = 1.53533707e-4f;
    p = fmaf(p, r, 1.33988739e-3f);
    p = fmaf(p, r, 9.61843692e-3f);
    p = fmaf(p, r, 5.55033237e-2f);
    p = fmaf(p, r, 2.40226477e-1f);
    p = fmaf(p, r, 6.93147182e-1f);
    p = fmaf(p, r, 1.0f);
    return __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
}

/* tanh x = (1 - e^-2|x|) / (1 + e^-2|x|), with the sign of x: an absolute error below 2e-7. NaN stays NaN. */
__device__ inline float tanh_of(float x) {
    const float less = power_of_2(fabsf(x) * (-2.0f * LOG2_E)), y = (1.0f - less) / (1.0f + less);
    return x < 0.0f ? -y : x == x ? y : x;
}

/* The factors by which merge() multiplies the values of both parts, of which one is 1. Merging with an empty part,
 * whose sum is 0, changes nothing. */
typedef struct {
    float mine, other;
} merge_factors;

__device__ inline merge_factors merge(softmax_part &mine, softmax_part other) {
    merge_factors factors = {1.0f, 0.0f};
    if (other.sum == 0.0f) return factors;
    const float less = power_of_2(-fabsf(mine.largest - other.largest));
    const bool is_mine = mine.largest >= other.largest;
    factors.mine = is_mine ? 1.0f : less, factors.other = is_mine ? less : 1.0f;
    mine.sum = mine.sum * factors.mine + other.sum * factors.other;
    mine.largest = fmaxf(mine.largest, other.largest);
    return factors;
}

__device__ inline int first_visible(int position, int window, int chunk) {
    if (chunk) return position / chunk * chunk;
    return window ? max(0, position - window + 1) : 0;
}

/* A head's sink is merged as a last part: one key of the weight 1 and with a value of 0. Returns the factor of the
 * values. */
__device__ inline float add_sink(softmax_part &total, const float *sinks, int head) {
    if (!sinks) return 1.0f;
    const softmax_part sink = {sinks[head] * LOG2_E, 1.0f};
    return merge(total, sink).mine;
}

/* Keys that a token sees, counted from the sequence's beginning. */
__device__ inline int num_visible(const int *prefix_lens, int seq, int position) {
    return prefix_lens ? max(position + 1, prefix_lens[seq]) : position + 1;
}

/* The bias between a head's query at `position` and a key. */
__device__ inline float distance_bias(const attention &a, int head, int position, int key) {
    if (a.across_bias && (key < a.boundary) != (position < a.boundary))
        return a.across_bias[position < a.boundary ? head : a.num_heads + head];
    const int distance = max(-a.max_distance, min(a.max_distance, key - position));
    return a.distance_bias[head * (2 * a.max_distance + 1) + a.max_distance + distance];
}

/* Whether kernels are compiled for int8, or for the floats, float16 and float32. So int8 takes no register from the
 * kernels for floats. */
enum { IS_FLOATS, IS_INT8 };

/* Four neighbouring elements of a cache; `at` is a multiple of 4. */
template <int KIND> __device__ inline float4 load_4(const void *cache, int form, int64 at) {
    if (KIND == IS_INT8) {
        const int codes = *(const int *)((const int8 *)cache + at);
        return make_float4((int8)codes, (int8)(codes >> 8), (int8)(codes >> 16), (int8)(codes >> 24));
    }
    if (form == FORM_FLOAT) return *(const float4 *)((const float *)cache + at);
    const uint2 bits = *(const uint2 *)((const half_bits *)cache + at);
    return make_float4(half_to_float(bits.x & 0xffff), half_to_float(bits.x >> 16),
                       half_to_float(bits.y & 0xffff), half_to_float(bits.y >> 16));
}
template <int KIND> __device__ inline float load_1(const void *cache, int form, int64 at) {
    if (KIND == IS_INT8) return ((const int8 *)cache)[at];
    return form == FORM_HALF ? half_to_float(((const half_bits *)cache)[at]) : ((const float *)cache)[at];
}

/* The element of an int8 cache with which a head of a block begins. */
__device__ inline int64 int8_start(const attention &a, int block_head) {
    return (int64)block_head * (a.head_dim + SCALE_BYTES) * a.block_size;
}

/* The scales of four tokens of a head, of which `offset` is the first in the block. */
__device__ inline float4 load_scales(const attention &a, const void *cache, int block_head, int offset) {
    const int64 at = int8_start(a, block_head) + (int64)a.head_dim * a.block_size + SCALE_BYTES * offset;
    const uint2 bits = *(const uint2 *)((const int8 *)cache + at);
    return make_float4(bfloat_to_float(bits.x & 0xffff), bfloat_to_float(bits.x >> 16),
                       bfloat_to_float(bits.y & 0xffff), bfloat_to_float(bits.y >> 16));
}

__device__ inline float4 times(float4 x, float4 y) {
    return make_float4(x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w);
}

/* Where the values of TILE_KEYS keys lie: the index of each key's row of values; the cache's memory ends long before
 * such an index leaves int32. */
template <int KIND> struct value_places {
    int rows[TILE_KEYS];
};

/* With int8, of each 16 keys, which share a block: the head, counted through all blocks, and the first key's place in
 * the block; and the scales of the values. */
template <> struct value_places<IS_INT8> {
    __align__(16) float scales[TILE_KEYS];
    int heads[TILE_KEYS / 16], offsets[TILE_KEYS / 16];
};

/* Four keys from `first` on, of which `offset` is the first one's place in the block. */
__device__ inline void set_places(value_places<IS_FLOATS> &places, const attention &a, int first, int block_head,
                                  int offset) {
    for (int j = 0; j < 4; j++) places.rows[first + j] = block_head * a.block_size + offset + j;
}
__device__ inline void set_places(value_places<IS_INT8> &places, const attention &a, int first, int block_head,
                                  int offset) {
    *(float4 *)(places.scales + first) = load_scales(a, a.v_cache, block_head, offset);
    if (first % 16 == 0) places.heads[first / 16] = block_head, places.offsets[first / 16] = offset;
}

/* The element of the cache with which a key's value begins. */
__device__ inline int64 value_start(const value_places<IS_FLOATS> &places, const attention &a, int key) {
    return (int64)places.rows[key] * a.head_dim;
}
__device__ inline int64 value_start(const value_places<IS_INT8> &places, const attention &a, int key) {
    const int offset = places.offsets[key / 16] + key % 16;
    return int8_start(a, places.heads[key / 16]) + (int64)offset * a.head_dim;
}

__device__ inline float4 scaled_value(const value_places<IS_FLOATS> &places, float4 value, int key) { return value; }
__device__ inline float4 scaled_value(const value_places<IS_INT8> &places, float4 value, int key) {
    const float scale = places.scales[key];
    return times(value, make_float4(scale, scale, scale, scale));
}

/* TILE_KEYS keys from `first` on -> tile [head_dim up to a multiple of 4, TILE_KEYS], with zeros beyond head_dim.
 * Keys beyond num_keys are zeros, or whatever a block that is not yet full holds: no row sees them. A thread loads the
 * same 4 keys of some dimensions, so that it divides by the block size once. `places` gets where each key's value
 * lies. */
template <int KIND>
__device__ inline void load_keys(const attention &a, const int *table, int head, int first, int num_keys,
                                 float *tile, value_places<KIND> &places) {
    const int quad = 4 * (threadIdx.x % (TILE_KEYS / 4)), key = first + quad;
    const bool is_there = key < num_keys;
    const int index = key / a.block_size, offset = key - index * a.block_size;
    const int block_head = (is_there ? table[index] * a.num_kv_heads : 0) + head;
    const int64 at =
        (KIND == IS_INT8 ? int8_start(a, block_head) : (int64)block_head * a.head_dim * a.block_size) + offset;
    if (threadIdx.x < TILE_KEYS / 4) set_places(places, a, quad, block_head, offset);
    float4 scales;
    if (KIND == IS_INT8) scales = load_scales(a, a.k_cache, block_head, offset);
    const int height = (a.head_dim + 3) / 4 * 4, end = is_there ? a.head_dim : 0;
    for (int i = threadIdx.x / (TILE_KEYS / 4); i < height; i += blockDim.x / (TILE_KEYS / 4)) {
        float4 keys = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i < end) keys = load_4<KIND>(a.k_cache, a.form, at + i * a.block_size);
        if (KIND == IS_INT8) keys = times(keys, scales);
        *(float4 *)(tile + i * TILE_KEYS + quad) = keys;
    }
}

/* The values of the same keys -> tile [TILE_KEYS, WIDTH], with zeros beyond num_keys. */
template <int WIDTH, int KIND>
__device__ inline void load_values(const attention &a, const value_places<KIND> &places, int first, int num_keys,
                                   float *tile) {
    enum { UNITS = WIDTH / 4 };
    const int i = 4 * (threadIdx.x % UNITS);
    if (i >= a.head_dim) return;
    for (int j = threadIdx.x / UNITS; j < TILE_KEYS; j += blockDim.x / UNITS) {
        float4 values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first + j < num_keys) {
            const int64 at = value_start(places, a, j) + i;
            if (a.head_dim % 4 == 0) {
                values = load_4<KIND>(a.v_cache, a.form, at);
            } else {
                values.x = load_1<KIND>(a.v_cache, a.form, at);
                if (i + 1 < a.head_dim) values.y = load_1<KIND>(a.v_cache, a.form, at + 1);
                if (i + 2 < a.head_dim) values.z = load_1<KIND>(a.v_cache, a.form, at + 2);
                if (i + 3 < a.head_dim) values.w = load_1<KIND>(a.v_cache, a.form, at + 3);
            }
            values = scaled_value(places, values, j);
        }
        *(float4 *)(tile + j * WIDTH + i) = values;
    }
}

/* A block's rows: some rows of one sequence, in the order of tokens, then heads. All share a KV head. */
typedef struct {
    int seq, first_row, num_rows;
    int group;       /* heads per KV head */
    int first_token; /* the sequence's first token in the batch */
    int shift;       /* the position of the batch's token t is t + shift */
    int num_keys;    /* keys from the sequence's beginning to the last that the last row sees */
} block_rows;

/* The index-th tile of `height` rows, counted through all sequences; without rows if there is no such tile. */
__device__ inline block_rows find_rows(const attention &a, int index, int height) {
    block_rows found = {0, 0, 0, a.num_heads / a.num_kv_heads, 0, 0, 0};
    for (; found.seq < a.num_seqs; found.seq++) {
        const int first = a.query_start[found.seq], end = a.query_start[found.seq + 1];
        const int rows = (end - first) * found.group, num_tiles = (rows + height - 1) / height;
        if (index < num_tiles) {
            found.first_row = index * height, found.num_rows = min(height, rows - found.first_row);
            found.first_token = first, found.shift = a.context_lens[found.seq] - end;
            const int last = first + (found.first_row + found.num_rows - 1) / found.group + found.shift;
            found.num_keys = num_visible(a.prefix_lens, found.seq, last);
            break;
        }
        index -= num_tiles;
    }
    return found;
}

__device__ inline int token_of(const block_rows &b, int row) {
    return b.first_token + (b.first_row + row) / b.group;
}
__device__ inline int head_of(const block_rows &b, int row) {
    return blockIdx.y * b.group + (b.first_row + row) % b.group;
}

/* Scores of a lane's key and ROWS queries. Each score is one chain of multiply-adds over the dimensions, in order. */
template <int WIDTH, int ROWS>
__device__ inline void score_keys(const float *tile, const float (*queries)[WIDTH], int head_dim,
                                  float *scores) {
    for (int r = 0; r < ROWS; r++) scores[r] = 0.0f;
    for (int i = 0; i < head_dim; i += 4) {
        const float *keys = tile + i * TILE_KEYS + threadIdx.x % 32;
        const float k0 = keys[0], k1 = keys[TILE_KEYS], k2 = keys[2 * TILE_KEYS], k3 = keys[3 * TILE_KEYS];
        for (int r = 0; r < ROWS; r++) {
            const float4 query = *(const float4 *)&queries[r][i];
            scores[r] = fmaf(query.x, k0, scores[r]);
            scores[r] = fmaf(query.y, k1, scores[r]);
            scores[r] = fmaf(query.z, k2, scores[r]);
            scores[r] = fmaf(query.w, k3, scores[r]);
        }
    }
}

/* A row's score for this lane's key -> the key's weight. The warp's keys are merged into `part`, and the row's
 * earlier values must be multiplied by `keep`. A score of NaN or plus infinity makes the row NaN, as it does in a softmax
 * that does not clamp: a row without this key would look like an answer. */
__device__ inline float weigh(const attention &a, float score, int head, int key, int position,
                              int first, int visible, softmax_part &part, float &keep) {
    score *= a.scale;
    if (a.softcap > 0.0f) score = a.softcap * tanh_of(score / a.softcap);
    if (a.alibi_slopes) score += a.alibi_slopes[head] * (float)(key - position);
    const bool is_seen = key < visible && key >= first;
    if (a.distance_bias && is_seen) score += distance_bias(a, head, position, key);
    score = is_seen ? score * LOG2_E : -infinity();
    const float largest = fmaxf(part.largest, warp_max(score));
    /* Between two scores of minus infinity, `below` is NaN: a bias hides this key and all before it. */
    const float below = score - largest, rest = score < 0.0f ? 0.0f : below;
    const float weight = is_seen ? below == below ? power_of_2(below) : rest : 0.0f;
    keep = power_of_2(part.largest - largest);
    part.sum = part.sum * keep + warp_sum(weight);
    part.largest = largest;
    return weight;
}

/* Add the weights times the tile's values to `values`, keys in order. */
template <int SLICES, int ROWS>
__device__ inline void mix_values(const float *tile, const float (*weights)[TILE_KEYS],
                                  float (*values)[SLICES]) {
    enum { WIDTH = 32 * SLICES };
    for (int j = 0; j < TILE_KEYS; j += 4) {
        float4 w[ROWS];
        for (int r = 0; r < ROWS; r++) w[r] = *(const float4 *)&weights[r][j];
        for (int s = 0; s < SLICES; s++) {
            const float *column = tile + j * WIDTH + 32 * s + threadIdx.x % 32;
            const float v0 = column[0], v1 = column[WIDTH], v2 = column[2 * WIDTH], v3 = column[3 * WIDTH];
            for (int r = 0; r < ROWS; r++) {
                values[r][s] = fmaf(w[r].x, v0, values[r][s]);
                values[r][s] = fmaf(w[r].y, v1, values[r][s]);
                values[r][s] = fmaf(w[r].z, v2, values[r][s]);
                values[r][s] = fmaf(w[r].w, v3, values[r][s]);
            }
        }
    }
}

/* A softmax over some keys, with the weighted values. A lane has every 32nd dimension. */
template <int SLICES, int ROWS> struct results {
    softmax_part parts[ROWS];
    float values[ROWS][SLICES];

    __device__ inline results() {
        for (int r = 0; r < ROWS; r++) {
            parts[r].largest = -infinity(), parts[r].sum = 0.0f;
            for (int s = 0; s < SLICES; s++) values[r][s] = 0.0f;
        }
    }
};

/* The results of a warp's rows, or the partial results of the block's split. */
template <int SLICES, int ROWS>
__device__ inline void write_results(const attention &a, const block_rows &b, results<SLICES, ROWS> &total) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int r = 0; r < ROWS; r++) {
        const int row = warp * ROWS + r;
        if (row >= b.num_rows) break;
        const int64 to = (int64)token_of(b, row) * a.num_heads + head_of(b, row);
        const int64 partial = (to * a.num_splits + blockIdx.z) * (a.value_dim + 2);
        if (a.partials && lane == 0)
            a.partials[partial] = total.parts[r].largest, a.partials[partial + 1] = total.parts[r].sum;
        const float factor = a.partials ? 1.0f : add_sink(total.parts[r], a.sinks, to % a.num_heads);
        for (int s = 0; s < SLICES; s++) {
            const int i = 32 * s + lane;
            if (i >= a.value_dim) continue;
            if (a.partials)
                a.partials[partial + 2 + i] = total.values[r][s];
            else
                a.y[to * a.value_dim + i] = total.values[r][s] * factor / total.parts[r].sum;
        }
    }
}

/* A warp has ROWS of the block's WARPS * ROWS rows. For scores a lane has one key, for values SLICES dimensions.
 * Grid: at least the number of tiles of rows; KV heads; num_splits, if there are partials. */
template <int SLICES, int WARPS, int ROWS, int KIND> __device__ inline void attend(const attention &a) {
    enum { WIDTH = 32 * SLICES, HEIGHT = WARPS * ROWS };
    __shared__ __align__(16) float queries[HEIGHT][WIDTH], tile[TILE_KEYS * WIDTH],
        weights[HEIGHT][TILE_KEYS];
    __shared__ value_places<KIND> places;
    __shared__ int heads[HEIGHT], positions[HEIGHT];
    __shared__ block_rows b;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv_head = blockIdx.y;
    if (threadIdx.x == 0) b = find_rows(a, blockIdx.x, HEIGHT);
    __syncthreads();
    if (b.num_rows == 0) return;
    const int num_keys = b.num_keys, *table = a.block_tables + (int64)b.seq * a.max_blocks;
    const int first_key = first_visible(token_of(b, 0) + b.shift, a.window, a.chunk) / TILE_KEYS * TILE_KEYS;
    int split = first_key / SPLIT_KEYS, end_split = (b.num_keys - 1) / SPLIT_KEYS + 1;
    if (a.partials) {
        if ((int)blockIdx.z < split || (int)blockIdx.z >= end_split) return;
        split = blockIdx.z, end_split = split + 1;
        if (table[split * SPLIT_KEYS / a.block_size] < 0) return; /* the processor attends to the split */
    }

    for (int r = warp; r < HEIGHT; r += WARPS)
        for (int i = lane; i < WIDTH; i += 32)
            queries[r][i] = r < b.num_rows && i < a.head_dim
                                ? a.q[token_of(b, r) * a.q_stride + head_of(b, r) * a.head_dim + i]
                                : 0.0f;
    for (int r = 0; r < ROWS; r++) {
        /* The same by all threads of the warp. Shared memory spares registers here, and for block_rows. */
        const int row = warp * ROWS + r;
        heads[row] = head_of(b, row), positions[row] = token_of(b, row) + b.shift;
    }
    const int prefix = a.prefix_lens ? a.prefix_lens[b.seq] : 0;
    const bool has_rows = warp * ROWS < b.num_rows;

    results<SLICES, ROWS> total;
    for (; split < end_split; split++) {
        results<SLICES, ROWS> mine;
        const int end = min((split + 1) * SPLIT_KEYS, num_keys);
        for (int first = max(split * SPLIT_KEYS, first_key); first < end; first += TILE_KEYS) {
            __syncthreads();
            load_keys(a, table, kv_head, first, num_keys, tile, places);
            __syncthreads();
            if (has_rows) {
                float scores[ROWS], keep;
                score_keys<WIDTH, ROWS>(tile, queries + warp * ROWS, a.head_dim, scores);
                for (int r = 0; r < ROWS; r++) {
                    const int row = warp * ROWS + r, position = positions[row];
                    weights[row][lane] = weigh(a, scores[r], heads[row], first + lane, position,
                                               first_visible(position, a.window, a.chunk),
                                               max(position + 1, prefix), mine.parts[r], keep);
                    for (int s = 0; s < SLICES; s++) mine.values[r][s] *= keep;
                }
            }
            __syncthreads();
            load_values<WIDTH, KIND>(a, places, first, num_keys, tile);
            __syncthreads();
            if (has_rows) mix_values<SLICES, ROWS>(tile, weights + warp * ROWS, mine.values);
        }
        for (int r = 0; r < ROWS; r++) {
            const merge_factors factors = merge(total.parts[r], mine.parts[r]);
            for (int s = 0; s < SLICES; s++)
                total.values[r][s] = total.values[r][s] * factors.mine + mine.values[r][s] * factors.other;
        }
    }

    write_results(a, b, total);
}

#define ATTENTION_KERNEL(name, slices, warps, rows, kind)                                                  \
    KERNEL __launch_bounds__(32 * warps) name(                                                             \
        const float *q, int64 q_stride, const void *k_cache, const void *v_cache, int form,                \
        int num_heads, int num_kv_heads, int head_dim, int block_size, const int *block_tables,            \
        int max_blocks, const int *query_start, const int *context_lens, const int *prefix_lens,           \
        int num_seqs, float scale, float softcap, int window, int chunk, const float *alibi_slopes,        \
        const float *distance_bias, int max_distance, int boundary, const float *across_bias,              \
        const float *sinks, float *y, float *partials, int num_splits) {                                   \
        const attention a = {q,           q_stride,      k_cache,      v_cache,      form,                 \
                             num_heads,   num_kv_heads,  head_dim,     block_size,   block_tables,         \
                             max_blocks,  query_start,   context_lens, prefix_lens,  num_seqs,             \
                             scale,       softcap,       window,       chunk,        alibi_slopes,         \
                             distance_bias, max_distance, boundary,    across_bias,  sinks,                \
                             y,           partials,      num_splits,   head_dim};                          \
        attend<slices, warps, rows, kind>(a);                                                              \
    }

/* attention_WIDTH_HEIGHT: WIDTH is the most dimensions per head, HEIGHT the rows of a block. */
#define ATTENTION_KERNELS(name, slices, warps, rows)         \
    ATTENTION_KERNEL(name, slices, warps, rows, IS_FLOATS)   \
    ATTENTION_KERNEL(name##_int8, slices, warps, rows, IS_INT8)
ATTENTION_KERNELS(attention_64_8, 2, 8, 1)
ATTENTION_KERNELS(attention_64_32, 2, 8, 4)
ATTENTION_KERNELS(attention_128_8, 4, 8, 1)
ATTENTION_KERNELS(attention_128_32, 4, 8, 4)
ATTENTION_KERNELS(attention_256_4, 8, 4, 1)
ATTENTION_KERNELS(attention_256_8, 8, 4, 2)

/* Merges the partial results of all splits in order into y, exactly as one block that computes all splits does.
 * Grid: tokens, heads. */
KERNEL merge_splits(const float *partials, int num_splits, int num_heads, int value_dim,
                    const int *query_start, const int *context_lens, const int *prefix_lens, int num_seqs,
                    int window, int chunk, const float *sinks, float *y) {
    const int token = blockIdx.x;
    int seq = 0;
    while (seq < num_seqs - 1 && query_start[seq + 1] <= token) seq++;
    const int position = token + context_lens[seq] - query_start[seq + 1];
    const int64 to = (int64)token * num_heads + blockIdx.y;
    for (int i = threadIdx.x; i < value_dim; i += blockDim.x) {
        softmax_part total = {-infinity(), 0.0f};
        float value = 0.0f;
        const int end = (num_visible(prefix_lens, seq, position) - 1) / SPLIT_KEYS;
        for (int split = first_visible(position, window, chunk) / SPLIT_KEYS; split <= end; split++) {
            const float *partial = partials + (to * num_splits + split) * (value_dim + 2);
            const softmax_part part = {partial[0], partial[1]};
            const merge_factors factors = merge(total, part);
            value = value * factors.mine + partial[2 + i] * factors.other;
        }
        const float factor = add_sink(total, sinks, blockIdx.y);
        y[to * value_dim + i] = value * factor / total.sum;
    }
}
