"""The check of a sharding that somebody wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec

from autoshard.ask.search import evaluate, evaluated, flat_specs
from autoshard.ask.strategy import Strategy
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.errors import ShardingError
from autoshard.explanation.groups import joined
from autoshard.explanation.lint import RULES, Finding, cost_words, findings, padding
from autoshard.explanation.program import Judged, Searched
from autoshard.ir import Graph, Mesh, Op, Spec, Value
from autoshard.ir.naming import starred
from autoshard.lower import AsItIs, Interpreter, apply, ops_by_path
from autoshard.plan.meshes import given_mesh
from autoshard.plan.prepared import cluster_of, own_annotations, traced_of
from autoshard.plan.user_pins import ARGUMENTS, Asked, constraints, user_pins
from autoshard.render import Paragraph, Report, Table, format_count, format_seconds
from autoshard.rules import rules_of
from autoshard.trace import outside_mesh, rebuilt

ANY = "any"


@dataclass(frozen=True, slots=True)
class Lint(Report):
    """The findings on a sharding, and the strategy as it was costed; prints as a table.

    >>> import jax.numpy as jnp
    >>> import autoshard
    >>> found = lint(jnp.matmul, jnp.ones((2048, 64)), jnp.ones((64, 2048)), cluster="cpu:8", mesh={"data": 8}, in_specs=jax.P())
    >>> sorted({each.rule for each in found.findings})
    ['repeated-work', 'unsharded-batch', 'unsharded-parameter']
    """

    findings: tuple[Finding, ...]
    strategy: Strategy

    def failing(self, rules: Collection[str] | str) -> tuple[Finding, ...]:
        """The findings of some rules, or of one; of all where that is ``"any"``.

        Raises:
            ShardingError: there is no such rule.
        """
        rules = (rules,) if isinstance(rules, str) else rules
        check_rules(rules)
        return tuple(each for each in self.findings if ANY in rules or each.rule in rules)

    def to_dict(self) -> dict[str, Any]:
        """The findings as plain JSON values."""
        return {"findings": [dataclasses.asdict(each) for each in self.findings]}


def check_rules(rules: Collection[str]) -> None:
    """Raises `ShardingError` for a rule that there is not."""
    unknown = [rule for rule in rules if rule not in RULES and rule != ANY]
    if unknown:
        raise ShardingError(f"a rule is one of {', '.join(RULES)}, or {ANY}; got {unknown[0]!r}. Use one of those.")


def lint(
    fn: Any,
    *args: Any,
    cluster: Cluster | str | Path | None = None,
    mesh: Mapping[str, int] | jax.sharding.Mesh | None = None,
    in_specs: Any = ARGUMENTS,
    donate_argnums: int | Sequence[int] = (),
) -> Lint:
    """What looks wrong about a sharding: whole batches and large parameters, replicated activations, repeated work, padding, resharding.

    Intermediates are sharded as Shardy propagates the arguments' shardings and the constraints in the program. Each finding has its rule,
    its source line, what it costs in seconds and bytes, by the prediction, and what to do; what causes others comes before them.

    Args:
        fn, args, cluster, donate_argnums: as for `search`.
        mesh: axis sizes by name; None: the mesh on which the arguments are.
        in_specs: as for `evaluate`; by default the shardings that the arguments have, as arrays or `jax.ShapeDtypeStruct` with a
            `NamedSharding`.

    Raises:
        ShardingError: a spec does not fit its argument or the mesh, or no argument is on a mesh and none is given.
    """
    with outside_mesh(keep_auto=True):
        there = cluster_of(cluster)
        traced, _, _ = traced_of(fn, args, donate_argnums, () if mesh is None else given_mesh(mesh).all_names, there)
        graph = traced.graph
        if isinstance(in_specs, str) and in_specs == ARGUMENTS:
            pins = user_pins(Asked(arguments=True), graph, own_annotations(fn, args, traced), False)
            on = next((Mesh(kept.mesh) for kept in pins.kept.values() if kept.mesh), None)
            specs = pins.specs
        else:
            specs, on = flat_specs(traced, args, in_specs), None
        on = given_mesh(mesh) if mesh is not None else on
        if on is None:
            raise ShardingError(
                "a sharding is on a mesh, and no argument is. Give the sizes of its axes: mesh={'data': 8} (--mesh data=8)."
            )
        even: dict[str, PartitionSpec] = {}
        padded: dict[tuple, list[str]] = {}
        for value, path, spec in zip(graph.arguments, graph.argument_paths, specs, strict=True):
            one = graph.values[value]
            uneven = dict(_uneven(tuple(spec), one.shape, on))
            for dim, (count, axes) in uneven.items():
                padded.setdefault((starred(path), one, dim, count, axes), []).append(path)
            even[path] = PartitionSpec(*(None if dim in uneven else entry for dim, entry in enumerate(spec)))
        found = [_padded(joined(paths, True), len(paths), *key[1:]) for key, paths in padded.items()]
        found += _uneven_constraints(graph, on)
        strategy = evaluate(fn, *args, cluster=there, mesh=dict(on.shape), in_specs=even, donate_argnums=donate_argnums)
    assert strategy._judged is not None, "it was just traced"
    uneven = {path for paths in padded.values() for path in paths}
    found += findings(strategy._judged, uneven, partial(_without, strategy, there, on, [even[path] for path in graph.argument_paths]))
    return Lint(f"Sharding of {graph.name} on {there.name}, mesh {on}", tuple(_parts(found, strategy)), tuple(found), strategy)


class _Without(AsItIs):
    """Evaluates a program without the constraints of which it is given no op."""

    def region(self) -> Interpreter:
        return _Without(self.ops)

    def dead(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        return apply(eqn, operands)


def _without(strategy: Strategy, cluster: Cluster, mesh: Mesh, specs: Sequence[PartitionSpec], constraints: Collection[Op]) -> Judged:
    """The strategy's program judged without some of its constraints."""
    traced = strategy._traced
    assert traced is not None, "it was just traced"
    kept = {path: op for path, op in ops_by_path(traced.graph).items() if op not in constraints}
    with outside_mesh(keep_auto=True):
        made = rebuilt(traced, _Without(kept).remade(traced.jaxpr))
        facts = program_facts(made.graph, rules_of(made.graph), compiler_of(cluster))
        record = evaluated(made, facts, cluster, mesh, specs, {})
    judged = Strategy(record, made, None, None, Searched(facts))._judged
    assert judged is not None, "it was just evaluated"
    return judged


