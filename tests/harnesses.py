"""JAX's own examples of its primitives, each sharded in two ways and held against the plain jitted function.

A case is one of `all_harnesses`: 5,594 functions in 132 groups, with arguments. Each is searched on a cluster whose links are fast enough
that sharding pays, and applied as users do; then lowered once more by a random legal assignment. Its mesh has 5 to 8 devices, whichever
its sizes are divided by best. The results must be those of the plain function: equal bits for integers, booleans and keys, and for floats
what a sum in another order may differ by (`TOLERANCE`).

Compiling is most of the time, so the programs of many cases are compiled as one, side by side and without a shared argument. Where that
fails the cases are halved until the one that fails stands alone. Some shardings make XLA end the whole process: `sweep` therefore runs the
cases in worker processes that say what they begin with, and a case in which a worker ends is one that crashed.

    python tests/harnesses.py 17 add_    # checks the cases with this number or whose name begins so, in this process
"""

from __future__ import annotations

import functools
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src.internal_test_util.test_harnesses import Harness, all_harnesses  # the yardstick has no public home
from problems import eager_cluster
from random_assignments import random_assignment

import autoshard
from autoshard.cost.model import CostModel
from autoshard.ir import Assignment, Mesh, Rule, replicated
from autoshard.lower import constrained, jax_mesh
from autoshard.rules import rules_of
from autoshard.trace import Traced, trace

MESHES = tuple(Mesh.of(axes) for axes in ({"x": 2, "y": 4}, {"x": 4, "y": 2}, {"x": 2, "y": 3}, {"x": 3, "y": 2}, {"x": 5}, {"x": 7}))
BATCH = 48  # cases compiled as one
SILENCE_SECONDS = 300  # a worker that says nothing for so long hangs

# What two orders of the same sum may differ by, relative to the largest element: some hundred roundings.
TOLERANCE = {"float32": 2e-5, "complex64": 2e-5, "float16": 1e-2, "bfloat16": 6e-2}

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one case.

    Attributes:
        number: its place in `all_harnesses`.
        status: ``equal``, or what it did not get beyond: ``trace``, ``search``, ``lower``, ``run`` (compiled and run), ``compare``; ``crash`` where
            the process ended; ``unsupported`` where JAX itself cannot run the plain function on this platform.
        sharded: which of ``search`` and ``random`` sharded any of its values.
        message: why it is not equal.
        seconds: its share of the time.
    """

    number: int
    status: str
    sharded: tuple[str, ...] = ()
    message: str = ""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return all_harnesses[self.number].fullname

    @property
    def group(self) -> str:
        return all_harnesses[self.number].group_name

    @property
    def failed(self) -> bool:
        return self.status not in ("equal", "unsupported")


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """One sharded form of a case: ``kind`` is ``search`` or ``random``."""

    number: int
    kind: str
    mesh: Mesh
    function: Callable[..., Any]
    arguments: tuple
    sharded: bool


def groups() -> dict[str, list[int]]:
    """The numbers of the cases of each group."""
    found: dict[str, list[int]] = {}
    for number, harness in enumerate(all_harnesses):
        found.setdefault(harness.group_name, []).append(number)
    return found


def batches(numbers: Sequence[int], size: int = BATCH) -> Iterator[list[int]]:
    """The cases in runs of at most ``size``."""
    for start in range(0, len(numbers), size):
        yield list(numbers[start : start + size])


# -- one batch of cases, in this process ---------------------------------------------------------------------------------


def check(numbers: Sequence[int]) -> list[Outcome]:
    """What becomes of the cases, compiled together."""
    started = time.perf_counter()
    arguments = {number: _arguments(all_harnesses[number]) for number in numbers}
    wanted = dict(zip(numbers, each(functools.partial(_plain, arguments), numbers), strict=True))
    found = {number: Outcome(number, "unsupported", message=_said(error)) for number, error in wanted.items() if isinstance(error, Exception)}
    programs: list[Program] = []
    for number in numbers:
        if number not in found:
            try:
                programs += _programs(number, arguments[number])
            except _Failed as failure:
                found[number] = Outcome(number, failure.stage, message=_said(failure.__cause__))
    for number in numbers:
        if number not in found:
            found[number] = Outcome(number, "equal", tuple(p.kind for p in programs if p.number == number and p.sharded))
    for mesh in MESHES:
        chosen = [program for program in programs if program.mesh == mesh]
        for program, results in zip(chosen, each(_run, chosen), strict=True):
            if isinstance(results, Exception):
                status, message = "run", _said(results)
            else:
                status, message = "compare", difference(results, wanted[program.number])
            if message and not found[program.number].failed:
                found[program.number] = replace(found[program.number], status=status, message=f"{program.kind}: {message}")
    jax.clear_caches()
    seconds = (time.perf_counter() - started) / max(1, len(numbers))
    return [replace(found[number], seconds=seconds) for number in numbers]


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


def _arguments(harness: Harness) -> tuple:
    return tuple(harness.dyn_args_maker(np.random.RandomState(zlib.crc32(harness.fullname.encode()))))


def _plain(arguments: dict[int, tuple], numbers: Sequence[int]) -> list[list[Any]]:
    """The results of the plain functions, jitted, on one device."""
    functions = [all_harnesses[number].dyn_fun for number in numbers]
    return _jitted(functions, [arguments[number] for number in numbers])


def _run(programs: Sequence[Program]) -> list[list[Any]]:
    return _jitted([program.function for program in programs], [program.arguments for program in programs])


def _jitted(functions: Sequence[Callable], arguments: Sequence[tuple]) -> list[list[Any]]:
    """The flat results of functions that are compiled as one program."""

    def side_by_side(arguments):
        return [jax.tree.leaves(function(*args)) for function, args in zip(functions, arguments, strict=True)]

    return [[_numbers(x) for x in results] for results in jax.jit(side_by_side)(list(arguments))]


def _programs(number: int, arguments: tuple) -> list[Program]:
    """The searched form, and the random one where the case has anything to shard."""
    function, seed = all_harnesses[number].dyn_fun, zlib.crc32(all_harnesses[number].fullname.encode())
    traced = _stage("trace", lambda: trace(function, *arguments))
    rules = _stage("trace", lambda: rules_of(traced.graph))
    mesh = _mesh(rules, seed)
    cluster = eager_cluster(f"cpu:{mesh.size}")
    strategy = _stage("search", lambda: autoshard.search(function, *arguments, cluster=cluster, mesh=dict(mesh.axes)))
    searched = Program(number, "search", mesh, strategy.apply(function), arguments, _shards(strategy.record.assignment))
    assignments = (random_assignment(traced.graph, rules, mesh, seed + k) for k in range(8))
    random = next(filter(_shards, assignments), None)
    if random is None:
        return [searched]
    lowered = _stage("lower", lambda: _lowered(traced, rules, random, CostModel(cluster, mesh)))
    return [searched, Program(number, "random", mesh, lowered, arguments, True)]


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
    path = lambda value, source, target: model.reshard_path(graph.values[value], source, target)  # noqa: E731
    flat = constrained(traced.jaxpr, graph, rules, assignment, jax_mesh(assignment.mesh), path)
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
    """An error's type and the first line of what it says."""
    return traceback.format_exception_only(error)[-1].split("\n---")[0].strip().replace("\n", " ")[:500] if error else ""


