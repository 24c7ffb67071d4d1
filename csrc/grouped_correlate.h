// The tiles of grouped forward and grad_input: planes of results, each a run of `correlate_planes`.
#pragma once

#include "grouped_operands.h"

namespace {

// S: storage, T: arithmetic, N: lanes of a vector.
template <class S, class T, int N>
struct GroupedCorrelate {
  using Scratch = GroupedScratch<T>;
  using Block = GroupedBlock;

  const GroupedPlan& p;
  const GroupedWeights<T>& weights;
  const convgrad_tensors& t;
  GroupedOperands<S, T, N> operands;

  // ---- forward ----

  void forward_tile(const Scratch& s, const Block& b, const Range o[3], const PlaneTile& tile) const {
    const Tensor x = p.output_tensor();
    const int64_t pitch = tile.extent[2], channels = b.groups.size() * p.out_per_group;
    const int64_t vectors = ceil_div((o[1].size() - 1) * pitch + o[2].size(), N);
    const int64_t count = operands.list_input_taps(s.taps, tile);
    for (int64_t n = 0; n < b.images; ++n)
      for (int64_t d = o[0].low; d < o[0].high; ++d) {
        for (int64_t g = 0; g < b.groups.size(); ++g) {
          const T* from = s.input + g * p.in_per_group * tile.channel() + n * tile.image() +
                          (d - o[0].low) * tile.extent[1] * pitch;
          correlate_channels<T, N>({s.result + g * p.out_per_group * vectors * N, vectors * N, from,
                                    weights.forward + (b.groups.low + g) * p.group_weights(),
                                    weights.start + (b.groups.low + g) * p.out_per_group, s.taps,
                                    count}, p.out_per_group, vectors);
        }
        for (int64_t h = o[1].low; h < o[1].high; ++h)
          Planes<S, T, N>::unpack_row(static_cast<S*>(t.forward), s.result + (h - o[1].low) * pitch, vectors * N, x,
                                      b.groups.low * p.out_per_group, channels, b.image + n,
                                      (d * x.size[1] + h) * x.size[2] + o[2].low, o[2].size(), p.channels_last, 1,
                                      b.ahead(channels));
      }
  }

  // ---- grad_input ----

  // Positions of a range that leave the same remainder by the stride, in one dimension.
  struct Phase {
    int64_t first, count;  // first position; they are `stride` apart
    int64_t source;        // what position 0 of the reach is, in the packed grad_output
    TapRange reach;
  };
  Phase phase(int d, Range r, int64_t i, int64_t low) const {
    const Axis& a = p.axis[d];
    const int64_t first = r.low + i;
    return {first, ceil_div(r.size() - i, a.stride), a.quotient(first) - low, a.backward_reach(a.remainder(first))};
  }

  void grad_input_tile(const Scratch& s, const Block& b, const Range r[3], const Range source[3],
                       const PlaneTile& tile) const {
    if (r[0].size() == 0 || r[1].size() == 0 || r[2].size() == 0) return;
    const int64_t phases[2] = {least(p.axis[1].stride, r[1].size()), least(p.axis[2].stride, r[2].size())};
    for (int64_t n = 0; n < b.images; ++n) {
      for (int64_t d = r[0].low; d < r[0].high; ++d)
        for (int64_t i = 0; i < phases[0]; ++i) {
          const Phase in_d = phase(0, {d, d + 1}, 0, source[0].low), in_h = phase(1, r[1], i, source[1].low);
          const int64_t plane = round_up((in_h.count - 1) * tile.extent[2] + ceil_div(r[2].size(), phases[1]), N);
          for (int64_t j = 0; j < phases[1]; ++j)
            grad_input_phase(s, b, n, in_d, in_h, phase(2, r[2], j, source[2].low), tile, plane,
                             s.result + j * b.groups.size() * p.in_per_group * plane);
          store_phases(s, b, n, d, in_h, r, phases[1], tile.extent[2], plane);
        }
      if (p.folds()) store_folded(s, b, n, r);
    }
  }

