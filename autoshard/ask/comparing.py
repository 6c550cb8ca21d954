"""Two strategies compared."""

from __future__ import annotations

from autoshard.errors import StrategyError
from autoshard.explanation.comparison import Comparison, comparison
from autoshard.plan.plan import Plan

__all__ = ["Comparison", "compare"]


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
    return comparison(before.record, after.record, names, (before._judged, after._judged))
