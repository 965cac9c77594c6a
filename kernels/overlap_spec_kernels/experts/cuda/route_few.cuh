// The router of few rows on Hopper: its product, softmax, the choice, and the weight of an expert that all rows have.
//
// Programs multiply; one more for each row waits for its logits, and chooses. Those that multiply have asked for their
// weights before rows are there, and each scales the rows that it takes.
//
//     one row       a program has EACH experts. A warp has eight parts of 128 columns of one: they are rows of one
//                   operand of a product, and those of x columns of the other; the diagonal counts
//     several rows  see route_rows.cuh
//
// Logits lie in words whose bits are all set between launches: a NaN that no sum is. Bits of results are those of
// `_route_kernel` of route.py: sums have the order in which four warps add up there.
//
// A file that includes this names what is below, and gives `route` a class that moves logits.
//
//     HIDDEN, EXPERTS   2048; 128 or 512                   SHARED      1: there is an expert that all rows have
//     TOP_K             experts of a row, at most 16       NORMALISED  1: weights add up to 1
//     ROWS              1, 8, 16 or 32: padded
#pragma once

#include "bfloat16.cuh"

// What the kernel is given; the same fields in route.py.
struct Work {
    const u16* x;          // [T, HIDDEN], times the norm's weight
    const float* squares;  // [HIDDEN / 16, T]: sums; none: x is scaled
    const u16* weight;     // [EXPERTS, HIDDEN]
    const u16* bias;       // [EXPERTS], of logits
    const u16* share;      // [HIDDEN], of the expert that all rows have; none: its weight is 1
    u32* words;            // [T, EXPERTS] logits
    u16* rows;             // [T, HIDDEN], normalised, where there are `squares`
    long long* experts;    // [T, TOP_K + SHARED]
    float* weights;        // [T, TOP_K + SHARED]
    float eps;
    int common;            // the expert that all rows have
    int num_rows;
};

constexpr int CHOOSERS = 128, TOPS = 16;  // threads that choose; groups of them, whose largest values are compared
constexpr int OWN = EXPERTS / CHOOSERS;   // experts of a thread that chooses
constexpr int PARTS = HIDDEN / 128, STEPS = 8, THREADS = 2 * CHOOSERS;
constexpr int EACH = ROWS > 1 ? 4 : OWN, PROGRAMS = EXPERTS / EACH, CLUSTER = ROWS > 1 ? 4 : 1;
constexpr int REGISTERS = 104;  // of a thread: expert_ring.cu begins beside it
enum Barrier { CHOOSING = 1, BESIDE, OPEN };  // of threads that choose, of the others, of both
static_assert(HIDDEN == 16 * CHOOSERS && EXPERTS == OWN * CHOOSERS && (OWN == 1 || OWN == 4) && TOP_K <= TOPS);

// ---- words of logits ----

constexpr u32 ABSENT = 0xffffffff;

__device__ __forceinline__ void give_logit(const Work& work, int row, int expert, float logit) {
    u32* word = work.words + row * EXPERTS + expert;
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(__float_as_uint(logit)) : "memory");
}

__device__ __forceinline__ void take(u32 (&words)[1], const u32* from) {
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(words[0]) : "l"(from) : "memory");
}

__device__ __forceinline__ void take(u32 (&words)[4], const u32* from) {
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from)
                 : "memory");
}

// Those of a thread, as soon as all are there. They are absent again.
__device__ __forceinline__ void take_logits(float (&logits)[OWN], u32* from) {
    u32 words[OWN];
    bool missing;
    do {
        take(words, from);
        missing = false;
#pragma unroll
        for (int i = 0; i < OWN; ++i) missing |= words[i] == ABSENT;
    } while (missing);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        logits[i] = __uint_as_float(words[i]);
        from[i] = ABSENT;
    }
}

// ---- arithmetic ----

