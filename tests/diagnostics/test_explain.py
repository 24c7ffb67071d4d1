"""Explanations: of problems, operands, modules and models, here and on machines that are not."""

import json
import random
import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convgrad
from convgrad import conv1d, conv2d
from convgrad._compat import cpu_lacks
from convgrad.backends.base import BOTH_GRADIENTS
from convgrad.backends.reference import ReferenceBackend
from convgrad.diagnostics import explain, explain_problem, trace
from convgrad.diagnostics.aten_rules import Machine, TensorSpec
from convgrad.diagnostics.capture import _run, capture
from convgrad.engine import register, use_backend
from convgrad.engine.registry import backends
from convgrad.errors import ShapeError
from convgrad.problem import OUTPUTS, PASSES, ConvProblem, Output
from tests.check.broken import around

P = ConvProblem.parse("g8mb2ic8ih9oc8kh7ph3")
H100 = "h100 cudnn 9.10"
BIAS = ("engine", ("a sum over batch and space",))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch, instant_limits: None) -> None:
    monkeypatch.setenv("CONVGRAD_CACHE", str(tmp_path))


def test_every_output_has_one_chosen_backend_and_every_backend_a_reason() -> None:
    e = explain_problem(P)
    assert tuple(e.chosen()) == OUTPUTS
    for output in OUTPUTS[:3]:
        rows = [r for r in e.rows if r.output == output]
        assert {r.backend for r in rows} == set(backends())
        assert rows[0].chosen
        assert sum(r.chosen for r in rows) == 1
    assert all(r.reasons for r in e.rows)
    assert e.limits is None
    assert "peak speeds are not measured" in " ".join(str(e).split())


def test_what_was_not_chosen_is_named_and_no_line_is_wider_than_a_terminal() -> None:
    e = explain_problem(P)
    assert max(map(len, str(e).splitlines())) <= 80
    usable = [r.backend for r in e.rows if r.output == "forward" and r.usable]
    assert {"aten", "im2col", "reference"} <= {*usable} < {*backends()}
    named = next(line for line in e.text().splitlines() if line.startswith("not chosen: "))
    others = [n for n in usable if n not in ("native", "aten")]
    assert named == (
        f"not chosen: {', '.join(others)}; {len(backends()) - len(usable)} more cannot compute it (--all shows why; "
        "in Python, .text(everything=True))"
    )
    everything = e.text(everything=True)
    assert all(f"{r.output:<11}  {r.backend}" in everything for r in e.rows)


def test_a_kernel_of_the_users_that_cannot_is_shown_with_the_reason() -> None:
    def against(self: object, problem: ConvProblem, outputs: object, device: object) -> list[str]:
        return ["it takes even widths"] if problem.groups == P.groups else []

    register(around(ReferenceBackend, lambda kernel, *_: kernel, name="odd", reasons_against=against), candidate=False)
    assert str(explain_problem(P)).count("it takes even widths") == 3
    e = explain_problem(P.replace(groups=1))
    assert re.search(r"not chosen: .*\bodd\b", " ".join(str(e).split()))
    assert "\nforward  odd" not in str(e)


def test_a_request_is_explained_and_one_output_may_stand_alone() -> None:
    with use_backend("reference"):
        e = explain(str(P), outputs="grad_weight")
    assert e.chosen() == {"grad_weight": "reference"}
    assert {r.output for r in e.rows} == {"grad_weight"}
    assert e.rows[0].reasons[0].startswith("requested by name")


def test_what_aten_runs_inside() -> None:
    row = next(r for r in explain_problem(P, device=H100).rows if r.output == "grad_weight" and r.backend == "aten")
    assert row.runs == "CudaDepthwise2d (conv_depthwise2d_backward)"
    e = explain_problem(P.replace(memory_format=torch.channels_last, dtype=torch.bfloat16), device=H100)
    assert e.aten.gradient_backend.answer == "Cudnn"
    assert e.limits.seconds(e.problem) > 0
    assert "datasheet of the H100" in e.summary
    data = json.loads(json.dumps(e.to_dict()))
    assert (data["rows"][0]["output"], data["limit"]["bound"]) == ("forward", "memory")
    assert "<table>" in e._repr_html_()


