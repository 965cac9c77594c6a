// The new rows of short_decode.cu: q is rotated into shared memory, k too and into the cache, v goes to both.
#pragma once

struct Angles {
    float4 cos[2], sin[2];
};

__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xffff0000); }

__device__ __forceinline__ void rotate2(u32& low, u32& high, float cos0, float cos1, float sin0, float sin1) {
    float a0 = low_of(low), a1 = high_of(low), b0 = low_of(high), b1 = high_of(high);
    low = round2(fmaf(a0, cos0, -b0 * sin0), fmaf(a1, cos1, -b1 * sin1));
    high = round2(fmaf(b0, cos0, a0 * sin0), fmaf(b1, cos1, a1 * sin1));
}

// A piece of a head's first half, and the piece of its second half that it is rotated with.
__device__ __forceinline__ void rotate(uint4& low, uint4& high, const Angles& angles) {
    rotate2(low.x, high.x, angles.cos[0].x, angles.cos[0].y, angles.sin[0].x, angles.sin[0].y);
    rotate2(low.y, high.y, angles.cos[0].z, angles.cos[0].w, angles.sin[0].z, angles.sin[0].w);
    rotate2(low.z, high.z, angles.cos[1].x, angles.cos[1].y, angles.sin[1].x, angles.sin[1].y);
    rotate2(low.w, high.w, angles.cos[1].z, angles.cos[1].w, angles.sin[1].z, angles.sin[1].w);
}

// NORMED: 0, or the bits of a weight of the norms that heads of q and k get before they are rotated.
struct HeadNorm {
    float low[8], high[8];

    __device__ __forceinline__ static void take(float (&to)[8], const void* weight, int first) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            to[i] = NORMED == 32 ? static_cast<const float*>(weight)[first + i]
                                 : low_of(static_cast<const u16*>(weight)[first + i]);
    }

    __device__ __forceinline__ void ask(const void* weight, int piece) {
        if constexpr (NORMED == 0) return;
        take(low, weight, piece * 8);
        take(high, weight, piece * 8 + HEAD / 2);
    }

    __device__ __forceinline__ static float squares(const uint4& piece) {
        u32 pairs[4] = {piece.x, piece.y, piece.z, piece.w};
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            sum = fmaf(low_of(pairs[i]), low_of(pairs[i]), fmaf(high_of(pairs[i]), high_of(pairs[i]), sum));
        return sum;
    }

    __device__ __forceinline__ static void scale_piece(uint4& piece, float scale, const float (&weight)[8]) {
        u32* pairs[4] = {&piece.x, &piece.y, &piece.z, &piece.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            *pairs[i] = round2(low_of(*pairs[i]) * scale * weight[2 * i], high_of(*pairs[i]) * scale * weight[2 * i + 1]);
    }

    // By as many neighbouring lanes as a head has pairs of pieces.
    __device__ __forceinline__ void apply(uint4& low_piece, uint4& high_piece, float eps) const {
        if constexpr (NORMED == 0) return;
        float sum = squares(low_piece) + squares(high_piece);
#pragma unroll
        for (int step = PIECES / 4; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
        float scale = 1.0f / sqrtf(sum / HEAD + eps);
        scale_piece(low_piece, scale, low);
        scale_piece(high_piece, scale, high);
    }
};

__device__ __forceinline__ uint4 load_if(const u16* from, bool live) {
    return live ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
}

// Of qkv.
__device__ __forceinline__ const u16* head_of(const Work& work, const Part& part, int row, int head) {
    return work.qkv + static_cast<long long>(part.request * WIDTH + row) * work.qkv_stride + head * HEAD;
}

constexpr int HALF_PIECES = PIECES / 2;
constexpr int PAIRED_PIECES = 16 * HALF_PIECES;  // of a matrix of 16 rows
constexpr int ROUNDS = (PAIRED_PIECES + THREADS - 1) / THREADS;

// Rows of q, or of k. All that a thread reads is asked for before any of it is used; angles before the rows are there.
template <int HEADS>
struct Rotated {
    Angles angles[ROUNDS];
    HeadNorm norm;
    uint4 low[ROUNDS], high[ROUNDS];

    __device__ __forceinline__ static int pair(int round) { return (threadIdx.x + round * THREADS) / HALF_PIECES; }
    __device__ __forceinline__ static int piece(int round) { return (threadIdx.x + round * THREADS) % HALF_PIECES; }
    __device__ __forceinline__ static bool live(int round) { return pair(round) < WIDTH * HEADS; }

    // And the weight of the norm of these heads.
    __device__ __forceinline__ void ask_angles(const Work& work, const Part& part, const void* weight) {
        norm.ask(weight, piece(0));
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            long long position = live(i) ? part.position(work, pair(i) / HEADS) : 0;
            const float4* from = reinterpret_cast<const float4*>(work.cos_sin + position * HEAD) + piece(i) * 2;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                angles[i].cos[j] = live(i) ? from[j] : make_float4(0, 0, 0, 0);
                angles[i].sin[j] = live(i) ? from[HEAD / 8 + j] : make_float4(0, 0, 0, 0);
            }
        }
    }

    // `first`: of qkv's heads.
    __device__ __forceinline__ void ask(const Work& work, const Part& part, int first) {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            const u16* from = head_of(work, part, pair(i) / HEADS, first + pair(i) % HEADS) + piece(i) * 8;
            low[i] = load_if(from, live(i));
            high[i] = load_if(from + HEAD / 2, live(i));
        }
    }

    __device__ __forceinline__ void place(char* matrix, const Work& work) {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            if (pair(i) >= 16) break;  // whole warps
            norm.apply(low[i], high[i], work.eps);
            rotate(low[i], high[i], angles[i]);
            *reinterpret_cast<uint4*>(matrix + place_of(pair(i), piece(i))) = low[i];
            *reinterpret_cast<uint4*>(matrix + place_of(pair(i), piece(i) + HALF_PIECES)) = high[i];
        }
    }
};

