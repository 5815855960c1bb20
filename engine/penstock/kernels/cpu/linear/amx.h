/* Products of several tokens with AMX. Part of vnni.h.
 *
 * A tile register holds 16 rows of up to 64 bytes. tdpbssd multiplies 16 channels of weights by 16 rows of activations,
 * 64 inputs (or the 32 of a group) at once, both signed. With few rows, INT8 weights are multiplied as they lie in
 * memory; otherwise, and from codes of 4 bits, they are copied into tiles first. */
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

/* Weights that are needed soon. They are prefetched in equal parts while other weights are used, `lines` cache lines
 * at a time, so that memory and arithmetic work side by side. */
typedef struct {
    const int8_t *w;
    int64_t stride, lines;
    int shift; /* k inputs lie in k >> shift bytes */
} ahead;
INLINE void fetch(const ahead *next, int64_t k) {
    for (int64_t i = 0; i < next->lines; i++)
        _mm_prefetch(next->w + i * next->stride + (k >> next->shift), _MM_HINT_T0);
}

#include "amx_tiles.h"

/* GCC's intrinsics for loading don't say that they read memory. Without this asm, GCC could move an earlier write
 * behind the load. */
#define READS_MEMORY() __asm__ volatile("" : : : "memory")

/* Gives this thread all eight tile registers, in shapes for `inputs` at once: sums, two tiles of channels, two of
 * rows. */
static void start_tiles(int inputs) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shape.row_bytes[i] = i == 4 || i == 5 ? inputs : 64;
        shape.rows[i] = i < 6 ? TILE : inputs / 4;
    }
    READS_MEMORY();
    _tile_loadconfig(&shape);
}

/* Two tiles of channels by one or two tiles of rows. `step` inputs are multiplied at once. `x` and `x2` are the rows'
 * tiles, `sums` those of the first channels, `sums2` of the others. */
INLINE void tile_product(const tile_weights *w, const int8_t *x, const int8_t *x2, int64_t inputs,
                         int32_t (*sums)[TILE * TILE], int32_t (*sums2)[TILE * TILE], bool begins, const ahead *next,
                         int64_t place, const int step, const bool two) {
    READS_MEMORY();
    if (begins) {
        _tile_zero(0);
        _tile_zero(1);
        if (two) _tile_zero(2);
        if (two) _tile_zero(3);
    } else {
        _tile_loadd(0, sums[0], 64);
        _tile_loadd(1, sums2[0], 64);
        if (two) _tile_loadd(2, sums[1], 64);
        if (two) _tile_loadd(3, sums2[1], 64);
    }
    for (int64_t k = 0; k < inputs; k += step) {
        const int8_t *at = w->at + k / 64 * w->inputs + k % 64;
        fetch(next, place + k);
        _tile_loadd(6, x + k * TILE, 64);
        _tile_loadd(4, at, w->channel);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(5, at + TILE * w->channel, w->channel);
        _tile_dpbssd(1, 5, 6);
        if (!two) continue;
        _tile_loadd(7, x2 + k * TILE, 64);
        _tile_dpbssd(2, 4, 7);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums2[0], 64);
    if (two) _tile_stored(2, sums[1], 64);
    if (two) _tile_stored(3, sums2[1], 64);
}
#define DEFINE_TILE_PRODUCT(name, step, two)                                                       \
    NOINLINE void name(const tile_weights *w, const int8_t *x, const int8_t *x2, int64_t inputs, \
                       int32_t (*sums)[TILE * TILE], int32_t (*sums2)[TILE * TILE], bool begins,   \
                       const ahead *next, int64_t place) {                                         \
        tile_product(w, x, x2, inputs, sums, sums2, begins, next, place, step, two);               \
    }
DEFINE_TILE_PRODUCT(one_by_64, 64, false)
DEFINE_TILE_PRODUCT(two_by_64, 64, true)
DEFINE_TILE_PRODUCT(one_by_32, 32, false)
DEFINE_TILE_PRODUCT(two_by_32, 32, true)

/* The scales and minima of some channels' groups. */
static void load_tile_scales(const tile_block *b, int64_t column, int64_t group, int64_t group_end) {
    const linear *l = b->l;
    const int64_t n = l->num_groups, per = block_groups(l);
    for (int64_t c = 0; c < MIN(TILE_CHANNELS, b->column_end - column); c++)
        for (int64_t g = group - group % per, stop; g < group_end; g = stop) {
            float scales[GROUPS_AT_ONCE];
            double minima[GROUPS_AT_ONCE];
            stop = MIN(g + GROUPS_AT_ONCE, (group_end + per - 1) / per * per);
            if (l->kind == INT8) memcpy(scales, l->scale + (column + c) * n + g, (stop - g) * sizeof *scales);
            else find_scales(l, column + c, g, stop - g, scales, minima);
            for (int64_t i = MAX(g, group); i < MIN(stop, group_end); i++) {
                tiles.scales[c][i - group] = scales[i - g];
                if (l->has_minimum) tiles.minima[c][i - group] = minima[i - g];
            }
        }
}

