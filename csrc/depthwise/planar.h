// Depthwise convolution of contiguous tensors with stride 1, read and written where they lie: a vector holds
// neighboring columns of one channel. Nothing is packed or transposed, so that tensors are read from end to end, and
// arithmetic and memory work at the same time. Kernels of up to 3 rows and 3 columns, or 4 columns, and of any depth;
// 1-D to 3-D, any dilation, padding and multiplier, all passes, four dtypes.
//
// A work unit is a channel of an image, computed slice after slice, by groups of rows. In a row, the vectors in the
// middle are reached by every kernel element; those at its borders are computed under masks (planar_plan.h), and the
// last one begins early enough to be full. Rows that the same kernel rows reach form a region, as in packed.h, which
// computes everything else: larger kernels, whose arithmetic takes longer than their memory, strides, channels_last,
// and narrow or low images, where lanes would be idle and calls short.
//
// Each slice reads from memory one slice of the input and of grad_output that no earlier slice has read. Long rows
// the processor fetches ahead by itself; of shorter ones, several of which are computed together, it makes no pattern:
// they are prefetched, as far ahead as the rows that are computed together reach.
#pragma once

#include "../vectors/parallel.h"
#include "../vectors/reduce.h"
#include "planar_kernels.h"

namespace {

// S: storage, T: arithmetic, N: lanes of a vector.
template <class S, class T, int N>
struct Planar {
  // Small kernels with stride 1, and rows of at least a vector. Faster than packing where a slice is large enough for a
  // call of the loops, whose cost grows with the kernel's rows, and where there are planes enough for all threads.
  static bool takes(const convgrad_problem& q) {
    for (int d = 0; d < 3; ++d)
      if (q.stride[d] != 1) return false;
    if (q.padding_mode) return false;
    const int64_t fewest = 128 * (q.kernel[1] + (q.kernel[0] > 1)) * (sizeof(S) < 4 ? 2 : 1);
    return q.layout == CONVGRAD_CONTIGUOUS && q.kernel[1] <= kBlockRows &&
           q.kernel[2] <= kBlockColumns - (q.kernel[1] > 1) && least(q.input[2], q.output[2]) >= N &&
           (kTestsTiles || (q.output[1] * q.output[2] >= fewest && q.batch * q.groups >= 4 * q.threads));
  }

  // ---- scratch memory ----

  struct Scratch {
    T *weights, *sums;
    KernelBlock* blocks;
    S* copy;  // see readable
  };

  // All passes' columns, shared by the threads.
  struct Shared {
    RowVectors<T> forward, backward, sums;
  };

  const PlanarPlan& p;
  const convgrad_tensors& t;
  const Shared& shared;

  // Where the elements `of` of a tensor of `size` elements can be read and `margin` elements around them, which vectors
  // at a border reach to: in the tensor, but at its ends in a copy.
  const S* readable(const Scratch& s, const S* tensor, int64_t size, Range of) const {
    if (of.size() == 0 || (of.low >= p.margin && of.high + p.margin <= size)) return tensor;
    memcpy(s.copy + p.margin, tensor + of.low, sizeof(S) * static_cast<size_t>(of.size()));
    return s.copy + p.margin - of.low;
  }

  // The vectors of a row of results; the last one begins early enough to be full. `once`: lanes that the vector before
  // has too are masked.
  static RowVectors<T> list_columns(const PlanarPass& p, bool once, int64_t* at, LaneInteger<T>* masks) {
    const int64_t width = p.result[2];
    const Range source = p.reached_from(2, {0, N});  // what a vector at column 0 reads
    RowVectors<T> row = {0, 0, 0, 0, at, masks};
    for (int64_t i = 0; i < ceil_div(width, N); ++i) {
      const int64_t from = least(i * N, width - N);
      if (from == i * N && from + source.low >= 0 && from + source.high <= p.source[2]) {
        if (row.middle++ == 0) row.first = from;
        continue;
      }
      *at++ = from;
      ++(row.middle ? row.right : row.left);
      for (int64_t k = 0; k < p.kernel[2]; ++k)
        for (int64_t l = 0; l < N; ++l) {
          const int64_t result = from + l, source = result + p.shift[2] + k * p.step[2];
          const bool counts = !once || result >= i * N;
          *masks++ = counts && source >= 0 && source < p.source[2] ? -1 : 0;
        }
    }
    return row;
  }

