"""A scan over layers in ticks, in each of which all stages apply their layers to a microbatch each (`autoshard.rewrite.one_program`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial as partial_
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from autoshard.errors import PipelineError
from autoshard.ir import Graph, Op
from autoshard.ir.scan import num_carry, num_consts, scan_parts
from autoshard.microbatch.arrays import COMBINED, neutral, parts_of, put_together
from autoshard.microbatch.plan import Loop
from autoshard.microbatch.rewrite import Inside
from autoshard.microbatch.status import Status, partial, slice_along
from autoshard.rewrite.late import InTwo, in_two, replayed
from autoshard.rewrite.ticks import Order, Ticks, layered, of_own_ticks, of_rounds, on_stages, plain
from autoshard.trace import subjaxprs, types_of
from autoshard.trace.structure import opened


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """What a tick reads beside its buffers: a function of the tick's slices and of the stages' tasks, whose values stages have."""

    slices: Any
    take: Callable[[Any, Any], Any]

    def of_task(self, task: Any, stages: int) -> Any:
        """The same of one task on all stages, each in its own tick."""
        own = lax.iota(jnp.int32, stages)
        return self.take(None if self.slices is None else of_own_ticks(self.slices, task + own, 1), jnp.full_like(own, task))


class StageScan:
    """A scan over layers, in ticks."""

    def __init__(self, op: Op, eqn: JaxprEqn, graph: Graph, loop: Loop, order: Order, inside: Callable[[Any], Inside], staged: Callable):
        self.op, self.eqn, self.graph, self.inside, self.staged = op, eqn, graph, inside, staged
        self.order, self.n, self.n_layers = order, loop.n, eqn.params["length"] // (order.stages * order.rounds)
        self.reverse = bool(eqn.params["reverse"])
        self.n_consts, self.n_carry = num_consts(eqn.params), num_carry(eqn.params)
        body = op.bodies[0]
        self.entering = [loop.status(value) for value in body.inputs]
        self.leaving = [loop.status(value) for value in body.outputs]
        self.outputs = body.outputs
        self.types = types_of(opened(subjaxprs(eqn)[0])[0].invars)
        self.in_two: InTwo | None = None

    @property
    def first(self) -> int:
        """The stage at which microbatches enter: the first, or of a scan in reverse the last."""
        return self.order.stages - 1 if self.reverse else 0

    @property
    def first_round(self) -> int:
        """The round in which they enter."""
        return self.order.rounds - 1 if self.reverse else 0

    @property
    def last_round(self) -> int:
        """The round in which they leave."""
        return self.order.rounds - 1 - self.first_round

    @property
    def last(self) -> int:
        """The stage at which they leave."""
        return self.order.stages - 1 - self.first

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """The results of the scan, what it makes of examples layer by layer as `Ticks`."""
        parts = partial_(scan_parts, self.eqn.params)
        (consts, carry, scanned), (of_consts, carried, of_slices) = parts(operands), parts(self.entering)
        reads = [self._const(plain(x), status) for x, status in zip(consts, of_consts, strict=True)]
        carry = [jnp.asarray(plain(x), type.dtype) for x, type in zip(carry, parts(self.types)[1], strict=True)]
        each = [*zip(range(self.n_carry), carry, carried, strict=True)]
        enters = [self._entering(x, parts(self.op.bodies[0].inputs)[1][k], status) for k, x, status in each]
        slices = [self._scanned(x, status) for x, status in zip(scanned, of_slices, strict=True)]
        outputs = self.leaving[self.n_carry :]
        total = [self._total(self.outputs[self.n_carry + k], status, (self.n_layers,)) for k, status in enumerate(outputs)]
        totals = [total] * self.order.rounds
        sums = [self._on_each(x) if status.is_whole else self._total(self.outputs[k], status, ()) for k, x, status in each]
        start = [self._on_each(x) if status.is_whole else self._empty(x, status) for _, x, status in each]
        if self.order.weights_apart and self.reverse:
            self.in_two = self._in_two(reads, start, slices)
        given = jnp.arange(self.order.ticks, dtype=jnp.int32), [read.slices for read in slices]
        tick = partial_(self._tick, reads, enters, slices)
        (_, totals, sums), (through, by_tick, kept) = lax.scan(tick, (start, totals, sums), given, self.order.ticks, self.reverse)
        if self.in_two is not None:
            totals = self._with_late(totals, reads, slices, kept)
        results = [self._left(x, total, status, k) for k, (x, total, status) in enumerate(zip(through, sums, carried, strict=True))]
        return results + [self._stacked(x, total, k) for k, (x, *total) in enumerate(zip(by_tick, *totals, strict=True), self.n_carry)]

    def _tick(self, reads: Sequence[_Read], enters: Sequence, slices: Sequence[_Read], state: tuple, given: tuple) -> tuple[tuple, tuple]:
        """The state after one more tick, and what is kept of it."""
        buffers, totals, sums = [on_stages(x) for x in state[0]], state[1], state[2]
        number, of_slices = given
        outputs, carried = self.leaving[self.n_carry :], scan_parts(self.eqn.params, self.entering)[1]
        task = self.order.task(number)
        valid = (task >= 0) & (task < self.order.tasks)
        task = jnp.clip(task, 0, self.order.tasks - 1)
        rounds, at = self.order.round(task), self.order.microbatch(task)
        enters_in = jnp.clip(number - self.first, 0, self.order.tasks - 1)
        moved = [self._moved(x, enter(enters_in), self.order.round(enters_in)) for x, enter in zip(buffers, enters, strict=True)]
        consts = [read.take(None, at) for read in reads]
        of_layers = [read.take(part, task) for read, part in zip(slices, of_slices, strict=True)]
        left, made, kept = self._layers(at, consts, moved, of_layers)
        counts = self._counts(rounds, valid)
        totals = self._with(totals, made, counts)
        ended = [self._added(*each, counts[self.last_round], 0) for each in zip(sums, left, carried, strict=True)]
        by_tick = [x if status.kind == "slice" else None for x, status in zip(made, outputs, strict=True)]
        through = [x if status.kind == "slice" else None for x, status in zip(left, carried, strict=True)]
        return (left, totals, ended), (through, by_tick, kept)

    def _counts(self, rounds: Any, valid: Any = None) -> list[Any]:
        """Per round which stages have a task of it; None: all have."""
        if self.order.rounds == 1:
            return [valid]
        found = [rounds == number for number in range(self.order.rounds)]
        return found if valid is None else [valid & own for own in found]

    def _with(self, totals: Sequence, made: Sequence[Any], counts: Sequence[Any]) -> list[list]:
        """The totals of each round with what stages made in a tick."""
        outputs = self.leaving[self.n_carry :]
        pairs = zip(totals, counts, strict=True)
        return [[self._added(*each, counting, 1) for each in zip(total, made, outputs, strict=True)] for total, counting in pairs]

    def _stacked(self, by_tick: Any, total: Sequence[Any], k: int) -> Any:
        """What layers make, stacked up: of examples by tick, else of all of them."""
        status, dtype = self.leaving[k], self.graph.values[self.outputs[k]].dtype
        if status.kind == "slice":
            return Ticks(by_tick, status, self.order)
        made = layered(total)
        return made.astype(dtype) if status.kind == "partial" else made

    # -- what enters -----------------------------------------------------------------------------------------------------------

    def _const(self, x: Any, status: Status) -> _Read:
        """What all layers read: of examples each stage reads its microbatch."""
        if status.kind == "partial":
            raise self._refused("reads sums over all examples in each layer")
        if status.is_whole:
            return _Read(None, lambda _, at: (x, None))
        parts = parts_of(jnp.asarray(x), status, self.n)
        return _Read(None, lambda _, at: (jnp.take(parts, at, axis=0), 0))

    def _entering(self, x: Any, value: int, status: Status) -> Callable[[Any], Any]:
        """What enters the first stage in a task: one microbatch after the other. Of sums over examples all enters with the first one."""
        if status.kind == "slice":
            parts = parts_of(x, status, self.n)
            return lambda task: lax.dynamic_index_in_dim(parts, self.order.microbatch(task), 0, keepdims=False)
        if status.kind == "partial":
            nothing = neutral(self.graph, value, status.operator).astype(x.dtype)
            return lambda task: jnp.where(self.order.microbatch(task) == 0, x, nothing)
        return lambda task: x

    def _scanned(self, x: Any, status: Status) -> _Read:
        """What each layer reads of its own, ``(K, S, ...)`` in a tick."""
        if isinstance(x, Ticks):
            if status == x.status and (x.order, x.array.shape[1]) == (self.order, self.n_layers):
                return _Read(x.array, lambda part, task: part)
            x = x.whole
        if status.kind == "partial":
            raise self._refused("reads sums over all examples layer by layer")
        if status.is_whole:
            staged = self.staged(x)
            return _Read(None, lambda _, task: of_rounds(staged, self.order.round(task)))
        parts = parts_of(jnp.asarray(x), slice_along(status.dim + 1, status.inner), self.n)  # (m, L, ...)
        apart = parts.reshape(self.n, self.order.rounds, self.order.stages, self.n_layers, *parts.shape[2:])
        per_stage = on_stages(apart.transpose(2, 0, 1, *range(3, apart.ndim)))  # (S, m, v, K, ...)
        per_stage = per_stage.reshape(self.order.stages, self.order.tasks, *per_stage.shape[3:])

        def take(_: Any, task: Any) -> Any:
            at = self.order.microbatch(task) * self.order.rounds + self.order.round(task)
            own = jax.vmap(lambda x, i: lax.dynamic_index_in_dim(x, i, 0, keepdims=False))(per_stage, at)
            return jnp.swapaxes(own, 0, 1)

        return _Read(None, take)

    def _empty(self, x: Any, status: Status) -> Any:
        """The buffer before the first tick."""
        shape = [n // self.n if status.kind == "slice" and dim == status.dim else n for dim, n in enumerate(x.shape)]
        return on_stages(jnp.zeros((self.order.stages, *shape), x.dtype))

    def _on_each(self, x: Any) -> Any:
        """What is the same for all examples, such as a key or a count of layers, on each stage."""
        return on_stages(jnp.broadcast_to(x, (self.order.stages, *x.shape)))

    # -- in a tick -------------------------------------------------------------------------------------------------------------

    def _at(self, stage: int, like: Any) -> Any:
        """Whether an element of a buffer ``(S, ...)`` is at a stage."""
        return lax.broadcasted_iota(jnp.int32, like.shape, 0) == stage

    def _moved(self, x: Any, entering: Any, round_of_first: Any) -> Any:
        """The buffer of each stage's microbatch: what the stage before it made; at the first stage what enters, or begins another round."""
        to = -1 if self.reverse else 1
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            shifted = jnp.roll(x, to, 0)
        else:
            shifted = lax.pad(x, jnp.zeros((), x.dtype), [(to, -to, 0), *[(0, 0, 0)] * (x.ndim - 1)])
        entering = jnp.asarray(entering)[None]
        if self.order.rounds > 1:
            entering = jnp.where(round_of_first == self.first_round, entering, on_stages(lax.rev(x, [0])))
        return on_stages(jnp.where(self._at(self.first, x), entering, on_stages(shifted)))

    def _layers(self, at: Any, consts: Sequence[tuple[Any, int | None]], carry: Sequence[Any], slices: Sequence[Any]) -> tuple:
        """What comes of the ``K`` layers of all stages: what they carry on ``(S, ...)`` and what each makes ``(K, S, ...)``.

        What they make late is None, and what that reads of them comes last.
        """
        if (parts := self.in_two) is None:
            left, made = self._over_layers(self._layer, at, consts, carry, slices)
            return left, made, []
        left, found = self._over_layers(lambda *arguments: replayed(parts.early, arguments), at, consts, carry, slices)
        results = iter(found)
        made = [None if k in parts.outputs else next(results) for k in range(self.n_carry, len(self.leaving))]
        return left, made, [on_stages(x, 1) for x in results]

    def _over_layers(self, layer: Callable, at: Any, consts: Sequence[tuple[Any, int | None]], carry: Sequence, slices: Sequence) -> tuple:
        axes = (0, *(axis for _, axis in consts), *[0] * (len(carry) + len(slices)))
        of_all = jax.vmap(layer, axes)
        if self.n_layers == 1 and self.in_two is not None:  # a loop of one trip would fill what it stacks with zeros before
            results = of_all(at, *(x for x, _ in consts), *carry, *(x[0] for x in slices))
            return [on_stages(x) for x in results[: len(carry)]], [x[None] for x in results[len(carry) :]]

        def trip(carry: tuple, slices: tuple) -> tuple[tuple, tuple]:
            results = of_all(at, *(x for x, _ in consts), *carry, *slices)
            return tuple(results[: len(carry)]), tuple(results[len(carry) :])

        left, made = lax.scan(trip, tuple(carry), tuple(slices), self.n_layers, self.reverse, self.eqn.params["unroll"])
        return [on_stages(x) for x in left], list(made)

    def _layer(self, index: Any, *arguments: Any) -> list[Any]:
        """The results of a layer of the microbatch with this index."""
        inside = self.inside(index)
        (jaxpr,), carried = subjaxprs(self.eqn), slice(self.n_consts, self.n_consts + self.n_carry)
        results = inside.run(*opened(jaxpr), arguments, (*self.op.path, 0))
        left = inside.converted(results[: self.n_carry], self.leaving[: self.n_carry], self.entering[carried])
        return [jnp.asarray(x) for x in (*left, *results[self.n_carry :])]

    # -- gradients of weights, which come late ---------------------------------------------------------------------------------

    def _in_two(self, reads: Sequence[_Read], start: Sequence[Any], slices: Sequence[_Read]) -> InTwo | None:
        """A layer in two; None where there is nothing to compute late."""

        def of_one(buffers: Sequence[Any], tick: Any) -> list[Any]:
            task = jnp.zeros(self.order.stages, jnp.int32)
            consts = [x if axis is None else x[0] for x, axis in (read.take(None, task) for read in reads)]
            return [task[0], *consts, *(x[0] for x in buffers), *(read.of_task(tick, self.order.stages)[0, 0] for read in slices)]

        layer = jax.make_jaxpr(self._layer)(*jax.eval_shape(of_one, start, jnp.zeros((), jnp.int32)))
        sums = [k for k in range(self.n_carry, len(self.leaving)) if self.leaving[k].kind == "partial"]
        return in_two(layer, range(1 + self.n_consts, 1 + self.n_consts + self.n_carry), sums)

    def _with_late(self, totals: Sequence, reads: Sequence[_Read], slices: Sequence[_Read], kept: Sequence[Any]) -> list[list]:
        """The totals with late gradients, all stages' of a task at the same time; each has kept what they read in its own tick."""
        parts, n = self.in_two, self.order.stages
        assert parts is not None, "some are late"

        def of_task(totals: Sequence, number: Any) -> tuple[list[list], None]:
            task = jnp.full(n, number, jnp.int32)
            at = self.order.microbatch(task)
            given = [read.of_task(number, n) for read in (*slices, *(_Read(x, lambda part, _: part) for x in kept))]
            consts = [read.take(None, at) for read in reads]
            _, found = self._over_layers(lambda *arguments: replayed(parts.late, arguments), at, consts, (), given)
            made = [None] * len(self.leaving)
            for k, x in zip(sorted(parts.outputs), found, strict=True):
                made[k] = x
            return self._with(totals, made[self.n_carry :], self._counts(self.order.round(task))), None

        late = [[x if k + self.n_carry in parts.outputs else None for k, x in enumerate(total)] for total in totals]
        added, _ = lax.scan(of_task, late, jnp.arange(self.order.tasks, dtype=jnp.int32))
        return [[own if x is None else x for own, x in zip(*each, strict=True)] for each in zip(totals, added, strict=True)]

    def _total(self, value: int, status: Status, shape: tuple[int, ...]) -> Any:
        """What is summed over microbatches, or the same for all of them, before the first one; None for what each has its own of."""
        if status.kind == "slice":
            return None
        if "key" in self.graph.values[value].dtype:
            raise self._refused("makes random keys layer by layer, which are arrays of another kind")
        operator = status.operator if status.kind == "partial" else "sum"
        start = neutral(self.graph, value, operator)
        start = start if status.kind == "partial" else start.astype(self.graph.values[value].dtype)
        return jnp.broadcast_to(jnp.expand_dims(start, range(len(shape) + 1)), (*shape, self.order.stages, *start.shape))

    def _added(self, total: Any, x: Any, status: Status, valid: Any, axis: int) -> Any:
        """The total with what stages made of a microbatch; those that have none leave it as it was."""
        if status.kind == "slice" or x is None:
            return total
        if valid is None:
            return COMBINED[status.operator](total, x.astype(total.dtype))
        counts = jnp.broadcast_to(lax.expand_dims(valid, [d for d in range(x.ndim) if d != axis]), x.shape)
        if status == partial("sum"):  # masked first: devices add up their own parts, and combine them after the last tick
            return total + jnp.where(counts, x.astype(total.dtype), jnp.zeros((), total.dtype))
        new = COMBINED[status.operator](total, x.astype(total.dtype)) if status.kind == "partial" else x
        return jnp.where(counts, new, total)

    # -- what leaves -----------------------------------------------------------------------------------------------------------

    def _left(self, through: Any, total: Any, status: Status, k: int) -> Any:
        """What the scan carries out of its last layer."""
        if status.kind == "slice":
            kept = lax.slice_in_dim(on_stages(through, 1), self.last, self.last + self.order.tasks)  # the last stage's
            return put_together(self._of_last(self.order.of_round(kept, self.last_round), 1), status)
        last = self._of_last(total, 0)
        return last.astype(self.types[self.n_consts + k].dtype) if status.kind == "partial" else last

    def _of_last(self, x: Any, axis: int) -> Any:
        """The part of an array that the last stage has: a sum over stages, which puts it wherever its readers are."""
        if not jnp.issubdtype(x.dtype, jnp.number):
            return lax.index_in_dim(x, self.last, axis, keepdims=False)
        at = lax.broadcasted_iota(jnp.int32, x.shape, axis) == self.last
        return jnp.where(at, x, jnp.zeros((), x.dtype)).sum(axis, dtype=x.dtype)

    def _refused(self, why: str) -> PipelineError:
        return PipelineError(f"stages of one program compute microbatches, and the scan at {self.op.origin} {why}. Use another schedule.")
