"""Models by name: a function of the user's own (``module:factory``), or a definition of transformers."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .app import fail

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Names of transformers' configurations by the name that people use, and the size of an example input.
KNOWN: dict[str, tuple[str, tuple[int, ...]]] = {
    "convnext": ("ConvNextConfig", (3, 224, 224)),
    "convnextv2": ("ConvNextV2Config", (3, 224, 224)),
    "mobilenet_v1": ("MobileNetV1Config", (3, 224, 224)),
    "mobilenet_v2": ("MobileNetV2Config", (3, 224, 224)),
    "efficientnet": ("EfficientNetConfig", (3, 224, 224)),
    "resnet": ("ResNetConfig", (3, 224, 224)),
    "regnet": ("RegNetConfig", (3, 224, 224)),
    "segformer": ("SegformerConfig", (3, 224, 224)),
    "focalnet": ("FocalNetConfig", (3, 224, 224)),
    "wav2vec2": ("Wav2Vec2Config", (16000,)),
}

_FACTORY = "module:factory, where factory() returns an nn.Module, or (nn.Module, example_inputs)"


def build(name: str) -> nn.Module:
    """The model, on the meta device: without memory and without a download.

    Raises:
        an error for the user: no such model, or its package is not installed.
    """
    return build_with_inputs(name, "meta")[0]


def build_with_inputs(name: str, device: torch.device | str) -> tuple[nn.Module, Any]:
    """The model on a device, and what its function gives to call it with; None where that gives the model alone.

    Raises:
        an error for the user: no such model, or its package is not installed.
    """
    import torch
    from torch import nn

    factory = _factory(name)
    try:
        with torch.device(device):
            made: Any = factory()
    except Exception as error:
        raise fail(f"{name!r} raised {type(error).__name__}: {error}", _FACTORY) from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise fail(f"{name!r} gave a {type(model).__name__}", _FACTORY)
    return model, inputs


def _factory(name: str) -> Callable[[], Any]:
    if ":" in name:
        return _own(name)
    key = _known(name)
    if key is None:
        raise fail(f"{name!r} is neither a problem nor a model", f"models: {', '.join(KNOWN)}, or module:factory")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise fail(f"the model {name!r} is a definition of transformers", "pip install 'convgrad[models]'") from None
    config = getattr(transformers, KNOWN[key][0])
    return lambda: transformers.AutoModel.from_config(config())


def _known(name: str) -> str | None:
    """The entry of `KNOWN` that is meant, whatever its spelling: ``MobileNet-V2``, ``mobilenet_v2``."""
    letters = re.sub(r"[-_\s]", "", name.lower())
    return next((k for k in KNOWN if k.replace("_", "") == letters), None)


def _own(name: str) -> Callable[[], Any]:
    from torch import nn

    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise fail(f"cannot get {name!r}: {error}", _FACTORY) from None
    finally:
        sys.path.remove(os.getcwd())
    if isinstance(found, nn.Module):
        return lambda: found
    if not callable(found):
        raise fail(f"{name!r} is a {type(found).__name__}", _FACTORY)
    return found


def example_input(name: str, shape: str, dtype: torch.dtype, channels_last: bool) -> torch.Tensor:
    """An input on the meta device: the shape given as ``1x3x224x224``, or the model's usual one with batch 1."""
    import torch

    from .._compat import channels_last_of

    known = _known(name)
    sizes = (1, *(KNOWN[known][1] if known else (3, 224, 224)))
    if shape:
        sizes = tuple(int(n) for n in shape.split("x"))
    x = torch.empty(sizes, dtype=dtype, device="meta")
    return x.to(memory_format=channels_last_of(len(sizes) - 2)) if channels_last else x
