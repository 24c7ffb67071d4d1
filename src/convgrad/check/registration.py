"""Bring your own kernel: functions, or a class, become a backend like those that come with the library."""

from __future__ import annotations

import difflib
import inspect
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args

import torch
from torch.compiler import config

from .._compat import lock_over_forks, warn_user, without_autocast
from ..backends import BOTH_GRADIENTS, Arithmetic, Backend, Layout
from ..engine import registry
from ..engine import unregister as remove
from ..errors import UnknownNameError
from ..problem import PASSES, ConvProblem
from . import arguments, speed
from .arguments import METHODS, Method
from .digest import digest
from .loading import loading
from .problem_set import FLOATS, parsed
from .properties import calls_of
from .user_backend import Accepts, CustomBackend, Functions, UserKernel, as_tuple, in_words
from .verify import verify as check_suite

_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_MARK = re.compile(r"\[convgrad [^\]]*\]")
_lock = lock_over_forks()

#: Use a kernel wherever it is accepted, only where requested, or also where it was measured to be faster.
Prefer = bool | Literal["measured"]


def register(
    name: str,
    *,
    forward: Callable[..., Any] | None = None,
    grad_input: Callable[..., Any] | None = None,
    grad_weight: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    args: Sequence[Any] | Mapping[Method, Sequence[Any]] | None = None,
    accepts: Accepts | Mapping[Method, Accepts] | None = None,
    layouts: Layout | Sequence[Layout] = ("contiguous", "channels_last"),
    devices: str | Sequence[str] | None = None,
    dtypes: torch.dtype | Sequence[torch.dtype] = FLOATS,
    deterministic: bool = True,
    capture_safe: bool = True,
    arithmetic: Arithmetic = "direct",
    prefer: Prefer = True,
    verify: bool = True,
    seconds: float = 10.0,
    problems: ConvProblem | str | Sequence[ConvProblem | str] = (),
) -> Any:
    """Register functions as a backend for the passes that they compute; convgrad computes all others as before.

    Without any function it is a decorator: of a function, which becomes ``forward``; of a class whose static methods
    are called ``forward``, ``grad_input``, ``grad_weight`` and ``backward``; or of a class derived from
    `convgrad.backends.Backend` (or an object of one), which states its passes, sweeps, layouts and workspace itself. A
    registered name is replaced once the new functions have passed the check. Of two kernels for one problem the one
    registered later runs.

    Args:
        name: the backend's name in `use_backend`, `explain` and tables.
        forward, grad_input, grad_weight: compute a pass, from its two operands and the problem unless ``args`` says
            otherwise: (input, weight, problem), (grad_output, weight, problem) or (grad_output, input, problem).
        backward: computes several gradients at once, from (grad_output, input, weight, problem, output_mask), and
            returns (grad_input, grad_weight), or these and grad_bias; what the mask does not select may be None. It
            runs where both gradients are needed, and for one of them if no function for that one is given; then the
            tensor that only the other needs has its shape, but no values.
        args: what the functions are called with, by position, such as ``("input", "weight", "kernel_size[0]",
            "stride[0]")``: tensors (input, weight, grad_output; bias if the function adds it; out if it writes its
            result into a tensor that it is given), values (stride, padding, dilation, groups, kernel_size, input_size,
            weight_size, output_size; output_mask of backward), one element of such a value or its first ones,
            ``"output_mask[:2]"``, or problem, which has all of these; anything but a string is passed as it is. One
            for all functions, or one for each. A function that takes the padding is not called where its sides differ.
        accepts: a function of the problem that returns whether the functions can compute it: True, False, or the reason
            why not as a sentence; for one problem always the same. One for all functions, or one for each. None: every
            problem.
        layouts: operand layouts that the functions take, one or several; operands in another one are copied into one of
            these. "strided": any strides, without a copy; "any": lazily conjugated or negated too.
        devices: one or several types of device on which they run; None: any.
        dtypes: one or several dtypes that they take.
        deterministic: whether the same operands always give the same bits.
        capture_safe: whether they may be called while a CUDA graph is captured.
        arithmetic: how they sum, which selects the error that is allowed: "direct", "tf32", "transform" or
            "low-precision accumulation" (in the dtype of the operands; not of float32 operands in bfloat16).
        prefer: use them wherever they are accepted; False: only where requested, as by ``backend="mine"``;
            ``"measured"``: also where they were measured to be faster on this machine than what runs without them.
        verify: run the conformance suite first. False registers them without a check; `info` and `explain` say so.
        seconds: how long the check may take, without loading, compiling and the search for problems; three times that
            until 30 problems of each output have passed. With fewer the kernel is registered as not verified.
        problems: one or several to check first, as `ConvProblem` or as text; others are made of them. Name some where
            the kernel accepts few: the check draws problems at random.

    Returns:
        The backend; as a decorator, the decorated object, unchanged.

    Raises:
        CheckError: a result is wrong; with the first failing problem, its first wrong element and how to repeat it.
        TypeError, ValueError: invalid arguments.

    Equivalent to:
        >>> import torch, convgrad
        >>> def mine(input, weight, stride):
        ...     return torch.nn.functional.conv2d(input, weight, stride=stride)
        >>> square = lambda p: p.ndim == 2 and p.padding == ((0, 0), (0, 0)) and p.dilation == (1, 1) and p.groups == 1
        >>> backend = convgrad.register("mine", forward=mine, args=("input", "weight", "stride"),
        ...                             accepts=square, seconds=0.5)
        >>> x, w = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)
        >>> torch.equal(convgrad.conv2d(x, w), mine(x, w, 1))
        True
        >>> convgrad.unregister("mine")
    """
    options = locals()
    functions = {method: f for method in METHODS if (f := options.pop(method)) is not None}
    registration = Registration(**options)
    if functions:
        return registration.install(functions)

    def decorate(decorated: Any) -> Any:
        registration.install(decorated)
        return decorated

    return decorate


