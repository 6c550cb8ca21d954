"""A state from one strategy's layout to another's, in memory: which device takes which place so that least moves, what moves, and how.

What a device of the new cluster already has stays; of the rest each part comes from the nearest device that has it, by turns where several
have. Devices of hosts and switches may take any place that keeps hosts together, since a strategy's links stay as they are: at each level
of the cluster parts are matched with places by the bytes that they share (a linear assignment, Kuhn 1955). Devices of a torus have
coordinates, and stay where these put them.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autoshard.ask.strategy import Strategy
from autoshard.checkpoint.shards import Shards
from autoshard.cluster import Cluster
from autoshard.errors import CheckpointError, ClusterError
from autoshard.explanation.groups import state_positions
from autoshard.ir.naming import itemsize
from autoshard.render import Paragraph, Report, Reported, Table, format_bytes, format_seconds
from autoshard.run.placing import put
from autoshard.run.structure import per_argument
from autoshard.strategy import Record, TensorRecord

MOST_PAIRS = 2**22  # of devices whose common bytes are compared: 2,048 with as many, a second


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one device sends another of one array, or of several that are divided alike.

    Attributes:
        paths: the arrays, as the new strategy names them.
        source, target: devices, by their numbers in the old and in the new cluster.
        link: the network between them, such as ``network``.
        bytes: of all arrays.
    """

    paths: tuple[str, ...]
    source: int
    target: int
    link: str
    bytes: float


@dataclass(frozen=True, slots=True)
class ReshardPlan(Reported):
    """How a state gets from one strategy's layout to another's; prints as a report.

    Attributes:
        old, new: the strategies.
        leaves: pairs of the old strategy's argument leaves and the new one's, by their positions.
        order: per place of the new cluster, in the order in which strategies take devices, the number of the device that takes it.
        transfers: what is sent, where devices are neither the same nor have the part.
        kept_bytes: what stays where it is.
        missing: the arrays of which a part is on lost devices alone; they come from a checkpoint.
        seconds: predicted time, of the busiest device on the slowest network.
    """

    old: Strategy
    new: Strategy
    leaves: tuple[tuple[int, int], ...]
    order: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    kept_bytes: float
    missing: tuple[str, ...]
    seconds: float

    @property
    def moved_bytes(self) -> float:
        """Bytes of all transfers."""
        return sum(each.bytes for each in self.transfers)

    @property
    def bytes_by_link(self) -> dict[str, float]:
        """Bytes of all transfers by network."""
        found = defaultdict[str, float](float)
        for each in self.transfers:
            found[each.link] += each.bytes
        return dict(found)

    def devices(self, devices: Sequence[Any] | None = None) -> list[Any]:
        """The devices as `Strategy.apply` of the new strategy is to be given them.

        Args:
            devices: those of the new cluster in JAX's order; None: ``jax.devices()``.

        Raises:
            ClusterError: there are too few.
        """
        found = list(jax.devices() if devices is None else devices)
        if len(found) < len(self.order):
            raise ClusterError(f"the new strategy has {len(self.order)} devices, got {len(found)}. Pass all that it is to run on.")
        return [found[number] for number in self.order]

    def run(self, state: Any, devices: Sequence[Any] | None = None) -> Any:
        """The state, structured as it is given, put where the new strategy wants it, on `devices(devices)`.

        Args:
            state: the arrays of the old strategy that move, as a pytree with these leaves in order, such as the state or its parameters.
            devices: as for `devices`.

        Raises:
            CheckpointError: the state has other arrays, or a part of it is lost: restore those from a checkpoint.
        """
        if self.missing:
            raise CheckpointError(
                f"what no device has any more comes from a checkpoint, and {len(self.missing)} arrays such as {self.missing[0]} are in "
                "part on lost devices alone. Use autoshard.checkpoint.restore(path, strategy, devices=plan.devices())."
            )
        leaves, tree = jax.tree.flatten(state)
        tensors = [self.new.record.arguments[k] for _, k in self.leaves]
        if [np.shape(x) for x in leaves] != [each.shape for each in tensors]:
            raise CheckpointError(
                f"a plan moves the {len(tensors)} arrays that it was made for, {tensors[0].path} first, and the state has {len(leaves)} or "
                "others. Pass the state, or the part of it, for which reshard_plan was called."
            )
        ordered = self.devices(devices)
        wanted = [sharding for argument in self.new._shardings(ordered) for _, sharding in argument]
        shardings = [wanted[k] for _, k in self.leaves]
        typed = [x if str(x.dtype) == each.dtype else x.astype(each.dtype) for x, each in zip(leaves, tensors, strict=True)]
        return tree.unflatten(put(typed, shardings, [each.path for each in tensors], (True,) * len(typed)))

    def report(self) -> Report:
        """What is moved by network, and the arrays of which most is."""
        total = self.kept_bytes + self.moved_bytes
        share = self.kept_bytes / total if total else 1.0
        told = (
            f"{format_bytes(total)} are wanted, of which {format_bytes(self.kept_bytes)} ({share:.0%}) are there; the rest takes about "
            f"{format_seconds(self.seconds)}."
        )
        links = Table(("network", ">moved"), tuple((name, format_bytes(n)) for name, n in sorted(self.bytes_by_link.items())))
        found = defaultdict[str, float](float)
        for each in self.transfers:
            for path in each.paths:
                found[path] += each.bytes / len(each.paths)
        most = sorted(found.items(), key=lambda each: -each[1])[:8]
        arrays = Table(("array", ">moved"), tuple((path, format_bytes(n)) for path, n in most))
        tables = [table for table in (links, arrays) if table.rows]
        gone = f"On lost devices alone, to be restored from a checkpoint: {', '.join(self.missing[:8])}."
        lost = [Paragraph(gone)] if self.missing else []
        return Report(f"From {_named(self.old)} to {_named(self.new)}", (Paragraph(told), *tables, *lost))


