"""What PyTorch checks of a backward call, and what it does not: the first step of ``convolution_backward``.

Of ``grad_output`` only the rank is checked, of ``bias_sizes`` nothing. convgrad's own operators check all of it before
any kernel runs; this says what a direct call of ``torch.ops.aten.convolution_backward`` risks.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ShapeError
from .call import Call, validate
from .machine import Machine
from .select import backend_of_call

__all__ = ["check_backward", "unchecked"]

#: What happens where grad_output has another shape than the output; seen with 2.13 on a CPU.
_CONSEQUENCE = {
    "Mkldnn": "oneDNN refuses it: could not create a primitive descriptor",
    "Slow": "PyTorch's own kernels trust it: they read past its end, end the process, or return a wrong result",
    "Overrideable": "on the meta device any shape is accepted",
}


def check_backward(call: Call, grad_output_shape: Sequence[int]) -> None:
    """Every check of shapes that ``convolution_backward`` makes, in its order.

    Raises:
        ShapeError: with PyTorch's own message.
    """
    validate(call)
    x, g = call.input.ndim, len(grad_output_shape)
    if x != g:
        raise ShapeError(f"Expected input and grad_output to have the same number of dimensions, but got: {x} and {g}")
    if not call.transposed and any(call.output_padding):
        got = " ".join(map(str, call.output_padding))
        raise ShapeError(f"output_padding is not supported for non-transposed convolutions; got: {got}")


def unchecked(
    call: Call,
    grad_output_shape: Sequence[int],
    bias_sizes: Sequence[int] | None = None,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
    machine: Machine | None = None,
) -> list[str]:
    """What is wrong with a backward call that PyTorch lets through, and what then happens; empty if nothing is.

    Equivalent to:
        >>> from convgrad.diagnostics.aten_rules import TensorSpec, make_call
        >>> call = make_call(TensorSpec((2, 4, 9, 9)), TensorSpec((4, 4, 3, 3)))
        >>> unchecked(call, (2, 4, 7, 7), [4])
        []
        >>> len(unchecked(call, (1, 4, 7, 7), [3]))
        2
    """
    machine = machine or Machine.here(call.input.device_type)
    backend = backend_of_call(call, machine).answer
    found: list[str] = []
    shape, wanted = tuple(grad_output_shape), call.output_shape
    if shape != wanted and not backend.endswith("Empty"):
        then = next((text for name, text in _CONSEQUENCE.items() if backend.startswith(name)), "the kernel trusts it")
        found.append(f"grad_output has shape {shape}, the output has {wanted}; PyTorch checks its rank only. {then}")
    if output_mask[2] and bias_sizes is None and backend.endswith("Empty"):
        found.append("grad_bias of an empty batch is asked for without bias_sizes: PyTorch ends the process")
    if bias_sizes is not None and tuple(bias_sizes) != (wanted[1],):
        then = "it gives grad_bias this shape" if backend.endswith("Empty") else "it is ignored"
        found.append(f"bias_sizes is {tuple(bias_sizes)}, the output has {wanted[1]} channels; {then}")
    return found
