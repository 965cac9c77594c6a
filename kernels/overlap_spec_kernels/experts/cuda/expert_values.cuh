// Values of W in float8, of which a warp makes products.
#pragma once

#include "bfloat16.cuh"

// Two of the four values in a word, in bfloat16. Their exponents are 120 too small at first; NaN becomes 480.
template <u32 BYTES>
__device__ __forceinline__ u32 widened(u32 word) {
    u32 values;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(values) : "r"(word), "r"(0), "n"(BYTES));
    values = static_cast<u32>(static_cast<int>(values) >> 4) & 0x87f087f0;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(values) : "r"(values), "r"(0x7b807b80));
    return values;
}

constexpr u32 FIRST_TWO = 0x1804, LAST_TWO = 0x3a24;  // bytes 1, 0 and 3, 2, each above zeros or the lower one's sign

// The sums of a block: rows g and g + 8 of W with columns 2 t and 2 t + 1 of x.
__device__ __forceinline__ void multiply(float (&sums)[4], const u32 (&words)[4][4], const uint2 (&columns)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        u32 upper = words[i / 2][i % 2 * 2], lower = words[i / 2][i % 2 * 2 + 1];
        u32 a[4] = {
            widened<FIRST_TWO>(upper), widened<FIRST_TWO>(lower), widened<LAST_TWO>(upper), widened<LAST_TWO>(lower)
        };
        u32 b[2] = {columns[i].x, columns[i].y};
        multiply16(sums, a, b);
    }
}

// The same as four_bits.cuh has it of 4 bits. `x`: the lane's own columns.
__device__ __forceinline__ void multiply_group(float (&sums)[4], const u32 (&words)[4][4], const char* x) {
    uint2 columns[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) columns[i] = *reinterpret_cast<const uint2*>(x + i * 32);
    multiply(sums, words, columns);
}
