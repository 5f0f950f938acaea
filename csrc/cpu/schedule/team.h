// Threads that go through a sequence of phases together, awake from the first to the last: between two products a thread that sleeps
// takes longer to wake than what lies between them. What is left of a phase goes to whoever comes; a phase ends when all of it is
// done, however many threads there are.
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
  // Takes one after the other of what others leave of `count`, and waits for them.
  template <typename Work>
  void each(int64_t count, const Work& work) {
    for (int64_t i; (i = next_.fetch_add(1)) < count;) {
      work(i);
      done_.fetch_add(1, std::memory_order_release);
    }
    wait(count);
  }

  // The same in turns, less each time, so that one which is held up holds up none. `on_first` is called with the first turn.
  template <typename OnFirst, typename Work>
  void turns(int64_t count, int64_t minimum, int64_t threads, const OnFirst& on_first, const Work& work) {
    int64_t at, stop;
    const bool any = take(count, minimum, threads, at, stop);
    on_first(any ? at : count);
    for (bool more = any; more; more = take(count, minimum, threads, at, stop)) {
      work(at, stop);
      done_.fetch_add(stop - at, std::memory_order_release);
    }
    wait(count);
  }

 private:
  bool take(int64_t count, int64_t minimum, int64_t threads, int64_t& at, int64_t& stop) {
    for (at = next_.load();;) {
      if (at >= count) return false;
      stop = std::min(at + std::max((count - at) / (2 * threads), minimum), count);
      if (next_.compare_exchange_weak(at, stop)) return true;
    }
  }

  void wait(int64_t count) const {
    for (int looks = 0; done_.load(std::memory_order_acquire) < count; looks++) {
      if (looks > 4096) std::this_thread::yield();  // another one has the processor
#if defined(__x86_64__)
      else _mm_pause();
#endif
    }
  }

  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> done_{0};
};

// `work(i)` on as many of torch's threads as it lends, `threads` at most, each with a number of its own.
template <typename Work>
void as_team(int64_t threads, const Work& work) {
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t) { work(begin); });
}

}  // namespace lowbit::cpu
