"""Are the collectives those of the compiled module?

Predicted bytes of all collectives on one device, next to those in the compiled module, loop trips counted; and by kind and mesh axes where
the two differ. Bytes are the larger of operand and result of each execution.
"""

from __future__ import annotations

from dataclasses import asdict

from autoshard.progress import Progress
from autoshard.render import Heading, Paragraph, Part, Table, format_bytes, format_count
from benchmarks.cost_model.compared import compared
from benchmarks.cost_model.compiled import cases, compiled, n_cases
from benchmarks.cost_model.findings import Findings, Target
from benchmarks.unseen_models import UNSEEN

WITHIN = 0.03
SETS = (("cases", False), ("cases of models that nothing was designed on,", True))


def run(quick: bool, progress: Progress) -> Findings:
    """Every case's collectives, predicted and compiled."""
    rows, differing, numbers, refused = [], [], [], []
    for number, case in enumerate(cases(quick)):
        progress(case.title, number / n_cases(quick))
        ahead = compiled(case)
        if not ahead.fits:
            refused.append(case.title)
            continue
        found = compared(case.strategy, ahead)
        predicted, actual, error = found.predicted_bytes, found.compiled_bytes, found.bytes_error
        rows.append((case.cluster, case.model, case.how, format_bytes(predicted), format_bytes(actual), f"{100 * error:+.2f} %"))
        differing += [
            (case.title, row.kind, ", ".join(row.mesh_axes), format_count(row.predicted_count), format_count(row.actual_count))
            + (format_bytes(row.predicted_bytes), format_bytes(row.actual_bytes))
            for row in found.rows
            if abs(row.predicted_bytes - row.actual_bytes) > WITHIN * actual
        ]
        numbers.append(
            {
                "case": case.title,
                "unseen": case.model in UNSEEN,
                "predicted": predicted,
                "compiled": actual,
                "error": error,
                "rows": [*map(asdict, found.rows)],
            }
        )
    columns = ("cluster", "model", "strategy", ">predicted", ">compiled", ">error")
    parts: list[Part] = [Table(columns, tuple(rows))]
    if differing:
        columns = ("case", "kind", "mesh axes", ">predicted", ">compiled", ">predicted bytes", ">compiled bytes")
        parts += [Heading("Where more than 3 % of a module's bytes differ"), Table(columns, tuple(differing))]
    parts += [Paragraph(f"Refused, for want of memory: {title}.") for title in refused]
    targets = tuple(
        _target(name, [abs(one["error"]) <= WITHIN for one in numbers if one["unseen"] == unseen])
        for name, unseen in SETS
        if not (quick and unseen)
    )
    return Findings("bytes of collectives on one device", tuple(parts), targets, {"cases": numbers, "refused": refused})


def _target(name: str, within: list[bool]) -> Target:
    share = sum(within) / len(within) if within else 0.0
    return Target(f"{name} whose bytes are within 3 %, in %", "100", 100 * share, share == 1.0)
