"""Pure tasks in copies of this process have the results of one after the other."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from autoshard import concurrency
from autoshard.concurrency import together
from autoshard.errors import InfeasibleError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="copies are made on Linux alone")


def numbered(number):
    """A task that says where it ran."""
    return lambda is_here: (number, is_here, os.getpid())


def test_results_are_in_order_whatever_process_has_them():
    """The first task runs here; the results come in the tasks' order, from a few processes that have ended."""
    found = together([numbered(k) for k in range(40)], 3)
    assert [number for number, *_ in found] == list(range(40)) and found[0][1:] == (True, os.getpid())
    assert all((process == os.getpid()) == is_here for _, is_here, process in found)
    for process in {process for _, is_here, process in found if not is_here}:  # other tests may have left children of theirs
        with pytest.raises(ChildProcessError):
            os.waitpid(process, os.WNOHANG)


def test_there_are_several_processes():
    """Tasks that wait for each other come to an end."""
    read, write = os.pipe()
    waits, wakes = lambda is_here: os.read(read, 1), lambda is_here: os.write(write, b"x") and not is_here
    assert together([waits, wakes], 2) == [b"x", True]
    os.close(read), os.close(write)


def test_any_thread_may_have_copies():
    """Not the main one alone: a copy has the thread that made it, and no other."""
    found = []
    thread = threading.Thread(target=lambda: found.extend(together([lambda is_here: 0, lambda is_here: is_here or "copied"], 2)))
    thread.start(), thread.join()
    assert found in ([0, "copied"], [0, True])


def test_what_takes_no_time_runs_here():
    """Copies take longer than it."""
    assert all(is_here for _, is_here, _ in together([numbered(k) for k in range(40)], 3, seconds=0.01))


def test_the_first_exception_is_raised():
    """An exception of a copy is that of the task, with what it knows; those of later tasks are not seen."""

    def refuse(is_here):
        raise InfeasibleError("nothing fits", 5.0, True)

    for n in (1, 2, 4):
        with pytest.raises(InfeasibleError, match="nothing fits") as raised:
            together([numbered(0), refuse, lambda is_here: 1 / 0], n)
        assert raised.value.smallest_peak_bytes == 5.0 and raised.value.proven


def test_a_copy_that_is_killed_leaves_its_tasks_to_this_process():
    """So does one whose result cannot be sent."""

    def killed(is_here):
        return is_here or os.kill(os.getpid(), signal.SIGKILL)

    assert together([numbered(0), killed, killed], 2)[1:] == [True, True]
    assert together([numbered(0), lambda is_here: (lambda: 7)], 2)[1]() == 7


def test_a_copy_that_waits_for_nothing_is_ended(monkeypatch):
    """As for a lock that nobody holds there: its task runs here."""
    monkeypatch.setattr(concurrency, "PATIENCE", 0.2)
    assert together([numbered(0), lambda is_here: is_here or time.sleep(100)], 2)[1] is True


def test_copies_make_no_copies(monkeypatch):
    """Tasks of a copy run one after the other, and so do all where one core is allowed."""
    assert together([numbered(0), lambda is_here: is_here or concurrency.cores()], 2)[1] in (True, 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    assert concurrency.cores() == 1


def test_seconds_of_a_thread_go_on_in_a_copy():
    """A clock of computed seconds does not begin anew, so that what ends a search ends it in a copy, too."""
    now = concurrency.thread_seconds()
    assert together([numbered(0), lambda is_here: is_here or concurrency.thread_seconds() >= now], 2)[1] is True


def test_scripts_need_no_guard():
    """A script without a guard around its main part runs once, beside JAX, without a warning."""
    script = (
        "import jax, os; jax.devices(); from autoshard.concurrency import together; print('once')\n"
        "assert len(together([lambda is_here: os.getpid()] * 6, 3)) == 6"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "once\n" and not done.stderr
