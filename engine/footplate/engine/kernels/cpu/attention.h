/* One layer's paged KV cache and one step's sequences, as ops.py describes them. Mirrored in library.py. */
#ifndef FOOTPLATE_ATTENTION_H
#define FOOTPLATE_ATTENTION_H

#include <stdint.h>

#define MAX_HEAD_DIM 256

typedef struct {
    const int32_t *positions;    /* [T] */
    const int64_t *slots;        /* [T] */
    const int32_t *query_starts; /* [S + 1] */
    const int32_t *context_lens; /* [S] */
    const int32_t *block_tables; /* [S, table_width] */
    int32_t num_tokens, num_sequences, table_width, max_query_len;
} fp_sequences;

typedef struct {
    void *keys, *values; /* [B, KH, block_size, D] float32 or bfloat16 */
    int32_t num_heads, num_kv_heads, head_dim, block_size;
    int32_t is_bf16;
    int32_t window; /* 0: none */
    float scale;
    float soft_cap; /* 0: none */
} fp_layer;

#endif
