// Depthwise convolution: forward, grad_input, grad_weight and grad_bias, for any number of spatial dimensions, kernel,
// stride, dilation, padding and channel multiplier, in both layouts and four dtypes.
//
// The idea: a vector holds one pixel of several channels. In channels_last such vectors lie in the tensor, and small
// kernels read them there; 16-bit storage is converted by the load. Else (contiguous tensors, multipliers, large
// kernels, processors without an instruction that converts) each work unit packs the tile of its operands into scratch
// memory [vector][pixel][lane] that stays in the cache, converted and with the columns of padding written out. Either
// way the kernels see a `Source`: pixels at a fixed pitch. Result positions that the same kernel elements reach form a
// region, and a region is one run of `correlate` or `accumulate` (vectors/kernels.h): borders, strides and dilation are
// nothing but regions. What does not change from unit to unit (packed weights, the regions of a tile and their taps,
// the zeros around it) is kept in a thread's scratch memory.
//
// To read from the bottom up: plan.h cuts a problem into units, vectors/packing.h and operands.h bring a unit's
// operands, correlate.h and accumulate.h compute a tile with them. Here units are put in order, shared out among
// threads and their sums added up.
#pragma once

#include "../vectors/parallel.h"
#include "accumulate.h"
#include "correlate.h"

namespace {

// S: storage, T: arithmetic, N: lanes of a vector.
template <class S, class T, int N>
struct Depthwise {
  static constexpr int64_t kLongPlane = 2048;  // bytes, from which on the processor's own prefetching is better
  using Scratch = DepthwiseScratch<T>;

  const DepthwisePlan& p;
  const convgrad_tensors& t;
  const DepthwiseOperands<S, T, N> operands = {p, t};

  // ---- units, items, threads ----

  // A work unit: which lanes of which images, which tile of them.
  struct Unit {
    int64_t block, images, tile;
  };

  // The unit after this one: as they lie in memory, unless grad_weight stays with a block, whose sums it keeps.
  Unit after(Unit u) const {
    if (++u.tile < p.tiles) return u;
    u.tile = 0;
    if (!p.channels_inner) return {u.block, u.images + 1, 0};
    if (++u.block < p.lane_blocks) return u;
    return {0, u.images + 1, 0};
  }

  // The lanes of a unit.
  Block block_of(const Unit& unit) const {
    Block b = {unit.block * p.lanes, unit.images * p.images, 0, p.lanes, p.images > 1 ? p.channels : p.lanes};
    b.live = p.images > 1 ? least(p.images, p.batch - b.image) * p.channels : least(p.lanes, p.channels - b.channel);
    return b;
  }

  // X: of the operands, T where they are packed and S where they are read in the tensors.
  template <class X>
  void run_unit(Scratch& s, const Unit& unit, bool exact) const {
    const DepthwiseCorrelate<S, T, X, N> correlate = {p};
    const DepthwiseAccumulate<T, X, N> accumulate = {p};
    const Block b = block_of(unit);
    const TileRanges r = p.ranges_of(unit.tile);
    const int64_t band = p.tiles == 1 ? 0 : unit.tile % p.bands[2];
    const bool again = s.tile == unit.tile;
    s.tile = unit.tile, s.exact = exact;
    if (p.needs_weight()) operands.pack_weight(s, b);
    Source<X> x = {}, g = {};
    if (p.needs_input())
      x = operands.template source<X>(t.input, p.input_tensor(), b, s.input, p.input_extent, r.input, again,
                                      s.exact);
    if (p.needs_grad_output())
      for (int64_t m = p.multiplier - 1; m >= 0; --m)
        g = operands.template source<X>(t.grad_output, p.output_tensor(m), b, s.grad_output + m * p.output_size(),
                                        p.output_extent, r.grad_output, again, s.exact);
    prefetch_next(s, after(unit));
    if (p.wants(CONVGRAD_TRANSPOSED_GRAD_BIAS)) accumulate.sum_tile(s, b, r.summed, 0, x, x.data);
    for (int64_t m = 0; m < p.multiplier; ++m) {
      if (p.wants(CONVGRAD_FORWARD))
        correlate.tile(s, b, r.output, band, false, m, x, static_cast<S*>(t.forward), p.output_tensor(m));
      if (p.wants(CONVGRAD_GRAD_WEIGHT)) accumulate.tile(s, b, r.output, m, g, x);
    }
    if (p.wants(CONVGRAD_GRAD_INPUT))
      correlate.tile(s, b, r.grad_input, band, true, 0, g, static_cast<S*>(t.grad_input), p.input_tensor());
  }

