"""Which tests run and in which order, as a plug-in of pytest (CONTRIBUTING.md, "Tests").

    @pytest.mark.slow               is left to `make test-all`; of some cases: pytest.param(..., marks=pytest.mark.slow)
    @pytest.mark.slow(minutes=20)   the same, and how long it takes where that is over a minute
    @pytest.mark.sample(4)          of a test's cases all but 4, which are spread evenly, are marked slow
    --since REVISION                tests of files that changed since that revision of git come first, then tests of what changed and all
                                    others in turn, each from a place that HEAD gives
    --minutes N                     no test is started that cannot end within N minutes; a line at the end says how many there were
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable, Sequence
from itertools import chain, groupby, zip_longest
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
START = time.monotonic()  # of this process: a worker's own, where there are some
NOT_STARTED = "tests_not_started"


def pytest_addoption(parser):
    group = parser.getgroup("selection")
    group.addoption("--since", metavar="REVISION", help="first the tests of what has changed since this revision of git")
    group.addoption("--minutes", type=float, metavar="N", help="start no test that cannot end within N minutes")


# --- samples --------------------------------------------------------------------------------------------------------------


def spread(size: int, of: int) -> set[int]:
    """``size`` places of ``range(of)``, the first and the last among them, as evenly apart as can be."""
    size = min(size, of)
    return {round(k * (of - 1) / max(size - 1, 1)) for k in range(size)}


def mark_samples(items: Sequence[pytest.Item]) -> None:
    """Mark as slow what the tests' ``sample`` leaves out of the cases that are not marked so already."""
    cases = [item for item in items if item.get_closest_marker("sample") and not item.get_closest_marker("slow")]
    for _, group in groupby(cases, lambda item: item.nodeid.partition("[")[0]):
        of_one = list(group)
        kept = spread(of_one[0].get_closest_marker("sample").args[0], len(of_one))
        for place, item in enumerate(of_one):
            if place not in kept:
                item.add_marker(pytest.mark.slow)


# --- order ----------------------------------------------------------------------------------------------------------------


def subject(path: str) -> str:
    """The folder or module of autoshard that a file is in or tests, such as ``search``; else the folder, such as ``benchmarks``."""
    parts = Path(path).with_suffix("").parts
    inside = parts[1:] if parts[0] in ("autoshard", "tests") and len(parts) > 1 else parts
    return inside[0].removeprefix("test_")


def in_order(files: Sequence[str], changed: Iterable[str], start: int) -> list[int]:
    """The places of tests, by their files: of changed files, then of what changed and of all others in turn, file by file.

    Both begin at one of them that ``start`` gives and go round, so that each has its turn however little time there is.
    """
    changed = set(changed)
    subjects = {subject(file) for file in changed}
    rank = [0 if file in changed else 1 if subject(file) in subjects else 2 for file in files]
    first, second, others = ([place for place, each in enumerate(rank) if each == wanted] for wanted in range(3))
    by_file = ([[*group] for _, group in groupby(_round(places, start), files.__getitem__)] for places in (second, others))
    return [*first, *chain.from_iterable(chain.from_iterable(zip_longest(*by_file, fillvalue=[])))]


def _round(places: list[int], start: int) -> list[int]:
    cut = start % max(len(places), 1)
    return [*places[cut:], *places[:cut]]


def git(*words: str) -> str | None:
    """What git says, or None where there is no git, no repository or no such revision."""
    try:
        return subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def order(items: list[pytest.Item], since: str) -> None:
    """Put tests in order, in place; without git they stay as they are."""
    changed, commit = git("diff", "--name-only", since), git("rev-parse", "HEAD")
    if changed is None or commit is None:
        return
    files = [item.nodeid.partition("::")[0] for item in items]
    items[:] = [items[place] for place in in_order(files, changed.splitlines(), int(commit, 16))]


@pytest.hookimpl(tryfirst=True)  # before -m leaves out what is marked
def pytest_collection_modifyitems(config, items):
    mark_samples(items)
    if config.option.since:
        order(items, config.option.since)


# --- time -----------------------------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Pass over a test for which no time is left: true ends pytest's own work on it.

    What the test before it left for it, such as a module's fixtures, is ended as after a test.
    """
    minutes = item.config.option.minutes
    if minutes is None:
        return None
    slow = item.get_closest_marker("slow")
    needed = slow.kwargs.get("minutes", 0) if slow else 0
    if time.monotonic() - START + 60 * needed < 60 * minutes:
        return None
    count(item.config, 1)
    item.session._setupstate.teardown_exact(nextitem)
    return True


def count(config, tests: int) -> None:
    """Add to the tests that were not started, in what a worker hands back or in the only process's own configuration."""
    counts = getattr(config, "workeroutput", config.stash.setdefault(COUNTS, {}))
    counts[NOT_STARTED] = counts.get(NOT_STARTED, 0) + tests


COUNTS = pytest.StashKey[dict[str, int]]()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Collect the count of a worker of pytest-xdist."""
    count(node.config, getattr(node, "workeroutput", {}).get(NOT_STARTED, 0))


def pytest_terminal_summary(terminalreporter, config):
    if missing := config.stash.get(COUNTS, {}).get(NOT_STARTED, 0):
        limit = f"{config.option.minutes:g} minutes"
        terminalreporter.write_line(f"{missing} tests were not started: they would not have ended within {limit}.")
