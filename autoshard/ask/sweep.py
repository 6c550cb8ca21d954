"""One program on several clusters, meshes and batch sizes: the searched strategies by time and by cost of a token or example."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import jax

from autoshard.ask.search import search
from autoshard.ask.strategy import Strategy, load
from autoshard.cluster import Cluster
from autoshard.errors import AutoshardError, ClusterError, InfeasibleError, SearchLimitError, ShardingError
from autoshard.plan.full_plan import figures_of_plan
from autoshard.plan.meshes import given_mesh
from autoshard.plan.prepared import whole_of
from autoshard.plan.request import Request
from autoshard.plan.user_pins import Asked
from autoshard.progress import Progress, part, silent
from autoshard.ray_cluster import results_on_ray
from autoshard.render import Paragraph, Report, Reported, Table, format_between, format_bytes, format_seconds, shown
from autoshard.run.tracing import TracedOnce
from autoshard.strategy import Record
from autoshard.version import __version__

HOUR, DAY = 3600.0, 86_400.0
REFUSALS = (InfeasibleError, SearchLimitError, ShardingError, ClusterError)  # of one point, which the others do not share
MILLION = 1e6  # tokens or examples: what costs are shown for

MeshAsked = Mapping[str, int] | int | None


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One cluster, batch size and mesh of a sweep, with what was found there.

    Attributes:
        cluster, n_devices: its name, and how many devices it has.
        batch: examples in a step, on all devices together; None: the program has one batch size.
        items: tokens, or examples, in a step.
        price: of a device-hour, in the caller's currency; None: not given, and costs are in device-hours.
        mesh: axis sizes by name; empty where nothing was found.
        step_seconds, peak_bytes: predicted; None where nothing was found.
        interval_seconds: between which the step time is expected (`Cost.interval_seconds`); None where that is not known.
        refusal: why nothing was found; empty otherwise.
        key: a hash of program, cluster and options, by which a saved point is found again.
        strategy: what was found; None: nothing.
    """

    cluster: str
    n_devices: int
    batch: int | None
    items: int
    price: float | None
    key: str
    mesh: Mapping[str, int] = field(default_factory=dict)
    step_seconds: float | None = None
    peak_bytes: float | None = None
    interval_seconds: tuple[float, float] | None = None
    refusal: str = ""
    strategy: Strategy | None = field(default=None, compare=False)

    @property
    def seconds_per_item(self) -> float:
        """Seconds of a token, or example; infinite where nothing was found."""
        return float("inf") if self.step_seconds is None else self.step_seconds / self.items

    @property
    def device_hours_per_item(self) -> float:
        """Device-hours of a token, or example."""
        return self.seconds_per_item * self.n_devices / HOUR

    @property
    def cost_per_item(self) -> float:
        """Money of a token, or example, where there is a price; else device-hours."""
        return self.device_hours_per_item * (1.0 if self.price is None else self.price)

    def days(self, total: float) -> str:
        """The days that so many tokens, or examples, take: predicted, and between which they are expected."""
        days = [seconds / self.items * total / DAY for seconds in (self.step_seconds or float("inf"), *(self.interval_seconds or ()))]
        digits = 1 if max(days) < 100 else 0
        predicted, *between = (f"{each:,.{digits}f}" for each in days)
        return f"{predicted} ({between[0]} to {between[1]})" if between else predicted

    @property
    def place(self) -> str:
        """Cluster and batch size, in words."""
        return self.cluster if self.batch is None else f"{self.cluster}, batch {self.batch}"

    @property
    def name(self) -> str:
        """The file name of its strategy, without its ending."""
        batch = "" if self.batch is None else f"-batch{self.batch}"
        return f"{re.sub(r'[^A-Za-z0-9.]+', '_', self.cluster)}{batch}-{self.key[:8]}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, the strategy left out; costs are null where nothing was found."""
        values = asdict(replace(self, strategy=None))
        del values["strategy"]
        found = self.step_seconds is not None
        derived = {name: getattr(self, name) if found else None for name in ("seconds_per_item", "device_hours_per_item", "cost_per_item")}
        return {**values, "mesh": dict(self.mesh), **derived}


