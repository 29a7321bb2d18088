// Ops: one fallback that runs CPU kernels on device memory, and special kernels for a few ops.
#include "fake.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>

namespace fakegpu {
namespace {

bool is_fake(const at::Tensor& t) { return t.defined() && t.device().type() == kFake; }

// ---- facts about an op -------------------------------------------------------------------------------------------------

enum class Work : uint8_t { kElements, kMatrix, kConvolution, kConvolutionBackward, kAttention };

struct OpInfo {
  const char* name;
  size_t arguments;
  bool view = false, waits = false, random = false, indexes = false;
  int generator = -1;  // index of the generator argument; -1 without one
  Work work = Work::kElements;
  std::vector<bool> written;  // true for each argument that the op writes
  std::vector<int> same;      // for each result, the index of the argument that the op returns as this result; -1 for none
};

// Ops for which the host waits on a GPU, because result sizes or control flow depend on values.
const std::set<std::string> kWaits{"aten::nonzero",
                                   "aten::masked_select",
                                   "aten::_unique2",
                                   "aten::_unique",
                                   "aten::unique_dim",
                                   "aten::equal",
                                   "aten::bincount",
                                   "aten::repeat_interleave",
                                   "aten::unique_consecutive",
                                   "aten::histc",
                                   "aten::unique_dim_consecutive"};
// Ops whose GPU kernels trap if an index is out of range. For the first three, indices may be on the CPU.
const std::set<std::string> kIndexes{
    "aten::index",       "aten::_index_put_impl_", "aten::index_put_",  "aten::index_select",       "aten::gather",      "aten::scatter",
    "aten::scatter_add", "aten::scatter_reduce",   "aten::embedding",   "aten::nll_loss_forward",   "aten::take",        "aten::put_",
    "aten::index_add",   "aten::index_copy",       "aten::index_fill_", "aten::nll_loss2d_forward", "aten::index_select"};

Work work_of(const std::string& name) {
  static const std::map<std::string, Work> found{{"aten::mm", Work::kMatrix},
                                                 {"aten::addmm", Work::kMatrix},
                                                 {"aten::bmm", Work::kMatrix},
                                                 {"aten::baddbmm", Work::kMatrix},
                                                 {"aten::addmv", Work::kMatrix},
                                                 {"aten::convolution", Work::kConvolution},
                                                 {"aten::convolution_backward", Work::kConvolutionBackward},
                                                 {"aten::scaled_dot_product_attention", Work::kAttention},
                                                 {"aten::_scaled_dot_product_flash_attention_for_cpu", Work::kAttention}};
  const auto one = found.find(name);
  return one == found.end() ? Work::kElements : one->second;
}

const OpInfo& info_of(const c10::OperatorHandle& op) {
  static auto* all = new std::unordered_map<const c10::FunctionSchema*, OpInfo>();
  const auto& schema = op.schema();
  Guard guard(mutex());
  auto [place, is_new] = all->try_emplace(&schema);
  auto& info = place->second;
  if (!is_new) return info;
  const auto& arguments = schema.arguments();
  info.name = schema.name().c_str();
  info.arguments = arguments.size();
  info.waits = kWaits.contains(schema.name());
  info.indexes = kIndexes.contains(schema.name());
  info.work = work_of(schema.name());
  for (const auto& a : arguments) {
    if (a.real_type()->str().starts_with("Generator")) info.generator = static_cast<int>(info.written.size());
    const bool statistics = a.name() == "running_mean" || a.name() == "running_var";  // batch norms write them, as not all schemas say
    info.written.push_back(statistics || (a.alias_info() && a.alias_info()->isWrite()));
  }
  info.random = info.generator < 0 && op.hasTag(at::Tag::nondeterministic_seeded);
  for (const auto& result : schema.returns()) {
    const auto* alias = result.alias_info();
    int same = -1;
    for (size_t i = 0; alias && alias->isWrite() && i < arguments.size(); ++i) {
      if (info.written[i] && arguments[i].alias_info() && *arguments[i].alias_info() == *alias) same = static_cast<int>(i);
    }
    info.view |= alias && !alias->isWrite();
    info.same.push_back(same);
  }
  return info;
}

// ---- one call -----------------------------------------------------------------------------------------------------------

struct Call {
  struct Shared {
    c10::StorageImpl* fake;
    c10::Storage cpu;
    void* address;
  };
  struct Argument {
    at::Tensor fake, cpu;
    bool written;
  };
  std::vector<Shared> storages;
  std::vector<Argument> tensors;
  c10::DeviceIndex device = -1;
  bool host_tensor = false;

