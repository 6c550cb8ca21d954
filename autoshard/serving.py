"""Strategies of inference: of a prefill and a decode step that share the shardings of parameters and of the cache of keys and values.

Both are functions ``fn(params, cache, *inputs)`` that return ``(cache, outputs)``: prefill reads a prompt into an empty cache, decode reads
one token a sequence and adds to the cache. Both have one mesh, and one `PartitionSpec` for each leaf of parameters and cache: nothing is
resharded between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import jax
from jax.sharding import PartitionSpec

from autoshard.ask.search import search as search_one
from autoshard.ask.strategy import Strategy
from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError, ShardingError
from autoshard.ir.rewrites import Padded
from autoshard.plan.prepared import whole_of
from autoshard.plan.request import Request
from autoshard.progress import Progress, part, silent
from autoshard.render import Paragraph, Report, Reported, Table, format_bytes, format_seconds, shown
from autoshard.rewrite import padded_alike
from autoshard.run.tracing import TracedOnce
from autoshard.trace import Traced

OBJECTIVES = ("throughput", "latency")
STATE = 2  # arguments that both functions share: parameters and cache
CACHE = 1  # the position of the cache, which is donated

__all__ = ["Served", "Serving", "search"]


@dataclass(frozen=True, slots=True)
class Served:
    """A batch size and a length, and the strategies of prefill and decode there.

    Attributes:
        batch: sequences at a time, on all devices together.
        length: positions of the cache.
        new_tokens: decode steps of a request.
        prefill, decode: strategies of one mesh, with equal specs of parameters and cache; None where nothing fits.
        refusal: why nothing fits; empty otherwise.
    """

    batch: int
    length: int
    new_tokens: int
    prefill: Strategy | None = None
    decode: Strategy | None = None
    refusal: str = field(default="", compare=False)

    @property
    def first_token_seconds(self) -> float:
        """Predicted time of prefill."""
        return float("inf") if self.prefill is None else self.prefill.cost.makespan_seconds

    @property
    def token_seconds(self) -> float:
        """Predicted time of a decode step: from one token of a sequence to its next."""
        return float("inf") if self.decode is None else self.decode.cost.makespan_seconds

    @property
    def request_seconds(self) -> float:
        """Predicted time of a prefill and all decode steps."""
        return self.first_token_seconds + self.new_tokens * self.token_seconds

    @property
    def tokens_per_second(self) -> float:
        """New tokens of the whole batch a second, prefill's time included."""
        return self.batch * self.new_tokens / self.request_seconds

    @property
    def peak_bytes(self) -> float:
        """The larger of the two peaks, a device."""
        return max((each.cost.peak_bytes for each in (self.prefill, self.decode) if each is not None), default=float("inf"))


class Serving(Reported, Sequence[Served]):
    """The table of a search: a row for each batch size and length.

    Attributes:
        objective: ``"throughput"`` or ``"latency"``.
    """

    def __init__(self, rows: Sequence[Served], objective: str, cluster: str):
        self.rows: tuple[Served, ...] = tuple(rows)
        self.objective: str = objective
        self.cluster: str = cluster

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Served: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Served, ...]: ...
    def __getitem__(self, index: int | slice) -> Served | tuple[Served, ...]:
        return self.rows[index]

    @property
    def best(self) -> Served:
        """The row of most tokens a second, or of the shortest request.

        Raises:
            InfeasibleError: no row has strategies.
        """
        found = [row for row in self if row.decode is not None]
        if not found:
            raise InfeasibleError(f"a table of serving has a row that fits, and none of {len(self)} does: {self[0].refusal}")
        return max(found, key=lambda row: row.tokens_per_second if self.objective == "throughput" else -row.request_seconds)

    def report(self) -> Report:
        """A row for each batch size and length; prints in a terminal and shows in Jupyter."""
        columns = (">batch", ">length", "mesh", ">prefill", ">a token", ">a request", ">tokens/s", ">peak memory", "cache")
        notes = [f"batch {row.batch}, length {row.length}: {row.refusal}" for row in self if row.refusal]
        told = f"All figures are predicted. A request is a prefill and {self[0].new_tokens} decode steps."
        parts = (Table(columns, tuple(map(_cells, self))), Paragraph(told), *map(Paragraph, notes))
        return Report(f"Serving on {self.cluster}, searched for {self.objective}", parts)

    def __repr__(self) -> str:
        return f"Serving of {len(self)} rows, searched for {self.objective}"


def _cells(row: Served) -> tuple[str, ...]:
    if row.decode is None:
        return str(row.batch), str(row.length), "nothing fits", *[""] * 6
    mesh = ", ".join(f"{name}={size}" for name, size in row.decode.mesh_shape.items())
    times = map(format_seconds, (row.first_token_seconds, row.token_seconds, row.request_seconds))
    cache = dict.fromkeys(str(spec) for spec in jax.tree.leaves(row.decode.in_specs[CACHE], is_leaf=_is_spec))
    return (str(row.batch), str(row.length), mesh, *times, f"{row.tokens_per_second:,.0f}", format_bytes(row.peak_bytes), "\n".join(cache))


