// Convolutions with kernels of 3x3 by fewer multiplications: 16 for each 2x2 results and channel, where the definition
// has 36 (Winograd's algorithm F(2x2, 3x3); Lavin and Gray, arXiv:1509.09308). With kernels of 3 it is 4 for 6.
//
// In one dimension, two results of the four values d and the kernel g are
//   y = A^T [(G g) * (B^T d)],  B^T d = (d0 - d2, d1 + d2, d2 - d1, d1 - d3),  A^T m = (m0 + m1 + m2, m1 - m2 - m3),
//   G g = (g0, (g0 + g1 + g2) / 2, (g0 - g1 + g2) / 2, g2),
// and a tile of 4x4 values is transformed along both. All factors are powers of two, so integers stay exact. Summed
// over channels, the products of each of the 16 frequencies are a product of matrices, the tiles' by the weights'.
// grad_input is the same with the kernel turned; grad_weight is the derivative,
//   grad_g = G^T [(A grad_y) * (B^T d)],
// summed over tiles before G^T is applied. The depth of a volume is not transformed: its kernel elements are more
// terms of the sums.
//
// The lanes of a vector are channels. A unit of work is a stretch of tiles in one row; several make a block, whose
// transformed values stay in the cache.
#pragma once

#include <utility>

#include "../pointwise/kernels.h"
#include "../vectors/parallel.h"
#include "../vectors/products.h"
#include "../vectors/vector.h"

namespace {

// A kernel of 3x1x1 that reads nothing else in a slice: slices become rows.
inline convgrad_problem with_slices_as_rows(convgrad_problem q) {
  if (q.kernel[0] != 3 || q.kernel[1] != 1 || q.kernel[2] != 1) return q;
  for (int d = 1; d < 3; ++d)
    if (q.padding[d] || q.input[d] != q.output[d] || q.stride[d] > 1) return q;
  auto fold = [](int64_t (&sizes)[3]) { sizes[2] *= sizes[1], sizes[1] = sizes[0], sizes[0] = 1; };
  fold(q.input), fold(q.output), fold(q.kernel), fold(q.dilation);
  std::swap(q.padding[0], q.padding[1]);  // which was 0
  return q;
}

// Along one dimension: of the source, of grad_output, of the kernel, and from sums of products to results or to the
// gradients of the kernel.
template <class V, bool kTransformed>
struct Transforms {
  static void source(const V* d, V* to) {
    to[0] = d[0] - d[2], to[1] = d[1] + d[2], to[2] = d[2] - d[1], to[3] = d[1] - d[3];
  }
  static void outer(const V* y, V* to) { to[0] = y[0], to[1] = y[0] + y[1], to[2] = y[0] - y[1], to[3] = -y[1]; }
  static void kernel(const V* g, V* to) {
    const V sum = (g[0] + g[2]) / 2, half = g[1] / 2;
    to[0] = g[0], to[1] = sum + half, to[2] = sum - half, to[3] = g[2];
  }
  static void results(const V* m, V* to) { to[0] = m[0] + (m[1] + m[2]), to[1] = (m[1] - m[2]) - m[3]; }
  static void gradients(const V* m, V* to) {
    const V sum = (m[1] + m[2]) / 2;
    to[0] = m[0] + sum, to[1] = (m[1] - m[2]) / 2, to[2] = sum + m[3];
  }
};
template <class V>
struct Transforms<V, false> {
  static void source(const V* d, V* to) { to[0] = d[0]; }
  static void outer(const V* y, V* to) { to[0] = y[0]; }
  static void kernel(const V* g, V* to) { to[0] = g[0]; }
  static void results(const V* m, V* to) { to[0] = m[0]; }
  static void gradients(const V* m, V* to) { to[0] = m[0]; }
};

// Transformed along rows (the kernel has three of them, else one), columns, or both.
template <class T, int N, bool kAlongRows, bool kAlongColumns>
class Winograd {
 public:
  // In height and width: results of a tile, the kernel's elements, and what they read.
  static constexpr int kTileRows = kAlongRows ? 2 : 1, kTileColumns = kAlongColumns ? 2 : 1;
  static constexpr int kKernelRows = kAlongRows ? 3 : 1, kKernelColumns = kAlongColumns ? 3 : 1;
  static constexpr int kRows = kAlongRows ? 4 : 1, kColumns = kAlongColumns ? 4 : 1;
  static constexpr int kFrequencies = kRows * kColumns, kElements = kKernelRows * kKernelColumns;

