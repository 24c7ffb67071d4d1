"""Runs in a process that `test_processes` starts: entries of the table that launch, onto the stand-in driver.

The operands are on the CPU, where nothing reads them; so are the kernels of the table that launch.
"""

from collections.abc import Iterator

import pytest
import torch
from tests.standin_cuda import Driver, Launched, operand
from torch.nn import functional as F

import convgrad
from convgrad.ops import opened


@pytest.fixture(autouse=True)
def _by_triton(driver: Driver) -> Iterator[None]:
    driver.take_calls()
    yield
    convgrad.set_default_backend(None)


def apart_from_addresses(launched: list[Launched]) -> list[object]:
    """What a launch has beside the stream and the pointers, which differ from call to call."""
    return [
        (r.kernel, r.function, r.grid, r.block, r.shared, [(n, v if n < 8 else None) for n, v in r.parameters])
        for r in launched
    ]


@pytest.mark.parametrize("block", ["function", "takeover"])
@pytest.mark.parametrize("aligned", [True, False])
def test_a_call_that_was_seen_is_launched_without_python(driver: Driver, block: str, aligned: bool) -> None:
    shape, layout = (2, 16, 12, 16), torch.contiguous_format
    x = operand(shape, torch.float32, layout, aligned).requires_grad_()
    w = operand((16, 1, 3, 3), torch.float32, layout, True).requires_grad_()
    g = operand(shape, torch.float32, layout, True)
    conv = convgrad.conv2d if block == "function" else F.conv2d
    table = opened()
    assert table is not None

    def step() -> tuple[list[object], list[object]]:
        driver.reset()
        y = conv(x, w, padding=1, groups=16)
        forward = apart_from_addresses(driver.launched())
        driver.reset()
        torch.autograd.grad(y, (x, w), g)
        return forward, apart_from_addresses(driver.launched())

    if block == "takeover":
        with convgrad.takeover():
            steps = [step() for _ in range(3)]
    else:
        steps = [step() for _ in range(3)]
    assert steps[0] == steps[1] == steps[2]
    assert all(len(launched) >= 1 for launched in steps[2])
    # The driver got the last ones from the table: on stream 0, where Triton's launcher has the one of PyTorch.
    assert {r.stream for r in driver.launched()} == {None}


def test_an_operand_of_another_alignment_is_computed_in_python(driver: Driver) -> None:
    shape, layout = (2, 8, 12, 16), torch.contiguous_format
    w = operand((8, 1, 3, 3), torch.float32, layout, True)
    streams = []
    with torch.no_grad():
        for aligned in (True, True, False):
            driver.reset()
            convgrad.conv2d(operand(shape, torch.float32, layout, aligned), w, padding=1, groups=8)
            streams.append({r.stream for r in driver.launched()})
    assert streams[1] == {None}
    assert None not in streams[2]