  void grad_input_phase(const Scratch& s, const Block& b, int64_t n, const Phase& d, const Phase& h, const Phase& w,
                        const PlaneTile& tile, int64_t plane, T* result) const {
    const TapRange reach[3] = {d.reach, h.reach, w.reach};
    const int64_t count = operands.list_output_taps(s.taps, tile, reach);
    const int64_t vectors = ceil_div((h.count - 1) * tile.extent[2] + w.count, N);
    for (int64_t g = 0; g < b.groups.size(); ++g) {
      const T* from = s.grad_output + g * p.out_per_group * tile.channel() + n * tile.image() +
                      (d.source * tile.extent[1] + h.source) * tile.extent[2] + w.source;
      correlate_channels<T, N>({result + g * p.in_per_group * plane, plane, from,
                                weights.backward + (b.groups.low + g) * p.group_weights(),
                                weights.start + (b.groups.low + g) * p.in_per_group, s.taps, count},
                               p.in_per_group, vectors);
    }
  }

  // Rows of the input from the phases of its width: in channels_last pixels go where they belong one by one, else the
  // phases are put together first. What is to be folded stays in scratch memory.
  void store_phases(const Scratch& s, const Block& b, int64_t n, int64_t d, const Phase& h, const Range r[3],
                    int64_t phases, int64_t pitch, int64_t plane) const {
    const Tensor x = p.input_tensor();
    const Range w = r[2];
    S* const results = static_cast<S*>(t.grad_input);
    const int64_t first = b.groups.low * p.in_per_group, channels = b.groups.size() * p.in_per_group;
    for (int64_t i = 0; i < h.count; ++i) {
      const int64_t row = d * x.size[1] + h.first + i * p.axis[1].stride, pixel = row * x.size[2] + w.low;
      const T* from = s.result + i * pitch;
      if (p.folds()) {
        const int64_t at = (d - r[0].low) * r[1].size() + h.first + i * p.axis[1].stride - r[1].low;
        for (int64_t c = 0; c < channels; ++c)
          join_phases(s.folded + c * p.folded_pixels() + at * w.size(), from + c * plane, channels * plane, phases,
                      w.size());
        continue;
      }
      if (p.channels_last || phases == 1) {
        for (int64_t phase = 0; phase < phases; ++phase, from += channels * plane)
          Planes<S, T, N>::unpack_row(results, from, plane, x, first, channels, b.image + n, pixel + phase,
                                      ceil_div(w.size() - phase, phases), p.channels_last, phases, b.ahead(channels));
        continue;
      }
      for (int64_t c = 0; c < channels; ++c)
        join_phases(s.row + c * w.size(), from + c * plane, channels * plane, phases, w.size());
      Planes<S, T, N>::unpack_row(results, s.row, w.size(), x, first, channels, b.image + n, pixel, w.size(), false);
    }
  }

  // The gradient of an image, [channel][position], with its padding mode.
  void store_folded(const Scratch& s, const Block& b, int64_t n, const Range r[3]) const {
    const Tensor x = p.input_tensor();
    const int64_t channels = b.groups.size() * p.in_per_group, pixels = p.folded_pixels();
    for (int64_t c = 0; c < channels; ++c) fold(s.folded + c * pixels, 1, x, r);
    Planes<S, T, N>::unpack_row(static_cast<S*>(t.grad_input), s.folded, pixels, x, b.groups.low * p.in_per_group,
                                channels, b.image + n, 0, x.pixels(), p.channels_last);
  }

  static void join_phases(T* to, const T* from, int64_t step, int64_t phases, int64_t count) {
    if (phases == 1) return Planes<S, T, N>::copy_row(to, from, count);
    if (phases == 2) {
      Planes<S, T, N>::join_two(to, from, from + step, count / 2);
      if (count % 2) to[count - 1] = from[count / 2];
      return;
    }
    for (int64_t phase = 0; phase < phases; ++phase, from += step)
      for (int64_t i = 0; phase + i * phases < count; ++i) to[phase + i * phases] = from[i];
  }
};

}  // namespace
