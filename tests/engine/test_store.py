"""The store: whatever happens to its file, nothing raises, nothing wrong is read, and a process warns once at most."""

import errno
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

from convgrad.engine import store

FILE = "store.sqlite3"
ROWS = {f"g1mb{i}ic3": {"backend": f"b{i}", "ratio": i / 7, "text": "x" * (i * 13 % 400)} for i in range(60)}

#: The module by itself, in a process that need not wait for PyTorch.
ALONE = f"""
import importlib.util, sys, threading, types, warnings
for name in ("convgrad", "convgrad.engine", "convgrad.engine.measure", "convgrad._compat"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["convgrad._compat"].warn_user = warnings.warn
sys.modules["convgrad._compat"].lock_over_forks = threading.RLock
sys.modules["convgrad._compat"].loading = threading.RLock()
spec = importlib.util.spec_from_file_location("convgrad.engine.measure.store", {store.__file__!r})
store = importlib.util.module_from_spec(spec)
spec.loader.exec_module(store)
"""

#: Writes one known value after the other, as fast as it can; says when it has begun.
WRITER = f"""{ALONE}
import itertools
first = int(sys.argv[1])
for i in itertools.count(first):
    store.write("n", f"key {{i % 50}}", {{"i": i, "again": str(i) * 30}})
    if i == first:
        print("begun", flush=True)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVGRAD_CACHE", str(tmp_path))
    for name, state in (("_unwritten", {}), ("_failed", {}), ("_warned", False)):
        monkeypatch.setattr(store, name, state)
    return tmp_path


@pytest.fixture
def filled(folder):
    for key, value in ROWS.items():
        store.write("choice", key, value)
    return (folder / FILE).read_bytes()


def another_process(code: str, *args: str, **env: str) -> str:
    """What a process prints that raises nothing and warns of nothing."""
    command = [sys.executable, "-W", "error", "-c", ALONE + code, *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | env)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@contextmanager
def one_warning(match: str) -> Iterator[None]:
    """Exactly one warning in this block, and of this text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [(w.category, w.filename) for w in caught] == [(RuntimeWarning, __file__)]
    assert re.search(match, str(caught[0].message))


def read_all() -> None:
    """Every row is as it was written, or gone; reading, listing and one more write neither raise nor warn twice."""
    store._failed.clear()
    store._unwritten.clear()
    store._warned = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key in (*ROWS, "never written"):
            assert store.read("choice", key) in (None, ROWS.get(key))
        assert store.items("choice").items() <= ROWS.items()
        store.write("choice", "new", [1])
        assert store.read("choice", "new") == [1]
    assert len(caught) <= 1


def test_a_value_is_there_for_another_process(folder):
    store.write("choice", "a key", {"x": [1, 2.5, "ü", None, True]})
    assert json.loads(another_process("import json; print(json.dumps(store.read('choice', 'a key')))")) == {
        "x": [1, 2.5, "ü", None, True]
    }
    another_process("store.write('choice', 'a key', 7); store.write('verified', 'a key', 8)")
    assert store.obstacle() == ""
    assert (store.read("choice", "a key"), store.items("verified")) == (7, {"a key": 8})


def test_kinds_are_apart_and_forgotten_apart():
    store.write("choice", "k", 1)
    store.write("defect", "k", 2)
    store.write("defect", "j", 3)
    assert store.items("defect") == {"j": 3, "k": 2}
    assert store.forget("defect")
    assert (store.items("defect"), store.items("choice")) == ({}, {"k": 1})
    assert store.forget("defect")  # of none


def test_reading_alone_makes_no_file(folder):
    assert store.read("choice", "k") is None
    assert store.items("choice") == {}
    assert list(folder.iterdir()) == []


def test_off_keeps_values_in_this_process_alone(folder, monkeypatch):
    monkeypatch.setenv("CONVGRAD_CACHE", "Off")
    store.write("choice", "k", 1)
    assert (store.read("choice", "k"), store.items("choice")) == (1, {"k": 1})
    assert another_process("print(store.folder(), store.read('choice', 'k'))") == "None None\n"
    monkeypatch.setenv("CONVGRAD_CACHE", str(folder))
    store.write("choice", "k", 2)
    assert (store.read("choice", "k"), store.unwritten("choice")) == (2, 0)
    assert store.forget("choice")
    assert store.read("choice", "k") is None


