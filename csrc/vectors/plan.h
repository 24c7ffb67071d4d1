// Cuts a depthwise or grouped problem up into lanes, tiles and ranges. Integers only; no vector, no tensor.
//
// A work unit is a block of lanes (channels of one image; several images where there are few channels) times a tile
// of the image. Its operands are packed into scratch memory that stays in the second-level cache.
#pragma once

#include "../convgrad_native.h"

namespace {

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
// Most divisors are 1, and a division costs as much as a few pixels.
inline int64_t ceil_div(int64_t a, int64_t b) { return b == 1 ? a : (a + b - 1) / b; }  // a >= 0, b > 0
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
inline int64_t floor_div(int64_t a, int64_t b) { return b == 1 ? a : a >= 0 ? a / b : -ceil_div(-a, b); }  // b > 0

struct Range {
  int64_t low, high;  // [low, high)
  int64_t size() const { return most(high - low, 0); }
};
inline bool same(Range a, Range b) { return a.low == b.low && a.high == b.high; }
inline Range join(Range a, Range b) {
  if (a.size() == 0) return b;
  if (b.size() == 0) return a;
  return {least(a.low, b.low), most(a.high, b.high)};
}

// The kernel elements that reach one position of a result, as a progression: element first + j * step reads position
// q * source_step + offset + j * offset_step of the source, for j in [0, count).
struct TapRange {
  int64_t first, step, offset, offset_step, count;
};
inline bool same(const TapRange& a, const TapRange& b) {
  return a.first == b.first && a.step == b.step && a.offset == b.offset && a.count == b.count;
}

// One spatial dimension.
struct Axis {
  int64_t input, kernel, stride, padding, dilation, output;

  // forward: output position o reads input o * stride - padding + k * dilation.
  TapRange forward_reach() const { return {0, 1, -padding, dilation, kernel}; }
  Range input_read_by(Range o) const {
    if (o.size() == 0) return {0, 0};
    return {o.low * stride - padding, (o.high - 1) * stride - padding + (kernel - 1) * dilation + 1};
  }

  // The outputs in `o` whose kernel element k reads an input position in `in`.
  Range output_reached_by(int64_t k, Range in, Range o) const {
    const int64_t shift = k * dilation - padding;  // o * stride + shift is read
    return {most(o.low, -floor_div(shift - in.low, stride)), least(o.high, floor_div(in.high - 1 - shift, stride) + 1)};
  }

  // grad_input: input position i = q * stride + r - padding reads output q - (k * dilation - r) / stride, for those k
  // whose k * dilation leaves the remainder r. Each remainder is a convolution of stride 1 of its own.
  int64_t quotient(int64_t i) const { return floor_div(i + padding, stride); }
  int64_t remainder(int64_t i) const { return i + padding - quotient(i) * stride; }
  TapRange backward_reach(int64_t r) const {
    if (stride == 1) return {0, 1, 0, -dilation, kernel};
    const int64_t g = gcd(stride, dilation), period = stride / g;
    for (int64_t k = 0; k < least(kernel, period); ++k)
      if (k * dilation % stride == r)
        return {k, period, -(k * dilation - r) / stride, -(dilation / g), ceil_div(kernel - k, period)};
    return {0, 1, 0, 0, 0};
  }
  // All positions that forward reads or the tensor has.
  Range padded() const { return join({0, input}, input_read_by({0, output})); }
  Range output_read_by(Range i) const {
    if (i.size() == 0) return {0, 0};
    return {quotient(i.low) - (kernel - 1) * dilation / stride, quotient(i.high - 1) + 1};
  }

