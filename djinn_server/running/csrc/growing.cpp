// Tensors that grow by `cat`: their memory has spare capacity, so an append writes only the new entries.
//
// A growing tensor is a prefix view of a buffer that is longer in one dimension. The storage's context counts the used entries of the buffer.
// An append writes behind the used entries, which no other tensor shows. A second append to the same prefix finds more used entries than the
// prefix shows, and copies. `growing.py` decides which instructions of a template may read such a tensor.

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/scaled_dot_product_attention.h>

// Raise an error if attention has unequal numbers of keys and values, because PyTorch's kernel for CPUs would read beyond the keys.
void check_attention(const at::Tensor& key, const at::Tensor& value) {
  if (!key.defined() || !value.defined() || key.dim() < 2 || value.dim() < 2) return;
  TORCH_CHECK(key.size(-2) == value.size(-2), "aten::scaled_dot_product_attention: key and value must have as many positions, and have ",
              key.size(-2), " and ", value.size(-2));
}

namespace {

constexpr int64_t kAlignment = 64;  // alignment of each block in bytes, as in a dense tensor, so that kernels take the same path
constexpr int64_t kLeastBytes = 512 << 10;  // bytes of a tensor from which an append in place is faster than `cat`
constexpr int64_t kSpare = 32, kShare = 4;  // a new buffer has space for kSpare more entries, or for 1 / kShare of its entries
constexpr int64_t kFlash = 1;  // as `sdp::SDPBackend::flash_attention`

std::atomic<int64_t> appended_bytes{0}, copied_bytes{0};

// The buffer of a growing tensor: the context of its storage.
struct Buffer {
  Buffer(c10::DataPtr of, int64_t entry, int64_t entries, int64_t in_use)
      : memory(std::move(of)), row(entry), capacity(entries), used(in_use) {}

  c10::DataPtr memory;
  int64_t row;  // elements from one entry to the next
  int64_t capacity;  // entries
  std::atomic<int64_t> used;

  int64_t block() const { return row * capacity; }  // elements of all entries with the same position in outer dimensions
};

void destroy(void* buffer) { delete static_cast<Buffer*>(buffer); }

Buffer* buffer_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const c10::DataPtr& data = tensor.storage().data_ptr();
  return data.get_deleter() == &destroy ? static_cast<Buffer*>(data.get_context()) : nullptr;
}

int64_t product(c10::IntArrayRef sizes) { return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>()); }

at::Tensor view_of(const c10::Storage& storage, const at::Tensor& like, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) {
  at::Tensor made =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return made;
}

bool is_float(const at::Tensor& tensor) {
  const at::ScalarType type = tensor.scalar_type();
  return type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
}

bool can_grow(const at::Tensor& first, const at::Tensor& second, int64_t dim) {
  if (!first.defined() || !second.defined() || first.layout() != at::kStrided || second.layout() != at::kStrided) return false;
  if (!first.device().is_cpu() || !second.device().is_cpu() || first.scalar_type() != second.scalar_type() || !is_float(first))
    return false;
  if (first.is_neg() || first.dim() != second.dim() || dim < 0 || dim >= first.dim()) return false;
  for (int64_t i = 0; i < first.dim(); ++i) {
    if (i == dim ? first.size(i) == 0 || second.size(i) == 0 : first.size(i) != second.size(i)) return false;
  }
  const int64_t bytes = first.numel() * first.element_size();
  return bytes >= kLeastBytes && product(first.sizes().slice(static_cast<size_t>(dim) + 1)) * first.element_size() % kAlignment == 0;
}

// A view of the first entries of a storage whose blocks have `capacity` entries.
at::Tensor prefix(const c10::Storage& storage, const at::Tensor& like, int64_t dim, int64_t entries, int64_t capacity) {
  std::vector<int64_t> sizes = like.sizes().vec(), strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= static_cast<int64_t>(i) == dim ? capacity : sizes[i];
  }
  sizes[static_cast<size_t>(dim)] = entries;
  return view_of(storage, like, sizes, strides, 0);
}