  // Prefetch the next unit's memory during this one's arithmetic.
  void prefetch_next(Scratch& s, const Unit& next) const {
    s.prefetcher.clear();
    if (p.channels_last || p.tiles > 1 || next.images >= p.image_blocks) return;
    const Block b = block_of(next);
    auto planes = [&](const void* tensor, const Tensor& x, int64_t multiplier, bool write) {
      const int64_t plane = x.pixels() * int64_t(sizeof(S)), bytes = b.live * multiplier * plane;
      if (plane > kLongPlane) return;
      const int64_t before = (b.image * p.channels + b.channel) * multiplier * plane;
      s.prefetcher.add(static_cast<const char*>(tensor) + before, bytes, write);
    };
    if (p.needs_input()) planes(t.input, p.input_tensor(), 1, false);
    if (p.needs_grad_output()) planes(t.grad_output, p.output_tensor(0), p.multiplier, false);
    if (p.wants(CONVGRAD_FORWARD)) planes(t.forward, p.output_tensor(0), p.multiplier, true);
    if (p.wants(CONVGRAD_GRAD_INPUT)) planes(t.grad_input, p.input_tensor(), 1, true);
    s.prefetcher.within(p.work);
  }

  // Units that follow one another. `partial` receives an item's sums, of one block or of all.
  void run_item(Scratch& s, int64_t item, T* partial) const {
    if constexpr (kCheapToLoad<S>) {
      if (p.direct) return run_item_from<S>(s, item, partial);
    }
    run_item_from<T>(s, item, partial);
  }
  template <class X>
  void run_item_from(Scratch& s, int64_t item, T* partial, bool exact = false) const {
    const bool sums = p.wants(CONVGRAD_GRAD_WEIGHT);
    const int64_t block = p.channels_inner ? 0 : item / p.segments;
    const int64_t segment = p.channels_inner ? item : item % p.segments;
    const int64_t units = p.units() * (p.channels_inner ? p.lane_blocks : 1);
    const int64_t first = units * segment / p.segments, last = units * (segment + 1) / p.segments;
    T* const of_item = partial + item * p.item_sums();
    if (sums) memset(of_item, 0, sizeof(T) * static_cast<size_t>(p.item_sums()));
    Unit unit = {block, first / p.tiles, first % p.tiles};
    if (p.channels_inner) unit.block = unit.images % p.lane_blocks, unit.images /= p.lane_blocks;
    for (int64_t i = first; i < last; ++i, unit = after(unit)) {
      s.sums = of_item + (unit.block - block) * p.sums_size();
      run_unit<X>(s, unit, exact);
    }
    if (sums && !p.direct && !exact && !all_finite<T, N>(of_item, p.item_sums()))
      run_item_from<X>(s, item, partial, true);
  }

  // Add the partial sums of a vector of lanes, always in the same order, and write them in the weight's layout.
  void reduce(int64_t block, int64_t lane, const T* partial) const {
    const int64_t first = block * p.lanes, live = least(p.images > 1 ? p.channels : p.lanes, p.channels - first);
    // Read directly, the last vector begins early enough to be full, and repeats channels of the vector before.
    const int64_t begin = p.direct ? least(lane, live - N) : lane, channels = least(live - lane, N);
    S *weight = static_cast<S*>(t.grad_weight), *bias = static_cast<S*>(t.grad_bias);
    const int64_t elements = p.multiplier * p.kernel_elements;
    const int64_t biases = p.wants(CONVGRAD_TRANSPOSED_GRAD_BIAS) ? 1 : p.multiplier;  // of a channel
    const int64_t rows = elements + (bias ? biases : 0);
    partial += block * (p.channels_inner ? 1 : p.segments) * p.sums_size() + p.vector_in(p.rows_of_sums(), lane);
    for (int64_t row = 0; row < rows; ++row) {
      Vec<T, N> total = {};
      for (int64_t segment = 0; segment < p.segments; ++segment)
        total += load<T, N>(partial + segment * p.item_sums() + row * p.pitch());
      T sums[N];
      store<T, N>(sums, total);
      const int64_t m = row < elements ? row / p.kernel_elements : row - elements;
      for (int64_t c = 0; c < channels; ++c) {
        T sum = sums[lane - begin + c];
        for (int64_t image = 1; image < p.images; ++image) sum += sums[image * p.channels + c];
        const int64_t channel = first + lane + c;
        if (row < elements)
          store_one<T>(weight + (channel * p.multiplier + m) * p.kernel_elements + row % p.kernel_elements, sum);
        else
          store_one<T>(bias + channel * biases + m, sum);
      }
    }
  }

