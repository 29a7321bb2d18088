// Inference without Python of calls that differ from a known call in sizes only, by PyTorch's own shape functions or by formulas.
#include "remote.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/MetaFunctions.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>

#include <algorithm>
#include <numeric>
#include <sstream>
#include <unordered_map>

namespace djinn {
namespace {

constexpr int64_t kLargest = int64_t{1} << 60;  // maximum bytes of a result; PyTorch's own arithmetic overflows for larger ones, and raises
using Sizes = c10::SmallVector<int64_t, 5>;
using Shapes = std::vector<Sizes>;

// Thrown if the rule does not apply to the arguments. Python then infers the call, or raises.
struct NoRule final : std::exception {};
void require(bool fits) {
  if (!fits) throw NoRule();
}

// The operands and all arguments of a call, in the order of its schema.
struct Given {
  at::ArrayRef<Operand> operands;
  at::ArrayRef<c10::IValue> args;
  at::IntArrayRef shape(size_t i) const { return operands.at(i).impl->sizes(); }
  void require_shape(size_t first, at::IntArrayRef shape_of_rest) const {
    for (const auto& operand : operands.slice(first)) require(operand.impl->sizes() == shape_of_rest);
  }
};
using Formula = Shapes (*)(const Given&);  // returns the shape of each result

at::IntArrayRef without_last(at::IntArrayRef whole, size_t count) {
  require(count <= whole.size());
  return whole.slice(0, whole.size() - count);
}
Sizes joined(at::IntArrayRef first, at::IntArrayRef last) {
  Sizes made(first);
  made.append(last.begin(), last.end());
  return made;
}
Sizes broadcast(at::IntArrayRef a, at::IntArrayRef b) { return Sizes(at::infer_size_dimvector(a, b)); }  // throws if they do not broadcast

Shapes pointwise(const Given& g) {
  Sizes made;
  for (const auto& operand : g.operands) made = broadcast(made, operand.impl->sizes());
  return {made};
}
Shapes as_first(const Given& g) { return {Sizes(g.shape(0))}; }
Shapes along_dimension(const Given& g) {
  at::maybe_wrap_dim(g.args[1].toInt(), static_cast<int64_t>(g.shape(0).size()));
  return as_first(g);
}
Shapes linear(const Given& g) {
  const auto given = g.shape(0), weight = g.shape(1);
  require(weight.size() == 2 && !given.empty() && given.back() == weight[1]);
  g.require_shape(2, weight[0]);
  return {joined(without_last(given, 1), weight[0])};
}
// Shape of a matrix product or a batched one, to which the first of three operands is added.
Shapes product(const Given& g) {
  const auto count = g.operands.size();
  const auto left = g.shape(count - 2), right = g.shape(count - 1);
  const auto l = left.size(), r = right.size();
  require(l >= 2 && r >= 2 && left[l - 1] == right[r - 2]);
  const auto made = joined(broadcast(without_last(left, 2), without_last(right, 2)), {left[l - 2], right[r - 1]});
  require(count == 2 || broadcast(g.shape(0), made) == made);
  return {made};
}

// The operands have the dimensions batch, heads, length and width. The results are the output and the log-sum-exp of each row of scores.
Shapes attention_on_cpu(const Given& g) {
  const auto query = g.shape(0), key = g.shape(1);
  require(query.size() == 4 && key.size() == 4 && key == g.shape(2) && query[0] == key[0] && query[3] == key[3]);
  const bool grouped = g.args.size() > 7 && g.args[7].toBool() && key[1] > 0;
  require(query[1] == key[1] || (grouped && query[1] % key[1] == 0));
  const Sizes weights{query[0], query[1], query[2], key[2]};
  for (const auto& mask : g.operands.slice(3)) require(broadcast(weights, mask.impl->sizes()) == weights);
  return {Sizes(query), Sizes(without_last(query, 1))};
}

Shapes convolution(const Given& g) {
  const auto given = g.shape(0), weight = g.shape(1);
  const auto stride = g.args[3].toIntVector(), padding = g.args[4].toIntVector(), dilation = g.args[5].toIntVector();
  const auto more = g.args[7].toIntVector();
  const bool transposed = g.args[6].toBool();
  const auto groups = g.args[8].toInt();
  const auto rank = given.size();
  require(rank > 2 && weight.size() == rank && given[1] == (transposed ? weight[0] : weight[1] * groups));
  for (const auto* each : {&stride, &padding, &dilation, &more}) require(each->size() == rank - 2);
  Sizes made{given[0], transposed ? weight[1] * groups : weight[0]};
  g.require_shape(2, made[1]);
  for (size_t d = 0; d < rank - 2; ++d) {
    const auto padded = 2 * padding[d] - dilation[d] * (weight[d + 2] - 1) - 1;
    made.push_back(transposed ? (given[d + 2] - 1) * stride[d] - padded + more[d] : (given[d + 2] + padded + stride[d]) / stride[d]);
    require(made.back() > 0 && given[d + 2] + (transposed ? 0 : padded) >= 0);
  }
  return {made};
}
Shapes convolution_backward(const Given& g) {
  return {Sizes(g.shape(1)), Sizes(g.shape(2)), g.args[3].isNone() ? Sizes() : Sizes(at::IntArrayRef(g.args[3].toIntVector()))};
}
Shapes batch_norm(const Given& g) {
  const auto given = g.shape(0);
  g.require_shape(1, given.at(1));
  const Sizes kept{g.args[5].toBool() ? given[1] : 0};
  return {Sizes(given), kept, kept};
}
Shapes batch_norm_backward(const Given& g) {
  require(g.shape(0) == g.shape(1));
  return {Sizes(g.shape(1)), Sizes{g.shape(1).at(1)}, Sizes{g.shape(1).at(1)}};
}

// Shape of the statistics of a normalization over the last dimensions.
Sizes statistics(at::IntArrayRef given, const std::vector<int64_t>& over) {
  const auto rest = without_last(given, over.size());
  require(!over.empty() && given.slice(rest.size()) == over);
  return joined(rest, Sizes(over.size(), 1));
}
// Shapes of layer norm and RMS norm, with `kStatistics` statistics for the backward pass.
template <size_t kStatistics> Shapes normalized(const Given& g) {
  const auto over = g.args[1].toIntVector();
  Shapes made(1 + kStatistics, statistics(g.shape(0), over));
  g.require_shape(1, over);
  made[0] = Sizes(g.shape(0));
  return made;
}
Shapes layer_norm_backward(const Given& g) {
  const auto over = g.args[2].toIntVector();
  const auto given = g.shape(1);
  require(g.shape(0) == given && g.shape(2) == g.shape(3) && g.shape(2) == statistics(given, over));
  g.require_shape(4, over);
  return {Sizes(given), Sizes(over), Sizes(over)};
}

}  // namespace

struct Rule {
  Formula formula = nullptr;
  c10::KernelFunction kernel;  // PyTorch's meta kernel, if there is no formula. If invalid: the op's own meta kernel, which may be Python
  bool views = false;
};

namespace {

template <class F> Rule shaped(F* function) { return {nullptr, c10::KernelFunction::makeFromUnboxedRuntimeFunction(function)}; }
at::Tensor viewed(const at::Tensor& t, at::IntArrayRef size) { return t.view(size); }

struct Rules {
  std::unordered_map<std::string, Rule> by_op;
  void add(const Rule& rule, const char* names) {
    std::istringstream words(names);
    for (std::string name; words >> name;) by_op.emplace("aten::" + name, rule);
  }
  Rules() {
    namespace m = at::meta;
    add({as_first},
        "clone _to_copy zero_ fill_.Scalar bernoulli_.float normal_ uniform_ empty_like zeros_like ones_like full_like "
        "rand_like randn_like");
    add({[](const Given& g) { return Shapes(2, Sizes(g.shape(0))); }}, "native_dropout");
    add({along_dimension}, "_softmax _log_softmax _safe_softmax");
    add({[](const Given& g) { return Shapes(2, along_dimension(g)[0]); }}, "sort");
    add({linear}, "linear");
    add({convolution}, "convolution");
    add({convolution_backward}, "convolution_backward");
    add({batch_norm}, "native_batch_norm");
    add({batch_norm_backward}, "native_batch_norm_backward");
    add({product}, "matmul mm bmm addmm baddbmm");
    add({[](const Given& g) { return Shapes{attention_on_cpu(g)[0]}; }}, "scaled_dot_product_attention");
    add({attention_on_cpu}, "_scaled_dot_product_flash_attention_for_cpu");
    add({normalized<0>}, "layer_norm rms_norm");
    add({normalized<1>}, "_fused_rms_norm");
    add({normalized<2>}, "native_layer_norm");
    add({layer_norm_backward}, "native_layer_norm_backward");
    add(shaped(&m::_softmax_backward_data), "_softmax_backward_data _log_softmax_backward_data");
    add(shaped(&m::sum), "sum.dim_IntList mean.dim");
    add(shaped(&m::max), "max.dim min.dim");
    add(shaped(&m::cat), "cat");
    add(shaped(&m::index), "index.Tensor");
    add(shaped(&m::max_pool2d_with_indices), "max_pool2d_with_indices");
    add(shaped(&m::max_pool2d_with_indices_backward), "max_pool2d_with_indices_backward");
    add(shaped(&m::avg_pool2d), "avg_pool2d");
    add(shaped(&m::avg_pool2d_backward), "avg_pool2d_backward");
    add({},
        "copy_ flip sum mean any all new_empty new_zeros new_ones new_full slice_backward select_backward embedding cumsum amax "
        "amin _scaled_dot_product_flash_attention_for_cpu_backward argmax argmin topk gather tril triu nll_loss_forward "
        "nll_loss_backward mse_loss any.dim all.dim prod.dim_int logsumexp linalg_vector_norm std.correction var.correction stack "
        "scatter.src scatter.value scatter_add index_select constant_pad_nd repeat isin.Tensor_Tensor native_group_norm "
        "native_group_norm_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward upsample_nearest2d "
        "upsample_nearest2d_backward upsample_bilinear2d upsample_bilinear2d_backward mse_loss_backward embedding_dense_backward "
        "smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward");
    add({nullptr, shaped(&viewed).kernel, true}, "_unsafe_view");
    add({nullptr, {}, true},
        "view _reshape_alias expand permute transpose.int t unsqueeze squeeze.dim squeeze.dims select.int slice.Tensor split.Tensor "
        "split_with_sizes unbind.int");
  }
};

// True for an elementwise op that returns or writes one tensor.
bool is_pointwise(const c10::OperatorHandle& op) {
  const auto& returned = op.schema().returns();
  const auto& taken = op.schema().arguments();
  if (!op.hasTag(at::Tag::pointwise) || returned.size() != 1 || returned[0].type()->kind() != c10::TypeKind::TensorType) return false;
  const auto written = std::ranges::count_if(taken, [](const auto& a) { return a.alias_info() != nullptr; });
  if (!returned[0].alias_info()) return !written;
  return written == 1 && taken[0].alias_info() && taken[0].alias_info()->isWrite();
}

// Return the dimensions from the outermost in memory to the innermost. Among equal strides the larger size comes first, as in kernels.
Sizes by_step(at::IntArrayRef sizes, at::IntArrayRef strides) {
  Sizes order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0; step *= std::max<int64_t>(sizes[d], 1)) {
    if (strides[d] == step) continue;
    std::ranges::sort(order, {}, [&](int64_t i) { return std::make_tuple(-strides[i], strides[i] ? -sizes[i] : 0, i); });
    break;
  }
  return order;
}

// Add the facts about a tensor, besides its sizes, that results depend on. Equals `TensorClass` in djinn_core/ir/values.py.
void add_class(std::vector<uint64_t>& words, at::IntArrayRef sizes, at::IntArrayRef strides) {
  const auto order = by_step(sizes, strides);
  int64_t extent = 1, count = 1, step = 1;
  bool regular = true;
  for (size_t i = order.size(); i-- > 0;) {
    const auto d = static_cast<size_t>(order[i]);
    regular = regular && strides[d] == step;
    step *= std::max<int64_t>(sizes[d], 1);
    extent += (sizes[d] - 1) * strides[d];
    count *= sizes[d];
    words.push_back(static_cast<uint64_t>(std::min<int64_t>(sizes[d], 2)) | uint64_t(!strides[d]) << 2 | uint64_t(d) << 3);
  }
  words.push_back(uint64_t(extent == count) | uint64_t(regular) << 1);
}

c10::IValue on_meta(const c10::IValue& v) {
  if (v.isDevice()) return at::Device(at::kMeta);
  if (v.isTensor() && is_remote(v.toTensor())) {
    const auto& t = v.toTensor();
    return at::Tensor(at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type()));
  }
  if (!v.isTensorList() && !v.isOptionalTensorList()) return v;
  auto made = v.toList().copy();
  for (size_t i = 0; i < made.size(); ++i) made.set(i, on_meta(made.get(i)));
  return made;
}

