/* A pool of worker threads for short jobs. A job is a number of independent tasks; whoever is free takes the next.
 * A task's result must not depend on who runs it, so results never depend on the number of threads. */
#ifndef FOOTPLATE_THREADS_H
#define FOOTPLATE_THREADS_H

typedef void (*fp_task)(void *context, int index);

/* Threads that share each job, the caller included: 1 to 64. Takes effect at the next job. */
void fp_set_threads(int num_threads);
int fp_num_threads(void);

/* Runs task(context, 0 .. num_tasks - 1) and returns when all are done. When another job holds the pool, the
 * caller runs its tasks alone. */
void fp_parallel(fp_task task, void *context, int num_tasks);

#endif
