/* A reader that does nothing but read, for the measurement of the memory's rate. Part of cpu.c. */
#pragma once

typedef uint64_t lvec __attribute__((vector_size(4 * LANES)));
enum { LINE = 64, LINES_AT_ONCE = 4 };

typedef struct {
    const char *buffer;
    int64_t num_lines, num_tasks, lines_together, prefetch_bytes;
    atomic_ullong sum;
} reading;

INLINE lvec line_at(const char *from) {
    lvec sum, more;
    memcpy(&sum, from, sizeof sum);
    for (int i = sizeof sum; i < LINE; i += sizeof sum) {
        memcpy(&more, from + i, sizeof more);
        sum += more;
    }
    return sum;
}

/* The sum of four times `rounds` lines. A task reads one, two or four streams: in each round four lines, of which
 * `together` follow each other. */
INLINE lvec sum_of_lines(const char *from, int64_t rounds, int64_t together, int64_t prefetch_bytes,
                          const bool prefetches) {
    lvec a0 = {}, a1 = {}, a2 = {}, a3 = {};
#define STREAM(j) const int64_t o##j = (j / together * together * rounds + j % together) * LINE;
    STREAM(0) STREAM(1) STREAM(2) STREAM(3)
#undef STREAM
    for (int64_t i = 0; i < rounds; i++, from += together * LINE) {
#define READ(j)                                                                                    \
    a##j += line_at(from + o##j);                                                                  \
    if (prefetches) __builtin_prefetch(from + o##j + prefetch_bytes);
        READ(0) READ(1) READ(2) READ(3)
#undef READ
    }
    return (a0 + a1) + (a2 + a3);
}

static void read_task(void *context, int64_t task) {
    reading *r = context;
    const int64_t line = r->num_lines * task / r->num_tasks, end = r->num_lines * (task + 1) / r->num_tasks;
    const int64_t rounds = (end - line) / LINES_AT_ONCE, ahead = r->prefetch_bytes;
    const char *from = r->buffer + line * LINE;
    lvec sum = ahead ? sum_of_lines(from, rounds, r->lines_together, ahead, true)
                      : sum_of_lines(from, rounds, r->lines_together, 0, false);
    for (int64_t i = line + rounds * LINES_AT_ONCE; i < end; i++) sum += line_at(r->buffer + i * LINE);
    uint64_t parts[sizeof sum / 8], total = 0;
    memcpy(parts, &sum, sizeof sum);
    for (size_t i = 0; i < sizeof sum / 8; i++) total += parts[i];
    atomic_fetch_add(&r->sum, total);
}

/* The sum modulo 2^64 of the words of 64 bits in a buffer, read by all threads, each in 1, 2 or 4 streams. A number of
 * bytes above 0 is how far ahead the lines are prefetched. */
EXPORT uint64_t penstock_read(const void *buffer, int64_t num_bytes, int streams, int64_t prefetch_bytes) {
    reading r = {buffer, num_bytes / LINE, 8 * (atomic_load(&pool.num_wanted) + 1), LINES_AT_ONCE / streams,
                 prefetch_bytes, 0};
    parallel(r.num_tasks, read_task, &r);
    uint64_t sum = atomic_load(&r.sum), word;
    for (int64_t at = r.num_lines * LINE; at + 8 <= num_bytes; at += 8, sum += word)
        memcpy(&word, r.buffer + at, 8);
    return sum;
}