def _step_time(point: SweepPoint) -> str:
    """The predicted step time, and the interval in which it is expected."""
    between = "" if point.interval_seconds is None else f" ({format_between(*point.interval_seconds)})"
    return f"{format_seconds(point.step_seconds or 0.0)}{between}"


def _are_equal(one: SweepPoint, other: SweepPoint) -> bool:
    """Whether predictions do not tell which of two points takes less of an item, in time and in cost.

    On one kind of devices it is what two plans are off by from each other that counts, on several the whole intervals. Where that is not
    known, no two points are equal.
    """
    devices = [Cluster.from_dict(point.strategy.record.cluster).device for point in (one, other) if point.strategy is not None]
    if devices[0].name == devices[1].name:
        is_known, lows, highs = devices[0].pair_error > 0, (1.0, 1.0), (1 + devices[0].pair_error,) * 2
    else:
        shares = [[each / (point.step_seconds or 1.0) for each in point.interval_seconds or (0.0, 0.0)] for point in (one, other)]
        lows, highs = zip(*shares, strict=True)
        is_known = min(highs) > 0
    if not is_known:
        return one is other
    figures = [(point.seconds_per_item, point.cost_per_item) for point in (one, other)]
    return all(a * lows[0] <= b * highs[1] and b * lows[1] <= a * highs[0] for a, b in zip(*figures, strict=True))


def _complexity(point: SweepPoint) -> tuple[int, ...]:
    """How complex the strategy of a point is."""
    return () if point.strategy is None else figures_of_plan(point.strategy)[1]


def _in_words(point: SweepPoint) -> str:
    return f"{point.place} on mesh {', '.join(f'{name}={size}' for name, size in point.mesh.items())}"


class Sweep(Reported, Sequence[SweepPoint]):
    """The points of a sweep, in the order in which they were searched.

    Attributes:
        item: ``"token"``, ``"example"`` or ``"step"``: what costs are for.
        total: how many of them a whole training takes; None: not given.
        notes: what there is to know, such as that the sweep was interrupted.
    """

    def __init__(self, points: Sequence[SweepPoint], item: str, total: float | None = None, notes: Sequence[str] = ()):
        self.points: tuple[SweepPoint, ...] = tuple(points)
        self.item: str = item
        self.total: float | None = total
        self.notes: tuple[str, ...] = tuple(notes)

    def __len__(self) -> int:
        return len(self.points)

    @overload
    def __getitem__(self, index: int) -> SweepPoint: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[SweepPoint, ...]: ...
    def __getitem__(self, index: int | slice) -> SweepPoint | tuple[SweepPoint, ...]:
        return self.points[index]

    @property
    def pareto(self) -> tuple[SweepPoint, ...]:
        """The points that no other one beats in both time and cost of an item, fastest first."""
        found = sorted((point for point in self if point.step_seconds is not None), key=lambda p: (p.seconds_per_item, p.cost_per_item))
        best: list[SweepPoint] = []
        for point in found:
            if not best or point.cost_per_item < best[-1].cost_per_item:
                best.append(point)
        return tuple(best)

    @property
    def equals(self) -> tuple[tuple[SweepPoint, ...], ...]:
        """Points of the Pareto front with those that predictions do not tell from them in time and cost of an item, the simplest first."""
        found = [point for point in self if point.strategy is not None]
        groups = [[other for other in found if _are_equal(point, other)] for point in self.pareto]
        return tuple(tuple(sorted(group, key=_complexity)) for group in groups if len(group) > 1)

    def report(self) -> Report:
        """A row for each point, those of the Pareto front marked; prints in a terminal and shows in Jupyter."""
        cost = "device-hours" if all(point.price is None for point in self) else "cost"
        columns = ("", "cluster", ">devices", ">batch", "mesh", ">step time", f">{self.item}s/s", f">{cost} of a million", ">peak memory")
        columns += () if self.total is None else (">days in all", f">{cost} in all")
        front = set(map(id, self.pareto))
        rows = tuple(self._row(point, "*" if id(point) in front else "", len(columns)) for point in self)
        why = [f"{point.place}: {point.refusal}" for point in self if point.refusal]
        marked = f"* on the Pareto front: no other row takes less time and less {cost} for as many {self.item}s. All figures are predicted."
        alike = ["Equal within the model's error, the simplest first: " + "; ".join(map(_in_words, group)) + "." for group in self.equals]
        whole = "" if self.total is None else f" In all: {self.total:,.0f} {self.item}s."
        return Report(f"Sweep of {len(self)}", (Table(columns, rows), *map(Paragraph, [marked + whole, *alike, *why, *self.notes])))

    def _row(self, point: SweepPoint, mark: str, width: int) -> tuple[str, ...]:
        cells = [mark, point.cluster, str(point.n_devices), "" if point.batch is None else str(point.batch)]
        if point.step_seconds is None or point.peak_bytes is None:
            return (*cells, "nothing found", *[""] * (width - len(cells) - 1))
        cells += [", ".join(f"{name}={size}" for name, size in point.mesh.items()), _step_time(point)]
        cells += [f"{1 / point.seconds_per_item:,.4g}", f"{MILLION * point.cost_per_item:,.4g}", format_bytes(point.peak_bytes)]
        if self.total is not None:
            cells += [point.days(self.total), f"{self.total * point.cost_per_item:,.4g}"]
        return tuple(cells)

    def to_json(self) -> str:
        """All points and what is on the Pareto front, as JSON."""
        front = [point.key for point in self.pareto]
        points = [point.to_dict() for point in self]
        alike = [[point.key for point in group] for group in self.equals]
        told = {"item": self.item, "total": self.total, "pareto": front, "equal": alike, "points": points, "notes": self.notes}
        return json.dumps(told, indent=1)

    def __repr__(self) -> str:
        return f"Sweep of {len(self)} points, {len(self.pareto)} on the Pareto front"


