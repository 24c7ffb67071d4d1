"""Schemes for existing layers: a whole network, or one layer of any class."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .quantized import Quantized, layers
from .schemes import Scheme, Xnor
from .shift import ShiftIntegers, ShiftQ, get_shift_and_sign

__all__ = ["clip_", "convert_", "export_shift", "parametrize_"]


def convert_(model: nn.Module, scheme: Scheme | None = None, *, skip: str | Iterable[str] = ()) -> list[str]:
    """Quantize every convolution and linear layer of a network by a scheme, in place.

    A layer gets another class and stays the same object with the same parameters, hooks and buffers. Only DeepShift-PS
    replaces the weight by a shift and a sign (layers that share a weight share these), so create the optimizer
    afterwards. Subclasses of torch's layers are left alone, because they may compute anything; use `parametrize_` for
    them. DeepShift-PS also leaves layers whose weight a hook computes from other tensors (pruning, the old
    ``weight_norm``).

    Args:
        model: a network, or one layer.
        scheme: what the weights become; ``ShiftQ()`` by default.
        skip: names of layers to leave in float, one or several, as in ``model.named_modules()``. Papers on binary
            weights often leave the first and the last one.

    Returns:
        the names of the layers that were converted; if there are none, a warning says why

    Raises:
        TypeError: the scheme is not a `Scheme`, or it is one of your own, for which there are no layers (use
            `parametrize_`); or a layer has complex weights.
        ValueError: a name that no layer has; or, with DeepShift-PS, a layer that is not converted shares its weight.

    Equivalent to:
        >>> import convgrad
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.LazyLinear(10))
        >>> convgrad.nn.convert_(net, convgrad.nn.Binary(), skip=["0"])
        ['2']
        >>> type(net[2]) is convgrad.nn.BinaryConv2d
        True
    """
    scheme = _scheme(ShiftQ() if scheme is None else scheme)
    if type(scheme) not in {of for of, _ in layers}:
        raise TypeError(f"there are no layers of {type(scheme).__name__}; parametrize_ takes a scheme of your own")
    kept = scheme.names == ("weight",)

    def quantized(module: nn.Module) -> type | None:
        cls = layers.get((type(scheme), type(module)))
        return cls if kept or "weight" in module._parameters else None

    classes = new_classes(model, skip, quantized, Quantized)
    if complexes := [name for name, (module, _) in classes.items() if module.weight.dtype.is_complex]:
        raise TypeError(f"schemes are of real weights, those of {', '.join(complexes)} are complex: skip= leaves them")
    others = {name: module for name, module in model.named_modules() if not kept and name not in classes}
    for name, module in others.items():
        for other, (layer, _) in classes.items():
            if any(p is layer.weight for p in module._parameters.values()):
                raise ValueError(
                    f"the weight of {other!r} is also a parameter of {name!r}, which is not converted: skip={other!r} "
                    "leaves both, and ShiftQ keeps the weight"
                )
    made: dict[Tensor, dict[str, nn.Parameter]] = {}
    for module, cls in classes.values():
        module.__class__ = cls
        module.adopt(scheme, made)
    for module in model.modules():  # torch's kernel of transformers in eval() reads parameters without their scheme
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        elif isinstance(module, nn.TransformerEncoderLayer) and isinstance(module.linear1, Quantized):
            module.activation_relu_or_gelu = 0  # it then takes neither activation
    return [*classes]


def new_classes(
    model: nn.Module, skip: str | Iterable[str], converted: Callable[[nn.Module], type | None], done: type
) -> dict[str, tuple[Any, type]]:
    """Return the layers that get another class, and that class, by name; warn where there are none.

    ``converted`` returns the class that a layer gets, None where it stays; of class ``done`` are those of before.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the layers of a torch.nn.Module are converted, got {type(model).__name__}")
    modules, skipped = dict(model.named_modules()), {skip} if isinstance(skip, str) else set(skip)
    if unknown := sorted(skipped - set(modules)):
        raise ValueError(f"skip names layers that the model does not have: {', '.join(unknown)}")
    classes = {n: (m, cls) for n, m in modules.items() if n not in skipped and (cls := converted(m)) is not None}
    if not classes:
        before = [f"{name} ({type(m).__name__})".lstrip() for name, m in modules.items() if isinstance(m, done)]
        what = f"converted already: {', '.join(before)}" if before else "no layer here is of a class that is converted"
        warnings.warn(f"no layer was converted; {what}", stacklevel=3)
    return classes


