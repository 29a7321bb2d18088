// Tensors of the device: those that Djinn makes, and those that PyTorch makes by itself over storages of the device.
#include "remote.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/ScalarTypeToTypeMeta.h>

#include <typeinfo>

namespace djinn {

c10::intrusive_ptr<c10::TensorImpl> RemoteImpl::shallow_copy_and_detach(const c10::VariableVersion& v, bool change) const {
  auto copy = c10::make_intrusive<RemoteImpl>(TensorImpl::VIEW, c10::Storage(storage()), key_set(), dtype(), value);
  copy_tensor_metadata(this, copy.get(), v, change);
  return copy;
}

c10::intrusive_ptr<c10::TensorImpl> RemoteImpl::shallow_copy_and_detach(c10::VariableVersion&& v, bool change) const {
  auto copy = c10::make_intrusive<RemoteImpl>(TensorImpl::VIEW, c10::Storage(storage()), key_set(), dtype(), value);
  copy_tensor_metadata(this, copy.get(), std::move(v), change);
  return copy;
}

void RemoteImpl::shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& other) {
  auto taken = typeid(*other) == typeid(RemoteImpl) ? static_cast<RemoteImpl*>(other.get())->value : ValuePtr();
  value.reset();  // before the storage is replaced
  TensorImpl::shallow_copy_from(other);
  value = std::move(taken);
}

Layout layout_of(const c10::TensorImpl* t) {
  Layout l;
  l.dtype = c10::typeMetaToScalarType(t->dtype());
  l.conj = t->is_conj();
  l.neg = t->is_neg();
  l.offset = t->storage_offset();
  l.dims.append(t->sizes().begin(), t->sizes().end());
  l.dims.append(t->strides().begin(), t->strides().end());
  return l;
}

void RemoteImpl::release_resources() {
  value.reset();  // before the storage is released
  TensorImpl::release_resources();
}

namespace {

// For a tensor that PyTorch made over a storage of the device, return the value of its layout, or of a view that Python records.
Operand operand_of_foreign(c10::TensorImpl* t) {
  int64_t before = 0;
  auto* record = record_of(t->unsafe_storage().unsafeGetStorageImpl(), &before);
  auto layout = layout_of(t);
  layout.offset += before / static_cast<int64_t>(t->itemsize());
  auto value = value_with(record, &layout);
  auto* found = value.get();
  if (!found) {
    const auto sizes = at::IntArrayRef(layout.dims).slice(0, layout.dims.size() / 2),
               strides = at::IntArrayRef(layout.dims).slice(sizes.size());
    Stack stack{c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(record->storage)),
                sizes.vec(),
                strides.vec(),
                layout.offset,
                static_cast<int64_t>(layout.dtype),
                static_cast<int64_t>(layout.conj) + 2 * static_cast<int64_t>(layout.neg)};
    call_python("djinn::view_of_storage", &stack);
    const auto view = stack[0].toTensor();
    value = ValuePtr::reclaim_copy(operand_of(view).value);
    found = value.get();
    if (typeid(*t) != typeid(RemoteImpl)) {
      std::lock_guard<SpinLock> guard(record_lock(record));
      record->kept.push_back(value);
    }
  }
  if (typeid(*t) == typeid(RemoteImpl)) static_cast<RemoteImpl*>(t)->value = std::move(value);
  return {t, found};
}

}  // namespace

// False for tensor subclasses without a storage on the device, and for fake tensors.
static bool has_memory(const c10::TensorImpl* t) {
  if (!t->has_storage() || t->unsafe_storage().device_type() != kRemote) return false;
  return has_record(t->unsafe_storage().unsafeGetStorageImpl());
}

Operand operand_of(c10::TensorImpl* t) {
  TORCH_CHECK(is_remote(t), "expected a tensor of remote_accelerator");
  if (C10_LIKELY(typeid(*t) == typeid(RemoteImpl))) {
    auto* r = static_cast<RemoteImpl*>(t);
    if (C10_LIKELY(r->value.defined())) return {t, r->value.get()};
  }
  if (!has_memory(t)) throw NotOurs();
  return operand_of_foreign(t);
}

