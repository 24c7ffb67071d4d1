// Pointwise convolution in channels_last: pixels are rows, and a vector holds neighboring channels of one pixel, of
// the results or, for grad_weight, of the input.
//
// Weights are packed as such vectors, all beforehand or some at a time by the item that needs them. The tensors are
// read where they lie, the other operand one number at a time; for grad_weight, what is used often is packed, too. 16
// bits are converted, a block of pixels at a time.
#pragma once

#include "pointwise.h"

namespace {

template <class S, class T, int N>
class ChannelsLastPointwise : Pointwise<S, T, N> {
  typedef Pointwise<S, T, N> Base;
  friend Base;
  using typename Base::Sums;
  using Base::p, Base::t, Base::weight, Base::start, Base::cached;

  using Base::Base;

  // The weights of vectors of results as [source][result]; backward, of several vectors at a time, since a source's lie
  // side by side, and each source's in another page.
  void pack_weights(int64_t group, Range panels) const {
    for (Range now = panels; now.low < panels.high; now.low = now.high) {
      now.high = least(panels.high, now.low + kPointwiseColumns);
      const int64_t at = group * p.panels + now.low;
      pack_panels(weight + at * p.sources * N, start + at * N, group, now, {0, p.sources});
    }
  }
  void pack_panels(T* to, T* starts, int64_t group, Range panels, Range sources) const {
    const Range r = {p.panel(panels.low).low, p.panel(panels.high - 1).high};
    const int64_t first = group * p.results + r.low;
    const S *bias = static_cast<const S*>(t.bias), *from = static_cast<const S*>(t.weight);
    for (int64_t i = 0; i < r.size(); i += N)
      store<T, N>(starts + i, bias ? load_first<T, N>(bias + first + i, r.size() - i) : Vec<T, N>{});
    if (p.backward) {
      from += (group * p.sources + sources.low) * p.results + r.low;
      for (int64_t k = 0; k < sources.size(); ++k, from += p.results, to += N)
        for (int64_t i = 0; i < r.size(); i += N)
          store<T, N>(to + i * sources.size(), load_first<T, N>(from + i, r.size() - i));
      return;
    }
    from += first * p.sources;
    for (int64_t i = 0; i < r.size(); i += N, from += N * p.sources, to += N * p.sources)
      for (int64_t k = 0; k < p.sources; k += N) {
        auto get = [&](int l) {
          return load_first<T, N>(from + least(l, r.size() - i - 1) * p.sources + k, p.sources - k);
        };
        transpose<T, N>(get, [&](int l, Vec<T, N> v) {
          if (k + l < p.sources) store<T, N>(to + (k + l) * N, v);
        });
      }
  }

  // Consecutive channels of some pixels; elements from pixel to pixel.
  struct Pixels {
    const T* at;
    int64_t step;
  };
  static int64_t padded(int64_t channels) { return (ceil_div(channels, N) | 1) * N; }

  // Returns pixels in the tensor, if that is wanted and needs no conversion, else a copy in scratch memory.
  Pixels pixels_of(T* to, const S* from, int64_t all, int64_t channels, int64_t pixels, bool where_they_lie) const {
    if constexpr (std::is_same<S, T>::value)
      if (where_they_lie) return {from, all};
    const int64_t step = padded(channels);
    for (int64_t i = 0; i < pixels; ++i)
      for (int64_t c = 0; c < channels; c += N)
        store<T, N>(to + i * step + c, load_first<T, N>(from + i * all + c, channels - c));
    return {to, step};
  }

  // Vectors of the input, so many bytes, that all rows use in turn: half of a second-level cache, which has 1 MiB or
  // more in most processors with AVX-512. Packing them takes as long as a few rows' multiply-adds.
  static constexpr int64_t kInputBytes = kVectorBytes == 64 ? 2 * kTileBytes : kTileBytes;
  static bool packs_input(int64_t rows, int64_t lanes) {
    return rows > 16 * kPointwiseRows && lanes > kPointwiseColumns * N;
  }
  // Elements from vector to vector, an odd number of lines: an even one would use few sets of the cache.
  static int64_t pitch_of(int64_t pixels) { return (pixels | 1) * N; }
  // Pixel by pixel, as they lie in memory.
  static void pack_vectors(T* to, int64_t pitch, const Pixels& from, int64_t lanes, int64_t vectors, int64_t pixels) {
    for (int64_t i = 0; i < pixels; ++i)
      for (int64_t l = 0; l < vectors; ++l) {
        const T* const at = from.at + i * from.step + l * N;
        __builtin_prefetch(at + from.step);
        store<T, N>(to + l * pitch + i * N, load_first<T, N>(at, lanes - l * N));
      }
  }

