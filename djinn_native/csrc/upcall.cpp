// Calls from C++ to Python, through the dispatcher's interface to a `TorchDispatchMode`, so that Python gets ops and arguments as usual.
#include "remote.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>

namespace djinn {
namespace {

using Mode = std::shared_ptr<c10::impl::PyObject_TorchDispatchMode>;
// Not destroyed, because the interpreter is gone by then.
Mode& handler() {
  static auto* one = new Mode();
  return *one;
}
Mode& functions() {
  static auto* one = new Mode();
  return *one;
}

// Return the innermost mode, in which the caller runs.
Mode innermost() {
  const auto length = c10::impl::TorchDispatchModeTLS::stack_len();
  TORCH_CHECK(length > 0, "this is called inside of the mode that C++ is to call");
  return c10::impl::TorchDispatchModeTLS::get_stack_at(length - 1);
}

// Pushes the mode on the thread's stack for one call. PyTorch disables it during the call.
struct ModeGuard {
  explicit ModeGuard(const Mode& mode) { c10::impl::TorchDispatchModeTLS::push_non_infra_mode_onto_stack(mode); }
  ~ModeGuard() { c10::impl::TorchDispatchModeTLS::pop_stack(); }
};

// Hides the user's modes during a call. PyTorch has disabled them, such as while it makes tensors of lists.
struct NoModes {
  explicit NoModes(bool on_) : on(on_) {
    if (on) before = exchange({});
  }
  ~NoModes() {
    if (on) exchange(std::move(before));
  }
  NoModes(const NoModes&) = delete;
  NoModes& operator=(const NoModes&) = delete;
  static c10::impl::TorchDispatchModeTLS exchange(c10::impl::TorchDispatchModeTLS to) {
    auto was = c10::impl::TorchDispatchModeTLS::get_state();
    c10::impl::TorchDispatchModeTLS::set_state(std::move(to));
    return was;
  }
  const bool on;
  c10::impl::TorchDispatchModeTLS before;
};

// Dispatch keys that precede Python's. Ops that Python calls skip them, as in any `__torch_dispatch__`.
const c10::DispatchKeySet kAbovePython =
    c10::DispatchKeySet(c10::DispatchKeySet::FULL) -
    (c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python) | c10::DispatchKeySet(c10::DispatchKey::Python));

// Have a mode handle a call. `excluded`: dispatch keys that ops called by the mode skip.
void call(const Mode& mode, bool hides_modes, c10::DispatchKeySet excluded, const c10::OperatorHandle& op, Stack* stack) {
  TORCH_CHECK(mode, "remote_accelerator is not installed in this process");
  const NoModes hidden(hides_modes);
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  const c10::DispatchKeySet python({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
  c10::impl::ForceDispatchKeyGuard below(keys.included_, (keys.excluded_ | excluded) - python);
  ModeGuard guard(mode);
  mode->pyinterpreter()->dispatch(op, stack);
}

bool no_modes_here() { return c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python); }

// A kernel in Python. If `plain` is given, it runs PyTorch's kernel for calls without a tensor of the device.
struct PythonKernel final : c10::OperatorKernel {
  PythonKernel(Mode m, std::optional<c10::SafeKernelFunction> p) : mode(std::move(m)), plain(std::move(p)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const size_t args = op.schema().arguments().size();
    if (plain && std::none_of(stack->end() - static_cast<std::ptrdiff_t>(args), stack->end(), &names_device)) {
      return plain->callBoxed(op, keys, stack);
    }
    call(mode, no_modes_here(), {}, op, stack);
  }
  static bool names_device(const c10::IValue& v) {
    if (v.isTensor()) return is_remote(v.toTensor()) && v.toTensor().layout() != at::kJagged;  // PyTorch builds jagged from strided tensors
    return v.isDevice() && (v.toDevice().type() == kRemote || (v.toDevice().is_cuda() && named_cuda));
  }
  Mode mode;
  std::optional<c10::SafeKernelFunction> plain;
};

// Make the mode that the caller runs in the kernel of an op at a dispatch key. `partly`: only for calls that involve the device.
void set_kernel(const std::string& name, const std::string& overload, const std::string& key_name, bool partly) {
  const SilentWarnings silent;  // suppress PyTorch's warning about a replaced kernel
  const auto key = c10::parseDispatchKey(key_name);
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  std::optional<c10::SafeKernelFunction> plain;
  if (partly) plain.emplace(op.getComputedKernelForDispatchKey(key));
  static auto* libraries = new std::vector<std::unique_ptr<torch::Library>>();
  libraries->push_back(std::make_unique<torch::Library>(torch::Library::IMPL, name.substr(0, name.find(':')), key, __FILE__, __LINE__));
  const std::string full = overload.empty() ? name : name + "." + overload;
  libraries->back()->impl(full.c_str(),
                          torch::CppFunction::makeFromBoxedFunctor(std::make_unique<PythonKernel>(innermost(), std::move(plain))));
}

}  // namespace

void set_upcall() { handler() = innermost(); }

void upcall(const c10::OperatorHandle& op, Stack* stack) { call(handler(), no_modes_here(), kAbovePython, op, stack); }

void call_python(const char* op, Stack* stack, bool hides_modes) {
  call(functions(), hides_modes || no_modes_here(), {}, c10::Dispatcher::singleton().findSchemaOrThrow(op, ""), stack);
}

TORCH_LIBRARY_FRAGMENT(djinn, m) {
  m.def("set_functions() -> ()", [] { functions() = innermost(); });
  m.def("set_kernel(str name, str overload, str key, bool partly) -> ()", &set_kernel);
}

}  // namespace djinn
