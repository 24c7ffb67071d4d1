"""A convolution with padding that torch writes as a copy, without it where the kernels of ``csrc`` compute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .._compat import fx_tracing, jit_tracing, suggested_format, without_autocast
from .._compat import saved_tensors_hooks as top_hooks
from ..backends import PaddedCopy
from ..engine import Plan, Step, find, make
from ..ops import apply, autocast_is_on, cast
from ..problem import PADDING_MODES, ConvProblem, PaddingMode, Sides, fits, is_plain
from ..settings import may_choose_again
from .deferred import Deferred, describes, stop_watching, watch
from .normalization import activating_node, has_hooks, recomputed


def convolve(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, ...], sides: Sides,
    dilation: tuple[int, ...], groups: int, mode: PaddingMode,
) -> Tensor | None:  # fmt: skip
    """Return the convolution that reads its padding from the input; None where that takes a padded copy."""
    describe = describes(input)
    if not (is_plain(input) or describe) or mode not in PADDING_MODES or may_choose_again(input.device):
        return None
    if autocast_is_on("cpu"):
        input, weight, bias = (cast(t, "cpu") for t in (input, weight, bias))
        with without_autocast():
            return convolve(input, weight, bias, stride, sides, dilation, groups, mode)
    if input.dim() == len(sides) + 1:
        output = convolve(input.unsqueeze(0), weight, bias, stride, sides, dilation, groups, mode)
        return output if output is None else output.squeeze(0)
    if input.dim() != len(sides) + 2 or not fits(input, sides, mode):
        return None
    zeros = (0,) * len(sides)
    arguments = (stride, tuple([side for pair in sides for side in pair]), dilation, False, zeros, groups)
    if describe is not None:
        return describe(input, weight, bias, *arguments, mode)
    plan = find("padded", (*arguments, mode), input, weight, bias)
    if plan is None:
        return None
    if plan.__class__ is not Plan:
        plan = make(plan, "convolution", arguments, input, weight, bias, padding_mode=mode)
    if takes_copy(plan.problem, plan.steps):
        return None
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (input, weight, bias)):
        return apply(plan, input, weight, bias)
    return plan.contract(input, weight, bias)


def takes_copy(problem: ConvProblem, steps: Sequence[Step]) -> bool:
    """Return whether a step computes a problem from an input that was padded before."""
    copied = not problem.symmetric
    return any(isinstance(step.backend, PaddedCopy) or (copied and step.backend.from_pytorch) for step in steps)


# ---- zeros that a convolution reads ---------------------------------------------------------------


class Padded(Deferred):
    """A tensor with zeros around it that is not computed: a convolution reads the input instead.

    The convolution then saves the input for its gradients, where it would save a padded copy, and the input may be
    changed in place later, as nothing else saves it. So there is one only where the input can be computed again: the
    result of a normalization with its activation.
    """

    _convgrad_module: Any
    _convgrad_input: Tensor
    _convgrad_zeros: tuple[int, ...]
    _convgrad_node: Any

    def read(self) -> Tensor:
        """Return an ordinary tensor with the values."""
        _padded_for[self._convgrad_module()] = False
        return super().read()

    def _original(self) -> Tensor:
        """Return the input's values as they were, without history."""
        t = self._convgrad_input
        return t.detach() if t._version == self._convgrad_node.version else recomputed(self._convgrad_node)

    def _compute(self) -> Tensor:
        return _pad(self._original(), self._convgrad_zeros)

    def convolved(
        self, call: Callable[[Tensor], Tensor], weight: Tensor, bias: Tensor | None, stride: tuple[int, ...],
        sides: Sides, dilation: tuple[int, ...], groups: int, unpadded: Callable[..., Tensor | None] = convolve,
    ) -> Tensor:  # fmt: skip
        """Return a convolution that reads the zeros, by ``unpadded``; else ``call`` of an ordinary tensor."""
        stop_watching()
        input, zeros = self._convgrad_input, self._convgrad_zeros
        if activating_node(input) is None:  # it has changed
            return call(self.read())
        if not any(zeros):
            with self._saving():
                return call(input)
        more = as_pairs((*zeros, *(0,) * (2 * len(sides) - len(zeros))))
        if len(more) == len(sides):
            sides = tuple((low + a, high + b) for (low, high), (a, b) in zip(sides, more, strict=True))
            with self._saving():
                output = unpadded(input, weight, bias, stride, sides, dilation, groups, "zeros")
            if output is not None:
                return output
        return call(self.read())

    def _saving(self) -> AbstractContextManager[Any]:
        pointer = self._convgrad_input.data_ptr()
        return saved_tensors_hooks(lambda t: (t, t._version, t.data_ptr() == pointer), self._unpack)

    def _unpack(self, packed: tuple[Tensor, int, bool]) -> Tensor:
        t, version, is_input = packed
        if t._version != version:
            if is_input:
                return self._original()
            raise RuntimeError(
                "the weight of a convolution was changed in place after its forward and before its backward"
            )
        return t


