// The end of a linear whose result is added to a residual, and prepared for the norm after it: eight columns of a thread.
#pragma once

#include "fragments.cuh"

// What a thread adds to eight columns of a row, and the weights of the norm.
struct Addends {
    uint4 residual = {0, 0, 0, 0}, norm = {0, 0, 0, 0};

    __device__ __forceinline__ Addends(const u16* of_row, const u16* of_norm, int column, bool inside) {
        if (!inside) return;
        residual = *reinterpret_cast<const uint4*>(of_row + column);
        norm = *reinterpret_cast<const uint4*>(of_norm + column);
    }
};

__device__ __forceinline__ void unpack(float (&values)[8], const uint4& packed) {
    const u32 pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        values[2 * i] = widen_bfloat16(pairs[i]).x;
        values[2 * i + 1] = widen_bfloat16(pairs[i]).y;
    }
}

__device__ __forceinline__ uint4 round8(const float (&values)[8]) {
    u32 low = round_bfloat16(values[0], values[1]), next = round_bfloat16(values[2], values[3]);
    return {low, next, round_bfloat16(values[4], values[5]), round_bfloat16(values[6], values[7])};
}

// Write the sum with the residual, and that times the norm's weights. Returns the sum of squares of 64 columns of a row,
// of which eight neighbouring threads have eight each.
__device__ __forceinline__ float write_sum(
    float (&y)[8], const Addends& addends, u16* out, u16* weighted, long long at, bool inside
) {
    float values[8], weights[8], squares[8];
    unpack(values, addends.residual);
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = __fadd_rn(y[i], values[i]);
    uint4 rounded = round8(y);
    unpack(values, rounded);
    unpack(weights, addends.norm);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        squares[i] = inside ? __fmul_rn(values[i], values[i]) : 0;
        weights[i] = __fmul_rn(weights[i], values[i]);
    }
    if (inside) {
        *reinterpret_cast<uint4*>(out + at) = rounded;
        *reinterpret_cast<uint4*>(weighted + at) = round8(weights);
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2)  // neighbours first, as ordered_quantized.py adds them
#pragma unroll
        for (int i = 0; i < 8; i += 2 * step) squares[i] = __fadd_rn(squares[i], squares[i + step]);
    float sum = squares[0];
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
    return sum;
}
