"""`explain`: every backend's answer for a problem, for operands, for a module or for a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .._compat import cpu_lacks
from ..backends import COPY, Backend, PaddedCopy, described, operand_format
from ..engine import (
    Request,
    Step,
    active,
    backends,
    beats_matmul,
    choose,
    linear_gains,
    measurements,
    plan_for,
    reasons_against,
)
from ..ops import autocast_dtype, autocast_is_on
from ..problem import OUTPUTS, ConvProblem, Output, in_order
from .aten_rules import ConvCall, DeviceLike, Machine, TensorSpec, kernel_of, machine_of
from .capture import Captured, call_here, capture, problem_on
from .explanation import Answer, Explanation, Layer, ModelExplanation, pytorchs_own
from .measure import measured
from .roofline import limits_of

Outputs = Output | Sequence[Output] | None


def explain(
    what: ConvProblem | str | Tensor | TensorSpec | Callable[..., Any], *args: Any, device: DeviceLike = None,
    outputs: Outputs = None, measure: bool = False, **kwargs: Any,
) -> Explanation | ModelExplanation:  # fmt: skip
    """Explain which backend computes each output of a convolution, and why; and what is against every other backend.

    Args:
        what: a `ConvProblem` or its text; an input, followed by a weight and the arguments of ``torch.convolution``;
            a module, a whole model or a function (`convgrad.grad_weight`, too), followed by what it is called with
            (tensors on the meta device are enough); autocast counts, as in a call. DTensors, and a model that
            `convgrad.parallel.shard_` changed, are explained as this process's part, with what it receives from
            others; such a model runs once, in every process.
            The problems of a model that `accelerate_` changed are those of a training step: padding that a kernel
            reads itself belongs to them.
        device: None for the operands' own device; or a description of a machine that is not here, such as
            ``"h100 cudnn 9.10"``, ``"rocm gfx942"``, ``"xpu"``, ``"cpu arm"``.
        outputs: one or several of ``forward, grad_input, grad_weight, grad_bias``; by default all, as if every operand
            required a gradient. Where fewer do, another backend may be chosen.
        measure: also time the chosen backend and ATen here.

    Returns:
        An `Explanation`, or for a model with several convolutions a `ModelExplanation`. Both print as a table, also in
        a notebook; ``to_dict()`` returns plain data.

    Raises:
        TypeError: an argument that cannot be explained.
        ShapeError: operands that do not belong together.
        ValueError: a text, an output or a description that cannot be read; a model without a convolution.

    Equivalent to:
        >>> import torch, convgrad
        >>> e = convgrad.explain(torch.ones(1, 8, 9, 9), torch.ones(8, 1, 3, 3), groups=8, device="h100 cudnn 9.10")
        >>> e.aten.backend.backend
        'CudaDepthwise2d'
    """
    if callable(what):
        if not args and not kwargs:
            raise TypeError(
                f"explain({_title(what)}) also needs the arguments of the call, as in "
                'explain(model, torch.empty(1, 3, 224, 224, device="meta"))'
            )
        return _explain_module(what, args, kwargs, _machine(device, *tree_leaves((args, kwargs))), outputs, measure)
    if isinstance(what, (Tensor, TensorSpec)):
        try:
            given = signature(ConvCall.of).bind(what, *args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"explain(input, weight) takes the arguments of torch.convolution: {error}") from None
        machine = _machine(device, what)
        operands = [given.pop(name, None) for name in ("input", "weight", "bias")]
        dtype = autocast_dtype(machine.device_type)
        _, part, placements, transfers = call_here(dtype, operands, _given(outputs), **given)
        result = explain_problem(problem_on(machine, part), outputs, machine, measure=measure)
        return replace(result, placements=placements, transfers=transfers)
    if args or kwargs:
        raise TypeError(
            "explain: beside a problem there is only device=, outputs= and measure=; got "
            + ", ".join([*(type(a).__name__ for a in args), *kwargs])
        )
    problem = ConvProblem.parse(what) if isinstance(what, str) else what
    if not isinstance(problem, ConvProblem):
        raise TypeError(
            "explain takes a problem or its text, an input and a weight, a module or a function; got "
            f"{type(what).__name__}"
        )
    return explain_problem(problem, outputs, device, measure=measure)


def _machine(device: DeviceLike, *operands: Any) -> Machine:
    """The machine that is meant, else that of the first tensor; the CPU for tensors that are only described."""
    kinds = (TensorSpec.of(t).device_type for t in operands if isinstance(t, (Tensor, TensorSpec)))
    kind = next(kinds, "cpu")
    return machine_of(torch.device("cpu" if kind == "meta" else kind) if device is None else device)


def _title(what: object) -> str:
    return getattr(what, "__name__", type(what).__name__)


def _explain_module(
    what: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], machine: Machine, outputs: Outputs,
    measure: bool,
) -> Explanation | ModelExplanation:  # fmt: skip
    """Every convolution that runs in a module or a function; equal ones are explained once."""
    equal: dict[tuple[Any, ...], list[Captured]] = {}
    # A function is the forward of a module of its name.
    of_function = {"forward": staticmethod(what)}
    module = what if isinstance(what, nn.Module) else type(_title(what), (nn.Module,), of_function)()
    for one in capture(module, args, kwargs, machine, _given(outputs)):
        equal.setdefault(one[2:], []).append(one)
    if not equal:
        raise ValueError(f"no convolution ran in this {_title(what)}")
    layers = []
    for (problem, placements, transfers, linear, request, called), calls in equal.items():
        names, left = tuple(one.name for one in calls), _left_to_matmul(problem, machine) if linear else ""
        named = problem.replace(name=names[0])
        result = explain_problem(named, outputs or called, machine, measure=measure, left=left, request=request)
        part = replace(result, placements=placements, transfers=transfers)
        layers.append(Layer(names, calls[0].kind, part, linear))
    return layers[0].explanation if [x.names for x in layers] == [("",)] else ModelExplanation(machine, tuple(layers))


def _left_to_matmul(p: ConvProblem, machine: Machine) -> str:
    """Why PyTorch's matrix product computes a linear layer, which this problem is; empty where ours does."""
    if machine.device_type != "cpu":
        return "a linear layer, and convgrad computes these on a CPU only"
    if not linear_gains(p.input_size[-1] * p.in_channels, p.out_channels, p.in_channels):
        return "a linear layer of fewer than 32 rows, 2 features, or 17 million FLOPs a pass and thread"
    if not p.channels_last:
        return "a linear layer whose input is not contiguous"
    if machine.is_here and autocast_is_on("cpu") and not cpu_lacks(p.dtype):
        return "a linear layer under autocast"
    ours = not machine.is_here or beats_matmul(plan_for(p, ("forward",), torch.device("cpu")))
    return "" if ours else "a linear layer, and nothing here is expected to be faster"


