"""`accelerate_`: a model's convolutions, linear layers and normalizations computed by convgrad, in place."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import nn

from ..engine import plan_for
from .classes import accelerated_class, is_convolution, is_instance_norm, is_linear, is_norm, reason_against
from .joins import give_class, join_layers
from .layout import channels_last_pays, spatial_convolutions, to_channels_last
from .report import Report
from .trial import NO_COPY, faster_in_channels_last, inputs_seen, quietly
from .worth import PlanFor, Seen, dtype_against, linear_may_gain, norm_may_gain, worth_replacing


def accelerate_(
    model: nn.Module,
    memory_format: str | torch.memory_format | None = None,
    *,
    example_inputs: Any = None,
    only_gains: bool = True,
) -> Report:
    """Let convgrad compute a model's convolutions and, on a CPU, its linear layers and normalizations, in place.

    Each layer stays the same object with the same parameters, hooks and name; only its class changes. Which kernel runs
    is decided at each call from the sizes of its operands, and is PyTorch's own wherever that is expected to be the
    fastest. A layer that would never gain keeps its class, so it costs nothing. With ``example_inputs`` this is decided
    from the sizes that the layers see, otherwise from a grid of common sizes.

    A batch normalization in training, or an instance normalization, and the ReLU, ReLU6, SiLU or Hardswish behind it, a
    module or a function, are computed together if tracing the module that calls both (with `torch.fx`, on a copy) shows
    that nothing else uses the tensor between them. So are a convolution and the zeros in front of it: a
    ``torch.nn.ZeroPad1d`` to ``3d``, or ``torch.nn.functional.pad`` if it is called before any other module.

    Args:
        memory_format: None leaves the layout alone. ``"channels_last"`` converts the weights of the convolutions and,
            by a hook on the model, its inputs. ``"auto"`` does so where it is expected to be faster; with
            ``example_inputs`` it is measured.
        example_inputs: arguments of the model: a tensor, a tuple of arguments, or a dict of keyword arguments. A copy
            of the model, hooks included, runs on them once, without gradients; a model that cannot be copied (its
            batch normalizations are lazy, or it has the older weight_norm) runs itself.
        only_gains: False replaces every layer that can be replaced, even if nothing is gained.

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
    seen = None if example_inputs is None else inputs_seen(model, example_inputs)
    report = Report()
    try:
        _turn(model, wanted, example_inputs, report)
        with quietly(model):  # reading a weight may compute it, and in training change it: spectral_norm
            _replace_layers(model, seen, only_gains, report)
        join_layers(model, report)
    except BaseException:  # a method of the user's raised, or the user interrupted it
        report.restore()
        raise
    return report


# ---- layers --------------------------------------------------------------------------------------


def _replace_layers(model: nn.Module, seen: dict[str, list[Seen]] | None, only_gains: bool, report: Report) -> None:
    """Replace each layer that may gain, and note why the others stay."""
    plans = cache(plan_for)
    for name, module in model.named_modules():
        inputs = None if seen is None else seen.get(name, [])
        if is_convolution(module) or is_linear(module):
            reason = _stays(module, inputs, only_gains, plans)
            if is_linear(module):
                report.linears.add(name)
        elif is_norm(module):
            report.norms.add(name)
            reason = reason_against(module) or (_norm_stays(module, inputs) if only_gains else None)
        elif _is_quantized(module):
            reason = "it is quantized"
        elif _is_scripted(module):
            reason = "it is scripted; convgrad.takeover() computes it"
        else:
            continue
        if reason is None:
            try:
                give_class(module, accelerated_class(type(module)), report)
            except Exception as error:  # a metaclass or `__setattr__` of the user's may refuse in any way
                reason = f"Python cannot give it another class: {error}"
        if reason is None:
            report.replaced[name] = f"{type(module).__name__}({module.extra_repr()})"
        else:
            report.left[name] = reason


def _is_quantized(module: nn.Module) -> bool:
    """One of torch's quantized convolutions, which are no subclasses of the others."""
    cls = type(module)
    return "Conv" in cls.__name__ and cls.__module__.startswith(
        ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quant")
    )


def _is_scripted(module: nn.Module) -> bool:
    """What ``torch.jit.script`` or ``torch.jit.trace`` made of one of torch's convolutions."""
    name = getattr(module, "original_name", "") if isinstance(module, torch.jit.ScriptModule) else ""
    return name.startswith("Conv") and hasattr(nn, name)


def _stays(module: Any, seen: list[Seen] | None, only_gains: bool, plans: PlanFor) -> str | None:
    """Why a convolution or a linear layer keeps its class; None where it may gain."""
    reason = reason_against(module)
    if reason is not None or nn.parameter.is_lazy(module.weight):  # of a lazy one the sizes are not known yet
        return reason
    reason = dtype_against(module)
    if reason is not None or not only_gains:
        return reason
    gains = linear_may_gain if is_linear(module) else worth_replacing
    return None if gains(module, seen, plans) else _no_gain(seen, module.weight.device)


def _norm_stays(module: Any, seen: list[Seen] | None) -> str | None:
    """Why a normalization keeps its class; None where it may gain."""
    by_image = is_instance_norm(module)
    if by_image and module.track_running_stats:
        return "convgrad keeps no running statistics of instances"
    tensor = next((t for t in (module.weight, module.running_mean) if t is not None), torch.empty(0))
    gains = norm_may_gain(seen, tensor.device, tensor.dtype, by_image)
    return None if gains else _no_gain(seen, tensor.device)


def _no_gain(seen: list[Seen] | None, device: torch.device) -> str:
    if device.type == "meta":
        return "it is on the meta device; accelerate the model on the device where it runs, or give only_gains=False"
    if seen == []:
        return "the example inputs never reached it, in evaluation"
    sizes = ", ".join(dict.fromkeys("x".join(map(str, s.shape)) for s in seen or ()))
    unknown = "at any usual size" if device.type == "cpu" else "as far as is known without example_inputs"
    where = f"for inputs of {sizes}" if sizes else unknown
    return f"nothing here is expected to be faster than PyTorch's own kernels {where}"


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


_OF_INSTANCES = "PyTorch's gradient of the instance normalization of a single image is wrong in channels_last on a CPU"


def _turn(model: nn.Module, wanted: str | None, example_inputs: Any, report: Report) -> None:
    """Convert the model to channels_last if the caller wants it, or if it is expected to be faster."""
    if wanted is None:
        return
    convolutions = spatial_convolutions(model)
    on_cpu = any(p.is_cpu for p in model.parameters())
    wrong = on_cpu and any(isinstance(m, nn.InstanceNorm2d) for m in model.modules())
    with quietly(model):
        pays, why = channels_last_pays(convolutions)
    if wanted == "channels_last":
        pays, why = bool(convolutions), "" if convolutions else why
        if wrong:
            warnings.warn(f"{_OF_INSTANCES}; leave the layout as it was, or give it several images", stacklevel=3)
    elif wrong:
        pays, why = False, _OF_INSTANCES
    elif pays and example_inputs is not None:
        pays, why = faster_in_channels_last(model, accelerate_, example_inputs) or (pays, f"{why}; {NO_COPY}")
    report.layout = why
    if pays:
        report.memory_format = "channels_last"
        report._undo += to_channels_last(model)
