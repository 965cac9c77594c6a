// The gated product of experts in float8 with a scale for each block of 128 columns, for 8 to 32 rows of x, or in 4 bits with
// a scale for each row and group of 128 columns, for 2 to 32, on Hopper.
//
// There is one program for each multiprocessor, and all have the same share of W. So memory is busy until the end, and no
// program begins anew while W arrives. A tile is 8 columns of the result: 8 rows of gate and 8 of up, all of K. The tiles
// of an expert follow one another, once for each 8 rows of x that have chosen it.
//
//     one thread copies     tiles of W, as two boxes each, into a ring, as soon as experts are chosen; in 4 bits scales too
//     WARPS warps multiply  each its part of K; they keep their columns of x in registers, which change with the expert
//     two warps finish      sums of blocks of 128 columns, scaled and added in their order; the gate
//
// Of those that multiply and finish there are TEAMS, which have tiles by turns: in 4 bits a tile is on its way for longer
// than it keeps a multiprocessor busy.
//
// A product adds 16 columns of K at once, four neighbouring ones of a lane, as expert_stream.cu has it, whose bits these are.
//
// The command line defines the names below. Where it is launched: quantized_streams.py.
//
//     GROUPS  blocks of 128 columns of a warp     WARPS   parts of K
//     TOP_K   experts of a row                    STAGES  of the ring     BITS  of a value of W   TEAMS  of warps

#include "hopper.cuh"

#include "expert_eights.cuh"
#include "expert_values.cuh"
#include "four_bits.cuh"

// Of W, and in 4 bits of its scales: boxes [BLOCKS, 8].
struct Maps {
    TensorMap w, scales;
};

// What the kernel is given beside them; the same fields in quantized_streams.py.
struct Work {
    const float* scales;       // [E, I / 128, scale_columns]
    const u16* x;              // rows x_stride apart
    const long long* experts;  // [T, TOP_K]
    u16* out;                  // [T * TOP_K, size_n]
    int x_stride;
    int size_n;                // columns of the result
    int num_rows;              // T, up to 32
    int scale_columns, scale_rows;
    int num_experts;
};

constexpr int MULTIPLIERS = TEAMS * WARPS, THREADS = 32 * (MULTIPLIERS + 2 * TEAMS + 1);
constexpr int BLOCKS = WARPS * GROUPS;                // of 128 columns
constexpr int HALF = BLOCKS * 128 * BITS;             // bytes of 8 rows of W: boxes [line of 128 bytes][row], swizzled
constexpr int SCALE_BYTES = BITS == 4 ? 32 * BLOCKS : 0;          // of 8 rows: a box [block][row]
constexpr int SCALES = (SCALE_BYTES + 127) / 128 * 32;            // numbers from a box to the next one
constexpr int SCALES_AT = STAGES * 2 * HALF, SUMS_AT = SCALES_AT + STAGES * 2 * SCALES * 4;
constexpr int SLOTS = 2 * TEAMS;                      // of sums that wait to be finished
static_assert(STAGES % TEAMS == 0, "a stage of two teams would be asked for its next phase before the other one's has come");

struct Shared {
    u64 full[STAGES], empty[STAGES];         // of the ring: W has arrived; it is read
    u64 summed[SLOTS], finished[SLOTS];      // of sums: they are there; they are read
    Lists lists;
};

using Sums = float[BLOCKS][16][8];  // of a tile: rows of W, and of x; they lie behind the ring

// Where a role is in a ring of `COUNT`.
template <int COUNT>
struct Turn {
    int at = 0;
    u32 parity = 0;

    __device__ __forceinline__ void advance(int steps = 1) {
        at += steps;
        if (at >= COUNT) {
            at -= COUNT;
            parity ^= 1;
        }
    }
};

// The tiles of a program.
struct Share {
    int begin, end, each;  // `each`: tiles of eight rows of an expert

    __device__ __forceinline__ Share(const Work& work, int eights) : each(work.size_n / 8) {
        long long tiles = static_cast<long long>(eights) * each, programs = gridDim.x;
        begin = static_cast<int>(tiles * blockIdx.x / programs);
        end = static_cast<int>(tiles * (blockIdx.x + 1) / programs);
    }
};

// One thread.
__device__ __forceinline__ void copy_all(
    const Maps& maps, const Work& work, Shared& shared_, const char* ring, const Share& share
) {
    Turn<STAGES> turn;
    for (int tile = share.begin; tile < share.end; ++tile, turn.advance()) {
        int expert = shared_.lists.listed[tile / share.each] / 4, first = tile % share.each;
        int row = expert * 2 * work.size_n / 8 + first;
        u32 to = shared(ring + turn.at * 2 * HALF);
        u64* full = &shared_.full[turn.at];
        wait(&shared_.empty[turn.at], turn.parity ^ 1);
        expect(full, 2 * HALF + 2 * SCALE_BYTES);
        copy_box(to, &maps.w, full, 0, row);
        copy_box(to + HALF, &maps.w, full, 0, row + work.size_n / 8);
        if (SCALES == 0) continue;
        u32 scales = shared(ring + SCALES_AT + turn.at * 2 * SCALES * 4);
        copy_tile(scales, &maps.scales, full, first * 8, expert * BLOCKS);
        copy_tile(scales + SCALES * 4, &maps.scales, full, first * 8 + work.size_n, expert * BLOCKS);
    }
}

