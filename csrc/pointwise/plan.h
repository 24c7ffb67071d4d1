// Cuts a pointwise problem up into columns of pixels and rows of channels. Integers only.
#pragma once

#include "../vectors/plan.h"
#include "../vectors/vector.h"

namespace {

// Rows and vectors of the sums that stay in registers.
constexpr int kPointwiseRows = kVectorBytes == 64 ? 8 : 4, kPointwiseColumns = 3;

// Bytes of packed pixels that all weights are used with in turn: most of a second-level cache, which has 1 MiB or more
// in most processors with AVX-512, else perhaps 512 KiB. Bytes of pixels that are packed while the next ones are
// prefetched.
constexpr int64_t kFewPixelsBytes = kVectorBytes == 64 ? 4 * kTileBytes : kTileBytes;
constexpr int64_t kBlockBytes = kVectorBytes == 64 ? kTileBytes : kTileBytes / 2;
// Bytes of weights up to which loading and storing their sums is so fast that a block need not be long, but fits into
// the first-level cache. (With AVX-512 that is slower on average.)
constexpr int64_t kFewSumsBytes = kVectorBytes == 64 ? 0 : kTileBytes / 4;

// A vector of columns: the pixel it begins with, and how many of its lanes there are. Where it is `whole` all are, in
// one image, and it is the first of a run of so many of a block that lie together; else that is 0.
struct Column {
  int64_t image, pixel, live;
  bool whole;
  int64_t run;
};

// The pixels of all images are one row of columns, in vectors. The *source* is what the results are computed from: the
// input for forward, grad_output for grad_input. What has the results' channels is the *other* operand of grad_weight.
struct PointwisePlan : Request {
  int64_t groups, pixels, vector;
  bool backward;             // the source is grad_output
  bool channels_last;        // where a panel is a vector of results, and pixels are rows
  int64_t sources, results;  // channels a group
  int64_t vectors, panels;   // vectors of columns; panels of result rows in a group
  int64_t together;          // groups whose panels a work item takes in turn: 1, or in channels_last, where they lie
                             // together, all
  int64_t segments, chunks;  // pieces of the columns and of such groups' panels: one of each, and groups, are an item
  int64_t block;             // vectors of columns that are packed at once
  bool sums_grad, sums_input;  // for grad_bias

  // Small groups are those of grouped/grouped.h, whose lanes are pixels, where channels would fill few lanes here: for
  // results in channels_last, if there are several groups, and for grad_weight of contiguous tensors.
  static bool takes(const convgrad_problem& q) {
    const bool results = q.outputs & (CONVGRAD_FORWARD | CONVGRAD_GRAD_INPUT);
    if (!is_product(q)) return false;
    if (q.layout == CONVGRAD_CONTIGUOUS) return q.in_per_group > 8 || !(q.outputs & CONVGRAD_GRAD_WEIGHT);
    return q.groups == 1 || !results || most(q.in_per_group, q.out_per_group) > 16;
  }

  int64_t inputs() const { return backward ? results : sources; }
  int64_t items() const { return groups / together * chunks * segments; }
  // Weights that few pixels use are packed by the item that needs them, some at a time, which then stay in the cache.
  // Backward in contiguous layout, a panel's lie each in another page.
  bool packs_in_items() const {
    return segments == 1 && (channels_last ? vectors <= 2 * block : vectors <= block && !backward);
  }
  bool packs_before_items() const { return needs_weight() && !packs_in_items(); }
  int64_t group_of(int64_t item) const { return item / chunks % groups; }
  int64_t segment_of(int64_t item) const { return item / chunks / (groups / together); }
  Range columns_of(int64_t item) const { return share(vectors, segment_of(item), segments); }
  int64_t outputs_of() const { return backward ? sources : results; }
  int64_t panel_rows() const { return channels_last ? vector : kPointwiseRows; }
  Range panel(int64_t i) const { return {i * panel_rows(), least(results, (i + 1) * panel_rows())}; }
  int64_t item_results() const { return least(results, ceil_div(together * panels, chunks) * panel_rows()); }
  int64_t weights() const { return groups * sources * results; }
  int64_t biases() const { return !sums_grad && !sums_input ? 0 : sums_grad == backward ? sources : results; }
  int64_t sums() const { return weights() + groups * biases(); }

