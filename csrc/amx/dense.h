// Convolutions of float32 with many channels a group on the tiles of AMX: any kernel, stride, dilation and padding.
//
// The source (input, or grad_output for grad_input) is packed once for all kernel elements, a box of positions at a
// time, with its padding written out, so that the positions of a box follow one another and a kernel element is a
// shift of all of them:
//   forward, grad_input: results[position][channel] = sum over elements and source channels of
//                        source[position + shift][source channel] * weight[source channel][channel]
//   grad_weight:         of each element, results[output channel][input channel] = sum over positions of
//                        grad_output[position][output channel] * input[position + shift][input channel]
// A stride cuts the input into slots, one for each remainder that kernel elements read, and the gradient of the input
// into classes of positions that the same kernel elements reach. The packed positions between two rows compute what
// nobody reads; a panel of 16 positions (for grad_weight a step of 32) begins where the results go on.
#pragma once

#include "../vectors/parallel.h"
#include "dense_plan.h"
#include "packing.h"

namespace {

class AmxDense : ProductCall<AmxDensePlan> {
 public:
  using ProductCall::ProductCall;

  // False where an operand has an infinity or a NaN: then the results are to be computed anew.
  bool run(int threads) {
    auto scratch = [&](int64_t thread) { return p.memory.of_thread(memory_, thread); };
    const int64_t panels = p.groups * p.result_panels();
    auto prepare = each([&](int64_t i, char* own) { pack_weight(own, i, packed_weight(i)); });
    auto add_up = each([&](int64_t i) { store_weight(i); });
    auto run = [&](char* own, int64_t item) {
      const Tiles tiles;
      p.sums ? sum_weight(own, item) : compute(own, item);
    };
    const int64_t items = p.groups * p.parts * p.segments;
    const int64_t prepared = p.sums || p.packs_in_items ? 0 : panels;
    run_items(threads, prepared, prepare, items, scratch, run, p.sums ? panels : 0, add_up);
    return !infinite_;
  }

 private:
  // `body(class, taps in front of it)`.
  template <class Body>
  void each_class(const Body& body) const {
    const Reach* r = p.reach;
    int64_t c[3], before = 0;
    for (c[0] = 0; c[0] < r[0].classes(); ++c[0])
      for (c[1] = 0; c[1] < r[1].classes(); ++c[1])
        for (c[2] = 0; c[2] < r[2].classes(); ++c[2]) {
          body(c, before);
          before += r[0].taps(c[0]) * r[1].taps(c[1]) * r[2].taps(c[2]);
        }
  }
  // `body(kernel element, positions from that of a result to what it reads)`.
  template <class Body>
  void each_tap(const int64_t* c, const Body& body) const {
    const Reach* r = p.reach;
    for (int64_t i = 0; i < r[0].taps(c[0]); ++i)
      for (int64_t j = 0; j < r[1].taps(c[1]); ++j)
        for (int64_t k = 0; k < r[2].taps(c[2]); ++k) {
          const Reach::Tap x = r[0].tap(c[0], i), y = r[1].tap(c[1], j), z = r[2].tap(c[2], k);
          const int64_t slot = (x.slot * r[1].slots + y.slot) * r[2].slots + z.slot;
          const int64_t rows = (x.shift - r[0].low) * p.extent(1) + y.shift - r[1].low;
          body((x.element * r[1].axis.kernel + y.element) * r[2].axis.kernel + z.element,
               slot * p.pitch() + rows * p.extent(2) + z.shift - r[2].low);
        }
  }

