// Batch normalization by the statistics of the batch, with the activation that follows it, and their gradients.
//
// Both are two sums over the elements of each channel and then one line for each element. With d = x - centre:
//   forward   first = sum(d), second = sum(d * d); centre is any value near the mean
//             result = activation(z), z = slope * d + bias; centre is the mean
//   backward  first = sum(g), second = sum(g * d); g is the activation's gradient at z, computed again from x
//             result = scale * (g + toward * d + offset); centre is the mean
// (Ioffe and Szegedy, 2015, section 3.) An element is read from memory twice, so what counts is that the second time
// it still lies in a cache: a thread computes one channel after another, both steps. In channels_last, where a channel
// does not lie together (channels_last.h), only the activation gains: it costs no reading and writing of its own.
//
// A centre near the mean leaves nothing to cancel, and few terms are added in the arithmetic's type before the sum goes
// on in double. No result depends on the number of threads.
//
// Only the loops over the elements are compiled for each activation.
#pragma once

#include "../vectors/parallel.h"
#include "../vectors/reduce.h"
#include "../vectors/vector.h"
#include "activation.h"

namespace {

// What does not depend on how the elements lie.
template <class S, class T, int N, bool Backward>
class Norm {
 protected:
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
  }

  typedef Vec<T, N> V;
  typedef Vec<double, N> Doubles;

  // What the elements of a channel, or of a vector of them, are computed by; the last three only backward.
  template <class E>
  struct CoefficientsOf {
    E centre, slope, bias, scale, toward, offset;
  };
  typedef CoefficientsOf<V> Coefficients;

  // Where an element of the first channel lies.
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

  // By what forward normalizes: rounded before it is multiplied, so that backward finds the same z to the bit.
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

  // How far ahead memory is prefetched, in elements: what the processor prefetches itself ends with a page of 4 KiB.
  static constexpr int64_t kAhead = 1024 / int64_t(sizeof(S));
  static void prefetch_ahead(const S* v, const S* g) {
    __builtin_prefetch(v + kAhead);
    if (Backward) __builtin_prefetch(g + kAhead);
  }

  static V load_grad(const S* from) { return Backward ? load<T, N>(from) : V{}; }

  // The activation that the sums depend on: none forward.
  template <class Activation>
  using InSums = std::conditional_t<Backward, Activation, Identity>;

  template <class Activation>
  static V term(V d, V g, const Coefficients& by) {
    return Backward ? Activation::gradient(d * by.slope + by.bias, g) : d;
  }
  template <class Activation, bool Kept = false>  // whether g is the activation's gradient
  static V result(V v, V g, const Coefficients& by) {
    const V d = v - by.centre;
    if constexpr (!Backward) return Activation::value(d * by.slope + by.bias);
    return ((Kept ? g : term<Activation>(d, g, by)) + (d * by.toward + by.offset)) * by.scale;
  }

  const convgrad_norm& q;
  const S *x, *g;
  S* y;
  int64_t pixel_step, channel_step;
  int64_t count;  // elements of a channel
  double one_of_count;
  static constexpr int kSamples = 8;
  int64_t sample[kSamples];  // where they lie, from the channel's first element on
};

// A channel's elements lie together, but for the other images.
template <class S, class T, int N, bool Backward>
class ContiguousNorm : Norm<S, T, N, Backward> {
  typedef Norm<S, T, N, Backward> Base;
  using typename Base::Coefficients, typename Base::Doubles, typename Base::V;
  using Base::q, Base::x, Base::g, Base::y, Base::load_grad;

 public:
  explicit ContiguousNorm(const convgrad_norm& problem) : Base(problem) {
    const int64_t bytes = this->count * q.channels * int64_t(sizeof(S));
    channels_an_item = most(1, kItemBytes * q.channels / most(1, bytes));
    with_activation(q.activation, [this](auto activation) {
      typedef decltype(activation) A;
      sum = &ContiguousNorm::sum_channel<typename Base::template InSums<A>>;
      apply = &ContiguousNorm::apply_channel<A>;
    });
  }

