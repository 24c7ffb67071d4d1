// Batch normalization by the statistics of the batch, with the activation that follows it, and their gradients.
//
// Both are two sums over the elements of each channel and then one line for each element. With d = x - centre:
//   forward   first = sum(d), second = sum(d * d); centre is any value near the mean
//             result = activation(z), z = slope * d + bias; centre is the mean
//   backward  first = sum(g), second = sum(g * d); g is the activation's gradient at z, computed again from x
//             result = scale * (g + toward * d + offset); centre is the mean
// (Ioffe and Szegedy, 2015, section 3.) An element is read from memory twice, so what counts is that the second time
// it still lies in a cache: a thread computes one channel after another, both steps. In channels_last, where a channel
// does not lie together, rows of channels are read from the first to the last in both steps, while the channels' sums
// lie in the first-level cache; only the activation gains: it costs no reading and writing of its own.
//
// A centre near the mean leaves nothing to cancel, and few terms are added in the arithmetic's type before the sum goes
// on in double. No result depends on the number of threads: rows are cut into parts by the problem alone.
//
// Only the loops over the elements are compiled for each activation.
#pragma once

#include <stdlib.h>

#include "../vectors/parallel.h"
#include "../vectors/reduce.h"
#include "../vectors/vector.h"
#include "activation.h"

namespace {

template <class S, class T, int N, bool Backward>
class Norm {
 public:
  explicit Norm(const convgrad_norm& problem)
      : q(problem),
        x(static_cast<const S*>(q.input)),
        g(static_cast<const S*>(q.grad_output)),
        y(static_cast<S*>(q.output)),
        pixel_step(q.layout == CONVGRAD_CHANNELS_LAST ? q.channels : 1),
        channel_step(q.layout == CONVGRAD_CHANNELS_LAST ? 1 : q.pixels),
        count(q.batch * q.pixels),
        one_of_count(1 / double(count)) {
    for (int64_t i = 0; i < kSamples; ++i) sample[i] = position(i * count / kSamples);
    with_activation(q.activation, [this](auto activation) {
      typedef decltype(activation) A;
      typedef std::conditional_t<Backward, A, Identity> InSums;  // the activation that the sums depend on
      sum_channel = &Norm::sum_channel_with<InSums>, apply_channel = &Norm::apply_channel_with<A>;
      sum_part = &Norm::sum_part_with<InSums>, apply_part = &Norm::apply_part_with<A>;
    });
  }

  // Normalizes; returns whether there was memory for the sums.
  bool run(int64_t threads) { return q.layout == CONVGRAD_CHANNELS_LAST ? run_rows(threads) : run_channels(threads); }

 private:
  typedef Vec<T, N> V;
  typedef Vec<double, N> Doubles;

  // The coefficients of the elements of a channel, or of a vector of channels; the last three only backward.
  template <class E>
  struct CoefficientsOf {
    E centre, slope, bias, scale, toward, offset;
  };
  typedef CoefficientsOf<V> Coefficients;

  // Returns the place of an element of the first channel.
  int64_t position(int64_t of_channel) const {
    const int64_t image = of_channel / q.pixels;
    return image * q.channels * q.pixels + (of_channel - image * q.pixels) * pixel_step;
  }

  T get(const void* parameters, int64_t c) const {
    if (!q.wide) return load_one<T>(static_cast<const S*>(parameters) + c);
    const T value = static_cast<const T*>(parameters)[c];
    return value == value ? value : T(__builtin_nan(""));  // `narrow` rounds a NaN with all bits set to zero
  }
  void set(void* parameters, int64_t c, double value) const {
    if (!parameters) return;
    q.wide ? void(static_cast<T*>(parameters)[c] = T(value)) : store_one(static_cast<S*>(parameters) + c, T(value));
  }
  void track(void* running, int64_t c, double value) const {
    if (running) set(running, c, q.momentum * value + (1 - q.momentum) * double(get(running, c)));
  }

