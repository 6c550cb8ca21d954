"""The strategy that users hold: a record of what was decided, with what it takes to run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autoshard.api.explain import explain
from autoshard.api.step import Step
from autoshard.cost.record import Cost
from autoshard.errors import StrategyError
from autoshard.lower import jax_mesh, to_named_sharding
from autoshard.render import Report
from autoshard.strategy import Record, load_record, save_record
from autoshard.trace import Traced


class Strategy:
    """How one program is sharded over one cluster, what that costs, and how to run it.

    Attributes:
        record: everything that is saved.
    """

    def __init__(self, record: Record, traced: Traced | None = None):
        self.record = record
        self._traced = traced

    # -- the answer ------------------------------------------------------------------------------------------------

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Axis sizes by name, outermost first."""
        return dict(self.record.mesh.axes)

    @property
    def in_specs(self) -> tuple:
        """A tuple with one pytree of `PartitionSpec` an argument, structured as the arguments."""
