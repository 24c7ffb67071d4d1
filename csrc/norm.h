// Batch normalisation by the statistics of the batch, and its gradients.
//
// Both are two sums over the elements of each channel and then one line for each element. With d = x - centre:
//   forward   first = sum(d), second = sum(d * d); centre is any value near the mean
//   backward  first = sum(g), second = sum(g * d); centre is the mean
//   result    scale * g + slope * d + offset; forward has no g
// (Ioffe and Szegedy, 2015, section 3.) An element is read from memory twice, so what counts is that the second time
// it still lies in a cache: a thread computes one channel after another, both steps. In channels_last, where a channel
// does not lie together, kernels like these gained nothing over PyTorch's in whole training steps.
//
// A centre near the mean leaves nothing to cancel, and few terms are added in the arithmetic's type before the sum goes
// on in double. No result depends on the number of threads.
#pragma once

#include "parallel.h"
#include "reduce.h"
#include "vector.h"

namespace {

template <class S, class T, int N, bool Backward>
class BatchNorm {
 public:
  explicit BatchNorm(const convgrad_norm& problem)
      : q(problem),
        x(static_cast<const S*>(q.input)),
        g(static_cast<const S*>(q.grad_output)),
        y(static_cast<S*>(q.output)),
        count(q.batch * q.pixels),
        one_of_count(1 / double(count)) {
    for (int64_t i = 0; i < kSamples; ++i) {
      const int64_t at = i * count / kSamples, image = at / q.pixels;
      sample[i] = image * q.channels * q.pixels + at - image * q.pixels;
    }
    const int64_t bytes = count * q.channels * int64_t(sizeof(S));
    channels_an_item = most(1, kItemBytes * q.channels / most(1, bytes));
  }

  void run(int64_t threads) const {
    const Run plane(q.pixels);
    auto item = [&](int, int64_t i) {
      const int64_t end = least(q.channels, (i + 1) * channels_an_item);
      for (int64_t c = i * channels_an_item; c < end; ++c) run_channel(plane, c);
    };
    const auto scratch = [](int64_t) { return 0; };
    run_items(threads, 0, nothing, ceil_div(q.channels, channels_an_item), scratch, item, 0, nothing);
  }

 private:
  typedef Vec<T, N> V;

  struct Coefficients {
    T centre, slope, offset, scale;
  };

  // Work for a thread; less is not worth waking one.
  static constexpr int64_t kItemBytes = 32 << 10;
  // Additions in T in a row.
  static constexpr int64_t kAdditions = 64;

  // ---- a channel --------------------------------------------------------------------------------------------------

  T get(const void* parameters, int64_t c) const {
    return q.wide ? static_cast<const T*>(parameters)[c] : load_one<T>(static_cast<const S*>(parameters) + c);
  }
  void set(void* parameters, int64_t c, double value) const {
    if (!parameters) return;
    q.wide ? void(static_cast<T*>(parameters)[c] = T(value)) : store_one(static_cast<S*>(parameters) + c, T(value));
  }
  void track(void* running, int64_t c, double value) const {
    if (running) set(running, c, q.momentum * value + (1 - q.momentum) * double(get(running, c)));
  }

  // Statistics, or the gradients of the parameters, and what the elements are computed by.
  Coefficients finish(int64_t c, T centre, double first, double second) const {
    const double weight = q.weight ? double(get(q.weight, c)) : 1;
    if constexpr (Backward) {
      const double invstd = static_cast<const T*>(q.invstd)[c], scale = weight * invstd;
      set(q.grad_weight, c, second * invstd), set(q.grad_bias, c, first);
      return {centre, T(-scale * invstd * invstd * second * one_of_count), T(-scale * first * one_of_count), T(scale)};
    } else {
      const double n = double(count), from_centre = first / n, squares = second - first * from_centre;
      const double deviations = squares < 0 ? 0 : squares;  // a NaN stays one
      const double mean = double(centre) + from_centre, invstd = 1 / __builtin_sqrt(deviations / n + q.epsilon);
      static_cast<T*>(q.mean)[c] = T(mean), static_cast<T*>(q.invstd)[c] = T(invstd);
      track(q.running_mean, c, mean), track(q.running_var, c, deviations / (n - 1));
      const double slope = weight * invstd, bias = q.bias ? double(get(q.bias, c)) : 0;
      return {centre, T(slope), T(bias - from_centre * slope), 0};
    }
  }

