"""`halo_exchange` against padding and slicing of the whole tensor in one process."""

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import pad

from convgrad.errors import ShapeError
from convgrad.parallel import halo_exchange

from .counting import Received
from .processes import on


def extended(whole: Tensor, dim: int, sizes: list[int], rank: int, before: int, after: int, padding: str) -> Tensor:
    """One shard's extended range, cut out of the whole tensor."""
    start = sum(sizes[:rank])
    positions = range(start - before, start + sizes[rank] + after)
    if padding == "circular":
        return whole.index_select(dim, torch.tensor([p % whole.shape[dim] for p in positions], dtype=torch.long))
    low, high = max(before, 0), max(after, 0)
    padded = pad(whole, (0, 0) * (whole.dim() - 1 - dim) + (low, high))
    return padded.narrow(dim, start + low - before, len(positions))


def sizes_for(count: int) -> list[list[int]]:
    return [[3] * count, [5, 1, 2, 4, 3, 1, 2, 2][:count], [4] * (count - 1) + [0]]


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def every_order(count: int) -> None:
    """For even, uneven and empty shards, and for extensions that reach over several of them."""
    warnings.filterwarnings("ignore", ".*torch.jit.script")  # PyTorch itself scripts when forward mode is first used
    every = itertools.product(sizes_for(count), ("zeros", "circular"), ((1, 1), (0, 2), (6, 5)))
    for i, (sizes, padding, (before, after)) in enumerate(every):
        one_case(sizes, padding, before, after, dim=1 + i % 2)


def one_case(sizes: list[int], padding: Any, before: int, after: int, dim: int) -> None:
    """The value, two orders of derivatives, forward mode and vmap."""
    rank, group = dist.get_rank(), world()
    shape = [2, 3, 2]
    shape[dim] = sum(sizes)
    torch.manual_seed(1)
    whole = torch.randint(-4, 5, shape).double().requires_grad_()
    factors = [torch.randint(-4, 5, (1,)).double() for _ in sizes]
    tangent = torch.randint(-4, 5, shape).double()
    x = whole.detach().split(sizes, dim)[rank].clone().requires_grad_()

    def here(t: Tensor, dim: int = dim) -> Tensor:
        return halo_exchange(t, dim, before, after, group, padding=padding, sizes=sizes)

    outputs = [extended(whole, dim, sizes, r, before, after, padding) for r in range(len(sizes))]
    y = here(x)
    assert torch.equal(y, outputs[rank])

    whole_loss = sum((f * o.pow(3).sum() for f, o in zip(factors, outputs, strict=True)), torch.zeros(()).double())
    (whole_grad,) = torch.autograd.grad(whole_loss, whole, create_graph=True)
    (grad,) = torch.autograd.grad(factors[rank] * y.pow(3).sum(), x, create_graph=True)
    assert torch.equal(grad, whole_grad.split(sizes, dim)[rank])
    (whole_second,) = torch.autograd.grad(whole_grad.pow(2).sum(), whole)
    (second,) = torch.autograd.grad(grad.pow(2).sum(), x)
    assert torch.equal(second, whole_second.split(sizes, dim)[rank])

    moved = tangent.split(sizes, dim)[rank].contiguous()
    _, jvp = torch.func.jvp(here, (x.detach(),), (moved,))
    assert torch.equal(jvp, extended(tangent, dim, sizes, rank, before, after, padding))
    assert torch.equal(torch.func.vmap(lambda t: here(t, dim - 1))(x.detach()), y)


@pytest.mark.parametrize("count", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 8))])
def test_the_extended_shard_and_its_derivatives_are_those_of_the_whole_tensor(processes, count):
    processes(count, every_order, count)


@on(4)
def test_two_dimensions_at_once_with_their_corners() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    rows, columns = [3, 2], [4, 1]
    i, j = mesh.get_local_rank(0), mesh.get_local_rank(1)
    whole = torch.arange(50.0).view(2, 5, 5).requires_grad_()
    x = whole.detach().split(rows, 1)[i].split(columns, 2)[j].clone().requires_grad_()
    padded = pad(whole, (1, 2, 2, 1))
    expected = padded[:, 3 * i : 3 * i + rows[i] + 3, 4 * j : 4 * j + columns[j] + 3]
    with Received() as received:
        y = halo_exchange(x, (1, 2), (2, 1), (1, 2), mesh, sizes=(rows, columns))
    assert torch.equal(y, expected)
    lacks = 4 * (5, 2)[j] - rows[i] * columns[j]  # positions inside the whole, corners among them
    assert received.total == 2 * 4 * lacks, (received.bytes, lacks)
    scale = torch.arange(1.0, 5).view(2, 2)
    (scale[i, j] * y.pow(2).sum()).backward()
    terms = [
        scale[a, b] * padded[:, 3 * a : 3 * a + rows[a] + 3, 4 * b : 4 * b + columns[b] + 3].pow(2).sum()
        for a, b in itertools.product((0, 1), (0, 1))
    ]
    (whole_grad,) = torch.autograd.grad(sum(terms), whole)
    assert torch.equal(x.grad, whole_grad.split(rows, 1)[i].split(columns, 2)[j])
    groups = (mesh.get_group(0), mesh.get_group(1))
    by_groups = halo_exchange(x, (-2, -1), (2, 1), (1, 2), groups, sizes=(rows, columns))
    assert torch.equal(by_groups, expected)