def reshard_plan(
    old: Strategy,
    new: Strategy,
    *,
    part: str | None = None,
    devices: Sequence[int | None] | None = None,
    lost: Sequence[int] = (),
) -> ReshardPlan:
    """The plan that moves a state from one strategy's layout to another's with the fewest bytes.

    Args:
        old, new: strategies for the same state on any two clusters; or a trainer's and a sampler's, whose parameters may have another type.
        part: the path in the old strategy of what the new one's first argument is, such as ``"state.params"`` of a trainer for a sampler;
            None: the first arguments of both, as far as they are state of the same arrays.
        devices: per device of the new cluster, in JAX's order, its number in the old one; None for one that was not there. Unless given
            those of the same number, in a torus of the same coordinates, are the same.
        lost: the numbers of the old cluster's devices that are gone.

    Raises:
        CheckpointError: the strategies have no arrays in common.

    >>> import autoshard, jax.numpy as jnp
    >>> step, args = lambda w, x: w - 0.1 * (x.T @ (x @ w)), (jnp.ones((64, 8)), jnp.ones((8, 64)))
    >>> before, after = (autoshard.evaluate(step, *args, cluster=f"cpu:{n}", mesh={"a": n}, in_specs={"w": jax.P("a")}) for n in (4, 8))
    >>> reshard_plan(before, after).bytes_by_link
    {'links': 1024.0}
    """
    pairs = _pairs(old.record, new.record, part)
    before, after = (Cluster.from_dict(each.record.cluster) for each in (old, new))
    known = _same_devices(before, after) if devices is None else [-1 if n is None else n for n in devices]
    if len(known) != after.n_devices or not all(-1 <= n < before.n_devices for n in known):
        raise CheckpointError(
            f"devices= has a number of {before.name}, 0 to {before.n_devices - 1}, or None for each of the {after.n_devices} devices of "
            f"{after.name}, got {known!s:.80}. List these, or leave it out."
        )
    alive = np.ones(before.n_devices, bool)
    alive[list(lost)] = False
    groups = _groups(old.record, new.record, pairs)
    shared = np.zeros((after.n_devices, before.n_devices if after.n_devices * before.n_devices <= MOST_PAIRS else 0))
    if shared.size:
        for ours, theirs, nbytes, paths in groups:
            has = np.outer(theirs.chunks >= 0, (ours.chunks >= 0) & alive)
            shared += has * theirs.common(ours)[np.ix_(theirs.chunks, ours.chunks)] * nbytes * len(paths)
    order = _order(after, shared, known)
    flow = _Flow(before, after, [known[slot] for slot in order], alive)
    for group in groups:
        flow.add(*group)
    transfers = tuple(Transfer(*key, nbytes) for key, nbytes in flow.sent.items())
    return ReshardPlan(old, new, pairs, tuple(order), transfers, flow.kept, tuple(flow.missing), flow.seconds())


