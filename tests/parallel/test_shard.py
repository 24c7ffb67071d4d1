"""`shard_`: whole networks against one process, what is refused, and what it works together with."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, init_device_mesh
from torch.utils.checkpoint import checkpoint

import convgrad
from convgrad import accelerate_
from convgrad.errors import ShapeError, UnsupportedError
from convgrad.parallel import shard_

from .processes import Processes, RankError, on


class Block(nn.Module):
    """Depthwise and pointwise, with a residual connection."""

    def __init__(self, c: int, norm: type[nn.Module] = nn.BatchNorm3d) -> None:
        super().__init__()
        self.depthwise = nn.Conv3d(c, c, 3, padding=1, groups=c, bias=False)
        self.norm = norm(c) if norm is nn.BatchNorm3d else norm(2, c)
        self.pointwise = nn.Conv3d(c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.pointwise(self.norm(self.depthwise(x))))


class UNet(nn.Module):
    """Two levels: strided and transposed convolutions, pooling, interpolation, concatenation."""

    def __init__(self, c: int = 4, norms: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv3d(1, c, 3, padding=1, padding_mode="circular")
        self.first = Block(c) if norms else nn.Conv3d(c, c, 3, padding=1)
        self.down = nn.Conv3d(c, 2 * c, 3, stride=2, padding=1)
        self.second = Block(2 * c, nn.GroupNorm) if norms else nn.Conv3d(2 * c, 2 * c, 3, padding=2, dilation=2)
        self.pool = nn.MaxPool3d(2)
        self.bottom = nn.Conv3d(2 * c, 2 * c, 3, padding=1)
        self.nearest = nn.Upsample(scale_factor=2, mode="trilinear" if norms else "nearest")
        self.up = nn.ConvTranspose3d(4 * c, c, 2, stride=2)
        self.head = nn.Conv3d(2 * c, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.first(self.stem(x))
        two = self.second(self.down(one))
        three = self.nearest(self.bottom(self.pool(two)))
        return self.head(torch.cat([one, self.up(torch.cat([two, three], 1))], 1))


def train(dims: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...], whole: bool) -> list[float]:
    """Some steps in one process and sharded: the largest relative difference of output, gradients, and parameters."""
    mesh, plan = init_device_mesh("cpu", sizes), [Shard(d) for d in dims]
    expected = (UNet() if not whole else UNet(norms=False)).double()
    if whole:
        with torch.no_grad():
            for p in expected.parameters():
                p.copy_(torch.randint(-2, 3, p.shape))
    sharded = shard_(copy.deepcopy(expected), mesh, plan)
    loss = shard_(nn.MSELoss(), mesh, plan)
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=1 / 1024 if whole else 0.05, momentum=0.9) for m in (expected, sharded)
    ]
    found: list[float] = []
    steps = 1 if whole else 5
    for step in range(steps):
        x, goal = torch.randn(shape, dtype=torch.float64), torch.randn(shape[0], 2, *shape[2:], dtype=torch.float64)
        if whole:
            x, goal = x.mul(2).round(), goal.round()
        y, z = expected(x), sharded(x)
        assert z.placements == tuple(plan)
        if whole:  # a sum, so that no number is divided
            (y * goal).sum().backward()
            shard_(Weighted(), mesh, plan)(z, goal).backward()
        else:
            F.mse_loss(y, goal).backward()
            loss(z, goal).backward()
        pairs = [(y, z.full_tensor())]
        pairs += [
            (p.grad.clone(), q.grad.clone()) for p, q in zip(expected.parameters(), sharded.parameters(), strict=True)
        ]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        pairs += list(zip(expected.parameters(), sharded.parameters(), strict=True)) + list(
            zip(expected.buffers(), sharded.buffers(), strict=True)
        )
        if step in (0, steps - 1):
            found += [float((a - b).detach().abs().max() / a.detach().abs().max().clamp_min(1e-30)) for a, b in pairs]
    return found


class Weighted(nn.Module):
    def forward(self, z: Tensor, goal: Tensor) -> Tensor:
        return (z * goal).sum()


@pytest.mark.parametrize(
    ("dims", "sizes", "shape"),
    [
        ((2, 3), (2, 2), (2, 1, 8, 8, 4)),
        pytest.param((4, 2), (2, 2), (1, 1, 12, 4, 8), marks=pytest.mark.slow),
        pytest.param((2,), (3,), (2, 1, 20, 4, 8), marks=pytest.mark.slow),  # uneven: 7, 7, 6
        pytest.param((0, 2, 3), (2, 2, 2), (2, 1, 8, 12, 4), marks=pytest.mark.slow),
        pytest.param((2,), (8,), (1, 1, 40, 4, 4), marks=pytest.mark.slow),
        pytest.param((1, 2), (2, 2), (2, 1, 8, 8, 4), marks=pytest.mark.slow),  # of one channel half have none
    ],
)
def test_a_unet_trains_as_in_one_process(processes: Processes, dims, sizes, shape) -> None:
    for found in processes(torch.Size(sizes).numel(), train, dims, sizes, shape, False, seconds=200):
        assert max(found) < 1e-12


@pytest.mark.parametrize("dims", [(2, 3), (1, 2)])
def test_a_unet_of_whole_numbers_is_exact(processes: Processes, dims) -> None:
    for found in processes(4, train, dims, (2, 2), (2, 1, 8, 8, 4), True, seconds=200):
        assert max(found) == 0


@on(2)
def test_causal_circular_padding() -> None:
    layer = convgrad.nn.Conv1d(3, 3, 3, padding="causal", padding_mode="circular")
    x = torch.randn(1, 3, 8)
    y = shard_(copy.deepcopy(layer), init_device_mesh("cpu", (2,)), Shard(2))(x)
    torch.testing.assert_close(y.full_tensor(), layer(x))


@on(2)
def test_circular_padding_by_the_backend_of_the_layer() -> None:
    layer = convgrad.nn.Conv1d(3, 3, 3, padding=1, padding_mode="circular", backend="im2col")
    sharded, x = shard_(copy.deepcopy(layer), init_device_mesh("cpu", (2,)), Shard(2)), torch.randn(1, 3, 8)
    with convgrad.trace() as t:
        y = sharded(x)
        y.sum().backward()
    assert {call.backend for call in t} == {"im2col"}
    torch.testing.assert_close(y.full_tensor(), layer(x))


# ---- what is refused -------------------------------------------------------------------------------


def doubled(module: nn.Module) -> nn.Module:
    module.forward = lambda x, run=module.forward: 2 * run(x)
    return module


def scripted(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(module)


#: A module, a plan for it, and what is said.
REFUSED = (
    (lambda: nn.Sequential(nn.Conv2d(1, 1, 3), nn.LSTM(3, 3)), Shard(2), "module '1' .LSTM. .* has no rule for shards"),
    (lambda: convgrad.nn.FeedbackConv2d(1, 1, 3), Shard(2), "FeedbackConv2d.* goes through another weight"),
    (nn.RReLU, Shard(2), "RReLU .* has no rule for shards"),  # it would draw as many numbers as elements
    (lambda: nn.Conv1d(1, 1, 3), Shard(3), "the plan shards dimension 3, and it works on 1 spatial dimensions"),
    (lambda: nn.MaxPool2d(2, return_indices=True), Shard(2), "return_indices counts positions of the whole"),
    (lambda: nn.Softmax(1), Shard(1), "it works along dimension 1, which the plan shards"),
    (lambda: nn.GroupNorm(3, 6), Shard(1), "6 channels would end inside one of its 3 groups"),
    (lambda: nn.SyncBatchNorm(6), Shard(2), "replace it by BatchNorm"),
    (lambda: nn.LazyConv2d(6, 3), Shard(2), "its parameters are not there yet; call it once before"),
    (lambda: nn.Sequential(scripted(nn.ReLU())), Shard(2), "module '0' .* TorchScript compiled it"),
    (lambda: doubled(nn.ReLU()), Shard(2), "its forward was replaced on the instance"),
    (nn.ReLU, [Shard(2), Shard(3)], "expected a placement for each of 1 mesh dimensions, but got"),
    (nn.ReLU, [Partial()], "expected Replicate, or Shard of a different dimension from 0 each, but got"),
)


@on(2)
def test_what_cannot_be_exact_is_refused_before_any_work() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for make, plan, words in REFUSED:
        module = make()
        kinds = [type(m) for m in module.modules()]
        with pytest.raises((UnsupportedError, ShapeError), match=words):
            shard_(module, mesh, plan)
        assert [type(m) for m in module.modules()] == kinds  # left as it was


class Median(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.median()


def refuse_function() -> None:
    shard_(nn.Sequential(nn.ReLU(), Median()), init_device_mesh("cpu", (2,)), Shard(2))(torch.zeros(1, 1, 4))


def test_a_function_without_a_rule_is_named_with_its_module(processes: Processes) -> None:
    with pytest.raises(RankError, match=r"module '1': median has no rule for sharded tensors"):
        processes(2, refuse_function)


# ---- together with other things ------------------------------------------------------------------------


class Checkpointed(UNet):
    def forward(self, x: Tensor) -> Tensor:
        one = checkpoint(self.first, self.stem(x), use_reentrant=False)
        return self.head(torch.cat([one, one.relu()], 1))


def together(way: str) -> list[float]:
    """The differences of result and gradients to those of one process."""
    warnings.filterwarnings("ignore", ".*should not be instantiated")  # PyTorch's own, where Dynamo meets a Function
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "space"))
    expected = (Checkpointed() if way == "checkpoint" else UNet()).double()
    plan: list[Placement] = [Shard(0), Shard(2)]
    model = shard_(copy.deepcopy(expected), mesh, plan)
    x = torch.randn(4, 1, 8, 4, 4, dtype=torch.float64)
    if way == "fsdp":
        fully_shard(model, mesh=mesh["data"])
    if way == "pickle":
        model = pickle.loads(pickle.dumps(model))
        assert isinstance(model, UNet)
    with torch.no_grad():
        assert not model.eval()(x).requires_grad
    model.train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True) if way == "compile" else model
    y, z = expected(x), compiled(x)
    (y * y).mean().backward()
    shard_(nn.MSELoss(), mesh, plan)(z, torch.zeros_like(y)).backward()
    pairs = [(y, z.full_tensor())]
    for p, q in zip(expected.parameters(), model.parameters(), strict=True):
        if p.grad is not None:
            pairs.append((p.grad, q.grad.full_tensor() if isinstance(q.grad, DTensor) else q.grad))
    return [float((a - b).detach().abs().max() / a.detach().abs().max()) for a, b in pairs]


@pytest.mark.parametrize("way", ["checkpoint", "fsdp", "pickle", pytest.param("compile", marks=pytest.mark.slow)])
def test_it_works_together_with(processes: Processes, way) -> None:
    for found in processes(4, together, way, seconds=200):
        assert max(found) < 1e-12


class Scaled(nn.Conv2d):
    """A class of the user's, which the user does not want to be told of ours."""

    def __init_subclass__(cls) -> None:
        raise RuntimeError("told")

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@on(2)
def test_an_accelerated_model_is_sharded() -> None:
    """Sharded once and once more, by way of a pickle."""
    mesh = init_device_mesh("cpu", (2,))
    stock = nn.Sequential(
        nn.ZeroPad2d((0, 1, 0, 1)), Scaled(4, 4, 3, 2, groups=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)
    ).double()
    model, x = copy.deepcopy(stock), torch.randn(2, 4, 8, 6, dtype=torch.float64)
    accelerate_(model, only_gains=False)
    for dim in (2, 3):
        model = pickle.loads(pickle.dumps(shard_(model, mesh, Shard(dim))))
        assert inspect.signature(model.forward) == inspect.signature(stock.forward)
        y = model(x)
        assert y.placements == (Shard(dim),)
        torch.testing.assert_close(y.full_tensor(), stock(x), rtol=0, atol=1e-12)


