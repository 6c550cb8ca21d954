"""The program of a plan: a scan over microbatches between what runs before and after it.

Microbatch ``i`` has every ``n``-th example, ``i``, ``i + n``, ...: a batch that is split over devices then stays where it is, since each
device has as many examples of each microbatch. Sums are accumulated in float32 at least, and rounded to their type once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import PartitionSpec

from autoshard.errors import TraceError
from autoshard.ir import Choice, Graph, Layout, Mesh, Op, Rule
from autoshard.ir.scan import scan_parts
from autoshard.lower import AsItIs, Interpreter, Path, Sharded, apply, bind, bind_part, ops_by_path, retraced, unread
from autoshard.microbatch.arrays import COMBINED, neutral, put_together, taken
from autoshard.microbatch.plan import Loop
from autoshard.microbatch.rules import regrouped
from autoshard.microbatch.searching import searched
from autoshard.microbatch.status import Move, Status, place_of, slice_along
from autoshard.trace import subjaxprs, types_of
from autoshard.trace.mapped import BODY, ENTERING, LEAVING
from autoshard.trace.structure import called_with, opened, with_bodies


def in_microbatches(jaxpr: ClosedJaxpr, graph: Graph, rules: Sequence[Rule | None], loop: Loop) -> Callable[..., list[Any]]:
    """The function of ``jaxpr``, from flat arguments to flat results, in the microbatches of a plan for it."""
    program = _Program(ops_by_path(graph), rules, loop, graph)

    def function(*arguments: Any) -> list[Any]:
        whole: dict[int, Any] = dict(zip(graph.arguments, arguments, strict=True))

        def run(interpreter: Interpreter) -> list[Any]:
            return interpreter.run(jaxpr.jaxpr, jaxpr.consts, arguments)

        run(_Around(program, "before", whole))

        def microbatch(totals: tuple, index: Any) -> tuple[tuple, tuple]:
            inside = Inside(program, whole, index, dict(zip(loop.accumulated, totals, strict=True)))
            run(inside)
            return tuple(inside.totals.values()), tuple(inside.made[value] for value in loop.stacked)

        start = tuple(neutral(graph, value, loop.status(value).operator) for value in loop.accumulated)
        totals, stacked = lax.scan(microbatch, start, jnp.arange(loop.n))
        for value, total in zip(loop.accumulated, totals, strict=True):
            whole[value] = total.astype(graph.values[value].dtype)
        for value, parts in zip(loop.stacked, stacked, strict=True):
            whole[value] = put_together(parts, loop.status(value))
        return run(_Around(program, "after", whole))

    return function


@dataclass(frozen=True, slots=True, eq=False)
class _Program:
    """What all interpreters of a program share."""

    ops: Mapping[Path, Op]
    rules: Sequence[Rule | None]
    loop: Loop
    graph: Graph


class _Around(AsItIs):
    """Evaluates what runs before or after the loop.

    Attributes:
        whole: per value the array, as far as it is made.
    """

    def __init__(self, program: _Program, phase: str, whole: dict[int, Any]):
        super().__init__(program.ops)
        self._loop, self._phase, self.whole = program.loop, phase, whole

    def op(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        return self._evaluated(op, partial(bind, eqn, operands))

    def control_flow(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        return self._evaluated(op, partial(self.rebound, op, eqn, operands))

    def mapped(self, eqn: JaxprEqn, operands: list[Any], path: Path) -> list[Any]:
        leaving = _leaving(self.ops, eqn, path)
        if self._loop.phases[next(op.index for op in leaving if op is not None)] != self._phase:
            return [None if op is None else self.whole.get(op.results[0]) for op in leaving]
        results = apply(eqn, operands)
        self.whole.update((op.results[0], x) for op, x in zip(leaving, results, strict=True) if op is not None)
        return results

    def _evaluated(self, op: Op, evaluate: Callable[[], list[Any]]) -> list[Any]:
        phase = self._loop.phases[op.index]
        runs = phase == self._phase or (self._phase == "before" and op.index in self._loop.twice)
        if runs:
            results = evaluate()
            self.whole.update(zip(op.results, results, strict=True))
            return results
        return [self.whole.get(value) for value in op.results]


@dataclass(frozen=True)
class _Strided(Sharded):
    """An op on every ``n``-th part of what is split.

    Attributes:
        index: of the microbatch.
        inner: how many indices in a row of the factor that is split an example has.
        origin: the source line of the op.
    """

    index: Any = 0
    inner: int = 1
    origin: Any = None

    def positions(self, layout: Layout, shape: tuple[int, ...], dim: int, counted: int, dtype: Any) -> Any:
        steps, inner = lax.broadcasted_iota(dtype, shape, dim), jnp.asarray(self.inner, dtype)
        if layout[0] != counted:
            return steps
        return (steps // inner * self.mesh.size + self.index.astype(dtype)) * inner + steps % inner

    def part(self, x: Any, layout: Layout, dim: int, size: int) -> Any:
        return taken(x, slice_along(dim, self.inner), self.index, self.mesh.size)

    def start(self, layout: Layout, dim: int, size: int) -> Any:
        """0: what is split nowhere starts there.

        Raises:
            TraceError: the op looks its examples up by position.
        """
        if layout[0] == dim:
            raise TraceError(
                f"microbatches have every n-th example each, and {self.primitive} at {self.origin} looks examples up by position. "
                "Leave microbatches out."
            )
        return 0

    def partial(self) -> dict[str, tuple[str, ...]]:
        """Nothing: partial results are accumulated by the loop."""
        return {}


class Inside(Interpreter):
    """Evaluates what runs in the loop, for one microbatch.

    Attributes:
        made: per value of the top level what this microbatch made of it.
        totals: per value that is accumulated its total, to which this microbatch's is added where it is made: a compiler may fuse the two,
            and what the product reads is not held until the end.
    """

    def __init__(self, program: _Program, whole: Mapping[int, Any], index: Any, totals: dict[int, Any], is_body: bool = False):
        super().__init__(program.ops, differentiable=False)
        self._program, self._loop, self._whole, self._index, self._is_body = program, program.loop, whole, index, is_body
        self.made: dict[int, Any] = {}
        self.totals = totals

    @classmethod
    def of(cls, ops: Mapping[Path, Op], graph: Graph, rules: Sequence[Rule | None], loop: Loop) -> Callable[[Any], Inside]:
        """From the index of a microbatch to the interpreter of the bodies of operations in it."""
        program = _Program(ops, rules, loop, graph)
        return lambda index: cls(program, {}, index, {}, is_body=True)

    def region(self) -> Inside:
        return Inside(self._program, self._whole, self._index, {}, is_body=True)

    def op(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        if self._runs(op):
            operands = self._operands(op, operands)
            is_split = self._loop.n > 1 and self._loop.moves[op.index].factor >= 0
            return self._keep(op, self._split(op, eqn, operands) if is_split else bind(eqn, operands))
        return [None] * len(op.results)

    def control_flow(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        if self._runs(op):
            move = self._loop.moves[op.index]
            is_whole = all(status.is_whole for status in move.reads)
            evaluate = _unchanged if is_whole else _search if move.search else BODIES[eqn.primitive.name]
            return self._keep(op, evaluate(self, op, eqn, self._operands(op, operands)))
        return [None] * len(op.results)

    def mapped(self, eqn: JaxprEqn, operands: list[Any], path: Path) -> list[Any]:
        """The results of a shard_map whose body computes on what its shards have of the microbatch."""
        leaving = _leaving(self.ops, eqn, path)
        if not self._runs(next(op for op in leaving if op is not None)):
            return [None] * len(leaving)
        entering = [self.ops.get((*path, ENTERING, k)) for k in range(len(operands))]
        ends = zip(entering, operands, eqn.invars, strict=True)
        read = [unread(variable) if op is None else self._operands(op, [x])[0] for op, x, variable in ends]

        def body(index: Any, *shards: Any) -> tuple[Any, ...]:
            inside = Inside(self._program, {}, index, {}, is_body=True)
            return tuple(inside.run(*opened(eqn.params["jaxpr"]), shards, (*path, BODY)))

        params = {name: eqn.params[name] for name in ("mesh", "out_specs", "check_vma")}
        specs, axes = (PartitionSpec(), *eqn.params["in_specs"]), eqn.params["newly_manual_axes"]
        results = jax.shard_map(body, in_specs=specs, axis_names=axes, **params)(self._index, *read)
        for op, x in zip(leaving, results, strict=True):
            if op is not None:
                self._keep(op, [x])
        return list(results)

    def _runs(self, op: Op) -> bool:
        return self._is_body or self._loop.phases[op.index] == "inside"

    def _keep(self, op: Op, results: Sequence[Any]) -> list[Any]:
        self.made.update(zip(op.results, results, strict=True))
        for value, x in zip(op.results, results, strict=True):
            if (total := self.totals.get(value)) is not None:
                self.totals[value] = COMBINED[self._loop.status(value).operator](total, x.astype(total.dtype))
        return list(results)

    def _split(self, op: Op, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """The results of an op on what it reads of the microbatch."""
        values, n, rule = self._program.graph.values, self._loop.n, self._program.rules[op.index]
        assert rule is not None, "a factor is one of a rule's"
        move = self._loop.moves[op.index]
        choice: Choice = ((move.factor, -1),)
        groups = regrouped(op, rule, move.factor, n)

        def bound(*operands: Any, **replaced: Any) -> list[Any]:
            return bind_part(eqn, operands, **groups, **replaced)

        whole, made = (tuple(values[value].shape for value in side) for side in (op.operands, op.results))
        mesh = Mesh.of({"microbatch": n})
        part = _Strided(op.primitive, op.params, bound, rule, choice, mesh, whole, made, self._index, move.inner, op.origin)
        return part.computed(operands)

    def _operands(self, op: Op, given: Sequence[Any]) -> list[Any]:
        """The operands as this microbatch reads them; ``given`` are those made in it, constants, and arguments whole."""
        move = self._loop.moves[op.index]
        return [self._operand(op, move, place, x) for place, x in enumerate(given)]

    def _operand(self, op: Op, move: Move, place: int, x: Any) -> Any:
        value, read = op.operands[place], move.reads[place]
        if read.is_whole and value in self._whole and not self._is_body:
            return self._part(op, move, place, self._whole[value])
        if self._is_body or value in self.made:
            return self._part(op, move, place, x) if read.is_whole else x
        if read.kind == "slice":  # an argument's
            return taken(self._whole[value], read, self._index, self._loop.n)
        return self._part(op, move, place, x)

    def _part(self, op: Op, move: Move, place: int, x: Any) -> Any:
        """The part of a whole operand that a microbatch reads: all, or a slice along the factor that is split."""
        rule = self._program.rules[op.index]
        if move.made and (made := move.made[place]) is not None:
            dtype = self._program.graph.values[op.operands[place]].dtype
            filled = jnp.full(made.shape, made.number, dtype)
            return filled if made.dim < 0 else filled + lax.broadcasted_iota(dtype, made.shape, made.dim) // jnp.asarray(made.each, dtype)
        if move.factor < 0 or rule is None:
            return x
        at = place_of(rule, rule.operands[place], move.factor)
        return x if at is None else taken(jnp.asarray(x), slice_along(at[0], move.inner * at[1]), self._index, self._loop.n)

    # -- bodies --------------------------------------------------------------------------------------------------------------

    def body(self, op: Op, number: int, jaxpr: ClosedJaxpr | Jaxpr) -> Callable[..., list[Any]]:
        """A body of an op as a function of what a microbatch has of its arguments."""
        return lambda *arguments: self.region().run(*opened(jaxpr), arguments, (*op.path, number))

    def converted(self, values: Sequence[Any], have: Sequence[Status], want: Sequence[Status]) -> list[Any]:
        """Values, of those that are whole the slices where these are wanted."""
        return [
            taken(jnp.asarray(x), wanted, self._index, self._loop.n) if wanted.kind == "slice" and had.is_whole else x
            for x, had, wanted in zip(values, have, want, strict=True)
        ]

    def statuses(self, values: Sequence[int]) -> list[Status]:
        """The statuses of values in bodies."""
        return [self._loop.status(value) for value in values]

    def move(self, op: Op) -> Move:
        """How an op runs."""
        return self._loop.moves[op.index]


def _leaving(ops: Mapping[Path, Op], eqn: JaxprEqn, path: Path) -> list[Op | None]:
    """The ops of a shard_map's results; None for those that nothing reads."""
    return [ops.get((*path, LEAVING, k)) for k in range(len(eqn.outvars))]


