"""How many layers each stage of a pipeline gets, and with which of several plans, by dynamic programming.

*Objective.* The makespan of a pipeline of stages of unequal times ``T``: the first microbatch passes all stages and comes back, and the
slowest stage sets the pace of the others: ``sum T + (m - 1) max T``, transfers at fill and drain, and what runs once a step at the
slowest stage. Of the sum without the slowest stage, schedules with smaller bubbles have a share. *Constraint.* Each stage's state, and what
the microbatches that its schedule has in flight keep, are within the memory limit. *Method.* For each value that ``max T`` may have, from
the least, the least sum by dynamic programming over stages and layers; values end once they alone exceed the best makespan. Exact for the
given costs, if the values tried are enough; O(values x stages x layers x layers of a stage). *Ties.* The smaller ``max T``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.pipeline.layer_costs import LayerCosts

_VALUES = 48  # of the slowest stage's time, that are tried


@dataclass(frozen=True, slots=True)
class Layering:
    """The stages of a pipeline.

    Attributes:
        layers: per stage the number of its layers.
        options: per stage the number of its plan among those given.
        makespan_seconds: of a step.
        peak_bytes: per stage.
    """

    layers: tuple[int, ...]
    options: tuple[int, ...]
    makespan_seconds: float
    peak_bytes: tuple[float, ...]


def best_layering(
    options: Sequence[LayerCosts],
    n_layers: int,
    n_microbatches: int,
    in_flight: Sequence[int],
    limit_bytes: float,
    send_seconds: float = 0.0,
    fill: float = 1.0,
) -> Layering | None:
    """The fastest division of layers into stages that fits; None where nothing fits.

    Args:
        options: plans of a stage's devices; each stage may have another one.
        n_layers: to divide; each stage has one at least. What is not in layers is on the last stage.
        n_microbatches: of a step.
        in_flight: per stage how many microbatches it keeps at most.
        limit_bytes: that a device may hold.
        send_seconds: of one transfer between neighbouring stages.
        fill: the share of the other stages' seconds that the slowest one waits, at the begin and the end of a step.
    """
    n_stages = len(in_flight)
    most = min(n_layers - n_stages + 1, 2 * -(-n_layers // n_stages) + 1)
    if most < 1:
        return None
    counts = np.arange(1, most + 1)
    stages = [_stage(options, counts, *each, limit_bytes, send_seconds, n_microbatches) for each in enumerate(in_flight, 1 - n_stages)]
    seconds, after = (np.stack([stage[k] for stage in stages]) for k in (0, 1))
    best, least = None, np.inf
    for slowest in _paces(seconds, n_layers):
        if n_microbatches * slowest >= least:
            break
        total, layers = _least_sum(np.where(seconds <= slowest * (1 + 1e-12), seconds, np.inf), n_layers)
        last = max((float(after[s, k - 1]) for s, k in enumerate(layers)), default=0.0)
        makespan = n_microbatches * slowest + fill * (total - slowest) + last + 2 * (n_stages - 1) * send_seconds
        if makespan < least:
            best, least = layers, makespan
    if best is None:
        return None
    options_of, peaks = ([stages[s][of][k - 1].item() for s, k in enumerate(best)] for of in (2, 3))
    return Layering(tuple(best), tuple(options_of), least, tuple(peaks))


def _stage(
    options: Sequence[LayerCosts], counts: np.ndarray, from_last: int, alive: int, limit: float, send: float, n_microbatches: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Per number of layers: seconds of a microbatch, infinity where it does not fit; seconds after the last; the option; peak bytes.

    The option is the one that takes the stage least time in all.
    """
    is_last = from_last == 0
    share = float(is_last)
    seconds, after, peaks = [], [], []
    for option in options:
        layer, ends = option.layer, option.ends
        peak = option.peak_bytes(counts, alive, is_last)
        pace = np.maximum(counts * layer.microbatch_seconds + share * ends.microbatch_seconds, send)
        seconds.append(np.where(peak <= limit, pace, np.inf))
        after.append(counts * layer.after_seconds + share * ends.after_seconds)
        peaks.append(peak)
    best = np.argmin(np.stack(seconds) + np.stack(after) / n_microbatches, axis=0)
    rows = np.arange(len(counts))
    pace, late, peak = (np.stack(each)[best, rows] for each in (seconds, after, peaks))
    return pace, late, best, peak


def _paces(seconds: np.ndarray, n_layers: int) -> list[float]:
    """The times of the slowest stage that are tried, from the least at which the stages have room for all layers."""
    values = np.unique(seconds[np.isfinite(seconds)])
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        room = (seconds <= values[middle] * (1 + 1e-12)).sum(axis=1)
        if room.all() and room.sum() >= n_layers:
            high = middle
        else:
            low = middle + 1
    return values[low : low + _VALUES].tolist()


def _least_sum(seconds: np.ndarray, n_layers: int) -> tuple[float, list[int]]:
    """The least sum of the stages' seconds with all layers, and the layers of each stage; infinity where they have no room."""
    n_stages, most = seconds.shape
    sums = np.full(n_layers + 1, np.inf)
    sums[0] = 0.0
    taken = np.zeros((n_stages, n_layers + 1), dtype=np.int64)
    before = np.arange(n_layers + 1) - np.arange(1, most + 1)[:, None]  # layers of the stages before, by those of this one
    before = np.where(before < 0, n_layers + 1, before)  # for which there is no sum
    for s in range(n_stages):
        ways = np.append(sums, np.inf)[before] + seconds[s, :, None]
        taken[s] = np.argmin(ways, axis=0) + 1
        sums = ways.min(axis=0)
    if not np.isfinite(sums[n_layers]):
        return np.inf, []
    left, layers = n_layers, []
    for s in reversed(range(n_stages)):
        layers.append(int(taken[s, left]))
        left -= layers[-1]
    return float(sums[n_layers]), layers[::-1]
