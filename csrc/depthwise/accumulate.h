// The tile of depthwise grad_weight and grad_bias: pixels that the same kernel elements reach are one block of rows for
// `accumulate`.
#pragma once

#include "operands.h"

namespace {

// T: arithmetic, X: of the operands, as packed or as they lie in the tensors, N: lanes of a vector.
template <class T, class X, int N>
struct DepthwiseAccumulate {
  static constexpr int64_t kShortRow = 12;  // pixels
  using Scratch = DepthwiseScratch<T>;

  const DepthwisePlan& p;

  void tile(Scratch& s, const Block& b, const Range o[3], int64_t m, const Source<X>& grad,
            const Source<X>& input) const {
    const Axis* a = p.axis;
    const int64_t pixels = most(1, o[2].size() * least(o[0].size(), 4));
    const int64_t group = most(1, (p.direct ? kTensorPixels : kScratchPixels) / pixels);
    Rows<X> rows;
    rows.prefetcher = &s.prefetcher;
    rows.grad_slice = grad.step[0], rows.grad_row = grad.step[1], rows.grad_pixel = grad.step[2];
    rows.input_slice = a[0].stride * input.step[0], rows.input_row = a[1].stride * input.step[1];
    rows.input_pixel = a[2].stride * input.step[2], rows.tap_step = a[2].dilation * input.step[2];
    // The columns that the first and the last kernel column reach. All that any reaches are summed together where
    // kernel columns are as far apart as the pixels, and pixels lack columns on one side only. Packed, whose padding is
    // written out, it is no faster.
    const Range first = a[2].output_reached_by(0, {0, a[2].input}, o[2]);
    const Range last = a[2].output_reached_by(a[2].kernel - 1, {0, a[2].input}, o[2]);
    const Window all = {{last.low, first.high}, first.low - last.low, first.high - last.high};
    const bool all_at_once = p.direct && a[2].dilation == a[2].stride && first.low <= last.high && all.columns.size();
    // Otherwise a border of few columns of a tensor is summed along the column: its sums are loaded and stored once.
    Range inner = {most(first.low, last.low), least(first.high, last.high)};
    if (!p.direct || !inner.size()) inner = o[2];
    // In a tensor all lanes of a pixel lie together, in scratch memory all pixels of a vector do.
    const int64_t together = p.direct ? b.live : N;
    for (Range lanes = {0, 0}; lanes.low < b.live; lanes.low = lanes.high) {
      lanes.high = least(b.live, lanes.low + together);
      auto sum_columns = [&](const Window& columns, int64_t rows_at_once) {
        auto add = [&](Range d, Range r, const TapRange& kd, const TapRange& kh) {
          accumulate_columns(s, b, lanes, rows, d, r, columns, kd, kh, m, grad, input);
        };
        for (int64_t h = o[1].low; h < o[1].high; h += rows_at_once) {
          const Range in_group = {h, least(o[1].high, h + rows_at_once)};
          if (prefetches_evenly(columns.columns.size())) prefetch_evenly(s, b, in_group, m, grad, input);
          if (p.by_kernel_row())
            each_kernel_row(o[0], in_group, input, add);
          else
            each_region(o[0], in_group, input, add);
        }
      };
      if (all_at_once) {
        sum_columns(all, group);
        continue;
      }
      sum_columns({inner, 0, 0}, group);
      if (o[2].low < inner.low) sum_columns({{o[2].low, inner.low}, 0, 0}, o[1].size());
      if (inner.high < o[2].high) sum_columns({{inner.high, o[2].high}, 0, 0}, o[1].size());
    }
    if (p.wants(CONVGRAD_GRAD_BIAS)) sum_tile(s, b, o, m, grad, grad.data + m * p.output_size());
  }

  // Columns of grad_output that are summed together. A row's first pixel lacks the first `left` kernel columns, the
  // next one a column less; the last pixel lacks the last `right` ones.
  struct Window {
    Range columns;
    int64_t left, right;
  };

  // The bias gradient of one tile: a sum over pixels.
  void sum_tile(const Scratch& s, const Block& b, const Range r[3], int64_t m, const Source<X>& source,
                const X* data) const {
    Rows<X> rows = {};
    rows.depth = r[0].size(), rows.rows = r[1].size(), rows.pixels = r[2].size();
    rows.grad_slice = source.step[0], rows.grad_row = source.step[1], rows.grad_pixel = source.step[2];
    data += r[0].low * source.step[0] + r[1].low * source.step[1] + r[2].low * source.step[2];
    T* sums = s.sums + (p.multiplier * p.kernel_elements + m) * p.pitch();
    for (int64_t lane = 0; lane < b.live; lane += N) {
      rows.grad = data + p.vector_at(b, lane) * source.lane;
      sum_rows<T, N>(sums + p.vector_in(p.rows_of_sums(), lane), rows);
    }
  }

  // Rows that the same kernel elements reach, with all of these at once.
  template <class Function>
  void each_region(Range od, Range oh, const Source<X>& input, Function&& function) const {
    for (Region d; od.low < od.high; od.low += d.positions) {
      d = region(0, od.low, od.high, input);
      Range r = oh;
      for (Region h; r.low < r.high; r.low += h.positions) {
        h = region(1, r.low, r.high, input);
        function(Range{od.low, od.low + d.positions}, Range{r.low, r.low + h.positions}, d.reach, h.reach);
      }
    }
  }

