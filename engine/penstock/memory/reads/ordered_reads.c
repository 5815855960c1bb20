/* Reads past the page cache that Linux queues (man 2 io_submit), begun in order by a thread of C.
 *
 * The thread sleeps until a read was given or has ended, and begins the next one at once: it needs no interpreter's lock,
 * and a disk that carries one read at its full rate then brings one range after the other, where all at once would arrive
 * together at the end. ordered_reads.py has the words. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
enum { NUM_TICKETS = 64, MOST_PARTS = 16, PAGE = 4096 };
/* What `states` says of a ticket. FAILED: the range has to be read in another way, which also finds the reason. */
enum { FREE, WAITING, BEGUN, DONE, FAILED };

/* Seconds for which a thread that waits for a range spins. */
static const double SPIN_S = 200e-6;

/* A range of a file, which is read in parts. */
typedef struct {
    int descriptor;
    int64_t size, modified_ns; /* of the file, as it was opened */
    int64_t offset, address, num_bytes;
    int64_t num_begun_bytes; /* bytes of the parts that have begun */
    int num_under_way;       /* parts */
    bool has_failed;
} range;

typedef struct {
    struct iocb order;
    int ticket; /* -1: the part is free */
    int64_t num_bytes;
} part;

typedef struct {
    int32_t states[NUM_TICKETS]; /* Python reads these three without the lock */
    double ended_s[NUM_TICKETS];
    double waited_s; /* of all calls of penstock_wait_for_read() */
    range ranges[NUM_TICKETS];
    int waiting[NUM_TICKETS], num_waiting; /* tickets with parts that have not begun; the first one is next */
    part parts[MOST_PARTS];
    int depth, num_under_way, num_waiting_threads;
    int64_t part_bytes, num_ended;
    aio_context_t context;
    int wake;
    bool is_woken, is_closing, is_closed;
    bool is_broken; /* nothing is read any more */
    pthread_mutex_t lock;
    pthread_cond_t ended;
} ordered_reads;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void wake_thread(ordered_reads *q) {
    const uint64_t one = 1;
    while (write(q->wake, &one, sizeof one) < 0 && errno == EINTR) {}
}

/* ---- with the lock held */

static void set_state(ordered_reads *q, int ticket, int32_t state) {
    __atomic_store_n(q->states + ticket, state, __ATOMIC_RELEASE);
}

static void end_if_done(ordered_reads *q, int ticket) {
    const range *r = q->ranges + ticket;
    if (r->num_under_way || (r->num_begun_bytes < r->num_bytes && !r->has_failed)) return;
    q->ended_s[ticket] = now_s();
    set_state(q, ticket, r->has_failed ? FAILED : DONE);
    q->num_ended++;
    pthread_cond_broadcast(&q->ended);
}

/* Nothing more of a range is begun. Returns whether something was still to begin. */
static bool forget_waiting(ordered_reads *q, int ticket) {
    int kept = 0;
    for (int i = 0; i < q->num_waiting; i++)
        if (q->waiting[i] != ticket) q->waiting[kept++] = q->waiting[i];
    const bool was_waiting = kept < q->num_waiting;
    q->num_waiting = kept;
    return was_waiting;
}

static void fail(ordered_reads *q, int ticket) {
    q->ranges[ticket].has_failed = true;
    forget_waiting(q, ticket);
    end_if_done(q, ticket);
}

static bool is_unchanged(const range *r) {
    struct stat s;
    return !fstat(r->descriptor, &s) && s.st_size == r->size &&
           (int64_t)s.st_mtim.tv_sec * 1000000000 + s.st_mtim.tv_nsec == r->modified_ns;
}

/* Begins the next part of a range. Returns whether the system took it. */
static bool begin_part(ordered_reads *q, int ticket) {
    range *r = q->ranges + ticket;
    part *p = q->parts;
    while (p->ticket >= 0) p++;
    const int64_t rest = r->num_bytes - r->num_begun_bytes, at = r->num_begun_bytes;
    p->num_bytes = rest < q->part_bytes ? rest : q->part_bytes;
    p->order = (struct iocb){.aio_data = (uint64_t)(p - q->parts), .aio_lio_opcode = IOCB_CMD_PREAD,
                             .aio_fildes = (uint32_t)r->descriptor, .aio_buf = (uint64_t)(r->address + at),
                             .aio_nbytes = (uint64_t)((p->num_bytes + PAGE - 1) / PAGE * PAGE), .aio_offset = r->offset + at,
                             .aio_flags = IOCB_FLAG_RESFD, .aio_resfd = (uint32_t)q->wake};
    struct iocb *orders[] = {&p->order};
    if (syscall(SYS_io_submit, q->context, 1L, orders) != 1) return false;
    p->ticket = ticket, r->num_begun_bytes += p->num_bytes;
    r->num_under_way++, q->num_under_way++;
    return true;
}

