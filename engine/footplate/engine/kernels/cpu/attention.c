/* Causal attention over a paged cache.
 *
 * All query rows that read one KV head (positions times heads of the group) are cut into tiles of TILE_ROWS; a tile
 * walks the context in chunks of CHUNK keys. A chunk's softmax sums are made by themselves and then merged in order
 * (online softmax, arXiv:2205.14135), with chunk borders at fixed positions of the context. So a row's result does
 * not depend on its tile, on how the prompt was cut into steps, or on who computed it. */
#include "kernels.h"
#include "simd.h"
#include "threads.h"

#include <math.h>
#include <stdlib.h>

#define TILE_ROWS 24
#define CHUNK 128
#define MAX_TASKS 16384

typedef struct {
    int32_t sequence, kv_head, first_row;
} tile_task;

typedef struct {
    const float *q;
    const fp_layer *layer;
    const fp_sequences *sequences;
    float *out;
    const tile_task *tasks;
} attention_job;

/* One tile's rows and running sums. Row r is query r / group of the sequence, head r % group of the KV head. */
typedef struct {
    int num_rows;
    const float *q[TILE_ROWS];
    float *out[TILE_ROWS];
    int begin[TILE_ROWS], end[TILE_ROWS]; /* keys the row sees */
    float largest[TILE_ROWS], total[TILE_ROWS];
    float part_largest[TILE_ROWS], part_total[TILE_ROWS];
    _Alignas(64) float scores[TILE_ROWS][CHUNK + LANES]; /* by key minus the chunk's border */
    _Alignas(64) float sums[TILE_ROWS * MAX_HEAD_DIM];   /* [num_rows, D] */
    _Alignas(64) float part[TILE_ROWS * MAX_HEAD_DIM];
    _Alignas(64) float widened[CHUNK * MAX_HEAD_DIM];
} tile_state;

