"""JAX's own examples of its primitives, each sharded in several ways and held against the plain jitted function.

A case is one of `all_harnesses`: in jax 0.10 5,594 functions in 132 groups, with arguments. Each is searched on a cluster whose links are
fast enough that sharding pays, and applied as users do; then lowered again by random legal assignments. Its mesh has 5 to 8 devices,
whichever its sizes are divided by best. The results must be those of the plain function: equal bits for integers, booleans and keys, and
for floats what a sum in another order may differ by (`TOLERANCE`). Decompositions need no other comparison: their matrices stay whole,
and one algorithm on one matrix gives the same vectors, phases included.

Compiling is most of the time, so the programs of many cases are compiled as one, side by side and without a shared argument. Where that
fails the cases are halved until the one that fails stands alone. Some shardings make XLA end the whole process: `sweep` therefore runs the
cases in worker processes that say what they begin with, and a case in which a worker ends is one that crashed.

    python tests/harnesses.py dot_general reduce_max    # checks the cases whose names begin so, in this process
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, TypeVar

import jax
import numpy as np
from jax._src.internal_test_util.test_harnesses import Harness, all_harnesses  # the yardstick has no public home
from jax.extend.core import jaxpr_as_fun
from problems import eager_cluster
from random_assignments import random_assignment
from rewrite.padding_checks import padded as padded_program
from rewrite.padding_checks import some_dims, with_garbage

import autoshard
from autoshard.ir import Assignment, Mesh, Rule, replicated
from autoshard.judge.model import CostModel
from autoshard.lower import jax_mesh, manual_program
from autoshard.rewrite.extents import resized
from autoshard.rules import rules_of
from autoshard.trace import Traced, trace

MESHES = tuple(Mesh.of(axes) for axes in ({"x": 2, "y": 4}, {"x": 4, "y": 2}, {"x": 2, "y": 3}, {"x": 3, "y": 2}, {"x": 5}, {"x": 7}))
BATCH = 48  # cases compiled as one
LIFETIME = 16  # batches that a worker checks: what compilers leave in memory adds up
PATIENCE_SECONDS = 300  # a batch that takes longer hangs
WORKER = (sys.executable, __file__, "--worker")

# What two orders of one sum may differ by, relative to the largest element of the result: some ten roundings.
TOLERANCE = {"float32": 5e-6, "complex64": 5e-6, "float16": 1e-2, "bfloat16": 8e-2}

T = TypeVar("T")
R = TypeVar("R")

# Groups whose functions bind a primitive without a parameter that JAX needs of it in a shard_map; `jnp.max` gives it.
INCOMPLETE = ("reduce_max", "reduce_min") if jax.__version_info__ >= (0, 11) else ()

# By name and in the order of names: the list's own order is another in every process.
CASES: dict[str, Harness] = {
    harness.fullname: harness
    for harness in sorted(all_harnesses, key=lambda h: (h.group_name, h.fullname))
    if harness.group_name not in INCOMPLETE
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one case.

    Attributes:
        name: the harness's.
        status: ``equal``, or what it did not get beyond: ``trace``, ``search``, ``lower``, ``run`` (compiling included), ``compare``, and
            ``crash`` where the process ended; ``unsupported`` where JAX cannot run the plain function on this platform.
        sharded: of ``search`` and ``random``, those in which any value was sharded; ``padded`` where any was padded.
        message: why it is not equal.
        seconds: its share of the time.
    """

    name: str
    status: str
    sharded: tuple[str, ...] = ()
    message: str = ""
    seconds: float = 0.0

    @property
    def group(self) -> str:
        return CASES[self.name].group_name

    @property
    def failed(self) -> bool:
        return self.status not in ("equal", "unsupported")


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """One form of a case; ``kind`` is ``search`` or ``random``, as it is sharded, or ``padded``."""

    name: str
    kind: str
    mesh: Mesh
    function: Callable[..., Any]
    arguments: tuple
    sharded: bool


@functools.cache
def groups() -> dict[str, list[str]]:
    """The names of the cases of each group."""
    found: dict[str, list[str]] = {}
    for name, harness in CASES.items():
        found.setdefault(harness.group_name, []).append(name)
    return found


