"""Is what ``auto`` finds as fast as what experts write by hand, and as XLA's auto-sharding, by the TPU compiler's own schedule?

``python -m benchmarks.quality`` searches train steps with ``auto`` on TPU slices, the mesh given and free, and compares its plans with
those of rivals for the same program:

- *data parallel*, and *fully sharded* (parameters and optimizer state split as well);
- *tensor parallel* over 2, 4, ... devices, by hand-written specs of the weights (experts are split instead where there are some), each with
  and without *sequence parallelism* of the residual stream and with and without its state *fully sharded* over the rest;
- *XLA auto-sharding*, of the last release that has it (`benchmarks.xla_auto`), on the mesh that is given to ``auto``.

Experts' plans are plain `jax.jit` with shardings of the arguments, and constraints of a transformer's residual stream: the rest is the
partitioner's choice. All are compiled ahead of time to the end. A schedule's time is the compiler's cycles at the chip's clock, in
the compiler's order, with each collective's time (`benchmarks.cost_model.ranking`); memory is what the compiler's allocator takes.
Of each kind of an expert's plan the one predicted fastest is compiled, unless it is predicted to take `HOPELESS` times the fastest.
With ``--predicted`` nothing is compiled, which takes seconds and needs no TPU compiler: the judge's makespans are compared.

What was compiled is merged into a file of results, row by row: a run of some programs, clusters or plans leaves the others as they are.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import math
import os
import re
import resource
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.progress import Progress, TaskID

import autoshard
from autoshard import Cluster, Strategy
from autoshard.cli.terminal import show
from autoshard.cost.collectives import Communication
from autoshard.errors import AutoshardError, CompilerError, InfeasibleError, ShardingError
from autoshard.ir import Mesh
from autoshard.lower import abstract_mesh
from autoshard.render import Paragraph, Part, Report, Table, format_bytes, format_seconds
from autoshard.run.step import Step
from autoshard.verify import Ahead, Clock, scheduled_seconds
from autoshard.verify.aot import COMPILERS
from benchmarks import models, results, xla_auto
from benchmarks.cost_model.compiled import compiled_ahead
from benchmarks.progress import progress_bar
from benchmarks.results import OURS, XLA, Comparison, Row

SUMMARY = "Is what auto finds as fast as what experts write by hand, and as XLA's auto-sharding, by the TPU compiler's own schedule?"
GIVEN = {"v5e:2x4": {"data": 2, "model": 4}, "v5e:4x4": {"data": 4, "model": 4}, "v5p:2x2x2": {"data": 4, "model": 2}}


@dataclass(frozen=True, slots=True)
class Entry:
    """A model of `models.MODELS` and what differs from its sizes, as JSON has it."""

    model: str
    sizes: Mapping[str, Any]

    @property
    def program(self) -> models.Program:
        return models.MODELS[self.model].make(**self.sizes)


def _gpt(model: str) -> dict[str, Entry]:
    """A width of the GPT: unrolled, scanned, and scanned with remat, with each loss."""
    forms = {"": (model, {}), "_scan": (f"{model}_scan", {}), "_scan_remat": (f"{model}_scan", {"remat": True})}
    losses = {"": {}, "_one_hot": {"gathers": False}}
    return {f"{model}{form}{loss}": Entry(name, sizes | how) for form, (name, sizes) in forms.items() for loss, how in losses.items()}


PROGRAMS: dict[str, Entry] = {  # a chip holds every plan's state, and most compile in less than a minute
    **_gpt("gpt_125m"),
    **_gpt("gpt_1_3b"),
    "llama": Entry("llama", {"batch": 16}),
    "moe": Entry("moe", {}),
    "moe_sorted": Entry("moe_sorted", {}),
    "mlp": Entry("mlp", {"batch": 1024}),
    "resnet_50": Entry("resnet_50", {}),
    "unet": Entry("unet", {}),
    "lstm": Entry("lstm", {}),
    "vit": Entry("vit", {}),
    "t5": Entry("t5", {}),
    "dlrm": Entry("dlrm", {}),
}
QUICK = ("gpt_125m", "mlp")
HOPELESS = 1.5
LEAST_SPLIT = 128  # a smaller dimension is not split further to shard state
SAID = 200  # characters of a compiler's failure that a row keeps


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


def experts(name: str, cluster: Cluster) -> list[Plan]:
    """What experts write for a program: of each kind the plan that is predicted fastest, on whichever mesh."""
    best: dict[str, Plan] = {}
    for plan in _written(name, cluster):
        seconds = plan.strategy.cost.makespan_seconds
        if plan.kind not in best or seconds < best[plan.kind].strategy.cost.makespan_seconds:
            best[plan.kind] = plan
    return list(best.values())


def _written(name: str, cluster: Cluster) -> Iterator[Plan]:
    model, sizes, n = models.MODELS[PROGRAMS[name].model], PROGRAMS[name].sizes, cluster.n_devices
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


def searched(kind: str, name: str, cluster: Cluster) -> Plan:
    """What ``auto`` finds within the chip's memory, mesh free or given."""
    function, args = PROGRAMS[name].program
    mesh = None if kind == OURS[0] else GIVEN[cluster.name]
    options: dict[str, Any] = {"cluster": cluster, "searcher": "auto", "donate_argnums": 0}
    return Plan(kind, function, args, autoshard.search(function, *args, mesh=mesh, **options), False)


