// Cuts a convolution with many channels up for AMX: what its kernel elements read, boxes of positions, memory.
// Integers only.
#pragma once

#include "../vectors/products.h"
#include "tiles.h"

namespace {

constexpr int64_t kBoxBytes = 3 << 19;       // bytes of a packed box, for the second-level cache
constexpr int64_t kMostSumsBytes = 8 << 20;  // bytes of all threads' own sums for grad_weight
constexpr int64_t kPositionsAhead = 32;      // positions from the one that is packed to the one that is prefetched
constexpr int64_t kMostElements = 1 << 24;   // elements of a packed weight, beyond which AMX is not used
constexpr int64_t kMostBytes = 1 << 26;      // bytes of a packed box, likewise

// One spatial dimension: which positions of the results there are, and what they read of the source.
struct Reach {
  Axis axis;
  bool backward;
  int64_t low, high, slots;  // shifts are from low to high

  struct Tap {
    int64_t element, slot, shift;  // position q of the results reads position q + shift of the slot
  };
  int64_t classes() const { return backward ? axis.stride : 1; }
  int64_t results() const { return backward ? axis.input : axis.output; }
  int64_t sources() const { return backward ? axis.output : axis.input; }
  // The positions of class `c` are every stride-th one of the results, from `c` on.
  int64_t positions(int64_t c) const { return backward ? ceil_div(axis.input - c, axis.stride) : axis.output; }
  int64_t result(int64_t c, int64_t q) const { return backward ? c + q * axis.stride : q; }
  int64_t taps(int64_t c) const { return backward ? axis.backward_reach(axis.remainder(c)).count : axis.kernel; }
  Tap tap(int64_t c, int64_t i) const {
    if (!backward) return {i, each_has_its_own() ? i : remainder(i), quotient(i)};
    const TapRange r = axis.backward_reach(axis.remainder(c));
    return {r.first + i * r.step, 0, axis.quotient(c) + r.offset + i * r.offset_step};
  }
  // Returns where position q of a slot is in the source.
  int64_t source(int64_t slot, int64_t q) const {
    return backward ? q : q * axis.stride + (each_has_its_own() ? remainder(slot) : slot);
  }
  // Forward: kernel element i of position 0 of the results reads position quotient * stride + remainder. The slots are
  // the remainders, or those of the elements where these are fewer.
  bool each_has_its_own() const { return axis.kernel < axis.stride; }
  int64_t quotient(int64_t i) const { return floor_div(i * axis.dilation - axis.padding, axis.stride); }
  int64_t remainder(int64_t i) const { return i * axis.dilation - axis.padding - quotient(i) * axis.stride; }

  void find_reach() {
    const int64_t reach = (axis.kernel - 1) * axis.dilation;
    low = backward ? -floor_div(reach - axis.padding, axis.stride) : quotient(0);
    high = backward ? -floor_div(-axis.padding, axis.stride) : quotient(axis.kernel - 1);
    slots = backward ? 1 : least(axis.kernel, axis.stride);
  }
};

struct AmxDensePlan : ProductPlan {
  bool packs_in_items;  // each thread packs the weights that an item needs, in the item
  Reach reach[3];
  int64_t box[4], boxes[4];  // images and positions of a box; number of boxes
  int64_t taps, slots, steps;
  int64_t parts, segments;  // pieces of the results' channels (grad_weight: of the input's) and of the boxes
  Array<float> start, partial;  // shared
  Array<uint16_t> weight;       // shared, or each thread's where it packs in its items
  Array<float> transposed;      // each thread's, as are the following
  Array<uint16_t> source, outer;
  Array<int64_t> places, targets, starts, steps_at;

