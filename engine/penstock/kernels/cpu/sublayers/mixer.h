/* What a recurrent layer computes in place of attention, from its normed input to the output of its last product, in
 * one call: Gated DeltaNet, Kimi Delta Attention, Mamba-2 and the short convolution of LFM2. Part of cpu.c.
 *
 * As attention_sublayer.h, it consists of the functions that other calls consist of, in the same order. */
#pragma once

enum { DELTA_NET = 0, KIMI_DELTA = 1, MAMBA2 = 2, SHORT_CONV = 3 };

/* The Mixer of kernels/sublayers/mixer.py, which says what is NULL in which kind. */
typedef struct {
    const expert_matrix *in, *gate_in, *gate, *step, *out;
    const float *in_bias, *out_bias;
    const float *gates, *decay; /* float32 matrices */
    const float *conv, *conv_bias; /* [channels, width] */
    const float *dt_bias, *a_log, *skip, *norm;
    const float *lengths; /* weights of the norms of q and k, [2, key_dim] */
    const float *factors; /* of the input, and of the parts of its product */
    int64_t kind, num_heads, num_key_heads, key_dim, value_dim, width;
    int64_t is_grouped, is_norm_before;
    double least_step, most_step, bound, beta_factor;
    float norm_eps, length_eps;
} mixer;

/* The states of a layer. */
typedef struct {
    float *rows, *heads;
} layer_states;

/* A step of a mixer, and where its parts lie. */
typedef struct {
    const mixer *m;
    const float *x;
    int64_t in_width, num_tokens, keys, values, channels, row; /* row: of the first product */
    layer_states states;
    const sequences *s;
    int activation_bits;
    float *found;    /* [num_tokens, row] */
    float *mixed;    /* [num_tokens, channels]: after the convolution, then with its function and norms */
    float *gate;     /* [num_tokens, values], its rows gate_stride apart */
    int64_t gate_stride;
    float *logits;   /* of the gates */
    float *beta, *decay, *steps;
    float *v; /* of MAMBA2, [num_tokens, values] */
    float *y; /* [num_tokens, values] */
    void *products;
} mixing;

static void product_of(const mixing *o, const expert_matrix *m, const float *bias, const float *x, float *y) {
    multiply(m, bias, x, o->num_tokens, o->activation_bits, y, o->products);
}

static void convolve(const mixing *o, const float *x, int64_t x_stride, float *y) {
    const mixer *m = o->m;
    const sequences *s = o->s;
    penstock_short_conv(x, x_stride, o->channels, m->conv, 1, m->width, m->conv_bias, m->width, o->states.rows, y,
                        s->query_start, s->context_lens, s->slots, s->save_start, s->save_rows, s->save_slots,
                        s->num_seqs);
}

/* q, k and v lie in rows of `mixed`, from these columns on; `v` has a stride of its own. */
static void recur(const mixing *o, int64_t q, int64_t k, const float *v, int64_t v_stride, const float *beta,
                  int64_t decay_dim) {
    const mixer *m = o->m;
    const sequences *s = o->s;
    penstock_recurrence(o->mixed + q, o->channels, o->mixed + k, o->channels, v, v_stride, o->decay, beta,
                        o->states.heads, o->y, m->num_heads, m->num_key_heads, m->key_dim, m->value_dim, s->query_start,
                        s->context_lens, s->slots, s->save_start, s->save_rows, s->save_slots, s->num_seqs, decay_dim);
}

/* Between the convolution and the recurrence: SiLU; q and k as long as they have to be, or v times the steps. */
static void prepare_mixed(void *context, int64_t token) {
    const mixing *o = context;
    const mixer *m = o->m;
    float *mixed = o->mixed + token * o->channels;
    penstock_activation(mixed, o->channels, 1, o->channels, SILU, 0.0f, 0.0f, false, mixed);
    for (int64_t head = 0; m->kind == MAMBA2 && head < m->num_heads; head++) {
        const float step = o->steps[token * m->num_heads + head];
        float *v = o->v + token * o->values;
        for (int64_t i = head * m->value_dim; i < (head + 1) * m->value_dim; i++) v[i] = mixed[i] * step;
    }
    if (m->kind == MAMBA2) return;
    for (int part = 0; part < 2; part++) {
        float *heads = mixed + part * o->keys;
        penstock_rms_norm(heads, m->key_dim, m->num_key_heads, m->key_dim, m->lengths + part * m->key_dim, 0.0f,
                          m->length_eps, heads);
    }
}

static void multiply_elements(const float *a, const float *b, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = a[i] * b[i];
}

