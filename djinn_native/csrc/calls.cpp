// Keys of calls, and the table of known calls: the results of an op for each combination of arguments that was inferred before.
#include "remote.h"

#include <ATen/core/List.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <shared_mutex>
#include <unordered_map>

namespace djinn {
namespace {

// ---- calls by number --------------------------------------------------------------------------------------------------

// Calls are stored in blocks that never move, so that a call is read without a lock.
constexpr size_t kBlock = 4096, kBlocks = 1 << 14;
constexpr int64_t kFewest = 16384;  // number of calls below which Python does not look for unused ones
struct Calls {
  std::mutex mutex;
  std::atomic<Call*> blocks[kBlocks] = {};
  int32_t count = 0;
  std::vector<int32_t> released;  // numbers to assign again
  std::atomic<int64_t> used{0}, most{kFewest};
  bool full() const { return used.load(std::memory_order_relaxed) > most.load(std::memory_order_relaxed); }
};
Calls& calls() {
  static auto* all = new Calls();
  return *all;
}

// Reads a call that Python encoded as a list of integers.
struct Reader {
  at::IntArrayRef numbers;
  size_t at = 0;
  int64_t next() {
    TORCH_CHECK(at < numbers.size(), "a description of a call is too short");
    return numbers[at++];
  }
};

Result read_result(Reader& in) {
  Result r;
  r.kind = static_cast<Result::Kind>(in.next());
  if (r.kind == Result::kNone) return r;
  r.of = static_cast<uint16_t>(in.next());
  if (r.kind == Result::kSame) return r;
  r.dtype = static_cast<c10::ScalarType>(in.next());
  r.device = static_cast<c10::DeviceIndex>(in.next());
  const int64_t bits = in.next();
  r.conj = bits & 1;
  r.neg = bits & 2;
  r.offset = in.next();
  r.nbytes = static_cast<size_t>(in.next());
  const int64_t dims = in.next();
  for (int64_t i = 0; i < dims; ++i) r.sizes.push_back(in.next());
  for (int64_t i = 0; i < dims; ++i) r.strides.push_back(in.next());
  share_layout(r);
  return r;
}

// ---- calls by key -----------------------------------------------------------------------------------------------------

struct Known {
  std::vector<uint64_t> words;
  int32_t call;
  uint64_t hash;
  Known* next = nullptr;
};
constexpr size_t kKeys = 65536;  // maximum number of keys; the older half is dropped above it
struct Memo {
  std::shared_mutex mutex;
  ska::flat_hash_map<uint64_t, Known*> by_hash;
  std::vector<Known*> by_age;  // oldest first
  std::atomic<uint64_t> generation{1};
};
Memo& memo() {
  static auto* one = new Memo();
  return *one;
}

inline uint64_t mix(uint64_t h, uint64_t v) {
  h ^= v * 0x9e3779b97f4a7c15ull;
  h = std::rotl(h, 29) * 0xbf58476d1ce4e5b9ull;
  return h ^ h >> 32;
}
template <class Words> uint64_t hash_words(const Words& words) {
  uint64_t h = words.size();
  for (auto w : words) h = mix(h, w);
  return h;
}
uint64_t hash_text(const std::string& s) {
  uint64_t h = s.size();
  for (unsigned char c : s) h = mix(h, c);
  return h;
}

// Per-thread cache of lookups by hash. Valid until any key is dropped or changed. Has a copy of the key, which others may drop.
struct Recent {
  uint64_t hash = 0, generation = 0;
  std::vector<uint64_t> words;
  int32_t call = -1;
};
constexpr size_t kRecent = 1024;
thread_local std::unique_ptr<Recent[]> recent_calls;

template <class Words> bool same_words(const std::vector<uint64_t>& a, const Words& b) {
  return a.size() == b.size() && !std::memcmp(a.data(), b.data(), a.size() * sizeof(uint64_t));
}

template <class Words> int32_t find(const Words& words) {
  const uint64_t hash = hash_words(words);
  auto& m = memo();
  if (C10_UNLIKELY(!recent_calls)) recent_calls = std::make_unique<Recent[]>(kRecent);
  auto& recent = recent_calls[hash % kRecent];
  if (recent.hash == hash && recent.generation == m.generation.load(std::memory_order_acquire) && same_words(recent.words, words))
    return recent.call;
  std::shared_lock<std::shared_mutex> guard(m.mutex);
  auto found = m.by_hash.find(hash);
  if (found == m.by_hash.end()) return -1;
  for (auto* k = found->second; k; k = k->next) {
    if (!same_words(k->words, words)) continue;
    recent.hash = hash;
    recent.generation = m.generation.load(std::memory_order_relaxed);
    recent.words.assign(words.begin(), words.end());
    recent.call = k->call;
    return k->call;
  }
  return -1;
}

void unlink(Memo& m, Known* gone) {
  auto found = m.by_hash.find(gone->hash);
  auto** link = &found->second;
  while (*link != gone) link = &(*link)->next;
  *link = gone->next;
  if (!found->second) m.by_hash.erase(found);
}

void drop(Memo& m, const std::vector<Known*>& gone) {
  for (auto* k : gone) {
    unlink(m, k);
    delete k;
  }
  m.generation.fetch_add(1, std::memory_order_release);
}

void insert(const std::vector<uint64_t>& words, int32_t call) {
  const uint64_t hash = hash_words(words);
  auto& m = memo();
  std::unique_lock<std::shared_mutex> guard(m.mutex);
  auto& first = m.by_hash[hash];
  for (auto* k = first; k; k = k->next) {
    if (k->words == words) {
      if (k->call != call) m.generation.fetch_add(1, std::memory_order_release);
      k->call = call;
      return;
    }
  }
  auto* made = new Known{words, call, hash, first};
  first = made;
  m.by_age.push_back(made);
  if (m.by_age.size() <= kKeys) return;
  const size_t half = m.by_age.size() / 2;
  drop(m, {m.by_age.begin(), m.by_age.begin() + static_cast<std::ptrdiff_t>(half)});
  m.by_age.erase(m.by_age.begin(), m.by_age.begin() + static_cast<std::ptrdiff_t>(half));
}

thread_local Pending* pending = nullptr;

// ---- keys -------------------------------------------------------------------------------------------------------------

inline uint64_t mark(Mark m, uint64_t v = 0) { return static_cast<uint64_t>(m) << 56 | (v & ((uint64_t{1} << 56) - 1)); }

inline int64_t bits_of(double d) {
  // All NaNs of one sign share a key. Otherwise, calls with NaN would never be found, because NaN differs from itself.
  if (std::isnan(d)) d = std::copysign(std::numeric_limits<double>::quiet_NaN(), d);
  int64_t i;
  std::memcpy(&i, &d, sizeof i);
  return i;
}

void add_slot(Scratch& s, int64_t value, SlotKind kind) {
  s.slots.push_back(value);
  s.kinds.push_back(kind);
}

void add_number(Scratch& s, const at::Tensor& t) {
  const bool wrapped = t.unsafeGetTensorImpl()->is_wrapped_number();
  const auto value = t.item();  // on the CPU, so no transfer
  if (wrapped && value.isBoolean()) {  // Python gets `True` or `False`, which programs store as constants, not as scalars
    s.words.push_back(mark(kWrapped, value.toBool() ? kTrue << 8 : kFalse << 8));
    return;
  }
  s.words.push_back(mark(wrapped ? kWrapped : kCpuNumber, static_cast<uint64_t>(t.scalar_type())));
  if (value.isComplex()) {
    const auto c = value.toComplexDouble();
    add_slot(s, bits_of(c.real()), kFloatSlot);
    add_slot(s, bits_of(c.imag()), kFloatSlot);
  } else if (value.isFloatingPoint()) {
    add_slot(s, bits_of(value.toDouble()), kFloatSlot);
  } else {
    add_slot(s, value.toLong(), kIntSlot);
  }
}

void add_tensor(Scratch& s, const at::Tensor& t) {
  if (!t.defined()) {
    s.words.push_back(mark(kUndefined));
    return;
  }
  auto* impl = t.unsafeGetTensorImpl();
  if (C10_LIKELY(is_remote(impl))) {
    const auto operand = operand_of(impl);
    const auto sizes = impl->sizes(), strides = impl->strides();
    const auto dtype = static_cast<uint64_t>(c10::typeMetaToScalarType(impl->dtype()));
    s.words.push_back(mark(kTensor, dtype | uint64_t(sizes.size()) << 8 | uint64_t(uint8_t(impl->device().index())) << 16 |
                                        uint64_t(impl->is_conj()) << 24 | uint64_t(impl->is_neg()) << 25));
    s.words.push_back(static_cast<uint64_t>(impl->storage_offset()));
    for (auto n : sizes) s.words.push_back(static_cast<uint64_t>(n));
    for (auto n : strides) s.words.push_back(static_cast<uint64_t>(n));
    s.operands.push_back(operand);
    s.known |= ordering_record(operand.record())->known;
    return;
  }
  if (t.dim() > 0 || !t.device().is_cpu() || impl->key_set().has(c10::DispatchKey::Python)) throw PythonDecides();
  add_number(s, t);
}

void add_value(Scratch& s, const c10::IValue& v, ArgKind kind) {
  if (v.isTensor()) return add_tensor(s, v.toTensor());
  if (v.isNone()) {
    s.words.push_back(mark(kNone));
  } else if (v.isInt()) {
    const int64_t i = v.toInt();
    s.words.push_back(mark(kind == ArgKind::kEnum ? kEnumValue : kind == ArgKind::kNumber ? kNumber : kInt));
    s.words.push_back(static_cast<uint64_t>(i));
    if (kind != ArgKind::kEnum) add_slot(s, i, kIntSlot);
  } else if (v.isBool()) {
    s.words.push_back(mark(v.toBool() ? kTrue : kFalse));
  } else if (v.isDouble()) {
    const int64_t bits = bits_of(v.toDouble());
    s.words.push_back(mark(kDouble));
    s.float_at.push_back(s.words.size());
    s.words.push_back(static_cast<uint64_t>(bits));
    add_slot(s, bits, kFloatSlot);
  } else if (v.isList()) {
    const auto items = v.toListRef();
    s.words.push_back(mark(kList, items.size()));
    for (const auto& item : items) add_value(s, item, kind);
  } else if (v.isComplexDouble()) {
    const auto c = v.toComplexDouble();
    s.words.push_back(mark(kComplex));
    for (const double part : {c.real(), c.imag()}) {
      s.words.push_back(static_cast<uint64_t>(bits_of(part)));
      add_slot(s, bits_of(part), kFloatSlot);
    }
  } else if (v.isDevice()) {
    const auto d = v.toDevice();
    const auto index = d.has_index() ? d.index() : d.type() == kRemote ? current_index() : c10::DeviceIndex{0};
    s.words.push_back(mark(kDevice, uint64_t(d.type()) << 8 | uint64_t(uint8_t(index))));
  } else if (v.isString()) {
    s.words.push_back(mark(kString, hash_text(v.toStringRef())));
    s.words.push_back(hash_text(v.toStringRef()));
  } else if (v.isGenerator()) {
    const auto state = state_of(v.toGenerator());
    s.words.push_back(mark(kGenerator, state.defined()));
    if (!state.defined()) return;
    s.kept.push_back(state);
    s.operands.push_back(operand_of(state));
  } else {
    throw PythonDecides();
  }
}

// True if the argument has its default value. The dispatcher omits such arguments when it calls Python.
bool is_default(const c10::Argument& argument, const c10::IValue& v) {
  const auto& usual = argument.default_value();
  if (!usual.has_value()) return false;
  if (usual->isNone() || v.isNone()) return usual->isNone() && v.isNone();
  if (usual->isInt() && v.isInt()) return usual->toInt() == v.toInt();
  if (usual->isBool() && v.isBool()) return usual->toBool() == v.toBool();
  if (usual->isDouble() && v.isDouble()) return usual->toDouble() == v.toDouble();
  if (v.isTensor() || usual->isTensor()) return false;
  if (usual->isList() && v.isList()) {
    if (v.isTensorList() || v.isOptionalTensorList()) return false;
    const auto a = usual->toListRef(), b = v.toListRef();
    if (a.size() != b.size()) return false;
    for (size_t i = 0; i < a.size(); ++i) {
      if (a[i].isInt() != b[i].isInt() || !(a[i] == b[i])) return false;
    }
    return true;
  }
  return usual->tagKind() == v.tagKind() && *usual == v;
}

}  // namespace

static int32_t read_call(at::IntArrayRef spec) {
  Reader in{spec};
  Call made;
  made.operands = static_cast<int32_t>(in.next());
  made.slots = static_cast<int32_t>(in.next());
  made.signature = in.next();
  made.kind = in.next();
  const int64_t flags = in.next();
  made.nothing = flags & 1;
  made.list = flags & 2;
  made.bumps = flags & 4;
  made.no_overlap = flags & 8;
  made.empty = flags & 16;
  for (int64_t n = in.next(); n > 0; --n) made.writes.push_back(static_cast<uint16_t>(in.next()));
  for (int64_t n = in.next(); n > 0; --n) made.results.push_back(read_result(in));
  for (const auto& r : made.results) made.fresh += r.kind == Result::kNew || r.kind == Result::kView;
  made.operand_dims.assign(spec.begin() + static_cast<std::ptrdiff_t>(in.at), spec.end());
  return add_call(std::move(made));
}

// Return the call from which this one was derived, then offset, sizes and strides of each operand and new result.
static std::vector<int64_t> describe_call(int64_t id) {
  const auto& call = call_of(static_cast<int32_t>(id));
  std::vector<int64_t> made{call.like};
  made.insert(made.end(), call.operand_dims.begin(), call.operand_dims.end());
  for (const auto& r : call.results) {
    if (r.kind != Result::kNew && r.kind != Result::kView) continue;
    made.push_back(r.offset);
    made.insert(made.end(), r.sizes.begin(), r.sizes.end());
    made.insert(made.end(), r.strides.begin(), r.strides.end());
  }
  return made;
}

int32_t add_call(Call made) {
  auto& all = calls();
  std::lock_guard<std::mutex> guard(all.mutex);
  ++all.used;
  if (!all.released.empty()) {
    made.id = all.released.back();
    all.released.pop_back();
    auto& again = all.blocks[static_cast<size_t>(made.id) / kBlock].load(std::memory_order_relaxed)[static_cast<size_t>(made.id) % kBlock];
    again = std::move(made);
    return again.id;
  }
  made.id = all.count;
  const size_t block = static_cast<size_t>(all.count) / kBlock;
  TORCH_CHECK(block < kBlocks, "remote_accelerator: more than ", kBlock * kBlocks, " different calls");
  auto* calls_of_block = all.blocks[block].load(std::memory_order_relaxed);
  if (!calls_of_block) {
    calls_of_block = new Call[kBlock];
    all.blocks[block].store(calls_of_block, std::memory_order_release);
  }
  calls_of_block[static_cast<size_t>(all.count) % kBlock] = std::move(made);
  return all.count++;
}

const Call& call_of(int32_t id) {
  return calls().blocks[static_cast<size_t>(id) / kBlock].load(std::memory_order_acquire)[static_cast<size_t>(id) % kBlock];
}

OpInfo::OpInfo(c10::OperatorHandle o) : op(std::move(o)) {
  const auto& schema = op.schema();
  name = schema.name();
  if (!schema.overload_name().empty()) name += "." + schema.overload_name();
  id = reinterpret_cast<uint64_t>(this);
  args = schema.arguments().size();
  returns = schema.returns().size();
  for (const auto& a : schema.arguments()) {
    auto type = a.real_type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    const auto kind = type->kind();
    const bool number = (kind == c10::TypeKind::NumberType || kind == c10::TypeKind::FloatType) && !name.starts_with("aten::arange");
    const bool fixed =
        kind == c10::TypeKind::ScalarTypeType || kind == c10::TypeKind::LayoutType || kind == c10::TypeKind::MemoryFormatType;
    kinds.push_back(fixed ? ArgKind::kEnum : number ? ArgKind::kNumber : ArgKind::kPlain);
    keyword.push_back(a.kwarg_only());
  }
  // C++ can make tensors or one list of tensors. An op with other results always goes through Python.
  size_t lists = 0;
  for (const auto& r : schema.returns()) {
    if (r.type()->kind() == c10::TypeKind::ListType) ++lists;
    else if (r.type()->kind() != c10::TypeKind::TensorType) flags |= kNeverKnown;
  }
  if (lists && returns > 1) flags |= kNeverKnown;
  rule = rule_of(*this);
}

std::mutex& infos_mutex() {
  static auto* one = new std::mutex();
  return *one;
}
std::shared_mutex& memo_mutex() { return memo().mutex; }
std::mutex& calls_mutex() { return calls().mutex; }

OpInfo& info_of(const c10::OperatorHandle& op) {
  static auto* all = new std::unordered_map<c10::OperatorName, std::unique_ptr<OpInfo>>();
  std::lock_guard<std::mutex> guard(infos_mutex());
  auto& one = (*all)[op.operator_name()];
  if (!one) one = std::make_unique<OpInfo>(op);
  return *one;
}

static void begin_key(const OpInfo& info, Scratch& s) {
  s.words.clear();
  s.float_at.clear();
  s.operands.clear();
  s.slots.clear();
  s.kinds.clear();
  s.kept.clear();
  s.known = false;
  s.words.push_back(info.id);
  s.words.push_back(static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()));
}