// Return true if `tensor` is a prefix of its buffer along `dim`.
bool is_prefix(const at::Tensor& tensor, const Buffer& buffer, int64_t dim) {
  if (tensor.storage_offset() != 0 || tensor.stride(dim) != buffer.row) return false;
  int64_t stride = 1;
  for (int64_t i = tensor.dim(); i-- > 0;) {
    if (tensor.stride(i) != stride) return false;
    stride *= i == dim ? buffer.capacity : tensor.size(i);
  }
  return stride * tensor.element_size() == static_cast<int64_t>(tensor.storage().nbytes());
}

at::Tensor new_buffer(const at::Tensor& first, int64_t dim, int64_t total) {
  const int64_t row = product(first.sizes().slice(static_cast<size_t>(dim) + 1));
  const int64_t capacity = total + std::max(kSpare, total / kShare);
  const int64_t bytes = product(first.sizes().slice(0, static_cast<size_t>(dim))) * capacity * row * first.element_size();
  c10::DataPtr memory = c10::GetCPUAllocator()->allocate(static_cast<size_t>(bytes));
  void* address = memory.get();
  auto* buffer = new Buffer(std::move(memory), row, capacity, total);
  const c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes),
                             c10::DataPtr(address, buffer, &destroy, first.device()), nullptr, false);
  return prefix(storage, first, dim, total, capacity);
}

// Return `cat([first, second], dim)`. The result may be a prefix of a buffer that it shares with `first`.
at::Tensor append(const at::Tensor& first, const at::Tensor& second, int64_t dim) {
  const int64_t wrapped = dim < 0 && first.defined() ? dim + first.dim() : dim;
  Buffer* buffer = buffer_of(first);
  const bool dense = buffer == nullptr && first.defined() && first.layout() == at::kStrided && first.is_contiguous() &&
                     first.suggest_memory_format() == at::MemoryFormat::Contiguous;
  const bool fits = can_grow(first, second, wrapped) && (dense || (buffer != nullptr && is_prefix(first, *buffer, wrapped)));
  const int64_t before = fits ? first.size(wrapped) : 0, total = fits ? before + second.size(wrapped) : 0;
  if (second.defined()) appended_bytes += static_cast<int64_t>(second.nbytes());
  at::Tensor made;
  int64_t in_use = before;
  // One entry stays unused, so that the storage of a growing tensor is always larger than the tensor.
  if (fits && buffer != nullptr && total < buffer->capacity && buffer->used.compare_exchange_strong(in_use, total)) {
    made = prefix(first.storage(), first, wrapped, total, buffer->capacity);
  } else {
    if (first.defined()) copied_bytes += static_cast<int64_t>(first.nbytes());
    if (!fits) return at::cat({first, second}, dim);
    made = new_buffer(first, wrapped, total);
    made.narrow(wrapped, 0, before).copy_(first);
  }
  made.narrow(wrapped, before, total - before).copy_(second);
  return made;
}

// Return the number of entries that a view of a buffer shows. Other dimensions with the same stride have size 1.
int64_t entries_of(const at::Tensor& tensor, const Buffer& buffer) {
  int64_t entries = 1;
  for (int64_t i = 0; i < tensor.dim(); ++i)
    if (tensor.stride(i) == buffer.row) entries = std::max(entries, tensor.size(i));
  return entries;
}

// Undo an append to `first` whose result `made` was never used, so that the next append to `first` is done in place again.
void undo_append(const at::Tensor& first, const at::Tensor& made) {
  Buffer* buffer = buffer_of(made);
  if (buffer == nullptr || buffer_of(first) != buffer) return;
  int64_t in_use = entries_of(made, *buffer);
  buffer->used.compare_exchange_strong(in_use, entries_of(first, *buffer));
}

