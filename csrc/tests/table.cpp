// Eight threads look calls up, store them and empty the table; what a reader found stays whole until it is done.
#include "../aten/table.h"

#include <stdio.h>

#include <atomic>
#include <thread>
#include <vector>

namespace {

constexpr int kThreads = 8, kKeys = 300, kWords = 64;
aten::Table table;
std::atomic<int> wrong{0}, found{0};

// Every word of an entry is the number of its key.
void store(int64_t number, int64_t generation) {
  aten::Key key;
  for (int64_t v : {number, number * 7, int64_t(3)}) key.add(v);
  int64_t entry[kWords];
  for (int64_t& word : entry) word = number;
  table.store(key, entry, sizeof entry, generation);
}

void look_up(int64_t number) {
  aten::Key key;
  for (int64_t v : {number, number * 7, int64_t(3)}) key.add(v);
  const int64_t generation = table.generation();
  const aten::Table::Found held = table.find(key);
  const auto* entry = static_cast<const int64_t*>(held.entry());
  if (!entry) return store(number, generation);
  found++;
  for (int i = 0; i < kWords; i++) wrong += entry[i] != number;
}

void work(int thread, int rounds) {
  uint64_t state = 88172645463325252ull + static_cast<uint64_t>(thread);
  for (int i = 0; i < rounds; i++) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    if (state % 997 == 0) table.clear();
    look_up(static_cast<int64_t>(state >> 20) % kKeys);
  }
}

}  // namespace

int main() {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; i++) threads.emplace_back(work, i, 20000);
  for (std::thread& thread : threads) thread.join();
  // Nothing that was made before the table was emptied is stored after it.
  const int64_t generation = table.generation();
  table.clear();
  store(1, generation);
  const bool stale = table.size() != 0;
  // It is bounded: a full one is emptied.
  for (int64_t i = 0; i < 3 * aten::Table::kMostEntries; i++) store(i, table.generation());
  const bool full = table.size() > aten::Table::kMostEntries || table.size() == 0;
  printf("%d wrong, %d found\n", wrong.load(), found.load());
  return wrong || !found || stale || full;
}
