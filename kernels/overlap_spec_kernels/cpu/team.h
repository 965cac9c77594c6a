// Threads that share the items of a loop.
//
// The caller takes items as its helpers do, and a loop ends when its items are done, not when its threads have met: a
// helper that the system has not given a core takes none, and costs nothing. So threads may sleep soon. A helper polls
// for as long as the caller's work between two loops takes, then it sleeps; that is the same on quiet and on shared
// cores, and there is nothing to choose.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace overlap_spec {

constexpr std::chrono::microseconds POLLED{50};

class Team {
  public:
    // One for the process. It is never destroyed: its helpers run until the process ends.
    static Team& of_process() {
        static Team* team = new Team;
        return *team;
    }

    // work(0) .. work(items - 1), on up to so many threads, the caller's included; another caller's loop runs alone.
    template <class Work>
    void run(int64_t items, int threads, const Work& work) {
        std::unique_lock<std::mutex> only(one_caller_, std::defer_lock);
        if (items < 2 || threads < 2 || !only.try_lock()) {
            for (int64_t item = 0; item < items; item++) work(item);
            return;
        }
        engage(threads - 1);
        work_ = &work;
        call_ = [](const void* of, int64_t item) { (*static_cast<const Work*>(of))(item); };
        unfinished_.store(items, std::memory_order_relaxed);
        const uint64_t loop = (tickets_.load(std::memory_order_relaxed) >> 32) + 1;
        tickets_.store(loop << 32 | uint64_t(items));
        if (sleepers_.load() > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            has_work_.notify_all();
        }
        while (take_item()) {
        }
        await_others();
    }

  private:
    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }

    // Polls until the condition holds or time is up.
    template <class Condition>
    static bool polled(const Condition& holds) {
        const auto end = std::chrono::steady_clock::now() + POLLED;
        do {
            for (int i = 0; i < 16; i++) {
                if (holds()) return true;
                pause();
            }
        } while (std::chrono::steady_clock::now() < end);
        return holds();
    }

    bool has_items() const { return uint32_t(tickets_.load()) > 0; }

    // Tickets are the number of the loop, and below it how many of its items are left: who counts it down has one, of
    // this loop and no other, so the loop cannot end before the item is done.
    bool take_item() {
        uint64_t tickets = tickets_.load();
        while (uint32_t(tickets) > 0)
            if (tickets_.compare_exchange_weak(tickets, tickets - 1)) {
                call_(work_, int64_t(uint32_t(tickets)) - 1);
                if (unfinished_.fetch_sub(1) == 1 && caller_sleeps_.load()) {
                    std::lock_guard<std::mutex> lock(mutex_);
                    is_done_.notify_one();
                }
                return true;
            }
        return false;
    }

    void await_others() {
        const auto done = [this] { return unfinished_.load() == 0; };
        if (polled(done)) return;
        std::unique_lock<std::mutex> lock(mutex_);
        caller_sleeps_.store(true);
        is_done_.wait(lock, done);
        caller_sleeps_.store(false);
    }

    void engage(int helpers) {
        engaged_.store(helpers, std::memory_order_relaxed);
        for (; started_ < helpers; started_++) std::thread([this, index = started_] { help(index); }).detach();
    }

    void help(int index) {
        const auto wanted = [this, index] { return has_items() && index < engaged_.load(); };
        for (;;) {
            while (wanted() && take_item()) {
            }
            if (polled(wanted)) continue;
            std::unique_lock<std::mutex> lock(mutex_);
            sleepers_.fetch_add(1);
            has_work_.wait(lock, wanted);
            sleepers_.fetch_sub(1);
        }
    }

    std::mutex one_caller_, mutex_;
    std::condition_variable has_work_, is_done_;
    alignas(64) std::atomic<uint64_t> tickets_{0};
    alignas(64) std::atomic<int64_t> unfinished_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<int> engaged_{0};
    std::atomic<bool> caller_sleeps_{false};
    int started_ = 0;
    const void* work_ = nullptr;
    void (*call_)(const void*, int64_t) = nullptr;
};

}  // namespace overlap_spec