void take_apart(OpInfo& info, const at::Tensor& self, at::IntArrayRef sizes, Scratch& s) {
  begin_key(info, s);
  add_tensor(s, self);
  s.words.push_back(mark(kList, sizes.size()));
  for (const int64_t n : sizes) {
    s.words.push_back(mark(kInt));
    s.words.push_back(static_cast<uint64_t>(n));
    add_slot(s, n, kIntSlot);
  }
}

void take_apart(OpInfo& info, const Stack& stack, Scratch& s) {
  const size_t first = stack.size() - info.args;
  const auto& arguments = info.op.schema().arguments();
  begin_key(info, s);
  // As the dispatcher does for Python, omit trailing positional arguments that have their defaults.
  size_t positional = 0;
  for (size_t i = info.args; i-- > 0;) {
    if (!info.keyword[i] && !is_default(arguments[i], stack[first + i])) {
      positional = i + 1;
      break;
    }
  }
  for (size_t i = 0; i < info.args; ++i) {
    const auto& v = stack[first + i];
    if (info.keyword[i]) {
      if (is_default(arguments[i], v)) continue;
      s.words.push_back(mark(kArgument, i));
    } else if (i >= positional) {
      continue;
    }
    add_value(s, v, info.kinds[i]);
  }
  if (s.operands.empty()) s.words.push_back(static_cast<uint64_t>(current_index()));
}

