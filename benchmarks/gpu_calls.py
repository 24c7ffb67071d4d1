"""What `gpu` runs in its worker processes: our calls and PyTorch's, their check and their times.

Every function takes and returns plain values, for it is sent to another process.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from gpu_problems import LAYOUTS, SWEEP, WHAT, layouts
from torch import Tensor

from convgrad._compat import channels_last_of
from convgrad.backends.base import Backend
from convgrad.check import accepts
from convgrad.diagnostics import Machine, limits_of
from convgrad.engine import choose, plan_for, prepare
from convgrad.engine.measure import compare, empty_launch, measurer, second_call
from convgrad.engine.registry import get_backend
from convgrad.problem import OPERANDS, ConvProblem, Outputs, Pass, Slot
from convgrad.testing import check_backend


def operands(problem: ConvProblem, device: str, integers: bool, layout: str = "") -> dict[Slot, Tensor]:
    """A tensor for each slot, in the problem's layout; a sequence in ``channels_last`` has strides (L*C, 1, C)."""
    made: dict[Slot, Tensor] = {}
    generator = torch.Generator(device).manual_seed(0)
    slots: tuple[Slot, ...] = ("input", "weight", "grad_output")
    for slot in slots:
        shape = problem.shape_of(slot)
        if integers:
            values = torch.randint(-1, 2, shape, generator=generator, device=device).to(problem.dtype)
        else:
            values = torch.randn(shape, generator=generator, device=device).to(problem.dtype)
        if slot == "weight":
            made[slot] = values
        elif problem.ndim == 1 and layout == "channels_last":
            made[slot] = values.mT.contiguous().mT
        else:
            made[slot] = values.contiguous(memory_format=problem.memory_format)
    return made


# ---- what is called --------------------------------------------------------------------------------


def taking(problem: ConvProblem, names: str, device: str) -> list[str]:
    """Those of some backends, by name with commas between, that can compute something of a problem.

    The first one if none can: its rows then say why.
    """
    given, problems = names.split(","), layouts(problem).values()
    can = [n for n in given if any(accepts(get_backend(n), p, torch.device(device)) for p in problems)]
    return can or given[:1]


def ours(
    backend: Backend, problem: ConvProblem, what: str, given: dict[Slot, Tensor]
) -> Callable[[], tuple[Tensor, ...]]:
    """Our call, with the copy that the engine makes of an operand in another layout; ``backward`` is one sweep where
    there is one, else both passes.
    """
    if what == "backward":
        device = given["input"].device
        if SWEEP in backend.sweeps and not backend.reasons_against(problem, SWEEP, device):
            sweep = backend.bind(problem, SWEEP)
            slots = [given[slot] for slot in ("grad_output", "input", "weight")]
            return lambda: sweep(*(prepare(backend, problem, t) for t in slots))
        calls = [ours(backend, problem, one, given) for one in SWEEP]
        return lambda: (*calls[0](), *calls[1]())
    pass_ = cast(Pass, what)
    run = backend.bind(problem, (pass_,))
    first, second = (given[slot] for slot in OPERANDS[pass_])
    return lambda: (run(prepare(backend, problem, first), prepare(backend, problem, second)),)


def pytorch(
    problem: ConvProblem, what: str, given: dict[Slot, Tensor], benchmark: bool
) -> Callable[[], tuple[Tensor | None, ...]]:
    """PyTorch's call. A causal convolution is padded on both sides, as models write it, and cut for nothing."""
    padding = [max(low, high) for low, high in problem.padding]
    extra = [p - high for p, (_, high) in zip(padding, problem.padding, strict=True)]
    x, weight, grad = given["input"], given["weight"], given["grad_output"]
    if any(extra):
        grad = F.pad(grad, [e for n in reversed(extra) for e in (0, n)])
    stride, dilation, groups = list(problem.stride), list(problem.dilation), problem.groups
    conv = (F.conv1d, F.conv2d, F.conv3d)[problem.ndim - 1]
    cut = (..., *(slice(0, n) for n in problem.output_size))
    mask = [what in ("grad_input", "backward"), what in ("grad_weight", "backward"), False]

    def run() -> tuple[Tensor | None, ...]:
        torch.backends.cudnn.benchmark = benchmark
        if what == "forward":
            return (conv(x, weight, None, stride, padding, dilation, groups)[cut],)
        results = torch.ops.aten.convolution_backward(
            grad, x, weight, None, stride, padding, dilation, False, [0] * problem.ndim, groups, mask
        )
        return tuple(r for r, wanted in zip(results, mask, strict=True) if wanted)

    return run