def test_which_kernel_of_a_backend_runs_is_named() -> None:
    def kernel_name(self: object, problem: ConvProblem, outputs: tuple[Output, ...]) -> str:
        return "deep" if outputs == ("forward",) else "wide"

    mine = around(ReferenceBackend, lambda kernel, *_: kernel, name="two_kernels", kernel_name=kernel_name)
    register(mine, candidate=False)
    with use_backend("two_kernels"), trace() as t:
        e = explain(nn.Conv1d(2, 2, 3), torch.ones(1, 2, 5))
        conv1d(torch.ones(1, 2, 5), torch.ones(2, 2, 3, requires_grad=True)).sum().backward()
    assert [(r.output, r.runs) for r in e.rows if r.chosen and r.runs] == [
        ("forward", "deep"), ("grad_input", "wide"), ("grad_weight", "wide")]  # fmt: skip
    assert [(r.outputs, r.kernel) for r in t] == [("forward", "deep"), ("grad_weight", "wide")]


def test_measuring() -> None:
    e = explain_problem(P, ["grad_weight"], measure=True)
    chosen = e.rows[0]
    assert 0 < e.of_limit(chosen) < 5
    for part, said in ((1.04, False), (1.5, True)):
        fast = replace(e, rows=(replace(chosen, seconds=e.limits.seconds(e.problem) / part),))
        assert ("convgrad info --measure" in " ".join(str(fast).split())) == said
    assert "measured on this CPU" in " ".join(str(e).split())
    if torch.backends.mkldnn.is_available():
        aten = next(r for r in e.rows if r.backend == "aten")
        assert "backward_weights" in aten.runs
    with pytest.raises(ValueError, match="is not here"):
        explain_problem(P, device=H100, measure=True)


def test_what_is_computed_in_sweeps_only_is_not_measured_alone() -> None:
    together = {"name": "in_one_sweep", "passes": (), "sweeps": BOTH_GRADIENTS[:1]}
    register(around(ReferenceBackend, lambda *_: pytest.fail("called"), **together), candidate=False)
    with use_backend("in_one_sweep"):
        e = explain_problem(P, ["grad_input", "grad_weight"], measure=True)
    assert set(e.chosen().values()) == {"in_one_sweep"}
    assert {r.backend for r in e.rows if r.seconds is not None} == {"aten"}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_a_dtype_that_a_backend_does_not_know(dtype: torch.dtype) -> None:
    """The compiled kernels have no name for it: not asked what they would run, they give the reason."""
    e = explain_problem(P.replace(dtype=dtype))
    assert e.chosen()["forward"] == "aten"
    (native,) = (a for a in e.rows if (a.output, a.backend) == ("forward", "native"))
    assert native.runs == ""
    assert not native.usable


@pytest.mark.parametrize("transposed", [False, True])
def test_a_complex_problem_names_the_kernel_of_its_real_convolutions(transposed: bool) -> None:
    p = ConvProblem.parse(f"{P} complex64", transposed=transposed)
    of = [next(r for r in explain_problem(q).rows if r.by_aten) for q in (p, p.replace(dtype=torch.float32))]
    assert of[0].runs == f"{of[1].runs}, as three real ones"


def test_an_empty_problem() -> None:
    e = explain_problem(P.replace(batch=0), measure=True)
    assert set(e.chosen().values()) == {"engine"}


@pytest.mark.parametrize(
    "padding", ["same", "valid", ((0, 2), (1, 0)), (0, 2, 1, 0), (1, 2), 1, -1, ((-1, -1), (0, 1))]
)
def test_padding_is_read_as_by_the_functions(padding: Any) -> None:
    x, w = torch.ones(1, 4, 9, 9), torch.ones(4, 4, 3, 3)
    assert explain(x, w, padding=padding).problem == explain(convgrad.conv2d, x, w, padding=padding).problem


FORM = {"padding": 3, "groups": 8}
X, W, Y = (torch.empty(size) for size in ((2, 8, 9, 9), (8, 1, 7, 7), (2, 8, 9, 9)))
BACKWARD = (Y, X, W, None, [1, 1], [3, 3], [1, 1], False, [0, 0], 8, [True, True, False])


