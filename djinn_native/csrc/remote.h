// Types shared by the source files: storages, values, tensors, known calls and the programs of threads.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#if defined(_WIN32)
#define DJINN_EXPORT extern "C" __declspec(dllexport)
#else
#define DJINN_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace djinn {

constexpr auto kRemote = c10::DeviceType::PrivateUse1;
using torch::jit::Stack;
using Handle = int64_t;  // as in djinn_core/ir/handles.py: storage * (2^32 + 1) + view

struct Program;
struct StorageRecord;

// A lock for a few instructions. It takes half as long as a mutex if no other thread holds it.
struct SpinLock {
  std::atomic_flag busy = ATOMIC_FLAG_INIT;
  void lock() {
    for (int turns = 0; busy.test_and_set(std::memory_order_acquire); ++turns) {
      if (turns > 64) std::this_thread::yield();
    }
  }
  void unlock() { busy.clear(std::memory_order_release); }
};

// The last use of a storage by a program. The use has been sent if the program has another epoch by now.
struct Use {
  Program* program = nullptr;
  int64_t epoch = -1;
};

// Metadata of a strided tensor. `dims` has the sizes, then the strides.
struct Layout {
  c10::ScalarType dtype = c10::ScalarType::Byte;
  bool conj = false, neg = false;
  int64_t offset = 0;
  c10::SmallVector<int64_t, 8> dims;
  bool operator==(const Layout& o) const {
    return dtype == o.dtype && conj == o.conj && neg == o.neg && offset == o.offset && dims == o.dims;
  }
};
using LayoutPtr = std::shared_ptr<const Layout>;  // never null; results of equal calls share one
Layout layout_of(const c10::TensorImpl* t);

struct KnownContents;     // the known contents of a storage
struct Contents;  // bytes, or the op that computes them
using KnownPtr = std::shared_ptr<KnownContents>;

// A value on an executor. Tensors for the same value (`detach`) share it. Its handle is freed when its last owner is. The record of its
// storage has a weak reference to it, so that a thread can find the value there while another thread releases the last owner.
struct Value final : c10::intrusive_ptr_target {
  Value(Handle h, StorageRecord* r, bool o, LayoutPtr l);
  void release_resources() override;
  void set_layout(LayoutPtr to);
  LayoutPtr present_layout() const;
  const Handle handle;
  StorageRecord* const record;
  const c10::intrusive_ptr<c10::intrusive_ptr_target> keeps;  // the record, because PyTorch may give a tensor another storage without an op
  const bool owned;
  LayoutPtr layout;
};
using ValuePtr = c10::intrusive_ptr<Value>;
ValuePtr new_value(Handle handle, StorageRecord* record, bool owned, LayoutPtr layout);  // values are made by this function only

constexpr uint32_t kNoSlot = 0xffffffff;  // slot of storages without bytes, which have no address

// Context of a storage's DataPtr. It lives as long as the storage and the values in it.
struct StorageRecord final : c10::intrusive_ptr_target {
  ~StorageRecord() override;
  int64_t number = 0;
  std::atomic<int64_t> views{0};  // number of views that were assigned handles
  uint32_t slot = kNoSlot;  // slot that determines the storage's address
  std::atomic<bool> known{false};  // true if contents may be known
  std::shared_ptr<KnownContents> contents;  // known contents at `contents_version` in `contents_session`; `known_mutex` guards all three
  int64_t contents_version = -1, contents_session = -1;
  bool borrowed = false;  // true if the storage belongs to another record with the same number
  c10::intrusive_ptr<StorageRecord> owner;  // that record, for a borrowed storage; null if it is gone
  StorageRecord* next = nullptr;  // in the same bucket of the table by number
  std::atomic<int64_t> version{0};  // number of recorded writes
  c10::SmallVector<Value*, 2> values;  // all existing values; `record_lock` guards these, their layouts, `kept` and `anchor`
  size_t held = 0;  // minimum bytes of the memory on the executor
  c10::StorageImpl* storage = nullptr;  // null once PyTorch's storage is gone
  Use writer;  // last program with unsent writes or unsent views
  Use reader;  // last program with unsent reads
  std::vector<Use> readers;  // other programs with unsent reads; `sharing_mutex` guards all of these, `version` and `known`
  std::vector<ValuePtr> kept;  // values of views that PyTorch made without an op, such as by `param.data = x`
  ValuePtr anchor;  // the last value, while there is a storage but no tensor
};