  // The loops for blocks of so many kernel rows; those for kernels of three columns are faster. None accumulates
  // several rows of the most columns: their sums would not fit the registers.
  static void correlate_blocks(int64_t rows, const PlanarResults<S, T>& results) {
    static constexpr auto any = make_all<kBlockRows>([](auto i) { return correlate_planar<T, N, S, i + 1, 0>; });
    static constexpr auto three = make_all<kBlockRows>([](auto i) { return correlate_planar<T, N, S, i + 1, 3>; });
    const int64_t columns = results.kernel_columns;
    const bool one_row = rows == 1 && results.count == 1;
    if (columns == 4 && one_row) return correlate_planar<T, N, S, 1, 4>(results);
    (columns == 3 && (rows > 1 || one_row) ? three : any)[rows - 1](results);
  }
  static void accumulate_block(int64_t rows, int64_t columns, T* sums, const PlanarProducts<S, T>& products) {
    using Loop = void (*)(T*, const PlanarProducts<S, T>&);
    static constexpr auto all = make_all<kBlockRows * kBlockColumns>([](auto i) -> Loop {
      constexpr int G = i / kBlockColumns + 1, C = i % kBlockColumns + 1;
      if constexpr (G == 1 || C < kBlockColumns) return accumulate_planar<T, N, S, G, C>;
      return nullptr;
    });
    all[(rows - 1) * kBlockColumns + columns - 1](sums, products);
  }

  // Rows of a slice that the same kernel rows reach; `row` and `first` are the first one's row of the source and kernel
  // row, as they lie in the source: in grad_input, whose kernel runs backward, the last kernel row comes first.
  // `together`: kernel rows that share their loads, as they lie as far apart as the rows that are computed together.
  struct Rows {
    int64_t positions, row, first, count, together;
  };
  static Rows rows_from(const PlanarPass& pass, int64_t low, int64_t high) {
    const Region z = region_at(pass.reach(1), low, 1, 0, pass.source[1], high - low);
    const int64_t lowest = pass.step[1] < 0 ? z.reach.count - 1 : 0;
    const bool neighbors = pass.step[1] * pass.step[1] == 1;
    return {z.positions, low + z.reach.offset + lowest * z.reach.offset_step, z.reach.first + lowest, z.reach.count,
            neighbors ? most(1, z.reach.count) : 1};
  }

  // ---- forward, grad_input ----

  // Computes some rows of one slice of a result. `multiplier`: planes of the source that one result plane reads.
  void correlate(const Scratch& s, const PlanarPass& pass, const RowVectors<T>& columns, int64_t d, Range rows,
                 const S* source, int64_t size, int64_t plane, int64_t multiplier, S* result, const T* weights,
                 T start) const {
    const Region depth = region_at(pass.reach(0), d, 1, 0, pass.source[0], 1);
    const int64_t kernel = pass.kernel[2], width = pass.source[2], down = pass.step[1] < 0 ? -1 : 1;
    PlanarResults<S, T> results = {};
    const Range of = pass.elements_read({d, d + 1}, rows);
    results.source = readable(s, source, size, {plane + of.low, plane + of.high + (multiplier - 1) * p.output});
    results.columns = columns, results.weights = weights, results.start = start;
    results.result_row = pass.result[2], results.source_row = width, results.column = pass.step[2];
    results.weight_row = down * kernel * N, results.kernel_columns = kernel;
    results.blocks = s.blocks, results.ahead = p.ahead * width;
    const int64_t newest = d + pass.shift[0] + most(0, (pass.kernel[0] - 1) * pass.step[0]);
    for (; rows.low < rows.high; rows.low += results.rows) {
      const Rows r = rows_from(pass, rows.low, rows.high);
      results.rows = r.positions, results.count = 0;
      results.result = result + (d * pass.result[1] + rows.low) * pass.result[2];
      results.newest = source + plane + (newest * pass.source[1] + rows.low) * width;
      results.first = plane + (d * pass.source[1] + r.row) * width + pass.shift[2];
      for (int64_t m = 0; m < multiplier; ++m)
        for (int64_t i = 0; i < depth.reach.count; ++i)
          for (int64_t k = 0; k < r.count; k += r.together) {
            const int64_t slice = depth.reach.offset + i * depth.reach.offset_step;
            const int64_t kd = m * pass.kernel[0] + depth.reach.first + i;
            const int64_t at = m * p.output + (slice * pass.source[1] + down * k * pass.step[1]) * width;
            s.blocks[results.count++] = {at, (kd * pass.kernel[1] + r.first + down * k) * kernel * N};
          }
      correlate_blocks(r.together, results);
    }
  }

  // ---- grad_weight ----

