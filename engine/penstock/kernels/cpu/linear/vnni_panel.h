/* Many rows, and groups, with AVX512-VNNI: panels of weights are packed. Part of vnni.h. */
#pragma once

/* Rows that are too many for lanes, and groups: a panel of 64 channels by some inputs is packed (a lane per channel,
 * four inputs each) into memory that stays in the core's caches, and all rows pass over the panel, six at a time. With
 * few rows, a panel fits into the L1 cache, so that packing and arithmetic alternate while memory delivers. With many
 * rows, a panel has so many inputs that its sums are rarely stored. A thread keeps its panel from call to call. */
enum {
    PANEL = 64,
    PANEL_FEW_ROWS = 128,
    PANEL_INPUTS_FEW = 256,
    PANEL_ROWS = 768,
    SCALES_AT_ONCE = 64, /* at least: groups whose scales are widened together */
    MAX_GROUPS = MOST_PANEL_INPUTS / 16 + 16
};
static _Thread_local struct {
    int8_t weights[PANEL * MOST_PANEL_INPUTS] __attribute__((aligned(64))); /* [inputs / 4, 64, 4] */
    int32_t sums[PANEL_ROWS + 16][PANEL]; /* of a group that goes on in the next block of inputs; else of one tile */
    double totals[PANEL_ROWS][PANEL]; /* with groups */
    double scales[MAX_GROUPS][PANEL], minima[MAX_GROUPS][PANEL];
} panel;

/* 16 channels, from the panel's channel c on, by 64 inputs (missing ones are zeros) as columns of a panel. */
INLINE void pack_square(const int8_t *w, int64_t stride, int channels, __mmask64 inputs, int8_t *to, __m512i table,
                        int64_t k, const channel_steps *own, int c, int shift, const int kind) {
    __m512i r[16];
    for (int i = 0; i < 16; i++) {
        const __mmask64 mask = i < channels ? inputs : 0;
        /* Places of channels that are not there can be those of other products: steps themselves, say. */
        r[i] = kind == INT4_STEPS ? stepped_at(w + i * stride, k, mask, own->at[i < channels ? c + i : 0], shift)
                                  : weights_at(w + i * stride, 0, mask, table, kind);
    }
    store_columns(r, to, 4 * PANEL);
}

#include "planes_vnni.h"

/* From the input `first` on, whose weights lie at w. */
INLINE void pack(const linear *l, const int8_t *w, int channels, int64_t first, int64_t inputs, streams *next,
                 const int kind) {
    const __m512i table = table_of(l);
    const int64_t stride = l->row_bytes;
    const int shift = kind == INT4_STEPS ? group_shift(l) : 0;
    const channel_steps *own = kind == INT4_STEPS ? own_steps() : NULL;
    for (int64_t k = 0; k < inputs; k += 64) {
        int8_t *to = panel.weights + PANEL * k;
        fetch_streams(next);
        for (int c = 0; c < PANEL; c += 16, to += 64) {
            const int8_t *from = w + c * stride + (kind == INT8 ? k : k / 2);
            const __mmask64 all = ~(__mmask64)0, some = inputs - k >= 64 ? all : ((__mmask64)1 << (inputs - k)) - 1;
            if (channels - c >= 16 && some == all)
                pack_square(from, stride, 16, all, to, table, first + k, own, c, shift, kind);
            else pack_square(from, stride, channels - c, some, to, table, first + k, own, c, shift, kind);
        }
    }
}
#define DEFINE_PACK(name, kind)                                                                    \
    NOINLINE void name(const linear *l, const int8_t *w, int channels, int64_t first, int64_t inputs, \
                       streams *next) {                                                            \
        pack(l, w, channels, first, inputs, next, kind);                                           \
    }
DEFINE_PACK(pack_int8, INT8)
DEFINE_PACK(pack_int4, INT4)
DEFINE_PACK(pack_int4_table, INT4_TABLE)
DEFINE_PACK(pack_int4_steps, INT4_STEPS)

#define DECLARE(i) __m512i a##i, b##i, c##i, d##i;
#define BEGIN(i) a##i = b##i = c##i = d##i = _mm512_set1_epi32(corrections[i * num_groups]);
#define RESUME(i)                                                                                  \
    a##i = _mm512_loadu_si512(sums[i]), b##i = _mm512_loadu_si512(sums[i] + 16);                   \
    c##i = _mm512_loadu_si512(sums[i] + 32), d##i = _mm512_loadu_si512(sums[i] + 48);
