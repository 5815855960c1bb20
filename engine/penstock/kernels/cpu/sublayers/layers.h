/* Layers that follow each other in one call, for steps of a few tokens: each is attention_sublayer.h's part, a gated
 * mlp, and the sum of both. Part of cpu.c.
 *
 * A layer of a small model takes a millisecond for one token, and a tenth of that goes by between two calls of
 * Python. */
#pragma once

/* A layer with its keys and values in this step, as kernels/sublayers/whole_layer.py describes it. All members have
 * eight bytes. */
typedef struct {
    const attention_sublayer *attention;
    const expert_weights *mlp;
    const float *cos, *sin; /* [num_tokens, half]; NULL in a layer without rope */
    int64_t half;
    void *k_cache, *v_cache;
    int64_t form, num_kv_heads, head_dim, block_size;
} whole_layer;

/* y is [4, num_tokens, width]; its first part is the hidden state behind the last layer. `rows` are the numbers from 0
 * to num_tokens - 1. `scratch` and `partials` are those of penstock_attention_sublayer and `mlp_scratch` is that of
 * penstock_gated_experts, each for the layer that needs most. Returns what penstock_write_kv returns. */
EXPORT int penstock_layers(const whole_layer *layers, int64_t num_layers, const float *hidden, int64_t num_tokens,
                           const int64_t *rows, const int64_t *slot_mapping, const int32_t *block_tables,
                           int64_t max_blocks, const int32_t *query_start, const int32_t *context_lens,
                           const int32_t *prefix_lens, int64_t num_seqs, int kind, float sharpness, float limit,
                           int activation_bits, float *y, float *scratch, void *mlp_scratch, float *partials) {
    int has_clamped = 0;
    for (const whole_layer *l = layers; l < layers + num_layers; l++) {
        const int64_t width = l->attention->qkv->in_features, size = num_tokens * width;
        float *summed = y + size, *normed = summed + size, *mlp = normed + size;
        has_clamped |= penstock_attention_sublayer(l->attention, hidden, num_tokens, l->cos, l->sin, l->half,
                                                   slot_mapping, l->k_cache, l->v_cache, (int)l->form, l->num_kv_heads,
                                                   l->head_dim, l->block_size, block_tables, max_blocks, query_start,
                                                   context_lens, prefix_lens, num_seqs, activation_bits, summed, normed,
                                                   scratch, partials);
        const expert whole = {l->mlp, 0, num_tokens};
        gated_experts(normed, width, rows, &whole, 1, kind, sharpness, limit, activation_bits, mlp, mlp_scratch);
        for (int64_t i = 0; i < size; i++) y[i] = summed[i] + mlp[i];
        hidden = y;
    }
    return has_clamped;
}
