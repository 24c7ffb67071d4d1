"""From tensors to launches of `correlate` or `banded`: what a pass, or the sweep of both gradients, runs."""

# pyright: reportIndexIssue=false
from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._compat import out_of_memory
from ...problem import OPERANDS, ConvProblem, Outputs, passes_of
from ...settings import capturing
from . import NotCompiledError, NotReadyError, banded, bands
from .correlate import add_partials, correlate
from .sliding_sum import Geometry, geometry
from .tiles import MOST_PROGRAMS, Use, choose, exact, lines, parts, use_of

#: ptxas spills a few bytes where that lets one more program run beside the others. Where it does, it is told to take
#: all the registers that a thread can have.
ALL_REGISTERS = {"maxnreg": 255}
#: Programs that run at once where nothing is known of the device: three on each multiprocessor of an H100.
PROGRAMS = 3 * 132
#: Programs that one multiprocessor runs at once, of an A100, H100 or B200 (CUDA C++ Programming Guide, technical
#: specifications per compute capability); PyTorch does not tell.
_MOST_AT_ONCE = 32

# ---- one kernel ------------------------------------------------------------------------------------


class Selected(NamedTuple):
    """A compiled kernel as one launch starts it."""

    start: Callable[..., object]
    taken: list[int]  # which of the launch's tensors the kernel takes, by number
    others: list[Any]  # the arguments after the tensors
    parts: int
    programs: int
    compiled: Any


