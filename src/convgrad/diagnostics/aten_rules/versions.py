"""Versions of PyTorch and of cuDNN: which are modelled, and how they are written."""

from __future__ import annotations

import torch

__all__ = ["MODELLED_VERSIONS", "cudnn_text_of", "torch_minor"]

#: The releases of PyTorch whose rules were read and are modelled.
MODELLED_VERSIONS: tuple[str, ...] = ("2.11", "2.12", "2.13", "2.14", "2.15")


def torch_minor(version: str = "") -> str:
    """``"2.13"`` of ``"2.13.0+cpu"``."""
    return ".".join((version or torch.__version__).split(".")[:2])


def cudnn_text_of(number: int) -> str:
    """91000 -> 9.10.0, 8907 -> 8.9.7."""
    step = 10000 if number >= 90000 else 1000
    return f"{number // step}.{number % step // 100}.{number % 100}"
