"""Conversion of a closed jaxpr to a `Graph`: calls inlined, dead equations dropped, control flow kept with its bodies.

Three passes, each linear in the number of equations. *Flatten* turns equations into steps over numbered arrays; *sweep*
goes backward and keeps the steps that a result or an effect depends on; *emit* numbers values and ops in program order,
so that equal programs have equal graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from autoshard.ir import Body, Flow, Holder, Op, Origin, Value
from autoshard.ir.naming import runs_rarely
from autoshard.ir.scan import num_carry, num_consts
from autoshard.primitives import is_call, is_inlined
from autoshard.rules import kernel_of
from autoshard.trace.implementations import closed
from autoshard.trace.mapped import BODY, ENTERING, LEAVING, MAPPED, Boundary, boundaries, has_effects
from autoshard.trace.origin import Origins, calls_library
from autoshard.trace.structure import called_with, opened, subjaxprs
from autoshard.trace.trips import while_trips


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """The parts of a graph that come from the jaxpr alone.

    Attributes:
        written: the value of each literal in ``literals``.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    constants: tuple[int, ...]
    literals: tuple[int, ...]
    written: tuple[Any, ...]
    assumptions: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Block:
    """A sub-program, with arrays as numbers in `_Flat`."""

    inputs: list[int]
    outputs: list[int]
    steps: list[_Step]
    trips: int = 1


@dataclass(slots=True, eq=False)
class _Step:
    """An equation whose operands and results are numbered; ``trips`` counts the loops around it, ``mapped`` is as in `Op`."""

    eqn: JaxprEqn | Boundary
    operands: list[int]
    results: list[int]
    origin: Origin
    path: tuple[int, ...]
    trips: int
    blocks: tuple[_Block, ...] = ()
    mapped: tuple[tuple[str, int], ...] = ()


def build(closed: ClosedJaxpr) -> Program:
    """The program of a closed jaxpr; linear in its equations."""
    flat = _Flat()
    whole = flat.block(closed, (), 1, None, "")
    live = bytearray(len(flat.avals))
    for output in whole.outputs:
        live[output] = True
    steps = _sweep(whole.steps, live)
    _locate(steps, Origin())
    return _Emitter(flat, live).program(whole, steps)