/* After the recurrence: norm and gate. */
static void finish_mixed(void *context, int64_t token) {
    const mixing *o = context;
    const mixer *m = o->m;
    float *y = o->y + token * o->values, *gate = o->gate + token * o->gate_stride;
    if (m->kind == MAMBA2) {
        const float *x = o->mixed + token * o->channels;
        const int64_t d = m->value_dim;
        for (int64_t head = 0; head < m->num_heads; head++)
            add_branch(y + head * d, x + head * d, m->skip[head], d, y + head * d);
    }
    if (m->kind == KIMI_DELTA) penstock_gates(gate, o->values, 1, o->values, 1.0, gate);
    else penstock_activation(gate, o->values, 1, o->values, SILU, 0.0f, 0.0f, false, gate);
    if (m->kind == MAMBA2 && !m->is_norm_before) multiply_elements(y, gate, o->values, y);
    if (m->kind != MAMBA2)
        penstock_rms_norm(y, m->value_dim, m->num_heads, m->value_dim, m->norm, 0.0f, m->norm_eps, y);
    else if (m->norm) {
        const int64_t size = o->values / m->num_key_heads;
        for (int64_t at = 0; at < o->values; at += size)
            penstock_rms_norm(y + at, size, 1, size, m->norm + at, 0.0f, m->norm_eps, y + at);
    }
    if (m->kind != MAMBA2 || m->is_norm_before) multiply_elements(y, gate, o->values, y);
}

/* A token's products, of which the rows of each key head lie together: q, k, v and the gate; and its two gates. */
static void part_heads(void *context, int64_t token) {
    const mixing *o = context;
    const mixer *m = o->m;
    const int64_t heads = m->num_heads / m->num_key_heads, values = heads * m->value_dim, d = m->key_dim;
    const float *found = o->found + token * o->row, *logits = o->logits + token * 2 * m->num_heads;
    float *mixed = o->found + o->num_tokens * o->row + token * o->channels, *gate = o->gate + token * o->values;
    float parted[2 * m->num_heads];
    for (int64_t h = 0; h < m->num_key_heads; h++, found += 2 * (d + values)) {
        memcpy(mixed + h * d, found, d * sizeof(float));
        memcpy(mixed + o->keys + h * d, found + d, d * sizeof(float));
        memcpy(mixed + 2 * o->keys + h * values, found + 2 * d, values * sizeof(float));
        memcpy(gate + h * values, found + 2 * d + values, values * sizeof(float));
        for (int part = 0; part < 2; part++)
            memcpy(parted + part * m->num_heads + h * heads, logits + (2 * h + part) * heads, heads * sizeof(float));
    }
    memcpy(o->logits + token * 2 * m->num_heads, parted, sizeof parted);
}

static void mix_delta(mixing *o) {
    const mixer *m = o->m;
    const int64_t n = o->num_tokens, is_kimi = m->kind == KIMI_DELTA;
    const int64_t num_logits = m->num_heads + (!is_kimi ? m->num_heads : m->decay ? m->value_dim : 0);
    const float *parted = o->found;
    product_of(o, m->in, m->in_bias, o->x, o->found);
    if (m->gate_in) product_of(o, m->gate_in, NULL, o->x, o->y);
    if (!m->is_grouped) product_of(o, m->gate, NULL, m->gate_in ? o->y : o->x, o->gate);
    penstock_router_scores(o->x, o->in_width, n, o->in_width, m->gates, NULL, num_logits, NO_FUNCTION, o->logits);
    if (m->is_grouped) {
        for_rows(n, o->row, part_heads, o);
        parted = o->found + n * o->row;
    }
    penstock_gates(o->logits, num_logits, n, m->num_heads, m->beta_factor, o->beta);
    if (is_kimi) {
        if (m->decay)
            penstock_router_scores(o->logits + m->num_heads, num_logits, n, m->value_dim, m->decay, m->dt_bias,
                                   o->values, NO_FUNCTION, o->steps);
        else product_of(o, m->step, NULL, o->x, o->steps);
        penstock_decays(o->steps, o->values, n, m->num_heads, m->key_dim, m->decay ? NULL : m->dt_bias, m->a_log,
                        m->least_step, m->most_step, m->bound, NULL, o->decay);
    } else
        penstock_decays(o->logits + m->num_heads, num_logits, n, m->num_heads, 1, m->dt_bias, m->a_log, m->least_step,
                        m->most_step, 0.0, NULL, o->decay);
    convolve(o, parted, o->channels, o->mixed);
    for_rows(n, 8 * o->channels, prepare_mixed, o);
    recur(o, 0, o->keys, o->mixed + 2 * o->keys, o->channels, o->beta, is_kimi ? m->key_dim : 1);
}

