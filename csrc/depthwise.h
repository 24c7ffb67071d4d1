// Depthwise convolution: forward, grad_input, grad_weight and grad_bias, for any number of spatial dimensions, kernel,
// stride, dilation, padding and channel multiplier, in both layouts and four dtypes.
//
// The idea: a vector holds one pixel of several channels. In channels_last such vectors lie in the tensor, and small
// kernels read them there. Else (contiguous tensors, 16-bit storage, multipliers, large kernels) each work unit packs
// the tile of its operands into scratch memory [vector][pixel][lane] that stays in the cache, converted and with the
// columns of padding written out. Either way the kernels see a `Source`: pixels at a fixed pitch. Result positions
// that the same kernel elements reach form a zone, and a zone is one run of `correlate` or `accumulate` (kernels.h):
// borders, strides and dilation are nothing but zones. What does not change from unit to unit (packed weights, the
// zones of a row and their taps, the zeros around a tile) is kept in a thread's `Scratch`.
#pragma once

#include "kernels.h"
#include "packing.h"
#include "parallel.h"

namespace {

// Pixels that a kernel can read: positions [low, high) in each dimension, at these steps in elements.
template <class T>
struct Source {
  const T* data;  // of position 0, which need not be among them
  Range range[3];
  int64_t step[3];
  int64_t lane;  // from lane to lane: a whole vector lies together, the next one where this says
};

// S: storage, T: arithmetic, N: lanes of a vector.
template <class S, class T, int N>
struct Depthwise {
  static constexpr bool kConverts = sizeof(S) != sizeof(T);
  static constexpr auto kRuns = std::make_integer_sequence<int, kMostSums>();
  static constexpr auto kTaps = std::make_integer_sequence<int, kMostTaps * kMostTaps>();
  // Larger blocks of planes are left to the processor's own prefetching.
  static constexpr int64_t kPrefetchBytes = 16 * 1024;
  // From this kernel width on, grad_weight takes one kernel row at a time.
  static constexpr int64_t kWideKernel = 6;
  // Pixels of a row group: enough to amortise a call, few enough for the first-level cache.
  static constexpr int64_t kGroupPixels = 64, kGroupVectors = 256;

  const Plan& p;
  const convgrad_tensors& t;

  // A zone of a row of results.
  struct Columns {
    int64_t first;   // position relative to the tile
    int64_t pixels;  // of the phase
    int64_t source;  // element offset of the first one's source position
    Reach reach;
    const Tap* taps;
  };
  // The zones of a row and the taps of each, kept from unit to unit: small images would spend their time on them.
  struct Listed {
    Columns* columns;
    Tap* taps;
    int64_t zones, band;  // of the columns; band -1: not listed yet
    Reach depth, row;     // that the taps belong to; row.count -1: not listed yet
  };
  // Scratch memory of one thread.
  struct Scratch {
    T *input, *grad_output, *weight, *start, *sums, *result;
    Tap* taps;  // of accumulate
    Listed listed;
    int64_t packed_weight;  // the first channel of the block that `weight` holds
    int64_t tile;           // that the packed operands belong to
    bool infinite_weight, infinite_sums;
    // Infinity times a zero of the padding is NaN: where there may be one, the sums leave the padding out.
    bool careful() const { return infinite_weight || infinite_sums; }
  };

  // ---- operands ----

  Tensor input_tensor() const { return {{p.axis[0].input, p.axis[1].input, p.axis[2].input}, p.channels, 0, 1}; }
  Tensor output_tensor(int64_t m) const {
    return {{p.axis[0].output, p.axis[1].output, p.axis[2].output}, p.channels * p.multiplier, m, p.multiplier};
  }

