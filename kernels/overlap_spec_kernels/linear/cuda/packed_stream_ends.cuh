// The end of an item in packed_stream.cu: the sums of all warps, and of all programs of the cluster, become results.
//
// A lane's sums are those of a product: rows g and g + 8 of W with rows 2 t and 2 t + 1 of x, for each 8 rows of x.
#pragma once

constexpr int SEND_AT = WARPS * 2 * SUMS * 16;                    // what other programs send, behind the sums
constexpr int RING_AT = SEND_AT + (CLUSTER - 1) * 2 * SUMS * 16;  // a multiple of 512

// The buffer of an item, and the parity of its use.
struct Turn {
    int buffer;
    u32 parity;

    __device__ __forceinline__ Turn(int i) : buffer(i % 2), parity(i / 2 % 2) {}
};

__device__ __forceinline__ float4* sums_of(char* memory, int warp, int buffer) {
    return reinterpret_cast<float4*>(memory) + (warp * 2 + buffer) * SUMS;
}

// The sums that program `rank` > 0 sends.
__device__ __forceinline__ float4* sums_sent(char* memory, int rank, int buffer) {
    return reinterpret_cast<float4*>(memory + SEND_AT) + ((rank - 1) * 2 + buffer) * SUMS;
}

__device__ __forceinline__ void leave(const float (&sums)[BLOCKS][4], float4* place) {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        const float(&each)[4] = sums[block];
        place[block * 32 + threadIdx.x % 32] = make_float4(each[0], each[1], each[2], each[3]);
    }
}

// ---- the scales of x: a warp adds up its runs of all rows, and the first warp those of all ----
//
// Part p of a row belongs to run p % 32. Neighbouring runs are added up, then neighbouring sums, and so on. Parts of
// neighbouring rows lie side by side in memory, so neighbouring lanes have neighbouring rows.

constexpr int LANE_PARTS = 8;
constexpr int RUNS = 32 / WARPS;                  // of a warp
constexpr int ROW_LANES = ROWS > 16 ? 32 : ROWS;  // a lane for each row
constexpr int SIDES = RUNS < 32 / ROW_LANES ? RUNS : 32 / ROW_LANES;  // so many lanes share a row's runs
constexpr int OWN_RUNS = RUNS / SIDES;            // of a lane
using Squares = float[OWN_RUNS][LANE_PARTS];
static_assert(RUNS * WARPS == 32, "warps have equal shares");

__device__ __forceinline__ float square_of(const Work& work, int row, int part) {
    return row < work.num_rows && part < work.num_squares ? work.squares[part * work.num_rows + row] : 0.0f;
}

__device__ __forceinline__ int first_run() {
    return threadIdx.x / 32 * RUNS + threadIdx.x % 32 / ROW_LANES % SIDES * OWN_RUNS;
}

// Load LANE_PARTS parts of each run, which are all of 4096 columns. It is done before x is loaded, not after.
__device__ __forceinline__ void load_squares(Squares& squares, const Work& work) {
#pragma unroll
    for (int i = 0; i < OWN_RUNS * LANE_PARTS; ++i) {
        int part = first_run() + i / LANE_PARTS + i % LANE_PARTS * 32;
        squares[i / LANE_PARTS][i % LANE_PARTS] = square_of(work, threadIdx.x % ROW_LANES, part);
    }
}

template <int COUNT>
__device__ __forceinline__ float added_in_pairs(float (&sums)[COUNT]) {
#pragma unroll
    for (int step = 1; step < COUNT; step *= 2)
#pragma unroll
        for (int i = 0; i < COUNT; i += 2 * step) sums[i] += sums[i + step];
    return sums[0];
}

// `scale_of_row` is read by others after `left`.
__device__ __forceinline__ void scale_rows(const Squares& squares, const Work& work, Common& common) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sums[OWN_RUNS];
#pragma unroll
    for (int i = 0; i < OWN_RUNS; ++i) {
        sums[i] = 0;
#pragma unroll
        for (int part = 0; part < LANE_PARTS; ++part) sums[i] += squares[i][part];
        for (int part = first_run() + i + 32 * LANE_PARTS; part < work.num_squares; part += 32)
            sums[i] += square_of(work, lane % ROW_LANES, part);
    }
    float sum = added_in_pairs(sums);
