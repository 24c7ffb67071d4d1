"""`shard_`: a whole network on tensors that are sharded over the processes of a mesh, in place."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from .. import functional
from .._compat import named
from ..engine import use_backend
from ..errors import ShapeError, UnsupportedError
from ..nn import constructors, feedback
from .functions import Sharded, circular_convolution
from .placed import joined, shards, spread

_mode = Sharded()


def shard_(model: nn.Module, mesh: DeviceMesh, plan: Placement | Sequence[Placement]) -> nn.Module:
    """Let a network compute on tensors that are sharded over a mesh, in place, with the results of a single process.

    The parameters stay whole and equal in every process: they are taken from the first one, and each gradient is the
    sum over all. To shard them too, call ``torch.distributed.fsdp.fully_shard`` afterwards. Each module stays the same
    object with the same name, hooks and parameters; only its class changes, to one derived from its own.

    Args:
        model: the network, or a module of ``torch.nn`` that computes a loss.
        mesh: the processes.
        plan: how activations of size (N, C, ...) are placed on the mesh, in DTensor's terms: for each mesh dimension
            ``Shard(0)`` for the batch, ``Shard(1)`` for the channels, ``Shard(2)`` and above for the spatial
            dimensions, or ``Replicate()``.

    Returns:
        The model. It takes DTensors placed like this, or plain tensors that every process has as a whole; it returns
        DTensors.

    Raises:
        TypeError: ``model`` is not a module, or the plan contains something other than placements.
        ShapeError: the plan does not fit the mesh.
        UnsupportedError: a module that cannot be computed exactly in this way; the model is left as it is.

    Equivalent to:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.distributed.tensor import Shard, init_device_mesh
        >>> from convgrad.parallel import shard_
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        >>> x = torch.rand(2, 3, 16, 16)
        >>> expected = model(x)
        >>> sharded = shard_(model, init_device_mesh("cpu", (1,)), Shard(2))
        >>> torch.testing.assert_close(sharded(x).full_tensor(), expected)
        >>> dist.destroy_process_group()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard_ takes a torch.nn.Module, got {type(model).__name__}")
    placements = _checked_plan(mesh, plan)
    for name, module in model.named_modules():
        reason = _reason_against(module, mesh, placements)
        if module is model and "forward" in vars(module):
            reason = "its forward was replaced on the instance, and nothing would place what it is called with"
        if reason:
            what = f"module {name!r} ({type(module).__name__})" if name else type(module).__name__
            raise UnsupportedError(f"shard_: {what} cannot be sharded exactly: {reason}")
    classes = [_sharded_class(type(module)) for module in model.modules()]  # Python may refuse one
    _equalize(model, mesh)
    for (name, module), cls in zip(model.named_modules(), classes, strict=True):
        module.__class__ = cls
        module._convgrad_name = name  # pyright: ignore[reportArgumentType]
    model._convgrad_plan = (mesh, placements)  # pyright: ignore[reportArgumentType]
    return model


def _checked_plan(mesh: DeviceMesh, plan: Placement | Sequence[Placement]) -> tuple[Placement, ...]:
    placements = (plan,) if isinstance(plan, Placement) else tuple(plan)
    if not all(isinstance(p, Placement) for p in placements):
        raise TypeError(f"a plan consists of placements such as Shard(2), got {plan!r}")
    if len(placements) != mesh.ndim:
        raise ShapeError(f"expected a placement for each of {mesh.ndim} mesh dimensions, but got {list(placements)}")
    dims = [p.dim for p in placements if isinstance(p, Shard)]
    known = len(dims) + sum(p.is_replicate() for p in placements) == mesh.ndim
    if not known or len(set(dims)) < len(dims) or min(dims, default=0) < 0:
        raise ShapeError(
            f"expected Replicate, or Shard of a different dimension from 0 each, but got {list(placements)}"
        )
    return placements


# ---- what cannot be sharded --------------------------------------------------------------------------

#: Classes of `torch.nn` whose functions have rules; with those derived from them. The N in a name is 1, 2 or 3.
_KNOWN = """
    ConvNd ConvTransposeNd BatchNormNd InstanceNormNd GroupNorm LayerNorm RMSNorm LocalResponseNorm MaxPoolNd
    AvgPoolNd AdaptiveAvgPoolNd AdaptiveMaxPoolNd Upsample UpsamplingNearest2d UpsamplingBilinear2d Dropout DropoutNd
    AlphaDropout FeatureAlphaDropout Linear Identity Flatten Unflatten Sequential ModuleList ModuleDict ParameterList
    ParameterDict PixelShuffle PixelUnshuffle ChannelShuffle ConstantPadNd ZeroPadNd ReflectionPadNd ReplicationPadNd
    CircularPadNd Softmax Softmax2d Softmin LogSoftmax GLU ReLU ReLU6 GELU SiLU Mish ELU SELU CELU LeakyReLU PReLU
    Hardtanh Hardswish Hardsigmoid Hardshrink Softshrink Tanhshrink Softplus Softsign LogSigmoid Sigmoid Tanh
    Threshold MSELoss L1Loss SmoothL1Loss HuberLoss SoftMarginLoss BCELoss BCEWithLogitsLoss GaussianNLLLoss
    PoissonNLLLoss CrossEntropyLoss NLLLoss
"""
_NAMES = {name.replace("Nd", f"{n}d") for name in _KNOWN.split() for n in (1, 2, 3)}


