// y = x W^T for 9 to 128 rows of x on Hopper (sm_90a), where W is stored in 8 or 4 bits, in fragment order.
//
// W is the left operand of a warpgroup's products: 64 rows of it at a time. A thread reads its own values of W from
// shared memory, converts them to bfloat16, which is exact, and multiplies from registers. x is the right operand, in
// shared memory. One warp copies W, another one x. The multiplying warpgroups never meet in the loop over K: while one
// converts, another one multiplies, and within one the next operands are converted while the previous are multiplied.
//
//     ring    [stage] | x: 2 x [ROWS, 64] swizzled by 128 bytes | W: tiles of 16 x 64 | scales | zero points |
//     full    of a stage: the bytes of W and of x have arrived, those of x from both programs of a cluster
//     empty   of a stage: the multiplying warps have read it, those of both programs since x is sent to both
//     sums    [64 rows of W, ROWS] per product, in units of the scale of W's present group of columns
//
// A scale of a group belongs to a row of W. When it changes, the sums are multiplied by old / new, so that no second
// set of sums is needed; this rounds them once more, as an addition does.
//
// K may be split among `splits` programs. Each leaves its sums in global memory, waits until all parts of its tile are
// there, and adds and finishes a share of them, in the order of the parts. All programs of a launch run at once, or
// this wait could last forever.
//
// A launch may take several linears, each of which reads what the one before it wrote. No program begins to read x
// before all have ended the linear before. W does not depend on it: by then the ring is full of the next linear's.
//
// The command line defines the names below; `wgmma.h` is written for ROWS. packed_products.py chooses.
//
//     BITS    of a value: 4 or 8                           BLOCKS      of 64 columns of the result, of a warpgroup
//     GROUP   columns that share a scale; 0: a row         WARPGROUPS  that multiply: 2 or 3
//     SCALE   type of scales, see packed_values.cuh        STAGES      of the ring
//     ZEROS   1: zero points, else 8 of 4 bits             CLUSTER     programs that share the copies of x: 1 or 2
//     GATED   of each linear, 1: silu(gate) * up,          PER_SM      programs of a multiprocessor: 1 or 2
//             gate's rows first                            ROWS        of x, padded to a multiple of 16

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
    float* parts;             // [tiles, splits, ..]: sums of parts of K
    u32* counters;            // [tiles, WARPGROUPS], zero before and after but for the highest bit
    float eps;
    int num_rows;     // T
    int size_n;       // N, columns of the result
    int size_k;       // K
    int num_items;    // tiles of W times splits, of a cluster
    int splits;       // parts of K
    int num_squares;
    int residual_stride;
    int is_float;
};

// A linear. What is not there has W's map.
struct Linear {
    TensorMap x, w, scales, zeros;
    Work work;
};

constexpr int GATES[] = {GATED};
constexpr int LINEARS = sizeof(GATES) / sizeof(GATES[0]);

struct Linears {
    Linear of[LINEARS];
    u32* ended;         // [LINEARS]: warpgroups that ended each; of the last, programs that need no count. Zero before
    const char* ahead;  // what the next launch reads first, a multiple of 16 bytes, or none
    int bytes_ahead;
};

constexpr u32 gates_mask() {
    u32 mask = 0;
    for (int i = 0; i < LINEARS; ++i) mask |= GATES[i] << i;
    return mask;
}

constexpr int K_TILES = 2;  // tiles of 64 columns in a stage
constexpr int DEPTH = K_TILES * 64;
constexpr int SUMS = ROWS / 2;  // per thread: 64 x ROWS over 128 threads
constexpr int COLUMNS = WARPGROUPS * BLOCKS * 64;  // of the result, in a program
constexpr int ROW_TILES = COLUMNS / 16;
constexpr int SLICES = GROUP == 32 ? 2 : 4;  // of 16 columns, converted at once
constexpr int X_TILE_BYTES = ROWS * 128;
constexpr int X_BYTES = K_TILES * X_TILE_BYTES;
constexpr int W_TILE_BYTES = 128 * BITS;
constexpr int GROUPS_PER_STAGE = GROUP ? DEPTH / GROUP : 0;
constexpr int SCALES_PER_GROUP = SCALE_BYTES[SCALE] / SCALE_SIZES[SCALE];

