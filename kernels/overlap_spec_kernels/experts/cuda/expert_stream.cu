// The two products of experts in float8 with a scale for each block of 128 columns, for few rows of x, on Hopper.
//
// 16 rows of W at a time are two boxes that the copy engine brings: it takes as long for a run of 256 bytes as for one of
// some thousand. So much of W is on its way that memory is never idle, and little is left to do when it arrives.
//
//     multiply_rows  a program has 8 columns of gate and up at a time, or 16 of the second product, for up to 8 rows of
//                    one expert; its warps divide K. Each leaves the sums of its blocks of 128 columns, which are
//                    scaled and added in their order
//     sum_down  a program has 16 columns of one row at a time; each warp has an expert. They are added in the order of their
//               weights, with all that is added to that: see `sum_kernel` of experts_mlp.py, whose bits these are
//
// A product adds 16 columns of K at once. A lane takes four neighbouring ones of W, which are others than the
// instruction names, and the same of x. The sum of 16 products has the same bits in any order.
//
// The command line defines the names below. Where they are launched: quantized_products.py.
//
//     GROUPS  blocks of 128 columns of a warp     WARPS   of a program: parts of K, or experts of a row
//     TOP_K   experts of a row                    WIDE    1: the weight of the norm is float32
//     TILES   of a program, of 8 or 16 columns    STAGES  of them that are on their way; of `sum_down` 1
//     SHARED  1: the result of an expert that all rows have is added to the sum
//     GATED   1: silu(gate) * up                  LISTED  1: tiles are of listed places, of any number of rows
//     WHOLE   1: the warps share rows of W, whose columns they divide; 0, of `sum_down`: each has its own

#include "hopper.cuh"

#include "expert_sum.cuh"
#include "expert_values.cuh"
#include "expert_work.cuh"

constexpr int MOST_EXPERTS = 1024, ROWS = WHOLE ? 8 : 1;  // of x in a product
constexpr int COLUMNS = GROUPS * 128;  // of a warp, and bytes of a row of W
constexpr int HALF = 8 * (WHOLE ? WARPS : 1) * COLUMNS;  // of boxes [128 columns][row], swizzled
constexpr int X_PITCH = 2 * COLUMNS + 16;
constexpr int X_AT = (WHOLE ? 1 : WARPS) * STAGES * 2 * HALF;  // a warp's columns of rows of x, after all of W

// 16 rows of W, of which a warp has some columns; its columns of some rows of x, and the products of both.
struct Tile {
    char *w, *x;  // of the first stage; of the first row
    u64* barriers;
    int lane;

    __device__ __forceinline__ Tile(char* memory, u64* all, int warp) {
        w = memory + warp * (WHOLE ? 8 * COLUMNS : STAGES * 2 * HALF);
        x = memory + X_AT + warp * ROWS * X_PITCH;
        barriers = all + (WHOLE ? 0 : warp * STAGES);
        lane = threadIdx.x % 32;
        if (WHOLE ? threadIdx.x == 0 : lane == 0) {
#pragma unroll
            for (int stage = 0; stage < STAGES; ++stage) set_up(barriers + stage, 1);
            show_to_copies();
        }
        if (WHOLE) __syncthreads();
        else __syncwarp();
    }

    // All columns of rows `first` and the next seven, and of those `half` rows behind them; by one lane.
    __device__ __forceinline__ void ask(const TensorMap* map, int first, int half, int stage) const {
        if (lane > 0) return;
        u32 to = shared(w + stage * 2 * HALF);
        expect(barriers + stage, 2 * HALF);
        copy_box(to, map, barriers + stage, 0, first / 8);
        copy_box(to + HALF, map, barriers + stage, 0, (first + half) / 8);
    }

    // `from`: the warp's columns of a row.
    __device__ __forceinline__ void take_x(const u16* from, int row) const {
#pragma unroll
        for (int at = lane; at < COLUMNS / 8; at += 32)
            reinterpret_cast<uint4*>(x + row * X_PITCH)[at] = reinterpret_cast<const uint4*>(from)[at];
    }