# -- what is moved -----------------------------------------------------------------------------------------------------------


def _pairs(old: Record, new: Record, part: str | None) -> tuple[tuple[int, int], ...]:
    """The leaves of the old strategy's arguments with those of the new one's that they become."""
    theirs = list(new.arguments)
    if part is not None:
        own = [k for k, each in enumerate(old.arguments) if re.match(re.escape(part) + r"($|[.\[])", each.path)]
        first = theirs[: per_argument(new.argument_structure)[0]]
        alike = [old.arguments[k].path[len(part) :].lstrip(".") for k in own] == [_inside(each.path).lstrip(".") for each in first]
        if not own or not alike or [old.arguments[k].shape for k in own] != [each.shape for each in first]:
            raise CheckpointError(
                f"the part of the old strategy's arguments that moves is the new one's first argument, of {len(first)} arrays, "
                f"{_described(first)}; and {part!r} has {len(own)}, {_described([old.arguments[k] for k in own])}. Give the path of the "
                "parameters in the old strategy, such as 'state.params'."
            )
        return tuple(zip(own, range(len(first)), strict=True))
    n, state = 0, state_positions(old, None)
    for ours, others in zip(per_argument(old.argument_structure), per_argument(new.argument_structure), strict=False):
        same = [_identity(each) for each in old.arguments[n : n + ours]] == [_identity(each) for each in theirs[n : n + others]]
        if not same or (n and state.isdisjoint(range(n, n + ours))):
            break
        n += ours
    if not n:
        raise CheckpointError(
            f"a state moves between strategies whose first argument is the same, and {old.program.name!r} has {_described(old.arguments)}, "
            f"{new.program.name!r} {_described(theirs)}. Say by part= which part of the old one's the new one's first argument is."
        )
    return tuple((k, k) for k in range(n))


def _identity(tensor: TensorRecord) -> tuple:
    return _inside(tensor.path), tensor.shape


def _inside(path: str) -> str:
    """A path inside its argument."""
    return re.sub(r"^\w+", "", path)


def _described(tensors: Sequence[TensorRecord]) -> str:
    return ", ".join(f"{each.path} {list(each.shape)}" for each in tensors[:2]) or "none"


def _named(strategy: Strategy) -> str:
    return f"{strategy.record.program.name} on {strategy.record.cluster['name']}"


Group = tuple[Shards, Shards, float, tuple[str, ...]]
"""The shards of arrays that are divided alike, before and after, the bytes of an element, and their paths."""


def _groups(old: Record, new: Record, pairs: Sequence[tuple[int, int]]) -> list[Group]:
    found: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for ours, theirs in pairs:
        key = tuple(
            (each.arguments[k].shape, each.arguments[k].dtype, each.arguments[k].spec, each.argument_places[k])
            for each, k in ((old, ours), (new, theirs))
        )
        found.setdefault(key, []).append((ours, theirs))
    groups = []
    for members in found.values():
        ours, theirs = members[0]
        nbytes = min(itemsize(old.arguments[ours].dtype), itemsize(new.arguments[theirs].dtype))
        groups.append((Shards.of(old, ours), Shards.of(new, theirs), nbytes, tuple(new.arguments[k].path for _, k in members)))
    return groups


def _same_devices(before: Cluster, after: Cluster) -> list[int]:
    """Per device of the new cluster its number in the old one: that of the same coordinates in tori, else the same; -1 for a new one."""
    numbers = np.arange(before.n_devices)
    if after.interconnect.kind != "torus" or len(before.dimensions) != len(after.dimensions):
        return [n if n < before.n_devices else -1 for n in range(after.n_devices)]
    found = np.full(after.dimensions, -1)
    common = tuple(slice(min(sizes)) for sizes in zip(before.dimensions, after.dimensions, strict=True))
    found[common] = numbers.reshape(before.dimensions)[common]
    return found.reshape(-1).tolist()


def _order(after: Cluster, shared: np.ndarray, known: Sequence[int]) -> list[int]:
    """Per place of the new cluster the device, by its number there, that takes it."""
    n = after.n_devices
    if after.interconnect.kind == "torus" or not shared.size:
        return list(range(n))
    value = np.where(np.array(known) >= 0, shared[:, np.array(known)], 0.0)
    return _assigned(value, after.dimensions)[1]


