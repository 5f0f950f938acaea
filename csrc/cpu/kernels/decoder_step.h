// A step of a few tokens through a decoder layer on one team of threads, without leaving C++:
//
//    x --norm, limbs--> [q k v] --rope, attention--> attended --limbs--> [o] + x --norm, limbs--> [gate up] --SwiGLU--> active
//                                                                         |                                             |
//                                                                         +------------------- + <--[down] <--limbs-----+--> y
//
// Each arrow is a phase of the team (schedule/team.h); the brackets are split-int8 products with weights prepared once.
// Contract: that of the products; element-wise results round where torch's modules round.
// Limit: the bytes of the weights.
// Figures: evals/results/decoding_cpu.json.
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

// Kernels between the products, for one instruction set.
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

// Bump allocator for the buffers of one layer; all layers reuse it.
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
  // Frees everything that was allocated.
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

// x packed as limbs, for one product or several that read the same x.
class Rounding {
 public:
  Rounding(const PreparedCall& p, int64_t m, Arena& arena) : p_(&p), a_(p.weight()), no_limbs_(new bool[m]()) {
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
      interleaved_limbs_ = {plan.count, p.input_scale, static_cast<int64_t>(runs_.size()), runs_.data(), scratch, sums_at, scale_at, no_limbs_.get()};
    } else {
      const int32_t* groups = p.steps();
      packed_limbs_ = {plan.count, p.input_scale, plan.steps, groups, plan.uniform ? nullptr : groups + plan.steps, plan.quad_sums,
               scratch, sums_at, scale_at, no_limbs_.get()};
    }
  }

  // Whether the same limbs serve another weight.
  bool serves(const PreparedCall& other) const {
    const Linear &a = p_->a, &b = other.a;
    return a.bits == b.bits && a.k == b.k && a.group == b.group && a.interleaved == b.interleaved && !a.zero_point.data == !b.zero_point.data &&
           p_->input_scale == other.input_scale && p_->plan.count == other.plan.count && p_->plan.offset == other.plan.offset;
  }

  // Packs row m; false where it has no limbs.
  bool pack_row(const ArrayView& x, int64_t m) const {
    const ByteDecoding decoding = p_->plan.byte_decoding();
    if (a_.interleaved) p_->plan.kernels->pack_limbs_interleaved(a_, decoding, x, interleaved_limbs_, m, m + 1);
    else p_->plan.kernels->pack_limbs(a_, decoding, x, packed_limbs_, m, m + 1);
    return !no_limbs_[m];
  }

  // Rows [begin, end) of a weight times x, into a.y; false where a sum might not fit in int32.
  bool multiply(const PreparedCall& p, const Linear& a, int64_t begin, int64_t end) const {
    const ByteDecoding decoding = p.plan.byte_decoding();
    const RowRange range = {begin, end, end};
    if (!a.interleaved) return p.plan.kernels->limbs[a.bits](a, decoding, packed_limbs_, range);
    p.plan.kernels->interleaved[a.bits](a, decoding, interleaved_limbs_, range);
    return true;
  }

 private:
  const PreparedCall* p_;
  Linear a_;
  std::unique_ptr<bool[]> no_limbs_;
  std::vector<Run> runs_;
  InterleavedLimbs interleaved_limbs_ = {};
  PackedLimbs packed_limbs_ = {};
};

// One step through a layer: x [m, hidden] to y [m, hidden].
class Step {
 public:
  struct Args {
    const PreparedCall* products[layers];
    Norm attention_norm, mlp_norm;
    Attention attention;  // query, key, value and y are filled in here
    int64_t batch;
    const void* x;
    void* y;
  };

