// The kernels for one instruction set and one type of arithmetic, which several dtypes share. This file is compiled
// once for each pair, with its own -march and name; all at the same time, if there are processors enough.
#include "depthwise/packed.h"
#include "depthwise/planar.h"
#include "grouped/grouped.h"
#include "norm/norm.h"
#include "pointwise/channels_last.h"
#include "pointwise/contiguous.h"
#include "pointwise/strided.h"
#include "vectors/kept_plan.h"
#include "winograd/winograd.h"

#if !defined(CONVGRAD_VARIANT) || !defined(CONVGRAD_ARITHMETIC)
#error "compile with -DCONVGRAD_VARIANT=<name> and -DCONVGRAD_ARITHMETIC=<float or double>"
#endif
#define CONVGRAD_JOIN(name, variant, arithmetic) name##_##variant##_##arithmetic
#define CONVGRAD_NAMED(name, variant, arithmetic) CONVGRAD_JOIN(name, variant, arithmetic)

namespace {

template <class Kernels>
struct PlanOf : KeptPlan {
  typename Kernels::Plan plan;
};

template <class Kernels>
__attribute__((cold)) void make_for(const char* name, const convgrad_problem& q, void* memory) {
  auto run = [](const KeptPlan& p, const convgrad_tensors& t, char* memory, int threads) {
    Kernels::run(static_cast<const PlanOf<Kernels>&>(p).plan, t, memory, threads);
  };
  const auto plan = Kernels::make_plan(q);
  keep<PlanOf<Kernels>, kOrdinaryBytes>({{name, plan.memory.bytes(q.threads), q.threads, run}, plan}, memory);
}

template <class S, class T>
void make(const convgrad_problem& q, void* memory) {
  constexpr int N = kVectorBytes / int(sizeof(T));
  const bool depthwise = q.in_per_group == 1 && q.groups > 1, channels_last = q.layout == CONVGRAD_CHANNELS_LAST;
  using Contiguous = ContiguousPointwise<S, T, N>;
  using ChannelsLast = ChannelsLastPointwise<S, T, N>;
  if (!depthwise && PointwisePlan::takes(q))
    return channels_last ? make_for<ChannelsLast>("pointwise", q, memory)
                         : make_for<Contiguous>("pointwise", q, memory);
  if (!depthwise && takes_strided_pointwise(q))
    return channels_last ? make_for<StridedPointwise<ChannelsLast, S>>("strided pointwise", q, memory)
                         : make_for<StridedPointwise<Contiguous, S>>("strided pointwise", q, memory);
  if constexpr (!kSmall)
    if (depthwise && Planar<S, T, N>::takes(q)) return make_for<Planar<S, T, N>>("planar", q, memory);
  // Lanes that are channels, and images in contiguous layout, would be less than half in use where there are so few.
  const bool few = 2 * q.groups * (channels_last ? 1 : q.batch) < N;
  if (depthwise && !few) return make_for<Depthwise<S, T, N>>("packed", q, memory);
  make_for<Grouped<S, T, N>>("grouped", q, memory);
}

template <class S, class T>
bool normalize(const convgrad_norm& q, int threads) {
  constexpr int N = kVectorBytes / int(sizeof(T));
  return q.grad_output ? Norm<S, T, N, true>(q).run(threads) : Norm<S, T, N, false>(q).run(threads);
}

// `body(an element of the storage)`.
template <class T, class Body>
auto with_storage(int32_t dtype, const Body& body) {
  if constexpr (std::is_same<T, float>::value) {
    if (dtype == CONVGRAD_BFLOAT16) return body(bfloat16{});
    if (dtype == CONVGRAD_FLOAT16) return body(float16{});
  }
  return body(T{});
}

}  // namespace

void CONVGRAD_NAMED(convgrad_plan_make, CONVGRAD_VARIANT, CONVGRAD_ARITHMETIC)(const convgrad_problem& q, void* at) {
  typedef CONVGRAD_ARITHMETIC T;
  with_storage<T>(q.dtype, [&](auto element) { make<decltype(element), T>(q, at); });
}

// Makes a plan of Winograd's algorithm where the problem is one for it, else one of the ordinary kernels.
void CONVGRAD_NAMED(convgrad_plan_make_winograd, CONVGRAD_VARIANT, CONVGRAD_ARITHMETIC)(const convgrad_problem& q,
                                                                                        void* at) {
  typedef CONVGRAD_ARITHMETIC T;
  constexpr int N = kVectorBytes / int(sizeof(T));
  const auto ordinary = CONVGRAD_NAMED(convgrad_plan_make, CONVGRAD_VARIANT, CONVGRAD_ARITHMETIC);
  auto made = [&](auto* kernels, const convgrad_problem& q) {
    using Kernels = std::remove_pointer_t<decltype(kernels)>;
    if (!Kernels::takes(q)) return false;
    keep_in_front<Kernels>("winograd", Kernels::make_plan(q), ordinary, q, at);
    return true;
  };
  const convgrad_problem folded = with_slices_as_rows(q);
  if (made((Winograd<T, N, true, true>*)nullptr, q)) return;
  if (made((Winograd<T, N, false, true>*)nullptr, q)) return;
  if (made((Winograd<T, N, true, false>*)nullptr, folded)) return;
  ordinary(q, at);
}

bool CONVGRAD_NAMED(convgrad_normalize, CONVGRAD_VARIANT, CONVGRAD_ARITHMETIC)(const convgrad_norm& q, int threads) {
  typedef CONVGRAD_ARITHMETIC T;
  return with_storage<T>(q.dtype, [&](auto element) { return normalize<decltype(element), T>(q, threads); });
}
