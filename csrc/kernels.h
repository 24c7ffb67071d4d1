// The two loops that do all the arithmetic. Both see a source as pixels of vectors at a fixed pitch, and kernel
// elements as a list of offsets ("taps"); neither knows a dimension, a border or a layout.
//
// Where kernel elements lie as far apart as the pixels that are computed together (the dilation is the stride), they
// share their loads: `correlate` takes three of them at once, `accumulate` a whole row. Elsewhere each multiply-add has
// a load of its own; two loads a cycle are then the same limit as two multiply-adds.
//
// What limits them: up to 9 kernel elements the bytes, from 25 on the multiply-adds. Where 16-bit storage is converted
// by the load, the bytes are half as many; a load takes one instruction more, and to round a result to bfloat16 takes
// seven. On 4 cores of a Zen 3, channels_last 3x3 kernels reach 80 to 110 % of the roofline on images of 28x28 and
// more, 5x5 and 7x7 kernels 40 to 85 %, and 3x3 kernels on small images, with more to set up for each product, 40 to
// 80 %. Results in rows of 7 or fewer wait for the additions of their own sums, 4 cycles for each kernel element.
// docs/performance.md has the tables and their commands.
#pragma once

#include "ahead.h"
#include "vector.h"

namespace {

// The step from pixel to pixel that kernels are compiled for: in scratch memory. Storage that is converted by the load
// lies in a tensor; there only a tensor of N channels has this step, which is not worth kernels of its own.
template <class T, int N, class X>
constexpr int kPackedStep = std::is_same<T, X>::value ? N : 0;

// A kernel element as the inner loops see it.
struct Tap {
  int64_t source, weight;  // offsets in elements
};

// Most result pixels (correlate) and most kernel elements (accumulate) whose sums stay in registers at once.
constexpr int kMostSums = 12;
constexpr int kMostTaps = 10;

// The same pointer, about which the compiler knows nothing. Else it keeps a sum of pointer and offset for every tap,
// more than there are registers, and each multiply-add waits for one of them.
template <class T>
inline const T* opaque(const T* pointer) {
  asm("" : "+r"(pointer));
  return pointer;
}

// ---- correlate ------------------------------------------------------------------------------------------------------

// Memory of a tensor is asked for this far ahead of the pixels that are computed: far enough for it to answer in time,
// near enough to stay in the first-level cache.
constexpr int64_t kAheadBytes = 8192;

// Rows of result pixels that the same kernel elements reach. T: arithmetic, X: of the source, S: of the result.
template <class T, class X, class S>
struct Run {
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
  Ahead* ahead;
  const X* newest;  // the first pixel's last row, which no row of results before has read; null: nothing is asked for
  int64_t new_rows, new_row;  // how many such rows, and from one to the one above it

  // Pixels of a tensor with many channels lie far apart, and the processor's own prefetching does not see that their
  // memory is read and written from end to end: ask for what comes after `pixels`, of some lanes' share.
  void ask_ahead(int64_t pixels, int64_t lane, int64_t lanes) const {
    const int64_t ahead = kAheadBytes / int64_t(sizeof(X)), ahead_there = kAheadBytes / int64_t(sizeof(S));
    for (int64_t row = 0; row < new_rows; ++row)
      ask_for<0>(newest - row * new_row + ahead + lane * pixels * source_columns, lanes * pixels * source_columns);
    ask_for<1>(result + ahead_there + lane * pixels * result_columns, lanes * pixels * result_columns);
  }
};

// sum[p] += source[(p + g) * step] * weight[taps[g]] for P pixels and G taps that lie one step apart: each source pixel
// is loaded once for all of them.
template <class T, int N, int P, int G, class X>
inline void add_taps(Vec<T, N>* sum, const X* source, int64_t step, const T* weight, const Tap* taps) {
  Vec<T, N> w[G];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) w[g] = load<T, N>(weight + taps[g].weight);
  source += taps->source;
#pragma GCC unroll 16
  for (int i = 0; i < P + G - 1; ++i) {
    const Vec<T, N> x = load<T, N>(source + i * step);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
      if (i >= g && i - g < P) sum[i - g] += w[g] * x;
  }
}

// result[p] = start + sum over taps of source[p * source_step + tap] * weight[tap], for P pixels of one vector in each
// row. Step: source_step where it is known when compiled, else 0. G: so many taps are taken at once.
template <class T, int N, class X, class S, int P, int Step, int G>
void correlate(const Run<T, X, S>& run, int64_t lane, int64_t live) {
  const int64_t step = Step ? Step : run.source_step;
  const Vec<T, N> start = load<T, N>(run.start + lane);
  const X* source = run.source + lane * run.source_lane;
  const T* weight = run.weight + lane * run.weight_lane;
  const Tap *const taps = run.taps, *const end = taps + run.count;
  S* to = run.result + lane;
  const int64_t due = run.ahead->due(P * run.count);
  for (int64_t row = 0; row < run.rows; ++row, source += run.source_row, to += run.result_row) {
    run.ahead->ask(due);
    Vec<T, N> sum[P];
#pragma GCC unroll 12
    for (int p = 0; p < P; ++p) sum[p] = start;
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
#pragma GCC unroll 12
      for (int p = 0; p < P; ++p) store<T, N>(to + p * run.result_step, sum[p]);
    } else {
#pragma GCC unroll 12
      for (int p = 0; p < P; ++p) store_first<T, N>(to + p * run.result_step, sum[p], live);
    }
  }
}

