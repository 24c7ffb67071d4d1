"""`native`: the compiled CPU kernels of ``csrc/`` for depthwise, small-group and pointwise convolutions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

import torch
from torch import Tensor

from .._compat import usual_strides
from ..problem import OPERANDS, PADDING_MODES, ConvProblem, Output, Outputs, Pass
from . import _native_library as library
from .base import BOTH_GRADIENTS, Arithmetic, Backend, Kernel
from .padded_copy import padded

#: Most channels a group, where a problem is neither depthwise nor pointwise: with more PyTorch's kernels are faster.
MOST_A_GROUP = 64

#: Of an image with its padding, unless it is large without: packing a gigabyte of zeros takes a second.
_MOST_ELEMENTS = 2**28

#: Positions of input, output and padded input up to which summing a padding's gradient in scratch memory beats a copy.
_MOST_FOLDED = {True: 2**15, False: 2**18}

#: Those of the compiled kernels, in the order of the header.
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_OUTPUTS: dict[Output, int] = {"forward": 1, "grad_input": 2, "grad_weight": 4, "grad_bias": 8}
_TRANSPOSED_GRAD_BIAS = 16  # the bias of a transposed convolution is added to what the plain problem calls its input

_NO_MEMORY = "there is no memory for the intermediate values of a convolution"


class NativeBackend(Backend):
    """Convolutions on the CPU that are depthwise, have few channels a group, or are pointwise; without copies.

    Every pass, dtype, kernel and stride; a pointwise one with more channels without padding.
    """

    name = "native"
    summary = "compiled CPU kernels for depthwise, small-group and pointwise convolutions"
    sweeps = BOTH_GRADIENTS
    padding_modes = PADDING_MODES
    #: Which of the library's kernels: of an instruction set, of one algorithm; those of the best set where it is empty.
    kernels = ""
    dtypes: tuple[torch.dtype, ...] = tuple(DTYPES)
    #: Why the library has another kernel for a problem to which there is no other reason; empty where it may be any.
    too_large = ""

    @property
    def version(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return library.digest()

    def reasons_against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
        reasons = []
        if device.type != "cpu":
            reasons.append(f"it runs on the CPU, the tensors are on {device.type}")
        if reason := self._wrong_size(problem, outputs):
            reasons.append(reason)
        if problem.dtype not in self.dtypes:
            reasons.append(f"it has no kernels for {problem.dtype}, only for {', '.join(map(str, self.dtypes))}")
        elements = problem.in_channels * prod(dim.padded for dim in problem.dims)
        if elements > max(_MOST_ELEMENTS, 4 * prod(problem.input_shape[1:])):
            reasons.append(f"it may pack a whole image with its padding, and the input has {elements} elements with it")
        if problem.padding_mode != "zeros" and "grad_input" in outputs:
            sizes = problem.input_size, problem.output_size, padded(problem).input_size
            if (positions := sum(map(prod, sizes))) > (most := _MOST_FOLDED[problem.channels_last]):
                reasons.append(
                    "it adds the gradients of the padding up in scratch memory, which holds at most "
                    f"{most} positions of input, output and padded input, here there are {positions}"
                )
        if missing := library.why_not(self.kernels) if self.kernels else library.why_absent():
            reasons.append(missing)
        if self.too_large and not reasons and self.kernel_name(problem, outputs) != self.kernels:
            reasons.append(self.too_large)
        return reasons

    def _wrong_size(self, problem: ConvProblem, outputs: Outputs) -> str:
        """Return why a backend's kernels do not take so many channels; empty where they do."""
        if problem.depthwise or problem.matrix_product or max(_group(problem)) <= MOST_A_GROUP:
            return ""
        if problem.unpadded_pointwise:
            # The bias of a transposed convolution is added to all positions, also where a stride leaves them out.
            all_positions = problem.transposed and "grad_bias" in outputs
            return "it sums the gradient of a bias only over positions that a stride reaches" if all_positions else ""
        inputs, results = _group(problem)
        return (
            f"it computes depthwise convolutions, those with at most {MOST_A_GROUP} channels a group, and pointwise "
            f"ones without padding; here a group has {inputs} input and {results} output channels"
        )

    def bind(self, problem: ConvProblem, outputs: Outputs) -> Kernel:
        loaded, plan = library.make_plan(_packed(problem, outputs), self.kernels)
        run: Callable[[bytes, bytes], int] = loaded.convgrad_plan_run
        pass_: Pass = outputs[0]  # pyright: ignore[reportAssignmentType]
        if len(outputs) > 1:
            return _bind_gradients(run, plan, problem, outputs)
        (shape, strides), backward = _result(problem, pass_), pass_ != "forward"
        packed = library.packer(*OPERANDS[pass_], "bias", pass_)

        def one_pass(a: Tensor, b: Tensor, bias: Tensor | None = None, workspace: Tensor | None = None) -> Tensor:
            result = a.new_empty_strided(shape, strides)
            first, second = (b, a) if backward else (a, b)
            start = 0 if bias is None else bias.data_ptr()
            if run(plan, packed(first.data_ptr(), second.data_ptr(), start, result.data_ptr())):
                raise MemoryError(_NO_MEMORY)
            return result

        return one_pass

    def kernel_name(self, problem: ConvProblem, outputs: Outputs) -> str:
        if library.load() is None:
            return ""
        loaded, plan = library.make_plan(_packed(problem, outputs), self.kernels)
        return loaded.convgrad_plan_name(plan).decode()

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return True


