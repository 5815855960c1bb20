/* One token times 4-bit codes whose scales are integers (`factors`) times one number of the row: steps (steps.h), or
 * shifts, which are powers of two. With AVX512-VNNI. Part of vnni_one.h.
 *
 * A lane has eight inputs of one group. The sum of their products fits 16 bits, so vpdpwssd multiplies it by the
 * group's factor and adds it to the row's sum: no group has a sum of its own, and every integer is exact. The bits are
 * those of groups added one after the other in double, because those sums are exact, too: a row's sum has at most 47
 * bits. */
#pragma once

enum { LANE_BLOCK = 128, LARGEST_INTEGER = 15, MOST_LANE_BLOCKS = 1024 };

/* What is taken off the products of each lane: the offset of the unsigned weights times the lane's inputs. */
static _Thread_local __m512i lane_corrections[MOST_LANE_BLOCKS][2];

/* The smallest of eight numbers of 16 bits: an instruction finds it. */
INLINE uint32_t smallest_word(__m512i words) {
    const __m256i half = _mm256_min_epu16(_mm512_castsi512_si256(words), _mm512_extracti64x4_epi64(words, 1));
    const __m128i eight = _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return (uint32_t)_mm_cvtsi128_si32(_mm_minpos_epu16(eight)) & 0xffff;
}

/* The exponents of a row's scales, above the smallest one, as powers of two. `most`: the largest exponent that leaves
 * room for the sums. False: the scales are no powers of two, or too far apart. */
INLINE bool find_shifts(const linear *l, int64_t column, int most, uint16_t *restrict at, float *unit) {
    const int64_t n = l->num_groups;
    const uint16_t *scales = (const uint16_t *)l->numbers.scale + column * n;
    const __m512i ones = _mm512_set1_epi32(-1);
    __m512i least = ones, inverse = ones, all = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += 32) {
        const __mmask32 some = n - i < 32 ? (1u << (n - i)) - 1 : ~(__mmask32)0;
        const __m512i words = _mm512_maskz_loadu_epi16(some, scales + i);
        least = _mm512_min_epu16(least, _mm512_mask_mov_epi16(ones, some, words));
        inverse = _mm512_min_epu16(inverse, _mm512_xor_si512(words, ones));
        all = _mm512_or_si512(all, words);
    }
    const uint32_t first = smallest_word(least), last = ~smallest_word(inverse) & 0xffff;
    const uint32_t bits = first << 16;
    memcpy(unit, &bits, 4);
    /* Sign and mantissa are 0, and the exponents belong to normal numbers. */
    if (_mm512_test_epi16_mask(all, _mm512_set1_epi16((short)0x807f)) || first < 0x80 || last >= 0x7f80) return false;
    const __m512i one = _mm512_set1_epi16(1), base = _mm512_set1_epi16((short)first);
    for (int64_t i = 0; i < n; i += 32) {
        const __mmask32 some = n - i < 32 ? (1u << (n - i)) - 1 : ~(__mmask32)0;
        const __m512i above = _mm512_sub_epi16(_mm512_maskz_loadu_epi16(some, scales + i), base);
        _mm512_storeu_si512(at + i, _mm512_sllv_epi16(one, _mm512_srli_epi16(above, 7)));
    }
    return (last - first) >> 7 <= (uint32_t)most;
}

/* The largest shift of a product: sums of four lanes over a whole row fit 32 bits, and a factor fits 16. */
INLINE int most_shift(int64_t in_features) {
    const int64_t blocks = (in_features + LANE_BLOCK - 1) / LANE_BLOCK,
                  largest = 4 * 8 * LARGEST_INTEGER * 128 * blocks;
    return MIN(14, 30 - (63 - __builtin_clzll((uint64_t)largest)));
}

