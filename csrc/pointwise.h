// Pointwise convolution: a kernel of one element, stride 1, no padding, any number of channels. A matrix product on the
// tensors as they lie.
//
// The idea, in contiguous layout: a vector holds neighbouring pixels of one channel; the pixels of all images are one
// row of such columns (pointwise_plan.h). A block of columns is packed as [vector][channel], in the type of the
// arithmetic, so that the loops of pointwise_kernels.h read memory in order however far the channels lie apart, and one
// block serves all. While one is computed, the memory of what is packed next is prefetched.
//   forward:     sums over channels of the input, for some rows of results and some vectors
//   grad_input:  the same over grad_output, with the weight transposed
//   grad_weight: sums over the block's pixels, for some channels of grad_output and some vectors of channels of the
//                input, a block of which is transposed for that while it is packed: a lane is then a sum of its own
//
// In channels_last a vector holds neighbouring channels of one pixel, of the results or, for grad_weight, of the input:
// weights are packed as such vectors, and the tensors are read where they lie, the other operand one number at a time.
// 16 bits are converted, a block at a time.
//
// What limits it: the multiply-adds. With few channels on one side the memory takes nearly as long, at the same time.
#pragma once

#include "parallel.h"
#include "pointwise_kernels.h"
#include "reduce.h"

namespace {

// S: storage, T: arithmetic, N: lanes of a vector.
template <class S, class T, int N>
struct Pointwise {
  struct Plan : PointwisePlan {
    Memory memory;
    Array<T> source, other, turned;  // of each thread
    Array<Column> columns;
    Array<T> weight, start, partial;

    // Whether sums are in results themselves: there is one segment, and nothing to convert.
    bool in_place() const { return segments == 1 && std::is_same<S, T>::value; }
  };
  struct Scratch {
    T *source, *other, *turned;
    Column* columns;
  };
  struct Sums {
    T *weight, *bias;
  };
  struct Operand {  // some of a tensor's channels
    const S* tensor;
    int64_t all;
    Range channels;
  };
  struct Block {
    Column* columns;
    int64_t vectors;
    int64_t pixels() const { return vectors ? (vectors - 1) * N + columns[vectors - 1].live : 0; }
  };

  static constexpr auto kRows = std::make_integer_sequence<int, kPointwiseRows>();

  const Plan& p;
  const convgrad_tensors& t;
  T *const weight, *const start, *const partial;

  // From vector to vector, an odd number of lines: an even one would use a few places of the cache.
  static int64_t pitch(int64_t channels) { return (channels | 1) * N; }

  // So many vectors, of so many elements each, stay in the cache.
  static int64_t cached(int64_t elements) {
    return most(1, kTileBytes / (elements * int64_t(sizeof(T))) / kPointwiseColumns) * kPointwiseColumns;
  }

  // ---- operands ----

  // The weights of some rows of results as [source][row].
  void pack_weight(int64_t group, int64_t panel) const {
    const Range r = p.panel(panel);
    const int64_t first = group * p.results + r.low;
    const S *bias = static_cast<const S*>(t.bias), *from = static_cast<const S*>(t.weight);
    from += group * p.sources * p.results + r.low * (p.backward ? 1 : p.sources);
    T* to = weight + first * p.sources;
    for (int64_t i = 0; i < r.size(); ++i) start[first + i] = bias ? load_one<T>(bias + first + i) : T(0);
    if (r.size() == kPointwiseRows) return pack_rows(to, from, kPointwiseRows);
    pack_rows(to, from, r.size());
  }
  // In channels_last as [vector of results][source][result].
  void pack_weight_lanes(int64_t group, int64_t panel) const {
    const Range r = p.panel(panel);
    const int64_t first = group * p.results + r.low, at = group * p.panels + panel;
    const S *bias = static_cast<const S*>(t.bias), *from = static_cast<const S*>(t.weight);
    store<T, N>(start + at * N, bias ? load_first<T, N>(bias + first, r.size()) : Vec<T, N>{});
    T* to = weight + at * p.sources * N;
    if (p.backward) {
      from += group * p.sources * p.results + r.low;
      for (int64_t k = 0; k < p.sources; ++k) store<T, N>(to + k * N, load_first<T, N>(from + k * p.results, r.size()));
      return;
    }
    from += first * p.sources;
    for (int64_t k = 0; k < p.sources; k += N) {
      Vec<T, N> rows[N];
#pragma GCC unroll 16
      for (int l = 0; l < N; ++l)
        rows[l] = load_first<T, N>(from + least(l, r.size() - 1) * p.sources + k, p.sources - k);
      transpose<T, N>(rows);
#pragma GCC unroll 16
      for (int l = 0; l < N; ++l)
        if (k + l < p.sources) store<T, N>(to + (k + l) * N, rows[l]);
    }
  }
  // Inlined: with as many rows as the loop is compiled for, or any number.
  __attribute__((always_inline)) void pack_rows(T* to, const S* from, int64_t rows) const {
    if (p.backward) {
      for (int64_t k = 0; k < p.sources; ++k, to += rows, from += p.results)
        for (int64_t i = 0; i < rows; ++i) to[i] = load_one<T>(from + i);
    } else {
      for (int64_t k = 0; k < p.sources; ++k, to += rows, ++from)
        for (int64_t i = 0; i < rows; ++i) to[i] = load_one<T>(from + i * p.sources);
    }
  }

