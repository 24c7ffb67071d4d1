// Depthwise convolution: forward, grad_input, grad_weight and grad_bias, for any number of spatial dimensions, kernel,
// stride, dilation, padding and channel multiplier, in both layouts and four dtypes.
//
// The idea: a vector holds one pixel of several channels. Each work unit packs the tile of its operands that it needs
// into scratch memory [pixel][lane], converted to the arithmetic type and with the padding written out as zeros; then
// no kernel ever meets a border, a layout or a storage type. Two loops do all the arithmetic:
//
//   correlate   a run of result pixels, held in registers, sums over the kernel elements that reach it. grad_input is
//               the same loop: each remainder of the position by the stride is a small convolution of stride 1.
//   accumulate  a few kernel elements' sums, held in registers, run over the pixels of a tile.
//
// Both do one multiply-add per load; two loads a cycle are therefore the limit of the arithmetic, and the memory's
// bandwidth is the limit for small kernels.
#pragma once

#include "plan.h"
#include "vector.h"

namespace {

// A kernel element as the inner loop sees it.
struct Tap {
  int64_t source, weight;  // offsets in elements
};

// Most result pixels (and most kernel elements) whose sums stay in registers at once.
constexpr int kMostSums = 12;
constexpr int kMostTaps = 10;

// result[p] = start + sum over taps of source[p * source_step + tap] * weights[tap], for P pixels of one vector.
template <class T, int N, class S, int P>
void correlate(S* result, int64_t result_step, int64_t live, const T* source, int64_t source_step, const T* weights,
               const Tap* taps, int64_t count, Vec<T, N> start) {
  Vec<T, N> sum[P];
#pragma GCC unroll 12
  for (int p = 0; p < P; ++p) sum[p] = start;
  for (int64_t t = 0; t < count; ++t) {
    const Vec<T, N> w = load<T, N>(weights + taps[t].weight);
    const T* from = source + taps[t].source;
#pragma GCC unroll 12
    for (int p = 0; p < P; ++p) sum[p] += w * load<T, N>(from + p * source_step);
  }
#pragma GCC unroll 12
  for (int p = 0; p < P; ++p) store_first<T, N>(result + p * result_step, sum[p], live);
}

// A run of any number of pixels, in pieces of nearly equal size.
template <class T, int N, class S, int... P>
void correlate_run(S* result, int64_t result_step, int64_t live, const T* source, int64_t source_step,
                   const T* weights, const Tap* taps, int64_t count, Vec<T, N> start, int64_t pixels,
                   std::integer_sequence<int, P...>) {
  using Kernel = void (*)(S*, int64_t, int64_t, const T*, int64_t, const T*, const Tap*, int64_t, Vec<T, N>);
  static constexpr Kernel kernels[] = {correlate<T, N, S, P + 1>...};
  for (int64_t pieces = ceil_div(pixels, kMostSums); pieces > 0; --pieces) {
    const int64_t now = ceil_div(pixels, pieces);
    kernels[now - 1](result, result_step, live, source, source_step, weights, taps, count, start);
    result += now * result_step, source += now * source_step, pixels -= now;
  }
}

// What `accumulate` runs over: a block of rows of packed grad_output, and the first input pixel of the same rows.
template <class T>
struct Rows {
  const T *grad, *input;
  int64_t depth, rows, pixels;                       // extent
  int64_t grad_slice, grad_row, grad_pixel;          // steps in elements
  int64_t input_slice, input_row, input_pixel;
};

// sums[tap] += sum over pixels of grad * input[tap], for K kernel elements. Few elements take U pixels at once, so that
// enough independent sums hide the latency of an addition.
template <class T, int N, int K>
void accumulate(T* sums, int64_t sums_step, const Tap* taps, const Rows<T>& r) {
  constexpr int U = K == 1 ? 8 : K == 2 ? 4 : K <= 5 ? 2 : 1;
  Vec<T, N> sum[U][K] = {};
  int64_t offset[K];
#pragma GCC unroll 10
  for (int k = 0; k < K; ++k) offset[k] = taps[k].source;
  for (int64_t d = 0; d < r.depth; ++d) {
    for (int64_t h = 0; h < r.rows; ++h) {
      const T* grad = r.grad + d * r.grad_slice + h * r.grad_row;
      const T* input = r.input + d * r.input_slice + h * r.input_row;
      int64_t left = r.pixels;
      for (; left >= U; left -= U) {
#pragma GCC unroll 8
        for (int u = 0; u < U; ++u) {
          const Vec<T, N> g = load<T, N>(grad);
#pragma GCC unroll 10
          for (int k = 0; k < K; ++k) sum[u][k] += g * load<T, N>(input + offset[k]);
          grad += r.grad_pixel, input += r.input_pixel;
        }
      }
      for (; left > 0; --left) {
        const Vec<T, N> g = load<T, N>(grad);
#pragma GCC unroll 10
        for (int k = 0; k < K; ++k) sum[0][k] += g * load<T, N>(input + offset[k]);
        grad += r.grad_pixel, input += r.input_pixel;
      }
    }
  }
#pragma GCC unroll 10
  for (int k = 0; k < K; ++k) {
    Vec<T, N> total = sum[0][k];
#pragma GCC unroll 8
    for (int u = 1; u < U; ++u) total += sum[u][k];
    store<T, N>(sums + k * sums_step, load<T, N>(sums + k * sums_step) + total);
  }
}

template <class T, int N, int... K>
void accumulate_all(T* sums, int64_t sums_step, const Tap* taps, int64_t count, const Rows<T>& rows,
                    std::integer_sequence<int, K...>) {
  using Kernel = void (*)(T*, int64_t, const Tap*, const Rows<T>&);
  static constexpr Kernel kernels[] = {accumulate<T, N, K + 1>...};
  for (int64_t pieces = ceil_div(count, kMostTaps); pieces > 0; --pieces) {
    const int64_t now = ceil_div(count, pieces);
    kernels[now - 1](sums, sums_step, taps, rows);
    sums += now * sums_step, taps += now, count -= now;
  }
}

// ---- one call -------------------------------------------------------------------------------------------------------

// S: storage, T: arithmetic, N: lanes of a vector.
template <class S, class T, int N>
struct Depthwise {
  const Plan& p;
  const convgrad_tensors& t;

