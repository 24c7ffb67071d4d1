"""The convolutions of a module or a model, and its large linear layers, without computing anything.

A model runs on the meta device: its parameters and inputs are replaced by tensors without memory, so that even a
large one is read in a moment and its state is not touched. Where something in it cannot run there, it runs once for
real, and its buffers get their values back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .._compat import DispatchMode
from ..engine import POINTWISE, Request, active, as_pointwise, choose, linear_gains
from ..models import copied, is_lazy, random_states_restored
from ..nn import deferred, padding
from ..ops import rules_of
from ..problem import OUTPUTS, ConvProblem, Output, Outputs, PaddingMode, gradient_outputs, problem_of
from .aten_rules import ConvCall, Machine, TensorSpec, decided
from .explanation import Transfer
from .layers import layer_ranges, running


class Captured(NamedTuple):
    """One convolution that ran inside a model, as this process's part of it."""

    name: str
    kind: str
    problem: ConvProblem
    placements: str
    transfers: tuple[Transfer, ...]
    linear: bool  # it is a linear layer, which is computed as one
    request: Request | None  # the backends that its layer or a block around it asks for
    outputs: Outputs  # that were called for by name; none of a convolution, whose gradients may all follow


def call_here(
    dtype: torch.dtype | None, operands: Sequence[Any], outputs: Sequence[Output], *args: Any, **kwargs: Any
) -> tuple[ConvCall, ConvCall, str, tuple[Transfer, ...]]:
    """Return a call under autocast to ``dtype``; if it is sharded, its part here, its placements and its transfers."""
    specs: list[Any] = [None if t is None else TensorSpec.of(t) for t in operands]
    eligible = (torch.float32, torch.bfloat16, torch.float16)
    call = ConvCall.of(*[replace(s, dtype=dtype) if s and dtype and s.dtype in eligible else s for s in specs],
                       *args, **kwargs)  # fmt: skip
    describe = next(filter(None, (rules_of(type(t)) for t in operands)), None)
    if describe is None:
        return call, call, "", ()
    arguments, placements, transfers = describe(call.geometry, *operands, outputs)
    return call, ConvCall.of(*arguments, need_backward=call.need_backward), placements, transfers


def problem_on(machine: Machine, call: ConvCall, padding_mode: PaddingMode = "zeros") -> ConvProblem:
    """The problem that a call states on a machine, whose rules decide the layout of the result."""
    memory_format = torch.contiguous_format
    if call.weight.dim() > 3:
        memory_format = decided(call._replace(device=machine.device_type), machine)[1].memory_format
    problem = problem_of(
        call.input.shape, call.weight.shape, call.output_shape, call.geometry, dtype=call.input.dtype,
        memory_format=memory_format, has_bias=call.bias is not None,
    )  # fmt: skip
    return problem.replace(padding_mode=padding_mode)


#: Operator that computes gradients -> its input, weight, bias and arguments, and which gradients.
_GRADIENTS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "convgrad::grad_input": lambda a: (
        a[0].new_empty(tuple(a[2]), device="meta"), a[1], None, *a[3:9], (True, False, False)),
    "convgrad::grad_weight": lambda a: (
        a[1], a[0].new_empty(tuple(a[2]), device="meta"), None, *a[3:9], (False, True, False)),
    "convgrad::convolution_backward": lambda a: (a[1], a[2], None, *a[4:11]),
    "aten::convolution_backward": lambda a: (a[1], a[2], None, *a[4:11]),
}  # fmt: skip


class _Recorder(DispatchMode):
    """Notes every convolution under the name of the module that is running.

    On a CPU a linear layer that is large enough is one, too; so is a model that is one. On meta, the result gets the
    layout that the machine gives it: the next layer depends on it.
    """

    def __init__(self, model: nn.Module, machine: Machine, meta: bool, outputs: Sequence[Output]) -> None:
        super().__init__()
        self.names = {module: name for name, module in model.named_modules()}
        self.machine, self.meta, self.outputs = machine, meta, outputs
        self.found: list[Captured] = []
        self.padded = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        module, name = (now.module if (now := running()) else None), func._schema.name
        if name in ("aten::mm", "aten::addmm") and isinstance(module, nn.Linear):
            rows, weight = args[-2], module.weight
            device = self.machine.device_type if self.meta else rows.device.type
            alone = not self.names.get(module)
            fits = rows.shape[-1] == weight.shape[-1]  # else PyTorch's error follows
            if fits and (alone or (device == "cpu" and linear_gains(rows.numel(), *weight.shape))):
                self._note(*as_pointwise(rows, weight), module.bias, *POINTWISE, linear=True)
        if name in _GRADIENTS:
            *arguments, wanted = _GRADIENTS[name](args)
            self._note(*arguments, wanted=wanted)
        if name in ("aten::convolution", "convgrad::convolution", "aten::_convolution"):
            problem = self._note(*args[:9])
            if self.meta:
                return _result(problem, args[0])
        return func(*args, **(kwargs or {}))

    def convolve(self, *arguments: Any) -> Tensor | None:
        """Note a convolution whose kernel pads the input itself; None where it takes a padded copy."""
        *operands, mode = arguments
        problem = self._note(*operands, mode=mode)
        if padding.takes_copy(problem, choose(problem, (problem.bias_pass,), torch.device("cpu"), active())):
            self.found.pop()
            return None
        self.padded = True
        return _result(problem, operands[0]).requires_grad_(any(t.requires_grad for t in operands[:3] if t is not None))

    def _note(
        self, *arguments: Any, linear: bool = False, wanted: Sequence[bool] = (), mode: PaddingMode = "zeros"
    ) -> ConvProblem:
        """Note this process's part of a call; return the problem of all of it."""
        now = running()
        # What runs for real was cast already, but for the weight of a linear layer.
        dtype = now.autocast.get(self.machine.device_type) if self.meta and now else arguments[0].dtype
        call, part, placements, transfers = call_here(dtype, arguments[:3], self.outputs, *arguments[3:])
        name, kind = (self.names.get(now.module, ""), type(now.module).__name__) if now else ("", "")
        outputs = gradient_outputs(call.geometry.transposed, wanted) if wanted else ()
        problem = problem_on(self.machine, part, mode)
        self.found.append(Captured(name, kind, problem, placements, transfers, linear, active(), outputs))
        return problem if part is call else problem_on(self.machine, call, mode)


