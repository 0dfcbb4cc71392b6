/* A packed matrix times quantised rows.
 *
 * One tile of TILE weight rows meets MAX_BLOCK activation rows at a time, so that unpacked codes serve all of them.
 * A result is a sum over groups in order, whatever the block: rows never influence one another. */
#include "group_sums.h"
#include "kernels.h"
#include "threads.h"

#define CACHED_ROW_BYTES (192 * 1024) /* activations of one task stay in a second-level cache */
#define TASKS_PER_THREAD 6
/* The first rows that meet a tile fetch the codes further on: hardware prefetch stops at every 4 KiB page. */
#define PREFETCH_BYTES 2048

typedef struct {
    const fp_matrix *matrix;
    const fp_rows *rows;
    float *out;
    int num_rows, is_added;
    int rows_per_task, tiles_per_task, num_tile_tasks;
} linear_job;

INLINE lanes_f32 splat_lanes(float value) { return value - (lanes_f32){0}; }

INLINE lanes_f32 load_scales(const void *from, size_t at, int is_wide) {
    if (is_wide) {
        lanes_f32 value;
        memcpy(&value, (const float *)from + at, sizeof value);
        return value;
    }
    lanes_f16 value;
    memcpy(&value, (const _Float16 *)from + at, sizeof value);
    return __builtin_convertvector(value, lanes_f32);
}

INLINE void store_lanes(const linear_job *job, lanes_f32 value, int row, int column, int count) {
    float *to = job->out + (size_t)row * (size_t)job->matrix->out_features + column;
    if (count == TILE) {
        lanes_f32 before = {0};
        if (job->is_added) {
            memcpy(&before, to, sizeof before);
            value += before;
        }
        memcpy(to, &value, sizeof value);
        return;
    }
    for (int lane = 0; lane < count; lane++)
        to[lane] = job->is_added ? to[lane] + value[lane] : value[lane];
}

/* The codes' part of a block of results: sum over groups of scale * (sum(code x) - zero sum(x)). */
INLINE void add_codes(const linear_job *job, const fp_segment *segment, int tile, int row, int kind, int is_wide,
                      int has_minimums, int block, int is_first, lanes_f32 *totals) {
    const int group = group_of(kind), shift = has_minimums ? -1 : zero_shift(kind);
    const size_t size = (size_t)job->matrix->in_features, num_groups = size / (size_t)group;
    const uint8_t *codes = segment->codes + (size_t)tile * code_bytes(kind, size);
    const size_t group_bytes = code_bytes(kind, (size_t)group), scale_base = (size_t)tile * num_groups * TILE;
    const fp_rows *rows = job->rows;
    const int8_t *x[MAX_BLOCK];
#pragma clang loop unroll(full)
    for (int m = 0; m < block; m++)
        x[m] = rows->codes + (size_t)(row + m) * size;
    for (size_t g = 0; g < num_groups; g++) {
        lanes_i32 sums[MAX_BLOCK];
        if (is_first)
            for (size_t line = 0; line < group_bytes; line += 64)
                __builtin_prefetch(codes + g * group_bytes + PREFETCH_BYTES + line);
        group_sums(kind, block, codes + g * group_bytes, x, g * (size_t)group, sums);
        lanes_f32 scale = load_scales(segment->scales, scale_base + g * TILE, is_wide);
#pragma clang loop unroll(full)
        for (int m = 0; m < block; m++) {
            size_t at = (size_t)(row + m) * (size / GROUP) + g * (size_t)group / GROUP;
            if (shift >= 0) {
                int32_t sum = kind == KIND_SIX ? rows->sums16[(size_t)(row + m) * num_groups + g] : rows->sums32[at];
                sums[m] -= ((lanes_i32){0} + sum) << shift;
            }
            lanes_f32 factor = scale * splat_lanes(rows->scales[at]);
            totals[m] = __builtin_elementwise_fma(factor, __builtin_convertvector(sums[m], lanes_f32), totals[m]);
        }
    }
}

INLINE void add_minimums(const linear_job *job, const fp_segment *segment, int tile, int row, int is_wide, int block,
                         lanes_f32 *totals) {
    const size_t num_groups = (size_t)job->matrix->in_features / GROUP, base = (size_t)tile * num_groups * TILE;
    lanes_f32 parts[MAX_BLOCK];
#pragma clang loop unroll(full)
    for (int m = 0; m < block; m++)
        parts[m] = splat_lanes(0);
    for (size_t g = 0; g < num_groups; g++) {
        lanes_f32 minimum = load_scales(segment->minimums, base + g * TILE, is_wide);
#pragma clang loop unroll(full)
        for (int m = 0; m < block; m++) {
            lanes_f32 sum = splat_lanes(job->rows->sums[(size_t)(row + m) * num_groups + g]);
            parts[m] = __builtin_elementwise_fma(minimum, sum, parts[m]);
        }
    }
#pragma clang loop unroll(full)
    for (int m = 0; m < block; m++)
        totals[m] += parts[m];
}

