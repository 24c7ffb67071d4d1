"""The operators on DTensors against PyTorch's convolution of the whole tensors in one process."""

from __future__ import annotations

import itertools
import subprocess
import sys
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

import convgrad
from convgrad.errors import DtypeError, ShapeError
from convgrad.parallel import shard_
from convgrad.parallel.geometry import Line

from .counting import Received
from .processes import on

ops = torch.ops.convgrad


class Form(NamedTuple):
    """A convolution: sizes as a whole; padding as (low, high) of each dimension in turn."""

    input: tuple[int, ...]
    weight: tuple[int, ...]
    stride: int = 1
    padding: tuple[int, ...] | None = None
    dilation: int = 1
    groups: int = 1
    transposed: bool = False
    output_padding: int = 0

    @property
    def arguments(self) -> tuple[Any, ...]:
        d = len(self.weight) - 2
        padding = [*(self.padding or (0,) * 2 * d)]
        out = [self.output_padding] * d
        return ([self.stride] * d, padding, [self.dilation] * d, self.transposed, out, self.groups)


def convolution(form: Form, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """By PyTorch alone: a pad in front of a convolution without padding, or a crop after a transposed one."""
    d = len(form.weight) - 2
    pairs = list(zip(form.arguments[1][::2], form.arguments[1][1::2], strict=True))
    more = form.output_padding if form.transposed else 0
    sign = -1 if form.transposed else 1
    sides = [n for low, high in reversed(pairs) for n in (sign * low, sign * high + more)]
    bias = 0 if b is None else b.view(-1, *(1,) * d)
    if form.transposed:
        f = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[d - 1]
        whole = f(x, w, None, form.stride, 0, 0, form.groups, form.dilation)
        return F.pad(whole, sides) + bias
    f = (F.conv1d, F.conv2d, F.conv3d)[d - 1]
    return f(F.pad(x, sides), w, None, form.stride, 0, form.dilation, form.groups) + bias


FORMS = {
    "1-D, wider than a shard": Form((2, 2, 7), (3, 2, 6), padding=(2, 3)),
    "1-D, one image": Form((1, 2, 8), (3, 2, 6), padding=(2, 4)),
    "1-D, gaps": Form((1, 2, 11), (2, 2, 3), stride=3, dilation=2, padding=(4, 0)),
    "1-D, kernel narrower than the stride": Form((2, 2, 11), (2, 2, 2), stride=3, padding=(1, -1)),
    "1-D, cropped evenly": Form((2, 2, 9), (3, 2, 3), padding=(-1, -1)),
    "2-D": Form((2, 3, 7, 5), (4, 3, 3, 3), padding=(1, 1, 1, 1)),
    "2-D, strided, asymmetric": Form((3, 4, 9, 8), (6, 2, 3, 2), stride=2, padding=(0, 2, 1, 0), groups=2),
    "2-D, depthwise, dilated": Form((2, 6, 8, 8), (6, 1, 3, 3), padding=(2, 2, 3, 1), dilation=2, groups=6),
    "2-D, pointwise": Form((2, 4, 6, 5), (3, 4, 1, 1)),
    "2-D, patches": Form((2, 3, 8, 12), (4, 3, 2, 2), stride=2),
    "3-D": Form((1, 2, 5, 6, 4), (2, 2, 3, 2, 3), padding=(1, 1, 0, 1, 2, 0)),
    "1-D, transposed, wide": Form((2, 2, 6), (2, 3, 5), stride=2, padding=(1, 2), transposed=True),
    "2-D, transposed": Form(
        (2, 4, 4, 5), (4, 3, 3, 3), stride=2, padding=(1, 1, 1, 1), transposed=True, output_padding=1
    ),
    "2-D, transposed, groups, dilated": Form(
        (2, 4, 5, 4), (4, 2, 2, 3), dilation=2, padding=(0, 1, 2, 0), groups=2, transposed=True
    ),
    "3-D, transposed, narrow": Form((1, 2, 3, 2, 3), (2, 2, 2, 1, 2), stride=3, transposed=True, output_padding=2),
}


def placements_of(form: Form, mesh: tuple[int, ...]) -> list[tuple[Any, Any]]:
    """Of input and weight: every pair that one dimension of the mesh knows, rotated through the others."""
    d = len(form.weight) - 2
    one = [(Shard(0), Replicate()), *((Shard(2 + j), Replicate()) for j in range(d))]
    if form.groups == 1:
        ci, co = (0, 1) if form.transposed else (1, 0)
        one += [(Replicate(), Shard(co)), (Shard(1), Shard(ci))]
    else:
        one += [(Shard(1), Shard(0))]
    if len(mesh) == 1:
        return [*(((x,), (w,)) for x, w in one), ((Replicate(),), (Replicate(),)), ((Partial(),), (Replicate(),))]
    combined = list(itertools.product(one, repeat=len(mesh)))
    step = max(1, len(combined) // 6)
    chosen = combined[:: step + (step % 2 == 0)]
    return [(tuple(x for x, _ in c), tuple(w for _, w in c)) for c in chosen]


def values(shape: tuple[int, ...], exact: bool) -> Tensor:
    return torch.randint(-3, 4, shape).double() if exact else torch.randn(shape).double()


def compare(sharded: Tensor, whole: Tensor, exact: bool) -> None:
    assert isinstance(sharded, DTensor)
    assert sharded.shape == whole.shape
    if any(p.is_partial() for p in sharded.placements):
        got = sharded.full_tensor()
    else:
        got, whole = sharded.to_local(), distributed(whole, sharded.device_mesh, sharded.placements).to_local()
    if exact:
        assert torch.equal(got, whole)
    else:
        torch.testing.assert_close(
            got, whole, rtol=1e-12, atol=1e-12 * float(whole.abs().max()) if whole.numel() else 0
        )


def distributed(t: Tensor, mesh: DeviceMesh, placements: Any) -> DTensor:
    """A DTensor of the whole; of a sum, process 0 of that dimension brings all."""
    whole = [Replicate() if p.is_partial() else p for p in placements]
    local = distribute_tensor(t.detach(), mesh, whole, src_data_rank=None).to_local()
    if any(p.is_partial() and mesh.get_local_rank(i) for i, p in enumerate(placements)):
        local = local * 0
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=t.shape, stride=t.stride())


def one_form(name: str, mesh_shape: tuple[int, ...], exact: bool, second: bool) -> None:
    """The output, every gradient, and every second derivative, in every placement."""
    form, mesh = FORMS[name], init_device_mesh("cpu", mesh_shape)
    warnings.simplefilter("ignore")  # what is gathered is said, and tested below
    torch.manual_seed(0)
    channels = form.weight[1] * form.groups if form.transposed else form.weight[0]
    whole = [values(shape, exact).requires_grad_() for shape in (form.input, form.weight, (channels,))]
    y = convolution(form, *whole)
    factor = values(tuple(y.shape), exact)
    gradients = torch.autograd.grad(y, whole, y.detach() * factor, create_graph=False)
    for px, pw in placements_of(form, mesh_shape):
        sharded = [
            distributed(t.detach(), mesh, p).requires_grad_()
            for t, p in zip(whole, (px, pw, [Replicate()] * mesh.ndim), strict=True)
        ]
        ys = ops.convolution(*sharded, *form.arguments)
        compare(ys, y, exact)
        cotangent = distributed(
            y.detach() * factor, mesh, [Replicate() if p.is_partial() else p for p in ys.placements]
        )
        found = torch.autograd.grad(ys, sharded, cotangent)
        for got, expected in zip(found, gradients, strict=True):
            compare(got, expected, exact)
        if second:
            second_order(form, sharded, exact)


def second_order(form: Form, sharded: list[DTensor], exact: bool) -> None:
    """Derivatives of each gradient by all that it depends on.

    Each apart, in the direction of a factor: where derivatives are added, DTensor divides by the number of processes,
    and on a mesh of three dimensions its addition takes ten times as long as all convolutions.
    """

    def at_random(like: Tensor) -> Tensor:
        t = values(tuple(like.shape), exact)
        if not isinstance(like, DTensor):
            return t
        return distributed(t, like.device_mesh, [Replicate() if p.is_partial() else p for p in like.placements])

    derivatives = []
    whole = [t.detach().full_tensor().requires_grad_() for t in sharded]
    for tensors, y in ((sharded, ops.convolution(*sharded, *form.arguments)), (whole, convolution(form, *whole))):
        torch.manual_seed(1)
        x, w, _ = tensors
        cotangent = at_random(y).requires_grad_()
        first = torch.autograd.grad(y, tensors, cotangent, create_graph=True)
        pairs = zip(first, ((w, cotangent), (x, cotangent), (cotangent,)), strict=True)
        derivatives.append([d for g, given in pairs for d in torch.autograd.grad(g, given, at_random(g), True)])
    for got, expected in zip(*derivatives, strict=True):
        compare(got, expected, exact)


def forms(names: list[str], mesh: tuple[int, ...], exact: bool, second: bool) -> None:
    for name in names:
        try:
            one_form(name, mesh, exact, second)
        except Exception as error:
            raise AssertionError(f"{name} on a mesh of {mesh}") from error


def test_every_form_in_every_placement(processes):
    processes(3, forms, list(FORMS), (3,), True, False, seconds=120)


def test_products_of_placements_on_a_mesh_of_two_dimensions(processes):
    processes(4, forms, list(FORMS)[1::3], (2, 2), True, False, seconds=120)


def test_second_derivatives(processes):
    processes(3, forms, ["1-D, wider than a shard", "2-D, transposed"], (3,), True, True)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "mesh"), [(2, (2,)), (4, (4,)), (4, (2, 2)), (8, (8,)), (8, (2, 2, 2)), (8, (4, 2))])