static void begin(ordered_reads *q) {
    while (q->num_waiting && q->num_under_way < q->depth) {
        const int ticket = q->waiting[0];
        const range *r = q->ranges + ticket;
        set_state(q, ticket, BEGUN);
        if ((!r->num_begun_bytes && !is_unchanged(r)) || !begin_part(q, ticket)) fail(q, ticket);
        else if (r->num_begun_bytes >= r->num_bytes) forget_waiting(q, ticket);
    }
}

static void take_ends(ordered_reads *q) {
    struct io_event events[MOST_PARTS];
    struct timespec at_once = {0, 0};
    long number;
    do number = syscall(SYS_io_getevents, q->context, 0L, (long)MOST_PARTS, events, &at_once);
    while (number < 0 && errno == EINTR);
    for (long i = 0; i < number; i++) {
        part *p = q->parts + events[i].data;
        const int ticket = p->ticket;
        p->ticket = -1;
        q->ranges[ticket].num_under_way--, q->num_under_way--;
        if ((int64_t)events[i].res < p->num_bytes) fail(q, ticket);
        else end_if_done(q, ticket);
    }
}

/* ---- the thread */

/* Linux lets a thread that wakes up run before threads that compute if its slices are shorter (6.12 and later); otherwise
 * it may wait for the end of a slice, some milliseconds, in which the disk is idle. Other systems refuse, which does no harm. */
static void ask_for_short_slices(void) {
    if (sched_getscheduler(0) != SCHED_OTHER) return;
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } attributes = {.size = sizeof attributes, .nice = getpriority(PRIO_PROCESS, 0), .runtime = 100000};
    syscall(SYS_sched_setattr, 0, &attributes, 0);
}

/* The thread can't be woken any more, since somebody closed its descriptor. All ranges fail, and so do those that come later:
 * whoever gave them reads them in another way, and still has the reads to close. */
static void fail_all(ordered_reads *q) {
    syscall(SYS_io_destroy, q->context); /* waits for what is under way */
    pthread_mutex_lock(&q->lock);
    q->is_broken = true, q->num_under_way = 0;
    for (int ticket = 0; ticket < NUM_TICKETS; ticket++)
        if (q->states[ticket] == WAITING || q->states[ticket] == BEGUN) q->ranges[ticket].num_under_way = 0, fail(q, ticket);
    pthread_cond_broadcast(&q->ended);
    while (!q->is_closed) pthread_cond_wait(&q->ended, &q->lock);
    pthread_mutex_unlock(&q->lock);
}

/* Serves until the reads are closed. Returns whether the thread could be woken until then. */
static bool serve_until_closed(ordered_reads *q) {
    bool is_closed = false;
    while (!is_closed) {
        uint64_t number;
        if (read(q->wake, &number, sizeof number) < 0 && errno != EINTR) return false;
        pthread_mutex_lock(&q->lock);
        q->is_woken = false;
        take_ends(q);
        if (!q->is_closing) begin(q);
        else if (!q->num_under_way) pthread_cond_broadcast(&q->ended);
        is_closed = q->is_closed;
        pthread_mutex_unlock(&q->lock);
    }
    return true;
}

static void *serve(void *argument) {
    ordered_reads *q = argument;
    pthread_setname_np(pthread_self(), "penstock-reads");
    ask_for_short_slices();
    if (serve_until_closed(q)) {
        syscall(SYS_io_destroy, q->context); /* takes Linux some 35 ms, for which nobody waits */
        close(q->wake);
    } else {
        fail_all(q); /* the descriptor may be somebody else's by now */
    }
    pthread_mutex_destroy(&q->lock), pthread_cond_destroy(&q->ended);
    free(q);
    return NULL;
}

/* At most `depth` parts of `part_bytes` (whole pages) are under way. NULL where the system has no such reads. */
EXPORT ordered_reads *penstock_open_reads(int depth, int64_t part_bytes) {
    ordered_reads *q = calloc(1, sizeof *q);
    if (!q) return NULL;
    q->depth = depth < MOST_PARTS ? depth : MOST_PARTS, q->part_bytes = part_bytes;
    for (int i = 0; i < MOST_PARTS; i++) q->parts[i].ticket = -1;
    pthread_mutex_init(&q->lock, NULL), pthread_cond_init(&q->ended, NULL);
    q->wake = eventfd(0, EFD_CLOEXEC);
    if (q->wake >= 0 && !syscall(SYS_io_setup, MOST_PARTS, &q->context)) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the interpreter's threads */
        pthread_t thread;
        const int failed = pthread_create(&thread, NULL, serve, q);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        if (!failed) return pthread_detach(thread), q;
        syscall(SYS_io_destroy, q->context);
    }
    if (q->wake >= 0) close(q->wake);
    free(q);
    return NULL;
}

