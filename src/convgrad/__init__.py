"""Every gradient of a convolution: correct, explained, replaceable, fast."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import functional, nn
from ._compat import loading
from ._version import __version__ as __version__
from .engine import backends as list_backends
from .engine import check_with, set_default_backend, use_backend
from .errors import BackendError, CheckError, CollectiveError, ConvgradError, DtypeError, ShapeError, UnsupportedError
from .functional import *  # noqa: F403
from .ops import loaders
from .problem import ConvProblem
from .settings import measure

if TYPE_CHECKING:
    from . import direct as direct
    from . import models as models
    from . import parallel as parallel
    from . import report as report
    from . import testing as testing
    from .check import register, unregister
    from .diagnostics import explain, trace
    from .models import accelerate_, takeover

__all__ = [
    "BackendError", "CheckError", "CollectiveError", "ConvProblem", "ConvgradError", "DtypeError", "ShapeError",
    "UnsupportedError", "accelerate_", "direct", "explain", "functional", "include_path", "list_backends",
    "measure", "nn", "register", "set_default_backend", "takeover", "trace", "unregister", "use_backend",
]  # fmt: skip
__all__ += functional.__all__

#: Loaded when first used: name -> the room that has it; a room is named after itself.
_LATER = {
    "accelerate_": "models", "explain": "diagnostics", "register": "check", "takeover": "models",
    "trace": "diagnostics", "unregister": "check",
    "direct": "direct", "models": "models", "parallel": "parallel", "report": "report", "testing": "testing",
}  # fmt: skip


def _load(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with loading:
        room = import_module(f".{_LATER[name]}", __name__)
        found = globals()[name] = room if name == _LATER[name] else getattr(room, name)
    return found


if not TYPE_CHECKING:  # a type checker knows every name, and reports any other
    __getattr__ = _load


# The engine imports nothing above it, so `check` is handed down; it is imported when something is first measured.
check_with(lambda *call: import_module(".check", __name__).first_look(*call))
loaders["torch.distributed.tensor"] = lambda: _load("parallel")  # registers the rules of DTensor


def include_path() -> str:
    """Return the include folder for a C++ compiler, which holds ``convgrad.h``.

    Equivalent to:
        >>> import os, convgrad
        >>> os.listdir(convgrad.include_path())
        ['convgrad.h']
    """
    from pathlib import Path

    return str(Path(__file__).parent / "include")


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__, *_LATER})


if "CONVGRAD_WATCH" in os.environ:  # a process that the script of `convgrad run` started
    from .diagnostics import watch_this_process

    watch_this_process()
