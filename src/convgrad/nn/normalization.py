"""Normalization by the statistics of the batch, and the activation that reads its result, in one kernel of ``csrc``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F
from torch.nn.modules import module as hooks_of_all

from .. import _compat
from ..backends import least_norm, native_norm_takes, norm_gains, normalization_gradients, normalize
from .deferred import Deferred, describes, watching

_KINDS = (Tensor, Parameter)
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


def _plain() -> bool:
    """Whether a call is a plain one: no transform, mode or trace sees it."""
    functions = _compat.function_modes()
    modes = _compat.dispatch_modes() or (functions > watching() and functions > watching() + _compat.device_modes())
    return not (modes or _compat.functorch_active() or _compat.forward_ad_active()) and _compat.jit_tracing() is None


def _is_odd(t: Tensor) -> bool:
    """Whether a tensor's values differ from its memory, as of a lazy negation."""
    return t.is_neg() or not (_compat.has_storage(t) and (t.data_ptr() or t.is_meta))


def _format(input: Tensor) -> torch.memory_format:
    """Return the layout of a dense input, or None if no kernel takes it."""
    return torch.contiguous_format if input.is_contiguous() else _compat.channels_last_of(input.dim() - 2)


def kernels_take(input: Any, parameters: tuple[Any, ...], by_image: bool = False) -> bool:
    """Whether the kernels compute an input with the statistics of the batch or of each image, and parameters."""
    if _is_dynamo_compiling() or input.__class__ not in _KINDS or input.layout is not torch.strided:
        return False
    if input.numel() < least_norm(input.itemsize, by_image, input.is_contiguous()):
        return False  # before all else, because the layer of a small input has the least time to lose
    plain = (input.is_cpu and _plain()) or describes(input) is not None
    if not plain or not native_norm_takes(input.dtype) or _is_odd(input):
        return False
    dense = input.dim() > 2 and (by_image or input.is_contiguous(memory_format=_format(input)))
    if not dense or input.numel() == input.shape[1]:  # one value of each channel is torch's error
        return False
    given = [p for p in parameters if p is not None]
    dtype = given[0].dtype if given else input.dtype
    for p in given:
        alike = p.__class__ in _KINDS and p.dtype is dtype and p.shape == input.shape[1:2] and p.is_cpu is input.is_cpu
        if not alike or not p.is_contiguous() or _is_odd(p):
            return False
    fits = dtype is input.dtype or (dtype is torch.float32 and input.itemsize == 2)
    return fits and norm_gains(input.shape, not by_image and not input.is_contiguous(), by_image)


# ---- the reader of the result --------------------------------------------------------------------

#: Module -> the activation that read its result last; "" where something else did, and then it is computed at once.
_readers: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def has_hooks(module: Any = None) -> bool:
    """Return whether hooks see the output of a module, or of all modules, but for those with ``reads_nothing``."""
    of_all = hooks_of_all
    if of_all._global_backward_hooks or of_all._global_backward_pre_hooks:
        return True
    own = {} if module is None else module._forward_hooks
    seen = (own, of_all._global_forward_hooks, of_all._global_forward_pre_hooks)
    return any(not hasattr(hook, "reads_nothing") for hooks in seen for hook in hooks.values())


def expected_reader(module: Any) -> str | None:
    """Return the activation that is expected to read a module's result, or "" for anything else; None if not known.

    What hooks see is not read by an activation alone. Inside of hooks on saved tensors (`torch.utils.checkpoint`) every
    other result is deferred: what autograd saves must not depend on what was learned meanwhile.
    """
    if has_hooks(module):
        return ""
    reader = _readers.get(module)
    return None if reader == "" and _compat.saved_tensors_hooks() is not None else reader


def compute(
    module: Any, reader: str | None, input: Tensor, weight: Tensor | None, bias: Tensor | None,
    running_mean: Tensor | None, running_var: Tensor | None, momentum: float, epsilon: float, by_image: bool = False,
) -> Tensor:  # fmt: skip
    """Normalize by the kernels, together with the activation that is expected to follow where gradients are recorded.

    Without gradients the result is computed at once: the input may change before the activation reads the result, and
    the backward, which would refuse that, never runs. So it is where a compiled function may read it, which Dynamo
    could not trace.
    """
    if by_image:  # recorded, since a derivative of the backward needs the history of what the node saves
        input = input.contiguous()
    tensors, running = (input, weight, bias), (running_mean, running_var, momentum)
    if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)):
        return normalized(*tensors, epsilon, by_image, "", running)[0]
    if reader == "" or _compat.anything_compiled():
        return _normalization(*tensors, epsilon, by_image, "", running, False)
    if bias is not None:  # which may be changed in place later: torch's backward does not read it
        tensors = (input, weight, bias.clone())
    value, deferred = _normalization(*tensors, epsilon, by_image, reader or "", running, True)
    deferred._convgrad_pending, deferred._convgrad_activation = value, reader or ""
    deferred._convgrad_module = ref(module)
    deferred._convgrad_call = *tensors, epsilon, by_image
    deferred._convgrad_versions = [t._version for t in tensors if t is not None]
    return deferred