def unregister(name: str) -> None:
    """Remove a backend that `register` made; from the next call on the engine chooses without it.

    Raises:
        KeyError: `register` made no backend of this name.
    """
    with _lock:
        if name not in _mine():
            raise UnknownNameError.of("no backend was registered as", name, _mine())
        remove(name)
        _mark_graphs()


@dataclass
class Registration:
    """The options of `register`, checked when they are given."""

    name: str
    args: Any
    accepts: Any
    layouts: Any
    devices: Any
    dtypes: Any
    deterministic: bool
    capture_safe: bool
    arithmetic: Arithmetic
    prefer: Prefer
    verify: bool
    seconds: float
    problems: Any

    def __post_init__(self) -> None:
        for option in ("layouts", "dtypes", "problems", *["devices"] * (self.devices is not None)):
            setattr(self, option, as_tuple(option, getattr(self, option)))
        self.problems = [*map(parsed, self.problems)]
        _check_name(self.name)
        _each("args", self.args)
        for accepts in _each("accepts", self.accepts):
            if not (accepts is None or callable(accepts)):
                raise TypeError(f"accepts is a function of the problem, got {accepts!r}; None accepts every problem")
        if not self.layouts or not {*self.layouts} <= {*get_args(Layout)}:
            raise ValueError(f"layouts are among {', '.join(get_args(Layout))}, got {self.layouts}")
        for device in self.devices or ():
            with suppress(RuntimeError, TypeError):
                if torch.device(device).type == device:
                    continue
            raise ValueError(f"devices are types such as 'cpu' and 'cuda', got {device!r}")
        if empty := [option for option in ("dtypes", "devices") if getattr(self, option) == ()]:
            raise ValueError(f"{empty[0]} are one or a sequence of them, got none")
        if other := [dtype for dtype in self.dtypes if not isinstance(dtype, torch.dtype)]:
            raise TypeError(f"dtypes takes dtypes such as torch.float32, got {other[0]!r}")
        if self.arithmetic not in get_args(Arithmetic):
            known = ", ".join(map(repr, get_args(Arithmetic)))
            raise ValueError(f"arithmetic is one of {known}, got {self.arithmetic!r}")
        for option, more in (("prefer", "measured"), ("deterministic", None), ("capture_safe", None)):
            if not isinstance(value := getattr(self, option), bool) and (more is None or value != more):
                raise TypeError(f"{option} is True or False{f' or {more!r}' if more else ''}, got {value!r}")
        if isinstance(self.seconds, bool) or not isinstance(self.seconds, (int, float)) or not self.seconds > 0:
            raise ValueError(f"seconds is a positive number, got {self.seconds!r}")

    def install(self, what: Any) -> CustomBackend:
        """Make a backend, check it, and let the engine choose it."""
        with without_autocast():  # the engine calls kernels below autocast, too
            self.check(backend := self.backend(what))
        with _lock:
            source = loaded.source if (loaded := loading.get()) else None
            preferred, candidate = self.prefer is True, self.prefer == "measured"
            registry.register(backend, preferred=preferred, candidate=candidate, source=source)
            _mark_graphs()
        return backend

    def backend(self, what: Any) -> CustomBackend:
        """Return the backend of functions by their names, of one function, of a class, or of a `Backend`."""
        options = {o: getattr(self, o) for o in ("layouts", "dtypes", "deterministic", "capture_safe", "arithmetic")}
        if isinstance(what, Backend) or (isinstance(what, type) and issubclass(what, Backend)):
            usual = inspect.signature(register).parameters
            given = options | {"args": self.args, "accepts": self.accepts}
            if stated := [o for o, value in given.items() if value != usual[o].default]:
                raise TypeError(f"a Backend states {' and '.join(stated)} itself: register has no such option for it")
            own = _instance(what)
        else:
            what = _static_methods(what) if isinstance(what, type) else what
            functions: dict[Method, Any] = what if isinstance(what, dict) else {"forward": what}
            kernels: dict[Method, UserKernel] = {}
            for method, function in functions.items():
                args, accepts = (o.get(method) if isinstance(o, Mapping) else o for o in (self.args, self.accepts))
                kernels[method] = UserKernel(function, arguments.check(function, args, method), accepts)
            own = Functions(self.name, kernels, **options)
        made = CustomBackend(self.name, own, self.devices, self.prefer, self.problems)
        what = f"class {type(own).__name__}"
        for option, stated, known in (("passes", made.passes, PASSES), ("sweeps", made.sweeps, BOTH_GRADIENTS)):
            if unknown := [one for one in stated if one not in known]:  # the engine asks for no other
                raise ValueError(f"{option} of {what} are among {', '.join(map(str, known))}, got {unknown[0]!r}")
        if not (made.passes or made.sweeps):
            raise ValueError(f"{what} has neither passes nor sweeps: it computes nothing")
        return made

    def check(self, backend: CustomBackend) -> None:
        """Run the conformance suite on a backend and time it; it then says what was found."""
        places = [torch.device(d) for d in backend.devices or ("cpu", "cuda")]
        for problem in backend.named:
            against = [backend.against(problem, outputs, place) for outputs in calls_of(backend) for place in places]
            if problem.empty or all(against):
                why = "; ".join(dict.fromkeys(chain(*against)) or ["it is empty"])
                raise ValueError(f"problems= names {problem}, which {backend.name!r} does not accept: {why}")
        source = loading.get()
        known = digest(backend.parts)
        backend.version = (known or uuid.uuid4().hex)[:16]
        if not self.verify or (source is not None and not source.verify):
            backend.note = "not verified: registered with verify=False"
        else:
            sentences = check_suite(backend, known, self.seconds)
            backend.note, backend.verified = "; ".join(sentences), all(s.startswith("verified") for s in sentences)
            if any(backend.runs_on(d) for d in ("cpu", *["cuda"] * torch.cuda.is_available())):
                backend.timings = speed.measure(backend, self.seconds)
            if not backend.verified:  # an unverified one may still be refused
                used = " runs wherever it is usable, and" * (self.prefer is True)
                warn_user(f"{backend.name!r}{used} is {backend.note}")
        backend.summary = "; ".join(filter(None, [backend.summary, backend.note, in_words(backend.timings)]))


