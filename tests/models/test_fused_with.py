"""Deferred normalizations and padding together with what wraps, shards, repeats, transforms or compiles a model."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import convgrad
from convgrad.backends.native_norm import LEAST_NORM
from convgrad.engine import Event, observing
from convgrad.nn import normalization
from tests.models.taken_over import world_of_one
from tests.norms import NEEDS_KERNELS
from tests.parallel.conftest import processes  # noqa: F401 - a fixture
from tests.parallel.processes import Processes

pytestmark = [NEEDS_KERNELS, pytest.mark.usefixtures("small_norms", "nothing_compiled")]

PAD = ((0, 1), (0, 1))


class Stem(nn.Module):
    """A normalization with its activation, and padding that the next convolution reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, 2, groups=8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.depthwise(F.pad(F.silu(self.norm(self.conv(x))), (0, 1, 0, 1)))


class Residual(nn.Module):
    """A normalization that an activation reads, and one that a sum reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.conv, self.act = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.second(self.conv(self.act(self.first(x)))) + x)


def net(statistics: bool = True) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(Stem(), Residual(), nn.Flatten(), nn.Linear(8 * 36, 4))
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias)
        if not statistics:
            norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
            norm.num_batches_tracked = None
    return model


def pair(statistics: bool = True) -> tuple[Any, Any]:
    ours = net(statistics)
    convgrad.accelerate_(ours, only_gains=False)
    return ours, net(statistics)


def image(n: int = 4) -> Tensor:
    return torch.randn(n, 3, 12, 12)


@contextlib.contextmanager
def seen() -> Iterator[tuple[list[str], list[Any]]]:
    """The activations of the normalizations' backward passes, and the padding of the depthwise convolutions'."""
    activations: list[str] = []
    paddings: list[Any] = []
    gradients = normalization.normalization_gradients

    def noted(*args: Any) -> Any:
        activations.append(args[-1])
        return gradients(*args)

    def note(event: Event) -> None:
        if event.problem.stride == (2, 2):
            paddings.append(event.problem.padding)

    with mock.patch.object(normalization, "normalization_gradients", noted), observing(note):
        yield activations, paddings


def train(model: Any, call: Callable[[Tensor], Any], steps: int = 3) -> list[Any]:
    """Losses, gradients and buffers of some steps, and the parameters after them."""
    torch.manual_seed(2)
    optimizer, results = torch.optim.SGD(model.parameters(), 1e-3), []
    for _ in range(steps):
        optimizer.zero_grad()
        x = image().requires_grad_()
        loss = call(x).square().mean()
        loss.backward()
        results += [loss.detach(), x.grad, *(_whole(p.grad) for p in model.parameters())]
        optimizer.step()
    return results + [_whole(t).detach().clone() for t in (*model.parameters(), *model.buffers())]


def _whole(t: Any) -> Tensor:
    return (t.full_tensor() if isinstance(t, DTensor) else t).clone()


def agree(ours: list[Any], theirs: list[Any]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


# ---- several processes ------------------------------------------------------------------------------


def wrapped(model: Any, how: str) -> Any:
    if how == "fsdp":
        mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for module in (model[0], model[1], model):
            fully_shard(module, mesh=mesh)
        return model
    options = {"static graph": {"static_graph": True}, "unused": {"find_unused_parameters": True}}.get(how, {})
    return DistributedDataParallel(model, **options)


def distributed(how: str) -> tuple[list[str], list[Any]]:
    """Train in this process group; the activations and paddings that were seen."""
    warnings.filterwarnings("ignore", ".*find_unused_parameters")
    with mock.patch.dict(LEAST_NORM, dict.fromkeys(LEAST_NORM, 0)):
        ours, stock = pair()
        with seen() as found:
            result = train(ours, wrapped(ours, how))
        agree(result, train(stock, wrapped(stock, how)))
        gc.collect()  # a DistributedDataParallel must not outlive its process group
    return found


@pytest.mark.parametrize("how", ["ddp", "static graph", "unused", "fsdp"])
def test_two_processes(how: str, processes: Processes) -> None:  # noqa: F811
    for activations, paddings in processes(2, distributed, how, seconds=100):
        assert sorted(activations[-3:]) == ["", "relu", "silu"]
        assert PAD in paddings


# ---- checkpoints, copies, transforms, hooks ----------------------------------------------------------


def same(run: Callable[[Any], Iterable[Any]], statistics: bool = True) -> None:
    """``run`` returns the same of an accelerated model as of stock's."""
    results = []
    for model in pair(statistics):
        torch.manual_seed(2)
        results.append([*run(model)])
    agree(*results)


def learn(model: Any, learned: bool = True) -> None:
    """What reads each normalization is known from now on."""
    if learned:
        model(image()).sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("parts", [False, True])
