/* Stepped codes without kernels of their own: the codes of some channels become INT8, and the kernels of INT8 multiply
 * these. Part of linear.h. */
#pragma once

/* With few tokens, the codes' own kernels are faster. The expanded channels stay in the L2 cache. */
enum { STEPS_FROM_TOKENS = 3, EXPANDED_BYTES = 256 << 10, LEAST_EXPANDED = 8 };
static _Thread_local int8_t expanded[EXPANDED_BYTES] __attribute__((aligned(64)));

/* A group of a channel. */
INLINE void expand_group(const uint8_t *restrict codes, int64_t size, int step, int8_t *restrict to) {
    for (int64_t i = 0; i < size / 2; i++) {
        to[2 * i] = (int8_t)(step * ((codes[i] & 15) - SIGNED_CODES));
        to[2 * i + 1] = (int8_t)(step * ((codes[i] >> 4) - SIGNED_CODES));
    }
}

/* The channels from `column` on, whose steps have been found. Returns where the computed ones end. */
static int64_t linear_stepped(const linear *l, int64_t column, int64_t column_end) {
    const int64_t width = l->a->in_features, size = width / l->num_groups;
    const int64_t at_once = MIN(STEPPED_CHANNELS, EXPANDED_BYTES / width);
    if (at_once < LEAST_EXPANDED) return column;
    for (int64_t stop; column < column_end; column = stop) {
        stop = MIN(column + at_once, column_end);
        linear some = *l;
        some.kind = INT8, some.shift = 0, some.row_bytes = width, some.num_groups = 1;
        some.qweight = expanded, some.scale = steps.units + column % STEPPED_CHANNELS;
        some.y = l->y + column, some.bias = l->bias ? l->bias + column : NULL;
        some.columns_per_task = INT64_MAX;
        for (int64_t c = column; c < stop; c++)
            for (int64_t g = 0; g < l->num_groups; g++)
                expand_group((const uint8_t *)l->qweight + c * l->row_bytes + g * size / 2, size, steps.at[c % STEPPED_CHANNELS][g] / 16 - MOST_STEPS,
                             expanded + (c - column) * width + g * size);
        linear_rest(&some, linear_fast(&some, 0, stop - column), stop - column);
    }
    return column_end;
}
