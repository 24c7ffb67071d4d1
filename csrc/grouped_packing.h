// Planes: tiles of a tensor in either layout and any storage type, to and from scratch memory [channel][pixel] of the
// arithmetic type. Positions outside the tensor become zeros, or what its padding mode reads.
//
// With a stride the positions are sorted into phases, those that the same kernel elements can reach; within a phase
// neighbouring results read neighbouring elements.
#pragma once

#include "grouped_plan.h"

namespace {

// Lanes Odd, Odd + 2, ... of two vectors that follow one another.
template <class T, int N, bool Odd, int... I>
inline Vec<T, N> pick(Vec<T, N> a, Vec<T, N> b, std::integer_sequence<int, I...>) {
  return shuffle<(2 * I + Odd)...>(a, b);
}
// Lanes of two vectors in turn, from the first or from the second half of them.
template <class T, int N, bool High, int... I>
inline Vec<T, N> mix(Vec<T, N> a, Vec<T, N> b, std::integer_sequence<int, I...>) {
  return shuffle<((High ? N / 2 : 0) + I / 2 + (I % 2 ? N : 0))...>(a, b);
}

// S: storage, T: arithmetic, N: lanes of a vector.
template <class S, class T, int N>
struct Planes {
  static constexpr auto kLanes = std::make_integer_sequence<int, N>();

  // Rows are short: what is left of one is a vector that overlaps the one before, not a loop.
  template <class To, class From>
  static void copy_row(To* to, const From* from, int64_t count) {
    if (count >= N) {
      for (int64_t i = 0; i + N <= count; i += N) copy<N>(to + i, from + i);
      if (count % N) copy<N>(to + count - N, from + count - N);
      return;
    }
    if constexpr (N >= 4) {
      if (count >= N / 2) return copy<N / 2>(to, from), copy<N / 2>(to + count - N / 2, from + count - N / 2);
    }
    copy_few(to, from, 1, count);
  }
  template <int M, class To, class From>
  static void copy(To* to, const From* from) {
    store<T, M>(to, load<T, M>(from));
  }
  // A few elements, `step` apart there; not a loop that the compiler prepares for many.
  template <class To, class From>
  static void copy_few(To* to, const From* from, int64_t step, int64_t count) {
    for (; count > 0; --count, from += step) {
      store_one<T>(to++, load_one<T>(from));
      asm volatile("" : : : "memory");
    }
  }
  static void zero(T* to, int64_t count) {
    for (; count >= N; count -= N, to += N) store<T, N>(to, Vec<T, N>{});
    for (; count > 0; --count) {
      *to++ = 0;
      asm volatile("" : : : "memory");  // else the compiler calls memset for one element
    }
  }
  // Every second element of a row of at least a vector, from the first and from the second one on.
  template <class From>
  static void split_two(T* even, T* odd, const From* from, int64_t count) {
    for (int64_t i = 0;; i = least(i + N, count - N)) {  // the last vector overlaps the one before
      const Vec<T, N> a = load<T, N>(from + 2 * i), b = load<T, N>(from + 2 * i + N);
      store<T, N>(even + i, pick<T, N, false>(a, b, kLanes)), store<T, N>(odd + i, pick<T, N, true>(a, b, kLanes));
      if (i == count - N) return;
    }
  }
  static void join_two(T* to, const T* even, const T* odd, int64_t count) {
    int64_t i = 0;
    for (; i + N <= count; i += N) {
      const Vec<T, N> a = load<T, N>(even + i), b = load<T, N>(odd + i);
      store<T, N>(to + 2 * i, mix<T, N, false>(a, b, kLanes));
      store<T, N>(to + 2 * i + N, mix<T, N, true>(a, b, kLanes));
    }
    for (; i < count; ++i) to[2 * i] = even[i], to[2 * i + 1] = odd[i];
  }

