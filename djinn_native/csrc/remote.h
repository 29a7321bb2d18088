// Types that the source files share: storages, values, tensors, known calls and the programs of threads.
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

// A lock for a few instructions, which takes half as long as a mutex where nobody else holds it.
struct SpinLock {
  std::atomic_flag busy = ATOMIC_FLAG_INIT;
  void lock() {
    for (int turns = 0; busy.test_and_set(std::memory_order_acquire); ++turns) {
      if (turns > 64) std::this_thread::yield();
    }
  }
  void unlock() { busy.clear(std::memory_order_release); }
};

// The last use of a storage by a program. It is over when the program has another epoch.
struct Use {
  Program* program = nullptr;
  int64_t epoch = -1;
};

// Metadata of a strided tensor, as one list of numbers: sizes, then strides.
struct Layout {
  c10::ScalarType dtype = c10::ScalarType::Byte;
  bool conj = false, neg = false;
  int64_t offset = 0;
  c10::SmallVector<int64_t, 8> dims;
  bool operator==(const Layout& o) const {
    return dtype == o.dtype && conj == o.conj && neg == o.neg && offset == o.offset && dims == o.dims;
  }
};
using LayoutPtr = std::shared_ptr<const Layout>;  // never null; values of one call share it
Layout layout_of(const c10::TensorImpl* t);

struct KnownContents;     // contents of a storage
struct Contents;  // its bytes, or the op that makes them
using KnownPtr = std::shared_ptr<KnownContents>;

// One value of an executor. Tensors that stand for the same value (`detach`) share it. Its handle is freed with the last of its owners.
// The list of its storage has a weak reference, so that a thread which finds it there and the last owner notice each other.
struct Value final : c10::intrusive_ptr_target {
  Value(Handle h, StorageRecord* r, bool o, LayoutPtr l);
  void release_resources() override;
  void set_layout(LayoutPtr to);
  LayoutPtr present_layout() const;
  const Handle handle;
  StorageRecord* const record;
  const c10::intrusive_ptr<c10::intrusive_ptr_target> keeps;  // the record: PyTorch may give a tensor another storage without an op
  const bool owned;
  LayoutPtr layout;
};
using ValuePtr = c10::intrusive_ptr<Value>;
ValuePtr new_value(Handle handle, StorageRecord* record, bool owned, LayoutPtr layout);  // the only way to make one

constexpr uint32_t kNoSlot = 0xffffffff;  // storages without bytes have no address

// Context of a storage's DataPtr. It lives as long as the storage and its values.
struct StorageRecord final : c10::intrusive_ptr_target {
  ~StorageRecord() override;
  int64_t number = 0;
  std::atomic<int64_t> views{0};  // views whose handles were given out
  uint32_t slot = kNoSlot;     // of its address
  std::atomic<bool> known{false};    // its contents may be known
  std::shared_ptr<KnownContents> contents;   // that it had at a version and in a session; `known_mutex` guards these
  int64_t contents_version = -1, contents_session = -1;
  bool borrowed = false;       // another record has this number
  c10::intrusive_ptr<StorageRecord> owner;  // of a borrowed storage: the other record; null if that is gone
  StorageRecord* next = nullptr;     // in the table by number
  std::atomic<int64_t> version{0};   // number of recorded writes
  c10::SmallVector<Value*, 2> values;  // that exist; `record_lock` guards these, their layouts, `kept` and `anchor`
  size_t held = 0;             // bytes that the executor's memory has at least
  c10::StorageImpl* storage = nullptr;  // null once it is gone
  Use writer;                  // unsent writes, or unsent views
  Use reader;                  // unsent reads
  std::vector<Use> readers;    // further threads with unsent reads; `sharing_mutex` guards all of these, `version` and `known`
  std::vector<ValuePtr> kept;  // of views that PyTorch made without an op, as `param.data = x` does
  ValuePtr anchor;             // the last value, while only the storage itself is referenced
};

// The record whose uses order the programs of threads. Borrowed storages share that of their owner.
inline StorageRecord* ordering_record(StorageRecord* r) { return r->owner ? r->owner.get() : r; }

