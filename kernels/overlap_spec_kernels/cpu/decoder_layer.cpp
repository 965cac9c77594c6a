// The parts of a decoder layer on a CPU, in float32, for weights in few bits. Whatever is summed up is summed in an
// order that does not depend on other rows: a window has the results of its rows one by one, to the bit.
//
// A linear: y = x W^T, for a W of 4- or 8-bit integers with a scale, and perhaps an offset, for each group of a row; or
// for a W in bfloat16, whose groups are whole rows, without a scale.
//
//     W[o, i] = scale[o, g] * q[o, i] + offset[o, g]        g = i / group
//     y[t, o] = sum over g of  scale[o, g] * (sum of x[t, i] q[o, i]) + offset[o, g] * (sum of x[t, i])
//
// 16 rows of W are the lanes of a vector, and a block of them is contiguous, so that W is read once, in order. Integers
// become floats in registers.

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

inline Floats exponential(Floats v) {  // 2^n times a polynomial; what is beyond the range of floats is its end
    Floats scaled = v * 1.44269504f;
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
    return e * power;
}

inline Floats silu(Floats v) { return v / (1.f + exponential(-v)); }

inline float total(Floats v) {  // in one order
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
}

struct Call {
    const float* x;
    int64_t rows, stride, columns;
    float* out;
    int64_t out_stride;
    const float* residual;  // added to the result, or null
    int64_t residual_stride;
};

inline void store(const Floats& v, float* out, int64_t count) {
    std::memcpy(out, &v, sizeof(float) * (count < LANES ? count : LANES));
}

template <int R, int BITS>
void rows_of_tile(const Part& w, const Call& c, int64_t row, const float* sums, int64_t block, int64_t up,
                  int64_t first) {
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
                const int64_t count = last - column < LANES ? last - column : LANES;
                float* to = c.out + (row + r) * c.out_stride + first + column;
                store(v, to, count);
                if (!c.residual) continue;
                const float* added = c.residual + (row + r) * c.residual_stride + first + column;
                for (int64_t i = 0; i < count; i++) to[i] += added[i];
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

inline void normalise(const float* row, const float* weight, int64_t size, float eps, float* to) {
    Floats squares = {};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) squares += load(row + i) * load(row + i);
    for (; i < size; i++) rest += row[i] * row[i];
    const float scale = 1.f / std::sqrt((total(squares) + rest) / float(size) + eps);
    for (i = 0; i < size; i++) to[i] = row[i] * scale * weight[i];
}

// (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), for pairs that are half a head apart.
inline void rotate(const float* head, const float* cos_sin, int64_t d, float* to) {
    const int64_t half = d / 2;
    for (int64_t i = 0; i < half; i++) {
        const float first = head[i], second = head[half + i], cos = cos_sin[i], sin = cos_sin[half + i];
        to[i] = first * cos - second * sin;
        to[half + i] = second * cos + first * sin;
    }
}

struct Keys {  // where the keys of one head of a request are
    const int32_t* pages;
    int64_t page_size, stride, first;
    int64_t at(int64_t key) const {
        return (pages[key / page_size] * page_size + key % page_size) * stride + first;
    }
};

constexpr int MOST_PARTS = 16;  // of a head, of 16 values each

