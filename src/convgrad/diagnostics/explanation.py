"""`Explanation`: for each output, every backend: chosen or why not, layout, workspace, and how far from the limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from .. import settings
from ..backends.base import Backend, described
from ..engine.choice import choose
from ..engine.registry import backends, reasons_against
from ..engine.request import active
from ..problem import OUTPUTS, ConvProblem, Output, in_order
from .aten_rules import Machine, Walk, kernel_of, walk
from .aten_rules.select import DeviceLike, machine_of
from .measure import require_here, times
from .roofline import Limits, limits_of
from .row import Row

__all__ = ["Explanation", "Row", "explain_problem", "machine_for"]

_HEAD = ("output", "backend", "", "runs", "layout", "workspace", "time", "of the limit", "reason")


@dataclass(frozen=True)
class Explanation:
    """What would run for a problem on a machine, and what would not and why. ``str()`` is a table.

    Args:
        rows: one for each output and backend.
        limits: what the machine can do at best; None where that is not known.
    """

    problem: ConvProblem
    machine: Machine
    rows: tuple[Row, ...]
    limits: Limits | None = None

    def chosen(self) -> dict[Output, str]:
        """The backend of each output."""
        return {r.output: r.backend for r in self.rows if r.chosen}

    @cached_property
    def aten(self) -> Walk:
        """How PyTorch itself would get to its kernels: every rule and the value that decided it."""
        return walk(self.problem, device=self.machine)

    @property
    def limit_seconds(self) -> float | None:
        """The least time in which the machine can do any one pass."""
        return None if self.limits is None else self.limits.seconds(self.problem)

    def of_limit(self, row: Row) -> float | None:
        """The part of the machine's limit that a measured row reaches, 1 at most in theory."""
        least = self.limit_seconds
        return None if least is None or not row.seconds or row.output == "grad_bias" else least / row.seconds

    def _cells(self) -> list[tuple[str, ...]]:
        cells = []
        for r in self.rows:
            part = self.of_limit(r)
            cells.append((
                r.output, r.backend, "chosen" if r.chosen else "", r.runs, r.layout,
                f"{r.workspace:,} B" if r.workspace else "0",
                "" if r.seconds is None else f"{r.seconds * 1e3:.3f} ms",
                "" if part is None else f"{100 * part:.2g} %" if part < 0.995 else f"{100 * part:.0f} %",
                "; ".join(r.reasons),
            ))  # fmt: skip
        return cells

    @property
    def summary(self) -> str:
        """Work and limit in one line; for a transposed problem, which pass is its output."""
        p = self.problem
        text = self._work(p)
        if p.transposed:
            text += "\ntransposed: its output is the pass grad_input, the gradient of its input the pass forward"
        return text

    def _work(self, p: ConvProblem) -> str:
        text = f"each pass: {p.flops:,} FLOP, {p.least_bytes:,} bytes at least"
        if self.limits is None:
            return text + "; the machine's limit is not known"
        least = self.limits.seconds(p) * 1e3
        return text + f"; at best {least:.4g} ms ({self.limits.bound(p)}-bound), given {self.limits}"

    def __str__(self) -> str:
        rows = [_HEAD, *self._cells()]
        return f"{self.problem}\non {self.machine}\n{self.summary}\n{_table(rows)}"

    def _repr_html_(self) -> str:
        from html import escape

        head = "".join(f"<th>{h}</th>" for h in _HEAD)
        body = "".join(
            "<tr>" + "".join(f"<td style='text-align:left'>{escape(c)}</td>" for c in cells) + "</tr>"
            for cells in self._cells()
        )
        summary = escape(self.summary).replace("\n", "<br>")
        title = f"<b>{escape(str(self.problem))}</b><br>on {escape(str(self.machine))}<br>{summary}"
        return f"<p>{title}</p><table><tr>{head}</tr>{body}</table>"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for json."""
        p, limits = self.problem, self.limits
        return {
            "problem": str(p),
            "machine": str(self.machine),
            "flops": p.flops,
            "least_bytes": p.least_bytes,
            "limit": limits
            and {
                "bytes_per_second": limits.bytes_per_second,
                "flops_per_second": limits.flops_per_second,
                "dtype": limits.dtype,
                "source": limits.source,
                "seconds": limits.seconds(p),
                "bound": limits.bound(p),
            },
            "rows": [
                {
                    "output": r.output,
                    "backend": r.backend,
                    "chosen": r.chosen,
                    "runs": r.runs,
                    "layout": r.layout,
                    "workspace": r.workspace,
                    "seconds": r.seconds,
                    "of_limit": self.of_limit(r),
                    "reasons": list(r.reasons),
                }
                for r in self.rows
            ],
        }


def _table(lines: Sequence[Sequence[str]]) -> str:
    """Columns of text; a column that only has a title is left out."""
    keep = [i for i in range(len(lines[0])) if not lines[0][i] or any(line[i] for line in lines[1:])]
    widths = {i: max(len(line[i]) for line in lines) for i in keep}
    return "\n".join("  ".join(line[i].ljust(widths[i]) for i in keep).rstrip() for line in lines)


def machine_for(device: DeviceLike) -> Machine:
    """The machine that is meant: a device that is here, or a description.

    Raises:
        ValueError: a description that cannot be read.
    """
    if isinstance(device, str) and device.split(":")[0] == "cuda" and torch.cuda.is_available():
        device = torch.device(device)
    return machine_of(device)


def explain_problem(
    problem: ConvProblem,
    outputs: Output | Sequence[Output] | None = None,
    device: DeviceLike = None,
    *,
    measure: bool = False,
) -> Explanation:
    """Ask every backend about every output of a problem, on a machine that need not be here.

    Args:
        outputs: which; all where none are given.
        device: None for this CPU, a device that is here, or a description of one that is not
            (`convgrad.diagnostics.aten_rules.Machine`).
        measure: time the chosen backend and ATen, and the machine's limit where it is not known yet; only for a
            machine that is here.

    Raises:
        BackendError: a backend that was asked for by name cannot.
        ValueError: an output or a device description that cannot be read, or ``measure`` for a machine that is not
            here.
    """
    machine = machine_for(device)
    asked = in_order(_known(outputs))
    forward = in_order([o for o in asked if o == problem.bias_pass])
    backward = in_order([o for o in asked if o != problem.bias_pass])
    rows: list[Row] = []
    inside = _inside_aten(problem, machine)
    for together in (forward, backward):
        rows += _rows(problem, together, machine, inside)
    if measure:
        require_here(machine)
        rows = times(problem, rows, torch.device(machine.device_type))
    return Explanation(problem, machine, tuple(rows), limits_of(machine, problem.dtype, measured=measure))


def _known(outputs: Output | Sequence[Output] | None) -> Sequence[Output]:
    """The outputs that are meant; a single name stands for itself."""
    given: Any = (outputs,) if isinstance(outputs, str) else tuple(outputs or OUTPUTS)
    for output in given:
        if output not in OUTPUTS:
            raise ValueError(f"unknown output {output!r}; outputs are {', '.join(OUTPUTS)}")
    return given


def _rows(problem: ConvProblem, together: tuple[Output, ...], machine: Machine, inside: dict[Output, str]) -> list[Row]:
    """Every backend's answer for the outputs of one call, on this machine."""
    with described(machine.capability):
        return _answers(problem, together, machine, inside)


