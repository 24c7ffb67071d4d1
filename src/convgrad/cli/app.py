"""The commands, their options and their errors: one line each, with a hint.

Help, completion and bad options are answered without PyTorch. So a module of this room imports at its top only what
needs none, and the rest inside its functions; `command` loads the package before one of them runs.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import shlex
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout, suppress
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from .._version import __version__
from ..errors import CheckError, ConvgradError
from ..tables import Table, wrapped

if TYPE_CHECKING:
    import torch

#: Every command and what ``convgrad --help`` says of it; its module, of the same name, is loaded when it is called.
COMMANDS: Final = {
    "info": "Versions, device, backends, settings in force, paths.",
    "explain": "Which kernel computes each output, why, and how far from the limit.",
    "check": "Is every output right? The conformance suite.",
    "bench": "How fast, against PyTorch's best?",
    "tune": "Measure ahead of time which backend is fastest, and remember it.",
    "run": "Run a script unmodified; say which kernels ran, and how long.",
    "report": "One page: what a model or script costs, and what convgrad would save.",
    "names": "Which function of ATen is the backward of another.",
}
#: Of what ``--json`` prints, for every command; raised when a field changes its meaning or is removed.
SCHEMA_VERSION: Final = 2
#: When the command began, before PyTorch's import, by `time.perf_counter`.
BEGAN: Final = time.perf_counter()


class _Commands(TyperGroup):
    """Loads the module of a command when somebody calls it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        importlib.import_module(f"{__package__}.{cmd_name}")
        commands: Any = typer.main.get_command(app)
        return commands.commands[cmd_name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


class BeforeAScript(TyperCommand):
    """Its options may stand anywhere; but what stands behind a script is the script's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.ignore_unknown_options = any(arg.endswith(".py") for arg in args)
        ctx.allow_interspersed_args = not ctx.ignore_unknown_options
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="convgrad",
    cls=_Commands,
    help="Every gradient of a convolution: which kernel, why, how fast, and whether it is right.",
    rich_markup_mode=None,  # rich would take longer to load than everything else that help needs
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Result(NamedTuple):
    """The result of a command: plain data, in which a number's name says its unit, and an exit status."""

    data: Any
    status: int = 0
    command: str = ""  # which prints such data, where that is another one


def command(
    name: str, of: typer.Typer | None = None, **settings: Any
) -> Callable[[Callable[..., Result]], Callable[..., None]]:
    """Make a function a command, of this app or of a part of it.

    With ``as_json`` among its options, `say` says nothing, and standard output gets nothing but the data of its result;
    ``threads`` is set. Each line of its docstring below "Examples:" is a paragraph of its help.
    """

    def added(function: Callable[..., Result]) -> Callable[..., None]:
        @wraps(function)
        def loaded(*args: Any, **options: Any) -> None:
            _load_package()
            if options.get("threads"):
                import torch

                torch.set_num_threads(options["threads"])
            _mute[0] = as_json = options.get("as_json") is True
            with _to_stderr() if as_json else nullcontext():
                result = function(*args, **options)
            if as_json:
                print(json_text(result.command or str(of.info.name if of else name), result.data), flush=True)
            raise typer.Exit(result.status)

        before, title, examples = (function.__doc__ or "").partition("Examples:\n")
        loaded.__doc__ = before + (title + examples).replace("\n", "\n\n")
        return (of or app).command(name, **settings)(loaded)

    return added


@contextmanager
def _to_stderr() -> Generator[None, None, None]:
    """Let what is printed in this block, by processes that are started in it, too, go to standard error."""
    from ..diagnostics import redirected

    with redirect_stdout(sys.stderr), ExitStack() as opened:
        with suppress(OSError):  # one of the two is closed
            opened.enter_context(redirected(1, opened.enter_context(open(2, "wb", closefd=False))))
        yield


def _load_package() -> None:
    """Run the package's ``__init__`` where `convgrad_command` put an empty module in its place."""
    package = sys.modules["convgrad"]
    if not hasattr(package, "__version__") and package.__spec__ is not None and package.__spec__.loader is not None:
        package.__spec__.loader.exec_module(package)


def _shown(given: bool | str) -> None:
    """Answer ``--version``, which is a flag, or ``--schema``, and end."""
    if not given:
        return
    if given is True:
        print(__version__)
    else:
        _load_package()
        from .schemas import schema_of_command

        print(json.dumps(schema_of_command(given), indent=1))
    raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    kernels: Annotated[
        list[str] | None,
        typer.Option("--kernels", "-k", help="A script (with its arguments) or module that registers kernels."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_shown, is_eager=True)
    ] = False,
    schema: Annotated[
        str, typer.Option(metavar="COMMAND", help="Show the schema of its --json.", callback=_shown, is_eager=True)
    ] = "",
) -> None:
    """Every gradient of a convolution: which kernel, why, how fast, and whether it is right."""
    loaded_kernels.clear()
    for source in kernels or ():
        _load_kernels(source, verify=context.invoked_subcommand != "check")  # which checks them itself


