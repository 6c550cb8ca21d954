"""Is every example that JAX has of its own primitives traced, searched, and when sharded equal to the plain function?

``python -m benchmarks.harnesses`` takes all 5,594 of them, in 132 groups. Each is searched on a mesh of virtual CPU devices whose links are
taken to be fast, and is then sharded at random twice; its results are compared with those of the plain jitted function. Worker processes
do the work, so that a compiler that ends its process is a failure of one example (`tests/harnesses.py` has the details). The table
counts for each group

- *traced*, *searched*, *equal*: the examples that got so far, of those that JAX can run;
- *by search*, *at random*: those of which any value was sharded so; the others have no dimension that 2, 3, 4, 5 or 7 devices divide and
  that their operation could split;
- *not by JAX*: those whose plain function JAX cannot run on the CPU; they are listed by name.

It takes about a quarter of an hour on two cores; ``--quick`` takes some of each group, in two minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autoshard.cli.terminal import show
from autoshard.demo.devices import virtual_devices
from autoshard.render import Heading, Paragraph, Part, Report, Table, format_count, format_seconds
from benchmarks.progress import progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

Outcome = Any  # the tests' record of one case

COLUMNS = ("group", ">cases", ">not by JAX", ">traced", ">searched", ">equal", ">by search", ">at random", ">seconds")


def row(name: str, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """A line of the table: what became of these outcomes."""
    counts = (
        len(outcomes),
        sum(outcome.status == "unsupported" for outcome in outcomes),
        sum(outcome.status not in ("unsupported", "crash", "trace") for outcome in outcomes),
        sum(outcome.status not in ("unsupported", "crash", "trace", "search") for outcome in outcomes),
        sum(outcome.status == "equal" for outcome in outcomes),
        sum("search" in outcome.sharded for outcome in outcomes),
        sum("random" in outcome.sharded for outcome in outcomes),
    )
    return (name, *map(format_count, counts), f"{sum(outcome.seconds for outcome in outcomes):.0f}")


def report(outcomes: Sequence[Outcome], seconds: float) -> Report:
    """A line for each group, the totals, what failed and what JAX cannot run."""
    groups = sorted({outcome.group for outcome in outcomes})
    rows = [row(group, [outcome for outcome in outcomes if outcome.group == group]) for group in groups]
    failed = [outcome for outcome in outcomes if outcome.failed]
    unsupported = [outcome for outcome in outcomes if outcome.status == "unsupported"]
    parts: list[Part] = [Table(COLUMNS, (*rows, row("all", outcomes)))]
    for title, chosen in (("Failed", failed), ("Not run by JAX on the CPU", unsupported)):
        if chosen:
            parts.append(Heading(f"{title}: {format_count(len(chosen))}"))
            parts += [Paragraph(f"{outcome.name}: {outcome.message}") for outcome in chosen]
    n_run = len(outcomes) - len(unsupported)
    n_crashed = sum(outcome.status == "crash" for outcome in outcomes)
    parts.append(Heading("In all"))
    parts.append(
        Paragraph(
            f"{format_count(n_run - len(failed))} of the {format_count(n_run)} cases that JAX can run are equal, "
            f"{n_crashed} ended a process; {format_seconds(seconds)}."
        )
    )
    return Report("JAX's examples of its primitives, sharded", tuple(parts))


def main(argv: Sequence[str] | None = None) -> int:
    """Sweeps and prints; 1 where any case failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harnesses", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="some cases of each group")
    parser.add_argument("--groups", metavar="NAME,...", help="some groups only")
    parser.add_argument("--random", type=int, default=2, metavar="N", help="how often each is sharded at random (default 2)")
    parser.add_argument("--padded", action="store_true", help="padded at random on one device, in place of sharded")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="workers (default 2)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    virtual_devices(8)
    from harnesses import groups, sample, sweep

    wanted = options.groups.split(",") if options.groups else list(groups())
    if not set(wanted) <= set(groups()) or options.random < 0 or options.processes < 1:
        parser.error(f"groups are of {', '.join(groups())}; there is at least one worker")
    names = [name for group in wanted for name in (sample(group) if options.quick else groups()[group])]
    outcomes: list[Outcome] = []
    started = time.perf_counter()
    with progress_bar(options.json) as progress:
        task = progress.add_task("", total=len(names))
        for batch in sweep(names, options.random, options.processes, options.padded):
            outcomes += batch
            progress.update(task, description=batch[-1].group, advance=len(batch))
    seconds = time.perf_counter() - started
    if options.json:
        print(json.dumps({"seconds": seconds, "outcomes": [asdict(outcome) | {"group": outcome.group} for outcome in outcomes]}, indent=1))
    else:
        show(report(sorted(outcomes, key=lambda outcome: outcome.name), seconds))
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
