// Steps of few tokens through decoder layers (norm, query, key and value, attention over kept places, output, norm, gate and up, down)
// on one team of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "decoder.h"
#include "../bindings/prepared_call.h"
#include "gemv_dispatch.h"
#include "../schedule/team.h"

namespace lowbit::cpu {

enum Layer { query, key, value, output, gate, up, down, layers };

// What is between products, for each instruction set.
struct DecoderKernels {
  decltype(&portable::normalize) normalize;
  decltype(&portable::attend) attend;
  decltype(&portable::activate) activate;
  decltype(&portable::add) add;
};

inline const DecoderKernels& decoder_kernels(const InstructionSet& set) {
  static const DecoderKernels plain = {portable::normalize, portable::attend, portable::activate, portable::add};
#if defined(__x86_64__)
  static const DecoderKernels avx2_ = {avx2::normalize, avx2::attend, avx2::activate, avx2::add};
  static const DecoderKernels avx512_ = {avx512::normalize, avx512::attend, avx512::activate, avx512::add};
  if (!std::strcmp(set.name, "avx512")) return avx512_;
  if (!std::strcmp(set.name, "avx2")) return avx2_;
#endif
  return plain;
}

// Memory that one layer after the other works in.
class Arena {
 public:
  template <typename T>
  T* lines(int64_t count) {
    const int64_t bytes = round_up_to_line(count * static_cast<int64_t>(sizeof(T)));
    while (block_ < blocks_.size() && blocks_[block_].bytes - used_ < bytes) block_++, used_ = 0;
    if (block_ == blocks_.size()) blocks_.push_back({aligned_buffer<char>(std::max(bytes, minimum)), std::max(bytes, minimum)}), used_ = 0;
    char* const at = blocks_[block_].memory.get() + used_;
    used_ += bytes;
    return reinterpret_cast<T*>(at);
  }
  // What was taken so far may be taken again.
  void rewind() { block_ = 0, used_ = 0; }

 private:
  static constexpr int64_t minimum = 1 << 18;
  struct Block {
    std::unique_ptr<char[], FreeDeleter> memory;
    int64_t bytes;
  };
  std::vector<Block> blocks_;
  size_t block_ = 0;
  int64_t used_ = 0;
};

// x of one product, or of several that read it, as limbs.
class Rounding {
 public:
  Rounding(const PreparedCall& p, int64_t m, Arena& arena) : p_(&p), a_(p.weight()), without_(new bool[m]()) {
    a_.m = m;
    const SplitInt8Plan& plan = p.plan;
    int64_t limbs, sums;
    if (a_.interleaved) {
      runs_ = runs_of(a_);
      limbs = round_up_to_line(m * a_.k * plan.size), sums = round_up_to_line(m * static_cast<int64_t>(runs_.size()) * plan.count * 4);
    } else {
      limbs = round_up_to_line(plan.steps * m * plan.size * plan.columns), sums = round_up_to_line(plan.steps * m * plan.kernels->lanes * 4);
    }
    int8_t* const scratch = arena.lines<int8_t>(limbs + sums + m * plan.slices * 4);
    int32_t* const sums_at = reinterpret_cast<int32_t*>(scratch + limbs);
    float* const scale_at = reinterpret_cast<float*>(scratch + limbs + sums);
    if (a_.interleaved) {
      of_units_ = {plan.count, p.input_scale, static_cast<int64_t>(runs_.size()), runs_.data(), scratch, sums_at, scale_at, without_.get()};
    } else {
      const int32_t* groups = p.steps();
      of_x_ = {plan.count, p.input_scale, plan.steps, groups, plan.uniform ? nullptr : groups + plan.steps, plan.quad_sums,
               scratch, sums_at, scale_at, without_.get()};
    }
  }

  // Whether the same limbs serve another weight.
  bool serves(const PreparedCall& other) const {
    const Linear &a = p_->a, &b = other.a;
    return a.bits == b.bits && a.k == b.k && a.group == b.group && a.interleaved == b.interleaved && !a.zero_point.data == !b.zero_point.data &&
           p_->input_scale == other.input_scale && p_->plan.count == other.plan.count && p_->plan.offset == other.plan.offset;
  }

  // False where row m has no limbs.
  bool body(const ArrayView& x, int64_t m) const {
    const ByteDecoding decoding = p_->plan.byte_decoding();
    if (a_.interleaved) p_->plan.kernels->pack_limbs_interleaved(a_, decoding, x, of_units_, m, m + 1);
    else p_->plan.kernels->pack_limbs(a_, decoding, x, of_x_, m, m + 1);
    return !without_[m];
  }

