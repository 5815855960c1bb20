/* The recurrence of a layer with what lies around it, from the hidden state to the input of the mlp. Part of cpu.c. */
#pragma once

/* RecurrentSublayer of recurrent_sublayer.py. */
typedef struct {
    const float *input_norm, *post_norm;
    const mixer *mixer;
    float eps, offset, factor;
} recurrent_sublayer;

/* `summed` is hidden + factor * mix(norm(hidden)), and `normed` the next norm of that, each [num_tokens, width].
 * `scratch` is that of penstock_mix. */
static void compute_recurrent(const recurrent_sublayer *r, const float *hidden, int64_t num_tokens, layer_states states,
                              const sequences *s, int activation_bits, float *summed, float *normed, float *scratch) {
    const int64_t width = r->mixer->in->in_features;
    penstock_rms_norm(hidden, width, num_tokens, width, r->input_norm, r->offset, r->eps, normed);
    compute_mixer(r->mixer, normed, num_tokens, states, s, activation_bits, summed, scratch);
    add_branch(hidden, summed, r->factor, num_tokens * width, summed);
    penstock_rms_norm(summed, width, num_tokens, width, r->post_norm, r->offset, r->eps, normed);
}
