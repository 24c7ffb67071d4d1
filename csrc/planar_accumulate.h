// Rows of grad_weight. A block's sums stay in registers. Up to 4 rows of grad_output are multiplied together, a vector
// of each, so that a vector of the input is loaded once for all kernel rows of the block.
//
// What limits it: the bytes for up to 9 kernel elements. For 27 the multiply-adds take nearly as long: from the
// second-level cache, a Zen 3 needs 2.6 cycles for a float32 element of grad_output where two multiply-adds a cycle
// would need 1.7. 3x3x3 kernels on slices of 56x56 take 0.65 to 0.75 of the time that packing takes.
#pragma once

#include "planar_rows.h"

namespace {

// Rows of grad_output, and of the input that a block's first element reads with them.
template <class S, class T>
struct Pairs {
  RowVectors<T> columns;
  Bounded<S> grad, input;
  int64_t rows, grad_at, grad_row, input_at, input_row, column;
  int64_t weight_row;  // from a kernel row's sums to the next one's
  const S *input_ahead, *grad_ahead;  // beside the first row: memory to ask for meanwhile, or null
};

// sum[c][g] += grad[r] * input[r + g, c] for R rows.
template <class T, int N, int R, int G, int C, class S>
struct AccumulateRows {
  const Pairs<S, T>& p;
  Vec<T, N> (&sum)[C][G];

  template <bool Masked>
  void vector(int64_t grad, int64_t input, const MaskElement<T>* masks) const {
    Vec<T, N> y[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) y[r] = load<T, N>(p.grad.data + grad + r * p.grad_row);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      const Vec<T, N> mask = Masked ? load_mask<T, N>(masks + c * N) : Vec<T, N>{};
      const S* from = opaque(p.input.data + input + c * p.column);
#pragma GCC unroll 6
      for (int i = 0; i < R + G - 1; ++i, from = opaque(from + p.input_row)) {
        Vec<T, N> x = load<T, N>(from);
        if (Masked) x = masked<T, N>(x, mask);
        x = opaque(x);
#pragma GCC unroll 3
        for (int g = 0; g < G; ++g)
          if (i >= g && i - g < R) sum[c][g] += y[i - g] * x;
      }
    }
  }

  // As many times R rows as there are.
  void all(int64_t& grad, int64_t& input, int64_t& left) const {
    for (; left >= R; left -= R, grad += R * p.grad_row, input += R * p.input_row) {
      const S* const input_ahead = p.input_ahead ? p.input_ahead + (input - p.input_at) : nullptr;
      const S* const grad_ahead = p.grad_ahead ? p.grad_ahead + (grad - p.grad_at) : nullptr;
      int64_t asked = 0;
      auto ask = [&] {
        if (input_ahead) ask_for<0>(input_ahead + asked, R * N);
        if (grad_ahead) ask_for<0>(grad_ahead + asked, R * N);
        asked += R * N;
      };
      p.columns.template each<N, C>(
          [&](int64_t column) { ask(), vector<false>(grad + column, input + column, nullptr); },
          [&](int64_t column, const MaskElement<T>* masks) {
            ask(), vector<true>(grad + column, input + column, masks);
          });
    }
  }
};

// sums += what the rows give to a block's elements, lane by lane.
template <class T, int N, class S, int G, int C>
void accumulate_strip(T* sums, const Pairs<S, T>& p) {
  Vec<T, N> sum[C][G] = {};
  int64_t grad = p.grad_at, input = p.input_at, left = p.rows;
  AccumulateRows<T, N, 4, G, C, S>{p, sum}.all(grad, input, left);
  AccumulateRows<T, N, 2, G, C, S>{p, sum}.all(grad, input, left);
  AccumulateRows<T, N, 1, G, C, S>{p, sum}.all(grad, input, left);
#pragma GCC unroll 4
  for (int c = 0; c < C; ++c) {
#pragma GCC unroll 3
    for (int g = 0; g < G; ++g) {
      T* to = sums + g * p.weight_row + c * N;
      store<T, N>(to, load<T, N>(to) + sum[c][g]);
    }
  }
}

// sums += `count` elements that follow one another, in lanes.
template <class T, int N, class S>
void sum_elements(T* sums, const S* from, int64_t count) {
  Vec<T, N> total[4] = {};  // enough to hide the latency of an addition
  for (; count >= 4 * N; count -= 4 * N, from += 4 * N) {
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) total[u] += load<T, N>(from + u * N);
  }
  for (; count >= N; count -= N, from += N) total[0] += load<T, N>(from);
  if (count > 0) total[1] += load_first<T, N>(from, count);
  store<T, N>(sums, load<T, N>(sums) + ((total[0] + total[1]) + (total[2] + total[3])));
}

// to[i] += the sum of the lanes of row i, for `rows` rows of N lanes.
template <class T, int N>
void add_lanes(T* to, const T* rows, int64_t count) {
  for (; count > 0; count -= N, to += N, rows += N * N) {
    Vec<T, N> v[N] = {};
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i)
      if (i < count) v[i] = load<T, N>(rows + i * N);
    transpose<T, N>(v);
#pragma GCC unroll 4
    for (int half = N / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
      for (int i = 0; i < half; ++i) v[i] += v[i + half];
    }
    for (int i = 0; i < N && i < count; ++i) to[i] += v[0][i];
  }
}

}  // namespace
