/* Several tokens by pmaddwd on vectors of 256 bits. Part of int16.h.
 *
 * A panel of 16 channels by some inputs is packed as words (a lane per channel, two inputs each) into memory that stays
 * in the L1 cache, and all tokens pass over the panel, up to six at a time: twelve sums, two vectors of weights and one
 * of activations fill the 16 registers. Weights are widened once for all tokens, sums need no addition of lanes, and
 * the loop has little but pmaddwd and additions, which are the limit. */
#pragma once

enum {
    PANEL = 16,
    HALF = 8,
    PACKED = 32, /* inputs that are packed at once */
    PANEL_INPUTS = 512, /* whose sums fit 32 bits: 512 * 32512 * 128 */
    PANEL_TOKENS = 192,
    PANEL_ROWS = 6,
    PANEL_GROUPS = PANEL_INPUTS / 16,
    FETCHED = 8, /* inputs of a tile, after which lines are prefetched */
    PANEL_FROM_TOKENS = 4 /* with fewer tokens, packing costs more than it saves */
};
static _Thread_local struct {
    int16_t words[PANEL_INPUTS / 2][PANEL][2] __attribute__((aligned(64)));
    double totals[PANEL_TOKENS][PANEL] __attribute__((aligned(64)));
    double scales[PANEL_GROUPS][PANEL] __attribute__((aligned(64)));
    double minima[PANEL_GROUPS][PANEL] __attribute__((aligned(64)));
} panel;

/* The lines of the weights that are needed next, of 16 channels. Tiles prefetch them evenly, into the L2 cache: in the
 * L1 cache, channels that lie 2 or 4 KB apart would take each other's place. */
typedef struct {
    const int8_t *at;
    int64_t row_bytes, in_row, left; /* in_row: lines left of this channel; left: of all channels */
    int64_t per_row, at_once;
} line_fetch;
INLINE void fetch_some(line_fetch *f) {
    for (int64_t i = 0; i < f->at_once && f->left > 0; i++, f->left--) {
        _mm_prefetch(f->at, _MM_HINT_T1);
        f->at += 64;
        if (--f->in_row == 0) f->in_row = f->per_row, f->at += f->row_bytes - 64 * f->per_row;
    }
}

/* Some tokens by a panel's channels and the inputs k to k_end. */
typedef struct {
    const linear *l;
    int64_t token, num_tokens, column, k, k_end;
    int channels;
    line_fetch fetch;
} block;

/* 32 weights as bytes: INT8 in turns 0, 2, 1, 3 within four, codes in their order. So the first and the third of four
 * are inputs whose activations lie side by side (those of codes as `words`). */
INLINE __m256i bytes_of(const int8_t *w, const uint8_t *table, const int kind) {
    if (kind == INT8) {
        const __m128i turns = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
        return _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)w), _mm256_broadcastsi128_si256(turns));
    }
    const __m256i pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)w));
    const __m256i codes = _mm256_and_si256(_mm256_or_si256(pairs, _mm256_slli_epi16(pairs, 4)), _mm256_set1_epi8(15));
    if (kind == INT4) return codes;
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), codes);
}
/* One of each two bytes as a word: pmaddubsw multiplies by 1 and 0, on other ports than shuffles and shifts. */
INLINE __m256i widened(__m256i bytes, const int which, const int kind) {
    const __m256i ones = _mm256_set1_epi16(which ? 0x100 : 1);
    return kind == INT8 ? _mm256_maddubs_epi16(ones, bytes) : _mm256_maddubs_epi16(bytes, ones);
}

/* Eight channels by 32 inputs -> 16 vectors of words, which lie PANEL * 4 bytes apart. The words of codes lie as those
 * of activations: even inputs before odd ones, in 32 inputs, or in each 16 where these are a group (`is_fine`). */
INLINE void pack_square(const __m256i *r, int16_t *to, const int kind, const bool is_fine) {
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
    const int per_unit = kind == INT8 ? 2 : 1, odd = kind == INT8 ? 1 : is_fine ? 4 : 8; /* where a unit's vectors lie */
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        const __m256i unit = _mm256_permute2x128_si256(fours[j % 4], fours[4 + j % 4], j < 4 ? 0x20 : 0x31);
        __m256i *at = (__m256i *)(to + (j * per_unit + (is_fine ? j / 4 * 4 : 0)) * 2 * PANEL);
        _mm256_store_si256(at, widened(unit, 0, kind));
        _mm256_store_si256(at + odd * 2, widened(unit, 1, kind));
    }
}

