// Grouped convolution with few channels a group: the same passes, layouts and dtypes as depthwise.h.
//
// The idea: a vector holds neighbouring pixels of one channel. A unit of work packs the tile that it needs into planes
// [channel][pixel] (grouped_packing.h): a copy with the padding written out, or in channels_last a transposition. With
// a stride, positions are sorted into phases. Then every kernel element is one offset for all results, and a result
// plane is one long run of `correlate_planes` over its rows (grouped_kernels.h); what it computes between two rows is
// dropped. Where an infinity met the padding's zeros, results are computed once more without them (grouped_exact.h).
//   forward:     a run for each slice of the output
//   grad_input:  the same over grad_output, for each remainder of the position by the stride
//   grad_weight: `accumulate_planes` over the rows of grad_output
//
// What limits it (one thread of a Zen 3, AVX2, 3x3 kernels): on images of 28x28 and 56x56 the two loops run at 87 to 89
// of the 92 GFLOP/s that a matrix product reaches there, and packing and unpacking take as long as they. All in all,
// contiguous tensors of 4, 8 and 16 channels a group reach 45 to 77 % of the roofline with stride 1 and 26 to 39 % with
// stride 2; those of 2 channels 14 to 33 %, because they have half the arithmetic for the same packing. The
// transpositions of channels_last leave 18 to 66 %, and 13 to 24 % with 2 channels.
#pragma once

#include <type_traits>

#include "grouped_bias.h"
#include "grouped_exact.h"
#include "grouped_kernels.h"
#include "grouped_packing.h"
#include "grouped_plan.h"
#include "parallel.h"

namespace {

// S: storage, T: arithmetic, N: lanes of a vector.
template <class S, class T, int N>
struct Grouped {
  static constexpr int64_t kAlign = 64;

  const GroupedPlan& p;
  const convgrad_tensors& t;

  // Scratch memory of one thread.
  struct Scratch {
    T *input, *grad_output, *forward_weight, *backward_weight, *start, *sums, *result, *row;
    Tap* taps;
    int64_t packed_block;  // whose weights these are
    bool infinite_weight;  // or NaN
  };
  // A block of groups, and the images of a unit.
  struct Block {
    Range groups;
    int64_t image, images;
  };

  // ---- operands ----

  PlaneTile input_tile(const Block& b) const {
    PlaneTile tile = {b.groups.size() * p.in_per_group, b.images, {}, {}, {}, {}, p.slack};
    for (int d = 0; d < 3; ++d) {
      tile.phases[d] = p.phases[d], tile.extent[d] = p.plane[d];
      tile.stride[d] = p.axis[d].stride, tile.dilation[d] = p.axis[d].dilation;
    }
    return tile;
  }
  PlaneTile output_tile(const Block& b) const {
    const int64_t* e = p.output_extent;
    return {b.groups.size() * p.out_per_group, b.images, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {e[0], e[1], e[2]}, p.slack};
  }

