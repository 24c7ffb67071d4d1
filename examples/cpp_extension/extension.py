"""Builds the extension of this folder: for the CPU, and for CUDA too where nvcc and a GPU are."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

import convgrad

HERE = Path(__file__).parent


@cache
def load() -> ModuleType:
    """Compile (about a minute, once) and import it."""
    cuda = torch.cuda.is_available() and cpp_extension.CUDA_HOME is not None
    return cpp_extension.load(
        name="convgrad_example_cuda" if cuda else "convgrad_example",
        sources=[str(HERE / "depthwise.cpp"), *([str(HERE / "depthwise.cu")] if cuda else [])],
        extra_include_paths=[convgrad.include_path()],
        extra_cflags=["-O3", *(["-DWITH_CUDA"] if cuda else [])],
    )
