"""The commands, their options and their errors: one line each, with a hint."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from .. import __version__
from ..custom import load_kernels
from ..errors import ConvgradError
from ..problem import OUTPUTS, Output, in_order

__all__ = ["RequestError", "app", "device_here", "fail", "out", "outputs_named", "run"]

app = typer.Typer(
    name="convgrad",
    help="Every gradient of a convolution: which kernel, why, how fast, and whether it is right.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(shown: bool) -> None:
    if shown:
        print(__version__)
        raise typer.Exit


@app.callback()
def main(
    kernels: Annotated[
        list[str] | None, typer.Option("--kernels", "-k", help="A script or module that registers kernels; repeatable.")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Every gradient of a convolution: which kernel, why, how fast, and whether it is right."""
    for source in kernels or ():
        try:
            load_kernels(source)
        except ModuleNotFoundError as error:
            if error.name is None or not (source == error.name or source.startswith(f"{error.name}.")):
                raise  # it is there, and misses something itself
            raise fail(f"there is no module {source!r}", "a module's name, or a script that ends in .py") from None


#: Modules of this package that add their command when they are imported, in the order in which help lists them.
_COMMANDS = ("info", "explain", "check", "bench", "run", "names")


def out() -> Console:
    """Standard output, as wide as a table needs where it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else 400, highlight=False, soft_wrap=True, markup=False)


#: What typer raises for arguments that it does not understand: click's class, or that of the click which it carries.
_UsageError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class RequestError(Exception):
    """Something that the user can put right."""


def fail(message: str, hint: str = "") -> Exception:
    """An error for the user: one line and a hint; raise what it returns."""
    line = " ".join(message.split())
    return RequestError(f"{line} (hint: {hint})" if hint else line)


def outputs_named(names: list[str] | None) -> tuple[Output, ...] | None:
    """The outputs named in an option, in their one order; None where the option was not given."""
    for name in names or ():
        if name not in OUTPUTS:
            raise fail(f"unknown output {name!r}", f"one of {', '.join(OUTPUTS)}")
    return in_order(names) if names else None


def device_here(text: str) -> torch.device:
    """The device of an option, once something has been put on it."""
    try:
        device = torch.device(text)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise fail(f"cannot run on {text!r}: {first}", "a device that is here, such as cpu") from None
    return device


def run(args: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 0 success, 1 a failed check, 2 a bad request, 130 interrupted."""
    for name in _COMMANDS:
        importlib.import_module(f"{__package__}.{name}")
    command: Any = typer.main.get_command(app)
    try:
        status = command.main(args=None if args is None else list(args), prog_name="convgrad", standalone_mode=False)
    except typer.Exit as error:
        return error.exit_code
    except _UsageError as error:
        text = " ".join(error.format_message().split())  # pyright: ignore[reportAttributeAccessIssue]
        if not text:  # no command at all: the help stands there already
            return 2
        print(f"convgrad: {text} (hint: see convgrad --help)", file=sys.stderr)
        return 2
    except (typer.Abort, KeyboardInterrupt):
        print("convgrad: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0
    except (RequestError, ConvgradError, ValueError, KeyError, OSError) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        print(f"convgrad: {' '.join(str(text).split())}", file=sys.stderr)
        return 2
    return int(status or 0)
