"""Does a strategy do exactly the communication it says, and how many sharding constraints does that take?

``python -m benchmarks.exactness`` searches every program of the tests with every searcher on three meshes of 8 devices, and holds each
strategy against Shardy's explicit collectives (a minute). Links are taken to be fast, so that even toy programs are sharded.

``--compile`` holds programs of mixed precision (`benchmarks.exact_programs`: fifty, in every form) under four searchers, the mesh free and
given, against what XLA:TPU (v5e and v5p), XLA:GPU (H100) and XLA:CPU make of them: bytes of collectives within 3 % and FLOPs within 1 % in
all of them, peaks within 10 % in nine of ten. What differs is printed with its collectives, that only one side has, and their source
lines. TPUs' and GPUs' compilers run ahead of time, without a device; one that is not installed is skipped. All of it takes hours:
``--quick`` has a dozen programs, ``--outside`` those of kinds that no model has (`benchmarks.outside`), and with ``--keep FOLDER``
a run goes on where one stopped. For the CPU a GPT train step that is sharded
by hand is set next to the same as a strategy, too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from autoshard.cli.terminal import show
from autoshard.demo.devices import virtual_devices
from autoshard.errors import AutoshardError
from autoshard.render import Heading, Paragraph, Part, Report, Table, format_bytes, format_count, format_percent
from benchmarks import exact_compiled
from benchmarks.exact_programs import PROGRAMS, QUICK
from benchmarks.outside import OUTSIDE
from benchmarks.progress import progress_bar

SUMMARY = "Does a strategy do exactly the communication it says, and how many sharding constraints does that take?"
DEVICES = 8  # virtual ones of the CPU

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))


def measure(pair) -> dict:
    """One pair's figures."""
    (shardy,) = pair.verified("shardy")
    return {
        "pair": str(pair),
        "collectives": sum(row.predicted_count for row in shardy.rows),
        "bytes": sum(row.predicted_bytes for row in shardy.rows),
        "ops": shardy.n_ops,
        "constraints": shardy.n_constraints,
        "exact": shardy.exact,
        "bytes_ratio": shardy.bytes_ratio,
        "differences": [
            f"{row.kind} over {', '.join(row.mesh_axes)}: {row.predicted_count} predicted, {row.actual_count} found"
            for row in shardy.rows
            if not row.agrees
        ],
    }


def hand_sharded() -> Report:
    """The compiled GPT step: jitted with Megatron's argument shardings, and as a strategy with the same."""
    from exactness import EMBEDDINGS, by_hand_and_by_strategy

    rows = []
    for embedding, spec in EMBEDDINGS.items():
        for how, found in zip(("by hand", "as a strategy"), by_hand_and_by_strategy(spec, n_layers=2), strict=True):
            sent = format_bytes(sum(found.sent_bytes.values()))
            counts = map(format_count, (found.fusions, found.instructions))
            rows.append((embedding, how, *counts, format_bytes(found.temporary_bytes), format_bytes(found.reused_bytes), sent))
    columns = ("embedding", "sharded", ">fusions", ">instructions", ">temporaries", ">reused by donation", ">sent")
    return Report("A GPT train step of 2 layers, compiled by XLA:CPU", (Table(columns, tuple(rows)),))


