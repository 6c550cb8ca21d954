"""Scans over layers divided into several, so that their layers can be on different stages.

A scan over stacked weights becomes scans over parts of them, one after the other. What is stacked along the layers, such as gradients and
the optimizer state of these weights, is computed in the same parts, by the sharding rules: as if the layers' dimension were split over
devices.

*Rows.* Where each stage has one part, a stacked argument becomes one argument a part, and so does the result that replaces it: each stage
keeps the rows of its own layers between steps. Any other stacked weight is read as slices of its rows, and put together again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from autoshard.errors import TraceError
from autoshard.ir import Choice, Graph, Layout, Mesh, Op, Rule
from autoshard.lower import Interpreter, Path, Sharded, bind, bind_unplaced, ops_by_path
from autoshard.microbatch import loop_of_batch
from autoshard.microbatch.plan import Loop
from autoshard.microbatch.rewrite import COMBINED
from autoshard.primitives import is_placement
from autoshard.rules import rules_of
from autoshard.trace import Traced, rebuilt, types_of


@dataclass(frozen=True, slots=True, eq=False)
class Divided:
    """A step with its scans over layers in parts.

    Attributes:
        traced: the program.
        arguments, results: per flat argument and result of the step the positions of its parts among the program's: one where it is whole.
    """

    traced: Traced
    arguments: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """The flat arguments of the step that are arguments by rows."""
        return tuple(k for k, parts in enumerate(self.arguments) if len(parts) > 1)


def with_divided_layers(traced: Traced, n_stages: int, n_microbatches: int, rows: Collection[int] | None = None) -> Divided:
    """The step with its scans over layers in as many parts as stages need; itself where it has none.

    Args:
        rows: the positions of stacked arguments that become one argument a stage; None: all that have a part for each stage.
    """
    graph, rules = traced.graph, rules_of(traced.graph)
    try:
        loop = loop_of_batch(graph, rules, n_microbatches)
        parts = _scans_of_layers(graph, loop, n_stages)
    except TraceError:
        parts = {}  # refused, with the reason, where it is put into microbatches
    if not parts:
        return Divided(traced, _positions([1] * len(graph.arguments)), _positions([1] * len(graph.results)))
    ops, stacked = ops_by_path(graph), _stacked_arguments(graph, loop, parts)
    possible = {k for k, value in enumerate(graph.arguments) if stacked.get(value) == n_stages and _has_rows(graph.values[value].dtype)}
    found = possible if rows is None else possible.intersection(rows)
    replaced = {result for result, argument in graph.aliases if argument in found}
    arguments = _positions([n_stages if k in found else 1 for k in range(len(graph.arguments))])
    results = _positions([n_stages if k in replaced else 1 for k in range(len(graph.results))])

    def function(*flat: Any) -> list[Any]:
        given = []
        for value, places in zip(graph.arguments, arguments, strict=True):
            if len(places) > 1:
                given.append(Rows(n_stages, [flat[place] for place in places]))
            else:
                given.append(Rows(stacked[value], whole=flat[places[0]]) if value in stacked else flat[places[0]])
        made = _Divided(ops, rules, graph, parts).run(traced.jaxpr.jaxpr, traced.jaxpr.consts, given)
        return [x for result, places in zip(made, results, strict=True) for x in _apart(result, len(places))]

    types = [_rows_of(type_, len(places)) for type_, places in zip(types_of(traced.jaxpr.jaxpr.invars), arguments, strict=True)]
    program = traced if not found else replace(traced, graph=_with_leaves(graph, arguments, results))
    program = replace(program, in_tree=jax.tree.structure((0,) * sum(map(len, arguments)))) if found else program
    made = jax.make_jaxpr(function)(*chain.from_iterable(types))
    return Divided(rebuilt(program, made, traced.microbatches), arguments, results)


def _positions(sizes: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Consecutive numbers in groups of these sizes.

    >>> _positions([1, 2, 1])
    ((0,), (1, 2), (3,))
    """
    numbers = iter(range(sum(sizes := list(sizes))))
    return tuple(tuple(next(numbers) for _ in range(size)) for size in sizes)


def _has_rows(dtype: str) -> bool:
    """Whether arrays of a type are taken apart by rows: random keys are not."""
    return not dtype.startswith("key")


