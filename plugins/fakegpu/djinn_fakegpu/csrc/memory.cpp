// Device memory, which is mapped twice, its allocator with a quarantine of freed blocks, and page-locked host memory.
#include "fake.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <csignal>
#include <cstdio>
#include <cstring>

namespace fakegpu {
namespace {

constexpr size_t kStep = 512;                              // alignment of sizes and addresses
constexpr size_t kPage = 4096, kPunched = size_t{1} << 16;  // blocks above this size give their pages back
constexpr size_t kFilled = size_t{1} << 16;  // maximum bytes of a new block that are overwritten, because GPU memory is not zeroed
constexpr int kGarbage = 0xCB;

int64_t next_serial = 1;
pid_t opened_by = 0;  // process that mapped device memory

// Never destroyed, because tensors are freed until the very end of the process.
std::map<uintptr_t, Block*>& blocks() {  // blocks of device memory, by the address that tensors have
  static auto* all = new std::map<uintptr_t, Block*>();
  return *all;
}
std::map<uintptr_t, Block*>& host_blocks() {
  static auto* all = new std::map<uintptr_t, Block*>();
  return *all;
}

Block* find(std::map<uintptr_t, Block*>& in, uintptr_t address) {
  auto next = in.upper_bound(address);
  if (next == in.begin()) return nullptr;
  auto* found = std::prev(next)->second;
  return address < found->address + std::max<size_t>(found->size, 1) ? found : nullptr;
}

// ---- accesses by the host -----------------------------------------------------------------------------------------------

struct Arena {
  uintptr_t begin, end;
};
std::array<Arena, kMaxDevices> arenas{};  // a copy for the signal handler, which must not lock
struct sigaction previous_action;

void on_fault(int signal, siginfo_t* info, void* context) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  for (int i = 0; i < kMaxDevices; ++i) {
    if (address < arenas[i].begin || address >= arenas[i].end) continue;
    char text[160];
    const int length = std::snprintf(text, sizeof text, "fakegpu: the host accessed memory of fakegpu:%d at %#zx; copy the tensor first\n",
                                     i, static_cast<size_t>(address));
    if (write(STDERR_FILENO, text, static_cast<size_t>(length)) < 0) _exit(1);
  }
  if ((previous_action.sa_flags & SA_SIGINFO) && previous_action.sa_sigaction) return previous_action.sa_sigaction(signal, info, context);
  sigaction(SIGSEGV, &previous_action, nullptr);  // the access is repeated, and ends as it would without this library
}

void report_host_accesses() {
  struct sigaction action{};
  action.sa_sigaction = &on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &previous_action);
}

// ---- arenas -------------------------------------------------------------------------------------------------------------

void* map(int file, size_t bytes, int access) {
  auto* found = mmap(nullptr, bytes, access, MAP_SHARED | MAP_NORESERVE, file, 0);
  TORCH_CHECK(found != MAP_FAILED, "fakegpu: ", bytes, " bytes of memory cannot be mapped: ", std::generic_category().message(errno));
  return found;
}

void add_unused(Device* d, uintptr_t address, size_t size) {
  auto next = d->unused.lower_bound(address);
  if (next != d->unused.end() && address + size == next->first) {
    size += next->second;
    d->by_size.erase({next->second, next->first});
    next = d->unused.erase(next);
  }
  if (next != d->unused.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == address) {
      address = before->first;
      size += before->second;
      d->by_size.erase({before->second, before->first});
      d->unused.erase(before);
    }
  }
  d->unused[address] = size;
  d->by_size.emplace(size, address);
}

uintptr_t take_unused(Device* d, size_t size) {
  auto found = d->by_size.lower_bound({size, 0});
  if (found == d->by_size.end()) return 0;
  const auto [length, address] = *found;
  d->by_size.erase(found);
  d->unused.erase(address);
  if (length > size) add_unused(d, address + size, length - size);
  return address;
}

void open_arena(Device* d, int index) {
  opened_by = getpid();
  d->limit = static_cast<size_t>(hardware().memory);
  d->arena = 2 * d->limit;  // address space for fragments and quarantined blocks; not actual memory
  d->file = memfd_create(("fakegpu:" + std::to_string(index)).c_str(), MFD_CLOEXEC);
  TORCH_CHECK(d->file >= 0 && ftruncate(d->file, static_cast<off_t>(d->arena)) == 0, "fakegpu: no memory file can be made");
  d->address = reinterpret_cast<uintptr_t>(map(d->file, d->arena, PROT_NONE));
  d->kernel = static_cast<char*>(map(d->file, d->arena, PROT_READ | PROT_WRITE));
  arenas[index] = {d->address, d->address + d->arena};
  add_unused(d, d->address, d->arena);
  static const bool once = (report_host_accesses(), true);
  (void)once;
}

