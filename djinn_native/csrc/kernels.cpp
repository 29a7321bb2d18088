// Registration with the dispatcher: `record` for each op that has kernels in PyTorch, and special kernels for a few ops.
#include "remote.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_ops.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <set>

namespace djinn {
namespace {

struct Recording final : c10::OperatorKernel {
  explicit Recording(OpInfo& i) : info(i) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) { record(info, stack); }
  OpInfo& info;
};

void record_any(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { record(info_of(op), stack); }

// Records a convolution. The tracer of `torch.jit.trace` ignores `convolution` and expects the `_convolution` in it.
struct Convolution final : c10::OperatorKernel {
  explicit Convolution(OpInfo& i) : info(i), parts(i.op.getComputedKernelForDispatchKey(c10::DispatchKey::HPU)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer)) return parts.callBoxed(op, keys, stack);
    record(info, stack);
  }
  OpInfo& info;
  c10::SafeKernelFunction parts;
};

// ---- ops that PyTorch would decompose ---------------------------------------------------------------------------------

bool is_seen(const at::Tensor& t) {  // true if a dispatch mode, a subclass or a transform must see ops on this tensor
  const auto keys = (t.key_set() | c10::impl::tls_local_dispatch_key_set().included_) - c10::impl::tls_local_dispatch_key_set().excluded_;
  return keys.has_any(c10::python_ks) || keys.has(c10::DispatchKey::FuncTorchBatched) || !t.unsafeGetTensorImpl()->has_storage();
}

bool stays_whole(const c10::IValue& v, bool grad) {
  auto plain = [grad](const at::Tensor& t) {
    return !t.defined() || ((!grad || !t.requires_grad()) && !t._fw_grad(0).defined() && (!is_remote(t) || !is_seen(t)));
  };
  if (v.isTensor()) return plain(v.toTensor());
  if (v.isTensorList()) {
    for (const at::Tensor& t : v.toTensorVector()) {
      if (!plain(t)) return false;
    }
  }
  return true;
}

// Records a composite op as one op, unless autograd, a mode or a transform must see its parts. Then it is decomposed as for any backend.
struct Whole final : c10::OperatorKernel {
  Whole(OpInfo& i, int training_, int dropout_)
      : info(i), apart(i.op.getComputedKernelForDispatchKey(c10::DispatchKey::AutogradHPU)), training(training_), dropout(dropout_) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const size_t first = stack->size() - info.args;
    const bool grad = c10::GradMode::is_enabled();
    bool whole = c10::impl::TorchDispatchModeTLS::stack_len() == 0 && !trains(*stack, first);
    for (size_t i = first; whole && i < stack->size(); ++i) whole = stays_whole((*stack)[i], grad);
    if (!whole) return apart.callBoxed(op, keys, stack);
    at::AutoDispatchBelowADInplaceOrView below;
    record(info, stack);
  }
  // True if the call draws random numbers or updates statistics. Both must be recorded as ops of their own.
  bool trains(const Stack& stack, size_t first) const {
    if (training < 0 || !stack[first + static_cast<size_t>(training)].toBool()) return false;
    return dropout < 0 || stack[first + static_cast<size_t>(dropout)].toDouble() != 0;
  }
  OpInfo& info;
  c10::SafeKernelFunction apart;
  int training, dropout;
};

