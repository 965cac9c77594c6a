// y = x W^T for 1 to 16 rows of x and a small W in bfloat16, whose K has two sums (ordered.py), on Hopper (sm_90a).
//
// Such a product takes as long as it waits: for the kernel before, for x, and for products that wait for each other. So
// a program has 16 columns of the result, and all that no kernel writes is in its shared memory before x is there: its
// rows of W, whole. Then x comes at once too, and one warp for each sum (of gate and of up) multiplies from the first
// column to the last, meeting no other program. Results have the bits of streamed_linear.py and of tiles.
//
//     SIZE_K  columns of x                      GATED   1: silu(gate) * up, gate's rows first
//     PIECE   columns that belong to one sum    ADD     1: add a residual, prepare the norm after it
//     ROWS    of x, padded: 8 or 16             SCALED  1: x is scaled by a norm, from `squares`
//     WIDE    1: the result is float32          BIASED  1: a bias is added, nothing is gated
//
// The next kernel begins when x is on its way: its programs would keep those of this one from what they read.

#include "fragments.cuh"
#include "hopper.cuh"

struct Work {
    const u16* x;          // [T, K] bfloat16, rows x_stride apart
    const u16* weight;     // [O, K]
    const float* squares;  // [K / 16, T]
    const u16* residual;   // [T, N], rows residual_stride apart
    const u16* norm;       // [N]
    void* out;             // [T, N] bfloat16, or float32 if WIDE
    u16* weighted;         // [T, N]
    float* sums;           // [ceil(N / 16), T]
    const u16* bias;       // [N]
    int x_stride, residual_stride;
    int size_n;            // N, columns of the result
    int num_rows;          // T
    int num_squares;
    float eps;
};

constexpr int MATRICES = GATED ? 2 : 1;
constexpr int THREADS = 128;
constexpr int BLOCKS = ROWS / 8;          // of 8 rows of x, as a product takes them
constexpr int PITCH = SIZE_K * 2 + 16;    // bytes of a row, so that 8 rows' pieces lie in different banks
constexpr int STEPS = SIZE_K / 32;        // of 16 columns, of a sum
constexpr int STEPS_OF_PIECE = PIECE / 16;
constexpr int HELD = STEPS < 24 ? STEPS : 24;  // steps whose W waits for x in registers
constexpr int AHEAD = 8;                  // steps of x that are loaded before they are multiplied
constexpr int X_AT = MATRICES * 16 * PITCH;
static_assert(SIZE_K % (2 * PIECE) == 0 && SIZE_K % 64 == 0, "whole pieces");

struct Common {
    u64 arrived;                                    // W is there
    float scale_of_row[16];                         // of x
    float4 of_warps[2 * MATRICES][BLOCKS][32];      // sums
};

// Rows of W, each by the copy engine.
__device__ __forceinline__ void copy_w(const Work& work, char* memory, u64* arrived) {
    int lane = threadIdx.x, first = blockIdx.x * 16, rows = min(16, work.size_n - first);
    if (lane == 0) expect(arrived, MATRICES * rows * SIZE_K * 2);
    __syncwarp();
    if (lane < 16 * MATRICES && lane % 16 < rows) {
        long long row = lane / 16 * work.size_n + first + lane % 16;
        copy_bytes(shared(memory + lane * PITCH), work.weight + row * SIZE_K, SIZE_K * 2, shared(arrived));
    }
}

__device__ __forceinline__ void copy_x(const Work& work, char* memory) {
    constexpr int PIECES = SIZE_K / 8;
    int rows = work.num_rows;
#pragma unroll 8
    for (int i = threadIdx.x; i < rows * PIECES; i += THREADS) {
        int row = i / PIECES, piece = i % PIECES;
        const u16* source = work.x + static_cast<long long>(row) * work.x_stride + piece * 8;
        copy_piece(shared(memory + X_AT + row * PITCH + piece * 16), source);
    }
    for (int i = threadIdx.x; i < (ROWS - rows) * PIECES; i += THREADS) {
        int row = rows + i / PIECES, piece = i % PIECES;
        *reinterpret_cast<uint4*>(memory + X_AT + row * PITCH + piece * 16) = make_uint4(0, 0, 0, 0);
    }
}