  Box box_at(int64_t i) const {
    Box box;
    for (int d = 3; d >= 0; i /= p.boxes[d--])
      box.range[d] = share(d ? p.reach[d - 1].positions(0) : p.images, i % p.boxes[d], p.boxes[d]);
    return box;
  }
  // Writes where the positions of a box lie in a tensor, or -1, and then -1 up to `end`. `where(d, q)` is the place of
  // position q of the box in dimension d.
  template <class Where>
  void find_places(const Box& box, int64_t channels, const int64_t (&size)[3], const Where& where, int64_t* at,
                   int64_t* end) const {
    const int64_t pixel = p.channels_last ? channels : 1, image = size[0] * size[1] * size[2] * channels;
    for (int64_t n = box.range[0].low; n < box.range[0].high; ++n)
      for (int64_t i = 0; i < p.extent(0); ++i)
        for (int64_t j = 0; j < p.extent(1); ++j) {
          const int64_t x = where(0, i), y = where(1, j), row = n * image + (x * size[1] + y) * size[2] * pixel;
          for (int64_t k = 0; k < p.extent(2); ++k) {
            const int64_t z = where(2, k);
            *at++ = (x | y | z) < 0 ? -1 : row + z * pixel;
          }
        }
    while (at < end) *at++ = -1;
  }
  void find_sources(const Box& box, int64_t* to) const {
    const Reach* r = p.reach;
    const int64_t size[3] = {r[0].sources(), r[1].sources(), r[2].sources()};
    for (int64_t slot = 0; slot < p.slots; ++slot) {
      const int64_t slots[3] = {slot / r[2].slots / r[1].slots, slot / r[2].slots % r[1].slots, slot % r[2].slots};
      auto where = [&](int d, int64_t q) {
        const int64_t i = r[d].source(slots[d], box.range[d + 1].low + r[d].low + q);
        return i < size[d] ? i : -1;
      };
      const int64_t behind = slot + 1 < p.slots ? (slot + 1) * p.pitch() : p.packed();
      find_places(box, p.sources * p.groups, size, where, to + slot * p.pitch(), to + behind);
    }
  }
  // Finds where the results of a class lie (for grad_weight, grad_output). Returns how many runs of `width` positions
  // have some of them, and writes the first position of each, an even one, to `starts`.
  int64_t find_targets(const Box& box, const int64_t* c, int64_t width, int64_t* to, int64_t* starts) const {
    const Reach* r = p.reach;
    const int64_t size[3] = {r[0].results(), r[1].results(), r[2].results()};
    auto where = [&](int d, int64_t q) {
      const int64_t all = box.range[d + 1].low + q;
      return q < box.range[d + 1].size() && all < r[d].positions(c[d]) ? r[d].result(c[d], all) : -1;
    };
    find_places(box, p.results * p.groups, size, where, to, to + p.target_places());
    int64_t count = 0;
    for (int64_t i = 0; i < p.box_positions();) {
      if (to[i] < 0 && to[i + 1] < 0) {
        i += 2;
      } else {
        starts[count++] = i, i += width;
      }
    }
    return count;
  }

  // ---- forward and grad_input ----