def report(samples: Sequence[dict]) -> Report:
    """A line for each pair, the totals, and every difference."""
    rows = tuple(
        (
            sample["pair"],
            format_count(sample["collectives"]),
            format_bytes(sample["bytes"]),
            "exact" if sample["exact"] else f"{format_percent(sample['bytes_ratio'])} of the bytes",
            format_count(sample["constraints"]),
            f"{sample['constraints'] / max(sample['ops'], 1):.2f}",
        )
        for sample in samples
    )
    columns = ("program, searcher, mesh", ">collectives", ">bytes", "shardy", ">constraints", ">an op")
    exact = sum(sample["exact"] for sample in samples)
    worst = max((abs(sample["bytes_ratio"] - 1.0) for sample in samples), default=0.0)
    parts: list[Part] = [
        Table(columns, rows),
        Heading("In all"),
        Paragraph(f"shardy: {exact} of {len(samples)} exact; at most {format_percent(worst)} of the bytes off."),
        *(Paragraph(f"  {sample['pair']}: {difference}") for sample in samples for difference in sample["differences"]),
    ]
    ops, constraints = (sum(sample[key] for sample in samples) for key in ("ops", "constraints"))
    each = f"{constraints / max(ops, 1):.2f}"
    parts.append(Paragraph(f"{format_count(constraints)} constraints on {format_count(ops)} operations, {each} each."))
    return Report("Predicted collectives held against the partitioner", tuple(parts))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; 1 where the partitioner differs anywhere, or a goal of what is compiled is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactness", description=SUMMARY)
    names = {"metavar": "NAME,...", "type": lambda text: tuple(text.split(","))}
    parser.add_argument("--programs", **names, help="some programs only")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--compile", action="store_true", help="hold programs of mixed precision against compilers; what follows is for it")
    parser.add_argument("--targets", **names, help=f"clusters; {', '.join(exact_compiled.TARGETS)} unless given")
    parser.add_argument("--searchers", **names, help=f"some of {', '.join(exact_compiled.SEARCHERS)}")
    parser.add_argument("--quick", action="store_true", help=f"{len(QUICK)} programs, meshes free only: minutes a target")
    parser.add_argument("--outside", action="store_true", help=f"{len(OUTSIDE)} programs of other kinds, meshes free only")
    parser.add_argument("--keep", metavar="FOLDER", help="keep what compilers said there, and read it instead of compiling again")
    parser.add_argument("--memory", type=float, default=24.0, metavar="GB", help="address space this process may use (default 24)")
    options = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    virtual_devices(DEVICES)
    if options.compile:
        return _compiled(parser, options)
    from exactness import pairs

    chosen = [pair for pair in pairs() if options.programs is None or pair.program in options.programs]
    _check(parser, "programs", options.programs, {pair.program for pair in pairs()})
    samples = []
    with progress_bar(options.json) as progress:
        task = progress.add_task("", total=len(chosen))
        for pair in chosen:
            progress.update(task, description=str(pair))
            samples.append(measure(pair))
            progress.advance(task)
    if options.json:
        print(json.dumps(samples, indent=1))
    else:
        show(report(samples))
    return 0 if all(sample["exact"] for sample in samples) else 1


def _check(parser: argparse.ArgumentParser, which: str, given: Sequence[str] | None, known: Collection[str]) -> None:
    if unknown := set(given or ()) - set(known):
        parser.error(f"{which} are of {', '.join(known)}; got {', '.join(sorted(unknown))}")


def _compiled(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Compiles, prints, and tells whether every goal is reached."""
    known = tuple(OUTSIDE if options.outside else PROGRAMS)
    _check(parser, "programs", options.programs, known)
    _check(parser, "searchers", options.searchers, exact_compiled.SEARCHERS)
    try:
        lacking = {target: exact_compiled.lacking(target) for target in options.targets or exact_compiled.TARGETS}
    except AutoshardError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends it sees what is done
    resource.setrlimit(resource.RLIMIT_AS, (limit := int(options.memory * 1e9), limit))
    skipped = [f"{target}, {words}" for target, words in lacking.items() if words]
    targets = [target for target, words in lacking.items() if not words]
    programs = options.programs or (QUICK if options.quick and not options.outside else known)
    chosen = exact_compiled.cases(targets, programs, options.searchers or exact_compiled.SEARCHERS, options.quick or options.outside)
    outcomes: list[exact_compiled.Outcome] = []
    with tempfile.TemporaryDirectory() as folder, progress_bar(options.json) as progress:
        os.environ["AUTOSHARD_BENCHMARK_KEEP"] = options.keep or folder
        task = progress.add_task("", total=len(chosen))
        try:
            for case in chosen:
                progress.update(task, description=str(case))
                outcomes.append(exact_compiled.measure(case))
                progress.advance(task)
        except KeyboardInterrupt:  # what is done is shown, and --keep has it
            print(f"interrupted after {len(outcomes)} of {len(chosen)} cases", file=sys.stderr)
    goals = exact_compiled.goals(outcomes)
    if options.json:
        print(json.dumps(exact_compiled.to_json(outcomes, skipped), indent=1))
    else:
        show(exact_compiled.report(outcomes, skipped))
        if not (options.quick or options.outside or options.programs) and any(target.startswith("cpu") for target in targets):
            show(hand_sharded())
    return int(not goals or any(not goal.reached for _, goal in goals))


if __name__ == "__main__":
    sys.exit(main())