// Attention is one op without gradients and dropout. Otherwise Python chooses the kernel of PyTorch for the executor's device.
struct Attention final : c10::OperatorKernel {
  explicit Attention(OpInfo& i) : info(i) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    const size_t first = stack->size() - info.args;
    if (kBatches && lacks_batch(*stack, first)) return in_batch_of_one(op, stack, first);
    const bool grad = c10::GradMode::is_enabled();
    const auto& context = at::globalContext();
    bool whole = c10::impl::TorchDispatchModeTLS::stack_len() == 0 && (*stack)[first + 4].toDouble() == 0 &&
                 context.userEnabledFlashSDP() && context.userEnabledMathSDP();
    for (size_t i = first; whole && i < first + 4; ++i) whole = stays_whole((*stack)[i], grad);
    if (!whole) {
      Stack call(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
      call_python("djinn::attention", &call, /*hides_modes=*/false);
      stack->resize(first);
      stack->push_back(std::move(call[0]));
      return;
    }
    at::AutoDispatchBelowADInplaceOrView below;
    record(info, stack);
  }
  // Since PyTorch 2.14, all devices treat three-dimensional operands as a batch of one.
  static constexpr bool kBatches = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14;
  static bool lacks_batch(const Stack& stack, size_t first) {
    return std::all_of(stack.begin() + static_cast<std::ptrdiff_t>(first), stack.begin() + static_cast<std::ptrdiff_t>(first) + 3,
                       [](const c10::IValue& v) { return v.toTensor().dim() == 3; });
  }
  static void in_batch_of_one(const c10::OperatorHandle& op, Stack* stack, size_t first) {
    for (size_t i = first; i < first + 4; ++i) {
      auto& given = (*stack)[i];
      if (!given.isTensor()) continue;  // an absent mask
      auto batch = given.toTensor();
      while (batch.dim() < 4) batch = batch.unsqueeze(0);
      given = std::move(batch);
    }
    op.callBoxed(*stack);
    stack->back() = stack->back().toTensor().squeeze(0);
  }
  OpInfo& info;
};

// Backward of the fused CPU attention. PyTorch's kernel is not differentiable, so Python computes the backward for double backward.
struct AttentionBackward final : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const size_t args = op.schema().arguments().size(), first = stack->size() - args;
    if (!(*stack)[first].toTensor().defined()) {  // no gradient arrives
      stack->resize(first);
      for (int i = 0; i < 3; ++i) stack->emplace_back(at::Tensor());
      return;
    }
    bool differentiated = false;
    for (size_t i = first; i < stack->size(); ++i) {
      const auto& v = (*stack)[i];
      if (!v.isTensor() || !v.toTensor().defined()) continue;
      differentiated |= (c10::GradMode::is_enabled() && v.toTensor().requires_grad()) || v.toTensor()._fw_grad(0).defined();
    }
    if (differentiated) return call_python("djinn::attention_backward", stack, /*hides_modes=*/false);
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  }
};

// ---- copies -----------------------------------------------------------------------------------------------------------

bool is_here(const at::Tensor& t) { return t.defined() && !is_remote(t); }

struct Copy final : c10::OperatorKernel {
  explicit Copy(OpInfo& i) : info(i) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    const size_t first = stack->size() - info.args;
    const auto& target = (*stack)[first].toTensor();
    const auto& source = (*stack)[first + 1].toTensor();
    const bool number = is_here(source) && source.dim() == 0 && source.device().is_cpu() && is_remote(target) && target.dim() > 0;
    if ((is_remote(target) && is_remote(source) && has_value(target) && has_value(source)) || number) {
      (*stack)[first + 2] = false;  // `non_blocking` has no effect between remote tensors
      return record(info, stack);
    }
    upcall(op, stack);
  }
  OpInfo& info;
};

struct ToCopy final : c10::OperatorKernel {
  explicit ToCopy(OpInfo& i) : info(i) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    const size_t first = stack->size() - info.args;
    const auto& device = (*stack)[first + 3];
    if (!is_remote((*stack)[first].toTensor())) return from_elsewhere(stack, first);
    if (!device.isNone() && device.toDevice().type() != kRemote) return upcall(op, stack);
    (*stack)[first + 4] = c10::IValue();  // drop pin_memory
    (*stack)[first + 5] = false;          // drop non_blocking
    record(info, stack);
  }
  static void from_elsewhere(Stack* stack, size_t first) {
    const auto source = (*stack)[first].toTensor();
    const auto options =
        source.options().dtype((*stack)[first + 1].toOptional<at::ScalarType>()).device((*stack)[first + 3].toOptional<at::Device>());
    auto made = at::empty_like(source, options.pinned_memory(std::nullopt), (*stack)[first + 6].toOptional<at::MemoryFormat>());
    made.copy_(source, (*stack)[first + 5].toBool());
    stack->resize(first);
    stack->emplace_back(std::move(made));
  }
  OpInfo& info;
};

