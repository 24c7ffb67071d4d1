// The tile of depthwise forward and grad_input: rows and columns of results are cut into regions, and columns into
// pieces that fit the registers. Each piece of each region is a run of `correlate`.
#pragma once

#include "operands.h"

namespace {

// S: storage, T: arithmetic, X: of the source, as packed or as it lies in the tensor, N: lanes of a vector.
template <class S, class T, class X, int N>
struct DepthwiseCorrelate {
  // Rows of a tensor whose pieces are computed one after the other, a vector of lanes at a time: what they read of the
  // rows between them is in the first-level cache then, with 7x7 kernels 10 rows for 4 instead of 28.
  static constexpr int64_t kRowsTogether = 4;
  using Scratch = DepthwiseScratch<T>;

  const DepthwisePlan& p;

  // Results of one slice of a tile.
  struct Slice {
    const Source<X>& source;
    const X* from;  // where the slice's kernel elements begin in the source, but for the row and the column
    bool backward;
    int64_t m, pixel, step, row;  // steps of the results, in elements: column, column of a region, row of a region
    TapRange depth;
  };

  void tile(Scratch& s, const Block& b, const Range result[3], int64_t band, bool backward, int64_t m,
            const Source<X>& source, S* out, const Tensor& x) const {
    if (result[0].size() == 0 || result[1].size() == 0 || result[2].size() == 0) return;
    const bool folds = backward && p.folds();
    const bool in_place = p.channels_last && x.step == 1 && !folds;  // results are stored where they belong
    const Axis* a = p.axis;
    const int64_t width = result[2].size(), pitch = in_place ? x.width : b.lanes;
    // Rows taken together: in a tensor all, so that the taps of each phase are listed once.
    const bool whole_rows = in_place || folds || width == x.size[2];
    const int64_t group = p.direct ? result[1].size() : whole_rows ? most(1, p.result_pixels() / width) : 1;
    const int64_t listed = 2 * band + backward;
    if (s.listed.band != listed || s.exact) {
      s.listed.list_columns(a[2], result[2], source, backward);
      s.listed.band = s.exact ? -1 : listed, s.listed.row.count = -1;
    }
    Slice slice = {source, nullptr, backward, m, pitch, pitch * (backward ? least(a[2].stride, width) : 1), 0, {}};
    for (int64_t d = result[0].low; d < result[0].high; ++d) {
      const Listed::Reached depth = Listed::reached_at(a[0], d, backward);
      slice.depth = region_at(depth.reach, depth.base, 1, source.range[0].low, source.range[0].high, 1).reach;
      slice.from = source.data + depth.base * source.step[0];
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
            const int64_t before = folds ? (d - result[0].low) * result[1].size() + low - result[1].low : 0;
            correlate_rows(s, slice, rows, phases, s.result + (before + phase) * width * pitch, round_up(b.live, N));
          }
        }
        if (!in_place && !folds)
          Packing<S, T, N>::unpack(out, s.result, x, b, pixel, (high - low) * width, p.channels_last);
      }
    }
    if (!folds) return;
    fold<T, N>(s.result, b.lanes, x, result);
    Packing<S, T, N>::unpack(out, s.result, x, b, 0, x.pixels(), p.channels_last);
  }

  // Computes every `step`-th row of a range.
  template <class To>
  void correlate_rows(Scratch& s, const Slice& slice, Range rows, int64_t step, To* to, int64_t live) const {
    const int64_t multiplier = slice.backward ? p.multiplier : 1;
    const int64_t per_column = slice.depth.count * multiplier;  // taps of one kernel row, for each kernel column
    const int64_t source_step = slice.backward ? 1 : p.axis[2].stride;  // in columns
    ResultRows<T, X, To> run = {};
    run.prefetcher = &s.prefetcher;
    run.row_step = slice.backward ? 1 : p.axis[1].stride;
    run.new_rows = least(run.row_step, p.axis[1].kernel), run.new_row = slice.source.step[1];
    run.result_step = slice.step, run.source_step = source_step * slice.source.step[2];
    run.result_columns = slice.backward ? p.axis[2].stride : 1, run.source_columns = source_step;
    run.result_row = slice.row, run.source_row = run.row_step * slice.source.step[1];
    run.weight = s.weight + slice.m * p.kernel_elements * p.pitch(), run.start = s.start + slice.m * p.lanes;
    run.source_lane = slice.source.lane, run.weight_lane = p.direct ? 1 : p.multiplier * p.kernel_elements;
    Listed& listed = s.listed;
    const TapRange all = listed.list_lines(p.axis[1], rows, step, slice.source, slice.backward);
    if (!s.exact) listed.list_taps(p, slice.depth, all, slice.source, multiplier);
    auto set = [&](const Lines& l, const Columns& c, int64_t row) {
      run.result = to + (l.first + row) * slice.row + c.first * slice.pixel;
      run.source = slice.from + l.source + row * run.source_row + c.source;
      run.taps = c.taps + l.skipped * per_column * c.reach.count;
      run.count = l.reach.count * per_column * c.reach.count, run.along = c.along;
    };
    const Lines* const last_line = listed.lines + listed.lines_count;
    const Columns* const last_column = listed.columns + listed.columns_count;
    if (p.direct) {
      for (const Lines* l = listed.lines; l != last_line; ++l)
        for (int64_t low = 0, high; low < l->rows; low = high) {  // few rows at a time, and those as they lie in memory
          high = least(l->rows, low + kMostSums);
          for (const Columns* c = listed.columns; c != last_column; ++c)
            if (few(*c, high - low)) set(*l, *c, low), correlate_along_columns(run, high - low, c->pixels, live);
          for (int64_t row = low; row < high; row += kRowsTogether)
            for (const Columns* c = listed.columns; c != last_column; ++c)
              if (!few(*c, high - low))
                set(*l, *c, row), correlate_along_rows(run, least(kRowsTogether, high - row), c->pixels, live);
        }
      return;
    }
    for (int64_t lane = 0; lane < live; lane += N)
      for (const Lines* l = listed.lines; l != last_line; ++l)
        for (const Columns* c = listed.columns; c != last_column; ++c) {
          set(*l, *c, 0);
          if (s.exact) {  // no more regions than these fit the list
            run.taps = listed.taps;
            p.list_taps(listed.taps, slice.depth, l->reach, c->reach, slice.source.step, multiplier);
          }
          run.rows = l->rows;
          correlate_kernel<T, N>(run, c->pixels)(run, lane, live - lane);
        }
  }

  // A border of few columns of a tensor is computed along the column: in a row, its sums would wait for each other.
  static bool few(const Columns& c, int64_t rows) { return c.pixels < least(rows, 4); }
  template <class To>
  void correlate_along_columns(ResultRows<T, X, To> run, int64_t rows, int64_t columns, int64_t live) const {
    std::swap(run.result_step, run.result_row), std::swap(run.source_step, run.source_row);
    run.rows = columns, run.along = 1, run.newest = nullptr;
    correlate_lanes<T, N>(run, rows, live);
  }
  template <class To>
  void correlate_along_rows(ResultRows<T, X, To>& run, int64_t rows, int64_t columns, int64_t live) const {
    run.rows = rows;
    const int64_t newest = run.count ? most(run.taps[0].source, run.taps[run.count - 1].source) : 0;
    run.newest = run.source + (rows - 1) * run.source_row + newest;
    correlate_lanes<T, N>(run, columns, live);
  }
};

}  // namespace
