"""Is what ``auto`` finds at least as fast as what experts write by hand, by the TPU compiler's own schedule?

``python -m benchmarks.quality`` searches train steps with ``auto`` on TPU slices, the mesh given and free, and puts beside it what experts
write for the same program:

- *data parallel*, and *fully sharded* (parameters and optimizer state split as well);
- *tensor parallel* over 2, 4, ... devices, by hand-written specs of the weights (experts are split instead where there are some), each with
  and without *sequence parallelism* of the residual stream and with and without its state *fully sharded* over the rest.

Experts' plans are plain `jax.jit` with shardings of the arguments, and constraints of a transformer's residual stream: what lies between
is the partitioner's choice. All are compiled ahead of time to the end. A schedule's time is the compiler's cycles at the chip's clock, in
the compiler's order, with each collective's time (`benchmarks.cost_model.ranking`); memory is what the compiler's allocator takes.
Of each kind of plan the one predicted fastest is compiled, unless it is predicted to take `HOPELESS` times the fastest.
With ``--predicted`` nothing is compiled, which takes seconds and needs no TPU compiler: the judge's makespans are compared.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import product
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.progress import Progress, TaskID

import autoshard
from autoshard import Cluster, Strategy
from autoshard.api.step import Step
from autoshard.cli.terminal import show
from autoshard.cost.collectives import Communication
from autoshard.errors import AutoshardError, ShardingError
from autoshard.lower import abstract_mesh
from autoshard.render import Paragraph, Part, Report, Table, format_bytes, format_seconds
from autoshard.verify import scheduled_seconds
from benchmarks import models
from benchmarks.cost_model.compiled import compiled_ahead
from benchmarks.progress import progress_bar

SUMMARY = "Is what auto finds at least as fast as what experts write by hand, by the TPU compiler's own schedule?"
GIVEN = {"v5e:2x4": {"data": 2, "model": 4}, "v5p:2x2x2": {"data": 4, "model": 2}, "v5e:4x4": {"data": 4, "model": 4}}
SIZES: dict[str, dict[str, Any]] = {  # of `models.MODELS`: a chip holds every plan's state, and most compile in less than a minute
    "gpt": {},
    "gpt_wide": {"width": 2048, "batch": 8},
    "gpt_scan": {},
    "llama": {"batch": 16},
    "llama_scan": {"batch": 8},
    "moe": {},
    "moe_sorted": {},
    "mlp": {"batch": 1024},
    "resnet": {},
    "unet": {},
    "lstm": {},
}
ALIKE = {"gpt_wide": "gpt"}  # whose model and specs a program takes
QUICK = ("gpt", "mlp")
HOPELESS = 1.5
LEAST_SPLIT = 128  # a smaller dimension is not split further to shard state
NOISE = 0.1  # how far the judge's predictions of a schedule may be off


@dataclass(frozen=True, slots=True)
class Plan:
    """A sharding of a program.

    Attributes:
        kind: in words; the mesh is not part of it.
        function, args: the program, with the constraints that are part of the plan.
        strategy: what is predicted of it.
        expert: whether it was written by hand.
    """

    kind: str
    function: Callable
    args: tuple
    strategy: Strategy
    expert: bool = True

    def lowered(self) -> jax.stages.Lowered:
        """The program for the TPU compiler: an expert's as `jax.jit` takes it."""
        record = self.strategy.record
        if not self.expert:
            return Step(self.function, record, None).lower(*self.args, platform="tpu")
        mesh = abstract_mesh(record.mesh)
        sharded = partial(jax.tree.map, lambda spec: NamedSharding(mesh, spec), is_leaf=lambda x: isinstance(x, P))
        entering, leaving = sharded(self.strategy.in_specs), sharded(self.strategy.out_specs)
        with jax.sharding.use_abstract_mesh(mesh):
            jitted = jax.jit(self.function, in_shardings=entering, out_shardings=leaving, donate_argnums=0)
            return jitted.trace(*self.args).lower(lowering_platforms=("tpu",))


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of a plan: seconds and bytes a device; those that the compiler says are None where it was not asked or refused."""

    kind: str
    expert: bool
    mesh: str
    predicted_seconds: float
    predicted_bytes: float
    scheduled_seconds: float | None
    needed_bytes: float | None
    fits: bool

    @property
    def seconds(self) -> float:
        return self.predicted_seconds if self.scheduled_seconds is None else self.scheduled_seconds


def experts(name: str, cluster: Cluster) -> list[Plan]:
    """What experts write for a program: of each kind the plan that is predicted fastest, on whichever mesh."""
    best: dict[str, Plan] = {}
    for plan in _written(name, cluster):
        seconds = plan.strategy.cost.makespan_seconds
        if plan.kind not in best or seconds < best[plan.kind].strategy.cost.makespan_seconds:
            best[plan.kind] = plan
    return list(best.values())


def _written(name: str, cluster: Cluster) -> Iterator[Plan]:
    model, sizes, n = models.MODELS[ALIKE.get(name, name)], SIZES[name], cluster.n_devices
    batch = {path: spec for path, spec in model.tensor_parallel.items() if not path.startswith("state")}
    streams = [P("data"), P("data", "model")] if "stream" in inspect.signature(model.make).parameters else [None]

    def program(stream: P | None) -> models.Program:
        return model.make(**sizes) if stream is None else model.make(**sizes, stream=stream)

    yield from _plan("data parallel", program(streams[0]), cluster, {"data": n}, batch)
    yield from _plan("fully sharded", program(streams[0]), cluster, {"data": n}, batch, state=True)
    for split in (2**k for k in range(1, n.bit_length()) if n % 2**k == 0):
        mesh = {"data": n // split, "model": split}
        for stream in streams:
            for state in (False, True) if split < n else (False,):
                kind = f"tensor parallel{', sequence' if stream and len(stream) > 1 else ''}{', fully sharded' if state else ''}"
                yield from _plan(kind, program(stream), cluster, mesh, model.tensor_parallel, state)


def _plan(
    kind: str, program: models.Program, cluster: Cluster, mesh: Mapping[str, int], specs: Mapping[str, P], state: bool = False
) -> Iterator[Plan]:
    """The plan of some specs; none where they do not divide."""
    function, args = program
    specs = _fully_sharded(args, mesh, specs) if state else dict(specs)
    try:
        yield Plan(kind, function, args, autoshard.evaluate(function, *args, cluster=cluster, mesh=mesh, in_specs=specs, donate_argnums=0))
    except ShardingError:
        return


def _fully_sharded(args: tuple, mesh: Mapping[str, int], specs: Mapping[str, P]) -> dict[str, P]:
    """The specs with every array of the state split over the data axis too, on the largest dimension that is left and divides."""
    found = {path: spec for path, spec in specs.items() if not path.startswith("state")}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(args[0]):
        path = f"state{jax.tree_util.keystr(keys)}"
        written = [tuple(spec) for pattern, spec in specs.items() if fnmatchcase(path, pattern.replace("[", "[[]"))]
        spec = list(written[-1] if written else ()) + [None] * (leaf.ndim - len(written[-1] if written else ()))
        free = [d for d, size in enumerate(leaf.shape) if spec[d] is None and size % mesh["data"] == 0 and size >= LEAST_SPLIT]
        if free:
            spec[max(free, key=lambda d: leaf.shape[d])] = "data"
        found[path] = P(*spec)
    return found


def searched(name: str, cluster: Cluster) -> list[Plan]:
    """What ``auto`` finds within the chip's memory: mesh free, and given."""
    function, args = models.MODELS[ALIKE.get(name, name)].make(**SIZES[name])
    meshes = {"auto": None, "auto, mesh given": GIVEN[cluster.name]}
    options: dict[str, Any] = {"cluster": cluster, "searcher": "auto", "donate_argnums": 0}
    return [Plan(kind, function, args, autoshard.search(function, *args, mesh=mesh, **options), False) for kind, mesh in meshes.items()]


