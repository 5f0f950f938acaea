// Distribution of a weight's rows over torch's threads, and aligned buffers.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <thread>

#include "../kernels/linear.h"

namespace lowbit::cpu {

// Static split: `multiply(begin, end)` over all rows, in multiples of eight, so that no thread cuts a tile of rows, and with at
// least 65536 weights for each thread.
template <typename Multiply>
void parallel_rows(const Linear& a, const Multiply& multiply) {
  constexpr int64_t rows = 8, weights = 1 << 16;
  const int64_t grain = weights / (rows * (a.k > 0 ? a.k : 1)) + 1;
  torch::stable::parallel_for(0, (a.n + rows - 1) / rows, grain, [&](int64_t begin, int64_t end) {
    multiply(begin * rows, end * rows < a.n ? end * rows : a.n);
  });
}

// Dynamic split in multiples of `rows` rows and at least `min_weights` weights: a thread claims a decreasing part of what is left
// (guided scheduling), so that a thread that is delayed delays no other. The next range is claimed before the `last_rows` of the
// current one are multiplied, in a call of their own, so that their prefetches reach into it. `on_first(range)`: once in each
// thread.
template <typename Multiply, typename OnFirst>
void parallel_dynamic(const Linear& a, int64_t rows, int64_t min_weights, int64_t last_rows, const Multiply& multiply,
                      const OnFirst& on_first) {
  const int64_t min_weights_per_thread = std::min<int64_t>(min_weights, 1 << 17);
  const int64_t tasks = (a.n + rows - 1) / rows, weights_per_task = rows * (a.k > 0 ? a.k : 1);
  const int64_t min_tasks = min_weights / weights_per_task + 1;
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, tasks, min_weights_per_thread / weights_per_task + 1, [&](int64_t begin, int64_t end) {
    const auto claim = [&](RowRange& range) {
      for (int64_t task = next.load();;) {
        if (task >= tasks) return false;
        const int64_t half_share = (tasks - task) * (end - begin) / (2 * tasks);
        const int64_t stop = std::min(task + std::max(half_share, min_tasks), tasks);
        if (!next.compare_exchange_weak(task, stop)) continue;
        range = {task * rows, std::min(stop * rows, a.n), 0};
        return true;
      }
    };
    RowRange range, next_range;
    bool has_next = claim(range);
    if (has_next) on_first(range);
    for (; has_next; range = next_range) {
      const int64_t last_begin = std::max(range.begin, range.end - last_rows);
      if (range.begin < last_begin) multiply(RowRange{range.begin, last_begin, last_begin});
      has_next = claim(next_range);
      if (last_begin < range.end) multiply(RowRange{last_begin, range.end, has_next ? next_range.begin : range.end});
    }
  });
}

// Work done by the first thread that calls; the others wait for it.
class Once {
 public:
  template <typename Work>
  void operator()(const Work& work) {
    int state = to_do;
    if (state_.compare_exchange_strong(state, begun)) {
      work();
      state_.store(done, std::memory_order_release);
    } else {
      while (state_.load(std::memory_order_acquire) != done) std::this_thread::yield();
    }
  }

 private:
  enum { to_do, begun, done };
  std::atomic<int> state_{to_do};
};

// A buffer aligned to a cache line: a vector load that crosses lines takes twice as long.
struct FreeDeleter {
  void operator()(void* memory) const { std::free(memory); }
};
template <typename T>
std::unique_ptr<T[], FreeDeleter> aligned_buffer(int64_t count) {
  constexpr size_t line = 64;
  void* const memory = std::aligned_alloc(line, (count * sizeof(T) + line - 1) / line * line);
  STD_TORCH_CHECK(memory || !count, "no memory for ", count, " numbers");
  return std::unique_ptr<T[], FreeDeleter>(static_cast<T*>(memory));
}

}  // namespace lowbit::cpu
