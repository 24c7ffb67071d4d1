"""PyTorch's rules for a convolution as data: each condition is a row, and a tree of rows is printed as it is evaluated.

Modelled after ``Convolution.cpp`` and ``ConvUtils.h`` of ATen (2.11 to 2.15), in their order, without the mobile builds
that XNNPACK belongs to. A condition that PyTorch does not reach is not evaluated here either.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import torch

from ..._compat import channels_last_of
from ...problem import INT32_MAX
from .call import ConvCall, short
from .machine import Machine

_HALF, _BF16, _FLOAT, _DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


# ---- the language ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition, or several joined.

    Args:
        text: the condition, as a statement.
        test: of a single one: a function of the facts that its parameters name.
        join: of several: ``"AND"`` or ``"OR"``.
        parts: the conditions that are joined, in the order of evaluation.
        negated: whether it holds where what it consists of does not.
        source: the function of ATen that has it.
    """

    text: str
    test: Callable[..., bool] | None = None
    join: str = ""
    parts: tuple[Condition, ...] = ()
    negated: bool = False
    source: str = ""

    @property
    def reads(self) -> tuple[str, ...]:
        """The facts that a single condition reads."""
        return () if self.test is None else tuple(inspect.signature(self.test).parameters)

    def __iter__(self) -> Iterator[Condition]:
        """Every condition of the tree, from the top."""
        yield self
        for part in self.parts:
            yield from part


def is_(text: str, test: Callable[..., bool], source: str = "") -> Condition:
    return Condition(text, test, source=source)


def all_(text: str, *parts: Condition, source: str = "") -> Condition:
    return Condition(text, join="AND", parts=parts, source=source)


def any_(text: str, *parts: Condition, source: str = "") -> Condition:
    return Condition(text, join="OR", parts=parts, source=source)


