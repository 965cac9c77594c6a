// The second product of the experts of one row in 4 bits, their sum, and what is added to that, on Hopper.
//
// A program has 16 columns, and PARTS warps an expert, whose rows of W are on their way before the first product has
// ended. Each has some columns of K.
// Results are added in the order of their weights. Bits are those of `quantized_products.py`.
//
//     HIDDEN, INNER   columns of the result, and of a gated product     TOP_K   experts     SHARED, WIDE: expert_sum.cuh
//     PARTS           warps of an expert, each with whole groups of K

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

constexpr int GROUPS = INNER / 128 / PARTS, COLUMNS = GROUPS * 128;  // of a warp
constexpr int ROW_BYTES = INNER / 2;
constexpr int PITCH = ROW_BYTES + 16;  // rows of W lie in different banks
constexpr int W_BYTES = 16 * PITCH, X_BYTES = 2 * COLUMNS;

// The columns of a warp's expert: every piece is asked for before the first one is written.
__device__ __forceinline__ void take_x(char* to, const u16* x) {
    constexpr int PIECES = COLUMNS / 8, TURNS = (PIECES + 31) / 32;
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

extern "C" __global__ void __launch_bounds__(32 * TOP_K * PARTS) expert_down(const __grid_constant__ Work work) {
    extern __shared__ __align__(128) char memory[];
    __shared__ u64 barriers[TOP_K];
    __shared__ float results[TOP_K][16];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * 16;
    int place = warp / PARTS, part = warp % PARTS;
    char *w = memory + place * W_BYTES, *x = memory + TOP_K * W_BYTES + warp * X_BYTES;
    let_next_begin();
    // The choice, and what is added, were written before the gated product, which waited before this kernel began.
    long long expert = work.experts[place], matrix = expert * HIDDEN + column;
    if (part == 0) {
        if (lane == 0) {
            set_up(barriers + place, 1);
            show_to_copies();
            expect(barriers + place, 16 * ROW_BYTES);
        }
        __syncwarp();
        const char* from = work.weight + (matrix + lane) * ROW_BYTES;
        if (lane < 16) copy_bytes(shared(w + lane * PITCH), from, ROW_BYTES, shared(barriers + place));
    }
    if (PARTS > 1) __syncthreads();  // barriers are set up
    float2 scales[GROUPS];  // of rows g and g + 8
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
        const float* from = work.scales + ((expert * PARTS + part) * GROUPS + i) * HIDDEN + column + lane / 4;
        scales[i] = make_float2(from[0] * LEFT_OUT, from[8] * LEFT_OUT);
    }
    Added added(work, 0, column, threadIdx.x < 16);
    wait_for_kernels_before();
    take_x(x, work.gated + warp * COLUMNS);
    __syncwarp();
    wait(barriers + place, 0);
    float2 parts[GROUPS];
    u32 from = shared(w) + part * GROUPS * 64 + lane % 16 * PITCH + lane / 16 * 16;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        u32 words[2][4];
        float sums[4];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            load_matrices(from + group * 64 + i * 32, words[i][0], words[i][1], words[i][2], words[i][3]);
        multiply_group(sums, words, x + group * 256 + lane % 4 * 8);
        parts[group] = make_float2(sums[0], sums[2]);
    }
#pragma unroll
    for (int turn = 0; turn < PARTS; ++turn) {  // sums of parts are continued in their order
        if (turn > 0) __syncthreads();
        if (turn != part) continue;
        float(&to)[16] = results[place];
        float2 sums = turn > 0 ? make_float2(to[lane / 4], to[lane / 4 + 8]) : make_float2(0.0f, 0.0f);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            sums.x = __fmaf_rn(parts[group].x, scales[group].x, sums.x);
            sums.y = __fmaf_rn(parts[group].y, scales[group].y, sums.y);
        }
        bool ends = turn + 1 == PARTS;
        __syncwarp();
        if (lane % 4 == 0) {
            to[lane / 4] = ends ? bfloat16(rounded(sums.x)) : sums.x;
            to[lane / 4 + 8] = ends ? bfloat16(rounded(sums.y)) : sums.y;
        }
    }
    __syncthreads();
    if (warp == 0) added.add_up(work, results);
}
