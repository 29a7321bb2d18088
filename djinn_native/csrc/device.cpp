// The device type: device guard, hooks and registration with PyTorch.
#include "remote.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

#include <array>
#include <map>

#ifndef _WIN32
#include <pthread.h>
#endif

namespace djinn {

std::atomic<bool> forked{false}, named_cuda{false};

namespace {

thread_local c10::DeviceIndex thread_index = 0;
thread_local std::vector<int64_t> thread_streams;  // current stream of each device index

// Device indexes below this number exist. Only Python knows how many more the servers have.
std::atomic<int64_t> known_count{1};

int64_t& stream_of(c10::DeviceIndex index) {
  const auto place = static_cast<size_t>(static_cast<uint8_t>(index < 0 ? thread_index : index));
  if (thread_streams.size() <= place) thread_streams.resize(place + 1, 0);
  return thread_streams[place];
}

// Return the last known count after an error, because callers of `deviceCount` do not expect exceptions.
c10::DeviceIndex ask_count() noexcept {
  try {
    Stack stack;
    call_python("djinn::device_count", &stack);
    const int64_t count = stack[0].toInt();
    known_count = count;
    return static_cast<c10::DeviceIndex>(count);
  } catch (...) {
    return static_cast<c10::DeviceIndex>(known_count.load());
  }
}

std::vector<int64_t> ask_memory(const char* what, c10::DeviceIndex index) {
  Stack stack{std::string(what), static_cast<int64_t>(index)};
  call_python("djinn::memory", &stack);
  return stack[0].toIntVector();
}

at::Tensor ask_mark(const char* op, Stack stack) {
  call_python(op, &stack);
  return stack[0].toTensor();
}

// An event is a mark: an op in the program. The executor notes the time at which it runs the mark.
at::Tensor& mark_of(void* event) { return *static_cast<at::Tensor*>(event); }

// Ops run in the order of the program, whatever their stream. Therefore, no stream ever waits for another.
struct RemoteGuard final : c10::impl::DeviceGuardImplInterface {
  // `kind`: the device type of the guarded devices. `cuda_is_remote` makes a guard for `cuda`.
  explicit RemoteGuard(c10::DeviceType kind = kRemote) : kind_(kind) {}
  c10::DeviceType type() const override { return kind_; }
  c10::Device exchangeDevice(c10::Device d) const override {
    const auto before = thread_index;
    setDevice(d);
    return {kind_, before};
  }
  c10::Device getDevice() const override { return {kind_, thread_index}; }
  void setDevice(c10::Device d) const override {
    check_index(d.index());
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) thread_index = d.index();
  }
  c10::Stream getStream(c10::Device d) const override { return c10::Stream(c10::Stream::UNSAFE, with_index(d), stream_of(d.index())); }
  c10::Stream getDefaultStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, with_index(d)); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    static std::atomic<int64_t> last{0};
    check_index(d.index());
    return c10::Stream(c10::Stream::UNSAFE, with_index(d), ++last);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto& current = stream_of(s.device_index());
    const c10::Stream before(c10::Stream::UNSAFE, s.device(), current);
    current = s.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return ask_count(); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
  bool queryStream(const c10::Stream& s) const override { return has_passed(ask_mark("djinn::mark", {int64_t{s.device_index()}})); }
  void synchronizeStream(const c10::Stream&) const override { synchronize(); }
  void synchronizeDevice(c10::DeviceIndex) const override { synchronize(); }
  void record(void** event, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    auto mark = twin_of(operand_of(ask_mark("djinn::mark", {int64_t{s.device_index()}})));
    if (*event) mark_of(*event) = std::move(mark);
    else *event = new at::Tensor(std::move(mark));
  }
  void block(void* event, const c10::Stream&) const override {
    if (event) begin_read(current_program(), operand_of(mark_of(event)).record());
  }
  bool queryEvent(void* event) const override { return !event || has_passed(twin_of(operand_of(mark_of(event)))); }
  void synchronizeEvent(void* event) const override {
    if (event) elapsedTime(event, event, 0);
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    Stack stack{twin_of(operand_of(mark_of(from))), twin_of(operand_of(mark_of(to)))};
    call_python("djinn::elapsed_time", &stack);
    return stack[0].toDouble();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<at::Tensor*>(event); }

 private:
  c10::Device with_index(c10::Device d) const { return d.has_index() ? d : getDevice(); }
  static bool has_passed(at::Tensor mark) {
    Stack stack{std::move(mark)};
    call_python("djinn::has_passed", &stack);
    return stack[0].toBool();
  }
  static void synchronize() {
    Stack stack;
    call_python("djinn::synchronize", &stack);
  }
  c10::DeviceType kind_;
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, RemoteGuard);