  struct Plan : ProductPlan {
    int64_t source[3], result[3];              // sizes
    int64_t padding[3], apart[3];              // kernel element k of result i reads source i - padding + k * apart
    int64_t taps;                              // kernel elements in depth
    int64_t classes[2], rows, stretches;       // classes of results that are `apart`; their rows of tiles, in pieces
    int64_t tiles;                             // tiles of a unit
    int64_t units, blocks, parts, segments;    // parts of the results' channels; segments of the blocks
    Array<T> weight, sum;                      // shared
    Array<T> values, outer, product, transposed, slab;  // each thread's

    int64_t source_vectors() const { return ceil_div(sources, N); }
    int64_t result_vectors() const { return ceil_div(results, N); }
    int64_t block_tiles() const { return ceil_div(units, blocks) * tiles; }
    int64_t terms() const { return sums ? 1 : taps; }
    // Odd numbers of lines: even ones would use a few places of the cache.
    static int64_t odd(int64_t elements) { return (ceil_div(elements, N) | 1) * N; }
    int64_t pitch() const { return odd(terms() * source_vectors() * N); }  // from tile to tile
    int64_t outer_pitch() const { return odd(result_vectors() * N); }
    int64_t frequency() const { return odd(block_tiles() * pitch()); }
    int64_t outer_frequency() const { return odd(block_tiles() * outer_pitch()); }
    int64_t columns() const { return kTileColumns * (tiles - 1) + kColumns; }  // that a unit reads
    int64_t panel() const { return taps * sources * N; }  // weights of a vector of results
    int64_t group_sums() const { return taps * kFrequencies * results * source_vectors() * N; }
  };

  static bool takes(const convgrad_problem& q) {
    bool fits = ProductPlan::takes(q) && q.dtype == (sizeof(T) == 8 ? CONVGRAD_FLOAT64 : CONVGRAD_FLOAT32);
    for (int d = 0; d < 3; ++d)
      fits = fits && q.stride[d] == 1 && q.input[d] > 0 && q.output[d] > 0;
    fits = fits && q.kernel[1] == kKernelRows && q.kernel[2] == kKernelColumns;
    const double terms = double(q.kernel[0]) * double(most(q.in_per_group, q.out_per_group));
    const double weights = terms * double(least(q.in_per_group, q.out_per_group)) * double(q.groups);
    return fits && q.padding_mode == CONVGRAD_ZEROS && terms <= kMostOfAll && weights > 0 && weights <= kMostWeights;
  }

