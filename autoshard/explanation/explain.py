"""The report on a strategy: what was decided, what it costs, where the time goes, what was assumed; and strategies side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.cluster import Cluster
from autoshard.cost.record import Cost
from autoshard.explanation import Explanation, Judged, explanation_of
from autoshard.explanation.build import placement_words
from autoshard.explanation.difference import same_program
from autoshard.explanation.explain_pipeline import pipeline_parts
from autoshard.explanation.explain_tensors import mesh_picture, tensor_picture
from autoshard.explanation.groups import alike, argument_groups, by_pattern, common_ending, shard_bytes
from autoshard.explanation.text import argument_parts as argument_table
from autoshard.explanation.text import body, to_json
from autoshard.ir import Spec, as_compiled
from autoshard.ir.naming import starred
from autoshard.render import (
    Gallery,
    Heading,
    Paragraph,
    Part,
    Report,
    Table,
    format_between,
    format_bytes,
    format_count,
    format_flops,
    format_percent,
    format_seconds,
)
from autoshard.strategy import BY_ROWS, Record, TensorRecord

PICTURES = 5
GIVEN = "given"  # the 'searcher' of a sharding that the user gave


@dataclass(frozen=True, slots=True)
class StrategyReport(Report):
    """The report on a strategy, with the explanation as data: ``report.data.layers``, ``report.to_json()``."""

    data: Explanation

    def to_json(self) -> str:
        """The explanation as JSON."""
        return to_json(self.data)


def explain(record: Record, programs: Sequence[Judged] = (), details: bool = False) -> StrategyReport:
    """The report on a strategy: a terminal and a notebook show it.

    Args:
        record: the strategy's.
        programs: its program, or those of its stages, where they are at hand.
        details: whether to add pictures of shards, results, the proof of optimality, and what the searcher did.
    """
    cluster, data = Cluster.from_dict(record.cluster), explanation_of(record, programs)
    parts = [
        Paragraph("\n".join(data.sentences)),
        *_headline(record, cluster),
        *_confirmation(record),
        *pipeline_parts(record, data.stages),
        *body(data, argument_parts(record)),
        *(_details(record, cluster) if details else ()),
    ]
    return StrategyReport(data.title, tuple(parts), data)


# -- sections, from top to bottom ----------------------------------------------------------------------------------------


def _headline(record: Record, cluster: Cluster) -> list[Part]:
    cost, limit = record.cost, record.limit_bytes
    kinds = "matrix products, convolutions and Fourier transforms" if cost.transform_flops else "matrix products and convolutions"
    who = "memory_limit_bytes allows" if record.memory_limit_bytes else f"{cluster.name} leaves a program"
    of_limit = f"{format_percent(cost.peak_bytes / limit)} of the {format_bytes(limit)} that {who}"
    seconds = record.stats.get("search_seconds")
    found = record.searcher.name + ("" if seconds is None else f" in {format_seconds(seconds)}")
    found += "; the search ended early" if record.stats.get("ended_early") else ""
    rows = [
        ("step time", f"{format_seconds(cost.makespan_seconds)} predicted{_interval(cost)}{_confirmed_time(record)}"),
        ("peak memory", f"{format_bytes(cost.peak_bytes)} a device: {of_limit}"),
        *_rewrites(record, cluster),
        *_computed_again(cost),
        ("work", f"{format_flops(cost.flops)} of {kinds} a device"),
        ("found by", found) if record.searcher.name != GIVEN else ("shardings", "as given, without a search"),
    ]
    return [Table(("", ""), tuple(rows))]


def _details(record: Record, cluster: Cluster) -> list[Part]:
    rows = [("optimality", _optimality(record))]
    if record.mesh.placement is not None:
        rows.append(("placement", placement_words(record.mesh, cluster)))
    return [*_layouts(record), *_results(record), Heading("Proof"), Table(("", ""), tuple(rows)), *_forms(record), *_search(record)]


def _forms(record: Record) -> list[Part]:
    """The forms of the step that were compared: what was estimated of each, and what was found."""

    def written(seconds: float | None, nbytes: float | None) -> tuple[str, str]:
        return "" if seconds is None else format_seconds(seconds), "" if nbytes is None else format_bytes(nbytes)

    rows = tuple(
        (each.form, *written(each.estimated_seconds, each.estimated_bytes), *written(each.seconds, each.peak_bytes), each.outcome)
        for each in record.trail
    )
    columns = ("form", ">estimated step", ">peak", ">found step", ">peak", "")
    return [Heading("Forms of the step"), Table(columns, rows)] if rows else []


_AS_MEASURED = {
    "scheduled": "as {} schedules it, products at the share of the peak that they reach",
    "corrected": "corrected by what {} makes of it",
    "timed": "on {} devices",
}


def _interval(cost: Cost) -> str:
    """Between which times published runs on such devices would have had the step."""
    interval = cost.interval_seconds
    return "" if interval is None else f", {format_between(*interval)} by eight in ten published runs on such devices"


def _confirmed_time(record: Record) -> str:
    """The step time by what confirmed the strategy, after the predicted one."""
    confirmation = record.confirmation
    if confirmation is None or confirmation.seconds is None or confirmation.taken.measure is None:
        return ""
    return f"; {format_seconds(confirmation.seconds)} {_AS_MEASURED[confirmation.taken.measure].format(confirmation.name)}"


def _confirmation(record: Record) -> list[Part]:
    """What was compiled next to what was predicted; of several finalists what was compiled or timed, and what became of them."""
    confirmation = record.confirmation
    if confirmation is None:
        return []
    version = f" ({confirmation.version})" if confirmation.version else ""
    seconds = record.stats.get("confirm_seconds")
    duration = "" if seconds is None else f" in {format_seconds(seconds)}"
    title = Heading(f"Confirmed by {confirmation.name}{version}{duration}")
    if len(confirmation.finalists) == 1 and confirmation.by == "compiler":
        return [title, compiled_table(record)]

    def known(figure: float | None, written: Callable[[float], str]) -> str:
        return "" if figure is None else written(figure)

    rows = tuple(
        (each.found_by, str(each.mesh), format_seconds(each.predicted_seconds), known(each.seconds, format_seconds))
        + ((each.measure or "") if each.seconds is not None else "",)
        + (known(each.collective_bytes, format_bytes), known(each.flops, format_flops), known(each.peak_bytes, format_bytes))
        + (f"{each.outcome}: {each.reason}" if each.reason else each.outcome,)
        for each in confirmation.finalists
    )
    measures = {each.measure for each in confirmation.finalists if each.measure and each.seconds is not None}
    notes = [_MEASURES[measure] for measure in _MEASURES if measure in measures]
    columns = ("found by", "mesh", ">predicted", ">confirmed", "", ">sent", ">work", ">peak memory", "")
    return [title, Table(columns, rows, tuple(notes)), *_of_which(record)]


def _of_which(record: Record) -> list[Part]:
    """Which figures are compiled, where the cost of a strategy is."""
    if record.confirmation is None or record.cost.peak_bytes != record.confirmation.peak_bytes:
        return []
    text = "The step time and the peak memory above are as compiled. Times and bytes of their parts are as predicted and differ."
    return [Paragraph(text)]


def compiled_table(record: Record) -> Table:
    """The predicted figures that a compiler also knows, next to its own, of one device and step; the record has a confirmation."""
    assert record.confirmation is not None
    taken, sent = record.confirmation.taken, sum(each.bytes * each.count for each in as_compiled(record.cost.collectives))
    figures = (
        ("sent by collectives", sent, taken.collective_bytes, format_bytes),
        ("work of products", record.cost.compiled_flops, taken.flops, format_flops),
        ("peak memory", record.cost.compiled_peak_bytes, taken.peak_bytes, format_bytes),
    )
    rows = tuple(
        (what, written(predicted), written(compiled), format_percent(compiled / predicted) if predicted else "")
        for what, predicted, compiled, written in figures
        if compiled is not None
    )
    return Table(("", ">predicted", ">compiled", ">"), rows)


_MEASURES = {
    "scheduled": "scheduled: the compiled schedule's time, with the cost model's links and products at the share of the peak that they "
    "are predicted at, of those that are close to the fastest.",
    "corrected": "corrected: the prediction, corrected by compiled collectives and FLOPs.",
    "timed": "timed: the median of several runs on zeros.",
}


def _rewrites(record: Record, cluster: Cluster) -> list[tuple[str, str]]:
    """What the program computes again, and what is in the memory of hosts between steps, with what moving it takes."""
    found = []
    for each in record.program.rewrites:
        if each.kind == "recompute":
            found.append(("computed again", each.describe()))
        if each.kind == "offload":
            leaves = [record.arguments[leaf] for leaf in record.program.offload]
            nbytes = sum(shard_bytes(tensor.shape, tensor.dtype, tensor.spec, record.mesh) for tensor in leaves)
            rate = cluster.device.host_bandwidth_bytes_per_second
            moving = f", moved to the device and back in {format_seconds(2 * nbytes / rate)} of a step" if rate else ""
            found.append(("on hosts", f"{each.describe()}: {format_bytes(nbytes)} a device{moving}"))
    return found


def _computed_again(cost: Cost) -> list[tuple[str, str]]:
    again = cost.recomputation
    if again is None:
        return []
    kernels = "1 kernel" if again.kernels == 1 else f"{format_count(again.kernels)} kernels"
    runs = f"by running {kernels} twice, another {format_seconds(again.seconds)} a step"
    return [("", f"{format_bytes(again.peak_bytes)} as the compiler makes it fit, {runs}")]


def _optimality(record: Record) -> str:
    if record.lower_bound_seconds <= 0:
        return "nothing proven"
    if record.pipeline is not None:
        return (
            f"with any shardings of these stages, one of them alone has {format_seconds(record.lower_bound_seconds)} of work; this "
            f"schedule has {format_seconds(record.cost.objective_seconds)}, its idle time included (gap {format_percent(record.gap)})"
        )
    among = "that keeps the pins on this mesh" if record.stats.get("pins") else "on this mesh"
    if len(record.mesh.axes) > 1:
        among += ", so placed,"
    if record.gap == 0:
        return f"proven: no strategy {among} has a smaller objective"
    return (
        f"no strategy {among} has an objective below {format_seconds(record.lower_bound_seconds)}; "
        f"this one has {format_seconds(record.cost.objective_seconds)} (gap {format_percent(record.gap)})"
    )


def argument_parts(record: Record) -> list[Part]:
    """The section on how the arguments are sharded; of a pipeline one for each stage's."""
    if record.pipeline is None:
        return argument_table(argument_groups(record.arguments, record.mesh))
    parts: list[Part] = []
    titles = {stage: f"Arguments of stage {stage}" for stage in range(len(record.pipeline.stages))}
    for stage, title in {BY_ROWS: "Arguments of which every stage has the rows of its own layers", **titles}.items():
        own = [tensor for tensor, place in zip(record.arguments, record.pipeline.argument_stages, strict=True) if place == stage]
        parts += argument_table(argument_groups(own, record.mesh), title) if own or stage != BY_ROWS else []
    return parts


