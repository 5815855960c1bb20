/* A pool of plain threads, and loops over rows that use the pool where this pays. Part of cpu.c. */
#pragma once

typedef void (*task_fn)(void *context, int64_t task);

static struct {
    pthread_mutex_t caller; /* one parallel region at a time, even if several threads call */
    pthread_mutex_t lock;
    pthread_cond_t wake, resized;
    int num_workers;       /* threads that exist */
    atomic_int num_wanted; /* threads that take part; the others sleep */
    atomic_int num_helpers; /* those of them that take tasks of this region */
    atomic_uint generation;
    atomic_long next, num_tasks;
    atomic_bool is_open; /* fn, context and num_tasks belong to a region with tasks left */
    atomic_int num_inside;
    atomic_int num_awake; /* those who want workers to spin on between regions */
    task_fn fn;
    void *context;
} pool = {.caller = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER,
          .resized = PTHREAD_COND_INITIALIZER};

INLINE void relax(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* A region inside a task is computed by the task's thread alone. */
static _Thread_local bool is_in_task;

static void run_tasks(void) {
    int64_t num_tasks = atomic_load(&pool.num_tasks), task;
    is_in_task = true;
    while ((task = atomic_fetch_add(&pool.next, 1)) < num_tasks) pool.fn(pool.context, task);
    is_in_task = false;
}

/* After a region a worker spins for about 0.1 ms, then sleeps. The next region usually begins within this time, since
 * a step is a chain of short regions; and waking up takes as long. */
enum { SPINS = 10000 };

static void *worker(void *argument) {
    const int index = (int)(uintptr_t)argument;
    unsigned seen = atomic_load(&pool.generation);
    for (;;) {
        if (index >= atomic_load(&pool.num_wanted)) {
            pthread_mutex_lock(&pool.lock);
            while (index >= atomic_load(&pool.num_wanted)) pthread_cond_wait(&pool.resized, &pool.lock);
            pthread_mutex_unlock(&pool.lock);
        }
        for (int i = 0; i < SPINS && atomic_load(&pool.generation) == seen; i += !atomic_load(&pool.num_awake)) relax();
        if (atomic_load(&pool.generation) == seen) {
            pthread_mutex_lock(&pool.lock);
            while (atomic_load(&pool.generation) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
            pthread_mutex_unlock(&pool.lock);
        }
        seen = atomic_load(&pool.generation);
        /* A worker that comes late finds the region closed, or the next region open. Both are fine. */
        atomic_fetch_add(&pool.num_inside, 1);
        if (atomic_load(&pool.is_open) && index < atomic_load(&pool.num_helpers)) run_tasks();
        atomic_fetch_sub(&pool.num_inside, 1);
    }
    return NULL;
}

/* Sets the threads for arithmetic, the calling thread included. Returns how many there are: fewer only if the
 * system gives no more. */
EXPORT int penstock_set_num_threads(int num_threads) {
    pthread_mutex_lock(&pool.caller);
    while (pool.num_workers < num_threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, (void *)(uintptr_t)pool.num_workers)) break;
        pthread_detach(thread);
        pool.num_workers++;
    }
    pthread_mutex_lock(&pool.lock);
    atomic_store(&pool.num_wanted, MAX(0, MIN(num_threads - 1, pool.num_workers)));
    pthread_cond_broadcast(&pool.resized);
    pthread_mutex_unlock(&pool.lock);
    int have = atomic_load(&pool.num_wanted) + 1;
    pthread_mutex_unlock(&pool.caller);
    return have;
}

/* A forked child has the parent's counters, but none of the parent's threads. */
static void forget_workers(void) {
    pthread_mutex_init(&pool.caller, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.resized, NULL);
    pool.num_workers = 0;
    atomic_store(&pool.num_wanted, 0);
    atomic_store(&pool.is_open, false);
    atomic_store(&pool.num_inside, 0);
    atomic_store(&pool.num_awake, 0);
}

__attribute__((constructor)) static void at_load(void) { pthread_atfork(NULL, NULL, forget_workers); }

/* On at most `num_threads` threads. */
static void parallel_on(int64_t num_threads, int64_t num_tasks, task_fn fn, void *context) {
    if (num_tasks <= 1 || num_threads <= 1 || is_in_task || atomic_load(&pool.num_wanted) == 0) {
        for (int64_t task = 0; task < num_tasks; task++) fn(context, task);
        return;
    }
    pthread_mutex_lock(&pool.caller);
    pool.fn = fn;
    pool.context = context;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.num_tasks, num_tasks);
    atomic_store(&pool.num_helpers, (int)num_threads - 1);
    atomic_store(&pool.is_open, true);
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.generation, 1);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    run_tasks();
    /* Wait for the workers that are inside. A worker that has not woken up yet has missed nothing. */
    atomic_store(&pool.is_open, false);
    for (int spins = 0; atomic_load(&pool.num_inside) > 0; spins++)
        if (spins < 10 * SPINS) relax();
        else sched_yield();
    pthread_mutex_unlock(&pool.caller);
}

static void parallel(int64_t num_tasks, task_fn fn, void *context) { parallel_on(INT_MAX, num_tasks, fn, context); }

/* With fewer elements than this, at some operations each, a second thread costs more time than it saves. */
enum { SMALL = 1 << 16 };

static void for_rows(int64_t num_rows, int64_t width, task_fn fn, void *context) {
    if (num_rows * width > SMALL) parallel(num_rows, fn, context);
    else
        for (int64_t row = 0; row < num_rows; row++) fn(context, row);
}
