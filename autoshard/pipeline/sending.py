"""Arrays sent from the devices of one stage to those of another, in one process or between several.

In several processes each runs the programs of the stages that have devices of its own, and knows of all others what they make. An array of
which a process has no part is None while it is sent; an argument or a result of the step is then a global array without parts of its own.

`jax.device_put` copies between the devices of one process. Between processes an array is sent by a program over the devices of both stages,
of one `collective_permute`, which runs in all processes that have some of them: JAX's own transfers between processes need processes of
which none has devices of both (jax 0.10.2). All processes start these programs in the order of the schedule, and wait for each to end: on
CPUs a thread that waits for another process is missing where that process waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxlib import xla_client

from autoshard.errors import PipelineError

_PAIR = "_pair"  # the mesh axis of two stages: that which sends is first


def _mesh(sharding: NamedSharding) -> Any:
    """The mesh of a sharding on devices; its type may be that of an abstract one."""
    return sharding.mesh


def is_here(sharding: NamedSharding) -> bool:
    """Whether this process has devices of a sharding."""
    return bool(sharding.addressable_devices)


def is_alone(shardings: Sequence[NamedSharding]) -> bool:
    """Whether this process has all devices of these shardings."""
    return all(sharding.is_fully_addressable for sharding in shardings)


@dataclass(frozen=True, slots=True, eq=False)
class Sending:
    """The way of an array from one stage to another; `sending` makes it.

    Attributes:
        source: as the stage that sends it has it.
        as_sent: the same on the devices of the stage that receives it: JAX sends other shardings by way of the host.
        rearranged: the program that shards it as it is read there; None where it is sent so.
        crossing: the program that sends it between processes; None in one process.
        is_copied: whether each device's part goes to one device as it is, in one process.
        is_read: whether this process has devices of the stage that receives it.
        takes_part: whether it has devices of either.
    """

    source: NamedSharding
    as_sent: NamedSharding
    rearranged: Callable[..., Any] | None
    crossing: Callable[..., Any] | None
    is_copied: bool
    is_read: bool
    takes_part: bool

    def __call__(self, x: Any) -> Any:
        """The array as it is read; None in processes that do not read it."""
        if self.crossing is None:
            x = jax.device_put(x, self.as_sent)
        elif self.takes_part:
            x = self.crossing(x)
        if not self.is_read:
            return None
        return x if self.rearranged is None else self.rearranged(x)


def sending(source: NamedSharding, target: NamedSharding, shape: tuple[int, ...], dtype: Any) -> Sending:
    """How an array of a shape and dtype gets from its sharding on one stage to that on another.

    Raises:
        PipelineError: their meshes are of other shapes, and in other processes.
    """
    if _mesh(source).shape != _mesh(target).shape:  # of a mixed cluster: JAX sends it by way of the host
        if not is_alone((source, target)):
            raise PipelineError(
                f"between processes stages send arrays to as many devices, and one has the mesh {dict(_mesh(source).shape)}, the next "
                f"{dict(_mesh(target).shape)}. Run unequal stages in one process, or plan equal ones."
            )
        return Sending(source, target, None, None, is_copied=False, is_read=True, takes_part=True)
    as_sent = NamedSharding(target.mesh, source.spec)
    is_same = as_sent.is_equivalent_to(target, len(shape))
    rearranged = None if is_same else jax.jit(lambda x: x, out_shardings=target)
    crossing = None if is_alone((source, target)) else _crossing(source, as_sent, shape, dtype)
    is_copied = crossing is None and not jnp.issubdtype(dtype, jax.dtypes.extended)
    return Sending(source, as_sent, rearranged, crossing, is_copied, is_here(target), is_here(source) or is_here(target))


class Copies:
    """Arrays that one program makes, sent in one call: `jax.device_put` takes the host 100 microseconds for each."""

    def __init__(self, ways: Sequence[Sending]):
        self.ways: tuple[Sending, ...] = tuple(ways)
        self._at_once = [k for k, way in enumerate(ways) if way.is_copied and way.source != way.as_sent]
        self._shardings = [ways[k].as_sent for k in self._at_once]
        self._copy = _copier(self._shardings)
        self._others = [k for k, way in enumerate(ways) if not way.is_copied]
        self._rearranged = [(k, way.rearranged) for k, way in enumerate(ways) if way.is_copied and way.rearranged is not None]

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays as they are read, one per way."""
        found = list(arrays)
        if self._at_once:
            copied = self._copy([arrays[k] for k in self._at_once])
            for k, x in zip(self._at_once, copied, strict=True):
                found[k] = x
        for k in self._others:
            found[k] = self.ways[k](arrays[k])
        for k, rearranged in self._rearranged:
            found[k] = rearranged(found[k])
        return found