constexpr int V_ROUNDS = (KEYS * PIECES + THREADS - 1) / THREADS;

// k and v, and where the cache has them.
struct NewRows {
    Rotated<1> k;
    uint4 v[V_ROUNDS];
    int k_pages[ROUNDS], v_pages[V_ROUNDS];

    __device__ __forceinline__ static int v_row(int round) { return (threadIdx.x + round * THREADS) / PIECES; }
    __device__ __forceinline__ static int v_piece(int round) { return (threadIdx.x + round * THREADS) % PIECES; }

    __device__ __forceinline__ void ask_places(const Work& work, const Part& part) {
        const int* table = work.page_table + part.request * work.table_stride;
        k.ask_angles(work, part, work.k_norm);
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) k_pages[i] = k.live(i) ? table[(part.cached + k.pair(i)) / PAGE_SIZE] : 0;
#pragma unroll
        for (int i = 0; i < V_ROUNDS; ++i) v_pages[i] = v_row(i) < WIDTH ? table[(part.cached + v_row(i)) / PAGE_SIZE] : 0;
    }

    __device__ __forceinline__ void ask(const Work& work, const Part& part) {
        constexpr int Q_HEADS = KV_HEADS * GROUP;
        k.ask(work, part, Q_HEADS + part.kv_head);
#pragma unroll
        for (int i = 0; i < V_ROUNDS; ++i) {
            const u16* from = head_of(work, part, v_row(i), Q_HEADS + KV_HEADS + part.kv_head) + v_piece(i) * 8;
            v[i] = load_if(from, v_row(i) < WIDTH);
        }
    }

    // `matrices`: K, then V.
    __device__ __forceinline__ void place(char* matrices, const Work& work, const Part& part) {
        k.place(matrices, work);
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) {
            if (!k.live(i)) continue;
            u16* to = work.k_cache + cache_place(part, k_pages[i], k.pair(i)) + k.piece(i) * 8;
            *reinterpret_cast<uint4*>(to) = k.low[i];
            *reinterpret_cast<uint4*>(to + HEAD / 2) = k.high[i];
        }
#pragma unroll
        for (int i = 0; i < V_ROUNDS; ++i) {
            if (v_row(i) >= KEYS) break;
            *reinterpret_cast<uint4*>(matrices + MATRIX + place_of(v_row(i), v_piece(i))) = v[i];
            u16* to = work.v_cache + cache_place(part, v_pages[i], v_row(i)) + v_piece(i) * 8;
            if (v_row(i) < WIDTH) *reinterpret_cast<uint4*>(to) = v[i];
        }
    }

    __device__ __forceinline__ static long long cache_place(const Part& part, int page, int row) {
        long long place = static_cast<long long>(page) * PAGE_SIZE + (part.cached + row) % PAGE_SIZE;
        return (place * KV_HEADS + part.kv_head) * HEAD;
    }
};
