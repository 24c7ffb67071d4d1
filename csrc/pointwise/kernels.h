// The loop of pointwise convolutions. Its sums stay in registers; 24 (12 without AVX-512) need 11 (7) loads for as many
// multiply-adds, so that these are the limit, if memory is prefetched meanwhile and all addresses are in registers.
#pragma once

#include "plan.h"

namespace {

// Memory that is needed next, prefetched so that memory and arithmetic work at the same time: lines at equal distances,
// one in every step of the loop, and so much further on for the next vectors. Into the second-level cache: in the
// first, which holds about as much as one run of the loop reads, they would displace that.
struct AheadInTensor {
  const char* at;
  int64_t distance, further;

  // Prefetches the same lines for all vectors.
  template <class T>
  static AheadInTensor of(const T* at, int64_t distance) {
    return {reinterpret_cast<const char*>(at), distance * int64_t(sizeof(T)), 0};
  }
  __attribute__((always_inline)) void step() {
    __builtin_prefetch(at, 0, 2);
    at += distance;
  }
};

// ---- sums of products in registers ----------------------------------------------------------------------------------

// For some rows and some vectors, the sum over terms of weight[row, term] * source[vector, term]. The weights are
// packed, or lie in a tensor; then memory is prefetched meanwhile.
template <class T, bool InTensor>
struct PointwiseProducts {
  typedef T Arithmetic;
  static constexpr bool kInTensor = InTensor;
  const T *weight, *source;  // of each row and term; [vector][term][lane]
  int64_t together, gap;     // terms whose weights are one step apart; elements to skip after them
  int64_t pitch, terms;      // elements from vector to vector of the source; number of terms
  AheadInTensor* ahead;      // null where the weights are packed
};

// Elements from row to row and from term to term of the weights, and from term to term of the source.
struct PointwiseSteps {
  int64_t row, term, source;
};

template <int N, int R, int P, class Products>
void multiply(const Products& run) {
  using T = typename Products::Arithmetic;
  Vec<T, N> sum[R][P];
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int p = 0; p < P; ++p) sum[r][p] = run.template start_of<N>(r, p);
  const auto [row_step, term_step, source_step] = run.template steps<N>();
  const int64_t pitch = run.pitch;
  const T *weight = run.weight, *source = run.source;
  AheadInTensor ahead = Products::kInTensor ? *run.ahead : AheadInTensor{};
  run.template prefetch<N, R, P>();
  for (int64_t left = run.terms, now; left > 0; left -= now) {
    now = least(left, run.together);
    for (const T* end = source + now * source_step; source != end; source += source_step, weight += term_step) {
      // The addresses of eight rows that lie anywhere would take as many registers: those of every third, and one step
      // and two from there.
      const T* third[] = {weight, weight, weight};
      UNROLL for (int i = 1; i < 3; ++i)
        if (Products::kInTensor && R > 3 * i) third[i] = opaque(third[i - 1] + 3 * row_step);
      Vec<T, N> x[P];
      UNROLL for (int p = 0; p < P; ++p) x[p] = load<T, N>(source + p * pitch);
      UNROLL for (int r = 0; r < R; ++r) {
        const T w = Products::kInTensor ? third[r / 3][r % 3 * row_step] : weight[r * row_step];
        UNROLL for (int p = 0; p < P; ++p) sum[r][p] += w * x[p];
      }
      if (Products::kInTensor) ahead.step();
    }
    weight += run.gap;
  }
  if (Products::kInTensor) run.ahead->at += run.ahead->further;
  run.template store<N>(sum);
}

template <int N, int R, class Products>
void multiply_vectors(Products run, int64_t vectors) {
  static constexpr auto kernels = make_all<kPointwiseColumns>([](auto p) { return multiply<N, R, p + 1, Products>; });
  // Nearly equal pieces, without a division, which takes as long as a tenth of a piece.
  const int64_t pieces = ceil_div(vectors, kPointwiseColumns), shorter = pieces * kPointwiseColumns - vectors;
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t now = pieces == 1 ? vectors : kPointwiseColumns - (i >= pieces - shorter);
    kernels[now - 1](run);
    run.source += now * run.pitch;
    run.template advance<N>(now);
  }
}
// Multiplies up to kPointwiseRows rows by any number of vectors: 8, 4, 2 or 1 rows at a time, few loops for all
// numbers.
template <int N, class Products>
void multiply_rows(const Products& run, int64_t rows, int64_t vectors) {
  constexpr int kSizes = kPointwiseRows == 8 ? 4 : 3;
  static constexpr auto kernels = make_all<kSizes>([](auto i) { return multiply_vectors<N, 1 << i, Products>; });
  if (rows == kPointwiseRows) return kernels[kSizes - 1](run, vectors);  // to copy it takes as long as a few terms
  Products left = run;
  for (int i = kSizes - 2; i >= 0; --i)
    if (rows >> i & 1) kernels[i](left, vectors), left.template skip_rows<N>(1 << i);
}

// ---- results: a row is one of their channels, a term one of the source's, a vector a column -------------------------

