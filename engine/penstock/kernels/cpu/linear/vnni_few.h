/* Few rows with AVX512-VNNI: weights are used as they lie, without packing. Part of vnni.h. */
#pragma once

/* More rows: tiles of up to four rows by four channels. The weights of a strip of eight channels are read as they lie,
 * and stay in the L1 cache while all rows pass over them, BLOCK_INPUTS inputs at a time so that they fit. Here the rows
 * are unsigned (`flip`), so that each vector of weights is used as it is loaded:
 * sum(w * x) = sum(w * (x + 128)) - 128 * sum(w), modulo 2^32. */
enum { CHANNELS = 8, BLOCK_INPUTS = 2048, FEW_ROWS_GROUPED = 4 };

/* Inputs of a strip from `first` on. The weights that are needed next begin at `next`, and come to the L2 cache: at
 * each step of 64 inputs a tile fetches `next_lines` lines (1, 2 or 4) of as many channels. */
typedef struct {
    const linear *l;
    int64_t column, first, inputs;
    const int8_t *w; /* INT8, `stride` bytes from a channel to the next */
    int64_t stride;
    const int8_t *next;
    int64_t next_lower; /* from there to the lower plane; 0: there is none, or it is no stream */
    int next_lines;
    float scales[CHANNELS];                             /* of whole channels; 1 with groups */
    double group_scales[BLOCK_INPUTS / 64 + 1][CHANNELS]; /* of the groups from that of `first` on */
    __m128i minus[BLOCK_INPUTS / 64 + 1][2];            /* 128 times the sums of the weights of each four channels */
    __m512i parts[MOST_FEW_ROWS + 1][CHANNELS]; /* sums that go on in the next block; the last row: of the weights */
    double totals[MOST_FEW_ROWS][CHANNELS];     /* of groups */
} strip;

INLINE void fetch_lines_at(const int8_t *next, int64_t stride, int lines) {
    _mm_prefetch(next, _MM_HINT_T1);
    if (lines > 1) _mm_prefetch(next + stride, _MM_HINT_T1);
    if (lines > 2) _mm_prefetch(next + 2 * stride, _MM_HINT_T1), _mm_prefetch(next + 3 * stride, _MM_HINT_T1);
}

/* The sums of a row's four channels, or of four rows', from their parts. */
INLINE __m512i add_pairs(__m512i low, __m512i high) {
    return _mm512_add_epi32(_mm512_shuffle_i32x4(low, high, 0x88), _mm512_shuffle_i32x4(low, high, 0xdd));
}

#define EACH_OF_4(DO) DO(0) DO(1) DO(2) DO(3)
#define RESUME_CHANNEL(j)                                                                          \
    __m512i a##j = begins ? zero : parts[0][j], b##j = begins || rows < 2 ? zero : parts[1][j];    \
    __m512i c##j = begins || rows < 4 ? zero : parts[2][j], d##j = begins || rows < 4 ? zero : parts[3][j]; \
    __m512i s##j = begins || !has_sums ? zero : sums[j];