class Launch:
    """A kernel with all its arguments but the tensors, which come before them.

    Triton finds out at each call which compiled kernel its arguments select, which takes longer than to start it. Of a
    launch only the alignment of its tensors can select another one, so the one that was selected is kept.

    Args:
        arguments: the others by name.
        options: ``num_warps`` and ``num_stages``.
        grid: the number of programs and the argument ``parts``, where the GPU can run so many programs at once.
    """

    def __init__(
        self, kernel: Any, arguments: dict[str, Any], options: dict[str, int], grid: Callable[[int], tuple[int, int]]
    ) -> None:
        self._kernel, self._arguments, self._grid = kernel, arguments, grid
        self._options: dict[str, Any] = {"num_stages": 1, "enable_fp_fusion": True, **options}
        #: By device, and by whether each tensor is aligned to 16 bytes.
        self.selected: dict[tuple[Any, ...], Selected] = {}

    def start(self, **tensors: Tensor) -> tuple[int, str]:
        """Start the kernel; in how many parts, and which compiled one it is where its result is to be looked at.

        The tensors are in the kernel's order. NotReadyError: this is its first call, and within a capture.
        NotCompiledError: it cannot be compiled, or not loaded into this device.
        """
        given = tuple(tensors.values())
        device, new = given[0].device, ""
        key = (device, *[t.data_ptr() % 16 == 0 for t in given])
        with torch.accelerator.device_index(device.index):  # Triton launches on the current one
            selected = self.selected.get(key)
            if selected is None:
                selected = self.selected[key] = self._select(device, tensors)
                new = getattr(selected.compiled, "hash", "")
            selected.start(*[given[i] for i in selected.taken], *selected.others)
        return selected.parts, new

    def _select(self, device: torch.device, tensors: dict[str, Tensor]) -> Selected:
        """Compile the kernel, or find it in Triton's cache; the interpreter compiles nothing."""
        if capturing():
            raise NotReadyError
        try:
            compiled = self._compile(device, tensors)
        except Exception as error:  # whatever Triton, ptxas, the driver or a missing C compiler raises
            if out_of_memory(error):
                raise
            raise NotCompiledError(f"{type(error).__name__}: {str(error).strip()[:300]}") from error
        threads = 32 * self._options["num_warps"]
        programs, parts = self._grid(PROGRAMS if compiled is None else at_once(device, compiled.n_regs, threads))
        arguments = self.arguments(parts, tensors)
        taken = [i for i, name in enumerate(tensors) if name in arguments]
        others = list(arguments.values())[len(taken) :]
        if compiled is None:
            return Selected(partial(self._kernel[(programs,)], **self._options), taken, others, parts, programs, None)
        return Selected(compiled[programs, 1, 1], taken, others, parts, programs, compiled)

    def _compile(self, device: torch.device, tensors: dict[str, Tensor]) -> Any:
        """Return the compiled kernel, loaded into the current device; None where it is interpreted."""
        while (compiled := self._kernel.warmup(grid=(1,), **self.arguments(1, tensors), **self._options)) is not None:
            compiled[1, 1, 1]  # loads it, and counts its registers
            spills = compiled.n_spills and device.type == "cuda" and torch.version.hip is None
            if not spills or "maxnreg" in self._options:
                break
            self._options = {**self._options, **ALL_REGISTERS}
        return compiled

    def arguments(self, parts: int, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Return the arguments of the kernel."""
        given = {**tensors, **self._arguments, "parts": parts}
        return {name: given[name] for name in self._kernel.arg_names}


@cache
def at_once(device: torch.device, registers: int, threads: int) -> int:
    """Return the number of programs, of given threads and registers, that a GPU runs at once."""
    if device.type != "cuda" or torch.version.hip is not None:
        return PROGRAMS
    gpu = torch.cuda.get_device_properties(device)
    rounded = -(-registers // 8) * 8 * threads
    each = min(gpu.regs_per_multiprocessor // rounded, gpu.max_threads_per_multi_processor // threads, _MOST_AT_ONCE)
    return gpu.multi_processor_count * max(1, each)


# ---- the launches of a call ------------------------------------------------------------------------

#: For each pointer that a kernel takes, the tensor: an operand, an output, the scratch memory, or its part for
#: ``grad_bias``.
Places = dict[str, str]


class Steps(NamedTuple):
    """The launches of a call, in order."""

    launches: list[tuple[Selected, Places]]
    scratch: int = 0  # bytes
    bias_part: int = 0  # where in the scratch memory that of ``grad_bias`` begins


class Bound:
    """Computes some outputs of one problem: one launch, and for sums in parts one that adds them.

    Args:
        verify: called with a compiled kernel's hash, the outputs' names, and the operands and results by theirs.
        launch: makes the launch; its arguments are whether there is a bias, and whether sums are cut into parts.
        layout: of the kernel's source, centre and results.
        most: parts of a sum over batch and space, at most; one part is the result itself.
        centred: ``forward`` reads grad_output where its results are.
    """

    def __init__(
        self, problem: ConvProblem, outputs: Outputs, verify: Callable[..., None],
        launch: Callable[[bool, bool], Launch], layout: torch.memory_format, most: int = 1, centred: bool = False,
    ) -> None:  # fmt: skip
        self.problem, self.outputs, self.layout = problem, outputs, layout
        self._verify, self._most = verify, most
        sums_alone = outputs == ("grad_weight",)
        source = "grad_output" if "grad_input" in outputs else "input"
        centre = "grad_output" if centred or sums_alone else "input" if len(outputs) > 1 else source
        slots = ("grad_output", "input", "weight")
        if len(outputs) == 1:
            slots = (*OPERANDS[passes_of(outputs)[0]], "bias", centre)
        flat = ("weight", "bias", "grad_weight", "grad_bias")  # of no layout
        layouts = {name: torch.contiguous_format if name in flat else layout for name in (*slots, *outputs)}
        self._slots = [(name, layouts[name]) for name in slots]
        self._results = [(output, problem.result_shape(output), layouts[output]) for output in outputs]
        weights, biases = prod(problem.weight_shape), problem.out_channels * ("grad_bias" in outputs)
        self._bias_part = 4 * most * weights
        self._scratch = self._bias_part + 4 * most * biases
        sums = "grad_weight" if "grad_weight" in outputs else self.outputs[0]
        bias_sums, bias_scratch = ("grad_bias", "bias scratch") if biases else (sums, "scratch")
        # Where a kernel reads or writes nothing, it gets another tensor.
        taps, out = (source, source) if sums_alone else ("weight", self.outputs[0])
        self._added: Places = {"partials": "scratch", "out": sums, "bias_partials": bias_scratch, "bias": bias_sums}
        self._adding = cache(lambda count: adding(count, weights, biases))

        def main(with_bias: bool, in_parts: bool) -> tuple[Launch, Places]:
            places = {"src": source, "centre": centre, "weight": taps, "bias": "bias" if with_bias else taps}
            partials, bias_partials = ("scratch", bias_scratch) if in_parts else (sums, bias_sums)
            places |= {"out": out, "partials": partials, "bias_partials": bias_partials}  # in the kernel's order
            return launch(with_bias, in_parts), places

        self._main = cache(main)

    def __call__(
        self, first: Tensor, second: Tensor, third: Tensor | None = None, workspace: Tensor | None = None,
        centre: Tensor | None = None,
    ) -> Any:  # fmt: skip
        p, in_parts = self.problem, self._most > 1
        tensors: dict[str, Tensor] = {}
        for (name, layout), t in zip(self._slots, (first, second, third, centre), strict=False):
            if t is not None:
                tensors[name] = t.contiguous(memory_format=layout)
        for output, shape, layout in self._results:
            tensors[output] = torch.empty(shape, dtype=p.dtype, device=first.device, memory_format=layout)
        if in_parts:
            if workspace is None:
                workspace = first.new_empty(self._scratch, dtype=torch.uint8)
            tensors["scratch"] = workspace.view(torch.float32)
            tensors["bias scratch"] = tensors["scratch"][self._bias_part // 4 :]
        launch, places = self._main("bias" in tensors, in_parts)
        try:
            count, compiled = launch.start(**{name: tensors[place] for name, place in places.items()})
            if in_parts and count == 1:  # the channels alone fill this GPU: nothing is to be added
                self._most = 1
                return self(first, second, third)
            if in_parts:
                self._adding(count).start(**{name: tensors[place] for name, place in self._added.items()})
            if compiled:
                self._verify(compiled + " in parts" * in_parts, self.outputs, tensors)
        except NotReadyError:
            raise
        except BaseException:  # no memory for the check, an interrupt
            launch.selected.clear()  # so that the next call is checked
            raise
        found: Any = tuple([tensors[output] for output in self.outputs])
        return found if len(found) > 1 else found[0].contiguous(memory_format=p.memory_format)

    def selected(
        self, device: torch.device, given: Collection[str], aligned: Callable[[str, int], bool]
    ) -> Steps | None:
        """Return what such a call, of operands with these names, starts; None if there was none before.

        ``aligned``: whether the tensor of a name is aligned to 16 bytes so many bytes after its beginning.
        """
        in_parts = self._most > 1

        def of(launch: Launch, places: Places) -> Selected | None:
            begins = [self._bias_part if place == "bias scratch" else 0 for place in places.values()]
            return launch.selected.get((device, *map(aligned, places.values(), begins)))

        launch, places = self._main("bias" in given, in_parts)
        main = of(launch, places)
        if main is None or not in_parts:
            return None if main is None else Steps([(main, places)])
        then = of(self._adding(main.parts), self._added)
        return None if then is None else Steps([(main, places), (then, self._added)], self._scratch, self._bias_part)


def adding(count: int, weights: int, biases: int) -> Launch:
    """Return a launch that adds so many parts."""
    size = 64
    blocks = -(-weights // size) + -(-biases // size)
    arguments = {"weights": weights, "biases": biases, "BP": 32, "BN": size}
    return Launch(add_partials, arguments, {"num_warps": 4}, lambda _: (blocks, count))


def _sizes(g: Geometry, vector: int, stored: int, loaded: int, *constants: Any) -> dict[str, Any]:
    """Return arguments of both kernels; channels, and rows of the result and the source, in vectors of so many."""
    depth, height, width = g.axes
    return {
        "batch": g.batch, "channels": g.channels // vector, "MULTIPLIER": g.multiplier, "WIDE": g.wide,
        "depth": depth.result, "height": height.result, "columns": width.result // stored,
        "src_depth": depth.source, "src_height": height.source, "src_columns": width.source // loaded,
        **dict(zip(("DEPTH", "HEIGHT", "WIDTH"), constants, strict=True)),
    }  # fmt: skip


# ---- correlate -------------------------------------------------------------------------------------


def bound(problem: ConvProblem, outputs: Outputs, verify: Callable[..., None], activation: int = 0) -> Bound:
    """Return what computes these outputs of a problem by `correlate`.

    The activation of ``forward`` is 1 for its SiLU, 2 for SiLU's derivative there times a gradient, the ``centre``.
    """
    g, use = geometry(problem, adjoint="grad_input" in outputs), use_of(outputs)
    tap = g.whole_tap if "grad_bias" in outputs else (-1, -1, -1)

    def launch(with_bias: bool, in_parts: bool) -> Launch:
        return launch_of(g, use, with_bias, tap, in_parts or use == "result", activation)

    tile = choose(g, use)
    most = 1 if use == "result" or tile is None else parts(g, use, tile, MOST_PROGRAMS)
    return Bound(problem, outputs, verify, launch, problem.memory_format, most, activation == 2)


def launch_of(
    g: Geometry, use: Use, with_bias: bool, bias_tap: tuple[int, int, int], in_parts: bool = True, activation: int = 0,
) -> Launch:  # fmt: skip
    """Return a launch of `correlate`, whose sums may be cut into parts."""
    tile = choose(g, use)
    assert tile is not None
    arguments = {
        **_sizes(g, tile.vector, tile.stored, tile.loaded, *(axis.constants for axis in g.axes)), **tile.constants(),
        "ADJOINT": g.adjoint, "CHANNELS_LAST": g.channels_last, "RESULT": use != "sum", "SUM": use != "result",
        "HAS_BIAS": with_bias, "ACTIVATION": activation, "BIAS_TAP": bias_tap,
        "EXACT": exact(g, tile),
    }  # fmt: skip
    warps = max(1, tile.lanes // (64 if torch.version.hip is not None else 32))

    def grid(programs: int) -> tuple[int, int]:
        count = parts(g, use, tile, programs if in_parts else 1)
        return lines(g, tile) * count, count

    return Launch(correlate, arguments, {"num_warps": warps}, grid)


# ---- banded ----------------------------------------------------------------------------------------

_WORDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def bound_bands(problem: ConvProblem, outputs: Outputs, precision: str, verify: Callable[..., None]) -> Bound:
    """Return what computes a pass of a problem by `banded`, float32 in this precision, Triton's word."""
    g, use = geometry(problem, adjoint=outputs == ("grad_input",)), use_of(outputs)
    kernel = banded.correlate if use == "result" else banded.correlate_sum
    interpreted = not isinstance(kernel, triton.runtime.JITFunction)
    # The interpreter gets sums of bfloat16 wrong.
    operand = torch.float32 if interpreted and problem.dtype == torch.bfloat16 else problem.dtype
    width, band = g.axes[2], bands.choose(g, use)
    source, result = bands.align(width.source, g.itemsize), bands.align(width.result, g.itemsize)
    count = bands.parts(g, band) if use == "sum" else 1
    arguments = {
        **_sizes(g, 1, result, source, *(axis.flipped for axis in g.axes)), **band.constants(),
        "OPERAND": _WORDS[operand], "PRECISION": precision, "SRC_ALIGN": source, "OUT_ALIGN": result,
        "FLIPPED": g.adjoint, "KP": triton.next_power_of_2(width.kernel),
    }  # fmt: skip
    options, grid = {"num_warps": band.warps, "num_stages": 2}, (bands.programs(g, use, band, count), count)

    def launch(with_bias: bool, _in_parts: bool) -> Launch:
        return Launch(kernel, arguments | {"HAS_BIAS": with_bias}, options, lambda _: grid)

    return Bound(problem, outputs, verify, launch, torch.contiguous_format, count)
