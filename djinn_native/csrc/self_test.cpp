// Self-test of the library: how it was compiled, and whether the loaded PyTorch lays out its objects in the same way.
//
// The functions are plain C. Python calls them before any other function of the library.

#include "remote.h"

#include <ATen/core/ivalue.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <torch/version.h>

#include <cstdint>
#include <exception>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace {

std::string describe() {
  auto key = [](c10::DispatchKey k) { return std::to_string(static_cast<unsigned>(k)); };
  return std::string("djinn_native=" DJINN_NATIVE_VERSION ";torch=" TORCH_VERSION) +
         ";sizeof_tensor=" + std::to_string(sizeof(c10::TensorImpl)) + ";sizeof_storage=" + std::to_string(sizeof(c10::StorageImpl)) +
         ";sizeof_ivalue=" + std::to_string(sizeof(c10::IValue)) + ";PrivateUse1=" + key(c10::DispatchKey::PrivateUse1) +
         ";AutogradPrivateUse1=" + key(c10::DispatchKey::AutogradPrivateUse1) +
         ";device_type=" + std::to_string(static_cast<int>(c10::DeviceType::PrivateUse1));
}

// Compare numbers of this library with the loaded PyTorch. Return the first that differs; empty if none does.
std::string first_difference() {
  using c10::DispatchKey;
  if (std::string(c10::toString(DispatchKey::PrivateUse1)) != "PrivateUse1") {
    return "the number of the dispatch key PrivateUse1";
  }
  if (std::string(c10::toString(DispatchKey::AutogradPrivateUse1)) != "AutogradPrivateUse1") {
    return "the number of the dispatch key AutogradPrivateUse1";
  }
  const std::pair<c10::IValue, const char*> values[] = {
      {c10::IValue(), "None"},      {c10::IValue(true), "Bool"},     {c10::IValue(int64_t{7}), "Int"},
      {c10::IValue(1.5), "Double"}, {c10::IValue("text"), "String"}, {c10::IValue(c10::Device(c10::DeviceType::CPU)), "Device"},
  };
  for (const auto& [value, kind] : values) {
    if (value.tagKind() != kind) {
      return std::string("the layout of IValue: ") + kind;
    }
  }
  // PyTorch prints the elements, and finds them by the size of its own IValue.
  std::vector<c10::IValue> numbers;
  for (int64_t number = 1; number < 5; ++number) {
    numbers.emplace_back(number);
  }
  std::ostringstream printed;
  printed << c10::IValue(c10::ivalue::Tuple::create(std::move(numbers)));
  return printed.str() == "(1, 2, 3, 4)" ? "" : "the size of IValue";
}

}  // namespace

// Return the properties of the compiled library, as `name=value` joined by semicolons.
DJINN_EXPORT const char* djinn_native_abi() {
  static const std::string text = describe();
  return text.c_str();
}

// Return a difference between this library and the loaded PyTorch; an empty string if there is none.
DJINN_EXPORT const char* djinn_native_difference() {
  static std::string text;
  try {
    text = first_difference();
  } catch (const std::exception& error) {
    text = error.what();
  }
  return text.c_str();
}

// Reads the fields of a tensor of two dimensions, through the layout that was compiled in. `tensor` is `Tensor._cdata`.
// No function of PyTorch tells its sizes of classes. The last members are read instead: the key set of a tensor, the allocator of a storage.
DJINN_EXPORT void djinn_native_read_tensor(const c10::TensorImpl* tensor, int64_t* fields) {
  const c10::Storage& storage = tensor->unsafe_storage();
  const int64_t read[] = {
      tensor->dim(),
      tensor->numel(),
      tensor->sizes()[0],
      tensor->sizes()[1],
      tensor->strides()[0],
      tensor->strides()[1],
      tensor->storage_offset(),
      static_cast<int64_t>(tensor->dtype().itemsize()),
      static_cast<int64_t>(tensor->key_set().raw_repr()),
      static_cast<int64_t>(tensor->version_counter().current_version()),
      static_cast<int64_t>(storage.nbytes()),
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(storage.data())),
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(storage.unsafeGetStorageImpl())),
      tensor->requires_grad(),
      tensor->is_contiguous(),
      storage.allocator() == c10::GetAllocator(c10::DeviceType::CPU),
  };
  for (int64_t value : read) {
    *fields++ = value;
  }
}
