// What CUDA C++ has beside C++: words, types and functions. `ptx.h` and its neighbours have the instructions.
#pragma once

#include <algorithm>
#include <cmath>

#include "machine.h"
#include "ptx.h"
#include "ptx_copies.h"
#include "ptx_products.h"

#define __device__
#define __global__
#define __host__
#define __constant__ const
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)
#define __align__(bytes) alignas(bytes)
#define __restrict__

#define threadIdx (emulator::current->index)
#define blockIdx (emulator::Index{emulator::current->program->number, 0, 0})
#define gridDim (emulator::Index{emulator::launch.programs, 1, 1})
#define blockDim (emulator::Index{emulator::launch.threads, 1, 1})
#define warpSize 32

using std::max;
using std::min;

// ---- vectors ----

template <class T>
struct alignas(2 * sizeof(T)) Vector2 {
    T x, y;
};

template <class T>
struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) Vector4 {
    T x, y, z, w;
};

using int2 = Vector2<int>;
using int4 = Vector4<int>;
using uint2 = Vector2<u32>;
using uint4 = Vector4<u32>;
using float2 = Vector2<float>;
using float4 = Vector4<float>;
using ulonglong2 = Vector2<u64>;
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- arithmetic ----

inline float __int_as_float(int bits) { return emulator::bits_of<float>(bits); }
inline float __uint_as_float(u32 bits) { return emulator::bits_of<float>(bits); }
inline int __float_as_int(float value) { return emulator::bits_of<int>(value); }
inline u32 __float_as_uint(float value) { return emulator::bits_of<u32>(value); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return std::fabs(y) > 0x1p126f && std::isfinite(x) ? 0.0f * x : x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(u32 x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(u32 x) { return __builtin_ffs(x); }

// Without the bits of `prmt` that repeat a sign.
inline u32 __byte_perm(u32 x, u32 y, u32 selector) {
    u32 result;
    ptx::prmt<ptx::b32>(result, x, y, selector & 0x7777);
    return result;
}

inline u32 __funnelshift_r(u32 low, u32 high, u32 shift) { return (static_cast<u64>(high) << 32 | low) >> (shift & 31); }
inline u32 __funnelshift_l(u32 low, u32 high, u32 shift) {
    return (static_cast<u64>(high) << 32 | low) << (shift & 31) >> 32;
}

// ---- memory ----

inline size_t __cvta_generic_to_shared(const void* pointer) { return emulator::address_of(pointer); }
inline void* __cvta_shared_to_generic(size_t address) { return emulator::memory_at(static_cast<u32>(address), 1, 1); }

template <class T>
T __ldg(const T* at) {
    return *at;
}
template <class T>
T __ldcg(const T* at) {
    return *at;
}
template <class T>
T __ldcs(const T* at) {
    return *at;
}
template <class T>
void __stcg(T* at, T value) {
    *at = value;
}
template <class T>
void __stcs(T* at, T value) {
    *at = value;
}

inline void __threadfence() { emulator::pause_thread(); }
inline void __threadfence_block() { emulator::pause_thread(); }
inline void __nanosleep(u32) { emulator::pause_thread(); }

// Others may run before and after: what a thread does between two atomic operations takes time.
template <class T, class Change>
T emulated_atomic(T* at, Change change) {
    emulator::pause_thread();
    T old = *at;
    *at = change(old);
    emulator::pause_thread();
    return old;
}

template <class T, class U>
T atomicAdd(T* at, U value) {
    return emulated_atomic(at, [&](T old) { return static_cast<T>(old + value); });
}
template <class T, class U>
T atomicMax(T* at, U value) {
    return emulated_atomic(at, [&](T old) { return std::max(old, static_cast<T>(value)); });
}
template <class T, class U>
T atomicOr(T* at, U value) {
    return emulated_atomic(at, [&](T old) { return static_cast<T>(old | value); });
}
template <class T, class U>
T atomicExch(T* at, U value) {
    return emulated_atomic(at, [&](T) { return static_cast<T>(value); });
}
template <class T, class U, class V>
T atomicCAS(T* at, U expected, V value) {
    return emulated_atomic(at, [&](T old) { return old == static_cast<T>(expected) ? static_cast<T>(value) : old; });
}
inline u32 atomicInc(u32* at, u32 limit) {
    return emulated_atomic(at, [&](u32 old) { return old >= limit ? 0 : old + 1; });
}

// ---- threads ----

inline void __syncthreads() { emulator::meet_named(0, 0, true); }
inline void __syncwarp(u32 mask = 0xffffffff) {
    emulator::together("__syncwarp", mask, nullptr, [](void**) {});
}

// The value of lane `from`; the lane's own if that lies outside its segment of `width` lanes.
template <class T>
T emulated_shuffle(const char* what, u32 mask, T value, int from, int width) {
    struct Operand {
        T given, taken;
        int from;
    } operand{value, value, from};
    emulator::together(what, mask, &operand, [&](void** operands) {
        for (int lane = 0; lane < 32; ++lane) {
            if (!(mask >> lane & 1)) continue;
            auto& mine = *static_cast<Operand*>(operands[lane]);
            if (mine.from < 0 || mine.from / width != lane / width) continue;
            if (!(mask >> mine.from & 1)) emulator::fail("%s from lane %d, which is not in %08x", what, mine.from, mask);
            mine.taken = static_cast<Operand*>(operands[mine.from])->given;
        }
    });
    return operand.taken;
}

template <class T>
T __shfl_sync(u32 mask, T value, int source, int width = 32) {
    int from = emulator::current->lane / width * width + (source & (width - 1));
    return emulated_shuffle("__shfl_sync", mask, value, from, width);
}
template <class T>
T __shfl_xor_sync(u32 mask, T value, int step, int width = 32) {
    return emulated_shuffle("__shfl_xor_sync", mask, value, emulator::current->lane ^ step, width);
}
template <class T>
T __shfl_down_sync(u32 mask, T value, u32 step, int width = 32) {
    return emulated_shuffle("__shfl_down_sync", mask, value, emulator::current->lane + static_cast<int>(step), width);
}
template <class T>
T __shfl_up_sync(u32 mask, T value, u32 step, int width = 32) {
    return emulated_shuffle("__shfl_up_sync", mask, value, emulator::current->lane - static_cast<int>(step), width);
}

template <class Add>
int emulated_reduction(const char* what, u32 mask, int value, Add add) {
    struct Operand {
        int given, result;
    } operand{value, value};
    emulator::together(what, mask, &operand, [&](void** operands) {
        bool begun = false;
        int sum = 0;
        for (int lane = 0; lane < 32; ++lane) {
            if (!(mask >> lane & 1)) continue;
            int given = static_cast<Operand*>(operands[lane])->given;
            sum = begun ? add(sum, given) : given;
            begun = true;
        }
        for (int lane = 0; lane < 32; ++lane)
            if (mask >> lane & 1) static_cast<Operand*>(operands[lane])->result = sum;
    });
    return operand.result;
}
inline int __reduce_max_sync(u32 mask, int value) {
    return emulated_reduction("__reduce_max_sync", mask, value, [](int a, int b) { return a > b ? a : b; });
}
inline int __reduce_add_sync(u32 mask, int value) {
    return emulated_reduction("__reduce_add_sync", mask, value, [](int a, int b) { return a + b; });
}

inline u32 __ballot_sync(u32 mask, bool value) {
    struct Operand {
        bool given;
        u32 taken;
    } operand{value, 0};
    emulator::together("__ballot_sync", mask, &operand, [&](void** operands) {
        u32 ballot = 0;
        for (int lane = 0; lane < 32; ++lane)
            if (mask >> lane & 1) ballot |= u32(static_cast<Operand*>(operands[lane])->given) << lane;
        for (int lane = 0; lane < 32; ++lane)
            if (mask >> lane & 1) static_cast<Operand*>(operands[lane])->taken = ballot;
    });
    return operand.taken;
}
inline bool __any_sync(u32 mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline bool __all_sync(u32 mask, bool value) { return __ballot_sync(mask, value) == mask; }

// ---- the call of a kernel with pointers to its arguments ----

template <class T>
T emulated_argument(const void* at) {
    T value;  // may be aligned, which `at` is not
    memcpy(&value, at, sizeof value);
    return value;
}

template <class... Parameters, size_t... I>
void emulated_call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
    kernel(emulated_argument<Parameters>(arguments[I])...);
}

template <class... Parameters>
void emulated_call(void (*kernel)(Parameters...), void** arguments) {
    emulated_call(kernel, arguments, std::index_sequence_for<Parameters...>());
}