// Of a linear with one matrix, or with two: gate and up.
template <int MATRICES>
struct Shape {
    static constexpr int TILES = BLOCKS * MATRICES;  // of 64 rows of W, of a warpgroup; gate's first
    static constexpr int UNITS = K_TILES * 4 / SLICES * TILES;
    static constexpr int UNITS_PER_GROUP = GROUP ? GROUP / 16 / SLICES * TILES : UNITS;
    static_assert(UNITS % 2 == 0, "operands of units alternate between two sets of registers");

    static constexpr int MATRIX_BYTES = ROW_TILES * K_TILES * W_TILE_BYTES;  // of a stage
    static constexpr int MATRIX_SCALES_BYTES = ROW_TILES * GROUPS_PER_STAGE * SCALE_BYTES[SCALE];
    static constexpr int MATRIX_ZEROS_BYTES = ZEROS ? ROW_TILES * GROUPS_PER_STAGE * 32 : 0;
    static_assert(MATRIX_SCALES_BYTES % 128 == 0 && MATRIX_ZEROS_BYTES % 128 == 0, "targets of copies");
    static constexpr int SCALES_AT = X_BYTES + MATRICES * MATRIX_BYTES;
    static constexpr int ZEROS_AT = SCALES_AT + MATRICES * MATRIX_SCALES_BYTES;
    static constexpr int STAGE_BYTES = ZEROS_AT + MATRICES * MATRIX_ZEROS_BYTES;
};

constexpr int MOST_BYTES = gates_mask() ? Shape<2>::STAGE_BYTES : Shape<1>::STAGE_BYTES;
constexpr int STAGE_PITCH = (MOST_BYTES + 1023) / 1024 * 1024;

// Registers of a thread: at the start, then of the warpgroup that copies, and of those that multiply. They come from
// those of the start.
constexpr int START_REGISTERS = 65536 / (PER_SM * 128 * (1 + WARPGROUPS)) / 8 * 8;
constexpr int COPY_REGISTERS = PER_SM == 1 && WARPGROUPS == 2 ? 40 : 32;
constexpr int MULTIPLY_REGISTERS = PER_SM == 2 ? 104 : WARPGROUPS == 2 ? 232 : 160;
static_assert(COPY_REGISTERS + WARPGROUPS * MULTIPLY_REGISTERS <= (1 + WARPGROUPS) * START_REGISTERS, "registers");

constexpr int HELPERS = 2;  // warps that compute the norm's scales of rows of x
constexpr u16 ALL_RANKS = (1 << CLUSTER) - 1;

struct Barriers {
    u64 full[STAGES];
    u64 empty[STAGES];
    u64 begun;   // x of a linear may be read
    u64 scaled;  // `RowScales::of_row` of a linear is there
};

struct RowScales {
    float of_row[ROWS];
    float sums[HELPERS][ROWS];
};

// A part of K of a tile of W. The programs of a cluster take neighbouring tiles and the same part.
struct Item {
    int tile, part, begin, end;  // stages begin..end - 1 of K

    __device__ __forceinline__ Item(const Work& work, int number, int rank)
        : tile(number / work.splits * CLUSTER + rank), part(number % work.splits) {
        int stages = (work.size_k + DEPTH - 1) / DEPTH;
        begin = part * stages / work.splits;
        end = (part + 1) * stages / work.splits;
    }

    static __device__ __forceinline__ int first() { return blockIdx.x / CLUSTER; }
    static __device__ __forceinline__ int step() { return gridDim.x / CLUSTER; }
};

