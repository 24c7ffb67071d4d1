// Planes: tiles of a tensor in either layout and any storage type, to and from scratch memory [channel][pixel] of the
// arithmetic type. Positions outside the tensor become zeros, or what its padding mode reads.
//
// With a stride the positions are sorted into phases, those that the same kernel elements can reach; within a phase
// neighboring results read neighboring elements.
#pragma once

#include "../vectors/prefetcher.h"
#include "plan.h"

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

// The place of a position outside the tensor.
constexpr int64_t kNowhere = INT64_MAX;

// Phases of a row whose ranges are listed; those of further phases are computed each time.
constexpr int64_t kListedPhases = 16;

// The side of a copy that is a tensor, and is prefetched: its rows are short, and with a stride not all of them are
// read, so that the processor's own prefetching loses them.
enum Prefetched { kNeither, kFrom, kTo };

// S: storage, T: arithmetic, N: lanes of a vector.
template <class S, class T, int N>
struct Planes {
  template <int Write>
  static void prefetch_ahead(const void* at) {
    __builtin_prefetch(static_cast<const char*>(at) + kAheadBytes, Write);
  }
  // Rows are short: what is left of one is a vector that overlaps the one before, not a loop.
  template <Prefetched side, class To, class From>
  static void copy_row(To* to, const From* from, int64_t count) {
    auto ahead = [&](int64_t i) {
      if constexpr (side == kFrom) prefetch_ahead<0>(from + i);
      if constexpr (side == kTo) prefetch_ahead<1>(to + i);
    };
    ahead(0);
    if (count >= N) {
      for (int64_t i = 0; i + N <= count; i += N) ahead(i + N), copy<N>(to + i, from + i);
      if (count % N) copy<N>(to + count - N, from + count - N);
      return;
    }
    if constexpr (N >= 4) {
      if (kMasks) return store_first<T, N>(to, load_first<T, N>(from, count), count);
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
  // `evens` and `odds` elements of a row, of which it has as many or one less, and zeros up to whole vectors. `end`: of
  // the tensor.
  static void split_two(T* even, T* odd, const S* from, const S* end, int64_t evens, int64_t odds) {
    constexpr auto lanes = std::make_integer_sequence<int, N>();
    prefetch_ahead<0>(from);
    for (int64_t i = 0; i < evens; i += N, from += 2 * N) {
      prefetch_ahead<0>(from + N), prefetch_ahead<0>(from + 2 * N);
      const Vec<T, N> a = load_first<T, N>(from, end - from);
      const Vec<T, N> b = evens - i > N / 2 ? load_first<T, N>(from + N, end - from - N) : a;
      Vec<T, N> first = pick<T, N, false>(a, b, lanes), second = pick<T, N, true>(a, b, lanes);
      if (odds - i < N) {
        first = masked<T, N>(first, first_lanes<T, N>(evens - i));
        second = masked<T, N>(second, first_lanes<T, N>(odds - i));
      }
      store<T, N>(even + i, first), store<T, N>(odd + i, second);
    }
  }
  // The inverse of `split_two`.
  template <class To>
  static void join_two(To* to, const T* even, const T* odd, int64_t count) {
    constexpr auto lanes = std::make_integer_sequence<int, N>();
    for (; count > 0; count -= 2 * N, to += 2 * N, even += N, odd += N) {
      const Vec<T, N> a = load<T, N>(even), b = load<T, N>(odd);
      store_first<T, N>(to, mix<T, N, false>(a, b, lanes), count);
      if (count > N) store_first<T, N>(to + N, mix<T, N, true>(a, b, lanes), count - N);
    }
  }

  // ---- channels_last ----

  // Positions of `channels` channels, to rows `row` elements apart. Where each position's pixel lies `place` says, for
  // whole vectors of positions. `end`: of the tensor; a vector holds the next pixels' channels too where there are few.
  static void to_rows(T* to, int64_t row, const S* from, const S* end, const int64_t* place, int64_t count,
                      int64_t channels, int64_t ahead) {
    const int64_t last = channels < N ? end - from - N : kNowhere - 1;
    for (int64_t done = 0; done < count; done += N, place += N) {
      for (int l = 0; l < N && ahead; ++l)
        if (place[l] != kNowhere) __builtin_prefetch(from + place[l] + ahead, 0);
      for (int64_t c = 0; c < channels; c += N) {
        const int64_t first = channels < N ? 0 : least(c, channels - N);  // the last vector overlaps the one before
        auto get = [&](int l) {
          if (place[l] <= last) return load<T, N>(from + place[l] + first);
          return place[l] == kNowhere ? Vec<T, N>{} : load_first<T, N>(from + place[l], channels);
        };
        transpose<T, N>(get, [&](int l, Vec<T, N> v) {
          if (l < channels) store<T, N>(to + (first + l) * row + done, v);
        });
      }
    }
  }
  // Stores rows in some channels of an image, from `pixel` on. The rows are read up to a vector beyond their end.
  static void unpack_pixels(S* to, const T* from, int64_t row, const Tensor& x, int64_t channel, int64_t channels,
                            int64_t image, int64_t pixel, const int64_t* place, int64_t count, int64_t ahead) {
    to += (image * x.pixels() + pixel) * x.width + channel;
    for (int64_t done = 0; done < count; done += N, place += N) {
      for (int l = 0; l < N && ahead; ++l)
        if (place[l] != kNowhere) __builtin_prefetch(to + place[l] + ahead, 1);
      for (int64_t c = 0; c < channels; c += N) {
        const int64_t first = channels < N ? 0 : least(c, channels - N);
        auto get = [&](int l) { return load<T, N>(from + done + (first + least(l, channels - 1)) * row); };
        transpose<T, N>(get, [&](int l, Vec<T, N> v) {
          if (place[l] != kNowhere) store_first<T, N>(to + place[l] + first, v, channels);
        });
      }
    }
  }

  // Lists where the positions of a packed tile lie, phase by phase, and then those of a row.
  static void list_places(int64_t* place, const PlaneTile& tile, const Tensor& x, const Range r[3]) {
    int64_t* const columns = place + tile.places() - tile.extent[2];
    auto inside = [&](int d, int64_t phase, int64_t i) {
      const int64_t at = x.inside(d, r[d].low + tile.remainder(d, phase) + i * tile.stride[d]);
      return at >= 0 && at < x.size[d] ? at : kNowhere;
    };
    for (int64_t pw = 0; pw < tile.phases[2]; ++pw) {
      for (int64_t k = 0; k < tile.extent[2]; ++k) {
        const int64_t w = inside(2, pw, k);
        columns[k] = w == kNowhere ? kNowhere : w * x.width;
      }
      for (int64_t pd = 0; pd < tile.phases[0]; ++pd)
        for (int64_t ph = 0; ph < tile.phases[1]; ++ph) {
          int64_t* at = place + ((pd * tile.phases[1] + ph) * tile.phases[2] + pw) * tile.positions();
          int64_t* const end = at + tile.positions();
          for (int64_t i = 0; i < tile.extent[0]; ++i)
            for (int64_t j = 0; j < tile.extent[1]; ++j, at += tile.extent[2]) {
              const int64_t d = inside(0, pd, i), h = inside(1, ph, j);
              const bool outside = d == kNowhere || h == kNowhere;
              const int64_t row = outside ? 0 : (d * x.size[1] + h) * x.size[2] * x.width;
              for (int64_t k = 0; k < tile.extent[2]; ++k)
                at[k] = outside || columns[k] == kNowhere ? kNowhere : row + columns[k];
            }
          while (at < end) *at++ = kNowhere;
        }
    }
  }
  // Lists where results lie: rows and columns some steps apart, whose rows are `pitch` apart in scratch memory.
  static void list_results(int64_t* place, const Tensor& x, int64_t rows, int64_t row_step, int64_t columns,
                           int64_t column_step, int64_t pitch) {
    const int64_t count = (rows - 1) * pitch + columns;
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < pitch && i * pitch + j < count; ++j)
        *place++ = j < columns ? (i * row_step * x.size[2] + j * column_step) * x.width : kNowhere;
    for (int64_t i = count; i < round_up(count, N); ++i) *place++ = kNowhere;
  }

  // ---- contiguous ----

  // Returns the positions of a phase of the width that are inside the tensor. Position i is at
  // low + remainder + i * stride.
  static Range inside(const PlaneTile& tile, int64_t phase, int64_t low, int64_t width) {
    const int64_t base = low + tile.remainder(2, phase), step = tile.stride[2], extent = tile.extent[2];
    const int64_t first = least(extent, most(0, -floor_div(base, step)));
    return {first, most(first, least(extent, floor_div(width - 1 - base, step) + 1))};
  }

  // Copies rows of one channel to each phase of the width.
  struct Split {
    const PlaneTile& tile;
    const Tensor& x;
    const S* end;  // of the tensor
    int64_t low, plane;
    bool borders;
    Range phase[kListedPhases];  // found once, as rows in many phases are short

    Split(const PlaneTile& t, const Tensor& x, const S* end, int64_t low, bool borders)
        : tile(t), x(x), end(end), low(low), plane(t.plane()), borders(borders || x.padding_mode) {
      const int64_t listed = most(2, least(kListedPhases, t.phases[2]));
      for (int64_t p = 0; p < listed; ++p) phase[p] = inside(t, p, low, x.size[2]);
    }

    // Positions of a phase outside the tensor.
    void border(T* to, const S* from, int64_t p, Range r) const {
      if (!borders) return;
      if (!x.padding_mode) return zero(to + r.low, r.size());
      for (int64_t i = r.low; i < r.high; ++i)
        to[i] = load_one<T>(from + x.inside(2, low + tile.remainder(2, p) + i * tile.stride[2]));
    }

    void row(T* to, const S* from) const {
      const int64_t step = tile.stride[2];
      const bool two = step == 2 && tile.phases[2] == 2;
      if (two) {
        const int e = phase[0].low <= phase[1].low ? 0 : 1, o = 1 - e;  // whose columns come first
        split_two(to + e * plane + phase[e].low, to + o * plane + phase[o].low, from + low + e + 2 * phase[e].low, end,
                  phase[e].size(), phase[o].size());
      }
      for (int64_t p = 0; p < tile.phases[2]; ++p, to += plane) {
        const Range r = p < kListedPhases ? phase[p] : inside(tile, p, low, x.size[2]);
        if (step == 1)
          copy_row<kFrom>(to + r.low, from + low + r.low, r.size());
        else if (!two)
          copy_few(to + r.low, from + low + tile.remainder(2, p) + r.low * step, step, r.size());
        border(to, from, p, {0, r.low}), border(to, from, p, {r.high, tile.extent[2]});
      }
    }
  };

  // The range `r` of channels from `channel` on and images from `image` on, in the order in which they lie. `again`:
  // the scratch memory holds the same range of other channels or images, and so its zeros and `place`. `ahead`: where
  // elements lie that are prefetched, so many from those that are read; 0 for none.
  static void pack(T* to, int64_t* place, const PlaneTile& tile, const S* from, int64_t batch, const Tensor& x,
                   int64_t channel, int64_t image, const Range r[3], bool channels_last, bool again, int64_t ahead) {
    const S* const end = from + batch * x.pixels() * x.width;
    if (channels_last) {
      if (!again) list_places(place, tile, x, r);
      from += image * x.pixels() * x.width + channel;
      for (int64_t n = 0; n < tile.images; ++n, from += x.pixels() * x.width)
        for (int64_t phase = 0; phase < tile.image() / tile.plane(); ++phase)
          to_rows(to + n * tile.image() + phase * tile.plane(), tile.channel(), from, end,
                  place + phase * tile.positions(), tile.positions(), tile.channels, ahead);
      for (int64_t c = 0; c < tile.channels && !again; ++c)
        for (int64_t plane = 0; plane < tile.images * tile.image(); plane += tile.plane())
          zero(to + c * tile.channel() + plane + tile.positions(), tile.plane() - tile.positions());
      return;
    }
    const Split split(tile, x, end, r[2].low, !again);
    from += (image * x.width + channel) * x.pixels();
    for (int64_t n = 0; n < tile.images; ++n)
      for (int64_t c = 0; c < tile.channels; ++c)
        pack_slices(to + c * tile.channel() + n * tile.image(), split, from + (n * x.width + c) * x.pixels(), x, r);
  }

  // One image, of one channel. What no row fills becomes zeros, too: the last vectors of results read it, if for lanes
  // that are dropped, and memory as it was may hold subnormal numbers, with which Intel's processors take a hundred
  // cycles for a multiply-add.
  static void pack_slices(T* to, const Split& split, const S* from, const Tensor& x, const Range r[3]) {
    const PlaneTile& tile = split.tile;
    const int64_t* s = tile.stride;
    // Rows that follow one another there and here are one long row.
    const bool whole = s[1] == 1 && s[2] == 1 && split.low == 0 && tile.extent[2] == x.size[2];
    const bool together = whole && r[1].low >= 0 && r[1].high <= x.size[1];
    // Rows are written in the order in which they lie here: what goes beyond the end of one is overwritten by the next.
    const int64_t slice = tile.extent[1] * tile.extent[2], last = split.plane - tile.extent[0] * slice;
    for (int64_t pd = 0; pd < tile.phases[0]; ++pd)
      for (int64_t ph = 0; ph < tile.phases[1]; ++ph) {
        T* at = to + (pd * tile.phases[1] + ph) * tile.phases[2] * split.plane;
        for (int64_t i = 0; i < tile.extent[0]; ++i) {
          const int64_t d = r[0].low + tile.remainder(0, pd) + i * s[0], in_d = x.inside(0, d);
          T* const end = at + slice + (i + 1 == tile.extent[0] ? last : 0);
          const bool there = d < r[0].high;
          if (there && together && in_d >= 0 && in_d < x.size[0]) {
            copy_row<kFrom>(at, from + (in_d * x.size[1] + r[1].low) * x.size[2], r[1].size() * x.size[2]);
            at += r[1].size() * x.size[2];
          } else if (there) {
            for (int64_t h = r[1].low + tile.remainder(1, ph); h < r[1].high; h += s[1], at += tile.extent[2]) {
              const int64_t in_h = x.inside(1, h), pixel = (in_d * x.size[1] + in_h) * x.size[2];
              const bool outside = in_d < 0 || in_d >= x.size[0] || in_h < 0 || in_h >= x.size[1];
              if (!outside)
                split.row(at, from + pixel);
              else if (split.borders)
                for (int64_t phase = 0; phase < tile.phases[2]; ++phase)
                  zero(at + phase * split.plane, tile.extent[2]);
            }
          }
          for (int64_t phase = 0; phase < tile.phases[2] && split.borders; ++phase)
            zero(at + phase * split.plane, end - at);
          at = end;
        }
      }
  }

  // `count` pixels of `channels` channels of a contiguous tensor, from rows `row` elements apart.
  static void unpack_row(S* to, const T* from, int64_t row, const Tensor& x, int64_t channel, int64_t channels,
                         int64_t image, int64_t pixel, int64_t count) {
    for (int64_t c = 0; c < channels; ++c)
      copy_row<kTo>(to + (image * x.width + channel + c) * x.pixels() + pixel, from + c * row, count);
  }
};

}  // namespace
