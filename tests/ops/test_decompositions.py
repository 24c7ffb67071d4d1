"""The operators in ATen's words: the same numbers, and nothing of ours in what was decomposed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import convgrad
from convgrad.ops import decompositions

#: input, weight, stride, padding, dilation, transposed, output_padding, groups
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]] = {
    "1d": ((2, 4, 9), (6, 2, 3), ([2], [1], [1], False, [0], 2)),
    "causal": ((2, 4, 9), (6, 4, 3), ([1], [4, 0], [2], False, [0], 1)),
    "pairs": ((2, 4, 7, 6), (6, 2, 3, 2), ([2, 1], [1, 0, -1, 2], [1, 2], False, [0, 0], 2)),
    "equal pairs": ((2, 4, 7, 6), (6, 4, 3, 2), ([2, 1], [1, 1, 0, 0], [1, 2], False, [0, 0], 1)),
    "negative pairs": ((2, 4, 7), (6, 4, 3), ([1], [-1, -1], [1], False, [0], 1)),
    "depthwise 3d": ((1, 3, 5, 4, 6), (6, 1, 2, 3, 1), ([1, 2, 1], [1], [1], False, [0], 3)),
    "transposed": ((2, 4, 5, 4), (4, 3, 3, 3), ([2, 2], [1, 1], [1, 1], True, [1, 0], 1)),
    "transposed pairs": ((2, 4, 5, 4), (4, 3, 3, 3), ([2, 2], [1, 0, 0, 2], [1, 1], True, [1], 2)),
    "transposed, more behind than computed": ((2, 4, 5), (4, 3, 3), ([2], [1, 0], [1], True, [1], 1)),
    "transposed, negative": ((2, 4, 5), (4, 3, 3), ([2], [-1, -1], [1], True, [0], 1)),
}


@pytest.mark.parametrize("channels", [0, 4], ids=["of the output", "of the bias"])
@pytest.mark.parametrize(("padding", "steps"), [([1], 9), ([1, 0], 8)])
def test_an_input_without_channels_has_a_gradient_of_its_whole_bias(
    padding: list[int], steps: int, channels: int
) -> None:
    x, w, g = torch.ones(2, 0, 9), torch.ones(4, 0, 3), torch.ones(2, channels, steps)
    rest = (w, [4], [1], padding, [1], False, [0], 1, [True] * 3)
    operator = torch.ops.convgrad.convolution_backward
    for backward in (operator, decompositions.convolution_backward):
        for input in (x, x.clone().requires_grad_()):
            assert [t.shape for t in backward(g, input, *rest)] == [x.shape, w.shape, (4,)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_same_numbers(case: str, dtype: torch.dtype) -> None:
    input_size, weight_size, arguments = CASES[case]
    x, w = torch.randn(input_size, dtype=dtype), torch.randn(weight_size, dtype=dtype)
    b = torch.randn(weight_size[1] * arguments[5] if arguments[3] else weight_size[0], dtype=dtype)
    ops = torch.ops.convgrad
    y = ops.convolution(x, w, b, *arguments)
    g = torch.randn_like(y)
    calls: dict[str, tuple[Any, ...]] = {
        "convolution": (x, w, b, *arguments),
        "convolution_backward": (g, x, w, [len(b)], *arguments, [True, True, True]),
        "grad_input": (g, w, x.shape, *arguments),
        "grad_weight": (g, x, w.shape, *arguments),
    }
    for name, call in calls.items():
        torch.testing.assert_close(getattr(decompositions, name)(*call), getattr(ops, name)(*call))
    for mask in ([True, False, False], [False, True, False], [False, False, True]):
        backward = (g, x, w, None, *arguments, mask)
        torch.testing.assert_close(decompositions.convolution_backward(*backward), ops.convolution_backward(*backward))


@pytest.mark.parametrize("case", ["pairs", "depthwise 3d"])
def test_the_layout_asked_for(case: str) -> None:
    input_size, weight_size, arguments = CASES[case]
    last = torch.channels_last if len(input_size) == 4 else torch.channels_last_3d
    x, w = torch.randn(input_size), torch.randn(weight_size)
    g = torch.ops.convgrad.convolution(x, w, None, *arguments)
    assert decompositions.grad_input(g, w, x.shape, *arguments, memory_format=last).is_contiguous(memory_format=last)
    assert decompositions.grad_weight(g, x, w.shape, *arguments, memory_format=last).is_contiguous(memory_format=last)


class Net(torch.nn.Module):
    """Each way by which a convolution gets into a program: chosen backends, a requested one, pairs, gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = convgrad.nn.Conv2d(4, 4, 3, padding=((1, 0), (2, 1)), groups=4)
        self.up = convgrad.nn.ConvTranspose2d(4, 4, 3, stride=2, padding=(1, 0, 0, 2))
        self.plain = convgrad.nn.Conv2d(4, 4, 3, padding=1)
        self.named = convgrad.nn.Conv2d(4, 4, 3, padding="same", backend="im2col")

    def forward(self, x: Tensor) -> Tensor:
        y = self.named(self.plain(self.up(self.depthwise(x))))
        g = convgrad.conv2d_weight(x, (4, 4, 3, 3), convgrad.conv2d(x, self.plain.weight))
        return convgrad.conv2d(y, g) + convgrad.conv2d_input(y.shape, g, y[..., 2:, 2:]).sum()


