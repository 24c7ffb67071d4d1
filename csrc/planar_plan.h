// How planar.h cuts a problem up, and which problems it takes.
#pragma once

#include "plan.h"
#include "planar_kernels.h"

namespace {

// Bytes of a group of rows: half of a first-level cache. With a kernel depth, most of what is read lies in the
// second-level cache anyway; there larger groups make fewer calls.
constexpr int64_t kGroupBytes = kTestsTiles ? kTileBytes : 16 * 1024;

// What forward and grad_input have in common: position r of a result reads r + shift + k * step of the source through
// kernel element k.
struct PlanarPass {
  int64_t result[3], source[3], kernel[3], shift[3], step[3];
  TapRange reach(int d) const { return {0, 1, shift[d], step[d], kernel[d]}; }
};

// Bytes from which on a row is fetched ahead by the processor itself. Shorter ones, several at once, it does not see
// through; and so much memory, a power of two apart, would share a few places of the cache.
constexpr int64_t kLongRow = 2048;

struct PlanarPlan : Request {
  PlanarPass forward, backward;
  int64_t input, output;  // pixels of a plane
  int64_t rows;           // of a group
  int64_t ahead;          // rows from those that are computed to those whose memory is prefetched; 0: none is
  int64_t items;          // the parallel work items; those of grad_weight have sums of their own for all channels

  int64_t units() const { return batch * channels; }
  int64_t biases() const {  // bias gradients of a channel
    return wants(CONVGRAD_TRANSPOSED_GRAD_BIAS) ? 1 : wants(CONVGRAD_GRAD_BIAS) ? multiplier : 0;
  }
  int64_t sums() const { return multiplier * kernel_elements + biases(); }  // of a channel
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
  p.rows = most(1, kGroupBytes * (q.kernel[0] > 1 ? 2 : 1) / most(1, (q.input[2] + q.output[2]) * storage_bytes));
  const bool prefetched = most(q.input[2], q.output[2]) * storage_bytes > kLongRow;
  p.ahead = prefetched ? 0 : least(p.rows, kMostRows) + (q.kernel[1] - 1) * q.dilation[1] + 1;
  p.items = least(p.units(), p.threads == 1 ? 1 : (p.wants(CONVGRAD_GRAD_WEIGHT) ? 4 : 8) * p.threads);
  return p;
}

// The vectors of a row, N lanes wide.
template <class T, int N>
struct PlanarColumns {
  static int64_t vectors(int64_t width) { return ceil_div(width, N); }

  // Whether all lanes of a vector of results read inside the source through every kernel column.
  static bool inside(const PlanarPass& p, int64_t at) {
    const int64_t reach = (p.kernel[2] - 1) * p.step[2], low = at + p.shift[2] + least(0, reach);
    return low >= 0 && at + N - 1 + p.shift[2] + most(0, reach) < p.source[2];
  }

  // The last vector begins early enough to be full. `once`: lanes that the vector before has too are masked.
  static RowVectors<T> list(const PlanarPass& p, bool once, int64_t* at, LaneInteger<T>* masks) {
    const int64_t width = p.result[2];
    RowVectors<T> row = {0, 0, 0, 0, at, masks};
    for (int64_t i = 0; i < vectors(width); ++i) {
      const int64_t from = least(i * N, width - N);
      if (from == i * N && inside(p, from)) {
        if (row.middle++ == 0) row.first = from;
        continue;
      }
      *at++ = from;
      ++(row.middle ? row.right : row.left);
      for (int64_t k = 0; k < p.kernel[2]; ++k)
        for (int64_t l = 0; l < N; ++l) {
          const int64_t result = from + l, source = result + p.shift[2] + k * p.step[2];
          const bool counts = !once || result >= i * N;
          *masks++ = counts && source >= 0 && source < p.source[2] ? -1 : 0;
        }
    }
    return row;
  }

  // ---- what is taken ----

  // What these kernels can compute: small kernels with stride 1, and rows of at least a vector. They are faster than
  // packing where a slice is large enough for what a call of the loops costs, which grows with the kernel's rows, and
  // where there are planes enough for all threads.
  static bool takes(const convgrad_problem& q, int64_t storage_bytes) {
    for (int d = 0; d < 3; ++d)
      if (q.stride[d] != 1) return false;
    if (q.padding_mode) return false;
    const int64_t fewest = 128 * (q.kernel[1] + (q.kernel[0] > 1)) * (storage_bytes < 4 ? 2 : 1);
    return q.layout == CONVGRAD_CONTIGUOUS && q.kernel[1] <= kBlockRows &&
           q.kernel[2] <= kBlockColumns - (q.kernel[1] > 1) && least(q.input[2], q.output[2]) >= N &&
           (kTestsTiles || (q.output[1] * q.output[2] >= fewest && q.batch * q.groups >= 4 * q.threads));
  }
};

}  // namespace
