"""The rooms where tensors are contracted: one file a backend, one line a registration.

ATen comes first: among backends that expect the same speed, the earlier one is taken.
"""

from __future__ import annotations

from .aten import AtenBackend
from .base import Arithmetic, Backend, Layout
from .reference import ReferenceBackend

__all__ = ["Arithmetic", "Backend", "Layout", "built_in"]


def built_in() -> list[Backend]:
    """The backends that come with the library, in the order of their registration."""
    return [AtenBackend(), ReferenceBackend()]
