"""`accelerate_`: everything that a module can do it still can, and `restore` leaves no trace."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import convgrad
from convgrad.engine.trace import Trace
from convgrad.models import accelerate_

OURS = "im2col"
FAST = [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]


def image(cls=nn.Conv2d, channels=4):
    d = int(cls.__name__[-2])
    return torch.randn(2, channels, *(6, 5, 4)[:d])


def fingerprint(model):
    """All that restore promises to bring back: classes, objects, layouts, values, hooks."""
    modules = [(id(m), type(m), sorted(m.__dict__), len(m._forward_pre_hooks)) for m in model.modules()]
    tensors = [(n, id(t), t.stride(), t.clone()) for n, t in model.state_dict(keep_vars=True).items()]
    return modules, tensors


def same(a, b) -> bool:
    (m1, t1), (m2, t2) = a, b
    return m1 == m2 and all(x[:3] == y[:3] and torch.equal(x[3], y[3]) for x, y in zip(t1, t2, strict=True))


def runs_ours(model, x) -> list[str]:
    """Which outputs our backend computed in one training step."""
    with Trace() as seen, convgrad.use_backend(OURS):
        y = model(x)
        y.square().sum().backward()
    return [o for r in seen if r.backend == OURS for o in r.outputs.split("+")]


class OwnName(nn.Conv2d):
    """A subclass that only adds to the constructor, as real models have it."""

    def __init__(self, channels, **kwargs):
        super().__init__(channels, channels, 3, groups=channels, **kwargs)


class CallsSuper(nn.Conv2d):
    def forward(self, input):
        return super().forward(2 * input)


class CallsConvForward(nn.Conv2d):
    """A weight of its own, handed to torch's computation."""

    def forward(self, input):
        return self._conv_forward(input, self.weight - self.weight.mean(), self.bias)


class ComputesItself(nn.Conv2d):
    backend = "an attribute of the user"

    def forward(self, input):
        return F.conv2d(input, self.weight.tanh(), self.bias)


class TransposedCallsSuper(nn.ConvTranspose2d):
    def forward(self, input, output_size=None):
        return super().forward(input, output_size) + 1


# ---- what is replaced ----------------------------------------------------------------------------


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


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # PyTorch's own, once a process
@pytest.mark.parametrize("mode", ["reflect", "circular", "replicate"])
def test_padding_modes_and_same(mode):
    model = nn.Sequential(
        nn.Conv2d(4, 4, (3, 2), padding="same", padding_mode=mode), nn.Conv2d(4, 4, 2, padding="same")
    )
    x = image()
    want = model(x)
    assert len(accelerate_(model, only_gains=False).replaced) == 2
    torch.testing.assert_close(model(x), want)


@pytest.mark.parametrize("make", [
    lambda: OwnName(4), lambda: CallsSuper(4, 4, 3), lambda: CallsConvForward(4, 4, 3),
    lambda: TransposedCallsSuper(4, 4, 3),
])  # fmt: skip
def test_subclasses_that_hand_the_computation_on(make):
    model = make()
    cls, x = type(model), image()
    want = model(x)
    report = accelerate_(model, only_gains=False)
    assert list(report.replaced) == [""]
    assert isinstance(model, cls)
    assert type(model).__name__ == cls.__name__
    torch.testing.assert_close(model(x), want)
    assert runs_ours(model, x)
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model)
    torch.testing.assert_close(again(x), want)
    report.restore()
    assert type(model) is cls


def test_a_class_that_computes_itself_is_left_with_the_reason():
    model = nn.Sequential(ComputesItself(4, 4, 3))
    report = accelerate_(model, only_gains=False)
    assert "ComputesItself.forward" in report.left["0"]
    assert type(model[0]) is ComputesItself


def test_an_attribute_called_backend_belongs_to_the_user():
    class Named(nn.Conv2d):
        backend = "mine"

    model = Named(4, 4, 3)
    accelerate_(model, only_gains=False)
    assert model.backend == "mine"
    model(image())


def test_an_instance_with_a_forward_of_its_own_is_left():
    model = nn.Conv2d(4, 4, 3)
    model.forward = lambda x: x
    assert "instance" in accelerate_(model, only_gains=False).left[""]


@pytest.mark.filterwarnings("ignore:.*quantized", "ignore::DeprecationWarning")
def test_quantised_and_integer_and_scripted_layers_are_left():
    script = torch.jit.script(nn.Conv2d(4, 4, 3))
    quantised = torch.ao.nn.quantized.Conv2d(4, 4, 3)
    fp8 = nn.Conv2d(4, 4, 3).to(torch.float8_e4m3fn)
    report = accelerate_(nn.ModuleDict({"q": quantised, "s": script, "f": fp8}), only_gains=False)
    assert report.replaced == {}
    assert report.left["q"] == "it is quantised"
    assert "float8" in report.left["f"]


