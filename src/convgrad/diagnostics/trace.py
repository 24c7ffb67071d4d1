"""`trace`: which backend computed what, in which layout, with which copies and in what time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..engine import Event, get_backend, observing
from ..errors import UnknownNameError
from ..problem import ConvProblem, shown_outputs
from ..tables import counted, csv_text, html_table, text_table
from .aten_rules import Machine, select_conv_backend
from .onednn_log import onednn_log
from .pictures import Drawn, Point, by_pytorch
from .roofline import Limits, least_work, limits_of

_COLUMNS = ("call", "outputs", "backend", "kernel", "layout", "copies", "milliseconds", "device", "problem", "reason")


@dataclass(frozen=True)
class Record:
    """One call of one backend.

    Args:
        call: its number in the trace.
        outputs: what it computed, joined by ``+`` where one sweep gave several. These are passes of the problem, as
            `use_backend` and `explain` call them; tables add what they are to the user of a transposed convolution.
        backend: its name.
        kernel: which of the backend's kernels ran, where it has several; for ATen its own backend, or with
            ``onednn=True`` oneDNN's name of the primitive.
        layout: of the result.
        copies: operands that had to be copied into a layout that the backend takes.
        milliseconds: wall time of the call, copies included; on a GPU it waited for the device.
        device: where it ran.
        problem: as one line of text.
        reason: why this backend.
        transposed: whether the user called a transposed convolution.
    """

    call: int
    outputs: str
    backend: str
    kernel: str
    layout: str
    copies: tuple[str, ...]
    milliseconds: float
    device: str
    problem: str
    reason: str
    transposed: bool = False

    def cells(self) -> tuple[str, ...]:
        """One text for each column of a table."""
        row = asdict(self) | {"copies": "; ".join(self.copies), "milliseconds": f"{self.milliseconds:.4f}"}
        row["outputs"] = shown_outputs(self.outputs.split("+"), self.transposed)
        return tuple(str(row[name]) for name in _COLUMNS)


def kernel_of_event(event: Event) -> str:
    """Which of a backend's kernels ran, of ATen its own backend; empty where there is one only."""
    if event.backend == "aten":
        return _by_aten(event.problem, event.outputs != (event.problem.bias_pass,), event.device)
    try:
        return get_backend(event.backend).kernel_name(event.problem, event.outputs)
    except UnknownNameError:  # it was removed meanwhile
        return ""


def _by_aten(problem: ConvProblem, backward: bool, device: str) -> str:
    try:
        return select_conv_backend(problem, device=torch.device(device), need_backward=backward).backend
    except (ValueError, RuntimeError):  # a device that the model of PyTorch's choice does not know
        return ""


class Trace(Drawn):
    """What ran, in order; made by `trace`.

    Attributes:
        records: one for each call of a backend.
    """

    def __init__(self, *, onednn: bool = False) -> None:
        self.records: list[Record] = []
        self._onednn, self._block = onednn, ExitStack()
        self._take: Callable[[], tuple[str, ...]] = tuple

    def __call__(self, event: Event) -> None:
        """Take note of one call; the engine calls this."""
        kernels = self._take() if event.device.startswith("cpu") else ()
        p = event.problem
        self.records.append(Record(
            len(self.records), "+".join(event.outputs), event.backend, ", ".join(kernels) or kernel_of_event(event),
            p.layout, event.copies, event.seconds * 1e3, event.device, str(p), event.reason, p.transposed,
        ))  # fmt: skip

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __enter__(self) -> Trace:
        if self._onednn:
            self._take = self._block.enter_context(onednn_log())
        self._block.enter_context(observing(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._block.close()

    def _rows(self) -> list[tuple[str, ...]]:
        return [_COLUMNS, *(r.cells() for r in self.records)]

    def table(self) -> str:
        """Every call as a line of text, and the total time."""
        if not self.records:
            return "nothing was recorded; PyTorch's own layers and functions are inside convgrad.takeover()"
        total = sum(r.milliseconds for r in self.records)
        copied = sum(len(r.copies) for r in self.records)
        calls, operands = counted(len(self.records), "call"), counted(copied, "operand")
        return f"{text_table(self._rows())}\n{calls}, {total:.3f} ms, {operands} copied"

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """The records as CSV; written to ``path`` as well where one is given."""
        text = csv_text(self._rows())
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def to_dict(self) -> list[dict[str, Any]]:
        """Plain data, ready for json."""
        return [asdict(r) | {"copies": list(r.copies)} for r in self.records]

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return html_table(self._rows()) + self._picture()

    def _points(self) -> list[Point]:
        """One for all calls of the same kind."""
        found: dict[tuple[str, str, str], list[float]] = {}
        for r in self.records:
            found.setdefault((r.problem, r.outputs, r.backend), []).append(r.milliseconds * 1e-3)
        most = max(map(sum, found.values()), default=1.0)
        return [
            Point("", *least_work(ConvProblem.parse(text), outputs.split("+")), median(seconds),
                  not by_pytorch(backend), sum(seconds) / most)
            for (text, outputs, backend), seconds in found.items()
        ]  # fmt: skip

    def _roofs(self) -> list[Limits]:
        kinds = dict.fromkeys((r.device, ConvProblem.parse(r.problem).dtype) for r in self.records)
        found = (limits_of(Machine.here(torch.device(device)), dtype) for device, dtype in kinds)
        return [*dict.fromkeys(filter(None, found))]


def trace(*, onednn: bool = False) -> Trace:
    """Record every call through convgrad inside this block, in every thread: backend, kernel, layout, copies, time.

    Inside ``with convgrad.takeover(), convgrad.trace() as t:`` every convolution is recorded, of PyTorch's own layers
    and functions and of the layers that `accelerate_` left, too.

    A backward pass inside the block is recorded if its forward ran there too, or if a kernel other than ATen's was
    chosen for any part of the call. Otherwise the call was PyTorch's own, and so is its backward; inside
    `convgrad.models.observe_aten` these are recorded too, with every other convolution of the process.

    Under `torch.profiler` every call is labelled without a trace (``convgrad::grad_weight[native]``).

    Args:
        onednn: on the CPU, also name the oneDNN primitive behind each call of ATen. oneDNN reports to standard output,
            which is therefore read and passed on while the block lasts.

    Equivalent to:
        >>> import torch, convgrad
        >>> with convgrad.trace() as t:
        ...     _ = convgrad.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3))
        >>> [r.outputs for r in t]
        ['forward']
    """
    return Trace(onednn=onednn)
