"""What a search keeps in the memory of hosts, as the option ``offload`` says: optimizer state, and what the forward pass keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from autoshard.api.refusals import or_refused
from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError, ShardingError
from autoshard.recompute import LEAST_BYTES, optimizer_state
from autoshard.render import format_bytes
from autoshard.trace import Traced

KINDS = {"optimizer": "optimizer state", "activations": "kept activations"}
WORDS = (*KINDS, "auto")

Hosted = frozenset[str]
"""Some of `KINDS`."""

Found = TypeVar("Found", bound=tuple[Any, ...])


def checked_offload(offload: str | None, remat: str | None) -> str | None:
    """The option ``offload``, checked.

    Raises:
        ShardingError: there is not; or it is for what the option ``remat`` excludes.
    """
    if offload is not None and offload not in WORDS:
        raise ShardingError(f"offload is 'optimizer', 'activations', 'auto' or None, got {offload!r}. Use 'optimizer', for instance.")
    if offload == "activations" and remat is None:
        raise ShardingError(
            "offload='activations' is a third choice for what remat keeps or computes again, and with remat=None nothing is chosen. "
            "Use remat='fit', 'auto' or 'full' with it."
        )
    return offload


def check_offload(offload: str | None, cluster: Cluster, traced: Traced) -> None:
    """Raises `ShardingError` where something is to be in the memory of hosts, and devices cannot reach that, or there is no such state."""
    if offload is None:
        return
    device = cluster.device
    if not device.host_bandwidth_bytes_per_second:
        raise ShardingError(
            f"offload={offload!r} moves arrays between a device and its host, and of {device.name!r} no bandwidth of such a link is known "
            f"(host_bandwidth_bytes_per_second is 0). Give it in a cluster file, or use offload=None."
        )
    if offload == "optimizer" and not optimizer_state(traced):
        raise ShardingError(
            f"offload='optimizer' keeps what a step replaces, and no matrix product or loop reads, in the memory of hosts: "
            f"{traced.graph.name!r} has no such leaf of {format_bytes(LEAST_BYTES)} or more among its arguments. Use offload=None: smaller "
            "ones stay on the device. Where the step does not return its new state, return it."
        )


def kinds_of(traced: Traced, remat: str | None) -> list[str]:
    """What of a step ``"auto"`` may keep in the memory of hosts."""
    return [*(["activations"] if remat is not None else []), *(["optimizer"] if optimizer_state(traced) else [])]


def best_offload(attempt: Callable[[Hosted], Found], offload: str | None, kinds: Callable[[], Sequence[str]]) -> Found:
    """What is found with as much offload as asked for.

    Args:
        attempt: searches with these kinds on hosts; the second of what it gives is the solution.
        kinds: those among which ``"auto"`` chooses.

    Raises:
        InfeasibleError: nothing fits.
    """
    if offload != "auto":
        return attempt(frozenset() if offload is None else frozenset([offload]))
    try:
        found = [attempt(frozenset())]
    except InfeasibleError as error:
        some = kinds()
        tried = f"with {' or '.join(KINDS[kind] for kind in some)} in the memory of hosts"
        return or_refused(error, lambda: _least_that_fits(attempt, some), tried)
    if found[0][1].hints.price:  # memory binds; where it does not, transfers could only add time
        for kind in kinds():
            with suppress(InfeasibleError):
                found.append(attempt(frozenset([kind])))
    return min(found, key=lambda each: each[1].judgement.cost.makespan_seconds)


def _least_that_fits(attempt: Callable[[Hosted], Found], kinds: Sequence[str]) -> Found:
    """The fastest of what is found with one of the kinds on hosts; with all of them where nothing is.

    Raises:
        InfeasibleError: nothing fits.
    """
    found: list[Found] = []
    refused: list[InfeasibleError] = []
    for some in (*([kind] for kind in kinds), [*kinds]):
        if len(some) > 1 and found:
            break
        try:
            found.append(attempt(frozenset(some)))
        except InfeasibleError as error:
            refused.append(error)
    if not found:
        raise min(refused, key=lambda error: error.smallest_peak_bytes or float("inf"))
    return min(found, key=lambda each: each[1].judgement.cost.makespan_seconds)
