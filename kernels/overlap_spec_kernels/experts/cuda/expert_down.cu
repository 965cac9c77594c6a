// The second product of the experts of one row in 4 bits, their sum, and what is added to that, on Hopper.
//
// A program has 16 columns, and a warp an expert, whose rows of W are on their way before the first product has ended.
// Results are added in the order of their weights. Bits are those of `quantized_products.py`.
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

extern "C" __global__ void __launch_bounds__(32 * TOP_K) expert_down(const __grid_constant__ Work work) {
    extern __shared__ __align__(128) char memory[];
    __shared__ u64 barriers[TOP_K];
    __shared__ float results[TOP_K][16];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * 16;
    char *w = memory + warp * W_BYTES, *x = memory + TOP_K * W_BYTES + warp * X_BYTES;
    let_next_begin();
    // The choice, and what is added, were written before the gated product, which waited before this kernel began.
    long long matrix = work.experts[warp] * HIDDEN + column;
    if (lane == 0) {
        set_up(barriers + warp, 1);
        show_to_copies();
        expect(barriers + warp, 16 * ROW_BYTES);
    }
    __syncwarp();
    if (lane < 16)
        copy_bytes(shared(w + lane * PITCH), work.weight + (matrix + lane) * ROW_BYTES, ROW_BYTES, shared(barriers + warp));
    float2 scales[GROUPS];  // of rows g and g + 8
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
        const float* from = work.scales + (work.experts[warp] * GROUPS + i) * HIDDEN + column + lane / 4;
        scales[i] = make_float2(from[0], from[8]);
    }
    Added added(work, 0, column);
    wait_for_kernels_before();
    for (int i = lane; i < INNER / 4; i += 32)
        reinterpret_cast<uint2*>(x)[i] = placed(reinterpret_cast<const uint2*>(work.gated + warp * INNER)[i]);
    __syncwarp();
    wait(barriers + warp, 0);
    float2 sums = make_float2(0.0f, 0.0f);
    u32 from = shared(w) + lane % 16 * PITCH + lane / 16 * 16;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        u32 words[2][4];
        float part[4];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            load_matrices(from + group * 64 + i * 32, words[i][0], words[i][1], words[i][2], words[i][3]);
        multiply_group(part, words, x + group * 256 + lane % 4 * 8);
        sums.x = __fmaf_rn(part[0], scales[group].x, sums.x);
        sums.y = __fmaf_rn(part[2], scales[group].y, sums.y);
    }
    if (lane % 4 == 0) {
        results[warp][lane / 4] = bfloat16(rounded(sums.x));
        results[warp][lane / 4 + 8] = bfloat16(rounded(sums.y));
    }
    __syncthreads();
    if (warp == 0) added.add_up(work, results);
}