class Normalized(Deferred):
    """A normalization that an activation may read: its values, or the activation's, are computed already."""

    #: The first output of the node, until the first reader takes it; and the activation that it is the result of.
    _convgrad_pending: Tensor | None = None
    _convgrad_activation = ""
    #: Whether an activation took it, so that the gradient of the values is no sum of what flows into this tensor.
    _convgrad_activated = False
    _convgrad_module: Any
    #: Input, weight, bias, epsilon, and whether each image is normalized by itself.
    _convgrad_call: tuple[Tensor, Tensor | None, Tensor | None, float, bool]
    _convgrad_versions: list[int]

    def read(self) -> Tensor:
        """Return an ordinary tensor with the normalization's values."""
        pending = vars(self).pop("_convgrad_pending", None)
        if pending is not None:
            self._expect("")
            if not self._convgrad_activation:
                self._convgrad_read = pending
                self._note()
        return super().read()

    def activated(self, activation: str, in_place: bool) -> Tensor | None:
        """Return the result of an activation that is the first reader; None where another one was."""
        if not torch.is_grad_enabled() or _compat.functorch_active():
            return None
        pending = vars(self).pop("_convgrad_pending", None)
        if pending is None:
            return None
        if self._convgrad_activation not in ("", activation):
            self._expect("")
            return None
        node = pending.grad_fn
        if not self._convgrad_activation:
            with torch.no_grad():
                getattr(F, activation)(pending, inplace=True)
            node.activation = activation
        node.version = pending._version
        self._expect(activation)
        self._convgrad_activated = not in_place
        if in_place:
            self._convgrad_read = pending
            torch.autograd.graph.increment_version(self)
            self._note()
        return pending

    def _expect(self, reader: str) -> None:
        module = self._convgrad_module()
        if module is not None and _readers.get(module) != reader:
            _readers[module] = "" if module in _readers else reader

    def keep(self) -> None:
        """Compute the values now: after the backward pass weights change."""
        if self._convgrad_read is None:
            vars(self).setdefault("_convgrad_values", self._compute())

    def _compute(self) -> Tensor:
        values = vars(self).get("_convgrad_values")
        if values is not None:
            return values
        if [t._version for t in self._convgrad_call[:3] if t is not None] != self._convgrad_versions:
            raise RuntimeError(
                "the input or weight of a normalization was changed in place before something other than its "
                "activation read the result"
            )
        with torch.no_grad():
            return normalized(*self._convgrad_call)[0]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = _ACTIVATIONS.get(func)
        if known is not None and args and isinstance(args[0], Normalized):
            activation, in_place = known(*args[1:], **(kwargs or {}))
            if activation and (output := args[0].activated(activation, in_place)) is not None:
                return output
        asked = _ASK_FOR_GRADIENTS[func](*args) if func in _ASK_FOR_GRADIENTS else ()
        if any(isinstance(t, Normalized) and t._convgrad_activated for t in asked):
            raise RuntimeError(
                "the gradient of a normalization's result was asked for after its activation, with which it is "
                "computed: call register_hook or retain_grad before the activation, or give the normalization a hook"
            )
        return super().__torch_function__(func, types, args, kwargs)


#: Function or method -> the name of the activation and whether it is in place, of its other arguments.
_ACTIVATIONS: dict[Any, Callable[..., tuple[str, bool]]] = {
    **{getattr(F, n): lambda inplace=False, n=n: (n, inplace) for n in ("relu", "relu6", "silu", "hardswish")},
    **dict.fromkeys((torch.relu, Tensor.relu), lambda: ("relu", False)),
    **dict.fromkeys((torch.relu_, Tensor.relu_), lambda: ("relu", True)),
    F.hardtanh: lambda min_val=-1, max_val=1, inplace=False: ("relu6" * ((min_val, max_val) == (0, 6)), inplace),
}
#: Function or method that asks for the gradients of tensors -> these, of its arguments.
_ASK_FOR_GRADIENTS: dict[Any, Callable[..., Sequence[Any]]] = {
    **dict.fromkeys((Tensor.register_hook, Tensor.retain_grad), lambda t, *_: (t,)),
    torch.autograd.grad: lambda outputs, inputs: inputs,
}


# ---- values and gradients ------------------------------------------------------------------------