  // ---- a plan with its scratch memory, and a call ----

  struct Plan : DepthwisePlan {
    Memory memory;
    Array<T> input, grad_output, weights, starts, result, partial;
    Array<PackedWeight> packed;
    Array<Columns> columns;
    Array<Lines> lines;
    Array<Tap> listed, taps;
  };

  static Plan make_plan(const convgrad_problem& q) {
    Plan p = {};
    static_cast<DepthwisePlan&>(p) = make_depthwise_plan(q, N, sizeof(T), kCheapToLoad<S>);
    const Axis& w = p.axis[2];
    const int64_t row = most(most(w.padded().size(), w.output), p.result_pixels()), kept = p.kept_blocks;
    // A border of the source changes the region at most twice a kernel element and phase.
    const int64_t phases = least(w.stride, w.padded().size()), regions = most(1, phases) + 2 * w.kernel;
    const int64_t pieces = regions + 2 * row / kMostSums;  // nearly equal ones, none smaller than half of the largest
    Layout &each = p.memory.each, &shared = p.memory.shared;
    p.input = each.template add<T>(p.input_size());
    p.grad_output = each.template add<T>(p.output_size() * p.multiplier);
    if (p.needs_weight()) {
      p.weights = each.template add<T>(kept * p.weight_size());
      p.starts = each.template add<T>(kept * p.multiplier * p.lanes);
      p.packed = each.template add<PackedWeight>(kept);
      p.result = each.template add<T>(p.direct ? 0 : most(row, p.folds() ? p.folded_pixels() : 0) * p.lanes);
      p.columns = each.template add<Columns>(pieces);
      p.lines = each.template add<Lines>(1 + 2 * p.axis[1].kernel);
      p.listed = each.template add<Tap>(p.multiplier * p.kernel_elements * (p.direct ? regions : 1));
    }
    if (p.wants(CONVGRAD_GRAD_WEIGHT)) {
      p.taps = each.template add<Tap>(p.kernel_elements);
      p.partial = shared.template add<T>(p.items() * p.item_sums());
    }
    return p;
  }

  static Scratch scratch(const Plan& p, char* at) {
    Scratch s = {};
    s.input = p.input.in(at), s.grad_output = p.grad_output.in(at), s.result = p.result.in(at);
    s.weights = p.weights.in(at), s.starts = p.starts.in(at), s.packed = p.packed.in(at);
    for (int64_t i = 0; s.packed && i < p.kept_blocks; ++i) s.packed[i].channel = -1;
    s.listed.columns = p.columns.in(at), s.listed.lines = p.lines.in(at), s.listed.taps = p.listed.in(at);
    s.taps = p.taps.in(at), s.listed.band = s.tile = -1;
    return s;
  }

  static void run(const Plan& p, const convgrad_tensors& t, char* memory, int threads) {
    const Depthwise call = {p, t};
    T* const partial = p.partial.in(memory);
    const int64_t in_block = p.lanes / N, vectors = ceil_div(p.channels, N);  // only the last block may lack some
    run_items(
        threads, 0, nothing, p.items(), [&](int64_t thread) { return scratch(p, p.memory.of_thread(memory, thread)); },
        [&](Scratch& s, int64_t item) { call.run_item(s, item, partial); },
        p.wants(CONVGRAD_GRAD_WEIGHT) ? vectors : 0,
        each([&](int64_t i) { call.reduce(i / in_block, i % in_block * N, partial); }));
  }
};

}  // namespace
