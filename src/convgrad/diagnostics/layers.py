"""The names of the layers that are running, and a range of the profiler for each, forward and backward."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from .._compat import profiler_enabled
from ..ops import autocast_dtype

_module: Any = nn.modules.module
#: What wrappers put before the names of a model: DistributedDataParallel, torch.compile.
_WRAPPERS = re.compile(r"^(module\.|_orig_mod\.)+")


class Running(NamedTuple):
    """A module that is running."""

    module: nn.Module
    name: str
    range: Any  # of the profiler; None where none is running
    nodes: set[Any]  # of autograd, which made its inputs
    autocast: dict[str, torch.dtype | None]  # kind of device -> the dtype to which autocast casts there


class _Thread(threading.local):
    def __init__(self) -> None:
        self.running: list[Running] = []


_thread = _Thread()
#: The path of each module in its model. A part of a model runs by itself where a checkpoint computes it again.
_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def running() -> Running | None:
    """Return the innermost module that is running in this thread inside `layer_ranges`."""
    return _thread.running[-1] if _thread.running else None


@contextmanager
def layer_ranges() -> Iterator[None]:
    """Give `torch.profiler` a range for each call of a module in this block, named by the module's path in its model.

    The backward pass of a layer has a range, too: ``features.0 (backward)``. A Chrome trace that the profiler exports
    shows them, as Perfetto does.

    Equivalent to:
        >>> import torch
        >>> from convgrad.diagnostics import layer_ranges
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 3), torch.nn.ReLU())
        >>> with layer_ranges(), torch.profiler.profile() as seen:
        ...     model(torch.ones(1, 1, 4, 4)).sum().backward()
        >>> [e.name for e in seen.events() if e.name in ("Sequential", "0", "0 (backward)")]
        ['Sequential', '0', '0 (backward)']
    """
    hooks = [
        _module.register_module_forward_pre_hook(_before),
        _module.register_module_forward_hook(_after, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _before(module: nn.Module, inputs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    running = _thread.running
    if module not in _names:
        outermost = running[0].module if running else module
        _names.update({one: path for path, one in outermost.named_modules()})
    name = _WRAPPERS.sub("", _names.get(module, "")) or type(module).__name__
    opened = record_function(name) if profiler_enabled() else None
    if opened is not None:
        opened.__enter__()
    casts = {kind: autocast_dtype(kind) for kind in ("cpu", "cuda", "xpu", "mps")}
    running.append(Running(module, name, opened, set() if opened is None else _nodes(inputs), casts))


def _after(module: nn.Module, _: object, output: Any) -> None:
    if torch.compiler.is_compiling() or not any(one.module is module for one in _thread.running):
        return
    running = _thread.running
    while True:  # of modules whose forward raised, PyTorch may have called no hook
        one = running.pop()
        if one.range is not None:
            one.range.__exit__(None, None, None)
        if one.module is module:
            break
    if one.range is not None and next(module.children(), None) is None:
        for node in _nodes(output) - one.nodes:  # a range is open while it is computed
            opened = record_function(f"{one.name} (backward)")
            node.register_prehook(lambda _, opened=opened: opened.__enter__() and None)
            node.register_hook(lambda *_, opened=opened: opened.__exit__(None, None, None))


for _hook in (_before, _after):  # a normalization may wait for its reader although these get it
    _hook.reads_nothing = True  # pyright: ignore[reportFunctionMemberAccess]


def _nodes(tensors: Any) -> set[Any]:
    """Return the nodes of autograd that made tensors, but none of one that is not computed yet."""
    return {t.grad_fn for t in tree_leaves(tensors) if type(t) is Tensor and t.grad_fn is not None}