// The lock of a storage. Storages share a few, so that a fork can take all of them.
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
  void mark_zero() { key_set_ = key_set_.add(c10::DispatchKey::ZeroTensor); }  // autograd knows that it is zero
  ValuePtr value;
};

inline bool is_remote(const c10::TensorImpl* t) { return t->key_set().has_backend(c10::BackendComponent::PrivateUse1Bit); }
inline bool is_remote(const at::Tensor& t) { return t.defined() && is_remote(t.unsafeGetTensorImpl()); }

// A tensor as an operand: its metadata and its value.
struct Operand {
  c10::TensorImpl* impl;
  Value* value;
  StorageRecord* record() const { return value->record; }
};
// Throws NotOurs for a tensor that claims to be on the device and has no storage there, such as a fake one.
Operand operand_of(c10::TensorImpl* t);
inline Operand operand_of(const at::Tensor& t) { return operand_of(t.unsafeGetTensorImpl()); }
bool has_value(const at::Tensor& t);

// ---- storages (storage.cpp) ------------------------------------------------------------------------------------------

c10::Allocator* allocator();
c10::Storage new_storage(size_t nbytes, c10::DeviceIndex index);
c10::Storage borrowed_storage(int64_t number, size_t nbytes, c10::DeviceIndex index);
StorageRecord* record_of(c10::StorageImpl* s, int64_t* bytes_before = nullptr);
// Put the storage that has the record in the place of a part of it, such as `storage[8:16]`; the number of bytes before the part.
int64_t take_whole(c10::Storage* s);
// Set the size that PyTorch sees. The storage gets an address with its first byte.
void set_bytes(StorageRecord* record, size_t nbytes);
bool has_record(const c10::StorageImpl* s);
ValuePtr value_with(StorageRecord* r, const Layout* layout);  // one that is alive; null: of any layout
void queue_freed(const Value& v);
// Handles that were freed and that no unsent program but `program` uses. `waiting` gets the number of the others.
std::vector<int64_t> take_freed(Program* program, int64_t* waiting);
std::vector<int64_t> look_freed();
std::vector<int64_t> live_values();
void put_back(at::IntArrayRef handles, Program* program);
void drop_freed();
int64_t reserve_storages(int64_t count);
// The number of writes to a storage; -1 if it is gone.
int64_t version_of(int64_t number);
// As `version_of` for each; -1 as well if a thread of another program has unsent writes.
std::vector<int64_t> sent_versions(at::IntArrayRef numbers);

// ---- device (device.cpp) ---------------------------------------------------------------------------------------------

c10::DeviceIndex current_index();
void set_current_index(c10::DeviceIndex i);
void check_index(c10::DeviceIndex i);  // throws if there is no such device
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
extern std::atomic<bool> forked;      // this process is a forked child of one that used the device
extern std::atomic<bool> named_cuda;  // the device type `cuda` is a name of the remote device

// ---- upcalls (upcall.cpp) --------------------------------------------------------------------------------------------

// Drops the warnings of PyTorch in a block.
struct SilentWarnings {
  SilentWarnings() : guard(&handler) {}
  struct Handler final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } handler;
  const c10::WarningUtils::WarningHandlerGuard guard;
};

void set_upcall();
// Have Python handle a call: pops the arguments of `op` from the stack and pushes its results.
void upcall(const c10::OperatorHandle& op, Stack* stack);
// Calls an op of Djinn's that Python implements. The user's modes do not see what it calls, unless `hides_modes` is false.
void call_python(const char* op, Stack* stack, bool hides_modes = true);

// ---- settings (settings.cpp) -----------------------------------------------------------------------------------------

// Have Python send what was recorded under other numeric settings than those of now.
void note_settings();

// ---- programs (program.cpp) ------------------------------------------------------------------------------------------

enum SlotKind : uint8_t { kIntSlot, kFloatSlot, kUnsignedSlot };
enum Counter : uint8_t { kEntries, kEpoch, kLimit, kDifferentiating, kCounters };

