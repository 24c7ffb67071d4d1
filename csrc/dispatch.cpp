// The exported functions: plans are made by the instruction set chosen when the library is loaded, and run in scratch
// memory of the calling thread.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>

#include "vectors/kept_plan.h"

#define CONVGRAD_EXPORT extern "C" __attribute__((visibility("default")))

typedef void Make(const convgrad_problem&, void* memory);
// The functions of variant.cpp for an instruction set.
#define CONVGRAD_MAKE(set) convgrad_plan_make_##set##_float, convgrad_plan_make_##set##_double
Make CONVGRAD_MAKE(baseline), CONVGRAD_MAKE(v3), CONVGRAD_MAKE(v4), convgrad_plan_make_amx_float;
Make CONVGRAD_MAKE(winograd_baseline), CONVGRAD_MAKE(winograd_v3), CONVGRAD_MAKE(winograd_v4);
bool convgrad_amx_allowed();
typedef bool Normalize(const convgrad_norm&, int threads);
#define CONVGRAD_NORMALIZE(set) convgrad_normalize_##set##_float, convgrad_normalize_##set##_double
Normalize CONVGRAD_NORMALIZE(baseline), CONVGRAD_NORMALIZE(v3), CONVGRAD_NORMALIZE(v4);

namespace {

struct InstructionSet {
  const char* name;
  bool (*supported)();
  Make *make[2], *winograd[2];  // for float's arithmetic, for double's
  Normalize* normalize[2];
};

// The best first, but for AMX: its kernels are faster only where products are large.
const InstructionSet instruction_sets[] = {
#ifdef CONVGRAD_HAS_V4
    {"x86-64-v4",
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
     },
     {CONVGRAD_MAKE(v4)},
     {CONVGRAD_MAKE(winograd_v4)},
     {CONVGRAD_NORMALIZE(v4)}},
#endif
#ifdef CONVGRAD_HAS_V3
    {"x86-64-v3",
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
     },
     {CONVGRAD_MAKE(v3)},
     {CONVGRAD_MAKE(winograd_v3)},
     {CONVGRAD_NORMALIZE(v3)}},
#endif
    {"baseline", [] { return true; },
     {CONVGRAD_MAKE(baseline)},
     {CONVGRAD_MAKE(winograd_baseline)},
     {CONVGRAD_NORMALIZE(baseline)}},
#ifdef CONVGRAD_HAS_AMX
    {"amx", convgrad_amx_allowed,
     {convgrad_plan_make_amx_float, convgrad_plan_make_v4_double},
     {CONVGRAD_MAKE(winograd_v4)},
     {CONVGRAD_NORMALIZE(v4)}},
#endif
};

// Returns the best supported set, or the best one of this name; null if there is none.
const InstructionSet* find(const char* name = nullptr) {
  for (const InstructionSet& set : instruction_sets)
    if ((!name || strcmp(set.name, name) == 0) && set.supported()) return &set;
  return nullptr;
}

std::atomic<const InstructionSet*> selected{find()};
bool is_winograd(const char* name) { return strcmp(name, "winograd") == 0; }
const pid_t loaded_in = getpid();

// Bytes of scratch memory that a thread keeps between two calls, at most.
#if defined(CONVGRAD_KEPT_BYTES)  // tests keep none: then a sanitizer sees where a call's memory ends
constexpr int64_t kKeptBytes = CONVGRAD_KEPT_BYTES;
#else
constexpr int64_t kKeptBytes = 16 << 20;
#endif

// Scratch memory that a thread keeps between two calls.
struct Kept {
  char* memory;
  int64_t bytes;
};
thread_local Kept kept = {nullptr, 0};

// Frees it when the thread ends. A call after that, from another destructor, finds none.
struct FreeAtEnd {
  ~FreeAtEnd() {
    free(kept.memory);
    kept = {nullptr, 0};
  }
};
thread_local FreeAtEnd free_at_end;

const KeptPlan& content(const convgrad_plan* plan) { return *reinterpret_cast<const KeptPlan*>(plan); }

bool known(int32_t dtype) { return dtype >= CONVGRAD_FLOAT32 && dtype <= CONVGRAD_FLOAT16; }

// A forked child has none of its parent's OpenMP threads; starting new ones there may hang.
int threads_here(int threads) { return threads > 1 && getpid() != loaded_in ? 1 : threads; }

}  // namespace

CONVGRAD_EXPORT int32_t convgrad_abi(void) { return CONVGRAD_ABI; }

CONVGRAD_EXPORT const char* convgrad_instruction_set(void) { return selected.load()->name; }

CONVGRAD_EXPORT int32_t convgrad_has(const char* name) { return is_winograd(name) || find(name); }

CONVGRAD_EXPORT int32_t convgrad_select(const char* name) {
  const InstructionSet* const set = find(name);
  if (set) selected = set;
  return !set;
}

CONVGRAD_EXPORT int32_t convgrad_plan_make(const convgrad_problem* problem, const char* name, convgrad_plan* plan) {
  const bool winograd = is_winograd(name);
  const InstructionSet* const set = *name && !winograd ? find(name) : selected.load();
  if (!set || !known(problem->dtype)) return 1;
  (winograd ? set->winograd : set->make)[problem->dtype == CONVGRAD_FLOAT64](*problem, plan);
  return 0;
}

CONVGRAD_EXPORT const char* convgrad_plan_name(const convgrad_plan* plan) { return content(plan).name; }

CONVGRAD_EXPORT int32_t convgrad_plan_run(const convgrad_plan* made, const convgrad_tensors* tensors) {
  const KeptPlan& plan = content(made);
  // Taken away while it is used: a call from within this one, as from a signal's handler, finds none and gets its own.
  char* memory = kept.memory;
  int64_t bytes = kept.bytes;
  kept = {nullptr, 0};
  if (bytes < plan.bytes) {
    free(memory);
    bytes = plan.bytes, memory = static_cast<char*>(aligned_alloc(64, static_cast<size_t>(bytes)));
    if (!memory) return 1;
  }
  plan.run(plan, *tensors, memory, threads_here(plan.threads));
  if (bytes > kKeptBytes || kept.memory) return free(memory), 0;
  (void)&free_at_end;  // made at its first use in a thread
  kept = {memory, bytes};
  return 0;
}

CONVGRAD_EXPORT int32_t convgrad_normalize(const convgrad_norm* norm) {
  if (!known(norm->dtype)) return 1;
  return !selected.load()->normalize[norm->dtype == CONVGRAD_FLOAT64](*norm, threads_here(norm->threads));
}
