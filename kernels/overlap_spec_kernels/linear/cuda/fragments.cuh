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

// The same with nothing but masks, without zero points: in bfloat16 the bits 0..255 are so many times 2^-133. So rows g
// have v times 2^-133, and rows g + 8, whose bits are 4..7, v times 2^-129.
__device__ __forceinline__ void mask_4_bits(u32 (&a)[4], u32 word) {
    a[0] = word & 0x000f000f;
    a[1] = word & 0x00f000f0;
    a[2] = word >> 8 & 0x000f000f;
    a[3] = word >> 8 & 0x00f000f0;
}

// A word of two pairs in float8 e4m3. `first` lies where bfloat16 has sign, exponent and mantissa, and `second` in the
// bits between, so both are masks and shifts. Their exponents are 120 too small.
__device__ __forceinline__ void mask_8_bits(u32& first, u32& second, u32 word) {
    first = word & 0x87f087f0;
    second = select_bits(word << 4, 0x80f080f0, word >> 4 & 0x07000700);
}

// The same, of the right size.
__device__ __forceinline__ void unpack_8_bits(u32 (&a)[4], u32 first, u32 second) {
    constexpr u32 POWER_120 = 0x7b807b80;
    mask_8_bits(a[0], a[1], first);
    mask_8_bits(a[2], a[3], second);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = multiply2(a[i], POWER_120);
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
