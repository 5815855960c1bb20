/* Exact products of integer activations and weights with a scale for each group of inputs. grouped.cu has the operands,
 * kernels/reference.py the definition (int4_linear and _grouped_linear).
 *
 * A group's sum of products fits int32, since no integer exceeds 128 and no activation 32512 in magnitude:
 * 128 * 128 * 32512 < 2^29. The sum (29 bits) times a scale (24 bits) is exact in float64, so that one fused
 * multiply-add rounds as a multiplication and an addition do. Groups are added in their order, by one thread for each
 * output element. */

enum { GROUP_WARPS = 8, SPAN = 1024, MOST_GROUPS = SPAN / 32 };

/* The sums of products of a lane's 32 inputs. */
template <int FORM, int TOKENS, int PARTS, int COLUMNS>
__device__ inline void dot_groups(const grouped &l, const packed<FORM> *weights, const int4 (*staged)[2][32],
                                  int (*found)[TOKENS]) {
    int words[COLUMNS][8];
    for (int c = 0; c < COLUMNS; c++) unpack(l, weights[c], words[c]);
    for (int t = 0; t < TOKENS; t++) {
        for (int c = 0; c < COLUMNS; c++) found[c][t] = 0;
        for (int part = 0; part < PARTS; part++) {
            const int4 *x = &staged[t * PARTS + part][0][threadIdx.x % 32];
            for (int c = 0; c < COLUMNS; c++) {
                const int sum = dot16(*(const int4 *)words[c], x[0], 256 * found[c][t]);
                found[c][t] = dot16(*(const int4 *)(words[c] + 4), x[32], sum);
            }
        }
    }
}

/* Few tokens. A warp reads SPAN inputs of COLUMNS channels at a time, 32 inputs by a lane, and writes the sums of
 * groups to shared memory. Then a thread for each output element adds the groups in order, while other warps wait with
 * their next weights under way. Grid: groups of TOKENS tokens, then groups of channels, so that blocks that share
 * weights run side by side and read them from the L2 cache. */
