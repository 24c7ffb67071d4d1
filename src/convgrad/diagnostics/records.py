"""Calls of backends: one record, `Call`, one observer, `Trace`, and one table."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from .._compat import lock_over_forks
from ..engine import Event, active, choose, get_backend, observing
from ..errors import UnknownNameError
from ..foreign import read_as
from ..problem import ConvProblem, Outputs, in_order, shown_outputs
from ..tables import Table, counted, wrapped
from .aten_rules import Machine, select_conv_backend
from .layers import running
from .onednn_log import onednn_log
from .pictures import Drawn
from .roofline import BEYOND, TOO_LOW, Limits, least_work, limits_of, measure_limits

if TYPE_CHECKING:
    from typing_extensions import Self

_parsed = lru_cache(maxsize=4096)(ConvProblem.parse)


@dataclass(frozen=True)
class Call:
    """One call of a backend, or all equal ones together.

    Its outputs are passes of the problem, as `use_backend` and `explain` call them; ``shown`` adds what they are to the
    user of a transposed convolution. Times are in milliseconds of wall time, copies included; on a GPU they waited for
    the device.
    """

    problem: str  #: as one line of text
    outputs: str  #: joined by ``+`` where one call gave several
    backend: str
    kernel: str = ""  #: of several; for ATen its own backend, or with ``onednn=True`` oneDNN's name of the primitive
    layout: str = "contiguous"  #: of the result
    device: str = "cpu"
    reason: str = ""  #: why this backend
    milliseconds: float = 0.0  #: of one call; of several the median of the last hundred: the first hardly count
    calls: int = 1  #: how many
    total: float = 0.0  #: milliseconds of all of them
    copied: int = 0  #: operands that each call copied into a layout that the backend takes
    copies: tuple[str, ...] = ()  #: the same, each with its shape and strides; of a single call
    call: int = 0  #: of a single call, its number in the trace
    layers: tuple[str, ...] = ()  #: names of the modules that compute it, where they are known
    pytorch: float | None = None  #: milliseconds of PyTorch's call for the same outputs, in the same model
    least: float | None = None  #: milliseconds that the machine needs at least; None where its limit is not known
    bound: str | None = None  #: what that time is made of, ``"memory"`` or ``"arithmetic"``
    of_limit: float | None = None  #: least / milliseconds
    speedup: float | None = None  #: all of this direction of these layers against PyTorch's
    low: float | None = None  #: the lower end of its interval
    high: float | None = None  #: the upper end

    @classmethod
    def of(cls, event: Event, kernel: str, number: int = 0) -> Call:
        """Return the record of something that was observed."""
        p, ms = event.problem, event.seconds * 1e3
        return cls(
            str(p), "+".join(event.outputs), event.backend, kernel, p.layout, event.device, event.reason, ms, 1, ms,
            len(event.copies), event.copies, number,
        )  # fmt: skip

    @classmethod
    def from_dict(cls, data: Any) -> Call:
        """Return the call that `to_dict` gave; a ValueError for anything else."""
        if isinstance(data, Mapping):
            passes = read_as(tuple[str, ...], data.get("outputs"), "outputs")
            data = {**data, "outputs": "+".join(passes), "copied": data.get("copies", 0), "copies": ()}
        result = read_as(cls, data, "a row")
        _ = result.work  # its problem and its outputs can be read
        return result

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for json."""
        own = {name: value for name, value in vars(self).items() if name not in ("kernel", "call", "copied")}
        flops, moved = self.work
        return own | {
            "shown": self.shown, "backend": self.name, "outputs": [*self.passes], "layers": [*self.layers],
            "flops": flops, "bytes": moved, "copies": self.copied,
        }  # fmt: skip

    @property
    def convolution(self) -> ConvProblem:
        """The problem as a value."""
        return _parsed(self.problem)

    @property
    def passes(self) -> Outputs:
        """The outputs one by one; a ValueError if there is no such output."""
        words = self.outputs.split("+")
        if len(result := in_order(words)) != len(words):
            raise ValueError(f"unknown output {self.outputs!r}")
        return result

    @property
    def shown(self) -> str:
        """The outputs for people; of a transposed convolution with what they are to its user."""
        return shown_outputs(self.outputs.split("+"), self.convolution.transposed)

    @property
    def same(self) -> tuple[str, str, str, str]:
        """The values that equal calls share: problem, outputs, backend and device."""
        return self.problem, self.outputs, self.backend, self.device

    @property
    def name(self) -> str:
        """The backend and its kernel."""
        return f"{self.backend} {self.kernel}".rstrip()

    @property
    def backend_name(self) -> str:
        """The backend without its kernel."""
        return self.backend.partition(" ")[0]

    @property
    def layer(self) -> str:
        """The first layer, and how many more there are; empty where it is not known."""
        return "" if not self.layers else self.layers[0] + f" +{len(self.layers) - 1}" * bool(self.layers[1:])

    @property
    def work(self) -> tuple[int, int]:
        """Operations, and bytes moved at least, of one call."""
        return least_work(self.convolution, self.passes)

    @property
    def direction(self) -> str:
        """Whether it is a part of the forward or of the backward."""
        return "forward" if self.passes == (self.convolution.bias_pass,) else "backward"

    @property
    def beyond(self) -> bool:
        """Whether it is faster than the limit that is known, which is too low then."""
        return (self.of_limit or 0) > BEYOND

    def against(self, limits: Limits | None) -> Call:
        """Return the same, compared with what its machine can do at best."""
        if limits is None:
            return self
        least = limits.seconds(self.convolution, self.passes) * 1e3
        part = least / self.milliseconds if self.milliseconds else None
        return replace(self, least=least, bound=limits.bound(self.convolution, self.passes), of_limit=part)


