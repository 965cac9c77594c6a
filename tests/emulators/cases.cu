// Small kernels that test the emulator (test_cuda_emulator.py). `fault` leaves out or spoils one thing that threads wait
// for; each fault must be found.

#include "hopper.cuh"
#include "attention_products.h"  // multiply_values(sums, weights, values): 128 columns

struct Work {
    const void *x, *w;
    float* out;
    int count, fault;
};

// ---- a ring: out[32 w + i] = sum of x[.., 32 w + i], rows of 128 floats; after each row, the four warps add its sum ----

enum RingFault {
    NONE, NO_FULL_WAIT, NO_EMPTY_WAIT, WRONG_FULL_PARITY, WRONG_EMPTY_PARITY, FEWER_BYTES, MORE_BYTES, EARLY_ARRIVAL,
    NO_SYNCWARP, NO_BARRIER_AFTER_WRITE, NO_BARRIER_AFTER_READ, FEWER_AT_BARRIER, NO_SET_UP_BARRIER, NO_KERNELS_WAIT,
    ONE_ARRIVAL_LESS, ONE_ARRIVAL_MORE, UNALIGNED_COPY, COPY_BEYOND_END, LAST_ROW_NOT_WAITED, OTHER_INSTRUCTION
};

constexpr int STAGES = 3;
constexpr int ROW = 128 * 4;

struct Ring {
    u64 full[STAGES], empty[STAGES];
};

__device__ __forceinline__ void copy_rows(const Work& work, char* rows, Ring& ring) {
    if (work.fault != NO_KERNELS_WAIT) wait_for_kernels_before();
    for (int i = 0; i < work.count; ++i) {
        int stage = i % STAGES, round = i / STAGES;
        if (work.fault != NO_EMPTY_WAIT) wait(&ring.empty[stage], (round ^ 1 ^ (work.fault == WRONG_EMPTY_PARITY)) & 1);
        expect(&ring.full[stage], ROW + (work.fault == MORE_BYTES) * 16 - (work.fault == FEWER_BYTES) * 16);
        char* target = rows + stage * ROW + (work.fault == UNALIGNED_COPY) * 8 + (work.fault == COPY_BEYOND_END) * 64 * ROW;
        copy_bytes(shared(target), static_cast<const char*>(work.x) + i * ROW, ROW, shared(&ring.full[stage]));
    }
}

__device__ __forceinline__ float read_row(const Work& work, char* rows, Ring& ring, int i) {
    int stage = i % STAGES, lane = threadIdx.x % 32;
    if (work.fault != NO_FULL_WAIT) wait(&ring.full[stage], (i / STAGES ^ (work.fault == WRONG_FULL_PARITY)) & 1);
    if (work.fault == EARLY_ARRIVAL && lane == 0) arrive(&ring.empty[stage]);
    float value = reinterpret_cast<const float*>(rows + stage * ROW)[threadIdx.x - 32];
    if (work.fault != NO_SYNCWARP) __syncwarp();
    if (work.fault != EARLY_ARRIVAL && lane == 0) arrive(&ring.empty[stage]);
    return value;
}

__device__ __forceinline__ void add_rows(const Work& work, char* rows, Ring& ring, float* left) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 1;
    float sum = 0.0f, total = 0.0f;
    for (int i = 0; i < work.count - (work.fault == LAST_ROW_NOT_WAITED); ++i) {
        float value = read_row(work, rows, ring, i), all = value;
        sum += value;
        for (int step = 16; step; step /= 2) all += __shfl_xor_sync(0xffffffff, all, step);
        if (lane == 0) left[warp] = all;
        if (work.fault != NO_BARRIER_AFTER_WRITE) meet_threads(1, work.fault == FEWER_AT_BARRIER ? 96 : 128);
        total += left[0] + left[1] + left[2] + left[3];
        if (work.fault != NO_BARRIER_AFTER_READ) meet_threads(1, 128);
        if (work.fault == OTHER_INSTRUCTION && lane == 5) __syncwarp();
    }
    work.out[threadIdx.x - 32] = sum;
    if (threadIdx.x == 32) work.out[128] = total;
}