  // Memory that is needed later: a line of it is prefetched in every step of a loop, as long as there is some left.
  struct Later {
    const char *at, *end;
    int64_t row;  // bytes from row to row, of each of which it is some lines; 0: one run

    template <class E>
    static Later of(const E* from, Range elements, int64_t row = 0) {
      return {reinterpret_cast<const char*>(from + elements.low), reinterpret_cast<const char*>(from + elements.high),
              row * int64_t(sizeof(E))};
    }
    bool is_left() const { return at < end; }
    // For the sums of so many vectors.
    AheadInTensor part(int64_t vectors, int64_t terms) {
      constexpr int64_t kLine = 64;
      const AheadInTensor ahead = {at, row ? row : kLine, row ? kLine : terms * kLine};
      at += ceil_div(vectors, kPointwiseColumns) * ahead.further;
      return ahead;
    }
  };

  // Returns how many sources' weights an item packs at once. Backward, where those of one lie side by side and the
  // next's in another page, few sources of many vectors; the sums go on in the results, if they are of that type.
  static int64_t item_weight_sources(const PointwisePlan& p) {
    constexpr int64_t kFew = kTestsTiles ? 3 : 256;
    return p.backward && std::is_same<S, T>::value ? least(p.sources, kFew) : p.sources;
  }
  static int64_t together(const PointwisePlan& p, int64_t sources) { return least(p.panels, cached(sources * N)); }

  // Meanwhile the next vectors' weights are prefetched, and then the next pixels.
  void multiply_pixels(T* item_weight, const Pixels& source, Range pixels, int64_t group, Range panels) const {
    PointwiseSums<S, T, true> run = {};
    const int64_t all = p.groups * p.results, terms = item_weight ? item_weight_sources(p) : p.sources;
    run.step = {source.step, 1, N}, run.row = all;
    S* const to = this->results_tensor() + pixels.low * all + group * p.results;
    const int64_t at_once = together(p, terms);  // vectors' weights, which all pixels use
    for (int64_t v = panels.low, k = 0; v < panels.high;) {
      const Range vectors = {v, least(v + at_once, panels.high)}, sources = {k, least(k + terms, p.sources)};
      if ((k += terms) >= p.sources) v += at_once, k = 0;
      const int64_t at = group * p.panels + vectors.low;
      run.terms = run.together = sources.size(), run.pitch = run.terms * N, run.add = sources.low > 0;
      run.source = weight + at * run.pitch, run.start = start + at * N;
      run.lanes = p.panel(panels.high - 1).high - vectors.low * N;
      const Range after = {v, least(v + at_once, panels.high)};
      Later next = Later::of(run.source, {vectors.size() * run.pitch, (after.high - vectors.low) * run.pitch});
      if (item_weight) {
        T* const starts = item_weight + at_once * terms * N;
        pack_panels(item_weight, starts, group, vectors, sources);
        run.source = item_weight, run.start = run.add ? nullptr : starts;
        const S* const from = static_cast<const S*>(t.weight) + group * p.sources * p.results;
        const Range r = {after.low * N, least(after.high * N, p.results)};
        next = p.backward ? Later::of(from + k * p.results, r, p.results)
                          : Later::of(from, {r.low * p.sources, r.high * p.sources});
      }
      for (int64_t i = 0; i < pixels.size(); i += kPointwiseRows) {
        run.weight = source.at + i * source.step + sources.low, run.to = to + i * all + vectors.low * N;
        AheadInTensor ahead = next.is_left()
                                  ? next.part(vectors.size(), run.terms)
                                  : AheadInTensor::of(run.weight + kPointwiseRows * source.step, kPointwiseRows);
        run.ahead = &ahead;
        multiply_rows<N>(run, least(kPointwiseRows, pixels.size() - i), vectors.size());
      }
    }
  }

