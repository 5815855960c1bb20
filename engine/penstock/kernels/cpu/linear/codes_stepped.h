/* The sums of codes_bytes.h where scales are steps: integers over all groups of a channel. Part of codes_bytes.h. */
#pragma once

enum { STEPPED_TOKENS = 4, BFLOAT_ROWS = 4, STEPPED_BYTES = 16 << 10 /* of activations, which stay in the L1 cache */ };
enum { NUM_STREAMS = 4, STREAM_AHEAD = 512 /* bytes, at which a stream's lines are fetched */ };

INLINE void store_words(uint16_t *to, __m256i v) { _mm256_storeu_si256((__m256i *)to, v); }

/* The steps of 16 bfloat16 scales: a word of 32 bits has two of them, and with the other half cleared each is a
 * float32. `differ` gets bits where a step times the unit is another number. (A negative zero counts as no step.) */
INLINE __m256i sixteen_steps(__m256i both, __m256 unit, __m256 per_unit, __m256i *differ) {
    const __m256i even = _mm256_slli_epi32(both, 16), odd = _mm256_and_si256(both, _mm256_set1_epi32((int)0xffff0000));
    const __m256i even_steps = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(even), per_unit));
    const __m256i odd_steps = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(odd), per_unit));
    const __m256 even_again = _mm256_mul_ps(_mm256_cvtepi32_ps(even_steps), unit);
    const __m256 odd_again = _mm256_mul_ps(_mm256_cvtepi32_ps(odd_steps), unit);
    *differ = _mm256_or_si256(*differ, _mm256_xor_si256(_mm256_castps_si256(even_again), even));
    *differ = _mm256_or_si256(*differ, _mm256_xor_si256(_mm256_castps_si256(odd_again), odd));
    return _mm256_blend_epi16(even_steps, _mm256_slli_epi32(odd_steps, 16), 0xaa);
}

/* The largest sizes of some rows of bfloat16 numbers, n in each. */
INLINE __m128 largest_sizes(const uint16_t *rows, int64_t n, __m256i last) {
    const __m256i sizes = _mm256_set1_epi16(0x7fff), last_sizes = _mm256_and_si256(last, sizes);
    __m128i least[BFLOAT_ROWS];
    for (int j = 0; j < BFLOAT_ROWS; j++, rows += n) {
        __m256i largest = _mm256_setzero_si256(); /* the bits have the order of the numbers; NaN is the largest */
        int64_t g = 0;
        for (; g + 16 <= n; g += 16) largest = _mm256_max_epu16(largest, _mm256_and_si256(load_words(rows + g), sizes));
        if (g < n) largest = _mm256_max_epu16(largest, _mm256_and_si256(load_words(rows + g), last_sizes));
        const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
        least[j] = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))); /* finds the smallest of eight */
    }
    const __m128i two = _mm_unpacklo_epi32(least[0], least[1]), others = _mm_unpacklo_epi32(least[2], least[3]);
    const __m128i all = _mm_unpacklo_epi64(two, others);
    return _mm_castsi128_ps(_mm_xor_si128(_mm_slli_epi32(all, 16), _mm_set1_epi32((int)0xffff0000)));
}

/* The steps of four channels, as find_steps_as() has them, and zeros up to a multiple of 16. Of each row, 16 numbers at
 * a time are read. False: some have none. */
