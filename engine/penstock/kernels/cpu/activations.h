/* Quantizing activations to integers, one scale for each token. Part of linear/linear.h. */
#pragma once

/* Whether the rows hi and lo of a token lie in turns of eight inputs, for instructions that multiply two rows at
 * once. */
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

/* What is added to INT8 weights (and to a table's integers), so that they are unsigned. ARM multiplies signed bytes. */
#if defined(__aarch64__)
enum { WEIGHT_OFFSET = 0 };
#else
enum { WEIGHT_OFFSET = 128 };
#endif

/* Rows of integers, padded with zeros to a multiple of 64. A token has one row; where bytes are multiplied, a token has
 * two INT8 rows with "int16", hi and lo, where q = 256 hi + lo. */
typedef struct {
    const float *x;
    int64_t x_stride, num_tokens, in_features, padded;
    const int64_t *order; /* the row of x that each token has; NULL: their own order */
    int64_t group_size, num_groups; /* of inputs that share a scale of the weights: all of them, or 16 n */
    int rows_per_token;
    int64_t words; /* 0, or the inputs of a block, of which the 16-bit integers of even inputs lie before those of odd
                    * inputs; a token then has one row */
    bool in_bytes; /* integers lie as bytes of even and odd inputs (linear/codes_bytes.h) */
    bool is_split; /* integers have 16 bits */
    /* of the first inputs, which are a multiple of `halved_by` (0: there are none), the even ones lie before the odd
     * ones in each `halved_by` */
    int64_t halved, halved_by;
    /* four inputs of 16 rows side by side: the rows hi of eight tokens, then the rows lo; else 16 tokens */
    bool in_tiles;
    int32_t offset; /* what the kernels add to each weight, so that it is unsigned */
    int flip; /* 0x80: bytes have 128 added, so that they are unsigned; else 0 */
    float limit;
    integer *rows;
    int32_t *corrections; /* -offset * the sum of a row's integers: [num_rows, num_groups] */
    float *token_scales;
} activations;

/* These are plain loops, which GCC vectorizes for any build. With GCC's vector types, comparisons and conversions
 * of vectors wider than a register become scalar. */
