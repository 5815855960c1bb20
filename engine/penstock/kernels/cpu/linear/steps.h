/* 4-bit codes whose scales are steps: within a row, each scale is a small integer (a step, -15 to 15) times one number,
 * the row's unit. Part of linear.h.
 *
 * A step times a code (-8 to 7) fits INT8, so the row is a row of INT8 with the unit as its scale: its products are
 * added up as integers, and no group has a sum of its own. The bits are those of groups added one after the other in
 * double. For a unit has at most 12 bits, and so all those sums are exact: an integer of at most 39 bits (131072 inputs
 * of 16 bits times 7 bits) times a unit.
 *
 * A matrix has the unit and the steps of each row apart (one scale a row, steps as sub-scales), or the scales alone:
 * then it can come from any file, and whether they are steps is seen from them, row after row. */
#pragma once

enum { SIGNED_CODES = 8, SIGNED_BITS = 3, MOST_STEPS = 15, STEPPED_CHANNELS = 64 };
/* Vectors write up to 31 places beyond the last group. */
enum { MOST_STEPPED_GROUPS = 1024, PLACES = MOST_STEPPED_GROUPS + 32 };

/* Of the channels that a thread computes: each at its number modulo STEPPED_CHANNELS, or 16 of each of the streams of
 * codes_stepped.h. */
typedef struct {
    float units[STEPPED_CHANNELS];
    uint16_t at[STEPPED_CHANNELS][PLACES]; /* where each step's row of stepped_codes begins */
} channel_steps;
static _Thread_local channel_steps steps;
/* The address of a thread's memory is the result of a function, around which all vectors are saved. GCC would call it
 * for each channel of a loop; the empty asm hides where this pointer comes from. */
INLINE channel_steps *own_steps(void) {
    channel_steps *own = &steps;
    __asm__("" : "+r"(own));
    return own;
}

/* The integers of the sixteen codes, times each step from -15 on; where a kernel looks them up, made unsigned. */
enum { STEPPED_OFFSET = HAS_VNNI ? WEIGHT_OFFSET : 0 };
static uint8_t stepped_codes[2 * MOST_STEPS + 1][16] __attribute__((aligned(16)));
__attribute__((constructor)) static void fill_stepped_codes(void) {
    for (int step = -MOST_STEPS; step <= MOST_STEPS; step++)
        for (int code = 0; code < 16; code++)
            stepped_codes[step + MOST_STEPS][code] = (uint8_t)(step * (code - SIGNED_CODES) + STEPPED_OFFSET);
}

/* Whether steps can have this unit: 12 bits at most. */
INLINE bool is_unit(float one) { return !(bits_of(one) & 0xfff) && fabsf(one) < INFINITY; }

/* The unit of a channel's scales, and where the rows of their steps begin in stepped_codes. False: the scales are no
 * steps, and `at` has no meaning. */
#if HAS_VNNI
INLINE __m512 sixteen_scales(const group_numbers *n, int64_t i, __mmask16 mask) {
    if (n->dtype == 0) return _mm512_maskz_loadu_ps(mask, (const float *)n->scale + i);
    const __m256i halves = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)n->scale + i);
    if (n->dtype == 1) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
/* Steps as they are used: places in a table, or the steps themselves. */
INLINE __m512i placed(__m512i steps, const bool as_places) {
    return as_places ? _mm512_slli_epi16(_mm512_add_epi16(steps, _mm512_set1_epi16(MOST_STEPS)), 4) : steps;
}
/* `count` steps from group g on of a channel that has them apart, and steps of 0 up to a multiple of 32. Returns the
 * largest ones. */
