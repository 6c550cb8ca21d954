"""The search of a pipeline in one program: in several numbers of microbatches, each an ordinary search of the whole step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from autoshard.cluster import Cluster
from autoshard.errors import ClusterError, PipelineError, ShardingError
from autoshard.pipeline.schedule import ONE_PROGRAM, WEIGHTS_APART
from autoshard.plan.attempts import Attempts, Found
from autoshard.plan.microbatching import Microbatches, found_with_each
from autoshard.plan.pipelining import numbers_of_microbatches
from autoshard.progress import Progress
from autoshard.render import format_seconds
from autoshard.trace import Traced


def check_parts(cluster: Cluster, stages: int, microbatches: Microbatches) -> None:
    """Raises `ClusterError` where stages do not have as many devices each, `ShardingError` where there are no microbatches for them."""
    if microbatches == 1:
        raise ShardingError(
            f"stages of one program compute different microbatches at the same time, got microbatches=1 for {stages} stages. Use "
            f"{stages} or more, or leave microbatches out."
        )
    if cluster.n_devices % stages:
        raise ClusterError(
            f"stages have as many devices each: {cluster.name} has {cluster.n_devices}, got stages={stages}. Use a divisor of the devices."
        )


def fastest(
    attempts: Callable[..., Attempts],
    traced: Traced,
    stages: int,
    schedule: str,
    microbatches: Microbatches,
    seconds: float | None,
    progress: Progress,
) -> tuple[Found, float]:
    """The fastest that is found in any of a few numbers of microbatches, in the rounds of a schedule or in one, and when the search began.

    Args:
        attempts: from a number of microbatches, how long to search and ``rounds`` to what is tried.
        traced: the step as it was traced.
        seconds: how long to search; None: without a limit.

    Raises:
        TraceError: no such number divides the batch.
        InfeasibleError: nothing fits in any.
        SearchLimitError: the time was over before anything was found.
    """
    started: float | None = None

    def searched(case: tuple[int, int], n_left: int, progress: Progress) -> Found:
        nonlocal started
        left = None if seconds is None else max(0.0, seconds - (time.perf_counter() - started if started else 0.0)) / n_left
        tried = attempts(case[0], left, progress, rounds=case[1])
        started = started or tried.started
        return tried.found()

    def is_last(found: Found) -> bool:
        return seconds is None and bool(found[1].stats.get("ended_early"))  # by Ctrl-C

    numbers = numbers_of_microbatches(traced, stages, microbatches if isinstance(microbatches, int) else None)
    cases = [(n, rounds) for rounds in ONE_PROGRAM[schedule] for n in numbers]
    ends = (PipelineError,) if schedule == WEIGHTS_APART else ()  # more rounds that the layers do not divide by are left out
    found = found_with_each(cases, searched, progress, ends, is_last)
    assert started is not None, "there is a number"
    prepared, solution, problem = min(found, key=lambda each: each[1].judgement.cost.makespan_seconds)
    notes = (*solution.notes, *_rounds_compared(found))
    return (prepared, replace(solution, notes=notes), problem), started


def _rounds_compared(found: Sequence[Found]) -> list[str]:
    """The note on the fastest step in each number of rounds, where there are several."""
    least: dict[int, float] = {}
    for prepared, solution, _ in found:
        rounds, seconds = prepared.traced.rounds, solution.judgement.cost.makespan_seconds
        least[rounds] = min(seconds, least.get(rounds, seconds))
    each = ", ".join(f"{format_seconds(seconds)} in {n} round{'s' * (n > 1)}" for n, seconds in sorted(least.items()))
    return [f"a step is predicted to take {each}, of which the faster was taken"] if len(least) > 1 else []
