"""`accelerate_`: a model's convolutions, linear layers and normalizations computed by convgrad, in place."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm

from ..backends import INSTANCE_NORM_DEFECT, native_norm_takes, why_absent
from ..engine import plan_for
from .classes import (
    PADS,
    accelerated_class,
    kind_of,
    padding_class,
    pads,
    reason_against,
    restore_class,
    weight_of,
)
from .layout import channels_last_pays, spatial_convolutions, to_channels_last
from .report import Decision, Report
from .trial import NO_COPY, arguments, faster_in_channels_last
from .worth import PlanFor, linear_may_gain, may_gain


def accelerate_(
    model: nn.Module,
    memory_format: str | torch.memory_format | None = None,
    *,
    example_inputs: Any = None,
    only_gains: bool = True,
    dry_run: bool = False,
) -> Report:
    """Let convgrad compute a model's convolutions and, on a CPU, its linear layers and normalizations, in place.

    Each layer stays the same object with the same parameters, hooks and name; only its class changes. The modules alone
    decide which layers: no code of the model runs. A layer that gains at none of a grid of usual sizes keeps its class.
    Which kernel runs is decided at each call from the sizes of its operands, and is PyTorch's own wherever that is
    expected to be the fastest.

    Where gradients are recorded, the result of a batch or instance normalization is not computed by itself if a ReLU,
    ReLU6, SiLU or Hardswish (module, function or method) is the first that reads it: both are one kernel and one node
    of autograd. Zeros (``torch.nn.ZeroPad1d`` to ``3d``, `torch.nn.functional.pad`) around such a result are not copied
    if a convolution reads it. Any other reader gets the plain result.

    Args:
        memory_format: None leaves the layout alone. ``"channels_last"`` converts the weights of the convolutions and,
            by a hook on the model, its inputs. ``"auto"`` does so where it is expected to be faster; with
            ``example_inputs`` it is measured.
        example_inputs: arguments of the model: a tensor, a tuple of arguments, or a dict of keyword arguments. Only
            ``"auto"`` needs them: training steps of two copies of the model, hooks included, run on them.
        only_gains: False replaces every layer that can be replaced, even if nothing is gained.
        dry_run: change nothing; the report says what would be done. The layout is then not measured.

    Returns:
        A `Report`; its ``restore()`` undoes everything.

    Raises:
        TypeError: ``model`` is not a module, or ``memory_format`` is not a string.
        ValueError: another ``memory_format``.

    Equivalent to:
        >>> import torch, convgrad
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3, groups=4), torch.nn.ReLU())
        >>> report = convgrad.accelerate_(model, only_gains=False)
        >>> list(report.replaced), type(model[0]) is convgrad.nn.Conv2d
        (['0'], True)
        >>> report.restore()
        >>> type(model[0]) is torch.nn.Conv2d
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"accelerate_ takes a torch.nn.Module, got {type(model).__name__}")
    wanted = _wanted_format(memory_format)
    if example_inputs is not None:
        arguments(example_inputs)  # raises where they are no arguments
    report = Report(dry_run=dry_run, missing=why_absent() if all(p.is_cpu for p in model.parameters()) else "")
    try:
        _convert_layout(model, wanted, example_inputs, report)
        report.decisions = list(decide(model, only_gains))
        if not dry_run:
            _apply(model, report)
    except BaseException:  # a method of the user's raised, or the user interrupted it
        report.restore()
        raise
    return report


# ---- layers --------------------------------------------------------------------------------------


def decide(model: nn.Module, only_gains: bool = True) -> Iterator[Decision]:
    """Yield a decision for each layer of a kind that convgrad computes, and for each module that pads.

    It looks at the modules alone, and runs no code of theirs but ``extra_repr``.
    """
    plans, replaced = cache(plan_for), set[str]()
    for name, module in model.named_modules():
        if (kind := kind_of(module)) is not None:
            why = _stays(module, kind, only_gains, plans)
        elif why := _other_convolution(module):
            kind = "convolution"
        else:
            continue
        if not why:
            replaced.add(kind)
        yield Decision(name, kind, None if why else accelerated_class, why or _shown(module))
    if {"normalization", "convolution"} <= replaced:
        for name, module in model.named_modules():
            if type(module) in PADS or pads(module):
                what = _shown(module) if type(module) in PADS else "F.pad in its forward"
                yield Decision(name, "padding", padding_class, what)


def _shown(module: nn.Module) -> str:
    return f"{type(module).__name__}({module.extra_repr()})"


