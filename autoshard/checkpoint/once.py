"""One checkpoint: saved under one strategy, restored under any."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.ask.strategy import Strategy
from autoshard.checkpoint.arrays import Place, check_memory, empty, leaf, names_of, placed_leaves, stored
from autoshard.checkpoint.checksums import checksums
from autoshard.checkpoint.contents import Contents, document_of, tensors_of
from autoshard.checkpoint.files import absolute, damaged, folder_of, items, orbax, read_arrays, read_contents, together, writing
from autoshard.errors import CheckpointError, ClusterError
from autoshard.run.leaf_shardings import leaf_shardings
from autoshard.run.padded import PaddedArguments
from autoshard.run.placing import put
from autoshard.run.structure import alike, rebuild
from autoshard.strategy import Record, TensorRecord, to_json
from autoshard.trace import SplitModules, outside_mesh
from autoshard.trace.statics import released

Path = str | os.PathLike[str]


def save(path: Path, state: Any, strategy: Strategy, *, extra: Any = None) -> None:
    """Writes a state and its strategy to a folder, whole or not at all; in several processes all call it.

    Args:
        path: the folder, which must not exist; ``gs://`` and the like as Orbax takes them.
        state: an argument of the strategy's program, or a tuple of the first few, as `Strategy.init` makes them; arrays that are
            not on devices are put there first. NNX objects are fine.
        strategy: the state's, which is saved inside.
        extra: a JSON value, such as the position in the data.

    Raises:
        CheckpointError: the folder exists or cannot be written, or ``extra`` is no JSON value; Orbax is not installed.
        StrategyError: no argument is structured as the state.

    >>> import tempfile, autoshard, jax.numpy as jnp
    >>> strategy = autoshard.search(lambda w, x: w - x.sum(), jnp.ones(4), jnp.ones(8), cluster="cpu:1")
    >>> folder = f"{tempfile.mkdtemp()}/first"
    >>> save(folder, jnp.arange(4.0), strategy, extra={"epoch": 3})
    >>> restore(folder), extra(folder)
    (Array([0., 1., 2., 3.], dtype=float32), {'epoch': 3})
    """
    folder = absolute(path)
    check_strategy(strategy)
    with writing(folder):
        library = orbax()
        if together(lambda: folder_of(folder).exists()):
            raise CheckpointError(
                f"a checkpoint is written to a folder of its own, and '{folder}' exists. Choose another path, or remove it first; "
                "autoshard.checkpoint.Checkpoints keeps a number of them."
            )
        with library.Checkpointer(library.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(folder, args=prepared(state, strategy, extra, to_json(strategy.record)))


@outside_mesh(keep_auto=True)
def prepared(state: Any, strategy: Strategy, extra: Any, text: str) -> Any:
    """What Orbax is to save of a state; ``text`` is its strategy's JSON.

    Raises:
        CheckpointError, StrategyError: as for `save`.
    """
    (tree,) = SplitModules((state,)).states
    first, last = strategy.positions(tree)
    leaves, structure = jax.tree.flatten(tree)
    _check_structure(strategy, first, last, structure)
    wanted = _places(strategy, tensors_of(strategy.record, first, last), first, last, None)
    padded = PaddedArguments(strategy.record)
    leaves = placed_leaves(padded.with_padding(leaves, len(tensors_of(strategy.record, 0, first))), wanted)
    arrays = [stored(x) for x in leaves]
    weak = tuple(at for at, x in enumerate(leaves) if getattr(x, "weak_type", False))
    contents = Contents(strategy.record, first, last, weak, checksums(arrays), extra)
    named = {place.name: x for place, x in zip(wanted, arrays, strict=True) if x.size}
    if not named:
        raise CheckpointError("a checkpoint has at least one array with elements, and the state has none. Put its values into extra=.")
    return items(named, document_of(contents, text))


@outside_mesh(keep_auto=True)
def restore(path: Path, strategy: Strategy | None = None, *, like: Any = None, devices: Sequence[Any] | None = None) -> Any:
    """The state of a checkpoint, bit by bit, put where the strategy wants it; in several processes all call it.

    Padding is that of the strategy, whatever it was where the state was saved.

    It has the types of the arguments that were searched. A strategy that was loaded knows dicts and tuples only, and NNX objects come as
    their `nnx.State`: pass ``like``.

    Args:
        path: the folder.
        strategy: any strategy of a program with the same state, on whatever mesh; None: the one that it was saved under.
        like: a state to be structured as, concrete or abstract; NNX objects are updated in place.
        devices: as for `Strategy.apply`.

    Raises:
        CheckpointError: there is no checkpoint, or a damaged one; its state is not the strategy's or not like the given one. It names the
            first array that differs.
        ClusterError: there are too few devices.
    """
    folder = absolute(path)
    if strategy is not None:
        check_strategy(strategy)
    contents, found = together(lambda: _read(folder, strategy, like, devices))
    target, first, last, wanted, arrays = found
    whole = [arrays[place.name] if place.name in arrays else empty(place) for place in wanted]
    differing = [place.name for place, old, new in zip(wanted, contents.checksums, checksums(whole), strict=True) if old != new]
    if differing:
        more = f", nor are {len(differing) - 1} more" * (len(differing) > 1)
        raise damaged(folder, f"{differing[0]} is not the array that was saved{more}")
    leaves = _padded_as(target, contents, devices, [leaf(x, place) for x, place in zip(whole, wanted, strict=True)])
    if like is not None:
        split = SplitModules((like,))
        return split.update((jax.tree.structure(split.states[0]).unflatten(leaves),))[0]
    return _own_types(target, first, last, leaves)


def strategy(path: Path) -> Strategy:
    """The strategy under which a checkpoint was saved.

    Raises:
        CheckpointError: there is no checkpoint, or a damaged one.
    """
    return Strategy(read_contents(absolute(path)).record)


def extra(path: Path) -> Any:
    """The JSON value that was saved with a checkpoint; None where none was.

    Raises:
        CheckpointError: there is no checkpoint, or a damaged one.
    """
    return read_contents(absolute(path)).extra


# -- parts ------------------------------------------------------------------------------------------------------------------


def check_strategy(strategy: Any) -> None:
    """Raises `CheckpointError` where what is passed as a strategy is none."""
    if not isinstance(strategy, Strategy):
        raise CheckpointError(
            f"a checkpoint is saved and restored with a strategy, got {type(strategy).__name__}. Call save(path, state, strategy), "
            "restore(path, strategy)."
        )


def _read(folder: str, strategy: Strategy | None, like: Any, devices: Sequence[Any] | None) -> Any:
    """The contents of a checkpoint; and the strategy, the arguments' positions, their places and arrays."""
    contents = read_contents(folder)
    target = Strategy(contents.record) if strategy is None else strategy
    first, last = contents.first, contents.last
    _check_same(folder, contents, target)
    if like is not None:
        _check_like(folder, contents, target, like)
    try:
        wanted = _places(target, contents.tensors, first, last, devices, contents.weak)
    except ClusterError as error:
        if strategy is not None:
            raise
        raise ClusterError(
            f"without a strategy a state is restored under that of checkpoint '{folder}': {error} Or search a strategy for these devices, "
            "with start=autoshard.checkpoint.strategy(path), and pass it."
        ) from None
    check_memory(wanted)
    arrays = read_arrays(folder, {place.name: place.stored for place in wanted if 0 not in place.tensor.shape})
    return contents, (target, first, last, wanted, arrays)


