/* Products with instructions that multiply four bytes by four bytes and add the products to a lane of 32 bits: ARM's
 * sdot, and vpdpbusd on 256 bits. Part of linear.h.
 *
 * A tile is up to six rows of activations by four channels. A sum of 32 bits holds the products of one row up to
 * 131072 inputs; with unsigned weights the equation of vnni.h holds modulo 2^32. */
#pragma once

enum { CHANNELS = 4, ROWS = 6, STEP = 32, PANEL_BYTES = 128 << 10, CODE_BLOCK = 0 };

typedef double vec4 __attribute__((vector_size(32)));
typedef uint32_t sums4 __attribute__((vector_size(16)));
typedef int32_t signed4 __attribute__((vector_size(16)));

#if defined(__aarch64__)
#include "../dots/neon.h"
#else
#include "../dots/avxvnni.h"
#endif

/* What one call computes: the sums of some rows and four channels, over a multiple of STEP inputs. The bytes from
 * `next` on are needed soon, and prefetched, if `moves` is 1; if it is 0, nothing is prefetched but one cache line.
 * Channels that lie `far` bytes from each other, 0 if they lie side by side, are streams of their own. */
typedef struct {
    const int8_t *x;
    int64_t padded;
    const int8_t *w[CHANNELS];
    int64_t inputs;
    const int8_t *next;
    int64_t moves, far, done; /* inputs before these, of far channels */
    code_table table;
} tile_inputs;

INLINE step weights_at(const tile_inputs *t, int channel, int64_t k, const int kind) {
    if (kind == INT8) return load_weights(t->w[channel] + k);
    return load_codes(t->w[channel] + k / 2, t->table, kind);
}
/* While STEP inputs of some channels are used, as many bytes are prefetched. Far streams are prefetched in turns, each
 * cache line of each of them once. */
INLINE const int8_t *fetch(const tile_inputs *t, const int8_t *next, int64_t k, const int channels, const int kind) {
    const int bytes = channels * STEP / (kind == INT8 ? 1 : 2);
    const int64_t line = (t->done + k) / STEP * (bytes / 64);
    if (t->far)
        for (int64_t i = line; i < line + bytes / 64; i++)
            __builtin_prefetch(next + i % CHANNELS * t->far + i / CHANNELS * 64);
    else
        for (int i = 0; i < bytes; i += 64) __builtin_prefetch(next + i);
    return t->far ? next : next + t->moves * bytes;
}

/* Accumulators are separate variables, because GCC keeps arrays of vectors in memory. */
#define ROWS_1(DO, j) DO(0, j)
#define ROWS_2(DO, j) DO(0, j) DO(1, j)
#define ROWS_4(DO, j) ROWS_2(DO, j) DO(2, j) DO(3, j)
#define ROWS_6(DO, j) ROWS_4(DO, j) DO(4, j) DO(5, j)
#define CLEAR(i, j) lanes a##i##j = no_lanes();
#define STORE(i, j) sums[i][j] = a##i##j;
#define MULTIPLY(i, j)                                                                             \
    a##i##j = dot(a##i##j, weights, load_step(t->x + i * t->padded + k));                          \
    IN_REGISTER(a##i##j);
#define CHANNEL(R, j)                                                                              \
    {                                                                                              \
        const step weights = weights_at(t, j, k, kind);                                            \
        ROWS_##R(MULTIPLY, j)                                                                      \
    }
/* One or two rows meet four channels at a time. */
#define DEFINE_FEW(R)                                                                              \
    INLINE void sums_##R(const tile_inputs *t, lanes (*sums)[CHANNELS], const int kind) {          \
        const int8_t *next = t->next;                                                              \
        ROWS_##R(CLEAR, 0) ROWS_##R(CLEAR, 1) ROWS_##R(CLEAR, 2) ROWS_##R(CLEAR, 3)                \
        for (int64_t k = 0; k < t->inputs; k += STEP) {                                            \
            next = fetch(t, next, k, CHANNELS, kind);                                              \
            CHANNEL(R, 0) CHANNEL(R, 1) CHANNEL(R, 2) CHANNEL(R, 3)                                \
        }                                                                                          \
        ROWS_##R(STORE, 0) ROWS_##R(STORE, 1) ROWS_##R(STORE, 2) ROWS_##R(STORE, 3)                \
    }
DEFINE_FEW(1)
DEFINE_FEW(2)

