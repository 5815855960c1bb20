/* A thread that computes products, and attends to keys, which a card hands over. Part of cpu.c.
 *
 * What crosses at once are the parts of one call: a product, or those of several experts. Each part has a matrix and
 * rows of its own; all matrices have the same sizes, and the rows lie one below the other, inputs and results alike. Or
 * it is a step's queries, which attend to splits of keys (attended.h); "product" below stands for both.
 *
 * Card and thread see the same few numbers in pinned memory. Behind the copy of a product's inputs, the card's
 * stream writes the product's number to `asked`; the thread computes, and writes the number to `done`, for which
 * the stream waits before a kernel fetches the results. (A copy to the card would have to wait for the weights
 * that the card's copy engine is copying.) Between the two there is no function of the driver's, no event and no thread
 * that sleeps. */
#pragma once
#include <time.h>
#include <unistd.h>

/* crossing.py has the numbers of this file that it needs as well, and tests/engine/test_crossing.py compares them. */

/* Products that are handed over and not computed: more than are launched ahead of a card. */
enum { MAX_HANDED = 64 };
/* Where the inputs begin; `asked` and `done` have a cache line each. */
enum { CROSSING_HEAD = 128 };
/* Results begin behind the inputs, at a multiple of so many floats: a cache line. */
enum { ROUND_FLOATS = 16 };
/* The thread looks so many times whether there is something to do, some milliseconds, and rests then: a card that takes
 * longer waits for a link or for a disk. */
enum { LOOKS = 10 * SPINS, REST_NS = 50000 };
enum { GREATER_OR_EQUAL = 0 };
/* What penstock_crossing_begin() returns where too many products are under way. No error of CUDA is negative. */
enum { CROSSING_FULL = -1 };

/* As crossing.py writes it, in three numbers of eight bytes. */
typedef struct {
    const expert_matrix *matrix;
    const float *bias; /* [out_features], or NULL */
    int64_t num_rows;
} handed_part;

/* Whoever gives the parts keeps them, and what they point to, until they are computed. */
typedef struct {
    const handed_part *parts;
    int64_t num_parts, num_rows, activation_bits, scratch_bytes;
    const attended *attended; /* in place of parts; or NULL */
    int64_t num_inputs;       /* floats */
} handed;

/* The driver's functions, in the order in which Crossing (crossing.py) gives them. */
typedef struct {
    int (*set_context)(void *context);
    int (*copy_to_host)(void *target, uint64_t source, size_t num_bytes, void *stream);
    int (*write_value)(void *stream, uint64_t address, uint32_t value, unsigned flags);
    int (*wait_value)(void *stream, uint64_t address, uint32_t value, unsigned flags);
} crossing_driver;

typedef struct {
    crossing_driver driver;
    void *context;      /* the card's; a thread may have another one current */
    uint8_t *memory;    /* pinned */
    uint64_t on_card;   /* its address for the card */
    handed queue[MAX_HANDED];
    atomic_uint given, computed; /* numbers of products; they wrap */
    bool is_awaited; /* the stream waits for the product that was begun last; the launching thread's */
    bool wants_awake; /* counted in pool.num_awake; the computing thread's */
    long num_processors; /* asked for once: the system reads a file for it */
    atomic_bool is_closing;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t thread;
    void *scratch;
    int64_t scratch_bytes;
} crossing;

INLINE bool has_come(uint32_t number, uint32_t wanted) { return (int32_t)(number - wanted) >= 0; }

INLINE atomic_uint *crossing_asked(crossing *c) { return (atomic_uint *)c->memory; }
INLINE atomic_uint *crossing_done(crossing *c) { return (atomic_uint *)(c->memory + CROSSING_HEAD / 2); }

INLINE float *crossing_inputs(crossing *c) { return (float *)(c->memory + CROSSING_HEAD); }
INLINE float *crossing_results(crossing *c, const handed *h) {
    return crossing_inputs(c) + (h->num_inputs + ROUND_FLOATS - 1) / ROUND_FLOATS * ROUND_FLOATS;
}

