/* Work on one row of float32, shared by the plain ops and by the linear op's prologue. */
#ifndef FOOTPLATE_ROWS_H
#define FOOTPLATE_ROWS_H

#include "simd.h"

/* Four running vectors in a fixed order, so that a row's norm is the same wherever it is computed. */
INLINE float mean_square(const float *x, int size) {
    f32x8 sums[4] = {splat8(0), splat8(0), splat8(0), splat8(0)};
    int at = 0;
    for (; at + 32 <= size; at += 32)
        for (int part = 0; part < 4; part++) {
            f32x8 value = load8(x + at + 8 * part);
            sums[part] = fma8(value, value, sums[part]);
        }
    float tail = 0;
    for (; at < size; at++)
        tail += x[at] * x[at];
    return (sum8((sums[0] + sums[1]) + (sums[2] + sums[3])) + tail) / (float)size;
}

INLINE void rms_norm_row(const float *x, const float *weight, float eps, int size, float *out) {
    float inverse = 1.0f / __builtin_sqrtf(mean_square(x, size) + eps);
    for (int at = 0; at < size; at++)
        out[at] = x[at] * inverse * weight[at];
}

INLINE f32x8 silu8(f32x8 x) { return x / (splat8(1.0f) + exp8(-x)); }

/* (1 + tanh u) / 2 is the logistic function of 2 u, which loses nothing where tanh is near -1. */
INLINE f32x8 gelu_tanh8(f32x8 x) {
    f32x8 twice_inner = splat8(2 * 0.7978845608028654f) * fma8(splat8(0.044715f) * x * x, x, x);
    return x / (splat8(1.0f) + exp8(-twice_inner));
}

INLINE void gated_row(const float *gate, const float *up, int size, int is_gelu, float *out) {
    int at = 0;
    for (; at + LANES <= size; at += LANES) {
        f32x8 value = load8(gate + at);
        store8(out + at, (is_gelu ? gelu_tanh8(value) : silu8(value)) * load8(up + at));
    }
    if (at == size)
        return;
    f32x8 last = splat8(0), factor = splat8(0);
    memcpy(&last, gate + at, (size_t)(size - at) * sizeof(float));
    memcpy(&factor, up + at, (size_t)(size - at) * sizeof(float));
    last = (is_gelu ? gelu_tanh8(last) : silu8(last)) * factor;
    memcpy(out + at, &last, (size_t)(size - at) * sizeof(float));
}

#endif