  at::Tensor lower(const at::Tensor& t, bool written) {
    if (!t.defined()) return t;
    if (!is_fake(t)) {
      host_tensor |= t.dim() > 0;
      return t;
    }
    TORCH_CHECK(device < 0 || device == t.device().index(),
                "Expected all tensors to be on the same device, but found fakegpu:", int{device}, " and ", t.device());
    device = t.device().index();
    auto* impl = t.unsafeGetTensorImpl();
    auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage_of(impl->unsafe_storage().unsafeGetStorageImpl())),
                                                         c10::DispatchKeySet(c10::DispatchKey::CPU), impl->dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (impl->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    if (t.is_conj()) made._set_conj(true);
    if (t.is_neg()) made._set_neg(true);
    tensors.push_back({t, made, written});
    return made;
  }

  void lower(c10::IValue* value, bool written) {
    if (value->isTensor()) {
      *value = lower(value->toTensor(), written);
    } else if (value->isTensorList()) {
      c10::List<at::Tensor> made;
      for (const at::Tensor& t : value->toTensorVector()) made.push_back(lower(t, written));
      *value = std::move(made);
    } else if (value->isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> made;
      for (const std::optional<at::Tensor>& t : value->toOptionalTensorVector()) {
        made.push_back(t ? std::optional(lower(*t, written)) : t);
      }
      *value = std::move(made);
    } else if (value->isDevice()) {
      const auto d = value->toDevice();
      if (d.type() != kFake) return;
      device = d.has_index() ? d.index() : current_device();
      *value = c10::Device(c10::DeviceType::CPU);
    } else if (value->isGenerator()) {
      *value = inner_generator(value->toGenerator());
    }
  }

  // Return the device tensor for a result of the CPU kernel.
  at::Tensor raise(const at::Tensor& t, Launch* launch) {
    if (!t.defined()) return t;
    for (const auto& a : tensors) {
      if (a.cpu.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) return a.fake;
    }
    for (const auto& a : tensors) {
      if (!a.cpu.storage().is_alias_of(t.storage())) continue;
      // Use the keys of the base, because in inference mode, a view of a normal tensor is a normal tensor.
      auto made =
          at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(a.fake.storage()), a.fake.key_set(), t.dtype());
      made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
      made._set_conj(t.is_conj());
      made._set_neg(t.is_neg());
      return made;
    }
    const auto bytes = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.element_size());
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, allocate(bytes, device), device_allocator(), /*resizable=*/true);
    auto made = device_tensor(std::move(storage), t.scalar_type(), t.sizes(), t.strides(), 0);
    if (bytes) {
      std::memcpy(kernel_address(made.storage().unsafeGetStorageImpl()), static_cast<const char*>(t.const_data_ptr()), bytes);
      launch->uses(made, true);
    }
    return made;
  }

  c10::IValue raise(const c10::IValue& value, Launch* launch) {
    if (value.isTensor()) return raise(value.toTensor(), launch);
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> made;
    for (const at::Tensor& t : value.toTensorVector()) made.push_back(raise(t, launch));
    return made;
  }

  // Apply the sizes to which the kernel resized the tensors that it wrote.
  void follow_sizes() {
    for (const auto& shared : storages) {
      auto* cpu = shared.cpu.unsafeGetStorageImpl();
      if (raw_address(cpu) == shared.address && cpu->nbytes() == shared.fake->nbytes()) continue;
      resize_storage(shared.fake, cpu->nbytes());
      if (!cpu->nbytes()) continue;
      auto* there = kernel_address(shared.fake);
      std::memcpy(there, raw_address(cpu), cpu->nbytes());
      cpu->set_data_ptr_noswap(c10::DataPtr(there, c10::Device(c10::DeviceType::CPU)));  // a graph writes there when it is replayed
    }
    for (auto& a : tensors) {
      if (a.written && (a.cpu.sizes() != a.fake.sizes() || a.cpu.strides() != a.fake.strides())) {
        a.fake.unsafeGetTensorImpl()->set_sizes_and_strides(a.cpu.sizes(), a.cpu.strides(), a.cpu.storage_offset());
      }
    }
  }

 private:
  const c10::Storage& storage_of(c10::StorageImpl* s) {
    for (const auto& shared : storages) {
      if (shared.fake == s) return shared.cpu;
    }
    auto* address = kernel_address(s);
    storages.push_back({s,
                        c10::Storage(c10::Storage::use_byte_size_t(), s->nbytes(), c10::DataPtr(address, c10::Device(c10::DeviceType::CPU)),
                                     c10::GetAllocator(c10::DeviceType::CPU), /*resizable=*/true),
                        address});
    return storages.back().cpu;
  }
};

