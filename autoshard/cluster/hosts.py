"""The machines that a cluster is, as schedulers of jobs count and name them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.devices import CATALOGUE
from autoshard.errors import ClusterError

TPU_CHIPS = 4  # of a machine of a slice (docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus)
WHOLE_HOST = {"v5e": 8, "v6e": 8}  # chips that one machine may have, where it is the whole slice (machine types ct5lp- and ct6e-hightpu-8t)

# A TPU's names in other tools: GKE's node label gke-tpu-accelerator, and the type of Cloud TPU's API, which Ray and SkyPilot take
TPU_NAMES = {
    "v4": ("tpu-v4-podslice", "v4"),
    "v5e": ("tpu-v5-lite-podslice", "v5litepod"),
    "v5p": ("tpu-v5p-slice", "v5p"),
    "v6e": ("tpu-v6e-slice", "v6e"),
    "tpu7x": ("tpu7x", "v7x"),
}
GPU_RESOURCES = {"mi300x": "amd.com/gpu", "mi355x": "amd.com/gpu"}  # of Kubernetes; others are NVIDIA's
SKY_NAMES = {"a100": "A100-80GB", "a100-40g": "A100"}  # others are upper case (docs.skypilot.co, `sky gpus list`)


@dataclass(frozen=True, slots=True)
class Hosts:
    """The machines of a cluster.

    Attributes:
        count: how many there are, in all slices.
        devices: of JAX, on each.
        slices: TPU slices; 1 for other devices.
        per_device: whether Slurm starts a process for each device, as JAX detects it there, rather than for each machine.
        detected: whether JAX finds all processes of a job by itself, wherever it runs.
        environment: of each process, for devices that are virtual ones of a CPU; otherwise empty.
        resource, amount: what a pod of Kubernetes asks for, such as ``nvidia.com/gpu`` and 8; ``""`` where nothing is.
        labels: of the nodes that it asks for.
        ray: arguments of Ray's ScalingConfig, besides ``num_workers``.
        sky: SkyPilot's ``accelerators`` of a node, and a slice is one node; ``""`` for CPUs.
    """

    count: int
    devices: int
    slices: int = 1
    per_device: bool = False
    detected: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    resource: str = ""
    amount: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    ray: Mapping[str, object] = field(default_factory=dict)
    sky: str = ""


def hosts_of(cluster: Cluster) -> Hosts:
    """The machines of a cluster.

    Raises:
        ClusterError: a TPU, or an accelerator without JAX, that schedulers have no name for.

    >>> hosts = hosts_of(Cluster.parse("h100:8x4"))
    >>> hosts.count, hosts.devices, hosts.resource
    (4, 8, 'nvidia.com/gpu')
    >>> hosts = hosts_of(Cluster.parse("2*v5e:4x4"))
    >>> hosts.count, hosts.devices, hosts.slices, hosts.ray["topology"]
    (8, 4, 2, '4x4')
    """
    if cluster.device.kind == "tpu":
        return _slices(cluster)
    joined = math.prod(level.size for level in cluster.levels)
    if cluster.device.kind == "cpu":
        devices = math.prod(cluster.topology)
        return Hosts(joined, devices, environment={"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)})
    return _gpus(cluster, joined)


def _slices(cluster: Cluster) -> Hosts:
    name = cluster.device.name
    if name not in TPU_NAMES:
        raise ClusterError(f"schedulers know TPUs by name, {', '.join(TPU_NAMES)}, and not {name!r}. Name one of these in --cluster.")
    label, kind = TPU_NAMES[name]
    per_chip = CATALOGUE[name].chip_devices
    shape = cluster.topology if per_chip == 1 else cluster.topology[:-1]
    chips = math.prod(shape)
    each = chips if chips <= WHOLE_HOST.get(name, TPU_CHIPS) else TPU_CHIPS
    slices = math.prod(level.size for level in cluster.levels)
    topology = "x".join(map(str, shape))
    cores = 2 if CATALOGUE[name].counts_cores else 1
    return Hosts(
        count=slices * chips // each,
        devices=each * per_chip,
        slices=slices,
        detected=True,
        resource="google.com/tpu",
        amount=each,
        labels={"cloud.google.com/gke-tpu-accelerator": label, "cloud.google.com/gke-tpu-topology": topology},
        ray={
            "use_tpu": True,
            "topology": topology,
            "accelerator_type": f"TPU-{kind.upper()}",
            "resources_per_worker": {"TPU": each},
        },
        sky=f"tpu-{kind}-{chips * cores}",
    )


def _gpus(cluster: Cluster, joined: int) -> Hosts:
    name = cluster.device.name
    if name.startswith("ascend"):
        raise ClusterError(f"a job is written for devices that JAX runs on, and {name!r} is for planning alone. Name another --cluster.")
    domain, groups = (*cluster.topology, 1)[:2]  # a domain of NVLink may be several machines
    entry = CATALOGUE.get(name)
    each = math.gcd(domain, entry.tray) if entry is not None and entry.tray else domain
    return Hosts(
        count=joined * groups * domain // each,
        devices=each,
        per_device=True,
        resource=GPU_RESOURCES.get(name, "nvidia.com/gpu"),
        amount=each,
        ray={"use_gpu": True, "resources_per_worker": {"GPU": each}},
        sky=f"{SKY_NAMES.get(name, name.upper())}:{each}",
    )