  // Kernel rows, each with all rows of the image that it reaches: better for wide kernels, whose sums fill the
  // registers.
  template <class Function>
  void each_kernel_row(Range od, Range oh, const Source<X>& input, Function&& function) const {
    const Axis *ad = &p.axis[0], *ah = &p.axis[1];
    for (int64_t kd = 0; kd < ad->kernel; ++kd) {
      const Range d = ad->output_reached_by(kd, input.range[0], od);
      for (int64_t kh = 0; kh < ah->kernel && d.size(); ++kh) {
        const Range h = ah->output_reached_by(kh, input.range[1], oh);
        if (h.size())
          function(d, h, TapRange{kd, 1, kd * ad->dilation - ad->padding, 0, 1},
                   TapRange{kh, 1, kh * ah->dilation - ah->padding, 0, 1});
      }
    }
  }

  void accumulate_columns(const Scratch& s, const Block& b, Range lanes, Rows<X>& rows, Range d, Range h,
                          const Window& window, const TapRange& kd, const TapRange& kh, int64_t m,
                          const Source<X>& grad, const Source<X>& input) const {
    T* sums = s.sums + m * p.kernel_elements * p.pitch();
    rows.depth = d.size(), rows.rows = h.size();
    Range w = window.columns;
    for (; w.low < w.high; w.low += rows.pixels) {
      const Region in_w = window.left || window.right ? Region{p.axis[2].forward_reach(), w.size()}
                                                    : region(2, w.low, w.high, input);
      // Strided, the loads alone keep the memory busy.
      const bool prefetches =
          p.direct && p.axis[2].stride == 1 && in_w.positions >= 4 && window.columns.size() <= kShortRow;
      rows.pixels = in_w.positions;
      rows.left = w.low == window.columns.low ? window.left : 0;
      rows.right = w.low + rows.pixels == w.high ? window.right : 0;
      const int64_t count = p.list_taps(s.taps, kd, kh, in_w.reach, input.step, 1), along = in_w.reach.count;
      const int64_t newest = count ? s.taps[count - 1].source : 0;  // what no row before has read
      const X* grad_at =
          grad.data + m * p.output_size() + d.low * grad.step[0] + h.low * grad.step[1] + w.low * grad.step[2];
      const X* input_at = input.data + d.low * rows.input_slice + h.low * rows.input_row + w.low * rows.input_pixel;
      for (int64_t lane = lanes.low; lane < lanes.high; lane += N) {
        const int64_t at = p.vector_at(b, lane);
        rows.grad = grad_at + at * grad.lane, rows.input = input_at + at * input.lane;
        if (prefetches) prefetch_short_rows(rows, grad_at, input_at + newest, lane, b.live);
        accumulate_all<T, N>(sums + p.vector_in(p.rows_of_sums(), lane), s.taps, count / most(1, along), along, rows);
      }
    }
  }

  // Returns whether the operands of the next group of rows are prefetched while this one is summed. Larger kernels read
  // a row once for each kernel row, and only one of these times from memory: prefetched evenly, it is busy all the
  // while.
  bool prefetches_evenly(int64_t pixels) const {
    return p.direct && p.kernel_elements > 9 && pixels > kShortRow && p.axis[0].output == 1;
  }
  // The next rows lie behind these, and behind an image's last rows lie the next image's first ones.
  void prefetch_evenly(Scratch& s, const Block& b, Range rows, int64_t m, const Source<X>& grad,
                  const Source<X>& input) const {
    const Axis &d = p.axis[0], &h = p.axis[1];
    const int64_t newest = (rows.high - 1) * h.stride + (h.kernel - 1) * h.dilation - h.padding + 1;
    const int64_t slice = (d.kernel - 1) * d.dilation - d.padding, size = sizeof(X);
    s.prefetcher.clear();
    s.prefetcher.add(grad.data + m * p.output_size() + rows.high * grad.step[1], rows.size() * grad.step[1] * size,
                     false);
    s.prefetcher.add(input.data + slice * input.step[0] + newest * input.step[1],
                rows.size() * h.stride * input.step[1] * size, false);
    s.prefetcher.within(rows.size() * p.axis[2].output * p.kernel_elements * ceil_div(b.live, N));
  }

  // Prefetch memory ahead of the pixels that a vector from `lane` on is summed over; `input`: of the row that no row
  // before has read. A group of short rows is most of an image: the next lines of all its pixels are read before any
  // other's. Behind the last line of the `live` lanes comes the group below.
  static void prefetch_short_rows(const Rows<X>& rows, const X* grad, const X* input, int64_t lane, int64_t live) {
    constexpr int64_t kLine = 64 / int64_t(sizeof(X)), kLines = 4;
    if (lane % kLine) return;
    lane += kLines * kLine;
    const int64_t groups = lane / live * rows.rows;
    grad += lane % live + groups * rows.grad_row, input += lane % live + groups * rows.input_row;
    for (int64_t i = 0; i < rows.rows; ++i, grad += rows.grad_row, input += rows.input_row)
      for (int64_t j = 0; j < rows.pixels; ++j) {
        __builtin_prefetch(grad + j * rows.grad_pixel, 0, 2);
        __builtin_prefetch(input + j * rows.input_pixel, 0, 2);
      }
    asm volatile("");  // else the compiler leaves out what has no effect
  }

  Region region(int d, int64_t position, int64_t end, const Source<X>& input) const {
    const Axis& a = p.axis[d];
    return region_at(a.forward_reach(), position * a.stride, a.stride, input.range[d].low, input.range[d].high,
                   end - position);
  }
};

}  // namespace
