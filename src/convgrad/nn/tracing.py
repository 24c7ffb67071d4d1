"""Layers where PyTorch records calls: leaves in ``torch.fx``, an error in ``torch.jit.script``."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .._compat import fx_tracing
from ..errors import UnsupportedError

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


def refuse_scripting(module: Any) -> None:
    """Raise an error: ``torch.jit.script`` calls this, and would put what it returns into the user's model."""
    raise UnsupportedError(
        f"torch.jit.script of convgrad's {type(module).__name__}: script the model made of torch.nn's modules "
        "(`restore()` of accelerate_'s report gives them back) and run it inside convgrad.takeover(), "
        "or use torch.compile, torch.export or torch.jit.trace"
    )


def leaf_of_fx(module: Any, input: Any, *arguments: Any) -> Any:
    """Return the call in a graph of ``torch.fx``, of which torch's own modules are leaves; None outside of one.

    A module that is traced itself is no leaf, nor is one of a class of the user's: the graph already has what the class
    does besides. The input may be a tensor, such as a buffer, but then the weight is a proxy.
    """
    if _is_dynamo_compiling() or type(module).__module__.split(".")[0] != "convgrad":
        return None
    proxy = input
    if not isinstance(input, fx.Proxy) and fx_tracing():
        proxy = getattr(module, "weight", None)
    if not isinstance(proxy, fx.Proxy):
        return None
    tracer: Any = proxy.tracer
    if tracer.root is module:
        return None
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (input, *arguments), {})
