// Rows of forward or grad_input. Up to 8 rows are computed together, a vector of each: a vector of the source is loaded
// once for all kernel rows of a block that reach it, and a weight once for all rows. That many sums hide the latency of
// an addition; of fewer rows, each has several.
//
// What limits it: the bytes for up to 9 kernel elements, at a copy's speed on 56x56; for 27 the multiply-adds take
// nearly as long.
#pragma once

#include "../vectors/prefetcher.h"
#include "planar_plan.h"

namespace {

// Rows of results and what they are computed from.
template <class S, class T>
struct PlanarResults {
  RowVectors<T> columns;
  const S* source;
  S* result;
  int64_t rows, result_row;
  int64_t first, source_row, column;  // `first`: offset of what kernel element 0 of a block at 0 reads for result 0
  const T* weights;                   // a vector for each kernel element
  int64_t weight_row;                 // from a kernel row's weights to the next one's
  T start;                            // of the sums: the bias, or zero
  const KernelBlock* blocks;
  int64_t count;    // of the blocks
  const S* newest;  // of the source, beside `first`: the slice that no result before this one has read
  int64_t ahead;    // how far ahead of what is computed memory is prefetched, in elements; 0: none is
};

// result[r] = start + sum over the blocks' elements of weight * source[r + row, column], for R rows. Kept: there is
// one block, whose weights stay in registers; its sums are short, and the processor computes several vectors at once
// anyway. Else each result has U sums.
template <class T, int N, int R, int G, int C, bool Kept, class S>
struct CorrelateRows {
  static constexpr int U = Kept ? 1 : kMostRows / R < C ? kMostRows / R : C;
  using Weights = Vec<T, N>[C][G];
  const PlanarResults<S, T>& s;

  template <bool Masked>
  void vector(const Weights& kept, S* to, int64_t first, const LaneInteger<T>* masks) const {
    const int64_t source_row = s.source_row, column = s.column, weight_row = s.weight_row, result_row = s.result_row;
    const S* const source = s.source + first;
    Vec<T, N> sum[U][R] = {};
    UNROLL for (int r = 0; r < R; ++r) sum[0][r] += s.start;
    for (const KernelBlock *block = s.blocks, *const end = block + s.count; block != end; ++block) {
      const T* const weights = s.weights + block->weight;
      const S* const from = source + block->source;
      UNROLL for (int c = 0; c < C; ++c) {
        const Mask<T, N> mask = Masked ? load<LaneInteger<T>, N>(masks + c * N) : Mask<T, N>{};
        Vec<T, N> w[G];
        UNROLL for (int g = 0; g < G; ++g) {
          w[g] = Kept ? kept[c][g] : load<T, N>(weights + g * weight_row + c * N);
          if (Masked) w[g] = masked<T, N>(w[g], mask);
        }
        const S* row = opaque(from + c * column);
        UNROLL for (int i = 0; i < R + G - 1; ++i, row = opaque(row + source_row)) {
          Vec<T, N> x = load<T, N>(row);
          if (Masked) x = masked<T, N>(x, mask);
          x = opaque(x);
          UNROLL for (int g = 0; g < G; ++g)
            if (i >= g && i - g < R) sum[c % U][i - g] += w[g] * x;
        }
      }
    }
    UNROLL for (int r = 0; r < R; ++r) {
      UNROLL for (int u = 1; u < U; ++u) sum[0][r] += sum[u][r];
      store<T, N>(to, sum[0][r]);
      to += result_row;
    }
  }

  // Rows in blocks of R, as long as a block is left.
  void all(S*& to, int64_t& first, int64_t& left) const {
    if (left < R) return;
    Weights kept = {};
    if constexpr (Kept) {
      UNROLL for (int c = 0; c < C; ++c)
        UNROLL for (int g = 0; g < G; ++g)
          kept[c][g] = load<T, N>(s.weights + s.blocks[0].weight + g * s.weight_row + c * N);
    }
    for (; left >= R; left -= R, to += R * s.result_row, first += R * s.source_row) {
      int64_t ahead = s.ahead;
      auto prefetch_next = [&] {
        if (ahead == 0) return;
        prefetch<0>(s.newest + (first - s.first) + ahead, R * N), prefetch<1>(to + ahead, R * N);
        ahead += R * N;
      };
      s.columns.template each<N>(
          C, [&](int64_t column) { prefetch_next(), vector<false>(kept, to + column, first + column, nullptr); },
          [&](int64_t column, const LaneInteger<T>* masks) {
            prefetch_next(), vector<true>(kept, to + column, first + column, masks);
          });
    }
  }
};

template <class T, int N, class S, int G, int C>
void correlate_planar(const PlanarResults<S, T>& s) {
  S* to = s.result;
  int64_t first = s.first, left = s.rows;
  CorrelateRows<T, N, kMostRows, G, C, false, S>{s}.all(to, first, left);
  CorrelateRows<T, N, 4, G, C, false, S>{s}.all(to, first, left);
  if (s.count == 1) {
    CorrelateRows<T, N, 2, G, C, true, S>{s}.all(to, first, left);
    CorrelateRows<T, N, 1, G, C, true, S>{s}.all(to, first, left);
  } else {
    CorrelateRows<T, N, 2, G, C, false, S>{s}.all(to, first, left);
    CorrelateRows<T, N, 1, G, C, false, S>{s}.all(to, first, left);
  }
}

}  // namespace
