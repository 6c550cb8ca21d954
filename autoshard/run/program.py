"""The program of a record, made of its function, with the rules of its operations and the steps of its reshards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from autoshard.cluster import Cluster
from autoshard.errors import StrategyError
from autoshard.ir import Graph, Rule
from autoshard.ir.rewrites import Microbatches, Offload
from autoshard.judge.model import CostModel
from autoshard.lower import ReshardPath
from autoshard.rewrite import rewritten
from autoshard.rules import rules_of
from autoshard.run.padded import PaddedArguments
from autoshard.run.sharded import plain
from autoshard.strategy import Record, check_program
from autoshard.trace import Traced, trace, with_named_batch


def program_of(
    fn: Callable[..., Any], args: tuple[Any, ...], record: Record, weak: Sequence[bool] | None = None, before: Traced | None = None
) -> tuple[Traced, tuple[Rule | None, ...], ReshardPath]:
    """The traced function, its rules, and the steps of its reshards.

    Arguments may differ from those of the search in being weakly typed, as ``jnp.log(0.5)`` is before the first update and not after it.

    Args:
        weak: per leaf whether it was weakly typed where the function was the record's program before.
        before: as the search traced it, which is not done again for the same function and arguments.

    Raises:
        StrategyError: it is not the program the record is for.
    """

    args = PaddedArguments(record).as_written(args)

    def program(args: tuple) -> tuple[Traced, tuple[Rule | None, ...], ReshardPath]:
        traced = trace(plain(fn), *args, donate_argnums=record.donate_argnums, axis_names=record.mesh.all_names, before=before)
        own = record.program.rewrites
        if record.pipeline is not None:  # stages have their own
            own = tuple(each for each in own if not isinstance(each, Microbatches | Offload))
        traced = rewritten(with_named_batch(traced, record.program.batch), own)
        graph, rules = traced.graph, rules_of(traced.graph)
        check_program(record, graph, rules)
        if record.pipeline is not None:  # stages have their own meshes, and send each other what they have
            return traced, rules, lambda *_: ()
        model = CostModel(Cluster.from_dict(record.cluster), record.mesh)
        return traced, rules, model.reshard_paths(graph.values)

    try:
        return program(args)
    except StrategyError:
        leaves, tree = jax.tree.flatten(args)
        given = tuple(getattr(x, "weak_type", False) for x in leaves)
        for other in dict.fromkeys((tuple(weak or given), (False,) * len(leaves))):
            if other != given:
                with suppress(StrategyError):
                    return program(tree.unflatten([_typed(x, one) for x, one in zip(leaves, other, strict=True)]))
        raise


def _typed(x: Any, weak: bool) -> Any:
    """An array as its shape and type, weak or not; anything else as it is."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak) if isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct) else x


def check_effects(graph: Graph, n_devices: int) -> None:
    """Raises `StrategyError` for effects in an order, which JAX has on a single device only."""
    ordered = next((op for op in graph.walk() if op.params.get("ordered") is True), None)
    if ordered is not None and n_devices > 1:
        raise StrategyError(
            f"effects in a fixed order happen on a single device, and {ordered.primitive} at {ordered.origin} asks for it on {n_devices}. "
            "Pass ordered=False, or leave it out of the step."
        )
