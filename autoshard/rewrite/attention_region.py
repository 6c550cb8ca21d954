"""The part of a program that computes on attention scores: everything between the products that make them and those that read them.

It starts at a matrix product, and follows its result through operations of elements, sums over keys, and loops and checkpoints that keep
it, to the products that contract it. Where it is combined with another array of the same dimensions, the product that made that one starts,
too: in a backward pass that of the output's cotangent and the values. Where probabilities are normalised after their product with the
values, this is followed to the quotient.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any
from typing import Literal as OneOf

from jax.extend.core import JaxprEqn, Var

from autoshard.rewrite.dimensions import (
    Labels,
    Mismatch,
    backward,
    flattened,
    forward,
    fresh,
    product,
    product_of,
    unify,
)
from autoshard.rewrite.scopes import shape_of
from autoshard.rewrite.values import ELEMENTWISE, REDUCTIONS
from autoshard.rewrite.wiring import Wiring

Kind = OneOf["scores", "output", "mixed"]
"""What a variable is: scores or statistics of their rows; the product of scores and something; that of row statistics and something."""


@dataclass(eq=False)
class Root:
    """A product that makes scores: its result's labels, and those of its operands."""

    eqn: JaxprEqn
    labels: Labels
    operands: tuple[Labels, Labels]


@dataclass(eq=False)
class Exit:
    """A product that contracts scores.

    Attributes:
        eqn: the product.
        scores, other: its operands, with their labels.
        result: what it makes, normalised if that comes after it, with its labels.
        contracted: the dimensions that it contracts.
    """

    eqn: JaxprEqn
    scores: tuple[Any, Labels]
    other: tuple[Any, Labels]
    result: tuple[Any, Labels]
    contracted: Labels


@dataclass(eq=False)
class Region:
    """What computes on the scores of one product.

    Attributes:
        labels, kinds: of its variables.
        roots: the products that make scores, the given one first.
        exits: those that contract them.
        reduced: of sums and maxima of scores, the dimensions.
        outside: what is multiplied with statistics of rows, with its labels.
        functions: the names of its operations of elements.
        blocked: the first operation that is not followed.
    """

    labels: dict[Var, Labels] = field(default_factory=dict)
    kinds: dict[Var, Kind] = field(default_factory=dict)
    roots: list[Root] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    reduced: list[Labels] = field(default_factory=list)
    outside: list[tuple[Var, Labels]] = field(default_factory=list)
    functions: set[str] = field(default_factory=set)
    blocked: JaxprEqn | None = None

    def parts(self, var: Var, dim: int) -> tuple[int, ...]:
        """The sizes of the elementary dimensions of one of a variable."""
        known = [self.labels.get(var), *(labels for v, labels in self._operands() if v is var)]
        found = max((flattened((labels[dim],)) for labels in known if labels is not None), key=len, default=())
        return tuple(each.size for each in found) or (shape_of(var)[dim],)

    def shapes(self) -> set[tuple[int, ...]]:
        """The shapes of the scores, in each order of their dimensions that there is."""
        whole = set(flattened(self.roots[0].labels))
        return {shape_of(var) for var, labels in self.labels.items() if set(flattened(labels)) == whole}

    def _operands(self) -> list[tuple[Any, Labels]]:
        return [
            *(pair for root in self.roots for pair in zip(root.eqn.invars, root.operands, strict=True)),
            *(exit.other for exit in self.exits),
            *self.outside,
        ]


def region_of(wiring: Wiring, order: Mapping[int, int], eqn: JaxprEqn) -> Region:
    """The region of the scores that a product makes."""
    return _Following(wiring, order).region(eqn)


