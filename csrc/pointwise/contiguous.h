// Pointwise convolution in contiguous layout: a vector holds neighboring pixels of one channel; the pixels of all
// images are one row of such columns (plan.h).
//
// A block of columns is packed as [vector][channel], in the type of the arithmetic, so that the loops of
// kernels.h read memory in order however far the channels lie apart, and one block serves all.
//   forward, grad_input: for some rows of results and some vectors
//   grad_weight:         for some channels of grad_output and some vectors of channels of the input, a block of which
//                        is transposed for that while it is packed: a lane is then a sum of its own
#pragma once

#include "pointwise.h"

namespace {

template <class S, class T, int N>
class ContiguousPointwise : Pointwise<S, T, N> {
  typedef Pointwise<S, T, N> Base;
  friend Base;
  using typename Base::Sums;
  using Base::p, Base::t, Base::weight, Base::start, Base::cached;

  using Base::Base;

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

  // Elements from vector to vector, an odd number of lines: an even one would use few sets of the cache.
  static int64_t pitch(int64_t channels) { return (channels | 1) * N; }

  // ---- operands ----

  // Packs the weights of some rows of results as [source][row].
  void pack_weights(int64_t group, Range panels) const {
    for (int64_t i = panels.low; i < panels.high; ++i) {
      const int64_t row = group * p.results + p.panel(i).low;
      pack_panel(weight + row * p.sources, start + row, group, i);
    }
  }
  void pack_panel(T* to, T* starts, int64_t group, int64_t panel) const {
    const Range r = p.panel(panel);
    const int64_t first = group * p.results + r.low;
    const S *bias = static_cast<const S*>(t.bias), *from = static_cast<const S*>(t.weight);
    from += group * p.sources * p.results + r.low * (p.backward ? 1 : p.sources);
    for (int64_t i = 0; i < r.size(); ++i) starts[i] = bias ? load_one<T>(bias + first + i) : T(0);
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

  // Loads the pixels of a column, of the channel whose plane in the first image begins at `row`.
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

  // Vectors of a line of memory: one of them prefetches it.
  static constexpr int64_t kLine = N * sizeof(S) < 64 ? 64 / (N * sizeof(S)) : 1;

  // Packs a block of an item's channels as [vector][channel][pixel]. The next channel's columns are prefetched: each is
  // a short run of its own.
  void pack(T* to, const Operand& from, const Block& block) const {
    const int64_t pixels = p.pixels, step = pitch(from.channels.size()), image = from.all * pixels;
    const S* row = from.tensor + from.channels.low * pixels;
    for (int64_t c = 0; c < from.channels.size(); ++c, to += N, row += pixels) {
      T* put = to;
      for (const Column *at = block.columns, *const end = at + block.vectors; at != end;) {
        const S* x = row + at->image * image + at->pixel;
        if (!at->run) {
          __builtin_prefetch(x + pixels);
          store<T, N>(put, load_column(row, image, *at++)), put += step;
          continue;
        }
        int64_t left = at->run;
        at += left;
        for (; left >= kLine; left -= kLine) {
          __builtin_prefetch(x + pixels);
#pragma GCC unroll 4
          for (int64_t v = 0; v < kLine; ++v, x += N, put += step) store<T, N>(put, load<T, N>(x));
        }
        if (left) __builtin_prefetch(x + pixels);
        for (; left > 0; --left, x += N, put += step) store<T, N>(put, load<T, N>(x));
      }
    }
  }

  // Packs a block as [vector of channels][pixel][channel]. The memory of a few columns further on is prefetched: at the
  // end of a block that of the next channels, or of the next block, which begins where this one ends.
  void pack_transposed(T* to, const Operand& from, const Block& block) const {
    constexpr int64_t kAhead = 4 * kLine;
    const int64_t pixels = p.pixels, image = from.all * pixels;
    auto place = [&](int64_t c, const Column& at) { return from.tensor + c * pixels + at.image * image + at.pixel; };
    for (int64_t c = from.channels.low; c < from.channels.high; c += N, to += pitch(block.vectors * N))
      for (int64_t v = 0; v < block.vectors; ++v) {
        const Column& at = block.columns[v];
        const S* const x = place(c, at);
        Vec<T, N> rows[N];
        if (v % kLine == 0) {
          const int64_t soon = v + kAhead;
          const S* next = x + kAhead * N;
          if (soon < block.vectors) {
            next = place(c, block.columns[soon]);
          } else if (c + N < from.channels.high) {
            next = place(c + N, block.columns[soon % block.vectors]);
          }
          UNROLL for (int l = 0; l < N; ++l) __builtin_prefetch(next + l * pixels);
        }
        if (at.whole && c + N <= from.channels.high) {
          UNROLL for (int l = 0; l < N; ++l) rows[l] = load<T, N>(x + l * pixels);
        } else {
          for (int l = 0; l < N; ++l) {
            const S* const row = from.tensor + least(c + l, from.channels.high - 1) * pixels;
            rows[l] = load_column(row, image, at);
          }
        }
        transpose<T, N>(rows);
        UNROLL for (int l = 0; l < N; ++l) store<T, N>(to + (v * N + l) * N, rows[l]);
      }
  }

  // ---- a block of columns ----

  void multiply_block(char* own, const Block& block, int64_t group, Range panels) const {
    PointwiseResults<S, T> run = {};
    run.pitch = pitch(p.sources), run.terms = run.together = p.sources;
    run.pixels = p.pixels, run.image = p.groups * p.results * p.pixels;
    T* const item_weight = p.item_weight.in(own);
    const int64_t together = item_weight ? block.vectors : cached(run.pitch);  // vectors that all panels use
    for (int64_t v = 0; v < block.vectors; v += together) {
      run.source = p.source.in(own) + v * run.pitch, run.columns = block.columns + v;
      for (int64_t i = panels.low; i < panels.high; ++i) {
        const Range r = p.panel(i);
        const int64_t row = group * p.results + r.low;
        run.weight = weight + row * p.sources, run.start = start + row, run.rows = r.size();
        if (item_weight) {
          T* const starts = item_weight + kPointwiseRows * p.sources;
          pack_panel(item_weight, starts, group, i);
          run.weight = item_weight, run.start = starts;
        }
        run.result = this->results_tensor() + row * p.pixels;
        multiply_rows<N>(run, r.size(), least(together, block.vectors - v));
      }
    }
  }

  // Sums for the weights of one group's results in the range.
  void sum_block(char* own, T* to, Range results, const Block& block, bool add) const {
    PointwiseSums<T, T, false> run = {};
    const int64_t rows = p.backward ? p.sources : results.size(), lanes = p.backward ? results.size() : p.sources;
    run.weight = p.backward ? p.source.in(own) : p.other.in(own), run.together = N, run.gap = pitch(rows) - N;
    run.source = p.transposed.in(own), run.pitch = pitch(block.vectors * N), run.terms = block.pixels();
    run.row = p.inputs(), run.lanes = lanes, run.add = add;
    run.to = to + (p.backward ? results.low : results.low * p.sources);
    const int64_t panels = ceil_div(rows, kPointwiseRows), vectors = ceil_div(lanes, N);
    for (int64_t i = 0; i < panels; ++i) {
      const int64_t now = least(kPointwiseRows, rows - i * kPointwiseRows);
      multiply_rows<N>(run, now, vectors);
      run.weight += now * N, run.to += now * run.row;
    }
  }

  // ---- sums for grad_bias ----

  void sum_grad(T* to, const T* packed, Range channels, const Block& block, bool add) const {
    const int64_t step = pitch(channels.size());
    for (int64_t c = channels.low; c < channels.high; ++c, packed += N) {
      const Vec<T, N> sum = sum_vectors<T, N>(packed, step, block.vectors);
      to[c] = sum_of_lanes<T, N>(sum) + (add ? to[c] : T(0));
    }
  }
  void sum_input(T* to, const T* transposed, Range channels, const Block& block, bool add) const {
    for (int64_t c = channels.low; c < channels.high; c += N, transposed += pitch(block.vectors * N)) {
      const Vec<T, N> before = add ? load_first<T, N>(to + c, channels.high - c) : Vec<T, N>{};
      store_first<T, N>(to + c, before + sum_vectors<T, N>(transposed, N, block.pixels()), channels.high - c);
    }
  }

  // ---- items ----

  // A segment of the columns, in blocks; the first of them, which may be empty, sets the sums.
  void run_item(char* own, int64_t item) const {
    const int64_t chunk = item % p.chunks, group = p.group_of(item);
    const Range panels = share(p.panels, chunk, p.chunks);
    const Range results = {p.panel(panels.low).low, p.panel(panels.high - 1).high};
    const Range channels = {group * p.results + results.low, group * p.results + results.high};
    const Operand source = {this->source_tensor(), p.groups * p.sources, {group * p.sources, (group + 1) * p.sources}};
    const Operand other = {this->other_tensor(), p.groups * p.results, channels};
    const bool sums_weight = p.wants(CONVGRAD_GRAD_WEIGHT);
    Range columns = p.columns_of(item);
    for (bool add = false; !add || columns.size() > 0; add = true) {
      const Block block = {p.columns.in(own), least(p.block, columns.size())};
      for (int64_t v = block.vectors, run = 0; v-- > 0;) {
        Column& c = block.columns[v] = p.column(columns.low + v);
        c.run = run = c.whole ? 1 + (c.pixel + 2 * N <= p.pixels ? run : 0) : 0;
      }
      columns.low += block.vectors;
      T *const packed = p.source.in(own), *const grads = p.backward ? packed : p.other.in(own);
      pack(packed, source, block);
      if (p.needs_weight()) multiply_block(own, block, group, panels);
      if (sums_weight) {
        const Sums sums = this->sums_of(p.segment_of(item));
        const Operand &grad = p.backward ? source : other, &input = p.backward ? other : source;
        if (!p.backward) pack(grads, other, block);
        pack_transposed(p.transposed.in(own), input, block);
        sum_block(own, sums.weight + group * p.sources * p.results, results, block, add);
        if (p.sums_grad && (chunk == 0 || !p.backward)) sum_grad(sums.bias, grads, grad.channels, block, add);
        if (p.sums_input && (chunk == 0 || p.backward))
          sum_input(sums.bias, p.transposed.in(own), input.channels, block, add);
      }
    }
  }

 public:
  using typename Base::Plan;

  static Plan make_plan(const convgrad_problem& q) {
    Plan p = Base::make_shared_plan(q);
    Layout& each = p.memory.each;
    p.source = each.template add<T>(p.block * pitch(p.sources));
    p.columns = each.template add<Column>(p.block);
    if (p.needs_weight() && p.packs_in_items()) p.item_weight = each.template add<T>(kPointwiseRows * (p.sources + 1));
    if (!p.wants(CONVGRAD_GRAD_WEIGHT)) return p;
    if (!p.backward) p.other = each.template add<T>(p.block * pitch(p.item_results()));
    p.transposed = each.template add<T>(ceil_div(p.backward ? p.item_results() : p.sources, N) * pitch(p.block * N));
    return p;
  }
  static void run(const Plan& p, const convgrad_tensors& t, char* memory, int threads) {
    Base::run_call(ContiguousPointwise(p, t, memory), memory, threads);
  }
};

}  // namespace