class _Flat:
    """The first pass: numbers every array and inlines calls.

    Attributes:
        avals: per array its abstract value.
        literals, constants: the values of the arrays that are literals or captured constants.
        assumptions: assumptions of the trace, in words.
    """

    def __init__(self):
        self.avals: list[Any] = []
        self.literals: dict[int, Any] = {}
        self.constants: dict[int, Any] = {}
        self.assumptions: list[str] = []
        self.outside: dict[int, int] = {}  # by input of a body the array around it that it is, in all trips
        self._captured: dict[int, int] = {}  # a constant captured twice is one value
        self._mapped: tuple[tuple[str, int], ...] = ()  # the axes of the shard_map around
        self._origins = Origins()

    def block(self, body: ClosedJaxpr | Jaxpr, path: tuple, trips: int, outer: Origin | None, prefix: str) -> _Block:
        """A sub-program with new inputs."""
        jaxpr, consts = opened(body)
        inputs = [self._new(v.aval) for v in jaxpr.invars]
        steps: list[_Step] = []
        outputs = self._run(jaxpr, consts, inputs, steps, path, trips, outer, prefix)
        return _Block(inputs, outputs, steps)

    def _new(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _literal(self, literal: Literal) -> int:
        number = self._new(literal.aval)
        self.literals[number] = literal.val
        return number

    def _constant(self, aval: Any, value: Any) -> int:
        number = self._captured.get(id(value))
        if number is None:
            number = self._captured[id(value)] = self._new(aval)
            self.constants[number] = value
        return number

    def _run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence,
        inputs: Sequence[int],
        steps: list[_Step],
        path: tuple,
        trips: int,
        outer: Origin | None,
        prefix: str,
    ) -> list[int]:
        """The numbers of the jaxpr's outputs; its equations are appended to ``steps``."""
        numbers: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            numbers[var] = self._constant(var.aval, value)
        for position, eqn in enumerate(jaxpr.eqns):
            here = (*path, position)
            operands = [self._literal(atom) if isinstance(atom, Literal) else numbers[atom] for atom in eqn.invars]
            origin = self._origins.of(eqn, outer, prefix)
            if is_inlined(eqn.primitive.name):
                (body,) = subjaxprs(eqn)
                inside = origin if outer is not None or calls_library(eqn) else None
                results = self._run(*opened(body), operands, steps, (*here, 0), trips, inside, origin.name_stack)
            elif eqn.primitive.name == MAPPED:
                results = self._shard_map(eqn, operands, steps, here, trips, outer, origin)
            else:
                step = self._step(eqn, operands, origin, here, trips, outer)
                steps.append(step)
                results = step.results
            numbers.update(zip(eqn.outvars, results, strict=True))
        return [self._literal(atom) if isinstance(atom, Literal) else numbers[atom] for atom in jaxpr.outvars]

    def _shard_map(
        self, eqn: JaxprEqn, operands: list[int], steps: list[_Step], path: tuple, trips: int, outer: Origin | None, origin: Origin
    ) -> list[int]:
        """The numbers of a shard_map's results; the steps of its operands, its body and its results are appended to ``steps``."""
        jaxpr, consts = opened(eqn.params["jaxpr"])
        around, self._mapped = self._mapped, tuple(eqn.params["mesh"].shape.items())
        inputs = [self._new(v.aval) for v in jaxpr.invars]
        for k, (boundary, whole, shard) in enumerate(zip(boundaries(eqn, True), operands, inputs, strict=True)):
            steps.append(_Step(boundary, [whole], [shard], origin, (*path, ENTERING, k), trips, mapped=self._mapped))
        shards = self._run(jaxpr, consts, inputs, steps, (*path, BODY), trips, outer, origin.name_stack)
        results = [self._new(v.aval) for v in eqn.outvars]
        for k, (boundary, shard, whole) in enumerate(zip(boundaries(eqn, False), shards, results, strict=True)):
            steps.append(_Step(boundary, [shard], [whole], origin, (*path, LEAVING, k), trips, mapped=self._mapped))
        self._mapped = around
        return results

    def _step(self, eqn: JaxprEqn, operands: list[int], origin: Origin, path: tuple, trips: int, outer: Origin | None) -> _Step:
        bodies = subjaxprs(eqn)
        if not bodies:
            if not self._mapped and (why := closed(eqn)):
                name = eqn.primitive.name
                self.assumptions.append(f"{name} at {origin} is another library's primitive, and is planned from outside: {why}")
            return _Step(eqn, operands, [self._new(v.aval) for v in eqn.outvars], origin, path, trips, mapped=self._mapped)
        inner = self._trips(eqn, origin)
        blocks = tuple(self.block(body, (*path, b), trips * inner, outer, origin.name_stack) for b, body in enumerate(bodies))
        for block in blocks:
            block.trips = inner
            self.outside.update(zip(block.inputs, _unchanged(eqn, operands), strict=False))
        results = blocks[0].outputs if is_call(eqn.primitive.name) else [self._new(v.aval) for v in eqn.outvars]
        return _Step(eqn, operands, results, origin, path, trips, blocks, self._mapped)

    def _trips(self, eqn: JaxprEqn, origin: Origin) -> int:
        match eqn.primitive.name:
            case "scan":
                return eqn.params["length"]
            case "while" | "cond" if runs_rarely(origin.name_stack):
                return 0
            case "while":
                trips = while_trips(eqn)
                if trips is None:
                    self.assumptions.append(f"The while loop at {origin} is counted as one trip: how often it runs depends on data.")
                return 1 if trips is None else trips
        return 1


def _unchanged(eqn: JaxprEqn, operands: list[int]) -> list[int]:
    """The operands that the first inputs of each body are, in all trips."""
    match eqn.primitive.name:
        case "scan":
            return operands[: num_consts(eqn.params)]
        case "cond":
            return operands[1:]
    return operands if is_call(eqn.primitive.name) else []