  int64_t extent(int d) const { return box[d + 1] + reach[d].high - reach[d].low; }
  int64_t box_positions() const { return box[0] * extent(0) * extent(1) * extent(2); }
  int64_t pitch() const { return round_up(box_positions(), 2); }  // positions from slot to slot
  // Positions of all slots, and a step behind them that is read. An odd number of lines.
  int64_t packed() const { return (ceil_div(slots * pitch() + kStep + kEdge, kStep) | 1) * kStep; }
  int64_t target_places() const { return pitch() + kStep + kEdge; }
  int64_t source_panels() const { return ceil_div(sources, kEdge); }
  int64_t result_panels() const { return ceil_div(results, kEdge); }
  int64_t parities() const { return taps > 1 ? 2 : 1; }
  int64_t outer_elements() const { return ceil_div(box_positions(), kStep) * result_panels() * kParts; }
  int64_t channels_elements() const { return parities() * packed() * kEdge * 3; }  // of a packed panel of input
  int64_t group_sums() const { return taps * source_panels() * result_panels() * kEdge * kEdge; }
  int64_t all_boxes() const { return boxes[0] * boxes[1] * boxes[2] * boxes[3]; }
  int64_t source_pixels() const { return reach[0].sources() * reach[1].sources() * reach[2].sources(); }
  int64_t result_pixels() const { return reach[0].results() * reach[1].results() * reach[2].results(); }
  // Returns whether the memory that it needs is in proportion to the problem.
  bool fits(const convgrad_problem& q) const {
    const int64_t elements = groups * taps * result_panels() * kEdge * most(steps * kStep, source_panels() * kEdge);
    return q.padding_mode == CONVGRAD_ZEROS && elements <= kMostElements && work_bytes() <= kMostBytes;
  }
  // Returns the bytes of a thread's scratch memory for a box.
  int64_t work_bytes() const {
    const int64_t source = sums ? 2 * channels_elements() : packed() * steps * kStep * 3;
    return 2 * (source + (sums ? outer_elements() : 0));
  }
};

// Images and positions.
struct Box {
  Range range[4];
};

inline AmxDensePlan make_amx_dense_plan(const convgrad_problem& q) {
  AmxDensePlan p = {};
  p.set(q);
  p.steps = ceil_div(p.sources, kStep);
  p.taps = p.slots = 1, p.box[0] = q.batch;
  for (int d = 0; d < 3; ++d) {
    const Axis axis = {q.input[d], q.kernel[d], q.stride[d], q.padding[d], q.dilation[d], q.output[d]};
    p.reach[d] = {axis, p.backward, 0, 0, 0};
    p.reach[d].find_reach();
    p.taps *= q.kernel[d], p.slots *= p.reach[d].slots, p.box[d + 1] = p.reach[d].positions(0);
  }
  int64_t size[4];
  for (int d = 0; d < 4; ++d) size[d] = p.box[d];
  // If one box holds all positions, the threads share out the channels of the results instead.
  const bool one_class = p.reach[0].classes() * p.reach[1].classes() * p.reach[2].classes() == 1;
  const bool enough = p.groups * p.result_panels() >= 2 * q.threads;
  p.packs_in_items = !p.sums && one_class && enough && p.work_bytes() <= kBoxBytes;
  // Otherwise boxes are halved until they fit into the cache and each thread has one.
  auto too_large = [&] {
    for (int d = 0; d < 4; ++d) p.boxes[d] = ceil_div(size[d], p.box[d]);
    return p.work_bytes() > kBoxBytes || (!p.packs_in_items && p.groups * p.all_boxes() < q.threads);
  };
  for (int d = 0; d < 4; ++d)
    while (too_large() && p.box[d] > 1) p.box[d] = ceil_div(p.box[d], 2);
  int outermost = 0;  // dimension along which all threads get the same number of boxes
  while (outermost < 3 && size[outermost] == 1) ++outermost;
  for (int d = 0; d < 4; ++d) {
    p.boxes[d] = ceil_div(size[d], p.box[d]);
    if (d == outermost && !p.packs_in_items) p.boxes[d] = least(size[d], round_up(p.boxes[d], q.threads));
    p.box[d] = ceil_div(size[d], p.boxes[d]);
  }

  p.segments = p.all_boxes(), p.parts = 1;
  if (p.sums) {
    const int64_t sums = p.groups * p.group_sums();
    p.segments = most(1, least(least(q.threads, p.segments), kMostSumsBytes / most(1, sums * int64_t(sizeof(float)))));
    p.parts = least(ceil_div(q.threads, p.segments * p.groups), ceil_div(p.source_panels(), 2));
    p.partial = p.memory.shared.add<float>(p.segments * sums);
    p.outer = p.memory.each.add<uint16_t>(p.outer_elements());
    p.source = p.memory.each.add<uint16_t>(2 * p.channels_elements());
  } else {
    const int64_t panels = p.groups * p.result_panels();
    p.parts = least(ceil_div(q.threads, p.segments * p.groups), ceil_div(p.result_panels(), 2));
    p.start = p.memory.shared.add<float>(panels * kEdge);
    const int64_t packed = (p.packs_in_items ? 2 : panels) * p.taps * p.steps * kParts;
    p.weight = (p.packs_in_items ? p.memory.each : p.memory.shared).add<uint16_t>(packed);
    if (!p.channels_last && p.taps > 1) p.transposed = p.memory.each.add<float>(kEdge * p.taps * p.sources);
    p.source = p.memory.each.add<uint16_t>(p.steps * 3 * p.packed() * kStep);
  }
  p.places = p.memory.each.add<int64_t>(p.packed() + 2 * kPositionsAhead);
  p.targets = p.memory.each.add<int64_t>(p.target_places() + 2 * kPositionsAhead);
  p.starts = p.memory.each.add<int64_t>(p.pitch());
  p.steps_at = p.memory.each.add<int64_t>(most(p.taps * p.steps, p.pitch()));
  return p;
}

}  // namespace
