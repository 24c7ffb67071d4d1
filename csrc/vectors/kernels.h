// The two loops of depthwise convolutions: `correlate` holds the sums of a few results in registers while it runs over
// the kernel elements, `accumulate`, for grad_weight, those of a few kernel elements while it runs over the pixels.
// Both see a source as pixels of vectors at a fixed pitch, and kernel elements as a list of offsets ("taps"); neither
// knows a dimension or a layout.
//
// If kernel elements are as far apart as the pixels that are computed together (the dilation is the stride), they share
// their loads: `correlate` takes three of them at once, `accumulate` a whole row. Elsewhere each multiply-add has
// a load of its own; two loads a cycle are then the same limit as two multiply-adds.
//
// Their limit is the bytes for up to 9 kernel elements, the multiply-adds from 25 on. Where 16-bit storage is converted
// by the load, the bytes are half as many; a load takes one instruction more, and to round a result to bfloat16 takes
// seven. Results in rows of 7 or fewer wait for the additions of their own sums.
#pragma once

#include "prefetcher.h"
#include "reduce.h"
#include "vector.h"

namespace {

// A kernel element as the inner loops see it.
struct Tap {
  int64_t source, weight;  // offsets in elements
};

// For processors that few still have: fewer kernels, which compile in half the time and are slower.
#if defined(CONVGRAD_SMALL)
constexpr bool kSmall = true;
#else
constexpr bool kSmall = false;
#endif

// Most result pixels (correlate) and most kernel elements (accumulate) whose sums stay in registers at once.
constexpr int kMostSums = kSmall ? 4 : 12;
constexpr int kMostTaps = kSmall ? 4 : 10;

// ---- forward and grad_input ----

// Rows of result pixels that the same kernel elements reach. T: arithmetic, X: of the source, S: of the results.
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
  int64_t source_lane, weight_lane;  // elements from lane to lane, for the first lanes of two vectors
  int64_t count;  // number of taps
  int64_t along;  // taps in a row that lie one source step apart; 1 where none do
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

// ---- grad_weight ----

// A block of rows of grad_output, and the first input pixel of the same rows.
template <class X>
struct Rows {
  const X *grad, *input;
  int64_t depth, rows, pixels;                  // extent
  int64_t grad_slice, grad_row, grad_pixel;     // steps in elements
  int64_t input_slice, input_row, input_pixel;
  int64_t tap_step;  // from a kernel element to the next of its row
  // The first pixel of a row lacks the first `left` taps of a kernel row, the next pixel one tap less; the last pixel
  // lacks the last `right` ones.
  int64_t left, right;
  Prefetcher* prefetcher;
};

// sum[u][j * W + k] += grad[v] * input[v + k of row j] for V pixels v, u = v % U. Sliding: taps lie as far apart as
// pixels, so that an input pixel is loaded once for all taps of a row.
template <class T, int N, int R, int W, int U, int V, bool Sliding, class X>
inline void add_pixels(Vec<T, N> (*sum)[R * W], const int64_t* offset, const X* grad, const X* input, int64_t step,
                       const Rows<X>& r) {
  Vec<T, N> g[V];
  UNROLL for (int v = 0; v < V; ++v) g[v] = load<T, N>(grad + v * r.grad_pixel);
  UNROLL for (int j = 0; j < R; ++j) {
    const X* row = opaque(input + offset[j]);
    if constexpr (Sliding && W > 1) {
      UNROLL for (int i = 0; i < V + W - 1; ++i) {
        Vec<T, N> x = load<T, N>(row + i * step);
        if constexpr (kVectorBytes == 64 || U * R * W + V < 14) x = opaque(x);  // else GCC would keep sums on the stack
        UNROLL for (int k = 0; k < W; ++k)
          if (i >= k && i - k < V) sum[(i - k) % U][j * W + k] += g[i - k] * x;
      }
    } else {
      UNROLL for (int v = 0; v < V; ++v)
        UNROLL for (int k = 0; k < W; ++k)
          sum[v % U][j * W + k] += g[v] * load<T, N>(row + v * r.input_pixel + k * step);
    }
  }
}

// Adds one pixel at the border of a row, for the taps [First, Last) of the kernel rows.
template <class T, int N, int R, int W, int First, int Last, class X>
inline void add_border(Vec<T, N>* sum, const int64_t* offset, const X*& grad, const X*& input, int64_t step,
                       const Rows<X>& r) {
  const Vec<T, N> g = load<T, N>(grad);
  UNROLL for (int j = 0; j < R; ++j) {
    const X* row = opaque(input + offset[j]);
    UNROLL for (int k = First; k < Last; ++k) sum[j * W + k] += g * load<T, N>(row + k * step);
  }
  grad += r.grad_pixel, input += r.input_pixel;
}
// Adds all pixels at one end of a row that lack taps: the first taps at its beginning, the last ones at its end.
template <bool End, class T, int N, int R, int W, int U, class X, int... I>
inline void add_borders(Vec<T, N> (*sum)[R * W], const int64_t* offset, const X*& grad, const X*& input, int64_t step,
                        const Rows<X>& r, std::integer_sequence<int, I...>) {
  constexpr int kMost = W - 1;  // taps that a pixel lacks
  (((End ? r.right > I : r.left >= kMost - I)
        ? add_border<T, N, R, W, End ? 0 : kMost - I, End ? kMost - I : W>(sum[I % U], offset, grad, input, step, r)
        : void()), ...);
}

// sums[tap] += sum over pixels of grad * input[tap], for R kernel rows of W taps that lie one step apart. Few taps have
// U sums each, enough of them to hide an addition's latency.
template <class T, int N, class X, int R, int W, bool Sliding>
void accumulate(T* sums, const Tap* taps, int64_t along, const Rows<X>& r) {
  constexpr bool kConverts = !std::is_same<T, X>::value;  // which takes a register
  constexpr int K = R * W, U = K == 1 && !kConverts ? 8 : K <= 2 ? 4 : K <= 5 ? 2 : 1;
  constexpr int kAtOnce = (K <= 8 && U == 1 ? 6 : 4) - (kConverts && K >= 8);
  constexpr int V = K == 1 || (!Sliding && K != 2) ? U : kAtOnce;  // pixels at once
  const int64_t step = r.tap_step;
  constexpr auto kBorders = std::make_integer_sequence<int, W - 1>();
  Vec<T, N> sum[U][K] = {};
  int64_t offset[R];
  UNROLL for (int j = 0; j < R; ++j) offset[j] = taps[j * along].source;
  const int64_t due = r.prefetcher->due(K * r.pixels);
  for (int64_t d = 0; d < r.depth; ++d) {
    for (int64_t h = 0; h < r.rows; ++h) {
      r.prefetcher->advance(due);
      const X* grad = r.grad + d * r.grad_slice + h * r.grad_row;
      const X* input = r.input + d * r.input_slice + h * r.input_row;
      int64_t left = r.pixels;
      if constexpr (Sliding && W > 1) {
        left -= r.left + r.right;
        if (r.left) add_borders<false, T, N, R, W, U>(sum, offset, grad, input, step, r, kBorders);
      }
      for (; left >= V; left -= V, grad += V * r.grad_pixel, input += V * r.input_pixel)
        add_pixels<T, N, R, W, U, V, Sliding>(sum, offset, grad, input, step, r);
      for (; V > 1 && left > 0; --left, grad += r.grad_pixel, input += r.input_pixel)
        add_pixels<T, N, R, W, U, 1, false>(sum, offset, grad, input, step, r);
      if constexpr (Sliding && W > 1) {
        if (r.right) add_borders<true, T, N, R, W, U>(sum, offset, grad, input, step, r, kBorders);
      }
    }
  }
  UNROLL for (int k = 0; k < K; ++k) {
    Vec<T, N> total = sum[0][k];
    UNROLL for (int u = 1; u < U; ++u) total += sum[u][k];
    add_to<T, N>(sums + taps[k / W * along + k % W].weight, total);
  }
}

// Taps [first, first + count) of the kernel rows: they miss other pixels than the whole rows do.
template <class T, class X, class Kernel>
void accumulate_piece(Kernel kernel, T* sums, const Tap* taps, int64_t along, int64_t first, int64_t count,
                      Rows<X> r) {
  const int64_t left = most(0, r.left - first), right = most(0, r.right - (along - first - count));
  const int64_t before = most(0, left - count + 1), after = most(0, right - count + 1);  // pixels that all taps miss
  r.left = left - before, r.right = right - after, r.pixels -= before + after;
  r.grad += before * r.grad_pixel, r.input += before * r.input_pixel;
  if (r.pixels > 0) kernel(sums, taps + first, along, r);
}

// `rows` kernel rows of `along` taps, in pieces of nearly equal size.
template <class T, int N, class X>
void accumulate_all(T* sums, const Tap* taps, int64_t rows, int64_t along, const Rows<X>& r) {
  constexpr int M = kMostTaps, kPieceRows = 3;  // rows of a piece, where they have several taps
  using Kernel = void (*)(T*, const Tap*, int64_t, const Rows<X>&);
  // By rows and taps in a row, those that slide after the others, which gain nothing by long rows; null where no piece
  // has this size.
  static constexpr auto kernels = make_all<2 * M * M>([](auto i) -> Kernel {
    constexpr int R = i / M % M + 1, W = i % M + 1;
    constexpr bool kSlides = i >= M * M;
    constexpr bool kOfSize = R * W <= M && (W == 1 ? R <= M / 2 : R <= kPieceRows && (kSlides || W <= M / 2));
    if constexpr (kOfSize) return accumulate<T, N, X, R, W, (W == 1 || kSlides)>;
    return nullptr;
  });
  const bool slides = r.tap_step == r.input_pixel;
  const Kernel* const of_size = kernels.data() + (slides ? M * M : 0);
  const int64_t most_along = most(1, least(along, slides ? M : M / 2));
  const int64_t most_rows = most_along == 1 ? M / 2 : least(kPieceRows, M / most_along);
  in_pieces(rows, most_rows, [&](int64_t row, int64_t rows_now) {
    const Tap* const of_rows = taps + row * along;
    in_pieces(along, most_along, [&](int64_t first, int64_t now) {
      const Kernel kernel = of_size[(rows_now - 1) * M + now - 1];
      if (now == along || (r.left | r.right) == 0)
        kernel(sums, of_rows + first, along, r);
      else
        accumulate_piece(kernel, sums, of_rows, along, first, now, r);
    });
  });
}

// sums += sum over pixels of grad.
template <class T, int N, class X>
void sum_rows(T* sums, const Rows<X>& r) {
  Vec<T, N> total = {};
  for (int64_t d = 0; d < r.depth; ++d)
    for (int64_t h = 0; h < r.rows; ++h)
      total += sum_vectors<T, N>(r.grad + d * r.grad_slice + h * r.grad_row, r.grad_pixel, r.pixels);
  add_to<T, N>(sums, total);
}

}  // namespace
