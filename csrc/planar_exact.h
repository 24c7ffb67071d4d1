// The loops of planar_kernels.h once more, slower: nothing outside of the tensor is read, and nothing outside of a row
// is multiplied, not even by zero. They compute the first and the last rows of a tensor, and what is infinite.
#pragma once

#include "planar_kernels.h"

namespace {

// The vector at an element of a tensor, with zeros for what lies outside of it.
template <class T, int N, class S>
inline Vec<T, N> load_inside(Bounded<S> tensor, int64_t at) {
  if (at >= 0 && at <= tensor.size - N) return load<T, N>(tensor.data + at);
  S buffer[N] = {};
  for (int64_t l = 0; l < N; ++l)
    if (at + l >= 0 && at + l < tensor.size) buffer[l] = tensor.data[at + l];
  return load<T, N>(buffer);
}

// sum + product in the lanes of a mask, or in all where there is none.
template <class T, int N>
inline Vec<T, N> add_where(const LaneInteger<T>* mask, Vec<T, N> sum, Vec<T, N> product) {
  if (!mask) return sum + product;
  return load<LaneInteger<T>, N>(mask) ? sum + product : sum;
}

// As `correlate_strip`, for blocks of any `rows` x `columns`.
template <class T, int N, class S>
void correlate_exactly(const Strip<S, T>& s, int64_t rows, int64_t columns) {
  for (int64_t row = 0; row < s.rows; ++row) {
    auto vector = [&](int64_t column, const LaneInteger<T>* masks) {
      Vec<T, N> sum = Vec<T, N>{} + s.start;
      for (int64_t b = 0; b < s.count; ++b)
        for (int64_t c = 0; c < columns; ++c)
          for (int64_t g = 0; g < rows; ++g) {
            const int64_t at = s.first + s.blocks[b].source + (row + g) * s.source_row + column + c * s.column;
            const T* const w = s.weights + s.blocks[b].weight + g * s.weight_row + c * N;
            const Vec<T, N> product = load<T, N>(w) * load_inside<T, N>(s.source, at);
            sum = add_where<T, N>(masks ? masks + c * N : nullptr, sum, product);
          }
      store<T, N>(s.result + row * s.result_row + column, sum);
    };
    s.columns.template each<N>(columns, [&](int64_t column) { vector(column, nullptr); }, vector);
  }
}

// As `accumulate_strip`, for a block of any `rows` x `columns`.
template <class T, int N, class S>
void accumulate_exactly(T* sums, const Pairs<S, T>& p, int64_t rows, int64_t columns) {
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t g = 0; g < rows; ++g) {
      T* const to = sums + g * p.weight_row + c * N;
      Vec<T, N> sum = load<T, N>(to);
      for (int64_t row = 0; row < p.rows; ++row) {
        auto vector = [&](int64_t column, const LaneInteger<T>* masks) {
          const int64_t at = p.input_at + (row + g) * p.input_row + column + c * p.column;
          const Vec<T, N> y = load_inside<T, N>(p.grad, p.grad_at + row * p.grad_row + column);
          sum = add_where<T, N>(masks ? masks + c * N : nullptr, sum, y * load_inside<T, N>(p.input, at));
        };
        p.columns.template each<N>(columns, [&](int64_t column) { vector(column, nullptr); }, vector);
      }
      store<T, N>(to, sum);
    }
}

}  // namespace
