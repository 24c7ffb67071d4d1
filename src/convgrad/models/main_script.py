"""Run a script as the interpreter would: as ``__main__``, with its own arguments, and with the modules next to it.

`accelerating` does to the models that it trains what `accelerate_` would.
"""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from inspect import unwrap
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from weakref import WeakValueDictionary
from zipfile import is_zipfile

import torch
from torch import nn

from ..ops import exchanged
from .accelerate import accelerate_

#: Files whose frames stand above the script's in a traceback.
_STARTERS = {__file__, runpy.__file__, "<frozen runpy>"}
#: The file of the kernels that PyTorch's are exchanged for.
_KERNELS = unwrap(exchanged).__code__.co_filename


@contextmanager
def as_main(script: str, args: Sequence[str], module: bool) -> Iterator[None]:
    """Set arguments, module path and ``__main__`` in this block as the script expects them."""
    argv, path, mains = sys.argv[:], sys.path[:], {name: sys.modules[name] for name in ("__main__", "__mp_main__")}
    # A process that multiprocessing spawns or forks from a server calls the script's module so.
    sys.modules["__mp_main__"] = alias = ModuleType("__mp_main__")
    vars(alias)["__getattr__"] = lambda name: getattr(sys.modules["__main__"], name)
    sys.argv[:] = [script, *args]
    sys.path.insert(0, os.getcwd() if module else str(Path(script).resolve().parent))
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path
        sys.modules.update(mains)


def run_main(script: str, module: bool = False) -> int:
    """Run a script inside `as_main`, and return its exit status.

    That is what it gave to `sys.exit`, or 130 after an interrupt and 1 after any other exception, whose traceback is
    printed.

    Args:
        script: path of the script; with ``module`` the name of a module, as for ``python -m``.
    """
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        elif Path(script).is_dir() or script.endswith(".pyc") or is_zipfile(script):
            runpy.run_path(script, run_name="__main__")
        else:
            _run_file(os.path.abspath(script))
    except SystemExit as stop:
        return _status(stop.code)
    except BaseException as error:
        _show(error)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


@contextmanager
def accelerating() -> Iterator[list[str]]:
    """Let `accelerate_` change each model before its first training step while the block lasts; yield what it did.

    A model is a module that no other module calls, and that has a parameter to train. The list has a line for each in
    which there is a layer of a kind that convgrad computes.
    """
    said: list[str] = []
    known: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()

    def before_forward(module: nn.Module, _: object) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or known.get(id(module)) is module:
            return
        name = type(module).__name__
        try:
            if any(parameter.requires_grad for parameter in module.parameters()):
                known.update({id(one): one for one in module.modules()})
                report = accelerate_(module)
                said.extend([f"{name}: {report.summary}"] if report.decisions else [])
        except Exception as error:  # a method of the user's may raise anything
            known[id(module)] = module
            said.append(f"{name}: not accelerated: {error}")

    before_forward.reads_nothing = True  # pyright: ignore[reportFunctionMemberAccess] - a normalization may wait
    handle = nn.modules.module.register_module_forward_pre_hook(before_forward)
    try:
        yield said
    finally:
        handle.remove()


def _run_file(path: str) -> None:
    """Run a file as the interpreter does, which sets another ``sys.argv[0]``, package and loader than runpy."""
    main = ModuleType("__main__")
    main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main))


def _status(code: object) -> int:
    """Return the exit status that an argument of `sys.exit` means."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """Print the interpreter's traceback of the script: without this library's frames around it."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename in _STARTERS:
        tb = tb.tb_next
    if tb is None and isinstance(error, ImportError):  # of runpy: there is no such module
        print(f"convgrad: {error}", file=sys.stderr)
        return
    frame = tb
    while frame is not None and frame.tb_next is not None:
        files = [below.f_code.co_filename for below, _ in walk_tb(frame.tb_next)]
        if isinstance(error, KeyboardInterrupt):  # it may come anywhere below an exchanged kernel
            files = files[:1]
        if all(file == _KERNELS for file in files):
            frame.tb_next = None  # PyTorch's own error, raised within an exchanged kernel, or an interrupt
        else:
            frame = frame.tb_next
    sys.excepthook(type(error), error.with_traceback(tb), tb)
