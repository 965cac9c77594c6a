// The end of a row's experts: their results are added in the order of their weights, with all that is added to that.
// These are the bits of `sum_kernel` of experts_mlp.py.
//
// A file that includes this has named TOP_K, SHARED and WIDE, and a `Work` with what is read and written here.
#pragma once

#include "sixteen_bits.cuh"

// What is added to the results of 16 columns of a row, of which each thread of half a warp has one.
struct Added {
    long long at;  // of the thread's column among all
    int row, first;
    bool adds = false;  // whether the thread's half has a row
    float residual = 0.0f, beside = 0.0f, norm = 0.0f, weights[TOP_K];

    __device__ __forceinline__ Added() {}

    // Reads it. `first`: of the columns.
    template <class Work>
    __device__ __forceinline__ Added(const Work& work, int row, int first, bool adds)
        : row(row), first(first), adds(adds) {
        int lane = threadIdx.x % 16;
        at = static_cast<long long>(row) * work.size_n + first + lane;
        if (!adds) return;
        residual = widen(work.residual[static_cast<long long>(row) * work.residual_stride + first + lane]);
        norm = WIDE ? static_cast<const float*>(work.norm)[first + lane]
                    : widen(static_cast<const u16*>(work.norm)[first + lane]);
        if constexpr (SHARED) beside = widen(work.shared[at]);
#pragma unroll
        for (int i = 0; i < TOP_K; ++i) weights[i] = work.weights[row * TOP_K + i];
    }

    // By a whole warp. `results` are of each expert, rounded.
    template <class Work>
    __device__ __forceinline__ void add_up(const Work& work, const float (*results)[16]) const {
        int lane = threadIdx.x % 16;
        float total = 0.0f, square = 0.0f;
        if (adds) {
#pragma unroll
            for (int i = 0; i < TOP_K; ++i) total = __fmaf_rn(weights[i], results[i][lane], total);
            if constexpr (SHARED) total = widen(narrow(widen(narrow(total)) + beside));
            u16 value = narrow(widen(narrow(total)) + residual);
            float wide = widen(value);
            work.out[at] = value;
            work.weighted[at] = narrow(wide * norm);
            square = __fmul_rn(wide, wide);  // not one operation with the sum after it
        }
#pragma unroll
        for (int step = 8; step > 0; step /= 2) square += __shfl_xor_sync(0xffffffff, square, step);
        if (adds && lane == 0) work.squares[first / 16 * work.num_rows + row] = square;
    }
};
