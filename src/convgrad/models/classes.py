"""The class that computes a layer with convgrad, and PyTorch's class for it.

A module is accelerated by giving it another class: nothing of the instance changes, a call costs nothing more, and the
old class brings the old module back. A plain ``torch.nn`` module gets its namesake of `convgrad.nn`. A subclass of a
user gets a class made of both, in which ``super()`` finds convgrad's computation behind the user's own methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .. import nn as ours
from ..nn import constructors, padding
from .redirected import redirected
from .report import ALREADY

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_NORMS = (*_BATCH_NORMS, *_INSTANCE_NORMS)
PADS = (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)
_OURS: dict[type, type] = {cls: getattr(ours, cls.__name__) for cls in (*_CONVOLUTIONS, *_NORMS, nn.Linear)}
_STOCK = {value: key for key, value in _OURS.items()}
_LAZY = {getattr(nn, f"Lazy{cls.__name__}") for cls in (*_CONVOLUTIONS, nn.Linear)}
#: Lazy normalizations, which are not derived from what they become -> ours of that.
_LAZY_NORMS = {getattr(nn, f"Lazy{cls.__name__}"): _OURS[cls] for cls in _NORMS}


def kind_of(module: nn.Module) -> str | None:
    """Return the kind of a layer that convgrad computes, as in `Decision`; None for any other module."""
    if isinstance(module, (*_NORMS, *_LAZY_NORMS)):
        return "normalization"
    if isinstance(module, nn.Linear):  # that of `torch.nn.MultiheadAttention` is never called
        return None if type(module) is NonDynamicallyQuantizableLinear else "linear layer"
    return "convolution" if isinstance(module, _CONVOLUTIONS) else None


def _base_of(cls: type) -> type[nn.Module]:
    """Return the class of torch.nn that a class is derived from."""
    return next(c for c in cls.__mro__ if c in _OURS)


# ---- there ---------------------------------------------------------------------------------------


def accelerated_class(cls: type) -> type:
    """Return the class that computes ``cls`` with convgrad; Python may refuse it with any error."""
    if cls in _OURS:
        return _OURS[cls]
    if _is_parametrized(cls):
        return constructors.with_bases(cls, (accelerated_class(cls.__bases__[0]),))
    if cls in _LAZY_NORMS:
        body = {"_convgrad_stock": cls, "cls_to_become": _LAZY_NORMS[cls]}
        return constructors.derived_class(accelerated_class, cls, (cls,), body)
    base = _OURS[_base_of(cls)]
    # Attributes ``backend`` and ``layout`` of a user's class are the user's.
    body: dict[str, Any] = {"_convgrad_stock": cls, "_convgrad_backend": None, "_convgrad_layout": "NCL"}
    if cls in _LAZY:  # it turns into this class when it first sees an input
        body["cls_to_become"] = base
    elif _own_computation(cls):
        body["forward"] = redirected(cls)
    return constructors.derived_class(accelerated_class, cls, (cls, base), body)


def padding_class(cls: type) -> type:
    """Return the class of a module whose forward pads what a convolution reads (`convgrad.nn.padding`)."""
    if _is_parametrized(cls):
        return constructors.with_bases(cls, (padding_class(cls.__bases__[0]),))
    forward = padding.zero_pad if cls in PADS else padding.watched(cls)
    body = {"forward": forward, "_convgrad_stock": cls, "_convgrad_pads": True}
    return constructors.derived_class(padding_class, cls, (cls,), body)


def pads(module: nn.Module) -> bool:
    """Return whether the forward of a module may pad what a convolution reads, by the names in it.

    Where it does not, watching it costs some microseconds in its first call.
    """
    cls, is_convolution = type(module), isinstance(module, _CONVOLUTIONS)
    return (
        (any(isinstance(m, _CONVOLUTIONS) for m in module.children()) or (is_convolution and not _own_computation(cls)))
        and not cls.__module__.startswith(("torch.", "convgrad."))
        and not hasattr(cls, "_convgrad_pads")
        and not isinstance(module, fx.GraphModule)  # whose class gets other forwards
        and "forward" not in vars(module)
        and any("pad" in name for name in _names_of(getattr(cls, "forward", None)))
    )


# ---- back ----------------------------------------------------------------------------------------


def restore_class(module: nn.Module, before: type, after: type) -> None:
    """Undo the change of a module's class from ``before`` to ``after``.

    It may have changed since: a lazy module that has seen an input, a parametrization that was added or removed, the
    class that `torch.distributed.fsdp.fully_shard` derives.
    """
    now = type(module)
    same = now is after and _properties(after) == _properties(before)
    module.__class__ = before if same else stock_class(now)


def _properties(cls: type) -> set[str]:
    return {k for k, v in cls.__dict__.items() if isinstance(v, property)}


def stock_class(cls: type) -> type:
    """Return the class that an accelerated class was made for; any other class unchanged."""
    if cls in _STOCK:
        return _STOCK[cls]
    if "_convgrad_stock" in cls.__dict__:
        return cls.__dict__["_convgrad_stock"]
    if cls.__module__.split(".")[0] == "convgrad":  # what `convert_` made of it
        return cls
    bases = tuple(map(stock_class, cls.__bases__))
    return cls if bases == cls.__bases__ else constructors.with_bases(cls, bases)


# ---- parametrized modules ------------------------------------------------------------------------


def _is_parametrized(cls: type) -> bool:
    """Whether torch made this class for one module, to compute its weight from other parameters.

    It removes its parametrization by giving the module the class's first base, so ours has to be that base.
    """
    return (
        cls.__name__.startswith("Parametrized")
        and len(cls.__bases__) == 1
        and "__getstate__" in cls.__dict__
        and any(isinstance(v, property) for v in cls.__dict__.values())
    )


# ---- what cannot be accelerated --------------------------------------------------------------------------------

#: By torch's class: what the names of functions contain whose calls by a user's class convgrad computes.
_FUNCTION = {
    **dict.fromkeys(_CONVOLUTIONS, "conv"),
    **dict.fromkeys(_BATCH_NORMS, "batch_norm"),
    **dict.fromkeys(_INSTANCE_NORMS, "instance_norm"),
    nn.Linear: "linear",
}


def weight_of(module: Any) -> Tensor | None:
    """Return the weight of a layer for its dtype, device and strides, without running code that computes it.

    Of a parametrized weight that is what it is computed from.
    """
    if (own := module._parameters.get("weight")) is not None:
        return own
    if "weight" in (module._modules.get("parametrizations") or ()):
        return next(module.parametrizations["weight"].parameters(), None)
    return vars(module).get("weight")  # as the older weight_norm and pruning set it


def reason_against(module: nn.Module) -> str | None:
    """Return why a module cannot be accelerated by its class; None where it can."""
    if isinstance(module, tuple(_STOCK)):
        return ALREADY
    if "forward" in vars(module) or "_conv_forward" in vars(module):
        return "its forward was replaced on the instance"
    kind = kind_of(module)
    if kind != "normalization" and weight_of(module) is None:
        return "it has no weight yet"
    cls = type(module)
    if _is_parametrized(cls):
        cls = cls.__bases__[0]
    if cls in _OURS or cls in _LAZY or cls in _LAZY_NORMS:
        own = kind == "convolution" and sorted({"backend", "layout"} & vars(module).keys())
        return f"it has an attribute {own[0]!r}, which means something else to convgrad" if own else None
    if type(cls).__name__ == "ScriptMeta":
        return f"it is scripted{'; convgrad.takeover() computes it' if kind == 'convolution' else ''}"
    own = _own_computation(cls)
    if not own or any(_FUNCTION[_base_of(cls)] in name for _, method in own for name in _names_of(method)):
        return None
    return f"its class computes it itself in {own[0][0]}"


def _own_computation(cls: type) -> list[tuple[str, Any]]:
    """Return the methods of a user's class, by name, that never call torch's computation."""
    return [
        (f"{klass.__name__}.{name}", klass.__dict__[name])
        for klass in cls.__mro__[: cls.__mro__.index(_base_of(cls))]
        for name in ("forward", "_conv_forward")
        if name in klass.__dict__ and not _hands_on(klass.__dict__[name], name)
    ]


def _hands_on(method: Any, name: str) -> bool:
    names = _names_of(method)
    return "_conv_forward" in names or (name == "forward" and "forward" in names)


def _names_of(method: Any) -> set[str]:
    code = getattr(inspect.unwrap(method), "__code__", None)
    return set() if code is None else {*names_in(code)}


def names_in(code: CodeType) -> Iterator[str]:
    """Return every attribute and global that a function and the functions inside it name."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