INLINE __m512i kept_places(const linear *l, int64_t column, int64_t g, int64_t count, uint16_t *restrict at,
                           const bool as_places) {
    const int8_t *own = l->numbers.sub_scale + column * l->num_groups + g;
    __m512i largest = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += 32) {
        const __mmask32 some = count - i < 32 ? (1u << (count - i)) - 1 : ~(__mmask32)0;
        const __m512i steps = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(some, own + i));
        largest = _mm512_max_epi16(largest, _mm512_abs_epi16(steps));
        _mm512_storeu_si512(at + i, placed(steps, as_places));
    }
    return largest;
}
/* The unit and the steps of a channel that has them apart. False: some steps are too large, and `at` has no meaning. */
INLINE bool kept_steps(const linear *l, int64_t column, uint16_t *restrict at, float *unit, const bool as_places) {
    const __m512i largest = kept_places(l, column, 0, l->num_groups, at, as_places);
    widen(l->numbers.scale, l->numbers.dtype, column, 1, unit);
    return !_mm512_cmpgt_epi16_mask(largest, _mm512_set1_epi16(MOST_STEPS)) && is_unit(*unit);
}
/* The places of `count` steps from group g on. False: some of the scales are no steps. */
INLINE bool step_places(const linear *l, int64_t column, int64_t g, int64_t count, float unit, float per_unit,
                        uint16_t *restrict at, const bool as_places) {
    __mmask16 differ = 0;
    for (int64_t i = 0; i < count; i += 16) {
        const __mmask16 mask = count - i < 16 ? (1u << (count - i)) - 1 : 0xffff;
        const __m512 scales = sixteen_scales(&l->numbers, column * l->num_groups + g + i, mask);
        const __m512i step = _mm512_cvtps_epi32(_mm512_mul_ps(scales, _mm512_set1_ps(per_unit))); /* the nearest */
        const __m512 again = _mm512_mul_ps(_mm512_cvtepi32_ps(step), _mm512_set1_ps(unit));
        differ |= _mm512_cmp_ps_mask(again, scales, _CMP_NEQ_UQ);
        _mm256_storeu_si256((__m256i *)(at + i), _mm512_cvtepi32_epi16(placed(step, as_places)));
    }
    return !differ;
}
/* The same of 32 bfloat16 numbers at a time: a word of 32 bits has two of them, and with the other half cleared each is
 * a float32. (A negative zero counts as no step.) */
