"""A measurement of a model's layouts, on copies with example inputs."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..engine import unobserved
from ..engine.measure import compare

NO_COPY = "not measured, for the model cannot be copied"


def copied(model: nn.Module) -> nn.Module | None:
    """Return a copy; None if it cannot be copied (the older weight_norm, a lazy buffer, ``fully_shard``, a script)."""
    try:
        result = copy.deepcopy(model)
    except Exception:  # whatever a ``__deepcopy__`` raises; FSDP's an AssertionError
        return None
    return result if all(p.is_leaf for p in result.parameters()) else None  # a scripted one's are functions of it


def is_lazy(model: nn.Module) -> bool:
    """Return whether the first call of a model decides the sizes of a parameter or buffer."""
    return any(map(nn.parameter.is_lazy, (*model.parameters(), *model.buffers())))


def arguments(inputs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return ``example_inputs`` as positional and keyword arguments of a model."""
    if isinstance(inputs, Mapping):
        return (), inputs
    if isinstance(inputs, str):
        raise TypeError(f"example_inputs are a tensor, a tuple of arguments or a dict of keywords, got {inputs!r}")
    if isinstance(inputs, (tuple, list)) and inputs and all(isinstance(n, int) for n in inputs):
        shape = ", ".join(map(str, inputs))
        raise TypeError(f"example_inputs are tensors, not the shape of one: torch.randn({shape}), for example")
    return inputs if isinstance(inputs, (tuple, list)) else (inputs,), {}


@contextmanager
def random_states_restored(device: torch.device) -> Iterator[None]:
    """Restore Python's, NumPy's and PyTorch's random states after a block: a trial draws none of the user's numbers."""
    numpy = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), numpy and numpy.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(of_python)
        if numpy:
            numpy.random.set_state(of_numpy)


@unobserved()
def faster_in_channels_last(
    model: nn.Module, accelerate_: Callable[..., object], inputs: Any
) -> tuple[bool, str] | None:
    """Whether forward and backward are faster in channels_last, timed alternately on two copies, and the finding.

    None where the model cannot be copied; the function `accelerate_` is for the copies.
    """
    as_it_was, converted = copied(model), copied(model)
    if as_it_was is None or converted is None:
        return None
    accelerate_(as_it_was, only_gains=False)
    accelerate_(converted, "channels_last", only_gains=False)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    calls = {"as it was": training_step(as_it_was, inputs), "channels_last": training_step(converted, inputs)}
    with random_states_restored(device):
        if why := why_it_fails(calls["as it was"]):
            return False, f"not measured, since a training step on these inputs fails: {why}"
        if why := why_it_fails(calls["channels_last"]):
            return False, f"the model does not run in channels_last: {why}"
        seen = compare(calls, "as it was", seconds=2.0, device=device)
    speed = seen.speedup("channels_last")
    return speed.low > 1, f"measured, channels_last against as it was: {speed}"


def why_it_fails(step: Callable[[], object]) -> str:
    """Return why a step raises, such as ``view`` of a channels_last tensor; empty if it does not."""
    try:
        step()
    except Exception as error:  # of the model's, such as "expected more than 1 value per channel"
        return (str(error) or type(error).__name__).splitlines()[0]
    return ""


def training_step(model: nn.Module, inputs: Any) -> Callable[[], Sequence[Tensor | None]]:
    """Return a function that returns the gradients of the sum of a model's outputs, and changes nothing.

    The gradients are those of the parameters, and of inputs that require one.
    """
    args, kwargs = arguments(inputs)
    leaves = [t for t in (*model.parameters(), *tree_leaves(inputs)) if isinstance(t, Tensor) and t.requires_grad]

    def step() -> Sequence[Tensor | None]:
        with torch.inference_mode(False):  # which records gradients, too
            result = model(*args, **kwargs)
            if is_dataclass(result):  # which torch's trees do not know
                result = [getattr(result, field.name) for field in fields(result)]
            outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
            total = sum((torch.view_as_real(t) if t.is_complex() else t).sum() for t in outputs)
            return torch.autograd.grad(total, leaves, allow_unused=True) if isinstance(total, Tensor) else ()

    return step