def sample(group: str) -> list[str]:
    """Some cases of a group, the same every time: three, and one more for every fifty."""
    names = groups()[group]
    return random.Random(group).sample(names, min(len(names), 3 + len(names) // 50))


def batches(names: Sequence[str], size: int = BATCH) -> Iterator[list[str]]:
    """The cases in runs of at most ``size``."""
    for start in range(0, len(names), size):
        yield list(names[start : start + size])


# -- one batch of cases, in this process ---------------------------------------------------------------------------------


def check(names: Sequence[str], n_random: int = 1, padded: bool = False) -> list[Outcome]:
    """What becomes of the cases, compiled together; each is searched, and sharded at random so many times, or padded at random instead."""
    started = time.perf_counter()
    arguments = {name: _arguments(name) for name in names}
    wanted = dict(zip(names, each(functools.partial(_plain, arguments), names), strict=True))
    found: dict[str, Outcome] = {}
    programs: list[Program] = []
    for name, results in wanted.items():
        if isinstance(results, Exception):
            found[name] = Outcome(name, "unsupported", message=_said(results))
            continue
        try:
            forms = _padded(name, arguments[name]) if padded else _programs(name, arguments[name], n_random)
            found[name] = Outcome(name, "equal", tuple(dict.fromkeys(form.kind for form in forms if form.sharded)))
            programs += forms
        except _Failed as failure:
            found[name] = Outcome(name, failure.stage, message=_said(failure.__cause__))
    for mesh in MESHES:
        chosen = [program for program in programs if program.mesh == mesh]
        for program, results in zip(chosen, each(_run, chosen), strict=True):
            failed = isinstance(results, Exception)
            message = _said(results) if failed else difference(results, wanted[program.name])
            if message and not found[program.name].failed:
                found[program.name] = replace(
                    found[program.name], status="run" if failed else "compare", message=f"{program.kind}: {message}"
                )
    jax.clear_caches()
    seconds = (time.perf_counter() - started) / max(1, len(names))
    return [replace(found[name], seconds=seconds) for name in names]


def each(run: Callable[[Sequence[T]], Sequence[R]], items: Sequence[T]) -> Sequence[R | Exception]:
    """Per item the result of ``run``, which takes many at once, or what it raises on that item alone."""
    if not items:
        return []
    try:
        return run(items)
    except Exception as error:  # whatever JAX and XLA raise
        if len(items) == 1:
            return [error]
    middle = len(items) // 2
    return [*each(run, items[:middle]), *each(run, items[middle:])]


class _Failed(Exception):
    """A case did not get beyond a stage; the cause says why."""

    def __init__(self, stage: str):
        super().__init__(stage)
        self.stage = stage


def _seed(name: str) -> int:
    return zlib.crc32(name.encode())


def _arguments(name: str) -> tuple:
    return tuple(CASES[name].dyn_args_maker(np.random.RandomState(_seed(name))))


def _plain(arguments: dict[str, tuple], names: Sequence[str]) -> list[list[np.ndarray]]:
    """The results of the plain functions, jitted, on one device."""
    return _jitted([CASES[name].dyn_fun for name in names], [arguments[name] for name in names])


def _run(programs: Sequence[Program]) -> list[list[np.ndarray]]:
    return _jitted([program.function for program in programs], [program.arguments for program in programs])


def _jitted(functions: Sequence[Callable], arguments: Sequence[tuple]) -> list[list[np.ndarray]]:
    """The flat results of functions that are compiled as one program."""

    def side_by_side(arguments):
        return [jax.tree.leaves(function(*args)) for function, args in zip(functions, arguments, strict=True)]

    return [[_numbers(x) for x in results] for results in jax.jit(side_by_side)(list(arguments))]


def _programs(name: str, arguments: tuple, n_random: int) -> list[Program]:
    """The searched form, and the random ones where the case has anything to shard."""
    function, seed = CASES[name].dyn_fun, _seed(name)
    traced = _stage("trace", lambda: trace(function, *arguments))
    rules = _stage("trace", lambda: rules_of(traced.graph))
    mesh = _mesh(rules, seed)
    cluster = eager_cluster(f"cpu:{mesh.size}")
    strategy = _stage("search", lambda: autoshard.search(function, *arguments, cluster=cluster, mesh=dict(mesh.axes)))
    found = [Program(name, "search", mesh, strategy.apply(function), arguments, _shards(strategy.record.assignment))]
    drawn = (random_assignment(traced.graph, rules, mesh, seed + k) for k in range(8 * n_random))
    for assignment in itertools.islice(filter(_shards, drawn), n_random):
        lowered = _lowered(traced, rules, assignment, CostModel(cluster, mesh))
        found.append(Program(name, "random", mesh, lowered, arguments, True))
    return found


def _padded(name: str, arguments: tuple) -> list[Program]:
    """The case on one device with random dimensions padded, where it has any; in the padding of its arguments are NaN and large numbers."""
    traced = _stage("trace", lambda: trace(CASES[name].dyn_fun, *arguments))
    new, plan = _stage("search", lambda: padded_program(traced, some_dims(traced.graph, random.Random(_seed(name)))))
    if not plan.moves:
        return []

    def function(*arguments: Any) -> Any:
        read = [with_garbage(x, plan.of(v)) for x, v in zip(jax.tree.leaves(arguments), traced.graph.arguments, strict=True)]
        results = jaxpr_as_fun(new.jaxpr)(*read)
        replaced = {result: plan.of(traced.graph.arguments[argument]) for result, argument in traced.graph.aliases}
        return [resized(x, replaced[k], ((),) * x.ndim) if k in replaced else x for k, x in enumerate(results)]

    return [Program(name, "padded", MESHES[0], function, arguments, True)]


def _stage(stage: str, compute: Callable[[], R]) -> R:
    try:
        return compute()
    except Exception as error:
        raise _Failed(stage) from error


def _mesh(rules: Sequence[Rule | None], seed: int) -> Mesh:
    """The mesh whose axes divide the most factors of the case."""
    sizes = [factor.size for rule in rules if rule for factor in rule.factors if factor.shardable]
    first = seed % len(MESHES)
    return max(MESHES[first:] + MESHES[:first], key=lambda mesh: sum(size % n == 0 for size in sizes for n in mesh.sizes))


def _shards(assignment: Assignment) -> bool:
    return any(layout != replicated(assignment.mesh) for layout in assignment.layouts.values())


def _lowered(traced: Traced, rules: tuple[Rule | None, ...], assignment: Assignment, model: CostModel) -> Callable:
    graph = traced.graph
    paths = model.reshard_paths(graph.values)
    flat = _stage("lower", lambda: manual_program(traced.jaxpr, graph, rules, assignment, jax_mesh(assignment.mesh), paths))
    return lambda *arguments: flat(*jax.tree.leaves(arguments))


# -- comparison ----------------------------------------------------------------------------------------------------------


def _numbers(x: jax.Array) -> np.ndarray:
    """The array in memory; of typed keys their data."""
    return np.asarray(jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def difference(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> str:
    """What tells the results apart, in words; empty where they are equal."""
    if len(got) != len(wanted):
        return f"{len(got)} results instead of {len(wanted)}"
    for k, (x, y) in enumerate(zip(got, wanted, strict=True)):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            return f"result {k} is {x.dtype}{x.shape} instead of {y.dtype}{y.shape}"
        tolerance = TOLERANCE.get(x.dtype.name)
        if tolerance is None:
            same = x == y
        else:
            wide = np.complex128 if x.dtype.kind == "c" else np.float64
            x, y = x.astype(wide), y.astype(wide)
            largest = np.max(np.abs(y), where=np.isfinite(y), initial=0.0)
            same = np.isclose(x, y, rtol=tolerance, atol=tolerance * largest, equal_nan=True)
        if not np.all(same):
            where = tuple(int(i) for i in np.argwhere(~same)[0])
            return f"result {k} differs in {np.sum(~same)} of {x.size} elements, at {where}: {x[where]} instead of {y[where]}"
    return ""


def _said(error: BaseException | None) -> str:
    """An error's type and what it says, without JAX's remarks on its traceback."""
    text = f"{type(error).__name__}: {error}"
    return " ".join(text.split("\n---")[0].split())[:500]


# -- all of them, in worker processes ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Jobs:
    """Batches to do, shared by the threads that watch the workers."""

    n_random: int
    padded: bool
    waiting: queue.SimpleQueue[list[str]] = field(default_factory=queue.SimpleQueue)
    done: queue.SimpleQueue[list[Outcome] | None] = field(default_factory=queue.SimpleQueue)


@dataclass(slots=True)
class _Worker:
    """A process that checks the batches it is sent; what it and XLA say on the way goes to a file."""

    process: subprocess.Popen[str]
    errors: IO[bytes]

    @classmethod
    def started(cls, n_random: int, padded: bool) -> _Worker:
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
        command = [*WORKER, str(n_random), *(["padded"] if padded else [])]
        errors, pipe = tempfile.TemporaryFile(), subprocess.PIPE  # noqa: SIM115, it lives as long as the worker
        process = subprocess.Popen(command, env=env, cwd=Path(__file__).parents[1], text=True, stdin=pipe, stdout=pipe, stderr=errors)
        return cls(process, errors)

    def check(self, batch: list[str]) -> list[Outcome] | str:
        """The outcomes; or what was said last, where the process ended or had to be ended."""
        assert self.process.stdin and self.process.stdout
        alarm = threading.Timer(PATIENCE_SECONDS, self.process.kill)
        alarm.start()
        try:
            print(json.dumps(batch), file=self.process.stdin, flush=True)
            return [Outcome(**{**entry, "sharded": tuple(entry["sharded"])}) for entry in json.loads(self.process.stdout.readline())]
        except (BrokenPipeError, json.JSONDecodeError):
            code = self.process.wait()
            self.errors.seek(0)
            lines = self.errors.read().decode(errors="replace").splitlines()
            fatal = [line for line in lines if line.startswith("F")] or lines[-1:]
            return f"the process ended with {code}: {' '.join(fatal)[:400]}"
        finally:
            alarm.cancel()

    def stop(self) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait()


def sweep(names: Sequence[str], n_random: int = 1, processes: int = 2, padded: bool = False) -> Iterator[list[Outcome]]:
    """The outcomes of the cases as they come, from worker processes; the cases of a batch in which a worker ends are tried one by one."""
    jobs = _Jobs(n_random, padded)
    for batch in batches(names):
        jobs.waiting.put(batch)
    threads = [threading.Thread(target=_watch, args=(jobs,), daemon=True) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for _ in threads:
        while (outcomes := jobs.done.get()) is not None:
            yield outcomes


def _watch(jobs: _Jobs) -> None:
    """Feeds a worker batch by batch, and a new one where it ends or has lived long enough."""
    worker = _Worker.started(jobs.n_random, jobs.padded)
    try:
        for number in itertools.count():
            pending = [jobs.waiting.get_nowait()]
            if number and number % LIFETIME == 0:
                worker.stop()
                worker = _Worker.started(jobs.n_random, jobs.padded)
            while pending:
                batch = pending.pop(0)
                outcomes = worker.check(batch)
                if isinstance(outcomes, str):
                    worker = _Worker.started(jobs.n_random, jobs.padded)
                    if len(batch) > 1:
                        pending += [[name] for name in batch]
                        continue
                    outcomes = [Outcome(batch[0], "crash", message=outcomes)]
                jobs.done.put(outcomes)
    except queue.Empty:
        pass
    finally:
        worker.stop()
        jobs.done.put(None)


def _work(n_random: int, padded: bool) -> None:
    """A worker's life: a line of names in, a line of outcomes out."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print does not belong to the answer
    for line in sys.stdin:
        print(json.dumps([asdict(outcome) for outcome in check(json.loads(line), n_random, padded)]), file=out, flush=True)


def _main(words: Sequence[str]) -> None:
    for batch in batches([name for name in CASES if name.startswith(tuple(words))]):
        for outcome in check(batch):
            print(f"{outcome.status:11} {'+'.join(outcome.sharded):13} {outcome.name}  {outcome.message}")


if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    if sys.argv[1] == "--worker":
        _work(int(sys.argv[2]), "padded" in sys.argv[3:])
    else:
        _main(sys.argv[1:])