def _results(record: Record) -> list[Part]:
    """The results but those that look like an argument's new value: same path ending, shape and spec."""
    arguments = [(starred(members[0].path), members[0]) for _, members in by_pattern(record.arguments)]
    new: list[TensorRecord] = []
    for _, members in by_pattern(record.results):
        if not any(alike(members[0], tensor) and common_ending(starred(members[0].path), argument) for argument, tensor in arguments):
            new += members
    n_kept = len(record.results) - len(new)
    table = argument_table(argument_groups(new, record.mesh), "Results")[1:]
    kept = f"{format_count(n_kept)} that replace arguments are sharded as those are."
    if not record.donate_argnums:
        kept += " No argument is donated, so both are held; donate_argnums (--donate) lets a new value take the old one's memory."
    note = [Paragraph(kept)] if n_kept else []
    return [Heading("Results"), *table, *note] if record.results else []


def _layouts(record: Record) -> list[Part]:
    """Pictures of the mesh and of the largest arguments, one of a kind."""
    pictures = [mesh_picture(record.mesh)]
    if record.pipeline is not None:  # a tensor is on one stage, whose devices the table above has
        return [Heading("Which device holds what"), Gallery(tuple(pictures))]
    seen: set[tuple[int, Spec]] = set()
    for tensor in sorted(record.arguments, key=lambda t: -math.prod(t.shape)):
        kind = (len(tensor.shape), tensor.spec)
        if tensor.shape and kind not in seen and len(pictures) <= PICTURES:
            seen.add(kind)
            pictures.append(tensor_picture(tensor, record.mesh))
    return [Heading("Which device holds what"), Gallery(tuple(pictures))]