INLINE bool find_bfloat_steps(const uint16_t *rows, int64_t n, channel_steps *own, int64_t place) {
    static const uint16_t masks[32] = {[0 ... 15] = 0xffff};
    const __m256i last = load_words(masks + 16 - n % 16);
    const __m128 most = largest_sizes(rows, n, last), fifteen = _mm_set1_ps(MOST_STEPS);
    const __m128 one = _mm_div_ps(most, fifteen);
    float per_unit[BFLOAT_ROWS];
    _mm_storeu_ps(per_unit, _mm_and_ps(_mm_div_ps(fifteen, most), _mm_cmpgt_ps(most, _mm_setzero_ps())));
    _mm_storeu_ps(own->units + place, one);
    if (_mm_movemask_ps(_mm_cmplt_ps(one, _mm_set1_ps(INFINITY))) != 15) return false;
    if (!_mm_testz_si128(_mm_castps_si128(one), _mm_set1_epi32(0xfff))) return false; /* 12 bits at most */
    __m256i differ = _mm256_setzero_si256();
    for (int j = 0; j < BFLOAT_ROWS; j++, rows += n) {
        const __m256 unit = _mm256_broadcast_ss(own->units + place + j), inverse = _mm256_broadcast_ss(per_unit + j);
        uint16_t *at = own->at[place + j];
        int64_t g = 0;
        for (; g + 16 <= n; g += 16) store_words(at + g, sixteen_steps(load_words(rows + g), unit, inverse, &differ));
        if (g == n) continue;
        store_words(at + g, sixteen_steps(_mm256_and_si256(load_words(rows + g), last), unit, inverse, &differ));
    }
    return _mm256_testz_si256(differ, differ);
}
/* The same where four rows are not there, or nothing behind them may be read. */
NOINLINE bool find_last_bfloat_steps(const uint16_t *scales, int64_t n, channel_steps *own, int64_t place,
                                     int64_t rows) {
    uint16_t room[BFLOAT_ROWS * MOST_STEPPED_GROUPS + 16];
    memcpy(room, scales, rows * n * sizeof *room);
    memset(room + rows * n, 0, ((BFLOAT_ROWS - rows) * n + 16) * sizeof *room);
    return find_bfloat_steps(room, n, own, place);
}
/* The same where rows have their steps apart, as bytes. */
INLINE bool find_kept_steps(const linear *l, channel_steps *own, int64_t place, int64_t column, int64_t channels) {
    static const uint8_t masks[32] = {[0 ... 15] = 0xff};
    const int64_t n = l->num_groups, whole = n / 16 * 16;
    const int8_t *kept = l->numbers.sub_scale + column * n, *end = l->numbers.sub_scale + l->out_features * n;
    const __m128i last = _mm_loadu_si128((const __m128i *)(masks + 16 - n % 16)), most = _mm_set1_epi8(MOST_STEPS);
    __m128i over = _mm_setzero_si128();
    for (int64_t i = 0; i < channels; i++, kept += n) {
        int64_t g = 0;
        for (; g < whole; g += 16) {
            const __m128i some = _mm_loadu_si128((const __m128i *)(kept + g));
            over = _mm_or_si128(over, _mm_subs_epu8(_mm_abs_epi8(some), most));
            store_words(own->at[place + i] + g, _mm256_cvtepi8_epi16(some));
        }
        if (g == n) continue;
        int8_t room[16];
        const int8_t *from = kept + g;
        if (end - from < 16) from = memcpy(room, from, n - g); /* nothing behind the matrix may be read */
        const __m128i some = _mm_and_si128(_mm_loadu_si128((const __m128i *)from), last);
        over = _mm_or_si128(over, _mm_subs_epu8(_mm_abs_epi8(some), most));
        store_words(own->at[place + i] + g, _mm256_cvtepi8_epi16(some));
    }
    bool have = _mm_testz_si128(over, over);
    float *units = own->units + place;
    widen(l->numbers.scale, l->numbers.dtype, column, channels, units);
    for (int64_t i = 0; i < channels; i++) have &= is_unit(units[i]);
    return have;
}

/* The same of codes of 3 or 2 bits. A step beyond the largest counts as that. */
INLINE void find_low_steps(const linear *l, channel_steps *own, int64_t place, int64_t column, int64_t channels) {
    const int64_t n = l->num_groups;
    const int most = most_low_steps(l->numbers.bits);
    const int8_t *kept = l->numbers.sub_scale + column * n;
    for (int64_t i = 0; i < channels; i++, kept += n) {
        uint16_t *restrict at = own->at[place + i];
        for (int64_t g = 0; g < n; g++) at[g] = (uint16_t)(int16_t)MAX(-most, MIN(kept[g], most));
        memset(at + n, 0, 31 * sizeof *at);
    }
    widen(l->numbers.scale, l->numbers.dtype, column, channels, own->units + place);
}

