// The two products of the experts of one row in 4-bit floats, on Hopper. Layout of W: linear/float4.py.
//
//     float4_gate  a warp has 8 columns of gate and the same of up of an expert. It begins while the router still runs,
//                  and asks for weights as soon as that has chosen experts
//     float4_down  a program has 16 columns of the result, and a warp each expert, whose rows of W are on their way
//                  before the first product has ended. Results are added in the order of their weights, with all that
//                  is added to that: expert_sum.cuh
//
// A warp's 16 rows of W come through its stages, some tiles of 128 columns at a time. One warp more asks for those of
// all: the copy engine takes few requests at a time, and who asks for more waits. Scales are there from the start on.
//
// Runs of 16 columns are added up in the order of `float4_products`, all in one sum, so bits are those of
// `_multiply_float4_kernel`. A lane takes four neighbouring columns of a run, which are others than the instruction
// names, and the same of x. The sum of 16 products has the same bits in any order.
//
// The command line defines the names below. Where they are launched: float4_streams.py.
//
//     SIZE_K   columns of x                          WORDS    of a row's scales in a tile: 1 of powers of two for 32
//     CHUNK    tiles of a stage                               columns, 2 of float8 for 16, with factors for rows
//     STAGES   of a warp                             BIASED   1: results have a bias
//     WARPS    that multiply, of a program           CLAMPED  1: gate and up are bounded (`Clamp` of products.py)
//     TOP_K    experts of the row                    SHARED, WIDE: expert_sum.cuh

#include "hopper.cuh"

#include "expert_sum.cuh"

// What the kernels are given beside the map of W; the same fields in float4_streams.py.
struct Work {
    const u32* scales;         // [E, parts, ROW_TILES, TILES, WORDS, 32], of two parts for gate and up
    const float* factors;      // [E, rows], if WORDS is 2
    const u16* bias;           // [E, rows], if BIASED
    const u16* x;              // [SIZE_K], or [TOP_K, SIZE_K]
    const long long* experts;  // [TOP_K], for the first product below 0 until they are chosen
    u16* out;                  // [TOP_K, size_n], or [size_n]
    const float* weights;      // [TOP_K], as all below for the sum
    const u16 *shared, *residual;  // [size_n]
    const void* norm;          // [size_n], float32 if WIDE, else bfloat16
    u16* weighted;             // [size_n]
    float* squares;            // [size_n / 16]
    float alpha, limit;        // if CLAMPED
    int residual_stride, size_n, num_rows, row_tiles;  // of one row: 0, columns of the result, 1; of a part of W
};

constexpr int TILES = (SIZE_K + 127) / 128, CHUNKS = (TILES + CHUNK - 1) / CHUNK;
constexpr int STAGE = CHUNK * 1024, SCALES = TILES * WORDS * 64;  // bytes of a warp
constexpr int SCALES_AT = WARPS * STAGES * STAGE, X_AT = SCALES_AT + WARPS * SCALES, X_BYTES = TILES * 256;
static_assert(SIZE_K % 16 == 0 && STAGES <= CHUNKS);

// ---- values ----

// Run Q of a half of a tile's runs, in two neighbouring columns, as bfloat16 with exponents that are 126 too small.
// Of run 2 the product puts sign and magnitude in their places, and other bits between them.
template <int Q>
__device__ __forceinline__ u32 of_run(u32 words) {
    constexpr u32 MAGNITUDE = 0x01c001c0, SIGN = 0x80008000;
    if constexpr (Q == 3) return (words >> 3 & MAGNITUDE) | (words << 1 & SIGN);
    if constexpr (Q == 2) words = (words & 0x20072007) * (64 + 4);
    return (Q == 1 ? words << 3 : words) & (MAGNITUDE | SIGN);
}

__device__ __forceinline__ u32 times(u32 pair, u32 other) {
    asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(other));
    return pair;
}

