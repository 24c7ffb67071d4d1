"""Options of several commands, checked and completed before PyTorch is loaded.

The names are copies of what the rooms below know (a test compares them), for asking those would load PyTorch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import typer

from ..errors import UnknownNameError
from .app import fail

if TYPE_CHECKING:
    from ..problem import Output

LAYOUTS: Final = ("contiguous", "channels_last")
OUTPUTS: Final[tuple[Output, ...]] = ("forward", "grad_input", "grad_weight", "grad_bias")
PROPERTIES: Final = (
    "exact", "again", "bound", "memory", "layouts", "bias", "sweeps", "deterministic", "nonfinite",
    "workspace",
)  # fmt: skip
#: Checked where they are named only.
STRESS: Final = ("pages", "threads")
#: Of models, which PyTorch makes of no integers.
DTYPES: Final = (
    "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128", "f16", "bf16", "f32", "f64",
)  # fmt: skip
BACKENDS: Final = (
    "aten", "native", "triton", "triton:banded", "im2col", "reference", "aten:float32", "aten:channels_last",
    "aten:contiguous", "aten:padded", "aten:matmul", "aten:patches", "native:avx2", "native:amx", "native:winograd",
    "fft", "aten:cudnn", "aten:miopen", "aten:mkldnn", "aten:native",
)  # fmt: skip
#: Machines that need not be here; more words say more, see `convgrad.diagnostics.Machine.parse`.
MACHINES: Final = (
    "here", "a100", "h100", "h200", "b200", "v100", "t4", "l4", "rtx4090", "rtx5090", "mi250x", "mi300x", "xpu", "mps",
    "cpu arm", "cpu avx2", "cpu avx512",
)  # fmt: skip


def kind_of(what: str) -> Literal["problem", "model", "script", "file"]:
    """Return what a word of a command line means; refuse a file that is not there, and an unknown option."""
    if os.path.isfile(what):  # a text may be too long for a name
        return "script" if what.endswith(".py") else "file"
    refuse_option(what)
    if re.match(r"(g|mb|ic)\d", what.strip()):
        return "problem"
    if ":" not in what and re.search(r"[./]", what):
        named = "a problem such as g32ic32ih14oc32kh3ph1 contains neither a dot nor a slash"
        hint = f"it was looked for in {os.getcwd()}" if what.endswith(".py") else named
        raise fail(f"there is no file {what!r}", hint)
    return "model"


def refuse_option(what: str) -> None:
    """Refuse a name before a script's that looks like an option, and is none of the command's."""
    if what.startswith("-") and not Path(what).exists():
        raise fail(f"there is no option {what!r}", "see --help of the command; options of the script stand behind it")


def outputs_named(names: list[str] | None) -> tuple[Output, ...] | None:
    """The outputs named in an option, in their one order; None where the option was not given."""
    return tuple(o for o in OUTPUTS if o in names) if names else None


class OfModel(NamedTuple):
    """The options of a model."""

    shape: str = ""  # of its input; else it gets what its function returns, or two samples of the usual size
    dtype: str = ""  # of its parameters and of inputs that are real; else as its function made them
    last: bool = False  # in channels_last

    def only_for(self, is_model: bool, what: str, hint: str = "", **more: object) -> None:
        """Refuse these options, and ``more``, for what is no model."""
        for name, given in {"input": self.shape, "dtype": self.dtype, "channels-last": self.last, **more}.items():
            if given and not is_model:
                raise fail(f"--{name} is for a model, and {what!r} is none", hint)


def _some_of(*flags: str, names: Callable[[], Collection[str]], help: str, **settings: Any) -> Any:
    """Return an option whose values, one or several, are some of the names."""

    def check(given: str | list[str] | None) -> str | list[str] | None:
        for name in [given] if isinstance(given, str) else given or ():
            if name and name.removesuffix(" (padded copy)") not in names():
                raise UnknownNameError.of(f"no {flags[0].lstrip('-')} is called", name, names())
        return given

    return typer.Option(*flags, help=help, callback=check, autocompletion=words(names), **settings)


def words(known: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """For typer: those of the names that begin as the word does."""

    def complete(incomplete: str) -> list[str]:
        before = os.environ.get("COMP_BEFORE", "")
        return [name[len(before) :] for name in known() if name.startswith(before + incomplete)]

    return complete


def _backends() -> list[str]:
    """Return those that are registered, where the registry was loaded: a script of kernels may have added some."""
    engine = sys.modules.get("convgrad.engine")
    return ["all", *(BACKENDS if engine is None else engine.backends())]


def _shape(text: str) -> str:
    if text and not re.fullmatch(r"\d+(x\d+)+", text):
        raise fail(f"--input {text!r} is no shape", "for example --input 8x3x224x224")
    return text


def writable(file: Path | None) -> Path | None:
    """For typer: refuse a file that cannot be written, before anything runs; it stays that one where a script moves."""
    if file is not None and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
        raise fail(f"{str(file)!r} cannot be written", "the name of a file, in a folder that is there")
    if file is not None and file.suffix == ".py":
        raise fail(f"{str(file)!r} is a script, and the data would be written over it", "a file such as calls.json")
    return file and file.absolute()


def what(metavar: str, help: str, *names: str) -> Any:
    """Return an argument that is a problem, or one of the names; completed are these, and the fields of a problem."""
    named = words(lambda: names)

    def complete(incomplete: str) -> list[str]:
        if not re.fullmatch(r"((g|mb|ic|oc|[iokspd][dhw])\d+)+[a-z]?", incomplete):
            return named(incomplete)
        given = re.findall(r"[a-z]+", incomplete.rstrip("abcdefghijklmnopqrstuvwxyz"))
        axes = {field[1] for field in given if field[1:] in ("d", "h", "w")} or {"d", "h", "w"}
        fields = ["g", "mb", "ic", "oc", *(letter + axis for letter in "iokspd" for axis in "dhw" if axis in axes)]
        begun = re.sub(r"[a-z]$", "", incomplete)
        result = [begun + field for field in fields if field not in given and (begun + field).startswith(incomplete)]
        return result if len(result) > 1 else []  # the shell would put a space behind the only one

    return typer.Argument(metavar=metavar, help=help, autocompletion=complete)


def file(*flags: str, help: str) -> Any:
    """An option that names a file to be written."""
    return typer.Option(*flags, help=help, callback=writable)


Outputs = Annotated[
    list[str] | None,
    _some_of("--output", "-o", names=lambda: OUTPUTS, help=f"One of {', '.join(OUTPUTS)}; may be repeated.",
             metavar="OUTPUT"),
]  # fmt: skip
Backends = Annotated[
    list[str] | None,
    _some_of("--backend", "-b", names=_backends, metavar="NAME",
             help="Its name, or 'all'; by default the one that would be chosen."),
]  # fmt: skip
Properties = Annotated[
    list[str] | None,
    _some_of("--property", names=lambda: (*PROPERTIES, *STRESS), metavar="NAME",
             help=f"Some of: {', '.join(PROPERTIES)}; by name only: {', '.join(STRESS)}."),
]  # fmt: skip
Dtype = Annotated[str, _some_of("--dtype", names=lambda: DTYPES, help="Dtype of a model, by default its own.")]
Layout = Annotated[str, _some_of("--layout", names=lambda: LAYOUTS, help=f"One of {', '.join(LAYOUTS)}; else both.")]
Device = Annotated[str, typer.Option(help="Where to run.", autocompletion=words(lambda: ("cpu", "cuda", "xpu")))]
Threads = Annotated[
    int, typer.Option(help="For torch.set_num_threads; a choice holds for this number.", min=0, max=1024)
]
Machines = Annotated[
    list[str] | None,
    typer.Option("--device", "-d", help="A machine, with dtype and channels_last if wanted; may be repeated.",
                 autocompletion=words(lambda: MACHINES)),
]  # fmt: skip
Transposed = Annotated[bool, typer.Option("--transposed", help="Read every problem as a transposed one.")]
ChannelsLast = Annotated[bool, typer.Option("--channels-last", help="Run a model in channels_last.")]
Input = Annotated[str, typer.Option("--input", help="Shape of a model's input, 8x3x224x224.", callback=_shape)]
CsvFile = Annotated[Path | None, file("--csv", help="Also write the rows to this file.")]
JsonFile = Annotated[Path | None, file("--json", help="Also write the data to this file, as JSON.")]
ScriptArgs = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the data as JSON.")]
