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
    input = p.input_tensor(), weight = {{q.kernel[0], q.kernel[1], q.kernel[2]}, q.in_per_group, 0, 1};
    output = {{q.output[0], q.output[1], q.output[2]}, groups * q.out_per_group, 0, 1};
  }

  void correct(int64_t threads) const {
    if (p.wants(CONVGRAD_FORWARD) && !p.padding_mode)
      run_items(threads, p.batch * output.width, [&](int64_t plane) { correct_plane(false, plane); });
    if (p.wants(CONVGRAD_GRAD_INPUT))
      run_items(threads, p.batch * input.width, [&](int64_t plane) { correct_plane(true, plane); });
    if (p.wants(CONVGRAD_GRAD_WEIGHT))
      run_items(threads, output.width * weight.width, [&](int64_t i) { correct_weights(i); });
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
  struct Position {
    int64_t at[3];
  };
  static Position position(const Tensor& x, int64_t pixel) {
    return {{pixel / (x.size[1] * x.size[2]), pixel / x.size[2] % x.size[1], pixel % x.size[2]}};
  }
  // The pixel of the source that a kernel element multiplies for a result, or -1.
  int64_t source(bool backward, const Position& result, const Position& kernel) const {
    const Tensor& x = backward ? output : input;
    int64_t pixel = 0;
    for (int d = 0; d < 3; ++d) {
      const Axis& a = p.axis[d];
      const int64_t offset = kernel.at[d] * a.dilation - a.padding, scaled = result.at[d] - offset;
      if (backward && scaled % a.stride != 0) return -1;
      const int64_t at = backward ? scaled / a.stride : input.inside(d, result.at[d] * a.stride + offset);
      if (at < 0 || at >= x.size[d]) return -1;
      pixel = pixel * x.size[d] + at;
    }
    return pixel;
  }
  template <class Term>
  static double sum(int64_t count, const Term& term) {
    double total = 0;
    for (int64_t i = 0; i < count && total == total; ++i) total += term(i);
    return total;
  }

  // ---- forward and grad_input ----

  void correct_plane(bool backward, int64_t plane) const {
    const Tensor &x = backward ? input : output, &from = backward ? output : input;
    const int64_t image = plane / x.width, channel = plane % x.width, in_group = x.width / groups;
    const int64_t sources = from.width / groups, first = channel / in_group * sources;
    for (int64_t pixel = 0; pixel < x.pixels(); ++pixel) {
      S* const to = static_cast<S*>(backward ? t.grad_input : t.forward) + element(x, image, channel, pixel);
      if (!is_nan(to)) continue;
      double total = t.bias ? value(t.bias, channel) : 0;
      each_reader(position(x, pixel), [&](const Position& at) {
        total += sum(sources * p.kernel_elements, [&](int64_t i) {
          const int64_t c = i / p.kernel_elements, k = i % p.kernel_elements;
          const int64_t read = source(backward, at, position(weight, k));
          if (read < 0) return 0.0;
          const int64_t out = backward ? first + c : channel, in = backward ? channel % in_group : c;
          return value(backward ? t.grad_output : t.input, element(from, image, first + c, read)) *
                 value(t.weight, element(weight, out, in, k));
        });
      });
      store_one<T>(to, static_cast<T>(total));
    }
  }

  // The positions whose gradients make up that of a position: itself, and those of the padding that read it.
  template <class Body>
  void each_reader(const Position& i, const Body& body) const {
    if (!p.folds()) return body(i);
    const Range r[3] = {p.axis[0].padded(), p.axis[1].padded(), p.axis[2].padded()};
    for (int64_t d = r[0].low; d < r[0].high; ++d)
      for (int64_t h = r[1].low; h < r[1].high && input.inside(0, d) == i.at[0]; ++h)
        for (int64_t w = r[2].low; w < r[2].high && input.inside(1, h) == i.at[1]; ++w)
          if (input.inside(2, w) == i.at[2]) body({{d, h, w}});
  }

  // ---- grad_weight: those of one input channel and one output channel ----

  void correct_weights(int64_t i) const {
    const int64_t out = i / weight.width, in = i % weight.width, outputs = output.pixels();
    const int64_t channel = out / (output.width / groups) * weight.width + in;
    for (int64_t k = 0; k < p.kernel_elements; ++k) {
      S* const to = static_cast<S*>(t.grad_weight) + element(weight, out, in, k);
      if (!is_nan(to)) continue;
      const double total = sum(p.batch * outputs, [&](int64_t i) {
        const int64_t image = i / outputs, pixel = i % outputs;
        const int64_t read = source(false, position(output, pixel), position(weight, k));
        if (read < 0) return 0.0;
        return value(t.grad_output, element(output, image, out, pixel)) *
               value(t.input, element(input, image, channel, read));
      });
      store_one<T>(to, static_cast<T>(total));
    }
  }

  Tiling p = {};
  const convgrad_tensors& t;
  int64_t groups;
  Tensor input, output, weight;
};

}  // namespace
