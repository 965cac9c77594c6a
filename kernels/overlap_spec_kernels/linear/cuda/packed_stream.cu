// y = x W^T for 1 to 32 rows of x and a W in 8 or 4 bits in fragment order, on Hopper (sm_90a).
//
// A program runs on each multiprocessor. Its warps divide K among them: a warp multiplies its own columns of W, and
// keeps the same columns of x in registers from the beginning to the end. For each item, 16 rows of W (or 16 of gate
// and 16 of up), the warps leave their sums in shared memory, and one of them, in turns, adds them up and finishes it.
//
//     ring    [stage] | TILES tiles of 16 x 64 values for each warp, side by side in memory | scales | zero points |
//     sums    [warp][buffer][half] | a product's registers, 16 bytes a lane, for each 8 rows of x |
//
// No warp only copies: it would take registers from the others. The copy engine brings a stage in one run of memory,
// and the warps take turns at asking it for the next one. No kernel writes W, so stages are asked for before the kernels
// that write x have ended: `EARLY` of them, and the others after x, which would wait behind their bytes. Of what warps leave there are two buffers: no warp leaves an item's sums before those of two
// items earlier were read.
//
//     full    of a stage: its bytes have arrived
//     empty   of a stage: all warps have read it
//     left    of a buffer: all warps have left their sums in it
//     taken   of a buffer: they have been read
//
// If K is too long for the registers, the programs of a cluster divide it. The first program finishes; the others send
// it their sums, which it adds in order.
//
//     sent      of a buffer, in the first program: the sums of all others have arrived
//     received  of a buffer, in each other program: the first one has read what it sent
//
// Nothing waits in a circle: a warp waits only for what others do at earlier steps and items than its own, or before
// their share of the next item.
//
// The command line defines the names below. Which linears take this kernel: packed_stream.py.
//
//     BITS        of a value: 4 or 8                       CLUSTER   programs that divide K
//     K_TILES     K / 64                                   GATED     1: silu(gate) * up, gate's rows first
//     ROWS        of x, padded: 8, 16, 24 or 32            ADD       1: add a residual, prepare the norm after it
//     WARPS       of a program                             SCALED    1: x is scaled by a norm, from `squares`
//     TILES       of a warp in a stage                     WIDE      1: the result is float32
//     STAGES      of the ring                              ZEROS     1: zero points, else 8 of 4 bits
//     EARLY       stages that are asked for before x       SCALE     type of scales: one of `ScaleType`
//     ROOM        1: a program of attention has room       BESIDE    rows of another matrix, in bfloat16, or 0
//     WIDE_NORM   1: the weight of the norm is float32
//     GROUP       columns that share a scale; 0: a row
//
//     ARRIVING    lanes of a warp that arrive at `left` and `taken`: 1, for all, after `__syncwarp`. 32 for
//                 racecheck, to which that order may be unknown

#ifndef ARRIVING
#define ARRIVING 1
#endif

#include "fragments.cuh"
#include "hopper.cuh"

// What the kernel is given; the same fields in packed_stream.py.
struct Work {
    const char* weight;    // [O / 16, K / 64] tiles
    const char* scales;    // of groups [O / 16, groups, 8, 2], of blocks [O / 16, groups, 4]; of rows [O] float32
    const char* zeros;     // [O / 16, groups, 8, 2] bfloat16
    const u16* x;          // [T, K] bfloat16, rows x_stride apart
    const float* squares;  // [num_squares, T]
    const u16* residual;   // [T, size_n], rows residual_stride apart
    const void* norm;      // [size_n] bfloat16, or float32 if WIDE_NORM
    void* out;             // [T, size_n] bfloat16, or float32 if WIDE
    u16* weighted;         // [T, size_n]
    float* sums;           // [size_n / 16, T]
    const u16* beside;     // [BESIDE, K], another matrix, and
    u16* beside_out;       // [T, BESIDE], what x gives with it
    int x_stride, residual_stride;
    int size_n;            // columns of the result
    int num_rows;          // T
    int num_squares;
    float eps;
};

