// The second product of experts, and the sum of each row's experts, for up to 32 rows of x, on Hopper. W is in 16 bits,
// in float8 with a scale for each block of 128 columns, or in 4 bits with a scale for each row and group of 128.
//
// `sum_down` of expert_stream.cu, whose bits these are in float8, reads W again for each row that has an expert. In 16
// bits they are those of `multiply_kernel` of products.py: one sum for all of K, whose columns are added in order.
// Here a cluster has 16 columns of the result for each of its programs, and all rows of x. Its programs divide the
// experts, and with them what is read of x. A stage of a program's ring is an expert, with up to eight rows that have
// chosen it:
//
//     warps of a stage      multiply 16 columns each. They take a slice of W into registers first, so that the next of
//                           it is on its way while they multiply. What comes of a place is left where its columns are
//                           added up
//     one warp copies x     as soon as it is written
//     one thread copies W   from before that
//     all warps finish      a row for each half of a warp: its places are added up in the order of their weights
//
// The command line defines the names below. Where it is launched: quantized_streams.py.
//
//     BLOCKS  of 128 bytes of a row of W    SLICES   of a row of W, with as many blocks each; 1 in few bits
//     STAGES  of the ring                   CLUSTER  programs of one
//     BITS    of a value of W               FLOAT16  1: the others are float16, else bfloat16
//     TOP_K   experts of a row              ROWS    of x that a stage has: 8, or as many as there are at most
//     SHARED, WIDE  as in expert_stream.cu

#include "hopper.cuh"

#include "expert_eights.cuh"
#include "expert_sum.cuh"
#include "expert_values.cuh"
#include "expert_work.cuh"
#include "four_bits.cuh"
#include "sixteen_bits.cuh"

constexpr int WARPS = STAGES * CLUSTER, THREADS = 32 * (WARPS + 2);
constexpr int SLICE = BLOCKS / SLICES;         // blocks
constexpr int HALF = 8 * 128 * SLICE;          // bytes of 8 rows of a slice: boxes [block][row], swizzled
constexpr int BOX = 2 * CLUSTER * HALF;        // of an expert's slice: the columns of the whole cluster
constexpr int BLOCK_OF_X = 128 * 16 / BITS;    // bytes of a row of x beside a block of W
constexpr int ROW = BLOCK_OF_X * BLOCKS;
constexpr int X_PITCH = ROW + (BITS == 16 ? 16 : 32);  // where a warp reads eight rows at once, banks are others
constexpr int X_AT = STAGES * SLICES * BOX, RESULTS_AT = X_AT + STAGES * ROWS * X_PITCH;
constexpr int ROUNDS = (MOST_ROWS * 16 + THREADS - 1) / THREADS;  // in which threads add up all rows
constexpr int EARLY = BITS == 16 ? ROUNDS : 1;  // of them, for which registers have room while W is multiplied

static_assert(BLOCKS % SLICES == 0 && (BITS == 16 || SLICES == 1), "slices of whole blocks");

// The lane's own for an expert: of its block in float8; in 4 bits of a row of each block, of whose groups it has one.
struct Scales {
    float of[BITS == 4 ? BLOCKS : 1];
};

struct Shared {
    u64 full[STAGES][SLICES];   // of the ring: W has arrived, of the first slice x too
    u64 taken[STAGES][SLICES];  // W is read
    u64 empty[STAGES];          // and then x
    u16 places[MOST_ROWS * TOP_K][8];  // of the rows of each eight of the program
    Lists lists;
};

// The eights of a program.
struct Share {
    int begin, end;

    __device__ __forceinline__ Share(int eights)
        : begin(eights * rank_in_cluster() / CLUSTER), end(eights * (rank_in_cluster() + 1) / CLUSTER) {}
};

// All threads of the cluster. One program needs no fence of the whole GPU.
__device__ __forceinline__ void meet_programs() {
    if constexpr (CLUSTER > 1) meet_cluster();
    else __syncthreads();
}

