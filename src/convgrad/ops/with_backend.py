"""A request for a backend inside a compiled graph.

`use_backend` holds while its block runs, but a graph runs long after it was traced. So a request is put into the graph
itself, by an overload of the operator that carries it: ``convgrad::convolution.with_backend``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from .._compat import jit_tracing
from ..engine import Request, active, request_for, resume, traced
from . import decompositions

Rule = Callable[..., Any]


def overload(schema: str) -> str:
    """Return the schema with one more keyword, the name of a backend or of one for each pass."""
    arguments, result = schema.split(") -> ")
    star = "" if " *, " in arguments else " *,"
    return f"{arguments},{star} str backend) -> {result}"


def under_request(rule: Rule) -> Rule:
    """Return the rule of an operator as that of its overload."""

    def requested(*args: Any, backend: str, **options: Any) -> Any:
        with resume(_decode(backend)):
            return rule(*args, **options)

    return requested


def operator(name: str) -> Callable[..., Any]:
    """``torch.ops.convgrad.<name>``; in a `use_backend` block that is being compiled or exported its overload.

    In what ``torch.onnx.export(dynamo=False)`` traces it is written in ATen's operators, the only ones that it knows.
    """
    packet = getattr(torch.ops.convgrad, name)
    if torch.compiler.is_compiling():
        if request := traced_request():
            return partial(packet.with_backend, backend=request)
    elif jit_tracing() is not None and torch.onnx.is_in_onnx_export():
        return getattr(decompositions, name)
    return packet.default


def traced_request() -> str:
    """The request of a `use_backend` block that is being compiled or exported, as a text that a graph can hold."""
    return _encode(traced[-1]) if traced else ""


def requesting(request: str) -> AbstractContextManager[None]:
    """Request a backend in this block; an empty request changes nothing."""
    return resume(_decode(request)) if request else nullcontext()


def traced_overload(op: Any) -> Callable[..., Any] | None:
    """The overload in place of the operator, where a graph is traced inside a module that requests a backend."""
    request = active()
    if request is None or not request.fixed:
        return None
    return partial(
        getattr(torch.ops.convgrad, op._schema.name.removeprefix("convgrad::")).with_backend, backend=_encode(request)
    )


def _encode(request: Request) -> str:
    return ";".join(name or "" for name in request[:3])  # ``aten:cudnn[benchmark=1,deterministic=1]`` has a comma


def _decode(text: str) -> Request:
    if ";" not in text:
        return request_for(text)._replace(fixed=True)
    return Request(*(name or None for name in text.split(";")), fixed=True)  # pyright: ignore[reportArgumentType]
