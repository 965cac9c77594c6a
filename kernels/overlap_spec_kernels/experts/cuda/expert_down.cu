// The second product of the experts of one row in 4 bits, their sum, and what is added to that, on Hopper.
//
// A program has 16 columns, and a warp an expert, whose rows of W are on their way before the first product has ended:
// expert_gate.cu leaves room for it. Results are added in the order of their weights. Bits are those of
// `quantized_products.py`.
//
//     HIDDEN, INNER   columns of the result, and of a gated product     TOP_K   experts     SHARED, WIDE: expert_sum.cuh

#include "hopper.cuh"

#include "expert_sum.cuh"
#include "four_bits.cuh"

// What the kernel is given; the same fields in sum_of_experts.py.
struct Work {
    const char* weight;        // [E, HIDDEN, INNER / 2]
    const float* scales;       // [E, INNER / 128, HIDDEN]
    const u16* gated;          // [TOP_K, INNER]
    const long long* experts;  // [TOP_K]
    const float* weights;      // [TOP_K]
    const u16 *shared, *residual;  // [HIDDEN]
    const void* norm;          // [HIDDEN], float32 if WIDE, else bfloat16
    u16 *out, *weighted;       // [HIDDEN]
    float* squares;            // [HIDDEN / 16]
    int residual_stride, size_n, num_rows;  // of one row: 0, HIDDEN, 1
};

constexpr int GROUPS = INNER / 128, ROW_BYTES = INNER / 2;
constexpr int PITCH = ROW_BYTES + 16;  // rows of W lie in different banks
constexpr int W_BYTES = 16 * PITCH, X_BYTES = 2 * INNER;

// The columns of a warp's expert: every piece is asked for before the first one is written.
__device__ __forceinline__ void take_x(char* to, const u16* x) {
    constexpr int PIECES = INNER / 8, TURNS = (PIECES + 31) / 32;
    uint4 own[TURNS];
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
        int at = threadIdx.x % 32 + i * 32;
        if (at < PIECES) own[i] = reinterpret_cast<const uint4*>(x)[at];
    }
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
        int at = threadIdx.x % 32 + i * 32;
        if (at < PIECES) reinterpret_cast<uint4*>(to)[at] = placed(own[i], at);
    }
}

extern "C" __global__ void __launch_bounds__(32 * TOP_K) expert_down(const __grid_constant__ Work work) {
    extern __shared__ __align__(128) char memory[];
    __shared__ u64 barriers[TOP_K];
    __shared__ float results[TOP_K][16];
    int place = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * 16;
    char *w = memory + place * W_BYTES, *x = memory + TOP_K * W_BYTES + place * X_BYTES;
    let_next_begin();
    // The choice, and what is added, were written before the gated product, which waited before this kernel began.
    long long expert = work.experts[place], matrix = expert * HIDDEN + column;
    if (lane == 0) {
        set_up(barriers + place, 1);
        show_to_copies();
        expect(barriers + place, 16 * ROW_BYTES);
    }
    __syncwarp();
    const char* row = work.weight + (matrix + lane) * ROW_BYTES;
    if (lane < 16) copy_bytes(shared(w + lane * PITCH), row, ROW_BYTES, shared(barriers + place));
    float2 scales[GROUPS];  // of rows g and g + 8
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
        const float* from = work.scales + (expert * GROUPS + i) * HIDDEN + column + lane / 4;
        scales[i] = make_float2(from[0] * LEFT_OUT, from[8] * LEFT_OUT);
    }
    Added added(work, 0, column, threadIdx.x < 16);
    wait_for_kernels_before();
    take_x(x, work.gated + place * INNER);
    __syncwarp();
    wait(barriers + place, 0);
    float2 total = make_float2(0.0f, 0.0f);
    u32 from = shared(w) + lane % 16 * PITCH + lane / 16 * 16;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        u32 words[2][4];
        float sums[4];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            load_matrices(from + group * 64 + i * 32, words[i][0], words[i][1], words[i][2], words[i][3]);
        multiply_group(sums, words, x + group * 256 + lane % 4 * 8);
        total.x = __fmaf_rn(sums[0], scales[group].x, total.x);
        total.y = __fmaf_rn(sums[2], scales[group].y, total.y);
    }
    if (lane % 4 == 0) {
        results[place][lane / 4] = bfloat16(rounded(total.x));
        results[place][lane / 4 + 8] = bfloat16(rounded(total.y));
    }
    __syncthreads();
    if (place == 0) added.add_up(work, results);
}
