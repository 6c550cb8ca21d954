"""Clusters: the kind and number of devices, their topology and their interconnect; and clusters of unequal parts, for pipelines."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from difflib import get_close_matches
from functools import reduce
from pathlib import Path
from typing import Any

from autoshard.cluster.catalogue import LIKE, OTHER_NAMES, Entry
from autoshard.cluster.device import Device
from autoshard.cluster.devices import CATALOGUE
from autoshard.cluster.interconnect import Interconnect, Link, place
from autoshard.cluster.level import Level
from autoshard.cluster.local import local_topology, slices_of
from autoshard.cluster.records import merged_fields, record
from autoshard.errors import ClusterError
from autoshard.ir import Mesh, Placement
from autoshard.render import format_alternatives

EXAMPLES = "'v5e:4x4' (a TPU slice), '2*v5e:4x4' (two of them), 'h100:8x4' (8 GPUs on each of 4 hosts) or 'cpu:8'"
_TEXT = re.compile(r"(?:(\d{1,18})\*)?([a-z0-9-]+):(\d{1,18}(?:x\d{1,18})*)(?:\*(\d{1,18}))?")
UNLISTED = "figures of "  # in sources, before the name of the device from which they are
MOST_DEVICES = 2**20  # ten times the largest machine there is


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster of equal devices.

    Attributes:
        name: its short form, ``v5e:4x4``.
        device: the figures of each device.
        topology: the sizes of a TPU slice, last the devices of a chip where they are several; GPUs per host and hosts; or the number of
            host devices.
        interconnect: the figures of the links.
        memory_limit_bytes: the part of a device's memory that a program may use.
        overlap: whether collectives run while the device computes.
        levels: the networks that join several such slices or groups of hosts, outermost first.
        parts: of a mixed cluster its parts, of other devices or sizes, each of which has stages of a pipeline; its own figures are then
            those of the first, with the least memory, and its level joins the parts.

    >>> cluster = Cluster.parse("h100:8x4")
    >>> cluster.n_devices, cluster.device.name
    (32, 'h100')
    >>> slices = Cluster.parse("2*v5e:4x4")
    >>> slices.n_devices, slices.dimensions, slices.levels[0].name
    (32, (2, 4, 4), 'slices')
    >>> mixed = Cluster.parse("a100:8x4+h100:8x2")
    >>> mixed.n_devices, [part.name for part in mixed.parts]
    (48, ['a100:8x4', 'h100:8x2'])
    """

    name: str
    device: Device
    topology: tuple[int, ...]
    interconnect: Interconnect
    memory_limit_bytes: int
    overlap: bool
    levels: tuple[Level, ...] = ()
    parts: tuple[Cluster, ...] = ()

    def __post_init__(self) -> None:
        if not self.topology or any(size < 1 for size in self.topology):
            raise ClusterError(f"a cluster's topology is a list of positive sizes, got {self.topology} for {self.name!r}.")
        if self.n_devices > MOST_DEVICES:
            raise ClusterError(f"a cluster has at most {MOST_DEVICES:,} devices, got {self.n_devices:,} for {self.name!r}.")
        if self.memory_limit_bytes <= 0:
            raise ClusterError(f"memory_limit_bytes of cluster {self.name!r} is positive, got {self.memory_limit_bytes}.")
        wires = self.interconnect
        if wires.kind == "switch" and (len(self.topology) > 2 or (self._hosts > 1 and not wires.network_bandwidth_bytes_per_second)):
            raise ClusterError(
                f"a cluster of hosts has the topology (devices per host, hosts), and with several hosts a positive "
                f"network_bandwidth_bytes_per_second; got {self.topology} and {wires.network_bandwidth_bytes_per_second} for {self.name!r}."
            )
        if wires.kind == "host" and len(self.topology) > 1:
            raise ClusterError(f"the topology of devices in one host is one number, got {self.topology} for {self.name!r}.")

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """The cluster with a short form; `name` is the inverse.

        Raises:
            ClusterError: an unknown device, or a topology that does not exist for it.
        """
        if isinstance(text, str) and "+" in text:
            return cls.joined([cls.parse(each) for each in text.split("+")])
        match = _TEXT.fullmatch(text.strip().lower()) if isinstance(text, str) else None
        if match is None:
            raise ClusterError(
                f"a cluster is a Cluster, reads {EXAMPLES}, or is the path of a .toml file, got {text!r}. {_suggestion(text)}"
                f"Known devices: {', '.join(CATALOGUE)}."
            )
        before, name, sizes, after = match.groups()
        entry = CATALOGUE.get(name)
        if entry is None:
            near = get_close_matches(name, CATALOGUE, n=1)
            raise ClusterError(
                f"there is no device {name!r} in the catalogue, got {text!r}. {f'Did you mean {near[0]!r}? ' if near else ''}"
                f"Use one of {', '.join(CATALOGUE)}, or describe the cluster in a file for Cluster.load."
            )
        topology = tuple(int(size) for size in sizes.split("x"))
        _check_topology(entry, topology, text)
        chip = (entry.chip_devices,) if entry.chip_devices > 1 else ()
        if (before and after) or "0" in (before, after):
            raise ClusterError(f"several slices read '2*v5e:4x4' or 'v5e:4x4*2', at least one, got {text!r}. Use one of these forms.")
        n = int(before or after or 1)
        levels = (replace(entry.beyond, size=n),) if n > 1 else ()
        return cls(
            name=_short(entry.device.name, topology, levels),
            device=entry.device,
            topology=(*topology, *chip),
            interconnect=entry.interconnect,
            memory_limit_bytes=entry.available_bytes,
            overlap=entry.overlap,
            levels=levels,
        )

    @classmethod
    def joined(cls, parts: Sequence[Cluster]) -> Cluster:
        """The mixed cluster of parts, each of equal devices, in the order of a pipeline's stages.

        Raises:
            ClusterError: there are fewer than two, or parts of another platform, or ones that nothing joins.
        """
        names = "+".join(part.name for part in parts)
        entries = [CATALOGUE.get(part.device.name) for part in parts]
        if len(parts) < 2 or len({part.device.kind for part in parts}) > 1 or any(part.parts for part in parts) or None in entries:
            raise ClusterError(
                f"a mixed cluster has two parts or more, of devices of one platform from the catalogue, got {names!r}. Use "
                "'a100:8x4+h100:8x4', for instance."
            )
        level = min((entry.beyond for entry in entries if entry), key=lambda level: level.device_bytes_per_second)
        return replace(
            parts[0],
            name=names,
            memory_limit_bytes=min(part.memory_limit_bytes for part in parts),
            overlap=all(part.overlap for part in parts),
            levels=(replace(level, name="parts", size=len(parts)),),
            parts=tuple(parts),
        )

    @classmethod
    def of(cls, described: Cluster | str | Path) -> Cluster:
        """The cluster given as itself, by its short form, or by the path of a TOML file.

        Raises:
            ClusterError: it is none of these, unknown, or cannot be read.
        """
        if isinstance(described, Cluster):
            return described
        if isinstance(described, Path) or (isinstance(described, str) and described.endswith(".toml")):
            return cls.load(described)
        return cls.parse(described)

    @classmethod
    def local(cls) -> Cluster:
        """The cluster of this process's jax devices, with the catalogue's figures; `autoshard.calibrate` measures them instead.

        Raises:
            ClusterError: several slices or hosts are unequal.
        """
        import jax  # delayed: the only use of jax here; describing a cluster must not import it

        return cls.of_devices(jax.devices())

    @classmethod
    def of_devices(cls, devices: Sequence[Any]) -> Cluster:
        """The cluster of these jax devices, slices and hosts counted; of an unknown kind with another's figures, as `note` says.

        Raises:
            ClusterError: several slices or hosts are unequal.
        """
        kind = devices[0].device_kind
        entry = next((entry for entry in CATALOGUE.values() if kind in entry.jax_kinds), None)
        if entry is None:
            return cls._like_another(devices)
        slices = slices_of(devices) if entry.topologies else [devices]
        shapes = [local_topology(entry, each) for each in slices]
        if len(set(shapes)) > 1:
            raise ClusterError(
                f"a cluster of several slices has equal ones, and these {len(devices)} devices are slices of "
                f"{', '.join('x'.join(map(str, shape)) for shape in shapes)}. Search for equal ones, cluster='2*v5e:4x4' say, and run the "
                "strategy with devices=, the devices of those slices; or for a pipeline on both, cluster='v5e:4x4+v5e:2x4'."
            )
        return cls.parse(f"{len(slices)}*{entry.device.name}:{'x'.join(map(str, shapes[0]))}")

    @classmethod
    def _like_another(cls, devices: Sequence[Any]) -> Cluster:
        """Devices of an unknown kind, with figures of one that is known, in hosts of their own."""
        like, kind = CATALOGUE[LIKE.get(devices[0].platform, LIKE[""])], devices[0].device_kind
        name, source = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-"), f"{UNLISTED}{like.device.name}"
        topology = local_topology(like, devices) if like.per_host else (len(devices),)
        wires = like.interconnect if like.per_host else replace(like.interconnect, kind="host")
        return cls(
            name=f"{name}:{'x'.join(map(str, topology))}",
            device=replace(like.device, name=name, source=source),
            topology=topology,
            interconnect=replace(wires, source=source),
            memory_limit_bytes=like.available_bytes,
            overlap=like.overlap,
        )

    @property
    def note(self) -> str:
        """That its figures are those of another device, where this one is not in the catalogue and not measured; else empty."""
        if not self.device.source.startswith(UNLISTED):
            return ""
        return (
            f"{self.device.name} is not in the catalogue: figures are those of {self.device.source.removeprefix(UNLISTED)}. Measure them "
            "with autoshard.calibrate() or `autoshard calibrate`, or write them to a file for Cluster.load"
        )

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """The cluster of a TOML file: everything `save` writes, or ``cluster = "h100:8x4"`` and the fields that differ.

        Raises:
            ClusterError: the file cannot be read, or a field is missing, unknown or of the wrong type.
        """
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ClusterError(f"a cluster file is TOML; {str(path)!r} cannot be read: {error}.") from error
        base, devices = data.pop("cluster", None), data.pop("devices", None)
        if devices is not None:
            found = cls._of_file(base, data)
            if found.n_devices != devices:
                sizes = " x ".join([*(f"{level.size} {level.name}" for level in found.levels), *map(str, found.topology)])
                raise ClusterError(
                    f"the sizes of a cluster's levels multiply to its devices: {str(path)!r} has {sizes}, {found.n_devices} in all, and "
                    f"says devices = {devices!r}. Correct a size, or leave devices out."
                )
            return found
        return cls._of_file(base, data)

    @classmethod
    def _of_file(cls, base: Any, data: dict[str, Any]) -> Cluster:
        """The cluster of a file's fields, some of them another one's where ``base`` is its short form."""
        if base is not None:
            catalogued = cls.parse(base)
            merged = cls.from_dict(merged_fields(catalogued.to_dict(), data))
            if "memory_limit_bytes" in data:
                return merged
            share = catalogued.memory_limit_bytes / catalogued.device.memory_bytes  # the same share of a changed memory size
            return replace(merged, memory_limit_bytes=int(merged.device.memory_bytes * share))
        return cls.from_dict(data)

    def save(self, path: str | Path) -> None:
        """Writes the TOML file that `load` reads.

        Raises:
            ClusterError: it is a mixed cluster, which is written by its short form alone.
        """
        if self.parts:
            raise ClusterError(f"a file describes equal devices, and {self.name} has unequal parts. Write a file for each of them.")
        data = self.to_dict()
        tables: list[tuple[str, dict[str, Any]]] = [("", {k: v for k, v in data.items() if not isinstance(v, dict)})]
        for name in ("device", "interconnect"):
            tables.append((name, {k: v for k, v in data[name].items() if not isinstance(v, dict)}))
            tables.extend((f"{name}.{k}", v) for k, v in data[name].items() if isinstance(v, dict))
        tables[0][1].pop("levels", None)
        tables.extend(("[levels]", level) for level in data.get("levels", ()))
        # JSON's strings, numbers, booleans and lists are TOML's, if the strings stay ASCII
        blocks = [
            "".join([f"[{title}]\n" if title else "", *(f"{key} = {json.dumps(value)}\n" for key, value in table.items())])
            for title, table in tables
        ]
        Path(path).write_text("\n".join(blocks), encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """The cluster as plain JSON values, in a fixed order."""
        device = {f.name: getattr(self.device, f.name) for f in fields(Device)}
        device["flops_per_second"] = dict(self.device.flops_per_second)
        wires = {f.name: getattr(self.interconnect, f.name) for f in fields(Interconnect)}
        if not self.interconnect.chip_bandwidth_bytes_per_second:  # as in files of versions that do not know it
            del wires["chip_bandwidth_bytes_per_second"]
        return {
            "name": self.name,
            "topology": list(self.topology),
            "memory_limit_bytes": self.memory_limit_bytes,
            "overlap": self.overlap,
            "device": device,
            "interconnect": wires | {"protocols": [list(astuple(protocol)) for protocol in self.interconnect.protocols]},
            **({"levels": [_level(level) for level in self.levels]} if self.levels else {}),
            **({"parts": [part.to_dict() for part in self.parts]} if self.parts else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cluster:
        """The cluster of its dict; the inverse of `to_dict`.

        Raises:
            ClusterError: a field is missing, unknown or of the wrong type.
        """
        parts = data.get("parts", ()) if isinstance(data, Mapping) else ()
        found = record(cls, {name: value for name, value in data.items() if name != "parts"} if parts else data, "the cluster")
        return replace(found, parts=tuple(map(cls.from_dict, parts))) if parts else found

    def with_sums(self, sums: str) -> Cluster:
        """The cluster whose outermost level is crossed by sums in a narrow type, ``bfloat16`` or ``int8``.

        Raises:
            ClusterError: it has no levels.

        >>> Cluster.parse("2*v5e:4x4").with_sums("int8").levels[0].sums
        'int8'
        """
        if not self.levels:
            raise ClusterError(
                f"sums are narrow between slices or pods, and {self.name} is one of them. Write '2*{self.name}' for two, or leave out "
                "slow_reduction."
            )
        return replace(self, levels=(replace(self.levels[0], sums=sums), *self.levels[1:]))

    def part(self, n_parts: int) -> Cluster:
        """One of ``n_parts`` equal parts, each of neighbours: slices, hosts or rows first, then devices of a host or parts of a row.

        Raises:
            ClusterError: the devices cannot be divided so.

        >>> Cluster.parse("h100:8x4").part(2).name, Cluster.parse("v5e:4x4").part(8).name
        ('h100:8x2', 'v5e:1x2')
        """
        if self.parts:
            raise ClusterError(
                f"equal parts are those of equal devices, and {self.name} is mixed: its {len(self.parts)} parts have stages of a pipeline. "
                f"Use stages={len(self.parts)}, or a multiple."
            )
        sizes = _parted(self.dimensions, n_parts)
        if sizes is None:
            dimensions, n_devices = self.dimensions, self.n_devices
            possible = [n for n in range(2, n_devices + 1) if n_devices % n == 0 and _parted(dimensions, n) is not None]
            raise ClusterError(
                f"equal parts of a cluster are whole rows of neighbours: {self.name} of dimensions {self.dimensions}, outermost first, has "
                f"no {n_parts} of them. Use {format_alternatives(possible)}."
                if possible
                else f"parts of a cluster have a device each at least: {self.name} has one, got {n_parts} parts. Use a larger cluster."
            )
        outer, inner = sizes[: len(self.levels)], sizes[len(self.levels) :]
        topology = tuple(reversed(inner)) if self.interconnect.kind == "switch" else tuple(inner)
        if self.interconnect.kind == "switch" and len(topology) == 2 and topology[1] == 1:
            topology = topology[:1]
        levels = tuple(replace(level, size=size) for level, size in zip(self.levels, outer, strict=True) if size > 1)
        return replace(self, name=_short(self.device.name, topology, levels), topology=topology, levels=levels)

    def stage_parts(self, n_stages: int) -> tuple[Cluster, ...]:
        """The devices of each of so many stages: equal parts, or of a mixed cluster as many of each of its parts.

        Raises:
            ClusterError: the devices cannot be divided so.

        >>> [part.name for part in Cluster.parse("a100:8x4+h100:8x2").stage_parts(4)]
        ['a100:8x2', 'a100:8x2', 'h100:8', 'h100:8']
        """
        if not self.parts:
            return (self.part(n_stages),) * n_stages
        if n_stages % len(self.parts):
            raise ClusterError(
                f"each part of a mixed cluster has as many stages: {self.name} has {len(self.parts)} parts, got {n_stages} stages. Use a "
                f"multiple of {len(self.parts)}."
            )
        each = n_stages // len(self.parts)
        return tuple(part.part(each) if each > 1 else part for part in self.parts for _ in range(each))

    def between(self, n_stages: int) -> Cluster:
        """A cluster whose network is that between so many stages: itself, or as many of a mixed cluster's first part on its level."""
        level = replace(self.levels[0], size=n_stages) if self.parts else None
        return self if level is None else replace(self.stage_parts(n_stages)[0], levels=(level,))

    @property
    def n_devices(self) -> int:
        return sum(part.n_devices for part in self.parts) if self.parts else math.prod(self.dimensions)

    @property
    def _hosts(self) -> int:
        return self.topology[1] if len(self.topology) == 2 else 1

    def check(self, mesh: Mesh) -> None:
        """Raises `ClusterError` where a mesh does not cover the devices."""
        if self.parts:
            raise ClusterError(
                f"one mesh has devices of one kind in a regular arrangement, and {self.name} is mixed: stages of a pipeline have a mesh "
                f"each, on their part. Search for stages={len(self.parts)} or a multiple, without mesh=."
            )
        if mesh.size != self.n_devices:
            raise ClusterError(
                f"a mesh covers all devices: {self.name} has {self.n_devices}, the mesh {mesh or '()'} has {mesh.size}. "
                f"Use axis sizes whose product is {self.n_devices}, so that all {self.n_devices} devices have a place."
            )

    def links(self, mesh: Mesh) -> tuple[Link, ...]:
        """The link of each axis of a mesh, in mesh order; see `place`.

        Raises:
            ClusterError: the mesh does not cover the devices.
        """
        self.check(mesh)
        if mesh.placement is not None and mesh.placement.topology != self.dimensions:
            raise ClusterError(
                f"a mesh is placed on the cluster's own topology: {self.name} has {self.dimensions}, outermost first, the mesh {mesh} was "
                f"placed on {mesh.placement.topology}. Search again for this cluster."
            )
        placement = mesh.placement or Placement(self.dimensions, tuple(range(len(self.dimensions))), mesh.order)
        return place(self.interconnect, self.dimensions, mesh.sizes, placement, self.levels)

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The sizes of the physical dimensions, outermost (slowest link) first: of the levels, then within one of the parts they join."""
        inner = tuple(reversed(self.topology)) if self.interconnect.kind == "switch" else self.topology
        return (*(level.size for level in self.levels), *inner)

    @property
    def rings(self) -> tuple[bool, ...]:
        """Whether each physical dimension closes to a ring."""
        n = len(self.levels)
        return (False,) * n + self.interconnect.rings(self.dimensions[n:])

    def __str__(self) -> str:
        return self.name


def _level(level: Level) -> dict[str, Any]:
    """A level as JSON values, as in files of versions that know no narrow sums where it has none."""
    return {name: value for name, value in asdict(level).items() if name != "sums" or value}


def _short(name: str, topology: Sequence[int], levels: Sequence[Level]) -> str:
    """The short form of a cluster."""
    return "*".join([*(str(level.size) for level in levels), f"{name}:{'x'.join(map(str, topology))}"])


def _suggestion(text: Any) -> str:
    """The short form of a cluster as other tools name it: ``8 H100``, ``v5litepod-16``, ``a100``.

    >>> _suggestion("v5litepod-16"), _suggestion("v5p-16"), _suggestion("8 x H100")
    ("Did you mean 'v5e:4x4'? ", "Did you mean 'v5p:2x2x2'? ", "Did you mean 'h100:8'? ")
    """
    words = reduce(lambda words, name: words.replace(name, OTHER_NAMES[name]), OTHER_NAMES, str(text).lower())
    name = max((name for name in CATALOGUE if name in words), key=len, default=None)
    if name is None:
        return ""
    n = int((re.findall(r"\d{1,6}", words.replace(name, " ")) or ["1"])[0])
    n = n // 2 or 1 if f"{name}-{n}" in words and CATALOGUE[name].counts_cores else n
    entry = CATALOGUE[name]
    slices = [topology for topology in entry.topologies if math.prod(topology) == n] or ([] if entry.topologies else [(n,)])
    if not slices:
        return ""
    topology = slices[0]
    if entry.per_host and n > entry.per_host:
        topology = entry.per_host, -(-n // entry.per_host)
    return f"Did you mean '{name}:{'x'.join(map(str, topology))}'? "


def _check_topology(entry: Entry, topology: tuple[int, ...], text: str) -> None:
    name = entry.device.name
    if min(topology) < 1:
        raise ClusterError(f"every size of a topology is at least 1, got {text!r}.")
    if entry.topologies:
        large = entry.cube and all(size % entry.cube == 0 for size in topology) and len(topology) == len(entry.topologies[0])
        if topology in entry.topologies or (large and list(topology) == sorted(topology) and math.prod(topology) <= entry.most):
            return
        allowed = ", ".join("x".join(map(str, each)) for each in entry.topologies)
        larger = f", or three rising multiples of {entry.cube} with a product up to {entry.most}" if entry.cube else ""
        raise ClusterError(f"a {name} slice is {allowed}{larger}; got {text!r}. Use one of those.")
    if entry.per_host:
        per_host, *hosts = topology
        if len(hosts) > 1 or per_host > entry.per_host:
            raise ClusterError(
                f"{name} clusters read '{name}:<GPUs per host>x<hosts>' with at most {entry.per_host} GPUs a host, got {text!r}. "
                f"Use '{name}:{entry.per_host}x4' for {entry.per_host * 4} GPUs on 4 hosts, say."
            )
    elif len(topology) > 1:
        raise ClusterError(f"{name} clusters read '{name}:<devices>', got {text!r}. Use '{name}:{math.prod(topology)}'.")


def _parted(dimensions: Sequence[int], n_parts: int) -> list[int] | None:
    """The sizes of one of so many equal parts, the outermost dimensions divided first; None where they cannot be divided so."""
    sizes, left = list(dimensions), n_parts
    for dim, size in enumerate(sizes):
        divisor = math.gcd(size, left)
        sizes[dim], left = size // divisor, left // divisor
        if sizes[dim] > 1:
            break
    return sizes if left == 1 else None
