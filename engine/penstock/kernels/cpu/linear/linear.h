/* Products of integer weights and integer activations. Part of cpu.c. */
#pragma once

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define HAS_VNNI 1
#else
#define HAS_VNNI 0
#endif
#if defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
#define HAS_DOTS 1
#else
#define HAS_DOTS 0
#endif
#if defined(__AVX2__) && !HAS_VNNI && !HAS_DOTS
#define HAS_PLANE_WORDS 1
#else
#define HAS_PLANE_WORDS 0
#endif
#define HAS_CODE_BYTES HAS_PLANE_WORDS /* codes_bytes.h */
#if HAS_CODE_BYTES && !defined(__AVX512BW__)
#define HAS_PANELS 1 /* panel_avx2.h */
#else
#define HAS_PANELS 0
#endif
#if HAS_VNNI || HAS_DOTS
#define HAS_BYTES 1
typedef int8_t integer;
#else
#define HAS_BYTES 0
typedef int16_t integer;
#endif

#include "../activations.h"

/* Channels of a task, or a multiple, where lanes are rows of activations (vnni_lanes.h). */
enum { LANE_TASK = 48 };

/* How weights lie in memory: bytes, or two codes of 4 bits in a byte (the first in the low half), which stand for
 * integers that follow each other, or for those of a table. INT4_STEPS: steps.h. INT4_SHIFTS: a table's integers, with
 * scales that are powers of two, where one token has a kernel for them (vnni_factors.h). */
enum { INT8, INT4, INT4_TABLE, INT4_STEPS, INT4_SHIFTS };

/* Scales and minima of groups: w = scale * integer - minimum. Int4Tensor (int4_tensor.py) says what is there. */
typedef struct {
    const void *scale, *minimum; /* [out_features, num_groups / block_groups] */
    const int8_t *sub_scale;     /* [out_features, num_groups], or NULL */
    const uint8_t *sub_minimum;
    int64_t block_groups;
    int dtype; /* of scale and minimum: 0 is float32, 1 float16, 2 bfloat16 */
    int bits;  /* of a code: 4; or 3 or 2, whose scales are steps (low_codes.h) */
} group_numbers;

typedef struct {
    const activations *a;
    const int8_t *qweight; /* [out_features, row_bytes]; or the upper plane, where there is a lower one */
    const uint8_t *lower; /* the lower plane of INT8 (planes_joined.h), or NULL */
    int64_t lower_bytes; /* from a channel of the lower plane to the next; 0 where all have the same */
    const float *scale; /* INT8: [out_features, num_groups] */
    const float *bias;
    float *y; /* [num_tokens, out_features] */
    int64_t out_features, num_groups, columns_per_task;
    const int8_t *after; /* what is read after these weights, `after_bytes` for each channel, or NULL */
    int64_t after_bytes;
    int64_t first_task; /* of the pool, where several products are computed together */
    bool is_few; /* rows, so that they are used as they lie, without packing weights */
    bool is_tiled; /* one group, or groups that tiles can compute */
    bool is_fine; /* codes in groups of 16, which have a kernel of their own (codes_fine.h) */
    bool is_expanded; /* codes of 3 or 2 bits, which become INT8 some channels at a time (low_codes.h) */
    int kind, shift; /* k inputs lie in k >> shift bytes */
    int64_t row_bytes;
    bool is_grouped, has_minimum;
    bool has_steps; /* scales seem to be steps (steps.h), and the kernels of codes look for them */
    bool has_small_table; /* the integers of codes are 0 to 31, with the offset added */
    uint8_t table[16]; /* the integers of codes, with the activations' offset added */
    group_numbers numbers; /* INT4 */
} linear;

/* `count` numbers from i on as float32; `to` has room for whole vectors. */
INLINE void widen(const void *from, int dtype, int64_t i, int64_t count, float *restrict to) {
    const uint16_t *halves = (const uint16_t *)from + i;
    if (dtype == 0) memcpy(to, (const float *)from + i, count * sizeof(float));
    else if (dtype == 2)
        for (int64_t j = 0; j < count; j++) {
            const uint32_t bits = (uint32_t)halves[j] << 16;
            memcpy(to + j, &bits, 4);
        }
    else {
        int64_t j = 0;
        for (; j + LANES <= count; j += LANES) store(to + j, load_half(halves + j));
        for (; j < count; j++) to[j] = half_to_float(halves[j]);
    }
}