def _reason_against(module: nn.Module, mesh: DeviceMesh, placements: Sequence[Placement]) -> str | None:
    """Return why a module cannot be computed on such shards; None where it can, or where its functions raise."""
    base = next(c for c in type(module).__mro__ if c.__module__.startswith("torch.nn.modules"))
    name, dims = base.__name__, {p.dim: mesh.size(m) for m, p in enumerate(placements) if isinstance(p, Shard)}
    if name == "SyncBatchNorm":
        return "replace it by BatchNorm, whose statistics are those of all shards here"
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript compiled it, and shows nothing of what it calls"
    if base is nn.Module:
        return None
    if any(nn.parameter.is_lazy(p) for p in module.parameters(recurse=False)):
        return "its parameters are not there yet; call it once before"
    if isinstance(module, feedback.Feedback):
        return "its backward pass goes through another weight, for which there is no rule"
    if name not in _NAMES:
        return "its function has no rule for shards"
    spatial = int(name[-2]) if name[-2:] in ("1d", "2d", "3d") and "Dropout" not in name else None
    if spatial is not None and max(dims, default=0) > spatial + 1:
        return f"the plan shards dimension {max(dims)}, and it works on {spatial} spatial dimensions"
    if getattr(module, "return_indices", False):
        return "return_indices counts positions of the whole, which no shard has"
    along = {"Softmax2d": 1, "LocalResponseNorm": 1, "ChannelShuffle": 1, "PixelShuffle": 1, "PixelUnshuffle": 1}
    along |= {"CrossEntropyLoss": 1, "NLLLoss": 1}
    dim = getattr(module, "dim", None) if "Soft" in name or name == "GLU" else along.get(name)
    if isinstance(dim, int) and dim in dims:
        return f"it works along dimension {dim}, which the plan shards"
    if isinstance(module, nn.GroupNorm) and 1 in dims:
        width = module.num_channels // module.num_groups
        if -(-module.num_channels // dims[1]) % width:
            return (
                f"a shard of its {module.num_channels} channels would end inside one of its {module.num_groups} groups"
            )
    return None


# ---- in place --------------------------------------------------------------------------------------


def _equalize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give every process the parameters and buffers of the first one."""
    everywhere = [Replicate()] * mesh.ndim
    with torch.no_grad(), named("broadcast of the parameters"):
        for t in (*model.parameters(), *model.buffers()):
            if not isinstance(t, DTensor) and not t.is_meta:
                t.copy_(distribute_tensor(t.detach(), mesh, everywhere).to_local())


def _sharded_class(cls: Any) -> type:
    """Return the class that computes ``cls`` on shards."""

    @wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_convgrad_plan" in self.__dict__ and not any(isinstance(t, DTensor) for t in tree_leaves((args, kwargs))):
            args, kwargs = tree_map_only(Tensor, lambda t: _placed(t, *self._convgrad_plan), (args, kwargs))
        try:
            with nullcontext() if any(type(mode) is Sharded for mode in _get_current_function_mode_stack()) else _mode:
                return cls.forward(self, *args, **kwargs)
        except UnsupportedError as error:
            if self._convgrad_name and not str(error).startswith("module "):
                raise UnsupportedError(f"module {self._convgrad_name!r}: {error}") from None
            raise

    def conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        plain = self.padding_mode == "circular" and getattr(self, "_convgrad_layout", "NCL") == "NCL"
        plain = plain and not torch.compiler.is_compiling()  # a compiled graph pads and then computes
        if plain and isinstance(input, DTensor) and input.dim() == weight.dim() and 1 not in shards(input):
            sides = functional.sides_of(self)
            if min(map(min, sides)) >= 0:
                backend = getattr(self, "_convgrad_backend", None)
                with nullcontext() if backend is None else use_backend(backend):
                    return circular_convolution(input, weight, bias, sides, self.stride, self.dilation, self.groups)
        return cls._conv_forward(self, input, weight, bias)

    body: dict[str, Any] = {"forward": forward}
    own = getattr(cls, "_conv_forward", forward)  # a user's may compute anything
    if issubclass(cls, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and own.__module__.split(".")[0] in ("torch", "convgrad"):
        body["_conv_forward"] = conv_forward
    return constructors.derived_class(_sharded_class, cls, (cls,), body)


def _placed(value: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return the shard of a tensor that all processes have whole; a missing dimension is not sharded."""
    own = [p if not isinstance(p, Shard) or p.dim < value.dim() else Replicate() for p in placements]
    used = {m for m, p in enumerate(own) if not p.is_replicate()}
    return joined(spread(value, mesh, own, used), mesh, own, value.shape)
