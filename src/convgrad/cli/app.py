"""The commands, their options and their errors: one line each, with a hint."""

from __future__ import annotations

import importlib
import shutil
import sys
import traceback
from collections.abc import Collection, Sequence
from typing import Annotated, Any, TextIO

import torch
import typer

from .. import __version__
from ..custom import foreign_frames, load_kernels
from ..errors import CheckError, ConvgradError
from ..problem import OUTPUTS, Output, in_order
from ..tables import command_lines, text_table, wrapped

__all__ = ["RequestError", "app", "device_here", "fail", "outputs_named", "run", "say", "say_table", "width"]

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
    context: typer.Context,
    kernels: Annotated[
        list[str] | None,
        typer.Option("--kernels", "-k", help="A script (with its arguments) or module that registers kernels."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Every gradient of a convolution: which kernel, why, how fast, and whether it is right."""
    for source in kernels or ():
        try:
            load_kernels(source, verify=context.invoked_subcommand != "check")  # which checks them itself
        except (FileNotFoundError, ModuleNotFoundError, ValueError) as error:
            if foreign_frames(error):  # it is there, and misses something itself
                raise _KernelsError(source, error) from None
            raise fail(str(error), "a module's name, or a script that ends in .py") from None
        except Exception as error:
            raise _KernelsError(source, error) from None


class _KernelsError(Exception):
    """A script of kernels that raised: its own frames are shown, none of this library."""

    def __init__(self, source: str, error: Exception) -> None:
        self.refused = isinstance(error, CheckError)
        self.frames = "" if self.refused else "".join(traceback.format_list(foreign_frames(error)))
        super().__init__(str(error) if self.refused else f"{source} raised {type(error).__name__}: {error}")


#: Modules of this package that add their command when they are imported, in the order in which help lists them.
_COMMANDS = ("info", "explain", "check", "bench", "tune", "run", "report", "names")


# ---- printing ------------------------------------------------------------------------------------


def width() -> int:
    """Columns of the terminal; 80 where there is none."""
    return shutil.get_terminal_size((80, 24)).columns


def say(text: object, file: TextIO | None = None) -> None:
    """Print a text; lines that are wider than the terminal are broken at spaces, a command so that it can be copied."""
    for line in str(text).splitlines():
        broken = command_lines if "repeat: " in line else wrapped
        print(broken(line, width()), file=file, flush=True)


def say_table(rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> None:
    """Print a table; what does not fit beside each other stands below."""
    print(text_table(rows, right=right, width=width()), flush=True)


# ---- errors --------------------------------------------------------------------------------------


#: What typer raises for arguments that it does not understand: click's class, or that of the click which it carries.
_UsageError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class RequestError(Exception):
    """Something that the user can put right."""


def fail(message: str, hint: str = "") -> Exception:
    """An error for the user: a message and a hint; raise what it returns."""
    return RequestError(f"{message} (hint: {hint})" if hint else message)


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
        # no command at all: the help stands there already
        return _refused(f"{text} (hint: see convgrad --help)") if text else 2
    except (typer.Abort, KeyboardInterrupt):
        return _refused("interrupted", 130)
    except BrokenPipeError:
        return 0
    except _KernelsError as error:
        print(error.frames, end="", file=sys.stderr)
        return _refused(error, 1 if error.refused else 2)
    except (RequestError, ConvgradError, ValueError, KeyError, OSError) as error:
        plain = isinstance(error, KeyError) and not isinstance(error, ConvgradError) and error.args
        return _refused(error.args[0] if plain else error, 1 if isinstance(error, CheckError) else 2)
    return int(status or 0)


def _refused(what: object, status: int = 2) -> int:
    say(f"convgrad: {what}", sys.stderr)
    return status
