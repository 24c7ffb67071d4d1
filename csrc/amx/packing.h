// Packs positions of a tensor for the tiles of AMX, wherever they lie.
#pragma once

#include <string.h>

#include "../vectors/plan.h"
#include "../vectors/vector.h"
#include "tiles.h"

namespace {

// The offsets of 16 positions, -1 for a zero.
class Lanes {
 public:
  Lanes(const int64_t* at, bool channels_last) : at_(at) {
    if (channels_last) return;  // each is a vector of channels
    for (int l = 0; l < 16; ++l) {
      if (at[l] < 0) continue;
      const bool goes_on = l && at[l - 1] >= 0 && at[l] == at[l - 1] + 1;
      if (!goes_on && ++runs_ <= kMostRuns) run_[runs_ - 1] = {0, at[l] - l};
      if (runs_ <= kMostRuns) run_[runs_ - 1].lanes |= 1u << l;
      there_ |= 1u << l;
    }
  }

  int64_t at(int64_t l) const { return at_[l]; }

  // The values of one channel that begins at `from`.
  __m512 load(const float* from) const {
    if (runs_ > kMostRuns) {
      const __m256 zeros = _mm256_setzero_ps();
      const __m256 low = _mm512_mask_i64gather_ps(zeros, there_ & 255, _mm512_loadu_si512(at_), from, 4);
      const __m256 high = _mm512_mask_i64gather_ps(zeros, there_ >> 8, _mm512_loadu_si512(at_ + 8), from, 4);
      return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
    }
    __m512 v = _mm512_setzero_ps();
    for (int r = 0; r < runs_; ++r) v = _mm512_mask_loadu_ps(v, run_[r].lanes, from + run_[r].at);
    return v;
  }
  void store(float* to, __m512 v) const {
    if (runs_ > kMostRuns) {
      _mm512_mask_i64scatter_ps(to, there_ & 255, _mm512_loadu_si512(at_), _mm512_castps512_ps256(v), 4);
      _mm512_mask_i64scatter_ps(to, there_ >> 8, _mm512_loadu_si512(at_ + 8), _mm512_extractf32x8_ps(v, 1), 4);
    } else {
      for (int r = 0; r < runs_; ++r) _mm512_mask_storeu_ps(to + run_[r].at, run_[r].lanes, v);
    }
  }

 private:
  static constexpr int kMostRuns = 4;  // runs of consecutive positions; with more, the elements are gathered
  const int64_t* at_;
  __mmask16 there_ = 0;
  int runs_ = 0;
  struct {
    __mmask16 lanes;
    int64_t at;  // of the first lane
  } run_[kMostRuns];
};

using Square = Vec<float, 16>[16];

// Loads 16 positions of up to 16 channels, which lie `channel` elements apart (1: channels_last), as rows of positions
// or of channels. The positions that are `ahead` further on are prefetched.
inline void load_square(Square& v, bool position_rows, const Lanes& x, const float* from, int64_t channels,
                        int64_t channel, int64_t ahead) {
  if (channel == 1) {
    const __mmask16 there = first(channels);
    for (int l = 0; l < 16; ++l) {
      if (ahead) __builtin_prefetch(from + most(0, x.at(l + ahead)));
      v[l] = (Vec<float, 16>)_mm512_maskz_loadu_ps(x.at(l) < 0 ? 0 : there, from + x.at(l));
    }
  } else {
    const int64_t soon = ahead ? most(x.at(ahead), x.at(ahead + 15)) : -1;
    for (int l = 0; l < 16; ++l) {
      if (soon >= 0) __builtin_prefetch(from + l * channel + soon);
      v[l] = (Vec<float, 16>)(l < channels ? x.load(from + l * channel) : _mm512_setzero_ps());
    }
  }
  if (position_rows != (channel == 1)) transpose<float, 16>(v);
}

// Loads 16 lines of 16 elements, `line` elements apart, of which only `lines` and `elements` exist. The lines from
// `soon` on are prefetched.
inline void load_lines(Square& v, const float* from, const float* soon, int64_t line, int64_t lines, int64_t elements) {
  const __mmask16 there = first(elements);
  UNROLL for (int l = 0; l < 16; ++l) {
    __builtin_prefetch(soon + l * line);
    v[l] = (Vec<float, 16>)_mm512_maskz_loadu_ps(l < lines ? there : 0, from + l * line);
  }
}

// Packs 16 rows of 32 k, `row` elements apart, for the left side of a product.
inline void pack_left(uint16_t* to, int64_t row, int64_t part, Square& low, Square& high, Largest& largest) {
  auto wide = [](__m256i half) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)); };
#pragma GCC unroll 4
  for (int l = 0; l < 16; ++l) {
    __m512 a = (__m512)low[l], b = (__m512)high[l];
    for (int i = 0; i < 3; ++i) {
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(b, a);
      _mm512_store_si512(to + l * row + i * part, both);
      if (i == 0) largest.see(both);
      if (i < 2) {
        a = _mm512_sub_ps(a, wide(_mm512_castsi512_si256(both)));
        b = _mm512_sub_ps(b, wide(_mm512_extracti64x4_epi64(both, 1)));
      }
    }
  }
}

// Packs 16 columns of 32 k, which are the rows of two squares, in pairs, for the right side of a product. The pairs
// that begin with an odd k are also written to `odd`, if it is given, the first of them one line before it.
inline void pack_right(uint16_t* to, int64_t part, Square& low, Square& high, Largest& largest, uint16_t* odd = nullptr,
                       __m512i* last = nullptr) {
  __m512i before[3] = {};
  if (odd) memcpy(before, last, sizeof(before));
#pragma GCC unroll 4
  for (int l = 0; l < 16; ++l) {
    Square& rows = l < 8 ? low : high;
    __m512 a = (__m512)rows[2 * l % 16], b = (__m512)rows[2 * l % 16 + 1];
    for (int i = 0; i < 3; ++i) {
      const __m512i pairs = take_part(a, b);
      _mm512_store_si512(to + l * 32 + i * part, pairs);
      if (i == 0) largest.see(pairs);
      if (odd) _mm512_store_si512(odd + (l - 1) * 32 + i * part, _mm512_shrdi_epi32(before[i], pairs, 16));
      before[i] = pairs;
    }
  }
  if (odd) memcpy(last, before, sizeof(before));
}

}  // namespace
