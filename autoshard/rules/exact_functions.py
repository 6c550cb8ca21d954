"""Elementwise operations that NumPy computes as XLA does, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def quotient(a: Any, b: Any) -> Any:
    """Division of integers that rounds toward zero, as XLA's does; by zero anything."""
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.maximum(np.abs(b), 1))


EXACT: Mapping[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "sign": np.sign,
    "sub": np.subtract,
}
"""By primitive."""
