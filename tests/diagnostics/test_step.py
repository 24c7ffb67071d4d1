"""What is measured of a model and of a script, against what is known to have run."""

import re
import time

import pytest
import torch
from torch import nn

import convgrad
from convgrad.backends.reference import ReferenceBackend
from convgrad.diagnostics.parts import watched
from convgrad.diagnostics.savings import CHOSEN, LAST, alternatives, costs_of_layout, costs_of_rows
from convgrad.diagnostics.step import _finding, _forms
from convgrad.engine import register, use_backend
from convgrad.engine.measure import Comparison
from convgrad.models import spatial_convolutions, training_step
from convgrad.problem import ConvProblem
from convgrad.report import Profile, profile_model, profile_script
from tests.check.broken import around
from tests.norms import NEEDS_KERNELS

from .example import row

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch, instant_limits: None) -> None:
    monkeypatch.setenv("CONVGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("convgrad.diagnostics.records.limits_of", lambda *_, **__: None)  # which is tested elsewhere


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.mix = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(2)))
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.norm(self.mix(self.stem(x))) * scale


@pytest.mark.usefixtures("small_rows")
def test_linear_layers_have_their_names_and_a_request_holds_for_what_was_accelerated() -> None:
    with use_backend("im2col"):
        profile = profile_model(nn.Sequential(nn.Conv1d(4, 8, 3), nn.Linear(10, 3)), torch.randn(2, 4, 12), seconds=0.1)
    assert {r.layers for r in profile.rows} == {("0",), ("1",)}
    assert {r.pytorch for r in profile.rows if r.layers == ("1",)} == {None}  # there it is no convolution
    assert {r.backend.split()[0] for r in profile.rows} == {"im2col"}


def test_a_step_of_a_model() -> None:
    net, x = Net(), torch.randn(2, 3, 12, 12)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    told: list[str] = []
    profile = profile_model(net, {"x": x, "scale": 2.0}, seconds=0.5, stage=told.append)
    assert len(told) == 4
    assert [v.name for v in profile.variants][:2] == ["PyTorch", "convgrad"]  # the others where there is time
    assert profile.variants[0].speedup is None
    assert all(v.speedup and v.low and v.low <= v.speedup <= (v.high or 0) for v in profile.variants[1:])
    calls = {(r.layers, r.direction): r.calls for r in profile.rows}
    stem, mix = ("stem",), ("mix.0", "mix.1")
    assert {key: calls[key] for key in calls if key[1] == "forward"} == {(stem, "forward"): 1, (mix, "forward"): 2}
    assert (stem, "backward") in calls
    assert calls[mix, "backward"] == 2
    first = [r for r in profile.rows if r.layers == stem and r.direction == "backward"]
    assert all("grad_input" not in r.passes for r in first)  # nobody needs the gradient of the images
    assert all(r.pytorch for r in profile.rows if r.direction == "forward")
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert all(type(m) is nn.Conv2d for m in spatial_convolutions(net))
    assert all(p.grad is None for p in net.parameters())
    assert Profile.from_dict(profile.to_dict()) == profile


def test_the_other_layout_is_tried_where_there_is_one() -> None:
    net, x = Net(), torch.randn(2, 3, 12, 12)
    both = ["PyTorch", "convgrad", "PyTorch, channels_last", "convgrad, channels_last"]
    for model, input, forms, why in (
        (net, x, both, ""),
        (net, x.to(memory_format=torch.channels_last), both[:2], "the inputs are in another layout already"),
        (nn.Conv1d(2, 2, 3), torch.ones(1, 2, 5), both[:2], "the model has no layer that convolves images or volumes"),
    ):
        models, _, reason = _forms(model, input)
        assert (list(models), reason) == (forms, why)


def test_a_model_that_does_not_run_in_the_other_layout() -> None:
    class Viewing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).view(len(x), -1)

    profile = profile_model(Viewing(), torch.randn(2, 3, 12, 12), seconds=1)
    assert [v.name for v in profile.variants] == ["PyTorch", "convgrad"]
    assert any("does not run there" in line for line in profile.whole)


def test_a_model_without_a_convolution_or_a_copy() -> None:
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, got NoneType"):
        profile_model(None, torch.ones(1, 3))
    net = nn.Sequential(nn.LazyConv1d(2, 3), nn.Conv1d(2, 2, 3))
    lazy = profile_model(net, torch.randn(1, 2, 9), seconds=0.5)  # whose copies have the same weights
    assert float(re.findall(r"[\d.]+e-?\d+|$", lazy.whole[0])[0] or 0) < 1e-4
    assert type(net[0]) is nn.LazyConv1d
    with pytest.raises(ValueError, match="no convolution ran"):
        profile_model(nn.Linear(3, 3), torch.ones(1, 3), seconds=0.1)
    net = nn.Conv1d(2, 2, 3)
    net.kept = net.weight * 2
    for cannot in (net, torch.jit.script(nn.Conv1d(2, 2, 3))):
        with pytest.raises(ValueError, match=r"cannot be copied$"):
            profile_model(cannot, torch.ones(1, 2, 5), seconds=0.1)
    with pytest.raises(ValueError, match="cannot be copied before its first call"):
        profile_model(nn.Sequential(nn.LazyBatchNorm1d(), nn.Conv1d(2, 2, 3)), torch.ones(1, 2, 5), seconds=0.1)


