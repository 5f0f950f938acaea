// lowbit_cpu::decoder_prepared and decoder_step: a decoder layer checked once, and a step of few tokens through it.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "decoder_step.h"

namespace {

using namespace lowbit::cpu;

// What a layer consists of, as it lies in a tensor of bytes. What its pointers are of is kept by whoever prepared it.
struct DecoderLayer {
  uint64_t sign;
  const Prepared* products[layers];
  const void* norms[4];  // before attention, before gate; of each head of query and key, or none
  float eps[4];
  int64_t queries, keys, size;
  float scaling;
  Stored type;  // of the norms

  Norm norm(int i) const {
    Norm made = {};
    made.weight.data = norms[i], made.weight.stored = type, made.eps = eps[i];
    return made;
  }

  uint64_t own_sign() const { return Prepared::sign_of(this, sizeof(DecoderLayer)) ^ 0x6465636f64657200; }

  static const DecoderLayer* of(const Tensor& t) {
    if (!t.is_cpu() || t.scalar_type() != ScalarType::Byte || !t.is_contiguous() || t.numel() != sizeof(DecoderLayer)) return nullptr;
    const DecoderLayer* layer = static_cast<const DecoderLayer*>(t.const_data_ptr());
    return reinterpret_cast<uintptr_t>(layer) % alignof(DecoderLayer) == 0 && layer->sign == layer->own_sign() ? layer : nullptr;
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

// `products`: what digits_prepared made of query, key, value, output, gate, up and down. `norms`: before attention, before gate, and
// where heads have norms those of query and key.
Tensor decoder_prepared(std::vector<Tensor> products, std::vector<Tensor> norms, std::vector<double> eps, int64_t heads, int64_t key_heads,
                        int64_t head_size, double scaling) {
  STD_TORCH_CHECK(products.size() == layers, "products must be seven, got ", products.size());
  STD_TORCH_CHECK((norms.size() == 2 || norms.size() == 4) && eps.size() == norms.size(), "norms must be two or four, each with its eps");
  DecoderLayer layer;
  std::memset(static_cast<void*>(&layer), 0, sizeof layer);
  for (int i = 0; i < layers; i++) {
    layer.products[i] = Prepared::of(products[i]);
    STD_TORCH_CHECK(layer.products[i], "product ", i, " must be what digits_prepared returned");
  }
  layer.queries = heads, layer.keys = key_heads, layer.size = head_size, layer.scaling = static_cast<float>(scaling);
  check_shapes(layer);
  layer.type = numbers_of(norms[0], "norms").stored;
  for (size_t i = 0; i < norms.size(); i++) {
    check_on_cpu(norms[i], "norms");
    const int64_t count = i < 2 ? layer.products[query]->a.k : head_size;
    STD_TORCH_CHECK(norms[i].dim() == 1 && norms[i].numel() == count && norms[i].is_contiguous() && is_float(norms[i]) &&
                        numbers_of(norms[i], "norms").stored == layer.type,
                    "norm ", i, " must be contiguous [", count, "] of the others' floats");
    layer.norms[i] = norms[i].const_data_ptr(), layer.eps[i] = static_cast<float>(eps[i]);
  }
  layer.sign = layer.own_sign();
  const Tensor bytes = empty({static_cast<int64_t>(sizeof layer)}, aoti_torch_dtype_uint8());
  std::memcpy(bytes.mutable_data_ptr(), &layer, sizeof layer);
  return bytes;
}

bool fits_kept(const Tensor& t, const Attention& a, int64_t batch, ScalarType type) {
  return t.is_cpu() && t.dim() == 4 && t.size(0) == batch && t.size(1) == a.heads.keys && t.size(2) >= a.places &&
         t.size(3) == a.heads.size && t.stride(3) == 1 && t.scalar_type() == type;
}

Kept kept_in(const Tensor& t) { return {static_cast<char*>(t.mutable_data_ptr()), t.stride(0), t.stride(1), t.stride(2)}; }

bool fits_turns(const Tensor& t, const Attention& a, int64_t batch, ScalarType type) {
  return t.is_cpu() && t.dim() == 3 && (t.size(0) == 1 || t.size(0) == batch) && t.size(1) == a.tokens && t.size(2) == a.heads.size &&
         t.is_contiguous() && t.scalar_type() == type;
}

bool fits_mask(const Tensor& t, const Attention& a, int64_t batch, ScalarType type) {
  return t.is_cpu() && t.dim() == 4 && (t.size(0) == 1 || t.size(0) == batch) && t.size(1) == 1 &&
         (t.size(2) == 1 || t.size(2) == a.tokens) && t.size(3) == a.places && (t.stride(3) == 1 || a.places == 1) &&
         (t.scalar_type() == ScalarType::Bool || t.scalar_type() == type);
}

// x [batch, tokens, hidden] through the layer: its tokens come behind `past` others and look at `places` of keys and values, in which
// theirs are written. A tensor of one dimension where some of x has no digits or LOWBIT_CPU has changed since the layer was prepared,
// and one of two where tensors do not fit: the layer's modules say what is wrong with them, or compute it.
Tensor decoder_step(Tensor x, Tensor prepared, Tensor cos, Tensor sin, Tensor keys, Tensor values, int64_t past, int64_t places,
                    std::optional<Tensor> mask) {
  const DecoderLayer* const layer = DecoderLayer::of(prepared);
  STD_TORCH_CHECK(layer, "prepared must be what decoder_prepared returned");
  const int64_t hidden = layer->products[query]->a.k;
  int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  if (!x.is_cpu() || x.dim() != 3 || x.size(2) != hidden || !x.is_contiguous() || !is_float(x) || numbers_of(x, "x").stored != layer->type)
    return empty({0, 0}, dtype);
  const ScalarType type = x.scalar_type();
  Step::Given given = {};
  given.batch = x.size(0);
  Attention& a = given.attention;
  a.tokens = x.size(1), a.past = past, a.places = places;
  const Norm of_query = layer->norm(2), of_key = layer->norm(3);
  a.heads = {layer->queries, layer->keys, layer->size, layer->scaling, of_query.weight.data ? &of_query : nullptr,
             of_key.weight.data ? &of_key : nullptr};
  const int64_t tokens = given.batch * a.tokens;
  if (tokens < 1 || tokens > most_rows_at_once || past < 0 || places >= most_of_a_size || past > places - a.tokens ||
      !fits_kept(keys, a, given.batch, type) || !fits_kept(values, a, given.batch, type) || !fits_turns(cos, a, given.batch, type) ||
      !fits_turns(sin, a, given.batch, type) || cos.size(0) != sin.size(0) || (mask && !fits_mask(*mask, a, given.batch, type)))
    return empty({0, 0}, dtype);
  for (const Tensor* t : {&x, &cos, &sin, &keys, &values}) check_held(*t, "a tensor of a decoder's step");
  if (mask) {
    check_held(*mask, "mask");
    a.mask = {mask->const_data_ptr(), mask->scalar_type() == ScalarType::Bool, mask->size(0) == 1 ? 0 : mask->stride(0),
              mask->size(2) == 1 ? 0 : mask->stride(2)};
  }

  const InstructionSet& set = instruction_set();
  for (int i = 0; i < layers; i++) {
    given.products[i] = layer->products[i];
    if (given.products[i]->plan.kernels != set.steps) return empty({0}, dtype);
  }
  const Tensor y = empty({given.batch, a.tokens, hidden}, dtype);
  given.before_attention = layer->norm(0), given.before_gate = layer->norm(1);
  a.cos = cos.const_data_ptr(), a.sin = sin.const_data_ptr(), a.cos_of_batch = cos.size(0) == 1 ? 0 : cos.stride(0);
  a.keys = kept_in(keys), a.values = kept_in(values), a.type = layer->type;
  given.x = x.const_data_ptr(), given.y = y.mutable_data_ptr();
  Step step(given, set);
  return step.run() ? y : empty({0}, dtype);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit_cpu, m) {
  m.def(
      "decoder_prepared(Tensor[] products, Tensor[] norms, float[] eps, int heads, int key_heads, int head_size, float scaling) -> Tensor");
  m.def(
      "decoder_step(Tensor x, Tensor prepared, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, int past, int places, "
      "Tensor? mask) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit_cpu, CompositeExplicitAutograd, m) {
  m.impl("decoder_prepared", TORCH_BOX(&decoder_prepared));
  m.impl("decoder_step", TORCH_BOX(&decoder_step));
}