def normalized(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, by_image: bool, activation: str = "",
    running: tuple[Tensor | None, Tensor | None, float] = (None, None, 0.0),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the normalized, activated values and the statistics; update the running mean and variance."""
    if not by_image:
        return normalize(input, weight, bias, *running, epsilon, activation)
    weight, bias = _repeated(input, weight, bias)
    output, statistics = normalize(_folded(input), weight, bias, *running, epsilon, activation)
    return _aten._unsafe_view(output, input.shape), statistics  # a view would be copied by activations in place


def recomputed(node: Any) -> Tensor:
    """Return the first output of a node once more, without history; an error where its input changed."""
    input, weight, bias, _ = node.saved_tensors
    with torch.no_grad():
        return normalized(input, weight, bias, node.epsilon, node.by_image, node.activation)[0]


def activating_node(t: Tensor) -> Any:
    """Return the node that computed a tensor, which nothing changed since, if it is one with an activation, or None."""
    node = t.grad_fn
    ours = isinstance(node, _Normalization._backward_cls)  # pyright: ignore[reportAttributeAccessIssue]
    return node if ours and getattr(node, "version", -1) == t._version else None


def _folded(input: Tensor) -> Tensor:
    """Return (N, C, *spatial) as (1, N * C, *spatial)."""
    return input.view(1, -1, *input.shape[2:])


def _repeated(input: Tensor, *parameters: Tensor | None) -> list[Tensor | None]:
    """Return parameters [C] as [N * C], not in 16 bits, to which the gradients of all images would be rounded."""
    return [None if p is None else p.to(_compat.accumulate_dtype(p.dtype)).repeat(len(input)) for p in parameters]


class _Normalization(torch.autograd.Function):
    """Saves what torch's saves: input, weight, and mean and inverse standard deviation of each channel.

    Where an activation may follow it saves a copy of the bias, too, but neither the normalized input nor the result, as
    the activation would. Its first output is computed, by `activation` of the node; the second one is deferred, and
    plain.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, *arguments: Any) -> Any:
        *options, deferred = arguments
        output, statistics = normalized(input, weight, bias, *options)
        ctx.epsilon, ctx.by_image, ctx.activation, _ = options
        ctx.save_for_backward(input, weight, bias if deferred else None, statistics)
        if not deferred:
            return output
        ctx.set_materialize_grads(False)
        ctx.version = -1  # of the first output, once an activation has read it
        second = Normalized.like(output.shape, output.stride(), output)
        ctx.deferred = ref(second)
        return output, second

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = zip(grad_outputs, (ctx.activation, ""), strict=False)
        saved = ctx.saved_tensors  # once: a checkpoint gives each only once
        found = [_gradients(ctx, saved, g, activation) for g, activation in pairs if g is not None]
        # No gradient comes where a derivative does not depend on the result, as behind a last linear layer.
        gradients = found[0] if found else (None,) * 3
        for each in found[1:]:
            gradients = [None if a is None or b is None else a + b for a, b in zip(gradients, each, strict=True)]
        if len(grad_outputs) > 1 and (deferred := ctx.deferred()) is not None:
            deferred.keep()
        return (*gradients, *(None,) * 5)


def _gradients(ctx: Any, saved: Any, grad_output: Tensor, activation: str) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weight and bias, as far as they are needed."""
    input, weight, bias, statistics = saved
    needs, shape, n = ctx.needs_input_grad[:3], input.shape, len(input)
    plain = not (_is_dynamo_compiling() or torch.is_grad_enabled()) and grad_output.__class__ in _KINDS
    plain = plain and not _is_odd(grad_output) and _plain()
    if plain or input.is_contiguous():  # torch's kernel misreads one image's gradient in another layout
        grad_output = grad_output.contiguous(memory_format=_format(input))
    if ctx.by_image:
        weight, bias = _repeated(input, weight, bias)
        input, grad_output = _folded(input), _folded(grad_output)
    if plain:
        gradients = normalization_gradients(grad_output, input, weight, bias, statistics, needs, activation)
    else:  # torch's formulas have derivatives of their own
        if activation:
            z = F.batch_norm(input, None, None, weight, bias, True, 0.0, ctx.epsilon)
            (grad_output,) = torch.func.vjp(getattr(F, activation), z)[1](grad_output)
        scale = None if weight is None else weight.to(statistics.dtype)
        gradients = _aten.native_batch_norm_backward(
            grad_output, input, scale, None, None, *statistics, True, ctx.epsilon, needs
        )
    if ctx.by_image:
        of_input, *of_channels = gradients
        gradients = (
            None if of_input is None else of_input.view(shape),
            *(None if g is None else g.view(n, -1).sum(0) for g in of_channels),
        )
    return tuple(gradients)


_normalization = _compat.apply_of(_Normalization)
_aten: Any = torch.ops.aten
