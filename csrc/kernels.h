// The two loops that do all the arithmetic. Both see a source as pixels of vectors at a fixed pitch, and kernel elements
// as a list of offsets ("taps"); neither knows a dimension, a border or a layout.
//
// Each does one multiply-add per load. Two loads a cycle are therefore the limit of the arithmetic (the same as two
// multiply-adds a cycle), and the memory's bandwidth is the limit of small kernels. What is reached: docs/performance.md.
#pragma once

#include "plan.h"
#include "vector.h"

namespace {

// A kernel element as the inner loops see it.
struct Tap {
  int64_t source, weight;  // offsets in elements
};

// Most result pixels (correlate) and most kernel elements (accumulate) whose sums stay in registers at once.
constexpr int kMostSums = 12;
constexpr int kMostTaps = 10;

// ---- correlate ------------------------------------------------------------------------------------------------------

// A run of result pixels that the same kernel elements reach.
template <class T, class S>
struct Run {
  S* result;
  int64_t result_step;  // from pixel to pixel
  const T* source;
  int64_t source_step;
  const T* weight;
  const T* start;  // what the sums start from: the bias, or zeros
  const Tap* taps;
  int64_t count;  // of the taps
};

// result[p] = start + sum over taps of source[p * source_step + tap] * weight[tap], for P pixels of one vector.
template <class T, int N, class S, int P>
void correlate(const Run<T, S>& run, int64_t lane, int64_t live) {
  Vec<T, N> sum[P];
  const Vec<T, N> start = load<T, N>(run.start + lane);
  const T *source = run.source + lane, *weight = run.weight + lane;
  const int64_t step = run.source_step;
#pragma GCC unroll 12
  for (int p = 0; p < P; ++p) sum[p] = start;
  for (const Tap *tap = run.taps, *end = tap + run.count; tap != end; ++tap) {
    const Vec<T, N> w = load<T, N>(weight + tap->weight);
    const T* from = source + tap->source;
#pragma GCC unroll 12
    for (int p = 0; p < P; ++p) sum[p] += w * load<T, N>(from + p * step);
  }
  S* to = run.result + lane;
  if (live >= N) {
#pragma GCC unroll 12
    for (int p = 0; p < P; ++p) store<T, N>(to + p * run.result_step, sum[p]);
  } else {
#pragma GCC unroll 12
    for (int p = 0; p < P; ++p) store_first<T, N>(to + p * run.result_step, sum[p], live);
  }
}

// All lanes of a run of any number of pixels, in pieces of nearly equal size. `whole`: the last vector may start
// earlier, so that it is full; else it has lanes beyond `live`, which are not stored.
template <class T, int N, class S, int... P>
void correlate_all(Run<T, S> run, int64_t pixels, int64_t live, bool whole, std::integer_sequence<int, P...>) {
  using Kernel = void (*)(const Run<T, S>&, int64_t, int64_t);
  static constexpr Kernel kernels[] = {correlate<T, N, S, P + 1>...};
  for (int64_t pieces = ceil_div(pixels, kMostSums); pieces > 0; --pieces) {
    const int64_t now = ceil_div(pixels, pieces);
    const Kernel kernel = kernels[now - 1];
    for (int64_t lane = 0; lane < live; lane += N) {
      const int64_t at = whole ? least(lane, live - N) : lane;
      kernel(run, at, live - at);
    }
    run.result += now * run.result_step, run.source += now * run.source_step, pixels -= now;
  }
}

// ---- accumulate -----------------------------------------------------------------------------------------------------

// A block of rows of grad_output, and the first input pixel of the same rows.
template <class T>
struct Rows {
  const T *grad, *input;
  int64_t depth, rows, pixels;                  // extent
  int64_t grad_slice, grad_row, grad_pixel;     // steps in elements
  int64_t input_slice, input_row, input_pixel;
};

// sums[tap] += sum over pixels of grad * input[tap], for K kernel elements. Few elements take U pixels at once, so that
// enough independent sums hide the latency of an addition.
template <class T, int N, int K>
void accumulate(T* sums, const Tap* taps, const Rows<T>& r) {
  constexpr int U = K == 1 ? 8 : K == 2 ? 4 : K <= 5 ? 2 : 1;
  Vec<T, N> sum[U][K] = {};
  int64_t offset[K];
#pragma GCC unroll 10
  for (int k = 0; k < K; ++k) offset[k] = taps[k].source;
  for (int64_t d = 0; d < r.depth; ++d) {
    for (int64_t h = 0; h < r.rows; ++h) {
      const T* grad = r.grad + d * r.grad_slice + h * r.grad_row;
      const T* input = r.input + d * r.input_slice + h * r.input_row;
      int64_t left = r.pixels;
      for (; left >= U; left -= U) {
#pragma GCC unroll 8
        for (int u = 0; u < U; ++u) {
          const Vec<T, N> g = load<T, N>(grad);
#pragma GCC unroll 10
          for (int k = 0; k < K; ++k) sum[u][k] += g * load<T, N>(input + offset[k]);
          grad += r.grad_pixel, input += r.input_pixel;
        }
      }
      if constexpr (U > 1) {
        for (; left > 0; --left) {
          const Vec<T, N> g = load<T, N>(grad);
#pragma GCC unroll 10
          for (int k = 0; k < K; ++k) sum[0][k] += g * load<T, N>(input + offset[k]);
          grad += r.grad_pixel, input += r.input_pixel;
        }
      }
    }
  }
#pragma GCC unroll 10
  for (int k = 0; k < K; ++k) {
    Vec<T, N> total = sum[0][k];
#pragma GCC unroll 8
    for (int u = 1; u < U; ++u) total += sum[u][k];
    T* to = sums + taps[k].weight;
    store<T, N>(to, load<T, N>(to) + total);
  }
}

// Any number of kernel elements, in pieces of nearly equal size.
template <class T, int N, int... K>
void accumulate_all(T* sums, const Tap* taps, int64_t count, const Rows<T>& rows, std::integer_sequence<int, K...>) {
  using Kernel = void (*)(T*, const Tap*, const Rows<T>&);
  static constexpr Kernel kernels[] = {accumulate<T, N, K + 1>...};
  for (int64_t pieces = ceil_div(count, kMostTaps); pieces > 0; --pieces) {
    const int64_t now = ceil_div(count, pieces);
    kernels[now - 1](sums, taps, rows);
    taps += now, count -= now;
  }
}

// sums += sum over pixels of grad.
template <class T, int N>
void sum_rows(T* sums, const Rows<T>& r) {
  Vec<T, N> total[4] = {};  // enough to hide the latency of an addition
  for (int64_t d = 0; d < r.depth; ++d) {
    for (int64_t h = 0; h < r.rows; ++h) {
      const T* grad = r.grad + d * r.grad_slice + h * r.grad_row;
      int64_t left = r.pixels;
      for (; left >= 4; left -= 4) {
#pragma GCC unroll 4
        for (int u = 0; u < 4; ++u, grad += r.grad_pixel) total[u] += load<T, N>(grad);
      }
      for (; left > 0; --left, grad += r.grad_pixel) total[0] += load<T, N>(grad);
    }
  }
  store<T, N>(sums, load<T, N>(sums) + ((total[0] + total[1]) + (total[2] + total[3])));
}

}  // namespace
