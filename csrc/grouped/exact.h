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
    if (p.wants(CONVGRAD_FORWARD) && !p.padding_mode)
      run_items(threads, p.batch * output.width, [&](int64_t plane) { correct_plane(false, plane); });
    if (p.wants(CONVGRAD_GRAD_INPUT))
      run_items(threads, p.batch * input.width, [&](int64_t plane) { correct_plane(true, plane); });
  }
  void correct_sums(int64_t threads) const {
    run_items(threads, output.width, [&](int64_t channel) { correct_weights(channel); });
  }

 private:
  static double value(const S* at) { return static_cast<double>(load_one<T>(at)); }
  static bool is_nan(const S* at) { return load_one<T>(at) != load_one<T>(at); }

  // Where a channel of an image begins, and how far apart its pixels lie.
  int64_t plane(const Tensor& x, int64_t image, int64_t channel) const {
    return image * x.width * x.pixels() + channel * (p.channels_last ? 1 : x.pixels());
  }
  int64_t step(int64_t channels) const { return p.channels_last ? channels : 1; }

  // ---- forward and grad_input ----

  // What position i of a result reads of the source, of one dimension.
  TapRange reach(bool backward, int d, int64_t i) const {
    const Axis& a = p.axis[d];
    const int64_t base = backward ? a.quotient(i) : i * a.stride;
    const TapRange all = backward ? a.backward_reach(a.remainder(i)) : a.forward_reach();
    TapRange inside = region_at(all, base, 1, 0, backward ? a.output : a.input, 1).reach;
    inside.offset += base;
    return inside;
  }

  // Positions all of whose kernel elements are inside the source, of one dimension.
  Range inner(bool backward, int d) const {
    const Axis& a = p.axis[d];
    const Range all = {0, a.output}, in = {0, a.input};
    if (p.folds()) return {0, 0};
    if (!backward) return {a.output_reached_by(0, in, all).low, a.output_reached_by(a.kernel - 1, in, all).high};
    auto whole = [&](int64_t i) { return reach(true, d, i).count == a.backward_reach(a.remainder(i)).count; };
    Range r = {(a.kernel - 1) * a.dilation - a.padding, (a.output - 1) * a.stride - a.padding + 1};
    while (r.low > 0 && whole(r.low - 1)) --r.low;  // with a stride, a position has only some of the kernel elements
    while (r.high < a.input && whole(r.high)) ++r.high;
    return r;
  }

  void correct_plane(bool backward, int64_t number) const {
    const Tensor& x = backward ? input : output;
    const int64_t image = number / x.width, channel = number % x.width;
    if (!infinite[channel / (x.width / p.groups) / p.block_groups]) return;
    S* const results = static_cast<S*>(backward ? t.grad_input : t.forward) + plane(x, image, channel);
    const Range d = inner(backward, 0), h = inner(backward, 1), w = inner(backward, 2);
    auto in = [](const Range& r, int64_t i) { return i >= r.low && i < r.high; };
    for (int64_t i = 0; i < x.size[0]; ++i)
      for (int64_t j = 0; j < x.size[1]; ++j)
        for (int64_t k = 0; k < x.size[2]; ++k) {
          if (in(w, k) && in(d, i) && in(h, j)) k = w.high;
          if (k >= x.size[2]) break;
          S* const to = results + ((i * x.size[1] + j) * x.size[2] + k) * step(x.width);
          const int64_t at[3] = {i, j, k};
          if (is_nan(to)) store_one<T>(to, static_cast<T>(correlate(backward, image, channel, at)));
        }
  }

  double correlate(bool backward, int64_t image, int64_t channel, const int64_t at[3]) const {
    const Tensor &x = backward ? input : output, &from = backward ? output : input;
    const int64_t results = x.width / p.groups, sources = from.width / p.groups;
    const int64_t group = channel / results, result = channel % results;
    double sum = t.bias ? value(static_cast<const S*>(t.bias) + channel) : 0;
    auto add_products = [&](const TapRange& d, const TapRange& h, const TapRange& w) {
      for (int64_t c = 0; c < sources && sum == sum; ++c) {
        const S* const source =
            static_cast<const S*>(backward ? t.grad_output : t.input) + plane(from, image, group * sources + c);
        const S* const weight =
            static_cast<const S*>(t.weight) + p.weight_element(group, backward ? c : result, backward ? result : c, 0);
        for (int64_t i = 0; i < d.count; ++i)
          for (int64_t j = 0; j < h.count; ++j) {
            const int64_t row = (d.offset + i * d.offset_step) * from.size[1] + h.offset + j * h.offset_step;
            const int64_t weights = (d.first + i * d.step) * p.axis[1].kernel + h.first + j * h.step;
            const S* const x = source + (row * from.size[2] + w.offset) * step(from.width);
            const S* const y = weight + (weights * p.axis[2].kernel + w.first) * step(p.in_per_group);
            for (int64_t l = 0; l < w.count; ++l)
              sum += value(x + l * w.offset_step * step(from.width)) * value(y + l * w.step * step(p.in_per_group));
          }
      }
    };
    each_reader(backward, 0, at, [&](const TapRange& d) {
      each_reader(backward, 1, at, [&](const TapRange& h) {
        each_reader(backward, 2, at, [&](const TapRange& w) { add_products(d, h, w); });
      });
    });
    return sum;
  }

  // `body(what it reads of the source)` for a position of one dimension; where gradients of the padding are added to
  // those of what it reads, for all whose gradients make up that of the position.
  template <class Body>
  void each_reader(bool backward, int d, const int64_t at[3], const Body& body) const {
    const Range readers = p.folds() ? p.axis[d].padded() : Range{at[d], at[d] + 1};
    for (int64_t i = readers.low; i < readers.high; ++i)
      if (input.inside(d, i) == at[d]) body(reach(backward, d, i));
  }

  // ---- grad_weight ----

  void correct_weights(int64_t out) const {
    const int64_t rows = p.axis[1].kernel, columns = p.axis[2].kernel;
    for (int64_t in = 0; in < p.in_per_group; ++in)
      for (int64_t k = 0; k < p.kernel_elements; ++k) {
        S* const to = static_cast<S*>(t.grad_weight) + p.weight_element(0, out, in, k);
        const int64_t kernel[3] = {k / columns / rows, k / columns % rows, k % columns};
        if (is_nan(to)) store_one<T>(to, static_cast<T>(accumulate(out, in, kernel)));
      }
  }

  double accumulate(int64_t out, int64_t in, const int64_t kernel[3]) const {
    const int64_t channel = out / p.out_per_group * p.in_per_group + in;
    auto read = [&](int d, int64_t at) {
      return input.inside(d, at * p.axis[d].stride - p.axis[d].padding + kernel[d] * p.axis[d].dilation);
    };
    Range o[3];
    for (int d = 0; d < 3; ++d) {
      o[d] = {0, p.axis[d].output};
      if (!p.padding_mode) o[d] = p.axis[d].output_reached_by(kernel[d], {0, p.axis[d].input}, o[d]);
    }
    double sum = 0;
    for (int64_t n = 0; n < p.batch; ++n)
      for (int64_t d = o[0].low; d < o[0].high; ++d)
        for (int64_t h = o[1].low; h < o[1].high && sum == sum; ++h) {
          const S* const g = static_cast<const S*>(t.grad_output) + plane(output, n, out) +
                             (d * output.size[1] + h) * output.size[2] * step(output.width);
          const S* const x = static_cast<const S*>(t.input) + plane(input, n, channel) +
                             (read(0, d) * input.size[1] + read(1, h)) * input.size[2] * step(input.width);
          for (int64_t w = o[2].low; w < o[2].high; ++w)
            sum += value(g + w * step(output.width)) * value(x + read(2, w) * step(input.width));
        }
    return sum;
  }
};

}  // namespace
