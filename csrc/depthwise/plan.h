// Cuts a depthwise problem up, and says where lanes lie, in tensors and in scratch memory. Integers only.
#pragma once

#include "../vectors/kernels.h"
#include "../vectors/packing.h"

namespace {

// Kernel width from which on grad_weight takes one kernel row at a time.
constexpr int64_t kWideKernel = 6;
// Pixels of rows that are taken together, in a tensor and in scratch memory: enough to amortise a call, few enough for
// the first-level cache. Pixels of a tensor are as far apart as it has channels, and take more of the cache.
constexpr int64_t kTensorPixels = 64, kScratchPixels = 256;

struct DepthwisePlan : Tiling {
  int64_t vector;       // its lanes
  bool direct;          // kernels read the tensors where they lie; nothing is packed
  int64_t kept_blocks;  // whose packed weights are kept: all that units take in turn, if the cache has room for them
  int64_t work;         // multiply-adds of a unit of whole images, for each vector of lanes
  bool channels_inner;  // units take the blocks of an image in turn, as they lie in memory; else all of a block first

  int64_t items() const { return segments * (channels_inner ? 1 : lane_blocks); }
  int64_t weight_size() const { return multiplier * kernel_elements * lanes; }
  int64_t sums_size() const { return weight_size() + multiplier * lanes; }  // grad_weight, then grad_bias
  int64_t item_sums() const { return sums_size() * (channels_inner ? lane_blocks : 1); }
  int64_t input_size() const { return needs_input() && !direct ? tile_pixels(input_extent) * lanes : 0; }
  int64_t output_size() const { return needs_grad_output() && !direct ? tile_pixels(output_extent) * lanes : 0; }

  Tensor output_tensor(int64_t m) const {
    return {{axis[0].output, axis[1].output, axis[2].output}, channels * multiplier, m, multiplier};
  }

  // Weights and sums of a block are rows of lanes, [multiplier][kernel element][lane], as the operands are pixels of
  // lanes: in tensors all lanes of a row lie together, in scratch memory all rows of a vector of lanes do.
  int64_t pitch() const { return direct ? lanes : vector; }
  int64_t rows_of_sums() const { return multiplier * (kernel_elements + 1); }  // grad_weight, then grad_bias
  int64_t vector_in(int64_t rows, int64_t lane) const { return direct ? lane : lane * rows; }

  // The channel with which the vector at a lane begins: read directly, the last vector ends with the last channel.
  int64_t vector_at(const Block& b, int64_t lane) const { return direct ? least(lane, b.live - vector) : lane; }

  // Pixels of results in scratch memory. With a stride, each phase of grad_input is a convolution of its own and has
  // only a part of them.
  int64_t result_pixels() const {
    return kScratchPixels * (wants(CONVGRAD_GRAD_INPUT) ? least(4, axis[1].stride * axis[2].stride) : 1);
  }

  // Returns whether grad_weight takes one kernel row at a time.
  bool by_kernel_row() const { return axis[2].kernel >= kWideKernel; }