  // The pixels of a column, of the channel whose plane in the first image begins at `row`.
  __attribute__((always_inline)) Vec<T, N> load_column(const S* row, int64_t image, const Column& at) const {
    const S* x = row + at.image * image + at.pixel;
    if (at.whole) return load<T, N>(x);
    S buffer[N] = {};
    for (int64_t lane = 0, pixel = at.pixel; lane < at.live; pixel = 0) {
      const int64_t now = least(at.live - lane, p.pixels - pixel);
      memcpy(buffer + lane, x, sizeof(S) * static_cast<size_t>(now));
      x += image - pixel, lane += now;
    }
    return load<T, N>(buffer);
  }

  // A block of an item's channels, as [vector][channel][pixel]. The next channel's columns are prefetched: each is a
  // short run of its own.
  void pack(T* to, const Operand& from, const Block& block) const {
    const int64_t step = pitch(from.channels.size()), image = from.all * p.pixels;
    const S* row = from.tensor + from.channels.low * p.pixels;
    for (int64_t c = 0; c < from.channels.size(); ++c, to += N, row += p.pixels)
      for (int64_t v = 0; v < block.vectors; ++v) {
        const Column& at = block.columns[v];
        __builtin_prefetch(row + p.pixels + at.image * image + at.pixel);
        store<T, N>(to + v * step, load_column(row, image, at));
      }
  }

  // The same as [vector of channels][pixel][channel].
  void turn(T* to, const Operand& from, const Block& block) const {
    const int64_t image = from.all * p.pixels;
    for (int64_t c = from.channels.low; c < from.channels.high; c += N, to += pitch(block.vectors * N))
      for (int64_t v = 0; v < block.vectors; ++v) {
        const Column& at = block.columns[v];
        Vec<T, N> rows[N];
#pragma GCC unroll 16
        for (int l = 0; l < N; ++l) {
          const S* row = from.tensor + least(c + l, from.channels.high - 1) * p.pixels;
          __builtin_prefetch(row + N * p.pixels + at.image * image + at.pixel);
          rows[l] = load_column(row, image, at);
        }
        transpose<T, N>(rows);
#pragma GCC unroll 16
        for (int l = 0; l < N; ++l) store<T, N>(to + (v * N + l) * N, rows[l]);
      }
  }

  Ahead<S> ahead_of(const Operand& x, const Block& block) const {
    return {x.tensor + x.channels.low * p.pixels, p.pixels, x.all * p.pixels, block.columns, block.vectors,
            x.channels.size(), 0, 0, 0};
  }

  // ---- a block of columns ----

  void multiply_block(const Scratch& s, const Block& block, int64_t group, Range panels, Ahead<S> ahead) const {
    PointwiseResults<S, T> run = {};
    const int64_t vectors = block.vectors, tiles = panels.size() * ceil_div(vectors, kPointwiseColumns);
    ahead.spread_over(tiles * p.sources), run.ahead = &ahead;
    run.pitch = pitch(p.sources), run.terms = run.together = p.sources;
    run.pixels = p.pixels, run.image = p.groups * p.results * p.pixels;
    const int64_t together = cached(run.pitch);  // vectors, which all panels use
    for (int64_t v = 0; v < vectors; v += together) {
      run.source = s.source + v * run.pitch, run.columns = block.columns + v;
      for (int64_t i = panels.low; i < panels.high; ++i) {
        const Range r = p.panel(i);
        const int64_t row = group * p.results + r.low;
        run.weight = weight + row * p.sources, run.start = start + row;
        run.result = static_cast<S*>(p.backward ? t.grad_input : t.forward) + row * p.pixels;
        multiply_rows<N>(run, r.size(), least(together, vectors - v), kRows);
      }
    }
  }

