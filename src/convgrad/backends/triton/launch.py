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

from ...problem import OPERANDS, ConvProblem, Outputs, passes_of
from . import banded, bands
from .correlate import add_partials, correlate
from .geometry import Axis, Geometry, geometry
from .start import Launch, Selected
from .tiles import MOST_PROGRAMS, Tile, Use, choose, lines, parts, use_of


def bound(problem: ConvProblem, outputs: Outputs, verify: Callable[..., None], activation: int = 0) -> Bound:
    """Return what computes these outputs of a problem.

    Args:
        verify: called with a compiled kernel's hash, the outputs' names, and the operands and results by theirs.
        activation: of ``forward``: 1 for its SiLU, 2 for the derivative of SiLU there times a gradient, the ``centre``.
    """
    g, use = geometry(problem, adjoint="grad_input" in outputs), use_of(outputs)
    tap = g.whole_tap if "grad_bias" in outputs else (-1, -1, -1)

    def launch(with_bias: bool, in_parts: bool) -> Launch:
        return launch_of(g, use, with_bias, tap, in_parts or use == "result", activation)

    tile = choose(g, use)
    most = 1 if use == "result" or tile is None else parts(g, use, tile, MOST_PROGRAMS)
    return Bound(problem, outputs, verify, launch, problem.memory_format, most, activation == 2)


#: Tensors with a batch and positions in space.
_IN_SPACE = ("input", "grad_output", "forward", "grad_input")

#: For each pointer that a kernel takes, the tensor: an operand, an output, the scratch memory, or its part for
#: ``grad_bias``.
Places = dict[str, str]


class Steps(NamedTuple):
    """The launches of a call, in order."""

    launches: list[tuple[Selected, Places]]
    #: Bytes of scratch memory, and where in them the part for ``grad_bias`` begins.
    scratch: int = 0
    bias_part: int = 0