def _search(record: Record) -> list[Part]:
    rows = [("program", f"{record.program.name}, {format_count(record.program.n_ops)} ops, fingerprint {record.program.fingerprint[:16]}")]
    rows.append(("searcher", _called(record.searcher.name, record.searcher.options)))
    rows += [(_words(name), _stat(name, value)) for name, value in sorted(record.stats.items())]
    provenance = record.provenance
    versions = [f"{name} {version}" for name, version in (("autoshard", provenance.autoshard), ("jax", provenance.jax)) if version]
    rows += [("made with", ", ".join((*versions, *filter(None, [provenance.date]))))] if versions else []
    rows += [("made by", provenance.command)] if provenance.command else []
    return [Heading("Search"), Table(("", ""), tuple(rows))]


def _called(name: str, options: Mapping[str, Any]) -> str:
    """A searcher as one writes it, those among its options too: ``auto(members=[data_parallel(), fully_sharded(stage=1)])``."""

    def written(value: Any) -> str:
        if isinstance(value, Mapping) and "name" in value:
            return _called(value["name"], {key: child for key, child in value.items() if key != "name"})
        return f"[{', '.join(map(written, value))}]" if isinstance(value, list) else str(value)

    return f"{name}({', '.join(f'{option}={written(value)}' for option, value in sorted(options.items()))})"