@dataclass(frozen=True)
class Moment:
    """One call in one step: the number of its row, and milliseconds from the first call's start."""

    row: int
    start: float
    milliseconds: float


@lru_cache(maxsize=4096)
def computed(problem: ConvProblem) -> ConvProblem:
    """Return a problem without what a forward and its backward may have different: a bias, a name."""
    return problem.replace(name="", has_bias=False)


def _kernel_of(event: Event) -> str:
    """Return which of a backend's kernels ran, of ATen its own backend; empty where there is one only."""
    try:
        if event.backend != "aten":
            return get_backend(event.backend).kernel_name(event.problem, event.outputs)
        backward, device = event.outputs != (event.problem.bias_pass,), torch.device(event.device)
        return select_conv_backend(event.problem, device=Machine.here(device), need_backward=backward).backend
    except (UnknownNameError, ValueError, RuntimeError):  # removed meanwhile; a device that the rules do not know
        return ""


def reasoned(call: Call) -> Call:
    """Return a call with the reason for which the engine leaves it to PyTorch, in place of the plain fact."""
    if call.backend_name == "aten":
        steps = choose(call.convolution, call.passes, torch.device(call.device), active())
        if [step.backend.name for step in steps] == ["aten"]:
            return replace(call, reason=steps[0].reason)
    return call


def limited(calls: Sequence[Call], measure: bool = True) -> tuple[list[Call], list[Limits]]:
    """Return calls compared with what their machines can do at best, and these limits.

    ``measure``: limits that are not known; and a CPU's again where a call is faster than they allow: it was busy then.
    """

    @cache
    def known(device: str, dtype: torch.dtype) -> Limits | None:
        try:
            return limits_of(Machine.here(torch.device(device)), dtype, measured=measure)
        except (ValueError, RuntimeError):
            return None

    result = [known(call.device, call.convolution.dtype) for call in calls]
    compared = [call.against(limits) for call, limits in zip(calls, result, strict=True)]
    direct = [call for call in compared if "winograd" not in call.backend]  # its algorithm multiplies less
    beyond = {call.convolution.dtype for call in direct if call.device == "cpu" and call.beyond}
    if measure and beyond:
        for dtype in beyond:
            measure_limits(dtype)
        return limited(calls, measure=False)
    return compared, [*dict.fromkeys(filter(None, result))]


def without_figures(reason: str) -> str:
    """Return a reason as it is said once for several problems: without the estimate and the passes of one."""
    reason = re.sub(r" is [\d.]+x as fast as PyTorch, (by estimate|on average)", r" is faster than PyTorch, \1", reason)
    return re.sub(r", in one call with .*$", "", reason)


