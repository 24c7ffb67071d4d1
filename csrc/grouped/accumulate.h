// The sums of a grouped convolution, grad_weight and grad_bias, over one tile.
#pragma once

#include "operands.h"

namespace {

// S: storage, T: arithmetic, N: lanes of a vector.
template <class S, class T, int N>
struct GroupedAccumulate {
  using Scratch = GroupedScratch<T>;

  const GroupedPlan& p;
  GroupedOperands<S, T, N> operands;

  void tile(Scratch& s, T* sums, const GroupedBlock& b, const Range o[3], const Range source[3], const PlaneTile& input,
            const PlaneTile& grad) const {
    const int64_t count = operands.list_input_taps(s, input, {0, p.axis[0].kernel});
    PlaneRows<T> rows;
    rows.images = b.images, rows.depth = o[0].size(), rows.rows = o[1].size(), rows.pixels = o[2].size();
    rows.grad_channel = grad.channel(), rows.grad_image = grad.image();
    rows.grad_row = grad.extent[2], rows.grad_slice = grad.extent[1] * grad.extent[2];
    rows.input_image = input.image(), rows.input_row = input.extent[2];
    rows.input_slice = input.extent[1] * input.extent[2];
    // Rows at one pitch are one long row: what lies between them in grad_output is zeros, as no tile cuts the width.
    if (p.bands[2] == 1 && rows.grad_row == rows.input_row)
      rows.pixels += (rows.rows - 1) * rows.grad_row, rows.rows = 1;
    const int64_t first = ((o[0].low - source[0].low) * grad.extent[1] + o[1].low - source[1].low) * grad.extent[2] +
                          o[2].low - source[2].low;
    for (int64_t g = 0; g < b.groups.size(); ++g, sums += p.group_sums()) {
      rows.input = s.input + g * p.in_per_group * input.channel();
      rows.grad = s.grad_output + g * p.out_per_group * grad.channel() + first;
      accumulate_channels<T, N>(sums, p.out_per_group, s.taps, count, rows);
      for (int64_t c = 0; c < p.out_per_group && p.wants(CONVGRAD_GRAD_BIAS); ++c, rows.grad += rows.grad_channel)
        sums[p.group_weights() + c] += sum_plane<T, N>(rows);
    }
  }

  // The bias gradient of a transposed convolution: sums of what the plain problem calls its input, of the pixels `r`.
  // They are read where they lie: the packed tile lacks those that no kernel element reaches.
  void sum_input(T* sums, const S* input, const GroupedBlock& b, const Range r[3]) const {
    const Tensor x = p.input_tensor();
    const int64_t channel = b.groups.low * p.in_per_group, channels = b.groups.size() * p.in_per_group;
    const int64_t count = r[2].size();
    auto of_channel = [&](int64_t c) {
      return sums + c / p.in_per_group * p.group_sums() + p.group_weights() + c % p.in_per_group;
    };
    for (int64_t n = b.image; n < b.image + b.images; ++n)
      for (int64_t d = r[0].low; d < r[0].high; ++d)
        for (int64_t h = r[1].low; h < r[1].high; ++h) {
          const int64_t pixel = (d * x.size[1] + h) * x.size[2] + r[2].low;
          if (p.channels_last) {  // neighboring channels of one pixel lie together
            const S* row = input + (n * x.pixels() + pixel) * x.width + channel;
            for (int64_t c = 0; c < channels; c += N) {
              const int64_t live = least(N, channels - c);
              Vec<T, N> total = {};
              for (int64_t w = 0; w < count; ++w) total += load_first<T, N>(row + w * x.width + c, live);
              for (int64_t l = 0; l < live; ++l) *of_channel(c + l) += total[l];
            }
            continue;
          }
          for (int64_t c = 0; c < channels; ++c) {  // neighboring pixels of one channel do
            const S* row = input + (n * x.width + channel + c) * x.pixels() + pixel;
            *of_channel(c) += sum_of_lanes<T, N>(sum_elements<T, N>(row, count));
          }
        }
  }
};

}  // namespace
