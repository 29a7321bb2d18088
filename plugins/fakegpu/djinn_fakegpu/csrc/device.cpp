// Registration with PyTorch: guard, hooks, generators and the ops that Python calls.
#include "fake.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cmath>

namespace fakegpu {
namespace {

Event* event_of(void* event) { return static_cast<Event*>(event); }
Lane& lane_of(const c10::Stream& s) {
  check_index(s.device_index());
  return lane(s.device_index() * kStreams + static_cast<int>(s.id()));
}

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }
  c10::Device exchangeDevice(c10::Device d) const override {
    const auto before = current_device();
    setDevice(d);
    return {kFake, before};
  }
  c10::Device getDevice() const override { return {kFake, current_device()}; }
  void setDevice(c10::Device d) const override {
    if (d.has_index()) check_index(d.index());
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.has_index()) set_current_device(d.index());
  }
  c10::Stream getStream(c10::Device d) const override { return stream(d, current_stream(d.index())); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(d, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    static std::atomic<int> last{0};
    return stream(d, 1 + last++ % (kStreams - 1));
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    lane_of(s);
    return stream(s.device(), std::exchange(current_stream(s.device_index()), static_cast<int>(s.id())));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(hardware().devices); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
  bool queryStream(const c10::Stream& s) const override { return query(lane_of(s).time, lane_of(s).seen); }
  bool isStreamCapturing(const c10::Stream& s) const override { return lane_of(s).capture != nullptr; }
  void synchronizeStream(const c10::Stream& s) const override { synchronize("a stream", lane_of(s)); }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    Lane all;
    for (int i = 0; i < kStreams; ++i) {
      Guard guard(mutex());
      const auto& one = lane((index < 0 ? current_device() : index) * kStreams + i);
      all.time = std::max(all.time, one.time);
      join(&all.seen, one.seen);
    }
    synchronize("a device", all);
  }
  void record(void** event, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event();
    fakegpu::record(event_of(*event), lane_of(s));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) wait(&lane_of(s), *event_of(event));
  }
  bool queryEvent(void* event) const override {
    return !event || !event_of(event)->recorded || query(event_of(event)->time, event_of(event)->seen);
  }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize(*event_of(event));
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    check_fork();
    Guard guard(mutex());
    TORCH_CHECK(from && to && event_of(from)->recorded && event_of(to)->recorded, "fakegpu: both events must be recorded");
    TORCH_CHECK(event_of(from)->time <= now() && event_of(to)->time <= now(), "fakegpu: an event is not complete: synchronize it first");
    return (event_of(to)->time - event_of(from)->time) * 1e3;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete event_of(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    static_cast<c10::DeviceAllocator*>(device_allocator())->recordStream(data, s);
  }

 private:
  static c10::Stream stream(c10::Device d, int id) {
    const auto index = d.has_index() ? d.index() : current_device();
    check_index(index);
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kFake, index), id);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, FakeGuard);