extern "C" __global__ void ring(const __grid_constant__ Work work) {
    extern __shared__ __align__(128) char rows[];
    __shared__ Ring ring;
    __shared__ float left[4];
    if (threadIdx.x == 0)
        for (int stage = 0; stage < STAGES; ++stage) {
            set_up(&ring.full[stage], 1);
            set_up(&ring.empty[stage], 4 + (work.fault == ONE_ARRIVAL_MORE) - (work.fault == ONE_ARRIVAL_LESS));
        }
    if (work.fault != NO_SET_UP_BARRIER) __syncthreads();
    if (threadIdx.x == 0) copy_rows(work, rows, ring);
    if (threadIdx.x >= 32) add_rows(work, rows, ring, left);
}

// ---- fragments: out [3, 16, 8] = x w^T from ldmatrix, from a transposed copy of x, and of x and w stored by stmatrix ----

__device__ __forceinline__ void multiply_8_bits(float (&sums)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void write_sums(float* out, const float (&sums)[4]) {
    int row = threadIdx.x / 4, column = threadIdx.x % 4 * 2;
    for (int i = 0; i < 4; ++i) out[(row + i / 2 * 8) * 8 + column + i % 2] = sums[i];
}

// x [16, 16], w [8, 16] in bfloat16, their rows 32 bytes apart; x turned [16, 16]
__device__ __forceinline__ void multiply_matrices(float* out, char* x, char* w, char* turned) {
    int lane = threadIdx.x;
    float sums[4] = {}, of_turned[4] = {};
    u32 a[4], b[2];
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(b[0]), "=r"(b[1])
                 : "r"(shared(w) + lane % 8 * 32 + lane / 8 % 2 * 16));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(shared(x) + lane % 16 * 32 + lane / 16 * 16));
    multiply16(sums, a, b);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(shared(turned) + (lane % 8 + lane / 16 * 8) * 32 + lane / 8 % 2 * 16));
    multiply16(of_turned, a, b);
    write_sums(out, sums);
    write_sums(out + 128, of_turned);
    store_matrices(shared(turned) + lane % 16 * 32 + lane / 16 * 16, a[0], a[1], a[2], a[3]);  // x again
}

extern "C" __global__ void fragments(const __grid_constant__ Work work) {
    __shared__ __align__(16) u16 x[256];
    __shared__ __align__(16) u16 w[128];
    __shared__ __align__(16) u16 turned[256];
    for (int i = threadIdx.x; i < 256; i += 32) {
        u16 value = static_cast<const u16*>(work.x)[i];
        x[i] = value;
        turned[i % 16 * 16 + i / 16] = value;
        if (i < 128) w[i] = static_cast<const u16*>(work.w)[i];
    }
    __syncwarp();
    multiply_matrices(work.out, reinterpret_cast<char*>(x), reinterpret_cast<char*>(w), reinterpret_cast<char*>(turned));
    __syncwarp();
    for (int i = threadIdx.x; i < 256; i += 32) work.out[256 + i] = turned[i] == x[i];
}

// x [16, 32], w [8, 32] in float8 e4m3, from memory
extern "C" __global__ void fragments_8_bits(const __grid_constant__ Work work) {
    auto *x = static_cast<const u32*>(work.x), *w = static_cast<const u32*>(work.w);
    int row = threadIdx.x / 4, word = threadIdx.x % 4;
    u32 a[4], b[2] = {w[row * 8 + word], w[row * 8 + word + 4]};
    for (int i = 0; i < 4; ++i) a[i] = x[(row + i % 2 * 8) * 8 + word + i / 2 * 4];
    float sums[4] = {};
    multiply_8_bits(sums, a, b);
    write_sums(work.out, sums);
}

// ---- a cluster: the first program's out[i] = sum over programs r of x[r, i], which the others send ----

enum ClusterFault { NO_FIRST_MEETING = 1, NO_LAST_MEETING, NO_BYTES_WAIT, NO_SENT_WAIT, READ_BEYOND_END };

extern "C" __global__ void __cluster_dims__(4, 1, 1) cluster_sums(const __grid_constant__ Work work) {
    __shared__ float sent[4][32];
    __shared__ float stored[4][32];
    __shared__ u64 arrived;
    u32 rank = rank_in_cluster(), i = threadIdx.x;
    if (i == 0 && rank == 0) {
        set_up(&arrived, 1);
        expect(&arrived, 4 * 32 * 4);
    }
    if (work.fault != NO_FIRST_MEETING) meet_cluster();
    float value = static_cast<const float*>(work.x)[rank * 32 + i + (work.fault == READ_BEYOND_END)];
    u32 target = address_in(0, &sent[rank][i]), target_stored = address_in(0, &stored[rank][i]);
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(target),
                 "f"(value), "r"(address_in(0, &arrived))
                 : "memory");
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(target_stored), "f"(value) : "memory");
    if (work.fault != NO_SENT_WAIT) meet_cluster();
    if (rank == 0) {
        if (work.fault != NO_BYTES_WAIT) wait(&arrived, 0);
        work.out[i] = sent[0][i] + sent[1][i] + sent[2][i] + sent[3][i];
        work.out[32 + i] = stored[0][i] + stored[1][i] + stored[2][i] + stored[3][i];
    }
    float own;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(own) : "r"(target_stored));
    work.out[64 + rank * 32 + i] = own;
    if (work.fault != NO_LAST_MEETING) meet_cluster();  // no program leaves while others read its memory
}