#pragma unroll
    for (int step = ROW_LANES; step < ROW_LANES * SIDES; step *= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    if (lane < ROWS) common.squares[warp][lane] = sum;
    if (warp > 0) {
        pass_threads(1, 32 * WARPS);
        return;
    }
    meet_threads(1, 32 * WARPS);
    float of_warps[WARPS];
#pragma unroll
    for (int i = 0; i < WARPS; ++i) of_warps[i] = common.squares[i][min(lane, ROWS - 1)];
    sum = added_in_pairs(of_warps);
    if (lane < work.num_rows) common.scale_of_row[lane] = rsqrtf(sum / (K_TILES * 64) + work.eps);
}

// ---- adding ----

using Totals = float[HALVES * BLOCKS][4];

__device__ __forceinline__ void add(Totals& totals, const float4* place) {
#pragma unroll
    for (int i = 0; i < HALVES * BLOCKS; ++i) {
        float4 part = place[i * 32 + threadIdx.x % 32];
        totals[i][0] += part.x;
        totals[i][1] += part.y;
        totals[i][2] += part.z;
        totals[i][3] += part.w;
    }
}

// Add what the warps of this program have left.
__device__ __forceinline__ void add_warps(Totals& totals, const Turn& turn, char* memory, Barriers& barriers) {
    wait(&barriers.left[turn.buffer], turn.parity);
#pragma unroll 4
    for (int warp = 0; warp < WARPS; ++warp) add(totals, sums_of(memory, warp, turn.buffer));
    __syncwarp();
    if (threadIdx.x % 32 < ARRIVING) arrive(&barriers.taken[turn.buffer]);
}

// In any program but the first.
__device__ __forceinline__ void send_all(
    const Totals& totals, const Turn& turn, char* memory, Barriers& barriers, u32 rank
) {
    wait(&barriers.received[turn.buffer], turn.parity ^ 1);
    u32 target = address_in(0, sums_sent(memory, rank, turn.buffer)), sent = address_in(0, &barriers.sent[turn.buffer]);
#pragma unroll
    for (int i = 0; i < HALVES * BLOCKS; ++i) {
        const float(&each)[4] = totals[i];
        send(target + (i * 32 + threadIdx.x % 32) * 16, make_float4(each[0], each[1], each[2], each[3]), sent);
    }
}

// In the first program.
__device__ __forceinline__ void add_programs(Totals& totals, const Turn& turn, char* memory, Barriers& barriers) {
    int lane = threadIdx.x % 32;
    if (lane == 0) expect(&barriers.sent[turn.buffer], (CLUSTER - 1) * SUMS * 16);
    wait(&barriers.sent[turn.buffer], turn.parity);
#pragma unroll
    for (int rank = 1; rank < CLUSTER; ++rank) add(totals, sums_sent(memory, rank, turn.buffer));
    __syncwarp();
    if (0 < lane && lane < CLUSTER) arrive_at(&barriers.received[turn.buffer], lane);
}

// ---- results ----

// Scales, norm and residual of all items go into the L2 cache early: few bytes, but memory delivers those of W before
// them. First, what no kernel writes.
__device__ __forceinline__ void prefetch_constants(const Work& work, const Items& items) {
    int lane = threadIdx.x % 32, column = items.first * 16, columns = items.count * 16;
    if (columns == 0) return;
    const float* of_rows = reinterpret_cast<const float*>(work.scales);
#pragma unroll
    for (int half = 0; half < HALVES; ++half)
        if (SCALE == ROW_FLOAT32) prefetch_lines(of_rows + half * work.size_n + column, columns * 4, lane, 32);
    constexpr int OF_NORM = WIDE_NORM ? 4 : 2;
    if (ADD) prefetch_lines(static_cast<const char*>(work.norm) + column * OF_NORM, columns * OF_NORM, lane, 32);
}

__device__ __forceinline__ void prefetch_residual(const Work& work, const Items& items) {
    int row = threadIdx.x % 32;
    if (!ADD || items.count == 0 || row >= work.num_rows) return;
    prefetch_lines(work.residual + row * work.residual_stride + items.first * 16, items.count * 32, 0, 1);
}

__device__ __forceinline__ float norm_at(const Work& work, int column) {
    if constexpr (WIDE_NORM) return static_cast<const float*>(work.norm)[column];
    return widen_bfloat16(static_cast<const u16*>(work.norm)[column]).x;
}

