"""Which arguments of a program a loader's batches are, and each batch as global arrays where they want it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autoshard.data import DataShard, local_index, shard_of
from autoshard.errors import StrategyError
from autoshard.run.padded import PaddedArguments
from autoshard.run.structure import alike, dtype_of
from autoshard.strategy import Record, TensorRecord

Leaves = Sequence[tuple[TensorRecord, NamedSharding]]
"""An argument's arrays and where they are."""

Number = bool | int | float | complex


@dataclass(frozen=True, slots=True, eq=False)
class Fed:
    """The arguments that a loader's batches are.

    Attributes:
        argnums: their positions.
        leaves: their arrays, and where they are.
        batch_size: rows of a global batch: the size of dim 0 that most of them have, first of all those that are split along it.
        shard: what this process reads; what the first process does that needs any of them, where this one, of another stage, needs none.
        several: whether several processes read.
        stored: per array, by its path, the shape with padding in which it is stored; absent where it has none.
    """

    argnums: tuple[int, ...]
    leaves: Leaves
    batch_size: int
    shard: DataShard
    several: bool
    stored: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, argnums: tuple[int, ...], arguments: Sequence[Leaves], stored: Mapping[str, tuple[int, ...]]) -> Fed:
        """These arguments of all.

        Raises:
            StrategyError: they have no rows.
        """
        leaves = [*chain.from_iterable(arguments[number] for number in argnums)]
        sizes = [(tensor.shape[0], tensor.spec[:1] not in ((), (None,))) for tensor, _ in leaves if tensor.shape]
        if not sizes:
            raise StrategyError(f"a batch has rows, and argument {_and(argnums)} has no dimension. Name the batch's argument.")
        batch_size, _ = max(sizes, key=lambda each: (sizes.count((each[0], True)), sizes.count((each[0], False))))
        needed = []
        for tensor, sharding in leaves:
            if tensor.shape[:1] == (batch_size,):
                shape = stored.get(tensor.path, tensor.shape)
                for device, index in sharding.devices_indices_map(shape).items():
                    start, stop, _ = index[0].indices(shape[0])
                    needed.append((device.process_index, min(start, batch_size), min(stop, batch_size)))
        everyone = {device.process_index for _, sharding in chain.from_iterable(arguments) for device in sharding.device_set}
        process = jax.process_index()
        if process in everyone and process not in (reading := {process for process, _, _ in needed}):
            process = min(reading)
        return cls(argnums, leaves, batch_size, shard_of(needed, batch_size, process), len(everyone) > 1, stored)

    def has_rows(self, tensor: TensorRecord) -> bool:
        """Whether an array has a row for each of the batch's, rather than being the same in all processes."""
        return tensor.shape[:1] == (self.batch_size,)

    def n_rows(self, leaves: Sequence[Any]) -> int:
        """Rows of a host batch.

        Raises:
            StrategyError: its arrays do not have the same number.
        """
        found = {np.shape(x)[0]: tensor.path for x, (tensor, _) in zip(leaves, self.leaves, strict=True) if self.has_rows(tensor)}
        if len(found) > 1:
            got = ", ".join(f"{n} of {path}" for n, path in found.items())
            raise StrategyError(f"the arrays of a batch have the same number of rows, got {got}. Cut or pad them alike.")
        return next(iter(found))

    def filled(self, leaves: Sequence[Any], more: Sequence[Any] | None, n: int) -> list[Any]:
        """A host batch of n rows: those of one, then of another, over and over."""

        def repeated(*parts: Any) -> Any:
            rows = np.concatenate(parts)
            return rows[np.arange(n) % len(rows)]

        columns = zip(leaves, *(() if more is None else (more,)), strict=True)
        found = zip(columns, self.leaves, strict=True)
        return [repeated(*parts) if self.has_rows(tensor) else parts[0] for parts, (tensor, _) in found]

    def placed(self, leaves: Sequence[Any]) -> tuple[list[Any], int, int]:
        """The global arrays of a host batch; checksums of its rows, 0 where it is the whole batch, and of what is whole."""
        sums, arrays = [0, 0], []
        for x, (tensor, sharding) in zip(leaves, self.leaves, strict=True):
            is_part = self.has_rows(tensor) and len(x) != self.batch_size
            host = np.asarray(x) if isinstance(x, Number) else _converted(x, tensor)
            if self.several:
                sums[not is_part] = zlib.crc32(np.ascontiguousarray(host).reshape(-1).view(np.uint8).data, sums[not is_part])
            arrays.append(x if isinstance(x, Number) else self._global(host, tensor, sharding, is_part))
        return arrays, sums[0], sums[1]

    def _global(self, host: np.ndarray, tensor: TensorRecord, sharding: NamedSharding, is_part: bool) -> jax.Array:
        """A global array of copies: a loader may use its memory again for the next batch. Padding is of zeros."""
        stored = self.stored.get(tensor.path, tensor.shape)

        def own(index: Any) -> np.ndarray:
            places = [slice(*at.indices(n)[:2]) for at, n in zip(index, stored, strict=True)]
            inside = [slice(min(at.start, n), min(at.stop, n)) for at, n in zip(places, tensor.shape, strict=True)]
            read = [local_index(self.shard.rows, inside[0]), *inside[1:]] if is_part else inside
            found = np.array(host[tuple(read)], order="C")
            missing = [(0, at.stop - at.start - n) for at, n in zip(places, found.shape, strict=True)]
            return np.pad(found, missing) if any(n for _, n in missing) else found

        return jax.make_array_from_callback(stored, sharding, own, dtype=host.dtype)