def _mine() -> dict[str, CustomBackend]:
    return {n: b for n, b in registry.backends().items() if isinstance(b, CustomBackend)}


def _mark_graphs() -> None:
    """Let PyTorch reuse a compiled graph, which holds a choice, only where the same kernels are registered."""
    kernels = " ".join(f"{b.name}={b.version}" for b in _mine().values() if b.prefer)
    rest = _MARK.sub("", config.cache_key_tag)  # a tag of the user's own
    config.cache_key_tag = f"{rest}[convgrad {kernels}]" if kernels else rest


# ---- what is refused -----------------------------------------------------------------------------


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"a backend's name consists of letters, digits, '_', '-' and '.'; got {name!r}")
    if name in ("all", "engine"):
        raise ValueError(f"{name!r} means something else where backends are named; take another name")
    if name in registry.backends() and name not in _mine():
        raise ValueError(f"{name!r} is the name of a backend that comes with the library; take another one")


def _each(option: str, given: Any) -> list[Any]:
    """Return the values of an option that may be one for all functions or one for each."""
    if not isinstance(given, Mapping):
        return [given]
    if unknown := [m for m in given if m not in METHODS]:
        raise ValueError(f"{option} is for {', '.join(METHODS)}, there is no {unknown[0]!r}")
    return [*given.values()]


def _instance(own: Backend | type[Backend]) -> Backend:
    """Return a backend or one of this class."""
    if isinstance(own, Backend):
        return own
    if inspect.isabstract(own):
        missing = " and no ".join(sorted(own.__abstractmethods__))
        raise TypeError(f"class {own.__name__} has no {missing}, which every Backend has")
    return own()


def _static_methods(decorated: type) -> dict[Method, Any]:
    """Return the methods of a class that are kernels."""
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
    if bound := [m for m in found if inspect.isfunction(inspect.getattr_static(decorated, m))]:
        raise TypeError(f"{' and '.join(bound)} of class {decorated.__name__} must be static: add @staticmethod")
    return found