# -- all of them, in worker processes ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Work:
    """Batches to do, shared by the threads that watch the workers."""

    waiting: queue.SimpleQueue[list[int]] = field(default_factory=queue.SimpleQueue)
    done: queue.SimpleQueue[list[Outcome] | None] = field(default_factory=queue.SimpleQueue)


def sweep(numbers: Sequence[int], processes: int = 2, size: int = BATCH) -> Iterator[list[Outcome]]:
    """The outcomes of the cases as they come, from worker processes; the cases of a worker that ends are tried again one by one."""
    work = _Work()
    for batch in batches(numbers, size):
        work.waiting.put(batch)
    threads = [threading.Thread(target=_watch, args=(work,), daemon=True) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for _ in threads:
        while (outcomes := work.done.get()) is not None:
            yield outcomes


def _watch(work: _Work) -> None:
    """Feeds a worker batch by batch, and a new one where it ends."""
    worker = None
    try:
        while True:
            try:
                pending = [work.waiting.get_nowait()]
            except queue.Empty:
                return
            while pending:
                batch = pending.pop(0)
                worker = worker or _worker()
                outcomes = _asked(worker, batch)
                if outcomes is None:
                    worker = None
                    if len(batch) > 1:
                        pending += [[number] for number in batch]
                        continue
                    outcomes = [Outcome(batch[0], "crash", message="the process ended, or fell silent")]
                work.done.put(outcomes)
    finally:
        if worker is not None:
            worker.stdin.close()
            worker.wait()
        work.done.put(None)


def _worker() -> subprocess.Popen:
    flags = "--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, __file__, "--worker"]
    return subprocess.Popen(command, cwd=Path(__file__).parents[1], env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def _asked(worker: subprocess.Popen, batch: list[int]) -> list[Outcome] | None:
    """What the worker answers; None where it ended, or said nothing for so long that it was ended."""
    alarm = threading.Timer(SILENCE_SECONDS, worker.kill)
    alarm.start()
    try:
        print(json.dumps(batch), file=worker.stdin, flush=True)
        answer = worker.stdout.readline()
        return [Outcome(**{**entry, "sharded": tuple(entry["sharded"])}) for entry in json.loads(answer)]
    except (BrokenPipeError, json.JSONDecodeError):
        worker.wait()
        return None
    finally:
        alarm.cancel()


def _work() -> None:
    """A worker: a line of case numbers in, a line of outcomes out."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print does not belong to the answer
    for line in sys.stdin:
        print(json.dumps([asdict(outcome) for outcome in check(json.loads(line))]), file=out, flush=True)


def _chosen(words: Sequence[str]) -> list[int]:
    return [n for n, h in enumerate(all_harnesses) if any(word == str(n) or h.fullname.startswith(word) for word in words)]


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        _work()
    else:
        os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
        for batch in batches(_chosen(sys.argv[1:])):
            for outcome in check(batch):
                print(f"{outcome.number:5} {outcome.status:11} {'+'.join(outcome.sharded):13} {outcome.seconds:.2f} s  {outcome.name}  {outcome.message}")
