"""The validation of gradients and of operands: every size, dtype, device and layout, before any backend.

With `shapes`, this is all of it; the same in eager, fake and meta mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ..errors import DtypeError, UnsupportedError
from .problem import RESULT, ConvProblem, Output, passes_of
from .shapes import Geometry, Shape, channels_of_output, convolution_shape, given, require


def check_backward(
    grad_shape: Shape,
    input_shape: Shape,
    weight_shape: Shape,
    bias_sizes: Shape | None,
    g: Geometry,
    output_mask: Sequence[bool] = (True, True, True),
    *,
    as_onednn: bool = False,
) -> None:
    """Check the operands of the gradients: every size of grad_output, and bias_sizes (as `convolution_shape`)."""
    require(len(output_mask) == 3, "expected output_mask to have 3 entries, but got {}", tuple(output_mask))
    check_output_padding(g.transposed, g.output_padding)
    expected = convolution_shape(input_shape, weight_shape, None, g, as_onednn=as_onednn)
    require(
        len(grad_shape) == len(input_shape),
        "Expected input and grad_output to have the same number of dimensions, but got: {} and {}",
        len(input_shape), len(grad_shape),
    )  # fmt: skip
    for i, (got, want) in enumerate(zip(grad_shape, expected, strict=True)):
        if i == 1 and isinstance(want, int) and want == 0 and got == weight_shape[0]:
            continue  # the output of an input without channels: both spellings of its gradient are accepted
        require(
            got == want,
            "Given {}={}, weight of size {}, expected grad_output to have the shape of the output {}, but got "
            "grad_output of size {}",
            *given(weight_shape, g), expected, tuple(grad_shape),
        )  # fmt: skip
    if bias_sizes is not None and len(bias_sizes) > 0:
        channels = channels_of_output(weight_shape, g.transposed, g.groups)
        require(
            len(bias_sizes) == 1 and bias_sizes[0] == channels,
            "Given {}={}, weight of size {}, expected bias_sizes to be [{}], but got bias_sizes={}",
            *given(weight_shape, g), channels, tuple(bias_sizes),
        )  # fmt: skip


def check_output_padding(transposed: bool, output_padding: Sequence[int]) -> None:
    """Check that a plain convolution has none: PyTorch computes its output without, and refuses its gradients."""
    for n in output_padding:
        said = "output_padding is not supported for non-transposed convolutions; got: {}"
        require(transposed or n == 0, said, " ".join(map(str, output_padding)))


# ---- dtypes, devices, layouts --------------------------------------------------------------------


def check_operands(first: tuple[str, Tensor], *others: tuple[str, Tensor | None]) -> None:
    """Check that all operands are dense, of one dtype that PyTorch convolves, and on one device."""
    name, tensor = first
    dtype = tensor.dtype
    if dtype is torch.bool or (dtype.is_floating_point and dtype.itemsize == 1):
        raise UnsupportedError(f"\"convolution\" not implemented for '{str(dtype)[len('torch.') :].capitalize()}'")
    for label, t in (first, *others):
        if t is None:
            continue
        if t.layout is not torch.strided:
            way = ".to_dense()" if t.is_mkldnn or t.is_sparse else "to_padded_tensor or to_dense"
            raise DtypeError(f"Expected {label} to be a dense tensor, but got layout {t.layout}; call {way} first")
        if t.dtype != dtype:
            raise DtypeError(
                f"{name.capitalize()} type ({tensor.type()}) and {label} type ({t.type()}) should be the same"
                + _CUSTOM_BACKWARD * (name == "grad_output")
            )
        if t.device != tensor.device:
            raise DtypeError(
                "Expected all tensors to be on the same device, "
                f"but found {name} on {tensor.device} and {label} on {t.device}"
            )


_CUSTOM_BACKWARD = (
    "; in an autograd.Function of your own, decorate forward and backward with torch.amp.custom_fwd and custom_bwd, "
    "so that the backward runs under the forward's autocast"
)


def check_memory(problem: ConvProblem, outputs: Sequence[Output], operands: Sequence[Tensor | None]) -> None:
    """Check that results and dense copies of operands fit into free memory: else the system ends the process."""
    if problem.least_bytes < _LARGE:
        return
    size = problem.dtype.itemsize
    needed = size * sum(prod(problem.shape_of(RESULT[p])) for p in passes_of(outputs))
    for t in operands:
        if t is not None and t.untyped_storage().nbytes() < (dense := t.numel() * size):
            needed += dense
    if needed >= _LARGE and needed > (free := _free_memory()):
        raise UnsupportedError(
            f"{'+'.join(outputs)} of {problem} needs {needed / 1e9:.1f} GB for its results and for dense "
            f"copies of expanded operands, and {free / 1e9:.1f} GB are free"
        )


#: Bytes below which free memory is not asked for.
_LARGE = 1 << 30
#: Where Linux says what the control group of a container may have.
_GROUP = Path("/sys/fs/cgroup")


def _free_memory() -> int:
    """Bytes that this process may still get, swap included; where the system does not say, all that one can address."""
    free = 1 << 47
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            kib = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
        free = (kib["MemAvailable"] + kib["SwapFree"]) << 10
        most, now, stat = ((_GROUP / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
        kinds = dict(line.split() for line in stat.splitlines())
        cached = int(kinds["active_file"]) + int(kinds["inactive_file"])  # freed on demand
        free = min(free, int(most) - int(now) + cached)
    except (OSError, KeyError, ValueError):  # another system, or a group without a limit ("max")
        pass
    return free


def refuse_nested(*tensors: object) -> None:
    """Refuse nested tensors that have no shape to look at; jagged ones are subclasses, which PyTorch computes."""
    if any(isinstance(t, Tensor) and t.is_nested and t.layout is torch.strided for t in tensors):
        raise UnsupportedError(
            "a convolution of a nested tensor: only dense ones are computed here; "
            "torch.nested.to_padded_tensor(x, 0.0) makes it dense"
        )