template <class S, class T>
struct PointwiseResults : PointwiseProducts<T, false> {
  const T* start;  // first summand of each row
  S* result;
  int64_t pixels, image;  // elements from row to row, from image to image
  const Column* columns;
  int64_t rows;  // rows of the packed weights

  template <int N>
  PointwiseSteps steps() const { return {1, rows, N}; }
  template <int N>
  void skip_rows(int64_t count) { this->weight += count, start += count, result += count * pixels; }
  template <int N>
  Vec<T, N> start_of(int row, int) const { return start[row] - Vec<T, N>{}; }
  template <int N>
  void advance(int64_t vectors) { columns += vectors; }

  // Prefetches the results that are written after the loop.
  template <int N, int R, int P>
  __attribute__((always_inline)) void prefetch() const {
    UNROLL for (int p = 0; p < P; ++p) {
      const S* to = result + columns[p].image * image + columns[p].pixel;
      UNROLL for (int r = 0; r < R; ++r) __builtin_prefetch(to + r * pixels, 1);
    }
  }

  // Whole vectors go where they belong; others by way of memory, a piece for each image. What is known of the tensor is
  // read before it may have been overwritten.
  template <int N, int R, int P>
  __attribute__((always_inline)) void store(const Vec<T, N> (&sum)[R][P]) const {
    S* const result = this->result;
    const int64_t pixels = this->pixels, image = this->image;
    const Column* const columns = this->columns;
    bool whole = true;
    for (int p = 0; p < P; ++p) whole = whole && columns[p].whole;
    if (whole) {
      UNROLL for (int p = 0; p < P; ++p) {
        S* to = result + columns[p].image * image + columns[p].pixel;
        UNROLL for (int r = 0; r < R; ++r) ::store<T, N>(to + r * pixels, sum[r][p]);
      }
      return;
    }
    // Of all before the first call: sums that outlive one would live in memory, in the loop above too.
    S results[P * R * N + N];  // a vector may be read from any lane on
    UNROLL for (int p = 0; p < P; ++p)
      UNROLL for (int r = 0; r < R; ++r) ::store<T, N>(results + (p * R + r) * N, sum[r][p]);
    for (int p = 0; p < P; ++p) {
      const Column& c = columns[p];
      S* to = result + c.image * image + c.pixel;
      for (int64_t lane = 0, pixel = c.pixel; lane < c.live; pixel = 0) {
        const int64_t now = least(c.live - lane, pixels - pixel);
        UNROLL for (int r = 0; r < R; ++r)
          store_first<T, N>(to + r * pixels, load<T, N>(results + (p * R + r) * N + lane), now);
        to += image - pixel, lane += now;
      }
    }
  }
};

// ---- grad_weight: a row is a channel of grad_output, a term a pixel, a lane a channel of the input ------------------

// It also computes results in channels_last: a row is a pixel, a term a channel of the source, a lane one of the
// results. InTensor: the weights lie in a tensor in channels_last, else packed as [vector of terms][row][term]. S: of
// the results.
template <class S, class T, bool InTensor>
struct PointwiseSums : PointwiseProducts<T, InTensor> {
  PointwiseSteps step;  // in a tensor
  S* to;
  int64_t row, lanes;  // elements from row to row; number of lanes
  bool add;            // whether to add to the results that are there
  const T* start;      // first summand of each lane; null: zeros

  template <int N>
  PointwiseSteps steps() const { return InTensor ? step : PointwiseSteps{N, 1, N}; }
  template <int N>
  void skip_rows(int64_t count) { this->weight += count * steps<N>().row, to += count * row; }
  template <int N>
  Vec<T, N> start_of(int, int vector) const { return start ? load<T, N>(start + vector * N) : Vec<T, N>{}; }
  // Prefetches the results that are written after the loop, or added to.
  template <int N, int R, int P>
  __attribute__((always_inline)) void prefetch() const {
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int p = 0; p < P; ++p) __builtin_prefetch(to + r * row + p * N, 1);
  }
  template <int N>
  void advance(int64_t vectors) {
    to += vectors * N, lanes -= vectors * N, start += start ? vectors * N : 0;
  }

  template <int N, int R, int P>
  __attribute__((always_inline)) void store(const Vec<T, N> (&sum)[R][P]) const {
    auto* at = this->to;
    const int64_t row = this->row, lanes = this->lanes;
    const bool add = this->add;
    if (lanes >= P * N) {
      auto put = [&](auto adds) {
        UNROLL for (int r = 0; r < R; ++r, at += row)
          UNROLL for (int p = 0; p < P; ++p)
            ::store<T, N>(at + p * N, adds ? sum[r][p] + load<T, N>(at + p * N) : sum[r][p]);
      };
      return add ? put(std::true_type()) : put(std::false_type());
    }
    T sums[R][P * N];  // of all before the first call, as above
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int p = 0; p < P; ++p) ::store<T, N>(sums[r] + p * N, sum[r][p]);
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int p = 0; p < P; ++p) {
        auto* const to = at + r * row + p * N;
        const auto now = load<T, N>(sums[r] + p * N);
        const int64_t live = lanes - p * N;
        store_first<T, N>(to, add ? now + load_first<T, N>(to, live) : now, live);
      }
  }
};

}  // namespace
