// Sums over pixels, over lanes, and over the parts that work items have added up.
#pragma once

#include "plan.h"
#include "vector.h"

namespace {

// The sums of the lanes of the vectors [0, N), which are spoilt: those of two vectors meet in one, half of its lanes
// each.
template <class T, int N, int B = N / 2>
inline Vec<T, N> sum_lanes(Vec<T, N>* rows) {
  constexpr auto lanes = std::make_integer_sequence<int, N>();
  UNROLL for (int i = 0; i < B; ++i)
    rows[i] = exchange<B, false>(rows[i], rows[i + B], lanes) + exchange<B, true>(rows[i], rows[i + B], lanes);
  if constexpr (B > 1) sum_lanes<T, N, B / 2>(rows);
  return rows[0];
}

// to[i] += the sum of the lanes of row i, for `count` rows of N lanes.
template <class T, int N>
void add_lanes(T* to, const T* rows, int64_t count) {
  for (; count > 0; count -= N, to += N, rows += N * N) {
    Vec<T, N> v[N] = {};
    UNROLL for (int i = 0; i < N; ++i)
      if (i < count) v[i] = load<T, N>(rows + i * N);
    const Vec<T, N> sums = sum_lanes<T, N>(v);
    for (int i = 0; i < N && i < count; ++i) to[i] += sums[i];
  }
}

// to[a * row + b] = the sum of the lanes of sums[a][b], on top of what is there if `add`. Inlined: the sums stay in
// registers until then.
template <class T, int N, int A, int B>
__attribute__((always_inline)) inline void store_lanes(T* to, int64_t row, const Vec<T, N> (&sums)[A][B], bool add) {
  T total[(A * B + N - 1) / N * N];
  UNROLL for (int first = 0; first < A * B; first += N) {
    Vec<T, N> rows[N];
    UNROLL for (int l = 0; l < N; ++l)
      rows[l] = first + l < A * B ? sums[(first + l) / B][(first + l) % B] : Vec<T, N>{};
    store<T, N>(total + first, sum_lanes<T, N>(rows));
  }
  UNROLL for (int a = 0; a < A; ++a, to += row)
    UNROLL for (int b = 0; b < B; ++b) to[b] = add ? to[b] + total[a * B + b] : total[a * B + b];
}

template <class T, int N>
inline void add_to(T* to, Vec<T, N> v) { store<T, N>(to, load<T, N>(to) + v); }

template <class T, int N>
inline T sum_of_lanes(const Vec<T, N>& v) {
  T sum = 0;
  for (int l = 0; l < N; ++l) sum += v[l];
  return sum;
}

// Returns whether none of `count` elements is an infinity or NaN.
template <class T, int N>
inline bool all_finite(const T* from, int64_t count) {
  Vec<T, N> zero[4] = {};  // several sums: each addition waits for the one before
  for (; count >= 4 * N; count -= 4 * N)
    for (int i = 0; i < 4; ++i, from += N) zero[i] += load<T, N>(from) * T(0);
  for (; count > 0; count -= N, from += N) zero[0] += load_first<T, N>(from, count) * T(0);
  return sum_of_lanes<T, N>((zero[0] + zero[1]) + (zero[2] + zero[3])) == 0;
}

// Returns the sum of `count` vectors, `step` elements apart.
template <class T, int N, class S>
inline Vec<T, N> sum_vectors(const S* from, int64_t step, int64_t count) {
  Vec<T, N> total[4] = {};  // enough to hide the latency of an addition
  for (; count >= 4; count -= 4) {
    UNROLL for (int u = 0; u < 4; ++u, from += step) total[u] += load<T, N>(from);
  }
  for (; count > 0; --count, from += step) total[0] += load<T, N>(from);
  return (total[0] + total[1]) + (total[2] + total[3]);
}
// Returns the sum of `count` consecutive elements, in lanes.
template <class T, int N, class S>
inline Vec<T, N> sum_elements(const S* from, int64_t count) {
  const Vec<T, N> total = sum_vectors<T, N>(from, N, count / N);
  return count % N ? total + load_first<T, N>(from + count / N * N, count % N) : total;
}

// Elements of grad_weight, and behind its last one of grad_bias: each the sum of `count` partial sums, `step` elements
// apart, always in the same order.
template <class T, int N, class S>
void reduce_partials(S* weight, int64_t weights, S* bias, const T* partial, int64_t step, int64_t count, Range of) {
  for (int64_t i = of.low, now = 0; i < of.high; i += now) {
    now = least(N, (i < weights ? least(weights, of.high) : of.high) - i);
    Vec<T, N> total = {};
    for (int64_t c = 0; c < count; ++c) total += load_first<T, N>(partial + c * step + i, now);
    store_first<T, N>(i < weights ? weight + i : bias + (i - weights), total, now);
  }
}

}  // namespace
