// Generators. Their states are values of the executor; Python makes and seeds these.
#include "remote.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GeneratorImpl.h>

namespace djinn {
namespace {

std::atomic<int64_t> sessions{0};  // that have ended

// What Python does for a generator of an index: "seed", "get_state" and "set_state" of the state that the executor's session has;
// "make" a value for a seed or a state, "copy" one, "read" it; "check" that a tensor is a state, whose seed is the result.
at::Tensor ask(const char* what, c10::DeviceIndex index, uint64_t seed, const at::Tensor& given = {}) {
  Stack stack{std::string(what), static_cast<int64_t>(index), static_cast<int64_t>(seed), given};
  call_python("djinn::generator", &stack);
  return stack[0].isTensor() ? stack[0].toTensor() : at::Tensor();
}

at::Tensor without_object(const at::Tensor& t) { return twin_of(operand_of(t)); }

// PyTorch calls generators with their mutex held, and mostly with the interpreter's lock. Python may release the latter, and a thread that
// gets it then waits for the mutex with it. So the mutex is free while Python is called.
struct Unlocked {
  explicit Unlocked(std::mutex& m) : mutex(m), held(!m.try_lock()) { mutex.unlock(); }
  ~Unlocked() {
    if (held) mutex.lock();
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  std::mutex& mutex;
  const bool held;  // by the caller
};

struct RemoteGenerator final : at::GeneratorImpl {
  RemoteGenerator(c10::DeviceIndex index, bool is_default)
      // Without a key of its own, so that ops on the CPU which are given it refuse it themselves.
      : GeneratorImpl({kRemote, index}, c10::DispatchKeySet()), follows_sessions(is_default) {}

  // Ops of index 0 that are given no generator draw from a state that is no value of the program.
  bool is_the_sessions() const { return follows_sessions && device_.index() == 0; }

  // The value that holds the state. It is made at its first use, so that a generator may be older than the session.
  at::Tensor present() const {
    if (is_the_sessions()) return {};
    int64_t at;
    at::Tensor from, gone[2];  // which die without the lock
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
  // Go on from a value, or from a state on the CPU, or from the seed.
  void restart(at::Tensor new_value, at::Tensor new_origin) {
    std::lock_guard<std::mutex> guard(mutex);
    ++changes;
    session = sessions.load();
    std::swap(value, new_value);  // those from before die without the lock
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
  // States of generators that count are a seed and an offset.
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

  const bool follows_sessions;  // it begins again from its seed with each session
  uint64_t seed_ = c10::default_rng_seed_val;
  mutable std::mutex mutex;  // never held while Python is called
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
