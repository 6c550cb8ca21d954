"""The physics of a family of chips, fitted to half of its published runs and judged on the other half.

Least squares of the logarithms of predicted over measured times, robust against runs whose plan is not well known; each figure is held near
its datasheet's or its source's by a prior of a factor of e**PRIOR. Runs in stages are only judged: no figure is fitted to them. What is
found is written into the catalogue by hand, with this command as its source.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from autoshard.cluster import Cluster
from autoshard.render import Paragraph, Report, Table, format_percent
from benchmarks.cost_model.findings import quantile
from benchmarks.published.predicted import Planned, Predicted, planned
from benchmarks.published.runs import TRITON, Run

PRIOR = 0.5
SCALE = 0.05  # of errors: larger ones count less than their squares
TRIES = 5

Change = Callable[[Cluster, float], Cluster]


def _of_device(name: str) -> Change:
    return lambda cluster, value: replace(cluster, device=replace(cluster.device, **{name: value}))


def _of_links(name: str) -> Change:
    return lambda cluster, value: replace(cluster, interconnect=replace(cluster.interconnect, **{name: value}))


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that is fitted.

    Attributes:
        name: of the field.
        change, now: how a cluster is changed, and what it is.
        most: that it may be.
        attention: of which attention's runs it is; "" for all.
    """

    name: str
    change: Change
    now: Callable[[Cluster], float]
    most: float = 1.0
    attention: str = ""


_SHARES = ("matrix_efficiency", "memory_efficiency", "kernel_efficiency")
FIGURES: Mapping[str, tuple[Figure, ...]] = {
    "gpu": (
        *(Figure(name, _of_device(name), lambda cluster, name=name: getattr(cluster.device, name)) for name in _SHARES),
        Figure("kernel_efficiency", _of_device("kernel_efficiency"), lambda c: TRITON[c.device.name], attention="triton"),
        Figure("kernel_overhead_seconds", _of_device("kernel_overhead_seconds"), lambda c: c.device.kernel_overhead_seconds, 1e-4),
        Figure(
            "network_bandwidth_bytes_per_second",
            _of_links("network_bandwidth_bytes_per_second"),
            lambda c: c.interconnect.network_bandwidth_bytes_per_second,
            50e9,
        ),
    ),
    "tpu": (
        *(Figure(name, _of_device(name), lambda cluster, name=name: getattr(cluster.device, name)) for name in _SHARES[::2]),
    ),
}
"""Per kind of device."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """The figures of a family, and how far predictions are off, before and after, on the half that was fitted and on the other one.

    Attributes:
        values: by name, before and after.
        errors: of the fitted half and the held one, before and after, as shares of the measured times.
    """

    family: str
    values: Mapping[str, tuple[float, float]]
    errors: tuple[tuple[list[float], list[float]], tuple[list[float], list[float]]]


def halves(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Every other run without stages; and all others."""
    without = [run for run in runs if run.stages == 1]
    fitted = without[::2]
    return fitted, [run for run in runs if run not in fitted]


def fitted(family: str, runs: Sequence[Run], plans: Callable[[Run], Planned] = planned) -> Fitted:
    """The figures of one family's runs without stages; the clusters of all of them have the same device but for its memory."""
    runs = [run for run in runs if run.stages == 1]
    half, held = halves(runs)
    found = {run: plans(run) for run in runs}
    base = Cluster.parse(f"{runs[0].family}:{runs[0].topology}")
    figures = FIGURES[base.device.kind]
    start = np.array([figure.now(base) for figure in figures])

    def ratios(chosen: Sequence[Run], values: Sequence[float]) -> np.ndarray:
        return np.array([_predicted(found[run], run, figures, values).seconds / run.seconds for run in chosen])

    most = np.array([figure.most for figure in figures])
    first = np.log(np.clip(start, 0.05 * most, 0.9 * most))  # where both ways lead somewhere

    def residuals(logs: np.ndarray) -> np.ndarray:
        values = np.minimum(np.exp(logs), most)
        return np.concatenate([np.log(ratios(half, values)), SCALE * (logs - first) / PRIOR])

    bounds = first - 3, np.log(most) + 0.1  # a step beyond the most, so that it may be reached
    best = least_squares(residuals, first, bounds=bounds, loss="soft_l1", f_scale=SCALE, diff_step=0.02, max_nfev=TRIES)
    values = np.minimum(np.exp(best.x), most)
    off = tuple(tuple(list(abs(ratios(chosen, each) - 1)) for each in (start, values)) for chosen in (half, held))
    named = {f"{figure.name} {figure.attention}".strip(): (float(a), float(b)) for figure, a, b in zip(figures, start, values, strict=True)}
    return Fitted(family, named, off)  # pyright: ignore[reportArgumentType]


def _predicted(plan: Planned, run: Run, figures: Sequence[Figure], values: Sequence[float]) -> Predicted:
    cluster = Cluster.parse(f"{run.family}:{run.topology}")
    given = dict(zip(figures, map(float, values), strict=True))
    for figure, value in given.items():
        cluster = cluster if figure.attention else figure.change(cluster, value)
    cluster = run.of(cluster)
    for figure, value in given.items():
        cluster = figure.change(cluster, value) if figure.attention == run.attention else cluster
    return plan.on(cluster)


def report(found: Sequence[Fitted]) -> Report:
    """The figures, and errors before and after."""
    parts = []
    for each in found:
        rows = tuple((name, f"{before:.4g}", f"{after:.4g}") for name, (before, after) in each.values.items())
        lines = tuple(
            (what, str(len(errors[0])), *(format_percent(f(e)) for e in errors for f in (statistics.median, lambda e: quantile(e, 0.9))))
            for what, errors in zip(("fitted", "held"), each.errors, strict=True)
        )
        parts += [Paragraph(each.family), Table(("figure", ">before", ">after"), rows)]
        parts += [Table(("half", ">runs", ">median before", ">nine in ten", ">median after", ">nine in ten"), lines)]
    return Report("The physics of published runs", tuple(parts))
