// The hot path: compute the key of a call, look up its results by the key, and append an entry. Python is asked about new calls only.
#include "remote.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/List.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/node.h>

#include <algorithm>
#include <chrono>

namespace djinn {

Counters counters;
std::atomic<bool> all_watched{false};

namespace {

// The `Scratch` of one call. Calls nest if Python records ops during a call, such as views, or sends a program.
struct OwnScratch {
  OwnScratch() {
    if (C10_UNLIKELY(depth == all.size())) all.push_back(std::make_unique<Scratch>());
    one = all[depth++].get();
  }
  ~OwnScratch() {
    one->kept.clear();  // a kept state would outlive its generator
    --depth;
  }
  OwnScratch(const OwnScratch&) = delete;
  OwnScratch& operator=(const OwnScratch&) = delete;
  Scratch* one;
  static thread_local size_t depth;
  static thread_local std::vector<std::unique_ptr<Scratch>> all;
};
thread_local size_t OwnScratch::depth = 0;
thread_local std::vector<std::unique_ptr<Scratch>> OwnScratch::all;

bool overlaps(const Call& call, at::ArrayRef<Operand> operands) {
  for (auto w : call.writes) {
    for (size_t i = 0; i < operands.size(); ++i) {
      if (i != w && operands[i].record() == operands[w].record()) return true;
    }
  }
  return false;
}

void increment_versions(const Call& call, at::ArrayRef<Operand> operands) {
  auto* target = operands[call.writes[0]].impl;
  TORCH_CHECK(
      !target->is_inference() || c10::InferenceMode::is_enabled(),
      "Inplace update to inference tensor outside InferenceMode is not allowed.You can make a clone to get a normal tensor before doing "
      "inplace update.See https://github.com/pytorch/rfcs/pull/17 for more details.");
  for (auto w : call.writes) {
    if (!operands[w].impl->is_inference()) operands[w].impl->bump_version();
  }
}

}  // namespace

int64_t autograd_node(Program& p) {
  if (!p.counters[kDifferentiating].load(std::memory_order_relaxed)) return -1;
  const auto node = torch::autograd::get_current_node();
  return node && node->sequence_nr() != UINT64_MAX ? static_cast<int64_t>(node->sequence_nr()) : -2;
}

namespace {

// Return the program of another thread that must be sent before this call; null if there is none.
Program* before_call(const Program& p, const Call& call, at::ArrayRef<Operand> operands) {
  for (const auto& operand : operands) {
    if (auto* first = before_read(p, operand.record())) return first;
  }
  for (auto w : call.writes) {
    if (auto* first = before_write(p, operands[w].record())) return first;
  }
  return nullptr;
}

std::atomic<bool> ops_timed{false};

// Nanoseconds of the clock that Python's `time.perf_counter()` uses.
int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
// Start time of an op; 0 if ops are not timed.
int64_t begin_time() { return C10_UNLIKELY(ops_timed.load(std::memory_order_relaxed)) ? nanoseconds() : 0; }
void end_time(Program& p, const OpInfo& info, int64_t begun) {
  if (C10_LIKELY(!begun)) return;
  const int64_t node = autograd_node(p), ended = nanoseconds();
  std::lock_guard<SpinLock> guard(p.mutex);
  p.times.insert(p.times.end(), {begun, ended, static_cast<int64_t>(info.id), node});
}

bool is_new(const Result& r) { return r.kind == Result::kNew || r.kind == Result::kView; }
Value* value_of(const at::Tensor& t) { return static_cast<RemoteImpl*>(t.unsafeGetTensorImpl())->value.get(); }

void append_entry(Program& p, const Call& call, at::ArrayRef<Operand> operands, at::ArrayRef<int64_t> slots, at::ArrayRef<uint8_t> kinds,
                  int32_t site, int64_t node, const c10::SmallVectorImpl<at::Tensor>& made) {
  std::lock_guard<SpinLock> guard(p.mutex);
  for (const auto& operand : operands) note_read(p, operand.record());
  for (auto w : call.writes) note_write(p, operands[w].record());
  p.calls.push_back(call.id);
  p.sites.push_back(site);
  p.nodes.push_back(node);
  for (const auto& operand : operands) p.handles.push_back(operand.value->handle);
  for (size_t i = 0; i < call.results.size(); ++i) {
    if (!is_new(call.results[i])) continue;
    auto* value = value_of(made[i]);
    p.handles.push_back(value->handle);
    note_made(p, value->record);
  }
  p.slots.insert(p.slots.end(), slots.begin(), slots.end());
  p.kinds.insert(p.kinds.end(), kinds.begin(), kinds.end());
  p.counters[kEntries].store(static_cast<int64_t>(p.calls.size()), std::memory_order_release);
}

// Append an entry. Add its results to `made`: new tensors, operands that are returned again, and undefined tensors for absent results.
void append_to(Program& p, const Call& call, at::ArrayRef<Operand> operands, at::ArrayRef<int64_t> slots, at::ArrayRef<uint8_t> kinds,
               c10::SmallVectorImpl<at::Tensor>& made) {
  TORCH_INTERNAL_ASSERT(operands.size() == static_cast<size_t>(call.operands) && slots.size() == static_cast<size_t>(call.slots),
                        "a call takes ", call.operands, " operands and ", call.slots, " scalars, and got ", operands.size(), " and ",
                        slots.size());
  note_settings();
  if (call.bumps && !call.writes.empty()) increment_versions(call, operands);
  const int32_t site = user_site();  // takes the GIL, so it precedes all locks
  const int64_t node = autograd_node(p);
  for (const auto& r : call.results) {
    switch (r.kind) {
      case Result::kNew:
        made.push_back(make_result(r, nullptr));
        break;
      case Result::kView:
        made.push_back(make_result(r, operands[r.of].impl));
        break;
      case Result::kSame:
        made.push_back(at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(operands[r.of].impl)));
        break;
      case Result::kNone:
        made.emplace_back();
        break;
    }
  }
  for (;;) {
    Program* first;
    {
      std::lock_guard<SpinLock> guard(sharing_mutex());
      first = before_call(p, call, operands);
      if (C10_LIKELY(!first)) {
        append_entry(p, call, operands, slots, kinds, site, node, made);
        break;
      }
    }
    cut(first);
  }
}

}  // namespace