/* The exact sums of eight tokens in a channel; the second half of a token's rows lie behind the first. */
INLINE __m512d tile_sums(const int32_t *sums, int half, const bool is_split) {
    const __m256i first = _mm256_loadu_si256((const __m256i *)(sums + 8 * half));
    if (!is_split) return _mm512_cvtepi32_pd(first);
    const __m256i second = _mm256_loadu_si256((const __m256i *)(sums + 8));
    return _mm512_fmadd_pd(_mm512_cvtepi32_pd(first), _mm512_set1_pd(256), _mm512_cvtepi32_pd(second));
}

/* The same of a group, which 32 bits hold: see group_sums(). */
INLINE __m512d group_of_tile(const int32_t *sums, int half, const bool is_split) {
    const __m256i first = _mm256_load_si256((const __m256i *)(sums + 8 * half));
    if (!is_split) return _mm512_cvtepi32_pd(first);
    const __m256i second = _mm256_load_si256((const __m256i *)(sums + 8));
    return _mm512_cvtepi32_pd(_mm256_add_epi32(_mm256_slli_epi32(first, 8), second));
}

/* Add the sums of a group, of a tile of rows, to the totals. Only these additions round: see add_group(). */
INLINE void add_tile(const tile_block *b, int64_t column, int64_t tile, int64_t group, int64_t slot,
                     int32_t (*const sums[2])[TILE * TILE], int which, const bool is_split, const bool has_minimum) {
    const int halves = is_split ? 1 : 2;
    const int64_t token = tile * TILE / b->l->a->rows_per_token;
    __m512d minus[2] = {};
    if (has_minimum)
        for (int h = 0; h < halves; h++) {
            double of[8] = {};
            for (int64_t i = 0; i < MIN(8, b->num_tokens - token - 8 * h); i++)
                of[i] = minus_sum(b->l->a, b->token + token + 8 * h + i, group);
            minus[h] = _mm512_loadu_pd(of);
        }
    for (int c = 0; c < TILE_CHANNELS; c++) {
        const int32_t *own = sums[c / TILE][which] + c % TILE * TILE;
        const __m512d scale = _mm512_set1_pd(tiles.scales[c][slot]);
        double *totals = tiles.totals[column - b->column + c] + token;
        for (int h = 0; h < halves; h++) {
            const __m512d exact = group_of_tile(own, h, is_split), before = _mm512_loadu_pd(totals + 8 * h);
            if (has_minimum) {
                const __m512d less = _mm512_mul_pd(minus[h], _mm512_set1_pd(tiles.minima[c][slot]));
                _mm512_storeu_pd(totals + 8 * h, _mm512_add_pd(before, _mm512_fmadd_pd(exact, scale, less)));
            } else _mm512_storeu_pd(totals + 8 * h, _mm512_fmadd_pd(exact, scale, before));
        }
    }
}
static void add_tile_of(const tile_block *b, int64_t column, int64_t tile, int64_t group, int64_t slot,
                        int32_t (*const sums[2])[TILE * TILE], int which) {
    if (b->l->has_minimum && b->is_split) add_tile(b, column, tile, group, slot, sums, which, true, true);
    else if (b->l->has_minimum) add_tile(b, column, tile, group, slot, sums, which, false, true);
    else if (b->is_split) add_tile(b, column, tile, group, slot, sums, which, true, false);
    else add_tile(b, column, tile, group, slot, sums, which, false, false);
}