struct Program {
  explicit Program(int64_t n);
  const int64_t number;
  std::atomic<int> holders{0};     // the thread that records it, and its recorder in Python
  SpinLock mutex;
  std::atomic<int64_t> counters[kCounters];
  std::vector<int32_t> calls;      // one for each entry
  std::vector<int32_t> sites;      // one for each entry
  std::vector<int64_t> nodes;      // of the autograd graph, one for each entry; -1 outside of a backward pass
  std::vector<int64_t> handles;    // of each entry its operands, then its new results
  std::vector<int64_t> slots;      // of each entry its scalars; floats bit by bit
  std::vector<uint8_t> kinds;      // SlotKind of each slot
  std::vector<int64_t> times;      // while ops are timed, of each that C++ recorded: begin and end in ns, OpInfo, autograd node
  int64_t epoch() const { return counters[kEpoch].load(std::memory_order_acquire); }
};

Program& current_program();
Program* switch_program(Program* to);  // returns the former one
Program* program_of(int64_t number);
Program* new_program(int holders);
void let_go(Program* p);  // when nobody holds it, another thread gets it
std::vector<Program*> all_programs();  // the caller holds `sharing_mutex`
void forget_programs();
inline bool is_live(const Use& u) {
  return u.program && u.program->epoch() == u.epoch && u.program->counters[kEntries].load(std::memory_order_acquire) > 0;
}
// Guards which programs use a storage, and the table of programs. A program's own mutex may be taken under it. Never held while
// Python is called, or a value dies.
SpinLock& sharing_mutex();
// The program of another thread that must be sent before this one reads a storage; the caller holds `sharing_mutex`.
inline Program* before_read(const Program& mine, StorageRecord* s) {
  s = ordering_record(s);
  return s->writer.program != &mine && is_live(s->writer) ? s->writer.program : nullptr;
}
Program* before_write(const Program& mine, StorageRecord* s);
// Note a read or a write; the caller holds `sharing_mutex`.
void note_read(Program& mine, StorageRecord* s);
void note_write(Program& mine, StorageRecord* s);
// Note that the program makes the storage, or a view of it: a thread that uses it needs this program first.
inline void note_made(Program& mine, StorageRecord* s) { ordering_record(s)->writer = {&mine, mine.epoch()}; }
// Send the program of another thread.
void cut(Program* other);
// Send what must come before, then note it.
void begin_read(Program& mine, StorageRecord* s);
void begin_write(Program& mine, StorageRecord* s);
void for_unsent_calls(const std::function<void(int32_t)>& visit);

// ---- what Python gets of programs (taken.cpp) ------------------------------------------------------------------------

// Entries of a program as Python gets them: one array, whose parts `interception/native/entries.py` names. It lasts until the next call in the thread.
const int64_t* entries_of(const Program& p, size_t first, size_t last);
// The first `count` entries, and what else a submission needs: the values by first appearance, which of the handles in `dead` are among
// them and which are not, and a hash of what calls there are, who feeds whom, what dies and which values from outside share a storage.
const int64_t* submission_of(const Program& p, size_t count, at::IntArrayRef dead, int64_t waiting);

// ---- calls (calls.cpp) -----------------------------------------------------------------------------------------------

struct Result {
  enum Kind : uint8_t { kNew, kView, kSame, kNone } kind = kNone;
  uint16_t of = 0;  // operand
  bool conj = false, neg = false;
  c10::ScalarType dtype = c10::ScalarType::Byte;
  c10::DeviceIndex device = 0;
  c10::SmallVector<int64_t, 5> sizes, strides;
  int64_t offset = 0;
  size_t nbytes = 0;
  LayoutPtr layout;  // all of the above; set by `share_layout`
};
void share_layout(Result& r);

// A call as Python inferred it: everything that follows from the op, metadata and scalars.
struct Call {
  int32_t id = 0;
  int32_t operands = 0, slots = 0;
  int32_t fresh = 0;         // results that are new values
  int64_t signature = 0;     // the number of its signature in Python
  int64_t kind = 0;          // the same for calls that differ in sizes and scalars only
  bool nothing = false;      // returns its operand once more; nothing is recorded
  bool list = false;         // its results are one list
  bool bumps = false;        // increments the versions of what it writes
  bool no_overlap = false;   // kernels refuse operands that overlap what is written
  bool empty = false;        // makes memory, and writes nothing
  int32_t like = -1;         // the call that Python inferred, from which a formula made this one for other sizes
  std::vector<Result> results;
  std::vector<uint16_t> writes;
  std::vector<int64_t> operand_dims;  // of each operand offset, sizes and strides
};

