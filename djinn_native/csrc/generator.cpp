// Random generators. Each state is a value on the executor; Python creates and seeds it.
#include "remote.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GeneratorImpl.h>

namespace djinn {
namespace {

std::atomic<int64_t> sessions{0};  // number of sessions that have ended

// Call Python for the generator of a device index. "seed", "get_state" and "set_state" act on the state of the executor's session; "make"
// returns a value for a seed or a state, "copy" a copy of a value, "read" its contents; "check" validates a state and returns its seed.
at::Tensor ask(const char* what, c10::DeviceIndex index, uint64_t seed, const at::Tensor& given = {}) {
  Stack stack{std::string(what), static_cast<int64_t>(index), static_cast<int64_t>(seed), given};
  call_python("djinn::generator", &stack);
  return stack[0].isTensor() ? stack[0].toTensor() : at::Tensor();
}

at::Tensor without_object(const at::Tensor& t) { return twin_of(operand_of(t)); }

// Releases a generator's mutex while Python is called. PyTorch calls generators with their mutex locked, usually holding the GIL. Python
// may release the GIL to a thread that then waits for the mutex, which would be a deadlock.
struct Unlocked {
  explicit Unlocked(std::mutex& m) : mutex(m), held(!m.try_lock()) { mutex.unlock(); }
  ~Unlocked() {
    if (held) mutex.lock();
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  std::mutex& mutex;
  const bool held;  // true if the caller had locked the mutex
};

struct RemoteGenerator final : at::GeneratorImpl {
  RemoteGenerator(c10::DeviceIndex index, bool is_default)
      // no dispatch key, so that CPU ops that get this generator raise PyTorch's own error
      : GeneratorImpl({kRemote, index}, c10::DispatchKeySet()), follows_sessions(is_default) {}

  // True if ops without a `generator` argument draw from this generator through the session's state, which is not a value of the program.
  bool is_the_sessions() const { return follows_sessions && device_.index() == 0; }

  // Return the value with the state. It is created at the first use, because a generator may be older than the session.
  at::Tensor present() const {
    if (is_the_sessions()) return {};
    int64_t at;
    at::Tensor from, gone[2];  // declared outside of the block, so that they are freed after the lock is released
    {
      std::lock_guard<std::mutex> guard(mutex);
      if (follows_sessions && session != sessions.load()) {
        session = sessions.load();
        gone[0] = std::move(value);
        gone[1] = std::move(origin);
      }
      if (value.defined()) return value;
      at = changes;
      from = origin;
    }
    auto made = without_object(ask("make", device_.index(), seed_, from));
    std::lock_guard<std::mutex> guard(mutex);
    if (changes != at) return made;
    if (!value.defined()) value = std::move(made);
    return value;
  }
  // Continue with the value `new_value`, with the CPU state `new_origin`, or from the seed if both are undefined.
  void restart(at::Tensor new_value, at::Tensor new_origin) {
    std::lock_guard<std::mutex> guard(mutex);
    ++changes;
    session = sessions.load();
    std::swap(value, new_value);  // the former ones are freed after the lock is released
    std::swap(origin, new_origin);
  }

  void set_current_seed(uint64_t s) override {
    const Unlocked unlocked(mutex_);
    seed_ = s;
    if (is_the_sessions()) ask("seed", 0, s);
    else restart({}, {});
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    const auto s = c10::detail::getNonDeterministicRandom();
    set_current_seed(s);
    return s;
  }
  at::Tensor state() const { return is_the_sessions() ? ask("get_state", 0, 0) : ask("read", device_.index(), 0, present()); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const Unlocked unlocked(callers_mutex());
    return state().getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& given) override {
    const Unlocked unlocked(mutex_);
    go_on(at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(const_cast<c10::TensorImpl*>(&given))));
  }
  void go_on(const at::Tensor& given) {
    seed_ = static_cast<uint64_t>(ask("check", device_.index(), 0, given).item<int64_t>());
    if (is_the_sessions()) ask("set_state", 0, 0, given);
    else restart({}, given.clone());
  }
  // Return a copy of a counter-based generator's state: a seed and an offset.
  at::Tensor counting() const {
    auto found = state();
    TORCH_CHECK(found.numel() == 16, "the executor's generators have no offset: those of the CPU do not count");
    return found.clone();
  }
  uint64_t get_offset() const override {
    const Unlocked unlocked(callers_mutex());
    return static_cast<uint64_t>(counting().view(at::kLong)[1].item<int64_t>());
  }
  void set_offset(uint64_t offset) override {
    const Unlocked unlocked(mutex_);
    auto changed = counting();
    changed.view(at::kLong)[1].fill_(static_cast<int64_t>(offset));
    go_on(changed);
  }
  RemoteGenerator* clone_impl() const override {
    const Unlocked unlocked(callers_mutex());
    auto copy = std::make_unique<RemoteGenerator>(device_.index(), false);
    if (is_the_sessions()) copy->go_on(state());
    else copy->restart(without_object(ask("copy", device_.index(), 0, present())), {});
    copy->seed_ = seed_;
    return copy.release();
  }

  std::mutex& callers_mutex() const { return const_cast<RemoteGenerator*>(this)->mutex_; }

  const bool follows_sessions;  // each session starts it again from its seed
  uint64_t seed_ = c10::default_rng_seed_val;
  mutable std::mutex mutex;  // never locked while Python is called
  mutable at::Tensor value, origin;
  mutable int64_t session = sessions.load(), changes = 0;
};

RemoteGenerator* ours(const at::Generator& g) {
  TORCH_CHECK(g.device().type() == kRemote, "Expected a '", c10::DeviceTypeName(kRemote, true), "' device type for generator but found '",
              g.device().type(), "'");
  return static_cast<RemoteGenerator*>(g.unsafeGetGeneratorImpl());
}

}  // namespace

std::mutex& generators_mutex() {
  static auto* one = new std::mutex();
  return *one;
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* all = new std::vector<at::Generator>(256);
  std::lock_guard<std::mutex> guard(generators_mutex());
  const auto place = static_cast<size_t>(static_cast<uint8_t>(index < 0 ? current_index() : index));
  auto& one = (*all)[place];
  if (!one.defined()) one = at::make_generator<RemoteGenerator>(static_cast<c10::DeviceIndex>(place), true);
  return one;
}

at::Generator new_generator(c10::DeviceIndex index) {
  check_index(index);
  return at::make_generator<RemoteGenerator>(index < 0 ? current_index() : index, false);
}

at::Tensor state_of(const at::Generator& g) { return ours(g)->present(); }

static void end_session() {
  ++sessions;
  forget_device_count();
  drop_freed();
}

TORCH_LIBRARY_FRAGMENT(djinn, m) {
  m.def("end_session() -> ()", &end_session);
  // Implemented in Python.
  m.def("generator(str what, int index, int seed, Tensor? given) -> Tensor?");
  m.def("default_generator(int index) -> Generator?",
        [](int64_t index) { return std::optional<at::Generator>(default_generator(static_cast<c10::DeviceIndex>(index))); });
  m.def("generator_value(Generator? g) -> Tensor?", [](const std::optional<at::Generator>& g) {
    auto found = state_of(g.value());
    return found.defined() ? std::optional<at::Tensor>(without_object(found)) : std::nullopt;
  });
  m.def("set_generator_value(Generator? g, Tensor value) -> ()",
        [](const std::optional<at::Generator>& g, const at::Tensor& value) { ours(g.value())->restart(without_object(value), {}); });
}

}  // namespace djinn
