// Pointwise convolution in contiguous layout: a kernel of one element, stride 1, no padding, any number of channels. A
// matrix product on the tensors as they lie.
//
// The idea: a vector holds neighbouring pixels of one channel; the pixels of all images are one row of such columns
// (pointwise_plan.h). A block of columns is packed as [vector][channel], in the type of the arithmetic, so that the
// loops of pointwise_kernels.h read memory in order however far the channels lie apart, and one block serves all. While
// one is computed, the memory of what is packed next is prefetched.
//   forward:     sums over channels of the input, for some rows of results and some vectors
//   grad_input:  the same over grad_output, with the weight transposed
//   grad_weight: sums over the block's vectors, lane by lane, for some channels of grad_output and some of the input;
//                nothing is transposed, and the lanes are added up once a block
//
// What limits it: the multiply-adds. With few channels on one side the memory takes nearly as long, at the same time.
#pragma once

#include "parallel.h"
#include "pointwise_kernels.h"

namespace {

// S: storage, T: arithmetic, N: lanes of a vector.
template <class S, class T, int N>
struct Pointwise {
  struct Plan : PointwisePlan {
    Memory memory;
    Array<T> source, other;  // of each thread
    Array<Column> columns;
    Array<T> weight, start, partial;

    // Whether sums are in results themselves: there is one segment, and nothing to convert.
    bool in_place() const { return segments == 1 && std::is_same<S, T>::value; }
  };
  struct Scratch {
    T *source, *other;
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
  };

  const Plan& p;
  const convgrad_tensors& t;
  T *const weight, *const start, *const partial;

  // From vector to vector, an odd number of lines: an even one would use a few places of the cache.
  static int64_t pitch(int64_t channels) { return (channels | 1) * N; }

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

  // A block of an item's channels. The next channel's columns are prefetched: each is a short run of its own.
  void pack(T* to, const Operand& from, const Block& block) const {
    const int64_t step = pitch(from.channels.size()), image = from.all * p.pixels;
    for (int64_t c = from.channels.low; c < from.channels.high; ++c, to += N) {
      const S* row = from.tensor + c * p.pixels;
      for (int64_t v = 0; v < block.vectors; ++v) {
        const Column& at = block.columns[v];
        const S* x = row + at.image * image + at.pixel;
        __builtin_prefetch(x + p.pixels);
        if (at.whole) {
          store<T, N>(to + v * step, load<T, N>(x));
          continue;
        }
        S buffer[N] = {};
        for (int64_t lane = 0, pixel = at.pixel; lane < at.live; pixel = 0) {
          const int64_t now = least(at.live - lane, p.pixels - pixel);
          memcpy(buffer + lane, x, sizeof(S) * static_cast<size_t>(now));
          x += image - pixel, lane += now;
        }
        store<T, N>(to + v * step, load<T, N>(buffer));
      }
    }
  }

  Ahead<S> ahead_of(const Operand& x, const Block& block) const {
    return {x.tensor + x.channels.low * p.pixels, p.pixels, x.all * p.pixels, block.columns, block.vectors,
            x.channels.size(), 0, 0};
  }

  // ---- a block of columns ----

  void multiply_block(const Scratch& s, const Block& block, int64_t group, Range panels, Ahead<S> ahead) const {
    PointwiseRun<S, T> run = {};
    const int64_t vectors = block.vectors, tiles = panels.size() * ceil_div(vectors, kPointwiseColumns);
    run.ahead = &ahead, run.rate = ahead.rate(tiles * p.sources);
    run.pitch = pitch(p.sources), run.sources = p.sources;
    run.pixels = p.pixels, run.image = p.groups * p.results * p.pixels;
    // As many vectors as stay in the cache while all panels use them.
    const int64_t cached = kTileBytes / (run.pitch * int64_t(sizeof(T)));
    const int64_t together = most(1, cached / kPointwiseColumns) * kPointwiseColumns;
    for (int64_t v = 0; v < vectors; v += together) {
      run.source = s.source + v * run.pitch, run.columns = block.columns + v;
      for (int64_t i = panels.low; i < panels.high; ++i) {
        const Range r = p.panel(i);
        const int64_t row = group * p.results + r.low;
        run.weight = weight + row * p.sources, run.start = start + row;
        run.result = static_cast<S*>(p.backward ? t.grad_input : t.forward) + row * p.pixels;
        multiply_rows<S, T, N>(run, r.size(), least(together, vectors - v),
                               std::make_integer_sequence<int, kPointwiseRows>());
      }
    }
  }