// What the results of an item are computed with, loaded while other warps still multiply.
struct Inputs {
    float scales[HALVES][2];       // of rows g and g + 8 of W, and of what was left out in their values and in x
    float norm[2];                 // of these columns
    float residual[BLOCKS][2][2];  // of row 2 t + i of x and column g + 8 j

    __device__ __forceinline__ Inputs(const Work& work, int column) {
        const float* of_rows = reinterpret_cast<const float*>(work.scales);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            int at = column + 8 * j;
#pragma unroll
            for (int half = 0; half < HALVES; ++half)
                scales[half][j] = (SCALE == ROW_FLOAT32 ? of_rows[half * work.size_n + at] : 1.0f) * UNITS[j];
            norm[j] = ADD ? norm_at(work, at) : 0.0f;
#pragma unroll
            for (int i = 0; i < 2 * BLOCKS; ++i) {
                bool there = ADD && row_of(i) < work.num_rows;
                const u16* from = work.residual + row_of(i) * work.residual_stride + at;
                residual[i / 2][i % 2][j] = there ? widen_bfloat16(*from).x : 0.0f;
            }
        }
    }

    // The row of x of a lane's sums i.
    static __device__ __forceinline__ int row_of(int i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }
};

// Write the results of row `row` of x in columns `column` and `column` + 8; -> the sum of squares of what was written.
__device__ __forceinline__ float store(
    const Work& work, int row, int column, const float (&y)[2], const float (&norm)[2]
) {
    long long at = static_cast<long long>(row) * work.size_n + column;
    if constexpr (WIDE) {
        static_cast<float*>(work.out)[at] = y[0];
        static_cast<float*>(work.out)[at + 8] = y[1];
        return 0.0f;
    }
    u32 rounded = round_bfloat16(y[0], y[1]);
    static_cast<u16*>(work.out)[at] = rounded;
    static_cast<u16*>(work.out)[at + 8] = rounded >> 16;
    float2 values = widen_bfloat16(rounded);
    if constexpr (ADD) {
        u32 weighted = round_bfloat16(values.x * norm[0], values.y * norm[1]);
        work.weighted[at] = weighted;
        work.weighted[at + 8] = weighted >> 16;
    }
    return values.x * values.x + values.y * values.y;
}

// The result in row i of x and column j of a lane, from its sums and the scale of the row.
__device__ __forceinline__ float result(const Totals& totals, const Inputs& inputs, float scale, int i, int j) {
    float y = totals[i / 2][2 * j + i % 2] * scale * inputs.scales[0][j];
    if constexpr (GATED) y = gated(y, totals[BLOCKS + i / 2][2 * j + i % 2] * scale * inputs.scales[1][j]);
    return y + inputs.residual[i / 2][i % 2][j];
}

__device__ __forceinline__ void store_all(
    const Work& work, int item, const Totals& totals, const Inputs& inputs, const float* scale_of_row
) {
    int lane = threadIdx.x % 32, column = item * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; ++i) {
        int row = Inputs::row_of(i);
        float scale = SCALED ? scale_of_row[row] : 1.0f, squares = 0.0f;
        float y[2] = {result(totals, inputs, scale, i, 0), result(totals, inputs, scale, i, 1)};
        if (row < work.num_rows) squares = store(work, row, column, y, inputs.norm);
        if constexpr (ADD) {
#pragma unroll
            for (int step = 4; step < 32; step *= 2) squares += __shfl_xor_sync(0xffffffff, squares, step);
            if (lane < 4 && row < work.num_rows) work.sums[item * work.num_rows + row] = squares;
        }
    }
}

// Add all sums of an item and write its results. One warp of each program does it. It leaves its own sums of the next
// item with the same buffer after that, so such items are finished in order, whatever warps finish them.
__device__ __forceinline__ void finish(
    const Work& work, int item, const Turn& turn, char* memory, Common& common, u32 rank
) {
    Totals totals = {};
    if (rank > 0) {
        add_warps(totals, turn, memory, common.barriers);
        send_all(totals, turn, memory, common.barriers, rank);
        return;
    }
    Inputs inputs(work, item * 16 + threadIdx.x % 32 / 4);
    add_warps(totals, turn, memory, common.barriers);
    if constexpr (CLUSTER > 1) add_programs(totals, turn, memory, common.barriers);
    store_all(work, item, totals, inputs, common.scale_of_row);
}
