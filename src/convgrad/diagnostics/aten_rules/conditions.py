"""PyTorch's rules for a convolution as data: an expression each, whose tree is printed as far as it is evaluated.

Modelled after ``Convolution.cpp`` and ``ConvUtils.h`` of ATen (2.11 to 2.15), in their order, without the mobile builds
that XNNPACK belongs to. A condition that PyTorch does not reach is not evaluated here either.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from operator import attrgetter
from types import CodeType
from typing import Any

import torch
from torch.torch_version import TorchVersion

from ...problem import INT32_MAX, Geometry
from .call import ConvCall, fits_32bit_index, short, suggested
from .machine import Machine

#: A rule: its name and what it says, with the function of ATen that has it, and below it an expression of facts and of
#: other rules by name. Its terms, split at and, or and not, are the conditions.
_RULES = """
empty: the batch or the channels are empty [_select_conv_backend]
    0 in (batch, channels)
suggested: input or weight suggests channels_last
    suggests != (contiguous_format, contiguous_format)
cudnn_channels_last: cuDNN works in channels_last [cudnn_conv_suggest_memory_format]
    cudnn is not None and float64 not in dtypes
    and (since(torch_version, "2.13") or cudnn >= (8005 if dimensions == 3 else 7603)) and suggested
miopen_channels_last: MIOpen works in channels_last [miopen_conv_use_channels_last]
    miopen and float64 not in dtypes and miopen_nhwc and suggested
mkldnn_channels_last: oneDNN works in channels_last [mkldnn_conv_use_channels_last]
    float64 not in dtypes and not opaque and not weight_opaque and suggested
mps_channels_last: MPS works in channels_last [mps_conv_use_channels_last]
    devices == ("mps", "mps")
    and ((since(torch_version, "2.12") and suggests_exactly != (contiguous_format, contiguous_format))
         or (not since(torch_version, "2.12") and suggested))
xpu_channels_last: XPU works in channels_last [xpu_conv_use_channels_last]
    devices == ("xpu", "xpu") and suggested
thnn_channels_last: PyTorch's own kernels work in channels_last [thnn_conv_use_channels_last]
    device == "cpu" and dimensions == 2 and suggested
is_depthwise: it is depthwise on a CUDA or ROCm device [ConvParams::is_depthwise]
    device == "cuda" and not transposed and dimensions in (2, 3)
    and channels == groups and groups > 1 and out_channels % channels == 0
too_large: too large for 32-bit offsets, even one batch item at a time [needs_64bit_indexing_no_split]
    elements > 0 and (item_elements > INT32_MAX or output_item_elements > INT32_MAX)
cudnn_64bit: cuDNN is 9.3 or later, as 64-bit offsets need, with its v8 interface
    cudnn >= 90300 and cudnn_v8
use_cudnn: cuDNN can take it [ConvParams::use_cudnn]
    cudnn is not None and device == "cuda" and cudnn_enabled and (not too_large or cudnn_64bit)
    and (bfloat16 not in dtypes or ((capability or (0, 0)) >= (8, 0) and cudnn_v8))
    and all(p < s for p, s in zip(output_padding, stride))
fast_in_cudnn: it is one of the measured cases in which cuDNN is faster [check_cudnn_depthwise_workload_with_filter]
    (height == 1 and stride[-1] == 1)
    or (kernel[0] == kernel[1] and kernel[1] in (1, 3, 5) and width >= 7
        and (stride[-1] == 1
             or (stride[-1] == 2
                 and ((kernel[1] == 1 and batch == 1 and width <= 28)
                      or (kernel[1] == 1 and 1 < batch <= 16 and channels >= 128 and width <= 7)
                      or (kernel[1] != 1 and (batch == 1 or channels >= 512 or (channels >= 256 and width >= 28)))))))
by_flag: torch.backends.cudnn.depthwise_kernel decides
    since(torch_version, "2.13") and depthwise_kernel != "auto"
faster_in_cudnn: contiguous, where cuDNN is known to be faster
    (capability or (0, 0)) >= (7, 0) and use_cudnn and dtypes == (float16, float16) and is_depthwise
    and dimensions != 3 and not dilated and (stride[0] == stride[1] or height == 1) and channels >= 32
    and ((by_flag and depthwise_kernel == "cudnn") or (not by_flag and fast_in_cudnn))
use_cudnn_depthwise: cuDNN can take it as a depthwise convolution [ConvParams::use_cudnn_depthwise]
    cudnn is not None and device == "cuda" and cudnn_enabled
    and ((not small_offsets and not (cudnn_channels_last and 91000 < cudnn < 91500) and cudnn_64bit)
         or (small_offsets and (cudnn_channels_last or faster_in_cudnn)))
use_miopen: MIOpen can take it [ConvParams::use_miopen]
    dtype in (float32, float16, bfloat16) and cudnn_enabled and device == "cuda" and miopen and dimensions <= 3
    and not (groups > 1 and dilated)
