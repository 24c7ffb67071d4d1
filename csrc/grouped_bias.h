// The bias gradient of a transposed grouped convolution: the sum of what the plain problem calls its input. A unit sums
// the pixels of its tile where they lie: the packed tile lacks those that no kernel element reaches.
#pragma once

#include "grouped_plan.h"

namespace {

// sums += the pixels `r` of a block of groups, each channel's in lanes of its own.
template <class S, class T, int N>
void sum_input(T* sums, const GroupedPlan& p, const S* input, Range groups, Range images, const Range r[3]) {
  const Tensor x = p.input_tensor();
  const int64_t channel = groups.low * p.in_per_group, channels = groups.size() * p.in_per_group, count = r[2].size();
  auto of_channel = [&](int64_t c) {
    return sums + (c / p.in_per_group * p.group_sums() + p.group_weights() + c % p.in_per_group) * N;
  };
  for (int64_t n = images.low; n < images.high; ++n)
    for (int64_t d = r[0].low; d < r[0].high; ++d)
      for (int64_t h = r[1].low; h < r[1].high; ++h) {
        const int64_t pixel = (d * x.size[1] + h) * x.size[2] + r[2].low;
        if (p.channels_last) {  // neighbouring channels of one pixel lie together
          const S* row = input + (n * x.pixels() + pixel) * x.width + channel;
          for (int64_t c = 0; c < channels; c += N) {
            const int64_t live = least(N, channels - c);
            Vec<T, N> total = {};
            for (int64_t w = 0; w < count; ++w) total += load_first<T, N>(row + w * x.width + c, live);
            for (int64_t l = 0; l < live; ++l) *of_channel(c + l) += total[l];
          }
          continue;
        }
        for (int64_t c = 0; c < channels; ++c) {  // neighbouring pixels of one channel do
          const S* row = input + (n * x.width + channel + c) * x.pixels() + pixel;
          Vec<T, N> total = load<T, N>(of_channel(c));
          for (int64_t w = 0; w < count; w += N) total += load_first<T, N>(row + w, count - w);
          store<T, N>(of_channel(c), total);
        }
      }
}

}  // namespace