# --- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """How a run compares.

    Attributes:
        plans: patterns of the plans that it looks at.
        compiles: whether they are compiled, or only predicted.
        python: of the environment with XLA's auto-sharding; None where there is none.
        limit_seconds: of compiling with it.
    """

    plans: tuple[str, ...] = ("*",)
    compiles: bool = True
    python: Path | None = None
    limit_seconds: float = 600.0

    def takes(self, plan: str) -> bool:
        """Whether the run looks at a plan of this kind."""
        return any(fnmatchcase(plan, pattern) for pattern in self.plans) and (plan != XLA or self.python is not None)


def compare(name: str, cluster: Cluster, run: Run, tell: Callable[[str], None]) -> Iterator[Row]:
    """The plans of a program on a cluster as they are found, those of ``auto`` first."""
    found = _Comparison(name, cluster, run, fingerprint(*PROGRAMS[name].program), tell)
    yield from found.ours()
    yield from found.experts()
    yield from found.xla()


def fingerprint(function: Callable, args: tuple) -> str:
    """A name of the program as JAX lowers it, unsharded."""
    text = jax.jit(function, donate_argnums=0).trace(*args).lower(lowering_platforms=("tpu",)).as_text()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A program on a cluster in a run."""

    name: str
    cluster: Cluster
    run: Run
    fingerprint: str
    tell: Callable[[str], None]

    def ours(self) -> Iterator[Row]:
        for kind in filter(self.run.takes, OURS):
            self.tell(f"searching, {kind}")
            try:
                plan = searched(kind, self.name, self.cluster)
            except InfeasibleError as error:
                yield self._row(kind, "", failure=f"does not fit: {_short(error)}")
            else:
                yield self._measured(plan)

    def experts(self) -> Iterator[Row]:
        self.tell("evaluating what experts write")
        written = experts(self.name, self.cluster)
        fits = [plan.strategy.cost.makespan_seconds for plan in written if plan.strategy.cost.peak_bytes <= self.cluster.memory_limit_bytes]
        hopeless = HOPELESS * min(fits, default=math.inf)
        for plan in written:
            if plan.strategy.cost.makespan_seconds <= hopeless and self.run.takes(plan.kind):
                yield self._measured(plan)

    def xla(self) -> Iterator[Row]:
        if self.run.python is None or not self.run.compiles or not self.run.takes(XLA):
            return
        self.tell(f"compiling, {XLA}")
        entry, mesh = PROGRAMS[self.name], Mesh.of(GIVEN[self.cluster.name])
        found = xla_auto.auto_sharded(
            self.run.python, entry.model, entry.sizes, self.fingerprint, mesh, self.cluster, self.run.limit_seconds
        )
        versions = _versions(xla_auto.VERSIONS)
        if found.ahead is None:
            yield self._row(XLA, str(mesh), failure=_short(found.failure), search_seconds=found.search_seconds, versions=versions)
        else:
            compiled = self._compiled(found.ahead, mesh)
            yield self._row(XLA, str(mesh), search_seconds=found.search_seconds, versions=versions, **compiled)

    def _measured(self, plan: Plan) -> Row:
        """What the compiler says of a plan, or only what is predicted of it."""
        self.tell(f"compiling, {plan.kind}" if self.run.compiles else plan.kind)
        mesh, cost = plan.strategy.record.mesh, plan.strategy.cost
        known: dict[str, Any] = {"predicted_seconds": cost.makespan_seconds, "predicted_bytes": cost.peak_bytes}
        if not plan.expert:
            known["search_seconds"] = plan.strategy.stats["search_seconds"]
        if not self.run.compiles:
            known["failure"] = "" if cost.peak_bytes <= self.cluster.memory_limit_bytes else "does not fit"
            return self._row(plan.kind, str(mesh), **known)
        try:
            ahead = compiled_ahead(plan.lowered(), mesh, self.cluster.name, cycles=True)
        except CompilerError as error:
            return self._row(plan.kind, str(mesh), failure=_short(error), **known)
        return self._row(plan.kind, str(mesh), **known, **self._compiled(ahead, mesh))

    def _compiled(self, ahead: Ahead, mesh: Mesh) -> dict[str, Any]:
        if not ahead.fits:
            return {"needed_bytes": ahead.needed_bytes, "failure": "does not fit"}
        seconds = scheduled_seconds(ahead.hlo, mesh, Communication(self.cluster.links(mesh)), Clock(self.cluster.device.clock_hertz))
        return {"scheduled_seconds": seconds, "peak_bytes": ahead.peak_bytes, "needed_bytes": ahead.needed_bytes}

    def _row(self, plan: str, mesh: str, versions: str = "", **known: Any) -> Row:
        versions = versions or _versions({name: _version(name) for name in ("autoshard", "jax", "jaxlib", "libtpu")})
        return Row(self.name, self.cluster.name, plan, mesh, fingerprint=self.fingerprint, versions=versions, **known)


