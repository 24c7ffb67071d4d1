"""A Triton kernel as a user's kernel, run by Triton's interpreter in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = '''
import torch
import triton
import triton.language as tl

import convgrad


@triton.jit
def causal_kernel(x, w, y, channels, length, K: tl.constexpr, BLOCK: tl.constexpr):
    """One row of [N * C, L]: y[t] = sum over k of w[k] * x[t + k - (K - 1)]."""
    row = tl.program_id(0)
    t = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        at = t + k - (K - 1)
        value = tl.load(x + row * length + at, mask=(at >= 0) & (t < length), other=0.0)
        total += value * tl.load(w + (row % channels) * K + k)
    tl.store(y + row * length + t, total, mask=t < length)


def causal(input, weight):
    n, c, length = input.shape
    y = torch.empty_like(input)
    causal_kernel[(n * c,)](input, weight, y, c, length, K=weight.shape[2], BLOCK=triton.next_power_of_2(length))
    return y


backend = convgrad.register(
    "causal",
    forward=causal,
    args=("input", "weight"),
    accepts=lambda p: p.ndim == 1 and p.depthwise and p.in_channels == p.out_channels
    and p.batch * p.in_channels <= 12 and p.stride == p.dilation == (1,) and p.padding == ((p.kernel_size[0] - 1, 0),),
    layouts=("contiguous",),
    dtypes=(torch.float32,),
    seconds=5,
)
assert backend.verified, backend.note

x, w = torch.randn(2, 3, 9, requires_grad=True), torch.randn(3, 1, 4, requires_grad=True)
with convgrad.trace() as seen:
    y = convgrad.convolution(x, w, padding=(3, 0), groups=3)
    y.square().sum().backward()
assert [r.backend for r in seen if r.outputs == "forward"] == ["causal"], seen
expected = torch.nn.functional.conv1d(torch.nn.functional.pad(x, (3, 0)), w, groups=3)
torch.testing.assert_close(y, expected)
for a, b in zip((x.grad, w.grad), torch.autograd.grad(expected.square().sum(), (x, w))):
    torch.testing.assert_close(a, b)
print(backend.note)
'''


def test_a_triton_kernel(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    script = tmp_path / "causal.py"  # Triton reads the source of a kernel from its file
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("verified on ")