__device__ __forceinline__ void take_row(float (&values)[4], const float* row, int stride = 1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = row[(i * 32 + threadIdx.x % 32) * stride];
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

// ---- logits, by the first programs ----

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
    constexpr int SHARING = PARTS / 8;  // warps of an expert
    __shared__ alignas(16) float parts[EACH][PARTS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, which = warp / SHARING, part = warp % SHARING * 8 + lane / 4;
    int first = part * 128 + lane % 4 * 4, own = blockIdx.x * EACH + threadIdx.x;
    bool has = which < EACH;
    Columns w, x;
    float squares[4];
    if (has) w.take(work.weight + (blockIdx.x * EACH + which) * HIDDEN, first);
    Moved moved(work, given, 0, threadIdx.x < EACH ? own : 0);
    wait_for_kernels_before();
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
        give_logit(work, 0, own, moved(logit));
    }
    if (which > 0) return;
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
        if (blockIdx.x == i) *reinterpret_cast<uint2*>(work.rows + first + i * 16) = x.pairs[i];
}

// ---- the expert that all rows have, by threads beside those that choose ----

// The sum of x times `share`, for all threads beside.
__device__ __forceinline__ float product_with_share(const Work& work, int row, const uint4 (&share)[2]) {
    __shared__ float sums[4];
    float squares[4], scale = 1.0f, sum;
    int thread = threadIdx.x - CHOOSERS;
    const uint4* from = reinterpret_cast<const uint4*>(work.x + row * HIDDEN) + thread;
    uint4 all[2] = {from[0], from[CHOOSERS]};
    if (work.squares) {
        take_row(squares, work.squares + row, work.num_rows);
        scale = scale_of_row(squares, work.eps);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        uint4 x = all[i], w = share[i];
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
    if (thread % 32 == 0) sums[thread / 32] = sum;
    meet_threads(BESIDE, CHOOSERS);
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

// Its weight is the sigmoid of x times `share`. Places are below 0 before the next kernel begins, until an expert is
// chosen: see `chosen`. The first warp writes that.
__device__ __forceinline__ void give_common(const Work& work, int row) {
    int thread = threadIdx.x - CHOOSERS;
    long long* experts = work.experts + row * (TOP_K + SHARED);
    uint4 share[2];
    if (SHARED && work.share) {
#pragma unroll
        for (int i = 0; i < 2; ++i) share[i] = reinterpret_cast<const uint4*>(work.share)[i * CHOOSERS + thread];
    }
    wait_for_kernels_before();
    if (SHARED && thread == TOP_K) experts[thread] = work.common;
    if (thread < 32) {
        if (thread < TOP_K) experts[thread] = -1;
        __threadfence();
        __syncwarp();
        let_next_begin();
        pass_threads(OPEN, CHOOSERS + 32);
    }
    if (!SHARED) return;
    float weight = work.share ? quotient(1.0f, exponential(0.0f - product_with_share(work, row, share)) + 1.0f) : 1.0f;
    if (thread == 0) work.weights[row * (TOP_K + SHARED) + TOP_K] = weight;
}

// ---- the choice ----

__device__ __forceinline__ void meet() { meet_threads(CHOOSING, CHOOSERS); }

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
__device__ __forceinline__ void softmax(float (&values)[OWN], Choice& choice) {
    int best = ordered(values[0]);
#pragma unroll
    for (int i = 1; i < OWN; ++i) best = max(best, ordered(values[i]));
    best = __reduce_max_sync(0xffffffff, best);
    if (threadIdx.x % 32 == 0) choice.highest[threadIdx.x / 32] = best;
    meet();
    best = max(max(choice.highest[0], choice.highest[1]), max(choice.highest[2], choice.highest[3]));
    float highest = __int_as_float(best ^ (best >> 31 & 0x7fffffff)), sum, row[4];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        values[i] = exponential(values[i] - highest);
        sum = i == 0 ? values[i] : sum + values[i];
    }
    choice.row[threadIdx.x] = sum;
    meet();
    take_row(row, choice.row);
    sum = sum_of_row(row);
#pragma unroll
    for (int i = 0; i < OWN; ++i) values[i] = quotient(values[i], sum);
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

constexpr int KEY_OF_NAN = 0x40000000;  // of 2: before all others

// Keys of probabilities, in their order.
__device__ __forceinline__ int key_of(float probability) {
    return probability == probability ? __float_as_int(probability) : KEY_OF_NAN;
}

// None is there yet: they are 0.
__device__ __forceinline__ void clear_candidates(Choice& choice) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) choice.candidates[i * CHOOSERS + threadIdx.x] = 0;
    if (threadIdx.x == 0) choice.count = 0;
}