# -- control flow ------------------------------------------------------------------------------------------------------------


def _unchanged(inside: Inside, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    return AsItIs(inside.ops).rebound(op, eqn, operands)


def _search(inside: Inside, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (keys, numbers, *_), side = operands, inside.move(op).search
    assert side is not None, "a search has a side"
    found = searched(jnp.asarray(keys), jnp.asarray(numbers), side)
    return [found.astype(type.dtype) for type in types_of(eqn.outvars)]


def _scan(inside: Inside, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (jaxpr,), body, parts = subjaxprs(eqn), op.bodies[0], partial(scan_parts, eqn.params)
    consts, carry, scanned = parts(operands)
    n_carry = len(carry)
    carried, made = inside.statuses(parts(body.inputs)[1]), inside.statuses(body.outputs[:n_carry])
    run = inside.body(op, 0, jaxpr)
    types = types_of(parts(opened(jaxpr)[0].invars)[1])

    def trip(carry: tuple, slices: tuple) -> tuple[tuple, tuple]:
        results = run(*consts, *carry, *slices)
        return tuple(inside.converted(results[:n_carry], made, carried)), tuple(results[n_carry:])

    start = inside.converted(carry, parts(inside.move(op).reads)[1], carried)
    start = tuple(jnp.asarray(x, type.dtype) for x, type in zip(start, types, strict=True))
    last, stacked = lax.scan(trip, start, tuple(scanned), eqn.params["length"], eqn.params["reverse"], eqn.params["unroll"])
    return [*last, *stacked]


def _while(inside: Inside, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    condition, jaxpr = subjaxprs(eqn)
    of_condition, of_body, carry = operands[:n_cond], operands[n_cond : n_cond + n_body], operands[n_cond + n_body :]
    carried, made = inside.statuses(op.bodies[1].inputs[n_body:]), inside.statuses(op.bodies[1].outputs)
    goes_on, run = inside.body(op, 0, condition), inside.body(op, 1, jaxpr)
    start = inside.converted(carry, inside.move(op).reads[n_cond + n_body :], carried)
    start = tuple(jnp.asarray(x, type.dtype) for x, type in zip(start, types_of(opened(jaxpr)[0].invars[n_body:]), strict=True))
    return list(
        lax.while_loop(
            lambda carry: goes_on(*of_condition, *carry)[0],
            lambda carry: tuple(inside.converted(run(*of_body, *carry), made, carried)),
            start,
        )
    )


def _cond(inside: Inside, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    wanted = inside.statuses(op.results)

    def branch(number: int, jaxpr: ClosedJaxpr | Jaxpr) -> Callable[..., tuple]:
        run, have = inside.body(op, number, jaxpr), inside.statuses(op.bodies[number].outputs)
        return lambda *arguments: tuple(jnp.asarray(x) for x in inside.converted(run(*arguments), have, wanted))

    branches = [branch(number, jaxpr) for number, jaxpr in enumerate(subjaxprs(eqn))]
    return list(lax.switch(jnp.asarray(operands[0], jnp.int32), branches, *operands[1:]))


def _checkpoint(inside: Inside, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (old,) = subjaxprs(eqn)
    types = [jax.typeof(x) for x in operands]
    new, constants = retraced(eqn.primitive.name, inside.body(op, 0, old), [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in types])
    return bind(eqn, [*constants, *operands], **with_bodies(eqn, [old], [new]))


def _solve(inside: Inside, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    (solver,) = subjaxprs(eqn)
    return inside.body(op, 0, solver)(*(operands[k] for k in called_with(eqn.primitive.name, eqn.params, len(operands))))


BODIES: Mapping[str, Callable[[Inside, Op, JaxprEqn, list[Any]], list[Any]]] = {
    "cond": _cond,
    "custom_linear_solve": _solve,
    "remat2": _checkpoint,
    "scan": _scan,
    "while": _while,
}
