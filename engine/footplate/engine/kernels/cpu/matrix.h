/* Packed matrices and quantised rows: the memory that linear.c, pack.c and embedding.c agree on.
 *
 * A matrix [N, K] is a stack of segments; a segment is cut into tiles of TILE rows. Of one tile,
 *   byte codes    [K / 4][TILE][4]      four neighbours of k for each row, so one vector meets one broadcast
 *   nibble codes  [K / 32][4][TILE][4]  low nibble k = 32 g + 4 j + b, high nibble 16 further
 *   scales        [K / group][TILE]     float16 or float32
 *   minimums      as scales, or absent
 * weight = scale * (code - zero) + minimum. */
#ifndef FOOTPLATE_MATRIX_H
#define FOOTPLATE_MATRIX_H

#include "simd.h"

/* FOOTPLATE_PORTABLE asks for plain C everywhere, for tests of that path. */
#if defined(__AVX512VNNI__) && defined(__AVX512F__) && defined(__AVX512BW__) && !defined(FOOTPLATE_PORTABLE)
#define TILE 16
#define HAS_DOT_PRODUCT 1
#else
#define TILE 8
#define HAS_DOT_PRODUCT 0
#endif

#define GROUP 32 /* activations share a scale in groups of this many */
#define MAX_SEGMENTS 8

enum fp_kind {
    KIND_NIBBLE = 0, /* codes 0 .. 15 */
    KIND_FIVE = 1,   /* codes 0 .. 31 in bytes */
    KIND_SIX = 2,    /* codes 0 .. 63 in bytes, groups of 16 */
    KIND_SIGNED = 3, /* int8 */
};

typedef struct {
    const uint8_t *codes;
    const void *scales;
    const void *minimums; /* NULL: the kind's zero point stands in for them */
    int32_t num_rows;
    int32_t kind;
    int32_t has_wide_scales; /* float32, else float16 */
    int32_t num_tiles;
} fp_segment;

typedef struct {
    int32_t in_features;
    int32_t out_features;
    int32_t num_segments;
    int32_t num_tiles;
    fp_segment segments[MAX_SEGMENTS];
} fp_matrix;

/* Rows as int8 with a scale per GROUP. `sums` are scale * sum(codes); `sums32` and `sums16` are of codes alone. */
typedef struct {
    int8_t *codes;   /* [M, K] */
    float *scales;   /* [M, K / 32] */
    float *sums;     /* [M, K / 32] */
    int32_t *sums32; /* [M, K / 32] */
    int32_t *sums16; /* [M, K / 16] */
} fp_rows;

/* What is done to a row before it is quantised. */
enum fp_prologue {
    PROLOGUE_NONE = 0,
    PROLOGUE_RMS_NORM = 1,
    PROLOGUE_SILU = 2,      /* x is [M, 2 K]: gate, then up */
    PROLOGUE_GELU_TANH = 3, /* likewise */
};

INLINE int group_of(int kind) { return kind == KIND_SIX ? 16 : 32; }

INLINE size_t code_bytes(int kind, size_t in_features) { return in_features * TILE / (kind == KIND_NIBBLE ? 2 : 1); }

/* log2 of the zero point where minimums are absent; -1: codes are already signed. */
INLINE int zero_shift(int kind) {
    if (kind == KIND_SIGNED)
        return HAS_DOT_PRODUCT ? 7 : -1; /* the dot product wants unsigned weights: they are stored 128 higher */
    return kind == KIND_NIBBLE ? 3 : kind == KIND_FIVE ? 4 : 5;
}

/* Quantises M rows; the result lives in memory of the calling thread until its next call. NULL: no memory. */
const fp_rows *fp_quantise(const float *x, int num_rows, int in_features, int prologue, const float *norm_weight,
                           float eps);

#endif
