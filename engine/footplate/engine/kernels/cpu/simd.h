/* Vectors for every target: clang's vector extensions, so that one source serves AVX2, AVX-512, NEON and plain C.
 * The build turns contraction off; a multiply-add is fused only where `fma8` says so, which keeps sums the same
 * in every loop that computes them. */
#ifndef FOOTPLATE_SIMD_H
#define FOOTPLATE_SIMD_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 8

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef int8_t i8x8 __attribute__((vector_size(8)));

INLINE f32x8 load8(const float *from) {
    f32x8 value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void store8(float *to, f32x8 value) { memcpy(to, &value, sizeof value); }

INLINE f32x8 splat8(float value) { return (f32x8){value, value, value, value, value, value, value, value}; }

INLINE f32x8 fma8(f32x8 a, f32x8 b, f32x8 c) { return __builtin_elementwise_fma(a, b, c); }

/* mask ? a : b, lane by lane; a mask lane is all ones or all zeros. */
INLINE f32x8 select8(i32x8 mask, f32x8 a, f32x8 b) { return (f32x8)((mask & (i32x8)a) | (~mask & (i32x8)b)); }

INLINE f32x8 max8(f32x8 a, f32x8 b) { return select8(a > b, a, b); }

INLINE f32x8 min8(f32x8 a, f32x8 b) { return select8(a < b, a, b); }

INLINE f32x8 from_bf16(const uint16_t *from) {
    u16x8 bits;
    memcpy(&bits, from, sizeof bits);
    return (f32x8)(__builtin_convertvector(bits, u32x8) << 16);
}

/* The nearest bfloat16, ties to even; a NaN stays one. */
INLINE uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* Lanes are added in one fixed tree: halves, quarters, eighths. */
INLINE float sum8(f32x8 v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

INLINE float largest8(f32x8 v) {
    float best = v[0];
    for (int lane = 1; lane < LANES; lane++)
        best = v[lane] > best ? v[lane] : best;
    return best;
}

/* e^x to about one unit in the last place: x = n ln 2 + r, a degree-6 polynomial in r, then the exponent bits.
 * Below -87 the result is exactly 0 and above 88 it is e^88, so that masked scores vanish. */
INLINE f32x8 exp8(f32x8 x) {
    const f32x8 lowest = splat8(-87.0f);
    i32x8 alive = x >= lowest;
    f32x8 bounded = min8(max8(x, lowest), splat8(88.0f));
    f32x8 turns = __builtin_elementwise_roundeven(bounded * splat8(1.44269504088896341f));
    f32x8 rest = fma8(turns, splat8(-0.693359375f), bounded);
    rest = fma8(turns, splat8(2.12194440e-4f), rest);
    f32x8 sum = splat8(1.9875691500e-4f);
    sum = fma8(sum, rest, splat8(1.3981999507e-3f));
    sum = fma8(sum, rest, splat8(8.3334519073e-3f));
    sum = fma8(sum, rest, splat8(4.1665795894e-2f));
    sum = fma8(sum, rest, splat8(1.6666665459e-1f));
    sum = fma8(sum, rest, splat8(5.0000001201e-1f));
    sum = fma8(sum, rest * rest, rest) + splat8(1.0f);
    i32x8 exponent = (__builtin_convertvector(turns, i32x8) + 127) << 23;
    f32x8 result = sum * (f32x8)exponent;
    /* A NaN is not alive by comparison, yet must come out as one. */
    result = (f32x8)((i32x8)result & alive);
    return select8(x != x, x, result);
}

INLINE f32x8 tanh8(f32x8 x) { return splat8(1.0f) - splat8(2.0f) / (exp8(x + x) + splat8(1.0f)); }

#endif
