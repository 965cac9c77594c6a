// y = x W^T for many rows of x on Hopper (sm_90a); scales of W's rows, the gate or the argmax in registers.
//
// The two programs of a cluster take 128 rows of x each and the same COLUMNS rows of W. Each copies half of W's rows;
// the copy engine sends that half to both. So W is read from the L2 cache once for 256 rows of x. If each program read
// its own tile of W, 132 multiprocessors would exceed that cache's bandwidth. (Gluon in Triton 3.6 cannot send a tile
// to a cluster, so this is CUDA C++.) The last of an odd number of tiles of x has no other: a cluster takes it with two
// tiles of W, and each program sends half of x to both. (A tile beyond x, of zeros, takes longer to copy than one of x.)
// A program has three warpgroups: one copies, two multiply 64 rows of x each.
//
//     ring       [stage] | 128 rows of x, 64 of K | COLUMNS rows of W, 64 of K |    swizzled by 128 bytes
//     full       of a stage: its bytes have arrived, from both programs
//     empty      of a stage: the four multiplying warpgroups of both programs have read it
//
// The command line defines COLUMNS, STAGES, PARTS of K, which are added up as packed_products.cu adds them, and one of
// GATED, ARGMAX and PLAIN, and SCALED if rows of W have scales, those of x too where they are given, and BIASED if a plain
// result of one part has a bias; `wgmma.h` is written for COLUMNS and the type of x. Which linears take this kernel: wide_linear.py.

#include "hopper.cuh"
#include "wgmma.h"  // multiply(sums, x, w, add), round2(low, high), widen(value)

// What the kernel is given beside the tensor maps; the same fields in wide_linear.py.
struct Work {
    void* out;            // [T, N] of x's type, or float32 if `is_float`; ARGMAX [T, num_columns] float32
    int* best_at;         // ARGMAX [T, num_columns]
    const float* scales;      // SCALED [O] of W's rows
    const float* row_scales;  // SCALED [T] of x's rows, or null
    const u16* bias;          // BIASED [N] of x's type
    int num_rows;     // T
    int size_n;       // N, columns of the result
    int chunks;       // chunks of 64 columns of K
    int num_tiles;    // tiles of 128 rows of x
    int num_columns;  // tiles of W
    int num_bands;    // of pairs of x's tiles
    int num_items;    // what clusters take, one after another
    int is_float;
};

constexpr int DEPTH = 64;
constexpr int ROWS = 128;
constexpr int CLUSTER = 2;
constexpr u16 BOTH = (1 << CLUSTER) - 1;  // programs that something is sent to
constexpr int GROUPS = 2;  // warpgroups that multiply
constexpr int GROUP_ROWS = ROWS / GROUPS;
constexpr int SUMS = COLUMNS / 2;  // sums per thread: 64 x COLUMNS over 128 threads
constexpr int X_BYTES = ROWS * DEPTH * 2;
constexpr int W_BYTES = COLUMNS * DEPTH * 2;
constexpr int STAGE_BYTES = X_BYTES + W_BYTES;

struct Barriers {
    u64 full[STAGES];
    u64 empty[STAGES];
};

// What a program does of an item. A cluster takes items first, first + step, .. All of a band of x come before those of
// the next one: clusters then read few rows of x and few of W at a time, and the L2 cache holds them. (If they read all of
// x for two tiles of W, 8,192 rows and 28,672 of W with a K of 4,096 are 4.2 GB of memory for 1.1. A GPU at its power
// limit is slower by that.) Within a band, of two tiles of W those with pairs of tiles of x come first; in the last band
// the one with x's last tile follows, if that has no other.
struct Tile {
    int row, column;
    bool shares_x;  // the cluster has two tiles of W, else two of x

    __device__ __forceinline__ Tile(const Work& work, int number, int rank) {
        int all = work.num_tiles / CLUSTER, bands = work.num_bands;
        int band = all ? ((min(number / work.num_columns, all - 1) + 1) * bands - 1) / all : 0;
        int begin = band * all / bands, pairs = (band + 1) * all / bands - begin;
        int of_group = CLUSTER * pairs + (band + 1 == bands ? work.num_tiles % CLUSTER : 0);
        int of_band = number - begin * work.num_columns, group = of_band / of_group, item = of_band % of_group;
        int columns = min(CLUSTER, work.num_columns - group * CLUSTER);
        shares_x = item >= pairs * columns;
        row = (shares_x ? all * CLUSTER : (begin + item % pairs) * CLUSTER + rank) * ROWS;
        column = group * CLUSTER + (shares_x ? min(rank, columns - 1) : item / pairs);  // the last one twice
    }

    static __device__ __forceinline__ int first() { return blockIdx.x / CLUSTER; }
    static __device__ __forceinline__ int step() { return gridDim.x / CLUSTER; }
};

using Place = RingPlace<STAGES>;

#include "wide_linear_ends.cuh"  // finish(sums, work, tile, staged, group)

// ---- the warpgroup that copies: one thread of it ----

struct Maps {
    const TensorMap* x;       // boxes of 128 rows
    const TensorMap* x_half;  // of 64; used if the number of x's tiles is odd
    const TensorMap* w;       // of COLUMNS / 2
};

