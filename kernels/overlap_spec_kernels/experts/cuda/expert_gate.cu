// silu(gate) * up of the experts of one row, in bfloat16, or in 4 bits with scales of groups of 128 columns.
//
// A warp has a tile: 8 columns of gate and the same of up of an expert, so 16 rows of W, from the first column of K to the
// last. Chunks of columns come through its stages as boxes, in which 8 rows of 128 bytes lie one behind another,
// swizzled. All programs run at once, a tile for each warp. They begin while the router still runs, and ask for weights
// as soon as it has chosen a place's expert.
//
// A product adds 16 columns of K at once, in their order; in 4 bits sums of a group are scaled, and added in theirs. So
// bits are those of `products.py` and `quantized_products.py`.
//
// The command line defines the names below. Where it is launched: sum_of_experts.py.
//
//     HIDDEN, INNER   columns of x, and of the result      BITS   16 or 4      TILES   of all programs
//     CHUNK           columns that a stage has             STAGES of a warp    WARPS   of a program

#include "bfloat16.cuh"
#include "four_bits.cuh"

// What the kernel is given beside the map of W; the same fields in sum_of_experts.py.
struct Work {
    const u16* x;              // [HIDDEN]
    const long long* experts;  // [TOP_K], below 0 until they are chosen
    const float* scales;       // [E, HIDDEN / 128, 2 INNER], in 4 bits
    u16* out;                  // [TOP_K, INNER]
};

constexpr int LINE = 128;                                  // bytes of a row that lie side by side
constexpr int CHUNKS = HIDDEN / CHUNK, LINES = CHUNK * BITS / 8 / LINE;
constexpr int HALF = LINES * 8 * LINE, STAGE = 2 * HALF;   // gate's rows, and up's
constexpr int X_AT = WARPS * STAGES * STAGE;
static_assert(CHUNKS * CHUNK == HIDDEN && LINES * LINE * 8 == CHUNK * BITS && CHUNKS >= STAGES);

struct Tile {
    char* stages;
    u64* barriers;
    int block;  // of 8 rows of W: of gate

    // Begin to copy a chunk; by one lane.
    __device__ __forceinline__ void ask(const TensorMap* map, int chunk) const {
        u32 to = shared(stages + chunk % STAGES * STAGE);
        u64* barrier = barriers + chunk % STAGES;
        expect(barrier, STAGE);
        copy_box(to, map, barrier, chunk * LINES, block);
        copy_box(to + HALF, map, barrier, chunk * LINES, block + INNER / 8);
    }

    __device__ __forceinline__ void wait_for(int chunk) const { wait(barriers + chunk % STAGES, chunk / STAGES % 2); }

    // The lane's address of two pieces of 16 bytes, of which the first is `piece`, of a line of its row.
    __device__ __forceinline__ u32 address(int chunk, int line, int piece) const {
        int lane = threadIdx.x % 32, row = lane % 8;
        u32 of_row = shared(stages + chunk % STAGES * STAGE) + lane / 8 % 2 * HALF + line * 8 * LINE + row * LINE;
        return of_row + ((piece + lane / 16) ^ row) * 16;
    }
};

constexpr int COLUMNS = 8, GROUPS = HIDDEN / 128;

__device__ __forceinline__ void add_scaled(float (&sums)[4], const float (&part)[4], float2 scales) {
    sums[0] = __fmaf_rn(part[0], scales.x, sums[0]);
    sums[2] = __fmaf_rn(part[2], scales.y, sums[2]);
}

// ---- products of a chunk: rows g and g + 8 of W are gate's and up's column g, in sums 0 and 2 ----

// `x`: the columns of the chunk.
__device__ __forceinline__ void multiply_in_16_bits(float (&sums)[4], const Tile& tile, int chunk, const char* x) {
    const char* own = x + threadIdx.x % 4 * 4;
#pragma unroll
    for (int line = 0; line < LINES; ++line) {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const char* at = own + (line * 4 + step) * 32;
            u32 a[4], b[2] = {*reinterpret_cast<const u32*>(at), *reinterpret_cast<const u32*>(at + 16)};
            load_matrices(tile.address(chunk, line, step * 2), a[0], a[1], a[2], a[3]);
            multiply16(sums, a, b);
        }
    }
}

