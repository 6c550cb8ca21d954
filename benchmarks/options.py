"""Which options of a search go together: every pair of them on a small scanned and a small unrolled step, run and compared with one device.

``python -m benchmarks.options`` prints a row for each pair that is refused, with the reason, or whose results differ; ``--option`` and
``--step`` take some of them. What is refused for a reason of mathematics is in `REFUSED`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import autoshard
from autoshard.errors import AutoshardError

LAYERS, WIDTH, BATCH = 4, 256, 32  # moments of scanned weights have the MiB from which optimizer state may be on hosts
CLUSTER = "cpu:8"
OPTIMIZER = optax.adam(1e-2, eps=1e-2)
DIFFERENCE = 1e-4  # of two results, of numbers beyond one relative to the largest

OPTIONS: dict[str, dict[str, Any]] = {
    "microbatches=2": {"microbatches": 2},
    "microbatches='fit'": {"microbatches": "fit"},
    "microbatches='auto'": {"microbatches": "auto"},
    "remat='full'": {"remat": "full"},
    "remat='fit'": {"remat": "fit"},
    "remat='auto'": {"remat": "auto"},
    "remat='replace'": {"remat": "replace"},
    "offload='optimizer'": {"offload": "optimizer"},
    "offload='auto'": {"offload": "auto"},
    "stages=2": {"stages": 2},
    "schedule='one_program'": {"stages": 2, "schedule": "one_program"},
    "schedule='interleaved'": {"stages": 2, "schedule": "interleaved"},
    "plan='full'": {"plan": "full"},
    "confirm='devices'": {"confirm": "devices"},
    "start": {"start": "earlier"},
    "batch_axes": {"batch_axes": "data"},
    "pins": {"pins": {"*params*": PartitionSpec(None, None, "model")}},
    "pins='arguments'": {"pins": "arguments"},
    "mesh": {"mesh": {"data": 2, "model": 2}},
    "mesh=1": {"mesh": 1},
    "memory_limit_bytes": {"memory_limit_bytes": "binding"},
    "searcher": {"searcher": "recursive_programming"},
    "time_limit_seconds": {"time_limit_seconds": 30.0},
    "kernels='auto'": {"kernels": "auto"},
    "balance": {"balance": 1.25},
    "padding=False": {"padding": False},
    "donate_argnums": {"donate_argnums": 0},
}
"""Options of `autoshard.search` by their names in the table."""


REFUSED: dict[str, tuple[tuple[str, ...], ...]] = {"scanned": (), "unrolled": (("schedule='one_program'",),)}
"""By step the options that are refused for a reason of mathematics: stages of one program are of layers that are one scan."""


def is_refused(name: str, pair: Sequence[str]) -> bool:
    """Whether a pair has options that are refused for the step."""
    return any({*names} <= {*pair} for names in REFUSED[name])


@dataclass(frozen=True, eq=False)
class Example:
    """A train step with its arguments."""

    name: str
    step: Any
    args: tuple

    @functools.cached_property
    def expected(self) -> Any:
        """What one device returns."""
        return jax.device_get(jax.jit(self.step)(*self.args))

    @functools.cached_property
    def earlier(self) -> Any:
        """A strategy to start from."""
        return autoshard.search(self.step, *self.args, cluster="cpu:4", searcher="fully_sharded")


    def differs(self, strategy: Any) -> str:
        """By how much results under a strategy differ from those of one device, in words; empty where they do not."""
        found = jax.device_get(strategy.apply(self.step)(*strategy.shard(*jax.tree.map(jnp.array, self.args))))
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(self.expected), strict=True)
        most = max(float(np.max(np.abs(ours - theirs))) / max(1.0, float(np.max(np.abs(theirs)))) for ours, theirs in pairs)
        return f"differs by {most:.3g}" if most > DIFFERENCE else ""

    @functools.cached_property
    def limit(self) -> float:
        """Bytes of a device that are fewer than data parallelism takes."""
        return 0.8 * autoshard.search(self.step, *self.args, cluster=CLUSTER, searcher="data_parallel").cost.peak_bytes


def _updated(loss: Any, state: Any) -> Any:
    value, gradients = jax.value_and_grad(loss)(state["params"])
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, value


def _layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ w)


def scanned_step(state: Any, batch: Any) -> Any:
    """A train step of scanned layers."""

    def loss(params: Any) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (_layer(x, w), None), batch["x"], params["w"])
        return jnp.sum((x - batch["y"]) ** 2) / BATCH

    return _updated(loss, state)


def unrolled_step(state: Any, batch: Any) -> Any:
    """A train step of the same layers, one after the other."""

    def loss(params: Any) -> jax.Array:
        x = batch["x"]
        for k in range(LAYERS):
            x = _layer(x, params[f"w{k}"][0])
        return jnp.sum((x - batch["y"]) ** 2) / BATCH

    return _updated(loss, state)


@functools.cache
def examples() -> dict[str, Example]:
    """The scanned and the unrolled step."""
    key = jax.random.key(0)
    weights = jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / WIDTH
    batch = {"x": jax.random.normal(key, (BATCH, WIDTH)), "y": jnp.zeros((BATCH, WIDTH))}

    def state(params: Any) -> Any:
        return {"params": params, "optimizer": OPTIMIZER.init(params)}

    wide = {f"w{k}": jnp.concatenate([weights[k : k + 1]] * LAYERS) for k in range(LAYERS)}
    steps = (("scanned", scanned_step, {"w": weights}), ("unrolled", unrolled_step, wide))
    return {name: Example(name, step, (state(params), batch)) for name, step, params in steps}


def pairs(names: Mapping[str, Any] = OPTIONS) -> Iterator[tuple[str, str]]:
    """The pairs of options that are no two values of one."""
    for one, other in itertools.combinations(names, 2):
        if not _common(OPTIONS[one], OPTIONS[other]):
            yield one, other


def _common(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool((one.keys() & other.keys()) or (one.keys() | other.keys()) >= {"plan", "stages"})


def asked(example: Example, *names: str) -> tuple[tuple, dict[str, Any]]:
    """The arguments and the options of a search."""
    options = {name: value for each in names for name, value in OPTIONS[each].items()}
    args = example.args
    if "start" in options:
        options["start"] = example.earlier
    if "memory_limit_bytes" in options:
        options["memory_limit_bytes"] = example.limit
    if options.get("mesh") == {"data": 2, "model": 2} and "stages" not in options:
        options["mesh"] = {"data": 4, "model": 2}
    if options.get("pins") == "arguments":
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        spec = NamedSharding(mesh, PartitionSpec(None, None, "model"))
        state = {**args[0], "params": jax.device_put(args[0]["params"], spec)}
        args = (state, *args[1:])
    return args, options


def tried(example: Example, *names: str) -> str:
    """Empty where a search with these options runs and computes what one device does; else the reason why not."""
    args, options = asked(example, *names)
    try:
        strategy = autoshard.search(example.step, *args, cluster=CLUSTER, **options)
    except AutoshardError as error:
        return f"refused: {error}"
    return example.differs(strategy)


def main() -> None:
    """Prints the pairs that do not work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step", choices=tuple(examples()), action="append")
    parser.add_argument("--option", choices=tuple(OPTIONS), action="append", help="pairs with one of these alone; repeatable")
    parser.add_argument("--single", action="store_true", help="each option alone")
    chosen = parser.parse_args()
    n, started = 0, time.process_time()
    for name in chosen.step or examples():
        for pair in [(each,) for each in OPTIONS] if chosen.single else pairs():
            if chosen.option and not {*pair} & {*chosen.option}:
                continue
            n += 1
            before = time.process_time()
            try:
                said = tried(examples()[name], *pair)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            if said and not is_refused(name, pair):
                print(f"{name:9} {' + '.join(pair):45} {time.process_time() - before:5.1f} s  {' '.join(said.split())[:230]}", flush=True)
    print(f"{n} pairs in {time.process_time() - started:.0f} CPU seconds")


if __name__ == "__main__":
    main()
