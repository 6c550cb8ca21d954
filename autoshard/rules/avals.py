"""Types of arrays in a jaxpr."""

from __future__ import annotations

from typing import Any


def aval_of(atom: Any) -> Any:
    """The type of an array, with its shape and dtype: JAX declares a class for it that has neither."""
    return atom.aval
