/* Splitting qkv, per-head norms, rotation, and writing keys and values to their slots. */
#include "kernels.h"
#include "rows.h"
#include "threads.h"

#define TOKENS_PER_TASK 8

typedef struct {
    float *qkv;
    const fp_layer *layer;
    const fp_sequences *sequences;
    const float *cos_sin;
    const float *q_norm, *k_norm; /* NULL: none */
    float eps;
    float *q_out;
} rope_job;

/* (x[i], x[i + D/2]) turned by the angle of pair i; cosines, then sines. */
static void rotate(const float *x, const float *angles, int head_dim, float *out) {
    int half = head_dim / 2;
    for (int i = 0; i < half; i++) {
        float first = x[i], second = x[i + half], cosine = angles[i], sine = angles[half + i];
        out[i] = first * cosine - second * sine;
        out[i + half] = second * cosine + first * sine;
    }
}

static void one_head(const float *x, const float *norm, float eps, const float *angles, int head_dim, float *out) {
    float normed[MAX_HEAD_DIM];
    if (norm != NULL) {
        rms_norm_row(x, norm, eps, head_dim, normed);
        x = normed;
    }
    rotate(x, angles, head_dim, out);
}

static void store_head(const fp_layer *layer, void *cache, size_t row, const float *head) {
    size_t size = (size_t)layer->head_dim, at = row * size;
    if (!layer->is_bf16) {
        memcpy((float *)cache + at, head, size * sizeof(float));
        return;
    }
    for (size_t i = 0; i < size; i++)
        ((uint16_t *)cache)[at + i] = to_bf16(head[i]);
}

static void one_token(const rope_job *job, int token) {
    const fp_layer *layer = job->layer;
    const size_t size = (size_t)layer->head_dim, num_q = (size_t)layer->num_heads, num_kv = (size_t)layer->num_kv_heads;
    const float *row = job->qkv + (size_t)token * (num_q + 2 * num_kv) * size;
    const float *angles = job->cos_sin + (size_t)job->sequences->positions[token] * size;
    for (size_t head = 0; head < num_q; head++)
        one_head(row + head * size, job->q_norm, job->eps, angles, layer->head_dim,
                 job->q_out + ((size_t)token * num_q + head) * size);
    if (job->sequences->slots[token] < 0)
        return; /* only fills the batch */
    size_t slot = (size_t)job->sequences->slots[token], block_size = (size_t)layer->block_size;
    size_t block = slot / block_size, offset = slot % block_size;
    for (size_t head = 0; head < num_kv; head++) {
        float key[MAX_HEAD_DIM];
        one_head(row + (num_q + head) * size, job->k_norm, job->eps, angles, layer->head_dim, key);
        size_t cached = (block * num_kv + head) * block_size + offset;
        store_head(layer, layer->keys, cached, key);
        store_head(layer, layer->values, cached, row + (num_q + num_kv + head) * size);
    }
}

static void some_tokens(void *context, int index) {
    const rope_job *job = context;
    int end = (index + 1) * TOKENS_PER_TASK;
    for (int token = index * TOKENS_PER_TASK; token < end && token < job->sequences->num_tokens; token++)
        one_token(job, token);
}

/* Writes q [T, H, D] to q_out and keys and values to the cache. Returns 0; -1: the head size has no kernel. */
int fp_rope_and_cache(float *qkv, const fp_layer *layer, const fp_sequences *sequences, const float *cos_sin,
                      const float *q_norm, const float *k_norm, float eps, float *q_out) {
    if (layer->head_dim > MAX_HEAD_DIM || layer->head_dim % 2)
        return -1;
    rope_job job = {qkv, layer, sequences, cos_sin, q_norm, k_norm, eps, q_out};
    fp_parallel(some_tokens, &job, (sequences->num_tokens + TOKENS_PER_TASK - 1) / TOKENS_PER_TASK);
    return 0;
}
