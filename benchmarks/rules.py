"""How much of what may be sharded do our rules shard, next to those that Shardy gives the same operations?

``python -m benchmarks.rules`` traces JAX's own examples of its primitives and asks both for the rule of each distinct equation: ours by
primitive, Shardy's composed from what the equation lowers to (two minutes). A rule counts that is richer than "replicate everything".
Equations with nothing to shard, scalars and the like, are left out. ``--groups sort,dot_general`` asks for some groups.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from autoshard.cli.terminal import show
from autoshard.render import Heading, Report, Table, format_count, format_percent
from benchmarks.progress import progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))


@dataclass(frozen=True, slots=True)
class Share:
    """The distinct equations of a group of cases that have something to shard.

    Attributes:
        ours, theirs: how many of them have a rule of ours, and of Shardy's, by which something is sharded.
        behind: how many have only one of Shardy's.
    """

    group: str
    equations: int
    ours: int
    theirs: int
    behind: int


def shares(found: Sequence) -> list[Share]:
    """A share a group, and one of all together."""

    def share(group: str, chosen: Sequence) -> Share:
        rich = [(_rich(verdict.ours), _rich(verdict.theirs)) for verdict in chosen]
        return Share(group, len(rich), sum(a for a, _ in rich), sum(b for _, b in rich), sum(b and not a for a, b in rich))

    counted = [verdict for verdict in found if verdict.has_dims and verdict.theirs is not None]
    groups = sorted({group for verdict in counted for group in verdict.groups})
    return [*(share(group, [verdict for verdict in counted if group in verdict.groups]) for group in groups), share("all", counted)]


def _rich(rule) -> bool:
    return rule is not None and any(factor.shardable for factor in rule.factors)


def report(found: Sequence, rows: Sequence[Share]) -> Report:
    """The table of shares, and the differences by reason."""
    table = tuple(
        (
            row.group,
            format_count(row.equations),
            *(format_percent(n / max(row.equations, 1)) for n in (row.ours, row.theirs)),
            f"{row.behind}",
        )
        for row in rows
    )
    reasons = Counter(verdict.reasons[0] if verdict.reasons else "without a reason" for verdict in found if not verdict.agrees)
    parts = [Table(("group", ">equations", ">ours", ">Shardy's", ">only Shardy's"), table)]
    if reasons:
        parts += [
            Heading("Differences"),
            Table((">equations", "why ours is right"), tuple((f"{n}", words) for words, n in reasons.most_common())),
        ]
    return Report("Equations of JAX's own examples whose rule shards something", tuple(parts))


def main(argv: Sequence[str] | None = None) -> int:
    """Asks and prints."""
    from harnesses import groups
    from referee import verdicts

    parser = argparse.ArgumentParser(prog="python -m benchmarks.rules", description=__doc__.split("\n")[0])
    parser.add_argument("--groups", type=lambda text: text.split(","), metavar="A,B", help="groups of cases; all unless given")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    known = groups()
    if unknown := set(options.groups or ()) - set(known):
        parser.error(f"groups are of {', '.join(sorted(known))}; got {', '.join(sorted(unknown))}")
    found = []
    columns = (SpinnerColumn(), TextColumn("{task.completed} equations"), TimeElapsedColumn())
    with progress_bar(options.json, columns) as progress:
        task = progress.add_task("", total=None)
        for verdict in verdicts([name for group in options.groups or known for name in known[group]]):
            found.append(verdict)
            progress.advance(task)
    rows = shares(found)
    if options.json:
        differences = [{"equation": str(verdict), "reasons": verdict.reasons} for verdict in found if not verdict.agrees]
        print(json.dumps({"shares": [asdict(row) for row in rows], "differences": differences}, indent=1))
    else:
        show(report(found, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
