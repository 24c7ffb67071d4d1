// Pointwise convolution of float32 on the tiles of AMX.
//
// Every pass is a product of matrices:
//   channels_last:  pixels x channels, the weight on the right
//   contiguous:     channels x pixels of an image, the weight on the left
//   grad_weight:    channels of grad_output x those of the input
// The inner operand is packed for as many steps as the second-level cache holds; of the outer one two panels at a time,
// which are multiplied by all of the inner one's. The pixels are the inner operand; for grad_weight the side with fewer
// channels. A weight for many pixels is packed beforehand; then so few pixels are taken at a time that all their
// channels are multiplied at once, and results are written once.
//
// What limits it: with fewer than some 100 channels on either side packing, else the power that the tiles draw:
// products of random numbers take 1.2 times as long as products of zeros.
#pragma once

#include "../vectors/parallel.h"
#include "../vectors/products.h"
#include "../vectors/reduce.h"
#include "packing.h"

namespace {

constexpr int64_t kAhead = 3;              // pieces from the one that is packed to the one that is prefetched
constexpr int64_t kMostSteps = 16;         // steps that are packed at once
constexpr int64_t kMostPanels = 64;        // panels of pixels that share a packed weight
constexpr int64_t kInnerBytes = 3 << 19;   // bytes of the packed inner operand, for the second-level cache
// Limits where the weight is packed beforehand: the steps and the panels of pixels that are multiplied at once, the
// bytes of such a piece, and those of the weight.
constexpr int64_t kCachedSteps = 32, kCachedPanels = 32, kCachedBytes = 1 << 20, kMostWeight = 1 << 25;
constexpr int64_t kFewSums = 1 << 18;      // bytes of grad_weight up to which each thread has sums of its own

// A step of 32 k of a panel, as stored in the tensor.
struct Piece {
  const float* at;
  int64_t rows, terms;
};

// ---- the plan ----

struct AmxPointwisePlan : ProductPlan {
  int64_t pixels;            // pixels of an image; in channels_last one image has all of them
  int64_t steps, chunk;      // all steps of k, and those that are packed at once
  int64_t segments, parts;   // pieces of the pixels and of the outer operand's panels: one of each is an item
  Array<uint16_t> inner, outer;  // each thread's
  Array<uint16_t> weight;        // shared, where it is packed beforehand
  Array<float> start, partial;

  int64_t image_steps() const { return ceil_div(pixels, kStep); }
  int64_t image_panels() const { return ceil_div(pixels, kEdge); }
  // Panels of the inner and of the outer operand.
  int64_t inners() const { return sums ? ceil_div(least(sources, results), kEdge) : images * image_panels(); }
  int64_t outers() const { return ceil_div(sums ? most(sources, results) : results, kEdge); }
  bool outer_left() const { return sums ? results >= sources : !channels_last; }
  int64_t all_sums() const { return sources * results; }
};

// Returns how many steps of so many panels fit into the cache.
inline int64_t cached_steps(int64_t panels) {
  return most(4, least(kMostSteps, kInnerBytes / (panels * kStepBytes)));
}

inline void plan_results(AmxPointwisePlan& p) {
  p.steps = ceil_div(p.sources, kStep);
  p.chunk = ceil_div(p.steps, ceil_div(p.steps, kCachedSteps));
  const int64_t cached = least(kCachedPanels, kCachedBytes / (p.chunk * kStepBytes));
  const int64_t bytes = p.outers() * p.steps * kStepBytes;
  const bool beforehand = p.inners() > cached && p.inners() >= kCachedPanels && bytes <= kMostWeight;
  // The threads share out the longer operand: each packs all of the other one. There may be few pixels.
  const bool shares_pixels = p.inners() >= p.outers();
  const int64_t segments = ceil_div(p.inners(), beforehand ? cached : kMostPanels);
  p.segments = least(p.inners(), round_up(segments, shares_pixels ? p.threads : 1));
  p.parts = p.segments % p.threads && !shares_pixels ? least(p.outers(), p.threads) : 1;
  if (beforehand)
    p.weight = p.memory.shared.add<uint16_t>(p.outers() * p.steps * kParts);
  else
    p.chunk = ceil_div(p.steps, ceil_div(p.steps, cached_steps(ceil_div(p.inners(), p.segments))));
  p.start = p.memory.shared.add<float>(p.outers() * kEdge * (p.channels_last ? 1 : kEdge));
}

inline void plan_sums(AmxPointwisePlan& p) {
  p.steps = p.images * p.image_steps();
  // A thread adds up its share of the pixels, or where sums are many, its share of these.
  const bool few = p.all_sums() * int64_t(sizeof(float)) <= kFewSums;
  p.segments = few ? least(p.threads, p.steps) : 1;
  p.parts = few ? 1 : least(p.outers(), p.threads);
  p.chunk = least(cached_steps(p.inners()), ceil_div(p.steps, p.segments));
  if (p.segments > 1) p.partial = p.memory.shared.add<float>(p.segments * p.all_sums());
}

// ---- the passes ----

class AmxPointwise : ProductCall<AmxPointwisePlan> {
 public:
  using ProductCall::ProductCall;