def _result(problem: ConvProblem, input: Tensor) -> Tensor:
    """Return the result of a convolution on the meta device; under autocast the next one casts it."""
    shape, layout = problem.shape_of(problem.bias_slot), problem.memory_format
    return torch.empty(shape, dtype=input.dtype, device="meta", memory_format=layout)


def capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], machine: Machine,
    outputs: Sequence[Output] = OUTPUTS,
) -> list[Captured]:  # fmt: skip
    """Return every convolution of one forward pass, in order, and every linear layer that may be computed as one.

    A linear layer that is given by itself is noted in any case. Neither the model nor the random state changes. It is a
    ValueError if the model can only run for real, and these arguments are on the meta device.
    """
    if is_lazy(model):
        twin = copied(model)
        if twin is None:
            raise ValueError("the sizes of a lazy layer of this model are not known: call the model once before")
        model = twin
    # Opaque reasons (an unsupported operator, a value that is needed) all mean the same: run it for real.
    try:
        return _run(model, args, kwargs, machine, outputs, meta=True)
    except Exception as error:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(t.is_meta for t in (*tensors, *model.parameters())):
            why = " ".join(f"the model cannot run on the meta device ({type(error).__name__}: {error})".split())
            instead = "give it what it takes (--input) or real tensors, or `convgrad tune` and `run` a script that does"
            raise ValueError(f"{why}; {instead}") from error
        return _run(model, args, kwargs, machine, outputs, meta=False)


def _run(
    model: nn.Module, args: Any, kwargs: Any, machine: Machine, outputs: Sequence[Output], *, meta: bool
) -> list[Captured]:
    """Run it on the meta device as if on a machine, or for real."""
    recorder = _Recorder(model, machine, meta, outputs)
    # A CPU's kernels may pad what they read, where gradients are recorded.
    recorded = meta and machine.device_type == "cpu" and machine.is_here

    def place(value: Any) -> Any:
        return value.detach().to("meta").requires_grad_(recorded and value.requires_grad)

    described = deferred.describing(recorder.convolve) if recorded else nullcontext()
    restored, modules = random_states_restored(torch.device("cpu")), () if meta else model.modules()
    with torch.inference_mode(False), torch.set_grad_enabled(recorded), _buffers_restored(modules):
        call = partial(model, *args, **kwargs)
        if meta:
            state = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
            placed = {name: place(value) for name, value in state}
            call = partial(torch.func.functional_call, model, placed, *tree_map_only(Tensor, place, (args, kwargs)))
        with layer_ranges(), restored, recorder, described:
            call()
            if recorder.padded:  # something else may have read the padded input, which is computed from then on
                recorder.found.clear()
                call()
    return recorder.found


@contextmanager
def _buffers_restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give the buffers of modules, and of all that are called in this block, the values that they had before it."""
    before: dict[nn.Module, list[tuple[str, Tensor, Tensor]]] = {}

    def remember(module: nn.Module, _: object = None) -> None:
        if module not in before:
            here = [(name, b) for name, b in module._buffers.items() if not (b is None or b.is_meta)]
            before[module] = [(name, b, b.clone()) for name, b in here if not nn.parameter.is_lazy(b)]

    remember.reads_nothing = True  # pyright: ignore[reportFunctionMemberAccess] - a normalization may wait
    for module in modules:
        remember(module)
    hook = nn.modules.module.register_module_forward_pre_hook(remember)
    try:
        yield
    finally:
        hook.remove()
        for module, name, buffer, value in ((module, *one) for module, known in before.items() for one in known):
            buffer.data.copy_(value)  # by `data`: a backward to come would refuse a buffer that has changed
            if module._buffers[name] is not buffer:
                module._buffers[name] = buffer