/* Sums of eight vectors' lanes, one a lane: sum8's tree for each, done for all at once. */
INLINE f32x8 sum_each(const f32x8 *v) {
    f32x8 halves[4], quarters[2];
    for (int i = 0; i < 4; i++) {
        f32x8 low = __builtin_shufflevector(v[i], v[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        f32x8 high = __builtin_shufflevector(v[i], v[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
        halves[i] = low + high;
    }
    for (int i = 0; i < 2; i++) {
        f32x8 low = __builtin_shufflevector(halves[i], halves[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        f32x8 high = __builtin_shufflevector(halves[i], halves[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        quarters[i] = low + high;
    }
    f32x8 even = __builtin_shufflevector(quarters[0], quarters[1], 0, 8, 2, 10, 4, 12, 6, 14);
    f32x8 odd = __builtin_shufflevector(quarters[0], quarters[1], 1, 9, 3, 11, 5, 13, 7, 15);
    f32x8 mixed = even + odd; /* v0 v1 v2 v3 v4 .. come out as 0 1 2 3 | 4 5 6 7 */
    return mixed;
}

/* Dot products of `block` rows with two keys each. */
INLINE void score_block(tile_state *tile, int row, int block, const float *first, const float *second, int size, int at) {
    f32x8 sums[8];
    for (int i = 0; i < 8; i++)
        sums[i] = splat8(0);
    for (int d = 0; d < size; d += LANES) {
        f32x8 a = load8(first + d), b = load8(second + d);
        for (int i = 0; i < block; i++) {
            f32x8 q = load8(tile->q[row + i] + d);
            sums[i] = fma8(q, a, sums[i]);
            sums[4 + i] = fma8(q, b, sums[4 + i]);
        }
    }
    f32x8 dots = sum_each(sums);
    for (int i = 0; i < block; i++) {
        tile->scores[row + i][at] = dots[i];
        tile->scores[row + i][at + 1] = dots[4 + i];
    }
}

/* Scores of all rows against `count` keys that lie one after another; score columns begin at `at`. */
static void score_keys(tile_state *tile, const float *keys, int count, int size, int at) {
    for (int key = 0; key < count; key += 2) {
        const float *first = keys + (size_t)key * (size_t)size;
        const float *second = key + 1 < count ? first + size : first; /* the odd one's twin lands past the end */
        int row = 0;
        for (; row + 4 <= tile->num_rows; row += 4)
            score_block(tile, row, 4, first, second, size, at + key);
        if (tile->num_rows - row == 3)
            score_block(tile, row, 3, first, second, size, at + key);
        else if (tile->num_rows - row == 2)
            score_block(tile, row, 2, first, second, size, at + key);
        else if (tile->num_rows - row == 1)
            score_block(tile, row, 1, first, second, size, at + key);
    }
}

/* score * scale, soft-capped, and -infinity for columns the row does not see. */
INLINE f32x8 final_score(const fp_layer *layer, f32x8 score, int column, int begin, int end) {
    const i32x8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    i32x8 columns = lanes + column;
    score *= splat8(layer->scale);
    if (layer->soft_cap > 0)
        score = splat8(layer->soft_cap) * tanh8(score / splat8(layer->soft_cap));
    return select8((columns >= begin) & (columns < end), score, splat8(-INFINITY));
}

/* Turns a row's scores into weights, and notes their maximum and sum. `from` and `to` are the tile's columns,
 * widened to whole vectors; those the row does not see get weight 0, which changes no sum. */
static void soften_row(tile_state *tile, const fp_layer *layer, int row, int border, int from, int to) {
    float *scores = tile->scores[row];
    int begin = tile->begin[row] - border, end = tile->end[row] - border;
    tile->part_total[row] = 0;
    tile->part_largest[row] = -INFINITY;
    if (begin >= to || end <= from) {
        memset(scores + from, 0, (size_t)(to - from) * sizeof(float));
        return;
    }
    f32x8 largest = splat8(-INFINITY), total = splat8(0);
    for (int i = from; i < to; i += LANES) {
        f32x8 score = final_score(layer, load8(scores + i), i, begin, end);
        store8(scores + i, score);
        largest = max8(score, largest);
    }
    float peak = largest8(largest);
    for (int i = from; i < to; i += LANES) {
        f32x8 weight = exp8(load8(scores + i) - splat8(peak));
        store8(scores + i, weight);
        total += weight;
    }
    tile->part_largest[row] = peak;
    tile->part_total[row] = sum8(total);
}

/* part[row][d .. d + 8 width] += weight * value over `count` keys, for one or two rows. */
INLINE void weigh_block(tile_state *tile, int row, int block, int d, int width, const float *values, int count, int size,
                        int at) {
    f32x8 sums[2][4];
    for (int i = 0; i < block; i++)
        for (int j = 0; j < width; j++)
            sums[i][j] = load8(&tile->part[(row + i) * size + d + 8 * j]);
    for (int key = 0; key < count; key++) {
        const float *value = values + (size_t)key * (size_t)size + d;
        for (int i = 0; i < block; i++) {
            f32x8 weight = splat8(tile->scores[row + i][at + key]);
            for (int j = 0; j < width; j++)
                sums[i][j] = fma8(weight, load8(value + 8 * j), sums[i][j]);
        }
    }
    for (int i = 0; i < block; i++)
        for (int j = 0; j < width; j++)
            store8(&tile->part[(row + i) * size + d + 8 * j], sums[i][j]);
}

static void weigh_values(tile_state *tile, const float *values, int count, int size, int at) {
    int d = 0;
    for (; d + 32 <= size; d += 32) {
        int row = 0;
        for (; row + 2 <= tile->num_rows; row += 2)
            weigh_block(tile, row, 2, d, 4, values, count, size, at);
        if (row < tile->num_rows)
            weigh_block(tile, row, 1, d, 4, values, count, size, at);
    }
    for (; d < size; d += LANES)
        for (int row = 0; row < tile->num_rows; row++)
            weigh_block(tile, row, 1, d, 1, values, count, size, at);
}

/* Running sums become those of all chunks so far. */
static void merge_rows(tile_state *tile, int size) {
    for (int row = 0; row < tile->num_rows; row++) {
        float part = tile->part_largest[row], before = tile->largest[row];
        if (part == -INFINITY)
            continue;
        float largest = part > before ? part : before;
        if (part != part)
            largest = part;
        float keep = before == -INFINITY ? 0.0f : exp8(splat8(before - largest))[0];
        float gain = exp8(splat8(part - largest))[0];
        tile->total[row] = tile->total[row] * keep + tile->part_total[row] * gain;
        tile->largest[row] = largest;
        for (int d = 0; d < size; d += LANES) {
            float *sum = &tile->sums[row * size + d];
            store8(sum, fma8(load8(&tile->part[row * size + d]), splat8(gain), load8(sum) * splat8(keep)));
        }
    }
}

/* Keys or values of up to one block, as float32: in place, or widened into the tile's memory. */
static const float *cached_rows(tile_state *tile, const fp_layer *layer, const void *cache, size_t row, int count) {
    size_t at = row * (size_t)layer->head_dim, size = (size_t)count * (size_t)layer->head_dim;
    if (!layer->is_bf16)
        return (const float *)cache + at;
    const uint16_t *from = (const uint16_t *)cache + at;
    for (size_t i = 0; i < size; i += LANES)
        store8(tile->widened + i, from_bf16(from + i));
    return tile->widened;
}

typedef void (*use_rows)(tile_state *, const float *, int, int, int);

/* Calls `use` for each run of keys first .. end that lies in one block; columns count from the chunk's border. */
static void walk_blocks(tile_state *tile, const fp_layer *layer, const void *cache, const int32_t *table, int kv_head,
                        int first, int end, use_rows use) {
    int block_size = layer->block_size;
    for (int position = first; position < end;) {
        int offset = position % block_size;
        int run = block_size - offset < end - position ? block_size - offset : end - position;
        size_t block = (size_t)table[position / block_size];
        size_t row = (block * (size_t)layer->num_kv_heads + (size_t)kv_head) * (size_t)block_size + (size_t)offset;
        use(tile, cached_rows(tile, layer, cache, row, run), run, layer->head_dim, position % CHUNK);
        position += run;
    }
}

static void attend_chunk(tile_state *tile, const fp_layer *layer, const int32_t *table, int kv_head, int first,
                         int end) {
    int border = first / CHUNK * CHUNK;
    walk_blocks(tile, layer, layer->keys, table, kv_head, first, end, score_keys);
    int from = (first - border) / LANES * LANES, to = (end - border + LANES - 1) / LANES * LANES;
    for (int row = 0; row < tile->num_rows; row++)
        soften_row(tile, layer, row, border, from, to);
    memset(tile->part, 0, (size_t)(tile->num_rows * layer->head_dim) * sizeof(float));
    walk_blocks(tile, layer, layer->values, table, kv_head, first, end, weigh_values);
    merge_rows(tile, layer->head_dim);
}

static void start_tile(tile_state *tile, const attention_job *job, const tile_task *task) {
    const fp_layer *layer = job->layer;
    const int32_t *starts = job->sequences->query_starts + task->sequence;
    int group = layer->num_heads / layer->num_kv_heads, num_queries = starts[1] - starts[0];
    int left = num_queries * group - task->first_row;
    int context_len = job->sequences->context_lens[task->sequence];
    tile->num_rows = left < TILE_ROWS ? left : TILE_ROWS;
    for (int row = 0; row < tile->num_rows; row++) {
        int query = (task->first_row + row) / group, head = task->kv_head * group + (task->first_row + row) % group;
        size_t at = ((size_t)(starts[0] + query) * (size_t)layer->num_heads + (size_t)head) * (size_t)layer->head_dim;
        int end = context_len - num_queries + query + 1;
        tile->q[row] = job->q + at;
        tile->out[row] = job->out + at;
        tile->end[row] = end;
        tile->begin[row] = layer->window > 0 && end > layer->window ? end - layer->window : 0;
        tile->largest[row] = -INFINITY;
        tile->total[row] = 0;
    }
    memset(tile->sums, 0, (size_t)(tile->num_rows * layer->head_dim) * sizeof(float));
}

static void attend_tile(void *context, int index) {
    const attention_job *job = context;
    const tile_task *task = &job->tasks[index];
    const int32_t *table = job->sequences->block_tables + (size_t)task->sequence * (size_t)job->sequences->table_width;
    static _Thread_local tile_state tile;
    start_tile(&tile, job, task);
    int begin = tile.begin[0], end = tile.end[tile.num_rows - 1];
    for (int first = begin; first < end; first = first / CHUNK * CHUNK + CHUNK) {
        int border = first / CHUNK * CHUNK + CHUNK;
        attend_chunk(&tile, job->layer, table, task->kv_head, first, border < end ? border : end);
    }
    int size = job->layer->head_dim;
    for (int row = 0; row < tile.num_rows; row++)
        for (int d = 0; d < size; d += LANES)
            store8(tile.out[row] + d, load8(&tile.sums[row * size + d]) / splat8(tile.total[row]));
}

static int list_tasks(const fp_layer *layer, const fp_sequences *sequences, tile_task *tasks) {
    int count = 0, group = layer->num_heads / layer->num_kv_heads;
    for (int s = 0; s < sequences->num_sequences; s++) {
        int num_rows = (sequences->query_starts[s + 1] - sequences->query_starts[s]) * group;
        /* The last tiles of a prompt see the most keys: they go first, so that no thread ends with a long one. */
        for (int row = (num_rows - 1) / TILE_ROWS * TILE_ROWS; num_rows > 0 && row >= 0; row -= TILE_ROWS)
            for (int head = 0; head < layer->num_kv_heads; head++) {
                if (tasks != NULL)
                    tasks[count] = (tile_task){s, head, row};
                count++;
            }
    }
    return count;
}

/* out [T, H * D] = attention of q [T, H, D]. Returns 0; -1: the head size has no kernel; -2: no memory. */
int fp_attention(const float *q, const fp_layer *layer, const fp_sequences *sequences, float *out) {
    if (layer->head_dim > MAX_HEAD_DIM || layer->head_dim % LANES)
        return -1;
    int num_tasks = list_tasks(layer, sequences, NULL);
    tile_task *tasks = malloc((size_t)(num_tasks + 1) * sizeof(tile_task));
    if (tasks == NULL)
        return -2;
    list_tasks(layer, sequences, tasks);
    for (int done = 0; done < num_tasks; done += MAX_TASKS) {
        attention_job job = {q, layer, sequences, out, tasks + done};
        int left = num_tasks - done;
        fp_parallel(attend_tile, &job, left < MAX_TASKS ? left : MAX_TASKS);
    }
    free(tasks);
    return 0;
}
