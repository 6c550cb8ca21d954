"""A strategy held against what partitioners and compilers really make of its program."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from autoshard.ask.pipeline_verification import PipelineVerification, together
from autoshard.ask.reduced_numbers import Numbers, numbers_parts, reduced_numbers
from autoshard.ask.strategy import Strategy
from autoshard.ask.verified_operations import OperationDifference, by_operation, operation_tables
from autoshard.cluster import Cluster
from autoshard.errors import ClusterError, StrategyError
from autoshard.ir import Collective, Mesh, as_compiled
from autoshard.lower import abstract_mesh, jax_mesh
from autoshard.lower.opaque import ANY_PLATFORM
from autoshard.progress import Progress, silent
from autoshard.render import Paragraph, Part, Report, Table, format_bytes, format_count, format_flops, format_percent, format_seconds
from autoshard.run.leaf_shardings import pipeline_meshes
from autoshard.run.padded import PaddedArguments
from autoshard.run.saved_graphs import save_text
from autoshard.run.stage_programs import stage_programs
from autoshard.run.step import Step, bucket_options
from autoshard.strategy import Record
from autoshard.trace import outside_mesh
from autoshard.verify import (
    TARGETS,
    Ahead,
    Flops,
    Options,
    Row,
    Topology,
    collectives_of,
    compare,
    compile_ahead,
    devices_here,
    dot_flops,
    explicit_collectives,
    in_phases,
    scheduled_cycles,
    topology_of,
)

# How near a compiled program is to be: compilers pad what they exchange, and fold some arithmetic away.
BYTES_WITHIN = 0.03
FLOPS_WITHIN = 0.01
PEAK_WITHIN = 0.15  # beyond it the report says so; what decides is whether it fits


@dataclass(frozen=True, slots=True)
class Verification:
    """Predicted against actual.

    Attributes:
        program, mesh, target: what was held against what; a target is one of `TARGETS`.
        rows: collectives by kind and mesh axes, counts and bytes of one step on one device.
        n_ops: operations of the program.
        n_constraints: sharding constraints that the lowered program carries.
        predicted_flops: of matrix products and convolutions in one step on one device, as the cost model says.
        predicted_compute_seconds: computing alone, as the cost model says.
        predicted_peak_bytes: memory of a device at the fullest moment, as the cost model says; of ``"tpu"`` with what is computed again.
        actual_flops, rematerialised_flops: as compiled, and what of it XLA itself computes again to save memory; None where it is not
            compiled.
        actual_compute_seconds: the TPU compiler's own schedule, its estimated cycles at the device's clock; None where not asked for.
        actual_peak_bytes: as the compiler says; None where nothing was compiled, or it was refused.
        needed_bytes: what the compiler's allocator takes, fragmentation included; None where that is not known.
        available_bytes: what a device offers; None where the compiler does not say.
        fits: whether the program fits the device's memory, as the compiler says or by what it needs; None where that is not known.
        predicted_for: the strategy's cluster, where the target compiles for devices of another kind.
        operations: the operations whose compute, or memory at the peak, differs most, where the program is compiled ahead of time.
        numbers: of its kernels, next to those of the program as it is written.
    """

    program: str
    mesh: Mesh
    target: str
    rows: tuple[Row, ...]
    n_ops: int
    n_constraints: int
    predicted_flops: float
    predicted_compute_seconds: float
    predicted_peak_bytes: float
    actual_flops: float | None = None
    rematerialised_flops: float | None = None
    actual_compute_seconds: float | None = None
    actual_peak_bytes: float | None = None
    needed_bytes: float | None = None
    available_bytes: float | None = None
    fits: bool | None = None
    predicted_for: str = ""
    operations: tuple[OperationDifference, ...] = ()
    numbers: tuple[Numbers, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the actual collectives are the predicted ones in kind, mesh axes, count and bytes."""
        return self.fits is not False and all(row.agrees for row in self.rows)

    @property
    def near(self) -> bool:
        """Whether the program fits and is what was predicted: collective bytes within 3 %, flops within 1 %."""
        return self.fits is not False and abs(self.bytes_ratio - 1) <= BYTES_WITHIN and abs(self.flops_ratio - 1) <= FLOPS_WITHIN

    @property
    def as_predicted(self) -> bool:
        """Whether the collectives are the predicted ones, it fits and kernels' numbers agree; for TPUs and GPUs, `near` is enough, since
        their compilers pad."""
        return self._costs_as_predicted and all(each.agree for each in self.numbers)

    @property
    def _costs_as_predicted(self) -> bool:
        return self.exact or (self.near and TARGETS[self.target].pads)

    @property
    def flops_ratio(self) -> float:
        """Actual over predicted flops, without what XLA computes again; 1.0 where nothing was compiled, or there are none."""
        if self.actual_flops is None:
            return 1.0
        actual = self.actual_flops - (self.rematerialised_flops or 0.0)
        return actual / self.predicted_flops if self.predicted_flops else 1.0 if not actual else float("inf")

    @property
    def bytes_ratio(self) -> float:
        """Actual over predicted bytes of all collectives; 1.0 where there are none on either side."""
        predicted, actual = (sum(getattr(row, f"{side}_bytes") for row in self.rows) for side in ("predicted", "actual"))
        return actual / predicted if predicted else 1.0 if not actual else float("inf")

    def report(self) -> Report:
        """The comparison as a table, for terminals and notebooks."""
        title = f"{self.program} on mesh {self.mesh}, held against {self.target}"
        manual = f"{format_count(self.n_ops)} operations in one manual computation: nothing is left to the partitioner."
        constrained = f"{format_count(self.n_constraints)} sharding constraints on {format_count(self.n_ops)} operations."
        constraints = Paragraph(constrained if self.n_constraints else manual)
        refusal = [Paragraph(self._refusal())] if self.fits is False else []
        if refusal and self.actual_peak_bytes is None:
            return Report(title, (*refusal, constraints))
        parts: list[Part] = [*refusal, Paragraph(f"The target is {TARGETS[self.target].description}."), Paragraph(self._verdict())]
        if rows := (*map(_collective_row, self.rows), *self._measure_rows()):
            columns = ("", "mesh axes", ">predicted", ">actual", ">predicted bytes", ">actual bytes", "")
            notes = ("All of it is of one step on one device.", "An all_reduce of which only slices are read is a reduce_scatter.")
            parts.append(Table(columns, rows, notes))
        parts += operation_tables(self.operations)
        if TARGETS[self.target].differs and not self.near:
            parts.append(Paragraph(TARGETS[self.target].differs))
        if self.predicted_for and self._peak_is_far:
            parts.append(Paragraph(f"The peak was predicted for {self.predicted_for}, and compilers of other devices store other arrays."))
        if self.rematerialised_flops:
            parts.append(Paragraph(f"XLA computes {format_flops(self.rematerialised_flops)} of it once more to save memory."))
        if self.needed_bytes is not None and self.fits:
            limit = self.available_bytes
            offered = "the device's memory" if limit is None else f"the {format_bytes(limit)} a program may use"
            parts.append(Paragraph(f"It fits: the compiler takes {format_bytes(self.needed_bytes)} of {offered}, holes included."))
        return Report(title, (*parts, constraints, *numbers_parts(self.numbers)))

    def _verdict(self) -> str:
        """Whether the target does what was predicted, as the command's exit code says it."""
        share = f"{format_percent(self.bytes_ratio)} of the predicted bytes" if math.isfinite(self.bytes_ratio) else "none were predicted"
        sent = "the predicted ones, exactly" if all(row.agrees for row in self.rows) else share
        said = f"collectives {sent}" if self.rows else "no collectives"
        if self.actual_flops is not None:
            said += f", {format_percent(self.flops_ratio)} of the predicted FLOPs" if self.predicted_flops else ""
        if self.actual_peak_bytes is not None:
            said += f", {format_percent(self.actual_peak_bytes / self.predicted_peak_bytes)} of the predicted peak memory"
        verdict = "Collectives as predicted, memory not" if self._peak_is_far else "As predicted"
        said += "" if all(each.agree for each in self.numbers) else "; numbers of kernels differ from those of the program as it is written"
        return f"{verdict if self.as_predicted else 'Not as predicted'}: {said}."

    @property
    def _peak_is_far(self) -> bool:
        """Whether peak memory is far from the predicted one; it does not decide where the program fits."""
        return self.actual_peak_bytes is not None and abs(self.predicted_peak_bytes / self.actual_peak_bytes - 1) > PEAK_WITHIN

    def _measure_rows(self) -> list[tuple[str, ...]]:
        """The table's rows below the collectives, of what the target tells."""
        rows: list[tuple[str, ...]] = []
        if self.actual_flops is not None:
            differs = "" if abs(self.flops_ratio - 1) <= FLOPS_WITHIN else "differs"
            rows.append(("FLOPs of products", "", format_flops(self.predicted_flops), format_flops(self.actual_flops), "", "", differs))
        if self.actual_compute_seconds is not None:
            seconds = (format_seconds(self.predicted_compute_seconds), format_seconds(self.actual_compute_seconds))
            rows.append(("computing", "", *seconds, "", "", ""))
        if self.actual_peak_bytes is not None:
            sizes = (format_bytes(self.predicted_peak_bytes), format_bytes(self.actual_peak_bytes))
            rows.append(("peak memory", "", "", "", *sizes, "differs" if self._peak_is_far else ""))
        return rows

    def _refusal(self) -> str:
        needed = "more" if self.needed_bytes is None else format_bytes(self.needed_bytes)
        available = "there is" if self.available_bytes is None else f"the {format_bytes(self.available_bytes)} a program may use"
        predicted = format_bytes(self.predicted_peak_bytes)
        return f"Does not fit: the compiler needs {needed} of memory, of {available}; {predicted} were predicted at the peak."

    def to_json(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        ratios = {"bytes_ratio": self.bytes_ratio, "flops_ratio": self.flops_ratio}
        verdict = {"exact": self.exact, "near": self.near, "as_predicted": self.as_predicted}
        return {**asdict(self), "mesh": dict(self.mesh.shape), **verdict, **ratios}

    def __str__(self) -> str:
        return str(self.report())

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()


@outside_mesh(keep_auto=True)
def verify(
    strategy: Strategy,
    fn: Callable,
    *args: Any,
    target: str = "shardy",
    cycles: bool = False,
    lowering: str = "manual",
    compiler_options: Options | None = None,
    bucket_bytes: int | None = None,
    save_graphs: str | os.PathLike[str] | None = None,
    numbers: bool = True,
    progress: Progress = silent,
) -> Verification | PipelineVerification:
    """What a strategy predicts next to what the target makes of its program, and its kernels' numbers next to those without them.

    Args:
        strategy: of this function; loaded ones too.
        fn, args: the program, with arguments as for `search`.
        target: ``"shardy"`` reads the collectives of the lowered program, in milliseconds and without devices; ``"cpu"`` compiles for
            this process's devices and reads the compiled module; ``"tpu"`` and ``"gpu"`` compile ahead of time for the strategy's cluster,
            in seconds and without one, and need the compiler installed. Where this process has as many GPUs as the mesh, ``"gpu"`` compiles
            for those.
        cycles: of ``"tpu"``, whether to ask for the compiler's schedule too, which takes up to minutes.
        compiler_options, bucket_bytes: of a target that compiles, as for `Strategy.apply`.
        save_graphs: as for `Strategy.apply`; a target that compiles writes what it compiled.
        numbers: whether numbers of kernels are compared, forward and gradients, at a reduced size on this process's devices: fused
            attention with the operations that it replaces, kernels in parts with whole ones. It takes seconds a kernel.
        lowering: as for `Strategy.apply`; of ``"constraints"`` the target ``"shardy"`` asks the partitioner for its explicit collectives.
        progress: called with what is being compiled and the fraction that is done.

    Raises:
        StrategyError: the function is not the strategy's program, or the target is unknown.
        ClusterError: fewer CPU devices than the mesh has places, or a TPU or GPU is asked for and the strategy's cluster has none.
        CompilerError: the compiler is not installed, or fails on the program; a program that does not fit is a result, no error.

    >>> import jax.numpy as jnp
    >>> import autoshard
    >>> program = lambda w, x: jnp.tanh(x @ w)
    >>> arguments = jnp.ones((64, 64)), jnp.ones((512, 64))
    >>> strategy = autoshard.search(program, *arguments, cluster="cpu:8", mesh={"data": 8})
    >>> verify(strategy, program, *arguments).exact
    True
    """
    if not isinstance(strategy, Strategy):
        raise StrategyError(
            f"verify takes a strategy, then its function and the arguments; got {strategy!r:.60} first. Call verify(strategy, fn, *args)."
        )
    if target not in TARGETS:
        raise StrategyError(f"a target of verify is one of {sorted(TARGETS)}, got {target!r}. Use one of those.")
    if cycles and not TARGETS[target].cycles:
        raise StrategyError(f"cycles are what the TPU compiler schedules, got target {target!r}. Use target='tpu', or leave cycles out.")
    record = strategy.record
    if record.pipeline is not None:
        if lowering != "manual":
            raise StrategyError(f"tasks of a pipeline are lowered by 'manual', got lowering={lowering!r}. Leave it out.")
        own = {**bucket_options(target, bucket_bytes), **(compiler_options or {})}
        found = _verified_stages(strategy, fn, args, target, cycles, own, save_graphs, progress)
        return replace(found, numbers=reduced_numbers(fn, args, record, strategy._traced) if numbers else ())
    against = TARGETS[target]
    devices = devices_here(target) if against.here else []
    topology = _topology(record, target) if against.ahead and len(devices) < record.mesh.size else None
    mesh = jax_mesh(record.mesh, devices) if against.here and topology is None else None
    options = {**bucket_options(target, bucket_bytes), **(compiler_options or {})}
    step = Step(fn, record, mesh, lowering, strategy._traced, options, save_graphs)
    stored = PaddedArguments(record).as_stored(args)
    lowered = step.lower(*stored, platform=topology.platform) if topology else step.lower(*stored)
    if against.here or against.ahead:
        progress(f"compiling {record.program.name} for {_compiled_for(record, target)}", 0.0)
    if not (against.here or against.ahead):
        found = _Actual(explicit_collectives(lowered, record.mesh))
    elif topology:
        found = _ahead(compile_ahead(lowered, record.mesh, topology, cycles, options), record, cycles)
    else:
        found = _compiled(lowered.compile(), record.mesh)
    if save_graphs is not None and found.text:
        save_text(save_graphs, record.program, "compiled.txt", found.text)
    verified = _verification(record, target, found, lowered.as_text().count("sdy.sharding_constraint"))
    operations = _operations(strategy, fn, args, found, cycles) if found.alive else ()
    compared = reduced_numbers(fn, args, record, strategy._traced) if numbers else ()
    return replace(verified, operations=operations, numbers=compared)


def _verification(record: Record, target: str, found: _Actual, n_constraints: int, peak_bytes: float | None = None) -> Verification:
    """What a record predicts next to what a target made of its program."""
    predicted = record.cost.compiled_peak_bytes if TARGETS[target].cycles else record.cost.peak_bytes
    return Verification(
        program=record.program.name,
        mesh=record.mesh,
        target=target,
        rows=() if found.flops is None and found.fits is False else compare(expected(record, target), found.collectives),
        n_ops=int(record.stats["n_ops"]),
        n_constraints=n_constraints,
        predicted_flops=record.cost.compiled_flops,
        predicted_compute_seconds=record.cost.compute_seconds,
        predicted_peak_bytes=predicted if peak_bytes is None else peak_bytes,
        actual_flops=found.flops and found.flops.total,
        rematerialised_flops=found.flops and found.flops.rematerialised,
        actual_compute_seconds=found.compute_seconds,
        actual_peak_bytes=found.peak_bytes,
        needed_bytes=found.needed_bytes,
        available_bytes=found.available_bytes,
        fits=found.fits,
        predicted_for=record.cluster["name"] if TARGETS[target].here and record.cluster["device"]["kind"] != target else "",
    )


def _verified_stages(
    strategy: Strategy,
    fn: Callable,
    args: tuple,
    target: str,
    cycles: bool,
    options: Options,
    save_graphs: str | os.PathLike[str] | None,
    progress: Progress,
) -> PipelineVerification:
    """What a pipeline predicts next to what the target makes of each stage's programs."""
    record, against = strategy.record, TARGETS[target]
    assert record.pipeline is not None
    devices = devices_here(target) if against.here else []
    ahead = against.ahead and len(devices) < record.mesh.size
    if against.here and not ahead:
        meshes: Sequence[Any] = pipeline_meshes(record, devices)
    else:
        meshes = [abstract_mesh(stage.record.mesh) for stage in record.pipeline.stages]
    platform = _topology(record, target).platform if ahead else None if against.here else ANY_PLATFORM

    def actual(lowered: jax.stages.Lowered, own: Record) -> _Actual:
        if ahead:
            return _ahead(compile_ahead(lowered, own.mesh, _topology(own, target), cycles, options), own, cycles)
        if against.here:
            return _compiled(lowered.compile(dict(options) or None), own.mesh)  # pyright: ignore[reportArgumentType]
        return _Actual(explicit_collectives(lowered, own.mesh))

    stages, n = [], len(record.pipeline.stages)
    for stage in stage_programs(fn, args, record, strategy._traced, meshes, platform):
        if against.here or against.ahead:
            progress(f"compiling stage {len(stages) + 1} of {n} for {_compiled_for(record, target)}", len(stages) / n)
        found = [(program, actual(program.lowered, stage.record)) for program in stage.programs]
        all_of_it = together(found)
        if save_graphs is not None and all_of_it.text:
            save_text(save_graphs, stage.record.program, "compiled.txt", all_of_it.text)
        stages.append(_verification(stage.record, target, all_of_it, 0, stage.peak_bytes))
    return PipelineVerification(record.program.name, target, tuple(stages))


def _operations(strategy: Strategy, fn: Callable, args: tuple, found: _Actual, cycles: bool) -> tuple[OperationDifference, ...]:
    """The operations in which a compiled program differs most from its prediction."""
    judged = (strategy if strategy._traced is not None else strategy.with_program(fn, *args))._judged
    clock = Cluster.from_dict(strategy.record.cluster).device.clock_hertz if cycles else 0.0
    return () if judged is None else by_operation(judged, found.text, found.alive, clock)


def _compiled_for(record: Record, target: str) -> str:
    """The devices that a target compiles for, in words."""
    return record.cluster["name"] if TARGETS[target].ahead else "this machine's devices"


def expected(record: Record, target: str) -> tuple[Collective, ...]:
    """The collectives that a target is expected to have: the planned ones, or what the compiler of the strategy's cluster makes of them."""
    planned = record.cost.collectives
    if target != record.cluster["device"]["kind"]:
        return planned
    cluster = Cluster.from_dict(record.cluster)
    return tuple(in_phases(planned, record.mesh, cluster)) if TARGETS[target].slices and cluster.levels else as_compiled(planned)


@dataclass(frozen=True, slots=True)
class _Actual:
    """What a target says of a program; None of what it does not."""

    collectives: tuple[Collective, ...] = ()
    flops: Flops | None = None
    compute_seconds: float | None = None
    peak_bytes: float | None = None
    needed_bytes: float | None = None
    available_bytes: float | None = None
    fits: bool | None = None
    text: str = ""
    alive: tuple[tuple[str, float], ...] = ()


def _compiled(compiled: jax.stages.Compiled, mesh: Mesh) -> _Actual:
    """What XLA made for devices of this process."""
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    peak = None if memory is None else float(peak_bytes_of(memory))
    return _Actual(collectives_of(text, mesh), dot_flops(text), peak_bytes=peak, text=text)


def _ahead(ahead: Ahead, record: Record, cycles: bool) -> _Actual:
    """What the compiler made, or that it refused."""
    if not ahead.hlo:
        return _Actual(needed_bytes=ahead.needed_bytes, available_bytes=ahead.available_bytes, fits=False)
    clock = Cluster.from_dict(record.cluster).device.clock_hertz
    return _Actual(
        collectives_of(ahead.hlo, record.mesh),
        dot_flops(ahead.hlo),
        compute_seconds=scheduled_cycles(ahead.hlo) / clock if cycles and clock else None,
        peak_bytes=ahead.peak_bytes,
        needed_bytes=ahead.needed_bytes,
        available_bytes=ahead.available_bytes,
        fits=ahead.fits,
        text=ahead.hlo,
        alive=ahead.alive,
    )


def _topology(record: Record, target: str) -> Topology:
    """The devices of the strategy's cluster, as their compiler knows them."""
    cluster = Cluster.from_dict(record.cluster)
    if cluster.device.kind != target:
        raise ClusterError(
            f"verifying for {target.upper()}s compiles for those of the strategy's own cluster, and this strategy is for {cluster.name!r}. "
            f"Search with cluster='{TARGETS[target].example}, or use another target."
        )
    return topology_of(cluster)


def _collective_row(row: Row) -> tuple[str, ...]:
    counts = format_count(row.predicted_count), format_count(row.actual_count)
    sizes = format_bytes(row.predicted_bytes), format_bytes(row.actual_bytes)
    differs = "" if row.agrees else "differs"
    if differs and sizes[0] == sizes[1]:
        differs += f" by {format_bytes(abs(row.actual_bytes - row.predicted_bytes))}"
    return row.kind, ", ".join(row.mesh_axes), *counts, *sizes, differs


def peak_bytes_of(memory: Any) -> int:
    """What a device holds at most: XLA:CPU's own peak leaves temporaries out."""
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    return max(held, memory.peak_memory_in_bytes)
