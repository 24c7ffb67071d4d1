"""Kernels compiled where there is no GPU: registers, spills and shared memory of every one, as a table.

    python -m convgrad.backends.triton.aot [--jobs 2] [--out FILE] [PROBLEM ...]

Without a problem it is the whole matrix of `variants`. The exit status is 1 where a kernel spills or takes more shared
memory than the chip has. What was compiled is kept in Triton's cache on disk: a second run compiles what has changed.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ...problem import PASSES
from .patch_tiles import warps_of
from .start import ALL_REGISTERS
from .variants import BANDED, MATRIX, Variant, variants

__all__ = ["TARGETS", "Resources", "Row", "as_launched", "compile_variant", "main", "resources", "rows"]

#: Name, target, and the shared memory in bytes that one program may take there.
TARGETS: dict[str, tuple[GPUTarget, int]] = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}
_ONE_A_THREAD = ("correlate_patches", "sum_patches", "correlate_channels", "sum_channels")
WHAT = (*PASSES, "sweep", "sweep+bias", *BANDED)


class Resources(NamedTuple):
    """What one compiled kernel takes; spills are registers kept in memory, in bytes a thread."""

    registers: int
    spills: int
    shared: int
    shuffles: int
    """Instructions that carry values from thread to thread: through shared memory, or between lanes."""


class Row(NamedTuple):
    """One variant, the first launch that needs it, and how many others do."""

    variant: Variant
    used_by: str
    others: int
    found: dict[str, Resources]

    def faults(self) -> list[str]:
        """Sentences; none is what is wanted."""
        said: list[str] = []
        for target, r in self.found.items():
            if r.spills:
                said.append(f"{self.used_by}: {self.variant.name} spills {r.spills} bytes on {target}")
            if r.shared > TARGETS[target][1]:
                said.append(f"{self.used_by}: {r.shared} bytes of shared memory, {target} has {TARGETS[target][1]}")
        return said


def compile_variant(variant: Variant, target: GPUTarget, more: dict[str, int] | None = None) -> Any:
    """Compile one variant for a chip that need not be here, with more of Triton's options."""
    attributes = {(i,): [["tt.divisibility", 16]] for i in variant.divisible}
    constants = dict(variant.constants)
    if "PRECISION" in constants and target.backend == "hip":
        constants["PRECISION"] = "ieee"  # as `on_bands.precision` has it there
    if "AHEAD" in constants and target.backend == "hip":
        constants["AHEAD"] = 0  # as `patch_launch` has it there
    source = ASTSource(variant.kernel, dict(variant.signature), constexprs=constants, attrs=attributes)
    warps = variant.warps
    if target.backend == "hip" and variant.name in _ONE_A_THREAD:
        warps = warps_of(constants["B"], True)
    options = {"num_warps": warps, "num_stages": variant.stages, "enable_fp_fusion": True, **(more or {})}
    return triton.compile(source, target=target, options=options)


def resources(compiled: Any, target: GPUTarget) -> Resources:
    """Read registers, spills and shared memory from a compiled kernel."""
    if target.backend == "cuda":
        shuffles = len(re.findall(r"\b(?:shfl\.sync|st\.shared|stmatrix)", compiled.asm["ptx"]))
        registers, spills = _nvidia(compiled.asm["cubin"])
    else:
        text = compiled.asm["amdgcn"]
        shuffles = len(re.findall(r"\b(?:ds_\w+|\w+_dpp|v_permlane\w+)\s", text))
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


def as_launched(variant: Variant, target: GPUTarget) -> Any:
    """Compile one variant as the launcher does: again, with all registers, where it spills."""
    compiled = compile_variant(variant, target)
    if target.backend == "cuda" and resources(compiled, target).spills:
        return compile_variant(variant, target, ALL_REGISTERS)
    return compiled


def _examine(variant: Variant, names: Sequence[str]) -> dict[str, Resources]:
    targets = {name: TARGETS[name][0] for name in names}
    return {name: resources(as_launched(variant, target), target) for name, target in targets.items()}


def rows(problems: Sequence[str], names: Sequence[str], passes: Sequence[str], jobs: int = 1) -> Iterator[Row]:
    """Compile every variant for every target; with several jobs in processes of their own, in the same order."""
    wanted = variants(problems, passes)
    if jobs == 1:
        for variant, used in wanted.items():
            yield Row(variant, used[0], len(used) - 1, _examine(variant, names))
        return
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        waiting = [pool.submit(_examine, variant, names) for variant in wanted]
        for (variant, used), future in zip(wanted.items(), waiting, strict=True):
            yield Row(variant, used[0], len(used) - 1, future.result())


# ---- the table -------------------------------------------------------------------------------------


def _head(names: Sequence[str]) -> str:
    columns = ["first needed by", "others", "kernel", *(f"{n}: reg. | spills | shared | moves" for n in names)]
    count = 3 + 4 * len(names)
    return "| " + " | ".join(columns) + " |\n" + "|---" + "|---:" * (count - 1) + "|"


def _line(row: Row) -> str:
    cells: list[object] = [row.used_by, row.others, row.variant.name]
    for found in row.found.values():
        cells += found
    return "| " + " | ".join(map(str, cells)) + " |"


def _summary(done: Sequence[Row], names: Sequence[str]) -> str:
    lines = [
        f"{len(done)} variants for {sum(1 + r.others for r in done)} launches; triton {triton.__version__}.",
        "`reg.`: registers a thread; `spills`: bytes a thread; `shared`: bytes a program; `moves`: instructions "
        "that carry values between threads.",
        "",
    ]
    for name in names:
        found = [r.found[name] for r in done]
        lines.append(
            f"- {name}: {sum(r.spills > 0 for r in found)} spill, at most {max(r.registers for r in found)} registers, "
            f"at most {max(r.shared for r in found)} of {TARGETS[name][1]} bytes of shared memory"
        )
    return "\n".join(lines)


def _some_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    """An argument: some of these, with commas between them."""

    def parse(text: str) -> list[str]:
        asked = text.split(",")
        if unknown := [name for name in asked if name not in names]:
            raise argparse.ArgumentTypeError(f"no {', '.join(map(repr, unknown))} among {', '.join(names)}")
        return asked

    return parse


def main(arguments: list[str] | None = None) -> int:
    """Print the table as it grows, then the summary and the faults."""
    parser = argparse.ArgumentParser(
        prog="python -m convgrad.backends.triton.aot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("problems", nargs="*", default=MATRIX)
    parser.add_argument("--targets", type=_some_of(TARGETS), default=list(TARGETS), help="of " + ",".join(TARGETS))
    parser.add_argument("--passes", type=_some_of(WHAT), default=list(WHAT), help="of " + ",".join(WHAT))
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--out", type=Path, help="also write it to this Markdown file")
    given = parser.parse_args(arguments)
    names, start = given.targets, time.monotonic()
    done: list[Row] = []
    print(_head(names))
    for row in rows(given.problems, names, given.passes, given.jobs):
        done.append(row)
        print(_line(row), flush=True)
    faults = [fault for row in done for fault in row.faults()]
    summary = _summary(done, names) if done else "No launch takes these problems and passes."
    print(f"\n{summary}\n", *(f"FAULT: {fault}" for fault in faults), sep="\n")
    print(f"{time.monotonic() - start:.0f} s")
    if given.out:
        parts = ["# Kernels compiled ahead of time", summary, "\n".join(f"- **{f}**" for f in faults)]
        table = "\n".join([_head(names), *map(_line, done)])
        given.out.write_text("\n\n".join(part for part in (*parts, table) if part) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