bool has_value(const at::Tensor& t) {
  if (!is_remote(t)) return false;
  auto* impl = t.unsafeGetTensorImpl();
  if (typeid(*impl) == typeid(RemoteImpl)) return true;
  return has_memory(impl);
}

void share_layout(Result& r) {
  Layout l;
  l.dtype = r.dtype;
  l.conj = r.conj;
  l.neg = r.neg;
  l.offset = r.offset;
  l.dims.append(r.sizes.begin(), r.sizes.end());
  l.dims.append(r.strides.begin(), r.strides.end());
  r.layout = std::make_shared<const Layout>(std::move(l));
}

// Make a tensor for a new value: a view of `base`, or one over the storage `into`, or one with a new storage.
at::Tensor make_result(const Result& r, c10::TensorImpl* base, c10::StorageImpl* into) {
  const auto type = c10::scalarTypeToTypeMeta(r.dtype);
  c10::intrusive_ptr<RemoteImpl> made;
  if (base) {
    auto* record = operand_of(base).record();
    auto value = new_value(next_handle(record), record, true, r.layout);
    // Only views of inference tensors are inference tensors.
    const auto keys = base->key_set()
                          .remove(c10::DispatchKey::Python)
                          .remove(c10::DispatchKey::PythonTLSSnapshot)
                          .remove(c10::DispatchKey::Conjugate)
                          .remove(c10::DispatchKey::Negative);
    made = c10::make_intrusive<RemoteImpl>(c10::TensorImpl::VIEW, c10::Storage(base->unsafe_storage()), keys, type, std::move(value));
  } else {
    auto storage = into ? c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(into)) : new_storage(r.nbytes, r.device);
    auto* record = record_of(storage.unsafeGetStorageImpl());
    auto value = new_value(next_handle(record), record, true, r.layout);
    made = c10::make_intrusive<RemoteImpl>(std::move(storage), type, std::move(value));
  }
  made->set_sizes_and_strides(r.sizes, r.strides, r.offset);
  at::Tensor t(std::move(made));
  if (r.conj) t._set_conj(true);
  if (r.neg) t._set_neg(true);
  return t;
}

// Make a tensor for an existing value.
at::Tensor tensor_of(Value* v) {
  const auto layout = v->present_layout();
  const auto& l = *layout;
  auto made = c10::make_intrusive<RemoteImpl>(c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(v->record->storage)),
                                              c10::scalarTypeToTypeMeta(l.dtype), ValuePtr::reclaim_copy(v));
  const at::IntArrayRef dims(l.dims);
  made->set_sizes_and_strides(dims.slice(0, dims.size() / 2), dims.slice(dims.size() / 2), l.offset);
  at::Tensor t(std::move(made));
  if (l.conj) t._set_conj(true);
  if (l.neg) t._set_neg(true);
  return t;
}

// Make another tensor for the same value, without autograd history.
at::Tensor twin_of(const Operand& o) {
  auto* t = o.impl;
  auto keys = t->key_set();
  keys = keys.remove(c10::DispatchKey::Python).remove(c10::DispatchKey::PythonTLSSnapshot);
  auto copy = c10::make_intrusive<RemoteImpl>(c10::TensorImpl::VIEW, c10::Storage(t->unsafe_storage()), keys, t->dtype(),
                                              ValuePtr::reclaim_copy(o.value));
  copy->set_sizes_and_strides(t->sizes(), t->strides(), t->storage_offset());
  return at::Tensor(std::move(copy));
}

// ---- what Python asks and tells --------------------------------------------------------------------------------------

