// The line of the user's code that issued an op. CPython's C functions are looked up by name, so no Python header is needed.
#include "remote.h"

#ifdef _WIN32
#include <windows.h>
#else
#include <dlfcn.h>
#endif

#include <algorithm>
#include <deque>
#include <string_view>
#include <unordered_map>

namespace djinn {
namespace {

using Object = void;

template <class F> void look_up(F& function, const char* name) {
#ifdef _WIN32
  for (const char* library : {"python3.dll", "python311.dll", "python312.dll", "python313.dll", "python314.dll"}) {
    if (auto* module = GetModuleHandleA(library)) {
      if (auto* found = GetProcAddress(module, name)) {
        function = reinterpret_cast<F>(found);
        return;
      }
    }
  }
  function = nullptr;
#else
  function = reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
#endif
}

struct Python {
  int (*ensure)();
  void (*release)(int);
  Object* (*frame)();
  Object* (*back)(Object*);
  Object* (*code)(Object*);
  int (*lasti)(Object*);
  Object* (*attribute)(Object*, const char*);
  const char* (*text)(Object*);
  void (*incref)(Object*);
  void (*decref)(Object*);
  int (*initialized)();
  Python() {
    look_up(ensure, "PyGILState_Ensure");
    look_up(release, "PyGILState_Release");
    look_up(frame, "PyEval_GetFrame");
    look_up(back, "PyFrame_GetBack");
    look_up(code, "PyFrame_GetCode");
    look_up(lasti, "PyFrame_GetLasti");
    look_up(attribute, "PyObject_GetAttrString");
    look_up(text, "PyUnicode_AsUTF8");
    look_up(incref, "Py_IncRef");
    look_up(decref, "Py_DecRef");
    look_up(initialized, "Py_IsInitialized");
  }
  bool usable() const { return ensure && release && frame && back && code && lasti && attribute && text && incref && decref; }
};

const Python& python() {
  static const Python functions;
  return functions;
}

// The GIL guards all fields, or `mutex` in an interpreter without a GIL.
struct Sites {
  std::mutex mutex;
  std::vector<std::string> own;                       // folders of PyTorch and Djinn
  std::unordered_map<Object*, bool> users;            // code objects, kept alive, and whether they belong to the user
  std::unordered_map<uint64_t, int32_t> numbers;      // number of a site by hash of code object and offset
  std::deque<std::pair<int64_t, int64_t>> places;     // code object and offset of each site, starting with site `first`
  int64_t first = 0;
  int64_t generation = 0;                             // number of times that `users` was emptied
  std::vector<Object*> former;                        // code objects of the generation before; their sites end at `former_end`
  int64_t former_end = 0;
  size_t most = 8192;                                 // maximum number of code objects; a notebook makes new ones with every cell
};
Sites& sites() {
  static auto* one = new Sites();
  return *one;
}

bool is_users(const Python& py, Object* code) {
  auto& all = sites();
  auto known = all.users.find(code);
  if (known != all.users.end()) return known->second;
  Object* name = py.attribute(code, "co_filename");
  const char* text = name ? py.text(name) : nullptr;
  bool users = text != nullptr;
  for (const auto& folder : all.own) users = users && !std::string_view(text).starts_with(folder);
  if (name) py.decref(name);
  py.incref(code);
  all.users.emplace(code, users);
  return users;
}

// If there are too many code objects, drop those of the generation before, with their sites. Returns them for release without the mutex,
// because a finalizer may run.
std::vector<Object*> make_room() {
  auto& all = sites();
  if (all.users.size() < all.most) return {};
  std::vector<Object*> gone = std::move(all.former);
  all.places.erase(all.places.begin(), all.places.begin() + (all.former_end - all.first));
  all.first = all.former_end;
  all.former.clear();
  for (const auto& [code, users] : all.users) all.former.push_back(code);
  all.former_end = all.first + static_cast<int64_t>(all.places.size());
  all.users.clear();
  all.numbers.clear();
  ++all.generation;
  return gone;
}

int32_t number_of(Object* code, int offset) {
  auto& all = sites();
  const uint64_t key = reinterpret_cast<uint64_t>(code) * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(offset);
  auto found = all.numbers.find(key);
  if (found != all.numbers.end()) return found->second;
  const auto number = static_cast<int32_t>(all.first + static_cast<int64_t>(all.places.size()));
  all.places.emplace_back(reinterpret_cast<int64_t>(code), offset);
  all.numbers.emplace(key, number);
  return number;
}

thread_local int32_t fixed_site = -1;
thread_local int32_t last_site = -1;  // site of the thread's last recorded op

// Per-thread cache of sites by code object and offset, because most ops come from few places.
struct RecentSite {
  Object* code = nullptr;
  int offset = -1;
  int32_t site = -1;  // -2: the frame belongs to PyTorch or Djinn
};
constexpr size_t kRecent = 256;
thread_local RecentSite recent_sites[kRecent];
thread_local int64_t recent_generation = 0;

// Return the site's number if the frame is in the user's code, otherwise -2.
int32_t site_of_frame(const Python& py, Object* code, Object* frame) {
  const int offset = py.lasti(frame);
  if (recent_generation != sites().generation) {
    std::ranges::fill(recent_sites, RecentSite{});
    recent_generation = sites().generation;
  }
  auto& recent = recent_sites[(reinterpret_cast<uintptr_t>(code) / 32 + static_cast<uintptr_t>(offset)) % kRecent];
  if (recent.code == code && recent.offset == offset) return recent.site;
  std::vector<Object*> gone;
  {
    std::lock_guard<std::mutex> guard(sites().mutex);
    gone = make_room();
    recent = {code, offset, is_users(py, code) ? number_of(code, offset) : -2};
  }
  const int32_t site = recent.site;
  if (!gone.empty()) {
    std::ranges::fill(recent_sites, RecentSite{});
    for (Object* one : gone) py.decref(one);
  }
  return site;
}

}  // namespace

// Return the site of the innermost frame outside of PyTorch and Djinn, or of the outermost frame if there is none; -1 without frames.
int32_t user_site() {
  const auto& py = python();
  if (fixed_site >= 0) return last_site = fixed_site;
  if (!py.usable()) return -1;
  const int state = py.ensure();
  int32_t site = -1;
  Object* frame = py.frame();
  if (frame) py.incref(frame);
  while (frame) {
    Object* code = py.code(frame);
    site = site_of_frame(py, code, frame);
    Object* outer = site >= 0 ? nullptr : py.back(frame);
    if (!outer && site < 0) {
      std::lock_guard<std::mutex> guard(sites().mutex);
      site = number_of(code, py.lasti(frame));
    }
    py.decref(code);
    py.decref(frame);
    frame = outer;
  }
  py.release(state);
  last_site = site;
  return site;
}

std::mutex& sites_mutex() { return sites().mutex; }

void set_own_folders(std::vector<std::string> folders) { sites().own = std::move(folders); }

// Return the number of the first site that is kept, then code object and offset of each site from `first` on. The caller gets a reference
// to each code object.
std::vector<int64_t> sites_from(int64_t first) {
  const auto& py = python();
  auto& all = sites();
  const int state = py.ensure();
  std::unique_lock<std::mutex> guard(all.mutex);
  std::vector<int64_t> flat{all.first};
  for (auto i = static_cast<size_t>(std::max(first - all.first, int64_t{0})); i < all.places.size(); ++i) {
    py.incref(reinterpret_cast<Object*>(all.places[i].first));
    flat.push_back(all.places[i].first);
    flat.push_back(all.places[i].second);
  }
  guard.unlock();
  py.release(state);
  return flat;
}

static void limit_sites(int64_t most) { sites().most = static_cast<size_t>(most); }

TORCH_LIBRARY_FRAGMENT(djinn, m) {
  m.def("set_own_folders(str[] folders) -> ()", &set_own_folders);
  m.def("sites_from(int first) -> int[]", &sites_from);
  m.def("limit_sites(int most) -> ()", &limit_sites);
  m.def("site_of_last_op() -> int", [] { return static_cast<int64_t>(last_site); });
  m.def("fix_site(int site) -> ()", [](int64_t site) { fixed_site = static_cast<int32_t>(site); });
}

}  // namespace djinn