// The norm's scales: every eighth sum of squares in a sum, of these four by halves and the other four, then both.
__device__ __forceinline__ void scale_rows(const Work& work, float (&scale_of_row)[16]) {
    int row = threadIdx.x / 8, eighth = threadIdx.x % 8;
    float total = 0;
    if (row < work.num_rows) {
        constexpr int ROUNDS = (SIZE_K / 16 + 7) / 8;
        float squares[ROUNDS];
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            int part = i * 8 + eighth;
            squares[i] = part < work.num_squares ? work.squares[part * work.num_rows + row] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) total = __fadd_rn(total, squares[i]);
    }
    for (int lanes : {2, 1, 4}) total = __fadd_rn(total, __shfl_xor_sync(0xffffffff, total, lanes));
    float mean = quotient(total, SIZE_K);
    if (eighth == 0 && row < ROWS) scale_of_row[row] = rsqrtf(__fadd_rn(mean, work.eps));
}

// Operands of a sum, whose columns are every other piece of K.
struct Operands {
    u32 w[STEPS][4], x[BLOCKS][STEPS][2];
};

// The first column of a step of a sum.
__device__ __forceinline__ int column_of(int step, int which) {
    return ((step / STEPS_OF_PIECE * 2 + which) * STEPS_OF_PIECE + step % STEPS_OF_PIECE) * 16;
}

__device__ __forceinline__ void load_w(Operands& operands, const char* memory, int matrix, int which, int step) {
    int lane = threadIdx.x % 32;
    u32 at = shared(memory) + (matrix * 16 + lane % 16) * PITCH + lane / 16 * 16 + column_of(step, which) * 2;
    u32(&w)[4] = operands.w[step];
    load_matrices(at, w[0], w[1], w[2], w[3]);
}

// Of two steps, which lie side by side.
__device__ __forceinline__ void load_x(Operands& operands, const char* memory, int which, int step) {
    int lane = threadIdx.x % 32;
    u32 at = shared(memory) + X_AT + lane % 8 * PITCH + lane / 8 * 16 + column_of(step, which) * 2;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
        u32(&x)[2] = operands.x[block][step], (&next)[2] = operands.x[block][step + 1];
        load_matrices(at + block * 8 * PITCH, x[0], x[1], next[0], next[1]);
    }
}

// As much of W as registers hold, before x is there.
__device__ __forceinline__ void hold_w(Operands& operands, const char* memory, int matrix, int which) {
#pragma unroll
    for (int step = 0; step < HELD; ++step) load_w(operands, memory, matrix, which, step);
}

// From the first column to the last; loads are ahead of products.
__device__ __forceinline__ void multiply(
    float (&sums)[BLOCKS][4], Operands& operands, const char* memory, int matrix, int which
) {
#pragma unroll
    for (int step = 0; step < AHEAD && step < STEPS; step += 2) load_x(operands, memory, which, step);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        if (step + HELD < STEPS) load_w(operands, memory, matrix, which, step + HELD);
        if (step % 2 == 0 && step + AHEAD < STEPS) load_x(operands, memory, which, step + AHEAD);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) multiply16(sums[block], operands.w[step], operands.x[block][step]);
    }
}

__device__ __forceinline__ u16 rounded(float value) { return static_cast<u16>(round_bfloat16(value, 0)); }

// What a lane adds to rows g and g + 8 of W, of rows 2 t and 2 t + 1 of x, and the norm's weights.
struct Addends {
    float residual[BLOCKS][4], norm[2], bias[2];
};

__device__ __forceinline__ float widen(u16 value) { return __uint_as_float(static_cast<u32>(value) << 16); }

