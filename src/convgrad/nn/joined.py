"""Batch normalisation and the activation behind it, computed together while the module that calls both runs.

A normalisation by itself gives what it always gave. Only while its owner's ``forward`` runs, in this thread, does it
compute the activation, too, which then hands its input on. Whoever makes a module an owner has made sure that there the
activation is all that uses the normalisation's output (`convgrad.models`).
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as hooks_of_all

from .._compat import saved_tensors_hooks

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


class _Now(threading.local):
    """What is joined in a thread."""

    def __init__(self) -> None:
        #: normalisation -> the activation that it computes, too
        self.activation: dict[Any, Any] = {}
        #: activation -> the input that is its result already
        self.computed: dict[Any, Tensor] = {}
        #: what saw the tensors that autograd saves, when the owner was called
        self.hooks: Any = None

    def activation_of(self, norm: Any) -> Any:
        """What a normalisation computes, too; None inside a checkpoint that the owner's forward makes.

        There it is computed again while no owner runs, and must save the same tensors then.
        """
        activation = self.activation.get(norm)
        return activation if activation is None or saved_tensors_hooks() == self.hooks else None


now = _Now()


def stock_twin(module: Any) -> Any:
    """What ``torch.jit.script`` compiles in its place: torch's module with the same parameters and buffers."""
    cls = type(module)
    stock = cls.__dict__.get("_convgrad_stock", cls.__bases__[-1])
    if stock.__module__.startswith("convgrad."):  # of a class of the user's, derived from ours
        return module
    twin = stock.__new__(stock)
    twin.__dict__.update(module.__dict__)
    return twin


def leaf_of_fx(module: Any, input: Any) -> Any:
    """The call in a graph of ``torch.fx``, of which torch's own modules are leaves; None outside of one."""
    if _is_dynamo_compiling() or not isinstance(input, fx.Proxy):
        return None
    tracer: Any = input.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (input,), {})


def is_hooked(module: Any) -> bool:
    """Whether someone sees what a module takes or gives."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class Owner:
    """The forward of a module that calls both."""

    #: Names of the pairs among its children.
    _convgrad_joined: tuple[tuple[str, str], ...] = ()

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply the module."""
        run = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        if _is_dynamo_compiling() or hooks_of_all._has_any_global_hook():
            return run(*args, **kwargs)
        pairs = ((self._modules.get(norm), self._modules.get(name)) for norm, name in self._convgrad_joined)
        before = now.activation, now.computed, now.hooks
        now.activation = {
            norm: activation
            for norm, activation in pairs
            if norm is not None
            and isinstance(activation, _Activation)
            and not (is_hooked(norm) or is_hooked(activation))
        }
        now.computed, now.hooks = {}, saved_tensors_hooks()
        try:
            result = run(*args, **kwargs)
            if now.computed:
                raise RuntimeError(
                    f"the forward of {type(self).__name__} has changed: when accelerate_ saw it, an activation "
                    "followed each of these batch normalisations; restore() and accelerate_ again"
                )
            return result
        finally:
            now.activation, now.computed, now.hooks = before

    __prepare_scriptable__ = stock_twin


class _Activation:
    """The forward that the three share."""

    _name = ""

    def forward(self: Any, input: Any) -> Any:
        """Apply the module."""
        if (traced := leaf_of_fx(self, input)) is not None:
            return traced
        if not _is_dynamo_compiling() and now.computed.get(self) is input:
            return now.computed.pop(self)
        return super().forward(input)  # pyright: ignore[reportAttributeAccessIssue]

    __prepare_scriptable__ = stock_twin


class ReLU(_Activation, nn.ReLU):
    _name = "relu"


class ReLU6(_Activation, nn.ReLU6):
    _name = "relu6"


class SiLU(_Activation, nn.SiLU):
    _name = "silu"


_aten: Any = torch.ops.aten


def _silu_gradient(g: Tensor, z: Tensor) -> Tensor:
    s = z.sigmoid()  # aten's own has no derivative
    return g * s * (1 + z * (1 - s))


#: name -> the gradient of its input, with derivatives of its own.
GRADIENTS: dict[str, Any] = {
    "": lambda g, z: g,
    "relu": lambda g, z: _aten.threshold_backward(g, z, 0),
    "relu6": lambda g, z: _aten.hardtanh_backward(g, z, 0.0, 6.0),
    "silu": _silu_gradient,
}
