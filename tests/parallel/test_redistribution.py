"""Every change of placements against the whole tensor, its bytes against the table, and what a dead process leaves."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from convgrad.parallel import shard_
from convgrad.parallel.redistribution import redistribute
from convgrad.parallel.sharding import steps

from .counting import Received
from .processes import Processes
from .test_description import Square
from .test_operators import compare, distributed

EVERY: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate(), Partial())


def changes(mesh_shape: tuple[int, ...], shape: tuple[int, ...], counted: bool) -> int:
    """Values, gradients and bytes of every change between two lists of placements."""
    mesh, done = init_device_mesh("cpu", mesh_shape), 0
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape).to(torch.complex128)
    for have, want in itertools.product(itertools.product(EVERY, repeat=mesh.ndim), repeat=2):
        if any(p.is_partial() for p in want):
            continue
        x = distributed(whole, mesh, have)
        x.requires_grad_()
        with Received() as received:
            y = redistribute(x, want, "x")
        assert y.placements == want
        compare(y, whole, exact=True)
        (gradient,) = torch.autograd.grad(y, x, distributed(whole, mesh, want))
        compare(gradient, whole, exact=True)
        nested = any(len({p for p in side if p.is_shard()}) < sum(p.is_shard() for p in side) for side in (have, want))
        if counted and not nested:
            taken = steps(shape, whole.itemsize, mesh_shape, have, want)
            assert received.total == sum(step.bytes for step in taken), (have, want, received.bytes)
        done += 1
    return done


def test_every_change_on_one_dimension_of_shards_of_different_sizes(processes: Processes) -> None:
    assert processes(3, changes, (3,), (7, 2, 2), False) == [12] * 3


def test_every_change_on_two_dimensions_with_the_bytes_of_the_table(processes: Processes) -> None:
    assert processes(4, changes, (2, 2), (4, 8, 2), True) == [144] * 4


@pytest.mark.parametrize(
    ("have", "want", "least"),
    [  # of 64 numbers, 16 at first where two dimensions are sharded: what a process lacks of what it needs
        ((Shard(0), Shard(1)), (Replicate(), Replicate()), 48),
        ((Shard(0), Replicate()), (Shard(1), Replicate()), 16),
        ((Shard(0), Shard(1)), (Shard(2), Shard(1)), 8),
        ((Partial(), Partial()), (Replicate(), Replicate()), 2 * 48),
        ((Partial(), Replicate()), (Shard(0), Replicate()), 32),
        ((Partial(), Replicate()), (Shard(0), Shard(1)), 16),
        ((Shard(0), Partial()), (Replicate(), Shard(1)), 16 + 16),
    ],
)
def test_the_bytes_of_a_change_are_those_that_are_lacking(have, want, least) -> None:
    assert sum(step.bytes for step in steps((4, 4, 4), 1, (2, 2), have, want)) == least


# ---- a process that dies ---------------------------------------------------------------------------


def die() -> list[str]:
    """What each collective says after the second process was killed, which the others learn in the first of them."""
    warnings.simplefilter("ignore")
    mesh, said = init_device_mesh("cpu", (3,), mesh_dim_names=("depth",)), []
    x = distributed(torch.ones(6, 6), mesh, [Shard(0)])
    partial = DTensor.from_local(torch.ones(6, 6), mesh, [Partial()], run_check=False)
    layers = nn.Conv2d(1, 1, 1), Square(), nn.Conv2d(1, 1, 3, padding=1)
    model, total, wide = (shard_(m, mesh, Shard(2)) for m in layers)
    image = torch.ones(1, 1, 6, 6)
    loss = total(model(image))
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for call in (
        lambda: redistribute(x, [Replicate()], "x"),
        lambda: redistribute(x, [Shard(1)], "x"),
        lambda: redistribute(partial, [Shard(0)], "x"),
        lambda: redistribute(partial, [Replicate()], "x"),
        loss.backward,
        lambda: total(model(image)),
        lambda: wide(image),
    ):
        try:
            call()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("nothing")
    return said


def test_a_killed_process_ends_every_collective_of_the_others_with_its_name(processes: Processes) -> None:
    start = time.monotonic()
    said, failures = processes.outcomes(3, die, seconds=50)
    assert list(failures) == [1]
    assert "terminated abruptly" in failures[1]
    names = [f"{name} of x" for name in ("all-gather", "all-to-all", "reduce-scatter", "all-reduce")]
    names += ["all-reduce of gradient of (weight|bias)"]
    for rank in (0, 2):
        *first, of_sum, of_halo = said[rank]
        for text, name in zip(first, names, strict=True):
            expected = (
                rf"CollectiveError: {name} over mesh dimension depth \(3 processes\) failed, as another process died"
            )
            assert re.match(expected, text), (rank, text)
        assert of_sum.startswith("CollectiveError: sum over 3 processes failed")
        assert of_halo.startswith(
            "CollectiveError: halo exchange along dimension 2 among 3 processes failed, as another"
        )
    assert time.monotonic() - start < 50  # the process group waits 60 s at most