constexpr int BLOCKS = ROWS / 8;       // of 8 rows of x, as a product takes them
constexpr int HALVES = GATED ? 2 : 1;  // rows of tiles of an item
constexpr int DEPTH = K_TILES / CLUSTER;  // tiles of a program in a row of tiles
constexpr int STAGE_TILES = WARPS * TILES;
constexpr int STEPS = (DEPTH + STAGE_TILES - 1) / STAGE_TILES;  // stages that they take
constexpr int LAST_TILES = DEPTH - (STEPS - 1) * STAGE_TILES;   // of the last one
constexpr int LAST_SHARE = (LAST_TILES + WARPS - 1) / WARPS;    // of a warp in it, at most
constexpr int SHARE = (STEPS - 1) * TILES + LAST_SHARE;         // of a warp in a row of tiles
constexpr int TILE_BYTES = 128 * BITS;

enum ScaleType { ROW_FLOAT32, FLOAT32, BFLOAT16, FLOAT16, BLOCK_FLOAT32 };
constexpr int SCALE_BYTES[] = {0, 64, 32, 32, 16};  // of a group in a row of tiles
constexpr int ENTRY = SCALE_BYTES[SCALE];
constexpr int ZERO_ENTRY = ZEROS ? 32 : 0;

// Groups that so many tiles belong to.
constexpr int groups_of(int tiles) { return GROUP ? tiles * 64 / (GROUP + !GROUP) : 0; }

constexpr int SCALES_AT = STAGE_TILES * TILE_BYTES;
constexpr int ZEROS_AT = SCALES_AT + groups_of(STAGE_TILES) * ENTRY;
constexpr int STAGE_BYTES = ZEROS_AT + groups_of(STAGE_TILES) * ZERO_ENTRY;
constexpr int SUMS = HALVES * BLOCKS * 32;  // that a warp leaves, four floats each
static_assert(K_TILES % CLUSTER == 0 && groups_of(DEPTH) * GROUP == (GROUP ? DEPTH * 64 : 0), "whole tiles and groups");
static_assert(groups_of(STAGE_TILES) * GROUP == (GROUP ? STAGE_TILES * 64 : 0), "a stage has whole groups");

struct Barriers {
    u64 full[STAGES], empty[STAGES];
    u64 left[2], taken[2], sent[2], received[2];
};

struct Common {
    Barriers barriers;
    float squares[WARPS][ROWS], scale_of_row[ROWS];  // of x
};

// The items of a cluster lie side by side.
struct Items {
    int of_all, first, count;

    __device__ __forceinline__ Items(int size_n) : of_all(size_n / 16) {
        u32 cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
        first = of_all * cluster / clusters;
        count = of_all * (cluster + 1) / clusters - first;
    }
};

// The first of a warp's tiles in a step, among those of the stage. It has up to TILES of them, LAST_SHARE in the last.
__device__ __forceinline__ int first_tile(int step) {
    return threadIdx.x / 32 * (step == STEPS - 1 ? LAST_SHARE : TILES);
}

// Whether a warp has tile k of a step. All but the last tiles of the last step are full.
__device__ __forceinline__ bool has_tile(int step, int k) {
    if (step < STEPS - 1) return true;
    return k < LAST_SHARE && (LAST_TILES == LAST_SHARE * WARPS || first_tile(step) + k < LAST_TILES);
}

