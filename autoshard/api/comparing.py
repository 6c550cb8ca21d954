"""Two strategies compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoshard.api.strategy import Strategy
from autoshard.errors import StrategyError
from autoshard.explanation.difference import Difference, difference_of
from autoshard.explanation.difference_text import difference_parts
from autoshard.render import Report
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


def compare(before: Strategy, after: Strategy, names: tuple[str, str] = ("first", "second")) -> Comparison:
    """The differences of two strategies, and what they cost: meshes, arguments by group, seconds by kind and by layer, bytes, collectives.

    Args:
        before, after: the strategies; of different programs, arguments are compared by path.
        names: what the report calls them.

    Raises:
        StrategyError: one is no strategy.

    >>> import jax.numpy as jnp
    >>> import autoshard
    >>> args = jnp.ones((64, 64)), jnp.ones((512, 64))
    >>> split, whole = (autoshard.evaluate(jnp.matmul, *args, cluster="cpu:8", mesh={"data": 8}, in_specs=specs)
    ...                 for specs in ({"*": jax.P("data")}, {"*": jax.P()}))
    >>> [change.after for change in compare(split, whole).data.tensors]
    [(None, None), (None, None)]
    """
    for each in (before, after):
        if not isinstance(each, Strategy):
            raise StrategyError(f"compare takes two strategies, got {each!r:.80}. Pass what autoshard.search or autoshard.load returns.")
    found = difference_of(before.record, after.record, names, (before._judged, after._judged))
    return Comparison(f"{names[0]} and {names[1]}", tuple(difference_parts(found)), found)
