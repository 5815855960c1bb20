/* Few rows with AVX512-VNNI: they stay in the L1 cache while the weights pass by once, as they are. Part of
 * linear_vnni.h. */
#pragma once

/* One row of integers, or the two of one token, spread over lanes: memory is the limit, so each thread reads its
 * weights from front to end, which is what the processor's own prefetcher follows best; ours goes ahead across
 * the ends of pages, where it stops. */
enum { PREFETCH_BYTES = 2048 };

INLINE int32_t sum_lanes_epi32(__m512i a, __m512i b, __m512i c, __m512i d) {
    return _mm512_reduce_add_epi32(_mm512_add_epi32(_mm512_add_epi32(a, b), _mm512_add_epi32(c, d)));
}

INLINE void one_token(const linear *l, int64_t token, int64_t column, int64_t column_end, const int rows) {
    const activations *a = l->a;
    const int64_t k_end = a->in_features, whole = k_end / 64 * 64;
    const __mmask64 tail = ((__mmask64)1 << (k_end - whole)) - 1;
    const int8_t *x = a->rows + token * rows * a->padded, *x2 = x + (rows - 1) * a->padded;
    const int32_t *corrections = a->corrections + token * rows;
    for (; column < column_end; column++) {
        const int8_t *w = l->qweight + column * k_end;
        const __m512i zero = _mm512_setzero_si512();
        __m512i a0 = zero, a1 = zero, a2 = zero, a3 = zero, b0 = zero, b1 = zero, b2 = zero, b3 = zero;
        int64_t k = 0;
        for (; k + 256 <= whole; k += 256) {
#define STEP(n)                                                                                    \
    {                                                                                              \
        __m512i ws = as_unsigned(_mm512_loadu_si512(w + k + 64 * n));                              \
        _mm_prefetch(w + k + 64 * n + PREFETCH_BYTES, _MM_HINT_T0);                                \
        a##n = _mm512_dpbusd_epi32(a##n, ws, _mm512_loadu_si512(x + k + 64 * n));                  \
        if (rows > 1) b##n = _mm512_dpbusd_epi32(b##n, ws, _mm512_loadu_si512(x2 + k + 64 * n));   \
    }
            STEP(0) STEP(1) STEP(2) STEP(3)
#undef STEP
        }
        for (; k < k_end; k += 64) {
            __m512i ws = as_unsigned(_mm512_maskz_loadu_epi8(k < whole ? ~(__mmask64)0 : tail, w + k));
            a0 = _mm512_dpbusd_epi32(a0, ws, _mm512_loadu_si512(x + k));
            if (rows > 1) b0 = _mm512_dpbusd_epi32(b0, ws, _mm512_loadu_si512(x2 + k));
        }
        int64_t sum = (int32_t)((uint32_t)sum_lanes_epi32(a0, a1, a2, a3) + (uint32_t)corrections[0]);
        if (rows > 1)
            sum = sum * 256 + (int32_t)((uint32_t)sum_lanes_epi32(b0, b1, b2, b3) + (uint32_t)corrections[1]);
        float y = scaled(sum, a->token_scales[token], l->scale[column]);
        l->y[token * l->out_features + column] = l->bias ? y + l->bias[column] : y;
    }
}

/* More rows: one or two of them by eight channels at a time. The weights are read as they lie, eight channels side by
 * side, and stay in the L1 cache while all rows pass over them; BLOCK_INPUTS at a time, so that they have room
 * there. Tiles of more rows want these faster than the L2 cache gives them. */
enum { CHANNELS = 8, BLOCK_INPUTS = 2048, FEW_ROWS = 16, FEW_ROWS_GROUPED = 8 };
#define EACH_CHANNEL(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)

