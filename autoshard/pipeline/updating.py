"""Updates of chunks in gaps of a pipeline's orders.

A chunk's state may be updated once its last gradients are there, while its stage waits for tasks of other chunks. *Method.* Updates of the
stage that ends last are moved forward one at a time, each to the first gap after its chunk's last task or to the longest one, whichever
makes the makespan less. A gap may be too short: later tasks then start later, which costs nothing where they would have waited. Each try
takes O(tasks).
"""

from __future__ import annotations

from collections.abc import Iterator

from autoshard.pipeline.improving import Timing, fits
from autoshard.pipeline.list_scheduling import UPDATE, Orders, Tables

_LEAST = 1e-12  # of the makespan: rounding


def with_early_updates(tables: Tables, orders: Orders, tries: int) -> tuple[float, Orders]:
    """The makespan, which is no longer, and the orders with updates in gaps, after so many tries at most."""
    best = Timing(tables, orders)
    while tries > 0 and best.is_complete:
        stage = max(range(len(orders)), key=best.free.__getitem__)
        orders_of = [order for order in [*_moves(best, stage)][:tries] if fits(tables, stage, order)]
        moved = [Timing(tables, [*best.orders[:stage], order, *best.orders[stage + 1 :]]) for order in orders_of]
        tries -= max(len(moved), 1)
        after = min((timing for timing in moved if timing.is_complete), key=_ends, default=best)
        if after.makespan > best.makespan or sum(_ends(best)) - sum(_ends(after)) <= _LEAST * best.makespan:
            break
        best = after
    return best.makespan, best.orders


def _ends(timing: Timing) -> tuple[float, float]:
    """The makespan, and the sum of the ends of all stages."""
    return timing.makespan, sum(timing.free)


def _moves(timing: Timing, stage: int) -> Iterator[list[tuple[int, int]]]:
    """The orders of a stage in which one of its updates is in a gap further ahead."""
    order, starts, seconds = timing.orders[stage], timing.starts[stage], timing.tables.seconds
    ends = [start + seconds[kind][piece] for start, (kind, piece) in zip(starts, order, strict=True)]
    for at, (kind, piece) in enumerate(order):
        if kind != UPDATE:
            continue
        first = 1 + max(k for k, task in enumerate(order[:at]) if task[1] == piece)
        gaps = [k for k in range(first, at) if starts[k] - ends[k - 1] > _LEAST * timing.makespan]
        for place in dict.fromkeys([*gaps[:1], *sorted(gaps, key=lambda k: ends[k - 1] - starts[k])[:1]]):
            yield [*order[:place], order[at], *order[place:at], *order[at + 1 :]]
