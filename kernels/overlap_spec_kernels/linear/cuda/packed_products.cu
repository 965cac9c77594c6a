// y = x W^T for 9 or more rows of x on Hopper (sm_90a), where W is stored in 8 or 4 bits, in fragment order.
//
// W is the left operand of a warpgroup's products: 64 rows of it at a time. A thread reads its own values of W from
// shared memory, converts them to bfloat16, which is exact, and multiplies from registers. x is the right operand, in
// shared memory. One warp copies. The multiplying warpgroups never meet in the loop over K: while one converts, another
// one multiplies, and within one the next operands are converted while the previous ones are multiplied.
//
//     ring    [stage] | x: 2 x [ROWS, 64] swizzled by 128 bytes | W: tiles of 16 x 64 | scales | zero points |
//     full    of a stage: its bytes have arrived, x from both programs of a cluster
//     empty   of a stage: the multiplying warps have read it, those of both programs since x is sent to both
//     sums    [64 rows of W, ROWS] per product, in units of the scale of W's present group of columns
//
// A scale of a group belongs to a row of W. When it changes, the sums are multiplied by old / new, so that no second
// set of sums is needed; this rounds them once more, as an addition does.
//
// K may be split among `splits` programs, of all results or of those that would leave programs without work in the last
// round. Each leaves its sums in global memory, waits until all parts of its result are there, and adds and finishes a
// share of them, in the order of the parts. All programs of a launch run at once, or this wait could last forever.
//
// The command line defines the names below; `wgmma.h` is written for ROWS. packed_products.py chooses.
//
//     BITS    of a value: 4 or 8                           BLOCKS      of 64 columns of the result, of a warpgroup
//     GROUP   columns that share a scale; 0: a row         WARPGROUPS  that multiply: 2 or 3
//     SCALE   type of scales, see packed_values.cuh        STAGES      of the ring
//     ZEROS   1: zero points, else 8 of 4 bits             CLUSTER     programs that share the copies of x: 1 or 2
//     GATED   1: silu(gate) * up, gate's rows first        PER_SM      programs of a multiprocessor: 1 or 2
//     ROWS    of x, padded to a multiple of 16             EARLY       stages of W that are asked for before x
//     BY_WARPS  1: products of warps, not warpgroups      FEW         1: up to 8 rows of x; other products are left out

#include "hopper.cuh"
#include "fragments.cuh"
#include "packed_values.cuh"
#include "wgmma.h"  // multiply(sums, w, x): 64 rows of W, ROWS of x, 16 columns

// What the kernel is given beside the tensor maps; the same fields in packed_products.py.
struct Work {
    void* out;                // [T, N] bfloat16, or float32 if `is_float`
    u16* weighted;            // [T, N], with a residual: values times the norm's weight
    float* sums;              // [ceil(N / 64), T], with a residual: sums of squares
    const u16* residual;      // [T, N] or null
    const u16* norm;          // [N]
    const float* squares;     // [num_squares, T]: sums of squares that x is scaled by, or null
    const float* row_scales;  // [O], without groups
    float* parts;             // [results in parts, splits, ..]: sums of parts of K
    u32* counters;            // [results in parts, WARPGROUPS], zero before and after
    float eps;
    int num_rows;     // T
    int size_n;       // N, columns of the result
    int size_k;       // K
    int num_items;    // of a cluster: results, or their parts
    int whole;        // results that are not in parts, before the others
    int splits;       // parts of K
    int row_blocks;   // of ROWS rows of x
    int num_squares;
    int residual_stride;
    int is_float;
};

constexpr int K_TILES = 2;  // tiles of 64 columns in a stage
constexpr int DEPTH = K_TILES * 64;
constexpr int MATRICES = GATED ? 2 : 1;
constexpr int TILES = BLOCKS * MATRICES;  // of 64 rows of W, of a warpgroup; gate's first
constexpr int SUMS = ROWS / 2;            // per thread: 64 x ROWS over 128 threads
constexpr int COLUMNS = WARPGROUPS * BLOCKS * 64;  // of the result, in a program
constexpr int ROW_TILES = COLUMNS / 16;

