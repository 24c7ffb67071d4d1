// Depthwise convolution: forward, grad_input, grad_weight and grad_bias, for any number of spatial dimensions, kernel,
// stride, dilation, padding and channel multiplier, in both layouts and four dtypes.
//
// The idea: a vector holds one pixel of several channels. In channels_last such vectors lie in the tensor. Elsewhere
// (contiguous tensors, 16-bit storage, multipliers, large kernels) each work unit packs the tile of its operands into
// scratch memory [pixel][lane] that stays in the cache, converted and with the padding written out. Either way the
// kernels see a `Source`: pixels at a fixed pitch. Result positions that the same kernel elements reach form a zone, and
// a zone is one run of `correlate` or `accumulate` (kernels.h): borders, strides and dilation are nothing but zones.
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
};

// S: storage, T: arithmetic, N: lanes of a vector.
template <class S, class T, int N>
struct Depthwise {
  static constexpr bool kConverts = sizeof(S) != sizeof(T);
  static constexpr auto kRuns = std::make_integer_sequence<int, kMostSums>();
  static constexpr auto kTaps = std::make_integer_sequence<int, kMostTaps>();
  // From this kernel width on, grad_weight takes one kernel row at a time.
  static constexpr int64_t kWideKernel = 5;
  // Pixels of a row group: enough to amortise a call, few enough for the first-level cache.
  static constexpr int64_t kGroupPixels = 64;

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
  // Scratch memory of one thread.
  struct Scratch {
    T *input, *grad_output, *weight, *start, *sums, *result;
    Columns* columns;
    Tap* taps;
    int64_t packed_weight;  // the first channel of the block that `weight` holds
    bool infinite_weight, infinite_sums;
    // Infinity times a zero of the padding is NaN: where there may be one, the sums leave the padding out.
    bool careful() const { return infinite_weight || infinite_sums; }
  };

  // ---- operands ----

  Tensor input_tensor() const { return {{p.axis[0].input, p.axis[1].input, p.axis[2].input}, p.channels, 0, 1}; }
  Tensor output_tensor(int64_t m) const {
    return {{p.axis[0].output, p.axis[1].output, p.axis[2].output}, p.channels * p.multiplier, m, p.multiplier};
  }

  // Pack a tile, or look at the tensor itself.
  Source<T> source(const void* tensor, const Tensor& x, const Block& b, T* scratch, const int64_t extent[3],
                   const Range r[3], bool careful) const {
    Source<T> s;
    if (p.direct) {
      s.step[2] = x.width, s.step[1] = x.size[2] * s.step[2], s.step[0] = x.size[1] * s.step[1];
      s.data = static_cast<const T*>(tensor) + b.image * x.size[0] * s.step[0];
      for (int d = 0; d < 3; ++d) s.range[d] = {0, x.size[d]};
      return s;
    }
    // Rows of zeros are left out of the sums, except where they let grad_weight run over whole tiles.
    const bool skip = !p.wants(CONVGRAD_GRAD_WEIGHT) || p.axis[2].kernel >= kWideKernel;
    Packing<const S, T, N>::pack(scratch, extent, static_cast<const S*>(tensor), x, b, r, p.channels_last, !skip);
    s.step[2] = b.lanes, s.step[1] = extent[2] * s.step[2], s.step[0] = extent[1] * s.step[1];
    s.data = scratch;
    for (int d = 0; d < 3; ++d) {
      s.range[d] = r[d], s.data -= r[d].low * s.step[d];
      if (careful || (skip && d < 2)) s.range[d] = {most(r[d].low, 0), most(0, least(r[d].high, x.size[d]))};
    }
    return s;
  }

  // Weights of a block, [multiplier][kernel element][lane], and what sums start from, [multiplier][lane].
  void pack_weight(Scratch& s, const Block& b) const {
    if (s.packed_weight == b.channel) return;
    s.packed_weight = b.channel;
    const S *from = static_cast<const S*>(t.weight), *bias = static_cast<const S*>(t.bias);
    const int64_t bias_step = p.wants(CONVGRAD_FORWARD) ? p.multiplier : 1;
    for (int64_t m = 0; m < p.multiplier; ++m)
      for (int64_t l = 0; l < p.lanes; ++l) {
        const int64_t c = b.channel + l % b.channels_per_image;
        const bool live = c < p.channels;
        const S* w = from + (c * p.multiplier + m) * p.kernel_elements;
        T* to = s.weight + m * p.kernel_elements * p.lanes + l;
        for (int64_t k = 0; k < p.kernel_elements; ++k) to[k * p.lanes] = live ? load_one<T>(w + k) : T(0);
        s.start[m * p.lanes + l] = bias && live ? load_one<T>(bias + c * bias_step + m % bias_step) : T(0);
      }
    s.infinite_weight = !p.direct && !all_finite<T, N>(s.weight, p.weight_size());
  }

