// Instructions of PTX that copy while the thread goes on. The bytes arrive in parts, each at some later point; until
// then the target holds NaN.
#pragma once

#include "ptx.h"

namespace ptx {

// A box's description, made by `box_map` of launch.py. The outer dimensions of a matrix have size 1.
struct TensorMap {
    unsigned long long mark, address, rows, columns, pitch, box_rows, box_columns, item_bytes, swizzle;
    struct {
        unsigned long long size, pitch, box;
    } outer[2];  // the third and the fourth
};
constexpr unsigned long long TENSOR_MAP_MARK = 0x70616d726f736e65;

// Bytes that lie together in the source and in the target; zeros if there is no source.
struct Run {
    uint32_t offset;
    const char* source;
    uint32_t bytes;
};

void copy_to_shared(emulator::Place target, std::vector<Run> runs, emulator::Place barrier);
std::vector<Run> runs_of_box(const TensorMap& map, uint32_t offset, std::array<int, 4> at);
const TensorMap& tensor_map_at(unsigned long long address);
void check_bulk(unsigned long long address, uint32_t bytes);

// Multicast: the same offsets in the programs of `ranks`.
template <class Each>
void for_ranks(uint32_t ranks, Each each) {
    uint32_t size = emulator::launch.cluster;
    if (ranks == 0 || ranks >> size) emulator::fail("a copy to programs %#x of a cluster of %u", ranks, size);
    for (uint32_t rank = 0; rank < size; ++rank)
        if (ranks >> rank & 1) each(emulator::current->program->cluster->programs[rank]);
}

// ---- one run of bytes ----

inline void cp_async_bulk_shared_global_mbarrier_complete_tx_bytes(
    uint32_t target, unsigned long long source, uint32_t bytes, uint32_t barrier
) {
    check_bulk(source, bytes);
    copy_to_shared(
        emulator::place(target), {{emulator::place(target).offset, reinterpret_cast<const char*>(source), bytes}},
        emulator::place(barrier)
    );
    let_others_run();
}
inline void cp_async_bulk_shared_global_mbarrier_complete_tx_bytes_L2_cache_hint(
    uint32_t target, unsigned long long source, uint32_t bytes, uint32_t barrier, unsigned long long
) {
    cp_async_bulk_shared_global_mbarrier_complete_tx_bytes(target, source, bytes, barrier);
}
inline void cp_async_bulk_shared_global_mbarrier_complete_tx_bytes_multicast_cluster(
    uint32_t target, unsigned long long source, uint32_t bytes, uint32_t barrier, uint32_t ranks
) {
    check_bulk(source, bytes);
    uint32_t to = emulator::place(target).offset, at = emulator::place(barrier).offset;
    for_ranks(ranks, [&](emulator::Program& program) {
        copy_to_shared({&program, to}, {{to, reinterpret_cast<const char*>(source), bytes}}, {&program, at});
    });
    let_others_run();
}
inline void cp_async_bulk_shared_shared_mbarrier_complete_tx_bytes(
    uint32_t target, uint32_t source, uint32_t bytes, uint32_t barrier
) {
    check_bulk(emulator::place(source).offset, bytes);
    emulator::Place to = emulator::place(target);
    copy_to_shared(to, {{to.offset, emulator::memory_at(source, bytes, 16), bytes}}, emulator::place(barrier));
    let_others_run();
}

// ---- tiles of a matrix, boxes of a tensor of four dimensions ----

template <class Coordinates>
std::array<int, 4> coordinates(const Coordinates& given) {
    std::array<int, 4> at{};
    for (size_t i = 0; i < given.size(); ++i) at[i] = static_cast<int>(*given[i]);
    return at;
}

template <class Coordinates>
void copy_box(uint32_t target, unsigned long long map, const Coordinates& at, uint32_t barrier) {
    emulator::Place to = emulator::place(target);
    copy_to_shared(to, runs_of_box(tensor_map_at(map), to.offset, coordinates(at)), emulator::place(barrier));
    let_others_run();
}
template <class Coordinates>
void send_box(uint32_t target, unsigned long long map, const Coordinates& at, uint32_t barrier, uint32_t ranks) {
    uint32_t to = emulator::place(target).offset, counted = emulator::place(barrier).offset;
    for_ranks(ranks, [&](emulator::Program& program) {
        copy_to_shared({&program, to}, runs_of_box(tensor_map_at(map), to, coordinates(at)), {&program, counted});
    });
    let_others_run();
}

template <class Coordinates>
void cp_async_bulk_tensor_2d_shared_global_mbarrier_complete_tx_bytes(
    uint32_t target, unsigned long long map, Coordinates at, uint32_t barrier
) {
    copy_box(target, map, at, barrier);
}
template <class Coordinates>
void cp_async_bulk_tensor_4d_shared_global_mbarrier_complete_tx_bytes(
    uint32_t target, unsigned long long map, Coordinates at, uint32_t barrier
) {
    copy_box(target, map, at, barrier);
}
template <class Coordinates>
void cp_async_bulk_tensor_4d_shared_global_mbarrier_complete_tx_bytes_multicast_cluster(
    uint32_t target, unsigned long long map, Coordinates at, uint32_t barrier, uint32_t ranks
) {
    send_box(target, map, at, barrier, ranks);
}
template <class Coordinates>
void cp_async_bulk_tensor_2d_shared_global_mbarrier_complete_tx_bytes_L2_cache_hint(
    uint32_t target, unsigned long long map, Coordinates at, uint32_t barrier, unsigned long long
) {
    cp_async_bulk_tensor_2d_shared_global_mbarrier_complete_tx_bytes(target, map, at, barrier);
}
template <class Coordinates>
void cp_async_bulk_tensor_2d_shared_global_mbarrier_complete_tx_bytes_multicast_cluster(
    uint32_t target, unsigned long long map, Coordinates at, uint32_t barrier, uint32_t ranks
) {
    send_box(target, map, at, barrier, ranks);
}
inline void prefetch_tensormap(unsigned long long map) { tensor_map_at(map); }

// ---- stores into a cluster, with a barrier that counts their bytes ----

template <class T, class D>
void st_async_shared_mbarrier_complete_tx_bytes(uint32_t address, D d, uint32_t barrier) {
    uint32_t bytes = size_of<T>(d);
    emulator::Place to = emulator::place(address), counted = emulator::place(barrier);
    if (to.program != counted.program) emulator::fail("st.async to one program and its barrier in another");
    std::vector<char> value(bytes);
    store<T>(value.data(), d);
    emulator::memory_at(to, bytes, bytes);
    ++to.program->copies_under_way;
    emulator::add_task([=] {
        --to.program->copies_under_way;
        memcpy(emulator::memory_at(to, bytes, bytes), value.data(), bytes);
        emulator::change_barrier(counted, 0, -static_cast<long long>(bytes));
    });
    let_others_run();
}

// ---- copies that the thread itself waits for ----

void copy_in_group(char* target, const char* source, uint32_t bytes, uint32_t given);

template <class... Size>
void copy_asynchronously(uint32_t target, unsigned long long source, uint32_t bytes, Size... given) {
    uint32_t taken = bytes;
    ((taken = given), ...);
    copy_in_group(emulator::memory_at(target, bytes, bytes), reinterpret_cast<const char*>(source), bytes, taken);
}
template <class... Size>
void cp_async_cg_shared_global(uint32_t target, unsigned long long source, uint32_t bytes, Size... given) {
    copy_asynchronously(target, source, bytes, given...);
}
template <class... Size>
void cp_async_ca_shared_global(uint32_t target, unsigned long long source, uint32_t bytes, Size... given) {
    copy_asynchronously(target, source, bytes, given...);
}
void cp_async_commit_group();
void cp_async_wait_group(uint32_t pending);
inline void cp_async_wait_all() {
    cp_async_commit_group();
    cp_async_wait_group(0);
}

// At some later point: what the thread has copied so far is there then.
void arrive_after_copies(uint32_t address);
template <class T>
void cp_async_mbarrier_arrive_shared(uint32_t address) {
    arrive_after_copies(address);
}

inline void cp_async_bulk_global_shared_bulk_group(unsigned long long target, uint32_t source, uint32_t bytes) {
    check_bulk(target, bytes);
    copy_in_group(reinterpret_cast<char*>(target), emulator::memory_at(source, bytes, 16), bytes, bytes);
}
inline void cp_async_bulk_commit_group() { cp_async_commit_group(); }
inline void cp_async_bulk_wait_group(uint32_t pending) { cp_async_wait_group(pending); }
inline void cp_async_bulk_wait_group_read(uint32_t pending) { cp_async_wait_group(pending); }

}  // namespace ptx
