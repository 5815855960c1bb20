/* Weights and activations in the tiles of AMX. Part of amx.h.
 *
 * Weights become INT8 in tiles of 16 channels by 64 inputs, on the way from codes of 4 bits too. */
#pragma once

enum {
    TILE_BYTES = TILE * 64,
    TILE_CHANNELS = 2 * TILE, /* whose weights lie in tiles at a time */
    /* From 64 inputs to the next; without the gap, all stores of a channel would meet in two sets of the L1 cache. */
    CHANNELS_BYTES = TILE_CHANNELS * 64 + 64,
    /* Channels and tokens whose sums are kept, and tiles of these tokens' rows. */
    TILE_SPAN = 512,
    TILE_TOKENS = 128,
    ROW_TILES = 2 * TILE_TOKENS / TILE,
    /* Inputs at a time: activations of many rows stay in the L2 cache while all channels meet them. */
    TILE_INPUTS = 1024,
    TILE_INPUTS_FEW = 4096,
    FEW_TILES = 4 /* of rows: so few that weights are the limit */
};
static _Thread_local struct {
    int8_t weights[TILE_INPUTS_FEW / 64 * CHANNELS_BYTES] __attribute__((aligned(64))); /* [inputs / 64, 32, 64] */
    union {
        int32_t sums[TILE_SPAN / TILE][ROW_TILES][TILE * TILE]; /* [.., .., 16 channels, 16 rows] */
        double totals[TILE_SPAN][TILE_TOKENS];                  /* with groups */
    };
    float units[TILE_SPAN]; /* of steps */
    double scales[TILE_CHANNELS][TILE_INPUTS_FEW / 32], minima[TILE_CHANNELS][TILE_INPUTS_FEW / 32];
} tiles __attribute__((aligned(64)));

/* Some tokens by some channels, at most TILE_TOKENS by TILE_SPAN. */
typedef struct {
    const linear *l;
    int64_t column, column_end, token, num_tokens;
    int64_t num_tiles; /* of rows */
    int step;
    bool is_split;
} tile_block;

/* What 64 bytes at `w` hold of a channel, as tiles: 64 inputs, or with codes 128, of which in each `half` the even ones
 * lie before the odd ones. `tables` has what codes stand for. */
INLINE void fill_64(const int8_t *w, __mmask64 mask, __m512i tables, int8_t *to, const int kind, const int half) {
    const __m512i bytes = _mm512_maskz_loadu_epi8(mask, w), low = _mm512_set1_epi8(15);
    if (kind == INT8) {
        _mm512_store_si512(to, bytes);
        return;
    }
    const __m512i even = _mm512_shuffle_epi8(tables, _mm512_and_si512(bytes, low));
    const __m512i odd = _mm512_shuffle_epi8(tables, _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low));
    if (half == 128) {
        _mm512_store_si512(to, even);
        _mm512_store_si512(to + CHANNELS_BYTES, odd);
        return;
    }
    const __m512i order =
        half == 64 ? _mm512_set_epi64(11, 10, 9, 8, 3, 2, 1, 0) : _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
    const __m512i second = _mm512_add_epi64(order, _mm512_set1_epi64(4));
    _mm512_store_si512(to, _mm512_permutex2var_epi64(even, order, odd));
    _mm512_store_si512(to + CHANNELS_BYTES, _mm512_permutex2var_epi64(even, second, odd));
}

/* What the codes of 128 inputs stand for, whose first group's step has its place at `at`. A lane has the codes of 32
 * inputs. */
INLINE __m512i step_tables(const uint16_t *at, const int shift) {
    __m512i tables = _mm512_broadcast_i32x4(step_table(at[0]));
    if (shift == 5) tables = _mm512_mask_broadcast_i32x4(tables, 0x00f0, step_table(at[1]));
    if (shift <= 6) tables = _mm512_mask_broadcast_i32x4(tables, 0xff00, step_table(at[64 >> shift]));
    if (shift == 5) tables = _mm512_mask_broadcast_i32x4(tables, 0xf000, step_table(at[3]));
    return tables;
}

