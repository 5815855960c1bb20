/* Several tokens with AVX512-VNNI, a scale for each channel. Part of vnni.h.
 *
 * Activations lie in tiles of 16 rows (row_tiles.h): a vector has four inputs of each row. A channel's weights have the
 * same four inputs in a word, as they lie in memory, which is broadcast to all lanes; so a lane is a row. No weight is
 * packed, no lanes are added up, and each weight comes from memory once for a panel of up to 64 rows.
 *
 * The rows are unsigned (`flip`), and the sums of the weights are found on the way:
 * sum(w * x) = sum(w * (x + 128)) - 128 * sum(w), modulo 2^32. */
#pragma once

enum {
    LANE_TILES = 4,        /* of a panel, at most */
    LANE_CHANNELS = 12,    /* of a strip, at most: 24 sums of channels and tiles fit into the registers */
    LANE_INPUTS = 2048,    /* whose 4-bit codes or planes become INT8 at a time */
    LANES_LONG = 8192,     /* inputs of which two tiles fill a part of the L2 cache, and four would fill all of it */
    LANES_EXPANDED = 64    /* rows for which weights that have to become INT8 are worth it */
};

/* Some channels by a panel's tiles. */
typedef struct {
    const linear *l;
    int64_t column, tile; /* the first channel and the first tile */
    int channels, tiles;
    const int8_t *w; /* INT8, `stride` bytes from a channel to the next */
    int64_t stride;
    const int8_t *next; /* weights to prefetch, of as many channels; NULL: none */
    int64_t next_lower; /* from there to the lower plane; 0: there is none, or it is no stream */
    int32_t *sums;      /* of the weights, which the first panel finds; NULL: they are known */
    __m512i parts[LANE_CHANNELS][LANE_TILES];
} lane_strip;

#define EACH_LANE(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define RESUME_LANE(j)                                                                             \
    __m512i a##j = begins || j >= C ? zero : s->parts[j][0], b##j = begins || j >= C || V < 2 ? zero : s->parts[j][1]; \
    __m512i c##j = begins || j >= C || V < 3 ? zero : s->parts[j][2];                              \
    __m512i d##j = begins || j >= C || V < 4 ? zero : s->parts[j][3];
#define KEEP_LANE(j)                                                                               \
    if (j < C) {                                                                                   \
        s->parts[j][0] = a##j;                                                                     \
        if (V > 1) s->parts[j][1] = b##j;                                                          \
        if (V > 2) s->parts[j][2] = c##j;                                                          \
        if (V > 3) s->parts[j][3] = d##j;                                                          \
    }
/* An empty asm generates nothing; an operand of it has to be in a register. */
#define MULTIPLY_LANE(sum, inputs)                                                                 \
    {                                                                                              \
        sum = _mm512_dpbusd_epi32(sum, inputs, ws);                                                \
        __asm__("" : "+v"(sum));                                                                   \
    }
