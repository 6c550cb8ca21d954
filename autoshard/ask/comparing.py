"""Two strategies compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoshard.errors import StrategyError
from autoshard.explanation.difference import Difference, difference_of
from autoshard.explanation.difference_text import difference_parts
from autoshard.ir.words import array_type
from autoshard.plan.plan import Plan
from autoshard.render import Paragraph, Report
from autoshard.strategy.record import plain


@dataclass(frozen=True, slots=True)
class Comparison(Report):
    """The report on two strategies; ``data`` is the same as numbers and names."""

    data: Difference

    def to_dict(self) -> dict[str, Any]:
        """The difference as plain JSON values."""
        return plain(self.data)

    # A slotted dataclass is a class made anew, and what it inherits of `Report` is found by name.
    __str__, _repr_html_ = Report.__str__, Report._repr_html_


def compare(before: Plan, after: Plan, names: tuple[str, str] = ("first", "second")) -> Comparison:
    """The differences of two strategies, and what they cost: meshes, arguments by group, seconds by kind and by layer, bytes, collectives.

    Args:
        before, after: the strategies; of different programs, which the report says first, arguments are compared by path.
        names: what the report calls them.

    Raises:
        StrategyError: one is no strategy.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import autoshard
    >>> args = jnp.ones((512, 64)), jnp.ones((64, 64))
    >>> split, whole = (autoshard.evaluate(jnp.matmul, *args, cluster="cpu:8", mesh={"data": 8}, in_specs=specs)
    ...                 for specs in ({"*": jax.P("data")}, {"*": jax.P()}))
    >>> [change.after for change in compare(split, whole).data.tensors]
    [(None, None), (None, None)]
    """
    for each in (before, after):
        if not isinstance(each, Plan):
            raise StrategyError(f"compare takes two strategies, got {each!r:.80}. Pass what autoshard.search or autoshard.load returns.")
    found = difference_of(before.record, after.record, names, (before._judged, after._judged))
    told = [] if found.same_program else [Paragraph(_programs(before, after, names))]
    return Comparison(f"{names[0]} and {names[1]}", (*told, *difference_parts(found)), found)


def _programs(before: Plan, after: Plan, names: tuple[str, str]) -> str:
    """In words, how two programs differ."""
    one, two = (f"{strategy.record.program.name} ({name})" for strategy, name in zip((before, after), names, strict=True))
    first, second = ({tensor.path: tensor for tensor in strategy.record.arguments} for strategy in (before, after))
    common = [(tensor, second[path]) for path, tensor in first.items() if path in second]
    other = next(((a, b) for a, b in common if (a.shape, a.dtype) != (b.shape, b.dtype)), None)
    if other is not None:
        a, b = other
        how = f"{a.path} is {array_type(a.dtype, a.shape)} in one and {array_type(b.dtype, b.shape)} in the other"
    elif len(common) < max(len(first), len(second)):
        how = f"of {len(first)} and {len(second)} arguments {len(common)} have the same path"
    else:
        how = "their arguments are alike, and what they compute is not"
    return f"Different programs: {one} and {two}; {how}. So the figures do not tell which sharding is better."
