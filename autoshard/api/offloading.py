"""Whether a search keeps optimizer state in the memory of hosts, as the option ``offload`` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError, ShardingError
from autoshard.recompute import LEAST_BYTES, optimizer_state
from autoshard.render import format_bytes
from autoshard.trace import Traced

WORDS = ("optimizer", "auto")

Found = TypeVar("Found", bound=tuple[Any, ...])


def checked_offload(offload: str | None) -> str | None:
    """The option ``offload``, checked.

    Raises:
        ShardingError: there is not.
    """
    if offload is not None and offload not in WORDS:
        raise ShardingError(f"offload is 'optimizer', 'auto' or None, got {offload!r}. Use 'optimizer', for instance.")
    return offload


def check_offload(offload: str | None, cluster: Cluster, traced: Traced) -> None:
    """Raises `ShardingError` where state is to be in the memory of hosts, and devices cannot reach that, or there is no such state."""
    if offload is None:
        return
    device = cluster.device
    if not device.host_bandwidth_bytes_per_second:
        raise ShardingError(
            f"offload={offload!r} moves state between a device and its host, and of {device.name!r} no bandwidth of such a link is known "
            f"(host_bandwidth_bytes_per_second is 0). Give it in a cluster file, or use offload=None."
        )
    if offload == "optimizer" and not optimizer_state(traced):
        raise ShardingError(
            f"offload='optimizer' keeps what a step replaces, and no matrix product or loop reads, in the memory of hosts: "
            f"{traced.graph.name!r} has no such leaf of {format_bytes(LEAST_BYTES)} or more among its arguments. Return the new state, or "
            "use offload=None."
        )


def best_offload(attempt: Callable[[bool], Found], offload: str | None) -> Found:
    """What is found with as much offload as asked for.

    Args:
        attempt: searches with optimizer state on devices or on hosts; the second of what it gives is the solution.

    Raises:
        InfeasibleError: nothing fits.
    """
    if offload != "auto":
        return attempt(offload is not None)
    try:
        found = attempt(False)
    except InfeasibleError as error:
        return _or_refused(error, lambda: attempt(True))
    if not found[1].hints.price:  # memory does not bind: transfers could only add time
        return found
    try:
        return min(found, attempt(True), key=lambda each: each[1].judgement.cost.makespan_seconds)
    except InfeasibleError:
        return found


def _or_refused(error: InfeasibleError, offloading: Callable[[], Found]) -> Found:
    """What is found with state on hosts; where nothing is, the refusal without, with what was tried.

    Raises:
        InfeasibleError: nothing fits.
    """
    try:
        return offloading()
    except InfeasibleError as other:
        smallest = min(filter(None, (error.smallest_peak_bytes, other.smallest_peak_bytes)), default=None)
        peak = "" if smallest is None else f": the smallest peak is {format_bytes(smallest)}"
        raise InfeasibleError(f"{error} Nor does it fit with optimizer state in the memory of hosts{peak}.", smallest) from None
