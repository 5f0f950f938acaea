// Threads that go through a sequence of phases together and spin between them: waking a sleeping thread takes longer than the
// work between two products of a decoder layer. Work in a phase is claimed dynamically; a phase ends when all of it is done, with
// any number of threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lowbit::cpu {

class Phase {
 public:
  // Claims the items of `count` one at a time, then waits until all are done.
  template <typename Work>
  void each(int64_t count, const Work& work) {
    for (int64_t i; (i = next_.fetch_add(1)) < count;) {
      work(i);
      done_.fetch_add(1, std::memory_order_release);
    }
    wait(count);
  }

  // The same in decreasing ranges (guided scheduling) of at least `minimum` items. `on_first(begin)`: once in each thread.
  template <typename OnFirst, typename Work>
  void each_range(int64_t count, int64_t minimum, int64_t threads, const OnFirst& on_first, const Work& work) {
    int64_t at, stop;
    const bool any = claim(count, minimum, threads, at, stop);
    on_first(any ? at : count);
    for (bool has_next = any; has_next; has_next = claim(count, minimum, threads, at, stop)) {
      work(at, stop);
      done_.fetch_add(stop - at, std::memory_order_release);
    }
    wait(count);
  }

 private:
  bool claim(int64_t count, int64_t minimum, int64_t threads, int64_t& at, int64_t& stop) {
    for (at = next_.load();;) {
      if (at >= count) return false;
      stop = std::min(at + std::max((count - at) / (2 * threads), minimum), count);
      if (next_.compare_exchange_weak(at, stop)) return true;
    }
  }

  void wait(int64_t count) const {
    for (int spins = 0; done_.load(std::memory_order_acquire) < count; spins++) {
      if (spins > 4096) std::this_thread::yield();  // another thread may need this core
#if defined(__x86_64__)
      else _mm_pause();
#endif
    }
  }

  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> done_{0};
};

// Runs `work(i)` on up to `threads` of torch's threads, each with its own i.
template <typename Work>
void as_team(int64_t threads, const Work& work) {
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t) { work(begin); });
}

}  // namespace lowbit::cpu
