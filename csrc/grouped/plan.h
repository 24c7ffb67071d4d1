// Cuts a grouped problem up into blocks of groups, tiles, and units of images. Integers only.
#pragma once

#include "../vectors/plan.h"

namespace {

// A packed tile: [channel][image][phase in each dimension][position].
struct PlaneTile {
  int64_t channels, images;
  int64_t phases[3], stride[3], dilation[3], extent[3];
  int64_t vector;

  // Whole vectors, and room for a last row that is written in whole vectors: as many of each of two phases, of which
  // the second may begin one element later, or behind the row.
  int64_t plane() const { return round_up(extent[0] * extent[1] * extent[2] + vector, vector); }
  int64_t positions() const { return round_up(extent[0] * extent[1] * extent[2], vector); }
  // Positions of all phases of an image, and of a row.
  int64_t places() const { return phases[0] * phases[1] * phases[2] * positions() + extent[2]; }
  int64_t image() const { return phases[0] * phases[1] * phases[2] * plane(); }
  // A vector more is read, and channels an even number of lines apart would share a few places of the cache.
  int64_t channel() const { return (ceil_div(images * image() + vector, 2 * vector) | 1) * 2 * vector; }
  // Returns the first position of kernel element (or phase) k in dimension d.
  int64_t remainder(int d, int64_t k) const { return stride[d] == 1 ? 0 : k * dilation[d] % stride[d]; }
};

// A plan whose `lanes` are the input channels of a block of groups, of all images of a unit.
struct GroupedPlan : Tiling {
  int64_t groups, in_per_group, out_per_group;
  int64_t block_groups;  // groups in a block
  int64_t phases[3];     // phases of the input: positions that the same kernel elements can reach
  int64_t plane[3];      // extent of one phase of the packed input
  int64_t vector;        // lanes of a vector
  int64_t chunks;        // pieces of the blocks; a chunk and a segment of its units are a work item
  bool sums_input;       // for the bias gradient of a transposed convolution; the packed tiles need not hold all of it

  Range block(int64_t i) const { return {i * block_groups, least(groups, (i + 1) * block_groups)}; }
  // The packed tiles of so many groups and images.
  PlaneTile input_tile(int64_t group_count, int64_t image_count) const {
    PlaneTile tile = {group_count * in_per_group, image_count, {}, {}, {}, {}, vector};
    for (int d = 0; d < 3; ++d) {
      tile.phases[d] = phases[d], tile.extent[d] = plane[d];
      tile.stride[d] = axis[d].stride, tile.dilation[d] = axis[d].dilation;
    }
    return tile;
  }
  PlaneTile output_tile(int64_t group_count, int64_t image_count) const {
    const int64_t* e = output_extent;
    return {group_count * out_per_group, image_count, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {e[0], e[1], e[2]}, vector};
  }
  int64_t group_weights() const { return in_per_group * out_per_group * kernel_elements; }
  // A group's sums: its weights as they lie in the tensor, then its bias.
  int64_t group_biases() const { return sums_input ? in_per_group : out_per_group; }
  int64_t group_sums() const { return group_weights() + group_biases(); }

  Tensor output_tensor() const {
    return {{axis[0].output, axis[1].output, axis[2].output}, groups * out_per_group, 0, 1};
  }

  // Returns whether the channels of a pixel lie together; those of a single channel are contiguous in either layout.
  bool transposes(const Tensor& x) const { return channels_last && x.width > 1; }

  int64_t items() const { return chunks * segments; }

  int64_t weight_element(int64_t group, int64_t o, int64_t i, int64_t k) const {
    const int64_t out = group * out_per_group + o;
    if (channels_last) return (out * kernel_elements + k) * in_per_group + i;
    return (out * in_per_group + i) * kernel_elements + k;
  }
};

// Units of less than this many pixels take several images: the sums of a block of weights are loaded and stored once a
// unit. The passes without such sums lose up to a fifth by it in channels_last, and gain 3 % in contiguous layout.
constexpr int64_t kUnitPixels = 256;

inline GroupedPlan make_grouped_plan(const convgrad_problem& q, int64_t vector, int64_t element_bytes) {
  GroupedPlan p = {};
  p.set_axes(q);
  p.groups = q.groups, p.in_per_group = q.in_per_group, p.out_per_group = q.out_per_group, p.vector = vector;
  p.channels = p.groups * p.in_per_group, p.multiplier = ceil_div(p.out_per_group, p.in_per_group);
  p.sums_input = q.outputs & CONVGRAD_TRANSPOSED_GRAD_BIAS, p.outputs &= ~CONVGRAD_TRANSPOSED_GRAD_BIAS;
  int64_t pixels = 1;
  for (int d = 0; d < 3; ++d) {
    pixels *= q.output[d];
    p.phases[d] = least(q.kernel[d], q.stride[d] / Axis::gcd(q.stride[d], q.dilation[d]));
  }

  // In channels_last a block has whole cache lines of channels, which are transposed together.
  const int64_t line = most(vector, 64 / element_bytes), budget = kTileBytes / element_bytes;
  p.block_groups = p.channels_last ? least(p.groups, ceil_div(line, least(p.in_per_group, p.out_per_group))) : 1;
  p.lane_blocks = ceil_div(p.groups, p.block_groups);
  const bool several = p.wants(CONVGRAD_GRAD_WEIGHT) || !p.channels_last;
  const int64_t wanted = several ? ceil_div(kUnitPixels, most(1, pixels)) : 1;
  p.images = least(wanted, most(1, p.batch * p.lane_blocks / (4 * p.threads)));
  // The same number of images in each unit, so that packed borders stay valid from one to the next.
  p.image_blocks = ceil_div(p.batch, most(1, least(p.images, p.batch)));
  p.images = ceil_div(p.batch, most(1, p.image_blocks));
  p.lanes = p.block_groups * p.in_per_group * p.images;
  choose_bands(p, budget, ceil_div(2 * p.threads, p.lane_blocks * most(1, p.image_blocks)));
  p.set_tiles();
  for (int d = 0; d < 3; ++d) p.plane[d] = ceil_div(p.input_extent[d], p.axis[d].stride);
  // Where rows of both operands lie as far apart, grad_weight sums all of them as one: fewer vectors are cut off, but
  // what lies between the rows is summed too. The end of a row costs about a fifth of a vector.
  const int64_t pitch = most(p.plane[2], p.output_extent[2]), width = p.axis[2].output;
  const int64_t rows = ceil_div(p.axis[1].output, p.bands[1]);
  const int64_t as_one = ceil_div((rows - 1) * pitch + width, vector), apart = rows * ceil_div(width, vector);
  if (p.wants(CONVGRAD_GRAD_WEIGHT) && p.bands[2] == 1 && 5 * as_one <= 5 * apart + rows)
    p.plane[2] = p.output_extent[2] = pitch;
  const int64_t items = p.threads == 1 ? 1 : 8 * p.threads;
  if (p.wants(CONVGRAD_GRAD_WEIGHT)) {  // each segment has sums of its own, so there are few
    p.chunks = least(p.lane_blocks, items);
    const int64_t few = most(ceil_div(p.threads, p.chunks), most_sums(p.groups * p.group_sums() * element_bytes));
    p.segments = least(p.units(), least(ceil_div(items, p.chunks), few));
  } else {
    p.segments = least(p.units(), items), p.chunks = least(p.lane_blocks, ceil_div(items, most(1, p.segments)));
  }
  return p;
}

}  // namespace