# ---- the table ---------------------------------------------------------------------------------------

_EACH = ("call", "outputs", "backend", "kernel", "layout", "copies", "milliseconds", "device", "problem", "reason")
_SUMMED = ("layer", "calls", "output", "backend", "layout", "total ms", "mean ms", "share", "of limit", "problem")


def _table_of(calls: Sequence[Call], titles: Sequence[str], every_layer: bool = False) -> Table[Call]:
    """Return a table of calls with some of its columns; "share" is of all the calls in it."""
    whole = sum(call.total for call in calls) or 1.0
    columns: dict[str, tuple[Callable[[Call], Any], str]] = {
        "call": (attrgetter("call"), "d"),
        "calls": (attrgetter("calls"), "d"),
        "layer": ((lambda c: " ".join(c.layers)) if every_layer else attrgetter("layer"), ""),
        "output": (attrgetter("shown"), ""),
        "outputs": (attrgetter("shown"), ""),
        "copies": (lambda c: "; ".join(c.copies), ""),
        "milliseconds": (attrgetter("milliseconds"), ".4f"),
        "mean ms": (lambda c: c.total / c.calls, ".4f"),
        "total ms": (attrgetter("total"), ".2f"),
        "share": (lambda c: c.total / whole, ".1%"),
        "of limit": (attrgetter("of_limit"), ".0%"),
    }
    return Table(calls, {title: columns.get(title, (attrgetter(title), "")) for title in titles})


# ---- the observer -------------------------------------------------------------------------------------

_adding = lock_over_forks()
_OF_A_STEP = 4096  # calls; of a longer step there is no timeline


class Trace(Drawn):
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

    Attributes:
        records: one `Call` for each call of a backend, in order.

    Equivalent to:
        >>> import torch, convgrad
        >>> with convgrad.trace() as t:
        ...     _ = convgrad.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3))
        >>> [r.outputs for r in t]
        ['forward']
    """

    def __init__(self, *, onednn: bool = False) -> None:
        self.records: list[Call] = []
        self._onednn, self._block, self._depth = onednn, ExitStack(), 0
        self._take: Callable[[], tuple[str, ...]] = tuple

    def __call__(self, event: Event) -> None:
        """Take note of one call; the engine calls this."""
        with _adding:
            kernels = self._take() if event.device.startswith("cpu") else ()
            self.records.append(Call.of(event, ", ".join(kernels) or _kernel_of(event), len(self.records)))

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Call]:
        return iter(self.records)

    def __enter__(self) -> Self:
        if self._depth == 0:  # a block within its own adds nothing
            if self._onednn:
                self._take = self._block.enter_context(onednn_log())
            self._block.enter_context(observing(self))
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._block.close()

    @property
    def rows(self) -> list[Call]:
        """Equal calls together, the most expensive first."""
        return together(self.records)

    @property
    def seconds(self) -> float:
        """Time in all convolutions."""
        return sum(call.total for call in self.rows) * 1e-3

    def table(self, *, width: int | None = None) -> str:
        """Return a line of text for every call, no wider than ``width``."""
        if not self.records:
            return "nothing was recorded; PyTorch's own layers and functions are inside convgrad.takeover()"
        operands = counted(sum(r.copied for r in self.records), "operand")
        said = f"{counted(len(self), 'call')}, {self.seconds * 1e3:.3f} ms, {operands} copied"
        return f"{self._table().text(width)}\n{said}"

    def _table(self, every_layer: bool = False) -> Table[Call]:
        return _table_of(self.records, _EACH)

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the table as CSV, its numbers as they are; write it to ``path`` as well where one is given."""
        text = self._table(every_layer=True).csv()
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def to_dict(self) -> Any:
        """Return plain data, ready for json: the calls, with the fields of the rows of ``convgrad run --json``."""
        return [call.to_dict() for call in self.records]

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return self._table().html() + self._picture()

    def _drawn(self) -> tuple[list[Call], list[Limits]]:
        return self.rows, limited(self.rows, measure=False)[1]


@dataclass
class _Sum:
    """Equal calls: the first one, how many, their seconds, and those of the last hundred."""

    first: Call
    calls: int = 0
    seconds: float = 0.0
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=101))


