// The products of experts in float8 with a scale for each block of 128 columns, for many rows of x, on Hopper (sm_90a).
//
// A program has 128 rows of W and up to MOST rows of x of one expert at a time. W is the left operand of a warpgroup's
// products, 64 rows of it: a thread reads its values from shared memory, widens them, and multiplies from registers,
// while the values before are multiplied. x is the right operand. The tensor cores have as many rows of x as the tile
// has, rounded up to one of the numbers that `wgmma.h` is written for. One warp copies, two warpgroups multiply.
//
// Rows of x lie by expert, so those of a tile are neighbours. The programs of a cluster have the same rows of x and
// neighbouring rows of W: each brings a part of x to all of them, so that the L2 cache gives it once. The gated product
// writes its results by expert, for the second one, which writes by place.
//
//     ring    [stage] | x: 2 x [MOST, 64] swizzled by 128 bytes | W: [128, 128] float8, swizzled too |
//     full    of a stage: W has arrived, and x from all programs of the cluster
//     empty   of a stage: the multiplying warps of all programs of the cluster have read it
//
// Of gate and up a thread has the same column, in rows g and g + 8 of its product. Sums of 128 columns are scaled and
// added in their order; the tensor cores add 16 columns at a time, as all kernels of quantized_products.py have it.
//
// The command line defines the names below. Where it is launched: quantized_products.py.
//
//     GATED    1: silu(gate) * up        MOST    rows of x, at most       EXPERTS
//     STAGES   of the ring               SLICES  of 16 columns, widened at once        PIECE  rows staged at once
//     CLUSTER  programs of it           BOX     rows of x that are copied at once

#include "hopper.cuh"
#include "wgmma.h"  // multiply(sums, w, x, add) for each number of rows; FOR_ROWS(do)

// What the kernel is given beside the maps of W and x; the same fields in quantized_products.py.
struct Work {
    const float* scales;  // [E, I / 128, scale_columns]
    const int* counts;    // [E]
    const int* listed;    // [E, T]: places
    u16* out;             // [T * k, N], by expert or by place
    int size_n;           // columns of the result
    int num_rows;         // T
    int chunks;           // of 128 columns of K
    int scale_columns, scale_rows;
};

constexpr int DEPTH = 128, HALF = MOST * 128;
constexpr int X_BYTES = 2 * HALF, W_BYTES = 128 * DEPTH, STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int UNITS = DEPTH / 16 / SLICES;
constexpr int BLOCK = GATED ? 64 : 128;       // columns of the result
constexpr int OF_GROUP = BLOCK / 2;           // of a warpgroup
constexpr int PITCH = OF_GROUP * 2 + 16;      // bytes of a staged row: rows lie in different banks
constexpr int EACH = (EXPERTS + 31) / 32;     // experts among which a lane looks
static_assert(EACH <= 32);
static_assert(UNITS % 2 == 0, "operands of units alternate between two sets of registers");

struct Shared {
    u64 full[STAGES], empty[STAGES];
    int ends[EXPERTS];   // number of tiles of an expert and of all before it
    int counts[EXPERTS + 1]; // of places of all experts before it
    int places[2][MOST]; // of a warpgroup's tile
};

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

// A tile of an expert's places, all of whose tiles are about as large, and a block of the result's columns. A warp looks
// for it, in two steps.
struct Item {
    int expert, block, first, live;

    __device__ __forceinline__ Item(const Work& work, const Shared& shared, int number) {
        int blocks = work.size_n / (BLOCK * CLUSTER), tile = number / blocks, lane = threadIdx.x % 32;
        block = number % blocks * CLUSTER + rank_in_cluster();
        u32 behind = __ballot_sync(0xffffffff, shared.ends[min((lane + 1) * EACH, EXPERTS) - 1] > tile);
        expert = (__ffs(behind) - 1) * EACH;
        behind = __ballot_sync(0xffffffff, shared.ends[min(expert + lane, EXPERTS - 1)] > tile);
        expert += __ffs(behind) - 1;
        int before = expert > 0 ? shared.ends[expert - 1] : 0, tiles = shared.ends[expert] - before;
        int count = shared.counts[expert + 1] - shared.counts[expert], share = ((count + tiles - 1) / tiles + 7) / 8 * 8;
        first = (tile - before) * share;
        live = min(share, count - first);
    }