double operations(const OpInfo& info, const Call& call, const std::vector<c10::IValue>& results) {
  double produced = 0;
  for (const auto& r : results) {
    if (r.isTensor() && r.toTensor().defined()) produced += static_cast<double>(r.toTensor().numel());
  }
  const auto tensor = [&](size_t i) -> const at::Tensor& { return call.tensors.at(std::min(i, call.tensors.size() - 1)).cpu; };
  if (call.tensors.empty() || info.work == Work::kElements) return produced;
  const auto weight = [&](size_t i) {
    return static_cast<double>(tensor(i).numel()) / static_cast<double>(std::max<int64_t>(tensor(i).size(0), 1));
  };
  switch (info.work) {
    case Work::kMatrix: {  // the matrices are the last two operands before `out`
      const auto& a = tensor(call.tensors.size() - 2 - (call.tensors.back().written ? 1 : 0));
      return 2 * produced * static_cast<double>(a.dim() ? a.size(-1) : 1);
    }
    case Work::kConvolution:
      return 2 * produced * weight(1);
    case Work::kConvolutionBackward:
      return 4 * static_cast<double>(tensor(0).numel()) * weight(2);
    case Work::kAttention:
      return 4 * static_cast<double>(tensor(0).numel()) * static_cast<double>(tensor(1).size(-2));
    default:
      return produced;
  }
}

// Restores the tensors that a captured op wrote, because the op takes effect only when the graph is replayed.
// Memory that the graph allocates has no earlier contents.
struct Unwritten {
  Unwritten(const Call& call, const Graph* graph) {
    for (const auto& a : call.tensors) {
      if (a.written && a.cpu.numel() && !is_of_graph(graph, block_of(a.fake))) kept.emplace_back(a.cpu, a.cpu.clone());
    }
  }
  void restore() const {
    for (const auto& [t, before] : kept) t.copy_(before);
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> kept;
};

void run_kernel(const c10::OperatorHandle& op, const OpInfo& info, c10::DeviceIndex device, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  std::optional<DeviceRandom> random;
  if (info.random) random.emplace(device);
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  } catch (const c10::Error& error) {
    const std::string said = error.what_without_backtrace();
    if (info.indexes && !said.starts_with("Dimension") && said.find("out of") != std::string::npos) fail_now(info.name);
    throw;
  }
}

