"""Mesh axes of a collective, from its device groups in any of HLO's notations.

Devices are numbered row-major over the mesh as JAX has it. The notations are lists ``{{0,1},{2,3}}``, an iota ``[4,2]<=[2,4]T(1,0)``
(device numbers reshaped, transposed, split into rows), and a mesh with axes, sub-axes included:
``mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x','y':(1)2}``.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from itertools import combinations

import numpy as np

from autoshard.ir import Mesh

Groups = frozenset[frozenset[int]]
UNKNOWN = ("?",)

_LISTS = re.compile(r"replica_groups=\{(\{[\d,{} ]*\})?\}")
_IOTA = re.compile(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*(?:\([^)]*\))?[^)]*)\))? ?\{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def axes_of(attributes: str, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes along which the instruction with these attributes communicates; ``("?",)`` where it has no groups.

    Groups that are parts of an axis' devices are of that axis, as the pairs of a permute are.

    >>> axes_of("replica_groups=[4,2]<=[2,4]T(1,0)", Mesh.of({"x": 2, "y": 4}))
    ('x',)
    >>> axes_of("replica_groups={{0,1,2,3},{4,5,6,7}}", Mesh.of({"x": 2, "y": 4}))
    ('y',)
    """
    pairs = _PAIRS.search(attributes)
    if pairs:
        return axes_of_pairs(np.array(re.findall(r"\{(\d+),(\d+)\}", pairs[1]), dtype=int), mesh)
    groups = parse_groups(attributes, mesh.size)
    return UNKNOWN if groups is None else _spanned(groups, mesh)


def axes_of_groups(groups: np.ndarray, mesh: Mesh) -> tuple[str, ...]:
    """The fewest mesh axes that span groups of devices, given as rows."""
    return _spanned(_rows(groups), mesh)


def _spanned(groups: Groups, mesh: Mesh) -> tuple[str, ...]:
    """The axes of whose devices the groups are all, or else those along which devices of a group differ."""
    if (known := _known(mesh).get(groups)) is not None:
        return known
    pairs = [(first, other) for group in groups for first in [min(group)] for other in group]
    return axes_of_pairs(np.array(pairs, dtype=int), mesh)


def axes_of_pairs(pairs: np.ndarray, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes along which pairs of source and target differ."""
    ends = np.argsort(mesh.devices, axis=None)[pairs.reshape(-1, 2)]
    source, target = (np.array(np.unravel_index(ends[:, k], mesh.sizes)) for k in (0, 1))
    moved = (source != target).any(axis=1)
    return tuple(name for name, differs in zip(mesh.names, moved, strict=True) if differs)


def parse_groups(attributes: str, n_devices: int) -> Groups | None:
    """The device groups of an instruction's attributes; None where there are none."""
    if found := _IOTA.search(attributes):
        shape, ids = found[1].split("<=")
        return _rows(_iota(ids).reshape(_numbers(shape)))
    if found := _MESH.search(attributes):
        return _mesh_groups(*found.groups())
    if found := _LISTS.search(attributes):
        if not found[1]:
            return frozenset({frozenset(range(n_devices))})
        return frozenset(frozenset(_numbers(group)) for group in re.findall(r"\{([\d, ]+)\}", found[1]))
    return None


@lru_cache(maxsize=64)
def _known(mesh: Mesh) -> dict[Groups, tuple[str, ...]]:
    """The subset of axes of each set of groups."""
    ids = mesh.devices
    found: dict[Groups, tuple[str, ...]] = {}
    for n in range(len(mesh.axes) + 1):
        for axes in combinations(range(len(mesh.axes)), n):
            rest = [axis for axis in range(len(mesh.axes)) if axis not in axes]
            width = math.prod(mesh.sizes[axis] for axis in axes)
            found.setdefault(_rows(ids.transpose(*rest, *axes).reshape(-1, width)), tuple(mesh.names[axis] for axis in axes))
    return found


def _mesh_groups(axes: str, ids: str | None, over: str) -> Groups:
    names, sizes = [], []
    for name, size in re.findall(r"['\"]([^'\"]+)['\"]=(\d+)", axes):
        names.append(name)
        sizes.append(int(size))
    devices = np.arange(math.prod(sizes)) if not ids else _iota(ids) if "[" in ids else np.array(_numbers(ids))
    # A sub-axis 'x':(m)k has size k, behind a major part of size m: its axis is split into three.
    shape: list[int] = []
    chosen: list[int] = []
    parts = {
        name: (int(before), int(size)) if size else None
        for name, before, size in re.findall(r"['\"]([^'\"]+)['\"](?::\((\d+)\)(\d+))?", over)
    }
    for name, size in zip(names, sizes, strict=True):
        before, part = parts.get(name) or (1, size if name in parts else 1)
        if name in parts:
            chosen.append(len(shape) + 1)
        shape += [before, part, size // (before * part)]
    rest = [d for d in range(len(shape)) if d not in chosen]
    width = math.prod(shape[d] for d in chosen)
    return _rows(devices.reshape(shape).transpose(*rest, *chosen).reshape(-1, width))


def _iota(text: str) -> np.ndarray:
    """The device numbers of ``[2,4]T(1,0)`` in order."""
    dims, _, order = text.partition("T")
    shape = _numbers(dims)
    ids = np.arange(math.prod(shape)).reshape(shape)
    return (ids.transpose(_numbers(order)) if order else ids).reshape(-1)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _rows(table: np.ndarray) -> Groups:
    return frozenset(frozenset(row) for row in table.tolist())