// Values of W are multiplied as they lie in bfloat16 after masks and shifts: those of 8 bits 2^120 times too small, of 4
// bits 2^133 times for rows g and 2^129 times for rows g + 8. So that products are numbers of a usual size, x is 2^96
// times too large (it would be infinite from 2^32 on), and results are multiplied by what is left.
constexpr u32 X_UNIT = 0x6f806f80;                             // 2^96, twice
constexpr float ROW_G8 = BITS == 4 ? 16.0f : 1.0f;             // of sums of rows g + 8, over those of rows g
constexpr float UNIT = BITS == 4 ? 137438953472.0f : 16777216.0f;  // 2^37, 2^24
constexpr float UNITS[2] = {UNIT, UNIT / ROW_G8};              // of rows g and g + 8
constexpr int SUMMED_SLICES = GROUP == 32 ? 2 : 4;             // of a tile, whose sums of x belong together
constexpr bool IN_PAIRS = GROUP == 128 && TILES % 2 == 0 && LAST_TILES % 2 == 0 && LAST_SHARE % 2 == 0;
constexpr int TOGETHER = IN_PAIRS ? 2 : 1;                     // tiles of a warp that share a scale
static_assert(BITS == 8 || GROUP > 0, "values of 4 bits have groups");

// x of a warp's columns.
struct Operands {
    u32 pairs[SHARE][4][BLOCKS][2];
    // With 4 bits: of a group's columns, in rows 2 t + i of x, times -8 or -1; at the first of TOGETHER tiles.
    float sums[SHARE][4 / SUMMED_SLICES][BLOCKS][2];
};

#include "packed_stream_ring.cuh"  // Copies, Ring, multiply_tiles(sums, x, ..)
#include "packed_stream_ends.cuh"  // leave(sums, ..), finish(..)

// ---- x, once: from memory to registers, by way of shared memory, where a matrix is turned into operands ----

__device__ __forceinline__ void load_tile(uint4 (&loaded)[BLOCKS * 2], const Work& work, int tile, bool has) {
    int row = threadIdx.x % 32 / 8, piece = threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < BLOCKS * 2; ++i) {  // four rows at a time
        const u16* at = work.x + (4 * i + row) * work.x_stride + tile * 64 + piece * 8;
        bool there = has && 4 * i + row < work.num_rows;
        loaded[i] = there ? *reinterpret_cast<const uint4*>(at) : make_uint4(0, 0, 0, 0);
    }
}

// Piece c of row r lies at c ^ r of its 8 places: neither a column of pieces nor a row has two in the same banks.
__device__ __forceinline__ void turn_tile(u32 (&x)[4][BLOCKS][2], const uint4 (&loaded)[BLOCKS * 2], char* staged) {
    int lane = threadIdx.x % 32, row = lane / 8, piece = lane % 8;
#pragma unroll
    for (int i = 0; i < BLOCKS * 2; ++i)
        *reinterpret_cast<uint4*>(staged + (4 * i + row) * 128 + (piece ^ (4 * i + row) % 8) * 16) = loaded[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < BLOCKS * 2; ++i) {
        int block = i / 2, s = i % 2 * 2;  // slices s and s + 1: four matrices of 8 columns
        u32 at = shared(staged) + block * 1024 + lane % 8 * 128 + ((2 * s + lane / 8) ^ lane % 8) * 16;
        u32(&low)[2] = x[s][block], (&high)[2] = x[s + 1][block];
        load_matrices(at, low[0], low[1], high[0], high[1]);
    }
    __syncwarp();
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; ++i) x[s][i / 2][i % 2] = multiply2(x[s][i / 2][i % 2], X_UNIT);
}

// What zero points are multiplied by: add the products of ones with x of a group's columns in a tile.
__device__ __forceinline__ void add_columns(float (&x_sums)[BLOCKS][2], const u32 (&x)[4][BLOCKS][2], int first) {
    constexpr u32 ones[4] = {0x00010001, 0x00010001, 0x00010001, 0x00010001};
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        float sums[4] = {};
#pragma unroll
        for (int s = first; s < first + SUMMED_SLICES; ++s) multiply16(sums, ones, x[s][block]);
        for (int i = 0; i < 2; ++i) x_sums[block][i] += sums[i] * (ZEROS ? -1.0f : -8.0f);
    }
}

using Loaded = uint4[SHARE][BLOCKS * 2];

