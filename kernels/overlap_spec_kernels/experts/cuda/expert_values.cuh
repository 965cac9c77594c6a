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

// What the product of a block takes of 16 rows of W, whose last eight are `half` bytes behind the first ones. Lanes have
// four neighbouring columns of rows g and g + 8.
__device__ __forceinline__ void load_words(u32 (&words)[4][4], u32 block, int half) {
    int lane = threadIdx.x % 32;
    u32 from = block + lane / 8 % 2 * half + lane % 8 * 128;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        u32 at = from + ((pair * 2 + lane / 16) ^ lane % 8) * 16;
        load_matrices(at, words[pair][0], words[pair][1], words[pair][2], words[pair][3]);
    }
}

// What it takes of x, of which `own` has the lane's own columns.
__device__ __forceinline__ void load_columns(uint2 (&columns)[8], const char* own) {
#pragma unroll
    for (int i = 0; i < 8; ++i) columns[i] = *reinterpret_cast<const uint2*>(own + i * 32);
}

// `take(block, sums)` of all blocks, two of which are multiplied at once. `load(words, block)` gives what they take of
// W.
template <int COUNT, class Load, class Take>
__device__ __forceinline__ void multiply_all(Load load, const char* own, Take take) {
#pragma unroll
    for (int block = 0; block < COUNT; block += 2) {
        u32 words[2][4][4];
        uint2 columns[2][8];
        float sums[2][4];
        int last = min(block + 1, COUNT - 1);
        load(words[0], block);
        load_columns(columns[0], own + block * 256);
        load(words[1], last);
        load_columns(columns[1], own + last * 256);
        multiply(sums[0], words[0], columns[0]);
        multiply(sums[1], words[1], columns[1]);
        take(block, sums[0]);
        if (last > block) take(last, sums[1]);
    }
}

// The same as four_bits.cuh has it of 4 bits. `x`: the lane's own columns.
__device__ __forceinline__ void multiply_group(float (&sums)[4], const u32 (&words)[4][4], const char* x) {
    uint2 columns[8];
    load_columns(columns, x);
    multiply(sums, words, columns);
}
