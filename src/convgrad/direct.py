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

import inspect
import re
from ast import literal_eval
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import functional
from .backends import Backend
from .backends.aten_libraries import AtenCudnnBackend, AtenMiopenBackend, Flags
from .engine import backends, get_backend, register, use_backend
from .errors import BackendError, ShapeError
from .problem import integers

if TYPE_CHECKING:  # the names of the table, for type checkers

    def __getattr__(name: str) -> Callable[..., Any]: ...


#: Names and their arguments, in PyTorch 1.10's order. What a name computes is what it says: a convolution, or one with
#: "transpose"; its gradients ("_backward"), or one of them. The names with stride before padding are those of a small
#: extension that many copied to reach cuDNN. thnn_conv2d and slow_conv2d are one kernel: 2-D, undilated, ungrouped.
_TABLE = """
cudnn_convolution                             self weight FORM FLAGS BIAS
cudnn_convolution_backward                    self grad_output weight FORM FLAGS MASK_OF_2
cudnn_convolution_backward_input              self_size grad_output weight FORM FLAGS
cudnn_convolution_backward_weight             weight_size grad_output self FORM FLAGS
cudnn_convolution_transpose                   self weight TRANSPOSED FLAGS BIAS
cudnn_convolution_transpose_backward          self grad_output weight TRANSPOSED FLAGS MASK_OF_2
cudnn_convolution_transpose_backward_input    grad_output weight FORM FLAGS
cudnn_convolution_transpose_backward_weight   weight_size grad_output self FORM FLAGS

convolution                                   input weight STRIDE_FIRST FLAGS BIAS
convolution_backward_input                    input_size weight grad_output STRIDE_FIRST FLAGS
convolution_backward_weight                   input weight_size grad_output STRIDE_FIRST FLAGS
convolution_transpose                         input weight TRANSPOSED_STRIDE_FIRST FLAGS BIAS
convolution_transpose_backward_input          input_size weight grad_output STRIDE_FIRST FLAGS
convolution_transpose_backward_weight         input weight_size grad_output STRIDE_FIRST FLAGS

miopen_convolution|miopen_depthwise_convolution                                  self weight bias FORM FLAGS
miopen_convolution_backward|miopen_depthwise_convolution_backward                self grad_output weight FORM FLAGS MASK
miopen_convolution_backward_input|miopen_depthwise_convolution_backward_input    self_size grad_output weight FORM FLAGS
miopen_convolution_backward_weight|miopen_depthwise_convolution_backward_weight  weight_size grad_output self FORM FLAGS
miopen_convolution_transpose                  self weight bias TRANSPOSED FLAGS
miopen_convolution_transpose_backward         self grad_output weight TRANSPOSED FLAGS MASK
miopen_convolution_transpose_backward_input   grad_output weight FORM FLAGS
miopen_convolution_transpose_backward_weight  weight_size grad_output self FORM FLAGS

mkldnn_convolution                            self weight bias FORM
mkldnn_convolution_backward                   self grad_output weight FORM MASK
mkldnn_convolution_backward_input             self_size grad_output weight FORM UNREAD
mkldnn_convolution_backward_weights           weight_size grad_output self FORM DEFINED

thnn_conv2d|slow_conv2d                       self weight kernel_size bias=None stride=1 padding=0
thnn_conv2d_forward|slow_conv2d_forward       self weight kernel_size bias stride padding
thnn_conv2d_backward|slow_conv2d_backward     grad_output self weight THNN SCRATCH MASK
"""
#: What the words in capitals of a row stand for; FLAGS are the library's.
_SHORT = {
    "FORM": "padding stride dilation groups",
    "TRANSPOSED": "padding output_padding stride dilation groups",
    "STRIDE_FIRST": "stride padding dilation groups",
    "TRANSPOSED_STRIDE_FIRST": "stride padding output_padding dilation groups",
    "THNN": "kernel_size stride padding",
    "BIAS": "* bias=None",
    "MASK": "output_mask=(True,True,True)",
    "MASK_OF_2": "output_mask=(True,True)",
    "SCRATCH": "finput=None fgrad_input=None",
    "DEFINED": "bias_defined=False",
    "UNREAD": "bias_defined=False",
}
#: What a row is peculiar for, by a word of it: a sentence of the docstring.
_PECULIAR = {
    "depthwise": "Anything but a depthwise convolution is refused.",
    "conv2d": "The weight may be a matrix of C_out rows, and the operands may lack the batch dimension.",
    "conv2d_forward": "finput and fgrad_input are returned too, empty.",
    "SCRATCH": "finput and fgrad_input are not read, and output_mask may stand in their place, as in ATen today.",
    "UNREAD": "bias_defined has no bearing on the result.",
    "DEFINED": "The bias's gradient is returned too: None unless bias_defined.",
    "BIAS": "The bias may also be the third argument.",
}
#: By the last word of a name: a phrase of the docstring, and today's function; any other name is a convolution.
_GRADIENTS = {
    "backward": ("The gradients of a", "convolution_backward"),
    "input": ("The input's gradient of a", "grad_input"),
    "weight": ("The weight's gradient of a", "grad_weight"),
}
#: By the first word of a name: the library, its backend with the flags of a call, and which flags its functions take.
_LIBRARIES: dict[str, tuple[str, Callable[[Flags], Backend], tuple[str, ...]]] = {
    **dict.fromkeys(("cudnn", "convolution"), ("cuDNN", AtenCudnnBackend, Flags._fields)),
    "miopen": ("MIOpen", AtenMiopenBackend, Flags._fields[:2]),
    "mkldnn": ("oneDNN", lambda _: get_backend("aten:mkldnn"), ()),
    **dict.fromkeys(("thnn", "slow"), ("PyTorch's own kernel", lambda _: get_backend("aten:native"), ())),
}
Ints = int | Sequence[int]
_ANNOTATIONS: dict[str, Any] = {
    **dict.fromkeys(("self", "input", "weight", "grad_output"), Tensor),
    **dict.fromkeys(("self_size", "input_size", "weight_size"), Sequence[int]),
    **dict.fromkeys(Flags._fields, bool | None),
    **dict.fromkeys(("bias", "fgrad_input"), Tensor | None),
    "finput": Tensor | Sequence[bool] | None, "groups": int, "bias_defined": bool, "output_mask": Sequence[bool],
}  # fmt: skip