bool is_moderate(uint64_t value, bool is_float) {
  constexpr double kLeastMaximum = 65504;  // smallest maximum of the floating dtypes, as in shape_inference/scalar_ranges.py
  const double d = is_float ? std::bit_cast<double>(value) : static_cast<double>(static_cast<int64_t>(value));
  return d >= -kLeastMaximum && d <= kLeastMaximum;
}

// Replace floats that every floating dtype can hold by a placeholder. The results of some ops do not depend on them.
static bool without_floats(at::ArrayRef<uint64_t> key, at::ArrayRef<uint64_t> float_at, std::vector<uint64_t>& words) {
  words = key.vec();
  bool some = false;
  for (auto at : float_at) {
    if (!is_moderate(words[at], true)) continue;
    words[at] = ~uint64_t{0};  // the placeholder: a NaN that `bits_of` never returns
    some = true;
  }
  return some;
}

const Call* find_call(const OpInfo& info, Scratch& s) {
  int32_t found = find(s.words);
  if (found < 0 && (info.flags & kAnyFloat) && !s.float_at.empty()) {
    static thread_local std::vector<uint64_t> words;
    if (without_floats(s.words, s.float_at, words)) found = find(words);
  }
  return found < 0 ? nullptr : &call_of(found);
}

const Call* find_by_rule(const OpInfo& info, const Scratch& s, at::ArrayRef<c10::IValue> args) {
  if (!info.rule || calls().full()) return nullptr;
  int32_t like = info.flags & kAnyFloat ? find(kind_of(s.words, true)) : -1;
  if (like < 0) like = find(kind_of(s.words, false));
  auto made = like < 0 ? std::nullopt : call_like(call_of(like), info, s.operands, args);
  if (!made) return nullptr;
  const auto id = made->nothing ? like : add_call(std::move(*made));
  insert({s.words.begin(), s.words.end()}, id);
  return &call_of(id);
}

