"""Bring your own kernel: a function that does one pass becomes a backend like those that come with the library."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from ..backends.base import Arithmetic, Layout
from ..engine import registry
from ..problem import PASSES, ConvProblem, Pass
from . import graphs, origin
from . import verify as _verify
from .backend import Accepts, CustomBackend
from .recipe import Recipe, by_expressions, by_names, native

__all__ = ["CustomBackend", "register", "repeat", "unregister"]

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_lock = threading.RLock()


def register(
    name: str,
    *,
    forward: Callable[..., Any] | None = None,
    grad_input: Callable[..., Any] | None = None,
    grad_weight: Callable[..., Any] | None = None,
    accepts: Accepts | Mapping[Pass, Accepts] | None = None,
    signature: Literal["native", "torch"] = "native",
    args: Sequence[Any] | Mapping[Pass, Sequence[Any]] | None = None,
    layouts: Layout | Sequence[Layout] = ("contiguous", "channels_last"),
    devices: str | Sequence[str] | None = None,
    dtypes: torch.dtype | Sequence[torch.dtype] = _FLOATS,
    deterministic: bool = True,
    capture_safe: bool = True,
    arithmetic: Arithmetic = "direct",
    prefer: bool = True,
    verify: bool = True,
    seconds: float = 10.0,
    problems: Sequence[ConvProblem | str] = (),
) -> Any:
    """Make functions a backend that computes the passes they are given for; every other pass stays with the engine.

    Without any function it is a decorator: of a function, which becomes ``forward``, or of a class whose static methods
    are called ``forward``, ``grad_input`` and ``grad_weight``. A name that is registered already is replaced, once the
    new functions have passed.

    Args:
        name: what choices, tables and `use_backend` call it.
        forward: computes the output, from (input, weight, problem) unless ``signature`` or ``args`` say otherwise.
        grad_input: computes the input's gradient, from (grad_output, weight, problem).
        grad_weight: computes the weight's gradient, from (grad_output, input, problem).
        accepts: a function of the problem that says whether the functions can compute it: True, False, or the reason
            why not as a sentence. One for all passes, or one for each. None: every problem.
        signature: ``"torch"`` passes by name those of input, weight, bias, stride, padding, dilation and groups that
            the function has as parameters (and grad_output, input_size, weight_size, kernel_size). A parameter
            annotated ``int`` gets one integer.
        args: for functions without parameter names, such as an extension's: what to pass, for instance
            ``("input", "weight", "kernel_size[0]", "stride[0]")``; anything that is no text is passed as it is.
        layouts: operand layouts that the functions take, one or several; operands in another one are copied into one of
            these.
        devices: types of device, one or several, on which they run; None: any.
        dtypes: dtypes that they take, one or several.
        deterministic: whether the same operands always give the same bits.
        capture_safe: whether they may be called while a CUDA graph is captured.
        arithmetic: how they sum, which selects the error that is allowed: "direct", "tf32", "transform" or
            "low-precision accumulation".
        prefer: use them wherever they are usable; False: only where asked for by name or where measured to be fastest.
        verify: run the conformance suite first. False registers them unseen; `info` and `explain` say so.
        seconds: how long the check may take; every problem that has begun is finished.
        problems: problems to check besides those that the library finds, as `ConvProblem` or as its text.

    Returns:
        The backend; as a decorator, what it decorates, unchanged.

    Raises:
        CheckError: a result is wrong; with the first failing problem, the worst error and the command that repeats it.
        TypeError, ValueError: arguments that make no backend.

    Equivalent to:
        >>> import torch, convgrad
        >>> def mine(input, weight, stride: int):
        ...     return torch.nn.functional.conv2d(input, weight, stride=stride)
        >>> square = lambda p: p.ndim == 2 and p.padding == ((0, 0), (0, 0)) and p.dilation == (1, 1) and p.groups == 1
        >>> backend = convgrad.register("mine", forward=mine, signature="torch", accepts=square, seconds=0.5)
        >>> x, w = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)
        >>> backend.verified, torch.equal(convgrad.conv2d(x, w), mine(x, w, 1))
        (True, True)
        >>> convgrad.unregister("mine")
    """
    functions: dict[Pass, Callable[..., Any] | None] = {
        "forward": forward,
        "grad_input": grad_input,
        "grad_weight": grad_weight,
    }
    options: dict[str, Any] = {
        "layouts": _several(layouts),
        "devices": None if devices is None else _several(devices),
        "dtypes": _several(dtypes),
        "deterministic": deterministic,
        "capture_safe": capture_safe,
        "arithmetic": arithmetic,
        "prefer": prefer,
    }
    _check_options(name, options, signature, seconds)
    wanted = [ConvProblem.parse(p) if isinstance(p, str) else p for p in problems]
    where = origin.caller()

    def finish(given: Mapping[Pass, Callable[..., Any]]) -> CustomBackend:
        ready: dict[Pass, tuple[Callable[..., Any], Recipe]] = {
            p: (f, _recipe(f, p, signature, args, free=accepts is not None)) for p, f in given.items()
        }
        backend = CustomBackend(name, ready, accepts={p: _of(accepts, p) for p in given}, **options)
        return _install(backend, wanted, seconds if verify else None, where)

    given: dict[Pass, Callable[..., Any]] = {p: f for p, f in functions.items() if f is not None}
    if given:
        return finish(given)

    def decorate(decorated: Any) -> Any:
        if isinstance(decorated, type):
            finish({p: getattr(decorated, p) for p in PASSES if callable(getattr(decorated, p, None))})
        else:
            finish({"forward": decorated})
        return decorated

    return decorate


def unregister(name: str) -> None:
    """Remove a backend that `register` made; from the next call on the engine chooses as before it came.

    Raises:
        KeyError: `register` made none of this name.
    """
    with _lock:
        if name not in _mine():
            raise KeyError(f"no backend called {name!r} was registered; there are {', '.join(_mine()) or 'none'}")
        registry.unregister(name)
        graphs.mark(_mine().values())


def _mine() -> dict[str, CustomBackend]:
    return {n: b for n, b in registry.backends().items() if isinstance(b, CustomBackend)}


def repeat(name: str, problem: str, output: Pass = "forward", device: str = "cpu", seed: int = 0) -> bool:
    """Check the last kernel of this name, refused or not, on one problem, and print what came out.

    Returns:
        Whether nothing failed.
    """
    return _verify.repeat(origin.latest(name), problem, output, device, seed)


def _install(
    backend: CustomBackend, problems: Sequence[ConvProblem], seconds: float | None, where: origin.Origin
) -> CustomBackend:
    """Check the backend, then let everybody see it."""
    origin.seen(backend)
    if seconds is None:
        backend.note = "not verified: registered with verify=False"
    else:
        backend.note = _verify.verify(backend, problems, seconds, where.command(backend.name))
        backend.verified = backend.note.startswith("verified")
    backend.summary += f"; {backend.note}"
    with _lock:
        _check_name(backend.name)
        registry.register(backend)
        graphs.mark(_mine().values())
    return backend


def _check_name(name: str) -> None:
    taken = registry.backends().get(name)
    if taken is not None and not isinstance(taken, CustomBackend):
        raise ValueError(f"{name!r} is the name of a backend that comes with the library; take another one")


def _check_options(name: str, options: Mapping[str, Any], signature: str, seconds: float) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"a backend's name consists of letters, digits, '_', '-' and '.'; got {name!r}")
    _check_name(name)
    if signature not in ("native", "torch"):
        raise ValueError(f"signature is 'native' or 'torch', got {signature!r}")
    wrong = set(options["layouts"]) - {"contiguous", "channels_last", "strided"}
    if wrong or not options["layouts"]:
        raise ValueError(f"layouts are among contiguous, channels_last and strided, got {options['layouts']}")
    _check_places(options["devices"], options["dtypes"])
    if isinstance(seconds, bool) or not seconds > 0:
        raise ValueError(f"seconds is a positive number, got {seconds!r}")


def _check_places(devices: tuple[Any, ...] | None, dtypes: tuple[Any, ...]) -> None:
    for device in devices or ():
        try:
            known = torch.device(device).type == device
        except (RuntimeError, TypeError):
            known = False
        if not known:
            raise ValueError(f"devices are types such as 'cpu' and 'cuda', got {device!r}")
    for dtype in dtypes:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtypes are such as torch.float32, got {dtype!r}")


def _several(option: Any) -> tuple[Any, ...]:
    """What may be given alone or as a sequence."""
    return (option,) if isinstance(option, (str, torch.dtype)) else tuple(option)


def _recipe(function: Any, pass_: Pass, signature: str, args: Any, *, free: bool) -> Recipe:
    if not callable(function):
        raise TypeError(f"{pass_}= is a function, got {type(function).__name__}")
    expressions = _of(args, pass_)
    if isinstance(expressions, str):
        raise TypeError(f'args is a sequence such as ("input", "weight"), got the text {expressions!r}')
    if expressions is not None:
        return by_expressions(expressions, pass_)
    return by_names(function, pass_, free=free) if signature == "torch" else native(function, pass_)


def _of(option: Any, pass_: Pass) -> Any:
    """An option that counts for all passes, or for each its own."""
    return option.get(pass_) if isinstance(option, Mapping) else option
