"""The torch operators ``torch.ops.convgrad.*``.

``convolution`` and ``convolution_backward`` have exactly the schemas of their ATen namesakes, so that they can be
exchanged for one another; their padding may also have 2D entries, low and high of each dimension in turn.
``grad_input`` and ``grad_weight`` are one gradient each, without the tensor that it does not need.

For complex tensors these operators are the plain contractions; autograd conjugates.
"""

from __future__ import annotations

import torch

from . import autograd, batching, flops, kernels, lowering
from .autograd import apply, apply_linear
from .flops import profiled_call
from .kernels import autocast_dtype, autocast_is_on, cast, cast_operands
from .kernels import run as run_gradient
from .lowering import Rule, any_subclass, loaders, operator, requesting, rules_of, traced_request, with_rules
from .pytorch_operators import exchanged, opened

_ARGUMENTS = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups"
)
_LAYOUT = ", *, MemoryFormat? memory_format=None"
SCHEMAS = {
    "convolution": f"(Tensor input, Tensor weight, Tensor? bias, {_ARGUMENTS}) -> Tensor",
    "convolution_backward": (
        f"(Tensor grad_output, Tensor input, Tensor weight, SymInt[]? bias_sizes, {_ARGUMENTS}, bool[3] output_mask)"
        " -> (Tensor, Tensor, Tensor)"
    ),
    "grad_input": f"(Tensor grad_output, Tensor weight, SymInt[] input_size, {_ARGUMENTS}{_LAYOUT}) -> Tensor",
    "grad_weight": f"(Tensor grad_output, Tensor input, SymInt[] weight_size, {_ARGUMENTS}{_LAYOUT}) -> Tensor",
}

_library = torch.library.Library("convgrad", "DEF")


def _define(name: str, schema: str, kernel: Rule, without_data: Rule, batched: Rule, differentiable: Rule) -> None:
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"convgrad::{name}", without_data, lib=_library)
    torch.library.register_vmap(f"convgrad::{name}", batched, lib=_library)
    _library.impl(name, differentiable, "Autograd", with_keyset=True)
    packet, _, overload = name.partition(".")
    defined = getattr(getattr(torch.ops.convgrad, packet), overload or "default")
    for device, key in kernels.KEYS.items():
        _library.impl(name, kernels.casting(defined, device), key)


for _name, _schema in SCHEMAS.items():
    _rules = [getattr(kernels, _name), getattr(kernels, f"fake_{_name}")]
    _rules += [getattr(room, _name) for room in (batching, autograd)]
    _define(_name, _schema, *_rules)
    _define(f"{_name}.with_backend", lowering.overload(_schema), *map(lowering.under_request, _rules))

flops.register()