std::vector<at::Tensor> call_on_meta(const c10::OperatorHandle& op, const Rule& rule, Stack stack) {
  const c10::DispatchKeySet meta(c10::DispatchKey::Meta);
  if (rule.kernel.isValid()) rule.kernel.callBoxed(op, meta, &stack);
  else op.getComputedKernelForDispatchKey(c10::DispatchKey::Meta).callBoxed(op, meta, &stack);
  std::vector<at::Tensor> found;
  for (const auto& v : stack) {
    if (v.isTensorList()) return v.toTensorVector();
    found.push_back(v.toTensor());
  }
  return found;
}

Shapes shapes_by(const Rule& rule, const OpInfo& info, const Given& given) {
  if (rule.formula) return rule.formula(given);
  Stack stack;
  for (const auto& v : given.args) stack.push_back(on_meta(v));
  Shapes made;
  for (const auto& t : call_on_meta(info.op, rule, std::move(stack))) made.emplace_back(t.sizes());
  return made;
}

// Set the results of a view op, inferred by PyTorch's own code on a meta tensor.
void make_views(const Rule& rule, const OpInfo& info, const Given& given, Call& made) {
  const auto* base = given.operands[0].impl;
  const auto itemsize = static_cast<int64_t>(base->itemsize());
  at::Tensor t(at::detail::empty_strided_meta({}, {}, c10::typeMetaToScalarType(base->dtype())));
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(
      c10::Storage(c10::Storage::use_byte_size_t(), kLargest / itemsize * itemsize, c10::DataPtr(nullptr, at::kMeta), nullptr, false));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(base->sizes(), base->strides(), base->storage_offset());
  Stack stack(given.args.begin(), given.args.end());
  stack[0] = t;
  const auto views = call_on_meta(info.op, rule, std::move(stack));
  const auto is_base = [base](const at::Tensor& v) {
    return v.sizes() == base->sizes() && v.strides() == base->strides() && v.storage_offset() == base->storage_offset();
  };
  require(views.size() == 1 ? is_base(views[0]) == made.nothing : views.size() == made.results.size());
  if (made.nothing) return;
  for (size_t i = 0; i < views.size(); ++i) {
    auto& r = made.results[i];
    require(static_cast<size_t>(views[i].dim()) == r.sizes.size() && views[i].storage_offset() <= kLargest);
    r.sizes = Sizes(views[i].sizes());
    r.strides = Sizes(views[i].strides());
    r.offset = views[i].storage_offset();
    share_layout(r);
  }
}

