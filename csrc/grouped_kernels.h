// The two loops of grouped convolutions. A vector holds neighbouring pixels of one channel, so that a weight is one
// number for all lanes; several channels and several vectors of pixels, or several kernel elements, share what is
// loaded.
//
// Twelve sums (24 with AVX-512) take 7 loads for 12 multiply-adds where a group has 4 channels or more: unlike the
// depthwise loops (kernels.h) these are limited by the multiply-adds themselves.
#pragma once

#include "kernels.h"

namespace {

constexpr int kPlaneSums = kVectorBytes == 64 ? 24 : 12;
// Most channels that share a load.
constexpr int kMostChannels = 4;

// ---- correlate_planes -----------------------------------------------------------------------------------------------

// Pixels of several result channels, from channels of the source at the same pitch.
template <class T>
struct PlaneRun {
  T* result;
  int64_t result_channel;  // step
  const T* source;
  const T *weight, *start;  // of the first result channel; those of the others follow
  const Tap* taps;
  int64_t count;
};

// result[r][pixel] = start[r] + sum over taps of source[pixel + tap] * weight[tap][r], for R channels and P vectors.
template <class T, int N, int R, int P>
void correlate_planes(const PlaneRun<T>& run) {
  Vec<T, N> sum[R][P];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const Vec<T, N> start = run.start[r] - Vec<T, N>{};
#pragma GCC unroll 24
    for (int p = 0; p < P; ++p) sum[r][p] = start;
  }
  for (const Tap *tap = run.taps, *end = tap + run.count; tap != end; ++tap) {
    const T *from = run.source + tap->source, *weight = run.weight + tap->weight;
    Vec<T, N> x[P];
#pragma GCC unroll 24
    for (int p = 0; p < P; ++p) x[p] = load<T, N>(from + p * N);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const T w = weight[r];
#pragma GCC unroll 24
      for (int p = 0; p < P; ++p) sum[r][p] += w * x[p];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 24
    for (int p = 0; p < P; ++p) store<T, N>(run.result + r * run.result_channel + p * N, sum[r][p]);
  }
}

template <class T, int N, int R, int... P>
void correlate_vectors(PlaneRun<T> run, int64_t vectors, std::integer_sequence<int, P...>) {
  using Kernel = void (*)(const PlaneRun<T>&);
  static constexpr Kernel kernels[] = {correlate_planes<T, N, R, P + 1>...};
  for (int64_t pieces = ceil_div(vectors, sizeof...(P)); pieces > 0; --pieces) {
    const int64_t now = ceil_div(vectors, pieces);
    kernels[now - 1](run);
    run.result += now * N, run.source += now * N, vectors -= now;
  }
}

