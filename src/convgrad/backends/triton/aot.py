"""Kernels compiled where there is no GPU: registers, spills and shared memory of every launch of a pass.

The launches are recorded by running a pass on tensors without storage (the meta device), so what is compiled is what
would have been launched, specialized in the same way.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ...problem import OPERANDS, PASSES, ConvProblem, Output
from . import launch

__all__ = ["TARGETS", "Resources", "compile_call", "launches", "main", "resources", "table"]

#: Name, target, and the shared memory in bytes that one program may take there.
TARGETS: dict[str, tuple[GPUTarget, int]] = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}
_POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
}


class Resources(NamedTuple):
    """What one compiled kernel takes; spills are registers kept in memory, in bytes a thread."""

    registers: int
    spills: int
    shared: int
    shuffles: int
    """Changes of layout between threads: through shared memory, or between lanes."""


def launches(problem: ConvProblem, what: str) -> list[launch.Call]:
    """The launches of a pass, of ``"sweep"`` or of ``"sweep+bias"``."""

    def slot(name: str) -> Tensor:
        tensor = torch.empty(problem.shape_of(name), dtype=problem.dtype, device="meta")  # pyright: ignore
        return tensor if name == "weight" else tensor.contiguous(memory_format=problem.memory_format)

    with launch.recording() as calls:
        if what in PASSES:
            first, second = (slot(name) for name in OPERANDS[what])
            if what == "grad_weight":
                launch.grad_weight(problem, first, second)
            else:
                bias = first.new_empty(problem.out_channels if what == "forward" else problem.in_channels)
                run = launch.output if what == "forward" else launch.grad_input
                run(problem, first, second, bias if problem.has_bias else None)
        else:
            launch.sweep(problem, slot("grad_output"), slot("input"), slot("weight"), what == "sweep+bias")
    return calls


def compile_call(call: launch.Call, target: GPUTarget) -> Any:
    """Compile one launch as the launcher would specialize it."""
    kernel = call.kernel
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, parameter in enumerate(kernel.params):
        value = call.arguments[parameter.name]
        if isinstance(value, Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or (value == 1 and not parameter.do_not_specialize):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": call.warps, "num_stages": 1, "enable_fp_fusion": True}
    return triton.compile(source, target=target, options=options)


def resources(compiled: Any, target: GPUTarget) -> Resources:
    """Read registers, spills and shared memory from a compiled kernel."""
    shuffles = compiled.asm["ttgir"].count("ttg.convert_layout")
    if target.backend == "cuda":
        registers, spills = _nvidia(compiled.asm["cubin"])
    else:
        text = compiled.asm["amdgcn"]
        registers = _number(r"\.vgpr_count:\s+(\d+)", text)
        # Scratch memory. A scalar register that is kept in lanes of a vector register costs none, and is not counted.
        spills = _number(r"\.private_segment_fixed_size:\s+(\d+)", text)
    return Resources(registers, spills, compiled.metadata.shared, shuffles)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def _nvidia(cubin: bytes) -> tuple[int, int]:
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    # Without local arrays in the source, a stack holds nothing but spilled registers.
    return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text)


def _line(cells: list[Any], widths: tuple[int, ...]) -> str:
    return "| " + " | ".join(f"{c!s:<{w}}" for c, w in zip(cells, widths, strict=True)) + " |"


def table(problems: Iterable[str], names: Sequence[str], passes: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Compile passes of every problem for every target: lines of a table, and what is wrong (or "")."""
    widths = (46, 11, 13, 6, 4, 6, 6, 3)
    yield _line(["problem", "what", "kernel", "target", "reg.", "spills", "shared", "cv."], widths), ""
    yield _line(["-" * w for w in widths], widths), ""
    for text in problems:
        problem = ConvProblem.parse(text)
        for what in passes:
            if what not in PASSES and _against_sweep(problem, what):
                continue
            for call in launches(problem, what):
                for name in names:
                    target, limit = TARGETS[name]
                    found = resources(compile_call(call, target), target)
                    fault = ""
                    if found.spills:
                        fault = f"{text} {what}: {call.kernel.__name__} spills on {name}"
                    elif found.shared > limit:
                        fault = f"{text} {what}: {found.shared} bytes of shared memory, {name} has {limit}"
                    yield _line([text, what, call.kernel.__name__, name, *found], widths), fault


def _against_sweep(problem: ConvProblem, what: str) -> list[str]:
    from . import against_sweep

    outputs: tuple[Output, ...] = ("grad_input", "grad_weight")
    return against_sweep(problem, outputs if what == "sweep" else (*outputs, "grad_bias"))


def main(arguments: list[str] | None = None) -> int:
    """``python -m convgrad.backends.triton.aot PROBLEM...`` prints the table; the exit status is 1 for a fault."""
    parser = argparse.ArgumentParser(prog="python -m convgrad.backends.triton.aot")
    parser.add_argument("problems", nargs="+")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--passes", default=",".join((*PASSES, "sweep", "sweep+bias")))
    given = parser.parse_args(arguments)
    faults: list[str] = []
    for line, fault in table(given.problems, given.targets.split(","), given.passes.split(",")):
        print(line, flush=True)
        faults += [fault] if fault else []
    print("\n".join(f"FAULT: {fault}" for fault in faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
