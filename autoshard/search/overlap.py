"""Overlap of communication, decided after the search: loops that gather one trip ahead, and windowed matrix products.

Both change when data is sent and not how anything is sharded, so no table has them. Each is tried on the answer, equal ones together, and
kept where the judge predicts a shorter step within the memory limit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autoshard.analysis.partial_sums import late_sums
from autoshard.budgets import BUDGETS
from autoshard.compilers.program_facts import ProgramFacts
from autoshard.cost.prefetch import candidates, scans
from autoshard.cost.windows import Window, Windows
from autoshard.ir import Assignment
from autoshard.judge.evaluate import Judgement, evaluate
from autoshard.judge.model import CostModel

LEAST_HIDDEN = 0.5  # of a block's permute that its product takes; below it a ring of small kernels hides little of what it sends
MOST_WINDOWS = 24  # groups of equal products that are tried: those with the most seconds of permutes


def overlapped(facts: ProgramFacts, model: CostModel, judgement: Judgement, limit: float) -> Judgement:
    """The judgement of the assignment with more of its communication overlapped, where that is faster.

    Args:
        limit: the most bytes at the peak of a device; an assignment above it may keep its own peak.
    """
    return _windowed(facts, model, _gathering_ahead(facts, model, judgement, limit), limit)


def _gathering_ahead(facts: ProgramFacts, model: CostModel, judgement: Judgement, limit: float) -> Judgement:
    """The judgement with those scans gathering one trip ahead that are then predicted to be faster."""
    paths = model.reshard_paths(facts.graph.values)
    for scan in scans(facts.graph) if facts.compiler.gathers_ahead else ():
        now = judgement.assignment
        found = {each.value: each.target for each in candidates(facts.graph, facts.rules, now, scan, paths)}
        if found:
            judgement = _better(facts, model, judgement, limit, replace(now, ahead={**now.ahead, **found}))
    return judgement


def _windowed(facts: ProgramFacts, model: CostModel, judgement: Judgement, limit: float) -> Judgement:
    """The judgement with those products windowed that are then predicted to be faster: equal ones together, longest permutes first."""
    if not facts.compiler.windows:
        return judgement
    for group in sorted(_windows(facts, model, judgement.assignment), key=lambda group: -_sending(facts, model, group))[:MOST_WINDOWS]:
        now = judgement.assignment
        found = {window.op.index: window.operand for window in group if window.op.index not in now.windows}
        if found and _sending(facts, model, group) > BUDGETS.settled_gap * judgement.cost.makespan_seconds:
            judgement = _better(facts, model, judgement, limit, replace(now, windows={**now.windows, **found}))
    return judgement


def _windows(facts: ProgramFacts, model: CostModel, assignment: Assignment) -> list[list[Window]]:
    """The windows that could hide permutes which the compiler waits for, in groups of equal ones."""
    late = late_sums(facts.graph, facts.rules, assignment, facts.sums).values
    groups: dict[tuple[Any, ...], list[Window]] = {}
    for window in Windows(facts.graph, facts.rules, assignment, model.reshard_paths(facts.graph.values), facts.readers, late).all():
        step, choice = model.window_step(facts.graph.values[window.value], window), assignment.choice(window.op.index)
        hides = model.window_seconds(facts, window.op, choice, window) > LEAST_HIDDEN * step.seconds
        if hides and window.step.kind not in facts.compiler.asynchronous:  # else the compiler hides it by itself
            groups.setdefault((facts.alike[window.op.index], choice, window.operand, window.step), []).append(window)
    return list(groups.values())


def _sending(facts: ProgramFacts, model: CostModel, group: list[Window]) -> float:
    """The seconds that the permutes of a group take in a step."""
    each = model.window_step(facts.graph.values[group[0].value], group[0])
    return each.seconds * (group[0].blocks - 1) * sum(window.op.trips for window in group)


def _better(facts: ProgramFacts, model: CostModel, now: Judgement, limit: float, assignment: Assignment) -> Judgement:
    """The judgement of another assignment, if that is predicted to be faster and to fit; else the present one."""
    tried = evaluate(facts, model, assignment)
    faster = tried.cost.makespan_seconds < now.cost.makespan_seconds * (1 - BUDGETS.settled_gap)
    return tried if faster and tried.cost.peak_bytes <= max(limit, now.cost.peak_bytes) else now
