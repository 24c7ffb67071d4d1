"""The table of PyTorch's functions for sharded tensors, and the mode that looks functions up in it.

A function that is not in the table is refused. DTensor itself would compute many of them by gathering the whole tensor
in every process, and some wrongly: the mean of shards of different sizes, for one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .. import functional
from ..errors import UnsupportedError
from ..problem import Sides, by_pytorch
from . import dropout, elementwise, losses, norms, pooling, resampling
from .placed import joined_like, shards, spread
from .redistribution import redistribute

Rule = Callable[..., Any]
_BY_ELEMENTS = """
    abs neg negative positive sign exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square pow reciprocal sin cos tan
    sinh cosh asin acos atan erf erfc round floor ceil trunc clamp clamp_min clamp_max clip nan_to_num where lerp
    addcmul addcdiv add sub subtract mul multiply div divide true_divide floor_divide remainder fmod maximum minimum
    fmax fmin atan2 logaddexp eq ne lt le gt ge logical_and logical_or logical_not logical_xor isnan isinf isfinite
    bitwise_and bitwise_or bitwise_not relu relu6 gelu silu mish elu selu celu leaky_relu hardtanh hardswish
    hardsigmoid hardshrink softshrink tanhshrink softplus softsign logsigmoid sigmoid tanh threshold __add__
    __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __pow__ __rpow__ __neg__
    __abs__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__
    __invert__ __pos__ expand_as masked_fill
"""
#: In place, and what computes nothing or only turns a tensor around: DTensor's own, which are exact and send nothing.
_DTENSORS = """
    add_ sub_ mul_ div_ neg_ clamp_ relu_ leaky_relu_ elu_ silu_ sigmoid_ tanh_ copy_ fill_ zero_ __iadd__ __isub__
    __imul__ __itruediv__ size stride dim ndimension numel nelement __len__ to detach detach_ clone contiguous float
    double half bfloat16 type requires_grad_ register_hook retain_grad backward full_tensor to_local redistribute
    is_floating_point is_complex is_contiguous permute transpose movedim swapaxes unsqueeze squeeze zeros_like
    ones_like empty_like full_like new_zeros new_ones new_empty new_full type_as item tolist __repr__ __format__
    __bool__ __float__ get_device element_size data_ptr register_post_accumulate_grad_hook __hash__
    __deepcopy__ __get__ is_same_size storage_offset has_names result_type dtype is_tensor
"""


def _convolution(
    func: Rule, x: DTensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> DTensor:
    """A convolution or a transposed one, by this library's operators and their own rules under DTensor."""
    everywhere, operands = [Replicate()] * x.device_mesh.ndim, [weight, bias]
    for i, (name, t) in enumerate((("weight", weight), ("bias", bias))):
        if t is not None and not isinstance(t, DTensor):
            own = t if torch.is_grad_enabled() else t.detach()
            whole = DTensor.from_local(own, x.device_mesh, everywhere, run_check=False)
            # It does nothing, but backwards it brings together what the processes have of the gradient.
            operands[i] = redistribute(whole, everywhere, name)
    result = getattr(functional, func.__name__, func)(x, *operands, *args, **kwargs)
    # The cheapest way for one convolution may leave partial sums or another dimension sharded: the plan is kept.
    return result if result.placements == x.placements else redistribute(result, x.placements, "output")


def circular_convolution(
    x: DTensor, weight: Tensor, bias: Tensor | None, sides: Sides, stride: Any, dilation: Any, groups: int
) -> DTensor:
    """A convolution with circular padding of a tensor whose channels are whole: its halo goes around.

    Of a padded copy all shards would begin elsewhere: with 16 of them, several times as many rows would travel.
    """
    own, mesh, d = shards(x), x.device_mesh, weight.dim() - 2
    conv = getattr(functional, f"conv{d}d")
    # Of one dtype, as under autocast, which leaves them alone.
    metas = [t if t is None else torch.empty(t.shape, dtype=x.dtype, device="meta") for t in (x, weight, bias)]
    metas[0] = by_pytorch(metas[0], sides, "circular")  # pyright: ignore[reportArgumentType] - with PyTorch's own checks
    shape = conv(*metas, stride, 0, dilation, groups).shape
    low = [low for low, _ in sides]
    everywhere = [Replicate()] * mesh.ndim
    w, b = (t if t is None else spread(t, mesh, everywhere, set(own.values())) for t in (weight, bias))
    result, _ = pooling.windowed(
        x, shape, lambda t: conv(t, w, b, stride, 0, dilation, groups), weight.shape[2:], stride, low, dilation,
        circular=True,
    )  # fmt: skip
    return joined_like(x, result, shape)