  static int64_t gcd(int64_t a, int64_t b) { return b ? gcd(b, a % b) : a; }
};

// The part of a reach that meets [low, high), for the first of some equally spaced positions, and for how many of
// them (at most `most_positions`) it stays the same. The first position's reach starts at `base`.
struct Region {
  TapRange reach;
  int64_t positions;
};
inline Region region_at(const TapRange& r, int64_t base, int64_t step, int64_t low, int64_t high,
                        int64_t most_positions) {
  Region z = {{r.first, r.step, r.offset, r.offset_step, 0}, most_positions};
  if (r.count == 0) return z;
  // In the order of what they read, `before` elements read below `low`, and those from `behind` on at `high` or above.
  const int64_t apart = r.offset_step < 0 ? -r.offset_step : most(r.offset_step, 1);
  const int64_t first = base + r.offset + least((r.count - 1) * r.offset_step, 0);
  const int64_t before = first >= low ? 0 : least(r.count, ceil_div(low - first, apart));
  const int64_t behind = first >= high ? 0 : least(r.count, ceil_div(high - first, apart));
  if (before) z.positions = least(z.positions, ceil_div(low - first - (before - 1) * apart, step));
  if (before >= behind) return z;
  z.positions = least(z.positions, ceil_div(high - first - (behind - 1) * apart, step));
  z.reach.count = behind - before;
  const int64_t skipped = r.offset_step < 0 ? r.count - behind : before;
  z.reach.first += skipped * r.step, z.reach.offset += skipped * r.offset_step;
  return z;
}

// Returns whether a problem is a matrix product: kernels of one element, no padding, no positions left out.
inline bool is_product(const convgrad_problem& q) {
  for (int d = 0; d < 3; ++d)  // a single position has any stride
    if (q.kernel[d] != 1 || q.padding[d] || q.output[d] != q.input[d] || (q.stride[d] != 1 && q.input[d] != 1))
      return false;
  return true;
}

// Returns piece `i` of `n` nearly equal pieces of [0, size).
inline Range share(int64_t size, int64_t i, int64_t n) {
  return n == 1 ? Range{0, size} : Range{size * i / n, size * (i + 1) / n};
}

// `body(first, count)` for nearly equal pieces of at most `most_in_piece` each.
template <class Body>
inline void in_pieces(int64_t size, int64_t most_in_piece, const Body& body) {
  for (int64_t pieces = ceil_div(size, most_in_piece), at = 0, now; pieces > 0; --pieces, at += now)
    body(at, now = ceil_div(size - at, pieces));
}

// Pixels of a packed tile, an odd number: vectors a power of two apart would share a few places of the cache.
inline int64_t tile_pixels(const int64_t extent[3]) { return extent[0] * extent[1] * extent[2] | 1; }

// A tensor of the problem: `width` channels, of which every `step`-th from `first` on takes part.
struct Tensor {
  int64_t size[3], width, first, step;
  int padding_mode = CONVGRAD_ZEROS;  // what is read outside
  int64_t pixels() const { return size[0] * size[1] * size[2]; }

  // The position whose value position i has: i itself where that is a zero; where the padding ends, any.
  int64_t inside(int d, int64_t i) const {
    const int64_t n = size[d];
    if (!padding_mode || (i >= 0 && i < n)) return i;
    if (padding_mode == CONVGRAD_CIRCULAR) i += i < 0 ? n : -n;
    if (padding_mode == CONVGRAD_REFLECT) i = i < 0 ? -i : 2 * (n - 1) - i;
    return most(0, least(n - 1, i));
  }
};

// The ranges of one tile.
struct TileRanges {
  Range output[3];       // computed by forward, summed by grad_weight
  Range grad_input[3];   // computed by grad_input
  Range input[3];        // packed of input
  Range summed[3];       // summed of input, for the bias gradient of a transposed convolution
  Range grad_output[3];  // packed of grad_output
};

// The part of a problem that every plan keeps.
struct Request {
  int64_t batch, channels, multiplier, kernel_elements;
  int outputs, threads;

  bool wants(int output) const { return outputs & output; }
  bool needs_input() const { return wants(CONVGRAD_FORWARD | CONVGRAD_GRAD_WEIGHT); }
  bool needs_grad_output() const { return wants(CONVGRAD_GRAD_INPUT | CONVGRAD_GRAD_WEIGHT); }
  bool needs_weight() const { return wants(CONVGRAD_FORWARD | CONVGRAD_GRAD_INPUT); }
};

// Blocks of channels and images, and tiles of an image.
struct Tiling : Request {
  Axis axis[3];
  bool channels_last;
  int padding_mode;
  int64_t lanes;         // channels in a block, rounded up to whole vectors
  int64_t images;        // images in a block: 1, or several where the channels do not fill a vector
  int64_t lane_blocks;   // blocks of channels
  int64_t image_blocks;  // blocks of images
  int64_t bands[3];      // pieces along each dimension
  int64_t tiles;
  int64_t segments;      // pieces of the units, for parallel work items
  int64_t input_extent[3], output_extent[3];  // of the packed tiles, the largest of all tiles

  int64_t units() const { return image_blocks * tiles; }  // of one lane block
  Tensor input_tensor() const {
    return {{axis[0].input, axis[1].input, axis[2].input}, channels, 0, 1, padding_mode};
  }
  // Returns whether gradients of the padding are added to the positions whose values it has. That takes whole images.
  bool folds() const { return padding_mode && wants(CONVGRAD_GRAD_INPUT); }
  int64_t folded_pixels() const { return axis[0].padded().size() * axis[1].padded().size() * axis[2].padded().size(); }

