// The results or the argmax of wide_linear.cu, from the sums of a warpgroup: 64 rows of a tile.
//
// Thread t of a warpgroup has rows t / 32 * 16 + t % 32 / 4 and 8 below, with columns 8 j + t % 4 * 2 and the next:
// sums[4 j], sums[4 j + 1] and sums[4 j + 2], sums[4 j + 3].
#pragma once

#ifndef ARGMAX
#ifdef GATED
constexpr int MATRICES = 2;  // one thread has gate's and up's sums of a column
constexpr int PIECES = COLUMNS / 16;  // pieces of 16 bytes in a staged row
#else
constexpr int MATRICES = 1;
constexpr int PIECES = COLUMNS % 64 ? 4 : 8;
#endif
constexpr int OUT_COLUMNS = COLUMNS / MATRICES;
constexpr int PITCH = (PIECES + 1) * 16;  // an odd number of pieces: eight rows lie in different banks
static_assert(PIECES % 2 == 0 && OUT_COLUMNS % (PIECES * 8) == 0, "two pieces are staged at once, and all of them");

// The scales of two neighbouring rows of each matrix of W, and the bias of both columns.
struct Scales {
    float2 of[MATRICES], bias;

    __device__ __forceinline__ Scales(const Work& work, int column) {
#pragma unroll
        for (int matrix = 0; matrix < MATRICES; ++matrix) {
            of[matrix] = make_float2(1.0f, 1.0f);
#ifdef SCALED
            if (column < work.size_n)
                of[matrix] = *reinterpret_cast<const float2*>(work.scales + matrix * work.size_n + column);
#endif
        }
#ifdef BIASED
        bool there = column < work.size_n;
        bias = make_float2(there ? widen(work.bias[column]) : 0.0f, there ? widen(work.bias[column + 1]) : 0.0f);
#endif
    }
};

// The scales of a thread's two rows of x.
struct RowScales {
    float of[2] = {1.0f, 1.0f};

    __device__ __forceinline__ RowScales(const Work& work, int row) {
#ifdef SCALED
#pragma unroll
        for (int below = 0; below < 2; ++below)
            if (work.row_scales != nullptr && row + 8 * below < work.num_rows)
                of[below] = work.row_scales[row + 8 * below];
#endif
    }
};

// Two neighbouring columns of the result: 8 j and 8 j + 1 of a thread's upper or lower row.
__device__ __forceinline__ float2 results(
    const float (&sums)[SUMS], const Scales& scales, const RowScales& rows, int j, int below
) {
    int at = 4 * j + 2 * below;
    float row = rows.of[below];
    if (PARTS > 1) return make_float2(sums[at] * row, sums[at + 1] * row);
    float2 y = make_float2(sums[at] * scales.of[0].x * row, sums[at + 1] * scales.of[0].y * row);
#ifdef BIASED
    y = make_float2(y.x + scales.bias.x, y.y + scales.bias.y);
#endif
#ifdef GATED
    at += SUMS / 2;
    y = make_float2(gated(y.x, sums[at] * scales.of[1].x * row), gated(y.y, sums[at + 1] * scales.of[1].y * row));
#endif
    return y;
}

// Add the sums of a part of K, times their scales, no two operations fused.
__device__ __forceinline__ void add_part(
    float (&total)[SUMS], const float (&sums)[SUMS], const Work& work, const Tile& tile
) {
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
        Scales scales(work, tile.column * OUT_COLUMNS + threadIdx.x % 4 * 2 + 8 * j);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            total[4 * j + i] =
                __fadd_rn(total[4 * j + i], __fmul_rn(sums[4 * j + i], i % 2 ? scales.of[0].y : scales.of[0].x));
    }
}

// Results as they are.
__device__ __forceinline__ void write_floats(
    const float (&sums)[SUMS], const Work& work, const RowScales& rows, int row, int column
) {
#pragma unroll
    for (int j = 0; j < OUT_COLUMNS / 8; ++j) {
        Scales scales(work, column + 8 * j);
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            long long at = static_cast<long long>(row + 8 * below) * work.size_n + column + 8 * j;
            if (row + 8 * below < work.num_rows && column + 8 * j < work.size_n)
                *reinterpret_cast<float2*>(static_cast<float*>(work.out) + at) = results(sums, scales, rows, j, below);
        }
    }
}

// Round to x's type, put into order in shared memory, write 16 bytes per thread.
__device__ __forceinline__ void finish(
    const float (&sums)[SUMS], const Work& work, const Tile& tile, char* staged, int group
) {
    int thread = threadIdx.x % 128, lane = thread % 32, own_column = tile.column * OUT_COLUMNS + lane % 4 * 2;
    int first_row = tile.row + group * GROUP_ROWS, own_row = first_row + thread / 32 * 16 + lane / 4;
    RowScales rows(work, own_row);
    if (work.is_float) {
        write_floats(sums, work, rows, own_row, own_column);
        return;
    }
    staged += group * GROUP_ROWS * PITCH;
    u32 address = shared(staged) + (thread / 32 * 16 + lane % 16) * PITCH + lane / 16 * 16;
#pragma unroll
    for (int first = 0; first < OUT_COLUMNS / 8; first += PIECES) {
        meet_threads(group + 1, 128);  // what was staged before has been written
#pragma unroll
        for (int j = first; j < first + PIECES; j += 2) {
            u32 pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                Scales scales(work, own_column + (j + i / 2) * 8);
                float2 y = results(sums, scales, rows, j + i / 2, i % 2);
                pairs[i] = round2(y.x, y.y);
            }
            store_matrices(address + (j - first) * 16, pairs[0], pairs[1], pairs[2], pairs[3]);
        }
        meet_threads(group + 1, 128);
        int first_column = tile.column * OUT_COLUMNS + first * 8;
        for (int piece = thread; piece < GROUP_ROWS * PIECES; piece += 128) {
            int row = piece / PIECES, column = piece % PIECES * 8;
            long long at = static_cast<long long>(first_row + row) * work.size_n + first_column + column;
            if (first_row + row < work.num_rows && first_column + column < work.size_n)
                *reinterpret_cast<uint4*>(static_cast<u16*>(work.out) + at) =
                    *reinterpret_cast<uint4*>(staged + row * PITCH + column * 2);
        }
    }
}
#endif

#ifdef ARGMAX
// The largest of a row in this tile's columns, the first of equals.
__device__ __forceinline__ void finish(
    const float (&sums)[SUMS], const Work& work, const Tile& tile, char* staged, int group
) {
    int thread = threadIdx.x % 128, first_column = tile.column * COLUMNS + thread % 4 * 2;
#pragma unroll
    for (int below = 0; below < 2; ++below) {
        float best = -__int_as_float(0x7f800000);
        int best_at = 0x7fffffff;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float value = sums[4 * j + 2 * below + i];
                int column = first_column + 8 * j + i;
                if (column < work.size_n && value > best) {
                    best = value;
                    best_at = column;
                }
            }
        }
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
            float other = __shfl_xor_sync(0xffffffff, best, step);
            int other_at = __shfl_xor_sync(0xffffffff, best_at, step);
            if (other > best || (other == best && other_at < best_at)) {
                best = other;
                best_at = other_at;
            }
        }
        int row = tile.row + group * GROUP_ROWS + thread / 32 * 16 + thread % 32 / 4 + 8 * below;
        if (thread % 4 == 0 && row < work.num_rows) {
            long long at = static_cast<long long>(row) * work.num_columns + tile.column;
            static_cast<float*>(work.out)[at] = best;
            work.best_at[at] = best_at;
        }
    }
}
#endif
