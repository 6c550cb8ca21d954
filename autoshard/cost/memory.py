"""Peak memory of one device: what is alive when, of the values that a fused program stores.

*Order.* Kernels run in program order, or in that of a list scheduler, whichever holds less: compilers try both and keep the better one.
*Buffers.* A value lives from the kernel that makes it to the last one that reads it, an argument throughout. A result that replaces a
donated argument takes its place; so does an elementwise result that of an operand that dies with it. What a loop carries or stacks lives
as long as the loop, its body's own values within. Copies in other layouts live from their first to their last reader. Partial gradients
wait until the end to be combined: XLA sends many in one all_reduce, and computes first what it can (its latency-hiding scheduler).
*Fast memory.* A TPU's compiler keeps short-lived values in the core's own memory as far as it goes: they are not in the device's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autoshard.cluster import Device
from autoshard.cost.lifetimes import usage
from autoshard.cost.profile import Profile
from autoshard.ir import Assignment, Layout, Value, shard_counts, shards

# The core's own memory that a program's buffers may have: the largest preallocated-temp of memory space 1 in XLA:TPU's buffer assignments
# (libtpu 0.0.42). A v5e's reaches 112 MiB in most large programs; a v6e (95 MiB) and a v5p (48 MiB) compiled one program: estimates.
FAST_MEMORY_BYTES = {"v5e": 112 * 2**20, "v6e": 112 * 2**20, "v5p": 48 * 2**20}


LANES = 128


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest number of bytes alive at once on a device, and what it is made of.

    Attributes:
        nbytes: the sum of what is alive then.
        alive: the values that are.
        held: the bytes of each.
        copies: the values that are alive in other layouts too, each with the bytes of such a copy.
        partials: the ops whose results are not scattered yet, each with the bytes of those.
        spare_bytes: what another assignment's short-lived values may hold beyond these, since fast memory has room for them.
    """

    nbytes: float
    alive: tuple[int, ...]
    held: tuple[float, ...]
    copies: tuple[tuple[int, float], ...]
    partials: tuple[tuple[int, float], ...]
    spare_bytes: float


@dataclass(frozen=True, slots=True)
class Copy:
    """A value's copy in another layout: what a device holds of it, and the ops that read it first and last."""

    nbytes: float
    first: int
    last: int


def peak_memory(
    profile: Profile,
    assignment: Assignment,
    copies: Mapping[tuple[int, Layout], Copy],
    partials: Mapping[int, float],
    device: Device,
) -> Peak:
    """The peak of a program.

    Args:
        assignment: where each value lies.
        copies: by value number and layout.
        partials: per op index the bytes of its result before it is combined with other devices'.
    """
    times = profile.lifetimes
    on_tpu = device.kind == "tpu"

    def share(value: int) -> float:
        return 0.5 if on_tpu and profile.fusion.narrow[value] else 1.0

    n = len(times.values)
    mesh, values, minor = assignment.mesh.sizes, profile.graph.values, profile.fusion.minor
    sizes = []
    for value, passed in zip(times.values, times.passed, strict=True):
        found, layout, pair = values[value], assignment.layout(value), minor[value]
        if on_tpu and not passed and pair:
            nbytes = _tiled(found, pair, layout, mesh)
        else:
            nbytes = found.nbytes / shards(layout, mesh)
        sizes.append(nbytes * share(value))
    born, dies = times.born, times.dies
    fusion = profile.fusion
    more = [(copy.nbytes / (2 if on_tpu and fusion.rounds[value] else 1), copy.first, copy.last) for (value, _), copy in copies.items()]
    ops, end = profile.graph.walk(), len(profile.graph.walk())
    stored = []
    for op, nbytes in partials.items():
        value = ops[op].results[0]
        if fusion.last[value]:
            more.append((nbytes, op, end))
            stored.append(op)
        elif fusion.narrow[value] or nbytes > values[value].nbytes / shards(assignment.layout(value), mesh):
            more.append((nbytes, op, op))
            stored.append(op)
    if on_tpu:
        copied = {value for value, _ in copies}
        for value, (first, last) in fusion.casts.items():
            if value not in copied:
                more.append((values[value].nbytes / shards(assignment.layout(value), mesh) / 2, first, last))
    if more:
        extra, firsts, lasts = zip(*more, strict=True)
        sizes += extra
        born = np.concatenate([born, [times.starts[op] for op in firsts]])
        dies = np.concatenate([dies, [times.ends[op] for op in lasts]])
    held = np.array(sizes)
    if on_tpu:
        _keep_fast(held, born, dies, times.passed, FAST_MEMORY_BYTES.get(device.name, 0))
    total = usage(times.moments, held, born, dies)
    moment = int(total.argmax())
    alive = np.flatnonzero((born <= moment) & (dies > moment) & (held > 0))
    numbers = (*times.values, *(value for value, _ in copies), *stored)
    m = n + len(copies)
    return Peak(
        nbytes=float(total[moment]),
        alive=tuple(numbers[k] for k in alive if k < n),
        held=tuple(float(held[k]) for k in alive if k < n),
        copies=tuple((numbers[k], float(held[k])) for k in alive if n <= k < m),
        partials=tuple((numbers[k], float(held[k])) for k in alive if m <= k < len(numbers)),
        spare_bytes=FAST_MEMORY_BYTES.get(device.name, 0) if on_tpu else 0,
    )


def _tiled(value: Value, minor: tuple[int, int], layout: Layout, mesh: tuple[int, ...]) -> float:
    """A device's bytes of a convolution's image, tiled: batch and features are its lanes and rows, whichever way pads less.

    A tile has 128 lanes and 8 rows; of few rows 1, 2 or 4 (layouts ``{3,0,2,1:T(8,128)}`` and ``{0,3,2,1:T(4,128)}`` in XLA:TPU's HLO).
    """
    counts = shard_counts(layout, value.rank, mesh)
    local = [size / count for size, count in zip(value.shape, counts, strict=True)]
    one, other = (local[dim] for dim in minor)
    rest = value.itemsize * math.prod(local) / (one * other)
    return rest * min(_pad(one, LANES) * _pad_rows(other), _pad(other, LANES) * _pad_rows(one))


def _pad(size: float, to: int) -> float:
    return math.ceil(size / to) * to


def _pad_rows(size: float) -> float:
    return _pad(size, next((rows for rows in (1, 2, 4) if size <= rows), 8))


def _keep_fast(sizes: np.ndarray, born: np.ndarray, dies: np.ndarray, passed: tuple[bool, ...], room: float) -> None:
    """Takes from the sizes what fits in fast memory, shortest lives first; not what is passed into the program or out of it."""
    used = np.zeros(int(dies.max(initial=0)) + 1)
    for k in np.argsort(dies - born, kind="stable"):
        if sizes[k] > room or (k < len(passed) and passed[k]):
            continue
        span = used[born[k] : dies[k]]
        if span.max(initial=0.0) + sizes[k] <= room:
            span += sizes[k]
            sizes[k] = 0.0