  // Add what some rows of one slice of grad_output give to the sums of its kernel elements.
  void accumulate(const Scratch& s, int64_t d, Range rows, const S* grad, int64_t grad_plane, const S* input,
                  int64_t input_plane, T* sums) const {
    const PlanarPass& f = p.forward;
    const int64_t kernel = f.kernel[2], width = f.source[2];
    const Region depth = region_at(f.reach(0), d, 1, 0, f.source[0], 1);
    PlanarProducts<S, T> products = {};
    const Range of = f.elements_read({d, d + 1}, rows);
    products.input = readable(s, input, p.units() * p.input, {input_plane + of.low, input_plane + of.high});
    products.columns = shared.sums, products.grad = grad;
    products.grad_row = f.result[2], products.input_row = width, products.column = f.step[2];
    products.weight_row = kernel * N;
    const int64_t newest = d + f.shift[0] + most(0, (f.kernel[0] - 1) * f.step[0]);
    for (int64_t i = 0; i < depth.reach.count; ++i) {
      const int64_t slice = input_plane + (d + depth.reach.offset + i * depth.reach.offset_step) * f.source[1] * width;
      for (int64_t h = rows.low; h < rows.high; h += products.rows) {
        const Rows r = rows_from(f, h, rows.high);
        // Each slice of the kernel prefetches other memory: the first one for what the last one reads, the second one
        // for the next group.
        const bool only = f.kernel[0] == 1;
        products.input_ahead = products.grad_ahead = nullptr;
        if (p.ahead && i == 0)
          products.input_ahead = input + input_plane + (newest * f.source[1] + h + (only ? p.ahead : 0)) * width;
        if (p.ahead && (only || i == 1))
          products.grad_ahead =
              grad + grad_plane + (d * f.result[1] + h + (only ? p.ahead : rows.size())) * f.result[2];
        products.rows = r.positions, products.grad_at = grad_plane + (d * f.result[1] + h) * f.result[2];
        const int64_t first = slice + r.row * width + f.shift[2];
        for (int64_t k = 0; k < r.count; k += r.together) {
          products.input_at = first + k * f.step[1] * width;
          T* const to = sums + ((depth.reach.first + i) * f.kernel[1] + r.first + k) * kernel * N;
          accumulate_block(r.together, kernel, to, products);
        }
      }
    }
  }

  // ---- units, items, threads ----

  // The planes of a unit, a channel of an image: where they begin.
  struct Unit {
    int64_t channel, input, output;
  };
  T* bias_sums(const Scratch& s) const { return s.sums + p.multiplier * p.kernel_elements * N; }

  // A group of rows: `od` and `oh` of what has grad_output's size, `id` and `ih` of what has the input's.
  void run_rows(const Scratch& s, const Unit& u, Range od, Range oh, Range id, Range ih) const {
    const S *const x = static_cast<const S*>(t.input), *const g = static_cast<const S*>(t.grad_output);
    const S* const bias = static_cast<const S*>(t.bias);
    const int64_t inputs = p.units() * p.input, outputs = p.units() * p.multiplier * p.output;
    const int64_t *in = p.forward.source, *out = p.forward.result;
    for (int64_t d = od.low; d < od.high; ++d)
      for (int64_t m = 0; m < p.multiplier; ++m) {
        const int64_t plane = u.output + m * p.output, weights = m * p.kernel_elements * N;
        if (p.wants(CONVGRAD_GRAD_BIAS))
          add_to<T, N>(bias_sums(s) + m * N,
                       sum_elements<T, N>(g + plane + (d * out[1] + oh.low) * out[2], oh.size() * out[2]));
        if (p.wants(CONVGRAD_FORWARD))
          correlate(s, p.forward, shared.forward, d, oh, x, inputs, u.input, 1, static_cast<S*>(t.forward) + plane,
                    s.weights + weights, bias ? load_one<T>(bias + u.channel * p.multiplier + m) : T(0));
        if (p.wants(CONVGRAD_GRAD_WEIGHT)) accumulate(s, d, oh, g, plane, x, u.input, s.sums + weights);
      }
    for (int64_t d = id.low; d < id.high; ++d) {
      if (p.wants(CONVGRAD_TRANSPOSED_GRAD_BIAS))
        add_to<T, N>(bias_sums(s), sum_elements<T, N>(x + u.input + (d * in[1] + ih.low) * in[2], ih.size() * in[2]));
      if (p.wants(CONVGRAD_GRAD_INPUT))
        correlate(s, p.backward, shared.backward, d, ih, g, outputs, u.output, p.multiplier,
                  static_cast<S*>(t.grad_input) + u.input, s.weights,
                  bias && !p.wants(CONVGRAD_FORWARD) ? load_one<T>(bias + u.channel) : T(0));
    }
  }

