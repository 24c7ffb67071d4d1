"""From tensors to launches of `correlate` or `banded`: what a pass, or the sweep of both gradients, runs."""

# pyright: reportIndexIssue=false
from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import ConvProblem, Output, Outputs
from . import banded, bands
from .correlate import add_partials, correlate
from .geometry import Axis, Geometry, geometry
from .start import Launch, Selected
from .tiles import MOST_PROGRAMS, Tile, Use, choose, lines, parts

_NO_TAP = (-1, -1, -1)


def bound(problem: ConvProblem, outputs: Outputs, verify: Callable[..., None]) -> Result | Gradients:
    """Return what computes these outputs of a problem.

    Args:
        verify: called with a compiled kernel's hash, the outputs' names, the operands and the results of a call.
    """
    g = geometry(problem, adjoint="grad_input" in outputs)
    if outputs in (("forward",), ("grad_input",)):
        launch = partial(launch_of, g, "result", bias_tap=_NO_TAP)
        return Result(problem, outputs, verify, launch, problem.memory_format)
    use: Use = "sweep" if len(outputs) > 1 else "sum"
    tile = choose(g, use)
    assert tile is not None
    launch = partial(launch_of, g, use, False, g.whole_tap if "grad_bias" in outputs else _NO_TAP)
    return Gradients(problem, outputs, verify, launch, parts(g, use, tile, MOST_PROGRAMS), problem.memory_format)


def bound_silu(problem: ConvProblem, slope: bool, verify: Callable[..., None]) -> Result:
    """Return what computes SiLU of ``forward``, or its derivative there times a gradient, which comes as ``centre``."""
    g = geometry(problem, adjoint=False)
    launch = partial(launch_of, g, "result", bias_tap=_NO_TAP, activation=1 + slope)
    return Result(problem, ("forward",), verify, launch, problem.memory_format, "grad_output" if slope else "")


#: For each pointer that a kernel takes, the tensor: an operand, an output, the scratch memory, or its part for
#: ``grad_bias``.
Places = dict[str, str]


class Steps(NamedTuple):
    """The launches of a call, in order."""

    launches: list[tuple[Selected, Places]]
    #: Bytes of scratch memory, and where in them the part for ``grad_bias`` begins.
    scratch: int = 0
    bias_part: int = 0


class Result:
    """Computes ``forward`` or ``grad_input`` of one problem.

    Args:
        launch: makes the launch for calls without or with a bias.
        layout: of the kernel's source and result.
        centre: the name of another operand, if the kernel reads one where its results are.
    """

    def __init__(
        self,
        problem: ConvProblem,
        outputs: Outputs,
        verify: Callable[..., None],
        launch: Callable[[bool], Launch],
        layout: torch.memory_format,
        centre: str = "",
    ) -> None:
        self.problem, self.outputs, self.layout = problem, outputs, layout
        self._verify, self._launch = verify, launch
        self._out: Output = outputs[0]
        self._source = "grad_output" if self._out == "grad_input" else "input"
        self._centre = centre or self._source
        self._launches: dict[bool, tuple[Launch, Places]] = {}

    def _launch_for(self, with_bias: bool) -> tuple[Launch, Places]:
        found = self._launches.get(with_bias)
        if found is None:
            source, out, bias = self._source, self._out, "bias" if with_bias else "weight"
            places: Places = {"src": source, "centre": self._centre, "weight": "weight", "bias": bias,
                              "out": out, "partials": out, "bias_partials": out}  # fmt: skip
            found = self._launches[with_bias] = self._launch(with_bias), places
        return found

    def __call__(
        self,
        source: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        workspace: Tensor | None = None,
        centre: Tensor | None = None,
    ) -> Tensor:
        p = self.problem
        shape = p.result_shape(self._out)
        out = torch.empty(shape, dtype=source.dtype, device=source.device, memory_format=self.layout)
        source, weight = source.contiguous(memory_format=self.layout), weight.contiguous()
        tensors: dict[str, Tensor] = {self._source: source, "weight": weight, self._out: out}
        if bias is not None:
            tensors["bias"] = bias.contiguous()
        if centre is not None:
            tensors[self._centre] = centre = centre.contiguous(memory_format=self.layout)
        launch, places = self._launch_for(bias is not None)
        _, compiled = launch.start(**{name: tensors[place] for name, place in places.items()})
        if compiled:
            self._verify(compiled, self.outputs, (source, weight, bias, centre), (out,))
        return out.contiguous(memory_format=p.memory_format)

    def selected(
        self, device: torch.device, given: Collection[str], aligned: Callable[[str, int], bool]
    ) -> Steps | None:
        """Return what such a call starts; None if there was none before.

        Args:
            given: the names of the operands.
            aligned: whether the tensor of this name is aligned to 16 bytes so many bytes after its beginning.
        """
        launch, places = self._launch_for("bias" in given)
        found = launch.selected(device, [aligned(place, 0) for place in places.values()])
        return None if found is None else Steps([(found, places)])


