// What the loops of planar.h work on: rows of a tensor, seen as vectors of neighbouring columns of one channel, and
// blocks of G kernel rows and C kernel columns.
//
// Vectors at a border, whose kernel elements reach past the ends of a row, have a mask for each kernel column that
// turns what lies outside into zeros. Infinity times zero is NaN: where there is one, and in rows whose vectors would
// reach past the ends of the tensor, slower loops leave what lies outside out of the sums (planar_exact.h).
#pragma once

#include "prefetcher.h"
#include "vector.h"

namespace {

// Most kernel rows and kernel columns of a block; with several rows, one column less.
constexpr int kBlockRows = 3, kBlockColumns = 4;
// Most rows of results that are computed together; as many sums hide the latency of an addition.
constexpr int kMostRows = 8;

// A tensor and its elements; vectors may reach past its ends.
template <class S>
struct Bounded {
  const S* data;
  int64_t size;
};

// The elements that the vectors of some rows reach to, from the first to the last one.
struct Reached {
  int64_t low, high, size;
  bool inside() const { return low >= 0 && high < size; }
};
// Fewer rows, where only the first one begins before the tensor, or the last one ends behind it.
inline int64_t without_ends(const Reached& r, int64_t positions) {
  return r.inside() || positions == 1 ? positions : r.low < 0 ? 1 : positions - 1;
}

// Where a block of kernel elements begins: offsets in elements.
struct KernelBlock {
  int64_t source, weight;
};

// The vectors of a row. Those at its left and its right border have masks for each kernel column.
template <class T>
struct RowVectors {
  int64_t left, middle, right;  // how many
  int64_t first;                // column of the first one in the middle, from where they follow one another
  const int64_t* at;            // columns of the others
  const LaneInteger<T>* masks;

  // inside(column) and at_border(column, masks) for all vectors, from left to right; `kernel`: columns of the kernel.
  template <int N, class Inside, class AtBorder>
  void each(int64_t kernel, Inside&& inside, AtBorder&& at_border) const {
    for (int64_t j = 0;; ++j) {
      if (j == left)
        for (int64_t i = 0; i < middle; ++i) inside(first + i * N);
      if (j == left + right) return;
      at_border(at[j], masks + j * kernel * N);
    }
  }
};

}  // namespace