def sweep(
    fn: Callable[..., Any],
    make_args: Callable[[int], tuple[Any, ...]] | tuple[Any, ...],
    *,
    clusters: Sequence[Cluster | str | Path],
    batches: Sequence[int] = (),
    meshes: Sequence[MeshAsked] = (None,),
    tokens_per_example: int | None = None,
    total: float | None = None,
    prices: Mapping[str, float] | None = None,
    save: str | os.PathLike[str] | None = None,
    on: str | None = None,
    progress: Progress | bool = silent,
    found: Callable[[SweepPoint], None] | None = None,
    **options: Any,
) -> Sweep:
    """The searched strategies of a program on several clusters and batch sizes, by time and cost of a token or example.

    The program is traced once for each batch size, and that trace is searched on all clusters, or, on Ray, once for each search. Ctrl-C
    ends the sweep: what was found by then is returned, with a note.

    Args:
        fn: any JAX function, as for `search`.
        make_args: the tuple of its arguments as a function of the batch size; without ``batches`` the tuple itself, or a function without
            arguments.
        clusters: each as for `search`.
        batches: batch sizes, in examples of a step on all devices together.
        meshes: each as for `search`; None searches the mesh too.
        tokens_per_example: with it, costs are those of a token; otherwise of an example, and without ``batches`` of a step.
        total: how many tokens, examples or steps there are in all; the report then has days and costs of the whole.
        prices: of a device-hour by cluster as given or by the device's name (``{"h100": 2.0}``), in any currency. None: costs are
            device-hours.
        save: a folder. Every strategy is written there when it is found, with ``sweep.json``, and a sweep of the same program, options and
            version of autoshard takes from there what it has.
        on: ``"ray"``, or the address of a Ray cluster, whose machines search points at the same time: the cluster of ``RAY_ADDRESS`` or
            of ``ray start``, else one that is started on this machine. They import what this process can. None: one after the other here.
        progress: as for `search`.
        found: called with each point when it is found.
        options: more of `search`'s: ``searcher``, ``pins``, ``donate_argnums``, ``microbatches``, ``remat``, ``memory_limit_bytes``, ...

    Raises:
        ClusterError: a cluster is unknown, or has no price where others have.
        ShardingError: no cluster or a batch size that is not a positive number.
        KeyboardInterrupt: Ctrl-C before anything was found.

    >>> import jax.numpy as jnp
    >>> args = lambda batch: (jnp.ones((64, 64)), jnp.ones((batch, 64)))
    >>> result = sweep(lambda w, x: jnp.tanh(x @ w), args, clusters=["cpu:4", "cpu:8"], batches=[64, 128])
    >>> [(point.cluster, point.batch) for point in result]
    [('cpu:4', 64), ('cpu:8', 64), ('cpu:4', 128), ('cpu:8', 128)]
    """
    _check(clusters, batches)
    Request.of(**options)  # what is wrong is known before the first search
    known = [Cluster.of(cluster) for cluster in clusters]
    asked_prices = [_price(str(given), cluster, prices) for given, cluster in zip(clusters, known, strict=True)]
    item = "step" if not batches else "example" if tokens_per_example is None else "token"
    earlier, notes = _Saved(save, item, total), []
    points: dict[int, SweepPoint] = {}
    sizes: Sequence[int | None] = batches or (None,)
    share = 1 / (len(sizes) * len(known) * len(meshes))

    def places() -> Iterator[_Place]:
        for batch in sizes:
            once, args = TracedOnce(fn), _arguments(make_args, batch)
            items = (batch or 1) * (tokens_per_example or 1) if batches else 1
            for cluster, price in zip(known, asked_prices, strict=True):
                for mesh in meshes:
                    blank = SweepPoint(cluster.name, cluster.n_devices, batch, items, price, _key(once, args, cluster, mesh, options))
                    yield _Place(blank, once, args, cluster, mesh, options)

    with shown(progress) as callback:
        here = _one_by_one(places(), earlier, lambda number: part(callback, number * share, share))
        try:
            for number, point in here if on is None else _on_ray(fn, list(places()), earlier, on):
                points[number] = point
                earlier.write([points[k] for k in sorted(points)], point)
                if on is not None:
                    callback(point.place, len(points) * share)
                if found is not None:
                    found(point)
        except KeyboardInterrupt:
            if not points:
                raise
            notes.append(f"Interrupted: {len(points)} of {round(1 / share)} points were searched.")
    return Sweep([points[k] for k in sorted(points)], item, total, notes)


