// Scratch memory: where its arrays lie is worked out once, with a plan. Each begins on a cache line.
#pragma once

#include "plan.h"

namespace {

// An array in scratch memory; null where it has no elements.
template <class E>
struct Array {
  int64_t offset, bytes;
  E* in(char* memory) const { return bytes ? reinterpret_cast<E*>(memory + offset) : nullptr; }
};

struct Layout {
  int64_t bytes = 0;

  template <class E>
  Array<E> add(int64_t elements) {
    const Array<E> array = {bytes, round_up(elements * int64_t(sizeof(E)), 64)};
    bytes += array.bytes;
    return array;
  }
};

// What all threads share, and behind it what each has for itself.
struct Memory {
  Layout shared, each;
  char* of_thread(char* memory, int64_t thread) const { return memory + shared.bytes + thread * each.bytes; }
  int64_t bytes(int64_t threads) const { return most(64, shared.bytes + threads * each.bytes); }
};

}  // namespace