void drop_oldest(Device* d) {
  auto* block = d->quarantine.front();
  d->quarantine.pop_front();
  d->quarantined -= block->size;
  if (block->size >= kPunched) {
    const auto begin = (block->address - d->address + kPage - 1) / kPage * kPage,
               end = (block->address - d->address + block->size) / kPage * kPage;
    fallocate(d->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin), static_cast<off_t>(end - begin));
  }
  blocks().erase(block->address);
  add_unused(d, block->address, block->size);
  delete block;
}

// Report a use on another stream that may be unfinished, because the next owner of the memory could overwrite it.
void check_uses_at_free(const Block* block) {
  auto& owner = lane(block->lane);
  for (const auto* uses : {&block->reads, &block->writes}) {
    for (const auto& use : *uses) {
      if (use.lane == block->lane || block->recorded.contains(use.lane) || is_complete(owner.seen, use) || is_complete(host_seen(), use))
        continue;
      report_later(c10::str("a block of ", block->requested, " bytes of ", owner.name(), " was freed while ", use.op, " uses it on ",
                            lane(use.lane).name(), ": wait for that stream or call `record_stream`"));
      return;
    }
  }
}

void release(Block* block) {
  if (!block->size) {
    delete block;
    return;
  }
  auto& d = device(block->device);
  d.allocated -= block->size;
  d.quarantine.push_back(block);
  d.quarantined += block->size;
  const auto kept = std::min<size_t>(d.limit / 16, size_t{256} << 20);
  while (d.quarantined > kept) drop_oldest(&d);
}

void free_block(void* context) {
  if (is_in_bad_fork()) return;  // the memory belongs to the parent process
  Guard guard(mutex());
  auto* block = static_cast<Block*>(context);
  block->freed = true;
  check_uses_at_free(block);
  if (block->pool) give_to_pool(block);
  else release(block);
}

struct ImportedBlock {
  ImportedBlock() = default;
  ImportedBlock(const ImportedBlock&) = delete;
  ImportedBlock& operator=(const ImportedBlock&) = delete;
  ~ImportedBlock() {
    for (auto* mapped : {address, kernel}) {
      if (mapped != MAP_FAILED) munmap(mapped, bytes);
    }
  }
  Block block;
  void* address = MAP_FAILED;
  void* kernel = MAP_FAILED;
  size_t bytes = 0;
};

void free_imported(void* context) {
  Guard guard(mutex());
  const std::unique_ptr<ImportedBlock> imported(static_cast<ImportedBlock*>(context));
  blocks().erase(imported->block.address);
}

c10::CachingDeviceAllocator::DeviceStats stats_of(const Device& d) {
  c10::CachingDeviceAllocator::DeviceStats stats;
  const auto set = [](auto& stat, size_t current, size_t peak) {
    stat[0].current = static_cast<int64_t>(current);
    stat[0].peak = static_cast<int64_t>(peak);
  };
  for (auto* stat : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes}) set(*stat, d.allocated, d.peak);
  set(stats.reserved_bytes, d.allocated + d.quarantined, d.peak + d.quarantined);
  return stats;
}

struct FakeAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return fakegpu::allocate(bytes, current_device()); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK_NOT_IMPLEMENTED(false, "fakegpu: storages are copied by ops"); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    check_fork();
    Guard guard(mutex());
    if (auto* block = block_of(data.get(), false)) block->recorded.insert(stream.device_index() * kStreams + static_cast<int>(stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    Guard guard(mutex());
    return stats_of(device(index));
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    Guard guard(mutex());
    device(index).peak = device(index).allocated;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    Guard guard(mutex());
    check_alive();
    const auto& d = device(index);
    return {d.limit - std::min(d.limit, d.allocated), d.limit};
  }
};
FakeAllocator fake_allocator;

// ---- page-locked host memory --------------------------------------------------------------------------------------------

// Like PyTorch's allocator: block sizes are powers of two, and freed blocks are cached. A block is reused when all copies from and to it are complete.
struct PinnedAllocator final : at::HostAllocator {
  std::vector<Block*> unused;
  size_t pinned = 0, pinned_peak = 0;