// Return the record whose uses determine the order of programs: for a borrowed storage, that of its owner.
inline StorageRecord* ordering_record(StorageRecord* r) { return r->owner ? r->owner.get() : r; }

// Return the lock of a storage. All storages share a fixed number of locks, so that a fork can take all of them.
SpinLock& record_lock(const StorageRecord* r);

Handle first_handle(int64_t storage);
inline Handle next_handle(StorageRecord* r) { return first_handle(r->number) + ++r->views; }

struct RemoteImpl final : c10::TensorImpl {
  RemoteImpl(c10::Storage&& s, caffe2::TypeMeta type, ValuePtr v)
      : TensorImpl(std::move(s), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type), value(std::move(v)) {}
  RemoteImpl(ImplType kind, c10::Storage&& s, c10::DispatchKeySet keys, caffe2::TypeMeta type, ValuePtr v)
      : TensorImpl(kind, std::move(s), keys, type), value(std::move(v)) {}
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion&, bool) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&&, bool) const override;
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>&) override;
  void release_resources() override;
  void mark_zero() { key_set_ = key_set_.add(c10::DispatchKey::ZeroTensor); }  // tells autograd that all elements are zero
  ValuePtr value;
};

inline bool is_remote(const c10::TensorImpl* t) { return t->key_set().has_backend(c10::BackendComponent::PrivateUse1Bit); }
inline bool is_remote(const at::Tensor& t) { return t.defined() && is_remote(t.unsafeGetTensorImpl()); }

// A tensor operand with its value.
struct Operand {
  c10::TensorImpl* impl;
  Value* value;
  StorageRecord* record() const { return value->record; }
};
// Throws NotOurs if the tensor has the device's dispatch key but no storage on the device, such as a fake tensor.
Operand operand_of(c10::TensorImpl* t);
inline Operand operand_of(const at::Tensor& t) { return operand_of(t.unsafeGetTensorImpl()); }
bool has_value(const at::Tensor& t);

// ---- storages (storage.cpp) ------------------------------------------------------------------------------------------

c10::Allocator* allocator();
c10::Storage new_storage(size_t nbytes, c10::DeviceIndex index);
c10::Storage borrowed_storage(int64_t number, size_t nbytes, c10::DeviceIndex index);
StorageRecord* record_of(c10::StorageImpl* s, int64_t* bytes_before = nullptr);
// If `s` is a part of a storage, such as `storage[8:16]`, replace it by the whole one. Return the number of bytes before the part.
int64_t take_whole(c10::Storage* s);
// Set the size that PyTorch sees. A storage that was empty gets an address.
void set_bytes(StorageRecord* record, size_t nbytes);
bool has_record(const c10::StorageImpl* s);
ValuePtr value_with(StorageRecord* r, const Layout* layout);  // an existing value with this layout; null: with any layout
void queue_freed(const Value& v);
// Take freed handles, except of values that unsent programs other than `program` use. `waiting` gets the number of those.
std::vector<int64_t> take_freed(Program* program, int64_t* waiting);
std::vector<int64_t> look_freed();
std::vector<int64_t> live_values();
void put_back(at::IntArrayRef handles, Program* program);
void drop_freed();
int64_t reserve_storages(int64_t count);
// Return the number of writes to a storage; -1 if it is gone.
int64_t version_of(int64_t number);
// As `version_of` for each number; also -1 if another program has unsent writes.
std::vector<int64_t> sent_versions(at::IntArrayRef numbers);

// ---- device (device.cpp) ---------------------------------------------------------------------------------------------

c10::DeviceIndex current_index();
void set_current_index(c10::DeviceIndex i);
void check_index(c10::DeviceIndex i);  // throws if the device does not exist
void forget_device_count();
c10::CachingDeviceAllocator::DeviceStats memory_stats(c10::DeviceIndex index);
std::pair<size_t, size_t> memory_info(c10::DeviceIndex index);
void change_memory(const char* what, c10::DeviceIndex index);
void install_device();