// Lay out a result as in the known call: dense with the same order of dimensions, or with the first operand's strides.
void lay_out(Result& r, const Sizes& sizes, at::IntArrayRef dims_before, const Given& given) {
  const auto itemsize = static_cast<int64_t>(c10::elementSize(r.dtype));
  const size_t rank = r.sizes.size();
  require(sizes.size() == rank);
  const auto order = by_step(r.sizes, r.strides);
  int64_t before = 1, step = 1;
  bool dense = true;
  Sizes strides(rank);
  for (size_t i = rank; i-- > 0;) {
    const auto d = static_cast<size_t>(order[i]);
    const auto size = std::max<int64_t>(sizes[d], 1);
    require(std::min<int64_t>(sizes[d], 2) == std::min<int64_t>(r.sizes[d], 2) && step <= kLargest / itemsize / size);
    dense = dense && r.strides[d] == before;
    before *= std::max<int64_t>(r.sizes[d], 1);
    strides[d] = step;
    step *= size;
  }
  if (!dense) {  // `dims_before` begins with offset, sizes and strides of the first operand
    require(dims_before.size() > 2 * rank && dims_before.slice(1, rank) == r.sizes && dims_before.slice(1 + rank, rank) == r.strides);
    require(given.shape(0) == sizes);
    strides = Sizes(given.operands[0].impl->strides());
  }
  r.sizes = sizes;
  r.strides = strides;
  r.nbytes = static_cast<size_t>(c10::multiply_integers(sizes) * itemsize);
  share_layout(r);
}

