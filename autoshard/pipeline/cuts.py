"""The cuts of a step into stages: what they have in common is made once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from autoshard.cluster import Cluster
from autoshard.microbatch import Pass, passes_of
from autoshard.pipeline.cut import Weights
from autoshard.pipeline.figures import least_seconds
from autoshard.pipeline.micro import Micro, micro_of
from autoshard.pipeline.stages import Staged, stages_of
from autoshard.trace import Traced


class Cuts:
    """The cuts of a step in so many microbatches: its passes over them, the programs of one microbatch and the stages, each made once.

    A search has one for each program and number of microbatches, and the strategy that it finds has its own, for questions about it.
    Programs, and arrays that they close over, are gone with these.

    Attributes:
        traced: the step.
        n: the number of microbatches.
        passes: over them, as `autoshard.microbatch.passes_of` finds them.
    """

    def __init__(self, traced: Traced, n: int):
        self.traced, self.n = traced, n
        self.passes: tuple[Pass, ...] = passes_of(traced, n)
        self._made: dict[tuple[Any, ...], Any] = {}

    def stages(
        self, own: Pass, n_stages: int, devices: Cluster, rows: Collection[int] | None = None, shares: Sequence[float] | None = None
    ) -> Staged:
        """The stages of a pass, cut by predicted seconds; all else as for `autoshard.pipeline.stages.stages_of`.

        Args:
            devices: of a stage.
        """

        key = own.traced, n_stages, devices, None if rows is None else tuple(rows), None if shares is None else tuple(shares)
        weights = Weights(lambda micro: self._once((micro, devices), lambda: least_seconds(micro, devices)), shares)

        def micro(traced: Traced, n: int) -> Micro:
            return self._once((traced,), lambda: micro_of(traced, n))

        return self._once(key, lambda: stages_of(own.traced, n_stages, self.n, weights, rows, micro))

    def _once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
