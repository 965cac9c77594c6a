// What the first warpgroup of packed_products.cu does: copies of W and x, scales of rows of x. Where linears meet.
#pragma once

// ---- several linears ----

// A warpgroup has written all its results of a linear.
__device__ __forceinline__ void end_linear(u32* ended, int number, int group) {
    meet_threads(group + 1, 128);
    if (threadIdx.x % 128 == 0) count(ended + number);
}

// All have, and the copy engine sees them.
__device__ __forceinline__ void wait_for_linear(const u32* ended, int number) {
    while (counted(ended + number) < gridDim.x * WARPGROUPS) {}
    show_global_to_copies();
}

// The last program that needs no count leaves them at zero for the next launch.
__device__ __forceinline__ void forget_linears(u32* ended) {
    if (count(ended + LINEARS - 1) != gridDim.x - 1) return;
    for (int number = 0; number < LINEARS; ++number) ended[number] = 0;
}

// ---- the warps that copy: one thread of each ----

// W, with what belongs to its groups.
template <int MATRICES>
__device__ __forceinline__ void copy_w(const Linear& linear, const Item& item, u32 stage, u64* full, int at) {
    using S = Shape<MATRICES>;
    expect(full, S::STAGE_BYTES - X_BYTES);
#pragma unroll
    for (int matrix = 0; matrix < MATRICES; ++matrix) {
        int row_tile = matrix * (linear.work.size_n / 16) + item.tile * ROW_TILES;
        constexpr int ROW_OF_TILES = K_TILES * W_TILE_BYTES;
        copy_tile(stage + X_BYTES + matrix * S::MATRIX_BYTES, &linear.w, full, at * (ROW_OF_TILES / 8), row_tile);
        if constexpr (GROUP > 0) {
            u32 scales = stage + S::SCALES_AT + matrix * S::MATRIX_SCALES_BYTES;
            copy_tile(scales, &linear.scales, full, at * GROUPS_PER_STAGE * SCALES_PER_GROUP, row_tile);
        }
        if constexpr (ZEROS) {
            u32 zeros = stage + S::ZEROS_AT + matrix * S::MATRIX_ZEROS_BYTES;
            copy_tile(zeros, &linear.zeros, full, at * GROUPS_PER_STAGE * 16, row_tile);
        }
    }
}

// x, of which each program of a cluster sends its share of the rows to all.
__device__ __forceinline__ void copy_x(const Linear& linear, u32 stage, u64* full, int at, u32 rank) {
    constexpr int SHARE = ROWS / CLUSTER;
    expect(full, X_BYTES);
#pragma unroll
    for (int tile = 0; tile < K_TILES; ++tile) {
        u32 target = stage + tile * X_TILE_BYTES + rank * (SHARE * 128);
        if constexpr (CLUSTER > 1)
            send_tile(target, &linear.x, full, at * DEPTH + tile * 64, rank * SHARE, ALL_RANKS);
        else
            copy_tile(target, &linear.x, full, at * DEPTH + tile * 64, 0);
    }
}

// `copy(item, stage, full, at)` for every stage of a program's items, as soon as there is room for it.
template <class Copy>
__device__ __forceinline__ void for_stages(
    const Work& work, char* ring, Barriers* barriers, Place& place, u32 rank, Copy copy
) {
    for (int number = Item::first(); number < work.num_items; number += Item::step()) {
        Item item(work, number, rank);
        for (int at = item.begin; at < item.end; ++at, place.advance()) {
            wait(&barriers->empty[place.stage], place.parity ^ 1);
            copy(item, shared(ring + place.stage * STAGE_PITCH), &barriers->full[place.stage], at);
        }
    }
}

template <int MATRICES>
__device__ __forceinline__ void copy_all_of(
    const Linear& linear, char* ring, Barriers* barriers, Place& place, u32 rank
) {
    for_stages(linear.work, ring, barriers, place, rank, [&](const Item& item, u32 stage, u64* full, int at) {
        copy_w<MATRICES>(linear, item, stage, full, at);
    });
}

// A program's share of what the next launch reads first, into the L2 cache: from this launch's last stage to that one's
// first, memory would have nothing to do.
__device__ __forceinline__ void prefetch_ahead(const Linears& linears) {
    constexpr int PIECE = 1 << 14;
    for (int at = blockIdx.x * PIECE; at < linears.bytes_ahead; at += gridDim.x * PIECE)
        prefetch_bytes(linears.ahead + at, min(PIECE, linears.bytes_ahead - at));
}

// Of all linears. No kernel before this one writes W.
__device__ __forceinline__ void copy_weights(const Linears& linears, char* ring, Barriers* barriers, u32 rank) {
    Place place;
#pragma unroll 1
    for (int number = 0; number < LINEARS; ++number) {
        if (has_gate(number))
            copy_all_of<2>(linears.of[number], ring, barriers, place, rank);
        else
            copy_all_of<1>(linears.of[number], ring, barriers, place, rank);
    }
    prefetch_ahead(linears);
}

__device__ __forceinline__ void copy_rows(const Linears& linears, char* ring, Barriers* barriers, u32 rank) {
    Place place;
    if constexpr (LINEARS > 1) {
        for (int number = 0; number < LINEARS; ++number) prefetch_map(&linears.of[number].x);
    }
    wait_for_kernels_before();
#pragma unroll 1
    for (int number = 0; number < LINEARS; ++number) {
        const Linear& linear = linears.of[number];
        if (number > 0) wait_for_linear(linears.ended, number - 1);
        arrive(&barriers->begun);
        for_stages(linear.work, ring, barriers, place, rank, [&](const Item&, u32 stage, u64* full, int at) {
            copy_x(linear, stage, full, at, rank);
        });
    }
    if constexpr (LINEARS > 1) forget_linears(linears.ended);
}

// ---- the other warps of their warpgroup ----

// The norm's scales of rows of x, from the sums of squares of its parts.
__device__ __forceinline__ void scale_rows(const Work& work, RowScales& scales) {
    int helper = threadIdx.x / 32 - 2, lane = threadIdx.x % 32;
    for (int m = lane; m < ROWS; m += 32) {
        float sum = 0;
        if (m < work.num_rows) {
#pragma unroll 8
            for (int part = helper; part < work.num_squares; part += HELPERS)
                sum += work.squares[part * work.num_rows + m];
        }
        scales.sums[helper][m] = sum;
    }
    meet_threads(WARPGROUPS + 1, HELPERS * 32);
    for (int m = threadIdx.x - 64; m < ROWS; m += HELPERS * 32) {
        float sum = scales.sums[0][m] + scales.sums[1][m];
        scales.of_row[m] = work.squares == nullptr ? 1.0f : rsqrtf(sum / work.size_k + work.eps);
    }
}

// For each linear. Its scales replace those of the linear before, which all programs have ended by then.
__device__ __forceinline__ void help(const Linears& linears, RowScales& scales, Barriers* barriers, u32 rank) {
    wait_for_kernels_before();
#pragma unroll 1
    for (int number = 0; number < LINEARS; ++number) {
        const Work& work = linears.of[number].work;
        wait(&barriers->begun, number & 1);
        scale_rows(work, scales);
        arrive(&barriers->scaled);
        if (Item::first() < work.num_items) prefetch_addends(work, Item(work, Item::first(), rank));
    }
}