    // Of its rows, by expert.
    __device__ __forceinline__ int begin(const Shared& shared) const { return shared.counts[expert] + first; }

    __device__ __forceinline__ const int* places(const Work& work) const {
        return work.listed + static_cast<long long>(expert) * work.num_rows + first;
    }
};

// Count tiles: all threads.
__device__ __forceinline__ void count_tiles(const Work& work, Shared& shared) {
    for (int e = threadIdx.x; e < EXPERTS; e += blockDim.x) {
        shared.counts[e] = work.counts[e];
        shared.ends[e] = (shared.counts[e] + MOST - 1) / MOST;
    }
    __syncthreads();
    if (threadIdx.x < 64) {  // a warp adds up tiles, another one places
        int* numbers = threadIdx.x < 32 ? shared.ends : shared.counts;
        int before = 0, lane = threadIdx.x % 32;
        for (int begin = 0; begin < EXPERTS; begin += 32) {
            int e = begin + lane, own = e < EXPERTS ? numbers[e] : 0, sum = own;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                int other = __shfl_up_sync(0xffffffff, sum, step);
                if (lane >= step) sum += other;
            }
            sum += before;
            if (e < EXPERTS) numbers[e] = threadIdx.x < 32 ? sum : sum - own;
            before = __shfl_sync(0xffffffff, sum, 31);
        }
        if (threadIdx.x == 32) numbers[EXPERTS] = before;
    }
    __syncthreads();
}

// ---- the warp that copies ----

// `more`: bytes that arrive beside W.
__device__ __forceinline__ void copy_w(
    const TensorMap* map, const Work& work, const Item& item, u32 to, u64* full, int c, int more
) {
    int row = item.expert * work.size_n * (GATED ? 2 : 1) + item.block * BLOCK;
    expect(full, W_BYTES + more);
    copy_tile(to, map, full, c * DEPTH, row);
    copy_tile(to + W_BYTES / 2, map, full, c * DEPTH, row + (GATED ? work.size_n : 64));
}

__device__ __forceinline__ void copy_all(
    const TensorMap* w_map, const TensorMap* x_map, const Work& work, char* ring, Shared& shared_, int items
) {
    constexpr u16 TO_ALL = (1 << CLUSTER) - 1;
    Place place;
    int own = rank_in_cluster() * BOX;
    for (int number = blockIdx.x / CLUSTER; number < items; number += gridDim.x / CLUSTER) {
        Item item(work, shared_, number);
        int all = rounded_rows(item.live), begin = item.begin(shared_);
        for (int c = 0; c < work.chunks; ++c, place.advance()) {
            u64* full = &shared_.full[place.stage];
            u32 stage = shared(ring + place.stage * STAGE_BYTES);
            wait(&shared_.empty[place.stage], place.parity ^ 1);
            if (threadIdx.x > 0) continue;
            copy_w(w_map, work, item, stage + X_BYTES, full, c, all * 256);
            for (int row = own; row < all; row += CLUSTER * BOX) {
                send_tile(stage + row * 128, x_map, full, c * DEPTH, begin + row, TO_ALL);
                send_tile(stage + HALF + row * 128, x_map, full, c * DEPTH + 64, begin + row, TO_ALL);
            }
        }
    }
}

// ---- the warpgroups that multiply ----

// Two values in bfloat16. Their exponents are 120 too small at first; NaN becomes 480.
__device__ __forceinline__ u32 widened(const char* two) {
    u32 values = *reinterpret_cast<const u16*>(two);
    asm("prmt.b32 %0, %1, %2, 0x1804;" : "=r"(values) : "r"(values), "r"(0));
    values = static_cast<u32>(static_cast<int>(values) >> 4) & 0x87f087f0;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(values) : "r"(values), "r"(0x7b807b80));
    return values;
}

