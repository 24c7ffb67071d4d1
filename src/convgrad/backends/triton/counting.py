"""How many instructions a result costs, counted in compiled kernels, and whether memory or issuing them takes longer.

    python -m convgrad.backends.triton.counting [--out FILE] PROBLEM ...

**Nothing here runs on a GPU.** The model: each launch is compiled for sm_90 and disassembled. What lies in no loop is
issued once by each warp; the loop that multiplies most takes as many turns as the launch has products; see `listing`
for what that leaves out. An H100 issues one instruction a cycle on each of its schedulers, and moves the problem's
bytes once at the speed of a copy. Caches, latencies, barriers, the few instructions that add the shares of a sum, and
units that take more than a cycle an instruction are in none of it: a share below 1 promises nothing, one above 1 does.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ...problem import PASSES, ConvProblem
from .aot import TARGETS, as_launched, resources
from .listing import Counts, disassembler, listing_of
from .start import Call
from .variants import BANDED, TOGETHER, launches, variant
from .work import Work, work_of

__all__ = ["Count", "counts", "main", "table"]

_CHIP = "sm_90"
_MULTIPROCESSORS, _SCHEDULERS, _CLOCK = 132, 4, 1.755e9  # an H100 SXM
_COPY = 3.0e12  # bytes a second that a copy reaches of its 3.35e12
_WARP = 32
_WHAT = (*PASSES, "sweep", *BANDED)


class Count(NamedTuple):
    """One launch of a problem; ``each`` is what a result costs, idle lanes included."""

    text: str
    what: str
    kernel: str
    registers: int
    each: Counts
    issue: float
    """Time to issue the instructions over time to move the bytes."""
    lines: float
    """The same for what the L1 cache gives: 128 bytes a cycle on each multiprocessor."""

    @property
    def share(self) -> float:
        return max(self.issue, self.lines)


def counts(text: str, what: str, tool: str) -> Iterator[Count]:
    """The launches of a pass that multiply; there are none where a sweep, or a band, does not take the problem.

    Args:
        text: a problem, with `variants.TOGETHER` behind it for sequences of these strides.
        what: a pass, ``"sweep"``, or one of `variants.BANDED`.
        tool: the path of nvdisasm.
    """
    problem = ConvProblem.parse(text.removesuffix(TOGETHER))
    moved = problem.least_bytes
    if what == "sweep":  # both gradients: the input is read and written, and so is the weight
        moved += problem.dtype.itemsize * (prod(problem.input_shape) + prod(problem.weight_shape))
    results = prod(
        problem.input_shape if what.split(maxsplit=1)[0] in ("grad_input", "sweep") else problem.output_shape
    )
    for call in launches(problem, what, text.endswith(TOGETHER)):
        work = work_of(call)
        if work is not None:
            yield _count(call, work, tool, text, what, moved, results)


def _count(call: Call, work: Work, tool: str, text: str, what: str, moved: int, results: int) -> Count:
    target = TARGETS[_CHIP][0]
    compiled = as_launched(variant(call), target)
    thread = listing_of(compiled.asm["cubin"], tool).executed(work.products, work.entries)
    warps = call.programs * call.warps
    each = Counts().plus(thread, warps * _WARP / results)
    cycles = moved / _COPY * _CLOCK * _MULTIPROCESSORS
    if "PRECISION" in call.arguments:
        what = f"{what}, {call.arguments['PRECISION']}" if _single(call) else what
    return Count(
        *(text, what, call.kernel.fn.__name__, resources(compiled, target).registers, each),
        issue=warps * thread.issued / _SCHEDULERS / cycles,
        lines=warps * thread.lines / cycles,
    )


def _single(call: Call) -> bool:
    first = next(value for value in call.arguments.values() if isinstance(value, Tensor))
    return first.dtype.itemsize == 4


# ---- the table -------------------------------------------------------------------------------------

_HEAD = """| problem | what | kernel | registers | multiply | memory | other | all | issue share | L1 share |
|---|---|---|---:|---:|---:|---:|---:|---:|---:|"""


def _line(c: Count) -> str:
    each = (f"{x:.3g}" for x in (c.each.multiplying, c.each.memory, c.each.other, c.each.issued))
    name = ConvProblem.parse(c.text.removesuffix(TOGETHER)).name
    words = c.text.split('"')
    problem = f"{name}{words[-1]}" if name else c.text
    cells: list[Any] = [problem, c.what, c.kernel, c.registers, *each, f"{c.issue:.2f}", f"{c.lines:.2f}"]
    return "| " + " | ".join(map(str, cells)) + " |"


def table(found: Sequence[Count]) -> str:
    """The launches that memory would not limit, the worst first, and then all of them."""
    over = sorted((c for c in found if c.share > 1), key=lambda c: -c.share)
    lines = [
        f"{len(found)} launches; in {len(over)} of them issuing the instructions, or the L1 cache, would take longer "
        "than memory does (share above 1), the worst first:",
        "",
        *[_HEAD] * bool(over),
        *map(_line, over),
        "",
        "All of them:",
        "",
        _HEAD,
        *map(_line, found),
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Count the launches of some problems."""
    parser = argparse.ArgumentParser(
        prog="python -m convgrad.backends.triton.counting",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("problems", nargs="+")
    parser.add_argument("--what", default=",".join(_WHAT))
    parser.add_argument("--out", type=Path, help="also write it to this Markdown file")
    given = parser.parse_args(arguments)
    tool = disassembler()
    if tool is None:
        print("nvdisasm is not here: Triton's wheels for Linux have it, and so has a CUDA toolkit; put it on the path.")
        return 2
    found: list[Count] = []
    for text in given.problems:
        for what in given.what.split(","):
            for count in counts(text, what, tool):
                found.append(count)
                print(_line(count), flush=True)
    text = table(found)
    print(f"\n{text}")
    if given.out:
        given.out.write_text(f"# Instructions counted\n\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
