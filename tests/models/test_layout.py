"""The layout of a whole model: turned with its inputs, turned back by `restore`, and when it is expected to pay."""

import copy

import pytest
import torch
from torch import nn

from convgrad.models import accelerate_

from .modules import fingerprint, image, same

pytestmark = pytest.mark.usefixtures("brief_trial")


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


def test_inside_of_vmap_inputs_keep_their_layout():
    model, x = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)).eval(), image()
    want = model(x)
    accelerate_(model, "channels_last", only_gains=False)
    torch.testing.assert_close(torch.func.vmap(lambda image: model(image[None])[0])(x), want)
    x = x[:1, :, :3, :3]
    want = torch.func.jacfwd(model)(x)
    found = torch.autograd.functional.jacobian(model, x, vectorize=True, strategy="forward-mode")
    torch.testing.assert_close(found, want)


def test_a_video_is_no_image():
    class Frames(nn.Conv2d):
        def forward(self, input):
            return super().forward(input.view(-1, *input.shape[2:]))

    model, x = nn.Sequential(Frames(4, 4, 3)), torch.randn(2, 3, 4, 9, 7)
    want = model(x)
    assert accelerate_(model, "auto").memory_format == "channels_last"
    torch.testing.assert_close(model(x), want)


def test_auto_follows_a_rule_and_says_it():
    sequence, double = nn.Conv1d(4, 4, 3), nn.Conv2d(4, 4, 3).double()
    assert accelerate_(sequence, "auto").memory_format is None
    assert "float64" in accelerate_(double, "auto").layout
    report = accelerate_(nn.Conv2d(4, 4, 3), "auto")
    assert report.memory_format == "channels_last"
    assert "channels_last" in str(report)


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("d", [2, 3])
def test_auto_leaves_a_model_whose_gradient_is_wrong_in_channels_last(measured, d):
    """As CycleGAN's, which is trained with single images; with volumes, too, behind which is a grouped convolution."""
    conv, norm = (nn.Conv2d, nn.InstanceNorm2d) if d == 2 else (nn.Conv3d, nn.InstanceNorm3d)
    model = nn.Sequential(conv(4, 4, 3), norm(4), nn.ReLU(True), conv(4, 4, 3, groups=2))
    stock, x = copy.deepcopy(model), torch.randn(1, 4, *(9, 7, 8)[:d])
    report = accelerate_(model, "auto", example_inputs=x if measured else None)
    assert report.memory_format is None
    assert "instance normalization" in report.layout
    for net in (model, stock):
        net(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    report.restore()
    with pytest.warns(UserWarning, match="single image or volume is wrong"):
        accelerate_(model, "channels_last").restore()
    accelerate_(model.to("meta"), "channels_last")  # of another device nothing is known


def test_auto_leaves_a_model_that_does_not_run_in_channels_last():
    class Viewing(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3)

        def forward(self, x):
            return self.conv(x).view(len(x), -1)

    model = Viewing()
    report = accelerate_(model, "auto", example_inputs=image())
    assert report.memory_format is None
    assert report.layout.startswith("the model does not run in channels_last: view size is not compatible")
    model(image()).sum().backward()


def test_auto_leaves_a_model_that_does_not_train_on_the_inputs():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4))
    report = accelerate_(model, "auto", example_inputs=image()[:1])
    assert report.memory_format is None
    assert report.layout.startswith("not measured, since a training step on these inputs fails: Expected more than 1")
    report.restore()


@pytest.mark.parametrize("frozen", [False, True])
def test_auto_measures_with_example_inputs(frozen):
    """A frozen model by the gradient of its input."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()).requires_grad_(not frozen)
    report = accelerate_(model, "auto", example_inputs=image().requires_grad_(frozen))
    assert report.layout.startswith("measured, ")