#define MULTIPLY_WORD(j)                                                                           \
    if (j < C) {                                                                                   \
        int32_t four;                                                                              \
        memcpy(&four, w + j * stride, 4);                                                          \
        const __m512i ws = _mm512_set1_epi32(four);                                                \
        MULTIPLY_LANE(a##j, x0)                                                                    \
        if (V > 1) MULTIPLY_LANE(b##j, x1)                                                         \
        if (V > 2) MULTIPLY_LANE(c##j, x2)                                                         \
        if (V > 3) MULTIPLY_LANE(d##j, x3)                                                         \
    }
/* With an asm for the address, GCC does not keep an address for each channel. */
INLINE void fetch_strip(const int8_t *next, int64_t stride, int64_t lower, int channels) {
    for (int j = 0; j < channels; j++, next += stride) {
        __asm__("" : "+r"(next));
        _mm_prefetch(next, _MM_HINT_T1);
        if (lower) _mm_prefetch(next + lower, _MM_HINT_T1);
    }
}

/* Adds the sums of the weights, channel by channel: beside the products there are no registers for them. */
static void add_weights(lane_strip *s, int64_t inputs) {
    const __m512i ones = _mm512_set1_epi8(1);
    for (int j = 0; j < s->channels; j++) {
        const int8_t *w = s->w + j * s->stride;
        __m512i a = {}, b = {}, c = {}, d = {};
        int64_t k = 0;
        for (; k + 256 <= inputs; k += 256) {
            a = _mm512_dpbusd_epi32(a, ones, _mm512_loadu_si512(w + k));
            b = _mm512_dpbusd_epi32(b, ones, _mm512_loadu_si512(w + k + 64));
            c = _mm512_dpbusd_epi32(c, ones, _mm512_loadu_si512(w + k + 128));
            d = _mm512_dpbusd_epi32(d, ones, _mm512_loadu_si512(w + k + 192));
        }
        for (; k < inputs; k += 64) a = _mm512_dpbusd_epi32(a, ones, _mm512_loadu_si512(w + k));
        a = _mm512_add_epi32(_mm512_add_epi32(a, b), _mm512_add_epi32(c, d));
        s->sums[j] += _mm512_reduce_add_epi32(a);
    }
}

/* V tiles of rows, `tile` bytes apart from x on, by C channels, over `inputs` inputs, a multiple of 64. */
INLINE void lanes(lane_strip *s, const int8_t *x, int64_t tile, int64_t inputs, bool begins, const int V, const int C) {
    const __m512i zero = {};
    const int8_t *w = s->w, *next = s->next;
    const int64_t stride = s->stride, next_stride = s->l->row_bytes, next_lower = s->next_lower;
    const int shift = s->l->shift;
    EACH_LANE(RESUME_LANE)
    for (int64_t k = 0; k < inputs; k += 64) {
        if (next && (k >> shift) % 64 == 0) fetch_strip(next + (k >> shift), next_stride, next_lower, C);
        for (int i = 0; i < 16; i++, w += 4, x += 64) {
            const __m512i x0 = _mm512_load_si512(x), x1 = V > 1 ? _mm512_load_si512(x + tile) : zero;
            const __m512i x2 = V > 2 ? _mm512_load_si512(x + 2 * tile) : zero;
            const __m512i x3 = V > 3 ? _mm512_load_si512(x + 3 * tile) : zero;
            EACH_LANE(MULTIPLY_WORD)
        }
    }
    EACH_LANE(KEEP_LANE)
}
typedef void (*lanes_fn)(lane_strip *, const int8_t *, int64_t, int64_t, bool);
#define DEFINE_LANES(V, C)                                                                         \
    NOINLINE void lanes_##V##_##C(lane_strip *s, const int8_t *x, int64_t tile, int64_t inputs, bool begins) { \
        lanes(s, x, tile, inputs, begins, V, C);                                                   \
    }
#define DEFINE_LANES_OF(V, C) DEFINE_LANES(V, C) DEFINE_LANES(V, 4) DEFINE_LANES(V, 1)
DEFINE_LANES_OF(1, 12)
DEFINE_LANES_OF(2, 12)
DEFINE_LANES_OF(3, 8)
DEFINE_LANES_OF(4, 6)
/* By the number of tiles: the functions for most channels, for four, and for one. */
static const lanes_fn LANES_FNS[LANE_TILES][3] = {{lanes_1_12, lanes_1_4, lanes_1_1},
                                                  {lanes_2_12, lanes_2_4, lanes_2_1},
                                                  {lanes_3_8, lanes_3_4, lanes_3_1},
                                                  {lanes_4_6, lanes_4_4, lanes_4_1}};
static const int MOST_LANE_CHANNELS[LANE_TILES] = {12, 12, 8, 6};
_Static_assert(LANES_EXPANDED <= LANE_TILES * TILE,
               "codes in steps: panels of one product have strips of the same channels");

/* How many channels are computed together where so many are left. */
INLINE int lane_channels(int tiles, int64_t left) {
    const int most = MOST_LANE_CHANNELS[tiles - 1];
    return left >= most ? most : left >= 4 ? 4 : 1;
}

/* The weights of a strip's channels over some inputs as INT8. What lies behind them up to a multiple of 64 meets
 * activations of 0 and counts in `sums`, too. */
static _Thread_local int8_t lane_room[LANE_CHANNELS][LANE_INPUTS] __attribute__((aligned(64)));
NOINLINE void fill_lane_room(const lane_strip *s, int64_t k, int64_t inputs) {
    const linear *l = s->l;
    const channel_steps *own = own_steps();
    int8_t *to = lane_room[0];
    for (int j = 0; j < s->channels; j++, to += LANE_INPUTS) {
        memset(to + inputs, 0, -inputs & 63);
        if (l->lower) join_weights(l, s->column + j, k, inputs, to);
        else if (l->kind == INT4_STEPS) expand_steps(l, s->column + j, own->at[j], k, inputs, to);
        else memcpy(to, l->qweight + (s->column + j) * l->row_bytes + k, inputs);
    }
}

/* Multiplies all inputs. INT8 is used as it lies, apart from the last inputs, which fill no 64. */
static void multiply_lanes(lane_strip *s) {
    const linear *l = s->l;
    const activations *a = l->a;
    const bool is_plain = l->kind == INT8 && !l->lower;
    const int64_t k_end = a->in_features, whole = is_plain ? k_end / 64 * 64 : 0, tile = TILE * a->padded;
    const int8_t *x = a->rows + s->tile * tile, *next = s->next;
    const int most = MOST_LANE_CHANNELS[s->tiles - 1];
    const lanes_fn multiply = LANES_FNS[s->tiles - 1][s->channels == most ? 0 : s->channels == 4 ? 1 : 2];
    if (s->sums) memset(s->sums, 0, s->channels * sizeof *s->sums);
    if (whole) {
        s->w = l->qweight + s->column * l->row_bytes, s->stride = l->row_bytes;
        if (s->sums) add_weights(s, whole);
        multiply(s, x, tile, whole, true);
    }
    for (int64_t k = whole, stop; k < k_end; k = stop) {
        stop = MIN(k + LANE_INPUTS, k_end);
        fill_lane_room(s, k, stop - k);
        s->w = lane_room[0], s->stride = LANE_INPUTS, s->next = next && !is_plain ? next + (k >> l->shift) : NULL;
        if (s->sums) add_weights(s, (stop - k + 63) / 64 * 64);
        multiply(s, x + k * TILE, tile, (stop - k + 63) / 64 * 64, k == 0);
    }
}

/* Eight channels' values for eight tokens -> eight tokens' values for eight channels. */
INLINE void transpose_eight(__m256 r[8]) {
    __m256 pairs[8], fours[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(r[i], r[i + 1]), pairs[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0x44);
            fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(fours[i], fours[4 + i], 0x20);
        r[4 + i] = _mm256_permute2f128_ps(fours[i], fours[4 + i], 0x31);
    }
}

/* Writes the results of eight tokens of a tile, the first of which is `token`, to y, for up to eight channels from c
 * on. `half` of the tile's lanes has their sums, or both halves do: hi and lo. `sums` are those of the channels'
 * weights. */
INLINE void store_eight(const lane_strip *s, int v, int c, int half, int64_t token, const int32_t *sums,
                        const float *scales, const bool is_split) {
    const linear *l = s->l;
    const int channels = MIN(8, s->channels - c);
    const int64_t there = MIN(8, l->a->num_tokens - token), column = s->column + c;
    const __m512d of_tokens = _mm512_cvtps_pd(_mm256_maskz_loadu_ps(first_lanes((int)there),
                                                                    l->a->token_scales + token));
    __m256 y[8];
    for (int j = 0; j < 8; j++) {
        if (j >= channels) {
            y[j] = _mm256_setzero_ps();
            continue;
        }
        const __m512i minus = _mm512_set1_epi32((int32_t)((uint32_t)sums[c + j] * 128));
        const __m512i exact = _mm512_sub_epi32(s->parts[c + j][v], minus);
        const __m256i low = _mm512_castsi512_si256(exact), high = _mm512_extracti64x4_epi64(exact, 1);
        __m512d whole = _mm512_cvtepi32_pd(half ? high : low);
        if (is_split)
            whole = _mm512_fmadd_pd(whole, _mm512_set1_pd(256), _mm512_cvtepi32_pd(high)); /* at most 40 bits */
        const __m512d both = _mm512_mul_pd(of_tokens, _mm512_set1_pd(scales[c + j]));
        y[j] = _mm512_cvtpd_ps(_mm512_mul_pd(whole, both));
    }
    transpose_eight(y);
    const __mmask8 mask = (1u << channels) - 1;
    const __m256 bias = l->bias ? _mm256_maskz_loadu_ps(mask, l->bias + column) : _mm256_setzero_ps();
    for (int64_t i = 0; i < there; i++)
        _mm256_mask_storeu_ps(l->y + (token + i) * l->out_features + column, mask,
                              l->bias ? _mm256_add_ps(y[i], bias) : y[i]);
}
static void store_lanes(const lane_strip *s, int v, const int32_t *sums, const float *scales) {
    const activations *a = s->l->a;
    const int64_t tokens = TILE / a->rows_per_token, token = (s->tile + v) * tokens;
    for (int c = 0; c < s->channels; c += 8) {
        if (a->rows_per_token == 2) {
            store_eight(s, v, c, 0, token, sums, scales, true);
            continue;
        }
        store_eight(s, v, c, 0, token, sums, scales, false);
        if (token + 8 < a->num_tokens) store_eight(s, v, c, 1, token + 8, sums, scales, false);
    }
}

/* A panel's tiles by the channels of a task, strip after strip. `sums` are those of the channels' weights, which the
 * first panel finds. */
static void lane_panel(const linear *l, int64_t column, int64_t column_end, int64_t tile, int tiles, bool is_last,
                       int32_t *sums) {
    lane_strip s = {.l = l, .tile = tile, .tiles = tiles, .next_lower = lower_of(l)};
    for (int64_t c = column; c < column_end; c += s.channels) {
        s.column = c, s.channels = lane_channels(tiles, column_end - c);
        const int64_t next = c + s.channels;
        /* Later panels have their weights in the L2 cache. */
        const bool fetches = next < column_end ? tile == 0 : is_last;
        s.next = fetches ? l->qweight + next_column(l, next) * l->row_bytes : NULL;
        if (l->kind == INT4_STEPS && !find_far_steps(l, c, 1, s.channels, 0)) {
            if (!tile) linear_rest(l, c, next); /* all tokens */
            continue;
        }
        s.sums = tile ? NULL : sums + (c - column);
        multiply_lanes(&s);
        const float *scales = l->kind == INT4_STEPS ? steps.units : l->scale + c;
        for (int v = 0; v < tiles; v++) store_lanes(&s, v, sums + (c - column), scales);
    }
}

static void linear_lanes(const linear *l, int64_t column, int64_t column_end) {
    const activations *a = l->a;
    const int64_t num_tiles = num_tiles_of(a->num_tokens, a->rows_per_token);
    const int most = a->in_features > LANES_LONG ? LANE_TILES / 2 : LANE_TILES;
    for (int64_t stop; column < column_end; column = stop) {
        int32_t sums[LANE_TASK];
        stop = MIN(column + LANE_TASK, column_end);
        for (int64_t tile = 0, tiles; tile < num_tiles; tile += tiles) {
            tiles = MIN(most, num_tiles - tile);
            lane_panel(l, column, stop, tile, (int)tiles, tile + tiles == num_tiles, sums);
        }
    }
}
