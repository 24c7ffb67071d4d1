"""Real models, with tiny configurations: accelerated, trained some steps, equal to stock, restored bit for bit.

Training multiplies rounding errors, each model by its own factor, which is measured: stock is trained a second time
from weights that differ in their last bit. Ours may differ from stock by a thousand times what that gives, for a sum of
some thousand products in each layer; in float64 that leaves no room for a wrong gradient.
"""

import copy
import functools

import pytest
import torch

import convgrad
from convgrad.diagnostics import Trace
from convgrad.models import accelerate_, takeover

transformers = pytest.importorskip("transformers", reason="the extra [models] brings transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("small_norms", "small_rows"),
]

OURS = "im2col"
STEPS = 8


def images(size):
    return {"pixel_values": torch.randn(4, 3, size, size), "labels": torch.tensor([0, 1, 2, 3])}


def mobilenet_v2():
    config = transformers.MobileNetV2Config(depth_multiplier=0.25, num_labels=4, classifier_dropout_prob=0.0)
    return transformers.MobileNetV2ForImageClassification(config), images(64)


def efficientnet():
    config = transformers.EfficientNetConfig(
        width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=320, num_labels=4, dropout_rate=0.0,
        drop_connect_rate=0.0, initializer_range=0.2,
    )  # fmt: skip
    return transformers.EfficientNetForImageClassification(config), images(64)


def convnext():
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], num_labels=4)
    return transformers.ConvNextForImageClassification(config), images(64)


def mamba():
    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2)
    ids = torch.randint(0, 64, (2, 12))
    return transformers.MambaForCausalLM(config), {"input_ids": ids, "labels": ids}


def wav2vec2():
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8, 8),
        conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        num_labels=4, classifier_proj_size=16, layerdrop=0.0, apply_spec_augment=False, hidden_dropout=0.0,
        attention_dropout=0.0, feat_proj_dropout=0.0, activation_dropout=0.0, final_dropout=0.0,
    )  # fmt: skip
    return (
        transformers.Wav2Vec2ForSequenceClassification(config),
        {"input_values": torch.randn(2, 800), "labels": torch.tensor([0, 1])},
    )


MODELS = [
    convnext,
    wav2vec2,
    mamba,
    pytest.param(efficientnet, marks=pytest.mark.slow),
    pytest.param(mobilenet_v2, marks=pytest.mark.slow),
]


def train(model, inputs) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def apart(losses, wanted) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))


@functools.cache
def made(factory):
    """A model in float64, its inputs, the losses of stock, and by how much others may differ from them."""
    torch.manual_seed(0)
    model, inputs = factory()
    model, inputs = model.double(), {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    stock, wobbling = copy.deepcopy(model).train(), copy.deepcopy(model).train()
    wanted = train(stock, inputs)
    assert wanted[-1] < wanted[0]
    with torch.no_grad():
        for p in wobbling.parameters():
            p.mul_(1 + torch.finfo(p.dtype).eps * torch.randint_like(p, -1, 2))
    bound = 1000 * max(apart(train(wobbling, inputs), wanted), torch.finfo(torch.float64).eps)
    assert bound < 1e-3, "this model multiplies rounding errors too much to tell a wrong gradient"
    return model, inputs, wanted, bound


@pytest.fixture(params=MODELS, ids=lambda f: f.__name__)
def case(request):
    model, *rest = made(request.param)
    return copy.deepcopy(model).train(), *rest


def objects(model):
    return [
        *((type(m), id(m), len(m._forward_pre_hooks)) for m in model.modules()),
        *((n, id(p), p.stride()) for n, p in model.state_dict(keep_vars=True).items()),
    ]


def test_accelerated_trained_and_restored(case):
    model, inputs, wanted, bound = case
    before, text = objects(model), repr(model)
    start = {n: t.clone() for n, t in model.state_dict().items()}
    report = accelerate_(model, "channels_last", only_gains=False)
    kinds = (torch.nn.modules.conv._ConvNd, torch.nn.BatchNorm2d, torch.nn.Linear)
    replaced = {d.name for d in report.decisions if d.becomes and d.kind != "padding"}
    assert replaced == {n for n, m in model.named_modules() if isinstance(m, kinds)}
    assert repr(model) == text
    with Trace() as seen, convgrad.use_backend(OURS):
        losses = train(model, inputs)
    computed = {o for r in seen if r.backend == OURS for o in r.outputs.split("+")}
    assert computed == {"forward", "grad_input", "grad_weight"}
    assert apart(losses, wanted) <= bound
    trained = {n: t.clone() for n, t in model.state_dict().items()}
    report.restore()
    assert objects(model) == before
    assert all(torch.equal(t, trained[n]) for n, t in model.state_dict().items())
    model.load_state_dict(start)
    assert train(model, inputs) == wanted  # every bit


def test_taken_over(case):
    model, inputs, wanted, bound = case
    with Trace() as seen, takeover(), convgrad.use_backend(OURS):
        losses = train(model, inputs)
    assert {"forward", "grad_input", "grad_weight"} <= {r.outputs for r in seen if r.backend == OURS}
    assert apart(losses, wanted) <= bound


def test_the_engines_own_choice_gives_the_same(case):
    model, inputs, wanted, bound = case
    accelerate_(model, "channels_last", example_inputs=inputs)
    assert apart(train(model, inputs), wanted) <= bound
