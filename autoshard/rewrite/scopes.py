"""A program as lists of equations that can be edited: calls inlined, loops and checkpoints as scopes of their own.

A scope is the program itself, the body of a `jax.lax.scan` or that of a `jax.checkpoint`. Each variable belongs to one scope. Values pass
from scope to scope through inputs and outputs, which `Scope.reached` adds where a rewrite reads a value from elsewhere: as a loop's
constant from outside, and trip by trip from one loop to another that runs as often.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from typing import Literal as OneOf

from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters.partial_eval import dce_jaxpr

from autoshard.ir.scan import num_carry, num_consts
from autoshard.primitives import is_inlined
from autoshard.recompute.block import stacked
from autoshard.recompute.flat import Atom
from autoshard.recompute.regions import jaxpr_of
from autoshard.trace import scan_params, subjaxprs
from autoshard.trace.origin import calls_library
from autoshard.trace.structure import opened

Passing = OneOf["whole", "carry", "slice"]
"""How a value passes into or out of a scope: as it is, from trip to trip, or as a trip's part of a stack."""

NESTED = ("scan", "remat2")


@dataclass(eq=False, slots=True)
class Input:
    """A variable of a scope that comes from outside: ``outer`` there, None for an argument of the program."""

    inner: Var
    outer: Atom | None
    passing: Passing
    scope: Scope


@dataclass(eq=False, slots=True)
class Output:
    """A value of a scope that leaves it: as ``outer``, None for a result of the program."""

    inner: Atom
    outer: Var | None
    passing: Passing
    scope: Scope