/* The steps of some channels, at `place` and behind it among those of the thread. False: some have none. */
INLINE bool find_panel_steps(const linear *l, int64_t place, int64_t column, int64_t channels) {
    channel_steps *own = own_steps();
    if (is_low(l)) {
        find_low_steps(l, own, place, column, channels);
        return true;
    }
    if (is_one_block(l)) return find_kept_steps(l, own, place, column, channels);
    const int64_t n = l->num_groups, readable = (l->out_features - column) * n;
    const uint16_t *scales = (const uint16_t *)l->numbers.scale + column * n; /* of bfloat16 */
    bool have = true;
    if (l->numbers.dtype == 2) {
        for (int64_t i = 0; have && i < channels; i += BFLOAT_ROWS) {
            const bool is_safe = i + BFLOAT_ROWS <= channels && readable >= (i + BFLOAT_ROWS) * n + 15;
            if (is_safe) have = find_bfloat_steps(scales + i * n, n, own, place + i);
            else have = find_last_bfloat_steps(scales + i * n, n, own, place + i, MIN(BFLOAT_ROWS, channels - i));
        }
        return have;
    }
    for (int64_t i = 0; have && i < channels; i++) {
        have = find_steps_as(l, column + i, own->at[place + i], &own->units[place + i], false);
        memset(own->at[place + i] + n, 0, 15 * sizeof **own->at);
    }
    return have;
}

/* A group's step as words, or those of two groups of 32 inputs. */
INLINE __m256i step_words(const uint16_t *at, const int64_t size) {
    if (size > 32) return _mm256_set1_epi16((int16_t)*at);
    int32_t two;
    memcpy(&two, at, 4);
    const int64_t first = 0x0100010001000100, second = 0x0302030203020302;
    return _mm256_shuffle_epi8(_mm256_set1_epi32(two), _mm256_set_epi64x(second, second, first, first));
}

/* Some channels by some tokens: four pairs, or three of three tokens. Their sums are computed at once. */
typedef struct {
    const int8_t *x, *w; /* from group g on; tokens are `row_bytes` apart, and channels `stride` (0: one, again) */
    int64_t row_bytes, stride;
    const uint16_t *at;        /* all steps of the channels: PLACES apart, */
    int64_t apart;             /* or so far where each channel has a stream of its own */
    const int16_t *zero_parts; /* for each token, PLACES low parts and then PLACES high parts: find_zero_parts() */
    int64_t g, g_end, num_groups;
} stepped_pairs;

/* A token i by a channel j: sums of lo and of hi, each group's times its step. They begin with what makes the unsigned
 * codes signed, the steps times SIGNED_CODES (a shift) times the parts of the activations' sums. */
#define CLEAR_STEPPED(i, j) __m256i lo##i##j = {}, hi##i##j = {};
#define BEGIN_STEPPED(i, j)                                                                        \
    {                                                                                              \
        const int16_t *own = zero_parts + 2 * i * PLACES + h;                                      \
        lo##i##j = _mm256_add_epi32(lo##i##j, _mm256_madd_epi16(eight, load_words(own)));          \
        if (is_split) hi##i##j = _mm256_add_epi32(hi##i##j, _mm256_madd_epi16(eight, load_words(own + PLACES))); \
    }
