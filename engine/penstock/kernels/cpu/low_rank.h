/* What adapters (LoRA, arXiv 2106.09685) add to a product: y += B (scale * (A x)), for some rows. Part of cpu.c. */
#pragma once

/* A lies in blocks of SHARE_RANKS ranks, B in blocks of SHARE_OUTPUTS outputs, so that no sum goes across a vector. A
 * sum over the inputs is made of sums of SHARE_INPUTS inputs, which several threads compute; they are added in their
 * order. A step's rows are taken LOW_RANK_ROWS at a time, so that scratch memory stays small. */
enum { SHARE_RANKS = 16, SHARE_OUTPUTS = 64, SHARE_INPUTS = 1024, LOW_RANK_ROWS = 64, MOST_RANKS = 256 };
/* Numbers of A and B are fetched so far ahead of their use. */
enum { SHARE_AHEAD = 2048 };
/* Rows that are computed side by side: each number of A and B serves several rows. */
enum { SHARE_ROWS = LANES == 16 ? 4 : 2, BLOCKS_OF_TASK = 8 };

/* An adapter's A in float16 [blocks, in_features, SHARE_RANKS], a scale for each rank, and the places in `rows` of the
 * rows that have the adapter. kernels/native_low_rank.py writes these numbers. */
typedef struct {
    int64_t a, scales, num_blocks, first, end;
} low_rank_share;

/* B of a share for `num_outputs` outputs from `first_output` on, made of `rank` (at most MOST_RANKS) ranks from
 * `first_rank` on: float16 [blocks, rank, SHARE_OUTPUTS]. */
typedef struct {
    int64_t share, b, first_rank, rank, first_output, num_outputs;
} low_rank_part;

typedef struct {
    const float *x;
    float *y, *inner; /* inner [num_chunks, LOW_RANK_ROWS, num_ranks]: scale * (A x) of SHARE_INPUTS inputs each */
    const int64_t *rows;
    const low_rank_share *shares;
    const low_rank_part *parts;
    int64_t x_stride, in_features, y_stride, num_parts, num_chunks, num_ranks;
    int64_t first_row, end_row; /* of `rows` */
} low_rank;

INLINE int64_t whole_blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }

/* `inner` of some rows, a block of ranks and a chunk of inputs. Even and odd inputs have sums of their own, so that an
 * addition need not wait for the one before. */
INLINE void share_tile(const low_rank *l, const low_rank_share *share, int64_t block, int64_t chunk, int64_t row,
                       const int num_rows) {
    enum { WIDTH = SHARE_RANKS / LANES };
    const int64_t first = chunk * SHARE_INPUTS, count = MIN(SHARE_INPUTS, l->in_features - first);
    const uint16_t *a = (const uint16_t *)(uintptr_t)share->a + (block * l->in_features + first) * SHARE_RANKS;
    const float *scales = (const float *)(uintptr_t)share->scales + block * SHARE_RANKS, *x[SHARE_ROWS];
    for (int t = 0; t < num_rows; t++) x[t] = l->x + l->rows[row + t] * l->x_stride + first;
    vec even[SHARE_ROWS][WIDTH] = {}, odd[SHARE_ROWS][WIDTH] = {};
    int64_t i = 0;
    for (; i + 1 < count; i += 2) {
        __builtin_prefetch(a + i * SHARE_RANKS + SHARE_AHEAD);
        for (int v = 0; v < WIDTH; v++) {
            const uint16_t *pair = a + i * SHARE_RANKS + v * LANES;
            const vec weight = load_half(pair), next = load_half(pair + SHARE_RANKS);
            for (int t = 0; t < num_rows; t++) {
                even[t][v] += splat(x[t][i]) * weight;
                odd[t][v] += splat(x[t][i + 1]) * next;
            }
        }
    }
    for (int v = 0; v < WIDTH; v++) {
        if (i < count) {
            const vec weight = load_half(a + i * SHARE_RANKS + v * LANES);
            for (int t = 0; t < num_rows; t++) even[t][v] += splat(x[t][i]) * weight;
        }
        for (int t = 0; t < num_rows; t++) {
            const int64_t place = chunk * LOW_RANK_ROWS + row + t - l->first_row;
            float *inner = l->inner + place * l->num_ranks + block * SHARE_RANKS;
            store(inner + v * LANES, (even[t][v] + odd[t][v]) * load(scales + v * LANES));
        }
    }
}

INLINE void share_rows(const low_rank *l, const low_rank_share *share, int64_t block, int64_t chunk) {
    const int64_t end = MIN(share->end, l->end_row);
    int64_t row = MAX(share->first, l->first_row);
    for (; end - row >= SHARE_ROWS; row += SHARE_ROWS) share_tile(l, share, block, chunk, row, SHARE_ROWS);
    for (; row < end; row++) share_tile(l, share, block, chunk, row, 1);
}

static void share_chunk(void *context, int64_t task) {
    const low_rank *l = context;
    const low_rank_share *share = l->shares;
    for (int64_t count; task >= (count = share->num_blocks * l->num_chunks); share++) task -= count;
    share_rows(l, share, task / l->num_chunks, task % l->num_chunks);
}

