// silu(gate) * up of the experts of one row, in bfloat16, or in 4 bits or float8 with scales of groups of 128 columns.
//
// A tile is 8 columns of gate and the same of up of an expert, so 16 rows of W. PARTS warps share one, each with a part of
// K, whose chunks of columns come through its stages as boxes, in which 8 rows of 128 bytes lie one behind another,
// swizzled. All programs run at once. They begin while the router still runs, and ask for weights as soon as it has chosen
// a place's expert. What comes behind W comes late: so in few bits x is scaled here, before the choice, and scales are
// not waited for before products are done.
//
// A product adds 16 columns of K at once, in their order; in few bits sums of a group are scaled, and added in theirs. So
// bits are those of `products.py` and `quantized_products.py`.
//
// The command line defines the names below. Where it is launched: sum_of_experts.py.
//
//     HIDDEN, INNER   columns of x, and of the result      BITS   16, 8 or 4   TILES   of all programs
//     CHUNK           columns that a stage has             STAGES of a warp    WARPS   tiles of a program
//     PARTS           warps that share a tile, each with a part of K; 1 in 16 bits. Few leave registers for the next kernel
//     SQUARES         sums of squares of which x's scale is made; 0: x is as it is
//     SCALE_ROWS      rows of W that share scales: 1, or so many that those of a tile share them

#include "expert_values.cuh"
#include "four_bits.cuh"
#include "scaled_row.cuh"

// What the kernel is given beside the map of W; the same fields in sum_of_experts.py.
struct Work {
    const u16* x;              // [HIDDEN], times the norm's weight if SQUARES
    const long long* experts;  // [TOP_K], below 0 until they are chosen
    const float* scales;       // [E, HIDDEN / 128, SCALE_COLUMNS], in few bits
    u16* out;                  // [TOP_K, INNER]
    const float* squares;      // [SQUARES]
    float eps;
};

constexpr int LINE = 128;                                  // bytes of a row that lie side by side
constexpr int CHUNKS = HIDDEN / CHUNK / PARTS, LINES = CHUNK * BITS / 8 / LINE;
constexpr int HALF = LINES * 8 * LINE, STAGE = 2 * HALF;   // gate's rows, and up's
constexpr int X_AT = WARPS * PARTS * STAGES * STAGE;
static_assert(CHUNKS * CHUNK * PARTS == HIDDEN && LINES * LINE * 8 == CHUNK * BITS && CHUNKS >= STAGES);

struct Tile {
    char* stages;
    u64* barriers;
    int block;  // of 8 rows of W: of gate
    int line;   // first one of the warp's columns

    // Begin to copy a chunk; by one lane.
    __device__ __forceinline__ void ask(const TensorMap* map, int chunk) const {
        u32 to = shared(stages + chunk % STAGES * STAGE);
        u64* barrier = barriers + chunk % STAGES;
        expect(barrier, STAGE);
        copy_box(to, map, barrier, line + chunk * LINES, block);
        copy_box(to + HALF, map, barrier, line + chunk * LINES, block + INNER / 8);
    }

    __device__ __forceinline__ void wait_for(int chunk) const { wait(barriers + chunk % STAGES, chunk / STAGES % 2); }

    // The lane's address of two pieces of 16 bytes, of which the first is `piece`, of a line of its row.
    __device__ __forceinline__ u32 address(int chunk, int line, int piece) const {
        int lane = threadIdx.x % 32, row = lane % 8;
        u32 of_row = shared(stages + chunk % STAGES * STAGE) + lane / 8 % 2 * HALF + line * 8 * LINE + row * LINE;
        return of_row + ((piece + lane / 16) ^ row) * 16;
    }
};

constexpr int GROUPS = HIDDEN / 128 / PARTS;             // of a warp
constexpr int SCALES = SCALE_ROWS > 1 ? 1 : 8;           // of a group of gate's rows of a tile, and of up's
constexpr int SCALE_COLUMNS = (2 * INNER + SCALE_ROWS - 1) / SCALE_ROWS;
static_assert(SCALE_ROWS == 1 || SCALE_ROWS % 8 == 0);

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

// `parts`: sums of each group of the chunk, of the lane's column of gate and of up.
__device__ __forceinline__ void multiply_groups(float2* parts, const Tile& tile, int chunk, const char* x) {
    constexpr int OF_LINE = BITS < 16 ? 8 / BITS : 1, LOADS = 4 / OF_LINE;  // groups; loads of a group
#pragma unroll
    for (int group = 0; group < CHUNK / 128; ++group) {
        u32 words[LOADS][4];
        float part[4];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            u32 at = tile.address(chunk, group / OF_LINE, (group % OF_LINE * LOADS + i) * 2);
            load_matrices(at, words[i][0], words[i][1], words[i][2], words[i][3]);
        }
        multiply_group(part, words, x + group * 256 + threadIdx.x % 4 * 8);
        parts[group] = make_float2(part[0], part[2]);
    }
}