def _short(error: object) -> str:
    """The start of a failure, without the folders of this machine."""
    return re.sub(r"(?<![\w.])(/[\w.\-+]+){2,}", "...", " ".join(str(error).split()))[:SAID]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _versions(numbers: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in numbers.items())


# --- what is printed ---------------------------------------------------------------------------------------------------


def report(comparisons: Mapping[Comparison, Sequence[Row]]) -> Report:
    """A table for each program, and the goals."""
    parts: list[Part] = []
    for (name, cluster), rows in comparisons.items():
        best = min((row.seconds for row in rows if not row.ours), default=math.inf)
        columns = (f"{name} on {cluster}", "mesh", ">predicted", ">scheduled", ">/ best rival", ">search", ">peak", ">allocated", "")
        parts.append(Table(columns, tuple(_shown(row, best) for row in sorted(rows, key=lambda row: row.seconds))))
    targets = results.all_goals(comparisons)
    if targets:
        parts.append(Table(("goal", "wanted", ">found", ""), tuple(target.row for target in targets)))
    if any(row.plan == XLA and row.failure for rows in comparisons.values() for row in rows):
        parts.append(Paragraph(f"Where {XLA} has no plan that fits, or none in time, it counts in no mean."))
    return Report("What auto finds, and what its rivals do", tuple(parts))


def _shown(row: Row, best: float) -> tuple[str, ...]:
    def shown(value: float | None, how: Callable[[float], str]) -> str:
        return "" if value is None else how(value)

    return (
        row.plan,
        row.mesh,
        shown(row.predicted_seconds, format_seconds),
        shown(row.scheduled_seconds, format_seconds),
        f"{row.seconds / best:.3f}" if math.isfinite(row.seconds) and math.isfinite(best) else "",
        shown(row.search_seconds, format_seconds),
        shown(row.peak_bytes, format_bytes),
        shown(row.needed_bytes, format_bytes),
        row.failure,
    )


def _tell(progress: Progress, task: TaskID, where: str, what: str) -> None:
    progress.update(task, description=f"{where}: {what}")


# --- the command -------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=SUMMARY)
    parser.add_argument(
        "--models", nargs="+", choices=tuple(PROGRAMS), metavar="NAME", help=f"programs: {', '.join(PROGRAMS)}; all unless given"
    )
    parser.add_argument("--clusters", nargs="+", choices=tuple(GIVEN), help="slices; all unless given")
    parser.add_argument("--quick", action="store_true", help=f"{' and '.join(QUICK)} on the first slice")
    parser.add_argument(
        "--plans", nargs="+", default=["*"], metavar="PATTERN", help="plans to compile, such as 'auto*'; others are taken from the results"
    )
    parser.add_argument("--predicted", action="store_true", help="compile nothing, and compare what is predicted")
    parser.add_argument("--keep", metavar="FOLDER", help="keep what the compiler said there, and read it instead of compiling again")
    parser.add_argument(
        "--rival-env",
        metavar="FOLDER",
        type=Path,
        default=xla_auto.ENVIRONMENT,
        help="of the environment with XLA's auto-sharding (%(default)s)",
    )
    parser.add_argument(
        "--rival-seconds", type=float, default=600.0, metavar="S", help="limit of a compile with auto-sharding (default 600)"
    )
    parser.add_argument("--memory", type=float, default=24.0, metavar="GB", help="address space each process may use (default 24)")
    parser.add_argument(
        "--results", type=Path, default=results.FILE, metavar="FILE", help="to merge rows into; by default the repository's own"
    )
    parser.add_argument("--table", action="store_true", help="run nothing: print the results as a table of Markdown, and their goals")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def command(options: argparse.Namespace) -> str:
    """The command that compiles the same rows, wherever it runs."""
    words = ["python -m benchmarks.quality", *(["--quick"] if options.quick else [])]
    for name in ("models", "clusters", "plans"):
        values = getattr(options, name)
        if values and values != ["*"]:
            words.append(f"--{name} {shlex.join(values)}")
    return " ".join(words)