// The candidates with their indices, of which the first of equal ones is larger.
__device__ __forceinline__ void give_candidates(const float (&probabilities)[OWN], Choice& choice) {
    int keys[OWN], top = 0, count = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) top = max(top, keys[i] = key_of(probabilities[i]));
    int least = least_of_candidates(top, choice);
#pragma unroll
    for (int i = 0; i < OWN; ++i) count += keys[i] >= least;
    if (count == 0) return;
    int place = atomicAdd(&choice.count, count);
#pragma unroll
    for (int i = 0; i < OWN; ++i)
        if (keys[i] >= least)
            choice.candidates[place++] = static_cast<u64>(keys[i]) << 32 | ~(threadIdx.x * OWN + i);
}

// Write the indices and probabilities of the experts that are chosen to `choice`, and indices to the result.
template <class Moved, class Given>
__device__ __forceinline__ void rank_all(Choice& choice, const Work& work, const Given& given, int row) {
    int count = choice.count;
    for (int i = threadIdx.x; i < count; i += CHOOSERS) {
        u64 own = choice.candidates[i];
        int rank = 0, key = own >> 32, expert = ~static_cast<u32>(own);
        for (int other = 0; other < count; other += 8) {
#pragma unroll
            for (int j = 0; j < 8; ++j) rank += choice.candidates[other + j] > own;
        }
        if (rank >= TOP_K) continue;
        work.experts[row * (TOP_K + SHARED) + rank] = expert;
        Moved::note(given, row, rank, expert);
        choice.experts[rank] = expert;
        choice.weights[rank] = __int_as_float(key == KEY_OF_NAN ? 0x7fffffff : key);
    }
}

// By the first warp: a lane has a place. Of 128 experts they are added up by their index; of 512 by the places that they
// have among those of their quarter of the experts.
__device__ __forceinline__ float sum_of_chosen(int expert, float weight, Choice& choice) {
    float* row = choice.row;
    int lane = threadIdx.x;
    row[lane] = row[lane + 32] = row[lane + 64] = row[lane + 96] = 0.0f;
    __syncwarp();
    if constexpr (OWN == 1) {
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
__device__ __forceinline__ void choose(const Work& work, const Given& given, int row) {
    __shared__ Choice choice;
    if (threadIdx.x >= CHOOSERS) return give_common(work, row);
    clear_candidates(choice);
    wait_for_kernels_before();
    float values[OWN];
    take_logits(values, work.words + row * EXPERTS + threadIdx.x * OWN);
    softmax(values, choice);
    give_candidates(values, choice);
    meet_threads(OPEN, CHOOSERS + 32);
    rank_all<Moved>(choice, work, given, row);
    meet();
    if (threadIdx.x >= 32) return;
    int place = min(static_cast<int>(threadIdx.x), TOP_K - 1);
    float weight = choice.weights[place];
    if (NORMALISED) weight = quotient(weight, sum_of_chosen(choice.experts[place], weight, choice));
    if (threadIdx.x < TOP_K) work.weights[row * (TOP_K + SHARED) + threadIdx.x] = weight;
}

#if ROWS > 1
#include "route_rows.cuh"  // multiply_rows<Moved>(work, given)
#endif

template <class Moved, class Given>
__device__ __forceinline__ void route(const Work& work, const Given& given) {
    int row = static_cast<int>(blockIdx.x) - PROGRAMS;
    if (row >= work.num_rows) return;
    if (row < 0) let_next_begin();
    if (row >= 0) return choose<Moved>(work, given, row);
#if ROWS > 1
    multiply_rows<Moved>(work, given);
#else
    multiply<Moved>(work, given);
#endif
}
