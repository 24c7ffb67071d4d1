"""Every gradient of a convolution: correct, explained, replaceable, fast."""

from __future__ import annotations

from . import functional, nn
from .cpp import include_path
from .custom import register, unregister
from .engine import backends, set_default_backend, use_backend
from .errors import BackendError, CheckError, ConvgradError, DtypeError, ShapeError, UnsupportedError
from .functional import *  # noqa: F403
from .functional import __all__ as _functions
from .problem import ConvProblem

__version__ = "0.1.0"

__all__ = [  # noqa: PLE0604
    "BackendError",
    "CheckError",
    "ConvProblem",
    "ConvgradError",
    "DtypeError",
    "ShapeError",
    "UnsupportedError",
    "backends",
    "functional",
    "include_path",
    "nn",
    "register",
    "set_default_backend",
    "unregister",
    "use_backend",
    *_functions,
]
