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

  // Returns the offset of a pixel of a channel of an image.
  int64_t place(const Tensor& x, int64_t image, int64_t channel, const int64_t (&at)[3]) const {
    const int64_t pixel = (at[0] * x.size[1] + at[1]) * x.size[2] + at[2];
    return image * x.width * x.pixels() +
           (p.channels_last ? pixel * x.width + channel : channel * x.pixels() + pixel);
  }

  // ---- forward and grad_input ----

  // Returns whether all kernel elements that could reach a position of a result read inside the source, in dimension d.
  bool is_inner(bool backward, int d, int64_t i) const {
    const Axis& a = p.axis[d];
    const int64_t last = (a.kernel - 1) * a.dilation;
    if (!backward) return i * a.stride >= a.padding && i * a.stride - a.padding + last < a.input;
    return !p.folds() && i + a.padding >= last && (i + a.padding) / a.stride < a.output;
  }

  // `body(kernel element, position of the source)` for all products of a position of a result, in one dimension. Where
  // gradients of the padding are added to those of what it reads, also for those.
  template <class Body>
  void each_product(bool backward, int d, int64_t at, const Body& body) const {
    const Axis& a = p.axis[d];
    const Range results = backward && p.folds() ? a.padded() : Range{at, at + 1};
    for (int64_t i = results.low; i < results.high; ++i)
      for (int64_t k = 0; k < a.kernel && (!backward || input.inside(d, i) == at); ++k) {
        const int64_t from = backward ? i + a.padding - k * a.dilation : i * a.stride - a.padding + k * a.dilation;
        if (from < 0 || (backward && from % a.stride)) continue;
        const int64_t source = backward ? from / a.stride : from;
        if (source < (backward ? a.output : a.input)) body(k, source);
      }
  }

  __attribute__((cold)) void correct_plane(bool backward, int64_t number) const {
    const Tensor& x = backward ? input : output;
    const int64_t image = number / x.width, channel = number % x.width;
    if (!infinite[channel / (x.width / p.groups) / p.block_groups]) return;
    for (int64_t i = 0; i < x.pixels(); ++i) {
      const int64_t at[3] = {i / x.size[2] / x.size[1], i / x.size[2] % x.size[1], i % x.size[2]};
      S* const to = static_cast<S*>(backward ? t.grad_input : t.forward) + place(x, image, channel, at);
      if (!is_nan(to)) continue;
      if (is_inner(backward, 0, at[0]) && is_inner(backward, 1, at[1]) && is_inner(backward, 2, at[2])) continue;
      store_one<T>(to, static_cast<T>(correlate(backward, image, channel, at)));
    }
  }

  double correlate(bool backward, int64_t image, int64_t channel, const int64_t (&at)[3]) const {
    const Tensor &x = backward ? input : output, &from = backward ? output : input;
    const int64_t results = x.width / p.groups, sources = from.width / p.groups;
    const int64_t group = channel / results, result = channel % results;
    const S *const source = static_cast<const S*>(backward ? t.grad_output : t.input);
    const S *const weight = static_cast<const S*>(t.weight);
    double sum = t.bias ? value(static_cast<const S*>(t.bias) + channel) : 0;
    each_product(backward, 0, at[0], [&](int64_t i, int64_t d) {
      each_product(backward, 1, at[1], [&](int64_t j, int64_t h) {
        each_product(backward, 2, at[2], [&](int64_t k, int64_t w) {
          const int64_t element = (i * p.axis[1].kernel + j) * p.axis[2].kernel + k;
          for (int64_t c = 0; c < sources && sum == sum; ++c)
            sum += value(source + place(from, image, group * sources + c, {d, h, w})) *
                   value(weight + p.weight_element(group, backward ? c : result, backward ? result : c, element));
        });
      });
    });
    return sum;
  }

  // ---- grad_weight ----

  __attribute__((cold)) void correct_weights(int64_t out) const {
    const int64_t rows = p.axis[1].kernel, columns = p.axis[2].kernel;
    const int64_t spoilt_grad = first_spoilt(t.grad_output, output, out, p.batch);
    for (int64_t in = 0; in < p.in_per_group; ++in) {
      int64_t first = -1;  // the first image in which a sum can become NaN
      for (int64_t k = 0; k < p.kernel_elements; ++k) {
        S* const to = static_cast<S*>(t.grad_weight) + p.weight_element(0, out, in, k);
        if (!is_nan(to)) continue;
        if (first < 0) first = first_spoilt(t.input, input, input_channel(out, in), spoilt_grad);
        const int64_t kernel[3] = {k / columns / rows, k / columns % rows, k % columns};
        double sum = accumulate(out, in, kernel, {first, p.batch});
        if (sum - sum == 0) sum += accumulate(out, in, kernel, {0, first});  // no finite number changes another sum
        store_one<T>(to, static_cast<T>(sum));
      }
    }
  }

  int64_t input_channel(int64_t out, int64_t in) const { return out / p.out_per_group * p.in_per_group + in; }

  // Returns the first of so many images in which a channel has an infinity or NaN, or how many there are.
  int64_t first_spoilt(const void* tensor, const Tensor& x, int64_t channel, int64_t images) const {
    const int64_t step = p.channels_last ? x.width : 1, pixels = x.pixels();
    for (int64_t image = 0; image < images; ++image) {
      const S* const from = static_cast<const S*>(tensor) + place(x, image, channel, {0, 0, 0});
      bool finite = true;
      for (int64_t i = 0; i < pixels; ++i) finite &= value(from + i * step) * 0 == 0;
      if (!finite) return image;
    }
    return images;
  }

  double accumulate(int64_t out, int64_t in, const int64_t (&kernel)[3], Range images) const {
    const int64_t channel = input_channel(out, in);
    const S *const grad = static_cast<const S*>(t.grad_output), *const source = static_cast<const S*>(t.input);
    double sum = 0;
    for (int64_t i = images.low * output.pixels(); i < images.high * output.pixels() && sum == sum; ++i) {
      const int64_t row = i / output.size[2], image = i / output.pixels();
      const int64_t o[3] = {row / output.size[1] % output.size[0], row % output.size[1], i % output.size[2]};
      int64_t read[3];
      bool inside = true;
      for (int d = 0; d < 3; ++d) {
        const Axis& a = p.axis[d];
        read[d] = input.inside(d, o[d] * a.stride - a.padding + kernel[d] * a.dilation);
        inside = inside && read[d] >= 0 && read[d] < a.input;
      }
      if (!inside) continue;
      sum += value(grad + place(output, image, out, o)) * value(source + place(input, image, channel, read));
    }
    return sum;
  }
};

}  // namespace