class Usage(Trace):
    """A context manager that adds up all calls of backends inside it: a row for each convolution and output."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[tuple[object, ...], _Sum] = {}
        self._others: list[Call] = []
        self._layers: dict[ConvProblem, dict[str, None]] = {}
        #: The sum, the start and the seconds of the calls since the last step ended, and of those of that step.
        self._now: deque[tuple[_Sum, float, float]] = deque(maxlen=_OF_A_STEP)
        self._step: list[tuple[_Sum, float, float]] = []

    def __call__(self, event: Event) -> None:
        with _adding:
            key = (event.problem, event.outputs, event.backend, event.device)
            if key not in self._sums:
                first = Call.of(event, _kernel_of(event))
                self._sums[key] = _Sum(replace(first, backend=first.name, kernel="", copies=()))
            one = self._sums[key]
            one.calls += 1
            one.seconds += event.seconds
            one.latest.append(event.seconds)
            self._now.append((one, time.perf_counter() - event.seconds, event.seconds))
            if event.outputs == (event.problem.bias_pass,) and (now := running()):
                self._layers.setdefault(computed(event.problem), {})[now.name] = None

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Call]:
        return iter(self.rows)

    @property
    def rows(self) -> list[Call]:
        return together([*(
            replace(one.first, calls=one.calls, total=one.seconds * 1e3, milliseconds=median(one.latest) * 1e3,
                    layers=tuple(self._layers.get(computed(one.first.convolution), ())))
            for one in list(self._sums.values())
        ), *self._others])  # fmt: skip

    def table(self, *, width: int | None = None, first: int | None = None) -> str:
        """Return a line for equal calls together, no wider than ``width``, and beyond the ``first`` lines their sum."""
        calls, _ = limited(self.rows, measure=False)
        if not calls:
            return "no convolution ran"
        table, whole = _table_of(calls, _SUMMED), sum(call.total for call in calls) or 1.0

        def summed(name: str, some: Sequence[Call]) -> list[Any]:
            total = sum(call.total for call in some)
            return [None, sum(call.calls for call in some), name, None, None, total, None, total / whole, None, None]

        if first is not None and len(calls) > first:
            table.values[first:] = [summed(f"{len(calls) - first} more", calls[first:]), summed("sum", calls)]
        said = ["share: of the time in convolutions", *[TOO_LOW] * any(c.beyond for c in calls)]
        return "\n".join([table.text(width), *(text if width is None else wrapped(text, width) for text in said)])

    def _table(self, every_layer: bool = False) -> Table[Call]:
        return _table_of(limited(self.rows, False)[0], _SUMMED, every_layer)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for json: the total and its rows."""
        calls = limited(self.rows, measure=False)[0]
        rows = [{**c.to_dict(), "total_seconds": c.total * 1e-3, "fraction_of_limit": c.of_limit} for c in calls]
        return {"total_seconds": self.seconds, "rows": rows}

    def end_step(self) -> None:
        """Keep the calls since this was called before, as those of a step."""
        self._step = list(self._now) if len(self._now) < _OF_A_STEP else []
        self._now.clear()

    def timeline(self, rows: Sequence[Call]) -> tuple[Moment, ...]:
        """Return each call of the last step."""
        number = {row.same: i for i, row in reversed([*enumerate(rows)])}
        return tuple(
            Moment(number[one.first.same], (start - self._step[0][1]) * 1e3, seconds * 1e3)
            for one, start, seconds in self._step if one.first.same in number
        )  # fmt: skip

    def add(self, calls: Sequence[Call]) -> None:
        """Add calls that were observed elsewhere, as in another process."""
        self._others += calls


def together(calls: Sequence[Call]) -> list[Call]:
    """Return equal calls as one each, the most expensive first."""
    result: dict[tuple[str, ...], list[Call]] = {}
    for call in calls:
        result.setdefault(call.same, []).append(call)
    rows = [
        replace(some[0], calls=sum(c.calls for c in some), total=sum(c.total for c in some), copies=(),
                milliseconds=median([c.milliseconds for c in some]))
        for some in result.values()
    ]  # fmt: skip
    return sorted(rows, key=lambda call: -call.total)


trace = Trace