/* Whether all groups of a row share one scale, times a sub-scale of their own. */
INLINE bool is_one_block(const linear *l) {
    return l->numbers.sub_scale && l->numbers.block_groups == l->num_groups;
}
/* The groups whose scales are found together: those of a block, unless the row is one block. */
INLINE int64_t block_groups(const linear *l) {
    return l->kind == INT8 || is_one_block(l) ? 1 : l->numbers.block_groups;
}

/* Scales and (where there are any) minima of a channel's groups, at most GROUPS_AT_ONCE, whole blocks unless the row is
 * one block. Every product is exact: scales of several groups have 16 bits, and a minimum is a double. */
enum { GROUPS_AT_ONCE = 64 };
/* Blocks of eight groups have loops of their own, which become vectors. */
INLINE void multiply_scales(const float *restrict blocks, const int8_t *restrict sub, int64_t num_blocks, int64_t per,
                            float *restrict to) {
    for (int64_t b = 0; b < num_blocks; b++)
        for (int64_t i = 0; i < per; i++) to[b * per + i] = blocks[b] * sub[b * per + i];
}
INLINE void multiply_minima(const float *restrict blocks, const uint8_t *restrict sub, int64_t num_blocks, int64_t per,
                            double *restrict to) {
    for (int64_t b = 0; b < num_blocks; b++)
        for (int64_t i = 0; i < per; i++) to[b * per + i] = (double)blocks[b] * sub[b * per + i];
}
/* The same where a row is one block. */
INLINE void find_row_scales(const linear *l, int64_t column, int64_t group, int64_t count, float *restrict scales,
                            double *restrict minima) {
    const group_numbers *n = &l->numbers;
    const int64_t first = column * l->num_groups + group;
    float scale, minimum;
    widen(n->scale, n->dtype, column, 1, &scale);
    for (int64_t g = 0; g < count; g++) scales[g] = scale * n->sub_scale[first + g];
    if (!l->has_minimum) return;
    if (n->minimum) widen(n->minimum, n->dtype, column, 1, &minimum);
    const double of = n->minimum ? minimum : scale;
    for (int64_t g = 0; g < count; g++) minima[g] = n->sub_minimum ? of * n->sub_minimum[first + g] : of;
}
static void find_scales(const linear *l, int64_t column, int64_t group, int64_t count, float *restrict scales,
                        double *restrict minima) {
    if (is_one_block(l)) return find_row_scales(l, column, group, count, scales, minima);
    const group_numbers *n = &l->numbers;
    const int64_t per = n->block_groups, first = column * l->num_groups + group;
    const uint32_t block = (uint32_t)first / (uint32_t)per, num_blocks = (uint32_t)count / (uint32_t)per;
    float blocks[GROUPS_AT_ONCE], own_minima[GROUPS_AT_ONCE];
    if (per == 1) widen(n->scale, n->dtype, block, num_blocks, scales);
    else {
        widen(n->scale, n->dtype, block, num_blocks, blocks);
        if (per == 8) multiply_scales(blocks, n->sub_scale + first, num_blocks, 8, scales);
        else multiply_scales(blocks, n->sub_scale + first, num_blocks, per, scales);
    }
    if (!l->has_minimum) return;
    if (n->minimum) widen(n->minimum, n->dtype, block, num_blocks, own_minima);
    const float *of = n->minimum ? own_minima : per == 1 ? scales : blocks;
    if (!n->sub_minimum)
        for (int64_t g = 0; g < count; g++) minima[g] = of[g];
    else if (per == 8) multiply_minima(of, n->sub_minimum + first, num_blocks, 8, minima);
    else if (per == 1)
        for (int64_t g = 0; g < count; g++) minima[g] = (double)of[g] * n->sub_minimum[first + g];
    else multiply_minima(of, n->sub_minimum + first, num_blocks, per, minima);
}

