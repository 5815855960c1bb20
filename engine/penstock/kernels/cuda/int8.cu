/* Exact products of INT8 weights and integer activations (kernels/reference.py has the definition).
 *
 * A token's activations become PARTS rows of bytes: one row for "int8"; for "int16" two rows, hi and then lo, where
 * q = 256 hi + lo. Rows are padded with zeros to a multiple of 64 bytes.
 *
 * A sum fits int32 up to 131071 inputs, since no product exceeds 128 * 128 = 2^14 in magnitude. The sums of hi and lo
 * are separate and are combined in 64 bits. */

/* The exact sum, scaled. It rounds once to float64 (53 bits hold both factors) and once to float32. Consumer cards
 * compute float64 at 1/32 of their float32 rate, but two multiplications per output, not per weight, cost nothing
 * that shows. */
__device__ inline float scaled(int64 sum, float token_scale, float weight_scale) {
    return (float)((double)sum * ((double)token_scale * (double)weight_scale));
}

/* Where the inputs lie in a row of bytes: in their order; or each 8 of them as 0, 2, 4, 6, 1, 3, 5, 7, as the 4-bit
 * codes of grouped.cu need them. */
enum { IN_ORDER, EVEN_BEFORE_ODD };

/* One block per token. x is [num_tokens, in_features], with x_stride elements from row to row. Input i of the row is
 * x[order[i]], if there is an order. */
template <int PARTS, int PLACES>
__device__ inline void quantize(const float *x, int64 x_stride, const int *order, int in_features, int padded,
                                int8 *rows, float *token_scales) {
    __shared__ unsigned largest_of[32];
    const float *row = x + blockIdx.x * x_stride;
    /* The bits of floats without their sign have the order of the numbers; NaN is the largest. */
    unsigned largest = 0;
    for (int i = threadIdx.x; i < in_features; i += blockDim.x)
        largest = max(largest, __float_as_uint(row[i]) & 0x7fffffffu);
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0) largest_of[threadIdx.x / 32] = largest;
    __syncthreads();
    for (int warp = 0; warp < blockDim.x / 32; warp++) largest = max(largest, largest_of[warp]);

    float scale = __uint_as_float(largest) / (PARTS == 2 ? 32512.0f : 127.0f);
    if (scale < 1.17549435e-38f) scale = 0.0f; /* subnormal: the row counts as zero */
    if (!(scale < infinity())) scale = __uint_as_float(0x7fc00000u); /* NaN or infinity makes the row NaN */
    if (threadIdx.x == 0) token_scales[blockIdx.x] = scale;
    const float divisor = scale > 0.0f ? scale : infinity();
    int8 *hi_row = rows + (int64)blockIdx.x * PARTS * padded;
    for (int i = 4 * threadIdx.x; i < padded; i += 4 * blockDim.x) {
        unsigned hi_bytes = 0, lo_bytes = 0;
        for (int j = 0; j < 4; j++) {
            const int input = PLACES == IN_ORDER ? i + j : (i & ~7) + 2 * j + ((i >> 2) & 1);
            const int q =
                input < in_features ? __float2int_rn(row[order ? order[input] : input] / divisor) : 0;
            const int hi = PARTS == 2 ? (q + 128) >> 8 : q;
            hi_bytes |= (unsigned)(hi & 255) << (8 * j);
            lo_bytes |= (unsigned)(q & 255) << (8 * j); /* q - 256 hi has the low bits of q */
        }
        *(unsigned *)(hi_row + i) = hi_bytes;
        if (PARTS == 2) *(unsigned *)(hi_row + padded + i) = lo_bytes;
    }
}

KERNEL quantize_1(const float *x, int64 x_stride, int in_features, int padded, int8 *rows,
                  float *token_scales) {
    quantize<1, IN_ORDER>(x, x_stride, 0, in_features, padded, rows, token_scales);
}
KERNEL quantize_2(const float *x, int64 x_stride, int in_features, int padded, int8 *rows,
                  float *token_scales) {
    quantize<2, IN_ORDER>(x, x_stride, 0, in_features, padded, rows, token_scales);
}

