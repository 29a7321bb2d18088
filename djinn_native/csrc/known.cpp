// Known contents: the client keeps the bytes of small uploads, and the ops that compute other contents from them. If a program uploads a
// mask, appends ones and asks whether all elements are true, the client answers without the executor. All ops are recorded. A result is
// computed on the CPU when the program asks for a number. Floats are only compared, because the last bits of a sum depend on the device.
#include "remote.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstring>
#include <deque>

namespace djinn {

std::mutex& known_mutex() {
  static auto* one = new std::mutex();
  return *one;
}

// An argument of a recorded op: a value, or for each tensor position whether there is a tensor. A position without a tensor is None.
struct FoldArgument {
  c10::IValue value;
  std::vector<bool> tensors;
  enum : uint8_t { kValue, kTensor, kList, kOptionalList } kind = kValue;
};
// An operand of a recorded op. If `contents` is null, the op reads only its metadata.
struct FoldOperand {
  KnownPtr contents;
  Layout layout;
};
// The bytes of a storage, or the op that computes them.
struct Contents {
  at::Tensor bytes;
  const OpInfo* info = nullptr;
  std::vector<FoldArgument> arguments;
  std::vector<FoldOperand> operands;
  Layout result;
};
struct KnownContents {
  std::shared_ptr<const Contents> contents;  // null: evicted; `known_mutex` guards it
  std::atomic<int> depth{0};                 // number of ops between these contents and known bytes
};

namespace {

constexpr size_t kLargest = size_t{1} << 18;  // maximum bytes of a storage with known contents, as an attention mask of 8 x 4,000
constexpr size_t kLargestOfFloats = size_t{1} << 12;  // the same for floats, small enough to exclude weights
constexpr int kDeepest = 32;  // maximum number of chained ops that are not computed yet
constexpr size_t kOverhead = 1024;  // bytes that count for each storage in addition to its contents
std::atomic<int64_t> session{0};

bool is_integer(at::ScalarType t) { return c10::isIntegralType(t, true) && !c10::isBarebonesUnsignedType(t); }
bool is_float(at::ScalarType t) { return t == at::kHalf || t == at::kBFloat16 || t == at::kFloat || t == at::kDouble; }
bool is_write(const OpInfo& info) {
  const auto* alias = info.op.schema().arguments().empty() ? nullptr : info.op.schema().arguments()[0].alias_info();
  return alias && alias->isWrite();
}
at::IntArrayRef sizes_of(const Layout& l) { return at::IntArrayRef(l.dims).slice(0, l.dims.size() / 2); }
at::IntArrayRef strides_of(const Layout& l) { return at::IntArrayRef(l.dims).slice(l.dims.size() / 2); }

// Storages with known bytes, oldest first. `known_mutex` guards them.
struct Counted {
  std::deque<std::pair<std::weak_ptr<KnownContents>, size_t>> parts;
  size_t nbytes = 0, limit = size_t{1} << 24;
};
Counted& counted() {
  static auto* one = new Counted();
  return *one;
}

// Set the bytes of known contents. Evict the oldest bytes if the total exceeds the limit.
void set_contents(const KnownPtr& known, const at::Tensor& bytes) {
  auto made = std::make_shared<Contents>();
  made->bytes = bytes;
  std::vector<std::shared_ptr<const Contents>> gone;  // freed after the lock is released
  std::vector<KnownPtr> owners;
  std::lock_guard<std::mutex> guard(known_mutex());
  auto& all = counted();
  const auto evict = [&](const KnownPtr& owner, std::shared_ptr<const Contents> to) {
    gone.push_back(std::move(owner->contents));
    owner->contents = std::move(to);
    owner->depth = 0;
    owners.push_back(owner);
  };
  evict(known, std::move(made));
  all.parts.emplace_back(known, bytes.nbytes() + kOverhead);
  all.nbytes += bytes.nbytes() + kOverhead;
  while (all.nbytes > all.limit) {
    all.nbytes -= all.parts.front().second;
    if (const auto oldest = all.parts.front().first.lock()) evict(oldest, nullptr);
    all.parts.pop_front();
  }
}

// Return a tensor over the bytes of a storage; undefined if the layout exceeds them.
at::Tensor view_of(const at::Tensor& bytes, const Layout& l) {
  const auto sizes = sizes_of(l), strides = strides_of(l);
  int64_t extent = l.offset + 1;
  for (size_t i = 0; i < sizes.size(); ++i) extent += (sizes[i] - 1) * strides[i];
  const bool empty = std::ranges::find(sizes, 0) != sizes.end();
  if (l.conj || l.neg || (!empty && static_cast<size_t>(extent) * c10::elementSize(l.dtype) > bytes.nbytes())) return {};
  return at::empty({0}, l.dtype).set_(bytes.storage(), l.offset, sizes, strides);
}

at::Tensor bytes_of(const KnownPtr& known);

at::Tensor operand_tensor(const FoldOperand& operand, bool written) {
  if (!operand.contents)
    return written ? at::empty(sizes_of(operand.layout), operand.layout.dtype)
                   : at::empty({}, operand.layout.dtype).expand(sizes_of(operand.layout));
  const auto bytes = bytes_of(operand.contents);
  const auto found = bytes.defined() ? view_of(bytes, operand.layout) : bytes;
  return found.defined() && written ? found.clone() : found;
}

template <class T> c10::IValue listed(const std::vector<bool>& places, const std::vector<at::Tensor>& tensors, size_t* next) {
  c10::List<T> made;
  for (const bool there : places) made.push_back(there ? T(tensors[(*next)++]) : T());
  return made;
}

// Compute the bytes of an op's result. Undefined if an operand was evicted, or if PyTorch refuses the op, as the executor will.
at::Tensor computed(const Contents& c) {
  std::vector<at::Tensor> tensors;
  for (const auto& operand : c.operands) {
    tensors.push_back(operand_tensor(operand, tensors.empty() && is_write(*c.info)));
    if (!tensors.back().defined()) return {};
  }
  Stack stack;
  size_t next = 0;
  for (const auto& a : c.arguments) {
    if (a.kind == FoldArgument::kValue) stack.push_back(a.value);
    else if (a.kind == FoldArgument::kTensor) stack.emplace_back(tensors[next++]);
    else if (a.kind == FoldArgument::kList) stack.push_back(listed<at::Tensor>(a.tensors, tensors, &next));
    else stack.push_back(listed<std::optional<at::Tensor>>(a.tensors, tensors, &next));
  }
  c.info->op.callBoxed(stack);
  const auto made = stack.back().toTensor();
  if (made.scalar_type() != c.result.dtype || made.sizes() != sizes_of(c.result)) return {};
  const at::Tensor bytes = at::detail::empty_cpu({static_cast<int64_t>(made.nbytes())}, at::kByte);
  view_of(bytes, c.result).copy_(made);
  return bytes;
}

at::Tensor bytes_of(const KnownPtr& known) {
  std::shared_ptr<const Contents> contents;
  {
    std::lock_guard<std::mutex> guard(known_mutex());
    contents = known->contents;
  }
  if (!contents || contents->bytes.defined()) return contents ? contents->bytes : at::Tensor();
  at::Tensor made;
  try {
    made = computed(*contents);
  } catch (const std::exception&) {
    return {};
  }
  if (made.defined()) set_contents(known, made);
  return made;
}

KnownPtr known_of(StorageRecord* r) {
  r = ordering_record(r);
  if (!r->known.load(std::memory_order_relaxed)) return {};
  std::lock_guard<std::mutex> guard(known_mutex());
  return r->contents_version == r->version.load() && r->contents_session == session.load() ? r->contents : KnownPtr();
}

// Set the contents that a storage has at a version. They do not count if another thread has written to the storage since.
void know(StorageRecord* r, KnownPtr known, int64_t version) {
  {
    std::lock_guard<std::mutex> guard(known_mutex());
    r->contents.swap(known);
    r->contents_version = version;
    r->contents_session = session;
  }
  std::lock_guard<SpinLock> guard(sharing_mutex());
  if (r->version.load() == version) r->known = true;
}

// Add the next tensor of a call. Return true if the result can still be known.
bool add_operand(const OpInfo& info, const at::Tensor& t, const Scratch& s, size_t* next, Fold& fold) {
  if (!is_remote(t) || *next == s.operands.size()) return false;
  const auto& operand = s.operands[(*next)++];
  KnownPtr known = info.flags & kFoldsSizes ? nullptr : known_of(operand.record());
  if (!known && !(info.flags & kFoldsSizes)) return false;
  auto layout = layout_of(operand.impl);
  fold.floats |= !is_integer(layout.dtype);
  if (known) fold.depth = std::max(fold.depth, known->depth.load());
  fold.made->operands.push_back({std::move(known), std::move(layout)});
  return true;
}

bool add_argument(const OpInfo& info, const c10::IValue& v, const Scratch& s, size_t* next, Fold& fold) {
  FoldArgument argument;
  const bool number = v.isTensor() && v.toTensor().defined() && v.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
  if (v.isTensor() && !number) {
    argument.kind = FoldArgument::kTensor;
    if (!add_operand(info, v.toTensor(), s, next, fold)) return false;
  } else if (v.isTensorList() || v.isOptionalTensorList()) {
    argument.kind = v.isTensorList() ? FoldArgument::kList : FoldArgument::kOptionalList;
    for (const auto& item : v.toListRef()) {
      argument.tensors.push_back(!item.isNone() && item.toTensor().defined());
      if (!argument.tensors.back()) continue;
      if (!add_operand(info, item.toTensor(), s, next, fold)) return false;
    }
  } else {
    argument.value = v.isDevice() ? c10::IValue(at::Device(at::kCPU)) : v;
  }
  fold.made->arguments.push_back(std::move(argument));
  return true;
}

}  // namespace

bool knows_mask(const Scratch& s) {
  for (size_t i = 1; i < s.operands.size(); ++i) {
    if (s.operands[i].impl->dtype() == caffe2::TypeMeta::Make<bool>() && known_of(s.operands[i].record())) return true;
  }
  return false;
}

// Return the data to compute the result of a call that is about to be recorded; empty if the result will not be known.
Fold begin_fold(const OpInfo& info, const Scratch& s, const Stack& stack) {
  if (!(info.flags & kFoldsSizes) && !s.known) return {};
  Fold fold;
  fold.made = std::make_shared<Contents>();
  fold.made->info = &info;
  size_t next = 0;
  for (size_t i = stack.size() - info.args; i < stack.size(); ++i) {
    if (!add_argument(info, stack[i], s, &next, fold)) return {};
  }
  if (fold.depth >= kDeepest) return {};
  if (is_write(info)) fold.version = ordering_record(s.operands[0].record())->version;
  return fold;
}

// Set the known contents of the result. The call was recorded, and its result is on the stack.
void end_fold(const Fold& fold, const Stack& stack) {
  const auto& info = *fold.made->info;
  if (!stack.back().isTensor() || !has_value(stack.back().toTensor())) return;
  const auto operand = operand_of(stack.back().toTensor());
  auto& result = fold.made->result = layout_of(operand.impl);
  const bool exact = info.flags & kFoldsFloats || result.dtype == at::kBool;
  if (!is_integer(result.dtype) && !(info.flags & kFoldsSizes && info.flags & kFoldsFloats && is_float(result.dtype))) return;
  if (fold.floats && !exact && !(info.flags & kFoldsSizes)) return;
  const auto nbytes = operand.impl->unsafe_storage().nbytes();
  const bool whole = !result.offset && operand.impl->is_non_overlapping_and_dense() &&
                     static_cast<size_t>(operand.impl->numel()) * operand.impl->itemsize() == nbytes;
  if (!whole || !nbytes || nbytes > kLargest) return;
  auto known = std::make_shared<KnownContents>();
  known->contents = fold.made;
  known->depth = fold.depth + 1;
  auto* record = ordering_record(operand.record());
  know(record, std::move(known), fold.version < 0 ? record->version.load() : fold.version + 1);
}

void forget_known() { ++session; }

namespace {

// Set the known contents of `t`, which was uploaded from the dense tensor `source`.
void know_upload(const at::Tensor& t, const at::Tensor& source) {
  const auto type = source.scalar_type();
  const auto nbytes = source.nbytes(), most = is_integer(type) ? kLargest : is_float(type) ? kLargestOfFloats : 0;
  if (!nbytes || nbytes > most) return;
  const at::Tensor bytes = at::detail::empty_cpu({static_cast<int64_t>(nbytes)}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), source.const_data_ptr(), nbytes);
  auto known = std::make_shared<KnownContents>();
  set_contents(known, bytes);
  auto* record = ordering_record(operand_of(t).record());
  know(record, std::move(known), record->version);
}

// Return a tensor with the known elements of `t`. The caller must not change it.
std::optional<at::Tensor> known_elements(const at::Tensor& t) {
  const auto operand = operand_of(t);
  const auto known = known_of(operand.record());
  if (!known) return std::nullopt;
  const c10::InferenceMode inference(true);
  const c10::impl::ExcludeDispatchKeyGuard no_modes(c10::python_ks);
  const auto bytes = bytes_of(known);
  const auto found = bytes.defined() ? view_of(bytes, layout_of(operand.impl)) : bytes;
  return found.defined() ? std::optional(found) : std::nullopt;
}

// For tests: set the limit of known bytes, and return their present total.
int64_t limit_known(int64_t nbytes) {
  std::lock_guard<std::mutex> guard(known_mutex());
  counted().limit = static_cast<size_t>(nbytes);
  return static_cast<int64_t>(counted().nbytes);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(djinn, m) {
  m.def("know_upload(Tensor t, Tensor source) -> ()", &know_upload);
  m.def("known_elements(Tensor t) -> Tensor?", &known_elements);
  m.def("forget_known() -> ()", &forget_known);
  m.def("limit_known(int nbytes) -> int", &limit_known);
}

}  // namespace djinn
