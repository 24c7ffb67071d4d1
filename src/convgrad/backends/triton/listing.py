"""What a compiled kernel for an NVIDIA chip issues: its instructions by kind and by loop, read from a listing.

A listing is what ``nvdisasm -c`` prints. A loop is what lies between a branch backwards and its target, less the loops
within it. What a forward branch may skip counts as issued, and so does an instruction whose predicate is false.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Counts", "Listing", "Loop", "disassembler", "listing_of", "parse"]

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)((?:\.\w+)*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.?[\w$]+):")
_TARGET = re.compile(r"`\((\.?[\w$]+)\)")
_SCALAR = {"FFMA", "FMUL", "DFMA", "DMUL"}
_MEMORY = re.compile(r"(?:LD|LDG|LDL|LDS|LDSM|LDGSTS|ST|STG|STL|STS|STSM|ATOM|ATOMG|ATOMS|RED|REDG)$")
_WIDE = {4: r"\.(?:128|M88\.4|x4)\b", 2: r"\.(?:64|M88\.2|x2)\b"}
_HMMA = re.compile(r"\.168(\d+)\b")
_HGMMA = re.compile(r"\.64x(\d+)x(\d+)")
_WARP, _WARPGROUP = 32, 128  # threads that share one HMMA, one HGMMA


class Counts(NamedTuple):
    """Instructions of one thread, and what they do.

    Args:
        multiplying: those that multiply: FFMA, FMUL, DFMA, DMUL, HMMA, HGMMA.
        memory: loads and stores, of shared memory too.
        products: multiplied by the first kind: one each, or a thread's share of a matrix product.
        lines: the 128 bytes that the L1 cache gives in one cycle, in which a warp's loads and stores are counted.
    """

    multiplying: float = 0
    memory: float = 0
    other: float = 0
    products: float = 0
    lines: float = 0

    @property
    def issued(self) -> float:
        return self.multiplying + self.memory + self.other

    def plus(self, more: Counts, times: float = 1) -> Counts:
        return Counts(*(a + b * times for a, b in zip(self, more, strict=True)))


class Loop(NamedTuple):
    """One turn of a loop, without the loops in it; ``inside`` are the positions of the loops around it."""

    counts: Counts
    inside: tuple[int, ...]
    tensor: bool


class Listing(NamedTuple):
    """A kernel: what lies in no loop, and its loops."""

    straight: Counts
    loops: tuple[Loop, ...]

    def executed(self, products: float, entries: float = 1) -> Counts:
        """What a thread issues that multiplies so many products.

        The loop that multiplies most takes as many turns as that needs. Loops around it take ``entries`` turns, as it
        begins so often; others, where there is a loop that multiplies, none (remainders, and ways for rare values).
        """
        tensor = any(loop.tensor for loop in self.loops)
        most = max(self.loops, key=lambda loop: loop.counts.products * (loop.tensor == tensor), default=None)
        if most is None or not most.counts.products:
            return self.straight
        before = 0 if tensor else self.straight.products
        turns = max(1.0, (products - before) / most.counts.products)
        found = self.straight.plus(most.counts, turns)
        for i in most.inside:
            found = found.plus(self.loops[i].counts, entries)
        return found


def disassembler() -> str | None:
    """The path of nvdisasm: Triton's own, or that of a CUDA toolkit on the path."""
    try:
        import triton

        found = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        if found.exists():
            return str(found)
    except ImportError:
        pass
    return shutil.which("nvdisasm")


def listing_of(cubin: bytes, tool: str) -> Listing:
    """Disassemble a compiled kernel and read it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], check=True, capture_output=True, text=True)
    return parse(done.stdout)


def parse(text: str) -> Listing:
    """Read what nvdisasm prints of one kernel."""
    found: list[tuple[str, str, str]] = []  # name, what follows it up to a blank, operands
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label.group(1)] = len(found)
        elif (instruction := _INSTRUCTION.match(line)) and instruction.group(1) != "NOP":
            found.append((instruction.group(1), instruction.group(2), instruction.group(3)))
    spans = _spans(found, labels)
    own: list[list[int]] = [[] for _ in spans]
    straight: list[int] = []
    for i, (name, _, operands) in enumerate(found):
        if name == "BRA" and (target := _TARGET.search(operands)) and labels.get(target.group(1)) == i:
            continue  # the branch to itself behind the end
        around = [s for s, (first, last) in enumerate(spans) if first <= i <= last]
        (own[around[-1]] if around else straight).append(i)

    def total(positions: Sequence[int]) -> Counts:
        counts = Counts()
        for i in positions:
            counts = counts.plus(_counts(*found[i][:2]))
        return counts

    loops = [
        Loop(
            total(positions),
            tuple(s for s, (low, high) in enumerate(spans[:n]) if low <= first and last <= high),
            any(found[i][0] in ("HMMA", "HGMMA") for i in positions),
        )
        for n, ((first, last), positions) in enumerate(zip(spans, own, strict=True))
    ]
    return Listing(total(straight), tuple(loops))


def _spans(found: Sequence[tuple[str, str, str]], labels: dict[str, int]) -> list[tuple[int, int]]:
    """First and last instruction of each loop, the outer ones first."""
    ends: dict[int, int] = {}
    for i, (name, _, operands) in enumerate(found):
        target = _TARGET.search(operands) if name == "BRA" else None
        if target and (first := labels.get(target.group(1), i)) < i:
            ends[first] = max(ends.get(first, 0), i)
    return sorted(ends.items(), key=lambda span: (span[0], -span[1]))


def _counts(name: str, suffix: str) -> Counts:
    if name in _SCALAR:
        return Counts(multiplying=1, products=1)
    if name == "HMMA" and (shape := _HMMA.search(suffix)):
        return Counts(multiplying=1, products=16 * 8 * int(shape.group(1)) / _WARP)
    if name == "HGMMA" and (shape := _HGMMA.search(suffix)):
        return Counts(multiplying=1, products=64 * int(shape.group(1)) * int(shape.group(2)) / _WARPGROUP)
    if _MEMORY.match(name):
        wide = next((n for n, words in _WIDE.items() if re.search(words, suffix)), 1)
        return Counts(memory=1, lines=wide)
    return Counts(other=1)
