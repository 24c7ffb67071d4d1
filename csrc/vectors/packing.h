// Packing: tiles of a tensor in either layout and any storage type, to scratch memory [vector][pixel][lane] of the
// arithmetic type, and results from scratch memory [pixel][lane]. Positions outside the tensor are packed as zeros, or
// as its padding mode reads them. A lane is a channel of an image.
#pragma once

#include "plan.h"
#include "reduce.h"

namespace {

// The lanes of a work unit: channels of one image, or all channels of several images. In contiguous layout, one vector.
struct Block {
  int64_t channel, image;      // the first ones
  int64_t live;                // lanes in use
  int64_t lanes;               // rounded up to whole vectors
  int64_t channels_per_image;  // of the lanes
};

// S: storage, T: arithmetic, N: lanes of a vector.
template <class S, class T, int N>
struct Packing {
  // Finds where each lane's image plane begins. Unused lanes repeat the first: they may be read, and count as 0.
  template <class P>
  static void planes(P* base, const Tensor& x, const Block& b, P** lane) {
    const int64_t pixels = x.pixels(), to_channel = x.step * pixels, to_image = x.width * pixels;
    base += b.image * to_image + (b.channel * x.step + x.first) * pixels;
    P* at = base;
    for (int64_t l = 0, left = b.channels_per_image; l < N; ++l) {
      lane[l] = l < b.live ? at : base;
      at += to_channel;
      if (--left == 0) left = b.channels_per_image, at += to_image - b.channels_per_image * to_channel;
    }
  }

  // `count` pixels from `pixel` on; they fill rows of `width` pixels that lie `row` elements apart.
  static void pack_planes(T* to, S* const* lane, int64_t live, int64_t pixel, int64_t count, int64_t width,
                          int64_t row) {
    if (count < N) return pack_few(to, lane, live, pixel, count, width, row);
    int64_t column = 0;
    T* at_row = to;
    for (int64_t done = 0;;) {
      Vec<T, N> v[N];
      UNROLL for (int l = 0; l < N; ++l) v[l] = load<T, N>(lane[l] + pixel + done);
      if (live < N)
        UNROLL for (int l = 0; l < N; ++l) v[l] = l < live ? v[l] : Vec<T, N>{};
      transpose<T, N>(v);
      if (column + N <= width) {
        UNROLL for (int l = 0; l < N; ++l) store<T, N>(at_row + (column + l) * N, v[l]);
        column += N;
      } else {
        UNROLL for (int l = 0; l < N; ++l) {
          if (column == width) column = 0, at_row += row;
          store<T, N>(at_row + column++ * N, v[l]);
        }
      }
      if (done == count - N) return;
      done += N;
      if (done > count - N) {  // the last piece overlaps the one before
        for (column -= done - (count - N); column < 0; column += width) at_row -= row;
        done = count - N;
      }
    }
  }

  // Packs less than a vector of pixels.
  static void pack_few(T* to, S* const* lane, int64_t live, int64_t pixel, int64_t count, int64_t width, int64_t row) {
    for (int64_t i = 0; i < count; ++i)
      for (int64_t l = 0; l < N; ++l)
        to[i / width * row + i % width * N + l] = l < live ? load_one<T>(lane[l] + pixel + i) : T(0);
  }

  static void unpack_planes(const T* from, S* const* lane, int64_t live, int64_t pixel, int64_t count) {
    for (int64_t done = 0; done < count;) {
      if (count < N) {
        for (int64_t l = 0; l < live; ++l) store_one<T>(lane[l] + pixel + done, from[done * N + l]);
        ++done;
        continue;
      }
      const int64_t at = least(done, count - N);
      transpose<T, N>([&](int l) { return load<T, N>(from + (at + l) * N); },
                      [&](int l, Vec<T, N> v) { l < live ? store<T, N>(lane[l] + pixel + at, v) : void(); });
      done = at + N;
    }
  }

