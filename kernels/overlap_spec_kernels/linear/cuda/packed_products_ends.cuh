// From a warpgroup's sums to results: scales, the gate, parts of K, the residual, what the norm after it needs.
//
// Thread t of a warpgroup has rows t / 32 * 16 + t % 32 / 4 and 8 below of W, with rows 8 j + t % 4 * 2 and the next of
// x: sums[4 j], sums[4 j + 1] and sums[4 j + 2], sums[4 j + 3]. A patch is 16 rows of x by 64 columns of the result,
// eight sums of a thread. It goes through shared memory, so that eight threads write 64 columns of a row.
#pragma once

#include "additions.cuh"

struct Sums {
    float of[TILES][SUMS];
    Pair scale[TILES];
    Zeros zeros[TILES];
};

constexpr int PATCHES = ROWS / 16;         // one below the other
constexpr int PITCH = 64 + 4;              // of a staged row, so that a quarter of a warp writes to different banks
constexpr int STAGED = 16 * PITCH;         // floats of a patch
constexpr int PART_SUMS = TILES * SUMS * 128;  // floats that a warpgroup leaves of a part of K

// Two places for patches, in turns: one barrier then suffices for each patch.
struct Staging {
    float* staged;
    int group, turn = 0;

    __device__ __forceinline__ Staging(char* staged, int group)
        : staged(reinterpret_cast<float*>(staged) + group * 2 * STAGED), group(group) {}

    __device__ __forceinline__ float* next() { return staged + (turn++ % 2) * STAGED; }
};

// The first column of a block of 64.
__device__ __forceinline__ int column_of(const Item& item, int group, int block) {
    return item.tile * COLUMNS + (group * BLOCKS + block) * 64;
}

__device__ __forceinline__ void begin_sums(Sums& sums, const Work& work, const Item& item, int group) {
    int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums.of[tile][i] = 0;
        sums.scale[tile] = {1, 1};
        int column = column_of(item, group, tile % BLOCKS) + row;
        if (GROUP == 0 && column < work.size_n) {  // a multiple of 16
            const float* scales = work.row_scales + tile / BLOCKS * work.size_n + column;
            sums.scale[tile] = {scales[0], scales[8]};
        }
    }
}

// ---- parts of K ----

__device__ __forceinline__ float4* part_of(const Work& work, const Item& item, int part, int group) {
    long long number = (static_cast<long long>(item.result) * work.splits + part) * WARPGROUPS + group;
    return reinterpret_cast<float4*>(work.parts + number * PART_SUMS) + threadIdx.x % 128;
}

// Leave the sums of this part, and wait for the others.
__device__ __forceinline__ void exchange_parts(const Sums& sums, const Work& work, const Item& item, int group) {
    float4* target = part_of(work, item, item.part, group);
#pragma unroll
    for (int i = 0; i < TILES * SUMS / 4; ++i) {
        const float* four = sums.of[i / (SUMS / 4)] + i % (SUMS / 4) * 4;
        Pair scale = sums.scale[i / (SUMS / 4)];
        float2 upper = {four[0] * scale.upper, four[1] * scale.upper};
        float2 lower = {four[2] * scale.lower, four[3] * scale.lower};
        if (item.row + i % (SUMS / 4) * 8 < work.num_rows) target[i * 128] = {upper.x, upper.y, lower.x, lower.y};
    }
    u32* counter = work.counters + item.result * WARPGROUPS + group;
    meet_threads(group + 1, 128);
    if (threadIdx.x % 128 == 0) {
        count(counter);
        while (counted(counter) < work.splits) {}
    }
    meet_threads(group + 1, 128);
    if (threadIdx.x % 128 == 0 && count(counter) == 2 * work.splits - 1) *counter = 0;  // the last one of all
}

// The sums of all parts of four rows of x, in the order of the parts.
__device__ __forceinline__ void add_parts(float* four, const Work& work, const Item& item, int group, int place) {
    float4 total = {0, 0, 0, 0};
#pragma unroll 4
    for (int part = 0; part < work.splits; ++part) {
        float4 sums = part_of(work, item, part, group)[place * 128];
        total = {total.x + sums.x, total.y + sums.y, total.z + sums.z, total.w + sums.w};
    }
    four[0] = total.x;
    four[1] = total.y;
    four[2] = total.z;
    four[3] = total.w;
}

// ---- a patch ----

// Eight sums of each matrix times the scales of rows of x, and the gate.
__device__ __forceinline__ void combine(float (&y)[8], float (&sums)[MATRICES][8], const float* row_scales) {
    int row = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float scale = row_scales[i / 4 * 8 + row + i % 2];
        y[i] = sums[0][i] * scale;
        if constexpr (GATED) y[i] = gated(y[i], sums[MATRICES - 1][i] * scale);
    }
}

__device__ __forceinline__ Addends addends_of(const Work& work, int row, int column) {
    bool inside = work.residual != nullptr && row < work.num_rows && column < work.size_n;
    return Addends(work.residual + static_cast<long long>(row) * work.residual_stride, work.norm, column, inside);
}

// Those of a tile, into the L2 cache, by the helpers: memory would deliver them after all of W.
__device__ __forceinline__ void prefetch_addends(const Work& work, const Item& item) {
    int column = item.tile * COLUMNS, bytes = min(COLUMNS, work.size_n - column) * 2, thread = threadIdx.x - 32;
    if (work.residual == nullptr || bytes <= 0) return;
    prefetch_lines(work.norm + column, bytes, thread, HELPERS * 32);
    for (int row = thread; row < work.num_rows; row += HELPERS * 32)
        prefetch_lines(work.residual + static_cast<long long>(row) * work.residual_stride + column, bytes, 0, 1);
}

