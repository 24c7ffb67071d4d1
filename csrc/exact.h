// Results by the definition, one at a time, for those that the padding may have spoilt. The kernels multiply its zeros,
// and those between two rows, like any number, and infinity times zero is NaN; here positions outside the tensor take
// part in no product. Slow, and rarely needed: where a kernel met an infinity or NaN in the weight or in its sums for
// grad_weight. A NaN is never undone by what is added to it, so a result that is none met no such product.
#pragma once

#include "packing.h"
#include "parallel.h"

namespace {

// S: storage, T: arithmetic.
template <class S, class T>
class Exact {
 public:
  Exact(const convgrad_problem& q, const convgrad_tensors& tensors) : t(tensors), groups(q.groups) {
    p.set_axes(q), p.channels = groups * q.in_per_group;
    input = p.input_tensor(), weight = {{1, 1, p.kernel_elements}, q.in_per_group, 0, 1};
    output = {{q.output[0], q.output[1], q.output[2]}, groups * q.out_per_group, 0, 1};
  }

  void correct(int64_t threads) const {
    const auto scratch = [](int64_t) { return 0; };
    auto planes = [&](int64_t count, const auto& body) {
      run_items(threads, 0, nothing, count, scratch, [&](int, int64_t i) { body(i); }, 0, nothing);
    };
    if (p.wants(CONVGRAD_FORWARD) && !p.padding_mode)
      planes(p.batch * output.width, [&](int64_t i) { correct_plane(false, i / output.width, i % output.width); });
    if (p.wants(CONVGRAD_GRAD_INPUT))
      planes(p.batch * input.width, [&](int64_t i) { correct_plane(true, i / input.width, i % input.width); });
    if (p.wants(CONVGRAD_GRAD_WEIGHT))
      planes(output.width * weight.width, [&](int64_t i) { correct_weight(i / weight.width, i % weight.width); });
  }

 private:
  static double value(const void* tensor, int64_t element) {
    return static_cast<double>(load_one<T>(static_cast<const S*>(tensor) + element));
  }
  static bool is_nan(const S* at) { return load_one<T>(at) != load_one<T>(at); }
  int64_t element(const Tensor& x, int64_t image, int64_t channel, int64_t pixel) const {
    if (p.channels_last) return (image * x.pixels() + pixel) * x.width + channel;
    return (image * x.width + channel) * x.pixels() + pixel;
  }
  // body(position in each dimension, pixel) for all positions in three ranges.
  template <class Body>
  static void each_position(const Range r[3], const int64_t size[3], const Body& body) {
    for (int64_t d = r[0].low; d < r[0].high; ++d)
      for (int64_t h = r[1].low; h < r[1].high; ++h)
        for (int64_t w = r[2].low; w < r[2].high; ++w) {
          const int64_t at[3] = {d, h, w};
          if (!body(at, (d * size[1] + h) * size[2] + w)) return;
        }
  }

  // ---- forward and grad_input ----

  // What one dimension of a result position reads of the source.
  struct Line {
    TapRange reach;  // without what lies outside the tensor
    int64_t base;    // the position that the reach counts from
    bool cut;        // whether anything lies outside
  };
  Line line(int d, int64_t position, bool backward) const {
    const Axis& a = p.axis[d];
    const TapRange all = backward ? a.backward_reach(a.remainder(position)) : a.forward_reach();
    const int64_t base = backward ? a.quotient(position) : position * a.stride;
    const TapRange inside = region_at(all, base, 1, 0, backward ? a.output : a.input, 1).reach;
    return {inside, base, inside.count < all.count};
  }

