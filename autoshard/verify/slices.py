"""Collectives between slices in the text of XLA:TPU, which leaves them to its runtime: pairs of send and recv that name what they do.

A ``recv`` has the attributes ``_xla_megascale_transfer_type`` (``ALL_REDUCE``), ``_xla_megascale_target`` (``{1,2}x{0:7}``: the slices,
from 1, and the devices of each; or lists of devices, ``{{100000,200000}}`` or ``{{100000->200000}}``, by slice and number) and
``_xla_host_transfer_rendezvous``, which its ``send`` has too.

The module itself is that of one slice: its groups number the slice's devices in mesh order. A collective over devices of several slices
that are several of each slice is compiled in phases: `in_phases` gives these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np

from autoshard.cluster import Cluster, Link, join
from autoshard.cost.collectives import COLLECTIVES
from autoshard.errors import CompilerError
from autoshard.ir import Collective, Mesh, as_compiled
from autoshard.verify.groups import UNKNOWN, axes_of_pairs

_PERMUTE = "ONE_TO_ONE"
_TYPE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_TARGET = re.compile(r"_xla_megascale_target=\"?(\{[^\"]*?\})\"?,_xla")
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_NUMBERED = 100_000  # XLA:TPU's number of a device: that of its slice, from 1, times this, and its own in the slice

TILE_BYTES = 4096  # below it, a sum over several slices is all_reduced within them whole: float32[8,128] is divided, float32[] not


def is_between_slices(attributes: str) -> bool:
    """Whether a send or recv with these attributes is the runtime's of several slices."""
    return 'handler_name="xla_megascale_runtime"' in attributes


def rendezvous(attributes: str) -> str:
    """The name that a send and its recv share."""
    found = _RENDEZVOUS.search(attributes)
    return found[1] if found else ""


def kind_and_axes(attributes: str, mesh: Mesh) -> tuple[str, tuple[str, ...]]:
    """The kind of a collective between slices, and its mesh axes.

    Raises:
        CompilerError: it is of an unknown kind.
    """
    found = _TYPE.search(attributes)
    kind = "" if found is None else "collective_permute" if found[1] == _PERMUTE else found[1].lower()
    if kind not in COLLECTIVES:
        known = ", ".join(each.upper() for each in COLLECTIVES[:-1])
        raise CompilerError(
            f"a transfer between slices is one of {known} and {_PERMUTE}, and the compiled module has {attributes[:200]!r}. Report it "
            "with the versions of jax and libtpu."
        )
    target = _TARGET.search(attributes)
    return kind, UNKNOWN if target is None else axes_of_pairs(_pairs(target[1], mesh), mesh)


@lru_cache(maxsize=64)
def within_slice(mesh: Mesh) -> Mesh:
    """The mesh of one slice's devices, each axis as long as it is there.

    Raises:
        CompilerError: these are no mesh of the same axes.
    """
    own = np.sort(_places(mesh)[0])
    along = np.unravel_index(np.argsort(mesh.devices, axis=None)[own], mesh.sizes)
    sizes = {name: len(np.unique(coordinates)) for name, coordinates in zip(mesh.names, along, strict=True)}
    if math.prod(sizes.values()) != len(own):
        raise CompilerError(f"a slice has the same part of every row of a mesh, and {mesh} is placed otherwise. Use another mesh.")
    return Mesh(tuple(sizes.items()), shape=tuple((name, sizes.get(name, 1)) for name, _ in mesh.shape))


def _pairs(target: str, mesh: Mesh) -> np.ndarray:
    """Pairs of devices, as numbers in mesh order, that differ as those of the target's groups do."""
    places = _places(mesh)
    if "x{" in target:
        slices = [int(number) - 1 for number in re.findall(r"\d+", target.partition("x{")[0])]
        return np.array([(places[slices[0], k], places[other, k]) for other in slices[1:] for k in range(places.shape[1])])
    groups = [[int(number) for number in re.findall(r"\d+", group)] for group in re.findall(r"\{([\d,\-> ]+)\}", target)]
    known = _numbers(mesh)
    devices = [[places[device // _NUMBERED - 1, known[device % _NUMBERED]] for device in group] for group in groups]
    return np.array([(group[0], other) for group in devices for other in group[1:]])


def _places(mesh: Mesh) -> np.ndarray:
    """By slice and number there, row-major over the slice, the number of the device in mesh order."""
    placed = mesh.placement
    n = mesh.size
    if placed is None:
        raise CompilerError(f"a mesh on several slices has a placement, and {mesh} has none. Search again for this cluster.")
    grid = np.arange(n).reshape(placed.topology).transpose(placed.dims).reshape([mesh.sizes[axis] for axis in placed.axes])
    by_mesh = grid.transpose(np.argsort(placed.axes)).transpose(mesh.order).reshape(-1)
    places = np.empty(n, int)
    places[by_mesh] = np.arange(n)
    return places.reshape(placed.topology[0], -1)


def _numbers(mesh: Mesh) -> np.ndarray:
    """The row-major number of a device in its slice by XLA:TPU's, which counts a chip's devices first, then the first dimension."""
    assert mesh.placement is not None
    sizes = mesh.placement.topology[1:]
    chips = range(len(sizes))[:3]
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(*reversed(chips), *range(3, len(sizes))).reshape(-1)


def in_phases(planned: Iterable[Collective], mesh: Mesh, cluster: Cluster) -> Iterator[Collective]:
    """The collectives as XLA:TPU compiles them for several slices: within, across, within, where one is over several devices of each."""
    links = dict(zip(mesh.names, cluster.links(mesh), strict=True))
    for each in planned:
        is_narrow = any(made.kind == "all_to_all" for made in each.compiled or ())
        for made in as_compiled([each]):
            if is_narrow and made.kind == "reduce_scatter" and any(links[axis].crossed for axis in made.mesh_axes):
                yield replace(made, kind="all_reduce")  # within slices, before their parts cross (`autoshard.cost.narrow_sums`)
                continue
            wide = each.bytes if made.kind == each.kind else made.bytes  # what is narrowed is so within slices alone
            link = join([links[axis] for axis in made.mesh_axes]) if made.mesh_axes else None
            crosses = link is not None and link.crossed and made.kind in ("all_reduce", "all_gather", "reduce_scatter")
            yield from _phases(made, max(wide, made.bytes), links) if crosses else (made,)


def _phases(collective: Collective, wide_bytes: float, links: Mapping[str, Link]) -> Iterator[Collective]:
    """The phases of a collective between slices, of which some are within one where it is over several devices there."""
    across = [axis for axis in collective.mesh_axes if links[axis].crossed]
    inside = [axis for axis in collective.mesh_axes if links[axis].inside.size > 1]
    n = math.prod(links[axis].inside.size for axis in inside)
    divides = collective.kind != "all_reduce" or collective.bytes >= TILE_BYTES
    yield replace(collective, mesh_axes=tuple(across), bytes=wide_bytes / (n if divides else 1))
    if inside and collective.kind != "all_gather":
        kind = "reduce_scatter" if collective.kind == "all_reduce" and divides else "all_reduce"
        yield replace(collective, mesh_axes=tuple(inside), kind=kind)
    if inside and collective.kind != "reduce_scatter" and divides:
        yield replace(collective, mesh_axes=tuple(inside), kind="all_gather")
