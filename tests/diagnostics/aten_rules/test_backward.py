"""The checks of convolution_backward against PyTorch, and the holes in them, each seen in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from convgrad.diagnostics.aten_rules import Machine, TensorSpec, check_backward, make_call, unchecked
from convgrad.errors import ShapeError

X, W = TensorSpec((2, 4, 9, 9)), TensorSpec((4, 4, 3, 3))
BACKWARD = torch.ops.aten.convolution_backward


def theirs(grad: tuple[int, ...], output_padding: int = 0, transposed: bool = False) -> str:
    lists = ([1, 1], [0, 0], [1, 1], transposed, [output_padding] * 2, 1, [True, True, False])
    with pytest.raises(RuntimeError) as error:
        BACKWARD(torch.zeros(grad), torch.zeros(X.shape), torch.zeros(W.shape), None, *lists)
    return str(error.value).splitlines()[0]


@pytest.mark.parametrize(("grad", "output_padding"), [((2, 4, 7), 0), ((2, 4, 7, 7), 1)])
def test_what_is_checked_is_refused_in_pytorchs_words(grad: tuple[int, ...], output_padding: int) -> None:
    call = make_call(X, W, output_padding=output_padding)
    with pytest.raises(ShapeError) as ours:
        check_backward(call, grad)
    assert str(ours.value) == theirs(grad, output_padding)


def test_a_good_call_has_no_holes() -> None:
    call = make_call(X, W)
    check_backward(call, call.output_shape)
    assert unchecked(call, call.output_shape, [4]) == []
    assert unchecked(call, call.output_shape, None, (True, True, False)) == []


def process(code: str) -> subprocess.CompletedProcess[str]:
    lines = f"""
import torch
def back(grad, input, weight, sizes, mask):
    rest = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask)
    return torch.ops.aten.convolution_backward(grad, input, weight, sizes, *rest)
{code}
"""
    return subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
def test_onednn_refuses_a_wrong_grad_output() -> None:
    (text,) = unchecked(make_call(X, W), (1, 4, 7, 7))
    assert "oneDNN refuses it" in text
    done = process(
        "back(torch.zeros(1, 4, 7, 7), torch.zeros(2, 4, 9, 9), torch.zeros(4, 4, 3, 3), None, [True, True, False])"
    )
    assert "could not create a primitive descriptor" in done.stderr


def test_pytorchs_own_kernels_trust_it() -> None:
    x, w = (TensorSpec(t.shape, dtype=torch.float64) for t in (X, W))
    (text,) = unchecked(make_call(x, w), (5, 4, 7, 7))
    assert "own kernels trust it" in text
    done = process(
        "x, w = torch.zeros(2, 4, 9, 9).double(), torch.zeros(4, 4, 3, 3).double()\n"
        "print(back(torch.zeros(5, 4, 7, 7).double(), x, w, None, [True, False, False])[0].shape)"
    )
    assert done.returncode != 0 or "torch.Size([2, 4, 9, 9])" in done.stdout  # it never says what is wrong
    assert "grad_output" not in done.stderr


def test_meta_accepts_any_shape() -> None:
    (text,) = unchecked(make_call(X.on("meta"), W.on("meta")), (7, 7, 7, 7), machine=Machine(device_type="meta"))
    assert "any shape is accepted" in text
    tensors = (torch.empty(s, device="meta") for s in ((7, 7, 7, 7), X.shape, W.shape))
    BACKWARD(*tensors, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])


def test_bias_sizes() -> None:
    (text,) = unchecked(make_call(X, W), (2, 4, 7, 7), [3])
    assert "it is ignored" in text
    args = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, False, True])
    got = BACKWARD(torch.ones(2, 4, 7, 7), torch.zeros(X.shape), torch.zeros(W.shape), [3], *args)[2]
    assert got.shape == (4,)
    empty = make_call(TensorSpec((0, 4, 9, 9)), W)
    assert "ends the process" in unchecked(empty, (0, 4, 7, 7))[0]
    done = process(
        "back(torch.zeros(0, 4, 7, 7), torch.zeros(0, 4, 9, 9), torch.zeros(4, 4, 3, 3), None, [False] * 2 + [True])"
    )
    assert done.returncode != 0