static void mix_mamba(mixing *o) {
    const mixer *m = o->m;
    const int64_t n = o->num_tokens, values = o->values, keys = o->keys, row = o->row;
    const float *x = o->x;
    if (m->factors) {
        for (int64_t i = 0; i < n * o->in_width; i++) o->y[i] = o->x[i] * m->factors[0];
        x = o->y;
    }
    product_of(o, m->in, m->in_bias, x, o->found);
    if (m->factors) {
        const int64_t ends[] = {values, 2 * values, 2 * values + keys, 2 * values + 2 * keys, row};
        for (int64_t token = 0; token < n; token++)
            for (int64_t part = 0, i = 0; part < 5; part++)
                for (; i < ends[part]; i++) o->found[token * row + i] *= m->factors[1 + part];
    }
    penstock_decays(o->found + values + o->channels, row, n, m->num_heads, 1, m->dt_bias, m->a_log, m->least_step,
                    m->most_step, 0.0, o->steps, o->decay);
    convolve(o, o->found + values, row, o->mixed);
    for_rows(n, 4 * o->channels, prepare_mixed, o);
    recur(o, values + keys, values, o->v, values, NULL, 1);
}

static void mix_conv(mixing *o) {
    const int64_t n = o->num_tokens, width = o->channels;
    product_of(o, o->m->in, o->m->in_bias, o->x, o->found);
    for (int64_t token = 0; token < n; token++) {
        const float *found = o->found + token * o->row;
        multiply_elements(found, found + 2 * width, width, o->y + token * width);
    }
    convolve(o, o->y, width, o->mixed);
    for (int64_t token = 0; token < n; token++)
        multiply_elements(o->found + token * o->row + width, o->mixed + token * width, width, o->y + token * width);
}

/* Where the parts of a step lie. mixer.py says how large `scratch` is. */
static mixing plan_mixing(const mixer *m, const float *x, int64_t num_tokens, layer_states states, const sequences *s,
                          int activation_bits, float *scratch) {
    const int64_t n = num_tokens, is_conv = m->kind == SHORT_CONV;
    const int64_t values = m->out->in_features, keys = m->num_key_heads * m->key_dim;
    const int64_t channels = is_conv ? values : 2 * keys + values;
    mixing o = {.m = m, .x = x, .in_width = m->in->in_features, .num_tokens = n, .keys = keys, .values = values,
                .channels = channels, .row = m->in->out_features, .states = states, .s = s,
                .activation_bits = activation_bits, .found = scratch};
    float *at = o.found + n * o.row;
    if (m->is_grouped) at += n * channels; /* the rows of the first product in their order */
    o.mixed = at, at += n * channels;
    o.y = at, at += n * MAX(values, o.in_width);
    if (!is_conv) {
        o.gate = m->kind == MAMBA2 ? o.found : at, o.gate_stride = m->kind == MAMBA2 ? o.row : values;
        at += m->kind == MAMBA2 ? 0 : n * values;
        const int64_t decays = m->num_heads * (m->kind == KIMI_DELTA ? m->key_dim : 1);
        o.logits = at, at += n * (m->num_heads + MAX(m->num_heads, m->value_dim));
        o.beta = at, at += n * m->num_heads;
        o.v = at, at += m->kind == MAMBA2 ? n * values : 0;
        o.decay = at, at += n * decays;
        o.steps = at, at += n * decays;
    }
    o.products = aligned_at(at);
    return o;
}

/* y is [num_tokens, hidden_size]. */
static void compute_mixer(const mixer *m, const float *x, int64_t num_tokens, layer_states states, const sequences *s,
                          int activation_bits, float *y, float *scratch) {
    mixing o = plan_mixing(m, x, num_tokens, states, s, activation_bits, scratch);
    if (m->kind == SHORT_CONV) mix_conv(&o);
    else {
        if (m->kind == MAMBA2) mix_mamba(&o);
        else mix_delta(&o);
        for_rows(num_tokens, 8 * o.values, finish_mixed, &o);
    }
    product_of(&o, m->out, m->out_bias, o.y, y);
}

EXPORT void penstock_mix(const mixer *m, const float *x, int64_t num_tokens, float *rows, float *heads,
                         const sequences *s, int activation_bits, float *y, float *scratch) {
    compute_mixer(m, x, num_tokens, (layer_states){rows, heads}, s, activation_bits, y, scratch);
}
