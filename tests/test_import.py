"""What `import convgrad` costs and drags in."""

import importlib
import json
import os
import subprocess
import sys

import pytest

PROBE = """
import json, sys, time
import torch
before, start = {*sys.modules}, time.process_time()
import convgrad as c
seconds, cuda = time.process_time() - start, torch.cuda.is_initialized()
imported = {*sys.modules}
import convgrad.engine.measure, convgrad.problem
x = torch.ones(1, 8, 9, 9, requires_grad=True)
for call in (
    lambda: c.conv2d(x, torch.ones(8, 1, 3, 3, requires_grad=True), groups=8),
    lambda: c.conv2d(x, torch.ones(4, 8, 3, 3, requires_grad=True)),
    lambda: c.conv_transpose1d(x.flatten(2), torch.ones(8, 4, 3, requires_grad=True)),
    lambda: c.grad_weight(x, (4, 8, 3, 3), torch.ones(1, 4, 7, 7)),
    lambda: (c.accelerate_(model := torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3, groups=8))), model(x))[1],
):
    call().sum().backward()
called = {*sys.modules} - imported
print(json.dumps({"seconds": seconds, "cuda": cuda, "imported": [*imported - before], "called": [*called]}))
"""
# numpy and sympy are torch's own guests: no fault of ours where it brings them itself.
UNWANTED = {
    "IPython", "click", "hypothesis", "matplotlib", "numpy", "platformdirs", "pytest", "rich", "scipy", "sympy",
    "transformers", "triton", "typer",
}  # fmt: skip


@pytest.fixture(scope="module")
def fresh() -> dict:
    """One import and the first calls in a fresh process; the test fails if it prints anything or warns."""
    command = [sys.executable, "-W", "error", "-c", PROBE]
    # An installed package is compiled once; where this variable is set, every import would compile it anew.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stdout
    return json.loads(lines[0])


def test_import_is_quiet_and_quick_and_loads_nothing_that_does_not_compute(fresh):
    assert not fresh["cuda"]
    assert "convgrad.backends.triton" in fresh["imported"]  # which needs no triton
    assert not {name.split(".")[0] for name in fresh["imported"]} & UNWANTED
    assert not [name for name in fresh["imported"] if name.startswith(("convgrad.check", "convgrad.diagnostics"))]
    # 0.1 s of the processor's time on an idle machine; ten times that where it is busy, or reads from a slow disk
    assert fresh["seconds"] < 1


def test_no_first_call_waits_for_the_compiler(fresh):
    """Of PyTorch: a second with what it imports."""
    assert not {"sympy", "triton", "torch._dynamo"} & {*fresh["called"]}


@pytest.mark.parametrize("room", ["direct", "testing"])
def test_a_public_module_completes_to_its_own_names(room):
    module = importlib.import_module(f"convgrad.{room}")
    assert [name for name in dir(module) if not name.startswith("__")] == sorted(module.__all__)