def _answers(
    problem: ConvProblem, together: tuple[Output, ...], machine: Machine, inside: dict[Output, str]
) -> list[Row]:
    place, flags = torch.device(machine.device_type), settings.current()
    steps = () if problem.empty else choose(problem, together, place, flags, active())
    step_of = {o: s for s in steps for o in s.outputs}
    rows: list[Row] = []
    for output in together:
        step = step_of.get(output)
        if step is None:
            why = "nothing to contract: the result is zero" if problem.empty else "a sum over batch and space"
            rows.append(Row(output, "engine", True, (why,), "as it lies", 0))
            continue
        for backend in backends().values():
            chosen = backend is step.backend
            if output == "grad_bias" and not chosen:
                continue
            against = [] if output == "grad_bias" else reasons_against(backend, problem, (output,), place, flags)
            against = _there(backend, output, machine, against, inside)
            why = [step.reason] if chosen else against or ["usable, expected to be slower"]
            space = backend.workspace(problem, step.outputs if chosen else (output,)) if chosen or not against else 0
            layout = "as they lie" if "strided" in backend.layouts else _layout_name(problem)
            runs = inside.get(output, "") if backend.name == "aten" and not against else ""
            rows.append(Row(output, backend.name, chosen, tuple(why), layout, space, runs))
    # The chosen one first: it is what most people look for.
    order = {output: i for i, output in enumerate(together)}
    return sorted(rows, key=lambda r: (order[r.output], not r.chosen))


def _there(
    backend: Backend, output: Output, machine: Machine, against: list[str], inside: dict[Output, str]
) -> list[str]:
    """The reasons against a GPU library as they hold on a machine that is not here, with another build of PyTorch."""
    library = getattr(backend, "library", None)
    if library is None or machine.device_type != "cuda" or torch.cuda.is_available() or output == "grad_bias":
        return against
    if (library == "MIOpen") != machine.miopen or (library == "cuDNN" and machine.cudnn is None):
        return [f"PyTorch has no {library} on {machine.label or 'this machine'}"]
    of_this_build = backend.absent(torch.device("cuda"))  # pyright: ignore[reportAttributeAccessIssue]
    against = [reason for reason in against if reason not in of_this_build]
    picked = inside.get(output, "").split(" ")[0]
    if output == "grad_weight" and not picked.lower().startswith(library.lower()):
        against.append(
            f"{library}'s gradient of the weight is reached only through convolution_backward, "
            f"which picks {picked} for this problem on this machine"
        )
    return against


def _inside_aten(problem: ConvProblem, machine: Machine) -> dict[Output, str]:
    """What PyTorch runs for each output, by its own rules."""
    from ..errors import ConvgradError

    try:
        steps = walk(problem, device=machine)
    except ConvgradError:
        return {}
    gradients = steps.gradient_backend.answer
    found: dict[Output, str] = {}
    for output in OUTPUTS:
        if output == problem.bias_pass:
            found[output] = f"{steps.backend.answer} ({steps.forward.function})"
        else:
            found[output] = f"{gradients} ({kernel_of(gradients).backward})"
    return found


def _layout_name(problem: ConvProblem) -> str:
    return "channels_last" if problem.channels_last else "contiguous"
