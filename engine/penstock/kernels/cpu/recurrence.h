/* Recurrences: what the tokens of a sequence make of the sequence's state, one after the other. Part of cpu.c. */
#pragma once

/* StateSlots and the rows of each sequence: operands.py describes them. */
typedef struct {
    const int32_t *query_start, *context_lens, *slots, *save_start, *save_rows, *save_slots;
    int64_t num_seqs;
} sequences;

/* The sequence's first token is among its rows: the state before them is zero. */
INLINE bool is_new(const sequences *s, int64_t seq) {
    return s->context_lens[seq] == s->query_start[seq + 1] - s->query_start[seq];
}

/* Short convolution */

enum { CONV_CHANNELS = 8 * LANES };
static const float NO_ROW[CONV_CHANNELS];

typedef struct {
    const float *x, *weight, *bias;
    float *states, *y;
    int64_t x_stride, channels, width;
    int64_t place_stride, channel_stride; /* of the weights */
    sequences s;
} convolution;

/* `row` of x, from `channel` on. Rows before those of the step are in the state, or are zero. */
INLINE const float *conv_row(const convolution *c, int64_t seq, int64_t row, int64_t channel) {
    const int64_t before = c->s.query_start[seq] - row, kept = c->width - 1;
    if (before <= 0) return c->x + row * c->x_stride + channel;
    if (is_new(&c->s, seq)) return NO_ROW;
    return c->states + (c->s.slots[seq] * kept + kept - before) * c->channels + channel;
}

/* The state behind `row`: the row and those before it. The oldest row comes first, so that a state may be shifted in
 * its own place. */
static void keep_rows(const convolution *c, int64_t seq, int64_t row, int64_t slot, int64_t channel, int64_t n) {
    const int64_t kept = c->width - 1;
    float *state = c->states + slot * kept * c->channels + channel;
    for (int64_t i = 0; i < kept; i++)
        memmove(state + i * c->channels, conv_row(c, seq, row - kept + 1 + i, channel), n * sizeof(float));
}

static void conv_strip(void *context, int64_t task) {
    const convolution *c = context;
    const int64_t num_strips = (c->channels + CONV_CHANNELS - 1) / CONV_CHANNELS;
    const int64_t seq = task / num_strips, channel = task % num_strips * CONV_CHANNELS;
    const int64_t n = MIN(CONV_CHANNELS, c->channels - channel);
    const int64_t first = c->s.query_start[seq], end = c->s.query_start[seq + 1];
    float weights[c->width * CONV_CHANNELS]; /* of a place side by side, whatever the tensor's order is */
    for (int64_t i = 0; i < c->width; i++)
        for (int64_t j = 0; j < n; j++)
            weights[i * CONV_CHANNELS + j] = c->weight[i * c->place_stride + (channel + j) * c->channel_stride];
    for (int64_t row = first; row < end; row++) {
        float total[CONV_CHANNELS] = {0};
        for (int64_t i = 0; i < c->width; i++) {
            const float *x = conv_row(c, seq, row - c->width + 1 + i, channel);
            const float *weight = weights + i * CONV_CHANNELS;
            for (int64_t j = 0; j < n; j++) total[j] += x[j] * weight[j];
        }
        if (c->bias)
            for (int64_t j = 0; j < n; j++) total[j] += c->bias[channel + j];
        memcpy(c->y + row * c->channels + channel, total, n * sizeof(float));
    }
    for (int32_t save = c->s.save_start[seq]; save < c->s.save_start[seq + 1]; save++)
        keep_rows(c, seq, c->s.save_rows[save], c->s.save_slots[save], channel, n);
    keep_rows(c, seq, end - 1, c->s.slots[seq], channel, n);
}

/* y [num_tokens, channels]; width is at least 2; states [num_states, width - 1, channels]. The weight of a place and a
 * channel lies at place * place_stride + channel * channel_stride. */
EXPORT void penstock_short_conv(const float *x, int64_t x_stride, int64_t channels, const float *weight,
                                int64_t place_stride, int64_t channel_stride, const float *bias, int64_t width,
                                float *states, float *y, const int32_t *query_start, const int32_t *context_lens,
                                const int32_t *slots, const int32_t *save_start, const int32_t *save_rows,
                                const int32_t *save_slots, int64_t num_seqs) {
    const sequences s = {query_start, context_lens, slots, save_start, save_rows, save_slots, num_seqs};
    convolution c = {x, weight, bias, states, y, x_stride, channels, width, place_stride, channel_stride, s};
    const int64_t num_tasks = num_seqs * ((channels + CONV_CHANNELS - 1) / CONV_CHANNELS);
    for_rows(num_tasks, query_start[num_seqs] * width * CONV_CHANNELS / MAX(num_seqs, 1), conv_strip, &c);
}

