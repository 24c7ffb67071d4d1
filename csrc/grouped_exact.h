// Results of a grouped convolution by the definition, one at a time: for those that the padding may have spoilt. The
// kernels multiply the zeros of the padding, and those between two rows of grad_output, like any number, and infinity
// times zero is NaN; here positions outside the tensor take part in no product. Slow, and rarely needed: a NaN is never
// undone by what is added to it, so a result that is none met no such product.
#pragma once

#include "grouped_plan.h"
#include "packing.h"

namespace {

// S: storage, T: arithmetic.
template <class S, class T>
struct GroupedExact {
  const GroupedPlan& p;
  const convgrad_tensors& t;

  double value(const void* tensor, int64_t element) const {
    return static_cast<double>(load_one<T>(static_cast<const S*>(tensor) + element));
  }
  int64_t element(const Tensor& x, int64_t image, int64_t channel, int64_t pixel) const {
    if (p.channels_last) return (image * x.pixels() + pixel) * x.width + channel;
    return (image * x.width + channel) * x.pixels() + pixel;
  }

  // ---- forward and grad_input ----

  // What one dimension of a result position reads of the source.
  struct Line {
    TapRange reach;   // without what lies outside the tensor
    int64_t base;  // the position that the reach counts from
    bool cut;      // whether anything lies outside
    int64_t kernel(int64_t j) const { return reach.first + j * reach.step; }
    int64_t source(int64_t j) const { return base + reach.offset + j * reach.offset_step; }
  };
  Line line(int d, int64_t position, bool backward) const {
    const Axis& a = p.axis[d];
    const TapRange all = backward ? a.backward_reach(a.remainder(position)) : a.forward_reach();
    const int64_t base = backward ? a.quotient(position) : position * a.stride;
    const TapRange inside = region_at(all, base, 1, 0, backward ? a.output : a.input, 1).reach;
    return {inside, base, inside.count < all.count};
  }

  // Replace the NaNs among a tile's results, as far as they are the padding's.
  __attribute__((noinline)) void correct(bool backward, Range groups, Range images, const Range r[3]) const {
    if (p.padding_mode && !backward) return;
    const Tensor result = backward ? p.input_tensor() : p.output_tensor();
    const int64_t channels = result.width / p.groups;
    S* const results = static_cast<S*>(backward ? t.grad_input : t.forward);
    for (int64_t d = most(r[0].low, 0); d < least(r[0].high, result.size[0]); ++d)
      for (int64_t h = most(r[1].low, 0); h < least(r[1].high, result.size[1]); ++h)
        for (int64_t w = most(r[2].low, 0); w < least(r[2].high, result.size[2]); ++w) {
          const Line at[3] = {line(0, d, backward), line(1, h, backward), line(2, w, backward)};
          if (!at[0].cut && !at[1].cut && !at[2].cut && !p.folds()) continue;
          for (int64_t n = images.low; n < images.high; ++n)
            for (int64_t c = groups.low * channels; c < groups.high * channels; ++c) {
              S* to = results + element(result, n, c, (d * result.size[1] + h) * result.size[2] + w);
              if (load_one<T>(to) == load_one<T>(to)) continue;
              double sum = t.bias ? value(t.bias, c) : 0;
              each_reader(0, d, [&](int64_t in_d) {
                each_reader(1, h, [&](int64_t in_h) {
                  each_reader(2, w, [&](int64_t in_w) {
                    const Line from[3] = {line(0, in_d, backward), line(1, in_h, backward), line(2, in_w, backward)};
                    sum += correlate(backward, n, c, from);
                  });
                });
              });
              store_one<T>(to, static_cast<T>(sum));
            }
        }
  }

  // The positions whose gradients make up that of position i.
  template <class Function>
  void each_reader(int d, int64_t i, Function&& function) const {
    if (!p.folds()) return function(i);
    const Range all = p.axis[d].padded();
    for (int64_t j = all.low; j < all.high; ++j)
      if (p.input_tensor().inside(d, j) == i) function(j);
  }

