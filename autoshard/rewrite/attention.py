"""Plain attention made fused: softmax(mask(q k^T)) v and its gradient, as a program has them, run in a kernel of JAX's own.

What is replaced was compared with attention in numbers (`attention_match`); the kernels are those of `attention_kernels`. A forward kernel keeps
what its backward kernel needs, through loops over layers as well. Where a checkpoint computes attention again, the forward kernel runs again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.errors import TraceError
from autoshard.recompute.flat import Atom
from autoshard.rewrite.attention_kernels import IMPLEMENTATIONS, Implementation, Problem, estimated, layouts
from autoshard.rewrite.attention_match import Attention, Refused, attentions
from autoshard.rewrite.dimensions import Dimension, Labels, Mismatch, backward, flattened, forward
from autoshard.rewrite.options import Rewriting
from autoshard.rewrite.scopes import NESTED, Scope, Wiring, closed, program
from autoshard.trace import Traced, rebuilt
from autoshard.trace.libraries import assumed
from autoshard.trace.origin import Origins
from autoshard.trace.structure import types_of

Operand = tuple[Var, Labels]


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """Attention of a program that runs in a kernel.

    Attributes:
        kernel: the name of the implementation.
        places: what is replaced, in words: one for each attention, that of a backward pass apart.
        interpret: whether the kernel runs as operations of JAX, on any device.
    """

    kernel: str
    places: tuple[str, ...]
    interpret: bool = False
    kind: ClassVar[str] = "fused_attention"

    def apply(self, traced: Traced) -> Traced:
        """The program with its attention in kernels.

        Raises:
            TraceError: its attention is not that for which this was made.
        """
        made = fused(traced, IMPLEMENTATIONS[self.kernel], self.interpret)
        if made.places != self.places:
            raise TraceError(
                f"a strategy with fused attention is of a program with attention in {len(self.places)} places, "
                f"{', '.join(self.places)}; {traced.graph.name!r} has {', '.join(made.places) or 'none'}. Search again."
            )
        return made.traced

    def json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {"kernel": self.kernel, "places": list(self.places), **({"interpret": True} if self.interpret else {})}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """The rewrite with these fields.

        Raises:
            ValueError, KeyError: they are not its own.
        """
        if fields["kernel"] not in IMPLEMENTATIONS:
            raise ValueError(f"kernel is one of {', '.join(IMPLEMENTATIONS)}, got {fields['kernel']!r}")
        return cls(fields["kernel"], tuple(fields["places"]), bool(fields.get("interpret", False)))

    def describe(self) -> str:
        """What it does, in a sentence without a full stop."""
        return f"attention runs in {self.kernel}: {'; '.join(dict.fromkeys(self.places))}"


def proposals(traced: Traced, cluster: Cluster, rewriting: Rewriting) -> Sequence[FusedAttention]:
    """The fused attention of a program, where it is asked for and there is any."""
    name = compiler_of(cluster).fused_attention
    if rewriting.kernels != "auto" or not name:
        return ()
    places = fused(traced, IMPLEMENTATIONS[name]).places
    return (FusedAttention(name, places),) if places else ()


@dataclass(frozen=True, slots=True)
class Fused:
    """A program with its attention in kernels.

    Attributes:
        traced: the program.
        places: what is replaced, in words.
        left: what looks like attention and stays, with the reasons.
    """

    traced: Traced
    places: tuple[str, ...]
    left: tuple[str, ...]


def fused(traced: Traced, implementation: Implementation, interpret: bool = False) -> Fused:
    """The program with its attention in kernels."""
    used_elsewhere: set[int] = set()
    while True:
        root = program(traced.jaxpr)
        fusing = _Fusing(root, Wiring.of(root), implementation, interpret, used_elsewhere)
        fusing.run()
        if not fusing.done:
            return Fused(traced, (), tuple(fusing.left))
        for scope in root.walk():
            scope.put_in_order()
        made = closed(root)
        alive = {v for eqn in _equations(made.jaxpr) for v in eqn.outvars}
        used = {number for number, (attention, _) in fusing.done.items() if any(r.eqn.outvars[0] in alive for r in attention.region.roots)}
        if not used:
            places = tuple(words for _, words in fusing.done.values())
            return Fused(rebuilt(traced, made, traced.microbatches), places, tuple(fusing.left))
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
        done: what was replaced, by number, with its place in words.
        left: what stays, with the reasons.
    """

    root: Scope
    wiring: Wiring
    implementation: Implementation
    interpret: bool
    used_elsewhere: set[int]
    done: dict[int, tuple[Attention, str]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    origins: Origins = field(default_factory=Origins)
    kernels: dict[Problem, _Kernel] = field(default_factory=dict)

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
                self.done[number] = found, self._words(found)

    def home(self, var: Var) -> Scope:
        """The scope of a variable."""
        return self.wiring.home[var]

    def _line(self, eqn: JaxprEqn) -> str:
        return str(self.origins.of(eqn, None, ""))

    def _words(self, found: Attention) -> str:
        mask, root = found.mask, found.region.roots[0].eqn
        kinds = ["causal"] if mask.lowest == 0 else []
        if mask.highest is not None or (mask.lowest or 0) != 0:
            kinds.append("local window")
        kinds += ["segments"] if mask.segments else ["padding"] if mask.valid else []
        kinds += ["backward"] if found.output is None else []
        return f"{self._line(root)} ({', '.join(kinds)})" if kinds else self._line(root)

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
        roles = _Roles.of(self.wiring, found, behind is not None)
        kernel = self._kernel(roles.problem)
        forward, like = _Placed(self, roles, scope), (first or exits[0]).eqn
        inputs = forward.inputs(like)
        results = scope.call(kernel.forward, inputs, like, kernel.estimated)
        if first is not None:
            forward.leave(results[0], roles.output, first.eqn, 1.0)
        if behind is None:
            return
        backward, like = _Placed(self, roles, behind), exits[0].eqn
        again = inputs if behind is scope else backward.inputs(like)
        kept = [backward.kept(source, again, results, scope) for source in kernel.kept]
        cotangent = backward.entered(roles.cotangent, ("group", "query", "value_width"), like, 1.0)
        gradients = behind.call(kernel.backward, [*kept, cotangent], like, kernel.estimated)
        scale = 1.0 if self.implementation.scales else found.scale
        for exit, made, factor in zip(roles.gradients, gradients, (scale, 1.0, 1.0), strict=True):
            if exit is not None:
                backward.leave(made, exit, exits[0].eqn, factor)

    def _kernel(self, problem: Problem) -> _Kernel:
        if reason := self.implementation.missing(problem):
            raise _Stays(reason)
        if problem not in self.kernels:
            self.kernels[problem] = _Kernel.of(problem, self.implementation, self.interpret)
        return self.kernels[problem]


class _Stays(Exception):
    """Why attention stays as it is written."""


@dataclass(frozen=True, eq=False)
class _Kernel:
    """A kernel traced for one problem.

    Attributes:
        forward: the function of queries, keys, values and segments to the output and what its gradient needs.
        backward: that of what is needed and the output's cotangent to gradients of queries, keys and values.
        kept: where what the gradient needs comes from: the number of an input, of a result of ``forward``, or a captured array.
        estimated: gives a kernel's equation with its work.
    """

    forward: ClosedJaxpr
    backward: ClosedJaxpr
    kept: tuple[tuple[str, Any], ...]
    estimated: Any

    @classmethod
    def of(cls, problem: Problem, implementation: Implementation, interpret: bool) -> _Kernel:
        make = partial(jax.ShapeDtypeStruct, dtype=problem.dtype)
        q = make((*problem.batch, problem.group, problem.query, problem.width))
        k, v = (make((*problem.batch, problem.key, width)) for width in (problem.width, problem.value_width))
        segments = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in problem.segments]
        attend, trees = implementation.function(problem, interpret), list[Any]()

        def forward(q: Any, k: Any, v: Any, *segments: Any) -> Any:
            made, pull = jax.vjp(lambda q, k, v: attend(q, k, v, *segments), q, k, v)
            leaves, tree = jax.tree.flatten(pull)
            trees[:] = [tree]
            return [made, *leaves]

        with assumed():
            first = jax.make_jaxpr(forward)(q, k, v, *segments)
            made, *leaves = first.out_avals
            second = jax.make_jaxpr(lambda leaves, ct: trees[0].unflatten(leaves)(ct))([*_shapes(leaves)], *_shapes([made]))
        inputs, constants = first.jaxpr.invars, dict(zip(first.jaxpr.constvars, first.consts, strict=True))
        kept: list[tuple[str, Any]] = []
        for number, x in enumerate(first.jaxpr.outvars[1:], 1):
            if isinstance(x, Var) and x in constants:
                kept.append(("constant", (x, constants[x])))
            else:
                kept.append(("input", inputs.index(x)) if x in inputs else ("result", number))
        return cls(first, second, tuple(kept), partial(estimated, share=implementation.share(problem)))