#: What `--kernels` has loaded, for processes that a script starts.
loaded_kernels: list[str] = []


def _load_kernels(source: str, verify: bool) -> None:
    _load_package()
    from ..check import foreign_frames, load_kernels

    try:
        with _to_stderr():
            load_kernels(source, verify=verify)
        script, *rest = shlex.split(source)
        there = os.path.abspath(script) if script.endswith(".py") else script
        loaded_kernels.append(shlex.join([there, *rest]))
    except Exception as error:
        frames = foreign_frames(error)
        if isinstance(error, (FileNotFoundError, ModuleNotFoundError, ValueError)) and not frames:  # it is not there
            raise fail(str(error), "a module's name, or a script that ends in .py") from None
        if not isinstance(error, CheckError):  # its own frames are shown, none of this library
            print("".join(traceback.format_list(frames)), end="", file=sys.stderr)
            error = fail(f"{source} raised {type(error).__name__}: {error}")
        raise error from None


_given: list[str] = []
_mute = [False]


def width() -> int:
    """Columns of the terminal; where there is none, enough for a row of a table to be one line."""
    return shutil.get_terminal_size((200, 24)).columns


def say(text: object, file: TextIO | None = None) -> None:
    """Print a text; lines that are wider than the terminal are broken at spaces, but for a command, to be copied.

    Where there is no terminal, an error is one line, for a program to read. With ``--json`` only errors are printed.
    """
    if _mute[0] and file is None:
        return
    read_by_program = file is sys.stderr and not shutil.get_terminal_size((0, 0)).columns
    if isinstance(text, Table):  # what does not fit beside each other stands below
        text = text.text(width())
    lines = str(text).splitlines()
    for line in [" ".join(lines)] if read_by_program else lines:
        as_it_is = read_by_program or "repeat: " in line
        print(line if as_it_is else wrapped(line, width()), file=file, flush=True)


def json_text(name: str, data: object) -> str:
    """Return the JSON of a command's data, as `schemas` describes it."""
    import torch

    versions = {"convgrad": __version__, "torch": torch.__version__, "python": platform.python_version()}
    whole = {"schema": f"convgrad {name}", "schema_version": SCHEMA_VERSION, "arguments": _given, "versions": versions}
    return json.dumps({**whole, "data": data}, indent=2, allow_nan=False)


@contextmanager
def progress(what: str, total: int) -> Generator[Callable[..., None], None, None]:
    """A bar on a terminal; the function that the block is given moves it: ``advance=1`` or ``completed=5``."""
    from rich.console import Console
    from rich.progress import Progress

    console, printed = Console(stderr=True), sys.stdout.isatty()  # into a file goes what is printed, not the bar
    with Progress(console=console, disable=not sys.stderr.isatty(), transient=True, redirect_stdout=printed) as bar:
        yield partial(bar.update, bar.add_task(what, total=total))


