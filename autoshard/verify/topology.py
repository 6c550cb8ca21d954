"""Descriptions of absent devices for ahead-of-time compilers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from autoshard.cluster import Cluster
from autoshard.cluster.catalogue import COMPUTE_CAPABILITY
from autoshard.errors import ClusterError

UNRESERVED = 0.8  # of a GPU's memory, which XLA:GPU lets programs use where JAX does not tell it what its allocator has
CHIPS_PER_HOST = 4  # into which XLA:TPU divides a slice by default (libtpu 0.0.42)


@dataclass(frozen=True, slots=True)
class Topology:
    """Devices that a program is compiled for.

    Attributes:
        platform: JAX's name of it, ``tpu``, ``cuda`` or ``cpu``.
        name: the TPU compiler's name of the slice, ``v5e:2x4``; for CPUs the cluster's; empty for GPUs.
        options: further arguments of `jax.experimental.topologies.get_topology_desc`.
        memory_limit_bytes: the memory that a program may use, where the compiler does not know it.
    """

    platform: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    memory_limit_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class _Capability:
    """Figures of a multiprocessor (CUDA programming guide, "Technical specifications per compute capability"), and of the L2 cache.

    Attributes:
        lanes: float32 operations per cycle.
        shared_bytes, shared_bytes_per_block: its shared memory, and the part that one block may use.
        cache_bytes: the GPU's L2 cache (architecture whitepapers).
    """

    lanes: int
    shared_bytes: int
    shared_bytes_per_block: int
    cache_bytes: int


_CAPABILITIES = {
    8: _Capability(64, 164 * 1024, 163 * 1024, 40 * 2**20),
    9: _Capability(128, 228 * 1024, 227 * 1024, 50 * 2**20),
    10: _Capability(128, 228 * 1024, 227 * 1024, 126 * 2**20),
}

# XLA's stream_executor.GpuTargetConfigProto, as text, with the figures that all NVIDIA GPUs of these capabilities share.
_GPU_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 shared_memory_per_block: 49152
  shared_memory_per_core: {shared} shared_memory_per_block_optin: {shared_per_block} fpus_per_core: {lanes} core_count: {processors}
  l2_cache_size: {cache} memory_bandwidth: {bandwidth} device_memory_size: {memory} clock_rate_ghz: {clock:.3f}
  cuda_compute_capability {{ major: {capability} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""


def topology_of(cluster: Cluster) -> Topology:
    """The topology of a cluster's TPUs or GPUs.

    Raises:
        ClusterError: they are CPUs, or GPUs that the catalogue does not have.

    >>> topology_of(Cluster.parse("v5e:2x4")).name, topology_of(Cluster.parse("h100:8x4")).options["topology"]
    ('v5e:2x4', '4x1x8')
    """
    device = cluster.device
    if device.kind == "tpu":
        return _slices(cluster)
    if device.kind != "gpu" or device.name not in COMPUTE_CAPABILITY:
        raise ClusterError(
            "programs are compiled ahead of time for TPU slices and for the GPUs "
            f"{', '.join(COMPUTE_CAPABILITY)}, and {cluster.name!r} has "
            f"{device.name!r}. Search with cluster='v5e:2x4' or 'h100:8x1', or use another target."
        )
    per_host, hosts = (*cluster.topology, 1)[:2]
    has = _CAPABILITIES[COMPUTE_CAPABILITY[device.name]]
    target = _GPU_TARGET.format(
        name=device.name,
        capability=COMPUTE_CAPABILITY[device.name],
        lanes=has.lanes,
        shared=has.shared_bytes,
        shared_per_block=has.shared_bytes_per_block,
        cache=has.cache_bytes,
        processors=device.processors,
        bandwidth=int(device.memory_bandwidth_bytes_per_second),
        memory=int(cluster.memory_limit_bytes / UNRESERVED),
        clock=device.vector_flops_per_second / (2 * has.lanes * device.processors) / 1e9,  # a product and a sum at once
    )
    # slices x hosts of a slice x devices of a host: each host is a slice, the extent of NVLink
    hosts *= math.prod(level.size for level in cluster.levels)
    return Topology("cuda", "", {"topology": f"{hosts}x1x{per_host}", "target_config": target}, cluster.memory_limit_bytes)


def _slices(cluster: Cluster) -> Topology:
    """The topology of TPU slices."""
    if len(cluster.levels) > 1:
        raise ClusterError(
            f"programs are compiled ahead of time for slices on one network, and {cluster.name!r} has {len(cluster.levels)} levels of "
            f"them. Search on a cluster of one, '{cluster.n_devices // math.prod(cluster.topology)}*{cluster.device.name}:...' say."
        )
    rows, columns = (*cluster.topology, 1)[:2]
    # The compiler divides slices into hosts of 2 x 2 chips; others, such as 1 x 4 in a stage of a pipeline, have hosts of their own.
    options: dict[str, Any] = {"chips_per_host_bounds": _host_of(cluster.topology)} if rows % 2 or columns % 2 else {}
    if cluster.levels:
        options["num_slices"] = cluster.levels[0].size
    return Topology("tpu", f"{cluster.device.name}:{'x'.join(map(str, cluster.topology[:3]))}", options)


def _host_of(topology: tuple[int, ...]) -> tuple[int, ...]:
    """The chips of a host along each of three dimensions, at most `CHIPS_PER_HOST`, whole hosts of which make the slice.

    >>> _host_of((1, 8)), _host_of((1, 2, 2)), _host_of((1, 1))
    ((1, 4, 1), (1, 2, 2), (1, 1, 1))
    """
    found, left = [], CHIPS_PER_HOST
    for size in (*topology, 1)[:3]:
        found.append(math.gcd(size, left))
        left //= found[-1]
    return tuple(found)


def host_topology(cluster: Cluster) -> Topology:
    """The topology of virtual CPU devices, as many as the cluster has.

    >>> host_topology(Cluster.parse("cpu:8")).name
    'cpu:8'
    """
    return Topology("cpu", cluster.name, memory_limit_bytes=cluster.memory_limit_bytes)


def compiled_topology(cluster: Cluster) -> Topology:
    """The topology of any cluster for a compiler process: `topology_of`, for CPUs `host_topology`.

    Raises:
        ClusterError: GPUs that the catalogue does not have.
    """
    return host_topology(cluster) if cluster.device.kind == "cpu" else topology_of(cluster)