/* The inputs of channel c from k on as tiles. The bytes at `next`, `apart` and so on are needed soon, four streams. */
INLINE void fill_channel(const linear *l, int64_t c, int64_t k, int64_t inputs, int8_t *to, const int8_t *next,
                         int64_t apart, float unit, const int kind, const int half, const int shift) {
    const int stride = (kind == INT8 ? 1 : 2) * CHANNELS_BYTES;
    const int8_t *w = l->qweight + c * l->row_bytes + (k >> (kind != INT8));
    const int64_t bytes = MIN(inputs, l->a->in_features - k) >> (kind != INT8);
    uint16_t at[TILE_INPUTS_FEW / 32 + 16];
    const __m512i offset = _mm512_set1_epi8((char)(l->has_minimum ? 0 : l->a->offset));
    const __m512i table = kind == INT8 ? offset : _mm512_sub_epi8(table_of(l), offset);
    if (kind == INT4_STEPS) {
        const int64_t group = k >> shift, count = (bytes * 2) >> shift;
        if (is_one_block(l)) kept_places(l, c, group, count, at, true);
        else step_places(l, c, group, count, unit, unit > 0.0f ? 1.0f / unit : 0.0f, at, true);
    }
#define TABLES(i) kind == INT4_STEPS ? as_unsigned(step_tables(at + ((i) * 2 >> shift), shift)) : table
#define FILL(j, mask) fill_64(w + i + 64 * j, mask, TABLES(i + 64 * j), to + j * stride, kind, half);
    int64_t i = 0;
    for (; i + 256 <= bytes; i += 256, to += 4 * stride) {
        if (next)
            for (int j = 0; j < 4; j++) _mm_prefetch(next + j * apart + i / 4, _MM_HINT_T0);
        FILL(0, ~(__mmask64)0) FILL(1, ~(__mmask64)0) FILL(2, ~(__mmask64)0) FILL(3, ~(__mmask64)0)
    }
    for (; i < bytes; i += 64, to += stride) {
        const __mmask64 mask = bytes - i >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << (bytes - i)) - 1;
        FILL(0, mask)
    }
#undef FILL
#undef TABLES
}

/* Inputs of some channels, at most TILE_CHANNELS; missing ones are zeros. Four channels in turns are streams. */
INLINE void fill_tiles_of(const tile_block *b, int64_t column, int64_t k, int64_t inputs, const ahead *next,
                          const int kind, const int half, const int shift) {
    const int64_t channels = MIN(TILE_CHANNELS, b->column_end - column), quarter = inputs >> (kind == INT8 ? 2 : 3);
    const float *units = tiles.units + (column - b->column);
    for (int64_t i = 0; i < TILE_CHANNELS; i++) {
        const int64_t c = i % 4 * (TILE_CHANNELS / 4) + i / 4;
        int8_t *to = tiles.weights + c * 64;
        const int8_t *soon = next->lines ? NULL : next->w + i / 4 * next->stride + i % 4 * quarter;
        const int64_t apart = TILE_CHANNELS / 4 * next->stride;
        if (c < channels) fill_channel(b->l, column + c, k, inputs, to, soon, apart, units[c], kind, half, shift);
        else
            for (int64_t j = 0; j < inputs; j += 64, to += CHANNELS_BYTES)
                _mm512_store_si512(to, _mm512_setzero_si512());
    }
}
#define DEFINE_FILL(name, kind, half, shift)                                                       \
    NOINLINE void name(const tile_block *b, int64_t column, int64_t k, int64_t inputs, const ahead *next) { \
        fill_tiles_of(b, column, k, inputs, next, kind, half, shift);                              \
    }
DEFINE_FILL(fill_int8, INT8, 0, 0)
DEFINE_FILL(fill_codes_32, INT4, 32, 5)
DEFINE_FILL(fill_codes_64, INT4, 64, 6)
DEFINE_FILL(fill_codes_128, INT4, 128, 7)
DEFINE_FILL(fill_steps_32, INT4_STEPS, 128, 5)
DEFINE_FILL(fill_steps_64, INT4_STEPS, 128, 6)
DEFINE_FILL(fill_steps_128, INT4_STEPS, 128, 7)

static void fill_tiles(const tile_block *b, int64_t column, int64_t k, int64_t inputs, const ahead *next) {
    const linear *l = b->l;
    const int64_t size = l->a->in_features / l->num_groups;
    if (l->kind == INT8) fill_int8(b, column, k, inputs, next);
    else if (l->kind == INT4_STEPS)
        (size == 32 ? fill_steps_32 : size == 64 ? fill_steps_64 : fill_steps_128)(b, column, k, inputs, next);
    else (size == 32 ? fill_codes_32 : size == 64 ? fill_codes_64 : fill_codes_128)(b, column, k, inputs, next);
}

/* Where the weights of TILE_CHANNELS channels lie: bytes from a channel to the next, and from 64 inputs to the next. */
typedef struct {
    const int8_t *at;
    int64_t channel, inputs;
} tile_weights;
