"""Runs in a process that `test_processes` starts: Triton's launcher and ours launch onto the same stand-in driver."""

import ctypes
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.standin_cuda import STREAM, Driver, operand
from torch import Tensor
from triton import knobs

from convgrad.backends.triton import TritonBackend, TritonBandedBackend, argument_block, launch
from convgrad.backends.triton.launch import Steps
from convgrad.problem import OPERANDS, ConvProblem, Outputs

CPU = torch.device("cpu")
BOTH: Outputs = ("grad_input", "grad_weight")
ALL: Outputs = (*BOTH, "grad_bias")
OF_THE_OTHER_DEVICE = 0x1234


@pytest.fixture(autouse=True)
def _fresh(driver: Driver) -> Iterator[None]:
    driver.reset()
    yield
    driver.reset()


class Call:
    """A call through Triton's launcher: its tensors, and what the driver got."""

    def __init__(self, driver: Driver, text: str, outputs: Outputs, unaligned: str = "") -> None:
        self.driver, self.problem, self.outputs = driver, ConvProblem.parse(text), outputs
        p = self.problem
        banded = outputs != ALL and not TritonBandedBackend()._reasons_of_the_kernels(p, outputs)
        backend = TritonBandedBackend() if banded else TritonBackend()
        assert not backend._reasons_of_the_kernels(p, outputs)
        names = OPERANDS[outputs[0]] if len(outputs) == 1 else ("grad_output", "input", "weight")
        layouts = {"weight": torch.contiguous_format}
        self.operands: dict[str, Tensor] = {
            name: operand(p.shape_of(name), p.dtype, layouts.get(name, p.memory_format), name not in unaligned)
            for name in names
        }
        given: list[Any] = list(self.operands.values())
        if len(given) == 2:
            given.append(None)
        if p.has_bias and outputs == (p.bias_pass,):
            channels = p.shape_of(p.bias_slot)[1]
            given[2] = self.operands["bias"] = operand(
                (channels,), p.dtype, torch.contiguous_format, "bias" not in unaligned
            )
        size = backend.workspace(p, outputs)
        self.scratch = [torch.empty(size, dtype=torch.uint8)] if size else []
        results = backend.bind(p, outputs)(*given, *(self.scratch or [None]))
        self.results = dict(zip(outputs, results if isinstance(results, tuple) else (results,), strict=True))
        self.by_triton = driver.launched()
        driver.reset()
        self.made = backend._bound(p, outputs, CPU)

    def entry(self) -> argument_block.Entry:
        return argument_block.entry(self.made, self.operands)

    def selected(self) -> Steps:
        return self.made.selected(CPU, self.operands, lambda _place, begin: begin % 16 == 0)

    def tensors(self) -> dict[str, Tensor]:
        return {**self.operands, **self.results}