// Locks. None is held while Python is called, the interpreter's lock is taken, or a tensor or a value dies: a thread that waits for one of
// them may have the interpreter's lock. (`sites_mutex` is the exception: all take it with the interpreter's lock.) Where a thread takes
// several, this is the order; of those in one line it takes one at a time:
//   1. sharing_mutex: which programs use a storage, the table of programs
//   2. Program::mutex: the entries of a program
//   3. freed_lock: values that were freed, the table of storages
//   4. record_lock: values of a storage
//   5. infos_mutex, memo_mutex, calls_mutex, sites_mutex, generators_mutex, pinned_mutex, known_mutex, and that of each generator
// A fork takes all but the last, so that what they guard is whole in the child.
std::mutex& infos_mutex();
std::shared_mutex& memo_mutex();
std::mutex& calls_mutex();
std::mutex& sites_mutex();
std::mutex& generators_mutex();
std::mutex& known_mutex();
SpinLock& freed_lock();
constexpr size_t kRecordLocks = 64;
SpinLock& record_lock_at(size_t place);
extern std::atomic<bool> forked;  // true in a forked child of a process that used the device
extern std::atomic<bool> named_cuda;  // true if the device type `cuda` is a name of the remote device

// ---- upcalls (upcall.cpp) --------------------------------------------------------------------------------------------

// Suppresses warnings of PyTorch in a block.
struct SilentWarnings {
  SilentWarnings() : guard(&handler) {}
  struct Handler final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } handler;
  const c10::WarningUtils::WarningHandlerGuard guard;
};

void set_upcall();
// Have Python handle a call. Pops the arguments of `op` from the stack and pushes the results.
void upcall(const c10::OperatorHandle& op, Stack* stack);
// Call an op of Djinn that Python implements. User modes do not see the ops in it, unless `hides_modes` is false.
void call_python(const char* op, Stack* stack, bool hides_modes = true);

// ---- settings (settings.cpp) -----------------------------------------------------------------------------------------

// If numeric settings have changed since the last op, have Python send the ops that were recorded before the change.
void note_settings();

// ---- programs (program.cpp) ------------------------------------------------------------------------------------------

enum SlotKind : uint8_t { kIntSlot, kFloatSlot, kUnsignedSlot };
enum Counter : uint8_t { kEntries, kEpoch, kLimit, kDifferentiating, kCounters };

struct Program {
  explicit Program(int64_t n);
  const int64_t number;
  std::atomic<int> holders{0};  // the thread that records the program, and its recorder in Python
  SpinLock mutex;
  std::atomic<int64_t> counters[kCounters];
  std::vector<int32_t> calls;  // call number of each entry
  std::vector<int32_t> sites;  // line of the user's code of each entry
  std::vector<int64_t> nodes;  // autograd node of each entry; -1 outside of backward passes
  std::vector<int64_t> handles;  // of each entry: operands, then new results
  std::vector<int64_t> slots;  // scalars of each entry; floats as their bits
  std::vector<uint8_t> kinds;  // SlotKind of each slot
  std::vector<int64_t> times;  // if ops are timed, for each op recorded by C++: begin and end in ns, OpInfo, autograd node
  int64_t epoch() const { return counters[kEpoch].load(std::memory_order_acquire); }
};

Program& current_program();
Program* switch_program(Program* to);  // returns the former program
Program* program_of(int64_t number);
Program* new_program(int holders);
void let_go(Program* p);  // a program without holders is reused by another thread
std::vector<Program*> all_programs();  // the caller holds `sharing_mutex`
void forget_programs();
inline bool is_live(const Use& u) {
  return u.program && u.program->epoch() == u.epoch && u.program->counters[kEntries].load(std::memory_order_acquire) > 0;
}
// Guards the table of programs, and which programs use a storage. A program's own mutex may be locked under it. It is never held while
// Python is called or a value is freed.
SpinLock& sharing_mutex();
// Return the program of another thread that must be sent before this one reads a storage. The caller holds `sharing_mutex`.
inline Program* before_read(const Program& mine, StorageRecord* s) {
  s = ordering_record(s);
  return s->writer.program != &mine && is_live(s->writer) ? s->writer.program : nullptr;
}
Program* before_write(const Program& mine, StorageRecord* s);
// Note a read or a write. The caller holds `sharing_mutex`.
void note_read(Program& mine, StorageRecord* s);
void note_write(Program& mine, StorageRecord* s);
// Note that the program creates the storage or a view of it. A program that uses it must be sent later than this one.
inline void note_made(Program& mine, StorageRecord* s) { ordering_record(s)->writer = {&mine, mine.epoch()}; }
// Have Python send the program of another thread.
void cut(Program* other);
// Send the programs that must be sent before, then note the read or the write.
void begin_read(Program& mine, StorageRecord* s);
void begin_write(Program& mine, StorageRecord* s);
void for_unsent_calls(const std::function<void(int32_t)>& visit);