constexpr int SLICES = GROUP == 32 ? 2 : 4;  // of 16 columns, converted at once
constexpr int UNITS = K_TILES * 4 / SLICES * TILES;
constexpr int UNITS_PER_GROUP = GROUP ? GROUP / 16 / SLICES * TILES : UNITS;
static_assert(UNITS % 2 == 0, "operands of units alternate between two sets of registers");

constexpr int X_TILE_BYTES = ROWS * 128;
constexpr int W_TILE_BYTES = 128 * BITS;
constexpr int GROUPS_PER_STAGE = GROUP ? DEPTH / GROUP : 0;
constexpr int X_BYTES = K_TILES * X_TILE_BYTES;
constexpr int W_BYTES = MATRICES * ROW_TILES * K_TILES * W_TILE_BYTES;
constexpr int SCALES_BYTES = MATRICES * ROW_TILES * GROUPS_PER_STAGE * SCALE_BYTES[SCALE];
constexpr int SCALES_PER_GROUP = SCALE_BYTES[SCALE] / SCALE_SIZES[SCALE];
constexpr int ZEROS_BYTES = ZEROS ? MATRICES * ROW_TILES * GROUPS_PER_STAGE * 32 : 0;
constexpr int STAGE_BYTES = X_BYTES + W_BYTES + SCALES_BYTES + ZEROS_BYTES;
constexpr int STAGE_PITCH = (STAGE_BYTES + 1023) / 1024 * 1024;
static_assert(SCALES_BYTES / MATRICES % 128 == 0 && ZEROS_BYTES / MATRICES % 128 == 0, "targets of copies");

// Registers of a thread: at the start, then of the warpgroup that copies, and of those that multiply. They come from
// those of the start.
constexpr int START_REGISTERS = 65536 / (PER_SM * 128 * (1 + WARPGROUPS)) / 8 * 8;
constexpr int COPY_REGISTERS = PER_SM == 1 && WARPGROUPS < 3 ? 40 : 32;
constexpr int LEFT_REGISTERS = ((1 + WARPGROUPS) * START_REGISTERS - COPY_REGISTERS) / WARPGROUPS / 8 * 8;
constexpr int MULTIPLY_REGISTERS = LEFT_REGISTERS < 232 ? LEFT_REGISTERS : 232;
static_assert(COPY_REGISTERS + WARPGROUPS * MULTIPLY_REGISTERS <= (1 + WARPGROUPS) * START_REGISTERS, "registers");

constexpr int HELPERS = 3;  // warps that compute the norm's scales of rows of x
constexpr u16 ALL_RANKS = (1 << CLUSTER) - 1;

struct Barriers {
    u64 full[STAGES];
    u64 empty[STAGES];
    u64 scaled;  // `RowScales::of_row` is there, for an item after the other
    u64 used;    // the multiplying warps have read it
};

struct RowScales {
    float of_row[ROWS];
    float sums[HELPERS][ROWS];
};

// A result, or a part of K of one: a tile of W, and ROWS rows of x. The programs of a cluster take neighbouring tiles
// and the same part. Blocks of rows come first, since the L2 cache then gives their tile of W. Parts wait for each other,
// so they are neighbours.
struct Item {
    int row, tile, part, parts, begin, end;  // row: the first one of x; stages begin..end - 1 of K
    int result;                              // among those in parts

    __device__ __forceinline__ Item(const Work& work, int number, int rank) {
        int behind = number - work.whole;
        parts = behind < 0 ? 1 : work.splits;
        part = behind < 0 ? 0 : behind % work.splits;
        number = behind < 0 ? number : work.whole + behind / work.splits;
        row = number % work.row_blocks * ROWS;
        tile = number / work.row_blocks * CLUSTER + rank;
        result = (number - work.whole) * CLUSTER + rank;
        int stages = (work.size_k + DEPTH - 1) / DEPTH;
        begin = part * stages / parts;
        end = (part + 1) * stages / parts;
    }

