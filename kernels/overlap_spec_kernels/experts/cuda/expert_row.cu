// The experts of one row in 4 bits in one launch, on Hopper: gate and up, down, their sum, and what is added to that.
//
// All programs run at once, one on a multiprocessor, and weights are on their way in all of these steps:
//
//     gate, up   a warp has 8 columns of both of an expert, so 16 rows of W, whose chunks of columns come through two
//                stages. A stage whose last chunk is read takes an expert's rows of the second product
//     meeting    each program leaves its columns, counts itself, and waits for all others
//     down, sum  a program has 16 columns, and a warp an expert. They are added in the order of their weights, with all
//                that is added to that
//
// A product adds 16 columns of K at once. Groups of 128 columns have a scale for each row of W, and follow one another
// from the first to the last. So bits are those of `quantized_products.py`.
//
// The command line defines the names below. Where it is launched: sum_of_experts.py.
//
//     HIDDEN, INNER   columns of x, and of a gated product     TOP_K   experts     WARPS   as many as tiles, or experts
//     SHARED, WIDE    see expert_sum.cuh

#include "hopper.cuh"

#include "expert_sum.cuh"

// What the kernel is given; the same fields in sum_of_experts.py.
struct Work {
    const char *gate_up, *down;  // [E, 2 INNER, HIDDEN / 2], [E, HIDDEN, INNER / 2]
    const float *gate_up_scales, *down_scales;  // [E, HIDDEN / 128, 2 INNER], [E, INNER / 128, HIDDEN]
    const u16* x;              // [HIDDEN]
    const long long* experts;  // [TOP_K]
    const float* weights;      // [TOP_K]
    const u16 *shared, *residual;  // [HIDDEN]
    const void* norm;          // [HIDDEN], float32 if WIDE, else bfloat16
    u16* gated;                // [TOP_K, INNER]
    u16 *out, *weighted;       // [HIDDEN]
    float* squares;            // [HIDDEN / 16]
    u32* counter;              // of programs, in all launches so far
    int residual_stride, size_n, num_rows;  // of one row: 0, HIDDEN, 1
};

constexpr int PROGRAMS = HIDDEN / 16, TILES = 2 * TOP_K * INNER / HIDDEN;  // TILES: of a program, a warp has one
constexpr int GROUP = 128, GROUP_BYTES = GROUP / 2;
constexpr int CHUNKS = 4, DEPTH = 2, CHUNK = HIDDEN / CHUNKS;  // of a row of gate or up: columns; chunks on their way
constexpr int GROUPS = CHUNK / GROUP, DOWN_GROUPS = INNER / GROUP;
constexpr int CHUNK_BYTES = CHUNK / 2, DOWN_BYTES = INNER / 2;
constexpr int PITCH = CHUNK_BYTES + 16, DOWN_PITCH = DOWN_BYTES + 16;  // rows of W lie in different banks
constexpr int STAGES = TILES * DEPTH, STAGE = 16 * (PITCH > DOWN_PITCH ? PITCH : DOWN_PITCH);
constexpr int X_AT = STAGES * STAGE, ROWS_AT = X_AT + 2 * HIDDEN;  // x, and the rows of the second product
static_assert(TILES * HIDDEN == 2 * TOP_K * INNER && TOP_K <= STAGES && WARPS >= TILES && WARPS >= TOP_K);
static_assert((PROGRAMS & (PROGRAMS - 1)) == 0, "a counter that begins again at 0 must not stop them");

// ---- products ----

// 8 values of a word as the first or last ones of two pairs. 128 + v is 0x4300 + v, and a zero point is 8.
__device__ __forceinline__ u32 widened(u32 word) {
    u32 values;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(values) : "r"(word), "r"(0x000f000f), "r"(0x43004300));
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(values) : "r"(values), "r"(0x43084308));
    return values;
}

// Sums of a group of columns, of which a lane has four of each 16: rows g and g + 8 of W. `w`: the lane's address of the
// first bytes, `x`: its own columns of a row. Low bits of all bytes come before high ones.
__device__ __forceinline__ void multiply(float (&sums)[4], u32 w, const char* x) {
    u32 words[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) load_matrices(w + i * 32, words[i][0], words[i][1], words[i][2], words[i][3]);
#pragma unroll
    for (int step = 0; step < 8; ++step) {
        u32 upper = words[step / 2 % 2][step % 2 * 2], lower = words[step / 2 % 2][step % 2 * 2 + 1];
        int shift = step / 4 * 4;
        uint2 columns = *reinterpret_cast<const uint2*>(x + step * 32);
        u32 a[4] = {
            widened(upper >> shift), widened(lower >> shift), widened(upper >> (shift + 8)),
            widened(lower >> (shift + 8))
        };
        u32 b[2] = {columns.x, columns.y};
        multiply16(sums, a, b);
    }
}

// Of a lane's two rows of W.
struct Pair {
    float upper, lower;
};

template <int COUNT>
__device__ __forceinline__ void add_groups(Pair& sums, u32 w, const char* x, const Pair* scales) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        float found[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        multiply(found, w + i * GROUP_BYTES, x + i * GROUP * 2);
        sums.upper = __fmaf_rn(found[0], scales[i].upper, sums.upper);
        sums.lower = __fmaf_rn(found[2], scales[i].lower, sums.lower);
    }
}

