// The device `fakegpu`: types for its memory, clock, streams and faults.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace fakegpu {

using torch::jit::Stack;

constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr int kStreams = 33;  // streams of each device: the default stream and a pool
constexpr int kMaxDevices = 8;
constexpr int kLanes = kStreams * kMaxDevices;  // a lane is one stream of one device

// The lock of all state. It must not be held while tensors are copied or freed: that may need the GIL, and a thread that frees a tensor
// waits for this lock with the GIL held. Recursive, because functions that hold it call each other.
using Guard = std::lock_guard<std::recursive_mutex>;
std::recursive_mutex& mutex();

// Vector clock: for each lane, the number of the last op that a lane, an event or the host knows to be complete.
using Seen = std::vector<int64_t>;
void join(Seen* into, const Seen& other);

// One access to bytes of a block.
struct Use {
  int lane;
  int64_t number;  // number of the op on its lane
  size_t begin, end;
  double done;     // time at which the op is complete
  const char* op;  // op names live as long as the process
};

struct Graph;
struct GraphPool;

// Memory that kernels or copies use: a block of device memory or of page-locked host memory.
struct Block {
  uintptr_t address = 0;   // address that tensors have
  char* kernel = nullptr;  // address at which kernels access the block
  size_t size = 0;         // bytes taken from the device
  size_t requested = 0;
  c10::DeviceIndex device = -1;  // -1: host memory
  int64_t serial = 0;
  int lane = 0;  // stream that was current when the block was allocated
  bool freed = false, imported = false;
  GraphPool* pool = nullptr;  // pool of the graphs that keep the memory; null otherwise
  std::vector<Use> writes, reads;
  std::set<int> recorded;  // lanes given to record_stream
};

struct Lane {
  int index = 0;
  double time = 0;     // time at which the last op is complete
  int64_t issued = 0;  // number of the last op
  Seen seen = Seen(kLanes, 0);
  const char* last = "";
  Graph* capture = nullptr;
  [[nodiscard]] c10::DeviceIndex device() const { return static_cast<c10::DeviceIndex>(index / kStreams); }
  [[nodiscard]] std::string name() const;
};

struct Event {
  bool recorded = false;
  double time = 0;
  Seen seen;
};

// Engines of a device. Each runs one op at a time.
enum class Engine : uint8_t { kCompute, kUpload, kDownload, kPeer };

struct Device {
  uintptr_t address = 0;  // start of the arena, mapped without access rights
  char* kernel = nullptr;
  int file = -1;
  size_t arena = 0, limit = 0;
  std::map<uintptr_t, size_t> unused;  // free ranges of the arena
  std::set<std::pair<size_t, uintptr_t>> by_size;
  std::deque<Block*> quarantine;  // oldest first
  size_t quarantined = 0, allocated = 0, peak = 0;
  std::array<double, 4> engines{};  // time at which each engine is free
};

// Speeds and sizes of the simulated hardware. The defaults are those of a current GPU.
struct Hardware {
  double flops = 50e12, bandwidth = 2e12, link = 25e9, peer = 100e9;  // per second
  double launch = 2e-6, issue = 4e-6;  // seconds: minimum duration of a kernel; time that the host takes per call
  double pace = 0;  // real seconds per simulated second; 0: waits take no real time
  int64_t memory = int64_t{16} << 30;  // bytes of each device
  int64_t devices = 2;
  int64_t queue = 1024;  // maximum number of unfinished launches per stream; the host waits before it issues more
};
Hardware& hardware();

// ---- memory.cpp ---------------------------------------------------------------------------------------------------------

Device& device(c10::DeviceIndex index);
bool is_in_bad_fork();  // true in a fork of a process that had mapped device memory: both share the memory
void check_fork();
void limit_memory();  // apply the limit in `hardware()` to open devices
void check_index(c10::DeviceIndex index);
c10::Allocator* device_allocator();
c10::Allocator* host_allocator();
bool is_pinned(const void* data);
c10::DataPtr allocate(size_t bytes, c10::DeviceIndex index);
Block* block_of(const void* address, bool or_throw = true);  // call with the lock held
Block* block_of(const at::Tensor& t);
Block* block_of_kernel(const void* address);  // find the block by the address that kernels use; nullptr if there is none
char* kernel_address(const c10::StorageImpl* s);
void* raw_address(const c10::StorageImpl* s);
c10::DataPtr import_memory(const std::string& path, size_t offset, size_t bytes, c10::DeviceIndex index);
void end_of_pool(Block* block);

