/* Integer dot products of one group: TILE rows of codes against up to MAX_BLOCK rows of activations.
 *
 * `group_sums` leaves sum(code * activation) over one weight group (32 neighbours, 16 for KIND_SIX) in 32-bit lanes,
 * one lane a weight row. All three versions give the same integers. */
#ifndef FOOTPLATE_GROUP_SUMS_H
#define FOOTPLATE_GROUP_SUMS_H

#include "matrix.h"

#define MAX_BLOCK 4

typedef int32_t lanes_i32 __attribute__((vector_size(4 * TILE)));
typedef float lanes_f32 __attribute__((vector_size(4 * TILE)));
typedef _Float16 lanes_f16 __attribute__((vector_size(2 * TILE)));

#if defined(__x86_64__) && (HAS_DOT_PRODUCT || defined(__AVX2__))
#include <immintrin.h>
INLINE int32_t four_codes(const int8_t *from) {
    int32_t value;
    memcpy(&value, from, sizeof value);
    return value;
}
#endif

#if HAS_DOT_PRODUCT

INLINE void group_sums(int kind, int block, const uint8_t *codes, const int8_t *const *x, size_t at, lanes_i32 *sums) {
    const __m512i low_bits = _mm512_set1_epi8(15);
    __m512i wide[MAX_BLOCK];
    for (int m = 0; m < block; m++)
        wide[m] = _mm512_setzero_si512();
    if (kind == KIND_NIBBLE) {
        for (int step = 0; step < 4; step++) {
            __m512i both = _mm512_loadu_si512(codes + 64 * step);
            __m512i low = _mm512_and_si512(both, low_bits);
            __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_bits);
            for (int m = 0; m < block; m++) {
                wide[m] = _mm512_dpbusd_epi32(wide[m], low, _mm512_set1_epi32(four_codes(x[m] + at + 4 * step)));
                wide[m] = _mm512_dpbusd_epi32(wide[m], high, _mm512_set1_epi32(four_codes(x[m] + at + 16 + 4 * step)));
            }
        }
    } else {
        for (int step = 0; step < group_of(kind) / 4; step++) {
            __m512i weights = _mm512_loadu_si512(codes + 64 * step);
            for (int m = 0; m < block; m++)
                wide[m] = _mm512_dpbusd_epi32(wide[m], weights, _mm512_set1_epi32(four_codes(x[m] + at + 4 * step)));
        }
    }
    for (int m = 0; m < block; m++)
        sums[m] = (lanes_i32)wide[m];
}

#elif defined(__AVX2__) && !defined(FOOTPLATE_PORTABLE)

/* Keeps steps in the written order: left alone, the compiler unpacks all codes first and runs out of registers. */
#define PIN(vector) __asm__ volatile("" : "+x"(vector))

INLINE __m256i times(__m256i weights, const int8_t *x) {
    return _mm256_maddubs_epi16(weights, _mm256_set1_epi32(four_codes(x)));
}

/* 16-bit sums of pairs hold 8 products of a 4-bit code (8 * 2 * 15 * 127 = 30480), 4 of a 5-bit one and 2 of a
 * 6-bit one before they must be widened. */
INLINE void nibble_sums(int block, const uint8_t *codes, const int8_t *const *x, size_t at, lanes_i32 *sums) {
    const __m256i low_bits = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i narrow[MAX_BLOCK];
#pragma clang loop unroll(full)
    for (int m = 0; m < block; m++)
        narrow[m] = _mm256_setzero_si256();
#pragma clang loop unroll(full)
    for (int step = 0; step < 4; step++) {
        __m256i both = _mm256_loadu_si256((const __m256i *)(codes + 32 * step));
        PIN(both);
        __m256i low = _mm256_and_si256(both, low_bits);
        __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_bits);
#pragma clang loop unroll(full)
        for (int m = 0; m < block; m++) {
            narrow[m] = _mm256_add_epi16(narrow[m], times(low, x[m] + at + 4 * step));
            narrow[m] = _mm256_add_epi16(narrow[m], times(high, x[m] + at + 16 + 4 * step));
            PIN(narrow[m]);
        }
    }