  // Of one group's weights, those of the results in the range.
  void sum_block(const Scratch& s, T* to, Range results, const Block& block, bool add, Ahead<S> ahead) const {
    PointwiseSums<S, T, false> run = {};
    const int64_t rows = p.backward ? p.sources : results.size(), lanes = p.backward ? results.size() : p.sources;
    run.weight = p.backward ? s.source : s.other, run.together = N, run.gap = pitch(rows) - N;
    run.source = s.turned, run.pitch = pitch(block.vectors * N), run.terms = block.pixels();
    run.row = p.inputs(), run.lanes = lanes, run.add = add;
    run.to = to + (p.backward ? results.low : results.low * p.sources);
    const int64_t panels = ceil_div(rows, kPointwiseRows), vectors = ceil_div(lanes, N);
    ahead.spread_over(panels * ceil_div(vectors, kPointwiseColumns) * run.terms), run.ahead = &ahead;
    for (int64_t i = 0; i < panels; ++i) {
      const int64_t now = share(rows, i, panels).size();
      multiply_rows<N>(run, now, vectors, kRows);
      run.weight += now * N, run.to += now * run.row;
    }
  }

  // ---- the same in channels_last: pixels are rows ----

  // Of some pixels, channels that follow one another; from pixel to pixel.
  struct Pixels {
    const T* at;
    int64_t step;
  };
  static int64_t padded(int64_t channels) { return (ceil_div(channels, N) | 1) * N; }

  // Where they lie, if that is asked for and what is stored is computed with; else in scratch memory.
  Pixels pixels_of(T* to, const S* from, int64_t all, int64_t channels, int64_t pixels, bool where_they_lie) const {
    if constexpr (std::is_same<S, T>::value)
      if (where_they_lie) return {from, all};
    const int64_t step = padded(channels);
    for (int64_t i = 0; i < pixels; ++i)
      for (int64_t c = 0; c < channels; c += N)
        store<T, N>(to + i * step + c, load_first<T, N>(from + i * all + c, channels - c));
    return {to, step};
  }

  // Meanwhile the next pixels are prefetched.
  void multiply_pixels(const Pixels& source, Range pixels, int64_t group, Range panels) const {
    PointwiseSums<S, T, true> run = {};
    const int64_t all = p.groups * p.results;
    run.terms = run.together = p.sources, run.pitch = p.sources * N, run.source_step = N;
    run.row_step = source.step, run.term_step = 1, run.row = all;
    S* const to = static_cast<S*>(p.backward ? t.grad_input : t.forward) + pixels.low * all + group * p.results;
    const int64_t together = cached(run.pitch);  // vectors' weights, which all pixels use
    for (int64_t v = panels.low; v < panels.high; v += together) {
      const int64_t now = least(together, panels.high - v), at = group * p.panels + v;
      run.source = weight + at * p.sources * N, run.start = start + at * N;
      run.lanes = p.panel(panels.high - 1).high - v * N;
      for (int64_t i = 0; i < pixels.size(); i += kPointwiseRows) {
        run.weight = source.at + i * source.step, run.to = to + i * all + v * N;
        const AheadInTensor<T> ahead = {run.weight + kPointwiseRows * source.step, kPointwiseRows};
        run.ahead = &ahead;
        multiply_rows<N>(run, least(kPointwiseRows, pixels.size() - i), now, kRows);
      }
    }
  }

  void sum_pixels(const Sums& sums, const Pixels& grad, const Pixels& input, int64_t pixels, int64_t group,
                  Range results, bool add) const {
    const Range rows = p.backward ? Range{0, p.sources} : results, lanes = p.backward ? results : Range{0, p.sources};
    PointwiseSums<T, T, true> run = {};
    run.terms = run.together = pixels, run.row_step = 1, run.term_step = grad.step;
    run.source_step = input.step, run.pitch = N, run.row = p.inputs(), run.add = add;
    T* const to = sums.weight + group * p.sources * p.results + rows.low * run.row + lanes.low;
    const int64_t vectors = ceil_div(lanes.size(), N), together = cached(pixels * N);  // of the input, which all rows use
    for (int64_t v = 0; v < vectors; v += together) {
      run.source = input.at + v * N, run.lanes = lanes.size() - v * N;
      for (int64_t i = 0; i < rows.size(); i += kPointwiseRows) {
        run.weight = grad.at + i, run.to = to + i * run.row + v * N;
        const AheadInTensor<T> ahead = {run.weight + N, grad.step};
        run.ahead = &ahead;
        multiply_rows<N>(run, least(kPointwiseRows, rows.size() - i), least(together, vectors - v), kRows);
      }
    }
    auto add_up = [&](const Pixels& from, T* to, int64_t channels) {
      for (int64_t c = 0; c < channels; c += N) {
        Vec<T, N> sum = add ? load_first<T, N>(to + c, channels - c) : Vec<T, N>{};
        for (int64_t i = 0; i < pixels; ++i) sum += load_first<T, N>(from.at + i * from.step + c, channels - c);
        store_first<T, N>(to + c, sum, channels - c);
      }
    };
    const bool first = results.low == 0;
    if (p.sums_grad && (first || !p.backward)) add_up(grad, sums.bias + group * p.outputs_of() + rows.low, rows.size());
    if (p.sums_input && (first || p.backward)) add_up(input, sums.bias + group * p.inputs() + lanes.low, lanes.size());
  }

