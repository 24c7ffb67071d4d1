"""A registered function in compiled graphs: one operator, without a break, found again only as itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import convgrad
from convgrad.diagnostics import trace

from .functions import WIDE, Counted, accepts, counted, depthwise, forward, grad_weight, operands


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled(compiler: str) -> None:
    """It stays one operator in the graph, without a break, forward and backward."""
    functions = {"forward": Counted(forward), "grad_weight": Counted(grad_weight)}
    convgrad.register("mine", **functions, accepts=accepts, dtypes=WIDE, verify=False)
    x, w = operands()
    compiled = torch.compile(depthwise, backend=compiler, fullgraph=True)
    compiled(x, w).sum().backward()
    x.grad = w.grad = None
    for f in functions.values():
        f.calls = 0
    compiled(x, w).square().sum().backward()
    assert [f.calls for f in functions.values()] == [1, 1]
    got, (x.grad, w.grad) = (x.grad, w.grad), (None, None)
    F.conv2d(x, w, padding=1, groups=8).square().sum().backward()
    torch.testing.assert_close(got, (x.grad, w.grad))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_lazy_conjugates_in_a_compiled_graph(compiler: str) -> None:
    """Its operators see that a tensor is lazily conjugated, as in eager mode."""

    def lazily(x: torch.Tensor, w: torch.Tensor, p: convgrad.ConvProblem) -> torch.Tensor:
        i = torch.complex(torch.zeros(()), torch.ones(()))
        return forward(x, w, p) * (i * i.conj()).real

    convgrad.register("mine", forward=lazily, accepts=accepts, dtypes=WIDE, verify=False)
    x, w = operands()
    with torch.no_grad():
        compiled = torch.compile(depthwise, backend=compiler, fullgraph=True)
        torch.testing.assert_close(compiled(x, w), F.conv2d(x, w, padding=1, groups=8))


@pytest.mark.parametrize("name", ["mine", "im2col"])
def test_a_compiled_module_by_name(name: str) -> None:
    """Its request is part of the graph: for all passes, though nobody asks when the graph runs."""
    counted(prefer=False)
    module = torch.nn.Sequential(
        convgrad.nn.Conv2d(8, 8, 3, groups=8, backend=name), convgrad.nn.ConvTranspose2d(8, 4, 3, backend="im2col")
    )
    x = torch.randn(2, 8, 9, 9, requires_grad=True)
    expected = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    compiled(x).sum().backward()
    with trace() as seen:
        got = torch.autograd.grad(compiled(x).square().sum(), [x, *module.parameters()])
    torch.testing.assert_close(got, expected)
    ran = {("transposed" in r.problem, o): r.backend for r in seen for o in r.outputs.split("+")}
    assert ran[False, "forward"] == name
    assert {b for (transposed, _), b in ran.items() if transposed} == {"im2col"}


def test_compiled_graphs_know_the_kernels() -> None:
    """A graph on disk that was traced with another kernel, or with none, is not found again."""
    from torch.compiler import config

    tags = [config.cache_key_tag]
    counted()
    tags.append(config.cache_key_tag)
    convgrad.register("mine", forward=lambda x, w, p: forward(x, w, p) * 1, accepts=accepts, verify=False)
    tags.append(config.cache_key_tag)
    assert len(set(tags)) == 3
    convgrad.unregister("mine")
    assert config.cache_key_tag == tags[0]