/* All threads share the work of all parts, in one region that quantizes and one that multiplies: experts often have
 * one row each, and regions of their own would be too short for many threads. The bits are those of multiply(). */
static void multiply_parts(const handed *h, const float *x, float *y, void *scratch) {
    const int64_t in_features = h->parts->matrix->in_features, out_features = h->parts->matrix->out_features;
    products all = {.products = aligned_at(scratch)};
    void *to = all.products + h->num_parts;
    for (int64_t i = 0, row = 0; i < h->num_parts; row += h->parts[i].num_rows, i++) {
        const handed_part *part = h->parts + i;
        if (part->num_rows == 0) continue;
        product *p = all.products + all.num_products++;
        *p = (product){.a = {.x = x + row * in_features, .x_stride = in_features}};
        to = plan_product(p, part->matrix, part->bias, y + row * out_features, part->num_rows,
                          (int)h->activation_bits, to);
    }
    if (all.num_products == 0) return;
    const bool is_read_once = h->num_rows == all.num_products;
    compute_products(&all, h->num_rows, is_read_once && tuning.read_threads ? tuning.read_threads : INT_MAX);
}

/* The pool's threads stay awake between products: all of them together wake up in the time of a small product. Where no
 * processor is left for the threads that launch and copy, they sleep. */
static void keep_awake(crossing *c, bool wanted) {
    wanted = wanted && c->num_processors > atomic_load(&pool.num_wanted) + 1;
    if (wanted == c->wants_awake) return;
    c->wants_awake = wanted;
    if (wanted) atomic_fetch_add(&pool.num_awake, 1);
    else atomic_fetch_sub(&pool.num_awake, 1);
}

/* Waits until the product is given; false: the crossing closes. */
static bool await_given(crossing *c, uint32_t number) {
    for (int looks = 0; looks < LOOKS && !atomic_load(&c->is_closing); looks++) {
        if (has_come(atomic_load(&c->given), number)) return true;
        relax();
    }
    keep_awake(c, false);
    pthread_mutex_lock(&c->lock);
    while (!has_come(atomic_load(&c->given), number) && !atomic_load(&c->is_closing))
        pthread_cond_wait(&c->wake, &c->lock);
    pthread_mutex_unlock(&c->lock);
    return !atomic_load(&c->is_closing);
}

/* Waits until the card has brought the inputs; false: the crossing closes. */
static bool await_inputs(crossing *c, uint32_t number) {
    const struct timespec rest = {.tv_nsec = REST_NS};
    keep_awake(c, true);
    for (int looks = 0; !has_come(atomic_load(crossing_asked(c)), number); looks += looks < LOOKS) {
        if (atomic_load(&c->is_closing)) return false;
        if (looks < LOOKS) relax();
        else {
            keep_awake(c, false);
            nanosleep(&rest, NULL);
        }
    }
    return true;
}

static void *crossing_thread(void *argument) {
    crossing *c = argument;
    for (uint32_t number = 1; await_given(c, number) && await_inputs(c, number); number++) {
        const handed h = c->queue[number % MAX_HANDED];
        if (h.scratch_bytes > c->scratch_bytes) {
            free(c->scratch);
            c->scratch_bytes = (h.scratch_bytes + 4095) / 4096 * 4096;
            c->scratch = aligned_alloc(4096, c->scratch_bytes);
            if (c->scratch == NULL) abort();
        }
        float *x = crossing_inputs(c), *y = crossing_results(c, &h);
        if (h.attended) penstock_attend(h.attended, x, y);
        else multiply_parts(&h, x, y, c->scratch);
        atomic_store(&c->computed, number);
        atomic_store(crossing_done(c), number);
    }
    keep_awake(c, false);
    return NULL;
}

static int wait_for(crossing *c, uint32_t number, void *stream) {
    const int error = c->driver.set_context(c->context);
    return error ? error
                 : c->driver.wait_value(stream, c->on_card + CROSSING_HEAD / 2, number, GREATER_OR_EQUAL);
}

