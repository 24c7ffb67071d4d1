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
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..nn import joined
from .classes import ACTIVATIONS, PADS, accelerated_class, is_plain_conv, is_plain_norm, owner_class, restore_class
from .report import Report
from .trial import no_number_drawn

#: The names of both, with those of the identities between them; and where the first is called.
_Pair = tuple[tuple[str, ...], joined.Place]
#: A call of a module, of `torch.nn.functional.batch_norm` or of an activation -> its name, what calls it, and where.
_Called = dict[fx.Node, tuple[str, CodeType, joined.Place]]

#: Kinds of layers that may be computed together, in the order of the calls.
_JOINED = {("norm", "activation"), ("pad", "convolution")}


def join_layers(model: nn.Module, report: Report) -> None:
    """Let a batch normalization compute the activation behind it, and a convolution the padding in front of it.

    Only where tracing proves that nothing else uses what lies between the two.
    """
    parents = Counter(id(child) for module in model.modules() for child in module._modules.values())
    for name, owner in [*model.named_modules()]:
        kinds = {k: kind for k, child in owner._modules.items() if (kind := _kind(child, parents[id(child)] == 1))}
        if getattr(type(owner), "_convgrad_joins", None) == "norm" and not is_plain_norm(owner):
            kinds[""] = "norm"  # its class may call the function itself
        if getattr(type(owner), "forward", None) is not nn.Sequential.forward:  # which calls no function
            kinds |= dict.fromkeys(joined.FUNCTIONS, "activation")
        if not any({*pair} <= {*kinds.values()} for pair in _JOINED):
            continue
        # An fx.GraphModule gives its class another forward when it is copied or compiled again.
        if isinstance(owner, fx.GraphModule) or "forward" in vars(owner) or not (pairs := _proven(owner, kinds)):
            continue
        try:
            give_class(owner, owner_class(type(owner)), report)
        except Exception:  # it has this class already, or a metaclass or `__setattr__` of the user's refuses in any way
            continue
        for (one, *_, other), _ in pairs:
            taken, layer = (one, other) if kinds[one] == "pad" else (other, one)
            module: Any = {**joined.FUNCTIONS, **owner._modules}[taken]
            if type(module) in (*ACTIVATIONS, *PADS):
                give_class(module, accelerated_class(type(module)), report)
            full = f"{name}.{layer}".strip(".")
            if full in report.replaced:
                report.replaced[full] += f", with {module}"
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


def give_class(module: nn.Module, after: type, report: Report) -> None:
    """Give a module another class, until the report is restored; Python or the module may refuse with any error."""
    before, module.__class__ = type(module), after
    report._undo.append(partial(restore_class, module, before, after))


class _Tracer(fx.Tracer):
    """Sees which modules and functions a forward calls with what, and nothing inside the modules."""

    def __init__(self, functions: tuple[Any, ...]) -> None:
        # Not `math`, which would be another one for everybody meanwhile: also for Dynamo, if it is imported then.
        super().__init__(autowrap_modules=(), autowrap_functions=functions)  # pyright: ignore[reportArgumentType]
        self.called: _Called = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        given, frame = super().create_proxy(kind, target, *args, **kwargs), sys._getframe(1)
        if (name := _name(given.node)) is not None:
            while frame.f_globals.get("__name__", "").startswith(_BETWEEN) and frame.f_back:
                frame = frame.f_back
            self.called[given.node] = name, frame.f_code, joined.place_of(frame)
        return given


#: The modules of torch whose functions lie between a function that is traced and the tracer.
_BETWEEN = ("torch.fx.", "torch.overrides", "torch.nn.functional")


def _name(node: fx.Node) -> str | None:
    """A call's name among those of the modules; None of one that is not joined with any."""
    if node.op == "call_module":
        return str(node.target)
    return "" if node.target is nn.functional.batch_norm else joined.NAMES.get(node.target)


def _proven(owner: nn.Module, kinds: dict[str, str]) -> list[_Pair]:
    """The pairs that follow one another in training and in evaluation, with no other user between."""
    with warnings.catch_warnings(), no_number_drawn(torch.device("cpu")) as drawn:
        warnings.simplefilter("ignore")
        try:
            found = _pairs(*_graph(owner, True), kinds)
            found = found and [pair for pair in _pairs(*_graph(owner, False), kinds) if pair in found]
        except Exception:  # whatever a forward raises where there are no values: nothing is proven
            return []
        if drawn():  # another time it may call something else
            return []
    return found


def _graph(owner: nn.Module, mode: bool) -> tuple[fx.Graph, _Called]:
    """What the forward calls, and where: traced through functions, unless they need values or sizes of tensors."""
    opaque: tuple[Any, ...] = ()
    while True:
        twin = copy.deepcopy(owner, {id(t): t for t in _not_copied(owner)})  # a forward may change its modules
        for module in twin.modules():
            module.training = mode
        try:
            tracer = _Tracer(opaque)
            return tracer.trace(twin), tracer.called
        except Exception as error:
            known = inspect.unwrap(type(twin).forward).__globals__.values()
            named = {f.__code__: f for f in known if isinstance(f, FunctionType)}
            codes = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
            failed = next((named[code] for code in codes if code in named), None)
            if failed is None or failed in opaque:
                raise
            opaque += (failed,)


def _not_copied(owner: nn.Module) -> Iterator[Tensor]:
    """The parameters of a module, for their size, and the tensors in it that cannot be copied."""
    for module in owner.modules():
        for t in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(t, nn.Parameter) or (isinstance(t, Tensor) and (nn.parameter.is_lazy(t) or not t.is_leaf)):
                yield t


def _pairs(graph: fx.Graph, called: _Called, kinds: dict[str, str]) -> list[_Pair]:
    times = Counter(name for name, *_ in called.values())
    given = {node.target for node in graph.nodes if node.op == "get_attr"}  # to a function, which may call it
    pairs: list[_Pair] = []
    for node, (one, code, place) in called.items():
        names, _, places = zip(*(called[n] for n in _chain(node, called, kinds)), strict=True)
        if (
            (kinds.get(one), kinds.get(names[-1])) in _JOINED
            and times[one] == 1
            and not given & {one, ""}
            and _always_follows(code, places, names[-1])
        ):
            pairs.append((names, place))
    return pairs


def _chain(node: fx.Node, called: _Called, kinds: dict[str, str]) -> list[fx.Node]:
    """A call, the identities that get its result one after the other, and the call behind them, all in one function."""
    chain = [node]
    while len(chain) == 1 or kinds.get(called[chain[-1]][0]) == "identity":
        user = next(iter(chain[-1].users), None)
        if user not in called or called[user][1] is not called[node][1] or {*user.kwargs} - {"inplace"}:
            break
        chain.append(user)
    return chain


def _always_follows(code: CodeType, places: tuple[joined.Place, ...], name: str) -> bool:
    """Whether a function that calls at one place next calls at the others, unless the module of this name is None.

    And whether what the first call gives is read nowhere else. A branch between them may go another way another time; a
    function that is called there, or an attribute or a list that the result is put into, may show it to someone.
    """
    if code is nn.Sequential.forward.__code__:
        return True
    steps, tested = [*dis.get_instructions(code)], None
    # The place of a call of a function in Python is behind the instruction itself, in its cache.
    at, *between, last = [max(s.offset for s in steps if s.offset <= called_at) for *_, called_at in places]
    reads: dict[str, int] = {}  # how often a variable was read since something was stored there
    for i, step in enumerate(steps):
        if step.offset <= at:
            continue
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
