"""A search for what PyTorch's CPU kernels get wrong here: random problems, poisoned memory, a child process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from itertools import chain

import torch

from ..backends import DEFECTS, statable_arguments
from ..engine import Found, get_backend
from ..problem import PASSES, ConvProblem, Output, Pass
from .child import POISON, Child, Lost
from .problem_set import random_problems
from .suite import check_problem


def search_aten(
    seconds: float = 60.0, seed: int = 0, progress: Callable[[float, int], None] | None = None
) -> Iterator[Found]:
    """Check `aten` in poisoned memory, and yield what is wrong and not known yet.

    ``progress`` is called with (share of the time, problems done).
    """
    r, done, start = random.Random(seed), 0, time.monotonic()
    known = [ConvProblem.parse(d.example) for d in DEFECTS]
    with Child(answer) as child:
        for plain in chain(known, random_problems(seed)):
            passed = time.monotonic() - start
            if passed > seconds:
                return
            done += 1
            if progress is not None:
                progress(passed / seconds, done)
            p = plain.replace(has_bias=r.random() < 0.5)
            for pass_ in PASSES:
                avoided = get_backend("aten").wrong_here(p, (pass_,), torch.device("cpu"))[0]
                if not avoided and (what := _wrong(child, p, pass_, r.randrange(1000))):
                    yield Found(p, pass_, what, _upstream_command(p, pass_))


def _wrong(child: Child, p: ConvProblem, pass_: Pass, seed: int) -> str:
    """Return the end of "PyTorch's kernel is wrong here: ..."; empty if it is right."""
    try:
        return child.ask((str(p), pass_, seed))
    except Lost as lost:
        return f"it {lost}"
    except RuntimeError:  # an error of the check itself
        return ""


def answer(request: tuple[str, Output, int]) -> str:
    """Check one pass in the child; return what is wrong, and nothing where PyTorch refuses or all is right."""
    torch.set_num_threads(1)
    problem, output, seed = request
    results = check_problem("aten", problem, output, seed=seed, properties=("exact", "bias"))
    wrong = [r.message for r in results if r.status == "failed" and not r.message.startswith("it raised")]
    return wrong[0] if wrong else ""


def _upstream_command(p: ConvProblem, output: Output) -> str:
    """Return a shell command that shows a wrong result with PyTorch alone, in memory that glibc has filled."""
    rest = ", ".join(str(list(a) if isinstance(a, tuple) else a) for a in statable_arguments(p))
    layout = f".to(memory_format={p.memory_format})" if p.channels_last else ""
    shapes = {"x": p.input_shape, "w": p.weight_shape, "g": p.output_shape}
    if p.transposed:
        shapes["x"], shapes["g"] = shapes["g"], shapes["x"]
    made = "; ".join(f"{n} = torch.randint(-3, 4, {s}).to({p.dtype}){layout}" for n, s in shapes.items())
    i = int(output == "grad_weight")
    end = f"None, {rest}, {[i == 0, i == 1, False]})[{i}]"
    call, doubles = (f"torch.ops.aten.convolution_backward(g{d}, x{d}, w{d}, {end}" for d in ("", ".double()"))
    if output == p.bias_pass:
        bias = f"torch.zeros({p.shape_of(p.bias_slot)[1]}).to({p.dtype})" if p.has_bias else None
        call = f"torch.convolution(x, w, {bias}, {rest})"
        doubles = f"torch.convolution(x.double(), w.double(), None, {rest})"
    program = f"import torch; torch.set_num_threads(1); {made}; print(({call}.double() - {doubles}).abs().max())"
    return f'MALLOC_PERTURB_={POISON} python -c "{program}"'
