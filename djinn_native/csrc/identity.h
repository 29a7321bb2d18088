// Identification of equal programs and inputs: values are numbered by first appearance and hashed.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

namespace djinn {

// Assigns numbers to keys by first appearance. A hash table with open addressing.
struct Numbers {
  std::vector<int64_t> keys;    // key in each slot of the table
  std::vector<int32_t> places;  // number in each slot; -1: empty slot
  std::vector<int64_t> order;   // key of each number
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
  // Return the key's number, and true if the key is new.
  std::pair<int32_t, bool> add(int64_t key) {
    const size_t at = place_of(key);
    if (places[at] >= 0) return {places[at], false};
    keys[at] = key;
    places[at] = static_cast<int32_t>(order.size());
    order.push_back(key);
    return {places[at], true};
  }
};

// Programs with equal hashes count as equal, without a comparison, which would take as long as the hash. A collision would run the plan
// of another program. Each step is a bijection of both halves, so two different programs collide with a probability of 2^-128, and any
// two of a million with 2^-89. The hash never leaves the process, so an attacker cannot search for collisions.
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