    // `take(group, sums)` of each block of the warp. Lanes g have row `row` of x.
    template <class Take>
    __device__ __forceinline__ void multiply_all(int stage, int row, Take take) const {
        u32 from = shared(w + stage * 2 * HALF);
        auto load = [&](u32 (&words)[4][4], int group) { load_words(words, from + group * 1024, HALF); };
        ::multiply_all<GROUPS>(load, x + row * X_PITCH + lane % 4 * 8, take);
    }
};

// Up to 8 rows of x that have chosen an expert, as columns of a product. Without lists x has no more than 8, and the
// first place of an expert has the columns of all.
struct Columns {
    int count, own;  // place of the lane's own column
    long long expert;

    __device__ __forceinline__ Columns(const Work& work, int place) : expert(work.experts[place]) {
        int row = threadIdx.x % 32, at = -1;
#pragma unroll
        for (int i = 0; i < TOP_K; ++i)
            if (row < work.num_rows && work.experts[row * TOP_K + i] == expert) at = row * TOP_K + i;
        u32 rows = __ballot_sync(0xffffffff, at >= 0), before = (1u << place / TOP_K) - 1;
        count = rows & before ? 0 : __popc(rows);
        int of_column = place / TOP_K;
#pragma unroll
        for (int column = 0; column < 8; ++column, rows &= rows - 1)
            if (column == row / 4 && rows != 0) of_column = __ffs(rows) - 1;
        own = __shfl_sync(0xffffffff, at, of_column);
    }

    // The eight of a tile, among those of all experts in their order; none behind the last one.
    __device__ __forceinline__ Columns(const Work& work, int tile, int (&ends)[MOST_EXPERTS]) : count(0), own(0) {
        int lane = threadIdx.x % 32, before = 0, chunk = 0, chunks = (work.num_experts + 31) / 32;
        for (int i = threadIdx.x / 32; i < chunks; i += WARPS) {
            int e = i * 32 + lane, sum = e < work.num_experts ? (work.counts[e] + 7) / 8 : 0;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                int other = __shfl_up_sync(0xffffffff, sum, step);
                if (lane >= step) sum += other;
            }
            ends[e] = sum;
        }
        __syncthreads();
        for (; chunk < chunks && before + ends[chunk * 32 + 31] <= tile; ++chunk) before += ends[chunk * 32 + 31];
        if (chunk == chunks) return;
        int first = __ffs(__ballot_sync(0xffffffff, before + ends[chunk * 32 + lane] > tile)) - 1;
        if (first > 0) before += ends[chunk * 32 + first - 1];
        expert = chunk * 32 + first;
        int begin = (tile - before) * 8;
        count = min(work.counts[expert] - begin, 8);
        own = work.listed[expert * work.num_rows + begin + min(lane / 4, count - 1)];
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) multiply_rows(
    const __grid_constant__ TensorMap w_map, const __grid_constant__ Work work
) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ u64 barriers[WARPS * STAGES];
    __shared__ float scales[WARPS * GROUPS][2];
    __shared__ float sums[WARPS * GROUPS][16][ROWS];
    __shared__ int places[8];
    constexpr int BLOCK = GATED ? 8 : 16;  // columns of the result at a time
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, runs = work.size_n / (BLOCK * TILES);
    int first = blockIdx.x % runs * TILES * BLOCK, number = blockIdx.x / runs, half = GATED ? work.size_n : 8;
    if (threadIdx.x == 0) prefetch_map(&w_map);
    Tile own(memory, barriers, warp);
    wait_for_kernels_before();
    let_next_begin();
#if LISTED
    __shared__ int ends[MOST_EXPERTS];
    Columns columns(work, number, ends);
#else
    Columns columns(work, number);
