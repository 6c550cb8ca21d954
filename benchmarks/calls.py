"""What does a sharded step's call take beyond a jitted function's, and how long is it from a function of 17,564 operations to its lowering?

``python -m benchmarks.calls`` answers both, in about two minutes on two cores:

- *calls*: a train step over a state of 50, 500 and 2,000 arrays on 8 virtual CPU devices, applied (``strategy.apply``) and decorated
  (``autoshard.parallelize``), the state donated or not. In each round the step and a fresh `jax.jit` of the same `jax.shard_map`, which
  never raised, are called one after the other, on states of their own, and the time of this thread until they return is taken.
- *llama*: the train step of Llama-3-8B, 32 unrolled layers, AdamW included, on a mesh of 8 x 8: seconds of tracing, of the search, of
  ``strategy.apply`` until the program is held against the strategy, and of ``.lower(...)``; in a process of its own, in which a small
  program went the same way before, so that imports do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import autoshard
from autoshard.cli.terminal import show
from autoshard.demo.devices import virtual_devices
from autoshard.render import Heading, Paragraph, Part, Report, Table, format_count, format_seconds
from benchmarks.models import llama
from benchmarks.progress import progress_bar

QUESTION = "What does a sharded step's call take beyond a jitted function's, and how long is it from a large function to its lowering?"
ROOT = Path(__file__).resolve().parents[1]
LEAVES = (50, 500, 2000)
WARM = 5  # rounds that do not count
RATIO, LLAMA_SECONDS = 1.1, 8.0  # targets
LLAMA_DEVICES, LLAMA_MESH = "v5p:4x4x4", {"data": 8, "model": 8}


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds of many calls: the least, the median and the most."""

    least: float
    median: float
    most: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        return cls(min(seconds), statistics.median(seconds), max(seconds))

    def __str__(self) -> str:
        return " / ".join(f"{1e6 * seconds:,.1f}" for seconds in (self.least, self.median, self.most))


@dataclass(frozen=True, slots=True)
class Calls:
    """What calls of a step took.

    Attributes:
        leaves, how, donated: the state's arrays; ``apply`` or ``parallelize``; whether the state is donated.
        step, jitted: seconds of a call of the step and of the jitted function.
    """

    leaves: int
    how: str
    donated: bool
    step: Spread
    jitted: Spread

    @property
    def ratio(self) -> float:
        return self.step.median / self.jitted.median


@dataclass(frozen=True, slots=True)
class Whole:
    """Seconds from a function to its lowered program, part by part and of the processor, and the number of operations."""

    n_ops: int
    trace: float
    search: float
    apply: float
    lower: float
    cpu: float

    @property
    def total(self) -> float:
        return self.trace + self.search + self.apply + self.lower