__device__ __forceinline__ void multiply_share(
    const Work& work, Shared& shared_, const char* ring, Sums* sums, const Share& share
) {
    int warp = threadIdx.x / 32 % WARPS, team = threadIdx.x / 32 / WARPS, lane = threadIdx.x % 32, listed = -1;
    Turn<STAGES> turn{team};
    Turn<SLOTS> slot{team};
    uint2 columns[GROUPS][8];
    for (int tile = share.begin + team; tile < share.end; tile += TEAMS, turn.advance(TEAMS), slot.advance(TEAMS)) {
        if (tile / share.each != listed) {
            listed = tile / share.each;
            long long row = Eight(shared_.lists, listed).row(lane / 4);
            const u16* from = work.x + row * work.x_stride + warp * GROUPS * 128 + lane % 4 * 4;
#pragma unroll
            for (int i = 0; i < GROUPS * 8; ++i) {
                uint2 own = *reinterpret_cast<const uint2*>(from + i * 16);
                columns[i / 8][i % 8] = BITS == 4 ? placed(own, i % 8 < 4) : own;
            }
        }
        u32 stage = shared(ring + turn.at * 2 * HALF);
        float found[GROUPS][4];
        wait(&shared_.full[turn.at], turn.parity);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            int block = warp * GROUPS + group;
            if constexpr (BITS == 4) {
                u32 words[2][4];
                load_words(words, stage + block / 2 * 1024, HALF, block);
                multiply_placed(found[group], words, [&](int i) { return columns[group][i]; });
            } else {
                u32 words[4][4];
                load_words(words, stage + block * 1024, HALF);
                multiply(found[group], words, columns[group]);
            }
        }
        __syncwarp();
        if (lane == 0) arrive(&shared_.empty[turn.at]);
        wait(&shared_.finished[slot.at], slot.parity ^ 1);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            float(*to)[8] = sums[slot.at][warp * GROUPS + group];
            *reinterpret_cast<float2*>(&to[lane / 4][lane % 4 * 2]) = make_float2(found[group][0], found[group][1]);
            *reinterpret_cast<float2*>(&to[lane / 4 + 8][lane % 4 * 2]) = make_float2(found[group][2], found[group][3]);
        }
        __syncwarp();
        if (lane == 0) arrive(&shared_.summed[slot.at]);
    }
}

// `scales`: of the first block; in 4 bits they are in a stage.
__device__ __forceinline__ float scale_of(const float* scales, int block, const Work& work) {
    if constexpr (BITS == 4) return scales[block * 8] * LEFT_OUT;
    else return __ldg(scales + block * work.scale_columns);
}

// 64 threads of each team, each of which has a column of the result and a row of x.
__device__ __forceinline__ void finish_share(
    const Work& work, Shared& shared_, const char* ring, const Sums* sums, const Share& share
) {
    int thread = (threadIdx.x - 32 * MULTIPLIERS) % 64, result = thread % 8, column = thread / 8, listed = -1, count = 0;
    int team = (threadIdx.x - 32 * MULTIPLIERS) / 64;
    Turn<STAGES> turn{team};
    Turn<SLOTS> slot{team};
    const float* scales = nullptr;
    u16* out = nullptr;
    for (int tile = share.begin + team; tile < share.end; tile += TEAMS, turn.advance(TEAMS), slot.advance(TEAMS)) {
        int first = tile % share.each * 8;
        if (tile / share.each != listed) {
            listed = tile / share.each;
            Eight eight(shared_.lists, listed);
            count = eight.count();
            scales = work.scales + static_cast<long long>(eight.expert) * BLOCKS * work.scale_columns;
            out = work.out + static_cast<long long>(eight.place(work, column)) * work.size_n + result;
        }
        const float* uppers = scales + first / work.scale_rows;
        const float* lowers = scales + (first + work.size_n) / work.scale_rows;
        float upper = 0.0f, lower = 0.0f;
        if constexpr (BITS == 4) {
            uppers = reinterpret_cast<const float*>(ring + SCALES_AT) + turn.at * 2 * SCALES + result;
            lowers = uppers + SCALES;
            wait(&shared_.full[turn.at], turn.parity);
        }
        wait(&shared_.summed[slot.at], slot.parity);
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            const float(*found)[8] = sums[slot.at][block];
            upper = __fmaf_rn(found[result][column], scale_of(uppers, block, work), upper);
            lower = __fmaf_rn(found[result + 8][column], scale_of(lowers, block, work), lower);
        }
        __syncwarp();
        if (thread % 32 == 0) {
            arrive(&shared_.finished[slot.at]);
            if (BITS == 4) arrive(&shared_.empty[turn.at]);
        }
        if (column < count) out[first] = rounded(gated(upper, lower));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gate_ring(
    const __grid_constant__ Maps maps, const __grid_constant__ Work work
) {
    extern __shared__ __align__(1024) char ring[];
    __shared__ Shared shared_;
    shared_.lists.clear<THREADS>();
    if (threadIdx.x == 0) {
        prefetch_map(&maps.w);
        if (BITS == 4) prefetch_map(&maps.scales);
        for (int i = 0; i < STAGES; ++i) {
            set_up(&shared_.full[i], 1);
            set_up(&shared_.empty[i], BITS == 4 ? WARPS + 2 : WARPS);
        }
        for (int i = 0; i < SLOTS; ++i) {
            set_up(&shared_.summed[i], WARPS);
            set_up(&shared_.finished[i], 2);
        }
        show_to_copies();
    }
    __syncthreads();
    Share share(work, shared_.lists.fill<THREADS>(work));
    Sums* sums = reinterpret_cast<Sums*>(ring + SUMS_AT);
    int warp = threadIdx.x / 32;
    if (warp == MULTIPLIERS + 2 * TEAMS) {
        if (threadIdx.x % 32 == 0) copy_all(maps, work, shared_, ring, share);
        return;
    }
    wait_for_kernels_before();
    let_next_begin();
    if (warp < MULTIPLIERS) multiply_share(work, shared_, ring, sums, share);
    else finish_share(work, shared_, ring, sums, share);
}
