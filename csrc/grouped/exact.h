// Results of a grouped convolution by the definition, one at a time, for those that the padding may have spoilt. The
// kernels multiply its zeros, and those between two rows, like any number, and infinity times zero is NaN; here
// positions outside the tensor take part in no product. Slow, and rarely needed: a NaN is never undone by what is added
// to it, so a result that is none met no such product, and neither did one whose kernel elements are all inside.
#pragma once

#include "../vectors/packing.h"
#include "../vectors/parallel.h"
#include "plan.h"

namespace {

// S: storage, T: arithmetic.
template <class S, class T>
struct GroupedExact {
  const GroupedPlan& p;
  const convgrad_tensors& t;
  const bool* infinite;  // whether the weights of a block of groups hold an infinity or NaN
  const Tensor input = p.input_tensor(), output = p.output_tensor();

  void correct_results(int64_t threads) const {
    for (const int pass : {CONVGRAD_FORWARD, CONVGRAD_GRAD_INPUT}) {
      const int64_t channels = (pass == CONVGRAD_FORWARD ? output : input).width;
      if (p.wants(pass) && !(p.padding_mode && pass == CONVGRAD_FORWARD))
        run_items(threads, p.batch * channels, [&](int64_t i) { correct_plane(pass, i / channels, i % channels); });
    }
  }
  void correct_sums(int64_t threads) const {
    const int64_t rows = p.axis[1].kernel, columns = p.axis[2].kernel;
    run_items(threads, output.width, [&](int64_t out) {
      for (int64_t i = 0; i < p.in_per_group * p.kernel_elements; ++i) {
        const int64_t in = i / p.kernel_elements, k = i % p.kernel_elements;
        const int64_t at[3] = {k / columns / rows, k / columns % rows, k % columns};
        correct(static_cast<S*>(t.grad_weight) + p.weight_element(0, out, in, k), CONVGRAD_GRAD_WEIGHT, {0, p.batch},
                {out, out + 1}, {in, in + 1}, at);
      }
    });
  }

 private:
  static double value(const void* tensor, int64_t i) { return double(load_one<T>(static_cast<const S*>(tensor) + i)); }

  // Where an element lies.
  int64_t element(const Tensor& x, int64_t image, int64_t channel, int64_t pixel) const {
    return p.channels_last ? (image * x.pixels() + pixel) * x.width + channel
                           : (image * x.width + channel) * x.pixels() + pixel;
  }

  // Positions all of whose kernel elements are inside the source, of one dimension.
  Range inner(int pass, int d) const {
    const Axis& a = p.axis[d];
    const Range all = {0, a.output}, in = {0, a.input};
    if (p.folds()) return {0, 0};
    if (pass == CONVGRAD_GRAD_INPUT)
      return {(a.kernel - 1) * a.dilation - a.padding, (a.output - 1) * a.stride - a.padding + 1};
    return {a.output_reached_by(0, in, all).low, a.output_reached_by(a.kernel - 1, in, all).high};
  }

  void correct_plane(int pass, int64_t image, int64_t channel) const {
    const bool forward = pass == CONVGRAD_FORWARD;
    const Tensor& x = forward ? output : input;
    const int64_t group = channel / (x.width / p.groups);
    if (!infinite[group / p.block_groups]) return;
    const Range ins = {0, p.in_per_group}, outs = {group * p.out_per_group, (group + 1) * p.out_per_group};
    const Range one = {channel, channel + 1}, in = {channel % p.in_per_group, channel % p.in_per_group + 1};
    const Range inside[3] = {inner(pass, 0), inner(pass, 1), inner(pass, 2)};
    for (int64_t i = 0; i < x.pixels(); ++i) {
      const int64_t at[3] = {i / x.size[2] / x.size[1], i / x.size[2] % x.size[1], i % x.size[2]};
      bool whole = true;
      for (int d = 0; d < 3; ++d) whole = whole && at[d] >= inside[d].low && at[d] < inside[d].high;
      if (!whole)
        correct(static_cast<S*>(forward ? t.forward : t.grad_input) + element(x, image, channel, i), pass,
                {image, image + 1}, forward ? one : outs, forward ? ins : in, at, t.bias ? value(t.bias, channel) : 0);
    }
  }

  // Compute a result that is NaN: the sum over images, output channels, and input channels of their group. `at`: its
  // position, or its kernel element.
  void correct(S* result, int pass, Range images, Range outs, Range ins, const int64_t at[3], double sum = 0) const {
    if (load_one<T>(result) == load_one<T>(result)) return;
    for (int64_t n = images.low; n < images.high; ++n)
      for (int64_t out = outs.low; out < outs.high; ++out)
        for (int64_t in = ins.low; in < ins.high && sum == sum; ++in) {
          const int64_t channel = out / p.out_per_group * p.in_per_group + in;
          auto add = [&](int64_t k, int64_t o, int64_t i) {
            const int64_t x = element(input, n, channel, i), y = element(output, n, out, o);
            const double a = pass == CONVGRAD_GRAD_INPUT ? value(t.grad_output, y) : value(t.input, x);
            sum += a * (pass == CONVGRAD_GRAD_WEIGHT ? value(t.grad_output, y)
                                                     : value(t.weight, p.weight_element(0, out, in, k)));
          };
          each_product(pass, 0, at, 0, 0, 0, add);
        }
    store_one<T>(result, T(sum));
  }

  // `add(k, o, i)` for kernel elements k by which outputs o read positions i of the input, as indices that the earlier
  // dimensions have begun: those that a result is the sum of.
  template <class Add>
  void each_product(int pass, int d, const int64_t at[3], int64_t k0, int64_t o0, int64_t i0, const Add& add) const {
    if (d == 3) return add(k0, o0, i0);
    const Axis& a = p.axis[d];
    const bool fixed = pass == CONVGRAD_GRAD_WEIGHT;
    for (int64_t k = fixed ? at[d] : 0; k < (fixed ? at[d] + 1 : a.kernel); ++k) {
      Range outputs = {0, a.output};
      if (pass == CONVGRAD_FORWARD) outputs = {at[d], at[d] + 1};
      if (pass == CONVGRAD_GRAD_INPUT && !p.padding_mode) outputs = a.output_reached_by(k, {at[d], at[d] + 1}, outputs);
      for (int64_t o = outputs.low; o < outputs.high; ++o) {
        const int64_t i = input.inside(d, o * a.stride - a.padding + k * a.dilation);
        if (i >= 0 && i < a.input && (pass != CONVGRAD_GRAD_INPUT || i == at[d]))
          each_product(pass, d + 1, at, k0 * a.kernel + k, o0 * a.output + o, i0 * a.input + i, add);
      }
    }
  }
};

}  // namespace
