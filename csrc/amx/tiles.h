// Products of float32 matrices on the tiles of AMX, which multiply bfloat16 only, and add up in float32.
//
// A float32 number is the sum of three bfloat16 numbers, exactly: x = x0 + x1 + x2, with 8 of its 24 bits each. Of the
// nine products of two such sums, six are computed; the others are below 2^-23 |x y|. (Henry, Tang and Heinecke,
// "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations", ARITH 2019.) Six such
// products take less than half as long as one of float32 does by AVX-512. Infinities, NaNs and numbers that round to
// infinity have no such parts: where an operand has one, the ordinary kernels compute the results. Parts and products
// below the normal numbers of float32 count as zero.
//
// results[i][j] = sum over k of left[i][k] * right[k][j]. Operands are packed in steps of 32 k and 16 rows or columns:
// three tiles, one for each part.
#pragma once

#include <immintrin.h>

#include "../vectors/plan.h"
#include "../vectors/vector.h"

namespace {

constexpr int64_t kEdge = 16, kStep = 32;  // rows or columns of a tile; terms k of a step
constexpr int64_t kTile = kEdge * kStep, kParts = 3 * kTile;
constexpr int64_t kStepBytes = kParts * 2;
constexpr int64_t kMostAtOnce = 24;  // steps that are added up before a rounding

// Configures all eight tiles as whole ones while it exists, then restores the thread's configuration.
class Tiles {
 public:
  Tiles() {
    _tile_storeconfig(&before_);
    Configuration whole = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    asm volatile("" ::"m"(whole) : "memory");  // GCC believes that only a pointer's bytes of it are read
    _tile_loadconfig(&whole);
  }
  ~Tiles() {
    asm volatile("" ::"m"(before_) : "memory");
    _tile_loadconfig(&before_);
  }

 private:
  struct Configuration {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  Configuration before_;
};

inline __mmask16 first(int64_t count) {
  return count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}

// Returns pairs of two vectors' elements, rounded to bfloat16, and leaves the rests for the next part.
inline __m512i take_part(__m512& low, __m512& high) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i pairs = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  low = _mm512_sub_ps(low, _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
  high = _mm512_sub_ps(high, _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000))));
  return pairs;
}

// The largest magnitudes of what was packed, as the bits of bfloat16.
struct Largest {
  __m512i bits = _mm512_setzero_si512();
  void see(__m512i pairs) { bits = _mm512_max_epu16(bits, _mm512_and_si512(pairs, _mm512_set1_epi16(0x7fff))); }
  // A number was infinite, NaN, or rounds to infinity.
  bool infinite() const { return _mm512_cmpge_epu16_mask(bits, _mm512_set1_epi16(0x7f80)) != 0; }
};

// A tile in memory, whose rows lie `row` elements apart.
struct TileAt {
  float* at;
  int64_t row;
  size_t row_bytes() const { return static_cast<size_t>(row) * sizeof(float); }
};

// One or two panels of packed steps, and how far apart the parts of a step lie where steps do not follow one another.
struct Side {
  const uint16_t* panel[2];
  int64_t part;
};