_formatwarning = warnings.formatwarning

#: What typer raises for arguments that it does not understand: click's class, or that of the click which it carries.
_UsageError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class RequestError(Exception):
    """Something that the user can put right."""


def fail(message: str, hint: str = "") -> Exception:
    """An error for the user: a message and a hint; raise what it returns."""
    return RequestError(f"{message} (hint: {hint})" if hint else message)


def finite(seconds: float) -> float:
    """For typer: refuse a time for measuring that is not positive and finite."""
    if not 0 < seconds < float("inf"):
        raise fail(f"--seconds must be positive and finite, got {seconds}")
    return seconds


def device_here(text: str) -> torch.device:
    """The device of an option, once something has been put on it."""
    import torch

    try:
        device = torch.device(text)
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).splitlines()[0].partition(". ")[0]
        raise fail(f"cannot run on {text!r}: {first}", "a device that is here, such as cpu") from None
    return device


def run(args: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status.

    That is 0 success, 1 a failed check, 2 a bad request, 130 interrupted, 141 nobody reads the output any more.
    """
    _given[:], _mute[0] = (sys.argv[1:] if args is None else args) or ["--help"], False
    _join_words()
    commands: Any = typer.main.get_command(app)
    warnings.formatwarning = _warning
    try:
        status = commands.main(args=_given, prog_name="convgrad", standalone_mode=False)
    except _UsageError as error:
        text = " ".join(error.format_message().split())  # pyright: ignore[reportAttributeAccessIssue]
        extra = "a problem of several words stands in quotes: " if "unexpected extra argument" in text else ""
        named = next((f"convgrad {word}" for word in _given if word in COMMANDS), "convgrad")
        command = getattr(getattr(error, "ctx", None), "command_path", named)  # an option without its value has none
        if text.startswith(("No such option: --kernels", "No such option: -k")):
            extra, command = "it stands before the command: ", "convgrad"
        return _refused(f"{text} (hint: {extra}see {command} --help)")
    except typer.Abort:  # what older releases of typer make of an interrupt
        say("convgrad: interrupted", sys.stderr)
        return 130
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # typer would end with 1, as if a check had failed
            return 141
        raise
    except OSError as error:
        return _refused(f"{error.filename!r}: {error.strerror}" if error.filename and error.strerror else error)
    except (RequestError, ConvgradError, ValueError) as error:
        return _refused(error, 1 if isinstance(error, CheckError) else 2)
    finally:
        warnings.formatwarning = _formatwarning
    return int(status or 0)


def _warning(message: Warning | str, category: type[Warning], filename: str, *where: Any) -> str:
    """Format a warning of this package as one line about the command, without the place in the source."""
    if any(map(Path(filename).is_relative_to, (Path(__file__).parents[1], Path(typer.__file__).parent))):
        return f"convgrad: {message}\n"
    return _formatwarning(message, category, filename, *where)


def _refused(what: object, status: int = 2) -> int:
    say(f"convgrad: {what}", sys.stderr)
    return status


def _join_words() -> None:
    """Undo that bash takes ``aten:cudnn`` and ``--backend=aten`` for three words each, and replaces only the last.

    ``COMP_BEFORE`` is what it has split off the word to be completed: ``aten:`` of ``aten:cu``.
    """
    if os.environ.get("_CONVGRAD_COMPLETE") != "complete_bash":
        return
    words: list[str] = []
    for word in os.environ["COMP_WORDS"].split("\n")[: int(os.environ["COMP_CWORD"]) + 1]:
        if words and (word in (":", "=") or words[-1].endswith((":", "="))):
            words[-1] += word
        else:
            words.append(word)
    option, equals, value = words[-1].partition("=")
    if equals and option.startswith("-"):
        words[-1:] = [option, value]
    before, colon, words[-1] = words[-1].rpartition(":")
    os.environ.update(COMP_WORDS="\n".join(words), COMP_CWORD=str(len(words) - 1), COMP_BEFORE=before + colon)
