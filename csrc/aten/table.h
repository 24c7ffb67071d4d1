// The table of calls: from a key of integers to the bytes of an entry. Any number of threads use it at once.
#pragma once

#include <stdint.h>
#include <string.h>

#include <memory>
#include <mutex>
#include <unordered_map>

namespace aten {

// The values that validation and choice depend on: sizes, strides, dtypes, devices, arguments, threads, flags.
struct Key {
  static constexpr int kMost = 112;
  int64_t values[kMost];
  int count = 0;

  // One value more; false from then on where there is no room.
  bool add(int64_t value) {
    if (count < kMost) values[count] = value;
    return count++ < kMost;
  }
  bool complete() const { return count <= kMost; }
  size_t bytes() const { return static_cast<size_t>(count) * sizeof(int64_t); }
  bool operator==(const Key& other) const {
    return count == other.count && memcmp(values, other.values, bytes()) == 0;
  }
};

struct HashOfKey {
  size_t operator()(const Key& key) const {
    uint64_t h = 0xcbf29ce484222325ull;
    for (int i = 0; i < key.count; i++) {
      h = (h ^ static_cast<uint64_t>(key.values[i])) * 0x9e3779b97f4a7c15ull;
      h ^= h >> 29;
    }
    return h;
  }
};

class Table {
 public:
  static constexpr size_t kMostEntries = 4096;
  using Bytes = std::shared_ptr<const char[]>;

  // The bytes stored under a key, which stay as long as somebody holds them; null if there are none.
  Bytes find(const Key& key) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(key);
    return found == entries_.end() ? nullptr : found->second;
  }

  // Store an entry under a key, in place of an earlier one; nothing happens if the table was emptied since
  // `generation`.
  void store(const Key& key, const void* entry, size_t bytes, int64_t generation) {
    const std::shared_ptr<char[]> copy(new char[bytes]);
    memcpy(copy.get(), entry, bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (generation != generation_) return;
    if (entries_.size() >= kMostEntries) entries_.clear();
    entries_[key] = copy;
  }

  // Empty the table. An entry that was being made for it is not stored.
  void clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++generation_;
    entries_.clear();
  }

  int64_t generation() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return generation_;
  }
  size_t size() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return entries_.size();
  }

  // Held over a fork, so that no other thread changes the table meanwhile.
  std::mutex& mutex() { return mutex_; }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<Key, Bytes, HashOfKey> entries_;
  int64_t generation_ = 1;
};

}  // namespace aten
