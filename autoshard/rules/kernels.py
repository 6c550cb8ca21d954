"""The rule of a Pallas kernel, read from its grid, its index maps and its body.

A grid axis is a factor where each program along it computes blocks of its own: the axis alone indexes one dimension of every result that
is read, and at most one of each operand. A dimension of ``G`` blocks of ``w`` elements is the factors ``[gw]``, of which ``w`` stays whole.
Where several programs share a block, as query heads share a key head by the index ``h // 4``, the axis is two factors, ``[g]`` of the
shared blocks and its minor ``[m]``; a result that they share leaves the minor one whole, and so does a body that depends on the position
modulo ``m``.

Prefetched scalars, and operands that programs have whole, are split with the axis along whose positions numbers are read from them one
after the other, as the lengths of examples are. Where these are not all of a dimension, as of starts and ends, it stays whole, and each
device shifts it by the position of its first program.

An axis stays whole where results would not be equal:

- the body depends on its position (`pl.program_id`), which is another one on a shard;
- an index depends on it together with other axes;
- a block is not read or written evenly along it;
- memory that programs share, scratch and results that nobody reads, may pass something along it: the axis is not declared ``"parallel"``,
  and the body is not seen to overwrite the memory where programs along the axis begin.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr

from autoshard.ir import Factor, Rule, Value
from autoshard.rules.avals import aval_of
from autoshard.rules.kernel_body import NOTHING, Known, Memory, Walk, varying_axes
from autoshard.rules.registry import Dim, assemble, rule, whole

Drift = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """The block index of one dimension of a tensor.

    Attributes:
        size, block: elements of the dimension and of a block.
        axes: the grid axes that it depends on.
        shared: where it depends on one axis and nothing else, how many successive programs along it have the same block; 0 elsewhere.
    """

    size: int
    block: int
    axes: frozenset[int]
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Grid:
    """What was read of one call of a kernel.

    Attributes:
        indices: by tensor, inputs first and then results, and by dimension.
        scalars: of prefetched operands.
        looked_up: the body's arguments of which programs read numbers by their positions.
        ways: per axis that can be split its factors from major to minor, each with how many programs share what is below it.
        whole: per axis that cannot be split, why.
        period: per axis, of how many programs parts are multiples.
        drifts: per axis and argument of the body, how far along each of its dimensions a period of programs reads further on.
        loads: how often a block of each tensor is loaded or stored.
        walk: of the body, over all programs.
    """

    indices: tuple[tuple[Index, ...], ...]
    scalars: tuple[tuple[Index, ...], ...]
    ways: Mapping[int, tuple[tuple[int, Factor], ...]]
    whole: Mapping[int, str]
    period: Mapping[int, int]
    drifts: Mapping[int, Mapping[int, Drift]]
    looked_up: frozenset[int]
    loads: tuple[int, ...]
    walk: Walk


@rule("pallas_call")
def pallas_call(*operands: Value, results: tuple[Value, ...], **params: Any) -> Rule:
    """Grid axes that index blocks are factors: ``([gw, k], [k, j])->([gw, j]) need_replication={w, k, j}``."""
    return kernel_rule(params, [operand.shape for operand in operands])


def kernel_rule(params: Mapping[str, Any], operands: Sequence[Sequence[int]], unread: tuple[int, ...] = ()) -> Rule:
    """The rule of a call; ``unread`` are the numbers of results that nobody reads."""
    grid, n = grid_of(params, unread), params["grid_mapping"].num_inputs
    scalars, made = ([[_dimension(index, grid.ways) for index in tensor] for tensor in some] for some in (grid.scalars, grid.indices))
    lengths = [whole(shape) for shape in operands[: len(operands) - n - len(scalars)]]  # of the grid, known when it runs
    return assemble([*lengths, *scalars, *made[:n]], made[n:])


def _dimension(index: Index, ways: Mapping[int, Sequence[tuple[int, Factor]]]) -> Dim:
    """The factors of one dimension: those of its axis that it has, then the block."""
    axis = next(iter(index.axes)) if len(index.axes) == 1 else -1
    if axis not in ways or not index.shared:
        return Factor(index.size, "need_replication")
    blocks = [factor for shared, factor in ways[axis] if shared >= index.shared]
    return (*blocks, Factor(index.block, "need_replication"))


def grid_of(params: Mapping[str, Any], unread: tuple[int, ...] = ()) -> Grid:
    """What can be read of a call's grid, index maps and body."""
    declared = getattr(params.get("compiler_params"), "dimension_semantics", None) or ()
    parallel = tuple(getattr(semantics, "value", semantics) == "parallel" for semantics in declared)
    return _read(params["jaxpr"], params["grid_mapping"], parallel, params.get("mesh") is not None, unread)


