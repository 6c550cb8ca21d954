"""Cheapest sequences of collectives from one layout of a tensor to another.

*Moves.* A layout changes in one step by

- ``slice``: one more axis splits a dimension, after the axes that split it already; every device keeps a part of its shard, free of cost;
- ``all_gather``: the last axes of a dimension are gathered, together;
- ``all_to_all``: the last axes of a dimension move to another one, behind the axes that split that already, together;
- ``collective_permute``: every device sends one piece of its shard, where the target splits each dimension at least as often as the source
  (from ``('b', None)`` to ``(('a', 'b'), None)``: a part of each shard, sent to its device in mesh order; `autoshard.cost.permute`).

*Path.* The cheapest sequence of moves through layouts that divide the shape and use only axes of the source and the target (a slice over
an idle axis that a wider gather undoes can be faster on a torus, but no partitioner does it); of equally cheap ones the shortest.
Exact, by Floyd and Warshall's all-pairs closure for each set of axes: O(n^3) elementwise in numpy for the n = (rank + 1) ** axes layouts,
once per byte count and divisibility pattern.

*Gathers in two steps.* A compiler may have no all_gather over all devices of a three-dimensional torus. Several axes are gathered one
after the other then; one axis along the innermost ring first, when shards are small, and then along the two other rings at once.

*Lowering.* Each step is lowered to the collective of its name (`autoshard.lower.collectives`).

*Partial sums* are combined by one reduce_scatter for each dimension that is scattered, then by one all_reduce over the axes that do not
scatter (`combinations`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from autoshard.cost.collectives import Communication, Groups
from autoshard.cost.permute import exchange_axes
from autoshard.ir import Layout, Mesh, Rule, Value, divides, layout_number, layouts, shard_counts, shards

# Added per move where paths are compared, never reported: below any latency, and far above rounding at a second's scale.
TIE_SECONDS = 1e-12


@dataclass(frozen=True, slots=True)
class Step:
    """One move, one combination of partial results, or one exchange between shards.

    Attributes:
        kind: ``slice``, ``all_gather``, ``all_to_all``, ``collective_permute``, ``reduce_scatter`` or ``all_reduce``.
        axes: the mesh axes that take part, in mesh order.
        source, target: the layouts before and after.
        nbytes: the larger of operand and result of one device; of a permute the piece that is sent.
        seconds: its cost; 0 for a slice.
        copying_seconds: how long the device's compute is busy with it.
        trips: executions that the compiler merges into one, of which ``seconds`` is one's share; 0: it is merged into another collective.
        compiled_nbytes: bytes of the compiler's collective; 0: ``nbytes``.
        groups: of a collective in each of several groups of one axis' devices, their size and the distance of their devices.
        itemsize: bytes of a number of a sum that may cross levels in a narrow type (`autoshard.cost.narrow_sums`); else 0.
        hops: of what goes round all shards, in so many permutes while they compute; else 0.
    """

    kind: str
    axes: tuple[int, ...]
    source: Layout
    target: Layout
    nbytes: float
    seconds: float
    copying_seconds: float = 0.0
    trips: int = 1
    compiled_nbytes: float = 0.0
    groups: Groups | None = None
    itemsize: float = 0.0
    hops: int = 0


ReshardPath = Callable[[int, Layout, Layout], Sequence[Step]]
"""``(value number, source, target)`` to the steps between the two layouts."""


def path_seconds(path: Iterable[Step]) -> float:
    """The seconds of all steps, copying included."""
    return sum(step.seconds + step.copying_seconds for step in path)


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """All-pairs shortest paths for one byte count.

    Attributes:
        seconds: ``(n_layouts, n_layouts)``.
        first: per set of axes in use, as bits, the numbers of the layouts over these axes, ascending, and per pair of them that of the
            layout after the first move.
    """

    seconds: np.ndarray
    first: dict[int, tuple[np.ndarray, np.ndarray]]


class Reshards:
    """Reshards on one mesh; paths are cached per byte count and divisibility pattern, which shapes share.

    Args:
        mesh, communication: the mesh, and the cost of its collectives.
        copying_seconds_per_byte: of the device's own work for an all_to_all.
        gathers_tori: whether one all_gather may be over all devices of a three-dimensional torus.
    """

    def __init__(self, mesh: Mesh, communication: Communication, copying_seconds_per_byte: float = 0.0, gathers_tori: bool = True):
        self._sizes = mesh.sizes
        self._copying = {"all_to_all": copying_seconds_per_byte}
        self._communication = communication
        self._gathers_tori = gathers_tori
        self._tables: dict[tuple, _Table] = {}
        self._by_shape: dict[tuple, _Table] = {}

    def matrix(self, shape: Sequence[int], itemsize: float) -> np.ndarray:
        """Seconds between all pairs of layouts, ``(n_layouts, n_layouts)`` by `layout_number`, read-only.

        Rows and columns of layouts that do not divide the shape are infinite.
        """
        return self._table(tuple(shape), itemsize).seconds

    def path(self, shape: Sequence[int], itemsize: float, source: Layout, target: Layout) -> tuple[Step, ...]:
        """The steps from one layout to another; none where they are equal.

        Raises:
            ValueError: a layout does not divide the shape.
        """
        rank = len(shape)
        for layout in (source, target):
            if not divides(layout, shape, self._sizes):
                raise ValueError(f"a reshard's layouts divide the shape, got {layout} for {tuple(shape)} on {self._sizes}.")
        table = self._table(tuple(shape), itemsize)
        everything = layouts(rank, len(self._sizes))
        moves = _moves(rank, len(self._sizes))
        kept, first = table.first[_used(source) | _used(target)]
        goal = int(np.searchsorted(kept, layout_number(target, rank)))
        steps = []
        while source != target:
            number = layout_number(source, rank)
            after = everything[int(first[np.searchsorted(kept, number), goal])]
            kind, axes = moves.get((number, layout_number(after, rank)), ("collective_permute", ()))
            steps += self.move(shape, itemsize, kind, axes, source, after)
            source = after
        return tuple(steps)

    def move(self, shape: Sequence[int], itemsize: float, kind: str, axes: tuple[int, ...], source: Layout, target: Layout) -> list[Step]:
        """The steps of one move; the axes of a permute follow from its layouts."""
        is_permute = kind == "collective_permute"
        if is_permute:
            axes = exchange_axes(source, target, len(shape), self._sizes)
        parts = shards(source, self._sizes), shards(target, self._sizes)
        nbytes = _nbytes(shape, itemsize) / (max(parts) if is_permute else min(parts))
        if not (phases := self._phases(kind, axes)):  # gathered one axis after the other, the last one first
            *others, last = axes
            between = tuple(-1 if axis == last else dim for axis, dim in enumerate(source))
            first = self.move(shape, itemsize, kind, (last,), source, between)
            return first + self.move(shape, itemsize, kind, tuple(others), between, target)
        *earlier, (whole, groups) = phases
        steps = [self._step(kind, axes, source, source, share * nbytes, some) for share, some in earlier]
        return [*steps, self._step(kind, axes, source, target, whole * nbytes, groups)]

    def _step(self, kind: str, axes: tuple[int, ...], source: Layout, target: Layout, nbytes: float, groups: Groups | None) -> Step:
        seconds = 0.0 if kind == "slice" else float(self._communication.seconds(kind, nbytes, axes, groups))
        return Step(kind, axes, source, target, nbytes, seconds, nbytes * self._copying.get(kind, 0.0), groups=groups)

    def _phases(self, kind: str, axes: tuple[int, ...]) -> tuple[tuple[float, Groups | None], ...]:
        """The collectives of a move, each with its share of the bytes and its groups of devices; none where there is no such move."""
        if kind != "all_gather" or self._gathers_tori or not (link := self._communication.link(axes)).whole_torus:
            return ((1.0, None),)
        if sum(self._sizes[axis] > 1 for axis in axes) > 1:
            return ()
        inner = link.length[-1][0]
        return (inner / link.size, (inner, 1)), (1.0, (link.size // inner, inner))

    def _table(self, shape: tuple[int, ...], itemsize: float) -> _Table:
        found = self._by_shape.get((shape, itemsize))
        if found is None:
            everything = layouts(len(shape), len(self._sizes))
            valid = np.fromiter((divides(layout, shape, self._sizes) for layout in everything), bool, len(everything))
            key = (len(shape), valid.tobytes(), _nbytes(shape, itemsize))
            found = self._tables.get(key)
            if found is None:
                found = self._tables[key] = self._closure(len(shape), valid, key[2])
            self._by_shape[shape, itemsize] = found
        return found

    def _closure(self, rank: int, valid: np.ndarray, nbytes: float) -> _Table:
        """The cheapest paths between all pairs of valid layouts."""
        moves = self._single_moves(rank, nbytes)
        used = _all_used(rank, len(self._sizes))
        table = _Table(np.full(moves.shape, np.inf), {})
        for axes in np.unique(used[valid, None] | used[None, valid]).tolist():
            kept = np.flatnonzero(valid & (used & ~axes == 0))
            pairs = np.ix_(kept, kept)
            seconds, first = _shortest(moves[pairs])
            table.first[axes] = kept, kept[first].astype(np.int32)
            table.seconds[pairs] = np.where(used[kept, None] | used[None, kept] == axes, seconds, table.seconds[pairs])
        table.seconds.flags.writeable = False
        return table

    def _single_moves(self, rank: int, nbytes: float) -> np.ndarray:
        """Seconds of each single move, ``(n_layouts, n_layouts)``; infinite where there is none."""
        n_axes = len(self._sizes)
        parts = _all_parts(rank, self._sizes)
        seconds = np.full((len(parts), len(parts)), np.inf)
        for axes, source, target in _permutes(rank, self._sizes):
            seconds[source, target] = self._communication.seconds("collective_permute", nbytes / parts[target], axes)
        for kind, axes, source, target in _move_arrays(rank, n_axes):
            size = nbytes / np.minimum(parts[source], parts[target])
            phases = self._phases(kind, axes) if kind != "slice" else ()
            sent = sum(self._communication.seconds(kind, share * size, axes, groups) for share, groups in phases)
            if phases or kind == "slice":
                seconds[source, target] = sent + size * self._copying.get(kind, 0.0)
        return seconds


Combination = tuple[str, str, tuple[int, ...], Layout, Layout]
"""A collective that combines partial results: ``(kind, operator, axes, layout before, layout after)``."""


def combinations(computed: Layout, reductions: Iterable[tuple[int, str, int]]) -> Iterator[Combination]:
    """The collectives that combine partial results.

    For each operator, a reduce_scatter for each dimension that some axes scatter onto, then one all_reduce of each device's remaining part
    over the other axes. Partial products are gathered, since JAX has no all_reduce that multiplies.

    Args:
        computed: the layout of the partial results.
        reductions: per axis ``(axis, operator, dimension it scatters onto or -1)``; see `autoshard.ir.reductions`.
    """
    operators: dict[str, dict[int, list[int]]] = {}
    for axis, operator, scatter in sorted(reductions):
        operators.setdefault(operator, {}).setdefault(scatter, []).append(axis)
    at = computed
    for operator, dims in sorted(operators.items()):
        for dim, axes in sorted(dims.items(), key=lambda each: (each[0] < 0, each[1])):
            target = tuple(dim if dim >= 0 and axis in axes else before for axis, before in enumerate(at))
            kind = "reduce_scatter" if dim >= 0 else "all_gather" if operator == "prod" else "all_reduce"
            yield kind, operator, tuple(axes), at, target
            at = target


def reduction_steps(
    mesh: Mesh,
    communication: Communication,
    shape: Sequence[int],
    itemsize: float,
    computed: Layout,
    reductions: Iterable[tuple[int, str, int]],
) -> tuple[Step, ...]:
    """The collectives that combine an op's partial results (`combinations`), with bytes and seconds."""
    steps = []
    for kind, _, axes, before, after in combinations(computed, reductions):
        nbytes = _nbytes(shape, itemsize) / shards(before, mesh.sizes)
        if kind == "all_gather":
            nbytes *= math.prod(mesh.sizes[axis] for axis in axes)
        own = itemsize if kind != "all_gather" else 0.0
        seconds = float(communication.seconds(kind, nbytes, axes, itemsize=own))
        steps.append(Step(kind, axes, before, after, nbytes, seconds, itemsize=own))
    return tuple(steps)


