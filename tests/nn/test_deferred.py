"""A normalization that is not computed until it is read: whatever reads it first, in whatever order, as stock."""

from __future__ import annotations

import copy
import gc
import io
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import convgrad
from convgrad.nn import normalization
from convgrad.nn.deferred import Deferred
from tests.norms import NEEDS_KERNELS, watch

pytestmark = [NEEDS_KERNELS, pytest.mark.usefixtures("small_norms", "nothing_compiled")]

Use = Callable[[Any], Tensor]
K = torch.randn(5, 8, 3, 3)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The activations of the backward passes that our kernels computed."""
    seen: list[str] = []
    watch(monkeypatch, "normalization_gradients", lambda *args: seen.append(args[-1]))
    return seen


def pair(instance: bool = False) -> tuple[Any, Any]:
    theirs = nn.InstanceNorm2d(8, affine=True) if instance else nn.BatchNorm2d(8)
    nn.init.uniform_(theirs.weight, 0.5, 1.5)
    nn.init.normal_(theirs.bias)
    ours = getattr(convgrad.nn, type(theirs).__name__)(8, **({"affine": True} if instance else {}))
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def image(n: int = 4) -> Tensor:
    return torch.randn(n, 8, 6, 6)


def agree(ours: Any, theirs: Any, use: Use, x: Tensor | None = None) -> None:
    """The result of a use, all gradients and buffers."""
    x, results = image() if x is None else x, []
    for module in (ours, theirs):
        torch.manual_seed(3)
        module.zero_grad()
        a = x.clone().requires_grad_()
        y = use(module(a + 0))
        (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
        results.append((y.detach() + 0, a.grad, *(p.grad for p in module.parameters()), *module.buffers()))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


# ---- what fuses -------------------------------------------------------------------------------------

ACTIVATING: dict[str, tuple[str, Use]] = {
    "F.relu": ("relu", F.relu),
    "F.relu, in place": ("relu", lambda y: F.relu(y, inplace=True)),
    "torch.relu": ("relu", torch.relu),
    "torch.relu_": ("relu", torch.relu_),
    "relu": ("relu", lambda y: y.relu()),
    "relu_": ("relu", lambda y: y.relu_()),
    "nn.ReLU": ("relu", nn.ReLU()),
    "nn.ReLU, in place": ("relu", nn.ReLU(inplace=True)),
    "F.relu6": ("relu6", F.relu6),
    "nn.ReLU6, in place": ("relu6", nn.ReLU6(inplace=True)),
    "F.hardtanh": ("relu6", lambda y: F.hardtanh(y, 0.0, 6.0)),
    "F.silu": ("silu", F.silu),
    "nn.SiLU, in place": ("silu", nn.SiLU(inplace=True)),
    "nn.Hardswish": ("hardswish", nn.Hardswish()),
    "F.hardswish, in place": ("hardswish", lambda y: F.hardswish(y, inplace=True)),
}


@pytest.mark.parametrize(
    ("how", "instance"), [*((how, False) for how in ACTIVATING), ("F.relu", True), ("relu_", True)]
)
def test_an_activation_is_computed_by_the_same_node(how: str, instance: bool, fused: list[str]) -> None:
    name, use = ACTIVATING[how]
    ours, theirs = pair(instance)
    for _ in range(2):
        agree(ours, theirs, use)
    assert fused == [name] * 2
    y = use(ours(image().requires_grad_()))
    assert type(y) is Tensor
    assert "Normalization" in str(y.grad_fn)


def test_from_the_second_call_on_it_is_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    watch(monkeypatch, "normalize", lambda *args: seen.append(args[-1]))
    ours = pair()[0]
    for _ in range(3):
        F.silu(ours(image().requires_grad_()))
    assert seen == ["", "silu", "silu"]


def test_what_something_else_read_is_computed_at_once_from_then_on() -> None:
    ours = pair()[0]
    assert isinstance(ours(image().requires_grad_()), Deferred)
    ours(image().requires_grad_()).sum()
    assert type(ours(image().requires_grad_())) is Tensor


@pytest.mark.parametrize("how", ["no gradients", "frozen", "evaluation", "a hook", "a hook on all modules", "small"])
def test_what_is_not_deferred(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, x = pair()[0], image()
    handle: Any = None
    if how == "evaluation":
        ours.eval()
    elif how == "frozen":
        ours.requires_grad_(False)
    elif how == "a hook":
        ours.register_forward_hook(lambda *_: None)
    elif how == "a hook on all modules":
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    elif how == "small":
        monkeypatch.setitem(normalization.norm_gains.__globals__["LEAST_NORM"], "input", x.numel() + 1)
    with torch.set_grad_enabled(how != "no gradients"):
        assert type(ours(x)) is Tensor
    if handle is not None:
        handle.remove()


# ---- every reader -----------------------------------------------------------------------------------


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return 2 * x * g


class Dirty(torch.autograd.Function):
    """Changes its input in place, below `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 3 * g


def both(first: Use, second: Use) -> Use:
    def use(y: Any) -> Tensor:
        z = first(y)
        return z + second(y)

    return use


def after(change: Callable[[Any], Any], use: Use) -> Use:
    def changed(y: Any) -> Tensor:
        change(y)
        return use(y)

    return changed


def in_threads(y: Any) -> Tensor:
    results: list[Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(F.relu(y) * 2)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(results[1:], results[0])


def with_hook(y: Any) -> Tensor:
    y.register_hook(lambda g: 2 * g)
    return F.relu(y)


def hooked_module(y: Any) -> Tensor:
    act = nn.ReLU()
    act.register_full_backward_hook(lambda module, gi, go: (3 * gi[0],))
    act.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return act(y)


def kept_gradient(y: Any) -> Tensor:
    y.retain_grad()
    z = F.relu(y)
    z.sum().backward(retain_graph=True)
    return z + y.grad


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return make()


def no_grad(y: Any) -> Tensor:
    with torch.no_grad():
        return F.relu(y)


def autocast(y: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.relu(y)


def by_script(y: Any) -> Tensor:
    return scripts["doubled"](y)


def by_script_in_place(y: Any) -> Tensor:
    return scripts["tripled"](y)


#: Made when the tests run: `torch.jit.script` warns.
scripts: dict[str, Any] = {}

USES: dict[str, Use] = {
    "mul": lambda y: y * y,
    "returned": lambda y: y,
    "twice activated": both(F.relu, F.relu),
    "activation, then another": both(F.relu, lambda y: 3 * y),
    "another, then activation": both(lambda y: 3 * y, F.relu),
    "in place, then another": both(torch.relu_, lambda y: 3 * y),
    "another activation": F.gelu,
    "another hardtanh": lambda y: F.hardtanh(y, -1.0, 6.0),
    "keyword": lambda y: torch.relu(input=y),
    "result changed in place": both(lambda y: F.silu(y).mul_(2), F.silu),
    "own Function": Own.apply,
    "own Function beside the activation": both(F.relu, Own.apply),
    "own Function that changes it": Dirty.apply,
    "own Function that changes it, read again": after(Dirty.apply, F.relu),
    "conv": lambda y: F.conv2d(y, K),
    "our conv": lambda y: convgrad.conv2d(y, K),
    "our layer": lambda y: seeded(lambda: convgrad.nn.Conv2d(8, 4, 3))(y),  # noqa: PLW0108
    "our normalization": lambda y: F.relu(convgrad.nn.BatchNorm2d(8)(y)),
    "cat": lambda y: torch.cat([y, y], 1),
    "residual": lambda y: F.relu(y + 1),
    "residual in place": lambda y: F.relu(y.add_(1.0)),
    "changed in place, then activated": after(lambda y: y.mul_(2), F.relu),
    "an element set": after(lambda y: y.__setitem__((0, 0), 1.0), F.relu),
    "data changed": after(lambda y: y.data.mul_(2), F.relu),
    "detached and changed": after(lambda y: y.detach().mul_(2), F.relu),
    "index": lambda y: y[:, :2],
    "numpy": lambda y: y * float(y.detach().numpy().sum() > -1e9),
    "item": lambda y: y * y[0, 0, 0, 0].item(),
    "detach": lambda y: y + y.detach(),
    "hook": with_hook,
    "retain_grad": kept_gradient,
    "hooks on the activation": hooked_module,
    "metadata": lambda y: F.relu(y) * (y.dim() + y.size(1) + len(y) + y.stride()[0] + y.numel() + y.requires_grad),
    "grad_fn": lambda y: F.relu(y) * (y.grad_fn is not None) * (not y.is_leaf),
    "vmap": torch.vmap(lambda t: t * 2),
    "vmap of an activation": torch.vmap(F.relu),
    "func.grad": lambda y: y * torch.func.grad(lambda t: t.square().sum())(y.detach()),
    "jvp": lambda y: torch.func.jvp(torch.sin, (y,), (y,))[1],
    "checkpoint": lambda y: checkpoint(lambda q: F.relu(q) * 2, y, use_reentrant=False),
    "checkpoint, reentrant": lambda y: checkpoint(lambda q: F.relu(q) * 2, y, use_reentrant=True),
    "deepcopy": lambda y: y + copy.deepcopy(y.detach()),
    "repr": lambda y: y * (len(repr(y)) > 0),
    "torch.save": lambda y: (torch.save(y, io.BytesIO()), F.relu(y))[1],
    "to": lambda y: F.relu(y.to(torch.float64)).float(),
    "data_ptr": lambda y: (y.data_ptr(), F.relu(y))[1],
    "version": lambda y: F.relu(y) * (1 + y._version),
    "dlpack": lambda y: y + torch.from_dlpack(y.detach()),
    "view": lambda y: y.view(4, -1),
    "a script": by_script,
    "a script that changes it": after(by_script_in_place, F.relu),
    "no_grad": lambda y: y + no_grad(y),
    "aten": torch.ops.aten.relu,
    "threads": in_threads,
    "autocast": autocast,
    "out": lambda y: y * torch.add(y.detach(), 1, out=torch.empty(4, 8, 6, 6)).mean(),
    "isinstance": lambda y: F.relu(y) if isinstance(y, Tensor) else y,
    "requires_grad_": lambda y: F.relu(y.requires_grad_()),
    "backward of its own": lambda y: y * torch.autograd.grad(y.sum(), y, retain_graph=True)[0],
}


def _doubled(x: Tensor) -> Tensor:
    return torch.relu(x) * 2 + x


def _tripled(x: Tensor) -> Tensor:
    return x.mul_(3)


@pytest.fixture(scope="module", autouse=True)
def _scripts() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripts.update(doubled=torch.jit.script(_doubled), tripled=torch.jit.script(_tripled))


@pytest.mark.filterwarnings("ignore:.*TypedStorage", "ignore:The .grad attribute", "ignore:.*torch.jit")
@pytest.mark.parametrize("instance", [False, True], ids=["batch", "instance"])
@pytest.mark.parametrize("how", USES)
def test_every_reader_gets_what_stock_gives(how: str, instance: bool) -> None:
    """In the first call, when an activation is expected, and when something else is."""
    for before in (None, F.relu, *([] if instance else [F.silu, lambda y: y * 2])):
        ours, theirs = pair(instance)
        if before is not None:
            agree(ours, theirs, before)
        agree(ours, theirs, USES[how])
        agree(ours, theirs, USES[how])
        agree(ours, theirs, F.relu)


@pytest.mark.parametrize("before", [None, F.relu, lambda y: y * 2], ids=["", "activation", "other"])
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")
def test_a_compiled_reader(before: Use | None, fullgraph: bool) -> None:
    def function(t: Tensor) -> Tensor:
        return t.sin().mean((2, 3)) + F.relu(t).mean()

    ours, theirs = pair()
    if before is not None:
        agree(ours, theirs, before)
    compiled = torch.compile(function, backend="eager", fullgraph=fullgraph)
    for _ in range(2):
        x, results = image(), []
        for module, use in ((ours, compiled), (theirs, function)):
            module.zero_grad()
            a = x.clone().requires_grad_()
            y = use(module(a))
            y.square().sum().backward()
            results.append((y, a.grad, *(p.grad for p in module.parameters())))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_memory_that_is_read_directly_is_an_error() -> None:
    """A foreign function in C++ gets no numbers."""
    y = pair()[0](image().requires_grad_())
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(y)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("expected", [None, "relu", "silu", "other"])
@pytest.mark.parametrize("use", [F.relu, lambda y: 3 * y], ids=["activation", "other"])
@pytest.mark.parametrize("recorded", [True, False])
def test_an_input_that_changes_before_it_is_read(expected: str | None, use: Use, recorded: bool) -> None:
    ours, theirs = pair()
    for name, before in {"relu": F.relu, "silu": F.silu, "other": lambda y: 2 * y}.items():
        if name == expected:
            agree(ours, theirs, before)
    results, failed = [], False
    x = image()
    for module in (ours, theirs):
        with torch.set_grad_enabled(recorded):
            z = x + 0
            y = module(z)
            z.zero_()
            try:
                results.append((use(y).detach(), *module.buffers()))
            except RuntimeError:  # where stock's backward fails, too
                failed = True
    assert not (failed and not recorded)
    assert not (failed and (expected in (None, "other") or (expected == "relu" and use is F.relu)))
    if not failed:
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("use", [F.relu, lambda y: 3 * y], ids=["activation", "other"])
@pytest.mark.parametrize("when", ["before the reader", "before the backward"])
def test_a_bias_that_changes(when: str, use: Use) -> None:
    """PyTorch's backward does not read it."""
    ours, theirs = pair()
    for _ in range(2):  # the second time the reader is expected
        x, results = image(), []
        for module in (ours, theirs):
            module.zero_grad()
            a = x.clone().requires_grad_()
            y = module(a)
            for moment in ("before the reader", "before the backward"):
                with torch.no_grad():
                    module.bias.add_(float(moment == when))
                y = use(y) if moment == "before the reader" else y
            y.square().sum().backward()
            results.append((y.detach(), a.grad, *(p.grad for p in module.parameters())))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_running_statistics_without_a_reader() -> None:
    ours, theirs = pair()
    for _ in range(2):
        x = image().requires_grad_()
        ours(x)
        theirs(x)
        torch.testing.assert_close([*ours.buffers()], [*theirs.buffers()])


@pytest.mark.parametrize("expected", [None, "relu", "other"])
def test_what_is_read_after_the_backward_and_a_step(expected: str | None) -> None:
    """As the features that a hook keeps."""
    ours, theirs = pair()
    if expected is not None:
        agree(ours, theirs, F.relu if expected == "relu" else lambda y: 2 * y)
    x, results = image(), []
    for module in (ours, theirs):
        module.zero_grad()
        y = module(x.clone().requires_grad_())
        F.relu(y).square().sum().backward()
        torch.optim.SGD(module.parameters(), 0.5).step()
        results.append(y.detach() * 1)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("use", [F.relu, lambda y: 3 * y, both(F.relu, lambda y: 2 * y)])
def test_a_checkpoint_around_it_saves_the_same_tensors_again(use: Use, reentrant: bool) -> None:
    """Whatever is learned between the forward and the recomputation."""
    ours, theirs = pair()
    for learned in (None, F.relu, lambda y: 2 * y):
        for module in (ours, theirs):
            module.track_running_stats, module.running_mean, module.running_var = False, None, None
        x, results = image(), []
        for module in (ours, theirs):
            module.zero_grad()
            a = x.clone().requires_grad_()
            y: Any = checkpoint(lambda t, m=module: use(m(t)), a, use_reentrant=reentrant)
            if learned is not None:
                learned(module(a.detach().requires_grad_())).sum()
            y.square().sum().backward()
            results.append((y, a.grad, *(p.grad for p in module.parameters())))
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


def test_a_checkpoint_counts_the_same_saved_tensors() -> None:
    ours, counts = pair()[0], []
    for use in (F.relu, lambda y: 2 * y, F.relu):
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=kept: to.append(t) or t, lambda t: t):
            y = ours(image().requires_grad_())
            counts.append(len(kept))
            use(y)
    assert counts == [4] * 3


def test_second_derivatives() -> None:
    for use in (F.relu, both(F.silu, lambda y: y * y), lambda y: y * y):
        ours, theirs = (m.double() for m in pair())
        x, results = image(2).double(), []
        for module in (ours, theirs):
            a = x.clone().requires_grad_()
            (g,) = torch.autograd.grad(use(module(a)).square().sum(), a, create_graph=True)
            results.append(torch.autograd.grad(g.square().sum(), (a, *module.parameters())))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("instance", [False, True])
def test_a_derivative_that_does_not_depend_on_the_result(instance: bool) -> None:
    """As of a gradient penalty: the last layer is linear, so that no gradient flows into the normalization again."""
    for use in (F.relu, lambda y: y * y, both(F.silu, F.gelu)):
        ours, theirs = (m.double() for m in pair(instance))
        x, results = image(2).double(), []
        for module in (ours, theirs):
            a, bias = x.clone().requires_grad_(), torch.zeros(8, 6, 6, dtype=torch.float64, requires_grad=True)
            (g,) = torch.autograd.grad((use(module(a)) + bias).sum(), a, create_graph=True)
            (use(module(a)).sum() + g.square().sum()).backward()
            results.append((a.grad, *(p.grad for p in module.parameters())))
        torch.testing.assert_close(*results)


ASKING: dict[str, Callable[[Any, Tensor], Any]] = {
    "hook": lambda y, _: y.register_hook(lambda g: None),
    "retain_grad": lambda y, _: y.retain_grad(),
    "autograd.grad": lambda y, z: torch.autograd.grad(z.sum() + y.sum(), y),
    "autograd.grad of several": lambda y, z: torch.autograd.grad(z.sum(), inputs=[z, y], allow_unused=True),
}


@pytest.mark.parametrize("how", ASKING)
def test_a_gradient_that_is_asked_for_after_the_activation(how: str) -> None:
    """It would lack what flows through the activation, without a word."""
    ours = pair()[0]
    y = ours(image())
    z = F.relu(y)
    with pytest.raises(RuntimeError, match="before the activation"):
        ASKING[how](y, z)
    y = ours(image())
    ASKING[how](y, F.relu(y, inplace=True))  # it is the activation's result then
    ours.register_forward_hook(lambda *_: None)
    y = ours(image())
    ASKING[how](y, F.relu(y))


def test_layers_that_are_shared() -> None:
    ours, theirs = pair()
    x, results = image(), []
    for module in (ours, theirs):
        a = x.clone().requires_grad_()
        one, other = module(a), module(2 * a)
        z = F.relu(other) * F.relu(one) + module(F.relu(module(a)))
        z.square().sum().backward()
        results.append((z, a.grad, *(p.grad for p in module.parameters()), *module.buffers()))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("use", [F.relu, lambda y: 3 * y, both(F.relu, lambda y: 2 * y)])
def test_nothing_is_kept_alive(use: Use) -> None:
    ours = pair()[0]
    gc.disable()
    try:
        for _ in range(3):
            x = image().requires_grad_()
            a = x + 0
            y = ours(a)
            left = [weakref.ref(t) for t in (a, y)]
            z = use(y)
            del a, y
            z.sum().backward()
            left.append(weakref.ref(z))
            del z
            assert [t() for t in left] == [None] * 3
        left = [weakref.ref(ours)]
        del ours
        assert left[0]() is None
    finally:
        gc.enable()


def test_copies_of_a_layer_know_nothing_of_it() -> None:
    ours, theirs = pair()
    agree(ours, theirs, F.relu)
    assert vars(copy.deepcopy(ours)).keys() == vars(theirs).keys()
    agree(copy.deepcopy(ours), copy.deepcopy(theirs), lambda y: 3 * y)
