"""A program with padded dimensions, evaluated equation by equation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from autoshard.ir import Op
from autoshard.ir.scan import num_carry
from autoshard.lower.interpret import Interpreter, Path, bind, ops_by_path, unread
from autoshard.rewrite.extents import Extent, Extents, inside, masked, padded_shape, resized
from autoshard.rewrite.padding_plan import Move, Plan
from autoshard.rewrite.padding_rules import Padding
from autoshard.trace.mapped import ENTERING, LEAVING
from autoshard.trace.structure import types_of


def padded_program(jaxpr: ClosedJaxpr, plan: Plan, results: Sequence[Extents]) -> ClosedJaxpr:
    """The program of padded arguments.

    Args:
        plan: of its graph; arguments have their values' extents.
        results: the extents in which it returns its results.
    """
    graph = plan.graph

    def function(*arguments: Any) -> list[Any]:
        found = _Region(ops_by_path(graph), plan).run(jaxpr.jaxpr, jaxpr.consts, arguments)
        return [resized(x, plan.of(value), want) for x, value, want in zip(found, graph.results, results, strict=True)]

    types = zip(types_of(jaxpr.jaxpr.invars), graph.arguments, strict=True)
    return jax.make_jaxpr(function)(*(_padded_type(aval, plan.of(value)) for aval, value in types))


def _padded_type(aval: Any, extents: Extents) -> Any:
    return jax.ShapeDtypeStruct(padded_shape(aval.shape, extents), aval.dtype, weak_type=aval.weak_type) if any(extents) else aval


class _Region(Interpreter):
    """Evaluates a region; arrays have the extents of their values.

    Attributes:
        masked: per value and what of it is overwritten, the array, which readers share.
        inside: per size and extent of a dimension, which of its positions are no padding.
    """

    def __init__(self, ops: Mapping[Path, Op], plan: Plan):
        super().__init__(ops, differentiable=False)
        self.plan = plan
        self.masked: dict[Any, Any] = {}
        self.inside: dict[tuple[int, Extent], Any] = {}

    def region(self) -> _Region:
        return _Region(self.ops, self.plan)

    def op(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        plan, move = self.plan, self.plan.moves.get(op.index)
        if move is None:
            return bind(eqn, operands)
        shapes = (tuple(plan.graph.values[value].shape for value in side) for side in (op.operands, op.results))

        def bound(*operands: Any, **replaced: Any) -> list[Any]:
            return bind(eqn, operands, **replaced)

        read = [self._read(op, move, k, x) for k, x in enumerate(operands)]
        results = Padding(op, bound, move.reads, move.makes, *shapes).computed(read)
        ends = zip(results, move.makes, op.results, strict=True)
        return [resized(x, have, plan.of(value)) for x, have, value in ends]

    def _read(self, op: Op, move: Move, k: int, x: Any) -> Any:
        """An operand with the padding that the operation reads."""
        value, want = op.operands[k], move.reads[k]
        over = tuple((dim, mask) for tensor, dim, mask in move.masks if tensor == k)
        have = self.plan.of(value)
        if have == want and not over:
            return x
        key = value, want, over
        if key not in self.masked:
            x = resized(x, have, want)
            for dim, mask in over:
                x = masked(x, dim, self._inside(x.shape[dim], want[dim]), mask)
            self.masked[key] = x
        return self.masked[key]

    def _inside(self, size: int, of: Extent) -> Any:
        if (size, of) not in self.inside:
            self.inside[size, of] = inside(size, of)
        return self.inside[size, of]

    # -- control flow ------------------------------------------------------------------------------------------------------

    def types(self, op: Op, number: int, body: Jaxpr) -> list[Any]:
        return [_padded_type(aval, of) for aval, of in zip(types_of(body.invars), self.plan.flows(op).inputs[number], strict=True)]

    def control_flow(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        ends = zip(operands, op.operands, self.plan.flows(op).operands, strict=True)
        entering = [resized(x, self.plan.of(value), want) for x, value, want in ends]
        results = self.rebound(op, eqn, entering)
        if op.primitive == "scan":  # what it stacks up has no padding along the new dimension
            first, whole = num_carry(op.params), [self.plan.of(value) for value in op.results]
            results[first:] = [resized(x, ((), *of[1:]), of) for x, of in zip(results[first:], whole[first:], strict=True)]
        return results

    def leave(self, op: Op, number: int, results: Sequence[Any]) -> list[Any]:
        ends = zip(results, op.bodies[number].outputs, self.plan.flows(op).outputs[number], strict=True)
        return [resized(x, self.plan.of(value), want) for x, value, want in ends]

    def mapped(self, eqn: JaxprEqn, operands: list[Any], path: Path) -> list[Any]:
        """The results of a user's shard_map, which reads and makes arrays without padding."""
        plan = self.plan

        def of(side: int, k: int) -> Extents | None:
            op = self.ops.get((*path, side, k))
            return None if op is None else plan.of((op.operands if side == ENTERING else op.results)[0])

        def converted(xs: Sequence[Any], side: int, convert: Callable[[Any, Extents], Any]) -> list[Any]:
            found = [of(side, k) for k in range(len(xs))]
            return [x if extents is None or not any(extents) else convert(x, extents) for x, extents in zip(xs, found, strict=True)]

        read = converted(operands, ENTERING, lambda x, have: resized(x, have, ((),) * len(have)))
        types = types_of(eqn.invars)  # of what nothing reads, arrays may have padding
        read = [unread(v) if jnp.shape(x) != type.shape else x for x, type, v in zip(read, types, eqn.invars, strict=True)]
        return converted(bind(eqn, read), LEAVING, lambda x, want: resized(x, ((),) * len(want), want))