  double correlate(bool backward, int64_t image, int64_t channel, const Line at[3]) const {
    const Tensor source = backward ? p.output_tensor() : p.input_tensor();
    const int64_t channels = source.width / p.groups, results = backward ? p.in_per_group : p.out_per_group;
    const int64_t group = channel / results, result = channel % results;
    double sum = 0;
    for (int64_t c = 0; c < channels && sum == sum; ++c)
      for (int64_t i = 0; i < at[0].reach.count; ++i)
        for (int64_t j = 0; j < at[1].reach.count; ++j)
          for (int64_t l = 0; l < at[2].reach.count; ++l) {
            const int64_t row = at[0].source(i) * source.size[1] + at[1].source(j);
            const int64_t kernel_row = at[0].kernel(i) * p.axis[1].kernel + at[1].kernel(j);
            const int64_t pixel = row * source.size[2] + at[2].source(l);
            const int64_t k = kernel_row * p.axis[2].kernel + at[2].kernel(l);
            sum += value(backward ? t.grad_output : t.input, element(source, image, group * channels + c, pixel)) *
                   value(t.weight, p.weight_element(group, backward ? c : result, backward ? result : c, k));
          }
    return sum;
  }

  // ---- grad_weight ----

  // The same for the sums over some units, of each group as its weights lie.
  __attribute__((noinline)) void correct_sums(T* sums, Range groups, Range units) const {
    for (int64_t group = groups.low; group < groups.high; ++group, sums += p.group_sums())
      for (int64_t weight = 0; weight < p.group_weights(); ++weight)
        if (sums[weight] != sums[weight]) sums[weight] = corrected(group, weight, units);
  }

  T corrected(int64_t group, int64_t weight, Range units) const {
    const int64_t ni = p.in_per_group, nk = p.kernel_elements, out = weight / nk / ni;
    const int64_t k = p.channels_last ? weight / ni % nk : weight % nk;
    const int64_t in = p.channels_last ? weight % ni : weight / nk % ni;
    const int64_t kernel[3] = {k / (p.axis[1].kernel * p.axis[2].kernel), k / p.axis[2].kernel % p.axis[1].kernel,
                               k % p.axis[2].kernel};
    double total = 0;
    for (int64_t unit = units.low; unit < units.high && total == total; ++unit)
      total += accumulate(p.place(unit), group * p.out_per_group + out, group * p.in_per_group + in, kernel);
    return static_cast<T>(total);
  }

  // The outputs whose kernel element k reads a position inside the tensor.
  Range reached(int d, int64_t k, Range output) const {
    if (p.padding_mode) return output;
    return p.axis[d].output_reached_by(k, {0, p.axis[d].input}, output);
  }

  double accumulate(const GroupedPlan::Place& place, int64_t out, int64_t in, const int64_t kernel[3]) const {
    const Tensor x = p.input_tensor(), g = p.output_tensor();
    Range o[3];
    for (int d = 0; d < 3; ++d) o[d] = reached(d, kernel[d], place.tile.output[d]);
    auto input = [&](int d, int64_t at) {
      return x.inside(d, at * p.axis[d].stride - p.axis[d].padding + kernel[d] * p.axis[d].dilation);
    };
    double sum = 0;
    for (int64_t n = place.images.low; n < place.images.high; ++n)
      for (int64_t d = o[0].low; d < o[0].high; ++d)
        for (int64_t h = o[1].low; h < o[1].high && sum == sum; ++h)
          for (int64_t w = o[2].low; w < o[2].high; ++w) {
            const int64_t from = (input(0, d) * x.size[1] + input(1, h)) * x.size[2] + input(2, w);
            sum += value(t.grad_output, element(g, n, out, (d * g.size[1] + h) * g.size[2] + w)) *
                   value(t.input, element(x, n, in, from));
          }
    return sum;
  }
};

}  // namespace
