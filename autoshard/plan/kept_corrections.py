"""Corrections of kernels that are kept between searches, in a folder of the user's: what was compiled once makes later first plans better.

There is a file for each device and version of its compiler, since another version makes other kernels. Writers take turns by a lock and
replace a file as a whole, so that readers always find a complete one. The oldest corrections go where there are more than `MOST`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on this system
    fcntl = None

from autoshard.cluster import Cluster
from autoshard.compilers.corrections import NO_CORRECTIONS, Corrections
from autoshard.errors import ClusterError
from autoshard.verify import COMPILERS, compiled_topology

VARIABLE = "AUTOSHARD_CORRECTIONS"
"""The environment variable that names another folder; ``off`` keeps and uses none, and no compiler is asked that was not asked for."""
SCHEMA = 2
MOST = 10_000  # about 2 MB


def kept_corrections(cluster: Cluster) -> tuple[Corrections, tuple[str, ...]]:
    """What is known of the kernels of a cluster's compiler, and notes on what could not be read."""
    path = _path(cluster)
    if path is None:
        return NO_CORRECTIONS, ()
    try:
        found = path.stat()
        return _corrections(path, (found.st_ino, found.st_mtime_ns, found.st_size)), ()
    except FileNotFoundError:
        return NO_CORRECTIONS, ()
    except (OSError, ValueError) as error:
        return NO_CORRECTIONS, (f"corrections of kernels in {path} are left aside: {error}",)


@lru_cache(maxsize=4)
def _corrections(path: Path, state: tuple[int, ...]) -> Corrections:
    """The corrections of a file in a state of it: each variant of a program asks for them, and writers replace the file as a whole."""
    return Corrections(_read(path))


def keep_corrections(cluster: Cluster, corrections: Corrections) -> tuple[str, ...]:
    """Adds corrections to those that are kept; gives a note where that is not possible. A file that cannot be read is put aside."""
    path = _path(cluster)
    if path is None or not corrections:
        return ()
    try:
        with _locked(path):
            try:
                known = _read(path)
            except FileNotFoundError:
                known = {}
            except ValueError:
                known = {}
                path.replace(path.with_suffix(".unread"))
            latest = {key: seconds for key, seconds in known.items() if key not in corrections.seconds} | dict(corrections.seconds)
            some = dict([*latest.items()][-MOST:])
            beside = path.with_suffix(f".{os.getpid()}")
            beside.write_text(json.dumps({"schema": SCHEMA, "seconds": some}))
            beside.replace(path)
    except OSError as error:
        return (f"corrections of kernels are not kept in {path}: {error}",)
    return ()


def is_switched_off() -> bool:
    """Whether searches are to learn nothing of compilers by themselves."""
    return os.environ.get(VARIABLE, "").lower() in ("off", "0")


def _path(cluster: Cluster) -> Path | None:
    """The file of a cluster's device and compiler; None where none is kept: it is switched off, or no compiler estimates cycles."""
    if is_switched_off():
        return None
    given = os.environ.get(VARIABLE, "")
    try:
        compiler = COMPILERS[compiled_topology(cluster).platform]
    except ClusterError:
        return None
    if not compiler.counts_cycles or not compiler.installed or not compiler.version:
        return None
    with suppress(RuntimeError):  # there is no home
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = Path(given) if given else cache / "autoshard"
        return folder / f"kernels-{_plain(cluster.device.name)}-{_plain(compiler.version)}.json"
    return None


def _plain(name: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", name)


def _read(path: Path) -> dict[str, float]:
    """The seconds of a file by the keys of kernels.

    Raises:
        FileNotFoundError: there is none.
        OSError, ValueError: it cannot be read, or is none of this version.
    """
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ValueError(f"a file of corrections has schema {SCHEMA}, and this one has not")
    seconds = found.get("seconds")
    if not isinstance(seconds, dict) or not all(isinstance(each, int | float) and math.isfinite(each) for each in seconds.values()):
        raise ValueError("a file of corrections has seconds by kernel, and this one has something else")
    return {key: float(each) for key, each in seconds.items()}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The only writer of a file, where the system has such locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