// ---- streams.cpp --------------------------------------------------------------------------------------------------------

Lane& lane(int index);
Lane& current_lane(c10::DeviceIndex index = -1);
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);
int& current_stream(c10::DeviceIndex index = -1);
Seen& host_seen();
double now();  // time of the host
void spend_issue_time();  // advance the host's clock by the time of one call
void wait_until(double time);  // call without the lock; blocks forever if the time is infinite
void synchronize(const char* cause, const Lane& with);
void synchronize(const Event& event);
void record(Event* event, const Lane& lane);
void wait(Lane* lane, const Event& event);
bool query(double time, const Seen& seen);
// Copies from or to page-locked memory, which end at the time `done`.
void host_receives(char* host, std::vector<char> bytes, double done);
void host_lends(char* host, size_t size, double done);
void host_copies_arrive(const char* begin, size_t size);
void forget_host_copy(const char* host);  // call before the memory is freed
void host_copies_are_done(double time);

// One launch. It checks injected faults and the order of accesses, then advances the clocks.
struct Launch {
  Launch(const char* op, Lane& lane, Engine engine = Engine::kCompute);
  void uses(const at::Tensor& t, bool write);
  void add(Block* block, size_t begin, size_t end, bool write);
  void check();  // raises if a wait between streams is missing
  // Occupy stream and engine for the duration of the op. Returns the time at which the op is complete.
  double finish(double seconds);
  const char* op;
  Lane& lane;
  Engine engine;
  double bytes = 0;

 private:
  struct Access {
    Block* block;
    size_t begin, end;
    bool write;
  };
  std::vector<Access> accesses;
};
bool is_complete(const Seen& seen, const Use& use);

// ---- faults.cpp ---------------------------------------------------------------------------------------------------------

// Raise the error of a device that failed, or the oldest reported error.
void check_alive();
void report_later(std::string message);  // the next call raises the error
[[noreturn]] void fail_now(const char* op);
// Apply injected faults to an op. Returns the additional seconds that it takes; infinity if it hangs.
double inject_into(const char* op, double done);
bool injected_out_of_memory(const char* op);
[[noreturn]] void raise_out_of_memory(size_t bytes, c10::DeviceIndex index, bool injected);

// ---- counters -----------------------------------------------------------------------------------------------------------

void count(const std::string& name, int64_t by = 1);
void count_copy(const std::string& what, size_t bytes);
void count_peak(const std::string& name, int64_t value);

// ---- graph.cpp ----------------------------------------------------------------------------------------------------------

// If a graph is being captured, mark the capture as failed and raise.
void check_no_capture(const char* cause);
void keep_in_graph(Graph* graph, Block* block);
Block* take_from_pool(Graph* graph, size_t size);  // a block that no tensor uses; nullptr: there is none
void give_to_pool(Block* block);
bool is_of_graph(const Graph* graph, Block* block);
// Record an op, or a copy, in a graph. The tensors are CPU views of device memory, or page-locked.
void capture_op(Graph* graph, const c10::OperatorHandle& op, c10::DeviceIndex random, Stack arguments, const std::vector<bool>& written,
                const Stack& results, const std::vector<int>& same);
void capture_copy(Graph* graph, const at::Tensor& to, const at::Tensor& from);

// ---- fallback.cpp -------------------------------------------------------------------------------------------------------

// Return a non-owning CPU tensor over the memory that kernels use.
at::Tensor cpu_view(const at::Tensor& t);
at::Tensor device_tensor(c10::Storage storage, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset);
void resize_storage(c10::StorageImpl* storage, size_t bytes);

// ---- device.cpp ---------------------------------------------------------------------------------------------------------

const at::Generator& default_generator(c10::DeviceIndex index);
at::Generator inner_generator(const at::Generator& g);

// Exchanges the states of the default generators of device and CPU, while a CPU kernel draws random numbers for the device.
struct DeviceRandom {
  explicit DeviceRandom(c10::DeviceIndex index) : inner(inner_generator(default_generator(index))) { exchange(); }
  ~DeviceRandom() { exchange(); }
  DeviceRandom(const DeviceRandom&) = delete;
  DeviceRandom& operator=(const DeviceRandom&) = delete;
  void exchange();
  at::Generator inner;
};

}  // namespace fakegpu