/* Four accumulators -> in each quarter, a part of their four sums. */
INLINE __m512i sum4(__m512i a, __m512i b, __m512i c, __m512i d) {
    __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

/* The eight sums of two of those. */
INLINE __m256i sum8(__m512i low, __m512i high) {
    __m512i even = _mm512_shuffle_i32x4(low, high, 0x88), odd = _mm512_shuffle_i32x4(low, high, 0xdd);
    __m512i halves = _mm512_add_epi32(even, odd);
    __m256i first = _mm512_castsi512_si256(halves), second = _mm512_extracti64x4_epi64(halves, 1);
    return _mm256_add_epi32(_mm256_permute2x128_si256(first, second, 0x20),
                            _mm256_permute2x128_si256(first, second, 0x31));
}

/* The empty asm generates nothing; an operand of it has to be in a register. */
#define CLEAR(j) __m512i a##j = {}, b##j = {};
#define MULTIPLY_CHANNEL(j)                                                                        \
    {                                                                                              \
        const __m512i ws = as_unsigned(_mm512_maskz_loadu_epi8(mask, w + j * stride + k));         \
        a##j = _mm512_dpbusd_epi32(a##j, ws, xs);                                                  \
        if (rows > 1) b##j = _mm512_dpbusd_epi32(b##j, ws, xs2);                                   \
        __asm__("" : "+v"(a##j), "+v"(b##j));                                                      \
    }
#define MULTIPLY_VECTOR(inputs)                                                                    \
    {                                                                                              \
        const __mmask64 mask = inputs;                                                             \
        const __m512i xs = _mm512_loadu_si512(x + k), xs2 = _mm512_loadu_si512(x2 + k);            \
        EACH_CHANNEL(MULTIPLY_CHANNEL)                                                             \
    }
/* One or two rows, x and x2, times eight channels, `stride` apart, over the inputs k to `stop`. */
INLINE void dots(const int8_t *x, const int8_t *x2, const int8_t *w, int64_t stride, int64_t k, int64_t stop,
                 const ahead *next, __m256i sums[2], const int rows) {
    EACH_CHANNEL(CLEAR)
    for (; k + 64 <= stop; k += 64) {
        fetch(next, k);
        MULTIPLY_VECTOR(~(__mmask64)0)
    }
    if (k < stop) MULTIPLY_VECTOR(((__mmask64)1 << (stop - k)) - 1)
    sums[0] = sum8(sum4(a0, a1, a2, a3), sum4(a4, a5, a6, a7));
    if (rows > 1) sums[1] = sum8(sum4(b0, b1, b2, b3), sum4(b4, b5, b6, b7));
}

/* What some inputs add to the totals of one or two rows: exact integers; times its scale, where a group has its own.
 * (With at most 128 inputs that is exact too, so that only adding groups rounds.) */
INLINE void few_tile(const linear *l, int64_t row, int64_t column, int64_t k, int64_t stop, const ahead *next,
                     double (*scales)[CHANNELS], double (*totals)[CHANNELS], const int rows, const bool is_split) {
    const activations *a = l->a;
    const int8_t *x = a->rows + row * a->padded, *w = l->qweight + column * a->in_features;
    for (int64_t g = k / a->group_size, end; k < stop; g++, k = end) {
        end = MIN((g + 1) * a->group_size, stop);
        __m256i sums[2];
        __m512d exact[2];
        dots(x, x + (rows - 1) * a->padded, w, a->in_features, k, end, next, sums, rows);
        for (int i = 0; i < rows; i++) {
            const int32_t correction = k == g * a->group_size ? a->corrections[(row + i) * a->num_groups + g] : 0;
            exact[i] = _mm512_add_pd(_mm512_cvtepi32_pd(sums[i]), _mm512_set1_pd(correction));
        }
        if (is_split) exact[0] = _mm512_fmadd_pd(exact[0], _mm512_set1_pd(256), exact[1]);
        const __m512d scale = a->num_groups > 1 ? _mm512_loadu_pd(*scales++) : _mm512_set1_pd(1);
        for (int i = 0; i < rows >> is_split; i++)
            _mm512_storeu_pd(totals[i], _mm512_fmadd_pd(exact[i], scale, _mm512_loadu_pd(totals[i])));
    }
}

/* Each is called, so that it has all registers for itself. */
#define DEFINE_FEW(name, rows, is_split)                                                           \
    NOINLINE void name(const linear *l, int64_t row, int64_t column, int64_t k, int64_t stop, const ahead *next, \
                       double (*scales)[CHANNELS], double (*totals)[CHANNELS]) {                   \
        few_tile(l, row, column, k, stop, next, scales, totals, rows, is_split);                   \
    }
DEFINE_FEW(one_row, 1, false)
DEFINE_FEW(two_rows, 2, false)
DEFINE_FEW(split_row, 2, true)

/* All rows by eight channels. While a tile is computed, it fetches its part of the weights that come next. */
INLINE void few_channels(const linear *l, int64_t column, int64_t next_column, const bool is_split) {
    const activations *a = l->a;
    const int64_t k_end = a->in_features, num_rows = a->num_tokens << is_split, n = l->num_groups;
    const int64_t tiles = (num_rows + 1) / 2, lines = (CHANNELS + tiles - 1) / tiles;
    double totals[FEW_ROWS][CHANNELS] = {}, scales[BLOCK_INPUTS / 64][CHANNELS];
    for (int64_t k = 0, stop; k < k_end; k = stop) {
        stop = MIN(k + BLOCK_INPUTS, k_end);
        for (int64_t g = k / a->group_size, i = 0; n > 1 && g * a->group_size < stop; g++, i++)
            for (int j = 0; j < CHANNELS; j++) scales[i][j] = l->scale[(column + j) * n + g];
        const int8_t *next = l->qweight + (stop < k_end ? column * k_end + stop : next_column * k_end) - k;
        for (int64_t r = 0, fetched = 0; r < num_rows; r += 2, fetched += lines) {
            const ahead part = {next + fetched * k_end, k_end, MAX(0, MIN(lines, CHANNELS - fetched))};
            double(*sums)[CHANNELS] = totals + (r >> is_split);
            (is_split ? split_row : r + 1 < num_rows ? two_rows : one_row)(l, r, column, k, stop, &part, scales, sums);
        }
    }
    const __m512d scale = n > 1 ? _mm512_set1_pd(1) : _mm512_cvtps_pd(_mm256_loadu_ps(l->scale + column));
    for (int64_t t = 0; t < a->num_tokens; t++) {
        const __m512d both = _mm512_mul_pd(_mm512_set1_pd(a->token_scales[t]), scale);
        __m256 y = _mm512_cvtpd_ps(_mm512_mul_pd(_mm512_loadu_pd(totals[t]), both));
        if (l->bias) y = _mm256_add_ps(y, _mm256_loadu_ps(l->bias + column));
        _mm256_storeu_ps(l->y + t * l->out_features + column, y);
    }
}

/* All tokens by whole eights of channels; where those end. */
static int64_t few_rows(const linear *l, int64_t column, int64_t column_end) {
    for (; column + CHANNELS <= column_end; column += CHANNELS) {
        const int64_t next = next_column(l, column + CHANNELS, column_end);
        if (l->a->rows_per_token == 2) few_channels(l, column, next, true);
        else few_channels(l, column, next, false);
    }
    return column;
}
