"""Triton kernels compiled where there is no GPU: registers, spills, shared memory and instructions, as a table.

    python benchmarks/triton_aot.py [--targets sm_90] [--jobs 2] [PROBLEM ...]

Launches are recorded with tensors of the meta device, so what is compiled is what would have been launched. Of NVIDIA's
chips the instructions of the longest loop are counted, each once: those of a tile, and of the loops in it for values
that are not finite, which rarely run. The exit status is 1 where a kernel spills or takes more shared memory than the
chip has. Triton keeps what was compiled on disk.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from convgrad.backends.triton import TritonBackend, TritonBandedBackend
from convgrad.backends.triton.launch import ALL_REGISTERS, PROGRAMS, Launch, bound, bound_bands
from convgrad.problem import OPERANDS, PASSES, ConvProblem, Output, Pass

#: Name, target, and the shared memory in bytes that one program may take there.
TARGETS: dict[str, tuple[GPUTarget, int]] = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}
_SHAPES = [
    "g144ic144oc144mb32ih56kh3ph1",
    "g96ic96oc96mb32ih112kh3sh2ph1",
    "g240ic240oc240mb32ih28kh5ph2",
    "g96ic96oc96mb32ih56kh7ph3",
    "g768ic768oc768mb32ih7kh7ph3",
    "g576ic576oc576mb32ih14kh3ph1",
    "g64ic64oc64mb8ih64kh3ph2dh1",
    "g96ic96oc96mb2id16ih56iw56kd3kh3kw3pd1ph1pw1",
]
_CONTIGUOUS = [
    "g1536ic1536oc1536mb8iw2048ow2048kw4pw3",
    "g64ic64oc128mb8ih28kh3ph1",
    "g384ic384oc384mb32ih32kh31ph15",
    "g1024ic1024oc1024mb32ih7kh13ph6",
    "g64ic64oc64mb8iw1000kw31pw15",
    "g144ic144oc144mb32ih57kh3ph1",
]
MATRIX: tuple[str, ...] = (
    *(s + d + f for s in _SHAPES for d in ("", " bfloat16") for f in ("", " channels_last")),
    *(s + d for s in _CONTIGUOUS for d in ("", " bfloat16")),
    *(f"g64ic64oc64mb8ih28kh3ph1 float16{more}" for more in ("", " channels_last", " bias")),
    "g512ic512oc512mb512ih112kh3ph1",
    *(f"g1536ic1536oc1536mb8ih1iw2048oh1ow2048kh1kw4ph0pw3{d} channels_last" for d in ("", " bfloat16")),
)
WHAT: dict[str, tuple[Output, ...]] = {
    **{p: (p,) for p in PASSES},
    "sweep": ("grad_input", "grad_weight"),
    "sweep+bias": ("grad_input", "grad_weight", "grad_bias"),
    "silu": ("forward",),
    "silu slope": ("forward",),
}
_POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.uint8: "*fp32"}


class Call(NamedTuple):
    """What a launch would have been: a kernel, its arguments by name, and its options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


@contextmanager
def recording() -> Iterator[list[Call]]:
    """Collect the launches of this block instead of making them; operands may be on the meta device."""
    calls: list[Call] = []

    def record(launch: Launch, **tensors: torch.Tensor) -> tuple[int, str]:
        _, parts = launch._grid(PROGRAMS)
        calls.append(Call(launch._kernel, launch.arguments(parts, tensors), launch._options))
        return parts, ""

    with mock.patch.object(Launch, "start", record):
        yield calls


def launches(text: str, what: str) -> list[Call]:
    """What each backend would launch for a pass or a sweep, where it takes the problem."""
    problem, outputs = ConvProblem.parse(text), WHAT[what]
    slots = OPERANDS[cast(Pass, outputs[0])] if len(outputs) == 1 else ("grad_output", "input", "weight")
    given: list[Any] = [torch.empty(problem.shape_of(s), dtype=problem.dtype, device="meta") for s in slots]
    if problem.has_bias and outputs == (problem.bias_pass,):
        given.append(torch.empty(problem.shape_of(problem.bias_slot)[1], dtype=problem.dtype, device="meta"))
    cuda = torch.device("cuda")
    with recording() as calls:
        if what.startswith("silu"):  # of causal_conv1d
            if problem.ndim == 1 or problem.input_size[0] == 1:
                bias = given[-1] if problem.has_bias else None
                grad = torch.empty(problem.output_shape, dtype=problem.dtype, device="meta")
                slope = what != "silu"
                bound(problem, outputs, print, 1 + slope)(given[0], given[1], bias, None, grad if slope else None)
        elif not TritonBackend().reasons_against(problem, outputs, cuda):
            bound(problem, outputs, print)(*given)
        if what in PASSES and not TritonBandedBackend().reasons_against(problem, outputs, cuda):
            precision = "tf32" if problem.dtype == torch.float32 else "ieee"
            bound_bands(problem, outputs, precision, print)(*given)
    return calls