class Bound:
    """Computes some outputs of one problem: one launch, and for sums in parts one that adds them.

    Args:
        launch: makes the launch; its arguments are whether there is a bias, and whether sums are cut into parts.
        layout: of the kernel's source, centre and results.
        most: parts of a sum over batch and space, at most; one part is the result itself.
        centred: ``forward`` reads grad_output where its results are.
    """

    def __init__(
        self,
        problem: ConvProblem,
        outputs: Outputs,
        verify: Callable[..., None],
        launch: Callable[[bool, bool], Launch],
        layout: torch.memory_format,
        most: int = 1,
        centred: bool = False,
    ) -> None:
        self.problem, self.outputs, self.layout = problem, outputs, layout
        self._verify, self._launch, self._most = verify, launch, most
        self._source = "grad_output" if "grad_input" in outputs else "input"
        if "grad_weight" in outputs:
            self._centre = "input" if "grad_input" in outputs else "grad_output"
        else:
            self._centre = "grad_output" if centred else self._source
        slots = ("grad_output", "input", "weight")
        if len(outputs) == 1:
            slots = (*OPERANDS[passes_of(outputs)[0]], "bias", self._centre)
        layouts = {name: layout if name in _IN_SPACE else torch.contiguous_format for name in (*slots, *outputs)}
        self._slots = [(name, layouts[name]) for name in slots]
        self._results = [(output, problem.result_shape(output), layouts[output]) for output in outputs]
        self._weights = prod(problem.weight_shape)
        self._biases = problem.out_channels * ("grad_bias" in outputs)
        sums = "grad_weight" if "grad_weight" in outputs else outputs[0]
        biases, bias_parts = ("grad_bias", "bias scratch") if self._biases else (sums, "scratch")
        self._whole: Places = {"partials": sums, "bias_partials": biases}
        self._parts: Places = {"partials": "scratch", "bias_partials": bias_parts}
        self._added: Places = {"partials": "scratch", "out": sums, "bias_partials": bias_parts, "bias": biases}
        self._launches: dict[tuple[bool, bool], tuple[Launch, Places]] = {}
        self._adds: dict[int, Launch] = {}

    def _main(self, with_bias: bool, in_parts: bool) -> tuple[Launch, Places]:
        """Return the launch of the kernel, and its tensors: another one where the kernel reads or writes nothing."""
        found = self._launches.get((with_bias, in_parts))
        if found is None:
            sums_alone = self.outputs == ("grad_weight",)
            taps, out = (self._source, self._source) if sums_alone else ("weight", self.outputs[0])
            bias = "bias" if with_bias else taps
            places: Places = {"src": self._source, "centre": self._centre, "weight": taps, "bias": bias, "out": out}
            places |= self._parts if in_parts else self._whole  # in the kernel's order
            found = self._launches[with_bias, in_parts] = self._launch(with_bias, in_parts), places
        return found

    def __call__(
        self,
        first: Tensor,
        second: Tensor,
        third: Tensor | None = None,
        workspace: Tensor | None = None,
        centre: Tensor | None = None,
    ) -> Any:
        p, most = self.problem, self._most
        tensors: dict[str, Tensor] = {}
        for (name, layout), t in zip(self._slots, (first, second, third, centre), strict=False):
            if t is not None:
                tensors[name] = t.contiguous(memory_format=layout)
        for output, shape, layout in self._results:
            tensors[output] = torch.empty(shape, dtype=p.dtype, device=first.device, memory_format=layout)
        bias_part = 4 * most * self._weights
        if most > 1:
            if workspace is None:
                workspace = first.new_empty(bias_part + 4 * most * self._biases, dtype=torch.uint8)
            tensors["scratch"] = workspace.view(torch.float32)
            tensors["bias scratch"] = tensors["scratch"][bias_part // 4 :]
        launch, places = self._main("bias" in tensors, most > 1)
        count, compiled = launch.start(**{name: tensors[place] for name, place in places.items()})
        if most > 1 and count == 1:  # the channels alone fill this GPU: nothing is to be added
            self._most = 1
            return self(first, second, third)
        if most > 1:
            if count not in self._adds:
                self._adds[count] = adding(count, self._weights, self._biases)
            self._adds[count].start(**{name: tensors[place] for name, place in self._added.items()})
        found: Any = tuple([tensors[output] for output in self.outputs])
        if compiled:
            self._verify(compiled + " in parts" * (most > 1), self.outputs, tensors)
        return found if len(found) > 1 else found[0].contiguous(memory_format=p.memory_format)

    def selected(
        self, device: torch.device, given: Collection[str], aligned: Callable[[str, int], bool]
    ) -> Steps | None:
        """Return what such a call starts; None if there was none before.

        Args:
            given: the names of the operands.
            aligned: whether the tensor of this name is aligned to 16 bytes so many bytes after its beginning.
        """
        most = self._most
        bias_part = 4 * most * self._weights

        def of(launch: Launch | None, places: Places) -> Selected | None:
            begins = [bias_part if place == "bias scratch" else 0 for place in places.values()]
            return None if launch is None else launch.selected(device, map(aligned, places.values(), begins))

        launch, places = self._main("bias" in given, most > 1)
        main = of(launch, places)
        if main is None or most == 1:
            return None if main is None else Steps([(main, places)])
        then = of(self._adds.get(main.parts), self._added)
        scratch = bias_part + 4 * most * self._biases
        return None if then is None else Steps([(main, places), (then, self._added)], scratch, bias_part)


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
    _, height, width = g.axes
    arguments = {
        **_sizes(g, tile.vector, tile.stored, tile.loaded, *(axis.constants for axis in g.axes)),
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


def _sizes(g: Geometry, vector: int, stored: int, loaded: int, *constants: Any) -> dict[str, Any]:
    """Arguments of both kernels; channels, and rows of the result and of the source, in vectors of so many."""
    depth, height, width = g.axes
    return {
        "batch": g.batch, "channels": g.channels // vector, "MULTIPLIER": g.multiplier, "WIDE": g.wide,
        "depth": depth.result, "height": height.result, "columns": width.result // stored,
        "src_depth": depth.source, "src_height": height.source, "src_columns": width.source // loaded,
        **dict(zip(("DEPTH", "HEIGHT", "WIDTH"), constants, strict=True)),
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


def bound_bands(problem: ConvProblem, outputs: Outputs, precision: str, verify: Callable[..., None]) -> Bound:
    """A pass of a problem, as `bound` gives it; float32 is multiplied in this precision, Triton's word."""
    g, use = geometry(problem, adjoint=outputs == ("grad_input",)), use_of(outputs)
    most = bands.parts(g, bands.choose(g, "sum")) if use == "sum" else 1

    def launch(with_bias: bool, _in_parts: bool) -> Launch:
        return _bands_launch(problem, g, use, precision, with_bias)

    return Bound(problem, outputs, verify, launch, torch.contiguous_format, most)


def _bands_launch(problem: ConvProblem, g: Geometry, use: Use, precision: str, with_bias: bool) -> Launch:
    kernel = banded.correlate if use == "result" else banded.correlate_sum
    width = g.axes[2]
    interpreted = not isinstance(kernel, triton.runtime.JITFunction)
    # The interpreter gets sums of bfloat16 wrong.
    operand = torch.float32 if interpreted and problem.dtype == torch.bfloat16 else problem.dtype
    source, result = bands.align(width.source, g.itemsize), bands.align(width.result, g.itemsize)
    band = bands.choose(g, use)
    count = bands.parts(g, band) if use == "sum" else 1
    arguments = {
        **_sizes(g, 1, result, source, *map(_constants, g.axes)),
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
