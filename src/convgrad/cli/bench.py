"""``convgrad bench``: backends and training steps against the best that PyTorch does."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .app import app, command, device_here, fail, finite, say_json
from .models import MODELS
from .options import (
    AsJson,
    Backends,
    ChannelsLast,
    CsvFile,
    Device,
    Dtype,
    Input,
    Outputs,
    StepLayout,
    Threads,
    Transposed,
    problem_or,
)


class _Bench(TyperGroup):
    """`steps`, or what is not named by a word, or by the word `layers`: `problems`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = args[1:] if args[:1] == ["layers"] else args
        named = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        begun = ctx.resilient_parsing and not args  # to complete the first word
        return super().parse_args(ctx, args if named or begun else ["problems", *args])


bench = typer.Typer(cls=_Bench, help="How fast, against PyTorch's best: problems, layers of models, training steps.")
app.add_typer(bench, name="bench")


@command(
    "problems", of=bench, short_help="Problems, files of them, or the layers of models (the word may be left out)."
)
def problems(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="PROBLEM|FILE|MODEL...",
            help="Problems, files of them, or models.",
            autocompletion=problem_or(*MODELS),
        ),
    ],
    backend: Backends = None,
    output: Outputs = None,
    device: Device = "cpu",
    threads: Threads = 0,
    shape: Input = "",
    dtype: Dtype = "",
    channels_last: ChannelsLast = False,
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
    --dir says which outputs are timed, unless --output does; of a model each distinct convolution is timed.

    Examples:

        convgrad bench g32mb8ic32ih56oc32oh56kh3ph1

        convgrad bench mypackage.nets:make_model --input 8x3x224x224

        convgrad bench shapes_mobilenet --json --csv times.csv

        convgrad --kernels my_kernels.py bench g32mb8ic32ih56oc32oh56kh3ph1 --backend mine -o forward
    """
    from ..engine.ab_timer import keep_memory
    from .bench_problems import run_problems
    from .problem_arguments import read_problems

    if "grad_bias" in (output or ()):
        raise fail("grad_bias is not timed on its own", "forward, grad_input or grad_weight")
    place = device_here(device)
    given, directions = read_problems(what, transposed, (place, shape, dtype, channels_last))
    if keep:
        keep_memory()
    _end(*run_problems(given, directions, backend or [], output or [], place, seconds, limit, as_csv), as_json)


@command("steps", of=bench, short_help="Whole training steps of models.")
def steps(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Models, or module:factory.", autocompletion=problem_or(*MODELS)),
    ],
    threads: Threads = 0,
    layout: StepLayout = "",
    shape: Input = "",
    seconds: Annotated[float, typer.Option(help="Seconds for each comparison.", callback=finite)] = 15.0,
    measure: Annotated[bool, typer.Option("--measure", help="First measure each convolution, as tune does.")] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile both sides with torch.compile.")] = False,
    autocast: Annotated[bool, typer.Option("--autocast", help="Both sides under autocast, in bfloat16.")] = False,
    as_csv: CsvFile = None,
    as_json: AsJson = False,
) -> None:
    """A training step of models (forward, backward, SGD): stock against `accelerate_`, both in the same layout.

    A model of your own is a function that returns it, or it and what it is called with (a tensor, a tuple or a dict);
    otherwise it gets two images of 224 x 224, or of the shape of --input.

    In the layout "auto", stock is contiguous, against accelerate_(model, "auto"), which converts the model to
    channels_last if that is measured to be faster.

    The rules choose, whatever was measured here before, or with --measure what is measured now. A model of images means
    three comparisons, one in each layout, unless --layout names one; any other means one. In each the losses are
    compared first; then steps of the two alternate, for --seconds. Interrupted, it prints the rows that it has.

    Examples:

        convgrad bench steps mobilenet_v2 --threads 1

        convgrad bench steps my_models:build

        convgrad bench steps my_models:build --measure --csv steps.csv
    """
    from ..engine.ab_timer import keep_memory
    from .bench_steps import run_steps

    keep_memory()
    _end(*run_steps(models, layout, shape, seconds, measure, compiled, autocast, as_csv), as_json)


def _end(status: int, data: dict[str, Any], as_json: bool) -> None:
    if as_json:
        say_json("bench", data)
    raise typer.Exit(status)