    static __device__ __forceinline__ int first() { return blockIdx.x / CLUSTER; }
    static __device__ __forceinline__ int step() { return gridDim.x / CLUSTER; }
};

using Place = RingPlace<STAGES>;

#include "packed_products_ends.cuh"  // finish(sums, scales, work, item, row_scales, staging)

// ---- the warp that copies: one thread of it ----

struct Maps {
    const TensorMap *x, *w, *scales, *zeros;
};

// W, with what belongs to its groups, which no kernel before this one writes.
__device__ __forceinline__ void copy_w(
    const Maps& maps, const Work& work, const Item& item, u32 stage, u64* full, int at
) {
    expect(full, STAGE_BYTES);
    u32 target = stage + X_BYTES;
#pragma unroll
    for (int matrix = 0; matrix < MATRICES; ++matrix) {
        int row_tile = matrix * (work.size_n / 16) + item.tile * ROW_TILES;
        constexpr int ROW_OF_TILES = K_TILES * W_TILE_BYTES;
        copy_tile(target + matrix * (W_BYTES / MATRICES), maps.w, full, at * (ROW_OF_TILES / 8), row_tile);
        if constexpr (GROUP > 0) {
            u32 scales = target + W_BYTES + matrix * (SCALES_BYTES / MATRICES);
            copy_tile(scales, maps.scales, full, at * GROUPS_PER_STAGE * SCALES_PER_GROUP, row_tile);
        }
        if constexpr (ZEROS) {
            u32 zeros = target + W_BYTES + SCALES_BYTES + matrix * (ZEROS_BYTES / MATRICES);
            copy_tile(zeros, maps.zeros, full, at * GROUPS_PER_STAGE * 16, row_tile);
        }
    }
}

// x, of which each program of a cluster sends its share of the rows to all.
__device__ __forceinline__ void copy_x(const Maps& maps, const Item& item, u32 stage, u64* full, int at, u32 rank) {
    constexpr int SHARE = ROWS / CLUSTER;
#pragma unroll
    for (int tile = 0; tile < K_TILES; ++tile) {
        u32 target = stage + tile * X_TILE_BYTES + rank * (SHARE * 128);
        if constexpr (CLUSTER > 1)
            send_tile(target, maps.x, full, at * DEPTH + tile * 64, item.row + rank * SHARE, ALL_RANKS);
        else
            copy_tile(target, maps.x, full, at * DEPTH + tile * 64, item.row);
    }
}

__device__ __forceinline__ void copy_all(const Maps& maps, const Work& work, char* ring, Barriers* barriers, u32 rank) {
    Place place;
    Item first(work, Item::first(), rank);
    int early = min(first.end - first.begin, EARLY);  // more would be ahead of x on its way
    for (int stage = 0; stage < early; ++stage)
        copy_w(maps, work, first, shared(ring + stage * STAGE_PITCH), &barriers->full[stage], first.begin + stage);
    wait_for_kernels_before();
    for (int number = Item::first(); number < work.num_items; number += Item::step()) {
        Item item(work, number, rank);
        for (int at = item.begin; at < item.end; ++at, --early, place.advance()) {
            u64* full = &barriers->full[place.stage];
            u32 stage = shared(ring + place.stage * STAGE_PITCH);
            if (early <= 0) {
                wait(&barriers->empty[place.stage], place.parity ^ 1);
                copy_w(maps, work, item, stage, full, at);
            }
            copy_x(maps, item, stage, full, at, rank);
        }
    }
}

// ---- the other warps of its warpgroup ----

// The norm's scales of an item's rows of x, from the sums of squares of its parts.
__device__ __forceinline__ void scale_rows(const Work& work, RowScales& scales, int first_row) {
    int helper = threadIdx.x / 32 - 1, lane = threadIdx.x % 32;
    for (int m = lane; m < ROWS; m += 32) {
        float sum = 0;
        if (first_row + m < work.num_rows) {
#pragma unroll 8
            for (int part = helper; part < work.num_squares; part += HELPERS)
                sum += work.squares[part * work.num_rows + first_row + m];
        }
        scales.sums[helper][m] = sum;
    }
    meet_threads(WARPGROUPS + 1, HELPERS * 32);
    for (int m = threadIdx.x - 32; m < ROWS; m += HELPERS * 32) {
        float sum = scales.sums[0][m] + scales.sums[1][m] + scales.sums[2][m];
        scales.of_row[m] = work.squares == nullptr ? 1.0f : rsqrtf(sum / work.size_k + work.eps);
    }
}

