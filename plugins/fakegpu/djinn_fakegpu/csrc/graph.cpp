// Graphs: `torch.accelerator.Graph` captures ops with the addresses of their operands, and replays them.
#include "fake.h"

#include <ATen/core/GraphImplInterface.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstring>
#include <fstream>
#include <thread>

namespace fakegpu {

enum class HostCopyKind : uint8_t { kNone, kUpload, kDownload };

// A captured op. Arguments and results are CPU views that own no memory, because a graph has only addresses.
struct Node {
  c10::OperatorHandle op;
  Stack arguments;
  std::vector<at::Tensor> results;  // undefined if the result is a written argument
  c10::DeviceIndex random;          // device from whose generator the op draws; -1 for none
  HostCopyKind copy = HostCopyKind::kNone;  // if not kNone: copies between argument 1 (source) and argument 0, one of them page-locked
};

// A block that was allocated before the capture. If its address was reused, the serial number has changed.
struct Needed {
  uintptr_t address;
  int64_t serial;
  bool written;
};

// Memory of graphs that are replayed one after another. It is given back when all of them are reset.
struct GraphPool {
  int graphs = 0;
  std::set<Block*> blocks;
  std::set<std::pair<size_t, Block*>> unused;  // blocks that no tensor uses, by size
};

struct Graph {
  Lane* lane = nullptr;
  std::thread::id only;  // thread whose calls can invalidate the capture; default value: all threads
  at::MempoolId_t id{0, 0};
  GraphPool* pool = nullptr;
  std::vector<Node> nodes;
  std::vector<Needed> needed;
  std::set<Block*> memory;  // blocks allocated during the capture
  std::string spoiled;
};

namespace {

std::map<at::MempoolId_t, GraphPool>& pools() {
  static auto* all = new std::map<at::MempoolId_t, GraphPool>();
  return *all;
}

void enter_pool(Graph* graph, at::MempoolId_t id) {
  static at::CaptureId_t last = 0;
  graph->id = id == at::MempoolId_t{0, 0} ? at::MempoolId_t{0, ++last} : id;
  graph->pool = &pools()[graph->id];
  ++graph->pool->graphs;
}

void leave_pool(Graph* graph) {
  if (is_in_bad_fork() || !graph->pool || --graph->pool->graphs) return;
  for (auto* block : graph->pool->blocks) end_of_pool(block);
  pools().erase(graph->id);
}

void collect(const c10::IValue& value, std::vector<at::Tensor>* into) {
  if (value.isTensor()) into->push_back(value.toTensor());
  else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector()) into->push_back(t);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector()) into->push_back(t.value_or(at::Tensor()));
  }
}

Graph*& capturing() {
  static Graph* one = nullptr;
  return one;
}

struct FakeGraph final : at::GraphImplInterface {
  explicit FakeGraph(const at::GraphImplArgs&) {}
  ~FakeGraph() override { reset(); }

  void capture_begin(at::MempoolId_t pool, at::GraphCaptureMode mode) override {
    Guard guard(mutex());
    check_alive();
    auto& lane = current_lane();
    TORCH_CHECK(!capturing(), "fakegpu: another graph is being captured");
    TORCH_CHECK(lane.index % kStreams, "fakegpu: a graph must be captured on a stream that is not the default stream");
    TORCH_CHECK(!graph.pool, "fakegpu: this graph was captured: reset it first");
    enter_pool(&graph, pool);
    graph.lane = &lane;
    if (mode == at::GraphCaptureMode::ThreadLocal) graph.only = std::this_thread::get_id();
    lane.capture = capturing() = &graph;
    count("captures");
  }
  void capture_end() override {
    std::string reason;
    {
      Guard guard(mutex());
      TORCH_CHECK(capturing() == &graph, "fakegpu: this graph is not being captured");
      graph.lane->capture = capturing() = nullptr;
      reason = graph.spoiled;
    }
    if (reason.empty()) return;
    reset();
    TORCH_CHECK(false, "fakegpu: the capture failed: ", reason);
  }
  void instantiate() override {}
  void replay() override;
  void reset() override {
    Graph old;  // freed after the lock is released
    Guard guard(mutex());
    if (capturing() == &graph) graph.lane->capture = capturing() = nullptr;
    leave_pool(&graph);
    std::swap(graph, old);
  }
  at::MempoolId_t pool() const override { return graph.id; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string& path) override {
    std::ofstream file(path);
    for (const auto& node : graph.nodes) file << node.op.operator_name() << '\n';
  }
  Graph graph;
};
using at::GraphImplRegistry, at::RegistererGraphImplRegistry;
C10_REGISTER_CLASS(GraphImplRegistry, FAKEGPU, FakeGraph)  // the device's name must be in capitals here

void check_addresses(const Graph& graph) {
  for (const auto& needed : graph.needed) {
    auto* block = block_of(reinterpret_cast<void*>(needed.address), false);
    if (block && block->serial == needed.serial && !block->freed) continue;
    TORCH_CHECK(false, "fakegpu: a graph is replayed that uses 0x", std::hex, needed.address, std::dec,
                ", whose tensor was freed since the capture: copy new data into the tensors that were captured");
  }
}