  void correct_plane(bool backward, int64_t image, int64_t channel) const {
    const Tensor& x = backward ? input : output;
    S* const results = static_cast<S*>(backward ? t.grad_input : t.forward);
    const Range all[3] = {{0, x.size[0]}, {0, x.size[1]}, {0, x.size[2]}};
    each_position(all, x.size, [&](const int64_t at[3], int64_t pixel) {
      S* const to = results + element(x, image, channel, pixel);
      if (!is_nan(to)) return true;
      bool cut = p.folds();
      for (int d = 0; d < 3; ++d) cut = cut || line(d, at[d], backward).cut;
      if (!cut) return true;
      double sum = t.bias ? value(t.bias, channel) : 0;
      each_reader(0, at[0], [&](int64_t d) {
        each_reader(1, at[1], [&](int64_t h) {
          each_reader(2, at[2], [&](int64_t w) {
            const int64_t position[3] = {d, h, w};
            if (sum == sum) sum += correlate(backward, image, channel, position);
          });
        });
      });
      store_one<T>(to, static_cast<T>(sum));
      return true;
    });
  }

  // The positions whose gradients make up that of position i.
  template <class Body>
  void each_reader(int d, int64_t i, const Body& body) const {
    if (!p.folds()) return body(i);
    const Range all = p.axis[d].padded();
    for (int64_t j = all.low; j < all.high; ++j)
      if (input.inside(d, j) == i) body(j);
  }

  double correlate(bool backward, int64_t image, int64_t channel, const int64_t position[3]) const {
    const Tensor& x = backward ? output : input;
    const int64_t sources = x.width / groups, results = (backward ? input : output).width / groups;
    const int64_t group = channel / results * sources;
    Line at[3];
    Range taps[3];
    for (int d = 0; d < 3; ++d) at[d] = line(d, position[d], backward), taps[d] = {0, at[d].reach.count};
    double sum = 0;
    for (int64_t c = group; c < group + sources; ++c)
      each_position(taps, x.size, [&](const int64_t tap[3], int64_t) {
        int64_t pixel = 0, k = 0;
        for (int d = 0; d < 3; ++d) {
          const TapRange& r = at[d].reach;
          pixel = pixel * x.size[d] + at[d].base + r.offset + tap[d] * r.offset_step;
          k = k * p.axis[d].kernel + r.first + tap[d] * r.step;
        }
        const int64_t out = backward ? c : channel, in = backward ? channel % results : c - group;
        sum += value(backward ? t.grad_output : t.input, element(x, image, c, pixel)) *
               value(t.weight, element(weight, out, in, k));
        return sum == sum;
      });
    return sum;
  }

  // ---- grad_weight ----

  void correct_weight(int64_t out, int64_t in) const {
    const int64_t channel = out / (output.width / groups) * weight.width + in;
    const int64_t size[3] = {p.axis[0].kernel, p.axis[1].kernel, p.axis[2].kernel};
    const Range all[3] = {{0, size[0]}, {0, size[1]}, {0, size[2]}};
    each_position(all, size, [&](const int64_t kernel[3], int64_t k) {
      S* const to = static_cast<S*>(t.grad_weight) + element(weight, out, in, k);
      if (is_nan(to)) store_one<T>(to, static_cast<T>(accumulate(out, channel, kernel)));
      return true;
    });
  }

  double accumulate(int64_t out, int64_t in, const int64_t kernel[3]) const {
    Range reached[3];  // outputs whose kernel element reads a position inside the tensor
    for (int d = 0; d < 3; ++d) {
      const Axis& a = p.axis[d];
      reached[d] = {0, a.output};
      if (!p.padding_mode) reached[d] = a.output_reached_by(kernel[d], {0, a.input}, reached[d]);
    }
    double sum = 0;
    for (int64_t n = 0; n < p.batch; ++n)
      each_position(reached, output.size, [&](const int64_t at[3], int64_t pixel) {
        int64_t from = 0;
        for (int d = 0; d < 3; ++d) {
          const Axis& a = p.axis[d];
          from = from * a.input + input.inside(d, at[d] * a.stride - a.padding + kernel[d] * a.dilation);
        }
        sum += value(t.grad_output, element(output, n, out, pixel)) * value(t.input, element(input, n, in, from));
        return sum == sum;
      });
    return sum;
  }

  Tiling p = {};
  const convgrad_tensors& t;
  int64_t groups;
  Tensor input, output, weight;
};

}  // namespace
