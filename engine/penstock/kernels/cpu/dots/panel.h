/* Many rows with AVX-VNNI. Part of linear/dots.h.
 *
 * As in linear/vnni.h, a panel of 16 channels by some inputs is packed (a lane per channel, four inputs each) into
 * memory that stays in the L1 cache, and all rows pass over the panel, six at a time: sums need no addition of
 * lanes. */
#pragma once

enum { PANEL = 16, PANEL_INPUTS = 1024, PANEL_ROWS = 192, PANEL_GROUPS = PANEL_INPUTS / 16, HALF = 8, QUARTER = 4 };
static _Thread_local struct {
    int8_t weights[PANEL_INPUTS / 4][PANEL][4] __attribute__((aligned(64)));
    int32_t sums[PANEL_ROWS][PANEL] __attribute__((aligned(64)));  /* of a channel, over blocks of inputs */
    double totals[PANEL_ROWS][PANEL] __attribute__((aligned(64))); /* of groups */
    double scales[PANEL_GROUPS][PANEL] __attribute__((aligned(64))), minima[PANEL_GROUPS][PANEL];
} panel;

/* Some tokens by a panel's channels, of which `channels` are there. */
typedef struct {
    const linear *l;
    int64_t token, num_tokens, column;
    int channels;
} block;

/* 8 channels by 32 inputs -> 8 vectors, which lie PANEL * 4 bytes apart. */
INLINE void pack_square(const step *r, int8_t *to) {
    __m256i pairs[8], fours[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = _mm256_unpacklo_epi64(pairs[i + j], pairs[i + 2 + j]);
            fours[i + 2 * j + 1] = _mm256_unpackhi_epi64(pairs[i + j], pairs[i + 2 + j]);
        }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        _mm256_store_si256((__m256i *)(to + j * PANEL * 4), _mm256_permute2x128_si256(fours[j], fours[4 + j], 0x20));
        _mm256_store_si256((__m256i *)(to + (4 + j) * PANEL * 4),
                           _mm256_permute2x128_si256(fours[j], fours[4 + j], 0x31));
    }
}

/* Packs STEP inputs, of which `inputs` are there, of eight channels. Nothing behind them is read. (What activations of
 * 0 meet does not matter.) */
INLINE void pack_step(const int8_t *const *w, int64_t inputs, code_table table, int8_t *to, const bool is_whole,
                      const int kind) {
    step rows[HALF];
    int8_t last[STEP];
#pragma GCC unroll 8
    for (int j = 0; j < HALF; j++) {
        const int8_t *from = is_whole ? w[j] : memcpy(last, w[j], kind == INT8 ? inputs : inputs / 2);
        rows[j] = kind == INT8 ? load_weights(from) : load_codes(from, table, kind);
    }
    pack_square(rows, to);
}

/* Packs inputs k to k_end. As many bytes from `next` on, of as many channels, are prefetched. */
INLINE void pack(const block *b, int64_t k, int64_t k_end, const int8_t *next, const int kind) {
    const linear *l = b->l;
    const code_table table = load_table(l->table);
    const int64_t bytes = kind == INT8 ? STEP : STEP / 2;
    for (int c = 0; c < PANEL; c += HALF) {
        const int8_t *w[HALF], *ahead[HALF];
        for (int j = 0; j < HALF; j++) {
            w[j] = l->qweight + (b->column + MIN(c + j, b->channels - 1)) * l->row_bytes + k * bytes / STEP;
            ahead[j] = next + (c + j) * l->row_bytes;
        }
        int8_t *to = panel.weights[0][c];
        for (int64_t left = k_end - k; left > 0; left -= STEP, to += PANEL * STEP) {
            if (left >= STEP) pack_step(w, STEP, table, to, true, kind);
            else pack_step(w, left, table, to, false, kind);
            for (int j = 0; j < HALF; j++) {
                if (left / STEP % 2 == 0) __builtin_prefetch(ahead[j]);
                w[j] += bytes, ahead[j] += bytes;
            }
        }
    }
}
NOINLINE void pack_int8(const block *b, int64_t k, int64_t k_end, const int8_t *next) { pack(b, k, k_end, next, INT8); }
NOINLINE void pack_int4(const block *b, int64_t k, int64_t k_end, const int8_t *next) { pack(b, k, k_end, next, INT4); }
NOINLINE void pack_table(const block *b, int64_t k, int64_t k_end, const int8_t *next) {
    pack(b, k, k_end, next, INT4_TABLE);
}