// True if the host waits for the op, as for assignments by mask and for indices on the CPU.
bool host_waits(const OpInfo& info, const Call& call) {
  const auto is_mask = [](const Call::Argument& a) { return a.cpu.scalar_type() == at::kBool || a.cpu.scalar_type() == at::kByte; };
  const bool assigns = std::string_view(info.name) == "aten::_index_put_impl_";
  return info.waits || (info.indexes && call.host_tensor) || (assigns && call.tensors.size() > 1 && is_mask(call.tensors[1]));
}

void run(const c10::OperatorHandle& op, Stack* stack) {
  const auto& info = info_of(op);
  const size_t first = stack->size() - info.arguments;
  const std::vector<c10::IValue> given(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
  Call call;
  for (size_t i = 0; i < info.arguments; ++i) call.lower(&(*stack)[first + i], info.written[i]);
  if (call.device < 0) call.device = current_device();
  TORCH_CHECK(!call.host_tensor || info.indexes, "Expected all tensors to be on the same device, but ", info.name,
              " was given tensors on cpu and on fakegpu:", int{call.device});
  if (info.generator >= 0) {
    auto& generator = (*stack)[first + static_cast<size_t>(info.generator)];
    if (generator.isNone()) generator = inner_generator(default_generator(call.device));
  }
  Stack arguments(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
  auto& lane = current_lane(call.device);
  std::optional<Launch> launch;
  if (!info.view) {
    launch.emplace(info.name, lane);
    for (const auto& a : call.tensors) launch->uses(a.fake, a.written);
    launch->check();
    if (host_waits(info, call)) synchronize(info.name, lane);
  }
  std::optional<Unwritten> unwritten;
  if (lane.capture && launch) unwritten.emplace(call, lane.capture);
  run_kernel(op, info, call.device, stack);
  std::vector<c10::IValue> lowered(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
  stack->resize(first);
  for (size_t i = 0; i < lowered.size(); ++i) {
    const auto same = i < info.same.size() ? info.same[i] : -1;
    stack->push_back(same >= 0 ? given[static_cast<size_t>(same)] : call.raise(lowered[i], launch ? &*launch : nullptr));
  }
  call.follow_sizes();
  if (!launch) return;
  if (unwritten) {
    unwritten->restore();
    return capture_op(lane.capture, op, info.random ? call.device : c10::DeviceIndex{-1}, std::move(arguments), info.written,
                      {stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end()}, info.same);
  }
  count("launches");
  count("ops_outside_graphs");
  launch->finish(std::max(operations(info, call, lowered) / hardware().flops, launch->bytes / hardware().bandwidth));
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) { run(op, stack); }

// Composite ops that PyTorch decomposes differently on each device. Without gradients, the fused CPU kernels run.
const std::set<std::string> kWhole{"aten::lstm.input", "aten::gru.input", "aten::rnn_tanh.input", "aten::rnn_relu.input",
                                   "aten::scaled_dot_product_attention"};
struct Whole final : c10::OperatorKernel {
  explicit Whole(const c10::OperatorHandle& op) : apart(op.getComputedKernelForDispatchKey(c10::DispatchKey::AutogradHPU)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    if (c10::GradMode::is_enabled()) return apart.callBoxed(op, keys, stack);
    run(op, stack);
  }
  c10::SafeKernelFunction apart;
};

// ---- copies -------------------------------------------------------------------------------------------------------------

size_t bytes_of(const at::Tensor& t) { return static_cast<size_t>(t.numel()) * t.element_size(); }
bool is_flat(const at::Tensor& t, const at::Tensor& like) {
  return t.scalar_type() == like.scalar_type() && t.strides() == like.strides() && t.is_non_overlapping_and_dense() && !t.is_conj() &&
         !t.is_neg() && !like.is_conj() && !like.is_neg();
}

char* data_of(const at::Tensor& t) { return static_cast<char*>(cpu_view(t).data_ptr()); }

void add_host(Launch* launch, const at::Tensor& host, bool write) {
  Guard guard(mutex());
  const auto* data = static_cast<const char*>(host.const_data_ptr());
  if (auto* block = block_of(data, false)) {
    const auto begin = static_cast<size_t>(data - block->kernel);
    launch->add(block, begin, begin + bytes_of(host), write);
  }
}

double transfer(Launch* launch, const char* what, size_t bytes, double rate) {
  count_copy(what, bytes);
  return launch->finish(static_cast<double>(bytes) / rate);
}

void upload(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto host = is_flat(from, to) ? from : at::empty_like(to, to.options().device(at::kCPU)).copy_(from);
  const bool pinned = host.numel() > 0 && is_pinned(host.const_data_ptr()), async = pinned && non_blocking;
  auto& lane = current_lane(to.device().index());
  if (!pinned) check_no_capture("an upload from pageable memory");
  Launch launch("an upload", lane, Engine::kUpload);
  launch.uses(to, true);
  if (pinned) add_host(&launch, host, false);
  launch.check();
  if (lane.capture) return capture_copy(lane.capture, cpu_view(to), host);
  auto* target = data_of(to);
  {
    Guard guard(mutex());
    const auto* data = static_cast<const char*>(host.const_data_ptr());
    host_copies_arrive(data, bytes_of(host));
    std::memcpy(target, data, bytes_of(host));
    const auto done = transfer(&launch, pinned ? "host_to_device" : "pageable_to_device", bytes_of(host), hardware().link);
    if (async) host_lends(static_cast<char*>(host.data_ptr()), bytes_of(host), done);
  }
  if (!async) synchronize("an upload", lane);
}

void download(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!is_flat(from, to)) {
    const auto there = at::empty_like(to, to.options().device(from.device()).pinned_memory(false)).copy_(from);
    if (is_flat(there, to)) return download(there, to, non_blocking);
    const auto here = at::empty_like(there, there.options().device(at::kCPU));
    download(there, here, false);
    to.copy_(here);
    return;
  }
  const bool pinned = to.numel() > 0 && is_pinned(to.const_data_ptr()), async = pinned && non_blocking;
  auto& lane = current_lane(from.device().index());
  if (!async) check_no_capture("a copy to the host");
  Launch launch("a download", lane, Engine::kDownload);
  launch.uses(from, false);
  if (pinned) add_host(&launch, to, true);
  launch.check();
  if (lane.capture) return capture_copy(lane.capture, to, cpu_view(from));
  const auto* data = data_of(from);
  {
    Guard guard(mutex());
    const auto done = transfer(&launch, pinned ? "device_to_host" : "device_to_pageable", bytes_of(to), hardware().link);
    host_receives(static_cast<char*>(to.data_ptr()), {data, data + bytes_of(to)}, done);
  }
  if (async) return;
  try {
    synchronize("a copy to the host", lane);
  } catch (...) {  // the caller may free the host memory
    if (!pinned) forget_host_copy(static_cast<const char*>(to.const_data_ptr()));
    throw;
  }
}

// Copy as CUDA does: on the stream of the source device. The streams of both devices wait for each other.
void copy_between_devices(const at::Tensor& from, const at::Tensor& to) {
  if (!is_flat(from, to)) {
    const auto there = at::empty_like(to, to.options().device(from.device())).copy_(from);
    if (is_flat(there, to)) return copy_between_devices(there, to);
    to.copy_(at::empty_like(there, there.options().device(to.device())).copy_(there));
    return;
  }
  auto &source = current_lane(from.device().index()), &target = current_lane(to.device().index());
  TORCH_CHECK(!source.capture && !target.capture, "fakegpu: copies between devices are not supported in a captured graph");
  Event ready, done;
  record(&ready, target);
  wait(&source, ready);
  Launch launch("a copy between devices", source, Engine::kPeer);
  launch.uses(from, false);
  launch.uses(to, true);
  launch.check();
  std::memcpy(data_of(to), data_of(from), bytes_of(to));
  transfer(&launch, "between_devices", bytes_of(to), hardware().peer);
  record(&done, source);
  wait(&target, done);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (!dst.numel()) return dst;
  const auto from = self.expand(dst.sizes());
  if (!is_fake(from)) upload(from, dst, non_blocking);
  else if (!is_fake(dst)) download(from, dst, non_blocking);
  else if (from.device() != dst.device()) copy_between_devices(from, dst);
  else {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    count_copy("within_device", bytes_of(dst));
    Stack stack{dst, from, non_blocking};
    run(op, &stack);
  }
  return dst;
}

at::Scalar local_scalar(const at::Tensor& self) {
  auto& lane = current_lane(self.device().index());
  check_no_capture("reading a number");
  Launch launch("reading a number", lane, Engine::kDownload);
  launch.uses(self, false);
  launch.check();
  const auto value = at::_local_scalar_dense(cpu_view(self));
  transfer(&launch, "device_to_host", self.element_size(), hardware().link);
  synchronize("reading a number", lane);
  return value;
}

// ---- memory of tensors --------------------------------------------------------------------------------------------------

c10::Device with_index(std::optional<c10::Device> d) { return {kFake, d && d->has_index() ? d->index() : current_device()}; }

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK_NOT_IMPLEMENTED(layout.value_or(at::kStrided) == at::kStrided, "fakegpu: tensors are strided");
  const c10::DeviceGuard guard(with_index(device));
  return at::detail::empty_generic(size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(with_index(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  TORCH_CHECK(source.device_type() == kFake, "set_: the storage is not on fakegpu");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  c10::DimVector dense;
  if (stride.empty() && !size.empty()) {
    dense.resize(size.size());
    int64_t step = 1;
    for (size_t i = size.size(); i-- > 0; step *= std::max<int64_t>(size[i], 1)) dense[i] = step;
    stride = dense;
  }
  impl->set_sizes_and_strides(size, stride, offset);
  const auto needed = self.numel() ? at::detail::computeStorageNbytes(size, stride, self.element_size(), static_cast<size_t>(offset)) : 0;
  if (needed > impl->unsafe_storage().nbytes()) resize_storage(impl->unsafe_storage().unsafeGetStorageImpl(), needed);
  return self;
}
at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {count}, {1});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor& set_none(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, device_allocator(), true), 0, {0}, {1});
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  const auto bytes = at::detail::computeStorageNbytesContiguous(size, self.element_size(), static_cast<size_t>(self.storage_offset()));
  if (self.sizes() != size) {
    if (bytes > impl->unsafe_storage().nbytes()) resize_storage(impl->unsafe_storage().unsafeGetStorageImpl(), bytes);
    impl->set_sizes_contiguous(size);
  }
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

}  // namespace

at::Tensor cpu_view(const at::Tensor& t) { return Call().lower(t, false); }

at::Tensor device_tensor(c10::Storage storage, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                       c10::scalarTypeToTypeMeta(dtype));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return made;
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  auto data = allocate(bytes, storage->device().index());
  const auto kept = std::min(bytes, storage->nbytes());
  if (kept) {
    Guard guard(mutex());
    std::memcpy(block_of(data.get())->kernel, kernel_address(storage), kept);
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// `copy_from` handles conjugate and negative tensors, so PyTorch must not materialize them first.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_none);
  m.impl("resize_", &resize);
  m.impl("record_stream", [](at::Tensor& self, c10::Stream s) {
    static_cast<c10::DeviceAllocator*>(device_allocator())->recordStream(self.storage().data_ptr(), s);
  });
  // a kernel for GPUs copies all tensors of `_foreach_copy_` with one launch
  for (const char* name : {"convolution", "convolution_backward", "_foreach_copy_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    const auto op = dispatcher.findOp(name);
    if (!name.name.starts_with("aten::") || !op || !op->hasSchema()) continue;
    if (kWhole.contains(full)) m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Whole>(*op)));
    // Ops that PyTorch would decompose, although they have a CPU kernel.
    const bool is_made = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
                         op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    if (is_made && op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
      m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
  }
}

}  // namespace fakegpu
