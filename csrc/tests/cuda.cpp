// A stand-in for libcuda.so.1 on a machine without a GPU: what Triton's launcher and csrc/aten/cuda_launch.cpp need of
// it. Launches are recorded, not made. How many parameters a kernel has, and of which size, is read from its cubin, so
// neither of the two launchers is asked.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <string>
#include <vector>

#define STANDIN extern "C" __attribute__((visibility("default")))

struct Kernel {
  std::string name;
  std::vector<uint32_t> sizes;
};

// One launch; `bytes` are the parameters, each at a multiple of 8.
struct Record {
  const Kernel* function;
  void *stream, *context;
  uint32_t grid[3], block[3], shared, attributes, count;
  uint32_t sizes[32];
  uint64_t bytes[32];
};

namespace {

constexpr int kMost = 64;
Record records[kMost];
int recorded = 0, wanted = kMost, error = 0;
char only_context;  // its address is the handle
thread_local std::vector<void*> contexts;

template <class T>
T at(const char* image, uint64_t offset) {
  T value;
  memcpy(&value, image + offset, sizeof(T));
  return value;
}

// The parameters' sizes, from the attributes EIATTR_KPARAM_INFO of the section .nv.info.<name> of an ELF file.
std::vector<uint32_t> parameters(const char* image, const std::string& name) {
  std::vector<uint32_t> sizes;
  const auto table = at<uint64_t>(image, 0x28);
  const auto size = at<uint16_t>(image, 0x3a), count = at<uint16_t>(image, 0x3c), names = at<uint16_t>(image, 0x3e);
  const auto strings = at<uint64_t>(image, table + names * size + 0x18);
  for (uint64_t i = 0; i < count; i++) {
    const uint64_t header = table + i * size;
    if (image + strings + at<uint32_t>(image, header) != ".nv.info." + name) continue;
    uint64_t offset = at<uint64_t>(image, header + 0x18);
    const uint64_t end = offset + at<uint64_t>(image, header + 0x20);
    while (offset < end) {
      const auto format = at<uint8_t>(image, offset), attribute = at<uint8_t>(image, offset + 1);
      const auto length = format == 4 ? at<uint16_t>(image, offset + 2) : uint16_t(0);
      if (format == 4 && attribute == 0x17) {
        const auto ordinal = at<uint16_t>(image, offset + 8);
        if (sizes.size() <= ordinal) sizes.resize(ordinal + 1);
        sizes[ordinal] = at<uint32_t>(image, offset + 12) >> 18;
      }
      offset += 4 + length;
    }
  }
  return sizes;
}

int record(void* function, const uint32_t* grid, const uint32_t* block, uint32_t shared, void* stream,
           uint32_t attributes, void** values) {
  if (error || recorded >= wanted) return error;
  const Kernel& kernel = *static_cast<Kernel*>(function);
  Record& r = records[recorded++];
  r = {};
  r.function = &kernel, r.stream = stream, r.context = contexts.empty() ? nullptr : contexts.back();
  memcpy(r.grid, grid, sizeof r.grid), memcpy(r.block, block, sizeof r.block);
  r.shared = shared, r.attributes = attributes, r.count = static_cast<uint32_t>(kernel.sizes.size());
  for (uint32_t i = 0; i < r.count; i++) memcpy(&r.bytes[i], values[i], r.sizes[i] = kernel.sizes[i]);
  return 0;
}

}  // namespace

STANDIN int standin_records(const Record** found) { return *found = records, recorded; }
STANDIN const char* standin_name(const Kernel* kernel) { return kernel->name.c_str(); }
// Forget what was recorded, and record so many launches from now on; each of them returns this error.
STANDIN void standin_reset(int most, int code) { recorded = 0, wanted = most, error = code; }
STANDIN void standin_enter(void* context) { contexts = {context}; }

typedef int32_t Launch(const void* launches, int32_t count, void* const* slots, void* stream);
// Nanoseconds of one call of convgrad_cuda_launch.
STANDIN double standin_time(Launch* launch, const void* launches, int32_t count, void* const* slots, int rounds) {
  timespec from, to;
  clock_gettime(CLOCK_MONOTONIC, &from);
  for (int i = 0; i < rounds; i++) launch(launches, count, slots, nullptr);
  clock_gettime(CLOCK_MONOTONIC, &to);
  return (double(to.tv_sec - from.tv_sec) * 1e9 + double(to.tv_nsec - from.tv_nsec)) / rounds;
}

STANDIN int cuLaunchKernel(void* function, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z, uint32_t block_x,
                           uint32_t block_y, uint32_t block_z, uint32_t shared, void* stream, void** values, void**) {
  const uint32_t grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
  return record(function, grid, block, shared, stream, 0, values);
}

struct Config {
  uint32_t grid[3], block[3], shared;
  void *stream, *attributes;
  uint32_t count;
};
STANDIN int cuLaunchKernelEx(const Config* c, void* function, void** values, void**) {
  return record(function, c->grid, c->block, c->shared, c->stream, c->count, values);
}

STANDIN int cuModuleLoadData(void** module, const void* image) { return *module = const_cast<void*>(image), 0; }
STANDIN int cuModuleUnload(void*) { return 0; }
STANDIN int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = new Kernel{name, parameters(static_cast<const char*>(module), name)};
  return 0;
}
STANDIN int cuFuncGetAttribute(int* value, int attribute, void*) {
  constexpr int kMostThreads = 0, kRegisters = 4;
  return *value = attribute == kMostThreads ? 1024 : attribute == kRegisters ? 64 : 0, 0;
}
STANDIN int cuFuncSetAttribute(void*, int, int) { return 0; }
STANDIN int cuFuncSetCacheConfig(void*, int) { return 0; }

STANDIN int cuCtxGetCurrent(void** context) { return *context = contexts.empty() ? nullptr : contexts.back(), 0; }
STANDIN int cuCtxSetCurrent(void* context) { return standin_enter(context), 0; }
STANDIN int cuCtxPushCurrent_v2(void* context) { return contexts.push_back(context), 0; }
STANDIN int cuCtxPopCurrent_v2(void** context) {
  return *context = contexts.back(), contexts.pop_back(), 0;
}
STANDIN int cuCtxGetDevice(int* device) { return *device = 0, 0; }
STANDIN int cuCtxGetLimit(size_t* value, int) { return *value = 0, 0; }
STANDIN int cuCtxSetLimit(int, size_t) { return 0; }
STANDIN int cuInit(unsigned) { return 0; }
STANDIN int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
STANDIN int cuDeviceGet(int* device, int) { return *device = 0, 0; }
STANDIN int cuDeviceGetAttribute(int* value, int, int) { return *value = 227 * 1024, 0; }
STANDIN int cuDevicePrimaryCtxRetain(void** context, int) { return *context = &only_context, 0; }
STANDIN int cuPointerGetAttribute(void* value, int, uint64_t pointer) { return memcpy(value, &pointer, 8), 0; }
STANDIN int cuStreamIsCapturing(void*, int* capturing) { return *capturing = 0, 0; }
STANDIN int cuGetErrorString(int, const char** text) { return *text = "an error of the stand-in", 0; }
