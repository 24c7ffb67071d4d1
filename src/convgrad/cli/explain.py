"""``convgrad explain``: which kernel, which layout, why, and how far from the limit; here and on other machines."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from .._compat import channels_last_of
from ..diagnostics import Explanation, Layer, Machine, ModelExplanation, explain, explain_problem
from ..problem import ConvProblem, Output
from ..problem_text import DTYPES
from .app import app, fail, outputs_named, say, width
from .models import build, example_input

__all__ = ["explain_command"]


@dataclass(frozen=True)
class Place:
    """A machine, and the dtype and layout to explain for it."""

    machine: Machine
    dtype: torch.dtype | None
    channels_last: bool

    @classmethod
    def parse(cls, text: str) -> Place:
        """Read ``"h100 bfloat16 channels_last"``: dtype and layout may stand among the words of the description."""
        words = text.replace(",", " ").split()
        dtypes = [w for w in words if w in DTYPES and w not in ("bf16", "fp16")]  # these two are instructions
        rest = " ".join(w for w in words if w not in (*dtypes, "channels_last"))
        return cls(Machine.parse(rest or "here"), DTYPES[dtypes[0]] if dtypes else None, "channels_last" in words)


def _is_problem(text: str) -> bool:
    return re.match(r"(g|mb|ic)\d", text.strip()) is not None


@app.command("explain")
def explain_command(
    what: Annotated[str, typer.Argument(metavar="PROBLEM|MODEL", help="A problem, a model's name, or module:factory.")],
    device: Annotated[
        list[str] | None,
        typer.Option("--device", "-d", help="A machine, with dtype and channels_last if wanted; may be repeated."),
    ] = None,
    output: Annotated[list[str] | None, typer.Option("--output", "-o", help="forward, grad_input, ...")] = None,
    layer: Annotated[str, typer.Option("--layer", "-l", help="Part of a layer's name, 7x7, depthwise, ...")] = "",
    dtype: Annotated[str, typer.Option(help="Dtype of the model, where the device says none; else float32.")] = "",
    channels_last: Annotated[bool, typer.Option("--channels-last", help="Run the model in channels_last.")] = False,
    shape: Annotated[str, typer.Option("--input", help="Shape of the model's input, 8x3x224x224.")] = "",
    measure: Annotated[bool | None, typer.Option("--measure/--no-measure", help="Time what is here.")] = None,
    rules: Annotated[bool, typer.Option("--rules/--no-rules", help="PyTorch's rules, one by one.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print plain data.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw the roofline into this file, as PNG.")] = None,
) -> None:
    """Which kernel computes each output, in which layout, why, and how far from the machine's limit.

    One layer is measured here unless --no-measure; a whole model is a table of its convolutions.

    Examples:

        convgrad explain g96mb8ic96ih56oc96kh7ph3

        convgrad explain "g96ic96ih56oc96kh7ph3 bfloat16 channels_last" --device "h100 cudnn 9.10"

        convgrad explain convnext

        convgrad explain convnext --layer 7x7 -o grad_weight -d here -d "h100 bfloat16 channels_last"

        convgrad explain mypackage.nets:make_model --input 4x3x512x512
    """
    places = [Place.parse(text) for text in device or ["here"]]
    outputs = outputs_named(output)
    if dtype and dtype not in DTYPES:
        raise fail(f"unknown dtype {dtype!r}", "float32, float64, bfloat16 or float16")
    answers: list[Explanation] | list[ModelExplanation]
    if _is_problem(what):
        of_models = {"--layer": layer, "--dtype": dtype, "--channels-last": channels_last, "--input": shape}
        for option in (name for name, given in of_models.items() if given):
            raise fail(
                f"{option} is for a model, and {what!r} is a problem", f'"{what} bfloat16 channels_last" states it'
            )
        answers = [_one(ConvProblem.parse(what), p, outputs, measure) for p in places]
    else:
        models = [_model(what, p, DTYPES[dtype or "float32"], channels_last, shape, outputs) for p in places]
        models = [m.select(layer) for m in models] if layer else models
        answers = _details(models, outputs, measure) if layer else models
    if plot is not None:
        _draw(answers, plot)
    if as_json:
        print(json.dumps([a.to_dict() for a in answers], indent=2))
        return
    _print(answers, rules)


def _one(problem: ConvProblem, place: Place, outputs: tuple[Output, ...] | None, measure: bool | None) -> Explanation:
    problem = problem.replace(dtype=place.dtype or problem.dtype)
    if place.channels_last:
        problem = problem.replace(memory_format=channels_last_of(problem.ndim))
    return explain_problem(problem, outputs, place.machine, measure=_measures(place.machine, measure))


def _measures(machine: Machine, wanted: bool | None) -> bool:
    """Whether something is timed: only on this machine, and not against the user's wish."""
    return wanted is not False and machine == Machine.here()


def _model(
    name: str, place: Place, dtype: torch.dtype, channels_last: bool, shape: str, outputs: tuple[Output, ...] | None
) -> ModelExplanation:
    """A model on a machine, in the dtype and layout that belong to it."""
    dtype, last = place.dtype or dtype, place.channels_last or channels_last
    net: nn.Module = build(name).to(dtype=dtype)
    x: Any = example_input(name, shape, dtype, last)
    if last:
        net = net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    found = explain(net, x, device=place.machine, outputs=outputs)
    if isinstance(found, Explanation):
        return ModelExplanation(found.machine, (Layer((name,), name, found),))
    return found


def _details(
    models: list[ModelExplanation], outputs: tuple[Output, ...] | None, measure: bool | None
) -> list[Explanation]:
    """Layer by layer, every machine after the other."""
    found = [layer.explanation for layers in zip(*models, strict=False) for layer in layers]
    return [
        explain_problem(e.problem, outputs, e.machine, measure=True) if _measures(e.machine, measure) else e
        for e in found
    ]


def _draw(answers: list[Explanation] | list[ModelExplanation], path: Path) -> None:
    if len(answers) != 1:
        raise fail(f"--plot draws one roofline, and these are {len(answers)}", "one --device, and no --layer")
    if find_spec("matplotlib") is None:
        raise fail("--plot needs matplotlib", "pip install 'convgrad[report]'")
    answers[0].plot(path)


def _print(answers: list[Explanation] | list[ModelExplanation], rules: bool) -> None:
    for i, answer in enumerate(answers):
        if i:
            print()
        print(answer.text(width()))
        if rules and isinstance(answer, Explanation):
            aten = answer.aten
            say("why PyTorch itself runs what it runs:")
            forward = any(r.output == answer.problem.bias_pass for r in answer.rows)
            decision = aten.backend if forward else aten.gradient_backend
            say("  " + str(decision).replace("\n", "\n  "))
            for rule in aten.memory_format.rules:
                say(f"  {'yes' if rule.holds else 'no '}  layout: {rule.text}: {rule.value}")
