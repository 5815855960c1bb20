/* Each head's product with its own part of one INT8 matrix, as the absorbed form of latent attention has them: with the
 * part as it lies, or with its transpose. Part of cpu.c. */
#pragma once

typedef struct {
    const float *x; /* [num_tokens, num_heads, inputs], tokens and heads apart by the strides */
    int64_t token_stride, head_stride, num_tokens;
    const int8_t *qweight; /* the first head's part [num_rows, width]; the heads' parts lie `step` rows apart */
    const float *scale;    /* of a row */
    int64_t step, num_rows, width;
    bool is_turned;
    int activation_bits;
    float *y; /* [num_heads, num_tokens, outputs] */
} heads_product;

/* Bytes [8, 8]: byte c of row r becomes byte r of row c. Halves change places, then quarters, then bytes. */
INLINE void turn_8_bytes(uint64_t *rows) {
    static const uint64_t masks[3] = {0x00000000ffffffff, 0x0000ffff0000ffff, 0x00ff00ff00ff00ff};
#pragma GCC unroll 3
    for (int part = 0; part < 3; part++) {
        const int by = 4 >> part;
#pragma GCC unroll 8
        for (int r = 0; r < 8; r++) {
            if (r & by) continue;
            const uint64_t moved = (rows[r] >> 8 * by ^ rows[r + by]) & masks[part];
            rows[r + by] ^= moved, rows[r] ^= moved << 8 * by;
        }
    }
}

/* int8 [num_rows, width] -> [width, num_rows]. */
static void turn_bytes(const int8_t *restrict from, int64_t num_rows, int64_t width, int8_t *restrict to) {
    const int64_t rows_end = num_rows / 8 * 8, end = width / 8 * 8;
    for (int64_t i = 0; i < rows_end; i += 8)
        for (int64_t j = 0; j < end; j += 8) {
            uint64_t rows[8];
            for (int r = 0; r < 8; r++) memcpy(rows + r, from + (i + r) * width + j, 8);
            turn_8_bytes(rows);
            for (int r = 0; r < 8; r++) memcpy(to + (j + r) * num_rows + i, rows + r, 8);
        }
    for (int64_t i = 0; i < num_rows; i++)
        for (int64_t j = i < rows_end ? end : 0; j < width; j++) to[j * num_rows + i] = from[i * width + j];
}

/* With the transpose, the scale of a weight's row goes to the input that meets the row. So all sums are of integers and
 * exact, as in any other product. */
static void head_task(void *context, int64_t head) {
    const heads_product *p = context;
    const int64_t inputs = p->is_turned ? p->num_rows : p->width, outputs = p->is_turned ? p->width : p->num_rows;
    const int64_t tokens = (p->num_tokens + 7) / 8 * 8, row_bytes = 2 * ((inputs + 127) / 128 * 128) + 8 + 4;
    const int64_t turned = p->is_turned ? (p->num_rows * p->width + 63) / 64 * 16 : 0; /* in floats */
    float *rounding = scratch_of(tokens * row_bytes / 4 + turned + (p->is_turned ? tokens * inputs + outputs : 0) + 64);
    if (!rounding) abort(); /* a machine without some MB can do nothing */
    int8_t *weights = (int8_t *)(rounding + (tokens * row_bytes / 4 + 15) / 16 * 16);
    float *x = (float *)weights + turned, *ones = x + tokens * inputs;
    const int8_t *qweight = p->qweight + head * p->step * p->width;
    const float *scale = p->scale + head * p->step, *from = p->x + head * p->head_stride;
    if (p->is_turned) {
        turn_bytes(qweight, p->num_rows, p->width, weights);
        for (int64_t token = 0; token < p->num_tokens; token++)
            for (int64_t i = 0; i < inputs; i++) x[token * inputs + i] = from[token * p->token_stride + i] * scale[i];
        for (int64_t i = 0; i < outputs; i++) ones[i] = 1.0f;
    }
    penstock_int8_linear(p->is_turned ? x : from, p->is_turned ? inputs : p->token_stride, p->num_tokens, inputs,
                         p->is_turned ? weights : qweight, p->is_turned ? ones : scale, 1, NULL, outputs,
                         p->activation_bits, p->y + head * p->num_tokens * outputs, rounding);
}

/* Of each head's `step` rows of the matrix [num_heads * step, width], those from first_row to first_row + num_rows. */
EXPORT void penstock_head_linear(const float *x, int64_t token_stride, int64_t head_stride, int64_t num_tokens,
                                 int64_t num_heads, const int8_t *qweight, const float *scale, int64_t step,
                                 int64_t first_row, int64_t num_rows, int64_t width, int is_turned,
                                 int activation_bits, float *y) {
    heads_product p = {x, token_stride, head_stride, num_tokens, qweight + first_row * width, scale + first_row,
                       step, num_rows, width, is_turned, activation_bits, y};
    if (num_tokens > 0) parallel(num_heads, head_task, &p);
}
