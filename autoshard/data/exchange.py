"""What processes tell each other of the batch that each has next.

A process that ran out of batches, or whose loader failed, would leave the others waiting in the step's collectives; and one that read
other rows than those which share its shard would train on a batch that no process knows whole. So each says what it has one batch ahead.
The exchange is a small jitted program, queued before the step that it is read after: it delays no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autoshard.trace import outside_mesh

HAS, WRAPS, ENDED, FAILED = range(4)
"""A process has another batch; it has ended and can go on with its first batch; it has ended; its loader failed."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a process says.

    Attributes:
        status: one of the above.
        shard_id: which shard's rows its batch has.
        rows_sum: a checksum of these; 0 where the batch is the whole one.
        whole_sum: a checksum of what is the same in all processes.
    """

    status: int
    shard_id: int = 0
    rows_sum: int = 0
    whole_sum: int = 0


class Exchange:
    """The means by which the processes of some devices tell each other; of one process alone it takes none."""

    def __init__(self, devices: Sequence[Any]):
        first: dict[int, Any] = {}
        for device in devices:
            first.setdefault(device.process_index, device)
        self.processes: tuple[int, ...] = tuple(sorted(first))
        self._devices = tuple(first[process] for process in self.processes)

    def send(self, told: Told) -> Any:
        """What all say, once it is `received`; all processes call this in the same order."""
        row = np.array([[told.status, told.shard_id, told.rows_sum, told.whole_sum]], np.uint32)
        if len(self._devices) == 1:
            return row
        sharding, gather = _gatherer(self._devices)
        with outside_mesh():
            return gather(jax.make_array_from_callback((len(self._devices), 4), sharding, lambda _: row))

    @staticmethod
    def received(sent: Any) -> list[Told]:
        """What each process said, in the order of ``processes``."""
        rows = sent if isinstance(sent, np.ndarray) else np.asarray(sent.addressable_data(0))
        return [Told(*map(int, row)) for row in rows]


@lru_cache(maxsize=8)
def _gatherer(devices: tuple[Any, ...]) -> tuple[NamedSharding, Any]:
    """Where each process's row is, and the program that gives all to all."""
    mesh = jax.sharding.Mesh(np.array(devices), ("process",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec("process")), jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
