/* The attention of a layer with what lies around it, from the hidden state to the input of the mlp, in one call. Part
 * of cpu.c.
 *
 * The call consists of the functions that other calls consist of, in the same order, so that it has their bits. It
 * saves what lies between them: for one token, going back to Python ten times takes longer than all but the products.
 * The functions are exported, so no compiler makes a second copy of one of them here, which could round differently. */
#pragma once

/* AttentionSublayer of attention_sublayer.py. */
typedef struct {
    const float *input_norm, *q_norm, *k_norm, *post_norm; /* those of heads may be NULL */
    const expert_matrix *qkv, *o;
    const float *qkv_bias, *o_bias, *sinks;
    int64_t num_heads, window, chunk;
    float eps, offset, head_offset, scale, softcap;
    float factor; /* of what is added to the hidden state */
    int is_norm_after_rope, is_norm_whole, is_interleaved;
    int has_gate; /* each head of q has a gate after it; q and k have norms, each head alone, before rope */
} attention_sublayer;

/* y = onto + factor * x; the product rounds as well. */
static void add_branch(const float *onto, const float *x, float factor, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i += LANES) {
        const int64_t count = MIN(LANES, n - i);
        vec own = (count == LANES ? load(x + i) : load_some(x + i, count)) * splat(factor);
        IN_REGISTER(own); /* GCC would make one operation of both */
        own += count == LANES ? load(onto + i) : load_some(onto + i, count);
        memcpy(y + i, &own, count * sizeof(float));
    }
}

static void multiply(const expert_matrix *m, const float *bias, const float *x, int64_t num_tokens, int activation_bits,
                     float *y, void *scratch) {
    const group_numbers *n = &m->numbers;
    if (m->table)
        penstock_int4_linear(x, m->in_features, num_tokens, m->in_features, m->qweight, m->table, n->scale, n->minimum,
                             n->sub_scale, n->sub_minimum, n->dtype, n->bits, n->block_groups, m->num_groups, bias,
                             m->out_features, activation_bits, y, scratch);
    else if (m->lower)
        penstock_planes_linear(x, m->in_features, num_tokens, m->in_features, m->qweight, m->lower, m->lower_bytes,
                               n->scale, m->num_groups, bias, m->out_features, activation_bits, y, scratch);
    else
        penstock_int8_linear(x, m->in_features, num_tokens, m->in_features, m->qweight, n->scale, m->num_groups, bias,
                             m->out_features, activation_bits, y, scratch);
}

/* Heads of q and k with norms, each head alone or all of them together, one token after the other, from rows of `from`
 * to rows of `to`, which have no gates. */
static void norm_heads(const attention_sublayer *s, int64_t num_kv_heads, int64_t d, int64_t num_tokens,
                       const float *from, int64_t from_stride, float *to, int64_t to_stride) {
    const int64_t keys = s->num_heads * d, own = s->has_gate ? 2 : 1;
    const int64_t q = s->is_norm_whole ? s->num_heads : 1, k = s->is_norm_whole ? num_kv_heads : 1; /* together */
    for (int64_t t = 0; t < num_tokens; t++) {
        const float *x = from + t * from_stride;
        float *y = to + t * to_stride;
        penstock_rms_norm(x, own * q * d, s->num_heads / q, q * d, s->q_norm, s->head_offset, s->eps, y);
        penstock_rms_norm(x + own * keys, k * d, num_kv_heads / k, k * d, s->k_norm, s->head_offset, s->eps, y + keys);
    }
}

/* Multiplies what attention gives by the sigmoids of the gates in rows of q. `gates` has room for a token's heads. */
static void gate_heads(const attention_sublayer *s, const float *q, int64_t stride, int64_t d, int64_t num_tokens,
                       float *attended, float *gates) {
    const int64_t size = s->num_heads * d;
    for (int64_t t = 0; t < num_tokens; t++, attended += size) {
        penstock_activation(q + t * stride + d, 2 * d, s->num_heads, d, SIGMOID_OF, 0.0f, 0.0f, false, gates);
        for (int64_t i = 0; i < size; i++) attended[i] *= gates[i];
    }
}

/* `summed` is hidden + factor * attention(norm(hidden)), and `normed` the next norm of that, each [num_tokens, width].
 * cos and sin are [num_tokens, half], or NULL in a layer without rope. attention_sublayer.py says how large `scratch`
 * is; `partials` are those of penstock_paged_attention. Returns what penstock_write_kv returns. */
EXPORT int penstock_attention_sublayer(const attention_sublayer *s, const float *hidden, int64_t num_tokens,
                                       const float *cos, const float *sin, int64_t half, const int64_t *slot_mapping,
                                       void *k_cache, void *v_cache, int form, int64_t num_kv_heads, int64_t head_dim,
                                       int64_t block_size, const int32_t *block_tables, int64_t max_blocks,
                                       const int32_t *query_start, const int32_t *context_lens,
                                       const int32_t *prefix_lens, int64_t num_seqs, int activation_bits, float *summed,
                                       float *normed, float *scratch, float *partials) {
    const int64_t width = s->qkv->in_features, row = s->qkv->out_features, d = head_dim;
    const int64_t keys = s->num_heads * d, values = keys + num_kv_heads * d, gates = s->has_gate ? keys : 0;
    float *qkv = scratch, *heads = qkv + num_tokens * row, *attended = heads + num_tokens * values;
    int32_t *tiles = (int32_t *)(attended + num_tokens * keys);
    void *products = aligned_at(tiles + 2 * num_tokens);
    penstock_rms_norm(hidden, width, num_tokens, width, s->input_norm, s->offset, s->eps, normed);
    multiply(s->qkv, s->qkv_bias, normed, num_tokens, activation_bits, qkv, products);
    float *q = qkv;
    int64_t stride = row;
    if (s->q_norm && !s->is_norm_after_rope) {
        norm_heads(s, num_kv_heads, d, num_tokens, qkv, row, heads, values);
        q = heads, stride = values;
    }
    if (cos) {
        penstock_rope(q, stride, num_tokens, s->num_heads, d, half, cos, sin, s->is_interleaved);
        penstock_rope(q + keys, stride, num_tokens, num_kv_heads, d, half, cos, sin, s->is_interleaved);
    }
    if (s->q_norm && s->is_norm_after_rope) {
        norm_heads(s, num_kv_heads, d, num_tokens, qkv, row, heads, values);
        q = heads, stride = values;
    }
    const int has_clamped = penstock_write_kv(q + keys, stride, qkv + gates + values, row, num_tokens, slot_mapping,
                                              k_cache, v_cache, form, num_kv_heads, d, block_size);
    penstock_paged_attention(q, stride, attended, keys, s->num_heads, k_cache, v_cache, form, num_kv_heads, d,
                             block_size, block_tables, max_blocks, query_start, context_lens, prefix_lens, num_seqs,
                             s->scale, s->softcap, s->window, s->chunk, NULL, NULL, 0, 0, NULL, s->sinks, 0, tiles,
                             partials);
    if (gates) gate_heads(s, qkv, row, d, num_tokens, attended, heads);
    multiply(s->o, s->o_bias, attended, num_tokens, activation_bits, summed, products);
    add_branch(hidden, summed, s->factor, num_tokens * width, summed);
    penstock_rms_norm(summed, width, num_tokens, width, s->post_norm, s->offset, s->eps, normed);
    return has_clamped;
}
