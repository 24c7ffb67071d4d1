"""Beyond one device: halo exchange, the sharding rules of the operators under DTensor, and whole networks."""

from __future__ import annotations

from . import operators
from .halo import halo_exchange
from .shard import shard_

__all__ = ["halo_exchange", "shard_"]

operators.register()
