// The loop of forward and grad_input: sums of a few results stay in registers while it runs over the kernel elements.
#pragma once

#include "kernels.h"
#include "prefetcher.h"

namespace {

// Rows of result pixels that the same kernel elements reach. T: arithmetic, X: of the source, S: of the result.
template <class T, class X, class S>
struct ResultRows {
  S* result;
  int64_t result_step, result_row;  // from pixel to pixel, from row to row
  const X* source;
  int64_t source_step, source_row;
  int64_t result_columns, source_columns;  // the steps from pixel to pixel, in columns of the tensors
  const T* weight;
  const T* start;  // what the sums start from: the bias, or zeros
  const Tap* taps;
  int64_t source_lane, weight_lane;  // from lane to lane: a whole vector lies together, the next one where these say
  int64_t count;  // of the taps
  int64_t along;  // as many taps, and then the next as many, lie one source step apart; 1 where none do
  int64_t rows;
  Prefetcher* prefetcher;
  const X* newest;  // the first pixel's last row, which no results before have read; null: nothing is prefetched
  int64_t new_rows, new_row;  // how many such rows, and from one to the one above it
  int64_t row_step;           // how many more the next row of results has

  // Pixels of a tensor with many channels lie far apart, and the processor's own prefetching does not see that their
  // memory is read from end to end: prefetch what comes after `pixels`, of some lanes' share. In a training step that
  // is seldom in a near cache.
  void prefetch_ahead(int64_t pixels, int64_t lane, int64_t lanes) const {
    const int64_t ahead = kAheadBytes / int64_t(sizeof(X)), ahead_there = kAheadBytes / int64_t(sizeof(S));
    for (int64_t row = 0; row < new_rows + (rows - 1) * row_step; ++row)
      prefetch<0>(newest - row * new_row + ahead + lane * pixels * source_columns, lanes * pixels * source_columns);
    // Stores wait for nothing, unless a stride gives more results than there are operands.
    for (int64_t row = 0; row < rows && result_columns > 1; ++row)
      prefetch<1>(result + row * result_row + ahead_there + lane * pixels * result_columns,
                  lanes * pixels * result_columns);
  }
};

// sum[p] += source[(p + g) * step] * weight[taps[g]] for P pixels and G taps that lie one step apart: each source pixel
// is loaded once for all of them.
template <class T, int N, int P, int G, class X>
inline void add_taps(Vec<T, N>* sum, const X* source, int64_t step, const T* weight, const Tap* taps) {
  Vec<T, N> w[G];
  UNROLL for (int g = 0; g < G; ++g) w[g] = load<T, N>(weight + taps[g].weight);
  source += taps->source;
  UNROLL for (int i = 0; i < P + G - 1; ++i) {
    Vec<T, N> x = load<T, N>(source + i * step);
    if constexpr (G > 1 && kVectorBytes == 64) x = opaque(x);  // with fewer registers, GCC would keep sums on the stack
    UNROLL for (int g = 0; g < G; ++g)
      if (i >= g && i - g < P) sum[i - g] += w[g] * x;
  }
}

// result[p] = start + sum over taps of source[p * source_step + tap] * weight[tap], for P pixels of one vector in each
// row. G: so many taps are taken at once.
template <class T, int N, class X, class S, int P, int G>
void correlate(const ResultRows<T, X, S>& run, int64_t lane, int64_t live) {
  const int64_t step = run.source_step;
  const Vec<T, N> start = load<T, N>(run.start + lane);
  const X* source = run.source + lane * run.source_lane;
  const T* weight = run.weight + lane * run.weight_lane;
  const Tap *const taps = run.taps, *const end = taps + run.count;
  S* to = run.result + lane;
  const int64_t due = run.prefetcher->due(P * run.count);
  for (int64_t row = 0; row < run.rows; ++row, source += run.source_row, to += run.result_row) {
    run.prefetcher->advance(due);
    Vec<T, N> sum[P];
    UNROLL for (int p = 0; p < P; ++p) sum[p] = start;
    for (const Tap* tap = taps; tap != end;) {
      if constexpr (G == 1) {
        add_taps<T, N, P, 1>(sum, source, step, weight, tap++);
      } else {
        int64_t left = run.along;
        for (; left >= G; left -= G, tap += G) add_taps<T, N, P, G>(sum, source, step, weight, tap);
        for (; left > 0; --left) add_taps<T, N, P, 1>(sum, source, step, weight, tap++);
      }
    }
    if (live >= N) {
      UNROLL for (int p = 0; p < P; ++p) store<T, N>(to + p * run.result_step, sum[p]);
    } else {
      UNROLL for (int p = 0; p < P; ++p) store_first<T, N>(to + p * run.result_step, sum[p], live);
    }
  }
}

// The kernel for `pixels` results in a row, at most kMostSums.
template <class T, int N, class X, class S>
auto correlate_kernel(const ResultRows<T, X, S>& run, int64_t pixels) {
  static constexpr auto single = make_all<kMostSums>([](auto p) { return correlate<T, N, X, S, p + 1, 1>; });
  static constexpr auto three = make_all<kMostSums>([](auto p) { return correlate<T, N, X, S, p + 1, 3>; });
  return (run.along < 3 ? single : three)[pixels - 1];
}

// All lanes of a run in a tensor. The last vector begins early enough to be full.
template <class T, int N, class X, class S>
void correlate_lanes(const ResultRows<T, X, S>& run, int64_t pixels, int64_t live) {
  const auto kernel = correlate_kernel<T, N>(run, pixels);
  for (int64_t lane = 0; lane < live; lane += N) {
    if (run.newest) run.prefetch_ahead(pixels, lane, N);
    kernel(run, least(lane, live - N), N);
  }
}

}  // namespace