__device__ __forceinline__ void write_row(const float (&y)[8], const Work& work, long long at) {
    if (work.is_float) {
        float4* target = reinterpret_cast<float4*>(static_cast<float*>(work.out) + at);
        target[0] = {y[0], y[1], y[2], y[3]};
        target[1] = {y[4], y[5], y[6], y[7]};
    } else {
        *reinterpret_cast<uint4*>(static_cast<u16*>(work.out) + at) = round8(y);
    }
}

// Write a patch; its first column is inside the result.
__device__ __forceinline__ void write_patch(
    float (&y)[8], const Work& work, Staging& staging, const Addends& addends, int row, int column
) {
    int thread = threadIdx.x % 128, lane = thread % 32;
    float* staged = staging.next();
#pragma unroll
    for (int i = 0; i < 8; ++i)
        staged[(i / 4 * 8 + lane % 4 * 2 + i % 2) * PITCH + thread / 32 * 16 + lane / 4 + i % 4 / 2 * 8] = y[i];
    meet_threads(staging.group + 1, 128);
    float4* eight = reinterpret_cast<float4*>(staged + thread / 8 * PITCH + thread % 8 * 8);
    float4 low = eight[0], high = eight[1];
    float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    long long at = static_cast<long long>(row) * work.size_n + column;
    bool inside = row < work.num_rows && column < work.size_n;
    if (work.residual != nullptr) {
        float sum = write_sum(values, addends, static_cast<u16*>(work.out), work.weighted, at, inside);
        if (threadIdx.x % 8 == 0 && inside) work.sums[column / 64 * work.num_rows + row] = sum;
    } else if (inside) {
        write_row(values, work, at);
    }
}

// ---- a tile ----

__device__ __forceinline__ void finish_patch(
    float (&sums)[MATRICES][8], const Work& work, const Item& item, const float* row_scales, Staging& staging,
    const Addends& addends, int patch, int column
) {
    float y[8];
    combine(y, sums, row_scales + patch * 16);
    int thread = threadIdx.x % 128;
    write_patch(y, work, staging, addends, item.row + patch * 16 + thread / 8, column + thread % 8 * 8);
}

// A share of the patches, of all parts of K.
__device__ __forceinline__ void finish_parts(
    const Work& work, const Item& item, const float* row_scales, Staging& staging
) {
    int patches = (min(work.num_rows - item.row, ROWS) + 15) / 16, count = patches * BLOCKS;
    int end = (item.part + 1) * count / work.splits, thread = threadIdx.x % 128;
    for (int number = item.part * count / work.splits; number < end; ++number) {
        int block = number / patches, patch = number % patches, column = column_of(item, staging.group, block);
        if (column >= work.size_n) continue;
        Addends addends = addends_of(work, item.row + patch * 16 + thread / 8, column + thread % 8 * 8);
        float sums[MATRICES][8];
#pragma unroll
        for (int i = 0; i < MATRICES * 2; ++i) {
            int place = (i / 2 * BLOCKS + block) * (SUMS / 4) + patch * 2 + i % 2;
            add_parts(sums[i / 2] + i % 2 * 4, work, item, staging.group, place);
        }
        finish_patch(sums, work, item, row_scales, staging, addends, patch, column);
    }
}

// The sums of a patch, if it is the one of this number, from registers; so a loop over patches need not be unrolled.
template <int NUMBER = 0>
__device__ __forceinline__ void take_patch(float (&sums)[MATRICES][8], const Sums& all, int number) {
    if (number == NUMBER) {
        constexpr int BLOCK = NUMBER / PATCHES, FIRST = NUMBER % PATCHES * 8;
#pragma unroll
        for (int i = 0; i < MATRICES * 8; ++i) {
            const Pair& scale = all.scale[i / 8 * BLOCKS + BLOCK];
            float sum = all.of[i / 8 * BLOCKS + BLOCK][FIRST + i % 8];
            sums[i / 8][i % 8] = sum * (i % 4 < 2 ? scale.upper : scale.lower);
        }
    } else if constexpr (NUMBER + 1 < BLOCKS * PATCHES) {
        take_patch<NUMBER + 1>(sums, all, number);
    }
}

// All patches.
__device__ __forceinline__ void finish_whole(
    const Sums& all, const Work& work, const Item& item, const float* row_scales, Staging& staging
) {
    int thread = threadIdx.x % 128;
#pragma unroll 1
    for (int number = 0; number < BLOCKS * PATCHES; ++number) {
        int patch = number % PATCHES, column = column_of(item, staging.group, number / PATCHES);
        if (column >= work.size_n || item.row + patch * 16 >= work.num_rows) continue;
        Addends addends = addends_of(work, item.row + patch * 16 + thread / 8, column + thread % 8 * 8);
        float sums[MATRICES][8];
        take_patch(sums, all, number);
        finish_patch(sums, work, item, row_scales, staging, addends, patch, column);
    }
}

__device__ __forceinline__ void finish(
    const Sums& sums, const Work& work, const Item& item, const float* row_scales, Staging& staging
) {
    if (item.parts == 1) {
        finish_whole(sums, work, item, row_scales, staging);
    } else {
        exchange_parts(sums, work, item, staging.group);
        finish_parts(work, item, row_scales, staging);
    }
}
