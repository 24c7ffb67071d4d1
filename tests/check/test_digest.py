"""A digest changes with everything that a kernel is made of, and with nothing else."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from convgrad.check.digest import digest as fingerprint

TEXT = """
import torch
LIMIT = {limit}
def helper(x): return x * {factor}
def another(x): return -x
used = {used}
NAMES = {{"depthwise", "dense", "pointwise", "grouped"}}
class Kernel:
    def __init__(self, n): self.n = n
    def __call__(self, x, w, p): return helper(x) * self.n
def forward(x, w, p, scale={default}):
    # {comment}
    return helper(x) + another(x) if p.name in NAMES or p.batch < LIMIT else torch.relu(used(x))
"""


def digest(name: str = "forward", **changes: object) -> str:
    namespace: dict[str, object] = {"__name__": "mine"}
    values = {"limit": 3, "factor": 2, "default": 1, "comment": "none", "used": "helper", **changes}
    exec(TEXT.format(**values), namespace)
    part = namespace[name]
    return fingerprint([part(4) if isinstance(part, type) else part])


def test_what_changes_it() -> None:
    assert digest() == digest() == digest(comment="another")
    assert len({digest(), digest(limit=4), digest(factor=3), digest(default=2), digest("Kernel")}) == 5
    assert digest(used="another") != digest()  # another name of a function that is met by its own name, too
    assert digest("Kernel") == digest("Kernel") != digest("Kernel", factor=3)


def test_where_the_code_stands_changes_nothing() -> None:
    """A cell of a notebook is of another file in each session, and a line above a function moves it."""
    found = set()
    for place, text in (("/tmp/ipykernel_1/2.py", TEXT), ("/tmp/ipykernel_3/4.py", "\n\n" + TEXT)):
        namespace: dict[str, Any] = {"__name__": "mine"}
        values = {"limit": 3, "factor": 2, "default": 1, "comment": "none", "used": "helper"}
        exec(compile(text.format(**values), place, "exec"), namespace)
        found.add(fingerprint([namespace["forward"], namespace["Kernel"](4)]))
    assert len(found) == 1
    assert "" not in found


def test_modules_and_operators_that_code_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of a module of the user's is more than its name, and so is an operator of torch.library."""
    mine, part, other = (ModuleType(name) for name in ("mine", "mine.part", "mine.other"))
    for module in (mine, part):  # the third was loaded by its path
        monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(mine).update(__version__="1.0", part=part)
    vars(part).update(mine=mine, other=other)
    forward = eval("lambda x: mine.part.double(x)", {"mine": mine})
    found = set()
    for factor in (2, 3):
        exec(f"def times(x): return x * {factor}", vars(other))
        exec("def double(x): return other.times(x)", vars(part))
        found.add(fingerprint([forward]))
    assert len(found - {""}) == 2

    def operator(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    found = {fingerprint([lambda x: torch.ops.convgrad_digest.double(x) + 1])}
    torch.library.custom_op("convgrad_digest::double", operator, mutates_args=())
    assert len(found | {fingerprint([lambda x: torch.ops.convgrad_digest.double(x) + 1])} - {""}) == 2


def test_how_a_decorator_compiles() -> None:
    numba = pytest.importorskip("numba")

    def double(x):
        return x * 2

    kernels = [numba.njit(double), numba.njit(fastmath=True)(double), numba.njit(double)]
    assert "" != fingerprint([kernels[0]]) == fingerprint([kernels[2]]) != fingerprint([kernels[1]])
    kernels[0](1.0)
    assert fingerprint([kernels[0]]) == fingerprint([kernels[2]])


def test_an_object_that_calls_a_function_is_more_than_that() -> None:
    class Scaled:
        def __init__(self, fn, factor: int) -> None:
            self.fn, self.factor = fn, factor

        def __call__(self, x, w, p):
            return self.fn(x) * self.factor

    class Negated(Scaled):
        def __call__(self, x, w, p):
            return -self.fn(x)

    def double(x):
        return x * 2

    kernels = [Scaled(double, 2), Scaled(double, 3), Scaled(lambda x: x, 2), Negated(double, 2)]
    kernels += [kernels[0].__call__, kernels[1].__call__]
    assert len({fingerprint([k]) for k in kernels} - {""}) == 6
    assert fingerprint([cache(double)]) == fingerprint([cache(double)]) != fingerprint([cache(lambda x: x)])
    assert fingerprint([cache(double)])


def test_slices_and_annotations_identify() -> None:
    class Annotated:
        factor: int = 2

        def __call__(self, x, w, p):
            return x[1:3] * self.factor

    before = fingerprint([Annotated()])
    assert Annotated.__annotations__  # Python 3.14 keeps them in the class from now on
    assert "" != before == fingerprint([Annotated()])
    assert "" != fingerprint([lambda x: x[1:3]]) != fingerprint([lambda x: x[1:4]])


def test_closures_and_partials() -> None:
    def make(n: int, tensor: torch.Tensor):
        return lambda x: x * n + tensor

    zero, one = torch.zeros(3), torch.ones(3)
    assert fingerprint([make(1, zero)]) == fingerprint([make(1, zero.clone())])
    assert len({fingerprint([make(1, zero)]), fingerprint([make(2, zero)]), fingerprint([make(1, one)])}) == 3
    others = [
        (partial(max, 1), partial(max, 2)), (partial(max, key=abs), partial(max, key=len)), (((8,), 4), ((8, 4),)),
        ({"a": 1}, {"b": 1}), (zero, torch.zeros(1, 3)),
        (zero.bfloat16(), one.bfloat16()), (lambda x, *, n=1: x, lambda x, *, n=2: x),
    ]  # fmt: skip
    for one, other in others:
        assert "" != fingerprint([one]) != fingerprint([other])


def test_another_process_has_the_same() -> None:
    code = "from tests.check.test_digest import digest; print(digest(), digest('Kernel'))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert printed == [digest(), digest("Kernel")]


def test_compiled_libraries(tmp_path: Path) -> None:
    """By their bytes: of a library that ctypes loaded, of the operators of PyTorch by its version."""
    source, library = tmp_path / "a.c", tmp_path / "a.so"
    digests = []
    for value in (1, 2, 2):
        source.write_text(f"int f(void) {{ return {value}; }}")
        library.unlink(missing_ok=True)
        if subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=False).returncode:
            return  # there is no compiler
        loaded = ctypes.CDLL(str(library))
        digests.append((fingerprint([loaded]), fingerprint([loaded.f])))
    assert digests[0] != digests[1] == digests[2]
    assert "" not in digests[0]
    assert fingerprint([torch.conv2d]) != fingerprint([torch.conv1d])
    assert "" not in (fingerprint([torch.conv2d]), fingerprint([torch.ops.aten.conv2d.default]))


def test_what_nothing_identifies() -> None:
    lock = threading.Lock()
    assert fingerprint([lambda: lock]) == ""