/* State of a key and a value: Gated DeltaNet, Mamba-2, Kimi Delta Attention */

/* Columns of a state are independent of each other. A task has so many columns of a head for all rows of a sequence,
 * which stay in the cache meanwhile. */
enum { COLUMNS = 2 * LANES, MAX_KEY_DIM = 1024 };

typedef struct {
    const float *q, *k, *v, *decay, *beta;
    float *states, *y;
    int64_t q_stride, k_stride, v_stride, num_heads, num_key_heads, key_dim, value_dim;
    int64_t decay_dim; /* key_dim: the decay has a factor for each row of a state; otherwise 1 */
    sequences s;
} recurrence;

/* found += key_i S_i */
INLINE void find_row(float key, const float *state, vec *found) {
    for (int j = 0; j < 2; j++) found[j] += splat(key) * load(state + j * LANES);
}

/* S_i = decay S_i + key_i new, y += query_i S_i */
INLINE void change_row(float key, float query, float decay, const vec *new, float *state, vec *y) {
    for (int j = 0; j < 2; j++) {
        const vec now = splat(decay) * load(state + j * LANES) + splat(key) * new[j];
        store(state + j * LANES, now);
        y[j] += splat(query) * now;
    }
}

/* One token: S = decay * S + key new^T, y = S^T query; `new` is v, or by the delta rule beta * (v - decay * S^T key).
 * Even and odd rows of S have sums of their own, so that an addition need not wait for the one before. */
NOINLINE void advance(const float *key, const float *query, int64_t key_dim, float decay, const float *beta,
                      const float *v, float *state, int64_t stride, float *y) {
    vec new[2] = {load(v), load(v + LANES)}, even[2] = {}, odd[2] = {};
    int64_t i = 0;
    if (beta) {
        for (; i + 1 < key_dim; i += 2) {
            find_row(key[i], state + i * stride, even);
            find_row(key[i + 1], state + (i + 1) * stride, odd);
        }
        if (i < key_dim) find_row(key[i], state + i * stride, even);
        for (int j = 0; j < 2; j++) {
            new[j] = splat(*beta) * (new[j] - splat(decay) * (even[j] + odd[j]));
            even[j] = odd[j] = (vec){};
        }
    }
    for (i = 0; i + 1 < key_dim; i += 2) {
        change_row(key[i], query[i], decay, new, state + i * stride, even);
        change_row(key[i + 1], query[i + 1], decay, new, state + (i + 1) * stride, odd);
    }
    if (i < key_dim) change_row(key[i], query[i], decay, new, state + i * stride, even);
    for (int j = 0; j < 2; j++) store(y + j * LANES, even[j] + odd[j]);
}

/* S_i = decay S_i, found += key_i S_i */
INLINE void fade_row(float key, float decay, float *state, vec *found) {
    for (int j = 0; j < 2; j++) {
        const vec now = splat(decay) * load(state + j * LANES);
        store(state + j * LANES, now);
        found[j] += splat(key) * now;
    }
}

/* S_i += key_i new, y += query_i S_i */
INLINE void add_row(float key, float query, const vec *new, float *state, vec *y) {
    for (int j = 0; j < 2; j++) {
        const vec now = load(state + j * LANES) + splat(key) * new[j];
        store(state + j * LANES, now);
        y[j] += splat(query) * now;
    }
}

/* advance() with a factor for each row of S in `decay`: the rows are multiplied first. */
NOINLINE void advance_channels(const float *key, const float *query, int64_t key_dim, const float *decay,
                               const float *beta, const float *v, float *state, int64_t stride, float *y) {
    vec new[2] = {load(v), load(v + LANES)}, even[2] = {}, odd[2] = {};
    int64_t i = 0;
    for (; i + 1 < key_dim; i += 2) {
        fade_row(key[i], decay[i], state + i * stride, even);
        fade_row(key[i + 1], decay[i + 1], state + (i + 1) * stride, odd);
    }
    if (i < key_dim) fade_row(key[i], decay[i], state + i * stride, even);
    for (int j = 0; j < 2; j++) {
        if (beta) new[j] = splat(*beta) * (new[j] - (even[j] + odd[j]));
        even[j] = odd[j] = (vec){};
    }
    for (i = 0; i + 1 < key_dim; i += 2) {
        add_row(key[i], query[i], new, state + i * stride, even);
        add_row(key[i + 1], query[i + 1], new, state + (i + 1) * stride, odd);
    }
    if (i < key_dim) add_row(key[i], query[i], new, state + i * stride, even);
    for (int j = 0; j < 2; j++) store(y + j * LANES, even[j] + odd[j]);
}

