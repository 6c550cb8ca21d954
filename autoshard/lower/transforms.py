"""Lowering of a Fourier transform over several dimensions to one kernel where none of these is sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

from autoshard.ir import Layout, Op, operand_layout, replicated, result_layout
from autoshard.lower.interpret import Path
from autoshard.lower.plan import Plan
from autoshard.lower.shards import with_one_batch
from autoshard.trace.structure import opened, subjaxprs
from autoshard.trace.transforms import transform_of

Read = Callable[[Any, int, Layout], Any]
"""``(array, value, layout)`` to the value in this layout."""


def whole_transform(plan: Plan, eqn: JaxprEqn, x: Any, path: Path, read: Read) -> tuple[Any, int, Layout] | None:
    """The result of a transform whose call divides it by dimension, with its value and layout.

    None for any other equation, and where one of the transformed dimensions is sharded, or the array is resharded between two transforms.
    """
    found = transform_of(eqn)
    ops = [plan.ops.get((*path, 0, k)) for k in range(len(opened(subjaxprs(eqn)[0])[0].eqns))] if found else []
    if found is None or None in ops or (layout := _shared(plan, [op for op in ops if op is not None], len(found[1]))) is None:
        return None
    first, last = ops[0], ops[-1]
    assert first is not None and last is not None
    kind, lengths = found

    def bind(x: Any) -> list[Any]:
        return [lax.fft_p.bind(x, fft_type=kind, fft_lengths=lengths)]

    x = read(x, first.operands[0], layout)
    (made,) = bind(x) if layout == replicated(plan.assignment.mesh) else with_one_batch(bind, x, len(lengths))
    return made, last.results[0], layout


def _shared(plan: Plan, ops: list[Op], n: int) -> Layout | None:
    """The layout of all operands and results of these ops, with the last ``n`` dimensions whole; None where there is no such layout."""
    found: set[Layout] = set()
    for op in ops:
        rule, choice, (value,) = plan.rules[op.index], plan.assignment.choice(op.index), op.results
        if rule is None or plan.free[value]:
            return None
        found |= {operand_layout(rule, choice, 0), result_layout(rule, choice, 0), plan.layout(value)}
    (layout, *others), batch = found, len(plan.rules[ops[0].index].operands[0]) - n  # pyright: ignore[reportOptionalMemberAccess]
    return None if others or any(dim >= batch for dim in layout) else layout
