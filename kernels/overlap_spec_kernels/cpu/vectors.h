// Vectors of 16 lanes, and the functions of them that the parts of a decoder layer share.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace overlap_spec {

constexpr int LANES = 16;
constexpr int FEW_ROWS = 8;  // whose norms and the like one thread computes before others would begin

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

// Half of a vector. Without AVX-512, compilers keep whole ones in memory, so loops that matter there take halves.
constexpr int EIGHT = LANES / 2;
typedef float Floats8 __attribute__((vector_size(32)));
typedef int32_t Ints8 __attribute__((vector_size(32)));

// work(0) .. work(N - 1), with constants: what they index are then variables, which can be registers, and no array.
template <int N, class Work, int... I>
inline __attribute__((always_inline)) void unrolled(const Work& work, std::integer_sequence<int, I...>) {
    (work(std::integral_constant<int, I>()), ...);
}
template <int N, class Work>
inline __attribute__((always_inline)) void unrolled(const Work& work) {
    unrolled<N>(work, std::make_integer_sequence<int, N>());
}
#define UNROLLED(index) [&](auto index) __attribute__((always_inline))

template <class V>
inline V load(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline Floats load(const float* p) { return load<Floats>(p); }

inline Floats as_floats(Ints bits) { return load<Floats>(&bits); }
inline float as_float(int32_t bits) { return load<float>(&bits); }

inline Floats load_scale(const void* scales, int64_t at, bool half) {
#if defined(__AVX512F__)
    if (half) {
        const uint16_t* p = static_cast<const uint16_t*>(scales) + at * LANES;
        return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
#elif defined(__F16C__)
    if (half) {
        const __m128i* p = reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(scales) + at * LANES);
        const __m256 both[2] = {_mm256_cvtph_ps(_mm_loadu_si128(p)), _mm256_cvtph_ps(_mm_loadu_si128(p + 1))};
        return load<Floats>(both);
    }
#endif
    return load(static_cast<const float*>(scales) + at * LANES);
}

// Eight scales from `at` on.
inline Floats8 load_scales8(const void* scales, int64_t at, bool half) {
#ifdef __F16C__
    if (half) {
        const uint16_t* p = static_cast<const uint16_t*>(scales) + at;
        return (Floats8)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
#endif
    return load<Floats8>(static_cast<const float*>(scales) + at);
}

inline Floats load_bfloat16(const uint16_t* p) {
    Ints bits;
#ifdef __AVX512F__
    bits = (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))) << 16;
#else
    for (int i = 0; i < LANES; i++) bits[i] = int32_t(uint32_t(p[i]) << 16);
#endif
    return as_floats(bits);
}

inline Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

inline Floats exponential(Floats v) {  // 2^n times a polynomial; what is beyond the range of floats is its end
    Floats scaled = v * 1.44269504f;
    for (int i = 0; i < LANES; i++) scaled[i] = scaled[i] < -126.f ? -126.f : scaled[i] > 126.f ? 126.f : scaled[i];
    const Ints whole = __builtin_convertvector(scaled + 0.5f, Ints) - (scaled + 0.5f < 0.f ? 1 : 0);
    const Floats rest = (scaled - to_floats(whole)) * 0.69314718f;
    Floats e = rest * 1.9875691e-4f + 1.3981999e-3f;
    e = e * rest + 8.3334519e-3f;
    e = e * rest + 4.1665795e-2f;
    e = e * rest + 1.6666665e-1f;
    e = e * rest + 0.5f;
    e = e * rest * rest + rest + 1.f;
    return e * as_floats((whole + 127) << 23);
}

inline Floats silu(Floats v) { return v / (1.f + exponential(-v)); }

// All lanes joined by an operation, in one order.
template <class Lane, class Join>
inline Lane joined(const void* lanes, const Join& join) {
    typedef Lane Eight __attribute__((vector_size(32)));
    typedef Lane Four __attribute__((vector_size(16)));
    Eight halves[2];
    std::memcpy(halves, lanes, sizeof halves);
    const Eight eight = join(halves[0], halves[1]);
    Four quarters[2];
    std::memcpy(quarters, &eight, sizeof quarters);
    const Four four = join(quarters[0], quarters[1]);
    return join(join(four[0], four[2]), join(four[1], four[3]));
}

inline float total(Floats v) {
    return joined<float>(&v, [](auto a, auto b) { return a + b; });
}
inline int32_t total(Ints v) {
    return joined<int32_t>(&v, [](auto a, auto b) { return a + b; });
}
inline int32_t largest(Ints v) {
    return joined<int32_t>(&v, [](auto a, auto b) { return a > b ? a : b; });
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

}  // namespace overlap_spec