void ask_python_always(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { upcall(op, stack); }

// PyTorch copies with this op if no subclass must see the copy, such as in `torch.tensor`.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  at::_ops::copy_::redispatch(c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), const_cast<at::Tensor&>(to), self, non_blocking);
  return to;
}

// ---- factories --------------------------------------------------------------------------------------------------------

// Factories are recorded in a canonical form: with explicit dtype and index, and `arange` with start, end and step. Equal programs then
// have the same key.
struct Factory final : c10::OperatorKernel {
  explicit Factory(const c10::OperatorHandle& op)
      : args(op.schema().arguments().size()),
        options(static_cast<size_t>(op.schema().argumentIndexWithName("dtype").value())),
        range(op.schema().name() == "aten::arange"),
        full(op.schema().name() == "aten::full"),
        info(info_of(range ? c10::Dispatcher::singleton().findSchemaOrThrow("aten::arange", "start_step") : op)) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
    auto* given = &(*stack)[stack->size() - args];
    const auto type = default_dtype(given);
    auto* option = given + options;
    TORCH_CHECK_NOT_IMPLEMENTED(option[1].isNone() || option[1].toLayout() == at::kStrided, "layout ", option[1].toLayout(),
                                " is not supported on remote_accelerator; use a strided tensor");
    const auto device = option[2].toOptional<at::Device>();
    const auto index = device && device->has_index() ? device->index() : current_index();
    check_index(index);
    if (option[0].isNone()) option[0] = type;
    option[1] = option[3] = c10::IValue();
    option[2] = at::Device(kRemote, index);
    const auto first = stack->end() - static_cast<std::ptrdiff_t>(args);
    if (range && options < 3) stack->insert(first + static_cast<std::ptrdiff_t>(options), int64_t{1});
    if (range && options == 1) stack->insert(stack->end() - static_cast<std::ptrdiff_t>(args + 1), int64_t{0});
    record(info, stack);
  }
  // A bool fill value of `full` becomes an integer. A bool would be a constant, and programs with other values would not match.
  c10::ScalarType default_dtype(c10::IValue* given) const {
    if (full && given[1].isBool()) {
      given[1] = static_cast<int64_t>(given[1].toBool());
      return at::kBool;
    }
    const auto usual = c10::get_default_dtype_as_scalartype();
    if (full && given[1].isComplexDouble()) return c10::toComplexType(usual);
    const auto whole = [](const c10::IValue& v) { return v.isInt() || v.isBool(); };
    const bool integers = full ? whole(given[1]) : range && std::all_of(given, given + options, whole);
    return integers ? at::kLong : usual;
  }
  const size_t args, options;
  const bool range, full;
  OpInfo& info;
};

