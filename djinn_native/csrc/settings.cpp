// Numeric settings of PyTorch, such as TF32. PyTorch does not report changes of settings, so each op compares them.
#include "remote.h"

#include <ATen/Context.h>

#include <unordered_map>

namespace djinn {
namespace {

using Backend = std::pair<at::Float32Backend, at::Float32Op>;
using Precisions = std::unordered_map<Backend, at::Float32Precision, c10::hash<Backend>>;

// Gives access to PyTorch's private table of precisions. Its public functions would add a third to the time of an op.
template <Precisions at::Context::* Member> struct Reveal {
  friend const Precisions& precisions_of(const at::Context& c) { return c.*Member; }
};
const Precisions& precisions_of(const at::Context& c);
template struct Reveal<&at::Context::fp32_precision>;

uint64_t precisions(const at::Context& context) {
  static const auto places = [&context] {
    std::vector<const at::Float32Precision*> found;
    for (const auto& [backend, precision] : precisions_of(context)) found.push_back(&precision);
    return found;
  }();
  uint64_t all = 0;
  for (const auto* place : places) all = all << 3 | static_cast<uint64_t>(*place);
  return all;
}

uint64_t settings_now() {
  const auto& c = at::globalContext();
  uint64_t all = precisions(c);
  for (bool on :
       {c.deterministicAlgorithms(), c.deterministicAlgorithmsWarnOnly(), c.deterministicFillUninitializedMemory(), c.userEnabledCuDNN(),
        c.benchmarkCuDNN(), c.deterministicCuDNN(), c.userEnabledMkldnn(), c.deterministicMkldnn(), c.allowFP16AccumulationCuBLAS()}) {
    all = all << 1 | static_cast<uint64_t>(on);
  }
  all = all << 2 | static_cast<uint64_t>(c.allowFP16ReductionCuBLAS());
  return all << 2 | static_cast<uint64_t>(c.allowBF16ReductionCuBLAS());
}

std::atomic<uint64_t> noted{~uint64_t{0}};
thread_local bool noting = false;  // true while Python sends the former ops, which may record further ones

}  // namespace

void note_settings() {
  const auto now = settings_now();
  if (C10_LIKELY(now == noted.load(std::memory_order_acquire)) || noting) return;
  struct Noting {
    Noting() { noting = true; }
    ~Noting() { noting = false; }
  } const once;
  Stack stack;
  call_python("djinn::settings_changed", &stack);
  noted.store(now, std::memory_order_release);
}

TORCH_LIBRARY_FRAGMENT(djinn, m) {
  m.def("settings_changed() -> ()");  // implemented in Python
}

}  // namespace djinn
