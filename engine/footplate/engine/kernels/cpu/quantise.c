#include "matrix.h"
#include "rows.h"
#include "threads.h"

#include <stdlib.h>

#define ROWS_PER_TASK 8

typedef struct {
    const float *x;
    const float *norm_weight;
    float *staging; /* [M, K]: rows after the prologue */
    fp_rows rows;
    int num_rows, in_features, prologue;
    float eps;
} quantise_job;

static void quantise_group(const float *x, int8_t *codes, float *scale, float *sum, int32_t *sum32, int32_t *sum16) {
    f32x8 parts[4], largest = splat8(0), poison = splat8(0);
    for (int part = 0; part < 4; part++) {
        parts[part] = load8(x + 8 * part);
        largest = max8(__builtin_elementwise_abs(parts[part]), largest);
        poison += parts[part] * splat8(0); /* 0, or NaN for a value that int8 can't show */
    }
    float peak = largest8(largest);
    float inverse = peak > 0 ? 127.0f / peak : 0.0f;
    int32_t halves[2] = {0, 0};
    for (int part = 0; part < 4; part++) {
        f32x8 scaled = __builtin_elementwise_roundeven(parts[part] * splat8(inverse));
        i32x8 wide = __builtin_convertvector(min8(max8(scaled, splat8(-127.0f)), splat8(127.0f)), i32x8);
        i8x8 narrow = __builtin_convertvector(wide, i8x8);
        memcpy(codes + 8 * part, &narrow, sizeof narrow);
        halves[part / 2] += __builtin_reduce_add(wide);
    }
    *scale = peak / 127.0f + sum8(poison);
    sum16[0] = halves[0];
    sum16[1] = halves[1];
    *sum32 = halves[0] + halves[1];
    *sum = *scale * (float)*sum32;
}

static void quantise_row(const quantise_job *job, int row) {
    size_t size = (size_t)job->in_features, groups = size / GROUP;
    const float *x = job->x + (size_t)row * size;
    float *staged = job->staging + (size_t)row * size;
    if (job->prologue == PROLOGUE_RMS_NORM) {
        rms_norm_row(x, job->norm_weight, job->eps, job->in_features, staged);
        x = staged;
    } else if (job->prologue != PROLOGUE_NONE) {
        const float *gate = job->x + (size_t)row * 2 * size;
        gated_row(gate, gate + size, job->in_features, job->prologue == PROLOGUE_GELU_TANH, staged);
        x = staged;
    }
    const fp_rows *rows = &job->rows;
    for (size_t g = 0; g < groups; g++) {
        size_t at = (size_t)row * groups + g;
        quantise_group(x + g * GROUP, rows->codes + at * GROUP, rows->scales + at, rows->sums + at,
                       rows->sums32 + at, rows->sums16 + 2 * at);
    }
}

static void quantise_some(void *context, int index) {
    const quantise_job *job = context;
    int end = (index + 1) * ROWS_PER_TASK;
    for (int row = index * ROWS_PER_TASK; row < end && row < job->num_rows; row++)
        quantise_row(job, row);
}

/* One block of memory a thread, grown when a call needs more. */
static char *thread_memory(size_t num_bytes) {
    static _Thread_local char *memory;
    static _Thread_local size_t capacity;
    if (num_bytes > capacity) {
        free(memory);
        capacity = 0;
        num_bytes = (num_bytes + 4095) / 4096 * 4096;
        memory = aligned_alloc(64, num_bytes);
        if (memory != NULL)
            capacity = num_bytes;
    }
    return memory;
}

const fp_rows *fp_quantise(const float *x, int num_rows, int in_features, int prologue, const float *norm_weight,
                           float eps) {
    static _Thread_local quantise_job job;
    size_t values = (size_t)num_rows * (size_t)in_features, groups = values / GROUP;
    char *memory = thread_memory(values * (1 + sizeof(float)) + groups * 5 * 4 + 64);
    if (memory == NULL)
        return NULL;
    job = (quantise_job){.x = x, .norm_weight = norm_weight, .num_rows = num_rows, .in_features = in_features,
                         .prologue = prologue, .eps = eps};
    job.staging = (float *)memory;
    job.rows.scales = job.staging + values;
    job.rows.sums = job.rows.scales + groups;
    job.rows.sums32 = (int32_t *)(job.rows.sums + groups);
    job.rows.sums16 = job.rows.sums32 + groups;
    job.rows.codes = (int8_t *)(job.rows.sums16 + 2 * groups);
    fp_parallel(quantise_some, &job, (num_rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK);
    return &job.rows;
}
