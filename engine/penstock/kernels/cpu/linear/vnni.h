/* Products with AVX512-VNNI. Part of linear.h.
 *
 * vpdpbusd multiplies unsigned by signed bytes. The weights are made unsigned (w + 128, a flip of the top bit), so
 * sum(w * x) = sum((w + 128) * x) - 128 * sum(x): the correction belongs to the row of activations, not to the
 * weights. This equation holds modulo 2^32, and the true sum fits 32 bits up to 131072 inputs. */
#pragma once

INLINE __m512i as_unsigned(__m512i weights) {
    return _mm512_xor_si512(weights, _mm512_set1_epi8((char)0x80));
}

/* The bytes with the codes of 64 inputs from k on; the codes that `inputs` leaves out are 0. */
INLINE __m256i code_pairs(const int8_t *row, int64_t k, __mmask64 inputs) {
    if (inputs == ~(__mmask64)0) return _mm256_loadu_si256((const __m256i *)(row + k / 2));
    return _mm256_maskz_loadu_epi8((1u << _mm_popcnt_u64(inputs) / 2) - 1, row + k / 2);
}

/* Codes as bytes in their order, or the integers of the table that they stand for. Two codes lie in a byte: widened to
 * a word and shifted, they lie in a byte each. */
INLINE __m512i codes_of(__m256i bytes, __m512i table, const int kind) {
    const __m512i pairs = _mm512_cvtepu8_epi16(bytes);
    const __m512i codes =
        _mm512_and_si512(_mm512_or_si512(pairs, _mm512_slli_epi16(pairs, 4)), _mm512_set1_epi8(15));
    return kind == INT4 ? codes : _mm512_shuffle_epi8(table, codes);
}

/* 64 weights of a row from input k on, as unsigned bytes; those that `inputs` leaves out count as 0 or as code 0. (The
 * activations there are 0.) */
INLINE __m512i weights_at(const int8_t *row, int64_t k, __mmask64 inputs, __m512i table, const int kind) {
    if (kind == INT8) return as_unsigned(_mm512_maskz_loadu_epi8(inputs, row + k));
    return codes_of(code_pairs(row, k, inputs), table, kind);
}

/* The integers that codes stand for in a group, by the place of its step. */
INLINE __m128i step_table(uint16_t at) { return _mm_load_si128((const __m128i *)(stepped_codes[0] + at)); }

/* The same with steps, whose places `at` belong to groups of 1 << shift inputs, at least 32. `codes` is where those of
 * input k lie. */
INLINE __m512i stepped_at(const int8_t *codes, int64_t k, __mmask64 inputs, const uint16_t *at, const int shift) {
    __m512i table = _mm512_broadcast_i32x4(step_table(at[k >> shift]));
    if (shift < 6) table = _mm512_mask_broadcast_i32x4(table, 0xff00, step_table(at[(k + 32) >> shift]));
    return codes_of(code_pairs(codes, 0, inputs), table, INT4_TABLE);
}
/* The scales of whole channels from `column` on. */
INLINE const float *scales_from(const linear *l, int64_t column) {
    return l->kind == INT4_STEPS ? steps.units + column % STEPPED_CHANNELS : l->scale + column;
}

INLINE int group_shift(const linear *l) { return __builtin_ctzll(l->a->in_features / l->num_groups); }

INLINE __m512i table_of(const linear *l) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)l->table));
}

/* A panel's weights, which are prefetched into the L2 cache while the panel before is used, evenly over its time, in
 * four streams: quarters of its channels. A core asks for too few lines at once to draw the memory's rate by itself;
 * its prefetcher, which follows streams, asks for the others. */