/* More rows meet two channels at a time, so that registers hold all sums. */
#define MULTIPLY_TWO(i, j)                                                                         \
    {                                                                                              \
        const step x = load_step(t->x + i * t->padded + k);                                        \
        a##i##0 = dot(a##i##0, first, x), a##i##1 = dot(a##i##1, second, x);                       \
        IN_REGISTER(a##i##0);                                                                      \
        IN_REGISTER(a##i##1);                                                                      \
    }
#define STORE_TWO(i, j) sums[i][j] = a##i##0, sums[i][j + 1] = a##i##1;
#define TWO_CHANNELS(R, j)                                                                         \
    {                                                                                              \
        ROWS_##R(CLEAR, 0) ROWS_##R(CLEAR, 1)                                                      \
        for (int64_t k = 0; k < t->inputs; k += STEP) {                                            \
            next = fetch(t, next, k, 2, kind);                                                     \
            const step first = weights_at(t, j, k, kind), second = weights_at(t, j + 1, k, kind);  \
            ROWS_##R(MULTIPLY_TWO, )                                                               \
        }                                                                                          \
        ROWS_##R(STORE_TWO, j)                                                                     \
    }
#define DEFINE_MORE(R)                                                                             \
    INLINE void sums_##R(const tile_inputs *t, lanes (*sums)[CHANNELS], const int kind) {          \
        const int8_t *next = t->next;                                                              \
        TWO_CHANNELS(R, 0)                                                                         \
        TWO_CHANNELS(R, 2)                                                                         \
    }
DEFINE_MORE(4)
DEFINE_MORE(6)

#if HAS_PAIRS
#include "../dots/i8mm.h"
#else
INLINE void pair_sums(const tile_inputs *t, const int tokens, const int kind, lanes (*sums)[CHANNELS]) {
    (void)t, (void)tokens, (void)kind, (void)sums;
}
#endif

INLINE void step_sums(const tile_inputs *t, const int rows, const bool is_paired, const int kind,
                      lanes (*sums)[CHANNELS]) {
    if (is_paired) pair_sums(t, rows / 2, kind, sums);
    else if (rows == 6) sums_6(t, sums, kind);
    else if (rows == 4) sums_4(t, sums, kind);
    else if (rows == 2) sums_2(t, sums, kind);
    else sums_1(t, sums, kind);
}

/* Adds the last few inputs, from k on. Their weights are copied, so that nothing behind them is read, and other inputs'
 * weights count as 0. (Groups of 4-bit codes are multiples of STEP.) */
INLINE void add_last_of(const tile_inputs *t, int64_t k, int64_t inputs, int rows, const bool is_paired,
                        lanes (*sums)[CHANNELS]) {
    const int at_once = is_paired ? 2 : 1;
    int8_t last[CHANNELS][STEP];
    lanes more[2][CHANNELS];
    tile_inputs rest = {.x = t->x + at_once * k, .padded = t->padded, .inputs = STEP, .next = t->next};
    memset(last, -WEIGHT_OFFSET, sizeof last);
    for (int j = 0; j < CHANNELS; j++) rest.w[j] = memcpy(last[j], t->w[j] + k, inputs);
    for (int i = 0; i < rows; i += at_once, rest.x += at_once * t->padded) {
        step_sums(&rest, at_once, is_paired, INT8, more);
        for (int part = 0; part < at_once; part++)
            for (int j = 0; j < (is_paired ? 1 : CHANNELS); j++)
                sums[i + part][j] = plus(sums[i + part][j], more[part][j]);
    }
}
NOINLINE void add_last(const tile_inputs *t, int64_t k, int64_t inputs, int rows, bool is_paired,
                       lanes (*sums)[CHANNELS]) {
    if (HAS_PAIRS && is_paired) add_last_of(t, k, inputs, rows, true, sums);
    else add_last_of(t, k, inputs, rows, false, sums);
}

/* The exact sums of four channels, from sums of products modulo 2^32. */
INLINE vec4 exact_sums(const lanes *sums, int32_t correction, const bool is_paired) {
#if HAS_PAIRS
    const sums4 of_products = is_paired ? (sums4)sums[0] : add_lanes(sums);
#else
    const sums4 of_products = add_lanes(sums);
    (void)is_paired;
#endif
    return __builtin_convertvector((signed4)(of_products + ((sums4){} + (uint32_t)correction)), vec4);
}
/* The sums of a group for a token: 32 bits hold 256 hi + lo, since a group has at most 128 inputs. */
INLINE vec4 group_sums(lanes (*sums)[CHANNELS], int32_t correction, const bool is_split) {
    if (!is_split) return exact_sums(sums[0], correction, false);
    lanes merged[CHANNELS];
#pragma GCC unroll 4
    for (int j = 0; j < (HAS_PAIRS ? 1 : CHANNELS); j++) merged[j] = merge_rows(sums[0][j], sums[1][j]);
    return exact_sums(merged, correction, HAS_PAIRS);
}

/* What a tile computes: some rows, which belong to tokens from `token` on, by the channels column, column + apart, ...,
 * of which `channels` are there. */
typedef struct {
    const linear *l;
    int64_t token, column, apart;
    int channels;
    tile_inputs inputs;
} tile_place;

/* Scales and minima of four channels' groups. */
typedef struct {
    float scales[CHANNELS][GROUPS_AT_ONCE];
    double minima[CHANNELS][GROUPS_AT_ONCE];
} tile_scales;
INLINE int64_t channel_at(const tile_place *p, int j) { return p->column + MIN(j, p->channels - 1) * p->apart; }
INLINE void find_tile_scales(const tile_place *p, int64_t group, tile_scales *found) {
    const linear *l = p->l;
    const int64_t count = MIN(GROUPS_AT_ONCE, l->num_groups - group);
    for (int j = 0; j < CHANNELS; j++) {
        const int64_t c = channel_at(p, j);
        if (l->kind == INT8) memcpy(found->scales[j], l->scale + c * l->num_groups + group, count * sizeof(float));
        else find_scales(l, c, group, count, found->scales[j], found->minima[j]);
    }
}
INLINE vec4 scales_at(const tile_scales *found, int64_t at) {
    return (vec4){found->scales[0][at], found->scales[1][at], found->scales[2][at], found->scales[3][at]};
}
INLINE vec4 minima_at(const tile_scales *found, int64_t at) {
    return (vec4){found->minima[0][at], found->minima[1][at], found->minima[2][at], found->minima[3][at]};
}

INLINE void store_token(const tile_place *p, int64_t token, vec4 values) {
    const linear *l = p->l;
    for (int j = 0; j < p->channels; j++) {
        const float y = (float)values[j];
        const int64_t c = channel_at(p, j);
        l->y[token * l->out_features + c] = l->bias ? y + l->bias[c] : y;
    }
}

/* The sums of all rows over a group. `next` moves on. */
INLINE void rows_by_channels(tile_place *p, int64_t group, const int rows, const bool is_split, const int kind,
                             lanes (*sums)[CHANNELS]) {
    const activations *a = p->l->a;
    const bool is_paired = HAS_PAIRS && is_split;
    const int64_t size = a->group_size, k = group * size;
    tile_inputs *t = &p->inputs;
    for (int j = 0; j < CHANNELS; j++)
        t->w[j] = p->l->qweight + channel_at(p, j) * p->l->row_bytes + (kind == INT8 ? k : k / 2);
    t->x = a->rows + p->token * a->rows_per_token * a->padded + k * (is_paired ? 2 : 1);
    step_sums(t, rows, is_paired, kind, sums);
    if (kind == INT8 && t->inputs < size) add_last(t, t->inputs, size - t->inputs, rows, is_paired, sums);
    if (t->far) t->done += t->inputs;
    else t->next += t->moves * CHANNELS * t->inputs / (kind == INT8 ? 1 : 2);
}

/* One scale for all inputs. */
INLINE void plain_product(tile_place *p, const int rows, const bool is_split) {
    const activations *a = p->l->a;
    const int per_token = is_split ? 2 : 1;
    lanes sums[ROWS][CHANNELS];
    tile_scales found;
    find_tile_scales(p, 0, &found);
    rows_by_channels(p, 0, rows, is_split, INT8, sums);
    for (int i = 0; i < rows / per_token; i++) {
        const int32_t *corrections = a->corrections + p->token * per_token + i * per_token;
        vec4 exact = exact_sums(sums[i * per_token], corrections[0], HAS_PAIRS && is_split);
        if (is_split) exact = exact * 256.0 + exact_sums(sums[2 * i + 1], corrections[1], HAS_PAIRS);
        store_token(p, p->token + i, exact * ((double)a->token_scales[p->token + i] * scales_at(&found, 0)));
    }
}

/* A group's sum times a scale, and the sum of inputs times a minimum, are exact in double. */
INLINE void grouped_product(tile_place *p, const int rows, const bool is_split, const int kind,
                            const bool has_minimum) {
    const activations *a = p->l->a;
    const int per_token = is_split ? 2 : 1, tokens = rows / per_token;
    tile_scales found;
    vec4 totals[ROWS] = {};
    for (int64_t g = 0; g < a->num_groups; g++) {
        const int64_t at = g % GROUPS_AT_ONCE;
        lanes sums[ROWS][CHANNELS];
        if (at == 0) find_tile_scales(p, g, &found);
        rows_by_channels(p, g, rows, is_split, kind, sums);
        const vec4 scales = scales_at(&found, at);
#pragma GCC unroll 6
        for (int i = 0; i < tokens; i++) {
            const int32_t minus = minus_sum(a, p->token + i, g);
            vec4 part = group_sums(sums + i * per_token, has_minimum ? 0 : minus, is_split) * scales;
            if (has_minimum) part += (double)minus * minima_at(&found, at);
            totals[i] += part;
        }
    }
    for (int i = 0; i < tokens; i++) store_token(p, p->token + i, totals[i] * (double)a->token_scales[p->token + i]);
}

INLINE void tile(tile_place *p, const int rows, const bool is_split, const int kind, const bool has_minimum) {
    if (kind == INT8 && !p->l->is_grouped) plain_product(p, rows, is_split);
    else grouped_product(p, rows, is_split, kind, has_minimum);
}
#define DEFINE_TILE(name, kind, has_minimum)                                                       \
    static void name(tile_place *p, int rows) {                                                    \
        const bool is_split = p->l->a->rows_per_token == 2;                                        \
        if (rows == 6 && is_split) tile(p, 6, true, kind, has_minimum);                            \
        else if (rows == 4 && is_split) tile(p, 4, true, kind, has_minimum);                       \
        else if (is_split) tile(p, 2, true, kind, has_minimum);                                    \
        else if (rows == 6) tile(p, 6, false, kind, has_minimum);                                  \
        else if (rows == 4) tile(p, 4, false, kind, has_minimum);                                  \
        else if (rows == 2) tile(p, 2, false, kind, has_minimum);                                  \
        else tile(p, 1, false, kind, has_minimum);                                                 \
    }
DEFINE_TILE(int8_tile, INT8, false)
DEFINE_TILE(plain_tile, INT4, false)
DEFINE_TILE(minimum_tile, INT4, true)
DEFINE_TILE(table_tile, INT4_TABLE, false)

static void compute_tile(tile_place *p, int rows) {
    const linear *l = p->l;
    if (l->kind == INT8) int8_tile(p, rows);
    else if (l->kind == INT4_TABLE) table_tile(p, rows);
    else if (l->has_minimum) minimum_tile(p, rows);
    else plain_tile(p, rows);
}

/* One tile. The first tiles of rows prefetch the channels that come next. */
static void linear_tile(const linear *l, int64_t row, int rows, int64_t column, int64_t column_end) {
    const activations *a = l->a;
    const int64_t next = next_column(l, column + CHANNELS);
    tile_place p = {l, row / a->rows_per_token, column, 1, (int)MIN(CHANNELS, column_end - column),
                    {.padded = a->padded, .inputs = a->group_size / STEP * STEP, .table = load_table(l->table),
                     .next = l->qweight + (row ? column : next) * l->row_bytes, .moves = row == 0}};
    compute_tile(&p, rows);
}

/* One token: quarters of the channels are four streams, which bring more bytes a second than one. Returns where they
 * end. */
static int64_t far_tiles(const linear *l, int64_t column, int64_t column_end) {
    const activations *a = l->a;
    const int64_t apart = (column_end - column) / CHANNELS;
    const int64_t prefetch = tuning.prefetch_bytes / (l->kind == INT8 ? 1 : 2);
    for (int64_t c = column; c < column + apart; c++) {
        tile_place p = {l, 0, c, apart, CHANNELS,
                        {.padded = a->padded, .inputs = a->group_size / STEP * STEP, .table = load_table(l->table),
                         .next = l->qweight + c * l->row_bytes + prefetch, .far = apart * l->row_bytes}};
        compute_tile(&p, a->rows_per_token);
    }
    return column + CHANNELS * apart;
}

#if defined(__AVX2__)
#include "../dots/panel.h"
#endif

/* Computes all channels or none, and returns where the computed ones end. While all tokens meet them, a panel of
 * channels stays in the L2 cache. */
static int64_t linear_fast(const linear *l, int64_t column, int64_t column_end) {
    const int64_t num_rows = l->a->num_tokens * l->a->rows_per_token;
    const int64_t panel = num_rows > ROWS ? MAX(CHANNELS, PANEL_BYTES / l->row_bytes / CHANNELS * CHANNELS) : CHANNELS;
    if (!l->is_tiled) return column;
    if (l->a->num_tokens == 1) column = far_tiles(l, column, column_end);
#if defined(__AVX2__)
    if (num_rows > (l->is_grouped ? ROWS : 2 * ROWS)) return linear_panels(l, column, column_end);
#endif
    for (int64_t stop; column < column_end; column = stop) {
        stop = MIN(column + panel, column_end);
        for (int64_t r = 0, rows; r < num_rows; r += rows) {
            rows = num_rows - r >= 6 ? 6 : num_rows - r >= 4 ? 4 : num_rows - r >= 2 ? 2 : 1;
            for (int64_t c = column; c < stop; c += CHANNELS) linear_tile(l, r, (int)rows, c, column_end);
        }
    }
    return column_end;
}
