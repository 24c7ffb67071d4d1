"""`accelerate_`: everything that a module can do it still can, and `restore` leaves no trace."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import convgrad
from convgrad.backends import warn_if_absent
from convgrad.models import accelerate_

from .modules import FAST, ComputesItself, OwnName, fingerprint, image, runs_ours, same


@pytest.mark.parametrize("cls", FAST)
def test_each_class_forward_and_backward_and_back(cls):
    model = nn.Sequential(cls(4, 6, 3, stride=2, padding=1, groups=2), nn.ReLU())
    x = image(cls)
    before, text = fingerprint(model), repr(model)
    want = model(x)
    report = accelerate_(model, only_gains=False)
    assert list(report.replaced) == ["0"]
    assert repr(model) == text
    assert isinstance(model[0], cls)
    torch.testing.assert_close(model(x), want)
    kinds = ["grad_input", "grad_weight"] if "Transpose" in cls.__name__ else ["forward", "grad_weight"]
    assert runs_ours(model, x) == kinds
    model.zero_grad()
    report.restore()
    assert same(fingerprint(model), before)
    assert runs_ours(model, x) == []


class ConvBlock(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.filterwarnings("ignore:.*quantized", "ignore::DeprecationWarning")
def test_quantized_and_integer_and_scripted_layers_are_left():
    script = torch.jit.script(nn.Conv2d(4, 4, 3))
    quantized = torch.ao.nn.quantized.Conv2d(4, 4, 3)
    fp8 = nn.Conv2d(4, 4, 3).to(torch.float8_e4m3fn)
    others = {"linear": torch.ao.nn.quantized.Linear(4, 4), "convs": torch.jit.script(ConvBlock())}
    report = accelerate_(nn.ModuleDict({"q": quantized, "s": script, "f": fp8, **others}), only_gains=False)
    assert (report.replaced, {*report.left}) == ({}, {"q", "s", "f"})
    assert report.left["s"] == "it is scripted; convgrad.takeover() computes it"
    assert report.left["q"] == "it is quantized"
    assert "float8" in report.left["f"]


def test_a_model_accelerated_twice_says_so_and_the_first_report_restores():
    model = nn.Sequential(nn.Conv2d(4, 4, 3))
    first = accelerate_(model, only_gains=False)
    second = accelerate_(model, only_gains=False)
    assert second.left == {"0": "convgrad computes it already"}
    assert second.summary.startswith("0 of 1 convolutions replaced (1 already)")
    second.restore()
    assert type(model[0]) is convgrad.nn.Conv2d
    first.restore()
    first.restore()
    assert type(model[0]) is nn.Conv2d


def test_sizes_may_be_numbers_of_numpy():
    one, x = np.int64(1), torch.randn(2, 64, 16, 16)
    model = nn.Sequential(nn.Conv2d(64, 64, 1, stride=(one, one)), nn.Conv2d(64, 64, 5, padding=one + 1, groups=64))
    expected = model(x)
    assert "1" in convgrad.accelerate_(model).replaced
    torch.testing.assert_close(model(x), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled():
    model, x = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), OwnName(4)), image()
    want = model(x)
    report = accelerate_(model, only_gains=False)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(x), want)
    compiled(x).sum().backward()
    report.restore()
    torch.testing.assert_close(compiled(x), want)


class Speechless(nn.Conv2d):
    def extra_repr(self):
        raise ValueError("it has no words")


def test_a_layer_that_raises_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), Speechless(4, 4, 3, groups=4))
    before = fingerprint(model)
    with pytest.raises(ValueError, match="no words"):
        accelerate_(model, "channels_last", only_gains=False)
    assert same(fingerprint(model), before)
    assert not model._forward_pre_hooks


# ---- batch normalization -------------------------------------------------------------------------


class Activated(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input).relu()


class CallsFunction(nn.BatchNorm2d):
    """As timm's: batch normalization and more, written anew."""

    def forward(self, input):
        running = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        normalized = nn.functional.batch_norm(
            input, *running, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return normalized.relu_()


class Normalizes(nn.BatchNorm2d):
    def forward(self, input):
        return (input - input.mean((0, 2, 3), keepdim=True)) * self.weight[:, None, None]


def net():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16), Activated(16),
        nn.Conv2d(16, 16, 1), CallsFunction(16),
        nn.AvgPool2d(2), nn.Flatten(2), nn.BatchNorm1d(16), nn.Flatten(), nn.Linear(16 * 14 * 14, 4),
    )  # fmt: skip


def test_a_net_trained_for_some_steps_is_stocks():
    theirs = net()
    ours = copy.deepcopy(theirs)
    report = accelerate_(ours, only_gains=False)
    assert report.counts == ((3, 3), (4, 4), (1, 1))
    assert report.summary.startswith("3 of 3 convolutions replaced, 4 of 4 normalizations, 1 of 1 linear layers;")
    losses = []
    for model in (theirs, ours):
        torch.manual_seed(5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(4):
            loss = nn.functional.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.arange(8) % 4)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[4:] == pytest.approx(losses[:4], rel=1e-4)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-3, atol=1e-4)
    twin = pickle.loads(pickle.dumps(ours))
    assert [type(m) for m in twin] == [type(m) for m in ours]
    report.restore()
    assert [type(m) for m in ours] == [type(m) for m in theirs]


