// The products of experts in float8 with a scale for each block of 128 columns, for many rows of x, on Hopper (sm_90a).
//
// A program has 128 rows of W and up to MOST rows of x of one expert at a time. W is the left operand of a warpgroup's
// products, 64 rows of it: a thread reads its values from shared memory, widens them, and multiplies from registers,
// while the values before are multiplied. x is the right operand. The tensor cores have as many rows of x as the tile
// has, rounded up to one of the numbers that `wgmma.h` is written for. One warp copies, two warpgroups multiply.
//
// Rows of x lie by expert, so those of a tile are neighbours. The programs of a cluster have the same rows of x and
// neighbouring rows of W: each brings a part of x to all of them, so that the L2 cache gives it once. A part is a copy
// for each half of the columns: many small ones hold up the products. The gated product writes its results by expert,
// for the second one, which writes by place.
//
//     ring    [stage] | x: 2 x [MOST, 64] swizzled by 128 bytes | W: [128, 128] float8, swizzled too |
//     full    of a stage: W has arrived, and x from all programs of the cluster
//     empty   of a stage: the multiplying warps of all programs of the cluster have read it
//
// Of gate and up a thread has the same column, in rows g and g + 8 of its product. Sums of 128 columns are scaled and
// added in their order; the tensor cores add 16 columns at a time, as all kernels of quantized_products.py have it.
//
// All numbers of rows together must be few instructions: those of a tile with another number are read anew. So only the
// loop is there for each, and what follows it once, for the largest number.
//
// The command line defines the names below. Where it is launched: quantized_products.py.
//
//     GATED    1: silu(gate) * up        MOST    rows of x, at most       EXPERTS
//     STAGES   of the ring               SLICES  of 16 columns, widened at once        PIECE  rows staged at once
//     CLUSTER  programs of it

#include "expert_tiles.cuh"

constexpr int DEPTH = 128, HALF = MOST * 128;
constexpr int X_BYTES = 2 * HALF, W_BYTES = 128 * DEPTH, STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int UNITS = DEPTH / 16 / SLICES;
constexpr int BLOCK = GATED ? 64 : 128;       // columns of the result
constexpr int OF_GROUP = BLOCK / 2;           // of a warpgroup
constexpr int PITCH = OF_GROUP * 2 + 16;      // bytes of a staged row: rows lie in different banks
static_assert(MOST % PIECE == 0 && PIECE % 32 == 0, "pieces are whole, and of whole matrices");

struct Shared {
    u64 full[STAGES], empty[STAGES];
    Tiles tiles;
    int places[2][MOST];  // of a warpgroup's tile
};

__device__ __forceinline__ int parts_of(const Work& work) { return work.size_n / (BLOCK * CLUSTER); }

__device__ __forceinline__ int first_column(const Item& item) {
    return (item.part * CLUSTER + rank_in_cluster()) * BLOCK;
}

// ---- the warp that copies ----

// `more`: bytes that arrive beside W.
__device__ __forceinline__ void copy_w(
    const TensorMap* map, const Work& work, const Item& item, u32 to, u64* full, int c, int more
) {
    int row = item.expert * work.size_n * (GATED ? 2 : 1) + first_column(item);
    expect(full, W_BYTES + more);
    copy_tile(to, map, full, c * DEPTH, row);
    copy_tile(to + W_BYTES / 2, map, full, c * DEPTH, row + (GATED ? work.size_n : 64));
}

__device__ __forceinline__ void copy_all(
    const TensorMap* w_map, const Maps& x_maps, const Work& work, char* ring, Shared& shared_, int items
) {
    constexpr u16 TO_ALL = (1 << CLUSTER) - 1;
    Place place;
    for (int number = blockIdx.x / CLUSTER; number < items; number += gridDim.x / CLUSTER) {
        Item item(shared_.tiles, number, parts_of(work));
        int size = size_of(item.live), all = copied_of(size), own = rank_in_cluster() * (all / CLUSTER);
        const TensorMap* x_map = &x_maps.of[size];
#pragma unroll 1
        for (int c = 0; c < work.chunks; ++c, place.advance()) {
            u64* full = &shared_.full[place.stage];
            u32 stage = shared(ring + place.stage * STAGE_BYTES), to = stage + own * 128;
            wait(&shared_.empty[place.stage], place.parity ^ 1);
            if (threadIdx.x > 0) continue;
            copy_w(w_map, work, item, stage + X_BYTES, full, c, all * 256);
            send_tile(to, x_map, full, c * DEPTH, item.begin + own, TO_ALL);
            send_tile(to + HALF, x_map, full, c * DEPTH + 64, item.begin + own, TO_ALL);
        }
    }
}

