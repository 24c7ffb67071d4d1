// Pointwise convolution: a kernel of one element, stride 1, no padding, any number of channels. A matrix product on the
// tensors as they lie:
//   forward:     sums over channels of the input
//   grad_input:  the same over grad_output, with the weight transposed
//   grad_weight: sums over pixels
//
// The multiply-adds limit it. With few channels on one side the memory takes nearly as long, at the same time. This
// file has what both layouts share: the plan, its memory and its threads.
#pragma once

#include "../vectors/parallel.h"
#include "../vectors/reduce.h"
#include "kernels.h"

namespace {

// S: storage, T: arithmetic, N: lanes of a vector.
template <class S, class T, int N>
class Pointwise {
 public:
  struct Plan : PointwisePlan {
    Memory memory;
    Array<T> source, other, transposed, packed, item_weight;  // each thread's, as are the columns
    Array<Column> columns;
    Array<T> weight, start, partial;

    // Returns whether sums are added up in the results: there is one segment, and nothing to convert.
    bool in_place() const { return segments == 1 && std::is_same<S, T>::value; }
  };

 protected:
  struct Sums {
    T *weight, *bias;
  };

  const Plan& p;
  const convgrad_tensors& t;
  T *const weight, *const start, *const partial;  // the weight, packed; the results' first summands; sums of segments

  Pointwise(const Plan& plan, const convgrad_tensors& tensors, char* memory)
      : p(plan),
        t(tensors),
        weight(plan.weight.in(memory)),
        start(plan.start.in(memory)),
        partial(plan.partial.in(memory)) {}

  const S* source_tensor() const { return static_cast<const S*>(p.backward ? t.grad_output : t.input); }
  const S* other_tensor() const { return static_cast<const S*>(p.backward ? t.input : t.grad_output); }
  S* results_tensor() const { return static_cast<S*>(p.backward ? t.grad_input : t.forward); }

  Sums sums_of(int64_t segment) const {
    if constexpr (std::is_same<S, T>::value)
      if (p.in_place()) return {static_cast<T*>(t.grad_weight), static_cast<T*>(t.grad_bias)};
    T* const first = partial + segment * p.sums();
    return {first, first + p.weights()};
  }

  // Returns how many vectors, of so many elements each, stay in the cache.
  static int64_t cached(int64_t elements, int64_t bytes = kTileBytes) {
    return most(1, bytes / most(1, elements * int64_t(sizeof(T))) / kPointwiseColumns) * kPointwiseColumns;
  }

  // Makes a plan with the memory that all threads share.
  static Plan make_shared_plan(const convgrad_problem& q) {
    Plan p = {};
    static_cast<PointwisePlan&>(p) = make_pointwise_plan(q, N, sizeof(T));
    Layout& shared = p.memory.shared;
    if (p.packs_before_items()) {
      const int64_t results = p.channels_last ? p.panels * N : p.results;
      p.weight = shared.template add<T>(p.groups * p.sources * results);
      p.start = shared.template add<T>(p.groups * results);
    }
    if (p.wants(CONVGRAD_GRAD_WEIGHT) && !p.in_place()) p.partial = shared.template add<T>(p.segments * p.sums());
    return p;
  }

  // The layout's own call packs panels of a group's weights, and runs an item.
  template <class Call>
  static void run_call(const Call& call, char* memory, int threads) {
    const Plan& p = call.p;
    auto pack = [&](Range all, char*) {
      for (int64_t i = all.low, group; i < all.high; i = (group + 1) * p.panels) {
        group = i / p.panels;
        call.pack_weights(group, {i - group * p.panels, least(p.panels, all.high - group * p.panels)});
      }
    };
    auto scratch = [&](int64_t thread) { return p.memory.of_thread(memory, thread); };
    auto reduce = [&](Range elements) {
      reduce_partials<T, N>(static_cast<S*>(call.t.grad_weight), p.weights(), static_cast<S*>(call.t.grad_bias),
                            call.partial, p.sums(), p.segments, elements);
    };
    run_items(
        threads, p.packs_before_items() ? p.groups * p.panels : 0, pack, p.items(), scratch,
        [&](char* own, int64_t item) { call.run_item(own, item); }, p.partial.bytes ? p.sums() : 0, reduce);
  }
};

}  // namespace