class Final(type):
    """Its classes have no subclasses."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, object]) -> Final:
        if any(isinstance(base, Final) for base in bases):
            raise TypeError("final")
        return super().__new__(cls, name, bases, namespace)


class Alone(nn.Module, metaclass=Final): ...


@on(1)
def test_a_class_without_subclasses_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.ReLU(), Alone())
    with pytest.raises(TypeError, match="final"):
        shard_(model, init_device_mesh("cpu", (1,)), Shard(2))
    assert (type(model), type(model[0])) == (nn.Sequential, nn.ReLU)


def masks(sizes: tuple[int, ...], dims: tuple[int, ...]) -> list[Tensor]:
    mesh = init_device_mesh("cpu", sizes)
    modules = nn.Dropout(0.25), nn.Dropout3d(0.5), nn.AlphaDropout(0.25)
    x = torch.ones(4, 8, 7, 6, 5)
    return [shard_(m, mesh, [Shard(d) for d in dims])(x).full_tensor() for m in modules]


def test_dropout_draws_one_mask_whatever_the_mesh(processes: Processes) -> None:
    found = [masks_ for count, sizes, dims in ((2, (2,), (2,)), (4, (2, 2), (3, 0)), (2, (2,), (1,))) for masks_ in
             processes(count, masks, sizes, dims)]  # fmt: skip
    for element, channel, alpha in found:
        assert all(torch.equal(a, b) for a, b in zip(found[0], (element, channel, alpha), strict=True))
        assert set(element.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
        assert abs((element == 0).float().mean() - 0.25) < 0.02  # of 6720: four standard deviations
        assert (channel.flatten(2) == channel.flatten(2)[..., :1]).all()
        assert 4 < (channel[:, :, 0, 0, 0] == 0).sum() < 28  # of 32
        assert len(alpha.unique()) == 2


@on(2)
def test_dropout_of_channels_without_a_batch() -> None:
    """They are dropped as a whole."""
    mesh = init_device_mesh("cpu", (2,))
    ys = (
        shard_(m, mesh, Shard(1))(torch.ones(40, 4, *[3] * (d - 1)))
        for m, d in ((nn.Dropout1d(), 1), (nn.Dropout3d(), 3))
    )
    wholes = [y.full_tensor().flatten(1) for y in ys]
    assert all((y == y[:, :1]).all() and len(y.unique()) == 2 for y in wholes)
    kept = shard_(nn.Dropout(0.3), mesh, Shard(0))(torch.ones(40, 4, dtype=torch.double)).full_tensor().max()
    assert kept == F.dropout(torch.ones(40, 4, dtype=torch.double), 0.3).max()
    for m in (nn.Dropout(1.0), nn.AlphaDropout(1.0)):
        assert (shard_(m, mesh, Shard(0))(torch.ones(4, 4)).full_tensor() == 0).all()