  // The taps of a zone, from the reaches of its three dimensions, and of all multipliers of the source. Kernel rows come
  // outermost: the taps of fewer kernel rows are a part of the list.
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
          for (int64_t k = 0; k < w.count; ++k)
            taps[n++] = {row + (w.offset + k * w.offset_step) * step[2], (element + w.first + k * w.step) * p.lanes};
        }
    return n;
  }

  // ---- forward and grad_input, on one tile ----

  // The zones of a row: for grad_input, each remainder of the column by the stride has its own.
  int64_t list_columns(Columns* columns, Range result, const Source<T>& source, bool backward) const {
    const Axis& a = p.axis[2];
    const int64_t phases = backward ? least(a.stride, result.size()) : 1, step = backward ? 1 : a.stride;
    int64_t n = 0;
    for (int64_t phase = 0; phase < phases; ++phase) {
      const int64_t w = result.low + phase;
      const Reach reach = backward ? a.backward_reach(a.remainder(w)) : a.forward_reach();
      int64_t base = backward ? a.quotient(w) : w * a.stride, left = ceil_div(result.size() - phase, phases);
      for (int64_t at = phase; left > 0;) {
        const Zone z = zone_at(reach, base, step, source.range[2].low, source.range[2].high, left);
        columns[n++] = {at, z.positions, base * source.step[2], z.reach, nullptr};
        at += z.positions * phases, base += z.positions * step, left -= z.positions;
      }
    }
    return n;
  }

  // One position of the depth or row dimension: what could reach it, what does, and where in the source.
  struct Line {
    Reach all, reach;
    int64_t source;
    int64_t skipped() const { return reach.count ? (reach.first - all.first) / all.step : 0; }
  };
  static bool same(const Reach& a, const Reach& b) {
    return a.first == b.first && a.offset == b.offset && a.count == b.count;
  }
  Line line(int d, int64_t position, const Source<T>& source, bool backward) const {
    const Axis& a = p.axis[d];
    const int64_t base = backward ? a.quotient(position) : position * a.stride;
    const Reach all = backward ? a.backward_reach(a.remainder(position)) : a.forward_reach();
    return {all, zone_at(all, base, 1, source.range[d].low, source.range[d].high, 1).reach, base * source.step[d]};
  }

  void correlate_tile(const Scratch& s, const Block& b, const Range result[3], bool backward, int64_t m,
                      const Source<T>& source, S* out, const Tensor& x) const {
    if (result[0].size() == 0 || result[1].size() == 0 || result[2].size() == 0) return;
    const bool in_place = p.channels_last && x.step == 1;  // results are stored where they belong
    const int64_t width = result[2].size(), phases = backward ? least(p.axis[2].stride, width) : 1;
    const int64_t zones = list_columns(s.columns, result[2], source, backward);
    const int64_t multiplier = backward ? p.multiplier : 1;
    const int64_t group = width == x.size[2] ? most(1, kGroupPixels / width) : 1;
    Line last_d = {}, last_h = {};
    bool listed = false;
    for (int64_t d = result[0].low; d < result[0].high; ++d) {
      const Line in_d = line(0, d, source, backward);
      for (int64_t h = result[1].low; h < result[1].high; ++h) {
        const Line in_h = line(1, h, source, backward);
        if (!s.careful() && (!listed || !same(in_d.reach, last_d.reach) || !same(in_h.all, last_h.all))) {
          Tap* taps = s.taps;
          for (Columns* c = s.columns; c != s.columns + zones; ++c) {
            c->taps = taps;
            taps += list_taps(taps, in_d.reach, in_h.all, c->reach, source.step, multiplier);
          }
          last_d = in_d, last_h = in_h, listed = true;
        }
        const int64_t per_column = in_d.reach.count * multiplier;  // taps of one kernel row, for each kernel column
        const int64_t pixel = (d * x.size[1] + h) * x.size[2] + result[2].low;
        const int64_t row = (h - result[1].low) % group;
        const T *from = source.data + in_d.source + in_h.source, *weight = s.weight + m * p.kernel_elements * p.lanes;
        const T* start = s.start + m * p.lanes;
        for (const Columns* c = s.columns; c != s.columns + zones; ++c) {
          const Tap* taps = c->taps + in_h.skipped() * per_column * c->reach.count;
          if (s.careful()) list_taps(s.taps, in_d.reach, in_h.reach, c->reach, source.step, multiplier), taps = s.taps;
          const int64_t count = in_h.reach.count * per_column * c->reach.count;
          if (in_place) {
            S* to = out + (b.image * x.pixels() + pixel + c->first) * x.width + b.channel;
            correlate_all<T, N, S>({to, phases * x.width, from + c->source, source_step(backward) * source.step[2],
                                    weight, start, taps, count}, c->pixels, b.live, p.direct, kRuns);
          } else {
            T* to = s.result + (row * width + c->first) * b.lanes;
            correlate_all<T, N, T>({to, phases * b.lanes, from + c->source, source_step(backward) * source.step[2],
                                    weight, start, taps, count}, c->pixels, round_up(b.live, N), false, kRuns);
          }
        }
        if (!in_place && (row == group - 1 || h == result[1].high - 1))
          Packing<S, T, N>::unpack(out, s.result, x, b, pixel - row * width, (row + 1) * width, p.channels_last);
      }
    }
  }
  int64_t source_step(bool backward) const { return backward ? 1 : p.axis[2].stride; }

  // ---- grad_weight, on one tile ----

  void accumulate_tile(const Scratch& s, const Block& b, const Range o[3], int64_t m, const Source<T>& grad,
                       const Source<T>& input) const {
    const Axis* a = p.axis;
    const int64_t group = most(1, kGroupPixels / most(1, o[2].size()));
    Rows<T> rows;
    rows.grad_slice = grad.step[0], rows.grad_row = grad.step[1], rows.grad_pixel = grad.step[2];
    rows.input_slice = a[0].stride * input.step[0], rows.input_row = a[1].stride * input.step[1];
    rows.input_pixel = a[2].stride * input.step[2];
    for (int64_t h = o[1].low; h < o[1].high; h += group) {
      const Range in_group = {h, least(o[1].high, h + group)};
      if (a[2].kernel >= kWideKernel)
        each_kernel_row(o[0], in_group, input, [&](Range d, Range r, const Reach& kd, const Reach& kh) {
          accumulate_columns(s, b, rows, d, r, o[2], kd, kh, m, grad, input);
        });
      else
        each_zone(o[0], in_group, input, [&](Range d, Range r, const Reach& kd, const Reach& kh) {
          accumulate_columns(s, b, rows, d, r, o[2], kd, kh, m, grad, input);
        });
    }
    if (p.wants(CONVGRAD_GRAD_BIAS)) sum_tile(s, b, o, m, grad.data + m * p.output_size(), grad.step);
  }

  // The bias gradient of one tile: a sum over pixels.
  void sum_tile(const Scratch& s, const Block& b, const Range r[3], int64_t m, const T* data, const int64_t step[3]) const {
    Rows<T> rows = {};
    rows.depth = r[0].size(), rows.rows = r[1].size(), rows.pixels = r[2].size();
    rows.grad_slice = step[0], rows.grad_row = step[1], rows.grad_pixel = step[2];
    data += r[0].low * step[0] + r[1].low * step[1] + r[2].low * step[2];
    for (int64_t lane = 0; lane < b.live; lane += N) {
      rows.grad = data + vector_at(b, lane);
      sum_rows<T, N>(s.sums + p.weight_size() + m * p.lanes + lane, rows);
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

  // Kernel rows, each with all rows of the image that it reaches: better for wide kernels, whose sums fill the registers.
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

  void accumulate_columns(const Scratch& s, const Block& b, Rows<T>& rows, Range d, Range h, Range w, const Reach& kd,
                          const Reach& kh, int64_t m, const Source<T>& grad, const Source<T>& input) const {
    T* sums = s.sums + m * p.kernel_elements * p.lanes;
    rows.depth = d.size(), rows.rows = h.size();
    for (; w.low < w.high; w.low += rows.pixels) {
      const Zone in_w = zone(2, w.low, w.high, input);
      rows.pixels = in_w.positions;
      const int64_t count = list_taps(s.taps, kd, kh, in_w.reach, input.step, 1);
      const T* grad_at =
          grad.data + m * p.output_size() + d.low * grad.step[0] + h.low * grad.step[1] + w.low * grad.step[2];
      const T* input_at = input.data + d.low * rows.input_slice + h.low * rows.input_row + w.low * rows.input_pixel;
      for (int64_t lane = 0; lane < b.live; lane += N) {
        rows.grad = grad_at + vector_at(b, lane), rows.input = input_at + vector_at(b, lane);
        accumulate_all<T, N>(sums + lane, s.taps, count, rows, kTaps);
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

  // In which lane of the sums a block's channel is. Read directly, the last vector ends with the last channel, and
  // repeats channels of the vector before where the channels are no multiple of it.
  int64_t lane_of_channel(int64_t c, int64_t live) const {
    return p.direct && c >= live / N * N ? c + round_up(live, N) - live : c;
  }

  // ---- units, items, threads ----

  void run_unit(Scratch& s, Block b, int64_t unit) const {
    b.image = unit / p.tiles * p.images;
    b.live = p.images > 1 ? least(p.images, p.batch - b.image) * p.channels : least(p.lanes, p.channels - b.channel);
    Range output[3], input_result[3], input[3], grad_output[3], summed[3];
    int64_t tile = unit % p.tiles;
    for (int d = 2; d >= 0; --d) {
      const Span span = p.span(d, tile % p.bands[d]);
      output[d] = span.output, input_result[d] = span.grad_input;
      input[d] = span.input, grad_output[d] = span.grad_output, summed[d] = span.summed;
      tile /= p.bands[d];
    }
    if (p.needs_weight()) pack_weight(s, b);
    Source<T> x = {}, g = {};
    if (p.needs_input()) x = source(t.input, input_tensor(), b, s.input, p.input_extent, input, s.careful());
    if (p.needs_grad_output())
      for (int64_t m = p.multiplier - 1; m >= 0; --m)
        g = source(t.grad_output, output_tensor(m), b, s.grad_output + m * p.output_size(), p.output_extent, grad_output,
                   s.careful());
    if (p.wants(CONVGRAD_TRANSPOSED_GRAD_BIAS)) sum_tile(s, b, summed, 0, x.data, x.step);
    for (int64_t m = 0; m < p.multiplier; ++m) {
      if (p.wants(CONVGRAD_FORWARD))
        correlate_tile(s, b, output, false, m, x, static_cast<S*>(t.forward), output_tensor(m));
      if (p.wants(CONVGRAD_GRAD_WEIGHT)) accumulate_tile(s, b, output, m, g, x);
    }
    if (p.wants(CONVGRAD_GRAD_INPUT))
      correlate_tile(s, b, input_result, true, 0, g, static_cast<S*>(t.grad_input), input_tensor());
  }

  // A lane block and a share of its units; `partial` receives the item's sums.
  void run_item(Scratch& s, int64_t item, T* partial) const {
    const int64_t block = item / p.segments, segment = item % p.segments;
    const Block b = {block * p.lanes, 0, 0, p.lanes, p.images > 1 ? p.channels : p.lanes};
    const int64_t first = p.units() * segment / p.segments, last = p.units() * (segment + 1) / p.segments;
    s.infinite_sums = false;
    for (;;) {
      if (p.wants(CONVGRAD_GRAD_WEIGHT)) {
        s.sums = partial + item * p.sums_size();
        memset(s.sums, 0, sizeof(T) * static_cast<size_t>(p.sums_size()));
      }
      for (int64_t unit = first; unit < last; ++unit) run_unit(s, b, unit);
      if (p.direct || s.careful() || !p.wants(CONVGRAD_GRAD_WEIGHT) || all_finite<T, N>(s.sums, p.sums_size())) return;
      s.infinite_sums = true;  // once more
    }
  }

  // Add a lane block's partial sums, always in the same order, and write them in the weight's layout.
  void reduce(int64_t block, const T* partial) const {
    const int64_t first = block * p.lanes, live = least(p.images > 1 ? p.channels : p.lanes, p.channels - first);
    S *weight = static_cast<S*>(t.grad_weight), *bias = static_cast<S*>(t.grad_bias);
    const int64_t elements = p.multiplier * p.kernel_elements;
    const int64_t biases = p.wants(CONVGRAD_TRANSPOSED_GRAD_BIAS) ? 1 : p.multiplier;  // of a channel
    const int64_t rows = elements + (bias ? biases : 0);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t m = row < elements ? row / p.kernel_elements : row - elements;
      for (int64_t c = 0; c < live; ++c) {
        T sum = 0;
        for (int64_t segment = 0; segment < p.segments; ++segment)
          for (int64_t image = 0; image < p.images; ++image)
            sum += partial[(block * p.segments + segment) * p.sums_size() + row * p.lanes + image * live +
                           lane_of_channel(c, live)];
        if (row < elements)
          store_one<T>(weight + ((first + c) * p.multiplier + m) * p.kernel_elements + row % p.kernel_elements, sum);
        else
          store_one<T>(bias + (first + c) * biases + m, sum);
      }
    }
  }

  // ---- memory ----

  static constexpr int64_t kAlign = 64;
  struct Sizes {
    int64_t input, grad_output, weight, start, result, columns, taps, thread, partial, total;
  };
  static Sizes sizes(const Plan& p) {
    auto bytes = [](int64_t elements, int64_t size) { return round_up(elements * size, kAlign); };
    Sizes z;
    const Axis& w = p.axis[2];
    const int64_t row = most(most(w.input, w.output), kGroupPixels);
    // A border of the source changes the zone at most twice a kernel element and phase.
    const int64_t phases = least(w.stride, w.input), zones = most(1, phases) + 2 * w.kernel;
    z.input = bytes(p.input_size(), sizeof(T));
    z.grad_output = bytes(p.output_size() * p.multiplier, sizeof(T));
    z.weight = p.needs_weight() ? bytes(p.weight_size(), sizeof(T)) : 0;
    z.start = p.needs_weight() ? bytes(p.multiplier * p.lanes, sizeof(T)) : 0;
    z.result = p.needs_weight() && !p.direct ? bytes(row * p.lanes, sizeof(T)) : 0;
    z.columns = p.needs_weight() ? bytes(zones, sizeof(Columns)) : 0;
    z.taps = bytes(p.multiplier * p.kernel_elements * (p.direct ? zones : 1), sizeof(Tap));
    z.thread = z.input + z.grad_output + z.weight + z.start + z.result + z.columns + z.taps;
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
    const int64_t items = p.lane_blocks * p.segments;
    const int threads = static_cast<int>(least(p.threads, items));
    auto scratch = [&](int64_t thread) {
      char* at = memory + z.thread * thread;
      Scratch s = {};
      s.input = reinterpret_cast<T*>(at), at += z.input;
      s.grad_output = reinterpret_cast<T*>(at), at += z.grad_output;
      s.weight = reinterpret_cast<T*>(at), at += z.weight;
      s.start = reinterpret_cast<T*>(at), at += z.start;
      s.result = reinterpret_cast<T*>(at), at += z.result;
      s.columns = reinterpret_cast<Columns*>(at), at += z.columns;
      s.taps = reinterpret_cast<Tap*>(at);
      s.packed_weight = -1;
      return s;
    };
    const bool sums = p.wants(CONVGRAD_GRAD_WEIGHT);
    if (threads == 1) {  // no parallel region: also safe in a forked child
      Scratch s = scratch(0);
      for (int64_t item = 0; item < items; ++item) call.run_item(s, item, partial);
      for (int64_t block = 0; sums && block < p.lane_blocks; ++block) call.reduce(block, partial);
      return 0;
    }
    Queue queue(items);
    on_threads(threads, [&](const Member& me) {
      Scratch s = scratch(me.number);
      for (int64_t item; queue.take(&item);) call.run_item(s, item, partial);
      if (!sums) return;
      me.wait_for_all();
      const Range blocks = me.share_of(p.lane_blocks);
      for (int64_t block = blocks.low; block < blocks.high; ++block) call.reduce(block, partial);
    });
    return 0;
  }
};

}  // namespace