def _shapes(avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in avals]


@dataclass(frozen=True, eq=False)
class _Placed:
    """The operands and results of kernels in one scope."""

    fusing: _Fusing
    roles: _Roles
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
        dims = [*((each,) for each in self.roles.batch), *(self.roles.dimensions[role] for role in roles)]
        order = [labels.index(d) for group in dims for d in group]
        arranged = layouts([d.size for d in labels], order, [len(group) for group in dims])
        dtype = self.roles.problem.dtype

        def function(x: jax.Array) -> jax.Array:
            x = x if factor == 1.0 else x.astype(jnp.promote_types(x.dtype, jnp.float32)) * np.float32(factor)
            return arranged(x.astype(dtype))

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
            return x.astype(jnp.int32).reshape(shape)

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
        now = [*roles.batch, *(d for role in own for d in roles.dimensions[role])]
        order = [now.index(d) for d in flattened(labels)]
        counts = [len(flattened((label,))) for label in labels]
        arranged = layouts([d.size for d in now], order, counts)

        def function(x: jax.Array) -> jax.Array:
            x = x if factor == 1.0 else x.astype(jnp.promote_types(x.dtype, jnp.float32)) * np.float32(factor)
            return arranged(x).astype(var.aval.dtype).reshape(var.aval.shape)

        assert isinstance(made, Var)
        self.scope.substitute({var: self._called(function, made, like)})