template <int FORM, int TOKENS, int PARTS> __device__ inline void gemv_groups(const grouped &l) {
    enum { COLUMNS = TOKENS == 1 && FORM == CODES ? 4 : 2, CHANNELS = GROUP_WARPS * COLUMNS, ROWS = TOKENS * PARTS };
    enum { AT_ONCE = TOKENS == 1 ? 1 : COLUMNS }; /* columns that share a look at the activations */
    __shared__ int4 staged[ROWS][2][32]; /* halves of a lane's 32 inputs apart: no bank has two of 8 lanes */
    __shared__ int sums[2][TOKENS][MOST_GROUPS], dots[TOKENS][MOST_GROUPS][CHANNELS + 1];
    __shared__ double scales[MOST_GROUPS][CHANNELS + 1];
    __shared__ float minima[MOST_GROUPS][CHANNELS + 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_token = blockIdx.x * TOKENS, num_rows = l.num_tokens * PARTS;
    const int first_column = blockIdx.y * CHANNELS, column = first_column + warp * COLUMNS;
    /* Warps beyond the last channel compute the last channel, and write nothing. */
    const int base = min(column, l.out_features - 1), last = min(COLUMNS - 1, l.out_features - 1 - base);
    const int row_bytes = bytes_of<FORM>(l.in_features);
    const int8 *from = l.weights + (int64)base * row_bytes + bytes_of<FORM>(32 * lane);
    const int lanes = l.group_size / 32, my_group = lane / lanes, span_groups = MOST_GROUPS / lanes;
    const int num_groups = l.in_features / l.group_size, shift = FORM == CODES ? l.shift : 0;
    const bool has_sums = l.minimum || l.sub_minimum;
    const int num_blocks = num_groups / l.block_groups;
    const int my_channel = threadIdx.x % CHANNELS, my_token = threadIdx.x / CHANNELS;
    double total = 0.0;

    packed<FORM> next[COLUMNS];
    for (int c = 0; c < COLUMNS; c++)
        next[c] = load_packed<FORM>(l, from + min(c, last) * row_bytes, 32 * lane < l.in_features);
    for (int k = 0, group = 0, buffer = 0; k < l.in_features; k += SPAN, group += span_groups, buffer ^= 1) {
        for (int i = threadIdx.x; i < ROWS * SPAN / 16; i += blockDim.x) {
            const int r = i / (SPAN / 16), u = i % (SPAN / 16), row = first_token * PARTS + r;
            staged[r][u % 2][u / 2] = row < num_rows && k + 16 * u < l.padded
                                          ? *(const int4 *)(l.rows + (int64)row * l.padded + k + 16 * u)
                                          : make_int4(0, 0, 0, 0);
        }
        const int t = threadIdx.x / MOST_GROUPS, g = threadIdx.x % MOST_GROUPS;
        if (has_sums && t < TOKENS)
            sums[buffer][t][g] = first_token + t < l.num_tokens && group + g < num_groups
                                     ? l.group_sums[(int64)(first_token + t) * num_groups + group + g]
                                     : 0;
        __syncthreads(); /* and all groups of the last span have been added */

        from += bytes_of<FORM>(SPAN);
        const bool has_next = k + SPAN + 32 * lane < l.in_features;
        const int mine = min(group + my_group, num_groups - 1);
        const int first_at = base * num_groups + mine;
        const int first_block = base * num_blocks + (l.block_groups == 1 ? mine : mine / l.block_groups);
        for (int c = 0; c < COLUMNS; c += AT_ONCE) {
            packed<FORM> weights[AT_ONCE];
            group_numbers numbers[AT_ONCE];
            for (int i = 0; i < AT_ONCE; i++) {
                weights[i] = next[c + i];
                const int there = min(c + i, last);
                next[c + i] = load_packed<FORM>(l, from + there * row_bytes, has_next);
                numbers[i] = load_numbers(l, first_at + there * num_groups, first_block + there * num_blocks);
            }
            int found[AT_ONCE][TOKENS];
            dot_groups<FORM, TOKENS, PARTS, AT_ONCE>(l, weights, staged, found);
            for (int i = 0; i < AT_ONCE; i++) {
                for (int t = 0; t < TOKENS; t++)
                    for (int distance = 1; distance < lanes; distance *= 2)
                        found[i][t] += __shfl_xor_sync(ALL_LANES, found[i][t], distance);
                if (lane % lanes != 0 || group + my_group >= num_groups) continue;
                const int channel = warp * COLUMNS + c + i;
                scales[my_group][channel] = numbers[i].scale;
                if (l.minimum) minima[my_group][channel] = numbers[i].minimum;
                for (int t = 0; t < TOKENS; t++) {
                    int dot = found[i][t] >> shift;
                    if (has_sums) dot -= numbers[i].zero_point * sums[buffer][t][my_group];
                    dots[t][my_group][channel] = dot;
                }
            }
        }
        __syncthreads();
        const int count = my_token < TOKENS ? min(span_groups, num_groups - group) : 0;
        if (!l.minimum) {
#pragma unroll 4
            for (int g = 0; g < count; g++)
                total = fma((double)dots[my_token][g][my_channel], scales[g][my_channel], total);
        } else {
#pragma unroll 2
            for (int g = 0; g < count; g++)
                total += part_with_minimum(dots[my_token][g][my_channel], scales[g][my_channel],
                                           sums[buffer][my_token][g], minima[g][my_channel]);
        }
    }
    const int token = first_token + my_token, my_column = first_column + my_channel;
    if (my_token < TOKENS && token < l.num_tokens && my_column < l.out_features)
        write_total(l, token, my_column, total);
}

/* More tokens. Tiles of 64 tokens by 64 channels, 32 inputs deep, lie unpacked in shared memory; the next tile arrives
 * while one is computed. Each of 256 threads has 4 tokens and 4 channels, in whose totals it adds up the groups.
 * Grid: tiles of tokens, then tiles of channels. */
enum { GROUP_TILE = 64, GROUP_WORDS = 8 };

/* Of a group: the numbers of the tile's channels and the sums of its tokens' activations. */
typedef struct {
    double scales[GROUP_TILE], minima[GROUP_TILE], sums[GROUP_TILE];
    int zero_points[GROUP_TILE], int_sums[GROUP_TILE];
} tile_group;

/* Add a group to the totals of 4 tokens by 4 channels, and clear the group's sums. */
template <int PARTS>
__device__ inline void add_tile_group(const grouped &l, const tile_group &group, int token, int channel, int shift,
                                      int (*dots)[4], double (*totals)[4]) {
    for (int t = 0; t < 4; t++)
        for (int j = 0; j < 4; j++) {
            int dot = dots[t * PARTS][j];
            if (PARTS == 2) dot = 256 * dot + dots[t * PARTS + 1][j];
            for (int part = 0; part < PARTS; part++) dots[t * PARTS + part][j] = 0;
            dots[t * PARTS][j] = dot >> shift;
        }
    if (l.minimum) {
        for (int j = 0; j < 4; j++)
            for (int t = 0; t < 4; t++)
                totals[t][j] += part_with_minimum(dots[t * PARTS][j], group.scales[channel + j],
                                                  group.sums[token + t], group.minima[channel + j]);
    } else {
        if (l.sub_minimum)
            for (int j = 0; j < 4; j++)
                for (int t = 0; t < 4; t++)
                    dots[t * PARTS][j] -= group.zero_points[channel + j] * group.int_sums[token + t];
        for (int j = 0; j < 4; j++)
            for (int t = 0; t < 4; t++)
                totals[t][j] = fma((double)dots[t * PARTS][j], group.scales[channel + j], totals[t][j]);
    }
    for (int t = 0; t < 4; t++)
        for (int j = 0; j < 4; j++) dots[t * PARTS][j] = 0;
}

template <int FORM, int PARTS> __device__ inline void tiled_groups(const grouped &l) {
    enum { ROWS = GROUP_TILE * PARTS, HEIGHT = 4 * PARTS };
    __shared__ __align__(16) int xs[2][GROUP_WORDS][ROWS];
    __shared__ __align__(16) int ws[2][GROUP_WORDS][GROUP_TILE];
    __shared__ tile_group groups[2];
    const int thread = threadIdx.x, num_rows = l.num_tokens * PARTS, num_groups = l.in_features / l.group_size;
    const int first_row = blockIdx.x * ROWS, first_column = blockIdx.y * GROUP_TILE;
    /* All threads (of 8-bit activations half of them) load 16 bytes of a row. Threads 0 to 63 load a channel's weights,
     * threads 128 to 191 the numbers of a channel's group, threads 192 to 255 the sum of a token's group. */
    const int x_row = thread % ROWS, x_half = thread / ROWS, role = thread / GROUP_TILE, mine = thread % GROUP_TILE;
    const int token = first_row / PARTS + mine, channel = min(first_column + mine, l.out_features - 1);
    const int8 *w_from = l.weights + (int64)channel * bytes_of<FORM>(l.in_features);
    const int first_at = channel * num_groups, first_block = channel * (num_groups / l.block_groups);
    const bool has_x = x_half < 2 && first_row + x_row < num_rows;
    const bool has_sum = role == 3 && token < l.num_tokens;
    const int8 *x_from = l.rows + (int64)(first_row + x_row) * l.padded + 16 * x_half;
    /* This thread computes rows y0 .. y0 + HEIGHT - 1 and channels x0 .. x0 + 3. */
    const int x0 = 4 * (thread % 16), y0 = HEIGHT * (thread / 16), shift = FORM == CODES ? l.shift : 0;
    int dots[HEIGHT][4];
    double totals[4][4];
    for (int j = 0; j < 4; j++) {
        for (int i = 0; i < HEIGHT; i++) dots[i][j] = 0;
        for (int t = 0; t < 4; t++) totals[t][j] = 0.0;
    }

    int4 x = make_int4(0, 0, 0, 0);
    packed<FORM> w;
    group_numbers numbers = {0.0f, 0.0f, 0};
    int sum = 0;
    if (has_x) x = *(const int4 *)x_from;
    if (role == 0) w = load_packed<FORM>(l, w_from, true);
    if (role == 2) numbers = load_numbers(l, first_at, first_block);
    if (has_sum) sum = l.group_sums[(int64)token * num_groups];
    /* `left` inputs of the group come after this step. */
    for (int k = 0, buffer = 0, group = 0, left = l.group_size; k < l.in_features; buffer ^= 1) {
        if (x_half < 2) {
            int (*to)[ROWS] = xs[buffer] + 4 * x_half;
            to[0][x_row] = x.x, to[1][x_row] = x.y, to[2][x_row] = x.z, to[3][x_row] = x.w;
        }
        if (role == 0) {
            int words[GROUP_WORDS];
            unpack(l, w, words);
            for (int i = 0; i < GROUP_WORDS; i++) ws[buffer][i][thread] = words[i];
        } else if (role == 2) {
            groups[buffer].scales[mine] = numbers.scale;
            groups[buffer].minima[mine] = numbers.minimum;
            groups[buffer].zero_points[mine] = numbers.zero_point;
        } else if (role == 3) {
            groups[buffer].sums[mine] = groups[buffer].int_sums[mine] = sum;
        }
        __syncthreads(); /* one is enough: see tiled() in int8.cu */
        k += 4 * GROUP_WORDS, left -= 4 * GROUP_WORDS;
        const int next_group = left ? group : group + 1;
        if (k < l.in_features) {
            if (has_x) x = *(const int4 *)(x_from + k);
            if (role == 0) w = load_packed<FORM>(l, w_from + bytes_of<FORM>(k), true);
            if (role == 2 && !left)
                numbers = load_numbers(l, first_at + next_group, first_block + next_group / l.block_groups);
            if (has_sum) sum = l.group_sums[(int64)token * num_groups + next_group];
        }
#pragma unroll 4
        for (int word = 0; word < GROUP_WORDS; word++) {
            int a[HEIGHT], b[4];
            for (int i = 0; i < HEIGHT; i += 4) *(int4 *)(a + i) = *(const int4 *)&xs[buffer][word][y0 + i];
            *(int4 *)b = *(const int4 *)&ws[buffer][word][x0];
            for (int i = 0; i < HEIGHT; i++)
                for (int j = 0; j < 4; j++) dots[i][j] = __dp4a(a[i], b[j], dots[i][j]);
        }
        if (left == 0) {
            add_tile_group<PARTS>(l, groups[buffer], y0 / PARTS, x0, shift, dots, totals);
            left = l.group_size;
        }
        group = next_group;
    }
    for (int t = 0; t < 4; t++)
        for (int j = 0; j < 4; j++) {
            const int to_token = (first_row + y0) / PARTS + t, to_column = first_column + x0 + j;
            if (to_token < l.num_tokens && to_column < l.out_features)
                write_total(l, to_token, to_column, totals[t][j]);
        }
}

#define GROUPED_KERNEL(name, min_blocks, function)                                                               \
    KERNEL __launch_bounds__(256, min_blocks)                                                                    \
        name(const int8 *rows, const float *token_scales, const int *group_sums, int num_tokens, int padded,     \
             const int8 *weights, const int8 *lower, const void *scale, const void *minimum,                      \
             const int8 *sub_scale, const unsigned char *sub_minimum, int scale_type, int block_groups,          \
             int group_size, int shift, int table_0, int table_1, int table_2, int table_3, const float *bias,   \
             int in_features, int out_features, float *y, int y_stride) {                                        \
        const grouped l = {rows,       token_scales, group_sums, num_tokens, padded,      weights, lower,        \
                           scale,      minimum,      sub_scale,  sub_minimum, scale_type, block_groups,          \
                           group_size, shift,        table_0,    table_1,    table_2,     table_3,               \
                           bias,       in_features,  out_features, y,          y_stride};           \
        function(l);                                                                                             \
    }

/* The names are PREFIX_gemv_TOKENS_PARTS and PREFIX_tiled_PARTS. */
#define GROUPED_KERNELS(prefix, kind)                                 \
    GROUPED_KERNEL(prefix##_gemv_1_1, 3, (gemv_groups<kind, 1, 1>))   \
    GROUPED_KERNEL(prefix##_gemv_2_1, 3, (gemv_groups<kind, 2, 1>))   \
    GROUPED_KERNEL(prefix##_gemv_4_1, 3, (gemv_groups<kind, 4, 1>))   \
    GROUPED_KERNEL(prefix##_gemv_1_2, 3, (gemv_groups<kind, 1, 2>))   \
    GROUPED_KERNEL(prefix##_gemv_2_2, 3, (gemv_groups<kind, 2, 2>))   \
    GROUPED_KERNEL(prefix##_gemv_4_2, 3, (gemv_groups<kind, 4, 2>))   \
    GROUPED_KERNEL(prefix##_tiled_1, 2, (tiled_groups<kind, 1>))      \
    GROUPED_KERNEL(prefix##_tiled_2, 2, (tiled_groups<kind, 2>))

GROUPED_KERNELS(codes, CODES)
GROUPED_KERNELS(groups, BYTES)
GROUPED_KERNELS(plane_groups, PLANES_IN_GROUPS)
