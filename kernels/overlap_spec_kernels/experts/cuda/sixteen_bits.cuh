// Numbers in 16 bits of the type that the command line names: float16 with FLOAT16=1, else bfloat16.
#pragma once

#include "bfloat16.cuh"

#if FLOAT16
__device__ __forceinline__ float widen(u16 value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
    return wide;
}

__device__ __forceinline__ u16 narrow(float value) {
    u16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
}

// sums += a b: a [16, 16], b [16, 8].
__device__ __forceinline__ void multiply_narrow(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#else
__device__ __forceinline__ float widen(u16 value) { return bfloat16(value); }

__device__ __forceinline__ u16 narrow(float value) { return rounded(value); }

__device__ __forceinline__ void multiply_narrow(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    multiply16(sums, a, b);
}
#endif
