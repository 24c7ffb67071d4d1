// Planes: tiles of a tensor in either layout and any storage type, to and from scratch memory [channel][pixel] of the
// arithmetic type. Positions outside the tensor become zeros.
//
// With a stride the positions are sorted into phases, those that the same kernel elements can reach; within a phase
// neighbouring results read neighbouring elements.
#pragma once

#include "packing.h"

namespace {

// Lanes Odd, Odd + 2, ... of two vectors that follow one another.
template <class T, int N, bool Odd, int... I>
inline Vec<T, N> pick(Vec<T, N> a, Vec<T, N> b, std::integer_sequence<int, I...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, (2 * I + Odd)...);
#else
  using Lanes = Vec<typename std::conditional<sizeof(T) == 8, int64_t, int32_t>::type, N>;
  return __builtin_shuffle(a, b, Lanes{(2 * I + Odd)...});
#endif
}
// Lanes of two vectors in turn, from the first or from the second half of them.
template <class T, int N, bool High, int... I>
inline Vec<T, N> mix(Vec<T, N> a, Vec<T, N> b, std::integer_sequence<int, I...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, ((High ? N / 2 : 0) + I / 2 + (I % 2 ? N : 0))...);
#else
  using Lanes = Vec<typename std::conditional<sizeof(T) == 8, int64_t, int32_t>::type, N>;
  return __builtin_shuffle(a, b, Lanes{((High ? N / 2 : 0) + I / 2 + (I % 2 ? N : 0))...});
#endif
}

// A packed tile: [channel][image][phase in each dimension][position].
struct PlaneTile {
  int64_t channels, images;
  int64_t phases[3], stride[3], dilation[3], extent[3];
  int64_t slack;  // elements after each channel: a row may be written in whole vectors, beyond its end

  int64_t plane() const { return extent[0] * extent[1] * extent[2]; }
  int64_t image() const { return phases[0] * phases[1] * phases[2] * plane(); }
  int64_t channel() const { return images * image() + slack; }
  // Of kernel element (or phase) k in dimension d: where its first position is.
  int64_t remainder(int d, int64_t k) const { return k * dilation[d] % stride[d]; }
};

// S: storage, T: arithmetic, N: lanes of a vector.
template <class S, class T, int N>
struct Planes {
  static constexpr auto kLanes = std::make_integer_sequence<int, N>();

