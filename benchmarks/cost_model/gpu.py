"""What does XLA:GPU make of the programs whose memory is predicted? Compiled ahead of time for eight and sixteen H100, without one.

Collectives by bytes, flops of products, and peak memory of programs of a gigabyte and more. How values lie in memory was learned from
data-parallel and fully sharded programs of the first half; the others were measured. Workspaces of cuDNN's algorithms, which a GPU would
choose, are not in it.
"""

from __future__ import annotations

from dataclasses import asdict

from autoshard.progress import Progress
from autoshard.render import Table, format_bytes
from benchmarks.cost_model.compared import compared
from benchmarks.cost_model.compiled import compiled
from benchmarks.cost_model.findings import Findings, Target
from benchmarks.cost_model.memory import DESIGNED, HOW, SMALLEST_BYTES, UNSEEN, Program, cases, targets_of

CLUSTERS = {"v5e:2x4": "h100:8x1", "v5e:4x4": "h100:8x2"}
BYTES_WITHIN, FLOPS_WITHIN = 0.03, 0.01


def run(quick: bool, progress: Progress) -> Findings:
    """Every program's collectives, flops and peak, predicted and compiled."""
    groups = {"designed on": _on_gpus(DESIGNED), "unseen": _on_gpus(UNSEEN)}
    groups = {group: programs[:2] if quick else programs for group, programs in groups.items()}
    total, done = len(HOW) * sum(map(len, groups.values())), 0
    rows, numbers = [], []
    for group, programs in groups.items():
        for case in cases(programs):
            progress(case.title, done / total)
            done += 1
            one = compared(case.strategy, compiled(case))
            large = (one.peak_bytes or 0.0) >= SMALLEST_BYTES
            found = {"bytes": one.bytes_error, "flops": one.flops_error, "peak": one.peak_error if large else None}
            numbers.append({"case": case.title, "group": group, **found, "rows": [*map(asdict, one.rows)]})
            sizes = (format_bytes(one.predicted_peak_bytes), format_bytes(one.peak_bytes or 0.0))
            rows.append((group, case.title, *sizes, *("" if error is None else f"{100 * error:+.2f} %" for error in found.values())))
    columns = ("", "program", ">peak predicted", ">compiled", ">collectives", ">flops", ">peak")
    return Findings("programs on GPUs", (Table(columns, tuple(rows)),), _targets(numbers), {"cases": numbers})


def _on_gpus(programs: tuple[Program, ...]) -> tuple[Program, ...]:
    return tuple((name, make, CLUSTERS[cluster], mesh) for name, make, cluster, mesh in programs)


def _targets(numbers: list[dict]) -> tuple[Target, ...]:
    within = [abs(one["bytes"]) <= BYTES_WITHIN for one in numbers]
    worst = max((abs(one["flops"]) for one in numbers), default=0.0)
    share = 100 * sum(within) / max(len(within), 1)
    found = [
        Target("programs whose collectives' bytes are within 3 %, in %", "100", share, all(within)),
        Target("largest error of flops, %", "<= 1", 100 * worst, worst <= FLOPS_WITHIN),
    ]
    for group in dict.fromkeys(one["group"] for one in numbers):
        found += targets_of(group, [one["peak"] for one in numbers if one["group"] == group and one["peak"] is not None])
    return tuple(found)
