"""Shared by all tests: one seed a test, nothing that another test left, and few threads, for the problems are small."""

import os
import sys
import tempfile
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from convgrad._compat import anything_compiled
from convgrad.backends.native_norm import LEAST_NORM
from convgrad.check import guards
from convgrad.engine import backends, request, rules, set_default_backend, unregister
from convgrad.engine.measure import compare
from convgrad.models import trial

#: A Unix socket's address has 108 characters at most; only pytest's own folders may be deeper.
if len(tempfile.gettempdir()) > 60 and os.path.isdir("/tmp"):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

#: What is derived on any machine changes nothing: tests ask what a choice does, not which one is fast here.
rules.TABLE = {"depthwise": {"native": 4.0}, "emulated": {"native": 6.0, "aten:float32": 5.0}}
rules.gains = lambda problem, outputs: {"native": 3.0} if problem.groups > 1 else {}

# No deadline: other processes share the machine. CI repeats the same examples, so that a red run can be repeated.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="session", autouse=True)
def _own_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is read from the user's cache folder, nor written there; by processes that a test starts neither."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONVGRAD_CACHE", str(tmp_path_factory.mktemp("store")))
        yield


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """One seed a test; settings, what is compiled, the module path and the registered backends stay."""
    torch.manual_seed(0)
    settings_before, there, path = guards.settings(random=False), {*backends()}, sys.path[:]
    yield
    if anything_compiled():  # after which no normalization is deferred
        torch.compiler.reset()
    sys.path[:] = path
    guards.restore(settings_before)
    if request._default is not None:
        set_default_backend(None)
    for name in {*backends()} - there:
        unregister(name)


@pytest.fixture
def brief_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is registered is checked on what is found soon: for tests of something else than the search."""
    for name, most in (("_DRAWS", 200), ("_MOST_DRAWS", 1000)):
        monkeypatch.setattr(f"convgrad.check.problem_set.{name}", most)


@pytest.fixture
def brief_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `accelerate_` times a model in two layouts, a twentieth of the time is enough."""
    monkeypatch.setattr(trial, "compare", lambda *args, seconds, **more: compare(*args, seconds=seconds / 20, **more))


@pytest.fixture
def instant_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak speeds of this machine, which take two seconds to measure, are made up."""
    monkeypatch.setattr("convgrad.diagnostics.roofline._best", lambda call, device, seconds=0.0: 1e-3)


@pytest.fixture
def small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers are ours by rule, however few their rows are and whatever the processor is."""
    monkeypatch.setattr(rules, "mkl_at_its_best", lambda: False)
    for room in ("diagnostics.capture", "models.worth", "nn.linear"):
        monkeypatch.setattr(f"convgrad.{room}.linear_gains", lambda elements, *sizes: elements > 0)


@pytest.fixture
def nothing_compiled() -> None:
    """No test before this one compiled anything, as far as PyTorch knows."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture
def small_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels normalize small inputs, too."""
    for name in LEAST_NORM:
        monkeypatch.setitem(LEAST_NORM, name, 0)
