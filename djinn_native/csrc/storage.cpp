// Storages, which have a number and a version but no memory, and the queue of freed values.
#include "remote.h"

#include <algorithm>
#include <array>

namespace djinn {
namespace {

constexpr int64_t kStep = (int64_t{1} << 32) + 1;
std::atomic<int64_t> next_storage{1};

// Storage addresses are in a range that no processor maps, so a read through one faults at once. The storage can be found by its address,
// because PyTorch makes some tensors from addresses alone (`from_blob`, in torch.save).
constexpr int kOffsetBits = 40;
constexpr uint64_t kBase = uint64_t{1} << 62, kSlots = uint64_t{1} << 21, kFirstByte = 512;
constexpr size_t kBuckets = 1 << 14;

struct Freed {
  int64_t handle;
  Use writer, reader;
  std::vector<Use> readers;
};

// Never destroyed, because storages are freed until the very end of the process.
struct Shared {
  SpinLock lock;
  std::vector<Freed> freed;
  std::vector<StorageRecord*> records;  // by slot
  std::vector<uint32_t> unused;
  std::array<StorageRecord*, kBuckets> by_number{};  // numbers are consecutive, so they fill the buckets evenly
  StorageRecord*& bucket(int64_t number) { return by_number[static_cast<size_t>(number) % kBuckets]; }
  StorageRecord* find(int64_t number) {
    auto* found = bucket(number);
    while (found && found->number != number) found = found->next;
    return found;
  }
};
Shared& shared() {
  static auto* one = new Shared();
  return *one;
}

void reserve(StorageRecord* record) {
  auto& all = shared();
  std::lock_guard<SpinLock> guard(all.lock);
  if (all.unused.empty()) {
    TORCH_CHECK(all.records.size() < kSlots, "remote_accelerator: more than ", kSlots, " storages");
    record->slot = static_cast<uint32_t>(all.records.size());
    all.records.push_back(record);
  } else {
    record->slot = all.unused.back();
    all.unused.pop_back();
    all.records[record->slot] = record;
  }
}

void delete_record(void* context) {
  auto* record = static_cast<StorageRecord*>(context);
  {
    std::lock_guard<SpinLock> guard(record_lock(record));
    record->storage = nullptr;
  }
  record->kept.clear();
  record->anchor.reset();
  {
    auto& all = shared();
    std::lock_guard<SpinLock> guard(all.lock);
    if (record->slot != kNoSlot) {
      all.records[record->slot] = nullptr;
      all.unused.push_back(record->slot);
    }
  }
  c10::raw::intrusive_ptr::decref(record);  // values whose tensors have got another storage keep the record alive
}

c10::DataPtr data_of(StorageRecord* record, size_t nbytes, c10::DeviceIndex index) {
  if (!nbytes) return {nullptr, record, &delete_record, c10::Device(kRemote, index)};
  reserve(record);
  auto* address = reinterpret_cast<void*>(kBase + (static_cast<uint64_t>(record->slot) << kOffsetBits) + kFirstByte);
  return {address, record, &delete_record, c10::Device(kRemote, index)};
}

StorageRecord* new_record(size_t nbytes) {
  auto* record = c10::make_intrusive<StorageRecord>().release();  // `delete_record` releases it
  record->number = next_storage.fetch_add(1, std::memory_order_relaxed);
  record->held = nbytes;
  auto& all = shared();
  std::lock_guard<SpinLock> guard(all.lock);
  auto& first = all.bucket(record->number);
  record->next = first;
  first = record;
  return record;
}

struct RemoteAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override { return data_of(new_record(nbytes), nbytes, current_index()); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "storages of remote_accelerator are copied by ops, not by the allocator");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { change_memory("empty_cache", -1); }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override { return memory_stats(index); }
  void resetAccumulatedStats(c10::DeviceIndex index) override { change_memory("reset_accumulated", index); }
  void resetPeakStats(c10::DeviceIndex index) override { change_memory("reset_peak", index); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override { return memory_info(index); }
};
RemoteAllocator the_allocator;

c10::Storage storage_over(StorageRecord* record, size_t nbytes, c10::DeviceIndex index) {
  c10::Storage made(c10::Storage::use_byte_size_t(), nbytes, data_of(record, nbytes, index), &the_allocator, /*resizable=*/true);
  record->storage = made.unsafeGetStorageImpl();
  return made;
}

}  // namespace

Handle first_handle(int64_t storage) { return storage * kStep; }

StorageRecord::~StorageRecord() {
  if (borrowed) return;
  auto& all = shared();
  std::lock_guard<SpinLock> guard(all.lock);
  auto* place = &all.bucket(number);
  while (*place != this) place = &(*place)->next;
  *place = next;
}

SpinLock& freed_lock() { return shared().lock; }

c10::Allocator* allocator() { return &the_allocator; }

c10::Storage new_storage(size_t nbytes, c10::DeviceIndex index) { return storage_over(new_record(nbytes), nbytes, index); }

c10::Storage borrowed_storage(int64_t number, size_t nbytes, c10::DeviceIndex index) {
  auto* record = c10::make_intrusive<StorageRecord>().release();  // `delete_record` releases it
  record->number = number;
  record->borrowed = true;
  {
    auto& all = shared();
    std::lock_guard<SpinLock> guard(all.lock);
    auto* owner = all.find(number);  // the owner may be dying: it stays in the table until after its last reference is gone
    if (owner) record->owner = c10::intrusive_ptr<StorageRecord>::reclaim(c10::raw::weak_intrusive_ptr::lock(owner));
  }
  record->views = int64_t{1} << 30;  // handles of a borrowed storage's views start here, beyond those that the owner assigns
  record->held = nbytes;
  return storage_over(record, nbytes, index);
}

int64_t reserve_storages(int64_t count) { return next_storage.fetch_add(count, std::memory_order_relaxed); }

void set_bytes(StorageRecord* record, size_t nbytes) {
  record->storage->set_nbytes(nbytes);
  if (C10_LIKELY(!nbytes || record->slot != kNoSlot)) return;
  auto& ptr = record->storage->_mutable_data_ptr_no_checks();
  const auto index = ptr.device().index();
  ptr.release_context();
  ptr = data_of(record, nbytes, index);
}

bool has_record(const c10::StorageImpl* s) {
  const auto& ptr = const_cast<c10::StorageImpl*>(s)->_mutable_data_ptr_no_checks();
  return ptr.get_deleter() == &delete_record || ptr.get() != nullptr;
}

StorageRecord* record_of(c10::StorageImpl* s, int64_t* bytes_before) {
  const auto& ptr = s->_mutable_data_ptr_no_checks();
  if (C10_LIKELY(ptr.get_deleter() == &delete_record)) {
    auto* record = static_cast<StorageRecord*>(ptr.get_context());
    if (C10_UNLIKELY(!record->storage)) record->storage = s;
    return record;
  }
  const auto address = reinterpret_cast<uint64_t>(ptr.get()) - kBase;
  auto& all = shared();
  std::lock_guard<SpinLock> guard(all.lock);
  const uint64_t slot = address >> kOffsetBits;
  TORCH_CHECK(slot < all.records.size() && all.records[slot], "remote_accelerator: a tensor over an address that no storage has");
  if (bytes_before) *bytes_before = static_cast<int64_t>(address & ((uint64_t{1} << kOffsetBits) - 1)) - static_cast<int64_t>(kFirstByte);
  return all.records[slot];
}

int64_t take_whole(c10::Storage* s) {
  auto* part = s->unsafeGetStorageImpl();
  const auto& ptr = part->_mutable_data_ptr_no_checks();
  if (C10_LIKELY(ptr.get_deleter() == &delete_record || !ptr.get())) return 0;
  int64_t before = 0;
  auto* record = record_of(part, &before);
  *s = c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(record->storage));
  return before;
}

