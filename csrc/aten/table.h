// The table of calls: from a key of integers to an entry. Any number of threads read it without a lock.
//
// A reader announces itself, looks an entry up, and uses it until it says that it is done. What a writer takes out of
// the table is freed when no reader is there that may have found it before.
#pragma once

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <new>

namespace aten {

// What validation and choice depend on: sizes, strides, dtypes, devices, arguments, threads, flags.
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
  uint64_t hash() const {
    uint64_t h = 0xcbf29ce484222325ull;
    for (int i = 0; i < count; i++) h = (h ^ static_cast<uint64_t>(values[i])) * 0x9e3779b97f4a7c15ull, h ^= h >> 29;
    return h;
  }
};

class Table {
 public:
  static constexpr uint64_t kBuckets = 8192;
  static constexpr int64_t kMostEntries = 4096;

  // While one is alive, no entry that it found is freed.
  class Reader {
   public:
    explicit Reader(Table& table) : count_(table.reading_[stripe()].count) { count_.fetch_add(1); }
    ~Reader() { count_.fetch_sub(1, std::memory_order_release); }
    Reader(const Reader&) = delete;

   private:
    std::atomic<int64_t>& count_;
  };

  // The bytes stored under a key; null if there are none. Valid while the reader is alive.
  const void* find(const Key& key, const Reader&) const {
    for (Node* node = buckets_[key.hash() % kBuckets].load(); node; node = node->next.load())
      if (node->key_bytes == key.bytes() && memcmp(node->key(), key.values, key.bytes()) == 0) return node->entry();
    return nullptr;
  }

  int64_t generation() const { return generation_.load(); }
  int64_t size() const { return size_.load(); }

  // Store an entry under a key, in place of an earlier one; nothing happens if the table was emptied since
  // `generation`, or without memory.
  void store(const void* key, size_t key_bytes, const void* entry, size_t entry_bytes, int64_t generation) {
    const size_t bytes = rounded(sizeof(Node)) + rounded(key_bytes) + rounded(entry_bytes);
    auto* node = static_cast<Node*>(aligned_alloc(64, bytes));
    if (!node) return;
    new (node) Node{{nullptr}, nullptr, key_bytes};
    memcpy(node->key(), key, key_bytes);
    memcpy(node->entry(), entry, entry_bytes);
    Key probe;
    memcpy(probe.values, key, key_bytes);
    probe.count = static_cast<int>(key_bytes / sizeof(int64_t));
    pthread_mutex_lock(&writing_);
    if (generation != generation_.load()) {
      free(node);
    } else {
      if (size_.load() >= kMostEntries) take_all();
      std::atomic<Node*>* place = &buckets_[probe.hash() % kBuckets];
      node->next.store(place->load(), std::memory_order_relaxed);
      place->store(node);
      size_.fetch_add(1);
      for (place = &node->next; Node* old = place->load(); place = &old->next) {
        if (old->key_bytes != key_bytes || memcmp(old->key(), key, key_bytes) != 0) continue;
        place->store(old->next.load());
        retire(old);
        break;
      }
    }
    free_retired();
    pthread_mutex_unlock(&writing_);
  }

  // Empty the table. An entry that was being made for it is not stored.
  void clear() {
    pthread_mutex_lock(&writing_);
    generation_.fetch_add(1);
    take_all();
    free_retired();
    pthread_mutex_unlock(&writing_);
  }

  void before_fork() { pthread_mutex_lock(&writing_); }
  void in_parent_after_fork() { pthread_mutex_unlock(&writing_); }
  // The readers of other threads are not in the child.
  void in_child_after_fork() {
    for (Count& one : reading_) one.count.store(0);
    pthread_mutex_unlock(&writing_);
  }

 private:
  struct Node {
    std::atomic<Node*> next;
    Node* next_retired;
    size_t key_bytes;
    char* key() { return reinterpret_cast<char*>(this) + rounded(sizeof(Node)); }
    char* entry() { return key() + rounded(key_bytes); }
  };
  struct alignas(64) Count {
    std::atomic<int64_t> count{0};
  };

  static constexpr size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }

  // One counter for many threads would be fetched from the other cores at each call.
  static size_t stripe() {
    static std::atomic<size_t> threads{0};
    static thread_local size_t mine = 0;
    if (mine == 0) mine = 1 + threads.fetch_add(1) % kStripes;
    return mine - 1;
  }

  void retire(Node* node) {
    node->next_retired = retired_;
    retired_ = node;
    size_.fetch_sub(1);
  }

  void take_all() {
    for (std::atomic<Node*>& bucket : buckets_)
      for (Node* node = bucket.exchange(nullptr); node; node = node->next.load()) retire(node);
  }

  // Whoever reads now began before or after the retired entries left the table; only the former can hold one of them.
  // A counter that is 0 after they left has no reader of the former kind.
  void free_retired() {
    if (!retired_) return;
    for (Count& one : reading_)
      if (one.count.load() != 0) return;
    while (Node* node = retired_) {
      retired_ = node->next_retired;
      free(node);
    }
  }

  static constexpr size_t kStripes = 32;
  std::atomic<Node*> buckets_[kBuckets] = {};
  Count reading_[kStripes];
  std::atomic<int64_t> generation_{1}, size_{0};
  Node* retired_ = nullptr;
  pthread_mutex_t writing_ = PTHREAD_MUTEX_INITIALIZER;
};

}  // namespace aten
