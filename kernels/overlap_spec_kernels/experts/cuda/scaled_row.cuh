// One row that the kernels which read it scale themselves, before the kernel that writes it scaled has ended: the bits
// are those of `scale_of_row` of normed.py in four warps.
#pragma once

#include "bfloat16.cuh"

// Of the sums of squares of its parts, at most 128, by a warp. `size`: columns of the row.
__device__ __forceinline__ float scale_of_row(const float* squares, int parts, int size, float eps) {
    float sums[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int part = i * 32 + threadIdx.x % 32;
        sums[i] = part < parts ? squares[part] : 0.0f;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = __fadd_rn(sums[i], __shfl_xor_sync(0xffffffff, sums[i], step));
    }
    float sum = __fadd_rn(__fadd_rn(sums[0], sums[2]), __fadd_rn(sums[1], sums[3]));
    return quotient(1.0f, root_of(__fadd_rn(quotient(sum, static_cast<float>(size)), eps)));
}

// Two values times the scale, rounded.
__device__ __forceinline__ u32 scaled(u32 pair, float scale) {
    return rounded(__fmul_rn(bfloat16(pair), scale)) | rounded(__fmul_rn(bfloat16(pair >> 16), scale)) << 16;
}

__device__ __forceinline__ uint4 scaled(uint4 x, float scale) {
    return make_uint4(scaled(x.x, scale), scaled(x.y, scale), scaled(x.z, scale), scaled(x.w, scale));
}