def compiled(call: Call, target: GPUTarget, more: dict[str, int]) -> Any:
    """Compile a launch as Triton would specialize it."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for i, parameter in enumerate(call.kernel.params):
        value = call.arguments[parameter.name]
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or (value == 1 and not parameter.do_not_specialize):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        else:
            signature[parameter.name] = "i32"
    options = {**call.options, **more}
    if target.backend == "hip":
        if "PRECISION" in constants:
            constants["PRECISION"] = "ieee"
        if "LINE" in constants:
            options["num_warps"] = max(1, constants["B"] // 64)
    source = ASTSource(call.kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=options)


def resources(kernel: Any, target: GPUTarget) -> tuple[int, int, int, int]:
    """Return registers and spilled bytes of a thread, shared memory of a program in bytes, instructions of a loop."""
    instructions = 0
    if target.backend == "hip":
        text = kernel.asm["amdgcn"]
        found = _number(r"\.vgpr_count:\s+(\d+)", text), _number(r"\.private_segment_fixed_size:\s+(\d+)", text)
    else:
        text = _printed(kernel, "cuobjdump", "-res-usage")
        # Without local arrays in the source, a stack holds nothing but spilled registers.
        found = _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text)
        instructions = longest_loop(_printed(kernel, "nvdisasm", "-c"))
    return (*found, kernel.metadata.shared, instructions)


def _printed(kernel: Any, tool: str, option: str) -> str:
    """Return what one of the CUDA tools that Triton brings prints of a kernel."""
    path = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", tool)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([path, option, file.name], check=True, capture_output=True, text=True).stdout


def longest_loop(assembly: str) -> int:
    """Return the largest number of instructions between a label and a jump back to it."""
    labels: dict[str, int] = {}
    count = longest = 0
    for line in assembly.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif re.match(r"\s*/\*[0-9a-f]{4,}\*/", line):
            count += 1
            longest = max(
                [longest, *(count - labels[to] for to in re.findall(r"BRA.*(\.L_x_\d+)", line) if to in labels)]
            )
    return longest


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def examine(text: str, what: str, targets: Sequence[str]) -> list[tuple[str, list[tuple[int, ...]]]]:
    """For each kernel of a pass, but the one that adds partial sums: its name and its resources on each target."""
    rows = []
    for call in launches(text, what):
        if call.kernel.fn.__name__ == "add_partials":
            continue
        found = []
        for name in targets:
            target = TARGETS[name][0]
            taken = resources(compiled(call, target, {}), target)
            if taken[1] and target.backend == "cuda":  # as the launcher does
                taken = resources(compiled(call, target, ALL_REGISTERS), target)
            found.append(taken)
        module = call.kernel.fn.__module__.rpartition(".")[2]
        rows.append((f"{module}.{call.kernel.fn.__name__}", found))
    return rows


def table(problems: Sequence[str], passes: Sequence[str], targets: Sequence[str], jobs: int) -> Iterator[list[Any]]:
    """Rows: problem, pass, kernel, and the resources on each target."""
    wanted = list(itertools.product(problems, passes))
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        waiting = [pool.submit(examine, text, what, targets) for text, what in wanted]
        for (text, what), future in zip(wanted, waiting, strict=True):
            for kernel, found in future.result():
                yield [text, what, kernel, found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="*", default=MATRIX)
    parser.add_argument("--passes", nargs="+", choices=list(WHAT), default=list(WHAT))
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    args = parser.parse_args()
    heads = ["problem", "pass", "kernel", *(f"{t}: registers / spilled / shared / instructions" for t in args.targets)]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|", flush=True)
    kernels = faults = 0
    for text, what, kernel, found in table(args.problems, args.passes, args.targets, args.jobs):
        cells = [" / ".join(map(str, taken)) for taken in found]
        for i, (_, spilled, shared, _) in enumerate(found):
            if spilled or shared > TARGETS[args.targets[i]][1]:
                cells[i] = f"**{cells[i]}**"
                faults += 1
        kernels += 1
        print("| " + " | ".join([text, what, kernel, *cells]) + " |", flush=True)
    print(f"\n{kernels} kernels, {faults} faults; triton {triton.__version__}.")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