/* An empty asm generates nothing; an operand of it has to be in a register. */
#define MULTIPLY_CHANNEL(j)                                                                        \
    {                                                                                              \
        const __m512i ws = _mm512_maskz_loadu_epi8(mask, w + j * stride + k);                      \
        a##j = _mm512_dpbusd_epi32(a##j, x0, ws);                                                  \
        if (rows > 1) b##j = _mm512_dpbusd_epi32(b##j, x1, ws);                                    \
        if (rows > 2) c##j = _mm512_dpbusd_epi32(c##j, x2, ws), d##j = _mm512_dpbusd_epi32(d##j, x3, ws); \
        if (has_sums) s##j = _mm512_dpbusd_epi32(s##j, ones, ws);                                  \
        __asm__("" : "+v"(a##j), "+v"(b##j), "+v"(c##j), "+v"(d##j));                              \
    }
#define KEEP_CHANNEL(j)                                                                            \
    parts[0][j] = a##j;                                                                            \
    if (rows > 1) parts[1][j] = b##j;                                                              \
    if (rows > 2) parts[2][j] = c##j, parts[3][j] = d##j;                                          \
    if (has_sums) sums[j] = s##j;
#define MULTIPLY_VECTOR(inputs)                                                                    \
    {                                                                                              \
        const __mmask64 mask = inputs;                                                             \
        const __m512i x0 = _mm512_loadu_si512(x + k), x1 = rows > 1 ? _mm512_loadu_si512(x + padded + k) : zero; \
        const __m512i x2 = rows > 2 ? _mm512_loadu_si512(x + 2 * padded + k) : zero;               \
        const __m512i x3 = rows > 2 ? _mm512_loadu_si512(x + 3 * padded + k) : zero;               \
        EACH_OF_4(MULTIPLY_CHANNEL)                                                                \
    }
/* Rows, `padded` apart, times the four channels from w on, over the inputs k to `stop`. Returns their sums
 * [row, channel], less 128 times those of the weights, where all inputs of a group are there (`ends`). */
INLINE __m512i square(const strip *s, const int8_t *x, int64_t padded, const int8_t *w, const int8_t *next, int64_t k,
                      int64_t stop, bool begins, bool ends, __m512i (*parts)[CHANNELS], __m512i *sums, __m128i *minus,
                      const int rows, const bool has_sums) {
    const __m512i zero = {}, ones = _mm512_set1_epi8(1);
    const int64_t stride = s->stride, next_stride = s->l->row_bytes, next_lower = s->next_lower;
    const int lines = s->next_lines, shift = s->l->shift;
    EACH_OF_4(RESUME_CHANNEL)
    for (; k + 64 <= stop; k += 64) {
        fetch_lines_at(next + (k >> shift), next_stride, lines);
        if (next_lower) fetch_lines_at(next + next_lower + (k >> shift), next_stride, lines);
        MULTIPLY_VECTOR(~(__mmask64)0)
    }
    if (k < stop) MULTIPLY_VECTOR(((__mmask64)1 << (stop - k)) - 1)
    if (!ends) {
        EACH_OF_4(KEEP_CHANNEL)
        return zero;
    }
    if (has_sums) {
        const __m512i weights = add_pairs(sum4(s0, s1, s2, s3), zero);
        *minus = _mm_slli_epi32(_mm512_castsi512_si128(add_pairs(weights, zero)), 7);
    }
    const __m512i first = add_pairs(sum4(a0, a1, a2, a3), rows > 1 ? sum4(b0, b1, b2, b3) : zero);
    const __m512i second = rows > 2 ? add_pairs(sum4(c0, c1, c2, c3), sum4(d0, d1, d2, d3)) : zero;
    return _mm512_sub_epi32(add_pairs(first, second), _mm512_broadcast_i32x4(*minus));
}

/* The sums of tokens, hi and lo combined, in double: [token, channel]. They have at most 40 bits. */
INLINE void exact_tokens(__m512i sums, __m256d exact[4], const int rows, const bool is_split) {
    const __m512d first = _mm512_cvtepi32_pd(_mm512_castsi512_si256(sums));
    const __m512d second = _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(sums, 1));
    exact[0] = _mm512_castpd512_pd256(first), exact[1] = _mm512_extractf64x4_pd(first, 1);
    exact[2] = _mm512_castpd512_pd256(second), exact[3] = _mm512_extractf64x4_pd(second, 1);
    for (int i = 0; is_split && i < rows / 2; i++)
        exact[i] = _mm256_fmadd_pd(exact[2 * i], _mm256_set1_pd(256), exact[2 * i + 1]);
}

/* Writes a token's four channels from c on to y. */
INLINE void store_token(const strip *s, int64_t token, int c, __m256d total) {
    const linear *l = s->l;
    const __m256d scale = _mm256_cvtps_pd(_mm_loadu_ps(s->scales + c));
    const __m256d both = _mm256_mul_pd(_mm256_set1_pd(l->a->token_scales[token]), scale);
    __m128 y = _mm256_cvtpd_ps(_mm256_mul_pd(total, both));
    if (l->bias) y = _mm_add_ps(y, _mm_loadu_ps(l->bias + s->column + c));
    _mm_storeu_ps(l->y + token * l->out_features + s->column + c, y);
}

/* Multiply one, two or four rows by a block of inputs. Sums that end there go to y, or, times the scale of their group,
 * to the totals. With at most 128 inputs this product is exact as well, so only adding groups rounds. The first rows
 * find the sums of the weights, too. */
INLINE void few_tile(strip *s, int64_t row, const int rows, const bool is_split, const bool has_sums) {
    const activations *a = s->l->a;
    const int64_t size = a->group_size, token = row >> is_split, next_stride = s->l->row_bytes;
    const int8_t *x = a->rows + row * a->padded + s->first;
    const int8_t *next = s->next + (row / 4 * s->next_lines & 3) * next_stride;
    for (int c = 0; c < CHANNELS; c += 4, next += 4 * next_stride)
        for (int64_t k = 0, g = s->first / size, i = 0, stop; k < s->inputs; g++, i++, k = stop) {
            stop = MIN((g + 1) * size - s->first, s->inputs);
            const bool begins = s->first + k == g * size, ends = s->first + stop == (g + 1) * size;
            __m512i(*parts)[CHANNELS] = (__m512i(*)[CHANNELS])&s->parts[row][c];
            const __m512i sums = square(s, x, a->padded, s->w + c * s->stride, next, k, stop, begins, ends, parts,
                                        &s->parts[MOST_FEW_ROWS][c], &s->minus[i][c / 4], rows, has_sums);
            if (!ends) continue;
            __m256d exact[4];
            exact_tokens(sums, exact, rows, is_split);
            for (int t = 0; t < rows >> is_split; t++) {
                double *total = s->totals[token + t] + c;
                if (a->num_groups == 1) store_token(s, token + t, c, exact[t]);
                else
                    _mm256_storeu_pd(total, _mm256_fmadd_pd(exact[t], _mm256_loadu_pd(s->group_scales[i] + c),
                                                            _mm256_loadu_pd(total)));
            }
        }
}

/* Each tile is a function that is called and not inlined, so that the tile has all registers. */
#define DEFINE_FEW(name, rows, is_split, has_sums)                                                 \
    NOINLINE void name(strip *s, int64_t row) { few_tile(s, row, rows, is_split, has_sums); }
DEFINE_FEW(first_two_rows, 2, false, true)
DEFINE_FEW(first_split_row, 2, true, true)
DEFINE_FEW(first_four_rows, 4, false, true)
DEFINE_FEW(first_split_rows, 4, true, true)
DEFINE_FEW(one_row, 1, false, false)
DEFINE_FEW(two_rows, 2, false, false)
DEFINE_FEW(split_row, 2, true, false)
DEFINE_FEW(four_rows, 4, false, false)
DEFINE_FEW(split_rows, 4, true, false)

/* Some inputs of a channel, whose codes in steps become INT8. `at` has the places of the channel's steps. */
INLINE void expand_channel(const int8_t *codes, const uint16_t *at, int64_t inputs, int8_t *to, const int shift) {
    int64_t i = 0;
    for (; i + 64 <= inputs; i += 64)
        _mm512_store_si512(to + i, as_unsigned(stepped_at(codes + i / 2, i, ~(__mmask64)0, at, shift)));
    if (i < inputs) _mm512_store_si512(to + i, as_unsigned(stepped_at(codes + i / 2, i, 0xffffffff, at, shift)));
}
NOINLINE void expand_steps(const linear *l, int64_t column, const uint16_t *at, int64_t k, int64_t inputs, int8_t *to) {
    const int8_t *codes = l->qweight + column * l->row_bytes + k / 2;
    const int shift = group_shift(l);
    if (shift == 5) expand_channel(codes, at + (k >> 5), inputs, to, 5);
    else if (shift == 6) expand_channel(codes, at + (k >> 6), inputs, to, 6);
    else expand_channel(codes, at + (k >> 7), inputs, to, 7);
}

/* The weights of a strip as INT8, where they lie otherwise. */
NOINLINE void fill_few_room(const linear *l, int64_t column, int64_t k, int64_t inputs, int8_t (*room)[BLOCK_INPUTS]) {
    const channel_steps *own = own_steps();
    for (int j = 0; j < CHANNELS; j++)
        if (l->lower) join_weights(l, column + j, k, inputs, room[j]);
        else expand_steps(l, column + j, own->at[j], k, inputs, room[j]);
}

/* The scales of a strip, of its channels or of the groups in a block of inputs. */
INLINE void load_strip_scales(strip *s, int64_t stop) {
    const linear *l = s->l;
    const int64_t n = l->a->num_groups, size = l->a->group_size;
    const float *scales = l->kind == INT4_STEPS ? own_steps()->units : l->scale + s->column;
    for (int j = 0; j < CHANNELS; j++) s->scales[j] = n > 1 ? 1 : scales[j];
    for (int64_t g = s->first / size, i = 0; n > 1 && g * size < stop; g++, i++)
        for (int j = 0; j < CHANNELS; j++) s->group_scales[i][j] = l->scale[(s->column + j) * n + g];
}

/* All rows by eight channels, behind which the weights go on at `next_column`. Tiles prefetch the next weights while
 * they compute; all tiles of four rows together fetch all that is next. */
INLINE void few_channels(const linear *l, int64_t column, int64_t next_column, const bool is_split) {
    static _Thread_local int8_t room[CHANNELS][BLOCK_INPUTS] __attribute__((aligned(64)));
    const int64_t k_end = l->a->in_features, num_rows = l->a->num_tokens << is_split;
    const int8_t *w = l->qweight + column * l->row_bytes, *next = l->qweight + next_column * l->row_bytes;
    const bool is_expanded = l->kind == INT4_STEPS || l->lower;
    strip s;
    s.l = l, s.column = column, s.next_lower = lower_of(l);
    s.next_lines = num_rows > 12 ? 1 : num_rows > 4 ? 2 : 4;
    if (l->a->num_groups > 1) memset(s.totals, 0, sizeof s.totals);
    for (int64_t k = 0, stop; k < k_end; k = stop) {
        stop = MIN(k + BLOCK_INPUTS, k_end);
        s.first = k, s.inputs = stop - k, s.next = stop < k_end ? w + (stop >> l->shift) : next;
        s.w = is_expanded ? room[0] : w + k, s.stride = is_expanded ? BLOCK_INPUTS : l->row_bytes;
        load_strip_scales(&s, stop);
        if (is_expanded) fill_few_room(l, column, k, stop - k, room);
        for (int64_t r = 0, rows; r < num_rows; r += rows) {
            rows = num_rows - r >= 4 ? 4 : num_rows - r >= 2 ? 2 : 1;
            (rows == 4   ? r ? is_split ? split_rows : four_rows : is_split ? first_split_rows : first_four_rows
             : rows == 2 ? r ? is_split ? split_row : two_rows : is_split ? first_split_row : first_two_rows
                         : one_row)(&s, r);
        }
    }
    for (int64_t t = 0; l->a->num_groups > 1 && t < l->a->num_tokens; t++)
        for (int c = 0; c < CHANNELS; c += 4) store_token(&s, t, c, _mm256_loadu_pd(s.totals[t] + c));
}

/* Eight channels at a time. Returns where the computed ones end. */
INLINE int64_t few_tokens(const linear *l, int64_t column, int64_t column_end, const bool is_split) {
    for (; column_end - column >= CHANNELS; column += CHANNELS) {
        const int64_t next = next_column(l, column + CHANNELS);
        if (l->kind != INT4_STEPS || find_far_steps(l, column, 1, CHANNELS, 0)) few_channels(l, column, next, is_split);
        else linear_rest(l, column, column + CHANNELS);
    }
    return column;
}

/* Computes the channels that it can, for few rows, and returns where they end. */
static int64_t few_rows(const linear *l, int64_t column, int64_t column_end) {
    const activations *a = l->a;
    const bool is_split = a->rows_per_token == 2;
    if (a->num_tokens == 1) {
        one_token(l, column, column_end);
        return column_end;
    }
    return is_split ? few_tokens(l, column, column_end, true) : few_tokens(l, column, column_end, false);
}
