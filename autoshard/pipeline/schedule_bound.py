"""Lower bound of the makespan of a pipeline's tasks, whatever their orders."""

from __future__ import annotations

from itertools import accumulate

from autoshard.pipeline.list_scheduling import BACKWARD, FORWARD, UPDATE, WEIGHTS, Tables


def least_makespan(tables: Tables) -> float:
    """The greatest of several bounds, in seconds; O(pieces x stages).

    Of the chain of one microbatch through all pieces and back, and the first piece's update. And of each stage: it begins when the first
    microbatch arrives, works, and its last gradient then goes back to the first piece, which is updated; until the first gradient can be
    there it has forward tasks alone, of as many microbatches as have room; and the bytes of each microbatch, for as long as it is in
    flight at least, have room in the time of the step.
    """
    forward, backward, weights, updates = tables.seconds
    n, last = tables.n_microbatches, len(forward) - 1
    heads = list(accumulate((forward[p] + tables.send_seconds(p, p + 1) for p in range(last)), initial=0.0))
    tails = list(accumulate((backward[p] + tables.send_seconds(p + 1, p) for p in range(last)), initial=0.0))  # after the backward task
    whole = heads[last] + forward[last] + backward[last] + tails[last]
    bounds = [whole + weights[0] + updates[0]]
    for stage, own in enumerate(tables.own):
        first, deepest = own[0], own[-1]
        sums = [(1 if kind == UPDATE else n) * sum(seconds[p] for p in own) for kind, seconds in enumerate(tables.seconds)]
        bounds += [heads[first] + sum(sums), heads[first] + sums[FORWARD] + sums[BACKWARD] + tails[first] + updates[0]]
        returns = whole - tails[deepest] - backward[deepest]  # when the first backward task can start
        early = min(returns - heads[first], _early_seconds(tables, stage))
        bounds.append(returns + sum(sums) - early)
        occupied = sum(_byte_seconds(tables, p, whole - tails[p] - heads[p]) for p in own)
        if occupied > 0:
            bounds.append(heads[first] + n * occupied / tables.room[stage] if tables.room[stage] else 0.0)
    return max(bounds)


def _early_seconds(tables: Tables, stage: int) -> float:
    """The most seconds of forward tasks for which a stage has room before any backward task: a fractional knapsack."""
    left, most, seconds = tables.room[stage], tables.most[stage], 0.0
    forward, kept = tables.seconds[FORWARD], tables.kept
    for p in sorted(tables.own[stage], key=lambda p: kept[p] / max(forward[p], 1e-30)):
        count = min(tables.n_microbatches, most, left / kept[p] if kept[p] else most)
        seconds, left, most = seconds + count * forward[p], left - count * kept[p], most - count
    return max(seconds, 0.0)


def _byte_seconds(tables: Tables, piece: int, in_flight: float) -> float:
    """Bytes of a microbatch times the seconds that it has them at least, ``in_flight`` from its forward task to the end of its backward."""
    backward, weights = tables.seconds[BACKWARD][piece], tables.seconds[WEIGHTS][piece]
    return tables.kept[piece] * (in_flight - backward) + (
        tables.late[piece] * (backward + weights) if tables.splits else tables.kept[piece] * backward
    )