class _Following:
    def __init__(self, wiring: Wiring, order: Mapping[int, int]):
        self._wiring, self._order = wiring, order
        self._found = Region()
        self._base: Labels = ()
        self._exit_of: dict[Var, Exit] = {}
        self._queue: list[tuple[int, int, JaxprEqn]] = []
        self._searched: set[Var] = set()

    def region(self, eqn: JaxprEqn) -> Region:
        self._base = tuple(fresh(size, False) for size in shape_of(eqn.outvars[0]))
        self._root(eqn, self._base)
        done: set[tuple] = set()
        while self._queue or self._settled():
            _, _, reader = heapq.heappop(self._queue)
            state = (id(reader), *(self._found.kinds.get(x) if isinstance(x, Var) else None for x in reader.invars))
            if state not in done:
                done.add(state)
                try:
                    self._read(reader)
                except Mismatch:
                    self._found.blocked = self._found.blocked or reader
        return self._found

    def _settled(self) -> bool:
        """Takes for scores what was multiplied with row statistics and has turned out to have the dimensions of scores."""
        found = self._found
        for var in [var for var, kind in found.kinds.items() if kind == "mixed" and self._is_inside(found.labels[var])]:
            self._label(var, found.labels[var], "scores")
        inside = [pair for pair in found.outside if self._is_inside(pair[1])]
        found.outside = [pair for pair in found.outside if pair not in inside]
        for var, labels in inside:
            self._search(var, labels)
        return bool(self._queue)

    def _root(self, eqn: JaxprEqn, labels: Labels) -> None:
        self._found.roots.append(Root(eqn, labels, product(eqn, labels)))
        self._label(eqn.outvars[0], labels, "scores")

    def _label(self, var: Var, labels: Labels, kind: Kind, exit: Exit | None = None) -> None:
        """Labels a variable and what it is in other scopes, and queues its readers."""
        if var in self._found.labels:
            unify(self._found.labels[var], labels)
            if self._found.kinds[var] == kind:
                return
        self._found.labels[var], self._found.kinds[var] = labels, kind
        if exit is not None:
            self._exit_of[var] = exit
        wiring = self._wiring
        for reader in wiring.readers.get(var, ()):
            heapq.heappush(self._queue, (self._order[id(reader)], id(reader), reader))
        for other in wiring.others(var):
            if other not in self._found.labels:
                self._label(other, labels, kind, exit)

    def _is_inside(self, labels: Labels) -> bool:
        """Whether an array has dimensions of the scores alone."""
        return set(flattened(labels)) <= set(flattened(self._base))

    def _read(self, eqn: JaxprEqn) -> None:
        """Follows one operation that reads scores, statistics or outputs."""
        found = self._found
        read = [x for x in eqn.invars if isinstance(x, Var)]
        kinds = {found.kinds[x] for x in read if x in found.kinds}
        if eqn.primitive.name == "dot_general":
            if "scores" in kinds:
                self._contract(eqn)
            return
        others = [x for x in read if x not in found.labels and shape_of(x) == shape_of(eqn.outvars[0])]
        is_elementwise = eqn.primitive.name in ELEMENTWISE
        if kinds == {"output"}:  # perhaps on its way to being normalised
            if not others and (exits := {self._exit_of[x] for x in read if x in self._exit_of}) and len(exits) == 1:
                if (labels := forward(eqn, [self._labels(x) for x in eqn.invars])) is not None:
                    self._label(eqn.outvars[0], labels, "output", exits.pop())
            return
        known = [self._labels(x) for x in eqn.invars]
        made = forward(eqn, known)
        if made is None:
            found.blocked = found.blocked or eqn
            return
        if is_elementwise:
            found.functions.add(eqn.primitive.name)
        if eqn.primitive.name in REDUCTIONS and (operand := known[0]) is not None and self._is_inside(operand):
            if any(operand[axis] for axis in eqn.params["axes"]):
                found.reduced.append(tuple(operand[axis] for axis in eqn.params["axes"]))
        kind, exit = self._kind(eqn, made, kinds, read, others)
        for var in eqn.outvars:
            self._label(var, made, kind, exit)

    def _kind(self, eqn: JaxprEqn, made: Labels, kinds: Set[str], read: Sequence[Var], others: Sequence[Var]) -> tuple[Kind, Exit | None]:
        """What an operation's results are, whose labels are ``made``, and the exit of an output."""
        found, is_elementwise = self._found, eqn.primitive.name in ELEMENTWISE
        kind: Kind = "scores"
        exit = None
        if not self._is_inside(made) and is_elementwise:
            if "output" in kinds and "mixed" not in kinds and not others:
                kind, exit = "output", next(self._exit_of[x] for x in read if x in self._exit_of)
                exit.result = eqn.outvars[0], made
            elif "mixed" in kinds or others:
                kind = "mixed"
                found.outside += [(x, made) for x in others]
        elif not self._is_inside(made) and "mixed" in kinds:
            kind = "mixed"
        elif is_elementwise:
            for x in others:
                self._search(x, made)
        return kind, exit

    def _labels(self, atom: object) -> Labels | None:
        return self._found.labels.get(atom) if isinstance(atom, Var) else None

    def _search(self, var: Var, labels: Labels) -> None:
        """Finds the product that makes an array of scores, and starts there, too."""
        if var in self._searched or var in self._found.labels:
            return
        self._searched.add(var)
        if (entry := self._wiring.entry.get(var)) is not None:
            if entry.passing == "whole" and isinstance(entry.outer, Var):
                self._search(entry.outer, labels)
            return
        if (eqn := self._wiring.maker.get(var)) is None:
            return
        if eqn.primitive.name == "dot_general":
            self._root(eqn, labels)
            return
        for operand, known in backward(eqn, labels):
            self._search(operand, known)

    def _contract(self, eqn: JaxprEqn) -> None:
        """Takes a product of scores with something else as an exit."""
        found = self._found
        sides = [k for k, x in enumerate(eqn.invars) if isinstance(x, Var) and found.kinds.get(x) == "scores"]
        scores: Any = eqn.invars[sides[0]]
        labels = found.labels[scores]
        if len(sides) > 1 or not self._is_inside(labels) or any(each.eqn is eqn for each in found.exits):
            found.blocked = found.blocked or (eqn if len(sides) > 1 else None)
            return
        (side,), other = sides, eqn.invars[1 - sides[0]]
        theirs, made = product_of(eqn, side, labels)
        if isinstance(other, Var) and other in found.labels:
            unify(found.labels[other], theirs)
        contracted = tuple(labels[dim] for dim in eqn.params["dimension_numbers"][0][side])
        exit = Exit(eqn, (scores, labels), (other, theirs), (eqn.outvars[0], made), contracted)
        found.exits.append(exit)
        self._label(eqn.outvars[0], made, "output", exit)