  static Plan make_plan(const convgrad_problem& q) {
    Plan p = {};
    p.set(q), p.taps = q.kernel[0];
    for (int d = 0; d < 3; ++d) {
      p.source[d] = p.backward ? q.output[d] : q.input[d];
      p.result[d] = p.backward ? q.input[d] : q.output[d];
      p.padding[d] = p.backward ? (q.kernel[d] - 1) * q.dilation[d] - q.padding[d] : q.padding[d];
      p.apart[d] = q.kernel[d] > 1 ? q.dilation[d] : 1;
      if (d) p.classes[d - 1] = least(p.apart[d], p.result[d]);
    }
    p.rows = ceil_div(ceil_div(p.result[1], p.classes[0]), kTileRows);
    const int64_t row = ceil_div(ceil_div(p.result[2], p.classes[1]), kTileColumns);
    p.stretches = ceil_div(row, kMostTiles), p.tiles = ceil_div(row, p.stretches);
    p.units = p.images * p.result[0] * p.classes[0] * p.rows * p.classes[1] * p.stretches;
    // A block has as many tiles as fit into the cache, if that leaves a block for each thread.
    const int64_t tile = kFrequencies * int64_t(sizeof(T)) * (p.pitch() + (p.sums ? p.outer_pitch() : kProducts));
    const int64_t most_tiles = most(kLeastTiles, kTransformedBytes / tile);
    p.blocks = ceil_div(p.units, most(1, most_tiles / p.tiles));
    p.blocks = least(p.units, round_up(p.blocks, p.threads));

    const int64_t panels = ceil_div(p.result_vectors(), p.sums ? 1 : kPointwiseColumns);
    p.segments = p.blocks;
    if (p.sums) {
      const int64_t sums = p.groups * p.group_sums();
      p.segments = least(least(p.threads, p.blocks), most_sums(sums * int64_t(sizeof(T))));
      p.sum = p.memory.shared.template add<T>(p.segments * sums);
      p.outer = p.memory.each.template add<T>(kFrequencies * p.outer_frequency());
    } else {
      p.weight = p.memory.shared.template add<T>(kFrequencies * p.groups * p.result_vectors() * p.panel());
      p.product = p.memory.each.template add<T>(kFrequencies * p.block_tiles() * kProducts);
      const int64_t weights = p.taps * kElements * (p.backward ? 1 : p.sources);  // that are transposed at once
      p.transposed = p.memory.each.template add<T>(round_up(weights, N) * N);
    }
    p.parts = least(ceil_div(p.threads, p.segments * p.groups), panels);
    p.values = p.memory.each.template add<T>(kFrequencies * p.frequency());
    p.slab = p.memory.each.template add<T>(kRows * p.columns() * N);
    return p;
  }

  Winograd(const Plan& plan, const convgrad_tensors& tensors, char* memory) : p(plan), t(tensors), memory_(memory) {}

  // False where a result is an infinity or a NaN: then the results are to be computed anew, since transforms subtract
  // infinities from each other, and overflow before the results do.
  bool run(int threads) {
    auto scratch = [&](int64_t thread) { return p.memory.of_thread(memory_, thread); };
    auto prepare = each([&](int64_t i, char* own) { pack_weight(own, i); });
    auto run = [&](char* own, int64_t item) { p.sums ? sum_weight(own, item) : compute(own, item); };
    auto add_up = each([&](int64_t i) { store_weight(i); });
    const int64_t items = p.groups * p.parts * p.segments;
    run_items(threads, p.sums ? 0 : p.groups * p.result_vectors(), prepare, items, scratch, run,
              p.sums ? p.groups * p.results : 0, add_up);
    return !infinite_;
  }

 private:
  using V = Vec<T, N>;
  static constexpr int64_t kMostWeights = 1 << 21;  // elements of a weight, beyond which it is not used
  static constexpr int64_t kMostOfAll = 1 << 14;    // terms of a result, likewise: 64 MB of a block's values a thread
  static constexpr int64_t kMostTerms = kTestsTiles ? 10 : 96;   // terms that are summed in one piece
  static constexpr int64_t kMostTiles = kTestsTiles ? 3 : 32;    // tiles of a unit
  static constexpr int64_t kLeastTiles = kTestsTiles ? 4 : 64;   // tiles of a block, each of which uses all weights
  static constexpr int64_t kTransformedBytes = kFewPixelsBytes;  // bytes of a block, for the second-level cache
  static constexpr int64_t kProducts = kPointwiseColumns * N;    // results of a tile and frequency computed at once

  // ---- units ----

  struct Unit {
    int64_t image, at[3];  // the first result
  };
  Unit unit(int64_t i) const {
    Unit u;
    const int64_t stretch = i % p.stretches;
    i /= p.stretches;
    u.at[2] = i % p.classes[1] + kTileColumns * p.apart[2] * p.tiles * stretch;
    i /= p.classes[1];
    const int64_t row = i % p.rows;
    i /= p.rows;
    u.at[1] = i % p.classes[0] + kTileRows * p.apart[1] * row;
    i /= p.classes[0];
    u.at[0] = i % p.result[0], u.image = i / p.result[0];
    return u;
  }

