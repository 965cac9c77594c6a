// Instructions of PTX for memory, barriers and threads. translate.py names these functions.
//
// A register is a reference; a list of registers in braces is an array of pointers.
#pragma once

#include <array>
#include <type_traits>
#include <utility>

#include "ptx_registers.h"

namespace ptx {

template <class T, class... Rest>
std::array<T*, 1 + sizeof...(Rest)> list(T& first, Rest&... rest) {
    return {&first, &rest...};
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
template <class T>
void bar_red_or(bool& any, uint32_t number, uint32_t threads, bool own) {
    any = emulator::meet_named(number, threads, true, own);
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
// Nothing comes of it, but the memory must be there.
inline void prefetch_global_L2(unsigned long long address) { (void)*reinterpret_cast<const volatile char*>(address); }

// One lane of the warp; here the lowest.
template <class D>
void elect(D&&, bool& chosen, uint32_t mask) {
    emulator::together("elect.sync", mask, nullptr, [](void**) {});
    chosen = emulator::current->lane == __builtin_ctz(mask);
}

}  // namespace ptx