// R x C tiles, from two panels or one on either side. One side's steps lie one behind the other; the other's do, too,
// or are at `steps_at`. Where `fetch` is set, what is written is not in the cache yet: its lines are fetched a few at a
// time.
//
// A core that has run no floating-point instruction but those of tiles for some 2000 cycles takes 700 to store a tile,
// a quarter of a block of 6 steps (Granite Rapids); an addition in each step keeps the vector unit powered.
enum Scattered { kNone, kLeft, kRight };
template <int R, int C, Scattered kSide>
void multiply(const Side& left, const Side& right, const int64_t* steps_at, int64_t steps, const TileAt (&from)[2][2],
              const TileAt (&to)[2][2], bool fetch) {
  _tile_loadd(0, from[0][0].at, from[0][0].row_bytes());
  if constexpr (C > 1) _tile_loadd(1, from[0][1].at, from[0][1].row_bytes());
  if constexpr (R > 1) _tile_loadd(2, from[1][0].at, from[1][0].row_bytes());
  if constexpr (R > 1 && C > 1) _tile_loadd(3, from[1][1].at, from[1][1].row_bytes());

  int64_t l = 0, r = 0;
  auto load_left = [&](int64_t part) {
    part *= kSide == kLeft ? left.part : kTile;
    _tile_loadd(4, left.panel[0] + l + part, 64);
    if constexpr (R > 1) _tile_loadd(5, left.panel[1] + l + part, 64);
  };
  auto load_right = [&](int64_t part) {
    part *= kSide == kRight ? right.part : kTile;
    _tile_loadd(6, right.panel[0] + r + part, 64);
    if constexpr (C > 1) _tile_loadd(7, right.panel[1] + r + part, 64);
  };
  auto add_products = [] {
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (C > 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (R > 1) _tile_dpbf16ps(2, 5, 6);
    if constexpr (R > 1 && C > 1) _tile_dpbf16ps(3, 5, 7);
  };
  const int64_t each = ceil_div(kEdge, most(1, steps - 1));
  __m128 zero = _mm_setzero_ps();  // to be added to itself
  for (int64_t k = 0, line = fetch ? 0 : kEdge; k < steps; ++k) {
    l = kSide == kLeft ? steps_at[k] : k * kParts, r = kSide == kRight ? steps_at[k] : k * kParts;
    for (const int64_t last = least(kEdge, line + each); line < last; ++line)
      for (int i = 0; i < R; ++i)
        for (int j = 0; j < C; ++j) __builtin_prefetch(to[i][j].at + line * to[i][j].row, 1);
    asm volatile("addss %0, %0" : "+x"(zero));
    // The largest products last: the sum of the others is rounded less.
    load_right(0), load_left(2), add_products();
    load_left(1), add_products();
    load_right(1), add_products();
    load_left(0), add_products();
    load_right(2), add_products();
    load_right(0), add_products();
  }

  _tile_stored(0, to[0][0].at, to[0][0].row_bytes());
  if constexpr (C > 1) _tile_stored(1, to[0][1].at, to[0][1].row_bytes());
  if constexpr (R > 1) _tile_stored(2, to[1][0].at, to[1][0].row_bytes());
  if constexpr (R > 1 && C > 1) _tile_stored(3, to[1][1].at, to[1][1].row_bytes());
}

// Where the results of a tile are stored, and how many of its rows and columns exist.
struct Place : TileAt {
  int64_t rows = kEdge, columns = kEdge;
  bool whole() const { return rows == kEdge && columns == kEdge; }

  void take(const float* tile, bool adds) const {
    const __mmask16 there = first(columns);
    for (int64_t r = 0; r < rows; ++r, tile += kEdge) {
      const __m512 v = _mm512_load_ps(tile);
      float* const to = at + r * row;
      _mm512_mask_storeu_ps(to, there, adds ? _mm512_add_ps(v, _mm512_maskz_loadu_ps(there, to)) : v);
    }
  }
};

alignas(64) float zeros[kEdge];

// The product of one or two panels on either side, added to what is at `results(row panel, column panel)`, or where
// there is a `start` to what is at `start(row panel, column panel)` in place of it. Sums of many terms are rounded less
// where they are added up in pieces.
template <Scattered kSide, class Start, class Results>
void multiply_into(Range rows, Range columns, Side left, Side right, const int64_t* steps_at, int64_t steps,
                   const Start* start, const Results& results) {
  alignas(64) float tiles[2][2][kEdge * kEdge];
  const auto kernel = rows.size() > 1 ? (columns.size() > 1 ? multiply<2, 2, kSide> : multiply<2, 1, kSide>)
                                      : (columns.size() > 1 ? multiply<1, 2, kSide> : multiply<1, 1, kSide>);
  Place to[2][2];
  for (int r = 0; r < rows.size(); ++r)
    for (int c = 0; c < columns.size(); ++c) to[r][c] = results(rows.low + r, columns.low + c);
  const int64_t each = ceil_div(steps, most(1, ceil_div(steps, kMostAtOnce)));
  int64_t done = 0;
  do {
    const int64_t now = least(each, steps - done);
    const bool adds = done || !start;
    TileAt from[2][2], at[2][2];
    for (int r = 0; r < rows.size(); ++r)
      for (int c = 0; c < columns.size(); ++c) {
        from[r][c] = adds ? TileAt{zeros, 0} : (*start)(rows.low + r, columns.low + c);
        at[r][c] = adds || !to[r][c].whole() ? TileAt{tiles[r][c], kEdge} : TileAt(to[r][c]);
      }
    kernel(left, right, steps_at, now, from, at, kSide == kNone && !adds);
    for (int r = 0; r < rows.size(); ++r)
      for (int c = 0; c < columns.size(); ++c)
        if (at[r][c].at == tiles[r][c]) to[r][c].take(tiles[r][c], adds);
    done += now;
    if (kSide != kNone) steps_at += now;
    for (const uint16_t*& panel : left.panel) panel += kSide == kLeft ? 0 : now * kParts;
    for (const uint16_t*& panel : right.panel) panel += kSide == kRight ? 0 : now * kParts;
  } while (done < steps);
}

}  // namespace