// Four results of a lane, of a block of 8 rows of x.
__device__ __forceinline__ void store(const Work& work, float (&y)[4], const Addends& addends, int block, int column) {
    int lane = threadIdx.x % 32, first = block * 8 + lane % 4 * 2;
    float squares[2] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int row = first + i % 2, n = column + i / 2 * 8;
        if (row >= work.num_rows || n >= work.size_n) continue;
        long long at = static_cast<long long>(row) * work.size_n + n;
        if (WIDE) {
            static_cast<float*>(work.out)[at] = y[i];
            continue;
        }
        u16 result = rounded(ADD ? __fadd_rn(y[i], addends.residual[block][i]) : y[i]);
        static_cast<u16*>(work.out)[at] = result;
        if (ADD) {
            float wide = widen(result);
            work.weighted[at] = rounded(__fmul_rn(wide, addends.norm[i / 2]));
            squares[i % 2] = __fadd_rn(squares[i % 2], __fmul_rn(wide, wide));
        }
    }
    if constexpr (ADD) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int lanes = 16; lanes >= 4; lanes /= 2)
                squares[i] = __fadd_rn(squares[i], __shfl_xor_sync(0xffffffff, squares[i], lanes));
            if (lane < 4 && first + i < work.num_rows) work.sums[blockIdx.x * work.num_rows + first + i] = squares[i];
        }
    }
}

__device__ __forceinline__ void load_residual(Addends& addends, const Work& work, int column) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4 * BLOCKS; ++i) {
        int row = i / 4 * 8 + lane % 4 * 2 + i % 2, n = column + i % 4 / 2 * 8;
        bool there = row < work.num_rows && n < work.size_n;
        addends.residual[i / 4][i % 4] =
            there ? widen(work.residual[static_cast<long long>(row) * work.residual_stride + n]) : 0.0f;
    }
}

// Add both sums, of one block of 8 rows, and finish.
__device__ __forceinline__ void finish(
    const Work& work, const Common& common, const Addends& addends, int block, int column
) {
    int lane = threadIdx.x % 32;
    float y[MATRICES][4];
#pragma unroll
    for (int matrix = 0; matrix < MATRICES; ++matrix) {
        float4 first = common.of_warps[2 * matrix][block][lane], second = common.of_warps[2 * matrix + 1][block][lane];
        const float both[2][4] = {{first.x, first.y, first.z, first.w}, {second.x, second.y, second.z, second.w}};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            y[matrix][i] = __fadd_rn(both[0][i], both[1][i]);
            if (SCALED) y[matrix][i] = __fmul_rn(y[matrix][i], common.scale_of_row[block * 8 + lane % 4 * 2 + i % 2]);
            if (BIASED) y[matrix][i] = __fadd_rn(y[matrix][i], addends.bias[i / 2]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (GATED) y[0][i] = gated(y[0][i], y[MATRICES - 1][i]);
    store(work, y[0], addends, block, column);
}

extern "C" __global__ void __launch_bounds__(THREADS) short_linear(const __grid_constant__ Work work) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Common common;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * 16 + lane / 4;
    if (threadIdx.x == 0) {
        set_up(&common.arrived, 1);
        show_barriers_to_cluster();
        show_to_copies();
    }
    __syncwarp();
    if (warp == 0) copy_w(work, memory, &common.arrived);
    Addends addends = {};
    for (int i = 0; i < 2 && warp < BLOCKS && column + i * 8 < work.size_n; ++i) {
        if (ADD) addends.norm[i] = widen(work.norm[column + i * 8]);
        if (BIASED) addends.bias[i] = widen(work.bias[column + i * 8]);
    }
    wait_for_kernels_before();
    copy_x(work, memory);
    let_next_begin();
    if (ADD && warp < BLOCKS) load_residual(addends, work, column);
    if (SCALED) scale_rows(work, common.scale_of_row);
    Operands operands;
    if (warp < 2 * MATRICES) {
        wait(&common.arrived, 0);
        hold_w(operands, memory, warp / 2, warp % 2);
    }
    wait_for_pieces();
    __syncthreads();
    if (warp < 2 * MATRICES) {
        float sums[BLOCKS][4] = {};
        multiply(sums, operands, memory, warp / 2, warp % 2);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
            common.of_warps[warp][block][lane] = {sums[block][0], sums[block][1], sums[block][2], sums[block][3]};
    }
    __syncthreads();
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
        if (warp == block) finish(work, common, addends, block, column);
}