def _padded(name: str, n: int, value: Value, dim: int, count: int, axes: tuple[str, ...]) -> Finding:
    """The finding on several arguments of one pattern of paths."""
    one = padding(value.shape, value.dtype, dim, count, name, axes)
    return dataclasses.replace(one, what=f"{n} x {one.what}" if n > 1 else one.what, bytes=n * one.bytes)


def _uneven(spec: Spec, shape: tuple[int, ...], mesh: Mesh) -> Iterator[tuple[int, tuple[int, tuple[str, ...]]]]:
    """The dimensions that a spec splits unevenly, with the number of parts and the axes; axes that the mesh lacks are left to others."""
    sizes = dict(mesh.axes)
    for dim, (entry, size) in enumerate(zip(spec, shape, strict=False)):
        axes = () if entry is None or not isinstance(entry, str | tuple) else (entry,) if isinstance(entry, str) else entry
        count = 1
        for axis in axes:
            count *= sizes.get(axis, 1)
        if size % count:
            yield dim, (count, tuple(axes))


def _uneven_constraints(graph: Graph, mesh: Mesh) -> list[Finding]:
    found = []
    for place, spec, own in constraints(graph):
        value = graph.values[place.value]
        for dim, (count, axes) in _uneven(tuple(spec), value.shape, mesh if own is None else Mesh.of(own)):
            found.append(padding(value.shape, value.dtype, dim, count, place.what, axes))
    return found


def _parts(found: Sequence[Finding], strategy: Strategy) -> Iterator[Paragraph | Table]:
    step = format_seconds(strategy.cost.makespan_seconds)
    if not found:
        yield Paragraph(f"Nothing was found; a step takes {step}, by the prediction.")
        return
    some = f"{format_count(len(found))} finding{'s' * (len(found) > 1)}, what causes others first"
    yield Paragraph(f"{some}; a step takes {step}, by the prediction.")
    rows = tuple((each.rule, each.where, cost_words(each), f"{each.what}\n{each.advice}") for each in found)
    yield Table(("rule", "where", ">costs", "what, and what to do"), rows)
