// The simulated clock, streams, the order of accesses to memory, and copies whose results the host cannot see yet.
#include "fake.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

namespace fakegpu {
namespace {

using Steady = std::chrono::steady_clock;
const Steady::time_point began = Steady::now();

double host_time = 0;
thread_local c10::DeviceIndex thread_device = 0;
thread_local std::array<int, kMaxDevices> thread_streams{};

// An issued copy between device and page-locked memory. For a download, `arrives` has the bytes, which reach the host at `done`. For an
// upload, `sum` detects a change of the source before `done`.
struct HostCopy {
  double done;
  char* host;
  size_t size;
  std::vector<char> arrives;
  uint64_t sum;
};
std::vector<HostCopy>& host_copies() {
  static auto* all = new std::vector<HostCopy>();
  return *all;
}

uint64_t sum_of(const char* data, size_t size) {
  uint64_t sum = size;
  size_t i = 0;
  for (; i + 8 <= size; i += 8) {
    uint64_t word;
    std::memcpy(&word, data + i, 8);
    sum = (sum ^ word) * 0x9E3779B97F4A7C15U + (sum >> 29);
  }
  for (; i < size; ++i) sum = sum * 31 + static_cast<unsigned char>(data[i]);
  return sum;
}

void finish_copy(HostCopy* copy) {
  if (!copy->arrives.empty()) std::memcpy(copy->host, copy->arrives.data(), copy->size);
  else if (sum_of(copy->host, copy->size) != copy->sum) {
    report_later(
        c10::str("the host changed ", copy->size, " bytes of page-locked memory while an upload read them: wait for its event first"));
  }
}

bool overlaps(const HostCopy& copy, const char* begin, size_t size) { return copy.host < begin + size && begin < copy.host + copy.size; }

// Complete a copy early. Earlier copies that overlap come first, because they may change its source or its result.
void arrive(size_t index) {
  auto& all = host_copies();
  auto& copy = all[index];
  for (size_t i = 0; i < index; ++i) {
    if (!overlaps(all[i], copy.host, copy.size)) continue;
    if (all[i].arrives.empty()) finish_copy(&all[i]);
    else arrive(i);
  }
  finish_copy(&copy);
  copy.arrives.clear();
  for (size_t i = 0; i <= index; ++i) {
    if (overlaps(all[i], copy.host, copy.size)) all[i].sum = sum_of(all[i].host, all[i].size);
  }
}

// Return the completion times of a lane's unfinished launches.
std::deque<double>& under_way(const Lane& lane) {
  static auto* all = new std::array<std::deque<double>, kLanes>();
  return (*all)[static_cast<size_t>(lane.index)];
}

void wait_for_queue(const Lane& lane) {
  double until = 0;
  {
    Guard guard(mutex());
    auto& queue = under_way(lane);
    while (!queue.empty() && queue.front() <= now()) queue.pop_front();
    const auto most = static_cast<size_t>(std::max<int64_t>(hardware().queue, 1));
    if (lane.capture || queue.size() < most) return;
    until = queue[queue.size() - most];
  }
  wait_until(until);
}

bool overlap(const Use& use, size_t begin, size_t end) { return use.begin < end && begin < use.end; }

void check_order(const Lane& lane, const Block& block, const std::vector<Use>& uses, size_t begin, size_t end, const char* op, bool write) {
  for (const auto& use : uses) {
    if (use.lane == lane.index || !overlap(use, begin, end) || is_complete(lane.seen, use)) continue;
    count("missing_waits");
    const bool wrote = &uses == &block.writes;
    TORCH_CHECK(false, "fakegpu: missing wait: ", op, " on ", lane.name(), write ? " writes" : " reads", " a block of ", block.requested,
                " bytes at 0x", std::hex, block.address, std::dec, ", which ", use.op, wrote ? " writes" : " reads", " on ",
                fakegpu::lane(use.lane).name(), ": let the stream wait for an event of the other one");
  }
}

// Add a use. Drop uses of the same lane that it covers, and uses for which no later op has to wait.
void note(std::vector<Use>* uses, const Use& added) {
  std::erase_if(*uses, [&](const Use& old) {
    const bool covered = old.lane == added.lane && added.begin <= old.begin && old.end <= added.end;
    return covered || (is_complete(host_seen(), old) && old.done <= now());
  });
  constexpr size_t kMost = 64;
  if (uses->size() < kMost) return uses->push_back(added);
  for (auto& old : *uses) {
    if (old.lane != added.lane) continue;
    old = {added.lane, added.number, std::min(old.begin, added.begin), std::max(old.end, added.end), added.done, added.op};
    return;
  }
  uses->push_back(added);
}

}  // namespace

void join(Seen* into, const Seen& other) {
  for (size_t i = 0; i < other.size(); ++i) (*into)[i] = std::max((*into)[i], other[i]);
}
bool is_complete(const Seen& seen, const Use& use) { return seen[static_cast<size_t>(use.lane)] >= use.number; }

Lane& lane(int index) {
  static auto* all = [] {
    auto* made = new std::array<Lane, kLanes>();
    for (int i = 0; i < kLanes; ++i) (*made)[static_cast<size_t>(i)].index = i;
    return made;
  }();
  return all->at(static_cast<size_t>(index));
}
std::string Lane::name() const { return c10::str("stream ", index % kStreams, " of fakegpu:", index / kStreams); }

c10::DeviceIndex current_device() { return thread_device; }
void set_current_device(c10::DeviceIndex index) { thread_device = index; }
int& current_stream(c10::DeviceIndex index) { return thread_streams.at(static_cast<size_t>(index < 0 ? thread_device : index)); }
Lane& current_lane(c10::DeviceIndex index) { return lane((index < 0 ? thread_device : index) * kStreams + current_stream(index)); }

Seen& host_seen() {
  static auto* one = new Seen(kLanes, 0);
  return *one;
}

double now() {
  const auto pace = hardware().pace;
  if (pace > 0) host_time = std::max(host_time, std::chrono::duration<double>(Steady::now() - began).count() / pace);
  return host_time;
}
void spend_issue_time() { host_time = now() + hardware().issue; }

void host_copies_are_done(double time) {
  for (auto& copy : host_copies()) {
    if (copy.done <= time) finish_copy(&copy);
  }
  std::erase_if(host_copies(), [time](const HostCopy& copy) { return copy.done <= time; });
}

void host_receives(char* host, std::vector<char> bytes, double done) {
  host_copies().push_back({done, host, bytes.size(), std::move(bytes), 0});
}
void host_lends(char* host, size_t size, double done) { host_copies().push_back({done, host, size, {}, sum_of(host, size)}); }

void forget_host_copy(const char* host) {
  Guard guard(mutex());
  std::erase_if(host_copies(), [host](const HostCopy& copy) { return copy.host == host; });
}

// Complete downloads before an upload reads their bytes. The order of both was checked.
void host_copies_arrive(const char* begin, size_t size) {
  auto& all = host_copies();
  for (size_t i = 0; i < all.size(); ++i) {
    if (!all[i].arrives.empty() && overlaps(all[i], begin, size)) arrive(i);
  }
}

void wait_until(double time) {
  for (;;) {
    double real = 0.01;
    {
      Guard guard(mutex());
      if (hardware().pace <= 0 && std::isfinite(time)) host_time = std::max(host_time, time);
      if (now() >= time) return host_copies_are_done(now());
      if (std::isfinite(time)) real = std::min(real, (time - now()) * hardware().pace);
    }
    std::this_thread::sleep_for(std::chrono::duration<double>(real));
  }
}

void synchronize(const char* cause, const Lane& with) {
  double time = 0;
  Seen seen;
  {
    Guard guard(mutex());
    check_alive();
    check_no_capture(cause);
    count("synchronizations");
    count(std::string("synchronizations of ") + cause);
    spend_issue_time();
    time = with.time;
    seen = with.seen;
  }
  wait_until(time);
  Guard guard(mutex());
  join(&host_seen(), seen);
  check_alive();
}

Launch::Launch(const char* op_, Lane& lane_, Engine engine_) : op(op_), lane(lane_), engine(engine_) {
  wait_for_queue(lane);
  Guard guard(mutex());
  check_alive();
  spend_issue_time();
  host_copies_are_done(now());
}

void Launch::uses(const at::Tensor& t, bool write) {
  Guard guard(mutex());
  auto* block = block_of(t);
  if (!block || !t.numel()) return;
  if (block->imported && lane.capture) check_no_capture("an op on memory of another process");
  const auto offset = reinterpret_cast<uintptr_t>(raw_address(t.storage().unsafeGetStorageImpl())) - block->address;
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  const auto item = t.element_size();
  const auto begin = offset + static_cast<size_t>(t.storage_offset()) * item;
  add(block, begin, begin + (static_cast<size_t>(last) + 1) * item, write);
  bytes += static_cast<double>(t.numel()) * static_cast<double>(item);
}

void Launch::add(Block* block, size_t begin, size_t end, bool write) { accesses.push_back({block, begin, end, write}); }

void Launch::check() {
  Guard guard(mutex());
  join(&lane.seen, host_seen());
  for (const auto& a : accesses) {
    check_order(lane, *a.block, a.block->writes, a.begin, a.end, op, a.write);
    if (a.write) check_order(lane, *a.block, a.block->reads, a.begin, a.end, op, true);
  }
}

double Launch::finish(double seconds) {
  Guard guard(mutex());
  if (lane.capture) return now();
  const auto number = ++lane.issued;
  lane.seen[static_cast<size_t>(lane.index)] = number;
  lane.last = op;
  auto& free = device(lane.device()).engines[static_cast<size_t>(engine)];
  const auto start = std::max({lane.time, now(), free});
  auto done = start + std::max(seconds, hardware().launch);
  done += inject_into(op, done);
  if (engine == Engine::kCompute && std::isfinite(done)) count("busy_ns", std::llround((done - start) * 1e9));
  lane.time = free = done;
  under_way(lane).push_back(done);
  for (const auto& a : accesses) {
    const Use use{lane.index, number, a.begin, a.end, done, op};
    if (a.write) {  // this op waited for all former uses of these bytes, so a wait for this op covers them
      const auto is_over = [&](const Use& old) { return a.begin <= old.begin && old.end <= a.end; };
      std::erase_if(a.block->reads, is_over);
      std::erase_if(a.block->writes, is_over);
    }
    note(a.write ? &a.block->writes : &a.block->reads, use);
  }
  return done;
}

// ---- events -------------------------------------------------------------------------------------------------------------

void record(Event* event, const Lane& lane) {
  Guard guard(mutex());
  check_alive();
  TORCH_CHECK(!lane.capture, "fakegpu: events in a captured graph are not supported");
  spend_issue_time();
  *event = {true, std::max(lane.time, now()), lane.seen};
  join(&event->seen, host_seen());
}

void wait(Lane* lane, const Event& event) {
  Guard guard(mutex());
  check_alive();
  if (!event.recorded) return;
  spend_issue_time();
  lane->time = std::max(lane->time, event.time);
  join(&lane->seen, event.seen);
}

bool query(double time, const Seen& seen) {
  Guard guard(mutex());
  check_alive();
  spend_issue_time();
  host_copies_are_done(now());
  if (now() < time) return false;
  join(&host_seen(), seen);
  return true;
}

void synchronize(const Event& event) {
  if (!event.recorded) return;
  Lane as_lane;
  as_lane.time = event.time;
  as_lane.seen = event.seen;
  synchronize("an event", as_lane);
}

}  // namespace fakegpu
