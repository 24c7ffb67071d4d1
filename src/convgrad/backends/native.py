"""`native`: the compiled CPU kernels of ``csrc/`` for depthwise and small-group convolutions, through a C interface."""

from __future__ import annotations

import ctypes
import functools

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


def _group(p: ConvProblem) -> tuple[int, int]:
    """Input and output channels of a group."""
    return p.in_channels // p.groups, p.out_channels // p.groups


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