/* `memory` are pinned bytes, zeroed at their beginning, and `on_card` is their address for the card. NULL if the system
 * gives no thread, or if the card's stream can't write and wait for values. */
EXPORT crossing *penstock_crossing_open(const crossing_driver *driver, void *context, uint8_t *memory, uint64_t on_card,
                                        void *stream) {
    crossing *c = calloc(1, sizeof *c);
    if (c == NULL) return NULL;
    *c = (crossing){.driver = *driver, .context = context, .memory = memory, .on_card = on_card, .is_awaited = true,
                    .num_processors = sysconf(_SC_NPROCESSORS_ONLN)};
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->wake, NULL);
    if (wait_for(c, 0, stream) || driver->write_value(stream, on_card, 0, 0) ||
        pthread_create(&c->thread, NULL, crossing_thread, c)) {
        pthread_cond_destroy(&c->wake);
        pthread_mutex_destroy(&c->lock);
        free(c);
        return NULL;
    }
    return c;
}

/* What is queued next on the stream, which may be any, waits for the product that was begun last. Returns the driver's
 * error. */
EXPORT int penstock_crossing_wait(crossing *c, void *stream) {
    return wait_for(c, atomic_load(&c->given), stream);
}

/* The same of the stream that computes. */
EXPORT int penstock_crossing_end(crossing *c, void *stream) {
    const int error = penstock_crossing_wait(c, stream);
    c->is_awaited = !error;
    return error;
}

/* Queues the copy of the inputs x on the stream, and gives the product to the thread. Returns the driver's error, or
 * CROSSING_FULL. */
static int give(crossing *c, const handed *h, uint64_t x, void *stream) {
    const uint32_t number = atomic_load(&c->given) + 1;
    if (number - atomic_load(&c->computed) > MAX_HANDED - 1) return CROSSING_FULL;
    /* The results of a product that was given up may still be written where these inputs come to lie. */
    int error = c->is_awaited ? c->driver.set_context(c->context) : penstock_crossing_end(c, stream);
    if (error) return error;
    error = c->driver.copy_to_host(crossing_inputs(c), x, h->num_inputs * sizeof(float), stream);
    if (error) return error;
    c->queue[number % MAX_HANDED] = *h;
    error = c->driver.write_value(stream, c->on_card, number, 0);
    if (error) return error;
    pthread_mutex_lock(&c->lock);
    atomic_store(&c->given, number);
    pthread_cond_signal(&c->wake);
    pthread_mutex_unlock(&c->lock);
    c->is_awaited = false;
    return 0;
}

/* give() of products; x has the rows of all parts. */
EXPORT int penstock_crossing_begin(crossing *c, const handed_part *parts, int64_t num_parts, int64_t activation_bits,
                                   int64_t scratch_bytes, uint64_t x, void *stream) {
    int64_t num_rows = 0;
    for (int64_t i = 0; i < num_parts; i++) num_rows += parts[i].num_rows;
    const handed h = {parts, num_parts, num_rows, activation_bits, scratch_bytes, NULL,
                      num_rows * parts->matrix->in_features};
    return give(c, &h, x, stream);
}

/* give() of queries [num_floats]. Whoever gives `attended` keeps it until it is computed. */
EXPORT int penstock_crossing_attend(crossing *c, const attended *attended, int64_t num_floats, uint64_t x,
                                    void *stream) {
    const handed h = {.attended = attended, .num_inputs = num_floats};
    return give(c, &h, x, stream);
}

/* Ends the thread, behind the product that it computes. The card's stream has nothing to do any more. */
EXPORT void penstock_crossing_close(crossing *c) {
    pthread_mutex_lock(&c->lock);
    atomic_store(&c->is_closing, true);
    pthread_cond_signal(&c->wake);
    pthread_mutex_unlock(&c->lock);
    pthread_join(c->thread, NULL);
    pthread_cond_destroy(&c->wake);
    pthread_mutex_destroy(&c->lock);
    free(c->scratch);
    free(c);
}
