"""Loops that go on while any example asks for more, and leave the others alone: what `jax.vmap` makes of a `while` of each example."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jax.extend.core import Literal

from autoshard.ir import Body, Op

_Makers = Mapping[int, Op]


def ends_one_by_one(op: Op) -> bool:
    """Whether further trips of a ``while`` change nothing of an example that asks for no more, so that others may go on without it.

    Its condition is the logical or of what each example asks for, and its body selects by the same, for everything that it carries, what is
    new or what was.
    """
    condition, body = op.bodies
    n_cond, n_body = op.params["cond_nconsts"], op.params["body_nconsts"]
    before, after = _makers(condition), _makers(body)
    asked = condition.outputs[0]
    while (maker := before.get(asked)) is not None and maker.primitive == "reduce_or":
        (asked,) = maker.operands
    if asked == condition.outputs[0]:
        return False
    outside = dict(zip(condition.inputs, (*op.operands[:n_cond], *body.inputs[n_body:]), strict=True))
    given = {inner: outer for inner, outer in zip(body.inputs, op.operands[n_cond : n_cond + n_body], strict=False)}
    same = _Same(before, after, outside, given)
    return all(
        new == old or _is_kept(after, new, old, lambda which: same.of(asked, which))
        for new, old in zip(body.outputs, body.inputs[n_body:], strict=True)
    )


def _makers(body: Body) -> dict[int, Op]:
    return {value: op for op in body.ops for value in op.results}


def _is_kept(makers: _Makers, new: int, old: int, is_asked) -> bool:
    """Whether a value is what it was wherever an example asks for no more."""
    maker = makers.get(new)
    if maker is None or maker.primitive != "select_n" or len(maker.operands) != 3:
        return False
    which, unchanged, _ = maker.operands
    while (expanded := makers.get(which)) is not None and expanded.primitive in ("broadcast_in_dim", "reshape"):
        (which, *_) = expanded.operands
    return unchanged == old and is_asked(which)


class _Same:
    """Comparison of values of a loop's condition with values of its body that start from the same carry."""

    def __init__(self, before: _Makers, after: _Makers, outside: Mapping[int, int], given: Mapping[int, int]):
        self.before, self.after, self.outside, self.given = before, after, outside, given
        self.known: dict[tuple[int, int], bool] = {}

    def of(self, one: int, other: int) -> bool:
        """Whether both are computed alike."""
        if (one, other) not in self.known:
            self.known[one, other] = self._of(one, other)
        return self.known[one, other]

    def _of(self, one: int, other: int) -> bool:
        first, second = self.before.get(one), self.after.get(other)
        if first is None or second is None:
            return first is second and self.outside.get(one, one) == self.given.get(other, other)
        if first.primitive != second.primitive or first.bodies or second.bodies or str(first.params) != str(second.params):
            return False
        if first.results.index(one) != second.results.index(other) or len(first.operands) != len(second.operands):
            return False
        atoms = zip(first.equation.invars, second.equation.invars, first.operands, second.operands, strict=True)
        return all(_equal(a, b) if isinstance(a, Literal) or isinstance(b, Literal) else self.of(x, y) for a, b, x, y in atoms)


def _equal(one: object, other: object) -> bool:
    """Whether two atoms are the same literal."""
    return isinstance(one, Literal) and isinstance(other, Literal) and bool(np.array_equal(one.val, other.val))
