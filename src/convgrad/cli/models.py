"""Models by name: a function of the user's own (``module:factory``), or a definition of transformers."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from .app import RequestError, fail
from .options import DTYPES as MODEL_DTYPES
from .options import OfModel, kind_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..diagnostics import Machine, ModelExplanation
    from ..problem import Output


@dataclass(frozen=True)
class Model:
    """A model whose class transformers has, with random weights: nothing is downloaded."""

    config: str  # transformers' class of its configuration
    options: dict[str, Any] = field(default_factory=dict)  # other than its defaults: a small variant, few layers
    input: tuple[int, ...] = (3, 224, 224)  # of one sample: of an image, whose size is free, or a sequence's length
    vocabulary: int = 0  # of a model that reads numbers of words

    def build(self) -> nn.Module:
        """Return the model on the device of the block; on meta it takes no memory."""
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        try:
            transformers = importlib.import_module("transformers")
        except ImportError:
            raise fail("the models are definitions of transformers", "pip install 'convgrad[models]'") from None
        net = transformers.AutoModel.from_config(getattr(transformers, self.config)(**self.options))
        for module in net.modules():
            # As PyTorch initializes layers. With transformers' weights EfficientNet's normalizations multiply by 0.02:
            # its results are 0, and on the way subnormal numbers, with which some processors are 100 times as slow.
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return net


MODELS = {
    "mobilenet_v1": Model("MobileNetV1Config"),
    "mobilenet_v2": Model("MobileNetV2Config"),
    "efficientnet_b0": Model(
        "EfficientNetConfig", {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280}
    ),
    "convnext_tiny": Model("ConvNextConfig"),
    "convnextv2_tiny": Model("ConvNextV2Config"),
    "resnet50": Model("ResNetConfig"),
    "regnet_y": Model("RegNetConfig"),
    "segformer_b0": Model("SegformerConfig"),
    "focalnet_tiny": Model("FocalNetConfig"),
    "mamba": Model("MambaConfig", {"num_hidden_layers": 2, "vocab_size": 1000}, (256,), 1000),
    "wav2vec2": Model("Wav2Vec2Config", {"num_hidden_layers": 2, "apply_spec_augment": False}, (16000,)),
}

_TAKEN_BY = {
    "problem": "explain, check, bench and tune take problems",
    "script": "run, report and tune take scripts",
    "file": "check, bench and tune read problems, report .csv and .json",
}
_FACTORY = "module:factory, where factory() returns an nn.Module, or (nn.Module, example_inputs)"


def build(name: str, device: torch.device | str) -> tuple[nn.Module, Any]:
    """Return the model on a device, and the inputs that its function returns with it, or None.

    Where its function needs values, it is made on the CPU instead of on meta.
    """
    import torch
    from torch import nn

    known = _known(name)
    if known is None and (kind := kind_of(name)) != "model":
        raise fail(f"{name!r} is a {kind}, not a model", _TAKEN_BY[kind])
    if known is None and ":" not in name:
        raise fail(f"{name!r} is neither a problem nor a model", f"models: {', '.join(MODELS)}, or module:factory")
    try:
        factory = _own(name) if known is None else known.build
        with torch.device(device):
            made: Any = factory()
    except RequestError:
        raise
    except (Exception, SystemExit) as error:  # SystemExit: of a script that runs when it is imported
        if device == "meta":
            return build(name, "cpu")
        raise fail(f"{name!r} raised {type(error).__name__}: {error}", _FACTORY) from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise fail(f"{name!r} returned {type(model).__name__}, not an nn.Module", _FACTORY)
    return model, inputs


def _known(name: str) -> Model | None:
    """Return the model that is meant, whatever its spelling, or its first variant: ``MobileNet-V2``, ``convnext``."""
    letters = re.sub(r"[-_\s]", "", name.lower())
    whole = {key.replace("_", ""): model for key, model in MODELS.items()}
    variants = {re.sub(r"(_\w+|\d\d+)$", "", key): model for key, model in reversed(MODELS.items())}
    return {**variants, **whole}.get(letters)


def _own(name: str) -> Callable[[], Any]:
    from torch import nn

    module, _, attribute = name.partition(":")  # a file's name may have a hyphen, unlike those of pkgutil.resolve_name
    sys.path.insert(0, os.getcwd())  # to stay: what is found may import more when it is called
    try:
        result: Any = attrgetter(attribute)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise fail(f"cannot get {name!r}: {error}", _FACTORY) from None
    return (lambda: result) if isinstance(result, nn.Module) else result


def explained(name: str, machine: Machine, of: OfModel, outputs: tuple[Output, ...] | None = None) -> ModelExplanation:
    """Explain each convolution of a model, which is built without memory."""
    from torch import nn

    from ..diagnostics import Explanation, Layer, ModelExplanation, explain
    from ..models import arguments

    net, given = with_inputs(name, "meta", of)
    args, kwargs = arguments(given)
    result = explain(net, *args, **kwargs, device=machine, outputs=outputs)
    if isinstance(result, Explanation):
        return ModelExplanation(
            result.machine, (Layer((name,), type(net).__name__, result, isinstance(net, nn.Linear)),)
        )
    return result


def with_inputs(name: str, device: torch.device | str, of: OfModel) -> tuple[nn.Module, Any]:
    """Return a model and its inputs as its options say."""
    import torch
    from torch.utils._pytree import tree_map_only

    from ..problem import DTYPES

    dtype = DTYPES[of.dtype] if of.dtype else None
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise fail(f"PyTorch makes no model of {dtype}", f"one of {', '.join(MODEL_DTYPES)}")
    net, given = build(name, device)
    if str(device) != "meta":
        net = net.to(device)
    if of.shape or given is None:
        with torch.device(device):
            given = example_input(name, of.shape)
    if dtype is not None:
        net = net.to(dtype=dtype)
        given = tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, given)
    return in_channels_last(net, given) if of.last else (net, given)


def example_input(name: str, shape: str = "") -> torch.Tensor:
    """Return an input of a shape, or of two samples, as normalization in training needs more than one.

    A user's model without example inputs is taken for one of images.
    """
    import torch

    model = _known(name) or Model("")
    sizes = tuple(map(int, shape.split("x"))) if shape else (2, *model.input)
    try:
        return torch.randint(model.vocabulary, sizes) if model.vocabulary else torch.randn(sizes)
    except (RuntimeError, TypeError):
        raise fail(f"an input of {shape or 'the usual shape'} does not fit in any memory") from None


def in_channels_last(net: nn.Module, inputs: Any) -> tuple[nn.Module, Any]:
    """Return a model and its inputs in channels_last; an error for the user where there is no image."""
    import torch
    from torch.utils._pytree import tree_leaves, tree_map_only

    from .._compat import channels_last_of

    def converted(t: torch.Tensor) -> torch.Tensor:
        return t.contiguous(memory_format=channels_last_of(t.dim() - 2)) if t.dim() in (4, 5) else t

    if not any(getattr(value, "ndim", 0) in (4, 5) for value in tree_leaves(inputs)):
        raise fail("--channels-last needs an input that is an image or a volume")
    for t in (*net.parameters(), *net.buffers()):
        t.data = converted(t.data)
    return net, tree_map_only(torch.Tensor, converted, inputs)