namespace {

Result described(at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset, at::ScalarType dtype, int64_t index, int64_t bits,
                 int64_t nbytes) {
  Result r;
  r.kind = Result::kNew;
  r.dtype = dtype;
  r.device = static_cast<c10::DeviceIndex>(index);
  r.sizes.append(sizes.begin(), sizes.end());
  r.strides.append(strides.begin(), strides.end());
  r.offset = offset;
  r.conj = bits & 1;
  r.neg = bits & 2;
  r.nbytes = static_cast<size_t>(nbytes);
  share_layout(r);
  return r;
}

// Make a tensor with a new storage, or over that of `beside`. Nothing is recorded: the caller has the executor create the value.
at::Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset, at::ScalarType dtype, int64_t index, int64_t bits,
                      int64_t nbytes, const std::optional<at::Tensor>& beside) {
  auto* storage = beside ? beside->storage().unsafeGetStorageImpl() : nullptr;
  return make_result(described(sizes, strides, offset, dtype, index, bits, nbytes), nullptr, storage);
}

// Make a tensor for a value that another owner frees, over the storage of `beside` if that is given.
at::Tensor borrow(int64_t handle, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset, at::ScalarType dtype, int64_t index,
                  int64_t bits, int64_t nbytes, const std::optional<at::Tensor>& beside) {
  auto storage =
      beside ? beside->storage() : borrowed_storage(handle >> 32, static_cast<size_t>(nbytes), static_cast<c10::DeviceIndex>(index));
  if (static_cast<size_t>(nbytes) > storage.nbytes()) storage.set_nbytes(static_cast<size_t>(nbytes));
  auto* record = record_of(storage.unsafeGetStorageImpl());
  auto layout = described(sizes, strides, offset, dtype, index, bits, nbytes).layout;
  auto made = c10::make_intrusive<RemoteImpl>(std::move(storage), c10::scalarTypeToTypeMeta(dtype),
                                              new_value(handle, record, false, std::move(layout)));
  made->set_sizes_and_strides(sizes, strides, offset);
  at::Tensor t(std::move(made));
  if (bits & 1) t._set_conj(true);
  if (bits & 2) t._set_neg(true);
  return t;
}

// Set other metadata after an op that changed a tensor's metadata in place.
void set_meta(const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset, int64_t nbytes) {
  auto* impl = t.unsafeGetTensorImpl();
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  auto* record = record_of(storage);
  if (static_cast<size_t>(nbytes) > storage->nbytes()) set_bytes(record, static_cast<size_t>(nbytes));
  record->held = std::max(record->held, storage->nbytes());
  impl->set_sizes_and_strides(sizes, strides, offset);
  operand_of(impl).value->set_layout(std::make_shared<const Layout>(layout_of(impl)));
}

// Make a tensor for the same value as `t`, with metadata that the executor reported.
at::Tensor redescribe(const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset, at::ScalarType dtype,
                      int64_t bits, int64_t nbytes) {
  const auto o = operand_of(t);
  auto& storage = o.impl->unsafe_storage();
  set_bytes(o.record(), static_cast<size_t>(nbytes));
  o.record()->held = static_cast<size_t>(nbytes);
  auto made = c10::make_intrusive<RemoteImpl>(c10::TensorImpl::VIEW, c10::Storage(storage), o.impl->key_set(),
                                              c10::scalarTypeToTypeMeta(dtype), ValuePtr::reclaim_copy(o.value));
  made->set_sizes_and_strides(sizes, strides, offset);
  at::Tensor result(std::move(made));
  if (bits & 1) result._set_conj(true);
  if (bits & 2) result._set_neg(true);
  o.value->set_layout(std::make_shared<const Layout>(layout_of(result.unsafeGetTensorImpl())));
  return result;
}

// From now on, `t` has the value, the memory and the metadata of `other`.
void stand_for(const at::Tensor& t, const at::Tensor& other) {
  auto* mine = static_cast<RemoteImpl*>(t.unsafeGetTensorImpl());
  TORCH_CHECK(typeid(*mine) == typeid(RemoteImpl), "only a tensor of remote_accelerator can stand for another value");
  const auto o = operand_of(other);
  auto value = ValuePtr::reclaim_copy(o.value);
  mine->value.reset();
  mine->set_storage_keep_dtype(c10::Storage(o.impl->unsafe_storage()));
  mine->set_sizes_and_strides(o.impl->sizes(), o.impl->strides(), o.impl->storage_offset());
  mine->value = std::move(value);
}