void check_limit(Program& p) {
  if (C10_LIKELY(p.counters[kEntries].load(std::memory_order_relaxed) < p.counters[kLimit].load(std::memory_order_relaxed))) return;
  Stack stack;
  call_python("djinn::at_limit", &stack);
}

namespace {

// Replace the arguments on the stack by the results. This may free operands that only the stack refers to.
void give(const Call& call, c10::SmallVectorImpl<at::Tensor>& made, Stack* stack, size_t args) {
  const size_t first = stack->size() - args;
  if (call.list) {
    c10::List<at::Tensor> items;
    items.reserve(made.size());
    for (auto& t : made) items.push_back(std::move(t));
    stack->resize(first);
    stack->emplace_back(std::move(items));
    return;
  }
  if (made.size() == 1 && args) {
    (*stack)[first] = std::move(made[0]);
    stack->resize(first + 1);
    return;
  }
  stack->resize(first);
  for (auto& t : made) stack->emplace_back(std::move(t));
}

void ask_python(OpInfo& info, Stack* stack, Pending* pending) {
  counters.asked.fetch_add(1, std::memory_order_relaxed);
  PendingGuard guard(pending);
  upcall(info.op, stack);
}

}  // namespace

std::vector<at::Tensor> append(const Call& call, at::ArrayRef<Operand> operands, at::ArrayRef<int64_t> slots, at::ArrayRef<uint8_t> kinds) {
  auto& p = current_program();
  c10::SmallVector<at::Tensor, 4> made;
  append_to(p, call, operands, slots, kinds, made);
  check_limit(p);
  std::vector<at::Tensor> fresh;
  for (size_t i = 0; i < made.size(); ++i) {
    const auto kind = call.results[i].kind;
    if (kind == Result::kNew || kind == Result::kView) fresh.push_back(std::move(made[i]));
  }
  return fresh;
}

