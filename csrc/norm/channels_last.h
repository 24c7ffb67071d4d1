// Batch normalization of a tensor in channels_last: rows of channels, both steps from the first to the last, as memory
// is read fastest. The sums of the channels lie in the first-level cache meanwhile.
//
// The rows are cut into parts, by the problem alone, whose sums are added in their order.
#pragma once

#include <stdlib.h>

#include "norm.h"

namespace {

template <class S, class T, int N, bool Backward>
class ChannelsLastNorm : Norm<S, T, N, Backward> {
  typedef Norm<S, T, N, Backward> Base;
  using typename Base::Coefficients, typename Base::Doubles, typename Base::V;
  using Base::q, Base::x, Base::g, Base::y, Base::load_grad;

 public:
  explicit ChannelsLastNorm(const convgrad_norm& problem)
      : Base(problem),
        vectors(ceil_div(q.channels, N)),
        last(q.channels - N),
        parts(most(1, least(kMostParts, this->count / kAdditions))) {
    with_activation(q.activation, [this](auto activation) {
      typedef decltype(activation) A;
      sum_up = &ChannelsLastNorm::sum_part<typename Base::template InSums<A>>;
      apply = &ChannelsLastNorm::apply_part<A>;
    });
  }

  // Whether there was memory for the sums.
  bool run(int64_t threads) {
    const int64_t values = vectors * N * 2 * parts;
    const int64_t bytes = values * int64_t(sizeof(double) + sizeof(T)) + vectors * kCoefficients * int64_t(sizeof(V));
    void* memory = aligned_alloc(64, static_cast<size_t>(ceil_div(bytes, 64) * 64));
    if (!memory) return false;
    sums = static_cast<double*>(memory), few = reinterpret_cast<T*>(sums + values), coefficients = few + values;
    const auto prepare = [&](Range of, int) {
      for (int64_t v = of.low; v < of.high; ++v) prepare_vector(v);
    };
    const auto finish = [&](Range of) {
      for (int64_t c = of.low; c < of.high; ++c) finish_channel(c);
    };
    const auto scratch = [](int64_t) { return 0; };
    const auto sum = [&](int, int64_t part) { (this->*sum_up)(part); };
    run_items(threads, vectors, prepare, parts, scratch, sum, q.channels, finish);
    if (y) run_items(threads, parts, [&](int64_t part) { (this->*apply)(part); });
    free(memory);
    return true;
  }

 private:
  static constexpr int64_t kMostParts = 32;
  static constexpr int64_t kAdditions = 64;  // in T, in a row
  static constexpr int kCoefficients = 6;

  // The first channel of a vector: the last one ends with the row and overlaps the one before.
  int64_t start(int64_t v) const { return least(v * N, last); }

  void set(int64_t v, int64_t lane, const typename Base::template CoefficientsOf<T>& by) {
    T* to = coefficients + v * kCoefficients * N + lane;
    for (T value : {by.centre, by.slope, by.bias, by.scale, by.toward, by.offset}) *to = value, to += N;
  }
  Coefficients get(int64_t v) const {
    const T* from = coefficients + v * kCoefficients * N;
    auto next = [&](int i) { return load<T, N>(from + i * N); };
    return {next(0), next(1), next(2), next(3), next(4), next(5)};
  }

  void prepare_vector(int64_t v) {
    if constexpr (Backward) {
      for (int64_t i = 0; i < N; ++i) set(v, i, this->normalized_by(start(v) + i));
    } else {
      const auto one = [](const S* from) { return load<T, N>(from); };
      store<T, N>(coefficients + v * kCoefficients * N, this->near_mean(start(v), one));
    }
  }

  // Always in the same order.
  double sum_of_parts(const double* from) const {
    double sum = 0;
    for (int64_t part = 0; part < parts; ++part) sum += from[part * vectors * 2 * N];
    return sum;
  }

  template <class A>
  void sum_part(int64_t part) {
    const int64_t values = vectors * 2 * N;
    double* all = sums + part * values;
    T* some = few + part * values;
    memset(all, 0, sizeof(double) * static_cast<size_t>(values));
    const Range rows = share(this->count, part, parts);
    for (int64_t row = rows.low; row < rows.high;) {
      const int64_t end = least(rows.high, row + kAdditions);
      memset(some, 0, sizeof(T) * static_cast<size_t>(values));
      for (; row < end; ++row)
        for (int64_t v = 0; v < vectors; ++v) {
          const int64_t at = row * q.channels + start(v);
          Base::prefetch_ahead(x + at, g + at);
          const Coefficients by = get(v);
          const V d = load<T, N>(x + at) - by.centre, a = Base::template term<A>(d, load_grad(g + at), by);
          add_to<T, N>(some + v * 2 * N, a), add_to<T, N>(some + v * 2 * N + N, a * d);
        }
      for (int64_t i = 0; i < values; ++i) all[i] += some[i];
    }
  }

  void finish_channel(int64_t c) {
    const int64_t v = c / N, lane = c - start(v);
    const double* from = sums + v * 2 * N + lane;
    const T centre = coefficients[v * kCoefficients * N + lane];
    const auto by = this->finish(c, centre, sum_of_parts(from), sum_of_parts(from + N));
    set(v, lane, by);
    if (c >= last) set(vectors - 1, c - last, by);
  }

  template <class A>
  void apply_part(int64_t part) {
    const Range rows = share(this->count, part, parts);
    for (int64_t row = rows.low; row < rows.high; ++row)
      for (int64_t v = 0; v < vectors; ++v) {
        const int64_t at = row * q.channels + start(v);
        Base::prefetch_ahead(x + at, g + at), __builtin_prefetch(y + at + Base::kAhead, 1);
        store<T, N>(y + at, Base::template result<A>(load<T, N>(x + at), load_grad(g + at), get(v)));
      }
  }

  int64_t vectors, last, parts;
  void (ChannelsLastNorm::*sum_up)(int64_t part);
  void (ChannelsLastNorm::*apply)(int64_t part);
  double* sums;     // [part][vector][first, second][lane]
  T* few;           // the same, of the last few rows
  T* coefficients;  // [vector][kCoefficients][lane]
};

}  // namespace