def _converted(x: np.ndarray, tensor: TensorRecord) -> np.ndarray:
    """In the step's type, where JAX converts to it."""
    wanted = dtype_of(tensor.dtype)
    if x.dtype == wanted:
        return x
    if x.dtype.kind not in "biufcV" or jax.dtypes.canonicalize_dtype(x.dtype) != wanted:
        raise StrategyError(
            f"{tensor.path} is {tensor.dtype} in this strategy, and the loader yields {x.dtype}. Convert it in the loader, as in "
            f"x.astype({tensor.dtype!r}), or search for the type that it has."
        )
    return x.astype(wanted)


def _and(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))


class Matching:
    """Which arguments of a program a tree is, by its structure and shapes."""

    def __init__(self, record: Record, arguments: Sequence[Leaves], argnums: int | Sequence[int] | None = None):
        self._record = record
        padded = PaddedArguments(record)
        shapes = iter(padded.own_shapes)
        self._stored = {record.arguments[k].path: sizes for k, sizes in padded.leaves.items()}
        self._arguments = [[(replace(tensor, shape=next(shapes)), sharding) for tensor, sharding in leaves] for leaves in arguments]
        self._structures = record.argument_structure["tuple"]
        n = len(arguments)
        ones = [(number,) for number in range(n)]
        runs = [tuple(range(stop - length, stop)) for length in range(2, n + 1) for stop in range(n, length - 1, -1)]
        self._candidates = (ones, *([run] for run in runs)) if argnums is None else ([self._positions(argnums)],)
        self._fed: dict[tuple[int, ...], Fed] = {}
        if argnums is not None:
            self.fed(argnums)
        self._trees: dict[int, Any] = {}  # how the loader's batches are structured, by argument

    @property
    def devices(self) -> list[Any]:
        """Those of the strategy's mesh, or meshes."""
        meshes = dict.fromkeys(sharding.mesh for _, sharding in chain.from_iterable(self._arguments))
        return list(dict.fromkeys(chain.from_iterable(mesh.devices.flat for mesh in meshes)))  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]

    def fed(self, argnums: int | Sequence[int]) -> Fed:
        """Arguments by their positions.

        Raises:
            StrategyError: there is none at such a position, or it has no rows.
        """
        positions = self._positions(argnums)
        if positions not in self._fed:
            for tensor, _ in chain.from_iterable(self._arguments[number] for number in positions):
                if tensor.path in self._stored and not self._stored[tensor.path].at_end:
                    raise StrategyError(
                        f"rows of a batch are read in their order, and this strategy pads {tensor.path} between them. Place each batch by "
                        "strategy.shard, or search with padding=False."
                    )
            stored = {path: sizes.padded for path, sizes in self._stored.items()}
            self._fed[positions] = Fed.of(positions, self._arguments, stored)
        return self._fed[positions]

    def _positions(self, argnums: int | Sequence[int]) -> tuple[int, ...]:
        """Positions from the front, of one or several that may count from the end."""
        given, n = (argnums,) if isinstance(argnums, int) else tuple(argnums), len(self._arguments)
        if not given or not all(isinstance(number, int) and -n <= number < n for number in given):
            raise StrategyError(
                f"a batch is named by positions of the {n} arguments of {self._record.program.name!r}, got {argnums!r}. Use {n - 1} for "
                "the last one, or a tuple of several."
            )
        return tuple(number % n for number in given)

    def batch(self, tree: Any) -> tuple[Fed, list[Any]]:
        """What a host batch is for, and its arrays.

        Raises:
            StrategyError: no argument is so, or several are.
        """
        for fits in (self._is_batch, self._is_alike):
            if found := self._found(tree, fits):
                return found
        raise self._refusal(tree)

    def again(self, fed: Fed, tree: Any) -> list[Any]:
        """The arrays of another host batch.

        Raises:
            StrategyError: it is not like the first one.
        """
        leaves = self.leaves(tree, fed.argnums)
        if leaves is None or not self._is_alike(fed, leaves):
            raise self._refusal(tree)
        return leaves

    def tree(self, fed: Fed, arrays: list[Any]) -> Any:
        """A batch as the step takes it: one argument, or a tuple of several."""
        flat = iter(arrays)
        parts = tuple(self._trees[number].unflatten(islice(flat, self._trees[number].num_leaves)) for number in fed.argnums)
        return parts[0] if len(parts) == 1 else parts

    def example(self, tree: Any) -> Fed | None:
        """What batches of an example are for; None where it is no example of any."""
        found = self._found(tree, self._is_example)
        return found and found[0]

    def _found(self, tree: Any, fits: Callable[[Fed, list[Any]], bool]) -> tuple[Fed, list[Any]] | None:
        for candidates in self._candidates:
            found = []
            for argnums in candidates:
                leaves = self.leaves(tree, argnums)
                if leaves is not None and self._shaped(argnums, leaves, fits):
                    found.append((self.fed(argnums), leaves))
            if len(found) > 1:
                fitting = _and([fed.argnums[0] for fed, _ in found])
                raise StrategyError(
                    f"a batch is told by its structure and shapes, and this one fits arguments {fitting} of "
                    f"{self._record.program.name!r}. Say which: strategy.data(loader, argnums={found[-1][0].argnums[0]})."
                )
            if found:
                return found[0]
        return None

    def leaves(self, tree: Any, argnums: tuple[int, ...]) -> list[Any] | None:
        """The arrays of a tree that is structured as the arguments are; a list of several is taken for a tuple."""
        for given in (tree, tuple(tree)) if isinstance(tree, list) else (tree,):
            parts = [given] if len(argnums) == 1 else given
            if isinstance(parts, tuple | list) and len(parts) == len(argnums):
                trees = [jax.tree.structure(part) for part in parts]
                if all(alike(self._structures[number], each) for number, each in zip(argnums, trees, strict=True)):
                    self._trees.update(zip(argnums, trees, strict=True))
                    return [x if isinstance(x, Number) else np.asarray(x) for x in jax.tree.leaves(list(parts))]
        return None

    def _shaped(self, argnums: tuple[int, ...], leaves: list[Any], fits: Callable[[Fed, list[Any]], bool]) -> bool:
        tensors = [tensor for number in argnums for tensor, _ in self._arguments[number]]
        ranks = {np.ndim(x) - len(tensor.shape) for x, tensor in zip(leaves, tensors, strict=True)}
        return bool(tensors) and ranks in ({0}, {-1}) and any(tensor.shape for tensor in tensors) and fits(self.fed(argnums), leaves)

    @staticmethod
    def _is_alike(fed: Fed, leaves: list[Any]) -> bool:
        """Whether it is a batch, of however many rows."""
        pairs = [(np.shape(x), tensor) for x, (tensor, _) in zip(leaves, fed.leaves, strict=True)]
        whole = (shape == tensor.shape or (fed.has_rows(tensor) and shape[1:] == tensor.shape[1:]) for shape, tensor in pairs)
        return all(len(shape) == len(tensor.shape) for shape, tensor in pairs) and all(whole)

    @classmethod
    def _is_batch(cls, fed: Fed, leaves: list[Any]) -> bool:
        return cls._is_alike(fed, leaves) and fed.n_rows(leaves) in (fed.shard.n_rows, fed.batch_size)

    @staticmethod
    def _is_example(fed: Fed, leaves: list[Any]) -> bool:
        return all(fed.has_rows(tensor) and np.shape(x) == tensor.shape[1:] for x, (tensor, _) in zip(leaves, fed.leaves, strict=True))

    def _refusal(self, tree: Any) -> StrategyError:
        got = ", ".join(str(np.shape(x)) for x in jax.tree.leaves(tree)[:4])
        arguments = "; ".join(
            f"{number}: {', '.join(f'{tensor.path} {tensor.shape}' for tensor, _ in leaves[:3])}{', ...' * (len(leaves) > 3)}"
            for number, leaves in enumerate(self._arguments)
        )
        return StrategyError(
            f"a batch is an argument of {self._record.program.name!r}, or a tuple of several that follow each other, with any number of "
            f"rows; got {jax.tree.structure(tree)!s:.200} of shapes {got}. The arguments are {arguments}. Yield batches so, or pass "
            "examples, as list(zip(xs, ys)) has them."
        )
