"""The function that a stage of a pipeline computes: what comes before the loop over microbatches, its part of that, and what follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

from autoshard.ir import Op
from autoshard.ir.scan import num_carry, num_consts
from autoshard.pipeline.micro import Evaluator, Micro, Sum
from autoshard.trace import subjaxprs
from autoshard.trace.structure import opened


@dataclass(frozen=True, slots=True)
class Message:
    """A value that one stage sends to others.

    Attributes:
        kind: ``"loop"``: of each microbatch; ``"part"``: the stage's part of a sum over microbatches; ``"value"``: another value outside
            the loop.
        value: its number in the graph of the step in microbatches.
        source, targets: the stage that sends it, and those that receive it.
        level: outside the loop, the level at which it is received (`autoshard.pipeline.around`); in the loop 0.
        backward: in the loop, whether it is sent by the backward pass.
        shape, dtype: of the array that is sent, in the loop of one microbatch.
        origin: the operation that makes it and its line in the user's program.
        name: the name of the argument that it is to the stages that receive it.
    """

    kind: str
    value: int
    source: int
    targets: tuple[int, ...]
    level: int
    backward: bool
    shape: tuple[int, ...]
    dtype: str
    origin: str
    name: str

    @property
    def key(self) -> tuple[str, int, int]:
        """Its kind, value and source: different for different messages."""
        return self.kind, self.value, self.source


@dataclass(frozen=True, slots=True, eq=False)
class LoopPart:
    """A stage's part of the loop: its ops, the inputs of the body that it reads, and what it adds up, stacks and receives."""

    stage: int
    ops: tuple[Op, ...]
    entering: Mapping[int, int]
    sums: tuple[Sum, ...]
    stacked: tuple[int, ...]
    received: tuple[int, ...]
    reads_index: bool


@dataclass(frozen=True, slots=True, eq=False)
class OuterPart:
    """A stage's part outside the loop: its ops, the positions of the arguments that it reads, and the values that it receives."""

    stage: int
    ops: tuple[Op, ...]
    arguments: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StageProgram:
    """A stage's program.

    Attributes:
        micro: the whole step.
        sum_terms: per position among the loop's carries its terms by the stage that computes them.
        outer, loop: the stage's parts.
    """

    micro: Micro
    sum_terms: Mapping[int, Mapping[int, Sequence[int]]]
    outer: OuterPart
    loop: LoopPart

    def function(self, results: tuple[int, ...], receives: Sequence[Message], sends: Sequence[Message]) -> Callable[..., list[Any]]:
        """The function of a stage, from its flat arguments to its flat results."""
        micro, outer, loop, graph = self.micro, self.outer, self.loop, self.micro.graph
        closed = micro.traced.jaxpr
        position_of = {op.index: k for k, op in enumerate(graph.ops)}
        here = position_of[micro.loop.index]
        before = [op for op in outer.ops if position_of[op.index] < here]
        after = [op for op in outer.ops if position_of[op.index] > here]

        def function(*inputs: Any) -> list[Any]:
            arguments, arrived = inputs[: len(outer.arguments)], inputs[len(outer.arguments) :]
            evaluator = Evaluator(closed, {graph.arguments[k]: x for k, x in zip(outer.arguments, arguments, strict=True)})
            parts: dict[int, list[Any]] = {}
            slices: dict[int, Any] = {}
            for message, x in zip(receives, arrived, strict=True):
                if message.kind == "part":
                    parts.setdefault(message.value, []).append(x)
                else:
                    (slices if message.kind == "loop" else evaluator.arrays)[message.value] = x
            evaluator.run(before)
            totals, stacked, sent = self._looped(evaluator, slices, [m.value for m in sends if m.kind == "loop"])
            mine: dict[int, Any] = {}
            for each, total in zip(loop.sums, totals, strict=True):
                result = micro.loop.results[each.position]
                if next(iter(self.sum_terms[each.position])) != loop.stage:
                    mine[result] = total
                    continue
                for part in parts.get(result, ()):
                    total = total + part
                evaluator.arrays[result] = total
            for value, x in zip(loop.stacked, stacked, strict=True):
                evaluator.arrays[micro.loop.results[micro.stacked[value]]] = x
            evaluator.run(after)
            returned = [evaluator.read(closed.jaxpr.outvars[k], graph.results[k]) for k in results]
            outside = [mine[m.value] if m.kind == "part" else evaluator.arrays[m.value] for m in sends if m.kind != "loop"]
            return [jnp.asarray(x) if not hasattr(x, "aval") else x for x in (*returned, *outside, *sent)]

        return function

    def _looped(self, outside: Evaluator, slices: Mapping[int, Any], sent: Sequence[int]) -> tuple[Any, Any, Any]:
        """The totals of a stage's loop over microbatches, what it stacks up, and what it sends, stacked up."""
        micro, loop, scan = self.micro, self.loop, self.micro.loop
        first = num_consts(scan.params)
        (body,) = subjaxprs(scan.equation)
        atoms = dict(zip(scan.operands, scan.equation.invars, strict=True))
        entering = {inner: outside.read(atoms[outer], outer) for inner, outer in loop.entering.items()}
        start = tuple(jnp.asarray(outside.read(atoms[v], v)) for v in (scan.operands[first + each.position] for each in loop.sums))

        def microbatch(totals: tuple, given: tuple) -> tuple[tuple, tuple]:
            index, arrived = given
            inner = Evaluator(ClosedJaxpr(*opened(body)), {**entering, **arrived})
            if micro.index is not None and index is not None:
                inner.arrays[micro.index] = index
            carries = [micro.body.inputs[first + each.position] for each in loop.sums]
            inner.arrays.update(zip(carries, totals, strict=True))
            inner.run(loop.ops)
            new = tuple(self._added(each, total, inner) for each, total in zip(loop.sums, totals, strict=True))
            return new, (tuple(inner.arrays[v] for v in loop.stacked), tuple(inner.arrays[v] for v in sent))

        index = None
        if loop.reads_index:
            number = opened(body)[0].invars[first + num_carry(scan.params)]
            index = jnp.arange(micro.n, dtype=number.aval.dtype)  # pyright: ignore[reportAttributeAccessIssue]
        totals, (stacked, messages) = lax.scan(microbatch, start, (index, {v: slices[v] for v in loop.received}), micro.n)
        return totals, stacked, messages

    def _added(self, each: Sum, total: Any, inner: Evaluator) -> Any:
        """A stage's total of a sum after a microbatch."""
        if len(self.sum_terms[each.position]) == 1:
            return inner.arrays[each.update.results[0]]
        terms = [inner.arrays[term].astype(total.dtype) for term in self.sum_terms[each.position][self.loop.stage]]
        part = terms[0]
        for term in terms[1:]:
            part = part + term
        return total + part
