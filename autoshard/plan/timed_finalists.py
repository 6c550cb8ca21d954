"""Finalists in the order of what they take on the program's own devices, with arguments of zeros; several processes time them together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.cluster import CATALOGUE, Cluster
from autoshard.errors import ClusterError, CompilerError, OutOfTime
from autoshard.lower import jax_mesh
from autoshard.pipeline.sending import absent, is_here
from autoshard.plan.agreement import everyones
from autoshard.plan.finalists import Board
from autoshard.run.leaf_shardings import step_meshes
from autoshard.run.padded import PaddedArguments
from autoshard.run.pipeline_step import PipelineStep
from autoshard.run.structure import KEYS
from autoshard.strategy import Record
from autoshard.verify import collectives_of, devices_here, dot_flops, peak_bytes_of

RUNS = 5  # after one that warms up; the median counts


@dataclass(frozen=True, slots=True)
class FinalistDevices:
    """Devices of a cluster's kind, as many as it has."""

    devices: tuple[Any, ...]

    @property
    def name(self) -> str:
        """As the strategy records it."""
        return self.devices[0].device_kind

    @property
    def version(self) -> str:
        """As the strategy records it."""
        return f"jaxlib {version('jaxlib')}"

    def decide(self, board: Board) -> None:
        """Records what each takes.

        Raises:
            OutOfTime: the time is over; what is recorded by then holds.
        """
        for number in range(len(board.found)):
            board.tell(f"timing on {len(self.devices)} devices", number, number)
            run, figures = None, {}
            with _noting_failure(board, number):
                run, figures = self._compiled(board, number)
            unable = [process for process, able in enumerate(everyones(run is not None)) if not able]
            if run is None:
                continue
            if unable:
                board.note(number, outcome="failed", reason=f"process {unable[0]} cannot run it")
                continue
            with _noting_failure(board, number):
                board.note(number, outcome="slower", measure="timed", seconds=run(board.check_time), **figures)

    def _compiled(self, board: Board, number: int) -> tuple[Callable[[Callable[[], None]], float] | None, dict[str, Any]]:
        """What times a finalist, None where it does not fit, and what is known of it before it runs."""
        record = board.strategies[number].record
        if record.pipeline is not None:
            return self._pipeline(board, number), {}
        mesh = jax_mesh(record.mesh, self.devices)
        lowered = board.lowered(number, record.cluster["device"]["kind"], mesh)
        compiled = lowered.compile()
        peak = peak_bytes_of(compiled)
        figures: dict[str, Any] = {"peak_bytes": peak}
        with suppress(CompilerError):
            text = compiled.as_text() or ""
            sent = collectives_of(text, record.mesh)
            figures |= {"collective_bytes": float(sum(one.bytes * one.count for one in sent)), "flops": dot_flops(text).total}
        if board.exceeds(peak):
            board.note(number, outcome="does not fit", **figures)
            return None, figures
        return partial(_median_seconds, compiled, _zeros(lowered, record, mesh), bool(record.donate_argnums)), figures

    def _pipeline(self, board: Board, number: int) -> Callable[[Callable[[], None]], float]:
        """What times a pipeline, whose programs are compiled in the run that warms up."""
        strategy = board.strategies[number]
        record = strategy.record
        step = PipelineStep(board.fn, record, step_meshes(record, self.devices), traced=strategy._traced)
        program, _ = step.program(*PaddedArguments(record).as_stored(board.args))

        def zeros() -> tuple:
            there = zip(program.traced.jaxpr.jaxpr.invars, program.in_shardings, strict=True)
            return program.traced.in_tree.unflatten([_zero_there(v.aval, sharding) for v, sharding in there])

        return partial(_median_seconds, program.call, zeros, bool(record.donate_argnums))


@contextmanager
def _noting_failure(board: Board, number: int) -> Iterator[None]:
    """Records whatever lowering, compiling or a run meets: the other finalists may do."""
    try:
        yield
    except OutOfTime:
        raise
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            board.note(number, outcome="does not fit")
        else:
            board.failed(number, error)


def devices_of(cluster: Cluster) -> FinalistDevices:
    """This process's devices of a cluster's kind.

    Raises:
        ClusterError: there are none, or too few.
    """
    devices = devices_here(cluster.device.kind)
    named = CATALOGUE[cluster.device.name].jax_kinds if cluster.device.name in CATALOGUE else ()
    alike = [device for device in devices if not named or device.device_kind in named]
    if len(alike) < cluster.n_devices:
        virtual = cluster.interconnect.kind == "host"
        advice = f", or set XLA_FLAGS=--xla_force_host_platform_device_count={cluster.n_devices}" if virtual else ""
        raise ClusterError(
            f"finalists are timed on {cluster.n_devices} devices as {cluster.name!r} has them, and this process has {len(alike)}. "
            f"Use confirm='compiler'{advice}."
        )
    return FinalistDevices(tuple(alike[: cluster.n_devices]))


def _zeros(lowered: jax.stages.Lowered, record: Record, mesh: jax.sharding.Mesh) -> Callable[[], tuple]:
    """What makes the arguments, sharded as they are made: no device ever holds one whole that is sharded."""
    infos, tree = jax.tree.flatten(lowered.args_info[0])
    specs = [PartitionSpec(*tensor.spec) if all(tensor.shape) else PartitionSpec() for tensor in record.arguments]
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    return jax.jit(lambda: tree.unflatten([_zero(info) for info in infos]), out_shardings=tree.unflatten(shardings))


def _zero_there(info: Any, sharding: NamedSharding) -> Any:
    """An array of zeros on the devices of a stage; in processes that have none of these, one without data."""
    if not is_here(sharding):
        return absent(info.shape, info.dtype, sharding)
    return jax.jit(lambda: _zero(info), out_shardings=sharding)()


def _zero(info: Any) -> jax.Array:
    """An array of zeros, of keys one of their kind many times."""
    if jnp.issubdtype(info.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0, impl=KEYS.get(str(info.dtype))), info.shape)
    return jnp.zeros(info.shape, info.dtype)


def _median_seconds(compiled: Callable, arguments: Callable[[], tuple], donates: bool, between: Callable[[], None]) -> float:
    """The median of some runs after one that warms up; what a run is given to keep is made anew."""
    given = jax.block_until_ready(arguments())
    found = []
    for run in range(1 + RUNS):
        between()
        if run and donates:
            given = jax.block_until_ready(arguments())
        started = time.perf_counter()
        jax.block_until_ready(compiled(*given))
        found.append(time.perf_counter() - started)
    return statistics.median(found[1:])