  // `partial`: the item's sums.
  void run_unit(Scratch& s, int64_t number, T* partial) const {
    const int64_t elements = p.multiplier * p.kernel_elements;
    const Unit u = {number % p.channels, number * p.input, number * p.multiplier * p.output};
    const bool sums = p.wants(CONVGRAD_GRAD_WEIGHT);
    if (p.needs_weight()) {
      const S* const weight = static_cast<const S*>(t.weight) + u.channel * elements;
      for (int64_t k = 0; k < elements; ++k) store<T, N>(s.weights + k * N, Vec<T, N>{} + load_one<T>(weight + k));
    }
    if (sums) memset(s.sums, 0, sizeof(T) * static_cast<size_t>(p.sums() * N));
    const int64_t *in = p.forward.source, *out = p.forward.result;
    const int64_t slices = most(in[0], out[0]), groups = ceil_div(most(in[1], out[1]), p.rows);
    for (int64_t i = 0; i < slices; ++i)
      for (int64_t j = 0; j < groups; ++j)
        run_rows(s, u, share(out[0], i, slices), share(out[1], j, groups), share(in[0], i, slices),
                 share(in[1], j, groups));
    if (!sums) return;
    add_lanes<T, N>(partial + u.channel * elements, s.sums, elements);
    add_lanes<T, N>(partial + p.channels * elements + u.channel * p.biases(), bias_sums(s), p.biases());
  }

  void run_item(Scratch& s, int64_t item, T* partial) const {
    const bool sums = p.wants(CONVGRAD_GRAD_WEIGHT);
    const int64_t size = p.item_sums();
    const Range units = share(p.units(), item, p.items);
    T* const of_item = partial + item * size;
    if (sums) memset(of_item, 0, sizeof(T) * static_cast<size_t>(size));
    for (int64_t unit = units.low; unit < units.high; ++unit) run_unit(s, unit, of_item);
  }

  // ---- a plan with its scratch memory, and a call ----

  struct Plan : PlanarPlan {
    Memory memory;
    Array<int64_t> at[3];
    Array<LaneInteger<T>> masks[3];
    Array<T> weights, lane_sums, partial;
    Array<KernelBlock> blocks;
    Array<S> copy;
  };

  static Plan make_plan(const convgrad_problem& q) {
    Plan p = {};
    static_cast<PlanarPlan&>(p) = make_planar_plan(q, sizeof(S));
    const int64_t in_row = ceil_div(most(p.forward.source[2], p.forward.result[2]), N);
    for (int i = 0; i < 3; ++i) {
      p.at[i] = p.memory.shared.template add<int64_t>(in_row);
      p.masks[i] = p.memory.shared.template add<LaneInteger<T>>(in_row * p.forward.kernel[2] * N);
    }
    if (p.needs_weight()) {
      p.weights = p.memory.each.template add<T>(p.multiplier * p.kernel_elements * N);
      p.blocks = p.memory.each.template add<KernelBlock>(p.multiplier * p.forward.kernel[0] * p.forward.kernel[1]);
    }
    const int64_t planes = p.backward.most_read(p.rows) + (p.multiplier - 1) * p.output;
    p.copy = p.memory.each.template add<S>(most(p.forward.most_read(p.rows), planes) + 2 * p.margin);
    if (p.wants(CONVGRAD_GRAD_WEIGHT)) {
      p.lane_sums = p.memory.each.template add<T>(p.sums() * N);
      p.partial = p.memory.shared.template add<T>(p.items * p.item_sums());
    }
    return p;
  }

  static void run(const Plan& p, const convgrad_tensors& t, char* memory, int threads) {
    auto columns = [&](int i, const PlanarPass& pass, bool once) {
      return list_columns(pass, once, p.at[i].in(memory), p.masks[i].in(memory));
    };
    const Shared shared = {columns(0, p.forward, false), columns(1, p.backward, false), columns(2, p.forward, true)};
    const Planar call = {p, t, shared};
    T* const partial = p.partial.in(memory);
    auto scratch = [&](int64_t thread) {
      char* const at = p.memory.of_thread(memory, thread);
      return Scratch{p.weights.in(at), p.lane_sums.in(at), p.blocks.in(at), p.copy.in(at)};
    };
    run_items(
        threads, 0, nothing, p.items, scratch, [&](Scratch& s, int64_t item) { call.run_item(s, item, partial); },
        p.wants(CONVGRAD_GRAD_WEIGHT) ? p.item_sums() : 0, [&](Range of) {
          reduce_partials<T, N>(static_cast<S*>(t.grad_weight), p.channels * p.multiplier * p.kernel_elements,
                                static_cast<S*>(t.grad_bias), partial, p.item_sums(), p.items, of);
        });
  }
};

}  // namespace
