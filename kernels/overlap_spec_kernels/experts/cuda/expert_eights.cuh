// The experts that some rows of x have chosen, each with up to eight of its rows at a time.
//
// A file that includes this has named TOP_K, and a `Work` with the choice.
#pragma once

#include "hopper.cuh"

constexpr int MOST_EXPERTS = 1024, MOST_ROWS = 32;

struct Lists {
    u32 rows[MOST_EXPERTS];         // those that have chosen an expert, one bit each
    u16 first[MOST_EXPERTS];        // of an expert in `listed`, if it has rows
    int listed[MOST_ROWS * TOP_K];  // expert * 4 + eight of its rows, of all that have rows
    int before[32];                 // those of a warp's experts

    // By all threads, which meet before `fill`.
    template <int THREADS>
    __device__ __forceinline__ void clear() {
        for (int i = threadIdx.x; i < MOST_EXPERTS; i += THREADS) rows[i] = 0;
    }

    // List what is chosen: all threads. Returns how many eights there are.
    template <int THREADS, class Work>
    __device__ __forceinline__ int fill(const Work& work) {
        constexpr int EACH = (MOST_EXPERTS + THREADS - 1) / THREADS;  // experts of a thread
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32, counts[EACH], own = 0, total = 0;
        for (int i = threadIdx.x; i < work.num_rows * TOP_K; i += THREADS)
            atomicOr(&rows[chosen(work.experts + i)], 1u << i / TOP_K);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            int expert = threadIdx.x * EACH + i;
            counts[i] = expert < work.num_experts ? (__popc(rows[expert]) + 7) / 8 : 0;
            own += counts[i];
        }
        int sum = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_up_sync(0xffffffff, sum, step);
            if (lane >= step) sum += other;
        }
        if (lane == 31) before[warp] = sum;
        __syncthreads();
        int at = sum - own;
        for (int i = 0; i < THREADS / 32; ++i) {
            if (i < warp) at += before[i];
            total += before[i];
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (counts[i] > 0) first[threadIdx.x * EACH + i] = static_cast<u16>(at);
            for (int number = 0; number < counts[i]; ++number)
                listed[at++] = (threadIdx.x * EACH + i) * 4 + number;
        }
        __syncthreads();
        return total;
    }
};

// Up to eight rows of x that have chosen an expert.
struct Eight {
    int expert, number;
    u32 rows;

    __device__ __forceinline__ Eight(const Lists& lists, int listed)
        : expert(lists.listed[listed] / 4), number(lists.listed[listed] % 4), rows(lists.rows[expert]) {}

    __device__ __forceinline__ int count() const { return min(__popc(rows) - number * 8, 8); }

    // Of which a column of the product is. Behind the last row: the last one.
    __device__ __forceinline__ int row(int column) const {
        u32 left = rows;
        for (int i = min(column, count() - 1) + number * 8; i > 0; --i) left &= left - 1;
        return __ffs(left) - 1;
    }

    // Where that row's choice of the expert is.
    template <class Work>
    __device__ __forceinline__ int place(const Work& work, int column) const {
        int first = row(column) * TOP_K, found = first;
#pragma unroll
        for (int i = 1; i < TOP_K; ++i)
            if (work.experts[first + i] == expert) found = first + i;
        return found;
    }
};
