// Where each expert is chosen, for many rows: its places among the T * TOP_K, and rows of x by expert.
//
//     list_places  the places of each expert, ascending, and how many they are
//     gather_rows  the row of x of each listed place, those of an expert side by side
//
// A program has ROWS rows. It counts the places of all rows before them, and keeps a bit for each of its own rows that has
// chosen an expert. The rank of a place is the sum of both.
//
// The command line defines TOP_K. Where it is launched: products.py.

#include "hopper.cuh"

// What the kernels are given; the same fields in products.py.
struct Work {
    const long long* experts;   // [T, TOP_K], of a row distinct
    int* counts;                // [E]
    int* listed;                // [E, T]
    const uint4* x;             // [T, H], rows x_stride apart
    uint4* out;                 // [T * TOP_K, H]
    int num_rows, num_experts;  // T, E
    int x_stride, pieces;       // of 16 bytes: from row to row, and of a row
};

constexpr int ROWS = 64, THREADS = 1024, MOST_EXPERTS = 1024, AT_ONCE = 4;

struct Shared {
    int before[MOST_EXPERTS], after[MOST_EXPERTS];  // places of the rows before the program's, and behind them
    u64 rows[MOST_EXPERTS];                         // of the program, one bit each
    int positions[ROWS * TOP_K];                    // of the program's places, by expert
    int sums[THREADS / 32];
};

// The places of a program.
struct Own {
    int first, count;

    __device__ __forceinline__ explicit Own(const Work& work)
        : first(blockIdx.x * ROWS * TOP_K), count(min(ROWS * TOP_K, work.num_rows * TOP_K - first)) {}
};

__device__ __forceinline__ void count_places(const long long* experts, int count, int* counts) {
#pragma unroll 8
    for (int i = threadIdx.x; i < count; i += THREADS) atomicAdd(&counts[experts[i]], 1);
}

// What all threads begin with, in a kernel that may begin early.
__device__ __forceinline__ void mark_rows(const Work& work, Shared& shared_, const Own& own) {
    int e = threadIdx.x;
    shared_.before[e] = shared_.after[e] = 0;
    shared_.rows[e] = 0;
    __syncthreads();
    wait_for_kernels_before();
    let_next_begin();
    count_places(work.experts, own.first, shared_.before);
    for (int i = threadIdx.x; i < own.count; i += THREADS)
        atomicOr(&shared_.rows[work.experts[own.first + i]], static_cast<u64>(1) << i / TOP_K);
}

// Among the places of its expert. `i`: of the program's places.
__device__ __forceinline__ int rank_of(const Shared& shared_, int expert, int i) {
    return shared_.before[expert] + __popcll(shared_.rows[expert] & ((static_cast<u64>(1) << i / TOP_K) - 1));
}

extern "C" __global__ void __launch_bounds__(THREADS) list_places(const __grid_constant__ Work work) {
    __shared__ Shared shared_;
    Own own(work);
    mark_rows(work, shared_, own);
    __syncthreads();
    for (int i = threadIdx.x; i < own.count; i += THREADS) {
        int expert = static_cast<int>(work.experts[own.first + i]);
        work.listed[static_cast<long long>(expert) * work.num_rows + rank_of(shared_, expert, i)] = own.first + i;
    }
    int e = threadIdx.x;
    if (blockIdx.x + 1 == gridDim.x && e < work.num_experts)
        work.counts[e] = shared_.before[e] + __popcll(shared_.rows[e]);
}

// Add to `before` the places of all experts before: all threads, of which each has an expert.
__device__ __forceinline__ void add_experts_before(Shared& shared_) {
    int e = threadIdx.x, lane = e % 32, own = shared_.before[e] + __popcll(shared_.rows[e]) + shared_.after[e], sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(0xffffffff, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) shared_.sums[e / 32] = sum;
    __syncthreads();
    for (int warp = 0; warp < e / 32; ++warp) sum += shared_.sums[warp];
    shared_.before[e] += sum - own;
}

extern "C" __global__ void __launch_bounds__(THREADS) gather_rows(const __grid_constant__ Work work) {
    __shared__ Shared shared_;
    Own own(work);
    int behind = own.first + own.count, lane = threadIdx.x % 32;
    mark_rows(work, shared_, own);
    count_places(work.experts + behind, work.num_rows * TOP_K - behind, shared_.after);
    __syncthreads();
    add_experts_before(shared_);
    __syncthreads();
    for (int i = threadIdx.x; i < own.count; i += THREADS)
        shared_.positions[i] = rank_of(shared_, static_cast<int>(work.experts[own.first + i]), i);
    __syncthreads();
    for (int row = threadIdx.x / 32; row < own.count / TOP_K; row += THREADS / 32) {
        const uint4* from = work.x + static_cast<long long>(blockIdx.x * ROWS + row) * work.x_stride;
        for (int begin = lane; begin < work.pieces; begin += 32 * AT_ONCE) {
            uint4 values[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) values[i] = from[min(begin + i * 32, work.pieces - 1)];
            for (int k = 0; k < TOP_K; ++k) {
                uint4* to = work.out + static_cast<long long>(shared_.positions[row * TOP_K + k]) * work.pieces;
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i)
                    if (begin + i * 32 < work.pieces) to[begin + i * 32] = values[i];
            }
        }
    }
}