def _given(outputs: Outputs) -> tuple[Output, ...]:
    return (outputs,) if isinstance(outputs, str) else tuple(outputs or OUTPUTS)


def explain_problem(
    problem: ConvProblem, outputs: Outputs = None, device: DeviceLike = None, *, measure: bool = False, left: str = "",
    request: Request | None = None,
) -> Explanation:  # fmt: skip
    """Return every backend's answer for every output of a problem, as `explain` does, on any machine.

    ``left``: why PyTorch's matrix product computes it whatever would be chosen: it is a linear layer. ``request``: the
    backends that are asked for; None: by `use_backend`, around this call.
    """
    given = _given(outputs)
    for output in given:
        if output not in OUTPUTS:
            raise ValueError(f"unknown output {output!r}; outputs are {', '.join(OUTPUTS)}")
    machine = _machine(device)
    runs = _aten_runs(problem, machine)
    answers: list[Answer] = []
    with described(machine.capability):
        for forward in (True, False):  # one call each, whose outputs are chosen together
            together = in_order([o for o in given if (o == problem.bias_pass) == forward])
            steps = _steps(problem, together, machine, left, request or active())
            for output in together:
                step = next((s for s in steps if output in s.outputs), None)
                answers += _answers(problem, output, step, machine, runs)
    result = Explanation(problem, machine, tuple(answers), limits_of(machine, problem.dtype))
    return measured(result) if measure else result