#define CLEAR_PANEL(i, unused)                                                                     \
    lanes a##i##0 = is_first ? no_lanes() : sums[i][0], a##i##1 = is_first ? no_lanes() : sums[i][1];
#define MULTIPLY_PANEL(i, unused)                                                                  \
    {                                                                                              \
        int32_t four;                                                                              \
        memcpy(&four, x + i * padded, 4);                                                          \
        const step inputs = _mm256_set1_epi32(four);                                               \
        a##i##0 = dot(a##i##0, first, inputs), a##i##1 = dot(a##i##1, second, inputs);             \
        IN_REGISTER(a##i##0);                                                                      \
        IN_REGISTER(a##i##1);                                                                      \
    }
#define STORE_PANEL(i, unused) sums[i][0] = a##i##0, sums[i][1] = a##i##1;
/* The sums of R rows over `inputs` packed inputs, added to `sums` unless they are the first. */
#define DEFINE_PANEL_SUMS(R)                                                                       \
    NOINLINE void panel_sums_##R(const int8_t *x, int64_t padded, const int8_t *w, int64_t inputs, bool is_first, \
                                 lanes (*sums)[2]) {                                               \
        ROWS_##R(CLEAR_PANEL, )                                                                    \
        for (const int8_t *end = x + inputs; x < end; x += 4, w += PANEL * 4) {                    \
            const step first = load_step(w), second = load_step(w + STEP);                         \
            ROWS_##R(MULTIPLY_PANEL, )                                                             \
        }                                                                                          \
        ROWS_##R(STORE_PANEL, )                                                                    \
    }
DEFINE_PANEL_SUMS(1)
DEFINE_PANEL_SUMS(2)
DEFINE_PANEL_SUMS(4)
DEFINE_PANEL_SUMS(6)

/* Four channels' sums as doubles. */
INLINE vec4 quarter_of(const int32_t *sums) {
    signed4 s;
    memcpy(&s, sums, sizeof s);
    return __builtin_convertvector(s, vec4);
}
INLINE vec4 load4(const double *from) {
    vec4 v;
    memcpy(&v, from, sizeof v);
    return v;
}

/* Adds a group's sums of some rows to the totals of their tokens, from the block's token t on. `at` is the group's
 * place in the block of inputs. */
INLINE void add_group(const block *b, int64_t t, int tokens, int64_t group, int64_t at, lanes (*sums)[2],
                      const bool is_split) {
    for (int i = 0; i < tokens; i++) {
        const int32_t minus = minus_sum(b->l->a, b->token + t + i, group);
        int32_t exact[PANEL] __attribute__((aligned(32)));
        for (int half = 0; half < 2; half++) {
            lanes s = is_split ? merge_rows(sums[2 * i][half], sums[2 * i + 1][half]) : sums[i][half];
            if (!b->l->has_minimum) s = plus(s, _mm256_set1_epi32(minus));
            _mm256_store_si256((__m256i *)(exact + half * HALF), s);
        }
        for (int c = 0; c < PANEL; c += QUARTER) {
            vec4 part = quarter_of(exact + c) * load4(panel.scales[at] + c);
            if (b->l->has_minimum) part += (double)minus * load4(panel.minima[at] + c);
            const vec4 total = load4(panel.totals[t + i] + c) + part;
            memcpy(panel.totals[t + i] + c, &total, sizeof total);
        }
    }
}

static void find_panel_scales(const block *b, int64_t group, int64_t group_end) {
    const linear *l = b->l;
    const int64_t per = block_groups(l), begin = group - group % per;
    for (int c = 0; c < PANEL; c++) {
        float scales[GROUPS_AT_ONCE];
        double minima[GROUPS_AT_ONCE];
        const int64_t column = b->column + MIN(c, b->channels - 1);
        const int64_t count = (group_end - begin + per - 1) / per * per;
        if (l->kind == INT8) memcpy(scales, l->scale + column * l->num_groups + begin, count * sizeof(float));
        else find_scales(l, column, begin, count, scales, minima);
        for (int64_t g = group; g < group_end; g++) {
            panel.scales[g - group][c] = scales[g - begin];
            if (l->has_minimum) panel.minima[g - group][c] = minima[g - begin];
        }
    }
}

INLINE void panel_sums(const int8_t *x, int64_t padded, const int8_t *w, int64_t inputs, bool is_first, int rows,
                       lanes (*sums)[2]) {
    (rows == 6 ? panel_sums_6 : rows == 4 ? panel_sums_4 : rows == 2 ? panel_sums_2 : panel_sums_1)(
        x, padded, w, inputs, is_first, sums);
}

/* Rows r to r + rows meet the packed inputs k to k_end. */
static void multiply_rows(const block *b, int64_t r, int rows, int64_t k, int64_t k_end) {
    const activations *a = b->l->a;
    const int8_t *x = a->rows + (b->token * a->rows_per_token + r) * a->padded, *w = panel.weights[0][0];
    if (!b->l->is_grouped) {
        panel_sums(x + k, a->padded, w, (k_end - k + 3) / 4 * 4, k == 0, rows, (lanes(*)[2])panel.sums[r]);
        return;
    }
    const int64_t size = a->group_size;
    for (int64_t at = 0; k < k_end; at++, k += size, w += size * PANEL) {
        lanes sums[ROWS][2];
        panel_sums(x + k, a->padded, w, size, true, rows, sums);
        if (a->rows_per_token == 2) add_group(b, r / 2, rows / 2, k / size, at, sums, true);
        else add_group(b, r, rows, k / size, at, sums, false);
    }
}

/* Writes the results of a token, the block's t-th, from its sums or its totals. */
static void finish_token(const block *b, int64_t t) {
    const linear *l = b->l;
    const activations *a = l->a;
    const int64_t token = b->token + t, per_token = a->rows_per_token;
    const int32_t *corrections = a->corrections + token * per_token;
    float *y = l->y + token * l->out_features + b->column;
    for (int c = 0; c < b->channels; c++) {
        double value = panel.totals[t][c] * (double)a->token_scales[token];
        if (!l->is_grouped) {
            int64_t sum = 0;
            for (int64_t part = 0; part < per_token; part++)
                sum = sum * 256 + (int32_t)((uint32_t)panel.sums[t * per_token + part][c] +
                                            (uint32_t)corrections[part]);
            value = (double)sum * ((double)a->token_scales[token] * (double)l->scale[b->column + c]);
        }
        y[c] = l->bias ? (float)value + l->bias[b->column + c] : (float)value;
    }
}

static void linear_panel(const block *b, const int8_t *next_panel) {
    const linear *l = b->l;
    const activations *a = l->a;
    const int64_t k_end = a->in_features, num_rows = b->num_tokens * a->rows_per_token;
    const int64_t at_once = l->is_grouped ? PANEL_INPUTS / a->group_size * a->group_size : PANEL_INPUTS;
    const int8_t *w = l->qweight + b->column * l->row_bytes;
    if (l->is_grouped) memset(panel.totals, 0, b->num_tokens * sizeof *panel.totals);
    for (int64_t k = 0, stop; k < k_end; k = stop) {
        stop = MIN(k + at_once, k_end);
        (l->kind == INT8 ? pack_int8 : l->kind == INT4 ? pack_int4 : pack_table)(
            b, k, stop, stop < k_end ? w + (stop >> l->shift) : next_panel);
        if (l->is_grouped) find_panel_scales(b, k / a->group_size, stop / a->group_size);
        for (int64_t r = 0, rows; r < num_rows; r += rows) {
            rows = num_rows - r >= 6 ? 6 : num_rows - r >= 4 ? 4 : num_rows - r >= 2 ? 2 : 1;
            multiply_rows(b, r, (int)rows, k, stop);
        }
    }
    for (int64_t t = 0; t < b->num_tokens; t++) finish_token(b, t);
}

/* Computes all channels. */
static int64_t linear_panels(const linear *l, int64_t column, int64_t column_end) {
    const activations *a = l->a;
    const int64_t tokens = PANEL_ROWS / a->rows_per_token;
    for (; column < column_end; column += PANEL) {
        const int64_t next = next_column(l, column + PANEL);
        for (int64_t t = 0; t < a->num_tokens; t += tokens) {
            const block b = {l, t, MIN(tokens, a->num_tokens - t), column, (int)MIN(PANEL, column_end - column)};
            linear_panel(&b, l->qweight + (t + tokens < a->num_tokens ? column : next) * l->row_bytes);
        }
    }
    return column_end;
}