  Column column(int64_t i) const {
    const int64_t at = i * vector, live = least(vector, batch * pixels - at), pixel = at % pixels;
    return {at / pixels, pixel, live, live == vector && pixel + vector <= pixels, 0};
  }
};

inline PointwisePlan make_pointwise_plan(const convgrad_problem& q, int64_t vector, int64_t element_bytes) {
  PointwisePlan p = {};
  p.batch = q.batch, p.groups = q.groups, p.threads = q.threads, p.vector = vector;
  p.outputs = q.outputs & ~CONVGRAD_TRANSPOSED_GRAD_BIAS;
  p.pixels = q.input[0] * q.input[1] * q.input[2];
  p.backward = !p.wants(CONVGRAD_FORWARD);
  p.sources = p.backward ? q.out_per_group : q.in_per_group, p.results = p.backward ? q.in_per_group : q.out_per_group;
  p.sums_grad = q.outputs & CONVGRAD_GRAD_BIAS, p.sums_input = q.outputs & CONVGRAD_TRANSPOSED_GRAD_BIAS;
  p.channels_last = q.layout == CONVGRAD_CHANNELS_LAST, p.together = p.channels_last ? p.groups : 1;
  p.vectors = ceil_div(p.batch * p.pixels, vector), p.panels = ceil_div(p.results, p.panel_rows());

  // A block for grad_weight is long: many sums are loaded and stored. Else its source fits into the cache; in
  // channels_last it is not packed, and with fewer pixels all weights would be read more often.
  const int64_t line = vector * element_bytes, shortest = kTestsTiles ? 1 : 24 * 64 / line;
  int64_t fewest = 2 * kPointwiseColumns;  // vectors of a segment
  if (p.wants(CONVGRAD_GRAD_WEIGHT)) {
    fewest = p.channels_last ? shortest : most(1, shortest / 2);
    p.block = most(shortest, least(4 * shortest, 2 * kTileBytes / (p.together * (p.sources + p.results) * line)));
    if (p.sources * p.results * element_bytes <= kFewSumsBytes) p.block = most(1, shortest / 3);
  } else {
    const int64_t bytes = p.channels_last ? kTileBytes : kBlockBytes;
    p.block = most(1, bytes / (p.together * p.sources * line) / kPointwiseColumns) * kPointwiseColumns;
    if (p.channels_last) {
      p.block = most(p.block, shortest);
    } else if (!p.backward && p.vectors * vector <= p.results && p.vectors * p.sources * line <= kFewPixelsBytes) {
      // Less than the weights: every thread packs all of it, and its own weights.
      p.block = fewest = most(1, p.vectors);
    }
  }
  if (p.threads == 1) {
    p.segments = p.chunks = 1;
  } else {  // where there are too few columns for all threads, they share out the channels
    p.segments = most(1, least(ceil_div(4 * p.threads * p.together, p.groups), p.vectors / fewest));
    if (p.wants(CONVGRAD_GRAD_WEIGHT)) p.segments = least(p.segments, most_sums(p.sums() * element_bytes));
    if (p.segments > p.threads) p.segments -= p.segments % p.threads;
    // One chunk a thread if chunks pack what they read. Results in channels_last read it in the tensor.
    const int64_t items = (p.channels_last && !p.wants(CONVGRAD_GRAD_WEIGHT) ? 2 : 1) * p.threads;
    p.chunks = least(p.together * p.panels, ceil_div(items * p.together, p.segments * p.groups));
  }
  const int64_t columns = ceil_div(p.vectors, p.segments);  // of a segment, in equal blocks
  p.block = round_up(ceil_div(columns, most(1, ceil_div(columns, p.block))), kPointwiseColumns);
  return p;
}

}  // namespace
