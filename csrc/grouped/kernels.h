// The two loops of grouped convolutions. A vector holds neighboring pixels of one channel, so that a weight is one
// number for all lanes; several channels and several vectors of pixels, or several kernel elements, share what is
// loaded.
//
// Twelve sums (24 with AVX-512) take 7 loads for 12 multiply-adds where a group has 4 channels or more: unlike the
// depthwise loops (vectors/kernels.h) these are limited by the multiply-adds themselves.
#pragma once

#include "../vectors/kernels.h"
#include "../vectors/reduce.h"

namespace {

constexpr int kPlaneSums = kVectorBytes == 64 ? 24 : 12;
// Most channels that share a load.
constexpr int kMostChannels = 4;

// sum[a][b] += left(a) * right(b). One list is kept in registers, the other one loaded one by one: the left one where
// the right one would leave too few for the sums. Opaque: else GCC loads an element again for each of its products.
template <int A, int B, class V, class Left, class Right>
__attribute__((always_inline)) inline void add_products(V (&sum)[A][B], const Left& left, const Right& right) {
  constexpr int kRegisters = kVectorBytes == 64 ? 32 : 16;
  if constexpr (A > 1 && A * B + B < kRegisters) {
    V kept[B];
    UNROLL for (int b = 0; b < B; ++b) kept[b] = opaque(right(b));
    UNROLL for (int a = 0; a < A; ++a) {
      const V one = opaque(left(a));
      UNROLL for (int b = 0; b < B; ++b) sum[a][b] += one * kept[b];
    }
  } else {
    V kept[A];
    UNROLL for (int a = 0; a < A; ++a) kept[a] = opaque(left(a));
    UNROLL for (int b = 0; b < B; ++b) {
      const V one = A > 1 ? opaque(right(b)) : right(b);
      UNROLL for (int a = 0; a < A; ++a) sum[a][b] += kept[a] * one;
    }
  }
}

// ---- correlate_planes -----------------------------------------------------------------------------------------------

// Pixels of several result channels, from channels of the source at the same pitch.
template <class T>
struct PlaneRun {
  T* result;
  int64_t result_channel;  // step
  const T* source;
  const T* weight;         // of the first result channel
  int64_t weight_channel;  // step
  const T* start;          // of the first result channel; those of the others follow
  const Tap* taps;
  int64_t count;
};

// result[r][pixel] = start[r] + sum over taps of source[pixel + tap] * weight[r][tap], for R channels and P vectors.
template <class T, int N, int R, int P>
void correlate_planes(const PlaneRun<T>& run) {
  Vec<T, N> sum[R][P];
  UNROLL for (int r = 0; r < R; ++r) {
    const Vec<T, N> start = run.start[r] - Vec<T, N>{};
    UNROLL for (int p = 0; p < P; ++p) sum[r][p] = start;
  }
  for (const Tap *tap = run.taps, *end = tap + run.count; tap != end; ++tap) {
    const T *from = run.source + tap->source, *weight = run.weight + tap->weight;
    add_products<R, P>(
        sum, [&](int r) { return weight[r * run.weight_channel] - Vec<T, N>{}; },
        [&](int p) { return load<T, N>(from + p * N); });
  }
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int p = 0; p < P; ++p) store<T, N>(run.result + r * run.result_channel + p * N, sum[r][p]);
}

template <class T, int N, int R>
void correlate_vectors(PlaneRun<T> run, int64_t vectors) {
  static constexpr auto kernels = make_all<kPlaneSums / R>([](auto p) { return correlate_planes<T, N, R, p + 1>; });
  in_pieces(vectors, kPlaneSums / R, [&](int64_t, int64_t now) {
    kernels[now - 1](run);
    run.result += now * N, run.source += now * N;
  });
}

