// The kernels for one instruction set. This file is compiled once for each, with its own -march and name.
#include <stdlib.h>

#include <new>

#include "depthwise.h"
#include "grouped.h"
#include "kept_plan.h"
#include "planar.h"

#ifndef CONVGRAD_VARIANT
#error "compile with -DCONVGRAD_VARIANT=<name>"
#endif
#define CONVGRAD_JOIN_(a, b) a##b
#define CONVGRAD_JOIN(a, b) CONVGRAD_JOIN_(a, b)

namespace {

template <class Kernels>
struct KeptPlan : convgrad_plan {
  typename Kernels::Plan plan;
};

template <class Kernels>
convgrad_plan* create_for(const char* name, const convgrad_problem& q) {
  void* memory = malloc(sizeof(KeptPlan<Kernels>));
  if (!memory) return nullptr;
  auto* kept = new (memory) KeptPlan<Kernels>{{}, Kernels::make_plan(q)};
  kept->name = name, kept->threads = q.threads, kept->bytes = kept->plan.memory.bytes(q.threads);
  kept->run = [](const convgrad_plan& p, const convgrad_tensors& t, char* memory, int threads) {
    Kernels::run(static_cast<const KeptPlan<Kernels>&>(p).plan, t, memory, threads);
  };
  return kept;
}

template <class S, class T>
convgrad_plan* create(const convgrad_problem& q) {
  constexpr int N = kVectorBytes / int(sizeof(T));
  if (q.in_per_group > 1 || q.groups == 1) return create_for<Grouped<S, T, N>>("grouped", q);
  if (Planar<S, T, N>::takes(q)) return create_for<Planar<S, T, N>>("planar", q);
  return create_for<Depthwise<S, T, N>>("packed", q);
}

}  // namespace

convgrad_plan* CONVGRAD_JOIN(convgrad_plan_create_, CONVGRAD_VARIANT)(const convgrad_problem& q) {
  switch (q.dtype) {
    case CONVGRAD_FLOAT64: return create<double, double>(q);
    case CONVGRAD_BFLOAT16: return create<bfloat16, float>(q);
    case CONVGRAD_FLOAT16: return create<float16, float>(q);
    default: return create<float, float>(q);
  }
}
