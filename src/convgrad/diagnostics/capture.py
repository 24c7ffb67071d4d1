"""The convolutions of a module, a model or plain operands, as problems, without computing anything.

A model runs on the meta device: its parameters and inputs are replaced by tensors without memory, so that even a
large one is read in a moment and its state is not touched. Where something in it cannot run there, it runs once for
real, on copies of its buffers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import ShapeError
from ..problem import ConvProblem
from ..shapes import conv_geometry, convolution_shape, problem_of
from .aten_rules import Machine, TensorSpec, walk

__all__ = ["Captured", "Operands", "capture"]


@dataclass(frozen=True)
class Operands:
    """The arguments of one convolution; each tensor only described."""

    input: TensorSpec
    weight: TensorSpec
    bias: TensorSpec | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @classmethod
    def of(
        cls,
        input: Tensor | TensorSpec,
        weight: Tensor | TensorSpec,
        bias: Tensor | TensorSpec | None = None,
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        transposed: bool = False,
        output_padding: int | tuple[int, ...] = 0,
        groups: int = 1,
    ) -> Operands:
        """Describe tensors; single integers are meant as lists of one.

        Raises:
            ShapeError: a weight with fewer than three dimensions.
        """

        def spec(t: Tensor | TensorSpec) -> TensorSpec:
            return t if isinstance(t, TensorSpec) else TensorSpec.of(t)

        def ints(v: int | tuple[int, ...]) -> tuple[int, ...]:
            return (v,) if isinstance(v, int) else tuple(v)

        return cls(
            spec(input),
            spec(weight),
            None if bias is None else spec(bias),
            ints(stride),
            ints(padding),
            ints(dilation),
            transposed,
            ints(output_padding),
            groups,
        )

    def problem(self, machine: Machine, name: str = "") -> ConvProblem:
        """The problem that these operands state on a machine, whose rules decide the layout of the result.

        Raises:
            ShapeError: operands that do not belong together.
        """
        g = conv_geometry(
            self.weight.shape,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
        )
        bias_shape = None if self.bias is None else self.bias.shape
        output = convolution_shape(self.input.shape, self.weight.shape, bias_shape, g)
        x, w = self.input.on(machine.device_type), self.weight.on(machine.device_type)
        base = tuple(max(0, min(pair)) for pair in g.padding)
        try:  # a crop or a one-sided border is made before PyTorch's pipeline begins and does not change its layout
            fmt = walk(x, w, None, g.stride, base, g.dilation, g.transposed, 0, g.groups, device=machine).memory_format
            memory_format = fmt.memory_format
        except (ShapeError, RuntimeError):
            memory_format = x.suggest_memory_format()
        if len(self.weight.shape) == 3:
            memory_format = torch.contiguous_format
        problem = problem_of(
            self.input.shape,
            self.weight.shape,
            output,
            g,
            dtype=self.input.dtype,
            memory_format=memory_format,
            has_bias=self.bias is not None,
        )
        return problem.replace(name=name)


@dataclass(frozen=True)
class Captured:
    """One convolution that ran inside a model."""

    name: str
    kind: str
    operands: Operands


class _Watcher(TorchDispatchMode):
    """Notes every convolution under the name of the module that is running.

    With a machine, the result gets the layout that this machine gives it: the next layer depends on it.
    """

    def __init__(self, machine: Machine | None) -> None:
        super().__init__()
        self.machine = machine
        self.stack: list[tuple[str, nn.Module]] = []
        self.found: list[Captured] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::convolution", "convgrad::convolution", "aten::_convolution"):
            name, module = self.stack[-1] if self.stack else ("", None)
            input, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args[:9]
            operands = Operands.of(
                input,
                weight,
                bias,
                tuple(stride),
                tuple(padding),
                tuple(dilation),
                bool(transposed),
                tuple(output_padding),
                groups,
            )
            self.found.append(Captured(name, type(module).__name__ if module is not None else "", operands))
            if self.machine is not None:
                return _result(operands, self.machine)
        return func(*args, **(kwargs or {}))


def _result(operands: Operands, machine: Machine) -> Tensor:
    """An output on the meta device, in the layout in which the machine returns it."""
    problem = operands.problem(machine)
    shape = problem.input_shape if problem.transposed else problem.output_shape
    return torch.empty(shape, dtype=problem.dtype, device="meta").contiguous(memory_format=problem.memory_format)


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], machine: Machine) -> list[Captured]:
    """Every convolution of one forward pass, in order.

    Args:
        model: any module; neither its parameters nor its buffers nor the random state change.
        args, kwargs: what it is called with; tensors on the meta device are enough.
        machine: where it is meant to run: the layout of one result is the next layer's operand.

    Raises:
        ValueError: the model could not run on the meta device, and these arguments are there only.
    """
    # Opaque reasons (an unsupported operator, a value that is needed) all mean the same: run it for real.
    try:
        return _run(model, args, kwargs, machine)
    except Exception as error:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(t.is_meta for t in (*tensors, *model.parameters())):
            raise ValueError(f"the model cannot run on the meta device ({type(error).__name__}: {error})") from error
        return _run(model, args, kwargs, None)


def _run(model: nn.Module, args: Any, kwargs: Any, machine: Machine | None) -> list[Captured]:
    """Run it on the meta device as if on a machine; without one, for real."""
    watcher, meta = _Watcher(machine), machine is not None

    def place(value: Any) -> Any:
        return value.detach().to("meta") if meta and isinstance(value, Tensor) else value

    state: dict[str, Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **{name: b if meta else copy.deepcopy(b) for name, b in model.named_buffers(remove_duplicate=False)},
    }
    placed = {name: place(value) for name, value in state.items()}
    args, kwargs = tree_map(place, (args, kwargs))
    with _names(model, watcher), torch.random.fork_rng(devices=[]), torch.no_grad(), watcher:
        torch.func.functional_call(model, placed, args, kwargs)
    return watcher.found


@contextmanager
def _names(model: nn.Module, watcher: _Watcher) -> Iterator[None]:
    """Keep the stack of running modules in the watcher."""
    handles = []
    for name, module in model.named_modules():

        def enter(m: nn.Module, _args: Any, name: str = name) -> None:
            watcher.stack.append((name, m))

        def leave(_m: nn.Module, _args: Any, _result: Any) -> None:
            watcher.stack.pop()

        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
