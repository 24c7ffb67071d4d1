"""The torch operators ``torch.ops.convgrad.*``.

``convolution`` and ``convolution_backward`` have exactly the schemas of their ATen namesakes, so that they can be
exchanged for one another; their padding may also have 2D entries, low and high of each dimension in turn.
``grad_input`` and ``grad_weight`` are one gradient each, without the tensor that it does not need.

For complex tensors these operators are the plain contractions; autograd conjugates.
"""

from __future__ import annotations

import torch

from . import autocast, autograd, batching, fake, flops, kernels, with_backend
from .autocast import autocast_is_on, cast_operands
from .autograd import apply
from .kernels import run as run_gradient
from .lowering import any_subclass, loaders, rules_of, with_rules
from .with_backend import operator

_ARGUMENTS = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups"
)
SCHEMAS = {
    "convolution": f"(Tensor input, Tensor weight, Tensor? bias, {_ARGUMENTS}) -> Tensor",
    "convolution_backward": (
        f"(Tensor grad_output, Tensor input, Tensor weight, SymInt[]? bias_sizes, {_ARGUMENTS}, bool[3] output_mask)"
        " -> (Tensor, Tensor, Tensor)"
    ),
    "grad_input": (
        f"(Tensor grad_output, Tensor weight, SymInt[] input_size, {_ARGUMENTS}, *, MemoryFormat? memory_format=None)"
        " -> Tensor"
    ),
    "grad_weight": (
        f"(Tensor grad_output, Tensor input, SymInt[] weight_size, {_ARGUMENTS}, *, MemoryFormat? memory_format=None)"
        " -> Tensor"
    ),
}

_library = torch.library.Library("convgrad", "DEF")
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    _library.impl(_name, getattr(kernels, _name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"convgrad::{_name}", getattr(fake, _name), lib=_library)
    torch.library.register_vmap(f"convgrad::{_name}", getattr(batching, _name), lib=_library)
    _library.impl(_name, getattr(autograd, _name), "Autograd", with_keyset=True)
    rules = (getattr(room, _name) for room in (kernels, fake, batching, autograd))
    with_backend.define(_library, _name, _schema, *rules)

autocast.register(_library)
flops.register()
