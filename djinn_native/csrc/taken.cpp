// Programs as Python gets them: the entries and their identity in one array.
#include "identity.h"
#include "remote.h"

#include <algorithm>
#include <cstring>

namespace djinn {
namespace {

// Identity of the first entries of a program.
struct Identity {
  Numbers values, storages;
  std::vector<int64_t> dying, free;  // numbers of values that die; dead handles that no entry refers to
  Hash hash;

  void read(const Program& p, size_t count, at::IntArrayRef dead) {
    hash = {};
    dying.clear();
    free.clear();
    values.begin(p.handles.size());
    storages.begin(p.handles.size());
    const auto* handle = p.handles.data();
    for (size_t i = 0; i < count; ++i) {
      const auto& call = call_of(p.calls[i]);
      hash.add(call.kind);
      for (int32_t n = 0; n < call.operands; ++n) {
        const auto [number, outside] = values.add(*handle);
        hash.add(number);
        if (outside) hash.add(storages.add(*handle >> 32).first);
        ++handle;
      }
      for (int32_t n = 0; n < call.fresh; ++n) hash.add(values.add(*handle++).first);
    }
    for (const auto h : dead) {
      const auto number = values.find(h);
      if (number < 0) free.push_back(h);
      else dying.push_back(number);
    }
    std::ranges::sort(dying);
    const auto twice = std::ranges::unique(dying);
    dying.erase(twice.begin(), twice.end());
    for (const auto number : dying) hash.add(~number);
  }
};

struct Part {
  const void* data;
  size_t bytes;
};
template <class T> Part part(const std::vector<T>& all, size_t first, size_t count) { return {all.data() + first, count * sizeof(T)}; }

// Return one array: its size in bytes, `numbers`, the byte offset of each part, and the parts, each aligned to 8 bytes. It is valid until
// the thread packs again.
const int64_t* packed(std::initializer_list<int64_t> numbers, std::initializer_list<Part> parts) {
  static thread_local std::vector<int64_t> made;
  size_t end = 8 * (1 + numbers.size() + parts.size());
  made.assign(1, 0);
  made.insert(made.end(), numbers);
  for (const auto& one : parts) {
    made.push_back(static_cast<int64_t>(end));
    end += (one.bytes + 7) / 8 * 8;
  }
  made.front() = static_cast<int64_t>(end);
  auto to = made.size();
  made.resize(end / 8);
  for (const auto& one : parts) {
    if (one.bytes) std::memcpy(made.data() + to, one.data, one.bytes);
    to += (one.bytes + 7) / 8;
  }
  return made.data();
}

const int64_t* packed_entries(const Program& p, size_t first, size_t last, const Identity* identity, int64_t waiting) {
  size_t handle = 0, slot = 0, handles = 0, slots = 0;
  for (size_t i = 0; i < last; ++i) {
    const auto& call = call_of(p.calls[i]);
    const auto mentioned = static_cast<size_t>(call.operands + call.fresh), scalars = static_cast<size_t>(call.slots);
    if (i < first) {
      handle += mentioned;
      slot += scalars;
    } else {
      handles += mentioned;
      slots += scalars;
    }
  }
  const size_t count = last - first;
  const auto begin = p.nodes.begin() + static_cast<std::ptrdiff_t>(first), end = p.nodes.begin() + static_cast<std::ptrdiff_t>(last);
  const size_t nodes = std::any_of(begin, end, [](int64_t node) { return node != -1; }) ? count : 0;
  static const std::vector<int64_t> none;
  const auto all = [](const std::vector<int64_t>& of) { return part(of, 0, of.size()); };
  // `_HEADER` in interception/native/entries.py reads these numbers and the offsets of the parts.
  return packed({static_cast<int64_t>(count), static_cast<int64_t>(handles), static_cast<int64_t>(slots), waiting,
                 identity ? static_cast<int64_t>(identity->hash.low) : 0, identity ? static_cast<int64_t>(identity->hash.high) : 0},
                {part(p.handles, handle, handles), part(p.nodes, first, nodes), all(identity ? identity->values.order : none),
                 all(identity ? identity->dying : none), all(identity ? identity->free : none), part(p.sites, first, count),
                 part(p.calls, first, count),  // `RecordedProgram.exact` starts here
                 part(p.slots, slot, slots), part(p.kinds, slot, slots)});
}

}  // namespace

const int64_t* entries_of(const Program& p, size_t first, size_t last) { return packed_entries(p, first, last, nullptr, 0); }

const int64_t* submission_of(const Program& p, size_t count, at::IntArrayRef dead, int64_t waiting) {
  static thread_local Identity identity;
  identity.read(p, count, dead);
  return packed_entries(p, 0, count, &identity, waiting);
}

}  // namespace djinn
