// The forward of depthwise.cpp on a GPU: one thread for each output.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace {

template <typename scalar_t>
__global__ void planes(
    const scalar_t* __restrict__ input, const scalar_t* __restrict__ filter, scalar_t* __restrict__ output,
    int64_t outputs, int64_t C, int64_t H, int64_t W, int64_t k, int64_t stride) {
  const int64_t pad = k / 2, OH = (H - 1) / stride + 1, OW = (W - 1) / stride + 1;
  // 64 bits before the product: a grid of 2^24 blocks of 256 threads exceeds 32
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < outputs;
       at += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t ow = at % OW, oh = at / OW % OH, plane = at / (OW * OH);
    const scalar_t* x = input + plane * H * W;
    const scalar_t* w = filter + plane % C * k * k;
    scalar_t sum = 0;
    for (int64_t i = 0; i < k; ++i) {
      const int64_t h = oh * stride + i - pad;
      if (h < 0 || h >= H) continue;
      for (int64_t j = 0; j < k; ++j) {
        const int64_t v = ow * stride + j - pad;
        if (v >= 0 && v < W) sum += w[i * k + j] * x[h * W + v];
      }
    }
    output[at] = sum;
  }
}

} // namespace

at::Tensor forward_cuda(const at::Tensor& input, const at::Tensor& filter, int64_t stride) {
  const c10::cuda::CUDAGuard device(input.device());
  const int64_t N = input.size(0), C = input.size(1), H = input.size(2), W = input.size(3);
  auto output = at::empty({N, C, (H - 1) / stride + 1, (W - 1) / stride + 1}, input.options());
  const int64_t outputs = output.numel(), threads = 256;
  if (outputs == 0) return output;
  const int64_t blocks = std::min<int64_t>((outputs + threads - 1) / threads, 1 << 20);
  AT_DISPATCH_FLOATING_TYPES(input.scalar_type(), "depthwise_cuda", [&] {
    planes<<<blocks, threads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        input.const_data_ptr<scalar_t>(), filter.const_data_ptr<scalar_t>(), output.data_ptr<scalar_t>(),
        outputs, C, H, W, filter.size(2), stride);
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return output;
}
