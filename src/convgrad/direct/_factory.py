"""How a row of the table becomes a function: its library is forced, its computation called, its docstring written.

A row says by which library it computes what, how it is peculiar, and what its arguments are.
"""

from __future__ import annotations

import inspect
from ast import literal_eval
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from .. import functional
from ..backends import Backend
from ..backends.aten_direct import AtenDirect
from ..backends.aten_libraries import AtenCudnnBackend, AtenMiopenBackend, Flags
from ..engine import backends, get_backend, register, use_backend
from ..errors import BackendError, ShapeError
from ..problem import ConvProblem

Ints = int | Sequence[int]
#: The arguments of a call, under their names in `convgrad.functional`.
Given = dict[str, Any]
#: What is done to the result of a call.
Change = Callable[[Any], Any]


#: A library's backend with the flags of a call, and which flags its functions take.
_LIBRARIES: dict[str, tuple[Callable[[Flags], Backend], tuple[str, ...]]] = {
    "cuDNN": (AtenCudnnBackend, Flags._fields),
    "MIOpen": (AtenMiopenBackend, Flags._fields[:2]),
    "oneDNN": (lambda _: get_backend("aten:mkldnn"), ()),
    "PyTorch's own kernel": (lambda _: get_backend("aten:native"), ()),
}
#: What the words in capitals in a row stand for; FLAGS are the library's.
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
}


def function_of(name: str, library: str, what: str, arguments: str) -> Callable[..., Any]:
    """The function that a row of the table describes: its library is forced, its computation called.

    Args:
        what: a key of `_COMPUTATIONS`, and behind each + the name of a function that checks and changes what is given,
            and may return what is then done to the result. Their docstrings become part of the function's.
    """
    computed, *peculiar = what.split("+")
    (sentence, compute, today), quirks = _COMPUTATIONS[computed], [globals()[quirk] for quirk in peculiar]
    backend_of, taken = _LIBRARIES[library]
    signature = _signature(arguments, taken)
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
        backend = backend_of(Flags(*[None if flag is None else bool(flag) for flag in flags]))
        device = _device(name, given)
        changes = [quirk(name, given) for quirk in quirks]
        with _forced(name, backend, device):
            try:
                result = compute(**given)
            except BackendError as error:
                raise BackendError(f"convgrad.direct.{name} is forced onto {backend.summary}: {error}") from None
        for change in changes:
            result = result if change is None else change(result)
        return result

    made: Any = function
    made.__name__ = made.__qualname__ = name
    made.__module__, made.__signature__ = __package__, signature
    said = [f"{sentence}, by {library}: `convgrad.{today}` on this library."]
    said += [quirk.__doc__ for quirk in quirks if quirk.__doc__]
    said += ["The bias may also be the third argument."] if bias_may_stand_third else []
    made.__doc__ = "\n\n".join(said)
    return made


def _signature(arguments: str, flags: tuple[str, ...]) -> inspect.Signature:
    """What a row says of arguments; annotations follow from their names."""
    words = " ".join(_SHORT.get(word, word) for word in arguments.split())
    kind, parameters = inspect.Parameter.POSITIONAL_OR_KEYWORD, []
    for word in words.replace("FLAGS", " ".join(f"{flag}=None" for flag in flags)).split():
        if word == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
            continue
        name, _, default = word.partition("=")
        value = literal_eval(default) if default else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name, kind, default=value, annotation=_ANNOTATIONS.get(name, Ints)))
    return inspect.Signature(parameters)


def _device(function: str, given: Given) -> torch.device:
    operands = [given[name] for name in ("input", "grad_output", "weight") if name in given]
    for t in operands:
        if not isinstance(t, Tensor):
            raise TypeError(f"convgrad.direct.{function}: expected a Tensor, but got {type(t).__name__}")
    return operands[0].device


@contextmanager
def _forced(function: str, backend: Backend, device: torch.device) -> Generator[None, None, None]:
    """Compute on one backend in this block, and in every backward of what was computed here."""
    absent = backend.absent(device) if isinstance(backend, AtenDirect) else []
    if absent:
        raise BackendError(_refusal(function, backend, absent, device))
    if backends().get(backend.name) is None:
        register(backend)  # a set of flags that is met for the first time
    with use_backend(backend.name):
        yield


def _refusal(function: str, backend: Backend, absent: list[str], device: torch.device) -> str:
    names = {"cpu": "thnn_conv2d, slow_conv2d and mkldnn_convolution run", "cuda": "thnn_conv2d and slow_conv2d run"}
    small = ConvProblem.parse("ic1iw3oc1kw3")
    able = [n for n, b in backends().items() if "[" not in n and not b.reasons_against(small, ("forward",), device)]
    return (
        f"convgrad.direct.{function} is forced onto {backend.summary}, which is not here: {'; '.join(absent)}. "
        f"Of the direct names {names.get(device.type, 'none runs')} on {device.type}; convgrad.convolution and "
        f"convgrad.convolution_backward compute the same with the best of the backends here: {', '.join(able)}"
    )


# ---- what is computed ------------------------------------------------------------------------------


def _backward(output_mask: Sequence[bool], **given: Any) -> tuple[Tensor | None, ...]:
    if len(output_mask) not in (2, 3):
        raise ShapeError(f"expected output_mask to have 2 or 3 entries, but got output_mask={list(output_mask)}")
    mask = [*map(bool, output_mask), False][:3]
    return functional.convolution_backward(**given, output_mask=mask)[: len(output_mask)]