use_mkldnn: oneDNN can take it and it pays [ConvParams::use_mkldnn]
    mkldnn and mkldnn_enabled and (not transposed or all(p < s for p, s in zip(output_padding, stride)))
    and ((device == "cpu" and not opaque
          and ((dtype == bfloat16 and mkldnn_bf16) or (dtype == float16 and mkldnn_fp16)))
         or opaque
         or (device == "cpu" and dtype == float32
             and (any(n != 1 for n in (*stride, *dilation)) or batch >= 16 or kernel[-2:] != (1, 1) or threads > 1)
             and (groups > 1 or min(kernel[-2:]) > 3 or batch > 1 or plane_elements > 20480)))
use_winograd: the Winograd 3x3 depthwise kernel can take it [ConvParams::use_cpu_depthwise3x3_winograd]
    not need_backward and winograd and dimensions == 2 and channels == groups and out_channels % channels == 0
    and weight_shape == (1, 3, 3) and devices == ("cpu", "cpu") and dtypes == (float32, float32) and contiguous
    and {*stride, *dilation} == {1} and not transposed
use_nnpack: NNPACK can take it [ConvParams::use_nnpack]
    nnpack_enabled and nnpack and device == "cpu" and dtype == float32 and not dilated and not transposed
    and dimensions == 2 and max(kernel) < 17 and all(p < k for p, k in zip(padding, kernel)) and batch >= 16
use_slow3d: 3-D on the CPU, not transposed, not dilated
    dimensions == 3 and device == "cpu" and not transposed and not dilated
use_mps: MPS can take it [ConvParams::use_mps]
    not too_large and device == "mps"
"""

#: What decides, in order: the answer to the first expression that holds, or the table to go on with. ``{T}`` stands for
#: "Transpose" of a transposed convolution, ``{d}`` for the number of dimensions.
Table = dict[str, "str | Table"]
SELECT: Table = {
    "empty": {"opaque": "MkldnnEmpty", "True": "Empty"},
    "is_depthwise": {"use_cudnn_depthwise": "Cudnn", "use_miopen": "MiopenDepthwise", "True": "CudaDepthwise{d}d"},
    "use_cudnn": "Cudnn{T}",
    "use_miopen": "Miopen{T}",
    "use_mkldnn": "Mkldnn{T}",
    "use_winograd": "Winograd3x3Depthwise",
    "use_slow3d": "Slow3d",
    "device in ('cpu', 'cuda')": {
        "transposed": "SlowTranspose{d}d",
        "dimensions == 3": "SlowDilated3d",  # on CUDA it takes undilated ones too
        "dilated": "SlowDilated2d",
        "use_nnpack": "NnpackSpatial",
        "True": "Slow2d",
    },
    "use_mps": "Mps{T}",
    "True": "Overrideable",
}

#: A backend, Transpose and Depthwise left out -> where it works in channels_last; others work in contiguous tensors.
LAYOUT_RULES = {
    "Cudnn": "cudnn_channels_last", "Miopen": "miopen_channels_last", "Mkldnn": "mkldnn_channels_last",
    "Mps": "mps_channels_last", "Overrideable": "xpu_channels_last", "Slow2d": "thnn_channels_last",
    "SlowDilated2d": "thnn_channels_last", "SlowTranspose2d": "thnn_channels_last",
}  # fmt: skip

#: Facts of a call, by the names that conditions have for them; those of a machine are its fields.
FACTS: dict[str, Callable[[ConvCall], Any]] = {
    "device": lambda c: c.device,
    "devices": lambda c: (c.device, c.device),
    "dtype": lambda c: c.input.dtype,
    "dtypes": lambda c: (c.input.dtype, c.weight.dtype),
    "opaque": lambda c: c.opaque[0],
    "weight_opaque": lambda c: c.opaque[1],
    "dimensions": lambda c: c.input.dim() - 2,
    "batch": lambda c: c.input.shape[0],
    "channels": lambda c: c.input.shape[1],
    "out_channels": lambda c: c.weight.shape[0],
    "weight_shape": lambda c: c.weight.shape[1:],
    "height": lambda c: c.input.shape[2],
    "width": lambda c: c.input.shape[-1],
    "kernel": lambda c: c.weight.shape[2:],
    **{name: attrgetter(f"geometry.{name}") for name in Geometry._fields},
    "padding": lambda c: tuple(low for low, _ in c.geometry.padding),
    "dilated": lambda c: any(d != 1 for d in c.geometry.dilation),
    "need_backward": lambda c: c.need_backward,
    "elements": lambda c: c.input.numel(),
    "plane_elements": lambda c: prod(c.input.shape[:4]),
    "item_elements": lambda c: prod(c.input.shape[1:]),
    "output_item_elements": lambda c: prod(c.output_shape[1:]),
    "small_offsets": lambda c: fits_32bit_index(c.input) and fits_32bit_index(c.weight),
    "contiguous": lambda c: all(t is None or t.is_contiguous() for t in c[:3]),
    "suggests": lambda c: (suggested(c.input), suggested(c.weight)),
    "suggests_exactly": lambda c: (suggested(c.input, True), suggested(c.weight, True)),
}
#: What expressions name beside facts.
_NAMES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64", "contiguous_format")} | {
    "INT32_MAX": INT32_MAX,
    "since": lambda version, first: TorchVersion(version) >= first,
}


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition that was evaluated, and what came of it."""

    text: str  # as a statement
    holds: bool
    value: str = ""  # what it read
    depth: int = 0  # 0 for a rule that decides, 1 and more for the conditions that it consists of
    join: str = ""  # "AND" or "OR": how it is joined to the condition before it at the same depth
    source: str = ""  # the function of ATen that has it

    @property
    def cells(self) -> tuple[str, str, str]:
        """A line of a table."""
        text = f"{'  ' * self.depth}{self.join + ' ' if self.join else ''}{self.text}"
        return ("yes" if self.holds else "no", text, self.value or (f"[{self.source}]" if self.source else ""))


