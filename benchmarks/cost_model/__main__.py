"""``python -m benchmarks.cost_model [section ...] [--quick] [--json]``: every section in a process of its own, its memory capped."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict

from autoshard.cli.terminal import show, show_json
from autoshard.render import Heading, Paragraph, Part, Report, Table
from benchmarks.cost_model import SECTIONS
from benchmarks.cost_model.findings import Findings
from benchmarks.cost_model.isolated import isolated

SUMMARY = "What real compilers and measured machines say of the cost model."
DEVICES = 16  # virtual CPU devices: as many as the largest slice that sections compile for


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the sections and prints what they found; the exit code is 1 where a target was missed or a section could not run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost_model", description=SUMMARY)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"some of {', '.join(SECTIONS)}; all unless given")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller programs: minutes instead of most of an hour")
    parser.add_argument("--memory", type=float, default=24.0, metavar="GB", help="address space that each section may use (default 24)")
    parser.add_argument("--keep", metavar="FOLDER", help="keep what compilers said there, and read it instead of compiling again")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(argv)
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"sections are {', '.join(SECTIONS)}; got {', '.join(sorted(unknown))}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}".strip()
    with tempfile.TemporaryDirectory() as folder:  # sections share what they compiled
        os.environ["AUTOSHARD_BENCHMARK_KEEP"] = options.keep or folder
        return _run([name for name in SECTIONS if name in (options.sections or SECTIONS)], options)


def _run(names: Sequence[str], options: argparse.Namespace) -> int:
    """Runs the sections one by one, and prints each as it ends."""
    found: dict[str, Findings | str] = {}
    for name in names:
        found[name] = isolated(name, options.quick, options.memory, options.json)
        if not options.json:
            show(_report(name, found[name]))
    if options.json:
        show_json({name: {"failed": one} if isinstance(one, str) else _json(one) for name, one in found.items()})
    elif len(names) > 1:
        show(_summary(found))
    return int(any(isinstance(one, str) or not all(target.reached for target in one.targets) for one in found.values()))


def _report(name: str, found: Findings | str) -> Report:
    if isinstance(found, str):
        return Report(name, (Paragraph(f"Could not run: {found}"),))
    return Report(f"{name}: {found.title}", (*found.parts, *_targets([(name, found)])))


def _summary(found: dict[str, Findings | str]) -> Report:
    reports = [(name, one) for name, one in found.items() if isinstance(one, Findings)]
    failed: list[Part] = [Paragraph(f"{name} could not run: {one}") for name, one in found.items() if isinstance(one, str)]
    return Report("All targets", (*_targets(reports), *failed))


def _targets(found: list[tuple[str, Findings]]) -> tuple[Part, ...]:
    rows = tuple((name, *target.row) for name, one in found for target in one.targets)
    return (Heading("Targets"), Table(("section", "number", "wanted", ">found", ""), rows)) if rows else ()


def _json(found: Findings) -> dict:
    return json.loads(json.dumps({"title": found.title, "targets": [asdict(one) for one in found.targets], **found.numbers}, default=float))


if __name__ == "__main__":
    sys.exit(main())
