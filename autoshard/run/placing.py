"""Arguments put where a strategy wants them, in one process or in several.

In several processes a host array, a Python number or an array of one process's devices stands for one and the same array, which each
process passes whole. Checksums of all of them are exchanged wherever they are put, one number an array, so that a process's own part of a
batch is refused. Global arrays are taken as they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from autoshard.errors import StrategyError

_NUMBERS = bool | int | float | complex


def put(leaves: Sequence[Any], shardings: Sequence[NamedSharding], paths: Sequence[str], is_state: Sequence[bool] = ()) -> list[Any]:
    """The arrays committed to where their shardings want them, so that every call finds the same compiled program.

    A Python number is put there if it is state (none unless said), such as a counter that starts at 0: what replaces it is an array.

    Raises:
        StrategyError: processes pass different arrays for one.
    """
    there = list(leaves)
    if jax.process_count() > 1:
        check_equal(leaves, paths, shardings)
        for place in _local(leaves, shardings):
            there[place] = _everywhere(leaves[place], shardings[place])
    places = zip(there, shardings, is_state or (False,) * len(there), strict=True)
    moved = [place for place, found in enumerate(places) if _moves(*found)]
    for place, x in zip(moved, jax.device_put([there[at] for at in moved], [shardings[at] for at in moved]) if moved else (), strict=True):
        there[place] = x
    return there


def apart(leaves: Sequence[Any], there: Sequence[Any], seen: set[int]) -> list[Any]:
    """The arrays that leaves were put in, with a copy where a leaf is the array of one before, such as an average that starts as the
    parameters: jaxlib 0.10.2 crashes where one buffer is donated twice on several devices.

    Args:
        seen: the ids of the arrays before, to which these are added.
    """
    found = list(there)
    for place, x in enumerate(leaves):
        if isinstance(x, jax.Array) and not isinstance(x, Tracer):
            if id(x) in seen:
                found[place] = jnp.copy(found[place])
            seen.add(id(x))
    return found


def by_devices(shardings: Sequence[Sharding]) -> list[list[int]]:
    """The positions of shardings on the same devices: one program cannot read arrays of different ones."""
    groups: dict[frozenset[Any], list[int]] = {}
    for place, sharding in enumerate(shardings):
        groups.setdefault(frozenset(sharding.device_set), []).append(place)
    return list(groups.values())


def sharded_leaves(function: Callable[..., Any], args: tuple[Any, ...], shardings: Sequence[NamedSharding]) -> list[Any]:
    """The leaves of what ``function(*args)`` makes, each made already sharded: by one program for each set of devices that has some."""
    leaves: list[Any] = [None] * len(shardings)
    for places in by_devices(shardings):

        def made(*args: Any, places: Sequence[int] = places) -> list[Any]:
            found = jax.tree.leaves(function(*args))
            return [found[place] for place in places]

        made_there = jax.jit(made, out_shardings=[shardings[place] for place in places])
        for place, x in zip(places, made_there(*args), strict=True):
            leaves[place] = x
    return leaves


def _moves(x: Any, sharding: NamedSharding, is_state: bool) -> bool:
    """Whether a leaf has to be put elsewhere than it is."""
    if isinstance(x, Tracer) or not (is_state or isinstance(x, jax.Array | np.ndarray)):
        return False
    return not (isinstance(x, jax.Array) and x.committed and (x.sharding == sharding or _is_alike(x, sharding)))


def _is_alike(x: jax.Array, sharding: NamedSharding) -> bool:
    """Whether an array is where its sharding wants it, and is not typed by a mesh of Explicit axes."""
    explicit = isinstance(x.sharding, NamedSharding) and AxisType.Explicit in x.sharding.mesh.axis_types
    return not explicit and x.sharding.is_equivalent_to(sharding, x.ndim)


# -- several processes -----------------------------------------------------------------------------------------------------


def check_equal(leaves: Sequence[Any], paths: Sequence[str], shardings: Sequence[Sharding] = ()) -> None:
    """Raises `StrategyError` where an array of the host is not the same in all processes; one on the devices of its sharding is global."""
    local = _local(leaves, shardings) if jax.process_count() > 1 else []
    if not local:
        return
    sums = np.zeros(len(leaves), np.uint32)
    sums[local] = [_checksum(leaves[place]) for place in local]
    everyones = np.asarray(multihost_utils.process_allgather(sums))
    for leaf, path in enumerate(paths):
        differing = [process for process, found in enumerate(everyones[:, leaf]) if found != everyones[0, leaf]]
        if differing:
            raise StrategyError(
                f"in several processes an array of the host is the same whole array in each, and {path} differs between process 0 and "
                f"process{'es' * (len(differing) > 1)} {', '.join(map(str, differing))}. Pass the same in all; of batches' parts "
                "strategy.data(loader) makes global arrays, or jax.make_array_from_process_local_data(strategy.shardings(argument), part, "
                "global_shape)."
            )


def _local(leaves: Sequence[Any], shardings: Sequence[Sharding]) -> list[int]:
    """The positions of the leaves that are of this process alone, and not there because a pipeline's stage is."""

    def is_local(x: Any, place: int) -> bool:
        if isinstance(x, jax.Array):
            is_there = bool(shardings) and x.committed and x.sharding.device_set == shardings[place].device_set
            return not isinstance(x, Tracer) and x.is_fully_addressable and not is_there
        return isinstance(x, np.ndarray | np.generic | _NUMBERS)

    return [place for place, x in enumerate(leaves) if is_local(x, place)]


def _checksum(x: Any) -> int:
    """Of an array's shape, type and elements; never 0."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    host = np.ascontiguousarray(x)
    return zlib.crc32(host.reshape(-1).view(np.uint8).data, zlib.crc32(f"{np.shape(x)} {host.dtype}".encode())) or 1


def _everywhere(x: Any, sharding: NamedSharding) -> jax.Array:
    """The global array of one that every process has whole; `jax.device_put` compares it whole once more, and takes no typed keys."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        spec = PartitionSpec(*sharding.spec, *(None,) * (x.ndim - len(sharding.spec)))
        data = _everywhere(jax.random.key_data(x), NamedSharding(sharding.mesh, spec))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if getattr(x, "weak_type", isinstance(x, _NUMBERS)):
        return jax.device_put(jnp.asarray(x), sharding)  # which keeps the type
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index], dtype=host.dtype)
