// The programs that threads record, and the order in which programs of several threads must be sent.
#include "remote.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <unordered_set>

namespace djinn {

SpinLock& sharing_mutex() {
  static auto* one = new SpinLock();
  return *one;
}

namespace {

std::vector<Program*>& programs() {  // by number; never destroyed, because storages refer to programs
  static auto* all = new std::vector<Program*>();
  return *all;
}
std::vector<Program*>& released() {
  static auto* all = new std::vector<Program*>();
  return *all;
}

struct ThreadProgram {
  Program* program = nullptr;  // program that the thread records; null until Python has made its recorder
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
}

// Have Python send what the program of another thread has recorded so far.
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
  p->times.clear();
  p->counters[kEntries].store(0);
  p->counters[kEpoch].fetch_add(1);
  p->counters[kDifferentiating].store(0);
  p->counters[kLimit].store(int64_t{1} << 40);
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
  thread_program.program = nullptr;  // so that Python makes a new recorder
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

// Have Python make the recorder. If Python raises, the next op tries again, because a program without a recorder could not be sent.
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

Program* before_write(const Program& mine, StorageRecord* s) {
  s = ordering_record(s);
  if (s->reader.program != &mine && is_live(s->reader)) return s->reader.program;
  for (const auto& other : s->readers) {
    if (other.program != &mine && is_live(other)) return other.program;
  }
  return before_read(mine, s);
}

void note_read(Program& mine, StorageRecord* s) {
  s = ordering_record(s);
  if (C10_UNLIKELY(s->reader.program != &mine && is_live(s->reader))) {
    auto& others = s->readers;
    std::erase_if(others, [&](const Use& u) { return u.program == &mine || !is_live(u); });
    others.push_back(s->reader);
  }
  s->reader = {&mine, mine.epoch()};
}

void note_write(Program& mine, StorageRecord* s) {
  s = ordering_record(s);
  s->version.fetch_add(1, std::memory_order_relaxed);
  s->known.store(false, std::memory_order_relaxed);
  if (C10_UNLIKELY(!s->readers.empty())) s->readers.clear();  // the other readers were sent, or belong to this program
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

template <class T> void drop_first(std::vector<T>& all, size_t count) {
  if (count == all.size()) all.clear();
  else all.erase(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count));
}

// Remove from `freed` the handles that an entry from `first` on refers to, and return them.
std::vector<int64_t> mentioned_later(const Program& p, size_t first, std::vector<int64_t>& freed) {
  if (first == p.calls.size() || freed.empty()) return {};
  size_t handle = 0;
  for (size_t i = 0; i < first; ++i) handle += static_cast<size_t>(call_of(p.calls[i]).operands + call_of(p.calls[i]).fresh);
  const std::unordered_set<int64_t> later(p.handles.begin() + static_cast<std::ptrdiff_t>(handle), p.handles.end());
  const auto kept = std::ranges::stable_partition(freed, [&](int64_t h) { return !later.contains(h); });
  std::vector<int64_t> found(kept.begin(), kept.end());
  freed.erase(kept.begin(), kept.end());
  return found;
}

// Take the first `count` entries of a program, with the handles that can be freed. -1: take all, and begin a new epoch.
const int64_t* take(int64_t number, int64_t count) {
  auto& p = *program_of(number);
  int64_t waiting = 0;
  auto freed = take_freed(&p, &waiting);
  std::vector<int64_t> later;
  const int64_t* made;
  {
    std::lock_guard<SpinLock> guard(p.mutex);
    const bool all = count < 0;
    const size_t taken = all ? p.calls.size() : std::min(static_cast<size_t>(count), p.calls.size());
    later = mentioned_later(p, taken, freed);
    made = submission_of(p, taken, freed, waiting);
    counters.ops.fetch_add(static_cast<int64_t>(taken), std::memory_order_relaxed);
    drop_first(p.calls, taken);
    drop_first(p.sites, taken);
    drop_first(p.nodes, taken);
    drop_first(p.handles, static_cast<size_t>(made[2]));
    drop_first(p.slots, static_cast<size_t>(made[3]));
    drop_first(p.kinds, static_cast<size_t>(made[3]));
    p.counters[kEntries].store(static_cast<int64_t>(p.calls.size()), std::memory_order_release);
    if (all) p.counters[kEpoch].fetch_add(1, std::memory_order_acq_rel);
  }
  if (!later.empty()) put_back(later, &p);
  return made;
}

// Return the entries from `first` on. They stay in the program.
const int64_t* look(int64_t number, int64_t first) {
  auto& p = *program_of(number);
  std::lock_guard<SpinLock> guard(p.mutex);
  return entries_of(p, std::min(static_cast<size_t>(first), p.calls.size()), p.calls.size());
}

// Remove the last entry if it only allocated the memory of `t`. Return true if so.
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

// Return the counters of a program as a tensor over their memory, so that Python reads and writes them without a call.
at::Tensor counters_of(int64_t number) {
  static_assert(sizeof(std::atomic<int64_t>) == sizeof(int64_t), "counters are read as plain integers");
  return at::from_blob(program_of(number)->counters, {kCounters}, at::TensorOptions().dtype(at::kLong));
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
  m.def("take_back(Tensor t) -> bool", &take_back);
  m.def("freed(int program) -> (int[], int)", &freed);
  m.def("look_freed() -> int[]", &look_freed);
  m.def("live_values() -> int[]", &live_values);
  m.def("drop_freed() -> ()", &drop_freed);
  m.def("set_forked(bool on) -> ()", [](bool on) { forked = on; });
  m.def("begin_program() -> ()");  // the ops from here on are implemented in Python
  m.def("cut(int program) -> ()");
  m.def("at_limit() -> ()");
  m.def("resize_storage(Storage storage, int nbytes) -> ()");
}

}  // namespace djinn

// Plain C functions, because a call through a PyTorch op takes three times as long. Null: there is no such program.
template <class F> static const int64_t* or_null(F entries) {
  try {
    return entries();
  } catch (const std::exception&) {
    return nullptr;
  }
}
DJINN_EXPORT const int64_t* djinn_take(int64_t program, int64_t count) {
  return or_null([&] { return djinn::take(program, count); });
}
DJINN_EXPORT const int64_t* djinn_look(int64_t program, int64_t first) {
  return or_null([&] { return djinn::look(program, first); });
}