@pytest.mark.parametrize("device", [None, H100])
@pytest.mark.parametrize(
    ("given", "form", "outputs"),
    [
        ((X, W), FORM, OUTPUTS),
        ((TensorSpec(X.shape), TensorSpec(W.shape)), FORM, OUTPUTS),
        *(
            ((call, X.to("meta"), torch.randn(W.shape)), FORM, OUTPUTS)
            for call in (torch.conv2d, F.conv2d, conv2d, lambda *a, **k: torch.conv2d(*a, **k).relu())
        ),
        ((convgrad.grad_weight, X, W.shape, Y), FORM, ["grad_weight"]),
        ((convgrad.grad_input, X.shape, W, Y), FORM, ["grad_input"]),
        ((convgrad.grad_weight, X, W.shape, Y), FORM | {"outputs": "forward"}, ["forward"]),
        ((torch.ops.aten.convolution_backward, *BACKWARD), {}, ["grad_input", "grad_weight"]),
    ],
)
def test_operands_and_functions(given: Any, form: dict[str, Any], outputs: Any, device: str | None) -> None:
    e = explain(*given, device=device, **form)
    assert e.problem == P
    assert {*e.chosen()} == {*outputs}


def test_a_layout_and_transposed_operands() -> None:
    assert explain(X.to(memory_format=torch.channels_last), W, **FORM).problem.channels_last
    form = {"transposed": True, "stride": 2}
    assert explain(torch.empty(2, 4, 9), torch.empty(4, 3, 4), **form).problem.transposed
    e = explain(convgrad.grad_input, (1, 4, 5, 5), torch.empty(4, 3, 3, 3), torch.empty(1, 3, 7, 7), transposed=True)
    assert {*e.chosen()} == {"forward"}


def test_no_compiled_kernels_are_said_once_and_first(monkeypatch) -> None:
    monkeypatch.setattr("convgrad.diagnostics.explanation.why_absent", lambda: "there is no compiler")
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
    for e in (explain_problem(P), explain(model, torch.empty(1, 8, 9, 9))):
        assert str(e).startswith("NO COMPILED KERNELS: there is no compiler")
        assert str(e).count("NO COMPILED KERNELS") == 1
    assert "NO COMPILED" not in str(explain_problem(P, device=H100))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 7, padding=3, groups=8) for _ in range(3))
        self.weight = nn.Parameter(torch.randn(8, 4, 2, 2))
        self.drop = nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(self.stem(x)))
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.conv_transpose2d(x, self.weight, stride=2)


