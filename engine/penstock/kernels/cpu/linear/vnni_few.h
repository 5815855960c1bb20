/* Few rows with AVX512-VNNI: weights are used as they lie, without packing. Part of vnni.h. */
#pragma once

/* One row of integers, or the two rows of one token, spread over lanes. Memory is the limit. So each thread reads four
 * streams, quarters of its channels: one stream alone brings fewer bytes a second. The processor's own prefetcher
 * follows each stream, and stops at the end of a page; our prefetches go on across it. */

/* Four accumulators -> in each quarter, a part of their four sums. */
INLINE __m512i sum4(__m512i a, __m512i b, __m512i c, __m512i d) {
    __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

/* The eight sums of two such vectors. */
INLINE __m256i sum8(__m512i low, __m512i high) {
    __m512i even = _mm512_shuffle_i32x4(low, high, 0x88), odd = _mm512_shuffle_i32x4(low, high, 0xdd);
    __m512i halves = _mm512_add_epi32(even, odd);
    __m256i first = _mm512_castsi512_si256(halves), second = _mm512_extracti64x4_epi64(halves, 1);
    return _mm256_add_epi32(_mm256_permute2x128_si256(first, second, 0x20),
                            _mm256_permute2x128_si256(first, second, 0x31));
}

/* The exact sums of the channels column, column + apart, ..., times their scales, to y. */
INLINE void store_exact(const linear *l, int64_t column, int64_t apart, __m256d exact, const float scales[4]) {
    const __m256d both = _mm256_mul_pd(_mm256_set1_pd(l->a->token_scales[0]), _mm256_cvtps_pd(_mm_loadu_ps(scales)));
    float y[4];
    _mm_storeu_ps(y, _mm256_cvtpd_ps(_mm256_mul_pd(exact, both)));
    for (int64_t i = 0, c = column; i < 4; i++, c += apart) l->y[c] = l->bias ? y[i] + l->bias[c] : y[i];
}

/* The same of the sums of hi (or of all) and of lo, each in four parts. */
INLINE void store_four(const linear *l, int64_t column, int64_t apart, __m512i hi, __m512i lo, const float scales[4],
                       const int rows) {
    const int32_t *corrections = l->a->corrections;
    const __m256i sums = sum8(hi, lo);
    __m256d exact = _mm256_cvtepi32_pd(_mm_add_epi32(_mm256_castsi256_si128(sums), _mm_set1_epi32(corrections[0])));
    if (rows > 1) { /* at most 40 bits */
        const __m128i second = _mm_add_epi32(_mm256_extracti128_si256(sums, 1), _mm_set1_epi32(corrections[1]));
        exact = _mm256_fmadd_pd(exact, _mm256_set1_pd(256), _mm256_cvtepi32_pd(second));
    }
    store_exact(l, column, apart, exact, scales);
}

/* The sum of all groups of one token. */
INLINE void store_total(const linear *l, int64_t column, double total) {
    const float y = (float)(total * (double)l->a->token_scales[0]);
    l->y[column] = l->bias ? y + l->bias[column] : y;
}

/* The products of a token and the channels column, column + apart, ...: four streams through the weights, which bring more
 * bytes a second than one. */
INLINE void four_channels(const linear *l, int64_t column, int64_t apart, const int rows) {
    const activations *a = l->a;
    const int64_t k_end = a->in_features, whole = k_end / 64 * 64, prefetch = tuning.prefetch_bytes;
    const __mmask64 tail = ((__mmask64)1 << (k_end - whole)) - 1;
    const int8_t *x = a->rows, *x2 = x + (rows - 1) * a->padded, *w = l->qweight + column * k_end;
    const int8_t *w0 = w, *w1 = w + apart * k_end, *w2 = w + 2 * apart * k_end, *w3 = w + 3 * apart * k_end;
    __m512i a0 = {}, a1 = {}, a2 = {}, a3 = {}, b0 = {}, b1 = {}, b2 = {}, b3 = {};
#define STEP(n, mask)                                                                              \
    {                                                                                              \
        const __m512i ws = as_unsigned(_mm512_maskz_loadu_epi8(mask, w##n + k));                   \
        a##n = _mm512_dpbusd_epi32(a##n, ws, xs);                                                  \
        if (rows > 1) b##n = _mm512_dpbusd_epi32(b##n, ws, xs2);                                   \
        _mm_prefetch(w##n + k + prefetch, _MM_HINT_T0);                                            \
        __asm__("" : "+v"(a##n), "+v"(b##n));                                                      \
    }
#define STEPS(mask)                                                                                \
    {                                                                                              \
        const __m512i xs = _mm512_loadu_si512(x + k), xs2 = _mm512_loadu_si512(x2 + k);            \
        STEP(0, mask) STEP(1, mask) STEP(2, mask) STEP(3, mask)                                    \
    }
    int64_t k = 0;
    for (; k < whole; k += 64) STEPS(~(__mmask64)0)
    if (k < k_end) STEPS(tail)
#undef STEPS
#undef STEP
    const float *scale = l->scale + column;
    const float scales[4] = {scale[0], scale[apart], scale[2 * apart], scale[3 * apart]};
    store_four(l, column, apart, sum4(a0, a1, a2, a3), sum4(b0, b1, b2, b3), scales, rows);
}

INLINE void one_token(const linear *l, int64_t column, int64_t column_end, const int rows) {
    const int64_t apart = (column_end - column) / 4;
    for (int64_t i = 0; i < apart; i++) four_channels(l, column + i, apart, rows);
    linear_rest(l, column + 4 * apart, column_end);
}

/* Eight accumulators are summed up together. */
#define EACH_OF_8(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#define CLEAR(j) __m512i a##j = {}, b##j = {};

/* The sums of both halves of all eight accumulators, in order. */
INLINE __m512i sum16(__m512i low, __m512i high) {
    const __m512i order = _mm512_set_epi32(15, 11, 14, 10, 13, 9, 12, 8, 7, 3, 6, 2, 5, 1, 4, 0);
    __m512i even = _mm512_shuffle_i32x4(low, high, 0x88), odd = _mm512_shuffle_i32x4(low, high, 0xdd);
    return _mm512_permutexvar_epi32(order, _mm512_add_epi32(even, odd));
}

/* The sums of up to eight groups of one token, corrected, times their scales. All of this is exact. */
INLINE void scale_groups(const linear *l, int64_t column, int64_t group, __m256i sums, __m256i second, double *parts,
                         const int rows) {
    const int64_t n = l->num_groups;
    const int32_t *corrections = l->a->corrections + group;
    const __mmask8 mask = n - group >= 8 ? 0xff : (1 << (n - group)) - 1;
    sums = _mm256_add_epi32(sums, _mm256_maskz_loadu_epi32(mask, corrections));
    __m512d exact = _mm512_cvtepi32_pd(sums);
    if (rows > 1) {
        second = _mm256_add_epi32(second, _mm256_maskz_loadu_epi32(mask, corrections + n));
        exact = _mm512_fmadd_pd(exact, _mm512_set1_pd(256), _mm512_cvtepi32_pd(second));
    }
    const __m256 scales = _mm256_maskz_loadu_ps(mask, l->scale + column * n + group);
    _mm512_storeu_pd(parts, _mm512_mul_pd(exact, _mm512_cvtps_pd(scales)));
}

/* One token, groups of 128, 64 or (halves of vectors) 32 inputs: eight or sixteen groups of one channel, then of the next
 * one of four far channels, which are four streams here, too. Groups are added in their order. */
#define MULTIPLY_GROUP(j)                                                                          \
    for (int64_t k = begin + j * span, stop = MIN(k + span, k_end); k < stop; k += 64) {           \
        const __m512i ws = as_unsigned(_mm512_maskz_loadu_epi8(k < whole ? ~(__mmask64)0 : tail, w + k)); \
        _mm_prefetch(w + k + prefetch, _MM_HINT_T0);                                               \
        a##j = _mm512_dpbusd_epi32(a##j, ws, _mm512_loadu_si512(x + k));                           \
        if (rows > 1) b##j = _mm512_dpbusd_epi32(b##j, ws, _mm512_loadu_si512(x2 + k));            \
    }
INLINE void add_groups(const linear *l, int64_t column, int64_t g, double *total, const int rows, const bool is_half) {
    const activations *a = l->a;
    const int64_t k_end = a->in_features, whole = k_end / 64 * 64, n = l->num_groups, prefetch = tuning.prefetch_bytes;
    const __mmask64 tail = ((__mmask64)1 << (k_end - whole)) - 1;
    const int64_t span = is_half ? 64 : a->group_size, num_sums = is_half ? 16 : 8, begin = g * a->group_size;
    const int8_t *x = a->rows, *x2 = x + (rows - 1) * a->padded, *w = l->qweight + column * k_end;
    double parts[16];
    EACH_OF_8(CLEAR)
    EACH_OF_8(MULTIPLY_GROUP)
    const __m512i a_low = sum4(a0, a1, a2, a3), a_high = sum4(a4, a5, a6, a7);
    const __m512i b_low = sum4(b0, b1, b2, b3), b_high = sum4(b4, b5, b6, b7);
    if (is_half) {
        const __m512i sums = sum16(a_low, a_high), second = sum16(b_low, b_high);
        scale_groups(l, column, g, _mm512_castsi512_si256(sums), _mm512_castsi512_si256(second), parts, rows);
        if (g + 8 < n)
            scale_groups(l, column, g + 8, _mm512_extracti64x4_epi64(sums, 1), _mm512_extracti64x4_epi64(second, 1),
                         parts + 8, rows);
    } else scale_groups(l, column, g, sum8(a_low, a_high), sum8(b_low, b_high), parts, rows);
    for (int64_t i = 0; i < MIN(num_sums, n - g); i++) *total += parts[i];
}
INLINE void one_token_groups(const linear *l, int64_t column, int64_t column_end, const int rows, const bool is_half) {
    const int64_t apart = (column_end - column) / 4, num_sums = is_half ? 16 : 8;
    for (int64_t i = 0; i < apart; i++) {
        double totals[4] = {};
        for (int64_t g = 0; g < l->num_groups; g += num_sums)
            for (int j = 0; j < 4; j++) add_groups(l, column + i + j * apart, g, totals + j, rows, is_half);
        for (int j = 0; j < 4; j++) store_total(l, column + i + j * apart, totals[j]);
    }
    linear_rest(l, column + 4 * apart, column_end);
}

/* More rows: tiles of up to four rows by four channels. The weights of a strip of eight channels are read as they lie, and
 * stay in the L1 cache while all rows pass over them, BLOCK_INPUTS inputs at a time so that they fit. Here the rows are
 * unsigned (`flip`), so that each vector of weights is used as it is loaded:
 * sum(w * x) = sum(w * (x + 128)) - 128 * sum(w), modulo 2^32. */
enum { CHANNELS = 8, BLOCK_INPUTS = 2048, FEW_ROWS_GROUPED = 4 };

/* Inputs of a strip from `first` on. The weights that are needed next begin at `next`, and come to the L2 cache: at each
 * step of 64 inputs a tile fetches `next_lines` lines (1, 2 or 4) of as many channels. */
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

/* Multiply one, two or four rows by a block of inputs. Sums that end there go to y, or, times the scale of their group, to
 * the totals. With at most 128 inputs this product is exact as well, so only adding groups rounds. The first rows find the
 * sums of the weights, too. */
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
    for (int j = 0; j < CHANNELS; j++)
        if (l->lower) join_weights(l, column + j, k, inputs, room[j]);
        else expand_steps(l, column + j, steps.at[j], k, inputs, room[j]);
}

/* The scales of a strip, of its channels or of the groups in a block of inputs. */
INLINE void load_strip_scales(strip *s, int64_t stop) {
    const linear *l = s->l;
    const int64_t n = l->a->num_groups, size = l->a->group_size;
    for (int j = 0; j < CHANNELS; j++)
        s->scales[j] = n > 1 ? 1 : l->kind == INT4_STEPS ? steps.units[j] : l->scale[s->column + j];
    for (int64_t g = s->first / size, i = 0; n > 1 && g * size < stop; g++, i++)
        for (int j = 0; j < CHANNELS; j++) s->group_scales[i][j] = l->scale[(s->column + j) * n + g];
}

/* All rows by eight channels, behind which the weights go on at `next_column`. Tiles prefetch the next weights while they
 * compute; all tiles of four rows together fetch all that is next. */
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

#include "vnni_codes.h"
#include "vnni_factors.h"
static void one_token_planes(const linear *l, int64_t column, int64_t column_end);

/* Computes the channels that it can, for few rows, and returns where they end. */
static int64_t few_rows(const linear *l, int64_t column, int64_t column_end) {
    const activations *a = l->a;
    const bool is_split = a->rows_per_token == 2, is_half = a->group_size == 32;
    if (a->num_tokens == 1) {
        if (l->lower) one_token_planes(l, column, column_end);
        else if (l->kind == INT4_STEPS || l->kind == INT4_SHIFTS) one_token_factors(l, column, column_end);
        else if (l->kind != INT8) one_token_codes(l, column, column_end);
        else if (l->num_groups == 1 && is_split) one_token(l, column, column_end, 2);
        else if (l->num_groups == 1) one_token(l, column, column_end, 1);
        else if (is_split && is_half) one_token_groups(l, column, column_end, 2, true);
        else if (is_split) one_token_groups(l, column, column_end, 2, false);
        else if (is_half) one_token_groups(l, column, column_end, 1, true);
        else one_token_groups(l, column, column_end, 1, false);
        return column_end;
    }
    return is_split ? few_tokens(l, column, column_end, true) : few_tokens(l, column, column_end, false);
}
