/* Codes of 3 or 2 bits, in groups of 32 or 64 inputs whose scales are steps (steps.h). Part of linear.h.
 *
 * A code c stands for c - 4 (3 bits) or c - 2 (2 bits), and a step is at most 31 or 63: a step times a code fits INT8.
 * A larger step counts as the largest, so that any bytes are a matrix.
 *
 * A row is blocks of 256 inputs in three vectors a, b, c of 32 bytes (3 bits), or of 128 inputs in one vector (2 bits);
 * what is missing of the last block has no meaning. Each 64 inputs are a pair of slots, the even inputs and the odd
 * ones, byte i of a vector being input 2 i or 2 i + 1. With 3 bits, slots 0 to 5 are bits 0 to 2 and 3 to 5 of a, b and
 * c. Slot 6 has bits 6 and 7 of a below bit 6 of b, and slot 7 those of c below bit 7 of b. With 2 bits, slot i is the
 * bits 2 i and 2 i + 1. */
#pragma once

enum { LOW_BLOCK_3 = 256, LOW_BLOCK_2 = 128, LOW_PAIR = 64 };

INLINE bool is_low(const linear *l) { return l->numbers.bits == 3 || l->numbers.bits == 2; }
INLINE int64_t low_block(const linear *l) { return l->numbers.bits == 3 ? LOW_BLOCK_3 : LOW_BLOCK_2; }
INLINE int64_t whole_low_blocks(const linear *l, int64_t inputs) {
    return (inputs + low_block(l) - 1) / low_block(l) * low_block(l);
}
INLINE int most_low_steps(int bits) { return bits == 3 ? 31 : 63; }

#if defined(__AVX2__)
typedef struct {
    __m256i even, odd;
} low_pair;
/* Two bits of each byte from bit `from` on, or three. */
INLINE __m256i low_bits(__m256i v, const int from, const int mask) {
    return _mm256_and_si256(from ? _mm256_srli_epi16(v, from) : v, _mm256_set1_epi8((char)mask));
}
/* The pair `i` (a constant) of a block. */
INLINE low_pair low_pair_at(const int8_t *block, const int i, const int bits) {
    const __m256i *v = (const __m256i *)block;
    if (bits == 2) {
        const __m256i all = _mm256_loadu_si256(v);
        return (low_pair){low_bits(all, 4 * i, 3), low_bits(all, 4 * i + 2, 3)};
    }
    if (i < 3) return (low_pair){low_bits(_mm256_loadu_si256(v + i), 0, 7), low_bits(_mm256_loadu_si256(v + i), 3, 7)};
    const __m256i b = _mm256_loadu_si256(v + 1);
    return (low_pair){_mm256_or_si256(low_bits(_mm256_loadu_si256(v), 6, 3), low_bits(b, 4, 4)),
                      _mm256_or_si256(low_bits(_mm256_loadu_si256(v + 2), 6, 3), low_bits(b, 5, 4))};
}
#endif