  // A value near the mean: that of some pixels, spread over the batch.
  T near_mean(int64_t channel) const {
    T sum = 0;
    for (int i = 0; i < kSamples; ++i) sum += load_one<T>(x + channel + sample[i]);
    const T mean = sum / T(kSamples);
    return mean - mean == 0 ? mean : T(0);  // so that an infinite element gives an infinite mean, as elsewhere
  }
  T centre_of(int64_t c, int64_t channel) const {
    if constexpr (Backward) return static_cast<const T*>(q.mean)[c];
    return near_mean(channel);
  }

  static const S* moved(const S* g, int64_t by) { return Backward ? g + by : nullptr; }

  static V result(V v, V g, V centre, V slope, V offset, V scale) {
    const V moved = (v - centre) * slope + offset;
    return Backward ? g * scale + moved : moved;
  }

  // ---- its elements -------------------------------------------------------------------------------------------------

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

  static void add(V& first, V& second, V v, V g, V centre) {
    const V d = v - centre, a = Backward ? g : d;
    first += a, second += a * d;
  }

  typedef Vec<double, N> Doubles;
  static void go_on_in(Doubles& sum, V (&v)[4]) {
    sum += __builtin_convertvector((v[0] + v[1]) + (v[2] + v[3]), Doubles);
    for (V& part : v) part = V{};
  }
  static double sum_of(const Doubles& v) {
    double sum = 0;
    for (int i = 0; i < N; ++i) sum += v[i];
    return sum;
  }

  void run_channel(const Run& plane, int64_t c) const {
    const int64_t step = q.channels * q.pixels, from = c * q.pixels;
    const T centre = centre_of(c, from);
    const V m = V{} + centre;
    V first[4] = {}, second[4] = {};  // enough to hide the latency of an addition
    Doubles all_first = {}, all_second = {};
    int64_t additions = 0;
    for (int64_t b = 0; b < q.batch; ++b) {
      const S *xs = x + from + b * step, *gs = moved(g, from + b * step);
      for (int64_t i = 0, end; (end = least(plane.whole, i + 4 * N * kAdditions)), true;) {
        additions += ceil_div(end - i, 4 * N) + 1;
        for (; i + 4 * N <= end; i += 4 * N)
#pragma GCC unroll 4
          for (int u = 0; u < 4; ++u)
            add(first[u], second[u], load<T, N>(xs + i + u * N), Backward ? load<T, N>(gs + i + u * N) : V{}, m);
        for (; i < end; i += N)
          add(first[0], second[0], load<T, N>(xs + i), Backward ? load<T, N>(gs + i) : V{}, m);
        if (additions >= kAdditions) {
          go_on_in(all_first, first), go_on_in(all_second, second);
          additions = 0;
        }
        if (i == plane.whole) break;
      }
      if (plane.rest) {
        const V d = plane.load_last(xs) - m, a = masked<T, N>(Backward ? plane.load_last(gs) : d, plane.fresh);
        first[1] += a, second[1] += a * d;
      }
    }
    go_on_in(all_first, first), go_on_in(all_second, second);
    const Coefficients by = finish(c, centre, sum_of(all_first), sum_of(all_second));
    if (!y) return;
    const V slope = V{} + by.slope, offset = V{} + by.offset, scale = V{} + by.scale;
    for (int64_t b = q.batch - 1; b >= 0; --b) {
      const S *xs = x + from + b * step, *gs = moved(g, from + b * step);
      S* to = y + from + b * step;
#pragma GCC unroll 4
      for (int64_t i = 0; i < plane.whole; i += N)
        store<T, N>(to + i, result(load<T, N>(xs + i), Backward ? load<T, N>(gs + i) : V{}, m, slope, offset, scale));
      if (plane.rest) {
        const V last = Backward ? plane.load_last(gs) : V{};
        plane.store_last(to, result(plane.load_last(xs), last, m, slope, offset, scale));
      }
    }
  }

  const convgrad_norm& q;
  const S *x, *g;
  S* y;
  int64_t count;  // elements of a channel
  double one_of_count;
  static constexpr int kSamples = 8;
  int64_t sample[kSamples];  // where they lie, from the channel's first element on
  int64_t channels_an_item;
};

}  // namespace
