"""One program for a whole pipeline: the layers of a scan, divided into stages that all compute at the same time on different microbatches.

A scan of ``L`` layers over stacked weights becomes a scan over *ticks*. Each tick shifts a buffer, with a microbatch for each of ``S``
stages, by one stage, and applies ``K = L / S`` layers to it. In tick ``t`` stage ``s`` has microbatch ``t - s``, so that ``m`` microbatches
take ``m + S - 1`` ticks. The scan of the backward pass has its data shifted the other way, and goes through the ticks from the
last to the first: the same microbatch is at the same stage in the same tick, and reads what the forward pass kept in that tick.

Stages are a dimension of arrays like any other. It is constrained to the mesh axis `STAGE_AXIS`: stages are then computed by different
devices, and a shift is one collective permute of a microbatch's activations. All else of the step, such as the embedding, the loss and the
optimizer, is unchanged, and the devices of all stages share its work.

In ``v`` *rounds* each microbatch goes through all stages ``v`` times, each time through ``K = L / (v S)`` other layers: from the last stage
back to the first one, as in the interleaved schedule of Narayanan et al. (2021). Groups of ``S`` microbatches end all their rounds before
the next group enters, so that no microbatch waits: there are ``v m + S - 1`` ticks of ``1 / v`` of the work. The layers of a stage are then
not next to each other in the arrays of the step, whose stacks are exchanged once a step: weights before the ticks, gradients after them.

In the first and last ticks some stages have no microbatch. What they compute is never read: sums over microbatches select what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial as partial_
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from autoshard.errors import PipelineError
from autoshard.ir import Graph, Op, Rule
from autoshard.ir.scan import num_carry, num_consts, scan_parts
from autoshard.lower import AsItIs, Path, ops_by_path
from autoshard.microbatch.arrays import COMBINED, neutral, parts_of, put_together
from autoshard.microbatch.batch import loop_of_batch
from autoshard.microbatch.plan import Loop
from autoshard.microbatch.provenance import Provenance
from autoshard.microbatch.rewrite import Inside
from autoshard.microbatch.rules import batch_rules
from autoshard.microbatch.status import Status, partial, slice_along
from autoshard.pipeline.ticks import Order, Ticks, layered, of_rounds, on_stages, plain, staged
from autoshard.primitives import is_inlined
from autoshard.trace import Traced, rebuilt, subjaxprs, types_of
from autoshard.trace.structure import opened


def in_one_program(traced: Traced, n_stages: int, n_microbatches: int, n_rounds: int = 1) -> Traced:
    """The program with its scanned layers in stages, which have a dimension of their own that is constrained to `STAGE_AXIS`; itself where
    it was made so before.

    Args:
        n_rounds: how often a microbatch goes through all stages, each time through other layers.

    Results are those of the whole batch, up to the order in which sums are added.

    Raises:
        PipelineError: it has no scanned layers, or ``n_stages`` does not divide them.
        TraceError: the batch cannot be computed in so many microbatches.
    """
    if (traced.stages, traced.microbatches, traced.rounds) == (n_stages, n_microbatches, n_rounds):
        return traced
    graph, rules = traced.graph, batch_rules(traced.graph)
    loop = loop_of_batch(graph, rules, n_microbatches)
    order = Order(n_stages, n_microbatches, n_rounds)
    stacks = _stacks(graph, loop, order)
    if not stacks:
        raise PipelineError(
            f"one program runs layers that are one lax.scan over their stacked weights, at the top level of the step, in stages; "
            f"{graph.name!r} has {_scans(graph)}. Write the layers as such a scan, or use another schedule than 'one_program'."
        )
    ticking = _Ticking(ops_by_path(graph), graph, rules, loop, stacks, order)

    def function(*arguments: Any) -> list[Any]:
        return [plain(x) for x in ticking.run(traced.jaxpr.jaxpr, traced.jaxpr.consts, arguments)]

    made = rebuilt(traced, jax.make_jaxpr(function)(*types_of(traced.jaxpr.jaxpr.invars)), n_microbatches)
    again = f"; each microbatch goes through all stages {n_rounds} times" if n_rounds > 1 else ""
    layers = ", ".join(dict.fromkeys(f"{op.equation.params['length']} at {op.origin}" for op in stacks))
    note = (
        f"one program runs {n_stages} stages of the scanned layers ({layers}) at the same time, on {n_microbatches} microbatches, in "
        f"{order.ticks} ticks, in {n_stages - 1} of which each stage has none{again}"
    )
    return replace(made, stages=n_stages, rounds=n_rounds, graph=replace(made.graph, assumptions=(*made.graph.assumptions, note)))


# -- which scans are stacks of layers ------------------------------------------------------------------------------------------


def _stacks(graph: Graph, loop: Loop, order: Order) -> tuple[Op, ...]:
    """The scans that carry examples through layers: they read stacked weights, or make their gradients.

    Raises:
        PipelineError: the stages do not divide the layers of one, or layers have a shard_map.
    """
    found = tuple(op for op in graph.ops if op.primitive == "scan" and _carries_examples(op, loop) and _has_weights(graph, op, loop))
    for op in found:
        if op.equation.params["length"] % (order.stages * order.rounds):
            rounds = f" in {order.rounds} rounds" if order.rounds > 1 else ""
            raise PipelineError(
                f"stages of one program have as many layers each{rounds}: the scan at {op.origin} has {op.equation.params['length']}, got "
                f"stages={order.stages}. Use a number of stages that divides the layers{rounds}."
            )
    mapped = next((one for op in found for one in op.walk() if one.mapped), None)
    if mapped is not None:
        raise PipelineError(
            "stages of one program compute their layers at the same time, as array operations with a dimension of stages, and the "
            f"shard_map at {mapped.origin} has a mesh of its own without an axis for it. Write its work with sharding constraints instead, "
            "or leave stages out."
        )
    grouped = next((inner for op in found for inner in op.walk() if inner.primitive == "ragged_dot_general"), None)
    if grouped is not None and any(_keeps_order(graph, op, loop) for op in found):
        raise PipelineError(
            "stages of one program keep what layers hand on in the examples' order, and layers with the grouped product at "
            f"{grouped.origin} hand on rows in the order of their groups. Put jax.checkpoint around the layer, which then sorts them "
            "again, or use another schedule than 'one_program'."
        )
    return found


def _keeps_order(graph: Graph, op: Op, loop: Loop) -> bool:
    """Whether layers hand on rows in the order of a sort, or the sizes of their groups in a microbatch."""
    known = Provenance(graph)
    counts = (v for v in op.bodies[0].outputs[num_carry(op.params) :] if loop.status(v).kind == "partial" and known.is_count(v))
    return any(loop.status(value).kind == "rows" for value in op.bodies[0].outputs) or any(True for _ in counts)


def _carries_examples(op: Op, loop: Loop) -> bool:
    first, n = num_consts(op.params), num_carry(op.params)
    inputs = op.bodies[0].inputs[first : first + n]
    return loop.phases[op.index] == "inside" and any(loop.status(value).kind == "slice" for value in inputs)


def _has_weights(graph: Graph, op: Op, loop: Loop) -> bool:
    first, body = num_consts(op.params) + num_carry(op.params), op.bodies[0]
    read = [value for value in body.inputs[first:] if loop.status(value).is_whole]
    made = [value for value in body.outputs[num_carry(op.params) :] if loop.status(value).kind == "partial"]
    return any(graph.values[value].rank and "float" in graph.values[value].dtype for value in (*read, *made))


def _scans(graph: Graph) -> str:
    inner = [op for op in graph.walk() if op.primitive == "scan"]
    return f"scans, but none that does so, such as that at {inner[0].origin}" if inner else "no scan"


# -- the interpreter -----------------------------------------------------------------------------------------------------------


class _Ticking(AsItIs):
    """Evaluates a step with its stacks of layers in ticks."""

    def __init__(
        self, ops: Mapping[Path, Op], graph: Graph, rules: Sequence[Rule | None], loop: Loop, stacks: Collection[Op], order: Order
    ):
        super().__init__(ops)
        self._graph, self._loop, self._order = graph, loop, order
        self._stacks = {op.path for op in stacks}
        self._inside = Inside.of(ops, graph, rules, loop)
        self._weights: dict[int, tuple[Any, Any]] = {}

    def _equation(self, eqn: JaxprEqn, operands: list[Any], path: Path) -> list[Any]:
        if path in self._stacks:
            return _Stack(self.ops[path], eqn, self._graph, self._loop, self._order, self._inside, self._staged).run(operands)
        return super()._equation(eqn, operands if is_inlined(eqn.primitive.name) else [plain(x) for x in operands], path)

    def _staged(self, x: Any) -> Any:
        """Weights as stages read them: one array for the forward and the backward pass, which share what is gathered of it."""
        if id(x) not in self._weights:
            self._weights[id(x)] = x, staged(jnp.asarray(x), self._order)
        return self._weights[id(x)][1]


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """What a tick reads beside its buffers: a function of the tick's slices and of the stages' microbatches, whose values stages have."""

    slices: Any
    take: Callable[[Any, Any], Any]


class _Stack:
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

        def tick(state: tuple, given: tuple) -> tuple[tuple, tuple]:
            buffers, totals, sums = [on_stages(x) for x in state[0]], state[1], state[2]
            number, of_slices = given
            task = self.order.task(number)
            valid = (task >= 0) & (task < self.order.tasks)
            task = jnp.clip(task, 0, self.order.tasks - 1)
            rounds, at = self.order.round(task), self.order.microbatch(task)
            enters_in = jnp.clip(number - self.first, 0, self.order.tasks - 1)
            moved = [self._moved(x, enter(enters_in), self.order.round(enters_in)) for x, enter in zip(buffers, enters, strict=True)]
            consts = [read.take(None, at) for read in reads]
            of_layers = [read.take(part, task) for read, part in zip(slices, of_slices, strict=True)]
            left, made = self._layers(at, consts, moved, of_layers)
            counts = [valid & (rounds == number) if self.order.rounds > 1 else valid for number in range(self.order.rounds)]
            pairs = zip(totals, counts, strict=True)
            kept = [[self._added(*each, counting, 1) for each in zip(total, made, outputs, strict=True)] for total, counting in pairs]
            ended = [self._added(*each, counts[self.last_round], 0) for each in zip(sums, left, carried, strict=True)]
            by_tick = [x if status.kind == "slice" else None for x, status in zip(made, outputs, strict=True)]
            through = [x if status.kind == "slice" else None for x, status in zip(left, carried, strict=True)]
            return (left, kept, ended), (through, by_tick)

        start = [self._on_each(x) if status.is_whole else self._empty(x, status) for _, x, status in each]
        given = jnp.arange(self.order.ticks, dtype=jnp.int32), [read.slices for read in slices]
        (_, totals, sums), (through, by_tick) = lax.scan(tick, (start, totals, sums), given, self.order.ticks, self.reverse)
        results = [self._left(x, total, status, k) for k, (x, total, status) in enumerate(zip(through, sums, carried, strict=True))]
        return results + [self._stacked(x, total, k) for k, (x, *total) in enumerate(zip(by_tick, *totals, strict=True), self.n_carry)]

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

    def _layers(self, at: Any, consts: Sequence[tuple[Any, int | None]], carry: Sequence[Any], slices: Sequence[Any]) -> tuple[list, list]:
        """What comes of the ``K`` layers of all stages: what they carry on ``(S, ...)`` and what each makes ``(K, S, ...)``."""
        (jaxpr,), op = subjaxprs(self.eqn), self.op
        a, b = self.n_consts, self.n_consts + self.n_carry

        def layer(index: Any, *arguments: Any) -> list[Any]:
            inside = self.inside(index)
            results = inside.run(*opened(jaxpr), arguments, (*op.path, 0))
            carried = inside.converted(results[: self.n_carry], self.leaving[: self.n_carry], self.entering[a:b])
            return [jnp.asarray(x) for x in (*carried, *results[self.n_carry :])]

        axes = (0, *(axis for _, axis in consts), *[0] * (len(carry) + len(slices)))
        of_all = jax.vmap(layer, axes)

        def trip(carry: tuple, slices: tuple) -> tuple[tuple, tuple]:
            results = of_all(at, *(x for x, _ in consts), *carry, *slices)
            return tuple(results[: self.n_carry]), tuple(results[self.n_carry :])

        left, made = lax.scan(trip, tuple(carry), tuple(slices), self.n_layers, self.reverse, self.eqn.params["unroll"])
        return [on_stages(x) for x in left], list(made)

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
        if status.kind == "slice":
            return None
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
