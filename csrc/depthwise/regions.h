// Regions of a depthwise tile's results: columns and rows that the same kernel elements reach. They are listed once and
// kept from unit to unit, since small images would spend their time on them. Integers only.
#pragma once

#include "plan.h"

namespace {

// The pixels that a kernel can read: positions `range` in each dimension, at these steps in elements.
struct Pixels {
  Range range[3];
  int64_t step[3];
  int64_t lane;  // from lane to lane: a whole vector lies together, the next one where this says
};
// A tensor's pixels, or those of a packed tile.
template <class X>
struct Source : Pixels {
  const X* data;  // of position 0, which need not be among them
};

// Columns of a row of results that are computed together, by the same kernel columns.
struct Columns {
  int64_t first;   // position relative to the tile
  int64_t pixels;  // number of columns, in its phase
  int64_t source;  // element offset of the first one's source position
  TapRange reach;
  int64_t along;  // kernel columns that lie one source step apart; 1 where none do
  const Tap* taps;
};
// Rows of results that the same kernel rows reach.
struct Lines {
  int64_t first;  // among the rows of the phase
  int64_t rows;
  int64_t source;   // element offset of the first one's source position
  TapRange reach;
  int64_t skipped;  // kernel rows before the first one of the reach
};

// The columns and lines of a tile and the taps of each column.
struct Listed {
  Columns* columns;
  Lines* lines;
  Tap* taps;
  int64_t columns_count, band;  // of the columns: twice the band, and 1 for grad_input; -1: not listed yet
  int64_t lines_count;
  struct {
    Range rows, source;
    int64_t step;
    bool backward;
  } lines_of;           // what the lines belong to
  TapRange depth, row;  // that the taps belong to; row.count -1: not listed yet

  // The regions of a row, in pieces of nearly equal size: for grad_input, each remainder of the column by the stride
  // has its own.
  void list_columns(const Axis& a, Range result, const Pixels& source, bool backward) {
    Columns* at_column = columns;
    const int64_t phases = backward ? least(a.stride, result.size()) : 1, step = backward ? 1 : a.stride;
    for (int64_t phase = 0; phase < phases; ++phase) {
      const Reached from = reached_at(a, result.low + phase, backward);
      int64_t base = from.base, left = ceil_div(result.size() - phase, phases);
      for (int64_t at = phase; left > 0;) {
        const Region z = region_at(from.reach, base, step, source.range[2].low, source.range[2].high, left);
        const int64_t along = z.reach.offset_step * z.reach.offset_step == step * step ? z.reach.count : 1;
        left -= z.positions;
        in_pieces(z.positions, kMostSums, [&](int64_t, int64_t now) {
          *at_column++ = {at, now, base * source.step[2], z.reach, along, nullptr};
          at += now * phases, base += now * step;
        });
      }
    }
    columns_count = at_column - columns;
  }

  // The regions of every `step`-th row of a range, unless they are listed already; and the kernel elements that could
  // reach them.
  TapRange list_lines(const Axis& a, Range rows, int64_t step, const Pixels& source, bool backward) {
    const Reached from = reached_at(a, rows.low, backward);
    if (same(lines_of.rows, rows) && same(lines_of.source, source.range[1]) && lines_of.step == step &&
        lines_of.backward == backward)
      return from.reach;
    lines_of = {rows, source.range[1], step, backward};
    Lines* line = lines;
    const int64_t base_step = backward ? 1 : a.stride;
    int64_t base = from.base;
    for (int64_t at = 0, count = ceil_div(rows.size(), step); at < count; ++line) {
      const Region z = region_at(from.reach, base, base_step, source.range[1].low, source.range[1].high, count - at);
      const int64_t skipped = z.reach.count ? (z.reach.first - from.reach.first) / from.reach.step : 0;
      *line = {at, z.positions, base * source.step[1], z.reach, skipped};
      at += z.positions, base += z.positions * base_step;
    }
    lines_count = line - lines;
    return from.reach;
  }

  // The taps of all columns, unless they are listed already.
  void list_taps(const DepthwisePlan& p, const TapRange& in_depth, const TapRange& in_row, const Pixels& source,
                 int64_t multiplier) {
    if (same(row, in_row) && same(depth, in_depth)) return;
    row = in_row, depth = in_depth;
    Tap* to = taps;
    for (Columns *c = columns, *before = nullptr; c != columns + columns_count; before = c++) {
      if (before && same(before->reach, c->reach)) {  // pieces of one region
        c->taps = before->taps;
        continue;
      }
      c->taps = to;
      to += p.list_taps(to, in_depth, in_row, c->reach, source.step, multiplier);
    }
  }

  // The kernel elements that could reach a position, and where in the source their reach begins.
  struct Reached {
    TapRange reach;
    int64_t base;
  };
  static Reached reached_at(const Axis& a, int64_t position, bool backward) {
    if (backward) return {a.backward_reach(a.remainder(position)), a.quotient(position)};
    return {a.forward_reach(), position * a.stride};
  }
};

}  // namespace
