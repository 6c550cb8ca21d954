"""Pure computations at the same time on the cores that there are: the results are those of one after the other.

Some run in forked copies of this process, which have all that was computed before, and send their results back. A copy runs numpy and
Python alone: whatever started threads in this process, as JAX does, is not called there, garbage with destructors of other libraries is not
collected, and it ends without cleaning up. So locks that a thread held at the fork are never waited for, and neither notebooks nor scripts
without a guard around their main part are run again. Where a process cannot be forked so, or may run on one core alone, tasks run here, one
after the other.
"""

from __future__ import annotations

import gc
import math
import os
import pickle
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, TypeVar

Result = TypeVar("Result")
Task = Callable[[bool], Result]
"""From whether it runs in this process, where it may report progress, to its result."""

WORTHWHILE = 0.1  # seconds of a task; a copy of a process of a gigabyte takes a third of that
PATIENCE = 20.0  # seconds in which a copy computes something, however many others do
_NUMBER = 4  # bytes of a task's number
_before: list[float] = []  # in a copy, which makes no copies of its own, what `thread_seconds` was when it was made


def cores(nbytes: int | None = None) -> int:
    """The number of cores that this process may use, of which memory is left for a process of so many bytes on each.

    Args:
        nbytes: None: processes are copies of this one, which is the first of them.
    """
    if not sys.platform.startswith("linux") or _before:
        return 1
    allowed = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/meminfo") as known, open("/proc/self/statm") as own:
            available = next(int(line.split()[1]) * 1024 for line in known if line.startswith("MemAvailable"))
            resident = int(own.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        allowed = min(allowed, available // nbytes if nbytes else 1 + available // max(resident, 1))
    return max(allowed, 1)


def thread_seconds() -> float:
    """The seconds that this thread has computed; in a copy of a process, those until it was made included."""
    return time.thread_time() + sum(_before)


def together(tasks: Sequence[Task[Result]], n_processes: int | None = None, seconds: float = math.inf) -> list[Result]:
    """The results of pure tasks, in their order; the first runs in this process.

    Args:
        tasks: whose results, and exceptions, can be pickled.
        n_processes: the most processes, this one included; None: `cores`.
        seconds: that one of them may take; what takes less than `WORTHWHILE` runs here, since copies take some time.

    Raises:
        BaseException: that of the first task that raised one.
    """
    n = 1 if seconds < WORTHWHILE else min(cores() if n_processes is None else n_processes, len(tasks))
    found: dict[int, tuple[bool, Any]] = {}
    if n > 1:
        _shared(tasks, n, found)
    results = []
    for number, task in enumerate(tasks):  # those of a copy that was killed are left
        if number not in found:
            results.append(task(True))
            continue
        is_done, result = found[number]
        if not is_done:
            raise result
        results.append(result)
    return results


def _shared(tasks: Sequence[Task], n: int, found: dict[int, tuple[bool, Any]]) -> None:
    """Runs tasks in this process and its copies, each of which takes the next one that is left."""
    queue, put = os.pipe()
    os.write(put, b"".join(number.to_bytes(_NUMBER) for number in range(1, min(len(tasks), 1 << 12))))
    os.close(put)
    copies: list[tuple[int, BinaryIO]] = []
    try:
        for _ in range(n - 1):
            with suppress(OSError):  # no more processes: fewer do
                copies.append(_copy(tasks, queue))
        _run(tasks, queue, 0, found, True)
        for process, sent in copies:
            with suppress(EOFError, pickle.UnpicklingError):
                found.update(_received(process, sent))
    except BaseException:
        for process, _ in copies:
            os.kill(process, signal.SIGKILL)
        raise
    finally:
        os.close(queue)
        for process, sent in copies:
            sent.close()
            os.waitpid(process, 0)


def _received(process: int, sent: BinaryIO) -> dict[int, tuple[bool, Any]]:
    """What a copy has found; one that computes nothing for a while is ended, since it waits for what this process alone could do."""
    computed = None
    while not select.select([sent], [], [], PATIENCE)[0]:
        before, computed = computed, _computed(process)
        if before == computed:
            os.kill(process, signal.SIGKILL)
            break
    return pickle.load(sent)


def _computed(process: int) -> list[str]:
    """The clock ticks that a process has computed, for itself and in the system."""
    with open(f"/proc/{process}/stat") as known:
        return known.read().rpartition(")")[2].split()[11:13]


def _run(tasks: Sequence[Task], queue: int, first: int | None, found: dict[int, tuple[bool, Any]], is_here: bool) -> None:
    """Runs one task after the other, as long as there is one in the queue."""
    number = first if first is not None else _next(queue)
    while number is not None:
        try:
            found[number] = True, tasks[number](is_here)
        except Exception as error:
            found[number] = False, error
        number = _next(queue)


def _next(queue: int) -> int | None:
    taken = os.read(queue, _NUMBER)
    return int.from_bytes(taken) if taken else None


def _copy(tasks: Sequence[Task], queue: int) -> tuple[int, BinaryIO]:
    """A copy of this process that runs tasks: its number, and where their results are read."""
    now, (read, write) = thread_seconds(), os.pipe()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning)  # JAX's, of threads that are not called
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # Python's, of the same
        process = os.fork()
    if process:
        os.close(write)
        return process, os.fdopen(read, "rb")
    try:
        gc.disable()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: this process's decides
        _before.append(now)
        found: dict[int, tuple[bool, Any]] = {}
        _run(tasks, queue, None, found, False)
        sent = pickle.dumps(found, pickle.HIGHEST_PROTOCOL)
        while sent:
            sent = sent[os.write(write, sent) :]
    finally:
        os._exit(0)