// Any number of result channels and vectors. A few thousand pixels at a time: all channels find them in the cache. Of a
// single vector of pixels, so few channels as share a load would leave most of the time to waiting for a sum.
template <class T, int N>
void correlate_channels(PlaneRun<T> run, int64_t channels, int64_t vectors) {
  static constexpr auto few = make_all<kMostChannels>([](auto r) { return correlate_vectors<T, N, r + 1>; });
  static constexpr auto many = make_all<8>([](auto r) { return correlate_planes<T, N, r + 1, 1>; });
  constexpr int64_t most_vectors = 4 * kPlaneSums;
  for (; vectors > 0; vectors -= most_vectors, run.result += most_vectors * N, run.source += most_vectors * N)
    in_pieces(channels, vectors == 1 ? many.size() : few.size(), [&](int64_t first, int64_t now) {
      PlaneRun<T> part = run;
      part.result += first * run.result_channel, part.weight += first * run.weight_channel, part.start += first;
      vectors == 1 ? many[now - 1](part) : few[now - 1](part, least(most_vectors, vectors));
    });
}

// ---- accumulate_planes ----------------------------------------------------------------------------------------------

// Rows of pixels of several images, in grad_output and in the input.
template <class T>
struct PlaneRows {
  const T *grad, *input;
  int64_t images, depth, rows, pixels;
  int64_t grad_channel, grad_image, grad_slice, grad_row;  // steps
  int64_t input_image, input_slice, input_row;
};

// sums[a][b] += sum over pixels of grad[a] * input[tap b], for A channels and B taps. In the last vector of a row both
// are masked: a zero would not hide an infinity beyond the row.
template <class T, int N, int A, int B>
void accumulate_planes(T* sums, int64_t channel, const Tap* taps, const PlaneRows<T>& r) {
  Vec<T, N> sum[A][B] = {};
  int64_t offset[B];
  UNROLL for (int b = 0; b < B; ++b) offset[b] = taps[b].source;
  const int64_t rest = r.pixels % N;
  const Mask<T, N> mask = first_lanes<T, N>(rest);
  for (int64_t n = 0; n < r.images; ++n)
    for (int64_t d = 0; d < r.depth; ++d)
      for (int64_t h = 0; h < r.rows; ++h) {
        const T* grad = r.grad + n * r.grad_image + d * r.grad_slice + h * r.grad_row;
        const T* input = r.input + n * r.input_image + d * r.input_slice + h * r.input_row;
        auto add = [&](auto load_from) {
          add_products<A, B>(
              sum, [&](int a) { return load_from(grad + a * r.grad_channel); },
              [&](int b) { return load_from(input + offset[b]); });
        };
        for (const T* end = grad + (r.pixels - rest); grad != end; grad += N, input += N)
          add([](const T* from) { return load<T, N>(from); });
        if (rest) add([&](const T* from) { return masked<T, N>(load<T, N>(from), mask); });
      }
  store_lanes<T, N, A, B>(sums, channel, sum, true);
}

template <class T, int N, int A>
void accumulate_taps(T* sums, const Tap* taps, int64_t count, const PlaneRows<T>& rows) {
  constexpr int kTogether = kPlaneSums / (A > 1 ? A : 2);
  static constexpr auto kernels = make_all<kTogether>([](auto b) { return accumulate_planes<T, N, A, b + 1>; });
  in_pieces(count, kTogether, [&](int64_t first, int64_t now) {
    kernels[now - 1](sums + first, count, taps + first, rows);
  });
}

// Any number of channels of grad_output and of taps; `sums` is [channel][tap].
template <class T, int N>
void accumulate_channels(T* sums, int64_t channels, const Tap* taps, int64_t count, PlaneRows<T> rows) {
  static constexpr auto kernels = make_all<kMostChannels>([](auto a) { return accumulate_taps<T, N, a + 1>; });
  in_pieces(channels, kMostChannels, [&](int64_t first, int64_t now) {
    kernels[now - 1](sums + first * count, taps, count, rows);
    rows.grad += now * rows.grad_channel;
  });
}

// The sum over pixels of one channel of grad_output.
template <class T, int N>
T sum_plane(const PlaneRows<T>& r) {
  Vec<T, N> total = {};
  for (int64_t n = 0; n < r.images; ++n)
    for (int64_t d = 0; d < r.depth; ++d)
      for (int64_t h = 0; h < r.rows; ++h)
        total += sum_elements<T, N>(r.grad + n * r.grad_image + d * r.grad_slice + h * r.grad_row, r.pixels);
  return sum_of_lanes<T, N>(total);
}

}  // namespace
