/* Operands of exact products of integer activations and weights with a scale for each group of 32, 64 or 128 inputs:
 * 4-bit codes (Int4Tensor), INT8 in groups, and planes of it. grouped_products.cu has the products.
 *
 * A byte has the codes of two inputs, 2i in its low half. codes_quantize_* writes the even ones of each 8 inputs before
 * the odd ones, so that the low halves and the high halves of 4 bytes meet 4 activations each without any
 * interleaving. */

/* The rows of activations as quantize() of int8.cu writes them, and the sums of their groups. One block per token. */
template <int PARTS, int PLACES>
__device__ inline void quantize_in_groups(const float *x, int64 x_stride, const int *order, int in_features,
                                          int padded, int group_size, int8 *rows, float *token_scales,
                                          int *group_sums) {
    quantize<PARTS, PLACES>(x, x_stride, order, in_features, padded, rows, token_scales);
    __syncthreads();
    const int num_groups = in_features / group_size;
    for (int group = threadIdx.x; group < num_groups; group += blockDim.x) {
        int sum = 0;
        for (int part = 0; part < PARTS; part++) {
            const int8 *from = rows + ((int64)blockIdx.x * PARTS + part) * padded + group * group_size;
            sum *= 256;
            for (int i = 0; i < group_size; i += 4) sum = __dp4a(*(const int *)(from + i), 0x01010101, sum);
        }
        group_sums[(int64)blockIdx.x * num_groups + group] = sum;
    }
}

#define QUANTIZE_KERNEL(name, parts, places)                                                                 \
    KERNEL name(const float *x, int64 x_stride, const int *order, int in_features, int padded,               \
                int group_size, int8 *rows, float *token_scales, int *group_sums) {                          \
        quantize_in_groups<parts, places>(x, x_stride, order, in_features, padded, group_size, rows,         \
                                          token_scales, group_sums);                                         \
    }
QUANTIZE_KERNEL(codes_quantize_1, 1, EVEN_BEFORE_ODD)
QUANTIZE_KERNEL(codes_quantize_2, 2, EVEN_BEFORE_ODD)
QUANTIZE_KERNEL(groups_quantize_1, 1, IN_ORDER)
QUANTIZE_KERNEL(groups_quantize_2, 2, IN_ORDER)

/* Operands of a product. */
typedef struct {
    const int8 *rows; /* [num_tokens * PARTS, padded], as the kernels above write them */
    const float *token_scales;
    const int *group_sums; /* [num_tokens, num_groups]: sums of the activations */
    int num_tokens, padded;
    const int8 *weights;          /* [out_features, in_features], or two codes in a byte; of planes the upper one */
    const int8 *lower;            /* the lower plane; null: 8 in every place */
    const void *scale, *minimum;  /* [out_features, num_groups / block_groups]; minimum may be null */
    const int8 *sub_scale;        /* [out_features, num_groups], or null */
    const unsigned char *sub_minimum;
    int scale_type, block_groups; /* of scale and minimum: 0 float32, 1 float16, 2 bfloat16 */
    int group_size;
    /* A code stands for code - 8 if `shift` is 4, for the code itself if `shift` is 3, for an integer of the table if
     * `shift` is 0. */
    int shift, table_0, table_1, table_2, table_3; /* 16 integers, four in a word */
    const float *bias;                                /* [out_features], or null */
    int in_features, out_features;
    float *y; /* [num_tokens, out_features] */
    int y_stride; /* elements from a token's outputs to the next one's */
} grouped;

__device__ inline float number_at(const void *numbers, int type, int at) {
    if (type == 0) return __ldg((const float *)numbers + at);
    const half_bits bits = __ldg((const half_bits *)numbers + at);
    return type == 1 ? half_to_float(bits) : __uint_as_float((unsigned)bits << 16);
}

/* What a channel's group needs besides its integers. A zero point is subtracted from the integers, so that it leaves
 * the sum of products an integer; then there is no minimum. */
typedef struct {
    float scale, minimum;
    int zero_point;
} group_numbers;

/* `at` is the group's place in sub_scale and sub_minimum, `block` in scale and minimum. Blocks' scales have 16 bits, so
 * the products with sub-scales are exact in float32. */
__device__ inline group_numbers load_numbers(const grouped &l, int at, int block) {
    group_numbers found = {number_at(l.scale, l.scale_type, block), 0.0f, 0};
    if (l.sub_scale) found.scale *= (float)__ldg(l.sub_scale + at);
    if (l.minimum) {
        found.minimum = number_at(l.minimum, l.scale_type, block);
        if (l.sub_minimum) found.minimum *= (float)__ldg(l.sub_minimum + at);
    } else if (l.sub_minimum) {
        found.zero_point = __ldg(l.sub_minimum + at);
    }
    return found;
}

