// Plans for the kernels of AMX, each with the ordinary kernels' plan behind it: those compute the results where an
// operand has an infinity or a NaN.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "dense.h"
#include "pointwise.h"

void convgrad_plan_make_v4_float(const convgrad_problem&, void* memory);

// Returns whether the processor has the instructions that this file is compiled for and Linux, when asked, lets the
// process use the tiles.
bool convgrad_amx_allowed() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kVbmi2 = 1u << 6, kAvx512Bf16 = 1u << 5;
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~d & (kBf16 | kTile) || ~c & kVbmi2) return false;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || ~a & kAvx512Bf16) return false;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// Makes a plan of AMX where the problem is one for it, else one of the ordinary kernels.
void convgrad_plan_make_amx_float(const convgrad_problem& q, void* memory) {
  const auto ordinary = convgrad_plan_make_v4_float;
  if (!ProductPlan::takes(q) || q.dtype != CONVGRAD_FLOAT32) return ordinary(q, memory);
  if (q.groups == 1 && is_product(q))
    return keep_in_front<AmxPointwise>("amx", make_amx_pointwise_plan(q), ordinary, q, memory);
  const AmxDensePlan dense = make_amx_dense_plan(q);
  if (dense.fits(q)) return keep_in_front<AmxDense>("amx", dense, ordinary, q, memory);
  ordinary(q, memory);
}
