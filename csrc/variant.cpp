// The kernels for one instruction set. This file is compiled once for each, with its own -march and name.
#include "depthwise.h"
#include "grouped.h"
#include "planar.h"

#ifndef CONVGRAD_VARIANT
#error "compile with -DCONVGRAD_VARIANT=<name>"
#endif
#define CONVGRAD_JOIN_(a, b) a##b
#define CONVGRAD_JOIN(a, b) CONVGRAD_JOIN_(a, b)
#define CONVGRAD_NAME(function) CONVGRAD_JOIN(CONVGRAD_JOIN(function, _), CONVGRAD_VARIANT)

namespace {

// The kernels for a problem, as a null pointer of their type.
template <template <class, class, int> class Kernels, class Function>
auto by_dtype(int32_t dtype, Function&& function) {
  constexpr int floats = kVectorBytes / 4, doubles = kVectorBytes / 8;
  switch (dtype) {
    case CONVGRAD_FLOAT64: return function(static_cast<Kernels<double, double, doubles>*>(nullptr));
    case CONVGRAD_BFLOAT16: return function(static_cast<Kernels<bfloat16, float, floats>*>(nullptr));
    case CONVGRAD_FLOAT16: return function(static_cast<Kernels<float16, float, floats>*>(nullptr));
    default: return function(static_cast<Kernels<float, float, floats>*>(nullptr));
  }
}

template <class Function>
auto by_problem(const convgrad_problem& p, Function&& function) {
  if (p.in_per_group == 1 && p.groups > 1) {
    const bool planar = by_dtype<Planar>(p.dtype, [&](auto* kernels) { return kernels->takes(p); });
    return planar ? by_dtype<Planar>(p.dtype, function) : by_dtype<Depthwise>(p.dtype, function);
  }
  return by_dtype<Grouped>(p.dtype, function);
}

}  // namespace

int64_t CONVGRAD_NAME(convgrad_workspace)(const convgrad_problem& problem) {
  return by_problem(problem, [&](auto* kernels) { return kernels->workspace(problem); });
}

int32_t CONVGRAD_NAME(convgrad_convolution)(const convgrad_problem& problem, const convgrad_tensors& tensors,
                                            void* workspace, int64_t bytes) {
  return by_problem(problem, [&](auto* kernels) {
    return kernels->run(problem, tensors, static_cast<char*>(workspace), bytes);
  });
}