// Scale BYTE of a word, twice, times 2^126; float8, whose bits in their place are too small by 2^120, times 2^118.
template <int BYTE>
__device__ __forceinline__ u32 scale_of(u32 word) {
    constexpr u32 TWICE = 0x00010001, HALFWAY = 0x7b007b00;  // 2^119
    u32 byte = __byte_perm(word, 0, 0x4440 | BYTE);
    if (WORDS == 1) return byte * (TWICE << 7) + (TWICE * 126 << 7);
    return times(times(byte * (TWICE << 4), HALFWAY), HALFWAY);
}

// ---- products of 16 rows of W with a row of x ----

// Pairs of columns of the runs 0 to 3 of a row, and of the others.
struct Pairs {
    u32 of_half[2][2];

    __device__ __forceinline__ explicit Pairs(uint4 words) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 order = half ? 0x7632 : 0x5410;
            of_half[half][0] = __byte_perm(words.x, words.y, order);
            of_half[half][1] = __byte_perm(words.z, words.w, order);
        }
    }
};

// A lane's columns of rows g and g + 8 of a tile of W, with words of their scales.
struct Rows {
    Pairs upper, lower;
    u32 of_upper[WORDS], of_lower[WORDS];

    // `first`, `second`: pairs of columns of run RUN of x.
    template <int RUN>
    __device__ __forceinline__ void add(float (&sums)[4], u32 first, u32 second) const {
        constexpr int WORD = WORDS == 1 ? 0 : RUN / 4, BYTE = WORDS == 1 ? RUN / 2 : RUN % 4;
        u32 above = scale_of<BYTE>(of_upper[WORD]), below = scale_of<BYTE>(of_lower[WORD]);
        const u32(&high)[2] = upper.of_half[RUN / 4];
        const u32(&low)[2] = lower.of_half[RUN / 4];
        u32 a[4] = {
            times(of_run<RUN % 4>(high[0]), above), times(of_run<RUN % 4>(low[0]), below),
            times(of_run<RUN % 4>(high[1]), above), times(of_run<RUN % 4>(low[1]), below)
        };
        u32 b[2] = {first, second};
        multiply16(sums, a, b);
    }

    // `x`: the lane's columns of the tile, as `take_x` has placed them.
    __device__ __forceinline__ void add_all(float (&sums)[4], const char* x) const {
        uint4 of_x[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) of_x[q] = *reinterpret_cast<const uint4*>(x + q * 64);
        add<0>(sums, of_x[0].x, of_x[0].y), add<4>(sums, of_x[0].z, of_x[0].w);
        add<1>(sums, of_x[1].x, of_x[1].y), add<5>(sums, of_x[1].z, of_x[1].w);
        add<2>(sums, of_x[2].x, of_x[2].y), add<6>(sums, of_x[2].z, of_x[2].w);
        add<3>(sums, of_x[3].x, of_x[3].y), add<7>(sums, of_x[3].z, of_x[3].w);
    }
};

// Where 16 rows of W are, of which the last 8 are up's if GATED, and else follow the first ones.
struct Place {
    int part, row_tile, row;  // among all parts and those of a part; row of the tile

    __device__ __forceinline__ Place(int part, int column) : part(part), row_tile(column / 32), row(column % 32) {}
};

// Of all warps: stages that are full, and those that are read.
struct Barriers {
    u64 full[STAGES], read[STAGES];

    // `warps` multiply.
    __device__ __forceinline__ void set_up_all(int warps) {
        if (threadIdx.x >= STAGES) return;
        set_up(full + threadIdx.x, 1);
        set_up(read + threadIdx.x, warps);
        show_to_copies();
    }
};

constexpr int AT_ONCE = 2;  // chunks that are on their way: the first of more would arrive later

// All of W, by the warp that asks: a lane for each of `warps`.
__device__ __forceinline__ void bring_all(char* memory, Barriers& barriers, const TensorMap* map, Place at, int warps) {
    int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int chunk = 0, stage = 0, parity = 1; chunk < CHUNKS; ++chunk) {
        u64* full = barriers.full + stage;
        int earlier = chunk - AT_ONCE;
        if (earlier >= 0) wait(barriers.full + earlier % STAGES, earlier / STAGES % 2);
        wait(barriers.read + stage, parity);  // the first time it is free
        if (lane == 0) expect(full, warps * STAGE);
        __syncwarp();
        char* to = memory + (lane * STAGES + stage) * STAGE;
        if (lane < warps) copy_box(shared(to), map, full, at.row * 16, chunk * CHUNK, at.row_tile, at.part);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}

