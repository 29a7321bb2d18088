// The program that each thread records, and the order between programs of several threads.
#include "remote.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>

#include <cstring>
#include <deque>

namespace djinn {

SpinLock& sharing_mutex() {
  static auto* one = new SpinLock();
  return *one;
}

namespace {

std::vector<Program*>& programs() {  // by number; never destroyed, because storages point to them
  static auto* all = new std::vector<Program*>();
  return *all;
}
std::vector<Program*>& released() {
  static auto* all = new std::vector<Program*>();
  return *all;
}

struct ThreadProgram {
  Program* program = nullptr;  // that the thread records; null until Python has a recorder for it
  Program* own = nullptr;
  ~ThreadProgram() {
    if (own) let_go(own);
  }
};
thread_local ThreadProgram thread_program;

}  // namespace

Program::Program(int64_t n) : number(n) {
  for (auto& counter : counters) counter.store(0);
  counters[kLimit].store(int64_t{1} << 40);
  counters[kNode].store(kUntold);
}

// Python sends what another thread's program has recorded so far.
void cut(Program* other) {
  Stack stack{other->number};
  call_python("djinn::cut", &stack);
}

Program* new_program(int holders) {
  std::lock_guard<SpinLock> guard(sharing_mutex());
  Program* made;
  if (released().empty()) {
    made = new Program(static_cast<int64_t>(programs().size()));
    programs().push_back(made);
  } else {
    made = released().back();
    released().pop_back();
  }
  made->holders = holders;
  return made;
}

static void restart(Program* p) {
  std::lock_guard<SpinLock> guard(p->mutex);
  p->calls.clear();
  p->sites.clear();
  p->nodes.clear();
  p->handles.clear();
  p->slots.clear();
  p->kinds.clear();
  p->counters[kEntries].store(0);
  p->counters[kEpoch].fetch_add(1);
  p->counters[kWatched].store(0);
  p->counters[kDifferentiating].store(0);
  p->counters[kLimit].store(int64_t{1} << 40);
  p->counters[kNode].store(kUntold);
}

void let_go(Program* p) {
  if (p->holders.fetch_sub(1) > 1) return;
  restart(p);
  std::lock_guard<SpinLock> guard(sharing_mutex());
  released().push_back(p);
}

std::vector<Program*> all_programs() { return programs(); }

void forget_programs() {
  for (auto* p : programs()) restart(p);
  thread_program.program = nullptr;  // Python makes a recorder again
  drop_freed();
}

Program* program_of(int64_t number) {
  std::lock_guard<SpinLock> guard(sharing_mutex());
  TORCH_CHECK(number >= 0 && static_cast<size_t>(number) < programs().size(), "no program ", number);
  return programs()[static_cast<size_t>(number)];
}

static Program& own_program() {
  auto& own = thread_program.own;
  if (!own) own = new_program(2);
  return *own;
}

// Python makes the recorder. If it raises, the next op asks again: without a recorder, nothing could send the program.
static void begin_program() {
  own_program();
  Stack stack;
  call_python("djinn::begin_program", &stack);
  thread_program.program = thread_program.own;
}

Program& current_program() {
  if (C10_UNLIKELY(!thread_program.program)) begin_program();
  return *thread_program.program;
}

Program* switch_program(Program* to) {
  auto* before = &current_program();
  thread_program.program = to;
  return before;
}

Program* before_write(const Program& mine, const StorageRecord* s) {
  if (s->reader.program != &mine && is_live(s->reader)) return s->reader.program;
  for (const auto& other : s->readers) {
    if (other.program != &mine && is_live(other)) return other.program;
  }
  return before_read(mine, s);
}

void note_read(Program& mine, StorageRecord* s) {
  if (C10_UNLIKELY(s->reader.program != &mine && is_live(s->reader))) {
    auto& others = s->readers;
    std::erase_if(others, [&](const Use& u) { return u.program == &mine || !is_live(u); });
    others.push_back(s->reader);
  }
  s->reader = {&mine, mine.epoch()};
}

void note_write(Program& mine, StorageRecord* s) {
  s->version.fetch_add(1, std::memory_order_relaxed);
  s->known.store(false, std::memory_order_relaxed);
  if (C10_UNLIKELY(!s->readers.empty())) s->readers.clear();  // they were sent, or are this program
  s->writer = {&mine, mine.epoch()};
}

void for_unsent_calls(const std::function<void(int32_t)>& visit) {
  std::vector<Program*> all;
  {
    std::lock_guard<SpinLock> guard(sharing_mutex());
    all = programs();
  }
  for (auto* p : all) {
    std::lock_guard<SpinLock> guard(p->mutex);
    for (auto id : p->calls) visit(id);
  }
}

void begin_read(Program& mine, StorageRecord* s) {
  for (;;) {
    Program* first;
    {
      std::lock_guard<SpinLock> guard(sharing_mutex());
      first = before_read(mine, s);
      if (!first) return note_read(mine, s);
    }
    cut(first);
  }
}

void begin_write(Program& mine, StorageRecord* s) {
  for (;;) {
    Program* first;
    {
      std::lock_guard<SpinLock> guard(sharing_mutex());
      first = before_write(mine, s);
      if (!first) return note_write(mine, s);
    }
    cut(first);
  }
}

// ---- what Python reads -----------------------------------------------------------------------------------------------

namespace {

template <class T> at::Tensor array(const T* first, size_t count, c10::ScalarType type) {
  auto t = at::detail::empty_cpu({static_cast<int64_t>(count)}, type);
  if (count) std::memcpy(t.mutable_data_ptr(), first, count * sizeof(T));
  return t;
}

using Columns = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// calls, handles, slots, kinds of slots, sites and nodes (none if all are outside of backward passes) of the entries [first, last) of a program.
Columns columns(Program& p, size_t first, size_t last) {
  size_t handle = 0, slot = 0, handles = 0, slots = 0;
  for (size_t i = 0; i < last; ++i) {
    const auto& call = call_of(p.calls[i]);
    auto count = static_cast<size_t>(call.operands);
    for (const auto& r : call.results) count += r.kind == Result::kNew || r.kind == Result::kView;
    if (i < first) {
      handle += count;
      slot += static_cast<size_t>(call.slots);
    } else {
      handles += count;
      slots += static_cast<size_t>(call.slots);
    }
  }
  const auto* nodes = p.nodes.data();
  const bool in_backward = std::any_of(nodes + first, nodes + last, [](int64_t node) { return node != -1; });
  return {array(p.calls.data() + first, last - first, at::kInt), array(p.handles.data() + handle, handles, at::kLong),
          array(p.slots.data() + slot, slots, at::kLong),        array(p.kinds.data() + slot, slots, at::kByte),
          array(p.sites.data() + first, last - first, at::kInt), array(p.nodes.data() + first, in_backward ? last - first : 0, at::kLong)};
}

template <class T> void drop_first(std::vector<T>& all, size_t count) {
  if (count == all.size()) all.clear();
  else all.erase(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count));
}

// Take the first `count` entries of a program, or all of them and begin a new epoch (-1).
Columns take(int64_t number, int64_t count) {
  auto& p = *program_of(number);
  std::lock_guard<SpinLock> guard(p.mutex);
  const bool all = count < 0;
  const size_t taken = all ? p.calls.size() : std::min(static_cast<size_t>(count), p.calls.size());
  auto made = columns(p, 0, taken);
  counters.ops.fetch_add(static_cast<int64_t>(taken), std::memory_order_relaxed);
  drop_first(p.calls, taken);
  drop_first(p.sites, taken);
  drop_first(p.nodes, taken);
  drop_first(p.handles, static_cast<size_t>(std::get<1>(made).numel()));
  drop_first(p.slots, static_cast<size_t>(std::get<2>(made).numel()));
  drop_first(p.kinds, static_cast<size_t>(std::get<2>(made).numel()));
  p.counters[kEntries].store(static_cast<int64_t>(p.calls.size()), std::memory_order_release);
  if (all) p.counters[kEpoch].fetch_add(1, std::memory_order_acq_rel);
  return made;
}

// The entries from `first` on, which stay in the program.
Columns look(int64_t number, int64_t first) {
  auto& p = *program_of(number);
  std::lock_guard<SpinLock> guard(p.mutex);
  return columns(p, std::min(static_cast<size_t>(first), p.calls.size()), p.calls.size());
}

std::vector<int64_t> look_calls(int64_t number) {
  auto& p = *program_of(number);
  std::lock_guard<SpinLock> guard(p.mutex);
  return {p.calls.begin(), p.calls.end()};
}

// Take back the last entry where it made the memory of `t` and nothing else; whether it did.
bool take_back(const at::Tensor& t) {
  auto operand = operand_of(t);
  auto& p = current_program();
  std::lock_guard<SpinLock> sharing(sharing_mutex());
  std::lock_guard<SpinLock> guard(p.mutex);
  if (p.calls.empty() || p.handles.empty()) return false;
  const auto& call = call_of(p.calls.back());
  if (!call.empty || call.operands || p.handles.back() != operand.value->handle) return false;
  p.calls.pop_back();
  p.sites.pop_back();
  p.nodes.pop_back();
  p.handles.pop_back();
  p.slots.resize(p.slots.size() - static_cast<size_t>(call.slots));
  p.kinds.resize(p.slots.size());
  p.counters[kEntries].store(static_cast<int64_t>(p.calls.size()), std::memory_order_release);
  operand.record()->writer = {};
  return true;
}

// Counters of a program, in its own memory: Python reads and writes them without a call.
at::Tensor counters_of(int64_t number) {
  static_assert(sizeof(std::atomic<int64_t>) == sizeof(int64_t), "counters are read as plain integers");
  return at::from_blob(program_of(number)->counters, {kCounters}, at::TensorOptions().dtype(at::kLong));
}

// Append entries that were made outside of the dispatcher, with handles that exist.
void append_entries(const at::Tensor& calls, const at::Tensor& handles, const at::Tensor& slots, const at::Tensor& kinds, int64_t site) {
  auto& p = current_program();
  std::lock_guard<SpinLock> guard(p.mutex);
  auto add = [](auto& to, const at::Tensor& from) {
    using T = std::decay_t<decltype(to)>::value_type;
    const auto* data = static_cast<const T*>(from.const_data_ptr());
    to.insert(to.end(), data, data + from.numel());
  };
  add(p.calls, calls);
  add(p.handles, handles);
  add(p.slots, slots);
  add(p.kinds, kinds);
  p.sites.resize(p.calls.size(), static_cast<int32_t>(site));
  p.nodes.resize(p.calls.size(), -1);
  p.counters[kEntries].store(static_cast<int64_t>(p.calls.size()), std::memory_order_release);
}

std::tuple<std::vector<int64_t>, int64_t> freed(int64_t number) {
  int64_t waiting = 0;
  auto taken = take_freed(number < 0 ? nullptr : program_of(number), &waiting);
  return {std::move(taken), waiting};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(djinn, m) {
  m.def("current_program() -> int", [] { return current_program().number; });
  m.def("thread_program() -> int", [] { return own_program().number; });
  m.def("new_program() -> int", [] { return new_program(1)->number; });
  m.def("switch_program(int program) -> int", [](int64_t n) { return switch_program(program_of(n))->number; });
  m.def("let_go(int program) -> ()", [](int64_t n) { let_go(program_of(n)); });
  m.def("forget_programs() -> ()", &forget_programs);
  m.def("any_unsent_values() -> bool", [] {
    std::lock_guard<SpinLock> guard(sharing_mutex());
    return std::any_of(programs().begin(), programs().end(), [](Program* p) {
      std::lock_guard<SpinLock> own(p->mutex);
      return !p->handles.empty();
    });
  });
  m.def("counters(int program) -> Tensor", &counters_of);
  m.def("take(int program, int count) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", &take);
  m.def("look(int program, int first) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", &look);
  m.def("look_calls(int program) -> int[]", &look_calls);
  m.def("take_back(Tensor t) -> bool", &take_back);
  m.def("append_entries(Tensor calls, Tensor handles, Tensor slots, Tensor kinds, int site) -> ()", &append_entries);
  m.def("freed(int program) -> (int[], int)", &freed);
  m.def("look_freed() -> int[]", &look_freed);
  m.def("live_values() -> int[]", &live_values);
  m.def("drop_freed() -> ()", &drop_freed);
  m.def("set_forked(bool on) -> ()", [](bool on) { forked = on; });
  m.def("put_back(int[] handles, int program) -> ()", [](at::IntArrayRef handles, int64_t n) { put_back(handles, program_of(n)); });
  m.def("begin_program() -> ()");  // these are implemented in Python
  m.def("cut(int program) -> ()");
  m.def("at_limit() -> ()");
  m.def("at_node(int node) -> ()");
  m.def("resize_storage(Storage storage, int nbytes) -> ()");
}

}  // namespace djinn