// A place in the ring: a stage, and the parity of its barriers' phase.
struct Place {
    int stage = 0;
    u32 parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ bool has_gate(int linear) { return gates_mask() >> linear & 1; }

#include "packed_products_ends.cuh"    // finish(sums, work, item, row_scales, staging)
#include "packed_products_copies.cuh"  // copy_weights, copy_rows, help, end_linear

// ---- the warpgroups that multiply ----

// What a warp reads of a stage, for one of its products: its tiles of 16 rows of W.
template <int MATRICES>
struct Source {
    using S = Shape<MATRICES>;
    const char* stage;
    int row_tile;

    __device__ __forceinline__ Source(const char* stage, int group, int tile)
        : stage(stage),
          row_tile(tile / BLOCKS * ROW_TILES + (group * BLOCKS + tile % BLOCKS) * 4 + threadIdx.x / 32 % 4) {}

    __device__ __forceinline__ const char* values(int k_tile) const {
        return stage + X_BYTES + (row_tile * K_TILES + k_tile) * W_TILE_BYTES + threadIdx.x % 32 * 16;
    }

    __device__ __forceinline__ Pair scales(int group) const {
        const char* entries = stage + S::SCALES_AT + row_tile * GROUPS_PER_STAGE * SCALE_BYTES[SCALE];
        return pair_of_scales(entries + group * SCALE_BYTES[SCALE], threadIdx.x % 32 / 4);
    }

