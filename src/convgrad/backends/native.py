"""`native`: the compiled CPU kernels of ``csrc/`` for depthwise and small-group convolutions, through a C interface."""

from __future__ import annotations

import ctypes
import functools
from math import prod

import torch
from torch import Tensor

from ..problem import ConvProblem, Output, Slot
from . import _native_library as library
from ._native_library import pack_tensors as pack
from .base import BOTH_GRADIENTS, Backend, Kernel
from .strides import usual_strides

__all__ = ["NativeBackend", "use_instruction_set"]

#: Most input or output channels a group, where a problem is not depthwise.
MOST_A_GROUP = 16

#: Bytes of all operands and the result, beyond which no cache holds them; as in ``csrc/plan.h``.
_CACHED_BYTES = 16 << 20

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_OUTPUTS: dict[Output, int] = {"forward": 1, "grad_input": 2, "grad_weight": 4, "grad_bias": 8}
_TRANSPOSED_GRAD_BIAS = 16  # the bias of a transposed convolution is added to what the plain problem calls its input


class NativeBackend(Backend):
    """Depthwise convolutions and those with few channels a group on the CPU: every pass, dtype, kernel and stride."""

    name = "native"
    summary = "compiled CPU kernels for depthwise and small-group convolutions"
    sweeps = BOTH_GRADIENTS

    def reasons_against(self, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> list[str]:
        reasons = []
        if device.type != "cpu":
            reasons.append(f"it runs on the CPU, the tensors are on {device.type}")
        if not problem.depthwise and max(_group(problem)) > MOST_A_GROUP:
            inputs, outputs_ = _group(problem)
            reasons.append(
                f"it computes depthwise convolutions and those with at most {MOST_A_GROUP} channels a group, "
                f"here a group has {inputs} input and {outputs_} output channels"
            )
        if problem.dtype not in _DTYPES:
            reasons.append(f"it has no kernels for {problem.dtype}, only for float32, float64, bfloat16 and float16")
        if absent := library.why_absent():
            reasons.append(absent)
        return reasons

    def bind(self, problem: ConvProblem, outputs: tuple[Output, ...]) -> Kernel:
        call = _call(problem, outputs, torch.get_num_threads())
        return getattr(call, outputs[0]) if len(outputs) == 1 else call.sweep

    def workspace(self, problem: ConvProblem, outputs: tuple[Output, ...]) -> int:
        return _call(problem, outputs, torch.get_num_threads()).workspace_bytes

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return True

    def expected_speedup(self, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> float:
        """What `benchmarks/cpu.py` found, as rules."""
        if _mostly_padding(problem):
            return 0.9
        if not problem.depthwise:
            return _grouped_speedup(problem, outputs)
        return _depthwise_speedup(problem, outputs)


def _mostly_padding(p: ConvProblem) -> bool:
    """Whether nearly all of an image is padding, as where a dilation is wider than it: a tile writes the padding out,
    and may need more memory than there is.
    """
    padded = prod(n + max(low, 0) + max(high, 0) for n, (low, high) in zip(p.input_size, p.padding, strict=True))
    return padded > max(2**18, 16 * prod(p.input_size), 16 * prod(p.output_size))


def _depthwise_speedup(p: ConvProblem, outputs: tuple[Output, ...]) -> float:
    """PyTorch has a fast path for plain float32 images on the CPU, and nothing comparable for the weight gradient
    of a wide kernel, for sequences, volumes, dilation, multipliers and the other dtypes.
    """
    taps, pixels = prod(p.kernel_size), prod(p.output_size)
    one_to_one = p.dtype is torch.float32 and p.in_channels == p.out_channels
    dilated_volume = p.ndim == 3 and max(p.dilation) > 1
    if outputs == ("forward",) and p.channels_last and one_to_one and p.symmetric and not dilated_volume:
        return _channels_last_speedup(p, outputs, taps, pixels)  # at any dilation of an image, and in other volumes too
    if _off_the_fast_path(p) or ("grad_weight" in outputs and taps >= 16):
        return 3.0
    alone = "grad_input" not in outputs
    if p.channels_last:
        if "grad_weight" in outputs:
            return 0.9 if alone and pixels < 36 and torch.get_num_threads() < 4 else 1.2
        return _channels_last_speedup(p, outputs, taps, pixels)
    if "grad_weight" in outputs:
        return 0.9 if alone and 4 < pixels < 16 and torch.get_num_threads() < 4 else 1.5
    return 0.9 if _many_single_pixels(p, pixels) else 1.2


def _many_single_pixels(p: ConvProblem, pixels: int) -> bool:
    """Whether each thread has tens of thousands of images of next to nothing, one a channel: PyTorch's fixed cost of a
    call is spread over all of them, what ours sets up for each is not.
    """
    return pixels < 4 and p.batch * p.in_channels >= 20_000 * torch.get_num_threads()


def _channels_last_speedup(p: ConvProblem, outputs: tuple[Output, ...], taps: int, pixels: int) -> float:
    """Forward and grad_input in channels_last, where PyTorch's kernels are near the memory's speed for large images and
    small kernels, and faster than ours on what a cache holds; ours are better at bringing memory in.
    """
    if taps > 100:
        return 1.2
    if p.ndim != 2 or max(p.stride) > 1 or max(p.dilation) > 1 or p.batch * p.in_channels * pixels < 500_000:
        return 0.9
    forward, in_memory = outputs == ("forward",), p.least_bytes > _CACHED_BYTES
    if pixels <= 1000 and taps <= 9:
        gains = pixels <= 400 or in_memory or torch.get_num_threads() > 1
    elif pixels <= 1000:
        gains = taps >= 49 or pixels > (60 if forward else 200)
    elif forward:
        gains = taps > 9
    else:
        gains = pixels <= 5000 and (in_memory or taps >= 49)
    return 1.2 if gains else 0.9


def _group(p: ConvProblem) -> tuple[int, int]:
    """Input and output channels of a group."""
    return p.in_channels // p.groups, p.out_channels // p.groups


def _grouped_speedup(p: ConvProblem, outputs: tuple[Output, ...]) -> float:
    """What `benchmarks/cpu.py --groups` found: PyTorch is fast for float32 where a group has a multiple of 8 input and
    of 8 output channels, and an image is small or there is a stride.
    """
    strided = max(p.stride) > 1
    if p.groups == 1:
        return 0.9  # dense: PyTorch's matrix products are not slow
    if p.dtype is not torch.float32 or any(channels % 8 for channels in _group(p)):
        return 1.5
    if max(p.dilation) > 1 and "grad_weight" in outputs and not strided:
        return 2.0
    if strided:
        return 1.2 if not p.channels_last and torch.get_num_threads() >= 4 else 0.9
    return 1.1 if prod(p.output_size) >= 700 else 0.9


def _off_the_fast_path(p: ConvProblem) -> bool:
    """Whether PyTorch has no fast CPU kernels for any pass of this depthwise problem."""
    fast = (
        p.dtype is torch.float32
        and p.ndim == 2
        and p.in_channels == p.out_channels
        and all(d == 1 for d in p.dilation)
        and p.symmetric
    )
    return not fast


class _Call:
    """Everything about a call that does not change from one to the next; its methods are what a plan keeps."""

    def __init__(self, problem: ConvProblem, outputs: tuple[Output, ...], threads: int) -> None:
        loaded = library.load()
        if loaded is None:
            raise RuntimeError(library.why_absent())
        self._filled = _fill(problem, outputs, threads)  # kept: the address points to it
        self._address = ctypes.addressof(self._filled)
        self._function = loaded.convgrad_convolution
        self.workspace_bytes: int = loaded.convgrad_workspace(self._filled)
        self._results = [_result(problem, output) for output in outputs]
        #: Where the results' addresses go in `pack_tensors`: one entry a result of the library.
        self._places = [outputs.index(output) if output in outputs else None for output in _OUTPUTS]

    def forward(self, a: Tensor, b: Tensor, bias: Tensor | None = None, workspace: Tensor | None = None) -> Tensor:
        result = a.new_empty_strided(*self._results[0])
        start = 0 if bias is None else bias.data_ptr()
        self._run(pack(a.data_ptr(), b.data_ptr(), 0, start, result.data_ptr(), 0, 0, 0), workspace)
        return result

    def grad_input(self, a: Tensor, b: Tensor, bias: Tensor | None = None, workspace: Tensor | None = None) -> Tensor:
        result = a.new_empty_strided(*self._results[0])
        start = 0 if bias is None else bias.data_ptr()
        self._run(pack(0, b.data_ptr(), a.data_ptr(), start, 0, result.data_ptr(), 0, 0), workspace)
        return result

    def grad_weight(self, a: Tensor, b: Tensor, bias: None = None, workspace: Tensor | None = None) -> Tensor:
        result = a.new_empty_strided(*self._results[0])
        self._run(pack(b.data_ptr(), 0, a.data_ptr(), 0, 0, 0, result.data_ptr(), 0), workspace)
        return result

    def sweep(
        self, grad_output: Tensor, input: Tensor, weight: Tensor, workspace: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        results = tuple([weight.new_empty_strided(*like) for like in self._results])
        found = [0 if place is None else results[place].data_ptr() for place in self._places]
        self._run(pack(input.data_ptr(), weight.data_ptr(), grad_output.data_ptr(), 0, *found), workspace)
        return results

    def _run(self, tensors: bytes, workspace: Tensor | None) -> None:
        if workspace is None:
            workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device="cpu")
        if self._function(self._address, tensors, workspace.data_ptr(), workspace.numel()):
            raise ValueError(
                f"the workspace must have {self.workspace_bytes} bytes (Backend.workspace), got {workspace.numel()}"
            )


def use_instruction_set(name: str) -> None:
    """Run the kernels of another instruction set from now on, in the whole process; for tests and benchmarks.

    Raises:
        ValueError: this build or this processor does not have it.
    """
    library.select(name)
    _call.cache_clear()


_call = functools.lru_cache(maxsize=1024)(_Call)


def _fill(problem: ConvProblem, outputs: tuple[Output, ...], threads: int) -> library.Problem:
    def three(values: tuple[int, ...], missing: int) -> tuple[int, ...]:
        return (missing,) * (3 - len(values)) + values

    filled = library.Problem()
    filled.batch, filled.groups = problem.batch, problem.groups
    filled.in_per_group = problem.in_channels // problem.groups
    filled.out_per_group = problem.out_channels // problem.groups
    filled.input[:] = three(problem.input_size, 1)
    filled.kernel[:] = three(problem.kernel_size, 1)
    filled.stride[:] = three(problem.stride, 1)
    filled.padding[:] = three(tuple(low for low, _ in problem.padding), 0)
    filled.dilation[:] = three(problem.dilation, 1)
    filled.output[:] = three(problem.output_size, 1)
    filled.layout = int(problem.channels_last)
    filled.dtype = _DTYPES[problem.dtype]
    filled.outputs = sum(_OUTPUTS[output] for output in outputs)
    if "grad_bias" in outputs and problem.transposed:
        filled.outputs += _TRANSPOSED_GRAD_BIAS - _OUTPUTS["grad_bias"]
    filled.threads = threads
    return filled


def _result(problem: ConvProblem, output: Output) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides."""
    if output == "grad_bias":
        return (problem.shape_of(problem.bias_slot)[1],), (1,)
    slots: dict[str, Slot] = {"forward": "grad_output", "grad_input": "input", "grad_weight": "weight"}
    shape = problem.shape_of(slots[output])
    return shape, usual_strides(shape, problem.channels_last)