PendingGuard::PendingGuard(Pending* p) : before(pending) { pending = p; }
PendingGuard::~PendingGuard() { pending = before; }

void remember_call(int32_t id, bool any_float) {
  if (!pending) return;
  insert(pending->words, id);
  std::vector<uint64_t> words;
  if (any_float && without_floats(pending->words, pending->float_at, words)) insert(words, id);
  if (!has_kind(pending->rule, call_of(id))) return;
  const auto kind = kind_of(pending->words, any_float);
  if (!kind.empty()) insert(kind, id);
}

// Forget the calls with a signature, or all calls if it is -1.
void forget_calls(int64_t signature) {
  auto& m = memo();
  std::unique_lock<std::shared_mutex> guard(m.mutex);
  const auto out_of_date =
      std::ranges::stable_partition(m.by_age, [&](const Known* k) { return signature >= 0 && call_of(k->call).signature != signature; });
  const std::vector<Known*> gone(out_of_date.begin(), out_of_date.end());
  m.by_age.erase(out_of_date.begin(), out_of_date.end());
  drop(m, gone);
}

// Return the numbers of calls that neither a key nor an unsent entry refers to.
static std::vector<int64_t> unused_calls() {
  std::vector<bool> used;
  {
    std::lock_guard<std::mutex> guard(calls().mutex);
    used.resize(static_cast<size_t>(calls().count));
    for (auto id : calls().released) used[static_cast<size_t>(id)] = true;
  }
  auto mark_used = [&used](int32_t id) {
    if (static_cast<size_t>(id) < used.size()) used[static_cast<size_t>(id)] = true;
  };
  {
    std::shared_lock<std::shared_mutex> guard(memo().mutex);
    for (const auto* k : memo().by_age) mark_used(k->call);
  }
  for_unsent_calls(mark_used);
  for (size_t id = 0; id < used.size(); ++id) {
    const auto like = used[id] ? call_of(static_cast<int32_t>(id)).like : -1;
    if (like >= 0) mark_used(like);
  }
  std::vector<int64_t> unused;
  for (size_t id = 0; id < used.size(); ++id) {
    if (!used[id]) unused.push_back(static_cast<int64_t>(id));
  }
  return unused;
}

