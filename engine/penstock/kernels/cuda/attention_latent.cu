/* Attention where all heads share one row of the cache per token (MLA): the row [head_dim] is the key, and the row's
 * first value_dim numbers are the value. attention.cu has everything else, and says how the keys are cut.
 *
 * A row has more dimensions than shared memory has room for, times TILE_KEYS. So a block goes over the dimensions of
 * its keys SLAB at a time, first for the scores, then for the values. */
enum { SLAB = 64, SLAB_STRIDE = TILE_KEYS + 1, MAX_ROW = 640, LATENT_SLICES = 16 };

/* The dimensions from `dim` on of TILE_KEYS keys -> slab [SLAB, SLAB_STRIDE], with zeros beyond head_dim and num_keys.
 * The stride lets a warp read a row and a column of the slab without bank conflicts. */
__device__ inline void load_slab(const attention &a, const int *table, int first, int num_keys, int dim,
                                 float *slab) {
    const int lane = threadIdx.x % TILE_KEYS, key = first + lane;
    const bool is_there = key < num_keys;
    const int block = is_there ? table[key / a.block_size] : 0;
    const int64 at = (int64)block * a.head_dim * a.block_size + key % a.block_size;
    for (int i = threadIdx.x / TILE_KEYS; i < SLAB; i += blockDim.x / TILE_KEYS) {
        const bool is_stored = is_there && dim + i < a.head_dim;
        slab[i * SLAB_STRIDE + lane] =
            is_stored ? load_1<IS_FLOATS>(a.k_cache, a.form, at + (int64)(dim + i) * a.block_size) : 0.0f;
    }
}

/* A warp has one of the block's WARPS rows. Grid: at least the number of tiles of rows; 1; num_splits, if there are
 * partials. */
template <int WARPS> __device__ inline void attend_latents(const attention &a) {
    __shared__ float queries[WARPS][MAX_ROW], slab[SLAB * SLAB_STRIDE], weights[WARPS][TILE_KEYS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const block_rows b = find_rows(a, blockIdx.x, WARPS);
    if (b.num_rows == 0) return;
    const int *table = a.block_tables + (int64)b.seq * a.max_blocks;
    const int first_key = first_visible(token_of(b, 0) + b.shift, a.window, a.chunk) / TILE_KEYS * TILE_KEYS;
    int split = first_key / SPLIT_KEYS, end_split = (b.num_keys - 1) / SPLIT_KEYS + 1;
    if (a.partials) {
        if ((int)blockIdx.z < split || (int)blockIdx.z >= end_split) return;
        split = blockIdx.z, end_split = split + 1;
    }

    const bool has_row = warp < b.num_rows;
    for (int i = lane; i < MAX_ROW; i += 32)
        queries[warp][i] = has_row && i < a.head_dim
                               ? a.q[token_of(b, warp) * a.q_stride + head_of(b, warp) * a.head_dim + i]
                               : 0.0f;
    const int position = token_of(b, warp) + b.shift;
    const int visible = has_row ? num_visible(a.prefix_lens, b.seq, position) : 0;
    const int first_seen = first_visible(position, a.window, a.chunk);

    results<LATENT_SLICES, 1> total;
    for (; split < end_split; split++) {
        results<LATENT_SLICES, 1> mine;
        const int end = min((split + 1) * SPLIT_KEYS, b.num_keys);
        for (int first = max(split * SPLIT_KEYS, first_key); first < end; first += TILE_KEYS) {
            float score = 0.0f; /* one chain of multiply-adds over the dimensions, in order */
            for (int dim = 0; dim < a.head_dim; dim += SLAB) {
                __syncthreads();
                load_slab(a, table, first, b.num_keys, dim, slab);
                __syncthreads();
                for (int i = 0; i < SLAB; i++)
                    score = fmaf(queries[warp][dim + i], slab[i * SLAB_STRIDE + lane], score);
            }
            if (has_row) {
                float keep;
                weights[warp][lane] =
                    weigh(a, score, head_of(b, warp), first + lane, position, first_seen, visible,
                          mine.parts[0], keep);
                for (int s = 0; s < LATENT_SLICES; s++) mine.values[0][s] *= keep;
            }
            for (int s = 0; s < LATENT_SLICES; s += SLAB / 32) {
                if (32 * s >= a.value_dim) break;
                __syncthreads();
                load_slab(a, table, first, b.num_keys, 32 * s, slab);
                __syncthreads();
                if (!has_row) continue;
                for (int part = 0; part < SLAB / 32; part++)
                    for (int j = 0; j < TILE_KEYS; j++)
                        mine.values[0][s + part] = fmaf(weights[warp][j], slab[(32 * part + lane) * SLAB_STRIDE + j],
                                                        mine.values[0][s + part]);
            }
        }
        const merge_factors factors = merge(total.parts[0], mine.parts[0]);
        for (int s = 0; s < LATENT_SLICES; s++)
            total.values[0][s] = total.values[0][s] * factors.mine + mine.values[0][s] * factors.other;
    }
    write_results(a, b, total);
}

KERNEL __launch_bounds__(256) attention_latent(
    const float *q, int64 q_stride, const void *k_cache, int form, int num_heads, int head_dim, int block_size,
    const int *block_tables, int max_blocks, const int *query_start, const int *context_lens,
    const int *prefix_lens, int num_seqs, float scale, float softcap, int window, int chunk, const float *sinks,
    float *y, float *partials, int num_splits, int value_dim) {
    const attention a = {q,           q_stride,    k_cache,      nullptr,     form,     num_heads,  1,
                         head_dim,    block_size,  block_tables, max_blocks,  query_start, context_lens,
                         prefix_lens, num_seqs,    scale,        softcap,     window,   chunk,      nullptr,
                         nullptr,     0,           0,            nullptr,     sinks,    y,          partials,
                         num_splits,  value_dim};
    attend_latents<8>(a);
}
