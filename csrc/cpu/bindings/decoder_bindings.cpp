// lowbit_cpu::decoder_prepared, which checks a decoder layer once, and decoder_steps, a step of a few tokens through layers.
#include <torch/csrc/stable/library.h>

#include <array>
#include <vector>

#include "../kernels/decoder_step.h"

namespace {

using namespace lowbit::cpu;

// A checked layer, stored in a byte tensor. Its pointers stay valid as long as the caller keeps the tensors they point into.
struct DecoderLayer {
  uint64_t sign;
  const PreparedCall* products[layers];
  const void* norms[4];  // before attention, before the MLP; of query and key heads, or null
  float eps[4];
  int64_t queries, keys, size;
  float scaling;
  Dtype type;  // of the norms

  Norm norm(int i) const {
    Norm made = {};
    made.weight.data = norms[i], made.weight.dtype = type, made.eps = eps[i];
    return made;
  }

  uint64_t process_tag() const { return PreparedCall::checksum(this, sizeof(DecoderLayer)) ^ 0x6465636f64657200; }

  static const DecoderLayer* of(const Tensor& t) {
    if (!t.is_cpu() || t.scalar_type() != ScalarType::Byte || !t.is_contiguous() || t.numel() != sizeof(DecoderLayer)) return nullptr;
    const DecoderLayer* layer = static_cast<const DecoderLayer*>(t.const_data_ptr());
    return reinterpret_cast<uintptr_t>(layer) % alignof(DecoderLayer) == 0 && layer->sign == layer->process_tag() ? layer : nullptr;
  }
};
static_assert(std::is_trivially_copyable_v<DecoderLayer> && sizeof(DecoderLayer) % 4 == 0);

Tensor empty(const std::vector<int64_t>& sizes, int32_t dtype) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype,
                                                         aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

void check_shapes(const DecoderLayer& layer) {
  const auto has = [&](int i, int64_t n, int64_t k, const char* name) {
    const Linear& a = layer.products[i]->a;
    STD_TORCH_CHECK(a.n == n && a.k == k, name, " must be a weight of ", n, " x ", k, ", got ", a.n, " x ", a.k);
  };
  const int64_t hidden = layer.products[query]->a.k, between = layer.products[gate]->a.n;
  STD_TORCH_CHECK(layer.keys > 0 && layer.queries % layer.keys == 0 && layer.size % lanes_of_head == 0 && layer.size <= largest_head,
                  "heads must be a multiple of those of keys, and of a multiple of ", lanes_of_head, " numbers, ", largest_head,
                  " at most, got ", layer.queries, ", ", layer.keys, " and ", layer.size);
  has(query, layer.queries * layer.size, hidden, "query");
  has(key, layer.keys * layer.size, hidden, "key");
  has(value, layer.keys * layer.size, hidden, "value");
  has(output, hidden, layer.queries * layer.size, "output");
  has(gate, between, hidden, "gate");
  has(up, between, hidden, "up");
  has(down, hidden, between, "down");
  STD_TORCH_CHECK(hidden > 0 && between > 0, "a layer must have rows and columns, got ", hidden, " and ", between);
}

// products: results of split_int8_gemv_prepare for query, key, value, output, gate, up and down. norms: before attention, before
// the MLP and, where heads have norms, of query and key heads.
Tensor decoder_prepared(std::vector<Tensor> products, std::vector<Tensor> norms, std::vector<double> eps, int64_t heads, int64_t key_heads,
                        int64_t head_size, double scaling) {
  STD_TORCH_CHECK(products.size() == layers, "products must be seven, got ", products.size());
  STD_TORCH_CHECK((norms.size() == 2 || norms.size() == 4) && eps.size() == norms.size(), "norms must be two or four, each with its eps");
  DecoderLayer layer;
  std::memset(static_cast<void*>(&layer), 0, sizeof layer);
  for (int i = 0; i < layers; i++) {
    layer.products[i] = PreparedCall::of(products[i]);
    STD_TORCH_CHECK(layer.products[i], "product ", i, " must be what split_int8_gemv_prepare returned");
  }
  layer.queries = heads, layer.keys = key_heads, layer.size = head_size, layer.scaling = static_cast<float>(scaling);
  check_shapes(layer);
  layer.type = view_of(norms[0], "norms").dtype;
  for (size_t i = 0; i < norms.size(); i++) {
    check_on_cpu(norms[i], "norms");
    const int64_t count = i < 2 ? layer.products[query]->a.k : head_size;
    STD_TORCH_CHECK(norms[i].dim() == 1 && norms[i].numel() == count && norms[i].is_contiguous() && is_float(norms[i]) &&
                        view_of(norms[i], "norms").dtype == layer.type,
                    "norm ", i, " must be contiguous [", count, "] of the others' floats");
    layer.norms[i] = norms[i].const_data_ptr(), layer.eps[i] = static_cast<float>(eps[i]);
  }
  layer.sign = layer.process_tag();
  const Tensor bytes = empty({static_cast<int64_t>(sizeof layer)}, aoti_torch_dtype_uint8());
  std::memcpy(bytes.mutable_data_ptr(), &layer, sizeof layer);
  return bytes;
}

bool fits_kept(const Tensor& t, const Attention& a, int64_t batch, ScalarType type) {
  return t.is_cpu() && t.dim() == 4 && t.size(0) == batch && t.size(1) == a.heads.keys && t.size(2) >= a.places &&
         t.size(3) == a.heads.size && t.stride(3) == 1 && t.scalar_type() == type;
}

CacheView kept_in(const Tensor& t) { return {static_cast<char*>(t.mutable_data_ptr()), t.stride(0), t.stride(1), t.stride(2)}; }

bool fits_turns(const Tensor& t, const Attention& a, int64_t batch, ScalarType type) {
  return t.is_cpu() && t.dim() == 3 && (t.size(0) == 1 || t.size(0) == batch) && t.size(1) == a.tokens && t.size(2) == a.heads.size &&
         t.is_contiguous() && t.scalar_type() == type;
}

bool fits_mask(const Tensor& t, const Attention& a, int64_t batch, ScalarType type) {
  return t.is_cpu() && t.dim() == 4 && (t.size(0) == 1 || t.size(0) == batch) && t.size(1) == 1 &&
         (t.size(2) == 1 || t.size(2) == a.tokens) && t.size(3) == a.places && (t.stride(3) == 1 || a.places == 1) &&
         (t.scalar_type() == ScalarType::Bool || t.scalar_type() == type);
}

// Fills the arguments that are the same for all layers; false where tensors do not fit.
bool fill_args(const DecoderLayer& layer, const Tensor& x, const Tensor& cos, const Tensor& sin, const std::optional<Tensor>& mask,
                int64_t stop, int64_t places, Step::Args& args) {
  if (!x.is_cpu() || x.dim() != 3 || x.size(2) != layer.products[query]->a.k || !x.is_contiguous() || !is_float(x) ||
      view_of(x, "x").dtype != layer.type)
    return false;
  const ScalarType type = x.scalar_type();
  args.batch = x.size(0);
  Attention& a = args.attention;
  a.tokens = x.size(1), a.stop = stop, a.places = places, a.type = layer.type;
  a.heads.size = layer.size;
  const int64_t tokens = args.batch * a.tokens;
  if (tokens < 1 || tokens > max_rows || stop < 0 || places >= max_dim_size || stop > places - a.tokens ||
      !fits_turns(cos, a, args.batch, type) || !fits_turns(sin, a, args.batch, type) || cos.size(0) != sin.size(0) ||
      (mask && !fits_mask(*mask, a, args.batch, type)))
    return false;
  for (const Tensor* t : {&x, &cos, &sin}) check_storage(*t, "a tensor of a decoder's step");
  check_storage(mask, "mask");
  if (mask)
    a.mask = {mask->const_data_ptr(), mask->scalar_type() == ScalarType::Bool, mask->size(0) == 1 ? 0 : mask->stride(0),
              mask->size(2) == 1 ? 0 : mask->stride(2)};
  a.cos = cos.const_data_ptr(), a.sin = sin.const_data_ptr(), a.cos_of_batch = cos.size(0) == 1 ? 0 : cos.stride(0);
  return true;
}

// x [batch, tokens, hidden] through all layers. Its tokens follow `stop` cached ones and attend to `places` positions of each
// layer's keys and values, into which they are written. Returns a 1-D tensor where x has no limbs or LOWBIT_CPU has changed since
// a layer was prepared, and a 2-D tensor where tensors do not fit: the caller then runs the layers' modules, which compute it or
// raise.
Tensor decoder_steps(Tensor x, std::vector<Tensor> prepared, Tensor cos, Tensor sin, std::vector<Tensor> keys, std::vector<Tensor> values,
                     int64_t stop, int64_t places, std::optional<Tensor> mask) {
  const size_t count = prepared.size();
  STD_TORCH_CHECK(count > 0 && keys.size() == count && values.size() == count, "each of one layer or more has keys and values, got ",
                  count, ", ", keys.size(), " and ", values.size());
  int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  const InstructionSet& set = instruction_set();
  std::vector<Step::Args> args(count);
  std::vector<std::array<Norm, 2>> of_heads(count);
  for (size_t n = 0; n < count; n++) {
    const DecoderLayer* const layer = DecoderLayer::of(prepared[n]);
    STD_TORCH_CHECK(layer, "prepared must be what decoder_prepared returned");
    if (n) args[n] = args[0];
    else if (!fill_args(*layer, x, cos, sin, mask, stop, places, args[n])) return empty({0, 0}, dtype);
    Attention& a = args[n].attention;
    of_heads[n] = {layer->norm(2), layer->norm(3)};
    a.heads = {layer->queries, layer->keys, layer->size, layer->scaling, of_heads[n][0].weight.data ? &of_heads[n][0] : nullptr,
               of_heads[n][1].weight.data ? &of_heads[n][1] : nullptr};
    const ScalarType type = x.scalar_type();
    if (layer->products[query]->a.k != x.size(2) || layer->size != cos.size(2) || layer->type != a.type ||
        !fits_kept(keys[n], a, args[n].batch, type) || !fits_kept(values[n], a, args[n].batch, type))
      return empty({0, 0}, dtype);
    check_storage(keys[n], "keys"), check_storage(values[n], "values");
    a.keys = kept_in(keys[n]), a.values = kept_in(values[n]);
    args[n].attention_norm = layer->norm(0), args[n].mlp_norm = layer->norm(1);
    for (int i = 0; i < layers; i++) {
      args[n].products[i] = layer->products[i];
      if (args[n].products[i]->plan.kernels != set.steps) return empty({0}, dtype);
    }
  }

  const Tensor y = empty({args[0].batch, args[0].attention.tokens, x.size(2)}, dtype);
  const int64_t threads = torch::stable::get_num_threads();
  Arena arena, between;
  char* local[2];
  for (char*& scratch : local) scratch = between.lines<char>(y.numel() * 4);
  std::vector<std::unique_ptr<Step>> steps(count);
  for (size_t n = 0; n < count; n++) {
    args[n].x = n ? local[n % 2] : x.const_data_ptr(), args[n].y = n + 1 < count ? local[(n + 1) % 2] : y.mutable_data_ptr();
    arena.rewind();
    steps[n] = std::make_unique<Step>(args[n], set, threads, arena);
  }
  as_team(threads, [&](int64_t member) {
    for (const auto& step : steps) {
      step->run(member);
      if (!step->ok()) return;
    }
  });
  for (const auto& step : steps)
    if (!step->ok()) return empty({0}, dtype);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit_cpu, m) {
  m.def(
      "decoder_prepared(Tensor[] products, Tensor[] norms, float[] eps, int heads, int key_heads, int head_size, float scaling) -> Tensor");
  m.def(
      "decoder_steps(Tensor x, Tensor[] prepared, Tensor cos, Tensor sin, Tensor(a!)[] keys, Tensor(b!)[] values, int past, int places, "
      "Tensor? mask) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit_cpu, CompositeExplicitAutograd, m) {
  m.impl("decoder_prepared", TORCH_BOX(&decoder_prepared));
  m.impl("decoder_steps", TORCH_BOX(&decoder_steps));
}