#endif
    if (columns.count == 0) return;
    long long expert = columns.expert;
    int from = static_cast<int>(expert) * (GATED ? 2 : 1) * work.size_n + first;
    if (warp == 0) {
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) own.ask(&w_map, from + stage * BLOCK, half, stage);
    }
    for (int i = threadIdx.x; i < WARPS * GROUPS * 2; i += 32 * WARPS) {
        int row = first + i % 2 * (GATED ? work.size_n : 0);
        scales[i / 2][i % 2] =
            work.scales[(expert * (WARPS * GROUPS) + i / 2) * work.scale_columns + row / work.scale_rows];
    }
    for (int column = 0; column < columns.count; ++column) {
        int at = __shfl_sync(0xffffffff, columns.own, column * 4);
        own.take_x(work.x + static_cast<long long>(at / work.per_row) * work.x_stride + warp * COLUMNS, column);
    }
    if (warp == 0 && lane % 4 == 0) places[lane / 4] = columns.own;
    __syncwarp();
    int result = threadIdx.x % 8, of = threadIdx.x / 8;  // column of the result, and of the product
    for (int tile = 0; tile < TILES; ++tile) {
        int stage = tile % STAGES;
        wait(own.barriers + stage, tile / STAGES % 2);
        own.multiply_all(stage, min(lane / 4, columns.count - 1), [&](int group, const float (&found)[4]) {
            float(*to)[ROWS] = sums[warp * GROUPS + group];
            *reinterpret_cast<float2*>(&to[lane / 4][lane % 4 * 2]) = make_float2(found[0], found[1]);
            *reinterpret_cast<float2*>(&to[lane / 4 + 8][lane % 4 * 2]) = make_float2(found[2], found[3]);
        });
        __syncthreads();
        if (warp == 0 && tile + STAGES < TILES) own.ask(&w_map, from + (tile + STAGES) * BLOCK, half, stage);
        if (of < columns.count) {
            float upper = 0.0f, lower = 0.0f;
#pragma unroll
            for (int group = 0; group < WARPS * GROUPS; ++group) {
                upper = __fmaf_rn(sums[group][result][of], scales[group][0], upper);
                lower = __fmaf_rn(sums[group][result + 8][of], scales[group][1], lower);
            }
            long long at = static_cast<long long>(places[of]) * work.size_n + first + tile * BLOCK + result;
            work.out[at] = rounded(GATED ? gated(upper, lower) : upper);
            if (!GATED) work.out[at + 8] = rounded(lower);
        }
        if (tile + 1 < TILES) __syncthreads();
    }
}

// It begins beside expert_ring.cu, if it takes no more registers than that leaves.
extern "C" __global__ void __maxnreg__(72) sum_down(
    const __grid_constant__ TensorMap w_map, const __grid_constant__ Work work
) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ u64 barriers[WARPS];
    __shared__ float results[2][WARPS][16];  // of tiles in turn
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int row = blockIdx.x % work.num_rows, first = blockIdx.x / work.num_rows * TILES * 16, place = row * TOP_K + warp;
    let_next_begin();
    if (lane == 0) prefetch_map(&w_map);
    // The choice, and what is added, were written before the gated product, which waited before this kernel began.
    Tile own(memory, barriers, warp);
    long long expert = work.experts[place];
    int from = static_cast<int>(expert) * work.size_n + first;
    own.ask(&w_map, from, 8, 0);
    const float* scales = work.scales + (expert * GROUPS + min(lane, GROUPS - 1)) * work.scale_columns;
    bool adds = threadIdx.x < 16;
    Added added(work, row, first, adds);
    float scale = scales[first / work.scale_rows];
    wait_for_kernels_before();
    own.take_x(work.x + static_cast<long long>(place) * work.x_stride, 0);
    __syncwarp();
#pragma unroll 1
    for (int tile = 0; tile < TILES; ++tile, first += 16) {
        wait(own.barriers, tile % 2);
        float upper = 0.0f, lower = 0.0f;
        own.multiply_all(0, 0, [&](int group, const float (&found)[4]) {
            float of_group = __shfl_sync(0xffffffff, scale, group);
            upper = __fmaf_rn(found[0], of_group, upper);
            lower = __fmaf_rn(found[2], of_group, lower);
        });
        bool more = tile + 1 < TILES;
        if (more) {
            __syncwarp();
            own.ask(&w_map, from + (tile + 1) * 16, 8, 0);
            scale = scales[(first + 16) / work.scale_rows];
        }
        float(&to)[WARPS][16] = results[tile % 2];
        if (lane % 4 == 0) {
            to[warp][lane / 4] = bfloat16(rounded(upper));
            to[warp][lane / 4 + 8] = bfloat16(rounded(lower));
        }
        __syncthreads();
        if (warp > 0) continue;
        added.add_up(work, to);
        if (more) added = Added(work, row, first + 16, adds);
    }
}
