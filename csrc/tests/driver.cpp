// Runs the kernels on random problems without Python, so that they can be built with sanitizers. Buffers have exactly
// the size of their tensors and come from the heap: a read or write one element outside is an error. Results start as
// NaN, so that an element that is never written is seen; they are compared with plain loops over integers. A build with
// a small CONVGRAD_TILE_BYTES cuts these small problems into as many tiles as large ones have. Threads come from
// threads.cpp.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

#include "../convgrad_native.h"

namespace {

using Integers = std::vector<int64_t>;

struct Case {
  convgrad_problem p;
  int64_t in_pixels() const { return p.input[0] * p.input[1] * p.input[2]; }
  int64_t out_pixels() const { return p.output[0] * p.output[1] * p.output[2]; }
  int64_t elements() const { return p.kernel[0] * p.kernel[1] * p.kernel[2]; }
  int64_t in_channels() const { return p.groups * p.in_per_group; }
  int64_t out_channels() const { return p.groups * p.out_per_group; }
  // The weight of output o, input i of its group, kernel element k.
  int64_t weight(int64_t o, int64_t i, int64_t k) const { return at(o, i, k, p.in_per_group, elements()); }
  int64_t at(int64_t n, int64_t c, int64_t pixel, int64_t channels, int64_t pixels) const {
    return p.layout == CONVGRAD_CONTIGUOUS ? (n * channels + c) * pixels + pixel : (n * pixels + pixel) * channels + c;
  }
};

// The position whose value position i of n has; -1: it is a zero.
int64_t read(int32_t mode, int64_t i, int64_t n) {
  if (i >= 0 && i < n) return i;
  if (mode == CONVGRAD_CIRCULAR) return i < 0 ? i + n : i - n;
  if (mode == CONVGRAD_REFLECT) return i < 0 ? -i : 2 * (n - 1) - i;
  return mode == CONVGRAD_REPLICATE ? (i < 0 ? 0 : n - 1) : -1;
}

// Of any kernels, or for Winograd's algorithm.
Case draw(std::mt19937_64& rng, bool winograd) {
  auto pick = [&](int64_t low, int64_t high) { return low + int64_t(rng() % uint64_t(high - low + 1)); };
  Case c = {};
  c.p.batch = pick(1, 5);
  const bool pointwise = pick(0, 4) == 0 && !winograd;  // without padding, which have loops of their own
  const bool strided = pick(0, 2) == 0;
  if (pointwise) {
    c.p.groups = pick(0, 2) ? 1 : pick(2, 4);
    c.p.in_per_group = pick(1, pick(0, 1) ? 20 : 90), c.p.out_per_group = pick(1, pick(0, 1) ? 20 : 90);
  } else if (pick(0, 1)) {
    c.p.groups = pick(0, 3) ? pick(2, 17) : pick(18, 70), c.p.in_per_group = 1;
    c.p.out_per_group = pick(0, 3) ? 1 : pick(2, 3);
  } else {
    c.p.groups = pick(1, 9);
    c.p.in_per_group = pick(0, 3) ? pick(1, 6) : pick(7, 16), c.p.out_per_group = pick(0, 3) ? pick(1, 6) : pick(7, 16);
  }
  if (winograd) {
    c.p.groups = pick(1, 3);
    c.p.in_per_group = pick(1, pick(0, 3) ? 20 : 50), c.p.out_per_group = pick(1, pick(0, 3) ? 20 : 50);
  }
  c.p.layout = int32_t(pick(0, 1)), c.p.dtype = int32_t(pick(0, 3)), c.p.threads = int32_t(pick(1, 4));
  c.p.padding_mode = int32_t(pick(0, 1) && !winograd ? pick(1, 3) : 0);
  const bool small = pick(0, 2) == 0 || winograd;  // small kernels with stride 1 have loops of their own
  const int64_t along = winograd ? pick(0, 3) : -1;  // height and width, width, height, depth
  const int dims = int(pick(along < 0 || along == 1 ? 1 : along == 3 ? 3 : 2, 3));
  const int wide = pick(0, 3) ? 0 : int(pick(0, dims - 1));  // one dimension may be a wide one
  for (int d = 0; d < 3; ++d) {
    const bool used = d >= 3 - dims, all = d == 2 - wide;
    for (;;) {
      c.p.kernel[d] = !used ? 1 : small ? pick(1, d == 2 && dims == 1 ? 4 : 3) : pick(1, all ? 11 : 7 - dims);
      c.p.stride[d] = used && !small ? pick(1, pick(0, 3) ? 3 : 8) : 1, c.p.dilation[d] = used ? pick(1, 3) : 1;
      c.p.padding[d] = used ? pick(-2, all ? 12 : 5) : 0;
      const bool alone = pointwise || (along == 3 && d);  // nothing else is read in this dimension
      if (winograd && (d || along == 3)) c.p.kernel[d] = used && (along == 0 || d == 3 - along) ? 3 : 1;
      if (alone) c.p.kernel[d] = 1, c.p.padding[d] = 0;
      if (pointwise) c.p.stride[d] = used && strided ? pick(1, 3) : 1;
      c.p.input[d] = used ? pick(1, dims == 1 ? 150 : all ? 40 / dims : dims == 2 ? 20 : 12) : 1;
      const int64_t room = c.p.input[d] + c.p.padding[d] + (used && !alone ? pick(-2, 5) : 0) -
                           (c.p.dilation[d] * (c.p.kernel[d] - 1) + 1);
      c.p.output[d] = room >= 0 ? room / c.p.stride[d] + 1 : 0;
      // How far outside it reads; reflect has a position less to read than there are, circular has them all.
      const int64_t last = (c.p.output[d] - 1) * c.p.stride[d] - c.p.padding[d] + (c.p.kernel[d] - 1) * c.p.dilation[d];
      const int64_t outside = std::max(c.p.padding[d], last - c.p.input[d] + 1);
      const bool there_is = c.p.padding_mode == CONVGRAD_CIRCULAR  ? outside <= c.p.input[d]
                            : c.p.padding_mode == CONVGRAD_REFLECT ? outside < c.p.input[d]
                                                                   : true;
      if (c.p.output[d] > 0 && there_is) break;
    }
  }
  return c;
}

// Everything at once, by the definition.
void reference(const Case& c, const Integers& x, const Integers& w, const Integers& g, Integers& y, Integers& gx,
               Integers& gw, Integers& gb) {
  const convgrad_problem& p = c.p;
  for (int64_t n = 0; n < p.batch; ++n)
    for (int64_t o = 0; o < c.out_channels(); ++o)
      for (int64_t pixel = 0; pixel < c.out_pixels(); ++pixel) {
        const int64_t out = c.at(n, o, pixel, c.out_channels(), c.out_pixels());
        gb[o] += g[out];
        const int64_t od = pixel / (p.output[1] * p.output[2]), oh = pixel / p.output[2] % p.output[1];
        const int64_t position[3] = {od, oh, pixel % p.output[2]};
        for (int64_t k = 0; k < c.elements(); ++k) {
          const int64_t kernel[3] = {k / (p.kernel[1] * p.kernel[2]), k / p.kernel[2] % p.kernel[1], k % p.kernel[2]};
          int64_t from = 0;
          bool inside = true;
          for (int d = 0; d < 3; ++d) {
            const int64_t i = read(
                p.padding_mode, position[d] * p.stride[d] - p.padding[d] + kernel[d] * p.dilation[d], p.input[d]);
            inside = inside && i >= 0;
            from = from * p.input[d] + i;
          }
          if (!inside) continue;
          for (int64_t i = 0; i < p.in_per_group; ++i) {
            const int64_t channel = o / p.out_per_group * p.in_per_group + i, weight = c.weight(o, i, k);
            const int64_t in = c.at(n, channel, from, c.in_channels(), c.in_pixels());
            y[out] += x[in] * w[weight], gx[in] += g[out] * w[weight], gw[weight] += g[out] * x[in];
          }
        }
      }
}

// 16-bit storage: sign, exponent and kMantissa bits. Only integers are encoded here, rounded to the nearest, ties to
// even.
template <int kMantissa>
struct Short {
  static constexpr int kBias = kMantissa == 7 ? 127 : 15;
  uint16_t bits;
  Short() = default;
  explicit Short(int64_t value) : bits(0) {
    uint64_t size = uint64_t(value < 0 ? -value : value), exponent = 0;
    if (size == 0) return;
    while (size >> (exponent + 1)) ++exponent;
    if (exponent <= kMantissa) {
      size <<= kMantissa - exponent;
    } else {
      const uint64_t unit = uint64_t(1) << (exponent - kMantissa), rest = size % unit, odd = size / unit % 2;
      size = size / unit + (rest * 2 + odd > unit);
    }
    // The leading bit of `size` adds 1 to the exponent; so does a carry into the bit above.
    bits = uint16_t((value < 0 ? 0x8000 : 0) + ((exponent + kBias - 1) << kMantissa) + size);
  }
  explicit operator double() const {
    const int exponent = bits << 1 >> (kMantissa + 1) & (kMantissa == 7 ? 255 : 31);
    const double size = (bits & ((1 << kMantissa) - 1)) + (exponent ? 1 << kMantissa : 0);
    if (exponent == (kMantissa == 7 ? 255 : 31)) return __builtin_nan("");  // or an infinity: never expected
    return (bits & 0x8000 ? -1 : 1) * __builtin_ldexp(size, (exponent ? exponent : 1) - kBias - kMantissa);
  }
};

template <class T>
struct Buffer {
  size_t size;
  std::unique_ptr<T[]> data;
  explicit Buffer(const Integers& from) : size(from.size()), data(new T[size]) {
    for (size_t i = 0; i < size; ++i) data[i] = T(from[i]);
  }
  explicit Buffer(size_t n) : size(n), data(new T[n]) { memset(data.get(), 255, n * sizeof(T)); }  // NaN in every dtype
};

// An infinity, or NaN.
template <class T>
T limit(bool nan) {
  T value;
  if constexpr (std::is_floating_point<T>::value) {
    value = nan ? std::numeric_limits<T>::quiet_NaN() : std::numeric_limits<T>::infinity();
  } else {
    value.bits = uint16_t((std::is_same<T, Short<7>>::value ? 0x7f80 : 0x7c00) + nan);
  }
  return value;
}

// Where `spoilt`, the result must be an infinity or NaN, else what is expected.
template <class T>
bool equal(const char* name, const Buffer<T>& got, const Integers& expected, const Integers* spoilt) {
  for (size_t i = 0; i < expected.size(); ++i)
    if (spoilt && (*spoilt)[i] ? double(got.data[i]) * 0 == 0 : !(double(got.data[i]) == double(T(expected[i])))) {
      fprintf(stderr, "%s[%zu] is %g, not %lld\n", name, i, double(got.data[i]), static_cast<long long>(expected[i]));
      return false;
    }
  return true;
}

template <class T>
bool check(Case& c, std::mt19937_64& rng, const char* kernels) {
  auto fill = [&](int64_t size) {
    Integers v(static_cast<size_t>(size));
    const int64_t most = sizeof(T) == 2 ? 1 : 3;
    for (int64_t& e : v) e = int64_t(rng() % uint64_t(2 * most + 1)) - most;
    return v;
  };
  const Integers x = fill(c.p.batch * c.in_channels() * c.in_pixels());
  const Integers w = fill(c.out_channels() * c.p.in_per_group * c.elements());
  const Integers g = fill(c.p.batch * c.out_channels() * c.out_pixels());
  Integers y(g.size()), gx(x.size()), gw(w.size()), gb(static_cast<size_t>(c.out_channels()));
  reference(c, x, w, g, y, gx, gw, gb);
  const Integers biases[] = {fill(c.out_channels()), fill(c.in_channels())};  // of forward and of grad_input
  const Buffer<T> bb[] = {Buffer<T>(biases[0]), Buffer<T>(biases[1])};
  auto plus_bias = [&](Integers sums, const Integers& bias, int64_t channels, int64_t pixels) {
    for (int64_t n = 0; n < c.p.batch; ++n)
      for (int64_t b = 0; b < channels; ++b)
        for (int64_t i = 0; i < pixels; ++i) sums[c.at(n, b, i, channels, pixels)] += bias[b];
    return sums;
  };
  Integers input_sums(static_cast<size_t>(c.in_channels()));
  for (int64_t n = 0; n < c.p.batch; ++n)
    for (int64_t b = 0; b < c.in_channels(); ++b)
      for (int64_t i = 0; i < c.in_pixels(); ++i) input_sums[b] += x[c.at(n, b, i, c.in_channels(), c.in_pixels())];
  const Integers biased_y = plus_bias(y, biases[0], c.out_channels(), c.out_pixels());
  const Integers biased_gx = plus_bias(gx, biases[1], c.in_channels(), c.in_pixels());
  const int requested[] = {CONVGRAD_FORWARD, CONVGRAD_GRAD_INPUT, CONVGRAD_GRAD_WEIGHT,
                       CONVGRAD_GRAD_INPUT | CONVGRAD_GRAD_WEIGHT | CONVGRAD_GRAD_BIAS,
                       CONVGRAD_FORWARD | CONVGRAD_GRAD_WEIGHT,
                       CONVGRAD_FORWARD | CONVGRAD_GRAD_WEIGHT | CONVGRAD_TRANSPOSED_GRAD_BIAS,
                       CONVGRAD_GRAD_INPUT | CONVGRAD_GRAD_WEIGHT | CONVGRAD_TRANSPOSED_GRAD_BIAS};
  // Once more with an infinity or NaN in every operand, for the kernels' second way at borders: these reach the results
  // whose sums they are in, as a product of zeros and ones finds, and no others.
  const Integers* const operands[] = {&x, &w, &g};
  size_t spoilt[3];
  Integers sy(y.size()), sx(gx.size()), sw(gw.size()), sb(gb.size()), sums_of_x(input_sums.size());
  for (int o = 0; o < 3; ++o) {
    spoilt[o] = rng() % operands[o]->size();
    Integers at[3];
    for (int i = 0; i < 3; ++i) at[i] = Integers(operands[i]->size(), i != o);
    at[o][spoilt[o]] = 1;
    Integers none(gb.size());
    Integers y1(y.size()), gx1(gx.size()), gw1(gw.size());
    reference(c, at[0], at[1], at[2], y1, gx1, gw1, none);
    for (size_t i = 0; i < y.size() && o != 2; ++i) sy[i] |= y1[i];
    for (size_t i = 0; i < gx.size() && o != 0; ++i) sx[i] |= gx1[i];
    for (size_t i = 0; i < gw.size() && o != 1; ++i) sw[i] |= gw1[i];
  }
  sb[spoilt[2] / size_t(c.p.layout == CONVGRAD_CONTIGUOUS ? c.out_pixels() : 1) % size_t(c.out_channels())] = 1;
  sums_of_x[spoilt[0] / size_t(c.p.layout == CONVGRAD_CONTIGUOUS ? c.in_pixels() : 1) % size_t(c.in_channels())] = 1;
  const T limits[] = {limit<T>(false), limit<T>(true)};
  for (int run = 0; run < 2 * int(sizeof(requested) / sizeof(requested[0])); ++run) {
    const int outputs = requested[run / 2];
    const bool spoil = run % 2;
    c.p.outputs = outputs;
    const bool forward = outputs == CONVGRAD_FORWARD;
    const bool bias = forward || (outputs == CONVGRAD_GRAD_INPUT && c.p.padding_mode == CONVGRAD_ZEROS);
    Buffer<T> bx(x), bw(w), bg(g);
    Buffer<T>* const buffers[] = {&bx, &bw, &bg};
    for (int o = 0; o < 3 && spoil; ++o) buffers[o]->data[spoilt[o]] = limits[rng() % 2];
    Buffer<T> ry(y.size()), rx(gx.size()), rw(gw.size());
    const Integers& sums = outputs & CONVGRAD_TRANSPOSED_GRAD_BIAS ? input_sums : gb;
    Buffer<T> rb(sums.size());
    const bool biased = outputs & (CONVGRAD_GRAD_BIAS | CONVGRAD_TRANSPOSED_GRAD_BIAS);
    const bool needs_x = outputs & (CONVGRAD_FORWARD | CONVGRAD_GRAD_WEIGHT);
    const bool needs_w = outputs & (CONVGRAD_FORWARD | CONVGRAD_GRAD_INPUT);
    const bool needs_g = outputs & (CONVGRAD_GRAD_INPUT | CONVGRAD_GRAD_WEIGHT);
    const convgrad_tensors t = {needs_x ? bx.data.get() : nullptr,
                                needs_w ? bw.data.get() : nullptr,
                                needs_g ? bg.data.get() : nullptr,
                                bias ? bb[forward ? 0 : 1].data.get() : nullptr,
                                outputs & CONVGRAD_FORWARD ? ry.data.get() : nullptr,
                                outputs & CONVGRAD_GRAD_INPUT ? rx.data.get() : nullptr,
                                outputs & CONVGRAD_GRAD_WEIGHT ? rw.data.get() : nullptr,
                                biased ? rb.data.get() : nullptr};
    convgrad_plan plan;
    if (convgrad_plan_make(&c.p, kernels, &plan) != 0 || convgrad_plan_run(&plan, &t) != 0) return false;
    const Integers& sr = outputs & CONVGRAD_TRANSPOSED_GRAD_BIAS ? sums_of_x : sb;
    if ((t.forward && !equal("forward", ry, bias ? biased_y : y, spoil ? &sy : nullptr)) ||
        (t.grad_input && !equal("grad_input", rx, bias ? biased_gx : gx, spoil ? &sx : nullptr)) ||
        (t.grad_weight && !equal("grad_weight", rw, gw, spoil ? &sw : nullptr)) ||
        (t.grad_bias && !equal("grad_bias", rb, sums, spoil ? &sr : nullptr)))
      return false;
  }
  return true;
}

bool check(Case& c, std::mt19937_64& rng, const char* kernels) {
  switch (c.p.dtype) {
    case CONVGRAD_FLOAT64: return check<double>(c, rng, kernels);
    case CONVGRAD_BFLOAT16: return check<Short<7>>(c, rng, kernels);
    case CONVGRAD_FLOAT16: return check<Short<10>>(c, rng, kernels);
    default: return check<float>(c, rng, kernels);
  }
}

// Batch normalization and its gradients by the definition (Ioffe and Szegedy, 2015), in double precision, with SiLU
// behind it or nothing: the edge of another activation may lie on either side of a rounding. P is the type of the
// channels' values, S that of the statistics.
template <class T, class P, class S>
bool check_norm(convgrad_norm n, std::mt19937_64& rng) {
  const double error = sizeof(T) == 8 ? 1e-12 : sizeof(T) == 4 ? 1e-5 : std::is_same<T, Short<7>>::value ? 1e-2 : 2e-3;
  auto near = [&](const char* name, double got, double expected, double terms = 1) {
    if (std::fabs(got - expected) <= error * std::max(terms, std::fabs(expected))) return true;
    fprintf(stderr, "%s is %g, not %g: batch %d channels %d pixels %d layout %d dtype %d wide %d threads %d\n", name,
            got, expected, int(n.batch), int(n.channels), int(n.pixels), n.layout, n.dtype, n.wide, n.threads);
    return false;
  };
  auto fill = [&](int64_t size) {
    Integers v(static_cast<size_t>(size));
    for (int64_t& e : v) e = int64_t(rng() % 7) - 3;
    return v;
  };
  const size_t channels = size_t(n.channels), all = size_t(n.batch * n.channels * n.pixels);
  const double count = double(n.batch * n.pixels);
  const Integers x = fill(int64_t(all)), g = fill(int64_t(all)), w = fill(n.channels), b = fill(n.channels);
  const bool affine = rng() % 4, whole = rng() % 4;  // without weight and bias; without the gradient of the input
  const Buffer<T> bx(x), bg(g);
  const Buffer<P> bw(w), bb(b);
  Buffer<P> running_mean(b), running_var(w), gw(channels), gb(channels);
  Buffer<S> mean(channels), invstd(channels);
  Buffer<T> y(all), gx(all);
  n.epsilon = 0.5, n.momentum = 0.25, n.input = bx.data.get(), n.output = y.data.get();
  n.weight = affine ? bw.data.get() : nullptr, n.bias = affine ? bb.data.get() : nullptr;
  n.mean = mean.data.get(), n.invstd = invstd.data.get();
  n.running_mean = running_mean.data.get(), n.running_var = running_var.data.get();
  if (convgrad_normalize(&n)) return false;
  if (!n.activation) n.bias = nullptr;
  n.running_mean = n.running_var = nullptr, n.grad_output = bg.data.get();
  n.output = whole ? gx.data.get() : nullptr, n.grad_weight = gw.data.get(), n.grad_bias = gb.data.get();
  if (convgrad_normalize(&n)) return false;
  for (size_t c = 0; c < channels; ++c) {
    auto each = [&](auto visit) {
      for (int64_t i = 0; i < n.batch * n.pixels; ++i)
        visit(size_t(n.layout == CONVGRAD_CHANNELS_LAST
                         ? i * n.channels + int64_t(c)
                         : (i / n.pixels * n.channels + int64_t(c)) * n.pixels + i % n.pixels));
    };
    double m = 0, var = 0, sum = 0, product = 0, terms = 1;
    each([&](size_t i) { m += double(x[i]) / count; });
    each([&](size_t i) { var += (double(x[i]) - m) * (double(x[i]) - m) / count; });
    const double unbiased = var * count / (count - 1), scale = 1 / std::sqrt(var + n.epsilon);
    const double weight = affine ? double(w[c]) : 1, bias = affine ? double(b[c]) : 0;
    auto sigmoid = [](double z) { return 1 / (1 + std::exp(-z)); };
    auto grad = [&](size_t i) {  // of what the activation takes
      const double z = (double(x[i]) - m) * scale * weight + bias, s = sigmoid(z);
      return double(g[i]) * (n.activation ? s * (1 + z * (1 - s)) : 1);
    };
    each([&](size_t i) {
      const double term = grad(i) * (double(x[i]) - m) * scale;
      sum += grad(i), product += term, terms += std::fabs(term);
    });
    bool right = near("mean", double(mean.data[c]), m) && near("invstd", double(invstd.data[c]), scale) &&
                 near("running_mean", double(running_mean.data[c]), 0.75 * double(b[c]) + 0.25 * m) &&
                 near("running_var", double(running_var.data[c]), 0.75 * double(w[c]) + 0.25 * unbiased) &&
                 near("grad_weight", double(gw.data[c]), product, terms) &&
                 near("grad_bias", double(gb.data[c]), sum, terms);
    each([&](size_t i) {
      const double xhat = (double(x[i]) - m) * scale, moved = grad(i) - sum / count - xhat * product / count;
      const double z = xhat * weight + bias, factor = std::fabs(weight * scale);
      const double summands = factor * (std::fabs(grad(i)) + (std::fabs(sum) + std::fabs(xhat * product)) / count);
      right = right && near("output", double(y.data[i]), n.activation ? z * sigmoid(z) : z) &&
              (!whole || near("grad_input", double(gx.data[i]), moved * weight * scale, std::max(1.0, summands)));
    });
    if (!right) return false;
  }
  return true;
}

bool check_norm(std::mt19937_64& rng) {
  auto pick = [&](int64_t low, int64_t high) { return low + int64_t(rng() % uint64_t(high - low + 1)); };
  convgrad_norm n = {};
  n.layout = int32_t(pick(0, 1)), n.batch = pick(1, 5);
  n.channels = pick(n.layout == CONVGRAD_CHANNELS_LAST ? 16 : 1, 40);
  n.pixels = pick(n.batch == 1 ? 2 : 1, pick(0, 1) ? 20 : 400);
  n.dtype = int32_t(pick(0, 3)), n.threads = int32_t(pick(1, 4)), n.wide = n.dtype > 1 && pick(0, 1);
  n.activation = pick(0, 1) ? CONVGRAD_SILU : CONVGRAD_NO_ACTIVATION;
  switch (n.dtype) {
    case CONVGRAD_FLOAT64: return check_norm<double, double, double>(n, rng);
    case CONVGRAD_BFLOAT16:
      return n.wide ? check_norm<Short<7>, float, float>(n, rng) : check_norm<Short<7>, Short<7>, float>(n, rng);
    case CONVGRAD_FLOAT16:
      return n.wide ? check_norm<Short<10>, float, float>(n, rng) : check_norm<Short<10>, Short<10>, float>(n, rng);
    default: return check_norm<float, float, float>(n, rng);
  }
}

}  // namespace

