"""``convgrad explain``: which kernel, which layout, why, and how far from the limit; here and on other machines."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated

import typer

from .app import command, device_here, fail, say, say_json, width
from .models import MODELS, explained
from .options import (
    AsJson,
    ChannelsLast,
    Dtype,
    Input,
    Machines,
    Outputs,
    is_problem,
    outputs_named,
    problem_or,
    writable,
)

if TYPE_CHECKING:
    import torch

    from ..diagnostics import Explanation, Machine, ModelExplanation
    from ..problem import Output


@dataclass(frozen=True)
class Place:
    """A machine, and the dtype and layout to explain for it."""

    machine: Machine
    dtype: torch.dtype | None
    channels_last: bool

    @classmethod
    def parse(cls, text: str) -> Place:
        """Read ``"h100 bfloat16 channels_last"``: dtype and layout may stand among the words of the description."""
        from ..diagnostics import Machine
        from ..problem_text import DTYPES

        words = text.replace(",", " ").split()
        dtypes = [w for w in words if w in DTYPES and w not in ("bf16", "fp16")]  # these two are instructions
        rest = " ".join(w for w in words if w not in (*dtypes, "channels_last"))
        return cls(Machine.parse(rest or "here"), DTYPES[dtypes[0]] if dtypes else None, "channels_last" in words)


@command("explain")
def explain_command(
    what: Annotated[
        str,
        typer.Argument(
            metavar="PROBLEM|MODEL",
            help="A problem, a model's name, or module:factory.",
            autocompletion=problem_or(*MODELS),
        ),
    ],
    device: Machines = None,
    output: Outputs = None,
    layer: Annotated[str, typer.Option("--layer", "-l", help="Part of a layer's name, 7x7, depthwise, ...")] = "",
    dtype: Dtype = "",
    channels_last: ChannelsLast = False,
    shape: Input = "",
    measure: Annotated[bool | None, typer.Option("--measure/--no-measure", help="Time it on this machine.")] = None,
    rules: Annotated[bool, typer.Option("--rules/--no-rules", help="PyTorch's rules, one by one.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Every backend, unusable ones too; every layer.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", help="Also draw the roofline into this file, in the format of its ending.", callback=writable
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show which kernel computes each output, in which layout, why, and how far from the machine's limit.

    One layer is measured here unless --no-measure; a whole model is a table of its convolutions and their kernels, for
    which --layer or --json has the reasons, and with --measure its training step on one screen, as report shows it.

    Examples:

        convgrad explain g96mb8ic96ih56oc96kh7ph3

        convgrad explain "g96ic96ih56oc96kh7ph3 bfloat16 channels_last" --device "h100 cudnn 9.10"

        convgrad explain convnext

        convgrad explain convnext --layer 7x7 -o grad_weight -d here -d "h100 bfloat16 channels_last"

        convgrad explain mypackage.nets:make_model --input 4x3x512x512
    """
    from ..problem_text import DTYPES

    of_models = {"--layer": layer, "--dtype": dtype, "--channels-last": channels_last, "--input": shape}
    for option in (name for name, given in of_models.items() if given and is_problem(what)):
        raise fail(f"{option} is for a model, and {what!r} is a problem", f'"{what} bfloat16 channels_last" states it')
    places, outputs = [Place.parse(text) for text in device or ["here"]], outputs_named(output)
    if measure and not any(place.machine.is_here for place in places):
        raise fail("--measure times what is here, and no --device is", "-d here beside it")
    if measure and not (layer or is_problem(what)):
        _whole_step(what, places, output, shape, dtype, channels_last, everything, as_json)
        return
    if rules and not (layer or is_problem(what)):
        raise fail("--rules shows those of layers, and a whole model is a table of them", "name some with --layer")
    models: list[ModelExplanation] = []
    answers: list[Explanation] = []
    if is_problem(what):
        answers = [_one(what, p, outputs, measure) for p in places]
    else:
        for place in places:
            wanted, last = place.dtype or DTYPES[dtype or "float32"], place.channels_last or channels_last
            models.append(explained(what, place.machine, wanted, last, shape, outputs))
        if layer:
            answers = _details([m.select(layer) for m in models], measure)
            models = []
    if plot is not None:
        _draw(answers or models, plot)
    if as_json:
        say_json("explain", {"explanations": [a.to_dict() for a in answers], "models": [m.to_dict() for m in models]})
        return
    for i, text in enumerate(
        [*(m.text(width()) for m in models), *(a.text(width(), everything=everything) for a in answers)]
    ):
        print(text if not i else f"\n{text}")
        if rules and answers:
            _print_rules(answers[i])


def _whole_step(
    what: str,
    places: list[Place],
    output: list[str] | None,
    shape: str,
    dtype: str,
    channels_last: bool,
    everything: bool,
    as_json: bool,
) -> None:
    from .report import profile_of

    if output or len(places) > 1:
        raise fail("--measure times a model's whole step, here and with every output", "name some layers with --layer")
    dtypes = [str(places[0].dtype).removeprefix("torch.")] if places[0].dtype else [dtype]
    last = channels_last or places[0].channels_last
    profile = profile_of(what, device_here(places[0].machine.device_type), shape, dtypes[0], last)
    if as_json:
        say_json("report", profile.to_dict())
    else:
        print(profile.text(min(width(), 100), everything=everything))


def _one(text: str, place: Place, outputs: tuple[Output, ...] | None, measure: bool | None) -> Explanation:
    from .._compat import channels_last_of
    from ..diagnostics import explain_problem
    from ..problem import ConvProblem

    problem = ConvProblem.parse(text)
    problem = problem.replace(dtype=place.dtype or problem.dtype)
    if place.channels_last:
        problem = problem.replace(memory_format=channels_last_of(problem.ndim))
    return explain_problem(problem, outputs, place.machine, measure=measure is not False and place.machine.is_here)


def _details(models: list[ModelExplanation], measure: bool | None) -> list[Explanation]:
    """Layer by layer, for one machine after another; a linear layer counts as a convolution on a CPU only."""
    from ..diagnostics import measured

    result: dict[tuple[str, ...], list[Explanation]] = {}
    for layer in (layer for model in models for layer in model):
        result.setdefault(layer.names, []).append(layer.explanation)
    return [
        measured(one) if measure is not False and one.machine.is_here else one
        for machines in result.values()
        for one in machines
    ]


def _draw(answers: list[Explanation] | list[ModelExplanation], path: Path) -> None:
    if len(answers) != 1:
        raise fail(f"--plot draws one roofline, and these are {len(answers)}", "one --device, and no --layer")
    if find_spec("matplotlib") is None:
        raise fail("--plot needs matplotlib", "pip install 'convgrad[report]'")
    answers[0].plot(path)


def _print_rules(answer: Explanation) -> None:
    aten = answer.aten
    forward = any(r.output == answer.problem.bias_pass for r in answer.rows)
    say("why PyTorch itself runs what it runs:")
    for decision in (aten.backend if forward else aten.gradient_backend, aten.memory_format):
        say(indent(str(decision), "  "))
