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
template <class T, int N, class S, int G, int C>
constexpr PlanarKernels<T, S> planar_kernels() {
  if constexpr (G == 1 || C < kBlockColumns)
    return {correlate_strip<T, N, S, G, C>, accumulate_strip<T, N, S, G, C>};
  else
    return {nullptr, nullptr};
}
template <class T, int N, class S, int... I>
const PlanarKernels<T, S>& planar_kernels(int64_t rows, int64_t columns, std::integer_sequence<int, I...>) {
  constexpr int M = kBlockColumns;
  static constexpr PlanarKernels<T, S> kernels[sizeof...(I)] = {planar_kernels<T, N, S, I / M + 1, I % M + 1>()...};
  return kernels[(rows - 1) * M + columns - 1];
}

}  // namespace