/* One or two tiles of rows, by inputs from k on of TILE_CHANNELS channels. */
static void multiply_tiles(const tile_block *b, const tile_weights *w, int64_t column, int64_t tile, bool two,
                           int64_t k, int64_t inputs, const ahead *next) {
    const activations *a = b->l->a;
    const int8_t *x = a->rows + (b->token * a->rows_per_token + tile * TILE) * a->padded + k * TILE;
    const int8_t *x2 = x + TILE * a->padded;
    void (*const product)(const tile_weights *, const int8_t *, const int8_t *, int64_t, int32_t(*)[TILE * TILE],
                          int32_t(*)[TILE * TILE], bool, const ahead *, int64_t) =
        b->step == 64 ? two ? two_by_64 : one_by_64 : two ? two_by_32 : one_by_32;
    if (!b->l->is_grouped) {
        int32_t(*const sums)[ROW_TILES][TILE * TILE] = tiles.sums + (column - b->column) / TILE;
        product(w, x, x2, inputs, sums[0] + tile, sums[1] + tile, k == 0, next, 0);
        return;
    }
    /* A group's sums are added while the tile registers compute the next group's. */
    int32_t room[2][2][2][TILE * TILE] __attribute__((aligned(64)));
    const int64_t size = a->group_size, slots = (MIN(inputs, a->in_features - k)) / size;
    for (int64_t slot = 0; slot <= slots; slot++) {
        const int64_t done = slot * size;
        if (slot < slots) {
            const tile_weights own = {w->at + done / 64 * w->inputs + done % 64, w->channel, w->inputs};
            product(&own, x + done * TILE, x2 + done * TILE, size, room[slot % 2][0], room[slot % 2][1], true, next,
                    done);
        }
        int32_t(*const before[2])[TILE * TILE] = {room[1 - slot % 2][0], room[1 - slot % 2][1]};
        for (int i = 0; slot > 0 && i <= two; i++)
            add_tile_of(b, column, tile + i, k / size + slot - 1, slot - 1, before, i);
    }
}

/* The results of sixteen channels and up to sixteen tokens. */
INLINE void finish_tile(const tile_block *b, int64_t column, int64_t token, const bool is_split) {
    const linear *l = b->l;
    const int64_t channel = column - b->column, tokens = MIN(16, b->num_tokens - token);
    const __mmask16 there = b->column_end - column >= 16 ? 0xffff : (1u << (b->column_end - column)) - 1;
    double token_scales[16] = {};
    float y[16][16] __attribute__((aligned(64)));
    for (int64_t i = 0; i < tokens; i++) token_scales[i] = l->a->token_scales[b->token + token + i];
    for (int c = 0; c < 16 && column + c < b->column_end; c++)
        for (int h = 0; h < 2; h++) {
            __m512d value, scale = _mm512_loadu_pd(token_scales + 8 * h);
            if (l->is_grouped) value = _mm512_loadu_pd(tiles.totals[channel + c] + token + 8 * h);
            else {
                const int64_t tile = is_split ? token / 8 + h : token / 16;
                const float of_weights = l->kind == INT4_STEPS ? tiles.units[channel + c] : l->scale[column + c];
                value = tile_sums(tiles.sums[channel / TILE][tile] + c * TILE, is_split ? 0 : h, is_split);
                scale = _mm512_mul_pd(scale, _mm512_set1_pd(of_weights));
            }
            _mm256_store_ps(y[c] + 8 * h, _mm512_cvtpd_ps(_mm512_mul_pd(value, scale)));
        }
    transpose_words((const int8_t *)y, 64, (int8_t *)y, 64);
    const __m512 bias = l->bias ? _mm512_maskz_loadu_ps(there, l->bias + column) : _mm512_setzero_ps();
    for (int64_t i = 0; i < tokens; i++) {
        const __m512 of = _mm512_load_ps(y[i]);
        float *to = l->y + (b->token + token + i) * l->out_features + column;
        _mm512_mask_storeu_ps(to, there, l->bias ? _mm512_add_ps(of, bias) : of);
    }
}

static void tile_products(const tile_block *b, const int8_t *next_weights) {
    const linear *l = b->l;
    const activations *a = l->a;
    const int64_t k_end = a->padded, at_once = b->num_tiles > FEW_TILES ? TILE_INPUTS : TILE_INPUTS_FEW;
    const int64_t pairs = (b->num_tiles + 1) / 2, lines = b->num_tiles > 2 ? (TILE_CHANNELS + pairs - 1) / pairs : 0;
    /* Weights that are met once or twice are not worth a copy. */
    const bool is_direct = l->kind == INT8 && b->num_tiles <= FEW_TILES;
    if (l->is_grouped)
        for (int64_t c = 0; c < MIN(TILE_SPAN, (b->column_end - b->column + 31) / 32 * 32); c++)
            memset(tiles.totals[c], 0, b->num_tiles * TILE / a->rows_per_token * sizeof(double));
    for (int64_t k = 0, stop; k < k_end; k = stop) {
        stop = MIN(k + at_once, k_end);
        for (int64_t c = b->column; c < b->column_end; c += TILE_CHANNELS) {
            const bool is_last = c + TILE_CHANNELS >= b->column_end;
            const int64_t soon = is_last ? b->column : c + TILE_CHANNELS, from = is_last ? stop : k;
            const int8_t *at = l->qweight + soon * l->row_bytes + (from >> l->shift);
            ahead next = {from < k_end ? at : next_weights, l->row_bytes, lines, l->shift};
            tile_weights w = {tiles.weights, 64, CHANNELS_BYTES};
            if (is_direct && b->column_end - c >= TILE_CHANNELS && stop <= a->in_features)
                w = (tile_weights){l->qweight + c * l->row_bytes + k, l->row_bytes, 64};
            else fill_tiles(b, c, k, stop - k, &next);
            if (l->is_grouped) load_tile_scales(b, c, k / a->group_size, MIN(stop, a->in_features) / a->group_size);
            for (int64_t tile = 0, left = TILE_CHANNELS; tile < b->num_tiles; tile += 2) {
                multiply_tiles(b, &w, c, tile, tile + 1 < b->num_tiles, k, stop - k, &next);
                next.w += next.lines * l->row_bytes, left -= next.lines, next.lines = MIN(lines, left);
            }
        }
    }
    for (int64_t c = b->column; c < b->column_end; c += TILE)
        for (int64_t t = 0; t < b->num_tokens; t += 16)
            if (b->is_split) finish_tile(b, c, t, true);
            else finish_tile(b, c, t, false);
}