SEQUENCE = "g16mb1ic16ih1iw40oc16oh1ow40kh1kw4ph0pw3"
#: Problem, outputs, operands that are not aligned, and the kernels.
CASES: list[Any] = [
    ("g8mb2ic8ih8oc8kh3ph1 bias", ("forward",), "", ["correlate"]),
    ("g8mb2ic8ih8oc8kh3ph1 bias", ("forward",), "bias", ["correlate"]),
    ("g8mb2ic8ih8oc8kh3ph1", ("grad_input",), "grad_output weight", ["correlate"]),
    ("g8mb2ic8ih8oc8kh3ph1 bfloat16 channels_last", ("forward",), "input", ["correlate"]),
    ("g4mb800ic4ih8oc4kh3ph1", ("grad_weight",), "input", ["correlate", "add_partials"]),
    ("g4mb800ic4ih8oc4kh3ph1 float16", ALL, "", ["correlate", "add_partials"]),
    ("g3mb800ic3iw8ow8oc3kw3pw1", ALL, "weight", ["correlate", "add_partials"]),
    ("g16mb1ic16ih1iw9oc16oh1ow9kh1kw3ph0pw1 channels_last", BOTH, "grad_output", ["correlate", "add_partials"]),
    ("g2mb1ic2ih4iw4oc2kh3kw1ph1pw0", BOTH, "input", ["correlate"]),
    ("g4mb2ic4iw32oc4kw11pw5 bias", ("forward",), "input", ["correlate"]),
    ("g4mb512ic4iw32oc4kw11pw5 bfloat16", ("grad_weight",), "", ["correlate_sum", "add_partials"]),
    *[
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("g8mb2ic8ih9iw7oc16oh9ow7kh3kw3ph1pw1", ("forward",), "", ["correlate"]),
            ("g8mb2ic8ih9iw7oc8oh5ow4kh3kw3sh2sw2ph1pw1", BOTH, "", ["correlate"]),
            ("g2mb1ic2id4ih4iw4oc2kd3kh3kw3pd1ph1pw1", ("grad_input",), "", ["correlate"]),
            ("g8mb2ic8ih8oc8kh5ph2 float16", ("forward",), "", ["correlate"]),
            ("g64mb800ic64ih8oc64kh3ph1 channels_last bfloat16", ALL, "", ["correlate", "add_partials"]),
            ("g64mb800ic64ih8oc64kh3ph1 channels_last", ("grad_weight",), "input", ["correlate", "add_partials"]),
            (f"{SEQUENCE} channels_last bfloat16", ALL, "input", ["correlate", "add_partials"]),
            (f"{SEQUENCE} channels_last", ("forward",), "", ["correlate"]),
            ("g4mb2ic4ih16oc4kh9ph4", ("forward",), "weight", ["correlate"]),
            ("g4mb2ic4ih16oc4kh9ph4 bfloat16", ("grad_input",), "", ["correlate"]),
            ("g4mb64ic4ih16oc4kh9ph4", ("grad_weight",), "grad_output", ["correlate_sum", "add_partials"]),
            ("g4mb2ic4ih8oc4kh3ph1 transposed bias", ("grad_input",), "", ["correlate"]),
            ("g4mb2ic4ih8oc4kh3ph1 transposed", ("forward",), "", ["correlate"]),
        )
    ],
]


@pytest.mark.parametrize(("text", "outputs", "unaligned", "kernels"), CASES)
def test_the_driver_gets_what_tritons_launcher_passes(
    driver: Driver, text: str, outputs: Outputs, unaligned: str, kernels: list[str]
) -> None:
    """Handle, grid, block, shared memory, stream, and every parameter bit for bit, twice."""
    call = Call(driver, text, outputs, unaligned)
    made = call.entry()
    assert made.scratch == tuple(t.numel() for t in call.scratch)
    assert made.results == {name: (tuple(t.shape), t.stride()) for name, t in call.results.items()}
    assert [one.kernel for one in call.by_triton] == kernels
    assert all(one.attributes == 0 and one.parameters for one in call.by_triton)
    for _ in range(2):
        driver.reset()
        assert driver.launch(made, call.tensors(), call.scratch) == 0
        assert driver.launched() == call.by_triton


def test_arguments_are_in_the_kernels_order(driver: Driver) -> None:
    partials, out, biases, bias = (torch.zeros(n) for n in (210, 70, 15, 5))
    launch.adding(3, 70, 5).start(partials=partials, out=out, bias_partials=biases, bias=bias)
    ((*pointers, parts, weights, channels),) = ([v for _, v in one.parameters][:7] for one in driver.launched())
    assert pointers == [t.data_ptr() for t in (partials, out, biases, bias)]
    assert (parts, weights, channels) == (3, 70, 5)


@pytest.fixture(scope="session")
def call(driver: Driver) -> Call:
    """A sweep with partial sums, bias and scratch memory."""
    return Call(driver, "g4mb800ic4ih8oc4kh3ph1 float16", ALL)