  // Returns the factors of forward, rounded before they are multiplied, so that backward finds the same z to the bit.
  CoefficientsOf<T> normalized_by(int64_t c) const {
    const double weight = q.weight ? double(get(q.weight, c)) : 1, bias = q.bias ? double(get(q.bias, c)) : 0;
    const T mean = static_cast<const T*>(q.mean)[c];
    return {mean, T(weight * static_cast<const T*>(q.invstd)[c]), T(bias), 0, 0, 0};
  }

  // Statistics, or the gradients of the parameters, and what the elements are computed by.
  CoefficientsOf<T> finish(int64_t c, T centre, double first, double second) const {
    if constexpr (Backward) {
      const double invstd = static_cast<const T*>(q.invstd)[c];
      set(q.grad_weight, c, second * invstd), set(q.grad_bias, c, first);
      CoefficientsOf<T> by = normalized_by(c);
      by.scale = by.slope, by.offset = T(-first * one_of_count);
      by.toward = T(-invstd * invstd * second * one_of_count);
      return by;
    } else {
      if (second - second != 0) {  // the squares of very large elements, which only double holds
        first = second = 0;
        for (int64_t i = 0; i < count; ++i) {
          const double d = double(load_one<T>(x + c * channel_step + position(i))) - double(centre);
          first += d, second += d * d;
        }
      }
      const double n = double(count), from_centre = first / n, squares = second - first * from_centre;
      const double deviations = squares < 0 ? 0 : squares;  // a NaN stays one
      const double mean = double(centre) + from_centre;
      static_cast<T*>(q.mean)[c] = T(mean);
      static_cast<T*>(q.invstd)[c] = T(1 / __builtin_sqrt(deviations / n + q.epsilon));
      track(q.running_mean, c, mean), track(q.running_var, c, deviations / (n - 1));
      return normalized_by(c);
    }
  }

  static Coefficients spread(const CoefficientsOf<T>& by) {
    return {V{} + by.centre, V{} + by.slope, V{} + by.bias, V{} + by.scale, V{} + by.toward, V{} + by.offset};
  }

  // A value near the mean: that of some pixels, spread over the batch, each given by `load(where it lies)`.
  template <class Load>
  auto near_mean(int64_t c, const Load& load) const {
    auto sum = load(x + c * channel_step + sample[0]);
    for (int i = 1; i < kSamples; ++i) sum += load(x + c * channel_step + sample[i]);
    const auto mean = sum / T(kSamples);
    return mean - mean == 0 ? mean : decltype(sum){};  // so that an infinite element gives an infinite mean
  }

  // Elements from those that are read to those that are prefetched. The processor's own prefetching ends with a page.
  static constexpr int64_t kAhead = 1024 / int64_t(sizeof(S));
  static void prefetch_ahead(const S* v, const S* g, int64_t ahead = kAhead) {
    __builtin_prefetch(v + ahead);
    if (Backward) __builtin_prefetch(g + ahead);
  }

  static V load_grad(const S* from) { return Backward ? load<T, N>(from) : V{}; }

  template <class Activation>
  static V term(V d, V g, const Coefficients& by) {
    return Backward ? Activation::gradient(d * by.slope + by.bias, g) : d;
  }
  template <class Activation, bool Kept = false>  // Kept: whether g is the activation's gradient
  static V result(V v, V g, const Coefficients& by) {
    const V d = v - by.centre;
    if constexpr (!Backward) return Activation::value(d * by.slope + by.bias);
    return ((Kept ? g : term<Activation>(d, g, by)) + (d * by.toward + by.offset)) * by.scale;
  }

  static constexpr int64_t kAdditions = 64;  // additions in T before a sum goes on in double

  // ---- contiguous: a channel's elements lie together, but for the other images ----

