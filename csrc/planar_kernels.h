// The loops of planar.h for each size of a block of kernel elements.
#pragma once

#include "planar_accumulate.h"
#include "planar_correlate.h"

namespace {

// The kernels for blocks of a size; null for blocks that don't fit the registers.
template <class T, class S>
struct PlanarKernels {
  void (*correlate)(const Strip<S, T>&);
  void (*accumulate)(T*, const Pairs<S, T>&);
};
template <class T, int N, class S>
const PlanarKernels<T, S>& planar_kernels(int64_t rows, int64_t columns) {
  constexpr int M = kBlockColumns;
  static constexpr auto kernels = make_all<kBlockRows * M>([](auto i) -> PlanarKernels<T, S> {
    constexpr int G = i / M + 1, C = i % M + 1;
    if constexpr (G == 1 || C < M) return {correlate_strip<T, N, S, G, C>, accumulate_strip<T, N, S, G, C>};
    return {nullptr, nullptr};
  });
  return kernels[(rows - 1) * M + columns - 1];
}

}  // namespace
