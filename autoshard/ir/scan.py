"""How many constants and carries a scan has, in every release of JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def num_consts(params: Mapping[str, Any]) -> int:
    """How many of a scan's operands are constants: the first ones."""
    return params["num_consts"] if "num_consts" in params else len(params["ft_in"].unpack()[0])  # from jax 0.11 trees of operands


def num_carry(params: Mapping[str, Any]) -> int:
    """How many of a scan's operands, after its constants, and of its first results are carries."""
    return params["num_carry"] if "num_carry" in params else len(params["ft_in"].unpack()[1])


def scan_parts(params: Mapping[str, Any], inputs: Sequence[T]) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
    """A scan's operands, or the inputs of its body: constants, carries, and what is sliced."""
    first, last = num_consts(params), num_consts(params) + num_carry(params)
    return inputs[:first], inputs[first:last], inputs[last:]
