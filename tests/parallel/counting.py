"""How many bytes the collectives of this process really receive from others."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode


class Received(TorchDispatchMode):
    """Counts collectives and, by their names, the bytes that they bring from other processes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}
        self.calls = 0

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented  # its local tensors come by later
        name = func._schema.name
        if name.startswith("_c10d_functional::") and isinstance(args[-1], str):  # the group's name
            name = name.removeprefix("_c10d_functional::")
            self.bytes[name] = self.bytes.get(name, 0) + _received(name, args)
            self.calls += 1
        return func(*args, **(kwargs or {}))


def _received(name: str, args: Any) -> int:
    data: Tensor = args[0]
    group = _resolve_process_group(args[-1])
    n, rank = group.size(), dist.get_rank(group)
    if name == "all_to_all_single":
        rows = sum(s for source, s in enumerate(args[1]) if source != rank)
        return rows * (data[:1].nbytes if len(data) else data.new_empty((1, *data.shape[1:])).nbytes)
    if name == "all_gather_into_tensor":
        return (n - 1) * data.nbytes
    if name == "reduce_scatter_tensor":
        return (n - 1) * data.nbytes // n
    if name == "all_reduce":
        return 2 * (n - 1) * data.nbytes // n
    raise AssertionError(f"an unknown collective {name}")
