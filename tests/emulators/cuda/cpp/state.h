// What a launch consists of, for the scheduler and for launches.
#pragma once

#include "machine.h"

namespace emulator {

constexpr size_t STACK = 128 << 10;  // of a fiber

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
    jmp_buf scheduler, out;  // where a fiber goes when it waits, and where a failure goes
    char* stacks = nullptr;
    size_t stack_bytes = 0;
    std::string error;
};

extern std::unique_ptr<Machine> machine;

std::string all_waits();  // where each warp waits
void make_ready(Thread* thread);
void run_threads();  // to the end of all

}  // namespace emulator
