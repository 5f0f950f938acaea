// The portable kernels without torch, for processors that torch is not here for: reads cases from stdin, writes y and the weight.
//
// A case: int32 codes, bits, is_signed, m, n, k, group, has_zero, packed_stride; float values[2^bits]; bytes packed[n, stride];
// float scale[n, groups]; bytes zero[n, groups] where there are any; float x[m, k]. Out: float y[m, n], float weight[n, k].
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels/dequantize.h"
#include "kernels/linear.h"

using namespace lowbit::cpu;

namespace {

template <typename T>
std::vector<T> read(size_t count) {
  std::vector<T> found(count);
  if (count && std::fread(found.data(), sizeof(T), count, stdin) != count) std::exit(2);
  return found;
}

}  // namespace

int main() {
  int32_t head[9];
  while (std::fread(head, sizeof head, 1, stdin) == 1) {
    Linear a = {};
    a.codes = static_cast<Codes>(head[0]), a.bits = head[1], a.is_signed = head[2];
    a.m = head[3], a.n = head[4], a.k = head[5], a.group = head[6], a.packed_stride = head[8];
    const int64_t groups = (a.k + a.group - 1) / a.group;
    const auto values = read<float>(size_t(1) << a.bits);
    const auto packed = read<uint8_t>(a.n * a.packed_stride);
    const auto scale = read<float>(a.n * groups);
    const auto zero = read<uint8_t>(head[7] ? a.n * groups : 0);
    const auto x = read<float>(a.m * a.k);
    a.values = values.data(), a.packed = packed.data();
    a.scale = {scale.data(), groups, Dtype::float32, nullptr};
    if (head[7]) a.zero_point = {zero.data(), groups, Dtype::bytes, nullptr};
    int64_t blocks = 0;
    for (int64_t g = 0; g < groups; g++) blocks += span_of(a, g).blocks;
    std::vector<float> arranged(blocks * block * arranged_rows(a.m)), y(a.m * a.n), weight(a.n * a.k);
    portable::arrange(a, {x.data(), a.k, Dtype::float32, nullptr}, arranged.data());
    a.arranged = arranged.data(), a.y = y.data();
    portable::linear(a, 0, a.n);
    portable::dequantize_rows(a, Dtype::float32, weight.data(), a.k, 0, a.n);
    std::fwrite(y.data(), sizeof(float), y.size(), stdout);
    std::fwrite(weight.data(), sizeof(float), weight.size(), stdout);
  }
}
