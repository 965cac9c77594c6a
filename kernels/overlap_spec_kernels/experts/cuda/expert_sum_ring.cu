// The second product of experts in float8 with a scale for each block of 128 columns, and the sum of each row's experts,
// for 8 to 32 rows of x, on Hopper.
//
// `sum_down` of expert_stream.cu, whose bits these are, reads W again for each row that has an expert. Here a cluster has
// 16 columns of the result for each of its programs, and all rows of x. Its programs divide the experts, and with them
// what is read of x. A stage of a program's ring is an expert, with up to eight rows that have chosen it:
//
//     warps of a stage      multiply 16 columns each. They take W into registers first, so that the next of it is on its
//                           way while they multiply. What comes of a place is left where its columns are added up
//     one warp copies x     as soon as it is written
//     one thread copies W   from before that
//     all warps finish      a row for each half of a warp: its places are added up in the order of their weights
//
// The command line defines the names below. Where it is launched: quantized_streams.py.
//
//     BLOCKS  of 128 columns of W    TOP_K    experts of a row    SHARED, WIDE  as in expert_stream.cu
//     STAGES  of the ring            CLUSTER  programs of one

#include "hopper.cuh"

#include "expert_eights.cuh"
#include "expert_sum.cuh"
#include "expert_values.cuh"
#include "expert_work.cuh"

constexpr int WARPS = STAGES * CLUSTER, THREADS = 32 * (WARPS + 2);
constexpr int HALF = 8 * 128 * BLOCKS;                 // bytes of 8 rows of W: boxes [block][row], swizzled
constexpr int BOX = 2 * CLUSTER * HALF;                // of an expert: the columns of the whole cluster
constexpr int ROW = 256 * BLOCKS, X_PITCH = ROW + 32;  // of x
constexpr int X_AT = STAGES * BOX, RESULTS_AT = X_AT + STAGES * 8 * X_PITCH;

struct Shared {
    u64 full[STAGES];                  // of the ring: W and x have arrived
    u64 taken[STAGES], empty[STAGES];  // W is read, and then x
    u16 places[MOST_ROWS * TOP_K][8];  // of the rows of each eight of the program
    Lists lists;
};

// The eights of a program.
struct Share {
    int begin, end;

    __device__ __forceinline__ Share(int eights)
        : begin(eights * rank_in_cluster() / CLUSTER), end(eights * (rank_in_cluster() + 1) / CLUSTER) {}
};

// One thread.
__device__ __forceinline__ void copy_w(
    const TensorMap* map, const Work& work, Shared& shared_, const char* ring, const Share& share
) {
    int first = blockIdx.x / CLUSTER * CLUSTER * 16;
    for (int i = 0; i < share.end - share.begin; ++i) {
        int stage = i % STAGES, row = shared_.lists.listed[share.begin + i] / 4 * work.size_n + first;
        if (i >= STAGES) wait(&shared_.taken[stage], i / STAGES % 2 ^ 1);
        expect(&shared_.full[stage], BOX);
        copy_box(shared(ring + stage * BOX), map, &shared_.full[stage], 0, row / 8);
    }
}

// One warp.
__device__ __forceinline__ void copy_x(const Work& work, Shared& shared_, const char* ring, const Share& share) {
    int lane = threadIdx.x % 32;
    wait_for_kernels_before();
    for (int i = 0; i < share.end - share.begin; ++i) {
        int stage = i % STAGES, count = Eight(shared_.lists, share.begin + i).count();
        const u16* from = work.x + static_cast<long long>(shared_.places[i][lane % 8]) * work.x_stride;
        u64* full = &shared_.full[stage];
        if (i >= STAGES) wait(&shared_.empty[stage], i / STAGES % 2 ^ 1);
        if (lane == 0) expect(full, count * ROW);
        __syncwarp();
        if (lane < count) copy_bytes(shared(ring + X_AT + (stage * 8 + lane) * X_PITCH), from, ROW, shared(full));
    }
}