def test_checkpoints(reentrant: bool, learned: bool, parts: bool) -> None:
    def run(model: Any) -> list[Any]:
        learn(model, learned)
        around = partial(checkpoint_sequential, model, 2) if parts else partial(checkpoint, model)
        return train(model, partial(around, use_reentrant=reentrant))

    same(run, statistics=False)


@pytest.mark.parametrize("learned", [False, True])
def test_an_averaged_model(learned: bool) -> None:
    def run(model: Any) -> list[Any]:
        learn(model, learned)
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        train(model, model)
        average.update_parameters(model)
        return [*average.state_dict().values(), *train(average, average)]

    same(run)


def test_a_copy_while_a_graph_is_alive() -> None:
    def run(model: Any) -> list[Any]:
        y = model(image())
        twin = copy.deepcopy(model)
        y.sum().backward()
        return [*train(twin, twin), *(p.grad for p in model.parameters())]

    same(run)


@pytest.mark.parametrize("learned", [False, True])
def test_functional_calls_and_transforms(learned: bool) -> None:
    def run(model: Any) -> list[Any]:
        def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(model, (parameters, buffers), (x,)).square().mean()

        learn(model, learned)
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        parameters, x = {n: p.detach() for n, p in model.named_parameters()}, image()
        given = {n: p.clone().requires_grad_() for n, p in parameters.items()}
        two = torch.stack([x, x + 1])
        return [
            torch.autograd.grad(loss(given, x), [*given.values()]),
            [*torch.func.grad(loss)(parameters, x).values()],
            torch.func.vjp(partial(loss, parameters), x)[1](torch.ones(()))[0],
            torch.func.jvp(partial(loss, parameters), (x,), (x,)),
            torch.vmap(loss, (None, 0))(given, two),
            [*torch.vmap(torch.func.grad(loss), (None, 0))(parameters, two).values()],
        ]

    same(run, statistics=False)


def test_a_vector_of_gradients_at_once() -> None:
    def run(model: Any) -> Any:
        x = image().requires_grad_()
        given = (x, *model.parameters())
        return torch.autograd.grad(model(x).mean(0), given, torch.eye(4), is_grads_batched=True)

    same(run, statistics=False)


def test_hooks_on_all_modules_and_tensors() -> None:
    def run(model: Any) -> list[Any]:
        kept: list[Tensor] = []
        handles = [nn.modules.module.register_module_full_backward_hook(lambda m, gi, go: None)]
        handles += [p.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad * 2)) for p in model.parameters()]
        handles += [m.register_forward_pre_hook(lambda m, a: tuple(t + 0 for t in a)) for m in model.modules()]
        handles.append(model[1].first.register_full_backward_hook(lambda m, gi, go: (2 * gi[0],)))
        results = [*train(model, model), *sorted(kept, key=lambda t: t.shape)]
        for handle in handles:
            handle.remove()
        return results

    same(run)


class Features(nn.Module):
    """Returns what a normalization returned, beside what read it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.norm(self.conv(x))
        return {"out": F.relu(y).mean((2, 3)), "features": y}


def test_a_dictionary_of_results_in_distributed_training(tmp_path: Path) -> None:
    """DistributedDataParallel looks for tensors in what a model returns."""
    torch.manual_seed(1)
    stock = Features()
    ours = copy.deepcopy(stock)
    convgrad.accelerate_(ours, only_gains=False)
    results = []
    with world_of_one(tmp_path):
        for model in (ours, stock):
            outer = DistributedDataParallel(model, find_unused_parameters=True)
            torch.manual_seed(2)
            for _ in range(2):
                model.zero_grad()
                given = outer(image())
                (given["out"].sum() + given["features"].square().mean()).backward()
            results.append([given["features"].detach() * 1, *(p.grad for p in model.parameters())])
            del outer
        gc.collect()
    agree(*results)


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")
def test_compiled_by_a_backend_that_keeps_the_graph() -> None:
    def run(model: Any) -> list[Any]:
        learn(model)
        return train(model, torch.compile(model, backend="eager")) + train(model, model)

    same(run)


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_trace_and_an_export() -> None:
    ours, stock = pair(statistics=False)
    x = image()
    for model in (ours, stock):
        learn(model)
    traced = torch.jit.trace(ours, x, check_trace=False)
    torch.testing.assert_close(traced(x + 1), stock(x + 1), rtol=1e-3, atol=1e-4)
    exported = torch.export.export(ours, (x,)).module()
    torch.testing.assert_close(exported(x + 1), stock(x + 1), rtol=1e-3, atol=1e-4)


def test_nothing_keeps_a_model_alive() -> None:
    gc.freeze()  # what is there already is not looked through
    ours = pair()[0]
    train(ours, ours, steps=1)
    left = weakref.ref(ours)
    del ours
    gc.collect()
    gc.unfreeze()
    assert left() is None