def test_a_layer_that_cannot_gain_stays_stock_and_says_for_what_sizes():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
    with convgrad.use_backend("aten"):
        report = accelerate_(model, example_inputs=image())
        assert "2x4x6x5" in report.left["0"]
        assert "any usual size" in accelerate_(model).left["0"]
    assert type(model[0]) is nn.Conv2d
    with convgrad.use_backend(OURS):
        assert accelerate_(model, example_inputs=(image(),)).replaced


def test_a_layer_that_the_examples_never_reach_is_left():
    model = nn.Sequential(nn.Conv2d(4, 4, 1))
    model.never = nn.Conv2d(4, 4, 1)
    model.forward = model[0].forward
    with convgrad.use_backend(OURS):
        report = accelerate_(model, example_inputs={"input": image()})
    assert report.left["never"] == "the example inputs never reached it"


def test_looking_at_the_sizes_changes_nothing():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Dropout())
    x, before, state = image(), fingerprint(model), torch.random.get_rng_state()
    with convgrad.use_backend("aten"):
        accelerate_(model, "auto", example_inputs=x).restore()
    assert same(fingerprint(model), before)
    assert torch.equal(torch.random.get_rng_state(), state)


class NoCopy(nn.Conv2d):
    def __deepcopy__(self, memo):
        raise TypeError("there is only one of me")


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


def test_a_model_accelerated_twice_says_so_and_the_first_report_restores():
    model = nn.Sequential(nn.Conv2d(4, 4, 3))
    first = accelerate_(model, only_gains=False)
    second = accelerate_(model, only_gains=False)
    assert second.left == {"0": "convgrad computes it already"}
    second.restore()
    assert type(model[0]) is convgrad.nn.Conv2d
    first.restore()
    first.restore()
    assert type(model[0]) is nn.Conv2d


# ---- parametrized, normed, lazy, hooked ----------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("norm", [
    parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal,
    nn.utils.weight_norm, nn.utils.spectral_norm,
])  # fmt: skip
@pytest.mark.parametrize("cls", [nn.Conv2d, OwnName], ids=["plain", "subclass"])
def test_normed_weights(norm, cls):
    layer = cls(4, 4, 3) if cls is nn.Conv2d else cls(4)
    model = nn.Sequential(norm(layer)).eval()
    x = image()
    before, text, want = fingerprint(model), repr(model), model(x)
    report = accelerate_(model, only_gains=False)
    assert list(report.replaced) == ["0"]
    assert repr(model) == text
    torch.testing.assert_close(model(x), want)
    assert runs_ours(model, x) == ["forward", "grad_weight"]
    if parametrize.is_parametrized(model[0]):  # PyTorch cannot copy the older kind
        torch.testing.assert_close(copy.deepcopy(model)(x), want)
    model.zero_grad()
    report.restore()
    assert same(fingerprint(model), before)
    torch.testing.assert_close(model(x), want)


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("cls", [nn.Conv2d, OwnName], ids=["plain", "subclass"])
def test_parametrizations_may_come_and_go_meanwhile(cls):
    layer = cls(4, 4, 3) if cls is nn.Conv2d else cls(4)
    x = image()
    parametrize.register_parametrization(layer, "weight", Double())
    want = layer(x)
    report = accelerate_(layer, only_gains=False)
    parametrize.remove_parametrizations(layer, "weight")
    torch.testing.assert_close(layer(x), want)
    assert runs_ours(layer, x)
    parametrize.register_parametrization(layer, "bias", Double())
    assert runs_ours(layer, x)
    want = layer(x)
    report.restore()
    assert runs_ours(layer, x) == []
    torch.testing.assert_close(layer(x), want)
    parametrize.remove_parametrizations(layer, "bias")
    assert type(layer) is cls


def test_a_second_parametrization_survives_restore():
    layer = nn.Conv2d(4, 4, 3)
    parametrize.register_parametrization(layer, "weight", Double())
    report = accelerate_(layer, only_gains=False)
    parametrize.register_parametrization(layer, "bias", Double())
    want = layer(x := image())
    report.restore()
    torch.testing.assert_close(layer(x), want)
    assert not isinstance(layer, convgrad.nn.Conv2d)


@pytest.mark.parametrize("cls", [nn.LazyConv2d, nn.LazyConvTranspose2d])
def test_lazy_modules(cls):
    model, x = nn.Sequential(cls(4, 3)), image()
    report = accelerate_(model, only_gains=False)
    assert list(report.replaced) == ["0"]
    runs = runs_ours(model, x)
    assert runs == (["grad_input", "grad_weight"] if "Transpose" in cls.__name__ else ["forward", "grad_weight"])
    report.restore()
    assert type(model[0]) is cls.cls_to_become


