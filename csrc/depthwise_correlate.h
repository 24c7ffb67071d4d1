// The tile of depthwise forward and grad_input: rows of results are cut into zones, and each is a run of `correlate`.
#pragma once

#include "depthwise_operands.h"

namespace {

// S: storage, T: arithmetic, X: of the source, as packed or as it lies in the tensor, N: lanes of a vector.
template <class S, class T, class X, int N>
struct DepthwiseCorrelate {
  static constexpr auto kRuns = std::make_integer_sequence<int, kMostSums>();
  using Scratch = DepthwiseScratch<T>;

  const DepthwisePlan<N>& p;

  // The zones of a row: for grad_input, each remainder of the column by the stride has its own.
  void list_columns(Listed& listed, Range result, const Source<X>& source, bool backward) const {
    const Axis& a = p.axis[2];
    Columns* columns = listed.columns;
    const int64_t phases = backward ? least(a.stride, result.size()) : 1, step = backward ? 1 : a.stride;
    for (int64_t phase = 0; phase < phases; ++phase) {
      const int64_t w = result.low + phase;
      const Reach reach = backward ? a.backward_reach(a.remainder(w)) : a.forward_reach();
      int64_t base = backward ? a.quotient(w) : w * a.stride, left = ceil_div(result.size() - phase, phases);
      for (int64_t at = phase; left > 0;) {
        const Zone z = zone_at(reach, base, step, source.range[2].low, source.range[2].high, left);
        *columns++ = {at, z.positions, base * source.step[2], z.reach, nullptr};
        at += z.positions * phases, base += z.positions * step, left -= z.positions;
      }
    }
    listed.zones = columns - listed.columns;
  }

  // Positions of the depth or row dimension, `step` apart, that the same kernel elements reach: what could reach them,
  // what does, how many they are, and where in the source.
  struct Line {
    Reach all, reach;
    int64_t positions, source, source_step;
    int64_t skipped() const { return reach.count ? (reach.first - all.first) / all.step : 0; }
  };
  static bool same(const Reach& a, const Reach& b) {
    return a.first == b.first && a.step == b.step && a.offset == b.offset && a.count == b.count;
  }
  Line line(int d, int64_t position, int64_t positions, const Source<X>& source, bool backward) const {
    const Axis& a = p.axis[d];
    const int64_t base = backward ? a.quotient(position) : position * a.stride, step = backward ? 1 : a.stride;
    const Reach all = backward ? a.backward_reach(a.remainder(position)) : a.forward_reach();
    const Zone z = zone_at(all, base, step, source.range[d].low, source.range[d].high, positions);
    return {all, z.reach, z.positions, base * source.step[d], step * source.step[d]};
  }

  // Results of one slice of a tile.
  struct Slice {
    const Source<X>& source;
    const X* from;  // where the slice's kernel elements begin in the source, but for the row and the column
    bool backward;
    int64_t m, pixel, step, row;  // steps of the results, in elements: column, column of a zone, row of a zone
    Reach depth;
  };

  void tile(Scratch& s, const Block& b, const Range result[3], int64_t band, bool backward, int64_t m,
            const Source<X>& source, S* out, const Tensor& x) const {
    if (result[0].size() == 0 || result[1].size() == 0 || result[2].size() == 0) return;
    const bool in_place = p.channels_last && x.step == 1;  // results are stored where they belong
    const Axis* a = p.axis;
    const int64_t width = result[2].size(), pitch = in_place ? x.width : b.lanes;
    // Rows taken together. In a tensor they are as many as need no second list of taps.
    const bool whole_rows = p.direct ? !backward || a[1].stride == 1 : in_place || width == x.size[2];
    const int64_t group = !whole_rows ? 1 : p.direct ? result[1].size() : p.rows_together(width, in_place);
    const int64_t listed = 2 * band + backward;
    if (s.listed.band != listed || s.careful()) {
      list_columns(s.listed, result[2], source, backward);
      s.listed.band = s.careful() ? -1 : listed, s.listed.row.count = -1;
    }
    Slice slice = {source, nullptr, backward, m, pitch, pitch * (backward ? least(a[2].stride, width) : 1), 0, {}};
    for (int64_t d = result[0].low; d < result[0].high; ++d) {
      const Line depth = line(0, d, 1, source, backward);
      slice.depth = depth.reach, slice.from = source.data + depth.source;
      for (int64_t low = result[1].low; low < result[1].high; low += group) {
        const int64_t high = least(result[1].high, low + group);
        const int64_t pixel = (d * x.size[1] + low) * x.size[2] + result[2].low;
        // For grad_input, each remainder of the row by the stride is a convolution of its own.
        const int64_t phases = backward ? least(a[1].stride, high - low) : 1;
        for (int64_t phase = 0; phase < phases; ++phase) {
          const Range rows = {low + phase, high};
          slice.row = phases * pitch * (in_place ? x.size[2] : width);
          if (in_place) {
            S* to = out + (b.image * x.pixels() + pixel + phase * x.size[2]) * pitch + b.channel;
            correlate_rows(s, slice, rows, phases, to, b.live);
          } else if constexpr (std::is_same<X, T>::value) {  // what is read in a tensor is stored in one
            correlate_rows(s, slice, rows, phases, s.result + phase * width * pitch, round_up(b.live, N));
          }
        }
        if (!in_place)
          Packing<S, T, N>::unpack(out, s.result, x, b, pixel, (high - low) * width, p.channels_last);
      }
    }
  }