int32_t add_call(Call made);
const Call& call_of(int32_t id);

// kFolds: a result of known integers is known, too. kFoldsFloats: also one of floats. kFoldsSizes: the result follows from numbers and
// metadata. kFoldsMasks: Python handles the op if a mask is known.
enum OpFlag : int64_t { kHandled = 1, kFolds = 2, kAnyFloat = 4, kNeverKnown = 8, kFoldsFloats = 16, kFoldsSizes = 32, kFoldsMasks = 64 };

// What a word of a key is. The words after it belong to it.
enum Mark : uint64_t {
  kTensor = 1,
  kCpuNumber,
  kWrapped,
  kUndefined,
  kInt,
  kNumber,  // an integer to calculate with
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
  const Rule* rule;  // by which results follow from sizes; null if there is none
};
OpInfo& info_of(const c10::OperatorHandle& op);

struct NotOurs {};       // a tensor that claims to be on the device, and has no storage there
struct PythonDecides {}; // an argument that no key describes

// A call taken apart: its key, operands and scalars.
struct Scratch {
  c10::SmallVector<uint64_t, 128> words;
  c10::SmallVector<uint64_t, 8> float_at;  // places of floats in `words`
  c10::SmallVector<Operand, 16> operands;
  c10::SmallVector<int64_t, 32> slots;
  c10::SmallVector<uint8_t, 32> kinds;
  c10::SmallVector<at::Tensor, 1> kept;    // states of generators
  bool known = false;                      // the client knows the contents of an operand
};
void take_apart(OpInfo& info, const Stack& stack, Scratch& s);
// The same for an op of a tensor and sizes.
void take_apart(OpInfo& info, const at::Tensor& self, at::IntArrayRef sizes, Scratch& s);
const Call* find_call(const OpInfo& info, Scratch& s);
// A call that no key has yet, by the rule of its op; null if Python has to infer it.
const Call* find_by_rule(const OpInfo& info, const Scratch& s, at::ArrayRef<c10::IValue> args);
void remember_call(int32_t id, bool any_float);
bool is_moderate(uint64_t value, bool is_float);  // every floating dtype holds the number
void forget_calls(int64_t signature);
// The key of the call that Python is asked about.
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
// The call with these arguments, by the rule of its op, where `like` is of its kind; nothing if Python has to infer it.
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
// Sequence number of the autograd node that the thread is at: -1 outside of backward passes, -2 at a node that has none.
int64_t autograd_node(Program& p);
// Have Python send a program that has reached its limit.
void check_limit(Program& p);
at::Tensor make_result(const Result& r, c10::TensorImpl* base, c10::StorageImpl* into = nullptr);
at::Tensor twin_of(const Operand& o);
at::Tensor tensor_of(Value* v);
void register_kernels();
void register_cuda_factories();

// ---- known contents (known.cpp) --------------------------------------------------------------------------------------

// An op whose result may be known, before it is recorded.
struct Fold {
  std::shared_ptr<Contents> made;  // null: the result will not be known
  int depth = 0;
  bool floats = false;   // an operand has floats
  int64_t version = -1;  // of the storage that the op writes to
};
bool knows_mask(const Scratch& s);
Fold begin_fold(const OpInfo& info, const Scratch& s, const Stack& stack);
void end_fold(const Fold& fold, const Stack& stack);
void forget_known();  // the session has ended

// ---- generators (generator.cpp) --------------------------------------------------------------------------------------

const at::Generator& default_generator(c10::DeviceIndex index);
at::Generator new_generator(c10::DeviceIndex index);
// The value that holds its state; undefined for the state that the executor's session has.
at::Tensor state_of(const at::Generator& g);

// ---- sites (sites.cpp) -----------------------------------------------------------------------------------------------

int32_t user_site();
void set_own_folders(std::vector<std::string> folders);
std::vector<int64_t> sites_from(int64_t first);

}  // namespace djinn