  // Pack a tile, or look at the tensor itself. `again`: the scratch memory holds the same tile of another image or
  // block, and so its borders.
  Source<T> source(const void* tensor, const Tensor& x, const Block& b, T* scratch, const int64_t extent[3],
                   const Range r[3], bool again, bool careful) const {
    Source<T> s;
    if (p.direct) {
      s.step[2] = x.width, s.step[1] = x.size[2] * s.step[2], s.step[0] = x.size[1] * s.step[1];
      s.data = static_cast<const T*>(tensor) + b.image * x.size[0] * s.step[0];
      s.lane = 1;
      for (int d = 0; d < 3; ++d) s.range[d] = {0, x.size[d]};
      return s;
    }
    // Rows of zeros are left out of the sums, except where they let grad_weight run over whole tiles.
    const bool skip = !p.wants(CONVGRAD_GRAD_WEIGHT) || p.axis[2].kernel >= kWideKernel;
    using Pack = Packing<const S, T, N>;
    const auto zeros = again ? Pack::kNoBorders : skip ? Pack::kColumns : Pack::kColumnsAndRows;
    Pack::pack(scratch, extent, static_cast<const S*>(tensor), x, b, r, p.channels_last, zeros);
    s.step[2] = N, s.step[1] = extent[2] * s.step[2], s.step[0] = extent[1] * s.step[1];
    s.lane = Plan::tile_pixels(extent), s.data = scratch;
    for (int d = 0; d < 3; ++d) {
      s.range[d] = r[d], s.data -= r[d].low * s.step[d];
      if (careful || (skip && d < 2)) s.range[d] = {most(r[d].low, 0), most(0, least(r[d].high, x.size[d]))};
    }
    return s;
  }

  // Weights and sums of a block are rows of lanes, [multiplier][kernel element][lane], as the operands are pixels of
  // lanes: in tensors all lanes of a row lie together, in scratch memory all rows of a vector of lanes do.
  int64_t pitch() const { return p.direct ? p.lanes : N; }
  int64_t rows_of_sums() const { return p.multiplier * (p.kernel_elements + 1); }  // grad_weight, then grad_bias
  int64_t lane_in(int64_t rows, int64_t lane) const { return p.direct ? lane : lane / N * rows * N + lane % N; }

  // Weights, and what sums start from, [multiplier][lane].
  void pack_weight(Scratch& s, const Block& b) const {
    if (s.packed_weight == b.channel) return;
    s.packed_weight = b.channel;
    const S *from = static_cast<const S*>(t.weight), *bias = static_cast<const S*>(t.bias);
    const int64_t bias_step = p.wants(CONVGRAD_FORWARD) ? p.multiplier : 1;
    const int64_t live = p.images > 1 ? p.images * p.channels : least(p.lanes, p.channels - b.channel);
    for (int64_t m = 0; m < p.multiplier; ++m) {
      T *to = s.weight + m * p.kernel_elements * pitch(), *start = s.start + m * p.lanes;
      if (p.lanes == N) {  // a channel's weights are packed like a plane of pixels, the same one for each image
        const S* lane[N];
        const Tensor weights = {{1, 1, p.kernel_elements}, 0, m, p.multiplier};
        Packing<const S, T, N>::planes(from, weights, {b.channel, 0, live, N, b.channels_per_image}, lane);
        Packing<const S, T, N>::pack_planes(to, lane, live, 0, p.kernel_elements, p.kernel_elements, 0);
      }
      for (int64_t l = 0; l < p.lanes; ++l) {
        const int64_t c = b.channel + (p.images > 1 ? l % b.channels_per_image : l);
        const S* w = from + (c * p.multiplier + m) * p.kernel_elements;
        for (int64_t k = 0; k < p.kernel_elements && p.lanes > N; ++k)
          to[k * pitch() + lane_in(p.multiplier * p.kernel_elements, l)] = l < live ? load_one<T>(w + k) : T(0);
        start[l] = bias && l < live ? load_one<T>(bias + c * bias_step + m % bias_step) : T(0);
      }
    }
    s.infinite_weight = !p.direct && !all_finite<T, N>(s.weight, p.weight_size());
  }

