"""Random calls of the library as JSON, and what each is held to, in a child process with poisoned memory."""

import random
from contextlib import ExitStack, nullcontext
from typing import Any

try:
    import resource
except ImportError:  # Windows
    resource = None

import torch
from torch import Tensor

import convgrad
from convgrad._compat import channels_last_of
from convgrad.backends import statable_arguments
from convgrad.check.bounds import error_bound, reduction_length
from convgrad.check.operands import integer_operands, magnitude, reference
from convgrad.check.problem_set import random_problems
from convgrad.engine import get_backend
from convgrad.problem import PASSES, ConvProblem, Slot

MODES = ("function", "operator", "autograd", "takeover")
BACKENDS = (None, None, None, "native", "im2col", "aten:padded", "aten:float32", "aten:channels_last")
LAYOUTS = ("dense", "dense", "slice", "offset", "expanded", "neg", "odd strides")
_MOST_MEMORY = 8 << 30
#: Arguments of a call that must be refused, or computed as PyTorch does: one is put in the place of what stands there.
SPOILED: dict[str, tuple[Any, ...]] = {
    "padding": (-1, 2**31 - 1, 2**45, 2**61, 2**63 - 1),
    "stride": (0, -1, 2**31, 2**62),
    "dilation": (0, -3, 2**31, 2**61, 2**63 - 1),
    "groups": (0, -1, 7, 2**40),
    "grad_output": (0, 1, 2**20),
}


def random_call(r: random.Random) -> dict[str, Any]:
    """A call as plain data, small enough to be printed in one line."""
    problem = next(random_problems(r.randrange(2**40)))
    spoiled = r.choice(sorted(SPOILED)) if r.random() < 0.25 else None
    mode, backend = r.choice(MODES), r.choice(BACKENDS)
    if backend and backend.startswith("aten:") and (spoiled or _known_to_be_wrong(backend, problem)):
        backend = None
    return {
        "problem": str(problem),
        "mode": mode,
        "backend": backend,
        "layouts": [r.choice(LAYOUTS) for _ in range(3)],
        "mask": [r.random() < 0.7 for _ in range(3)],
        "threads": r.choice((1, 1, 1, 2)),
        "deterministic": r.random() < 0.1,
        "seed": r.randrange(1000),
        "spoiled": None if spoiled is None else [spoiled, r.choice(SPOILED[spoiled])],
    }


def _known_to_be_wrong(backend: str, p: ConvProblem) -> bool:
    """Whether a request would get what it is warned of, and may corrupt the memory of the calls after it.

    In either layout: that of the call depends on its operands' strides.
    """
    layouts = (p.replace(memory_format=f) for f in (torch.contiguous_format, channels_last_of(p.ndim)))
    return any(get_backend(backend).wrong_here(q, (o,), torch.device("cpu"))[0] for q in layouts for o in PASSES)


def smaller_calls(call: dict[str, Any]) -> list[dict[str, Any]]:
    """Simpler ones, of which the first that still fails takes a call's place."""
    p = ConvProblem.parse(call["problem"])
    changes: list[dict[str, Any]] = [
        {"layouts": ["dense"] * 3},
        {"threads": 1, "deterministic": False},
        *({"mask": [i == j for j in range(3)]} for i in range(3)),
        {"mode": "function"},
        {"backend": None},
    ]
    shapes = [{"batch": 1}, {"in_channels": p.groups}, {"out_channels": p.groups}]
    changes += [{"problem": str(p.replace(**s))} for s in shapes]
    return [c for c in ({**call, **change} for change in changes) if c != call]


# ---- in the child --------------------------------------------------------------------------------


def answer(call: dict[str, Any]) -> str:
    """What is wrong with a call; empty where it is right, or is refused as it should be.

    A spoiled padding may be a problem like others whose result takes 17 GB: there is no memory for that.
    """
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    p = ConvProblem.parse(call["problem"])
    torch.set_num_threads(call["threads"])
    torch.use_deterministic_algorithms(call["deterministic"])
    slots: list[Slot] = ["input", "weight", "grad_output"]
    slots = slots[::-1] if p.transposed else slots
    operands = integer_operands(p, PASSES, call["seed"])
    tensors = [_laid_out(operands[s], kind) for s, kind in zip(slots, call["layouts"], strict=True)]
    try:
        results = _computed(p, call, tensors)
    except (convgrad.ConvgradError, TypeError, OverflowError) as error:
        allowed = call["spoiled"] or isinstance(error, convgrad.BackendError)
        return "" if allowed else f"{type(error).__name__}: {error}".splitlines()[0]
    except RuntimeError as error:  # PyTorch's own: under takeover it speaks for itself
        return "" if call["spoiled"] else f"{type(error).__name__}: {error}".splitlines()[0]
    if call["spoiled"]:
        return ""  # computed after all: `conv1d(padding=2**31 - 1, stride=2**30)` is a problem like others
    operands = {s: t.resolve_neg() for s, t in zip(slots, tensors, strict=True)}
    return "; ".join(filter(None, (_compared(p, name, got, operands, _bias(p, call)) for name, got in results.items())))


