// The products of experts in float8 with a scale for each block of 128 columns, for many rows of x, on Hopper (sm_90a).
//
// A program has 128 rows of W and up to MOST rows of x of one expert at a time. W is the left operand of a warpgroup's
// products, 64 rows of it: a thread reads its values from shared memory, widens them, and multiplies from registers,
// while the values before are multiplied. x is the right operand. The tensor cores have as many rows of x as the tile
// has, rounded up to one of the numbers that `wgmma.h` is written for. One warpgroup copies, two multiply.
//
// The gated product finds rows of x where they are, and writes its results by expert, where rows of a tile are neighbours.
// So the copy engine brings them to the second product, which writes results by place.
//
//     ring    [stage] | x: 2 x [MOST, 64] swizzled by 128 bytes | W: [128, 128] float8, swizzled too |
//     full    of a stage: W has arrived, and x; of the gated product, each copying thread's part of x
//     empty   of a stage: the multiplying warps have read it
//
// Of gate and up a thread has the same column, in rows g and g + 8 of its product. Sums of 128 columns are scaled and
// added in their order; the tensor cores add 16 columns at a time, as all kernels of quantized_products.py have it.
//
// The command line defines the names below. Where it is launched: quantized_products.py.
//
//     GATED   1: silu(gate) * up        MOST    rows of x, at most       EXPERTS
//     STAGES  of the ring               SLICES  of 16 columns, widened at once        PIECE  rows staged at once

#include "hopper.cuh"
#include "wgmma.h"  // multiply(sums, w, x, add) for each number of rows; FOR_ROWS(do)

// What the kernel is given beside the map of W; the same fields in quantized_products.py.
struct Work {
    const u16* x;         // rows x_stride apart; of the gated product
    const float* scales;  // [E, I / 128, scale_columns]
    const int* counts;    // [E]
    const int* listed;    // [E, T]: places
    u16* out;             // [T * k, N], by expert or by place
    int x_stride;
    int size_n;           // columns of the result
    int num_rows;         // T
    int chunks;           // of 128 columns of K
    int shared;           // places that have one row of x
    int scale_columns, scale_rows;
};

constexpr int DEPTH = 128, HALF = MOST * 128;
constexpr int X_BYTES = 2 * HALF, W_BYTES = 128 * DEPTH, STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int UNITS = DEPTH / 16 / SLICES, BOX = 32;  // rows of x that are copied at once
constexpr int BLOCK = GATED ? 64 : 128;       // columns of the result
constexpr int OF_GROUP = BLOCK / 2;           // of a warpgroup
constexpr int PITCH = OF_GROUP * 2 + 16;      // bytes of a staged row: rows lie in different banks
static_assert(UNITS % 2 == 0, "operands of units alternate between two sets of registers");

struct Shared {
    u64 full[STAGES], empty[STAGES];
    int ends[EXPERTS];   // number of tiles of an expert and of all before it
    int counts[EXPERTS]; // of places of all experts before it
    int rows[2][MOST];   // of x, of a tile and the next one
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

// A tile of an expert's places, all of whose tiles are about as large, and a block of the result's columns.
struct Item {
    int expert, block, first, live;

