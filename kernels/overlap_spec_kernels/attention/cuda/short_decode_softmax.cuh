// A warp of short_decode.cu attends to 16 keys at a time: products of 16 x 16 x 8, and an online softmax in registers.
#pragma once

struct Sums {
    float acc[PIECES][4] = {};
    float highest[2] = {LOWEST, LOWEST}, total[2] = {};  // of two pairs; each lane's share of the total
};

using Queries = u32[HEAD / 16][4];

__device__ __forceinline__ void load_queries(Queries& q, u32 from) {
    int lane = threadIdx.x % 32, row = lane % 16;
#pragma unroll
    for (int k = 0; k < HEAD / 16; ++k)
        load_matrices(from + place_of(row, 2 * k + lane / 16), q[k][0], q[k][1], q[k][2], q[k][3]);
}

// Four 8 x 8 matrices, each of them transposed.
__device__ __forceinline__ void load_turned(u32 address, u32& a, u32& b, u32& c, u32& d) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(address)
                 : "memory");
}

// log2 of the weights of 16 keys, by eights; -inf where not seen(pair, key).
template <class Seen>
__device__ __forceinline__ void score(float (&scores)[2][4], const Queries& q, u32 keys, float scale_log2, Seen seen) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float parts[2][2][4] = {};  // two sums for each eight keys: products that do not wait for each other
#pragma unroll
    for (int k = 0; k < HEAD / 16; ++k) {
        u32 b[2][2];
        int key = lane % 8 + lane / 16 * 8, piece = 2 * k + lane / 8 % 2;
        load_matrices(keys + place_of(key, piece), b[0][0], b[0][1], b[1][0], b[1][1]);
        multiply16(parts[0][k % 2], q[k], b[0]);
        multiply16(parts[1][k % 2], q[k], b[1]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        int tile = i / 4, j = i % 4;
        float sum = (parts[tile][0][j] + parts[tile][1][j]) * scale_log2;
        scores[tile][j] = seen(g + j / 2 * 8, tile * 8 + 2 * t + j % 2) ? sum : __int_as_float(0xff800000);
    }
}

// `stage`: 16 keys, then their values.
template <class Seen>
__device__ __forceinline__ void attend(Sums& sums, const Queries& q, u32 stage, float scale_log2, Seen seen) {
    int lane = threadIdx.x % 32;
    float scores[2][4], highest[2] = {sums.highest[0], sums.highest[1]}, rescale[2];
    score(scores, q, stage, scale_log2, seen);
#pragma unroll
    for (int i = 0; i < 8; ++i) highest[i % 4 / 2] = fmaxf(highest[i % 4 / 2], scores[i / 4][i % 4]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        highest[i] = fmaxf(highest[i], __shfl_xor_sync(ALL_LANES, highest[i], 1));
        highest[i] = fmaxf(highest[i], __shfl_xor_sync(ALL_LANES, highest[i], 2));
        rescale[i] = exp2_of(sums.highest[i] - highest[i]);
        sums.highest[i] = highest[i];
        sums.total[i] *= rescale[i];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float& weight = scores[i / 4][i % 4];
        weight = exp2_of(weight - highest[i % 4 / 2]);
        sums.total[i % 4 / 2] += weight;
    }
    u32 p[4] = {round2(scores[0][0], scores[0][1]), round2(scores[0][2], scores[0][3]),
                round2(scores[1][0], scores[1][1]), round2(scores[1][2], scores[1][3])};
#pragma unroll
    for (int n = 0; n < PIECES; n += 2) {
        u32 b[2][2];
        load_turned(stage + MATRIX + place_of(lane % 16, n + lane / 16), b[0][0], b[0][1], b[1][0], b[1][1]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) sums.acc[n + i][j] *= rescale[j / 2];
            multiply16(sums.acc[n + i], p, b[i]);
        }
    }
}