  // The sums of some rows of a weight that it serves, in a.y; false where they might not hold.
  bool multiply(const PreparedCall& p, const Linear& a, int64_t begin, int64_t end) const {
    const ByteDecoding decoding = p.plan.byte_decoding();
    const RowRange apply_rope = {begin, end, end};
    if (!a.interleaved) return p.plan.kernels->limbs[a.bits](a, decoding, of_x_, apply_rope);
    p.plan.kernels->interleaved[a.bits](a, decoding, of_units_, apply_rope);
    return true;
  }

 private:
  const PreparedCall* p_;
  Linear a_;
  std::unique_ptr<bool[]> without_;
  std::vector<Run> runs_;
  InterleavedLimbs of_units_ = {};
  PackedLimbs of_x_ = {};
};

// One step: x [m, hidden] to y.
class Step {
 public:
  struct Args {
    const PreparedCall* products[layers];
    Norm attention_norm, mlp_norm;
    Attention attention;  // without query, key, value and y
    int64_t batch;
    const void* x;
    void* y;
  };

  Step(const Args& args, const InstructionSet& set, int64_t threads, Arena& arena)
      : of_(args), set_(set), kernels_(decoder_kernels(set)), m_(args.batch * args.attention.tokens), type_(args.attention.type),
        bytes_(type_ == Dtype::float32 ? 4 : 2), threads_(threads) {
    const auto part = [&](int64_t count) { return arena.lines<char>(m_ * count * bytes_); };
    for (int i = 0; i < layers; i++) {
      linear_[i] = of_.products[i]->weight(), linear_[i].m = m_;
      linear_[i].y = arena.lines<float>(m_ * linear_[i].n);
      made_[i] = i == down ? static_cast<char*>(of_.y) : part(linear_[i].n);
      const bool reads_the_same = i == key || i == value || i == up;
      if (!reads_the_same || !roundings_.back()->serves(*of_.products[i]))
        roundings_.push_back(std::make_unique<Rounding>(*of_.products[i], m_, arena));
      rounding_[i] = roundings_.back().get();
    }
    hidden_ = linear_[query].k;
    normed_ = part(hidden_), attended_ = part(linear_[output].k), active_ = part(linear_[down].k);
    of_.attention.query = made_[query], of_.attention.key = made_[key], of_.attention.value = made_[value];
    of_.attention.y = attended_;
    const Heads& heads = of_.attention.heads;
    const int64_t shared = heads.queries / heads.keys, local = of_.batch * heads.keys;
    const int64_t parts = local % threads_ == 0 ? 1 : std::min(shared, (2 * threads_ + local - 1) / local);
    at_once_ = (shared + parts - 1) / parts;
    scratch_each_ = round_up_to_line(attention_scratch(of_.attention, at_once_) * 4) / 4;
    scratch_ = arena.lines<float>(threads_ * scratch_each_);
  }

  // What thread `member` does of it; each thread of the team calls this, and comes back when all is done.
  void go(int64_t member) {
    product({query, key, value}, &of_.attention_norm, static_cast<const char*>(of_.x), phases_[0], phases_[1], [](int, int64_t, int64_t) {});
    attend(member);
    const auto added_to = [this](const void* residual) {
      return [this, residual](int i, int64_t begin, int64_t end) {
        for (int64_t m = 0; m < m_; m++)
          kernels_.add(type_, static_cast<const char*>(residual) + (m * hidden_ + begin) * bytes_, end - begin, made_[i] + (m * hidden_ + begin) * bytes_);
      };
    };
    product({output}, nullptr, attended_, phases_[3], phases_[4], added_to(of_.x));
    gate_and_up();
    product({down}, nullptr, active_, phases_[7], phases_[8], added_to(made_[output]));
  }

  // False where a product cannot be had by limbs: y means nothing then.
  bool ok() const { return good_; }

 private:
  static constexpr int64_t rows_per_task = 2 * rows_per_block;  // two blocks take turns

  // Row m of x as limbs for some layers, after the norm.
  void body(std::initializer_list<int> of, const Norm* norm, const char* x, int64_t m) {
    if (!good_) return;
    const int64_t k = linear_[*of.begin()].k;
    if (norm) kernels_.normalize(*norm, type_, x + m * k * bytes_, k, normed_ + m * k * bytes_), x = normed_;
    ArrayView numbers;
    numbers.data = x, numbers.stride = k, numbers.dtype = type_;
    const Rounding* before = nullptr;
    for (int i : of) {
      if (rounding_[i] != before && !rounding_[i]->body(numbers, m)) good_ = false;
      before = rounding_[i];
    }
  }