def _function(name: str, arguments: str) -> Callable[..., Any]:
    """Return the function that a row describes: its library is forced, its computation called."""
    library, backend_of, flag_names = _LIBRARIES[name.partition("_")[0]]
    signature = _signature(arguments, flag_names)
    bias_may_stand_third = arguments.endswith("BIAS")

    def function(*args: Any, **kwargs: Any) -> Any:
        if bias_may_stand_third and len(args) > 2 and (args[2] is None or isinstance(args[2], Tensor)):
            args, kwargs = (*args[:2], *args[3:]), dict(**kwargs, bias=args[2])
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}() {error}") from None
        bound.apply_defaults()
        given = {n.replace("self", "input"): value for n, value in bound.arguments.items()}
        flags = [given.pop(flag, None) for flag in Flags._fields]
        for operand in {"input", "grad_output", "weight"} & given.keys():
            if not isinstance(t := given[operand], Tensor):
                raise TypeError(f"convgrad.direct.{name}: expected a Tensor, but got {type(t).__name__}")
        backend = backend_of(Flags(*[None if flag is None else bool(flag) for flag in flags]))
        if backends().get(backend.name) is None:
            register(backend)  # a set of flags that was not used before
        with use_backend(backend.name):  # and in every backward of what is computed in this block
            try:
                return _computed(name, given)
            except BackendError as error:
                raise BackendError(f"convgrad.direct.{name} is forced onto {backend.summary}: {error}") from None

    made: Any = function
    made.__name__ = made.__qualname__ = name
    made.__module__, made.__signature__ = __name__, signature
    phrase, today = _GRADIENTS.get(name.rpartition("_")[2].rstrip("s"), ("A", "convolution"))
    kind, words = "convolution", {*arguments.split(), *name.split("_"), name.partition("_")[2]}
    if "transpose" in name:
        kind, today = "transposed convolution", "convolution" if name.endswith("_input") else today
    said = [f"{phrase} {kind}, by {library}: `convgrad.{today}` on this library."]
    made.__doc__ = "\n\n".join(said + [sentence for word, sentence in _PECULIAR.items() if word in words])
    return made