def _places(
    strategy: Strategy, stored_as: Sequence[TensorRecord], first: int, last: int, devices: Sequence[Any] | None, weak: Sequence[int] = ()
) -> list[Place]:
    """Where a strategy wants the arrays of some arguments, which are stored by their names in the strategy that saved them."""
    is_weak, before = set(weak), len(tensors_of(strategy.record, 0, first))
    tensors = tensors_of(strategy.record, first, last)
    shardings = leaf_shardings(strategy.record, devices)[before : before + len(tensors)]
    here = enumerate(zip(names_of(stored_as), tensors, stored_as, shardings, strict=True))
    return [
        Place(name, replace(tensor, shape=old.shape), _whole_where(tensor, old, there), at in is_weak)
        for at, (name, tensor, old, there) in here
    ]


def _whole_where(tensor: TensorRecord, stored_as: TensorRecord, sharding: NamedSharding) -> NamedSharding:
    """The sharding, of an array that is stored with other padding whole along the dimensions that differ."""
    if tensor.shape == stored_as.shape:
        return sharding
    entries = zip((*sharding.spec, *(None,) * (len(tensor.shape) - len(sharding.spec))), tensor.shape, stored_as.shape, strict=True)
    spec = PartitionSpec(*(entry if now == before else None for entry, now, before in entries))
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _padded_as(target: Strategy, contents: Contents, devices: Sequence[Any] | None, leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays of a checkpoint with the padding that a strategy gives them."""
    before, after = PaddedArguments(contents.record), PaddedArguments(target.record)
    first, tensors = len(tensors_of(target.record, 0, contents.first)), tensors_of(target.record, contents.first, contents.last)
    shardings = leaf_shardings(target.record, devices)[first : first + len(tensors)]
    own = before.without_padding(leaves, len(tensors_of(contents.record, 0, contents.first)))
    padded = after.with_padding(own, first)
    differ = [at for at, (x, tensor) in enumerate(zip(leaves, tensors, strict=True)) if x.shape != tensor.shape]
    there = put([padded[at] for at in differ], [shardings[at] for at in differ], [tensors[at].path for at in differ], (True,) * len(differ))
    found = list(leaves)
    for at, x in zip(differ, there, strict=True):
        found[at] = x
    return found


def _check_structure(strategy: Strategy, first: int, last: int, structure: Any) -> None:
    """Raises `CheckpointError` where a state has the shapes of an argument and not its structure, so that arrays could change places."""
    described = strategy.record.argument_structure["tuple"]
    if not alike(described[first] if last - first == 1 else {"tuple": described[:last]}, structure):
        paths = ", ".join(tensor.path for tensor in tensors_of(strategy.record, first, last)[:3])
        raise CheckpointError(
            f"a state is structured as the argument of {strategy.record.program.name!r} that it is, with {paths}, ...; got one of the same "
            f"shapes structured otherwise, {structure!s:.200}. Pass it as the step takes it."
        )


def _check_same(folder: str, contents: Contents, target: Strategy) -> None:
    """Raises `CheckpointError` where the state of a checkpoint is not the one at the same place in a strategy."""
    n = len(target.record.argument_structure["tuple"])
    here = _own_tensors(target.record, min(contents.first, n), min(contents.last, n))
    for old, new in zip_longest(_own_tensors(contents.record, contents.first, contents.last), here):
        if _identity(old) != _identity(new):
            raise CheckpointError(
                f"checkpoint '{folder}' has {_described(old)} where the strategy of {target.record.program.name!r} has {_described(new)}. "
                "Restore it under a strategy for a state of the same names, shapes and types: search again with the arguments of the "
                "program that saved it."
            )


def _own_tensors(record: Record, first: int, last: int) -> list[TensorRecord]:
    """The arrays of some arguments in their own sizes."""
    start, tensors = len(tensors_of(record, 0, first)), tensors_of(record, first, last)
    shapes = PaddedArguments(record).own_shapes[start : start + len(tensors)]
    return [replace(tensor, shape=shape) for tensor, shape in zip(tensors, shapes, strict=True)]


def _identity(tensor: TensorRecord | None) -> tuple | None:
    """What must be equal of an array, whatever the argument is called."""
    return None if tensor is None else (re.sub(r"^\w+", "", tensor.path), tensor.shape, tensor.dtype)


def _check_like(folder: str, contents: Contents, target: Strategy, like: Any) -> None:
    """Raises `CheckpointError` where the state to be like is another than the strategy's."""
    (tree,) = SplitModules((like,)).states
    leaves, structure = jax.tree.flatten(tree)
    own, here = (_own_tensors(contents.record, contents.first, contents.last), tensors_of(target.record, contents.first, contents.last))
    for tensor, alone, padded, x in zip_longest(contents.tensors, own, here, leaves):
        if tensor is None or x is None or tuple(np.shape(x)) not in (tensor.shape, alone.shape, padded.shape):
            there = f"an array {list(np.shape(x))}" if x is not None else "no further array"
            raise CheckpointError(
                f"checkpoint '{folder}' has {_described(tensor)} where the state that is passed as like= has {there}. Pass the state, or "
                "the tuple of arguments, that was saved, concrete or abstract."
            )
    _check_structure(target, contents.first, contents.last, structure)


def _described(tensor: TensorRecord | None) -> str:
    return "nothing more" if tensor is None else f"{tensor.path} {tensor.dtype}[{','.join(map(str, tensor.shape))}]"


def _own_types(strategy: Strategy, first: int, last: int, leaves: Sequence[Any]) -> Any:
    """The arguments with these arrays: as they were searched, or by the names of fields in a strategy that was loaded."""
    record, traced = strategy.record, strategy._traced
    before = len(tensors_of(record, 0, first))
    everything: list[Any] = list(record.arguments)
    everything[before : before + len(leaves)] = leaves
    if traced is None:
        whole = rebuild(record.argument_structure, everything)
    else:
        whole = traced.in_tree.unflatten(everything)
        whole = whole if traced.statics is None else released(traced.statics.merge(whole))
    return whole[first] if last - first == 1 else tuple(whole[first:last])