  // Every `step`-th row of a range.
  template <class To>
  void correlate_rows(Scratch& s, const Slice& slice, Range rows, int64_t step, To* to, int64_t live) const {
    const int64_t multiplier = slice.backward ? p.multiplier : 1;
    const int64_t per_column = slice.depth.count * multiplier;  // taps of one kernel row, for each kernel column
    const int64_t source_step = slice.backward ? 1 : p.axis[2].stride;  // in columns
    Run<T, X, To> run = {};
    run.ahead = &s.ahead;
    run.new_rows = slice.backward ? 1 : least(p.axis[1].stride, p.axis[1].kernel), run.new_row = slice.source.step[1];
    run.result_step = slice.step, run.source_step = source_step * slice.source.step[2];
    run.result_columns = slice.backward ? p.axis[2].stride : 1, run.source_columns = source_step;
    run.result_row = slice.row, run.source_row = (slice.backward ? 1 : p.axis[1].stride) * slice.source.step[1];
    run.weight = s.weight + slice.m * p.kernel_elements * p.pitch(), run.start = s.start + slice.m * p.lanes;
    run.source_lane = slice.source.lane, run.weight_lane = p.direct ? 1 : p.multiplier * p.kernel_elements;
    Line h;
    for (; rows.low < rows.high; rows.low += h.positions * step) {
      h = line(1, rows.low, ceil_div(rows.high - rows.low, step), slice.source, slice.backward);
      if (!s.careful()) list_taps(s.listed, slice, h.all, multiplier);
      // In a tensor few rows are taken at a time, and those one by one, as they lie in memory.
      for (int64_t i = 0, now; i < h.positions; i += now, to += now * slice.row) {
        now = p.direct ? least(h.positions - i, kMostSums) : h.positions;
        const X* from = slice.from + h.source + i * h.source_step;
        for (const Columns* c = s.listed.columns; c != s.listed.columns + s.listed.zones; ++c) {
          run.result = to + c->first * slice.pixel, run.source = from + c->source;
          if (s.careful())  // no more zones than these fit the list
            p.list_taps(s.listed.taps, slice.depth, h.reach, c->reach, slice.source.step, multiplier);
          run.taps = s.careful() ? s.listed.taps : c->taps + h.skipped() * per_column * c->reach.count;
          run.count = h.reach.count * per_column * c->reach.count;
          run.along = c->reach.offset_step * c->reach.offset_step == source_step * source_step ? c->reach.count : 1;
          run.rows = now;
          if (p.direct)
            correlate_in_tensor(run, c->pixels, live);
          else
            correlate_all<T, N>(run, c->pixels, live, false, kRuns);
        }
      }
    }
  }

  // Rows in a tensor, one by one; but a border of few columns along the column, as its sums would wait for each other.
  template <class To>
  void correlate_in_tensor(Run<T, X, To> run, int64_t pixels, int64_t live) const {
    const int64_t rows = run.rows;
    if (pixels < least(rows, 4)) {
      std::swap(run.result_step, run.result_row), std::swap(run.source_step, run.source_row);
      run.rows = pixels, run.along = 1, run.newest = nullptr;
      return correlate_all<T, N>(run, rows, live, true, kRuns);
    }
    run.rows = 1;
    const int64_t newest = run.count ? most(run.taps[0].source, run.taps[run.count - 1].source) : 0;
    for (int64_t i = 0; i < rows; ++i, run.result += run.result_row, run.source += run.source_row) {
      run.newest = !p.cached ? run.source + newest : nullptr;
      correlate_all<T, N>(run, pixels, live, true, kRuns);
    }
  }

  // The taps of all zones of a row, unless they are listed already.
  void list_taps(Listed& listed, const Slice& slice, const Reach& row, int64_t multiplier) const {
    if (same(listed.row, row) && same(listed.depth, slice.depth)) return;
    listed.row = row, listed.depth = slice.depth;
    Tap* taps = listed.taps;
    for (Columns* c = listed.columns; c != listed.columns + listed.zones; ++c) {
      c->taps = taps;
      taps += p.list_taps(taps, slice.depth, row, c->reach, slice.source.step, multiplier);
    }
  }
};

}  // namespace