  // Operands that many sums use are packed: vectors of the input as [vector][pixel], and a panel of
  // grad_output's rows as [pixel][row]. In the tensors, every pixel's lie in another page, and in few places of the
  // cache where pixels are a multiple of a power of two apart. Meanwhile the next block's input is prefetched, and then
  // the next rows.
  void sum_pixels(char* own, const Sums& sums, const Pixels& grad, const Pixels& input, int64_t pixels,
                  int64_t group, Range results, bool add, Later next) const {
    const Range rows = p.backward ? Range{0, p.sources} : results, lanes = p.backward ? results : Range{0, p.sources};
    PointwiseSums<T, T, true> run = {};
    run.terms = run.together = pixels, run.step.row = 1, run.row = p.inputs(), run.add = add;
    T* const to = sums.weight + group * p.sources * p.results + rows.low * run.row + lanes.low;
    const int64_t pitch = pitch_of(pixels), vectors = ceil_div(lanes.size(), N);
    const int64_t together = cached(pitch, kInputBytes);  // of the input, for all rows
    for (int64_t v = 0; v < vectors; v += together) {
      const int64_t now = least(together, vectors - v);
      run.source = input.at + v * N, run.lanes = lanes.size() - v * N, run.pitch = N, run.step.source = input.step;
      if (packs_input(rows.size(), lanes.size())) {
        pack_vectors(p.packed.in(own), pitch, {run.source, input.step}, run.lanes, now, pixels);
        run.source = p.packed.in(own), run.pitch = pitch, run.step.source = N;
      }
      for (int64_t i = 0; i < rows.size(); i += kPointwiseRows) {
        const int64_t live = least(kPointwiseRows, rows.size() - i);
        run.weight = grad.at + i, run.step.term = grad.step, run.to = to + i * run.row + v * N;
        if (now > 2 * kPointwiseColumns && live == kPointwiseRows) {
          T* const panel = p.transposed.in(own);
          for (int64_t k = 0; k < pixels; ++k)
            memcpy(panel + k * kPointwiseRows, run.weight + k * grad.step, sizeof(T) * kPointwiseRows);
          run.weight = panel, run.step.term = kPointwiseRows;
        }
        AheadInTensor ahead = next.is_left() ? next.part(now, pixels) : AheadInTensor::of(grad.at + i + N, grad.step);
        run.ahead = &ahead;
        multiply_rows<N>(run, live, now);
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
  void run_item(char* own, int64_t item) const {
    const Range all = share(p.groups * p.panels, item % p.chunks, p.chunks);
    const bool sums_weight = p.wants(CONVGRAD_GRAD_WEIGHT);
    const int64_t sources = p.groups * p.sources, others = p.groups * p.results;
    const S *const source_at = this->source_tensor(), *const other_at = this->other_tensor();
    Range vectors = p.columns_of(item);
    const int64_t end = least(vectors.high * N, p.batch * p.pixels);
    for (bool add = false;; add = true) {
      const Range now = {vectors.low * N, least(end, (vectors.low + p.block) * N)};
      // Whether a whole vector of the input's last channels would end after the tensor.
      const bool last = (p.batch * p.pixels - now.high) * p.groups * p.inputs() < N;
      for (int64_t i = all.low, group; i < all.high; i = (group + 1) * p.panels) {
        group = i / p.panels;
        const Range panels = {i - group * p.panels, least(p.panels, all.high - group * p.panels)};
        const Range results = {p.panel(panels.low).low, p.panel(panels.high - 1).high};
        const Pixels source = pixels_of(p.source.in(own), source_at + now.low * sources + group * p.sources, sources,
                                        p.sources, now.size(), p.backward || !(sums_weight && last));
        if (p.needs_weight()) multiply_pixels(p.item_weight.in(own), source, now, group, panels);
        if (!sums_weight) continue;
        const S* const other_results = other_at + now.low * others + group * p.results + results.low;
        const Pixels other = pixels_of(p.other.in(own), other_results, others, results.size(), now.size(),
                                       !p.backward || !last);
        const S* const inputs = static_cast<const S*>(t.input) + now.high * p.groups * p.inputs();
        const Range next = share(p.groups * p.inputs() * least(p.block * N, end - now.high), group, p.groups);
        sum_pixels(own, this->sums_of(p.segment_of(item)), p.backward ? source : other, p.backward ? other : source,
                   now.size(), group, results, add, Later::of(inputs, next));
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
    if (p.needs_weight() && p.packs_in_items()) {
      const int64_t sources = item_weight_sources(p);
      p.item_weight = p.memory.each.template add<T>(together(p, sources) * (sources + 1) * N);
    }
    if (!p.wants(CONVGRAD_GRAD_WEIGHT)) return p;
    p.other = add(p.item_results());
    p.transposed = p.memory.each.template add<T>(p.block * N * kPointwiseRows);
    const int64_t rows = p.backward ? p.sources : p.item_results(), lanes = p.backward ? p.item_results() : p.sources;
    if (packs_input(rows, lanes)) {
      const int64_t pitch = pitch_of(p.block * N);
      const int64_t most_at_once = most(kInputBytes / int64_t(sizeof(T)), kPointwiseColumns * pitch);
      p.packed = p.memory.each.template add<T>(least(ceil_div(lanes, N) * pitch, most_at_once));
    }
    return p;
  }
  static void run(const Plan& p, const convgrad_tensors& t, char* memory, int threads) {
    Base::run_call(ChannelsLastPointwise(p, t, memory), memory, threads);
  }
};

}  // namespace
