// Threads and their scratch memory. The threads are those of PyTorch's own OpenMP runtime, called by name, so that
// there is one pool of threads and no compiler needs an OpenMP of its own (`#pragma omp` would make clang call
// functions that the runtime in PyTorch's wheels lacks). GNU's runtime has these four functions; LLVM's and Intel's
// have them too, for programs that GCC compiled.
#pragma once

#include <atomic>

#include "plan.h"

extern "C" {
void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags);
void GOMP_barrier(void);
int omp_get_thread_num(void);
int omp_get_num_threads(void);
}

namespace {

// An array in scratch memory, where a plan says; it begins on a cache line. Null where it has no elements.
template <class E>
struct Array {
  int64_t offset, bytes;
  E* in(char* memory) const { return bytes ? reinterpret_cast<E*>(memory + offset) : nullptr; }
};

struct Layout {
  int64_t bytes = 0;

  template <class E>
  Array<E> add(int64_t elements) {
    const Array<E> array = {bytes, round_up(elements * int64_t(sizeof(E)), 64)};
    bytes += array.bytes;
    return array;
  }
};

// Scratch memory: what all threads share, and after it what each has for itself.
struct Memory {
  Layout shared, each;
  char* of_thread(char* memory, int64_t thread) const { return memory + shared.bytes + thread * each.bytes; }
  int64_t bytes(int64_t threads) const { return most(64, shared.bytes + threads * each.bytes); }
};

// First `prepare(range, scratch of the thread)` for shares of [0, prepared); then every item on whichever thread is
// free, `run(scratch, item)`; then, when all are done, `add_up(range)` for shares of [0, sums).
template <class Prepare, class Scratch, class RunItem, class AddUp>
void run_items(int64_t threads, int64_t prepared, const Prepare& prepare, int64_t items, const Scratch& scratch,
               const RunItem& run, int64_t sums, const AddUp& add_up) {
  std::atomic<int64_t> next{0};
  auto work = [&](int64_t thread, int64_t count) {  // the runtime may give fewer threads than requested, never more
    auto wait_for_all = [&] { count > 1 ? GOMP_barrier() : void(); };
    auto s = scratch(thread);
    if (prepared) prepare(share(prepared, thread, count), s), wait_for_all();
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) run(s, item);
    if (sums) wait_for_all(), add_up(share(sums, thread, count));
  };
  threads = least(threads, items);
  if (threads <= 1) return work(0, 1);  // no parallel region: also safe in a forked child
  auto enter = [](void* data) { (*static_cast<decltype(work)*>(data))(omp_get_thread_num(), omp_get_num_threads()); };
  GOMP_parallel(enter, &work, static_cast<unsigned>(threads), 0);
}
constexpr auto nothing = [](auto&&...) {};
// Returns a function that runs `body(i)`, or with a thread's scratch `body(i, scratch)`, for each i of a share.
template <class Body>
auto each(const Body& body) {
  return [body](Range share, auto&&... scratch) {
    for (int64_t i = share.low; i < share.high; ++i) body(i, scratch...);
  };
}

// Runs items alone.
template <class RunItem>
void run_items(int64_t threads, int64_t items, const RunItem& run) {
  run_items(threads, 0, nothing, items, [](int64_t) { return 0; }, [&](int, int64_t item) { run(item); }, 0, nothing);
}

}  // namespace
