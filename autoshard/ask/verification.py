"""A strategy held against what partitioners and compilers really make of its program."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from autoshard.ask.pipeline_verification import PipelineVerification, together
from autoshard.ask.reduced_numbers import reduced_numbers
from autoshard.ask.strategy import Strategy
from autoshard.ask.verified import Verification
from autoshard.ask.verified_operations import OperationDifference, by_operation
from autoshard.cluster import Cluster
from autoshard.errors import ClusterError, StrategyError
from autoshard.ir import Collective, Mesh, as_compiled
from autoshard.lower import jax_mesh
from autoshard.lower.opaque import ANY_PLATFORM
from autoshard.progress import Progress, silent
from autoshard.run.leaf_shardings import step_meshes
from autoshard.run.padded import PaddedArguments
from autoshard.run.saved_graphs import save_text
from autoshard.run.stage_programs import lowered_parts
from autoshard.run.step import Step, platform_options
from autoshard.strategy import Record
from autoshard.trace import outside_mesh
from autoshard.verify import (
    TARGETS,
    Ahead,
    Clock,
    Flops,
    Options,
    Topology,
    collectives_of,
    compare,
    compile_ahead,
    compiled_kernels,
    devices_here,
    dot_flops,
    explicit_collectives,
    in_phases,
    peak_bytes_of,
    seconds_by_op,
    topology_of,
)


@outside_mesh(keep_auto=True)
def verify(
    strategy: Strategy,
    fn: Callable[..., Any],
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
        own = {**platform_options(target, bucket_bytes), **(compiler_options or {})}
        found = _verified_stages(strategy, fn, args, target, cycles, own, save_graphs, progress)
        return replace(found, numbers=reduced_numbers(fn, args, record, strategy._traced) if numbers else ())
    against = TARGETS[target]
    devices = devices_here(target) if against.here else []
    topology = _topology(record, target) if against.ahead and len(devices) < record.mesh.size else None
    mesh = jax_mesh(record.mesh, devices) if against.here and topology is None else None
    options = {**platform_options(target, bucket_bytes), **(compiler_options or {})}
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
    fn: Callable[..., Any],
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
    meshes = step_meshes(record, devices) if against.here and not ahead else None
    platform = _topology(record, target).platform if ahead else None if against.here else ANY_PLATFORM

    def actual(lowered: jax.stages.Lowered, own: Record) -> _Actual:
        if ahead:
            return _ahead(compile_ahead(lowered, own.mesh, _topology(own, target), cycles, options), own, cycles)
        if against.here:
            return _compiled(lowered.compile(dict(options) or None), own.mesh)  # pyright: ignore[reportArgumentType]
        return _Actual(explicit_collectives(lowered, own.mesh))

    stages, n = [], sum(len(each.stages) for each in record.pipeline.passes)
    for stage in lowered_parts(fn, args, record, strategy._traced, platform, meshes):
        if against.here or against.ahead:
            progress(f"compiling stage {len(stages) + 1} of {n} for {_compiled_for(record, target)}", len(stages) / n)
        found = [(program, actual(program.lowered, stage.record)) for program in stage.programs]
        all_of_it = together(found)
        if save_graphs is not None and all_of_it.text:
            save_text(save_graphs, stage.record.program, "compiled.txt", all_of_it.text)
        stages.append(_verification(stage.record, target, all_of_it, 0, stage.peak_bytes))
    return PipelineVerification(record.program.name, target, tuple(stages))


def _operations(strategy: Strategy, fn: Callable[..., Any], args: tuple, found: _Actual, cycles: bool) -> tuple[OperationDifference, ...]:
    """The operations in which a compiled program differs most from its prediction."""
    judged = (strategy if strategy._traced is not None else strategy.with_program(fn, *args))._judged
    clock = _clock(strategy.record) if cycles else None
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
    text = compiled.as_text() or ""
    return _Actual(collectives_of(text, mesh), dot_flops(text), peak_bytes=peak_bytes_of(compiled), text=text)


def _ahead(ahead: Ahead, record: Record, cycles: bool) -> _Actual:
    """What the compiler made, or that it refused."""
    if not ahead.hlo:
        return _Actual(needed_bytes=ahead.needed_bytes, available_bytes=ahead.available_bytes, fits=False)
    clock = _clock(record) if cycles else None
    return _Actual(
        collectives_of(ahead.hlo, record.mesh),
        dot_flops(ahead.hlo),
        compute_seconds=sum(seconds_by_op(compiled_kernels(ahead.hlo), clock).values()) if clock else None,
        peak_bytes=ahead.peak_bytes,
        needed_bytes=ahead.needed_bytes,
        available_bytes=ahead.available_bytes,
        fits=ahead.fits,
        text=ahead.hlo,
        alive=ahead.alive,
    )


def _clock(record: Record) -> Clock | None:
    """The clock of a strategy's devices on the scale of predictions; None where their compiler estimates no cycles."""
    device = Cluster.from_dict(record.cluster).device
    return Clock.of(device) if device.clock_hertz else None


def _topology(record: Record, target: str) -> Topology:
    """The devices of the strategy's cluster, as their compiler knows them."""
    cluster = Cluster.from_dict(record.cluster)
    if cluster.device.kind != target:
        raise ClusterError(
            f"verifying for {target.upper()}s compiles for those of the strategy's own cluster, and this strategy is for {cluster.name!r}. "
            f"Search with cluster='{TARGETS[target].example}, or use another target."
        )
    return topology_of(cluster)
