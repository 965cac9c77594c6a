// The gate or the argmax of wide_linear.cu, from the sums of a warpgroup: 64 rows of a tile.
//
// Thread t of a warpgroup has rows t / 32 * 16 + t % 32 / 4 and 8 below, with columns 8 j + t % 4 * 2 and the next:
// sums[4 j], sums[4 j + 1] and sums[4 j + 2], sums[4 j + 3].
#pragma once

#ifdef GATED
constexpr int OUT_COLUMNS = COLUMNS / 2;  // one thread has gate's and up's sums of a column
constexpr int PIECES = OUT_COLUMNS / 8;   // pieces of 16 bytes in a staged row
constexpr int PITCH = (PIECES + 1) * 16;  // an odd number of pieces: eight rows lie in different banks
static_assert(PIECES % 2 == 0, "two pieces are staged at once");

// silu(gate) * up of two neighbouring columns in piece j of a thread's upper or lower row.
__device__ __forceinline__ u32 gated_pair(const float (&sums)[SUMS], int j, int below) {
    float y[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float gate = sums[4 * j + 2 * below + i], up = sums[4 * j + 2 * below + i + SUMS / 2];
        y[i] = __fdividef(gate, 1.0f + __expf(-gate)) * up;
    }
    return round2(y[0], y[1]);
}

// Round to x's type, put into order in shared memory, write 16 bytes per thread.
__device__ __forceinline__ void finish(
    const float (&sums)[SUMS], const Work& work, const Tile& tile, char* staged, int group
) {
    int thread = threadIdx.x % 128, lane = thread % 32;
    staged += group * GROUP_ROWS * PITCH;
    u32 address = shared(staged) + (thread / 32 * 16 + lane % 16) * PITCH + lane / 16 * 16;
    meet_threads(group + 1, 128);  // the previous tile has been written
#pragma unroll
    for (int j = 0; j < PIECES; j += 2)
        store_matrices(
            address + j * 16, gated_pair(sums, j, 0), gated_pair(sums, j, 1), gated_pair(sums, j + 1, 0),
            gated_pair(sums, j + 1, 1)
        );
    meet_threads(group + 1, 128);
    int first_row = tile.row + group * GROUP_ROWS, first_column = tile.column * OUT_COLUMNS;
    for (int piece = thread; piece < GROUP_ROWS * PIECES; piece += 128) {
        int row = piece / PIECES, column = piece % PIECES * 8;
        long long at = static_cast<long long>(first_row + row) * work.size_n + first_column + column;
        if (first_row + row < work.num_rows && first_column + column < work.size_n)
            *reinterpret_cast<uint4*>(static_cast<u16*>(work.out) + at) =
                *reinterpret_cast<uint4*>(staged + row * PITCH + column * 2);
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
