"""A model whose layouts are timed on example inputs: nothing of that stays."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import convgrad
from convgrad.engine import plan_for
from convgrad.models import accelerate, accelerate_, observe_aten, training_step

from .modules import OURS, image
from .taken_over import world_of_one

pytestmark = pytest.mark.usefixtures("brief_trial")


def test_a_layer_that_cannot_gain_stays_stock():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
    with convgrad.use_backend("aten"):
        assert "any usual size" in accelerate_(model).left["0"]
    assert type(model[0]) is nn.Conv2d
    with convgrad.use_backend(OURS):
        assert accelerate_(model).replaced


def test_what_is_tried_is_not_recorded():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), convgrad.nn.Conv2d(4, 4, 1))
    with observe_aten(), convgrad.trace() as t:
        accelerate_(model, "auto", example_inputs=image())
        assert not t.records
        model(image())
    assert len(t) == 2


class NoCopy(nn.Conv2d):
    def __deepcopy__(self, memo):
        raise AssertionError("there is only one of me")  # as fully_shard does


def test_a_model_that_cannot_be_copied_is_not_run():
    model, x = nn.Sequential(NoCopy(4, 4, 3), nn.BatchNorm2d(4)), image()
    before = model[1].running_mean.clone()
    with convgrad.use_backend(OURS):
        report = accelerate_(model, "auto", example_inputs=x)
    assert "0" in report.replaced
    assert "cannot be copied" in report.layout
    assert torch.equal(model[1].running_mean, before)
    assert model.training


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_a_step_has_a_backward_wherever_it_runs_and_of_complex_outputs_too(around):
    layer = nn.Conv1d(2, 2, 3, bias=False, dtype=torch.complex64)
    step = training_step(layer, torch.ones(1, 2, 5, dtype=torch.complex64))
    with around():
        (gradient,) = step()
    assert torch.equal(gradient, torch.full((2, 2, 3), 3 + 3j))


def test_a_step_has_a_backward_of_outputs_in_a_dataclass():
    @dataclass(slots=True)
    class Outputs:
        logits: torch.Tensor

    class Net(nn.Conv1d):
        def forward(self, x):
            return Outputs(super().forward(x))

    assert len(training_step(Net(2, 2, 3), torch.ones(1, 2, 5))()) == 2


def test_the_parameters_of_a_sharded_model_are_those_that_are_trained(tmp_path):
    from torch.distributed.fsdp import fully_shard

    with world_of_one(tmp_path):
        model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
        for module in (model[0], model):
            fully_shard(module, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        before = [*model.parameters()]
        accelerate_(model, example_inputs=image())
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))


def test_layers_alike_are_judged_once(monkeypatch):
    asked = []
    monkeypatch.setattr(accelerate, "plan_for", lambda *call: asked.append(call) or plan_for(*call))
    accelerate_(nn.Sequential(*(nn.Conv2d(64, 64, 3) for _ in range(3))))
    assert len(asked) == len({*asked}) > 0