// Any number of result channels and vectors. A few thousand pixels at a time: all channels find them in the cache.
template <class T, int N>
void correlate_channels(const PlaneRun<T>& run, int64_t channels, int64_t vectors) {
  using Kernel = void (*)(PlaneRun<T>, int64_t);
  static constexpr Kernel kernels[] = {
      [](PlaneRun<T> r, int64_t v) { correlate_vectors<T, N, 1>(r, v, std::make_integer_sequence<int, kPlaneSums>()); },
      [](PlaneRun<T> r, int64_t v) {
        correlate_vectors<T, N, 2>(r, v, std::make_integer_sequence<int, kPlaneSums / 2>());
      },
      [](PlaneRun<T> r, int64_t v) {
        correlate_vectors<T, N, 3>(r, v, std::make_integer_sequence<int, kPlaneSums / 3>());
      },
      [](PlaneRun<T> r, int64_t v) {
        correlate_vectors<T, N, 4>(r, v, std::make_integer_sequence<int, kPlaneSums / 4>());
      }};
  constexpr int64_t most_vectors = 4 * kPlaneSums;
  for (int64_t at = 0; at < vectors; at += most_vectors)
    for (int64_t pieces = ceil_div(channels, kMostChannels), first = 0; pieces > 0; --pieces) {
      const int64_t now = ceil_div(channels - first, pieces);
      PlaneRun<T> part = run;
      part.result += first * run.result_channel + at * N, part.source += at * N;
      part.weight += first, part.start += first;
      kernels[now - 1](part, least(most_vectors, vectors - at));
      first += now;
    }
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

template <class T, int N>
using Mask = Vec<typename std::conditional<sizeof(T) == 8, int64_t, int32_t>::type, N>;

template <class T, int N>
inline Vec<T, N> load_masked(const T* from, Mask<T, N> mask) {
  return bit_cast<Vec<T, N>>(bit_cast<Mask<T, N>>(load<T, N>(from)) & mask);
}

template <class T, int N>
inline Mask<T, N> first_lanes(int64_t count) {
  Mask<T, N> mask = {};
  for (int l = 0; l < N; ++l) mask[l] = l < count ? -1 : 0;
  return mask;
}

// to[k] = the sum of the lanes of v[k].
template <class T, int N, int K>
inline void sum_lanes(T* to, const Vec<T, N>* v) {
#pragma GCC unroll 24
  for (int first = 0; first < K; first += N) {
    Vec<T, N> rows[N];
#pragma GCC unroll 16
    for (int l = 0; l < N; ++l) rows[l] = first + l < K ? v[first + l] : Vec<T, N>{};
    transpose<T, N>(rows);
#pragma GCC unroll 4
    for (int half = N / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
      for (int l = 0; l < half; ++l) rows[l] += rows[l + half];
    }
    store<T, N>(to + first, rows[0]);
  }
}

// sums[a][b] += sum over pixels of grad[a] * input[tap b], for A channels and B taps. In the last vector of a row both
// are masked: a zero would not hide an infinity beyond the row.
template <class T, int N, int A, int B>
void accumulate_planes(T* sums, int64_t channel, const Tap* taps, const PlaneRows<T>& r) {
  Vec<T, N> sum[A][B] = {};
  int64_t offset[B];
#pragma GCC unroll 24
  for (int b = 0; b < B; ++b) offset[b] = taps[b].source;
  const int64_t rest = r.pixels % N;
  const Mask<T, N> mask = first_lanes<T, N>(rest);
  for (int64_t n = 0; n < r.images; ++n)
    for (int64_t d = 0; d < r.depth; ++d)
      for (int64_t h = 0; h < r.rows; ++h) {
        const T* grad = r.grad + n * r.grad_image + d * r.grad_slice + h * r.grad_row;
        const T* input = r.input + n * r.input_image + d * r.input_slice + h * r.input_row;
        for (const T* end = grad + (r.pixels - rest); grad != end; grad += N, input += N) {
          Vec<T, N> x[B];
#pragma GCC unroll 24
          for (int b = 0; b < B; ++b) x[b] = load<T, N>(input + offset[b]);
#pragma GCC unroll 4
          for (int a = 0; a < A; ++a) {
            const Vec<T, N> g = load<T, N>(grad + a * r.grad_channel);
#pragma GCC unroll 24
            for (int b = 0; b < B; ++b) sum[a][b] += g * x[b];
          }
        }
        if (rest) {
          Vec<T, N> x[B];
#pragma GCC unroll 24
          for (int b = 0; b < B; ++b) x[b] = load_masked<T, N>(input + offset[b], mask);
#pragma GCC unroll 4
          for (int a = 0; a < A; ++a) {
            const Vec<T, N> g = load_masked<T, N>(grad + a * r.grad_channel, mask);
#pragma GCC unroll 24
            for (int b = 0; b < B; ++b) sum[a][b] += g * x[b];
          }
        }
      }
  T total[(A * B + N - 1) / N * N];
  sum_lanes<T, N, A * B>(total, sum[0]);
#pragma GCC unroll 4
  for (int a = 0; a < A; ++a) {
#pragma GCC unroll 24
    for (int b = 0; b < B; ++b) sums[a * channel + b] += total[a * B + b];
  }
}

template <class T, int N, int A, int... B>
void accumulate_taps(T* sums, int64_t channel, const Tap* taps, int64_t count, const PlaneRows<T>& rows,
                     std::integer_sequence<int, B...>) {
  using Kernel = void (*)(T*, int64_t, const Tap*, const PlaneRows<T>&);
  static constexpr Kernel kernels[] = {accumulate_planes<T, N, A, B + 1>...};
  for (int64_t pieces = ceil_div(count, sizeof...(B)); pieces > 0; --pieces) {
    const int64_t now = ceil_div(count, pieces);
    kernels[now - 1](sums, channel, taps, rows);
    sums += now, taps += now, count -= now;
  }
}

// Any number of channels of grad_output and of taps; `sums` is [channel][tap].
template <class T, int N>
void accumulate_channels(T* sums, int64_t channels, const Tap* taps, int64_t count, PlaneRows<T> rows) {
  using Kernel = void (*)(T*, const Tap*, int64_t, const PlaneRows<T>&);
  static constexpr Kernel kernels[] = {
      [](T* s, const Tap* t, int64_t c, const PlaneRows<T>& r) {
        accumulate_taps<T, N, 1>(s, c, t, c, r, std::make_integer_sequence<int, kPlaneSums>());
      },
      [](T* s, const Tap* t, int64_t c, const PlaneRows<T>& r) {
        accumulate_taps<T, N, 2>(s, c, t, c, r, std::make_integer_sequence<int, kPlaneSums / 2>());
      },
      [](T* s, const Tap* t, int64_t c, const PlaneRows<T>& r) {
        accumulate_taps<T, N, 3>(s, c, t, c, r, std::make_integer_sequence<int, kPlaneSums / 3>());
      },
      [](T* s, const Tap* t, int64_t c, const PlaneRows<T>& r) {
        accumulate_taps<T, N, 4>(s, c, t, c, r, std::make_integer_sequence<int, kPlaneSums / 4>());
      }};
  for (int64_t pieces = ceil_div(channels, kMostChannels), first = 0; pieces > 0; --pieces) {
    const int64_t now = ceil_div(channels - first, pieces);
    kernels[now - 1](sums + first * count, taps, count, rows);
    rows.grad += now * rows.grad_channel, first += now;
  }
}

// The sum over pixels of one channel of grad_output.
template <class T, int N>
T sum_plane(const PlaneRows<T>& r) {
  const int64_t rest = r.pixels % N;
  const Mask<T, N> mask = first_lanes<T, N>(rest);
  Vec<T, N> total = {};
  for (int64_t n = 0; n < r.images; ++n)
    for (int64_t d = 0; d < r.depth; ++d)
      for (int64_t h = 0; h < r.rows; ++h) {
        const T* grad = r.grad + n * r.grad_image + d * r.grad_slice + h * r.grad_row;
        for (const T* end = grad + (r.pixels - rest); grad != end; grad += N) total += load<T, N>(grad);
        if (rest) total += load_masked<T, N>(grad, mask);
      }
  T sum[N];
  sum_lanes<T, N, 1>(sum, &total);
  return sum[0];
}

}  // namespace
