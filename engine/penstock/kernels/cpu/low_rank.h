/* What adapters (LoRA, arXiv 2106.09685) add to a product: y += B (scale * (A x)), for some rows. Part of cpu.c. */
#pragma once

/* Rows and ranks that are computed side by side. A step's rows are taken LOW_RANK_ROWS at a time, so that scratch
 * memory stays small. B lies in blocks of LOW_RANK_OUTPUTS outputs, one rank after the other. */
enum { SHARE_ROWS = LANES == 16 ? 4 : 2, SHARE_RANKS = 4, RANKS_OF_TASK = 8, LOW_RANK_ROWS = 256, LOW_RANK_OUTPUTS = 64 };
enum { BLOCKS_OF_TASK = 4 };

/* An adapter's A [rank, in_features] in float16, a scale for each rank, and the rows that have the adapter: these of
 * `rows`. The part of kernels/low_rank.py that writes it is NativeLowRank. */
typedef struct {
    int64_t a, scales, rank, first, end;
} low_rank_share;

/* B of a share for `num_outputs` outputs from `first_output` on, made of `rank` ranks from `first_rank` on:
 * float16 [blocks, rank, LOW_RANK_OUTPUTS]. */
typedef struct {
    int64_t share, b, first_rank, rank, first_output, num_outputs;
} low_rank_part;

typedef struct {
    const float *x;
    float *y, *inner; /* inner [LOW_RANK_ROWS, inner_stride] */
    const int64_t *rows;
    const low_rank_share *shares;
    const low_rank_part *parts;
    int64_t x_stride, in_features, y_stride, num_shares, num_parts, inner_stride;
    int64_t first_row, end_row; /* of `rows` */
} low_rank;

/* inner = scale * (A x) of some rows and ranks. A sum adds the same numbers in the same order in a tile of any
 * size. */
INLINE void share_dots(const low_rank *l, const low_rank_share *share, int64_t row, int64_t rank, const int num_rows,
                       const int num_ranks) {
    const int64_t width = l->in_features, whole = width / LANES * LANES;
    const uint16_t *a = (const uint16_t *)(uintptr_t)share->a + rank * width;
    const float *scales = (const float *)(uintptr_t)share->scales + rank, *x[SHARE_ROWS];
    for (int t = 0; t < num_rows; t++) x[t] = l->x + l->rows[row + t] * l->x_stride;
    vec sums[SHARE_ROWS][SHARE_RANKS] = {};
    for (int64_t i = 0; i < whole; i += LANES)
        for (int k = 0; k < num_ranks; k++) {
            const vec weight = load_half(a + k * width + i);
            for (int t = 0; t < num_rows; t++) sums[t][k] += load(x[t] + i) * weight;
        }
    for (int t = 0; t < num_rows; t++)
        for (int k = 0; k < num_ranks; k++) {
            float sum = sum_lanes(sums[t][k]);
            for (int64_t i = whole; i < width; i++) sum += x[t][i] * half_to_float(a[k * width + i]);
            l->inner[(row + t - l->first_row) * l->inner_stride + rank + k] = sum * scales[k];
        }
}

static void share_ranks(void *context, int64_t task) {
    const low_rank *l = context;
    const low_rank_share *share = l->shares;
    for (int64_t count; task >= (count = (share->rank + RANKS_OF_TASK - 1) / RANKS_OF_TASK); share++) task -= count;
    const int64_t end_rank = MIN(share->rank, (task + 1) * RANKS_OF_TASK);
    const int64_t first = MAX(share->first, l->first_row), end = MIN(share->end, l->end_row);
    for (int64_t rank = task * RANKS_OF_TASK; rank < end_rank;) {
        const bool is_whole = end_rank - rank >= SHARE_RANKS;
        for (int64_t row = first; row < end;) {
            const bool are_many = end - row >= SHARE_ROWS;
            if (is_whole && are_many) share_dots(l, share, row, rank, SHARE_ROWS, SHARE_RANKS);
            else if (is_whole) share_dots(l, share, row, rank, 1, SHARE_RANKS);
            else if (are_many) share_dots(l, share, row, rank, SHARE_ROWS, 1);
            else share_dots(l, share, row, rank, 1, 1);
            row += are_many ? SHARE_ROWS : 1;
        }
        rank += is_whole ? SHARE_RANKS : 1;
    }
}

