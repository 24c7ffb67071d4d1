// Cuts a problem up for planar.h: planes into groups of rows, a row into vectors of neighboring columns, and kernels
// into blocks of G rows and C columns.
//
// Vectors at a border, whose kernel elements reach past the ends of a row, have a mask for each kernel column that
// turns both factors into zeros where it lies outside: infinity times zero would be NaN.
#pragma once

#include "../vectors/plan.h"
#include "../vectors/vector.h"

namespace {

// Most kernel rows and kernel columns of a block; with several rows, one column less.
constexpr int kBlockRows = 3, kBlockColumns = 4;
// Most rows of results that are computed together; as many sums hide the latency of an addition.
constexpr int kMostRows = 8;

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

// Bytes of a group of rows: half of a first-level cache. With a kernel depth, most of what is read lies in the
// second-level cache anyway; there larger groups make fewer calls.
constexpr int64_t kGroupBytes = kTestsTiles ? kTileBytes : 16 * 1024;

// A pass, forward or grad_input: position r of a result reads r + shift + k * step of the source through
// kernel element k.
struct PlanarPass {
  int64_t result[3], source[3], kernel[3], shift[3], step[3];
  TapRange reach(int d) const { return {0, 1, shift[d], step[d], kernel[d]}; }

  // Returns the positions that a range of results reads of the source, and beyond its ends.
  Range reached_from(int d, Range r) const {
    const int64_t to_last = (kernel[d] - 1) * step[d];
    return {r.low + shift[d] + least(0, to_last), r.high + shift[d] + most(0, to_last)};
  }
  // Returns the first and the last element of a plane of the source that some slices and rows of a result read.
  Range elements_read(Range slices, Range rows) const {
    const Range d = positions_read(0, slices), h = positions_read(1, rows);
    if (d.size() == 0 || h.size() == 0) return {0, 0};
    return {(d.low * source[1] + h.low) * source[2], ((d.high - 1) * source[1] + h.high) * source[2]};
  }
  // Returns how many elements one slice and so many rows read at most.
  int64_t most_read(int64_t rows) const {
    const Range d = reached_from(0, {0, 1}), h = reached_from(1, {0, rows});
    return ((least(source[0], d.size()) - 1) * source[1] + least(source[1], h.size())) * source[2];
  }
  // Returns how far vectors reach beyond the ends of a row of the source.
  int64_t beyond_rows() const {
    const Range r = reached_from(2, {0, result[2]});
    return most(0, most(-r.low, r.high - source[2]));
  }
  Range positions_read(int d, Range r) const {
    r = reached_from(d, r);
    return {most(0, r.low), least(source[d], r.high)};
  }
};

// Bytes from which on a row is fetched ahead by the processor itself. Shorter ones, several at once, it does not see
// through; and so much memory, a power of two apart, would share a few places of the cache.
constexpr int64_t kLongRow = 2048;

struct PlanarPlan : Request {
  PlanarPass forward, backward;
  int64_t input, output;  // pixels of a plane
  int64_t rows;           // rows of a group
  int64_t ahead;          // rows from those that are computed to those whose memory is prefetched; 0: none is
  int64_t margin;         // how far beyond the ends of a row its vectors may reach
  int64_t items;          // the parallel work items; those of grad_weight have sums of their own for all channels

  int64_t units() const { return batch * channels; }
  int64_t biases() const {  // bias gradients of a channel
    return wants(CONVGRAD_TRANSPOSED_GRAD_BIAS) ? 1 : wants(CONVGRAD_GRAD_BIAS) ? multiplier : 0;
  }
  int64_t sums() const { return multiplier * kernel_elements + biases(); }  // sums of a channel
  int64_t item_sums() const { return channels * sums(); }            // all grad_weight, then all grad_bias
};

inline PlanarPlan make_planar_plan(const convgrad_problem& q, int64_t storage_bytes) {
  PlanarPlan p = {};
  p.batch = q.batch, p.channels = q.groups, p.multiplier = q.out_per_group;
  p.kernel_elements = p.input = p.output = 1, p.outputs = q.outputs, p.threads = q.threads;
  for (int d = 0; d < 3; ++d) {
    PlanarPass &f = p.forward, &b = p.backward;
    f.kernel[d] = b.kernel[d] = q.kernel[d];
    f.result[d] = b.source[d] = q.output[d], f.source[d] = b.result[d] = q.input[d];
    f.shift[d] = -q.padding[d], f.step[d] = q.dilation[d], b.shift[d] = q.padding[d], b.step[d] = -q.dilation[d];
    p.kernel_elements *= q.kernel[d], p.input *= q.input[d], p.output *= q.output[d];
  }
  p.margin = most(p.forward.beyond_rows(), p.backward.beyond_rows());
  p.rows = most(1, kGroupBytes * (q.kernel[0] > 1 ? 2 : 1) / most(1, (q.input[2] + q.output[2]) * storage_bytes));
  const bool prefetched = most(q.input[2], q.output[2]) * storage_bytes > kLongRow;
  p.ahead = prefetched ? 0 : least(p.rows, kMostRows) + (q.kernel[1] - 1) * q.dilation[1] + 1;
  p.items = least(p.units(), p.threads == 1 ? 1 : (p.wants(CONVGRAD_GRAD_WEIGHT) ? 4 : 8) * p.threads);
  return p;
}

}  // namespace