#pragma clang loop unroll(full)
    for (int m = 0; m < block; m++)
        sums[m] = (lanes_i32)_mm256_madd_epi16(narrow[m], ones);
}

INLINE void byte_sums(int block, int num_steps, int run, const uint8_t *codes, const int8_t *const *x, size_t at,
                      lanes_i32 *sums) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i wide[MAX_BLOCK];
#pragma clang loop unroll(full)
    for (int begin = 0; begin < num_steps; begin += run) {
        __m256i narrow[MAX_BLOCK];
#pragma clang loop unroll(full)
        for (int step = begin; step < begin + run; step++) {
            __m256i weights = _mm256_loadu_si256((const __m256i *)(codes + 32 * step));
            PIN(weights);
#pragma clang loop unroll(full)
            for (int m = 0; m < block; m++) {
                __m256i product = times(weights, x[m] + at + 4 * step);
                narrow[m] = step == begin ? product : _mm256_add_epi16(narrow[m], product);
                PIN(narrow[m]);
            }
        }
#pragma clang loop unroll(full)
        for (int m = 0; m < block; m++) {
            __m256i widened = _mm256_madd_epi16(narrow[m], ones);
            wide[m] = begin == 0 ? widened : _mm256_add_epi32(wide[m], widened);
        }
    }
#pragma clang loop unroll(full)
    for (int m = 0; m < block; m++)
        sums[m] = (lanes_i32)wide[m];
}

/* |w| times sign(w) x: the unsigned operand may be 128, the signed one is at most 127, so a pair fits 16 bits. */
INLINE void signed_sums(int block, const uint8_t *codes, const int8_t *const *x, size_t at, lanes_i32 *sums) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i wide[MAX_BLOCK];
#pragma clang loop unroll(full)
    for (int m = 0; m < block; m++)
        wide[m] = _mm256_setzero_si256();
#pragma clang loop unroll(full)
    for (int step = 0; step < 8; step++) {
        __m256i weights = _mm256_loadu_si256((const __m256i *)(codes + 32 * step));
        PIN(weights);
        __m256i sizes = _mm256_abs_epi8(weights);
#pragma clang loop unroll(full)
        for (int m = 0; m < block; m++) {
            __m256i signs = _mm256_sign_epi8(_mm256_set1_epi32(four_codes(x[m] + at + 4 * step)), weights);
            __m256i pairs = _mm256_maddubs_epi16(sizes, signs);
            wide[m] = _mm256_add_epi32(wide[m], _mm256_madd_epi16(pairs, ones));
            PIN(wide[m]);
        }
    }
#pragma clang loop unroll(full)
    for (int m = 0; m < block; m++)
        sums[m] = (lanes_i32)wide[m];
}

INLINE void group_sums(int kind, int block, const uint8_t *codes, const int8_t *const *x, size_t at, lanes_i32 *sums) {
    if (kind == KIND_NIBBLE)
        nibble_sums(block, codes, x, at, sums);
    else if (kind == KIND_FIVE)
        byte_sums(block, 8, 4, codes, x, at, sums);
    else if (kind == KIND_SIX)
        byte_sums(block, 4, 2, codes, x, at, sums);
    else
        signed_sums(block, codes, x, at, sums);
}

#else

INLINE int32_t code_at(int kind, const uint8_t *codes, int k, int row) {
    if (kind == KIND_NIBBLE) {
        uint8_t both = codes[((k % 16) / 4 * TILE + row) * 4 + k % 4];
        return k < 16 ? both & 15 : both >> 4;
    }
    uint8_t code = codes[(k / 4 * TILE + row) * 4 + k % 4];
    return kind == KIND_SIGNED ? (int8_t)code : code;
}

INLINE void group_sums(int kind, int block, const uint8_t *codes, const int8_t *const *x, size_t at, lanes_i32 *sums) {
    for (int m = 0; m < block; m++) {
        lanes_i32 total = {0};
        for (int k = 0; k < group_of(kind); k++)
            for (int row = 0; row < TILE; row++)
                total[row] += code_at(kind, codes, k, row) * x[m][at + (size_t)k];
        sums[m] = total;
    }
}

#endif
#endif
