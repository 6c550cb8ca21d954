"""Does a strategy do exactly the communication it says, and how many sharding constraints does that take?

``python -m benchmarks.exactness`` searches every program of the tests with every searcher on three meshes of 8 devices, and holds each
strategy against Shardy's explicit collectives (a minute). ``--compile`` compiles each for 8 virtual CPU devices as well and
compares what XLA made of it (a quarter of an hour), and sets a GPT train step that is sharded by hand next to the same as a strategy.
Links are taken to be fast, so that even toy programs are sharded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from autoshard.cli.terminal import show
from autoshard.demo.devices import virtual_devices
from autoshard.render import Heading, Paragraph, Part, Report, Table, format_bytes, format_count, format_percent
from benchmarks.progress import progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))


def measure(pair, targets: Sequence[str]) -> dict:
    """One pair's figures per target."""
    found = dict(zip(targets, pair.verified(*targets), strict=True))
    shardy = found["shardy"]
    return {
        "pair": str(pair),
        "collectives": sum(row.predicted_count for row in shardy.rows),
        "bytes": sum(row.predicted_bytes for row in shardy.rows),
        "ops": shardy.n_ops,
        "constraints": shardy.n_constraints,
        "exact": {target: verification.exact for target, verification in found.items()},
        "bytes_ratio": {target: verification.bytes_ratio for target, verification in found.items()},
        "differences": {
            target: [f"{row.kind} over {', '.join(row.mesh_axes)}: {row.predicted_count} predicted, {row.actual_count} found"
                     for row in verification.rows if not row.agrees]
            for target, verification in found.items()
        },
    }  # fmt: skip


def hand_sharded() -> list[Part]:
    """A table of the compiled GPT step: jitted with Megatron's argument shardings, and as a strategy with the same."""
    from exactness import EMBEDDINGS, by_hand_and_by_strategy

    rows = []
    for embedding, spec in EMBEDDINGS.items():
        for how, found in zip(("by hand", "as a strategy"), by_hand_and_by_strategy(spec, n_layers=2), strict=True):
            sent = format_bytes(sum(found.sent_bytes.values()))
            counts = map(format_count, (found.fusions, found.instructions))
            rows.append((embedding, how, *counts, format_bytes(found.temporary_bytes), format_bytes(found.reused_bytes), sent))
    columns = ("embedding", "sharded", ">fusions", ">instructions", ">temporaries", ">reused by donation", ">sent")
    return [Heading("A GPT train step of 2 layers, compiled by XLA:CPU"), Table(columns, tuple(rows))]


def report(samples: Sequence[dict], targets: Sequence[str], by_hand: Sequence[Part]) -> Report:
    """A line for each pair, the totals, and every difference."""

    def verdict(sample: dict, target: str) -> str:
        return "exact" if sample["exact"][target] else f"{format_percent(sample['bytes_ratio'][target])} of the bytes"

    rows = tuple(
        (
            sample["pair"],
            format_count(sample["collectives"]),
            format_bytes(sample["bytes"]),
            *(verdict(sample, target) for target in targets),
            format_count(sample["constraints"]),
            f"{sample['constraints'] / max(sample['ops'], 1):.2f}",
        )
        for sample in samples
    )
    columns = ("program, searcher, mesh", ">collectives", ">bytes", *targets, ">constraints", ">an op")
    parts: list[Part] = [Table(columns, rows), Heading("In all")]
    for target in targets:
        exact = sum(sample["exact"][target] for sample in samples)
        worst = max((abs(sample["bytes_ratio"][target] - 1.0) for sample in samples), default=0.0)
        parts.append(Paragraph(f"{target}: {exact} of {len(samples)} exact; at most {format_percent(worst)} of the bytes off."))
        for sample in samples:
            parts += [Paragraph(f"  {sample['pair']}: {difference}") for difference in sample["differences"][target]]
    ops, constraints = (sum(sample[key] for sample in samples) for key in ("ops", "constraints"))
    each = f"{constraints / max(ops, 1):.2f}"
    parts.append(Paragraph(f"{format_count(constraints)} constraints on {format_count(ops)} operations, {each} each."))
    parts += by_hand
    return Report("Predicted collectives held against the partitioner", tuple(parts))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; 1 where the partitioner differs anywhere."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactness", description=__doc__.split("\n")[0])
    parser.add_argument("--compile", action="store_true", help="compile by XLA:CPU too")
    parser.add_argument("--programs", metavar="NAME,...", help="some programs only")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    virtual_devices(8)
    from exactness import pairs

    wanted = options.programs.split(",") if options.programs else None
    chosen = [pair for pair in pairs() if wanted is None or pair.program in wanted]
    if not chosen:
        parser.error(f"programs are of {sorted({pair.program for pair in pairs()})}")
    targets = ("shardy", "cpu") if options.compile else ("shardy",)
    samples = []
    with progress_bar(options.json) as progress:
        task = progress.add_task("", total=len(chosen))
        for pair in chosen:
            progress.update(task, description=str(pair))
            samples.append(measure(pair, targets))
            progress.advance(task)
    if options.json:
        print(json.dumps(samples, indent=1))
    else:
        show(report(samples, targets, hand_sharded() if options.compile else ()))
    return 0 if all(sample["exact"]["shardy"] for sample in samples) else 1


if __name__ == "__main__":
    sys.exit(main())