// ---- what Python gets of programs (taken.cpp) ------------------------------------------------------------------------

// Return entries of a program as one array, described in `interception/native/entries.py`. Valid until the thread's next call.
const int64_t* entries_of(const Program& p, size_t first, size_t last);
// Return the first `count` entries and the rest of a submission: the values by first appearance, which handles in `dead` occur among them
// and which do not, and a hash of calls, data flow, dying values, and inputs that share a storage.
const int64_t* submission_of(const Program& p, size_t count, at::IntArrayRef dead, int64_t waiting);

// ---- calls (calls.cpp) -----------------------------------------------------------------------------------------------

struct Result {
  enum Kind : uint8_t { kNew, kView, kSame, kNone } kind = kNone;
  uint16_t of = 0;  // number of the operand, for kView and kSame
  bool conj = false, neg = false;
  c10::ScalarType dtype = c10::ScalarType::Byte;
  c10::DeviceIndex device = 0;
  c10::SmallVector<int64_t, 5> sizes, strides;
  int64_t offset = 0;
  size_t nbytes = 0;
  LayoutPtr layout;  // the fields above; set by `share_layout`
};
void share_layout(Result& r);

// A call as Python inferred it: everything that depends only on the op, metadata and scalars.
struct Call {
  int32_t id = 0;
  int32_t operands = 0, slots = 0;
  int32_t fresh = 0;  // number of results that are new values
  int64_t signature = 0;  // number of its signature in Python
  int64_t kind = 0;  // number that is equal for calls that differ only in sizes and scalars
  bool nothing = false;  // true: returns its operand, and nothing is recorded
  bool list = false;  // true: returns one list of results
  bool bumps = false;  // true: increments the version counters of written tensors
  bool no_overlap = false;  // true: the kernel refuses operands that overlap a written one
  bool empty = false;  // true: allocates memory without writing to it
  int32_t like = -1;  // the call from which a formula derived this one for other sizes; -1 if Python inferred it
  std::vector<Result> results;
  std::vector<uint16_t> writes;
  std::vector<int64_t> operand_dims;  // offset, sizes and strides of each operand
};

int32_t add_call(Call made);
const Call& call_of(int32_t id);

// Ops whose result can be known: kFolds for known integers, kFoldsFloats for known floats as well, kFoldsSizes if it depends on numbers
// and metadata only. kFoldsMasks: Python handles the op if a mask is known.
enum OpFlag : int64_t { kHandled = 1, kFolds = 2, kAnyFloat = 4, kNeverKnown = 8, kFoldsFloats = 16, kFoldsSizes = 32, kFoldsMasks = 64 };

// Kind of the next part of a key. Further words may follow, whose number depends on the kind.
enum Mark : uint64_t {
  kTensor = 1,
  kCpuNumber,
  kWrapped,
  kUndefined,
  kInt,
  kNumber,  // a number that the op computes with, unlike a size or an index
  kDouble,
  kComplex,
  kTrue,
  kFalse,
  kNone,
  kList,
  kString,
  kDevice,
  kGenerator,
  kEnumValue,
  kArgument
};

struct Rule;
enum class ArgKind : uint8_t { kPlain, kEnum, kNumber };
struct OpInfo {
  explicit OpInfo(c10::OperatorHandle op);
  c10::OperatorHandle op;
  std::string name;
  uint64_t id;
  std::vector<ArgKind> kinds;
  std::vector<bool> keyword;
  int64_t flags = 0;
  size_t args, returns;
  const Rule* rule;  // infers results from sizes; null if there is none
};
OpInfo& info_of(const c10::OperatorHandle& op);

struct NotOurs {};  // thrown for a tensor with the device's dispatch key but no storage on the device
struct PythonDecides {};  // thrown for an argument that keys cannot describe

