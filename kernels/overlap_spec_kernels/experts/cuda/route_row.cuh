// The router of one row on Hopper: its product, softmax, the choice, and the weight of an expert that all rows have.
//
// A program has EACH experts, whose weights it has asked for before the row is there. A warp has eight parts of 128
// columns of one: they are rows of one operand of a product, and those of x columns of the other; the diagonal counts.
// Each program scales the row. The last program waits for all logits, and chooses.
//
// A word has a logit and the number of the launch, so that nothing is to be cleared. Bits are those of
// `_route_kernel` of route.py: sums have the order in which four warps add up there.
//
// A file that includes this names what is below, and gives `route` a class that moves logits.
//
//     HIDDEN, EXPERTS   2048; 128 or 512                   SHARED      1: there is an expert that all rows have
//     TOP_K             experts of the row, at most 16     NORMALISED  1: weights add up to 1
#pragma once

#include "bfloat16.cuh"

// What the kernel is given; the same fields in route.py.
struct Work {
    const u16* x;          // [HIDDEN], times the norm's weight
    const float* squares;  // [HIDDEN / 16]: sums
    const u16* weight;     // [EXPERTS, HIDDEN]
    const u16* bias;       // [EXPERTS], of logits
    const u16* share;      // [HIDDEN], of the expert that all rows have; none: its weight is 1
    u32* words;            // number of the last launch; from the fourth on logits and their numbers
    u16* rows;             // [HIDDEN], normalised
    long long* experts;    // [TOP_K + SHARED]
    float* weights;        // [TOP_K + SHARED]
    float eps;
    int common;            // the expert that all rows have
};

constexpr int CHOOSERS = 128, TOPS = 16;  // threads that choose; groups of them, whose largest values are compared
constexpr int PARTS = HIDDEN / 128, STEPS = 8, PROGRAMS = 128, EACH = EXPERTS / PROGRAMS;
constexpr int SHARING = PARTS / 8;  // warps of an expert
constexpr int THREADS = EACH * SHARING * 32 < CHOOSERS ? CHOOSERS : EACH * SHARING * 32;
static_assert(HIDDEN == 16 * CHOOSERS && EXPERTS == EACH * PROGRAMS && (EACH == 1 || EACH == 4) && TOP_K <= TOPS);

// ---- words of logits ----

__device__ __forceinline__ u64* word_of(const Work& work, int expert) {
    return reinterpret_cast<u64*>(work.words + 4) + expert;
}

// Of this launch: the last program writes it when every program has read the one before.
__device__ __forceinline__ u32 number_of(const Work& work) {
    u32 last;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(last) : "l"(work.words) : "memory");
    return last + 1;
}

__device__ __forceinline__ void give_logit(const Work& work, int expert, float logit, u32 number) {
    u64 word = static_cast<u64>(number) << 32 | __float_as_uint(logit);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word_of(work, expert)), "l"(word) : "memory");
}

// Those of a thread, as soon as all are there.
__device__ __forceinline__ void take_logits(float (&logits)[EACH], const Work& work, u32 number) {
    bool missing;
    do {
        missing = false;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            u64 word;
            asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];"
                         : "=l"(word)
                         : "l"(word_of(work, threadIdx.x * EACH + i))
                         : "memory");
            missing |= static_cast<u32>(word >> 32) != number;
            logits[i] = __uint_as_float(static_cast<u32>(word));
        }
    } while (missing);
}

// ---- arithmetic ----

__device__ __forceinline__ void take_row(float (&values)[4], const float* row) {
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = row[i * 32 + threadIdx.x % 32];
}

// The sum of 128 values, of which a lane has every 32nd, in the order of four warps that have one in each lane.
__device__ __forceinline__ float sum_of_row(const float (&values)[4]) {
    bool upper = threadIdx.x & 16, second = threadIdx.x & 8;
    float a = upper ? values[2] : values[0], b = upper ? values[3] : values[1];
    a += __shfl_xor_sync(0xffffffff, upper ? values[0] : values[2], 16);
    b += __shfl_xor_sync(0xffffffff, upper ? values[1] : values[3], 16);
    float sum = (second ? b : a) + __shfl_xor_sync(0xffffffff, second ? a : b, 8);
#pragma unroll
    for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    sum += __shfl_xor_sync(0xffffffff, sum, 16);  // warps 0 and 2, 1 and 3
    return sum + __shfl_xor_sync(0xffffffff, sum, 8);
}

__device__ __forceinline__ float scale_of_row(const float (&squares)[4], float eps) {
    return quotient(1.0f, root_of(quotient(sum_of_row(squares), HIDDEN) + eps));
}

__device__ __forceinline__ float lower(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float upper(u32 pair) { return __uint_as_float(pair & 0xffff0000); }

__device__ __forceinline__ u32 scaled(u32 pair, float scale) {
    u32 result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(upper(pair) * scale), "f"(lower(pair) * scale));
    return result;
}

// ---- logits, by all programs but the last ----

// What a lane has of a row: four columns in each 16 of its part.
struct Columns {
    uint2 pairs[STEPS];