INLINE void multiply_block(const linear_job *job, const fp_segment *segment, int tile, int column, int row, int kind,
                           int is_wide, int has_minimums, int block, int is_first) {
    lanes_f32 totals[MAX_BLOCK];
#pragma clang loop unroll(full)
    for (int m = 0; m < block; m++)
        totals[m] = splat_lanes(0);
    add_codes(job, segment, tile, row, kind, is_wide, has_minimums, block, is_first, totals);
    if (has_minimums)
        add_minimums(job, segment, tile, row, is_wide, block, totals);
    int left = segment->num_rows - tile * TILE, count = left < TILE ? left : TILE;
#pragma clang loop unroll(full)
    for (int m = 0; m < block; m++)
        store_lanes(job, totals[m], row + m, column, count);
}

INLINE void multiply_tile(const linear_job *job, const fp_segment *segment, int tile, int column, int row, int end,
                          int kind, int is_wide, int has_minimums) {
    const int begin = row;
    for (; row + 4 <= end; row += 4)
        multiply_block(job, segment, tile, column, row, kind, is_wide, has_minimums, 4, row == begin);
    if (end - row >= 2) {
        multiply_block(job, segment, tile, column, row, kind, is_wide, has_minimums, 2, row == begin);
        row += 2;
    }
    if (row < end)
        multiply_block(job, segment, tile, column, row, kind, is_wide, has_minimums, 1, row == begin);
}

#define TILE_KERNEL(name, kind, is_wide, has_minimums)                                                              \
    static void name(const linear_job *job, const fp_segment *segment, int tile, int column, int row, int end) {     \
        multiply_tile(job, segment, tile, column, row, end, kind, is_wide, has_minimums);                            \
    }

TILE_KERNEL(nibble_half, KIND_NIBBLE, 0, 0)
TILE_KERNEL(nibble_half_minimums, KIND_NIBBLE, 0, 1)
TILE_KERNEL(nibble_wide_minimums, KIND_NIBBLE, 1, 1)
TILE_KERNEL(five_half, KIND_FIVE, 0, 0)
TILE_KERNEL(five_half_minimums, KIND_FIVE, 0, 1)
TILE_KERNEL(five_wide_minimums, KIND_FIVE, 1, 1)
TILE_KERNEL(six_wide, KIND_SIX, 1, 0)
TILE_KERNEL(signed_half, KIND_SIGNED, 0, 0)

typedef void (*tile_kernel)(const linear_job *, const fp_segment *, int, int, int, int);

static tile_kernel kernel_of(const fp_segment *segment) {
    int has_minimums = segment->minimums != NULL, is_wide = segment->has_wide_scales;
    switch (segment->kind) {
    case KIND_NIBBLE:
        return !has_minimums ? (is_wide ? NULL : nibble_half) : is_wide ? nibble_wide_minimums : nibble_half_minimums;
    case KIND_FIVE:
        return !has_minimums ? (is_wide ? NULL : five_half) : is_wide ? five_wide_minimums : five_half_minimums;
    case KIND_SIX:
        return has_minimums || !is_wide ? NULL : six_wide;
    case KIND_SIGNED:
        return has_minimums || is_wide ? NULL : signed_half;
    }
    return NULL;
}

static void multiply_some(void *context, int index) {
    const linear_job *job = context;
    const fp_matrix *matrix = job->matrix;
    int tile = index % job->num_tile_tasks * job->tiles_per_task;
    int end = tile + job->tiles_per_task < matrix->num_tiles ? tile + job->tiles_per_task : matrix->num_tiles;
    int row = index / job->num_tile_tasks * job->rows_per_task;
    int row_end = row + job->rows_per_task < job->num_rows ? row + job->rows_per_task : job->num_rows;
    int first_tile = 0, first_column = 0;
    for (int s = 0; s < matrix->num_segments; s++) {
        const fp_segment *segment = &matrix->segments[s];
        tile_kernel kernel = kernel_of(segment);
        for (; tile < end && tile < first_tile + segment->num_tiles; tile++) {
            int local = tile - first_tile;
            kernel(job, segment, local, first_column + local * TILE, row, row_end);
        }
        first_tile += segment->num_tiles;
        first_column += segment->num_rows;
    }
}

int fp_tile_rows(void) { return TILE; }

/* out[M, N] (+)= prologue(x) Wᵀ. Returns 0; -1: no memory; -2: a segment of a kind that has no kernel. */
int fp_linear(const fp_matrix *matrix, const float *x, int num_rows, int prologue, const float *norm_weight, float eps,
              float *out, int is_added) {
    if (num_rows <= 0)
        return 0;
    for (int s = 0; s < matrix->num_segments; s++)
        if (kernel_of(&matrix->segments[s]) == NULL)
            return -2;
    const fp_rows *rows = fp_quantise(x, num_rows, matrix->in_features, prologue, norm_weight, eps);
    if (rows == NULL)
        return -1;
    linear_job job = {.matrix = matrix, .rows = rows, .out = out, .num_rows = num_rows, .is_added = is_added};
    int fitting = CACHED_ROW_BYTES / matrix->in_features / MAX_BLOCK * MAX_BLOCK;
    job.rows_per_task = fitting < 16 ? 16 : fitting;
    int row_tasks = (num_rows + job.rows_per_task - 1) / job.rows_per_task;
    int wanted = fp_num_threads() * TASKS_PER_THREAD;
    job.tiles_per_task = (matrix->num_tiles + wanted - 1) / wanted;
    job.num_tile_tasks = (matrix->num_tiles + job.tiles_per_task - 1) / job.tiles_per_task;
    fp_parallel(multiply_some, &job, job.num_tile_tasks * row_tasks);
    return 0;
}
