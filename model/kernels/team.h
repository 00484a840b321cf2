// Threads that walk through a forward together: one parallel region, and between its phases a barrier that spins.
//
// A forward has some 300 phases of a few microseconds; opening a parallel region for each would cost more than the
// work. Work of a phase is handed out by a counter, so a thread that lost its core to a neighbour holds nobody up for
// longer than its current item. Which thread does an item never changes the item's result.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace blockcast {

class Team {
 public:
  // Calls item(i, i_after) for each i in [0, count), shared between the threads, then waits for all of them.
  // i_after is the item this thread takes next (>= count: none), so that its data can be fetched ahead.
  template <class Item>
  void each(int64_t count, Item item) {
    if (size_ == 1) {
      for (int64_t i = 0; i < count; ++i) item(i, i + 1);
      return;
    }
    for (int64_t i = take(); i < count;) {
      const int64_t after = take();
      item(i, after);
      i = after;
    }
    barrier();
  }

  // Runs body(team) on `threads` threads (fewer where the machine gives fewer; the results are the same).
  template <class Body>
  static void run(int threads, Body body) {
    Team team;
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
      team.size_ = omp_get_num_threads();
      body(team);
    }
#else
    (void)threads;
    body(team);
#endif
  }

 private:
  static constexpr int SPINS = 2000;  // some 50 microseconds, then the core is offered to others

  int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

  void barrier() {
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spin = 0; phase_.load(std::memory_order_acquire) == phase; ++spin) {
      if (spin < SPINS) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      } else {
        std::this_thread::yield();
      }
    }
  }

  int size_ = 1;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};
};

}  // namespace blockcast