static bool python_sees(const OpInfo& info) {
  return (info.flags & kHandled) || forked.load(std::memory_order_relaxed) || all_watched.load(std::memory_order_relaxed);
}

// Record a view with other sizes. A shortcut, because half of a model's ops are views, and boxing the sizes would take most of the time.
at::Tensor record_view(OpInfo& info, const at::Tensor& self, c10::SymIntArrayRef size) {
  const auto sizes = c10::asIntArrayRefSlowOpt(size);
  const int64_t begun = begin_time();
  if (C10_LIKELY(sizes.has_value() && has_value(self) && !python_sees(info))) {
    const OwnScratch own;
    Scratch& s = *own.one;
    take_apart(info, self, *sizes, s);
    const Call* call = find_call(info, s);
    if (C10_LIKELY(call && !call->nothing && call->results.size() == 1)) {
      auto& p = current_program();
      c10::SmallVector<at::Tensor, 4> made;
      append_to(p, *call, s.operands, s.slots, s.kinds, made);
      check_limit(p);
      end_time(p, info, begun);
      return std::move(made[0]);
    }
  }
  Stack stack{self, size};
  record(info, &stack);
  return std::move(stack[0]).toTensor();
}

// Handle a call with a tensor subclass or a fake tensor as PyTorch does for any backend. View ops are usually registered by each backend;
// the CPU's kernels work for all.
static void call_for_any_backend(const OpInfo& info, Stack* stack) {
  const auto& returned = info.op.schema().returns();
  const auto* alias = returned.empty() ? nullptr : returned[0].alias_info();
  const bool view = alias && !alias->isWrite() && info.op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
  info.op.getComputedKernelForDispatchKey(view ? c10::DispatchKey::CPU : c10::DispatchKey::HPU)
      .callBoxed(info.op, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), stack);
}

static bool has_wrapper(const OpInfo& info, const Stack& stack) {
  auto is_wrapper = [](const at::Tensor& t) { return is_remote(t) && t.layout() == at::kStrided && !has_value(t); };
  for (size_t i = stack.size() - info.args; i < stack.size(); ++i) {
    if (stack[i].isTensor() && is_wrapper(stack[i].toTensor())) return true;
    if (!stack[i].isTensorList()) continue;
    for (const at::Tensor& t : stack[i].toTensorVector()) {
      if (is_wrapper(t)) return true;
    }
  }
  return false;
}

// Record a call for which `s` is filled in, or have Python record it.
static void record_apart(OpInfo& info, Program& p, Scratch& s, Stack* stack, int64_t begun) {
  const Call* call = find_call(info, s);
  if (C10_UNLIKELY(!call)) call = find_by_rule(info, s, at::ArrayRef<c10::IValue>(stack->data() + stack->size() - info.args, info.args));
  if (C10_UNLIKELY(!call || (call->no_overlap && overlaps(*call, s.operands)))) {
    counters.missed.fetch_add(1, std::memory_order_relaxed);
    if (info.flags & kNeverKnown) return ask_python(info, stack, nullptr);
    Pending pending{{s.words.begin(), s.words.end()}, {s.float_at.begin(), s.float_at.end()}, info.rule};
    return ask_python(info, stack, &pending);
  }
  if (call->nothing) {
    auto again = twin_of(s.operands[0]);
    const size_t first = stack->size() - info.args;
    (*stack)[first] = std::move(again);
    stack->resize(first + 1);
    return;
  }
  c10::SmallVector<at::Tensor, 4> made;
  append_to(p, *call, s.operands, s.slots, s.kinds, made);
  give(*call, made, stack, info.args);
  check_limit(p);
  end_time(p, info, begun);
}

