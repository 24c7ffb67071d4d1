// A depthwise convolution: the forward is ours, written by hand; the backward is convgrad's.
//
//   forward(input, filter, filterHeight, stride)   the bare kernel, for convgrad.register
//   depthwise(input, filter, stride)               the same, differentiable
//
// The padding keeps the size at stride 1: filterHeight / 2 on every side. filterHeight is 3 or 5, stride is 1 or 2.
#include <convgrad.h>

// What <torch/extension.h> has of what is used here; half of its time to compile.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/utils/pybind.h>

#ifdef WITH_CUDA
at::Tensor forward_cuda(const at::Tensor& input, const at::Tensor& filter, int64_t stride); // depthwise.cu
#endif

namespace {

template <typename scalar_t>
void planes(
    const scalar_t* input, const scalar_t* filter, scalar_t* output,
    int64_t first, int64_t last, int64_t C, int64_t H, int64_t W, int64_t k, int64_t stride) {
  const int64_t pad = k / 2, OH = (H - 1) / stride + 1, OW = (W - 1) / stride + 1;
  for (int64_t plane = first; plane < last; ++plane) { // one image's channel: [H, W] -> [OH, OW]
    const scalar_t* x = input + plane * H * W;
    const scalar_t* w = filter + (plane % C) * k * k;
    scalar_t* y = output + plane * OH * OW;
    for (int64_t oh = 0; oh < OH; ++oh) {
      for (int64_t ow = 0; ow < OW; ++ow) {
        scalar_t sum = 0;
        for (int64_t i = 0; i < k; ++i) {
          const int64_t h = oh * stride + i - pad;
          if (h < 0 || h >= H) continue;
          for (int64_t j = 0; j < k; ++j) {
            const int64_t v = ow * stride + j - pad;
            if (v >= 0 && v < W) sum += w[i * k + j] * x[h * W + v];
          }
        }
        y[oh * OW + ow] = sum;
      }
    }
  }
}

void check(const at::Tensor& input, const at::Tensor& filter, int64_t k, int64_t stride) {
  TORCH_CHECK(input.dim() == 4 && filter.dim() == 4, "input and filter have 4 dimensions");
  TORCH_CHECK(k == 3 || k == 5, "filterHeight is 3 or 5, got ", k);
  TORCH_CHECK(stride == 1 || stride == 2, "stride is 1 or 2, got ", stride);
  TORCH_CHECK(
      filter.size(0) == input.size(1) && filter.size(1) == 1 && filter.size(2) == k && filter.size(3) == k,
      "filter is [C, 1, k, k] with k = ", k, ", got ", filter.sizes());
  TORCH_CHECK(input.is_contiguous() && filter.is_contiguous(), "input and filter are contiguous");
  TORCH_CHECK(input.scalar_type() == filter.scalar_type(), "input and filter have one dtype");
  TORCH_CHECK(input.device() == filter.device(), "input and filter are on one device");
}

at::Tensor forward(const at::Tensor& input, const at::Tensor& filter, int64_t filterHeight, int64_t stride) {
  check(input, filter, filterHeight, stride);
#ifdef WITH_CUDA
  if (input.is_cuda()) return forward_cuda(input, filter, stride);
#endif
  TORCH_CHECK(input.is_cpu(), "this extension was built for the CPU only, input is on ", input.device());
  const int64_t N = input.size(0), C = input.size(1), H = input.size(2), W = input.size(3);
  auto output = at::empty({N, C, (H - 1) / stride + 1, (W - 1) / stride + 1}, input.options());
  AT_DISPATCH_FLOATING_TYPES(input.scalar_type(), "depthwise", [&] {
    const auto *x = input.const_data_ptr<scalar_t>(), *w = filter.const_data_ptr<scalar_t>();
    auto* y = output.data_ptr<scalar_t>();
    at::parallel_for(0, N * C, 1, [&](int64_t first, int64_t last) {
      planes(x, w, y, first, last, C, H, W, filterHeight, stride);
    });
  });
  return output;
}

struct Depthwise : torch::autograd::Function<Depthwise> {
  static at::Tensor forward(
      torch::autograd::AutogradContext* ctx, const at::Tensor& input, const at::Tensor& filter, int64_t stride) {
    ctx->save_for_backward({input, filter});
    ctx->saved_data["stride"] = stride;
    at::AutoDispatchBelowADInplaceOrView guard;
    return ::forward(input.contiguous(), filter.contiguous(), filter.size(2), stride);
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx, torch::autograd::variable_list grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    const auto &input = saved[0], &filter = saved[1];
    const int64_t stride = ctx->saved_data["stride"].toInt(), pad = filter.size(2) / 2;
    auto [grad_input, grad_filter, none] = convgrad::convolution_backward(
        grad_outputs[0], input, filter, {stride, stride}, {pad, pad}, {1, 1}, /*transposed=*/false, {0, 0},
        /*groups=*/input.size(1), {ctx->needs_input_grad(0), ctx->needs_input_grad(1), false});
    return {grad_input, grad_filter, at::Tensor()};
  }
};

at::Tensor depthwise(const at::Tensor& input, const at::Tensor& filter, int64_t stride) {
  return Depthwise::apply(input, filter, stride);
}

// convgrad's forward from C++, for comparison.
at::Tensor reference(const at::Tensor& input, const at::Tensor& filter, int64_t stride) {
  const int64_t pad = filter.size(2) / 2;
  return convgrad::convolution(
      input, filter, std::nullopt, {stride, stride}, {pad, pad}, {1, 1}, /*transposed=*/false, {0, 0}, input.size(1));
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("forward", &forward);
  m.def("depthwise", &depthwise);
  m.def("reference", &reference);
}