  // A block's pixels for all groups before the next: they lie together.
  void run_pixels(const Scratch& s, int64_t item) const {
    const Range all = share(p.groups * p.panels, item % p.chunks, p.chunks);
    const bool sums_weight = p.wants(CONVGRAD_GRAD_WEIGHT);
    const int64_t sources = p.groups * p.sources, others = p.groups * p.results;
    const S *source_at = static_cast<const S*>(p.backward ? t.grad_output : t.input);
    const S *other_at = static_cast<const S*>(p.backward ? t.input : t.grad_output);
    Range vectors = p.columns_of(item);
    for (bool add = false;; add = true) {
      const Range now = {vectors.low * N, least(least(vectors.high, vectors.low + p.block) * N, p.batch * p.pixels)};
      // Where a whole vector of the input's last channels would end behind it.
      const bool last = (p.batch * p.pixels - now.high) * p.groups * p.inputs() < N;
      for (int64_t i = all.low, group; i < all.high; i = (group + 1) * p.panels) {
        group = i / p.panels;
        const Range panels = {i - group * p.panels, least(p.panels, all.high - group * p.panels)};
        const Range results = {p.panel(panels.low).low, p.panel(panels.high - 1).high};
        const Pixels source = pixels_of(s.source, source_at + now.low * sources + group * p.sources, sources,
                                        p.sources, now.size(), p.backward || !(sums_weight && last));
        if (p.needs_weight()) multiply_pixels(source, now, group, panels);
        if (!sums_weight) continue;
        const Pixels other = pixels_of(s.other, other_at + now.low * others + group * p.results + results.low, others,
                                       results.size(), now.size(), !p.backward || !last);
        sum_pixels(sums_of(p.segment_of(item)), p.backward ? source : other, p.backward ? other : source, now.size(),
                   group, results, add);
      }
      if ((vectors.low += p.block) >= vectors.high) return;
    }
  }

  // ---- sums for grad_bias ----

  void sum_grad(T* to, const T* packed, Range channels, const Block& block, bool add) const {
    const int64_t step = pitch(channels.size());
    for (int64_t c = channels.low; c < channels.high; ++c, packed += N) {
      Vec<T, N> sum = {};
      for (int64_t v = 0; v < block.vectors; ++v) sum += load<T, N>(packed + v * step);
      T lanes[N];
      store<T, N>(lanes, sum);
      to[c] = add_partials(lanes, 1, N) + (add ? to[c] : T(0));
    }
  }
  void sum_input(T* to, const T* turned, Range channels, const Block& block, bool add) const {
    for (int64_t c = channels.low; c < channels.high; c += N, turned += pitch(block.vectors * N)) {
      Vec<T, N> sum = add ? load_first<T, N>(to + c, channels.high - c) : Vec<T, N>{};
      for (int64_t i = 0; i < block.pixels(); ++i) sum += load<T, N>(turned + i * N);
      store_first<T, N>(to + c, sum, channels.high - c);
    }
  }

  // ---- items, threads ----

  Sums sums_of(int64_t segment) const {
    if constexpr (std::is_same<S, T>::value)
      if (p.in_place()) return {static_cast<T*>(t.grad_weight), static_cast<T*>(t.grad_bias)};
    T* const first = partial + segment * p.sums();
    return {first, first + p.weights()};
  }

  Operand source_of(int64_t item) const {
    const int64_t group = p.group_of(item);
    return {static_cast<const S*>(p.backward ? t.grad_output : t.input), p.groups * p.sources,
            {group * p.sources, (group + 1) * p.sources}};
  }

