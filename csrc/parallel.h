// Threads: PyTorch's own OpenMP runtime, called by name, so that there is one pool of threads and no compiler needs an
// OpenMP of its own (`#pragma omp` would make clang call functions that the runtime in PyTorch's wheels lacks). GNU's
// runtime has these four functions; LLVM's and Intel's have them too, for programs that GCC compiled.
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

// A thread of the team that runs `on_threads`.
struct Member {
  int64_t number, count;  // the runtime may give fewer threads than requested, never more

  void wait_for_all() const {
    if (count > 1) GOMP_barrier();
  }
  Range share_of(int64_t size) const { return share(size, number, count); }
};

// Numbers in turn, each to whichever thread comes first.
class Queue {
 public:
  explicit Queue(int64_t size) : size_(size) {}
  bool take(int64_t* item) { return (*item = next_.fetch_add(1, std::memory_order_relaxed)) < size_; }

 private:
  std::atomic<int64_t> next_{0};
  int64_t size_;
};

// `body(member)` on every thread of a team; returns when all have.
template <class Body>
void on_threads(int threads, const Body& body) {
  auto enter = [](void* data) {
    (*static_cast<const Body*>(data))(Member{omp_get_thread_num(), omp_get_num_threads()});
  };
  GOMP_parallel(enter, const_cast<Body*>(&body), static_cast<unsigned>(threads), 0);
}

// First `prepare(range)` for shares of [0, prepared); then every item on one of the threads, `run(scratch of the
// thread, item)`; then, when all are done, `add_up(range)` for shares of [0, sums).
template <class Prepare, class Scratch, class Run, class AddUp>
void run_items(int64_t threads, int64_t prepared, const Prepare& prepare, int64_t items, const Scratch& scratch,
               const Run& run, int64_t sums, const AddUp& add_up) {
  Queue queue(items);
  auto work = [&](const Member& me) {
    if (prepared) prepare(me.share_of(prepared)), me.wait_for_all();
    auto s = scratch(me.number);
    for (int64_t item; queue.take(&item);) run(s, item);
    if (sums) me.wait_for_all(), add_up(me.share_of(sums));
  };
  threads = least(threads, items);
  if (threads <= 1) return work(Member{0, 1});  // no parallel region: also safe in a forked child
  on_threads(static_cast<int>(threads), work);
}
inline void nothing(Range) {}

}  // namespace
