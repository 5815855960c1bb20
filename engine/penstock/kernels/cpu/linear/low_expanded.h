/* Codes of 3 or 2 bits as INT8: those of some channels are expanded, and the kernels of INT8 multiply them. So every
 * build has them for any number of tokens; one token and few tokens may have kernels of their own (codes_bytes.h). Part
 * of linear.h. */
#pragma once

/* The expanded channels stay in the L2 cache, beside activations. Vectors write up to 32 bytes behind a channel. */
enum { LOW_BYTES = 256 << 10, LOW_CHANNELS = HAS_PANELS ? 16 : 64 };
static _Thread_local int8_t low_room[LOW_BYTES + LOW_PAIR] __attribute__((aligned(64)));

#if defined(__AVX2__)
/* The integers of the eight codes (or four), times each step from -63 on; the second half of a row is not used. */
enum { MOST_LOW_STEPS = 63 };
static int8_t low_integers[2][2 * MOST_LOW_STEPS + 1][16] __attribute__((aligned(16)));
__attribute__((constructor)) static void fill_low_integers(void) {
    for (int bits = 2; bits <= 3; bits++)
        for (int step = -most_low_steps(bits); step <= most_low_steps(bits); step++)
            for (int code = 0; code < 1 << bits; code++)
                low_integers[bits - 2][step + MOST_LOW_STEPS][code] = (int8_t)(step * (code - (1 << (bits - 1))));
}
INLINE __m128i integers_of(int step, const int bits) {
    const int most = most_low_steps(bits), kept = MAX(-most, MIN(step, most));
    return _mm_load_si128((const __m128i *)low_integers[bits - 2][kept + MOST_LOW_STEPS]);
}
/* A pair of a block, the steps of whose halves are `first` and `second`: 64 integers. */
INLINE void expand_pair(const int8_t *block, const int i, int first, int second, int8_t *to, const int bits) {
    const low_pair codes = low_pair_at(block, i, bits);
    const __m256i table = _mm256_inserti128_si256(_mm256_castsi128_si256(integers_of(first, bits)),
                                                  integers_of(second, bits), 1);
    const __m256i even = _mm256_shuffle_epi8(table, codes.even), odd = _mm256_shuffle_epi8(table, codes.odd);
    const __m256i low = _mm256_unpacklo_epi8(even, odd), high = _mm256_unpackhi_epi8(even, odd);
    _mm256_storeu_si256((__m256i *)to, _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256((__m256i *)(to + 32), _mm256_permute2x128_si256(low, high, 0x31));
}
#else
/* As above: plain loops, which the compiler vectorizes. */
INLINE void expand_pair(const int8_t *block, const int i, int first, int second, int8_t *to, const int bits) {
    const int most = most_low_steps(bits), zero = 1 << (bits - 1);
    const int steps[2] = {MAX(-most, MIN(first, most)), MAX(-most, MIN(second, most))};
    const uint8_t *own = (const uint8_t *)block + (bits == 3 && i < 3 ? 32 * i : 0), *b = (const uint8_t *)block + 32;
    for (int half = 0; half < 2; half++)
        for (int j = 16 * half; j < 16 * half + 16; j++) {
            int even, odd;
            if (bits == 2) even = own[j] >> 4 * i & 3, odd = own[j] >> (4 * i + 2) & 3;
            else if (i < 3) even = own[j] & 7, odd = own[j] >> 3 & 7;
            else even = own[j] >> 6 | (b[j] >> 4 & 4), odd = own[j + 64] >> 6 | (b[j] >> 5 & 4);
            to[2 * j] = (int8_t)((even - zero) * steps[half]), to[2 * j + 1] = (int8_t)((odd - zero) * steps[half]);
        }
}
#endif

INLINE void expand_low(const linear *l, int64_t column, int8_t *to, const int bits) {
    const int64_t width = l->a->in_features, n = l->num_groups, size = width / n;
    const int8_t *block = l->qweight + column * l->row_bytes, *steps = l->numbers.sub_scale + column * n;
    const int pairs = bits == 3 ? LOW_BLOCK_3 / LOW_PAIR : LOW_BLOCK_2 / LOW_PAIR;
    for (int64_t k = 0; k < width; block += 32 * (bits == 3 ? 3 : 1)) {
#pragma GCC unroll 4
        for (int i = 0; i < pairs; i++) {
            const int64_t first = k / size, second = MIN((k + 32) / size, n - 1);
            if (k >= width) break;
            expand_pair(block, i, steps[first], steps[second], to + k, bits);
            k += LOW_PAIR;
        }
    }
}

/* Channels of a task. */
static void linear_expanded(const linear *l, int64_t column, int64_t column_end) {
    const int64_t width = l->a->in_features, fitting = LOW_BYTES / width;
    const int64_t at_once = MIN(LOW_CHANNELS, fitting < 4 ? fitting : fitting / 4 * 4); /* tiles have two or four */
    float units[LOW_CHANNELS];
    for (int64_t stop; column < column_end; column = stop) {
        stop = MIN(column + at_once, column_end);
        linear some = {.a = l->a, .qweight = low_room, .scale = units, .y = l->y + column, .num_groups = 1,
                       .out_features = l->out_features, .columns_per_task = INT64_MAX, .kind = INT8, .row_bytes = width,
                       .is_few = l->is_few, .is_tiled = l->is_tiled};
        if (l->bias) some.bias = l->bias + column;
        some.after = l->qweight + stop * l->row_bytes, some.after_bytes = l->row_bytes;
        widen(l->numbers.scale, l->numbers.dtype, column, stop - column, units);
        for (int64_t c = column; c < stop; c++)
            if (l->numbers.bits == 3) expand_low(l, c, low_room + (c - column) * width, 3);
            else expand_low(l, c, low_room + (c - column) * width, 2);
        if (l->a->in_tiles) linear_tiles(&some, 0, stop - column);
        else linear_rest(&some, linear_fast(&some, 0, stop - column), stop - column);
    }
}
