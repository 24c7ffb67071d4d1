"""``convgrad bench``: backends and training steps against the best that PyTorch does."""

from __future__ import annotations

import sys
from operator import itemgetter
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..tables import Table, csv_text
from . import options
from .app import Result, app, command, device_here, fail, finite, say
from .models import MODELS
from .options import OfModel


class _Bench(TyperGroup):
    """`steps`, or what is not named by a word: `problems`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        begun = ctx.resilient_parsing and not args  # to complete the first word
        return super().parse_args(ctx, args if named or begun else ["problems", *args])


bench = typer.Typer(
    name="bench", cls=_Bench, help="How fast, against PyTorch's best: problems, layers of models, training steps."
)
app.add_typer(bench)


@command(
    "problems", of=bench, short_help="Problems, files of them, or the layers of models (the word may be left out)."
)
def problems(
    what: Annotated[list[str], options.what("PROBLEM|FILE|MODEL...", "Problems, files of them, or models.", *MODELS)],
    backend: options.Backends = None,
    output: options.Outputs = None,
    device: options.Device = "cpu",
    threads: options.Threads = 0,
    shape: options.Input = "",
    dtype: options.Dtype = "",
    channels_last: options.ChannelsLast = False,
    seconds: Annotated[float, typer.Option(help="Seconds for each line of the table.", callback=finite)] = 1.0,
    keep: Annotated[bool, typer.Option("--keep-memory/--return-memory", help="Keep freed memory (both sides).")] = True,
    limit: Annotated[bool, typer.Option("--limit/--no-limit", help="Measure the machine's limit if unknown.")] = True,
    transposed: options.Transposed = False,
    as_csv: options.CsvFile = None,
    as_json: options.AsJson = False,
) -> Result:
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
    from ..engine.measure import keep_memory
    from .bench_problems import run_problems
    from .problem_arguments import read_problems

    if "grad_bias" in (output or ()):
        raise fail("grad_bias is not timed on its own", "forward, grad_input or grad_weight")
    place = device_here(device)
    given, directions = read_problems(what, transposed, (place, OfModel(shape, dtype, channels_last)))
    if keep:
        keep_memory()
    return run_problems(given, directions, backend or [], output or [], place, seconds, limit, as_csv)


@command("steps", of=bench, short_help="Whole training steps of models.")
def steps(
    models: Annotated[list[str], options.what("MODEL...", "Models, or module:factory.", *MODELS)],
    threads: options.Threads = 0,
    layout: options.Layout = "",
    device: options.Device = "cpu",
    shape: options.Input = "",
    dtype: options.Dtype = "",
    seconds: Annotated[float, typer.Option(help="Seconds for each model.", callback=finite)] = 20.0,
    measure: Annotated[bool, typer.Option("--measure", help="First measure each convolution, as tune does.")] = False,
    autocast: Annotated[bool, typer.Option("--autocast", help="Both sides under autocast, in bfloat16.")] = False,
    as_csv: options.CsvFile = None,
    as_json: options.AsJson = False,
) -> Result:
    """A training step of models (forward, backward, SGD) by PyTorch and by convgrad, in both layouts.

    A model of your own is a function that returns it, or it and what it is called with (a tensor, a tuple or a dict);
    otherwise it gets two images of 224 x 224, or of the shape of --input. With --layout channels_last, the model and
    its inputs are in it from the start.

    All forms of the step are timed alternately; the interval is that of the ratio to PyTorch's, at 95 %. The layers and
    the error of the gradients are in `convgrad report`.

    Examples:
        convgrad bench steps mobilenet_v2 --threads 1
        convgrad bench steps my_models:build --csv steps.csv
        convgrad bench steps torchvision.models:resnet18 --layout channels_last --seconds 60
    """
    import torch

    from ..diagnostics import Variant
    from ..engine.measure import Ratio, conditions, keep_memory
    from .problem_arguments import read_problems
    from .report import profile_of
    from .tune import jobs_of, measure_all

    keep_memory()
    place, of = device_here(device), OfModel(shape, dtype, layout == "channels_last")
    rows: list[dict[str, Any]] = []
    warnings: dict[str, list[str]] = {}
    interrupted = False
    try:
        for name in models:
            with torch.autocast(place.type, torch.bfloat16, enabled=autocast):
                if measure:
                    given, _ = read_problems([name], models=(place, of), linear=True)
                    measure_all([*dict.fromkeys(jobs_of(given))], place)
                profile = profile_of(name, place, of, seconds)
            say("\n".join([f"{name}: {profile.finding}", *profile.warnings]))
            if profile.warnings:
                warnings[name] = [*profile.warnings]
            rows += [{"model": name, **vars(variant)} for variant in profile.variants]
    except KeyboardInterrupt:
        interrupted = True
        say("convgrad: interrupted", sys.stderr)
    say(Table(rows, {
        "model": (itemgetter("model"), ""),
        "step": (itemgetter("name"), ""),
        "ms": (itemgetter("milliseconds"), ".4g"),
        "speed": (lambda r: r["speedup"] and str(Ratio(r["speedup"], r["low"], r["high"])), ""),
        "note": (lambda r: "the machine was busy" if r["speedup"] and r["model"] in warnings else "", ""),
    }))  # fmt: skip
    said = conditions(str(place))
    say(said)
    if as_csv is not None:
        titles = ["model", *Variant.__annotations__]
        as_csv.write_text(csv_text([titles, *(row.values() for row in rows)]), encoding="utf-8")
    return Result({"conditions": said, "steps": rows, "warnings": warnings}, 130 if interrupted else 0)