// A generator that draws the same numbers as a CPU generator, so that results equal those of the CPU.
struct FakeGenerator final : c10::GeneratorImpl {
  FakeGenerator(c10::DeviceIndex index, at::Generator generator)
      : GeneratorImpl({kFake, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(std::move(generator)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  FakeGenerator* clone_impl() const override { return new FakeGenerator(device_.index(), inner.clone()); }
  at::Generator inner;
};

at::Generator new_generator(c10::DeviceIndex index) {
  if (index < 0) index = current_device();
  check_index(index);
  return at::make_generator<FakeGenerator>(index, at::detail::createCPUGenerator());
}

struct FakeHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(hardware().devices); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchangeDevice(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = current_device();
    check_index(index);
    set_current_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_device() : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return new_generator(index); }
  at::Device getDeviceFromPtr(void* data) const override {
    Guard guard(mutex());
    return {kFake, block_of(data)->device};
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return host_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

void configure(const c10::Dict<std::string, double>& figures) {
  Guard guard(mutex());
  auto& h = hardware();
  const std::map<std::string, double*> rates{{"flops", &h.flops},   {"bandwidth", &h.bandwidth}, {"link", &h.link}, {"peer", &h.peer},
                                             {"launch", &h.launch}, {"issue", &h.issue},         {"pace", &h.pace}};
  const std::map<std::string, int64_t*> sizes{{"memory", &h.memory}, {"devices", &h.devices}, {"queue", &h.queue}};
  for (const auto& entry : figures) {
    if (auto rate = rates.find(entry.key()); rate != rates.end()) *rate->second = entry.value();
    else *sizes.at(entry.key()) = static_cast<int64_t>(entry.value());
  }
  TORCH_CHECK(h.devices > 0 && h.devices <= kMaxDevices, "fakegpu: 1 to ", kMaxDevices, " devices");
  if (figures.contains("memory")) limit_memory();
}

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int i = 0; i < kMaxDevices; ++i)
      made->push_back(at::make_generator<FakeGenerator>(static_cast<c10::DeviceIndex>(i), at::detail::createCPUGenerator()));
    return made;
  }();
  return all->at(static_cast<size_t>(index < 0 ? current_device() : index));
}

at::Generator inner_generator(const at::Generator& g) {
  TORCH_CHECK(g.device().type() == kFake, "Expected a '", c10::DeviceTypeName(kFake, true), "' device type for generator but found '",
              g.device().type(), "'");
  return static_cast<FakeGenerator*>(g.unsafeGetGeneratorImpl())->inner;
}

void DeviceRandom::exchange() {
  const auto copy = [](at::CPUGeneratorImpl* from, at::CPUGeneratorImpl* to) {
    to->set_engine(from->engine());
    to->set_next_float_normal_sample(from->next_float_normal_sample());
    to->set_next_double_normal_sample(from->next_double_normal_sample());
  };
  auto* here = at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
  auto* there = at::check_generator<at::CPUGeneratorImpl>(inner);
  const auto kept = here->clone();
  copy(there, here);
  copy(kept.get(), there);
}

TORCH_LIBRARY(fakegpu, m) {
  m.def("configure(Dict(str, float) figures) -> ()", &configure);
  m.def("default_generator(int index) -> Generator?",
        [](int64_t index) { return std::optional<at::Generator>(default_generator(static_cast<c10::DeviceIndex>(index))); });
  m.def("is_in_bad_fork() -> bool", &is_in_bad_fork);
  m.def("device_count() -> int", [] { return hardware().devices; });
  m.def("now() -> float", [] {
    Guard guard(mutex());
    return now();
  });
  m.def("stream_time(int device, int stream) -> float", [](int64_t index, int64_t stream) {
    Guard guard(mutex());
    return lane(static_cast<int>(index) * kStreams + static_cast<int>(stream)).time;
  });
  // Return the path of the file with a tensor's memory, for other processes, the offset in it, and the bytes of the storage.
  m.def("export_memory(Tensor t) -> (str, int, int)", [](const at::Tensor& t) {
    Guard guard(mutex());
    auto* block = block_of(t);
    TORCH_CHECK(block && block->device >= 0, "fakegpu: there is no memory to export");
    const auto& d = device(block->device);
    const auto place = static_cast<int64_t>(block->address - d.address);
    return std::tuple(c10::str("/proc/", getpid(), "/fd/", d.file), place, static_cast<int64_t>(t.storage().nbytes()));
  });
  m.def("import_memory(str path, int offset, int bytes, int device) -> Tensor",
        [](const std::string& path, int64_t offset, int64_t bytes, int64_t index) {
          auto data = import_memory(path, static_cast<size_t>(offset), static_cast<size_t>(bytes), static_cast<c10::DeviceIndex>(index));
          c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes), std::move(data), nullptr, /*resizable=*/false);
          return device_tensor(std::move(storage), at::kByte, {bytes}, {1}, 0);
        });
  c10::SetAllocator(kFake, device_allocator());
  at::RegisterPrivateUse1HooksInterface(new FakeHooks());
}

}  // namespace fakegpu