@on(3)
def test_any_dtype_travels_and_the_layout_stays() -> None:
    rank, group = dist.get_rank(), world()
    for dtype in (torch.bfloat16, torch.float16, torch.complex128, torch.int8, torch.int64, torch.bool):
        whole = torch.randint(0, 2, (2, 9)).to(dtype)
        y = halo_exchange(whole.split(3, 1)[rank], 1, 1, 1, group)
        assert y.dtype == dtype
        assert torch.equal(y, extended(whole, 1, [3] * 3, rank, 1, 1, "zeros"))
    z = (torch.arange(6.0) + 1j * torch.arange(6.0)).split(2)[rank].requires_grad_()
    y = halo_exchange(z.conj(), 0, 1, 1, group)
    (y * y).sum().real.backward()
    copies = torch.tensor([1, 2, 2, 2, 2, 1]).split(2)[rank]
    assert torch.equal(z.grad, copies * 2 * z.detach().conj())
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    y = halo_exchange(x, 2, 1, 1, group)
    assert y.is_contiguous(memory_format=torch.channels_last)
    (grad,) = torch.autograd.grad(y.sum(), x, torch.ones(()))
    assert grad.shape == x.shape


def bytes_of(sizes: list[int], before: int, after: int) -> tuple[int, int]:
    x = torch.randn(2, sizes[dist.get_rank()], 3)
    with Received() as received:
        y = halo_exchange(x.requires_grad_(), 1, before, after, world(), sizes=sizes)
        forward = received.total
        y.sum().backward()
    return forward, received.total - forward


@pytest.mark.parametrize(("before", "after"), [(1, 1), (5, 0), (-1, -1)])
def test_the_bytes_are_those_of_the_positions_that_lack(processes, before, after):
    sizes = [4, 3, 2]
    found = processes(3, bytes_of, sizes, before, after)
    positions = {(1, 1): 4, (5, 0): 4 + 5, (-1, -1): 0}[before, after]
    assert [sum(f) for f in zip(*found, strict=True)] == [positions * 2 * 3 * 4] * 2


@pytest.mark.slow
@on(2)
def test_it_compiles_into_one_graph() -> None:
    warnings.filterwarnings("ignore", ".*should not be instantiated")  # PyTorch's own, where Dynamo meets a Function
    rank, group = dist.get_rank(), world()
    x = torch.randn(2, 3 + rank, requires_grad=True)

    def f(t: Tensor) -> Tensor:
        return halo_exchange(t.sin(), 1, 2, 1, group, padding="circular", sizes=[3, 4]).pow(2)

    plain, graph = f(x), torch.compile(f, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(graph, plain)
    torch.testing.assert_close(
        torch.autograd.grad(graph.sum(), x)[0], torch.autograd.grad(plain.sum(), x)[0], rtol=0, atol=1e-6
    )


@on(2)
def test_bad_arguments_are_refused_before_anything_is_sent() -> None:
    group, mesh = world(), init_device_mesh("cpu", (2,))
    x = torch.zeros(2, 3)
    for arguments, options, message in [
        ((2, 1, 1, group), {}, "dim should be from -2 to 1, but got 2"),
        (((0, 0), 1, 1, (group, group)), {}, "each dimension can be extended once"),
        ((0, 1, 1, group), {"padding": "reflect"}, "padding should be 'zeros' or 'circular', but got 'reflect'"),
        ((1, 1, 1, group), {"sizes": [3, 3, 3]}, "sizes of dimension 1 should name 2 shards"),
        (((0, 1), 1, 1, mesh), {}, "expected a mesh with 2 dimensions, one for each of dim, but it has 1"),
        (((0, 1), 1, 1, (group,)), {}, "expected 2 groups, one for each of dim, but got 1"),
        (((0, 1), (1,), 1, (group, group)), {}, "expected before to be a tuple of 2 entries"),
        ((1, -2, -2, group), {}, "shard 0 of 3 positions cannot be extended by -2 and -2"),
    ]:
        with pytest.raises(ShapeError, match=message):
            halo_exchange(x, *arguments, **options)


def test_a_group_that_is_not_there_yet_is_named() -> None:
    """As dist.group.WORLD is before init_process_group."""
    with pytest.raises(TypeError, match="expected a process group or a DeviceMesh, but got None"):
        halo_exchange(torch.ones(3), 0, 1, 1, dist.group.WORLD)  # pyright: ignore[reportArgumentType]
