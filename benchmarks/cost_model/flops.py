"""Are the flops those of the compiled module?

Predicted floating point operations of matrix products and convolutions on one device, next to those that the compiled module multiplies:
its dots and convolutions times their loops' trips, padding and holes left out. What XLA itself computes again to save memory stands apart.
"""

from __future__ import annotations

from autoshard.render import Paragraph, Table, format_flops
from autoshard.search.searcher import Progress
from autoshard.verify import dot_flops
from benchmarks.cost_model.compiled import cases, compiled, n_cases
from benchmarks.cost_model.findings import Findings, Target

WITHIN = 0.01


def run(quick: bool, progress: Progress) -> Findings:
    """Every case's flops, predicted and compiled."""
    rows, numbers, refused = [], [], []
    for number, case in enumerate(cases(quick)):
        progress(case.title, number / n_cases(quick))
        ahead = compiled(case)
        if not ahead.fits:
            refused.append(case.title)
            continue
        found = dot_flops(ahead.hlo)
        predicted, actual = case.strategy.cost.flops, found.total - found.rematerialised
        error = predicted / actual - 1
        rows.append(
            (case.cluster, case.model, case.how, *map(format_flops, (predicted, actual, found.rematerialised)), f"{100 * error:+.2f} %")
        )
        numbers.append({"case": case.title, "predicted": predicted, "compiled": actual, "again": found.rematerialised, "error": error})
    worst = max((abs(one["error"]) for one in numbers), default=0.0)
    columns = ("cluster", "model", "strategy", ">predicted", ">compiled", ">computed again", ">error")
    parts = (Table(columns, tuple(rows)), *(Paragraph(f"Refused, for want of memory: {title}.") for title in refused))
    target = Target("largest error, %", "<= 1", 100 * worst, worst <= WITHIN)
    return Findings("flops of products on one device", parts, (target,), {"cases": numbers, "refused": refused})
