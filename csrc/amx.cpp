// Pointwise convolution of float32 on the tiles of AMX, which multiply bfloat16 only, and add up in float32.
//
// A float32 number is the sum of three bfloat16 numbers, exactly: x = x0 + x1 + x2, with 8 of its 24 bits each. Of the
// nine products of two such sums, six are computed; the others are below 2^-23 |x y|. (Henry, Tang and Heinecke,
// "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations", ARITH 2019.) Six such
// products take less than half as long as one of float32 does by AVX-512. Infinities, NaNs and numbers that round to
// infinity have no such parts: where an operand has one, the ordinary kernels compute the results. Parts and products
// below the normal numbers of float32 count as zero.
//
// Every pass is a product of matrices, results[i][j] = sum over k of left[i][k] * right[k][j]:
//   channels_last:  pixels x channels, the weight on the right
//   contiguous:     channels x pixels of an image, the weight on the left
//   grad_weight:    channels of grad_output x those of the input
// Operands are packed in panels of 16 rows or columns, cut into steps of 32 k: three tiles, one for each part. The
// inner operand is packed for as many steps as the second-level cache holds; of the outer one two panels at a time,
// which are multiplied by all of the inner one's. The pixels are the inner operand; for grad_weight the side with fewer
// channels. A weight for many pixels is packed beforehand; then so few pixels are taken at a time that all their
// channels are multiplied at once, and results are written once.
//
// What limits it: with fewer than some 100 channels on either side packing, else the power that the tiles draw:
// products of random numbers take 1.2 times as long as products of zeros.
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kept_plan.h"
#include "memory.h"
#include "parallel.h"
#include "reduce.h"

void convgrad_plan_make_v4_float(const convgrad_problem&, void* memory);

namespace {

constexpr int64_t kEdge = 16, kStep = 32;  // rows or columns of a tile; k of a step
constexpr int64_t kTile = kEdge * kStep, kParts = 3 * kTile;
constexpr int64_t kStepBytes = kParts * 2;
constexpr int64_t kAhead = 3;              // pieces between what is packed and what is prefetched
constexpr int64_t kMostSteps = 16;         // that are packed at once
constexpr int64_t kMostPanels = 64;        // of pixels, for which the weight is packed once
constexpr int64_t kInnerBytes = 3 << 19;   // of the inner operand
// Where the weight is packed beforehand: the most steps and panels of pixels that are multiplied at once, and the bytes
// of both; and of the weight.
constexpr int64_t kCachedSteps = 32, kCachedPanels = 32, kCachedBytes = 1 << 20, kMostWeight = 1 << 25;
constexpr int64_t kFewSums = 1 << 18;      // bytes of grad_weight that each thread may add up for itself

// All eight tiles whole, while this lives; then the configuration that the thread had.
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

// ---- packing ----

inline __mmask16 first(int64_t count) {
  return count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}

// Pairs of two vectors' elements, rounded to bfloat16; what is left of them, for the next part.
inline __m512i take_part(__m512& low, __m512& high) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i pairs = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  low = _mm512_sub_ps(low, _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
  high = _mm512_sub_ps(high, _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000))));
  return pairs;
}

// A step of 32 k of a panel, wherever it lies.
struct Piece {
  const float* at;
  int64_t rows, terms;
};

// Packs panels for one side of the product. Every panel has `steps` of three tiles, one behind the other.
class Packer {
 public:
  // Of an operand whose k lies along its lines, or of which a line holds one k of all rows (columns).
  Packer(bool left, bool along, int64_t line) : turns_(along != left), along_(along), line_(line) {}

  // The memory of what is packed soon is prefetched.
  void pack(uint16_t* to, const Piece& x, const Piece& soon) {
    static constexpr auto kernels = make_all<8>([](auto i) { return pack_step<i / 4, i / 2 % 2, i % 2>; });
    const bool whole = x.rows >= kEdge && x.terms >= kStep;
    largest_ = _mm512_max_epu16(largest_, kernels[4 * along_ + 2 * whole + turns_](to, x, soon.at, line_));
  }

  // Whether a number was infinite, NaN, or rounds to infinity.
  bool met_infinity() const {
    return _mm512_cmpge_epu16_mask(largest_, _mm512_set1_epi16(0x7f80)) != 0;
  }