INLINE float *state_at(const recurrence *r, int64_t slot, int64_t head, int64_t column) {
    return r->states + (slot * r->num_heads + head) * r->key_dim * r->value_dim + column;
}

static void copy_columns(float *to, int64_t to_stride, const float *from, int64_t from_stride, int64_t rows,
                         int64_t n) {
    for (int64_t i = 0; i < rows; i++) memcpy(to + i * to_stride, from + i * from_stride, n * sizeof(float));
}

static void recur_columns(void *context, int64_t task) {
    const recurrence *r = context;
    const int64_t num_strips = (r->value_dim + COLUMNS - 1) / COLUMNS, column = task % num_strips * COLUMNS;
    const int64_t head = task / num_strips % r->num_heads, seq = task / num_strips / r->num_heads;
    const int64_t key_head = head / (r->num_heads / r->num_key_heads), n = MIN(COLUMNS, r->value_dim - column);
    const int64_t first = r->s.query_start[seq], end = r->s.query_start[seq + 1];
    float *own = state_at(r, r->s.slots[seq], head, column), local[MAX_KEY_DIM * COLUMNS];
    /* Rows of a state lie so far apart that few of them stay in the cache: a chunk works on a copy. */
    const bool is_copied = end - first > 1 || n < COLUMNS;
    float *state = is_copied ? local : own;
    const int64_t stride = is_copied ? COLUMNS : r->value_dim;
    if (n < COLUMNS) memset(local, 0, r->key_dim * COLUMNS * sizeof(float));
    if (is_new(&r->s, seq))
        for (int64_t i = 0; i < r->key_dim; i++) memset(state + i * stride, 0, n * sizeof(float));
    else if (is_copied) copy_columns(local, COLUMNS, own, r->value_dim, r->key_dim, n);
    int32_t save = r->s.save_start[seq];
    for (int64_t row = first; row < end; row++) {
        float v[COLUMNS] = {0}, y[COLUMNS];
        memcpy(v, r->v + row * r->v_stride + head * r->value_dim + column, n * sizeof(float));
        const int64_t at = row * r->num_heads + head;
        const float *key = r->k + row * r->k_stride + key_head * r->key_dim;
        const float *query = r->q + row * r->q_stride + key_head * r->key_dim;
        const float *decay = r->decay + at * r->decay_dim, *beta = r->beta ? r->beta + at : NULL;
        if (r->decay_dim > 1) advance_channels(key, query, r->key_dim, decay, beta, v, state, stride, y);
        else advance(key, query, r->key_dim, *decay, beta, v, state, stride, y);
        memcpy(r->y + at * r->value_dim + column, y, n * sizeof(float));
        for (; save < r->s.save_start[seq + 1] && r->s.save_rows[save] == row; save++)
            copy_columns(state_at(r, r->s.save_slots[save], head, column), r->value_dim, state, stride, r->key_dim, n);
    }
    if (is_copied) copy_columns(own, r->value_dim, local, COLUMNS, r->key_dim, n);
}

/* y [num_tokens, num_heads, value_dim]; states [num_states, num_heads, key_dim, value_dim]; key_dim is at most
 * MAX_KEY_DIM; decay [num_tokens, num_heads, decay_dim], where decay_dim is 1 or key_dim. */
EXPORT void penstock_recurrence(const float *q, int64_t q_stride, const float *k, int64_t k_stride, const float *v,
                                int64_t v_stride, const float *decay, const float *beta, float *states, float *y,
                                int64_t num_heads, int64_t num_key_heads, int64_t key_dim, int64_t value_dim,
                                const int32_t *query_start, const int32_t *context_lens, const int32_t *slots,
                                const int32_t *save_start, const int32_t *save_rows, const int32_t *save_slots,
                                int64_t num_seqs, int64_t decay_dim) {
    const sequences s = {query_start, context_lens, slots, save_start, save_rows, save_slots, num_seqs};
    recurrence r = {q, k, v, decay, beta, states, y, q_stride, k_stride, v_stride, num_heads, num_key_heads, key_dim,
                    value_dim, decay_dim, s};
    const int64_t num_tasks = num_seqs * num_heads * ((value_dim + COLUMNS - 1) / COLUMNS);
    for_rows(num_tasks, query_start[num_seqs] * 2 * key_dim * COLUMNS / MAX(num_seqs, 1), recur_columns, &r);
}
