/* Activations in tiles of 16 rows: four inputs of all rows of a tile lie side by side. Part of vnni.h. */
#pragma once

enum { TILE = 16 };

/* 16 rows of 16 words of 32 bits -> their columns, `apart` bytes apart: first within quarters of vectors, then the
 * quarters. */
INLINE void store_columns(const __m512i r[16], int8_t *to, int64_t apart) {
    __m512i q[4][4];
    for (int i = 0; i < 4; i++) {
        const __m512i *own = r + 4 * i;
        __m512i ab = _mm512_unpacklo_epi32(own[0], own[1]), AB = _mm512_unpackhi_epi32(own[0], own[1]);
        __m512i cd = _mm512_unpacklo_epi32(own[2], own[3]), CD = _mm512_unpackhi_epi32(own[2], own[3]);
        q[i][0] = _mm512_unpacklo_epi64(ab, cd), q[i][1] = _mm512_unpackhi_epi64(ab, cd);
        q[i][2] = _mm512_unpacklo_epi64(AB, CD), q[i][3] = _mm512_unpackhi_epi64(AB, CD);
    }
    for (int j = 0; j < 4; j++, to += apart) {
        __m512i ab = _mm512_shuffle_i32x4(q[0][j], q[1][j], 0x88), AB = _mm512_shuffle_i32x4(q[0][j], q[1][j], 0xdd);
        __m512i cd = _mm512_shuffle_i32x4(q[2][j], q[3][j], 0x88), CD = _mm512_shuffle_i32x4(q[2][j], q[3][j], 0xdd);
        _mm512_store_si512(to, _mm512_shuffle_i32x4(ab, cd, 0x88));
        _mm512_store_si512(to + 4 * apart, _mm512_shuffle_i32x4(AB, CD, 0x88));
        _mm512_store_si512(to + 8 * apart, _mm512_shuffle_i32x4(ab, cd, 0xdd));
        _mm512_store_si512(to + 12 * apart, _mm512_shuffle_i32x4(AB, CD, 0xdd));
    }
}

/* 16 rows of 64 bytes, `stride` apart -> columns of four bytes. */
INLINE void transpose_words(const int8_t *rows, int64_t stride, int8_t *to, int64_t apart) {
    __m512i r[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(rows + i * stride);
    store_columns(r, to, apart);
}

/* Quantizing activations into tiles: 128 inputs of all rows of a tile at a time. Rows without a token have no
 * meaning. */
INLINE void quantize_inputs(const activations *a, int64_t token, int64_t k, float divisor, int8_t *hi, int8_t *lo) {
    const int64_t half = a->halved_by ? a->halved_by : 1, size = a->num_groups > 1 ? a->group_size : 128;
    const int64_t row = token * a->rows_per_token;
    const float *x = inputs_of(a, token) + k;
    float some[128], own[128];
    if (a->in_features - k < 128) {
        memset(some, 0, sizeof some);
        x = memcpy(some, x, (a->in_features - k) * sizeof *x);
    }
    if (half > 1) {
        for (int64_t i = 0; i < 128; i += half)
            for (int64_t j = 0; j < half / 2; j++) own[i + j] = x[i + 2 * j], own[i + half / 2 + j] = x[i + 2 * j + 1];
        x = own;
    }
    for (int64_t i = 0; i < 128; i += size) {
        int32_t sums[2];
        if (lo) quantize_group(x + i, size, divisor, hi + i, lo + i, a->offset, sums, sums + 1, true);
        else quantize_group(x + i, size, divisor, hi + i, NULL, a->offset, sums, NULL, false);
        const int64_t group = a->num_groups > 1 ? (k + i) / size : 0;
        if (group >= a->num_groups) continue;
        int32_t *corrections = a->corrections + row * a->num_groups + group; /* of one group: modulo 2^32 */
        corrections[0] = (int32_t)((uint32_t)corrections[0] + (uint32_t)sums[0]);
        if (lo) corrections[a->num_groups] = (int32_t)((uint32_t)corrections[a->num_groups] + (uint32_t)sums[1]);
    }
}
static void quantize_tile(void *context, int64_t tile) {
    const activations *a = context;
    const bool is_split = a->rows_per_token == 2;
    const int64_t tokens = TILE / a->rows_per_token, token = tile * tokens, there = MIN(tokens, a->num_tokens - token);
    int8_t rows[TILE][128] __attribute__((aligned(64))) = {}, *to = a->rows + tile * TILE * a->padded;
    float divisors[TILE];
    memset(a->corrections + token * a->rows_per_token * a->num_groups, 0,
           there * a->rows_per_token * a->num_groups * sizeof *a->corrections);
    for (int64_t i = 0; i < there; i++) divisors[i] = token_divisor(a, token + i);
    for (int64_t k = 0; k < a->padded; k += 128, to += 128 * TILE) {
        for (int64_t i = 0; i < there; i++)
            quantize_inputs(a, token + i, k, divisors[i], rows[i], is_split ? rows[8 + i] : NULL);
        if (a->flip) flip_bytes(rows[0], sizeof rows);
        transpose_words(rows[0], 128, to, 64);
        transpose_words(rows[0] + 64, 128, to + 64 * TILE, 64);
    }
}

