// Numbers in bfloat16 that are kept as 16 bits.
#pragma once

#include "hopper.cuh"

__device__ __forceinline__ float bfloat16(u16 value) { return __uint_as_float(static_cast<u32>(value) << 16); }

__device__ __forceinline__ u16 rounded(float value) {
    u16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
}

// Of a pair the first one is in the low bits.
__device__ __forceinline__ u32 round2(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