def test_other_tensors_of_the_same_alignment(driver: Driver, call: Call) -> None:
    """Only the addresses differ, each by as much as its tensor's."""
    made, before = call.entry(), call.tensors()
    after = {name: t.clone(memory_format=torch.preserve_format) for name, t in before.items()}
    scratch = [t.clone() for t in call.scratch]
    assert driver.launch(made, after, scratch) == 0
    moved = {b.data_ptr(): a.data_ptr() for b, a in zip(before.values(), after.values(), strict=True)}
    at, to = call.scratch[0].data_ptr(), scratch[0].data_ptr()
    part = call.selected().bias_part
    moved |= {at: to, at + part: to + part}
    expected = [
        one._replace(parameters=tuple((size, moved.get(value, value)) for size, value in one.parameters))
        for one in call.by_triton
    ]
    assert driver.launched() == expected != call.by_triton


def test_sums_in_one_part_leave_nothing_to_be_added(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the channels alone fill the GPU, which shows once the kernel is compiled: later calls are one launch."""
    monkeypatch.setattr(launch, "at_once", lambda *_: 4)
    for text in ("g4mb800ic4ih8oc4kh3ph1 bfloat16", "g4mb800ic4ih8oc4kh3ph1"):
        call = Call(driver, text, ALL)
        assert [one.kernel for one in call.by_triton] == ["correlate", "correlate"]
        made = call.entry()
        assert made.scratch == ()
        assert driver.launch(made, call.tensors(), []) == 0
        assert driver.launched() == call.by_triton[1:]
        driver.reset()


@pytest.mark.parametrize("name", ["input", "grad_weight", "scratch"])
def test_a_tensor_that_is_not_aligned_starts_no_kernel(driver: Driver, call: Call, name: str) -> None:
    tensors, scratch = call.tensors(), call.scratch
    if name == "scratch":
        scratch = [torch.empty(scratch[0].numel() + 1, dtype=torch.uint8)[1:]]
    else:
        t = tensors[name]
        tensors[name] = operand(tuple(t.shape), t.dtype, torch.contiguous_format, False)
    assert driver.launch(call.entry(), tensors, scratch) == -2
    assert driver.launched() == []


def test_an_operand_that_was_not_aligned_may_be(driver: Driver) -> None:
    """The kernel is slower than it need be, and right."""
    call = Call(driver, "g8mb2ic8ih8oc8kh3ph1", ("grad_input",), "grad_output weight")
    tensors = call.tensors() | {"weight": torch.zeros(8, 1, 3, 3)}
    assert driver.launch(call.entry(), tensors, []) == 0
    assert len(driver.launched()) == 1


def test_errors_of_the_driver(driver: Driver, call: Call) -> None:
    driver.reset(error=700)
    assert driver.launch(call.entry(), call.tensors(), call.scratch) == 700


def test_the_context_of_the_device(driver: Driver, call: Call) -> None:
    """A thread that has none, or another device's, launches in that of the kernels, and has its own afterwards."""
    own, made = call.by_triton[0].context, call.entry()
    contexts: list[tuple[int | None, int | None]] = []

    def current() -> int | None:
        found = ctypes.c_void_p()
        driver.library.cuCtxGetCurrent(ctypes.byref(found))
        return found.value

    def work(context: int | None) -> None:
        if context is not None:
            driver.library.standin_enter(context)
        before = current()
        assert driver.launch(made, call.tensors(), call.scratch) == 0
        contexts.append((before, current()))

    for context in (None, OF_THE_OTHER_DEVICE):
        thread = threading.Thread(target=work, args=(context,))
        thread.start()
        thread.join()
    assert contexts == [(None, None), (OF_THE_OTHER_DEVICE,) * 2]
    assert own
    assert [one.context for one in driver.launched()] == [own] * 4


def test_eight_threads(driver: Driver, call: Call) -> None:
    made, failed = call.entry(), []
    driver.reset(most=0)

    def work() -> None:
        failed.extend(filter(None, (driver.launch(made, call.tensors(), call.scratch) for _ in range(2000))))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# ---- no entry ----------------------------------------------------------------------------------------


def test_none_before_the_first_call(driver: Driver, call: Call) -> None:
    made = TritonBackend()._bound(call.problem, call.outputs, CPU)
    assert argument_block.entry(made, call.operands) is None


def test_none_for_another_alignment_than_that_of_a_call(driver: Driver, call: Call) -> None:
    t = call.operands["input"]
    operands = call.operands | {"input": operand(tuple(t.shape), t.dtype, torch.contiguous_format, False)}
    assert argument_block.entry(call.made, operands) is None


def test_none_where_an_operand_or_a_result_is_copied(driver: Driver, call: Call) -> None:
    strided = call.operands | {"input": call.operands["input"].mT}
    assert argument_block.entry(call.made, strided) is None
    negated = call.operands | {"input": torch.ops.aten._neg_view(call.operands["input"])}
    assert argument_block.entry(call.made, negated) is None
    banded = Call(driver, "g4mb2ic4ih16oc4kh9ph4 channels_last bfloat16", ("forward",))
    assert banded.by_triton
    assert argument_block.entry(banded.made, banded.operands) is None


def test_none_while_a_profiler_hooks_tritons_launches(driver: Driver, call: Call) -> None:
    hook: Any = print
    knobs.runtime.launch_enter_hook.add(hook)
    assert argument_block.entry(call.made, call.operands) is None
    knobs.runtime.launch_enter_hook.remove(hook)
    assert argument_block.entry(call.made, call.operands) is not None


def like(kernel: Any, **other: Any) -> SimpleNamespace:
    return SimpleNamespace(**{n: getattr(kernel, n) for n in ("src", "asm", "function", "metadata")} | other)


OTHERS = [
    {"num_ctas": 2}, {"launch_pdl": True}, {"launch_cooperative_grid": True}, {"global_scratch_size": 8},
    {"profile_scratch_size": 8}, {"shared": 229 * 1024}, {"num_warps": 8}, {"target": SimpleNamespace(backend="hip")},
]  # fmt: skip


@pytest.mark.parametrize("other", OTHERS, ids=[next(iter(o)) for o in OTHERS])
def test_none_for_kernels_that_need_more(driver: Driver, call: Call, other: dict[str, Any]) -> None:
    selected, places = call.selected().launches[0]
    pointers = [(i, 0, 16) for i in range(len(places))]
    assert argument_block.packed(selected, pointers, 1) is not None
    changed = like(selected.compiled, metadata=selected.compiled.metadata._replace(**other))
    assert argument_block.packed(selected._replace(compiled=changed), pointers, 1) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".param .u32 correlate_param_7", ".param .u64 correlate_param_7"),
        (".param .u32 correlate_param_7", ".param .align 64 .b8 correlate_param_7[128]"),
        (".reqntid", ".maxntid"),
        (".entry correlate(", ".entry another("),
        ("correlate_param_15,", "correlate_param_15,\n\t.param .u64 x,\n\t.param .u64 y,"),
    ],
)
def test_none_where_the_compiled_kernel_takes_other_parameters(driver: Driver, call: Call, old: str, new: str) -> None:
    selected, places = call.selected().launches[0]
    kernel = selected.compiled
    assert kernel.asm["ptx"].count(old) == 1
    changed = like(kernel, asm={"ptx": kernel.asm["ptx"].replace(old, new)})
    assert (
        argument_block.packed(selected._replace(compiled=changed), [(i, 0, 16) for i in range(len(places))], 1) is None
    )


def test_none_without_the_driver_or_the_compiled_library(
    driver: Driver, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(argument_block, "LIBRARY", "libcuda-that-is-not-there.so")
    assert argument_block.entry(call.made, call.operands) is None
    monkeypatch.setattr(argument_block, "LIBRARY", driver.path.as_posix() + "/../libcuda.so.1")
    argument_block._driver.cache_clear()
    monkeypatch.setattr(argument_block._native_library, "load", lambda: None)
    assert argument_block.entry(call.made, call.operands) is None
    argument_block._driver.cache_clear()


def test_the_stream_is_the_callers(driver: Driver, call: Call) -> None:
    assert driver.launch(call.entry(), call.tensors(), call.scratch) == 0
    assert {one.stream for one in driver.launched()} == {STREAM}