// ---- the warpgroups that multiply ----

// `lane`: the thread's row and first column of W in a stage.
__device__ __forceinline__ void widen(u32 (&w)[SLICES][4], const char* lane, int unit, int swizzle) {
    constexpr int LOWER = (GATED ? 64 : 8) * DEPTH;
#pragma unroll
    for (int i = 0; i < SLICES; ++i) {
        const char* from = lane + ((unit * SLICES + i) * 16 ^ swizzle);
        w[i][0] = widened(from);
        w[i][1] = widened(from + LOWER);
        w[i][2] = widened(from + 8);
        w[i][3] = widened(from + LOWER + 8);
    }
}

// `gated` of hopper.cuh, with the same bits in fewer instructions: the sum is at least 1.
__device__ __forceinline__ float gated_short(float gate, float up) {
    float power, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(gate, __int_as_float(0xbfb8aa3b))));
    float sum = __fadd_rn(1.0f, power), scale = sum > 0x1p126f ? 0.25f : 1.0f;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(__fmul_rn(sum, scale)));
    return __fmul_rn(__fmul_rn(__fmul_rn(gate, scale), inverse), up);
}

// Rows of the result in pieces through shared memory, so that neighbouring threads write neighbouring columns.
__device__ __forceinline__ void finish(
    const float (&y)[MOST / 2], const Work& work, const Item& item, Shared& shared_, const int (&place_of)[2],
    char* staged, int group
) {
    constexpr int ACROSS = GATED ? 4 : 2, THREADS = OF_GROUP / 8;
    int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, matrix = lane / 8;
    int* places = shared_.places[group];
    u16* out = work.out + first_column(item) + group * OF_GROUP + thread % THREADS * 8;
    int staged_row = (GATED ? matrix : matrix / 2) * 8 + lane % 8;
    u32 to = shared(staged + staged_row * PITCH) + (GATED ? warp * 8 : warp * 16 + matrix % 2 * 8) * 2;
    const char* from = staged + thread / THREADS * PITCH + thread % THREADS * 16;
#pragma unroll
    for (int begin = 0; begin < MOST; begin += PIECE) {
        if (begin > 0 && begin >= item.live) continue;
        meet_threads(2 + group, 128);  // the piece before is read
        if (!GATED && begin == 0) {
            places[thread] = place_of[0];
            if (thread + 128 < MOST) places[thread + 128] = place_of[1];
        }
#pragma unroll
        for (int step = 0; step < PIECE / 8; step += ACROSS) {
            const float* sums = y + (begin / 8 + step) * 4;
            u32 values[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* own = sums + (GATED ? i * 4 : i * 2);
                if constexpr (GATED) values[i] = round2(gated_short(own[0], own[2]), gated_short(own[1], own[3]));
                else values[i] = round2(own[0], own[1]);
            }
            store_across(to + step * 8 * PITCH, values[0], values[1], values[2], values[3]);
        }
        meet_threads(2 + group, 128);
#pragma unroll
        for (int step = 0; step < PIECE; step += 128 / THREADS) {
            int row = begin + step + thread / THREADS;
            if (row < item.live) {
                uint4 eight = *reinterpret_cast<const uint4*>(from + step * PITCH);
                long long place = GATED ? item.begin + row : places[row];
                *reinterpret_cast<uint4*>(out + place * work.size_n) = eight;
            }
        }
    }
}

template <int SUMS>
__device__ __forceinline__ void multiply_chunk(
    float (&part)[SUMS], u32 (&w)[2][SLICES][4], const char* stage, int lane, int swizzle
) {
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
        if (unit > 0) widen(w[unit % 2], stage + lane, unit, swizzle);
        begin_products();
#pragma unroll
        for (int i = 0; i < SLICES; ++i) {
            int slice = unit * SLICES + i;
            u64 x = described(shared(stage) + slice / 4 * HALF) + slice % 4 * 2;
            multiply(part, w[unit % 2][i], x, slice > 0);
        }
        commit_products();
        wait_products<1>();  // those of the unit before: its registers are free
    }
}

