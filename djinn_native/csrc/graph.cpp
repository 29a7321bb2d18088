// Graphs: entries that were recorded once and are appended again for other inputs, as CUDA graphs are replayed.
#include "identity.h"
#include "remote.h"

#include <numeric>
#include <set>
#include <unordered_map>

namespace djinn {
namespace {

// A value that the graph creates: view number `view` of the graph's storage `own`, or a view of the storage of value `base`.
struct Made {
  int32_t own = -1, base = -1;
  int64_t view = 0;
};

// A tensor that the captured function returns: an input, or a value that the graph creates.
struct GraphOutput {
  size_t input = SIZE_MAX;
  size_t made = SIZE_MAX;
  Result result;
  int64_t views = 0;  // number of views of its storage
};

// Values have numbers: first inputs, then constants, then the values that the graph creates.
struct Graph {
  std::vector<int32_t> calls, values;  // the call of each entry; numbers of the entries' operands and new results
  std::vector<int64_t> slots;
  std::vector<uint8_t> kinds;
  std::vector<at::Tensor> constants;
  std::set<size_t> written;  // inputs that are written
  std::vector<size_t> own;   // bytes of each storage that the graph allocates
  std::vector<Made> made;
  std::vector<GraphOutput> outputs;
  size_t given = 0;  // number of inputs and constants
};

struct NotRepeatable {};

// Captures the last entries of a program. Throws NotRepeatable if they use any other value than inputs, constants and their own results,
// write into a constant, or return tensors that share memory.
struct GraphReader {
  Graph& g;
  std::unordered_map<Handle, int32_t> numbers;      // number of each value
  std::unordered_map<int64_t, int32_t> given, own;  // by storage: number of its first input or constant; its index in `Graph::own`
  std::vector<int64_t> views;                       // number of views of each allocated storage