__device__ __forceinline__ void scale_all(const Work& work, RowScales& scales, Barriers* barriers, u32 rank) {
    wait_for_kernels_before();
    int scaled = -1;
    u32 parity = 1;
#pragma unroll 1
    for (int number = Item::first(); number < work.num_items; number += Item::step(), parity ^= 1) {
        Item item(work, number, rank);
        wait(&barriers->used, parity);
        if (item.row != scaled) scale_rows(work, scales, item.row);
        arrive(&barriers->scaled);
        if (scaled < 0) prefetch_addends(work, item);
        scaled = item.row;
    }
}

// ---- the warpgroups that multiply ----

// What a warp reads of a stage, for one of its products: its tiles of 16 rows of W.
struct Source {
    const char* stage;
    int row_tile;

    __device__ __forceinline__ Source(const char* stage, int group, int tile)
        : stage(stage + X_BYTES),
          row_tile(tile / BLOCKS * ROW_TILES + (group * BLOCKS + tile % BLOCKS) * 4 + threadIdx.x / 32 % 4) {}

    __device__ __forceinline__ const char* values(int k_tile) const {
        return stage + (row_tile * K_TILES + k_tile) * W_TILE_BYTES + threadIdx.x % 32 * 16;
    }

    __device__ __forceinline__ Pair scales(int group) const {
        const char* entries = stage + W_BYTES + row_tile * GROUPS_PER_STAGE * SCALE_BYTES[SCALE];
        return pair_of_scales(entries + group * SCALE_BYTES[SCALE], threadIdx.x % 32 / 4);
    }

    __device__ __forceinline__ Zeros zeros(int group) const {
        if constexpr (!ZEROS) return Zeros();
        const char* entry = stage + W_BYTES + SCALES_BYTES + (row_tile * GROUPS_PER_STAGE + group) * 32;
        return Zeros(reinterpret_cast<const u32*>(entry)[threadIdx.x % 32 / 4]);
    }
};

// A warp has read a stage: both programs of a cluster may send to it.
__device__ __forceinline__ void release(u64* read) {
    if (read != nullptr && threadIdx.x % 32 < CLUSTER) arrive_at(read, threadIdx.x % 32);
}

#if BY_WARPS
#include "packed_products_warps.cuh"  // multiply_item(sums, item, ring, barriers, place, group)
#else
// The compiler computes with these sums after the waits before this only.
__device__ __forceinline__ void settle(float (&sums)[SUMS]) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Put sums into units of the scale of the next group.
__device__ __forceinline__ void rescale(float (&sums)[SUMS], Pair& scale, Pair next) {
    settle(sums);
    float upper = __fdividef(scale.upper, next.upper), lower = __fdividef(scale.lower, next.lower);
#pragma unroll
    for (int i = 0; i < SUMS; i += 4) {
        sums[i] *= upper;
        sums[i + 1] *= upper;
        sums[i + 2] *= lower;
        sums[i + 3] *= lower;
    }
    scale = next;
}

