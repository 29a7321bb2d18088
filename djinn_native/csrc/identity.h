// What identifies programs and inputs: numbers by first appearance, and a hash.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

namespace djinn {

// Numbers of keys by first appearance, in an open table.
struct Numbers {
  std::vector<int64_t> keys;    // by place
  std::vector<int32_t> places;  // numbers by place; -1: unused
  std::vector<int64_t> order;   // keys by number
  size_t mask = 0;

  void begin(size_t most) {
    const size_t size = std::bit_ceil(std::max<size_t>(2 * most, 16));
    if (keys.size() < size) keys.resize(size);
    places.assign(size, -1);
    order.clear();
    mask = size - 1;
  }
  size_t place_of(int64_t key) const {
    size_t at = (static_cast<uint64_t>(key) * 0x9e3779b97f4a7c15ull >> 32) & mask;
    while (places[at] >= 0 && keys[at] != key) at = (at + 1) & mask;
    return at;
  }
  int32_t find(int64_t key) const { return places[place_of(key)]; }
  // The number, and whether the key is new.
  std::pair<int32_t, bool> add(int64_t key) {
    const size_t at = place_of(key);
    if (places[at] >= 0) return {places[at], false};
    keys[at] = key;
    places[at] = static_cast<int32_t>(order.size());
    order.push_back(key);
    return {places[at], true};
  }
};

// A hit of the hash is not verified, because that would read as many numbers as the hash itself. A wrong hit would run the plan of another
// program. Each step is a bijection of both halves, so two programs that differ have equal hashes with odds of 2^-128: 2^-89 for
// any two of a million. The numbers are the process's own and the hash stays in it, so nobody can look for collisions.
struct Hash {
  uint64_t low = 0x243f6a8885a308d3ull, high = 0x13198a2e03707344ull;
  void add(int64_t number) {
    const auto v = static_cast<uint64_t>(number);
    low = std::rotl(low ^ v * 0x9e3779b97f4a7c15ull, 29) * 0xbf58476d1ce4e5b9ull;
    low ^= low >> 32;
    high = std::rotl(high + (v ^ 0xa4093822299f31d0ull) * 0xff51afd7ed558ccdull, 31) * 0xc4ceb9fe1a85ec53ull;
    high ^= high >> 29;
  }
};

}  // namespace djinn