template <bool GATED>
struct Stream {
    static constexpr int TILE = GATED ? 512 : 1024, LOWER = GATED ? CHUNK * 512 : 512;  // bytes
    char *stages, *scales;
    Barriers& barriers;

    __device__ __forceinline__ Stream(char* memory, Barriers& barriers, int warp)
        : stages(memory + warp * STAGES * STAGE), scales(memory + SCALES_AT + warp * SCALES), barriers(barriers) {}

    // Four rows of a tile at a time.
    __device__ __forceinline__ void ask_for_scales(const Work& work, Place at) const {
        constexpr int ROW_TILE = TILES * WORDS * 32;
        long long tile = static_cast<long long>(at.part) * work.row_tiles + at.row_tile;
        const u32* from = work.scales + tile * ROW_TILE + at.row;
        long long lower = GATED ? static_cast<long long>(work.row_tiles) * ROW_TILE : 8;
        for (int i = threadIdx.x % 32; i < SCALES / 16; i += 32)
            copy_piece(shared(scales + i * 16), from + i / 4 * 32 + i % 2 * 4 + (i / 2 % 2 ? lower : 0));
    }

    // The sums of rows g and g + 8, which are 0 and 2.
    __device__ __forceinline__ void multiply_all(float (&sums)[4], const char* x) const {
        int lane = threadIdx.x % 32, stage = 0;
        u32 parity = 0;
        const u32* of_rows = reinterpret_cast<const u32*>(scales) + lane / 4;
        x += lane % 4 * 16;
        wait_for_pieces();
        __syncwarp();
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            wait(barriers.full + stage, parity);
            const char* w = stages + stage * STAGE + lane * 16;
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) {
                if (TILES % CHUNK && chunk * CHUNK + i >= TILES) break;
                Rows rows = {
                    Pairs(*reinterpret_cast<const uint4*>(w + i * TILE)),
                    Pairs(*reinterpret_cast<const uint4*>(w + i * TILE + LOWER))
                };
#pragma unroll
                for (int word = 0; word < WORDS; ++word) {
                    rows.of_upper[word] = of_rows[(i * WORDS + word) * 16];
                    rows.of_lower[word] = of_rows[(i * WORDS + word) * 16 + 8];
                }
                rows.add_all(sums, x + i * 256);
            }
            of_rows += CHUNK * WORDS * 16, x += CHUNK * 256;
            __syncwarp();
            if (lane == 0) arrive(barriers.read + stage);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
};

// A row of x by some threads: of each four columns those of runs q and q + 4 side by side, zeros behind the last one.
// Every piece is asked for before the first one is written.
template <int THREADS>
__device__ __forceinline__ void take_x(char* to, const u16* x) {
    constexpr int PIECES = X_BYTES / 16, TURNS = (PIECES + THREADS - 1) / THREADS;
    uint4 own[TURNS];
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
        int at = threadIdx.x % THREADS + i * THREADS;
        own[i] = at < SIZE_K / 8 ? reinterpret_cast<const uint4*>(x)[at] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
        int at = threadIdx.x % THREADS + i * THREADS, run = at / 2 % 8;
        if (at >= PIECES) continue;
        char* place = to + at / 16 * 256 + run % 4 * 64 + at % 2 * 32 + run / 4 * 8;
        *reinterpret_cast<uint2*>(place) = make_uint2(own[i].x, own[i].y);
        *reinterpret_cast<uint2*>(place + 16) = make_uint2(own[i].z, own[i].w);
    }
}

// ---- what is made of a sum ----

// The factor and the bias of a row of W.
struct Ends {
    float factor = 0.0f;
    u16 bias = 0;

    __device__ __forceinline__ Ends(const Work& work, long long row) {
        if (WORDS == 2) factor = work.factors[row];
        if (BIASED) bias = work.bias[row];
    }