  // A row of `count` positions of `channels` channels, to rows `row` elements apart; up to a vector beyond their end.
  // The pixels lie `step` elements apart. Positions that are not `inside` the tensor become zeros.
  static void to_rows(T* to, int64_t row, const S* from, int64_t step, Range inside, int64_t channels, int64_t count,
                      int64_t ahead) {
    for (int64_t done = 0; done < count; done += N, from += N * step) {
      if (ahead)
        for (int l = 0; l < N; ++l) __builtin_prefetch(from + l * step + ahead, 0);
      const Range now = {inside.low - done, inside.high - done};
      if (channels < N)
        to_rows<kSome>(to + done, row, from, step, now, channels);
      else if (now.low <= 0 && now.high >= N)
        to_rows<kAll>(to + done, row, from, step, now, channels);
      else
        to_rows<kAllChannels>(to + done, row, from, step, now, channels);
    }
  }
  enum Full { kSome, kAllChannels, kAll };
  template <Full F>
  static inline void to_rows(T* to, int64_t row, const S* from, int64_t step, Range inside, int64_t channels) {
    for (int64_t c = 0; c < channels; c += N) {
      const int64_t first = F == kSome ? 0 : least(c, channels - N);  // the last vector overlaps the one before
      Vec<T, N> v[N];
#pragma GCC unroll 16
      for (int l = 0; l < N; ++l) {
        if (F == kAll)
          v[l] = load<T, N>(from + l * step + first);
        else if (l < inside.low || l >= inside.high)
          v[l] = Vec<T, N>{};
        else
          v[l] = F == kSome ? load_first<T, N>(from + l * step, channels) : load<T, N>(from + l * step + first);
      }
      transpose<T, N>(v);
#pragma GCC unroll 16
      for (int l = 0; l < N; ++l)
        if (F != kSome || l < channels) store<T, N>(to + (first + l) * row, v[l]);
    }
  }
  // Back; the rows are read up to a vector beyond their end.
  static void from_rows(S* to, int64_t step, const T* from, int64_t row, int64_t channels, int64_t count,
                        int64_t ahead) {
    for (int64_t done = 0; done < count; done += N, to += N * step) {
      if (ahead)
        for (int l = 0; l < N; ++l) __builtin_prefetch(to + l * step + ahead, 1);
      if (channels < N)
        from_rows<kSome>(to, step, from + done, row, channels, count - done);
      else if (count - done < N)
        from_rows<kAllChannels>(to, step, from + done, row, channels, count - done);
      else
        from_rows<kAll>(to, step, from + done, row, channels, N);
    }
  }
  template <Full F>
  static inline void from_rows(S* to, int64_t step, const T* from, int64_t row, int64_t channels, int64_t count) {
    for (int64_t c = 0; c < channels; c += N) {
      const int64_t first = F == kSome ? 0 : least(c, channels - N);
      Vec<T, N> v[N];
#pragma GCC unroll 16
      for (int l = 0; l < N; ++l) v[l] = load<T, N>(from + (F == kSome ? least(l, channels - 1) : first + l) * row);
      transpose<T, N>(v);
#pragma GCC unroll 16
      for (int l = 0; l < N; ++l) {
        if (F != kAll && l >= count) break;
        if (F == kSome)
          store_first<T, N>(to + l * step, v[l], channels);
        else
          store<T, N>(to + l * step + first, v[l]);
      }
    }
  }

  // Which positions of a phase of the width lie inside the tensor. Position i lies at low + remainder + i * stride.
  static Range inside(const PlaneTile& tile, int64_t phase, int64_t low, int64_t width) {
    const int64_t base = low + tile.remainder(2, phase), step = tile.stride[2], extent = tile.extent[2];
    const int64_t first = least(extent, most(0, -floor_div(base, step)));
    return {first, most(first, least(extent, floor_div(width - 1 - base, step) + 1))};
  }

  // Rows of one channel, to their place in each phase of the width.
  struct Split {
    const PlaneTile& tile;
    const Tensor& x;
    int64_t low, plane;
    Range phase[2];  // of the first two phases
    // With a stride of two: where both phases are inside, and everything else, element by element.
    static constexpr int kMostEdges = 16;
    Range both;
    struct Edge {
      int64_t to, from;  // -1: a zero
    } edges[kMostEdges];
    int count = 0;
    bool two, borders;

