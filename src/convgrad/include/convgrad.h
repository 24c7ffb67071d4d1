// convgrad from C++: the operators of the Python package, called through PyTorch's dispatcher.
//
// Header-only; nothing to link. The operators are registered when Python imports convgrad, so that must have happened
// before the first call here; a call before it throws c10::Error and says so. With autograd, torch.compile's
// fake tensors and everything else that the dispatcher does; from any thread, with or without the GIL.
//
// Every error is a c10::Error whose what() is the message; only what ends a Python program (KeyboardInterrupt,
// SystemExit) passes through as it is.
//
// Compile with -I of what python -c "import convgrad; print(convgrad.include_path())" prints.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/convolution_backward_ops.h>
#include <ATen/ops/convolution_ops.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <c10/util/OptionalArrayRef.h>

namespace convgrad {
namespace detail {

inline c10::OperatorHandle find(const char* name) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
  TORCH_CHECK(op.has_value(), "the operator ", name,
              " is not registered: import convgrad in Python before the first call from C++");
  return *op;
}

// Call an operator. Its kernels are Python's, whose exceptions are no c10::Error; as text they read
// "Type: message\n\nAt:\n  file(line): function".
template <class Call>
auto with_c10_errors(const Call& call) {
  try {
    return call();
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& error) {
    std::string what = error.what();
    if (what.rfind("KeyboardInterrupt", 0) == 0 || what.rfind("SystemExit", 0) == 0) throw;
    what.resize(std::min(what.size(), what.rfind("\n\nAt:\n")));
    const auto colon = what.find(": ");
    if (colon < what.find_first_of(" \n")) what.erase(0, colon + 2);  // a type, which is one word
    throw c10::Error(what);
  }
}

inline constexpr auto symbolic = c10::fromIntArrayRefSlow;

}  // namespace detail

/// An N-d convolution, or with `transposed` an N-d transposed convolution; the arguments are those of at::convolution.
///
/// input [N, C_in, *in], weight [C_out, C_in / groups, *k] (transposed: [C_in, C_out / groups, *k]), bias [C_out] or
/// nothing. stride, dilation and output_padding have one entry a dimension, padding one or two (low and high of each
/// dimension in turn). Throws c10::Error for sizes that do not belong together.
inline at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                              c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation,
                              bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
  using detail::symbolic;
  static const auto op = detail::find("convgrad::convolution").typed<at::_ops::convolution::schema>();
  return detail::with_c10_errors([&] {
    return op.call(input, weight, bias, symbolic(stride), symbolic(padding), symbolic(dilation), transposed,
                   symbolic(output_padding), groups);
  });
}

/// The gradients (grad_input, grad_weight, grad_bias) of `convolution`; those that `output_mask` does not ask for are
/// undefined tensors and cost nothing. The arguments are those of at::convolution_backward.
///
/// grad_output is like the result of `convolution`; bias_sizes is {C_out} or nothing.
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
    c10::OptionalIntArrayRef bias_sizes, c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation,
    bool transposed, c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> output_mask) {
  using detail::symbolic;
  static const auto op = detail::find("convgrad::convolution_backward").typed<at::_ops::convolution_backward::schema>();
  return detail::with_c10_errors([&] {
    at::OptionalSymIntArrayRef sizes;
    if (bias_sizes.has_value()) sizes = symbolic(*bias_sizes);
    return op.call(grad_output, input, weight, sizes, symbolic(stride), symbolic(padding), symbolic(dilation),
                   transposed, symbolic(output_padding), groups, output_mask);
  });
}

/// The same without bias_sizes: a grad_bias that is asked for is [C_out].
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> output_mask) {
  const c10::OptionalIntArrayRef bias_sizes = std::nullopt;
  return convgrad::convolution_backward(  // qualified: at::convolution_backward takes the same types
      grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups,
      output_mask);
}

}  // namespace convgrad