def _copier(shardings: Sequence[NamedSharding]) -> Callable[[list[Any]], Sequence[Any]]:
    """The function that copies arrays to such shardings: what `jax.device_put` calls at last, or where JAX has that no more, itself."""
    copy = getattr(xla_client, "batched_copy_array_to_devices_with_sharding", None)
    devices = [getattr(each, "_internal_device_list", None) for each in shardings]
    if copy is None or any(each is None for each in devices):
        return lambda arrays: jax.device_put(arrays, list(shardings))
    reused = [xla_client.ArrayCopySemantics.REUSE_INPUT] * len(shardings)
    return lambda arrays: copy(arrays, devices, list(shardings), reused)


def _crossing(source: NamedSharding, target: NamedSharding, shape: tuple[int, ...], dtype: Any) -> Callable:
    """The function that sends an array between stages by a program over the devices of both.

    To that program the array is as it is on either stage; on the devices that receive it, it has any numbers before.
    """
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return _crossing_keys(source, target, shape, dtype)
    first, second = _mesh(source), _mesh(target)
    devices, spec = np.stack([first.devices, second.devices]), source.spec
    mesh = Mesh(devices, (_PAIR, *first.axis_names), axis_types=(AxisType.Auto,) * devices.ndim)
    joint = NamedSharding(mesh, spec)
    send = jax.jit(jax.shard_map(lambda x: lax.ppermute(x, _PAIR, [(0, 1)]), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    own, part = [d for d in second.devices.flat if d.process_index == jax.process_index()], target.shard_shape(shape)
    blank = [jax.device_put(np.zeros(part, dtype), device) for device in own]

    def crossed(x: Any) -> Any:
        given = [] if x is None else [shard.data for shard in x.addressable_shards]
        jax.block_until_ready(given)
        made = jax.block_until_ready(send(jax.make_array_from_single_device_arrays(shape, joint, [*given, *blank], dtype=dtype)))
        received = [shard.data for shard in made.addressable_shards if shard.device in own]
        return jax.make_array_from_single_device_arrays(shape, target, received, dtype=dtype)

    return crossed


def _crossing_keys(source: NamedSharding, target: NamedSharding, shape: tuple[int, ...], dtype: Any) -> Callable:
    """The same for random keys, whose data are sent."""
    data, impl = _key_data(shape, dtype)
    crossing = _crossing(_longer(source, data), _longer(target, data), data.shape, data.dtype)

    def crossed(keys: Any) -> Any:
        x = crossing(None if keys is None else jax.random.key_data(keys))
        return jax.random.wrap_key_data(x, impl=impl) if is_here(target) else None

    return crossed


def _key_data(shape: tuple[int, ...], dtype: Any) -> tuple[jax.ShapeDtypeStruct, Any]:
    """The type of the data of random keys, and the keys' implementation."""
    impl = []

    def data(keys: Any) -> Any:
        impl.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    return jax.eval_shape(data, jax.ShapeDtypeStruct(shape, dtype)), impl[0]


def _longer(sharding: NamedSharding, data: jax.ShapeDtypeStruct) -> NamedSharding:
    """The sharding of the data of keys with a sharding: the dimensions that data have beside are whole."""
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, *(None,) * (len(data.shape) - len(sharding.spec))))


def absent(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.Array:
    """The global array of which this process has no part."""
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
    data, impl = _key_data(shape, dtype)
    return jax.random.wrap_key_data(absent(data.shape, data.dtype, _longer(sharding, data)), impl=impl)


def to_everyone(
    sharding: NamedSharding, meshes: Sequence[Mesh], shape: tuple[int, ...], dtype: Any
) -> tuple[NamedSharding, Callable[[Any], jax.Array]]:
    """The sharding of an array that is whole on every device of some meshes, and the function that makes it of one that is whole on each
    device of one of them; None stands for that in processes that have no part of it.
    """
    devices = list(dict.fromkeys(device for mesh in meshes for device in mesh.devices.flat))
    everywhere = NamedSharding(Mesh(np.array(devices), ("device",), axis_types=(AxisType.Auto,)), PartitionSpec("device"))
    first = devices.index(_mesh(sharding).devices.flat[0])
    whole = NamedSharding(everywhere.mesh, PartitionSpec())
    read = jax.jit(lambda x: x[first], out_shardings=whole)
    blank = {d: jax.device_put(np.zeros((1, *shape), dtype), d) for d in devices if d.process_index == jax.process_index()}

    def given(x: Any) -> jax.Array:
        parts = blank if x is None else blank | {shard.device: shard.data[None] for shard in x.addressable_shards}
        stacked = jax.make_array_from_single_device_arrays((len(devices), *shape), everywhere, list(parts.values()), dtype=dtype)
        return jax.block_until_ready(read(jax.block_until_ready(stacked)))

    return whole, given


def put(x: Any, sharding: NamedSharding) -> Any:
    """The array on the devices of a sharding; itself where it is there."""
    if isinstance(x, jax.Array) and x.committed and (x.sharding == sharding or x.sharding.is_equivalent_to(sharding, x.ndim)):
        return x
    return jax.device_put(x, sharding)
