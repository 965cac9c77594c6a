// Values of 4 and 8 bits in fragment order (fragments.py) become operands in bfloat16, which holds them exactly.
//
// A slice of a tile gives lanes four pairs of neighbouring columns: a[0] and a[2] of row g, a[1] and a[3] of row g + 8.
#pragma once

#include "hopper.cuh"

__device__ __forceinline__ u32 subtract2(u32 a, u32 b) {
    u32 difference;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
    return difference;
}

__device__ __forceinline__ u32 multiply2(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

__device__ __forceinline__ u32 multiply_add2(u32 a, u32 b, u32 c) {
    u32 sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

// (word & mask) | bits, in one instruction.
__device__ __forceinline__ u32 select_bits(u32 word, u32 mask, u32 bits) {
    u32 selected;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(selected) : "r"(word), "r"(mask), "r"(bits));
    return selected;
}

// A slice in 4 bits: 0x4300 + v is 128 + v. `upper`, `lower`: 128 + the zero points of rows g and g + 8, twice each.
__device__ __forceinline__ void unpack_4_bits(u32 (&a)[4], u32 word, u32 upper, u32 lower) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        a[i] = subtract2(select_bits(word >> 4 * i, 0x000f000f, 0x43004300), i % 2 ? lower : upper);
}

// The same / 64, with fewer instructions. In bfloat16 the bits 0..255 are so many times 2^-133, so v needs no shift from
// bits 4..7. `upper`, `lower`: minus the zero points / 64, as `unpack_zeros` has them.
__device__ __forceinline__ void unpack_64ths(u32 (&a)[4], u32 word, u32 upper, u32 lower) {
    constexpr u32 POWER_127 = 0x7f007f00, POWER_123 = 0x7d007d00;
    a[0] = multiply_add2(word & 0x000f000f, POWER_127, upper);
    a[1] = multiply_add2(word & 0x00f000f0, POWER_123, lower);
    a[2] = multiply_add2(word >> 8 & 0x000f000f, POWER_127, upper);
    a[3] = multiply_add2(word >> 8 & 0x00f000f0, POWER_123, lower);
}

// 128 + the zero points of rows g and g + 8 -> minus the zero points / 64.
__device__ __forceinline__ u32 unpack_zeros(u32 zeros) { return multiply_add2(zeros, 0xbc80bc80, 0x40004000); }

// Two values of float8 e4m3 as a pair: `bits` has their lower 7 bits in bits 4.. of each half, `signs` their signs in
// the highest bit of each half. The exponents are 120 too small at first.
__device__ __forceinline__ u32 join_pair(u32 bits, u32 signs) {
    return multiply2(select_bits(bits, 0x07f007f0, signs & 0x80008000), 0x7b807b80);
}

// A slice in 8 bits.
__device__ __forceinline__ void unpack_8_bits(u32 (&a)[4], u32 first, u32 second) {
    a[0] = join_pair(first >> 4, first);
    a[1] = join_pair(first << 4, first << 8);
    a[2] = join_pair(second >> 4, second);
    a[3] = join_pair(second << 4, second << 8);
}

// The two halves of a pair in bfloat16.
__device__ __forceinline__ float2 widen_bfloat16(u32 pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000));
}

__device__ __forceinline__ float widen_float16(u16 value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
    return wide;
}

// Two floats, rounded to a pair in bfloat16.
__device__ __forceinline__ u32 round_bfloat16(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
