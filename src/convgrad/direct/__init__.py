"""The old functions that call one library by name (cuDNN, MIOpen, oneDNN, THNN), with their flags and argument order.

PyTorch removed most of these functions, or hid them behind ``convolution_backward``. Here each uses only its library,
also for its derivatives of any order, and raises an error with the reasons where the library is missing.

    >>> import torch
    >>> from convgrad import direct
    >>> x = torch.randn(1, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    >>> w = torch.randn(4, 3, 3, 3, dtype=torch.float64)
    >>> torch.autograd.gradcheck(lambda x: direct.slow_conv2d(x, w, 3, None, 1, 1), x)
    True
    >>> x, w, g = torch.randn(2, 4, 6, 5), torch.randn(6, 4, 3, 3), torch.randn(2, 6, 4, 3)
    >>> gi, gw, gb = direct.mkldnn_convolution_backward(x, g, w, [0, 0], [1, 1], [1, 1], 1, [True, True, False])
    >>> gi.shape == x.shape, gw.shape == w.shape, gb
    (True, True, None)

The flags ``benchmark``, ``deterministic`` and ``allow_tf32`` hold for the call and its derivatives and change no
global. PyTorch has no function left for the gradient of the weight that takes them. As long as PyTorch's own flags
allow no more than the call's, PyTorch's backward computes it; otherwise a forward of the library in another role, with
the call's flags, more slowly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ._factory import function_of

if TYPE_CHECKING:  # the names of the table

    def __getattr__(name: str) -> Callable[..., Any]: ...


#: By library: a name, what it computes and how it is peculiar, and its arguments, in PyTorch 1.10's order. (The names
#: with stride before padding are those of a small extension that many copied to reach cuDNN.) What words in capitals
#: stand for is in `_factory`. thnn_conv2d and slow_conv2d are one kernel: 2-D, undilated, ungrouped.
_TABLE = {
    "cuDNN": """
cudnn_convolution                            forward                 self weight FORM FLAGS BIAS
cudnn_convolution_backward                   backward                self grad_output weight FORM FLAGS MASK_OF_2
cudnn_convolution_backward_input             grad_input              self_size grad_output weight FORM FLAGS
cudnn_convolution_backward_weight            grad_weight             weight_size grad_output self FORM FLAGS
cudnn_convolution_transpose                  transposed              self weight TRANSPOSED FLAGS BIAS
cudnn_convolution_transpose_backward         transposed_backward     self grad_output weight TRANSPOSED FLAGS MASK_OF_2
cudnn_convolution_transpose_backward_input   transposed_grad_input   grad_output weight FORM FLAGS
cudnn_convolution_transpose_backward_weight  transposed_grad_weight  weight_size grad_output self FORM FLAGS

convolution                            forward                 input weight STRIDE_FIRST FLAGS BIAS
convolution_backward_input             grad_input              input_size weight grad_output STRIDE_FIRST FLAGS
convolution_backward_weight            grad_weight             input weight_size grad_output STRIDE_FIRST FLAGS
convolution_transpose                  transposed              input weight TRANSPOSED_STRIDE_FIRST FLAGS BIAS
convolution_transpose_backward_input   transposed_grad_input+redundant_input_size \
                                                               input_size weight grad_output STRIDE_FIRST FLAGS
convolution_transpose_backward_weight  transposed_grad_weight  input weight_size grad_output STRIDE_FIRST FLAGS
""",
    "MIOpen": """
miopen_convolution                            forward                 self weight bias FORM FLAGS
miopen_convolution_backward                   backward                self grad_output weight FORM FLAGS MASK
miopen_convolution_backward_input             grad_input              self_size grad_output weight FORM FLAGS
miopen_convolution_backward_weight            grad_weight             weight_size grad_output self FORM FLAGS
miopen_convolution_transpose                  transposed              self weight bias TRANSPOSED FLAGS
miopen_convolution_transpose_backward         transposed_backward     self grad_output weight TRANSPOSED FLAGS MASK
miopen_convolution_transpose_backward_input   transposed_grad_input   grad_output weight FORM FLAGS
miopen_convolution_transpose_backward_weight  transposed_grad_weight  weight_size grad_output self FORM FLAGS
miopen_depthwise_convolution                  forward+depthwise       self weight bias FORM FLAGS
miopen_depthwise_convolution_backward         backward+depthwise      self grad_output weight FORM FLAGS MASK
miopen_depthwise_convolution_backward_input   grad_input+depthwise    self_size grad_output weight FORM FLAGS
miopen_depthwise_convolution_backward_weight  grad_weight+depthwise   weight_size grad_output self FORM FLAGS
""",
    "oneDNN": """
mkldnn_convolution                   forward                         self weight bias FORM
mkldnn_convolution_backward          backward                        self grad_output weight FORM MASK
mkldnn_convolution_backward_input    grad_input+unread_bias_defined  self_size grad_output weight FORM DEFINED
mkldnn_convolution_backward_weights  grad_weight+and_grad_bias       weight_size grad_output self FORM DEFINED
""",
    "PyTorch's own kernel": """
thnn_conv2d           forward+kernel_size                  self weight kernel_size bias=None stride=1 padding=0
thnn_conv2d_forward   forward+kernel_size+and_scratch      self weight kernel_size bias stride padding
thnn_conv2d_backward  backward+kernel_size+unread_scratch  grad_output self weight THNN SCRATCH MASK
slow_conv2d           forward+kernel_size                  self weight kernel_size bias=None stride=1 padding=0
slow_conv2d_forward   forward+kernel_size+and_scratch      self weight kernel_size bias stride padding
slow_conv2d_backward  backward+kernel_size+unread_scratch  grad_output self weight THNN SCRATCH MASK
""",
}

#: Every name, and its function.
_FUNCTIONS = {
    name: function_of(name, library, what, arguments)
    for library, rows in _TABLE.items()
    for name, what, arguments in (row.split(maxsplit=2) for row in rows.splitlines() if row)
}
globals().update(_FUNCTIONS)
__all__ = list(_FUNCTIONS)  # pyright: ignore[reportUnsupportedDunderAll]


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
