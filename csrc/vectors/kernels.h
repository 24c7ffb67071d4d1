// What the two loops that do all the arithmetic share (kernels_correlate.h, kernels_accumulate.h). Both see a source as
// pixels of vectors at a fixed pitch, and kernel elements as a list of offsets ("taps"); neither knows a dimension or a
// layout.
//
// Where kernel elements lie as far apart as the pixels that are computed together (the dilation is the stride), they
// share their loads: `correlate` takes three of them at once, `accumulate` a whole row. Elsewhere each multiply-add has
// a load of its own; two loads a cycle are then the same limit as two multiply-adds.
//
// What limits them: up to 9 kernel elements the bytes, from 25 on the multiply-adds. Where 16-bit storage is converted
// by the load, the bytes are half as many; a load takes one instruction more, and to round a result to bfloat16 takes
// seven. Results in rows of 7 or fewer wait for the additions of their own sums.
#pragma once

#include "vector.h"

namespace {

// A kernel element as the inner loops see it.
struct Tap {
  int64_t source, weight;  // offsets in elements
};

// For processors that few still have: fewer kernels, which compile in half the time and are slower.
#if defined(CONVGRAD_SMALL)
constexpr bool kSmall = true;
#else
constexpr bool kSmall = false;
#endif

// Most result pixels (correlate) and most kernel elements (accumulate) whose sums stay in registers at once.
constexpr int kMostSums = kSmall ? 4 : 12;
constexpr int kMostTaps = kSmall ? 4 : 10;

}  // namespace
