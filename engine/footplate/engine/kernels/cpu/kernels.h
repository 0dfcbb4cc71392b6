/* The library's entry points that other sources of it call. */
#ifndef FOOTPLATE_KERNELS_H
#define FOOTPLATE_KERNELS_H

#include "attention.h"
#include "matrix.h"

int fp_linear(const fp_matrix *matrix, const float *x, int num_rows, int prologue, const float *norm_weight, float eps,
              float *out, int is_added);
void fp_norm_add(const float *x, float *residual, const float *weight, int num_rows, int size, float eps);
int fp_rope_and_cache(float *qkv, const fp_layer *layer, const fp_sequences *sequences, const float *cos_sin,
                      const float *q_norm, const float *k_norm, float eps, float *q_out);
int fp_attention(const float *q, const fp_layer *layer, const fp_sequences *sequences, float *out);

#endif
