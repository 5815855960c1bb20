/* One token times weights in planes by pmaddwd, joined in registers. Part of int16.h.
 *
 * 16 bytes of each plane have the weights of 32 inputs. Widened to words, they give those of even inputs and those of
 * odd inputs, 128 too large, which corrections make up for; activations lie so as well (`words` of activations). */
#pragma once

typedef struct {
    const int8_t *upper;
    const uint8_t *lower;
} plane_rows;

/* Sums of four channels' inputs from k to `stop`, with 128 added to each weight. 1024 inputs fit a lane of 32 bits
 * (64 pairs of at most 2 * 32512 * 255), and the sums of lanes are exact in double. */
enum { MOST_PLANE_INPUTS = 1024, MOST_UPPER_INPUTS = 128 };
#define CLEAR_PLANES(j) __m256i a##j = {};
#define MULTIPLY_PLANES(j)                                                                         \
    {                                                                                              \
        const __m256i u = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(w[j].upper + k / 2))); \
        const __m256i v = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(w[j].lower + k / 2))); \
        const __m256i even = _mm256_or_si256(_mm256_and_si256(_mm256_slli_epi16(u, 4), high), \
                                             _mm256_and_si256(v, low)); \
        const __m256i odd = _mm256_or_si256(_mm256_and_si256(u, high), _mm256_srli_epi16(v, 4));   \
        a##j = _mm256_add_epi32(a##j, _mm256_madd_epi16(even, x_even));                            \
        a##j = _mm256_add_epi32(a##j, _mm256_madd_epi16(odd, x_odd));                              \
    }
INLINE __m256d lanes_as_doubles(__m256i v) {
    return _mm256_add_pd(_mm256_cvtepi32_pd(_mm256_castsi256_si128(v)),
                         _mm256_cvtepi32_pd(_mm256_extracti128_si256(v, 1)));
}
INLINE vec4 plane_sums(const int16_t *x, const plane_rows w[CHANNELS], int64_t k, int64_t stop) {
    const __m256i low = _mm256_set1_epi16(0x0f), high = _mm256_set1_epi16(0xf0);
    const int64_t prefetch = tuning.prefetch_bytes / 2;
    CLEAR_PLANES(0) CLEAR_PLANES(1) CLEAR_PLANES(2) CLEAR_PLANES(3)
    for (; k < stop; k += CODE_INPUTS) {
        if (prefetch) {
            const plane_rows *next = w + k / CODE_INPUTS % CHANNELS; /* a line of each has four times these inputs */
            _mm_prefetch(next->upper + k / 2 + prefetch, _MM_HINT_T0);
            _mm_prefetch(next->lower + k / 2 + prefetch, _MM_HINT_T0);
        }
        const __m256i x_even = load_words(x + k), x_odd = load_words(x + k + 16);
        MULTIPLY_PLANES(0) MULTIPLY_PLANES(1) MULTIPLY_PLANES(2) MULTIPLY_PLANES(3)
    }
    const __m256d ab = _mm256_hadd_pd(lanes_as_doubles(a0), lanes_as_doubles(a1));
    const __m256d cd = _mm256_hadd_pd(lanes_as_doubles(a2), lanes_as_doubles(a3));
    return (vec4)_mm256_add_pd(_mm256_permute2f128_pd(ab, cd, 0x21), _mm256_blend_pd(ab, cd, 12));
}

/* -128 times the sum of all activations. (a->corrections of as many inputs as a channel has would not fit 32 bits.) */
static double whole_correction(const activations *a) {
    int64_t sum = 0;
    for (int64_t k = 0; k < a->in_features; k += CODE_INPUTS) {
        int32_t some = 0;
        for (int i = 0; i < CODE_INPUTS; i++) some += a->rows[k + i];
        sum += some;
    }
    return -128.0 * (double)sum;
}

/* plane_sums() of upper planes alone, whose codes c (0 to 15) stand for 16 c - 120: the sums of 16 c. */
INLINE vec4 upper_sums(const int16_t *x, const plane_rows w[CHANNELS], int64_t k, int64_t stop) {
    const int8_t *codes[CHANNELS] = {w[0].upper, w[1].upper, w[2].upper, w[3].upper};
    __m128i sums;
    for (int j = 0; tuning.prefetch_bytes && j < CHANNELS; j++)
        _mm_prefetch(codes[j] + k / 2 + tuning.prefetch_bytes / 2, _MM_HINT_T0);
    code_sums_1(x, 0, codes, k, stop, _mm_setzero_si128(), &sums, INT4);
    return (vec4)_mm256_cvtepi32_pd(sums) * 16.0;
}

/* The channels column, column + apart, ..., of which `channels` are there. */
INLINE void planes_tile(const linear *l, int64_t column, int64_t apart, int channels, double correction,
                        const bool is_upper) {
    const activations *a = l->a;
    const int64_t n = l->num_groups, size = n > 1 ? a->group_size : a->in_features;
    const int64_t most = is_upper ? MOST_UPPER_INPUTS : MOST_PLANE_INPUTS;
    const double per_correction = is_upper ? 120.0 / 128 : 1.0; /* corrections are -128 times the activations' sum */
    vec4 total = {};
    plane_rows w[CHANNELS];
    const float *scale[CHANNELS];
    for (int64_t j = 0; j < CHANNELS; j++) {
        const int64_t c = column + MIN(j, channels - 1) * apart;
        w[j] = (plane_rows){l->qweight + c * l->row_bytes, l->lower + c * l->lower_bytes}, scale[j] = l->scale + c * n;
    }
    for (int64_t g = 0; g < n; g++) {
        vec4 sums = (vec4){} + (n > 1 ? (double)a->corrections[g] : correction) * per_correction;
        for (int64_t k = g * size, stop; k < (g + 1) * size; k = stop) {
            stop = MIN(k + most, (g + 1) * size);
            sums += (is_upper ? upper_sums : plane_sums)(a->rows, w, k, stop);
        }
        const vec4 scales = {scale[0][g], scale[1][g], scale[2][g], scale[3][g]};
        total += n > 1 ? sums * scales : sums;
    }
    for (int64_t j = 0, c = column; j < channels; j++, c += apart) {
        const double factor = (double)a->token_scales[0] * (n > 1 ? 1.0 : (double)scale[j][0]);
        const float y = (float)(total[j] * factor);
        l->y[c] = l->bias ? y + l->bias[c] : y;
    }
}

NOINLINE void both_planes_tile(const linear *l, int64_t column, int64_t apart, int channels, double correction) {
    planes_tile(l, column, apart, channels, correction, false);
}
NOINLINE void upper_tile(const linear *l, int64_t column, int64_t apart, int channels, double correction) {
    planes_tile(l, column, apart, channels, correction, true);
}

/* Quarters of the channels, as one_token() has them, each a stream of either plane. */
static void one_token_planes(const linear *l, int64_t column, int64_t column_end) {
    const int64_t apart = (column_end - column) / CHANNELS, rest = column + CHANNELS * apart;
    const double correction = l->num_groups > 1 ? 0 : whole_correction(l->a);
    void (*const tile)(const linear *, int64_t, int64_t, int, double) = l->lower_bytes ? both_planes_tile : upper_tile;
    for (int64_t i = 0; i < apart; i++) tile(l, column + i, apart, CHANNELS, correction);
    if (rest < column_end) tile(l, rest, 1, (int)(column_end - rest), correction);
}