def test_without_the_variable_it_is_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("CONVGRAD_CACHE")
    home = {"HOME": str(tmp_path), "USERPROFILE": str(tmp_path), "LOCALAPPDATA": str(tmp_path), "XDG_CACHE_HOME": ""}
    printed = another_process("print(store.folder())", **home)
    assert printed.startswith(str(tmp_path))
    assert "convgrad" in printed


def test_a_relative_folder_stays_where_it_was_first_named(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CONVGRAD_CACHE", "beside")
    store.write("choice", "k", 1)
    monkeypatch.chdir(folder.parent)
    assert store.read("choice", "k") == 1
    assert (folder / "beside" / FILE).is_file()


def test_nothing_is_imported_before_it_is_needed():
    code = "print([m for m in ('sqlite3', 'platformdirs') if m in sys.modules])"
    assert another_process(code) == "[]\n"


# ---- damage --------------------------------------------------------------------------------------


def test_truncation_at_any_byte(folder, filled):
    assert store.items("choice") == ROWS
    cuts = {*range(0, len(filled), 331), *range(0, len(filled), 4096), *range(0, 120, 9)}
    for cut in sorted(cuts):
        (folder / FILE).write_bytes(filled[:cut])
        read_all()


def test_bytes_turned_over(folder, filled):
    chance = random.Random(0)
    for _ in range(60):
        damaged = bytearray(filled)
        for _ in range(chance.choice((1, 1, 20))):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        (folder / FILE).write_bytes(damaged)
        read_all()


def test_a_value_changed_by_hand_is_not_believed(folder, filled):
    with sqlite3.connect(folder / FILE) as connection:
        table = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchone()[0]
        connection.execute(f"UPDATE {table} SET value = '{{\"backend\": \"evil\"}}' WHERE key = 'g1mb3ic3'")
        connection.execute(f"UPDATE {table} SET key = 'moved' WHERE key = 'g1mb4ic3'")
        connection.execute(f"UPDATE {table} SET value = 5, checksum = 6 WHERE key = 'g1mb5ic3'")
        connection.execute(f"UPDATE {table} SET kind = 'defect' WHERE key = 'g1mb6ic3'")
    connection.close()
    kept = {key: value for key, value in ROWS.items() if key not in [f"g1mb{i}ic3" for i in range(3, 7)]}
    assert store.items("choice") == kept
    assert (store.read("choice", "moved"), store.items("defect")) == (None, {})


def test_a_damaged_file_is_started_anew_with_one_warning(folder, filled):
    (folder / FILE).write_bytes(b"this is no database" * 1000)
    with one_warning(r"store.*damaged.*started anew"):
        assert store.read("choice", "g1mb3ic3") is None
        (folder / FILE).write_bytes(b"nor is this" * 1000)
        store.write("choice", "k", 1)
    assert another_process("print(store.items('choice'))") == "{'k': 1}\n"


def test_older_and_newer_layouts_of_the_rows_stay_beside_ours(folder):
    with sqlite3.connect(folder / FILE) as connection:
        connection.execute("CREATE TABLE rows_0 (key TEXT, answer BLOB)")
        connection.execute("CREATE TABLE rows_2 (kind INT, hash BLOB)")
        connection.execute("INSERT INTO rows_0 VALUES ('k', 'older')")
    assert store.read("choice", "k") is None
    store.write("choice", "k", 1)
    assert store.read("choice", "k") == 1
    assert connection.execute("SELECT answer FROM rows_0").fetchone() == ("older",)
    connection.close()


def format_of_a_later_sqlite(file: Path) -> None:
    """Of the schema: https://www.sqlite.org/fileformat.html, bytes 44 to 47 of the header."""
    data = bytearray(file.read_bytes())
    data[47] = 9
    file.write_bytes(data)


def columns_that_are_not_ours(file: Path) -> None:
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(f"DROP TABLE {store._TABLE}; CREATE TABLE {store._TABLE} (other TEXT)")


def names_that_are_no_text(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"checksum TEXT", b"\xff\xfecksum TEXT"))