// ---- tensors over storages --------------------------------------------------------------------------------------------

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  TORCH_CHECK(source.device_type() == kRemote, "set_: a remote_accelerator tensor cannot look into memory of this machine");
  c10::DimVector dense;
  if (stride.empty() && !size.empty()) {
    dense.resize(size.size());
    int64_t step = 1;
    for (size_t i = size.size(); i-- > 0;) {
      dense[i] = step;
      step *= std::max<int64_t>(size[i], 1);
    }
    stride = dense;
  }
  const auto itemsize = static_cast<int64_t>(self.element_size());
  const auto reach = [&] {
    const bool empty = std::ranges::find(size, 0) != size.end();
    return empty ? 0 : at::detail::computeStorageNbytes(size, stride, static_cast<size_t>(itemsize), static_cast<size_t>(offset));
  };
  // If `source` is a part of a storage, `offset` counts from that part. Convert it to an offset into the whole storage.
  const auto part = source.nbytes();
  if (const auto before = take_whole(&source)) {
    TORCH_CHECK(reach() <= part, "Trying to resize storage that is not resizable");
    TORCH_CHECK(before % itemsize == 0, "set_: elements of ", itemsize, " bytes cannot begin at byte ", before, " of a storage");
    offset += before / itemsize;
  }
  if (typeid(*impl) == typeid(RemoteImpl)) static_cast<RemoteImpl*>(impl)->value.reset();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, stride, offset);
  const size_t needed = reach();
  const auto& storage = impl->unsafe_storage();
  if (needed > storage.nbytes() && storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get()) {
    Stack stack{storage, static_cast<int64_t>(needed)};
    call_python("djinn::resize_storage", &stack);
  }
  return self;
}
at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {count}, {1});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  if (typeid(*impl) == typeid(RemoteImpl) && has_value(source)) {
    const auto o = operand_of(source);
    auto value = ValuePtr::reclaim_copy(o.value);
    static_cast<RemoteImpl*>(impl)->value.reset();
    impl->set_storage_keep_dtype(c10::Storage(o.impl->unsafe_storage()));
    impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
    static_cast<RemoteImpl*>(impl)->value = std::move(value);
    return self;
  }
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor& set_none(at::Tensor& self) { return set_storage(self, new_storage(0, self.device().index()), 0, {0}, {1}); }

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  static auto& info = info_of(c10::Dispatcher::singleton().findSchemaOrThrow("aten::view", ""));
  return record_view(info, self, size);
}

void record_stream(at::Tensor&, at::Stream) {}

// Returns another tensor for the same value. A tensor from Python already has a Python object, so it cannot become a Parameter.
struct SameValue final : c10::OperatorKernel {
  explicit SameValue(OpInfo& i) : info(i) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
    auto& top = stack->back();
    if (!has_value(top.toTensor())) return record(info, stack);
    top = twin_of(operand_of(top.toTensor()));
  }
  OpInfo& info;
};

// Tensor that autograd uses for absent tangents. Its product with infinity is zero.
at::Tensor zero_tensor(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                       std::optional<at::Device> device, std::optional<bool> pinned) {
  const auto zeros = at::_ops::zeros::redispatch(c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), size, dtype, layout, device, pinned);
  auto made = twin_of(operand_of(zeros));
  static_cast<RemoteImpl*>(made.unsafeGetTensorImpl())->mark_zero();
  return made;
}

// True if a Parameter can take over data that moved between CPU and device, as for CUDA. PyTorch's own list lacks PrivateUse1.
bool takes_over(const at::Tensor& self, const at::Tensor& from) {
  const auto is_dense = [](const at::Tensor& t) {
    return t.layout() == at::kStrided && t.key_set().has_any(c10::DispatchKeySet(c10::DispatchKey::Dense));
  };
  return self.key_set() == from.key_set() || (is_dense(self) && is_dense(from));
}

// ---- registration -----------------------------------------------------------------------------------------------------

struct KeptWhole {
  const char* name;
  const char* overload;
  const char* training;  // argument that turns on training mode
  const char* dropout;   // dropout probability: without dropout, training mode changes nothing
};
// Composite ops that have fused kernels on the CPU and CUDA. Those round differently than the op's parts.
const KeptWhole kWhole[] = {{"aten::linear", "", nullptr, nullptr},         {"aten::matmul", "", nullptr, nullptr},
                            {"aten::layer_norm", "", nullptr, nullptr},     {"aten::rms_norm", "", nullptr, nullptr},
                            {"aten::batch_norm", "", "training", nullptr},  {"aten::lstm", "input", "train", "dropout"},
                            {"aten::gru", "input", "train", "dropout"},     {"aten::rnn_relu", "input", "train", "dropout"},
                            {"aten::rnn_tanh", "input", "train", "dropout"}};
