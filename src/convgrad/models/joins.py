"""Which layers of a model may be computed together: the result of one goes to the other, and nowhere else."""

from __future__ import annotations

import copy
import dis
import inspect
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from .. import functional
from ..nn import joined
from .classes import (
    ACTIVATIONS,
    PADS,
    accelerated_class,
    is_convolution,
    is_plain_conv,
    is_plain_norm,
    names_in,
    owner_class,
    restore_class,
)
from .report import Report
from .trial import no_number_drawn

#: The names of both, with those of the identities between them; and where the first is called: there, and where the
#: functions around that are called, up to the one that calls the second.
_Pair = tuple[tuple[str, ...], tuple[joined.Place, ...]]
#: Where a function is at a time, and its place there.
_At = tuple[FrameType, joined.Place]
#: A call of a module, or of a function that may be joined -> its name; what calls it and where; what calls that; ...
_Called = dict[fx.Node, tuple[str, list[_At]]]

#: Kinds of layers that may be computed together, in the order of the calls.
_JOINED = {("norm", "activation"), ("pad", "convolution")}


def join_layers(model: nn.Module, report: Report) -> None:
    """Let a normalization compute the activation behind it, and a convolution the padding in front of it.

    Only where tracing proves that nothing else uses what lies between the two. The activation and the padding may be
    functions, and so may the others in a class that computes them itself.
    """
    parents = Counter(id(child) for module in model.modules() for child in module._modules.values())
    for name, owner in [*model.named_modules()]:
        kinds = {k: kind for k, child in owner._modules.items() if (kind := _kind(child, parents[id(child)] == 1))}
        cls = type(owner)
        if getattr(cls, "_convgrad_joins", None) == "norm" and not is_plain_norm(owner):
            kinds[""] = "norm"  # its class may call the function itself
        elif getattr(cls, "_convgrad_joined", None) == "pad" and not is_plain_conv(owner):
            kinds[""] = "convolution"
        if getattr(cls, "forward", None) is not nn.Sequential.forward:  # which calls no function
            kinds |= dict.fromkeys(joined.FUNCTIONS, "activation")
        if "convolution" in kinds.values() and _mentions_padding(cls):
            kinds[joined.PAD] = "pad"
        if not any({*pair} <= {*kinds.values()} for pair in _JOINED):
            continue
        # An fx.GraphModule gives its class another forward when it is copied or compiled again.
        if isinstance(owner, fx.GraphModule) or "forward" in vars(owner) or not (pairs := _proven(owner, kinds)):
            continue
        pads = [pair for pair in pairs if kinds[pair[0][0]] == "pad"]
        if pads and _may_change_input(model, name, owner) and not (pairs := [p for p in pairs if p not in pads]):
            continue
        try:
            give_class(owner, owner_class(type(owner)), report)
        except Exception:  # it has this class already, or a metaclass or `__setattr__` of the user's refuses in any way
            continue
        for (one, *_, other), _ in pairs:
            taken, layer = (one, other) if kinds[one] == "pad" else (other, one)
            module: Any = {joined.PAD: "F.pad", **joined.FUNCTIONS, **owner._modules}[taken]
            if type(module) in (*ACTIVATIONS, *PADS):
                give_class(module, accelerated_class(type(module)), report)
            full = f"{name}.{layer}".strip(".")
            if full in report.replaced:
                text = str(module).partition("(\n")[0]  # without children, as quantization-aware training adds some
                report.replaced[full] += f", with {text}"
        vars(owner)["_convgrad_pairs"] = tuple(pairs)
        report._undo.append(partial(vars(owner).pop, "_convgrad_pairs"))


def _kind(module: Any, once: bool) -> str | None:
    """What a module may be joined as; ``once``: nothing else of the model has it as a child."""
    if type(module) in (*ACTIVATIONS, *ACTIVATIONS.values()):
        return "activation" if "forward" not in vars(module) else None
    if type(module) is nn.Identity:
        return "identity"
    if not once:
        return None
    if is_plain_norm(module):
        return "norm"
    if type(module) in (*PADS, *PADS.values()):
        return "pad" if "forward" not in vars(module) else None
    return "convolution" if is_plain_conv(module) else None