  // Rows are short: what is left of one is a vector that overlaps the one before, not a loop.
  template <class From>
  static void copy_row(T* to, const From* from, int64_t count) {
    int64_t i = 0;
    for (; i + N <= count; i += N) store<T, N>(to + i, load<T, N>(from + i));
    if (i == count) return;
    if (count > N) return store<T, N>(to + count - N, load<T, N>(from + count - N));
    for (; i < count; ++i) to[i] = load_one<T>(from + i);
  }
  static void store_row(S* to, const T* from, int64_t count) {
    int64_t i = 0;
    for (; i + N <= count; i += N) store<T, N>(to + i, load<T, N>(from + i));
    if (i == count) return;
    if (count > N) return store<T, N>(to + count - N, load<T, N>(from + count - N));
    for (; i < count; ++i) store_one<T>(to + i, from[i]);
  }
  static void zero(T* to, int64_t count) {
    for (; count >= N; count -= N, to += N) store<T, N>(to, Vec<T, N>{});
    for (; count > 0; --count) {
      *to++ = 0;
      asm volatile("" : : : "memory");  // else the compiler calls memset for one element
    }
  }
  // Every second element of a row, from the first and from the second one on.
  template <class From>
  static void split_two(T* even, T* odd, const From* from, int64_t count) {
    int64_t i = 0;
    for (; i + N <= count; i += N) {
      const Vec<T, N> a = load<T, N>(from + 2 * i), b = load<T, N>(from + 2 * i + N);
      store<T, N>(even + i, pick<T, N, false>(a, b, kLanes)), store<T, N>(odd + i, pick<T, N, true>(a, b, kLanes));
    }
    for (; i < count; ++i) even[i] = load_one<T>(from + 2 * i), odd[i] = load_one<T>(from + 2 * i + 1);
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

  // `count` pixels of `channels` channels that lie together, to rows `row` elements apart; up to a vector beyond their
  // end.
  static void to_rows(T* to, int64_t row, const S* from, int64_t width, int64_t channels, int64_t count) {
    for (int64_t c = 0; c < channels; c += N) {
      const int64_t live = least(N, channels - c);
      for (int64_t done = 0; done < count; done += N) {
        Vec<T, N> v[N];
#pragma GCC unroll 16
        for (int l = 0; l < N; ++l) v[l] = load_first<T, N>(from + least(done + l, count - 1) * width + c, live);
        transpose<T, N>(v);
        if (live == N) {
#pragma GCC unroll 16
          for (int l = 0; l < N; ++l) store<T, N>(to + (c + l) * row + done, v[l]);
        } else {
          for (int64_t l = 0; l < live; ++l) store<T, N>(to + (c + l) * row + done, v[l]);
        }
      }
    }
  }
  // Back; the rows are read up to a vector beyond their end.
  static void from_rows(S* to, int64_t width, const T* from, int64_t row, int64_t channels, int64_t count) {
    for (int64_t c = 0; c < channels; c += N) {
      const int64_t live = least(N, channels - c);
      for (int64_t done = 0; done < count; done += N) {
        const int64_t now = least(N, count - done);
        Vec<T, N> v[N];
#pragma GCC unroll 16
        for (int l = 0; l < N; ++l) v[l] = load<T, N>(from + least(c + l, channels - 1) * row + done);
        transpose<T, N>(v);
        if (live == N && now == N) {
#pragma GCC unroll 16
          for (int l = 0; l < N; ++l) store<T, N>(to + (done + l) * width + c, v[l]);
        } else {
          for (int64_t l = 0; l < now; ++l) store_first<T, N>(to + (done + l) * width + c, v[l], live);
        }
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
    int64_t low, width, plane;
    Range phase[2];  // of the first two phases
    Range both;      // where both are inside

    Split(const PlaneTile& t, int64_t low, int64_t width) : tile(t), low(low), width(width), plane(t.plane()) {
      phase[0] = phase[1] = both = inside(t, 0, low, width);
      if (t.phases[2] < 2) return;
      phase[1] = inside(t, 1, low, width);
      both = {most(phase[0].low, phase[1].low), least(phase[0].high, phase[1].high)};
    }

    template <class From>
    void row(T* to, const From* from) const {
      const int64_t extent = tile.extent[2];
      if (tile.stride[2] == 1) {
        zero(to, phase[0].low), zero(to + phase[0].high, extent - phase[0].high);
        return copy_row(to + phase[0].low, from + low + phase[0].low, phase[0].size());
      }
      const bool two = tile.stride[2] == 2 && tile.phases[2] == 2 && both.size();
      for (int64_t p = 0; p < tile.phases[2]; ++p) {
        const Range r = p < 2 ? phase[p] : inside(tile, p, low, width);
        const int64_t step = tile.stride[2];
        const From* at = from + low + tile.remainder(2, p);
        T* row = to + p * plane;
        zero(row, r.low), zero(row + r.high, extent - r.high);
        for (int64_t i = r.low; i < (two ? both.low : r.high); ++i) row[i] = load_one<T>(at + i * step);
        for (int64_t i = two ? both.high : r.high; i < r.high; ++i) row[i] = load_one<T>(at + i * step);
      }
      if (two) split_two(to + both.low, to + plane + both.low, from + low + 2 * both.low, both.size());
    }
  };

  // The range `r` of channels from `channel` on and images from `image` on. `row`: scratch memory for one row of the
  // tensor and all channels. Channels are taken in the order in which they lie.
  static void pack(T* to, const PlaneTile& tile, const S* from, const Tensor& x, int64_t channel, int64_t image,
                   const Range r[3], bool channels_last, T* row) {
    const Split split(tile, r[2].low, x.size[2]);
    if (channels_last) {
      from += image * x.pixels() * x.width + channel;
      for (int64_t n = 0; n < tile.images; ++n)
        pack_slices(to + n * tile.image(), split, from + n * x.pixels() * x.width, x, tile.channels, r, true, row);
      return;
    }
    from += (image * x.width + channel) * x.pixels();
    for (int64_t n = 0; n < tile.images; ++n)
      for (int64_t c = 0; c < tile.channels; ++c)
        pack_slices(to + c * tile.channel() + n * tile.image(), split, from + (n * x.width + c) * x.pixels(), x, 1, r,
                    false, row);
  }

  // One image, of one channel or of all.
  static void pack_slices(T* to, const Split& split, const S* from, const Tensor& x, int64_t channels, const Range r[3],
                          bool channels_last, T* row) {
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
          if (together && d >= 0 && d < x.size[0]) {
            copy_row(at, from + (d * x.size[1] + r[1].low) * x.size[2], r[1].size() * x.size[2]);
            continue;
          }
          for (int64_t h = r[1].low + tile.remainder(1, ph); h < r[1].high; h += s[1], at += tile.extent[2]) {
            const bool outside = d < 0 || d >= x.size[0] || h < 0 || h >= x.size[1];
            const int64_t pixel = (d * x.size[1] + h) * x.size[2];
            if (outside)
              zero_row(at, split, channels);
            else if (channels_last)
              pack_pixels(at, split, from + pixel * x.width, x, row);
            else
              split.row(at, from + pixel);
          }
        }
  }

  static void zero_row(T* to, const Split& split, int64_t channels) {
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t phase = 0; phase < split.tile.phases[2]; ++phase)
        zero(to + c * split.tile.channel() + phase * split.plane, split.tile.extent[2]);
  }

  // A row of pixels; without a stride straight to its place.
  static void pack_pixels(T* to, const Split& split, const S* from, const Tensor& x, T* row) {
    const PlaneTile& tile = split.tile;
    if (tile.stride[2] == 1) {
      const Range r = split.phase[0];
      to_rows(to + r.low, tile.channel(), from + (split.low + r.low) * x.width, x.width, tile.channels, r.size());
      for (int64_t c = 0; c < tile.channels; ++c, to += tile.channel())
        zero(to, r.low), zero(to + r.high, tile.extent[2] - r.high);
      return;
    }
    const int64_t width = x.size[2], reach = tile.extent[2] * tile.stride[2];
    const int64_t first = least(width, most(0, split.low)), last = most(first, least(width, split.low + reach));
    to_rows(row + first, width + N, from + first * x.width, x.width, tile.channels, last - first);
    for (int64_t c = 0; c < tile.channels; ++c) split.row(to + c * tile.channel(), row + c * (width + N));
  }

  // `count` neighbouring pixels of `channels` channels, from rows `row` elements apart.
  static void unpack_row(S* to, const T* from, int64_t row, const Tensor& x, int64_t channel, int64_t channels,
                         int64_t image, int64_t pixel, int64_t count, bool channels_last) {
    if (channels_last)
      return from_rows(to + (image * x.pixels() + pixel) * x.width + channel, x.width, from, row, channels, count);
    for (int64_t c = 0; c < channels; ++c)
      store_row(to + (image * x.width + channel + c) * x.pixels() + pixel, from + c * row, count);
  }
};

}  // namespace
