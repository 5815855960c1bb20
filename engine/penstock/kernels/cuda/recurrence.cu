/* Recurrences: what the tokens of a sequence make of the sequence's state, one after the other. The order of sums, and
 * what is fused, is that of cpu/recurrence.h where a processor fuses multiplications with additions, so that both give
 * the same bits. */

/* StateSlots and the rows of each sequence: operands.py describes them. */
typedef struct {
    const int *query_start, *context_lens, *slots, *save_start, *save_rows, *save_slots;
} sequences;

/* The sequence's first token is among its rows: the state before them is zero. */
__device__ inline bool is_new(const sequences &s, int seq) {
    return s.context_lens[seq] == s.query_start[seq + 1] - s.query_start[seq];
}

/* Short convolution: a thread has a channel of a sequence. */

typedef struct {
    const float *x;
    int64 x_stride;
    int channels, width, first, slot; /* of the sequence: its first row, and its state */
    bool is_new;
    float *states; /* [num_states, width - 1, channels] */
} convolved;

/* A channel's input of a row of the step, or of one before: those are in the state, or zero. */
__device__ inline float input_at(const convolved &c, int row, int channel) {
    if (row >= c.first) return c.x[row * c.x_stride + channel];
    if (c.is_new) return 0.0f;
    return c.states[((int64)c.slot * (c.width - 1) + c.width - 1 + row - c.first) * c.channels + channel];
}

/* The state behind `row`. The oldest input comes first, so that a state may be shifted in its own place. */
__device__ inline void keep_inputs(const convolved &c, int row, int slot, int channel) {
    for (int i = 0; i < c.width - 1; i++)
        c.states[((int64)slot * (c.width - 1) + i) * c.channels + channel] =
            input_at(c, row - c.width + 2 + i, channel);
}

/* Grid: channels, then sequences. */
KERNEL short_conv(const float *x, int64 x_stride, int channels, const float *weight, const float *bias, int width,
                  float *states, float *y, const int *query_start, const int *context_lens, const int *slots,
                  const int *save_start, const int *save_rows, const int *save_slots) {
    const sequences s = {query_start, context_lens, slots, save_start, save_rows, save_slots};
    const int channel = blockIdx.x * blockDim.x + threadIdx.x, seq = blockIdx.y;
    const int first = s.query_start[seq], end = s.query_start[seq + 1];
    if (channel >= channels || first == end) return;
    const convolved c = {x, x_stride, channels, width, first, s.slots[seq], is_new(s, seq), states};
    for (int row = first; row < end; row++) {
        float total = 0.0f;
        for (int i = 0; i < width; i++)
            total = fmaf(input_at(c, row - width + 1 + i, channel), weight[i * channels + channel], total);
        y[(int64)row * channels + channel] = bias ? total + bias[channel] : total;
    }
    for (int save = s.save_start[seq]; save < s.save_start[seq + 1]; save++)
        keep_inputs(c, s.save_rows[save], s.save_slots[save], channel);
    keep_inputs(c, end - 1, c.slot, channel);
}

/* State of a key and a value: Gated DeltaNet, Mamba-2, Kimi Delta Attention. Two threads, 16 lanes apart, have a column
 * of a head's state: one has the even rows and the other the odd ones, in registers. The columns are independent of each
 * other, and so are heads and sequences. Grid: sequences times heads, then strips of columns. */

typedef struct {
    const float *q, *k, *v, *decay, *beta;
    int64 q_stride, k_stride, v_stride;
    float *states, *y;
    int num_heads, num_key_heads, key_dim, value_dim;
    sequences s;
} recurrent;

enum { MOST_KEY_DIM = 1024 };

/* A column's rows of a state: every second one from `parity` on. HALF: how many, in registers; 0: they stay in the
 * state's memory, however many there are. */
template <int HALF> struct column_rows {
    float own[HALF];
    __device__ inline float get(int i) const { return own[i]; }
    __device__ inline void set(int i, float value) { own[i] = value; }
};
template <> struct column_rows<0> {
    float *at;
    int64 stride;
    __device__ inline float get(int i) const { return at[i * stride]; }
    __device__ inline void set(int i, float value) { at[i * stride] = value; }
};

/* The sum of both threads of a column. */
__device__ inline float both(float sum) { return sum + __shfl_xor_sync(ALL_LANES, sum, 16); }

/* A token's part of one column: see advance() of cpu/recurrence.h. `key` and `query` are this thread's. */
template <int HALF>
__device__ inline float advance(column_rows<HALF> &state, int rows, const float (*key)[2], const float (*query)[2],
                                int parity, float decay, const float *beta, float v) {
    float found = 0.0f, y = 0.0f, value = v;
    if (beta) {
#pragma unroll
        for (int i = 0; i < (HALF ? HALF : rows); i++) found = fmaf(key[i][parity], state.get(i), found);
        value = *beta * fmaf(-decay, both(found), v);
    }
#pragma unroll
    for (int i = 0; i < (HALF ? HALF : rows); i++) {
        const float now = fmaf(decay, state.get(i), key[i][parity] * value);
        state.set(i, now);
        y = fmaf(query[i][parity], now, y);
    }
    return both(y);
}