def _steps(
    problem: ConvProblem, together: tuple[Output, ...], machine: Machine, left: str, request: Request | None
) -> Sequence[Step]:
    """Return what would compute the outputs of one call."""
    if problem.empty:
        return ()
    if left:
        return [Step(backends()["aten:matmul"], (output,), left) for output in together if output != "grad_bias"]
    asked = problem if problem.bias_pass in together else problem.replace(has_bias=False)  # as a plan asks
    return choose(asked, together, torch.device(machine.device_type), request, stored=machine.is_here)


def _answers(
    problem: ConvProblem, output: Output, step: Step | None, machine: Machine, aten_runs: dict[Output, str]
) -> Iterator[Answer]:
    """Yield every backend's answer for an output, that of the chosen one first."""
    if step is None:
        why = "nothing to contract: the result is zero" if problem.empty else "a sum over batch and space"
        yield Answer(output, "engine", True, (why,), "any strides", 0)
        return
    place, others = torch.device(machine.device_type), [] if output == "grad_bias" else backends().values()
    asked = problem if output == problem.bias_pass else problem.replace(has_bias=False)
    known = measurements.find(asked, (output,), place) if machine.is_here else None
    if problem.padding_mode != "zeros":
        others = [PaddedCopy.where_needed(b, problem, (output,), place) for b in others]
    for backend in (step.backend, *(b for b in others if b.name != step.backend.name)):
        chosen, against = backend is step.backend, list[str]()
        computed: tuple[Output, ...] = step.outputs if chosen else (output,)
        if chosen:
            others_too = " and ".join(o for o in computed if o != output)
            reasons = [step.reason + (f", in one call with {others_too}" if others_too else "")]
        else:
            against = reasons_against(backend, problem, (output,), place)
            against = _described_library(backend, output, machine, against, aten_runs)
            wrong = known and known.wrong.get(backend.name)
            why = f"it was wrong when it was measured: {wrong}" if wrong else "can compute it"
            reasons = against or [f"{why}; {step.backend.name} was chosen"]
        taken = problem.replace(memory_format=operand_format(backend, problem) or problem.memory_format)
        layout = "any strides" if "strided" in backend.layouts else taken.layout
        runs, workspace = "", 0
        if not against:
            by_aten = backend.name.removesuffix(COPY) == "aten"
            runs = aten_runs[output] if by_aten else backend.kernel_name(problem, computed)
            workspace = backend.workspace(problem, computed)
        yield Answer(output, backend.name, chosen, tuple(reasons), layout, workspace, runs, usable=not against)


def _aten_runs(problem: ConvProblem, machine: Machine) -> dict[Output, str]:
    """PyTorch's kernel for each output, by its own rules."""
    if problem.empty:
        return {}
    aten, thrice = pytorchs_own(problem, machine), ", as three real ones" if problem.dtype.is_complex else ""
    gradients = aten.gradient_backend.answer
    result: dict[Output, str] = dict.fromkeys(OUTPUTS, f"{gradients} ({kernel_of(gradients).backward}){thrice}")
    result[problem.bias_pass] = f"{aten.backend.answer} ({aten.forward.function}){thrice}"
    return result


def _described_library(
    backend: Backend, output: Output, machine: Machine, against: list[str], aten_runs: dict[Output, str]
) -> list[str]:
    """The reasons against a GPU library as they hold on a machine that is not here, with another build of PyTorch."""
    backend = backend.of if isinstance(backend, PaddedCopy) else backend
    library = getattr(backend, "library", None)
    if library not in ("cuDNN", "MIOpen") or machine.device_type != "cuda" or torch.cuda.is_available():
        return against
    if (library == "MIOpen") != machine.miopen or (library == "cuDNN" and machine.cudnn is None):
        return [f"PyTorch has no {library} on {machine.label or 'this machine'}"]
    of_this_build = backend.absent(torch.device("cuda"))  # pyright: ignore[reportAttributeAccessIssue]
    against = [reason for reason in against if reason not in of_this_build]
    picked = aten_runs[output].split(" ")[0]
    if output == "grad_weight" and not picked.lower().startswith(library.lower()):
        against.append(
            f"{library}'s gradient of the weight is reached only through convolution_backward, "
            f"which picks {picked} for this problem on this machine"
        )
    return against
