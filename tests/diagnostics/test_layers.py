"""The profiler has a range for each layer, forward and backward, and the table of a script names the layers."""

import io
import json
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import convgrad
from convgrad.diagnostics import layer_ranges, running, without_figures
from convgrad.models import Usage, accelerating, run_script


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3)
        self.blocks = nn.Sequential(nn.Conv2d(32, 32, 3, groups=32), nn.BatchNorm2d(32), nn.ReLU(inplace=True))
        self.same = nn.Identity()

    def forward(self, x):
        return self.same(self.blocks(self.stem(x)))


X = torch.randn(1, 3, 12, 12)


def ranges(model) -> list[str]:
    with layer_ranges(), torch.profiler.profile() as seen:
        model(X).sum().backward()
    return [event.name for event in seen.events() if event.name.split(" ")[0] in {"Net", *dict(model.named_modules())}]


@pytest.mark.parametrize("accelerate", [False, True])
def test_each_call_of_a_module_has_a_range_forward_and_backward(accelerate):
    model = Net()
    if accelerate:
        convgrad.accelerate_(model, only_gains=False)
    for _ in range(2):
        names = ranges(model)
        assert names[:7] == ["Net", "stem", "blocks", "blocks.0", "blocks.1", "blocks.2", "same"]
        assert {"stem (backward)", "blocks.0 (backward)", "blocks.2 (backward)"} <= set(names[7:])
        assert names.count("same (backward)") == 0  # it returns what it was given
    model(X).sum().backward()
    assert ranges(model).count("stem (backward)") == 1
    assert running() is None


def test_the_calls_of_a_layer_lie_in_its_ranges():
    model = Net()
    convgrad.accelerate_(model, only_gains=False)
    with layer_ranges(), torch.profiler.profile() as seen, convgrad.use_backend("im2col"):
        model(X).sum().backward()
    events = {event.name: event.time_range for event in seen.events()}
    for inner, outer in (("forward", "blocks.0"), ("grad_weight", "stem (backward)")):
        label, layer = events[f"convgrad::{inner}[im2col]"], events[outer]
        assert layer.start <= label.start <= label.end <= layer.end


def test_a_part_that_a_checkpoint_computes_again_keeps_its_name():
    model, seen = Net(), []
    model.same = nn.Sequential(nn.Conv2d(32, 2, 1))
    model.same[0].register_forward_pre_hook(lambda *_: seen.append(running().name))
    with layer_ranges():
        model(X)
        checkpoint(model.same, model.blocks(model.stem(X)), use_reentrant=False).sum().backward()
        nn.Sequential(model)(X)
    assert seen == ["same.0", "same.0", "same.0", "0.same.0"]


def test_a_forward_that_raises_leaves_no_name_behind():
    class Broken(nn.Module):
        def forward(self, x):
            assert running().name == "1"
            raise ZeroDivisionError

    with layer_ranges():
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                nn.Sequential(nn.Identity(), Broken())(X)
            assert running() is None
        nn.Sequential(nn.Conv2d(3, 3, 1))(X)


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_model_that_is_compiled_whole_has_one_graph_and_one_range():
    graphs = []
    compiled = torch.compile(Net(), backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True)
    with layer_ranges():
        compiled(X)
        compiled(X)
        assert running() is None
    assert len(graphs) == 1


def test_a_script_hears_nothing_of_the_hooks(tmp_path):
    (tmp_path / "script.py").write_text(
        "import torch, warnings\nmodel = torch.compile(torch.nn.Conv1d(1, 1, 1), backend='eager')\n"
        "with warnings.catch_warnings(record=True) as seen:\n    model(torch.ones(1, 1, 3))\n"
        "assert not [w for w in seen if 'hooks' in str(w.message)]"
    )
    before = [*warnings.filters]
    assert run_script(str(tmp_path / "script.py"), out=io.StringIO(), measure=False) == 0
    assert warnings.filters == before


SCRIPT = """
import sys, torch
from torch import nn
same = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(2)]
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(nn.Conv2d(8, 8, 3), *same))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(int(sys.argv[1])):
    model(torch.randn(1, 3, 9, 9)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("steps", [2, 4])
def test_a_script_names_its_layers_and_writes_its_third_step(tmp_path, steps):
    (tmp_path / "script.py").write_text(SCRIPT)
    usage, out, target = Usage(), io.StringIO(), tmp_path / "step.json"
    script = str(tmp_path / "script.py")
    assert run_script(script, [str(steps)], usage=usage, out=out, measure=False, trace=target) == 0
    assert {row.layers for row in usage.rows} == {("0",), ("1.0",), ("1.1", "1.2")}
    assert "1.1 +1" in out.getvalue()
    timeline = usage.timeline(usage.rows)
    assert len(timeline) == sum(row.calls for row in usage.rows) / steps
    assert timeline[0].start == 0 <= timeline[-1].start
    if steps < 3:
        assert "no trace: no process came to the third step of an optimizer" in out.getvalue()
        assert not target.exists()
        return
    assert f"the third training step, for Perfetto or chrome://tracing: {target}" in out.getvalue()
    events = json.loads(target.read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert [names.count(name) for name in ("Sequential", "0", "1.2", "1.2 (backward)")] == [1, 1, 1, 1]


def test_a_script_may_have_a_profiler_of_its_own(tmp_path):
    script, out = tmp_path / "script.py", io.StringIO()
    script.write_text(SCRIPT.replace("\nfor", "\nwith torch.profiler.profile():\n  for").replace("\n    ", "\n      "))
    assert run_script(str(script), ["4"], out=out, measure=False, trace=tmp_path / "step.json") == 0
    assert "third step of an optimizer outside of a profiler of its own" in out.getvalue()


@pytest.mark.skipif(bool(convgrad.backends.why_absent()), reason="needs the compiled kernels")
def test_a_normalization_is_computed_with_its_activation_all_the_same() -> None:
    net = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
    convgrad.accelerate_(net)
    x = torch.randn(8, 3, 128, 128)
    for block in (layer_ranges, accelerating):
        with block():
            for _ in range(2):
                y = net(x)
        assert y.grad_fn.activation == "relu"


def test_an_estimate_of_one_problem_is_no_reason_of_its_own() -> None:
    faster = "by rule: native is {} PyTorch, by estimate"
    reasons = faster.format("1.5x as fast as"), faster.format("2.0x as fast as") + ", in one call with grad_bias"
    assert {without_figures(reason) for reason in reasons} == {faster.format("faster than")}