  // The taps of a zone, from the reaches of its three dimensions, and of all multipliers of the source. Kernel rows
  // come outermost: the taps of fewer kernel rows are a part of the list. Within a row they ascend in the source.
  int64_t list_taps(Tap* taps, const Reach& d, const Reach& h, const Reach& w, const int64_t step[3],
                    int64_t multiplier) const {
    int64_t n = 0;
    for (int64_t j = 0; j < h.count; ++j)
      for (int64_t m = 0; m < multiplier; ++m)
        for (int64_t i = 0; i < d.count; ++i) {
          const int64_t row = m * p.output_size() + (d.offset + i * d.offset_step) * step[0] +
                              (h.offset + j * h.offset_step) * step[1];
          const int64_t element = (((m * p.axis[0].kernel + d.first + i * d.step) * p.axis[1].kernel) + h.first +
                                   j * h.step) * p.axis[2].kernel;
          for (int64_t i = 0; i < w.count; ++i) {
            const int64_t k = w.offset_step < 0 ? w.count - 1 - i : i;
            taps[n++] = {row + (w.offset + k * w.offset_step) * step[2], (element + w.first + k * w.step) * pitch()};
          }
        }
    return n;
  }

  // ---- forward and grad_input, on one tile ----

  // The zones of a row: for grad_input, each remainder of the column by the stride has its own.
  void list_columns(Listed& listed, Range result, const Source<T>& source, bool backward) const {
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
  Line line(int d, int64_t position, int64_t positions, const Source<T>& source, bool backward) const {
    const Axis& a = p.axis[d];
    const int64_t base = backward ? a.quotient(position) : position * a.stride, step = backward ? 1 : a.stride;
    const Reach all = backward ? a.backward_reach(a.remainder(position)) : a.forward_reach();
    const Zone z = zone_at(all, base, step, source.range[d].low, source.range[d].high, positions);
    return {all, z.reach, z.positions, base * source.step[d], step * source.step[d]};
  }

  // Results of one slice of a tile.
  struct Slice {
    const Source<T>& source;
    const T* from;  // where the slice's kernel elements begin in the source, but for the row and the column
    bool backward;
    int64_t m, pixel, step, row;  // steps of the results, in elements: column, column of a zone, row of a zone
    Reach depth;
  };

  // Rows of a tile that stay in the first-level cache while every vector of lanes is taken in turn.
  static int64_t rows_together(int64_t pixels) { return most(1, kGroupVectors / most(1, pixels)); }

  void correlate_tile(Scratch& s, const Block& b, const Range result[3], int64_t band, bool backward, int64_t m,
                      const Source<T>& source, S* out, const Tensor& x) const {
    if (result[0].size() == 0 || result[1].size() == 0 || result[2].size() == 0) return;
    const bool in_place = p.channels_last && x.step == 1;  // results are stored where they belong
    const Axis* a = p.axis;
    const int64_t width = result[2].size(), pitch = in_place ? x.width : b.lanes;
    // Rows taken together. In a tensor they are as many as need no second list of taps.
    const bool whole_rows = p.direct ? !backward || a[1].stride == 1 : in_place || width == x.size[2];
    const int64_t group = !whole_rows ? 1 : p.direct ? result[1].size() : rows_together(in_place ? 4 * width : width);
    if (s.listed.band != band || s.careful()) {
      list_columns(s.listed, result[2], source, backward);
      s.listed.band = s.careful() ? -1 : band, s.listed.row.count = -1;
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
            correlate_rows(s, slice, rows, phases, to, b.live, p.direct);
          } else {
            correlate_rows(s, slice, rows, phases, s.result + phase * width * pitch, round_up(b.live, N), false);
          }
        }
        if (!in_place)
          Packing<S, T, N>::unpack(out, s.result, x, b, pixel, (high - low) * width, p.channels_last);
      }
    }
  }

  // Every `step`-th row of a range.
  template <class To>
  void correlate_rows(Scratch& s, const Slice& slice, Range rows, int64_t step, To* to, int64_t live,
                      bool whole) const {
    const int64_t multiplier = slice.backward ? p.multiplier : 1;
    const int64_t per_column = slice.depth.count * multiplier;  // taps of one kernel row, for each kernel column
    Run<T, To> run;
    const int64_t source_step = slice.backward ? 1 : p.axis[2].stride;  // in columns
    run.weight = s.weight + slice.m * p.kernel_elements * pitch(), run.start = s.start + slice.m * p.lanes;
    run.source_lane = slice.source.lane, run.weight_lane = p.direct ? 1 : p.multiplier * p.kernel_elements;
    Line h;
    for (; rows.low < rows.high; rows.low += h.positions * step) {
      h = line(1, rows.low, ceil_div(rows.high - rows.low, step), slice.source, slice.backward);
      if (!s.careful()) list_taps(s.listed, slice, h.all, multiplier);
      // In a tensor few rows are taken at a time, and those one by one, as they lie in memory.
      for (int64_t i = 0, now; i < h.positions; i += now, to += now * slice.row) {
        now = p.direct ? least(h.positions - i, kMostSums) : h.positions;
        const T* from = slice.from + h.source + i * h.source_step;
        for (const Columns* c = s.listed.columns; c != s.listed.columns + s.listed.zones; ++c) {
          run.result = to + c->first * slice.pixel, run.source = from + c->source;
          if (s.careful())  // no more zones than these fit the list
            list_taps(s.listed.taps, slice.depth, h.reach, c->reach, slice.source.step, multiplier);
          run.taps = s.careful() ? s.listed.taps : c->taps + h.skipped() * per_column * c->reach.count;
          run.count = h.reach.count * per_column * c->reach.count;
          run.along = c->reach.offset_step * c->reach.offset_step == source_step * source_step ? c->reach.count : 1;
          run.rows = now, run.result_row = slice.row, run.source_row = h.source_step;
          run.result_step = slice.step, run.source_step = source_step * slice.source.step[2];
          if (whole)
            correlate_in_tensor(run, c->pixels, live);
          else
            correlate_all<T, N, To>(run, c->pixels, live, false, kRuns);
        }
      }
    }
  }

  // Rows in a tensor, one by one; but a border of few columns along the column, as its sums would wait for each other.
  template <class To>
  void correlate_in_tensor(Run<T, To> run, int64_t pixels, int64_t live) const {
    const int64_t rows = run.rows;
    if (pixels < least(rows, 4)) {
      std::swap(run.result_step, run.result_row), std::swap(run.source_step, run.source_row);
      run.rows = pixels, run.along = 1;
      return correlate_all<T, N, To>(run, rows, live, true, kRuns);
    }
    run.rows = 1;
    for (int64_t i = 0; i < rows; ++i, run.result += run.result_row, run.source += run.source_row)
      correlate_all<T, N, To>(run, pixels, live, true, kRuns);
  }

  // The taps of all zones of a row, unless they are listed already.
  void list_taps(Listed& listed, const Slice& slice, const Reach& row, int64_t multiplier) const {
    if (same(listed.row, row) && same(listed.depth, slice.depth)) return;
    listed.row = row, listed.depth = slice.depth;
    Tap* taps = listed.taps;
    for (Columns* c = listed.columns; c != listed.columns + listed.zones; ++c) {
      c->taps = taps;
      taps += list_taps(taps, slice.depth, row, c->reach, slice.source.step, multiplier);
    }
  }

  // ---- grad_weight, on one tile ----

  void accumulate_tile(const Scratch& s, const Block& b, const Range o[3], int64_t m, const Source<T>& grad,
                       const Source<T>& input) const {
    const Axis* a = p.axis;
    const int64_t pixels = most(1, o[2].size() * least(o[0].size(), 4));
    const int64_t group = p.direct ? most(1, kGroupPixels / pixels) : rows_together(pixels);
    Rows<T> rows;
    rows.grad_slice = grad.step[0], rows.grad_row = grad.step[1], rows.grad_pixel = grad.step[2];
    rows.input_slice = a[0].stride * input.step[0], rows.input_row = a[1].stride * input.step[1];
    rows.input_pixel = a[2].stride * input.step[2], rows.tap_step = a[2].dilation * input.step[2];
    // In a tensor all lanes of a pixel lie together, in scratch memory all pixels of a vector do.
    const int64_t together = p.direct ? b.live : N;
    for (Range lanes = {0, 0}; lanes.low < b.live; lanes.low = lanes.high) {
      lanes.high = least(b.live, lanes.low + together);
      auto add = [&](Range d, Range r, const Reach& kd, const Reach& kh) {
        accumulate_columns(s, b, lanes, rows, d, r, o[2], kd, kh, m, grad, input);
      };
      for (int64_t h = o[1].low; h < o[1].high; h += group) {
        const Range in_group = {h, least(o[1].high, h + group)};
        if (a[2].kernel >= kWideKernel)
          each_kernel_row(o[0], in_group, input, add);
        else
          each_zone(o[0], in_group, input, add);
      }
    }
    if (p.wants(CONVGRAD_GRAD_BIAS)) sum_tile(s, b, o, m, grad, grad.data + m * p.output_size());
  }

  // The bias gradient of one tile: a sum over pixels.
  void sum_tile(const Scratch& s, const Block& b, const Range r[3], int64_t m, const Source<T>& source,
                const T* data) const {
    Rows<T> rows = {};
    rows.depth = r[0].size(), rows.rows = r[1].size(), rows.pixels = r[2].size();
    rows.grad_slice = source.step[0], rows.grad_row = source.step[1], rows.grad_pixel = source.step[2];
    data += r[0].low * source.step[0] + r[1].low * source.step[1] + r[2].low * source.step[2];
    T* sums = s.sums + (p.multiplier * p.kernel_elements + m) * pitch();
    for (int64_t lane = 0; lane < b.live; lane += N) {
      rows.grad = data + vector_at(b, lane) * source.lane;
      sum_rows<T, N>(sums + lane_in(rows_of_sums(), lane), rows);
    }
  }

  // Rows that the same kernel elements reach, with all of these at once.
  template <class Function>
  void each_zone(Range od, Range oh, const Source<T>& input, Function&& function) const {
    for (Zone d; od.low < od.high; od.low += d.positions) {
      d = zone(0, od.low, od.high, input);
      Range r = oh;
      for (Zone h; r.low < r.high; r.low += h.positions) {
        h = zone(1, r.low, r.high, input);
        function(Range{od.low, od.low + d.positions}, Range{r.low, r.low + h.positions}, d.reach, h.reach);
      }
    }
  }

  // Kernel rows, each with all rows of the image that it reaches: better for wide kernels, whose sums fill the
  // registers.
  template <class Function>
  void each_kernel_row(Range od, Range oh, const Source<T>& input, Function&& function) const {
    const Axis *ad = &p.axis[0], *ah = &p.axis[1];
    for (int64_t kd = 0; kd < ad->kernel; ++kd) {
      const Range d = ad->output_reached_by(kd, input.range[0], od);
      for (int64_t kh = 0; kh < ah->kernel && d.size(); ++kh) {
        const Range h = ah->output_reached_by(kh, input.range[1], oh);
        if (h.size())
          function(d, h, Reach{kd, 1, kd * ad->dilation - ad->padding, 0, 1},
                   Reach{kh, 1, kh * ah->dilation - ah->padding, 0, 1});
      }
    }
  }

  void accumulate_columns(const Scratch& s, const Block& b, Range lanes, Rows<T>& rows, Range d, Range h, Range w,
                          const Reach& kd, const Reach& kh, int64_t m, const Source<T>& grad,
                          const Source<T>& input) const {
    T* sums = s.sums + m * p.kernel_elements * pitch();
    rows.depth = d.size(), rows.rows = h.size();
    for (; w.low < w.high; w.low += rows.pixels) {
      const Zone in_w = zone(2, w.low, w.high, input);
      rows.pixels = in_w.positions;
      const int64_t count = list_taps(s.taps, kd, kh, in_w.reach, input.step, 1), along = in_w.reach.count;
      const T* grad_at =
          grad.data + m * p.output_size() + d.low * grad.step[0] + h.low * grad.step[1] + w.low * grad.step[2];
      const T* input_at = input.data + d.low * rows.input_slice + h.low * rows.input_row + w.low * rows.input_pixel;
      for (int64_t lane = lanes.low; lane < lanes.high; lane += N) {
        rows.grad = grad_at + vector_at(b, lane) * grad.lane, rows.input = input_at + vector_at(b, lane) * input.lane;
        accumulate_all<T, N>(sums + lane_in(rows_of_sums(), lane), s.taps, count / most(1, along), along, rows, kTaps);
      }
    }
  }

  Zone zone(int d, int64_t position, int64_t end, const Source<T>& input) const {
    const Axis& a = p.axis[d];
    return zone_at(a.forward_reach(), position * a.stride, a.stride, input.range[d].low, input.range[d].high,
                   end - position);
  }

  // The channel with which the vector at a lane begins: read directly, the last vector ends with the last channel.
  int64_t vector_at(const Block& b, int64_t lane) const { return p.direct ? least(lane, b.live - N) : lane; }

  // ---- units, items, threads ----

  // A work unit: which lanes of which images, which tile of them.
  struct Unit {
    int64_t block, images, tile;
  };

  // The unit after this one. grad_weight stays with a block, whose sums it keeps; else units come as they lie in
  // memory.
  Unit after(Unit u) const {
    if (++u.tile < p.tiles) return u;
    u.tile = 0;
    if (p.wants(CONVGRAD_GRAD_WEIGHT)) return {u.block, u.images + 1, 0};
    if (++u.block < p.lane_blocks) return u;
    return {0, u.images + 1, 0};
  }

  void run_unit(Scratch& s, const Unit& unit) const {
    Block b = {unit.block * p.lanes, unit.images * p.images, 0, p.lanes, p.images > 1 ? p.channels : p.lanes};
    b.live = p.images > 1 ? least(p.images, p.batch - b.image) * p.channels : least(p.lanes, p.channels - b.channel);
    Range output[3], input_result[3], input[3], grad_output[3], summed[3];
    const int64_t band = p.tiles == 1 ? 0 : unit.tile % p.bands[2];
    int64_t tile = unit.tile;
    for (int d = 2; d >= 0; --d) {
      const Span span = p.span(d, p.tiles == 1 ? 0 : tile % p.bands[d]);
      output[d] = span.output, input_result[d] = span.grad_input;
      input[d] = span.input, grad_output[d] = span.grad_output, summed[d] = span.summed;
      if (p.tiles > 1) tile /= p.bands[d];
    }
    const bool again = s.tile == unit.tile;
    s.tile = unit.tile;
    if (p.needs_weight()) pack_weight(s, b);
    Source<T> x = {}, g = {};
    if (p.needs_input()) x = source(t.input, input_tensor(), b, s.input, p.input_extent, input, again, s.careful());
    if (p.needs_grad_output())
      for (int64_t m = p.multiplier - 1; m >= 0; --m)
        g = source(t.grad_output, output_tensor(m), b, s.grad_output + m * p.output_size(), p.output_extent,
                   grad_output, again, s.careful());
    if (p.wants(CONVGRAD_TRANSPOSED_GRAD_BIAS)) sum_tile(s, b, summed, 0, x, x.data);
    prefetch(after(unit));
    for (int64_t m = 0; m < p.multiplier; ++m) {
      if (p.wants(CONVGRAD_FORWARD))
        correlate_tile(s, b, output, band, false, m, x, static_cast<S*>(t.forward), output_tensor(m));
      if (p.wants(CONVGRAD_GRAD_WEIGHT)) accumulate_tile(s, b, output, m, g, x);
    }
    if (p.wants(CONVGRAD_GRAD_INPUT))
      correlate_tile(s, b, input_result, band, true, 0, g, static_cast<S*>(t.grad_input), input_tensor());
  }

  // Planes of a few lines are too short for the processor to see that they follow one another: ask for the next unit's,
  // to read and to write, before this one's arithmetic.
  void prefetch(const Unit& next) const {
    if (p.channels_last || p.tiles > 1 || next.images >= p.image_blocks) return;
    if (p.needs_input()) ask_for<0>(t.input, input_tensor(), next);
    if (p.needs_grad_output()) ask_for<0>(t.grad_output, output_tensor(0), next);
    if (p.wants(CONVGRAD_FORWARD)) ask_for<1>(t.forward, output_tensor(0), next);
    if (p.wants(CONVGRAD_GRAD_INPUT)) ask_for<1>(t.grad_input, input_tensor(), next);
  }
  template <int Write>
  void ask_for(const void* tensor, const Tensor& x, const Unit& unit) const {
    const int64_t channel = unit.block * p.lanes, image = unit.images * p.images;
    const int64_t channels =
        p.images > 1 ? p.channels * least(p.images, p.batch - image) : least(p.lanes, p.channels - channel);
    const int64_t plane = x.pixels() * x.step * int64_t(sizeof(S)), bytes = channels * plane;
    if (bytes > kPrefetchBytes) return;
    const char* at = static_cast<const char*>(tensor) + (image * p.channels + channel) * plane;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, Write);
    asm volatile("");  // else the compiler finds that nothing here has an effect, and leaves it out
  }

  // Units that follow one another. For grad_weight they are of one lane block, and `partial` receives the item's sums.
  void run_item(Scratch& s, int64_t item, T* partial) const {
    const bool sums = p.wants(CONVGRAD_GRAD_WEIGHT);
    const int64_t block = sums ? item / p.segments : 0, segment = sums ? item % p.segments : item;
    const int64_t units = p.units() * (sums ? 1 : p.lane_blocks);
    const int64_t first = units * segment / p.segments, last = units * (segment + 1) / p.segments;
    s.infinite_sums = false;
    for (;;) {
      if (sums) {
        s.sums = partial + item * p.sums_size();
        memset(s.sums, 0, sizeof(T) * static_cast<size_t>(p.sums_size()));
      }
      Unit unit = {block, first / p.tiles, first % p.tiles};
      if (!sums) unit.block = unit.images % p.lane_blocks, unit.images /= p.lane_blocks;
      for (int64_t i = first; i < last; ++i, unit = after(unit)) run_unit(s, unit);
      if (!sums || p.direct || s.careful() || all_finite<T, N>(s.sums, p.sums_size())) return;
      s.infinite_sums = true;  // once more
    }
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
    partial += block * p.segments * p.sums_size() + lane_in(rows_of_sums(), lane);
    for (int64_t row = 0; row < rows; ++row) {
      Vec<T, N> total = {};
      for (int64_t segment = 0; segment < p.segments; ++segment)
        total += load<T, N>(partial + segment * p.sums_size() + row * pitch());
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

  // ---- memory ----

  static constexpr int64_t kAlign = 64;
  struct Sizes {
    int64_t input, grad_output, weight, start, result, columns, listed, taps, thread, partial, total;
  };
  static Sizes sizes(const Plan& p) {
    auto bytes = [](int64_t elements, int64_t size) { return round_up(elements * size, kAlign); };
    Sizes z;
    const Axis& w = p.axis[2];
    const int64_t row = most(most(w.input, w.output), kGroupVectors);
    // A border of the source changes the zone at most twice a kernel element and phase.
    const int64_t phases = least(w.stride, w.input), zones = most(1, phases) + 2 * w.kernel;
    z.input = bytes(p.input_size(), sizeof(T));
    z.grad_output = bytes(p.output_size() * p.multiplier, sizeof(T));
    z.weight = p.needs_weight() ? bytes(p.weight_size(), sizeof(T)) : 0;
    z.start = p.needs_weight() ? bytes(p.multiplier * p.lanes, sizeof(T)) : 0;
    z.result = p.needs_weight() && !p.direct ? bytes(row * p.lanes, sizeof(T)) : 0;
    z.columns = p.needs_weight() ? bytes(zones, sizeof(Columns)) : 0;
    z.listed = p.needs_weight() ? bytes(p.multiplier * p.kernel_elements * (p.direct ? zones : 1), sizeof(Tap)) : 0;
    z.taps = p.wants(CONVGRAD_GRAD_WEIGHT) ? bytes(p.kernel_elements, sizeof(Tap)) : 0;
    z.thread = z.input + z.grad_output + z.weight + z.start + z.result + z.columns + z.listed + z.taps;
    z.partial = p.wants(CONVGRAD_GRAD_WEIGHT) ? bytes(p.lane_blocks * p.segments * p.sums_size(), sizeof(T)) : 0;
    z.total = z.thread * p.threads + z.partial + kAlign;
    return z;
  }

  static int64_t workspace(const convgrad_problem& q) { return sizes(make_plan(q, N, sizeof(T), kConverts)).total; }

  static int32_t run(const convgrad_problem& q, const convgrad_tensors& t, char* memory, int64_t bytes) {
    const Plan p = make_plan(q, N, sizeof(T), kConverts);
    const Sizes z = sizes(p);
    if (bytes < z.total) return 1;
    memory += (kAlign - reinterpret_cast<uintptr_t>(memory) % kAlign) % kAlign;
    const Depthwise call = {p, t};
    T* partial = reinterpret_cast<T*>(memory + z.thread * p.threads);
    const int64_t items = p.items();
    const int threads = static_cast<int>(most(1, least(p.threads, items)));  // an empty batch has no items
    auto scratch = [&](int64_t thread) {
      char* at = memory + z.thread * thread;
      Scratch s = {};
      s.input = reinterpret_cast<T*>(at), at += z.input;
      s.grad_output = reinterpret_cast<T*>(at), at += z.grad_output;
      s.weight = reinterpret_cast<T*>(at), at += z.weight;
      s.start = reinterpret_cast<T*>(at), at += z.start;
      s.result = reinterpret_cast<T*>(at), at += z.result;
      s.listed.columns = reinterpret_cast<Columns*>(at), at += z.columns;
      s.listed.taps = reinterpret_cast<Tap*>(at), at += z.listed;
      s.listed.band = -1;
      s.taps = reinterpret_cast<Tap*>(at);
      s.packed_weight = s.tile = -1;
      return s;
    };
    const bool sums = p.wants(CONVGRAD_GRAD_WEIGHT);
    const int64_t in_block = p.lanes / N, vectors = ceil_div(p.channels, N);  // only the last block may lack some
    if (threads == 1) {  // no parallel region: also safe in a forked child
      Scratch s = scratch(0);
      for (int64_t item = 0; item < items; ++item) call.run_item(s, item, partial);
      for (int64_t i = 0; sums && i < vectors; ++i) call.reduce(i / in_block, i % in_block * N, partial);
      return 0;
    }
    Queue queue(items);
    on_threads(threads, [&](const Member& me) {
      Scratch s = scratch(me.number);
      for (int64_t item; queue.take(&item);) call.run_item(s, item, partial);
      if (!sums) return;
      me.wait_for_all();
      const Range mine = me.share_of(vectors);
      for (int64_t i = mine.low; i < mine.high; ++i) call.reduce(i / in_block, i % in_block * N, partial);
    });
    return 0;
  }
};

}  // namespace
