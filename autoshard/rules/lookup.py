"""The rules of a whole program: from the registry, and for primitives without one composed from Shardy's rules."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from autoshard.errors import RuleError
from autoshard.ir import Graph, Op, Rule
from autoshard.rules.declared import declared_of
from autoshard.rules.mapped import mapped_rule
from autoshard.rules.registry import registered, rule_of
from autoshard.rules.shardy import lowered_rule


def rules_of(graph: Graph) -> tuple[Rule | None, ...]:
    """The rule of every op, by op index; equal operations share one `Rule` object.

    None for control flow, and for ops that stay replicated or partition themselves. Linear in the number of ops, plus 5-10 ms
    for each distinct operation of an unregistered primitive.
    """
    ours = registered()
    known: dict[Hashable, Rule | None] = {}
    found = []
    for op in graph.walk():
        if op.bodies or (op.primitive not in ours and op.equation is None and not op.mapped):
            found.append(None)
            continue
        values = [tuple(graph.values[v] for v in side) for side in (op.operands, op.results)]
        name = op.primitive if op.primitive in ours or op.equation is None else op.equation.primitive
        key: Any = (name, op.mapped, op.kernel, tuple(op.params.items()), *values)
        try:
            hash(key)
        except TypeError:  # an unhashable parameter: not cached
            key = op.index
        if key not in known:
            try:
                known[key] = mapped_rule(op, *values) if op.mapped else _rule(op, *values)
            except RuleError as error:
                raise RuleError(f"at {op.origin}, {error}") from error
        found.append(known[key])
    return tuple(found)


def _rule(op: Op, operands: tuple, results: tuple) -> Rule | None:
    if op.kernel is not None and op.kernel.rule is not None:
        return op.kernel.rule
    if op.primitive not in registered() and (given := declared_of(op.primitive, op.params)) is not None:
        return given.rule([v.shape for v in operands], [v.shape for v in results], *[v.dtype for v in results[:1]])
    rule = rule_of(op.primitive, op.params, operands, results)
    return lowered_rule(op.equation) if rule is None and op.equation is not None else rule