def counted(params: Mapping[str, Any], values: Mapping[int, np.ndarray]) -> tuple[tuple[int, ...], Walk]:
    """How often a block of each tensor is loaded or stored, and a walk over all programs, where integers of some operands are known.

    Args:
        values: by argument of the body, such as the blocks of a mask that are not empty.
    """
    call = _Call(params["jaxpr"], params["grid_mapping"], values=values)
    return tuple(call.loads), call.walk


@lru_cache(512)
def _read(body: Jaxpr, mapping: Any, declared: tuple[bool, ...], meshed: bool, unread: tuple[int, ...]) -> Grid:
    call = _Call(body, mapping, declared, meshed, unread)
    steps = {axis: call.steps(axis) for axis, size in enumerate(mapping.grid) if size != 1 and isinstance(size, int)}
    reasons = {axis: call.reason(axis, *steps.get(axis, (0, None))) for axis, size in enumerate(mapping.grid) if size != 1}
    whole = {axis: reason for axis, reason in reasons.items() if reason}
    ways = {axis: tuple(call.ways(axis, steps[axis][0])) for axis in reasons.keys() - whole}
    period, drifts = {axis: each for axis, (each, _) in steps.items()}, {axis: drift or {} for axis, (_, drift) in steps.items()}
    looked_up, n = frozenset(number for found in drifts.values() for number in found), mapping.num_index_operands

    def dimensions(number: int) -> tuple[Index, ...]:
        sizes = enumerate(aval_of(body.invars[number]).shape)
        return tuple(_looked_up(number, dim, size, mapping.grid, period, drifts) for dim, size in sizes)

    scalars = tuple(map(dimensions, range(n)))
    indices = tuple(dimensions(n + k) if n + k in looked_up else tuple(dims) for k, dims in enumerate(call.indices))
    return Grid(indices, scalars, ways, whole, period, drifts, looked_up, tuple(call.loads), call.walk)


def _looked_up(number: int, dim: int, size: int, grid: Sequence[Any], period: Mapping[int, int], drifts: Mapping[int, Any]) -> Index:
    """The index of a dimension of prefetched scalars, of which each period of programs along an axis reads as many in a row."""
    for axis, found in drifts.items():
        drift = found[number][dim] if number in found else 0
        if drift and drift * grid[axis] == size * period[axis]:
            return Index(size, drift, frozenset({axis}), period[axis])
    return Index(size, size, frozenset())