 private:
  // The largest magnitudes, as the bits of bfloat16.
  template <bool Along, bool Whole, bool Turns>
  static __m512i pack_step(uint16_t* to, const Piece& x, const float* soon, int64_t line) {
    const int64_t lines = Along ? x.rows : x.terms, lanes = Along ? x.terms : x.rows;
    const int64_t next = Along ? 16 : 16 * line;  // from k to k + 16
    const __mmask16 here = Whole ? 0xffff : first(lanes), there = Whole ? 0xffff : Along ? first(lanes - 16) : here;
    __m512i largest = _mm512_setzero_si512();
    auto load = [&](int l, __m512& low, __m512& high) {
      __builtin_prefetch(soon + l * line), __builtin_prefetch(soon + l * line + next);
      low = _mm512_maskz_loadu_ps(Whole || l < lines ? here : 0, x.at + l * line);
      high = _mm512_maskz_loadu_ps(Whole || l + (Along ? 0 : 16) < lines ? there : 0, x.at + l * line + next);
    };
    auto split = [&](int l, __m512 low, __m512 high) {  // a row of each of the three tiles
      const __m512i pairs = take_part(low, high);
      largest = _mm512_max_epu16(largest, _mm512_and_si512(pairs, _mm512_set1_epi16(0x7fff)));
      _mm512_store_si512(to + l * kStep, pairs);
      _mm512_store_si512(to + l * kStep + kTile, take_part(low, high));
      _mm512_store_si512(to + l * kStep + 2 * kTile, take_part(low, high));
    };
    if constexpr (Turns) {
      Vec<float, 16> low[16], high[16];
#pragma GCC unroll 16
      for (int l = 0; l < 16; ++l) load(l, (__m512&)low[l], (__m512&)high[l]);
      transpose<float, 16>(low), transpose<float, 16>(high);
#pragma GCC unroll 16
      for (int l = 0; l < 16; ++l) split(l, low[l], high[l]);
    } else {
      __m512 low, high;
      for (int l = 0; l < 16; ++l) load(l, low, high), split(l, low, high);
    }
    return largest;
  }

  bool turns_, along_;
  int64_t line_;
  __m512i largest_ = _mm512_setzero_si512();
};

// ---- the product ----

// A tile in memory: its rows lie `row` elements apart, and so many of its rows and columns are there.
struct Place {
  float* at;
  int64_t row, rows = kEdge, columns = kEdge;
  size_t row_bytes() const { return static_cast<size_t>(row) * sizeof(float); }
  bool whole() const { return rows == kEdge && columns == kEdge; }
};

void copy(const Place& to, const Place& from, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r)
    memcpy(to.at + r * to.row, from.at + r * from.row, static_cast<size_t>(columns) * sizeof(float));
}

// R x C tiles, from two panels or one on either side. Where `fetch` is set, what is written is not in the cache yet:
// its lines are fetched a few at a time.
//
// A core that has run no floating-point instruction but those of tiles for some 2000 cycles takes 700 to store a tile,
// a quarter of a block of 6 steps (Granite Rapids); an addition in each step keeps it awake.
template <int R, int C>
void multiply(const uint16_t* left, int64_t left_panel, const uint16_t* right, int64_t right_panel, int64_t steps,
              const Place (&from)[2][2], const Place (&to)[2][2], bool fetch) {
  _tile_loadd(0, from[0][0].at, from[0][0].row_bytes());
  if constexpr (C > 1) _tile_loadd(1, from[0][1].at, from[0][1].row_bytes());
  if constexpr (R > 1) _tile_loadd(2, from[1][0].at, from[1][0].row_bytes());
  if constexpr (R > 1 && C > 1) _tile_loadd(3, from[1][1].at, from[1][1].row_bytes());

  auto load_left = [&](int part) {
    _tile_loadd(4, left + part * kTile, 64);
    if constexpr (R > 1) _tile_loadd(5, left + left_panel + part * kTile, 64);
  };
  auto load_right = [&](int part) {
    _tile_loadd(6, right + part * kTile, 64);
    if constexpr (C > 1) _tile_loadd(7, right + right_panel + part * kTile, 64);
  };
  auto add_products = [] {
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (C > 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (R > 1) _tile_dpbf16ps(2, 5, 6);
    if constexpr (R > 1 && C > 1) _tile_dpbf16ps(3, 5, 7);
  };
  const int64_t each = ceil_div(kEdge, most(1, steps - 1));
  __m128 zero = _mm_setzero_ps();  // to be added to itself
  for (int64_t k = 0, line = fetch ? 0 : kEdge; k < steps; ++k, left += kParts, right += kParts) {
    for (const int64_t last = least(kEdge, line + each); line < last; ++line)
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) __builtin_prefetch(to[r][c].at + line * to[r][c].row, 1);
    asm volatile("addss %0, %0" : "+x"(zero));
    // The largest products last: the sum of the others is rounded less.
    load_left(0), load_right(2), add_products();
    load_right(1), add_products();
    load_left(1), add_products();
    load_right(0), add_products();
    load_left(2), add_products();
    load_left(0), add_products();
  }

  _tile_stored(0, to[0][0].at, to[0][0].row_bytes());
  if constexpr (C > 1) _tile_stored(1, to[0][1].at, to[0][1].row_bytes());
  if constexpr (R > 1) _tile_stored(2, to[1][0].at, to[1][0].row_bytes());
  if constexpr (R > 1 && C > 1) _tile_stored(3, to[1][1].at, to[1][1].row_bytes());
}