    Split(const PlaneTile& t, const Tensor& x, int64_t low, bool borders)
        : tile(t), x(x), low(low), plane(t.plane()), borders(borders || x.padding_mode) {
      const int64_t width = x.size[2];
      phase[0] = inside(t, 0, low, width), phase[1] = t.phases[2] < 2 ? Range{0, 0} : inside(t, 1, low, width);
      both = {most(phase[0].low, phase[1].low), least(phase[0].high, phase[1].high)};
      const int64_t outside = t.extent[2] - both.size();
      two = t.stride[2] == 2 && t.phases[2] == 2 && both.size() >= N && 2 * outside <= kMostEdges;
      for (int p = 0; p < 2 && two; ++p)
        for (int64_t i = 0; i < t.extent[2]; ++i) {
          if (i == both.low) i = both.high;
          if (i >= t.extent[2]) break;
          const bool outside = i < phase[p].low || i >= phase[p].high;
          const int64_t from = outside && !x.padding_mode ? -1 : column(p, i);
          if (!outside || this->borders) edges[count++] = {p * plane + i, from};
        }
    }

    // The column that is read for a position of a phase.
    int64_t column(int64_t p, int64_t i) const {
      return x.inside(2, low + tile.remainder(2, p) + i * tile.stride[2]);
    }
    // Positions of a phase outside the tensor.
    template <class From>
    void border(T* to, const From* from, int64_t p, Range r) const {
      if (!borders) return;
      if (!x.padding_mode) return zero(to + r.low, r.size());
      for (int64_t i = r.low; i < r.high; ++i) to[i] = load_one<T>(from + column(p, i));
    }

    template <class From>
    void row(T* to, const From* from) const {
      const int64_t extent = tile.extent[2], step = tile.stride[2];
      if (step == 1) {
        border(to, from, 0, {0, phase[0].low}), border(to, from, 0, {phase[0].high, extent});
        return copy_row(to + phase[0].low, from + low + phase[0].low, phase[0].size());
      }
      if (two) {
        for (const Edge* e = edges; e != edges + count; ++e) {
          to[e->to] = e->from < 0 ? T(0) : load_one<T>(from + e->from);
          asm volatile("" : : : "memory");  // as above
        }
        return split_two(to + both.low, to + both.low + plane, from + low + 2 * both.low, both.size());
      }
      for (int64_t p = 0; p < tile.phases[2]; ++p) {
        const Range r = p < 2 ? phase[p] : inside(tile, p, low, x.size[2]);
        T* row = to + p * plane;
        border(row, from, p, {0, r.low}), border(row, from, p, {r.high, extent});
        copy_few(row + r.low, from + low + tile.remainder(2, p) + r.low * step, step, r.size());
      }
    }
  };

  // The range `r` of channels from `channel` on and images from `image` on, in the order in which they lie. `again`:
  // the scratch memory holds the same range of other channels or images, and so its zeros. `ahead`: where elements lie
  // that are prefetched, so many from those that are read; 0 for none.
  static void pack(T* to, const PlaneTile& tile, const S* from, const Tensor& x, int64_t channel, int64_t image,
                   const Range r[3], bool channels_last, bool again, int64_t ahead) {
    const Split split(tile, x, r[2].low, !again);
    if (channels_last) {
      from += image * x.pixels() * x.width + channel;
      for (int64_t n = 0; n < tile.images; ++n)
        pack_slices(to + n * tile.image(), split, from + n * x.pixels() * x.width, x, tile.channels, r, true, ahead);
      return;
    }
    from += (image * x.width + channel) * x.pixels();
    for (int64_t n = 0; n < tile.images; ++n)
      for (int64_t c = 0; c < tile.channels; ++c)
        pack_slices(to + c * tile.channel() + n * tile.image(), split, from + (n * x.width + c) * x.pixels(), x, 1, r,
                    false, 0);
  }