def program(leaves: int) -> tuple[Callable, tuple]:
    """A step over a state of so many arrays, layers of ten, and a batch."""

    def step(state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        scale = jnp.mean(batch)
        return jax.tree.map(lambda leaf: leaf - 0.1 * scale * leaf, state), scale

    layers, rest = divmod(leaves, 10)
    sizes = [*[10] * layers, *[rest] * (rest > 0)]
    state = {f"layer{k}": {f"w{i}": jnp.ones((8, 8), jnp.float32) for i in range(size)} for k, size in enumerate(sizes)}
    return step, (state, jnp.ones((8, 8), jnp.float32))


def fresh(strategy: autoshard.Strategy, state: Any, batch: jax.Array, donated: bool) -> Callable:
    """`jax.jit` of the step of `program`, written by hand over the strategy's mesh."""

    def step(state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        scale = jax.lax.pmean(jnp.mean(batch), "data")
        return jax.tree.map(lambda leaf: leaf - 0.1 * scale * leaf, state), scale

    specs = jax.tree.map(lambda x: x.sharding.spec, (state, batch))
    results = (specs[0], PartitionSpec())
    mapped = jax.shard_map(step, mesh=strategy.mesh, in_specs=specs, out_specs=results)
    placed = jax.tree.map(lambda x: x.sharding, (state, batch))
    return jax.jit(mapped, in_shardings=placed, donate_argnums=0 if donated else ())


def measure(leaves: int, how: str, donated: bool, rounds: int) -> Calls:
    """Calls a step and a fresh jitted function in turn."""
    function, args = program(leaves)
    options = {"cluster": "cpu:8", "mesh": {"data": 8}, "searcher": "data_parallel", "donate_argnums": 0 if donated else ()}
    strategy = autoshard.search(function, *args, **options)
    called: Any = strategy.apply(function) if how == "apply" else autoshard.parallelize(function, progress=False, **options)
    state, batch = strategy.shard(*args)
    states = {"step": state, "jitted": strategy.shard(*program(leaves)[1])[0]}
    functions = {"step": called, "jitted": fresh(strategy, state, batch, donated)}
    seconds: dict[str, list[float]] = {"step": [], "jitted": []}
    for number in range(WARM + rounds):
        for name in ("step", "jitted") if number % 2 else ("jitted", "step"):
            started = time.thread_time()
            after, _ = functions[name](states[name], batch)
            seconds[name].append(time.thread_time() - started)
            states[name] = jax.block_until_ready(after)
    return Calls(leaves, how, donated, *(Spread.of(seconds[name][WARM:]) for name in ("step", "jitted")))


def measure_llama() -> Whole:
    """Goes the whole way once, in this process."""
    weight, x = jnp.zeros((64, 64)), jnp.zeros((512, 64))

    def small(weight: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ weight)

    autoshard.search(small, weight, x, cluster=LLAMA_DEVICES, mesh=LLAMA_MESH).apply(small).lower(weight, x)
    function, args = llama(32)
    laps, busy = [time.perf_counter()], time.process_time()
    strategy = autoshard.search(function, *args, cluster=LLAMA_DEVICES, mesh=LLAMA_MESH, searcher="dynamic_programming", donate_argnums=0)
    laps.append(time.perf_counter())
    step = strategy.apply(function)
    assert step.runs(args)
    laps.append(time.perf_counter())
    step.lower(*args)
    laps.append(time.perf_counter())
    searched, applied, lowered = (b - a for a, b in pairwise(laps))
    trace = strategy.stats["trace_seconds"]
    return Whole(int(strategy.stats["n_ops"]), trace, searched - trace, applied, lowered, time.process_time() - busy)


def llama_in_a_process() -> Whole:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=64"}
    command = [sys.executable, "-m", "benchmarks.calls", "--one-llama"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True, env=environment)
    return Whole(**json.loads(done.stdout.splitlines()[-1]))


def report(calls: Sequence[Calls], whole: Whole | None) -> Report:
    """A line for each state and way to call it, and the parts of the large program's way."""
    parts: list[Part] = []
    if calls:
        rows = tuple(
            (
                format_count(found.leaves),
                found.how,
                "yes" if found.donated else "no",
                str(found.step),
                str(found.jitted),
                f"{found.ratio:.3f}",
            )
            for found in calls
        )
        columns = (">arrays", "called by", "donated", ">step", ">jitted", ">ratio")
        most = max(found.ratio for found in calls)
        parts += [
            Heading("Calls, in microseconds: least / median / most"),
            Table(columns, rows),
            Paragraph(f"At most {most:.3f} times as long, in the median; wanted {RATIO}: {_reached(most <= RATIO)}"),
        ]
    if whole is not None:
        seconds = [(name, getattr(whole, name)) for name in ("trace", "search", "apply", "lower", "total", "cpu")]
        rows = tuple((name if name != "cpu" else "of the processor", format_seconds(value)) for name, value in seconds)
        said = f"wanted {format_seconds(LLAMA_SECONDS)}: {_reached(whole.total <= LLAMA_SECONDS)}"
        parts += [
            Heading(f"Llama-3-8B, 32 unrolled layers, {format_count(whole.n_ops)} operations"),
            Table(("part", ">takes"), rows),
            Paragraph(said),
        ]
    return Report("From calls to the jitted function, and from a function to its lowering", tuple(parts))


def _reached(reached: bool) -> str:
    return "reached" if reached else "NOT reached"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calls", description=QUESTION)
    parser.add_argument("parts", nargs="*", help="calls or llama; both by default")
    parser.add_argument("--leaves", type=int, nargs="+", default=LEAVES, metavar="N", help="arrays of the state (default 50 500 2000)")
    parser.add_argument("--rounds", type=int, default=200, metavar="N", help="calls that count (default 200)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--one-llama", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one_llama:
        print(json.dumps(asdict(measure_llama())))
        return 0
    if unknown := sorted(set(options.parts) - {"calls", "llama"}):
        parser.error(f"parts are calls and llama; got {', '.join(unknown)}")
    wanted = set(options.parts) or {"calls", "llama"}
    virtual_devices(8)
    kinds = [(n, how, donated) for n in options.leaves for how in ("apply", "parallelize") for donated in (False, True)]
    found, whole = [], None
    with progress_bar(options.json) as progress:
        task = progress.add_task("", total=len(kinds) * ("calls" in wanted) + ("llama" in wanted))
        for leaves, how, donated in kinds if "calls" in wanted else ():
            progress.update(task, description=f"{leaves} arrays, {how}")
            found.append(measure(leaves, how, donated, options.rounds))
            progress.advance(task)
        if "llama" in wanted:
            progress.update(task, description="Llama-3-8B")
            whole = llama_in_a_process()
            progress.advance(task)
    if options.json:
        print(json.dumps({"calls": [asdict(each) for each in found], "llama": whole and asdict(whole)}, indent=1))
    else:
        show(report(found, whole))
    return 0


if __name__ == "__main__":
    sys.exit(main())
