"""Scans over layers divided into several, so that their layers can be on different stages.

A scan over stacked weights becomes scans over parts of them, one after the other. What is stacked along the layers, such as gradients and
the optimizer state of these weights, is computed in the same parts, by the sharding rules: as if the layers' dimension were split over
devices. That is the first dimension of what a scan reads, and any dimension of the weight of which that is made.

*Rows.* Where each stage has one part, a stacked argument becomes one argument a part, and so does the result that replaces it: each stage
keeps the rows of its own layers between steps. Any other stacked weight is read as slices of its rows, and put together again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from autoshard.analysis.values import makers_of
from autoshard.errors import TraceError
from autoshard.ir import Choice, Graph, Layout, Mesh, Op, Rule
from autoshard.ir.scan import num_carry, scan_parts
from autoshard.lower import AsItIs, Path, Sharded, bind, bind_part, ops_by_path
from autoshard.microbatch import loop_of_batch
from autoshard.microbatch.arrays import COMBINED
from autoshard.microbatch.plan import Loop
from autoshard.microbatch.rules import batch_rules
from autoshard.rules import rules_of
from autoshard.trace import Traced, rebuilt, types_of


@dataclass(frozen=True, slots=True, eq=False)
class Divided:
    """A step with its scans over layers in parts.

    Attributes:
        traced: the program.
        arguments, results: per flat argument and result of the step the positions of its parts among the program's: one where it is whole.
        argument_dims, result_dims: of those in parts the dimension along which they are, that of the layers.
        whole: the flat arguments that are stacked along scanned layers and are no arguments in parts.
    """

    traced: Traced
    arguments: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    argument_dims: Mapping[int, int]
    result_dims: Mapping[int, int]
    whole: tuple[int, ...] = ()


def with_divided_layers(traced: Traced, n_stages: int, n_microbatches: int, rows: Collection[int] | None = None) -> Divided:
    """The step with its scans over layers in as many parts as stages need; itself where it has none.

    Args:
        rows: the positions of stacked arguments that become one argument a stage; None: all that have a part for each stage.
    """
    graph, rules = traced.graph, rules_of(traced.graph)
    try:
        loop = loop_of_batch(traced, batch_rules(graph), n_microbatches)
        lengths = {op.index: op.params["length"] for op in scans_of_layers(graph, loop)}
    except TraceError:
        lengths = {}  # refused, with the reason, where it is put into microbatches
    parts = {index: n for index, length in lengths.items() if (n := parts_of(length, n_stages)) > 1}
    if not parts:
        return Divided(traced, _positions([1] * len(graph.arguments)), _positions([1] * len(graph.results)), {}, {})
    stacked, aliases = _stacked_arguments(graph, rules, loop, parts), dict(graph.aliases)
    program = _Program(traced, rules, parts, n_stages, frozenset(range(len(graph.arguments)) if rows is None else rows))
    divided, made = program.divided(stacked)
    while more := {aliases[k]: dim for k, dim in made.items() if aliases.get(k) in program.rows and k not in divided.result_dims}:
        stacked |= {graph.arguments[k]: (n_stages, dim) for k, dim in more.items()}  # state of fewer dimensions than the weights
        divided, made = program.divided(stacked)
    return divided


def with_first_layers(traced: Traced, loop: Loop, parts: Mapping[int, int]) -> Traced | None:
    """The step with the first part of its layers alone, without the rows of the others; None where all are needed at once.

    It costs what a program of so many layers costs; the numbers that it would compute mean nothing.

    Args:
        loop: its plan in microbatches.
        parts: by the number of a scan how many parts its layers have.
    """
    graph, rules = traced.graph, rules_of(traced.graph)
    stacked, aliases = _stacked_arguments(graph, rules, loop, parts), dict(graph.aliases)
    with suppress(TraceError):
        short, made = _first_part(traced, rules, parts, stacked)
        while more := {k: made[result] for result, k in aliases.items() if result in made and graph.arguments[k] not in stacked}:
            stacked |= {graph.arguments[k]: part for k, part in more.items()}  # state of fewer dimensions than the weights
            short, made = _first_part(traced, rules, parts, stacked)
        return short
    return None


def _first_part(
    traced: Traced, rules: Sequence[Rule | None], parts: Mapping[int, int], stacked: Mapping[int, tuple[int, int]]
) -> tuple[Traced, dict[int, tuple[int, int]]]:
    """The step with the first part of its layers, and per result that is one of several parts their number and dimension."""
    graph, made = traced.graph, dict[int, tuple[int, int]]()
    own = {k: stacked[value] for k, value in enumerate(graph.arguments) if value in stacked}

    def function(*flat: Any) -> list[Any]:
        given = [Rows(own[k][0], [x], dim=own[k][1]) if k in own else x for k, x in enumerate(flat)]
        evaluator = _Divided(ops_by_path(graph), rules, graph, parts, first_alone=True)
        found = evaluator.run(traced.jaxpr.jaxpr, traced.jaxpr.consts, given)
        made.update((k, (x.n, x.dim)) for k, x in enumerate(found) if isinstance(x, Rows))
        return [x.part(0) if isinstance(x, Rows) else x for x in found]

    types = types_of(traced.jaxpr.jaxpr.invars)
    jaxpr = jax.make_jaxpr(function)(*(_rows_of(each, *own[k])[0] if k in own else each for k, each in enumerate(types)))
    return rebuilt(traced, jaxpr), made


@dataclass(frozen=True, slots=True, eq=False)
class _Program:
    """A step to be divided: its scans in ``parts``, and which of its stacked arguments may be ``rows``, one argument a stage."""

    traced: Traced
    rules: Sequence[Rule | None]
    parts: Mapping[int, int]
    n_stages: int
    rows: frozenset[int]

    def divided(self, stacked: Mapping[int, tuple[int, int]]) -> tuple[Divided, dict[int, int]]:
        """The divided step, and per result that is computed in a part for each stage the dimension of the parts.

        Args:
            stacked: per value number of a stacked argument the number of its parts, and their dimension.
        """
        traced, graph, n = self.traced, self.traced.graph, self.n_stages
        own = {k: stacked[value] for k, value in enumerate(graph.arguments) if value in stacked}
        dims = {k: dim for k, (n_parts, dim) in own.items() if self._has_rows(k, n_parts)}
        replacing = {result: dims[argument] for result, argument in graph.aliases if argument in dims}
        arguments = _positions([n if k in dims else 1 for k in range(len(graph.arguments))])
        results = _positions([n if k in replacing else 1 for k in range(len(graph.results))])
        ops, in_parts = ops_by_path(graph), dict[int, int]()

        def function(*flat: Any) -> list[Any]:
            given = []
            for k, places in enumerate(arguments):
                if k in dims:
                    given.append(Rows(n, [flat[place] for place in places], dim=dims[k]))
                else:
                    (x,) = (flat[place] for place in places)
                    given.append(Rows(own[k][0], whole=x, dim=own[k][1]) if k in own else x)
            made = _Divided(ops, self.rules, graph, self.parts).run(traced.jaxpr.jaxpr, traced.jaxpr.consts, given)
            in_parts.update((k, x.dim) for k, x in enumerate(made) if isinstance(x, Rows) and x.n == n)
            return [part for k, x in enumerate(made) for part in (_apart(x, n, replacing[k]) if k in replacing else [whole(x)])]

        types = types_of(traced.jaxpr.jaxpr.invars)
        flat = chain.from_iterable(_rows_of(each, n, dims[k]) if k in dims else [each] for k, each in enumerate(types))
        jaxpr = jax.make_jaxpr(function)(*flat)
        if dims:
            leaves = jax.tree.structure((0,) * sum(map(len, arguments)))
            traced = replace(traced, graph=graph.with_leaves(arguments, results), in_tree=leaves)
        left = tuple(k for k in own if k not in dims)
        return Divided(rebuilt(traced, jaxpr), arguments, results, dims, replacing, left), in_parts

    def _has_rows(self, k: int, n: int) -> bool:
        """Whether an argument in so many parts becomes one a stage; random keys do not."""
        graph = self.traced.graph
        return k in self.rows and n == self.n_stages and not graph.values[graph.arguments[k]].dtype.startswith("key")


def _positions(sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Consecutive numbers in groups of these sizes.

    >>> _positions([1, 2, 1])
    ((0,), (1, 2), (3,))
    """
    ends = [0, *accumulate(sizes)]
    return tuple(tuple(range(first, last)) for first, last in pairwise(ends))