  // False where an operand has an infinity or a NaN: then the results are to be computed anew.
  bool run(int threads) {
    auto scratch = [&](int64_t thread) { return p.memory.of_thread(memory_, thread); };
    float* const partial = p.partial.in(memory_);
    auto add_up = [&](Range elements) {
      reduce_partials<float, 16>(static_cast<float*>(t.grad_weight), p.all_sums(), static_cast<float*>(nullptr),
                                 partial, p.all_sums(), p.segments, elements);
    };
    auto run = [&](char* own, int64_t item) {
      const Tiles tiles;
      p.sums ? sum_weight(own, item, partial) : compute(own, item);
    };
    run_items(
        threads, p.sums ? 0 : p.outers(), [&](Range panels, char*) { prepare(panels); }, p.segments * p.parts, scratch,
        run, partial ? p.all_sums() : 0, add_up);
    return !infinite_;
  }

 private:
  static Place place(float* at, int64_t row, int64_t rows, int64_t columns) {
    return {{at, row}, least(kEdge, rows), least(kEdge, columns)};
  }
  // `body(steps)` for as many of them at a time as are packed at once.
  template <class Body>
  void in_chunks(Range steps, const Body& body) const {
    for (int64_t k = steps.low; k < steps.high; k += p.chunk) body(Range{k, least(steps.high, k + p.chunk)});
  }

  // Packs panels of an operand in the order of memory; the steps of a panel follow one another. Either its k lies along
  // its lines, or a line holds one k of all rows (columns).
  template <class At>
  void pack(uint16_t* to, Range panels, Range steps, bool left, bool along, int64_t line, const At& at) {
    Largest largest;
    const int64_t many = panels.size(), each = steps.size(), last = many * each - 1;
    auto piece = [&](int64_t n) {
      return along ? at(panels.low + n / each, steps.low + n % each) : at(panels.low + n % many, steps.low + n / many);
    };
    for (int64_t n = 0; n <= last; ++n) {
      const Piece x = piece(n), soon = piece(least(n + kAhead, last));
      const int64_t next = along ? kEdge : kEdge * line;  // from k to k + 16
      Square low, high;
      load_lines(low, x.at, soon.at, line, along ? x.rows : x.terms, along ? x.terms : x.rows);
      load_lines(high, x.at + next, soon.at + next, line, along ? x.rows : x.terms - kEdge,
                 along ? x.terms - kEdge : x.rows);
      if (along != left) transpose<float, 16>(low), transpose<float, 16>(high);
      uint16_t* const step = to + (along ? n : n % many * each + n / many) * kParts;
      left ? pack_left(step, kStep, kTile, low, high, largest) : pack_right(step, kTile, low, high, largest);
    }
    note(largest.infinite());
  }
  void pack_weight(uint16_t* to, Range panels, Range steps) {
    const float* const weight = static_cast<const float*>(t.weight);
    const bool along = !p.backward;
    pack(to, panels, steps, !p.channels_last, along, along ? p.sources : p.results, [&](int64_t i, int64_t k) {
      const int64_t row = i * kEdge, term = k * kStep, at = along ? row * p.sources + term : term * p.results + row;
      return Piece{weight + at, p.results - row, p.sources - term};
    });
  }
  // Packs panels of pixels; k counts channels.
  void pack_pixels(uint16_t* to, Range panels, Range steps) {
    const float* const tensor = static_cast<const float*>(p.backward ? t.grad_output : t.input);
    const bool along = p.channels_last;
    pack(to, panels, steps, along, along, along ? p.sources : p.pixels, [&](int64_t i, int64_t k) {
      const int64_t image = i / p.image_panels(), pixel = i % p.image_panels() * kEdge, term = k * kStep;
      const int64_t at = along ? pixel * p.sources + term : term * p.pixels + pixel;
      return Piece{tensor + image * p.sources * p.pixels + at, p.pixels - pixel, p.sources - term};
    });
  }
  // Packs panels of channels; k counts pixels.
  void pack_channels(uint16_t* to, Range panels, Range steps, bool left) {
    const float* const tensor = static_cast<const float*>(left ? t.grad_output : t.input);
    const int64_t all = left ? p.results : p.sources;
    const bool along = !p.channels_last;
    pack(to, panels, steps, left, along, along ? p.pixels : all, [&](int64_t i, int64_t k) {
      const int64_t image = k / p.image_steps(), pixel = k % p.image_steps() * kStep, channel = i * kEdge;
      const int64_t at = along ? channel * p.pixels + pixel : pixel * all + channel;
      return Piece{tensor + image * all * p.pixels + at, all - channel, p.pixels - pixel};
    });
  }