  c10::DataPtr allocate(size_t bytes) override {
    check_fork();
    Guard guard(mutex());
    const auto size = std::bit_ceil(std::max<size_t>(bytes, kPage));
    host_copies_are_done(now());
    auto found = std::ranges::find_if(unused, [&](const Block* b) { return b->size == size && is_idle(*b); });
    Block* block = nullptr;
    if (found != unused.end()) {
      block = *found;
      unused.erase(found);
    } else {
      block = new Block();
      block->kernel = static_cast<char*>(c10::alloc_cpu(size));
      block->address = reinterpret_cast<uintptr_t>(block->kernel);
      block->size = size;
      host_blocks()[block->address] = block;
      pinned += size;
      pinned_peak = std::max(pinned_peak, pinned);
      count("host_allocations");
      count_peak("pinned_bytes_peak", static_cast<int64_t>(pinned));
    }
    block->serial = next_serial++;
    block->freed = false;
    block->requested = bytes;
    block->reads.clear();
    block->writes.clear();
    return {block->kernel, block, &keep, c10::Device(c10::DeviceType::CPU)};
  }
  static bool is_idle(const Block& block) {
    const auto done = [](const Use& use) { return use.done <= now(); };
    return std::ranges::all_of(block.reads, done) && std::ranges::all_of(block.writes, done);
  }
  static void keep(void* context);
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // nothing to do: copies note their uses when they are issued
  void empty_cache() override {
    Guard guard(mutex());
    host_copies_are_done(now());
    std::erase_if(unused, [this](Block* block) {
      if (!is_idle(*block)) return false;
      pinned -= block->size;
      host_blocks().erase(block->address);
      c10::free_cpu(block->kernel);
      delete block;
      return true;
    });
  }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override { pinned_peak = pinned; }
};
PinnedAllocator pinned_allocator;
REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &pinned_allocator);

void PinnedAllocator::keep(void* context) {
  Guard guard(mutex());
  auto* block = static_cast<Block*>(context);
  block->freed = true;
  pinned_allocator.unused.push_back(block);
}

}  // namespace

std::recursive_mutex& mutex() {
  static auto* one = new std::recursive_mutex();
  return *one;
}

Hardware& hardware() {
  static Hardware one;
  return one;
}

void check_index(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < hardware().devices, "there is no device fakegpu:", int{index}, ": this process has ",
              hardware().devices);
}

static Device& closed_device(c10::DeviceIndex index) {
  static auto* all = new std::array<Device, kMaxDevices>();
  check_index(index);
  return all->at(static_cast<uint8_t>(index));
}

bool is_in_bad_fork() { return opened_by != 0 && opened_by != getpid(); }
void check_fork() { TORCH_CHECK(!is_in_bad_fork(), "fakegpu: this process was forked after the device was used: use `spawn` to start it"); }

Device& device(c10::DeviceIndex index) {
  check_fork();
  auto& found = closed_device(index);
  if (found.file < 0) open_arena(&found, index);
  return found;
}

void limit_memory() {
  for (int64_t i = 0; i < hardware().devices; ++i) {
    auto& d = closed_device(static_cast<c10::DeviceIndex>(i));
    if (d.file < 0) continue;
    TORCH_CHECK(hardware().memory <= static_cast<int64_t>(d.arena / 2), "fakegpu: memory can only be lowered once the device is open");
    d.limit = static_cast<size_t>(hardware().memory);
  }
}

c10::Allocator* device_allocator() { return &fake_allocator; }
c10::Allocator* host_allocator() { return &pinned_allocator; }

bool is_pinned(const void* data) {
  Guard guard(mutex());
  auto* block = find(host_blocks(), reinterpret_cast<uintptr_t>(data));
  return block && !block->freed;
}

