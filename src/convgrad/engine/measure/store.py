"""The store: measurements, checks and findings of this machine, in one SQLite file for all processes.

It is a cache: whatever happens to the file, nothing here raises, nothing wrong is read (each row has a checksum), and a
process warns once at most. What cannot be written stays in memory until the process ends. Every access opens the file
anew, so that a fork, a thread, or a file that was removed needs no care. It has a rollback journal, for network folders
have no shared memory for another log. Nothing waits for the disk: a power failure at worst damages the file, which is
then started anew.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from ..._compat import loading, lock_over_forks, warn_user

_FILE = "store.sqlite3"
_LOCK = "measuring.lock"
_TABLE = "rows_1"  # a change of its columns takes the next number
_COLUMNS = "kind TEXT, key TEXT, value TEXT, checksum TEXT, PRIMARY KEY (kind, key)"
_FORGOTTEN = "what is measured is forgotten when this process ends"
#: Of errors that another process, or a folder, is the cause of: no reason to remove the file.
_NO_DAMAGE = ("lock", "readonly", "unable to open", "disk I/O", "disk is full", "out of memory", "interrupted")
_WAIT = 5.0  # seconds for another process's write, which takes a millisecond
_PAUSE = 0.01  # seconds between two tries for the lock of those that measure

#: (kind, key) -> JSON text that could not be written.
_unwritten: dict[tuple[str, str], str] = {}
#: (folder, whether for writing) that failed, and why: left alone by this process from then on.
_failed: dict[tuple[Path, bool], str] = {}
_warned = False
#: Held over each access: a child that is forked meanwhile would have locks of SQLite that no thread of it opens.
_access = lock_over_forks()


def folder() -> Path | None:
    """Return the folder: ``CONVGRAD_CACHE``, else in the user's cache folder; None if that is ``off`` or not found."""
    return _folder(os.environ.get("CONVGRAD_CACHE", ""))


@cache
def _folder(named: str) -> Path | None:
    if named.lower() == "off":
        return None
    try:
        if not named:
            with loading:
                from platformdirs import user_cache_path

            named = str(user_cache_path("convgrad", appauthor=False))
        return Path(named).expanduser().absolute()
    except (RuntimeError, OSError) as error:  # an unknown home, a working folder that was removed
        _warn(f"convgrad's store has no folder ({error}): {_FORGOTTEN}")
        return None


def read(kind: str, key: str) -> Any | None:
    """Return the value of a key, or None where there is none."""
    return items(kind, key).get(key)


def items(kind: str, *key: str) -> dict[str, Any]:
    """Return every key of a kind, or one, with its value, in the order of the keys, if it is as it was written."""
    result, where = {}, "kind = ?" + " AND key = ?" * len(key)
    for name, value, checksum in _execute(f"SELECT key, value, checksum FROM {_TABLE} WHERE {where}", kind, *key) or ():
        with suppress(AttributeError, TypeError, ValueError):  # damage turns a text into any bytes, or into a number
            if checksum.decode() == _checksum(kind, name.decode(), value):
                result[name.decode()] = json.loads(value)
    result |= {name: json.loads(text) for (of, name), text in _unwritten.copy().items() if of == kind}
    return dict(sorted(result.items()))


def write(kind: str, key: str, value: Any) -> None:
    """Store a value that JSON can say, but None, under a key of its kind, in place of an older one."""
    text = json.dumps(value)
    row = (kind, key, text, _checksum(kind, key, text.encode()))
    if _execute(f"INSERT OR REPLACE INTO {_TABLE} VALUES (?, ?, ?, ?)", *row, writes=True) is None:
        _unwritten[kind, key] = text
    else:
        _unwritten.pop((kind, key), None)


def unwritten(kind: str) -> int:
    """Return the number of values of a kind that could not be written and end with this process."""
    return sum(of == kind for of, _ in _unwritten.copy())


def obstacle() -> str:
    """Return why nothing can be written, tried out, without a warning; empty where it can be or the store is off."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _execute(f"DELETE FROM {_TABLE} WHERE 0", writes=True)
    return next((why for (where, writes), why in _failed.items() if writes and where == folder()), "")


def forget(kind: str) -> bool:
    """Remove every value of a kind; return whether that could be done. Where there is none no file is made."""
    for key in [key for key in _unwritten.copy() if key[0] == kind]:
        del _unwritten[key]
    return not items(kind) or _execute(f"DELETE FROM {_TABLE} WHERE kind = ?", kind, writes=True) is not None


@contextmanager
def alone(wait: float = 0.0) -> Iterator[bool]:
    """Whether no other process (or thread) that shares the folder is inside such a block; waits for them, so long.

    The system opens the lock when a process ends, however it ends. A child that is forked inside such a block can get
    it later; it never could get SQLite's. Where there are no locks (Windows, some network folders) all are alone.
    """
    with ExitStack() as stack:
        free, end = True, time.monotonic() + wait
        with suppress(ImportError, OSError):
            with loading:
                import fcntl

            if (where := folder()) is not None:
                where.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(open(where / _LOCK, "ab"))
                while not (free := _locked(lock)) and time.monotonic() < end:
                    time.sleep(_PAUSE)
                stack.callback(fcntl.flock, lock, fcntl.LOCK_UN)  # a child of a fork still has the file open
        yield free
    if wait:
        time.sleep(2 * _PAUSE)  # or others that wait would never have their turn


def _locked(file: IO[bytes]) -> bool:
    """Lock a file unless another one has, and return whether it is locked."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _checksum(kind: str, key: str, value: bytes) -> str:
    return blake2b(b"\0".join((kind.encode(), key.encode(), value)), digest_size=16).hexdigest()


def _execute(statement: str, *arguments: str, writes: bool = False) -> list[Any] | None:
    """Return the rows that a statement yields; None where the file is not there or cannot be used."""
    where, damaged = folder(), False
    if where is None or (where, writes) in _failed:
        return None
    file = where / _FILE
    with _access:
        try:
            import sqlite3

            if writes:
                where.mkdir(parents=True, exist_ok=True)
            while writes or file.exists():
                try:
                    with closing(sqlite3.connect(file, timeout=_WAIT, isolation_level=None)) as connection:
                        connection.text_factory = bytes  # damaged text need not be UTF-8
                        if writes:
                            connection.execute("PRAGMA synchronous = OFF")
                            connection.execute(f"CREATE TABLE IF NOT EXISTS {_TABLE} ({_COLUMNS})")
                        return connection.execute(statement, arguments).fetchall()
                except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the latter of damaged names
                    if "no such table" in str(error):  # another version's file, without rows of ours
                        return []
                    if damaged or any(words in str(error) for words in _NO_DAMAGE):
                        raise
                    damaged = True
                    for name in (file, Path(f"{file}-journal")):
                        name.unlink(missing_ok=True)
                    _warn(f"convgrad's store {file} is damaged ({error}) and is started anew")
        except Exception as error:  # of SQLite, of the file; or a Python without SQLite
            _failed[where, writes] = str(error)
            lost = _FORGOTTEN if writes else "what was measured cannot be read"
            _warn(f"convgrad's store {where} cannot be used ({error}): {lost}")
    return None


def _warn(message: str) -> None:
    global _warned  # noqa: PLW0603
    if not _warned:
        _warned = True
        warn_user(message, RuntimeWarning)