def test_a_lazy_module_restored_before_its_first_input():
    model = nn.LazyConv2d(4, 3)
    accelerate_(model, only_gains=False).restore()
    assert type(model) is nn.LazyConv2d
    model(image())
    assert type(model) is nn.Conv2d


def test_hooks_run_and_stay():
    model, calls = nn.Sequential(nn.Conv2d(4, 4, 3)), []
    model[0].register_forward_hook(lambda *_: calls.append("forward"))
    model[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    accelerate_(model, only_gains=False)
    model(image().requires_grad_()).sum().backward()
    assert calls == ["forward", "backward"]


# ---- saved, copied, distributed, compiled --------------------------------------------------------


def test_pickle_deepcopy_and_state_dict():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), OwnName(4), nn.ConvTranspose2d(4, 2, 2))
    stock = copy.deepcopy(model)
    accelerate_(model, "channels_last", only_gains=False)
    x = image()
    want = model(x)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)):
        torch.testing.assert_close(twin(x), want)
        assert runs_ours(twin, x)
    assert model.state_dict().keys() == stock.state_dict().keys()
    stock.load_state_dict(model.state_dict())
    torch.testing.assert_close(stock(x), want)


def test_distributed(tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        inner = nn.Sequential(nn.Conv2d(4, 4, 3))
        accelerate_(inner, "channels_last", only_gains=False)
        model = nn.parallel.DistributedDataParallel(inner)
        assert runs_ours(model, image()) == ["forward", "grad_weight"]
        assert inner[0].weight.grad is not None
    finally:
        torch.distributed.destroy_process_group()


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


# ---- layout --------------------------------------------------------------------------------------


def test_channels_last_turns_weights_and_inputs_and_restore_turns_them_back():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    x, before = image(), fingerprint(model)
    want = model(x)
    report = accelerate_(model, "channels_last", only_gains=False)
    assert report.memory_format == "channels_last"
    y = model(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert not y.is_contiguous()
    torch.testing.assert_close(y, want)
    report.restore()
    assert same(fingerprint(model), before)
    assert model(x).is_contiguous()


def test_trained_values_stay_when_the_layout_goes():
    model = nn.Conv2d(4, 8, 3)
    report = accelerate_(model, "channels_last", only_gains=False)
    with torch.no_grad():
        model.weight.mul_(2)
    trained = model.weight.clone()
    report.restore()
    assert model.weight.is_contiguous()
    assert torch.equal(model.weight, trained)


def test_images_in_keywords_and_volumes_are_turned_too():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv3d(4, 4, 2)

        def forward(self, *, inputs, mask):
            return self.conv(inputs["volume"]), mask

    model = Model()
    report = accelerate_(model, torch.channels_last_3d, only_gains=False)
    mask = torch.ones(2, 3, dtype=torch.bool)
    y, returned = model(inputs={"volume": image(nn.Conv3d)}, mask=mask)
    assert y.is_contiguous(memory_format=torch.channels_last_3d)
    assert returned is mask
    report.restore()


def test_auto_follows_a_rule_and_says_it():
    sequence, double = nn.Conv1d(4, 4, 3), nn.Conv2d(4, 4, 3).double()
    assert accelerate_(sequence, "auto").memory_format is None
    assert "float64" in accelerate_(double, "auto").layout
    report = accelerate_(nn.Conv2d(4, 4, 3), "auto")
    assert report.memory_format == "channels_last"
    assert "channels_last" in str(report)


def test_auto_measures_with_example_inputs():
    model = nn.Sequential(nn.Conv2d(4, 4, 3))
    report = accelerate_(model, "auto", example_inputs=image())
    assert report.layout.startswith("measured, ")
    report.restore()


# ---- the report ----------------------------------------------------------------------------------


def test_the_report_is_a_table():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), ComputesItself(4, 4, 3))
    report = accelerate_(model, only_gains=False)
    lines = str(report).splitlines()
    assert lines[1].split()[:2] == ["0", "convgrad"]
    assert lines[2].startswith("1")
    assert lines[-1].startswith("1 of 2 convolutions replaced")
    assert "<table>" in report._repr_html_()


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        accelerate_(lambda x: x)
    with pytest.raises(ValueError, match="channels_last"):
        accelerate_(nn.Conv2d(1, 1, 1), "nhwc")
    with pytest.raises(ValueError, match="preserve"):
        accelerate_(nn.Conv2d(1, 1, 1), torch.preserve_format)


def test_example_inputs_in_the_place_of_the_layout_are_refused_in_a_line():
    with pytest.raises(TypeError, match=r"memory_format is a name, got Tensor; .*example_inputs="):
        accelerate_(nn.Conv2d(4, 4, 3), torch.zeros(1, 4, 8, 8))