class NativeAvx2Backend(NativeBackend):
    """The kernels of `NativeBackend` with vectors of 256 bits, on a processor with wider ones."""

    name = "native:avx2"
    summary = "the kernels of native for AVX2, on a processor with AVX-512"
    kernels = "x86-64-v3"


class NativeAmxBackend(NativeBackend):
    """Convolutions of float32 with many channels on the tiles of AMX: products of three bfloat16 parts of a number."""

    name = "native:amx"
    summary = "convolutions of float32 with many channels on the tiles of AMX, as products of bfloat16 parts"
    sweeps = ()
    padding_modes = ("zeros",)
    kernels = "amx"
    dtypes = (torch.float32,)
    too_large = "it packs the whole weight, and what a kernel reaches, and these are too large for that"

    def _wrong_size(self, problem: ConvProblem, outputs: Outputs) -> str:
        if min(*_group(problem), problem.batch * prod(problem.output_size)) >= 16:
            return ""  # the omitted products are within the error bound of a sum of 16
        return "it needs 16 channels a group on both sides and 16 pixels: tiles of fewer are not full"


class NativeWinogradBackend(NativeBackend):
    """Convolutions with kernels of 3 or 3x3 and many channels, by 2 of 3 or 4 of 9 multiplications of the definition.

    Winograd's algorithms F(2, 3) and F(2x2, 3x3), and for grad_weight their derivatives. Volumes have any depth of the
    kernel.
    """

    name = "native:winograd"
    summary = "convolutions with kernels of 3 or 3x3 and many channels by fewer multiplications (Winograd)"
    sweeps = ()
    padding_modes = ("zeros",)
    kernels = "winograd"
    dtypes = (torch.float32, torch.float64)
    too_large = "it transforms the whole weight, and for a tile all channels and depths of a kernel: these are too many"

    def _wrong_size(self, problem: ConvProblem, outputs: Outputs) -> str:
        if not transformed_dimensions(problem):
            return "it computes kernels of 3 and, in the last two dimensions, of 3x3, 1x3 and 3x1, with stride 1"
        if min(_group(problem)) >= 16:
            return ""
        return "it needs 16 channels a group on both sides: vectors of fewer are not full"

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        return "transform"


def native_plan(backend: Backend, problem: ConvProblem, outputs: Outputs) -> bytes | None:
    """Return the ``convgrad_plan`` by which a backend computes these outputs; None if it is not one of those above."""
    if not isinstance(backend, NativeBackend):
        return None
    return library.make_plan(_packed(problem, outputs), backend.kernels)[1]


def transformed_dimensions(p: ConvProblem) -> list[int]:
    """Return the dimensions along which Winograd's algorithm saves a product of three; [] where it does not run."""
    if max(p.stride) > 1:
        return []
    last = range(max(0, p.ndim - 2), p.ndim)
    if all(p.kernel_size[d] in (1, 3) for d in last) and (some := [d for d in last if p.kernel_size[d] == 3]):
        return some
    slices_are_rows = p.kernel_size == (3, 1, 1) and not any(map(any, p.padding[1:]))
    return [0] if slices_are_rows else []


def _group(p: ConvProblem) -> tuple[int, int]:
    """Return the input and output channels of a group."""
    return p.in_channels // p.groups, p.out_channels // p.groups


# ---- kernels: one call of the library each -------------------------------------------------------


def _bind_gradients(run: Callable[[bytes, bytes], int], plan: bytes, problem: ConvProblem, outputs: Outputs) -> Kernel:
    """Return the function of one of ``BOTH_GRADIENTS``: forward or grad_input, grad_weight, and perhaps grad_bias."""
    sizes = [_result(problem, output) for output in outputs]
    packed = library.packer("input", "weight", "grad_output", *outputs)

    def gradients(
        grad_output: Tensor, input: Tensor, weight: Tensor, workspace: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        results = tuple([weight.new_empty_strided(*size) for size in sizes])
        operands = input.data_ptr(), weight.data_ptr(), grad_output.data_ptr()
        if run(plan, packed(*operands, *[t.data_ptr() for t in results])):
            raise MemoryError(_NO_MEMORY)
        return results

    return gradients


def _packed(problem: ConvProblem, outputs: Outputs) -> bytes:
    """Return a problem as a packed ``convgrad_problem``, with missing dimensions first."""
    p = problem

    def three(values: Iterable[int], missing: int = 1) -> list[int]:
        return [missing] * (3 - p.ndim) + [*values]

    # A step over the whole padded input reaches no second position; of longer ones, sums would overflow.
    whole = [dim.padded for dim in p.dims]
    asked = sum(_OUTPUTS[output] for output in outputs)
    if "grad_bias" in outputs and p.transposed:
        asked += _TRANSPOSED_GRAD_BIAS - _OUTPUTS["grad_bias"]
    return library.pack_problem(
        *(p.batch, p.groups, *_group(p), *three(p.input_size), *three(p.kernel_size)),
        *(*three(map(min, p.stride, whole)), *three((low for low, _ in p.padding), 0)),
        *(*three(map(min, p.dilation, whole)), *three(p.output_size)),
        *(p.channels_last, DTYPES[p.dtype], asked, torch.get_num_threads(), PADDING_MODES.index(p.padding_mode)),
    )


def _result(problem: ConvProblem, output: Output) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and the strides of a result."""
    shape = problem.result_shape(output)
    return shape, usual_strides(shape, problem.channels_last and len(shape) > 1)