  Tensor source() const { return {{p.source[0], p.source[1], p.source[2]}, p.groups * p.sources, 0, 1}; }
  Tensor result() const { return {{p.result[0], p.result[1], p.result[2]}, p.groups * p.results, 0, 1}; }

  // Returns which of `count` columns from x on, each `apart` from the next, are inside.
  Range inside(int64_t x, int64_t count, int64_t size) const {
    const int64_t step = p.apart[2];
    return {least(count, x >= 0 ? 0 : ceil_div(-x, step)), x < size ? least(count, ceil_div(size - x, step)) : 0};
  }

  // Rows of so many columns from a position on, as vectors of channels, zeros outside of the tensor. Of a group's
  // channels, of which it is those from `vector` on.
  void load_rows(T* to, const T* from, const Tensor& tensor, const Unit& u, const int64_t (&at)[3], int rows,
                 int64_t columns, int64_t group, int64_t vector) const {
    const int64_t channels = tensor.width / p.groups, channel = group * channels + vector * N;
    const int64_t live = channels - vector * N;
    const Range there = inside(at[2], columns, tensor.size[2]);
    const int64_t pixels = tensor.pixels(), step = p.apart[2];
    for (int r = 0; r < rows; ++r, to += columns * N) {
      const int64_t y = at[1] + r * p.apart[1];
      const bool exists = y >= 0 && y < tensor.size[1] && at[0] >= 0 && at[0] < tensor.size[0] && there.size();
      const int64_t row = (at[0] * tensor.size[1] + y) * tensor.size[2] + at[2];
      auto clear = [&](int64_t low, int64_t high) {
        for (int64_t j = low; j < high; ++j) store<T, N>(to + j * N, V{});
      };
      if (!exists) {
        clear(0, columns);
        continue;
      }
      clear(0, there.low), clear(there.high, columns);
      // Prefetched: the next vector of channels, or behind the last one the first of the next tiles.
      const int64_t next = p.channels_last ? 1 : pixels, column = p.channels_last ? tensor.width : 1;
      const int64_t down = kTileRows * p.apart[1] * tensor.size[2] * column;
      const int64_t ahead = live > N ? N * next : down - (channels - live) * next;
      if (p.channels_last) {
        const T* const first = from + (u.image * pixels + row) * tensor.width + channel;
        for (int64_t j = there.low; j < there.high; ++j) {
          const T* const pixel = first + j * step * tensor.width;
          __builtin_prefetch(pixel + ahead);
          store<T, N>(to + j * N, load_first<T, N>(pixel, live));
        }
        continue;
      }
      const T* const first = from + (u.image * tensor.width + channel) * pixels + row;
      for (int64_t j = there.low; j < there.high; j += N) {
        const int64_t now = least(N, there.high - j);
        auto get = [&](int l) {
          const T* const at = first + l * pixels + j * step;
          __builtin_prefetch(at + ahead);
          return l < live ? load_steps(at, step, now) : V{};
        };
        transpose<T, N>(get, [&](int l, V v) { l < now ? store<T, N>(to + (j + l) * N, v) : void(); });
      }
    }
  }
  static V load_steps(const T* from, int64_t step, int64_t live) {
    if (step == 1) return load_first<T, N>(from, live);
    V v = {};
    for (int64_t l = 0; l < live; ++l) v[l] = from[l * step];
    return v;
  }
  static void store_steps(T* to, V v, int64_t step, int64_t live) {
    if (step == 1) return store_first<T, N>(to, v, live);
    for (int64_t l = 0; l < live; ++l) to[l * step] = v[l];
  }

  // ---- transforms ----

  using Down = Transforms<V, kAlongRows>;
  using Across = Transforms<V, kAlongColumns>;

