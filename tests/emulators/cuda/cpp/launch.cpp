// The start and the end of a launch, and what it reports.

#include <sys/mman.h>

#include <csignal>
#include <cstdarg>
#include <cstdio>

#include "state.h"

namespace emulator {

Thread* current = nullptr;
Launch launch;
std::unique_ptr<Machine> machine;

// ---- reports ----

namespace {

std::string waiting_for(const Thread& thread) {
    const Wait& wait = thread.wait;
    char text[240];
    if (wait.what == nullptr) return "can run";
    if (strcmp(wait.what, "mbarrier") == 0) {
        const Barrier& barrier = *find_barrier(*thread.program, wait.object);
        snprintf(
            text, sizeof text, "mbarrier at %#llx, parity %llu (its phase of parity %u lacks %u of %u arrivals, %lld bytes)",
            wait.object, wait.detail, barrier.parity, barrier.pending, barrier.expected, barrier.bytes
        );
    } else if (strcmp(wait.what, "named barrier") == 0) {
        u32 there = thread.program->named[wait.object].arrived;
        snprintf(text, sizeof text, "barrier %llu (%u of %llu threads are there)", wait.object, there, wait.detail);
    } else if (strcmp(wait.what, "lanes") == 0) {
        snprintf(text, sizeof text, "%s of lanes %08llx", reinterpret_cast<const char*>(wait.object), wait.detail);
    } else {
        return wait.what;
    }
    return text;
}

}  // namespace

// Lanes of a warp that wait for the same are one line.
std::string all_waits() {
    std::string all;
    const Thread* end = machine->threads.data() + machine->threads.size();
    for (const Thread* first = machine->threads.data(); first < end; ++first) {
        const Thread* stop = std::min(end, first - first->lane + 32);
        u32 lanes = 0;
        bool is_first = true;
        for (const Thread* lane = first - first->lane; lane < stop && lane->warp == first->warp; ++lane) {
            if (lane->ended || waiting_for(*lane) != waiting_for(*first)) continue;
            lanes |= 1u << lane->lane;
            is_first &= lane >= first;
        }
        if (first->ended || !is_first) continue;
        char head[96];
        snprintf(head, sizeof head, "\n  program %u, warp %d, lanes %08x: ", first->program->number, first->warp->number, lanes);
        all += head + waiting_for(*first);
    }
    return all;
}

void fail(const char* format, ...) {
    char text[16384];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    if (current != nullptr) {
        char place[96];
        snprintf(
            place, sizeof place, "program %u, warp %d, lane %d: ", current->program->number, current->warp->number,
            current->lane
        );
        machine->error = place;
    }
    machine->error += text;
    _longjmp(machine->out, 1);
}

namespace {

// ---- accesses outside of all memory ----

// While it lives, an access to such memory ends the launch, not the process.
class AccessGuard {
public:
    AccessGuard() {
        stack_t own{};
        own.ss_sp = memory;
        own.ss_size = sizeof memory;
        sigaltstack(&own, &stack_before);
        struct sigaction action {};
        action.sa_sigaction = [](int, siginfo_t* about, void*) { fail("there is no memory at %p", about->si_addr); };
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigaction(SIGSEGV, &action, &segment_before);
        sigaction(SIGBUS, &action, &bus_before);
    }
    ~AccessGuard() {
        sigaction(SIGSEGV, &segment_before, nullptr);
        sigaction(SIGBUS, &bus_before, nullptr);
        sigaltstack(&stack_before, nullptr);
    }

private:
    static inline char memory[64 << 10];
    stack_t stack_before;
    struct sigaction segment_before, bus_before;
};

// ---- the start ----

char* mapped(size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fail("no memory for %zu bytes", bytes);
    return static_cast<char*>(memory);
}

void make_program(u32 number) {
    Program& program = machine->programs[number];
    program.cluster = &machine->clusters[number / launch.cluster];
    program.cluster->live += launch.threads;
    program.number = number;
    program.rank = number % launch.cluster;
    if (program.rank == 0) program.cluster->programs = &program;
    program.live = launch.threads;
    program.size = 2 * FIRST_ADDRESS + STATIC_BYTES + launch.shared_bytes;
    program.memory = mapped(program.size);
    memset(program.memory, 0xff, program.size);
    program.warps.resize((launch.threads + 31) / 32);
    program.warpgroups.resize((launch.threads + 127) / 128);
    for (u32 i = 0; i < launch.threads; ++i) {
        Warp& warp = program.warps[i / 32];
        warp.program = &program;
        warp.number = i / 32;
        warp.lanes |= 1u << i % 32;
        ++warp.live;
        program.warpgroups[i / 128].warps[i / 32 % 4] = &warp;
        Thread& thread = machine->threads[number * launch.threads + i];
        thread.index.x = i;
        thread.lane = i % 32;
        thread.warp = &warp;
        thread.program = &program;
        thread.stack = machine->stacks + (static_cast<size_t>(number) * launch.threads + i) * STACK;
        make_ready(&thread);
    }
}

void check_launch() {
    if (launch.shared_bytes > MOST_BYTES) fail("%u bytes of shared memory; a program has %u", launch.shared_bytes, MOST_BYTES);
    if (launch.programs % launch.cluster) fail("%u programs are no clusters of %u", launch.programs, launch.cluster);
    if (launch.threads == 0 || launch.threads > 1024) fail("%u threads in a program", launch.threads);
}

void make_programs() {
    Machine& m = *machine;
    m.clusters.resize(launch.programs / launch.cluster);
    m.programs.resize(launch.programs);
    m.threads.resize(static_cast<size_t>(launch.programs) * launch.threads);
    m.stack_bytes = m.threads.size() * STACK;
    m.stacks = mapped(m.stack_bytes);
    for (u32 number = 0; number < launch.programs; ++number) make_program(number);
}

void run_launch() {
    machine = std::make_unique<Machine>();
    machine->random = launch.seed * 0x9e3779b97f4a7c15 + 0x2545f4914f6cdd1d;
    if (_setjmp(machine->out) == 0) {
        check_launch();
        make_programs();
        run_threads();
    }
    current = nullptr;
    if (machine->stacks != nullptr) munmap(machine->stacks, machine->stack_bytes);
    for (Program& program : machine->programs)
        if (program.memory != nullptr) munmap(program.memory, program.size);
}

}  // namespace
}  // namespace emulator

// Run a launch. Returns null, or what went wrong, which is valid until the next launch.
extern "C" const char* emulator_run(const emulator::Launch* given) {
    emulator::launch = *given;
    emulator::AccessGuard guard;
    emulator::run_launch();
    return emulator::machine->error.empty() ? nullptr : emulator::machine->error.c_str();
}