__device__ __forceinline__ void load_x(Loaded& loaded, const Work& work, u32 rank) {
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
        int step = i / TILES, tile = rank * DEPTH + step * STAGE_TILES + first_tile(step) + i % TILES;
        load_tile(loaded[i], work, tile, has_tile(step, i % TILES));
    }
}

// `staged`: a kilobyte for each 8 rows.
__device__ __forceinline__ void turn_x(Operands& x, const Loaded& loaded, char* staged) {
    for (auto& of_tile : x.sums)
        for (auto& part : of_tile)
            for (auto& block : part) block[0] = block[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < SHARE; ++i) {
        turn_tile(x.pairs[i], loaded[i], staged);
#pragma unroll
        for (int part = 0; part < 4 / SUMMED_SLICES; ++part)
            if (BITS == 4) add_columns(x.sums[i / TOGETHER * TOGETHER][part], x.pairs[i], part * SUMMED_SLICES);
    }
}

// ---- another matrix of few rows, as it is: warps of their own; a program has a row of it, a warp rows of x ----

constexpr int BESIDE_WARPS = BESIDE ? 4 : 0;
constexpr int THREADS = 32 * (WARPS + BESIDE_WARPS);
constexpr int AT_ONCE = BLOCKS;  // rows of x that such a warp multiplies a row by
static_assert(BESIDE == 0 || CLUSTER == 1, "programs of a cluster meet in the end");

__device__ __forceinline__ void add_pair(float& sum, u32 one, u32 other) {
    float2 a = widen_bfloat16(one), b = widen_bfloat16(other);
    sum = __fmaf_rn(a.y, b.y, __fmaf_rn(a.x, b.x, sum));
}

__device__ __forceinline__ float added(float sum) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    return sum;
}

// The sums of a row with rows m.. of x, where past the last row that one comes again.
__device__ __forceinline__ void multiply_row(float (&sums)[AT_ONCE], const Work& work, int row, int m) {
    const uint4* of_row = reinterpret_cast<const uint4*>(work.beside + row * K_TILES * 64);
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < K_TILES * 8; i += 32) {
        uint4 left = of_row[i];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const u16* from = work.x + min(m + j, work.num_rows - 1) * work.x_stride;
            uint4 right = reinterpret_cast<const uint4*>(from)[i];
            add_pair(sums[j], left.x, right.x);
            add_pair(sums[j], left.y, right.y);
            add_pair(sums[j], left.z, right.z);
            add_pair(sums[j], left.w, right.w);
        }
    }
}

// The sum of a row with row m of x becomes the result.
__device__ __forceinline__ void finish_beside(const Work& work, float sum, int row, int m) {
    int lane = threadIdx.x % 32;
    float y = added(sum), squares = 0.0f;
    if (SCALED) {
        for (int part = lane; part < work.num_squares; part += 32) squares += square_of(work, m, part);
        y *= rsqrtf(added(squares) / (K_TILES * 64) + work.eps);
    }
    if (lane == 0 && m < work.num_rows) work.beside_out[m * BESIDE + row] = static_cast<u16>(round_bfloat16(y, y));
}

__device__ __forceinline__ void multiply_beside(const Work& work) {
    int warp = threadIdx.x / 32 - WARPS, lane = threadIdx.x % 32, row = blockIdx.x;
    if (row < BESIDE && warp == 0) prefetch_lines(work.beside + row * K_TILES * 64, K_TILES * 128, lane, 32);
    wait_for_kernels_before();
    for (; row < BESIDE; row += gridDim.x) {
        for (int m = warp * AT_ONCE; m < work.num_rows; m += BESIDE_WARPS * AT_ONCE) {
            float sums[AT_ONCE] = {};
            multiply_row(sums, work, row, m);
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) finish_beside(work, sums[j], row, m + j);
        }
    }
}

// ---- the whole ----

