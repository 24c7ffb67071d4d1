// Grouped convolution with few channels a group: the same passes, layouts and dtypes as depthwise/packed.h, and its
// problems where so few channels would leave most lanes idle.
//
// The idea: a vector holds neighboring pixels of one channel. A unit of work packs the tile that it needs into planes
// [channel][pixel] (packing.h): a copy with the padding written out, or in channels_last a transposition. With a
// stride, positions are sorted into phases. Then every kernel element is one offset for all results, and a result plane
// is one long run of `correlate_planes` over its rows (kernels.h); what it computes between two rows is dropped. Where
// an infinity met the padding's zeros, results are computed once more without them (exact.h).
//   forward:     a run for each slice of the output
//   grad_input:  the same over grad_output, for each remainder of the position by the stride
//   grad_weight: `accumulate_planes` over the rows of grad_output
//
// Its limits, for 3x3 kernels: the two loops run nearly at a matrix product's speed; packing and unpacking take as
// long as they with 4 channels a group and a third of that with 16. On 14x14 an eighth of the arithmetic lies between
// two rows. With a stride packing limits: it reads four times what it computes with.
//
// To read from the bottom up: plan.h cuts a problem into units, packing.h brings a unit's operands, tiles.h computes a
// tile with them. Here units are shared out among threads and their sums added up.
#pragma once

#include "../vectors/parallel.h"
#include "exact.h"
#include "tiles.h"

namespace {

// S: storage, T: arithmetic, N: lanes of a vector.
template <class S, class T, int N>
struct Grouped {
  using Scratch = GroupedScratch<T>;
  static constexpr bool kConverts = !std::is_same<S, T>::value;

  const GroupedPlan& p;
  const convgrad_tensors& t;
  const GroupedTiles<S, T, N> tiles;

  // ---- units, items, threads ----

  void run_unit(Scratch& s, T* sums, GroupedBlock b, int64_t unit) const {
    const TileRanges r = p.ranges_of(unit % p.tiles);
    b.image = unit / p.tiles * p.images, b.images = least(p.images, p.batch - b.image);
    const bool empty = r.output[0].size() == 0 || r.output[1].size() == 0 || r.output[2].size() == 0;
    const PlaneTile x = p.input_tile(b.groups.size(), b.images), g = p.output_tile(b.groups.size(), b.images);
    const bool again = s.tile == unit % p.tiles && s.images == b.images && s.groups == b.groups.size();
    s.tile = unit % p.tiles, s.images = b.images, s.groups = b.groups.size();
    if (!again) s.slices.high = s.depth.count = -1;
    if (p.needs_input() && !empty)
      Planes<S, T, N>::pack(s.input, s.input_places, x, static_cast<const S*>(t.input), p.batch, p.input_tensor(),
                            b.groups.low * p.in_per_group, b.image, r.input, p.transposes(p.input_tensor()), again,
                            b.ahead(x.channels));
    if (p.needs_grad_output())
      Planes<S, T, N>::pack(s.grad_output, s.grad_places, g, static_cast<const S*>(t.grad_output), p.batch,
                            p.output_tensor(), b.groups.low * p.out_per_group, b.image, r.grad_output,
                            p.transposes(p.output_tensor()), again, b.ahead(g.channels));
    if (p.wants(CONVGRAD_FORWARD) && !empty) tiles.forward_tile(s, b, r.output, x);
    if (p.wants(CONVGRAD_GRAD_WEIGHT) && !empty) tiles.sum_tile(s, sums, b, r.output, r.grad_output, x, g);
    if (p.sums_input) tiles.sum_input(sums, static_cast<const S*>(t.input), b, r.summed);
    if (p.wants(CONVGRAD_GRAD_INPUT)) tiles.grad_input_tile(s, b, r.grad_input, r.grad_output, g);
  }

  // An item's units as they lie in memory: all its blocks of an image, in channels_last of a tile, before the next.
  // For grad_weight `partial` has sums for each segment. Whether these are finite.
  bool run_item(Scratch& s, int64_t item, T* partial) const {
    const Range blocks = share(p.lane_blocks, item % p.chunks, p.chunks);
    const Range units = share(p.units(), item / p.chunks, p.segments);
    const Range groups = {p.block(blocks.low).low, p.block(blocks.high - 1).high};
    const bool wants_sums = p.wants(CONVGRAD_GRAD_WEIGHT);
    if (wants_sums) {
      partial += (item / p.chunks * p.groups + groups.low) * p.group_sums();
      memset(partial, 0, sizeof(T) * static_cast<size_t>(groups.size() * p.group_sums()));
    }
    const int64_t together = p.channels_last ? 1 : p.tiles;  // tiles of one block that follow one another
    for (Range part = units; part.low < units.high; part.low = part.high) {
      part.high = least(units.high, (part.low / together + 1) * together);
      for (int64_t block = blocks.low; block < blocks.high; ++block)
        for (int64_t unit = part.low; unit < part.high; ++unit) {
          const GroupedBlock b = {p.block(block), 0, 0, p.channels_last && block + 1 < blocks.high};
          run_unit(s, wants_sums ? partial + (b.groups.low - groups.low) * p.group_sums() : nullptr, b, unit);
        }
    }
    return !wants_sums || all_finite<T, N>(partial, groups.size() * p.group_sums());
  }

