// Generators. Their states are values of the executor; Python makes and seeds these.
#include "remote.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GeneratorImpl.h>

#include <unordered_map>

namespace djinn {
namespace {

std::atomic<int64_t> next_generator{1};

// What Python does for generator `number`: "operand", "seed", "get_state", "set_state", "clone", "get_offset", "set_offset", "free".
at::Tensor ask(const char* what, int64_t number, int64_t value, const at::Tensor& given = {}) {
  Stack stack{std::string(what), number, value, given};
  call_python("djinn::generator", &stack);
  return stack[0].toTensor();
}

struct RemoteGenerator final : at::GeneratorImpl {
  RemoteGenerator(c10::DeviceIndex index, bool is_default)
      : GeneratorImpl({kRemote, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        number(is_default ? -1 - index : next_generator.fetch_add(1)) {}
  int64_t key(int64_t value = 0) const { return value; }
  void set_current_seed(uint64_t s) override {
    seed_ = s;
    ask("seed", encoded(), static_cast<int64_t>(s));
  }
  void set_offset(uint64_t offset) override { ask("set_offset", encoded(), static_cast<int64_t>(offset)); }
  uint64_t get_offset() const override { return static_cast<uint64_t>(ask("get_offset", encoded(), 0).item<int64_t>()); }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    const auto s = c10::detail::getNonDeterministicRandom();
    set_current_seed(s);
    return s;
  }
  void set_state(const c10::TensorImpl& state) override {
    auto given = at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(const_cast<c10::TensorImpl*>(&state)));
    auto seed = ask("set_state", encoded(), static_cast<int64_t>(seed_), given);
    if (seed.defined()) seed_ = static_cast<uint64_t>(seed.item<int64_t>());
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return ask("get_state", encoded(), 0).getIntrusivePtr(); }
  RemoteGenerator* clone_impl() const override {
    auto* copy = new RemoteGenerator(device_.index(), false);
    copy->seed_ = seed_;
    ask("clone", encoded(), copy->encoded());
    return copy;
  }
  ~RemoteGenerator() override;
  // Index and number in one: Python keeps facts about generators by it.
  int64_t encoded() const { return number < 0 ? number : number << 8 | static_cast<uint8_t>(device_.index()); }
  const int64_t number;
  uint64_t seed_ = c10::default_rng_seed_val;
};

}  // namespace

// Python frees what it keeps of a generator when it next asks: a destructor may run anywhere.
static std::mutex gone_mutex;
static std::vector<int64_t>& gone() {
  static auto* all = new std::vector<int64_t>();
  return *all;
}
RemoteGenerator::~RemoteGenerator() {
  std::lock_guard<std::mutex> guard(gone_mutex);
  gone().push_back(encoded());
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static std::mutex mutex;
  static auto* all = new std::vector<at::Generator>(256);
  std::lock_guard<std::mutex> guard(mutex);
  const auto place = static_cast<size_t>(index < 0 ? current_index() : index);
  auto& one = (*all)[place];
  if (!one.defined()) one = at::make_generator<RemoteGenerator>(static_cast<c10::DeviceIndex>(place), true);
  return one;
}

at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<RemoteGenerator>(index < 0 ? current_index() : index, false);
}

at::Tensor state_of(const at::Generator& g) {
  TORCH_CHECK(g.device().type() == kRemote, "Expected a '", c10::DeviceTypeName(kRemote, true), "' device type for generator but found '",
              g.device().type(), "'");
  return ask("operand", static_cast<RemoteGenerator*>(g.unsafeGetGeneratorImpl())->encoded(), 0);
}

static int64_t number_of(const at::Generator& g) { return static_cast<RemoteGenerator*>(g.unsafeGetGeneratorImpl())->encoded(); }
static void set_seed_alone(const at::Generator& g, int64_t seed) {
  static_cast<RemoteGenerator*>(g.unsafeGetGeneratorImpl())->seed_ = static_cast<uint64_t>(seed);
}
static std::vector<int64_t> take_gone() {
  std::lock_guard<std::mutex> guard(gone_mutex);
  std::vector<int64_t> taken;
  taken.swap(gone());
  return taken;
}

TORCH_LIBRARY_FRAGMENT(djinn, m) {
  m.def("generator_number(Generator? g) -> int", &number_of);
  m.def("set_generator_seed(Generator? g, int seed) -> ()", &set_seed_alone);
  m.def("default_generator(int index) -> Generator?", [](int64_t index) { return at::Generator(default_generator(static_cast<c10::DeviceIndex>(index))); });
  m.def("generators_gone() -> int[]", &take_gone);
}

}  // namespace djinn