def _code_of(cls: type, functions_too: bool) -> Iterator[CodeType]:
    """The forward of a class, the methods that may be called in it, and if asked for the functions of its module."""
    seen: set[Any] = set()
    functions: list[Any] = [getattr(cls, "forward", None)]
    while functions:  # no code of the user's objects runs here, which may raise anything
        function = functions.pop()
        if type(function) in (staticmethod, classmethod):
            function = function.__func__
        if type(function) is not FunctionType or function in seen:
            continue
        seen.add(function)
        functions.append(vars(function).get("__wrapped__"))
        if str(function.__module__).startswith(("torch.", "convgrad.")):
            continue
        yield function.__code__
        names = {*names_in(function.__code__)}
        functions += [vars(base).get(n) for n in names for base in cls.__mro__]
        if functions_too:
            functions += [function.__globals__.get(n) for n in names]


def _mentions_padding(cls: type) -> bool:
    """Whether the forward of a class, or what it may call, has `torch.nn.functional.pad` in it, by name."""
    return any("pad" in names_in(code) for code in _code_of(cls, functions_too=True))


def _may_change_input(model: nn.Module, name: str, owner: nn.Module) -> bool:
    """Whether an input of a module may be changed in place later, as far as its code and that of its owners says.

    A convolution that padding is joined with keeps this input for its gradient, and not a padded copy.
    """
    owners = [model.get_submodule(name[:i]) for i, letter in enumerate(name) if letter == "."]
    codes = [code for module in (model, *owners, owner) for code in _code_of(type(module), functions_too=False)]
    return any(_IN_PLACE.match(n) for code in codes for n in names_in(code)) or any(map(_adds_to_what_it_read, codes))


_IN_PLACE = re.compile(r"(?!requires_grad_)[a-z]\w*[a-z0-9]_$")  # a method's name


def _adds_to_what_it_read(code: CodeType) -> bool:
    """Whether there is an ``x += f(x)``, a ``y = f(x)`` and then an ``x += y``, or an ``x[i] = y``."""
    reads: Counter[str] = Counter()
    steps = [*dis.get_instructions(code)]
    for step, following in pairwise(steps):
        in_place = step.opname.startswith("INPLACE_") or (step.opname == "BINARY_OP" and step.argrepr.endswith("="))
        if in_place and any(reads[variable] > 1 for variable in _variables("STORE", following)):
            return True
        if step.opname in ("STORE_SUBSCR", "STORE_SLICE"):
            return True
        reads.update(_variables("LOAD", step))
        for variable in _variables("STORE", step):
            reads[variable] = 0
    return False


def give_class(module: nn.Module, after: type, report: Report) -> None:
    """Give a module another class, until the report is restored; Python or the module may refuse with any error."""
    before, module.__class__ = type(module), after
    report._undo.append(partial(restore_class, module, before, after))


class _Sized(fx.Proxy):
    """What stands for a tensor of a shape."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.tracer.shape)  # pyright: ignore[reportAttributeAccessIssue]

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    ndim = property(dim)


class _Tracer(fx.Tracer):
    """Sees which modules and functions a forward calls with what, and nothing inside the modules."""

    def __init__(self, functions: tuple[Any, ...], shape: tuple[int, ...]) -> None:
        # Not `math`, which would be another one for everybody meanwhile: also for Dynamo, if it is imported then.
        super().__init__((), functions, param_shapes_constant=True)  # pyright: ignore[reportArgumentType]
        self.called: _Called = {}
        self.shape = shape

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Sized(node, self) if self.shape else super().proxy(node)

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        given, frame = super().create_proxy(kind, target, *args, **kwargs), sys._getframe(1)
        if self.shape and len(self.graph.nodes) > _MOST_NODES:  # a loop that waits for another size does not end
            raise RecursionError
        name = _name(given.node)
        if name == joined.PAD and any(node.op == "call_module" for node in self.called):
            return given  # all that is called before would be watched for it
        if name is not None:
            frame, path = joined.caller_of(frame), []
            while frame is not None and frame.f_code is not fx.Tracer.trace.__code__:
                path.append((frame, joined.place_of(frame)))
                frame = frame.f_back
            self.called[given.node] = name, path
        return given


_MOST_NODES = 2000

#: What a layer of a class of the user's calls itself, or our class for it.
_ITSELF = (F.batch_norm, F.instance_norm, *(getattr(of, f"conv{d}d") for of in (F, functional) for d in (1, 2, 3)))


def _name(node: fx.Node) -> str | None:
    """A call's name among those of the modules; None of one that is not joined with any."""
    if node.op == "call_module":
        return str(node.target)
    return "" if node.target in _ITSELF else joined.NAMES.get(node.target)


