// Adds what latent_decode.cu has found in pieces of keys, as `add_pieces_kernel` of _latent_attention_kernel.py does.
//
// A program has eight pairs and 16 columns of one request: what a warp of latent_decode.cu has in its registers for one
// product's pairs, which are 512 bytes of each piece. Sums of many pieces come to shared memory at once. Meanwhile the
// pieces' factors are computed, side by side: the highest score of all pieces before one needs no order.
//
//     sums     [AT_ONCE pieces][32 lanes][4]
//     factors  [AT_ONCE pieces][8 pairs]
//
// The command line defines WIDTH, HEADS, PADDED, UNIT, AT_ONCE and READ_BEFORE_WAIT, as of latent_decode.cu.
#include "bfloat16.cuh"

struct Work {
    const long long* positions;  // [T]
    const float* sums;           // [slots][PADDED / 8][RANK / 64][4 warps][128]
    const float* stats;          // [slots][highest score, denominator][PADDED]
    u16* out;                    // [T, HEADS, RANK]
    int num_requests, num_slots;
};

constexpr int RANK = 512;
constexpr int PAIRS = WIDTH * HEADS;
constexpr int THREADS = 128, PART = 128;  // numbers of a piece
constexpr int PARTS = PADDED * RANK / PART;  // of a request
constexpr int RUNS = THREADS / 8;            // of neighbouring pieces, for which a thread computes the factors of a pair
constexpr int RUN = AT_ONCE / RUNS;
constexpr int TOGETHER = 8;
constexpr int MOST_REQUESTS = 256;
constexpr float LOWEST = -1.0e30f;
constexpr u32 ALL_LANES = 0xffffffff;
static_assert(AT_ONCE % RUNS == 0 && AT_ONCE % TOGETHER == 0);

#include "latent_division.cuh"

// Of a piece and a pair: the sum so far is multiplied by `kept`, the piece's by `added`.
struct alignas(16) Factors {
    float kept, added, denominator, unused;
};

// Where a request's pieces lie.
struct Slots {
    int first, pieces;
};

__device__ __forceinline__ Slots slots_of(const Work& work, int* keys, int request) {
    for (int i = threadIdx.x; i < work.num_requests; i += THREADS)
        keys[i] = static_cast<int>(work.positions[(i + 1) * WIDTH - 1]) + 1;
    __syncthreads();
    Items items(keys, work.num_requests, work.num_slots);
    if (!items.by_piece) return {request, 1};
    int before = 0;
    for (int first = 0; first < request; first += 32)
        before += __reduce_add_sync(
            ALL_LANES, first + static_cast<int>(threadIdx.x % 32) < request ? items.lane_pieces(first) : 0
        );
    return {before, pieces_of(keys[request])};
}

// Some pieces behind those that are added. All of their numbers are asked for before any is used. Factors of pieces that
// are not there change nothing.
__device__ __forceinline__ void add(
    int first, int count, const float* sums, const Factors* factors, int pair, float& sum, float& denominator
) {
    float numbers[TOGETHER];
    Factors own[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
        numbers[i] = sums[min(first + i, count - 1) * PART + threadIdx.x];
        own[i] = factors[(first + i) * 8 + pair];
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
        sum = __fmaf_rn(sum, own[i].kept, __fmul_rn(numbers[i], own[i].added));
        denominator = __fmaf_rn(denominator, own[i].kept, own[i].denominator);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) latent_pieces(const __grid_constant__ Work work) {
    extern __shared__ __align__(128) char memory[];
    __shared__ int keys[MOST_REQUESTS];
    __shared__ float tops[RUNS][8];
    float* sums = reinterpret_cast<float*>(memory);
    Factors* factors = reinterpret_cast<Factors*>(memory + AT_ONCE * PART * 4);
    let_next_begin();
    if (!READ_BEFORE_WAIT) wait_for_kernels_before();
    int thread = threadIdx.x, request = blockIdx.x / PARTS, part = blockIdx.x % PARTS;
    Slots slots = slots_of(work, keys, request);
    if (READ_BEFORE_WAIT) wait_for_kernels_before();
    int eight = part / (PARTS / (PADDED / 8)), run = thread / 8;
    const float* from = work.sums + static_cast<long long>(slots.first) * (PADDED * RANK) + part * PART + thread % 32 * 4;
    const float* stats = work.stats + static_cast<long long>(slots.first) * (2 * PADDED) + eight * 8 + thread % 8;
    int pair = thread / 4 % 4 * 2 + thread % 2;  // of the number that it adds
    float sum = 0.0f, denominator = 0.0f, highest = LOWEST;
    for (int begin = 0; begin < slots.pieces; begin += AT_ONCE) {
        int count = min(slots.pieces - begin, AT_ONCE);
        for (int i = thread / 32; i < count; i += THREADS / 32)
            copy_piece(shared(sums + i * PART + thread % 32 * 4), from + static_cast<long long>(begin + i) * (PADDED * RANK));
        float tops_of_run[RUN], denominators[RUN], top = LOWEST;
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            int piece = run * RUN + i;
            bool there = piece < count;
            const float* at = stats + (begin + piece) * (2 * PADDED);
            tops_of_run[i] = there ? at[0] : LOWEST;
            denominators[i] = there ? at[PADDED] : 0.0f;
            top = fmaxf(top, tops_of_run[i]);
        }
        tops[run][thread % 8] = top;
        __syncthreads();
        float before = highest;
#pragma unroll
        for (int i = 0; i < RUNS; ++i) {
            float other = tops[i][thread % 8];
            if (i < run) before = fmaxf(before, other);
            highest = fmaxf(highest, other);
        }
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            float next = fmaxf(before, tops_of_run[i]);
            float kept = exp2_of(__fadd_rn(before, -next)), added = exp2_of(__fadd_rn(tops_of_run[i], -next));
            factors[(run * RUN + i) * 8 + thread % 8] = {kept, added, __fmul_rn(denominators[i], added), 0.0f};
            before = next;
        }
        wait_for_pieces();
        __syncthreads();
        for (int first = 0; first < count; first += TOGETHER) add(first, count, sums, factors, pair, sum, denominator);
        __syncthreads();
    }
    int column = part % (PARTS / (PADDED / 8)) * 16;
    pair += eight * 8;
    if (pair < PAIRS) {
        // RANK / 16 parts of eight pairs: 64 columns of a tile, 16 of a warp, and of these a lane's row and 8 below.
        column += thread / 16 + thread / 2 % 2 * 8;
        float result = quotient(sum, denominator > 0.0f ? denominator : 1.0f);
        work.out[(static_cast<long long>(request) * PAIRS + pair) * RANK + column] = rounded(result);
    }
}
