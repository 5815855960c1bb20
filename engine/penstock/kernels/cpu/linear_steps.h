/* 4-bit codes whose scales are steps: within a row, each scale is a small integer (a step, -15 to 15) times one number,
 * the row's unit. Part of linear.h.
 *
 * A step times a code (-8 to 7) fits INT8, so the row is a row of INT8 with the unit as its scale: its products are
 * added up as integers, and no group has a sum of its own. The bits are those of groups added one after the other in
 * double. For a unit has at most 12 bits, and so all those sums are exact: an integer of at most 39 bits (131072 inputs
 * of 16 bits times 7 bits) times a unit.
 *
 * Whether scales are steps is seen from the scales themselves, row after row; the matrix can come from any file. */
#pragma once

enum { SIGNED_CODES = 8, MOST_STEPS = 15, STEPPED_CHANNELS = 64, MOST_STEPPED_GROUPS = 1024 };

/* Of the channels that a thread computes, each at its number modulo STEPPED_CHANNELS. */
static _Thread_local struct {
    float units[STEPPED_CHANNELS];
    uint16_t at[STEPPED_CHANNELS][MOST_STEPPED_GROUPS + 4]; /* where each step's row of stepped_codes begins */
} steps;

/* The integers of the sixteen codes, times each step from -15 on; where a kernel looks them up, made unsigned. */
enum { STEPPED_OFFSET = HAS_VNNI ? WEIGHT_OFFSET : 0 };
static uint8_t stepped_codes[2 * MOST_STEPS + 1][16] __attribute__((aligned(16)));
__attribute__((constructor)) static void fill_stepped_codes(void) {
    for (int step = -MOST_STEPS; step <= MOST_STEPS; step++)
        for (int code = 0; code < 16; code++)
            stepped_codes[step + MOST_STEPS][code] = (uint8_t)(step * (code - SIGNED_CODES) + STEPPED_OFFSET);
}

/* The unit of a channel's scales, and where the rows of their steps begin in stepped_codes. False: the scales are no
 * steps, and `at` has no meaning. */
static bool find_steps(const linear *l, int64_t column, uint16_t *restrict at, float *unit) {
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
    if (bits_of(one) & 0xfff || !(one < INFINITY)) return false; /* 12 bits at most */
    for (int64_t g = 0; g < n; g++) {
        const int32_t step = bits_of(scales[g] * per_unit + magic) - bits_of(magic);
        differ |= (float)step * one != scales[g];
        at[g] = (uint16_t)(16 * (step + MOST_STEPS));
    }
    memset(at + n, 0, 4 * sizeof *at); /* for vectors that reach beyond the last group */
    return !differ;
}

/* Whether the matrix has steps, by a few of its rows. A row that then has none is computed in plain C. */
static bool seems_stepped(const linear *l) {
    enum { SOME = 8 };
    uint16_t at[MOST_STEPPED_GROUPS + 4];
    float unit;
    if (l->num_groups > MOST_STEPPED_GROUPS || l->has_minimum || l->numbers.sub_scale) return false;
    for (int64_t i = 0; i < SOME; i++)
        if (!find_steps(l, i * (l->out_features - 1) / (SOME - 1), at, &unit)) return false;
    return true;
}

/* The steps of the channels from `column` on, at most STEPPED_CHANNELS. The scales of as many more are prefetched. False: some have none. */
static bool find_all_steps(const linear *l, int64_t column, int64_t column_end) {
    const int64_t row = l->num_groups * (l->numbers.dtype == 0 ? 4 : 2), next = (column_end - column) * row;
    bool have = true;
    for (; column < column_end; column++) {
        const char *scales = (const char *)l->numbers.scale + column * row;
        for (int64_t i = 0; i < row; i += 64) __builtin_prefetch(scales + next + i);
        const int64_t i = column % STEPPED_CHANNELS;
        have = find_steps(l, column, steps.at[i], &steps.units[i]) && have;
    }
    if (!have) memset(steps.at, 0, sizeof steps.at); /* places in a table have to exist, also of unused channels */
    return have;
}
