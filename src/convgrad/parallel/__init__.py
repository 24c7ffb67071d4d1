"""Beyond one device: halo exchange, and the sharding rules of the operators under DTensor."""

from __future__ import annotations

from . import rules
from .halo import halo_exchange

__all__ = ["halo_exchange"]

rules.register()