// The kernel for a run of so many pixels, at most kMostSums.
template <class T, int N, class X, class S, int... P>
auto correlate_kernel(const Run<T, X, S>& run, int64_t pixels, std::integer_sequence<int, P...>) {
  using Kernel = void (*)(const Run<T, X, S>&, int64_t, int64_t);
  static constexpr Kernel kernels[3][sizeof...(P)] = {{correlate<T, N, X, S, P + 1, 0, 1>...},
                                                      {correlate<T, N, X, S, P + 1, 0, 3>...},
                                                      {correlate<T, N, X, S, P + 1, kPackedStep<T, N, X>, 3>...}};
  return kernels[run.along < 3 ? 0 : run.source_step == N ? 2 : 1][pixels - 1];
}

// All lanes of a run in a tensor. The last vector begins early enough to be full.
template <class T, int N, class X, class S, class Sizes>
void correlate_lanes(const Run<T, X, S>& run, int64_t pixels, int64_t live, Sizes sizes) {
  const auto kernel = correlate_kernel<T, N>(run, pixels, sizes);
  for (int64_t lane = 0; lane < live; lane += N) {
    if (run.newest) run.ask_ahead(pixels, lane, N);
    kernel(run, least(lane, live - N), N);
  }
}

// ---- accumulate -----------------------------------------------------------------------------------------------------

// A block of rows of grad_output, and the first input pixel of the same rows.
template <class X>
struct Rows {
  const X *grad, *input;
  int64_t depth, rows, pixels;                  // extent
  int64_t grad_slice, grad_row, grad_pixel;     // steps in elements
  int64_t input_slice, input_row, input_pixel;
  int64_t tap_step;  // from a kernel element to the next of its row
  int64_t left, right;  // so many of a kernel row's taps the first (last) pixel of a row lacks, the next one less by one
  Ahead* ahead;
};

// sum[u][j * W + k] += grad[v] * input[v + k of row j] for V pixels v, u = v % U. Sliding: taps lie as far apart as
// pixels, so that an input pixel is loaded once for all taps of a row.
template <class T, int N, int R, int W, int U, int V, bool Sliding, class X>
inline void add_pixels(Vec<T, N> (*sum)[R * W], const int64_t* offset, const X* grad, const X* input, int64_t step,
                       const Rows<X>& r) {
  Vec<T, N> g[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) g[v] = load<T, N>(grad + v * r.grad_pixel);
#pragma GCC unroll 10
  for (int j = 0; j < R; ++j) {
    const X* row = opaque(input + offset[j]);
    if constexpr (Sliding && W > 1) {
#pragma GCC unroll 18
      for (int i = 0; i < V + W - 1; ++i) {
        const Vec<T, N> x = load<T, N>(row + i * step);
#pragma GCC unroll 10
        for (int k = 0; k < W; ++k)
          if (i >= k && i - k < V) sum[(i - k) % U][j * W + k] += g[i - k] * x;
      }
    } else {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
#pragma GCC unroll 10
        for (int k = 0; k < W; ++k) sum[v % U][j * W + k] += g[v] * load<T, N>(row + v * r.input_pixel + k * step);
      }
    }
  }
}

// The same for one pixel at the border of a row and the taps [First, Last) of the kernel rows.
template <class T, int N, int R, int W, int First, int Last, class X>
inline void add_border(Vec<T, N>* sum, const int64_t* offset, const X*& grad, const X*& input, int64_t step,
                       const Rows<X>& r) {
  const Vec<T, N> g = load<T, N>(grad);
#pragma GCC unroll 10
  for (int j = 0; j < R; ++j) {
    const X* row = opaque(input + offset[j]);
#pragma GCC unroll 10
    for (int k = First; k < Last; ++k) sum[j * W + k] += g * load<T, N>(row + k * step);
  }
  grad += r.grad_pixel, input += r.input_pixel;
}
template <class T, int N, int R, int W, int U, class X, int... I>
inline void add_left(Vec<T, N> (*sum)[R * W], const int64_t* offset, const X*& grad, const X*& input, int64_t step,
                     const Rows<X>& r, std::integer_sequence<int, I...>) {
  ((r.left >= W - 1 - I ? add_border<T, N, R, W, W - 1 - I, W>(sum[I % U], offset, grad, input, step, r) : void()), ...);
}
template <class T, int N, int R, int W, int U, class X, int... I>
inline void add_right(Vec<T, N> (*sum)[R * W], const int64_t* offset, const X*& grad, const X*& input, int64_t step,
                      const Rows<X>& r, std::integer_sequence<int, I...>) {
  ((r.right >= I + 1 ? add_border<T, N, R, W, 0, W - 1 - I>(sum[I % U], offset, grad, input, step, r) : void()), ...);
}