def _words(name: str) -> str:
    """A statistic's name in words; its value says the unit."""
    return name.removesuffix("_seconds").removesuffix("_bytes").removeprefix("n_").replace("_", " ")


def _stat(name: str, value) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith("_seconds"):
        return format_seconds(value)
    return format_bytes(value) if name.endswith("_bytes") else f"{value:,.6g}"


# -- several strategies ---------------------------------------------------------------------------------------------------


def side_by_side(records: Mapping[str, Record], title: str = "Strategies") -> Report:
    """The report that puts strategies side by side, by name; times are also given as multiples of the program's fastest."""
    seconds = {name: record.cost.makespan_seconds for name, record in records.items()}
    fastest = {name: min(seconds[other] for other in records if same_program(record, records[other])) for name, record in records.items()}
    rows = tuple(
        (
            name,
            record.cluster["name"],
            str(record.mesh),
            format_seconds(seconds[name]),
            f"{seconds[name] / (fastest[name] or 1.0):.2f} x",
            format_seconds(record.cost.communication_seconds),
            format_bytes(record.cost.peak_bytes),
        )
        for name, record in records.items()
    )
    notes = ("'ratio' is to the fastest strategy of the same program here.",) if len(rows) > 1 else ()
    columns = ("strategy", "cluster", "mesh", ">step time", ">ratio", ">communication", ">peak memory")
    return Report(title, (Table(columns, rows, notes),) if rows else (Paragraph("There are none."),))


def summary(record: Record) -> dict[str, Any]:
    """The main facts of a strategy as plain JSON values."""
    return {
        "name": record.name,
        "program": record.program.name,
        "fingerprint": record.program.fingerprint,
        "cluster": record.cluster["name"],
        "mesh": dict(record.mesh.shape),
        "searcher": record.searcher.name,
        "makespan_seconds": record.cost.makespan_seconds,
        "objective_seconds": record.cost.objective_seconds,
        "lower_bound_seconds": record.lower_bound_seconds,
        "interval_seconds": record.cost.interval_seconds,
        "compute_seconds": record.cost.compute_seconds,
        "communication_seconds": record.cost.communication_seconds,
        "exposed_communication_seconds": record.cost.exposed_communication_seconds,
        "peak_bytes": record.cost.peak_bytes,
        "flops": record.cost.flops,
    }