/* y += B inner of some rows and one block of outputs, rank by rank. */
INLINE void part_block(const low_rank *l, const low_rank_part *part, int64_t block, int64_t row, const int num_rows) {
    enum { WIDTH = LOW_RANK_OUTPUTS / LANES };
    const uint16_t *b = (const uint16_t *)(uintptr_t)part->b + block * part->rank * LOW_RANK_OUTPUTS;
    const float *inner = l->inner + (row - l->first_row) * l->inner_stride + part->first_rank;
    vec sums[SHARE_ROWS][WIDTH] = {};
    for (int64_t k = 0; k < part->rank; k++)
        for (int o = 0; o < WIDTH; o++) {
            const vec weight = load_half(b + k * LOW_RANK_OUTPUTS + o * LANES);
            for (int t = 0; t < num_rows; t++) sums[t][o] += splat(inner[t * l->inner_stride + k]) * weight;
        }
    const int64_t output = part->first_output + block * LOW_RANK_OUTPUTS;
    const int64_t count = MIN(LOW_RANK_OUTPUTS, part->num_outputs - block * LOW_RANK_OUTPUTS);
    for (int t = 0; t < num_rows; t++) {
        float *y = l->y + l->rows[row + t] * l->y_stride + output, added[LOW_RANK_OUTPUTS];
        for (int o = 0; o < WIDTH; o++) store(added + o * LANES, sums[t][o]);
        for (int64_t o = 0; o < count; o++) y[o] += added[o];
    }
}

static void part_blocks(void *context, int64_t task) {
    const low_rank *l = context;
    const low_rank_part *part = l->parts;
    const int64_t outputs = BLOCKS_OF_TASK * LOW_RANK_OUTPUTS;
    for (int64_t count; task >= (count = (part->num_outputs + outputs - 1) / outputs); part++) task -= count;
    const low_rank_share *share = l->shares + part->share;
    const int64_t num_blocks = (part->num_outputs + LOW_RANK_OUTPUTS - 1) / LOW_RANK_OUTPUTS;
    const int64_t first = MAX(share->first, l->first_row), end = MIN(share->end, l->end_row);
    for (int64_t block = task * BLOCKS_OF_TASK; block < MIN(num_blocks, (task + 1) * BLOCKS_OF_TASK); block++)
        for (int64_t row = first; row < end;) {
            const bool are_many = end - row >= SHARE_ROWS;
            if (are_many) part_block(l, part, block, row, SHARE_ROWS);
            else part_block(l, part, block, row, 1);
            row += are_many ? SHARE_ROWS : 1;
        }
}

/* Adds the shares of adapters to y [., y_stride]. `rows` are the numbers of rows of x and y, and `inner` has room
 * for MIN(num_rows, LOW_RANK_ROWS) rows of inner_stride numbers, which is the largest rank. */
EXPORT void penstock_add_low_rank(const float *x, int64_t x_stride, int64_t in_features, const int64_t *rows,
                                  int64_t num_rows, const int64_t *shares, int64_t num_shares, const int64_t *parts,
                                  int64_t num_parts, float *y, int64_t y_stride, float *inner, int64_t inner_stride) {
    low_rank l = {x, y, inner, rows, (const low_rank_share *)shares, (const low_rank_part *)parts, x_stride,
                  in_features, y_stride, num_shares, num_parts, inner_stride, 0, 0};
    int64_t num_inner = 0, num_outer = 0;
    const int64_t outputs = BLOCKS_OF_TASK * LOW_RANK_OUTPUTS;
    for (int64_t i = 0; i < num_shares; i++) num_inner += (l.shares[i].rank + RANKS_OF_TASK - 1) / RANKS_OF_TASK;
    for (int64_t i = 0; i < num_parts; i++) num_outer += (l.parts[i].num_outputs + outputs - 1) / outputs;
    for (; l.first_row < num_rows; l.first_row = l.end_row) {
        l.end_row = MIN(num_rows, l.first_row + LOW_RANK_ROWS);
        parallel(num_inner, share_ranks, &l);
        parallel(num_outer, part_blocks, &l);
    }
}
