"""The class that a module gets: subclasses, parametrized, normed and lazy modules, copies, and the way back."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import convgrad
from convgrad.models import accelerate_
from tests.copies import copies

from .modules import (
    OURS,
    CallsConvForward,
    CallsFunction,
    CallsSuper,
    ComputesItself,
    OwnConvForward,
    OwnName,
    TransposedCallsFunction,
    TransposedCallsSuper,
    fingerprint,
    image,
    runs_ours,
    same,
)


@pytest.mark.parametrize("make", [
    lambda: OwnName(4), lambda: CallsSuper(4, 4, 3), lambda: CallsConvForward(4, 4, 3),
    lambda: TransposedCallsSuper(4, 4, 3), lambda: CallsFunction(4, 4, 3), lambda: OwnConvForward(4, 4, 3),
    lambda: TransposedCallsFunction(4, 4, 3),
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


def test_a_registry_of_a_users_classes_hears_nothing():
    known = []

    class Registered(nn.Conv2d):
        def __init_subclass__(cls):
            known.append(cls)

    class Layer(Registered):
        pass

    assert accelerate_(nn.Sequential(Layer(4, 4, 3)), only_gains=False).replaced
    assert known == [Layer]


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_a_class_that_cannot_be_derived_from_is_left(error):
    class Refuses(type):
        def __new__(cls, name, bases, body):
            if any(isinstance(base, cls) for base in bases):
                raise error("refused")
            return super().__new__(cls, name, bases, body)

    class Conv(nn.Conv2d, metaclass=Refuses):
        pass

    class Block(nn.Sequential, metaclass=Refuses):
        pass

    model = Block(Conv(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    assert "refused" in accelerate_(model, only_gains=False).left["0"]
    assert type(model) is Block


@pytest.mark.parametrize("none", [True, False])
def test_a_weight_that_is_only_there_when_another_network_has_made_it(none):
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Linear(3, 2))
    for layer in model:
        del layer.weight
        if none:
            layer.register_parameter("weight", None)
    assert set(accelerate_(model, "auto", only_gains=False).left.values()) == {"it has no weight yet"}


class Twice(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def test_torch_fx_traces_what_it_would_trace():
    """Torch's layers are calls of modules; what a user's class computes is in the graph, as is a layer by itself."""
    x = torch.randn(2, 4, 8, 8)
    for stock in (
        nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.ConvTranspose2d(4, 4, 1), CallsSuper(4, 4, 1), nn.Linear(8, 8)
        ),
        nn.Sequential(Twice(8, 8), TransposedCallsSuper(4, 4, 1)),
        nn.Linear(8, 8),
    ):
        ours = copy.deepcopy(stock)
        accelerate_(ours, only_gains=False)
        one, other = (torch.fx.symbolic_trace(m) for m in (ours, stock))
        assert [n.op for n in one.graph.nodes] == [n.op for n in other.graph.nodes]
        torch.testing.assert_close(one(x), stock(x))


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_every_other_name_belongs_to_the_user(mode):
    class Named(nn.Conv2d):
        backend, layout, _layout, _function = "mine", "mine", 3.0, None

        def _compute(self, x):
            return 2 * x

        def _sides(self):
            return self._layout

        def forward(self, input):
            return super().forward(self._compute(input)) + self._sides()

    model, x = Named(4, 4, 3, padding=1, padding_mode=mode), image()
    want = model(x)
    accelerate_(model, only_gains=False)
    assert model.backend == "mine"
    torch.testing.assert_close(model(x), want)
    assert runs_ours(model, x)


@pytest.mark.parametrize("made", [lambda conv: conv, parametrizations.weight_norm], ids=["plain", "parametrized"])
@pytest.mark.parametrize("name", ["backend", "layout"])
def test_an_instance_with_an_attribute_that_would_be_read_is_left(name, made):
    model, x = made(nn.Conv1d(4, 4, 3)), image(nn.Conv1d)
    want = model(x)
    setattr(model, name, "mine")
    assert repr(name) in accelerate_(model, only_gains=False).left[""]
    assert torch.equal(model(x), want)


def test_a_weight_that_a_class_computes_is_what_is_read():
    class Doubled(torch.nn.Conv2d):
        @property
        def weight(self):
            return 2 * torch.nn.Module.__getattr__(self, "weight")

    class OursDoubled(convgrad.nn.Conv2d):
        weight = Doubled.weight

    x = torch.randn(1, 4, 6, 6, dtype=torch.float64)
    for cls in (Doubled, OursDoubled):
        layer = cls(4, 4, 3, groups=4).double()
        torch.nn.init.normal_(layer._parameters["weight"])  # the constructor initialized what the property returned
        expected = torch.nn.functional.conv2d(x, 2 * layer._parameters["weight"], layer.bias, groups=4)
        if cls is Doubled:
            convgrad.accelerate_(torch.nn.Sequential(layer), only_gains=False)
        torch.testing.assert_close(layer(x), expected)


def test_an_instance_with_a_forward_of_its_own_is_left():
    model = nn.Conv2d(4, 4, 3)
    model.forward = lambda x: x
    assert "instance" in accelerate_(model, only_gains=False).left[""]


def test_pickle_deepcopy_and_state_dict():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), OwnName(4), nn.ConvTranspose2d(4, 2, 2))
    stock = copy.deepcopy(model)
    accelerate_(model, "channels_last", only_gains=False)
    x = image()
    want = model(x)
    for twin in copies(model):
        torch.testing.assert_close(twin(x), want)
        assert runs_ours(twin, x)
    assert model.state_dict().keys() == stock.state_dict().keys()
    stock.load_state_dict(model.state_dict())
    torch.testing.assert_close(stock(x), want)


# ---- parametrized, normed, lazy ------------------------------------------------------------------


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


def test_a_class_derived_for_one_module_meanwhile():
    """As `torch.distributed.fsdp.fully_shard` does."""
    mixin = type("Sharded", (), {})
    layer = nn.Conv2d(4, 4, 3)
    report = accelerate_(layer, only_gains=False)
    layer.__class__ = type("ShardedConv2d", (mixin, type(layer)), {})
    report.restore()
    assert type(layer).__bases__ == (mixin, nn.Conv2d)
    assert runs_ours(layer, image()) == []


def test_a_layer_that_was_converted_meanwhile():
    layer = nn.Conv2d(4, 4, 3)
    report = accelerate_(layer, only_gains=False)
    convgrad.nn.convert_(layer, convgrad.nn.Binary())
    report.restore()
    assert type(layer) is convgrad.nn.BinaryConv2d


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


# ---- linear layers -------------------------------------------------------------------------------


class Projects(nn.Linear):
    def forward(self, input):
        return super().forward(2 * input)


class CallsLinear(nn.Linear):
    def forward(self, input):
        return nn.functional.linear(input, self.weight.tanh(), self.bias)


class ProjectsItself(nn.Linear):
    def forward(self, input):
        return input @ self.weight.T


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("change", [
    lambda layer: layer, parametrizations.weight_norm, nn.utils.spectral_norm,
    lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
], ids=["plain", "weight_norm", "spectral_norm", "pruned"])  # fmt: skip
@pytest.mark.parametrize("cls", [nn.Linear, Projects, CallsLinear], ids=["plain", "subclass", "function"])
@pytest.mark.usefixtures("small_rows")
def test_linear_layers(cls, change):
    model, x = nn.Sequential(change(cls(4, 6)), nn.ReLU(inplace=True)).eval(), torch.randn(8, 4)
    before, text, want = fingerprint(model), repr(model), model(x)
    report = accelerate_(model, only_gains=False)
    assert (list(report.replaced), report.counts) == (["0"], ((0, 0), (0, 0), (1, 1)))
    assert repr(model) == text
    torch.testing.assert_close(model(x), want)
    assert runs_ours(model, x) == ["forward", "grad_weight"]
    if type(model[0].weight) is not torch.Tensor or parametrize.is_parametrized(model[0]):  # PyTorch cannot copy others
        torch.testing.assert_close(copy.deepcopy(model)(x), want)
    model.zero_grad()
    report.restore()
    assert same(fingerprint(model), before)


@pytest.mark.usefixtures("small_rows")
def test_linear_layers_lazy_shared_saved_and_of_a_class_that_computes_itself():
    model, x = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4), ProjectsItself(4, 4)), torch.randn(8, 3)
    model[2].weight = model[1].weight
    report = accelerate_(model, only_gains=False)
    assert list(report.replaced) == ["0", "1"]
    assert report.left == {"2": "its class computes it itself in ProjectsItself.forward"}
    assert runs_ours(model, x) == ["forward"] * 2 + ["grad_input", "grad_weight", "grad_weight"]
    for twin in copies(model):
        torch.testing.assert_close(twin(x), model(x))
    report.restore()
    assert [type(m) for m in model] == [nn.Linear, nn.Linear, ProjectsItself]


@pytest.mark.usefixtures("small_rows")
def test_linear_layers_of_a_transformer():
    """In training its feed-forward layers are called; what reads their parameters in evaluation still does."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1)
    stock, x = copy.deepcopy(model), torch.randn(2, 5, 8)
    with convgrad.use_backend(OURS):
        report = accelerate_(model)
    assert sorted(report.replaced) == ["layers.0.linear1", "layers.0.linear2"]
    assert report.left == {}
    assert len(runs_ours(model, x)) == 6
    torch.testing.assert_close(model(x), stock(x))
    with torch.no_grad():
        assert torch.equal(model.eval()(x), stock.eval()(x))


def test_quantized_linear_layers_keep_their_class():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    convgrad.nn.convert_(model, skip="0")
    report = accelerate_(model, only_gains=False)
    assert list(report.replaced) == ["0"]
    assert report.left["1"] == "convgrad computes it already"