  uint16_t* packed_weight(int64_t panel) const { return p.weight.in(memory_) + panel * p.taps * p.steps * kParts; }
  // Packs a panel of the results' channels as [class][step][tap].
  void pack_weight(char* own, int64_t panel, uint16_t* to) {
    const int64_t group = panel / p.result_panels(), row = panel % p.result_panels() * kEdge;
    const int64_t rows = least(kEdge, p.results - row), inputs = p.backward ? p.results : p.sources;
    const float* const bias = static_cast<const float*>(t.bias);
    float* const start = p.start.in(memory_) + panel * kEdge;
    for (int64_t r = 0; r < kEdge; ++r) start[r] = bias && r < rows ? bias[group * p.results + row + r] : 0;

    const float* from = static_cast<const float*>(t.weight);
    from += (group * (p.backward ? p.sources : p.results) + (p.backward ? 0 : row)) * p.taps * inputs;
    const int64_t outputs = p.backward ? p.sources : rows, skipped = p.backward ? row : 0;  // the latter of inputs
    int64_t tap = inputs;
    if (float* const transposed = p.transposed.in(own)) {  // [output][tap][input], as in channels_last
      tap = p.backward ? kEdge : inputs;
      const int64_t next = p.backward ? 4 * inputs * p.taps : 0;  // far apart: prefetched
      for (int64_t o = 0; o < outputs; ++o) {
        const float* const at = from + (o * inputs + skipped) * p.taps;
        for (int64_t i = 0; next && i < rows * p.taps; i += 16) __builtin_prefetch(at + next + i);
        transpose_rows(at, p.backward ? rows : inputs, transposed + o * p.taps * tap, tap);
      }
      from = transposed;
    } else {
      from += skipped;
    }
    const int64_t line = p.taps * tap;
    Largest largest;
    int64_t at[kStep];
    each_class([&](const int64_t* c, int64_t) {
      for (int64_t s = 0; s < p.steps; ++s) {
        const int64_t first_output = p.backward ? s * kStep : 0;
        for (int64_t l = 0; l < kStep; ++l) at[l] = first_output + l < outputs ? (first_output + l) * line : -1;
        each_tap(c, [&](int64_t element, int64_t) {
          const float* const x = from + element * tap;
          Square low, high;
          if (p.backward) {
            load_square(low, true, Lanes(at, true), x, rows, 1, 0);
            load_square(high, true, Lanes(at + kEdge, true), x, rows, 1, 0);
          } else {
            load_square(low, false, Lanes(at, true), x + s * kStep, p.sources - s * kStep, 1, 0);
            load_square(high, false, Lanes(at, true), x + s * kStep + kEdge, p.sources - s * kStep - kEdge, 1, 0);
          }
          pack_right(to, kTile, low, high, largest);
          to += kParts;
        });
      }
    });
    note(largest.infinite());
  }
  // Transposes the elements of `rows` kernels into lines of `line` kernels.
  void transpose_rows(const float* from, int64_t rows, float* to, int64_t line) const {
    for (int64_t i = 0; i < rows; i += kEdge)
      for (int64_t tap = 0; tap < p.taps; ++tap) {
        const __mmask16 there = first(rows - i);
        const __m512 v = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), there, apart(), from + i * p.taps + tap, 4);
        _mm512_mask_storeu_ps(to + tap * line + i, there, v);
      }
  }

  // [step][part][slot and position][32 channels]
  void pack_source(uint16_t* to, int64_t group, const int64_t* places) {
    const int64_t channel = p.channels_last ? 1 : p.source_pixels(), part = p.packed() * kStep;
    const float* const tensor = static_cast<const float*>(p.backward ? t.grad_output : t.input);
    const float* const from = tensor + group * p.sources * channel;
    Largest largest;
    for (int64_t i = 0; i < p.packed(); i += kEdge) {
      const Lanes lanes(places + i, p.channels_last);
      for (int64_t s = 0; s < p.steps; ++s) {
        Square low, high;
        const int64_t c = s * kStep;
        load_square(low, true, lanes, from + c * channel, p.sources - c, channel, kPositionsAhead);
        load_square(high, true, lanes, from + (c + kEdge) * channel, p.sources - c - kEdge, channel, kPositionsAhead);
        pack_left(to + s * 3 * part + i * kStep, kStep, part, low, high, largest);
      }
    }
    note(largest.infinite());
  }

  // Computes some channels of the results in a box.
  void compute(char* own, int64_t item) {
    const int64_t group = item % p.groups, first_panel = group * p.result_panels();
    const Range panels = share(p.result_panels(), item / p.groups % p.parts, p.parts);
    const Box box = box_at(item / p.groups / p.parts);
    int64_t *const targets = p.targets.in(own), *const starts = p.starts.in(own), *const steps_at = p.steps_at.in(own);
    uint16_t* const source = p.source.in(own);
    find_sources(box, p.places.in(own));
    pack_source(source, group, p.places.in(own));
    alignas(64) float sums[2][2][kEdge * kEdge];
    auto start = [&](int64_t, int64_t j) { return TileAt{p.start.in(memory_) + (first_panel + j) * kEdge, 0}; };
    auto results = [&](int64_t r, int64_t j) { return Place{{sums[r][(j - panels.low) % 2], kEdge}}; };
    each_class([&](const int64_t* c, int64_t before) {
      const int64_t count = find_targets(box, c, kEdge, targets, starts);
      int64_t steps = 0;
      for (int64_t s = 0; s < p.steps; ++s)
        each_tap(c, [&](int64_t, int64_t shift) { steps_at[steps++] = (s * 3 * p.packed() + shift) * kStep; });
      for (Range two = panels; two.low < panels.high; two.low = two.high) {
        two.high = least(two.low + 2, panels.high);
        uint16_t* weight = p.packs_in_items ? p.weight.in(own) : packed_weight(first_panel + two.low);
        for (int64_t i = 0; p.packs_in_items && i < two.size(); ++i)
          pack_weight(own, first_panel + two.low + i, weight + i * p.taps * p.steps * kParts);
        weight += before * p.steps * kParts;
        const Side right = {{weight, weight + p.taps * p.steps * kParts}, kTile};
        for (int64_t i = 0; i < count; i += 2) {
          const int64_t rows = least(2, count - i);
          const Side left = {{source + starts[i] * kStep, source + starts[i + rows - 1] * kStep}, p.packed() * kStep};
          multiply_into<kLeft>({0, rows}, two, left, right, steps_at, steps, &start, results);
          for (int r = 0; r < rows; ++r)
            for (int j = 0; j < two.size(); ++j) store_results(group, two.low + j, targets + starts[i + r], sums[r][j]);
        }
      }
    });
  }
  void store_results(int64_t group, int64_t panel, const int64_t* at, const float* tile) const {
    const int64_t channel = p.channels_last ? 1 : p.result_pixels(), row = panel * kEdge, rows = p.results - row;
    float* const to = static_cast<float*>(p.backward ? t.grad_input : t.forward) + (group * p.results + row) * channel;
    if (p.channels_last) {
      for (int l = 0; l < 16; ++l)
        if (at[l] >= 0) _mm512_mask_storeu_ps(to + at[l], first(rows), _mm512_load_ps(tile + l * kEdge));
      return;
    }
    const Lanes lanes(at, false);
    Square v;
    for (int l = 0; l < 16; ++l) v[l] = (Vec<float, 16>)_mm512_load_ps(tile + l * kEdge);
    transpose<float, 16>(v);
    for (int l = 0; l < 16 && l < rows; ++l) lanes.store(to + l * channel, (__m512)v[l]);
  }

  // ---- grad_weight ----

  // Packs grad_output in steps as [panel][step].
  void pack_outputs(uint16_t* to, int64_t group, const int64_t* targets, const int64_t* starts, int64_t steps) {
    const int64_t channel = p.channels_last ? 1 : p.result_pixels();
    const float* const from = static_cast<const float*>(t.grad_output) + group * p.results * channel;
    Largest largest;
    for (int64_t s = 0; s < steps; ++s) {
      const Lanes one(targets + starts[s], p.channels_last), two(targets + starts[s] + kEdge, p.channels_last);
      for (int64_t i = 0; i < p.result_panels(); ++i) {
        Square low, high;
        const int64_t row = i * kEdge;
        load_square(low, false, one, from + row * channel, p.results - row, channel, kPositionsAhead);
        load_square(high, false, two, from + row * channel, p.results - row, channel, kPositionsAhead);
        pack_left(to + (i * steps + s) * kParts, kStep, kTile, low, high, largest);
      }
    }
    note(largest.infinite());
  }
  // Packs a panel of the input as [parity][part][slot and pair of positions][16 channels]: pairs that begin with an
  // even position, then pairs that begin with an odd one.
  void pack_channels(uint16_t* to, int64_t group, int64_t panel, const int64_t* places) {
    const int64_t channel = p.channels_last ? 1 : p.source_pixels(), row = group * p.sources + panel * kEdge;
    const int64_t part = p.packed() * kEdge, channels = p.sources - panel * kEdge;
    const float* const from = static_cast<const float*>(t.input) + row * channel;
    uint16_t* odd = p.parities() > 1 ? to + 3 * part : nullptr;
    __m512i last[3] = {};
    Largest largest;
    for (int64_t i = 0; i < p.packed(); i += kStep) {
      Square low, high;
      load_square(low, true, Lanes(places + i, p.channels_last), from, channels, channel, kPositionsAhead);
      load_square(high, true, Lanes(places + i + kEdge, p.channels_last), from, channels, channel, kPositionsAhead);
      pack_right(to + i * kEdge, part, low, high, largest, odd ? odd + i * kEdge : nullptr, last);
    }
    note(largest.infinite());
  }

  // Adds up some boxes, for some channels of the input.
  void sum_weight(char* own, int64_t item) {
    const int64_t group = item % p.groups, segment = item / p.groups / p.parts, sources = p.source_panels();
    const Range pairs = share(ceil_div(sources, 2), item / p.groups % p.parts, p.parts);
    const Range boxes = share(p.all_boxes(), segment, p.segments);
    int64_t *const places = p.places.in(own), *const targets = p.targets.in(own), *const starts = p.starts.in(own);
    int64_t* const steps_at = p.steps_at.in(own);
    uint16_t *const source = p.source.in(own), *const outer = p.outer.in(own);
    float* const sums = p.partial.in(memory_) + (segment * p.groups + group) * p.group_sums();
    auto start = [](int64_t, int64_t) { return TileAt{zeros, 0}; };
    const int64_t c[3] = {}, row = sources * kEdge;
    for (int64_t i = boxes.low; i < boxes.high; ++i) {
      const Box box = box_at(i);
      find_sources(box, places);
      const int64_t steps = find_targets(box, c, kStep, targets, starts);
      pack_outputs(outer, group, targets, starts, steps);
      for (int64_t s = 0; s < steps; ++s) steps_at[s] = starts[s] * kEdge;
      for (int64_t pair = pairs.low; pair < pairs.high; ++pair) {
        const int64_t column = 2 * pair, columns = least(2, sources - column);
        for (int64_t j = 0; j < columns; ++j)
          pack_channels(source + j * p.channels_elements(), group, column + j, places);
        int64_t tap = 0;
        each_tap(c, [&](int64_t, int64_t shift) {
          const uint16_t* const x = source + (shift & 1 ? 3 * p.packed() * kEdge : 0) + shift / 2 * kStep;
          const Side right = {{x, x + p.channels_elements()}, p.packed() * kEdge};
          float* const at = sums + tap++ * p.result_panels() * kEdge * row + column * kEdge;
          auto results = [&](int64_t r, int64_t j) { return Place{{at + r * kEdge * row + j * kEdge, row}}; };
          for (int64_t r = 0; r < p.result_panels(); r += 2) {
            const Range rows = {r, least(r + 2, p.result_panels())};
            const Side left = {{outer + r * steps * kParts, outer + (r + 1) * steps * kParts}, kTile};
            multiply_into<kRight>(rows, {0, columns}, left, right, steps_at, steps, i == boxes.low ? &start : nullptr,
                                  results);
          }
        });
      }
    }
  }
  // Returns the offsets of the weights of 16 input channels in contiguous layout.
  __m512i apart() const {
    return _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                              _mm512_set1_epi32(int(p.taps)));
  }
  // Stores the sums of a panel of output channels in grad_weight.
  void store_weight(int64_t panel) {
    const int64_t group = panel / p.result_panels(), r = panel % p.result_panels() * kEdge;
    const int64_t row = p.source_panels() * kEdge, all = p.groups * p.group_sums();
    const float* const sums = p.partial.in(memory_) + group * p.group_sums();
    for (int64_t l = r; l < least(r + kEdge, p.results); ++l) {
      float* const to = static_cast<float*>(t.grad_weight) + (group * p.results + l) * p.sources * p.taps;
      for (int64_t c = 0; c < p.sources; c += kEdge)
        for (int64_t k = 0; k < p.taps; ++k) {
          const float* const from = sums + (k * p.result_panels() * kEdge + l) * row + c;
          Vec<float, 16> v = load<float, 16>(from);
          for (int64_t s = 1; s < p.segments; ++s) v += load<float, 16>(from + s * all);
          const __mmask16 there = first(p.sources - c);
          if (p.channels_last)
            _mm512_mask_storeu_ps(to + k * p.sources + c, there, (__m512)v);
          else
            _mm512_mask_i32scatter_ps(to + c * p.taps + k, there, apart(), (__m512)v, 4);
        }
    }
  }
};

}  // namespace