def main(argv: Sequence[str] | None = None) -> int:
    """Compares and prints; the exit code is 1 where a goal is missed."""
    options = _parser().parse_args(argv)
    jax.config.update("jax_platforms", os.environ.setdefault("JAX_PLATFORMS", "cpu"))
    if options.table:
        comparisons = results.compared(results.load(options.results))
        print(results.markdown(comparisons))
        return _end(comparisons, options.json)
    if not options.predicted and not COMPILERS["tpu"].installed:
        missing = "schedules are the TPU compiler's, and libtpu is not installed here. Install it with pip install 'autoshard[tpu]'."
        print(missing, file=sys.stderr)
        return 1
    resource.setrlimit(resource.RLIMIT_AS, (limit := int(options.memory * 1e9), limit))
    run = Run(tuple(options.plans), not options.predicted, None if options.predicted else _rival(options), options.rival_seconds)
    programs = options.models or (QUICK if options.quick else tuple(PROGRAMS))
    clusters = options.clusters or tuple(GIVEN)[: 1 if options.quick else None]
    comparisons: dict[Comparison, list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder, progress_bar(options.json) as progress:
        os.environ["AUTOSHARD_BENCHMARK_KEEP"] = options.keep or folder
        task = progress.add_task("", total=len(programs) * len(clusters))
        try:
            for name, cluster in product(programs, clusters):
                rows = compare(name, Cluster.parse(cluster), run, partial(_tell, progress, task, f"{name} on {cluster}"))
                comparisons[name, cluster] = list(rows) if options.predicted else _kept(options, name, cluster, rows, run)
                progress.advance(task)
        except AutoshardError as error:
            print(error, file=sys.stderr)
            return 1
        except KeyboardInterrupt:  # what is done is shown, and the results and --keep have it
            print(f"interrupted after {len(comparisons)} of {len(programs) * len(clusters)} comparisons", file=sys.stderr)
    return _end(comparisons, options.json)


def _rival(options: argparse.Namespace) -> Path | None:
    """The Python with XLA's auto-sharding; None, and a line that says so, where there is none."""
    if not any(fnmatchcase(XLA, pattern) for pattern in options.plans):
        return None
    try:
        return xla_auto.environment(options.rival_env)
    except xla_auto.EnvironmentMissing as error:
        print(f"going on without {XLA}: {error}", file=sys.stderr)
        return None


def _kept(options: argparse.Namespace, name: str, cluster: str, rows: Iterable[Row], run: Run) -> list[Row]:
    """Merges the rows of a comparison into the results, each as it comes; all of the comparison that is there in the end."""
    found: list[Row] = []

    def merge(covers: Callable[[Row], bool]) -> list[Row]:
        merged = results.merged(results.load(options.results), found, covers)
        results.save(options.results, merged, command(options))
        return [row for row in merged if (row.program, row.cluster) == (name, cluster)]

    for row in rows:
        found.append(row)
        merge(lambda _: False)
    return merge(lambda row: (row.program, row.cluster) == (name, cluster) and run.takes(row.plan))


def _end(comparisons: Mapping[Comparison, Sequence[Row]], as_json: bool) -> int:
    targets = results.all_goals(comparisons)
    if as_json:
        rows = [asdict(row) for rows in comparisons.values() for row in rows]
        print(json.dumps({"plans": rows, "goals": [asdict(target) for target in targets]}, indent=1))
    else:
        show(report(comparisons))
    return int(not all(target.reached for target in targets))


if __name__ == "__main__":
    sys.exit(main())