#define MULTIPLY_STEPPED(i, j)                                                                     \
    {                                                                                              \
        const int8_t *own = x + i * row_bytes;                                                     \
        __m256i some = byte_products(first, own);                                                  \
        if (size == 128) some = _mm256_add_epi16(some, byte_products(second, own + x_block));      \
        lo##i##j = _mm256_add_epi32(lo##i##j, _mm256_madd_epi16(some, step));                      \
        INTEGERS_IN_REGISTER(lo##i##j);                                                            \
        if (is_split) {                                                                            \
            some = byte_products(first, own + BYTE_BLOCK);                                         \
            if (size == 128) some = _mm256_add_epi16(some, byte_products(second, own + x_block + BYTE_BLOCK)); \
            hi##i##j = _mm256_add_epi32(hi##i##j, _mm256_madd_epi16(some, step));                  \
            INTEGERS_IN_REGISTER(hi##i##j);                                                        \
        }                                                                                          \
    }
#define TOKENS_4(DO, j) TOKENS_3(DO, j) DO(3, j)
#define CHANNELS_1(DO, R) DO(R, 0)
#define CHANNELS_2(DO, R) DO(R, 0) DO(R, 1)
#define CHANNELS_4(DO, R) CHANNELS_2(DO, R) DO(R, 2) DO(R, 3)
#define CLEAR_CHANNEL(R, j) TOKENS_##R(CLEAR_STEPPED, j)
#define BEGIN_CHANNEL(R, j)                                                                        \
    {                                                                                              \
        const __m256i eight = _mm256_slli_epi16(load_words(at + j * apart + h), of_bits - 1);      \
        TOKENS_##R(BEGIN_STEPPED, j)                                                               \
    }
#define STEPPED_CHANNEL(R, j)                                                                      \
    {                                                                                              \
        const int8_t *codes = w + j * stride;                                                      \
        const code_bytes first = code_bytes_at(codes), second = code_bytes_at(codes + (size == 128 ? 32 : 0)); \
        const __m256i step = step_words(at + j * apart + g, size);                                 \
        TOKENS_##R(MULTIPLY_STEPPED, j)                                                            \
    }
/* The sums of four pairs: the tokens of a channel, and those of the next one. */
#define FOUR_OF_1(v) add_lanes(v##00, v##01, v##02, v##03)
#define FOUR_OF_2(v) add_lanes(v##00, v##10, v##01, v##11)
#define FOUR_OF_3(v) add_lanes(v##00, v##10, v##20, v##20)
#define FOUR_OF_4(v) add_lanes(v##00, v##10, v##20, v##30)

/* What is fetched while `channels` are multiplied: the next ones, or where rows are met in parts, the same bytes of
 * each of some later rows, or of each stream some later bytes. */
INLINE code_fetch next_pairs(const stepped_pairs *p, int64_t channels, bool has_streams) {
    if (has_streams) return (code_fetch){tuning.prefetch_bytes_int4 ? p->w + STREAM_AHEAD : NULL, true};
    if (channels > 1) return next_codes(p->w, channels, p->stride);
    const int64_t ahead = MAX(2, NEAR_BYTES / p->stride) * p->stride;
    return (code_fetch){tuning.prefetch_bytes_int4 ? p->w + ahead : NULL, true};
}
INLINE void fetch_pairs(code_fetch fetch, int channels, bool has_streams, int64_t stride, int64_t from,
                        int64_t bytes) {
    if (channels == 4 && !has_streams) fetch_codes(fetch, channels * from, channels * bytes); /* whole rows */
    else if (from % 64 == 0 || bytes == 64)
        for (int j = 0; j < channels; j++) fetch_codes(fetch, j * stride + from, 64);
}

/* R tokens by C channels, the groups from g to g_end. Their sums are exact in double. The part that has group 0 sets
 * `sums`, and later parts add to it. */
typedef void (*stepped_fn)(const stepped_pairs *p, vec4 *sums);
#define DEFINE_STEPPED(name, R, C, of_size, of_split)                                              \
    NOINLINE void name##_##R##_##of_size##_##of_split(const stepped_pairs *p, vec4 *sums) {        \
        enum { of_bits = 4, size = of_size, is_split = of_split, has_streams = IS_##name };        \
        const int64_t x_block = is_split ? 2 * BYTE_BLOCK : BYTE_BLOCK, at_once = size == 32 ? 2 : 1; \
        const int64_t bytes = at_once * size / 2, stride = p->stride, row_bytes = p->row_bytes;    \
        const int64_t apart = has_streams ? p->apart : stride ? PLACES : 0, g_end = p->g_end;      \
        const int8_t *x = p->x, *w = p->w;                                                         \
        const uint16_t *at = p->at;                                                                \
        const code_fetch fetch = next_pairs(p, C, has_streams);                                    \
        CHANNELS_##C(CLEAR_CHANNEL, R)                                                             \
        if (p->g == 0) {                                                                           \
            const int16_t *zero_parts = p->zero_parts;                                             \
            for (int64_t h = 0; h < p->num_groups; h += 16) { CHANNELS_##C(BEGIN_CHANNEL, R) }     \
        }                                                                                          \
        for (int64_t g = p->g, k = 0; g < g_end; g += at_once, k += bytes, w += bytes, x += bytes * x_block / 32) { \
            fetch_pairs(fetch, C, has_streams, stride, k, bytes);                                  \
            CHANNELS_##C(STEPPED_CHANNEL, R)                                                       \
        }                                                                                          \
        vec4 part = (vec4)_mm256_cvtepi32_pd(FOUR_OF_##R(lo));                                     \
        if (is_split) part += 256.0 * (vec4)_mm256_cvtepi32_pd(FOUR_OF_##R(hi));                   \
        *sums = p->g == 0 ? part : *sums + part;                                                   \
    }
#define IS_stepped 0
#define IS_streams 1
#define DEFINE_STEPPED_OF(name, R, C)                                                              \
    DEFINE_STEPPED(name, R, C, 32, 0) DEFINE_STEPPED(name, R, C, 32, 1)                            \
    DEFINE_STEPPED(name, R, C, 64, 0) DEFINE_STEPPED(name, R, C, 64, 1)                            \
    DEFINE_STEPPED(name, R, C, 128, 0) DEFINE_STEPPED(name, R, C, 128, 1)
#define STEPPED_OF(name, R)                                                                        \
    {{name##_##R##_32_0, name##_##R##_32_1}, {name##_##R##_64_0, name##_##R##_64_1},               \
     {name##_##R##_128_0, name##_##R##_128_1}}
DEFINE_STEPPED_OF(stepped, 1, 4)
DEFINE_STEPPED_OF(stepped, 2, 2)
DEFINE_STEPPED_OF(stepped, 3, 1)
DEFINE_STEPPED_OF(stepped, 4, 1)
DEFINE_STEPPED_OF(streams, 1, 4)
static const stepped_fn stepped_tiles[STEPPED_TOKENS][3][2] = {STEPPED_OF(stepped, 1), STEPPED_OF(stepped, 2),
                                                               STEPPED_OF(stepped, 3), STEPPED_OF(stepped, 4)};
static const stepped_fn stream_tiles[3][2] = STEPPED_OF(streams, 1);

#include "codes_low.h"

/* Of some tokens, what SIGNED_CODES * step (of fewer bits, their zero times the step) is multiplied by for each group: the negative sum of its activations, in
 * parts that fit 16 bits, low + 256 high (of 8-bit activations, low alone). */
static _Thread_local int16_t zero_parts[STEPPED_TOKENS][2][PLACES];
/* Behind the last group, both have zeros up to a multiple of 16. */
INLINE void find_zero_parts(const activations *a, int64_t token, int16_t *restrict low, int16_t *restrict high) {
    const int64_t n = a->num_groups;
    const int32_t *corrections = a->corrections + token * n, mask = a->is_split ? 255 : -1;
    for (int64_t g = 0; g < n; g++) {
        const int32_t sum = corrections[g] >> SIGNED_BITS;
        low[g] = (int16_t)(sum & mask), high[g] = (int16_t)(sum >> 8);
    }
    memset(low + n, 0, 30), memset(high + n, 0, 30);
}

/* Bytes of the codes of k inputs. */
INLINE int64_t bytes_before(const linear *l, int64_t k) { return is_low(l) ? k / 8 * l->numbers.bits : k / 2; }

/* Some tokens by channels whose steps have been found. */
static void stepped_tokens(const linear *l, int64_t token, int tokens, int64_t column, int64_t channels) {
    const activations *a = l->a;
    const int64_t n = l->num_groups, at_once = STEPPED_TOKENS / tokens, per_channel = STEPPED_TOKENS / at_once;
    const int64_t whole_inputs = is_low(l) ? low_block(l) : 128; /* whose codes lie together */
    const int64_t groups = tokens == 1 ? n : STEPPED_BYTES / (2 * tokens) / whole_inputs * whole_inputs / a->group_size;
    const int8_t *w = l->qweight + column * l->row_bytes, *x = bytes_of_token(a, token);
    const stepped_fn add = is_low(l) ? low_tiles[l->numbers.bits - 2][tokens - 1][a->group_size / 64][a->is_split]
                                     : stepped_tiles[tokens - 1][a->group_size / 64][a->is_split];
    const channel_steps *own = own_steps();
    int16_t *parts = zero_parts[0][0];
    __asm__("" : "+r"(parts)); /* as in own_steps() */
    for (int i = 0; i < tokens; i++)
        find_zero_parts(a, token + i, parts + 2 * i * PLACES, parts + (2 * i + 1) * PLACES);
    /* Channels that fill no tile have one each, where the same channel takes the others' places. */
    const int64_t whole = channels - channels % at_once;
    vec4 sums[STEPPED_CHANNELS];
    stepped_pairs p = {.row_bytes = 2 * a->padded, .zero_parts = parts, .num_groups = n};
    for (; p.g < n; p.g = p.g_end) {
        const int64_t k = p.g * a->group_size;
        vec4 *sum = sums;
        p.g_end = MIN(p.g + groups, n), p.x = x + (a->is_split ? 2 * k : k);
        for (int64_t c = 0; c < channels; c += c < whole ? at_once : 1) {
            p.w = w + c * l->row_bytes + bytes_before(l, k), p.at = own->at[c], p.stride = c < whole ? l->row_bytes : 0;
            add(&p, sum++);
        }
    }
    const double *each = (const double *)sums;
    for (int i = 0; i < tokens; i++) {
        float *y = l->y + (token + i) * l->out_features + column;
        const double token_scale = a->token_scales[token + i];
        for (int64_t c = 0; c < channels; c++) {
            const int64_t at = c < whole ? c * per_channel : (whole / at_once + c - whole) * STEPPED_TOKENS;
            y[c] = (float)(each[at + i] * (token_scale * (double)own->units[c]));
            if (l->bias) y[c] += l->bias[column + c];
        }
    }
}

/* At most STEPPED_CHANNELS channels. False: some of them have no steps, and nothing is computed. */
static bool stepped_panel(const linear *l, int64_t column, int64_t channels) {
    const int64_t num_tokens = l->a->num_tokens, tiles = (num_tokens + STEPPED_TOKENS - 1) / STEPPED_TOKENS;
    if (!find_panel_steps(l, 0, column, channels)) return false;
    for (int64_t i = 0, t = 0, end; i < tiles; i++, t = end) {
        end = (i + 1) * num_tokens / tiles;
        stepped_tokens(l, t, (int)(end - t), column, channels);
    }
    return true;
}

/* Channels one after the other, by all tokens. Where some that are met together have no steps, their groups are added
 * up as if none had. */
static void bytes_channels(const linear *l, int64_t column, int64_t column_end) {
    const activations *a = l->a;
    const bytes_fn tile = bytes_tiles[a->group_size / 64][a->is_split][l->kind == INT4_TABLE ? 2 : l->has_minimum];
    for (int64_t stop; column < column_end; column = stop) {
        stop = MIN(column + (l->has_steps ? STEPPED_CHANNELS : CHANNELS), column_end);
        if (l->has_steps && stepped_panel(l, column, stop - column)) continue;
        for (int64_t c = column; c < stop; c += CHANNELS)
            for (int64_t t = 0; t < a->num_tokens; t++) tile(l, t, c, (int)MIN(CHANNELS, stop - c));
    }
}

/* One token by as many channels as make four long streams: each tile has a channel of each quarter, so that a thread
 * reads at four places, on and on, which is what a processor fetches by itself. Returns the first channel that was not
 * computed: `column` itself where channels are too few. */
static int64_t stepped_streams(const linear *l, int64_t column, int64_t column_end) {
    const activations *a = l->a;
    const int64_t at_once = STEPPED_CHANNELS / NUM_STREAMS, length = (column_end - column) / STEPPED_CHANNELS * at_once;
    if (length < 2 * at_once) return column;
    const channel_steps *own = own_steps();
    int16_t *parts = zero_parts[0][0];
    __asm__("" : "+r"(parts)); /* as in own_steps() */
    find_zero_parts(a, 0, parts, parts + PLACES);
    const stepped_fn add = is_low(l) ? low_streams[l->numbers.bits - 2][a->group_size / 64][a->is_split]
                                     : stream_tiles[a->group_size / 64][a->is_split];
    const double token_scale = a->token_scales[0];
    stepped_pairs p = {.x = bytes_of_token(a, 0), .row_bytes = 2 * a->padded, .stride = length * l->row_bytes,
                       .apart = at_once * PLACES, .zero_parts = parts, .num_groups = l->num_groups,
                       .g_end = l->num_groups};
    for (int64_t c = column; c < column + length; c += at_once) {
        bool have = true;
        for (int j = 0; have && j < NUM_STREAMS; j++) have = find_panel_steps(l, j * at_once, c + j * length, at_once);
        if (!have) { /* the thread's zero parts, which this finds again, are the same */
            for (int64_t j = 0, from = c; j < NUM_STREAMS; j++, from += length) bytes_channels(l, from, from + at_once);
            continue;
        }
        for (int64_t i = 0; i < at_once; i++) {
            vec4 sums;
            p.w = l->qweight + (c + i) * l->row_bytes, p.at = own->at[i];
            add(&p, &sums);
            for (int j = 0; j < NUM_STREAMS; j++) {
                const int64_t channel = c + i + j * length;
                l->y[channel] = (float)(sums[j] * (token_scale * (double)own->units[j * at_once + i]));
                if (l->bias) l->y[channel] += l->bias[channel];
            }
        }
    }
    return column + NUM_STREAMS * length;
}