def measured(plan: Plan, cluster: Cluster, compiles: bool) -> Found:
    """What the compiler says of a plan, or only what is predicted of it."""
    record, cost = plan.strategy.record, plan.strategy.cost
    seconds, needed, fits = None, None, cost.peak_bytes <= cluster.memory_limit_bytes
    if compiles:
        ahead = compiled_ahead(plan.lowered(), record.mesh, cluster.name, cycles=True)
        fits, needed = ahead.fits, ahead.needed_bytes
        if fits:
            seconds = scheduled_seconds(ahead.hlo, record.mesh, Communication(cluster.links(record.mesh)), cluster.device.clock_hertz)
    return Found(plan.kind, plan.expert, str(record.mesh), cost.makespan_seconds, cost.peak_bytes, seconds, needed, fits)


def compare(name: str, cluster: Cluster, compiles: bool, tell: Callable[[str], None]) -> list[Found]:
    """All plans of a program on a cluster, those of ``auto`` first."""
    tell("searching")
    plans = searched(name, cluster)
    tell("evaluating what experts write")
    written = experts(name, cluster)
    fitting = [one.strategy.cost.makespan_seconds for one in written if one.strategy.cost.peak_bytes <= cluster.memory_limit_bytes]
    fastest = min(fitting, default=math.inf)
    found = []
    for plan in [*plans, *(one for one in written if one.strategy.cost.makespan_seconds <= HOPELESS * fastest)]:
        tell(f"compiling {plan.kind}" if compiles else plan.kind)
        found.append(measured(plan, cluster, compiles))
    return found


