"""The program of one microbatch, and what runs before and after the loop over microbatches.

A step is rewritten into a loop over microbatches (`autoshard.microbatch`) and its calls are inlined, so that every operation of it is one
operation of the graph: at the top level what runs before and after the loop, in the loop's body what one microbatch computes. The body adds
to *sums*, such as gradients and the loss. A sum of several terms, such as the gradients of a weight that is used twice, may be computed in
parts: each part is summed up over microbatches by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.extend.source_info_util import current_name_stack, user_context
from jax.interpreters.partial_eval import dce_jaxpr

from autoshard.analysis.values import free_values, makers_of
from autoshard.errors import PipelineError
from autoshard.ir import Body, Graph, Op, Rule
from autoshard.ir.scan import num_carry, num_consts
from autoshard.lower import Interpreter, Path, bind, retraced
from autoshard.microbatch import in_loop
from autoshard.microbatch.work import product_flops
from autoshard.primitives import is_addition
from autoshard.recompute.replacing import CHECKPOINT
from autoshard.rules import rules_of
from autoshard.trace import Traced, rebuilt, subjaxprs, types_of
from autoshard.trace.mapped import MAPPED
from autoshard.trace.structure import around, opened, with_bodies


@dataclass(frozen=True, slots=True)
class Sum:
    """A value that is summed up, or otherwise combined, over microbatches.

    Attributes:
        position: among the loop's carries, and so among its results.
        update: the op of the body that combines the carry with a microbatch's part.
        part: the value that it combines the carry with.
        terms: the values that make the part as their sum; the part alone where it is no sum.
        inner: the ops that compute the part from its terms.
    """

    position: int
    update: Op
    part: int
    terms: tuple[int, ...]
    inner: tuple[Op, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Micro:
    """A step in microbatches, each of whose operations is one op of the graph's top level or of the loop's body.

    Attributes:
        traced: the step, in microbatches.
        rules: the sharding rules of its graph.
        loop: the op that loops over microbatches.
        sums: what the loop combines over microbatches.
        stacked: per value of the body that the loop stacks up, its position among the loop's results.
        free: per value whether it is made of constants alone.
    """

    traced: Traced
    rules: tuple[Rule | None, ...]
    loop: Op
    sums: tuple[Sum, ...]
    stacked: Mapping[int, int]
    free: tuple[bool, ...]

    @property
    def graph(self) -> Graph:
        """The program's graph."""
        return self.traced.graph

    @property
    def body(self) -> Body:
        """The program of one microbatch."""
        return self.loop.bodies[0]

    @property
    def n(self) -> int:
        """The number of microbatches."""
        return self.traced.microbatches

    @property
    def index(self) -> int | None:
        """The value in the body that is the microbatch's number; None where nothing reads it."""
        first = num_consts(self.loop.params) + num_carry(self.loop.params)
        return self.body.inputs[first] if len(self.body.inputs) > first else None

    @property
    def entering(self) -> dict[int, int]:
        """Per input of the body that is the same for all microbatches, the value at the top level."""
        n_consts = num_consts(self.loop.params)
        return dict(zip(self.body.inputs[:n_consts], self.loop.operands[:n_consts], strict=True))


def micro_of(traced: Traced, n: int) -> Micro:
    """The step in ``n`` microbatches, with calls inlined.

    Raises:
        TraceError: the step has no such microbatches.
        PipelineError: it was rewritten into another number of them before.
    """
    if traced.microbatches not in (1, n):
        raise PipelineError(
            f"A pipeline's microbatches are those of its stages; got a step that is rewritten into {traced.microbatches} and asked "
            f"for {n}. Pass the step as it was traced."
        )
    traced = in_loop(traced, n) if traced.microbatches == 1 else traced
    loop = loop_of(traced.graph, rules_of(traced.graph), n)
    whole = inlined(traced.jaxpr, loop.equation)
    if any(op.mapped for op in traced.graph.walk()):
        whole = ClosedJaxpr(_on_any_devices(whole.jaxpr), whole.consts)
    flat = rebuilt(traced, whole, simplify=False)
    graph, rules = flat.graph, rules_of(flat.graph)
    loop = loop_of(graph, rules, n)
    body, n_consts, n_carry = loop.bodies[0], num_consts(loop.params), num_carry(loop.params)
    makers, reads = makers_of(body.ops), Counter((*(value for op in body.ops for value in op.operands), *body.outputs))
    carries = dict(zip(body.inputs[n_consts : n_consts + n_carry], range(n_carry), strict=True))
    sums = tuple(_sum(position, value, carries, makers, reads) for position, value in enumerate(body.outputs[:n_carry]))
    stacked = {value: n_carry + k for k, value in enumerate(body.outputs[n_carry:])}
    same = dict(zip(body.inputs[:n_consts], loop.operands[:n_consts], strict=True))
    return Micro(flat, rules, loop, sums, stacked, tuple(free_values(graph, same)))


def loop_of(graph: Graph, rules: Sequence[Rule | None], n: int) -> Op:
    """The loop over microbatches: of the loops of so many trips the one that most of the products are in."""
    loops = [op for op in graph.ops if op.primitive == "scan" and op.params["length"] == n]
    if not loops:
        raise PipelineError("A pipeline computes gradients or results of a batch, and this step has none. Leave stages out.")
    return max(loops, key=lambda op: product_flops([op], rules, graph))