  // One image, of one channel or of all.
  static void pack_slices(T* to, const Split& split, const S* from, const Tensor& x, int64_t channels, const Range r[3],
                          bool channels_last, int64_t ahead) {
    const PlaneTile& tile = split.tile;
    const int64_t* s = tile.stride;
    // Rows that follow one another there and here are one long row.
    const bool whole = !channels_last && s[1] == 1 && s[2] == 1 && split.low == 0 && tile.extent[2] == x.size[2];
    const bool together = whole && r[1].low >= 0 && r[1].high <= x.size[1];
    // Rows are written in the order in which they lie here: what goes beyond the end of one is overwritten by the next.
    for (int64_t pd = 0; pd < tile.phases[0]; ++pd)
      for (int64_t ph = 0; ph < tile.phases[1]; ++ph)
        for (int64_t d = r[0].low + tile.remainder(0, pd), i = 0; d < r[0].high; d += s[0], ++i) {
          T* at = to + (pd * tile.phases[1] + ph) * tile.phases[2] * split.plane + i * tile.extent[1] * tile.extent[2];
          const int64_t in_d = x.inside(0, d);
          if (together && in_d >= 0 && in_d < x.size[0]) {
            copy_row(at, from + (in_d * x.size[1] + r[1].low) * x.size[2], r[1].size() * x.size[2]);
            continue;
          }
          for (int64_t h = r[1].low + tile.remainder(1, ph); h < r[1].high; h += s[1], at += tile.extent[2]) {
            const int64_t in_h = x.inside(1, h), pixel = (in_d * x.size[1] + in_h) * x.size[2];
            const bool outside = in_d < 0 || in_d >= x.size[0] || in_h < 0 || in_h >= x.size[1];
            if (!outside && channels_last)
              pack_pixels(at, split, from + pixel * x.width, x, ahead);
            else if (!outside)
              split.row(at, from + pixel);
            else if (split.borders || channels_last)  // transpositions may have written here, beyond the row before
              zero_row(at, split, channels);
          }
        }
  }

  static void zero_row(T* to, const Split& split, int64_t channels) {
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t phase = 0; phase < split.tile.phases[2]; ++phase)
        zero(to + c * split.tile.channel() + phase * split.plane, split.tile.extent[2]);
  }

  // A row of pixels, each phase of the width to its place.
  static void pack_pixels(T* to, const Split& split, const S* from, const Tensor& x, int64_t ahead) {
    const PlaneTile& tile = split.tile;
    for (int64_t phase = 0; phase < tile.phases[2]; ++phase, to += split.plane) {
      const Range r = phase < 2 ? split.phase[phase] : inside(tile, phase, split.low, x.size[2]);
      const int64_t first = split.low + tile.remainder(2, phase), done = least(tile.extent[2], round_up(r.high, N));
      to_rows(to, tile.channel(), from + first * x.width, tile.stride[2] * x.width, r, tile.channels, r.high,
              ahead);
      if (x.padding_mode)
        for (int64_t i = 0; i < tile.extent[2]; ++i) {
          if (i == r.low) i = r.high;
          if (i == tile.extent[2]) break;
          const S* pixel = from + split.column(phase, i) * x.width;
          for (int64_t c = 0; c < tile.channels; ++c) to[c * tile.channel() + i] = load_one<T>(pixel + c);
        }
      if (done == tile.extent[2] || !split.borders || x.padding_mode) continue;
      for (int64_t c = 0; c < tile.channels; ++c) zero(to + c * tile.channel() + done, tile.extent[2] - done);
    }
  }

  // `count` pixels of `channels` channels, from rows `row` elements apart; in channels_last they may be `step` apart.
  static void unpack_row(S* to, const T* from, int64_t row, const Tensor& x, int64_t channel, int64_t channels,
                         int64_t image, int64_t pixel, int64_t count, bool channels_last, int64_t step = 1,
                         int64_t ahead = 0) {
    if (channels_last)
      return from_rows(to + (image * x.pixels() + pixel) * x.width + channel, step * x.width, from, row, channels,
                       count, ahead);
    for (int64_t c = 0; c < channels; ++c)
      copy_row(to + (image * x.width + channel + c) * x.pixels() + pixel, from + c * row, count);
  }
};

}  // namespace
