"""The backward of a strided channels_last 1x1 convolution with rows left over kills PyTorch 2.13 (oneDNN).

So does that of a transposed one with output_padding, which leaves rows over in its output.

Each way by which the call can reach ATen is tried in a process of its own, since a corrupted heap dies at any time: a
fork of one that has imported PyTorch and done nothing else.
"""

import subprocess
import sys

import pytest

SCRIPT = """
import os, sys, torch, convgrad
torch.set_num_threads(1)
convgrad.set_default_backend("aten")
failed = []
for d, way in {ways}:
    child = os.fork()
    if child == 0:
        break
    if os.waitpid(child, 0)[1]:
        failed.append((d, way))
else:
    sys.exit(str(failed) if failed else 0)
layout = torch.channels_last if d == 2 else torch.channels_last_3d
transposed = way == "transposed"
name, sizes = ("conv_transpose", (4, 3)) if transposed else ("conv", (3, 4))
options = {{"stride": 2, "output_padding": 1}} if transposed else {{"stride": 2}}
conv = getattr(convgrad, f"{{name}}{{d}}d")
if way == "compiled":
    conv = torch.compile(conv, backend="aot_eager")
for i in range(60):
    x = torch.randn(2, 4, *[10] * d).contiguous(memory_format=layout).requires_grad_()
    w = torch.randn(*sizes, *[1] * d).contiguous(memory_format=layout).requires_grad_()
    if way == "operator":
        y = torch.ops.convgrad.convolution(x, w, None, [2] * d, [0] * d, [1] * d, False, [0] * d, 1)
    else:
        y = conv(x, w, **options)
    g = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, w), g)
    kept = [torch.randn(17 + i) for _ in range(50)]  # the heap is looked at here
with convgrad.use_backend("reference"):
    y = getattr(convgrad, f"{{name}}{{d}}d")(x, w, **options)
torch.testing.assert_close(got, torch.autograd.grad(y, (x, w), g), rtol=1e-4, atol=1e-4)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork here")
@pytest.mark.parametrize(
    "ways",
    [
        [(2, "function"), (3, "transposed")],
        pytest.param([(2, "operator"), (3, "function"), (2, "transposed")], marks=pytest.mark.slow),
        pytest.param([(2, "compiled")], marks=pytest.mark.slow),
    ],
    ids=["eager", "eager, the others", "compiled"],
)
def test_the_process_survives(ways: list[tuple[int, str]]) -> None:
    command = [sys.executable, "-c", SCRIPT.format(ways=ways)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