  void add_given(Handle h) {
    const auto number = static_cast<int32_t>(g.given++);
    numbers.emplace(h, number);
    given.emplace(h >> 32, number);
  }
  void read(const Program& p, size_t first, size_t inputs) {
    size_t handle = 0, slot = 0;
    for (size_t i = 0; i < first; ++i) {
      const auto& call = call_of(p.calls[i]);
      handle += static_cast<size_t>(call.operands + call.fresh);
      slot += static_cast<size_t>(call.slots);
    }
    g.calls.assign(p.calls.data() + first, p.calls.data() + p.calls.size());
    g.slots.assign(p.slots.data() + slot, p.slots.data() + p.slots.size());
    g.kinds.assign(p.kinds.data() + slot, p.kinds.data() + p.kinds.size());
    for (auto id : g.calls) {
      const auto& call = call_of(id);
      const auto* operands = p.handles.data() + handle;
      for (int32_t n = 0; n < call.operands; ++n) {
        const auto found = numbers.find(operands[n]);
        if (found == numbers.end()) throw NotRepeatable();
        g.values.push_back(found->second);
      }
      for (auto w : call.writes) note_written(operands[w] >> 32, inputs);
      handle += static_cast<size_t>(call.operands);
      for (const auto& r : call.results) {
        if (r.kind == Result::kNew || r.kind == Result::kView) add_made(r, p.handles[handle++]);
      }
    }
  }
  void note_written(int64_t storage, size_t inputs) {
    const auto found = given.find(storage);
    if (found == given.end()) return;
    const auto number = static_cast<size_t>(found->second);
    if (number >= inputs) throw NotRepeatable();
    g.written.insert(number);
  }
  void add_made(const Result& r, Handle h) {
    const int64_t storage = h >> 32;
    Made made;
    if (const auto found = given.find(storage); found != given.end()) {
      if (r.kind == Result::kNew) throw NotRepeatable();
      made.base = found->second;
    } else {
      if (r.kind == Result::kNew && own.emplace(storage, static_cast<int32_t>(g.own.size())).second) {
        g.own.push_back(r.nbytes);
        views.push_back(0);
      }
      const auto mine = own.find(storage);
      if (mine == own.end()) throw NotRepeatable();
      made.own = mine->second;
      made.view = ++views[static_cast<size_t>(made.own)];
    }
    const auto number = static_cast<int32_t>(g.given + g.made.size());
    numbers[h] = number;
    g.values.push_back(number);
    g.made.push_back(made);
  }
  void add_output(const at::Tensor& t, const std::vector<at::Tensor>& inputs) {
    const auto same = std::ranges::find_if(inputs, [&](const at::Tensor& i) { return i.is_same(t); });
    if (same != inputs.end()) {
      g.outputs.push_back({static_cast<size_t>(same - inputs.begin())});
      return;
    }
    const auto found = numbers.find(operand_of(t).value->handle);
    if (found == numbers.end() || static_cast<size_t>(found->second) < g.given) throw NotRepeatable();
    const auto made = static_cast<size_t>(found->second) - g.given;
    const auto storage = g.made[made].own;
    auto shares = [&](const GraphOutput& o) { return o.made != SIZE_MAX && g.made[o.made].own == storage; };
    if (storage < 0 || std::ranges::any_of(g.outputs, shares)) throw NotRepeatable();  // a replay could not make outputs that share memory
    const auto place = static_cast<size_t>(storage);
    g.outputs.push_back({SIZE_MAX, made, result_of(t.unsafeGetTensorImpl(), g.own[place]), views[place]});
  }
  static Result result_of(const c10::TensorImpl* t, size_t nbytes) {
    Result r;
    r.kind = Result::kNew;
    r.dtype = c10::typeMetaToScalarType(t->dtype());
    r.device = t->device().index();
    r.sizes.append(t->sizes().begin(), t->sizes().end());
    r.strides.append(t->strides().begin(), t->strides().end());
    r.offset = t->storage_offset();
    r.conj = t->is_conj();
    r.neg = t->is_neg();
    r.nbytes = nbytes;
    share_layout(r);
    return r;
  }
};

// Return the graph of the entries from `first` on; 0 if they cannot be replayed. `uploaded`: handles of values that the function
// uploaded. `constants`: tensors with the same contents, which the graph keeps.
int64_t record_graph(int64_t first, const std::vector<at::Tensor>& inputs, at::IntArrayRef uploaded,
                     const std::vector<at::Tensor>& constants, const std::vector<at::Tensor>& outputs) {
  auto g = std::make_unique<Graph>();
  g->constants = constants;
  GraphReader reader{*g, {}, {}, {}, {}};
  for (const auto& t : inputs) reader.add_given(operand_of(t).value->handle);
  for (auto h : uploaded) reader.add_given(h);
  auto& p = current_program();
  try {
    {
      std::lock_guard<SpinLock> guard(p.mutex);
      reader.read(p, static_cast<size_t>(first), inputs.size());
    }
    for (const auto& t : outputs) reader.add_output(t, inputs);
  } catch (const NotRepeatable&) {
    return 0;
  }
  return reinterpret_cast<int64_t>(g.release());
}

// Return a hash of the inputs' metadata and of which are equal or share memory. Empty if one is not a tensor of the device.
std::vector<int64_t> graph_key(const std::vector<at::Tensor>& inputs) {
  static thread_local Numbers storages, handles;
  storages.begin(inputs.size());
  handles.begin(inputs.size());
  Hash hash;
  for (const auto& t : inputs) {
    auto* impl = t.unsafeGetTensorImpl();
    if (!has_value(t) || impl->key_set().has(c10::DispatchKey::Python)) return {};
    const auto handle = operand_of(t).value->handle;
    const auto sizes = impl->sizes(), strides = impl->strides();
    hash.add(static_cast<int64_t>(c10::typeMetaToScalarType(impl->dtype())) << 16 | int64_t{impl->device().index()} << 8 |
             impl->is_inference() << 2 | impl->is_conj() << 1 | impl->is_neg());
    hash.add(storages.add(handle >> 32).first);
    hash.add(handles.add(handle).first);
    hash.add(impl->storage_offset());
    hash.add(static_cast<int64_t>(sizes.size()));
    for (auto n : sizes) hash.add(n);
    for (auto n : strides) hash.add(n);
  }
  return {static_cast<int64_t>(hash.low), static_cast<int64_t>(hash.high)};
}

struct Appended {
  at::IntArrayRef handles;
  std::vector<StorageRecord*> read, written, made;
};

void append_entries(Program& p, at::ArrayRef<int32_t> calls, const Appended& of, at::IntArrayRef slots, at::ArrayRef<uint8_t> kinds) {
  const int32_t site = user_site();  // takes the GIL, so it precedes all locks
  const int64_t node = autograd_node(p);
  auto before_these = [&]() -> Program* {
    for (auto* r : of.read) {
      if (auto* first = before_read(p, r)) return first;
    }
    for (auto* r : of.written) {
      if (auto* first = before_write(p, r)) return first;
    }
    return nullptr;
  };
  for (;;) {
    Program* first;
    {
      std::lock_guard<SpinLock> sharing(sharing_mutex());
      first = before_these();
      if (!first) {
        std::lock_guard<SpinLock> guard(p.mutex);
        for (auto* r : of.read) note_read(p, r);
        for (auto* r : of.written) note_write(p, r);
        for (auto* r : of.made) note_made(p, r);
        p.calls.insert(p.calls.end(), calls.begin(), calls.end());
        p.sites.resize(p.calls.size(), site);
        p.nodes.resize(p.calls.size(), node);
        p.handles.insert(p.handles.end(), of.handles.begin(), of.handles.end());
        p.slots.insert(p.slots.end(), slots.begin(), slots.end());
        p.kinds.insert(p.kinds.end(), kinds.begin(), kinds.end());
        p.counters[kEntries].store(static_cast<int64_t>(p.calls.size()), std::memory_order_release);
        return;
      }
    }
    cut(first);
  }
}

// Append the entries of a graph for other inputs with the same key. Return what the captured function would return.
std::vector<at::Tensor> replay_graph(int64_t graph, const std::vector<at::Tensor>& inputs) {
  const auto& g = *reinterpret_cast<const Graph*>(graph);
  note_settings();
  auto& p = current_program();
  Appended appended;
  std::vector<Handle> values;
  for (const auto* tensors : {&inputs, &g.constants}) {
    for (const auto& t : *tensors) {
      const auto operand = operand_of(t);
      values.push_back(operand.value->handle);
      appended.read.push_back(operand.record());
    }
  }
  for (auto i : g.written) {
    auto* impl = inputs[i].unsafeGetTensorImpl();
    if (!impl->is_inference()) impl->bump_version();
    appended.written.push_back(appended.read[i]);
  }
  std::vector<int64_t> storages(g.own.size());
  std::iota(storages.begin(), storages.end(), reserve_storages(static_cast<int64_t>(storages.size())));
  std::vector<at::Tensor> outputs;
  std::vector<bool> returned(g.made.size());
  for (const auto& o : g.outputs) {
    if (o.made == SIZE_MAX) {
      outputs.push_back(inputs[o.input]);
      continue;
    }
    const auto& made = g.made[o.made];
    const auto storage = new_storage(o.result.nbytes, o.result.device);
    auto* record = record_of(storage.unsafeGetStorageImpl());
    record->views = made.view - 1;
    outputs.push_back(make_result(o.result, nullptr, storage.unsafeGetStorageImpl()));
    record->views = o.views;
    storages[static_cast<size_t>(made.own)] = record->number;
    returned[o.made] = true;
    appended.made.push_back(record);
  }
  std::vector<Handle> dead;
  for (size_t i = 0; i < g.made.size(); ++i) {
    const auto& made = g.made[i];
    values.push_back(made.own < 0 ? next_handle(appended.read[static_cast<size_t>(made.base)])
                                  : first_handle(storages[static_cast<size_t>(made.own)]) + made.view);
    if (!returned[i]) dead.push_back(values.back());
  }
  std::vector<Handle> handles;
  handles.reserve(g.values.size());
  for (auto number : g.values) handles.push_back(values[static_cast<size_t>(number)]);
  appended.handles = handles;
  append_entries(p, g.calls, appended, g.slots, g.kinds);
  put_back(dead, &p);
  check_limit(p);
  return outputs;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(djinn, m) {
  m.def("graph_key(Tensor[] inputs) -> int[]", &graph_key);
  m.def("record_graph(int first, Tensor[] inputs, int[] uploaded, Tensor[] constants, Tensor[] outputs) -> int", &record_graph);
  m.def("replay_graph(int graph, Tensor[] inputs) -> Tensor[]", &replay_graph);
  m.def("drop_graph(int graph) -> ()", [](int64_t graph) { delete reinterpret_cast<Graph*>(graph); });
  m.def("append_entries(int[] calls, int[] handles, int[] slots, int[] kinds, int[] dead) -> ()",
        [](at::IntArrayRef calls, at::IntArrayRef handles, at::IntArrayRef slots, at::IntArrayRef kinds, at::IntArrayRef dead) {
          const std::vector<int32_t> ids(calls.begin(), calls.end());
          const std::vector<uint8_t> small(kinds.begin(), kinds.end());
          append_entries(current_program(), ids, {handles, {}, {}, {}}, slots, small);
          put_back(dead, &current_program());
        });
}

}  // namespace djinn