  static void pack_pixels(T* to, const S* from, const Tensor& x, const Block& b, int64_t count, int64_t vector) {
    constexpr int kTogether = 8;  // pixels whose vectors are written side by side
    if (x.step == 1 && b.live % N == 0) {
      for (; count >= kTogether; count -= kTogether, to += kTogether * N, from += kTogether * x.width) {
        T* at = to;
        for (int64_t c = 0; c < b.live; c += N, at += vector) {
          UNROLL for (int i = 0; i < kTogether; ++i) store<T, N>(at + i * N, load<T, N>(from + c + i * x.width));
        }
      }
    }
    for (; count > 0; --count, to += N, from += x.width) {
      T* at = to;
      int64_t c = 0;
      if (x.step == 1) {
        for (; c + N <= b.live; c += N, at += vector) store<T, N>(at, load<T, N>(from + c));
        if (c < b.live) store<T, N>(at, load_first<T, N>(from + c, b.live - c));
      } else {
        for (; c < b.live; c += N, at += vector)
          for (int64_t l = 0; l < N; ++l) at[l] = c + l < b.live ? load_one<T>(from + (c + l) * x.step) : T(0);
      }
    }
  }

  static void zero(T* to, int64_t pixels, const Block& b, int64_t vector) {
    if (pixels <= 0) return;
    for (int64_t lane = 0; lane < b.lanes; lane += N, to += vector)
      for (int64_t i = 0; i < pixels; ++i) store<T, N>(to + i * N, Vec<T, N>{});
  }

  // The positions outside the tensor that are packed, as zeros: none (they are there already), the columns, or rows
  // too.
  enum Borders { kNoBorders, kColumns, kColumnsAndRows };

  // The tile `r` of a tensor, as rows of `extent` pixels of a vector; the other vectors of lanes follow.
  static void pack(T* to, const int64_t extent[3], S* from, const Tensor& x, const Block& b, const Range r[3],
                   bool channels_last, Borders zeros) {
    const Range w = {most(r[2].low, 0), least(r[2].high, x.size[2])};
    S* lane[N] = {};
    if (channels_last)
      from += b.image * x.pixels() * x.width + b.channel * x.step + x.first;
    else
      planes(from, x, b, lane);
    const int64_t row = extent[2] * N, vector = tile_pixels(extent) * N, width = r[2].size();
    const bool whole_rows = w.low == 0 && w.high == x.size[2];
    for (int64_t d = r[0].low; d < r[0].high; ++d) {
      T* slice = to + (d - r[0].low) * extent[1] * row;
      const bool outside = d < 0 || d >= x.size[0] || w.low >= w.high;
      const Range h = {outside ? r[1].high : least(most(r[1].low, 0), r[1].high),
                       outside ? r[1].high : most(least(r[1].high, x.size[1]), r[1].low)};
      const Range borders = zeros == kColumnsAndRows || w.low >= w.high ? r[1] : h;
      for (int64_t i = borders.low; i < borders.high && zeros; ++i) {
        T* at = slice + (i - r[1].low) * row;
        if (i < h.low || i >= h.high) {
          zero(at, width, b, vector);
          continue;
        }
        zero(at, w.low - r[2].low, b, vector);
        zero(at + (w.high - r[2].low) * N, r[2].high - w.high, b, vector);
      }
      T* first = slice + (w.low - r[2].low) * N;
      const int64_t pixel = (d * x.size[1]) * x.size[2] + w.low;
      if (!channels_last && whole_rows && h.low < h.high) {  // rows follow one another in the tensor
        pack_planes(first + (h.low - r[1].low) * row, lane, b.live, pixel + h.low * x.size[2],
                    (h.high - h.low) * x.size[2], x.size[2], row);
        continue;
      }
      for (int64_t i = h.low; i < h.high; ++i) {
        T* at = first + (i - r[1].low) * row;
        const int64_t begin = pixel + i * x.size[2], count = w.high - w.low;
        if (channels_last)
          pack_pixels(at, from + begin * x.width, x, b, count, vector);
        else
          pack_planes(at, lane, b.live, begin, count, count, row);
      }
    }
  }

