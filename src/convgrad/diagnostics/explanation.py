"""The results of `explain`: for each output, every backend: chosen or why not, layout, workspace, and the limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from html import escape
from typing import Any

from ..backends import COPY, built_in, why_absent
from ..problem import PASSES, ConvProblem, Output, shown_outputs
from ..tables import Table, counted, wrapped
from .aten_rules import AtenTrace, Machine, trace_aten
from .pictures import Drawn
from .records import Call
from .roofline import BEYOND, TOO_LOW, Limits
from .screen import Layers, text_of


@dataclass(frozen=True)
class Answer:
    """The answer of one backend for one output."""

    output: Output
    backend: str
    chosen: bool
    reasons: tuple[str, ...]
    layout: str  # in which it gets the operands
    workspace: int  # bytes of scratch memory that the engine gives it
    runs: str = ""  # ATen's own backend and function (where measured, oneDNN's primitive), or one of several kernels
    seconds: float | None = None  # of one call, measured
    usable: bool = True  # whether it could compute this here

    @property
    def by_aten(self) -> bool:
        """Whether this is PyTorch's own call, which pads the input first where the problem has a padding mode."""
        return self.backend.removesuffix(COPY) == "aten"


@dataclass(frozen=True)
class Transfer:
    """The part of one tensor that a process receives in one pass of a sharded convolution."""

    when: str  # "forward" or "backward"
    tensor: str  # an operand, or a result on its way to where it is wanted
    collective: str  # a halo exchange, or a change of placements
    over: tuple[str, ...]  # the names or numbers of the mesh's dimensions
    bytes: int  # that this process receives
    least: int  # bytes without which this sharding cannot do
    why: str  # it is necessary


