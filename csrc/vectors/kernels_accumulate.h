// The loop of grad_weight: sums of a few kernel elements stay in registers while it runs over the pixels.
#pragma once

#include "kernels.h"
#include "prefetcher.h"
#include "reduce.h"

namespace {

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

// The same for one pixel at the border of a row and the taps [First, Last) of the kernel rows.
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
// All pixels that lack taps, at one end of a row: the first taps at its beginning, the last ones at its end.
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
  // By rows and taps in a row, those that slide after the others; null where no piece has this size.
  static constexpr auto kernels = make_all<2 * M * M>([](auto i) -> Kernel {
    constexpr int R = i / M % M + 1, W = i % M + 1;
    if constexpr (R * W <= M && (W == 1 || R <= kPieceRows)) return accumulate<T, N, X, R, W, (W == 1 || i >= M * M)>;
    return nullptr;
  });
  const Kernel* const of_size = kernels.data() + (r.tap_step == r.input_pixel ? M * M : 0);
  const int64_t most_along = most(1, least(along, M));
  const int64_t most_rows = most_along == 1 ? M : least(kPieceRows, M / most_along);
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
  Vec<T, N> total = {};
  for (int64_t d = 0; d < r.depth; ++d)
    for (int64_t h = 0; h < r.rows; ++h)
      total += sum_vectors<T, N>(r.grad + d * r.grad_slice + h * r.grad_row, r.grad_pixel, r.pixels);
  add_to<T, N>(sums, total);
}

}  // namespace