/* The units of steps. False: some channels have none. */
static bool find_units(const linear *l, int64_t column, int64_t column_end) {
    for (int64_t c = column; c < column_end; c++)
        if (!find_steps(l, c, steps.at[0], tiles.units + (c - column))) return false;
    return true;
}

/* All channels, for activations in tiles. Channels without steps are computed in plain C, and those that are packed
 * with them. */
static void linear_amx(const linear *l, int64_t column, int64_t column_end) {
    const activations *a = l->a;
    start_tiles(l->is_grouped && a->group_size < 64 ? 32 : 64);
    const int64_t span = l->kind == INT4_STEPS ? TILE_CHANNELS : TILE_SPAN;
    for (int64_t stop; column < column_end; column = stop) {
        stop = MIN(column + TILE_SPAN, column_end);
        if (l->kind == INT4_STEPS && !find_units(l, column, stop)) {
            stop = MIN(column + span, column_end);
            if (!find_units(l, column, stop)) {
                linear_rest(l, column, stop);
                continue;
            }
        }
        for (int64_t t = 0; t < a->num_tokens; t += TILE_TOKENS) {
            const int64_t tokens = MIN(TILE_TOKENS, a->num_tokens - t);
            const tile_block b = {l, column, stop, t, tokens, (tokens * a->rows_per_token + TILE - 1) / TILE,
                                  l->is_grouped && a->group_size < 64 ? 32 : 64, a->rows_per_token == 2};
            const int64_t next = t + TILE_TOKENS < a->num_tokens ? column : next_column(l, stop);
            tile_products(&b, l->qweight + next * l->row_bytes);
        }
    }
    _tile_release();
}

/* Linux lends tile registers to a process that asks with arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). Where
 * Linux refuses, or a trial product is wrong, VNNI serves. */
static bool has_tiles;
static bool multiply_right(void) {
    enum { INPUTS = 128 };
    static int8_t x[TILE * INPUTS];
    static int32_t sums[2][TILE * TILE];
    const ahead nothing = {0};
    for (int i = 0; i < INPUTS / 64 * CHANNELS_BYTES; i++) tiles.weights[i] = (int8_t)(i * 37 + i / 256);
    for (int i = 0; i < TILE * INPUTS; i++) x[i] = (int8_t)(i * 91 + i / 64);
    start_tiles(64);
    const tile_weights w = {tiles.weights, 64, CHANNELS_BYTES};
    one_by_64(&w, x, x, INPUTS, sums, sums + 1, true, &nothing, 0);
    _tile_release();
    for (int c = 0; c < TILE_CHANNELS; c++)
        for (int row = 0; row < TILE; row++) {
            int32_t sum = 0;
            for (int k = 0; k < INPUTS; k++)
                sum += x[(k / 4 * TILE + row) * 4 + k % 4] * tiles.weights[k / 64 * (CHANNELS_BYTES) + c * 64 + k % 64];
            if (sum != sums[c / TILE][c % TILE * TILE + row]) return false;
        }
    return true;
}

__attribute__((constructor)) static void ask_for_tiles(void) {
    has_tiles = syscall(SYS_arch_prctl, 0x1023, 18) == 0 && multiply_right();
}

/* With fewer tokens, steps are faster without tiles. */
enum { STEPS_IN_TILES = 3 };
/* Whether AMX computes the product: of several tokens, with groups of these sizes, and not of planes. */
static bool takes_tiles(const linear *l, int64_t num_tokens, int64_t size) {
    const bool has_size = size == 32 || size == 64 || size == 128;
    const int64_t least = l->kind == INT4_STEPS ? STEPS_IN_TILES : 2;
    return has_tiles && !l->lower && num_tokens >= least && (has_size || (l->kind == INT8 && l->num_groups == 1));
}