def ratios(found: Sequence[Found]) -> dict[str, float]:
    """How many times the fastest expert's seconds each of ``auto``'s plans takes; infinite where it does not fit."""
    best = min((one.seconds for one in found if one.expert and one.fits), default=math.inf)
    return {one.kind: one.seconds / best if one.fits else math.inf for one in found if not one.expert}


def report(results: Mapping[tuple[str, str], list[Found]]) -> Report:
    """A table for each program, and what they come to."""
    parts: list[Part] = []
    for (name, cluster), found in results.items():
        rows = tuple(
            (
                one.kind,
                one.mesh,
                format_seconds(one.predicted_seconds),
                format_seconds(one.scheduled_seconds) if one.scheduled_seconds is not None else "",
                format_bytes(one.predicted_bytes),
                format_bytes(one.needed_bytes) if one.needed_bytes is not None else "",
                "" if one.fits else "does not fit",
            )
            for one in sorted(found, key=lambda one: (not one.fits, one.seconds))
        )
        columns = (f"{name} on {cluster}", "mesh", ">predicted", ">scheduled", ">predicted peak", ">allocated", "")
        compared = ", ".join(f"{kind}: {ratio:.3f} x the best expert" for kind, ratio in ratios(found).items())
        parts += [Table(columns, rows), Paragraph(compared)]
    parts.append(Paragraph(_summary([ratio for found in results.values() for ratio in ratios(found).values()])))
    return Report("What auto finds, beside what experts write", tuple(parts))


def _summary(found: Sequence[float]) -> str:
    finite = [ratio for ratio in found if math.isfinite(ratio)]
    slower = sum(ratio > 1 + NOISE for ratio in found)
    mean = statistics.geometric_mean(finite) if finite else math.nan
    return (
        f"Of {len(found)} searches {len(found) - len(finite)} do not fit, and {slower} take over {NOISE:.0%} longer than the best expert's "
        f"plan; geometric mean {mean:.3f} of its seconds, worst {max(found, default=math.nan):.3f}."
    )


def _tell(progress: Progress, task: TaskID, where: str, what: str) -> None:
    progress.update(task, description=f"{where}: {what}")


def main(argv: Sequence[str] | None = None) -> int:
    """Compares and prints; the exit code is 1 where an answer of ``auto`` is slower than an expert's beyond the noise, or does not fit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=SUMMARY)
    parser.add_argument("--models", nargs="+", choices=tuple(SIZES), help="programs; all unless given")
    parser.add_argument("--clusters", nargs="+", choices=tuple(GIVEN), help="slices; all unless given")
    parser.add_argument("--quick", action="store_true", help=f"{' and '.join(QUICK)} on the first slice")
    parser.add_argument("--predicted", action="store_true", help="compile nothing, and compare what is predicted")
    parser.add_argument("--keep", metavar="FOLDER", help="keep what the compiler said there, and read it instead of compiling again")
    parser.add_argument("--memory", type=float, default=24.0, metavar="GB", help="address space this process may use (default 24)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    resource.setrlimit(resource.RLIMIT_AS, (limit := int(options.memory * 1e9), limit))
    programs = options.models or (QUICK if options.quick else tuple(SIZES))
    clusters = options.clusters or tuple(GIVEN)[: 1 if options.quick else None]
    results: dict[tuple[str, str], list[Found]] = {}
    with tempfile.TemporaryDirectory() as folder, progress_bar(options.json) as progress:
        os.environ["AUTOSHARD_BENCHMARK_KEEP"] = options.keep or folder
        task = progress.add_task("", total=len(programs) * len(clusters))
        try:
            for name, cluster in product(programs, clusters):
                tell = partial(_tell, progress, task, f"{name} on {cluster}")
                results[name, cluster] = compare(name, Cluster.parse(cluster), not options.predicted, tell)
                progress.advance(task)
        except AutoshardError as error:
            print(error, file=sys.stderr)
            return 1
        except KeyboardInterrupt:  # what is done is shown, and --keep has it
            print(f"interrupted after {len(results)} of {len(programs) * len(clusters)} comparisons", file=sys.stderr)
    every = [ratio for found in results.values() for ratio in ratios(found).values()]
    if options.json:
        rows = [{"program": name, "cluster": cluster, **asdict(one)} for (name, cluster), found in results.items() for one in found]
        print(json.dumps({"plans": rows, "summary": _summary(every)}, indent=1))
    else:
        show(report(results))
    return int(any(ratio > 1 + NOISE for ratio in every))


if __name__ == "__main__":
    sys.exit(main())
