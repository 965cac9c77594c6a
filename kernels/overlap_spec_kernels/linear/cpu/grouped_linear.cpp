// y = x W^T on a CPU, for a W of 4- or 8-bit integers with a scale, and perhaps an offset, for each group of a row; or
// for a W in bfloat16, whose groups are whole rows, without a scale.
//
//     W[o, i] = scale[o, g] * q[o, i] + offset[o, g]        g = i / group
//     y[t, o] = sum over g of  scale[o, g] * (sum of x[t, i] q[o, i]) + offset[o, g] * (sum of x[t, i])
//
// 16 rows of W are the lanes of a vector, and a block of them is contiguous, so that W is read once, in order. Integers
// become floats in registers; sums are float32. The order of a row's sums does not depend on the other rows of x:
// a window of rows has the results of its rows one by one, to the bit.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
constexpr int MOST_ROWS = 8;  // of x, that a tile of W is multiplied by at once

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef int8_t Bytes __attribute__((vector_size(16)));

struct Part {             // rows of W in one format
    const void* values;   // [blocks, I, 16] i8 or bf16, or [blocks, I / 8, 16] i32 of 8 nibbles each
    const void* scales;   // [blocks, I / group, 16] f16 or f32; null: 1
    const void* offsets;  // like scales, or null
    int64_t blocks;       // a multiple of 4
    int64_t rows;         // of W; what is beyond them in the last blocks is zero
    int32_t bits;
    int32_t least;  // of 4 bits: what 0 means
    int32_t group;
    int32_t half;  // whether scales and offsets are f16
};

inline Floats load(const float* p) {
    Floats v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline Floats load_scale(const void* scales, int64_t at, bool half) {
#ifdef __F16C__
    if (half) {
        const __m128i* p = reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(scales) + at * LANES);
        __m256 both[2] = {_mm256_cvtph_ps(_mm_loadu_si128(p)), _mm256_cvtph_ps(_mm_loadu_si128(p + 1))};
        Floats v;
        std::memcpy(&v, both, sizeof v);
        return v;
    }
#endif
    return load(static_cast<const float*>(scales) + at * LANES);
}

inline Floats load_bytes(const int8_t* p) {
#ifdef __AVX512F__
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m256 both[2] = {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)),
                            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(low, 8)))};
    Floats v;
    std::memcpy(&v, both, sizeof v);
    return v;
#else
    Bytes bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
#endif
}

inline Floats load_bfloat16(const uint16_t* p) {
    Ints bits;
#ifdef __AVX512F__
    bits = (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))) << 16;
#else
    for (int i = 0; i < LANES; i++) bits[i] = int32_t(uint32_t(p[i]) << 16);
#endif
    Floats v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
}

inline Floats nibble(Ints packed, int which, Floats table) {
#ifdef __AVX512F__
    return (Floats)_mm512_permutexvar_ps((__m512i)(packed >> (4 * which)), (__m512)table);  // reads 4 bits of each
#else
    return __builtin_convertvector((packed >> (4 * which)) & 15, Floats) + table[0];
#endif
}

// R rows of x times NB blocks of W.
template <int R, int NB, int BITS>
inline void tile(const Part& w, const float* x, int64_t stride, int64_t columns, const float* sums, int64_t block,
                 Floats (&y)[R][NB]) {
    const int64_t groups = columns / w.group;
    Floats table;
    for (int i = 0; i < LANES; i++) table[i] = float(i + w.least);
    for (int r = 0; r < R; r++)
        for (int n = 0; n < NB; n++) y[r][n] = Floats{};
    for (int64_t g = 0; g < groups; g++) {
        Floats part[R][NB] = {};
        const float* of_group = x + g * w.group;
        if (BITS == 4) {
            for (int k = 0; k < w.group; k += 8) {
                Ints packed[NB];
                for (int n = 0; n < NB; n++) {
                    const int64_t at = ((block + n) * columns + g * w.group + k) / 8;
                    std::memcpy(&packed[n], static_cast<const int32_t*>(w.values) + at * LANES, sizeof(Ints));
                }
#pragma GCC unroll 8
                for (int j = 0; j < 8; j++)
                    for (int n = 0; n < NB; n++) {
                        const Floats q = nibble(packed[n], j, table);
                        for (int r = 0; r < R; r++) part[r][n] += q * of_group[r * stride + k + j];
                    }
            }
        } else {
#pragma GCC unroll 2
            for (int k = 0; k < w.group; k++)
                for (int n = 0; n < NB; n++) {
                    const int64_t at = (block + n) * columns + g * w.group + k;
                    const Floats q = BITS == 8 ? load_bytes(static_cast<const int8_t*>(w.values) + at * LANES)
                                               : load_bfloat16(static_cast<const uint16_t*>(w.values) + at * LANES);
                    for (int r = 0; r < R; r++) part[r][n] += q * of_group[r * stride + k];
                }
        }
        for (int n = 0; n < NB; n++) {
            if (BITS == 16) {
                for (int r = 0; r < R; r++) y[r][n] = part[r][n];
                continue;
            }
            const int64_t at = (block + n) * groups + g;
            const Floats scale = load_scale(w.scales, at, w.half);
            for (int r = 0; r < R; r++) y[r][n] += scale * part[r][n];
            if (w.offsets) {
                const Floats offset = load_scale(w.offsets, at, w.half);
                for (int r = 0; r < R; r++) y[r][n] += offset * sums[r * groups + g];
            }
        }
    }
}

