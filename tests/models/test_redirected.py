"""A user's forward that calls torch's functions: what computes them."""

import pytest
import torch

import convgrad
from convgrad.diagnostics import Trace
from convgrad.models import accelerate_

from .modules import OURS, CallsFunction, OwnConvForward, image


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit's
@pytest.mark.parametrize("make", [lambda: CallsFunction(4, 4, 3), lambda: OwnConvForward(4, 4, 3)])
def test_a_function_that_the_class_calls_is_ours(make):
    """In transforms and in compiled and exported programs, too; a graph of torch.fx has what the user wrote."""
    model, x = make(), image()
    want = model(x)
    accelerate_(model, only_gains=False)
    ways = (
        model,
        lambda x: torch.func.functional_call(model, dict(model.named_parameters()), (x,)),
        torch.vmap(model),
        torch.jit.trace(model, x),
        torch.compile(model, backend="eager", fullgraph=True),
        torch.export.export(model, (x,)).module(),
        torch.fx.symbolic_trace(model),
    )
    for way in ways:
        with Trace() as seen, convgrad.use_backend(OURS):
            torch.testing.assert_close(way(x), want)
        assert [r.backend for r in seen] == ([OURS] if way is not ways[-1] else [])


def test_a_forward_that_the_class_is_given_later(monkeypatch):
    model, x = CallsFunction(4, 4, 3), image()
    want = model(x)
    accelerate_(model, only_gains=False)
    forward = CallsFunction.forward
    monkeypatch.setattr(CallsFunction, "forward", lambda self, input: 2 * forward(self, input))
    torch.testing.assert_close(model(x), 2 * want)