@pytest.mark.parametrize("exact", [True, False])
def test_every_form_on_every_mesh(processes, count, mesh, exact):
    processes(count, forms, list(FORMS), mesh, exact, exact, seconds=300)


# ---- bytes ---------------------------------------------------------------------------------------


def halo_bytes(form: Form, dim: int) -> dict[str, int]:
    """What each operator receives, with input, output and their gradients sharded along one dimension."""
    mesh, everywhere = init_device_mesh("cpu", (dist.get_world_size(),)), [Replicate()]
    x, w = torch.randn(form.input), torch.randn(form.weight)
    y = convolution(form, x, w)
    xs, ys = (distributed(t, mesh, [Shard(dim)]) for t in (x, torch.randn(y.shape)))
    ws, args = distributed(w, mesh, everywhere), form.arguments
    found = {}
    for name, call in {
        "convolution": lambda: ops.convolution(xs, ws, None, *args),
        "grad_input": lambda: ops.grad_input(ys, ws, x.shape, *args),
        "grad_weight": lambda: ops.grad_weight(ys, xs, w.shape, *args),
        "convolution_backward": lambda: ops.convolution_backward(ys, xs, ws, None, *args, [True, True, False]),
    }.items():
        with Received() as received:
            call()
        assert received.bytes.keys() <= {"all_to_all_single"}
        found[name] = received.total
    return found