/* The exact integer sum, scaled. It rounds once to double (53 bits hold both factors) and once to float. */
INLINE float scaled(int64_t sum, float token_scale, float weight_scale) {
    return (float)((double)sum * ((double)token_scale * (double)weight_scale));
}

/* The sum of a group's activations: corrections have it with a factor of -1 where there are minima. */
INLINE int32_t minus_sum(const activations *a, int64_t token, int64_t group) {
    const int32_t *c = a->corrections + token * a->rows_per_token * a->num_groups + group;
    return a->rows_per_token == 2 ? c[0] * 256 + c[a->num_groups] : c[0];
}

/* The first of the channels that a thread most likely computes next, when it has computed those before `column`. */
INLINE int64_t next_column(const linear *l, int64_t column) {
    return column % l->columns_per_task ? column : (atomic_load(&pool.next) - l->first_task) * l->columns_per_task;
}

/* Tiles of rows that hold the activations of some tokens. */
INLINE int64_t num_tiles_of(int64_t num_tokens, int rows_per_token);

#include "steps.h"
#include "low_codes.h"
#include "planes.h"
#include "codes_fine.h"

/* Tiles of AMX, and of rows, where a build has none. */
#if !defined(__AMX_INT8__)
enum { has_tiles = 0 };
static bool takes_tiles(const linear *l, int64_t num_tokens, int64_t size) {
    return (void)l, (void)num_tokens, (void)size, false;
}
#endif
#if !HAS_VNNI
enum { TILE = 16 };
static bool takes_lanes(const linear *l, int64_t num_tokens, int rows_per_token) {
    return (void)l, (void)num_tokens, (void)rows_per_token, false;
}
static void linear_tiles(const linear *l, int64_t column, int64_t column_end) {
    (void)l, (void)column, (void)column_end;
}
static void quantize_tile(void *context, int64_t tile) { (void)context, (void)tile; }
#endif

#if !HAS_CODE_BYTES
static bool takes_bytes(const linear *l, int64_t num_tokens, int64_t in_features, int activation_bits,
                        bool is_stepped) {
    return (void)l, (void)num_tokens, (void)in_features, (void)activation_bits, (void)is_stepped, false;
}
#endif

static void linear_rest(const linear *l, int64_t column, int64_t column_end);

#if HAS_VNNI
#include "vnni.h"
#elif HAS_DOTS
#include "dots.h"
#elif defined(__x86_64__)
#include "int16.h"
#else
enum { CODE_BLOCK = 0 };
static int64_t linear_fast(const linear *l, int64_t column, int64_t column_end) {
    return (void)l, (void)column_end, column;
}
#endif

/* The weights k to k_end (at most 256) of a channel as integers; 4-bit codes are unpacked into `room`. */
INLINE const int8_t *integers_at(const linear *l, int64_t column, int64_t k, int64_t k_end, int8_t *restrict room) {
    const int8_t *row = l->qweight + column * l->row_bytes;
    if (l->lower) {
        for (int64_t i = k; i < k_end; i++) room[i - k] = joined_weight(l, column, i);
        return room;
    }
    if (l->kind == INT8) return row + k;
    for (int64_t i = k; i < k_end; i++) {
        const int code = (uint8_t)row[i / 2] >> (i % 2 * 4) & 15;
        room[i - k] = (int8_t)(l->table[code] - (l->has_minimum ? 0 : l->a->offset));
    }
    return room;
}