  // A segment of the columns, in blocks; the first of them, which may be empty, sets the sums. Beside the last one,
  // what this thread takes next if all are equally fast is prefetched.
  void run_item(const Scratch& s, int64_t item) const {
    const int64_t chunk = item % p.chunks, group = p.group_of(item);
    const Range panels = share(p.panels, chunk, p.chunks);
    const Range results = {p.panel(panels.low).low, p.panel(panels.high - 1).high};
    const Range channels = {group * p.results + results.low, group * p.results + results.high};
    const Operand source = source_of(item);
    const Operand other = {static_cast<const S*>(p.backward ? t.input : t.grad_output), p.groups * p.results, channels};
    const bool sums_weight = p.wants(CONVGRAD_GRAD_WEIGHT);
    auto list = [&](Block& block, Range columns) {
      block.vectors = least(p.block, columns.size());
      for (int64_t v = 0; v < block.vectors; ++v) block.columns[v] = p.column(columns.low + v);
    };
    Range columns = p.columns_of(item);
    Block now = {s.columns, 0}, next = {s.columns + p.block, 0};
    list(now, columns);
    for (bool add = false;; add = true) {
      columns.low += now.vectors;
      const bool last = columns.size() == 0;
      list(next, last ? p.columns_of(item + p.threads) : columns);
      const Ahead<S> ahead = ahead_of(last ? source_of(item + p.threads) : source, next);
      pack(s.source, source, now);
      if (p.needs_weight()) multiply_block(s, now, group, panels, sums_weight ? ahead_of(other, now) : ahead);
      if (sums_weight) {
        const Sums sums = sums_of(p.segment_of(item));
        const Operand &grad = p.backward ? source : other, &input = p.backward ? other : source;
        if (!p.backward) pack(s.other, other, now);
        turn(s.turned, input, now);
        sum_block(s, sums.weight + group * p.sources * p.results, results, now, add, ahead);
        if (p.sums_grad && (chunk == 0 || !p.backward))
          sum_grad(sums.bias, p.backward ? s.source : s.other, grad.channels, now, add);
        if (p.sums_input && (chunk == 0 || p.backward)) sum_input(sums.bias, s.turned, input.channels, now, add);
      }
      if (last) return;
      std::swap(now, next);
    }
  }

  void reduce(Range elements) const {
    reduce_partials<T, N>(static_cast<S*>(t.grad_weight), p.weights(), static_cast<S*>(t.grad_bias), partial, p.sums(),
                          p.segments, elements);
  }

  // ---- a plan with its scratch memory, and a call ----

  static Plan make_plan(const convgrad_problem& q) {
    Plan p = {};
    static_cast<PointwisePlan&>(p) = make_pointwise_plan(q, N, sizeof(T));
    Layout &each = p.memory.each, &shared = p.memory.shared;
    // Of so many channels, the pixels of a block.
    auto room = [&](int64_t channels) { return p.block * (p.channels_last ? N * padded(channels) : pitch(channels)); };
    p.source = each.template add<T>(room(p.sources));
    if (!p.channels_last) p.columns = each.template add<Column>(2 * p.block);
    if (p.needs_weight()) {
      const int64_t results = p.channels_last ? p.panels * N : p.results;
      p.weight = shared.template add<T>(p.groups * p.sources * results);
      p.start = shared.template add<T>(p.groups * results);
    }
    if (!p.wants(CONVGRAD_GRAD_WEIGHT)) return p;
    const int64_t results = least(p.results, ceil_div(p.together * p.panels, p.chunks) * p.panel_rows());  // of an item
    if (p.channels_last || !p.backward) p.other = each.template add<T>(room(results));
    if (!p.channels_last)
      p.turned = each.template add<T>(ceil_div(p.backward ? results : p.sources, N) * pitch(p.block * N));
    if (!p.in_place()) p.partial = shared.template add<T>(p.segments * p.sums());
    return p;
  }

  static void run(const Plan& p, const convgrad_tensors& t, char* memory, int threads) {
    const Pointwise call = {p, t, p.weight.in(memory), p.start.in(memory), p.partial.in(memory)};
    auto scratch = [&](int64_t thread) {
      char* const at = p.memory.of_thread(memory, thread);
      return Scratch{p.source.in(at), p.other.in(at), p.turned.in(at), p.columns.in(at)};
    };
    run_items(
        threads, p.needs_weight() ? p.groups * p.panels : 0,
        [&](Range panels) {
          for (int64_t i = panels.low; i < panels.high; ++i)
            p.channels_last ? call.pack_weight_lanes(i / p.panels, i % p.panels)
                            : call.pack_weight(i / p.panels, i % p.panels);
        },
        p.items(), scratch,
        [&](Scratch& s, int64_t item) { p.channels_last ? call.run_pixels(s, item) : call.run_item(s, item); },
        p.partial.bytes ? p.sums() : 0, [&](Range elements) { call.reduce(elements); });
  }
};

}  // namespace