/* Packs 32 inputs of eight channels, from input k on. */
INLINE void pack_inputs(const int8_t *const *w, int64_t k, const uint8_t *table, int16_t *to, const int kind,
                        const bool is_fine) {
    __m256i rows[HALF];
#pragma GCC unroll 8
    for (int j = 0; j < HALF; j++) rows[j] = bytes_of(w[j] + (kind == INT8 ? k : k / 2), table, kind);
    pack_square(rows, to, kind, is_fine);
}
/* The last few inputs of INT8, filled up with zeros. Nothing behind the weights is read. */
NOINLINE void pack_last(const int8_t *const *w, int64_t k, int64_t inputs, int16_t *to) {
    int8_t last[HALF][PACKED] = {0};
    const int8_t *rows[HALF];
    for (int j = 0; j < HALF; j++) rows[j] = memcpy(last[j], w[j] + k, inputs);
    pack_inputs(rows, 0, NULL, to, INT8, false);
}
INLINE void pack(const block *b, const int kind, const bool is_fine) {
    const linear *l = b->l;
    for (int c = 0; c < PANEL; c += HALF) {
        const int8_t *w[HALF];
        for (int j = 0; j < HALF; j++) w[j] = l->qweight + (b->column + MIN(c + j, b->channels - 1)) * l->row_bytes;
        int16_t *to = panel.words[0][c];
        int64_t k = b->k;
        for (; b->k_end - k >= PACKED; k += PACKED, to += PACKED * PANEL) pack_inputs(w, k, l->table, to, kind, is_fine);
        if (k < b->k_end) pack_last(w, k, b->k_end - k, to);
    }
}
NOINLINE void pack_int8(const block *b) { pack(b, INT8, false); }
NOINLINE void pack_int4(const block *b) { pack(b, INT4, false); }
NOINLINE void pack_table(const block *b) { pack(b, INT4_TABLE, false); }
NOINLINE void pack_fine_int4(const block *b) { pack(b, INT4, true); }
NOINLINE void pack_fine_table(const block *b) { pack(b, INT4_TABLE, true); }

typedef struct {
    bool is_grouped, has_corrections, has_minimum;
} sum_kind;
/* Adds a group's sums of a token and eight channels to their totals. A sum times a scale is exact in double, so that
 * only the additions of groups round. */
INLINE void add_sums_of(sum_kind kind, __m256i sums, int32_t minus, const double *scales, const double *minima,
                        double *totals) {
    if (kind.has_corrections) sums = _mm256_add_epi32(sums, _mm256_set1_epi32(minus));
    const __m128i quarters[2] = {_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1)};
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        vec4 part = (vec4)_mm256_cvtepi32_pd(quarters[i]);
        if (kind.is_grouped) part = part * (vec4)_mm256_load_pd(scales + 4 * i);
        if (kind.has_minimum) part += (double)minus * (vec4)_mm256_load_pd(minima + 4 * i);
        _mm256_store_pd(totals + 4 * i, _mm256_load_pd(totals + 4 * i) + (__m256d)part);
    }
}