def exact(problem: ConvProblem, what: str, device: str) -> list[Tensor]:
    """What small integers must give: PyTorch's own kernels in float32, which add without rounding."""
    wide = problem.replace(dtype=torch.float32)
    with torch.backends.cudnn.flags(enabled=False):
        return [r for r in pytorch(wide, what, operands(wide, device, integers=True), False)() if r is not None]


# ---- tasks of the workers --------------------------------------------------------------------------


def conform(text: str, names: str, device: str) -> dict[str, Any]:
    """The conformance suite on one problem: checks passed, and what failed."""
    found: dict[str, Any] = {"passed": 0, "failures": []}
    for name in taking(ConvProblem.parse(text), names, device):
        report = check_backend(get_backend(name), [text], device=device, repeats=5)
        found["passed"] += report.passed
        found["failures"] += [f"{name}, {text}: {failure}" for failure in report.failures]
    return found


def warm(text: str, names: str, device: str) -> dict[str, Any]:
    """Run every call of ours for a problem, so that it is compiled into Triton's cache on disk."""
    problem = ConvProblem.parse(text)
    found: dict[str, Any] = {"passed": 0, "failures": []}
    some = LAYOUTS if problem.ndim == 1 else LAYOUTS[:1]  # the problem says which, but of a sequence
    calls = product(taking(problem, names, device), some, WHAT)
    for name, layout, what in calls:
        given = operands(problem, device, integers=True, layout=layout)
        try:
            second_call(ours(get_backend(name), problem, what, given), torch.device(device))
            found["passed"] += 1
        except Exception as error:
            found["failures"].append(f"{name}, {text} {what}: {short(error)}")
    return found


def measure(text: str, what: str, backend_name: str, device: str, seconds: float) -> dict[str, Any]:
    """Check and time one call in every layout: seconds by name, or what is wrong."""
    problem, backend = ConvProblem.parse(text), get_backend(backend_name)
    row: dict[str, Any] = {"times": {}, "wrong": 0}
    expected = exact(problem, what, device)
    calls: dict[str, Callable[[], object]] = {}
    slow = 0.0
    for layout, p in layouts(problem).items():
        got = ours(backend, p, what, operands(p, device, integers=True, layout=layout))()
        row["wrong"] += sum(int((g != e.to(p.dtype)).sum()) for g, e in zip(got, expected, strict=True))
        if row["wrong"]:
            return {**row, "error": f"{row['wrong']} elements are wrong in {layout}"}
        del got
        given = operands(p, device, integers=False, layout=layout)
        calls[f"ours {layout}"] = ours(backend, p, what, given)
        calls[f"pytorch {layout}"] = pytorch(p, what, given, benchmark=layout == "channels_last")
        for key in (f"ours {layout}", f"pytorch {layout}"):
            try:
                slow = max(slow, second_call(calls[key], torch.device(device)))
            except Exception as error:
                if key.startswith("ours"):
                    raise
                del calls[key]  # PyTorch has no kernel for it, or no memory
                row["refused"] = f"{key}: {short(error)}"
    del expected
    rounds: dict[str, Any] = {"least_rounds": 2} if slow > 0.02 else {}
    baseline = next((key for key in calls if key.startswith("pytorch")), "ours NCHW")
    seen = compare(calls, baseline, device=device, seconds=seconds, **rounds)
    row["times"] = {key: seen.median(key) for key in calls}
    row["speedup"] = str(seen.speedup("ours NCHW"))
    return row


def short(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:200]}"


def card(device: str) -> dict[str, float | str | None]:
    """Its name, bytes per second of a large copy, read and written, float32 operations per second by its datasheet, and
    the seconds of a launch that does nothing.
    """
    size = (1 << 30) if device != "cpu" else (1 << 20)
    a = torch.empty(size, dtype=torch.uint8, device=device).fill_(7)
    b = torch.empty_like(a)
    seconds = compare({"copy": lambda: b.copy_(a)}, device=device, seconds=0.5).median("copy")
    one, machine = a[:1], Machine.here(device)
    known = limits_of(machine, torch.float32) if device == "cuda" else None
    return {
        "device": machine.label or device,
        "copy bytes/s": 2 * size / seconds,
        "float32 peak": known and known.flops_per_second,
        "launch": empty_launch(device) if device != "cpu" else compare({"": one.zero_}, seconds=0.2).median(""),
    }