def _sum(position: int, value: int, carries: Mapping[int, int], makers: Mapping[int, Op], reads: Mapping[int, int]) -> Sum:
    update = makers[value]
    (part,) = (operand for operand in update.operands if carries.get(operand) != position)
    terms, inner = _terms(part, makers, reads) if is_addition(update.primitive) else ([part], [])
    return Sum(position, update, part, tuple(terms), tuple(reversed(inner)))


def _terms(value: int, makers: Mapping[int, Op], reads: Mapping[int, int]) -> tuple[list[int], list[Op]]:
    """The values that a value is the sum of, through additions and casts that nothing else reads; and these, each before what it reads."""
    terms: list[int] = []
    inner: list[Op] = []
    waiting = [value]
    while waiting:
        one = summed = waiting.pop()
        casts: list[Op] = []
        while (op := makers.get(summed)) is not None and reads[summed] == 1 and _widens(op):
            casts.append(op)
            (summed,) = op.operands
        if op is None or reads[summed] != 1 or not is_addition(op.primitive):
            terms.append(one)
        else:
            inner += [*casts, op]
            waiting += reversed(op.operands)
    return terms, inner


def _widens(op: Op) -> bool:
    """Whether an op casts floating point numbers to wider ones."""
    if op.primitive != "convert_element_type":
        return False
    read, made = op.equation.invars[0].aval.dtype, op.equation.outvars[0].aval.dtype
    return read.kind in "fV" and made.kind in "fV" and made.itemsize >= read.itemsize


# -- evaluation of parts of a program ------------------------------------------------------------------------------------------


def mapped_in(eqn: JaxprEqn) -> JaxprEqn | None:
    """The shard_map that an equation stands for; None for another one."""
    if eqn.primitive.name not in CHECKPOINT:
        return None
    inner = opened(subjaxprs(eqn)[0])[0]
    return inner.eqns[0] if [each.primitive.name for each in inner.eqns] == [MAPPED] and inner.outvars == inner.eqns[0].outvars else None


class _Inlined(Interpreter):
    """Evaluates a program with its calls inlined, those in the body of one loop too; a shard_map is one equation, as if checkpointed."""

    def __init__(self, loop: JaxprEqn | None):
        super().__init__({}, differentiable=False)
        self.loop = loop

    def mapped(self, eqn: JaxprEqn, operands: list[Any], path: Path) -> list[Any]:
        return list(jax.checkpoint(lambda *arguments: bind(eqn, arguments))(*operands))

    def dead(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        if eqn is not self.loop:
            return bind(eqn, operands)
        (old,) = subjaxprs(eqn)
        inner = _Inlined(None)
        new, _ = retraced(eqn.primitive.name, lambda *arguments: inner.run(*opened(old), arguments), types_of(opened(old)[0].invars))
        return bind(eqn, operands, **with_bodies(eqn, [old], [_without_dead_code(*opened(new))]))


def inlined(closed: ClosedJaxpr, loop: JaxprEqn | None = None) -> ClosedJaxpr:
    """The program with its calls inlined, at the top level and in the body of a loop, and without dead code there."""
    made = jax.make_jaxpr(lambda *arguments: _Inlined(loop).run(closed.jaxpr, closed.consts, arguments))(*types_of(closed.jaxpr.invars))
    return _without_dead_code(made.jaxpr, made.consts)


def _on_any_devices(jaxpr: Jaxpr) -> Jaxpr:
    """The program whose shard_maps say nothing of devices, only of axes: each stage has its own."""

    def replaced(eqn: JaxprEqn) -> JaxprEqn:
        eqn = around(eqn, [_on_any_devices(opened(body)[0]) for body in subjaxprs(eqn)])
        if eqn.primitive.name != MAPPED:
            return eqn
        mesh = eqn.params["mesh"]
        return eqn.replace(params={**eqn.params, "mesh": getattr(mesh, "abstract_mesh", mesh)})

    return jaxpr.replace(eqns=[replaced(eqn) for eqn in jaxpr.eqns])


def _without_dead_code(jaxpr: Jaxpr, consts: Sequence[Any]) -> ClosedJaxpr:
    """The program of the same inputs without equations that no result depends on."""
    return ClosedJaxpr(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0], consts)


class Evaluator:
    """Evaluation of single ops of a program, in the order in which they are given.

    Attributes:
        arrays: per value the array, as far as it is known.
        constants: the arrays that the program captured.
    """

    def __init__(self, closed: ClosedJaxpr, arrays: Mapping[int, Any]):
        self.arrays: dict[int, Any] = dict(arrays)
        self.constants: dict[Var, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self._contexts = _Inlined(None)

    def run(self, ops: Iterable[Op]) -> None:
        """Evaluates ops on arrays that are known; their results are then known too."""
        for op in ops:
            eqn = op.equation
            names = current_name_stack() + eqn.source_info.name_stack
            eqn = mapped_in(eqn) or eqn
            with user_context(eqn.source_info.traceback, name_stack=names), self._contexts.context(eqn):
                results = bind(eqn, [self.read(atom, value) for atom, value in zip(eqn.invars, op.operands, strict=True)])
            self.arrays.update(zip(op.results, results, strict=True))

    def read(self, atom: Any, value: int) -> Any:
        """The array of an operand."""
        if isinstance(atom, Literal):
            return atom.val
        return self.arrays[value] if value in self.arrays else self.constants[atom]
