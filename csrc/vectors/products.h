// The common part of the kernels of AMX and of Winograd's algorithm. They compute one result, as products of matrices.
// Problems with infinities and NaNs are computed anew by the ordinary kernels.
#pragma once

#include <atomic>

#include "kept_plan.h"
#include "parallel.h"

namespace {

struct ProductPlan : KeptPlan {
  int64_t images, groups, sources, results;  // channels of a group, of what results are computed from and of these
  bool channels_last, backward, sums;        // grad_input; grad_weight
  Memory memory;

  static bool takes(const convgrad_problem& q) {
    const bool one = q.outputs == CONVGRAD_FORWARD || q.outputs == CONVGRAD_GRAD_INPUT ||
                     q.outputs == CONVGRAD_GRAD_WEIGHT;
    return one && q.batch > 0;
  }
  void set(const convgrad_problem& q) {
    threads = q.threads, images = q.batch, groups = q.groups, channels_last = q.layout == CONVGRAD_CHANNELS_LAST;
    sums = q.outputs == CONVGRAD_GRAD_WEIGHT, backward = q.outputs == CONVGRAD_GRAD_INPUT;
    sources = backward ? q.out_per_group : q.in_per_group, results = backward ? q.in_per_group : q.out_per_group;
  }
};

template <class Plan>
class ProductCall {
 public:
  ProductCall(const Plan& plan, const convgrad_tensors& tensors, char* memory)
      : p(plan), t(tensors), memory_(memory) {}

 protected:
  void note(bool infinite) {
    if (infinite) infinite_.store(true, std::memory_order_relaxed);
  }

  const Plan& p;
  const convgrad_tensors& t;
  char* const memory_;
  std::atomic<bool> infinite_{false};
};

// Stores a plan, and behind it the ordinary kernels' plan, which `make` makes. That one computes anew where `Call`
// returns false: results have infinities or NaNs.
template <class Call, class Plan>
void keep_in_front(const char* name, const Plan& plan, void (*make)(const convgrad_problem&, void*),
                   const convgrad_problem& q, void* memory) {
  auto* p = keep<Plan, CONVGRAD_PLAN_BYTES - kOrdinaryBytes>(plan, memory);
  make(q, p + 1);
  p->name = name, p->bytes = most(plan.memory.bytes(q.threads), reinterpret_cast<const KeptPlan*>(p + 1)->bytes);
  p->run = [](const KeptPlan& kept, const convgrad_tensors& t, char* memory, int threads) {
    const Plan& plan = static_cast<const Plan&>(kept);
    const KeptPlan& ordinary = *reinterpret_cast<const KeptPlan*>(&plan + 1);
    if (!Call(plan, t, memory).run(threads)) ordinary.run(ordinary, t, memory, threads);
  };
}

}  // namespace
