// The rows of a weight over torch's threads, and the room that they work in.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <thread>

#include "../kernels/linear.h"

namespace lowbit::cpu {

// The rows of the weight over torch's threads, in tasks of eight, so that no thread's share cuts a tile of rows; a thread takes
// at least so many weights.
template <typename Multiply>
void parallel_rows(const Linear& a, const Multiply& multiply) {
  constexpr int64_t rows = 8, weights = 1 << 16;
  const int64_t grain = weights / (rows * (a.k > 0 ? a.k : 1)) + 1;
  torch::stable::parallel_for(0, (a.n + rows - 1) / rows, grain, [&](int64_t begin, int64_t end) {
    multiply(begin * rows, end * rows < a.n ? end * rows : a.n);
  });
}

// The same in turns of `weights` and more: a thread takes part of what is left, less each time, so that one which is held up by
// others holds up none. It takes its next turn before it multiplies the `last` rows of one, which are a call of their own, so
// that what they read ahead is what it goes on with. `on_first` is called once by each thread, with its first turn. `rows`: turns
// are of multiples of as many.
template <typename Multiply, typename OnFirst>
void parallel_dynamic(const Linear& a, int64_t rows, int64_t weights, int64_t last, const Multiply& multiply, const OnFirst& on_first) {
  const int64_t of_thread = std::min<int64_t>(weights, 1 << 17);
  const int64_t tasks = (a.n + rows - 1) / rows, of_task = rows * (a.k > 0 ? a.k : 1), minimum = weights / of_task + 1;
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, tasks, of_thread / of_task + 1, [&](int64_t begin, int64_t end) {
    const auto claim = [&](RowRange& range) {
      for (int64_t at = next.load();;) {
        if (at >= tasks) return false;
        const int64_t half_share = (tasks - at) * (end - begin) / (2 * tasks);
        const int64_t stop = std::min(at + std::max(half_share, minimum), tasks);
        if (!next.compare_exchange_weak(at, stop)) continue;
        range = {at * rows, std::min(stop * rows, a.n), 0};
        return true;
      }
    };
    RowRange range, following;
    bool more = claim(range);
    if (more) on_first(range);
    for (; more; range = following) {
      const int64_t from = std::max(range.begin, range.end - last);
      if (range.begin < from) multiply(RowRange{range.begin, from, from});
      more = claim(following);
      if (from < range.end) multiply(RowRange{from, range.end, more ? following.begin : range.end});
    }
  });
}

// Work that one of some threads does, the first that comes, and for which the others wait.
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

// Room that kernels read a register at a time: it begins with a line, since a register from two of them takes twice as long.
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