  // The positions of a tile outside the tensor, as the padding mode reads them, once those inside are packed: copied
  // within the tile where it holds what is read.
  static void pack_borders(T* to, const int64_t extent[3], S* from, const Tensor& x, const Block& b, const Range r[3],
                           bool channels_last) {
    const int64_t row = extent[2] * N, vector = tile_pixels(extent) * N;
    const Range w = {least(r[2].high, most(r[2].low, 0)), most(r[2].low, least(r[2].high, x.size[2]))};
    auto at = [&](int64_t d, int64_t h, int64_t column) {
      return to + ((d - r[0].low) * extent[1] + h - r[1].low) * row + (column - r[2].low) * N;
    };
    auto copy = [&](T* there, const T* here, int64_t pixels) {
      for (int64_t lane = 0; lane < b.lanes; lane += N, there += vector, here += vector)
        memcpy(there, here, sizeof(T) * static_cast<size_t>(pixels * N));
    };
    auto read = [&](T* there, int64_t d, int64_t h, int64_t column, int64_t pixels) {
      const Range one[3] = {{d, d + 1}, {h, h + 1}, {column, column + pixels}};
      const int64_t lanes[3] = {1, 1, vector / N};
      if (pixels > 0) pack(there, lanes, from, x, b, one, channels_last, kNoBorders);
    };
    for (const bool inside : {true, false})
      for (int64_t d = r[0].low; d < r[0].high; ++d)
        for (int64_t h = r[1].low; h < r[1].high; ++h) {
          const int64_t in_d = x.inside(0, d), in_h = x.inside(1, h);
          if ((in_d == d && in_h == h) != inside) continue;
          if (!inside && in_d >= r[0].low && in_d < r[0].high && in_h >= r[1].low && in_h < r[1].high) {
            copy(at(d, h, r[2].low), at(in_d, in_h, r[2].low), r[2].size());
            continue;
          }
          if (!inside) read(at(d, h, w.low), in_d, in_h, w.low, w.size());
          for (int64_t column = r[2].low; column < r[2].high; ++column) {
            if (column == w.low) column = w.high;
            if (column == r[2].high) break;
            const int64_t in_w = x.inside(2, column);
            if (in_w >= w.low && in_w < w.high)
              copy(at(d, h, column), at(d, h, in_w), 1);
            else
              read(at(d, h, column), in_d, in_h, in_w, 1);
          }
        }
  }

  // A vector of lanes, or the first `live` of them, `step` elements apart.
  static void unpack_lanes(S* to, int64_t step, const T* from, int64_t live) {
    live = least(live, N);
    if constexpr (std::is_same<S, bfloat16>::value) {  // rounding takes several instructions
      S lane[N];
      store<T, N>(lane, load<T, N>(from));
      for (int64_t l = 0; l < live; ++l) to[l * step] = lane[l];
    } else {
      for (int64_t l = 0; l < live; ++l) store_one<T>(to + l * step, from[l]);
    }
  }

  // `count` pixels that follow one another in the tensor, from scratch memory [pixel][lane].
  static void unpack(S* to, const T* from, const Tensor& x, const Block& b, int64_t pixel, int64_t count,
                     bool channels_last) {
    if (!channels_last) {
      S* lane[N];
      planes(to, x, b, lane);
      return unpack_planes(from, lane, b.live, pixel, count);
    }
    to += (b.image * x.pixels() + pixel) * x.width + b.channel * x.step + x.first;
    for (; count > 0; --count, to += x.width, from += b.lanes)
      for (int64_t c = 0; c < b.live; c += N) unpack_lanes(to + c * x.step, x.step, from + c, b.live - c);
  }
};

// The gradient of a padding mode: what was computed for positions outside the tensor is added to those that were read
// there. `r`: all positions, `lanes` elements each; in the end those of the tensor follow one another.
template <class T, int N>
void fold(T* results, int64_t lanes, const Tensor& x, const Range r[3]) {
  auto row = [&](int64_t d, int64_t h) {
    return results + (((d - r[0].low) * r[1].size() + h - r[1].low) * r[2].size() - r[2].low) * lanes;
  };
  auto add = [](T* to, const T* from, int64_t count) {
    for (; count >= N; count -= N, to += N, from += N) add_to<T, N>(to, load<T, N>(from));
    for (int64_t i = 0; i < count; ++i) to[i] += from[i];
  };
  for (int64_t d = r[0].low; d < r[0].high; ++d)
    for (int64_t h = r[1].low; h < r[1].high; ++h) {
      T *from = row(d, h), *to = row(x.inside(0, d), x.inside(1, h));
      for (int64_t w = r[2].low; w < 0; ++w) add(from + x.inside(2, w) * lanes, from + w * lanes, lanes);
      for (int64_t w = x.size[2]; w < r[2].high; ++w) add(from + x.inside(2, w) * lanes, from + w * lanes, lanes);
      if (to != from) add(to, from, x.size[2] * lanes);
    }
  for (int64_t d = 0; d < x.size[0]; ++d)
    for (int64_t h = 0; h < x.size[1]; ++h)
      memmove(results + (d * x.size[1] + h) * x.size[2] * lanes, row(d, h),
              sizeof(T) * static_cast<size_t>(x.size[2] * lanes));
}

}  // namespace