  bool run_channels(int64_t threads) {
    const int64_t bytes = count * q.channels * int64_t(sizeof(S));
    const int64_t channels_an_item = most(1, kItemBytes * q.channels / most(1, bytes));
    const Run plane(q.pixels);
    run_items(threads, ceil_div(q.channels, channels_an_item), [&](int64_t i) {
      const int64_t end = least(q.channels, (i + 1) * channels_an_item);
      for (int64_t c = i * channels_an_item; c < end; ++c) run_channel(plane, c);
    });
    return true;
  }

  // Bytes of work for a thread; less is not worth waking one.
  static constexpr int64_t kItemBytes = 32 << 10;
  // True if the first step stores the activation's gradient for the second, in the result's memory.
  template <class Activation>
  static constexpr bool kKept = Backward && Activation::kCostly;

  // The vectors of a run of elements. The last one ends with the run and overlaps the one before; `fresh` are its lanes
  // that do not. A run shorter than a vector is one vector, in part.
  struct Run {
    int64_t length, whole = length / N * N, rest = length - whole, last = most(0, length - N);
    Mask<T, N> fresh = {};

    explicit Run(int64_t n) : length(n) {
      for (int64_t i = 0; i < N; ++i) fresh[i] = -(length < N ? i < length : i >= N - rest);
    }
    V load_last(const S* from) const { return load_first<T, N>(from + last, length); }
    void store_last(S* to, V v) const { store_first<T, N>(to + last, v, length); }
  };

  struct Sums {
    double first, second;
  };

  template <class A>
  static void add(V& first, V& second, const S* v, const S* g, S* kept, const Coefficients& by) {
    prefetch_ahead(v, g);
    const V d = load<T, N>(v) - by.centre, a = term<A>(d, load_grad(g), by);
    if (kKept<A> && kept) __builtin_prefetch(kept + kAhead, 1), store<T, N>(kept, a);
    first += a, second += a * d;
  }

  static void go_on_in(Doubles& sum, V (&v)[4]) {
    sum += __builtin_convertvector((v[0] + v[1]) + (v[2] + v[3]), Doubles);
    for (V& part : v) part = V{};
  }

  void run_channel(const Run& plane, int64_t c) const {
    const auto one = [](const S* from) { return load_one<T>(from); };
    Coefficients by = {};
    Backward ? void(by = spread(normalized_by(c))) : void(by.centre += near_mean(c, one));
    const Sums sums = (this->*sum_channel)(plane, c, by);
    by = spread(finish(c, by.centre[0], sums.first, sums.second));
    if (y) (this->*apply_channel)(plane, c, by);
  }

  template <class A>
  Sums sum_channel_with(const Run& plane, int64_t c, const Coefficients& given) const {
    const int64_t step = q.channels * q.pixels, from = c * q.pixels;
    const Coefficients by = given;
    V first[4] = {}, second[4] = {};  // enough to hide the latency of an addition
    Doubles all_first = {}, all_second = {};
    int64_t additions = 0;
    for (int64_t b = 0; b < q.batch; ++b) {
      const int64_t at = from + b * step;
      const S *xs = x + at, *gs = Backward ? g + at : xs;
      S* kept = y ? y + at : nullptr;
      for (int64_t i = 0, end; (end = least(plane.whole, i + 4 * N * kAdditions)), true;) {
        additions += ceil_div(end - i, 4 * N) + 1;
        for (; i + 4 * N <= end; i += 4 * N)
          UNROLL for (int u = 0; u < 4; ++u) {
            const int64_t k = i + u * N;
            add<A>(first[u], second[u], xs + k, gs + k, kept ? kept + k : nullptr, by);
          }
        for (; i < end; i += N) add<A>(first[0], second[0], xs + i, gs + i, kept ? kept + i : nullptr, by);
        if (additions >= kAdditions) {
          go_on_in(all_first, first), go_on_in(all_second, second);
          additions = 0;
        }
        if (i == plane.whole) break;
      }
      if (plane.rest) {
        const V d = plane.load_last(xs) - by.centre, all = term<A>(d, plane.load_last(gs), by);
        if (kKept<A> && kept) plane.store_last(kept, all);
        const V a = masked<T, N>(all, plane.fresh);
        first[1] += a, second[1] += a * d;
      }
    }
    go_on_in(all_first, first), go_on_in(all_second, second);
    return {sum_of_lanes<double, N>(all_first), sum_of_lanes<double, N>(all_second)};
  }