  // Scratch memory of one thread.
  struct Scratch {
    T *input, *grad_output, *weight, *sums, *result;
    Tap* taps;
    int64_t packed_weight;  // the lane block that `weight` holds
  };
  // The lanes of a work unit.
  struct Block {
    int64_t channel, image, live;  // first channel, first image, lanes in use
    int64_t index;
  };

  // ---- addresses ----

  // Element offset of channel `lane` of the block, at pixel 0, in a tensor of `width` channels and `pixels` pixels.
  // Lanes that are not in use get the address of the first one: they may be read, and count as zero.
  int64_t plane(const Block& b, int64_t lane, int64_t width, int64_t pixels, int64_t m, int64_t step) const {
    if (lane >= b.live) lane = 0;
    const int64_t image = b.image + lane / lanes_per_image(), channel = b.channel + lane % lanes_per_image();
    return (image * width + channel * step + m) * pixels;
  }
  int64_t lanes_per_image() const { return p.images > 1 ? p.channels : p.lanes; }

  // A tensor of the problem: input (m = 0, step = 1) or every step-th channel of grad_output / output.
  struct Tensor {
    int64_t size[3], width, m, step;
    int64_t pixels() const { return size[0] * size[1] * size[2]; }
  };
  Tensor input_tensor() const {
    return {{p.axis[0].input, p.axis[1].input, p.axis[2].input}, p.channels, 0, 1};
  }
  Tensor output_tensor(int64_t m) const {
    return {{p.axis[0].output, p.axis[1].output, p.axis[2].output}, p.channels * p.multiplier, m, p.multiplier};
  }

  // ---- packing ----