@dataclass(frozen=True)
class Explanation(Drawn):
    """Backends that would run for a problem on a machine, and those that would not and why. ``str()`` is a table."""

    problem: ConvProblem
    machine: Machine
    rows: tuple[Answer, ...]  # one for each output and backend
    limits: Limits | None = None  # what the machine can do at best; None where that is not known
    placements: str = ""  # of a sharded call, of which the problem is this process's part: where its tensors lie
    transfers: tuple[Transfer, ...] = ()  # what this process receives in it
    warnings: tuple[str, ...] = ()  # why the times are not to be trusted

    def chosen(self) -> dict[Output, str]:
        """The backend of each output."""
        return {r.output: r.backend for r in self.rows if r.chosen}

    @cached_property
    def aten(self) -> AtenTrace:
        """PyTorch's own choice: every rule and the value that decided it; of a complex problem for its real parts."""
        return pytorchs_own(self.problem, self.machine)

    def of_limit(self, row: Answer) -> float | None:
        """Return the part of the machine's limit that a measured row reaches, 1 at most in theory."""
        return None if row.output == "grad_bias" or not row.seconds else self.call(row).of_limit

    def _table(self, rows: Sequence[Answer]) -> Table[Answer]:
        return Table(rows, {
            "output": (lambda r: shown_outputs((r.output,), self.problem.transposed), ""),
            "backend": (lambda r: r.backend, ""),
            "": (lambda r: "chosen" if r.chosen else "", ""),
            "runs": (lambda r: r.runs, ""),
            "layout": (lambda r: r.layout, ""),
            "workspace": (lambda r: f"{r.workspace:,} B" if r.workspace else "0", ""),
            "time": (lambda r: "" if r.seconds is None else f"{r.seconds * 1e3:.3f} ms", ""),
            "of the limit": (lambda r: "" if (part := self.of_limit(r)) is None else f"{100 * part:.3g} %", ""),
            "reason": (lambda r: "; ".join(r.reasons), ""),
        })  # fmt: skip

    @property
    def summary(self) -> str:
        """Work and limit in one line."""
        p = self.problem
        text = f"each pass: {p.flops:,} FLOP, {p.least_bytes:,} bytes at least"
        if self.limits is None:
            here = "are not measured yet in this dtype (convgrad explain --measure)"
            text += f"; this machine's peak speeds {here if self.machine.is_here else 'are not known'}"
        else:
            least = self.limits.seconds(p) * 1e3
            text += f"; at best {least:.4g} ms ({self.limits.bound(p)}-bound), given {self.limits}"
        if self.placements:
            text += f"\nthis process's part of a call {self.placements}"
            text += "" if self.transfers else "; nothing is exchanged"
        return text

    def __str__(self) -> str:
        return self.text(80)

    def text(self, width: int | None = None, *, everything: bool = False) -> str:
        """Return the table under its subject, no wider than ``width``.

        Without ``everything`` the backends that were not chosen are only named, except ATen, what was measured, and the
        user's kernels that cannot.
        """
        shown = self._shown(everything)
        table = self._table(shown).text(width)
        rest = []
        if others := [r for r in self.rows if r not in shown]:
            can = [*dict.fromkeys(r.backend for r in others if r.usable)]
            cannot = len({r.backend for r in others}) - len(can)
            rest.append(
                f"not chosen: {', '.join(can) or 'none'}; {cannot} more cannot compute it (--all shows why; in Python, "
                ".text(everything=True))"
            )
        if self.transfers:
            rest.append(_exchanged([("", t) for t in self.transfers]).text(width))
        if any((self.of_limit(r) or 0) > BEYOND for r in self.rows):
            rest.append(TOO_LOW)
        return "\n".join(text if width is None else wrapped(text, width) for text in (self._head, table, *rest))

    @property
    def _head(self) -> str:
        warnings = "".join(f"{warning}\n" for warning in self.warnings)
        return f"{no_kernels(self.machine)}{warnings}{self.problem}\non {self.machine}\n{self.summary}"

    def _shown(self, everything: bool) -> list[Answer]:
        """Return the rows of the table: those that were chosen, ATen's, what was measured, and the user's kernels."""
        ours = {backend.name for backend in built_in()}
        return [
            r for r in self.rows
            if everything or r.chosen or r.by_aten or r.seconds is not None
            or not (r.usable or r.backend.removesuffix(COPY) in ours)
        ]  # fmt: skip

    def _repr_html_(self) -> str:
        title = escape(self._head).replace("\n", "<br>")
        exchanged = _exchanged([("", t) for t in self.transfers]).html() if self.transfers else ""
        rows = self._shown(everything=False)
        table = self._table(rows).html([i for i, row in enumerate(rows) if row.chosen])
        every = f"<details><summary>every backend</summary>{self._table(self.rows).html()}</details>"
        return f"<p>{title}</p>{table}{every}{exchanged}{self._picture()}"

    def _drawn(self) -> tuple[list[Call], list[Limits]]:
        """Return each measured row; else one pass, as all have the same work."""
        rows = [row for row in self.rows if row.output in PASSES]
        drawn = [row for row in rows if row.seconds] or [row for row in rows if row.chosen][:1]
        return [*map(self.call, drawn)], [self.limits] if self.limits else []

    def call(self, row: Answer, layers: tuple[str, ...] = ()) -> Call:
        """Return a row as the calls that would run in so many layers."""
        ms, count = (row.seconds or 0) * 1e3, len(layers) or 1
        return Call(
            str(self.problem.replace(name="")), row.output, f"{row.backend} {row.runs.split(' ')[0]}".rstrip(),
            layout=row.layout, reason=row.reasons[0], milliseconds=ms, calls=count, total=count * ms, layers=layers,
        ).against(self.limits)  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for json."""
        p, limits = self.problem, self.limits
        return {
            "problem": str(p),
            "machine": str(self.machine),
            "flops": p.flops,
            "least_bytes": p.least_bytes,
            "limit": limits and {**asdict(limits), "least_seconds": limits.seconds(p), "bound": limits.bound(p)},
            "rows": [
                {**{"workspace_bytes" if name == "workspace" else name: value for name, value in asdict(r).items()},
                 "reasons": [*r.reasons], "fraction_of_limit": self.of_limit(r)}
                for r in self.rows
            ],
            "warnings": [*self.warnings],
            **({"placements": self.placements, "transfers": [*map(asdict, self.transfers)]} if self.placements else {}),
        }  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """One convolution of a model, and every place where the same one runs."""

    names: tuple[str, ...]  # of the modules, in order; one that runs twice stands here twice
    kind: str  # class of the module
    explanation: Explanation  # what would run for it
    linear: bool = False  # whether it is a linear layer, which is computed as a convolution

    @property
    def problem(self) -> ConvProblem:
        return self.explanation.problem

    def matches(self, pattern: str) -> bool:
        """Whether a part of a name, a kernel size such as ``7x7``, ``depthwise`` or ``pointwise`` means this layer."""
        p = self.problem
        facts = {w for w in ("depthwise", "pointwise", "transposed") if getattr(p, w)}
        facts.add("x".join(map(str, p.kernel_size)))
        words = pattern.split()
        return all(w in facts or any(w in name for name in self.names) for w in words)


@dataclass(frozen=True)
class ModelExplanation(Drawn):
    """Backends that would run for every convolution of a model; equal ones are one line. ``str()`` is a table."""

    machine: Machine
    layers: tuple[Layer, ...]

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def select(self, pattern: str) -> ModelExplanation:
        """Return the layers that a pattern means (`Layer.matches`); if there is none, a ValueError that lists names."""
        result = tuple(layer for layer in self.layers if layer.matches(pattern))
        if not result:
            names = ", ".join(layer.names[0] or layer.kind for layer in self.layers[:8])
            raise ValueError(f"no convolution of this model matches {pattern!r}; there are {names} ...")
        return ModelExplanation(self.machine, result)

    @property
    def rows(self) -> list[Call]:
        """The backend that was chosen for each pass of each layer."""
        return [
            x.explanation.call(r, tuple(name or x.kind for name in x.names))
            for x in self.layers for r in x.explanation.rows if r.chosen and r.output in PASSES
        ]  # fmt: skip

    @property
    def transfers(self) -> list[tuple[str, Transfer]]:
        """Everything that this process receives in a sharded model, each with the layer's name."""
        return [(name, t) for layer in self.layers for name in layer.names for t in layer.explanation.transfers]

    def __str__(self) -> str:
        return self.text(80)

    def text(self, width: int | None = None) -> str:
        """Return the table under its subject, no wider than ``width``."""
        kinds = Counter("linear layer" if layer.linear else "convolution" for layer in self.layers for _ in layer.names)
        counts = " and ".join(counted(kinds[kind], kind) for kind in ("convolution", "linear layer") if kinds[kind])
        title = f"{no_kernels(self.machine)}{counts}, {len(self.layers)} different, on {self.machine}"
        text = text_of([title, *Layers(self.rows).lines(width, texts=True)], width)
        return f"{text}\n{_exchanged(self.transfers).text(width)}" if self.transfers else text

    def _repr_html_(self) -> str:
        return f"<p>on {escape(str(self.machine))}</p>{Layers(self.rows).html()}{self._picture()}"

    def _drawn(self) -> tuple[list[Call], list[Limits]]:
        """Return what was measured of each layer; else one pass, as all have the same work."""
        limits = dict.fromkeys(x.explanation.limits for x in self.layers if x.explanation.limits)
        return [call for call in self.rows if call.milliseconds or call.direction == "forward"], list(limits)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for json."""
        return {
            "machine": str(self.machine),
            "layers": [{"names": list(x.names), "kind": x.kind, **x.explanation.to_dict()} for x in self.layers],
        }


def pytorchs_own(problem: ConvProblem, machine: Machine) -> AtenTrace:
    """Return PyTorch's four steps for a problem; for a complex one, those of each of its three real convolutions."""
    return trace_aten(problem.replace(dtype=problem.dtype.to_real()), device=machine)


def no_kernels(machine: Machine) -> str:
    """Return a line that says so where this CPU has none of the compiled kernels; else nothing."""
    missing = why_absent() if machine.device_type == "cpu" and machine.is_here else ""
    return f"NO COMPILED KERNELS: {missing}\n" if missing else ""


def _exchanged(transfers: Sequence[tuple[str, Transfer]]) -> Table[tuple[str, Transfer]]:
    """Return a table of transfers, each with the name of its layer, if it has one."""
    return Table(transfers, {
        "layer": (lambda row: row[0], ""),
        "pass": (lambda row: row[1].when, ""),
        "tensor": (lambda row: row[1].tensor, ""),
        "exchange": (lambda row: row[1].collective, ""),
        "over": (lambda row: " and ".join(row[1].over), ""),
        "received": (lambda row: f"{row[1].bytes:,} B", ""),
        "at least": (lambda row: f"{row[1].least:,} B", ""),
        "as": (lambda row: row[1].why, ""),
    })  # fmt: skip