def _proven(owner: nn.Module, kinds: dict[str, str]) -> list[_Pair]:
    """The pairs that follow one another in training and in evaluation, with no other user between."""
    with warnings.catch_warnings(), no_number_drawn(torch.device("cpu")) as drawn:
        warnings.simplefilter("ignore")
        found = _in_both_modes(owner, kinds)
        if joined.PAD in kinds and all(one != joined.PAD for (one, *_), _ in found):
            found += [pair for pair in _in_both_modes(owner, kinds, sized=True) if pair[0][0] == joined.PAD]
        if drawn():  # another time it may call something else
            return []
    return found


def _in_both_modes(owner: nn.Module, kinds: dict[str, str], sized: bool = False) -> list[_Pair]:
    try:
        found = _pairs(owner, kinds, *_graph(owner, True, sized))
        return found and [pair for pair in _pairs(owner, kinds, *_graph(owner, False, sized)) if pair in found]
    except Exception:  # whatever a forward raises where there are no values: nothing is proven
        return []


def _graph(owner: nn.Module, mode: bool, sized: bool) -> tuple[fx.Graph, _Called]:
    """What the forward calls, and where: traced through functions, unless they need values or sizes of tensors.

    Args:
        sized: all tensors have some size. What follows padding does not depend on it; what follows a normalization may.
    """
    opaque: tuple[Any, ...] = ()
    shape: tuple[int, ...] = ()
    if sized:
        convolution: Any = next(filter(is_convolution, owner.modules()))
        shape = (2, convolution.in_channels, *(17 for _ in convolution.kernel_size))
    while True:
        twin = copy.deepcopy(owner, {id(t): t for t in _not_copied(owner)})  # a forward may change its modules
        for module in twin.modules():
            module.training = mode
        tracer = _Tracer(opaque, shape)
        try:
            return tracer.trace(twin), tracer.called
        except Exception as error:
            known = inspect.unwrap(type(twin).forward).__globals__.values()
            named = {f.__code__: f for f in known if isinstance(f, FunctionType)}
            codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
            failed = next((named[code] for code in codes if code in named), None)
            if sized or failed is None or failed in opaque:
                raise
            opaque += (failed,)
        finally:  # or its frames would keep the model, and whatever the callers hold, until garbage is collected
            vars(tracer).clear()


def _not_copied(owner: nn.Module) -> Iterator[Tensor]:
    """The parameters of a module, for their size, and the tensors in it that cannot be copied."""
    for module in owner.modules():
        for t in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(t, nn.Parameter) or (isinstance(t, Tensor) and (nn.parameter.is_lazy(t) or not t.is_leaf)):
                yield t


def _pairs(owner: nn.Module, kinds: dict[str, str], graph: fx.Graph, called: _Called) -> list[_Pair]:
    times = Counter(name for name, _ in called.values())
    given = {node.target for node in graph.nodes if node.op == "get_attr"}  # to a function, which may call it
    pairs: list[_Pair] = []
    for node, (one, path) in called.items():
        names, paths = zip(*(called[n] for n in _chain(node, called, kinds)), strict=True)
        if (kinds.get(one), kinds.get(names[-1])) not in _JOINED or times[one] > 1 or given & {one, ""}:
            continue
        others = [
            str(user.target) for source in node.all_input_nodes for user in source.users if user.op == "call_module"
        ]
        if kinds[one] == "pad" and any(getattr(owner.get_submodule(other), "inplace", False) for other in others):
            continue
        caller, _ = paths[-1][0]
        frames, places = zip(*path, strict=True)
        inner = frames.index(caller)
        between = [places[inner], *(place for (_, place), *_ in paths[1:])]
        if _always_follows(caller.f_code, between, names[-1]) and all(
            _always_follows(frame.f_code, [place], None) for frame, place in path[:inner]
        ):
            pairs.append((names, places[: inner + 1]))
    return pairs