// Set the results of `made`, a copy of a known call, for these arguments.
void make_results(const Rule& rule, const OpInfo& info, const Given& given, Call& made) {
  if (rule.views) return make_views(rule, info, given, made);
  const auto shapes = shapes_by(rule, info, given);
  require(!made.nothing && shapes.size() == made.results.size());
  for (size_t i = 0; i < shapes.size(); ++i) {
    auto& r = made.results[i];
    require(r.kind != Result::kSame || given.shape(r.of) == shapes[i]);
    if (r.kind == Result::kNew) lay_out(r, shapes[i], made.operand_dims, given);
  }
}

}  // namespace

const Rule* rule_of(const OpInfo& info) {
  static const auto* rules = new Rules();
  static const auto* of_pointwise = new Rule{pointwise};
  const auto found = rules->by_op.find(info.name);
  if (found == rules->by_op.end()) return is_pointwise(info.op) ? of_pointwise : nullptr;
  return &found->second;
}

// Return a key that is equal for all calls of one kind: those that differ only in sizes, strides, offsets, and integers of one sign that
// are sizes or indexes; with `any_number`, also in numbers that ops compute with. Empty if no rule applies to such calls.
std::vector<uint64_t> kind_of(at::ArrayRef<uint64_t> words, bool any_number) {
  std::vector<uint64_t> kept{words[0] + 1, words[1]};  // `words[0]` is an even address, so the key of a kind differs from those of calls
  for (size_t i = 2; i < words.size(); ++i) {
    const auto word = words[i];
    kept.push_back(word);
    switch (static_cast<Mark>(word >> 56)) {
      case kTensor: {
        const size_t rank = word >> 8 & 0xff;
        const auto* dims = reinterpret_cast<const int64_t*>(&words[i + 2]);
        if (word >> 24 & 3) return {};  // conjugate or negative bit
        if (std::find(dims, dims + rank, 0) != dims + rank && words[i + 1]) kept.push_back(1);
        add_class(kept, {dims, rank}, {dims + rank, rank});
        i += 1 + 2 * rank;
        break;
      }
      case kGenerator:
        return {};
      case kInt:
        kept.push_back(static_cast<uint64_t>(std::clamp<int64_t>(static_cast<int64_t>(words[++i]), -1, 1)));  // a stride of 0 is refused
        break;
      case kDouble:
      case kNumber:
        if (const auto value = words[++i]; !any_number || !is_moderate(value, word >> 56 == kDouble)) kept.push_back(value);
        break;
      case kComplex:
        kept.push_back(words[++i]);
        [[fallthrough]];
      case kEnumValue:
      case kString:
        kept.push_back(words[++i]);
        break;
      default:
        break;
    }
  }
  return kept;
}

