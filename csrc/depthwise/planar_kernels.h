// The two loops of planar.h.
//
// Forward and grad_input compute up to 8 rows together, a vector of each: a vector of the source is loaded once for all
// kernel rows of a block that reach it, and a weight once for all rows. For grad_weight a block's sums stay in
// registers, and up to 4 rows of grad_output are multiplied together, so that a vector of the input is loaded once for
// all kernel rows of the block.
//
// Their limit is the bytes for up to 9 kernel elements, at a copy's speed on 56x56; for 27 the multiply-adds take
// nearly as long.
#pragma once

#include "../vectors/prefetcher.h"
#include "../vectors/reduce.h"
#include "planar_plan.h"

namespace {

// ---- forward and grad_input ----

// Rows of results and what they are computed from.
template <class S, class T>
struct PlanarResults {
  RowVectors<T> columns;
  const S* source;
  S* result;
  int64_t rows, result_row;
  int64_t first, source_row, column;  // `first`: offset of what kernel element 0 of a block at 0 reads for result 0
  int64_t kernel_columns;
  const T* weights;                   // a vector for each kernel element
  int64_t weight_row;                 // from a kernel row's weights to the next one's
  T start;                            // what sums start from: the bias, or zero
  const KernelBlock* blocks;
  int64_t count;    // of the blocks
  const S* newest;  // of the source, beside `first`: the slice that no result before this one has read
  int64_t ahead;    // how far ahead of what is computed memory is prefetched, in elements; 0: none is
};

// result[r] = start + sum over the blocks' elements of weight * source[r + row, column], for R rows and blocks of G
// kernel rows and C columns; C is 0 where only the loop around them knows how many. The weights of a single row, which
// belong to the only block, stay in registers.
template <class T, int N, int R, int G, int C, class S>
struct CorrelateRows {
  static constexpr bool kKeeps = G == 1 && C > 0;
  using Kept = Vec<T, N>[kKeeps ? C : 1];
  const PlanarResults<S, T>& s;

  template <bool Masked>
  void vector(const Kept& kept, S* to, int64_t first, const LaneInteger<T>* masks) const {
    const int64_t source_row = s.source_row, weight_row = s.weight_row, result_row = s.result_row;
    const int64_t column = s.column, kernel_columns = s.kernel_columns;
    const S* const source = s.source + first;
    Vec<T, N> sum[R];
    UNROLL for (int r = 0; r < R; ++r) sum[r] = s.start - Vec<T, N>{};
    for (const KernelBlock *block = s.blocks, *const end = block + s.count; block != end; ++block) {
      const T* const weights = s.weights + block->weight;
      const S* const from = source + block->source;
      auto add_column = [&](int64_t c) __attribute__((always_inline)) {
        const Mask<T, N> mask = Masked ? load<LaneInteger<T>, N>(masks + c * N) : Mask<T, N>{};
        Vec<T, N> w[G];
        UNROLL for (int g = 0; g < G; ++g) {
          w[g] = kKeeps ? kept[c] : load<T, N>(weights + g * weight_row + c * N);
          if (Masked) w[g] = masked<T, N>(w[g], mask);
        }
        const S* row = opaque(from + c * column);
        UNROLL for (int i = 0; i < R + G - 1; ++i, row = opaque(row + source_row)) {
          Vec<T, N> x = load<T, N>(row);
          if (Masked) x = masked<T, N>(x, mask);
          x = opaque(x);
          UNROLL for (int g = 0; g < G; ++g)
            if (i >= g && i - g < R) sum[i - g] += w[g] * x;
        }
      };
      if constexpr (C > 0) {
        UNROLL for (int c = 0; c < C; ++c) add_column(c);
      } else {
        for (int64_t c = 0; c < kernel_columns; ++c) add_column(c);
      }
    }
    UNROLL for (int r = 0; r < R; ++r, to += result_row) store<T, N>(to, sum[r]);
  }

  // Rows in blocks of R, as long as a block is left.
  void all(S*& to, int64_t& first, int64_t& left) const {
    Kept kept = {};
    for (int c = 0; c < C && kKeeps; ++c) kept[c] = load<T, N>(s.weights + s.blocks[0].weight + c * N);
    for (; left >= R; left -= R, to += R * s.result_row, first += R * s.source_row) {
      int64_t ahead = s.ahead;
      auto prefetch_next = [&] {
        if (ahead == 0) return;
        prefetch<0>(s.newest + (first - s.first) + ahead, R * N), prefetch<1>(to + ahead, R * N);
        ahead += R * N;
      };
      s.columns.template each<N>(
          s.kernel_columns,
          [&](int64_t column) { prefetch_next(), vector<false>(kept, to + column, first + column, nullptr); },
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
  CorrelateRows<T, N, kMostRows, G, C, S>{s}.all(to, first, left);
  CorrelateRows<T, N, 4, G, C, S>{s}.all(to, first, left);
  CorrelateRows<T, N, 2, G, C, S>{s}.all(to, first, left);
  CorrelateRows<T, N, 1, G, C, S>{s}.all(to, first, left);
}

// ---- grad_weight ----

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
