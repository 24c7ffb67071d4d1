"""The rooms where tensors are contracted: one file a backend, one line a registration.

ATen comes first: among backends that expect the same speed, the earlier one is taken.
"""

from __future__ import annotations

from .aten import AtenBackend
from .aten_libraries import AtenCudnnBackend, AtenMiopenBackend, AtenMkldnnBackend, AtenNativeBackend
from .base import Arithmetic, Backend, Layout
from .im2col import Im2colBackend
from .native import NativeBackend
from .reference import ReferenceBackend
from .triton import TritonBackend
from .triton.banded_backend import TritonBandedBackend

__all__ = ["Arithmetic", "Backend", "Layout", "built_in"]


def built_in() -> list[Backend]:
    """The backends that come with the library, in the order of their registration."""
    gpu = [TritonBackend(), TritonBandedBackend()]
    return [AtenBackend(), NativeBackend(), *gpu, Im2colBackend(), ReferenceBackend(), *_aten_by_name()]


def _aten_by_name() -> list[Backend]:
    """ATen's own backends, used only where they are asked for."""
    return [AtenCudnnBackend(), AtenMiopenBackend(), AtenMkldnnBackend(), AtenNativeBackend()]