  void set_axes(const convgrad_problem& q) {
    batch = q.batch, outputs = q.outputs, threads = q.threads, kernel_elements = 1;
    channels_last = q.layout == CONVGRAD_CHANNELS_LAST, padding_mode = q.padding_mode;
    for (int d = 0; d < 3; ++d) {
      axis[d] = {q.input[d], q.kernel[d], q.stride[d], q.padding[d], q.dilation[d], q.output[d]};
      kernel_elements *= q.kernel[d];
    }
  }
  // Sets the number of tiles and their packed extents, once the bands are chosen.
  void set_tiles() {
    tiles = bands[0] * bands[1] * bands[2];
    for (int d = 0; d < 3; ++d)
      for (int64_t b = 0; b < bands[d]; ++b) {
        TileRanges r = {};
        set_ranges(r, d, b);
        input_extent[d] = most(input_extent[d], r.input[d].size());
        output_extent[d] = most(output_extent[d], r.grad_output[d].size());
      }
  }

  TileRanges ranges_of(int64_t tile) const {
    TileRanges r = {};
    for (int d = 2; d >= 0; --d) {
      set_ranges(r, d, tiles == 1 ? 0 : tile % bands[d]);
      if (tiles > 1) tile /= bands[d];
    }
    return r;
  }

 private:
  // Sets the ranges of a band in one dimension.
  void set_ranges(TileRanges& r, int d, int64_t band) const {
    const Axis& a = axis[d];
    const int64_t n = bands[d];
    Range &output = r.output[d], &input = r.input[d], &grad_input = r.grad_input[d], &grad_output = r.grad_output[d];
    if (wants(CONVGRAD_GRAD_INPUT)) {
      grad_input = folds() ? a.padded() : share(a.input, band, n);
      grad_output = a.output_read_by(grad_input);
      // grad_weight sums the outputs whose first kernel element lies in this band, so that one packed tile serves both
      output.low = band == 0 ? 0 : clamp(a, grad_input.low);
      output.high = band == n - 1 ? a.output : clamp(a, grad_input.high);
    } else {
      output = share(a.output, band, n);
    }
    r.summed[d] = share(a.input, band, n);
    if (needs_input()) input = a.input_read_by(output);
    if (wants(CONVGRAD_TRANSPOSED_GRAD_BIAS)) input = join(input, r.summed[d]);
    if (wants(CONVGRAD_GRAD_WEIGHT)) grad_output = join(grad_output, output);
  }

  static int64_t clamp(const Axis& a, int64_t i) {
    return most(0, least(a.output, -floor_div(-(i + a.padding), a.stride)));
  }
};

// Scratch memory of a thread for packed tiles: half of a second-level cache of 512 KiB.
#if defined(CONVGRAD_TILE_BYTES)  // tests: small problems are cut into many tiles, and taken for large ones
constexpr bool kTestsTiles = true;
constexpr int64_t kTileBytes = CONVGRAD_TILE_BYTES;
#else
constexpr bool kTestsTiles = false;
constexpr int64_t kTileBytes = 256 * 1024;
#endif

// Returns how many copies of grad_weight, of so many bytes, work items may sum into: as many as fit the memory that a
// thread keeps (dispatch.cpp). More of them, in new memory for each call, take up to a quarter of the time.
inline int64_t most_sums(int64_t bytes) { return most(1, (16 << 20) / bytes); }

// Elements of the packed tiles if the dimensions were cut into these bands; an estimate from the first full band.
inline int64_t packed_pixels(const Tiling& p, const int64_t bands[3]) {
  int64_t input = p.needs_input(), output = p.needs_grad_output() * p.multiplier;
  for (int d = 0; d < 3; ++d) {
    const Axis& a = p.axis[d];
    input *= (ceil_div(a.output, bands[d]) - 1) * a.stride + (a.kernel - 1) * a.dilation + 1;
    output *= p.wants(CONVGRAD_GRAD_INPUT)
                  ? ceil_div(ceil_div(a.input, bands[d]), a.stride) + 1 + (a.kernel - 1) * a.dilation / a.stride
                  : ceil_div(a.output, bands[d]);
  }
  return input + output + (p.folds() ? p.folded_pixels() : 0);
}

// Cut the image until a tile fits: depth first, then rows (not below a few, because neighboring tiles pack the rows
// between them twice), then columns.
inline void choose_bands(Tiling& p, int64_t budget, int64_t least_tiles) {
  int64_t* bands = p.bands;
  bands[0] = bands[1] = bands[2] = 1;
  if (p.folds()) return;
  const bool by_input = p.wants(CONVGRAD_GRAD_INPUT);
  const int64_t least_extent[3] = {1, 4, 64};
  for (int d = 0; d < 3; ++d) {
    const Axis& a = p.axis[d];
    const int64_t extent = by_input ? a.input : a.output;
    const int64_t reach = ceil_div((a.kernel - 1) * a.dilation + 1, by_input ? 1 : a.stride);
    const int64_t most_bands = most(1, extent / most(least_extent[d], reach));
    while (bands[d] < most_bands &&
           (packed_pixels(p, bands) * p.lanes > budget || bands[0] * bands[1] * bands[2] < least_tiles))
      bands[d] = least(most_bands, bands[d] + 1 + bands[d] / 4);
  }
}

}  // namespace