  void pack(T* to, const int64_t extent[3], const S* from, const Tensor& x, const Block& b, const Range r[3]) const {
    const Range w = r[2];
    const Range inside = {least(most(w.low, 0), w.high), most(least(w.high, x.size[2]), w.low)};
    for (int64_t d = r[0].low; d < r[0].high; ++d) {
      for (int64_t h = r[1].low; h < r[1].high; ++h) {
        T* row = to + ((d - r[0].low) * extent[1] + (h - r[1].low)) * extent[2] * p.lanes;
        const bool empty = d < 0 || d >= x.size[0] || h < 0 || h >= x.size[1] || inside.low >= inside.high;
        if (empty) {
          memset(row, 0, sizeof(T) * static_cast<size_t>(w.size() * p.lanes));
          continue;
        }
        memset(row, 0, sizeof(T) * static_cast<size_t>((inside.low - w.low) * p.lanes));
        memset(row + (inside.high - w.low) * p.lanes, 0, sizeof(T) * static_cast<size_t>((w.high - inside.high) * p.lanes));
        const int64_t pixel = (d * x.size[1] + h) * x.size[2] + inside.low;
        T* first = row + (inside.low - w.low) * p.lanes;
        if (p.channels_last)
          pack_pixels(first, from, x, b, pixel, inside.size());
        else
          pack_planes(first, from, x, b, pixel, inside.size());
      }
    }
  }

  void pack_pixels(T* to, const S* from, const Tensor& x, const Block& b, int64_t pixel, int64_t count) const {
    from += (b.image * x.pixels() + pixel) * x.width + b.channel * x.step + x.m;
    for (; count > 0; --count, to += p.lanes, from += x.width) {
      if (x.step == 1) {
        int64_t c = 0;
        for (; c + N <= b.live; c += N) store<T, N>(to + c, load<T, N>(from + c));
        for (; c < p.lanes; c += N) store<T, N>(to + c, load_first<T, N>(from + c, most(0, b.live - c)));
      } else {
        for (int64_t c = 0; c < b.live; ++c) to[c] = load_one<T>(from + c * x.step);
        for (int64_t c = b.live; c < p.lanes; ++c) to[c] = 0;
      }
    }
  }

  void pack_planes(T* to, const S* from, const Tensor& x, const Block& b, int64_t pixel, int64_t count) const {
    const S* lane[N];
    for (int l = 0; l < N; ++l) lane[l] = from + plane(b, l, x.width, x.pixels(), x.m, x.step) + pixel;
    int64_t done = 0;
    while (done < count) {
      if (count >= N) {
        const int64_t at = least(done, count - N);  // the last piece overlaps the one before
        Vec<T, N> rows[N];
#pragma GCC unroll 16
        for (int l = 0; l < N; ++l) rows[l] = load<T, N>(lane[l] + at);
        for (int64_t l = b.live; l < N; ++l) rows[l] = Vec<T, N>{};
        transpose<T, N>(rows);
#pragma GCC unroll 16
        for (int l = 0; l < N; ++l) store<T, N>(to + (at + l) * N, rows[l]);
        done = at + N;
      } else {
        for (int l = 0; l < N; ++l) to[done * N + l] = l < b.live ? load_one<T>(lane[l] + done) : T(0);
        ++done;
      }
    }
  }

  // Weights of a block, [multiplier][kernel element][lane].
  void pack_weight(Scratch& s, const Block& b) const {
    if (s.packed_weight == b.channel) return;
    s.packed_weight = b.channel;
    const S* from = static_cast<const S*>(t.weight);
    for (int64_t m = 0; m < p.multiplier; ++m)
      for (int64_t l = 0; l < p.lanes; ++l) {
        const bool live = l < b.live || p.images > 1;
        const int64_t c = b.channel + l % lanes_per_image();
        const S* w = from + (c * p.multiplier + m) * p.kernel_elements;
        T* to = s.weight + m * p.kernel_elements * p.lanes + l;
        for (int64_t k = 0; k < p.kernel_elements; ++k) to[k * p.lanes] = live ? load_one<T>(w + k) : T(0);
      }
  }