@pytest.mark.parametrize(
    ("name", "dim", "input_halo", "output_halo"),
    [
        # Positions over the two borders of three shards, counted by hand: [input, output].
        ("2-D", 2, 4, 4),  # rows of 3, 3, 1; a kernel of 3
        ("2-D, patches", 3, 0, 0),
        ("1-D, one image", 2, 3 + 4 + 2, 2 + 5 + 3),  # 3, 3, 2 and 3, 3, 3; a kernel of 6
        ("2-D, transposed", 2, None, None),
        ("2-D, strided, asymmetric", 2, None, None),
        ("3-D", 4, None, None),
    ],
)
def test_no_operator_receives_more_than_the_formula_says(processes, name, dim, input_halo, output_halo):
    form = FORMS[name]
    found = processes(3, halo_bytes, form, dim)
    x = torch.empty(form.input)
    y = convolution(form, x, torch.empty(form.weight))
    lengths = (x.shape[dim], y.shape[dim])
    j = dim - 2
    large, small = reversed(lengths) if form.transposed else lengths
    line = Line(large, small, form.weight[dim], form.stride, form.arguments[1][2 * j], form.dilation)
    moved = [line.exchange(side, 3).moved for side in ("input", "output")]
    of_input, of_output = reversed(moved) if form.transposed else moved
    assert input_halo in (None, of_input)
    assert output_halo in (None, of_output)
    a, b = (4 * n * t.numel() // t.shape[dim] for n, t in ((of_input, x), (of_output, y)))
    least = {"convolution": min(a, b), "grad_input": min(a, b), "grad_weight": min(a, b)}
    least["convolution_backward"] = min(2 * a, b)
    assert {key: sum(f[key] for f in found) for key in least} == least


# ---- the choice and what is said ------------------------------------------------------------------


@on(2)
def test_the_cheapest_placement_is_chosen() -> None:
    """Which placement comes out, for what comes in, on a mesh of 2."""
    mesh = init_device_mesh("cpu", (2,))
    large, small = (2, 4, 64, 64), (4, 4, 3, 3)
    warnings.simplefilter("ignore")
    for x, w, px, pw, expected in [
        (large, small, Shard(0), Replicate(), Shard(0)),
        (large, small, Shard(2), Replicate(), Shard(2)),
        (large, small, Replicate(), Replicate(), Replicate()),
        (large, small, Replicate(), Shard(0), Shard(1)),
        (large, small, Shard(1), Replicate(), Partial()),  # the weight is cut, which costs nothing
        (large, small, Shard(0), Shard(0), Shard(0)),  # the weight is gathered: it is the smaller one
        ((2, 4, 4, 4), (512, 4, 3, 3), Shard(0), Shard(0), Shard(1)),  # the input is
        (large, small, Partial(), Replicate(), Shard(0)),  # a reduce-scatter, not an all-reduce
        ((1, 4, 64, 64), small, Shard(2), Shard(0), Shard(2)),  # one image cannot be shared out
        # The halo is all there is, and sharding the batch would cost half of that; but the output must come back.
        ((2, 1, 8, 8), (4, 1, 15, 15), Shard(2), Replicate(), Shard(2)),
        ((2, 1, 8, 8), (4, 1, 15, 15), Shard(2), Shard(0), Shard(1)),  # a weight that is sharded may move
    ]:
        p = (x[-1] - w[-1] + 1 < 1) * 7 or 1
        xs, ws = distributed(torch.zeros(x), mesh, [px]), distributed(torch.zeros(w), mesh, [pw])
        y = convgrad.conv2d(xs, ws, padding=p)
        assert y.placements == (expected,), (x, w, px, pw, y.placements)


@on(2)
def test_what_is_gathered_is_said_once_with_its_bytes() -> None:
    mesh = init_device_mesh("cpu", (2,))
    xs = distributed(torch.zeros(2, 4, 16, 16), mesh, [Shard(0)])
    ws = distributed(torch.zeros(4, 4, 3, 3), mesh, [Shard(0)])
    with warnings.catch_warnings(record=True) as caught, Received() as received:
        warnings.simplefilter("default")
        for _ in range(3):
            convgrad.conv2d(xs, ws)
        convgrad.conv2d(xs, ws)
    size = 4 * 4 * 3 * 3 * 4 // 2
    assert received.total == 4 * size
    assert len(caught) == 2  # two places
    assert {w.filename for w in caught} == {__file__}
    message = str(caught[0].message)
    assert message.startswith(f"convgrad::convolution gathers weight: every process receives {size} bytes")
    assert "weight as [Replicate()] would need no gathering" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convgrad.conv2d(xs, distributed(ws.full_tensor(), mesh, [Replicate()]))


@on(2)
def test_operands_that_do_not_belong_together_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    x, w = torch.zeros(2, 4, 5, 5), torch.zeros(4, 4, 3, 3)
    with pytest.raises(DtypeError, match="got DTensors for input and a plain tensor for weight"):
        convgrad.conv2d(distributed(x, mesh, [Shard(0)]), w)
    with pytest.raises(ShapeError, match=r"expected input.* to have 4 channels, but got 3"):
        convgrad.conv2d(distributed(x[:, :3], mesh, [Shard(0)]), distributed(w, mesh, [Replicate()]))


@on(3)
def test_a_process_outside_of_the_mesh_has_nothing_to_do() -> None:
    mesh = DeviceMesh("cpu", [0, 1])  # of three processes
    x, w = torch.randn(2, 3, 6, 5), torch.randn(4, 3, 3, 3)
    xs = distribute_tensor(x, mesh, [Shard(2)], src_data_rank=None)
    ws = distribute_tensor(w, mesh, [Replicate()], src_data_rank=None)
    y, expected = convgrad.conv2d(xs, ws, padding=1), F.conv2d(x, w, padding=1)
    assert y.shape == expected.shape
    if dist.get_rank() < 2:
        torch.testing.assert_close(y.to_local(), expected.chunk(2, 2)[dist.get_rank()])
    else:
        assert y.to_local().numel() == 0


@on(4)
def test_a_dimension_sharded_twice() -> None:
    """One spatial dimension over both dimensions of the mesh: a halo goes along one of them, the other is given up."""
    mesh = init_device_mesh("cpu", (2, 2))
    x, w = values((2, 3, 9, 4), True), values((4, 3, 3, 3), True)
    warnings.simplefilter("ignore")
    xs, ws = distributed(x, mesh, [Shard(2), Shard(2)]), distributed(w, mesh, [Replicate()] * 2)
    y = convgrad.conv2d(xs, ws, padding=1)
    compare(y, F.conv2d(x, w, padding=1), exact=True)
    assert y.placements.count(Shard(2)) == 1
    assert not any(p.is_replicate() for p in y.placements)


# ---- other ways in ---------------------------------------------------------------------------------


@on(2)
def test_other_ways_in() -> None:
    """Integers, inference mode, autocast, channels_last, a module; each as in one process."""
    mesh = init_device_mesh("cpu", (2,))
    x, w = torch.randint(-9, 9, (2, 3, 6, 5)), torch.randint(-9, 9, (4, 3, 3, 3))
    xs, ws = distributed(x, mesh, [Shard(2)]), distributed(w, mesh, [Replicate()])
    y = F.conv2d(x, w, padding=1)
    compare(convgrad.conv2d(xs, ws, padding=1), y, exact=True)
    with torch.inference_mode():
        compare(convgrad.conv2d(xs, ws, padding=1), y, exact=True)

    x, w = x.float().to(memory_format=torch.channels_last), w.float()
    xs, ws = distributed(x, mesh, [Shard(2)]), distributed(w, mesh, [Replicate()])
    got = convgrad.conv2d(xs, ws, padding=1)
    assert got.to_local().is_contiguous(memory_format=torch.channels_last)
    assert got.stride() == F.conv2d(x, w, padding=1).stride()
    with torch.autocast("cpu", torch.bfloat16):
        assert convgrad.conv2d(xs, ws, padding=1).dtype == torch.bfloat16
        layers = [torch.nn.Conv2d(3, 3, 3, padding=1, padding_mode=mode) for mode in ("zeros", "circular")]
        assert shard_(torch.nn.Sequential(*layers), mesh, [Shard(2)])(x).dtype == torch.bfloat16

    layer = convgrad.nn.Conv2d(3, 4, 3, padding=1).double()
    expected = layer(x.double())
    for name, parameter in list(layer.named_parameters()):
        layer.register_parameter(name, torch.nn.Parameter(distributed(parameter.detach(), mesh, [Replicate()])))
    compare(layer(distributed(x.double(), mesh, [Shard(2)])), expected, exact=False)


@pytest.mark.slow
@on(2)
def test_forward_mode_is_refused_by_dtensor() -> None:
    """DTensor has no forward mode: not even its own functions; should it get one, this is where it shows."""
    mesh = init_device_mesh("cpu", (2,))
    x, w = (
        distributed(torch.ones(1, 1, 4, 4), mesh, [Shard(2)]),
        distributed(torch.ones(1, 1, 3, 3), mesh, [Replicate()]),
    )
    warnings.filterwarnings("ignore", ".*torch.jit.script")  # PyTorch itself scripts when forward mode is first used
    for f in (lambda t: t * 2, lambda t: convgrad.conv2d(t, w)):
        with pytest.raises(NotImplementedError, match="_has_same_storage_numel"):
            torch.func.jvp(f, (x,), (x,))


FRESH = """
import torch, torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
import {module}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
x, w = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 3, 3)
xs, ws = distribute_tensor(x, mesh, [Shard(2)]), distribute_tensor(w, mesh, [Replicate()])
with torch.{mode}():
    y = {call}
assert y.placements == (Shard(2),)
torch.testing.assert_close(y.to_local(), torch.nn.functional.conv2d(x, w))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "mode", "call"),
    [
        ("convgrad", "inference_mode", "convgrad.conv2d(xs, ws)"),
        ("convgrad", "no_grad", "OPERATOR"),
        ("convgrad.parallel", "inference_mode", "OPERATOR"),  # in it PyTorch asks nobody who could load the rules
    ],
)
def test_the_first_call_of_a_process_finds_the_rules(module, mode, call):
    operator = "torch.ops.convgrad.convolution(xs, ws, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)"
    code = FRESH.format(module=module, mode=mode, call=call.replace("OPERATOR", operator))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@on(2, seconds=200)
def test_a_sharded_convolution_compiles_into_one_graph() -> None:
    warnings.filterwarnings("ignore", ".*should not be instantiated")
    mesh = init_device_mesh("cpu", (2,))
    x, w = torch.randn(2, 3, 6, 5).double(), torch.randn(4, 3, 3, 3).double()
    xs = distributed(x, mesh, [Shard(2)]).requires_grad_()
    ws = distributed(w, mesh, [Replicate()]).requires_grad_()

    def f(a: Tensor, b: Tensor) -> Tensor:
        return convgrad.conv2d(a.sin(), b, padding=1).pow(2)

    plain, graph = f(xs, ws), torch.compile(f, fullgraph=True, backend="aot_eager")(xs, ws)
    compare(graph, plain.full_tensor(), exact=False)
    for got, expected in zip(*(torch.autograd.grad(y.sum(), (xs, ws)) for y in (graph, plain)), strict=True):
        compare(got, expected.full_tensor(), exact=False)