// Pinned memory is ordinary memory here, because a transfer over a network gains nothing from pinning. Only `is_pinned` tells them apart.
struct PinnedAllocator final : c10::Allocator {
  struct Blocks {
    std::mutex mutex;
    std::map<uintptr_t, size_t> bytes;  // by address
  };
  static Blocks& blocks() {
    static auto* all = new Blocks();  // never destroyed, because tensors are freed until the very end of the process
    return *all;
  }
  c10::DataPtr allocate(size_t nbytes) override {
    void* memory = c10::alloc_cpu(nbytes ? nbytes : 1);  // at least one byte, so that an empty tensor counts as pinned, too
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

std::mutex& pinned_mutex() { return PinnedAllocator::blocks().mutex; }

struct RemoteHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return !forked.load(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return ask_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return thread_index; }
  void setCurrentDevice(c10::DeviceIndex i) const override {
    check_index(i);
    set_current_index(i);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override {
    check_index(i);
    return std::exchange(thread_index, i);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override { return i < 0 ? thread_index : exchangeDevice(i); }
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

struct HostAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t n) override { return c10::GetCPUAllocator()->allocate(n); }
  void copy_data(void* to, const void* from, size_t n) const override { c10::GetCPUAllocator()->copy_data(to, from, n); }
  bool record_event(void*, void*, c10::Stream) override { return false; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
HostAllocator host_allocator;
REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &host_allocator);

}  // namespace

void check_index(c10::DeviceIndex i) {
  if (C10_LIKELY(i < known_count.load(std::memory_order_relaxed))) return;
  Stack stack{static_cast<int64_t>(i)};
  call_python("djinn::check_index", &stack);  // raises for an index without a device
  ask_count();
}

c10::CachingDeviceAllocator::DeviceStats memory_stats(c10::DeviceIndex index) {
  const auto found = ask_memory("stats", index);
  c10::CachingDeviceAllocator::DeviceStats stats;
  const auto set = [](auto& stat, int64_t now, int64_t peak) {
    stat[0].current = now;
    stat[0].peak = peak;
  };
  set(stats.allocated_bytes, found.at(0), found.at(1));
  set(stats.active_bytes, found.at(0), found.at(1));
  set(stats.requested_bytes, found.at(0), found.at(1));
  set(stats.reserved_bytes, found.at(2), found.at(3));
  return stats;
}
std::pair<size_t, size_t> memory_info(c10::DeviceIndex index) {
  const auto found = ask_memory("info", index);
  return {static_cast<size_t>(found.at(0)), static_cast<size_t>(found.at(1))};
}
void change_memory(const char* what, c10::DeviceIndex index) { ask_memory(what, index); }

c10::DeviceIndex current_index() { return thread_index; }
void set_current_index(c10::DeviceIndex i) {
  if (i >= 0) thread_index = i;
}
void forget_device_count() { known_count = 1; }

#ifndef _WIN32
namespace {

std::array<std::mutex*, 6> mutexes() {
  return {&infos_mutex(), &calls_mutex(), &sites_mutex(), &generators_mutex(), &pinned_mutex(), &known_mutex()};
}

// Before a fork, take all locks in their order, so that the child does not see a change of another thread half done.
void before_fork() {
  sharing_mutex().lock();
  for (auto* p : all_programs()) p->mutex.lock();
  freed_lock().lock();
  for (size_t i = 0; i < kRecordLocks; ++i) record_lock_at(i).lock();
  memo_mutex().lock();
  for (auto* mutex : mutexes()) mutex->lock();
}
void unlock_spin_locks() {
  for (size_t i = 0; i < kRecordLocks; ++i) record_lock_at(i).unlock();
  freed_lock().unlock();
  for (auto* p : all_programs()) p->mutex.unlock();
  sharing_mutex().unlock();
}
void after_fork_in_parent() {
  for (auto* mutex : mutexes()) mutex->unlock();
  memo_mutex().unlock();
  unlock_spin_locks();
}
// In the child, construct the mutexes anew. A locked mutex may store the thread ID of its owner, which differs in the child.
void after_fork_in_child() {
  for (auto* mutex : mutexes()) new (mutex) std::mutex();
  new (&memo_mutex()) std::shared_mutex();
  unlock_spin_locks();
  forked = true;  // Python calls `set_forked` before the child records
}

}  // namespace
#endif

void install_device() {
  c10::SetAllocator(kRemote, allocator());
  at::RegisterPrivateUse1HooksInterface(new RemoteHooks());
#ifndef _WIN32
  pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);
#endif
}

// Make the device type `cuda` a second name of the remote device. PyTorch's own guard for `cuda` is missing, or finds no GPU.
static void cuda_is_remote() {
  static RemoteGuard guard(c10::DeviceType::CUDA);
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
  named_cuda = true;
  register_cuda_factories();
}

TORCH_LIBRARY_FRAGMENT(djinn, m) {
  m.def("cuda_is_remote() -> ()", &cuda_is_remote);
  m.def("current_index() -> int", [] { return static_cast<int64_t>(current_index()); });
  m.def("set_current_index(int index) -> ()", [](int64_t i) { set_current_index(static_cast<c10::DeviceIndex>(i)); });
  // Return the mark of a recorded event. `id` is the address that PyTorch gives as the event's ID.
  m.def("mark_of_event(int id) -> Tensor", [](int64_t id) { return twin_of(operand_of(mark_of(reinterpret_cast<void*>(id)))); });
  // Implemented in Python.
  m.def("device_count() -> int");
  m.def("check_index(int index) -> ()");
  m.def("memory(str what, int index) -> int[]");
  m.def("synchronize() -> ()");
  m.def("mark(int index) -> Tensor");
  m.def("has_passed(Tensor mark) -> bool");
  m.def("elapsed_time(Tensor begin, Tensor end) -> float");
}

}  // namespace djinn
