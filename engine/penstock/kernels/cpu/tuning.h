/* Parameters of products that are chosen on the machine. They decide how fast a product is; no bit of a result depends
 * on them. A build that has no such choice ignores the parameter. Part of cpu.c. */
#pragma once

enum { MOST_FEW_ROWS = 64, MOST_PANEL_INPUTS = 2048, MOST_LANE_ROWS = 1024 };

static struct {
    /* How far ahead weights of one token are prefetched, in each stream; half as far for most 4-bit codes. Every
     * build. */
    int64_t prefetch_bytes;
    /* The same of 4-bit codes that vnni_factors.h multiplies: to the L2 cache. AVX512-VNNI. In codes_bytes.h, 0 means
     * that nothing is prefetched; else what is read next. */
    int64_t prefetch_bytes_int4;
    /* Rows of integers up to which weights are always multiplied row by row, AVX512-VNNI; more of them, up to
     * MOST_FEW_ROWS, still are where they don't fill tiles. */
    int64_t few_rows;
    /* Inputs of a panel, AVX512-VNNI. */
    int64_t panel_inputs;
    /* The most rows of integers that lie in lanes, AVX512-VNNI; with more than that and than MOST_FEW_ROWS, weights are
     * packed into panels. */
    int64_t lane_rows;
    /* Threads of a product with one token, which waits for memory; 0: all threads. Every build. */
    int64_t read_threads;
} tuning = {2048, 12288, 32, MOST_PANEL_INPUTS, 128, 0};

static bool is_step(int64_t value, int64_t least, int64_t most, int64_t step) {
    return least <= value && value <= most && value % step == 0;
}

/* Sets all parameters. Returns 0, or the place (from 1 on) of a parameter that is out of range: then none is set. */
EXPORT int penstock_tune(int64_t prefetch_bytes, int64_t prefetch_bytes_int4, int64_t few_rows, int64_t panel_inputs,
                         int64_t lane_rows, int64_t read_threads) {
    if (!is_step(prefetch_bytes, 0, 1 << 16, 64)) return 1;
    if (!is_step(prefetch_bytes_int4, 0, 1 << 16, 64)) return 2;
    if (!is_step(few_rows, 2, MOST_FEW_ROWS, 1)) return 3;
    if (!is_step(panel_inputs, 256, MOST_PANEL_INPUTS, 256)) return 4;
    if (!is_step(lane_rows, 16, MOST_LANE_ROWS, 16)) return 5;
    if (!is_step(read_threads, 0, 1 << 16, 1)) return 6;
    pthread_mutex_lock(&pool.caller); /* no product is under way on several threads */
    tuning.prefetch_bytes = prefetch_bytes, tuning.prefetch_bytes_int4 = prefetch_bytes_int4;
    tuning.few_rows = few_rows, tuning.panel_inputs = panel_inputs;
    tuning.lane_rows = lane_rows, tuning.read_threads = read_threads;
    pthread_mutex_unlock(&pool.caller);
    return 0;
}