// The key, operands and scalars of a call.
struct Scratch {
  c10::SmallVector<uint64_t, 128> words;
  c10::SmallVector<uint64_t, 8> float_at;  // indexes of floats in `words`
  c10::SmallVector<Operand, 16> operands;
  c10::SmallVector<int64_t, 32> slots;
  c10::SmallVector<uint8_t, 32> kinds;
  c10::SmallVector<at::Tensor, 1> kept;  // keeps states of generators alive
  bool known = false;  // true if the contents of an operand may be known
};
void take_apart(OpInfo& info, const Stack& stack, Scratch& s);
// Take apart a call of an op whose arguments are a tensor and sizes.
void take_apart(OpInfo& info, const at::Tensor& self, at::IntArrayRef sizes, Scratch& s);
const Call* find_call(const OpInfo& info, Scratch& s);
// Derive a call whose key is not in the table by the rule of its op; null if Python has to infer it.
const Call* find_by_rule(const OpInfo& info, const Scratch& s, at::ArrayRef<c10::IValue> args);
void remember_call(int32_t id, bool any_float);
bool is_moderate(uint64_t value, bool is_float);  // true if every floating dtype can hold the number
void forget_calls(int64_t signature);
// The key of the call that Python is inferring.
struct Pending {
  std::vector<uint64_t> words, float_at;
  const Rule* rule;
};
struct PendingGuard {
  explicit PendingGuard(Pending* p);
  ~PendingGuard();
  Pending* before;
};

// ---- calls of other sizes (formulas.cpp) -----------------------------------------------------------------------------

const Rule* rule_of(const OpInfo& info);
bool has_kind(const Rule* rule, const Call& call);
std::vector<uint64_t> kind_of(at::ArrayRef<uint64_t> words, bool any_number);
// Derive the call with these arguments from `like`, a call of the same kind, by the op's rule; empty if Python has to infer it.
std::optional<Call> call_like(const Call& like, const OpInfo& info, at::ArrayRef<Operand> operands, at::ArrayRef<c10::IValue> args);

// ---- recording (record.cpp) ------------------------------------------------------------------------------------------

struct Counters {
  std::atomic<int64_t> ops{0}, missed{0}, asked{0};
};
extern Counters counters;
extern std::atomic<bool> all_watched;

void record(OpInfo& info, Stack* stack);
at::Tensor record_view(OpInfo& info, const at::Tensor& self, c10::SymIntArrayRef size);
std::vector<at::Tensor> append(const Call& call, at::ArrayRef<Operand> operands, at::ArrayRef<int64_t> slots, at::ArrayRef<uint8_t> kinds);
// Return the sequence number of the thread's current autograd node: -1 outside of backward passes, -2 if the node has none.
int64_t autograd_node(Program& p);
// Have Python send the program if it has reached its limit of entries.
void check_limit(Program& p);
at::Tensor make_result(const Result& r, c10::TensorImpl* base, c10::StorageImpl* into = nullptr);
at::Tensor twin_of(const Operand& o);
at::Tensor tensor_of(Value* v);
void register_kernels();
void register_cuda_factories();

// ---- known contents (known.cpp) --------------------------------------------------------------------------------------

// Data to compute the result of an op on known contents.
struct Fold {
  std::shared_ptr<Contents> made;  // null: the result will not be known
  int depth = 0;
  bool floats = false;  // true if an operand has floats
  int64_t version = -1;  // version of the storage that the op writes to, before the write
};
bool knows_mask(const Scratch& s);
Fold begin_fold(const OpInfo& info, const Scratch& s, const Stack& stack);
void end_fold(const Fold& fold, const Stack& stack);
void forget_known();  // called at the end of a session

// ---- generators (generator.cpp) --------------------------------------------------------------------------------------

const at::Generator& default_generator(c10::DeviceIndex index);
at::Generator new_generator(c10::DeviceIndex index);
// Return the value with the generator's state; undefined if the state belongs to the executor's session.
at::Tensor state_of(const at::Generator& g);

// ---- sites (sites.cpp) -----------------------------------------------------------------------------------------------

int32_t user_site();
void set_own_folders(std::vector<std::string> folders);
std::vector<int64_t> sites_from(int64_t first);

}  // namespace djinn
