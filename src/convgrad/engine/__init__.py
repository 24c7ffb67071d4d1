"""Choosing, running, checking and watching backends."""

from __future__ import annotations

from ..backends import built_in
from .cache import invalidate
from .plan import Plan, plan_for
from .registry import backends, register, unregister
from .request import active, resume, set_default_backend, use_backend

__all__ = [
    "Plan",
    "active",
    "backends",
    "invalidate",
    "plan_for",
    "register",
    "resume",
    "set_default_backend",
    "unregister",
    "use_backend",
]

for _backend in built_in():
    register(_backend)
