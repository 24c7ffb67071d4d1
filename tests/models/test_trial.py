"""A model tried out on example inputs: what is learnt from them, and that no trace of it stays."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import convgrad
from convgrad.engine import plan_for
from convgrad.models import accelerate, accelerate_, observe_aten, worth

from .modules import OURS, fingerprint, image, same
from .taken_over import world_of_one

pytestmark = pytest.mark.usefixtures("brief_trial")


def test_a_layer_that_cannot_gain_stays_stock_and_says_for_what_sizes():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
    with convgrad.use_backend("aten"):
        report = accelerate_(model, example_inputs=image())
        assert "2x4x6x5" in report.left["0"]
        assert "any usual size" in accelerate_(model).left["0"]
    assert type(model[0]) is nn.Conv2d
    with convgrad.use_backend(OURS):
        assert accelerate_(model, example_inputs=(image(),)).replaced


def test_what_is_tried_is_not_recorded():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), convgrad.nn.Conv2d(4, 4, 1))
    with observe_aten(), convgrad.trace() as t:
        accelerate_(model, "auto", example_inputs=image())
        assert not t.records
        model(image())
    assert len(t) == 2


def test_a_layer_that_the_examples_never_reach_is_left():
    model = nn.Sequential(nn.Conv2d(4, 4, 1))
    model.never = nn.Conv2d(4, 4, 1)
    model.forward = model[0].forward
    with convgrad.use_backend(OURS):
        report = accelerate_(model, example_inputs={"input": image()})
    assert report.left["never"] == "the example inputs never reached it, in evaluation"


def test_an_input_by_keyword_is_seen():
    class Model(nn.Sequential):
        def forward(self, input):
            return self[0](input=input)

    model = Model(nn.Conv2d(4, 4, 1))
    with convgrad.use_backend(OURS):
        assert accelerate_(model, example_inputs=image()).replaced


def test_looking_at_the_sizes_changes_nothing():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Dropout())
    x, before, state = image(), fingerprint(model), torch.random.get_rng_state()
    with convgrad.use_backend("aten"):
        accelerate_(model, "auto", example_inputs=x).restore()
    assert same(fingerprint(model), before)
    assert torch.equal(torch.random.get_rng_state(), state)


class Counted(nn.Module):
    """A parametrization that, as spectral_norm's, changes a buffer where a weight is computed in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("times", torch.zeros(()))

    def forward(self, weight):
        self.times += self.training
        return weight


@pytest.mark.parametrize("memory_format", [None, "auto"])
def test_looking_at_a_parametrized_weight_changes_nothing_and_a_call_computes_it_once(memory_format):
    model = nn.Sequential(nn.Conv2d(4, 32, 1), nn.Conv2d(32, 32, 3, groups=32), nn.Flatten(), nn.Linear(32 * 12, 5))
    for name in ("0", "1", "3"):
        parametrize.register_parametrization(model.get_submodule(name), "weight", Counted())
    before = [int(b) for b in model.buffers()]
    accelerate_(model, memory_format, only_gains=False)
    assert [int(b) for b in model.buffers()] == before
    model(torch.randn(2, 4, 6, 5))
    assert [int(b) for b in model.buffers()] == [b + 1 for b in before]


def test_buffers_that_cannot_be_written_to_are_no_hindrance():
    with torch.inference_mode():
        inference = torch.ones(3)
    model = nn.Sequential(nn.Conv2d(32, 32, 3, groups=32))
    model.register_buffer("expanded", torch.ones(1).expand(5))
    model.register_buffer("inference", inference)
    assert accelerate_(model, only_gains=False).counts[0] == (1, 1)


class NoCopy(nn.Conv2d):
    def __deepcopy__(self, memo):
        raise AssertionError("there is only one of me")  # as fully_shard does


def test_a_model_that_cannot_be_copied_is_tried_itself():
    model, x = nn.Sequential(NoCopy(4, 4, 3), nn.BatchNorm2d(4)), image()
    before = model[1].running_mean.clone()
    with convgrad.use_backend(OURS):
        report = accelerate_(model, "auto", example_inputs=x)
    assert list(report.replaced) == ["0"]
    assert "cannot be copied" in report.layout
    assert torch.equal(model[1].running_mean, before)
    assert model.training
    assert not model[0]._forward_pre_hooks


def test_the_parameters_of_a_sharded_model_are_those_that_are_trained(tmp_path):
    from torch.distributed.fsdp import fully_shard

    with world_of_one(tmp_path):
        model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
        for module in (model[0], model):
            fully_shard(module, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        before = [*model.parameters()]
        accelerate_(model, example_inputs=image())
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))


class Counts(NoCopy):
    def __init__(self):
        super().__init__(4, 4, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, input):
        self.calls += 1
        raise ValueError("this input is none of mine")


def test_a_model_that_raises_has_its_buffers_back():
    model = Counts()
    with pytest.raises(ValueError, match="none of mine"):
        accelerate_(model, example_inputs=image())
    assert model.calls.item() == 0


def test_layers_alike_are_judged_once(monkeypatch):
    asked = []
    monkeypatch.setattr(accelerate, "plan_for", lambda *call: asked.append(call) or plan_for(*call))
    accelerate_(nn.Sequential(*(nn.Conv2d(64, 64, 3) for _ in range(3))))
    assert len(asked) == len({*asked}) > 0


def test_a_layer_is_judged_in_the_layout_that_it_sees(monkeypatch):
    layouts = []

    def found(problem, *_):
        layouts.append(problem.channels_last)
        return not problem.channels_last

    monkeypatch.setattr(worth, "_any_but_aten", found)
    for x, weights, replaced in (
        (torch.randn(2, 32, 8, 8), torch.contiguous_format, ["0"]),
        (torch.randn(2, 32, 8, 8).contiguous(memory_format=torch.channels_last), torch.contiguous_format, []),
        (torch.randn(2, 32, 8, 8), torch.channels_last, []),  # its weight turns the result
    ):
        layouts.clear()
        model = nn.Sequential(nn.Conv2d(32, 64, 1)).to(memory_format=weights)
        assert list(accelerate_(model, example_inputs=x).replaced) == replaced
        assert layouts == [not replaced]