// A line has two groups. `scales`: of the lane's column of gate and of up, of groups of the chunk, COLUMNS apart.
__device__ __forceinline__ void multiply_in_4_bits(
    float (&sums)[4], const Tile& tile, int chunk, const char* x, const float2* scales
) {
    const char* own = x + threadIdx.x % 4 * 8;
#pragma unroll
    for (int group = 0; group < 2 * LINES; ++group) {
        u32 words[2][4];
        float part[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 at = tile.address(chunk, group / 2, group % 2 * 4 + i * 2);
            load_matrices(at, words[i][0], words[i][1], words[i][2], words[i][3]);
        }
        multiply_group(part, words, own + group * 256);
        add_scaled(sums, part, scales[group * COLUMNS]);
    }
}

// The scales of the 8 columns of gate and of up.
__device__ __forceinline__ void take_scales(float2* to, const Work& work, long long expert, int first) {
#pragma unroll
    for (int at = threadIdx.x % 32; at < GROUPS * COLUMNS; at += 32) {
        const float* from = work.scales + (expert * GROUPS + at / COLUMNS) * 2 * INNER + first + at % COLUMNS;
        to[at] = make_float2(from[0], from[INNER]);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) expert_gate(
    const __grid_constant__ TensorMap map, const __grid_constant__ Work work
) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ u64 barriers[WARPS * STAGES];
    __shared__ int experts[WARPS];
    __shared__ float2 scales[BITS < 16 ? WARPS : 1][GROUPS * COLUMNS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, number = blockIdx.x * WARPS + warp;
    int place = number / (INNER / 8), column = number % (INNER / 8) * 8;
    Tile tile = {memory + warp * STAGES * STAGE, barriers + warp * STAGES, 0};
    if (threadIdx.x == 0) {
        prefetch_map(&map);
        for (int i = 0; i < WARPS * STAGES; ++i) set_up(barriers + i, 1);
        show_to_copies();
    }
    if (threadIdx.x < WARPS && blockIdx.x * WARPS + threadIdx.x < TILES)
        experts[threadIdx.x] = chosen(work.experts + (blockIdx.x * WARPS + threadIdx.x) / (INNER / 8));
    __syncthreads();
    if (number < TILES) {
        tile.block = (experts[warp] * 2 * INNER + column) / 8;
        if (lane == 0) {
#pragma unroll
            for (int chunk = 0; chunk < STAGES; ++chunk) tile.ask(&map, chunk);
        }
        if (BITS < 16) take_scales(scales[warp], work, experts[warp], column);
    }
    wait_for_kernels_before();
    let_next_begin();
    for (int i = threadIdx.x; i < HIDDEN / 4; i += 32 * WARPS) {
        uint2 own = reinterpret_cast<const uint2*>(work.x)[i];
        reinterpret_cast<uint2*>(memory + X_AT)[i] = BITS == 4 ? placed(own) : own;
    }
    __syncthreads();
    if (number >= TILES) return;
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const char* x = memory + X_AT + chunk * CHUNK * 2;
        tile.wait_for(chunk);
        const float2* own = scales[warp] + chunk * (CHUNK / 128) * COLUMNS + lane / 4;
        if constexpr (BITS == 16) multiply_in_16_bits(sums, tile, chunk, x);
        else multiply_in_4_bits(sums, tile, chunk, x, own);
        __syncwarp();
        if (lane == 0 && chunk + STAGES < CHUNKS) tile.ask(&map, chunk + STAGES);
    }
    if (lane % 4 == 0) work.out[place * INNER + column + lane / 4] = rounded(gated(sums[0], sums[2]));
}