def test_a_normalization_is_left_with_a_reason():
    model = nn.Sequential(nn.BatchNorm2d(4, affine=False), Normalizes(4), nn.GroupNorm(2, 4))
    report = accelerate_(model)
    assert report.left.keys() == {"1"}
    assert "Normalizes.forward" in report.left["1"]
    assert report.summary.startswith("0 of 0 convolutions replaced, 1 of 2 normalizations;")
    assert list(accelerate_(nn.BatchNorm2d(4)).replaced) == [""]


def test_a_lazy_normalization():
    model = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.LazyInstanceNorm2d())
    report = accelerate_(model, only_gains=False)
    model(torch.zeros(4, 3, 64, 64))
    assert [type(m) for m in model] == [convgrad.nn.Conv2d, convgrad.nn.BatchNorm2d, convgrad.nn.InstanceNorm2d]
    report.restore()
    assert [type(m) for m in model] == [nn.Conv2d, nn.BatchNorm2d, nn.InstanceNorm2d]
    lazy = nn.LazyBatchNorm2d()
    accelerate_(lazy).restore()
    assert type(lazy) is nn.LazyBatchNorm2d


# ---- the report, and what is refused -------------------------------------------------------------


def test_the_report_says_why_nothing_was_replaced():
    assert str(accelerate_(nn.LayerNorm(2))).startswith("no layer is of a kind that convgrad computes")
    net = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4), nn.Linear(512, 512))
    left = accelerate_(net.to("meta")).left
    assert all("on the meta device" in why for why in left.values())


def test_the_report_is_a_table():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), ComputesItself(4, 4, 3))
    report = accelerate_(model, only_gains=False)
    lines = str(report).splitlines()
    assert lines[0].startswith("1 of 2 convolutions replaced")
    assert lines[2].split(maxsplit=2) == ["0", "convgrad", "Conv2d(4, 4, kernel_size=(3, 3), stride=(1, 1))"]
    assert lines[3].startswith("1")
    assert "<table>" in report._repr_html_()


def test_layers_of_one_class_that_are_replaced_share_a_row():
    model = nn.Sequential(*(nn.Conv2d(4, 4, k, padding_mode="circular") for k in (1, 3, 5, 7)))
    model.append(nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4), nn.ReLU6()))
    rows = [line.split() for line in str(accelerate_(model, only_gains=False)).splitlines()[2:]]
    assert rows == [
        ["0", "and", "3", "more", "convgrad", "Conv2d"],
        ["4.0", "convgrad", "Conv1d(4,", "4,", "kernel_size=(3,),", "stride=(1,))"],
        ["4.1,", "4.3", "convgrad", "BatchNorm2d"],
    ]


def test_layers_that_stay_for_one_reason_share_a_row():
    small = (nn.Conv2d(4, 4, 1), nn.Conv2d(4, 8, 1, 2), nn.Conv2d(8, 8, 1))
    for layers, named in ((small, "0, 1, 2"), ((*small, nn.Conv2d(8, 8, 1)), "0 and 3 more")):
        with convgrad.use_backend("aten"):
            report = accelerate_(nn.Sequential(*layers, ComputesItself(8, 8, 1)))
        rows = [line.split("as it was")[0].strip() for line in str(report).splitlines()[2:]]
        assert rows == [named, str(len(layers))]


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        accelerate_(lambda x: x)
    with pytest.raises(ValueError, match="channels_last"):
        accelerate_(nn.Conv2d(1, 1, 1), "nhwc")
    with pytest.raises(ValueError, match="preserve"):
        accelerate_(nn.Conv2d(1, 1, 1), torch.preserve_format)
    with pytest.raises(TypeError, match=r"memory_format is a name, got Tensor; .*example_inputs="):
        accelerate_(nn.Conv2d(4, 4, 3), torch.zeros(1, 4, 8, 8))
    with pytest.raises(TypeError, match=r"not the shape of one: torch\.randn\(8, 1, 9, 9\)"):
        accelerate_(nn.Conv2d(1, 1, 1), example_inputs=(8, 1, 9, 9))
    with pytest.raises(TypeError, match="or a dict of keywords, got 'image'"):
        accelerate_(nn.Conv2d(1, 1, 1), example_inputs="image")


def test_no_compiled_kernels_are_told_first_and_warned_of_once(monkeypatch) -> None:
    for where in ("backends._native_library", "models.accelerate"):
        monkeypatch.setattr(f"convgrad.{where}.why_absent", lambda: "there is no compiler")
    report = accelerate_(nn.Sequential(nn.Conv2d(4, 4, 3)), dry_run=True)
    assert str(report).splitlines()[0] == "NO COMPILED KERNELS: there is no compiler"
    assert "expected to be faster" not in str(report)
    warn_if_absent.cache_clear()
    with pytest.warns(RuntimeWarning, match="NO COMPILED KERNELS: there is no compiler"):
        convgrad.conv1d(torch.ones(1, 2, 9), torch.ones(2, 2, 3))
    convgrad.conv1d(torch.ones(1, 2, 8), torch.ones(2, 2, 3))  # not again
    warn_if_absent.cache_clear()