@dataclass(frozen=True, slots=True)
class _Place:
    """What is searched for one point."""

    blank: SweepPoint
    fn: Callable[..., Any]
    args: tuple
    cluster: Cluster
    mesh: MeshAsked
    options: Mapping[str, Any]

    def searched(self, progress: Progress = silent) -> SweepPoint:
        """The point with what a search finds."""

        def told(what: str, fraction: float) -> None:
            progress(f"{self.blank.place}: {what}", fraction)

        try:
            strategy = search(self.fn, *self.args, cluster=self.cluster, mesh=self.mesh, progress=told, **self.options)
        except REFUSALS as error:
            return replace(self.blank, refusal=str(error))
        return _with(self.blank, strategy)

    def record(self) -> tuple[SweepPoint, Record | None]:
        """The point, and the record of its strategy, both of which can be sent."""
        point = self.searched()
        return replace(point, strategy=None), None if point.strategy is None else point.strategy.record


def _one_by_one(places: Iterable[_Place], earlier: _Saved, progress_of: Callable[[int], Progress]) -> Iterator[tuple[int, SweepPoint]]:
    for number, place in enumerate(places):
        yield number, earlier.kept(place.blank) or place.searched(progress_of(number))


def _on_ray(fn: Callable[..., Any], places: Sequence[_Place], earlier: _Saved, on: str) -> Iterator[tuple[int, SweepPoint]]:
    """The points as they are found on Ray, those of an earlier sweep first."""
    left: list[int] = []
    for number, place in enumerate(places):
        if (point := earlier.kept(place.blank)) is None:
            left.append(number)
        else:
            yield number, point
    tasks = [replace(places[number], fn=fn).record for number in left]
    for number, (point, record) in results_on_ray(tasks, on) if tasks else ():
        yield left[number], point if record is None else replace(point, strategy=Strategy(record))


def _with(blank: SweepPoint, strategy: Strategy) -> SweepPoint:
    cost = strategy.cost
    figures = {"step_seconds": cost.makespan_seconds, "interval_seconds": cost.interval_seconds, "peak_bytes": cost.compiled_peak_bytes}
    return replace(blank, mesh=strategy.mesh_shape, strategy=strategy, **figures)