  // Transforms tiles of the source, for one vector of channels: `to` has each tile and frequency.
  void transform_source(T* to, const T* slab) const {
    constexpr int kShared = kColumns - kTileColumns;  // columns of two tiles
    const int64_t row = p.columns() * N, pitch = p.pitch(), frequency = p.frequency();
    V c[kColumns][kRows];
    auto column = [&](int i, int64_t j) {
      V d[kRows];
      for (int r = 0; r < kRows; ++r) d[r] = load<T, N>(slab + r * row + j * N);
      Down::source(d, c[i]);
    };
    for (int i = 0; i < kShared; ++i) column(i, i);
    for (int64_t tile = 0; tile < p.tiles; ++tile, to += pitch) {
      UNROLL for (int i = kShared; i < kColumns; ++i) column(i, kTileColumns * tile + i);
      UNROLL for (int r = 0; r < kRows; ++r) {
        V d[kColumns], f[kColumns];
        for (int i = 0; i < kColumns; ++i) d[i] = c[i][r];
        Across::source(d, f);
        for (int k = 0; k < kColumns; ++k) store<T, N>(to + (kColumns * r + k) * frequency, f[k]);
        for (int i = 0; i < kShared; ++i) c[i][r] = d[kTileColumns + i];
      }
    }
  }
  // Transforms tiles of grad_output, each as large as a tile of results.
  void transform_outer(T* to, const T* slab) const {
    const int64_t row = kTileColumns * p.tiles * N, pitch = p.outer_pitch(), frequency = p.outer_frequency();
    for (int64_t tile = 0; tile < p.tiles; ++tile, to += pitch) {
      V c[kTileColumns][kRows];
      for (int j = 0; j < kTileColumns; ++j) {
        V y[kTileRows];
        for (int r = 0; r < kTileRows; ++r) y[r] = load<T, N>(slab + r * row + (kTileColumns * tile + j) * N);
        Down::outer(y, c[j]);
      }
      UNROLL for (int r = 0; r < kRows; ++r) {
        V y[kTileColumns], f[kColumns];
        for (int j = 0; j < kTileColumns; ++j) y[j] = c[j][r];
        Across::outer(y, f);
        for (int k = 0; k < kColumns; ++k) store<T, N>(to + (kColumns * r + k) * frequency, f[k]);
      }
    }
  }
  // Transforms kernels, given as a vector of each element.
  template <class At>
  static void transform_kernel(const At& at, T* to, int64_t frequency) {
    V rows[kRows][kKernelColumns];
    for (int j = 0; j < kKernelColumns; ++j) {
      V g[kKernelRows], f[kRows];
      for (int r = 0; r < kKernelRows; ++r) g[r] = at(r * kKernelColumns + j);
      Down::kernel(g, f);
      for (int r = 0; r < kRows; ++r) rows[r][j] = f[r];
    }
    for (int r = 0; r < kRows; ++r) {
      V f[kColumns];
      Across::kernel(rows[r], f);
      for (int k = 0; k < kColumns; ++k) store<T, N>(to + (kColumns * r + k) * frequency, f[k]);
    }
  }

  // ---- forward and grad_input ----

  int64_t weight_frequency() const { return p.groups * p.result_vectors() * p.panel(); }
  T* packed_weight(int64_t group, int64_t vector) const {
    return p.weight.in(memory_) + (group * p.result_vectors() + vector) * p.panel();
  }
  // Transposes rows of `count` elements, `row` apart, into `count` vectors of `live` lanes.
  static void transpose_rows(T* to, const T* from, int64_t row, int64_t count, int64_t live) {
    for (int64_t i = 0; i < count; i += N)
      transpose<T, N>([&](int l) { return l < live ? load_first<T, N>(from + l * row + i, count - i) : V{}; },
                      [&](int l, V v) { store<T, N>(to + (i + l) * N, v); });
  }
  // Packs the weights of a vector of results: [frequency][group and vector of results][tap in depth and source][lane].
  void pack_weight(char* own, int64_t i) const {
    const int64_t group = i / p.result_vectors(), first = i % p.result_vectors() * N;
    const int64_t live = least(N, p.results - first), elements = kElements * p.taps, frequency = weight_frequency();
    T *const transposed = p.transposed.in(own), *const to = packed_weight(group, first / N);
    const T* const weight = static_cast<const T*>(t.weight);
    if (!p.backward) {
      const int64_t row = p.sources * elements;
      transpose_rows(transposed, weight + (group * p.results + first) * row, row, row, live);
      const int64_t source = p.channels_last ? 1 : elements, element = p.channels_last ? p.sources : 1;
      for (int64_t tap = 0; tap < p.taps; ++tap)
        for (int64_t s = 0; s < p.sources; ++s) {
          const T* const from = transposed + (s * source + tap * kElements * element) * N;
          transform_kernel([&](int e) { return load<T, N>(from + e * element * N); },
                           to + (tap * p.sources + s) * N, frequency);
        }
      return;
    }
    for (int64_t s = 0; s < p.sources; ++s) {
      const T* const from = weight + (group * p.sources + s) * p.results * elements;
      if (!p.channels_last) transpose_rows(transposed, from + first * elements, elements, elements, live);
      for (int64_t tap = 0; tap < p.taps; ++tap) {
        const int64_t last = (p.taps - tap) * kElements - 1;
        auto at = [&](int e) {
          return p.channels_last ? load_first<T, N>(from + (last - e) * p.results + first, live)
                                 : load<T, N>(transposed + (last - e) * N);
        };
        transform_kernel(at, to + (tap * p.sources + s) * N, frequency);
      }
    }
  }