// `lane`: the thread's row and first column of W in a stage.
template <int UNIT>
__device__ __forceinline__ void widen(u32 (&w)[SLICES][4], const char* lane, int swizzle) {
    constexpr int LOWER = (GATED ? 64 : 8) * DEPTH;
#pragma unroll
    for (int i = 0; i < SLICES; ++i) {
        const char* from = lane + ((UNIT * SLICES + i) * 16 ^ swizzle);
        w[i][0] = widened(from);
        w[i][1] = widened(from + LOWER);
        w[i][2] = widened(from + 8);
        w[i][3] = widened(from + LOWER + 8);
    }
}

template <int SUMS>
__device__ __forceinline__ void settle(float (&sums)[SUMS]) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Add the sums of a chunk, by its scales.
template <int SUMS>
__device__ __forceinline__ void add_chunk(float (&y)[SUMS], float (&part)[SUMS], float upper, float lower) {
    settle(part);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) y[i] = __fmaf_rn(part[i], i % 4 < 2 ? upper : lower, y[i]);
}

__device__ __forceinline__ u32 round2(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// Eight rows of W by two of x become two rows of eight columns.
__device__ __forceinline__ void store_across(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// Rows of the result in pieces through shared memory, so that neighbouring threads write neighbouring columns.
template <int SUMS>
__device__ __forceinline__ void finish(
    const float (&y)[SUMS], const Work& work, const Item& item, Shared& shared_, const int (&place_of)[2], char* staged,
    int group
) {
    constexpr int ROWS = 2 * SUMS, MATRICES = ROWS / 8, ACROSS = GATED ? 4 : 2, THREADS = OF_GROUP / 8;
    int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    int* places = shared_.places[group];
    u16* out = work.out + item.block * BLOCK + group * OF_GROUP + thread % THREADS * 8;
#pragma unroll
    for (int begin = 0; begin < MATRICES; begin += PIECE / 8) {
        meet_threads(2 + group, 128);  // the piece before is read
        if (!GATED && begin == 0) {
            places[thread] = place_of[0];
            if (thread + 128 < MOST) places[thread + 128] = place_of[1];
        }
#pragma unroll
        for (int step = 0; step < PIECE / 8; step += ACROSS) {
            if (begin + step >= MATRICES) continue;
            u32 values[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int j = begin + step + (GATED ? i : i / 2), at = (j < MATRICES ? j : MATRICES - 1) * 4;
                if constexpr (GATED) values[i] = round2(gated(y[at], y[at + 2]), gated(y[at + 1], y[at + 3]));
                else values[i] = round2(y[at + i % 2 * 2], y[at + i % 2 * 2 + 1]);
            }
            int matrix = lane / 8, row = min(step + (GATED ? matrix : matrix / 2), MATRICES - 1 - begin) * 8 + lane % 8;
            int column = warp * (GATED ? 8 : 16) + (GATED ? 0 : matrix % 2 * 8);
            store_across(shared(staged + row * PITCH + column * 2), values[0], values[1], values[2], values[3]);
        }
        meet_threads(2 + group, 128);
#pragma unroll 4
        for (int row = thread / THREADS; row < min(PIECE, item.live - begin * 8); row += 128 / THREADS) {
            uint4 eight = *reinterpret_cast<const uint4*>(staged + row * PITCH + thread % THREADS * 16);
            long long place = GATED ? item.begin(shared_) + begin * 8 + row : places[begin * 8 + row];
            *reinterpret_cast<uint4*>(out + place * work.size_n) = eight;
        }
    }
}

template <int UNIT, int SUMS>
__device__ __forceinline__ void multiply_units(
    float (&part)[SUMS], u32 (&w)[2][SLICES][4], const char* stage, int lane, int swizzle
) {
    if constexpr (UNIT < UNITS) {
        if constexpr (UNIT > 0) widen<UNIT>(w[UNIT % 2], stage + lane, swizzle);
        begin_products();
#pragma unroll
        for (int i = 0; i < SLICES; ++i) {
            constexpr int FIRST = UNIT * SLICES;
            u64 x = described(shared(stage) + (FIRST + i) / 4 * HALF) + (FIRST + i) % 4 * 2;
            multiply(part, w[UNIT % 2][i], x, FIRST + i > 0);
        }
        commit_products();
        wait_products<1>();  // those of the unit before: its registers are free
        multiply_units<UNIT + 1>(part, w, stage, lane, swizzle);
    }
}

template <int SUMS>
__device__ __forceinline__ void multiply_item(
    const Work& work, const Item& item, const char* ring, Shared& shared_, Place& place, char* staged, int group
) {
    int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4;
    int row = GATED ? group * 32 + warp * 8 + g : group * 64 + warp * 16 + g;
    int lane = X_BYTES + row * DEPTH + threadIdx.x % 4 * 2, swizzle = g * 16, column = item.block * BLOCK + row;
    const float* scales = work.scales + static_cast<long long>(item.expert) * work.chunks * work.scale_columns;
    const float* uppers = scales + column / work.scale_rows;
    const float* lowers = scales + (column + (GATED ? work.size_n : 8)) / work.scale_rows;
    float y[SUMS] = {}, part[SUMS] = {}, upper = 0.0f, lower = 0.0f;
    u32 w[2][SLICES][4];
    u64* read = nullptr;
    int thread = threadIdx.x % 128, place_of[2] = {};  // of the second product: read now, needed in the end
    // The second warpgroup begins behind the first one's products, so that one adds up while the other one multiplies. The
    // ring keeps them within STAGES chunks of each other, so an item must have more.
    bool are_apart = work.chunks > STAGES;
    if (!GATED) {
        for (int i = 0; i < 2; ++i) place_of[i] = item.places(work)[min(thread + i * 128, item.live - 1)];
    }
    for (int c = 0; c < work.chunks; ++c, place.advance()) {
        const char* stage = ring + place.stage * STAGE_BYTES;
        float next_upper = uppers[c * work.scale_columns], next_lower = lowers[c * work.scale_columns];
        wait(&shared_.full[place.stage], place.parity);
        widen<0>(w[0], stage + lane, swizzle);
        if (c > 0) {
            wait_products<0>();
            if (threadIdx.x % 32 < CLUSTER) arrive_at(read, threadIdx.x % 32);
            add_chunk(y, part, upper, lower);
        } else if (group == 1 && are_apart) {
            meet_threads(4, 256);
        }
        multiply_units<0>(part, w, stage, lane, swizzle);
        if (c == 0 && group == 0 && are_apart) pass_threads(4, 256);
        read = &shared_.empty[place.stage];
        upper = next_upper;
        lower = next_lower;
    }
    wait_products<0>();
    if (threadIdx.x % 32 < CLUSTER) arrive_at(read, threadIdx.x % 32);
    add_chunk(y, part, upper, lower);
    finish(y, work, item, shared_, place_of, staged, group);
}

__device__ __forceinline__ void multiply_all(
    const Work& work, const char* ring, Shared& shared_, char* staged, int items
) {
    int group = __shfl_sync(0xffffffff, threadIdx.x / 128 - 1, 0);
    staged += group * PIECE * PITCH;
    Place place;
    for (int number = blockIdx.x / CLUSTER; number < items; number += gridDim.x / CLUSTER) {
        Item item(work, shared_, number);
        switch (rounded_rows(item.live)) {
#define CASE(N) \
    case N: multiply_item<N / 2>(work, item, ring, shared_, place, staged, group); break;
            FOR_ROWS(CASE)
        }
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(384, 1) expert_tiles(
    const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const __grid_constant__ Work work
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
    count_tiles(work, shared_);
    int items = shared_.ends[EXPERTS - 1] * (work.size_n / (BLOCK * CLUSTER));
    if (threadIdx.x < 128) {
        give_registers<24>();
        if (threadIdx.x < 32) copy_all(&w_map, &x_map, work, ring, shared_, items);
    } else {
        take_registers<240>();
        multiply_all(work, ring, shared_, ring + STAGES * STAGE_BYTES, items);
    }
    meet_cluster();  // no program leaves while the other may send to it
}
