// Shared memory, and the barriers in it and beside it.

#include "machine.h"

namespace emulator {

// ---- addresses ----

Place place(u32 address) {
    u32 rank = address >> RANK_SHIFT, offset = address & ((1u << RANK_SHIFT) - 1);
    if (rank == 0) return {current->program, offset};
    if (rank > launch.cluster) fail("%#x is no address in this cluster", address);
    return {current->program->cluster->programs + rank - 1, offset};
}

char* memory_at(Place place, u32 bytes, u32 alignment) {
    if (place.offset < FIRST_ADDRESS || place.offset + static_cast<u64>(bytes) > place.program->size)
        fail("%u bytes at %#x are outside the shared memory of program %u", bytes, place.offset, place.program->number);
    if (place.offset % alignment) fail("shared address %#x is no multiple of %u", place.offset, alignment);
    if (place.program->live == 0) fail("the memory of program %u is used after its end", place.program->number);
    return place.program->memory + place.offset;
}

u32 address_of(const void* pointer) {
    const char* at = static_cast<const char*>(pointer);
    const Program& program = *current->program;
    if (at < program.memory || at > program.memory + program.size) fail("a pointer is not to this program's shared memory");
    u32 offset = at - program.memory;  // as on a GPU, a program's own address in a cluster tells which one it is
    return launch.cluster > 1 ? address_in(offset, &program - program.cluster->programs) : offset;
}

u32 address_in(u32 address, u32 rank) {
    if (rank >= launch.cluster) fail("there is no program %u in a cluster of %u", rank, launch.cluster);
    return (rank + 1) << RANK_SHIFT | place(address).offset;
}

// As much aligned as the kernel asks for, and no more.
void* dynamic_memory(u32 alignment) {
    if (alignment > FIRST_ADDRESS) fail("dynamic shared memory is aligned to %u bytes at most", FIRST_ADDRESS);
    return current->program->memory + FIRST_ADDRESS + alignment;
}

namespace {

// Where a variable lies is the same in all programs.
struct Variable {
    std::string name;
    u32 offset, bytes;
};

std::vector<Variable> variables;

u32 offset_of(const char* name, u32 bytes, u32 alignment) {
    for (const Variable& variable : variables)
        if (variable.name == name && variable.bytes == bytes) return variable.offset;
    u32 end = variables.empty() ? 0 : variables.back().offset + variables.back().bytes;
    variables.push_back({name, (end + alignment - 1) / alignment * alignment, bytes});
    return variables.back().offset;
}

u64& mark_at(Place place) { return *reinterpret_cast<u64*>(memory_at(place, 8, 8)); }

u64 mark_of(Place place) { return 0x6d62617272696572 ^ place.offset; }

}  // namespace

void* static_memory(const char* name, u32 bytes, u32 alignment) {
    u32 base = (2 * FIRST_ADDRESS + launch.shared_bytes + 1023) / 1024 * 1024, offset = offset_of(name, bytes, alignment);
    if (base + offset + bytes > current->program->size) fail("there is no memory for the shared variable %s", name);
    return current->program->memory + base + offset;
}

// ---- mbarriers ----

Barrier* find_barrier(Program& program, u32 offset) {
    for (Barrier& barrier : program.barriers)
        if (barrier.offset == offset) return &barrier;
    return nullptr;
}

void forget_barrier(Place place) {
    place.program->barriers.remove_if([&](const Barrier& barrier) { return barrier.offset == place.offset; });
}

void make_barrier(Place place, u32 arrivals) {
    mark_at(place) = mark_of(place);
    forget_barrier(place);
    place.program->barriers.push_back({place.offset, arrivals, arrivals, 0, 0, {}});
}

Barrier& barrier_at(Place place) {
    u64 mark = mark_at(place);
    Barrier* barrier = find_barrier(*place.program, place.offset);
    if (barrier == nullptr) fail("there is no mbarrier at %#x, or not yet", place.offset);
    if (mark != mark_of(place)) fail("the mbarrier at %#x was written over", place.offset);
    return *barrier;
}

void change_barrier(Place place, u32 arrivals, long long bytes) {
    Barrier& barrier = barrier_at(place);
    if (arrivals > barrier.pending) fail("more arrivals at the mbarrier at %#x than its %u", place.offset, barrier.expected);
    barrier.pending -= arrivals;
    barrier.bytes += bytes;
    if (barrier.pending || barrier.bytes) return;
    barrier.parity ^= 1;
    barrier.pending = barrier.expected;
    wake(barrier.waiting);
}

bool has_ended(Place place, u32 parity) { return barrier_at(place).parity != (parity & 1); }

void wait_barrier(Place place, u32 parity) {
    if (place.program != current->program) fail("a wait for another program's mbarrier");
    while (!has_ended(place, parity)) block(barrier_at(place).waiting, {"mbarrier", place.offset, parity});
}

// ---- barriers of programs and clusters ----

bool meet_named(u32 number, u32 threads, bool waits, bool own) {
    if (number >= 16) fail("there is no barrier %u", number);
    if (threads % 32) fail("barrier %u of %u threads: they are whole warps", number, threads);
    NamedBarrier& barrier = current->program->named[number];
    if (barrier.arrived && barrier.wanted != threads)
        fail("barrier %u of %u threads, while others are at it with %u", number, threads, barrier.wanted);
    barrier.wanted = threads;
    barrier.given |= own;
    u32 all = threads ? threads : current->program->live;
    if (++barrier.arrived == all) {
        barrier.arrived = 0;
        barrier.result = barrier.given;
        barrier.given = false;
        wake(barrier.waiting);
    } else if (waits) {
        block(barrier.waiting, {"named barrier", number, all});
    }
    return barrier.result;
}

namespace {

void end_phase_if_all_arrived(Cluster& cluster) {
    if (cluster.arrived == 0 || cluster.arrived < cluster.live) return;
    cluster.arrived = 0;
    ++cluster.phase;
    wake(cluster.waiting);
}

}  // namespace

void arrive_cluster() {
    Cluster& cluster = *current->program->cluster;
    if (current->cluster_phase > cluster.phase) fail("a second arrival at the cluster's barrier before the wait");
    current->cluster_phase = cluster.phase + 1;
    ++cluster.arrived;
    end_phase_if_all_arrived(cluster);
}

void wait_cluster() {
    Cluster& cluster = *current->program->cluster;
    while (cluster.phase < current->cluster_phase) block(cluster.waiting, {"the cluster's barrier"});
}

void leave_barriers(Thread& thread) {
    Cluster& cluster = *thread.program->cluster;
    if (thread.cluster_phase > cluster.phase) --cluster.arrived;
    end_phase_if_all_arrived(cluster);
    NamedBarrier& all = thread.program->named[0];
    if (all.arrived == 0 || all.wanted || all.arrived < thread.program->live) return;
    all.arrived = 0;
    wake(all.waiting);
}

}  // namespace emulator