def _rows_of(type_: Any, n: int) -> list[Any]:
    """The types of an array's ``n`` parts."""
    return [type_] if n == 1 else [jax.ShapeDtypeStruct((type_.shape[0] // n, *type_.shape[1:]), type_.dtype)] * n


def _apart(x: Any, n: int) -> list[Any]:
    """A result in ``n`` parts, or whole."""
    if n == 1:
        return [whole(x)]
    rows = x if isinstance(x, Rows) and x.n == n else Rows(n, whole=whole(x))
    return [rows.part(k) for k in range(n)]


def _with_leaves(graph: Graph, arguments: Sequence[Sequence[int]], results: Sequence[Sequence[int]]) -> Graph:
    """The graph with the names, aliases and donations of arguments and results in parts; a part has the name of its array."""
    aliases = [pair for result, argument in graph.aliases for pair in zip(results[result], arguments[argument], strict=True)]
    return replace(
        graph,
        argument_paths=tuple(path for path, places in zip(graph.argument_paths, arguments, strict=True) for _ in places),
        result_paths=tuple(path for path, places in zip(graph.result_paths, results, strict=True) for _ in places),
        aliases=tuple(sorted(aliases)),
        donated=tuple(place for argument in graph.donated for place in arguments[argument]),
    )


def parts_of(layers: int, n_stages: int) -> int:
    """In how many equal parts so many layers are divided: the fewest of those with which the largest stage has the fewest layers.

    Each stage gets a part if there are enough layers.

    >>> parts_of(32, 4), parts_of(10, 4), parts_of(6, 4), parts_of(3, 4)
    (4, 10, 6, 3)
    """
    enough = min(layers, n_stages)
    sizes = [size for size in range(1, layers + 1) if layers % size == 0 and layers // size >= enough]
    best = min(sizes, key=lambda size: (-(-layers // size // n_stages) * size, -size))
    return layers // best


def _scans_of_layers(graph: Graph, loop: Loop, n_stages: int) -> dict[int, int]:
    """Per op index of a scan over layers in how many parts it is divided.

    Those are scans over stacked arguments that all examples share, and scans over what such scans have stacked up.
    """
    of_arguments = set(graph.arguments)
    found: dict[int, int] = {}
    stacked: set[int] = set()
    for op in graph.ops:
        if any(value in of_arguments for value in op.operands) and op.primitive != "scan":
            of_arguments.update(op.results)
        if op.primitive != "scan" or op.params["length"] < 2:
            continue
        first = op.params["num_consts"] + op.params["num_carry"]
        weights = [
            value for value in op.operands[first:] if value in of_arguments and loop.status(value).is_whole and graph.values[value].rank > 1
        ]
        parts = parts_of(op.params["length"], n_stages)
        if parts > 1 and (weights or any(value in stacked for value in op.operands[first:])):
            found[op.index] = parts
            stacked.update(op.results[op.params["num_carry"] :])
    return found


def _stacked_arguments(graph: Graph, loop: Loop, parts: Mapping[int, int]) -> dict[int, int]:
    """Per argument that is stacked along layers, weights and what is shaped like them, in how many parts it is divided."""
    shapes: dict[tuple[int, ...], int] = {}
    for op in graph.ops:
        if op.index in parts:
            first = op.params["num_consts"] + op.params["num_carry"]
            shapes.update((graph.values[v].shape, parts[op.index]) for v in op.operands[first:] if loop.status(v).is_whole)
    found = {value: shapes.get(graph.values[value].shape) for value in graph.arguments if value not in loop.batch}
    return {value: n for value, n in found.items() if n is not None}


class Rows:
    """An array in equal parts along dimension 0, as parts or as a whole, whichever is asked for.

    Attributes:
        n: how many parts.
    """

    def __init__(self, n: int, parts: Sequence[Any] | None = None, whole: Any = None):
        self.n = n
        self._whole = whole
        self._parts: dict[int, Any] = dict(enumerate(parts or ()))

    def part(self, k: int) -> Any:
        """Part ``k``."""
        if k not in self._parts:
            self._parts[k] = _slice(self._whole, 0, self.n, k)
        return self._parts[k]

    def whole(self) -> Any:
        """The array."""
        if self._whole is None:
            self._whole = jnp.concatenate([self._parts[k] for k in range(self.n)])
        return self._whole


def whole(x: Any) -> Any:
    """The array itself."""
    return x.whole() if isinstance(x, Rows) else x


def _slice(x: Any, dim: int, n: int, k: int) -> Any:
    size = x.shape[dim] // n
    return lax.slice_in_dim(x, k * size, (k + 1) * size, axis=dim)


@dataclass(frozen=True)
class _Part(Sharded):
    """An op on one of the parts of what is split.

    Attributes:
        number: of the part.
    """

    number: int = 0

    def start(self, layout: Layout, dim: int, size: int) -> Any:
        return jnp.int32(self.number * size if layout[0] == dim else 0)

    def part(self, x: Any, layout: Layout, dim: int, size: int) -> Any:
        return lax.slice_in_dim(x, self.number * size, (self.number + 1) * size, axis=dim) if layout[0] == dim else x

    def partial(self) -> dict[str, tuple[str, ...]]:
        """Nothing: partial results are combined where all parts are known."""
        return {}


class _Divided(Interpreter):
    """Evaluates a program with its scans over layers in parts; what is stacked along layers is an instance of `Rows`."""

    def __init__(self, ops: Mapping[Path, Op], rules: Sequence[Rule | None], graph: Graph, parts: Mapping[int, int]):
        super().__init__(ops, differentiable=False)
        self._rules, self._graph, self._parts = rules, graph, parts

    def region(self) -> Interpreter:
        return _AsItIs(self.ops, differentiable=False)

    def dead(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        return [None] * len(eqn.outvars)

    def op(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        rows = [x for x in operands if isinstance(x, Rows)]
        if rows and len({x.n for x in rows}) == 1 and (made := self._in_parts(op, eqn, operands, rows[0].n)) is not None:
            return made
        return bind(eqn, list(map(whole, operands)))

    def control_flow(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        n = self._parts.get(op.index)
        if n is None:
            return self.rebound(op, eqn, list(map(whole, operands)))
        consts, carries = eqn.params["num_consts"], eqn.params["num_carry"]
        constants, carry = list(map(whole, operands[:consts])), list(map(whole, operands[consts : consts + carries]))
        slices = [x if isinstance(x, Rows) and x.n == n else Rows(n, whole=jnp.asarray(whole(x))) for x in operands[consts + carries :]]
        stacked: dict[int, list[Any]] = {}
        order = range(n)
        for k in reversed(order) if eqn.params["reverse"] else order:
            made = bind(eqn, [*constants, *carry, *(x.part(k) for x in slices)], length=eqn.params["length"] // n)
            carry, stacked[k] = made[:carries], made[carries:]
        return [*carry, *(Rows(n, parts) for parts in zip(*(stacked[k] for k in order), strict=True))]

    def _in_parts(self, op: Op, eqn: JaxprEqn, operands: Sequence[Any], n: int) -> list[Any] | None:
        """The results of an op on operands of which some are in ``n`` parts, in parts or combined; None where its rule has no such."""
        rule, values = self._rules[op.index], self._graph.values
        factor = None if rule is None or getattr(eqn, "effects", ()) else _factor(rule, operands, n)
        if rule is None or factor is None:
            return None
        choice: Choice = ((factor, -1),)
        shapes = [tuple(values[value].shape for value in side) for side in (op.operands, op.results)]

        def bound(*given: Any, **replaced: Any) -> list[Any]:
            return (bind if is_placement(op.primitive) else bind_unplaced)(eqn, given, **replaced)

        made = []
        for k in range(n):
            part = _Part(op.primitive, op.params, bound, rule, choice, Mesh.of({"part": n}), *shapes, number=k)
            read = [
                x.part(k) if isinstance(x, Rows) else x if layout[0] < 0 else _slice(x, layout[0], n, k)
                for x, layout in zip(operands, part.entering, strict=True)
            ]
            made.append(part.computed(read))
        kind, operator = rule.factors[factor].kind, COMBINED.get(rule.factors[factor].operator or "sum")
        results = []
        for parts in zip(*made, strict=True):
            if kind == "reduction" and operator is not None:
                total = parts[0]
                for other in parts[1:]:
                    total = operator(total, other)
                results.append(total)
            else:
                results.append(Rows(n, parts))
        return results


class _AsItIs(Interpreter):
    """Evaluates the body of an op unchanged."""

    def op(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        return bind(eqn, operands)


def _factor(rule: Rule, operands: Sequence[Any], n: int) -> int | None:
    """The factor that is split where operands are in ``n`` parts, and results are in parts too or combined; None where there is none."""
    factors = {dims[0][0] if dims and dims[0] else None for dims, x in zip(rule.operands, operands, strict=True) if isinstance(x, Rows)}
    factor = factors.pop() if len(factors) == 1 else None
    if factor is None or rule.factors[factor].size % n or rule.factors[factor].sends:
        return None
    found = rule.factors[factor]
    if found.kind == "reduction":
        return factor if (found.operator or "sum") in COMBINED and not any(factor in dim for dims in rule.results for dim in dims) else None
    leading = all(dims and dims[0] and dims[0][0] == factor for dims in rule.results)
    return factor if found.kind == "pass_through" and leading else None
