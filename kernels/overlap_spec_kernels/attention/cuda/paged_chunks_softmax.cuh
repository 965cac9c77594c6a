// The online softmax of paged_chunks.cu, in registers.
//
// Thread t of a warpgroup has pairs t / 32 * 16 + t % 32 / 4 and 8 below. Of a tile it has keys, and of the sums
// columns, 8 j + t % 4 * 2 and the next: scores[4 j], scores[4 j + 1] and, of the pair below, scores[4 j + 2],
// scores[4 j + 3]. Four threads share a pair. Weights of 16 keys, rounded, are what a product takes from registers.
#pragma once

struct Softmax {
    int row[2], head[2], position[2];  // of the thread's two pairs; position -1 where there is none
    int seen;                          // tiles that every pair of the warpgroup sees whole
    int first_key;                     // of this thread
    float scale, highest[2], total[2], factor[2];

    __device__ __forceinline__ Softmax(const Work& work, const Part& part, int group) {
        int thread = threadIdx.x % 128, first = group * PAIRS;
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            int pair = first + thread / 32 * 16 + thread % 32 / 4 + 8 * below;
            row[below] = part.row_of(pair);
            head[below] = part.head_of(pair);
            position[below] = row[below] < part.end_row ? static_cast<int>(work.positions[row[below]]) : -1;
            highest[below] = LOWEST;
            total[below] = 0.0f;
        }
        int lowest = part.row_of(first) < part.end_row ? static_cast<int>(work.positions[part.row_of(first)]) : -1;
        seen = (lowest + 1 - part.first_key) / KEYS;
        first_key = part.first_key + thread % 4 * 2;
        scale = work.scale_log2;
    }

    // Scores become weights, relative to the highest score so far; `factor` is for what was weighed before.
    __device__ __forceinline__ void take(float (&scores)[SCORES], int tile) {
        if (tile >= seen) hide(scores, first_key + tile * KEYS);
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            float top = highest[below];
#pragma unroll
            for (int j = 2 * below; j < SCORES; j += 4) top = fmaxf(top, fmaxf(scores[j], scores[j + 1]));
#pragma unroll
            for (int step = 1; step < 4; step *= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
            factor[below] = exp2_of((highest[below] - top) * scale);
            highest[below] = top;
            float shift = top * scale, sum = 0.0f;
#pragma unroll
            for (int j = 0; j < SCORES / 4; ++j) {
#pragma unroll
                for (int i = 4 * j + 2 * below; i < 4 * j + 2 * below + 2; ++i) {
                    scores[i] = exp2_of(__fmaf_rn(scores[i], scale, -shift));
                    sum += scores[i];
                }
            }
            total[below] = total[below] * factor[below] + sum;
        }
    }

    // Always true, of NaN too. The assembler puts a wait for products as early as it can, and exponentials that are to
    // run beside these products behind it. It keeps both in order around an arrival that depends on all weights.
    __device__ __forceinline__ bool has_weighed() const { return !(total[0] + total[1] < 0.0f); }

    __device__ __forceinline__ void hide(float (&scores)[SCORES], int key) const {
#pragma unroll
        for (int i = 0; i < SCORES; ++i)
            if (key + i / 4 * 8 + i % 2 > position[i / 2 % 2]) scores[i] = -__int_as_float(0x7f800000);
    }

    __device__ __forceinline__ void weigh(u32 (&weights)[SCORES / 2], const float (&scores)[SCORES]) const {
#pragma unroll
        for (int i = 0; i < SCORES / 2; ++i) weights[i] = round2(scores[2 * i], scores[2 * i + 1]);
    }

    // In most tiles of many, no pair of a warp has a higher score than before.
    __device__ __forceinline__ void rescale(float (&sums)[SUMS]) const {
        if (!__any_sync(ALL_LANES, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[i] *= factor[i / 2 % 2];
    }

    // Where the results of a pair lie, counted in vectors of HEAD_DIM.
    __device__ __forceinline__ long long place(int below) const {
        return static_cast<long long>(row[below]) * (KV_HEADS * GROUP) + head[below];
    }
    __device__ __forceinline__ long long place(const Work& work, const Part& part, int below) const {
        return place(below) * work.num_splits + part.split;
    }

    // The highest score and the sum of weights; a split without keys has weight 0 and writes no sums.
    __device__ __forceinline__ void note(const Work& work, const Part& part) const {
        if (!work.stats) return;
        for (int below = 0; below < 2; ++below)
            if (threadIdx.x % 4 == 0 && row[below] < part.end_row)
                *reinterpret_cast<float2*>(work.stats + place(work, part, below) * 2) =
                    part.divided ? make_float2(highest[below] * scale, total[below]) : make_float2(0.0f, WHOLE);
    }

    __device__ __forceinline__ void finish(float (&sums)[SUMS], const Work& work, const Part& part) {
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
            total[0] += __shfl_xor_sync(ALL_LANES, total[0], step);
            total[1] += __shfl_xor_sync(ALL_LANES, total[1], step);
        }
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            if (row[below] >= part.end_row) continue;
            float* wide = work.sums + place(work, part, below) * HEAD_DIM + threadIdx.x % 4 * 2;
            u16* narrow = work.out + place(below) * HEAD_DIM + threadIdx.x % 4 * 2;
            float inverse = 1.0f / total[below];
#pragma unroll
            for (int j = 0; j < SUMS / 4; ++j) {
                float low = sums[4 * j + 2 * below], high = sums[4 * j + 2 * below + 1];
                if (part.divided)
                    *reinterpret_cast<float2*>(wide + 8 * j) = make_float2(low, high);
                else
                    *reinterpret_cast<u32*>(narrow + 8 * j) = round2(low * inverse, high * inverse);
            }
        }
        note(work, part);
    }
};