@pytest.mark.parametrize("damage", [format_of_a_later_sqlite, columns_that_are_not_ours, names_that_are_no_text])
def test_damage_that_is_not_called_so_is_mended_too(folder, filled, damage):
    damage(folder / FILE)
    with one_warning(r"store.*damaged.*started anew"):
        assert store.read("choice", "g1mb3ic3") is None
        store.write("choice", "k", 1)
    assert another_process("print(store.items('choice'))") == "{'k': 1}\n"


# ---- a file that cannot be written, or not now -----------------------------------------------------


@pytest.fixture
def read_only(monkeypatch):
    """A folder with one value that nobody may change; processes of root give their rights up (`unprivileged`)."""
    if os.name != "posix":
        pytest.skip("rights are another thing here")
    with tempfile.TemporaryDirectory() as folder:  # the folders above pytest's are closed to other users
        monkeypatch.setenv("CONVGRAD_CACHE", folder)
        store.write("choice", "k", 1)
        Path(folder, FILE).chmod(0o444)
        Path(folder).chmod(0o555)
        yield
        Path(folder).chmod(0o755)


def unprivileged(code: str) -> str:
    """What a process prints that has no more rights than any user, and how often it warned."""
    alone = """
import os, platformdirs, sqlite3, warnings
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
"""
    return another_process(f"{alone}    {code}\nprint(len(caught))")


def test_a_read_only_folder_is_read(read_only):
    assert unprivileged("print(store.read('choice', 'k'), store.items('choice'))") == "1 {'k': 1}\n0\n"


def test_a_read_only_folder_keeps_values_in_memory_and_warns_once(read_only):
    code = "store.write('choice', 'k', 2); store.write('choice', 'j', 3); print(store.items('choice'))"
    assert unprivileged(code) == "{'j': 3, 'k': 2}\n1\n"
    assert store.items("choice") == {"k": 1}


def test_a_damaged_file_in_a_read_only_folder(read_only):
    file = store.folder() / FILE
    file.chmod(0o644)
    file.write_bytes(b"this is no database" * 1000)
    said = unprivileged("print(store.read('choice', 'k')); print(caught[0].message)")
    assert re.fullmatch(r"None\nconvgrad's store .* cannot be used \(.*Permission denied.*\n1\n", said)


def test_what_keeps_it_from_being_written_is_said_without_a_warning(read_only):
    assert unprivileged("print(store.obstacle())") == "attempt to write a readonly database\n0\n"
    assert store.obstacle() == "" or os.geteuid() != 0


def test_a_folder_that_cannot_be_made(folder, monkeypatch):
    (folder / "file").write_text("no folder")
    monkeypatch.setenv("CONVGRAD_CACHE", str(folder / "file" / "below"))
    with one_warning("convgrad's store .*below cannot be used"):
        assert store.read("choice", "k") is None
        store.write("choice", "k", 1)
        store.write("choice", "j", 2)
        store.write("defect", "i", 3)
        assert store.items("choice") == {"j": 2, "k": 1}
        assert (store.unwritten("choice"), store.forget("choice"), store.items("choice")) == (2, True, {})
        assert store.items("defect") == {"i": 3}


@pytest.mark.parametrize(("named", "why"), [("~nobody-of-this-name/x", "home directory"), ("beside", "No such file")])
@pytest.mark.skipif(os.name != "posix", reason="a working folder cannot be removed here")
def test_a_folder_that_cannot_be_found(tmp_path, monkeypatch, named, why):
    store._folder.cache_clear()
    monkeypatch.setenv("CONVGRAD_CACHE", named)
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    with one_warning(f"convgrad's store has no folder .*{why}"):
        assert store.folder() is None
        store.write("choice", "k", 1)
        assert (store.read("choice", "k"), store.obstacle()) == (1, "")


