"""A forward pass and its backward pass as one list of equations, and the segments of the forward pass."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from autoshard.analysis.values import usage
from autoshard.ir import Op
from autoshard.ir.remat import CARRIED
from autoshard.primitives import is_loop, is_matrix
from autoshard.recompute.flat import Atom
from autoshard.trace.build import itemsize

MOST_PLACES = 400  # of a forward pass between which its segments are chosen: the narrowest
MOST_BOUNDS = 200  # on what a segment may hold that are tried, each below what one holds with the one before
SLACK = 1.05  # times the least that is held by which segments may exceed it where they are shorter

# Draws that depend on a generator's state or the device that runs them; those of JAX's counter-based keys are equal whenever they are made.
DRAWN_ONCE = frozenset({"rng_bit_generator", "rng_uniform"})


@dataclass(frozen=True)
class Block:
    """A forward pass and its backward pass.

    Attributes:
        eqns: the equations of the one, then those of the other.
        ops: of each the op.
        turn: how many the forward pass has.
        carried: what the backward pass can read only if it is stored, though no equation makes it: the carries of a forward loop.
        returned: what the forward pass stores anyway.
        captured: constant arrays.
    """

    eqns: tuple[JaxprEqn, ...]
    ops: tuple[Op, ...]
    turn: int
    carried: tuple[Var, ...] = ()
    returned: frozenset[Var] = frozenset()
    captured: frozenset[Var] = frozenset()

    @cached_property
    def made(self) -> Mapping[Var, int]:
        """Per value of the forward pass the number of its equation."""
        made = {var: k for k, eqn in enumerate(self.eqns[: self.turn]) for var in eqn.outvars}
        return dict.fromkeys(self.carried, CARRIED) | made

    @cached_property
    def needed(self) -> frozenset[Var]:
        """The values of the forward pass that the backward pass reads."""
        return frozenset(v for eqn in self.eqns[self.turn :] for v in variables(eqn.invars) if v in self.made)

    @cached_property
    def constant(self) -> frozenset[Var]:
        """The values of the forward pass that are made of constants alone."""
        found = {*self.captured}
        for eqn in self.eqns[: self.turn]:
            if found.issuperset(variables(eqn.invars)) and not eqn.effects:
                found.update(eqn.outvars)
        return frozenset(found)

    def held(self, wanted: Iterable[Var], stored: frozenset[Var]) -> set[Var]:
        """The values that a compiler holds so that others can be read: themselves where it stores them, else what it makes them of."""
        found, seen = set[Var](), set[Var]()
        waiting = list(wanted)
        while waiting:
            var = waiting.pop()
            if var in seen:
                continue
            seen.add(var)
            k = self.made.get(var)
            if k is None:
                continue
            if var in stored or k == CARRIED:
                found.add(var)
            else:
                waiting += variables(self.eqns[k].invars)
        return found

    def value(self, number: tuple[int, int]) -> Var:
        """A value by its numbers."""
        k, result = number
        return self.carried[result] if k == CARRIED else self.eqns[k].outvars[result]

    def number(self, var: Var) -> tuple[int, int]:
        """The numbers of a value of the forward pass."""
        k = self.made[var]
        return (k, (self.carried if k == CARRIED else tuple(self.eqns[k].outvars)).index(var))

    def repeatable(self, k: int) -> bool:
        """Whether an equation of the forward pass gives the same once more."""
        return all(_repeats(op) for op in self.ops[k].walk()) and not self.eqns[k].effects

    def again(self, kept: frozenset[Var]) -> list[int]:
        """The equations that the backward pass computes again where these values are kept; in order."""
        found: set[int] = set()
        waiting = [var for var in self.needed if var not in kept]
        while waiting:
            k = self.made[waiting.pop()]
            if k not in found and k != CARRIED:
                found.add(k)
                waiting += [v for v in variables(self.eqns[k].invars) if v in self.made and v not in kept]
        return sorted(found)


def _repeats(op: Op) -> bool:
    """Whether an op gives the same once more; what communicates by hand, or calls Python, is left alone."""
    return op.primitive not in DRAWN_ONCE and op.primitive not in ("shard_map", "pure_callback", "io_callback")


def variables(atoms: Sequence[Atom]) -> list[Var]:
    """The variables among atoms."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def nbytes(var: Var) -> float:
    """The bytes of a whole value; 0 for tokens."""
    dtype = getattr(var.aval, "dtype", None)
    shape = getattr(var.aval, "shape", ())
    return float(np.prod(shape, dtype=np.float64) * itemsize(dtype)) if dtype is not None else 0.0


def turning_point(eqns: Sequence[JaxprEqn], ops: Sequence[Op]) -> tuple[int, float]:
    """How many equations are the forward pass, and the bytes that are alive then: where most are that products or loops still read.

    Gradients are not among these: nothing but the optimizer's updates reads them.
    """
    made, last = {}, {}
    for k, (eqn, is_awaited) in enumerate(zip(eqns, awaited(eqns, ops), strict=True)):
        if is_awaited:
            last.update((var, k) for var in variables(eqn.invars) if var in made)
        made.update((var, k) for var in eqn.outvars)
    alive = usage(len(eqns), [*map(nbytes, last)], [made[var] + 1 for var in last], [k + 1 for k in last.values()])
    turn = int(alive.argmax())
    return turn, float(alive[turn])