int64_t handle_of(const at::Tensor& t) { return operand_of(t).value->handle; }

// Return handle, storage number, storage bytes, number of the value's owners, and whether the last of them frees the handle.
std::vector<int64_t> facts(const at::Tensor& t) {
  const auto o = operand_of(t);
  return {o.value->handle, o.record()->number, static_cast<int64_t>(o.impl->unsafe_storage().nbytes()),
          static_cast<int64_t>(c10::raw::intrusive_ptr::use_count(o.value)), static_cast<int64_t>(o.value->owned)};
}

// Note that the current program writes to the memory of `t` by other means than a recorded op.
void note_write_to(const at::Tensor& t) { begin_write(current_program(), operand_of(t).record()); }
void note_read_of(const at::Tensor& t) { begin_read(current_program(), operand_of(t).record()); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(djinn, m) {
  m.def("dtype_number(ScalarType dtype) -> int", [](at::ScalarType dtype) { return static_cast<int64_t>(dtype); });
  m.def("has_value(Tensor t) -> bool", &has_value);
  m.def("handle(Tensor t) -> int", &handle_of);
  m.def("facts(Tensor t) -> int[]", &facts);
  m.def("twin_and_handle(Tensor t) -> (Tensor, int)", [](const at::Tensor& t) -> std::tuple<at::Tensor, int64_t> {
    const auto operand = operand_of(t);
    return {twin_of(operand), operand.value->handle};
  });
  m.def("twin(Tensor t) -> Tensor", [](const at::Tensor& t) { return twin_of(operand_of(t)); });
  m.def("new_tensor(int[] size, int[] stride, int offset, ScalarType dtype, int index, int bits, int nbytes, Tensor? beside) -> Tensor",
        &new_tensor);
  m.def(
      "borrow(int handle, int[] size, int[] stride, int offset, ScalarType dtype, int index, int bits, int nbytes, Tensor? beside) -> Tensor",
      &borrow);
  m.def("set_meta(Tensor t, int[] size, int[] stride, int offset, int nbytes) -> ()", &set_meta);
  m.def("redescribe(Tensor t, int[] size, int[] stride, int offset, ScalarType dtype, int bits, int nbytes) -> Tensor", &redescribe);
  m.def("stand_for(Tensor t, Tensor other) -> ()", &stand_for);
  m.def("storage_version(int number) -> int", &version_of);
  m.def("sent_versions(int[] numbers) -> int[]", &sent_versions);
  m.def("note_write(Tensor t) -> ()", &note_write_to);
  m.def("note_read(Tensor t) -> ()", &note_read_of);
  m.def("reserve_storages(int count) -> int", &reserve_storages);
  // Make a tensor over the storage, for any of its existing values; None if it has none.
  m.def("any_view(Storage storage) -> Tensor?", [](const c10::Storage& s) -> std::optional<at::Tensor> {
    const auto value = value_with(record_of(s.unsafeGetStorageImpl()), nullptr);
    return value ? std::optional<at::Tensor>(tensor_of(value.get())) : std::nullopt;
  });
  // Set the size in bytes that PyTorch sees, if the executor's memory is large enough. Return the bytes of that memory.
  m.def("set_storage_size(Storage storage, int nbytes) -> int", [](const c10::Storage& s, int64_t nbytes) {
    auto* record = record_of(s.unsafeGetStorageImpl());
    const auto held = static_cast<int64_t>(record->held);
    if (nbytes <= held) set_bytes(record, static_cast<size_t>(nbytes));
    return held;
  });
  m.def("whole_storage(Storage storage) -> (Storage, int)", [](c10::Storage s) -> std::tuple<c10::Storage, int64_t> {
    const auto before = take_whole(&s);
    return {std::move(s), before};
  });
  m.def("storage_number(Storage storage) -> int", [](const c10::Storage& s) { return record_of(s.unsafeGetStorageImpl())->number; });
  m.def("view_of_storage(Storage storage, int[] size, int[] stride, int offset, int dtype, int bits) -> Tensor");  // implemented in Python
}

}  // namespace djinn
