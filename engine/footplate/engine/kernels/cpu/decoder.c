/* A stack of decoder layers as one call: at small batches, calling each op from Python costs more than the op. */
#include "kernels.h"

#include <stddef.h>
#include <string.h>

typedef struct {
    const fp_matrix *qkv, *o, *gate_up, *down;
    const float *attn_norm, *mlp_norm;
    const float *post_attn_norm, *post_mlp_norm; /* NULL: outputs are added as they are */
    const float *q_norm, *k_norm;                /* NULL: none */
    const float *cos_sin;
    fp_layer cache;
    float eps;
    int32_t prologue; /* the MLP's activation, of enum fp_prologue */
} fp_decoder_layer;

/* x += matrix(input), through a norm when there is one. */
static int add_output(const fp_matrix *matrix, const float *input, int num_rows, int prologue, const float *post_norm,
                      float eps, float *x, float *spare) {
    if (post_norm == NULL)
        return fp_linear(matrix, input, num_rows, prologue, NULL, 0, x, 1);
    int status = fp_linear(matrix, input, num_rows, prologue, NULL, 0, spare, 0);
    if (status == 0)
        fp_norm_add(spare, x, post_norm, num_rows, matrix->out_features, eps);
    return status;
}

/* Moves the row of each sequence's last token, of rows [T, size], to the front: row s is sequence s's. */
static void pick_last(float *rows, const fp_sequences *sequences, size_t size) {
    for (int s = 0; s < sequences->num_sequences; s++) /* a sequence has a token at least: no row is read late */
        memmove(rows + (size_t)s * size, rows + (size_t)(sequences->query_starts[s + 1] - 1) * size,
                size * sizeof *rows);
}

/* With `last` (the same sequences, one query each), everything past keys and values is made for their rows only. */
static int run_layer(const fp_decoder_layer *layer, float *x, const fp_sequences *sequences, const fp_sequences *last,
                     float *scratch) {
    size_t num_rows = (size_t)sequences->num_tokens;
    float *wide = scratch; /* qkv, later gate_up */
    size_t widest = (size_t)(layer->qkv->out_features > layer->gate_up->out_features ? layer->qkv->out_features
                                                                                    : layer->gate_up->out_features);
    float *q = wide + num_rows * widest, *mixed = q + num_rows * (size_t)layer->o->in_features;
    float *spare = mixed + num_rows * (size_t)layer->o->in_features;
    int rows = sequences->num_tokens;
    int status = fp_linear(layer->qkv, x, rows, PROLOGUE_RMS_NORM, layer->attn_norm, layer->eps, wide, 0);
    if (status == 0)
        status = fp_rope_and_cache(wide, &layer->cache, sequences, layer->cos_sin, layer->q_norm, layer->k_norm,
                                   layer->eps, q);
    if (status == 0 && last != NULL) {
        pick_last(q, sequences, (size_t)layer->o->in_features);
        pick_last(x, sequences, (size_t)layer->o->out_features);
        sequences = last;
        rows = last->num_tokens;
    }
    if (status == 0)
        status = fp_attention(q, &layer->cache, sequences, mixed);
    if (status == 0)
        status = add_output(layer->o, mixed, rows, PROLOGUE_NONE, layer->post_attn_norm, layer->eps, x, spare);
    if (status == 0)
        status = fp_linear(layer->gate_up, x, rows, PROLOGUE_RMS_NORM, layer->mlp_norm, layer->eps, wide, 0);
    if (status == 0)
        status = add_output(layer->down, wide, rows, layer->prologue, layer->post_mlp_norm, layer->eps, x, spare);
    return status;
}

/* Floats of scratch that one row needs in `layer`. */
static size_t scratch_width(const fp_decoder_layer *layer) {
    int32_t qkv = layer->qkv->out_features, gate_up = layer->gate_up->out_features;
    return (size_t)(qkv > gate_up ? qkv : gate_up) + 2 * (size_t)layer->o->in_features +
           (size_t)layer->o->out_features;
}

int fp_decoder_scratch(const fp_decoder_layer *layers, int num_layers) {
    size_t widest = 0;
    for (int index = 0; index < num_layers; index++)
        if (scratch_width(&layers[index]) > widest)
            widest = scratch_width(&layers[index]);
    return (int)widest;
}

/* x [T, hidden] in place through all layers; where `last` is not NULL, x's first S rows are those of last tokens, and
   others hold anything. scratch holds T * fp_decoder_scratch floats. 0, or a part's status. */
int fp_run_layers(const fp_decoder_layer *layers, int num_layers, float *x, const fp_sequences *sequences,
                  const fp_sequences *last, float *scratch) {
    for (int index = 0; index < num_layers; index++) {
        int status = run_layer(&layers[index], x, sequences, index == num_layers - 1 ? last : NULL, scratch);
        if (status != 0)
            return status;
    }
    return 0;
}