/* y += B inner of some rows and blocks of outputs, rank by rank. */
INLINE void part_tile(const low_rank *l, const low_rank_part *part, int64_t first_block, int64_t end_block, int64_t row,
                      const int num_rows) {
    enum { WIDTH = SHARE_OUTPUTS / LANES };
    float inner[SHARE_ROWS][MOST_RANKS];
    for (int t = 0; t < num_rows; t++) {
        const float *chunks = l->inner + (row + t - l->first_row) * l->num_ranks + part->first_rank;
        memcpy(inner[t], chunks, part->rank * sizeof(float));
        for (int64_t chunk = 1; chunk < l->num_chunks; chunk++)
            for (int64_t k = 0; k < part->rank; k++) inner[t][k] += chunks[chunk * LOW_RANK_ROWS * l->num_ranks + k];
    }
    for (int64_t block = first_block; block < end_block; block++) {
        const uint16_t *b = (const uint16_t *)(uintptr_t)part->b + block * part->rank * SHARE_OUTPUTS;
        vec sums[SHARE_ROWS][WIDTH] = {};
        for (int64_t k = 0; k < part->rank; k++) {
            __builtin_prefetch(b + k * SHARE_OUTPUTS + SHARE_AHEAD);
            __builtin_prefetch(b + k * SHARE_OUTPUTS + SHARE_AHEAD + 32);
            for (int o = 0; o < WIDTH; o++) {
                const vec weight = load_half(b + k * SHARE_OUTPUTS + o * LANES);
                for (int t = 0; t < num_rows; t++) sums[t][o] += splat(inner[t][k]) * weight;
            }
        }
        const int64_t count = MIN(SHARE_OUTPUTS, part->num_outputs - block * SHARE_OUTPUTS);
        for (int t = 0; t < num_rows; t++) {
            float *y = l->y + l->rows[row + t] * l->y_stride + part->first_output + block * SHARE_OUTPUTS;
            float added[SHARE_OUTPUTS];
            for (int o = 0; o < WIDTH; o++)
                if (count == SHARE_OUTPUTS) store(y + o * LANES, load(y + o * LANES) + sums[t][o]);
                else store(added + o * LANES, sums[t][o]);
            for (int64_t o = 0; count < SHARE_OUTPUTS && o < count; o++) y[o] += added[o];
        }
    }
}

INLINE void part_rows(const low_rank *l, const low_rank_part *part, int64_t first, int64_t last) {
    const low_rank_share *share = l->shares + part->share;
    const int64_t end = MIN(share->end, l->end_row);
    int64_t row = MAX(share->first, l->first_row);
    for (; end - row >= SHARE_ROWS; row += SHARE_ROWS) part_tile(l, part, first, last, row, SHARE_ROWS);
    for (; row < end; row++) part_tile(l, part, first, last, row, 1);
}

static void part_blocks(void *context, int64_t task) {
    const low_rank *l = context;
    const low_rank_part *part = l->parts;
    for (int64_t count; task >= (count = whole_blocks(part->num_outputs, BLOCKS_OF_TASK * SHARE_OUTPUTS)); part++)
        task -= count;
    const int64_t first = task * BLOCKS_OF_TASK, num_blocks = whole_blocks(part->num_outputs, SHARE_OUTPUTS);
    part_rows(l, part, first, MIN(num_blocks, first + BLOCKS_OF_TASK));
}

/* All of one adapter's share: a thread reads A and B in one go, and waits for no other. */
static void whole_share(void *context, int64_t task) {
    const low_rank *l = context;
    const low_rank_share *share = l->shares + task;
    for (int64_t block = 0; block < share->num_blocks; block++)
        for (int64_t chunk = 0; chunk < l->num_chunks; chunk++) share_rows(l, share, block, chunk);
    for (const low_rank_part *part = l->parts; part < l->parts + l->num_parts; part++)
        if (part->share == task) part_rows(l, part, 0, whole_blocks(part->num_outputs, SHARE_OUTPUTS));
}

/* Adds the shares of adapters to y [., y_stride]. `rows` are the numbers of rows of x and y. `inner` has room for
 * whole_blocks(in_features, SHARE_INPUTS) * LOW_RANK_ROWS rows of num_ranks numbers, which are the most ranks of a
 * share in whole blocks. */
EXPORT void penstock_add_low_rank(const float *x, int64_t x_stride, int64_t in_features, const int64_t *rows,
                                  int64_t num_rows, const int64_t *shares, int64_t num_shares, const int64_t *parts,
                                  int64_t num_parts, float *y, int64_t y_stride, float *inner, int64_t num_ranks) {
    low_rank l = {x, y, inner, rows, (const low_rank_share *)shares, (const low_rank_part *)parts, x_stride,
                  in_features, y_stride, num_parts, whole_blocks(in_features, SHARE_INPUTS), num_ranks, 0, 0};
    int64_t num_inner = 0, num_outer = 0;
    for (int64_t i = 0; i < num_shares; i++) num_inner += l.shares[i].num_blocks * l.num_chunks;
    for (int64_t i = 0; i < num_parts; i++)
        num_outer += whole_blocks(l.parts[i].num_outputs, BLOCKS_OF_TASK * SHARE_OUTPUTS);
    for (; l.first_row < num_rows; l.first_row = l.end_row) {
        l.end_row = MIN(num_rows, l.first_row + LOW_RANK_ROWS);
        if (num_shares >= 2 * (atomic_load(&pool.num_wanted) + 1)) parallel(num_shares, whole_share, &l);
        else {
            parallel(num_inner, share_chunk, &l);
            parallel(num_outer, part_blocks, &l);
        }
    }
}
