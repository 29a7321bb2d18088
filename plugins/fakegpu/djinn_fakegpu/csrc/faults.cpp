// Injected faults, deferred errors, and counters.
#include "fake.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <unordered_map>

namespace fakegpu {
namespace {

constexpr int kAssert = 710;  // number of CUDA's device-side assert

struct Fault {
  std::string kind, op;
  int64_t after;
  double seconds;
};
std::vector<Fault>& faults() {
  static auto* all = new std::vector<Fault>();
  return *all;
}

double failed_at = std::numeric_limits<double>::infinity();
std::string failed_op;
std::vector<std::string>& reported() {
  static auto* all = new std::vector<std::string>();
  return *all;
}
std::unordered_map<std::string, int64_t>& counters() {
  static auto* all = new std::unordered_map<std::string, int64_t>();
  return *all;
}

// Return true if a fault of this kind is due for the op. Removes the fault.
bool take_fault(const char* kind, const char* op, double* seconds = nullptr) {
  for (auto fault = faults().begin(); fault != faults().end(); ++fault) {
    if (fault->kind != kind || std::string_view(op).find(fault->op) == std::string_view::npos || fault->after-- > 0) continue;
    if (seconds) *seconds = fault->seconds;
    faults().erase(fault);
    return true;
  }
  return false;
}

}  // namespace

void count(const std::string& name, int64_t by) {
  Guard guard(mutex());
  counters()[name] += by;
}
void count_copy(const std::string& what, size_t bytes) {
  count("copies_" + what);
  count("bytes_" + what, static_cast<int64_t>(bytes));
}
void count_peak(const std::string& name, int64_t value) {
  Guard guard(mutex());
  auto& peak = counters()[name];
  peak = std::max(peak, value);
}

void report_later(std::string message) {
  count("misuses");
  reported().push_back(std::move(message));
}

void check_alive() {
  check_fork();
  if (C10_UNLIKELY(now() >= failed_at)) {
    throw c10::AcceleratorError(
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, kAssert,
        c10::str("fakegpu error ", kAssert, ": device-side assert triggered. The op that failed was issued earlier"));
  }
  if (C10_LIKELY(reported().empty())) return;
  const auto message = reported().front();
  reported().erase(reported().begin());
  TORCH_CHECK(false, "fakegpu: ", message);
}

void fail_now(const char* op) {
  Guard guard(mutex());
  failed_at = std::min(failed_at, now());
  if (failed_op.empty()) failed_op = op;
  check_alive();
  std::terminate();  // not reached, because check_alive raises
}

double inject_into(const char* op, double done) {
  if (C10_LIKELY(faults().empty())) return 0;
  double seconds = 0;
  if (take_fault("sticky", op) && !std::isfinite(failed_at)) {
    failed_at = done;
    failed_op = op;
  }
  if (take_fault("hang", op)) return std::numeric_limits<double>::infinity();
  return take_fault("slow", op, &seconds) ? seconds : 0;
}

bool injected_out_of_memory(const char* op) { return !faults().empty() && take_fault("out_of_memory", op); }

void raise_out_of_memory(size_t bytes, c10::DeviceIndex index, bool injected) {
  count("out_of_memory");
  const auto& d = device(index);
  C10_THROW_ERROR(OutOfMemoryError,
                  c10::str("fakegpu out of memory. Tried to allocate ", bytes, " bytes. fakegpu:", int{index}, " has ", d.limit,
                           " bytes, of which ", d.limit - d.allocated, " are free", injected ? " (an injected fault)" : ""));
}

TORCH_LIBRARY_FRAGMENT(fakegpu, m) {
  m.def("inject(str kind, str op, int after, float seconds) -> ()", [](std::string kind, std::string op, int64_t after, double seconds) {
    Guard guard(mutex());
    faults().push_back({std::move(kind), std::move(op), after, seconds});
  });
  m.def("pending_faults() -> int", [] {
    Guard guard(mutex());
    return static_cast<int64_t>(faults().size());
  });
  m.def("failed_op() -> str", [] {
    Guard guard(mutex());
    return failed_op;
  });
  m.def("counters() -> Dict(str, int)", [] {
    Guard guard(mutex());
    c10::Dict<std::string, int64_t> all;
    for (const auto& [name, value] : counters()) all.insert(name, value);
    return all;
  });
  m.def("reset_counters() -> ()", [] {
    Guard guard(mutex());
    counters().clear();
  });
}

}  // namespace fakegpu