class _Padding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, zeros: tuple[int, ...]) -> Tensor:
        ctx.zeros = zeros
        shape = list(input.shape)
        for i, n in enumerate(zeros):
            shape[-1 - i // 2] += n
        like = torch.empty(shape, device="meta", memory_format=suggested_format(input))
        return Padded.like(shape, like.stride(), input)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _pad(grad_output, [-n for n in ctx.zeros]), None


_pad = F.pad  # a later wrapper of F.pad calls this

#: Module that pads -> whether a convolution reads the result, as far as is known; or the mode and the input's sizes for
#: which nothing was deferred, since the normalization before was PyTorch's.
_padded_for: WeakKeyDictionary[Any, bool | tuple[bool, Any]] = WeakKeyDictionary()


def pad(module: Any, input: Any, zeros: Any, mode: str = "constant", value: float | None = None) -> Tensor:
    """Return ``torch.nn.functional.pad`` in a module's forward: deferred where a convolution may read its zeros."""
    if isinstance(input, Deferred):
        input = input.read()
    plain = mode == "constant" and not value and type(input) is Tensor and type(zeros) in (tuple, list)
    if not plain or len(zeros) % 2 or len(zeros) > 2 * input.dim() or any(type(n) is not int or n < 0 for n in zeros):
        return _pad(input, zeros, mode, value)
    recorded = torch.is_grad_enabled() and top_hooks() is None and _padded_for.get(module, True) and not has_hooks()
    if not recorded or (node := activating_node(input)) is None:
        return _pad(input, zeros)
    padded: Any = _Padding.apply(input, tuple(zeros))
    padded._convgrad_module, padded._convgrad_node = ref(module), node
    padded._convgrad_input, padded._convgrad_zeros = input, tuple(zeros)
    return padded


def zero_pad(module: Any, input: Tensor) -> Tensor:
    """Return the result of ``torch.nn.ZeroPad1d`` to ``3d``: their forward, by `pad`."""
    plain = not (torch.compiler.is_dynamo_compiling() or has_hooks(module))
    return (partial(pad, module) if plain else _pad)(input, module.padding, "constant", module.value)


class _Pads(TorchFunctionMode):
    """Has `torch.nn.functional.pad` computed by `pad`."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module, self.seen, self.deferred = module, False, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _pad:
            return func(*args, **(kwargs or {}))
        self.seen = True
        padded = pad(self.module, *args, **(kwargs or {}))
        self.deferred |= isinstance(padded, Padded)
        return padded


def watched(cls: Any) -> Callable[..., Any]:
    """Return the forward of a class, with `torch.nn.functional.pad` by `pad` where a convolution may read it."""

    @wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        here = self.training, args[0].shape if args and isinstance(args[0], Tensor) else None
        traced = torch.compiler.is_dynamo_compiling() or jit_tracing() is not None or fx_tracing()
        if traced or not torch.is_grad_enabled() or _padded_for.get(self, True) in (False, here):
            return cls.forward(self, *args, **kwargs)
        mode = _Pads(self)
        with watch(mode):
            result = cls.forward(self, *args, **kwargs)
        if not mode.deferred:  # a function mode takes longer than some layers
            _padded_for[self] = mode.seen and here
        return result

    return forward


def as_pairs(sides: Sequence[int]) -> Sides:
    """Pairs (low, high) of what ``torch.nn.functional.pad`` takes, which begins with the last dimension."""
    return tuple(zip(sides[-2::-2], sides[::-2], strict=True))
