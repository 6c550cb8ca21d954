"""Fits of measured times: numbers in, constants out, no devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls


def fit_line(nbytes: Sequence[float] | np.ndarray, seconds: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Latency in seconds and bandwidth in bytes per second of times that grow with size: ``seconds = latency + bytes / bandwidth``.

    Both are at least zero, and are least squares of the relative error, so that short times count as much as long ones. The bandwidth
    is infinite where times do not grow.

    >>> fit_line([1e6, 1e9], [2e-5, 1.001e-2])
    (1e-05, 100000000000.0)

    Raises:
        ValueError: fewer than two sizes, or a time that is not positive.
    """
    x, y = np.asarray(nbytes, float), np.asarray(seconds, float)
    if x.shape != y.shape or x.ndim != 1 or len(set(x)) < 2 or not np.all(y > 0) or not np.all(np.isfinite(y)):
        raise ValueError(f"a line is fitted to positive times of two or more sizes, got {len(x)} sizes and {len(y)} times.")
    scale = x.max()  # keeps both columns near one
    (latency, slope), _ = nnls(np.stack([1 / y, x / scale / y], axis=1) * y.min(), np.full_like(y, y.min()))
    return float(f"{latency:.12g}"), float(f"{scale / slope:.12g}") if slope else float("inf")
