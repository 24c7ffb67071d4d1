// The tiles of a grouped convolution: weights and the list of kernel elements; planes of forward and grad_input, each a
// run of `correlate_planes`; the sums of grad_weight and grad_bias.
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
struct GroupedTiles {
  using Scratch = GroupedScratch<T>;
  using Pack = Planes<S, T, N>;

  const GroupedPlan& p;
  const convgrad_tensors& t;
  const GroupedWeights<T> weights;

  // ---- weights and kernel elements ----

  // Converts a block's weights to `to`, if it is given, and sets what its sums start from.
  void pack_weight(T* to, int64_t block) const {
    const Range groups = p.block(block);
    const int64_t first = groups.low * p.group_weights(), count = groups.size() * p.group_weights();
    if (to) Pack::template copy_row<kNeither>(to + first, static_cast<const S*>(t.weight) + first, count);
    const S* const bias = static_cast<const S*>(t.bias);
    const int64_t channels = p.wants(CONVGRAD_FORWARD) ? p.out_per_group : p.in_per_group;
    for (int64_t c = groups.low * channels; c < groups.high * channels; ++c)
      weights.start[c] = bias ? load_one<T>(bias + c) : T(0);
    weights.infinite[block] = !all_finite<T, N>(weights.weight + first, count);
  }

  // Lists the taps of some slices of the kernel for all inputs of a group, in the order of their weights.
  int64_t list_input_taps(Scratch& s, const PlaneTile& tile, Range slices) const {
    const int64_t plane = tile.plane(), rows = p.axis[1].kernel, columns = p.axis[2].kernel;
    // The offset of a kernel element in one dimension: its phase and its position there. Divides only with a stride.
    auto source = [&](int d, int64_t k, int64_t phase_step, int64_t position_step) {
      const Axis& a = p.axis[d];
      if (a.stride == 1) return k * a.dilation * position_step;
      return k % tile.phases[d] * phase_step * plane + k * a.dilation / a.stride * position_step;
    };
    const int64_t each = slices.size() * rows * columns;
    if (same(s.slices, slices)) return each * p.in_per_group;
    s.slices = slices;
    // Steps from a tap to the next channel's, and to the next kernel element's.
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

  // Lists the taps that reach one phase of the input, for all outputs of a group.
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

  // Computes a run for each group of a block; `source_group`: elements from group to group of the source.
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
      const int64_t count = list_input_taps(s, tile, {r.first, r.first + r.count});
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

  // The positions of a range with the same remainder by the stride, in one dimension.
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
            if (n == 0 && new_taps) list_output_taps(taps, tile, reach);
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
    for (int64_t c = 0; c < channels; ++c) fold<T, N>(folded + c * pixels, 1, x, r);
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

  // ---- grad_weight and grad_bias ----

  void sum_tile(Scratch& s, T* sums, const GroupedBlock& b, const Range o[3], const Range source[3],
                const PlaneTile& input, const PlaneTile& grad) const {
    const int64_t count = list_input_taps(s, input, {0, p.axis[0].kernel});
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