def _laid_out(t: Tensor, kind: str) -> Tensor:
    if kind == "slice":
        return torch.stack((t, t + 1), -1)[..., 0]
    if kind == "offset":
        flat = torch.empty(t.numel() + 3, dtype=t.dtype)
        return flat.as_strided(t.shape, t.stride(), 3).copy_(t)
    if kind == "expanded":
        return t[:1].expand(t.shape)
    if kind == "neg":
        return torch._neg_view(t)
    if kind == "odd strides":
        return t.as_strided(t.shape, [5 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)])
    return t


def _computed(p: ConvProblem, call: dict[str, Any], tensors: list[Tensor]) -> dict[str, Tensor]:
    """The results by their pass of the plain problem."""
    x, w, g = tensors
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    form: dict[str, Any] = dict(zip(names, statable_arguments(p), strict=True))
    if call["spoiled"]:
        name, value = call["spoiled"]
        if name == "grad_output":
            g = g[..., :0] if value == 0 else g[:, :1].expand(g.shape[0], value, *g.shape[2:])
        else:
            form[name] = value if name == "groups" else [*form[name][:-1], value]
    arguments = tuple(form.values())
    forward, gradient = p.bias_pass, "forward" if p.transposed else "grad_input"
    mask, bias = call["mask"], _bias(p, call) if not call["spoiled"] else None
    sizes = [p.shape_of(p.bias_slot)[1]] if mask[2] else None
    with ExitStack() as stack:
        stack.enter_context(convgrad.use_backend(call["backend"]) if call["backend"] else nullcontext())
        if call["mode"] == "takeover":
            stack.enter_context(convgrad.takeover())
        if call["mode"] in ("autograd", "takeover"):
            x, w = x.detach().requires_grad_(mask[0]), w.detach().requires_grad_(mask[1])
            own = torch.convolution if call["mode"] == "takeover" else torch.ops.convgrad.convolution
            bias = bias.requires_grad_() if bias is not None and mask[2] else bias
            y = own(x, w, bias, *arguments)
            wanted = [t for t, m in zip((x, w, bias), mask, strict=True) if m and t is not None]
            found = iter(torch.autograd.grad(y, wanted, g) if wanted else ())
            grads = [next(found) if m and t is not None else None for t, m in zip((x, w, bias), mask, strict=True)]
        else:
            op = convgrad.convolution if call["mode"] == "function" else torch.ops.convgrad.convolution
            y = op(x, w, bias, *arguments)
            back = convgrad.convolution_backward
            if call["mode"] == "operator":
                back = torch.ops.convgrad.convolution_backward
            grads = list(back(g, x, w, sizes, *arguments, mask)) if any(mask) else [None] * 3
    results = {forward: y.detach(), gradient: grads[0], "grad_weight": grads[1], "grad_bias": grads[2]}
    return {name: t for name, t in results.items() if t is not None}


def _bias(p: ConvProblem, call: dict[str, Any]) -> Tensor | None:
    """Small integers, in two of three calls."""
    return (torch.arange(p.shape_of(p.bias_slot)[1]) % 5 - 2.0).to(p.dtype) if call["seed"] % 3 else None


def _compared(p: ConvProblem, pass_: Any, got: Tensor, operands: dict[str, Tensor], bias: Tensor | None) -> str:
    if pass_ == "grad_bias":
        g = operands[p.bias_slot].double()
        exact = g.transpose(0, 1).flatten(1).sum(1)
        bound = 1e-5 * g.abs().transpose(0, 1).flatten(1).sum(1)
    else:
        exact = reference(p, pass_, operands)
        bound = 16 * error_bound("direct", p.dtype, reduction_length(p, pass_), exact, magnitude(p, pass_, operands))
        if bias is not None and pass_ == p.bias_pass:
            exact = exact + bias.double().view(-1, *[1] * p.ndim)
    if p.dtype.itemsize == 2:
        bound = bound + 0.04 * exact.abs() + 0.02 * exact.abs().amax()
    if got.shape != exact.shape:
        return f"{pass_} has shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    error = (got.double() - exact).abs().nan_to_num(float("inf"), float("inf"))
    return "" if bool((error <= bound).all()) else f"{pass_} is off by {float(error.amax()):.3g}"