def sanitize(text: str, names: str, device: str) -> dict[str, Any]:
    """Every call of a problem under ``compute-sanitizer``, which finds each access outside of an allocation."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return {"passed": 0, "failures": ["compute-sanitizer is not installed"]}
    code = f"import gpu_calls as g; f = g.warm({text!r}, {names!r}, {device!r})['failures']; assert not f, f"
    here = Path(__file__).parent
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [tool, "--error-exitcode", "9", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False, timeout=300)
    said = (done.stdout + done.stderr)[-300:].replace("\n", " ")
    return {"passed": int(done.returncode == 0), "failures": [f"{text}: {said}"] if done.returncode else []}


# ---- steps -----------------------------------------------------------------------------------------


def training_step(name: str, batch: int, layout: str, mode: str, device: str) -> dict[str, Any]:
    """A step under autocast to bfloat16, stock and after `accelerate_`: seconds.

    Args:
        name: of a function of `networks`, or of a model of torchvision for images of 224x224.
        mode: one of `MODES`. A CUDA graph takes no time of the processor.
    """
    import networks

    import convgrad

    torch.manual_seed(0)
    net, x = networks.__dict__[name](batch) if name in networks.__dict__ else _of_torchvision(name, batch)
    net, x = net.to(device).train(), x.to(device)
    for module in net.modules():
        if type(module).__name__ in ("Dropout", "StochasticDepth"):
            module.p = 0.0  # both sides compute the same
    if layout == "channels_last":
        memory_format = channels_last_of(x.dim() - 2)
        net, x = net.to(memory_format=memory_format), x.contiguous(memory_format=memory_format)
    other = copy.deepcopy(net)
    report = convgrad.accelerate_(other, example_inputs=x)  # without them it replaces nothing on a GPU
    calls, losses = {}, {}
    for key, model in (("stock", net), ("ours", other)):
        for _ in range(2):  # what rules propose is timed eagerly, and all of it, as in the first minutes of a training
            measurer._state.spent = 0.0
            _step(model, x)
        step = partial(_step, torch.compile(model) if mode == "compiled" else model, x)
        losses[key] = step().item()
        calls[key] = _captured(step) if mode == "CUDA graph" else step
    if not abs(losses["ours"] - losses["stock"]) < 0.02 * abs(losses["stock"]):
        return {"error": f"the losses are {losses}"}
    seen = compare(calls, "stock", device=device, seconds=1.5)
    return {"replaced": report.counts[0][0], "speed": str(seen.speedup("ours")),
            **{key: seen.seconds(key) for key in calls}}  # fmt: skip


def _of_torchvision(name: str, batch: int) -> tuple[torch.nn.Module, Tensor]:
    import torchvision

    return getattr(torchvision.models, name)(), torch.randn(batch, 3, 224, 224)


def _step(model: torch.nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16, cache_enabled=False):
        result = model(x)
    loss = result.float().square().mean()
    loss.backward()
    return loss.detach()


def _captured(step: Callable[[], object]) -> Callable[[], object]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


# ---- host time -------------------------------------------------------------------------------------


_PERTURB = -6  # M_PERTURB of malloc.h


def host(text: str, device: str, seconds: float) -> dict[str, float | str]:
    """Microseconds that the processor takes to issue a call, by PyTorch and by convgrad, without and with gradients.

    On a GPU convgrad's is by `triton` where that can.
    """
    import convgrad

    with contextlib.suppress(AttributeError, OSError, TypeError):  # glibc only
        ctypes.CDLL(None).mallopt(_PERTURB, 0)  # a child fills its memory, which took 5 % of a call
    problem, where = ConvProblem.parse(text), torch.device(device)
    # No rule proposes them for so short a call. A request for this thread alone would go through Python.
    convgrad.set_default_backend("triton" if accepts(get_backend("triton"), problem, where) else None)
    given = operands(problem, device, integers=False)
    x, weight = given["input"].requires_grad_(), given["weight"].requires_grad_()
    d, padding = problem.ndim, problem.padding[0][0]
    functions = {"PyTorch": getattr(F, f"conv{d}d"), "convgrad": getattr(convgrad, f"conv{d}d")}

    def forward(conv: Callable[..., Tensor]) -> None:
        with torch.no_grad():
            conv(x, weight, None, 1, padding, 1, problem.groups)

    def step(conv: Callable[..., Tensor]) -> None:
        conv(x, weight, None, 1, padding, 1, problem.groups).sum().backward()

    found: dict[str, float | str] = {}
    for what, call in (("forward", forward), ("step", step)):
        for conv in functions.values():  # compiled, decided, and in the table of calls
            for _ in range(5):
                call(conv)
        seen = compare({name: partial(call, conv) for name, conv in functions.items()}, "PyTorch", seconds=seconds)
        found |= {f"{what}, {name}": 1e6 * seen.median(name) for name in functions}
    found["by"] = "; ".join(step.backend.name for step in plan_for(problem, ("forward",), where).steps)
    return found


# ---- graphs ----------------------------------------------------------------------------------------


def _small(backend: str) -> ConvProblem:
    kernel = "kh13ph6" if "banded" in backend else "kh3ph1"
    return ConvProblem.parse(f"g32ic32oc32mb4ih28{kernel}")


def graph_replays(backend: str, device: str) -> dict[str, str]:
    """Capture both gradients into a CUDA graph, replay it on other operands, compare."""
    problem = _small(backend)
    given = operands(problem, device, integers=True)
    call = ours(get_backend(backend), problem, "backward", given)
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    given["input"].neg_()
    graph.replay()
    torch.cuda.synchronize()
    equal = all(torch.equal(a, b) for a, b in zip(captured, call(), strict=True))
    return {"result": "equal" if equal else "WRONG"}


def compiled_agrees(backend: str, device: str, mode: str | None) -> dict[str, str]:
    """A compiled step, forward and backward, against the same step in eager mode, three times on other operands."""
    import convgrad

    problem = _small(backend)
    given = operands(problem, device, integers=True)
    x, weight = given["input"].requires_grad_(), given["weight"].requires_grad_()

    def step(x: Tensor, weight: Tensor) -> Tensor:
        return convgrad.conv2d(x, weight, padding=problem.padding[0][0], groups=problem.groups).relu()

    compiled = torch.compile(step, fullgraph=True, mode=mode)
    worst = 0.0
    for factor in (1.0, -1.0, 2.0):
        results = []
        for run in (compiled, step):
            with convgrad.use_backend(backend):
                y = run(x * factor, weight)
                results.append([t.clone() for t in (y, *torch.autograd.grad(y, (x, weight), given["grad_output"]))])
        worst = max(worst, *((a - b).abs().max().item() for a, b in zip(*results, strict=True)))
    return {"result": "equal" if worst == 0 else f"differs by {worst}"}


# ---- what rules propose ----------------------------------------------------------------------------


def verdicts(text: str, device: str) -> dict[str, str]:
    """For each call of a problem its backend and why, after a first call, which times what a rule proposes.

    What prevents the timing is suppressed in a user's call, and raised here.
    """
    problem, where = ConvProblem.parse(text), torch.device(device)
    measurer._state.spent = 0.0  # of an earlier problem in this process, after which a call would wait for its time
    given = operands(problem, device, integers=False)
    found: dict[str, str] = {}
    calls: list[Outputs] = (
        [("forward",), SWEEP] if problem.depthwise else [("forward",), ("grad_input",), ("grad_weight",)]
    )
    for outputs in calls:
        plan = plan_for(problem, outputs, where)
        if outputs == SWEEP:
            plan.gradients(given["grad_output"], given["input"], given["weight"])
        else:
            plan.contract(*(given[slot] for slot in OPERANDS[cast(Pass, outputs[0])]))
        steps = choose(problem, outputs, where)
        for step in steps:
            if step.proposed:
                pytorchs = step._replace(backend=get_backend("aten"))
                measurer._compared(problem, step.outputs, where, {"aten": (pytorchs,), step.backend.name: (step,)})
                raise RuntimeError(f"the first call did not time {step.backend.name} for {'+'.join(step.outputs)}")
        found["+".join(outputs)] = "; ".join(f"{step.backend.name}: {step.reason}" for step in steps)
    return found