def _signature(arguments: str, flags: tuple[str, ...]) -> inspect.Signature:
    """Return what a row says of arguments; annotations follow from their names."""
    words = " ".join(_SHORT.get(word, word) for word in arguments.split()).replace("FLAGS", "=None ".join((*flags, "")))
    positional, _, by_name = words.partition("*")
    kinds = {inspect.Parameter.POSITIONAL_OR_KEYWORD: positional, inspect.Parameter.KEYWORD_ONLY: by_name}
    parameters = [
        inspect.Parameter(name, kind, default=literal_eval(value) if value else inspect.Parameter.empty,
                          annotation=_ANNOTATIONS.get(name, Ints))
        for kind, told in kinds.items() for name, _, value in (word.partition("=") for word in told.split())
    ]  # fmt: skip
    return inspect.Signature(parameters)


# ---- what is computed ------------------------------------------------------------------------------


def _computed(name: str, given: dict[str, Any]) -> Any:
    """Compute what a name says, of its arguments, which have their names in `convgrad.functional`."""
    if "conv2d" in name:
        return _by_kernel_size(name, given)
    size, groups = given["weight_size"] if "weight_size" in given else given["weight"].shape, given["groups"]
    if "depthwise" in name and (len(size) < 2 or size[1] != 1 or groups < 2):
        raise ShapeError(
            f"{name}: expected a depthwise convolution, a weight (groups * multiplier, 1, *k) with more than one "
            f"group, but got weight of size {list(size)} and groups={groups}"
        )
    transposed, last, defined = "transpose" in name, name.rpartition("_")[2], given.pop("bias_defined", False)
    if last == "backward":
        return _gradients(**given, transposed=transposed)
    if "input_size" in given:
        return functional.grad_input(**given, transposed=transposed)
    if last == "input":  # of a transposed one: a convolution, which says its size
        return functional.convolution(given.pop("grad_output"), **given)
    if last in ("weight", "weights"):
        result = functional.grad_weight(**given, transposed=transposed)
        return result if last == "weight" else (result, functional.grad_bias(given["grad_output"]) if defined else None)
    return functional.convolution(**given, transposed=transposed)


def _gradients(output_mask: Sequence[bool], **given: Any) -> tuple[Tensor | None, ...]:
    if len(output_mask) not in (2, 3):
        raise ShapeError(f"expected output_mask to have 2 or 3 entries, but got output_mask={list(output_mask)}")
    mask = [*map(bool, output_mask), False][:3]
    return functional.convolution_backward(**given, output_mask=mask)[: len(output_mask)]


def _by_kernel_size(name: str, given: dict[str, Any]) -> Any:
    """Compute what THNN's names say: the weight may be a matrix, the batch may be missing, scratch is not read."""
    weight, size, scratch = given["weight"], given.pop("kernel_size"), given.pop("finput", None)
    given.pop("fgrad_input", None)
    if scratch is not None and not isinstance(scratch, Tensor):
        given["output_mask"] = scratch
    kernel = integers(size, 2, "kernel_size")
    kernel = kernel * 2 if len(kernel) == 1 else kernel
    if weight.dim() == 2 and len(kernel) == 2 and prod(kernel) > 0 and weight.shape[1] % prod(kernel) == 0:
        given["weight"] = weight.reshape(weight.shape[0], -1, *kernel)
    elif weight.dim() != 4 or tuple(weight.shape[2:]) != kernel:
        raise ShapeError(
            f"{name}: expected a weight (C_out, C_in, *kernel_size) or (C_out, C_in * product of kernel_size) "
            f"with kernel_size={list(kernel)}, but got weight of size {list(weight.shape)}"
        )
    if name.endswith("_backward"):
        single = given["input"].dim() == 3
        given |= {operand: given[operand].unsqueeze(0) for operand in ("input", "grad_output") if single}
        grad_input, grad_weight, *rest = _gradients(**given)
        if single and grad_input is not None:
            grad_input = grad_input.squeeze(0)
        return (grad_input, None if grad_weight is None else grad_weight.reshape(weight.shape), *rest)
    output = functional.conv2d(**given)
    return (output, output.new_empty(0), output.new_empty(0)) if name.endswith("_forward") else output


_ROWS = re.findall(r"^(\S+) +(.+)$", _TABLE, re.MULTILINE)
_FUNCTIONS = {name: _function(name, row) for names, row in _ROWS for name in names.split("|")}
globals().update(_FUNCTIONS)
__all__ = list(_FUNCTIONS)  # pyright: ignore[reportUnsupportedDunderAll]


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