// The tiles of one or two panels on either side. They begin as `start(i, j)` says, or, if that is null, as they are.
template <class Start, class Results>
void multiply_block(const uint16_t* left, int64_t left_panel, Range rows, const uint16_t* right, int64_t right_panel,
                    Range columns, int64_t steps, const Start* start, const Results& results) {
  alignas(64) float edge[2][2][kEdge * kEdge];  // for tiles that are not whole
  Place from[2][2], to[2][2], place[2][2];
  for (int r = 0; r < rows.size(); ++r)
    for (int c = 0; c < columns.size(); ++c) {
      Place &p = place[r][c] = results(rows.low + r, columns.low + c), &t = to[r][c];
      t = p.whole() ? p : Place{edge[r][c], kEdge};
      from[r][c] = start ? (*start)(rows.low + r, columns.low + c) : t;
      if (!start && !p.whole()) copy(t, p, p.rows, p.columns);
    }
  const auto kernel = rows.size() > 1 ? (columns.size() > 1 ? multiply<2, 2> : multiply<2, 1>)
                                      : (columns.size() > 1 ? multiply<1, 2> : multiply<1, 1>);
  kernel(left, left_panel, right, right_panel, steps, from, to, start != nullptr);
  for (int r = 0; r < rows.size(); ++r)
    for (int c = 0; c < columns.size(); ++c)
      if (const Place& p = place[r][c]; !p.whole()) copy(p, to[r][c], p.rows, p.columns);
}

// ---- the plan ----

struct AmxPlan : KeptPlan {
  int64_t images, pixels;    // in channels_last one image has all pixels
  int64_t sources, results;  // channels of what results are computed from, and of these; of the input, and grad_output
  bool channels_last, backward, sums;  // grad_input; grad_weight
  int64_t steps, chunk;      // of k, and how many of them are packed at once
  int64_t segments, parts;   // of the pixels, and of the outer operand's panels: one of each is an item
  Memory memory;
  Array<uint16_t> inner, outer;  // of each thread
  Array<uint16_t> weight;        // of all, where it is packed beforehand
  Array<float> start, partial;

  int64_t image_steps() const { return ceil_div(pixels, kStep); }
  int64_t image_panels() const { return ceil_div(pixels, kEdge); }
  // Panels of the inner and of the outer operand.
  int64_t inners() const { return sums ? ceil_div(least(sources, results), kEdge) : images * image_panels(); }
  int64_t outers() const { return ceil_div(sums ? most(sources, results) : results, kEdge); }
  bool outer_left() const { return sums ? results >= sources : !channels_last; }
  int64_t all_sums() const { return sources * results; }
};

bool takes(const convgrad_problem& q) {
  bool fits = q.dtype == CONVGRAD_FLOAT32 && q.groups == 1 &&
              (q.outputs == CONVGRAD_FORWARD || q.outputs == CONVGRAD_GRAD_INPUT || q.outputs == CONVGRAD_GRAD_WEIGHT);
  for (int d = 0; d < 3; ++d)
    fits = fits && q.kernel[d] == 1 && q.padding[d] == 0 && q.output[d] == q.input[d] &&
           (q.stride[d] == 1 || q.input[d] == 1);
  return fits;
}

// So many steps of `panels` fit into the cache.
int64_t cached_steps(int64_t panels) {
  return most(4, least(kMostSteps, kInnerBytes / (panels * kStepBytes)));
}