    __device__ __forceinline__ Item(const Work& work, const Shared& shared, int number) {
        int blocks = work.size_n / BLOCK, tile = number / blocks, low = 0, high = EXPERTS - 1;
        block = number % blocks;
        while (low < high) {
            int middle = (low + high) / 2;
            if (shared.ends[middle] > tile) high = middle;
            else low = middle + 1;
        }
        expert = low;
        int before = low > 0 ? shared.ends[low - 1] : 0, tiles = shared.ends[low] - before, count = work.counts[low];
        int share = ((count + tiles - 1) / tiles + 7) / 8 * 8;
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
    }
    __syncthreads();
}

// ---- the warpgroup that copies ----

__device__ __forceinline__ void copy_16(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void arrived(u64* full) {
    show_to_copies();
    arrive(full);
}

// `more`: bytes that are copied beside W.
__device__ __forceinline__ void copy_w(
    const TensorMap* map, const Work& work, const Item& item, u32 to, u64* full, int c, int more
) {
    int row = item.expert * work.size_n * (GATED ? 2 : 1) + item.block * BLOCK;
    expect(full, W_BYTES + more);
    copy_tile(to, map, full, c * DEPTH, row);
    copy_tile(to + W_BYTES / 2, map, full, c * DEPTH, row + (GATED ? work.size_n : 64));
}

// Of the second product, whose tiles have their rows side by side: one thread.
__device__ __forceinline__ void copy_tiles(
    const TensorMap* w_map, const TensorMap* x_map, const Work& work, char* ring, Shared& shared_, int items
) {
    Place place;
    for (int number = blockIdx.x; number < items; number += gridDim.x) {
        Item item(work, shared_, number);
        int all = rounded_rows(item.live);
        for (int c = 0; c < work.chunks; ++c, place.advance()) {
            u64* full = &shared_.full[place.stage];
            u32 stage = shared(ring + place.stage * STAGE_BYTES);
            wait(&shared_.empty[place.stage], place.parity ^ 1);
            copy_w(w_map, work, item, stage + X_BYTES, full, c, all * 256);
            for (int row = 0; row < all; row += BOX) {
                copy_tile(stage + row * 128, x_map, full, c * DEPTH, item.begin(shared_) + row);
                copy_tile(stage + HALF + row * 128, x_map, full, c * DEPTH + 64, item.begin(shared_) + row);
            }
        }
    }
}

__device__ __forceinline__ void copy_all(
    const TensorMap* map, const Work& work, char* ring, Shared& shared_, int items
) {
    Place place;
    u64* before = nullptr;
    int thread = threadIdx.x, part = thread % 16, row = thread / 16, turn = 0;
    u32 at = part / 8 * HALF + row * 128 + ((part % 8) ^ row) * 16;
    for (int number = blockIdx.x; number < items; number += gridDim.x, turn ^= 1) {
        Item item(work, shared_, number);
        int* rows = shared_.rows[turn];
        const int* places = item.places(work);
        for (int i = thread; i < MOST; i += 128) rows[i] = places[min(i, item.live - 1)] / work.shared;
        meet_threads(1, 128);
        int all = rounded_rows(item.live);
        for (int c = 0; c < work.chunks; ++c, place.advance()) {
            u64* full = &shared_.full[place.stage];
            u32 stage = shared(ring + place.stage * STAGE_BYTES);
            wait(&shared_.empty[place.stage], place.parity ^ 1);
            if (thread == 0) copy_w(map, work, item, stage + X_BYTES, full, c, 0);
            const u16* from = work.x + c * DEPTH + part * 8;
#pragma unroll 4
            for (int i = row; i < all; i += 8)
                copy_16(stage + at + (i - row) * 128, from + static_cast<long long>(rows[i]) * work.x_stride);
            commit_copies();
            wait_copies<1>();
            if (before != nullptr) arrived(before);
            before = full;
        }
    }
    wait_copies<0>();
    if (before != nullptr) arrived(before);
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
    const float (&y)[SUMS], const Work& work, const Item& item, const Shared& shared_, char* staged, int group
) {
    constexpr int ROWS = 2 * SUMS, MATRICES = ROWS / 8, ACROSS = GATED ? 4 : 2, THREADS = OF_GROUP / 8;
    int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int* places = item.places(work);
    u16* out = work.out + item.block * BLOCK + group * OF_GROUP + thread % THREADS * 8;
#pragma unroll
    for (int begin = 0; begin < MATRICES; begin += PIECE / 8) {
        meet_threads(2 + group, 128);  // the piece before is read
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
    for (int c = 0; c < work.chunks; ++c, place.advance()) {
        const char* stage = ring + place.stage * STAGE_BYTES;
        float next_upper = uppers[c * work.scale_columns], next_lower = lowers[c * work.scale_columns];
        wait(&shared_.full[place.stage], place.parity);
        widen<0>(w[0], stage + lane, swizzle);
        if (c > 0) {
            wait_products<0>();
            if (threadIdx.x % 32 == 0) arrive(read);
            add_chunk(y, part, upper, lower);
        }
        multiply_units<0>(part, w, stage, lane, swizzle);
        read = &shared_.empty[place.stage];
        upper = next_upper;
        lower = next_lower;
    }
    wait_products<0>();
    if (threadIdx.x % 32 == 0) arrive(read);
    add_chunk(y, part, upper, lower);
    finish(y, work, item, shared_, staged, group);
}

__device__ __forceinline__ void multiply_all(
    const Work& work, const char* ring, Shared& shared_, char* staged, int items
) {
    int group = __shfl_sync(0xffffffff, threadIdx.x / 128 - 1, 0);
    staged += group * PIECE * PITCH;
    Place place;
    for (int number = blockIdx.x; number < items; number += gridDim.x) {
        Item item(work, shared_, number);
        switch (rounded_rows(item.live)) {
#define CASE(N) \
    case N: multiply_item<N / 2>(work, item, ring, shared_, place, staged, group); break;
            FOR_ROWS(CASE)
        }
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) expert_tiles(
    const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const __grid_constant__ Work work
) {
    extern __shared__ __align__(1024) char ring[];
    __shared__ Shared shared_;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            set_up(&shared_.full[stage], GATED ? 129 : 1);
            set_up(&shared_.empty[stage], 8);
        }
        show_to_copies();
    }
    wait_for_kernels_before();
    let_next_begin();
    count_tiles(work, shared_);
    int items = shared_.ends[EXPERTS - 1] * (work.size_n / BLOCK);
    if (threadIdx.x < 128) {
        give_registers<24>();
        if (GATED) copy_all(&w_map, work, ring, shared_, items);
        else if (threadIdx.x == 0) copy_tiles(&w_map, &x_map, work, ring, shared_, items);
    } else {
        take_registers<240>();
        multiply_all(work, ring, shared_, ring + STAGES * STAGE_BYTES, items);
    }
}