  void prepare(Range panels) {
    fill_start(panels);
    if (weight_) pack_weight(weight_ + panels.low * p.steps * kParts, panels, {0, p.steps});
  }
  // Sets what sums start from: the bias, for each channel or for each pixel of a channel.
  void fill_start(Range panels) {
    const float* bias = static_cast<const float*>(t.bias);
    const int64_t times = p.channels_last ? 1 : kEdge;
    for (int64_t r = panels.low * kEdge; r < panels.high * kEdge; ++r)
      for (int64_t i = 0; i < times; ++i) start_[r * times + i] = bias && r < p.results ? bias[r] : 0;
  }

  // Multiplies a packed inner operand by an outer one, of which `outer(panels)` returns one or two packed panels.
  template <class Outer, class Start, class Results>
  void multiply_panels(Range outers, const Outer& outer, int64_t outer_panel, const uint16_t* inner, Range inners,
                       int64_t steps, const Start* start, const Results& results) {
    const int64_t inner_panel = steps * kParts;
    for (Range two = outers; two.low < outers.high; two.low = two.high) {
      two.high = least(two.low + 2, outers.high);
      const uint16_t* const packed = outer(two);
      const Side outer_side = {{packed, packed + outer_panel}, kTile};
      for (Range now = inners; now.low < inners.high; now.low = now.high) {
        now.high = least(now.low + 2, inners.high);
        const uint16_t* const other = inner + (now.low - inners.low) * inner_panel;
        const Side inner_side = {{other, other + inner_panel}, kTile};
        if (p.outer_left())
          multiply_into<kNone>(two, now, outer_side, inner_side, nullptr, steps, start, results);
        else
          multiply_into<kNone>(now, two, inner_side, outer_side, nullptr, steps, start, results);
      }
    }
  }

  // Computes some results of some pixels.
  void compute(char* own, int64_t item) {
    const Range pixels = share(p.inners(), item / p.parts, p.segments);
    const Range outers = share(p.outers(), item % p.parts, p.parts);
    float* const tensor = static_cast<float*>(p.backward ? t.grad_input : t.forward);
    auto start = [&](int64_t i, int64_t j) {
      return p.channels_last ? TileAt{start_ + j * kEdge, 0} : TileAt{start_ + i * kEdge * kEdge, kEdge};
    };
    auto results = [&](int64_t i, int64_t j) {
      if (p.channels_last)
        return place(tensor + i * kEdge * p.results + j * kEdge, p.results, p.pixels - i * kEdge,
                     p.results - j * kEdge);
      const int64_t image = j / p.image_panels(), pixel = j % p.image_panels() * kEdge;
      return place(tensor + (image * p.results + i * kEdge) * p.pixels + pixel, p.pixels, p.results - i * kEdge,
                   p.pixels - pixel);
    };
    in_chunks({0, p.steps}, [&](Range now) {
      pack_pixels(p.inner.in(own), pixels, now);
      auto weight = [&](Range panels) {
        if (weight_) return weight_ + (panels.low * p.steps + now.low) * kParts;
        pack_weight(p.outer.in(own), panels, now);
        return p.outer.in(own);
      };
      multiply_panels(outers, weight, (weight_ ? p.steps : now.size()) * kParts, p.inner.in(own), pixels, now.size(),
                      now.low ? nullptr : &start, results);
    });
  }

  // Adds up some pixels for all of grad_weight, or all pixels for some of it.
  void sum_weight(char* own, int64_t item, float* partial) {
    const Range inners = {0, p.inners()}, outers = share(p.outers(), item % p.parts, p.parts);
    const Range steps = share(p.steps, item / p.parts, p.segments);
    float* const tensor = partial ? partial + item / p.parts * p.all_sums() : static_cast<float*>(t.grad_weight);
    auto start = [&](int64_t, int64_t) { return TileAt{zeros, 0}; };
    auto results = [&](int64_t i, int64_t j) {
      return place(tensor + i * kEdge * p.sources + j * kEdge, p.sources, p.results - i * kEdge,
                   p.sources - j * kEdge);
    };
    in_chunks(steps, [&](Range now) {
      pack_channels(p.inner.in(own), inners, now, !p.outer_left());
      auto outer = [&](Range panels) {
        pack_channels(p.outer.in(own), panels, now, p.outer_left());
        return p.outer.in(own);
      };
      multiply_panels(outers, outer, now.size() * kParts, p.inner.in(own), inners, now.size(),
                      now.low > steps.low ? nullptr : &start, results);
    });
  }

  float* const start_ = p.start.in(memory_);
  uint16_t* const weight_ = p.weight.in(memory_);
};

inline AmxPointwisePlan make_amx_pointwise_plan(const convgrad_problem& q) {
  AmxPointwisePlan p = {};
  p.set(q), p.pixels = q.input[0] * q.input[1] * q.input[2];
  if (p.channels_last) p.pixels *= p.images, p.images = 1;
  p.sums ? plan_sums(p) : plan_results(p);
  p.inner = p.memory.each.add<uint16_t>(ceil_div(p.inners(), p.sums ? 1 : p.segments) * p.chunk * kParts);
  p.outer = p.memory.each.add<uint16_t>(2 * p.chunk * kParts);
  return p;
}

}  // namespace