SCRIPT = """
import sys, torch
layer = torch.nn.Conv2d(4, 4, 3, groups=4)
for _ in range(3):
    layer(torch.ones(2, 4, 6, 6)).sum().backward()
print(sys.argv[1:])
sys.exit(4)
"""


@pytest.mark.parametrize("stock", [False, True])
def test_a_script(tmp_path, capsys, stock: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    profile, status = profile_script(str(script), ["--epochs", "3"], stock=stock, seconds=0.01)
    assert capsys.readouterr() == ("['--epochs', '3']\n", "")
    assert status == 4
    assert {r.calls for r in profile.rows} == {3}
    assert sum(r.total for r in profile.rows) < profile.milliseconds
    assert ("the script's choice" in profile.finding) is stock
    assert "exit status was 4" in profile.notes[-1]
    if stock:
        assert {r.backend.split()[0] for r in profile.rows} == {"aten"}


def test_a_script_without_a_convolution(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    with pytest.raises(ValueError, match="computed no convolution"):
        profile_script(str(script))


# ---- findings --------------------------------------------------------------------------------------


def times(**ratios: float) -> Comparison:
    return Comparison("PyTorch", {name.replace("_last", ", channels_last"): (t,) * 9 for name, t in ratios.items()})


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (times(PyTorch=2.0, convgrad=1.0), "is 2.00x [2.00, 2.00] as fast: 1 s instead of 2 s."),
        (times(PyTorch=1.0, convgrad=2.0), "is slower here, 0.50x [0.50, 0.50] as fast"),
        (times(PyTorch=0.1, convgrad=0.1), "makes no measurable difference to this training step here: 1.00x"),
        (Comparison("PyTorch", {"PyTorch": (1.0,) * 9, "convgrad": (0.5, 2.0) * 4 + (1.0,)}),
         "cannot be told, for the times vary too much: 1.00x [0.50, 2.00]."),
        (times(PyTorch=2.0, convgrad=1.0, PyTorch_last=1.0, convgrad_last=0.5),
         "is 2.00x [2.00, 2.00] as fast: 500 ms in channels_last instead of 1 s in channels_last."),
        (times(PyTorch=2.0, convgrad=1.0, PyTorch_last=1.0, convgrad_last=1.0),
         "makes no measurable difference to this training step here: 1.00x [1.00, 1.00], 1 s instead of 1 s in chan"),
        (times(PyTorch=1.0, convgrad=0.9, PyTorch_last=2.0, convgrad_last=0.5),
         "is 2.00x [2.00, 2.00] as fast: 500 ms in channels_last instead of 1 s."),
    ],
)  # fmt: skip
def test_the_finding_is_honest(seen: Comparison, words: str) -> None:
    assert words in _finding(seen)


def test_the_layout_is_a_cost_where_it_is_and_ours_is_named_only_where_it_is_needed() -> None:
    both = costs_of_layout(times(PyTorch=3.0, convgrad=2.0, PyTorch_last=2.0, convgrad_last=1.0))
    assert [(c.kind, c.remedy) for c in both] == [("layout", 'convgrad.accelerate_(model, "channels_last")')]
    assert both[0].milliseconds == pytest.approx(1000.0)
    (plain,) = costs_of_layout(times(PyTorch=3.0, convgrad=2.0, PyTorch_last=1.0, convgrad_last=1.0))
    assert plain.remedy == "model.to(memory_format=torch.channels_last)"
    assert costs_of_layout(times(PyTorch=3.0, convgrad=2.0, PyTorch_last=2.0, convgrad_last=2.0)) == []
    assert costs_of_layout(times(PyTorch=3.0, convgrad=2.0)) == []


# ---- alternatives ----------------------------------------------------------------------------------

P = "g8mb4ic8ih24oc8kh3ph1"


@pytest.fixture
def _planted() -> None:
    """One that is right and slow, and one that is wrong and as fast as can be."""

    def sleepy(kernel, problem, outputs):
        return lambda *args: (time.sleep(0.01), kernel(*args))[1]

    def wrong(kernel, problem, outputs):
        return lambda a, *_: a.new_zeros(problem.output_shape)

    register(around(ReferenceBackend, sleepy, name="sleepy"), candidate=False)
    register(around(ReferenceBackend, wrong, name="wrong"))