/* The sum of one token and one output channel, over some of the inputs. */
INLINE int64_t exact_sum(const linear *l, int64_t column, int64_t token, int64_t k, int64_t k_end) {
    const activations *a = l->a;
    int64_t dots[2] = {0};
    for (int64_t stop; k < k_end; k = stop) {
        int8_t room[256];
        stop = MIN(k + 256, k_end);
        const int8_t *restrict w = integers_at(l, column, k, stop, room);
        for (int part = 0; part < a->rows_per_token; part++) {
            const int64_t row = token * a->rows_per_token + part;
            const integer *restrict x = a->rows + row * a->padded + k;
            int32_t some = 0; /* 256 products of at most 2^15 * 2^7 */
            if ((HAS_PAIRS && a->rows_per_token == 2) || a->in_tiles || k < a->halved)
                for (int64_t i = k; i < stop; i++)
                    some += w[i - k] * (integer)(a->rows[activation_at(a, row, i)] ^ a->flip);
            else
                for (int64_t i = 0; i < stop - k; i++) some += (int16_t)w[i] * (int16_t)(integer)(x[i] ^ a->flip);
            dots[part] += some;
        }
    }
    return a->rows_per_token == 2 ? dots[0] * 256 + dots[1] : dots[0];
}

/* A token and a channel, group after group. The scales of a block are found once. */
INLINE double grouped_sum(const linear *l, int64_t column, int64_t token) {
    const int64_t n = l->num_groups, size = l->a->in_features / n, per = block_groups(l);
    float scale[GROUPS_AT_ONCE] = {0};
    double minimum[GROUPS_AT_ONCE] = {0};
    double total = 0;
    for (int64_t g = 0; g < n; g++) {
        const double sum = (double)exact_sum(l, column, token, g * size, (g + 1) * size);
        if (l->kind == INT8) {
            total += sum * (double)l->scale[column * n + g];
            continue;
        }
        if (g % per == 0) find_scales(l, column, g, per, scale, minimum);
        double part = sum * (double)scale[g % per];
        if (l->has_minimum) part += minus_sum(l->a, token, g) * minimum[g % per];
        total += part;
    }
    return total;
}

/* Plain C, which the compiler vectorizes, for the columns that tiles leave over and for other processors. */
static void linear_rest(const linear *l, int64_t column, int64_t column_end) {
    const activations *a = l->a;
    for (int64_t n = column; n < column_end; n++)
        for (int64_t t = 0; t < a->num_tokens; t++) {
            float y;
            if (l->is_grouped || l->kind >= INT4_STEPS) y = (float)(grouped_sum(l, n, t) * (double)a->token_scales[t]);
            else y = scaled(exact_sum(l, n, t, 0, a->in_features), a->token_scales[t], l->scale[n]);
            l->y[t * l->out_features + n] = l->bias ? y + l->bias[n] : y;
        }
}

#if HAS_VNNI
static void linear_planes(const linear *l, int64_t column, int64_t column_end) {
    linear_rest(l, linear_fast(l, column, column_end), column_end);
}
enum { STEPS_FROM_TOKENS = 1, MOST_STEPPED_INPUTS = INT_MAX };
static int64_t stepped_channels(const linear *l, int64_t column, int64_t column_end) {
    return linear_fast(l, column, column_end);
}
#else
#include "planes_joined.h"
#include "expanded.h"
static bool takes_few(const linear *l) { return (void)l, false; }
static bool seems_shifted(const linear *l, int64_t in_features) { return (void)l, (void)in_features, false; }
#endif

/* Rows without steps are computed in plain C. */
static void linear_stepped(const linear *l, int64_t column, int64_t column_end) {
    for (int64_t stop; column < column_end; column = stop) {
        stop = MIN(column + STEPPED_CHANNELS, column_end);
        const bool have = find_far_steps(l, column, 1, (int)(stop - column), 0);
        linear_rest(l, have ? stepped_channels(l, column, stop) : column, stop);
    }
}

#include "low_expanded.h"

static void linear_task(void *context, int64_t task) {
    const linear *l = context;
    const int64_t column = task * l->columns_per_task, end = MIN(column + l->columns_per_task, l->out_features);
    if (l->is_expanded) linear_expanded(l, column, end);
    else if (l->is_fine && l->a->words == FINE_BLOCK) linear_fine(l, column, end);
    else if (l->a->in_tiles) linear_tiles(l, column, end);
    else if (l->kind == INT4_STEPS && !l->is_few) linear_stepped(l, column, end);
    else if (l->lower) linear_planes(l, column, end);
    else linear_rest(l, linear_fast(l, column, end), end);
}

#include "products.h"
