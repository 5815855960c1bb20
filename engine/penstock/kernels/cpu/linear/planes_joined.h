/* Weights in planes without kernels of their own: the planes of some channels are joined into INT8, and the kernels of
 * INT8 multiply these. Part of linear.h. */
#pragma once

/* The joined channels of one token stay in the L1 cache, those of more tokens in the L2 cache. */
enum { JOINED_BYTES = 256 << 10, JOINED_FOR_ONE = 16 << 10, JOINED_AT_ONCE = 4 };
static _Thread_local int8_t joined[JOINED_BYTES] __attribute__((aligned(64)));

#if !HAS_PLANE_WORDS
#define one_token_planes linear_rest /* never called */
#endif

static void linear_planes(const linear *l, int64_t column, int64_t column_end) {
    if (l->a->words) {
        one_token_planes(l, column, column_end);
        return;
    }
    const int64_t width = l->a->in_features, most = l->a->num_tokens == 1 ? JOINED_FOR_ONE : JOINED_BYTES;
    const int64_t at_once = MAX(JOINED_AT_ONCE, most / width / JOINED_AT_ONCE * JOINED_AT_ONCE);
    if (at_once * width > JOINED_BYTES) {
        linear_rest(l, column, column_end);
        return;
    }
    for (int64_t stop; column < column_end; column = stop) {
        stop = MIN(column + at_once, column_end);
        linear some = *l;
        some.lower = NULL, some.qweight = joined, some.shift = 0, some.row_bytes = width;
        some.columns_per_task = INT64_MAX, some.scale = l->scale + column * l->num_groups;
        some.y = l->y + column, some.bias = l->bias ? l->bias + column : NULL;
        for (int64_t c = column; c < stop; c++) join_weights(l, c, 0, width, joined + (c - column) * width);
        linear_rest(&some, linear_fast(&some, 0, stop - column), stop - column);
    }
}