def parametrize_(layer: nn.Module, scheme: Scheme) -> nn.Module:
    """Put a scheme on a layer of any class that has a ``weight``, with ``torch.nn.utils.parametrize``.

    The layer computes what it did before, with quantized weights. If the scheme quantizes the input too, a forward
    pre-hook does so. ``torch.nn.utils.parametrize.remove_parametrizations`` leaves the quantized weights as plain ones.

    Args:
        layer: a layer with a floating-point ``weight`` of at least two dimensions: one of torch's convolutions or
            linear layers, of ours, or of yours. The output channels are its first dimension; if the layer has a true
            attribute ``transposed``, the second one, in each of its ``groups``. It is returned.
        scheme: what the weight becomes.

    Raises:
        TypeError: the scheme is not a `Scheme`, or the layer has no such weight or is quantized already.
        ValueError: the scheme multiplies the output (``Xnor(scale_input=True)``), which a parametrization cannot do.

    Equivalent to:
        >>> import torch, convgrad
        >>> layer = convgrad.nn.parametrize_(torch.nn.Conv1d(1, 1, 2), convgrad.nn.Binary(scale=False))
        >>> layer.weight = torch.tensor([[[0.5, -2.0]]])
        >>> layer.weight.tolist(), layer.parametrizations.weight.original.tolist()
        ([[[1.0, -1.0]]], [[[0.5, -2.0]]])
    """
    scheme = _scheme(scheme)
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.dim() < 2:
        raise TypeError(f"{type(layer).__name__} has no floating-point weight of at least two dimensions")
    if isinstance(layer, Quantized) or parametrize.is_parametrized(layer, "weight"):
        raise TypeError(f"the weight of this {type(layer).__name__} is quantized or parametrized already")
    if isinstance(scheme, Xnor) and scheme.scale_input:
        raise ValueError("scale_input=True multiplies the output, which no parametrization can: use convert_")
    trained = weight.requires_grad
    parametrize.register_parametrization(layer, "weight", _Weight(scheme, layer))
    for name, original in zip(scheme.names, _quantized(layer)[1], strict=True):
        original.requires_grad_(trained and not getattr(scheme, f"freeze_{name}", False))
    if scheme.quantizes_input:
        layer.register_forward_pre_hook(partial(_with_input, scheme), with_kwargs=True)
        if type(scheme).bias is not Scheme.bias and isinstance(getattr(layer, "bias", None), Tensor):
            parametrize.register_parametrization(layer, "bias", _Bias(scheme, layer))
    return layer


@torch.no_grad()
def clip_(model: nn.Module) -> None:
    """Clip the float shadow weights of a network to their range, in place; call it after each step of the optimizer.

    For layers and parametrizations. Binary weights: to [-1, 1], as in BinaryConnect (arXiv:1511.00363, section 2.4) and
    BNN (arXiv:1602.02830, algorithm 1). Shift weights: into the range of the shifts, as DeepShift's code does before
    each forward. Ternary weights have no range.

    Equivalent to:
        >>> import torch, convgrad
        >>> layer = convgrad.nn.BinaryConv1d(1, 1, 2)
        >>> _ = layer.weight.data.copy_(torch.tensor([[[0.5, -3.0]]]))
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> _ = optimizer.register_step_post_hook(lambda *_: convgrad.nn.clip_(layer))
        >>> optimizer.step()
        >>> layer.weight.tolist()
        [[[0.5, -1.0]]]
    """
    for module in model.modules():
        scheme, originals = _quantized(module)
        if scheme is not None:
            scheme.clip_(*originals)