  // For forward [input][kernel element][output], for grad_input [output][kernel element][input], of each group; and
  // what sums start from.
  void pack_weight(Scratch& s, const Block& b) const {
    if (s.packed_block == b.groups.low) return;
    s.packed_block = b.groups.low;
    const S *from = static_cast<const S*>(t.weight), *bias = static_cast<const S*>(t.bias);
    const int64_t ni = p.in_per_group, no = p.out_per_group, nk = p.kernel_elements;
    for (int64_t g = b.groups.low; g < b.groups.high; ++g) {
      const int64_t at = (g - b.groups.low) * p.group_weights();
      for (int64_t o = 0; o < no; ++o)
        for (int64_t i = 0; i < ni; ++i)
          for (int64_t k = 0; k < nk; ++k) {
            const T w = load_one<T>(from + p.weight_element(g, o, i, k));
            if (s.forward_weight) s.forward_weight[at + (i * nk + k) * no + o] = w;
            if (s.backward_weight) s.backward_weight[at + (o * nk + k) * ni + i] = w;
          }
    }
    const int64_t channels = p.wants(CONVGRAD_FORWARD) ? no : ni;
    for (int64_t c = b.groups.low * channels; c < b.groups.high * channels; ++c)
      s.start[c - b.groups.low * channels] = bias ? load_one<T>(bias + c) : T(0);
    s.infinite_weight = !all_finite<T, N>(s.forward_weight ? s.forward_weight : s.backward_weight,
                                          b.groups.size() * p.group_weights());
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
  int64_t list_output_taps(Tap* taps, const PlaneTile& tile, const Reach r[3]) const {
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

  // ---- forward ----

  void forward_tile(const Scratch& s, const Block& b, const Range o[3], const PlaneTile& tile) const {
    const Tensor x = p.output_tensor();
    const int64_t pitch = tile.extent[2], channels = b.groups.size() * p.out_per_group;
    const int64_t vectors = ceil_div((o[1].size() - 1) * pitch + o[2].size(), N);
    const int64_t count = list_input_taps(s.taps, tile);
    for (int64_t n = 0; n < b.images; ++n)
      for (int64_t d = o[0].low; d < o[0].high; ++d) {
        for (int64_t g = 0; g < b.groups.size(); ++g) {
          const T* from = s.input + g * p.in_per_group * tile.channel() + n * tile.image() +
                          (d - o[0].low) * tile.extent[1] * pitch;
          correlate_channels<T, N>({s.result + g * p.out_per_group * vectors * N, vectors * N, from,
                                    s.forward_weight + g * p.group_weights(), s.start + g * p.out_per_group, s.taps,
                                    count}, p.out_per_group, vectors);
        }
        for (int64_t h = o[1].low; h < o[1].high; ++h)
          Planes<S, T, N>::unpack_row(static_cast<S*>(t.forward), s.result + (h - o[1].low) * pitch, vectors * N, x,
                                      b.groups.low * p.out_per_group, channels, b.image + n,
                                      (d * x.size[1] + h) * x.size[2] + o[2].low, o[2].size(), p.channels_last);
      }
  }

  // ---- grad_input ----

  // Positions of a range that leave the same remainder by the stride, in one dimension.
  struct Phase {
    int64_t first, count;  // first position; they are `stride` apart
    int64_t source;        // what position 0 of the reach is, in the packed grad_output
    Reach reach;
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
    for (int64_t n = 0; n < b.images; ++n)
      for (int64_t d = r[0].low; d < r[0].high; ++d)
        for (int64_t i = 0; i < phases[0]; ++i) {
          const Phase in_d = phase(0, {d, d + 1}, 0, source[0].low), in_h = phase(1, r[1], i, source[1].low);
          const int64_t plane = round_up((in_h.count - 1) * tile.extent[2] + ceil_div(r[2].size(), phases[1]), N);
          for (int64_t j = 0; j < phases[1]; ++j)
            grad_input_phase(s, b, n, in_d, in_h, phase(2, r[2], j, source[2].low), tile, plane,
                             s.result + j * b.groups.size() * p.in_per_group * plane);
          store_phases(s, b, n, d, in_h, r[2], phases[1], tile.extent[2], plane);
        }
  }

  void grad_input_phase(const Scratch& s, const Block& b, int64_t n, const Phase& d, const Phase& h, const Phase& w,
                        const PlaneTile& tile, int64_t plane, T* result) const {
    const Reach reach[3] = {d.reach, h.reach, w.reach};
    const int64_t count = list_output_taps(s.taps, tile, reach);
    const int64_t vectors = ceil_div((h.count - 1) * tile.extent[2] + w.count, N);
    for (int64_t g = 0; g < b.groups.size(); ++g) {
      const T* from = s.grad_output + g * p.out_per_group * tile.channel() + n * tile.image() +
                      (d.source * tile.extent[1] + h.source) * tile.extent[2] + w.source;
      correlate_channels<T, N>({result + g * p.in_per_group * plane, plane, from,
                                s.backward_weight + g * p.group_weights(), s.start + g * p.in_per_group, s.taps, count},
                               p.in_per_group, vectors);
    }
  }

  // Rows of the input, put together from the phases of its width.
  void store_phases(const Scratch& s, const Block& b, int64_t n, int64_t d, const Phase& h, Range w, int64_t phases,
                    int64_t pitch, int64_t plane) const {
    const Tensor x = p.input_tensor();
    S* const results = static_cast<S*>(t.grad_input);
    const int64_t channels = b.groups.size() * p.in_per_group;
    for (int64_t i = 0; i < h.count; ++i) {
      const T* from = s.result + i * pitch;
      int64_t row = plane;
      if (phases > 1) {
        row = w.size();
        for (int64_t c = 0; c < channels; ++c) {
          const T* part = from + c * plane;
          T* to = s.row + c * row;
          if (phases == 2) {
            Planes<S, T, N>::join_two(to, part, part + channels * plane, row / 2);
            if (row % 2) to[row - 1] = part[row / 2];
            continue;
          }
          for (int64_t phase = 0; phase < phases; ++phase, part += channels * plane)
            for (int64_t k = 0; phase + k * phases < row; ++k) to[phase + k * phases] = part[k];
        }
        from = s.row;
      }
      const int64_t position = h.first + i * p.axis[1].stride;
      Planes<S, T, N>::unpack_row(results, from, row, x, b.groups.low * p.in_per_group, channels, b.image + n,
                                  (d * x.size[1] + position) * x.size[2] + w.low, w.size(), p.channels_last);
    }
  }

  // ---- grad_weight ----

  void accumulate_tile(const Scratch& s, const Block& b, const Range o[3], const Range source[3],
                       const PlaneTile& input, const PlaneTile& grad) const {
    const int64_t count = list_input_taps(s.taps, input);
    PlaneRows<T> rows;
    rows.images = b.images, rows.depth = o[0].size(), rows.rows = o[1].size(), rows.pixels = o[2].size();
    rows.grad_channel = grad.channel(), rows.grad_image = grad.image();
    rows.grad_row = grad.extent[2], rows.grad_slice = grad.extent[1] * grad.extent[2];
    rows.input_image = input.image(), rows.input_row = input.extent[2];
    rows.input_slice = input.extent[1] * input.extent[2];
    const int64_t first = ((o[0].low - source[0].low) * grad.extent[1] + o[1].low - source[1].low) * grad.extent[2] +
                          o[2].low - source[2].low;
    for (int64_t g = 0; g < b.groups.size(); ++g) {
      T* sums = s.sums + g * p.group_sums() * N;
      rows.input = s.input + g * p.in_per_group * input.channel();
      rows.grad = s.grad_output + g * p.out_per_group * grad.channel() + first;
      accumulate_channels<T, N>(sums, p.out_per_group, s.taps, count, rows);
      for (int64_t c = 0; c < p.out_per_group && p.wants(CONVGRAD_GRAD_BIAS); ++c, rows.grad += rows.grad_channel)
        sum_plane<T, N>(sums + (p.group_weights() + c) * N, rows);
    }
  }

  // ---- units, items, threads ----

  void run_unit(Scratch& s, Block b, int64_t unit) const {
    const GroupedPlan::Place place = p.place(unit);
    b.image = place.images.low, b.images = place.images.size();
    Range output[3], input_result[3], input[3], grad_output[3], summed[3];
    for (int d = 0; d < 3; ++d) {
      const Span& span = place.span[d];
      output[d] = span.output, input_result[d] = span.grad_input;
      input[d] = span.input, grad_output[d] = span.grad_output, summed[d] = span.summed;
    }
    const bool empty = output[0].size() == 0 || output[1].size() == 0 || output[2].size() == 0;
    const PlaneTile x = input_tile(b), g = output_tile(b);
    if (p.needs_weight()) pack_weight(s, b);
    if (p.needs_input() && !empty)
      Planes<S, T, N>::pack(s.input, x, static_cast<const S*>(t.input), p.input_tensor(), b.groups.low * p.in_per_group,
                            b.image, input, p.channels_last, s.row);
    if (p.needs_grad_output())
      Planes<S, T, N>::pack(s.grad_output, g, static_cast<const S*>(t.grad_output), p.output_tensor(),
                            b.groups.low * p.out_per_group, b.image, grad_output, p.channels_last, s.row);
    if (p.wants(CONVGRAD_FORWARD) && !empty) forward_tile(s, b, output, x);
    if (p.wants(CONVGRAD_GRAD_WEIGHT) && !empty) accumulate_tile(s, b, output, grad_output, x, g);
    if (p.sums_input) sum_input<S, T, N>(s.sums, p, static_cast<const S*>(t.input), b.groups, place.images, summed);
    if (p.wants(CONVGRAD_GRAD_INPUT)) grad_input_tile(s, b, input_result, grad_output, g);
    if (!p.needs_weight() || !s.infinite_weight) return;
    const GroupedExact<S, T> exact = {p, t};
    if (p.wants(CONVGRAD_FORWARD)) exact.correct(false, b.groups, place.images, output);
    if (p.wants(CONVGRAD_GRAD_INPUT)) exact.correct(true, b.groups, place.images, input_result);
  }

  int64_t partial_size() const { return p.block_groups * p.group_sums(); }

  // A block of groups and a share of its units; `partial` receives the item's sums.
  void run_item(Scratch& s, int64_t item, T* partial) const {
    const int64_t segment = item % p.segments, sums = partial_size();
    const Block b = {p.block(item / p.segments), 0, 0};
    if (p.wants(CONVGRAD_GRAD_WEIGHT)) memset(s.sums, 0, sizeof(T) * static_cast<size_t>(sums * N));
    const Range units = {p.units() * segment / p.segments, p.units() * (segment + 1) / p.segments};
    for (int64_t unit = units.low; unit < units.high; ++unit) run_unit(s, b, unit);
    if (!p.wants(CONVGRAD_GRAD_WEIGHT)) return;
    partial += item * sums;
    for (int64_t i = 0; i < sums; ++i) {
      T total = 0;
      for (int l = 0; l < N; ++l) total += s.sums[i * N + l];
      partial[i] = total;
    }
    if (!all_finite<T, N>(partial, sums)) GroupedExact<S, T>{p, t}.correct_sums(partial, b.groups, units);
  }

  // Add a block's partial sums, always in the same order, and write them in the weight's layout.
  void reduce(int64_t block, const T* partial) const {
    S *weight = static_cast<S*>(t.grad_weight), *bias = static_cast<S*>(t.grad_bias);
    const Range groups = p.block(block);
    const int64_t item = partial_size(), group = p.group_sums();
    partial += block * p.segments * item;
    auto sum = [&](int64_t g, int64_t element) {
      T total = 0;
      for (int64_t segment = 0; segment < p.segments; ++segment)
        total += partial[segment * item + (g - groups.low) * group + element];
      return total;
    };
    const int64_t biases = bias ? p.group_biases() : 0;
    for (int64_t g = groups.low; g < groups.high; ++g) {
      for (int64_t o = 0; o < p.out_per_group; ++o)
        for (int64_t i = 0; i < p.in_per_group; ++i)
          for (int64_t k = 0; k < p.kernel_elements; ++k)
            store_one<T>(weight + p.weight_element(g, o, i, k),
                         sum(g, (o * p.in_per_group + i) * p.kernel_elements + k));
      for (int64_t c = 0; c < biases; ++c)
        store_one<T>(bias + g * biases + c, sum(g, p.group_weights() + c));
    }
  }

  // ---- memory ----

  struct Sizes {
    int64_t input, grad_output, forward_weight, backward_weight, start, sums, result, row, taps, thread, partial, total;
  };
  static Sizes sizes(const GroupedPlan& p) {
    auto bytes = [](int64_t elements) { return round_up(elements * static_cast<int64_t>(sizeof(T)), kAlign); };
    // Rows are read and written up to a vector beyond their end.
    auto packed = [&](bool needed, int64_t elements) { return needed ? bytes(elements + N) : 0; };
    const Axis &h = p.axis[1], &w = p.axis[2];
    const int64_t inputs = p.block_groups * p.in_per_group, outputs = p.block_groups * p.out_per_group;
    const int64_t weights = p.block_groups * p.group_weights();
    const bool forward = p.wants(CONVGRAD_FORWARD), backward = p.wants(CONVGRAD_GRAD_INPUT);
    const bool sums = p.wants(CONVGRAD_GRAD_WEIGHT);
    const int64_t forward_result = outputs * round_up(p.plane[1] * p.plane[2], N);
    const int64_t phase_rows = ceil_div(ceil_div(h.input, p.bands[1]), h.stride) + 1;
    const int64_t phase_width = ceil_div(ceil_div(w.input, p.bands[2]), w.stride) + 1;
    const int64_t backward_result = inputs * least(w.stride, w.input) *
                                    round_up(phase_rows * p.output_extent[2] + phase_width, N);
    Sizes z;
    z.input = packed(p.needs_input(), inputs * p.input_channel());
    z.grad_output = packed(p.needs_grad_output(), outputs * p.output_channel());
    z.forward_weight = forward ? bytes(weights) : 0;
    z.backward_weight = backward ? bytes(weights) : 0;
    z.start = p.needs_weight() ? bytes(most(inputs, outputs)) : 0;
    z.sums = sums ? bytes(p.block_groups * p.group_sums() * N) : 0;
    z.result = packed(p.needs_weight(), most(forward ? forward_result : 0, backward ? backward_result : 0));
    z.row = packed(true, most(inputs, outputs) * (most(w.input, w.output) + N));
    const int64_t taps = most(p.in_per_group, p.out_per_group) * p.kernel_elements;
    z.taps = round_up(taps * static_cast<int64_t>(sizeof(Tap)), kAlign);
    z.thread = z.input + z.grad_output + z.forward_weight + z.backward_weight + z.start + z.sums + z.result + z.row;
    z.thread += z.taps;
    z.partial = sums ? bytes(p.lane_blocks * p.segments * p.block_groups * p.group_sums()) : 0;
    z.total = z.thread * p.threads + z.partial + kAlign;
    return z;
  }
  static Scratch scratch(char* at, const Sizes& z) {
    auto take = [&](int64_t size) {
      T* taken = size ? reinterpret_cast<T*>(at) : nullptr;
      at += size;
      return taken;
    };
    Scratch s = {};
    s.input = take(z.input), s.grad_output = take(z.grad_output);
    s.forward_weight = take(z.forward_weight), s.backward_weight = take(z.backward_weight), s.start = take(z.start);
    s.sums = take(z.sums), s.result = take(z.result), s.row = take(z.row);
    s.taps = reinterpret_cast<Tap*>(take(z.taps));
    s.packed_block = -1;
    return s;
  }

  static int64_t workspace(const convgrad_problem& q) { return sizes(make_grouped_plan(q, N, sizeof(T))).total; }

  static int32_t run(const convgrad_problem& q, const convgrad_tensors& t, char* memory, int64_t bytes) {
    const GroupedPlan p = make_grouped_plan(q, N, sizeof(T));
    const Sizes z = sizes(p);
    if (bytes < z.total) return 1;
    memory += (kAlign - reinterpret_cast<uintptr_t>(memory) % kAlign) % kAlign;
    Grouped{p, t}.compute(memory, z);
    return 0;
  }

  void compute(char* memory, const Sizes& z) const {
    T* partial = reinterpret_cast<T*>(memory + z.thread * p.threads);
    const int64_t items = p.lane_blocks * p.segments;
    const int threads = static_cast<int>(most(1, least(p.threads, items)));  // an empty batch has no items
    const bool sums = p.wants(CONVGRAD_GRAD_WEIGHT);
    if (threads == 1) {  // no parallel region: also safe in a forked child
      Scratch s = scratch(memory, z);
      for (int64_t item = 0; item < items; ++item) run_item(s, item, partial);
      for (int64_t block = 0; sums && block < p.lane_blocks; ++block) reduce(block, partial);
      return;
    }
    Queue queue(items);
    on_threads(threads, [&](const Member& me) {
      Scratch s = scratch(memory + z.thread * me.number, z);
      for (int64_t item; queue.take(&item);) run_item(s, item, partial);
      if (!sums) return;
      me.wait_for_all();
      const Range blocks = me.share_of(p.lane_blocks);
      for (int64_t block = blocks.low; block < blocks.high; ++block) reduce(block, partial);
    });
  }
};

}  // namespace
