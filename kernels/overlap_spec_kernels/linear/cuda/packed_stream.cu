// y = x W^T for 1 to 16 rows of x and a W in 8 or 4 bits in fragment order, on Hopper (sm_90a); or several linears, one
// after another, of which each reads what those before it have written.
//
// A program runs on each multiprocessor. Its warps divide K among them: a warp multiplies its own columns of W, and
// keeps the same columns of x in registers for a whole linear. For each item, 16 rows of W (or 16 of gate and 16 of
// up), the warps leave their sums in shared memory, and one of them, in turns, adds them up and finishes it.
//
//     sums    [warp][buffer][half] | a product's registers, 16 bytes a lane, for each 8 rows of x |
//     ring    [stage] | TILES tiles of 16 x 64 values for each warp, side by side in memory | scales | zero points |
//
// No warp only copies: it would take registers from the others. The copy engine brings a stage in one run of memory,
// and the warps take turns at asking it for the next one. No kernel writes W, so the ring is filled before the kernels
// that write x have ended. Of what warps leave there are two buffers: no warp leaves an item's sums before those of two
// items earlier were read.
//
//     full    of a stage: its bytes have arrived
//     empty   of a stage: all warps have read it
//     left    of a buffer: all warps have left their sums in it
//     taken   of a buffer: they have been read
//
// If K is too long for the registers, the programs of a cluster divide it. The first program finishes; the others send
// it their sums, which it adds in order. Where K is shorter, each program of the cluster has items of its own.
//
//     sent      of a buffer, in the first program: the sums of all others have arrived
//     received  of a buffer, in each other program: the first one has read what it sent
//
// Nothing waits in a circle: a warp waits only for what others do at earlier steps and items than its own, or before
// their share of the next item.
//
// Between two linears all programs meet, at a counter in memory. The ring goes on across that: its stages are filled
// with tiles of the next linear while the last items are finished, the programs meet and x is loaded, so memory is
// busy. All programs of such a launch must run at once: packed_run.py.
//
// The command line defines the names below, and `linears.h` is made with it: a struct of constants for each linear.
// Which linears take this kernel: packed_stream.py.
//
//     ROWS        of x, padded: 8 or 16                    STAGES    of the ring
//     WARPS       of a program                             LINEARS   their structs, of which each has:
//
//     BITS        of a value: 4 or 8                       CLUSTER   programs that divide K
//     K_TILES     K / 64                                   GATED     1: silu(gate) * up, gate's rows first
//     TILES       of a warp in a stage                     ADD       1: add a residual, prepare the norm after it
//     GROUP       columns that share a scale; 0: a row     SCALED    1: x is scaled by a norm, from `squares`
//     SCALE       type of scales: one of `ScaleType`       WIDE      1: the result is float32
//                                                          ZEROS     1: zero points, else 8 of 4 bits
//
//     ARRIVING    lanes of a warp that arrive at `left` and `taken`: 1, for all, after `__syncwarp`. 32 for
//                 racecheck, to which that order may be unknown

#ifndef ARRIVING
#define ARRIVING 1
#endif

#include "fragments.cuh"
#include "hopper.cuh"
#include "linears.h"

// What a linear is given; the same fields in packed_stream.py.
struct Work {
    const char* weight;    // [O / 16, K / 64] tiles
    const char* scales;    // of groups [O / 16, groups, 8, 2], of blocks [O / 16, groups, 4]; of rows [O] float32
    const char* zeros;     // [O / 16, groups, 8, 2] bfloat16
    const u16* x;          // [T, K] bfloat16, rows x_stride apart
    const float* squares;  // [num_squares, T]
    const u16* residual;   // [T, size_n], rows residual_stride apart
    const u16* norm;       // [size_n]
    void* out;             // [T, size_n] bfloat16, or float32 if WIDE
    u16* weighted;         // [T, size_n]
    float* sums;           // [size_n / 16, T]
    int x_stride, residual_stride;
    int size_n;            // columns of the result
    int num_rows;          // T
    int num_squares;
    float eps;
};

#include "packed_stream_shapes.cuh"  // Linear<INDEX>

// What the kernel is given.
struct Run {
    Work works[COUNT];
    u32* counter;       // at which programs meet between linears
    const char* ahead;  // what the next launch reads first, or none
    int bytes_ahead;    // a multiple of 16
};