SpinLock& record_lock_at(size_t place) {
  struct alignas(64) Padded {
    SpinLock lock;
  };
  static auto* all = new std::array<Padded, kRecordLocks>();
  return (*all)[place].lock;
}

SpinLock& record_lock(const StorageRecord* r) { return record_lock_at(reinterpret_cast<uintptr_t>(r) / 64 % kRecordLocks); }

Value::Value(Handle h, StorageRecord* r, bool o, LayoutPtr l)
    : handle(h),
      record(r),
      keeps(c10::intrusive_ptr<c10::intrusive_ptr_target>::unsafe_reclaim_from_nonowning(r)),
      owned(o),
      layout(std::move(l)) {}

ValuePtr new_value(Handle handle, StorageRecord* record, bool owned, LayoutPtr layout) {
  auto made = c10::make_intrusive<Value>(handle, record, owned, std::move(layout));
  c10::raw::weak_intrusive_ptr::incref(made.get());  // reference of `record->values`
  std::lock_guard<SpinLock> guard(record_lock(record));
  record->values.push_back(made.get());
  return made;
}

void Value::set_layout(LayoutPtr to) {
  std::lock_guard<SpinLock> guard(record_lock(record));
  layout.swap(to);
}

LayoutPtr Value::present_layout() const {
  std::lock_guard<SpinLock> guard(record_lock(record));
  return layout;
}