INLINE bool bfloat_places(const uint16_t *scales, int64_t n, float unit, float per_unit, uint16_t *restrict at,
                          const bool as_places) {
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    const __m512 units = _mm512_set1_ps(unit), inverse = _mm512_set1_ps(per_unit);
    __m512i differ = _mm512_setzero_si512();
    for (int64_t i = 0; i < n; i += 32) {
        const __m512i both = _mm512_maskz_loadu_epi16(n - i < 32 ? (1u << (n - i)) - 1 : ~(__mmask32)0, scales + i);
        const __m512i even = _mm512_slli_epi32(both, 16), odd = _mm512_and_si512(both, high);
        const __m512i even_steps = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(even), inverse));
        const __m512i odd_steps = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(odd), inverse));
        const __m512 even_again = _mm512_mul_ps(_mm512_cvtepi32_ps(even_steps), units);
        const __m512 odd_again = _mm512_mul_ps(_mm512_cvtepi32_ps(odd_steps), units);
        differ = _mm512_or_si512(differ, _mm512_xor_si512(_mm512_castps_si512(even_again), even));
        differ = _mm512_or_si512(differ, _mm512_xor_si512(_mm512_castps_si512(odd_again), odd));
        const __m512i steps = _mm512_mask_blend_epi16(0xaaaaaaaa, even_steps, _mm512_slli_epi32(odd_steps, 16));
        _mm512_storeu_si512(at + i, placed(steps, as_places));
    }
    return _mm512_test_epi32_mask(differ, differ) == 0;
}
/* The largest size of `n` bfloat16 numbers. */
INLINE float largest_bfloat(const uint16_t *scales, int64_t n) {
    __m512i largest = _mm512_setzero_si512(); /* the bits have the order of the numbers; NaN is the largest */
    for (int64_t i = 0; i < n; i += 32) {
        const __m512i some = _mm512_maskz_loadu_epi16(n - i < 32 ? (1u << (n - i)) - 1 : ~(__mmask32)0, scales + i);
        largest = _mm512_max_epu16(largest, _mm512_and_si512(some, _mm512_set1_epi16(0x7fff)));
    }
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64(largest, 1));
    const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    /* An instruction finds the smallest of eight. */
    const uint32_t bits =
        ~(uint32_t)_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)))) << 16;
    float most;
    memcpy(&most, &bits, 4);
    return most;
}
INLINE float largest_scale(const linear *l, int64_t column) {
    const int64_t n = l->num_groups, first = column * n;
    __m512i largest = _mm512_setzero_si512();
    for (int64_t g = 0; g < n; g += 16) {
        const __mmask16 mask = n - g < 16 ? (1u << (n - g)) - 1 : 0xffff;
        const __m512i bits = _mm512_castps_si512(sixteen_scales(&l->numbers, first + g, mask));
        largest = _mm512_max_epi32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    const int32_t bits = _mm512_reduce_max_epi32(largest);
    float most;
    memcpy(&most, &bits, 4);
    return most;
}
INLINE bool find_steps_as(const linear *l, int64_t column, uint16_t *restrict at, float *unit, const bool as_places) {
    if (is_one_block(l)) return kept_steps(l, column, at, unit, as_places);
    const bool is_bfloat = l->numbers.dtype == 2;
    const uint16_t *scales = (const uint16_t *)l->numbers.scale + column * l->num_groups;
    const float most = is_bfloat ? largest_bfloat(scales, l->num_groups) : largest_scale(l, column);
    const float one = most / MOST_STEPS, per_unit = most > 0.0f ? MOST_STEPS / most : 0.0f;
    *unit = one;
    if (!is_unit(one)) return false;
    return is_bfloat ? bfloat_places(scales, l->num_groups, one, per_unit, at, as_places)
                     : step_places(l, column, 0, l->num_groups, one, per_unit, at, as_places);
}
INLINE bool find_steps(const linear *l, int64_t column, uint16_t *restrict at, float *unit) {
    return find_steps_as(l, column, at, unit, true);
}
#else
/* As above. */
INLINE bool kept_steps(const linear *l, int64_t column, uint16_t *restrict at, float *unit, const bool as_places) {
    const int64_t n = l->num_groups;
    const int8_t *own = l->numbers.sub_scale + column * n;
    uint8_t over = 0;
    for (int64_t g = 0; g < n; g++) {
        over |= (uint8_t)(own[g] + MOST_STEPS) > 2 * MOST_STEPS;
        at[g] = (uint16_t)(as_places ? 16 * (own[g] + MOST_STEPS) : own[g]);
    }
    widen(l->numbers.scale, l->numbers.dtype, column, 1, unit);
    return !over && is_unit(*unit);
}
INLINE bool find_steps_as(const linear *l, int64_t column, uint16_t *restrict at, float *unit, const bool as_places) {
    if (is_one_block(l)) return kept_steps(l, column, at, unit, as_places);
    const int64_t n = l->num_groups;
    const float magic = 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer, which the low bits hold */
    float scales[MOST_STEPPED_GROUPS];
    int32_t largest = 0, differ = 0; /* the bits have the order of the numbers; NaN is the largest */
    widen(l->numbers.scale, l->numbers.dtype, column * n, n, scales);
    for (int64_t g = 0; g < n; g++) largest = MAX(largest, bits_of(scales[g]) & 0x7fffffff);
    float most;
    memcpy(&most, &largest, 4);
    const float one = most / MOST_STEPS, per_unit = most > 0.0f ? MOST_STEPS / most : 0.0f;
    *unit = one;
    if (!is_unit(one)) return false;
    for (int64_t g = 0; g < n; g++) {
        const int32_t step = bits_of(scales[g] * per_unit + magic) - bits_of(magic);
        differ |= (float)step * one != scales[g];
        at[g] = (uint16_t)(as_places ? 16 * (step + MOST_STEPS) : step);
    }
    return !differ;
}
static bool find_steps(const linear *l, int64_t column, uint16_t *restrict at, float *unit) {
    return find_steps_as(l, column, at, unit, true);
}
#endif

/* Whether the matrix has steps, by a few of its rows. A row that then has none is computed in plain C. */
static bool seems_stepped(const linear *l) {
    enum { SOME = 8 };
    uint16_t at[PLACES];
    float unit;
    if (l->num_groups > MOST_STEPPED_GROUPS || l->has_minimum || (l->numbers.sub_scale && !is_one_block(l)))
        return false;
    for (int64_t i = 0; i < SOME; i++)
        if (!find_steps(l, i * (l->out_features - 1) / (SOME - 1), at, &unit)) return false;
    return true;
}

/* The steps of `count` channels, column, column + apart, ..., at the places from `place` on. False: some have none. */
INLINE bool find_far_steps(const linear *l, int64_t column, int64_t apart, int count, int place) {
    channel_steps *own = own_steps();
    bool have = true;
    for (int i = place; i < place + count; i++, column += apart)
        have = find_steps(l, column, own->at[i], &own->units[i]) && have;
    /* Places in a table have to exist, also of channels that don't count. */
    if (!have) memset(own->at[place], 0, count * sizeof *own->at);
    return have;
}