// One thread.
__device__ __forceinline__ void copy_w(
    const TensorMap* map, const Work& work, Shared& shared_, const char* ring, const Share& share
) {
    int first = blockIdx.x / CLUSTER * CLUSTER * 16;
    for (int i = 0; i < share.end - share.begin; ++i) {
        int stage = i % STAGES, row = shared_.lists.listed[share.begin + i] / 4 * work.size_n + first;
        for (int slice = 0; slice < SLICES; ++slice) {
            u64* full = &shared_.full[stage][slice];
            if (i >= STAGES) wait(&shared_.taken[stage][slice], i / STAGES % 2 ^ 1);
            expect(full, BOX);
            copy_box(shared(ring + (stage * SLICES + slice) * BOX), map, full, slice * SLICE, row / 8);
        }
    }
}

// One warp.
__device__ __forceinline__ void copy_x(const Work& work, Shared& shared_, const char* ring, const Share& share) {
    int lane = threadIdx.x % 32;
    wait_for_kernels_before();
    for (int i = 0; i < share.end - share.begin; ++i) {
        int stage = i % STAGES, count = Eight(shared_.lists, share.begin + i).count();
        const u16* from = work.x + static_cast<long long>(shared_.places[i][lane % 8]) * work.x_stride;
        u64* full = shared_.full[stage];
        if (i >= STAGES) wait(&shared_.empty[stage], i / STAGES % 2 ^ 1);
        if (lane == 0) expect(full, count * ROW);
        __syncwarp();
        if (lane < count) copy_bytes(shared(ring + X_AT + (stage * ROWS + lane) * X_PITCH), from, ROW, shared(full));
    }
}

// sums += the products of a slice of 16 rows of W. `x`: the slice of eight rows, of which there are `count`.
__device__ __forceinline__ void multiply_slice(
    float (&sums)[4], const u32 (&words)[SLICE][4][4], const char* x, int count, const Scales& scales
) {
    int lane = threadIdx.x % 32;
    if constexpr (BITS == 16) {
        u32 from = shared(x) + min(lane % 8, count - 1) * X_PITCH + lane / 8 * 16, columns[2 * SLICE][2][2];
#pragma unroll
        for (int i = 0; i < 2 * SLICE; ++i)
            load_matrices(from + i * 64, columns[i][0][0], columns[i][0][1], columns[i][1][0], columns[i][1][1]);
#pragma unroll
        for (int i = 0; i < 4 * SLICE; ++i) multiply_narrow(sums, words[i / 4][i % 4], columns[i / 2][i % 2]);
    } else if constexpr (BITS == 4) {
        const char* own = x + min(lane / 4, count - 1) * X_PITCH + lane % 4 * 8;
#pragma unroll
        for (int group = 0; group < 2 * BLOCKS; ++group) {
            u32 of_group[2][4];
            float found[4];
#pragma unroll
            for (int j = 0; j < 8; ++j) of_group[j / 4][j % 4] = words[group / 2][group % 2 * 2 + j / 4][j % 4];
            multiply_placed(found, of_group, [&](int i) {
                return placed(*reinterpret_cast<const uint2*>(own + group * 256 + i * 32), i < 4);
            });
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                int owner = group % 2 * 16 + j / 2 * 8 + lane / 4;
                float scale = __shfl_sync(0xffffffff, scales.of[group / 2], owner) * LEFT_OUT;
                sums[j] = __fmaf_rn(found[j], scale, sums[j]);
            }
        }
    } else {
        auto load = [&](u32 (&of_block)[4][4], int block) {
#pragma unroll
            for (int j = 0; j < 16; ++j) of_block[j / 4][j % 4] = words[block][j / 4][j % 4];
        };
        const char* own = x + min(lane / 4, count - 1) * X_PITCH + lane % 4 * 8;
        multiply_all<SLICE>(load, own, [&](int block, const float (&found)[4]) {
            float of_block = __shfl_sync(0xffffffff, scales.of[0], block);
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[j] = __fmaf_rn(found[j], of_block, sums[j]);
        });
    }
}