// `results` of the programs of the cluster have columns of 16 each.
__device__ __forceinline__ void multiply_share(
    const Work& work, Shared& shared_, const char* ring, const float (*results)[16], const Share& share
) {
    int lane = threadIdx.x % 32, part = threadIdx.x / 32 % CLUSTER, stage = threadIdx.x / 32 / CLUSTER;
    u32 to = address_in(part, results) + lane / 4 * 4, w = shared(ring + stage * BOX) + part * 2 * HALF;
    const char* x = ring + X_AT + stage * 8 * X_PITCH + lane % 4 * 8;
    const float* scales = work.scales + (blockIdx.x / CLUSTER * CLUSTER + part) * 16 / work.scale_rows;
    auto scale_of = [&](int listed) {  // of a lane's block
        long long expert = shared_.lists.listed[listed < share.end ? listed : 0] / 4;
        return __ldg(scales + (expert * BLOCKS + min(lane, BLOCKS - 1)) * work.scale_columns);
    };
    float scale = scale_of(share.begin + stage);
    for (int i = stage; i < share.end - share.begin; i += STAGES) {
        int count = Eight(shared_.lists, share.begin + i).count();
        float next = scale_of(share.begin + i + STAGES), sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        u32 words[BLOCKS][4][4];
        wait(&shared_.full[stage], i / STAGES % 2);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) load_words(words[block], w + block * 1024, HALF);
        __syncwarp();
        if (lane == 0) arrive(&shared_.taken[stage]);
        auto load = [&](u32 (&of_block)[4][4], int block) {
#pragma unroll
            for (int j = 0; j < 16; ++j) of_block[j / 4][j % 4] = words[block][j / 4][j % 4];
        };
        multiply_all<BLOCKS>(load, x + min(lane / 4, count - 1) * X_PITCH, [&](int block, const float (&found)[4]) {
            float of_block = __shfl_sync(0xffffffff, scale, block);
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[j] = __fmaf_rn(found[j], of_block, sums[j]);
        });
        __syncwarp();
        if (lane == 0) arrive(&shared_.empty[stage]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int column = lane % 4 * 2 + j % 2;
            if (column < count) store(to + shared_.places[i][column] * 64 + j / 2 * 32, bfloat16(rounded(sums[j])));
        }
        scale = next;
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) sum_ring(
    const __grid_constant__ TensorMap w_map, const __grid_constant__ Work work
) {
    extern __shared__ __align__(1024) char ring[];
    __shared__ Shared shared_;
    int warp = threadIdx.x / 32;
    let_next_begin();
    shared_.lists.clear<THREADS>();
    if (threadIdx.x == 0) {
        prefetch_map(&w_map);
        for (int i = 0; i < STAGES; ++i) {
            set_up(&shared_.full[i], 2);
            set_up(&shared_.taken[i], CLUSTER);
            set_up(&shared_.empty[i], CLUSTER);
        }
        show_to_copies();
    }
    meet_cluster();
    // The choice, and what is added, were written before the gated product, which waited before this kernel began.
    Share share(shared_.lists.fill<THREADS>(work));
    float(*results)[16] = reinterpret_cast<float(*)[16]>(ring + RESULTS_AT);
    int row = threadIdx.x / 16;
    Added added(work, row, blockIdx.x * 16, row < work.num_rows);
    if (warp <= WARPS) {
        for (int i = threadIdx.x; i < (share.end - share.begin) * 8; i += THREADS - 32)
            shared_.places[i / 8][i % 8] = Eight(shared_.lists, share.begin + i / 8).place(work, i % 8);
        meet_threads(1, THREADS - 32);
        if (warp < WARPS) multiply_share(work, shared_, ring, results, share);
        else copy_x(work, shared_, ring, share);
    } else if (threadIdx.x % 32 == 0) {
        copy_w(&w_map, work, shared_, ring, share);
    }
    meet_cluster();
    while (row / 2 * 2 < work.num_rows) {
        added.add_up(work, results + row * TOP_K);
        row += THREADS / 16;
        added = Added(work, row, blockIdx.x * 16, row < work.num_rows);
    }
}
