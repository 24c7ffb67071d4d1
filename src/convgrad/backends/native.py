"""`native`: the compiled CPU kernels of ``csrc/`` for depthwise convolutions, through a plain C interface."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..problem import ConvProblem, Output, Pass, Slot
from . import _native_library as library
from .base import Backend

__all__ = ["NativeBackend", "use_instruction_set"]

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_OUTPUTS: dict[Output, int] = {"forward": 1, "grad_input": 2, "grad_weight": 4, "grad_bias": 8}


class NativeBackend(Backend):
    """Depthwise convolutions on the CPU, every pass, dtype, kernel, stride, dilation, padding and multiplier."""

    name = "native"
    summary = "compiled CPU kernels for depthwise convolutions"
    sweeps = (
        ("grad_input", "grad_weight"),
        ("grad_input", "grad_weight", "grad_bias"),
        ("forward", "grad_weight"),
    )

    def reasons_against(self, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> list[str]:
        reasons = []
        if device.type != "cpu":
            reasons.append(f"it runs on the CPU, the tensors are on {device.type}")
        if not problem.depthwise:
            reasons.append("it computes depthwise convolutions only (in_channels == groups > 1)")
        if problem.dtype not in _DTYPES:
            reasons.append(f"it has no kernels for {problem.dtype}, only for float32, float64, bfloat16 and float16")
        if "grad_bias" in outputs and problem.transposed:
            reasons.append("it sums the bias gradient of plain convolutions only")
        if absent := library.why_absent():
            reasons.append(absent)
        return reasons

    def run(
        self,
        problem: ConvProblem,
        pass_: Pass,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None = None,
        workspace: Tensor | None = None,
    ) -> Tensor:
        call = _call(problem, (pass_,), torch.get_num_threads())
        if pass_ == "forward":
            return call(workspace, input=a, weight=b, bias=bias)[0]
        if pass_ == "grad_input":
            return call(workspace, grad_output=a, weight=b, bias=bias)[0]
        return call(workspace, grad_output=a, input=b)[0]

    def sweep(
        self,
        problem: ConvProblem,
        outputs: tuple[Output, ...],
        grad_output: Tensor,
        input: Tensor,
        weight: Tensor,
        workspace: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        call = _call(problem, outputs, torch.get_num_threads())
        return call(workspace, input=input, weight=weight, grad_output=grad_output)

    def workspace(self, problem: ConvProblem, outputs: tuple[Output, ...]) -> int:
        return _call(problem, outputs, torch.get_num_threads()).workspace_bytes

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return True

    def expected_speedup(self, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> float:
        """What `benchmarks/cpu.py` found, as a rule: PyTorch's CPU convolution has a fast path for plain float32
        images, and nothing comparable for the weight gradient of a wide kernel, for sequences, volumes, dilation,
        multipliers and the other dtypes.
        """
        one_to_one = problem.dtype is torch.float32 and problem.in_channels == problem.out_channels
        if outputs == ("forward",) and problem.channels_last and one_to_one:
            return 1.2 if prod(problem.kernel_size) > 100 else 0.9  # at any dilation, and in volumes too
        if _off_the_fast_path(problem):
            return 3.0
        wide = prod(problem.kernel_size) >= 16
        both = "grad_weight" in outputs and "grad_input" in outputs
        small = prod(problem.output_size) < 256
        if problem.channels_last:
            # PyTorch's channels_last kernels are as fast as memory: only the weight gradient is worth a change.
            if "grad_weight" in outputs:
                return 3.0 if wide else 1.2
            return 1.2 if prod(problem.kernel_size) > 100 else 0.9
        if "grad_weight" in outputs:
            if wide:
                return 3.0
            tiny = prod(problem.output_size) < 100
            return 1.5 if not small else 1.1 if both and not tiny else 0.9
        return 0.7 if small and outputs == ("forward",) else 1.2


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


@dataclass(frozen=True)
class _Call:
    """Everything about a call that does not change from one to the next."""

    problem: library.Problem
    address: int
    function: ctypes._NamedFuncPointer
    workspace_bytes: int
    #: (name in the C struct, shape, memory format) of each result
    results: tuple[tuple[str, tuple[int, ...], torch.memory_format], ...]
    dtype: torch.dtype

    def __call__(
        self,
        workspace: Tensor | None,
        input: Tensor | None = None,
        weight: Tensor | None = None,
        grad_output: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        results = tuple(torch.empty(shape, dtype=self.dtype, memory_format=layout) for _, shape, layout in self.results)
        tensors = library.Tensors(
            None if input is None else input.data_ptr(),
            None if weight is None else weight.data_ptr(),
            None if grad_output is None else grad_output.data_ptr(),
            None if bias is None else bias.data_ptr(),
        )
        for (name, _, _), result in zip(self.results, results, strict=True):
            setattr(tensors, name, result.data_ptr())
        if workspace is None:
            workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8)
        failed = self.function(self.address, ctypes.addressof(tensors), workspace.data_ptr(), workspace.numel())
        if failed:
            raise ValueError(
                f"the workspace must have {self.workspace_bytes} bytes (Backend.workspace), got {workspace.numel()}"
            )
        return results


def use_instruction_set(name: str) -> None:
    """Run the kernels of another instruction set from now on, in the whole process; for tests and benchmarks.

    Raises:
        ValueError: this build or this processor does not have it.
    """
    library.select(name)
    _call.cache_clear()


@functools.lru_cache(maxsize=1024)
def _call(problem: ConvProblem, outputs: tuple[Output, ...], threads: int) -> _Call:
    loaded = library.load()
    if loaded is None:
        raise RuntimeError(library.why_absent())
    filled = _fill(problem, outputs, threads)
    return _Call(
        problem=filled,
        address=ctypes.addressof(filled),
        function=loaded.convgrad_depthwise,
        workspace_bytes=loaded.convgrad_depthwise_workspace(filled),
        results=tuple(_result(problem, output) for output in outputs),
        dtype=problem.dtype,
    )


def _fill(problem: ConvProblem, outputs: tuple[Output, ...], threads: int) -> library.Problem:
    def three(values: tuple[int, ...], missing: int) -> tuple[int, ...]:
        return (missing,) * (3 - len(values)) + values

    filled = library.Problem()
    filled.batch, filled.channels = problem.batch, problem.in_channels
    filled.multiplier = problem.out_channels // problem.in_channels
    filled.input[:] = three(problem.input_size, 1)
    filled.kernel[:] = three(problem.kernel_size, 1)
    filled.stride[:] = three(problem.stride, 1)
    filled.padding[:] = three(tuple(low for low, _ in problem.padding), 0)
    filled.dilation[:] = three(problem.dilation, 1)
    filled.output[:] = three(problem.output_size, 1)
    filled.layout = int(problem.channels_last)
    filled.dtype = _DTYPES[problem.dtype]
    filled.outputs = sum(_OUTPUTS[output] for output in outputs)
    filled.threads = threads
    return filled


def _result(problem: ConvProblem, output: Output) -> tuple[str, tuple[int, ...], torch.memory_format]:
    if output == "grad_bias":
        return output, (problem.out_channels,), torch.contiguous_format
    slots: dict[str, Slot] = {"forward": "grad_output", "grad_input": "input", "grad_weight": "weight"}
    return output, problem.shape_of(slots[output]), problem.memory_format
