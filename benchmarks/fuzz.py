"""Is every random JAX program searched, lowered, equal to the unsharded run, and does it send exactly what was predicted?

``python -m benchmarks.fuzz --programs 1000 --seed 0`` writes that many programs (`tests/fuzz`) and checks each with three searchers,
a given sharding and a random legal assignment: numbers on 8 virtual CPU devices, collectives by Shardy's own passes. Workers run in
processes of their own, so that a compiler that aborts is a failure of one program. Every failure is shrunk and printed as a test
that can be pasted into ``tests/test_fuzz_regressions.py``.

With ``--padded`` programs have sizes that the devices do not divide, and all of their dimensions are padded (`autoshard.rewrite.padding`).

A program is made from ``seed`` and its number alone: ``--only 17`` repeats one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.progress import progress_bar

TESTS = Path(__file__).parents[1] / "tests"
SECONDS = 180  # a program that takes longer counts as a failure
# The code generator's optimisations take most of the time, and have no part in what is asked: partitioning comes before.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a program: None or what went wrong, and the (shrunk) program as text."""

    number: int
    failure: str | None
    text: str = ""


def program(seed: int, number: int, odd: bool):
    """The program of a seed and number."""
    from fuzz import random_program

    return random_program(random.Random(f"{seed}-{number}"), odd)


def work(seed: int, numbers: Sequence[int], shrink: bool, run: bool, padded: bool) -> None:
    """Checks programs one after the other and says so on standard output, a line of JSON each; run in a worker."""
    import jax
    from fuzz import shrunk

    for done, number in enumerate(numbers):
        found = program(seed, number, padded)
        print(json.dumps({"number": number, "start": str(found)}), flush=True)
        wrong = _failure(found, run, padded)
        if wrong is not None and shrink:
            found = shrunk(found, partial(_fails_alike, wrong, run and "collectives" not in wrong, padded, time.monotonic() + SECONDS / 2))
            wrong = _failure(found, run, padded) or wrong
        print(json.dumps({"number": number, "failure": wrong, "text": str(found)}), flush=True)
        if done % 20 == 19:
            jax.clear_caches()


def _failure(candidate: Any, run: bool, padded: bool, only: str | None = None) -> str | None:
    try:
        candidate.check(run=run, only=only, padded=padded)
    except Exception as error:  # whatever goes wrong is what is looked for
        return f"{type(error).__name__}: {error}"
    return None


def _fails_alike(wrong: str, run: bool, padded: bool, stop: float, candidate: Any) -> bool:
    """Whether a smaller program goes wrong in the same way, if there is time left to ask."""
    named = re.search(r" of (.*?): ", wrong) if wrong.startswith("Mismatch") else None
    return time.monotonic() < stop and _kind(_failure(candidate, run, padded, named and named[1]) or "") == _kind(wrong)


def _kind(failure: str) -> str:
    """What failures have in common: their first words without figures and names."""
    return re.sub(r"(: |\d|').*", "", failure.replace(": ", " ", 1))[:60]


def outcomes(seed: int, numbers: Sequence[int], shrink: bool, run: bool, padded: bool, processes: int) -> Iterator[Outcome]:
    """The outcome of every program, as workers finish them."""
    found: queue.Queue[Outcome | None] = queue.Queue()

    def share(mine: Sequence[int]) -> None:
        try:
            for outcome in _worked(seed, mine, shrink, run, padded):
                found.put(outcome)
        finally:
            found.put(None)

    shares = [numbers[k::processes] for k in range(processes)]
    for mine in shares:
        threading.Thread(target=share, args=(mine,), daemon=True).start()
    for _ in shares:
        while (outcome := found.get()) is not None:
            yield outcome


def _worked(seed: int, numbers: Sequence[int], shrink: bool, run: bool, padded: bool) -> Iterator[Outcome]:
    """The outcomes of one worker's programs, in order; a worker that dies is replaced after the program that killed it."""
    left = list(numbers)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS, "PYTHONPATH": str(TESTS)}
    while left:
        command = [sys.executable, "-m", "benchmarks.fuzz", "--worker", ",".join(map(str, left)), "--seed", str(seed)]
        command += [] if shrink else ["--no-shrink"]
        command += [] if run else ["--no-run"]
        command += ["--padded"] if padded else []
        with tempfile.TemporaryFile("w+") as complaints:
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True, env=environment) as worker:
                text = ""
                for line in _lines(worker):
                    entry = json.loads(line)
                    if "start" in entry:
                        text = entry["start"]
                    else:
                        left.remove(entry["number"])
                        yield Outcome(entry["number"], entry["failure"], entry["text"])
                worker.kill()
            complaints.seek(0)
            last = " ".join(complaints.read().split("\n")[-12:])
        if left:  # they are worked on in order
            yield Outcome(left.pop(0), f"the process died or took more than {SECONDS} s: {last[-400:]}", text)


def _lines(worker: subprocess.Popen) -> Iterator[str]:
    """The worker's lines, until it ends or is silent for too long."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    with contextlib.suppress(queue.Empty):
        while line := lines.get(timeout=SECONDS):
            yield line


def main(argv: Sequence[str] | None = None) -> int:
    """Checks programs and prints the failures; 1 where there are any."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first (default 0)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of the one program to check")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many at once (default: one a core)")
    parser.add_argument("--no-shrink", action="store_true", help="print failing programs as they are")
    parser.add_argument("--no-run", action="store_true", help="compare collectives alone, which takes a fraction of the time")
    parser.add_argument("--padded", action="store_true", help="odd sizes, padded so that eight devices divide them")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    shrink, run = not options.no_shrink, not options.no_run
    if options.worker:
        work(options.seed, [int(number) for number in options.worker.split(",")], shrink, run, options.padded)
        return 0
    numbers = [options.only] if options.only is not None else range(options.first, options.first + options.programs)
    failures: list[Outcome] = []
    with progress_bar() as progress:
        task = progress.add_task("programs", total=len(numbers))
        for outcome in outcomes(options.seed, numbers, shrink, run, options.padded, options.processes):
            if outcome.failure is not None:
                failures.append(outcome)
                print(f"# program {outcome.number} of seed {options.seed}: {outcome.failure}\n{outcome.text}\n", flush=True)
            progress.update(task, advance=1, description=f"programs, {len(failures)} failed" if failures else "programs")
    kinds = Counter(_kind(str(outcome.failure)) for outcome in failures)
    print(f"{len(numbers)} programs, {len(failures)} failed")
    for kind, count in kinds.most_common():
        print(f"{count:6} {kind}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
