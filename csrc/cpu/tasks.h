// The rows of a weight over torch's threads, and the room that they work in.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <thread>

#include "linear.h"

namespace lowbit::cpu {

// The rows of the weight over torch's threads, in tasks of eight, so that no thread's share cuts a tile of rows; a thread takes
// at least so many weights.
template <typename Multiply>
void in_tasks(const Linear& a, const Multiply& multiply) {
  constexpr int64_t rows = 8, weights = 1 << 16;
  const int64_t grain = weights / (rows * (a.k > 0 ? a.k : 1)) + 1;
  torch::stable::parallel_for(0, (a.n + rows - 1) / rows, grain, [&](int64_t begin, int64_t end) {
    multiply(begin * rows, end * rows < a.n ? end * rows : a.n);
  });
}

// The same in turns of `weights` and more: a thread takes part of what is left, less each time, so that one which is held up by
// others holds up none. It takes its next turn before it multiplies the `last` rows of one, which are a call of their own, so
// that what they read ahead is what it goes on with. `begin_with` is called once by each thread, with its first turn. `rows`: turns
// are of multiples of as many.
template <typename Multiply, typename BeginWith>
void in_turns(const Linear& a, int64_t rows, int64_t weights, int64_t last, const Multiply& multiply, const BeginWith& begin_with) {
  constexpr int64_t of_thread = 1 << 17;
  const int64_t tasks = (a.n + rows - 1) / rows, of_task = rows * (a.k > 0 ? a.k : 1), least = weights / of_task + 1;
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, tasks, of_thread / of_task + 1, [&](int64_t begin, int64_t end) {
    const auto take = [&](Turn& turn) {
      for (int64_t at = next.load();;) {
        if (at >= tasks) return false;
        const int64_t half_share = (tasks - at) * (end - begin) / (2 * tasks);
        const int64_t past = std::min(at + std::max(half_share, least), tasks);
        if (!next.compare_exchange_weak(at, past)) continue;
        turn = {at * rows, std::min(past * rows, a.n), 0};
        return true;
      }
    };
    Turn turn, following;
    bool more = take(turn);
    if (more) begin_with(turn);
    for (; more; turn = following) {
      const int64_t from = std::max(turn.begin, turn.end - last);
      if (turn.begin < from) multiply(Turn{turn.begin, from, from});
      more = take(following);
      if (from < turn.end) multiply(Turn{from, turn.end, more ? following.begin : turn.end});
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
struct Freed {
  void operator()(void* room) const { std::free(room); }
};
template <typename T>
std::unique_ptr<T[], Freed> lines_of(int64_t count) {
  constexpr size_t line = 64;
  void* const room = std::aligned_alloc(line, (count * sizeof(T) + line - 1) / line * line);
  STD_TORCH_CHECK(room || !count, "no memory for ", count, " numbers");
  return std::unique_ptr<T[], Freed>(static_cast<T*>(room));
}

}  // namespace lowbit::cpu
