"""Scripts and modules that register kernels, for ``convgrad --kernels``."""

from __future__ import annotations

import importlib
import os
import runpy
import shlex
import sys
import sysconfig
import traceback
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from .. import _compat

_PYTHONS = os.path.join(sysconfig.get_path("stdlib"), "")


class Loading(NamedTuple):
    """The script or module that ``--kernels`` loads, and whether its registrations check the kernels."""

    source: str
    verify: bool


#: While a script or module of kernels runs.
loading: ContextVar[Loading | None] = ContextVar("convgrad_loading", default=None)


def load_kernels(source: str, *, verify: bool = True) -> None:
    """Run a script (``path/to/file.py``, and its arguments) or import a module for all kernels that it registers.

    The ``if __name__ == "__main__"`` part of a script is left out. Without ``verify`` no registration checks a kernel.
    """
    words = shlex.split(source)
    if not words:
        raise ValueError("an empty name of a script of kernels")
    script = words[0].endswith(".py")
    if script and not Path(words[0]).is_file():
        raise FileNotFoundError(f"there is no script {words[0]!r}")
    folder = str(Path(words[0]).parent) if script else os.getcwd()
    argv = sys.argv
    sys.argv = words if script else [argv[0], *words[1:]]
    sys.path.insert(0, folder)
    token = loading.set(Loading(source, verify))
    try:
        if script:
            runpy.run_path(os.path.abspath(words[0]), run_name="__kernels__")  # as the interpreter sets __file__
        else:
            importlib.import_module(words[0])
    except SystemExit as stop:  # the script has ended itself
        if stop.code:
            raise
    except ModuleNotFoundError as error:
        if script or error.name is None or not (words[0] == error.name or words[0].startswith(f"{error.name}.")):
            raise  # the module exists, but one of its imports does not
        raise ModuleNotFoundError(f"there is no module {words[0]!r}", name=error.name) from None
    finally:
        loading.reset(token)
        sys.argv = argv
        with suppress(ValueError):  # the script may have removed it
            sys.path.remove(folder)


def is_foreign(file: str) -> bool:
    """Whether a file is neither this library's nor PyTorch's nor Python's, whose folder may hold other packages."""
    library = file.startswith((*_compat.LIBRARIES, "<frozen"))
    return not (library or (file.startswith(_PYTHONS) and "-packages" not in file))


def foreign_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error that are of the user's files."""
    return [f for f in traceback.extract_tb(error.__traceback__) if is_foreign(f.filename)]
