// The exported functions: they pass the call to the instruction set chosen when the library is loaded.
#include <string.h>
#include <unistd.h>

#include <atomic>

#include "convgrad_native.h"

#if defined(_WIN32)
#define CONVGRAD_EXPORT extern "C" __declspec(dllexport)
#else
#define CONVGRAD_EXPORT extern "C" __attribute__((visibility("default")))
#endif

#define CONVGRAD_DECLARE(variant)                                                   \
  int64_t convgrad_workspace_##variant(const convgrad_problem&);          \
  int32_t convgrad_convolution_##variant(const convgrad_problem&, const convgrad_tensors&, void*, int64_t)

CONVGRAD_DECLARE(baseline);
#ifdef CONVGRAD_HAS_V3
CONVGRAD_DECLARE(v3);
#endif
#ifdef CONVGRAD_HAS_V4
CONVGRAD_DECLARE(v4);
#endif

namespace {

struct InstructionSet {
  const char* name;
  bool (*supported)();
  int64_t (*workspace)(const convgrad_problem&);
  int32_t (*convolution)(const convgrad_problem&, const convgrad_tensors&, void*, int64_t);
};

// Best first.
const InstructionSet instruction_sets[] = {
#ifdef CONVGRAD_HAS_V4
    {"x86-64-v4",
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
     },
     convgrad_workspace_v4, convgrad_convolution_v4},
#endif
#ifdef CONVGRAD_HAS_V3
    {"x86-64-v3",
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
     },
     convgrad_workspace_v3, convgrad_convolution_v3},
#endif
    {"baseline", [] { return true; }, convgrad_workspace_baseline, convgrad_convolution_baseline},
};

const InstructionSet* best() {
  for (const InstructionSet& set : instruction_sets)
    if (set.supported()) return &set;
  return nullptr;
}

std::atomic<const InstructionSet*> selected{best()};
const pid_t loaded_in = getpid();

}  // namespace

CONVGRAD_EXPORT int32_t convgrad_abi(void) { return CONVGRAD_ABI; }

CONVGRAD_EXPORT const char* convgrad_instruction_set(void) { return selected.load()->name; }

CONVGRAD_EXPORT int32_t convgrad_select(const char* name) {
  for (const InstructionSet& set : instruction_sets)
    if (strcmp(set.name, name) == 0 && set.supported()) {
      selected = &set;
      return 0;
    }
  return 1;
}

CONVGRAD_EXPORT int64_t convgrad_workspace(const convgrad_problem* problem) {
  return selected.load()->workspace(*problem);
}

CONVGRAD_EXPORT int32_t convgrad_convolution(const convgrad_problem* problem, const convgrad_tensors* tensors,
                                           void* workspace, int64_t workspace_bytes) {
  if (getpid() != loaded_in && problem->threads > 1) {
    // A forked child has none of its parent's OpenMP threads; starting new ones there may hang.
    convgrad_problem alone = *problem;
    alone.threads = 1;
    return selected.load()->convolution(alone, *tensors, workspace, workspace_bytes);
  }
  return selected.load()->convolution(*problem, *tensors, workspace, workspace_bytes);
}
