"""``convgrad bench``: backends, real layers and whole models against the best that PyTorch does."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .app import app, command, device_here, fail, finite, say_json
from .options import AsJson, Backends, CsvFile, Device, Layout, Outputs, StepLayout, Threads, Transposed, problem_or


class _Bench(TyperGroup):
    """`layers`, `steps`, or what is not named by a word: problems."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        begun = ctx.resilient_parsing and not args  # to complete the first word
        return super().parse_args(ctx, args if named or begun else ["problems", *args])


bench = typer.Typer(
    cls=_Bench, help="How fast, against PyTorch's best: problems, layers of real models, training steps."
)
app.add_typer(bench, name="bench")


Models = Annotated[
    list[str] | None, typer.Argument(help="Models, module:factory, or files of problems; all models by default.")
]
Minutes = Annotated[float, typer.Option(help="Stop after so many minutes; 0: no limit.", min=0)]
Busy = Annotated[bool, typer.Option("--busy", help="Run another process on each core.")]
Measured = Annotated[bool, typer.Option("--measure", help="First measure each convolution, as `convgrad tune` does.")]
Resume = Annotated[bool, typer.Option("--resume", help="Add the missing rows to the CSV file.")]


@command("problems", of=bench, short_help="Problems, or files of them (the default: the word may be left out).")
def problems(
    what: Annotated[
        list[str],
        typer.Argument(metavar="PROBLEM|FILE...", help="Problems, or files of them.", autocompletion=problem_or()),
    ],
    backend: Backends = None,
    output: Outputs = None,
    device: Device = "cpu",
    seconds: Annotated[float, typer.Option(help="Seconds for each line of the table.", callback=finite)] = 1.0,
    keep: Annotated[bool, typer.Option("--keep-memory/--return-memory", help="Keep freed memory (both sides).")] = True,
    limit: Annotated[bool, typer.Option("--limit/--no-limit", help="Measure the machine's limit if unknown.")] = True,
    transposed: Transposed = False,
    as_csv: CsvFile = None,
    as_json: AsJson = False,
) -> None:
    """Time backends against the better of PyTorch as given and PyTorch through channels_last and back.

    Each backend is checked first (exactly on integers, and against the error bound); a wrong one gets no time and the
    exit status 1, as does a command that could time nothing. Both sides are timed alternately in this process; the
    interval is that of the ratio, at 95 %. Interrupted, it prints the lines that it has and ends with 130. A file's
    --dir says which outputs are timed, unless --output does.

    Examples:

        convgrad bench g32mb8ic32ih56oc32oh56kh3ph1

        convgrad bench shapes_mobilenet --json --csv times.csv

        convgrad --kernels my_kernels.py bench g32mb8ic32ih56oc32oh56kh3ph1 --backend mine -o forward
    """
    from .bench_problems import run_problems

    if "grad_bias" in (output or ()):
        raise fail("grad_bias is not timed on its own", "forward, grad_input or grad_weight")
    place = device_here(device)
    _end(*run_problems(what, backend or [], output or [], place, seconds, keep, limit, transposed, as_csv), as_json)


@command("layers", of=bench, short_help="Every distinct convolution of real models.")
def layers(
    models: Models = None,
    threads: Threads = 0,
    layout: Layout = "",
    batch: Annotated[int, typer.Option(help="Batch of the models of transformers.", min=1)] = 4,
    size: Annotated[int, typer.Option(help="Height and width of their images.", min=1)] = 224,
    seconds: Annotated[float, typer.Option(help="Seconds for each layer.", callback=finite)] = 0.5,
    minutes: Minutes = 0.0,
    busy: Busy = False,
    as_csv: CsvFile = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Every distinct convolution of real models: PyTorch as given, its best layout, convgrad by rules, and measured.

    A layer that was never measured here is measured first, as `convgrad tune` does it, and remembered. Results are
    compared with PyTorch's before they are timed; all sides alternate. After an interruption, or --minutes, it goes on
    with --resume.

    Examples:

        convgrad bench layers mobilenet_v2 --threads 1

        convgrad bench layers --threads 2 --minutes 5 --csv layers.csv --resume
    """
    from .bench_layers import run_layers
    from .bench_results import Given

    given = Given(models or [], threads, layout, seconds, minutes, busy, as_csv, resume)
    _end(*run_layers(given, batch, size), as_json)


@command("steps", of=bench, short_help="Whole training steps of real models.")
def steps(
    models: Models = None,
    threads: Threads = 0,
    layout: StepLayout = "",
    seconds: Annotated[
        float, typer.Option(help="Seconds for each comparison: images shrink until it fits.", callback=finite)
    ] = 15.0,
    minutes: Minutes = 0.0,
    measure: Measured = False,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile both sides with torch.compile.")] = False,
    autocast: Annotated[bool, typer.Option("--autocast", help="Both sides under autocast, in bfloat16.")] = False,
    busy: Busy = False,
    as_csv: CsvFile = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """A training step of real models (forward, backward, SGD): stock against `accelerate_`, both in the same layout.

    A model of your own is a function that returns it, or it and what it is called with (a tensor, a tuple or a dict);
    otherwise it gets images.

    In the layout "auto", stock is contiguous, against accelerate_(model, "auto"), which converts the model to
    channels_last if that is measured to be faster.

    The rules choose, whatever was measured here before, or with --measure what is measured now; a file may hold rows
    of both, of compiled models and of autocast. A model of images means three comparisons, one in each layout, unless
    --layout names one; any other means one. In each the losses are compared first; then steps of the two alternate, for
    --seconds. Interrupted, or out of time, it goes on with --resume.

    Examples:

        convgrad bench steps mobilenet_v2 --threads 1

        convgrad bench steps my_models:build

        convgrad bench steps --measure --threads 2 --minutes 5 --csv steps.csv --resume
    """
    from .bench_results import Given
    from .bench_steps import run_steps

    given = Given(models or [], threads, layout, seconds, minutes, busy, as_csv, resume)
    _end(*run_steps(given, measure, compiled, autocast), as_json)


def _end(status: int, data: dict[str, Any], as_json: bool) -> None:
    if as_json:
        say_json("bench", data)
    raise typer.Exit(status)