@pytest.mark.skipif(sys.platform == "win32", reason="there are no limits on a process's files")
def test_a_full_disk(folder):
    """The limit on a file's size fails a write as a full disk does: after some of it was written."""
    store.write("choice", "before", 1)
    size = (folder / FILE).stat().st_size
    code = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({size + 5000}, {size + 5000}))
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for i in range(50):
        store.write("choice", f"k{{i}}", "x" * 500)
    print(len(store.items("choice")), store.read("choice", "k49") == "x" * 500, len(caught))
"""
    assert another_process(code) == "51 True 1\n"
    assert store.read("choice", "before") == 1
    assert all(value in (1, "x" * 500) for value in store.items("choice").values())
    store.write("choice", "after", 2)
    assert store.read("choice", "after") == 2


def test_a_lock_that_is_never_released(folder, monkeypatch):
    monkeypatch.setattr(store, "_WAIT", 0.05)
    store.write("choice", "k", 1)
    holder = sqlite3.connect(folder / FILE, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with one_warning("locked"):
        assert store.read("choice", "k") is None
        store.write("choice", "k", 2)
        start = time.perf_counter()
        for _ in range(100):
            assert store.read("choice", "k") == 2
            store.read("choice", "another")
    assert time.perf_counter() - start < 5  # it does not wait 200 times
    holder.close()


# ---- many processes --------------------------------------------------------------------------------


def test_many_processes_write_at_once(folder):
    code = """
for i in range(40):
    store.write("n", f"{sys.argv[1]} {i}", [int(sys.argv[1]), i])
    store.write("n", "shared", {"who": sys.argv[1]})
"""
    command = [sys.executable, "-W", "error", "-c", ALONE + code]
    writers = [subprocess.Popen([*command, str(n)], stderr=subprocess.PIPE, text=True) for n in range(4)]
    assert [(w.communicate()[1], w.returncode) for w in writers] == [("", 0)] * 4
    found = store.items("n")
    assert found.pop("shared") in [{"who": str(n)} for n in range(4)]
    assert found == {f"{n} {i}": [n, i] for n in range(4) for i in range(40)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_who_waits_to_be_alone_has_a_turn():
    ended = Event()

    def again_and_again() -> None:
        while not ended.is_set():
            with store.alone(10.0):
                time.sleep(0.05)

    other = Thread(target=again_and_again)
    other.start()
    try:
        for _ in range(3):
            with store.alone(0.5) as alone:
                assert alone
    finally:
        ended.set()
        other.join()


def test_one_is_alone_in_a_new_folder_and_everybody_where_there_are_no_locks(folder, monkeypatch):
    start = time.perf_counter()
    monkeypatch.setenv("CONVGRAD_CACHE", str(folder / "new"))
    with store.alone() as first, store.alone() as second:
        assert (first, second) == (True, False)
    assert time.perf_counter() - start < 4  # it does not wait, as SQLite would for 5 seconds, unless it is told to
    fcntl = pytest.importorskip("fcntl")

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with store.alone() as first, store.alone() as second:
        assert (first, second) == (True, True)


def test_a_child_that_is_forked_inside_is_alone_once_its_parent_has_left():
    read, write = os.pipe()
    with store.alone() as alone:
        assert alone
        child = os.fork()
        if child == 0:
            with store.alone() as first:
                os.write(write, b"!")
            with store.alone(5.0) as second:
                os._exit((first, second) != (False, True))
        os.read(read, 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_writes_as_its_parent_does():
    store.write("n", "parent", 1)
    child = os.fork()
    if child == 0:
        store.write("n", "child", 2)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert store.items("n") == {"child": 2, "parent": 1}


@pytest.mark.parametrize("times", [6, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal here")
def test_writers_that_are_killed(times):
    chance = random.Random(times)
    for n in range(times):
        writer = subprocess.Popen([sys.executable, "-W", "error", "-c", WRITER, str(n * 10**6)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"begun\n"
        time.sleep(chance.uniform(0, 0.05))
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        found = store.items("n")  # a warning would be an error
        assert found
        for key, value in found.items():
            assert key == f"key {value['i'] % 50}"
            assert value["again"] == str(value["i"]) * 30
        store.write("n", "key 0", {"i": 0, "again": "0" * 30})
        assert store.read("n", "key 0") == {"i": 0, "again": "0" * 30}