// Ops that PyTorch decomposes on backends without a kernel of their own. The parts round differently than the CUDA and CPU kernels.
const char* const kWithKernels[] = {"aten::silu_backward", "aten::mish_backward", "aten::native_channel_shuffle"};
const char* const kOwn[] = {"aten::convolution",
                            "aten::copy_",
                            "aten::view",
                            "aten::_to_copy",
                            "aten::_copy_from",
                            "aten::set_.source_Storage_storage_offset",
                            "aten::set_.source_Storage",
                            "aten::set_.source_Tensor",
                            "aten::set_",
                            "aten::record_stream",
                            "aten::is_pinned",
                            "aten::_pin_memory",
                            "aten::_is_pinned",
                            "aten::scaled_dot_product_attention",
                            "aten::_has_compatible_shallow_copy_type",
                            "aten::detach",
                            "aten::alias",
                            "aten::_efficientzerotensor"};
const char* const kFactories[] = {"empty.memory_format",
                                  "empty_strided",
                                  "arange",
                                  "arange.start",
                                  "arange.start_step",
                                  "eye",
                                  "eye.m",
                                  "full",
                                  "zeros",
                                  "ones",
                                  "scalar_tensor",
                                  "kaiser_window",
                                  "tril_indices",
                                  "triu_indices",
                                  "kaiser_window.periodic",
                                  "kaiser_window.beta"};

// Factories that PyTorch decomposes into an empty tensor and an op. The op checks dtypes and ranges before the executor would.
const char* const kTakenApart[] = {
    "aten::rand",        "aten::randn",          "aten::randint",     "aten::normal",       "aten::bartlett_window",
    "aten::hann_window", "aten::hamming_window", "aten::fft_fftfreq", "aten::fft_rfftfreq", "aten::blackman_window"};

bool is_taken_apart(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return std::ranges::find(kTakenApart, op.schema().name()) != std::end(kTakenApart) &&
         std::ranges::none_of(arguments, [](const auto& a) { return a.type()->kind() == c10::TypeKind::TensorType; });
}

torch::Library& library(c10::DispatchKey key) {
  static auto* backend = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  static auto* autograd = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
  return key == c10::DispatchKey::PrivateUse1 ? *backend : *autograd;
}

template <class Kernel, class... Arguments> torch::CppFunction boxed(Arguments&&... arguments) {
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(std::forward<Arguments>(arguments)...));
}

bool has_backend_kernel(const c10::OperatorHandle& op) {
  return op.hasKernelForAnyDispatchKey(c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::Meta, c10::DispatchKey::CUDA})) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
}

void register_kept_whole() {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& kept : kWhole) {
    auto op = dispatcher.findSchemaOrThrow(kept.name, kept.overload);
    const std::string full = *kept.overload ? std::string(kept.name) + "." + kept.overload : kept.name;
    const auto place = [&](const char* name) { return name ? op.schema().argumentIndexWithName(name).value_or(-1) : -1; };
    library(c10::DispatchKey::AutogradPrivateUse1).impl(full.c_str(), boxed<Whole>(info_of(op), place(kept.training), place(kept.dropout)));
    library(c10::DispatchKey::PrivateUse1).impl(full.c_str(), boxed<Whole>(info_of(op), place(kept.training), place(kept.dropout)));
  }
  auto attention = dispatcher.findSchemaOrThrow("aten::scaled_dot_product_attention", "");
  library(c10::DispatchKey::AutogradPrivateUse1).impl("scaled_dot_product_attention", boxed<Attention>(info_of(attention)));
  library(c10::DispatchKey::PrivateUse1).impl("scaled_dot_product_attention", boxed<Attention>(info_of(attention)));
  library(c10::DispatchKey::AutogradPrivateUse1).impl("_scaled_dot_product_flash_attention_for_cpu_backward", boxed<AttentionBackward>());
}