class _Sums(NamedTuple):
    """The division of the sums over batch and space; it is replaced whole, because other threads may read it."""

    #: Parts, at most; one part is the result itself.
    most: int
    main: Launch
    places: Places
    #: Of the launch that adds the parts.
    added: Places
    scratch: int
    bias_part: int


class Gradients:
    """Computes ``grad_weight`` of one problem, or two or three gradients: one launch, and one that adds partial sums.

    Args:
        launch: makes the launch; its argument is whether the sums are cut into parts.
        most: parts, at most.
        layout: of the kernel's operands.
    """

    def __init__(
        self,
        problem: ConvProblem,
        outputs: Outputs,
        verify: Callable[..., None],
        launch: Callable[[bool], Launch],
        most: int,
        layout: torch.memory_format,
    ) -> None:
        self.problem, self.outputs, self.layout = problem, outputs, layout
        self._verify, self._launch = verify, launch
        self._sweep, self._with_bias = len(outputs) > 1, "grad_bias" in outputs
        self._weights, self._biases = prod(problem.weight_shape), problem.out_channels * self._with_bias
        self._adds: dict[int, Launch] = {}
        self._sums = self._cut(most)

    def _cut(self, most: int) -> _Sums:
        source, centre = ("grad_output", "input") if self._sweep else ("input", "grad_output")
        taps, out = ("weight", "grad_input") if self._sweep else (source, source)
        bias = "grad_bias" if self._with_bias else "grad_weight"
        partials, bias_partials, scratch, bias_part = "grad_weight", bias, 0, 0
        if most > 1:
            partials, bias_partials = "scratch", "bias scratch" if self._with_bias else "scratch"
            bias_part = 4 * most * self._weights
            scratch = bias_part + 4 * most * self._biases
        places = {"src": source, "centre": centre, "weight": taps, "bias": taps, "out": out, "partials": partials,
                  "bias_partials": bias_partials}  # fmt: skip
        added = {"partials": partials, "out": "grad_weight", "bias_partials": bias_partials, "bias": bias}
        return _Sums(most, self._launch(most > 1), places, added, scratch, bias_part)

    def __call__(
        self, grad_output: Tensor, input: Tensor, weight: Tensor | None = None, workspace: Tensor | None = None
    ) -> Any:
        p, sums = self.problem, self._sums
        first, second = (t.contiguous(memory_format=self.layout) for t in (grad_output, input))
        result = first.new_empty(p.weight_shape)  # [C_out, 1, *k]
        tensors = {"grad_output": first, "input": second, "grad_weight": result}
        if self._sweep:
            assert weight is not None
            tensors["weight"] = weight.contiguous()
            tensors["grad_input"] = torch.empty(
                p.input_shape, dtype=p.dtype, device=first.device, memory_format=p.memory_format
            )
        if self._with_bias:
            tensors["grad_bias"] = first.new_empty(p.out_channels)
        if sums.most > 1:
            if workspace is None:
                workspace = torch.empty(sums.scratch, dtype=torch.uint8, device=first.device)
            tensors["scratch"] = workspace.view(torch.float32)
            tensors["bias scratch"] = tensors["scratch"][sums.bias_part // 4 :]
        count, compiled = sums.main.start(**{name: tensors[place] for name, place in sums.places.items()})
        if sums.most > 1 and count == 1:  # the channels alone fill this GPU: nothing is to be added
            self._sums = self._cut(1)
            return self(grad_output, input, weight)
        if sums.most > 1:
            if count not in self._adds:
                self._adds[count] = adding(count, self._weights, self._biases)
            self._adds[count].start(**{name: tensors[place] for name, place in sums.added.items()})
        found = tuple(tensors[output] for output in self.outputs)
        if compiled:
            in_parts = " in parts" * (count > 1)
            self._verify(compiled + in_parts, self.outputs, (grad_output, input, weight), found)
        return found if self._sweep else result

    def selected(
        self, device: torch.device, given: Collection[str], aligned: Callable[[str, int], bool]
    ) -> Steps | None:
        """Return what such a call starts, as `Result.selected`."""
        sums = self._sums

        def of(launch: Launch, places: Places) -> Selected | None:
            begins = [sums.bias_part if place == "bias scratch" else 0 for place in places.values()]
            return launch.selected(device, map(aligned, places.values(), begins))

        main = of(sums.main, sums.places)
        if main is None or sums.most == 1:
            return None if main is None else Steps([(main, sums.places)])
        adds = self._adds.get(main.parts)
        then = None if adds is None else of(adds, sums.added)
        return None if then is None else Steps([(main, sums.places), (then, sums.added)], sums.scratch, sums.bias_part)


def launch_of(
    g: Geometry,
    use: Use,
    with_bias: bool,
    bias_tap: tuple[int, int, int],
    in_parts: bool = True,
    activation: int = 0,
) -> Launch:
    """A launch of `correlate`, whose sums may be cut into parts."""
    tile = choose(g, use)
    assert tile is not None
    depth, height, width = g.axes
    arguments = {
        **_sizes(g, tile.vector, tile.stored, tile.loaded),
        "DEPTH": depth.constants,
        "HEIGHT": height.constants,
        "WIDTH": width.constants,
        "ADJOINT": g.adjoint,
        "CHANNELS_LAST": g.channels_last,
        "RESULT": use != "sum",
        "SUM": use != "result",
        "HAS_BIAS": with_bias,
        "ACTIVATION": activation,
        "BIAS_TAP": bias_tap,
        "EXACT": height.result % tile.rows == 0 and width.result % tile.columns == 0,
        **tile.constants(),
    }
    warps = max(1, tile.lanes // (64 if torch.version.hip is not None else 32))
    grid = partial(grid_of, g, use, tile)
    return Launch(correlate, arguments, {"num_warps": warps}, grid if in_parts else lambda _: grid(1))


def _sizes(g: Geometry, vector: int, stored: int, loaded: int) -> dict[str, int]:
    """Arguments of both kernels; channels, and rows of the result and of the source, in vectors of so many."""
    depth, height, width = g.axes
    return {
        "batch": g.batch, "channels": g.channels // vector, "MULTIPLIER": g.multiplier, "WIDE": g.wide,
        "depth": depth.result, "height": height.result, "columns": width.result // stored,
        "src_depth": depth.source, "src_height": height.source, "src_columns": width.source // loaded,
    }  # fmt: skip


def grid_of(g: Geometry, use: Use, tile: Tile, programs: int) -> tuple[int, int]:
    """The size of the grid, and the parts into which it cuts the batch and space."""
    count = parts(g, use, tile, programs)
    return lines(g, tile) * count, count


def adding(count: int, weights: int, biases: int) -> Launch:
    """A launch that adds so many parts."""
    size = 64
    blocks = -(-weights // size) + -(-biases // size)
    arguments = {"weights": weights, "biases": biases, "BP": 32, "BN": size}
    return Launch(add_partials, arguments, {"num_warps": 4}, lambda _: (blocks, count))


# ---- banded ----------------------------------------------------------------------------------------

_WORDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def bound_bands(
    problem: ConvProblem, output: Output, precision: str, verify: Callable[..., None]
) -> Result | Gradients:
    """A pass of a problem, as `bound` gives it; float32 is multiplied in this precision, Triton's word."""
    g = geometry(problem, adjoint=output == "grad_input")
    if output != "grad_weight":
        launch = partial(_bands_launch, problem, g, "result", precision)
        return Result(problem, (output,), verify, launch, torch.contiguous_format)
    main, count = _bands_launch(problem, g, "sum", precision, False), bands.parts(g, bands.choose(g, "sum"))
    return Gradients(problem, (output,), verify, lambda _: main, count, torch.contiguous_format)


def _bands_launch(problem: ConvProblem, g: Geometry, use: bands.Use, precision: str, with_bias: bool) -> Launch:
    kernel = banded.correlate if use == "result" else banded.correlate_sum
    depth, height, width = g.axes
    interpreted = not isinstance(kernel, triton.runtime.JITFunction)
    # The interpreter gets sums of bfloat16 wrong.
    operand = torch.float32 if interpreted and problem.dtype == torch.bfloat16 else problem.dtype
    source, result = bands.align(width.source, g.itemsize), bands.align(width.result, g.itemsize)
    band = bands.choose(g, use)
    count = bands.parts(g, band) if use == "sum" else 1
    arguments = {
        **_sizes(g, 1, result, source),
        "DEPTH": _constants(depth),
        "HEIGHT": _constants(height),
        "WIDTH": _constants(width),
        "OPERAND": _WORDS[operand],
        "PRECISION": precision,
        "SRC_ALIGN": source,
        "OUT_ALIGN": result,
        "FLIPPED": g.adjoint,
        "HAS_BIAS": with_bias,
        "KP": triton.next_power_of_2(width.kernel),
        **band.constants(),
    }
    programs = bands.programs(g, use, band, count)
    return Launch(kernel, arguments, {"num_warps": band.warps, "num_stages": 2}, lambda _: (programs, count))


def _constants(axis: Axis) -> tuple[int, int, int, int]:
    """Return the geometry of grad_input as a forward with the flipped kernel; see `geometry`."""
    kernel, stride, dilation, low = axis.constants
    return (kernel, 1, dilation, (kernel - 1) * dilation - low) if axis.adjoint else (kernel, stride, dilation, low)
