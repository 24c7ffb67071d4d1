"""Tiles found by measuring, where PyTorch's own word for it is given: ``torch.backends.cudnn.benchmark``.

Nothing is tuned in deterministic mode (another tile adds in another order), under the interpreter, or while a CUDA
graph is captured (`start.Launch`). `triton.autotune` measures and keeps the answers in Triton's cache on disk.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton

from ... import settings
from . import channel_tiles, kernels, patch_tiles
from .channel_tiles import ChannelPatch
from .geometry import Geometry
from .patch_tiles import Patch
from .tiles import Tile, Use, candidates

__all__ = ["channel_tuner", "exact", "may_tune", "patch_tuner", "tuner"]

_PATCHES_TUNED_BY = ["batch", "channels", "depth", "height", "vectors", "src_depth", "src_height", "src_vectors"]
_CHANNELS_TUNED_BY = ["batch", "vectors", "depth", "height", "width", "src_depth", "src_height", "src_width"]
_TUNED_BY = ["batch", "channels", "depth", "height", "width", "src_depth", "src_height", "src_width"]


def may_tune() -> bool:
    """Whether PyTorch's flags allow to measure."""
    if not torch.backends.cudnn.benchmark or not isinstance(kernels.correlate, triton.runtime.JITFunction):
        return False
    return not settings.current().must_be_deterministic


@lru_cache(maxsize=512)
def tuner(kernel: Any, g: Geometry, use: Use, exact_rows: bool) -> Any:
    """A kernel that measures its tiles on first use of a size and keeps the fastest."""
    configs = [
        triton.Config(tile.constants(use), num_warps=tile.warps, num_stages=1)
        for tile in candidates(g, use)
        if not exact_rows or exact(g, tile)
    ]
    return triton.autotune(configs=configs, key=_TUNED_BY, cache_results=True)(kernel)


@lru_cache(maxsize=512)
def patch_tuner(kernel: Any, g: Geometry, use: Use, chosen: Patch, exact_rows: bool) -> Any:
    """The same for a kernel that computes patches."""
    amd = torch.version.hip is not None
    configs = [
        triton.Config(found.constants(), num_warps=patch_tiles.warps_of(found.lanes, amd), num_stages=1)
        for found in patch_tiles.candidates(g, use, chosen)
        if not exact_rows or chosen.sequence or g.axes[1].result % found.rows == 0
    ]
    return triton.autotune(configs=configs, key=_PATCHES_TUNED_BY, cache_results=True)(kernel)


@lru_cache(maxsize=512)
def channel_tuner(kernel: Any, g: Geometry, use: Use, chosen: ChannelPatch) -> Any:
    """The same for a kernel that computes patches of channels."""
    amd = torch.version.hip is not None
    configs = [
        triton.Config(channel_tiles.constants(g, use, found), num_warps=patch_tiles.warps_of(found.lanes, amd))
        for found in channel_tiles.candidates(g, use, chosen)
    ]
    return triton.autotune(configs=configs, key=_CHANNELS_TUNED_BY, cache_results=True)(kernel)


def exact(g: Geometry, tile: Tile) -> bool:
    """Whether every row of every row group exists."""
    height = g.axes[1]
    return height.result % (height.phases * tile.rows) == 0