  bool run(int64_t threads) const {
    const Run plane(q.pixels);
    run_items(threads, ceil_div(q.channels, channels_an_item), [&](int64_t i) {
      const int64_t end = least(q.channels, (i + 1) * channels_an_item);
      for (int64_t c = i * channels_an_item; c < end; ++c) run_channel(plane, c);
    });
    return true;
  }

 private:
  // Work for a thread; less is not worth waking one.
  static constexpr int64_t kItemBytes = 32 << 10;
  // Whether the first step leaves the activation's gradient for the second, in the result's memory.
  template <class Activation>
  static constexpr bool kKept = Backward && Activation::kCostly;
  // Additions in T in a row.
  static constexpr int64_t kAdditions = 64;

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
    Base::prefetch_ahead(v, g);
    const V d = load<T, N>(v) - by.centre, a = Base::template term<A>(d, load_grad(g), by);
    if (kKept<A> && kept) __builtin_prefetch(kept + Base::kAhead, 1), store<T, N>(kept, a);
    first += a, second += a * d;
  }

  template <class A>
  static V result(V v, V g, const Coefficients& by) {
    return Base::template result<A, kKept<A>>(v, g, by);
  }

  static void go_on_in(Doubles& sum, V (&v)[4]) {
    sum += __builtin_convertvector((v[0] + v[1]) + (v[2] + v[3]), Doubles);
    for (V& part : v) part = V{};
  }

  void run_channel(const Run& plane, int64_t c) const {
    const auto one = [](const S* from) { return load_one<T>(from); };
    Coefficients by = {};
    Backward ? void(by = this->spread(this->normalized_by(c))) : void(by.centre += this->near_mean(c, one));
    const Sums sums = (this->*sum)(plane, c, by);
    by = this->spread(this->finish(c, by.centre[0], sums.first, sums.second));
    if (y) (this->*apply)(plane, c, by);
  }

  template <class A>
  Sums sum_channel(const Run& plane, int64_t c, const Coefficients& given) const {
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
        const V d = plane.load_last(xs) - by.centre, all = Base::template term<A>(d, plane.load_last(gs), by);
        if (kKept<A> && kept) plane.store_last(kept, all);
        const V a = masked<T, N>(all, plane.fresh);
        first[1] += a, second[1] += a * d;
      }
    }
    go_on_in(all_first, first), go_on_in(all_second, second);
    return {sum_of_lanes<double, N>(all_first), sum_of_lanes<double, N>(all_second)};
  }

  template <class A>
  void apply_channel(const Run& plane, int64_t c, const Coefficients& given) const {
    const int64_t step = q.channels * q.pixels, from = c * q.pixels;
    const Coefficients by = given;
    for (int64_t b = q.batch - 1; b >= 0; --b) {
      const int64_t at = from + b * step;
      S* to = y + at;
      const S *xs = x + at, *gs = kKept<A> ? to : Backward ? g + at : xs;
      // Before its lanes that are the last whole vector's, too, are overwritten.
      const V last = plane.rest ? result<A>(plane.load_last(xs), plane.load_last(gs), by) : V{};
#pragma GCC unroll 4
      for (int64_t i = 0; i < plane.whole; i += N) {
        if (!kKept<A>) __builtin_prefetch(to + i + Base::kAhead, 1);
        store<T, N>(to + i, result<A>(load<T, N>(xs + i), load_grad(gs + i), by));
      }
      if (plane.rest) plane.store_last(to, last);
    }
  }

  int64_t channels_an_item;
  Sums (ContiguousNorm::*sum)(const Run&, int64_t, const Coefficients&) const;
  void (ContiguousNorm::*apply)(const Run&, int64_t, const Coefficients&) const;
};

}  // namespace