def export_shift(layer: nn.Module) -> ShiftIntegers:
    """Return the shifts, signs and bias of a shift layer, or of one with a shift parametrization, as integers.

    Raises:
        TypeError: the layer has no shift weights: it is no shift layer, nor parametrized by a shift scheme.
        ValueError: ``act_fraction_bits`` is None, so that input and bias are not fixed-point numbers.

    Equivalent to:
        >>> import torch, convgrad
        >>> layer = convgrad.nn.Conv1dShiftQ(1, 1, 3, bias=False)
        >>> _ = layer.weight.data.copy_(torch.tensor([[[0.3, -0.8, 0.1]]]))
        >>> integers = convgrad.nn.export_shift(layer)
        >>> integers.shift.tolist(), integers.sign.tolist()
        ([[[-2, 0, -3]]], [[[1, -1, 1]]])
    """
    scheme, originals = _quantized(layer)
    if not isinstance(scheme, ShiftQ):
        raise TypeError(f"{type(layer).__name__} has no shift weights")
    fraction_bits = scheme.act_fraction_bits
    if fraction_bits is None:
        raise ValueError("the input and the bias are not rounded (act_fraction_bits=None), so they are no integers")
    shift, sign = get_shift_and_sign(scheme.quantize(*originals).detach(), shift_range=scheme.limits)
    bias = scheme.bias(getattr(layer, "bias", None))
    if bias is not None:
        bias = (bias.detach().double() * 2.0**fraction_bits).long()
    return ShiftIntegers(shift.to(torch.int8), sign.to(torch.int8), bias, scheme.act_integer_bits, fraction_bits)


def _scheme(scheme: object) -> Scheme:
    if not isinstance(scheme, Scheme):
        raise TypeError(f"a scheme is an instance such as Binary() or ShiftQ(weight_bits=4), got {scheme!r}")
    return scheme


def _quantized(layer: Any) -> tuple[Scheme | None, tuple[Tensor, ...]]:
    """Return the scheme of a quantized or parametrized layer, None for any other, and the weight's float tensors."""
    if isinstance(layer, Quantized):
        return layer.scheme, layer.originals()
    held: Any = layer.parametrizations["weight"] if parametrize.is_parametrized(layer, "weight") else [None]
    if not isinstance(held[0], _Weight):
        return None, ()
    names = ["original"] if held.is_tensor else [f"original{i}" for i in range(held.ntensors)]
    return held[0].scheme, tuple(getattr(held, name) for name in names)


class _Weight(nn.Module):
    """The parametrization of a weight."""

    def __init__(self, scheme: Scheme, layer: nn.Module) -> None:
        super().__init__()
        self.scheme = scheme
        self.known = {"transposed": bool(getattr(layer, "transposed", False)), "groups": getattr(layer, "groups", 1)}

    def forward(self, *originals: Tensor) -> Tensor:
        return self.scheme.quantize(*originals, **self.known, training=self.training)

    def right_inverse(self, weight: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The value stored when a weight is assigned."""
        originals = self.scheme.originals(weight)
        return originals[0] if len(originals) == 1 else originals

    def extra_repr(self) -> str:
        return f"{type(self.scheme).__name__}({self.scheme})"


class _Bias(_Weight):
    """The parametrization of a bias."""

    def forward(self, *originals: Tensor) -> Any:
        return self.scheme.bias(*originals)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight


def _with_input(scheme: Scheme, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Return a layer's arguments with its input quantized: the argument of that name, or else the first."""
    if args:
        return (scheme.input(args[0]), *args[1:]), kwargs
    names = ["input"] if "input" in kwargs else list(kwargs)[:1]
    return args, {**kwargs, **{name: scheme.input(kwargs[name]) for name in names}}
