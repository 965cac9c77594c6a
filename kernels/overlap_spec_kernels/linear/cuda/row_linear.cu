// residual + x W^T for one row of x and W in bfloat16, and what the norm after it needs, on Hopper (sm_90a).
//
// A program has 16 columns of the result, and all of its rows of W in shared memory before x is there: they are on their
// way while the kernel before runs. It leaves room for a program of that kernel beside it. (In Gluon, `streamed_linear.py`
// pads x to 8 rows in each stage of a ring, and so takes a whole multiprocessor.)
//
//     SIZE_K  columns of x     WARPS  of a program, which divide K     WIDE  1: the weight of the norm is float32

#include "bfloat16.cuh"

struct Work {
    const u16* x;         // [K]
    const char* weight;   // [N, K]
    const u16* residual;  // [N]
    const void* norm;     // [N]
    u16* out;             // [N]
    u16* weighted;        // [N]
    float* sums;          // [N / 16]
};

constexpr int ROW_BYTES = SIZE_K * 2, PITCH = ROW_BYTES + 16;  // rows lie in different banks
constexpr int X_AT = 16 * PITCH;
constexpr int STEPS = SIZE_K / 16 / WARPS;  // of 16 columns, of a warp
static_assert(STEPS * 16 * WARPS == SIZE_K && STEPS % 2 == 0);

// A warp's columns of x.
__device__ __forceinline__ void place_x(char* memory, const u16* x) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = warp * STEPS * 2;  // in pieces of 16 bytes
    for (int at = first + lane; at < first + STEPS * 2; at += 32)
        reinterpret_cast<uint4*>(memory + X_AT)[at] = reinterpret_cast<const uint4*>(x)[at];
    __syncwarp();
}

// Sums of a warp's columns: row g of W in the first, row g + 8 in the second. Two chains of products take turns.
__device__ __forceinline__ float2 multiply(const char* memory) {
    int lane = threadIdx.x % 32, first = threadIdx.x / 32 * STEPS * 32;  // byte of a row
    u32 w = shared(memory) + lane % 16 * PITCH + lane / 16 * 16 + first;
    const char* x = memory + X_AT + first + lane % 4 * 4;
    float sums[2][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u32 a[4], b[2] = {*reinterpret_cast<const u32*>(x + step * 32), *reinterpret_cast<const u32*>(x + step * 32 + 16)};
        load_matrices(w + step * 32, a[0], a[1], a[2], a[3]);
        multiply16(sums[step % 2], a, b);
    }
    return make_float2(sums[0][0] + sums[1][0], sums[0][2] + sums[1][2]);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) row_linear(const __grid_constant__ Work work) {
    extern __shared__ __align__(128) char memory[];
    __shared__ u64 arrived;
    __shared__ float parts[WARPS][16];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = blockIdx.x * 16 + lane % 16;
    let_next_begin();
    if (warp == 0) {
        if (lane == 0) {
            set_up(&arrived, 1);
            show_to_copies();
            expect(&arrived, 16 * ROW_BYTES);
        }
        __syncwarp();
        if (lane < 16)
            copy_bytes(shared(memory + lane * PITCH), work.weight + static_cast<long long>(n) * ROW_BYTES, ROW_BYTES, shared(&arrived));
    }
    float norm = WIDE ? static_cast<const float*>(work.norm)[n] : bfloat16(static_cast<const u16*>(work.norm)[n]);
    __syncthreads();
    wait_for_kernels_before();
    float residual = bfloat16(work.residual[n]);
    place_x(memory, work.x);
    wait(&arrived, 0);
    float2 found = multiply(memory);
    if (lane % 4 == 0) {
        parts[warp][lane / 4] = found.x;
        parts[warp][lane / 4 + 8] = found.y;
    }
    __syncthreads();
    if (warp > 0) return;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) total += parts[i][lane % 16];
    u16 value = rounded(total + residual);
    float wide = bfloat16(value), square = wide * wide;
#pragma unroll
    for (int step = 8; step > 0; step /= 2) square += __shfl_xor_sync(0xffffffff, square, step);
    if (lane < 16) {
        work.out[n] = value;
        work.weighted[n] = rounded(wide * norm);
    }
    if (lane == 0) work.sums[blockIdx.x] = square;
}