def _apply(model: nn.Module, report: Report) -> None:
    """Give each module that was decided on its new class, and note where Python or the module refuses it."""
    modules = dict(model.named_modules())
    for i, decision in enumerate(report.decisions):
        if decision.becomes is not None:
            module = modules[decision.name]
            before = type(module)
            try:
                module.__class__ = after = decision.becomes(before)
            except Exception as error:  # a metaclass or `__setattr__` of the user's may refuse in any way
                why = f"Python cannot give it another class: {error}"
                report.decisions[i] = Decision(decision.name, decision.kind, None, why)
            else:
                report._undo.append(partial(restore_class, module, before, after))


def _other_convolution(module: nn.Module) -> str:
    """Return why a convolution of none of torch's usual classes stays: quantized, scripted; empty for anything else."""
    cls = type(module)
    if "Conv" in cls.__name__ and cls.__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quant")):
        return "it is quantized"
    name = getattr(module, "original_name", "") if isinstance(module, torch.jit.ScriptModule) else ""
    return "it is scripted; convgrad.takeover() computes it" if name.startswith("Conv") and hasattr(nn, name) else ""


def _stays(module: Any, kind: str, only_gains: bool, plans: PlanFor) -> str | None:
    """Return why a layer keeps its class; None where it may gain."""
    if (reason := reason_against(module)) is not None:
        return reason
    if kind == "normalization":
        if not only_gains:
            return None
        if isinstance(module, _InstanceNorm) and module.track_running_stats:
            return "convgrad keeps no running statistics of instances"
        known = (*module._parameters.values(), *module._buffers.values())
        tensor = next((t for t in known if t is not None and t.is_floating_point()), torch.empty(0))
        return None if tensor.is_cpu and native_norm_takes(tensor.dtype) else _no_gain(tensor.device)
    weight: Any = weight_of(module)
    if nn.parameter.is_lazy(weight):  # its sizes are not known yet
        return None
    if not weight.dtype.is_floating_point or weight.itemsize == 1:
        return f"its weight is {weight.dtype}"
    gains = linear_may_gain if kind == "linear layer" else may_gain
    return None if not only_gains or gains(module, weight, plans) else _no_gain(weight.device)


def _no_gain(device: torch.device) -> str:
    if device.type == "meta":
        return "it is on the meta device; accelerate the model on the device where it runs, or give only_gains=False"
    if device.type == "cpu" and why_absent():
        return "convgrad's kernels for it are compiled, and there are none"
    unknown = "at any usual size" if device.type == "cpu" else "as far as is known"
    return f"PyTorch's own kernels are as fast {unknown}"


# ---- layout --------------------------------------------------------------------------------------


def _wanted_format(memory_format: str | torch.memory_format | None) -> str | None:
    if memory_format is not None and not isinstance(memory_format, (str, torch.memory_format)):
        kind = type(memory_format).__name__
        raise TypeError(f"memory_format is a name, got {kind}; what the model is called with is example_inputs=")
    if memory_format in (torch.channels_last, torch.channels_last_3d):
        return "channels_last"
    if memory_format not in (None, "channels_last", "auto"):
        raise ValueError(f"memory_format is None, 'channels_last' or 'auto', got {memory_format!r}")
    return memory_format  # pyright: ignore[reportReturnType]


def _convert_layout(model: nn.Module, wanted: str | None, example_inputs: Any, report: Report) -> None:
    """Convert the model to channels_last if the caller wants it, or if it is expected to be faster."""
    if wanted is None:
        return
    convolutions = spatial_convolutions(model)
    on_cpu = any(p.is_cpu for p in model.parameters())
    wrong = on_cpu and any(isinstance(m, (nn.InstanceNorm2d, nn.InstanceNorm3d)) for m in model.modules())
    pays, why = channels_last_pays([weight for m in convolutions if (weight := weight_of(m)) is not None])
    if wanted == "channels_last":
        pays, why = bool(convolutions), "" if convolutions else why
        if wrong:
            warnings.warn(
                f"{INSTANCE_NORM_DEFECT}; leave the layout as it was, or give it several images", stacklevel=3
            )
    elif wrong:
        pays, why = False, INSTANCE_NORM_DEFECT
    elif pays and example_inputs is not None and not report.dry_run:
        pays, why = faster_in_channels_last(model, accelerate_, example_inputs) or (pays, f"{why}; {NO_COPY}")
    report.layout = why
    if pays:
        report.memory_format = "channels_last"
    if pays and not report.dry_run:
        report._undo += to_channels_last(model)