#: The rules of all other functions; an N in a name is 1, 2 or 3.
_OTHERS: dict[str, Rule] = {
    "convNd conv_transposeNd": _convolution,
    "max_poolNd": pooling.max_pool,
    "avg_poolNd": pooling.avg_pool,
    "adaptive_avg_poolNd adaptive_max_poolNd": pooling.adaptive_pool,
    "interpolate upsample": resampling.interpolate,
    "batch_norm": norms.batch_norm,
    "instance_norm": norms.instance_norm,
    "group_norm": norms.group_norm,
    "layer_norm": norms.layer_norm,
    "rms_norm": norms.rms_norm,
    "local_response_norm": norms.local_response_norm,
    "dropout dropoutNd": dropout.dropout,
    "alpha_dropout feature_alpha_dropout": dropout.alpha_dropout,
    "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy gaussian_nll_loss "
    "poisson_nll_loss binary_cross_entropy_with_logits": losses.each_element,
    "cross_entropy nll_loss": losses.classified,
    "mean sum": elementwise.summed,
    "linear": elementwise.linear,
    "prelu": elementwise.prelu,
    "pad": elementwise.padded,
    "__getitem__": elementwise.indexed,
    "flatten reshape view unflatten": elementwise.reshaped,
    "pixel_shuffle pixel_unshuffle": elementwise.shuffled,
    "softmax log_softmax softmin cumsum cumprod": elementwise.along(),
    "flip": elementwise.flipped,
    "chunk split": elementwise.divided,
    "cat concat concatenate": elementwise.concatenated,
    "narrow": elementwise.along(0),
    "select unbind": elementwise.along(0, shift=-1),
    "stack": elementwise.along(0, shift=1),
    "glu": elementwise.along(-1),
    "normalize": elementwise.along(1, position=2),
    "channel_shuffle": elementwise.along(1, position=99),
}


_own_rules = frozenset(_DTENSORS.split())
#: Functions in place, which DTensor has for DTensors and numbers alone -> those whose rule computes plain tensors too.
_OF_PLAIN = {
    getattr(Tensor, name): getattr(Tensor, rule)
    for rule, names in {"add": "add_ __iadd__", "sub": "sub_ __isub__", "mul": "mul_ __imul__",
                        "div": "div_ __itruediv__"}.items()
    for name in names.split()
}  # fmt: skip
_PLACES = (F, torch, Tensor, torch._C._nn)  # pyright: ignore[reportAttributeAccessIssue]
_RULES: dict[Any, Rule] = {
    getattr(place, name): rule
    for names, rule in {_BY_ELEMENTS: elementwise.by_elements, **_OTHERS}.items()
    for pattern in names.split()
    for name in {pattern.replace("N", n) for n in "123"}
    # PyTorch's own norms in C++ have other arguments than those in Python, which call them.
    for place in (_PLACES[:1] if name.endswith("_norm") else _PLACES)
    if hasattr(place, name)
} | {torch.ops.convgrad.convolution.default: _convolution}


#: Names of arguments that PyTorch takes too, numpy's and that of its dropouts in C++ -> those that the rules know.
_OTHER_NAMES = {"axis": "dim", "keepdims": "keepdim", "train": "training"}


class Sharded(TorchFunctionMode):
    """While it is active, functions of sharded tensors are computed by their rules, or refused where none can."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        tensors = [t for t in operands if isinstance(t, DTensor)]
        in_place = func in _OF_PLAIN and isinstance(operands[0], DTensor) and len(tensors) < len(operands)
        if not tensors or (func.__name__ in _own_rules and not in_place):
            return func(*args, **kwargs)
        func = _OF_PLAIN[func] if in_place else func
        x, rule = tensors[0], _RULES.get(func)
        draws = rule in (dropout.dropout, dropout.alpha_dropout)
        if not draws and all(p.is_replicate() for t in tensors for p in t.placements):
            rule = elementwise.of_replicas
        if rule is None:
            raise UnsupportedError(
                f"{func.__name__} has no rule for sharded tensors (here {list(x.placements)} of size {list(x.shape)}); "
                "redistribute them first, or leave it to a function that has one"
            )
        if rule is not elementwise.of_replicas:  # which passes all on to PyTorch
            kwargs = {_OTHER_NAMES.get(name, name): value for name, value in kwargs.items()}
        if not (kwargs.pop("inplace", False) or in_place):
            return rule(func, *args, **kwargs)
        if func is F.relu:
            return x.relu_()
        # What the derivative needs of x must not change with it.
        return x.copy_(rule(func, x.clone(), *args[1:], **kwargs))
