"""The options of `convgrad.register`, checked."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch

from ..backends import Arithmetic, Backend, Layout
from ..check import default_problems
from ..problem import OUTPUTS, PASSES, ConvProblem
from .arguments import METHODS, Method


def as_tuple(name: str, option: Any) -> tuple[Any, ...]:
    """An option that may be one value or a sequence of them, as a tuple."""
    if option is None:
        raise TypeError(f"{name} are one or a sequence of them, got None")
    return (option,) if isinstance(option, (str, torch.dtype, ConvProblem)) else tuple(option)


def check_options(options: Mapping[str, Any], devices: Sequence[Any] | None, seconds: float) -> None:
    """Refuse a value that is no layout, device, dtype, arithmetic or boolean, wherever one is expected."""
    known_layouts = get_args(Layout)
    if not options["layouts"] or not {*options["layouts"]} <= {*known_layouts}:
        raise ValueError(f"layouts are among {', '.join(known_layouts)}, got {options['layouts']}")
    for device in devices or ():
        try:
            known = torch.device(device).type == device
        except (RuntimeError, TypeError):
            known = False
        if not known:
            raise ValueError(f"devices are types such as 'cpu' and 'cuda', got {device!r}")
    for dtype in options["dtypes"]:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtypes takes dtypes such as torch.float32, got {dtype!r}")
    if options["arithmetic"] not in get_args(Arithmetic):
        known = ", ".join(map(repr, get_args(Arithmetic)))
        raise ValueError(f"arithmetic is one of {known}, got {options['arithmetic']!r}")
    for name in ("prefer", "deterministic", "capture_safe"):
        if not isinstance(options[name], bool):
            raise TypeError(f"{name} is True or False, got {options[name]!r}")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ValueError(f"seconds is a positive number, got {seconds!r}")


def check_mapping(option: str, given: Any) -> None:
    """Refuse ``args`` and ``accepts`` for unknown names of functions, and an ``accepts`` that cannot be called."""
    unknown = [m for m in given if m not in METHODS] if isinstance(given, Mapping) else []
    if unknown:
        raise ValueError(f"{option} is for {', '.join(METHODS)}, there is no {unknown[0]!r}")
    values: Any = given.values() if isinstance(given, Mapping) else (given,)
    for value in values if option == "accepts" else ():
        if value is not None and not callable(value):
            raise TypeError(f"accepts is a function of the problem, got {value!r}; None accepts every problem")
        if value is not None:
            _check_accepts(value)


def _check_accepts(accepts: Callable[..., object]) -> None:
    """Refuse one that raises for every problem. For some it may, such as those without the dimension it looks at."""
    raised: list[Exception] = []
    for problem in default_problems():
        try:
            accepts(problem)
            return
        except Exception as error:
            raised.append(error)
    raise TypeError(f"accepts raised {type(raised[0]).__name__}: {raised[0]} for every problem") from raised[0]


def instance(own: Backend | type[Backend]) -> Backend:
    """The backend itself, or one of this class; refused if it computes nothing, or an unknown output."""
    if not isinstance(own, Backend):
        if inspect.isabstract(own):
            missing = " and no ".join(sorted(own.__abstractmethods__))
            raise TypeError(f"class {own.__name__} has no {missing}, which every Backend has")
        own = own()
    what, passes = f"class {type(own).__name__}", as_tuple("passes", own.passes)
    sweeps = tuple(as_tuple("sweeps", s) for s in own.sweeps)
    unknown = [p for p in passes if p not in PASSES]
    if unknown:
        raise ValueError(f"passes of {what} are among {', '.join(PASSES)}, got {unknown[0]!r}")
    unknown = [o for sweep in sweeps for o in sweep if o not in OUTPUTS]
    if unknown:
        raise ValueError(f"sweeps of {what} are tuples of {', '.join(OUTPUTS)}, got {unknown[0]!r}")
    if not (passes or sweeps):
        raise ValueError(f"{what} has neither passes nor sweeps: it computes nothing")
    return own


def static_methods(decorated: type) -> dict[Method, Any]:
    """The methods of a class that are kernels."""
    if issubclass(decorated, torch.autograd.Function):
        raise TypeError(f"{decorated.__name__} is an autograd.Function: register its kernels, which take no ctx")
    found: dict[Method, Any] = {m: getattr(decorated, m) for m in METHODS if hasattr(decorated, m)}
    absent = [m for m in METHODS if m not in found]
    for name in dir(decorated):
        near = difflib.get_close_matches(name.lower(), absent, 1, cutoff=0.85)
        if near and name[0] != "_" and callable(getattr(decorated, name)):
            raise TypeError(f"class {decorated.__name__} has {name!r}, which is no pass: did you mean {near[0]!r}?")
    if not found:
        raise TypeError(f"class {decorated.__name__} has no static method {', '.join(METHODS)}: nothing to register")
    bound = [m for m in found if inspect.isfunction(inspect.getattr_static(decorated, m))]
    if bound:
        raise TypeError(f"{' and '.join(bound)} of class {decorated.__name__} must be static: add @staticmethod")
    return found