// ---- a warpgroup: out [64, 16] = x w^T with x [64, 64] in registers and w [16, 64] in a swizzled tile ----

enum ProductFault { NO_FENCE = 1, NO_COMMIT, NO_PRODUCTS_WAIT, A_WARP_LESS, NO_TILE_WAIT };

__device__ __forceinline__ void multiply_registers(float (&sums)[8], const u32 (&a)[4], u64 w, bool add) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, "
        "%12, add, 1, 1, 0; }"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]),
          "+f"(sums[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(w), "r"(static_cast<int>(add)));
}

__device__ __forceinline__ void multiply_slices(const Work& work, float (&sums)[8], u64 w) {
    int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int k = 0; k < 4; ++k) {
        u32 a[4];
        for (int i = 0; i < 4; ++i) {
            const u16* at = static_cast<const u16*>(work.x) + (row + i % 2 * 8) * 64 + 16 * k + column + i / 2 * 8;
            a[i] = *reinterpret_cast<const u32*>(at);
        }
        if (work.fault != A_WARP_LESS || threadIdx.x < 96) multiply_registers(sums, a, w + 2 * k, k > 0);
    }
}

extern "C" __global__ void register_products(const __grid_constant__ TensorMap w_map, const __grid_constant__ Work work) {
    extern __shared__ __align__(1024) char tile[];
    __shared__ u64 arrived;
    float sums[8];
    if (threadIdx.x == 0) {
        set_up(&arrived, 1);
        expect(&arrived, 16 * 128);
        copy_tile(shared(tile), &w_map, &arrived, 0, 0);
    }
    __syncthreads();
    if (work.fault != NO_TILE_WAIT) wait(&arrived, 0);
    if (work.fault != NO_FENCE) begin_products();
    multiply_slices(work, sums, described(shared(tile)));
    if (work.fault != NO_COMMIT) commit_products();
    if (work.fault != NO_PRODUCTS_WAIT) wait_products<0>();
    int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int i = 0; i < 8; ++i) work.out[(row + i / 2 % 2 * 8) * 16 + column + i / 4 * 8 + i % 2] = sums[i];
}

// ---- out [64, 128] = x y: x [64, 32] in registers, y [32, 128] read across its rows, which are the second of two heads
// of w [4, 8, 2, 128]: boxes in the order [8 rows][64 columns][8][64]. Of 32 rows, the 16 that copy 1 brings come first ----

extern "C" __global__ void products_across_rows(
    const __grid_constant__ TensorMap w_map, const __grid_constant__ Work work
) {
    extern __shared__ __align__(1024) char tile[];
    __shared__ u64 arrived;
    constexpr int EIGHT = 2 * 1024;
    if (threadIdx.x == 0) {
        set_up(&arrived, 1);
        expect(&arrived, 4 * EIGHT);
        for (int copy = 0; copy < 2; ++copy)
            copy_box(shared(tile) + (copy ^ 1) * 2 * EIGHT, &w_map, &arrived, 2, copy * 2);
    }
    __syncthreads();
    wait(&arrived, 0);
    float sums[64] = {};
    int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    u32 a[8];
    for (int i = 0; i < 8; ++i) {
        const u16* at = static_cast<const u16*>(work.x) + (row + i % 2 * 8) * 32 + i / 4 * 16 + column + i / 2 % 2 * 8;
        a[i] = *reinterpret_cast<const u32*>(at);
    }
    begin_products();
    for (int k = 0; k < 2; ++k) multiply_values(sums, a + 4 * k, described(shared(tile) + 2 * k * EIGHT, EIGHT, 1024));
    commit_products();
    wait_products<0>();
    for (int i = 0; i < 64; ++i) work.out[(row + i / 2 % 2 * 8) * 128 + column + i / 4 * 8 + i % 2] = sums[i];
}