def not_(one: Condition) -> Condition:
    return Condition(f"NOT {one.text}", one.test, one.join, one.parts, not one.negated, one.source)


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition that was evaluated, and what came of it.

    Args:
        text: the condition, as a statement.
        holds: whether it is true.
        value: what it read.
        depth: 0 for a rule that decides, 1 and more for the conditions that it consists of.
        join: how it is joined to the condition before it at the same depth: ``"AND"``, ``"OR"`` or nothing.
        source: the function of ATen that has it.
    """

    text: str
    holds: bool
    value: str = ""
    depth: int = 0
    join: str = ""
    source: str = ""

    @property
    def cells(self) -> tuple[str, str, str]:
        """A line of a table."""
        text = f"{'  ' * self.depth}{self.join + ' ' if self.join else ''}{self.text}"
        return ("yes" if self.holds else "no", text, self.value or (f"[{self.source}]" if self.source else ""))


class Facts:
    """The facts that conditions read: of a call by `FACTS`, of a machine its fields."""

    def __init__(self, call: ConvCall, machine: Machine) -> None:
        self.call, self.machine = call, machine

    def __getitem__(self, name: str) -> Any:
        return FACTS[name](self.call) if name in FACTS else getattr(self.machine, name)

    def shown(self, names: tuple[str, ...]) -> str:
        """Facts for people, each with its name where there are several."""
        values = [self._shown(name) for name in names]
        return (
            values[0]
            if len(names) == 1
            else ", ".join(f"{n.replace('_', ' ')} {v}" for n, v in zip(names, values, strict=True))
        )

    def _shown(self, name: str) -> str:
        value = self[name]
        if name == "cudnn":
            return self.machine.cudnn_text
        if name == "capability":
            return f"sm_{''.join(map(str, value or ()))}"
        if isinstance(value, tuple):
            return " and ".join(map(short, value)) if name in _PAIRS else "x".join(map(str, value))
        return short(value)


_PAIRS = ("dtypes", "suggested", "suggested_exactly", "devices")

#: Facts of a call, by the names that conditions have for them. "offsets" is the number of elements below 2**31.
FACTS: dict[str, Callable[[ConvCall], Any]] = {
    "device": lambda c: c.input.device_type,
    "devices": lambda c: (c.input.device_type, c.weight.device_type),
    "dtype": lambda c: c.input.dtype,
    "dtypes": lambda c: (c.input.dtype, c.weight.dtype),
    "opaque": lambda c: c.input.mkldnn,
    "weight_opaque": lambda c: c.weight.mkldnn,
    "dimensions": lambda c: c.input.ndim - 2,
    "batch": lambda c: c.input.shape[0],
    "channels": lambda c: c.input.shape[1],
    "out_channels": lambda c: c.weight.shape[0],
    "weight_shape": lambda c: c.weight.shape[1:],
    "height": lambda c: c.input.shape[2],
    "width": lambda c: c.input.shape[-1],
    "kernel": lambda c: c.weight.shape[2:],
    "stride": lambda c: c.stride,
    "padding": lambda c: tuple(low for low, _ in c.padding),
    "dilation": lambda c: c.dilation,
    "dilated": lambda c: c.dilated,
    "transposed": lambda c: c.transposed,
    "output_padding": lambda c: c.output_padding,
    "groups": lambda c: c.groups,
    "need_backward": lambda c: c.need_backward,
    "elements": lambda c: c.input.numel,
    "plane_elements": lambda c: prod(c.input.shape[:4]),
    "item_elements": lambda c: prod(c.input.shape[1:]),
    "output_item_elements": lambda c: prod(c.output_shape[1:]),
    "small_offsets": lambda c: c.input.fits_32bit_index() and c.weight.fits_32bit_index(),
    "contiguous": lambda c: all(t is None or t.is_contiguous() for t in (c.input, c.weight, c.bias)),
    "suggested": lambda c: (c.input.suggest_memory_format(), c.weight.suggest_memory_format()),
    "suggested_exactly": lambda c: (c.input.suggest_memory_format(True), c.weight.suggest_memory_format(True)),
}
assert not {f.name for f in fields(Machine)} & FACTS.keys()


def evaluate(condition: Condition, facts: Facts, log: list[Rule], depth: int = 0, join: str = "") -> bool:
    """Return whether a condition holds; note it, and below it what it consists of, as far as PyTorch gets."""
    place, value = len(log), ""
    if condition.test is not None:
        holds, value = bool(condition.test(*(facts[name] for name in condition.reads))), facts.shown(condition.reads)
    else:
        holds = condition.join == "AND"
        for i, part in enumerate(condition.parts):
            holds = evaluate(part, facts, log, depth + 1, condition.join if i else "")
            if holds == (condition.join == "OR"):
                break
    holds ^= condition.negated
    log.insert(place, Rule(condition.text, holds, value, depth, join, condition.source))
    return holds


# fmt: off
# ---- conditions that several rules share ----------------------------------------------------------------

_ON_GPU = is_("the input is on a CUDA or ROCm device", lambda device: device == "cuda")
_ON_CPU = is_("the input is on the CPU", lambda device: device == "cpu")
_ONE_CHANNEL = is_("one input channel per group", lambda channels, groups: channels == groups)
_MULTIPLE = is_("out_channels is a multiple of in_channels",
                lambda out_channels, channels: out_channels % channels == 0)
_TRANSPOSED, _DILATED = is_("transposed", lambda transposed: transposed), is_("dilated", lambda dilated: dilated)
_2D, _3D = is_("2-D", lambda dimensions: dimensions == 2), is_("3-D", lambda dimensions: dimensions == 3)
_IS_FLOAT = is_("the input is float32", lambda dtype: dtype == _FLOAT)
_OPAQUE = is_("the input is an opaque oneDNN tensor", lambda opaque: opaque)
_NO_FLOAT64 = is_("neither is float64", lambda dtypes: _DOUBLE not in dtypes)
_SMALL = is_("input and weight have 32-bit offsets", lambda small_offsets: small_offsets)
_SMALL_OUTPUT_PADDING = is_("output_padding is smaller than the stride", lambda output_padding, stride: all(
    p < s for p, s in zip(output_padding, stride, strict=True)))
_TOO_LARGE = all_("too large for 32-bit offsets, even one batch item at a time",
    is_("there are elements", lambda elements: elements > 0),
    any_("one batch item has more than 2**31 - 1 elements",
        is_("of the input", lambda item_elements: item_elements > INT32_MAX),
        is_("of the output", lambda output_item_elements: output_item_elements > INT32_MAX)),
    source="needs_64bit_indexing_no_split")
_CUDNN_64BIT = is_("64-bit offsets need cuDNN 9.3 and its v8 interface",
                   lambda cudnn, cudnn_v8: (cudnn or 0) >= 90300 and cudnn_v8)
_CUDNN_BUILT = is_("PyTorch is built with cuDNN", lambda cudnn: cudnn is not None)
_CUDNN_ENABLED = is_("torch.backends.cudnn.enabled", lambda cudnn_enabled: cudnn_enabled)
_CUDNN_HERE = (_CUDNN_BUILT, is_("the input is on a CUDA device", lambda device: device == "cuda"), _CUDNN_ENABLED)
_SINCE_2_12 = is_("PyTorch is 2.12 or later", lambda since_2_12: since_2_12)
_SUGGESTED = is_("input or weight suggests channels_last",
                 lambda suggested: {*suggested} != {torch.contiguous_format})
_EXACTLY = is_("input or weight suggests channels_last by its exact strides",
               lambda suggested_exactly: {*suggested_exactly} != {torch.contiguous_format})


def _both_on(device: str) -> Condition:
    return is_(f"both are {device.upper()} tensors", lambda devices: set(devices) == {device})


# ---- layouts ----------------------------------------------------------------------------------------

_CUDNN_LAYOUT = all_("cuDNN works in channels_last",
    _CUDNN_BUILT, _NO_FLOAT64,
    any_("this cuDNN can",  # older releases of PyTorch name a version below any that they support
        is_("PyTorch is 2.13 or later", lambda since_2_13: since_2_13),
        is_("cuDNN is 7.6.3 or later, for 3-D 8.0.5",
            lambda cudnn, dimensions: (cudnn or 0) >= (8005 if dimensions == 3 else 7603))),
    _SUGGESTED, source="cudnn_conv_suggest_memory_format")
_MIOPEN_LAYOUT = all_("MIOpen works in channels_last",
    is_("PyTorch is built with MIOpen", lambda miopen: miopen), _NO_FLOAT64,
    is_("PYTORCH_MIOPEN_SUGGEST_NHWC=1", lambda miopen_nhwc: miopen_nhwc),
    _SUGGESTED, source="miopen_conv_use_channels_last")
_MKLDNN_LAYOUT = all_("oneDNN works in channels_last",
    _NO_FLOAT64,
    is_("neither is an opaque oneDNN tensor", lambda opaque, weight_opaque: not (opaque or weight_opaque)),
    _SUGGESTED, source="mkldnn_conv_use_channels_last")
_MPS_LAYOUT = all_("MPS works in channels_last",
    _both_on("mps"),
    any_("its strides say so",
        all_("since 2.12", _SINCE_2_12, _EXACTLY), all_("before 2.12", not_(_SINCE_2_12), _SUGGESTED)),
    source="mps_conv_use_channels_last")

#: Backend -> where it works in channels_last; one that is not here always works in contiguous tensors.
LAYOUT_RULES: dict[str, Condition] = {
    **dict.fromkeys(("Cudnn", "CudnnTranspose"), _CUDNN_LAYOUT),
    **dict.fromkeys(("Miopen", "MiopenDepthwise", "MiopenTranspose"), _MIOPEN_LAYOUT),
    **dict.fromkeys(("Mkldnn", "MkldnnTranspose"), _MKLDNN_LAYOUT),
    **dict.fromkeys(("Slow2d", "SlowDilated2d", "SlowTranspose2d"), all_(
        "PyTorch's own kernels work in channels_last", _ON_CPU, _2D, _SUGGESTED, source="thnn_conv_use_channels_last")),
    **dict.fromkeys(("Mps", "MpsTranspose"), _MPS_LAYOUT),
    "Overrideable": all_(
        "XPU works in channels_last", _both_on("xpu"), _SUGGESTED, source="xpu_conv_use_channels_last"),
}

# ---- backends ---------------------------------------------------------------------------------------

_DEPTHWISE = all_("it is depthwise on a CUDA or ROCm device",
    _ON_GPU, not_(_TRANSPOSED),
    is_("2-D (or 1-D viewed as 2-D) or 3-D", lambda dimensions: dimensions in (2, 3)),
    _ONE_CHANNEL, is_("more than one group", lambda groups: groups > 1), _MULTIPLE, source="ConvParams::is_depthwise")
_CUDNN = all_("cuDNN can take it",
    *_CUDNN_HERE,
    any_("its offsets fit", not_(_TOO_LARGE), _CUDNN_64BIT),
    any_("its dtype is known",
        not_(is_("input or weight is bfloat16", lambda dtypes: _BF16 in dtypes)),
        is_("bfloat16 needs compute capability 8.0 and the v8 interface",
            lambda capability, cudnn_v8: (capability or (0, 0))[0] >= 8 and cudnn_v8)),
    # A contiguous dilated convolution also needs supportsDilatedConvolutionWithCuDNN, which is true in every build.
    _SMALL_OUTPUT_PADDING, source="ConvParams::use_cudnn")
_CUDNN_FAST = any_("it is one of the measured cases in which cuDNN is faster",
    is_("height 1 and stride 1", lambda height, stride: height == 1 and stride[-1] == 1),
    all_("small square kernels",
        is_("square kernel", lambda kernel: kernel[0] == kernel[1]),
        is_("kernel 1, 3 or 5", lambda kernel: kernel[1] in (1, 3, 5)),
        is_("width at least 7", lambda width: width >= 7),
        any_("its stride",
            is_("stride 1", lambda stride: stride[-1] == 1),
            all_("stride 2 and a size that is fast",
                is_("stride 2", lambda stride: stride[-1] == 2),
                any_("the size",
                    is_("kernel 1: batch 1 and width <= 28, or batch <= 16, 128 channels, width <= 7",
                        lambda kernel, batch, channels, width: kernel[1] == 1
                        and (width <= 28 if batch == 1 else batch <= 16 and channels >= 128 and width <= 7)),
                    is_("kernel 3 or 5: batch 1, or 512 channels, or 256 channels and width >= 28",
                        lambda kernel, batch, channels, width: kernel[1] != 1
                        and (batch == 1 or channels >= 512 or (channels >= 256 and width >= 28))))))),
    source="check_cudnn_depthwise_workload_with_filter")
_BY_FLAG = is_("PyTorch is 2.13 or later, and torch.backends.cudnn.depthwise_kernel is not 'auto'",
               lambda since_2_13, depthwise_kernel: since_2_13 and depthwise_kernel != "auto")
_CUDNN_CONTIGUOUS = all_("contiguous, where cuDNN is known to be faster",
    is_("compute capability 7.0", lambda capability: (capability or (0, 0))[0] >= 7),
    _CUDNN,
    is_("the input is float16", lambda dtype: dtype == _HALF),
    is_("the weight is float16", lambda dtypes: dtypes[1] == _HALF),
    _DEPTHWISE, not_(_3D), not_(_DILATED),
    is_("square stride, or height 1", lambda stride, height: stride[0] == stride[1] or height == 1),
    is_("at least 32 channels", lambda channels: channels >= 32),
    any_("by flag or by size",
        all_("by flag", _BY_FLAG, is_("it is 'cudnn'", lambda depthwise_kernel: depthwise_kernel == "cudnn")),
        all_("by size", not_(_BY_FLAG), _CUDNN_FAST)))
_CUDNN_DEPTHWISE = all_("cuDNN can take it as a depthwise convolution",
    *_CUDNN_HERE,
    any_("cuDNN is right, and faster",
        all_("with 64-bit offsets",
            not_(_SMALL),
            not_(all_("channels_last in a cuDNN that is wrong",
                _CUDNN_LAYOUT,
                is_("cuDNN after 9.10.0 and before 9.15.0", lambda cudnn: 91000 < (cudnn or 0) < 91500))),
            _CUDNN_64BIT),
        all_("with 32-bit offsets", _SMALL, any_("either layout", _CUDNN_LAYOUT, _CUDNN_CONTIGUOUS))),
    source="ConvParams::use_cudnn_depthwise")
_MIOPEN = all_("MIOpen can take it",
    is_("float32, float16 or bfloat16", lambda dtype: dtype in (_FLOAT, _HALF, _BF16)),
    _CUDNN_ENABLED, _ON_GPU,
    is_("PyTorch is built with MIOpen", lambda miopen: miopen),
    is_("at most 3-D", lambda dimensions: dimensions <= 3),
    not_(is_("both grouped and dilated", lambda groups, dilation: groups > 1 and any(d != 1 for d in dilation))),
    source="ConvParams::use_miopen")
_MKLDNN = all_("oneDNN can take it and it pays",
    is_("PyTorch is built with oneDNN", lambda mkldnn: mkldnn),
    is_("torch.backends.mkldnn.enabled", lambda mkldnn_enabled: mkldnn_enabled),
    any_("the output's size is known to it", not_(_TRANSPOSED), _SMALL_OUTPUT_PADDING),
    any_("one of these cases",
        all_("16-bit numbers that this CPU has instructions for",
            _ON_CPU, not_(_OPAQUE),
            any_("bfloat16 or float16",
                is_("bfloat16 with AVX-512, AVX-NE-CONVERT or Arm BF16",
                    lambda dtype, mkldnn_bf16: dtype == _BF16 and mkldnn_bf16),
                is_("float16 with AVX512-FP16 or AMX-FP16",
                    lambda dtype, mkldnn_fp16: dtype == _HALF and mkldnn_fp16))),
        _OPAQUE,
        all_("float32 of some size",
            _ON_CPU, _IS_FLOAT,
            is_("strided, dilated, batch >= 16, kernel other than 1x1, or more than one thread",
                lambda stride, dilation, batch, kernel, threads: any(n != 1 for n in (*stride, *dilation))
                or batch >= 16 or kernel[-2:] != (1, 1) or threads > 1),
            is_("grouped, kernel above 3x3, batch above 1, or N*C*H*W above 20480",
                lambda groups, kernel, batch, plane_elements: groups > 1 or min(kernel[-2:]) > 3 or batch > 1
                or plane_elements > 20480))),
    source="ConvParams::use_mkldnn")
_WINOGRAD = all_("the Winograd 3x3 depthwise kernel can take it (Apple and 32-bit Arm, RISC-V; no gradient needed)",
    not_(is_("a gradient is needed", lambda need_backward: need_backward)),
    is_("built for __ARM_NEON__ or the RISC-V vector extension", lambda winograd: winograd),
    _2D, _ONE_CHANNEL, _MULTIPLE,
    is_("3x3 kernel", lambda weight_shape: weight_shape == (1, 3, 3)),
    _both_on("cpu"),
    is_("both are float32", lambda dtypes: set(dtypes) == {_FLOAT}),
    is_("input, weight and bias are contiguous", lambda contiguous: contiguous),
    is_("stride and dilation 1", lambda stride, dilation: {*stride, *dilation} == {1}),
    not_(_TRANSPOSED), source="ConvParams::use_cpu_depthwise3x3_winograd")
_NNPACK = all_("NNPACK can take it",
    is_("NNPACK is enabled", lambda nnpack_enabled: nnpack_enabled),
    is_("NNPACK is built in and runs here", lambda nnpack: nnpack),
    _ON_CPU, _IS_FLOAT, not_(_DILATED), not_(_TRANSPOSED), _2D,
    is_("kernel below 17x17", lambda kernel: max(kernel) < 17),
    is_("padding below the kernel size",
        lambda padding, kernel: all(p < k for p, k in zip(padding, kernel, strict=True))),
    is_("batch of at least 16", lambda batch: batch >= 16), source="ConvParams::use_nnpack")

#: What decides, in order: the answer to the first that holds, or the table to go on with. ``{T}`` stands for
#: "Transpose" of a transposed convolution, ``{d}`` for the number of dimensions.
Table = list[tuple["Condition | None", "str | Table"]]
SELECT: Table = [
    (is_("the batch or the channels are empty", lambda batch, channels: 0 in (batch, channels), "_select_conv_backend"),
     [(_OPAQUE, "MkldnnEmpty"), (None, "Empty")]),
    (_DEPTHWISE, [(_CUDNN_DEPTHWISE, "Cudnn"), (_MIOPEN, "MiopenDepthwise"), (None, "CudaDepthwise{d}d")]),
    (_CUDNN, "Cudnn{T}"),
    (_MIOPEN, "Miopen{T}"),
    (_MKLDNN, "Mkldnn{T}"),
    (_WINOGRAD, "Winograd3x3Depthwise"),
    (all_("3-D on the CPU, not transposed, not dilated", _3D, _ON_CPU, not_(_TRANSPOSED), not_(_DILATED)), "Slow3d"),
    (is_("on the CPU or on a CUDA or ROCm device", lambda device: device in ("cpu", "cuda")),
     [(_TRANSPOSED, "SlowTranspose{d}d"), (_3D, "SlowDilated3d"),  # on CUDA it takes undilated ones too
      (_DILATED, "SlowDilated2d"), (_NNPACK, "NnpackSpatial"), (None, "Slow2d")]),
    (all_("MPS can take it", not_(_TOO_LARGE), is_("the input is on an MPS device", lambda device: device == "mps"),
          source="ConvParams::use_mps"), "Mps{T}"),
    (None, "Overrideable"),
]
# fmt: on


def layout(backend: str, call: ConvCall, machine: Machine, log: list[Rule]) -> torch.memory_format:
    """Return the layout in which a backend works on the operands of a call; note the rules."""
    rule = LAYOUT_RULES.get(backend)
    if rule is None:
        log.append(Rule(f"{backend} knows another layout than contiguous", False))
        return torch.contiguous_format
    if not evaluate(rule, Facts(call, machine), log):
        return torch.contiguous_format
    return channels_last_of(call.weight.ndim - 2)


def select(call: ConvCall, machine: Machine, log: list[Rule], table: Table = SELECT) -> str:
    """Return the name of the backend that a table gives for a call, and note every rule on the way."""
    facts = Facts(call, machine)
    found: Any = next(answer for condition, answer in table if condition is None or evaluate(condition, facts, log))
    if isinstance(found, list):
        return select(call, machine, log, found)
    return found.format(T="Transpose" * call.transposed, d=call.input.ndim - 2)
