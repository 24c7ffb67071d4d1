"""The compute step against what PyTorch does: how often kernels run, what is copied, allocated and refused."""

import re
from math import prod

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from convgrad.diagnostics import explain_problem
from convgrad.diagnostics.aten_rules import TensorSpec, trace_aten
from convgrad.errors import DtypeError
from convgrad.problem import ConvProblem

F64 = torch.float64


def allocations(run) -> list[int]:
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        run()
    events = p.profiler.kineto_results.events()
    return [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0]


CASES = {
    "Slow2d": ((3, 4, 10, 11), (6, 4, 3, 3), {"padding": 1}),
    "Slow2d pointwise": ((3, 4, 10, 11), (6, 4, 1, 1), {}),
    "Slow2d grouped": ((3, 4, 10, 11), (6, 2, 3, 3), {"padding": 1, "groups": 2}),
    "Slow2d 1-D": ((3, 4, 12), (6, 4, 3), {"padding": 1, "stride": 2}),
    "SlowDilated2d": ((3, 4, 10, 11), (6, 4, 3, 3), {"padding": 1, "dilation": 2}),
    "Slow3d": ((3, 4, 5, 6, 7), (6, 4, 3, 3, 3), {"padding": 1}),
    "Slow3d pointwise": ((3, 4, 5, 6, 7), (6, 4, 1, 1, 1), {}),
    "Slow3d grouped": ((3, 4, 5, 6, 7), (6, 2, 3, 3, 3), {"padding": 1, "groups": 2}),
    "SlowDilated3d": ((3, 4, 5, 6, 7), (6, 4, 3, 3, 3), {"padding": 1, "dilation": 2}),
    "SlowTranspose2d": ((3, 4, 10, 11), (4, 6, 3, 3), {"padding": 1, "stride": 2, "transposed": True}),
    "SlowTranspose3d": ((3, 4, 5, 6, 7), (4, 6, 3, 3, 3), {"padding": 1, "stride": 2, "transposed": True}),
}


def stated(temporaries: tuple[str, ...], x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, groups: int) -> list[int]:
    """The bytes of each tensor, from what people read of its shape; what belongs to a thread is none of PyTorch's."""
    channels = {"C_in": x.shape[1], "C_out": y.shape[1], "N": x.shape[0], "groups": groups}
    sizes = {"k": prod(w.shape[2:]), "into": prod(x.shape[2:]), "out": prod(y.shape[2:])}
    shapes = [found[1] for t in temporaries if "per thread" not in t and (found := re.match(r"[^(]+\((.*?)\)", t))]
    return [int(8 * prod(eval(re.sub(r"\bin\b", "into", shape), {**channels, **sizes}))) for shape in shapes]


@pytest.mark.parametrize("name", CASES)
def test_temporaries_are_as_large_as_pytorchs(name: str) -> None:
    shape, weight_shape, more = CASES[name]
    x, w = torch.randn(shape, dtype=F64), torch.randn(weight_shape, dtype=F64)
    steps = trace_aten(x, w, **more)
    assert steps.backend.backend == name.split(maxsplit=1)[0]
    d, groups = len(shape) - 2, more.get("groups", 1)
    args = ([more.get("stride", 1)] * d, [more.get("padding", 0)] * d, [more.get("dilation", 1)] * d,
            more.get("transposed", False), [0] * d, groups)  # fmt: skip
    y = torch.convolution(x, w, None, *args)
    both = (True, True, False)
    for temporaries, run in (
        (steps.forward.temporaries, lambda: torch.convolution(x, w, None, *args)),
        (steps.gradients.temporaries, lambda: torch.ops.aten.convolution_backward(y, x, w, None, *args, both)),
    ):
        got, want = allocations(run), stated(temporaries, x, w, y, groups)
        assert want
        if name.endswith("pointwise"):  # "none for 1x1"
            assert max(got) <= max(x.nbytes, w.nbytes, y.nbytes)
        else:
            assert set(want) <= set(got)


def count(name: str, run) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as p:
        run()
    return sum(e.count for e in p.key_averages() if e.key == f"aten::{name}")


