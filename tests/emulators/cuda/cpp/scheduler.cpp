// Fibers: which one runs next, and when tasks end.

#include <ucontext.h>

#include "state.h"

namespace emulator {

namespace {

constexpr u64 MOST_TURNS = 100'000'000;  // of a launch: then it is taken to run forever

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

}  // namespace

void make_ready(Thread* thread) { (thread->slow ? machine->slow : machine->ready).push_back(thread); }

namespace {

template <class T>
T take_any(std::vector<T>& from) {
    std::swap(from[random_below(from.size())], from.back());
    T taken = from.back();
    from.pop_back();
    return taken;
}

// ---- the order of events ----

// Some programs, warps or lanes run only now and then, so that others get far ahead; tasks end at once, or much later.
void draw_speeds() {
    constexpr u64 RATES[] = {1, 3, 16, 256, 4096};
    machine->task_rate = RATES[random_below(5)];
    enum { EQUAL, PROGRAMS, WARPS, LANES } differ = static_cast<decltype(differ)>(random_below(4));
    bool slow = false;
    for (Thread& thread : machine->threads) {
        bool is_drawn = differ == LANES || (differ == WARPS && thread.lane == 0) || (differ && thread.index.x == 0);
        if (is_drawn) slow = random_below(3) == 0;
        thread.slow = slow;
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
    bool takes_slow = ready.empty() || (!slow.empty() && random_below(256) == 0);
    run(*take_any(takes_slow ? slow : ready));
}

bool any_live() {
    for (Cluster& cluster : machine->clusters)
        if (cluster.live) return true;
    return false;
}

}  // namespace

void run_threads() {
    if (random_below(2)) end_kernels_before();  // long ago
    for (u64 turn = 0, next = 0; any_live(); ++turn) {
        if (turn == next) {
            draw_speeds();
            next += machine->threads.size() * (4 + random_below(64));
        }
        if (turn == MOST_TURNS) fail("the kernel runs on and on:%s", all_waits().c_str());
        take_turn();
    }
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