def awaited(eqns: Sequence[JaxprEqn], ops: Sequence[Op]) -> list[bool]:
    """Per equation whether it is a product or a loop, or one of these waits for it."""
    found, wanted = [False] * len(eqns), set[Var]()
    for k in reversed(range(len(eqns))):
        heavy = is_loop(ops[k].primitive) or any(is_matrix(op.primitive) for op in ops[k].walk())
        found[k] = heavy or not wanted.isdisjoint(eqns[k].outvars)
        if found[k]:
            wanted.update(variables(eqns[k].invars))
    return found


def segments(block: Block, stored: frozenset[Var], free: frozenset[Var]) -> tuple[int, ...]:
    """Where the segments of a forward pass begin, except the first.

    While a segment's backward pass runs, what crosses from one segment to another is held, and what this one's backward pass reads; the
    last segment's is held at once. Segments are such that all that is least: for each bound on what one holds the shortest path over
    narrow places. Of those that hold nearly as little the shortest segments are taken, since backward passes hold cotangents, too.

    Args:
        stored: values that the compiler would store; others it makes again by itself.
        free: values that are made of constants.
    """
    lives = _lives(block, free)
    places = _narrow(_width(block.turn, lives))
    if not places:
        return ()
    ends = np.array([0, *places, block.turn])
    held = _inner(block, stored)[ends]
    between = held[None, :] - held[:, None]  # [i, j]: bytes that the backward pass reads of what is made from end i to end j
    length = _crossing(ends, lives)
    total, longest = min(((crossing + most, most) for crossing, most, _ in _paths(length, between, None)), default=(0.0, 0.0))
    shorter = [path for crossing, _, path in _paths(length, between, longest) if crossing + longest <= SLACK * total]
    return tuple(int(ends[i]) for i in shorter[-1]) if shorter else ()


def _paths(length: np.ndarray, held: np.ndarray, last: float | None) -> Iterator[tuple[float, float, tuple[int, ...]]]:
    """Shortest paths with lower and lower bounds on what an edge holds: length, the most that one holds, and the inner nodes.

    Args:
        last: the bound on edges to the last node; None: that of the others.
    """
    bound = np.inf
    for _ in range(MOST_BOUNDS):
        allowed = held < bound
        if last is not None:
            allowed[:, -1] = held[:, -1] <= last
        path = _shortest(np.where(allowed, length, np.inf))
        if path is None:
            return
        edges = list(pairwise((0, *path, len(length) - 1)))
        bound = max((held[i, j] for i, j in (edges if last is None else edges[:-1])), default=0.0)
        yield sum(length[i, j] for i, j in edges), bound, path


def _shortest(length: np.ndarray) -> tuple[int, ...] | None:
    """The inner nodes of the shortest path from the first to the last node along edges ``[i, j]``, ``i < j``; O(n²)."""
    n = len(length)
    cost, before = np.full(n, np.inf), np.zeros(n, dtype=int)
    cost[0] = 0.0
    for j in range(1, n):
        found = cost[:j] + length[:j, j]
        before[j] = found.argmin()
        cost[j] = found[before[j]]
    if not np.isfinite(cost[-1]):
        return None
    path, j = [], n - 1
    while (j := int(before[j])) > 0:
        path.append(j)
    return tuple(reversed(path))


def _lives(block: Block, free: frozenset[Var]) -> np.ndarray:
    """Of the values of the forward pass ``(n, 3)``: the position before which each is made, the last that reads it, and its bytes."""
    last: dict[Var, int] = {}
    for k, eqn in enumerate(block.eqns[: block.turn]):
        last.update((var, k) for var in variables(eqn.invars) if var in block.made and var not in free)
    return np.array([(block.made[var] + 1, k, nbytes(var)) for var, k in last.items()]).reshape(-1, 3)


def _width(turn: int, lives: np.ndarray) -> np.ndarray:
    """Per position in the forward pass the bytes made before it that the forward pass reads after it."""
    made, last, sizes = lives.T
    return usage(turn, sizes, made, last + 1)


def _crossing(ends: np.ndarray, lives: np.ndarray) -> np.ndarray:
    """``[i, j]``: bytes alive at end j that are made after end i: what a segment between them adds to what is held."""
    found = np.zeros((len(ends), len(ends)))
    for j, end in enumerate(ends[:-1]):
        made, _, held = lives[(lives[:, 0] <= end) & (lives[:, 1] >= end)].T
        order = np.argsort(made)
        total = np.concatenate([[0.0], np.cumsum(held[order])])
        found[:, j] = total[-1] - total[np.searchsorted(made[order], ends, side="right")]
    return found


def _inner(block: Block, stored: frozenset[Var]) -> np.ndarray:
    """Per position the bytes made before it that the backward pass reads."""
    made = np.zeros(block.turn + 1)
    for var in block.held(block.needed, stored):
        made[block.made[var] + 1] += nbytes(var)
    return np.cumsum(made)


def _narrow(width: np.ndarray) -> list[int]:
    """The positions at which fewer bytes are alive than before and after."""
    inside = [p for p in range(1, len(width) - 1) if 0 < width[p] < width[p - 1]]
    found = [p for p, after in pairwise([*inside, len(width) - 1]) if width[p + 1 : after + 1].max() > width[p]]
    return sorted(sorted(found, key=lambda p: width[p])[:MOST_PLACES])


def segment_of(places: Sequence[int], k: int) -> int:
    """The number of the segment of an equation."""
    return bisect_right(places, k)


def stacked(var: Var, length: int) -> Var:
    """A variable for the values of all trips of a loop."""
    return Var(var.aval.update(shape=(length, *getattr(var.aval, "shape", ()))))


def is_key(var: Var) -> bool:
    """Whether a value is a typed random key."""
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.extended)
