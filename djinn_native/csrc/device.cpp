// The device: guard, hooks and registration with PyTorch.
#include "remote.h"

#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <map>

#ifndef _WIN32
#include <pthread.h>
#endif

namespace djinn {

std::atomic<int64_t> device_count{1};
std::atomic<bool> forked{false};

namespace {

std::atomic<int64_t> highest_index{0};  // of devices that exist, as far as this process has asked
thread_local c10::DeviceIndex thread_index = 0;
thread_local std::vector<int64_t> thread_streams;  // the current stream of each index

int64_t& stream_of(c10::DeviceIndex index) {
  const auto place = static_cast<size_t>(index < 0 ? thread_index : index);
  if (thread_streams.size() <= place) thread_streams.resize(place + 1, 0);
  return thread_streams[place];
}

struct RemoteGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kRemote; }
  c10::Device exchangeDevice(c10::Device d) const override {
    const auto before = thread_index;
    setDevice(d);
    return {kRemote, before};
  }
  c10::Device getDevice() const override { return {kRemote, thread_index}; }
  void setDevice(c10::Device d) const override {
    if (d.index() > 0 && d.index() != thread_index && d.index() > highest_index.load(std::memory_order_relaxed)) {
      Stack stack{static_cast<int64_t>(d.index())};
      call_python("djinn::check_index", &stack);  // throws for an index without a device
      highest_index = d.index();
    }
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) thread_index = d.index();
  }
  c10::Stream getStream(c10::Device d) const override { return c10::Stream(c10::Stream::UNSAFE, d, stream_of(d.index())); }
  c10::Stream getDefaultStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    static std::atomic<int64_t> last{0};
    return c10::Stream(c10::Stream::UNSAFE, d.has_index() ? d : getDevice(), ++last);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto& current = stream_of(s.device_index());
    const c10::Stream before(c10::Stream::UNSAFE, s.device(), current);
    current = s.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count.load()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { synchronize(); }
  void synchronizeDevice(c10::DeviceIndex) const override { synchronize(); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { synchronize(); }
  static void synchronize() {
    Stack stack;
    call_python("djinn::synchronize", &stack);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, RemoteGuard);

// Memory that counts as pinned: ordinary memory, because bytes that travel over a network gain nothing from pinning.
struct PinnedAllocator final : c10::Allocator {
  struct Blocks {
    std::mutex mutex;
    std::map<uintptr_t, size_t> bytes;  // by address
  };
  static Blocks& blocks() {
    static auto* all = new Blocks();  // never destroyed: tensors die until the very end of the process
    return *all;
  }
  c10::DataPtr allocate(size_t nbytes) override {
    void* memory = c10::alloc_cpu(nbytes ? nbytes : 1);  // an empty tensor is pinned as well
    std::lock_guard<std::mutex> guard(blocks().mutex);
    blocks().bytes[reinterpret_cast<uintptr_t>(memory)] = nbytes ? nbytes : 1;
    return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
  static void release(void* memory) {
    {
      std::lock_guard<std::mutex> guard(blocks().mutex);
      blocks().bytes.erase(reinterpret_cast<uintptr_t>(memory));
    }
    c10::free_cpu(memory);
  }
  static bool has(const void* data) {
    const auto address = reinterpret_cast<uintptr_t>(data);
    std::lock_guard<std::mutex> guard(blocks().mutex);
    auto next = blocks().bytes.upper_bound(address);
    if (next == blocks().bytes.begin()) return false;
    --next;
    return address < next->first + next->second;
  }
};

struct RemoteHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count.load() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count.load()); }
  c10::DeviceIndex getCurrentDevice() const override { return thread_index; }
  void setCurrentDevice(c10::DeviceIndex i) const override { thread_index = i; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override { return std::exchange(thread_index, i); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override {
    return i < 0 ? thread_index : std::exchange(thread_index, i);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override { return new_generator(i); }
  at::Device getDeviceFromPtr(void*) const override { return {kRemote, thread_index}; }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::has(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator pinned;
    return &pinned;
  }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    Stack stack{s, static_cast<int64_t>(n)};
    call_python("djinn::resize_storage", &stack);
  }
};

}  // namespace

c10::DeviceIndex current_index() { return thread_index; }
void set_current_index(c10::DeviceIndex i) { thread_index = i; }

void install_device() {
  c10::SetAllocator(kRemote, allocator());
  at::RegisterPrivateUse1HooksInterface(new RemoteHooks());
#ifndef _WIN32
  pthread_atfork(nullptr, nullptr, [] { restart_after_fork(); });
#endif
}

}  // namespace djinn
