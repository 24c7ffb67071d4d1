// Rows of grad_weight. A block's sums stay in registers. Up to 4 rows of grad_output are multiplied together, a vector
// of each, so that a vector of the input is loaded once for all kernel rows of the block.
//
// What limits it: the bytes for up to 9 kernel elements; for 27 the multiply-adds take nearly as long.
#pragma once

#include "../vectors/prefetcher.h"
#include "../vectors/reduce.h"
#include "planar_plan.h"

namespace {

// Rows of grad_output, and of the input that a block's first element reads with them.
template <class S, class T>
struct PlanarProducts {
  RowVectors<T> columns;
  const S *grad, *input;
  int64_t rows, grad_at, grad_row, input_at, input_row, column;
  int64_t weight_row;  // from a kernel row's sums to the next one's
  const S *input_ahead, *grad_ahead;  // beside the first row: memory to prefetch meanwhile, or null
};

// sum[c][g] += grad[r] * input[r + g, c] for R rows.
template <class T, int N, int R, int G, int C, class S>
struct AccumulateRows {
  const PlanarProducts<S, T>& p;
  Vec<T, N> (&sum)[C][G];

  template <bool Masked>
  void vector(int64_t grad, int64_t input, const LaneInteger<T>* masks) const {
    Vec<T, N> y[R];
    UNROLL for (int r = 0; r < R; ++r) y[r] = load<T, N>(p.grad + grad + r * p.grad_row);
    UNROLL for (int c = 0; c < C; ++c) {
      const Mask<T, N> mask = Masked ? load<LaneInteger<T>, N>(masks + c * N) : Mask<T, N>{};
      Vec<T, N> grads[R];
      UNROLL for (int r = 0; r < R; ++r) grads[r] = Masked ? masked<T, N>(y[r], mask) : y[r];
      const S* from = opaque(p.input + input + c * p.column);
      UNROLL for (int i = 0; i < R + G - 1; ++i, from = opaque(from + p.input_row)) {
        Vec<T, N> x = load<T, N>(from);
        if (Masked) x = masked<T, N>(x, mask);
        x = opaque(x);
        UNROLL for (int g = 0; g < G; ++g)
          if (i >= g && i - g < R) sum[c][g] += grads[i - g] * x;
      }
    }
  }

  // Rows in blocks of R, as long as a block is left.
  void all(int64_t& grad, int64_t& input, int64_t& left) const {
    for (; left >= R; left -= R, grad += R * p.grad_row, input += R * p.input_row) {
      const S* const input_ahead = p.input_ahead ? p.input_ahead + (input - p.input_at) : nullptr;
      const S* const grad_ahead = p.grad_ahead ? p.grad_ahead + (grad - p.grad_at) : nullptr;
      int64_t done = 0;
      auto prefetch_next = [&] {
        if (input_ahead) prefetch<0>(input_ahead + done, R * N);
        if (grad_ahead) prefetch<0>(grad_ahead + done, R * N);
        done += R * N;
      };
      p.columns.template each<N>(
          C, [&](int64_t column) { prefetch_next(), vector<false>(grad + column, input + column, nullptr); },
          [&](int64_t column, const LaneInteger<T>* masks) {
            prefetch_next(), vector<true>(grad + column, input + column, masks);
          });
    }
  }
};

// sums += what the rows give to a block's elements, lane by lane.
template <class T, int N, class S, int G, int C>
void accumulate_planar(T* sums, const PlanarProducts<S, T>& p) {
  Vec<T, N> sum[C][G] = {};
  int64_t grad = p.grad_at, input = p.input_at, left = p.rows;
  AccumulateRows<T, N, 4, G, C, S>{p, sum}.all(grad, input, left);
  AccumulateRows<T, N, 2, G, C, S>{p, sum}.all(grad, input, left);
  AccumulateRows<T, N, 1, G, C, S>{p, sum}.all(grad, input, left);
  UNROLL for (int c = 0; c < C; ++c)
    UNROLL for (int g = 0; g < G; ++g) add_to<T, N>(sums + g * p.weight_row + c * N, sum[c][g]);
}

}  // namespace