/* Whether the matrix has shifts, by a few of its rows. */
static bool seems_shifted(const linear *l, int64_t in_features) {
    enum { SOME = 8 };
    uint16_t at[PLACES];
    float unit;
    if (l->num_groups > MOST_STEPPED_GROUPS || l->numbers.dtype != 2 || l->has_minimum || l->numbers.sub_scale)
        return false;
    for (int i = 0; i < 16; i++)
        if (abs(l->table[i] - WEIGHT_OFFSET) > LARGEST_INTEGER) return false;
    for (int64_t i = 0; i < SOME; i++)
        if (!find_shifts(l, i * (l->out_features - 1) / (SOME - 1), most_shift(in_features), at, &unit)) return false;
    return true;
}

INLINE bool find_factors(const linear *l, channel_steps *own, int64_t column, int place, const int most) {
    uint16_t *at = own->at[place];
    float *unit = own->units + place;
    return l->kind == INT4_SHIFTS ? find_shifts(l, column, most, at, unit) : find_steps_as(l, column, at, unit, false);
}

/* The corrections of a token's lanes. */
static void correct_lanes(const activations *a, const int rows, const int offset) {
    const __m512i offsets = _mm512_set1_epi8((char)offset), zero = _mm512_setzero_si512();
    for (int64_t k = 0, i = 0; k < a->in_features; k += LANE_BLOCK, i++)
        for (int part = 0; part < rows; part++) {
            const int8_t *x = a->rows + part * a->padded + k;
            const __m512i even = _mm512_dpbusd_epi32(zero, offsets, _mm512_loadu_si512(x));
            lane_corrections[i][part] =
                _mm512_sub_epi32(zero, _mm512_dpbusd_epi32(even, offsets, _mm512_loadu_si512(x + 64)));
        }
}

/* Which of four factors, 16 bits each, belongs to each lane; the upper half of a lane has none. */
INLINE __m512i lane_groups(const int shift) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_srli_epi32(lanes, shift - 3);
}
enum { LOWER_HALVES = 0x55555555 };

/* The products of a block of codes: `even` and `odd` are the codes of even and odd inputs. */
#define CODES_AT(p, bytes)                                                                         \
    const __m512i codes = _mm512_maskz_loadu_epi8(bytes, p);                                       \
    __m512i even = _mm512_and_si512(codes, low), odd = _mm512_and_si512(_mm512_srli_epi16(codes, 4), low); \
    if (has_table) even = _mm512_shuffle_epi8(table, even), odd = _mm512_shuffle_epi8(table, odd);

/* The sums of four channels in double: eight sums of four lanes each have 32 bits. */
INLINE __m256d sum_quarters(__m512i v) {
    const __m256d first = _mm256_cvtepi32_pd(_mm512_castsi512_si128(v)),
                  second = _mm256_cvtepi32_pd(_mm512_extracti32x4_epi32(v, 1));
    const __m256d third = _mm256_cvtepi32_pd(_mm512_extracti32x4_epi32(v, 2)),
                  last = _mm256_cvtepi32_pd(_mm512_extracti32x4_epi32(v, 3));
    return _mm256_add_pd(_mm256_add_pd(first, second), _mm256_add_pd(third, last));
}

/* Four channels. Their codes follow each other in memory, and those that lie `prefetch` bytes behind them come to the
 * L2 cache meanwhile, in the order in which they lie: a processor follows such a stream by itself, and loses it where
 * the lines of four channels are asked for in turns. The activations are `halved`. */
