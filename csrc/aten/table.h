// The table of calls: from a key of integers to the bytes of an entry. Any number of threads use it at once. No
// container of the C++ library: those of GCC 11 and later would need its newest version.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <mutex>
#include <new>
#include <utility>

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
  uint64_t hash() const {
    uint64_t h = 0xcbf29ce484222325ull;
    for (int i = 0; i < count; i++) h = (h ^ static_cast<uint64_t>(values[i])) * 0x9e3779b97f4a7c15ull, h ^= h >> 29;
    return h;
  }
};

class Table {
  struct Node {
    Node* next;
    std::atomic<int64_t> holders;  // the table, and whoever found it
    Key key;
  };

 public:
  static constexpr int64_t kMostEntries = 4096;

  // Holds what was found under a key, so that it is not freed.
  class Found {
   public:
    Found() = default;
    explicit Found(Node* node) : node_(node) { node_->holders++; }
    Found(Found&& other) noexcept : node_(std::exchange(other.node_, nullptr)) {}
    Found& operator=(Found&& other) noexcept { return std::swap(node_, other.node_), *this; }
    ~Found() { release(node_); }

    const void* entry() const { return node_ ? node_ + 1 : nullptr; }  // null if nothing was found

   private:
    Node* node_ = nullptr;
  };

  Found find(const Key& key) {
    Node* const* const first = &buckets_[key.hash() % kBuckets];
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Node* node = *first; node; node = node->next)
      if (node->key == key) return Found(node);
    return {};
  }

  // Store an entry under a key, in place of an earlier one; nothing happens without memory, or if the table was emptied
  // since `generation`.
  void store(const Key& key, const void* entry, size_t bytes, int64_t generation) {
    void* const memory = malloc(sizeof(Node) + bytes);
    if (!memory) return;
    Node* const node = new (memory) Node{nullptr, {1}, key};
    memcpy(static_cast<char*>(memory) + sizeof(Node), entry, bytes);
    Node** place = &buckets_[key.hash() % kBuckets];
    const std::lock_guard<std::mutex> lock(mutex_);
    if (generation != generation_) return release(node);
    if (size_ >= kMostEntries) take_all();
    while (*place && !((*place)->key == key)) place = &(*place)->next;
    Node* const old = std::exchange(*place, node);
    if (!old) return void(++size_);
    node->next = old->next;
    release(old);
  }

  // Empty the table. An entry that was being made for it is not stored.
  void clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++generation_;
    take_all();
  }

  int64_t generation() const { return generation_; }
  int64_t size() const { return size_; }

  // Held over a fork, so that no other thread changes the table meanwhile.
  std::mutex& mutex() { return mutex_; }

 private:
  static constexpr uint64_t kBuckets = 8192;

  static void release(Node* node) {
    if (node && --node->holders == 0) free(node);
  }

  void take_all() {
    for (Node*& first : buckets_)
      while (Node* node = first) first = node->next, release(node);
    size_ = 0;
  }

  std::mutex mutex_;
  Node* buckets_[kBuckets] = {};
  std::atomic<int64_t> generation_{1}, size_{0};
};

}  // namespace aten
