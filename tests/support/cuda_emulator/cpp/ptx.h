// Instructions of PTX for registers, memory, barriers and threads. translate.py names these functions.
//
// A register is a reference; a list of registers in braces is an array of pointers.
#pragma once

#include <array>
#include <type_traits>
#include <utility>

#include "numbers.h"

namespace ptx {

template <class T, class... Rest>
std::array<T*, 1 + sizeof...(Rest)> list(T& first, Rest&... rest) {
    return {&first, &rest...};
}

template <class T>
T list_item(const T& value) {
    return value;
}

struct Nowhere {};
inline Nowhere nowhere() { return {}; }

// Other threads may run now: after an arrival or a copy's start, to show what relies on this thread's being fast.
inline void let_others_run() {
    if (emulator::random_below(2)) emulator::pause_thread();
}

// ---- special registers ----

inline uint32_t special_laneid() { return emulator::current->lane; }
inline uint32_t special_warpid() { return emulator::current->warp->number; }
inline uint32_t special_tid_x() { return emulator::current->index.x; }
inline uint32_t special_ctaid_x() { return emulator::current->program->number; }
inline uint32_t special_nctaid_x() { return emulator::launch.programs; }
inline uint32_t special_smid() { return emulator::current->program->number; }
inline uint32_t special_cluster_ctarank() { return emulator::current->program->rank; }
inline uint32_t special_cluster_nctarank() { return emulator::launch.cluster; }
inline uint32_t special_clusterid_x() { return emulator::current->program->number / emulator::launch.cluster; }
inline uint32_t special_nclusterid_x() { return emulator::launch.programs / emulator::launch.cluster; }
inline uint32_t special_dynamic_smem_size() { return emulator::launch.shared_bytes; }

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
PTX_ARITHMETIC(max, std::fmax(a, b))
PTX_ARITHMETIC(min, std::fmin(a, b))
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

// ---- memory ----

template <class T, class D>
void load(D& d, const char* at) {
    typename T::value value;
    memcpy(&value, at, sizeof value);
    if constexpr (std::is_floating_point_v<D> && !std::is_floating_point_v<typename T::value>)
        d = bits_of<D>(value);
    else
        d = value;
}
template <class T, class D, size_t N>
void load(std::array<D*, N> d, const char* at) {
    for (size_t i = 0; i < N; ++i) load<T>(*d[i], at + i * sizeof(typename T::value));
}
template <class T, class D>
void store(char* at, D d) {
    auto value = static_cast<typename T::value>(d);
    if constexpr (std::is_floating_point_v<D> && !std::is_floating_point_v<typename T::value>)
        value = bits_of<typename T::value>(d);
    memcpy(at, &value, sizeof value);
}
template <class T, class D, size_t N>
void store(char* at, std::array<D*, N> d) {
    for (size_t i = 0; i < N; ++i) store<T>(at + i * sizeof(typename T::value), *d[i]);
}
template <class T, class D>
constexpr uint32_t size_of(const D&) {
    return sizeof(typename T::value);
}
template <class T, class D, size_t N>
constexpr uint32_t size_of(const std::array<D*, N>&) {
    return N * sizeof(typename T::value);
}

inline char* global_at(unsigned long long address, uint32_t bytes) {
    if (address % bytes) emulator::fail("global address %#llx is no multiple of %u", address, bytes);
    return reinterpret_cast<char*>(address);
}

template <class T, class D>
void ld_shared(D&& d, uint32_t address) {
    load<T>(d, emulator::memory_at(address, size_of<T>(d), size_of<T>(d)));
}
template <class T, class D>
void st_shared(uint32_t address, D d) {
    store<T>(emulator::memory_at(address, size_of<T>(d), size_of<T>(d)), d);
}
template <class T, class D>
void ld_global(D&& d, unsigned long long address) {
    load<T>(d, global_at(address, size_of<T>(d)));
}
template <class T, class D>
void st_global(unsigned long long address, D d) {
    store<T>(global_at(address, size_of<T>(d)), d);
}
// Loads that may see what others write meanwhile: a thread that polls gives way.
template <class T, class D>
void ld_polled_global(D&& d, unsigned long long address) {
    emulator::pause_thread();
    ld_global<T>(d, address);
}
template <class T, class D>
void ld_polled(D&& d, unsigned long long address) {
    ld_polled_global<T>(d, address);
}
template <class T, class D>
void ld_polled_shared(D&& d, uint32_t address) {
    emulator::pause_thread();
    ld_shared<T>(d, address);
}
template <class T, class D, class A>
void atom_global_add(D&& d, unsigned long long address, A value) {
    emulator::pause_thread();
    typename T::value old, sum;
    load<T>(old, global_at(address, sizeof old));
    sum = old + value;
    store<T>(global_at(address, sizeof old), sum);
    if constexpr (!std::is_same_v<std::decay_t<D>, Nowhere>) d = old;
    emulator::pause_thread();
}
template <class T, class A>
void red_global_add(unsigned long long address, A value) {
    atom_global_add<T>(nowhere(), address, value);
}

template <class T, class D>
void mapa_shared(D& d, uint32_t address, uint32_t rank) {
    d = emulator::address_in(address, rank);
}
template <class T, class D>
void mapa(D& d, unsigned long long pointer, uint32_t rank) {
    uint32_t address = emulator::address_in(emulator::address_of(reinterpret_cast<void*>(pointer)), rank);
    d = reinterpret_cast<unsigned long long>(emulator::memory_at(address, 1, 1));
}
template <class T, class D>
void cvta_to_shared(D& d, unsigned long long pointer) {
    d = emulator::address_of(reinterpret_cast<void*>(pointer));
}
template <class T>
void cvta_to_global(unsigned long long& d, unsigned long long pointer) {
    d = pointer;
}

// ---- barriers ----

template <class T>
void mbarrier_init_shared(uint32_t address, uint32_t arrivals) {
    emulator::make_barrier(emulator::place(address), arrivals);
}
template <class T>
void mbarrier_inval_shared(uint32_t address) {
    emulator::barrier_at(emulator::place(address));
    emulator::forget_barrier(emulator::place(address));
}
template <class T, class State>
void mbarrier_arrive_shared(State&&, uint32_t address, uint32_t count = 1) {
    emulator::change_barrier(emulator::place(address), count, 0);
    let_others_run();
}
template <class T, class State>
void mbarrier_arrive_expect_tx_shared(State&&, uint32_t address, uint32_t bytes) {
    emulator::change_barrier(emulator::place(address), 1, bytes);
    let_others_run();
}
template <class T>
void mbarrier_expect_tx_shared(uint32_t address, uint32_t bytes) {
    emulator::change_barrier(emulator::place(address), 0, bytes);
}
template <class T>
void mbarrier_complete_tx_shared(uint32_t address, uint32_t bytes) {
    emulator::change_barrier(emulator::place(address), 0, -static_cast<long long>(bytes));
}
template <class T>
void mbarrier_try_wait_parity_shared(bool& done, uint32_t address, uint32_t parity, uint32_t = 0) {
    emulator::wait_barrier(emulator::place(address), parity);
    done = true;
}
template <class T>
void mbarrier_test_wait_parity_shared(bool& done, uint32_t address, uint32_t parity) {
    emulator::pause_thread();
    done = emulator::has_ended(emulator::place(address), parity);
}

inline void bar(uint32_t number, uint32_t threads = 0) { emulator::meet_named(number, threads, true); }
inline void bar_arrive(uint32_t number, uint32_t threads) {
    emulator::meet_named(number, threads, false);
    let_others_run();
}
inline void barrier(uint32_t number, uint32_t threads = 0) { bar(number, threads); }
inline void barrier_arrive(uint32_t number, uint32_t threads) { bar_arrive(number, threads); }
inline void barrier_cluster_arrive() {
    emulator::arrive_cluster();
    let_others_run();
}
inline void barrier_cluster_wait() { emulator::wait_cluster(); }

// ---- what does nothing here, or next to nothing ----

inline void fence() { emulator::pause_thread(); }
inline void fence_sc() { emulator::pause_thread(); }
inline void membar_gl() { emulator::pause_thread(); }
inline void fence_mbarrier_init() {}
inline void fence_proxy_async() {}
inline void fence_proxy_async_shared() {}
inline void fence_proxy_async_global() {}
inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() { emulator::wait_for_kernels_before(); }
template <class T>
void setmaxnreg_dec(uint32_t) {}
template <class T>
void setmaxnreg_inc(uint32_t) {}
template <class T>
void nanosleep(uint32_t) {
    emulator::pause_thread();
}
template <class T>
void createpolicy_fractional_L2_evict_first(unsigned long long& policy, double) {
    policy = 0;
}
template <class T>
void createpolicy_fractional_L2_evict_last(unsigned long long& policy, double) {
    policy = 0;
}
inline void prefetch_global_L2(unsigned long long) {}

// One lane of the warp; here the lowest.
template <class D>
void elect(D&&, bool& chosen, uint32_t mask) {
    emulator::together("elect.sync", mask, nullptr, [](void**) {});
    chosen = emulator::current->lane == __builtin_ctz(mask);
}

}  // namespace ptx
