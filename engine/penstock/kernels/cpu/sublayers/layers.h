/* Layers that follow each other in one call, for steps of a few tokens: each is attention_sublayer.h's part or
 * recurrent_sublayer.h's, a gated mlp, and the sum of both. Part of cpu.c.
 *
 * A layer of a small model takes a millisecond for one token, and a tenth of that goes by between two calls of
 * Python. */
#pragma once

/* A layer with its keys and values, or its states, in this step, as kernels/sublayers/whole_layer.py describes it. All
 * members have eight bytes. */
typedef struct {
    const attention_sublayer *attention; /* NULL: the layer has `recurrence` */
    const recurrent_sublayer *recurrence;
    const expert_weights *mlp;
    const float *cos, *sin; /* [num_tokens, half]; NULL in a layer without rope */
    int64_t half;
    void *k_cache, *v_cache;
    int64_t form, num_kv_heads, head_dim, block_size;
    layer_states states;
} whole_layer;

/* What all layers of a step share. */
typedef struct {
    const int64_t *slot_mapping;
    const int32_t *block_tables;
    int64_t max_blocks;
    const int32_t *query_start, *context_lens, *prefix_lens;
    int64_t num_seqs;
    const sequences *states; /* NULL where no layer has states */
    int64_t num_tokens, activation_bits;
    float *scratch;  /* of penstock_attention_sublayer and penstock_mix, for the layer that needs most */
    float *partials; /* of penstock_attention_sublayer */
} layers_step;

INLINE int64_t width_of(const whole_layer *l) {
    return l->attention ? l->attention->qkv->in_features : l->recurrence->mixer->in->in_features;
}

/* Up to the input of the mlp. Returns what penstock_write_kv returns. */
static int begin_layer(const whole_layer *l, const layers_step *s, const float *hidden, float *summed, float *normed) {
    if (!l->attention) {
        compute_recurrent(l->recurrence, hidden, s->num_tokens, l->states, s->states, (int)s->activation_bits, summed,
                          normed, s->scratch);
        return false;
    }
    return penstock_attention_sublayer(l->attention, hidden, s->num_tokens, l->cos, l->sin, l->half, s->slot_mapping,
                                       l->k_cache, l->v_cache, (int)l->form, l->num_kv_heads, l->head_dim,
                                       l->block_size, s->block_tables, s->max_blocks, s->query_start, s->context_lens,
                                       s->prefix_lens, s->num_seqs, (int)s->activation_bits, summed, normed, s->scratch,
                                       s->partials);
}

/* y is [4, num_tokens, width]; its first part is the hidden state after the last layer, where mlps are added times
 * `factor`. `rows` are the numbers from 0 to num_tokens - 1. `mlp_scratch` is that of penstock_gated_experts, for the
 * layer that needs most. Returns what penstock_write_kv returns. */
EXPORT int penstock_layers(const whole_layer *layers, int64_t num_layers, const layers_step *s, const float *hidden,
                           const int64_t *rows, int kind, float sharpness, float limit, float factor, float *y,
                           void *mlp_scratch) {
    int has_clamped = 0;
    for (const whole_layer *l = layers; l < layers + num_layers; l++) {
        const int64_t width = width_of(l), size = s->num_tokens * width;
        float *summed = y + size, *normed = summed + size, *mlp = normed + size;
        has_clamped |= begin_layer(l, s, hidden, summed, normed);
        const expert whole = {l->mlp, 0, s->num_tokens};
        gated_experts(normed, width, rows, &whole, 1, kind, sharpness, limit, (int)s->activation_bits, mlp,
                      mlp_scratch);
        add_branch(summed, mlp, factor, size, y);
        hidden = y;
    }
    return has_clamped;
}
