"""Two strategies compared, and a strategy compared with what it would be otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from autoshard.api.meshes import given_mesh, meshes_of
from autoshard.api.prepared import Prepared, cluster_of, searched_on_meshes, traced_of, within
from autoshard.api.strategy import Strategy
from autoshard.api.user_pins import Asked, Pins, UserPins, user_pins
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.errors import StrategyError
from autoshard.explanation.difference import Difference, difference_of
from autoshard.explanation.difference_text import difference_parts
from autoshard.explanation.tensor import by_first_that_holds
from autoshard.ir.naming import matching
from autoshard.judge.model import CostModel
from autoshard.problem import Problem
from autoshard.progress import silent
from autoshard.render import Report
from autoshard.rules import rules_of
from autoshard.search import Searcher, Solution, batch_dims
from autoshard.strategy.record import plain
from autoshard.trace import SplitModules, Traced, outside_mesh


@dataclass(frozen=True, slots=True)
class Comparison(Report):
    """The report on two strategies; ``data`` is the same as numbers and names."""

    data: Difference

    def to_dict(self) -> dict[str, Any]:
        """The difference as plain JSON values."""
        return plain(self.data)

    # A slotted dataclass is a class made anew, and what it inherits of `Report` is found by name.
    __str__, _repr_html_ = Report.__str__, Report._repr_html_


@dataclass(frozen=True, slots=True)
class WhatIf(Comparison):
    """The comparison of a strategy with another one that was searched for it: ``strategy``, which runs, saves and explains as any."""

    strategy: Strategy

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


@outside_mesh(keep_auto=True)
def what_if(
    strategy: Strategy,
    *,
    pins: Pins | None = None,
    cluster: Cluster | str | Path | None = None,
    mesh: Mapping[str, int] | jax.sharding.Mesh | int | None = None,
    batch: int | None = None,
) -> WhatIf:
    """As `Strategy.what_if` says."""
    traced, call = strategy._traced, strategy._call
    if traced is None:
        raise StrategyError(
            "what_if searches the program again, and a strategy from a file has none. Pass the function: "
            "strategy.with_program(fn, *args).what_if(...)."
        )
    if strategy.record.pipeline is not None:
        raise StrategyError("what_if changes the sharding of a whole step, and this strategy is a pipeline. Search again with stages=.")
    record = strategy.record
    there = Cluster.from_dict(record.cluster) if cluster is None else cluster_of(cluster)
    own = strategy._pins
    asked = Asked.of(pins)
    given = dict(record.mesh.axes) if mesh is None and cluster is None else mesh
    wanted = None if given is None or isinstance(given, int) else given_mesh(given)
    if wanted is not None:
        there.check(wanted)
    if batch is not None:
        if call is None:
            raise StrategyError(
                "another batch is another program, which is traced anew. Pass the function: strategy.with_program(fn, *args).what_if(...)."
            )
        args = with_batch_size(strategy, traced, call[1], batch)
        axes = (*(record.mesh.names if wanted is None else wanted.names), *asked.axes)
        program = record.program
        rewritten = {"microbatches": program.microbatches, "remat": program.remat, "stages": program.stages}
        traced, facts, seconds = traced_of(call[0], args, record.donate_argnums, axes, there, **rewritten)
        call = call[0], args
    else:
        facts, seconds = program_facts(traced.graph, rules_of(traced.graph), compiler_of(there)), {}
    both = _with(own, asked, traced, wanted is None)
    meshes, _ = meshes_of(there, both, wanted, given if isinstance(given, int) else 2, record.program.stages)
    prepared = Prepared(traced, facts, there, meshes, 0, both, there.memory_limit_bytes, seconds, call)
    solution, problem, searcher = _searched(prepared, given)
    after = prepared.strategy(problem.mesh, solution, searcher)
    found = difference_of(record, after.record, ("now", "what if"), (strategy._judged, after._judged))
    return WhatIf(f"What if: {_asked_words(pins, cluster, mesh, batch)}", tuple(difference_parts(found)), found, after)


def _searched(prepared: Prepared, mesh: Any) -> tuple[Solution, Problem, Searcher]:
    """The best on any of the meshes, by the first searcher that can hold the program."""

    def by(searcher: Searcher) -> tuple[Solution, Problem, Searcher]:
        return *within(prepared, partial(searched_on_meshes, prepared, searcher, silent, (), 1, None), True, mesh), searcher

    return by_first_that_holds(by)


def _with(own: UserPins | None, asked: Asked, traced: Traced, is_searched: bool) -> UserPins:
    """The strategy's own pins, and those of the question, which come before."""
    graph = traced.graph
    if own is None:
        return user_pins(asked, graph, [()] * len(graph.arguments), is_searched)
    given = {at: spec for pattern, spec in asked.specs.items() for at in matching(pattern, graph.argument_paths)}
    kept = {at: each for at, each in own.kept.items() if at not in given}
    both = Asked({**own.asked.specs, **asked.specs}, own.asked.arguments, own.asked.batch_axes)
    return replace(own, asked=both, graph=graph, given={**own.given, **given}, kept=kept)


def with_batch_size(strategy: Strategy, traced: Traced, args: tuple, batch: int) -> tuple:
    """Arguments like some, their batch of another size.

    Raises:
        StrategyError: the size is no positive number, or no argument has a batch.
    """
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise StrategyError(f"a batch is a positive number of examples, got {batch!r}. Use 512, for instance.")
    graph, judged = traced.graph, strategy._judged
    assert judged is not None, "a strategy with its program and without stages"
    dims = batch_dims(Problem(judged.facts, CostModel(judged.model.cluster, strategy.record.mesh)))
    if not dims:
        raise StrategyError(f"no argument of {graph.name!r} has a batch that can be split. Pass other arguments to autoshard.search.")
    split = SplitModules(args)
    leaves, tree = jax.tree.flatten(split.states)
    changed = []
    for value, leaf in zip(graph.arguments, leaves, strict=True):
        dim = dims.get(value)
        if dim is not None:
            leaf = jax.ShapeDtypeStruct((*leaf.shape[:dim], batch, *leaf.shape[dim + 1 :]), leaf.dtype)
        changed.append(leaf)
    return split.rebuild(tree.unflatten(changed))


def _asked_words(pins: Any, cluster: Any, mesh: Any, batch: Any) -> str:
    """``cluster=v5e:4x8, batch=1024``."""
    asked: Sequence[tuple[str, Any]] = (("pins", pins), ("cluster", cluster), ("mesh", mesh), ("batch", batch))
    return ", ".join(f"{name}={value}" for name, value in asked if value is not None) or "searched again"