// sums[tap] += sum over pixels of grad * input[tap], for R kernel rows of W taps that lie one step apart. Step: that
// step where it is known when compiled, else 0. Few taps have U sums each, enough of them to hide an addition's
// latency.
template <class T, int N, class X, int R, int W, int Step, bool Sliding>
void accumulate(T* sums, const Tap* taps, int64_t along, const Rows<X>& r) {
  constexpr int K = R * W, U = K == 1 ? 8 : K == 2 ? 4 : K <= 5 ? 2 : 1;
  constexpr int V = K == 1 ? 8 : !Sliding && K != 2 ? U : K <= 8 && U == 1 ? 6 : 4;  // pixels at once
  const int64_t step = Step ? Step : r.tap_step;
  constexpr auto kBorders = std::make_integer_sequence<int, W - 1>();
  Vec<T, N> sum[U][K] = {};
  int64_t offset[R];
#pragma GCC unroll 10
  for (int j = 0; j < R; ++j) offset[j] = taps[j * along].source;
  const int64_t due = r.ahead->due(K * r.pixels);
  for (int64_t d = 0; d < r.depth; ++d) {
    for (int64_t h = 0; h < r.rows; ++h) {
      r.ahead->ask(due);
      const X* grad = r.grad + d * r.grad_slice + h * r.grad_row;
      const X* input = r.input + d * r.input_slice + h * r.input_row;
      int64_t left = r.pixels;
      if constexpr (Sliding && W > 1) {
        left -= r.left + r.right;
        if (r.left) add_left<T, N, R, W, U>(sum, offset, grad, input, step, r, kBorders);
      }
      for (; left >= V; left -= V, grad += V * r.grad_pixel, input += V * r.input_pixel)
        add_pixels<T, N, R, W, U, V, Sliding>(sum, offset, grad, input, step, r);
      for (; V > 1 && left > 0; --left, grad += r.grad_pixel, input += r.input_pixel)
        add_pixels<T, N, R, W, U, 1, false>(sum, offset, grad, input, step, r);
      if constexpr (Sliding && W > 1) {
        if (r.right) add_right<T, N, R, W, U>(sum, offset, grad, input, step, r, kBorders);
      }
    }
  }
#pragma GCC unroll 10
  for (int k = 0; k < K; ++k) {
    Vec<T, N> total = sum[0][k];
#pragma GCC unroll 8
    for (int u = 1; u < U; ++u) total += sum[u][k];
    T* to = sums + taps[k / W * along + k % W].weight;
    store<T, N>(to, load<T, N>(to) + total);
  }
}

// The kernels by rows and by taps in a row; null where these are more than the registers hold.
template <class T, int N, class X, int R, int W, int Step, bool Sliding>
constexpr auto accumulate_kernel() {
  using Kernel = void (*)(T*, const Tap*, int64_t, const Rows<X>&);
  if constexpr (R * W <= kMostTaps)
    return static_cast<Kernel>(accumulate<T, N, X, R, W, Step, Sliding>);
  else
    return static_cast<Kernel>(nullptr);
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
template <class T, int N, class X, int... I>
void accumulate_all(T* sums, const Tap* taps, int64_t rows, int64_t along, const Rows<X>& r,
                    std::integer_sequence<int, I...>) {
  using Kernel = void (*)(T*, const Tap*, int64_t, const Rows<X>&);
  constexpr int M = kMostTaps;
  constexpr int P = kPackedStep<T, N, X>;
  static constexpr Kernel kernels[3][sizeof...(I)] = {{accumulate_kernel<T, N, X, I / M + 1, I % M + 1, 0, false>()...},
                                                      {accumulate_kernel<T, N, X, I / M + 1, I % M + 1, 0, true>()...},
                                                      {accumulate_kernel<T, N, X, I / M + 1, I % M + 1, P, true>()...}};
  const Kernel* const of_size = kernels[r.tap_step != r.input_pixel ? 0 : r.tap_step == N ? 2 : 1];
  const int64_t most_along = most(1, least(along, M)), most_rows = M / most_along;
  for (int64_t row_pieces = ceil_div(rows, most_rows); row_pieces > 0; --row_pieces) {
    const int64_t rows_now = row_pieces == 1 ? rows : ceil_div(rows, row_pieces);
    int64_t left = along;
    for (int64_t pieces = ceil_div(along, most_along); pieces > 0; --pieces) {
      const int64_t now = pieces == 1 ? left : ceil_div(left, pieces);
      const auto kernel = of_size[(rows_now - 1) * M + now - 1];
      if (now == along || (r.left | r.right) == 0)
        kernel(sums, taps + along - left, along, r);
      else
        accumulate_piece(kernel, sums, taps, along, along - left, now, r);
      left -= now;
    }
    taps += rows_now * along, rows -= rows_now;
  }
}

// sums += sum over pixels of grad.
template <class T, int N, class X>
void sum_rows(T* sums, const Rows<X>& r) {
  Vec<T, N> total[4] = {};  // enough to hide the latency of an addition
  for (int64_t d = 0; d < r.depth; ++d) {
    for (int64_t h = 0; h < r.rows; ++h) {
      const X* grad = r.grad + d * r.grad_slice + h * r.grad_row;
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
