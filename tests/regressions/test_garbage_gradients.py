"""The bfloat16 weight gradient of a shallow volume, in which PyTorch 2.13 (oneDNN, AVX-512) adds up unwritten memory.

Every way by which a model can reach it, in a process whose memory is poisoned; stock PyTorch is off by 1e37 there.
"""

import os
import subprocess
import sys

import pytest

from convgrad.check.child import POISON

SCRIPT = """
import sys, torch, convgrad
torch.set_num_threads(1)
conv = torch.nn.Conv3d(16, 16, 3, padding=1).bfloat16()
x, g = (torch.randint(-2, 3, (2, 16, 2, 9, 9)).bfloat16() for _ in "xg")
form = ([1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1)
w = conv.weight.detach()
zero = torch.zeros(w.shape, dtype=torch.float64)
want = torch.ops.aten.convolution_backward(g.double(), x.double(), zero, None, *form, [False, True, False])[1]


def check(way, got):
    assert torch.equal(got.double(), want.bfloat16().double()), (way, (got.double() - want).abs().max())


def trained(module):
    module.zero_grad()
    module(x).backward(g)
    return conv.weight.grad


with convgrad.takeover():
    check("takeover", trained(conv))
    if "compiled" in sys.argv:
        check("takeover, compiled", trained(torch.compile(conv, backend="aot_eager")))
for options in {}, {"example_inputs": x}:
    model = torch.nn.Sequential(conv)
    report = convgrad.accelerate_(model, **options)
    check("accelerate_", trained(model))
    report.restore()
check("function", convgrad.grad_weight(x, w.shape, g, padding=1))
check("operator", torch.ops.convgrad.grad_weight(g, x, w.shape, *form))
check("all three", convgrad.convolution_backward(g, x, w, [16], padding=1)[1])
v = w.clone().requires_grad_()
convgrad.conv3d(x, v, padding=1).backward(g)
check("autograd", v.grad)
"""


@pytest.mark.parametrize("how", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_every_way_is_right(how: str) -> None:
    glibc = {"MALLOC_PERTURB_": str(POISON), "GLIBC_TUNABLES": f"glibc.malloc.perturb={POISON}"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, how],
        env=os.environ | glibc | {"CONVGRAD_CACHE": "off", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