@dataclass(frozen=True, eq=False)
class _Roles:
    """The operands and results of one attention, by what the kernel calls them.

    Attributes:
        problem: what the kernel is to compute.
        batch, dimensions: the dimensions of its layout.
        q, k, v, cotangent, output, gradients: variables with their labels, of keys and values before they are repeated.
        segments: of queries and of keys: the variable, its labels, and whether keys that are not zero are there, if that is what it says.
        scale: of scores.
    """

    problem: Problem
    batch: tuple[Dimension, ...]
    dimensions: Mapping[str, tuple[Dimension, ...]]
    q: Operand
    k: Operand
    v: Operand
    cotangent: Operand
    output: Operand
    gradients: tuple[Operand | None, Operand | None, Operand | None]
    segments: tuple[tuple[Var, Labels, bool | None], ...]
    scale: float

    @property
    def segmented(self) -> tuple[str, ...]:
        """What each array of segments is of."""
        return SEGMENTED[len(SEGMENTED) - len(self.segments) :]

    def own(self, labels: Labels) -> tuple[str, ...]:
        """The roles of a result's dimensions beside the batch."""
        has = set(flattened(labels))
        if not has.isdisjoint(self.dimensions["key"]):
            first: tuple[str, ...] = ("key",)
        else:
            first = ("group", "query")
        width = "width" if not has.isdisjoint(self.dimensions["width"]) else "value_width"
        return (*first, width)

    @classmethod
    def of(cls, wiring: Wiring, found: Attention, has_gradients: bool) -> _Roles:
        q, k, v = (_narrowed(wiring, each) for each in (found.q, found.k, found.v))
        batch, group, gradients = found.batch, found.group, list(exit and exit.result for exit in found.gradients)
        shared = [_unrepeated(wiring, each, set(batch)) for each in (k, v)]
        ungrouped = [_summed(wiring, made, repeated) for made, (_, repeated) in zip(gradients[1:], shared, strict=True)]
        batch = flattened((batch,))  # in dimensions as they are now: those of heads may be split
        shared = [(operand, set(flattened((tuple(repeated),)))) for operand, repeated in shared]
        if shared[0][1] and shared[0][1] == shared[1][1] and all(a is not None or b is None for a, b in zip(ungrouped, gradients[1:], strict=True)):
            (k, repeated), (v, _) = shared
            batch = tuple(d for d in batch if d not in repeated)
            group = (*(d for d in flattened((found.batch,)) if d in repeated), *group)
            gradients[1:] = ungrouped
        roles = {"group": group, "query": found.query, "key": found.key, "width": found.width, "value_width": found.value_width}
        dimensions = {role: flattened((dims,)) for role, dims in roles.items()}
        size = {role: _size(dims) for role, dims in dimensions.items()}
        mask = found.mask
        segments: tuple[tuple[Var, Labels, bool | None], ...] = ()
        if mask.segments is not None:
            segments = tuple((*each, None) for each in mask.segments)
        elif mask.valid is not None:
            segments = (mask.valid,)
        dtype = jnp.result_type(*(x.aval.dtype for x, _ in (q, k, v))).name
        has = [{*flattened(labels)} for _, labels, _ in segments]
        shapes = tuple((*(d.size if d in own else 1 for d in batch), size[name]) for own, name in zip(has, SEGMENTED[len(SEGMENTED) - len(segments) :], strict=True))
        problem = Problem(
            tuple(d.size for d in batch), *(size[role] for role in dimensions), dtype, mask.lowest, mask.highest, shapes, found.scale, found.softcap
        )  # fmt: skip
        output = found.output.result if found.output is not None else q
        cotangent = _narrowed(wiring, found.backward[3]) if found.backward else q
        return cls(problem, batch, dimensions, q, k, v, cotangent, output, tuple(gradients), segments, found.scale)  # type: ignore[arg-type]


