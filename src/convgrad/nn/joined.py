"""Two layers, one behind the other, computed together while the module that calls both runs.

They are batch normalization and its activation, and padding with zeros and its convolution. The activation and the
padding may be functions, and so may what they belong to, in a class of the user's. By themselves they give what they
always gave. Only while their owner's ``forward`` runs, in this thread, does the normalization compute the activation,
too, which then hands its input on, and does the padding give a tensor that is not computed (`Padded`), of which the
convolution reads the input. Whoever makes a module an owner has made sure that there the second is all that uses the
output of the first (`convgrad.models`).
"""

from __future__ import annotations

import sys
import threading
import zlib
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules import module as hooks_of_all
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from .._compat import fx_tracing, jit_tracing, remove_function_mode, saved_tensors_hooks
from ..errors import UnsupportedError

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


#: A function's name, a checksum of its code, for it may be edited and reloaded, and the instruction in it that calls:
#: what pickles, and is the same in every process.
Place = tuple[str, int, int]


def place_of(frame: FrameType) -> Place:
    """Where a frame is."""
    return frame.f_code.co_name, zlib.crc32(frame.f_code.co_code), frame.f_lasti


#: The modules whose functions lie between the call of a function of torch and whoever handles it.
_BETWEEN = ("torch.fx.", "torch.overrides", "torch.nn.functional", "convgrad.")


def caller_of(frame: FrameType) -> FrameType:
    """The frame that called a function of torch, of one in which the call is handled."""
    while frame.f_globals.get("__name__", "").startswith(_BETWEEN) and frame.f_back:
        frame = frame.f_back
    return frame


class _Now(threading.local):
    """What is joined in a thread."""

    def __init__(self) -> None:
        #: the owner whose forward runs
        self.owner: Any = None
        #: module, and where it is called -> those that follow then, and where the functions around that are called;
        #: made when first needed
        self.behind: dict[tuple[Any, Place], tuple[list[Any], list[Place]]] | None = None
        #: activation, number of an input that is its result already -> that input
        self.computed: dict[tuple[Any, int], Tensor] = {}
        #: the hooks on tensors that autograd saves, as they were when the owner was called
        self.hooks: Any = None
        #: what sees calls of `torch.nn.functional.pad` until the first convolution is called
        self.pads: TorchFunctionMode | None = None

    def joined_with(self, first: Any, depth: int | None = None) -> Any:
        """The module behind one that is computed together with it, if it is called where that follows.

        ``depth`` is how many frames away from this one the owner's forward is, if ``first`` is called as a module. None
        inside a checkpoint of the owner's forward: there both are computed again while no owner runs, and must save the
        same tensors then.
        """
        if self.owner is None or saved_tensors_hooks() != self.hooks or hooks_of_all._has_any_global_hook():
            return None
        if self.behind is None:
            modules = {"": self.owner, PAD: PADDING, **FUNCTIONS, **self.owner._modules}
            self.behind = {
                (modules.get(one), at): ([modules.get(name) for name in names], around)
                for (one, *names), (at, *around) in self.owner._convgrad_pairs
            }
        frame: Any = sys._getframe(depth) if depth else caller_of(sys._getframe(1))
        if (key := (first, place_of(frame))) not in self.behind:
            return None
        (*between, second), around = self.behind[key]
        for place in around:
            frame = frame.f_back
            if place_of(frame) != place:
                return None
        # Not a wrapper that hands attributes on, nor what a Sequential has there since one was removed.
        if (
            getattr(type(first), "_convgrad_joins", "") != getattr(type(second), "_convgrad_joined", None)
            or (isinstance(second, ReLU6) and (second.min_val, second.max_val) != (0, 6))
            or (second in FUNCTIONS.values() and getattr(F, second._convgrad_activation) not in NAMES)  # wrapped
            or (second is not self.owner and is_seen(second))
            or any(type(module) is not nn.Identity or is_seen(module) for module in between)
        ):
            return None
        return second

    def stop_watching(self) -> None:
        """Let calls of `torch.nn.functional.pad` be as they are."""
        if self.pads is not None:
            remove_function_mode(self.pads)
            self.pads = None