def test_a_model() -> None:
    net, x = Net(), torch.randn(2, 3, 19, 19)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    torch.manual_seed(0)
    wanted = torch.rand(1)
    torch.manual_seed(0)
    e = explain(net, x)
    assert torch.equal(torch.rand(1), wanted)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert [(x.names, x.problem.kernel_size) for x in e] == [
        (("stem",), (3, 3)), (("blocks.0", "blocks.1", "blocks.2"), (7, 7)), (("",), (2, 2))]  # fmt: skip
    assert [len(e.select(s)) for s in ("7x7", "depthwise", "blocks.1", "stem 3x3", "transposed")] == [1] * 5
    with pytest.raises(ValueError, match="no convolution of this model matches '9x9'"):
        e.select("9x9")
    assert "5 convolutions, 3 different" in str(e)
    assert "<table>" in e._repr_html_()
    assert json.loads(json.dumps(e.to_dict()))["layers"][1]["names"] == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_model_that_draws_random_numbers() -> None:
    """Afterwards the user's random numbers are those that would have come without an explanation."""

    class Drawing(nn.Conv2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * (random.random() + np.random.rand() + torch.rand(()))

    def following() -> list[float]:
        return [random.random(), np.random.rand(), torch.rand(()).item()]

    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    expected = following()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    model = Drawing(3, 8, 3)
    torch.manual_seed(0)
    explain(model, torch.randn(1, 3, 8, 8, generator=torch.Generator()))
    assert following() == expected


def test_a_layer_behind_one_that_raised_has_its_own_name() -> None:
    class Catches(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with suppress(RuntimeError):
                return self[0](x)
            return self[1](x) + F.conv2d(x, self[1].weight)

    e = explain(Catches(nn.Conv2d(4, 4, 3), nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 9, 9))
    assert sorted(name for layer in e for name in layer.names) == ["", "1"]


def test_large_linear_layers_are_convolutions_on_a_cpu() -> None:
    net = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512, bias=False), nn.Linear(512, 4))
    rows = 128 * torch.get_num_threads()
    x = torch.empty(2, rows // 2, 512, device="meta")
    texts = (f"mb1ic512ih1iw{rows}oc1024kh1kw1 channels_last bias", f"mb1ic1024ih1iw{rows}oc512kh1kw1 channels_last")
    e = explain(net, x)
    assert [(layer.kind, layer.problem) for layer in e] == [("Linear", ConvProblem.parse(text)) for text in texts]
    with pytest.raises(ValueError, match="no convolution ran"):
        explain(net, x, device="h100")


def test_a_layer_that_asks_for_a_backend() -> None:
    assert explain(nn.Conv2d(8, 8, 7, padding=3, groups=8), torch.randn(2, 8, 9, 9)).problem == P.replace(has_bias=True)
    asks, does_not = (convgrad.nn.Conv2d(8, 8, 3, groups=8, backend=name) for name in ("im2col", None))
    e = explain(nn.Sequential(asks, does_not), torch.randn(2, 8, 19, 19))
    first, second = e
    assert {first.explanation.chosen()[pass_] for pass_ in PASSES} == {"im2col"}
    assert first.explanation.rows[0].reasons == ("requested by name",)
    assert "im2col" not in second.explanation.chosen().values()


@pytest.mark.parametrize("kind", [nn.Linear, convgrad.nn.Linear])
def test_a_linear_layer_that_is_left_to_pytorch(kind) -> None:
    rows = 1536 * torch.get_num_threads()  # enough for any processor
    layer, x = kind(128, 256), torch.randn(rows, 128)
    for more, input, why in (
        ({}, x[:2], "a linear layer of fewer than 32 rows, 2 features, or 17 million FLOPs a pass and thread"),
        ({}, torch.randn(128, rows).t(), "a linear layer whose input is not contiguous"),
        ({"device": "h100"}, x, "a linear layer, and convgrad computes these on a CPU only"),
    ):
        e = explain(layer, input, **more)
        assert {(r.backend, r.reasons) for r in e.rows if r.chosen} - {BIAS} == {("aten:matmul", (why,))}
    e = explain(layer, x)
    with convgrad.trace() as ran, torch.no_grad():
        convgrad.nn.Linear(128, 256)(x)
    assert [r.backend for r in ran] == [e.chosen()["forward"]] * (e.chosen()["forward"] != "aten:matmul")


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mkldnn", [False, True])
def test_layouts_on_the_way_are_those_of_a_real_run(last: bool, mkldnn: bool) -> None:
    net, x = Net(), torch.randn(2, 3, 19, 19)
    if last:
        x = x.to(memory_format=torch.channels_last)
    torch._C._set_mkldnn_enabled(mkldnn)
    here = Machine.here()
    described = [c.problem for c in capture(net, (x,), {}, here, OUTPUTS)]
    assert described == [c.problem for c in _run(net, (x,), {}, here, OUTPUTS, meta=False)]


class WithoutAutocast(nn.Module):
    """Its first layer computes in float32 also under autocast, which casts what the second one gets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8)
        self.norm, self.linear = nn.BatchNorm2d(8), nn.Linear(8, 1024)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            y = self.first(x.float())
        return self.linear(self.norm(self.second(y)).mean((2, 3)).repeat(64 * torch.get_num_threads(), 1))


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_under_autocast_as_in_a_real_run(given: torch.dtype) -> None:
    net, x, here = WithoutAutocast(), torch.randn(32, 3, 19, 19).to(given), Machine.here()
    with torch.autocast("cpu", torch.bfloat16):
        described = [c.problem for c in capture(net, (x,), {}, here, OUTPUTS)]
        real = [c.problem for c in _run(net, (x,), {}, here, OUTPUTS, meta=False)]
        linear = explain(net.linear, torch.randn(32 * 64 * torch.get_num_threads(), 8))
        operands = explain(x, net.first.weight, net.first.bias)
        assert explain(x, weight=net.first.weight, bias=net.first.bias) == operands
        doubles = explain(x.double(), net.first.weight.double())
    assert described == real
    assert [p.dtype for p in described] == [torch.float32, torch.bfloat16, torch.bfloat16]
    for e, dtype in ((linear, torch.bfloat16), (operands, torch.bfloat16), (doubles, torch.float64)):
        assert e.problem.dtype == dtype
    if not cpu_lacks(torch.bfloat16):
        assert linear.rows[0].reasons == ("a linear layer under autocast",)


def test_a_model_that_needs_values_runs_for_real_and_keeps_its_state() -> None:
    class NeedsAValue(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum().item() > -1e9 else x

    net = NeedsAValue(nn.Conv1d(2, 2, 3), nn.BatchNorm1d(2))
    before = net[1].running_mean.clone()
    e = explain(net, torch.randn(2, 2, 9))
    assert [x.names for x in e] == [("0",)]
    assert torch.equal(net[1].running_mean, before)
    with pytest.raises(ValueError, match="cannot run on the meta device"):
        explain(net, torch.randn(2, 2, 9, device="meta"))


@pytest.mark.parametrize("what", [lambda net: net.forward, lambda net: lambda x: net(x) + 0, torch.jit.script])
def test_what_is_called_keeps_its_statistics(what: Any) -> None:
    """A method, a function around a model, and a scripted module cannot run on the meta device."""
    net, x = nn.Sequential(nn.Conv1d(2, 2, 3), nn.BatchNorm1d(2)), torch.randn(2, 2, 9, requires_grad=True)
    given = what(net)
    waiting = net(x).sum()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert explain(given, x).problem == ConvProblem.parse("mb2ic2iw9oc2kw3 bias")
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    waiting.backward()


def test_a_lazy_layer_stays_lazy() -> None:
    net = nn.Sequential(nn.LazyConv1d(2, 3))
    assert explain(net, torch.randn(2, 2, 9)).layers[0].names == ("0",)
    assert type(net[0]) is nn.LazyConv1d
    with pytest.raises(ValueError, match="call the model once before"):  # PyTorch cannot copy it
        explain(nn.Sequential(*net, nn.LazyBatchNorm1d()), torch.randn(2, 2, 9))


@torch.inference_mode()
def test_in_inference_mode_as_outside() -> None:
    assert explain(nn.Conv1d(2, 2, 3), torch.randn(2, 2, 9)).problem == ConvProblem.parse("mb2ic2iw9oc2kw3 bias")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, and answers for itself")
def test_a_described_gpu_has_the_libraries_of_its_own_build() -> None:
    text = "g96mb8ic96ih56oc96kh7ph3 bfloat16"

    def reasons(text: str, device: str, backend: str) -> dict[str, str]:
        e = explain(text, device=device)
        return {r.output: "; ".join(r.reasons) for r in e.rows if r.backend == backend}

    for device in ("h100", "mi300x"):
        for backend in ("aten:cudnn", "aten:miopen"):
            assert not any("this PyTorch" in why for why in reasons(text, device, backend).values())
    last = reasons(f"{text} channels_last", "h100", "aten:cudnn")
    assert set(last.values()) == {"can compute it; triton was chosen"}  # why is said once, where triton is
    for device in ("h100", "a100"):
        why = reasons(f"{text} channels_last", device, "triton")["forward"]
        assert why.startswith("proposed by rule, and timed against PyTorch's own at its first call: it reads")
        assert "cuDNN's" in why  # which is PyTorch's choice for this layout
        dense = reasons("mb8ic96ih56oc96kh7ph3 bfloat16", device, "aten")
        assert dense["forward"] == "no rule prefers another backend"
        assert dense["grad_input"] == f"{dense['forward']}, in one call with grad_weight and grad_bias"
    assert "picks CudaDepthwise2d" in reasons(text, "h100", "aten:cudnn")["grad_weight"]
    assert set(reasons(text, "h100", "aten:mkldnn").values()) == {"oneDNN needs the CPU, got cuda"}
    assert reasons(text, "h100", "aten:miopen")["forward"] == "PyTorch has no MIOpen on h100"
    assert reasons(text, "mi300x", "aten:cudnn")["forward"] == "PyTorch has no cuDNN on mi300x"


TEXT = "g8mb1ic8ih8oc8kh3ph1"
SOMETHING = r"a problem or its text, an input and a weight, a module or a function; got"
REFUSED: list[Any] = [
    ((None,), {}, TypeError, SOMETHING),
    ((5,), {}, TypeError, SOMETHING),
    ((P, torch.empty(1)), {}, TypeError, r"beside a problem there is only device=.*got Tensor"),
    ((torch.ones(1, 2, 3), "weight"), {}, TypeError, "expected a Tensor or a TensorSpec, got str"),
    ((torch.ones(1, 7, 9, 9), torch.empty(8, 1, 7, 7)), {"groups": 8}, ShapeError, "to have 8 channels"),
    ((torch.ones(1, 1, 3),), {}, TypeError, r"explain\(input, weight\).* missing .* 'weight'"),
    ((torch.ones(1, 1, 3), torch.ones(1, 1, 3)), {"pad": 1}, TypeError, r"explain\(input, weight\).* keyword .*'pad'"),
    ((nn.Conv1d(1, 1, 3),), {}, TypeError, r"explain\(Conv1d\) also needs the arguments of the call"),
    ((conv2d,), {}, TypeError, r"explain\(conv2d\) also needs the arguments"),
    ((nn.Linear(8, 8), torch.ones(3, 9)), {}, RuntimeError, "mat1 and mat2 shapes cannot be multiplied"),
    ((torch.relu, torch.ones(3)), {}, ValueError, "no convolution ran in this relu"),
    ((nn.ReLU(), torch.ones(3)), {}, ValueError, "no convolution ran in this ReLU"),
    ((TEXT,), {"outputs": "gw"}, ValueError, "unknown output 'gw'; outputs are forward, grad_input"),
    ((TEXT,), {"outputs": ["forward", "bias"]}, ValueError, "unknown output 'bias'; outputs are"),
    ((TEXT,), {"device": 0}, TypeError, "a torch.device or a description such as 'h100', got 0"),
    ((TEXT,), {"device": 1.5}, TypeError, "a torch.device or a description such as 'h100', got 1.5"),
    ((TEXT,), {"device": "h100 bfloat16"}, ValueError, "'bfloat16' belongs to the problem"),
    ((TEXT,), {"device": "h100 channels_last"}, ValueError, "'channels_last' belongs to the problem"),
]


@pytest.mark.parametrize(("given", "options", "error", "words"), REFUSED, ids=[row[3] for row in REFUSED])
def test_what_cannot_be_explained_is_refused_in_words(given: Any, options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        explain(*given, **options)


def test_a_transposed_problem_says_which_pass_is_its_output() -> None:
    text = str(explain(nn.ConvTranspose2d(8, 8, 3), torch.empty(1, 8, 5, 5)))
    assert text.index("\ngrad_input (its output)") < text.index("\nforward (its grad_input)")
    assert "(its" not in str(explain(nn.Conv2d(8, 8, 3), torch.empty(1, 8, 5, 5)))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [({"native": 2.0}, "0.5x as fast as aten"), ({}, "no faster than aten"), ({"native": 0.25}, "4x as fast as aten")],
)
def test_what_was_measured_is_said_in_place_of_what_a_rule_expected(monkeypatch, seconds, words) -> None:
    monkeypatch.setattr("convgrad.engine.measure.Comparison.median", lambda seen, name: seconds.get(name, 1.0))
    chosen = [r for r in explain_problem(P, "forward", measure=True).rows if r.chosen]
    assert [(r.backend, r.reasons) for r in chosen] == [("native", (f"by rule; in this measurement {words}",))]


def test_the_layout_is_that_of_the_operands_that_a_backend_gets() -> None:
    e = explain_problem(P.replace(memory_format=torch.channels_last), "forward")
    found = {r.backend: r.layout for r in e.rows}
    names = ("native", "aten", "reference", "triton:banded")
    assert [found[n] for n in names] == ["channels_last", "channels_last", "any strides", "contiguous"]