def _transposed_grad_input(grad_output: Tensor, **given: Any) -> Tensor:
    return functional.convolution(grad_output, **given)


def _transposed_grad_weight(input: Tensor, grad_output: Tensor, **given: Any) -> Tensor:
    return functional.grad_weight(grad_output, grad_output=input, **given)


#: What is computed: in words, by which function of `Given`, and today's name in `convgrad`.
_COMPUTATIONS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "forward": ("A convolution", functional.convolution, "convolution"),
    "backward": ("The gradients of a convolution", _backward, "convolution_backward"),
    "grad_input": ("The input's gradient of a convolution", functional.grad_input, "grad_input"),
    "grad_weight": ("The weight's gradient of a convolution", functional.grad_weight, "grad_weight"),
    "transposed": ("A transposed convolution", partial(functional.convolution, transposed=True), "convolution"),
    "transposed_backward": (
        "The gradients of a transposed convolution", partial(_backward, transposed=True), "convolution_backward",
    ),
    "transposed_grad_input": (
        "The input's gradient of a transposed convolution", _transposed_grad_input, "convolution",
    ),
    "transposed_grad_weight": (
        "The weight's gradient of a transposed convolution", _transposed_grad_weight, "grad_weight",
    ),
}  # fmt: skip

# ---- quirks ----------------------------------------------------------------------------------------


def depthwise(function: str, given: Given) -> None:
    """Anything but a depthwise convolution is refused."""
    size, groups = given["weight_size"] if "weight_size" in given else given["weight"].shape, given["groups"]
    if len(size) < 2 or size[1] != 1 or groups < 2:
        raise ShapeError(
            f"{function}: expected a depthwise convolution, a weight (groups * multiplier, 1, *k) with more than one "
            f"group, but got weight of size {list(size)} and groups={groups}"
        )


def redundant_input_size(function: str, given: Given) -> Change:
    """The other arguments lead to one input_size, and another is refused."""
    size, grad_output = given.pop("input_size"), given["grad_output"]

    def checked(result: Tensor) -> Tensor:
        if tuple(result.shape) != tuple(size):
            raise ShapeError(
                f"{function}: grad_output of size {list(grad_output.shape)} belongs to an input "
                f"of size {list(result.shape)}, but got input_size={list(size)}"
            )
        return result

    return checked


def unread_bias_defined(function: str, given: Given) -> None:
    """bias_defined has no bearing on the result."""
    given.pop("bias_defined")


def and_grad_bias(function: str, given: Given) -> Change:
    """The bias's gradient is returned too: None unless bias_defined."""
    defined, grad_output = given.pop("bias_defined"), given["grad_output"]
    return lambda result: (result, functional.grad_bias(grad_output) if defined else None)


def and_scratch(function: str, given: Given) -> Change:
    """finput and fgrad_input are returned too, empty."""
    return lambda result: (result, result.new_empty(0), result.new_empty(0))


def unread_scratch(function: str, given: Given) -> None:
    """finput and fgrad_input are not read, and output_mask may stand in their place, as in ATen today."""
    finput = given.pop("finput")
    given.pop("fgrad_input")
    if finput is not None and not isinstance(finput, Tensor):
        given["output_mask"] = finput


def kernel_size(function: str, given: Given) -> Change:
    """The weight may be a matrix of C_out rows, and the operands may lack the batch dimension."""
    weight, size = given["weight"], given.pop("kernel_size")
    if size is None:
        raise TypeError(f"convgrad.direct.{function}: kernel_size is one or two numbers, got None")
    kernel = (size,) * 2 if isinstance(size, int) else tuple(size)
    kernel = kernel * 2 if len(kernel) == 1 else kernel
    if weight.dim() == 2 and len(kernel) == 2 and prod(kernel) > 0 and weight.shape[1] % prod(kernel) == 0:
        given["weight"] = weight.reshape(weight.shape[0], -1, *kernel)
    elif weight.dim() != 4 or tuple(weight.shape[2:]) != kernel:
        raise ShapeError(
            f"{function}: expected a weight (C_out, C_in, *kernel_size) or (C_out, C_in * product of kernel_size) "
            f"with kernel_size={list(kernel)}, but got weight of size {list(weight.shape)}"
        )
    single = given["input"].dim() == 3
    given.update({name: given[name].unsqueeze(0) for name in ("input", "grad_output") if single and name in given})

    def as_they_came(result: Any) -> Any:
        if isinstance(result, Tensor):
            return result.squeeze(0) if single else result
        grad_input, grad_weight, *rest = result
        if single and grad_input is not None:
            grad_input = grad_input.squeeze(0)
        return (grad_input, None if grad_weight is None else grad_weight.reshape(weight.shape), *rest)

    return as_they_came


# ---- help ------------------------------------------------------------------------------------------

_ANNOTATIONS: dict[str, Any] = {
    **dict.fromkeys(("self", "input", "weight", "grad_output"), Tensor),
    **dict.fromkeys(("self_size", "input_size", "weight_size"), Sequence[int]),
    **dict.fromkeys(Flags._fields, bool | None),
    **dict.fromkeys(("bias", "fgrad_input"), Tensor | None),
    "finput": Tensor | Sequence[bool] | None,
    "groups": int,
    "bias_defined": bool,
    "output_mask": Sequence[bool],
}
