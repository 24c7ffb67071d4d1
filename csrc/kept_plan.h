// A plan as dispatch.cpp sees it; the kernels of an instruction set put their own behind it (variant.cpp).
#pragma once

#include "convgrad_native.h"

struct convgrad_plan {
  const char* name;
  int64_t bytes;  // of scratch memory, for all threads
  int threads;
  // With `threads` of the plan's or fewer. `memory` begins on a cache line.
  void (*run)(const convgrad_plan& plan, const convgrad_tensors& tensors, char* memory, int threads);
  convgrad_plan* ordinary = nullptr;  // for what this one cannot compute; freed with it
};