__device__ __forceinline__ void set_up_all(Barriers& barriers) {
    for (int i = 0; i < STAGES; ++i) {
        set_up(&barriers.full[i], 1);
        set_up(&barriers.empty[i], WARPS);
    }
    for (int i = 0; i < 2; ++i) {
        set_up(&barriers.left[i], ARRIVING * WARPS);
        set_up(&barriers.taken[i], ARRIVING);
        set_up(&barriers.sent[i], 1);
        set_up(&barriers.received[i], 1);
    }
    show_barriers_to_cluster();
    show_to_copies();
}

// All threads of the program, or of all programs of the cluster.
__device__ __forceinline__ void meet_all() {
    if constexpr (CLUSTER > 1) {
        meet_cluster();
    } else {
        __syncthreads();
    }
}

// A warp's share of item i, whose sums it leaves.
__device__ __forceinline__ void multiply_item(
    int i, const Operands& x, const Work& work, const Copies& copies, Ring& ring, char* memory, Barriers& barriers
) {
    Turn turn(i);
#pragma unroll 1
    for (int half = 0; half < HALVES; ++half) {
        float sums[BLOCKS][4] = {};
        multiply_tiles(sums, x, work, copies, ring);
        if (half == 0) wait(&barriers.taken[turn.buffer], turn.parity ^ 1);
        leave(sums, sums_of(memory, threadIdx.x / 32, turn.buffer) + half * BLOCKS * 32);
    }
    __syncwarp();
    if (threadIdx.x % 32 < ARRIVING) arrive(&barriers.left[turn.buffer]);
}

// A warp finishes an item after its own share of the next one: otherwise all others would wait for that share, and an
// item would take as long as a share and an end, one after the other.
__device__ __forceinline__ void multiply_items(
    const Operands& x, const Work& work, const Items& items, const Copies& copies, Ring& ring, char* memory,
    Common& common
) {
    int warp = threadIdx.x / 32;
    for (int i = 0; i <= items.count; ++i) {
        if (i < items.count) multiply_item(i, x, work, copies, ring, memory, common.barriers);
        if (i > 0 && (i - 1) % WARPS == warp)
            finish(work, items.first + i - 1, Turn(i - 1), memory, common, copies.rank);
    }
}

// One program of a multiprocessor: without the 1 the compiler uses fewer registers, so that more of them would fit.
#if ROOM
#define REGISTERS __maxnreg__(80)
#else
#define REGISTERS __launch_bounds__(THREADS, 1)
#endif

extern "C" __global__ void REGISTERS __cluster_dims__(CLUSTER, 1, 1)
    packed_stream(const __grid_constant__ Work work) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Common common;
    int warp = threadIdx.x / 32;
    let_next_begin();
    Items items(work.size_n);
    Ring ring(memory + RING_AT, common.barriers);
    Copies copies(items, CLUSTER > 1 ? rank_in_cluster() : 0);
    if (threadIdx.x == 0) {
        set_up_all(common.barriers);
        copies.ask_all(work, ring, 0, EARLY);
    }
    bool prefetches = warp == WARPS - 1 && copies.rank == 0;
    if (prefetches) prefetch_constants(work, items);
    meet_all();
    if constexpr (BESIDE > 0) {
        if (warp >= WARPS) {
            multiply_beside(work);
            return;
        }
    }
    wait_for_kernels_before();
    if (prefetches) prefetch_residual(work, items);
    Squares squares;
    Loaded loaded;
    if (SCALED) load_squares(squares, work);
    load_x(loaded, work, copies.rank);
    if (threadIdx.x == 0) copies.ask_all(work, ring, EARLY, STAGES);
    __syncwarp();
    Operands x;
    turn_x(x, loaded, memory + warp * (2 * SUMS * 16));
    if (SCALED) scale_rows(squares, work, common);
    multiply_items(x, work, items, copies, ring, memory, common);
    if (CLUSTER > 1) meet_cluster();  // no program leaves while another may send to it
}