INLINE void four_by_factors(const linear *l, channel_steps *own, int64_t column, int place, const int rows,
                            const int shift, const bool has_table) {
    const activations *a = l->a;
    const int64_t whole = a->in_features / LANE_BLOCK * LANE_BLOCK, prefetch = tuning.prefetch_bytes_int4,
                  bytes = l->row_bytes;
    const int8_t *x = a->rows, *x2 = x + (rows - 1) * a->padded, *w0 = l->qweight + column * l->row_bytes;
    const int8_t *w1 = w0 + bytes, *w2 = w1 + bytes, *w3 = w2 + bytes;
    const uint16_t *at0 = own->at[place];
    const __m512i low = _mm512_set1_epi8(15), table = table_of(l), groups = lane_groups(shift);
    const __m512i(*corrections)[2] = lane_corrections;
    __asm__("" : "+r"(corrections)); /* GCC would find the thread's memory anew in each round */
    const uint16_t *at1 = at0 + PLACES, *at2 = at1 + PLACES, *at3 = at2 + PLACES;
    __m512i a0 = {}, a1 = {}, a2 = {}, a3 = {}, b0 = {}, b1 = {}, b2 = {}, b3 = {};
    int64_t k = 0;
#define MULTIPLY_LANES(n, some)                                                                    \
    {                                                                                              \
        CODES_AT(w##n + k / 2, some)                                                               \
        int64_t four;                                                                              \
        memcpy(&four, at##n + (k >> shift), 8);                                                    \
        const __m512i factors = _mm512_maskz_permutexvar_epi16(LOWER_HALVES, groups, _mm512_set1_epi64(four)); \
        _mm_prefetch(w0 + 2 * k + 64 * n + prefetch, _MM_HINT_T1);                                 \
        a##n = _mm512_dpwssd_epi32(a##n, _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(first, even, x_even), odd, x_odd), \
                                   factors); \
        if (rows > 1) \
            b##n = _mm512_dpwssd_epi32(b##n, _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(second, even, x2_even), odd, \
                                                                 x2_odd), factors); \
        __asm__("" : "+v"(a##n), "+v"(b##n));                                                      \
    }
#define MULTIPLY_BLOCK(some)                                                                       \
    {                                                                                              \
        const __m512i x_even = _mm512_loadu_si512(x + k), x_odd = _mm512_loadu_si512(x + k + 64);  \
        const __m512i x2_even = _mm512_loadu_si512(x2 + k), x2_odd = _mm512_loadu_si512(x2 + k + 64); \
        const __m512i first = corrections[0][0], second = corrections[0][rows - 1];                \
        MULTIPLY_LANES(0, some) MULTIPLY_LANES(1, some) MULTIPLY_LANES(2, some) MULTIPLY_LANES(3, some) \
    }
    for (; k < whole; k += LANE_BLOCK, corrections++) MULTIPLY_BLOCK(~(__mmask64)0)
    if (k < a->in_features) MULTIPLY_BLOCK(((__mmask64)1 << (a->in_features - k) / 2) - 1)
#undef MULTIPLY_BLOCK
#undef MULTIPLY_LANES
    __m256d exact = sum_quarters(sum4(a0, a1, a2, a3));
    if (rows > 1) exact = _mm256_fmadd_pd(exact, _mm256_set1_pd(256), sum_quarters(sum4(b0, b1, b2, b3)));
    store_exact(l, column, 1, exact, own->units + place);
}

/* A channel whose scales are anything: its groups are added in their order. */
NOINLINE void channel_in_order(const linear *l, int64_t column, int rows, bool has_table) {
    const activations *a = l->a;
    const int8_t *x = a->rows, *x2 = x + (rows - 1) * a->padded, *w = l->qweight + column * l->row_bytes;
    const __m512i low = _mm512_set1_epi8(15), table = table_of(l);
    const int quarters = 1 << (group_shift(l) - 5); /* of a vector, for each group */
    double total = 0;
    for (int64_t k = 0, g = 0; k < a->in_features; k += LANE_BLOCK) {
        const int64_t left = a->in_features - k;
        CODES_AT(w + k / 2, left >= LANE_BLOCK ? ~(__mmask64)0 : ((__mmask64)1 << left / 2) - 1)
        const __m512i *corrections = lane_corrections[k / LANE_BLOCK];
        __m512i sums = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(corrections[0], even, _mm512_loadu_si512(x + k)), odd,
                                           _mm512_loadu_si512(x + k + 64));
        if (rows > 1) {
            const __m512i lower =
                _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(corrections[1], even, _mm512_loadu_si512(x2 + k)), odd,
                                    _mm512_loadu_si512(x2 + k + 64));
            sums = _mm512_add_epi32(_mm512_slli_epi32(sums, 8), lower);
        }
        sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_CDAB));
        sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_BADC));
        int32_t lanes[16];
        float scales[16] = {0}; /* room for whole vectors */
        _mm512_storeu_si512(lanes, sums);
        const int64_t count = MIN(4 / quarters, l->num_groups - g);
        find_scales(l, column, g, count, scales, NULL);
        for (int64_t i = 0; i < count; i++, g++) {
            int64_t sum = 0;
            for (int64_t j = i * quarters; j < (i + 1) * quarters; j++) sum += lanes[4 * j];
            total += (double)sum * (double)scales[i];
        }
    }
    store_total(l, column, total);
}

