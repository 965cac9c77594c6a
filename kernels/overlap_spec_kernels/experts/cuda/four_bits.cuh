// Values of W in 4 bits, of which a warp makes products: for expert_gate.cu and expert_down.cu.
#pragma once

#include "hopper.cuh"

// 8 values of a word as the first or last ones of two pairs. 128 + v is 0x4300 + v, and a zero point is 8.
__device__ __forceinline__ u32 widened_4_bits(u32 word) {
    u32 values;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(values) : "r"(word), "r"(0x000f000f), "r"(0x43004300));
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(values) : "r"(values), "r"(0x43084308));
    return values;
}

// The sums of a group of 128 columns: rows g and g + 8 of W with columns 2 t and 2 t + 1 of x, as `placed` has it. Low
// values of all bytes come before high ones. `x`: the lane's own columns.
__device__ __forceinline__ void multiply_group(float (&sums)[4], const u32 (&words)[2][4], const char* x) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = 0.0f;
#pragma unroll
    for (int step = 0; step < 8; ++step) {
        u32 upper = words[step / 2 % 2][step % 2 * 2], lower = words[step / 2 % 2][step % 2 * 2 + 1];
        int shift = step / 4 * 4;
        uint2 columns = *reinterpret_cast<const uint2*>(x + step * 32);
        u32 a[4] = {
            widened_4_bits(upper >> shift), widened_4_bits(lower >> shift), widened_4_bits(upper >> (shift + 8)),
            widened_4_bits(lower >> (shift + 8))
        };
        u32 b[2] = {columns.x, columns.y};
        multiply16(sums, a, b);
    }
}

// Each four neighbouring columns of x in the order in which a word has its values.
__device__ __forceinline__ uint4 placed(uint4 x) {
    return make_uint4(
        __byte_perm(x.x, x.y, 0x5410), __byte_perm(x.x, x.y, 0x7632), __byte_perm(x.z, x.w, 0x5410),
        __byte_perm(x.z, x.w, 0x7632)
    );
}
