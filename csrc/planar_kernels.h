// The two loops of planar.h. A vector holds neighbouring columns of one channel, which lie together in a contiguous
// tensor: operands are read, and results written, where they are.
//
// Kernel elements come in blocks of G kernel rows and C kernel columns, whose weights (or sums) stay in registers. A
// vector of the source is loaded once for all rows of a block: the rows that are computed together lie as far apart as
// those of the block. Where they don't (a dilation of rows, a single row), a block is one kernel row.
//
// Vectors at a border, whose kernel elements reach past the ends of a row, have a mask for each kernel column that
// turns what lies outside into zeros. Infinity times zero is NaN: where there is one, and in rows whose vectors would
// reach past the ends of the tensor, slower loops leave what lies outside out of the sums (planar_exact.h).
//
// What limits them: the bytes. On 4 cores of a Zen 3 they reach 83 to 128 % of the roofline, which is a copy's speed;
// docs/performance.md has the tables and their commands.
#pragma once

#include "plan.h"
#include "vector.h"

namespace {

// Most kernel rows and kernel columns of a block; with several rows, one column less.
constexpr int kBlockRows = 3, kBlockColumns = 4;

template <class T>
using MaskElement = typename std::conditional<sizeof(T) == 8, int64_t, int32_t>::type;

template <class T, int N>
inline Vec<T, N> load_mask(const MaskElement<T>* from) {
  Vec<T, N> mask;
  memcpy(&mask, from, sizeof(mask));
  return mask;
}

template <class T, int N>
inline Vec<T, N> masked(Vec<T, N> v, Vec<T, N> mask) {
  typedef Vec<MaskElement<T>, N> M;
  return bit_cast<Vec<T, N>>(bit_cast<M>(v) & bit_cast<M>(mask));
}

// A tensor and its elements; vectors may reach past its ends.
template <class S>
struct Bounded {
  const S* data;
  int64_t size;
};

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
  const MaskElement<T>* masks;

  // inside(column) and at_border(column, masks) for all vectors, from left to right.
  template <int N, int C, class Inside, class AtBorder>
  void each(Inside&& inside, AtBorder&& at_border) const {
    for (int64_t j = 0;; ++j) {
      if (j == left)
        for (int64_t i = 0; i < middle; ++i) inside(first + i * N);
      if (j == left + right) return;
      at_border(at[j], masks + j * C * N);
    }
  }
};

// Rows of results and what they are computed from.
template <class S, class T>
struct Strip {
  RowVectors<T> columns;
  Bounded<S> source;
  S* result;
  int64_t rows, result_row;
  int64_t first, source_row, column;  // `first`: offset of what kernel element 0 of a block at 0 reads for result 0
  const T* weights;                   // a vector for each kernel element
  int64_t weight_row;                 // from a kernel row's weights to the next one's
  T start;                            // of the sums: the bias, or zero
  const KernelBlock* blocks;
  int64_t count;  // of the blocks
};

// result[r] = start + sum over a block's elements of weight * source[r + row, column], for R rows.
template <class T, int N, int R, int G, int C, class S>
struct CorrelateRows {
  const Strip<S, T>& s;
  Vec<T, N> w[C][G];

  void load_weights(const KernelBlock& block) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
#pragma GCC unroll 3
      for (int g = 0; g < G; ++g) w[c][g] = load<T, N>(s.weights + block.weight + g * s.weight_row + c * N);
    }
  }

  template <bool Masked>
  void vector(S* to, int64_t first, const MaskElement<T>* masks) {
    Vec<T, N> sum[R];
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) sum[r] = Vec<T, N>{} + s.start;
    for (int64_t b = 0; b < s.count; ++b) {
      if (s.count > 1) load_weights(s.blocks[b]);
      const S* const from = s.source.data + first + s.blocks[b].source;
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        const Vec<T, N> mask = Masked ? load_mask<T, N>(masks + c * N) : Vec<T, N>{};
#pragma GCC unroll 4
        for (int i = 0; i < R + G - 1; ++i) {
          Vec<T, N> x = load<T, N>(from + c * s.column + i * s.source_row);
          if (Masked) x = masked<T, N>(x, mask);
#pragma GCC unroll 3
          for (int g = 0; g < G; ++g)
            if (i >= g && i - g < R) sum[i - g] += w[c][g] * x;
        }
      }
    }
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) store<T, N>(to + r * s.result_row, sum[r]);
  }

  void rows(S* to, int64_t first) {
    s.columns.template each<N, C>(
        [&](int64_t column) { vector<false>(to + column, first + column, nullptr); },
        [&](int64_t column, const MaskElement<T>* masks) { vector<true>(to + column, first + column, masks); });
  }
};

