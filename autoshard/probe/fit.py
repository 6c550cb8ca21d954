"""Fits of constants to measured times, without devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import numpy as np

from autoshard.cluster import Cluster

# Regularisation towards the start: a constant on which no time depends keeps its value, one on which ten times depend moves freely.
KEEP = 0.01
OUTLIER = 0.3  # residuals beyond this count linearly: scipy's soft_l1
STEP = 0.05  # of the logarithms, for slopes: the model has kinks, where the slower of two costs changes; a small step sees one side
LEAPS = (-1.0, -0.3, 0.3, 1.0)
RESTARTS = 10  # a gradient method stops at kinks: it is started again beyond them


def fit_cluster(
    cluster: Cluster, constants: Sequence[str], predict: Callable[[Cluster], np.ndarray], seconds: Sequence[float] | np.ndarray
) -> Cluster:
    """The cluster with the constants that predict measured times best.

    Least squares of ``log(predicted / measured)`` over the logarithms of the constants (Levenberg and Marquardt's trust region), so
    that all stay positive, and times half as long and twice as long have equal errors. Outliers count only linearly.

    Args:
        cluster: the start of the fit.
        constants: names of the fitted constants, as for `constant`.
        predict: the cost model: seconds of all measured programs on a cluster.
        seconds: the measured times, in the same order.
    """
    measured = np.asarray(seconds, float)
    start = np.log([constant(cluster, name) for name in constants])

    def moved(x: np.ndarray) -> Cluster:
        changed = cluster
        for name, value in zip(constants, np.exp(start + x), strict=True):
            changed = with_constant(changed, name, float(value))
        return changed

    def errors(x: np.ndarray) -> np.ndarray:
        return np.concatenate([np.log(predict(moved(x)) / measured), KEEP * x])

    return moved(_least(errors, len(start)))


def _least(errors: Callable[[np.ndarray], np.ndarray], n: int) -> np.ndarray:
    """The ``n`` numbers of the least errors, from zeros on."""
    from scipy.optimize import least_squares

    def slopes(x: np.ndarray) -> np.ndarray:
        steps = STEP * np.eye(len(x))
        return np.stack([(errors(x + step) - errors(x - step)) / (2 * STEP) for step in steps], axis=1)

    def cost(x: np.ndarray) -> float:
        return float(np.sum(np.sqrt(1 + (errors(x) / OUTLIER) ** 2) - 1))  # scipy's soft_l1

    x, least = np.zeros(n), np.inf
    for _ in range(RESTARTS):
        found = least_squares(errors, x, slopes, loss="soft_l1", f_scale=OUTLIER)  # pyright: ignore[reportArgumentType] scipy takes a callable
        x = _leaps(cost, found.x)
        if cost(x) > 0.999 * least:
            break
        least = cost(x)
    return x


def _leaps(cost: Callable[[np.ndarray], float], x: np.ndarray) -> np.ndarray:
    """The best of single long steps along each axis in turn, which cross kinks."""
    for axis in range(len(x)):
        tried = [x + length * np.eye(len(x))[axis] for length in (0.0, *LEAPS)]
        x = min(tried, key=cost)
    return x


def constant(cluster: Cluster, name: str) -> float:
    """A constant by its name: ``device.flops_per_second.bf16``, ``interconnect.launch_seconds``, ``levels.0.latency_seconds``."""
    record, field, *key = name.split(".")
    if record == "levels":
        return getattr(cluster.levels[int(field)], key[0])
    value = getattr(getattr(cluster, record), field)
    return dict(value)[key[0]] if key else value


def with_constant(cluster: Cluster, name: str, value: float) -> Cluster:
    """The cluster with one constant changed."""
    record, field, *key = name.split(".")
    if record == "levels":
        levels = (replace(level, **{key[0]: value}) if str(number) == field else level for number, level in enumerate(cluster.levels))
        return replace(cluster, levels=tuple(levels))
    old = getattr(cluster, record)
    assert field in {f.name for f in fields(old)}
    new = tuple((k, value if k == key[0] else v) for k, v in getattr(old, field)) if key else value
    changed = replace(old, **{field: new})
    return replace(cluster, device=changed) if record == "device" else replace(cluster, interconnect=changed)
