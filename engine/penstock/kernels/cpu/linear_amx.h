/* Sixteen rows by a packed panel with AMX. Part of linear_vnni.h.
 *
 * A tile register holds 16 rows of 64 bytes. tdpbsud, for signed rows and unsigned weights, multiplies 16 rows of
 * activations by 16 channels of a panel, 64 inputs at once, and gives the same sums as vpdpbusd. */
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

enum { TILE = 16, TILE_INPUTS = 64 };

/* GCC's intrinsics for loading don't say that they read memory. Without this asm, GCC could move an earlier write
 * behind the load. */
#define READS_MEMORY(at) __asm__ volatile("" : : "r"(at) : "memory")

/* Gives this thread all eight tile registers, in the one shape that this file uses, until stop_tiles(). */
static void start_tiles(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.row_bytes[i] = TILE_INPUTS, shape.rows[i] = TILE;
    READS_MEMORY(&shape);
    _tile_loadconfig(&shape);
}
static void stop_tiles(void) { _tile_release(); }

/* The same as tile_6 and the other tiles, but with whole multiples of TILE_INPUTS inputs: inputs that a panel and its
 * rows don't have count as zero. */
static void tile_16(const int8_t *x, int64_t stride, const int8_t *w, int64_t inputs, const int32_t *corrections,
                    int64_t num_groups, const ahead *next, int32_t (*sums)[PANEL]) {
    enum { ROW = PANEL * 4 }; /* bytes of a row of sums, and of four inputs of a panel */
    if (corrections)
        for (int i = 0; i < TILE; i++)
            for (int c = 0; c < PANEL; c += 16)
                _mm512_storeu_si512(sums[i] + c, _mm512_set1_epi32(corrections[i * num_groups]));
    READS_MEMORY(sums);
    _tile_loadd(0, sums[0], ROW);
    _tile_loadd(1, sums[0] + 16, ROW);
    _tile_loadd(2, sums[0] + 32, ROW);
    _tile_loadd(3, sums[0] + 48, ROW);
    for (int64_t k = 0; k < inputs; k += TILE_INPUTS, w += PANEL * TILE_INPUTS) {
        fetch(next, k);
        _tile_loadd(4, x + k, stride);
        _tile_loadd(5, w, ROW);
        _tile_loadd(6, w + 64, ROW);
        _tile_dpbsud(0, 4, 5);
        _tile_loadd(7, w + 128, ROW);
        _tile_dpbsud(1, 4, 6);
        _tile_loadd(5, w + 192, ROW);
        _tile_dpbsud(2, 4, 7);
        _tile_dpbsud(3, 4, 5);
    }
    _tile_stored(0, sums[0], ROW);
    _tile_stored(1, sums[0] + 16, ROW);
    _tile_stored(2, sums[0] + 32, ROW);
    _tile_stored(3, sums[0] + 48, ROW);
}

/* Linux lends tile registers to a process that asks with arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). Where
 * Linux refuses, or a trial product is wrong (no real processor with AMX has run this yet), VNNI serves. */
static bool has_tiles;
static bool multiply_right(void) {
    enum { INPUTS = 2 * TILE_INPUTS };
    static int8_t x[TILE * INPUTS];
    const int32_t corrections[TILE] = {1, -2, 3};
    const ahead nothing = {0};
    for (int i = 0; i < PANEL * INPUTS; i++) panel.weights[i] = (int8_t)(i * 37 + i / 256);
    for (int i = 0; i < TILE * INPUTS; i++) x[i] = (int8_t)(i * 91 + i / 64);
    start_tiles();
    tile_16(x, INPUTS, panel.weights, INPUTS, corrections, 1, &nothing, panel.sums);
    stop_tiles();
    for (int i = 0; i < TILE; i++)
        for (int c = 0; c < PANEL; c++) {
            int32_t sum = corrections[i];
            for (int k = 0; k < INPUTS; k++)
                sum += x[i * INPUTS + k] * (uint8_t)panel.weights[(k / 4 * PANEL + c) * 4 + k % 4];
            if (sum != panel.sums[i][c]) return false;
        }
    return true;
}

__attribute__((constructor)) static void ask_for_tiles(void) {
    has_tiles = syscall(SYS_arch_prctl, 0x1023, 18) == 0 && multiply_right();
}
