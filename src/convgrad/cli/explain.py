"""``convgrad explain``: which kernel, which layout, why, and how far from the limit; here and on other machines."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .app import Result, command, device_here, fail, say, width
from .models import MODELS, explained
from .options import OfModel, kind_of, outputs_named
from .report import profile_of

if TYPE_CHECKING:
    from ..diagnostics import Explanation, Machine, ModelExplanation


@command("explain")
def explain_command(
    what: Annotated[str, options.what("PROBLEM|MODEL", "A problem, a model's name, or module:factory.", *MODELS)],
    device: options.Machines = None,
    output: options.Outputs = None,
    layer: Annotated[str, typer.Option("--layer", "-l", help="Part of a layer's name, 7x7, depthwise, ...")] = "",
    dtype: options.Dtype = "",
    channels_last: options.ChannelsLast = False,
    shape: options.Input = "",
    measure: Annotated[bool | None, typer.Option("--measure/--no-measure", help="Time it on this machine.")] = None,
    rules: Annotated[bool, typer.Option("--rules/--no-rules", help="PyTorch's rules, one by one.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Every backend, unusable ones too; every layer.")] = False,
    plot: Annotated[
        Path | None, options.file("--plot", help="Also draw the roofline into this file, in the format of its ending.")
    ] = None,
    as_json: options.AsJson = False,
) -> Result:
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
    from .._compat import channels_last_of
    from ..diagnostics import explain_problem, measured
    from ..problem import DTYPES, ConvProblem

    of, single = OfModel(shape, dtype, channels_last), kind_of(what) == "problem"
    of.only_for(not single, what, f'"{what} bfloat16 channels_last" states it', layer=layer)
    places, outputs = [_place(text, of) for text in device or ["here"]], outputs_named(output)
    if measure and not any(machine.is_here for machine, _ in places):
        raise fail("--measure times what is here, and no --device is", "-d here beside it")
    if rules and not (layer or single):
        raise fail("--rules shows those of layers, and a whole model is a table of them", "name some with --layer")
    if measure and not (layer or single):
        if output or plot or len(places) > 1:
            raise fail(
                "--measure times a model's whole step, here, every output; convgrad report draws it",
                "name some layers with --layer",
            )
        ((machine, of),) = places
        profile = profile_of(what, device_here(machine.device_type), of)
        say(profile.text(min(width(), 100), everything=everything))
        return Result(profile.to_dict(), command="report")
    models: list[ModelExplanation] = []
    answers: list[Explanation] = []
    for machine, of in places:
        if single:
            problem = ConvProblem.parse(what)
            layout = channels_last_of(problem.ndim) if of.last else problem.memory_format
            problem = problem.replace(memory_format=layout, dtype=DTYPES[of.dtype] if of.dtype else problem.dtype)
            answers.append(explain_problem(problem, outputs, machine))
        else:
            models.append(explained(what, machine, of, outputs))
    if layer:  # one after another, each for all machines; a linear layer counts as a convolution on a CPU only
        chosen = [one for model in models for one in model.select(layer)]
        names = dict.fromkeys(one.names for one in chosen)
        answers, models = [one.explanation for name in names for one in chosen if one.names == name], []
    if measure is not False:
        answers = [measured(answer) if answer.machine.is_here else answer for answer in answers]
    if plot is not None:
        drawn = answers or models
        if len(drawn) != 1:
            raise fail(f"--plot draws one roofline, and these are {len(drawn)}", "one --device, and no --layer")
        if find_spec("matplotlib") is None:
            raise fail("--plot needs matplotlib", "pip install 'convgrad[report]'")
        drawn[0].plot(plot)
    texts = [
        *(model.text(width()) for model in models),
        *(answer.text(width(), everything=everything) + (_rules(answer) if rules else "") for answer in answers),
    ]
    say("\n\n".join(texts))
    return Result({"explanations": [a.to_dict() for a in answers], "models": [m.to_dict() for m in models]})


def _place(text: str, of: OfModel) -> tuple[Machine, OfModel]:
    """Read ``"h100 bfloat16 channels_last"``: a machine, among whose words a dtype and the layout may be stated."""
    from ..diagnostics import Machine
    from ..problem import DTYPES

    words = text.replace(",", " ").split()
    dtypes = [w for w in words if w in DTYPES and w not in ("bf16", "fp16")]  # these two are instructions
    if len(dtypes) > 1:
        raise fail(f"one dtype at a time, got {' and '.join(dtypes)}", "--device may be repeated")
    rest = " ".join(w for w in words if w not in (*dtypes, "channels_last"))
    stated = of._replace(dtype=next(iter(dtypes), of.dtype), last=of.last or "channels_last" in words)
    return Machine.parse(rest if rest or not words else "here"), stated


def _rules(answer: Explanation) -> str:
    """PyTorch's own rules for a problem, one by one."""
    real = ", for each of the three real convolutions of which this complex one is made"
    title = f"\nwhy PyTorch itself runs what it runs{real if answer.problem.dtype.is_complex else ''}:\n"
    return title + "\n".join(indent(str(one), "  ") for one in (answer.aten.backend, answer.aten.memory_format))
