/* Norms and gates over rows of float32. Small calls stay on the caller's thread: waking others costs more. */
#include "rows.h"
#include "kernels.h"
#include "threads.h"

#define VALUES_PER_TASK 16384

typedef struct {
    const float *x;
    float *residual;
    const float *weight;
    float *out;
    int num_rows, size, rows_per_task, is_gelu;
    float eps;
} rows_job;

static void split_rows(rows_job *job, fp_task task) {
    job->rows_per_task = VALUES_PER_TASK / job->size + 1;
    fp_parallel(task, job, (job->num_rows + job->rows_per_task - 1) / job->rows_per_task);
}

static int last_row(const rows_job *job, int index) {
    int end = (index + 1) * job->rows_per_task;
    return end < job->num_rows ? end : job->num_rows;
}

static void norm_some(void *context, int index) {
    const rows_job *job = context;
    size_t size = (size_t)job->size;
    for (int row = index * job->rows_per_task; row < last_row(job, index); row++) {
        const float *x = job->x + (size_t)row * size;
        if (job->residual != NULL) {
            float *residual = job->residual + (size_t)row * size;
            for (size_t at = 0; at < size; at++)
                residual[at] += x[at];
            x = residual;
        }
        rms_norm_row(x, job->weight, job->eps, job->size, job->out + (size_t)row * size);
    }
}

/* out = norm(x); with a residual: residual += x, out = norm(residual). out may be x. */
void fp_rms_norm(const float *x, float *residual, const float *weight, int num_rows, int size, float eps, float *out) {
    rows_job job = {.x = x, .residual = residual, .weight = weight, .out = out, .num_rows = num_rows, .size = size,
                    .eps = eps};
    split_rows(&job, norm_some);
}

static void norm_add_some(void *context, int index) {
    const rows_job *job = context;
    size_t size = (size_t)job->size;
    for (int row = index * job->rows_per_task; row < last_row(job, index); row++) {
        const float *x = job->x + (size_t)row * size;
        float *residual = job->residual + (size_t)row * size;
        float inverse = 1.0f / __builtin_sqrtf(mean_square(x, job->size) + job->eps);
        for (size_t at = 0; at < size; at++)
            residual[at] += x[at] * inverse * job->weight[at];
    }
}

/* residual += norm(x). */
void fp_norm_add(const float *x, float *residual, const float *weight, int num_rows, int size, float eps) {
    rows_job job = {.x = x, .residual = residual, .weight = weight, .num_rows = num_rows, .size = size, .eps = eps};
    split_rows(&job, norm_add_some);
}

static void gate_some(void *context, int index) {
    const rows_job *job = context;
    size_t size = (size_t)job->size;
    for (int row = index * job->rows_per_task; row < last_row(job, index); row++) {
        const float *gate = job->x + (size_t)row * 2 * size;
        gated_row(gate, gate + size, job->size, job->is_gelu, job->out + (size_t)row * size);
    }
}

/* out[M, F] = act(gate) * up for gate_up [M, 2 F]. */
void fp_gated_activation(const float *gate_up, int num_rows, int size, int is_gelu, float *out) {
    rows_job job = {.x = gate_up, .out = out, .num_rows = num_rows, .size = size, .is_gelu = is_gelu};
    split_rows(&job, gate_some);
}