def combined_bytes(
    rule: Rule, choices: np.ndarray, result: int, value: Value, sizes: tuple[int, ...]
) -> Iterator[list[tuple[str, tuple[int, ...], np.ndarray, np.ndarray]]]:
    """The collectives of `reduction_steps` under many choices ``(n, n_axes, 2)``, for each set of them with the same ones.

    Of each its kind and axes, the positions of the choices and its bytes under each.
    """
    factors, scatters = choices[:, :, 0], choices[:, :, 1]
    reduced = np.array([factor.kind == "reduction" for factor in rule.factors] + [False])[factors]  # the last entry is for no factor
    dim_of = np.full(len(rule.factors) + 1, -1)
    for dim, members in enumerate(rule.results[result]):
        dim_of[list(members)] = dim
    parts = np.where(dim_of[factors] >= 0, np.array(sizes, np.int64), 1).prod(axis=1)
    kinds = np.where(reduced, factors * (value.rank + 1) + scatters + 2, 0)
    distinct, which = np.unique(kinds, axis=0, return_inverse=True)
    for number, kind_of_axes in enumerate(distinct.tolist()):
        positions = np.flatnonzero(which.reshape(-1) == number)
        first, steps = choices[positions[0]].tolist(), []
        left = [(axis, rule.factors[first[axis][0]].operator or "sum", first[axis][1]) for axis, kind in enumerate(kind_of_axes) if kind]
        for kind, _, axes, before, _ in combinations((-1,) * len(sizes), left):
            nbytes = _nbytes(value.shape, value.itemsize) / (parts[positions] * shards(before, sizes))
            times = math.prod(sizes[axis] for axis in axes) if kind == "all_gather" else 1
            steps.append((kind, axes, positions, nbytes * times))
        yield steps


