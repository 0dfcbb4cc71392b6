#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#else
#define PAUSE() __asm__ __volatile__("" ::: "memory")
#endif

#define MAX_THREADS 64
#define MAX_TASKS 0xffff
/* About 20 µs: longer than the gap between two ops of a step, shorter than what would disturb other threads. */
#define SPINS 1500

/* One word says which job is on (high half), how many tasks it has and which is next, so that a worker that wakes
 * late can never take a task of a job it has not seen. */
static _Atomic uint64_t claim;
static _Atomic int num_done;
static _Atomic int num_sleeping;
static fp_task job_task;
static void *job_context;

static pthread_mutex_t owner = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static _Atomic int wanted_threads = 1;
static int started_workers;

static void run_tasks(uint32_t job) {
    uint64_t word = atomic_load_explicit(&claim, memory_order_acquire);
    for (;;) {
        uint32_t index = word & 0xffff, total = (word >> 16) & 0xffff;
        if ((uint32_t)(word >> 32) != job || index >= total)
            return;
        if (!atomic_compare_exchange_weak_explicit(&claim, &word, word + 1, memory_order_acq_rel,
                                                   memory_order_acquire))
            continue;
        /* The job can't end before this task is counted, so its fields are stable here. */
        job_task(job_context, (int)index);
        atomic_fetch_add_explicit(&num_done, 1, memory_order_release);
        word = atomic_load_explicit(&claim, memory_order_acquire);
    }
}

static int is_open(uint64_t word, uint32_t seen) { return (uint32_t)(word >> 32) != seen; }

static uint32_t wait_for_job(uint32_t seen) {
    for (int spin = 0; spin < SPINS; spin++) {
        uint64_t word = atomic_load_explicit(&claim, memory_order_acquire);
        if (is_open(word, seen))
            return (uint32_t)(word >> 32);
        PAUSE();
    }
    pthread_mutex_lock(&sleep_lock);
    atomic_fetch_add(&num_sleeping, 1);
    uint64_t word = atomic_load(&claim);
    while (!is_open(word, seen)) {
        pthread_cond_wait(&wake, &sleep_lock);
        word = atomic_load(&claim);
    }
    atomic_fetch_sub(&num_sleeping, 1);
    pthread_mutex_unlock(&sleep_lock);
    return (uint32_t)(word >> 32);
}

static void *worker(void *argument) {
    int index = (int)(intptr_t)argument;
    uint32_t seen = 0;
    for (;;) {
        seen = wait_for_job(seen);
        if (index < atomic_load_explicit(&wanted_threads, memory_order_relaxed))
            run_tasks(seen);
    }
    return NULL;
}

/* A forked child has no workers, and locks may be held by threads that are gone. */
static void reset_in_child(void) {
    started_workers = 0;
    atomic_store(&num_sleeping, 0);
    pthread_mutex_init(&owner, NULL);
    pthread_mutex_init(&sleep_lock, NULL);
    pthread_cond_init(&wake, NULL);
}

static void start_workers(int count) {
    static int has_fork_handler;
    if (!has_fork_handler) {
        pthread_atfork(NULL, NULL, reset_in_child);
        has_fork_handler = 1;
    }
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    while (started_workers < count) {
        pthread_t thread;
        if (pthread_create(&thread, &detached, worker, (void *)(intptr_t)(started_workers + 1)) != 0)
            break; /* fewer threads: slower, never wrong */
        started_workers++;
    }
    pthread_attr_destroy(&detached);
}

void fp_set_threads(int num_threads) {
    atomic_store(&wanted_threads, num_threads < 1 ? 1 : num_threads > MAX_THREADS ? MAX_THREADS : num_threads);
}

int fp_num_threads(void) { return atomic_load_explicit(&wanted_threads, memory_order_relaxed); }

static void run_alone(fp_task task, void *context, int num_tasks) {
    for (int index = 0; index < num_tasks; index++)
        task(context, index);
}

static void run_together(fp_task task, void *context, int num_tasks) {
    job_task = task;
    job_context = context;
    atomic_store_explicit(&num_done, 0, memory_order_relaxed);
    uint32_t job = (uint32_t)(atomic_load_explicit(&claim, memory_order_relaxed) >> 32) + 1;
    atomic_store(&claim, (uint64_t)job << 32 | (uint64_t)num_tasks << 16);
    if (atomic_load(&num_sleeping) > 0) {
        pthread_mutex_lock(&sleep_lock);
        pthread_cond_broadcast(&wake);
        pthread_mutex_unlock(&sleep_lock);
    }
    run_tasks(job);
    for (int spin = 0; atomic_load_explicit(&num_done, memory_order_acquire) < num_tasks; spin++) {
        PAUSE();
        if (spin > SPINS)
            sched_yield();
    }
}

void fp_parallel(fp_task task, void *context, int num_tasks) {
    int workers = fp_num_threads() - 1;
    if (workers == 0 || num_tasks <= 1 || num_tasks > MAX_TASKS || pthread_mutex_trylock(&owner) != 0) {
        run_alone(task, context, num_tasks);
        return;
    }
    if (started_workers < workers)
        start_workers(workers);
    run_together(task, context, num_tasks);
    pthread_mutex_unlock(&owner);
}