typedef int32_t __attribute__((may_alias, aligned(2))) two_words; /* two activations */
#define PANEL_1(DO) DO(0)
#define PANEL_2(DO) PANEL_1(DO) DO(1)
#define PANEL_3(DO) PANEL_2(DO) DO(2)
#define PANEL_4(DO) PANEL_3(DO) DO(3)
#define PANEL_5(DO) PANEL_4(DO) DO(4)
#define PANEL_6(DO) PANEL_5(DO) DO(5)
#define CLEAR_TOKEN(i) __m256i a##i = {}, b##i = {};
#define MEET_TOKEN(i) ADD_TWO_CHANNELS("vpbroadcastd", a##i, b##i, first, second, *(const two_words *)(x + i * padded))
#define ADD_TOKEN(i)                                                                               \
    add_sums_of(kind, a##i, minus[i * groups], panel.scales[g], panel.minima[g], totals[i]);       \
    add_sums_of(kind, b##i, minus[i * groups], panel.scales[g] + HALF, panel.minima[g] + HALF, totals[i] + HALF);
/* R tokens, from the block's t on, by a panel. */
#define DEFINE_PANEL_TILE(R)                                                                       \
    NOINLINE void panel_tile_##R(block *b, int64_t t) {                                            \
        const linear *l = b->l;                                                                    \
        const int64_t padded = l->a->padded, groups = l->a->num_groups;                            \
        const int64_t inputs = b->k_end - b->k, size = l->is_grouped ? l->a->group_size : (inputs + 15) / 16 * 16; \
        const int16_t *x = l->a->rows + (b->token + t) * padded + b->k, *w = panel.words[0][0];    \
        const int32_t *minus = l->a->corrections + (b->token + t) * groups + (l->is_grouped ? b->k / size : 0); \
        double(*totals)[PANEL] = panel.totals + t;                                                 \
        const sum_kind kind = {l->is_grouped, l->kind != INT8 && !l->has_minimum, l->has_minimum}; \
        for (int64_t g = 0; g * size < inputs; g++, minus++) {                                     \
            PANEL_##R(CLEAR_TOKEN)                                                                 \
            for (const int16_t *end = x + size; x < end;) {                                        \
                fetch_some(&b->fetch);                                                             \
                for (const int16_t *stop = x + FETCHED; x < stop; x += 2, w += 2 * PANEL) {        \
                    const __m256i first = load_integers(w), second = load_integers(w + PANEL);     \
                    PANEL_##R(MEET_TOKEN)                                                          \
                }                                                                                  \
            }                                                                                      \
            PANEL_##R(ADD_TOKEN)                                                                   \
        }                                                                                          \
    }
DEFINE_PANEL_TILE(1)
DEFINE_PANEL_TILE(2)
DEFINE_PANEL_TILE(3)
DEFINE_PANEL_TILE(4)
DEFINE_PANEL_TILE(5)
DEFINE_PANEL_TILE(6)

static void find_panel_scales(const block *b, int64_t group, int64_t group_end) {
    const linear *l = b->l;
    const int64_t per = block_groups(l), begin = group - group % per;
    const int64_t count = (group_end - begin + per - 1) / per * per;
    for (int c = 0; c < PANEL; c++) {
        float scales[GROUPS_AT_ONCE];
        double minima[GROUPS_AT_ONCE];
        const int64_t column = b->column + MIN(c, b->channels - 1);
        if (l->kind == INT8) memcpy(scales, l->scale + column * l->num_groups + begin, count * sizeof(float));
        else find_scales(l, column, begin, count, scales, minima);
        for (int64_t g = group; g < group_end; g++) {
            panel.scales[g - group][c] = scales[g - begin];
            if (l->has_minimum) panel.minima[g - group][c] = minima[g - begin];
        }
    }
}

static void compute_block(block *b) {
    static void (*const tiles[])(block *, int64_t) = {NULL,         panel_tile_1, panel_tile_2, panel_tile_3,
                                                      panel_tile_4, panel_tile_5, panel_tile_6};
    const linear *l = b->l;
    const int64_t num_tiles = (b->num_tokens + PANEL_ROWS - 1) / PANEL_ROWS;
    if (l->is_fine) (l->kind == INT4 ? pack_fine_int4 : pack_fine_table)(b);
    else (l->kind == INT8 ? pack_int8 : l->kind == INT4 ? pack_int4 : pack_table)(b);
    if (l->is_grouped) find_panel_scales(b, b->k / l->a->group_size, b->k_end / l->a->group_size);
    for (int64_t i = 0, t = 0, end; i < num_tiles; i++, t = end) {
        end = (i + 1) * b->num_tokens / num_tiles;
        tiles[end - t](b, t);
    }
}

/* Writes the results of a panel's channels. */
static void finish_block(const block *b) {
    const linear *l = b->l;
    const float *bias = l->bias ? l->bias + b->column : NULL;
    double scales[PANEL];
    for (int c = 0; c < PANEL; c++) scales[c] = l->is_grouped ? 1.0 : l->scale[b->column + MIN(c, b->channels - 1)];
    for (int64_t t = 0; t < b->num_tokens; t++) {
        const double token_scale = l->a->token_scales[b->token + t];
        float y[PANEL], *to = l->y + (b->token + t) * l->out_features + b->column;
        for (int c = 0; c < PANEL; c++) y[c] = (float)(panel.totals[t][c] * (token_scale * scales[c]));
        for (int c = 0; bias && c < b->channels; c++) y[c] += bias[c];
        /* A copy of a known size is no call. */
        if (b->channels == PANEL) memcpy(to, y, sizeof y);
        else memcpy(to, y, b->channels * sizeof *y);
    }
}

/* How many of `lines` are prefetched at once, so that the tiles of some tokens by `inputs` prefetch all of them. */
INLINE int64_t lines_at_once(int64_t lines, int64_t inputs, int64_t num_tokens) {
    const int64_t times = (num_tokens + PANEL_ROWS - 1) / PANEL_ROWS * ((inputs + FETCHED - 1) / FETCHED);
    return (lines + times - 1) / times;
}

/* The lines of a block's weights at `at`, spread over the tiles of `num_tokens`. */
static line_fetch lines_from(const linear *l, const int8_t *at, int64_t inputs, int64_t num_tokens) {
    const int64_t per_row = ((inputs >> l->shift) + 63) / 64, lines = PANEL * per_row;
    return (line_fetch){at, l->row_bytes, per_row, lines, per_row, lines_at_once(lines, inputs, num_tokens)};
}

/* Likewise, the block's share of what is read after these weights: the codes of as many channels. */
static line_fetch lines_after(const block *b) {
    const linear *l = b->l;
    const int64_t bytes = PANEL * l->after_bytes, inputs = l->a->in_features;
    const int64_t begin = bytes * b->k / inputs / 64, lines = bytes * b->k_end / inputs / 64 - begin;
    return (line_fetch){l->after + 64 * begin, 0, lines, lines, lines,
                        lines_at_once(lines, b->k_end - b->k, b->num_tokens)};
}

/* Some tokens by the channels of a panel. `next` is where the next panel's weights lie. */
static void compute_panel(block *b, const int8_t *next) {
    const linear *l = b->l;
    const int64_t k_end = l->a->in_features, unit = l->is_fine ? PACKED : l->is_grouped ? l->a->group_size : 64;
    const int64_t num_blocks = (k_end + PANEL_INPUTS - 1) / PANEL_INPUTS;
    const int64_t even = (k_end + num_blocks - 1) / num_blocks; /* blocks of about the same size */
    const int64_t at_once = MIN((even + unit - 1) / unit * unit, PANEL_INPUTS / unit * unit);
    memset(panel.totals, 0, b->num_tokens * sizeof *panel.totals);
    for (b->k = 0; b->k < k_end; b->k = b->k_end) {
        b->k_end = MIN(b->k + at_once, k_end);
        const bool is_last = b->k_end == k_end;
        const int8_t *at = is_last ? next : l->qweight + b->column * l->row_bytes + (b->k_end >> l->shift);
        const int64_t inputs = MIN(at_once, is_last ? k_end : k_end - b->k_end);
        b->fetch = l->after ? lines_after(b) : lines_from(l, at, inputs, b->num_tokens);
        compute_block(b);
    }
    finish_block(b);
}

/* Computes all channels. */
static int64_t linear_panels(const linear *l, int64_t column, int64_t column_end) {
    const int64_t num_tokens = l->a->num_tokens, parts = (num_tokens + PANEL_TOKENS - 1) / PANEL_TOKENS;
    for (; column < column_end; column += PANEL) {
        const int64_t next = next_column(l, column + PANEL);
        for (int64_t i = 0, t = 0, end; i < parts; i++, t = end) {
            end = (i + 1) * num_tokens / parts;
            block b = {.l = l, .token = t, .num_tokens = end - t, .column = column,
                       .channels = (int)MIN(PANEL, column_end - column)};
            compute_panel(&b, l->qweight + (i + 1 < parts ? column : next) * l->row_bytes);
        }
    }
    return column_end;
}
