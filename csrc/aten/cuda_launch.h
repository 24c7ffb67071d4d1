// Launches of compiled GPU kernels by the driver's cuLaunchKernel: plain bytes, written once where a kernel is
// compiled, launched by any thread afterwards. Needs no header of CUDA; the driver's functions come at run time.
#pragma once

#include <stdint.h>

// The functions of the driver's library by these names; a CUresult is an int, a handle a pointer.
struct CudaDriver {
  int (*cuLaunchKernel)(void* function, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z, uint32_t block_x,
                        uint32_t block_y, uint32_t block_z, uint32_t shared, void* stream, void** parameters,
                        void** extra);
  int (*cuCtxGetCurrent)(void** context);
  int (*cuCtxPushCurrent_v2)(void* context);
  int (*cuCtxPopCurrent_v2)(void** context);
};

constexpr int kCudaParameters = 24;

// One parameter of a kernel.
struct CudaParameter {
  int32_t slot;        // the pointer in this slot, plus `value` bytes, is passed; -1: `value` is
  uint16_t size;       // of the parameter in bytes: 1, 2, 4 or 8
  uint16_t alignment;  // of which the kernel takes the pointer to be a multiple: 1 or 16
  uint64_t value;
};

// One launch. src/convgrad/backends/triton/argument_block.py writes it.
struct CudaLaunch {
  uint64_t function;  // CUfunction
  uint64_t context;   // CUcontext, into which the function is loaded
  uint32_t grid[3], block[3], shared;
  uint32_t count;  // of parameters
  CudaParameter parameters[kCudaParameters];
};
static_assert(sizeof(CudaParameter) == 16 && sizeof(CudaLaunch) == 48 + 16 * kCudaParameters,
              "as argument_block.py packs them");

// The results of convgrad_cuda_launch beside 0 and the driver's own numbers, which are positive.
enum : int32_t { kCudaNoDriver = -1, kCudaMisaligned = -2 };

extern "C" {
// Launch by this driver from now on. The structure is read at each launch, so it must stay.
void convgrad_cuda_driver(const CudaDriver* driver);

// Launch the kernels of an entry one after the other on a stream; 0 on success. Where a pointer is not aligned as its
// kernel takes it to be, nothing is launched.
//
// slots: input, weight, grad_output, bias, forward, grad_input, grad_weight and grad_bias as in convgrad_tensors, then
// the entry's scratch buffers. They and the stream belong to the device of the launches. Any device may be the thread's
// current one, and none.
int32_t convgrad_cuda_launch(const CudaLaunch* launches, int32_t count, void* const* slots, void* stream);
}
