#include "cuda_launch.h"

#include <atomic>

#define CONVGRAD_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

std::atomic<const CudaDriver*> current_driver{nullptr};

uint64_t pointer(const CudaParameter& p, void* const* slots) {
  return reinterpret_cast<uint64_t>(slots[p.slot]) + p.value;
}

bool aligned(const CudaLaunch& launch, void* const* slots) {
  for (uint32_t i = 0; i < launch.count; i++) {
    const CudaParameter& p = launch.parameters[i];
    if (p.slot >= 0 && pointer(p, slots) & (p.alignment - 1u)) return false;
  }
  return true;
}

int start(const CudaDriver& driver, const CudaLaunch& launch, void* const* slots, void* stream) {
  uint64_t values[kCudaParameters];  // a smaller one is at the same address: a host of CUDA is little-endian
  void* parameters[kCudaParameters];
  for (uint32_t i = 0; i < launch.count; i++) {
    const CudaParameter& p = launch.parameters[i];
    values[i] = p.slot < 0 ? p.value : pointer(p, slots);
    parameters[i] = &values[i];
  }
  const uint32_t *const grid = launch.grid, *const block = launch.block;
  return driver.cuLaunchKernel(reinterpret_cast<void*>(launch.function), grid[0], grid[1], grid[2], block[0], block[1],
                               block[2], launch.shared, stream, parameters, nullptr);
}

}  // namespace

CONVGRAD_EXPORT void convgrad_cuda_driver(const CudaDriver* driver) { current_driver = driver; }

CONVGRAD_EXPORT int32_t convgrad_cuda_launch(const CudaLaunch* launches, int32_t count, void* const* slots,
                                             void* stream) {
  const CudaDriver* const driver = current_driver;
  if (!driver) return kCudaNoDriver;
  if (count == 0) return 0;
  for (int32_t i = 0; i < count; i++)
    if (!aligned(launches[i], slots)) return kCudaMisaligned;
  // A new thread has no context before its first call of CUDA's runtime, and another device's may be current.
  void *context = nullptr, *const wanted = reinterpret_cast<void*>(launches->context);
  int error = driver->cuCtxGetCurrent(&context);
  const bool other = context != wanted;
  if (!error && other) error = driver->cuCtxPushCurrent_v2(wanted);
  if (error) return error;
  for (int32_t i = 0; i < count && !error; i++) error = start(*driver, launches[i], slots, stream);
  if (other) driver->cuCtxPopCurrent_v2(&context);
  return error;
}
