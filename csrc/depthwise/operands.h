// The data of a depthwise tile: operands, packed or where they lie in the tensor, weights, and the list of
// kernel elements; and the scratch memory of a thread, which keeps them from one unit of work to the next.
#pragma once

#include "../vectors/prefetcher.h"
#include "regions.h"

namespace {

// The packed weights of a block of channels; channel -1: none yet.
struct PackedWeight {
  int64_t channel;
  bool infinite;
};

// Scratch memory of one thread.
template <class T>
struct DepthwiseScratch {
  T *input, *grad_output, *sums, *result;
  T *weights, *starts;   // all kept blocks' weights, and what their sums start from
  PackedWeight* packed;  // which blocks these are
  T *weight, *start;     // those of the block that is computed
  Tap* taps;             // accumulate's
  Listed listed;
  Prefetcher prefetcher;
  int64_t tile;  // whose operands are packed
  // Infinity times a zero of the padding is NaN: where there may be one, the sums leave the padding out.
  bool exact;
};

// S: storage, T: arithmetic, N: lanes of a vector.
template <class S, class T, int N>
struct DepthwiseOperands {
  const DepthwisePlan& p;
  const convgrad_tensors& t;

  // The tensor itself (X is then the storage type), or a packed tile of it (X is the arithmetic type).
  template <class X>
  Source<X> source(const void* tensor, const Tensor& x, const Block& b, T* scratch, const int64_t extent[3],
                   const Range r[3], bool again, bool exact) const {
    const S* from = static_cast<const S*>(tensor);
    if constexpr (std::is_same<X, S>::value)
      if (!std::is_same<S, T>::value || p.direct) return in_tensor(from, x, b);
    if constexpr (std::is_same<X, T>::value) return packed(from, x, b, scratch, extent, r, again, exact);
  }

  static Source<S> in_tensor(const S* tensor, const Tensor& x, const Block& b) {
    Source<S> s;
    s.step[2] = x.width, s.step[1] = x.size[2] * s.step[2], s.step[0] = x.size[1] * s.step[1];
    s.data = tensor + b.image * x.size[0] * s.step[0];
    s.lane = 1;
    for (int d = 0; d < 3; ++d) s.range[d] = {0, x.size[d]};
    return s;
  }

  // `again`: the scratch memory holds the same tile of another image or block, and so its borders.
  Source<T> packed(const S* tensor, const Tensor& x, const Block& b, T* scratch, const int64_t extent[3],
                   const Range r[3], bool again, bool exact) const {
    Source<T> s;
    // Rows of zeros are left out of the sums, except where they let grad_weight run over whole tiles.
    const bool skip = !p.wants(CONVGRAD_GRAD_WEIGHT) || p.by_kernel_row();
    using Pack = Packing<const S, T, N>;
    const auto zeros = again || x.padding_mode ? Pack::kNoBorders : skip ? Pack::kColumns : Pack::kColumnsAndRows;
    s.lane = tile_pixels(extent);
    Pack::pack(scratch, extent, tensor, x, b, r, p.channels_last, zeros);
    if (x.padding_mode) Pack::pack_borders(scratch, extent, tensor, x, b, r, p.channels_last);
    s.step[2] = N, s.step[1] = extent[2] * s.step[2], s.step[0] = extent[1] * s.step[1];
    s.data = scratch;
    for (int d = 0; d < 3; ++d) {
      s.range[d] = r[d], s.data -= r[d].low * s.step[d];
      if ((exact || (skip && d < 2)) && !x.padding_mode)  // with a mode, nothing outside the tensor is a zero
        s.range[d] = {most(r[d].low, 0), most(0, least(r[d].high, x.size[d]))};
    }
    return s;
  }

  // Weights, and what sums start from, [multiplier][lane].
  void pack_weight(DepthwiseScratch<T>& s, const Block& b) const {
    const int64_t kept = b.channel / p.lanes % p.kept_blocks;
    s.weight = s.weights + kept * p.weight_size(), s.start = s.starts + kept * p.multiplier * p.lanes;
    PackedWeight& packed = s.packed[kept];
    if (packed.channel == b.channel) return void(s.exact |= packed.infinite);
    const S *from = static_cast<const S*>(t.weight), *bias = static_cast<const S*>(t.bias);
    const int64_t bias_step = p.wants(CONVGRAD_FORWARD) ? p.multiplier : 1;
    const int64_t live = p.images > 1 ? p.images * p.channels : least(p.lanes, p.channels - b.channel);
    for (int64_t m = 0; m < p.multiplier; ++m) {
      T *to = s.weight + m * p.kernel_elements * p.pitch(), *start = s.start + m * p.lanes;
      // A channel's weights are packed like a plane of pixels, the same one for each image.
      const Tensor weights = {{1, 1, p.kernel_elements}, 0, m, p.multiplier};
      for (int64_t l = 0; l < p.lanes; l += N) {
        T* lanes = to + p.vector_in(p.multiplier * p.kernel_elements, l);
        if (l >= live) {  // whole vectors that are not in use
          memset(lanes, 0, sizeof(T) * static_cast<size_t>(p.kernel_elements * N));
          continue;
        }
        const S* lane[N];
        Packing<const S, T, N>::planes(from, weights, {b.channel + l, 0, live - l, N, b.channels_per_image}, lane);
        Packing<const S, T, N>::pack_planes(lanes, lane, live - l, 0, p.kernel_elements,
                                            p.direct ? 1 : p.kernel_elements, p.lanes);
      }
      for (int64_t l = 0; l < p.lanes; ++l) {
        const int64_t c = b.channel + (p.images > 1 ? l % b.channels_per_image : l);
        start[l] = bias && l < live ? load_one<T>(bias + c * bias_step + m % bias_step) : T(0);
      }
    }
    packed = {b.channel, !p.direct && !all_finite<T, N>(s.weight, p.weight_size())};
    s.exact |= packed.infinite;
  }
};

}  // namespace
