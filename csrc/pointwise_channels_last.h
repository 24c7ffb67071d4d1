// Pointwise convolution in channels_last: pixels are rows, and a vector holds neighbouring channels of one pixel, of
// the results or, for grad_weight, of the input.
//
// Weights are packed as such vectors, and the tensors are read where they lie, the other operand one number at a time.
// 16 bits are converted, a block of pixels at a time.
#pragma once

#include "pointwise.h"

namespace {

template <class S, class T, int N>
class ChannelsLastPointwise : Pointwise<S, T, N> {
  typedef Pointwise<S, T, N> Base;
  friend Base;
  using typename Base::Scratch, typename Base::Sums;
  using Base::p, Base::t, Base::weight, Base::start, Base::kRows, Base::cached;

  using Base::Base;

  // The weights of a vector of results as [source][result].
  void pack_weight(int64_t group, int64_t panel) const {
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
    S* const to = this->results_tensor() + pixels.low * all + group * p.results;
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
    const int64_t vectors = ceil_div(lanes.size(), N), together = cached(pixels * N);  // of the input, for all rows
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
  void run_item(const Scratch& s, int64_t item) const {
    const Range all = share(p.groups * p.panels, item % p.chunks, p.chunks);
    const bool sums_weight = p.wants(CONVGRAD_GRAD_WEIGHT);
    const int64_t sources = p.groups * p.sources, others = p.groups * p.results;
    const S *const source_at = this->source_tensor(), *const other_at = this->other_tensor();
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
        sum_pixels(this->sums_of(p.segment_of(item)), p.backward ? source : other, p.backward ? other : source,
                   now.size(), group, results, add);
      }
      if ((vectors.low += p.block) >= vectors.high) return;
    }
  }

 public:
  using typename Base::Plan;

  static Plan make_plan(const convgrad_problem& q) {
    Plan p = Base::make_shared_plan(q);
    auto add = [&](int64_t channels) { return p.memory.each.template add<T>(p.block * N * padded(channels)); };
    p.source = add(p.sources);
    if (p.wants(CONVGRAD_GRAD_WEIGHT)) p.other = add(p.item_results());
    return p;
  }
  static void run(const Plan& p, const convgrad_tensors& t, char* memory, int threads) {
    Base::run_call(ChannelsLastPointwise(p, t, memory), memory, threads);
  }
};

}  // namespace
