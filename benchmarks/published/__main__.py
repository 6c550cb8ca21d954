"""Do published training runs take as long as predicted, and are the faster of two plans predicted faster?

``--fit`` fits the figures of a family of chips to half of its runs, and judges them on the other half (`benchmarks.published.fit`).

``python -m benchmarks.published`` evaluates the plans of `runs.csv` (Megatron-LM, MegaScale, Megatron-Bridge, torchtitan, llm-foundry,
MaxText and its recipes), each with its source, and prints predicted beside measured; ``--family h100`` or ``--rows "MPT 7B" torchtitan``
some of them. A plan's shardings, stages, microbatches and recomputation are given, what it leaves open is chosen best, and the model is
rebuilt with the kernels of its framework. Pipelines take most of the time; what was found by the same code is kept in ``build/``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from autoshard.cli.terminal import show
from benchmarks.progress import progress_bar
from benchmarks.published import fit
from benchmarks.published.board import Cache, Row, report, row
from benchmarks.published.runs import Run, read

SUMMARY = "Do published training runs take as long as predicted?"


def chosen(runs: Sequence[Run], families: Sequence[str], words: Sequence[str]) -> list[Run]:
    """The runs of some families with some words in their release or plan; without either all of them."""
    return [
        run
        for run in runs
        if (not families or run.family in families) and (not words or any(word in f"{run.release}: {run}" for word in words))
    ]


def predicted_rows(runs: Sequence[Run], cache: Cache | None, quiet: bool = False) -> list[Row]:
    """The rows of some runs, with a bar; Ctrl-C ends with those that are there."""
    rows: list[Row] = []
    with progress_bar(quiet) as progress:
        task = progress.add_task("", total=len(runs))
        try:
            for run in runs:
                progress.update(task, description=f"{run.model}, {run.devices} {run.chip}")
                rows.append(row(run, cache))
                progress.advance(task)
        except KeyboardInterrupt:
            print(f"interrupted after {len(rows)} of {len(runs)} runs", file=sys.stderr)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluates and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=SUMMARY)
    parser.add_argument("--family", nargs="+", default=[], metavar="CHIP", help="chips of the catalogue only, such as h100")
    parser.add_argument("--rows", nargs="+", default=[], metavar="WORDS", help="runs only with one of these in their release or plan")
    parser.add_argument("--fit", action="store_true", help="fit the chips' figures to half of their runs, and judge them on the other half")
    parser.add_argument("--fresh", action="store_true", help="find all figures again")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(argv)
    runs = chosen(read(), options.family, options.rows)
    if options.fit:
        groups = dict.fromkeys(run.family.removesuffix("-40g") for run in runs)  # both A100 are one chip
        show(fit.report([fit.fitted(name, [run for run in runs if run.family.removesuffix("-40g") == name]) for name in groups]))
        return 0
    rows = predicted_rows(runs, None if options.fresh else Cache(), options.json)
    if options.json:
        print(json.dumps([asdict(each) for each in rows], indent=1))
    else:
        show(report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
