"""The public conformance suite: is this backend right?

The library checks its own backends with it. A new backend needs no other test::

    from convgrad.testing import check_backend

    def test_mine():
        check_backend(MyBackend()).raise_if_failed()

It also takes a forward function, as `convgrad.register` does, and a convolution module with its own backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ._compat import channels_last_of
from .backends import Backend
from .check import CheckReport, CheckResult, check_problem, default_problems, outputs_of
from .custom import backend_of, problems_for
from .engine import get_backend
from .problem import ConvProblem, Output
from .sizes import Dimension, effective_kernel, fields_of, output_length

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = ["CheckReport", "CheckResult", "check_backend", "check_problem", "default_problems", "outputs_of",
           "problems"]  # fmt: skip


def check_backend(
    what: Backend | str | nn.Module | Callable[..., Any],
    problems: Iterable[ConvProblem | str] | None = None,
    *,
    args: Sequence[Any] | None = None,
    accepts: Callable[[ConvProblem], bool | str] | None = None,
    device: torch.device | str = "cpu",
    outputs: Iterable[Output] | None = None,
    seconds: float | None = None,
    progress: Callable[[int, int, ConvProblem], None] | None = None,
    seed: int = 0,
    repeats: int = 20,
    properties: Iterable[str] | None = None,
) -> CheckReport:
    """Check a backend, a function or a module on many problems.

    Args:
        what: a backend, or the name of a registered one; a forward function; or a convolution module, whose forward and
            autograd gradients are checked with its own channels, kernel, stride and padding.
        problems: what to compute; by default `default_problems`, for a module inputs of several sizes, and for a
            function or a registered kernel problems made for it.
        args, accepts: for a function, as in `convgrad.register`.
        device, seed, repeats, properties: as for `check_problem`.
        outputs: which of its outputs; all that it has if not given.
        seconds: stop when this much time has passed; the report says so.
        progress: called with (problems done, problems in all, the next problem).

    Raises:
        TypeError: ``what`` is none of these.

    Equivalent to:
        >>> check_backend("reference", ["ic2iw5oc3kw3", "g2ic2ih4oc4kh3ph1 float64"]).ok
        True
        >>> check_backend(nn.Conv2d(4, 6, 3, stride=2, groups=2), properties=["exact", "bound"]).ok
        True
        >>> check_backend(torch.mul, ["ic2iw5oc3kw3"], args=("input", 2)).ok
        False
    """
    if not isinstance(what, (Backend, str)):
        what = backend_of(what, args, accepts)
    elif args is not None or accepts is not None:
        raise TypeError("args and accepts belong to a function; a backend states them itself")
    backend = get_backend(what) if isinstance(what, str) else what
    given = problems_for(backend) if problems is None else problems
    todo = [ConvProblem.parse(p) if isinstance(p, str) else p for p in given]
    chosen = outputs_of(backend) if outputs is None else tuple(outputs)
    names = None if properties is None else tuple(properties)
    end = float("inf") if seconds is None else time.monotonic() + seconds
    results: list[CheckResult] = []
    for done, problem in enumerate(todo):
        if time.monotonic() > end:
            return CheckReport(backend.name, tuple(results), finished=False)
        if progress is not None:
            progress(done, len(todo), problem)
        for output in chosen:
            results += check_problem(
                backend, problem, output, device=device, seed=seed, repeats=repeats, properties=names
            )
    return CheckReport(backend.name, tuple(results))


def problems(
    *,
    ndim: int | None = None,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    crops: bool = True,
    largest: int = 12,
) -> SearchStrategy[ConvProblem]:
    """A hypothesis strategy: any small canonical problem.

    Args:
        ndim: 1, 2 or 3 dimensions only.
        dtypes: to draw from.
        crops: whether padding may be negative.
        largest: spatial size.

    Raises:
        ImportError: hypothesis is not installed.

    Equivalent to:
        >>> from hypothesis import find
        >>> find(problems(ndim=2), lambda p: p.depthwise and p.stride == (2, 2)).groups
        2
    """
    from hypothesis import strategies as st

    @st.composite
    def draw_problem(draw: DrawFn) -> ConvProblem:
        d = ndim or draw(st.integers(1, 3))
        groups = draw(st.sampled_from([1, 1, 2, 3, 5]))
        dims = [_draw_dimension(draw, largest, crops) for _ in range(d)]
        last = d > 1 and draw(st.booleans())
        return ConvProblem(
            batch=draw(st.integers(1, 3)),
            in_channels=groups * draw(st.integers(1, 3)),
            out_channels=groups * draw(st.integers(1, 4)),
            groups=groups,
            **fields_of(dims),
            dtype=draw(st.sampled_from(dtypes)),
            memory_format=channels_last_of(d) if last else torch.contiguous_format,
            has_bias=draw(st.booleans()),
            origin=draw(st.sampled_from(("plain", "transposed"))),
        ).canonical()

    return draw_problem()


def _draw_dimension(draw: DrawFn, largest: int, crops: bool) -> Dimension:
    from hypothesis import strategies as st

    kernel, stride, dilation = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    least = -2 if crops else 0
    low, high = draw(st.integers(least, 4)), draw(st.integers(least, 4))
    fits = effective_kernel(kernel, dilation) - low - high  # the smallest input with an output
    size = max(draw(st.integers(1, largest)), fits)
    out = output_length(size, kernel, stride, low, high, dilation)
    return Dimension(size, out, kernel, stride, low, high, dilation)


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