  // Transforms the values of a block's units.
  void load_source(char* own, const T* tensor, int64_t group, Range units, int64_t low_tap, int64_t taps) const {
    T* const slab = p.slab.in(own);
    const Tensor source = this->source();
    for (int64_t i = units.low; i < units.high; ++i) {
      const Unit u = unit(i);
      for (int64_t tap = 0; tap < taps; ++tap) {
        int64_t at[3];
        for (int d = 0; d < 3; ++d) at[d] = u.at[d] - p.padding[d] + (d ? 0 : (low_tap + tap) * p.apart[0]);
        for (int64_t v = 0; v < p.source_vectors(); ++v) {
          load_rows(slab, tensor, source, u, at, kRows, p.columns(), group, v);
          T* const to = p.values.in(own) + (i - units.low) * p.tiles * p.pitch();
          transform_source(to + (tap * p.source_vectors() + v) * N, slab);
        }
      }
    }
  }

  // `body(first term, where its values are in a tile's, how many)`. Rounding errors grow with the number of terms, so
  // long sums are those of pieces.
  template <class Body>
  void each_piece(const Body& body) const {
    if (p.taps * p.sources <= kMostTerms) return body(0, 0, p.taps * p.sources);
    const int64_t pieces = ceil_div(p.sources, kMostTerms);
    for (int64_t tap = 0; tap < p.taps; ++tap)
      for (int64_t i = 0; i < pieces; ++i) {
        const Range some = share(p.sources, i, pieces);
        body(tap * p.sources + some.low, tap * p.source_vectors() * N + some.low, some.size());
      }
  }

  void compute(char* own, int64_t item) {
    const int64_t group = item % p.groups;
    const Range panels = share(ceil_div(p.result_vectors(), kPointwiseColumns), item / p.groups % p.parts, p.parts);
    const Range units = share(p.units, item / p.groups / p.parts, p.blocks);
    T *const values = p.values.in(own), *const products = p.product.in(own);
    load_source(own, static_cast<const T*>(p.backward ? t.grad_output : t.input), group, units, 0, p.taps);
    const int64_t tiles = units.size() * p.tiles, product_frequency = p.block_tiles() * kProducts;
    V finite = {};
    for (int64_t panel = panels.low; panel < panels.high; ++panel) {
      const int64_t first = panel * kPointwiseColumns, vectors = least(kPointwiseColumns, p.result_vectors() - first);
      for (int f = 0; f < kFrequencies; ++f)
        each_piece([&](int64_t term, int64_t value, int64_t terms) {
          PointwiseSums<T, T, true> run = {};
          run.step = {p.pitch(), 1, N}, run.row = kProducts, run.lanes = kProducts, run.add = term > 0;
          run.terms = terms, run.together = p.sources, run.gap = p.source_vectors() * N - p.sources;
          run.pitch = p.panel(), run.source = packed_weight(group, first) + f * weight_frequency() + term * N;
          for (int64_t i = 0; i < tiles; i += kPointwiseRows) {
            run.weight = values + f * p.frequency() + i * p.pitch() + value;
            run.to = products + f * product_frequency + i * kProducts;
            AheadInTensor ahead = AheadInTensor::of(run.weight + kPointwiseRows * p.pitch(), kPointwiseRows);
            run.ahead = &ahead;
            multiply_rows<N>(run, least(kPointwiseRows, tiles - i), vectors);
          }
        });
      for (int64_t i = units.low; i < units.high; ++i)
        for (int64_t v = 0; v < vectors; ++v) {
          const T* const from = products + (i - units.low) * p.tiles * kProducts + v * N;
          store_results(own, group, unit(i), first + v, from, finite);
        }
    }
    note(finite);
  }
  void note(V finite) {
    for (int l = 0; l < N; ++l)
      if (!(finite[l] == 0)) infinite_.store(true, std::memory_order_relaxed);
  }