// Of a linear.
struct Ends {
    u64 left[2], taken[2], sent[2], received[2];
};

struct Barriers {
    u64 full[STAGES], empty[STAGES];
    Ends ends[COUNT];
};

// The items of a program in a linear, and the first of its steps in the ring.
struct Items {
    int first, count, first_step;
};

struct Common {
    Barriers barriers;
    Items items[COUNT + 1];  // the last entry begins after all steps
    float scale_of_row[16];  // of x

    __device__ __forceinline__ int num_steps() const { return items[COUNT].first_step; }
};

// A program, as each of its threads knows it.
struct Program {
    const Run& run;
    Common& common;
    char* memory;
    u32 rank_in_cluster;

    template <class L>
    __device__ __forceinline__ const Work& work() const {
        return run.works[L::INDEX];
    }

    template <class L>
    __device__ __forceinline__ Ends& ends() const {
        return common.barriers.ends[L::INDEX];
    }

    // Of those that divide K.
    template <class L>
    __device__ __forceinline__ u32 rank() const {
        return L::CLUSTER > 1 ? rank_in_cluster : 0;
    }
};

// Which of how many shares of a linear's items a program has, and the steps of an item.
struct Division {
    u32 share, shares;
    int steps;
};

// Of linear `index`, which is L or after it.
template <class L>
__device__ __forceinline__ Division division_of(int index) {
    if constexpr (!L::IS_LAST)
        if (index > L::INDEX) return division_of<typename L::Next>(index);
    return {blockIdx.x / L::CLUSTER, gridDim.x / L::CLUSTER, L::HALVES * L::STEPS};
}

// A warp does it: each lane divides a linear. The items of programs that divide K lie side by side.
__device__ __forceinline__ void divide_items(const Run& run, Common& common) {
    int lane = threadIdx.x, first = 0, count = 0, steps = 0, first_step = 0;
    if (lane < COUNT) {
        Division division = division_of<Linear<0>>(lane);
        u32 of_all = run.works[lane].size_n / 16;
        first = of_all * division.share / division.shares;
        count = of_all * (division.share + 1) / division.shares - first;
        steps = count * division.steps;
    }
    for (int i = 0; i < COUNT; ++i) {
        int of_linear = __shfl_sync(0xffffffff, steps, i);
        first_step += i < lane ? of_linear : 0;
    }
    if (lane <= COUNT) common.items[lane] = {first, count, first_step};
}

// The first of a warp's tiles in a step, among those of the stage. It has up to TILES of them, LAST_SHARE in the last.
template <class L>
__device__ __forceinline__ int first_tile(int step) {
    return threadIdx.x / 32 * (step == L::STEPS - 1 ? L::LAST_SHARE : L::TILES);
}

// Whether a warp has tile k of a step. All but the last tiles of the last step are full.
template <class L>
__device__ __forceinline__ bool has_tile(int step, int k) {
    if (step < L::STEPS - 1) return true;
    if (k >= L::LAST_SHARE) return false;
    return L::LAST_TILES == L::LAST_SHARE * WARPS || first_tile<L>(step) + k < L::LAST_TILES;
}

template <class L>
using Operands = u32[L::SHARE][4][BLOCKS][2];  // x, of a warp's columns

#include "packed_stream_ring.cuh"  // Ring, begin_copies(..), multiply_tiles<L>(sums, x, ..)
#include "packed_stream_ends.cuh"  // leave(sums, ..), finish<L>(..)

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
}

// `staged`: a kilobyte for each 8 rows.
template <class L>
__device__ __forceinline__ void load_x(Operands<L>& x, const Work& work, u32 rank, char* staged) {
    uint4 loaded[L::SHARE][BLOCKS * 2];
#pragma unroll
    for (int i = 0; i < L::SHARE; ++i) {
        int step = i / L::TILES, tile = rank * L::DEPTH + step * L::STAGE_TILES + first_tile<L>(step) + i % L::TILES;
        load_tile(loaded[i], work, tile, has_tile<L>(step, i % L::TILES));
    }
#pragma unroll
    for (int i = 0; i < L::SHARE; ++i) turn_tile(x[i], loaded[i], staged);
}

// ---- a linear ----