  // `count` pixels of a block from scratch memory [pixel][lane] to the tensor, contiguous there from `pixel` on.
  void unpack(S* to, const T* from, const Tensor& x, const Block& b, int64_t pixel, int64_t count) const {
    if (p.channels_last) {
      to += (b.image * x.pixels() + pixel) * x.width + b.channel * x.step + x.m;
      for (; count > 0; --count, to += x.width, from += p.lanes)
        for (int64_t c = 0; c < b.live; ++c) store_one<T>(to + c * x.step, from[c]);
      return;
    }
    S* lane[N];
    for (int l = 0; l < N; ++l) lane[l] = to + plane(b, l, x.width, x.pixels(), x.m, x.step) + pixel;
    int64_t done = 0;
    while (done < count) {
      if (count >= N) {
        const int64_t at = least(done, count - N);
        Vec<T, N> rows[N];
#pragma GCC unroll 16
        for (int l = 0; l < N; ++l) rows[l] = load<T, N>(from + (at + l) * N);
        transpose<T, N>(rows);
        for (int64_t l = 0; l < b.live; ++l) store<T, N>(lane[l] + at, rows[l]);
        done = at + N;
      } else {
        for (int64_t l = 0; l < b.live; ++l) store_one<T>(lane[l] + done, from[done * N + l]);
        ++done;
      }
    }
  }

  // ---- the passes, on one tile ----

  // The taps of one run of results, from the reaches of its three dimensions; offsets relative to the packed tile.
  int64_t list_taps(Tap* taps, const Reach r[3], const int64_t extent[3], int64_t multiplier, int64_t tensor) const {
    int64_t n = 0;
    for (int64_t m = 0; m < multiplier; ++m)
      for (int64_t i = 0; i < r[0].count; ++i)
        for (int64_t j = 0; j < r[1].count; ++j)
          for (int64_t k = 0; k < r[2].count; ++k) {
            const int64_t d = r[0].offset + i * r[0].offset_step, h = r[1].offset + j * r[1].offset_step;
            const int64_t w = r[2].offset + k * r[2].offset_step;
            const int64_t element = ((r[0].first + i * r[0].step) * p.axis[1].kernel + r[1].first + j * r[1].step) *
                                        p.axis[2].kernel + r[2].first + k * r[2].step;
            taps[n++] = {m * tensor + ((d * extent[1] + h) * extent[2] + w) * p.lanes,
                         (m * p.kernel_elements + element) * p.lanes};
          }
    return n;
  }

  // One row of results: `phases` interleaved runs, each a correlation with the same list of taps.
  struct Row {
    const Range* result;  // of the tile
    int64_t d, h;
    int64_t phases;
  };

  Vec<T, N> start(const Block& b, int64_t lane, int64_t m, int64_t step, bool with_bias) const {
    Vec<T, N> v = {};
    if (with_bias)
      for (int64_t l = 0; l < N && lane + l < b.live; ++l)
        v[l] = load_one<T>(static_cast<const S*>(t.bias) + (b.channel + (lane + l) % lanes_per_image()) * step + m);
    return v;
  }

