"""A volume whose activations do not fit a limit of memory in one process, and do in four."""

from __future__ import annotations

import resource
import sys

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from convgrad.parallel import shard_

from .processes import Processes, RankError

CHANNELS, SIZE, LAYERS = 8, 80, 12  # 16 MB an activation, two kept of each layer: 390 MB


class Power(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def step(limit: int) -> float:
    """One training step with at most ``limit`` more bytes of memory than this process has now."""
    count = dist.get_world_size()
    mesh = init_device_mesh("cpu", (count,))
    layers = [nn.Conv3d(1, CHANNELS, 3, padding=1)]
    for _ in range(LAYERS):
        layers += [nn.GELU(), nn.Conv3d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)]
    model = shard_(nn.Sequential(*layers), mesh, Shard(2))
    torch.ones(1).add(1).sum()
    with open("/proc/self/statm") as file:
        data = int(file.read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (data + limit, resource.RLIM_INFINITY))
    try:
        local = torch.ones(1, 1, SIZE // count, SIZE, SIZE)
        x = DTensor.from_local(local, mesh, [Shard(2)], run_check=False)
        loss = shard_(Power(), mesh, Shard(2))(model(x))
        loss.backward()
        return loss.item()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mapped memory on Linux only")
def test_what_one_process_cannot_hold_four_can(processes: Processes) -> None:
    limit = 260_000_000
    with pytest.raises(RankError, match="can't allocate memory"):
        processes(1, step, limit, seconds=120)
    assert len(set(processes(4, step, limit, seconds=240))) == 1