static void release_calls(at::IntArrayRef ids) {
  std::lock_guard<std::mutex> guard(calls().mutex);
  for (auto id : ids) calls().released.push_back(static_cast<int32_t>(id));
  calls().used -= static_cast<int64_t>(ids.size());
  calls().most = std::max<int64_t>(kFewest, 2 * calls().used);
}

TORCH_LIBRARY_FRAGMENT(djinn, m) {
  m.def("add_call(int[] spec) -> int", [](at::IntArrayRef spec) { return static_cast<int64_t>(read_call(spec)); });
  m.def("describe_call(int call) -> int[]", &describe_call);
  m.def("calls_are_full() -> bool", [] { return calls().full(); });
  m.def("remember(int call, bool any_float) -> ()", [](int64_t id, bool any) { remember_call(static_cast<int32_t>(id), any); });
  m.def("forget_calls(int signature) -> ()", &forget_calls);
  m.def("unused_calls() -> int[]", &unused_calls);
  m.def("release_calls(int[] calls) -> ()", [](at::IntArrayRef ids) { release_calls(ids); });
  m.def("set_op(str name, str overload, int flags) -> ()", [](const std::string& name, const std::string& overload, int64_t flags) {
    auto op = c10::Dispatcher::singleton().findSchema({name, overload});
    if (op) info_of(*op).flags |= flags;
  });
}

}  // namespace djinn