  Step(const Args& args, const InstructionSet& set, int64_t threads, Arena& arena)
      : args_(args), set_(set), kernels_(decoder_kernels(set)), m_(args.batch * args.attention.tokens), type_(args.attention.type),
        bytes_(type_ == Dtype::float32 ? 4 : 2), threads_(threads) {
    const auto part = [&](int64_t count) { return arena.lines<char>(m_ * count * bytes_); };
    for (int i = 0; i < layers; i++) {
      linear_[i] = args_.products[i]->weight(), linear_[i].m = m_;
      linear_[i].y = arena.lines<float>(m_ * linear_[i].n);
      outputs_[i] = i == down ? static_cast<char*>(args_.y) : part(linear_[i].n);
      const bool reads_the_same = i == key || i == value || i == up;
      if (!reads_the_same || !roundings_.back()->serves(*args_.products[i]))
        roundings_.push_back(std::make_unique<Rounding>(*args_.products[i], m_, arena));
      rounding_[i] = roundings_.back().get();
    }
    hidden_ = linear_[query].k;
    normed_ = part(hidden_), attended_ = part(linear_[output].k), active_ = part(linear_[down].k);
    args_.attention.query = outputs_[query], args_.attention.key = outputs_[key], args_.attention.value = outputs_[value];
    args_.attention.y = attended_;
    const Heads& heads = args_.attention.heads;
    const int64_t shared = heads.queries / heads.keys, local = args_.batch * heads.keys;
    const int64_t parts = local % threads_ == 0 ? 1 : std::min(shared, (2 * threads_ + local - 1) / local);
    at_once_ = (shared + parts - 1) / parts;
    scratch_each_ = round_up_to_line(attention_scratch(args_.attention, at_once_) * 4) / 4;
    scratch_ = arena.lines<float>(threads_ * scratch_each_);
  }

  // The share of thread `member`; called by each thread of the team, and returns when all phases are done.
  void run(int64_t member) {
    product({query, key, value}, &args_.attention_norm, static_cast<const char*>(args_.x), phases_[0], phases_[1], [](int, int64_t, int64_t) {});
    attend(member);
    const auto add_residual = [this](const void* residual) {
      return [this, residual](int i, int64_t begin, int64_t end) {
        for (int64_t m = 0; m < m_; m++)
          kernels_.add(type_, static_cast<const char*>(residual) + (m * hidden_ + begin) * bytes_, end - begin, outputs_[i] + (m * hidden_ + begin) * bytes_);
      };
    };
    product({output}, nullptr, attended_, phases_[3], phases_[4], add_residual(args_.x));
    gate_and_up();
    product({down}, nullptr, active_, phases_[7], phases_[8], add_residual(outputs_[output]));
  }

  // False where a product had no limbs: y is undefined then.
  bool ok() const { return ok_; }

 private:
  static constexpr int64_t rows_per_task = 2 * rows_per_block;  // two blocks are streamed at once

  // Normalizes row m of x and packs it for `of` layers.
  void pack_rows(std::initializer_list<int> of, const Norm* norm, const char* x, int64_t m) {
    if (!ok_) return;
    const int64_t k = linear_[*of.begin()].k;
    if (norm) kernels_.normalize(*norm, type_, x + m * k * bytes_, k, normed_ + m * k * bytes_), x = normed_;
    ArrayView numbers;
    numbers.data = x, numbers.stride = k, numbers.dtype = type_;
    const Rounding* previous = nullptr;
    for (int i : of) {
      if (rounding_[i] != previous && !rounding_[i]->pack_row(numbers, m)) ok_ = false;
      previous = rounding_[i];
    }
  }

  // Rows [begin, end) of a layer's weight times x, plus bias, rounded to the type of x.
  void multiply(int i, int64_t begin, int64_t end) {
    const PreparedCall& p = *args_.products[i];
    if (!rounding_[i]->multiply(p, linear_[i], begin, end)) ok_ = false;
    set_.write_output(linear_[i], {p.bias.data ? &p.bias : nullptr, nullptr, outputs_[i], type_}, begin, end);
  }

  static int64_t tasks_of(const Linear& a) { return (a.n + rows_per_task - 1) / rows_per_task; }
  static int64_t min_tasks(const Linear& a) { return (1 << 16) / (rows_per_task * a.k) + 1; }