  template <class A>
  void apply_channel_with(const Run& plane, int64_t c, const Coefficients& given) const {
    const int64_t step = q.channels * q.pixels, from = c * q.pixels;
    const Coefficients by = given;
    for (int64_t b = q.batch - 1; b >= 0; --b) {
      const int64_t at = from + b * step;
      S* to = y + at;
      const S *xs = x + at, *gs = kKept<A> ? to : Backward ? g + at : xs;
      // Before its lanes that are the last whole vector's, too, are overwritten.
      const V last = plane.rest ? result<A, kKept<A>>(plane.load_last(xs), plane.load_last(gs), by) : V{};
#pragma GCC unroll 4
      for (int64_t i = 0; i < plane.whole; i += N) {
        if (!kKept<A>) __builtin_prefetch(to + i + kAhead, 1);
        store<T, N>(to + i, result<A, kKept<A>>(load<T, N>(xs + i), load_grad(gs + i), by));
      }
      if (plane.rest) plane.store_last(to, last);
    }
  }

  // ---- channels_last ----

  bool run_rows(int64_t threads) {
    const int64_t values = vectors * N * 2 * parts;
    const int64_t bytes = values * int64_t(sizeof(double) + sizeof(T)) + vectors * kCoefficients * int64_t(sizeof(V));
    void* memory = aligned_alloc(64, static_cast<size_t>(ceil_div(bytes, 64) * 64));
    if (!memory) return false;
    sums = static_cast<double*>(memory), few = reinterpret_cast<T*>(sums + values), coefficients = few + values;
    const auto prepare = each([&](int64_t v, int) { prepare_vector(v); });
    const auto finish = each([&](int64_t c) { finish_channel(c); });
    const auto scratch = [](int64_t) { return 0; };
    const auto sum = [&](int, int64_t part) { (this->*sum_part)(part); };
    run_items(threads, vectors, prepare, parts, scratch, sum, q.channels, finish);
    if (y) run_items(threads, parts, [&](int64_t part) { (this->*apply_part)(part); });
    free(memory);
    return true;
  }

  static constexpr int kCoefficients = 6;

  // The first channel of a vector: the last one ends with the row and overlaps the one before.
  int64_t start(int64_t v) const { return least(v * N, last); }

  void set_coefficients(int64_t v, int64_t lane, const CoefficientsOf<T>& by) {
    T* to = coefficients + v * kCoefficients * N + lane;
    for (T value : {by.centre, by.slope, by.bias, by.scale, by.toward, by.offset}) *to = value, to += N;
  }
  Coefficients coefficients_of(int64_t v) const {
    const T* from = coefficients + v * kCoefficients * N;
    auto next = [&](int i) { return load<T, N>(from + i * N); };
    return {next(0), next(1), next(2), next(3), next(4), next(5)};
  }

  void prepare_vector(int64_t v) {
    if constexpr (Backward) {
      for (int64_t i = 0; i < N; ++i) set_coefficients(v, i, normalized_by(start(v) + i));
    } else {
      const auto one = [](const S* from) { return load<T, N>(from); };
      store<T, N>(coefficients + v * kCoefficients * N, near_mean(start(v), one));
    }
  }

  // Always in the same order.
  double sum_of_parts(const double* from) const {
    double sum = 0;
    for (int64_t part = 0; part < parts; ++part) sum += from[part * vectors * 2 * N];
    return sum;
  }