  // Results [d][h][all of the tile's columns] of one tensor; direct to the tensor where its pixels are vectors.
  void correlate_row(const Scratch& s, const Block& b, const Range result[3], int64_t d, int64_t h, bool backward,
                     int64_t m, const T* source, const Range packed[3], const int64_t extent[3], S* out,
                     const Tensor& x, bool with_bias) const {
    constexpr auto sizes = std::make_integer_sequence<int, kMostSums>();
    const Axis *ad = &p.axis[0], *ah = &p.axis[1], *aw = &p.axis[2];
    const int64_t length = result[2].size();
    const int64_t phases = backward ? least(aw->stride, length) : 1;
    const bool direct = p.channels_last && x.step == 1;
    const int64_t pixel = (d * x.size[1] + h) * x.size[2] + result[2].low;
    S* to = direct ? out + (b.image * x.pixels() + pixel) * x.width + b.channel : nullptr;
    const int64_t tensor = p.output_size();
    for (int64_t phase = 0; phase < phases; ++phase) {
      const int64_t w = result[2].low + phase;
      int64_t q[3] = {d * ad->stride, h * ah->stride, w * aw->stride}, step = aw->stride;
      Reach reach[3] = {ad->forward_reach(), ah->forward_reach(), aw->forward_reach()};
      if (backward) {
        q[0] = ad->quotient(d), q[1] = ah->quotient(h), q[2] = aw->quotient(w), step = 1;
        reach[0] = ad->backward_reach(ad->remainder(d));
        reach[1] = ah->backward_reach(ah->remainder(h));
        reach[2] = aw->backward_reach(aw->remainder(w));
      }
      const int64_t count = list_taps(s.taps, reach, extent, backward ? p.multiplier : 1, tensor);
      const T* from = source + (((q[0] - packed[0].low) * extent[1] + q[1] - packed[1].low) * extent[2] + q[2] -
                                packed[2].low) * p.lanes;
      const T* weight = s.weight + m * p.kernel_elements * p.lanes;
      const int64_t pixels = ceil_div(length - phase, phases);
      for (int64_t l = 0; l < b.live; l += N) {
        const Vec<T, N> first = start(b, l, m, x.step, with_bias);
        if (direct)
          correlate_run<T, N, S>(to + phase * x.width + l, phases * x.width, b.live - l, from + l, step * p.lanes,
                                 weight + l, s.taps, count, first, pixels, sizes);
        else
          correlate_run<T, N, T>(s.result + phase * p.lanes + l, phases * p.lanes, N, from + l, step * p.lanes,
                                 weight + l, s.taps, count, first, pixels, sizes);
      }
    }
    if (!direct) unpack(out, s.result, x, b, pixel, length);
  }

  void forward(const Scratch& s, const Block& b, const Span span[3]) const {
    const Range result[3] = {span[0].output, span[1].output, span[2].output};
    const Range packed[3] = {span[0].input, span[1].input, span[2].input};
    for (int64_t m = 0; m < p.multiplier; ++m)
      for (int64_t d = result[0].low; d < result[0].high; ++d)
        for (int64_t h = result[1].low; h < result[1].high; ++h)
          correlate_row(s, b, result, d, h, false, m, s.input, packed, p.input_extent, static_cast<S*>(t.forward),
                        output_tensor(m), t.bias != nullptr);
  }

  void grad_input(const Scratch& s, const Block& b, const Span span[3]) const {
    const Range result[3] = {span[0].grad_input, span[1].grad_input, span[2].grad_input};
    const Range packed[3] = {span[0].grad_output, span[1].grad_output, span[2].grad_output};
    for (int64_t d = result[0].low; d < result[0].high; ++d)
      for (int64_t h = result[1].low; h < result[1].high; ++h)
        correlate_row(s, b, result, d, h, true, 0, s.grad_output, packed, p.output_extent,
                      static_cast<S*>(t.grad_input), input_tensor(), t.bias != nullptr && !p.wants(CONVGRAD_FORWARD));
  }