    __device__ __forceinline__ void take(const u16* row, int first) {
#pragma unroll
        for (int i = 0; i < STEPS; ++i) pairs[i] = *reinterpret_cast<const uint2*>(row + first + i * 16);
    }

    // 0. The compiler asks for all of them before it waits for what this is added to.
    __device__ __forceinline__ float nothing() const {
        u32 all = 0xffffffff;
#pragma unroll
        for (int i = 0; i < STEPS; ++i) all &= pairs[i].x;
        return all == 0xffffffff ? -0.0f : 0.0f;
    }
};

// Of the lane's part, in lanes of which the column is the row.
__device__ __forceinline__ float product_of(Columns& x, const Columns& w, float scale) {
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        x.pairs[i] = make_uint2(scaled(x.pairs[i].x, scale), scaled(x.pairs[i].y, scale));
        u32 a[4] = {w.pairs[i].x, 0, w.pairs[i].y, 0}, b[2] = {x.pairs[i].x, x.pairs[i].y};
        multiply16(sums, a, b);
    }
    return sums[threadIdx.x / 4 % 2];
}

template <class Moved, class Given>
__device__ __forceinline__ void multiply(const Work& work, const Given& given) {
    __shared__ alignas(16) float parts[EACH][PARTS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, which = warp / SHARING, part = warp % SHARING * 8 + lane / 4;
    int first = part * 128 + lane % 4 * 4, own = blockIdx.x * EACH + threadIdx.x;
    bool has = which < EACH;
    Columns w, x;
    float squares[4];
    let_next_begin();
    if (has) w.take(work.weight + (blockIdx.x * EACH + which) * HIDDEN, first);
    Moved moved(work, given, threadIdx.x < EACH ? own : 0);
    wait_for_kernels_before();
    u32 number = number_of(work);
    if (has) {
        x.take(work.x, first);
        take_row(squares, work.squares);
        squares[0] += x.nothing();
        float product = product_of(x, w, scale_of_row(squares, work.eps));
        if (lane % 4 == lane / 8) parts[which][part] = product;
    }
    __syncthreads();
    if (threadIdx.x < EACH) {
        float logit = 0.0f;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) logit += parts[threadIdx.x][i];
        give_logit(work, own, moved(logit), number);
    }
    if (which > 0) return;
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
        if (blockIdx.x == i) *reinterpret_cast<uint2*>(work.rows + first + i * 16) = x.pairs[i];
}

// ---- the choice, by the first threads of the last program ----

__device__ __forceinline__ void meet() { meet_threads(1, CHOOSERS); }

// The sum of x times `share`, for all threads that choose.
__device__ __forceinline__ float product_with_share(const Work& work) {
    __shared__ float sums[4];
    float squares[4], sum;
    take_row(squares, work.squares);
    float scale = scale_of_row(squares, work.eps);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        uint4 x = reinterpret_cast<const uint4*>(work.x)[i * CHOOSERS + threadIdx.x];
        uint4 w = reinterpret_cast<const uint4*>(work.share)[i * CHOOSERS + threadIdx.x];
        u32 values[4] = {x.x, x.y, x.z, x.w}, weights[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 value = scaled(values[j], scale);
            float next = __fmul_rn(upper(weights[j]), upper(value));
            if (i + j == 0) sum = __fmaf_rn(lower(weights[j]), lower(value), next);
            else sum = __fmaf_rn(upper(weights[j]), upper(value), __fmaf_rn(lower(weights[j]), lower(value), sum));
        }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    meet();
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

// The expert that all rows have: its weight is the sigmoid of x times `share`.
__device__ __forceinline__ void give_common(const Work& work) {
    float weight = work.share ? quotient(1.0f, exponential(0.0f - product_with_share(work)) + 1.0f) : 1.0f;
    if (threadIdx.x > 0) return;
    work.experts[TOP_K] = work.common;
    work.weights[TOP_K] = weight;
}

struct Choice {
    alignas(16) u64 candidates[EXPERTS];
    alignas(16) int tops[TOPS];
    float row[CHOOSERS];
    int highest[CHOOSERS / 32];
    int count;
    int experts[TOP_K];
    float weights[TOP_K];
};

__device__ __forceinline__ int ordered(float value) {
    int bits = __float_as_int(value);
    return bits ^ (bits >> 31 & 0x7fffffff);
}

// The probabilities of a thread's experts.
__device__ __forceinline__ void softmax(float (&values)[EACH], Choice& choice) {
    int best = ordered(values[0]);
#pragma unroll
    for (int i = 1; i < EACH; ++i) best = max(best, ordered(values[i]));
    best = __reduce_max_sync(0xffffffff, best);
    if (threadIdx.x % 32 == 0) choice.highest[threadIdx.x / 32] = best;
    if (threadIdx.x == 0) choice.count = 0;
    meet();
    best = max(max(choice.highest[0], choice.highest[1]), max(choice.highest[2], choice.highest[3]));
    float highest = __int_as_float(best ^ (best >> 31 & 0x7fffffff)), sum, row[4];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        values[i] = exponential(values[i] - highest);
        sum = i == 0 ? values[i] : sum + values[i];
    }
    choice.row[threadIdx.x] = sum;
    meet();
    take_row(row, choice.row);
    sum = sum_of_row(row);
#pragma unroll
    for (int i = 0; i < EACH; ++i) values[i] = quotient(values[i], sum);
}