inline Floats silu(Floats v) {  // v / (1 + exp(-v)), exp as 2^n times a polynomial
    Floats scaled = v * -1.44269504f;
    for (int i = 0; i < LANES; i++) scaled[i] = scaled[i] < -126.f ? -126.f : scaled[i] > 126.f ? 126.f : scaled[i];
    const Ints whole = __builtin_convertvector(scaled + 0.5f, Ints) - (scaled + 0.5f < 0.f ? 1 : 0);
    const Floats rest = (scaled - __builtin_convertvector(whole, Floats)) * 0.69314718f;
    Floats e = rest * 1.9875691e-4f + 1.3981999e-3f;
    e = e * rest + 8.3334519e-3f;
    e = e * rest + 4.1665795e-2f;
    e = e * rest + 1.6666665e-1f;
    e = e * rest + 0.5f;
    e = e * rest * rest + rest + 1.f;
    const Ints bits = (whole + 127) << 23;
    Floats power;
    std::memcpy(&power, &bits, sizeof power);
    return v / (1.f + e * power);
}

struct Call {
    const float* x;
    int64_t rows, stride, columns;
    float* out;
    int64_t out_stride;
};

inline void store(const Floats& v, float* out, int64_t count) {
    std::memcpy(out, &v, sizeof(float) * (count < LANES ? count : LANES));
}

template <int R, int BITS>
void rows_of_tile(const Part& w, const Call& c, int64_t row, const float* sums, int64_t block, int64_t up, int64_t first) {
    constexpr int NB = R > 4 ? 2 : 4;
    for (int half = 0; half < 4; half += NB) {
        Floats y[R][NB];
        tile<R, NB, BITS>(w, c.x + row * c.stride, c.stride, c.columns, sums, block + half, y);
        Floats second[R][NB];
        if (up) tile<R, NB, BITS>(w, c.x + row * c.stride, c.stride, c.columns, sums, block + up + half, second);
        const int64_t last = up ? up * LANES : w.rows;
        for (int r = 0; r < R; r++)
            for (int n = 0; n < NB; n++) {
                const int64_t column = (block + half + n) * LANES;
                if (column >= last) continue;
                const Floats v = up ? silu(y[r][n]) * second[r][n] : y[r][n];
                store(v, c.out + (row + r) * c.out_stride + first + column, last - column);
            }
    }
}

template <int BITS>
void item(const Part& w, const Call& c, const float* sums, int64_t block, int64_t up, int64_t first) {
    const int64_t groups = c.columns / w.group;
    for (int64_t row = 0; row < c.rows; row += MOST_ROWS) {
        const float* s = sums + row * groups;
        switch (c.rows - row) {
            case 1: rows_of_tile<1, BITS>(w, c, row, s, block, up, first); break;
            case 2: rows_of_tile<2, BITS>(w, c, row, s, block, up, first); break;
            case 3: rows_of_tile<3, BITS>(w, c, row, s, block, up, first); break;
            case 4: rows_of_tile<4, BITS>(w, c, row, s, block, up, first); break;
            case 5: rows_of_tile<5, BITS>(w, c, row, s, block, up, first); break;
            case 6: rows_of_tile<6, BITS>(w, c, row, s, block, up, first); break;
            case 7: rows_of_tile<7, BITS>(w, c, row, s, block, up, first); break;
            default: rows_of_tile<8, BITS>(w, c, row, s, block, up, first); break;
        }
    }
}

}  // namespace

extern "C" {

int reads_half() {
#ifdef __F16C__
    return 1;
#else
    return 0;
#endif
}

// One linear. gated: the one part's rows are gate's, then as many of up's, and the result is silu(gate) * up.
void grouped_linear(const Part* parts, int64_t num_parts, const float* x, int64_t rows, int64_t stride,
                                 int64_t columns, float* out, int64_t out_stride, int32_t gated, int32_t threads) {
    const Call call{x, rows, stride, columns, out, out_stride};
    int64_t first_column = 0;
    for (int64_t p = 0; p < num_parts; p++) {
        const Part& w = parts[p];
        const int64_t groups = columns / w.group, up = gated ? w.blocks / 2 : 0;
        const int64_t items = (gated ? up : w.blocks) / 4;
        std::vector<float> sums(w.offsets ? rows * groups : 0);
#pragma omp parallel num_threads(threads)
        {
            if (w.offsets) {
#pragma omp for schedule(static)
                for (int64_t at = 0; at < rows * groups; at++) {
                    const float* from = x + at / groups * stride + at % groups * w.group;
                    float sum = 0;
                    for (int i = 0; i < w.group; i++) sum += from[i];
                    sums[at] = sum;
                }
            }
#pragma omp for schedule(static)
            for (int64_t i = 0; i < items; i++) {
                if (w.bits == 4)
                    item<4>(w, call, sums.data(), 4 * i, up, first_column);
                else if (w.bits == 16)
                    item<16>(w, call, sums.data(), 4 * i, up, first_column);
                else
                    item<8>(w, call, sums.data(), 4 * i, up, first_column);
            }
        }
        first_column += w.rows;
    }
}
}