/* Operands of a product. */
typedef struct {
    const int8 *rows; /* [num_tokens * PARTS, padded] */
    const float *token_scales;
    int num_tokens, padded;
    const int8 *qweight;       /* [out_features, in_features]; of planes the upper one, of half the bytes */
    const int8 *lower;         /* the lower plane; null: 8 in every place */
    const float *scale, *bias; /* [out_features]; bias may be null */
    int in_features, out_features;
    float *y; /* [num_tokens, out_features] */
    int y_stride; /* elements from a token's outputs to the next one's */
} linear;

__device__ inline void write_output(const linear &l, int token, int column, int64 sum) {
    const float y = scaled(sum, l.token_scales[token], l.scale[column]);
    l.y[(int64)token * l.y_stride + column] = l.bias ? y + l.bias[column] : y;
}

/* Two planes (PlanesTensor): a word of each -> the integers of 8 inputs. An integer q + 128 is 16 upper + lower, and a
 * byte has the first of two inputs in its low half. */
__device__ inline int2 join(unsigned upper, unsigned lower) {
    const unsigned even = (((upper << 4) & 0xf0f0f0f0u) | (lower & 0x0f0f0f0fu)) ^ 0x80808080u;
    const unsigned odd = ((upper & 0xf0f0f0f0u) | ((lower >> 4) & 0x0f0f0f0fu)) ^ 0x80808080u;
    return make_int2(__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362));
}

/* What stands in for 8 inputs of a lower plane that is not there. */
enum { HALF_STEPS = (int)0x88888888u };

/* How a matrix lies: integers, of which in_features and the address are multiples of 16, as in all usual models; any
 * others, which are read one by one; or planes, of which in_features is a multiple of 16 and the addresses of 8. */
enum { ALIGNED, ANY, PLANES };

/* Inputs k to k + 15 of one output channel as they lie in memory: of planes 8 bytes of each, joined by integers().
 * Beyond the last channel or input they are zero bytes, which are no zeros of planes: activations are zeros beyond the
 * last input, and nobody writes such a channel. */
template <int FORM> __device__ inline int4 load_weights(const linear &l, int column, int k) {
    if (column >= l.out_features || k >= l.in_features) return make_int4(0, 0, 0, 0);
    if (FORM == PLANES) {
        const int64 first = ((int64)column * l.in_features + k) / 2;
        const int2 upper = __ldg((const int2 *)(l.qweight + first));
        const int2 lower =
            l.lower ? __ldg((const int2 *)(l.lower + first)) : make_int2(HALF_STEPS, HALF_STEPS);
        return make_int4(upper.x, upper.y, lower.x, lower.y);
    }
    const int8 *at = l.qweight + (int64)column * l.in_features + k;
    if (FORM == ALIGNED) {
        return __ldg((const int4 *)at);
    } else {
        unsigned words[4] = {0, 0, 0, 0};
        for (int i = 0; i < 16; i++)
            if (k + i < l.in_features) words[i / 4] |= (unsigned)(at[i] & 255) << (8 * (i % 4));
        return make_int4(words[0], words[1], words[2], words[3]);
    }
}

/* What load_weights() gave -> 16 integers, where they are needed: joining waits for what was loaded ahead. */
template <int FORM> __device__ inline int4 integers(int4 loaded) {
    if (FORM != PLANES) return loaded;
    const int2 first = join(loaded.x, loaded.z), second = join(loaded.y, loaded.w);
    return make_int4(first.x, first.y, second.x, second.y);
}

__device__ inline int dot16(int4 a, int4 b, int sum) {
    sum = __dp4a(a.x, b.x, sum);
    sum = __dp4a(a.y, b.y, sum);
    sum = __dp4a(a.z, b.z, sum);
    return __dp4a(a.w, b.w, sum);
}

/* Few tokens. Reading the weights is the cost, so each byte is read once per TOKENS tokens, 16 bytes by a lane. A warp
 * has COLUMNS output channels. The block's activations pass through shared memory, CHUNK bytes of a row at a time.
 * Grid: groups of GEMV_WARPS * COLUMNS channels, then groups of TOKENS tokens. */
enum { GEMV_WARPS = 8, CHUNK = 2048 };