now = _Now()

#: The depth for a module's forward: torch's ``_call_impl`` and ``_wrapped_call_impl`` lie between, too.
OF_A_MODULE = 4


def refuse_scripting(module: Any) -> None:
    """What ``torch.jit.script`` calls before it compiles: it would put what this returns into the user's model."""
    raise UnsupportedError(
        f"torch.jit.script of convgrad's {type(module).__name__}: script the model made of torch.nn's modules "
        "(`restore()` of accelerate_'s report gives them back) and run it inside convgrad.takeover(), "
        "or use torch.compile, torch.export or torch.jit.trace"
    )


def leaf_of_fx(module: Any, input: Any, *arguments: Any) -> Any:
    """The call in a graph of ``torch.fx``, of which torch's own modules are leaves; None outside of one.

    The module that is traced itself is none, nor is one of a class of the user's: what the class does besides is in the
    graph already. Its input may be a tensor, such as a buffer, but then its weight is a proxy.
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


def is_seen(module: Any) -> bool:
    """Whether someone sees what a module takes or gives: a hook, a forward of its own, a compiler of it alone."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._compiled_call_impl
        or "forward" in vars(module)
    )


class Owner:
    """The forward of a module that calls both, or that computes one itself and calls the other."""

    #: Names of the pairs among its children, with what lies between, and where the first of each is called: there, and
    #: where the functions around that are called, up to the one that calls the second. The name of this module itself,
    #: where it calls `torch.nn.functional.batch_norm` or a convolution, is empty.
    _convgrad_pairs: tuple[tuple[tuple[str, ...], tuple[Place, ...]], ...] = ()

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply the module."""
        run = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        if _is_dynamo_compiling():
            return run(*args, **kwargs)
        before = vars(now).copy()
        vars(now).update(owner=self, behind=None, computed={}, hooks=saved_tensors_hooks(), pads=None)
        try:
            # An error in such a mode would be another one in a trace.
            if any(one == PAD for (one, *_), _ in self._convgrad_pairs) and jit_tracing() is None:
                now.pads = _Pads().__enter__()
            result = run(*args, **kwargs)
            if now.computed:
                pairs = ", ".join(
                    f"{a or 'batch_norm'} and {b or 'convolution'}" for (a, *_, b), _ in self._convgrad_pairs
                )
                raise RuntimeError(
                    f"the forward of {type(self).__name__} has changed: when accelerate_ saw it, these followed one "
                    f"another: {pairs}; restore() and accelerate_ again"
                )
            return result
        finally:
            now.stop_watching()
            vars(now).update(before)


class _Activation:
    """The forward that the four share."""

    _convgrad_joined = "norm"
    _convgrad_activation = ""

    def forward(self: Any, input: Any) -> Any:
        """Apply the module."""
        if input.__class__ is not Tensor and (traced := leaf_of_fx(self, input)) is not None:
            return traced
        if not _is_dynamo_compiling() and now.computed.pop((self, id(input)), None) is not None:
            return input
        return super().forward(input)  # pyright: ignore[reportAttributeAccessIssue]


class ReLU(_Activation, nn.ReLU):
    _convgrad_activation = "relu"


class ReLU6(_Activation, nn.ReLU6):
    _convgrad_activation = "relu6"


class SiLU(_Activation, nn.SiLU):
    _convgrad_activation = "silu"


class Hardswish(_Activation, nn.Hardswish):
    _convgrad_activation = "hardswish"


#: The name of `torch.nn.functional.pad`, as of those below.
PAD = "pad()"

#: A function that is called behind a normalization, by a name that no module has -> a module in its place.
FUNCTIONS: dict[str, Any] = {f"{m._convgrad_activation}()": m for m in (ReLU(), ReLU6(), SiLU(), Hardswish())}

#: The functions, methods and names of methods in a graph of `torch.fx` -> its name there.
NAMES: dict[Any, str] = {
    **{getattr(F, module._convgrad_activation): name for name, module in FUNCTIONS.items()},
    **dict.fromkeys((torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, "relu", "relu_"), "relu()"),
    F.pad: PAD,
}


class Activated(Tensor):
    """A normalization's output while the activation that was computed with it has not been called yet."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output: Any = args[0] if args else None
        if now.computed.pop((FUNCTIONS.get(NAMES.get(func, "")), id(output)), None) is None:
            return super().__torch_function__(func, types, args, kwargs)
        output.__class__ = Tensor
        return output