bool is_factory(const std::string& full) { return std::ranges::find(kFactories, full.substr(sizeof "aten::" - 1)) != std::end(kFactories); }

void register_factories(torch::Library& at_key) {
  for (const std::string name : kFactories) {
    const auto dot = name.find('.');
    const auto overload = dot == std::string::npos ? "" : name.substr(dot + 1);
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + name.substr(0, dot)).c_str(), overload.c_str());
    at_key.impl(name.c_str(), boxed<Factory>(op));
  }
  at_key.impl("_efficientzerotensor", &zero_tensor);
}

}  // namespace

// Make factories on device type `cuda` return remote tensors.
void register_cuda_factories() {
  static auto* cuda = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  const SilentWarnings silent;  // suppress PyTorch's warning about a replaced kernel
  register_factories(*cuda);
}

// Record each op that has a kernel for some backend as one op. PyTorch decomposes all others.
void register_kernels() {
  auto& dispatcher = c10::Dispatcher::singleton();
  auto& backend = library(c10::DispatchKey::PrivateUse1);
  const std::set<std::string> own(std::begin(kOwn), std::end(kOwn));
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("aten::")) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema()) continue;
    const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    if (own.contains(full) || is_factory(full) || op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
        !has_backend_kernel(*op) || is_taken_apart(*op)) {
      continue;
    }
    backend.impl(full.c_str(), boxed<Recording>(info_of(*op)));
  }
  for (const char* name : kWithKernels) {
    if (auto op = dispatcher.findSchema({name, ""})) backend.impl(name, boxed<Recording>(info_of(*op)));
  }
  register_kept_whole();
  backend.impl("convolution", boxed<Convolution>(info_of(dispatcher.findSchemaOrThrow("aten::convolution", ""))));
  auto copy = dispatcher.findSchemaOrThrow("aten::copy_", ""), to_copy = dispatcher.findSchemaOrThrow("aten::_to_copy", "");
  backend.impl("copy_", boxed<Copy>(info_of(copy)));
  backend.impl("_to_copy", boxed<ToCopy>(info_of(to_copy)));
  for (const char* name : {"aten::detach", "aten::alias"}) {
    backend.impl(name, boxed<SameValue>(info_of(dispatcher.findSchemaOrThrow(name, ""))));
  }
  register_factories(backend);
}

// Record a custom op instead of running its PyTorch implementation. The op may be defined later.
void keep_whole(const std::string& name, const std::string& overload) {
  static auto* libraries = new std::vector<std::unique_ptr<torch::Library>>();
  const SilentWarnings silent;
  const auto space = name.substr(0, name.find(':'));
  libraries->push_back(std::make_unique<torch::Library>(torch::Library::IMPL, space, c10::DispatchKey::PrivateUse1, __FILE__, __LINE__));
  const std::string full = overload.empty() ? name : name + "." + overload;
  libraries->back()->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&record_any>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&record_any>()); }
// Ops that return tensors of these layouts. Python builds them from strided tensors.
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&ask_python_always>()); }
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&ask_python_always>()); }
TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&ask_python_always>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_none);
  m.impl("record_stream", &record_stream);
  m.impl("view", &view);
  m.impl("_copy_from", &copy_from);
  m.impl("_has_compatible_shallow_copy_type", &takes_over);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("_has_compatible_shallow_copy_type", &takes_over); }

TORCH_LIBRARY_FRAGMENT(djinn, m) {
  m.def("keep_whole(str name, str overload) -> ()", &keep_whole);
  // Implemented in Python.
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, bool is_causal, float? scale, bool enable_gqa) -> Tensor");
  m.def(
      "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, *, "
      "Tensor? attn_mask=None, float? scale=None) -> (Tensor, Tensor, Tensor)");
}

}  // namespace djinn
