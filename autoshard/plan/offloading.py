"""What a search keeps in the memory of hosts, as the option ``offload`` says: optimizer state, and what the forward pass keeps."""

from __future__ import annotations

from autoshard.cluster import Cluster
from autoshard.errors import ShardingError
from autoshard.recompute import LEAST_BYTES, optimizer_state
from autoshard.render import format_bytes
from autoshard.trace import Traced


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