void plan_results(AmxPlan& p) {
  p.steps = ceil_div(p.sources, kStep);
  p.chunk = ceil_div(p.steps, ceil_div(p.steps, kCachedSteps));
  const int64_t cached = least(kCachedPanels, kCachedBytes / (p.chunk * kStepBytes));
  const int64_t bytes = p.outers() * p.steps * kStepBytes;
  const bool beforehand = p.inners() > cached && p.inners() >= kCachedPanels && bytes <= kMostWeight;
  // The threads share out the longer operand: each packs all of the other one. There may be few pixels.
  const bool shares_pixels = p.inners() >= p.outers();
  const int64_t segments = ceil_div(p.inners(), beforehand ? cached : kMostPanels);
  p.segments = least(p.inners(), round_up(segments, shares_pixels ? p.threads : 1));
  p.parts = p.segments % p.threads && !shares_pixels ? least(p.outers(), p.threads) : 1;
  if (beforehand)
    p.weight = p.memory.shared.add<uint16_t>(p.outers() * p.steps * kParts);
  else
    p.chunk = ceil_div(p.steps, ceil_div(p.steps, cached_steps(ceil_div(p.inners(), p.segments))));
  p.start = p.memory.shared.add<float>(p.outers() * kEdge * (p.channels_last ? 1 : kEdge));
}

void plan_sums(AmxPlan& p) {
  p.steps = p.images * p.image_steps();
  // A thread adds up its share of the pixels, or where sums are many, its share of these.
  const bool few = p.all_sums() * int64_t(sizeof(float)) <= kFewSums;
  p.segments = few ? least(p.threads, p.steps) : 1;
  p.parts = few ? 1 : least(p.outers(), p.threads);
  p.chunk = least(cached_steps(p.inners()), ceil_div(p.steps, p.segments));
  if (p.segments > 1) p.partial = p.memory.shared.add<float>(p.segments * p.all_sums());
}

// ---- the passes ----

class Call {
 public:
  Call(const AmxPlan& plan, const convgrad_tensors& tensors, char* memory)
      : p(plan), t(tensors), memory_(memory), start_(plan.start.in(memory)), weight_(plan.weight.in(memory)) {}

  // False where an operand has an infinity or a NaN: then the results are to be computed anew.
  bool run(int threads) {
    auto scratch = [&](int64_t thread) { return p.memory.of_thread(memory_, thread); };
    float* const partial = p.partial.in(memory_);
    auto add_up = [&](Range elements) {
      reduce_partials<float, 16>(static_cast<float*>(t.grad_weight), p.all_sums(), static_cast<float*>(nullptr),
                                 partial, p.all_sums(), p.segments, elements);
    };
    auto run = [&](char* own, int64_t item) {
      const Tiles tiles;
      p.sums ? sum_weight(own, item, partial) : compute(own, item);
    };
    run_items(
        threads, p.sums ? 0 : p.outers(), [&](Range panels) { prepare(panels); }, p.segments * p.parts, scratch, run,
        partial ? p.all_sums() : 0, add_up);
    return !infinite_;
  }

 private:
  static Place place(float* at, int64_t row, int64_t rows, int64_t columns) {
    return {at, row, least(kEdge, rows), least(kEdge, columns)};
  }
  // `body(steps)` for as many of them at a time as are packed at once.
  template <class Body>
  void in_chunks(Range steps, const Body& body) const {
    for (int64_t k = steps.low; k < steps.high; k += p.chunk) body(Range{k, least(steps.high, k + p.chunk)});
  }

  void note(const Packer& packer) {
    if (packer.met_infinity()) infinite_.store(true, std::memory_order_relaxed);
  }