def _chain(node: fx.Node, called: _Called, kinds: dict[str, str]) -> list[fx.Node]:
    """A call, the identities that get its result one after the other, and the call behind them, all in one function.

    Only padding may be called by a function that the one which calls the others calls.
    """
    chain, (name, path) = [node], called[node]
    around = [frame for frame, _ in (path if kinds.get(name) == "pad" else path[:1])]
    while len(chain) == 1 or kinds.get(called[chain[-1]][0]) == "identity":
        user = next(iter(chain[-1].users), None)
        if user not in called or called[user][1][0][0] not in around or user.args[:1] != (chain[-1],):
            break
        chain.append(user)
    return chain


def _always_follows(code: CodeType, places: list[joined.Place], name: str | None) -> bool:
    """Whether a function that calls at one place next calls at the others, unless the module of this name is None.

    If there is one place only, whether it next returns. And whether what the first call gives is read nowhere else. A
    branch between them may go another way another time; a function that is called there, or an attribute or a list that
    the result is put into, may show it to someone.
    """
    if code is nn.Sequential.forward.__code__:
        return True
    steps, tested = [*dis.get_instructions(code)], None
    # The place of a call of a function in Python is behind the instruction itself, in its cache.
    at, *between = [max(s.offset for s in steps if s.offset <= called_at) for *_, called_at in places]
    last = between.pop() if between else None
    reads: dict[str, int] = {}  # how often a variable was read since something was stored there
    for i, step in enumerate(steps):
        if step.offset <= at:
            continue
        if last is None and step.opname == "RETURN_VALUE":
            return True
        if step.offset == last:
            return not _reads_later(steps[i + 1 :], steps, {*reads})
        reads |= dict.fromkeys(_variables("STORE", step), 0)
        for variable in reads.keys() & _variables("LOAD", step):
            reads[variable] += 1
        if 2 in reads.values():  # the call takes one, the other stays for what comes behind
            return False
        if step.opname == "JUMP_FORWARD":
            at = step.argval - 1
        elif step.opname in _OF_A_TEST or step.offset in between:
            continue
        elif not step.opname.startswith(_HARMLESS) and ("JUMP" not in step.opname or tested != ("LOAD_ATTR", name)):
            return False
        else:
            tested = step.opname, step.argval
    return False


#: Instructions that give what they have to nobody, and behind which nothing else may come.
_HARMLESS = ("LOAD_", "STORE_FAST", "PUSH_NULL", "PRECALL", "KW_NAMES", "NOP")
#: What ``is None`` and ``bool`` put between what they test and the jump.
_OF_A_TEST = ("LOAD_CONST", "IS_OP", "TO_BOOL", "NOT_TAKEN", "EXTENDED_ARG")


def _reads_later(after: list[dis.Instruction], anywhere: list[dis.Instruction], names: set[str]) -> bool:
    """Whether a function may read one of these variables in what follows a call, or in what that jumps back to."""
    handles = any(step.opname in ("POP_EXCEPT", "RERAISE") for step in after)
    for step in after:
        names = names - _variables("STORE", step)
        if names & _variables("LOAD", step):
            return True
        returns = step.opname.startswith("RETURN")
        if returns and not handles:
            return False
        if returns or step.opcode in _JUMPS:
            break
    first = min(step.argval if step.opcode in _JUMPS else step.offset for step in after)
    return any(names & _variables("LOAD", step) for step in anywhere if step.offset >= first)


_JUMPS = {*dis.hasjrel, *dis.hasjabs}


def _variables(does: str, step: dis.Instruction) -> set[str]:
    """The local variables that an instruction loads or stores; from Python 3.13 on one may do both."""
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return {n for n, what in zip(names, re.findall("(LOAD|STORE)_FAST", step.opname), strict=False) if what == does}