def _check(clusters: Any, batches: Any) -> None:
    if not isinstance(clusters, list | tuple) or not clusters:
        got = repr(clusters) if clusters else "none"
        raise ShardingError(f"clusters= is a list of one cluster or more, got {got}. Write clusters=['v5e:4x4', 'h100:8x8'], for instance.")
    if not isinstance(batches, Sequence) or isinstance(batches, str):
        raise ShardingError(f"batches= is a list of batch sizes, got {batches!r}. Write batches=[64, 128].")
    for batch in batches:
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise ShardingError(f"a batch size is a whole number of examples, 1 or more, got {batch!r}. Write batches=[64, 128].")


def _price(given: str, cluster: Cluster, prices: Mapping[str, float] | None) -> float | None:
    """The price of a device-hour on a cluster; None where costs are device-hours."""
    if prices is None:
        return None
    for name in (given, cluster.name, cluster.device.name):
        if name in prices:
            price = prices[name]
            if isinstance(price, bool) or not isinstance(price, int | float) or not price > 0:
                raise ClusterError(f"a price of a device-hour is a positive number, got {price!r} for {name!r}.")
            return float(price)
    raise ClusterError(
        f"costs are compared in one unit, and there is no price of a device-hour on {given!r}, only of {', '.join(map(repr, prices))}. "
        f"Add one for {given!r} or {cluster.device.name!r}, or leave all prices out for costs in device-hours."
    )


def _arguments(make_args: Callable[..., Any] | tuple, batch: int | None) -> tuple:
    if callable(make_args):
        return make_args() if batch is None else make_args(batch)
    if batch is not None:
        raise ShardingError(
            f"with batches the arguments are a function of the batch size that returns their tuple, got a {type(make_args).__name__}. "
            "Write make_args=lambda batch: (state, batch_of(batch))."
        )
    return make_args


def _key(fn: TracedOnce, args: tuple, cluster: Cluster, mesh: MeshAsked, options: Mapping[str, Any]) -> str:
    """A hash of what decides the answer of a search."""
    given = given_mesh(mesh).all_names if isinstance(mesh, Mapping) else ()
    asked = Asked.of(options.get("pins"), options.get("batch_axes"), options.get("batch"))
    axes = (*asked.axes, *given)
    whole = whole_of(fn, args, options.get("donate_argnums", ()), axes, asked.batch)
    told = (whole.graph.fingerprint, cluster.to_dict(), mesh, sorted(options.items()), __version__, jax.__version__)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:32]


class _Saved:
    """A sweep's folder: strategies by name, and ``sweep.json`` with all points. Without a folder nothing is kept."""

    def __init__(self, folder: str | os.PathLike[str] | None, item: str, total: float | None):
        self.folder, self.item, self.total = None if folder is None else Path(folder), item, total
        self.rows: dict[str, Mapping[str, Any]] = {}
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with suppress(OSError, ValueError, KeyError, TypeError):  # no earlier sweep that can be read: all is searched
                self.rows = {row["key"]: row for row in json.loads((self.folder / "sweep.json").read_text("utf-8"))["points"]}

    def kept(self, blank: SweepPoint) -> SweepPoint | None:
        """The point as an earlier sweep left it; None: it has to be searched."""
        row = self.rows.get(blank.key)
        if self.folder is None or row is None:
            return None
        if row.get("refusal"):
            return replace(blank, refusal=row["refusal"])
        with suppress(AutoshardError, OSError):
            return _with(blank, load(self.folder / f"{blank.name}.json"))
        return None

    def write(self, points: Sequence[SweepPoint], newest: SweepPoint) -> None:
        """Writes the newest point's strategy, and all points, each file at once or not at all."""
        if self.folder is None:
            return
        if newest.strategy is not None and newest.key not in self.rows:
            newest.strategy.save(self.folder / f"{newest.name}.json")
        partial = self.folder / "sweep.json.partial"
        partial.write_text(Sweep(points, self.item, self.total).to_json() + "\n", "utf-8")
        partial.replace(self.folder / "sweep.json")