@pytest.mark.parametrize(("groups", "dilation"), [(1, 1), (3, 1), (3, 2)])
def test_one_call_for_each_group(groups: int, dilation: int) -> None:
    x, w = torch.randn(2, 6, 9, 9, dtype=F64), torch.randn(6, 6 // groups, 3, 3, dtype=F64)
    steps = trace_aten(x, w, groups=groups, dilation=dilation)
    assert steps.forward.calls == groups
    run = lambda: torch.conv2d(x, w, groups=groups, dilation=dilation)  # noqa: E731
    assert count(steps.forward.function, run) == groups
    if groups > 1:
        assert [c.what for c in steps.forward.copies] == ["3 slices of input", "the outputs of the groups"]
        assert count("cat", run) == 1


def test_copies_into_the_backends_layout() -> None:
    x = torch.randn(2, 8, 9, 9).to(memory_format=torch.channels_last)
    w = torch.randn(8, 8, 3, 3)
    steps = trace_aten(x, w)
    assert steps.memory_format.memory_format == torch.channels_last
    assert [(c.what.split()[0], c.nbytes) for c in steps.forward.copies] == [("weight", w.nbytes)]
    assert trace_aten(x.transpose(2, 3), w).forward.copies[0].nbytes == x.nbytes
    line = torch.randn(2, 9, 8).transpose(1, 2)
    assert "1-D" in trace_aten(line, torch.randn(8, 8, 3)).forward.copies[0].why


def test_a_backend_without_backward_gives_way() -> None:
    x, w = TensorSpec((2, 8, 16, 16)), TensorSpec((8, 1, 3, 3))
    steps = trace_aten(x, w, groups=8, device="cpu macos", need_backward=False)
    assert steps.backend.backend == "Winograd3x3Depthwise"
    assert steps.gradient_backend.backend == "Slow2d"
    assert "convolution_depthwise3x3_winograd" in str(steps)
    assert steps.gradients.function == "_slow_conv2d_backward"


@pytest.mark.parametrize("what", ["weight", "bias"])
def test_operands_of_two_dtypes_are_refused(what: str) -> None:
    x, w, b = torch.randn(2, 8, 9, 9), torch.randn(8, 8, 3, 3), torch.randn(8)
    w, b = (w.double(), b) if what == "weight" else (w, b.double())
    with pytest.raises(RuntimeError, match="should be the same"):
        torch.convolution(x, w, b, [1], [0], [1], False, [0], 1)
    with pytest.raises(DtypeError, match=f"{what} type .* should be the same"):
        trace_aten(x, w, b)


def test_a_padding_mode_is_written_out_before_pytorch_is_called() -> None:
    p = ConvProblem.parse("mb2ic8ih9oc8kh3ph1 circular")
    call = trace_aten(p).call
    assert (call.input.shape, call.geometry.padding) == ((2, 8, 11, 11), ((0, 0), (0, 0)))
    assert call.output_shape == p.output_shape
    assert str(explain_problem(p).aten) == str(trace_aten(p))


def test_padding_of_two_sides_is_a_padded_copy() -> None:
    x, w = torch.empty(2, 8, 9, 9).to(memory_format=torch.channels_last), torch.empty(8, 8, 3, 3)
    steps = trace_aten(x, w, padding=(2, 0, 1, 1))
    assert "padded copy of the input, 2x8x11x9 float32 channels_last" in steps.backend.notes[0]
    assert steps.call.geometry.padding == ((0, 0), (1, 1))
    assert steps.call.output_shape == (2, 8, 9, 9)


def test_the_buffers_of_cuda_are_those_of_its_own_source() -> None:
    """`ConvolutionMM2d.cu` and `NaiveConvolutionTranspose2d.cu` have one `columns` of one image, and no `finput`."""
    x, w = TensorSpec((4, 8, 9, 9)), TensorSpec((8, 8, 3, 3))
    for more, columns in (({}, "C_in/groups * k, out"), ({"transposed": True}, "C_out/groups * k, in")):
        steps = trace_aten(x, w, device="cuda no cudnn", **more)
        assert steps.backend.backend in ("Slow2d", "SlowTranspose2d")
        for run in (steps.forward, steps.gradients):
            assert run.temporaries == (f"columns: ({columns}), one batch item",)