#define KEEP(i)                                                                                    \
    _mm512_storeu_si512(sums[i], a##i), _mm512_storeu_si512(sums[i] + 16, b##i);                   \
    _mm512_storeu_si512(sums[i] + 32, c##i), _mm512_storeu_si512(sums[i] + 48, d##i);
/* The empty asm generates no code, but its operand has to be in a register. */
#define MULTIPLY(i)                                                                                \
    {                                                                                              \
        int32_t four;                                                                              \
        memcpy(&four, x + i * stride, 4);                                                          \
        __m512i xs = _mm512_set1_epi32(four);                                                      \
        a##i = _mm512_dpbusd_epi32(a##i, wa, xs), b##i = _mm512_dpbusd_epi32(b##i, wb, xs);        \
        c##i = _mm512_dpbusd_epi32(c##i, wc, xs), d##i = _mm512_dpbusd_epi32(d##i, wd, xs);        \
        __asm__("" : "+v"(a##i), "+v"(b##i), "+v"(c##i), "+v"(d##i));                              \
    }
/* The sums of R rows begin with their `corrections`, `num_groups` apart; with NULL they go on from `sums`. */
#define DEFINE_TILE(R)                                                                             \
    static void tile_##R(const int8_t *x, int64_t stride, const int8_t *w, int64_t inputs,         \
                         const int32_t *corrections, int64_t num_groups, streams *next, int32_t (*sums)[PANEL]) { \
        ROWS_##R(DECLARE)                                                                          \
        if (corrections) { ROWS_##R(BEGIN) }                                                       \
        else { ROWS_##R(RESUME) }                                                                  \
        for (int64_t k = 0; k < inputs; ) {                                                        \
            fetch_streams(next);                                                                   \
            for (const int64_t stop = MIN(k + 64, inputs); k < stop; k += 4, x += 4, w += 4 * PANEL) { \
                __m512i wa = _mm512_load_si512(w), wb = _mm512_load_si512(w + 64);                 \
                __m512i wc = _mm512_load_si512(w + 128), wd = _mm512_load_si512(w + 192);          \
                ROWS_##R(MULTIPLY)                                                                 \
            }                                                                                      \
        }                                                                                          \
        ROWS_##R(KEEP)                                                                             \
    }
DEFINE_TILE(1)
DEFINE_TILE(2)
DEFINE_TILE(4)
DEFINE_TILE(6)

/* A block of tokens by up to 64 channels. */
typedef struct {
    const linear *l;
    int64_t token, num_tokens, column;
    int channels;
    bool is_split; /* two rows of integers per token */
} block;

/* The whole sums of eight channels (hi and lo combined). They have at most 40 bits, so double is exact. */
INLINE __m512d exact_sums(const int32_t *sums, const bool is_split) {
    const __m512d first = _mm512_cvtepi32_pd(_mm256_loadu_si256((const __m256i *)sums));
    if (!is_split) return first;
    const __m512d second = _mm512_cvtepi32_pd(_mm256_loadu_si256((const __m256i *)(sums + PANEL)));
    return _mm512_fmadd_pd(first, _mm512_set1_pd(256), second);
}
INLINE __mmask16 first_lanes(int n) { return n < 16 ? (1u << n) - 1 : 0xffff; }

/* Write the sums of 16 channels from c on, each times its scale, to y. */
INLINE void store_scaled(const block *b, int64_t token, int c, const __m512d sums[2], const __m512d scales[2]) {
    const __mmask16 mask = first_lanes(b->channels - c);
    __m256 low = _mm512_cvtpd_ps(_mm512_mul_pd(sums[0], scales[0]));
    __m256 high = _mm512_cvtpd_ps(_mm512_mul_pd(sums[1], scales[1]));
    __m512 y = _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
    if (b->l->bias) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, b->l->bias + b->column + c));
    _mm512_mask_storeu_ps(b->l->y + (b->token + token) * b->l->out_features + b->column + c, mask, y);
}

/* Write the sums of whole tokens to y. */
INLINE void finish(const block *b, int64_t token, int64_t num_tokens, int32_t (*sums)[PANEL], const bool is_split) {
    for (int c = 0; c < b->channels; c += 16) {
        const __m512 scale = _mm512_maskz_loadu_ps(first_lanes(b->channels - c), scales_from(b->l, b->column) + c);
        const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(scale));
        const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(scale, 1));
        for (int64_t i = 0; i < num_tokens; i++) {
            const int32_t *s = sums[i << is_split] + c;
            const __m512d exact[2] = {exact_sums(s, is_split), exact_sums(s + 8, is_split)};
            const __m512d token_scale = _mm512_set1_pd(b->l->a->token_scales[b->token + token + i]);
            const __m512d both[2] = {_mm512_mul_pd(token_scale, low), _mm512_mul_pd(token_scale, high)};
            store_scaled(b, token + i, c, exact, both);
        }
    }
}

/* The sums of eight channels in a group, hi and lo combined. At most 128 inputs of 16 bits times integers of 8 bits
 * make 30 bits; the sums of unsigned weights wrap around on the way and are right in the end. */
INLINE __m512d group_sums(const int32_t *sums, const bool is_split) {
    const __m256i first = _mm256_loadu_si256((const __m256i *)sums);
    if (!is_split) return _mm512_cvtepi32_pd(first);
    const __m256i second = _mm256_loadu_si256((const __m256i *)(sums + PANEL));
    return _mm512_cvtepi32_pd(_mm256_add_epi32(_mm256_slli_epi32(first, 8), second));
}

/* Add one group's sums times its scales to the totals, less the sum of its activations times the minima. With at most
 * 128 inputs, an integer of 30 bits times a scale of 24 bits is exact in double, as is the other product. So only the
 * additions round, and a fused multiply-add rounds the same. */
INLINE void add_group(const block *b, int64_t token, int64_t num_tokens, int64_t group, int64_t slot,
                      int32_t (*sums)[PANEL], const bool is_split, const bool has_minimum) {
    const double *scales = panel.scales[slot], *minima = panel.minima[slot];
    for (int64_t i = 0; i < num_tokens; i++) {
        const __m512d minus =
            _mm512_set1_pd(has_minimum ? minus_sum(b->l->a, b->token + token + i, group) : 0);
        for (int c = 0; c < PANEL; c += 8) {
            double *total = panel.totals[token + i] + c;
            const __m512d exact = group_sums(sums[i << is_split] + c, is_split), scale = _mm512_loadu_pd(scales + c);
            const __m512d before = _mm512_loadu_pd(total);
            if (has_minimum) {
                const __m512d part = _mm512_fmadd_pd(exact, scale, _mm512_mul_pd(minus, _mm512_loadu_pd(minima + c)));
                _mm512_storeu_pd(total, _mm512_add_pd(before, part));
            } else _mm512_storeu_pd(total, _mm512_fmadd_pd(exact, scale, before));
        }
    }
}
static void add_group_of(const block *b, int64_t token, int64_t num_tokens, int64_t group, int64_t slot,
                         int32_t (*sums)[PANEL]) {
    if (b->l->has_minimum && b->is_split) add_group(b, token, num_tokens, group, slot, sums, true, true);
    else if (b->l->has_minimum) add_group(b, token, num_tokens, group, slot, sums, false, true);
    else if (b->is_split) add_group(b, token, num_tokens, group, slot, sums, true, false);
    else add_group(b, token, num_tokens, group, slot, sums, false, false);
}

static void finish_groups(const block *b) {
    for (int64_t i = 0; i < b->num_tokens; i++) {
        const __m512d token_scale = _mm512_set1_pd(b->l->a->token_scales[b->token + i]);
        const __m512d both[2] = {token_scale, token_scale};
        for (int c = 0; c < b->channels; c += 16) {
            const double *t = panel.totals[i] + c;
            const __m512d totals[2] = {_mm512_loadu_pd(t), _mm512_loadu_pd(t + 8)};
            store_scaled(b, i, c, totals, both);
        }
    }
}

/* The scales and minima of a panel's groups, channel beside channel. */
static void load_scales(const block *b, int64_t group, int64_t group_end) {
    const linear *l = b->l;
    const int64_t n = l->num_groups, per = block_groups(l);
    for (int c = 0; c < b->channels; c++) {
        if (l->kind == INT8) {
            for (int64_t g = group; g < group_end; g++) panel.scales[g - group][c] = l->scale[(b->column + c) * n + g];
            continue;
        }
        float scales[GROUPS_AT_ONCE];
        double minima[GROUPS_AT_ONCE];
        for (int64_t g = group - group % per, stop; g < group_end; g = stop) {
            stop = MIN(g + GROUPS_AT_ONCE, (group_end + per - 1) / per * per);
            find_scales(l, b->column + c, g, stop - g, scales, minima);
            for (int64_t i = MAX(g, group); i < MIN(stop, group_end); i++) {
                panel.scales[i - group][c] = scales[i - g];
                if (l->has_minimum) panel.minima[i - group][c] = minima[i - g];
            }
        }
    }
}

/* Multiply `rows` rows, from the block's row r on, by the packed inputs k to k_end. The panel's scales begin with those
 * of the group `first_scale`. */
static void multiply_rows(const block *b, int64_t r, int rows, int64_t k, int64_t k_end, int64_t first_scale,
                          streams *next) {
    static const int32_t zero = 0;
    const activations *a = b->l->a;
    const int64_t row = b->token * a->rows_per_token + r, size = a->group_size, n = a->num_groups;
    const int64_t token = r >> b->is_split, num_tokens = rows >> b->is_split;
    const bool is_corrected = !b->l->has_minimum;
    const int8_t *x = a->rows + row * a->padded, *w = panel.weights;
    int64_t group = k / size;
    for (int64_t stop; k < k_end; k = stop, group++) {
        stop = MIN((group + 1) * size, k_end);
        const bool begins = k == group * size, ends = stop == (group + 1) * size;
        int32_t(*sums)[PANEL] = panel.sums + (begins && ends ? PANEL_ROWS : r);
        const int32_t *corrections = is_corrected ? a->corrections + row * n + group : &zero;
        (rows == 6 ? tile_6 : rows == 4 ? tile_4 : rows == 2 ? tile_2 : tile_1)(
            x + k, a->padded, w, stop - k, begins ? corrections : NULL, is_corrected ? n : 0, next, sums);
        w += PANEL * (stop - k);
        if (!ends) continue;
        if (b->l->is_grouped) add_group_of(b, token, num_tokens, group, group - first_scale, sums);
        else if (b->is_split) finish(b, token, num_tokens, sums, true);
        else finish(b, token, num_tokens, sums, false);
    }
}

static void linear_panel(const block *b, const int8_t *next_weights) {
    const activations *a = b->l->a;
    const int64_t k_end = a->in_features, num_rows = b->num_tokens * a->rows_per_token;
    const int64_t step = num_rows <= PANEL_FEW_ROWS ? PANEL_INPUTS_FEW : tuning.panel_inputs;
    const int64_t parts = 1 + (num_rows + 5) / 6; /* of a block's work: packing, and tiles */
    const linear *l = b->l;
    const int8_t *w = l->qweight + b->column * l->row_bytes;
    const int64_t per = block_groups(l);
    int64_t first_scale = 0, scales_end = 0;
    const int64_t at_once = MIN(64, a->group_size), calls = (k_end + at_once - 1) / at_once * parts;
    const int64_t stream_bytes = PANEL / STREAMS * l->row_bytes, lines = stream_bytes / 64;
    streams next = {next_weights, stream_bytes, lines, 0, (lines * DUE + calls - 1) / calls, lower_of(l)};
    memset(panel.totals, 0, l->is_grouped ? b->num_tokens * sizeof *panel.totals : 0);
    for (int64_t k = 0, stop; k < k_end; k = stop) {
        stop = MIN(k + step, k_end);
        (l->lower                ? pack_planes
         : l->kind == INT8       ? pack_int8
         : l->kind == INT4       ? pack_int4
         : l->kind == INT4_STEPS ? pack_int4_steps
                                 : pack_int4_table)(l, w + (k >> l->shift), b->channels, k, stop - k, &next);
        const int64_t group_end = l->is_grouped ? (stop + a->group_size - 1) / a->group_size : 0;
        if (group_end > scales_end) {
            first_scale = k / a->group_size / per * per;
            scales_end = MIN(a->num_groups, MAX(first_scale + SCALES_AT_ONCE, group_end));
            load_scales(b, first_scale, scales_end);
        }
        for (int64_t r = 0, rows; r < num_rows; r += rows) {
            rows = num_rows - r >= 6 ? 6 : num_rows - r >= 4 ? 4 : num_rows - r >= 2 ? 2 : 1;
            multiply_rows(b, r, (int)rows, k, stop, first_scale, &next);
        }
    }
    if (l->is_grouped) finish_groups(b);
}