@pytest.mark.usefixtures("_planted")
def test_what_is_faster_is_found_and_what_is_wrong_never_timed() -> None:
    seen = alternatives(ConvProblem.parse(P), ("forward",), CPU, "sleepy", layout=True)
    assert "wrong" not in seen.samples
    assert seen.speedup("aten").low > 1
    assert seen.speedup(LAST).low > 1  # it runs what is chosen there
    slow = row(P, "forward", "sleepy", 0.01, "blocks.0")
    for reason, stock, remedy, kind in (
        ("requested by name", False, "leave out the request for 'sleepy' (use_backend, backend=)", "backend"),
        ("registered by the user", False, 'convgrad.unregister("sleepy")', "backend"),
        ("by rule: it is", False, "convgrad tune x", "tune"),
        ("PyTorch's own kernel", True, "convgrad.accelerate_(model)", "backend"),
        ("PyTorch's own kernel", False, "with convgrad.takeover(): around the training loop", "backend"),
        ("by rule: it is", True, "convgrad tune x", "tune"),  # the script accelerates it
    ):
        object.__setattr__(slow, "reason", reason)
        until = time.perf_counter() + 0.01
        (cost,), how = costs_of_rows([slow, slow], 1e-3, until, "convgrad tune x", layout=False, stock=stock)
        assert (cost.kind, cost.remedy, cost.rows) == (kind, remedy, (0,))
        assert cost.milliseconds == pytest.approx(slow.total, rel=0.2)  # nearly all of it
        assert how.startswith("1 of 2 rows, 50%")


@pytest.mark.usefixtures("_planted")
def test_a_padding_mode_and_the_sweep_of_a_transposed_one_have_alternatives() -> None:
    assert "aten" in alternatives(ConvProblem.parse(f"{P} circular"), ("forward",), CPU, "sleepy").samples
    transposed = ConvProblem.parse("mb2ic4ih9oc4kh3 transposed")
    seen = alternatives(transposed, ("forward", "grad_weight", "grad_bias"), CPU, "aten")
    assert seen is None or CHOSEN in seen.samples


def test_no_time_is_no_finding() -> None:
    rows = [row(P, "forward", "aten", 0.5)]
    found, how = costs_of_rows(rows, 1.0, time.perf_counter() - 1, "", layout=True, stock=True)
    assert found == []
    assert how.startswith("0 of 1 rows, 0%")


# ---- the whole step --------------------------------------------------------------------------------


def test_the_parts_are_all_of_the_step_and_the_gradients_are_right() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 100, 3))
    profile = profile_model(net, torch.randn(4, 3, 12, 12), seconds=1.5)
    assert {part.name for part in profile.parts if part.pytorch} >= {
        "convolutions", "normalization", "linear layers", "activations", "optimizer"
    }  # fmt: skip
    for whole, sides in zip(profile.variants, ("pytorch", "milliseconds"), strict=False):
        assert sum(getattr(part, sides) for part in profile.parts) == pytest.approx(whole.milliseconds, rel=1e-2)
    error = next(line for line in profile.whole if line.startswith("gradients: "))
    assert float(error.split()[1]) < 1e-3
    assert any(line.startswith("memory: ") and not line.startswith("memory: 0 ") for line in profile.whole)
    assert profile.whole[-1].startswith("step: PyTorch ")


@NEEDS_KERNELS
def test_accelerated_layers_are_in_their_parts() -> None:
    linear = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(2), nn.Linear(1024, 4096), nn.Linear(4096, 9, bias=False))
    norm = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU())
    parts = []
    for net, x in ((linear, torch.randn(64, 3, 32, 32)), (norm, torch.randn(4, 16, 64, 64))):
        convgrad.accelerate_(net)
        step = training_step(net, x)
        step()
        parts.append(watched(step, CPU).parts)
    assert parts[0]["linear layers"] > parts[0]["convolutions"]
    assert parts[1]["normalization"] > 0


def test_what_a_user_registered_has_a_column_and_says_what_it_refuses() -> None:
    def accepts(p: ConvProblem) -> bool | str:
        return p.kernel_size == (1, 1) or f"kernels of {p.kernel_size}"

    convgrad.register(
        "mine", forward=lambda x, w, p: nn.functional.conv2d(x, w, None, p.stride), accepts=accepts, verify=False
    )
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1))
    profile = profile_model(net, torch.randn(4, 3, 12, 12), seconds=0.2)
    (kernel,) = profile.kernels
    assert (kernel.name, kernel.layers, [*kernel.refused.values()]) == ("mine", ("1", "2"), [("0",)])
    text = " ".join(profile.text(None).split())
    assert re.search(r"mine: 2 of 3 layers; 1 refused: [^;]*kernels of \(3, 3\)", text)
    assert Profile.from_dict(profile.to_dict()) == profile


def test_of_a_busy_machine_no_ratio_is_told(monkeypatch) -> None:
    monkeypatch.setattr("convgrad.diagnostics.measure.Load.others", 7.0)
    explained = convgrad.explain(P, measure=True)
    assert str(explained).startswith("THIS MACHINE WAS BUSY: ")
    assert explained.to_dict()["warnings"] == [*explained.warnings]
    profile = profile_model(nn.Sequential(nn.Conv2d(3, 8, 3)), torch.randn(2, 3, 9, 9), seconds=0.3)
    text = profile.text()
    assert text.splitlines()[0].startswith("No comparison is made, for this machine was busy")
    assert text.splitlines()[1].startswith("THIS MACHINE WAS BUSY: other processes kept 7.0 of its ")
    assert not re.search(r"\dx", profile.finding + profile.whole[-1])
    assert profile.costs == ()
    assert all(" ?" in line for line in text.splitlines() if "x [" in line)
