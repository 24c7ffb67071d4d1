// The tiles of grouped forward and grad_input: planes of results, each a run of `correlate_planes`.
#pragma once

#include "operands.h"

namespace {

// S: storage, T: arithmetic, N: lanes of a vector.
template <class S, class T, int N>
struct GroupedCorrelate {
  using Scratch = GroupedScratch<T>;
  using Pack = Planes<S, T, N>;

  const GroupedPlan& p;
  const GroupedWeights<T>& weights;
  const convgrad_tensors& t;
  GroupedOperands<S, T, N> operands;

  // A run for each group of a block; `source_group`: from one to the next in the source.
  void correlate_groups(const GroupedBlock& b, PlaneRun<T> run, int64_t source_group, int64_t channels,
                        int64_t vectors) const {
    for (int64_t g = b.groups.low; g < b.groups.high; ++g) {
      run.weight = weights.weight + g * p.group_weights(), run.start = weights.start + g * channels;
      correlate_channels<T, N>(run, channels, vectors);
      run.result += channels * run.result_channel, run.source += source_group;
    }
  }

  // ---- forward ----

  void forward_tile(Scratch& s, const GroupedBlock& b, const Range o[3], const PlaneTile& tile) const {
    const Tensor x = p.output_tensor();
    S* const results = static_cast<S*>(t.forward);
    const int64_t first = b.groups.low * p.out_per_group, channels = b.groups.size() * p.out_per_group;
    const int64_t pitch = tile.extent[2];
    const int64_t vectors = ceil_div((o[1].size() - 1) * pitch + o[2].size(), N);
    if (p.transposes(x) && s.slices.high < 0)
      Pack::list_results(s.result_places, x, o[1].size(), 1, o[2].size(), 1, pitch);
    for (int64_t d = o[0].low; d < o[0].high; ++d) {
      const Axis& a = p.axis[0];
      const TapRange all = a.forward_reach();
      const TapRange r = p.padding_mode ? all : region_at(all, d * a.stride, 1, 0, a.input, 1).reach;
      const int64_t count = operands.list_input_taps(s, tile, {r.first, r.first + r.count});
      for (int64_t n = 0; n < b.images; ++n) {
        const T* const from = s.input + n * tile.image() + (d - o[0].low) * tile.extent[1] * pitch;
        const int64_t weight_channel = p.weight_element(0, 1, 0, 0);
        correlate_groups(b, {s.result, vectors * N, from, nullptr, weight_channel, nullptr, s.taps, count},
                         p.in_per_group * tile.channel(), p.out_per_group, vectors);
        const int64_t pixel = (d * x.size[1] + o[1].low) * x.size[2] + o[2].low;
        if (p.transposes(x))
          Pack::unpack_pixels(results, s.result, vectors * N, x, first, channels, b.image + n, pixel, s.result_places,
                              vectors * N, b.ahead(channels));
        for (int64_t h = 0; h < o[1].size() && !p.transposes(x); ++h)
          Pack::unpack_row(results, s.result + h * pitch, vectors * N, x, first, channels, b.image + n,
                           pixel + h * x.size[2], o[2].size());
      }
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

  void grad_input_tile(Scratch& s, const GroupedBlock& b, const Range r[3], const Range source[3],
                       const PlaneTile& tile) const {
    if (r[0].size() == 0 || r[1].size() == 0 || r[2].size() == 0) return;
    const Tensor x = p.input_tensor();
    const bool transposes = p.transposes(x) && !p.folds();
    const int64_t phases[2] = {least(p.axis[1].stride, r[1].size()), least(p.axis[2].stride, r[2].size())};
    for (int64_t d = r[0].low; d < r[0].high; ++d) {
      Phase in_d = phase(0, {d, d + 1}, 0, source[0].low);
      in_d.reach = region_at(in_d.reach, in_d.source + source[0].low, 1, 0, p.axis[0].output, 1).reach;
      const bool new_taps = !same(s.depth, in_d.reach), new_places = transposes && s.depth.count < 0;
      s.depth = in_d.reach;
      Tap *of_rows = s.output_taps, *taps = of_rows;
      int64_t* places = s.result_places;
      for (int64_t i = 0; i < phases[0]; ++i) {
        const Phase in_h = phase(1, r[1], i, source[1].low);
        const int64_t plane = round_up((in_h.count - 1) * tile.extent[2] + ceil_div(r[2].size(), phases[1]), N);
        for (int64_t n = 0; n < b.images; ++n) {
          taps = of_rows;  // of each phase of the width, listed with the first image
          for (int64_t j = 0; j < phases[1]; ++j) {
            const Phase in_w = phase(2, r[2], j, source[2].low);
            const TapRange reach[3] = {in_d.reach, in_h.reach, in_w.reach};
            const int64_t count = p.out_per_group * reach[0].count * reach[1].count * reach[2].count;
            int64_t* const place = places + j * plane;
            if (n == 0 && new_taps) operands.list_output_taps(taps, tile, reach);
            if (n == 0 && new_places)
              Pack::list_results(place, x, in_h.count, p.axis[1].stride, in_w.count, phases[1], tile.extent[2]);
            const int64_t first = (in_d.source * tile.extent[1] + in_h.source) * tile.extent[2] + in_w.source;
            const int64_t vectors = ceil_div((in_h.count - 1) * tile.extent[2] + in_w.count, N);
            T* const result = s.result + j * b.groups.size() * p.in_per_group * plane;
            const T* const from = s.grad_output + n * tile.image() + first;
            correlate_groups(b, {result, plane, from, nullptr, p.weight_element(0, 0, 1, 0), nullptr, taps, count},
                             p.out_per_group * tile.channel(), p.in_per_group, vectors);
            if (transposes)
              Pack::unpack_pixels(static_cast<S*>(t.grad_input), result, plane, x, b.groups.low * p.in_per_group,
                                  b.groups.size() * p.in_per_group, b.image + n,
                                  (d * x.size[1] + in_h.first) * x.size[2] + in_w.first, place, vectors * N,
                                  b.ahead(b.groups.size() * p.in_per_group));
            taps += count;
          }
          if (!transposes) store_phases(s, b, n, d, in_h, r, phases[1], tile.extent[2], plane);
        }
        of_rows = taps, places += phases[1] * plane;
      }
    }
    for (int64_t n = 0; n < b.images && p.folds(); ++n) store_folded(s, b, n, r);
  }

  // Rows of a contiguous input, or of one to be folded in scratch memory, put together from the phases of its width.
  void store_phases(const Scratch& s, const GroupedBlock& b, int64_t n, int64_t d, const Phase& h, const Range r[3],
                    int64_t phases, int64_t pitch, int64_t plane) const {
    const Tensor x = p.input_tensor();
    const Range w = r[2];
    const int64_t first = b.groups.low * p.in_per_group, channels = b.groups.size() * p.in_per_group;
    T* const folded = s.folded + n * channels * p.folded_pixels();
    S* const results = static_cast<S*>(t.grad_input) + ((b.image + n) * x.width + first) * x.pixels();
    for (int64_t i = 0; i < h.count; ++i) {
      const int64_t row = h.first + i * p.axis[1].stride, pixel = (d * x.size[1] + row) * x.size[2] + w.low;
      const int64_t at = ((d - r[0].low) * r[1].size() + row - r[1].low) * w.size();
      for (int64_t c = 0; c < channels; ++c) {
        const T* from = s.result + i * pitch + c * plane;
        if (p.folds())
          join_phases(folded + c * p.folded_pixels() + at, from, channels * plane, phases, w.size());
        else
          join_phases(results + c * x.pixels() + pixel, from, channels * plane, phases, w.size());
      }
    }
  }

  // The gradient of an image, [channel][position], with its padding mode.
  void store_folded(const Scratch& s, const GroupedBlock& b, int64_t n, const Range r[3]) const {
    const Tensor x = p.input_tensor();
    const int64_t first = b.groups.low * p.in_per_group, channels = b.groups.size() * p.in_per_group;
    const int64_t pixels = p.folded_pixels();
    T* const folded = s.folded + n * channels * pixels;
    for (int64_t c = 0; c < channels; ++c) fold(folded + c * pixels, 1, x, r);
    S* const results = static_cast<S*>(t.grad_input);
    if (!p.transposes(x))
      return Pack::unpack_row(results, folded, pixels, x, first, channels, b.image + n, 0, x.pixels());
    Pack::list_results(s.result_places, x, 1, 0, x.pixels(), 1, x.pixels());
    Pack::unpack_pixels(results, folded, pixels, x, first, channels, b.image + n, 0, s.result_places, x.pixels(), 0);
  }

  template <class To>
  static void join_phases(To* to, const T* from, int64_t step, int64_t phases, int64_t count) {
    if (phases == 1) return Pack::template copy_row<kTo>(to, from, count);
    if (phases == 2) return Pack::join_two(to, from, from + step, count);
    for (int64_t phase = 0; phase < phases; ++phase, from += step)
      for (int64_t i = 0; phase + i * phases < count; ++i) store_one<T>(to + phase + i * phases, from[i]);
  }
};

}  // namespace