class Facts(dict[str, Any]):
    """The facts of a call (`FACTS`) on a machine (its fields), each found when a condition reads it."""

    def __init__(self, call: ConvCall, machine: Machine) -> None:
        super().__init__()
        self.call, self.machine = call, machine

    def __missing__(self, name: str) -> Any:
        self[name] = FACTS[name](self.call) if name in FACTS else vars(self.machine)[name]
        return self[name]

    def shown(self, name: str) -> str:
        """A fact for people."""
        value = self[name]
        if name == "cudnn":
            return self.machine.cudnn_text
        if name == "capability":
            return f"sm_{''.join(map(str, value or ()))}"
        if isinstance(value, tuple):
            return ("x" if isinstance(value[0], int) else " and ").join(map(short, value))
        return short(value)


@cache
def rules() -> dict[str, tuple[str, str, ast.expr]]:
    """Return what each rule says, its source and its expression, by its name."""
    told = re.findall(r"^(\w+): (.+?)(?: \[(.+)\])?\n((?:    .+\n)+)", _RULES, re.MULTILINE)
    return {name: (text, source, parsed(f"({expression})")) for name, text, source, expression in told}


@cache
def parsed(expression: str) -> ast.expr:
    """Return the tree of an expression."""
    return ast.parse(expression, mode="eval").body


@cache
def _compiled(term: ast.expr) -> tuple[str, CodeType, tuple[str, ...]]:
    """Return the text of a term, its code, and the facts that it reads."""
    names = sorted({n.id for n in ast.walk(term) if isinstance(n, ast.Name)} & {*FACTS, *Machine.__dataclass_fields__})
    return ast.unparse(term), compile(ast.Expression(term), "<rule>", "eval"), tuple(names)


def evaluate(term: ast.expr, facts: Facts, log: list[Rule], depth: int = 0, join: str = "") -> bool:
    """Return whether an expression holds; note it, and below it what it consists of, as far as PyTorch gets."""
    place, text, value, source, negated = len(log), "", "", "", False
    while isinstance(term, ast.UnaryOp):
        term, negated = term.operand, not negated
    if isinstance(term, ast.Name) and term.id in rules():
        text, source, term = rules()[term.id]
    if isinstance(term, ast.BoolOp):
        either = isinstance(term.op, ast.Or)
        word, holds = "OR" if either else "AND", not either
        text = text or ("one of these" if either else "all of these")
        for i, part in enumerate(term.values):
            holds = evaluate(part, facts, log, depth + 1, word if i else "")
            if holds == either:
                break
    else:
        own, code, reads = _compiled(term)
        text, holds = text or own, bool(eval(code, _NAMES, facts))
        shown = [(name.replace("_", " "), facts.shown(name)) for name in reads]
        value = shown[0][1] if len(shown) == 1 else ", ".join(map(" ".join, shown))
    log.insert(place, Rule(f"NOT {text}" if negated else text, holds != negated, value, depth, join, source))
    return holds != negated


def in_channels_last(backend: str, call: ConvCall, machine: Machine) -> tuple[bool, list[Rule]]:
    """Return whether a backend works in channels_last on the operands of a call, with the rules."""
    rule, log = LAYOUT_RULES.get(re.sub("(Transpose|Depthwise)$", "", backend)), list[Rule]()
    if rule is None:
        return False, [Rule(f"{backend} knows another layout than contiguous", False)]
    return evaluate(parsed(rule), Facts(call, machine), log), log


def select(call: ConvCall, machine: Machine) -> tuple[str, list[Rule]]:
    """Return the name of the backend for a call, with every rule on the way."""
    facts, log, found = Facts(call, machine), list[Rule](), SELECT
    while isinstance(found, dict):
        found = next(found[text] for text in found if text == "True" or evaluate(parsed(text), facts, log))
    return found.format(T="Transpose" * call.geometry.transposed, d=call.input.dim() - 2), log
