"""Where a kernel was registered, and the one command that repeats a check of it from there.

The command runs the same script or module, but only up to the registration, which it does not check.
"""

from __future__ import annotations

import importlib
import os
import runpy
import shlex
import sys
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from .backend import CustomBackend

__all__ = ["Origin", "caller", "latest", "load", "load_kernels", "seen"]

#: The last kernel of each name, registered or refused: for a notebook, which no command can run.
_seen: dict[str, CustomBackend] = {}
_wanted: ContextVar[str | None] = ContextVar("convgrad_wanted", default=None)


class _Found(BaseException):
    """Ends the script: what it was run for is there."""

    def __init__(self, backend: CustomBackend) -> None:
        super().__init__()
        self.backend = backend


class Origin(NamedTuple):
    """The script that registers, or the module whose top level does; None for a notebook or a function elsewhere."""

    source: str | None

    def command(self, name: str) -> str:
        """What repeats a check, with the places {problem}, {output} and {device} left open."""
        if self.source is None:
            return f'convgrad.custom.repeat("{name}", "{{problem}}", "{{output}}", device="{{device}}")'
        source = shlex.quote(self.source).replace("{", "{{").replace("}", "}}")
        return (
            f'python -m convgrad.custom {source} "{{problem}}" --backend {name} --output {{output}} --device {{device}}'
        )


def caller() -> Origin:
    """The first caller outside the library."""
    frame: FrameType | None = sys._getframe(1)
    package = str(Path(__file__).parent)
    while frame is not None and frame.f_code.co_filename.startswith(package):
        frame = frame.f_back
    if frame is None or not Path(frame.f_code.co_filename).is_file():
        return Origin(None)
    module = frame.f_globals.get("__name__")
    if module == "__main__":
        return Origin(os.path.relpath(frame.f_code.co_filename))
    return Origin(module if module in sys.modules and frame.f_code.co_name == "<module>" else None)


def seen(backend: CustomBackend) -> None:
    """Note a kernel; end the script here if it is the one that `load` wants."""
    _seen[backend.name] = backend
    if _wanted.get() == backend.name:
        raise _Found(backend)


def latest(name: str) -> CustomBackend:
    """The last kernel of this name in this process, also if it was refused.

    Raises:
        KeyError: there is none.
    """
    if name not in _seen:
        raise KeyError(
            f"no kernel called {name!r} was registered in this process; there are {', '.join(_seen) or 'none'}"
        )
    return _seen[name]


def load(source: str, name: str) -> CustomBackend:
    """Run a script (``path/to/file.py``) or import a module until it registers the kernel; it is not checked.

    Raises:
        KeyError: it ends without registering one of this name.
    """
    token = _wanted.set(name)
    try:
        _execute(source, "__main__")
    except _Found as found:
        return found.backend
    finally:
        _wanted.reset(token)
    raise KeyError(f"{source} registers no backend called {name!r}")


def load_kernels(source: str) -> None:
    """Run a script (``path/to/file.py``) or import a module for all kernels that it registers.

    A script's ``if __name__ == "__main__"`` part is left out; each kernel is checked as it asks to be.
    """
    _execute(source, "__kernels__")


def _execute(source: str, name: str) -> None:
    if source.endswith(".py") and not Path(source).is_file():
        raise FileNotFoundError(f"there is no script {source!r}")
    folder = str(Path(source).parent) if source.endswith(".py") else os.getcwd()
    sys.path.insert(0, folder)
    try:
        if source.endswith(".py"):
            runpy.run_path(source, run_name=name)
        else:
            importlib.import_module(source)
    finally:
        sys.path.remove(folder)
