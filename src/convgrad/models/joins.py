"""Which layers of a model may be computed together: the result of one goes to the other, and nowhere else."""

from __future__ import annotations

import copy
import dis
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

_Pair = tuple[str, str, joined.Place]
#: A module's call -> the function that calls it, and where.
_Called = dict[fx.Node, tuple[CodeType, joined.Place]]

#: Kinds of layers that may be computed together, in the order of the calls.
_JOINED = {("norm", "activation"), ("pad", "convolution")}


def join_layers(model: nn.Module, report: Report) -> None:
    """Let a batch normalization compute the activation behind it, and a convolution the padding in front of it.

    Only where tracing proves that nothing else uses what lies between the two.
    """
    parents = Counter(id(child) for module in model.modules() for child in module._modules.values())
    for name, owner in [*model.named_modules()]:
        kinds = {k: kind for k, child in owner._modules.items() if (kind := _kind(child, parents[id(child)] == 1))}
        if not any({*pair} <= {*kinds.values()} for pair in _JOINED):
            continue
        if "forward" in vars(owner) or "_convgrad_pairs" in vars(owner):
            continue
        if not (pairs := _proven(owner, kinds)):
            continue
        try:
            give_class(owner, owner_class(type(owner)), report)
        except Exception:  # a metaclass or `__setattr__` of the user's may refuse in any way
            continue
        for one, other, _ in pairs:
            taken, layer = (one, other) if kinds[one] == "pad" else (other, one)
            module: Any = owner._modules[taken]
            if type(module) in (*ACTIVATIONS, *PADS):
                give_class(module, accelerated_class(type(module)), report)
            full = f"{name}.{layer}".lstrip(".")
            if full in report.replaced:
                report.replaced[full] += f", with {module}"
        vars(owner)["_convgrad_pairs"] = tuple(pairs)
        report._undo.append(partial(vars(owner).pop, "_convgrad_pairs"))


def _kind(module: Any, once: bool) -> str | None:
    """What a module may be joined as; ``once``: nothing else of the model has it as a child."""
    if type(module) in (*ACTIVATIONS, *ACTIVATIONS.values()):
        return "activation" if "forward" not in vars(module) else None
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
    """Sees which modules a forward calls with what, and nothing inside them."""

    def __init__(self, functions: tuple[Any, ...]) -> None:
        # Not `math`, which would be another one for everybody meanwhile: also for Dynamo, if it is imported then.
        super().__init__(autowrap_modules=(), autowrap_functions=functions)  # pyright: ignore[reportArgumentType]
        self.called: _Called = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        given, frame = super().call_module(m, forward, args, kwargs), sys._getframe(1)
        while frame.f_globals.get("__name__") == fx.Tracer.__module__ and frame.f_back:
            frame = frame.f_back
        self.called[given.node] = frame.f_code, joined.place_of(frame)
        return given


def _proven(owner: nn.Module, kinds: dict[str, str]) -> list[_Pair]:
    """The pairs that follow one another in training and in evaluation, with no other user between."""
    if isinstance(owner, (fx.GraphModule, torch.jit.ScriptModule)):
        return []
    with warnings.catch_warnings(), no_number_drawn(torch.device("cpu")) as drawn:
        warnings.simplefilter("ignore")
        try:
            found = [_pairs(*_graph(owner, mode), kinds) for mode in (True, False)]
        except Exception:  # whatever a forward raises where there are no values: nothing is proven
            return []
        if drawn():  # another time it may call something else
            return []
    return [pair for pair in found[0] if pair in found[1]]


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
            named = {f.__code__: f for f in type(twin).forward.__globals__.values() if isinstance(f, FunctionType)}
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
    places = Counter(called.values())
    calls = [node for node in graph.nodes if node.op == "call_module"]
    times = Counter(node.target for node in calls)
    given = {node.target for node in graph.nodes if node.op == "get_attr"}  # to a function, which may call it
    return [
        (node.target, user.target, called[node][1])
        for node in calls
        if times[node.target] == 1 and len(node.users) == 1 and not given & {node.target, ""}
        for user in node.users
        if user in calls
        and (kinds.get(node.target), kind := kinds.get(user.target)) in _JOINED
        # The padding's input may be changed in place between two calls that do not follow one another.
        and (kind == "activation" or (user is node.next and times[user.target] == 1 and user.target not in given))
        and user.args == (node,)
        and not user.kwargs
        and (called[node][0] is nn.Sequential.forward.__code__ or places[called[node]] == places[called[user]] == 1)
        and _always_follows(*called[node], called[user], user.target)
    ]


def _always_follows(code: CodeType, place: joined.Place, then: tuple[CodeType, joined.Place], name: str) -> bool:
    """Whether a function that calls at one place next calls at the other, unless the module of this name is None.

    And whether what the first call gives is read nowhere else. A branch between them may go another way another time; a
    function that is called there, or an attribute or a list that the result is put into, may show it to someone.
    """
    if code is nn.Sequential.forward.__code__:
        return then[0] is code
    if then[0] is not code:
        return False
    at, tested, steps = place[2] + 1, None, [*dis.get_instructions(code)]
    names: set[str] = set()
    passed: set[int] = set()
    for i, step in enumerate(steps):
        if step.offset < at:
            continue
        passed.add(step.offset)
        if step.offset == then[1][2]:
            return not _reads_later(steps[i + 1 :], [s for s in steps if s.offset not in passed], names)
        names |= _variables("STORE", step)
        if step.opname == "JUMP_FORWARD":
            at = step.argval
        elif step.opname in _OF_A_TEST:
            continue
        elif not step.opname.startswith(_HARMLESS) and ("JUMP" not in step.opname or tested != ("LOAD_ATTR", name)):
            return False
        else:
            tested = step.opname, step.argval
    return False


#: Instructions that give what they have to nobody, and behind which nothing else may come.
_HARMLESS = ("LOAD_", "STORE_FAST", "PUSH_NULL", "PRECALL", "NOP")
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