enum { STREAMS = 4, DUE = 256 };
typedef struct {
    const int8_t *at;
    int64_t apart, lines; /* bytes from one stream to the next, and lines left of each */
    int64_t due, rate;    /* DUE: a line of each stream; what each call adds */
    int64_t lower;        /* from there to the lower plane; 0: there is none, or it is no stream */
} streams;
INLINE int64_t lower_of(const linear *l) { return l->lower_bytes ? (const int8_t *)l->lower - l->qweight : 0; }
INLINE void fetch_streams(streams *next) {
    for (next->due += next->rate; next->due >= DUE && next->lines > 0; next->due -= DUE, next->lines--) {
        for (int i = 0; i < STREAMS; i++) _mm_prefetch(next->at + i * next->apart, _MM_HINT_T1);
        for (int i = 0; next->lower && i < STREAMS; i++)
            _mm_prefetch(next->at + next->lower + i * next->apart, _MM_HINT_T1);
        next->at += 64;
    }
}

/* Accumulators are separate variables, because GCC keeps arrays of vectors in memory. */
#define ROWS_1(DO) DO(0)
#define ROWS_2(DO) DO(0) DO(1)
#define ROWS_4(DO) ROWS_2(DO) DO(2) DO(3)
#define ROWS_6(DO) ROWS_4(DO) DO(4) DO(5)
#include "row_tiles.h"
#include "vnni_one.h"
#include "vnni_few.h"

#include "vnni_panel.h"

/* Whether the rows are few enough to stay in the caches, and groups are whole vectors (for one token: halves). One
 * token always is where its activations are `halved` or `words`. */
static bool takes_few(const linear *l) {
    const int64_t num_rows = l->a->num_tokens * l->a->rows_per_token, size = l->a->group_size;
    if (l->kind != INT8 && l->kind != INT4_STEPS) return l->a->num_tokens == 1;
    if (l->a->num_groups == 1) return num_rows <= MOST_FEW_ROWS;
    return num_rows <= MIN(tuning.few_rows, FEW_ROWS_GROUPED) &&
        (size % 64 == 0 || (size == 32 && l->a->num_tokens == 1));
}

/* Computes all channels or none, and returns where the computed ones end. */
static int64_t linear_fast(const linear *l, int64_t column, int64_t column_end) {
    const activations *a = l->a;
    if (!l->is_tiled) return column;
    if (l->is_few) return few_rows(l, column, column_end);
    const int64_t tokens = PANEL_ROWS / a->rows_per_token;
    for (; column < column_end; column += PANEL) {
        const int64_t next = next_column(l, column + PANEL);
        for (int64_t t = 0; t < a->num_tokens; t += tokens) {
            const block b = {l, t, MIN(tokens, a->num_tokens - t), column, (int)MIN(PANEL, column_end - column),
                             a->rows_per_token == 2};
            linear_panel(&b, l->qweight + (t + tokens < a->num_tokens ? column : next) * l->row_bytes);
        }
    }
    return column_end;
}

#include "vnni_lanes.h"
#if defined(__AMX_INT8__)
#include "amx.h"
#endif

/* Several tokens' rows in tiles: all channels. */
static void linear_tiles(const linear *l, int64_t column, int64_t column_end) {
#if defined(__AMX_INT8__)
    if (!l->a->flip) {
        linear_amx(l, column, column_end);
        return;
    }
#endif
    linear_lanes(l, column, column_end);
}

/* Whether lanes are rows of activations. Tiles that are not full lose to multiplying row by row. Weights that have to
 * become INT8 become so for each panel of rows, and a single tile of rows does not make up for it. */
static bool takes_lanes(const linear *l, int64_t num_tokens, int rows_per_token) {
    const int64_t num_rows = num_tokens * rows_per_token, lanes = num_tiles_of(num_tokens, rows_per_token) * TILE;
    if (num_rows <= MOST_FEW_ROWS && lanes - num_rows > lanes / 16) return false;
    if (num_tokens < 2 || num_rows <= tuning.few_rows || num_rows > tuning.lane_rows) return false;
    if (l->kind == INT4_STEPS || l->lower) {
        if (num_rows <= TILE || num_rows > LANES_EXPANDED) return false;
    }
    return l->kind == INT4_STEPS || (l->kind == INT8 && l->num_groups == 1);
}