/* Where there is a minimum, a group's part rounds by itself before it is added. `sum` is the sum of the group's
 * activations. */
__device__ inline double part_with_minimum(double dot, double scale, double sum, double minimum) {
    return fma(dot, scale, -(sum * minimum));
}

__device__ inline void write_total(const grouped &l, int token, int column, double total) {
    const float y = (float)(total * (double)l.token_scales[token]);
    l.y[(int64)token * l.y_stride + column] = l.bias ? y + l.bias[column] : y;
}

/* How weights lie: two codes in a byte, INT8, or two inputs in a byte of each plane. */
enum { CODES, BYTES, PLANES_IN_GROUPS };
/* Bytes of so many inputs, of planes in each. */
template <int FORM> __device__ inline int bytes_of(int num_inputs) {
    return FORM == BYTES ? num_inputs : num_inputs / 2;
}

/* The weights of 32 inputs of a channel, as they lie in memory. */
template <int FORM> struct packed {
    int4 parts[FORM == CODES ? 1 : 2];
};

/* Anything if there are no such inputs: activations are zeros there. `at` is a place in l.weights. */
template <int FORM> __device__ inline packed<FORM> load_packed(const grouped &l, const int8 *at, bool is_there) {
    packed<FORM> found;
    found.parts[0] = is_there ? __ldg((const int4 *)at) : make_int4(0, 0, 0, 0);
    if (FORM == BYTES) found.parts[1] = is_there ? __ldg((const int4 *)at + 1) : make_int4(0, 0, 0, 0);
    if (FORM == PLANES_IN_GROUPS)
        found.parts[1] = l.lower && is_there ? __ldg((const int4 *)(l.lower + (at - l.weights)))
                                             : make_int4(HALF_STEPS, HALF_STEPS, HALF_STEPS, HALF_STEPS);
    return found;
}

/* 8 codes -> the integers of the even inputs and of the odd ones. Without a table they are 2^shift times as large, so
 * that a byte's highest bit is the sign. */
__device__ inline void unpack(const grouped &l, unsigned codes, int &even, int &odd) {
    if (l.shift) {
        const unsigned mask = l.shift == 4 ? 0xf0f0f0f0u : 0x78787878u, sign = l.shift == 4 ? 0x80808080u : 0;
        even = (int)(((codes << l.shift) & mask) ^ sign), odd = (int)(((codes >> (4 - l.shift)) & mask) ^ sign);
        return;
    }
    /* Three bits of a code choose a byte of each half of the table, and the fourth bit chooses the half. */
    const unsigned index = codes & 0x77777777u, half = 0x32103210u | ((codes >> 1) & 0x44444444u);
    const unsigned first = __byte_perm(__byte_perm(l.table_0, l.table_1, index & 0xffff),
                                       __byte_perm(l.table_2, l.table_3, index & 0xffff), half & 0xffff);
    const unsigned second = __byte_perm(__byte_perm(l.table_0, l.table_1, index >> 16),
                                        __byte_perm(l.table_2, l.table_3, index >> 16), half >> 16);
    even = (int)__byte_perm(first, second, 0x6420), odd = (int)__byte_perm(first, second, 0x7531);
}

/* Words of bytes, codes or planes -> bytes, in the order of the activations. */
__device__ inline void unpack(const grouped &l, const packed<CODES> &from, int *words) {
    const int codes[4] = {from.parts[0].x, from.parts[0].y, from.parts[0].z, from.parts[0].w};
    for (int i = 0; i < 4; i++) unpack(l, codes[i], words[2 * i], words[2 * i + 1]);
}
__device__ inline void unpack(const grouped &l, const packed<BYTES> &from, int *words) {
    *(int4 *)words = from.parts[0], *(int4 *)(words + 4) = from.parts[1];
}
__device__ inline void unpack(const grouped &l, const packed<PLANES_IN_GROUPS> &from, int *words) {
    const int4 upper = from.parts[0], lower = from.parts[1];
    *(int2 *)words = join(upper.x, lower.x), *(int2 *)(words + 2) = join(upper.y, lower.y);
    *(int2 *)(words + 4) = join(upper.z, lower.z), *(int2 *)(words + 6) = join(upper.w, lower.w);
}