  void grad_weight(const Scratch& s, const Block& b, const Span span[3]) const {
    constexpr auto sizes = std::make_integer_sequence<int, kMostTaps>();
    const Axis* a = p.axis;
    const Range o[3] = {span[0].output, span[1].output, span[2].output};
    if (o[0].size() == 0 || o[1].size() == 0 || o[2].size() == 0) return;
    const int64_t *ix = p.input_extent, *gx = p.output_extent;
    const Reach reach[3] = {{0, 1, 0, a[0].dilation, a[0].kernel},
                            {0, 1, 0, a[1].dilation, a[1].kernel},
                            {0, 1, 0, a[2].dilation, a[2].kernel}};
    const int64_t count = list_taps(s.taps, reach, ix, 1, 0);
    Rows<T> rows;
    rows.depth = o[0].size(), rows.pixels = o[2].size();
    rows.grad_slice = gx[1] * gx[2] * p.lanes, rows.grad_row = gx[2] * p.lanes, rows.grad_pixel = p.lanes;
    rows.input_slice = a[0].stride * ix[1] * ix[2] * p.lanes, rows.input_row = a[1].stride * ix[2] * p.lanes;
    rows.input_pixel = a[2].stride * p.lanes;
    const int64_t group = most(1, 64 / rows.pixels);  // rows at once: their pixels stay in the first-level cache
    for (int64_t m = 0; m < p.multiplier; ++m)
      for (int64_t h = 0; h < o[1].size(); h += group)
        for (int64_t l = 0; l < b.live; l += N) {
          rows.rows = least(group, o[1].size() - h);
          rows.grad = s.grad_output + m * p.output_size() + l +
                      (((o[0].low - span[0].grad_output.low) * gx[1] + o[1].low - span[1].grad_output.low + h) * gx[2] +
                       o[2].low - span[2].grad_output.low) * p.lanes;
          rows.input = s.input + h * rows.input_row + l;
          accumulate_all<T, N>(s.sums + m * p.kernel_elements * p.lanes + l, p.lanes, s.taps, count, rows, sizes);
          if (p.wants(CONVGRAD_GRAD_BIAS)) sum_rows(s.sums + p.weight_size() + m * p.lanes + l, rows);
        }
  }

  static void sum_rows(T* sums, const Rows<T>& r) {
    Vec<T, N> total = {};
    for (int64_t d = 0; d < r.depth; ++d)
      for (int64_t h = 0; h < r.rows; ++h)
        for (int64_t w = 0; w < r.pixels; ++w)
          total += load<T, N>(r.grad + d * r.grad_slice + h * r.grad_row + w * r.grad_pixel);
    store<T, N>(sums, load<T, N>(sums) + total);
  }

  // ---- units, items, threads ----

  void run_unit(Scratch& s, Block b, int64_t unit) const {
    b.image = unit / p.tiles * p.images;
    b.live = p.images > 1 ? least(p.images, p.batch - b.image) * p.channels : least(p.lanes, p.channels - b.channel);
    int64_t tile = unit % p.tiles;
    Span span[3];
    for (int d = 2; d >= 0; --d) span[d] = p.span(d, tile % p.bands[d]), tile /= p.bands[d];
    if (p.needs_weight()) pack_weight(s, b);
    if (p.needs_input()) {
      const Range r[3] = {span[0].input, span[1].input, span[2].input};
      pack(s.input, p.input_extent, static_cast<const S*>(t.input), input_tensor(), b, r);
    }
    if (p.needs_grad_output()) {
      const Range r[3] = {span[0].grad_output, span[1].grad_output, span[2].grad_output};
      for (int64_t m = 0; m < p.multiplier; ++m)
        pack(s.grad_output + m * p.output_size(), p.output_extent, static_cast<const S*>(t.grad_output),
             output_tensor(m), b, r);
    }
    if (p.wants(CONVGRAD_FORWARD)) forward(s, b, span);
    if (p.wants(CONVGRAD_GRAD_INPUT)) grad_input(s, b, span);
    if (p.wants(CONVGRAD_GRAD_WEIGHT)) grad_weight(s, b, span);
  }

  // A lane block and a share of its units; `partial` receives the item's sums.
  void run_item(Scratch& s, int64_t item, T* partial) const {
    const int64_t block = item / p.segments, segment = item % p.segments;
    const Block b = {block * p.lanes, 0, 0, block};
    if (p.wants(CONVGRAD_GRAD_WEIGHT)) {
      s.sums = partial + item * p.sums_size();
      memset(s.sums, 0, sizeof(T) * static_cast<size_t>(p.sums_size()));
    }
    const int64_t last = p.units() * (segment + 1) / p.segments;
    for (int64_t unit = p.units() * segment / p.segments; unit < last; ++unit) run_unit(s, b, unit);
  }

