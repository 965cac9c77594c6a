// What expert_tiles.cu is made of: how many tiles there are, where a tile is, W's values in bfloat16, sums of chunks of 128
// columns.
#pragma once

#include "bfloat16.cuh"
#include "wgmma.h"  // SIZES numbers of rows: multiply(sums, w, x, add) for each; size_of(live), rows_of(size), FOR_ROWS

// What the kernel is given beside the maps of W and x; the same fields in quantized_products.py.
struct Work {
    const float* scales;  // [E, I / 128, scale_columns]
    const int* counts;    // [E]
    const int* listed;    // [E, T]: places
    u16* out;             // [T * k, N], by expert or by place
    int size_n;           // columns of the result
    int num_rows;         // T
    int chunks;           // of 128 columns of K
    int scale_columns, scale_rows;
};

constexpr int EACH = (EXPERTS + 31) / 32;  // experts among which a lane looks
static_assert(EACH <= 32);

// Of x, by a tile's size: boxes of a program's part of its rows.
struct Maps {
    TensorMap of[SIZES];
};

using Place = RingPlace<STAGES>;

struct Tiles {
    int ends[EXPERTS];        // number of tiles of an expert and of all before it
    int counts[EXPERTS + 1];  // of places of all experts before it
};

// A tile of an expert's places, all of whose tiles are about as large, and one of `parts` of the result's columns. A warp
// looks for it, in two steps.
struct Item {
    int expert, part, first, live;
    int begin;  // of its rows, by expert

    __device__ __forceinline__ Item(const Tiles& tiles, int number, int parts) {
        int tile = number / parts, lane = threadIdx.x % 32;
        part = number % parts;
        u32 behind = __ballot_sync(0xffffffff, tiles.ends[min((lane + 1) * EACH, EXPERTS) - 1] > tile);
        expert = (__ffs(behind) - 1) * EACH;
        behind = __ballot_sync(0xffffffff, tiles.ends[min(expert + lane, EXPERTS - 1)] > tile);
        expert += __ffs(behind) - 1;
        int before = expert > 0 ? tiles.ends[expert - 1] : 0, all = tiles.ends[expert] - before;
        int count = tiles.counts[expert + 1] - tiles.counts[expert], share = ((count + all - 1) / all + 7) / 8 * 8;
        first = (tile - before) * share;
        live = min(share, count - first);
        begin = tiles.counts[expert] + first;
    }

    __device__ __forceinline__ const int* places(const Work& work) const {
        return work.listed + static_cast<long long>(expert) * work.num_rows + first;
    }
};

// Count tiles: all threads.
__device__ __forceinline__ void count_tiles(const Work& work, Tiles& tiles) {
    for (int e = threadIdx.x; e < EXPERTS; e += blockDim.x) {
        tiles.counts[e] = work.counts[e];
        tiles.ends[e] = (tiles.counts[e] + MOST - 1) / MOST;
    }
    __syncthreads();
    if (threadIdx.x < 64) {  // a warp adds up tiles, another one places
        int* numbers = threadIdx.x < 32 ? tiles.ends : tiles.counts;
        int before = 0, lane = threadIdx.x % 32;
        for (int begin = 0; begin < EXPERTS; begin += 32) {
            int e = begin + lane, own = e < EXPERTS ? numbers[e] : 0, sum = own;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                int other = __shfl_up_sync(0xffffffff, sum, step);
                if (lane >= step) sum += other;
            }
            sum += before;
            if (e < EXPERTS) numbers[e] = threadIdx.x < 32 ? sum : sum - own;
            before = __shfl_sync(0xffffffff, sum, 31);
        }
        if (threadIdx.x == 32) numbers[EXPERTS] = before;
    }
    __syncthreads();
}

// Two values in bfloat16. Their exponents are 120 too small at first; NaN becomes 480.
__device__ __forceinline__ u32 widened(const char* two) {
    u32 values = *reinterpret_cast<const u16*>(two);
    asm("prmt.b32 %0, %1, %2, 0x1804;" : "=r"(values) : "r"(values), "r"(0));
    values = static_cast<u32>(static_cast<int>(values) >> 4) & 0x87f087f0;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(values) : "r"(values), "r"(0x7b807b80));
    return values;
}

template <int SUMS>
__device__ __forceinline__ void settle(float (&sums)[SUMS]) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Add the sums of a chunk, by its scales.
template <int SUMS>
__device__ __forceinline__ void add_chunk(float (&y)[SUMS], float (&part)[SUMS], float upper, float lower) {
    settle(part);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) y[i] = __fmaf_rn(part[i], i % 4 < 2 ? upper : lower, y[i]);
}

// Eight rows of W by two of x become two rows of eight columns.
__device__ __forceinline__ void store_across(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}
