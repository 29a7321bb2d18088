// Calls from C++ to Python: the dispatcher's own way to a `TorchDispatchMode`, so that Python gets each op and its arguments as there.
#include "remote.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace djinn {
namespace {

using Mode = std::shared_ptr<c10::impl::PyObject_TorchDispatchMode>;
Mode& handler() {
  static auto* one = new Mode();  // not destroyed: the interpreter is gone by then
  return *one;
}

// Puts the mode on top of the thread's stack for one call, in which PyTorch takes it off again.
struct ModeGuard {
  explicit ModeGuard(const Mode& mode) { c10::impl::TorchDispatchModeTLS::push_non_infra_mode_onto_stack(mode); }
  ~ModeGuard() { c10::impl::TorchDispatchModeTLS::pop_stack(); }
};

// Takes the user's modes off the thread's stack: PyTorch has turned them off, as it does where it makes tensors of lists.
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

// The keys that are handled before Python's: what Python calls does not pass them again, as below any `__torch_dispatch__`.
const c10::DispatchKeySet kAbovePython =
    c10::DispatchKeySet(c10::DispatchKeySet::FULL) -
    (c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python) | c10::DispatchKeySet(c10::DispatchKey::Python));

}  // namespace

void set_upcall() {
  const auto length = c10::impl::TorchDispatchModeTLS::stack_len();
  TORCH_CHECK(length > 0, "djinn::set_upcall is called inside of the mode that handles upcalls");
  handler() = c10::impl::TorchDispatchModeTLS::get_stack_at(length - 1);
}

void upcall(const c10::OperatorHandle& op, Stack* stack) {
  const auto& mode = handler();
  TORCH_CHECK(mode, "remote_accelerator is not installed in this process");
  const NoModes hidden(c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python));
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  const c10::DispatchKeySet python({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
  c10::impl::ForceDispatchKeyGuard below(keys.included_, (keys.excluded_ | kAbovePython) - python);
  ModeGuard guard(mode);
  mode->pyinterpreter()->dispatch(op, stack);
}

void call_python(const char* op, Stack* stack) { c10::Dispatcher::singleton().findSchemaOrThrow(op, "").callBoxed(stack); }

}  // namespace djinn