int main(int count, char** arguments) {
  const int cases = count > 1 ? atoi(arguments[1]) : 300;
  std::mt19937_64 rng(count > 2 ? strtoull(arguments[2], nullptr, 10) : 0);
  for (const char* set : {"baseline", "x86-64-v3", "x86-64-v4", "amx"}) {
    if (convgrad_select(set)) continue;
    for (int i = 0; i < cases + cases / 4; ++i) {
      const bool winograd = i >= cases;
      Case c = draw(rng, winograd);
      if (!check(c, rng, winograd ? "winograd" : "")) {
        const convgrad_problem& p = c.p;
        fprintf(stderr, "%s, case %d: batch %d groups %d x %d to %d layout %d dtype %d outputs %d threads %d mode %d\n",
                set, i, int(p.batch), int(p.groups), int(p.in_per_group), int(p.out_per_group), p.layout, p.dtype,
                p.outputs, p.threads, p.padding_mode);
        for (int d = 0; d < 3; ++d)
          fprintf(stderr, "  input %d kernel %d stride %d padding %d dilation %d output %d\n", int(p.input[d]),
                  int(p.kernel[d]), int(p.stride[d]), int(p.padding[d]), int(p.dilation[d]), int(p.output[d]));
        return 1;
      }
    }
    for (int i = 0; i < cases; ++i)
      if (!check_norm(rng)) {
        fprintf(stderr, "%s, batch normalization %d\n", set, i);
        return 1;
      }
    printf("%s: %d cases\n", set, cases);
  }
  return 0;
}
