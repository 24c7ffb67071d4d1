"""What a whole U-Net sends in one step, counted at the collectives, against a formula for each of its layers.

The formulas are written for this net on a mesh of 2 x 2, where every process has one neighbor along each dimension.
Each is the least that this sharding can do with: positions that a process needs and does not own, and for a sum over P
processes 2(P - 1)/P of it, which no all-reduce can do without (Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009, section 3).
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from convgrad.parallel import shard_

from .counting import Received
from .processes import Processes
from .test_shard import UNet

N, C, SIZE, WIDTH = 2, 4, 16, 8


def step() -> tuple[dict[str, int], dict[str, int]]:
    mesh, plan = init_device_mesh("cpu", (2, 2)), [Shard(2), Shard(3)]
    model, criterion = shard_(UNet(C), mesh, plan), shard_(nn.MSELoss(), mesh, plan)
    x, goal = torch.randn(N, 1, SIZE, SIZE, WIDTH), torch.randn(N, 2, SIZE, SIZE, WIDTH)
    with Received() as forward:
        loss = criterion(model(x), goal)
    with Received() as backward:
        loss.backward()
    return forward.bytes, backward.bytes


def halo(channels: int, d: int, h: int, w: int) -> int:
    """Numbers that all four receive, each one row of its neighbor along the depth, then one along the height."""
    return 4 * N * channels * w * (h + d + 1)


def strided(channels: int, d: int, h: int, w: int) -> int:
    """A kernel of 3 with stride 2: only the first output of the second shard couples with an input of the first."""
    return N * channels * w * ((d + 1) + d + 2 * h)


def summed(numbers: int) -> int:
    """Of an all-reduce: 2 * 3/4 of it for each of four processes."""
    return 6 * numbers


def test_a_unet_sends_what_its_layers_need_and_no_more(processes: Processes) -> None:
    one, two, three = ((SIZE // 2**i, SIZE // 2**i, WIDTH // 2 ** (i - 1)) for i in (1, 2, 3))  # a shard's d, h, w
    d, h, w = one
    stem = 4 * N * w * 2 * (h + d + 2)  # circular: a row at both ends, each the neighbor's here
    halos = [
        halo(C, *one),  # depthwise
        strided(2 * C, *two),  # down: the smaller side, its output, moves
        halo(2 * C, *two),  # depthwise
        halo(2 * C, *three),  # bottom
        halo(2 * C, *three),  # trilinear
    ]
    statistics = [summed(n) for n in (C, C, N * 2, N * 2)]  # two each of BatchNorm and of GroupNorm with two groups
    weights = [p.numel() for p in UNet(C).parameters()]
    expected = {
        "forward": {"all_to_all_single": stem + sum(halos), "all_reduce": sum(statistics) + summed(1)},  # the loss
        "backward": {
            # The stem keeps its input with the halo; the gradient of that input is not needed.
            "all_to_all_single": sum(halos),
            "all_reduce": sum(statistics) + summed(sum(weights)),
        },
    }
    found = processes(4, step)
    for at, name in enumerate(expected):
        total = sum((Counter(one[at]) for one in found), Counter())
        assert total == {key: 4 * n for key, n in expected[name].items()}, name