// At least TOP_K keys are as large: so many groups of threads have one. `top`: the largest of the thread.
__device__ __forceinline__ int least_of_candidates(int top, Choice& choice) {
#pragma unroll
    for (int step = 1; step < CHOOSERS / TOPS; step *= 2) top = max(top, __shfl_xor_sync(0xffffffff, top, step));
    if (threadIdx.x % (CHOOSERS / TOPS) == 0) choice.tops[threadIdx.x / (CHOOSERS / TOPS)] = top;
    meet();
    int group = threadIdx.x % TOPS, own = choice.tops[group], rank = 0;
#pragma unroll
    for (int i = 0; i < TOPS; ++i) rank += choice.tops[i] >= own + (i >= group);
    return __shfl_sync(0xffffffff, own, __ffs(__ballot_sync(0xffffffff, rank == TOP_K - 1)) - 1);
}

// Keys of probabilities, in their order; NaN is before all others.
__device__ __forceinline__ int key_of(float probability) {
    return __float_as_int(probability == probability ? probability : 2.0f);
}

// Write the indices and probabilities of the experts that are chosen to `choice`, and indices to the result.
template <class Moved, class Given>
__device__ __forceinline__ void rank_all(
    const float (&probabilities)[EACH], Choice& choice, const Work& work, const Given& given
) {
    int keys[EACH], top = 0;
    u64 own[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) top = max(top, keys[i] = key_of(probabilities[i]));
    int least = least_of_candidates(top, choice);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        own[i] = static_cast<u64>(keys[i]) << 32 | ~(threadIdx.x * EACH + i);  // of equal ones the first is larger
        if (keys[i] >= least) choice.candidates[atomicAdd(&choice.count, 1)] = own[i];
    }
    meet();
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (keys[i] < least) continue;
        int rank = 0, expert = threadIdx.x * EACH + i;
#pragma unroll 4
        for (int other = 0; other < choice.count; ++other) rank += choice.candidates[other] > own[i];
        if (rank >= TOP_K) continue;
        work.experts[rank] = expert;
        Moved::note(given, rank, expert);
        choice.experts[rank] = expert;
        choice.weights[rank] = probabilities[i];
    }
}

// By the first warp: a lane has a place. Of 128 experts they are added up by their index; of 512 by the places that they
// have among those of their quarter of the experts.
__device__ __forceinline__ float sum_of_chosen(int expert, float weight, Choice& choice) {
    float* row = choice.row;
    int lane = threadIdx.x;
    row[lane] = row[lane + 32] = row[lane + 64] = row[lane + 96] = 0.0f;
    __syncwarp();
    if constexpr (EACH == 1) {
        float all[4];
        if (lane < TOP_K) row[expert] = weight;
        __syncwarp();
        take_row(all, row);
        return sum_of_row(all);
    }
    int quarter = lane < TOP_K ? expert / (EXPERTS / 4) : -1, place = 0;
#pragma unroll
    for (int i = 0; i < TOP_K; ++i) place += __shfl_sync(0xffffffff, quarter, i) == quarter && i < lane;
    if (lane < TOP_K) row[quarter * 16 + place] = weight;
    __syncwarp();
    const float* four = row + lane % 16 * 4;
    float sum = ((four[0] + four[1]) + four[2]) + four[3];
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 8);
    return sum + __shfl_xor_sync(0xffffffff, sum, 4);
}

template <class Moved, class Given>
__device__ __forceinline__ void choose(const Work& work, const Given& given) {
    __shared__ Choice choice;
    wait_for_kernels_before();
    u32 number = number_of(work);
    if (threadIdx.x == 0) {
        for (int i = 0; i < TOP_K + SHARED; ++i) work.experts[i] = -1;  // until it is chosen: see `chosen`
        __threadfence();
    }
    __syncthreads();
    let_next_begin();
    if (threadIdx.x >= CHOOSERS) return;
    if (SHARED) give_common(work);
    float values[EACH];
    take_logits(values, work, number);
    softmax(values, choice);
    if (threadIdx.x == 0) *work.words = number;
    rank_all<Moved>(values, choice, work, given);
    meet();
    if (threadIdx.x >= 32) return;
    int place = min(static_cast<int>(threadIdx.x), TOP_K - 1);
    float weight = choice.weights[place];
    if (NORMALISED) weight = quotient(weight, sum_of_chosen(choice.experts[place], weight, choice));
    if (threadIdx.x < TOP_K) work.weights[threadIdx.x] = weight;
}

template <class Moved, class Given>
__device__ __forceinline__ void route(const Work& work, const Given& given) {
    if (blockIdx.x < PROGRAMS) multiply<Moved>(work, given);
    else choose<Moved>(work, given);
}