def _namespaces(module: Any) -> set[str]:
    return {
        n.target.namespace for n in module.graph.nodes if n.op == "call_function" and hasattr(n.target, "namespace")
    }


@pytest.mark.parametrize(("strict", "dynamic"), [(False, True), (True, False)])
def test_a_decomposed_program_is_pure_aten(strict: bool, dynamic: bool) -> None:
    net, x = Net(), torch.randn(2, 4, 8, 9)
    shapes = ({0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO},) if dynamic else None
    program = torch.export.export(net, (x,), strict=strict, dynamic_shapes=shapes)
    assert "convgrad" in _namespaces(program)
    decomposed = program.run_decompositions()
    assert _namespaces(decomposed) == {"aten"}
    torch.testing.assert_close(decomposed.module()(x), net(x), rtol=1e-4, atol=1e-4)
    if dynamic:
        other = torch.randn(3, 4, 10, 9)
        torch.testing.assert_close(decomposed.module()(other), net(other), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_for_onnx_is_pure_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.onnx.export(dynamo=False)`` traces, and raises at any other operator."""
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    conv = convgrad.nn.Conv2d(4, 4, 3, padding=((1, 0), (2, 1)), groups=4)
    net, x = torch.nn.Sequential(conv, convgrad.nn.ConvTranspose2d(4, 2, 2, stride=2)), torch.randn(2, 4, 6, 6)
    traced: Any = torch.jit.trace(net, x)
    kinds = {node.kind() for node in traced.inlined_graph.nodes()}
    assert "aten::_convolution" in kinds
    assert not any(kind.startswith("convgrad") for kind in kinds)
    torch.testing.assert_close(traced(x), net(x))


def test_a_compiled_graph_keeps_what_convgrad_computes() -> None:
    seen: list[set[str]] = []

    def look(module: Any, _: Any) -> Any:
        seen.append(_namespaces(module))
        return module

    from torch._dynamo.backends.common import aot_autograd  # the graph below autograd, as Inductor gets it

    conv = convgrad.nn.Conv2d(16, 16, 3, groups=16, backend="im2col")
    with torch.no_grad():
        torch.compile(conv, backend=aot_autograd(fw_compiler=look))(torch.randn(1, 16, 8, 8))
    assert any("convgrad" in s for s in seen)


LOAD = """
import sys, torch
{first}
program = torch.export.load(sys.argv[1]).module()
print(program(torch.ones(1, 4, 8, 8)).shape[0], "convgrad" in sys.modules)
"""


@pytest.mark.slow
def test_a_saved_program_names_what_to_import(tmp_path: Path) -> None:
    program = torch.export.export(convgrad.nn.Conv2d(4, 4, 3, groups=4), (torch.ones(1, 4, 8, 8),))
    ours, atens = tmp_path / "ours.pt2", tmp_path / "atens.pt2"
    torch.export.save(program, ours)
    torch.export.save(program.run_decompositions(), atens)

    def load(path: Path, first: str = "") -> subprocess.CompletedProcess[str]:
        code = [sys.executable, "-c", LOAD.format(first=first), str(path)]
        return subprocess.run(code, capture_output=True, text=True, check=False)

    failed = load(ours)
    assert failed.returncode != 0
    assert "torch.ops.convgrad.convolution.default" in failed.stderr
    assert "import the custom op" in failed.stderr
    assert load(ours, "import convgrad").stdout.split() == ["1", "True"]
    assert load(atens).stdout.split() == ["1", "False"]