// A warp's share of item i, whose sums it leaves.
template <class L>
__device__ __forceinline__ void multiply_item(
    int i, const Operands<L>& x, const Program& program, const Items& items, Ring& ring
) {
    Turn turn(i);
    Ends& ends = program.ends<L>();
#pragma unroll 1
    for (int half = 0; half < L::HALVES; ++half) {
        float sums[BLOCKS][4] = {};
        multiply_tiles<L>(sums, x, program, ring, items.first_step);
        if (half == 0) wait(&ends.taken[turn.buffer], turn.parity ^ 1);
        leave(sums, sums_of<L>(program.memory, threadIdx.x / 32, turn.buffer) + half * BLOCKS * 32);
    }
    __syncwarp();
    if (threadIdx.x % 32 < ARRIVING) arrive(&ends.left[turn.buffer]);
}

// A warp finishes an item after its own share of the next one: otherwise all others would wait for that share, and an
// item would take as long as a share and an end, one after the other.
template <class L>
__device__ __forceinline__ void multiply_items(
    const Operands<L>& x, const Program& program, const Items& items, Ring& ring
) {
    int warp = threadIdx.x / 32;
    for (int i = 0; i <= items.count; ++i) {
        if (i < items.count) multiply_item<L>(i, x, program, items, ring);
        if (COUNT > 1 && i == items.count - 1) refill<L>(program, ring, ring.step - 1);  // no step after it does
        if (i > 0 && (i - 1) % WARPS == warp) finish<L>(items.first + i - 1, Turn(i - 1), program);
    }
}

// The first linear reads what the kernels before this one write, the others what linears before them write.
template <class L>
__device__ __forceinline__ void wait_for_inputs(const Run& run) {
    if constexpr (L::INDEX == 0) {
        wait_for_kernels_before();
    } else {
        meet_grid(run.counter);
    }
}

// This linear and those after it. The last ones may have no columns, in all programs.
template <class L>
__device__ __forceinline__ void run_linears(const Program& program, Ring& ring) {
    const Work& work = program.work<L>();
    if (L::INDEX > 0 && work.size_n == 0) return;
    int warp = threadIdx.x / 32;
    u32 rank = program.rank<L>();
    Items items = program.common.items[L::INDEX];
    bool prefetches = warp == WARPS - 1 && rank == 0;
    if (prefetches) prefetch_constants<L>(work, items);
    wait_for_inputs<L>(program.run);
    if (prefetches) prefetch_residual<L>(work, items);
    Operands<L> x;
    Squares squares;
    if (L::SCALED) load_squares(squares, work);
    load_x<L>(x, work, rank, program.memory + warp * (2 * L::SUMS * 16));
    if (L::SCALED) scale_rows<L>(squares, work, program.common.scale_of_row);
    multiply_items<L>(x, program, items, ring);
    if constexpr (!L::IS_LAST) run_linears<typename L::Next>(program, ring);
}

// ---- the whole ----

// What copies need, so that they begin soon.
__device__ __forceinline__ void set_up_ring(Barriers& barriers) {
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
        set_up(&barriers.full[i], 1);
        set_up(&barriers.empty[i], WARPS);
    }
    show_to_copies();
}

__device__ __forceinline__ void set_up_ends(Barriers& barriers) {
#pragma unroll
    for (int i = 0; i < 2 * COUNT; ++i) {
        Ends& ends = barriers.ends[i / 2];
        set_up(&ends.left[i % 2], ARRIVING * WARPS);
        set_up(&ends.taken[i % 2], ARRIVING);
        set_up(&ends.sent[i % 2], 1);
        set_up(&ends.received[i % 2], 1);
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

// One program of a multiprocessor: without the 1 the compiler uses fewer registers, so that more of them would fit.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) __cluster_dims__(CLUSTER, 1, 1)
    packed_stream(const __grid_constant__ Run run) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Common common;
    let_next_begin();
    Ring ring(memory + RING_AT, common.barriers);
    Program program{run, common, memory, CLUSTER > 1 ? rank_in_cluster() : 0};
    if (threadIdx.x < 32) {
        divide_items(run, common);
        __syncwarp();
    }
    if (threadIdx.x == 0) {
        set_up_ring(common.barriers);
        begin_copies(program, ring);
        set_up_ends(common.barriers);
    }
    meet_all();
    run_linears<Linear<0>>(program, ring);
    if (CLUSTER > 1) meet_cluster();  // no program leaves while another may send to it
}
