// The two loops of pointwise convolutions, over packed columns [vector][channel]. All their sums stay in registers; 24
// (12 without AVX-512) need 11 (7) loads for as many multiply-adds, so that these are the limit.
#pragma once

#include "pointwise_plan.h"
#include "reduce.h"

namespace {

// ---- memory of the next block ------------------------------------------------------------------------------------------

// What is packed next: a line of it is prefetched in every so many steps of a loop, so that memory and arithmetic work
// at the same time.
template <class S>
struct Ahead {
  const S* row;  // of the next channel
  int64_t pixels, image;
  const Column* columns;
  int64_t vectors, channels;  // how much
  int64_t vector, credit;     // the next one; parts of a line
  static constexpr int64_t kLine = 1 << 16;

  // Parts of a line in a step, where all takes so many steps.
  int64_t rate(int64_t steps) const { return least(kLine, channels * vectors * kLine / most(1, steps)); }
  __attribute__((always_inline)) void step(int64_t rate) {
    credit += rate;
    if (credit < kLine) return;
    credit -= kLine;
    __builtin_prefetch(row + columns[vector].image * image + columns[vector].pixel);
    if (++vector == vectors) vector = 0, row += pixels;
  }
};

// ---- results: weights times columns -----------------------------------------------------------------------------------

template <class S, class T>
struct PointwiseRun {
  const T *weight, *start;  // [source][row], [row]
  const T* source;
  int64_t pitch, sources;  // from vector to vector; channels
  S* result;
  int64_t pixels, image;  // from row to row, from image to image
  const Column* columns;
  Ahead<S>* ahead;
  int64_t rate;  // of `ahead`, in a step
};

// Whole vectors go where they belong; others by way of memory, a piece for each image.
template <class S, class T, int N, int R, int P>
void multiply(const PointwiseRun<S, T>& run) {
  Vec<T, N> sum[R][P];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const Vec<T, N> start = run.start[r] - Vec<T, N>{};
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) sum[r][p] = start;
  }
  const T *weight = run.weight, *source = run.source;
  const int64_t pitch = run.pitch;
  Ahead<S> ahead = *run.ahead;
  const int64_t rate = run.rate;
  for (const T* end = source + run.sources * N; source != end; source += N, weight += R) {
    Vec<T, N> x[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) x[p] = load<T, N>(source + p * pitch);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const T w = weight[r];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) sum[r][p] += w * x[p];
    }
    ahead.step(rate);
  }
  *run.ahead = ahead;
  bool whole = true;
  for (int p = 0; p < P; ++p) whole = whole && run.columns[p].whole;
  if (whole) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      S* to = run.result + run.columns[p].image * run.image + run.columns[p].pixel;
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) store<T, N>(to + r * run.pixels, sum[r][p]);
    }
    return;
  }
  S results[P][R][N];  // of all before the first call: sums that outlive one would live in memory, in the loop above too
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store<T, N>(results[p][r], sum[r][p]);
  }
  for (int p = 0; p < P; ++p) {
    const Column& c = run.columns[p];
    S* to = run.result + c.image * run.image + c.pixel;
    for (int64_t lane = 0, pixel = c.pixel; lane < c.live; pixel = 0) {
      const int64_t now = least(c.live - lane, run.pixels - pixel);
      for (int r = 0; r < R; ++r)
        memcpy(to + r * run.pixels, results[p][r] + lane, sizeof(S) * static_cast<size_t>(now));
      to += run.image - pixel, lane += now;
    }
  }
}

template <class S, class T, int N, int R, int... P>
void multiply_vectors(PointwiseRun<S, T> run, int64_t vectors, std::integer_sequence<int, P...>) {
  static constexpr void (*kernels[])(const PointwiseRun<S, T>&) = {multiply<S, T, N, R, P + 1>...};
  for (int64_t pieces = ceil_div(vectors, kPointwiseColumns); pieces > 0; --pieces) {
    const int64_t now = ceil_div(vectors, pieces);
    kernels[now - 1](run);
    run.source += now * run.pitch, run.columns += now, vectors -= now;
  }
}
// Some rows of results, at most kPointwiseRows, and any number of vectors.
template <class S, class T, int N, int... R>
void multiply_rows(const PointwiseRun<S, T>& run, int64_t rows, int64_t vectors, std::integer_sequence<int, R...>) {
  constexpr auto columns = std::make_integer_sequence<int, kPointwiseColumns>();
  static constexpr void (*kernels[])(PointwiseRun<S, T>, int64_t, decltype(columns)) = {
      multiply_vectors<S, T, N, R + 1>...};
  kernels[rows - 1](run, vectors, columns);
}

// ---- grad_weight: sums of products over columns ------------------------------------------------------------------------

template <class S, class T>
struct PointwiseSums {
  T* to;
  int64_t row;  // from one channel of grad_output to the next
  const T *grad, *input;
  int64_t grad_pitch, input_pitch, vectors;  // from vector to vector; how many
  bool add;                                  // to what is there
  Ahead<S>* ahead;
  int64_t rate;  // of `ahead`, in a step
};

template <class S, class T, int N, int A, int B>
void dot(const PointwiseSums<S, T>& s) {
  Vec<T, N> sum[A][B] = {};
  const T *grad = s.grad, *input = s.input;
  Ahead<S> ahead = *s.ahead;
  const int64_t rate = s.rate;
  for (int64_t v = s.vectors; v > 0; --v, grad += s.grad_pitch, input += s.input_pitch) {
    Vec<T, N> x[B];
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) x[b] = load<T, N>(input + b * N);
#pragma GCC unroll 4
    for (int a = 0; a < A; ++a) {
      const Vec<T, N> g = load<T, N>(grad + a * N);
#pragma GCC unroll 8
      for (int b = 0; b < B; ++b) sum[a][b] += g * x[b];
    }
    ahead.step(rate);
  }
  *s.ahead = ahead;
  store_lanes<T, N, A, B>(s.to, s.row, sum, s.add);
}

template <class S, class T, int N, int B, int... A>
void dot_rows(PointwiseSums<S, T> s, int64_t rows, std::integer_sequence<int, A...>) {
  static constexpr void (*kernels[])(const PointwiseSums<S, T>&) = {dot<S, T, N, A + 1, B>...};
  for (int64_t pieces = ceil_div(rows, kPointwiseOutputs); pieces > 0; --pieces) {
    const int64_t now = ceil_div(rows, pieces);
    kernels[now - 1](s);
    s.grad += now * N, s.to += now * s.row, rows -= now;
  }
}
// Any numbers of channels: `rows` of grad_output, `columns` of the input.
template <class S, class T, int N, int... B>
void dot_all(PointwiseSums<S, T> s, int64_t rows, int64_t columns, std::integer_sequence<int, B...>) {
  constexpr auto outputs = std::make_integer_sequence<int, kPointwiseOutputs>();
  static constexpr void (*kernels[])(PointwiseSums<S, T>, int64_t, decltype(outputs)) = {dot_rows<S, T, N, B + 1>...};
  for (int64_t pieces = ceil_div(columns, kPointwiseInputs); pieces > 0; --pieces) {
    const int64_t now = ceil_div(columns, pieces);
    kernels[now - 1](s, rows, outputs);
    s.input += now * N, s.to += now, columns -= now;
  }
}

}  // namespace
