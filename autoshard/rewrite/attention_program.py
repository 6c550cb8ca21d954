"""A program with its attention in kernels: forward kernels that keep what their backward kernels need, in loops over layers as well.

Where a checkpoint computes attention again, the forward kernel runs again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

from autoshard.ir.kernel import Kernel
from autoshard.recompute.flat import Atom
from autoshard.rewrite.attention_kernels import Implementation, Problem, layouts, repeated, unrepeated
from autoshard.rewrite.attention_match import Attention, Refused, attentions
from autoshard.rewrite.attention_roles import Operand, Roles
from autoshard.rewrite.dimensions import Labels, flattened
from autoshard.rewrite.scopes import NESTED, Scope, closed, dtype_of, program, shape_of
from autoshard.rewrite.traced_kernel import TracedKernel
from autoshard.rewrite.wiring import Wiring
from autoshard.trace import Traced, rebuilt
from autoshard.trace.origin import Origins
from autoshard.trace.structure import types_of


def _trips(scope: Scope) -> int:
    """How often a scope runs in a step."""
    return math.prod(each.eqn.params["length"] for each in scope.path() if each.is_loop and each.eqn is not None)


class _Stays(Exception):
    """Why attention stays as it is written."""


@dataclass(frozen=True)
class Fused:
    """A program with its attention in kernels.

    Attributes:
        written: the program as it is written.
        jaxpr: with kernels; None where there are none.
        places: what is replaced, in words.
        left: what looks like attention and stays, with the reasons.
        shapes: of the scores that are in kernels.
        work: that of each kernel, and how often it runs in a step.
        repeats: how often a key head is repeated at most.
        problems: what the kernels compute.
    """

    written: Traced
    jaxpr: ClosedJaxpr | None
    places: tuple[str, ...]
    left: tuple[str, ...]
    shapes: frozenset[tuple[int, ...]] = frozenset()
    work: tuple[tuple[Kernel, int], ...] = ()
    repeats: int = 1
    problems: tuple[Problem, ...] = ()

    @cached_property
    def traced(self) -> Traced:
        """The program with kernels; itself where there are none."""
        return self.written if self.jaxpr is None else rebuilt(self.written, self.jaxpr)


def fused(traced: Traced, implementation: Implementation, interpret: bool = False, parts: int = 1) -> Fused:
    """The program with its attention in kernels, whose heads of keys so many devices divide, repeated where they are fewer."""
    used_elsewhere: set[int] = set()
    while True:
        root = program(traced.jaxpr)
        fusing = _Fusing(root, Wiring.of(root), implementation, interpret, used_elsewhere, parts)
        fusing.run()
        if not fusing.done:
            return Fused(traced, None, (), tuple(fusing.left))
        for scope in root.walk():
            scope.settle()
        made = closed(root)
        alive = {v for eqn in _equations(made.jaxpr) for v in eqn.outvars}
        used = {number for number, (attention, _) in fusing.done.items() if any(r.eqn.outvars[0] in alive for r in attention.region.roots)}
        if not used:
            places = tuple(words for _, words in fusing.done.values())
            shapes = frozenset(shape for attention, _ in fusing.done.values() for shape in attention.region.shapes())
            return Fused(traced, made, places, tuple(fusing.left), shapes, tuple(fusing.work), fusing.repeats, tuple(fusing.kernels))
        used_elsewhere |= used


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name in NESTED:
            for inner in jaxprs_in_params(eqn.params):
                yield from _equations(inner)


@dataclass(eq=False)
class _Fusing:
    """The replacement of a program's attention.

    Attributes:
        used_elsewhere: the numbers of attentions that stay, since something else reads their scores.
        parts: what divides the kernels' heads of keys.
        repeats: how often a key head is repeated at most.
        done: what was replaced, by number, with its place in words.
        left: what stays, with the reasons.
        work: that of the kernels, and how often each runs.
    """

    root: Scope
    wiring: Wiring
    implementation: Implementation
    interpret: bool
    used_elsewhere: set[int]
    parts: int = 1
    done: dict[int, tuple[Attention, str]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    work: list[tuple[Kernel, int]] = field(default_factory=list)
    origins: Origins = field(default_factory=Origins)
    kernels: dict[Problem, TracedKernel] = field(default_factory=dict)
    repeats: int = 1

    def run(self) -> None:
        """Replaces what can be replaced."""
        for number, found in enumerate([*attentions(self.root, self.wiring)]):
            if isinstance(found, Refused):
                self.left.append(f"attention at {self._line(found.eqn)} stays as it is written: {found.reason}")
                continue
            try:
                if number in self.used_elsewhere:
                    raise _Stays("its scores are used elsewhere, too")
                self._replace(found)
            except _Stays as error:
                self.left.append(f"attention at {self._line(found.region.roots[0].eqn)} stays as it is written: {error}")
            else:
                self.done[number] = found, words_of(found, self.origins)

    def home(self, var: Var) -> Scope:
        """The scope of a variable."""
        return self.wiring.home[var]

    def _line(self, eqn: JaxprEqn) -> str:
        return str(self.origins.of(eqn, None, ""))

    def _replace(self, found: Attention) -> None:
        """Puts kernels in the place of one attention."""
        exits = [exit for exit in found.gradients if exit is not None]
        homes = {self.wiring.home[exit.result[0]] for exit in exits}
        if len(homes) > 1:
            raise _Stays("its gradients are computed in different loops")
        behind = next(iter(homes), None)
        first = found.output
        scope = self.wiring.home[first.result[0]] if first is not None else behind
        assert scope is not None
        roles = Roles.of(self.wiring, found, self.parts)
        self.repeats = max(self.repeats, roles.times)
        kernel = self._kernel(roles.problem)
        forward, like = _Placed(self, roles, scope), (first or exits[0]).eqn
        inputs = forward.inputs(like)
        results = scope.call(kernel.forward, inputs, like, kernel.estimated)
        self.work += ((work, _trips(scope)) for work in kernel.works[0])
        if first is not None:
            forward.leave(results[0], roles.output, first.eqn, 1.0)
        if behind is None:
            return
        backward, like = _Placed(self, roles, behind), exits[0].eqn
        again = inputs if behind is scope else backward.inputs(like)
        kept = [backward.kept(source, again, results, scope) for source in kernel.kept]
        cotangent = backward.entered(roles.cotangent, ("group", "query", "value_width"), like, 1.0)
        gradients = behind.call(kernel.backward, [*kept, cotangent], like, kernel.estimated)
        self.work += ((work, _trips(behind)) for work in kernel.works[1])
        scale = 1.0 if self.implementation.scales else found.scale
        for exit, made, factor in zip(roles.gradients, gradients, (scale, 1.0, 1.0), strict=True):
            if exit is not None:
                backward.leave(made, exit, exits[0].eqn, factor)

    def _kernel(self, problem: Problem) -> TracedKernel:
        if reason := self.implementation.missing(problem):
            raise _Stays(reason)
        if problem not in self.kernels:
            self.kernels[problem] = TracedKernel.of(problem, self.implementation, self.interpret)
        return self.kernels[problem]


def words_of(found: Attention, origins: Origins | None = None) -> str:
    """The source line of an attention, and of which kind it is."""
    mask, line = found.mask, str((origins or Origins()).of(found.region.roots[0].eqn, None, ""))
    kinds = ["causal"] if mask.lowest == 0 else []
    if mask.highest is not None or (mask.lowest or 0) != 0:
        kinds.append("local window")
    kinds += ["segments"] if mask.segments else ["padding"] if mask.valid else []
    kinds += ["backward"] if found.output is None else []
    return f"{line} ({', '.join(kinds)})" if kinds else line


@dataclass(frozen=True, eq=False)
class _Placed:
    """The operands and results of kernels in one scope."""

    fusing: _Fusing
    roles: Roles
    scope: Scope

    def inputs(self, like: JaxprEqn) -> list[Atom]:
        """The queries, keys, values and segments as the kernel takes them."""
        roles, scales = self.roles, self.fusing.implementation.scales
        found = [self.entered(roles.q, ("group", "query", "width"), like, 1.0 if scales else roles.scale)]
        found += [self.entered(x, ("key", width), like, 1.0) for x, width in ((roles.k, "width"), (roles.v, "value_width"))]
        return [*found, *(self._segments(x, name, like) for x, name in zip(roles.segments, roles.segmented, strict=True))]

    def entered(self, operand: Operand, roles: Sequence[str], like: JaxprEqn, factor: float) -> Atom:
        """An operand in the kernel's layout and type, scaled."""
        var, labels = self._reached(operand[0]), flattened(operand[1])
        dims, at = self.roles.groups(roles), len(self.roles.batch) - 1
        times = 1 if "group" in roles else self.roles.times
        order = [labels.index(d) for group in dims for d in group]
        arranged = layouts([d.size for d in labels], order, [len(group) for group in dims])
        dtype = self.roles.problem.dtype

        def function(x: jax.Array) -> jax.Array:
            x = x if factor == 1.0 else x.astype(jnp.promote_types(x.dtype, jnp.float32)) * np.float32(factor)
            return repeated(arranged(x.astype(dtype)), at, times)

        return self._called(function, var, like)

    def _segments(self, operand: tuple[Var, Labels, bool | None], name: str, like: JaxprEqn) -> Atom:
        """Segments of queries or keys, by the batch dimensions that they have; all those of keys that are there are one segment."""
        var, labels, nonzero = operand
        own, positions = flattened(labels), self.roles.dimensions[name]
        shape = [*(d.size if d in own else 1 for d in self.roles.batch), -1]
        order = [own.index(d) for d in (*self.roles.batch, *positions) if d in own]

        def function(x: jax.Array) -> jax.Array:
            x = x.reshape([d.size for d in own]).transpose(order)
            x = x if nonzero is None else (x != 0) == nonzero
            x = x.astype(jnp.int32).reshape(shape)
            return repeated(x, len(shape) - 2, self.roles.times) if len(shape) > 1 and shape[-2] != 1 else x

        return self._called(function, self._reached(var), like)

    def _called(self, function: Any, var: Var, like: JaxprEqn) -> Atom:
        (made,) = self.scope.call(jax.make_jaxpr(function)(*types_of([var])), [var], like)
        return made

    def _reached(self, var: Var) -> Var:
        found = self.scope.reached(var, self.fusing.home(var))
        if found is None:
            raise _Stays("what it reads is made in another loop")
        return found

    def kept(self, source: tuple[str, Any], inputs: Sequence[Atom], results: Sequence[Atom], home: Scope) -> Atom:
        """What a backward kernel needs, in this scope."""
        kind, which = source
        if kind == "constant":
            return self.scope.captured(*which)
        atom = inputs[which] if kind == "input" else results[which]
        if kind == "input" or isinstance(atom, Literal) or home is self.scope:
            return atom
        found = self.scope.reached(atom, home)
        if found is None:
            raise _Stays("its backward pass is in another loop")
        return found

    def leave(self, made: Atom, result: Operand, like: JaxprEqn, factor: float) -> None:
        """Puts a result of a kernel in the place of what it replaces."""
        (var, labels), roles = result, self.roles
        own = roles.own(labels)
        now = [d for dims in roles.groups(own) for d in dims]
        at, times = len(roles.batch) - 1, 1 if "group" in own else roles.times
        order = [now.index(d) for d in flattened(labels)]
        counts = [len(flattened((label,))) for label in labels]
        arranged = layouts([d.size for d in now], order, counts)

        def function(x: jax.Array) -> jax.Array:
            x = x if factor == 1.0 else x.astype(jnp.promote_types(x.dtype, jnp.float32)) * np.float32(factor)
            return arranged(unrepeated(x, at, times)).astype(dtype_of(var)).reshape(shape_of(var))

        assert isinstance(made, Var)
        self.scope.renamed[var] = self._called(function, made, like)
