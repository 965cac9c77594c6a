// Which fiber runs next, when tasks end, and what is reported when nothing can go on.

#include <sys/mman.h>
#include <ucontext.h>

#include <cstdarg>
#include <cstdio>

#include "machine.h"

namespace emulator {

Thread* current = nullptr;
Launch launch;

namespace {

constexpr size_t STACK = 128 << 10;
constexpr u64 MOST_TURNS = 100'000'000;  // of a launch: then it is taken to run forever
constexpr u64 TURNS_OF_SPEEDS = 4096;

struct Machine {
    std::vector<Cluster> clusters;
    std::vector<Program> programs;
    std::vector<Thread> threads;
    std::vector<Thread*> ready, slow;
    std::vector<std::function<void()>> tasks;  // empty where they have ended
    std::vector<u64> under_way;                // tasks, of which some have ended
    u64 random, task_rate = 1;
    bool kernels_ended = false;
    Waiters for_kernels;
    jmp_buf scheduler, out;
    std::string error;
};

std::unique_ptr<Machine> machine;

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

// ---- fibers ----

void enter() {
    launch.kernel(launch.arguments);
    current->ended = true;
    _longjmp(machine->scheduler, 1);
}

void start(Thread& thread) {
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = thread.stack;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, enter, 0);
    thread.started = true;
    setcontext(&context);
}

void end(Thread& thread) {
    Warp& warp = *thread.warp;
    --thread.program->live, --thread.program->cluster->live;
    if (--warp.live == 0 && !warp.sums.empty()) fail("the warp ended before its products were waited for");
    for (u64 task : thread.copies)
        if (!task_ended(task)) fail("the thread ended before its copies were waited for");
    if (thread.program->live == 0 && thread.program->copies_under_way)
        fail("the program ended before the copies into its memory");
    leave_barriers(thread);
}

void run(Thread& thread) {
    current = &thread;
    thread.wait = {};
    if (_setjmp(machine->scheduler) == 0) {
        if (thread.started) _longjmp(thread.context, 1);
        start(thread);
    }
    if (thread.ended) end(thread);
    current = nullptr;
}

void make_ready(Thread* thread) { (thread->warp->slow ? machine->slow : machine->ready).push_back(thread); }

template <class T>
T take_any(std::vector<T>& from) {
    std::swap(from[random_below(from.size())], from.back());
    T taken = from.back();
    from.pop_back();
    return taken;
}

// ---- the order of events ----

// Some programs, or some warps, run only now and then, so that others get far ahead; tasks end at once, or much later.
void draw_speeds() {
    constexpr u64 RATES[] = {1, 3, 16, 256, 4096};
    machine->task_rate = RATES[random_below(5)];
    enum { EQUAL, SLOW_PROGRAMS, SLOW_WARPS } kind = static_cast<decltype(kind)>(random_below(3));
    for (Program& program : machine->programs) {
        bool slow_program = random_below(3) == 0;
        for (Warp& warp : program.warps) warp.slow = kind == SLOW_PROGRAMS ? slow_program : kind && random_below(4) == 0;
    }
    std::vector<Thread*> all = std::move(machine->ready);
    all.insert(all.end(), machine->slow.begin(), machine->slow.end());
    machine->ready.clear(), machine->slow.clear();
    for (Thread* thread : all) make_ready(thread);
}

// The kernels before end late, often when nothing else is left to do.
bool end_kernels_before() {
    if (machine->kernels_ended) return false;
    for (u32 i = 0; i < launch.num_before; ++i) {
        const u64* copy = launch.before + 3 * i;
        memcpy(reinterpret_cast<void*>(copy[0]), reinterpret_cast<void*>(copy[1]), copy[2]);
    }
    machine->kernels_ended = true;
    wake(machine->for_kernels);
    return true;
}

bool end_some_task() {
    while (!machine->under_way.empty()) {
        u64 number = take_any(machine->under_way);
        if (task_ended(number)) continue;
        end_task(number);
        return true;
    }
    return false;
}

void take_turn() {
    auto &ready = machine->ready, &slow = machine->slow;
    bool idle = ready.empty() && slow.empty();
    if (random_below(idle ? 16 : 50'000) == 0 && end_kernels_before()) return;
    if ((idle || random_below(machine->task_rate) == 0) && end_some_task()) return;
    if (idle && end_kernels_before()) return;
    if (idle) fail("no thread can go on:%s", all_waits().c_str());
    bool takes_slow = ready.empty() || (!slow.empty() && random_below(64) == 0);
    run(*take_any(takes_slow ? slow : ready));
}

bool any_live() {
    for (Cluster& cluster : machine->clusters)
        if (cluster.live) return true;
    return false;
}

// ---- the start ----

char* mapped(size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fail("no memory for %zu bytes", bytes);
    return static_cast<char*>(memory);
}

void make_program(u32 number, char* stacks) {
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
        thread.stack = stacks + (static_cast<size_t>(number) * launch.threads + i) * STACK;
        make_ready(&thread);
    }
}

void check_launch() {
    if (launch.shared_bytes > MOST_BYTES) fail("%u bytes of shared memory; a program has %u", launch.shared_bytes, MOST_BYTES);
    if (launch.programs % launch.cluster) fail("%u programs are no clusters of %u", launch.programs, launch.cluster);
    if (launch.threads == 0 || launch.threads > 1024) fail("%u threads in a program", launch.threads);
}

void run_launch() {
    machine = std::make_unique<Machine>();
    Machine& m = *machine;
    m.random = launch.seed * 0x9e3779b97f4a7c15 + 0x2545f4914f6cdd1d;
    size_t stack_bytes = static_cast<size_t>(launch.programs) * launch.threads * STACK;
    char* stacks = nullptr;
    if (_setjmp(m.out) == 0) {
        check_launch();
        stacks = mapped(stack_bytes);
        m.clusters.resize(launch.programs / launch.cluster);
        m.programs.resize(launch.programs);
        m.threads.resize(static_cast<size_t>(launch.programs) * launch.threads);
        for (u32 number = 0; number < launch.programs; ++number) make_program(number, stacks);
        for (u64 turn = 0; any_live(); ++turn) {
            if (turn % TURNS_OF_SPEEDS == 0) draw_speeds();
            if (turn == MOST_TURNS) fail("the kernel runs on and on:%s", all_waits().c_str());
            take_turn();
        }
    }
    current = nullptr;
    if (stacks != nullptr) munmap(stacks, stack_bytes);
    for (Program& program : m.programs)
        if (program.memory != nullptr) munmap(program.memory, program.size);
}

}  // namespace

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

u64 random_below(u64 limit) {
    u64& x = machine->random;
    x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
    return (x * 0x2545f4914f6cdd1d >> 32) % limit;
}

void block(Waiters& waiters, Wait wait) {
    waiters.push_back(current);
    current->wait = wait;
    if (_setjmp(current->context) == 0) _longjmp(machine->scheduler, 1);
}

void wake(Waiters& waiters) {
    for (Thread* thread : waiters) make_ready(thread);
    waiters.clear();
}

void pause_thread() {
    make_ready(current);
    if (_setjmp(current->context) == 0) _longjmp(machine->scheduler, 1);
}

u64 add_task(std::function<void()> task) {
    machine->tasks.push_back(std::move(task));
    machine->under_way.push_back(machine->tasks.size() - 1);
    return machine->tasks.size() - 1;
}

void end_task(u64 number) {
    auto task = std::move(machine->tasks[number]);
    machine->tasks[number] = nullptr;
    if (task) task();
}

bool task_ended(u64 number) { return !machine->tasks[number]; }

void wait_for_kernels_before() {
    while (!machine->kernels_ended) block(machine->for_kernels, {"the end of the kernels before"});
}

}  // namespace emulator

// Run a launch. Returns null, or what went wrong, which is valid until the next launch.
extern "C" const char* emulator_run(const emulator::Launch* given) {
    emulator::launch = *given;
    emulator::run_launch();
    return emulator::machine->error.empty() ? nullptr : emulator::machine->error.c_str();
}
