"""The devices of a mesh on the cluster: where each stands, its coordinates in the mesh, and the links that each axis runs over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from autoshard.cluster import Cluster, Span
from autoshard.ir import Mesh


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of a mesh.

    Attributes:
        wiring: ``torus``, ``switch`` or ``host``.
        dimensions: sizes of the cluster's physical dimensions, outermost first; of hosts, (hosts, devices a host).
        rings: whether each of them closes to a ring.
        places: per device its position in these dimensions.
        coordinates: per device its coordinates in the mesh.
        links: (device, device, axis) for each pair of neighbours along an axis, ring closures included.
    """

    wiring: str
    dimensions: tuple[int, ...]
    rings: tuple[bool, ...]
    places: tuple[tuple[int, ...], ...]
    coordinates: tuple[tuple[int, ...], ...]
    links: tuple[tuple[int, int, int], ...]


def devices_of_stages(cluster: Cluster, mesh: Mesh, stages: Sequence[Mesh]) -> Devices | None:
    """The devices of a pipeline, stage after stage: parts of a cluster are its devices in order. None where stages differ in their axes.

    Args:
        mesh: whose first axis are the stages.
        stages: the mesh of each on its part.
    """
    if any(stage.names != mesh.names[1:] for stage in stages):
        return None
    part, dimensions = cluster.part(len(stages)), cluster.dimensions
    coordinates: list[tuple[int, ...]] = []
    links: list[tuple[int, int, int]] = []
    for number, stage in enumerate(stages):
        found, first = devices_of(part, stage), len(coordinates)
        coordinates += [(number, *along) for along in found.coordinates]
        links += [(first + a, first + b, axis + 1) for a, b, axis in found.links]
    places = tuple(product(*map(range, dimensions)))
    return Devices(cluster.interconnect.kind, dimensions, cluster.rings, places, tuple(coordinates), tuple(links))


def devices_of(cluster: Cluster, mesh: Mesh) -> Devices:
    """The devices, numbered row-major over the physical dimensions; a mesh without a placement is laid out row-major."""
    topology, sizes = cluster.dimensions, mesh.sizes
    placement = mesh.placement
    dims = tuple(range(len(topology))) if placement is None else placement.dims
    axes = mesh.order if placement is None else placement.axes
    places = list(product(*map(range, topology)))
    order = sorted(range(len(places)), key=lambda k: [places[k][dim] for dim in dims])  # as `autoshard.lower.mesh` assigns them
    coordinates: list[tuple[int, ...]] = [()] * len(places)
    for device, along in zip(order, product(*(range(sizes[axis]) for axis in axes)), strict=True):
        of_axis = dict(zip(axes, along, strict=True))
        coordinates[device] = tuple(of_axis[axis] for axis in range(len(sizes)))
    numbers = {found: device for device, found in enumerate(places)}
    links = []
    for axis, link in enumerate(cluster.links(mesh)):
        for span in link.spans:
            for found, device in numbers.items():
                after = _after(found, span)
                if after in numbers:
                    links.append((device, numbers[after], axis))
    return Devices(cluster.interconnect.kind, topology, cluster.rings, tuple(places), tuple(coordinates), tuple(links))


def _after(place: tuple[int, ...], span: Span) -> tuple[int, ...] | None:
    """The next device of a span; None after the last of one that closes no ring."""
    at = place[span.dim]
    is_last = at // span.stride % span.extent == span.extent - 1
    if is_last and not (span.ring and span.extent > 2):
        return None
    after = at - (span.extent - 1) * span.stride if is_last else at + span.stride
    return (*place[: span.dim], after, *place[span.dim + 1 :])