// Called when the last owner is gone.
void Value::release_resources() {
  auto* r = record;
  bool anchors;
  {
    std::lock_guard<SpinLock> guard(record_lock(r));
    auto& all = r->values;
    all.erase(std::ranges::find(all, this));
    // If Python still holds the storage object, a tensor may be made over it again. So keep the value.
    anchors = owned && all.empty() && r->storage && c10::raw::intrusive_ptr::use_count(r->storage) > 1;
  }
  if (anchors) {
    auto anchor = new_value(handle, r, true, layout);
    std::lock_guard<SpinLock> guard(record_lock(r));
    if (r->storage) r->anchor.swap(anchor);  // otherwise the storage has gone in the meantime
  } else if (owned) {
    queue_freed(*this);
  }
  c10::raw::weak_intrusive_ptr::decref(this);  // reference of `record->values`; the caller has another
}

ValuePtr value_with(StorageRecord* r, const Layout* layout) {
  ValuePtr found;
  std::lock_guard<SpinLock> guard(record_lock(r));
  for (auto* value : r->values) {
    if (layout && !(*value->layout == *layout)) continue;
    if (auto* alive = c10::raw::weak_intrusive_ptr::lock(value)) found = ValuePtr::reclaim(alive);
    if (found) break;
  }
  return found;
}

void queue_freed(const Value& v) {
  Freed freed{v.handle, {}, {}, {}};
  {
    std::lock_guard<SpinLock> guard(sharing_mutex());
    freed.writer = v.record->writer;
    freed.reader = v.record->reader;
    freed.readers = v.record->readers;
  }
  auto& all = shared();
  std::lock_guard<SpinLock> guard(all.lock);
  all.freed.push_back(std::move(freed));
}

std::vector<int64_t> take_freed(Program* program, int64_t* waiting) {
  auto& all = shared();
  std::vector<Freed> taken;
  {
    std::lock_guard<SpinLock> guard(all.lock);
    taken.swap(all.freed);
  }
  auto elsewhere = [&](const Use& u) { return u.program && u.program != program && is_live(u); };
  std::vector<int64_t> free;
  std::vector<Freed> left;
  for (const auto& f : taken) {
    if (elsewhere(f.writer) || elsewhere(f.reader) || std::ranges::any_of(f.readers, elsewhere)) left.push_back(f);
    else free.push_back(f.handle);
  }
  *waiting = static_cast<int64_t>(left.size());
  if (!left.empty()) {
    std::lock_guard<SpinLock> guard(all.lock);
    all.freed.insert(all.freed.begin(), left.begin(), left.end());
  }
  return free;
}

// Return the freed handles. They stay in the queue.
std::vector<int64_t> look_freed() {
  auto& all = shared();
  std::lock_guard<SpinLock> guard(all.lock);
  std::vector<int64_t> handles;
  handles.reserve(all.freed.size());
  for (const auto& f : all.freed) handles.push_back(f.handle);
  return handles;
}

// Return the handles of all existing values, each followed by the bytes of its storage.
std::vector<int64_t> live_values() {
  auto& all = shared();
  std::vector<int64_t> found;
  auto add = [&](StorageRecord* record) {
    std::lock_guard<SpinLock> guard(record_lock(record));
    for (auto* value : record->values) {
      if (!value->owned || !c10::raw::intrusive_ptr::use_count(value)) continue;
      found.push_back(value->handle);
      found.push_back(static_cast<int64_t>(record->held));
    }
  };
  std::lock_guard<SpinLock> guard(all.lock);
  for (auto* record : all.by_number) {
    for (; record; record = record->next) add(record);
  }
  return found;
}

// Queue handles again because an unsent entry of the program refers to them.
void put_back(at::IntArrayRef handles, Program* program) {
  const Use use{program, program->epoch()};
  auto& all = shared();
  std::lock_guard<SpinLock> guard(all.lock);
  for (auto h : handles) all.freed.push_back({h, use, {}, {}});
}

void drop_freed() {
  auto& all = shared();
  std::lock_guard<SpinLock> guard(all.lock);
  all.freed.clear();
}

int64_t version_of(int64_t number) {
  auto& all = shared();
  std::lock_guard<SpinLock> guard(all.lock);
  auto* found = all.find(number);
  return found ? found->version.load() : -1;
}

std::vector<int64_t> sent_versions(at::IntArrayRef numbers) {
  const auto& mine = current_program();
  auto& all = shared();
  std::vector<int64_t> versions;
  versions.reserve(numbers.size());
  std::lock_guard<SpinLock> sharing(sharing_mutex());
  std::lock_guard<SpinLock> guard(all.lock);
  for (auto number : numbers) {
    auto* found = all.find(number);
    versions.push_back(found && !before_read(mine, found) ? found->version.load() : -1);
  }
  return versions;
}

}  // namespace djinn
