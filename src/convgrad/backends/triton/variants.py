"""Every kernel that the launcher would compile for a set of problems, each once.

A launch is recorded by running a pass on tensors without storage (the meta device), so what is compiled is what would
have been launched. Triton compiles a kernel anew for other dtypes, constants, and integers that are 1 or divisible by
16; launches that agree in all of these are one variant.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...problem import OPERANDS, PASSES, ConvProblem, Output, Pass
from . import against_sweep, banded_launch, launch
from .bands import Precision
from .on_bands import TritonBandedBackend

__all__ = ["BANDED", "MATRIX", "TOGETHER", "Variant", "launches", "variants"]

_SHAPES = """
g144ic144oc144mb32ih56kh3ph1
g96ic96oc96mb32ih112kh3sh2ph1
g240ic240oc240mb32ih28kh5ph2
g240ic240oc240mb32ih28kh5ph2sh2
g96ic96oc96mb32ih56kh7ph3
g768ic768oc768mb32ih7kh7ph3
g960ic960oc960mb32ih7kh3ph1
g576ic576oc576mb32ih14kh3ph1
g128ic128oc128mb8ih32kh13ph6
g128ic128oc128mb8ih32kh31ph15
g96ic96oc96mb2id16ih56iw56kd3kh3kw3pd1ph1pw1
g54ic54oc54mb8id16ih28iw28kd5kh3kw3pd2ph1pw1sh2sw2
g54ic54oc54mb8id16ih28iw28kd3kh3kw3pd1ph1pw1sd2sh2sw2
g64ic64oc128mb8ih28kh3ph1
g64ic64oc64mb8ih64kh3ph2dh1
g32ic32oc32mb8ih33kh4sh4
""".strip().splitlines()
_SEQUENCES = """
g768ic768oc768mb8iw2048ow2048kw4pw3
g1536ic1536oc1536mb1iw8192ow8192kw4pw3
g64ic64oc64mb8iw100kw31pw15
g64ic64oc128mb8iw1000kw5sw2pw2
""".strip().splitlines()
_LAYOUTS = ("", " channels_last")
#: Says of a sequence that its channels lie together: strides (L*C, 1, C).
TOGETHER = " strides (L*C, 1, C)"

#: Shapes of every kind in the dtypes that models have, the others in fewer, biases, and offsets of 64 bits.
MATRIX: tuple[str, ...] = (
    *(shape + dtype + layout for shape in _SHAPES for dtype in ("", " bfloat16") for layout in _LAYOUTS),
    *(f"g64ic64oc64mb8ih28kh{k}ph{k // 2}{dtype}{layout}"
      for k in (3, 7) for dtype in (" float64", " float16") for layout in _LAYOUTS),
    *(f"g54ic54oc54mb8id16ih28iw28kd3kh3kw3pd1ph1pw1{dtype}{layout}"
      for dtype in (" float64", " float16") for layout in _LAYOUTS),
    *(shape + dtype for shape in _SEQUENCES[:2] for dtype in ("", " bfloat16", " float16", " float64")),
    *_SEQUENCES[2:],
    *(shape + dtype + TOGETHER for shape in _SEQUENCES for dtype in ("", " bfloat16")),
    *(f"g144ic144oc144mb32ih56kh3ph1{words}{layout}"
      for words in (" bias", " bfloat16 bias", " transposed bias") for layout in _LAYOUTS),
    *(f"g512ic512oc512mb512ih112kh3ph1{dtype}{layout}" for dtype in ("", " bfloat16") for layout in _LAYOUTS),
    "g1536ic1536oc1536mb1024iw8192ow8192kw4pw3 bfloat16",
)  # fmt: skip

#: The passes on `banded`, float32 with TF32 and without.
BANDED = tuple(f"{p} banded" for p in PASSES)

_POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
}
_PREFIX = len("torch.")


class Variant(NamedTuple):
    """What a kernel is compiled from: plain values, so that variants can be compared and sent to other processes."""

    module: str
    name: str
    #: The type of each argument, ``constexpr`` for a constant.
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    #: Positions of the arguments that are divisible by 16.
    divisible: tuple[int, ...]
    warps: int
    stages: int

    @property
    def kernel(self) -> Any:
        """The kernel's source."""
        return getattr(importlib.import_module(self.module), self.name)


def variant(call: launch.Call) -> Variant:
    """What a launch is compiled from, as the launcher would specialize it."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    divisible: list[int] = []
    for i, parameter in enumerate(call.kernel.params):
        value = call.arguments[parameter.name]
        if isinstance(value, Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
            divisible.append(i)
        elif parameter.is_constexpr or (value == 1 and not parameter.do_not_specialize):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
                divisible.append(i)
    fn = call.kernel.fn
    return Variant(
        fn.__module__,
        fn.__name__,
        tuple(signature.items()),
        tuple(constants.items()),
        tuple(divisible),
        call.warps,
        call.stages,
    )


def launches(problem: ConvProblem, what: str, together: bool = False) -> list[launch.Call]:
    """The launches of a pass, of ``"sweep"``, of ``"sweep+bias"`` or of one of `BANDED`.

    There are none where a sweep, or a band, does not take the problem.

    Args:
        together: the operands are sequences of strides (L*C, 1, C).
    """

    def slot(name: str) -> Tensor:
        tensor = torch.empty(problem.shape_of(name), dtype=problem.dtype, device="meta")  # pyright: ignore
        if name == "weight":
            return tensor
        if together:
            return tensor.transpose(1, 2).contiguous().transpose(1, 2)
        return tensor.contiguous(memory_format=problem.memory_format)

    if what in BANDED:
        return _banded(problem, PASSES[BANDED.index(what)], slot)
    if what not in PASSES:
        both: tuple[Output, ...] = ("grad_input", "grad_weight")
        if against_sweep(problem, both if what == "sweep" else (*both, "grad_bias")):
            return []
    with launch.recording() as calls:
        if what in PASSES:
            first, second = (slot(name) for name in OPERANDS[what])
            if what == "grad_weight":
                launch.grad_weight(problem, first, second)
            else:
                bias = _bias(problem, what)
                run = launch.output if what == "forward" else launch.grad_input
                run(problem, first, second, bias)
        else:
            launch.sweep(problem, slot("grad_output"), slot("input"), slot("weight"), what == "sweep+bias")
    return calls


def _bias(problem: ConvProblem, what: str) -> Tensor | None:
    if not problem.has_bias or what != problem.bias_pass:
        return None
    return torch.empty(problem.shape_of(problem.bias_slot)[1], dtype=problem.dtype, device="meta")


def _banded(problem: ConvProblem, pass_: Pass, slot: Callable[[str], Tensor]) -> list[launch.Call]:
    if TritonBandedBackend().reasons_against(problem, (pass_,), torch.device("cuda")):
        return []
    first, second = (slot(name) for name in OPERANDS[pass_])
    ways: tuple[Precision, ...] = ("tf32", "tf32x3") if problem.dtype == torch.float32 else ("ieee",)
    with launch.recording() as calls:
        for precision in ways:
            banded_launch.bound(problem, pass_, precision)(first, second, _bias(problem, pass_), None)
    return calls


def variants(problems: Iterable[str], passes: Sequence[str]) -> dict[Variant, list[str]]:
    """The variants of some passes of every problem, each with the launches that need it, as text."""
    found: dict[Variant, list[str]] = {}
    for text in problems:
        problem = ConvProblem.parse(text.removesuffix(TOGETHER))
        for what in passes:
            for call in launches(problem, what, text.endswith(TOGETHER)):
                found.setdefault(variant(call), []).append(f"{text} {what}")
    return found
