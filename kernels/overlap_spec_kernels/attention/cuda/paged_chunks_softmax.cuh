// The online softmax of paged_chunks.cu, in registers.
//
// Weights are relative to a score of the pair, its reference: the highest one of the first tile. It is kept until weights
// of a tile that a thread has sum up to more than MOST; then the pair takes the highest score of this tile instead. Its
// scores are multiplied again for that, since weights are in their place. So most tiles need neither their highest score
// nor a scaling of the sums (FlashAttention-4 saves the scaling alone). What a pair takes follows from its own scores,
// whatever pairs are beside it.
//
// Thread t of a warpgroup has pairs t / 32 * 16 + t % 32 / 4 and 8 below. Of a tile it has keys, and of the sums
// columns, 8 j + t % 4 * 2 and the next: scores[4 j], scores[4 j + 1] and, of the pair below, scores[4 j + 2],
// scores[4 j + 3]. Four threads share a pair. Weights of 16 keys, rounded, are what a product takes from registers.
#pragma once

struct Softmax {
    int row[2], head[2], position[2];  // of the thread's two pairs; position -1 where there is none
    int seen;                          // tiles that every pair of the warpgroup sees whole
    int first_key;                     // of this thread
    float scale, reference[2], total[2], factor[2], added[2];

    __device__ __forceinline__ Softmax(const Work& work, const Part& part, int group) {
        int thread = threadIdx.x % 128, first = group * PAIRS;
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            int pair = first + thread / 32 * 16 + thread % 32 / 4 + 8 * below;
            row[below] = part.row_of(pair);
            head[below] = part.head_of(pair);
            position[below] = row[below] < part.end_row ? static_cast<int>(work.positions[row[below]]) : -1;
            reference[below] = LOWEST;
            total[below] = 0.0f;
        }
        int lowest = part.row_of(first) < part.end_row ? static_cast<int>(work.positions[part.row_of(first)]) : -1;
        seen = (lowest + 1 - part.first_key) / KEYS;
        first_key = part.first_key + thread % 4 * 2;
        scale = work.scale_log2;
    }

    // Scores become weights, whose sum of this tile is `added`.
    __device__ __forceinline__ void take(float (&scores)[SCORES], int tile) {
        if (tile >= seen) hide(scores, first_key + tile * KEYS);
        exponentiate(scores);
    }

    // Whether a pair needs another reference; with a NaN, too.
    __device__ __forceinline__ bool exceeds(int below) const { return !(added[below] <= MOST); }
    __device__ __forceinline__ bool exceeds() const { return exceeds(0) || exceeds(1); }

    // The same with another reference, of the pairs that need one, or of all. `factor` is for what was weighed before.
    template <bool ALL>
    __device__ __forceinline__ void take_anew(float (&scores)[SCORES], int tile) {
        if (tile >= seen) hide(scores, first_key + tile * KEYS);
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            float top = reference[below];
#pragma unroll
            for (int j = 2 * below; j < SCORES; j += 4) top = fmaxf(top, fmaxf(scores[j], scores[j + 1]));
#pragma unroll
            for (int step = 1; step < 4; step *= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, step));
            if (!ALL) {
                u32 of_pair = __ballot_sync(ALL_LANES, exceeds(below)) >> (threadIdx.x % 32 & ~3) & 15;
                if (!of_pair) top = reference[below];
            }
            factor[below] = exp2_of((reference[below] - top) * scale);
            reference[below] = top;
            total[below] *= factor[below];
        }
        exponentiate(scores);
    }

    __device__ __forceinline__ void exponentiate(float (&scores)[SCORES]) {
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            float shift = reference[below] * scale, sum = 0.0f;
#pragma unroll
            for (int j = 0; j < SCORES / 4; ++j) {
#pragma unroll
                for (int i = 4 * j + 2 * below; i < 4 * j + 2 * below + 2; ++i) {
                    scores[i] = exp2_of(__fmaf_rn(scores[i], scale, -shift));
                    sum += scores[i];
                }
            }
            added[below] = sum;
        }
    }

    __device__ __forceinline__ void hide(float (&scores)[SCORES], int key) const {
#pragma unroll
        for (int i = 0; i < SCORES; ++i)
            if (key + i / 4 * 8 + i % 2 > position[i / 2 % 2]) scores[i] = -__int_as_float(0x7f800000);
    }

    // Weights as products take them.
    __device__ __forceinline__ void weigh(u32 (&weights)[SCORES / 2], const float (&scores)[SCORES]) {
        for (int below = 0; below < 2; ++below) total[below] += added[below];
#pragma unroll
        for (int i = 0; i < SCORES / 2; ++i) weights[i] = round2(scores[2 * i], scores[2 * i + 1]);
    }

    __device__ __forceinline__ void rescale(float (&sums)[SUMS]) const {
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

    // What weights are relative to, and their sum; a split without keys has weight 0 and writes no sums.
    __device__ __forceinline__ void note(const Work& work, const Part& part) const {
        if (!work.stats) return;
        for (int below = 0; below < 2; ++below)
            if (threadIdx.x % 4 == 0 && row[below] < part.end_row)
                *reinterpret_cast<float2*>(work.stats + place(work, part, below) * 2) =
                    part.divided ? make_float2(reference[below] * scale, total[below]) : make_float2(0.0f, WHOLE);
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