// `result`: also what the tile has no rows for.
template <int SUMS>
__device__ __forceinline__ void multiply_item(
    float (&result)[MOST / 2], const Work& work, const Item& item, const char* ring, Shared& shared_, Place& place,
    int group
) {
    int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4;
    int row = GATED ? group * 32 + warp * 8 + g : group * 64 + warp * 16 + g;
    int lane = X_BYTES + row * DEPTH + threadIdx.x % 4 * 2, swizzle = g * 16, column = first_column(item) + row;
    const float* scales = work.scales + static_cast<long long>(item.expert) * work.chunks * work.scale_columns;
    const float* uppers = scales + column / work.scale_rows;
    const float* lowers = scales + (column + (GATED ? work.size_n : 8)) / work.scale_rows;
    float y[SUMS] = {}, part[SUMS] = {}, upper = 0.0f, lower = 0.0f;
    u32 w[2][SLICES][4];
    u64* read = nullptr;
    // The second warpgroup begins behind the first one's products, so that one adds up while the other one multiplies. The
    // ring keeps them within STAGES chunks of each other, so an item must have more.
    bool are_apart = work.chunks > STAGES;
#pragma unroll 1
    for (int c = 0; c < work.chunks; ++c, place.advance()) {
        const char* stage = ring + place.stage * STAGE_BYTES;
        float next_upper = uppers[c * work.scale_columns], next_lower = lowers[c * work.scale_columns];
        wait(&shared_.full[place.stage], place.parity);
        widen(w[0], stage + lane, 0, swizzle);
        if (c > 0) {
            wait_products<0>();
            if (threadIdx.x % 32 < CLUSTER) arrive_at(read, threadIdx.x % 32);
            add_chunk(y, part, upper, lower);
        } else if (group == 1 && are_apart) {
            meet_threads(4, 256);
        }
        multiply_chunk(part, w, stage, lane, swizzle);
        if (c == 0 && group == 0 && are_apart) pass_threads(4, 256);
        read = &shared_.empty[place.stage];
        upper = next_upper;
        lower = next_lower;
    }
    wait_products<0>();
    if (threadIdx.x % 32 < CLUSTER) arrive_at(read, threadIdx.x % 32);
    add_chunk(y, part, upper, lower);
#pragma unroll
    for (int i = 0; i < MOST / 2; ++i) result[i] = i < SUMS ? y[i % SUMS] : 0.0f;
}

__device__ __forceinline__ void multiply_all(
    const Work& work, const char* ring, Shared& shared_, char* staged, int items
) {
    int group = __shfl_sync(0xffffffff, threadIdx.x / 128 - 1, 0);
    staged += group * PIECE * PITCH;
    Place place;
#pragma unroll 1
    for (int number = blockIdx.x / CLUSTER; number < items; number += gridDim.x / CLUSTER) {
        Item item(shared_.tiles, number, parts_of(work));
        int thread = threadIdx.x % 128, place_of[2] = {};  // of the second product: read now, needed in the end
        if (!GATED) {
            for (int i = 0; i < 2; ++i) place_of[i] = item.places(work)[min(thread + i * 128, item.live - 1)];
        }
        float y[MOST / 2];
        switch (rows_of(size_of(item.live))) {
#define CASE(N) \
    case N: multiply_item<N / 2>(y, work, item, ring, shared_, place, group); break;
            FOR_ROWS(CASE)
        }
        finish(y, work, item, shared_, place_of, staged, group);
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(384, 1) expert_tiles(
    const __grid_constant__ TensorMap w_map, const __grid_constant__ Maps x_maps, const __grid_constant__ Work work
) {
    extern __shared__ __align__(1024) char ring[];
    __shared__ Shared shared_;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            set_up(&shared_.full[stage], 1);
            set_up(&shared_.empty[stage], 8 * CLUSTER);
        }
        show_barriers_to_cluster();
        show_to_copies();
    }
    meet_cluster();
    wait_for_kernels_before();
    let_next_begin();
    count_tiles(work, shared_.tiles);
    int items = shared_.tiles.ends[EXPERTS - 1] * parts_of(work);
    if (threadIdx.x < 128) {
        give_registers<24>();
        if (threadIdx.x < 32) copy_all(&w_map, x_maps, work, ring, shared_, items);
    } else {
        take_registers<240>();
        multiply_all(work, ring, shared_, ring + STAGES * STAGE_BYTES, items);
    }
    meet_cluster();  // no program leaves while the other may send to it
}