  // Rows begin .. end - 1 of a layer's weight times all rows of x, with the bias, rounded.
  void multiply(int i, int64_t begin, int64_t end) {
    const PreparedCall& p = *of_.products[i];
    if (!rounding_[i]->multiply(p, linear_[i], begin, end)) good_ = false;
    set_.write_output(linear_[i], {p.bias.data ? &p.bias : nullptr, nullptr, made_[i], type_}, begin, end);
  }

  static int64_t tasks_of(const Linear& a) { return (a.n + rows_per_task - 1) / rows_per_task; }
  static int64_t least_of(const Linear& a) { return (1 << 16) / (rows_per_task * a.k) + 1; }

  static void fetch_first(const Linear& a, int64_t task) {
    constexpr int64_t early = 16 << 10, line = 64;
    const uint8_t* const first = a.packed + task * rows_per_task * a.packed_stride;
    const int64_t bytes = std::min(early, (a.n - task * rows_per_task) * a.packed_stride);
    for (int64_t at = 0; at < bytes; at += line) __builtin_prefetch(first + at, 0, 2);
  }

  // Layers that read x, one behind the other; `next_begin(layer, begin, end)` is called when rows of it are done.
  template <typename Then>
  void product(std::initializer_list<int> of, const Norm* norm, const char* x, Phase& rounds, Phase& multiplies, const Then& next_begin) {
    int64_t tasks = 0;
    for (int i : of) tasks += tasks_of(linear_[i]);
    // Calls `with(layer, first task, stop)` for what lies between two tasks.
    const auto split = [&](int64_t at, int64_t stop, const auto& with) {
      for (int i : of) {
        const int64_t local = tasks_of(linear_[i]);
        if (at < local && stop > 0) with(i, std::max<int64_t>(at, 0), std::min(stop, local));
        at -= local, stop -= local;
      }
    };
    const auto on_first = [&](int64_t first) {
      split(first, first + 1, [&](int i, int64_t at, int64_t) { fetch_first(linear_[i], at); });
      rounds.each(m_, [&](int64_t m) { body(of, norm, x, m); });
    };
    multiplies.turns(tasks, least_of(linear_[*of.begin()]), threads_, on_first, [&](int64_t at, int64_t stop) {
      if (!good_) return;
      split(at, stop, [&](int i, int64_t first, int64_t end) {
        const int64_t begin_row = first * rows_per_task, end_row = std::min(end * rows_per_task, linear_[i].n);
        multiply(i, begin_row, end_row);
        next_begin(i, begin_row, end_row);
      });
    });
  }

  // The same rows of both, and what they make together.
  void gate_and_up() {
    const Linear &a = linear_[gate], &b = linear_[up];
    const auto on_first = [&](int64_t first) {
      if (first < tasks_of(a)) fetch_first(a, first), fetch_first(b, first);
      phases_[5].each(m_, [&](int64_t m) { body({gate, up}, &of_.mlp_norm, made_[output], m); });
    };
    phases_[6].turns(tasks_of(a), least_of(a), threads_, on_first, [&](int64_t at, int64_t stop) {
      if (!good_) return;
      const int64_t begin = at * rows_per_task, end = std::min(stop * rows_per_task, a.n);
      multiply(gate, begin, end);
      multiply(up, begin, end);
      for (int64_t m = 0; m < m_; m++) {
        const int64_t from = (m * a.n + begin) * bytes_;
        kernels_.activate(type_, made_[gate] + from, made_[up] + from, end - begin, active_ + from);
      }
    });
  }

  void attend(int64_t member) {
    const Heads& heads = of_.attention.heads;
    const int64_t shared = heads.queries / heads.keys, parts = (shared + at_once_ - 1) / at_once_;
    phases_[2].each(of_.batch * heads.keys * parts, [&](int64_t item) {
      if (!good_) return;
      const int64_t part = item % parts, head = item / parts % heads.keys, first = part * at_once_;
      kernels_.attend(of_.attention, item / parts / heads.keys, head, head * shared + first, std::min(at_once_, shared - first), part == 0,
                      scratch_ + member * scratch_each_);
    });
  }

  Args of_;
  const InstructionSet& set_;
  const DecoderKernels& kernels_;
  const int64_t m_;
  const Dtype type_;
  const int64_t bytes_, threads_;
  int64_t hidden_, at_once_, scratch_each_;
  Linear linear_[layers];
  std::vector<std::unique_ptr<Rounding>> roundings_;
  const Rounding* rounding_[layers];
  float* scratch_;
  char *made_[layers], *normed_, *attended_, *active_;
  std::atomic<bool> good_{true};
  Phase phases_[9];
};

}  // namespace lowbit::cpu