  // Add a lane block's partial sums, always in the same order, and write them in the weight's layout.
  void reduce(int64_t block, const T* partial) const {
    const int64_t first = block * p.lanes, per_image = least(lanes_per_image(), p.channels - first);
    S *weight = static_cast<S*>(t.grad_weight), *bias = static_cast<S*>(t.grad_bias);
    const int64_t rows = p.multiplier * (p.kernel_elements + (bias != nullptr));
    for (int64_t row = 0; row < rows; ++row) {
      const bool is_bias = row >= p.multiplier * p.kernel_elements;
      const int64_t m = is_bias ? row - p.multiplier * p.kernel_elements : row / p.kernel_elements;
      for (int64_t c = 0; c < per_image; ++c) {
        T sum = 0;
        for (int64_t segment = 0; segment < p.segments; ++segment)
          for (int64_t image = 0; image < p.images; ++image)
            sum += partial[(block * p.segments + segment) * p.sums_size() + row * p.lanes + image * per_image + c];
        const int64_t channel = (first + c) * p.multiplier + m;
        store_one<T>(is_bias ? bias + channel : weight + channel * p.kernel_elements + row % p.kernel_elements, sum);
      }
    }
  }

  // ---- memory ----

  static constexpr int64_t kAlign = 64;
  struct Sizes {
    int64_t input, grad_output, weight, result, taps, thread, partial, total;
  };
  static Sizes sizes(const Plan& p) {
    auto bytes = [](int64_t elements, int64_t size) { return round_up(elements * size, kAlign); };
    Sizes z;
    const int64_t row = most(p.axis[2].input, p.axis[2].output);
    z.input = bytes(p.input_size(), sizeof(T));
    z.grad_output = bytes(p.output_size() * p.multiplier, sizeof(T));
    z.weight = p.needs_weight() ? bytes(p.weight_size(), sizeof(T)) : 0;
    z.result = p.needs_weight() ? bytes(row * p.lanes, sizeof(T)) : 0;
    z.taps = bytes(p.multiplier * p.kernel_elements, sizeof(Tap));
    z.thread = z.input + z.grad_output + z.weight + z.result + z.taps + kAlign;
    z.partial = p.wants(CONVGRAD_GRAD_WEIGHT) ? bytes(p.lane_blocks * p.segments * p.sums_size(), sizeof(T)) : 0;
    z.total = z.thread * p.threads + z.partial + kAlign;
    return z;
  }

  static int64_t workspace(const convgrad_problem& q) { return sizes(make_plan(q, N, sizeof(T))).total; }

  static int32_t run(const convgrad_problem& q, const convgrad_tensors& t, char* memory, int64_t bytes) {
    const Plan p = make_plan(q, N, sizeof(T));
    const Sizes z = sizes(p);
    if (bytes < z.total) return 1;
    memory += (kAlign - reinterpret_cast<uintptr_t>(memory) % kAlign) % kAlign;
    const Depthwise call = {p, t};
    T* partial = reinterpret_cast<T*>(memory + z.thread * p.threads);
    const int64_t items = p.lane_blocks * p.segments;
    const int threads = static_cast<int>(least(p.threads, items));
    auto work = [&](int64_t item, int thread) {
      char* at = memory + z.thread * thread;
      Scratch s = {};
      s.input = reinterpret_cast<T*>(at), at += z.input;
      s.grad_output = reinterpret_cast<T*>(at), at += z.grad_output;
      s.weight = reinterpret_cast<T*>(at), at += z.weight;
      s.result = reinterpret_cast<T*>(at), at += z.result;
      s.taps = reinterpret_cast<Tap*>(at);
      s.packed_weight = -1;
      call.run_item(s, item, partial);
    };
    const bool sums = p.wants(CONVGRAD_GRAD_WEIGHT);
    if (threads == 1) {  // no parallel region: also safe in a forked child
      for (int64_t item = 0; item < items; ++item) work(item, 0);
      for (int64_t block = 0; sums && block < p.lane_blocks; ++block) call.reduce(block, partial);
      return 0;
    }
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic, 1)
      for (int64_t item = 0; item < items; ++item) work(item, omp_get_thread_num());
      if (sums) {
#pragma omp for schedule(static)
        for (int64_t block = 0; block < p.lane_blocks; ++block) call.reduce(block, partial);
      }
    }
    return 0;
  }
};

}  // namespace
