// What packed_products.cu reads of a stage: values of W as operands, scales and zero points of groups of columns.
#pragma once

enum ScaleType { ROW_FLOAT32, FLOAT32, BFLOAT16, FLOAT16, BLOCK_FLOAT32 };  // as in packed_stream.cu
constexpr int SCALE_BYTES[] = {0, 64, 32, 32, 16};                          // of a group and a row of tiles
constexpr int SCALE_SIZES[] = {4, 4, 2, 2, 4};                             // of one scale

// What belongs to rows g and g + 8 of a tile.
struct Pair {
    float upper, lower;
};

// 128 plus the zero points of rows g and g + 8, each twice in bfloat16; those of a symmetric weight are 8.
struct Zeros {
    u32 upper, lower;

    __device__ __forceinline__ Zeros() : upper(0x43084308), lower(0x43084308) {}
    __device__ __forceinline__ explicit Zeros(u32 both)
        : upper(__byte_perm(both, 0, 0x1010)), lower(__byte_perm(both, 0, 0x3232)) {}
};

// A scale that sums can be divided by. One that is smaller belongs to values that are zero, or to rows past W's end.
__device__ __forceinline__ float divisor(float scale) {
    constexpr float LEAST = 5.4210109e-20f;  // 2 to the power of -64
    return fabsf(scale) < LEAST ? LEAST : scale;
}

// The scales of a group and a row of tiles, which are at `entry`, for rows g and g + 8.
__device__ __forceinline__ Pair pair_of_scales(const char* entry, int g) {
    float2 both;
    if constexpr (SCALE == BLOCK_FLOAT32) {
        both.x = both.y = *reinterpret_cast<const float*>(entry);
    } else if constexpr (SCALE == FLOAT32) {
        both = reinterpret_cast<const float2*>(entry)[g];
    } else {
        u32 pair = reinterpret_cast<const u32*>(entry)[g];
        float2 of_halves = {widen_float16(pair & 0xffff), widen_float16(pair >> 16)};
        both = SCALE == BFLOAT16 ? widen_bfloat16(pair) : of_halves;
    }
    return {divisor(both.x), divisor(both.y)};
}

// Slices `first`.. of a tile, of which `at` is this lane's piece.
template <int COUNT>
__device__ __forceinline__ void convert(u32 (&w)[COUNT][4], const char* at, int first, const Zeros& zeros) {
    if constexpr (BITS == 8) {
#pragma unroll
        for (int slice = 0; slice < COUNT; slice += 2) {
            uint4 words = *reinterpret_cast<const uint4*>(at + (first + slice) / 2 * 512);
            unpack_8_bits(w[slice], words.x, words.y);
            unpack_8_bits(w[slice + 1], words.z, words.w);
        }
    } else if constexpr (COUNT == 4) {
        uint4 words = *reinterpret_cast<const uint4*>(at);
        unpack_4_bits(w[0], words.x, zeros.upper, zeros.lower);
        unpack_4_bits(w[1], words.y, zeros.upper, zeros.lower);
        unpack_4_bits(w[2], words.z, zeros.upper, zeros.lower);
        unpack_4_bits(w[3], words.w, zeros.upper, zeros.lower);
    } else {
        uint2 words = *reinterpret_cast<const uint2*>(at + first * 4);
        unpack_4_bits(w[0], words.x, zeros.upper, zeros.lower);
        unpack_4_bits(w[1], words.y, zeros.upper, zeros.lower);
    }
}