  // The taps of a region, from the reaches of its three dimensions, and of all multipliers of the source. Kernel rows
  // come outermost: the taps of fewer kernel rows are a part of the list. Within a row they ascend in the source.
  int64_t list_taps(Tap* taps, const TapRange& d, const TapRange& h, const TapRange& w, const int64_t step[3],
                    int64_t multiplier) const {
    int64_t n = 0;
    for (int64_t j = 0; j < h.count; ++j)
      for (int64_t m = 0; m < multiplier; ++m)
        for (int64_t i = 0; i < d.count; ++i) {
          const int64_t row = m * output_size() + (d.offset + i * d.offset_step) * step[0] +
                              (h.offset + j * h.offset_step) * step[1];
          const int64_t element = (((m * axis[0].kernel + d.first + i * d.step) * axis[1].kernel) + h.first +
                                   j * h.step) * axis[2].kernel;
          for (int64_t i = 0; i < w.count; ++i) {
            const int64_t k = w.offset_step < 0 ? w.count - 1 - i : i;
            taps[n++] = {row + (w.offset + k * w.offset_step) * step[2], (element + w.first + k * w.step) * pitch()};
          }
        }
    return n;
  }
};

// Returns whether to read channels_last tensors directly. Near the border the kernel elements change from column to
// column, which costs more than packing does, unless the kernel is small or the image wide.
inline bool reads_directly(const Tiling& p, int64_t vector) {
  if (!p.channels_last || p.multiplier != 1 || p.channels < vector || p.padding_mode) return false;
  const Axis& w = p.axis[2];
  return p.kernel_elements <= 9 || (p.kernel_elements <= 49 && w.output >= 3 * (w.kernel - 1) * w.dilation);
}

// See DepthwisePlan::work.
inline int64_t work_of(const Tiling& p) {
  int64_t output = p.multiplier * p.kernel_elements, input = output;
  for (const Axis& a : p.axis) output *= a.output, input *= ceil_div(a.input, a.stride);
  return (p.wants(CONVGRAD_FORWARD) + p.wants(CONVGRAD_GRAD_WEIGHT)) * output + p.wants(CONVGRAD_GRAD_INPUT) * input;
}

// Elements of packed weights that are kept, and of grad_weight sums that an item keeps for all blocks, at most: three
// eighths of a second-level cache in float32.
constexpr int64_t kKeptWeights = 48 * 1024, kKeptSums = 48 * 1024;

// `cheap_to_load`: the storage may be loaded as often as there are kernel elements (kCheapToLoad in vectors/vector.h).
inline DepthwisePlan make_depthwise_plan(const convgrad_problem& q, int64_t vector, int64_t element_bytes,
                                         bool cheap_to_load) {
  DepthwisePlan p = {};
  p.set_axes(q), p.vector = vector;
  p.channels = q.groups, p.multiplier = q.out_per_group;

  const int64_t budget = kTileBytes / element_bytes;
  p.direct = cheap_to_load && reads_directly(p, vector);
  if (p.direct) {
    p.images = 1, p.lanes = round_up(p.channels, vector);
  } else if (p.channels_last) {
    // All channels of a pixel lie together: take as many lines of them as let whole images fit, because the rows
    // between two tiles are packed twice; where not even two lines do, as many as let some rows fit.
    const int64_t line = most(vector, 64 / element_bytes), all = round_up(p.channels, vector), whole[3] = {1, 1, 1};
    p.images = 1, p.lanes = all;
    const int64_t fewest = p.folds() ? line : 2 * line;
    while (p.lanes > fewest && packed_pixels(p, whole) * p.lanes > budget)
      p.lanes = round_up(ceil_div(p.lanes, 2), line);
    if (packed_pixels(p, whole) * p.lanes > budget && !p.folds())
      for (p.lanes = all;; p.lanes = round_up(ceil_div(p.lanes, 2), line)) {
        choose_bands(p, budget, 1);
        if (p.lanes <= 4 * line || packed_pixels(p, p.bands) * p.lanes <= budget) break;
      }
  } else {
    p.lanes = vector;
    p.images = p.channels < vector ? most(1, least(vector / p.channels, p.batch)) : 1;
  }
  p.lane_blocks = ceil_div(p.channels, p.lanes);
  p.image_blocks = ceil_div(p.batch, p.images);
  choose_bands(p, budget, ceil_div(2 * p.threads, most(1, p.lane_blocks * p.image_blocks)));
  p.set_tiles();
  const bool sums = p.wants(CONVGRAD_GRAD_WEIGHT);
  p.channels_inner = !sums || p.lane_blocks * p.sums_size() <= kKeptSums;
  p.kept_blocks = p.channels_inner && p.lane_blocks * p.weight_size() <= kKeptWeights ? most(1, p.lane_blocks) : 1;
  p.work = work_of(p);
  // An item that keeps sums begins with zeros and ends in a reduction: fewer of them.
  const int64_t items = p.threads == 1 ? 1 : (sums && p.channels_inner ? 4 : 8) * p.threads;
  p.segments = p.channels_inner ? least(p.units() * p.lane_blocks, items)
                                : least(p.units(), ceil_div(items, p.lane_blocks));
  return p;
}

}  // namespace
