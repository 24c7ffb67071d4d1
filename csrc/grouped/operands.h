// What a tile of a grouped convolution is computed from: the layout of its packed planes, weights, and the list of
// kernel elements; and the scratch memory of a thread.
#pragma once

#include "kernels.h"
#include "packing.h"

namespace {

// Scratch memory of one thread.
template <class T>
struct GroupedScratch {
  T *input, *grad_output, *result, *folded;
  Tap *taps, *output_taps;
  int64_t *input_places, *grad_places, *result_places;  // in channels_last: where pixels lie
  int64_t tile, images, groups;  // of the unit whose operands are packed
  // That the taps belong to; high or count -1: nothing is listed yet, nor the places of results. They are kept from
  // unit to unit: small images would spend their time on them.
  Range slices;
  TapRange depth;
};

// The weights, in the arithmetic type, and what sums start from, of all channels.
template <class T>
struct GroupedWeights {
  const T* weight;
  T* start;
  bool* infinite;  // whether those of a block hold an infinity or NaN
};

// A block of groups, and the images of a unit.
struct GroupedBlock {
  Range groups;
  int64_t image, images;
  bool more;  // whether the next unit takes the next channels of the same pixels, which are prefetched

  int64_t ahead(int64_t channels) const { return more ? channels : 0; }
};

// S: storage, T: arithmetic, N: lanes of a vector.
template <class S, class T, int N>
struct GroupedOperands {
  const GroupedPlan& p;
  const convgrad_tensors& t;

  // What a block's results are computed with; `to`: its weights, if they are converted.
  void pack_weight(const GroupedWeights<T>& weights, T* to, int64_t block) const {
    const Range groups = p.block(block);
    const int64_t first = groups.low * p.group_weights(), count = groups.size() * p.group_weights();
    if (to) Planes<S, T, N>::template copy_row<kNeither>(to + first, static_cast<const S*>(t.weight) + first, count);
    const S* const bias = static_cast<const S*>(t.bias);
    const int64_t channels = p.wants(CONVGRAD_FORWARD) ? p.out_per_group : p.in_per_group;
    for (int64_t c = groups.low * channels; c < groups.high * channels; ++c)
      weights.start[c] = bias ? load_one<T>(bias + c) : T(0);
    weights.infinite[block] = !all_finite<T, N>(weights.weight + first, count);
  }

  // The taps of all inputs of a group, in the packed input, of some slices of the kernel; as their weights lie.
  int64_t list_input_taps(GroupedScratch<T>& s, const PlaneTile& tile, Range slices) const {
    const int64_t plane = tile.plane(), rows = p.axis[1].kernel, columns = p.axis[2].kernel;
    // Of an element of one dimension: its phase, and its position there. Divisions only where there is a stride.
    auto source = [&](int d, int64_t k, int64_t phase_step, int64_t position_step) {
      const Axis& a = p.axis[d];
      if (a.stride == 1) return k * a.dilation * position_step;
      return k % tile.phases[d] * phase_step * plane + k * a.dilation / a.stride * position_step;
    };
    const int64_t each = slices.size() * rows * columns;
    if (same(s.slices, slices)) return each * p.in_per_group;
    s.slices = slices;
    // From a tap to the next channel's, and to the next kernel element's.
    const int64_t next = p.channels_last ? 1 : each, along = p.channels_last ? p.in_per_group : 1;
    Tap* to = s.taps;
    for (int64_t d = slices.low; d < slices.high; ++d) {
      const int64_t slice = source(0, d, tile.phases[1] * tile.phases[2], tile.extent[1] * tile.extent[2]);
      for (int64_t h = 0; h < rows; ++h) {
        const int64_t row = slice + source(1, h, tile.phases[2], tile.extent[2]);
        for (int64_t w = 0; w < columns; ++w, to += along)
          for (int64_t i = 0; i < p.in_per_group; ++i)
            to[i * next] = {row + source(2, w, 1, 1) + i * tile.channel(),
                            p.weight_element(0, 0, i, (d * rows + h) * columns + w)};
      }
    }
    return each * p.in_per_group;
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
            taps[n++] = {o * tile.channel() + position, p.weight_element(0, o, 0, k)};
          }
    return n;
  }
};

}  // namespace