/* The factors of the next four channels are found beside the products of these. */
enum { FETCHED_SCALES = 16 }; /* channels whose scales are fetched ahead */
NOINLINE bool find_four_factors(const linear *l, channel_steps *own, int64_t column, int place, int most) {
    bool have = true;
    for (int i = 0; i < 4; i++) have = find_factors(l, own, column + i, place + i, most) && have;
    return have;
}
typedef void (*factors_fn)(const linear *l, channel_steps *own, int64_t column, int place);
static void token_by_factors(const linear *l, int64_t column, int64_t column_end, factors_fn four, int rows) {
    const bool has_table = l->kind == INT4_SHIFTS;
    const group_numbers *n = &l->numbers;
    const int64_t end = column + (column_end - column) / 4 * 4,
                  scale_bytes = l->num_groups * (n->sub_scale ? 1 : n->dtype == 0 ? 4 : 2);
    const char *scales = n->sub_scale ? (const char *)n->sub_scale : n->scale;
    scales += (column + FETCHED_SCALES) * scale_bytes;
    const int most = most_shift(l->a->in_features);
    correct_lanes(l->a, rows, has_table ? WEIGHT_OFFSET : SIGNED_CODES);
    channel_steps *own = own_steps();
    int place = 0;
    bool has_factors = column < end && find_four_factors(l, own, column, place, most);
    for (; column < end; column += 4, place ^= 4, scales += 4 * scale_bytes) {
        const bool had_factors = has_factors;
        for (int64_t b = 0; b < 4 * scale_bytes; b += 64) _mm_prefetch(scales + b, _MM_HINT_T0);
        if (column + 4 < end) has_factors = find_four_factors(l, own, column + 4, place ^ 4, most);
        if (had_factors) four(l, own, column, place);
        else
            for (int j = 0; j < 4; j++) channel_in_order(l, column + j, rows, has_table);
    }
    for (; column < column_end; column++) channel_in_order(l, column, rows, has_table);
}

/* A function for each size of groups, kind of codes and form of activations. It is called and not inlined, so that the
 * loop has all registers. */
#define DEFINE_FACTORS(name, rows, shift, has_table)                                               \
    NOINLINE void name(const linear *l, channel_steps *own, int64_t column, int place) {       \
        four_by_factors(l, own, column, place, rows, shift, has_table);                              \
    }
#define DEFINE_FACTORS_OF(name, rows, has_table)                                                   \
    DEFINE_FACTORS(name##_32, rows, 5, has_table)                                                  \
    DEFINE_FACTORS(name##_64, rows, 6, has_table)                                                  \
    DEFINE_FACTORS(name##_128, rows, 7, has_table)
DEFINE_FACTORS_OF(steps_8_bit, 1, false)
DEFINE_FACTORS_OF(steps_16_bit, 2, false)
DEFINE_FACTORS_OF(shifts_8_bit, 1, true)
DEFINE_FACTORS_OF(shifts_16_bit, 2, true)

static void one_token_factors(const linear *l, int64_t column, int64_t column_end) {
    static const factors_fn functions[2][2][3] = {
        {CODES_OF(steps_8_bit), CODES_OF(steps_16_bit)},
        {CODES_OF(shifts_8_bit), CODES_OF(shifts_16_bit)},
    };
    const int rows = l->a->rows_per_token;
    token_by_factors(l, column, column_end, functions[l->kind == INT4_SHIFTS][rows - 1][group_shift(l) - 5], rows);
}