// `rows`: of an expert's matrix.
template <int COUNT>
__device__ __forceinline__ void take_scales(Pair (&scales)[COUNT], const float* from, int rows, int upper, int lower) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) scales[i] = {from[i * rows + upper], from[i * rows + lower]};
}

// A lane's columns of each 16 of a row: four neighbours, in the order of the bytes of a word.
__device__ __forceinline__ void place_x(char* to, const u16* from, int count, int thread, int threads) {
    for (int at = thread; at < count / 4; at += threads) {
        uint2 own = reinterpret_cast<const uint2*>(from)[at];
        reinterpret_cast<uint2*>(to)[at] = make_uint2(__byte_perm(own.x, own.y, 0x5410), __byte_perm(own.x, own.y, 0x7632));
    }
}

// ---- weights on their way, and programs ----

struct Ring {
    char* memory;
    u64* barriers;

    __device__ __forceinline__ char* stage(int at) const { return memory + at * STAGE; }

    // Each of 16 lanes copies its row of W: no other program reads it.
    __device__ __forceinline__ void ask(int at, const char* row, int bytes) const {
        int lane = threadIdx.x % 32;
        if (lane == 0) expect(barriers + at, 16 * bytes);
        __syncwarp();
        if (lane < 16) copy_bytes_once(shared(stage(at) + lane * (bytes + 16)), row, bytes, shared(barriers + at));
    }
};

// The stage of a chunk of the warp's tile: all warps' first ones come first.
__device__ __forceinline__ int stage_of(int chunk) { return chunk % DEPTH * TILES + threadIdx.x / 32; }

// Wait for all programs, each of which has left its columns.
__device__ __forceinline__ void meet_programs(u32* counter) {
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 end = (count(counter) / PROGRAMS + 1) * PROGRAMS;
        while (static_cast<int>(counted(counter) - end) < 0) {
        }
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) expert_row(const Work work) {
    extern __shared__ __align__(128) char memory[];
    __shared__ u64 barriers[STAGES];
    __shared__ float results[TOP_K][16];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * 16;
    Ring ring = {memory, barriers};
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < STAGES; ++i) set_up(barriers + i, 1);
        show_to_copies();
    }
    __syncthreads();
    wait_for_kernels_before();
    let_next_begin();
    int tile = blockIdx.x * TILES + warp, place = tile / (INNER / 8), first = tile % (INNER / 8) * 8;
    const char* row = nullptr;
    Pair scales[CHUNKS * GROUPS], down_scales[DOWN_GROUPS];
    if (warp < TILES) {
        long long matrix = work.experts[place] * 2 * INNER;
        row = work.gate_up + (matrix + lane / 8 % 2 * INNER + first + lane % 8) * (HIDDEN / 2);
#pragma unroll
        for (int chunk = 0; chunk < DEPTH; ++chunk) ring.ask(stage_of(chunk), row + chunk * CHUNK_BYTES, CHUNK_BYTES);
        int gate = first + lane / 4;
        take_scales(scales, work.gate_up_scales + matrix * (HIDDEN / GROUP), 2 * INNER, gate, gate + INNER);
    }
    place_x(memory + X_AT, work.x, HIDDEN, threadIdx.x, 32 * WARPS);
    __syncthreads();
    if (warp < TILES) {
        Pair sums = {0.0f, 0.0f};
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            int at = stage_of(chunk);
            wait(barriers + at, chunk / DEPTH % 2);
            u32 w = shared(ring.stage(at)) + lane % 16 * PITCH + lane / 16 * 16;
            add_groups<GROUPS>(sums, w, memory + X_AT + chunk * CHUNK * 2 + lane % 4 * 8, scales + chunk * GROUPS);
            __syncwarp();
            if (chunk + DEPTH < CHUNKS)
                ring.ask(at, row + (chunk + DEPTH) * CHUNK_BYTES, CHUNK_BYTES);
            else if (at < TOP_K)
                ring.ask(at, work.down + (work.experts[at] * HIDDEN + column + lane % 16) * DOWN_BYTES, DOWN_BYTES);
        }
        if (lane % 4 == 0) work.gated[place * INNER + first + lane / 4] = rounded(gated(sums.upper, sums.lower));
    }
    if (warp < TOP_K) {
        long long matrix = work.experts[warp] * HIDDEN;
        int upper = column + lane / 4;
        take_scales(down_scales, work.down_scales + matrix * DOWN_GROUPS, HIDDEN, upper, upper + 8);
    }
    Added added(work, 0, column);
    meet_programs(work.counter);
    if (warp < TOP_K) {
        char* rows = memory + ROWS_AT + warp * INNER * 2;
        place_x(rows, work.gated + warp * INNER, INNER, lane, 32);
        __syncwarp();
        wait(barriers + warp, CHUNKS / DEPTH % 2);
        Pair sums = {0.0f, 0.0f};
        u32 w = shared(ring.stage(warp)) + lane % 16 * DOWN_PITCH + lane / 16 * 16;
        add_groups<DOWN_GROUPS>(sums, w, rows + lane % 4 * 8, down_scales);
        if (lane % 4 == 0) {
            results[warp][lane / 4] = bfloat16(rounded(sums.upper));
            results[warp][lane / 4 + 8] = bfloat16(rounded(sums.lower));
        }
    }
    __syncthreads();
    if (warp == 0) added.add_up(work, results);
}