// A tile of W: this program's half of it to both, or both halves, if the other has another tile.
__device__ __forceinline__ void copy_w(
    const TensorMap* map, const Work& work, const Tile& tile, u32 rank, u32 stage, u64* full, int chunk
) {
#ifdef GATED
    int row = tile.column * (COLUMNS / 2), next_half = work.size_n;  // gate's rows, then up's
#else
    int row = tile.column * COLUMNS, next_half = COLUMNS / 2;
#endif
    u32 target = stage + X_BYTES;
    expect(full, STAGE_BYTES);
    if (tile.shares_x) {
        copy_tile(target, map, full, chunk * DEPTH, row);
        copy_tile(target + W_BYTES / 2, map, full, chunk * DEPTH, row + next_half);
    } else {
        send_tile(target + rank * (W_BYTES / 2), map, full, chunk * DEPTH, row + rank * next_half, BOTH);
    }
}

// A tile of x at once, as two copies take longer; or this program's half of it to both.
__device__ __forceinline__ void copy_x(const Maps& maps, const Tile& tile, u32 rank, u32 stage, u64* full, int chunk) {
    if (tile.shares_x)
        send_tile(stage + rank * (X_BYTES / 2), maps.x_half, full, chunk * DEPTH, tile.row + rank * (ROWS / 2), BOTH);
    else
        copy_tile(stage, maps.x, full, chunk * DEPTH, tile.row);
}

__device__ __forceinline__ void copy_all(const Maps& maps, const Work& work, char* ring, Barriers* barriers, u32 rank) {
    Place place;
    int early = min(work.chunks, STAGES);  // stages of W, which no kernel before this one writes
    Tile first(work, Tile::first(), rank);
    for (int c = 0; c < early; ++c)
        copy_w(maps.w, work, first, rank, shared(ring + c * STAGE_BYTES), &barriers->full[c], c);
    wait_for_kernels_before();
    for (int number = Tile::first(); number < work.num_items; number += Tile::step()) {
        Tile tile(work, number, rank);
#pragma unroll 1  // unrolled, this warpgroup's few registers would lie in memory
        for (int c = 0; c < work.chunks; ++c, --early, place.advance()) {
            u64* full = &barriers->full[place.stage];
            u32 stage = shared(ring + place.stage * STAGE_BYTES);
            if (early <= 0) {
                wait(&barriers->empty[place.stage], place.parity ^ 1);
                copy_w(maps.w, work, tile, rank, stage, full, c);
            }
            copy_x(maps, tile, rank, stage, full, c);
        }
    }
}

// ---- the warpgroups that multiply ----

__device__ __forceinline__ void multiply_chunks(
    float (&sums)[SUMS], int chunks, char* ring, Barriers* barriers, Place& place, int group
) {
    u64* read = nullptr;
    u32 thread = threadIdx.x % 128;
    for (int c = 0; c < chunks; ++c, place.advance()) {
        u32 stage = shared(ring + place.stage * STAGE_BYTES);
        wait(&barriers->full[place.stage], place.parity);
        u64 x = described(stage + group * (X_BYTES / GROUPS)), w = described(stage + X_BYTES);
        begin_products();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; ++k) multiply(sums, x + 2 * k, w + 2 * k, c + k > 0);  // 32 bytes on, in sixteens
        commit_products();
        wait_products<1>();  // those of the stage before
        if (c > 0 && thread < CLUSTER) arrive_at(read, thread);
        read = &barriers->empty[place.stage];
    }
    wait_products<0>();
    if (thread < CLUSTER) arrive_at(read, thread);
}

__device__ __forceinline__ void multiply_all(const Work& work, char* ring, char* staged, Barriers* barriers, u32 rank) {
    float sums[SUMS];
    int group = threadIdx.x / 128 - 1;
    Place place;
    for (int number = Tile::first(); number < work.num_items; number += Tile::step()) {
        Tile tile(work, number, rank);
#if PARTS > 1
        float total[SUMS] = {};
        for (int part = 0, begin = 0; part < PARTS; ++part) {
            int end = min((part + 1) * ((work.chunks + 1) / 2) / PARTS * 2, work.chunks);
            multiply_chunks(sums, end - begin, ring, barriers, place, group);
            add_part(total, sums, work, tile);
            begin = end;
        }
        finish(total, work, tile, staged, group);
#else
        multiply_chunks(sums, work.chunks, ring, barriers, place, group);
        finish(sums, work, tile, staged, group);
#endif
    }
}

extern "C" __global__ void __launch_bounds__(128 * (1 + GROUPS), 1) __cluster_dims__(CLUSTER, 1, 1) wide_linear(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap x_half_map,
    const __grid_constant__ TensorMap w_map, const __grid_constant__ Work work
) {
    extern __shared__ __align__(1024) char ring[];
    __shared__ Barriers barriers;
    u32 rank = rank_in_cluster();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            set_up(&barriers.full[stage], 1);
            set_up(&barriers.empty[stage], GROUPS * CLUSTER);
        }
        show_barriers_to_cluster();
    }
    meet_cluster();
    let_next_begin();
    if (threadIdx.x < 128) {
        give_registers<24>();
        if (threadIdx.x == 0) copy_all({&x_map, &x_half_map, &w_map}, work, ring, &barriers, rank);
        __syncwarp();
    } else {
        take_registers<240>();
        wait_for_kernels_before();
        multiply_all(work, ring, ring + STAGES * STAGE_BYTES, &barriers, rank);
    }
    meet_cluster();  // no program leaves while the other may send to it
}
