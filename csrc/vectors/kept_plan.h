// The beginning of a convgrad_plan, as dispatch.cpp sees it; the kernels of an instruction set store their own part
// after it (variant.cpp).
#pragma once

#include <new>
#include <type_traits>

#include "../convgrad_native.h"

// Bytes of a convgrad_plan that an ordinary plan may take; `keep_in_front` (products.h) uses the others for its own.
constexpr int kOrdinaryBytes = 704;

struct KeptPlan {
  const char* name;
  int64_t bytes;  // scratch memory of all threads
  int threads;
  // With `threads` of the plan's or fewer. `memory` begins on a cache line.
  void (*run)(const KeptPlan& plan, const convgrad_tensors& tensors, char* memory, int threads);
};

// A copy of a plan in the memory of a convgrad_plan, of which it may take so many bytes.
template <class P, int kBytes>
P* keep(const P& plan, void* memory) {
  static_assert(std::is_trivially_copyable<P>::value, "a plan is copied, and never freed");
  static_assert(sizeof(P) <= kBytes, "the memory of a plan must hold it");
  return new (memory) P(plan);
}
