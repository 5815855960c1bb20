/* AMX's tile registers in plain C, in the place of the compiler's intrinsics: included before cpu.c, so that its AMX
 * build runs on any processor with AVX512-VNNI. Only what cpu.c uses, as Intel's manual (volume 2, TDPBSSD and its
 * neighbours) has it; what the instructions would refuse ends the process. */
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define __AMX_INT8__ 1
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_zero
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_loadd(tile, from, stride) emulated_loadd(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_stored(tile, to, stride)
#define _tile_dpbssd(sums, rows, columns) emulated_dpbssd(sums, rows, columns)
#define _tile_zero(tile) emulated_zero(tile)
/* The system lends the registers. */
#define syscall(number, code, feature) ((number) == SYS_arch_prctl && (code) == 0x1023 && (feature) == 18 ? 0 : -1)

static _Thread_local struct {
    uint8_t is_configured, rows[8];
    uint16_t row_bytes[8];
    uint8_t data[8][16][64];
} emulated;
/* So that a test knows that it tests something. */
__attribute__((visibility("default"))) long emulated_products;

static inline void emulated_loadconfig(const void *memory) {
    const uint8_t *bytes = memory;
    if (bytes[0] != 1) abort(); /* the palette */
    for (int i = 1; i < 16; i++)
        if (bytes[i]) abort();
    memset(&emulated, 0, sizeof emulated);
    emulated.is_configured = 1;
    for (int i = 0; i < 8; i++) {
        memcpy(&emulated.row_bytes[i], bytes + 16 + 2 * i, 2);
        emulated.rows[i] = bytes[48 + i];
        if (emulated.row_bytes[i] > 64 || emulated.rows[i] > 16) abort();
    }
    for (int i = 32; i < 64; i++)
        if ((i < 48 || i >= 56) && bytes[i]) abort();
}

static inline void emulated_release(void) { memset(&emulated, 0, sizeof emulated); }

static inline void emulated_loadd(int tile, const void *from, int64_t stride) {
    if (!emulated.is_configured) abort();
    memset(emulated.data[tile], 0, sizeof emulated.data[tile]);
    for (int i = 0; i < emulated.rows[tile]; i++)
        memcpy(emulated.data[tile][i], (const char *)from + i * stride, emulated.row_bytes[tile]);
}

static inline void emulated_stored(int tile, void *to, int64_t stride) {
    if (!emulated.is_configured) abort();
    for (int i = 0; i < emulated.rows[tile]; i++)
        memcpy((char *)to + i * stride, emulated.data[tile][i], emulated.row_bytes[tile]);
}

static inline void emulated_zero(int tile) {
    if (!emulated.is_configured) abort();
    memset(emulated.data[tile], 0, sizeof emulated.data[tile]);
}

/* sums[m][n] += sum over k of four products of signed bytes; 32 bits, which wrap around. */
static inline void emulated_dpbssd(int sums, int rows, int columns) {
    if (!emulated.is_configured || sums == rows || sums == columns || rows == columns) abort();
    if (emulated.rows[sums] != emulated.rows[rows] || emulated.row_bytes[sums] != emulated.row_bytes[columns] ||
        emulated.row_bytes[rows] / 4 != emulated.rows[columns])
        abort();
    for (int m = 0; m < emulated.rows[sums]; m++)
        for (int k = 0; k < emulated.row_bytes[rows] / 4; k++)
            for (int n = 0; n < emulated.row_bytes[columns] / 4; n++) {
                int32_t sum;
                memcpy(&sum, emulated.data[sums][m] + 4 * n, 4);
                for (int i = 0; i < 4; i++)
                    sum = (int32_t)((uint32_t)sum + (uint32_t)((int8_t)emulated.data[rows][m][4 * k + i] *
                                                               (int8_t)emulated.data[columns][k][4 * n + i]));
                memcpy(emulated.data[sums][m] + 4 * n, &sum, 4);
            }
    __atomic_fetch_add(&emulated_products, 1, __ATOMIC_RELAXED);
}