  // Some panels of an operand, in the order in which they lie: each has `steps`, one behind the other.
  template <class At>
  void pack(uint16_t* to, Range panels, Range steps, bool left, bool along, int64_t line, const At& at) {
    Packer packer(left, along, line);
    const int64_t many = panels.size(), each = steps.size(), last = many * each - 1;
    auto piece = [&](int64_t n) {
      return along ? at(panels.low + n / each, steps.low + n % each) : at(panels.low + n % many, steps.low + n / many);
    };
    for (int64_t n = 0; n <= last; ++n)
      packer.pack(to + (along ? n : n % many * each + n / many) * kParts, piece(n), piece(least(n + kAhead, last)));
    note(packer);
  }
  void pack_weight(uint16_t* to, Range panels, Range steps) {
    const float* const weight = static_cast<const float*>(t.weight);
    const bool along = !p.backward;
    pack(to, panels, steps, !p.channels_last, along, along ? p.sources : p.results, [&](int64_t i, int64_t k) {
      const int64_t row = i * kEdge, term = k * kStep, at = along ? row * p.sources + term : term * p.results + row;
      return Piece{weight + at, p.results - row, p.sources - term};
    });
  }
  // Panels of pixels, k are channels.
  void pack_pixels(uint16_t* to, Range panels, Range steps) {
    const float* const tensor = static_cast<const float*>(p.backward ? t.grad_output : t.input);
    const bool along = p.channels_last;
    pack(to, panels, steps, along, along, along ? p.sources : p.pixels, [&](int64_t i, int64_t k) {
      const int64_t image = i / p.image_panels(), pixel = i % p.image_panels() * kEdge, term = k * kStep;
      const int64_t at = along ? pixel * p.sources + term : term * p.pixels + pixel;
      return Piece{tensor + image * p.sources * p.pixels + at, p.pixels - pixel, p.sources - term};
    });
  }
  // Panels of channels, k are pixels.
  void pack_channels(uint16_t* to, Range panels, Range steps, bool left) {
    const float* const tensor = static_cast<const float*>(left ? t.grad_output : t.input);
    const int64_t all = left ? p.results : p.sources;
    const bool along = !p.channels_last;
    pack(to, panels, steps, left, along, along ? p.pixels : all, [&](int64_t i, int64_t k) {
      const int64_t image = k / p.image_steps(), pixel = k % p.image_steps() * kStep, channel = i * kEdge;
      const int64_t at = along ? channel * p.pixels + pixel : pixel * all + channel;
      return Piece{tensor + image * all * p.pixels + at, all - channel, p.pixels - pixel};
    });
  }

  void prepare(Range panels) {
    fill_start(panels);
    if (weight_) pack_weight(weight_ + panels.low * p.steps * kParts, panels, {0, p.steps});
  }
  // What results begin with: the bias, of every pixel's channels or of a channel's pixels.
  void fill_start(Range panels) {
    const float* bias = static_cast<const float*>(t.bias);
    const int64_t times = p.channels_last ? 1 : kEdge;
    for (int64_t r = panels.low * kEdge; r < panels.high * kEdge; ++r)
      for (int64_t i = 0; i < times; ++i) start_[r * times + i] = bias && r < p.results ? bias[r] : 0;
  }

  // The product of an inner operand that is packed and an outer one, of which `outer(panels)` gives one or two.
  template <class Outer, class Start, class Results>
  void multiply_panels(Range outers, const Outer& outer, int64_t outer_panel, const uint16_t* inner, Range inners,
                       int64_t steps, const Start* start, const Results& results) {
    const int64_t inner_panel = steps * kParts;
    for (Range two = outers; two.low < outers.high; two.low = two.high) {
      two.high = least(two.low + 2, outers.high);
      const uint16_t* const packed = outer(two);
      for (Range now = inners; now.low < inners.high; now.low = now.high) {
        now.high = least(now.low + 2, inners.high);
        const uint16_t* const other = inner + (now.low - inners.low) * inner_panel;
        if (p.outer_left()) {
          multiply_block(packed, outer_panel, two, other, inner_panel, now, steps, start, results);
        } else {
          multiply_block(other, inner_panel, now, packed, outer_panel, two, steps, start, results);
        }
      }
    }
  }

  // Some results of some pixels.
  void compute(char* own, int64_t item) {
    const Range pixels = share(p.inners(), item / p.parts, p.segments);
    const Range outers = share(p.outers(), item % p.parts, p.parts);
    float* const tensor = static_cast<float*>(p.backward ? t.grad_input : t.forward);
    auto start = [&](int64_t i, int64_t j) {
      return p.channels_last ? Place{start_ + j * kEdge, 0} : Place{start_ + i * kEdge * kEdge, kEdge};
    };
    auto results = [&](int64_t i, int64_t j) {
      if (p.channels_last)
        return place(tensor + i * kEdge * p.results + j * kEdge, p.results, p.pixels - i * kEdge,
                     p.results - j * kEdge);
      const int64_t image = j / p.image_panels(), pixel = j % p.image_panels() * kEdge;
      return place(tensor + (image * p.results + i * kEdge) * p.pixels + pixel, p.pixels, p.results - i * kEdge,
                   p.pixels - pixel);
    };
    in_chunks({0, p.steps}, [&](Range now) {
      pack_pixels(p.inner.in(own), pixels, now);
      auto weight = [&](Range panels) {
        if (weight_) return weight_ + (panels.low * p.steps + now.low) * kParts;
        pack_weight(p.outer.in(own), panels, now);
        return p.outer.in(own);
      };
      multiply_panels(outers, weight, (weight_ ? p.steps : now.size()) * kParts, p.inner.in(own), pixels, now.size(),
                      now.low ? nullptr : &start, results);
    });
  }