// Return the tensor as a dense tensor, with the strides that it would have without spare capacity.
at::Tensor dense(const at::Tensor& tensor) {
  const Buffer* buffer = buffer_of(tensor);
  if (buffer == nullptr) return tensor;
  const int64_t block = buffer->block(), all = static_cast<int64_t>(tensor.storage().nbytes()) / tensor.element_size();
  const int64_t entries = entries_of(tensor, *buffer);
  TORCH_CHECK(tensor.storage_offset() == 0, "a view of a growing tensor does not begin at its first entry");
  const at::Tensor copy = view_of(tensor.storage(), tensor, {all / block, entries, buffer->row}, {block, buffer->row, 1}, 0).contiguous();
  std::vector<int64_t> strides = tensor.strides().vec();
  for (int64_t& stride : strides) stride = stride >= block ? stride / buffer->capacity * entries : stride;
  return copy.as_strided(tensor.sizes(), strides, 0);
}

// Return true if a tensor grows in one of its last two dimensions, and its matrices are laid out as in a dense tensor. A product would copy a
// tensor that grows in a batch dimension, but reads a dense tensor directly, perhaps transposed. Kernels round these cases differently.
bool has_dense_matrices(const at::Tensor& tensor) {
  const Buffer* buffer = buffer_of(tensor);
  const auto fits = [&](int64_t dim) { return tensor.stride(dim) < buffer->block(); };
  const auto grows = [&](int64_t dim) { return tensor.stride(dim) == buffer->row && tensor.size(dim) > 1; };
  return buffer == nullptr || (fits(-1) && fits(-2) && (grows(-1) || grows(-2)));
}

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& attn_mask,
                     double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  check_attention(key, value);
  const auto run = [&](const at::Tensor& keys, const at::Tensor& values) {
    return at::scaled_dot_product_attention(query, keys, values, attn_mask, dropout_p, is_causal, scale, enable_gqa);
  };
  if (buffer_of(key) == nullptr && buffer_of(value) == nullptr) return run(key, value);
  const bool matrices = query.defined() && query.dim() == 4 && key.defined() && key.dim() == 4 && value.defined() && value.dim() == 4 &&
                        has_dense_matrices(key) && has_dense_matrices(value);
  if (matrices && at::_fused_sdp_choice(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa) == kFlash) {
    return run(key, value);
  }
  return run(dense(key), dense(value));
}

at::Tensor matmul(const at::Tensor& first, const at::Tensor& second) {
  if (buffer_of(first) == nullptr && buffer_of(second) == nullptr) return at::matmul(first, second);
  const auto fits = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.dim() >= 3 && (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble) &&
           has_dense_matrices(tensor);
  };
  const at::Float32Precision precision = at::globalContext().float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL);
  const bool exact = precision == at::Float32Precision::NONE || precision == at::Float32Precision::IEEE;
  return exact && fits(first) && fits(second) ? at::matmul(first, second) : at::matmul(dense(first), dense(second));
}

c10::List<bool> are_growing(at::TensorList tensors) {
  c10::List<bool> found;
  for (const at::Tensor& tensor : tensors) found.push_back(buffer_of(tensor) != nullptr);
  return found;
}

std::vector<int64_t> copies() { return {appended_bytes.load(), copied_bytes.load()}; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(djinn_replay, library) {
  library.def("append(Tensor first, Tensor second, int dim) -> Tensor", &append);
  library.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, *, "
      "float? scale=None, bool enable_gqa=False) -> Tensor",
      &attention);
  library.def("matmul(Tensor self, Tensor other) -> Tensor", &matmul);
  library.def("dense(Tensor tensor) -> Tensor", &dense);
  library.def("are_growing(Tensor[] tensors) -> bool[]", &are_growing);
  library.def("undo_append(Tensor first, Tensor made) -> ()", &undo_append);
  library.def("copies() -> int[]", &copies);
}