  // Stores the results of a unit and a vector of channels, computed from the sums of products.
  void store_results(char* own, int64_t group, const Unit& u, int64_t vector, const T* from, V& finite) const {
    const int64_t frequency = p.block_tiles() * kProducts, width = kTileColumns * p.tiles, first = vector * N;
    const int64_t live = least(N, p.results - first), channel = group * p.results + first;
    const Tensor result = this->result();
    T* const slab = p.slab.in(own);
    V start = {};
    if (t.bias) start = load_first<T, N>(static_cast<const T*>(t.bias) + channel, live);
    for (int64_t tile = 0; tile < p.tiles; ++tile, from += kProducts) {
      V rows[kTileRows][kColumns];
      UNROLL for (int k = 0; k < kColumns; ++k) {
        V m[kRows], y[kTileRows];
        for (int r = 0; r < kRows; ++r) m[r] = load<T, N>(from + (kColumns * r + k) * frequency);
        Down::results(m, y);
        for (int r = 0; r < kTileRows; ++r) rows[r][k] = y[r];
      }
      for (int r = 0; r < kTileRows; ++r) {
        V y[kTileColumns];
        Across::results(rows[r], y);
        for (int j = 0; j < kTileColumns; ++j) {
          const V result = y[j] + start;
          finite += result * T(0);
          store<T, N>(slab + (r * width + kTileColumns * tile + j) * N, result);
        }
      }
    }
    const int64_t count = inside(u.at[2], width, result.size[2]).high, pixels = result.pixels(), step = p.apart[2];
    for (int r = 0; r < kTileRows; ++r) {
      const int64_t y = u.at[1] + r * p.apart[1], row = (u.at[0] * result.size[1] + y) * result.size[2] + u.at[2];
      if (y >= result.size[1]) break;
      T* const to = static_cast<T*>(p.backward ? t.grad_input : t.forward);
      const T* const results = slab + r * width * N;
      if (p.channels_last) {
        T* const at = to + (u.image * pixels + row) * result.width + channel;
        for (int64_t j = 0; j < count; ++j)
          store_first<T, N>(at + j * step * result.width, load<T, N>(results + j * N), live);
        continue;
      }
      T* const at = to + (u.image * result.width + channel) * pixels + row;
      for (int64_t j = 0; j < count; j += N) {
        auto get = [&](int l) { return j + l < count ? load<T, N>(results + (j + l) * N) : V{}; };
        transpose<T, N>(get, [&](int l, V v) {
          if (l < live) store_steps(at + l * pixels + j * step, v, step, least(N, count - j));
        });
      }
    }
  }

  // ---- grad_weight ----