def _sweep(steps: list[_Step], live: bytearray) -> list[_Step]:
    """The steps, blocks included, on which live arrays or effects depend; marks their operands live."""
    kept = []
    for step in reversed(steps):
        if not has_effects(step.eqn) and not any(live[result] for result in step.results):
            continue
        kept.append(step)
        for block in step.blocks:
            for k, output in enumerate(block.outputs):
                if _always_live(step.eqn, k) or live[step.results[k]]:
                    live[output] = True
            block.steps = _sweep(block.steps, live)
        for operand in step.operands:
            live[operand] = True
    kept.reverse()
    return kept


def _locate(steps: list[_Step], around: Origin) -> None:
    """Gives steps without a source line, such as those that autoshard adds, that of what reads them, what they read, or around them."""
    places: dict[int, Origin] = {}
    for step in reversed(steps):
        _place(step, (places[result] for result in step.results if result in places))
        if step.origin.file:
            places.update(dict.fromkeys(step.operands, step.origin))
    for step in steps:
        _place(step, (*(places[operand] for operand in step.operands if operand in places), around))
        if step.origin.file:
            places.update(dict.fromkeys(step.results, step.origin))
        for block in step.blocks:
            _locate(block.steps, step.origin)


def _place(step: _Step, near: Iterable[Origin]) -> None:
    """Gives a step without a source line the first of those near it."""
    if not step.origin.file:
        found = next(iter(near), Origin())
        step.origin = replace(found, name_stack=step.origin.name_stack)


def _always_live(eqn: JaxprEqn | Boundary, output: int) -> bool:
    """Whether a body's output is a carry or a condition of the loop."""
    return eqn.primitive.name == "while" or (eqn.primitive.name == "scan" and output < num_carry(eqn.params))


class _Emitter:
    """The last pass: final numbers, in order of first use."""

    def __init__(self, flat: _Flat, live: bytearray):
        self.flat = flat
        self.live = live
        self.numbers: dict[int, int] = {}
        self.values: list[Value] = []
        self.literals: list[int] = []
        self.written: list[Any] = []
        self.constants: list[int] = []
        self.n_ops = 0
        self._kinds: dict[tuple, Value] = {}

    def program(self, whole: _Block, steps: list[_Step]) -> Program:
        arguments = self._all(whole.inputs)
        ops = self._ops(steps)
        results = self._all(whole.outputs)
        return Program(
            values=tuple(self.values),
            ops=ops,
            arguments=arguments,
            results=results,
            constants=tuple(self.constants),
            literals=tuple(self.literals),
            written=tuple(self.written),
            assumptions=tuple(dict.fromkeys(self.flat.assumptions)),
        )

    def _number(self, array: int) -> int:
        found = self.numbers.get(array)
        if found is not None:
            return found
        number = self.numbers[array] = len(self.values)
        self.values.append(self._value(self.flat.avals[array]))
        if array in self.flat.literals:
            self.literals.append(number)
            self.written.append(self.flat.literals[array])
        elif array in self.flat.constants:
            self.constants.append(number)
        return number

    def _constant(self, array: int) -> Any:
        """The array of a captured constant, in loops as outside of them; None of another one."""
        while array in self.flat.outside:
            array = self.flat.outside[array]
        return self.flat.constants.get(array)

    def _all(self, arrays: Sequence[int]) -> tuple[int, ...]:
        return tuple([self._number(array) for array in arrays])

    def _value(self, aval: Any) -> Value:
        on_host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
        kind = (getattr(aval, "shape", ()), getattr(aval, "dtype", None), on_host)  # tokens have neither shape nor dtype
        found = self._kinds.get(kind)
        if found is None:
            shape, dtype, _ = kind
            found = self._kinds[kind] = Value(tuple(shape), "token" if dtype is None else str(dtype), itemsize(dtype), on_host)
        return found

    def _ops(self, steps: list[_Step]) -> tuple[Op, ...]:
        return tuple([self._op(step) for step in steps])

    def _op(self, step: _Step) -> Op:
        index = self.n_ops
        self.n_ops += 1
        eqn = step.eqn
        operands = self._all(step.operands)
        bodies, holders = (), ()
        if step.blocks:
            bodies = tuple(self._body(block) for block in step.blocks)
            results = self._all(step.results)
            used = [bool(self.live[result]) for result in step.results]
            holders = tuple(_holders(eqn.primitive.name, eqn.params, operands, results, bodies, used))
        else:
            results = self._all(step.results)
        equation = None if isinstance(eqn, Boundary) else eqn
        described = eqn.primitive.name, operands, results, eqn.params, step.origin, step.path, step.trips
        unread = tuple(k for k, result in enumerate(step.results) if not self.live[result])
        constants = {k: x for k, operand in enumerate(step.operands) if (x := self._constant(operand)) is not None}
        kernel = equation and kernel_of(equation, unread, constants)
        if kernel and kernel.guessed:
            guess = "; ".join(kernel.guessed)
            self.flat.assumptions.append(f"The work of the kernel at {step.origin} is a guess, which cost_estimate= replaces: {guess}.")
        return Op(index, *described, bodies, holders, equation, step.mapped, kernel)

    def _body(self, block: _Block) -> Body:
        inputs = self._all(block.inputs)
        ops = self._ops(block.steps)
        return Body(inputs, self._all(block.outputs), ops, block.trips)