def search(
    prefill: Callable[..., Any],
    decode: Callable[..., Any],
    make_args: Callable[[int, int], tuple[tuple[Any, ...], tuple[Any, ...]]],
    *,
    cluster: Cluster | str,
    batches: Sequence[int],
    lengths: Sequence[int],
    new_tokens: int = 128,
    objective: str = "throughput",
    progress: Progress | bool = silent,
    **options: Any,
) -> Serving:
    """The strategies of prefill and decode for every batch size and length, with shared specs of parameters and cache.

    Each of the two is searched freely, and then the other with its mesh, its specs of parameters and cache as pins, and their padding;
    where that pads anything, also without. Of all pairs that of the shorter request is taken. The cache is donated in both.

    Args:
        prefill, decode: functions ``fn(params, cache, *inputs)`` that return ``(cache, outputs)``, with equal parameters and cache.
        make_args: from a batch size and a length, which is that of the cache, the arguments of prefill and those of decode; arrays or
            `jax.ShapeDtypeStruct`.
        cluster: as for `autoshard.search`.
        batches, lengths: the rows of the table.
        new_tokens: decode steps for one prefill, by which the two are weighed.
        objective: what `Serving.best` is: of most tokens a second, or of the shortest request.
        progress: as for `autoshard.search`.
        options: more of `autoshard.search`'s: ``searcher``, ``memory_limit_bytes``, ``time_limit_seconds``, ...

    Raises:
        ShardingError: parameters or cache of the two functions differ, or an argument is not as described.
    """
    Request.of(**options)
    if objective not in OBJECTIVES:
        raise ShardingError(f"an objective of serving is 'throughput' or 'latency', got {objective!r}.")
    if not batches or not lengths:
        raise ShardingError("a table of serving has batch sizes and lengths, got none. Write batches=[1, 8], lengths=[1024].")
    found, n = [], len(batches) * len(lengths)
    with shown(progress) as callback:
        for batch in batches:
            for length in lengths:
                args = make_args(batch, length)
                own = part(callback, len(found) / n, 1 / n)
                found.append(_row(prefill, decode, args, Cluster.of(cluster), Served(batch, length, new_tokens), own, options))
    return Serving(found, objective, Cluster.of(cluster).name)


def _row(prefill, decode, args, cluster: Cluster, blank: Served, progress: Progress, options: Mapping[str, Any]) -> Served:
    """The better of both pairs: decode searched first, or prefill."""
    _check_state(*args)
    functions = TracedOnce(prefill), TracedOnce(decode)
    pairs: list[Served] = []
    refusal = ""
    ways = list(dict.fromkeys((options.get("padding", True), False)))
    for turn, first in enumerate((1, 0)):
        for padding in ways:
            own = part(progress, turn / 2, 0.5) if padding == ways[0] else silent
            try:
                free, pinned = _pair(functions, args, first, cluster, own, {**options, "padding": padding})
            except InfeasibleError as error:
                refusal = refusal or str(error)
                continue
            if pinned is not None:
                both = (pinned, free) if first else (free, pinned)
                pairs.append(Served(blank.batch, blank.length, blank.new_tokens, *both))
            if not _padding(free):
                break
    return min(pairs, key=lambda pair: pair.request_seconds) if pairs else Served(*_size(blank), refusal=refusal)


def _pair(
    functions: Sequence[TracedOnce], args: Sequence[tuple], first: int, cluster: Cluster, progress: Progress, options: Mapping[str, Any]
) -> tuple[Strategy, Strategy | None]:
    """A strategy that is free, and that of the other function with its mesh, specs and padding of parameters and cache; None where the
    other cannot be padded so."""
    free = _searched(functions[first], args[first], cluster, part(progress, 0.0, 0.5), options)
    other, own = functions[1 - first], args[1 - first]
    if (padding := _padding(free)) is not None:
        alike = padded_alike(_traced(other, own, free), padding, len(jax.tree.leaves(own[:STATE])))
        if alike is None:
            return free, None
        other = other.rewritten((alike,))
    asked = {**options, "mesh": free.record.mesh, "pins": _pins(free, other, own), "padding": False}
    return free, _searched(other, own, cluster, part(progress, 0.5, 0.5), asked)


def _padding(found: Strategy) -> Padded | None:
    """What a strategy pads."""
    return next((each for each in found.record.program.rewrites if isinstance(each, Padded)), None)


def _traced(function: TracedOnce, args: tuple, found: Strategy) -> Traced:
    return whole_of(function, args, CACHE, found.record.mesh.all_names)


def _size(row: Served) -> tuple[int, int, int]:
    return row.batch, row.length, row.new_tokens


def _searched(fn: TracedOnce, args: tuple, cluster: Cluster, progress: Progress, options: Mapping[str, Any]) -> Strategy:
    once = {"microbatches": None, "remat": None, **options}  # which are of steps with gradients
    return search_one(fn, *args, cluster=cluster, donate_argnums=CACHE, progress=progress, **once)


def _pins(found: Strategy, other: TracedOnce, args: tuple) -> dict[str, PartitionSpec]:
    """The specs of parameters and cache that were found, by the paths that they have in the other function."""
    paths = _traced(other, args, found).graph.argument_paths
    specs = jax.tree.leaves(found.in_specs[:STATE], is_leaf=_is_spec)
    return dict(zip(paths, specs, strict=False))  # inputs come after parameters and cache, and are not pinned


def _check_state(prefill: tuple, decode: tuple) -> None:
    """Raises `ShardingError` where the two functions have other parameters or another cache."""
    (ours, own), (theirs, other) = (jax.tree.flatten(args[:STATE]) for args in (prefill, decode))
    if own != other or [(leaf.shape, leaf.dtype) for leaf in ours] != [(leaf.shape, leaf.dtype) for leaf in theirs]:
        raise ShardingError(
            "prefill and decode have equal parameters and an equal cache as their first two arguments, and these differ in structure, "
            f"shapes or dtypes: {own} and {other}. Give prefill the whole cache, empty, and let it return it filled."
        )


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)