template <int TOKENS, int PARTS, int FORM> __device__ inline void gemv(const linear &l) {
    enum { ROWS = TOKENS * PARTS, COLUMNS = ROWS > 4 ? 4 : 2 };
    __shared__ int4 staged[ROWS][CHUNK / 16];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int column = (blockIdx.x * GEMV_WARPS + warp) * COLUMNS;
    const int first_row = blockIdx.y * ROWS, num_rows = l.num_tokens * PARTS;
    int sums[COLUMNS][ROWS];
    for (int c = 0; c < COLUMNS; c++)
        for (int r = 0; r < ROWS; r++) sums[c][r] = 0;

    for (int chunk = 0; chunk < l.padded; chunk += CHUNK) {
        const int units = min((int)CHUNK, l.padded - chunk) / 16;
        __syncthreads();
        for (int r = warp; r < ROWS; r += GEMV_WARPS)
            for (int u = lane; u < units; u += 32)
                staged[r][u] =
                    first_row + r < num_rows
                        ? *(const int4 *)(l.rows + (int64)(first_row + r) * l.padded + chunk + 16 * u)
                        : make_int4(0, 0, 0, 0);
        __syncthreads();
#pragma unroll(ROWS > 4 ? 1 : 2)
        for (int u = lane; u < units; u += 32) {
            int4 weights[COLUMNS];
            for (int c = 0; c < COLUMNS; c++)
                weights[c] = load_weights<FORM>(l, column + c, chunk + 16 * u);
            if (FORM == PLANES)
                for (int c = 0; c < COLUMNS; c++) weights[c] = integers<FORM>(weights[c]);
            for (int r = 0; r < ROWS; r++) {
                const int4 x = staged[r][u];
                for (int c = 0; c < COLUMNS; c++) sums[c][r] = dot16(weights[c], x, sums[c][r]);
            }
        }
    }

    /* Lane n writes the n-th output of the warp. */
    int64 mine = 0;
    for (int t = 0; t < TOKENS; t++)
        for (int c = 0; c < COLUMNS; c++) {
            int64 sum = warp_sum(sums[c][t * PARTS]);
            if (PARTS == 2) sum = 256 * sum + warp_sum(sums[c][t * PARTS + 1]);
            if (lane == t * COLUMNS + c) mine = sum;
        }
    const int token = blockIdx.y * TOKENS + lane / COLUMNS, my_column = column + lane % COLUMNS;
    if (lane < TOKENS * COLUMNS && token < l.num_tokens && my_column < l.out_features)
        write_output(l, token, my_column, mine);
}

/* More tokens. Tiles of 16 * HEIGHT rows of activations by 128 output channels, 32 bytes deep, lie in shared memory;
 * the next tile arrives while one is computed. Each of 256 threads has HEIGHT rows (whole tokens) and 8 channels.
 * Grid: tiles of rows, then tiles of channels, so that blocks that share weights run side by side. */
enum { TILE_COLUMNS = 128, TILE_WORDS = 8 };

