// Memory that the next unit of work will read and write, prefetched while this one computes: a line for every so many
// multiply-adds, so that neither waits for the other. The processor's own prefetching does that for long runs; short
// planes are over before it has seen their order. docs/kernels.md has what that gains.
#pragma once

#include "plan.h"

namespace {

// Memory of a tensor is prefetched this far ahead of the pixels that are computed: far enough for it to answer in time,
// near enough to stay in the first-level cache.
constexpr int64_t kAheadBytes = 8192;

// Prefetch `elements` from an address on.
template <int Write, class T>
inline void prefetch(const T* from, int64_t elements) {
  const char* at = reinterpret_cast<const char*>(from);
  for (int64_t i = 0; i < elements * int64_t(sizeof(T)); i += 64) __builtin_prefetch(at + i, Write);
  asm volatile("");  // else the compiler finds that nothing here has an effect, and leaves it out
}

class Prefetcher {
 public:
  // Forget what was not prefetched.
  void clear() { parts_ = 0, lines_ = credit_ = rate_ = 0; }

  void add(const void* from, int64_t bytes, bool write) {
    part_[parts_++] = {static_cast<const char*>(from), ceil_div(bytes, kLineBytes), write};
    lines_ += ceil_div(bytes, kLineBytes);
  }

  // Spread the prefetching over so many multiply-adds.
  void within(int64_t work) { rate_ = ceil_div(lines_ * kLine, most(work, 1)); }

  // Returns the credit of so many multiply-adds.
  int64_t due(int64_t work) const { return rate_ * work; }
  void advance(int64_t due) {
    for (credit_ += due; credit_ >= kLine && parts_ > 0; credit_ -= kLine) {
      Part& part = part_[parts_ - 1];
      if (part.write)
        __builtin_prefetch(part.at, 1);
      else
        __builtin_prefetch(part.at, 0);
      part.at += kLineBytes;
      if (--part.lines == 0 && --parts_ == 0) return clear();
    }
  }

 private:
  struct Part {
    const char* at;
    int64_t lines;
    bool write;
  };
  static constexpr int64_t kLineBytes = 64;
  static constexpr int64_t kLine = 1 << 16;  // of credit, which counts fractions of lines
  Part part_[4];  // input, grad_output, output, grad_input
  int parts_;
  int64_t lines_, credit_, rate_;
};

}  // namespace