  // Of one group's weights, those of the results in the range.
  void sum_block(const Scratch& s, T* to, Range results, int64_t vectors, bool add, Ahead<S> ahead) const {
    const int64_t source = pitch(p.sources), other = pitch(results.size()), count = results.size();
    PointwiseSums<S, T> run = {};
    run.row = p.inputs(), run.vectors = vectors, run.add = add;
    run.grad_pitch = p.backward ? source : other, run.input_pitch = p.backward ? other : source;
    run.input = p.backward ? s.other : s.source;
    // As many channels of grad_output as stay in the cache while all of the input use them.
    const T* grad = p.backward ? s.source : s.other;
    const int64_t rows = p.backward ? p.sources : count, columns = p.backward ? count : p.sources;
    const int64_t tiles = ceil_div(rows, kPointwiseOutputs) * ceil_div(columns, kPointwiseInputs);
    run.ahead = &ahead, run.rate = ahead.rate(tiles * vectors);
    const int64_t cached = kTileBytes / (most(1, vectors) * N * int64_t(sizeof(T)));
    const int64_t together = most(1, cached / kPointwiseOutputs) * kPointwiseOutputs;
    to += p.backward ? results.low : results.low * p.sources;
    for (int64_t r = 0; r < rows; r += together) {
      run.grad = grad + r * N, run.to = to + r * run.row;
      dot_all<S, T, N>(run, least(together, rows - r), columns, std::make_integer_sequence<int, kPointwiseInputs>());
    }
  }

  void sum_channels(T* to, const T* packed, int64_t channels, int64_t vectors, bool add) const {
    for (int64_t c = 0; c < channels; ++c) {
      Vec<T, N> sum = {};
      for (int64_t v = 0; v < vectors; ++v) sum += load<T, N>(packed + v * pitch(channels) + c * N);
      T lanes[N];
      store<T, N>(lanes, sum);
      to[c] = add_partials(lanes, 1, N) + (add ? to[c] : T(0));
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
        pack(s.other, other, now);
        sum_block(s, sums.weight + group * p.sources * p.results, results, now.vectors, add, ahead);
        if (p.sums_source && chunk == 0)
          sum_channels(sums.bias + source.channels.low, s.source, p.sources, now.vectors, add);
        if (p.sums_other) sum_channels(sums.bias + channels.low, s.other, results.size(), now.vectors, add);
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
    p.source = each.template add<T>(p.block * pitch(p.sources));
    p.columns = each.template add<Column>(2 * p.block);
    if (p.needs_weight()) {
      p.weight = shared.template add<T>(p.weights());
      p.start = shared.template add<T>(p.groups * p.results);
    }
    if (!p.wants(CONVGRAD_GRAD_WEIGHT)) return p;
    p.other = each.template add<T>(p.block * pitch(least(p.results, ceil_div(p.panels, p.chunks) * kPointwiseRows)));
    if (!p.in_place()) p.partial = shared.template add<T>(p.segments * p.sums());
    return p;
  }

  static void run(const Plan& p, const convgrad_tensors& t, char* memory, int threads) {
    const Pointwise call = {p, t, p.weight.in(memory), p.start.in(memory), p.partial.in(memory)};
    auto scratch = [&](int64_t thread) {
      char* const at = p.memory.of_thread(memory, thread);
      return Scratch{p.source.in(at), p.other.in(at), p.columns.in(at)};
    };
    run_items(
        threads, p.needs_weight() ? p.groups * p.panels : 0,
        [&](Range panels) {
          for (int64_t i = panels.low; i < panels.high; ++i) call.pack_weight(i / p.panels, i % p.panels);
        },
        p.items(), scratch, [&](Scratch& s, int64_t item) { call.run_item(s, item); },
        p.partial.bytes ? p.sums() : 0, [&](Range elements) { call.reduce(elements); });
  }
};

}  // namespace