// `results` of the programs of the cluster have columns of 16 each.
__device__ __forceinline__ void multiply_share(
    const Work& work, Shared& shared_, const char* ring, const float (*results)[16], const Share& share
) {
    int lane = threadIdx.x % 32, part = threadIdx.x / 32 % CLUSTER, stage = threadIdx.x / 32 / CLUSTER;
    u32 to = address_in(part, results) + lane / 4 * 4, w = shared(ring + stage * SLICES * BOX) + part * 2 * HALF;
    const char* x = ring + X_AT + stage * ROWS * X_PITCH;
    auto scales_of = [&](int listed) {
        Scales found;
        if constexpr (BITS == 16) return found;
        const float* scales = work.scales + (blockIdx.x / CLUSTER * CLUSTER + part) * 16 / work.scale_rows;
        long long expert = shared_.lists.listed[listed < share.end ? listed : 0] / 4;
        if constexpr (BITS == 8) {
            found.of[0] = __ldg(scales + (expert * BLOCKS + min(lane, BLOCKS - 1)) * work.scale_columns);
        } else {
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                long long group = (expert * BLOCKS + block) * 2 + lane / 16;
                found.of[block] = __ldg(scales + group * work.scale_columns + lane % 16);
            }
        }
        return found;
    };
    Scales scales = scales_of(share.begin + stage);
    for (int i = stage; i < share.end - share.begin; i += STAGES) {
        int count = Eight(shared_.lists, share.begin + i).count();
        Scales next = scales_of(share.begin + i + STAGES);
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            u32 words[SLICE][4][4];
            wait(&shared_.full[stage][slice], i / STAGES % 2);
#pragma unroll
            for (int block = 0; block < SLICE; ++block) load_words(words[block], w + slice * BOX + block * 1024, HALF);
            __syncwarp();
            if (lane == 0) arrive(&shared_.taken[stage][slice]);
            multiply_slice(sums, words, x + slice * SLICE * BLOCK_OF_X, count, scales);
        }
        __syncwarp();
        if (lane == 0) arrive(&shared_.empty[stage]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int column = lane % 4 * 2 + j % 2;
            if (column < count) store(to + shared_.places[i][column] * 64 + j / 2 * 32, widen(narrow(sums[j])));
        }
        scales = next;
    }
}

// Where the rows of each eight are. All but one warp.
__device__ __forceinline__ void find_places(const Work& work, Shared& shared_, const Share& share) {
    for (int i = threadIdx.x; i < work.num_rows * TOP_K; i += THREADS - 32) {
        int expert = static_cast<int>(work.experts[i]);
        int before = __popc(shared_.lists.rows[expert] & (1u << i / TOP_K) - 1);
        int eight = shared_.lists.first[expert] + before / 8;
        if (eight >= share.begin && eight < share.end) shared_.places[eight - share.begin][before % 8] = i;
    }
    meet_threads(1, THREADS - 32);
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
            for (int slice = 0; slice < SLICES; ++slice) {
                set_up(&shared_.full[i][slice], slice == 0 ? 2 : 1);
                set_up(&shared_.taken[i][slice], CLUSTER);
            }
            set_up(&shared_.empty[i], CLUSTER);
        }
        show_to_copies();
    }
    meet_programs();
    // The choice, and what is added, were written before the gated product, which waited before this kernel began.
    Share share(shared_.lists.fill<THREADS>(work));
    float(*results)[16] = reinterpret_cast<float(*)[16]>(ring + RESULTS_AT);
    Added added[ROUNDS];
    auto read = [&](int begin, int end) {
#pragma unroll
        for (int i = begin; i < end; ++i) {
            int row = (threadIdx.x + i * THREADS) / 16;
            added[i] = Added(work, row, blockIdx.x * 16, row < work.num_rows);
        }
    };
    read(0, EARLY);
    if (warp <= WARPS) {
        find_places(work, shared_, share);
        if (warp < WARPS) multiply_share(work, shared_, ring, results, share);
        else copy_x(work, shared_, ring, share);
    } else if (threadIdx.x % 32 == 0) {
        copy_w(&w_map, work, shared_, ring, share);
    }
    read(EARLY, ROUNDS);
    meet_programs();
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        int row = (threadIdx.x + i * THREADS) / 16;
        if (row / 2 * 2 < work.num_rows) added[i].add_up(work, results + row * TOP_K);
    }
}