// True if the rule applies to all calls of this call's kind.
bool has_kind(const Rule* rule, const Call& call) {
  if (!rule || call.nothing) return rule && rule->views;
  return !call.results.empty() && std::ranges::all_of(call.results, [&](const Result& r) {
    if (r.conj || r.neg || (r.kind == Result::kView) != rule->views) return false;
    if (r.kind == Result::kView) return r.of == 0;
    return r.kind != Result::kNew || (!r.offset && r.nbytes == c10::multiply_integers(r.sizes) * c10::elementSize(r.dtype));
  });
}

std::optional<Call> call_like(const Call& like, const OpInfo& info, at::ArrayRef<Operand> operands, at::ArrayRef<c10::IValue> args) {
  Call made = like;
  try {
    const at::AutoDispatchBelowADInplaceOrView below;
    make_results(*info.rule, info, {operands, args}, made);
  } catch (const std::exception& error) {  // Python then runs the op's own code, which raises the right error
    if (std::string_view(error.what()).starts_with("KeyboardInterrupt")) throw;
    return std::nullopt;
  }
  if (like.nothing) return made;
  made.like = like.like < 0 ? like.id : like.like;
  made.operand_dims.clear();
  for (const auto& operand : operands) {
    const auto sizes = operand.impl->sizes(), strides = operand.impl->strides();
    made.operand_dims.push_back(operand.impl->storage_offset());
    made.operand_dims.insert(made.operand_dims.end(), sizes.begin(), sizes.end());
    made.operand_dims.insert(made.operand_dims.end(), strides.begin(), strides.end());
  }
  return made;
}

}  // namespace djinn
