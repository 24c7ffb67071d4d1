// Pointwise convolution with a stride: a few of the input's positions take part. They are copied side by side, or
// spread out where they are the results; in between, the kernels of stride 1 compute.
#pragma once

#include "../vectors/parallel.h"
#include "plan.h"

namespace {

// Returns the problem of stride 1 for the positions that take part.
inline convgrad_problem without_stride(convgrad_problem q) {
  for (int d = 0; d < 3; ++d) q.input[d] = q.output[d], q.stride[d] = 1;
  return q;
}
// Small groups are those of grouped/grouped.h, whose lanes are pixels.
inline bool takes_strided_pointwise(const convgrad_problem& q) {
  bool fits = most(q.in_per_group, q.out_per_group) > (q.layout == CONVGRAD_CHANNELS_LAST ? 16 : 31);
  fits = fits && !(q.outputs & CONVGRAD_TRANSPOSED_GRAD_BIAS);  // the sum of all positions
  for (int d = 0; d < 3; ++d) fits = fits && (q.output[d] - 1) * q.stride[d] < q.input[d];
  return fits && PointwisePlan::takes(without_stride(q));
}

// S: storage, Kernels: ContiguousPointwise or ChannelsLastPointwise.
template <class Kernels, class S>
class StridedPointwise {
 public:
  struct Plan {
    typename Kernels::Plan plan;
    Memory memory;  // shared memory alone
    Array<S> input, grad_input;
    Array<char> own;  // memory of the kernels of stride 1
    int64_t images, channels, size[3], taken[3], stride[3];
    bool channels_last;

    int64_t width() const { return channels_last ? channels : 1; }  // elements of a position
  };

  static Plan make_plan(const convgrad_problem& q) {
    Plan p = {};
    p.plan = Kernels::make_plan(without_stride(q));
    p.images = q.batch, p.channels = q.groups * q.in_per_group, p.channels_last = q.layout == CONVGRAD_CHANNELS_LAST;
    int64_t elements = p.images * p.channels;
    for (int d = 0; d < 3; ++d) {
      p.size[d] = q.input[d], p.taken[d] = q.output[d], p.stride[d] = q.stride[d];
      elements *= p.taken[d];
    }
    if (p.plan.needs_input()) p.input = p.memory.shared.template add<S>(elements);
    if (p.plan.wants(CONVGRAD_GRAD_INPUT)) p.grad_input = p.memory.shared.template add<S>(elements);
    p.own = p.memory.shared.template add<char>(p.plan.memory.bytes(q.threads));
    return p;
  }

  static void run(const Plan& p, const convgrad_tensors& t, char* memory, int threads) {
    convgrad_tensors taken = t;
    if (p.input.bytes) taken.input = p.input.in(memory), collect(p, t, p.input.in(memory), threads);
    if (p.grad_input.bytes) taken.grad_input = p.grad_input.in(memory);
    Kernels::run(p.plan, taken, p.own.in(memory), threads);
    if (p.grad_input.bytes) spread(p, t, p.grad_input.in(memory), threads);
  }

 private:
  // `body(plane, slice, row)` for all rows of slices of so many. A plane is an image, or a channel of one; a position
  // in it all channels, or one.
  template <class Body>
  static void each_row(const Plan& p, int64_t slices, int64_t rows, int threads, const Body& body) {
    const int64_t all = p.images * (p.channels_last ? 1 : p.channels) * slices * rows;
    run_items(threads, threads, [&](int64_t item) {
      const Range some = share(all, item, threads);
      for (int64_t i = some.low; i < some.high; ++i) body(i / rows / slices, i / rows % slices, i % rows);
    });
  }
  // Positions so far apart; from the first again and again where `from_step` is 0.
  static void copy(S* to, int64_t to_step, const S* from, int64_t from_step, int64_t positions, int64_t width) {
    for (int64_t i = 0; i < positions; ++i, to += to_step, from += from_step)
      width == 1 ? void(*to = *from) : void(memcpy(to, from, sizeof(S) * static_cast<size_t>(width)));
  }
  static int64_t row_of(const int64_t (&size)[3], int64_t plane, int64_t slice, int64_t row) {
    return ((plane * size[0] + slice) * size[1] + row) * size[2];
  }

  static void collect(const Plan& p, const convgrad_tensors& t, S* taken, int threads) {
    const S* const input = static_cast<const S*>(t.input);
    const int64_t width = p.width();
    each_row(p, p.taken[0], p.taken[1], threads, [&](int64_t plane, int64_t z, int64_t y) {
      const S* const from = input + row_of(p.size, plane, z * p.stride[0], y * p.stride[1]) * width;
      copy(taken + row_of(p.taken, plane, z, y) * width, width, from, p.stride[2] * width, p.taken[2], width);
    });
  }

  // All other positions get the bias only. Of each block of rows, one takes part.
  static void spread(const Plan& p, const convgrad_tensors& t, const S* taken, int threads) {
    S* const grad_input = static_cast<S*>(t.grad_input);
    const S* const bias = static_cast<const S*>(t.bias);
    const int64_t width = p.width(), step = p.stride[1];
    each_row(p, p.size[0], ceil_div(p.size[1], step), threads, [&](int64_t plane, int64_t z, int64_t y) {
      const int64_t positions = least(step, p.size[1] - y * step) * p.size[2];
      S* const to = grad_input + row_of(p.size, plane, z, y * step) * width;
      if (bias)
        copy(to, width, bias + (p.channels_last ? 0 : plane % p.channels), 0, positions, width);
      else
        memset(to, 0, sizeof(S) * static_cast<size_t>(positions * width));
      if (z % p.stride[0] || z / p.stride[0] >= p.taken[0] || y >= p.taken[1]) return;
      const S* const from = taken + row_of(p.taken, plane, z / p.stride[0], y) * width;
      copy(to, p.stride[2] * width, from, width, p.taken[2], width);
    });
  }
};

}  // namespace