void record(OpInfo& info, Stack* stack) {
  if (C10_UNLIKELY(python_sees(info)))
    return has_wrapper(info, *stack) ? call_for_any_backend(info, stack) : ask_python(info, stack, nullptr);
  const int64_t begun = begin_time();
  auto& p = current_program();
  const OwnScratch own;
  Scratch& s = *own.one;
  try {
    take_apart(info, *stack, s);
  } catch (const NotOurs&) {
    return call_for_any_backend(info, stack);
  } catch (const PythonDecides&) {
    return ask_python(info, stack, nullptr);
  }
  if (C10_UNLIKELY(s.known && info.flags & kFoldsMasks && knows_mask(s))) return ask_python(info, stack, nullptr);
  if (C10_LIKELY(!(info.flags & (kFolds | kFoldsSizes)))) return record_apart(info, p, s, stack, begun);
  const auto fold = begin_fold(info, s, *stack);
  record_apart(info, p, s, stack, begun);
  if (fold.made) end_fold(fold, *stack);
}

namespace {

void time_ops(bool on) {
  ops_timed = on;
  std::lock_guard<SpinLock> guard(sharing_mutex());
  for (auto* p : all_programs()) {
    std::lock_guard<SpinLock> own(p->mutex);
    p->times.clear();
  }
}

// Return the times of a program's ops since the last call of this function.
at::Tensor take_times(int64_t program) {
  auto& p = *program_of(program);
  std::lock_guard<SpinLock> guard(p.mutex);
  auto made = at::detail::empty_cpu({static_cast<int64_t>(p.times.size())}, at::kLong);
  std::ranges::copy(p.times, made.mutable_data_ptr<int64_t>());
  p.times.clear();
  return made;
}

std::string op_name(int64_t id) { return reinterpret_cast<const OpInfo*>(id)->name; }

std::vector<at::Tensor> append_call(int64_t call, const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& slots,
                                    const std::vector<int64_t>& kinds) {
  c10::SmallVector<Operand, 16> operands;
  for (const auto& t : tensors) operands.push_back(operand_of(t));
  c10::SmallVector<uint8_t, 32> small;
  for (auto k : kinds) small.push_back(static_cast<uint8_t>(k));
  return append(call_of(static_cast<int32_t>(call)), operands, slots, small);
}

// As `append`, for a call without operands that makes one tensor. The tensor gets the memory of `storage`.
at::Tensor append_into(int64_t call, const c10::Storage& storage, const std::vector<int64_t>& slots, const std::vector<int64_t>& kinds) {
  note_settings();
  const auto& known = call_of(static_cast<int32_t>(call));
  auto& p = current_program();
  auto made = make_result(known.results.at(0), nullptr, storage.unsafeGetStorageImpl());
  auto* value = static_cast<RemoteImpl*>(made.unsafeGetTensorImpl())->value.get();
  const int32_t site = user_site();
  std::lock_guard<SpinLock> sharing(sharing_mutex());
  std::lock_guard<SpinLock> guard(p.mutex);
  note_made(p, value->record);
  p.calls.push_back(known.id);
  p.sites.push_back(site);
  p.nodes.push_back(-1);
  p.handles.push_back(value->handle);
  p.slots.insert(p.slots.end(), slots.begin(), slots.end());
  p.kinds.insert(p.kinds.end(), kinds.begin(), kinds.end());
  p.counters[kEntries].store(static_cast<int64_t>(p.calls.size()), std::memory_order_release);
  return made;
}

std::vector<int64_t> count() { return {counters.ops.load(), counters.missed.load(), counters.asked.load()}; }

}  // namespace

TORCH_LIBRARY(djinn, m) {
  m.def("append(int call, Tensor[] operands, int[] slots, int[] kinds) -> Tensor[]", &append_call);
  m.def("append_into(int call, Storage storage, int[] slots, int[] kinds) -> Tensor", &append_into);
  m.def("count() -> int[]", &count);
  m.def("time_ops(bool on) -> ()", &time_ops);
  m.def("take_times(int program) -> Tensor", &take_times);
  m.def("op_name(int op) -> str", &op_name);
  m.def("watch_all(bool on) -> ()", [](bool on) { all_watched = on; });
  m.def("set_upcall() -> ()", &set_upcall);
  m.def("register_kernels() -> ()", &register_kernels);
  m.def("install_device() -> ()", &install_device);
}

}  // namespace djinn