// Continue sums by those of groups, scaled. `scales`: of the lane's column, SCALES apart.
__device__ __forceinline__ void add_groups(float (&sums)[4], const float2 (&parts)[GROUPS], const float2* scales) {
    constexpr float FACTOR = BITS == 4 ? LEFT_OUT : 1.0f;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        float2 scale = scales[group * SCALES];
        sums[0] = __fmaf_rn(parts[group].x, scale.x * FACTOR, sums[0]);
        sums[2] = __fmaf_rn(parts[group].y, scale.y * FACTOR, sums[2]);
    }
}

// Ask for the scales of the warp's groups of the 8 columns of gate and of up.
__device__ __forceinline__ void ask_for_scales(float2* to, const Work& work, long long expert, int part, int first) {
#pragma unroll
    for (int at = threadIdx.x % 32; at < GROUPS * SCALES; at += 32) {
        const float* from = work.scales + ((expert * PARTS + part) * GROUPS + at / SCALES) * SCALE_COLUMNS;
        int row = first + at % SCALES;
        copy_word(shared(&to[at].x), from + row / SCALE_ROWS);
        copy_word(shared(&to[at].y), from + (row + INNER) / SCALE_ROWS);
    }
}

// All of x, by all threads: every piece is asked for before the first one is written.
__device__ __forceinline__ void take_x(char* to, const Work& work) {
    constexpr int PIECES = HIDDEN / 8, THREADS = 32 * WARPS * PARTS, TURNS = (PIECES + THREADS - 1) / THREADS;
    uint4 own[TURNS];
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
        int at = threadIdx.x + i * THREADS;
        if (at < PIECES) own[i] = reinterpret_cast<const uint4*>(work.x)[at];
    }
    float scale = SQUARES ? scale_of_row(work.squares, SQUARES, HIDDEN, work.eps) : 1.0f;
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
        int at = threadIdx.x + i * THREADS;
        if (at >= PIECES) continue;
        uint4 x = SQUARES ? scaled(own[i], scale) : own[i];
        reinterpret_cast<uint4*>(to)[at] = BITS == 4 ? placed(x, at) : x;
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS * PARTS, 1) expert_gate(
    const __grid_constant__ TensorMap map, const __grid_constant__ Work work
) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ u64 barriers[WARPS * PARTS * STAGES];
    __shared__ float2 scales[BITS < 16 ? WARPS * PARTS : 1][GROUPS * SCALES];
    __shared__ float2 left[WARPS][8];
    __shared__ int experts[WARPS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % PARTS;
    int number = blockIdx.x * WARPS + warp / PARTS, place = number / (INNER / 8), column = number % (INNER / 8) * 8;
    Tile tile = {memory + warp * STAGES * STAGE, barriers + warp * STAGES, 0, part * CHUNKS * LINES};
    bool has = number < TILES;
    if (lane == 0) {
        if (warp == 0) prefetch_map(&map);
        for (int i = 0; i < STAGES; ++i) set_up(tile.barriers + i, 1);
        show_to_copies();
    }
    // What x is made of was written before the router, which waited before this kernel began.
    if (SQUARES) take_x(memory + X_AT, work);
    int first = blockIdx.x * WARPS + threadIdx.x;
    if (threadIdx.x < WARPS && first < TILES) experts[threadIdx.x] = chosen(work.experts + first / (INNER / 8));
    __syncthreads();
    if (has) {
        int expert = experts[warp / PARTS];
        tile.block = (expert * 2 * INNER + column) / 8;
        if (BITS < 16) ask_for_scales(scales[warp], work, expert, part, column);
        if (lane == 0) {
#pragma unroll
            for (int chunk = 0; chunk < STAGES; ++chunk) tile.ask(&map, chunk);
        }
    }
    wait_for_kernels_before();
    let_next_begin();
    if (!SQUARES) {
        take_x(memory + X_AT, work);
        __syncthreads();
    }
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float2 parts[GROUPS];
    if (has) {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const char* x = memory + X_AT + (part * CHUNKS + chunk) * CHUNK * 2;
            tile.wait_for(chunk);
            if constexpr (BITS == 16) multiply_in_16_bits(sums, tile, chunk, x);
            else multiply_groups(parts + chunk * (CHUNK / 128), tile, chunk, x);
            __syncwarp();
            if (lane == 0 && chunk + STAGES < CHUNKS) tile.ask(&map, chunk + STAGES);
        }
        wait_for_pieces();
        __syncwarp();
    }
#pragma unroll
    for (int turn = 0; turn < PARTS; ++turn) {  // sums of parts are continued in their order
        if (turn > 0) __syncthreads();
        if (!has || turn != part) continue;
        float2& of_tile = left[warp / PARTS][lane / 4];
        if (turn > 0) sums[0] = of_tile.x, sums[2] = of_tile.y;
        if (BITS < 16) add_groups(sums, parts, scales[warp] + lane / 4 % SCALES);
        if (turn + 1 < PARTS) {
            if (lane % 4 == 0) of_tile = make_float2(sums[0], sums[2]);
        } else if (lane % 4 == 0) {
            work.out[place * INNER + column + lane / 4] = rounded(gated(sums[0], sums[2]));
        }
    }
}
