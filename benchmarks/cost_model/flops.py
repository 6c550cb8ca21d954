"""Are the flops those of the compiled module?

Predicted floating point operations of matrix products and convolutions on one device, next to those that the compiled module multiplies:
its dots and convolutions times their loops' trips, padding and holes left out. What XLA itself computes again to save memory stands apart.
"""

from __future__ import annotations

from autoshard.progress import Progress
from autoshard.render import Paragraph, Table, format_flops
from benchmarks.cost_model.compared import compared
from benchmarks.cost_model.compiled import cases, compiled, n_cases
from benchmarks.cost_model.findings import Findings, Target
from benchmarks.unseen_models import UNSEEN

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
        found = compared(case.strategy, ahead)
        predicted, actual, again, error = found.predicted_flops, found.compiled_flops, found.flops.rematerialised, found.flops_error
        rows.append((case.cluster, case.model, case.how, *map(format_flops, (predicted, actual, again)), f"{100 * error:+.2f} %"))
        numbers.append({"case": case.title, "unseen": case.model in UNSEEN, "predicted": predicted, "compiled": actual})
        numbers[-1] |= {"again": again, "error": error}
    columns = ("cluster", "model", "strategy", ">predicted", ">compiled", ">computed again", ">error")
    parts = (Table(columns, tuple(rows)), *(Paragraph(f"Refused, for want of memory: {title}.") for title in refused))
    worst = {unseen: max((abs(one["error"]) for one in numbers if one["unseen"] == unseen), default=0.0) for unseen in (False, True)}
    targets = (
        Target("largest error, %", "<= 1", 100 * worst[False], worst[False] <= WITHIN),
        Target("largest error of models that nothing was designed on, %", "<= 1", 100 * worst[True], worst[True] <= WITHIN),
    )
    return Findings("flops of products on one device", parts, targets[: 1 if quick else 2], {"cases": numbers, "refused": refused})
