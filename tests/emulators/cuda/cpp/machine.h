// The emulated machine: clusters of programs, their warps and threads, shared memory, barriers and work under way.
//
// Every CUDA thread is a fiber. A fiber runs until it must wait for others; then a scheduler picks another one, in an
// order that follows from a seed alone. Copies and products of warpgroups are tasks, which the same scheduler ends at
// some later point. `fail` ends the launch from anywhere, with a message.
#pragma once

#include <array>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

using u8 = uint8_t;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using u128 = unsigned __int128;

namespace emulator {

struct Thread;
using Waiters = std::vector<Thread*>;

struct Index {
    unsigned x = 0, y = 0, z = 0;
};

// An mbarrier. Its eight bytes of shared memory hold a mark, so that a write over them is noticed.
struct Barrier {
    u32 offset, expected, pending;
    long long bytes = 0;
    u32 parity = 0;
    Waiters waiting;
};

// `bar.sync` and `bar.arrive` of one number.
struct NamedBarrier {
    u32 wanted = 0, arrived = 0;
    bool given = false, result = false;  // whether a thread that arrived gave true; of the last meeting
    Waiters waiting;
};

// The lanes of a warp at one instruction that they execute together.
struct Meeting {
    const char* what;
    u32 mask, arrived;
    void* operands[32];
    Waiters waiting;
};

// Registers that products under way add to. They hold NaN until a wait; here is what they will hold.
struct Accumulators {
    std::vector<float*> registers;  // [lane][sum]
    std::vector<float> values;      // [lane][sum]
    int products = 0;               // not yet waited for
};

// A warp's part of a warpgroup's product.
struct Product {
    u64 operands;  // the same in all warps
    std::function<void(float* values)> run;
    Accumulators* sums;
};

struct Program;

struct Warp {
    Program* program;
    int number;
    u32 lanes = 0, live = 0;
    std::list<Meeting> meetings;
    bool fenced = false;  // `wgmma.fence` came before the products
    std::list<Accumulators> sums;
    std::vector<Product> products;  // all that were issued
    std::vector<u32> groups;        // the number of products that had been issued at each commit
    u32 begun = 0, ended = 0, groups_ended = 0;
};

// A product of a warpgroup begins when all four warps have issued it, so that its end tells of all of them.
struct Warpgroup {
    std::array<Warp*, 4> warps{};
    Waiters waiting;
};

struct Cluster;

struct Program {
    Cluster* cluster;
    u32 number, rank;
    char* memory = nullptr;
    u32 size, live = 0, copies_under_way = 0;
    std::list<Barrier> barriers;
    NamedBarrier named[16];
    std::vector<Warp> warps;
    std::vector<Warpgroup> warpgroups;
};

struct Cluster {
    Program* programs;  // as many as `launch.cluster`
    u32 live = 0, arrived = 0, phase = 0;
    Waiters waiting;
};

// Why a thread does not run; `object` and `detail` depend on `what`.
struct Wait {
    const char* what = nullptr;
    u64 object = 0, detail = 0;
};

struct Thread {
    Index index;
    int lane;
    Warp* warp;
    Program* program;
    Wait wait;
    bool started = false, ended = false, slow = false;
    u32 cluster_phase = 0;  // at its last arrival
    std::vector<u64> copies;   // tasks of `cp.async` and bulk stores
    std::vector<u32> groups;   // the number of copies that had been started at each commit
    u32 groups_ended = 0;
    jmp_buf context;
    char* stack;
};

struct Launch {
    u32 programs, cluster, threads, shared_bytes;
    u64 seed;
    void (*kernel)(void**);
    void** arguments;
    // What the kernels before write, which is there when `griddepcontrol.wait` returns: pairs of target and source.
    const u64* before;  // [num_before][target, source, bytes]
    u32 num_before;
};

extern Thread* current;  // null while a task ends
extern Launch launch;

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- the scheduler ----

u64 random_below(u64 limit);
void block(Waiters& waiters, Wait wait);
void wake(Waiters& waiters);
void pause_thread();                       // lets others run
u64 add_task(std::function<void()> task);  // it ends at some later point; tasks end in any order
void end_task(u64 number);                 // now, unless it has ended
bool task_ended(u64 number);
void wait_for_kernels_before();

// ---- shared memory ----

constexpr u32 FIRST_ADDRESS = 1024;     // what a real program finds below is not its own
constexpr u32 STATIC_BYTES = 32 << 10;  // at most, of variables
constexpr u32 MOST_BYTES = 227 << 10;
constexpr int RANK_SHIFT = 24;  // an address in a cluster: rank + 1, address in the program

struct Place {
    Program* program;
    u32 offset;
};

Place place(u32 address);
char* memory_at(Place place, u32 bytes, u32 alignment);
inline char* memory_at(u32 address, u32 bytes, u32 alignment) { return memory_at(place(address), bytes, alignment); }
u32 address_of(const void* pointer);
u32 address_in(u32 address, u32 rank);
void* dynamic_memory(u32 alignment);
void* static_memory(const char* name, u32 bytes, u32 alignment);

template <class T>
T* dynamic_shared(u32 alignment) {
    return static_cast<T*>(dynamic_memory(alignment > alignof(T) ? alignment : alignof(T)));
}

template <class T>
T& shared_variable(const char* name, u32 alignment) {
    return *static_cast<T*>(static_memory(name, sizeof(T), alignment > alignof(T) ? alignment : alignof(T)));
}

// ---- barriers ----

void make_barrier(Place place, u32 arrivals);
Barrier* find_barrier(Program& program, u32 offset);
Barrier& barrier_at(Place place);
void forget_barrier(Place place);
void change_barrier(Place place, u32 arrivals, long long bytes);  // bytes that are expected, or come (below zero)
bool has_ended(Place place, u32 parity);                          // the phase of that parity
void wait_barrier(Place place, u32 parity);
bool meet_named(u32 number, u32 threads, bool waits, bool own = false);  // whether any thread gave true
void arrive_cluster();
void wait_cluster();
void leave_barriers(Thread& thread);  // one that has ended is no longer waited for

// ---- warps ----

// The lanes of `mask` come together; the last calls `act(operands of lanes)` for all of them.
void together(const char* what, u32 mask, void* operands, const std::function<void(void**)>& act);

void add_product(u64 operands, std::vector<float*> registers, std::function<void(float* values)> run);
void commit_products();
void wait_products(u32 pending);

// ---- types ----

template <class To, class From>
To& as_register(From& value) {
    static_assert(sizeof(To) == sizeof(From), "an operand of inline PTX has another size than its constraint");
    return reinterpret_cast<To&>(value);
}

template <class To, class From>
To bits_of(From value) {
    static_assert(sizeof(To) == sizeof(From), "types of different sizes");
    To result;
    std::memcpy(&result, &value, sizeof(To));
    return result;
}

inline float float_of(u32 bits) { return bits_of<float>(bits); }

}  // namespace emulator