def _assigned(value: np.ndarray, dimensions: Sequence[int]) -> tuple[float, list[int]]:
    """The most bytes that devices keep, and per place its device: parts of the outermost dimension as wholes, and within each the same."""
    from scipy.optimize import linear_sum_assignment

    n, inner = dimensions[0], math.prod(dimensions[1:])
    score, within = np.zeros((n, n)), {}
    for place, part in np.ndindex(n, n):
        block = value[place * inner : (place + 1) * inner, part * inner : (part + 1) * inner]
        if inner == 1:
            score[place, part] = block[0, 0]
        elif block.any():
            score[place, part], within[place, part] = _assigned(block, dimensions[1:])
    chosen, stays = linear_sum_assignment(score, maximize=True), (np.arange(n), np.arange(n))
    if score[chosen].sum() <= score[stays].sum():
        chosen = stays
    pairs = [(int(place), int(part)) for place, part in zip(*chosen, strict=True)]
    return float(score[chosen].sum()), [part * inner + k for place, part in pairs for k in within.get((place, part), range(inner))]


class _Flow:
    """What devices keep, send and receive.

    Attributes:
        kept: bytes that stay where they are.
        sent: bytes by paths, source, target and network.
        missing: the arrays of which a part is nowhere.
    """

    def __init__(self, before: Cluster, after: Cluster, known: Sequence[int], alive: np.ndarray):
        """``known`` has per place of the new cluster the number of its device in the old one, -1 of a new one."""
        self._known, self._alive = known, alive
        self._before = np.array(np.unravel_index(np.arange(before.n_devices), before.dimensions)).T
        self._links = _networks(before)
        self._outside = min(self._links + _networks(after), key=lambda link: link[1])
        self._seconds = defaultdict[tuple[str, str, int], float](float)  # per network, direction and device
        self.kept = 0.0
        self.sent: dict[tuple[tuple[str, ...], int, int, str], float] = {}
        self.missing: dict[str, None] = {}

    def add(self, ours: Shards, theirs: Shards, nbytes: float, paths: tuple[str, ...]) -> None:
        """Adds arrays that are divided alike."""
        common = theirs.common(ours) * nbytes * len(paths)
        holders = {int(chunk): np.flatnonzero((ours.chunks == chunk) & self._alive) for chunk in np.unique(ours.chunks) if chunk >= 0}
        for target, chunk in enumerate(theirs.chunks):
            if chunk < 0:
                continue
            device = self._known[target]
            for wanted in np.flatnonzero(common[chunk]):
                amount, having = float(common[chunk, wanted]), holders.get(int(wanted), np.array([], int))
                if device in having:
                    self.kept += amount
                elif not having.size:
                    self.missing.update(dict.fromkeys(paths))
                else:
                    self._send(paths, having, target, device, amount)

    def _send(self, paths: tuple[str, ...], having: np.ndarray, target: int, device: int, amount: float) -> None:
        """Sends from the nearest device that has a part, of several the one that has sent least."""
        places = self._before[having]
        far = np.zeros(len(having), int) if device < 0 else np.argmax(places != self._before[device], axis=1)
        nearest = having[far == far.max()]
        name, rate = self._outside if device < 0 else self._links[far.max()]
        source = min(map(int, nearest), key=lambda one: self._seconds[name, "out", one])
        self._seconds[name, "out", source] += amount / rate
        self._seconds[name, "in", target] += amount / rate
        key = paths, source, target, name
        self.sent[key] = self.sent.get(key, 0.0) + amount

    def seconds(self) -> float:
        """The time of the busiest device on any network; networks are busy at once, and so are both directions."""
        return max(self._seconds.values(), default=0.0)


def _networks(cluster: Cluster) -> list[tuple[str, float]]:
    """Per dimension of a cluster, outermost first, the network that joins devices which differ in it, and a device's rate there."""
    wires = cluster.interconnect
    found = [(level.name, level.device_bytes_per_second) for level in cluster.levels]
    inner = len(cluster.dimensions) - len(found)
    if wires.kind == "switch" and inner == 2:
        found.append(("network", wires.network_bandwidth_bytes_per_second))
    return [*found, *[("links", wires.bandwidth_bytes_per_second)] * (len(cluster.dimensions) - len(found))]