class _Call:
    """A call of a kernel while it is read.

    Attributes:
        own: by number of the kernel's own axes, that of the grid's axis: `jax.vmap` adds others.
        indices, loads: as of `Grid`.
        walk: of the index maps and of the body, over all programs.
    """

    def __init__(
        self,
        body: Jaxpr,
        mapping: Any,
        declared: tuple[bool, ...] = (),
        meshed: bool = False,
        unread: tuple[int, ...] = (),
        values: Mapping[int, np.ndarray] | None = None,
    ):
        self.body, self.mapping, self.meshed, self.unread = body, mapping, meshed, unread
        self.own = [axis for axis in range(len(mapping.grid)) if axis not in mapping.vmapped_dims]
        self.parallel = {axis for axis, parallel in zip(self.own, declared, strict=False) if parallel}
        self.walk = self._walk({axis: np.arange(size) for axis, size in enumerate(mapping.grid) if isinstance(size, int)}, values)
        maps = Walk({}, values or {})
        blocks = [self._block_indices(each, maps) for each in mapping.block_mappings]
        self.indices = [[*self._dimensions(each, found)] for each, found in zip(mapping.block_mappings, blocks, strict=True)]
        self.loads = [self._loads(found) for found in blocks]
        for number, positions in maps.read.items():
            self.walk.read[number] += positions
        whole = [all(index.block == index.size and not index.axes for index in dims) for dims in self.indices[: mapping.num_inputs]]
        self.looked_up = {mapping.num_index_operands + number for number, is_whole in enumerate(whole) if is_whole}
        self.walk.run(body, self._arguments(), self._once())

    # -- what is read -------------------------------------------------------------------------------------------------------

    def _walk(self, positions: Mapping[int, np.ndarray], values: Mapping[int, np.ndarray] | None = None) -> Walk:
        """A walk over the programs at some positions of the grid's axes."""
        return Walk({number: self._along(axis, positions[axis]) for number, axis in enumerate(self.own) if axis in positions}, values or {})

    def _along(self, axis: int, positions: np.ndarray) -> np.ndarray:
        return positions.reshape([-1 if k == axis else 1 for k in range(len(self.mapping.grid))])

    def _once(self) -> np.ndarray:
        return np.ones((1,) * len(self.mapping.grid))

    def _arguments(self) -> list[Known]:
        """The body's arguments: prefetched scalars, inputs, results and scratch; programs share the last, and results that nobody reads."""
        scalars, results = self.mapping.num_index_operands, self.mapping.num_index_operands + self.mapping.num_inputs
        looked_up = {*range(scalars), *self.looked_up}
        shared = {results + number for number in self.unread}
        found: list[Known] = []
        for number, variable in enumerate(self.body.invars):
            is_shared = number in shared or (number >= results + self.mapping.num_outputs and has_numbers(variable.aval))
            found.append(Memory(number, number in looked_up) if number in looked_up or is_shared else NOTHING)
        return found

    def _block_indices(self, mapping: Any, walk: Walk) -> list[Known]:
        """The block index of each dimension."""
        body = mapping.index_map_jaxpr.jaxpr
        sizes = [*enumerate(self.mapping.grid)]
        grid: list[Known] = [self._along(k, np.arange(n)) if isinstance(n, int) else frozenset({k}) for k, n in sizes]
        scalars = [Memory(number, True) for number in range(len(body.invars) - len(grid))]
        return walk.run(body, [*grid, *scalars], self._once())

    def _dimensions(self, mapping: Any, found: Sequence[Known]) -> Iterator[Index]:
        """The indices of a tensor's dimensions; ones that depend on all axes where blocks are of a kind that is not known."""
        shape, everything = mapping.array_aval.shape, frozenset(range(len(self.mapping.grid)))
        blocks = [size for block in mapping.block_shape if (size := block_size(block)) is not None]
        if not len(blocks) == len(found) == len(shape):
            yield from (Index(size, size, everything) for size in shape)
            return
        for size, block, kind, index in zip(shape, blocks, mapping.block_shape, found, strict=True):
            if not isinstance(index, np.ndarray):
                yield Index(size, block, frozenset(a for a in index if a >= 0) if isinstance(index, frozenset) else everything)
                continue
            axes = varying_axes(index)
            unit = block if type(kind).__name__ == "Element" else 1
            yield Index(size, block, axes, self._shared(index, next(iter(axes)), size, block, unit) if len(axes) == 1 else 0)

    def _shared(self, index: np.ndarray, axis: int, size: int, block: int, unit: int) -> int:
        """How many successive programs along the one axis that indexes a dimension have the same block; 0 where they share it otherwise."""
        programs = self.mapping.grid[axis]
        if size % block or programs % (size // block):
            return 0
        shared = programs * block // size
        return shared if np.array_equal(index.ravel(), np.arange(programs) // shared * unit) else 0

    def _loads(self, found: Sequence[Known]) -> int:
        """How often a tensor's block is loaded or stored: whenever its index changes; an axis of unknown length counts as one program."""
        grid = [size if isinstance(size, int) else 1 for size in self.mapping.grid]
        axes = [varying_axes(index) if isinstance(index, np.ndarray) else index for index in found]
        last = max((max(axis, ~axis) for each in axes if isinstance(each, frozenset) for axis in each), default=-1)
        programs = grid[: last + 1]
        integers = [index for index in found if isinstance(index, np.ndarray)]
        if len(integers) < len(found) or math.prod(programs) > MANY_PROGRAMS:
            return math.prod(programs)
        some = (*[slice(None)] * len(programs), *[0] * (len(grid) - len(programs)))
        changes = [np.diff(np.broadcast_to(index, grid)[some].ravel()) != 0 for index in integers]
        return 1 + int(np.any(changes, axis=0).sum()) if changes else 1

    # -- what can be split --------------------------------------------------------------------------------------------------

    def reason(self, axis: int, period: int, drifts: Mapping[int, Drift] | None) -> str:
        """Why an axis of this period cannot be split; empty where it can."""
        size, touched = self.mapping.grid[axis], self._touched(axis)
        shared = sorted({1, period}.union(index.shared for tensor in touched for index in tensor))
        if self.meshed:
            return "the kernel runs on a mesh of cores"
        if not isinstance(size, int):
            return "its length is known when it runs"
        if not all(touched[self.mapping.num_inputs :]):
            return "programs along it write the same blocks of a result"
        if drifts is None:
            return "scalars are not read one after the other along it"
        if period == size:
            return "the kernel reads its position with pl.program_id"
        if 0 in shared or any(len(tensor) > 1 for tensor in touched) or any(b % a for a, b in itertools.pairwise([*shared, size])):
            return "it is not alone in indexing a dimension, block after block"
        if axis not in self.parallel and self._carries(axis, period):
            return 'scratch memory may pass something along it: dimension_semantics does not say that it is "parallel"'
        return ""

    def ways(self, axis: int, period: int) -> Iterator[tuple[int, Factor]]:
        """The factors of an axis from major to minor, each with how many programs share what is below it."""
        touched = self._touched(axis)
        edges = [*sorted({1, period}.union(index.shared for tensor in touched for index in tensor)), self.mapping.grid[axis]]
        least = max(period, *(index.shared for tensor in touched[self.mapping.num_inputs :] for index in tensor))
        for below, above in reversed([*itertools.pairwise(edges)]):
            yield below, Factor(above // below, "pass_through" if below >= least else "need_replication")

    def _touched(self, axis: int) -> list[list[Index]]:
        """Per tensor, without results that nobody reads, the dimensions that an axis indexes."""
        unread = {self.mapping.num_inputs + number for number in self.unread}
        return [[index for index in tensor if axis in index.axes] for number, tensor in enumerate(self.indices) if number not in unread]

    def steps(self, axis: int) -> tuple[int, dict[int, Drift] | None]:
        """The number of programs after which the body does the same, and how far these read further on in prefetched operands.

        None where they read them otherwise.
        """
        size = self.mapping.grid[axis]
        used = [each for each in self.walk.used if each.shape[axis:] and each.shape[axis] == size]
        least = next(m for m in _divisors(size) if m == size or all(_steps(each, axis, m) == 0 for each in used))
        for period in (m for m in _divisors(size) if m % least == 0 and m < size):
            found = {number: {self._drift(each, axis, period) for each in some} for number, some in self.walk.read.items()}
            if all((len(some) == 1 and None not in some) or not _moves(some) for some in found.values()):
                return period, {number: next(iter(some)) for number, some in found.items() if _moves(some)}  # type: ignore
        return size, {} if least == size else None

    def _drift(self, positions: Sequence[np.ndarray | None], axis: int, period: int) -> Drift | None:
        """How far a period reads further on, by dimension; None where that is not even, or back."""
        steps = tuple(0 if each is None else _steps(each, axis, period) for each in positions)
        return None if any(step is None or step < 0 for step in steps) else steps  # type: ignore

    def _carries(self, axis: int, period: int) -> bool:
        """Whether memory that programs share may pass something from one period to the next."""
        arguments = self._arguments()
        shared = {each.number for each in arguments if isinstance(each, Memory) and not each.prefetched}
        if not shared:
            return False
        positions = {k: np.arange(n) for k, n in enumerate(self.mapping.grid) if isinstance(n, int)}
        inside = {k: np.zeros(1, int) for k in range(axis + 1, len(self.mapping.grid))}
        walk = self._walk(positions | inside | {axis: np.arange(0, self.mapping.grid[axis], period)})
        walk.run(self.body, arguments, self._once())
        return bool(walk.carried)


MANY_PROGRAMS = 1 << 20  # of which changes of blocks are not counted one by one


def has_numbers(aval: Any) -> bool:
    """Whether memory has numbers, as that of semaphores has not."""
    return getattr(getattr(aval, "dtype", None), "kind", "V") in "biufcV" and "sem" not in str(getattr(aval, "memory_space", ""))


def _moves(drifts: set[Drift | None]) -> bool:
    return any(each is None or any(each) for each in drifts)


def _divisors(size: int) -> list[int]:
    return [m for m in range(1, size + 1) if size % m == 0]


def _steps(integer: np.ndarray, axis: int, period: int) -> int | None:
    """By how much an integer grows in a period of programs along an axis; None where that is not always the same."""
    size = integer.shape[axis] if integer.ndim else 1
    if size == 1:
        return 0
    later, earlier = (np.take(integer, range(*span), axis).astype(np.int64) for span in ((period, size), (0, size - period)))
    step = int((later - earlier).flat[0])
    return step if (later - earlier == step).all() else None


def block_size(block: Any) -> int | None:
    """Elements of a block along a dimension, 1 where the kernel does not see the dimension; None for a kind that is not known."""
    match type(block).__name__:
        case "Squeezed":
            return 1
        case "Blocked":
            return block.block_size
        case "Element":
            return block.block_size if tuple(block.padding) == (0, 0) else None
    return None
