// Values of W in 4 bits, of which a warp makes products.
#pragma once

#include "hopper.cuh"

// Two pairs of values in an instruction each for masks and for zero points, which are 8. In bfloat16 the bits 0..255 are
// so many times 2^-133: of the low 4 bits of bytes v becomes (v - 8) 2^-7, of the high ones (v - 8) 2^-3.
template <bool HIGH>
__device__ __forceinline__ u32 widened_4_bits(u32 word) {
    constexpr u32 MASK = HIGH ? 0x00f000f0 : 0x000f000f, POWER_126 = 0x7e807e80, ZERO = HIGH ? 0xbf80bf80 : 0xbd80bd80;
    u32 values;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(values) : "r"(word & MASK), "r"(POWER_126), "r"(ZERO));
    return values;
}

constexpr float LEFT_OUT = 8.0f;  // by what sums of a group are too small: low columns of x are 16 times too large

// `columns(step)`: the lane's own columns of x, as `placed` has them.
template <bool HIGH, class Columns>
__device__ __forceinline__ void multiply_half(float (&sums)[4], const u32 (&words)[2][4], Columns columns) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        u32 upper = words[step / 2][step % 2 * 2], lower = words[step / 2][step % 2 * 2 + 1];
        uint2 own = columns(step);
        u32 a[4] = {
            widened_4_bits<HIGH>(upper), widened_4_bits<HIGH>(lower), widened_4_bits<HIGH>(upper >> 8),
            widened_4_bits<HIGH>(lower >> 8)
        };
        u32 b[2] = {own.x, own.y};
        multiply16(sums, a, b);
    }
}

// The sums of a group of 128 columns: rows g and g + 8 of W with columns 2 t and 2 t + 1 of x. Low values of all bytes
// come before high ones. `columns(i)`: the lane's own, of 16 columns after another.
template <class Columns>
__device__ __forceinline__ void multiply_placed(float (&sums)[4], const u32 (&words)[2][4], Columns columns) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = 0.0f;
    multiply_half<false>(sums, words, columns);
    multiply_half<true>(sums, words, [&](int step) { return columns(step + 4); });
}

// The same. `x`: the lane's own columns.
__device__ __forceinline__ void multiply_group(float (&sums)[4], const u32 (&words)[2][4], const char* x) {
    multiply_placed(sums, words, [&](int i) { return *reinterpret_cast<const uint2*>(x + i * 32); });
}

__device__ __forceinline__ u32 times_16(u32 pair) {
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(pair), "r"(0x41804180));
    return pair;
}

// Four neighbouring columns of x in the order in which a word has its values. `low`: of the first half of a group.
__device__ __forceinline__ uint2 placed(uint2 x, bool low) {
    if (low) x = make_uint2(times_16(x.x), times_16(x.y));
    return make_uint2(__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.x, x.y, 0x7632));
}

// Eight of them. `piece`: of 8 columns among all.
__device__ __forceinline__ uint4 placed(uint4 x, int piece) {
    uint2 first = placed(make_uint2(x.x, x.y), piece % 16 < 8), second = placed(make_uint2(x.z, x.w), piece % 16 < 8);
    return make_uint4(first.x, first.y, second.x, second.y);
}

// What the product of a group takes of 16 rows of W, whose last eight are `half` bytes behind the first ones. A line of
// 128 bytes has two groups. Lanes have words of rows g and g + 8.
__device__ __forceinline__ void load_words(u32 (&words)[2][4], u32 line, int half, int group) {
    int lane = threadIdx.x % 32;
    u32 from = line + lane / 8 % 2 * half + lane % 8 * 128;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        u32 at = from + ((group % 2 * 4 + i * 2 + lane / 16) ^ lane % 8) * 16;
        load_matrices(at, words[i][0], words[i][1], words[i][2], words[i][3]);
    }
}
