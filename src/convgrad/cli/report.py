"""``convgrad report``: what a training step, a script or a table of calls costs, as one page."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .app import BEGAN, BeforeAScript, Result, command, device_here, fail, finite, loaded_kernels, say, width
from .models import MODELS, with_inputs
from .options import OfModel, kind_of, writable

if TYPE_CHECKING:
    import torch

    from ..diagnostics import Profile


_PAGE = 1.0  # seconds, to draw it


@command("report", cls=BeforeAScript)
def report(
    what: Annotated[str, options.what("MODEL|SCRIPT|FILE", "What to report.", *MODELS)],
    args: options.ScriptArgs = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The page, report.html by default; NAME.json gets its data.")
    ] = None,
    against: Annotated[Path | None, typer.Option("--against", help="An earlier page or data, to compare with.")] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Seconds for all of it (after a script has ended).", callback=finite)
    ] = 20.0,
    device: options.Device = "cpu",
    shape: options.Input = "",
    dtype: options.Dtype = "",
    channels_last: options.ChannelsLast = False,
    stock: Annotated[bool, typer.Option("--stock", help="Run a script, and take nothing over.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Every group of equal layers, not the first five.")] = False,
    as_json: options.AsJson = False,
) -> Result:
    """Show a training step on one screen, and write it as one page: layers, avoidable costs, the roofline.

    For a model, a training step by PyTorch and by convgrad is timed alternately, in about twenty seconds. A script runs
    unmodified, to its end, and its exit status is the command's. A file is a table that run, trace or bench wrote as
    CSV, or the JSON of run or report. Options go before a script. With --json a page is written only with --out.

    Examples:
        convgrad report mymodel:make_model
        convgrad report --stock -o before.html train.py --epochs 1
        convgrad report --against before.html train.py --epochs 1
        convgrad report -o kernels.html kernels.csv
    """
    from rich.console import Console

    from ..diagnostics import Profile, profile_script, profile_table

    page = out or (None if as_json else Path("report.html"))
    for package in ("jinja2", "matplotlib") if page and page.suffix != ".json" else ():
        if find_spec(package) is None:
            raise fail(f"a page needs {package}", "pip install 'convgrad[report]', or -o report.json")
    target = writable(page)
    before = None if against is None else Profile.read(against)
    of_script, is_table, status = kind_of(what) == "script", what.endswith((".csv", ".json")), 0
    of = OfModel(shape, dtype, channels_last)
    of.only_for(not (of_script or is_table), what, device=device != "cpu")
    if (stock or args) and not of_script:
        given = f"the argument {args[0]!r}" if args and not stock else "--stock"
        raise fail(f"{given} is for a script, and {what!r} is none")
    stage = (status_line := Console(stderr=True).status("starting")).update
    with status_line if sys.stderr.isatty() else nullcontext():
        if of_script:
            profile, status = profile_script(
                what, args or (), stock=stock, seconds=seconds, stage=stage, kernels=loaded_kernels
            )
        elif is_table:
            profile = profile_table(what)
        else:
            left = seconds - (time.perf_counter() - BEGAN) - _PAGE
            profile = profile_of(what, device_here(device), of, left, stage)
        profile = profile if before is None else profile.against(before)
        if target is not None:
            stage("drawing the page")
            profile.save(target)
    say(profile.text(min(width(), 100), everything=everything))
    say(f"written to {page}")
    return Result(profile.to_dict(), status)


def profile_of(
    name: str, place: torch.device, of: OfModel, seconds: float = 20.0, stage: Callable[[str], object] = lambda _: None
) -> Profile:
    """Measure a training step of a model by name, in so many seconds."""
    from ..diagnostics import profile_model

    until = time.perf_counter() + seconds
    stage("making the model")
    model, inputs = with_inputs(name, place, of)
    given = {"--input": of.shape, "--dtype": of.dtype, "--device": "" if place.type == "cpu" else str(place)}
    words = [word for option, value in given.items() if value for word in (option, value)]
    tune = shlex.join(["convgrad", "tune", *words, *["--channels-last"] * of.last, name])
    left = max(0.1, until - time.perf_counter())
    try:
        return profile_model(model, inputs, what=name, tune=tune, seconds=left, stage=stage)
    except ValueError:  # of what cannot be profiled
        raise
    except Exception as error:  # of the model's own
        raise fail(
            f"{name!r} raised {type(error).__name__}: {error}",
            "--input states the shape of its input; or its function returns (model, example_inputs)",
        ) from error