template <class T, int N, class S, int G, int C>
void correlate_strip(const Strip<S, T>& s) {
  constexpr int R = 2;
  CorrelateRows<T, N, R, G, C, S> some = {s, {}};
  CorrelateRows<T, N, 1, G, C, S> one = {s, {}};
  S* to = s.result;
  int64_t first = s.first, left = s.rows;
  if (s.count && left >= R) some.load_weights(s.blocks[0]);
  for (; left >= R; left -= R, to += R * s.result_row, first += R * s.source_row) some.rows(to, first);
  if (left == 0) return;
  if (s.count) one.load_weights(s.blocks[0]);
  one.rows(to, first);
}

// Rows of grad_output, and of the input that a block's first element reads with them.
template <class S, class T>
struct Pairs {
  RowVectors<T> columns;
  Bounded<S> grad, input;
  int64_t rows, grad_at, grad_row, input_at, input_row, column;
  int64_t weight_row;  // from a kernel row's sums to the next one's
};

// sum[c][g] += grad[r] * input[r + g, c] for R rows.
template <class T, int N, int R, int G, int C, class S>
struct AccumulateRows {
  const Pairs<S, T>& p;
  Vec<T, N> (&sum)[C][G];

  template <bool Masked>
  void vector(int64_t grad, int64_t input, const MaskElement<T>* masks) const {
    Vec<T, N> y[R];
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) y[r] = load<T, N>(p.grad.data + grad + r * p.grad_row);
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      const Vec<T, N> mask = Masked ? load_mask<T, N>(masks + c * N) : Vec<T, N>{};
#pragma GCC unroll 4
      for (int i = 0; i < R + G - 1; ++i) {
        Vec<T, N> x = load<T, N>(p.input.data + input + c * p.column + i * p.input_row);
        if (Masked) x = masked<T, N>(x, mask);
#pragma GCC unroll 3
        for (int g = 0; g < G; ++g)
          if (i >= g && i - g < R) sum[c][g] += y[i - g] * x;
      }
    }
  }

  void rows(int64_t grad, int64_t input) const {
    p.columns.template each<N, C>(
        [&](int64_t column) { vector<false>(grad + column, input + column, nullptr); },
        [&](int64_t column, const MaskElement<T>* masks) { vector<true>(grad + column, input + column, masks); });
  }
};

// sums += what the rows give to a block's elements, lane by lane.
template <class T, int N, class S, int G, int C>
void accumulate_strip(T* sums, const Pairs<S, T>& p) {
  constexpr int R = 2;
  Vec<T, N> sum[C][G] = {};
  int64_t grad = p.grad_at, input = p.input_at, left = p.rows;
  for (; left >= R; left -= R, grad += R * p.grad_row, input += R * p.input_row)
    AccumulateRows<T, N, R, G, C, S>{p, sum}.rows(grad, input);
  if (left > 0) AccumulateRows<T, N, 1, G, C, S>{p, sum}.rows(grad, input);
#pragma GCC unroll 4
  for (int c = 0; c < C; ++c) {
#pragma GCC unroll 3
    for (int g = 0; g < G; ++g) {
      T* to = sums + g * p.weight_row + c * N;
      store<T, N>(to, load<T, N>(to) + sum[c][g]);
    }
  }
}

// The kernels for blocks of a size; null for blocks that don't fit the registers.
template <class T, class S>
struct PlanarKernels {
  void (*correlate)(const Strip<S, T>&);
  void (*accumulate)(T*, const Pairs<S, T>&);
};
template <class T, int N, class S, int G, int C>
constexpr PlanarKernels<T, S> planar_kernels() {
  if constexpr (G == 1 || C < kBlockColumns)
    return {correlate_strip<T, N, S, G, C>, accumulate_strip<T, N, S, G, C>};
  else
    return {nullptr, nullptr};
}
template <class T, int N, class S, int... I>
const PlanarKernels<T, S>& planar_kernels(int64_t rows, int64_t columns, std::integer_sequence<int, I...>) {
  constexpr int M = kBlockColumns;
  static constexpr PlanarKernels<T, S> kernels[sizeof...(I)] = {planar_kernels<T, N, S, I / M + 1, I % M + 1>()...};
  return kernels[(rows - 1) * M + columns - 1];
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
