// What a tile of a grouped convolution is computed from: the layout of its packed planes, weights, and the list of
// kernel elements; and the scratch memory of a thread.
#pragma once

#include "grouped_kernels.h"
#include "grouped_packing.h"

namespace {

// Scratch memory of one thread.
template <class T>
struct GroupedScratch {
  T *input, *grad_output, *result, *row, *folded;
  Tap* taps;
  int64_t tile, images, groups;  // of the unit whose operands are packed
};

// Packed weights of all groups, and what sums start from, of all channels. All threads share them: units come as they
// lie in memory, so that each takes another block of groups than the one before.
template <class T>
struct GroupedWeights {
  T *forward, *backward;  // [input][kernel element][output] of each group; [output][kernel element][input]
  T* start;
  bool* infinite;  // whether those of a block hold an infinity or NaN
};

// A block of groups, and the images of a unit.
struct GroupedBlock {
  int64_t number;
  Range groups;
  int64_t image, images;
  bool more;  // whether the next unit takes the next channels of the same pixels, which are prefetched

  int64_t ahead(int64_t channels) const { return more ? channels : 0; }
};

// S: storage, T: arithmetic, N: lanes of a vector.
template <class S, class T, int N>
struct GroupedOperands {
  using Block = GroupedBlock;

  const GroupedPlan& p;
  const convgrad_tensors& t;

  void pack_weight(const GroupedWeights<T>& weights, int64_t block) const {
    const S *from = static_cast<const S*>(t.weight), *bias = static_cast<const S*>(t.bias);
    const int64_t ni = p.in_per_group, no = p.out_per_group, nk = p.kernel_elements;
    const Range groups = p.block(block);
    for (int64_t g = groups.low; g < groups.high; ++g)
      for (int64_t o = 0; o < no; ++o)
        for (int64_t i = 0; i < ni; ++i)
          for (int64_t k = 0; k < nk; ++k) {
            const T w = load_one<T>(from + p.weight_element(g, o, i, k));
            if (weights.forward) weights.forward[g * p.group_weights() + (i * nk + k) * no + o] = w;
            if (weights.backward) weights.backward[g * p.group_weights() + (o * nk + k) * ni + i] = w;
          }
    const int64_t channels = p.wants(CONVGRAD_FORWARD) ? no : ni;
    for (int64_t c = groups.low * channels; c < groups.high * channels; ++c)
      weights.start[c] = bias ? load_one<T>(bias + c) : T(0);
    weights.infinite[block] =
        !all_finite<T, N>((weights.forward ? weights.forward : weights.backward) + groups.low * p.group_weights(),
                          groups.size() * p.group_weights());
  }

  // The taps of all inputs of a group, in the packed input.
  int64_t list_input_taps(Tap* taps, const PlaneTile& tile) const {
    const int64_t plane = tile.plane(), channel = tile.channel();
    // Of an element of one dimension: its phase, and its position there. Divisions only where there is a stride.
    auto source = [&](int d, int64_t k, int64_t phase_step, int64_t position_step) {
      const Axis& a = p.axis[d];
      if (a.stride == 1) return k * a.dilation * position_step;
      return k % tile.phases[d] * phase_step * plane + k * a.dilation / a.stride * position_step;
    };
    int64_t n = 0;
    for (int64_t d = 0; d < p.axis[0].kernel; ++d) {
      const int64_t slice = source(0, d, tile.phases[1] * tile.phases[2], tile.extent[1] * tile.extent[2]);
      for (int64_t h = 0; h < p.axis[1].kernel; ++h) {
        const int64_t row = slice + source(1, h, tile.phases[2], tile.extent[2]);
        for (int64_t w = 0; w < p.axis[2].kernel; ++w) taps[n++].source = row + source(2, w, 1, 1);
      }
    }
    for (int64_t i = 1; i < p.in_per_group; ++i)
      for (int64_t k = 0; k < p.kernel_elements; ++k) taps[n++].source = taps[k].source + i * channel;
    for (int64_t i = 0; i < n; ++i) taps[i].weight = i * p.out_per_group;
    return n;
  }

  // The taps of all outputs of a group, in the packed grad_output, that reach one phase of the input.
  int64_t list_output_taps(Tap* taps, const PlaneTile& tile, const TapRange r[3]) const {
    int64_t n = 0;
    for (int64_t o = 0; o < p.out_per_group; ++o)
      for (int64_t i = 0; i < r[0].count; ++i)
        for (int64_t j = 0; j < r[1].count; ++j)
          for (int64_t l = 0; l < r[2].count; ++l) {
            const int64_t k = ((r[0].first + i * r[0].step) * p.axis[1].kernel + r[1].first + j * r[1].step) *
                                  p.axis[2].kernel + r[2].first + l * r[2].step;
            const int64_t position = ((r[0].offset + i * r[0].offset_step) * tile.extent[1] + r[1].offset +
                                      j * r[1].offset_step) * tile.extent[2] + r[2].offset + l * r[2].offset_step;
            taps[n++] = {o * tile.channel() + position, (o * p.kernel_elements + k) * p.in_per_group};
          }
    return n;
  }
};

}  // namespace