  // Sums of some pixels, or some of the sums.
  void sum_weight(char* own, int64_t item, float* partial) {
    alignas(64) static float zeros[kEdge];
    const Range inners = {0, p.inners()}, outers = share(p.outers(), item % p.parts, p.parts);
    const Range steps = share(p.steps, item / p.parts, p.segments);
    float* const tensor = partial ? partial + item / p.parts * p.all_sums() : static_cast<float*>(t.grad_weight);
    auto start = [&](int64_t, int64_t) { return Place{zeros, 0}; };
    auto results = [&](int64_t i, int64_t j) {
      return place(tensor + i * kEdge * p.sources + j * kEdge, p.sources, p.results - i * kEdge,
                   p.sources - j * kEdge);
    };
    in_chunks(steps, [&](Range now) {
      pack_channels(p.inner.in(own), inners, now, !p.outer_left());
      auto outer = [&](Range panels) {
        pack_channels(p.outer.in(own), panels, now, p.outer_left());
        return p.outer.in(own);
      };
      multiply_panels(outers, outer, now.size() * kParts, p.inner.in(own), inners, now.size(),
                      now.low > steps.low ? nullptr : &start, results);
    });
  }

  const AmxPlan& p;
  const convgrad_tensors& t;
  char* const memory_;
  float* const start_;
  uint16_t* const weight_;
  std::atomic<bool> infinite_{false};
};

}  // namespace

// Whether the processor has what this file is compiled for, and Linux gives the process the tiles, which it does on
// request.
bool convgrad_amx_allowed() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kAvx512Bf16 = 1u << 5;
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~d & (kBf16 | kTile)) return false;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || ~a & kAvx512Bf16) return false;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// Of AMX where the problem is one for it, with the ordinary kernels' plan behind it; else this alone.
void convgrad_plan_make_amx_float(const convgrad_problem& q, void* memory) {
  if (!takes(q)) return convgrad_plan_make_v4_float(q, memory);
  auto* p = keep<AmxPlan, CONVGRAD_PLAN_BYTES - kOrdinaryBytes>({}, memory);
  convgrad_plan_make_v4_float(q, p + 1);
  const KeptPlan& ordinary = *reinterpret_cast<const KeptPlan*>(p + 1);
  p->name = "amx", p->threads = q.threads;
  p->channels_last = q.layout == CONVGRAD_CHANNELS_LAST;
  p->images = q.batch, p->pixels = q.input[0] * q.input[1] * q.input[2];
  if (p->channels_last) p->pixels *= p->images, p->images = 1;
  p->sums = q.outputs == CONVGRAD_GRAD_WEIGHT, p->backward = q.outputs == CONVGRAD_GRAD_INPUT;
  p->sources = p->backward ? q.out_per_group : q.in_per_group;
  p->results = p->backward ? q.in_per_group : q.out_per_group;
  p->sums ? plan_sums(*p) : plan_results(*p);
  p->inner = p->memory.each.add<uint16_t>(ceil_div(p->inners(), p->sums ? 1 : p->segments) * p->chunk * kParts);
  p->outer = p->memory.each.add<uint16_t>(2 * p->chunk * kParts);
  p->bytes = most(ordinary.bytes, p->memory.bytes(q.threads));
  p->run = [](const KeptPlan& kept, const convgrad_tensors& t, char* memory, int threads) {
    const AmxPlan& plan = static_cast<const AmxPlan&>(kept);
    const KeptPlan& ordinary = *reinterpret_cast<const KeptPlan*>(&plan + 1);
    if (!Call(plan, t, memory).run(threads)) ordinary.run(ordinary, t, memory, threads);
  };
}