template <int HEIGHT, int PARTS, int FORM> __device__ inline void tiled(const linear &l) {
    enum { ROWS = 16 * HEIGHT };
    __shared__ __align__(16) int xs[2][TILE_WORDS][ROWS];
    __shared__ __align__(16) int ws[2][TILE_WORDS][TILE_COLUMNS];
    const int thread = threadIdx.x, num_rows = l.num_tokens * PARTS;
    const int first_row = blockIdx.x * ROWS, first_column = blockIdx.y * TILE_COLUMNS;
    /* This thread loads 16 bytes of a row and 16 bytes of a channel. */
    const int x_row = thread % ROWS, x_half = thread / ROWS, column = thread % TILE_COLUMNS;
    const int half = thread / TILE_COLUMNS;
    const bool has_x = x_half < 2, is_row = first_row + x_row < num_rows;
    const int8 *x_from = l.rows + (int64)(first_row + x_row) * l.padded + 16 * x_half;
    /* This thread computes rows y0 .. y0 + HEIGHT - 1, channels x0 .. x0 + 3 and 64 + x0 .. 64 + x0 + 3. */
    const int x0 = 4 * (thread % 16), y0 = HEIGHT * (thread / 16);
    int sums[HEIGHT][8];
    for (int i = 0; i < HEIGHT; i++)
        for (int j = 0; j < 8; j++) sums[i][j] = 0;

    int4 x = make_int4(0, 0, 0, 0), w;
    if (has_x && is_row) x = *(const int4 *)x_from;
    w = load_weights<FORM>(l, first_column + column, 16 * half);
    for (int k = 0, buffer = 0; k < l.padded; k += 4 * TILE_WORDS, buffer ^= 1) {
        if (has_x) {
            int (*to)[ROWS] = xs[buffer] + 4 * x_half;
            to[0][x_row] = x.x, to[1][x_row] = x.y, to[2][x_row] = x.z, to[3][x_row] = x.w;
        }
        int (*to)[TILE_COLUMNS] = ws[buffer] + 4 * half;
        w = integers<FORM>(w);
        to[0][column] = w.x, to[1][column] = w.y, to[2][column] = w.z, to[3][column] = w.w;
        /* Buffers alternate, so one barrier is enough: a thread that writes a buffer has passed the barrier that
         * follows the buffer's last use by all threads. */
        __syncthreads();
        const int next = k + 4 * TILE_WORDS;
        if (next < l.padded) {
            if (has_x && is_row) x = *(const int4 *)(x_from + next);
            w = load_weights<FORM>(l, first_column + column, next + 16 * half);
        }
#pragma unroll 4
        for (int word = 0; word < TILE_WORDS; word++) {
            int a[HEIGHT], b[8];
            for (int i = 0; i < HEIGHT; i += 4) *(int4 *)(a + i) = *(const int4 *)&xs[buffer][word][y0 + i];
            *(int4 *)b = *(const int4 *)&ws[buffer][word][x0];
            *(int4 *)(b + 4) = *(const int4 *)&ws[buffer][word][64 + x0];
            for (int i = 0; i < HEIGHT; i++)
                for (int j = 0; j < 8; j++) sums[i][j] = __dp4a(a[i], b[j], sums[i][j]);
        }
    }

    for (int i = 0; i < HEIGHT; i += PARTS)
        for (int j = 0; j < 8; j++) {
            /* The scales of no more than four outputs are loaded ahead. Those of all outputs take registers, which
             * cost 6.1 a third block of tiled_4_2, and make later cards spill. */
            if (j % 4 == 0) asm volatile("" ::: "memory");
            const int token = (first_row + y0 + i) / PARTS,
                      to = first_column + (j < 4 ? x0 + j : 60 + x0 + j);
            if (token >= l.num_tokens || to >= l.out_features) continue;
            int64 sum = sums[i][j];
            if (PARTS == 2) sum = 256 * sum + sums[i + 1][j];
            write_output(l, token, to, sum);
        }
}

#define LINEAR_PARAMETERS                                                                         \
    const int8 *rows, const float *token_scales, int num_tokens, int padded, const int8 *qweight, \
        const int8 *lower, const float *scale, const float *bias, int in_features, int out_features, float *y, \
        int y_stride
#define LINEAR_KERNEL(name, min_blocks, function)                                          \
    KERNEL __launch_bounds__(256, min_blocks) name(LINEAR_PARAMETERS) {                    \
        const linear l = {rows,  token_scales, num_tokens,  padded,       qweight, lower, \
                          scale, bias,         in_features, out_features, y,      y_stride};  \
        function(l);                                                                       \
    }

/* The names are gemv_TOKENS_PARTS and tiled_HEIGHT_PARTS; "any" kernels are for matrices that are not ALIGNED, planes_*
 * for planes. */