INLINE int32_t bits_of(float f) {
    int32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

/* One group of a token's inputs. |x / divisor| is at most 32512 (in the worst case one rounding more). So adding
 * 1.5 * 2^23 rounds half to even and leaves the integer in the low bits. */
INLINE void quantize_group(const float *restrict x, int64_t size, float divisor, integer *restrict hi,
                           integer *restrict lo, int32_t offset, int32_t *hi_sum, int32_t *lo_sum,
                           const bool is_split) {
    const float magic = 12582912.0f;
    const int32_t magic_bits = bits_of(magic);
    uint32_t sum = 0, sum_of_lo = 0; /* integers of a row with NaN wrap around, and don't matter */
    for (int64_t k = 0; k < size; k++) {
        const int32_t q = bits_of(x[k] / divisor + magic) - magic_bits;
        const int32_t h = is_split ? (q + 128) >> 8 : q, l = q - h * 256;
        hi[k] = (integer)h, sum += (uint32_t)h;
        if (is_split) lo[k] = (integer)l, sum_of_lo += (uint32_t)l;
    }
    *hi_sum = (int32_t)(-(uint32_t)offset * sum);
    if (is_split) *lo_sum = (int32_t)(-(uint32_t)offset * sum_of_lo);
}

/* The same as words, in blocks. `k` is the first input, which begins 32 inputs of a block, or `at_once` of them: 32 or
 * 16. */
INLINE void quantize_words(const float *restrict x, int64_t k, int64_t size, float divisor, int64_t block,
                           int16_t *rows, int32_t offset, int32_t *group_sum, const int at_once) {
    const float magic = 12582912.0f;
    const int32_t magic_bits = bits_of(magic);
    uint32_t sum = 0;
    for (const int64_t stop = k + size; k < stop; k += at_once, x += at_once) {
        int16_t *restrict even = rows + k / block * block + k % block / 2, *restrict odd = even + block / 2;
        for (int i = 0; i < at_once / 2; i++) {
            const int32_t first = bits_of(x[2 * i] / divisor + magic) - magic_bits;
            const int32_t second = bits_of(x[2 * i + 1] / divisor + magic) - magic_bits;
            even[i] = (int16_t)first, odd[i] = (int16_t)second, sum += (uint32_t)first + (uint32_t)second;
        }
    }
    *group_sum = (int32_t)(-(uint32_t)offset * sum);
}

/* The same as bytes, in blocks of 64 inputs: lo of even inputs, lo of odd ones, and hi of both if the integers have 16
 * bits. `k` is the first input, which begins 32 inputs. */
INLINE void quantize_bytes(const float *restrict x, int64_t k, int64_t size, float divisor, int8_t *row, int32_t offset,
                           int32_t *group_sum, const bool is_split) {
    const float magic = 12582912.0f;
    const int32_t magic_bits = bits_of(magic);
    uint32_t sum = 0;
    for (const int64_t stop = k + size; k < stop; k += 32, x += 32) {
        int8_t *restrict lo = row + k / 64 * (is_split ? 128 : 64) + k % 64 / 2, *restrict hi = lo + 64;
        for (int i = 0; i < 16; i++) {
            const int32_t first = bits_of(x[2 * i] / divisor + magic) - magic_bits;
            const int32_t second = bits_of(x[2 * i + 1] / divisor + magic) - magic_bits;
            lo[i] = (int8_t)first, lo[i + 32] = (int8_t)second, sum += (uint32_t)first + (uint32_t)second;
            if (is_split) hi[i] = (int8_t)((first + 128) >> 8), hi[i + 32] = (int8_t)((second + 128) >> 8);
        }
    }
    *group_sum = (int32_t)(-(uint32_t)offset * sum);
}

/* 128 integers -> the even ones, and then the odd ones. */
INLINE void part_halves(const integer *restrict from, integer *restrict to) {
    for (int i = 0; i < 64; i++) to[i] = from[2 * i];
    for (int i = 0; i < 64; i++) to[64 + i] = from[2 * i + 1];
}

/* 128 inputs with the even ones first; beyond the first `size` ones they are zeros. The sums are added to. */
INLINE void quantize_halves(const float *restrict x, int64_t size, float divisor, integer *restrict hi,
                            integer *restrict lo, int32_t offset, int32_t *hi_sum, int32_t *lo_sum,
                            const bool is_split) {
    float own[128];
    integer parts[2][128];
    int32_t sums[2] = {0};
    if (size < 128) {
        memset(own, 0, sizeof own);
        x = memcpy(own, x, size * sizeof *x);
    }
    quantize_group(x, 128, divisor, parts[0], parts[1], offset, sums, sums + 1, is_split);
    part_halves(parts[0], hi);
    *hi_sum = (int32_t)((uint32_t)*hi_sum + (uint32_t)sums[0]);
    if (!is_split) return;
    part_halves(parts[1], lo);
    *lo_sum = (int32_t)((uint32_t)*lo_sum + (uint32_t)sums[1]);
}

/* A group of inputs, from input k on, as pairs of rows in turns of eight inputs. */
INLINE void quantize_pairs(const float *restrict x, int64_t k, int64_t size, float divisor, integer *restrict rows,
                           int32_t offset, int32_t *hi_sum, int32_t *lo_sum) {
    for (int64_t stop = k + size, next; k < stop; x += next - k, k = next) {
        int32_t sums[2];
        next = MIN((k + 8) / 8 * 8, stop);
        integer *hi = rows + k / 8 * 16 + k % 8;
        quantize_group(x, next - k, divisor, hi, hi + 8, offset, sums, sums + 1, true);
        *hi_sum = (int32_t)((uint32_t)*hi_sum + (uint32_t)sums[0]);
        *lo_sum = (int32_t)((uint32_t)*lo_sum + (uint32_t)sums[1]);
    }
}

/* The groups of a token, or all of its inputs, of which the `halved` ones come first. */
INLINE void quantize_groups(const activations *a, const float *x, float divisor, integer *hi, integer *lo,
                            int32_t *sums) {
    const int64_t size = a->group_size, n = a->num_groups, from = a->halved;
    const bool is_split = a->rows_per_token == 2;
    for (int64_t g = 0, k = from; g < n; g++, k += size) {
        const int64_t inputs = MAX(0, size - from);
        if (is_split) quantize_group(x + k, inputs, divisor, hi + k, lo + k, a->offset, sums + g, sums + n + g, true);
        else quantize_group(x + k, inputs, divisor, hi + k, NULL, a->offset, sums + g, NULL, false);
    }
    for (int64_t k = 0; k < from; k += 128)
        if (is_split) quantize_halves(x + k, size - k, divisor, hi + k, lo + k, a->offset, sums, sums + 1, true);
        else quantize_halves(x + k, size - k, divisor, hi + k, hi, a->offset, sums, sums, false);
}

INLINE const float *inputs_of(const activations *a, int64_t token) {
    return a->x + (a->order ? a->order[token] : token) * a->x_stride;
}

/* Sets the token's scale, and returns what its inputs are divided by. */
INLINE float token_divisor(const activations *a, int64_t token) {
    const float *x = inputs_of(a, token);
    int32_t largest = 0; /* the bits have the order of the numbers; NaN is the largest */
    for (int64_t k = 0; k < a->in_features; k++) largest = MAX(largest, bits_of(x[k]) & 0x7fffffff);
    float s;
    memcpy(&s, &largest, 4);
    s /= a->limit;
    if (s < 1.17549435e-38f) s = 0.0f; /* subnormal, too coarse to divide by: the row counts as 0 */
    if (!(s < INFINITY)) s = NAN;      /* NaN or infinity makes the whole row NaN */
    a->token_scales[token] = s;
    return s > 0.0f ? s : INFINITY;
}

/* Adds 128 to bytes. `count` is a multiple of 64. */
NOINLINE void flip_bytes(integer *bytes, int64_t count) {
    for (int64_t i = 0; i < count * (int64_t)sizeof(integer); i += 8) {
        uint64_t eight;
        memcpy(&eight, (char *)bytes + i, 8);
        eight ^= 0x8080808080808080;
        memcpy((char *)bytes + i, &eight, 8);
    }
}

static void quantize_token(void *context, int64_t token) {
    const activations *a = context;
    const float *x = inputs_of(a, token), divisor = token_divisor(a, token);
    const int64_t k_end = a->in_features, size = a->group_size, n = a->num_groups, row = token * a->rows_per_token;
    integer *hi = a->rows + row * a->padded, *lo = hi + a->padded;
    int32_t *sums = a->corrections + row * n;
    if (a->in_bytes) {
        int8_t *row = (int8_t *)(a->rows + token * a->padded);
        for (int64_t g = 0, k = 0; g < n; g++, k += size)
            if (a->is_split) quantize_bytes(x + k, k, size, divisor, row, a->offset, sums + g, true);
            else quantize_bytes(x + k, k, size, divisor, row, a->offset, sums + g, false);
        return;
    }
    if (a->words) {
        int16_t *words = (int16_t *)a->rows + token * a->padded;
        memset(words + a->padded - 64, 0, 64 * sizeof *words);
        for (int64_t g = 0, k = 0; g < n; g++, k += size)
            if (size == 16) quantize_words(x + k, k, 16, divisor, a->words, words, a->offset, sums + g, 16);
            else quantize_words(x + k, k, size, divisor, a->words, words, a->offset, sums + g, 32);
        return;
    }
    if (HAS_PAIRS && a->rows_per_token == 2) {
        memset(hi + 2 * (a->padded - 64), 0, 128 * sizeof(integer));
        memset(sums, 0, 2 * n * sizeof *sums);
        for (int64_t g = 0, k = 0; g < n; g++, k += size)
            quantize_pairs(x + k, k, size, divisor, hi, a->offset, sums + g, sums + n + g);
        return;
    }
    quantize_groups(a, x, divisor, hi, lo, sums);
    const int64_t filled = MAX(k_end, a->halved);
    if (a->flip) flip_bytes(hi, a->padded * a->rows_per_token);
    for (int part = 0; part < a->rows_per_token; part++)
        memset(hi + part * a->padded + filled, 0, (a->padded - filled) * sizeof(integer));
}

/* Where input k of a row lies. Part rows of a token follow each other. */
INLINE int64_t activation_at(const activations *a, int64_t row, int64_t k) {
    const int64_t by = a->halved_by, token = row / a->rows_per_token, part = row % a->rows_per_token;
    if (HAS_PAIRS && a->rows_per_token == 2) return token * 2 * a->padded + k / 8 * 16 + part * 8 + k % 8;
    if (k < a->halved) k = k / by * by + k % 2 * (by / 2) + k % by / 2;
    if (!a->in_tiles) return row * a->padded + k;
    const int64_t at_once = 16 / a->rows_per_token, tile = token / at_once, in_tile = token % at_once + 8 * part;
    return tile * 16 * a->padded + k / 4 * 64 + in_tile * 4 + k % 4;
}
