// Copies into shared memory: where their bytes come from and go, and when.

#include "ptx_copies.h"

namespace ptx {

using emulator::fail;
using emulator::Place;

void check_bulk(unsigned long long address, uint32_t bytes) {
    if (address % 16 || bytes % 16 || bytes == 0) fail("a bulk copy of %u bytes at %#llx: both are multiples of 16", bytes, address);
}

const TensorMap& tensor_map_at(unsigned long long address) {
    const auto& map = *reinterpret_cast<const TensorMap*>(address);
    if (address % 64 || map.mark != TENSOR_MAP_MARK) fail("there is no tensor map at %#llx", address);
    return map;
}

namespace {

uint32_t swizzled(uint32_t offset, uint32_t swizzle) {
    uint32_t mask = swizzle ? swizzle / 16 - 1 : 0;
    return offset ^ (offset >> 7 & mask) << 4;
}

std::vector<char> read(const std::vector<Run>& runs) {
    std::vector<char> bytes;
    for (const Run& run : runs) {
        if (run.source == nullptr) bytes.resize(bytes.size() + run.bytes, 0);
        else bytes.insert(bytes.end(), run.source, run.source + run.bytes);
    }
    return bytes;
}

void write(Place target, const std::vector<Run>& runs, const std::vector<char>& bytes) {
    const char* from = bytes.data();
    for (const Run& run : runs) {
        memcpy(emulator::memory_at({target.program, run.offset}, run.bytes, 1), from, run.bytes);
        from += run.bytes;
    }
}

// A part of a copy. Its source is read when it starts or when it ends.
void copy_part(Place target, std::vector<Run> runs, Place barrier) {
    std::vector<char> early;
    if (emulator::random_below(2)) early = read(runs);
    ++target.program->copies_under_way;
    emulator::add_task([target, barrier, runs = std::move(runs), early = std::move(early)] {
        --target.program->copies_under_way;
        std::vector<char> bytes = early.empty() ? read(runs) : early;
        write(target, runs, bytes);
        emulator::change_barrier(barrier, 0, -static_cast<long long>(bytes.size()));
    });
}

std::vector<Run> halves(const std::vector<Run>& runs) {
    std::vector<Run> result;
    for (const Run& run : runs) {
        uint32_t half = run.bytes / 32 * 16;
        result.push_back({run.offset, run.source, half});
        result.push_back({run.offset + half, run.source ? run.source + half : nullptr, run.bytes - half});
    }
    return result;
}

}  // namespace

namespace {

// A row of a box, at most 16 bytes at a time; zeros outside the tensor.
void add_row(std::vector<Run>& runs, const TensorMap& map, uint32_t offset, const char* row, int column) {
    uint32_t width = map.box_columns * map.item_bytes;
    for (uint32_t byte = 0; byte < width; byte += map.item_bytes < 16 ? 16 : map.item_bytes) {
        long long first = static_cast<long long>(column) * map.item_bytes + byte, all = map.columns * map.item_bytes;
        bool inside = row && first >= 0 && first < all;
        uint32_t bytes = std::min(16u, width - byte), valid = inside ? std::min<long long>(bytes, all - first) : 0;
        uint32_t target = swizzled(offset + byte, map.swizzle);
        if (valid) runs.push_back({target, row + first, valid});
        if (valid < bytes) runs.push_back({target + valid, nullptr, bytes - valid});
    }
}

}  // namespace

std::vector<Run> runs_of_box(const TensorMap& map, uint32_t offset, std::array<int, 4> at) {
    uint32_t width = map.box_columns * map.item_bytes;
    if (map.swizzle && width > map.swizzle) fail("rows of %u bytes in a box swizzled by %llu bytes", width, map.swizzle);
    if (offset % 128) fail("a box at %#x, which is no multiple of 128", offset);
    const unsigned long long boxes[] = {map.box_rows, map.outer[0].box, map.outer[1].box};
    const unsigned long long sizes[] = {map.rows, map.outer[0].size, map.outer[1].size};
    const unsigned long long pitches[] = {map.pitch, map.outer[0].pitch, map.outer[1].pitch};
    std::vector<Run> runs;
    for (unsigned long long r = 0; r < boxes[0] * boxes[1] * boxes[2]; ++r, offset += width) {
        const char* row = reinterpret_cast<const char*>(map.address);
        for (unsigned long long i = 0, rest = r; i < 3; rest /= boxes[i], ++i) {
            long long index = at[i + 1] + static_cast<long long>(rest % boxes[i]);
            bool inside = row && index >= 0 && index < static_cast<long long>(sizes[i]);
            row = inside ? row + index * static_cast<long long>(pitches[i]) : nullptr;
        }
        add_row(runs, map, offset, row, at[0]);
    }
    return runs;
}

void copy_to_shared(Place target, std::vector<Run> runs, Place barrier) {
    if (target.program != barrier.program) fail("a copy to one program and its barrier in another");
    if (target.offset % 16) fail("a bulk copy to %#x, which is no multiple of 16", target.offset);
    emulator::barrier_at(barrier);
    for (const Run& run : runs) memset(emulator::memory_at({target.program, run.offset}, run.bytes, 1), 0xff, run.bytes);
    if (runs.size() == 1 && runs[0].bytes >= 32) runs = halves(runs);
    size_t middle = emulator::random_below(2) ? 0 : runs.size() / 2;
    if (middle) copy_part(target, {runs.begin(), runs.begin() + middle}, barrier);
    copy_part(target, {runs.begin() + middle, runs.end()}, barrier);
}

// ---- groups of a thread's own copies ----

void copy_in_group(char* target, const char* source, uint32_t bytes, uint32_t given) {
    memset(target, 0xff, bytes);
    emulator::current->copies.push_back(emulator::add_task([=] {
        memset(target, 0, bytes);
        memcpy(target, source, given);
    }));
}

void cp_async_commit_group() { emulator::current->groups.push_back(emulator::current->copies.size()); }

void cp_async_wait_group(uint32_t pending) {
    emulator::Thread& thread = *emulator::current;
    if (thread.groups_ended + pending >= thread.groups.size()) return;
    uint32_t first = thread.groups_ended ? thread.groups[thread.groups_ended - 1] : 0;
    thread.groups_ended = thread.groups.size() - pending;
    for (uint32_t i = first; i < thread.groups[thread.groups_ended - 1]; ++i) emulator::end_task(thread.copies[i]);
}

void arrive_after_copies(uint32_t address) {
    emulator::Place barrier = emulator::place(address);
    std::vector<unsigned long long> copies = emulator::current->copies;
    emulator::add_task([=] {
        for (unsigned long long copy : copies) emulator::end_task(copy);
        emulator::change_barrier(barrier, 1, 0);
    });
}

}  // namespace ptx