LINEAR_KERNEL(gemv_1_1, 4, (gemv<1, 1, ALIGNED>))
LINEAR_KERNEL(gemv_2_1, 4, (gemv<2, 1, ALIGNED>))
LINEAR_KERNEL(gemv_4_1, 4, (gemv<4, 1, ALIGNED>))
LINEAR_KERNEL(gemv_8_1, 2, (gemv<8, 1, ALIGNED>))
LINEAR_KERNEL(gemv_1_2, 4, (gemv<1, 2, ALIGNED>))
LINEAR_KERNEL(gemv_2_2, 4, (gemv<2, 2, ALIGNED>))
LINEAR_KERNEL(gemv_4_2, 2, (gemv<4, 2, ALIGNED>))
LINEAR_KERNEL(gemv_8_2, 2, (gemv<8, 2, ALIGNED>))
LINEAR_KERNEL(gemv_any_1, 2, (gemv<8, 1, ANY>))
LINEAR_KERNEL(gemv_any_2, 2, (gemv<8, 2, ANY>))
LINEAR_KERNEL(tiled_4_1, 2, (tiled<4, 1, ALIGNED>))
LINEAR_KERNEL(tiled_8_1, 2, (tiled<8, 1, ALIGNED>))
LINEAR_KERNEL(tiled_4_2, 2, (tiled<4, 2, ALIGNED>))
LINEAR_KERNEL(tiled_8_2, 2, (tiled<8, 2, ALIGNED>))
LINEAR_KERNEL(tiled_any_1, 2, (tiled<8, 1, ANY>))
LINEAR_KERNEL(tiled_any_2, 2, (tiled<8, 2, ANY>))
LINEAR_KERNEL(planes_gemv_1_1, 4, (gemv<1, 1, PLANES>))
LINEAR_KERNEL(planes_gemv_2_1, 4, (gemv<2, 1, PLANES>))
LINEAR_KERNEL(planes_gemv_4_1, 4, (gemv<4, 1, PLANES>))
LINEAR_KERNEL(planes_gemv_8_1, 2, (gemv<8, 1, PLANES>))
LINEAR_KERNEL(planes_gemv_1_2, 4, (gemv<1, 2, PLANES>))
LINEAR_KERNEL(planes_gemv_2_2, 4, (gemv<2, 2, PLANES>))
LINEAR_KERNEL(planes_gemv_4_2, 2, (gemv<4, 2, PLANES>))
LINEAR_KERNEL(planes_gemv_8_2, 2, (gemv<8, 2, PLANES>))
LINEAR_KERNEL(planes_tiled_4_1, 2, (tiled<4, 1, PLANES>))
LINEAR_KERNEL(planes_tiled_8_1, 2, (tiled<8, 1, PLANES>))
LINEAR_KERNEL(planes_tiled_4_2, 2, (tiled<4, 2, PLANES>))
LINEAR_KERNEL(planes_tiled_8_2, 2, (tiled<8, 2, PLANES>))

/* Planes of num_bytes each -> integers, for products that take no planes. Rows have no gaps, so that only bytes count.
 * is_aligned says that addresses and num_bytes are multiples of 8. One thread for 4 bytes of a plane. */
KERNEL join_planes(const int8 *upper, const int8 *lower, int num_bytes, int is_aligned, int8 *qweight) {
    const int first = 4 * (blockIdx.x * blockDim.x + threadIdx.x), count = min(4, num_bytes - first);
    if (is_aligned && count == 4) {
        *(int2 *)(qweight + 2 * (int64)first) =
            join(__ldg((const int *)(upper + first)), lower ? __ldg((const int *)(lower + first)) : HALF_STEPS);
        return;
    }
    for (int i = first; i < first + count; i++) {
        const int both = join(upper[i] & 255, lower ? lower[i] & 255 : HALF_STEPS).x;
        qweight[2 * (int64)i] = (int8)both, qweight[2 * (int64)i + 1] = (int8)(both >> 8);
    }
}

/* Sums of torch's INT8 product, int32 [num_tokens * PARTS, num_columns], of the channels from first_column on -> y.
 * Grid: tokens, then blocks of columns. */
template <int PARTS>
__device__ inline void combine(const int *sums, int first_column, int num_columns, const linear &l) {
    const int token = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= num_columns) return;
    const int *row = sums + (int64)token * PARTS * num_columns;
    write_output(l, token, first_column + i,
                 PARTS == 2 ? 256 * (int64)row[i] + row[num_columns + i] : row[i]);
}

#define COMBINE_KERNEL(parts)                                                                             \
    KERNEL combine_##parts(const int *sums, int first_column, int num_columns, const float *token_scales, \
                           int num_tokens, const float *scale, const float *bias, int out_features,       \
                           float *y, int y_stride) {                                                      \
        const linear l = {0, token_scales, num_tokens, 0, 0, 0, scale, bias, 0, out_features, y, y_stride}; \
        combine<parts>(sums, first_column, num_columns, l);                                               \
    }
COMBINE_KERNEL(1)
COMBINE_KERNEL(2)