/* Reads a range behind those that were given before, unless the file was changed. The ticket was free, and belongs to the
 * range until the caller sets its state to FREE. */
EXPORT void penstock_give_read(ordered_reads *q, int ticket, int descriptor, int64_t size, int64_t modified_ns, int64_t offset,
                               int64_t address, int64_t num_bytes) {
    pthread_mutex_lock(&q->lock);
    q->ranges[ticket] = (range){.descriptor = descriptor, .size = size, .modified_ns = modified_ns, .offset = offset,
                                .address = address, .num_bytes = num_bytes};
    set_state(q, ticket, WAITING);
    bool wakes = false;
    if (q->is_broken) {
        fail(q, ticket);
    } else {
        q->waiting[q->num_waiting++] = ticket;
        wakes = q->num_under_way < q->depth && !q->is_woken;
        q->is_woken |= wakes;
    }
    pthread_mutex_unlock(&q->lock);
    if (wakes) wake_thread(q);
}

/* Takes back what has not begun of a range. 0: all parts have begun, and the range goes on. 1: no part has begun, and the ticket
 * is free. 2: the range fails when the parts that are under way have ended. */
EXPORT int penstock_take_read_back(ordered_reads *q, int ticket) {
    int what = 0;
    pthread_mutex_lock(&q->lock);
    if (forget_waiting(q, ticket)) what = q->states[ticket] == WAITING ? 1 : 2;
    if (what == 1) set_state(q, ticket, FREE);
    if (what == 2) fail(q, ticket);
    pthread_mutex_unlock(&q->lock);
    return what;
}

EXPORT int64_t penstock_num_ended_reads(ordered_reads *q) {
    pthread_mutex_lock(&q->lock);
    const int64_t number = q->num_ended;
    pthread_mutex_unlock(&q->lock);
    return number;
}

/* Waits until more than `seen` reads have ended. */
EXPORT void penstock_wait_for_reads(ordered_reads *q, int64_t seen) {
    pthread_mutex_lock(&q->lock);
    q->num_waiting_threads++;
    while (q->num_ended <= seen && !q->is_closing) pthread_cond_wait(&q->ended, &q->lock);
    q->num_waiting_threads--;
    if (q->is_closing) pthread_cond_broadcast(&q->ended);
    pthread_mutex_unlock(&q->lock);
}

static bool is_under_way(ordered_reads *q, int ticket) {
    const int32_t state = __atomic_load_n(q->states + ticket, __ATOMIC_ACQUIRE);
    return state == WAITING || state == BEGUN;
}

static bool has_come(ordered_reads *q, int ticket) { return __atomic_load_n(q->states + ticket, __ATOMIC_ACQUIRE) == DONE; }

/* 1: a range is there. -1: it has to be read in another way. 0: it is still on its way, and the caller does not wait. A short
 * wait spins, since a thread that sleeps comes back late. */
EXPORT int penstock_wait_for_read(ordered_reads *q, int ticket, int is_patient) {
    const bool is_waiting = is_patient && is_under_way(q, ticket);
    if (is_waiting) {
        const double began_s = now_s();
        pthread_mutex_lock(&q->lock);
        q->num_waiting_threads++; /* who closes the reads waits for this thread */
        pthread_mutex_unlock(&q->lock);
        while (is_under_way(q, ticket) && now_s() < began_s + SPIN_S) {}
        pthread_mutex_lock(&q->lock);
        while (is_under_way(q, ticket) && !q->is_closing) pthread_cond_wait(&q->ended, &q->lock);
        q->waited_s += now_s() - began_s;
    }
    const int result = is_patient || !is_under_way(q, ticket) ? has_come(q, ticket) ? 1 : -1 : 0;
    if (is_waiting) { /* the reads may be gone when the lock is free */
        q->num_waiting_threads--;
        if (q->is_closing) pthread_cond_broadcast(&q->ended);
        pthread_mutex_unlock(&q->lock);
    }
    return result;
}

/* Begins nothing more, and waits for what is under way. The reads are gone then. */
EXPORT void penstock_close_reads(ordered_reads *q) {
    pthread_mutex_lock(&q->lock);
    q->is_closing = true;
    pthread_cond_broadcast(&q->ended);
    while (q->num_under_way || q->num_waiting_threads) pthread_cond_wait(&q->ended, &q->lock);
    q->is_closed = true;
    if (q->is_broken) pthread_cond_broadcast(&q->ended);
    else wake_thread(q);
    pthread_mutex_unlock(&q->lock);
}
