"""Bring your own kernel: functions, or a class, become a backend like those that come with the library."""

from __future__ import annotations

import inspect
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.compiler import config

from .._compat import lock_over_forks, warn_user
from ..backends import Arithmetic, Backend, Layout
from ..engine import registry
from ..engine import unregister as remove
from ..errors import UnknownNameError
from ..problem import ConvProblem, Output, Outputs
from . import arguments
from .adapted import backend_of, problem_of_module
from .arguments import Method
from .backend import Accepts, ClassBackend, CustomBackend, FunctionsBackend, UserKernel, in_words
from .loading import foreign_frames, load_kernels, loading
from .options import as_tuple, check_mapping, check_options, instance, static_methods
from .source import fingerprint
from .speed import measure
from .verified import parts_of
from .verify import problems_for
from .verify import verify as _verify

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_MARK = re.compile(r"\[convgrad [^\]]*\]")
_lock = lock_over_forks()


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
    dtypes: torch.dtype | Sequence[torch.dtype] = _FLOATS,
    deterministic: bool = True,
    capture_safe: bool = True,
    arithmetic: Arithmetic = "direct",
    prefer: bool = True,
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
        forward: computes the output, from (input, weight, problem) unless ``args`` says otherwise.
        grad_input: computes the input's gradient, from (grad_output, weight, problem).
        grad_weight: computes the weight's gradient, from (grad_output, input, problem).
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
        accepts: a function of the problem that says whether the functions can compute it: True, False, or the reason
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
        prefer: use them wherever they are accepted; False: only where requested, as by ``backend="mine"``.
        verify: run the conformance suite first. False registers them without a check; `info` and `explain` say so.
        seconds: how long the check may take, without loading and compiling at the first call and the search for
            problems; until 30 problems of each output have passed, three times that. With fewer the kernel is
            registered as not verified. The next time, the check continues.
        problems: one or several problems to check first, as `ConvProblem` or as text; needed if the check finds none
            that the kernel accepts.

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
    options: dict[str, Any] = {
        "layouts": as_tuple("layouts", layouts),
        "dtypes": as_tuple("dtypes", dtypes),
        "deterministic": deterministic,
        "capture_safe": capture_safe,
        "arithmetic": arithmetic,
    }
    places = None if devices is None else as_tuple("devices", devices)
    _check_name(name)
    check_options({**options, "prefer": prefer}, places, seconds)
    for option, given in (("args", args), ("accepts", accepts)):
        check_mapping(option, given)
    named = [ConvProblem.parse(p) if isinstance(p, str) else p for p in as_tuple("problems", problems)]

    def kernel(function: Callable[..., Any], method: Method) -> UserKernel:
        its_args: Any = args.get(method) if isinstance(args, Mapping) else args
        its_accepts: Any = accepts.get(method) if isinstance(accepts, Mapping) else accepts
        return UserKernel(function, arguments.check(function, its_args, method), its_accepts)

    def of_functions(functions: Mapping[Method, Any]) -> CustomBackend:
        kernels: dict[Method, UserKernel] = {m: kernel(f, m) for m, f in functions.items() if f is not None}
        return FunctionsBackend(name, kernels, places, prefer, options)

    def of_a_class(own: Backend) -> CustomBackend:
        usual = inspect.signature(register).parameters
        stated = [o for o, v in {**options, "args": args, "accepts": accepts}.items() if v != usual[o].default]
        if stated:
            raise TypeError(f"a Backend states {' and '.join(stated)} itself: register has no such option for it")
        return ClassBackend(name, own, places, prefer)

    def finish(backend: CustomBackend) -> CustomBackend:
        source = loading.get()
        backend = _install(backend, named, seconds if verify and (source is None or source.verify) else None)
        backend.source = None if source is None else source.source
        return backend

    functions: dict[Method, Any] = {
        "forward": forward, "grad_input": grad_input, "grad_weight": grad_weight, "backward": backward
    }  # fmt: skip
    if any(f is not None for f in functions.values()):
        return finish(of_functions(functions))

    def decorate(decorated: Any) -> Any:
        if isinstance(decorated, Backend) or (isinstance(decorated, type) and issubclass(decorated, Backend)):
            finish(of_a_class(instance(decorated)))
        elif isinstance(decorated, type):
            finish(of_functions(static_methods(decorated)))
        else:
            finish(of_functions({"forward": decorated}))
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


def _install(backend: CustomBackend, named: Sequence[ConvProblem], seconds: float | None) -> CustomBackend:
    """Check the backend and time it, then let everybody see it."""
    _check_named(backend, named)
    backend.version = (fingerprint(parts_of(backend)) or uuid.uuid4().hex)[:16]
    unseen = ["not verified: registered with verify=False"]
    sentences = unseen if seconds is None else _verify(backend, named, seconds)
    backend.note, backend.verified = "; ".join(sentences), all(s.startswith("verified") for s in sentences)
    here = any(backend.runs_on(d) for d in ("cpu", *["cuda"] * torch.cuda.is_available()))
    backend.timings = measure(backend, named, seconds) if here and seconds is not None else ()
    if seconds is not None and not backend.verified:  # not before it can be refused
        warn_user(f"{backend.name!r}{' runs wherever it is usable, and' * backend.preferred} is {backend.note}")
    backend.summary = "; ".join(filter(None, [backend.summary, backend.note, in_words(backend.timings)]))
    with _lock:
        _check_name(backend.name)
        registry.register(backend)
        _mark_graphs()
    return backend


def _check_named(backend: CustomBackend, named: Sequence[ConvProblem]) -> None:
    """Refuse a named problem that nothing of the backend accepts."""
    computed: list[Outputs] = [*((p,) for p in backend.passes), *backend.sweeps]
    places = [torch.device(d) for d in backend.devices or ("cpu", "cuda")]
    for problem in named:
        against = [backend.against(problem, outputs, place) for outputs in computed for place in places]
        if problem.empty or all(against):
            reasons = dict.fromkeys(r for reasons in against for r in reasons) or ["it is empty"]
            raise ValueError(f"problems= names {problem}, which {backend.name!r} does not accept: {'; '.join(reasons)}")


def _mine() -> dict[str, CustomBackend]:
    return {n: b for n, b in registry.backends().items() if isinstance(b, CustomBackend)}


def _mark_graphs() -> None:
    """Compiled graphs that PyTorch keeps on disk are found again only with the same kernels registered: a graph holds
    the choice that was made when it was traced. A tag of the user's own stays.
    """
    kernels = " ".join(f"{b.name}={b.version}" for b in _mine().values() if b.preferred)
    rest = _MARK.sub("", config.cache_key_tag)
    config.cache_key_tag = f"{rest}[convgrad {kernels}]" if kernels else rest


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"a backend's name consists of letters, digits, '_', '-' and '.'; got {name!r}")
    if name in ("all", "engine"):
        raise ValueError(f"{name!r} means something else where backends are named; take another name")
    if name in registry.backends() and name not in _mine():
        raise ValueError(f"{name!r} is the name of a backend that comes with the library; take another one")