def _nbytes(shape: Sequence[int], itemsize: float) -> float:
    nbytes = float(itemsize)
    for size in shape:
        nbytes *= size
    return nbytes


def _shortest(seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All-pairs distances of a matrix of single moves, and per pair the first node of the path."""
    weight = seconds + TIE_SECONDS
    np.fill_diagonal(weight, 0.0)
    np.fill_diagonal(seconds, 0.0)
    first = np.broadcast_to(np.arange(len(seconds)), seconds.shape).copy()
    for k in range(len(seconds)):
        through = weight[:, k, None] + weight[None, k, :]
        better = through < weight
        np.copyto(weight, through, where=better)
        np.copyto(seconds, seconds[:, k, None] + seconds[None, k, :], where=better)
        np.copyto(first, first[:, k, None], where=better)
    return seconds, first


def _used(layout: Layout) -> int:
    """The axes that shard anything, as bits."""
    return sum(1 << axis for axis, dim in enumerate(layout) if dim >= 0)


@cache
def _all_used(rank: int, n_axes: int) -> np.ndarray:
    """`_used` of every layout."""
    return np.array([_used(layout) for layout in layouts(rank, n_axes)])


@cache
def _all_parts(rank: int, sizes: tuple[int, ...]) -> np.ndarray:
    """The number of shards of every layout."""
    return np.array([shards(layout, sizes) for layout in layouts(rank, len(sizes))], float)


def _exchanging(source: np.ndarray, target: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Which axes a permute sends along, ``(..., n_axes)`` for layouts of that shape: those whose position changes.

    An axis's position is its dimension and the number of parts into which the axes before it split that. An axis that only the target has
    is sliced first, behind the axes that split its dimension already, unless one of these leaves the dimension.
    """
    taking_part = source != target
    for axis in range(len(sizes)):
        dim = target[..., axis]
        new = (source[..., axis] < 0) & (dim >= 0)
        room = np.zeros(new.shape, bool)
        before, after = np.ones(new.shape, np.int64), np.ones(new.shape, np.int64)
        for other, size in enumerate(sizes):
            there, here = source[..., other] == np.where(new, dim, source[..., axis]), target[..., other] == dim
            room |= there & ~here
            sliced_before = new & (source[..., other] < 0) & here & (other < axis)
            before *= np.where(there & (new | (other < axis)) | sliced_before, size, 1)
            after *= np.where(here & (other < axis), size, 1)
        stays = (before == after) & np.where(new, ~room, source[..., axis] == dim)
        taking_part[..., axis] = ((source[..., axis] >= 0) | new) & ~stays
    return taking_part


@cache
def _moves(rank: int, n_axes: int) -> dict[tuple[int, int], tuple[str, tuple[int, ...]]]:
    """Kind and axes of every single move except permutes, by the numbers of its two layouts."""
    found = {}
    for number, layout in enumerate(layouts(rank, n_axes)):
        axes_of = [[axis for axis in range(n_axes) if layout[axis] == dim] for dim in range(rank)]
        last = [axes[-1] if axes else -1 for axes in axes_of]
        moves: list[tuple[str, tuple[int, ...], int]] = [
            ("slice", (axis,), dim) for dim in range(rank) for axis in range(last[dim] + 1, n_axes) if layout[axis] < 0
        ]
        for dim in range(rank):
            for start in range(len(axes_of[dim])):
                tail = tuple(axes_of[dim][start:])
                moves.append(("all_gather", tail, -1))
                moves += [("all_to_all", tail, other) for other in range(rank) if other != dim and tail[0] > last[other]]
        for kind, axes, dim in moves:
            target = tuple(dim if axis in axes else was for axis, was in enumerate(layout))
            found[number, layout_number(target, rank)] = kind, axes
    return found


@cache
def _move_arrays(rank: int, n_axes: int) -> tuple[tuple[str, tuple[int, ...], np.ndarray, np.ndarray], ...]:
    """The same moves grouped by kind and axes: kind, axes, sources, targets."""
    groups: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
    for ends, move in _moves(rank, n_axes).items():
        groups.setdefault(move, []).append(ends)
    return tuple((*move, *np.array(ends).T) for move, ends in groups.items())


@cache
def _permutes(rank: int, sizes: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], np.ndarray, np.ndarray], ...]:
    """Every permute, grouped by the axes it sends along: axes, sources, targets."""
    everything = layouts(rank, len(sizes))
    counts = np.array([shard_counts(layout, rank, sizes) for layout in everything]).reshape(len(everything), rank)
    dims = np.array(everything).reshape(len(everything), len(sizes))
    source, target = np.nonzero(np.all(counts[None, :] % counts[:, None] == 0, axis=2))
    sending = _exchanging(dims[source], dims[target], sizes) @ (1 << np.arange(len(sizes)))
    groups = []
    for bits in np.unique(sending[sending > 0]):
        axes = tuple(axis for axis in range(len(sizes)) if bits >> axis & 1)
        groups.append((axes, source[sending == bits], target[sending == bits]))
    return tuple(groups)
