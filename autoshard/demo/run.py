"""The demo of one program: search, training on one device and on eight, and comparison."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from flax import nnx

import autoshard
from autoshard.ask.strategy import Strategy
from autoshard.demo.programs import Program
from autoshard.explanation.explain import argument_parts, side_by_side
from autoshard.explanation.explain import summary as strategy_summary
from autoshard.render import Heading, Paragraph, Report, Table, format_bytes, format_count, format_seconds
from autoshard.verify import Row, collectives_of
from autoshard.verify import compare as compare_collectives

CLUSTER = "cpu:8"
SEARCHERS = ("auto", "data_parallel", "fully_sharded")  # the strategy that runs, and its baselines
TOLERANCE = 1e-4  # relative difference of losses: sums in another order, grown over a few dozen AdamW steps
TABLE_ROWS = 8

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Training:
    """The loss of every step, and the median seconds of one, without those that compile."""

    losses: tuple[float, ...]
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a demo.

    Attributes:
        program: the program.
        strategies: by searcher; the first is the one that ran.
        sharded, reference: the training on all devices, and on one.
        collectives: predicted, and in the compiled module.
    """

    program: Program
    strategies: dict[str, Strategy]
    sharded: Training
    reference: Training
    collectives: tuple[Row, ...]

    @property
    def strategy(self) -> Strategy:
        """The strategy that ran."""
        return self.strategies[SEARCHERS[0]]

    @property
    def difference(self) -> float:
        """The largest relative difference between the two loss curves."""
        return float(np.max([_relative(a, b) for a, b in zip(self.sharded.losses, self.reference.losses, strict=True)]))  # nan stays nan

    @property
    def agrees(self) -> bool:
        """Whether the losses are equal up to `TOLERANCE`; false where one is not a number."""
        return self.difference <= TOLERANCE


def search(program: Program, searcher: str, progress: Progress) -> Strategy:
    """The strategy that a searcher finds for a program, its mesh included."""
    return autoshard.search(program.train_step, *program.arguments(), cluster=CLUSTER, searcher=searcher, progress=progress)


def train(program: Program, steps: int, progress: Progress) -> Outcome:
    """Searches, then trains with the same data on one device and on all."""
    strategies = {searcher: search(program, searcher, progress) for searcher in SEARCHERS}
    strategy = strategies[SEARCHERS[0]]
    batches = list(program.batches(steps))
    progress(f"{program.name}: first parameters", 0.0)
    init, step = nnx.jit(program.init), strategy.apply(program.train_step)
    reference = _run(nnx.jit(program.train_step), init(), batches, f"{program.name} on 1 device", progress)
    state = strategy.shard(*init())
    sharded = _run(step, state, batches, f"{program.name} on {strategy.record.mesh.size} devices", progress)
    module = step.lower(*state, *batches[0]).compile().as_text() or ""
    collectives = compare_collectives(strategy.cost.collectives, collectives_of(module, strategy.record.mesh))
    return Outcome(program, strategies, sharded, reference, collectives)


def _run(step: Callable, state: tuple, batches: Sequence[tuple], activity: str, progress: Progress) -> Training:
    """Trains the model and the optimizer of a state, one step a batch."""
    losses, seconds = [], []
    for number, batch in enumerate(batches):
        progress(activity, number / len(batches))
        started = time.perf_counter()
        losses.append(float(step(*state, *batch)))
        seconds.append(time.perf_counter() - started)
    return Training(tuple(losses), statistics.median(seconds[2:] or seconds))


# -- report ---------------------------------------------------------------------------------------------------------------


def report(outcome: Outcome) -> Report:
    """The outcome as a report."""
    records = {name: strategy.record for name, strategy in outcome.strategies.items()}
    found = outcome.strategy.record
    parts = (
        Heading(f"Predicted for {CLUSTER}"),
        *side_by_side(records).parts,
        Heading(f"The sharding found: mesh {found.mesh}"),
        *argument_parts(found)[1:],
        *_loss_parts(outcome),
        *_collective_parts(outcome),
        Heading("Measured, for information"),
        Paragraph(
            f"{format_seconds(outcome.sharded.step_seconds)} a step on {found.mesh.size} virtual devices, "
            f"{format_seconds(outcome.reference.step_seconds)} on one device; virtual devices share this machine's cores."
        ),
    )
    return Report(outcome.program.title, parts)


def _loss_parts(outcome: Outcome) -> tuple:
    one, eight = outcome.reference.losses, outcome.sharded.losses
    shown = sorted({round(i * (len(one) - 1) / (TABLE_ROWS - 1)) for i in range(TABLE_ROWS)})
    rows = tuple((f"{i + 1}", f"{one[i]:.6f}", f"{eight[i]:.6f}", f"{_relative(eight[i], one[i]):.1e}") for i in shown)
    verdict = "agree" if outcome.agrees else "DISAGREE"
    note = f"The curves {verdict}: over {len(one)} steps they differ by {outcome.difference:.1e} at most, and {TOLERANCE:.0e} is allowed."
    curves = Paragraph(f"one device    {_sparkline(one)}\n8 devices     {_sparkline(eight)}")
    return Heading("Loss"), curves, Table((">step", ">one device", ">8 devices", ">difference"), rows, (note,))


def _relative(found: float, expected: float) -> float:
    return abs(found - expected) / abs(expected) if expected else abs(found)


def _sparkline(values: Sequence[float]) -> str:
    """The curve in block characters; ``!`` for values that are not finite."""
    finite = [value for value in values if math.isfinite(value)]
    low, span = min(finite, default=0.0), max(finite, default=0.0) - min(finite, default=0.0)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (value - low) / (span or 1.0))] if math.isfinite(value) else "!" for value in values)


def _collective_parts(outcome: Outcome) -> tuple:
    rows = tuple(
        (
            row.kind,
            ", ".join(row.mesh_axes),
            format_count(row.predicted_count),
            format_bytes(row.predicted_bytes),
            format_count(row.actual_count),
            format_bytes(row.actual_bytes),
        )
        for row in outcome.collectives
    )
    if not rows:
        return Heading("Collectives a step"), Paragraph("None, predicted or compiled.")
    columns = ("kind", "axes", ">predicted", ">bytes", ">compiled", ">bytes")
    return Heading("Collectives a step, predicted and in the compiled module"), Table(columns, rows)


def summary(outcome: Outcome) -> dict[str, Any]:
    """The outcome as plain JSON values."""
    return {
        "program": outcome.program.name,
        "agrees": outcome.agrees,
        "largest_relative_difference": _number(outcome.difference),
        "losses": list(map(_number, outcome.sharded.losses)),
        "reference_losses": list(map(_number, outcome.reference.losses)),
        "step_seconds": outcome.sharded.step_seconds,
        "reference_step_seconds": outcome.reference.step_seconds,
        "strategies": {name: strategy_summary(strategy.record) for name, strategy in outcome.strategies.items()},
        "collectives": [{**asdict(row), "agrees": row.agrees} for row in outcome.collectives],
    }


def _number(x: float) -> float | None:
    """The number for JSON; None where it is not finite."""
    return x if math.isfinite(x) else None