@dataclass(eq=False)
class Scope:
    """A list of equations and nested scopes.

    Attributes:
        parent: the scope around it; None for the program.
        eqn: the loop or checkpoint as it was.
        steps: equations and nested scopes, in order.
        inputs, outputs: what passes in and out.
        constants: captured arrays; the program's alone has any.
        added: steps to be put before others, by the first result of these.
        renamed: variables to be read in place of others.
    """

    parent: Scope | None = None
    eqn: JaxprEqn | None = None
    steps: list[JaxprEqn | Scope] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    constants: dict[Var, Any] = field(default_factory=dict)
    added: dict[Var, list[JaxprEqn | Scope]] = field(default_factory=dict)
    renamed: dict[Var, Atom] = field(default_factory=dict)

    @property
    def root(self) -> Scope:
        return self if self.parent is None else self.parent.root

    @property
    def is_loop(self) -> bool:
        return self.eqn is not None and self.eqn.primitive.name == "scan"

    def walk(self) -> Iterator[Scope]:
        """This scope and those inside it."""
        yield self
        for step in self.steps:
            if isinstance(step, Scope):
                yield from step.walk()

    def path(self) -> list[Scope]:
        """The scopes around this one and itself, outermost first."""
        return [*(self.parent.path() if self.parent else ()), self]

    def call(
        self,
        traced: ClosedJaxpr,
        operands: Sequence[Atom],
        like: JaxprEqn,
        changed: Callable[[JaxprEqn], JaxprEqn] = lambda eqn: eqn,
    ) -> list[Atom]:
        """The results of a traced function of variables of this scope, computed where ``like`` is, with its names and its line.

        Args:
            changed: gives each equation as it is to be.
        """
        names: dict[Var, Atom] = dict(zip(traced.jaxpr.invars, operands, strict=True))
        names |= {var: self.captured(var, value) for var, value in zip(traced.jaxpr.constvars, traced.consts, strict=True)}
        steps: list[JaxprEqn | Scope] = []
        results = _inlined(self, steps, traced.jaxpr, names, like, True)
        self.added.setdefault(like.outvars[0], []).extend(step if isinstance(step, Scope) else changed(step) for step in steps)
        return results

    def captured(self, var: Var, value: Any) -> Var:
        """The variable by which a captured array is read here."""
        root = self.root
        found = next((v for v, known in root.constants.items() if known is value), None)
        if found is None:
            found = Var(var.aval)
            root.constants[found] = value
        reached = self.reached(found, root)
        assert reached is not None
        return reached

    def settle(self) -> None:
        """Adds the steps that are to be added, renames variables, and brings steps in order."""
        if self.added:
            before = [[v for v in made_by(step)[:1] if v in self.added] for step in self.steps]
            steps = zip(before, self.steps, strict=True)
            self.steps = [one for at, step in steps for one in (*(new for v in at for new in self.added[v]), step)]
            self.added = {}
        for k, step in enumerate(self.steps):
            if isinstance(step, Scope):
                for each in step.inputs:
                    each.outer = self._now(each.outer)
            elif any(isinstance(x, Var) and x in self.renamed for x in step.invars):
                self.steps[k] = step.replace(invars=[*map(self._now, step.invars)])
        for each in self.outputs:
            each.inner = self._now(each.inner)
        self.put_in_order()

    def _now(self, atom: Any) -> Any:
        return self.renamed.get(atom, atom) if isinstance(atom, Var) else atom

    def put_in_order(self) -> None:
        """Brings steps in an order in which each comes after what it reads, as near to the present one as that allows."""
        maker = {v: k for k, step in enumerate(self.steps) for v in made_by(step)}
        readers: dict[int, list[int]] = {}
        missing = [0] * len(self.steps)
        for k, step in enumerate(self.steps):
            for at in {maker[v] for v in read_by(step) if isinstance(v, Var) and v in maker}:
                readers.setdefault(at, []).append(k)
                missing[k] += 1
        ready = [k for k, count in enumerate(missing) if not count]
        order: list[int] = []
        heapq.heapify(ready)
        while ready:
            order.append(heapq.heappop(ready))
            for reader in readers.get(order[-1], ()):
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(ready, reader)
        if len(order) < len(self.steps):
            raise ValueError("a step reads what is made of its results")
        self.steps = [self.steps[k] for k in order]

    def entered(self, outer: Atom, passing: Passing) -> Var:
        """The variable by which an outer value is read here; a new input where there is none."""
        for each in self.inputs:
            if each.outer is outer and each.passing == passing:
                return each.inner
        aval: Any = outer.aval
        inner = Var(aval.update(shape=aval.shape[1:]) if passing == "slice" else aval)
        self.inputs.append(Input(inner, outer, passing, self))
        return inner

    def left(self, inner: Var) -> Var:
        """The variable of the scope around by which a value is read there, of a loop the stack of all trips."""
        passing: Passing = "slice" if self.is_loop else "whole"
        for each in self.outputs:
            if each.inner is inner and each.passing == passing and each.outer is not None and not isinstance(each.outer, DropVar):
                return each.outer
        outer = stacked(inner, self.eqn.params["length"]) if self.is_loop and self.eqn is not None else Var(inner.aval)
        self.outputs.append(Output(inner, outer, passing, self))
        return outer

    def reached(self, var: Var, home: Scope) -> Var | None:
        """The variable by which the value of a variable of another scope is read here; None where no way leads from there to here.

        Out of a loop and into another, it is the value of the same trip.
        """
        here, there = self.path(), home.path()
        shared = sum(1 for a, b in zip(here, there, strict=False) if a is b)
        inward, outward = here[shared:], there[shared:]
        loops_in, loops_out = [s for s in inward if s.is_loop], [s for s in outward if s.is_loop]
        if loops_out:
            if [s.eqn.params["length"] for s in loops_in if s.eqn] != [s.eqn.params["length"] for s in loops_out if s.eqn]:
                return None
        if outward and inward and not self._precedes(outward[0], inward[0]):
            return None
        for scope in reversed(outward):
            var = scope.left(var)
        for scope in inward:
            var = scope.entered(var, "slice" if scope.is_loop and loops_out else "whole")
        return var

    @staticmethod
    def _precedes(first: Scope, second: Scope) -> bool:
        assert first.parent is not None
        steps = first.parent.steps
        return next(k for k, step in enumerate(steps) if step is first) < next(k for k, step in enumerate(steps) if step is second)

    def jaxpr(self) -> Jaxpr:
        eqns = [step.equation() if isinstance(step, Scope) else step for step in self.steps]
        outputs = [each.inner for each in _in_order(self.outputs)]
        return jaxpr_of([each.inner for each in _in_order(self.inputs)], outputs, eqns, tuple(self.constants))

    def equation(self) -> JaxprEqn:
        """The loop or checkpoint as it is now."""
        assert self.eqn is not None
        inputs, outputs, body = _in_order(self.inputs), _in_order(self.outputs), self.jaxpr()
        passed = [each.passing for each in inputs]
        closed = ClosedJaxpr(body, ())
        params = scan_params(self.eqn.params, closed, passed.count("whole"), passed.count("carry")) if self.is_loop else None
        return self.eqn.replace(
            invars=[each.outer for each in inputs],
            outvars=[each.outer for each in outputs],
            params={**self.eqn.params, "jaxpr": body} if params is None else params,
            effects=body.effects,
        )