// One unit of a stage: convert some columns of a product's rows of W, and begin to multiply by them.
template <int UNIT>
__device__ __forceinline__ void multiply_unit(Sums& sums, u32 (&w)[SLICES][4], const char* stage, int group) {
    constexpr int TILE = UNIT % TILES, SLICE = UNIT / TILES * SLICES;
    constexpr bool NEW_GROUP = GROUP > 0 && UNIT % UNITS_PER_GROUP < TILES;
    Source source(stage, group, TILE);
    if constexpr (NEW_GROUP) sums.zeros[TILE] = source.zeros(UNIT / UNITS_PER_GROUP);
    convert(w, source.values(SLICE / 4), SLICE % 4, sums.zeros[TILE]);
    if constexpr (NEW_GROUP) {
        Pair next = source.scales(UNIT / UNITS_PER_GROUP);
        // Products under way are another tile's, but from one stage to the next the compiler cannot see it.
        if constexpr (TILES == 1 || UNIT == 0) wait_products<0>();
        rescale(sums.of[TILE], sums.scale[TILE], next);
    }
    u64 x = described(shared(stage) + SLICE / 4 * X_TILE_BYTES) + SLICE % 4 * 2;
    begin_products();
#pragma unroll
    for (int slice = 0; slice < SLICES; ++slice) multiply(sums.of[TILE], w[slice], x + 2 * slice);  // 32 bytes on
    commit_products();
    wait_products<1>();  // those of the unit before: its registers are free
}

template <int UNIT = 0>
__device__ __forceinline__ void multiply_stage(
    Sums& sums, u32 (&w)[2][SLICES][4], const char* stage, int group, u64* read
) {
    multiply_unit<UNIT>(sums, w[UNIT % 2], stage, group);
    if constexpr (UNIT == 0) release(read);
    if constexpr (UNIT + 1 < UNITS) multiply_stage<UNIT + 1>(sums, w, stage, group, read);
}

__device__ __forceinline__ void multiply_item(
    Sums& sums, const Item& item, const char* ring, Barriers* barriers, Place& place, int group
) {
    u32 w[2][SLICES][4];
    u64* read = nullptr;
    for (int at = item.begin; at < item.end; ++at, place.advance()) {
        wait(&barriers->full[place.stage], place.parity);
        multiply_stage(sums, w, ring + place.stage * STAGE_PITCH, group, read);
        read = &barriers->empty[place.stage];
    }
    wait_products<0>();
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) settle(sums.of[tile]);
    release(read);
}
#endif

__device__ __forceinline__ void multiply_all(
    const Work& work, char* ring, Barriers* barriers, const RowScales& row_scales, u32 rank
) {
    int group = __shfl_sync(0xffffffff, threadIdx.x / 128 - 1, 0);
    Staging staging(ring + STAGES * STAGE_PITCH, group);
    Place place;
    u32 parity = 0;
    for (int number = Item::first(); number < work.num_items; number += Item::step(), parity ^= 1) {
        Item item(work, number, rank);
        Sums sums;
        begin_sums(sums, work, item, group);
        multiply_item(sums, item, ring, barriers, place, group);
        wait(&barriers->scaled, parity);
        finish(sums, work, item, row_scales.of_row, staging);
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&barriers->used);
    }
}

extern "C" __global__ void __launch_bounds__(128 * (1 + WARPGROUPS), PER_SM)
__cluster_dims__(CLUSTER, 1, 1) packed_products(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
    const __grid_constant__ TensorMap scales_map, const __grid_constant__ TensorMap zeros_map,
    const __grid_constant__ Work work
) {
    extern __shared__ __align__(1024) char ring[];
    __shared__ Barriers barriers;
    __shared__ RowScales row_scales;
    u32 rank = rank_in_cluster();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            set_up(&barriers.full[stage], 1);
            set_up(&barriers.empty[stage], WARPGROUPS * 4 * CLUSTER);
        }
        set_up(&barriers.scaled, HELPERS * 32);
        set_up(&barriers.used, WARPGROUPS * 4);
        show_barriers_to_cluster();
    }
    meet_cluster();
    let_next_begin();
    if (threadIdx.x < 128) {
        give_registers<COPY_REGISTERS>();
        Maps maps{&x_map, &w_map, &scales_map, &zeros_map};
        if (threadIdx.x == 0) copy_all(maps, work, ring, &barriers, rank);
        if (threadIdx.x >= 32) scale_all(work, row_scales, &barriers, rank);
        __syncwarp();
    } else {
        take_registers<MULTIPLY_REGISTERS>();
        wait_for_kernels_before();
        multiply_all(work, ring, &barriers, row_scales, rank);
    }
    if constexpr (CLUSTER > 1) meet_cluster();  // no program leaves while the other may send to it
}
