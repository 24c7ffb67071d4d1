"""Putting a kernel in place of PyTorch's own at one dispatch key, and taking it away again.

The one place that knows how: `torch.library` finds and registers kernels, ``Library._destroy`` undoes a registration.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

#: Kernels that were taken away. A thread without the interpreter lock may stand in front of one at that moment, and
#: PyTorch keeps a kernel alive only while it is registered; so the last ones are kept here.
_retired: deque[Any] = deque(maxlen=4096)


def original_kernel(op: str, key: str) -> Callable[..., Any]:
    """The kernel that PyTorch runs now for ``aten::op`` at a dispatch key, as a function of (keyset, *args)."""
    return torch.library.get_kernel(f"aten::{op}", key).call_boxed


class Override:
    """Kernels of ours in place of PyTorch's, from `put` until `undo`."""

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")

    def put(self, op: str, key: str, kernel: Callable[..., Any]) -> None:
        """Run ``kernel(keyset, *args)`` for ``aten::op`` at this dispatch key."""
        self._library.impl(op, kernel, key, with_keyset=True)
        _retired.append((torch.library.get_kernel(f"aten::{op}", key), kernel))

    def undo(self) -> None:
        """Give every operator back its own kernel."""
        self._library._destroy()
