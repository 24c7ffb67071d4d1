"""``convgrad run``: an unmodified script with every convolution taken over or observed, and which kernel ran."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import Result, command, fail, json_text, loaded_kernels, width
from .options import CsvFile, JsonFile, file, refuse_option


@command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run_command(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script, or with -m a module's name.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments.")] = None,
    stock: Annotated[bool, typer.Option("--stock", help="Take nothing over, and show what the script runs.")] = False,
    accelerate: Annotated[
        bool, typer.Option("--accelerate", help="Do what accelerate_ does to each model that the script trains.")
    ] = False,
    rows: Annotated[int, typer.Option("--rows", min=0, help="Rows to print, then their sum; 0: all.")] = 20,
    trace: Annotated[
        Path | None, file("--trace", help="Write the third training step there, for Perfetto or chrome://tracing.")
    ] = None,
    csv: CsvFile = None,
    as_json: JsonFile = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module's name, as for python -m.")] = False,
    measure: Annotated[
        bool, typer.Option("--limit/--no-limit", help="Measure the machine's limit if unknown, or too low.")
    ] = True,
) -> Result:
    """Run a training script unmodified; at the end, say for each convolution which kernel ran, how often, how long.

    Options of convgrad go before the script, those of the script after it. The table goes to standard error; the
    exit status is the script's. The processes that it starts (torchrun, DataLoader, multiprocessing) are counted, too.

    Examples:
        convgrad run train.py --epochs 3
        convgrad run --accelerate train.py
        convgrad run --trace step.json train.py
        convgrad run --stock --csv kernels.csv train.py
        convgrad run -m torch.distributed.run --nproc-per-node 2 train.py
    """
    from ..diagnostics import run_script

    refuse_option(script)
    if stock and accelerate:
        raise fail("--stock and --accelerate exclude each other")
    try:
        status = run_script(
            script, args or (), stock=stock, accelerate=accelerate, csv=csv, module=module, measure=measure,
            width=width(), first=rows or None, trace=trace, kernels=loaded_kernels,
            then=as_json and (lambda data: as_json.write_text(json_text("run", data) + "\n", encoding="utf-8")),
        )  # fmt: skip
    except FileNotFoundError as error:
        hint = f"it was looked for in {Path.cwd()}; convgrad's own options stand before the script"
        raise fail(str(error), hint) from None
    return Result(None, status)
