// Instructions of PTX between registers: bits, integers, floats, conversions. translate.py names these functions.
#pragma once

#include <type_traits>

#include "numbers.h"

namespace ptx {

// ---- integers and bits ----

template <class T, class D, class A>
void mov(D& d, A a) {
    d = a;
}

#define PTX_INTEGER(name, expression)                    \
    template <class T, class D, class A, class B>        \
    void name(D& d, A given_a, B given_b) {              \
        auto a = static_cast<typename T::value>(given_a), b = static_cast<typename T::value>(given_b); \
        d = expression;                                  \
    }
PTX_INTEGER(and, a& b)
PTX_INTEGER(or, a | b)
PTX_INTEGER(xor, a ^ b)
PTX_INTEGER(shl, b >= 8 * sizeof(a) ? 0 : a << b)
PTX_INTEGER(shr, b >= 8 * sizeof(a) ? (a < 0 ? -1 : 0) : a >> b)
PTX_INTEGER(mul_lo, a * b)
PTX_INTEGER(setp_eq, a == b)
PTX_INTEGER(setp_ne, a != b)
PTX_INTEGER(setp_lt, a < b)
PTX_INTEGER(setp_le, a <= b)
PTX_INTEGER(setp_gt, a > b)
PTX_INTEGER(setp_ge, a >= b)
#undef PTX_INTEGER

template <class T, class D, class A>
void not(D& d, A a) {
    if constexpr (std::is_same_v<typename T::value, bool>)
        d = !a;
    else
        d = ~static_cast<typename T::value>(a);
}
template <class T, class D, class A, class B, class P>
void selp(D& d, A a, B b, P p) {
    d = p ? a : b;
}
template <class T, class D, class A, class B, class C>
void mad_lo(D& d, A a, B b, C c) {
    d = a * b + c;
}
template <class T>
void lop3(uint32_t& d, uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
    d = 0;
    for (int i = 0; i < 8; ++i)
        if (table >> i & 1) d |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
}
template <class T>
void prmt(uint32_t& d, uint32_t a, uint32_t b, uint32_t selector) {
    uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
        uint32_t choice = selector >> 4 * i & 15, byte = bytes >> 8 * (choice & 7) & 255;
        if (choice & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << 8 * i;
    }
    d = result;
}
template <class T>
void shf_r_wrap(uint32_t& d, uint32_t a, uint32_t b, uint32_t shift) {
    d = (static_cast<uint64_t>(b) << 32 | a) >> (shift & 31);
}
template <class T>
void shf_l_wrap(uint32_t& d, uint32_t a, uint32_t b, uint32_t shift) {
    d = (static_cast<uint64_t>(b) << 32 | a) << (shift & 31) >> 32;
}

// ---- floats; integers too for sums and products ----

#define PTX_ARITHMETIC(name, expression)                                                               \
    template <class T, class D, class A, class B>                                                      \
    void name(D& d, A given_a, B given_b) {                                                            \
        if constexpr (std::is_integral_v<D> && !std::is_base_of_v<Pair<bf16>, T> &&                    \
                      !std::is_base_of_v<Pair<f16>, T> && !std::is_same_v<T, bf16> && !std::is_same_v<T, f16>) { \
            auto a = static_cast<typename T::value>(given_a), b = static_cast<typename T::value>(given_b); \
            d = expression;                                                                            \
        } else {                                                                                       \
            d = each<T>([](auto a, auto b) { return expression; }, given_a, given_b);                  \
        }                                                                                              \
    }
PTX_ARITHMETIC(add, a + b)
PTX_ARITHMETIC(add_rn, a + b)
PTX_ARITHMETIC(sub, a - b)
PTX_ARITHMETIC(sub_rn, a - b)
PTX_ARITHMETIC(mul, a* b)
PTX_ARITHMETIC(mul_rn, a* b)
PTX_ARITHMETIC(div_full, a / b)
PTX_ARITHMETIC(max, std::fmax(a, b))
PTX_ARITHMETIC(min, std::fmin(a, b))
PTX_ARITHMETIC(max_NaN, std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b))
PTX_ARITHMETIC(min_NaN, std::isnan(a) || std::isnan(b) ? NAN : std::fmin(a, b))
#undef PTX_ARITHMETIC

template <class T, class D, class A, class B, class C>
void fma_rn(D& d, A a, B b, C c) {
    d = each<T>([](auto a, auto b, auto c) { return std::fma(a, b, c); }, a, b, c);
}
template <class T>
void ex2_approx(float& d, float a) {
    d = std::exp2(a);
}
template <class T>
void rcp_approx(float& d, float a) {
    d = 1.0f / a;
}
template <class T>
void sqrt_approx(float& d, float a) {
    d = std::sqrt(a);
}

template <class T>
void rsqrt_approx(float& d, float a) {
    d = 1.0f / std::sqrt(a);
}
template <class T>
void tanh_approx(float& d, float a) {
    d = std::tanh(a);
}

// From one type to another; the first of two numbers goes into the upper half.
template <class To, class From, class D, class A>
void cvt_rn(D& d, A a) {
    if constexpr (std::is_same_v<From, e4m3x2>)
        d = f16::rounded(e4m3::widened(a & 255)) | static_cast<uint32_t>(f16::rounded(e4m3::widened(a >> 8))) << 16;
    else if constexpr (std::is_same_v<From, f32>)
        d = To::rounded(a);
    else
        d = static_cast<typename To::value>(static_cast<typename From::value>(a));
}
template <class To, class From, class D>
void cvt_rn(D& d, float high, float low) {
    d = To::half::rounded(low) | static_cast<uint32_t>(To::half::rounded(high)) << 16;
}
template <class To, class From, class D>
void cvt_rn_satfinite(D& d, float high, float low) {
    d = e4m3::saturated(low) | e4m3::saturated(high) << 8;
}
template <class To, class From, class D, class A>
void cvt(D& d, A a) {
    if constexpr (std::is_same_v<From, bf16> || std::is_same_v<From, f16>)
        d = From::widened(a);
    else
        d = static_cast<typename To::value>(static_cast<typename From::value>(a));
}

}  // namespace ptx