c10::DataPtr allocate(size_t bytes, c10::DeviceIndex index) {
  Guard guard(mutex());
  check_alive();
  const auto size = (bytes + kStep - 1) / kStep * kStep;
  auto* graph = current_lane(index).capture;
  if (auto* block = graph && bytes ? take_from_pool(graph, size) : nullptr) {
    block->freed = false;
    block->requested = bytes;
    block->serial = next_serial++;
    return {reinterpret_cast<void*>(block->address), block, &free_block, c10::Device(kFake, index)};
  }
  auto* block = new Block();
  block->device = index;
  block->requested = bytes;
  block->serial = next_serial++;
  block->lane = current_lane(index).index;
  if (!bytes) return {nullptr, block, &free_block, c10::Device(kFake, index)};
  auto& d = device(index);
  const bool injected = injected_out_of_memory("allocate");
  if (!injected && d.allocated + size <= d.limit) {
    block->address = take_unused(&d, size);
    while (!block->address && !d.quarantine.empty()) {
      drop_oldest(&d);
      block->address = take_unused(&d, size);
    }
  }
  if (!block->address) {
    delete block;
    raise_out_of_memory(bytes, index, injected);
  }
  block->size = size;
  block->kernel = d.kernel + (block->address - d.address);
  blocks()[block->address] = block;
  d.allocated += size;
  d.peak = std::max(d.peak, d.allocated);
  std::memset(block->kernel, kGarbage, std::min(size, kFilled));
  count("device_allocations");
  if (graph) keep_in_graph(graph, block);
  return {reinterpret_cast<void*>(block->address), block, &free_block, c10::Device(kFake, index)};
}

void end_of_pool(Block* block) {
  block->pool = nullptr;
  if (block->freed) release(block);
}

Block* block_of(const void* address, bool or_throw) {
  const auto number = reinterpret_cast<uintptr_t>(address);
  auto* found = find(blocks(), number);
  if (!found) found = find(host_blocks(), number);
  if (!or_throw) return found;
  check_fork();
  TORCH_CHECK(found, "fakegpu: no block of device memory has the address ", address);
  TORCH_CHECK(!found->freed || found->pool, "fakegpu: an op uses a freed block of ", found->requested, " bytes at ", address);
  return found;
}

void* raw_address(const c10::StorageImpl* s) { return const_cast<c10::StorageImpl*>(s)->_mutable_data_ptr_no_checks().get(); }

char* kernel_address(const c10::StorageImpl* s) {
  auto* address = raw_address(s);
  if (!address) return nullptr;
  Guard guard(mutex());
  auto* block = block_of(address);
  return block->kernel + (reinterpret_cast<uintptr_t>(address) - block->address);
}

Block* block_of(const at::Tensor& t) {
  auto* address = raw_address(t.storage().unsafeGetStorageImpl());
  return address ? block_of(address) : nullptr;
}

Block* block_of_kernel(const void* address) {
  for (int i = 0; i < hardware().devices; ++i) {
    auto& d = device(static_cast<c10::DeviceIndex>(i));
    const auto* begin = d.kernel;
    if (address >= begin && address < begin + d.arena)
      return find(blocks(), d.address + static_cast<size_t>(static_cast<const char*>(address) - begin));
  }
  return find(host_blocks(), reinterpret_cast<uintptr_t>(address));
}

c10::DataPtr import_memory(const std::string& path, size_t offset, size_t bytes, c10::DeviceIndex index) {
  Guard guard(mutex());
  check_alive();
  check_index(index);
  opened_by = getpid();
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  TORCH_CHECK(file >= 0, "fakegpu: memory of another process cannot be opened: ", path);
  struct stat found{};
  const size_t length = fstat(file, &found) == 0 ? static_cast<size_t>(found.st_size) : 0;
  const bool fits = offset <= length && bytes <= length - offset;
  auto imported = std::make_unique<ImportedBlock>();
  const auto begin = offset / kPage * kPage;
  imported->bytes = offset - begin + bytes;
  if (fits) {
    imported->address = mmap(nullptr, imported->bytes, PROT_NONE, MAP_SHARED, file, static_cast<off_t>(begin));
    imported->kernel = mmap(nullptr, imported->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, static_cast<off_t>(begin));
  }
  close(file);
  TORCH_CHECK(imported->address != MAP_FAILED && imported->kernel != MAP_FAILED,
              "fakegpu: memory of another process cannot be mapped: ", path);
  auto& block = imported->block;
  block.device = index;
  block.imported = true;
  block.size = block.requested = bytes;
  block.serial = next_serial++;
  block.lane = current_lane(index).index;
  block.address = reinterpret_cast<uintptr_t>(imported->address) + (offset - begin);
  block.kernel = static_cast<char*>(imported->kernel) + (offset - begin);
  blocks()[block.address] = &block;
  count("imported_blocks");
  return {reinterpret_cast<void*>(block.address), imported.release(), &free_imported, c10::Device(kFake, index)};
}

}  // namespace fakegpu