def _rows_of(type_: Any, n: int, dim: int) -> list[Any]:
    """The types of an array's ``n`` parts along a dimension."""
    shape = tuple(size // n if d == dim else size for d, size in enumerate(type_.shape))
    return [jax.ShapeDtypeStruct(shape, type_.dtype)] * n


def _apart(x: Any, n: int, dim: int) -> list[Any]:
    """A result in ``n`` parts along a dimension."""
    rows = x if isinstance(x, Rows) and (x.n, x.dim) == (n, dim) else Rows(n, whole=whole(x), dim=dim)
    return [rows.part(k) for k in range(n)]


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


def scans_of_layers(graph: Graph, loop: Loop) -> list[Op]:
    """The scans over stacked arguments that all examples share, and those over what such scans have stacked up."""
    of_arguments = set(graph.arguments)
    found: list[Op] = []
    stacked: set[int] = set()
    for op in graph.ops:
        if any(value in of_arguments for value in op.operands) and op.primitive != "scan":
            of_arguments.update(op.results)
        if op.primitive != "scan" or op.params["length"] < 2:
            continue
        *_, sliced = scan_parts(op.params, op.operands)
        weights = [value for value in sliced if value in of_arguments and loop.status(value).is_whole and graph.values[value].rank > 1]
        if weights or not stacked.isdisjoint(sliced):
            found.append(op)
            stacked.update(op.results[num_carry(op.params) :])
    return found


def _stacked_arguments(graph: Graph, rules: Sequence[Rule | None], loop: Loop, parts: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """Per argument that is stacked along layers, weights and what is shaped like them, the number of its parts, and their dimension."""
    makers = makers_of(graph.ops)
    found: dict[tuple[int, ...], tuple[int, int]] = {}
    for op in graph.ops:
        if op.index in parts:
            *_, sliced = scan_parts(op.params, op.operands)
            waiting = [(value, 0) for value in sliced if loop.status(value).is_whole]
            while waiting:
                value, dim = waiting.pop()
                found.setdefault(graph.values[value].shape, (parts[op.index], dim))
                if (maker := makers.get(value)) is not None and (rule := rules[maker.index]) is not None:
                    waiting += _read_along(rule, maker, maker.results.index(value), dim)
    arguments = [value for value in graph.arguments if value not in loop.batch]
    return {value: found[graph.values[value].shape] for value in arguments if graph.values[value].shape in found}


def _read_along(rule: Rule, op: Op, result: int, dim: int) -> list[tuple[int, int]]:
    """The operands whose parts along a dimension make those of a result along one, with these dimensions."""
    factors = rule.results[result][dim]
    pairs = zip(op.operands, rule.operands, strict=True) if factors else ()
    return [(value, d) for value, dims in pairs for d in _dims_along(dims, factors[0])]


class Rows:
    """An array in equal parts along a dimension, as parts or as a whole, whichever is asked for.

    Attributes:
        n: how many parts.
        dim: the dimension.
    """

    def __init__(self, n: int, parts: Sequence[Any] | None = None, whole: Any = None, dim: int = 0):
        self.n, self.dim = n, dim
        self._whole = whole
        self._parts: dict[int, Any] = dict(enumerate(parts or ()))

    def part(self, k: int) -> Any:
        """Part ``k``."""
        if k not in self._parts:
            self._parts[k] = _slice(self._whole, self.dim, self.n, k)
        return self._parts[k]

    def whole(self) -> Any:
        """The array."""
        if self._whole is None:
            if len(self._parts) < self.n:
                raise TraceError("all layers are needed at once, where there is the first part of them alone. Give all of them.")
            self._whole = jnp.concatenate([self._parts[k] for k in range(self.n)], self.dim)
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


class _Divided(AsItIs):
    """Evaluates a program with its scans over layers in parts, or the first of them alone; what is stacked along layers is `Rows`."""

    def __init__(
        self, ops: Mapping[Path, Op], rules: Sequence[Rule | None], graph: Graph, parts: Mapping[int, int], first_alone: bool = False
    ):
        super().__init__(ops)
        self._rules, self._graph, self._parts, self._first_alone = rules, graph, parts, first_alone

    def _computed(self, n: int) -> range:
        """The numbers of the parts that are computed, of so many."""
        return range(1 if self._first_alone else n)

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
        constants, carry, scanned = scan_parts(eqn.params, operands)
        constants, carry, slices = list(map(whole, constants)), list(map(whole, carry)), [_along_layers(x, n) for x in scanned]
        stacked: dict[int, list[Any]] = {}
        order = self._computed(n)
        for k in reversed(order) if eqn.params["reverse"] else order:
            made = bind(eqn, [*constants, *carry, *(x.part(k) for x in slices)], length=eqn.params["length"] // n)
            carry, stacked[k] = made[: len(carry)], made[len(carry) :]
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
            return bind_part(eqn, given, **replaced)

        made = []
        for k in self._computed(n):
            part = _Part(op.primitive, op.params, bound, rule, choice, Mesh.of({"part": n}), *shapes, number=k)
            read = [
                x.part(k) if isinstance(x, Rows) else x if layout[0] < 0 else _slice(x, layout[0], n, k)
                for x, layout in zip(operands, part.entering, strict=True)
            ]
            made.append(part.computed(read))
        kind, operator = rule.factors[factor].kind, COMBINED.get(rule.factors[factor].operator or "sum")
        results = []
        for parts, dims in zip(zip(*made, strict=True), rule.results, strict=True):
            if kind == "reduction" and operator is not None:
                total = parts[0]
                for other in parts[1:]:
                    total = operator(total, other)
                results.append(total)
            else:
                results.append(Rows(n, parts, dim=_dims_along(dims, factor)[0]))
        return results


def _along_layers(x: Any, n: int) -> Rows:
    """The slices of a scan's operand, in ``n`` parts."""
    return x if isinstance(x, Rows) and (x.n, x.dim) == (n, 0) else Rows(n, whole=jnp.asarray(whole(x)))


def _dims_along(dims: Sequence[Sequence[int]], factor: int) -> list[int]:
    """The dimensions of which parts are those of a factor."""
    return [d for d, factors in enumerate(dims) if factors and factors[0] == factor]


def _factor(rule: Rule, operands: Sequence[Any], n: int) -> int | None:
    """The factor that is split where operands are in ``n`` parts, and results are in parts too or combined; None where there is none."""
    along = [dims[x.dim] if x.dim < len(dims) else () for dims, x in zip(rule.operands, operands, strict=True) if isinstance(x, Rows)]
    factors = {dim[0] if dim else None for dim in along}
    factor = factors.pop() if len(factors) == 1 else None
    if factor is None or rule.factors[factor].size % n or rule.factors[factor].sends:
        return None
    found = rule.factors[factor]
    if found.kind == "reduction":
        return factor if (found.operator or "sum") in COMBINED and not any(factor in dim for dims in rule.results for dim in dims) else None
    return factor if found.kind == "pass_through" and all(_dims_along(dims, factor) for dims in rule.results) else None