void run_node(const Node& node) {
  auto stack = node.arguments;
  {
    std::optional<DeviceRandom> random;
    if (node.random >= 0) random.emplace(node.random);
    node.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  }
  std::vector<at::Tensor> made;
  for (const auto& value : stack) collect(value, &made);
  for (size_t i = 0; i < made.size() && i < node.results.size(); ++i) {
    if (node.results[i].defined()) node.results[i].copy_(made[i]);
  }
}

void run_copy(const Node& node, double done) {
  Guard guard(mutex());
  const auto &to = node.arguments[0].toTensor(), &from = node.arguments[1].toTensor();
  auto *into = static_cast<char*>(to.data_ptr()), *data = static_cast<char*>(from.data_ptr());
  if (node.copy == HostCopyKind::kUpload) {
    host_copies_arrive(data, from.nbytes());
    std::memcpy(into, data, from.nbytes());
    host_lends(data, from.nbytes(), done);
  } else {
    host_receives(into, {data, data + from.nbytes()}, done);
  }
  count_copy(node.copy == HostCopyKind::kUpload ? "host_to_device" : "device_to_host", from.nbytes());
}

double seconds_of(const Node& node) {
  if (node.copy != HostCopyKind::kNone) return static_cast<double>(node.arguments[0].toTensor().nbytes()) / hardware().link;
  double bytes = 0;
  std::vector<at::Tensor> all(node.results);
  for (const auto& value : node.arguments) collect(value, &all);
  for (const auto& t : all) bytes += t.defined() ? static_cast<double>(t.nbytes()) : 0;
  return bytes / hardware().bandwidth;
}

void FakeGraph::replay() {
  auto& lane = current_lane();
  TORCH_CHECK(!graph.nodes.empty() || graph.lane, "fakegpu: nothing was captured");
  Launch launch("a graph", lane);
  {
    Guard guard(mutex());
    check_addresses(graph);
    for (const auto& needed : graph.needed) {
      auto* block = block_of(reinterpret_cast<void*>(needed.address));
      launch.add(block, 0, block->requested, needed.written);
    }
    for (auto* block : graph.memory) launch.add(block, 0, block->requested, true);
  }
  launch.check();
  at::AutoDispatchBelowADInplaceOrView below;
  double seconds = 0;
  // launches in a graph have less overhead
  for (const auto& node : graph.nodes) seconds += std::max(seconds_of(node), hardware().launch / 2);
  const auto done = launch.finish(seconds);
  for (const auto& node : graph.nodes) {
    if (node.copy == HostCopyKind::kNone) run_node(node);
    else run_copy(node, done);
  }
  count("graph_launches");
  count("ops_in_graphs", static_cast<int64_t>(graph.nodes.size()));
}

void need(Graph* graph, const at::Tensor& t, bool written) {
  if (!t.defined() || !t.numel()) return;
  Guard guard(mutex());
  auto* block = block_of_kernel(raw_address(t.storage().unsafeGetStorageImpl()));
  if (!block || graph->memory.contains(block)) return;
  for (auto& known : graph->needed) {
    if (known.address != block->address) continue;
    known.written |= written;
    return;
  }
  graph->needed.push_back({block->address, block->serial, written});
}

}  // namespace

void check_no_capture(const char* cause) {
  Guard guard(mutex());
  if (C10_LIKELY(!capturing())) return;
  const auto only = capturing()->only;
  if (only != std::thread::id() && only != std::this_thread::get_id()) return;
  capturing()->spoiled = cause;
  TORCH_CHECK(false, "fakegpu: operation not permitted when a stream is capturing: ", cause);
}

void keep_in_graph(Graph* graph, Block* block) {
  block->pool = graph->pool;
  graph->pool->blocks.insert(block);
  graph->memory.insert(block);
}

Block* take_from_pool(Graph* graph, size_t size) {
  auto& unused = graph->pool->unused;
  const auto found = unused.lower_bound({size, nullptr});
  if (found == unused.end() || found->first > 2 * size) return nullptr;
  auto* block = found->second;
  unused.erase(found);
  graph->memory.insert(block);
  return block;
}

bool is_of_graph(const Graph* graph, Block* block) { return graph->memory.contains(block); }

void give_to_pool(Block* block) { block->pool->unused.emplace(block->size, block); }

void capture_op(Graph* graph, const c10::OperatorHandle& op, c10::DeviceIndex random, Stack arguments, const std::vector<bool>& written,
                const Stack& results, const std::vector<int>& same) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    std::vector<at::Tensor> used;
    collect(arguments[i], &used);
    for (const auto& t : used) need(graph, t, written[i]);
  }
  std::vector<at::Tensor> made;
  for (size_t i = 0; i < results.size(); ++i) {
    std::vector<at::Tensor> of_one;
    collect(results[i], &of_one);
    for (const auto& t : of_one) made.push_back(i < same.size() && same[i] >= 0 ? at::Tensor() : cpu_view(t));
  }
  graph->nodes.push_back({op, std::move(arguments), std::move(made), random});
}

void capture_copy(Graph* graph, const at::Tensor& to, const at::Tensor& from) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  capture_op(graph, op, -1, {to, from, false}, {true, false, false}, {to}, {0});
  graph->nodes.back().copy = is_pinned(to.const_data_ptr()) ? HostCopyKind::kDownload : HostCopyKind::kUpload;
}

}  // namespace fakegpu
