/* A product that a thread of a card's driver calls, which knows nothing of Python. Part of cpu.c. */
#pragma once

/* HandedRecord of handed_product.py. All members have eight bytes. */
typedef struct {
    const expert_matrix *matrix;
    const float *x; /* [num_tokens, in_features] */
    int64_t num_tokens, activation_bits;
    float *y; /* [num_tokens, out_features] */
    void *scratch;
} handed_product;

EXPORT void penstock_handed_product(const handed_product *p) {
    multiply(p->matrix, NULL, p->x, p->num_tokens, (int)p->activation_bits, p->y, p->scratch);
}