  // Add a block's partial sums, always in the same order.
  void reduce(int64_t block, const T* partial) const {
    S *const weight = static_cast<S*>(t.grad_weight), *const bias = static_cast<S*>(t.grad_bias);
    const int64_t weights = p.group_weights(), biases = bias ? p.group_biases() : 0;
    for (int64_t g = p.block(block).low; g < p.block(block).high; ++g)
      reduce_partials<T, N>(weight + g * weights, weights, bias + g * biases, partial + g * p.group_sums(),
                            p.groups * p.group_sums(), p.segments, {0, weights + biases});
  }

  // ---- a plan with its scratch memory, and a call ----

  struct Plan : GroupedPlan {
    Memory memory;
    Array<T> input, grad_output, result, folded;  // of each thread
    Array<Tap> taps, output_taps;
    Array<int64_t> input_places, grad_places, result_places;
    Array<T> weight, start, partial;
    Array<bool> infinite;
  };

  static Plan make_plan(const convgrad_problem& q) {
    Plan p = {};
    static_cast<GroupedPlan&>(p) = make_grouped_plan(q, N, sizeof(T));
    Layout &each = p.memory.each, &shared = p.memory.shared;
    const Axis &h = p.axis[1], &w = p.axis[2];
    const int64_t inputs = p.block_groups * p.in_per_group, outputs = p.block_groups * p.out_per_group;
    const int64_t widest = most(p.in_per_group, p.out_per_group);
    const bool forward = p.wants(CONVGRAD_FORWARD), backward = p.wants(CONVGRAD_GRAD_INPUT);
    const int64_t forward_result = round_up(p.plane[1] * p.plane[2], N);
    const int64_t height = p.folds() ? h.padded().size() : h.input, width = p.folds() ? w.padded().size() : w.input;
    const int64_t phase_rows = ceil_div(ceil_div(height, p.bands[1]), h.stride) + 1;
    const int64_t phase_width = ceil_div(ceil_div(width, p.bands[2]), w.stride) + 1;
    const int64_t backward_result = least(w.stride, width) *
                                    round_up(phase_rows * p.output_extent[2] + phase_width, N);
    // Rows are read and written up to a vector beyond their end.
    if (p.needs_input()) p.input = each.template add<T>(inputs * p.input_tile(1, p.images).channel() + N);
    if (p.needs_grad_output()) p.grad_output = each.template add<T>(outputs * p.output_tile(1, p.images).channel() + N);
    if (p.folds()) p.folded = each.template add<T>(inputs * p.images * p.folded_pixels() + N);
    if (p.needs_input()) p.taps = each.template add<Tap>(p.in_per_group * p.kernel_elements);
    if (backward) p.output_taps = each.template add<Tap>(p.out_per_group * p.kernel_elements);
    if (p.channels_last) {
      if (p.needs_input()) p.input_places = each.template add<int64_t>(p.input_tile(1, 1).places());
      if (p.needs_grad_output()) p.grad_places = each.template add<int64_t>(p.output_tile(1, 1).places());
    }
    if (p.needs_weight()) {
      const int64_t places = most(forward * forward_result, backward * least(h.stride, height) * backward_result);
      p.result = each.template add<T>(most(forward * outputs * forward_result, backward * inputs * backward_result) +
                                      N);
      if (p.channels_last) p.result_places = each.template add<int64_t>(most(places, p.folded_pixels()) + N);
      if (kConverts) p.weight = shared.template add<T>(p.groups * p.group_weights());
      p.start = shared.template add<T>(p.groups * widest);
      p.infinite = shared.template add<bool>(p.lane_blocks);
    }
    if (p.wants(CONVGRAD_GRAD_WEIGHT)) p.partial = shared.template add<T>(p.segments * p.groups * p.group_sums());
    return p;
  }

  static void run(const Plan& p, const convgrad_tensors& t, char* memory, int threads) {
    GroupedWeights<T> weights = {p.weight.in(memory), p.start.in(memory), p.infinite.in(memory)};
    if constexpr (!kConverts) weights.weight = static_cast<const T*>(t.weight);
    const Grouped call = {p, t, {p, t, weights}};
    std::atomic<bool> infinite_sums{false};
    T* const partial = p.partial.in(memory);
    auto pack = each([&](int64_t i, const Scratch&) { call.tiles.pack_weight(p.weight.in(memory), i); });
    auto scratch = [&](int64_t thread) {
      char* const at = p.memory.of_thread(memory, thread);
      Scratch s = {};
      s.input = p.input.in(at), s.grad_output = p.grad_output.in(at);
      s.result = p.result.in(at), s.folded = p.folded.in(at);
      s.taps = p.taps.in(at), s.output_taps = p.output_taps.in(at), s.result_places = p.result_places.in(at);
      s.input_places = p.input_places.in(at), s.grad_places = p.grad_places.in(at), s.tile = -1;
      return s;
    };
    run_items(
        threads, p.needs_weight() ? p.lane_blocks : 0, pack, p.items(), scratch,
        [&](Scratch& s, int64_t item) {
          if (!call.run_item(s, item, partial)) infinite_sums = true;
        },
        p.wants(CONVGRAD_GRAD_WEIGHT) ? p.lane_blocks : 0, each([&](int64_t i) { call.reduce(i, partial); }));
    const GroupedExact<S, T> exact = {p, t, weights.infinite};
    const auto blocks = static_cast<size_t>(p.lane_blocks);
    if (p.needs_weight() && memchr(weights.infinite, true, blocks)) exact.correct_results(threads);
    if (infinite_sums) exact.correct_sums(threads);
  }
};

}  // namespace