/* advance() with a factor for each row of the state: the rows are multiplied first. */
template <int HALF>
__device__ inline float advance_channels(column_rows<HALF> &state, int rows, const float (*key)[2],
                                         const float (*query)[2], const float (*decay)[2], int parity,
                                         const float *beta, float v) {
    float found = 0.0f, y = 0.0f;
#pragma unroll
    for (int i = 0; i < (HALF ? HALF : rows); i++) {
        const float now = decay[i][parity] * state.get(i);
        state.set(i, now);
        found = fmaf(key[i][parity], now, found);
    }
    found = both(found);
    const float value = beta ? *beta * (v - found) : v;
#pragma unroll
    for (int i = 0; i < (HALF ? HALF : rows); i++) {
        const float now = fmaf(key[i][parity], value, state.get(i));
        state.set(i, now);
        y = fmaf(query[i][parity], now, y);
    }
    return both(y);
}

/* HAS_CHANNELS: the decay has a factor for each row of a state. */
template <int HALF, bool HAS_CHANNELS> __device__ inline void recur(const recurrent &r) {
    enum { PAIRS = HALF ? HALF : MOST_KEY_DIM / 2 };
    __shared__ float key[PAIRS][2], query[PAIRS][2], decay[HAS_CHANNELS ? PAIRS : 1][2];
    const int seq = blockIdx.x / r.num_heads, head = blockIdx.x % r.num_heads;
    const int key_head = head / (r.num_heads / r.num_key_heads), parity = threadIdx.x / 16 % 2;
    const int column = blockIdx.y * blockDim.x / 2 + threadIdx.x / 32 * 16 + threadIdx.x % 16;
    const int rows = (r.key_dim + 1 - parity) / 2, first = r.s.query_start[seq], end = r.s.query_start[seq + 1];
    if (first == end) return; /* the whole block */
    const bool is_there = column < r.value_dim, starts = is_new(r.s, seq);
    const int64 size = (int64)r.num_heads * r.key_dim * r.value_dim;
    const int64 offset = ((int64)head * r.key_dim + parity) * r.value_dim + (is_there ? column : 0);
    const int64 stride = 2 * r.value_dim;
    float *own = r.states + r.s.slots[seq] * size + offset;
    column_rows<HALF> state;
    if constexpr (HALF > 0)
        for (int i = 0; i < HALF; i++) state.set(i, starts || !is_there ? 0.0f : own[i * stride]);
    else {
        state.at = own, state.stride = stride;
        for (int i = 0; starts && is_there && i < rows; i++) state.set(i, 0.0f);
    }
    int save = r.s.save_start[seq];
    for (int row = first; row < end; row++) {
        __syncthreads(); /* the row before is computed */
        for (int i = threadIdx.x; i < r.key_dim; i += blockDim.x) {
            key[i / 2][i % 2] = r.k[row * r.k_stride + key_head * r.key_dim + i];
            query[i / 2][i % 2] = r.q[row * r.q_stride + key_head * r.key_dim + i];
            if constexpr (HAS_CHANNELS)
                decay[i / 2][i % 2] = r.decay[((int64)row * r.num_heads + head) * r.key_dim + i];
        }
        __syncthreads();
        const int64 at = (int64)row * r.num_heads + head;
        const float v = is_there ? r.v[row * r.v_stride + head * r.value_dim + column] : 0.0f;
        /* Threads without a column of their own take part in the exchange of sums, and touch no memory. */
        float y;
        if constexpr (HAS_CHANNELS)
            y = advance_channels<HALF>(state, is_there ? rows : 0, key, query, decay, parity,
                                       r.beta ? r.beta + at : 0, v);
        else
            y = advance<HALF>(state, is_there ? rows : 0, key, query, parity, r.decay[at],
                              r.beta ? r.beta + at : 0, v);
        if (is_there && parity == 0) r.y[at * r.value_dim + column] = y;
        for (; save < r.s.save_start[seq + 1] && r.s.save_rows[save] == row; save++) {
            float *to = r.states + r.s.save_slots[save] * size + offset;
            for (int i = 0; is_there && i < (HALF ? HALF : rows); i++) to[i * stride] = state.get(i);
        }
    }
    if (HALF > 0 && is_there)
        for (int i = 0; i < HALF; i++) own[i * stride] = state.get(i);
}

#define RECURRENCE_KERNEL(name, half, has_channels)                                                                \
    KERNEL name(const float *q, int64 q_stride, const float *k, int64 k_stride, const float *v, int64 v_stride,    \
                const float *decay, const float *beta, float *states, float *y, int num_heads, int num_key_heads,  \
                int key_dim, int value_dim, const int *query_start, const int *context_lens, const int *slots,     \
                const int *save_start, const int *save_rows, const int *save_slots) {                              \
        const sequences s = {query_start, context_lens, slots, save_start, save_rows, save_slots};                 \
        const recurrent r = {q, k, v, decay, beta, q_stride, k_stride, v_stride, states, y,                        \
                             num_heads, num_key_heads, key_dim, value_dim, s};                                     \
        recur<half, has_channels>(r);                                                                              \
    }
RECURRENCE_KERNEL(recurrence_any, 0, false)
RECURRENCE_KERNEL(recurrence_64, 32, false)
RECURRENCE_KERNEL(recurrence_128, 64, false)
RECURRENCE_KERNEL(recurrence_256, 128, false)
RECURRENCE_KERNEL(recurrence_channels_any, 0, true)
RECURRENCE_KERNEL(recurrence_channels_128, 64, true)