class _ZeroPad:
    """The forward that the three share."""

    _convgrad_joins = "pad"

    def forward(self: Any, input: Tensor) -> Tensor:
        """Apply the module."""
        if input.__class__ is not Tensor and (traced := leaf_of_fx(self, input)) is not None:
            return traced
        plain = not _is_dynamo_compiling() and not self.value and _fits(input, self.padding)
        if plain and now.joined_with(self, OF_A_MODULE) is not None:
            return Padded.of(input, self.padding)
        return super().forward(input)  # pyright: ignore[reportAttributeAccessIssue]


# fmt: off
class ZeroPad1d(_ZeroPad, nn.ZeroPad1d): ...
class ZeroPad2d(_ZeroPad, nn.ZeroPad2d): ...
class ZeroPad3d(_ZeroPad, nn.ZeroPad3d): ...
# fmt: on


#: What stands for the function `torch.nn.functional.pad`.
PADDING = ZeroPad2d(0)


class _Pads(TorchFunctionMode):
    """Sees calls of `torch.nn.functional.pad`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_padded if func is _pad else func)(*args, **(kwargs or {}))


_pad = F.pad  # someone may wrap it later, and what wraps it calls this


def _padded(input: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Tensor:
    plain = mode == "constant" and not value and not fx_tracing()
    if plain and _fits(input, pad) and now.joined_with(PADDING) is not None:
        return Padded.of(input, tuple(pad))
    return _pad(input, pad, mode, value)


def _fits(input: Any, pad: Any) -> bool:
    """Whether these are zeros around a tensor, as torch takes them."""
    if type(input) not in (Tensor, nn.Parameter) or type(pad) not in (tuple, list):
        return False
    return len(pad) % 2 == 0 and len(pad) <= 2 * input.dim() and all(type(n) is int and n >= 0 for n in pad)


class Padded(Tensor):
    """What `torch.nn.functional.pad` gives, not computed: a convolution reads the input, for others it is computed."""

    _convgrad_parts: tuple[Tensor, tuple[int, ...], bool]
    _convgrad_computed: Tensor | None = None

    @classmethod
    def of(cls, input: Tensor, zeros: tuple[int, ...]) -> Padded:
        """Of an input, and the zeros around it as torch takes them."""
        shape = list(input.shape)
        for i, n in enumerate(zeros):
            shape[-1 - i // 2] += n
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=input.dtype, device=input.device)
        made._convgrad_parts = input, zeros, torch.is_grad_enabled()
        return made

    def operand(self) -> Tensor:
        """What a convolution takes that does not read the padding itself; no zeros need no copy."""
        input, zeros, _ = self._convgrad_parts
        return self.computed() if any(zeros) else input

    def computed(self) -> Tensor:
        """The tensor itself, made once: it may be changed in place."""
        if self._convgrad_computed is None:
            input, zeros, grad = self._convgrad_parts
            with torch.set_grad_enabled(grad):
                self._convgrad_computed = _pad(input, zeros)
        return self._convgrad_computed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, cls.computed, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnsupportedError(
            f"{func} was given a tensor that is padded later; restore() of accelerate_'s report helps"
        )