    __device__ __forceinline__ Zeros zeros(int group) const {
        if constexpr (!ZEROS) return Zeros();
        const char* entry = stage + S::ZEROS_AT + (row_tile * GROUPS_PER_STAGE + group) * 32;
        return Zeros(reinterpret_cast<const u32*>(entry)[threadIdx.x % 32 / 4]);
    }
};

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
template <int MATRICES, int UNIT>
__device__ __forceinline__ void multiply_unit(Sums<MATRICES>& sums, u32 (&w)[SLICES][4], const char* stage, int group) {
    using S = Shape<MATRICES>;
    constexpr int TILE = UNIT % S::TILES, SLICE = UNIT / S::TILES * SLICES;
    constexpr bool NEW_GROUP = GROUP > 0 && UNIT % S::UNITS_PER_GROUP < S::TILES;
    Source<MATRICES> source(stage, group, TILE);
    if constexpr (NEW_GROUP) sums.zeros[TILE] = source.zeros(UNIT / S::UNITS_PER_GROUP);
    convert(w, source.values(SLICE / 4), SLICE % 4, sums.zeros[TILE]);
    if constexpr (NEW_GROUP) {
        Pair next = source.scales(UNIT / S::UNITS_PER_GROUP);
        // Products under way are another tile's, but from one stage to the next the compiler cannot see it.
        if constexpr (S::TILES == 1 || UNIT == 0) wait_products<0>();
        rescale(sums.of[TILE], sums.scale[TILE], next);
    }
    u64 x = described(shared(stage) + SLICE / 4 * X_TILE_BYTES) + SLICE % 4 * 2;
    begin_products();
#pragma unroll
    for (int slice = 0; slice < SLICES; ++slice) multiply(sums.of[TILE], w[slice], x + 2 * slice);  // 32 bytes on
    commit_products();
    wait_products<1>();  // those of the unit before: its registers are free
}

// A warp has read a stage: both programs of a cluster may send to it.
__device__ __forceinline__ void release(u64* read) {
    if (read != nullptr && threadIdx.x % 32 < CLUSTER) arrive_at(read, threadIdx.x % 32);
}

template <int MATRICES, int UNIT = 0>
__device__ __forceinline__ void multiply_stage(
    Sums<MATRICES>& sums, u32 (&w)[2][SLICES][4], const char* stage, int group, u64* read
) {
    multiply_unit<MATRICES, UNIT>(sums, w[UNIT % 2], stage, group);
    if constexpr (UNIT == 0) release(read);
    if constexpr (UNIT + 1 < Shape<MATRICES>::UNITS)
        multiply_stage<MATRICES, UNIT + 1>(sums, w, stage, group, read);
}

template <int MATRICES>
__device__ __forceinline__ void multiply_item(
    Sums<MATRICES>& sums, const Item& item, const char* ring, Barriers* barriers, Place& place, int group
) {
    u32 w[2][SLICES][4];
    u64* read = nullptr;
    for (int at = item.begin; at < item.end; ++at, place.advance()) {
        wait(&barriers->full[place.stage], place.parity);
        multiply_stage<MATRICES>(sums, w, ring + place.stage * STAGE_PITCH, group, read);
        read = &barriers->empty[place.stage];
    }
    wait_products<0>();
#pragma unroll
    for (int tile = 0; tile < Shape<MATRICES>::TILES; ++tile) settle(sums.of[tile]);
    release(read);
}

// What a warpgroup takes from linear to linear.
struct Warpgroup {
    char* ring;
    Barriers* barriers;
    const RowScales& row_scales;
    u32 rank;
    int group;
    Staging staging;
    Place place;
};

template <int MATRICES>
__device__ __forceinline__ void multiply_all_of(const Work& work, Warpgroup& own, int linear) {
    for (int number = Item::first(); number < work.num_items; number += Item::step()) {
        Item item(work, number, own.rank);
        Sums<MATRICES> sums;
        begin_sums<MATRICES>(sums, work, item, own.group);
        multiply_item<MATRICES>(sums, item, own.ring, own.barriers, own.place, own.group);
        wait(&own.barriers->scaled, linear & 1);
        finish<MATRICES>(sums, work, item, own.row_scales.of_row, own.staging);
    }
}

__device__ __forceinline__ void multiply_all(
    const Linears& linears, char* ring, Barriers* barriers, const RowScales& row_scales, u32 rank
) {
    int group = __shfl_sync(0xffffffff, threadIdx.x / 128 - 1, 0);
    Warpgroup own{ring, barriers, row_scales, rank, group, Staging(ring + STAGES * STAGE_PITCH, group)};
#pragma unroll 1
    for (int number = 0; number < LINEARS; ++number) {
        if (has_gate(number))
            multiply_all_of<2>(linears.of[number].work, own, number);
        else
            multiply_all_of<1>(linears.of[number].work, own, number);
        if (number + 1 < LINEARS) {
            wait(&barriers->scaled, number & 1);  // without an item too, or two phases later the parity is the same
            end_linear(linears.ended, number, group);
        }
    }
}

// All threads of a cluster. One of a single program needs no fence of the whole GPU, which takes longer than all else
// that a program does before its first copy.
__device__ __forceinline__ void meet_programs() {
    if constexpr (CLUSTER > 1)
        meet_cluster();
    else
        __syncthreads();
}

extern "C" __global__ void __launch_bounds__(128 * (1 + WARPGROUPS), PER_SM)
__cluster_dims__(CLUSTER, 1, 1) packed_products(const __grid_constant__ Linears linears) {
    extern __shared__ __align__(1024) char ring[];
    __shared__ Barriers barriers;
    __shared__ RowScales row_scales;
    u32 rank = rank_in_cluster();
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            set_up(&barriers.full[stage], 2);
            set_up(&barriers.empty[stage], WARPGROUPS * 4 * CLUSTER);
        }
        set_up(&barriers.begun, 1);
        set_up(&barriers.scaled, HELPERS * 32);
        show_barriers_to_cluster();
    }
    meet_programs();
    let_next_begin();
    if (threadIdx.x < 128) {
        give_registers<COPY_REGISTERS>();
        if (threadIdx.x == 0) copy_weights(linears, ring, &barriers, rank);
        if (threadIdx.x == 32) copy_rows(linears, ring, &barriers, rank);
        if (threadIdx.x >= 64) help(linears, row_scales, &barriers, rank);
        __syncwarp();
    } else {
        take_registers<MULTIPLY_REGISTERS>();
        wait_for_kernels_before();
        multiply_all(linears, ring, &barriers, row_scales, rank);
    }
    if constexpr (CLUSTER > 1) meet_cluster();  // no program leaves while the other may send to it
}