// One query over the keys first..last of its request. Every query has the same order of sums.
inline void attend(const float* query, const Keys& keys, const float* k_cache, const float* v_cache, int64_t first,
                   int64_t last, int64_t d, float scale, float* weights, float* out) {
    const int64_t parts = d / LANES, count = last - first + 1;
    float highest = -INFINITY;
    for (int64_t j = 0; j < count; j++) {
        const float* k = k_cache + keys.at(first + j);
        Floats sum = {};
        for (int64_t n = 0; n < parts; n++) sum += load(query + n * LANES) * load(k + n * LANES);
        weights[j] = total(sum) * scale;
        highest = weights[j] > highest ? weights[j] : highest;
    }
    Floats sums = {};
    for (int64_t j = 0; j < count; j += LANES) {
        Floats weight = load(weights + j) - highest;
        for (int i = 0; i < LANES; i++) weight[i] = j + i < count ? weight[i] : -INFINITY;
        weight = exponential(weight);
        for (int i = 0; i < LANES; i++) weight[i] = j + i < count ? weight[i] : 0.f;
        sums += weight;
        std::memcpy(weights + j, &weight, sizeof weight);
    }
    Floats mixed[MOST_PARTS] = {};
    for (int64_t j = 0; j < count; j++) {
        const float* v = v_cache + keys.at(first + j);
        for (int64_t n = 0; n < parts; n++) mixed[n] += load(v + n * LANES) * weights[j];
    }
    const float whole = total(sums);
    for (int64_t n = 0; n < parts; n++) {
        const Floats v = mixed[n] / whole;
        std::memcpy(out + n * LANES, &v, sizeof v);
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

// One linear, added to a residual if there is one. gated: the one part's rows are gate's, then as many of up's, and the
// result is silu(gate) * up. normed: if not null, the rows of the result are then normalised into it.
void grouped_linear(const Part* parts, int64_t num_parts, const float* x, int64_t rows, int64_t stride, int64_t columns,
                    float* out, int64_t out_stride, int32_t gated, int32_t threads, const float* residual,
                    int64_t residual_stride, const float* norm, float eps, float* normed) {
    const Call call{x, rows, stride, columns, out, out_stride, residual, residual_stride};
    std::vector<float> sums(rows * columns / 16 * num_parts);
#pragma omp parallel num_threads(threads)
    {
        int64_t first_column = 0;
        for (int64_t p = 0; p < num_parts; p++) {
            const Part& w = parts[p];
            const int64_t groups = columns / w.group, up = gated ? w.blocks / 2 : 0;
            const int64_t items = (gated ? up : w.blocks) / 4;
            float* of_part = sums.data() + p * (rows * columns / 16);
            if (w.offsets) {
#pragma omp for schedule(static)
                for (int64_t at = 0; at < rows * groups; at++) {
                    const float* from = x + at / groups * stride + at % groups * w.group;
                    Floats sum = load(from);
                    if (w.group == 32) sum += load(from + LANES);
                    of_part[at] = total(sum);
                }
            }
#pragma omp for schedule(static) nowait
            for (int64_t i = 0; i < items; i++) {
                if (w.bits == 4)
                    item<4>(w, call, of_part, 4 * i, up, first_column);
                else if (w.bits == 16)
                    item<16>(w, call, of_part, 4 * i, up, first_column);
                else
                    item<8>(w, call, of_part, 4 * i, up, first_column);
            }
            first_column += w.rows;
        }
        if (normed) {
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t r = 0; r < rows; r++)
                normalise(out + r * out_stride, norm, out_stride, eps, normed + r * out_stride);
        }
    }
}

// Self-attention of rows over a paged cache of K and V: rotate queries and keys, write K and V of all rows, then let
// the row at position p attend to the keys 0..p of its request, or to the last of them.
struct Attention {
    const float* qkv;  // [T, (n + 2 nkv) d]
    const float* cos_sin;  // [positions, d]
    const int64_t* positions;  // [T]
    const int64_t* cache_rows;  // [T]
    const int32_t* row_starts;  // [B + 1]
    const int32_t* pages;  // [B, page_stride]
    float* k_cache;  // [cache rows, nkv, d]
    float* v_cache;
    float* queries;  // [T, n, d], scratch
    float* out;  // [T, n d]
    int64_t num_rows, num_requests, page_stride, page_size, num_heads, num_kv_heads, head_dim;
    int64_t window;  // keys that a row sees, its own included; 0: all
    float scale;
    int32_t threads;
};

void paged_rows_attention(const Attention* call) {
    const Attention& a = *call;
    const int64_t d = a.head_dim, width = (a.num_heads + 2 * a.num_kv_heads) * d, kv = a.num_kv_heads * d;
    std::vector<int64_t> request_of(a.num_rows);
    for (int64_t b = 0; b < a.num_requests; b++)
        for (int64_t r = a.row_starts[b]; r < a.row_starts[b + 1]; r++) request_of[r] = b;
    int64_t longest = 0;
    for (int64_t r = 0; r < a.num_rows; r++) longest = a.positions[r] > longest ? a.positions[r] : longest;
    const int64_t share = a.num_heads / a.num_kv_heads;
#pragma omp parallel num_threads(a.threads)
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < a.num_rows; r++) {
            const float *row = a.qkv + r * width, *angles = a.cos_sin + a.positions[r] * d;
            float* queries = a.queries + r * a.num_heads * d;
            for (int64_t h = 0; h < a.num_heads; h++) rotate(row + h * d, angles, d, queries + h * d);
            float* k = a.k_cache + a.cache_rows[r] * kv;
            for (int64_t h = 0; h < a.num_kv_heads; h++) rotate(row + (a.num_heads + h) * d, angles, d, k + h * d);
            std::memcpy(a.v_cache + a.cache_rows[r] * kv, row + (a.num_heads + a.num_kv_heads) * d, kv * sizeof(float));
        }
        std::vector<float> weights(longest + 1 + LANES);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < a.num_rows * a.num_kv_heads; i++) {
            const int64_t r = i / a.num_kv_heads, head = i % a.num_kv_heads, last = a.positions[r];
            const int64_t first = a.window && last - a.window + 1 > 0 ? last - a.window + 1 : 0;
            const Keys keys{a.pages + request_of[r] * a.page_stride, a.page_size, kv, head * d};
            for (int64_t q = head * share; q < (head + 1) * share; q++)
                attend(a.queries + (r * a.num_heads + q) * d, keys, a.k_cache, a.v_cache, first, last, d, a.scale,
                       weights.data(), a.out + (r * a.num_heads + q) * d);
        }
    }
}
}
