"""`explain`, asked with whatever is at hand: a problem or its text, operands, a module, a whole model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..problem import ConvProblem, Output
from .aten_rules import Machine, TensorSpec
from .aten_rules.select import DeviceLike
from .capture import Captured, Operands, capture
from .explanation import Explanation, explain_problem, machine_for

__all__ = ["Layer", "ModelExplanation", "explain", "explain_captured"]


@dataclass(frozen=True)
class Layer:
    """One convolution of a model, and every place where the same one runs.

    Args:
        names: of the modules, in order; one that runs twice stands here twice.
        kind: class of the module.
        explanation: what would run for it.
    """

    names: tuple[str, ...]
    kind: str
    explanation: Explanation

    @property
    def problem(self) -> ConvProblem:
        return self.explanation.problem

    def matches(self, pattern: str) -> bool:
        """Whether a part of a name, a kernel size such as ``7x7``, ``depthwise`` or ``pointwise`` means this layer."""
        p = self.problem
        facts = {"x".join(map(str, p.kernel_size))} | {
            w for w in ("depthwise", "pointwise", "transposed") if getattr(p, w)
        }
        words = pattern.split()
        return all(w in facts or any(re.search(re.escape(w), name) for name in self.names) for w in words)


@dataclass(frozen=True)
class ModelExplanation:
    """What would run for every convolution of a model; equal ones are one line. ``str()`` is a table."""

    machine: Machine
    layers: tuple[Layer, ...]

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def select(self, pattern: str) -> ModelExplanation:
        """The layers that a pattern means: a part of a name, ``7x7``, ``depthwise``, or several words at once.

        Raises:
            ValueError: there is none; the message lists names.
        """
        found = tuple(layer for layer in self.layers if layer.matches(pattern))
        if not found:
            names = ", ".join(layer.names[0] or layer.kind for layer in self.layers[:8])
            raise ValueError(f"no convolution of this model matches {pattern!r}; there are {names} ...")
        return ModelExplanation(self.machine, found)

    def _rows(self) -> list[tuple[str, ...]]:
        outputs: list[Output] = ["forward", "grad_input", "grad_weight"]
        rows: list[tuple[str, ...]] = [("layer", "times", "GFLOP", "MB", "best", *outputs, "problem")]
        for layer in self.layers:
            e, p, n = layer.explanation, layer.problem, len(layer.names)
            chosen = {r.output: r for r in e.rows if r.chosen}
            cells = []
            for o in outputs:
                row = chosen.get(o)
                inside = f" [{row.runs.split(' ')[0]}]" if row is not None and row.runs else ""
                cells.append("" if row is None else f"{row.backend}{inside}")
            least = "" if e.limit_seconds is None else f"{n * e.limit_seconds * 1e3:.3g} ms"
            name = layer.names[0] or layer.kind
            rows.append(
                (
                    name,
                    str(n),
                    f"{n * p.flops / 1e9:.3f}",
                    f"{n * p.least_bytes / 1e6:.1f}",
                    least,
                    *cells,
                    str(p.replace(name="")),
                )
            )
        return rows

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
        count = sum(len(layer.names) for layer in self.layers)
        return "\n".join([f"{count} convolutions, {len(self.layers)} different, on {self.machine}", *lines])

    def _repr_html_(self) -> str:
        from html import escape

        head, *body = self._rows()
        table = "<tr>" + "".join(f"<th>{escape(h)}</th>" for h in head) + "</tr>"
        table += "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in r) + "</tr>" for r in body)
        return f"<p>on {escape(str(self.machine))}</p><table>{table}</table>"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for json."""
        return {
            "machine": str(self.machine),
            "layers": [{"names": list(x.names), "kind": x.kind, **x.explanation.to_dict()} for x in self.layers],
        }


def explain(
    what: ConvProblem | str | Tensor | TensorSpec | nn.Module,
    *args: Any,
    device: DeviceLike = None,
    outputs: Output | Sequence[Output] | None = None,
    measure: bool = False,
    **kwargs: Any,
) -> Explanation | ModelExplanation:
    """For each output of a convolution, every backend: chosen or each reason against, layout, workspace, and the limit.

    Args:
        what: a `ConvProblem` or its text; an input, followed by a weight and the arguments of ``torch.convolution``;
            a module or a whole model, followed by what it is called with (tensors on the meta device are enough).
        device: None for the operands' own device; or a description of a machine that is not here, such as
            ``"h100 cudnn 9.10"``, ``"rocm gfx942"``, ``"xpu"``, ``"cpu arm"``.
        outputs: one or some of ``forward, grad_input, grad_weight, grad_bias``; all where none are given.
        measure: also time the chosen backend and ATen here.

    Returns:
        An `Explanation`, or for a model with several convolutions a `ModelExplanation`. Both print as a table, show as
        one in a notebook, and give plain data by ``to_dict()``.

    Raises:
        TypeError: nothing that could be explained.
        ShapeError: operands that do not belong together.
        ValueError: a text, an output or a description that cannot be read; a model without a convolution.

    Equivalent to:
        >>> import torch, convgrad
        >>> e = convgrad.explain(torch.ones(1, 8, 9, 9), torch.ones(8, 1, 3, 3), groups=8, device="h100 cudnn 9.10")
        >>> e.aten.backend.backend
        'CudaDepthwise2d'
    """
    if isinstance(what, nn.Module):
        machine = machine_for(_place(device, args))
        found = capture(what, args, kwargs, machine)
        if not found:
            raise ValueError(f"no convolution ran in this {type(what).__name__}")
        return explain_captured(found, machine, outputs, measure=measure)
    if isinstance(what, (Tensor, TensorSpec)):
        operands = Operands.of(what, *args, **kwargs)
        place = device if device is not None else _device_of(operands.input.device_type)
        return explain_problem(operands.problem(machine_for(place)), outputs, place, measure=measure)
    if args or kwargs:
        raise TypeError(f"explain: a problem says everything itself; unexpected {[*map(str, args), *kwargs]}")
    problem = ConvProblem.parse(what) if isinstance(what, str) else what
    if not isinstance(problem, ConvProblem):
        raise TypeError(
            f"explain takes a problem or its text, an input and a weight, or a module; got {type(what).__name__}"
        )
    return explain_problem(problem, outputs, device, measure=measure)


def _place(device: DeviceLike, args: tuple[Any, ...]) -> DeviceLike:
    tensors = [a for a in args if isinstance(a, Tensor)]
    return _device_of(tensors[0].device.type) if device is None and tensors else device


def _device_of(kind: str) -> DeviceLike:
    """The operands' device; the CPU for tensors that only exist as descriptions."""
    return torch.device("cpu" if kind == "meta" else kind)


def explain_captured(
    found: Sequence[Captured],
    device: DeviceLike = None,
    outputs: Output | Sequence[Output] | None = None,
    *,
    measure: bool = False,
) -> Explanation | ModelExplanation:
    """The same for convolutions that were captured before: equal ones are explained once."""
    machine = machine_for(device)
    names: dict[ConvProblem, list[str]] = {}
    kinds: dict[ConvProblem, str] = {}
    for one in found:
        problem = one.operands.problem(machine)
        names.setdefault(problem, []).append(one.name)
        kinds.setdefault(problem, one.kind)
    layers = tuple(
        Layer(tuple(n), kinds[p], explain_problem(p.replace(name=n[0]), outputs, machine, measure=measure))
        for p, n in names.items()
    )
    if len(layers) == 1 and layers[0].names == ("",):
        return layers[0].explanation
    return ModelExplanation(machine, layers)