def _size(dimensions: Sequence[Dimension]) -> int:
    return int(np.prod([d.size for d in dimensions], dtype=np.int64))


def _narrowed(wiring: Wiring, operand: Operand) -> Operand:
    """An operand before it was made wider."""
    var, labels = operand
    while (eqn := wiring.maker.get(var)) is not None and eqn.primitive.name == "convert_element_type":
        (before,) = eqn.invars
        if not isinstance(before, Var) or not _is_wider(var.aval.dtype, before.aval.dtype):
            break
        var = before
    return var, labels


def _is_wider(one: Any, other: Any) -> bool:
    """Whether a type has every number of another one."""
    return jnp.issubdtype(other, jnp.floating) and one != other and jnp.promote_types(one, other) == one


def _unrepeated(wiring: Wiring, operand: Operand, batch: set[Dimension]) -> tuple[Operand, set[Dimension]]:
    """Keys or values before they were repeated for the queries of a group, and the dimensions along which they are."""
    (var, labels), best, repeated = operand, operand, set[Dimension]()
    while (eqn := wiring.maker.get(var)) is not None:
        try:
            if eqn.primitive.name == "broadcast_in_dim" and isinstance(eqn.invars[0], Var):
                made, shape = labels, eqn.invars[0].aval.shape
                dims = eqn.params["broadcast_dimensions"]
                labels = tuple(made[to] if size == eqn.outvars[0].aval.shape[to] else () for size, to in zip(shape, dims, strict=True))
                var = eqn.invars[0]
                lost = set(flattened(made)) - set(flattened(labels))
                if not lost <= batch:
                    break
                repeated |= lost
                best = (var, labels) if repeated else best
            elif eqn.primitive.name in MOVES:
                ((var, labels),) = backward(eqn, labels)
            else:
                break
        except (Mismatch, ValueError):
            break
    return (_narrowed(wiring, best), repeated) if repeated else (operand, set())


def _summed(wiring: Wiring, result: Operand | None, repeated: set[Dimension]) -> Operand | None:
    """A gradient summed over the dimensions along which its operand was repeated; None where it is not."""
    if result is None:
        return None
    (var, labels), left = result, set(repeated)
    while left:
        readers, outputs, entries = (found.get(var, ()) for found in (wiring.readers, wiring.outputs, wiring.entries))
        if len(readers) != 1 or outputs or entries:
            return None
        (eqn,) = readers
        try:
            made = forward(eqn, [labels])
        except Mismatch:
            return None
        if made is None or eqn.primitive.name not in {*MOVES, "reduce_sum", "convert_element_type"}:
            return None
        lost = set(flattened(labels)) - set(flattened(made))
        if not lost <= left:
            return None
        left -= lost
        var, labels = eqn.outvars[0], made
    return var, labels


SEGMENTED = ("query", "key")

MOVES = frozenset({"expand_dims", "reshape", "squeeze", "transpose"})
"""Operations that keep all elements."""
