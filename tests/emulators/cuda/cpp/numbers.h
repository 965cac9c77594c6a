// Types of PTX by their names, and the numbers of 16 and 8 bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "machine.h"

namespace ptx {

using emulator::bits_of;

template <int M, int N, int K>
struct Shape {
    static constexpr int m = M, n = N, k = K;
};

template <class T>
struct Type {
    using value = T;
};
struct b8 : Type<uint8_t> {};
struct u8 : Type<uint8_t> {};
struct b16 : Type<uint16_t> {};
struct u16 : Type<uint16_t> {};
struct s16 : Type<int16_t> {};
struct b32 : Type<uint32_t> {};
struct u32 : Type<uint32_t> {};
struct pred : Type<bool> {};
struct s32 : Type<int32_t> {};
struct b64 : Type<unsigned long long> {};
struct u64 : Type<unsigned long long> {};
struct s64 : Type<long long> {};
struct b128 : Type<u128> {};
struct f32 : Type<float> {};
struct f64 : Type<double> {};

// The bits of a float that is rounded to nearest even after `dropped` of its lowest bits.
inline uint32_t rounded_bits(uint32_t bits, int dropped) {
    return (bits + (1u << (dropped - 1)) - 1 + (bits >> dropped & 1)) >> dropped;
}

struct bf16 : Type<uint16_t> {
    static constexpr int count = 1;
    static float widened(uint16_t bits) { return bits_of<float>(static_cast<uint32_t>(bits) << 16); }
    static uint16_t rounded(float value) {
        return std::isnan(value) ? 0x7fff : rounded_bits(bits_of<uint32_t>(value), 16);
    }
};

// `EXPONENT` and `MANTISSA` bits of a small float with subnormal numbers.
template <int EXPONENT, int MANTISSA>
float widened_small(uint32_t bits) {
    constexpr int BIAS = (1 << (EXPONENT - 1)) - 1;
    float sign = bits >> (EXPONENT + MANTISSA) & 1 ? -1.0f : 1.0f;
    int exponent = bits >> MANTISSA & ((1 << EXPONENT) - 1);
    uint32_t mantissa = bits & ((1 << MANTISSA) - 1);
    if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), 1 - BIAS - MANTISSA);
    return sign * std::ldexp(static_cast<float>(mantissa | 1 << MANTISSA), exponent - BIAS - MANTISSA);
}

template <int EXPONENT, int MANTISSA>
uint32_t rounded_small(float value) {
    constexpr int BIAS = (1 << (EXPONENT - 1)) - 1;
    uint32_t sign = std::signbit(value) << (EXPONENT + MANTISSA);
    int exponent = value == 0.0f ? 1 - BIAS : std::max(std::ilogb(value), 1 - BIAS);
    auto steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(std::fabs(value), MANTISSA - exponent)));
    return sign | (steps + ((exponent + BIAS - 1) << MANTISSA));  // a carry goes into the exponent
}

struct f16 : Type<uint16_t> {
    static constexpr int count = 1;
    static float widened(uint16_t bits) {
        if ((bits & 0x7c00) != 0x7c00) return widened_small<5, 10>(bits);
        return (bits & 0x3ff) ? NAN : (bits & 0x8000 ? -INFINITY : INFINITY);
    }
    static uint16_t rounded(float value) {
        if (std::isnan(value)) return 0x7fff;
        return std::fabs(value) >= 65520.0f ? (std::signbit(value) << 15) | 0x7c00 : rounded_small<5, 10>(value);
    }
};

struct e4m3 : Type<uint8_t> {
    static float widened(uint8_t bits) { return (bits & 0x7f) == 0x7f ? NAN : widened_small<4, 3>(bits); }
    static uint8_t saturated(float value) {
        if (std::isnan(value)) return 0x7f;
        return std::fabs(value) >= 448.0f ? (std::signbit(value) << 7) | 0x7e : rounded_small<4, 3>(value);
    }
};

struct e5m2 : Type<uint8_t> {
    static float widened(uint8_t bits) { return f16::widened(bits << 8); }
};

template <class Half>
struct Pair : Type<uint32_t> {
    using half = Half;
    static constexpr int count = 2;
};
struct bf16x2 : Pair<bf16> {};
struct f16x2 : Pair<f16> {};
struct e4m3x2 : Type<uint16_t> {};

// One rounding per number, in one or in both halves.
template <class T, class Function, class... Bits>
auto each(Function function, Bits... bits) {
    if constexpr (std::is_base_of_v<Type<float>, T> || std::is_base_of_v<Type<double>, T>) {
        return function(bits...);
    } else if constexpr (T::count == 1) {
        return T::rounded(function(T::widened(bits)...));
    } else {
        using Half = typename T::half;
        uint32_t low = Half::rounded(function(Half::widened(bits & 0xffff)...));
        return low | static_cast<uint32_t>(Half::rounded(function(Half::widened(bits >> 16)...))) << 16;
    }
}

}  // namespace ptx