  // The sums over some blocks, in pieces as above, of some channels of grad_output:
  // [tap][frequency][output channel][input channel].
  void sum_weight(char* own, int64_t item) {
    const int64_t group = item % p.groups, segment = item / p.groups / p.parts;
    const Range vectors = share(p.result_vectors(), item / p.groups % p.parts, p.parts);
    const Range blocks = share(p.blocks, segment, p.segments);
    const int64_t row = p.source_vectors() * N;
    T* const sums = p.sum.in(memory_) + (segment * p.groups + group) * p.group_sums();
    T *const values = p.values.in(own), *const outer = p.outer.in(own), *const slab = p.slab.in(own);
    for (int64_t block = blocks.low; block < blocks.high; ++block) {
      const Range units = share(p.units, block, p.blocks);
      const Tensor result = this->result();
      for (int64_t i = units.low; i < units.high; ++i) {
        const Unit u = unit(i);
        for (int64_t v = vectors.low; v < vectors.high; ++v) {
          load_rows(slab, static_cast<const T*>(t.grad_output), result, u, u.at, kTileRows, kTileColumns * p.tiles,
                    group, v);
          transform_outer(outer + (i - units.low) * p.tiles * p.outer_pitch() + v * N, slab);
        }
      }
      for (int64_t tap = 0; tap < p.taps; ++tap) {
        load_source(own, static_cast<const T*>(t.input), group, units, tap, 1);
        const int64_t tiles = units.size() * p.tiles, pieces = most(1, tiles / kMostTerms);
        for (int64_t j = 0; j < kFrequencies * pieces; ++j) {
          const int64_t f = j / pieces, piece = j % pieces;
          const Range some = share(tiles, piece, pieces);
          PointwiseSums<T, T, true> run = {};
          run.step = {1, p.outer_pitch(), p.pitch()}, run.row = row, run.lanes = row, run.pitch = N;
          run.terms = run.together = some.size(), run.add = piece || block != blocks.low;
          run.source = values + f * p.frequency() + some.low * p.pitch();
          T* const to = sums + (tap * kFrequencies + f) * p.results * row;
          const Range rows = {vectors.low * N, least(vectors.high * N, p.results)};
          for (int64_t i = rows.low; i < rows.high; i += kPointwiseRows) {
            run.weight = outer + f * p.outer_frequency() + some.low * p.outer_pitch() + i, run.to = to + i * row;
            AheadInTensor ahead = AheadInTensor::of(run.weight + N, p.outer_pitch());
            run.ahead = &ahead;
            multiply_rows<N>(run, least(kPointwiseRows, rows.high - i), p.source_vectors());
          }
        }
      }
    }
  }

  // Stores the gradients of an output channel's weights.
  void store_weight(int64_t i) {
    const int64_t group = i / p.results, k = i % p.results, row = p.source_vectors() * N;
    const int64_t all = p.groups * p.group_sums(), elements = kElements * p.taps;
    T* const to = static_cast<T*>(t.grad_weight) + i * p.sources * elements;
    V finite = {};
    for (int64_t tap = 0; tap < p.taps; ++tap)
      for (int64_t c = 0; c < p.sources; c += N) {
        const T* from = p.sum.in(memory_) + group * p.group_sums() + (tap * kFrequencies * p.results + k) * row + c;
        V m[kFrequencies], g[kKernelRows][kColumns], out[kElements];
        for (int f = 0; f < kFrequencies; ++f) {
          m[f] = load<T, N>(from + f * p.results * row);
          for (int64_t s = 1; s < p.segments; ++s) m[f] += load<T, N>(from + f * p.results * row + s * all);
        }
        for (int k = 0; k < kColumns; ++k) {
          V d[kRows], column[kKernelRows];
          for (int r = 0; r < kRows; ++r) d[r] = m[kColumns * r + k];
          Down::gradients(d, column);
          for (int r = 0; r < kKernelRows; ++r) g[r][k] = column[r];
        }
        for (int r = 0; r < kKernelRows; ++r) Across::gradients(g[r], out + r * kKernelColumns);
        const int64_t live = least(N, p.sources - c);
        for (int e = 0; e < kElements; ++e) {
          finite += out[e] * T(0);
          if (p.channels_last)
            store_first<T, N>(to + (tap * kElements + e) * p.sources + c, out[e], live);
          else
            store_steps(to + c * elements + tap * kElements + e, out[e], elements, live);
        }
      }
    note(finite);
  }

  const Plan& p;
  const convgrad_tensors& t;
  char* const memory_;
  std::atomic<bool> infinite_{false};
};

}  // namespace