  static void prefetch_first(const Linear& a, int64_t task) {
    constexpr int64_t prefetch_bytes = 16 << 10, line = 64;
    const uint8_t* const first = a.packed + task * rows_per_task * a.packed_stride;
    const int64_t bytes = std::min(prefetch_bytes, (a.n - task * rows_per_task) * a.packed_stride);
    for (int64_t at = 0; at < bytes; at += line) __builtin_prefetch(first + at, 0, 2);
  }

  // Products of layers that read the same x, as one phase; `on_rows_done(layer, begin, end)` runs when rows of one are done.
  template <typename OnRowsDone>
  void product(std::initializer_list<int> of, const Norm* norm, const char* x, Phase& pack_phase, Phase& product_phase, const OnRowsDone& on_rows_done) {
    int64_t tasks = 0;
    for (int i : of) tasks += tasks_of(linear_[i]);
    // Calls `with(layer, first task, stop)` for each layer's part of tasks [at, stop).
    const auto split = [&](int64_t at, int64_t stop, const auto& with) {
      for (int i : of) {
        const int64_t local = tasks_of(linear_[i]);
        if (at < local && stop > 0) with(i, std::max<int64_t>(at, 0), std::min(stop, local));
        at -= local, stop -= local;
      }
    };
    const auto on_first = [&](int64_t first) {
      split(first, first + 1, [&](int i, int64_t at, int64_t) { prefetch_first(linear_[i], at); });
      pack_phase.each(m_, [&](int64_t m) { pack_rows(of, norm, x, m); });
    };
    product_phase.each_range(tasks, min_tasks(linear_[*of.begin()]), threads_, on_first, [&](int64_t at, int64_t stop) {
      if (!ok_) return;
      split(at, stop, [&](int i, int64_t first, int64_t end) {
        const int64_t begin_row = first * rows_per_task, end_row = std::min(end * rows_per_task, linear_[i].n);
        multiply(i, begin_row, end_row);
        on_rows_done(i, begin_row, end_row);
      });
    });
  }

  // gate and up in one phase: the same rows of both, then SwiGLU of them.
  void gate_and_up() {
    const Linear &a = linear_[gate], &b = linear_[up];
    const auto on_first = [&](int64_t first) {
      if (first < tasks_of(a)) prefetch_first(a, first), prefetch_first(b, first);
      phases_[5].each(m_, [&](int64_t m) { pack_rows({gate, up}, &args_.mlp_norm, outputs_[output], m); });
    };
    phases_[6].each_range(tasks_of(a), min_tasks(a), threads_, on_first, [&](int64_t at, int64_t stop) {
      if (!ok_) return;
      const int64_t begin = at * rows_per_task, end = std::min(stop * rows_per_task, a.n);
      multiply(gate, begin, end);
      multiply(up, begin, end);
      for (int64_t m = 0; m < m_; m++) {
        const int64_t from = (m * a.n + begin) * bytes_;
        kernels_.activate(type_, outputs_[gate] + from, outputs_[up] + from, end - begin, active_ + from);
      }
    });
  }

  void attend(int64_t member) {
    const Heads& heads = args_.attention.heads;
    const int64_t shared = heads.queries / heads.keys, parts = (shared + at_once_ - 1) / at_once_;
    phases_[2].each(args_.batch * heads.keys * parts, [&](int64_t item) {
      if (!ok_) return;
      const int64_t part = item % parts, head = item / parts % heads.keys, first = part * at_once_;
      kernels_.attend(args_.attention, item / parts / heads.keys, head, head * shared + first, std::min(at_once_, shared - first), part == 0,
                      scratch_ + member * scratch_each_);
    });
  }

  Args args_;
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
  char *outputs_[layers], *normed_, *attended_, *active_;
  std::atomic<bool> ok_{true};
  Phase phases_[9];
};

}  // namespace lowbit::cpu