  // Rows at a time, for which the coefficients and sums of a vector are loaded once.
  static constexpr int kRows = 4;
  static constexpr int64_t kAheadOfRows = kRows * kAhead;

  template <class A, int Rows>
  void add_rows(int64_t row, T* some) const {
    for (int64_t v = 0; v < vectors; ++v) {
      const Coefficients by = coefficients_of(v);
      V first = {}, second = {};
      UNROLL for (int r = 0; r < Rows; ++r) {
        const int64_t at = (row + r) * q.channels + start(v);
        prefetch_ahead(x + at, g + at, kAheadOfRows);
        const V d = load<T, N>(x + at) - by.centre, a = term<A>(d, load_grad(g + at), by);
        first += a, second += a * d;
      }
      add_to<T, N>(some + v * 2 * N, first), add_to<T, N>(some + v * 2 * N + N, second);
    }
  }

  template <class A>
  void sum_part_with(int64_t part) {
    const int64_t values = vectors * 2 * N;
    double* all = sums + part * values;
    T* some = few + part * values;
    memset(all, 0, sizeof(double) * static_cast<size_t>(values));
    const Range rows = share(count, part, parts);
    for (int64_t row = rows.low; row < rows.high;) {
      const int64_t end = least(rows.high, row + kAdditions);
      memset(some, 0, sizeof(T) * static_cast<size_t>(values));
      for (; row + kRows <= end; row += kRows) add_rows<A, kRows>(row, some);
      for (; row < end; ++row) add_rows<A, 1>(row, some);
      for (int64_t i = 0; i < values; ++i) all[i] += some[i];
    }
  }

  void finish_channel(int64_t c) {
    const int64_t v = c / N, lane = c - start(v);
    const double* from = sums + v * 2 * N + lane;
    const T centre = coefficients[v * kCoefficients * N + lane];
    const auto by = finish(c, centre, sum_of_parts(from), sum_of_parts(from + N));
    set_coefficients(v, lane, by);
    if (c >= last) set_coefficients(vectors - 1, c - last, by);
  }

  template <class A, int Rows>
  void apply_rows(int64_t row) const {
    for (int64_t v = 0; v < vectors; ++v) {
      const Coefficients by = coefficients_of(v);
      UNROLL for (int r = 0; r < Rows; ++r) {
        const int64_t at = (row + r) * q.channels + start(v);
        prefetch_ahead(x + at, g + at, kAheadOfRows), __builtin_prefetch(y + at + kAheadOfRows, 1);
        store<T, N>(y + at, result<A>(load<T, N>(x + at), load_grad(g + at), by));
      }
    }
  }

  template <class A>
  void apply_part_with(int64_t part) {
    const Range rows = share(count, part, parts);
    int64_t row = rows.low;
    for (; row + kRows <= rows.high; row += kRows) apply_rows<A, kRows>(row);
    for (; row < rows.high; ++row) apply_rows<A, 1>(row);
  }

  const convgrad_norm& q;
  const S *x, *g;
  S* y;
  int64_t pixel_step, channel_step;
  int64_t count;  // elements of a channel
  double one_of_count;
  static constexpr int kSamples = 8;
  int64_t sample[kSamples];  // where they lie, from the channel's first element on

  Sums (Norm::*sum_channel)(const Run&, int64_t, const Coefficients&) const;
  void (Norm::*apply_channel)(const Run&, int64_t, const Coefficients&) const;
  void (Norm::*sum_part)(int64_t part);
  void (Norm::*apply_part)(int64_t part);

  // In channels_last:
  static constexpr int64_t kMostParts = 32;
  int64_t vectors = ceil_div(q.channels, N), last = q.channels - N;
  int64_t parts = most(1, least(kMostParts, count / kAdditions));
  double* sums;     // [part][vector][first, second][lane]
  T* few;           // the same, of the last few rows
  T* coefficients;  // [vector][kCoefficients][lane]
};

}  // namespace