def _holders(name: str, params: Mapping, operands: tuple, results: tuple, bodies: tuple[Body, ...], used: list[bool]) -> list[Holder]:
    """The holders of a control-flow op; an unread stacked or branch result has none."""
    match name:
        case "scan":
            return _scan_holders(num_consts(params), num_carry(params), operands, results, bodies[0], used)
        case "while":
            return _while_holders(params["cond_nconsts"], params["body_nconsts"], operands, results, *bodies)
        case "cond":
            return _cond_holders(operands[1:], results, bodies, used)
    read = called_with(name, params, len(operands))
    return [Holder(inner, (Flow(operands[k]),)) for inner, k in zip(bodies[0].inputs, read, strict=True)]


def _scan_holders(n_consts: int, n_carry: int, operands: tuple, results: tuple, body: Body, used: list[bool]) -> list[Holder]:
    first_slice = n_consts + n_carry
    consts = [Holder(body.inputs[i], (Flow(operands[i]),)) for i in range(n_consts)]
    carries = [
        Holder(body.inputs[n_consts + k], (Flow(operands[n_consts + k]), Flow(body.outputs[k], inside=True)), (results[k],))
        for k in range(n_carry)
    ]
    slices = [Holder(body.inputs[i], (Flow(operands[i], shift=1),)) for i in range(first_slice, len(operands))]
    stacked = [Holder(results[k], (Flow(body.outputs[k], shift=-1, inside=True),)) for k in range(n_carry, len(results)) if used[k]]
    return consts + carries + slices + stacked


def _while_holders(n_cond: int, n_body: int, operands: tuple, results: tuple, condition: Body, body: Body) -> list[Holder]:
    cond_consts = [Holder(condition.inputs[i], (Flow(operands[i]),)) for i in range(n_cond)]
    body_consts = [Holder(body.inputs[i], (Flow(operands[n_cond + i]),)) for i in range(n_body)]
    carries = [
        Holder(
            body.inputs[n_body + k],
            (Flow(operands[n_cond + n_body + k]), Flow(body.outputs[k], inside=True)),
            (condition.inputs[n_cond + k], results[k]),
        )
        for k in range(len(results))
    ]
    return cond_consts + body_consts + carries


def _cond_holders(operands: tuple, results: tuple, branches: tuple[Body, ...], used: list[bool]) -> list[Holder]:
    """The branches share the layouts of operands and of results."""
    first, *others = branches
    entering = [Holder(first.inputs[i], (Flow(operand),), tuple(b.inputs[i] for b in others)) for i, operand in enumerate(operands)]
    leaving = [Holder(result, tuple(Flow(b.outputs[k]) for b in branches)) for k, result in enumerate(results) if used[k]]
    return entering + leaving


def itemsize(dtype: Any) -> float:
    """Bytes per element: half a byte for int4, the bytes of its data for a typed key.

    >>> itemsize(np.dtype("float32")), itemsize(jax.numpy.dtype("int4"))
    (4.0, 0.5)
    """
    if dtype is None:
        return 0.0
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return float(data.size * data.dtype.itemsize)
    if jax.numpy.issubdtype(dtype, np.integer):
        return jax.numpy.iinfo(dtype).bits / 8
    if jax.numpy.issubdtype(dtype, np.floating):
        return jax.numpy.finfo(dtype).bits / 8
    return float(dtype.itemsize)