def _in_order(passed: Sequence[Any]) -> list[Any]:
    order: dict[str, int] = {"whole": 0, "carry": 1, "slice": 2}
    return sorted(passed, key=lambda each: order[each.passing])


def made_by(step: JaxprEqn | Scope) -> list[Var]:
    """The results of a step."""
    return [each.outer for each in step.outputs if each.outer is not None] if isinstance(step, Scope) else list(step.outvars)


def read_by(step: JaxprEqn | Scope) -> list[Atom]:
    """The operands of a step."""
    return [each.outer for each in step.inputs if each.outer is not None] if isinstance(step, Scope) else list(step.invars)


def program(closed: ClosedJaxpr) -> Scope:
    """The scope of a whole program."""
    live, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    root = Scope()
    outputs = _filled(root, live, tuple(closed.consts), [Input(v, None, "whole", root) for v in live.invars])
    root.outputs = [Output(v, None, "whole", root) for v in outputs]
    return root


def closed(root: Scope) -> ClosedJaxpr:
    """The program of a scope, without what nobody reads."""
    live, _ = dce_jaxpr(root.jaxpr(), [True] * len(root.outputs), instantiate=True)
    return ClosedJaxpr(live, list(root.constants.values()))


def _filled(scope: Scope, jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Input]) -> list[Atom]:
    """Puts the equations of a body into a scope; gives its results."""
    scope.inputs = list(inputs)
    names: dict[Var, Atom] = dict(zip(jaxpr.invars, (each.inner for each in inputs), strict=True))
    names |= {var: scope.captured(var, value) for var, value in zip(jaxpr.constvars, consts, strict=True)}
    return _inlined(scope, scope.steps, jaxpr, names, None, False)


def _inlined(
    scope: Scope, steps: list[JaxprEqn | Scope], jaxpr: Jaxpr, names: dict[Var, Atom], call: JaxprEqn | None, in_library: bool
) -> list[Atom]:
    """Appends the equations of a call to steps of a scope; gives its results.

    Those of a library's function have the source line of its call.
    """

    def renamed(atoms: Sequence[Atom]) -> list[Atom]:
        return [atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in atoms]

    for eqn in jaxpr.eqns:
        source = eqn.source_info
        if call is not None:
            stack = call.source_info.name_stack + source.name_stack
            source = (call.source_info if in_library else source).replace(name_stack=stack)
        made = [v if isinstance(v, DropVar) else Var(v.aval) for v in eqn.outvars]
        inner = eqn.replace(invars=renamed(eqn.invars), outvars=made, source_info=source)
        if is_inlined(eqn.primitive.name):
            (body,) = subjaxprs(eqn)
            opened_body, consts = opened(body)
            own: dict[Var, Atom] = dict(zip(opened_body.invars, inner.invars, strict=True))
            own |= {var: scope.captured(var, value) for var, value in zip(opened_body.constvars, consts, strict=True)}
            made = _inlined(scope, steps, opened_body, own, inner, in_library or calls_library(eqn))
        elif eqn.primitive.name in NESTED:
            steps.append(_nested(scope, inner))
        else:
            steps.append(inner)
        names.update(zip(eqn.outvars, made, strict=True))
    return renamed(jaxpr.outvars)


def _nested(parent: Scope, eqn: JaxprEqn) -> Scope:
    """The scope of a loop or a checkpoint."""
    (body,) = subjaxprs(eqn)
    jaxpr, consts = opened(body)
    scope = Scope(parent, eqn)
    n, m = (num_consts(eqn.params), num_carry(eqn.params)) if scope.is_loop else (len(eqn.invars), 0)
    passing: list[Any] = ["whole"] * n + ["carry"] * m + ["slice"] * (len(eqn.invars) - n - m)
    inputs = [Input(Var(v.aval), outer, how, scope) for v, outer, how in zip(jaxpr.invars, eqn.invars, passing, strict=True)]
    scope.inputs = inputs
    results = _filled(scope, jaxpr, consts, inputs)
    leaving: list[Any] = ["carry"] * m + ["slice"] * (len(eqn.outvars) - m) if scope.is_loop else ["whole"] * len(eqn.outvars)
    scope.outputs = [Output(inner, outer, how, scope) for inner, outer, how in zip(results, eqn.outvars, leaving, strict=True)]
    return scope


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of a variable or a literal."""
    return x.aval.shape


def dtype_of(x: Any) -> Any:
    """Its element type."""
    return x.aval.dtype