    __device__ __forceinline__ float of(float sum) const {
        float wide = __fmul_rn(factor, 256.0f), added = bfloat16(bias);
        if (WORDS == 1) return BIASED ? __fadd_rn(sum, added) : sum;
        return BIASED ? __fmaf_rn(sum, wide, added) : __fmul_rn(sum, wide);
    }
};

// As `gate_of` of products.py.
__device__ __forceinline__ float gate_of(const Work& work, float gate, float up) {
    if (!CLAMPED) return gated(gate, up);
    gate = least(gate, work.limit), up = least(most(up, -work.limit), work.limit);
    float sigmoid = __fadd_rn(1.0f, exponential(__fmul_rn(-work.alpha, gate)));
    return __fmul_rn(quotient(gate, sigmoid), __fadd_rn(up, 1.0f));
}

constexpr int THREADS = 32 * (WARPS + 1);

extern "C" __global__ void __launch_bounds__(THREADS, 1) float4_gate(
    const __grid_constant__ TensorMap map, const __grid_constant__ Work work
) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Barriers barriers;
    __shared__ int experts[WARPS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = work.size_n / 8, first = blockIdx.x * WARPS;
    int warps = min(TOP_K * tiles - first, WARPS);  // that have something to multiply
    bool asks = warp == WARPS, has = (asks ? lane : warp) < warps;
    int number = first + (has ? asks ? lane : warp : 0), place = number / tiles, column = number % tiles * 8;
    if (threadIdx.x == 0) prefetch_map(&map);
    barriers.set_up_all(warps);
    __syncthreads();
    if (asks) {
        int expert = chosen(work.experts + place);
        if (has) experts[lane] = expert;
        __syncwarp();
        pass_threads(1, THREADS);
        bring_all(memory, barriers, &map, Place(expert * 2, column), warps);
        return;
    }
    meet_threads(1, THREADS);
    Stream<true> own(memory, barriers, warp);
    Place at(experts[has ? warp : 0] * 2, column);
    if (has) own.ask_for_scales(work, at);
    long long row = static_cast<long long>(at.part) * work.size_n + column + lane / 4;  // of W
    Ends of_gate(work, row), of_up(work, row + work.size_n);
    wait_for_kernels_before();
    let_next_begin();
    take_x<32 * WARPS>(memory + X_AT, work.x);
    meet_threads(2, 32 * WARPS);
    if (!has) return;
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    own.multiply_all(sums, memory + X_AT);
    if (lane % 4 == 0)
        work.out[static_cast<long long>(place) * work.size_n + column + lane / 4] =
            rounded(gate_of(work, of_gate.of(sums[0]), of_up.of(sums[2])));
}

extern "C" __global__ void __launch_bounds__(THREADS) float4_down(
    const __grid_constant__ TensorMap map, const __grid_constant__ Work work
) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Barriers barriers;
    __shared__ float results[WARPS][16];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * 16;
    bool asks = warp == WARPS;
    let_next_begin();
    // The choice, and what is added, were written before the gated product, which waited before this kernel began.
    int expert = static_cast<int>(work.experts[asks ? min(lane, WARPS - 1) : warp]);
    Place at(expert, column);
    if (threadIdx.x == 0) prefetch_map(&map);
    barriers.set_up_all(WARPS);
    __syncthreads();
    if (asks) {
        bring_all(memory, barriers, &map, at, WARPS);
        return;
    }
    Stream<false> own(memory, barriers, warp);
    own.ask_for_scales(work, at);
    long long row = static_cast<long long>(expert) * work.size_n + column + lane / 4;
    Ends upper(work, row), lower(work, row + 8);
    Added added(work, 0, column, threadIdx.x < 16);
    char* x = memory + X_AT + warp * X_BYTES;
    wait_for_kernels_before();
    take_x<32>(x, work.x + warp * SIZE_K);
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    own.multiply_all(sums, x);
    if (lane % 4 == 0) {
        results[warp][lane / 4] = bfloat16(rounded(upper.of(sums[0])));
        results[warp][lane / 4 + 8] = bfloat16(rounded(lower.of(sums[2])));
    }
    meet_threads(1, 32 * WARPS);
    if (warp == 0) added.add_up(work, results);
}
