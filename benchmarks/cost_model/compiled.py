"""Strategies of the benchmark's models, and what real compilers make of them."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import autoshard
from autoshard.cluster import Cluster
from autoshard.ir import Mesh
from autoshard.lower import jax_mesh
from autoshard.run.step import Step
from autoshard.verify import Ahead, compile_ahead, peak_bytes_of, topology_of
from benchmarks.models import MODELS
from benchmarks.single_dtype import gpt, lstm, moe, resnet, unet
from benchmarks.unseen_models import UNSEEN

MESHES = {"v5e:2x4": {"data": 2, "model": 4}, "v5e:4x4": {"data": 4, "model": 4}, "cpu:8": {"data": 2, "model": 4}}
HOW = ("data_parallel", "fully_sharded", "tensor_parallel", "recursive_programming")
HOW_UNSEEN = ("data_parallel", "fully_sharded", "recursive_programming")  # nobody wrote those models' tensor parallelism by hand
FAMILIES: dict[str, Callable] = {"gpt": partial(gpt, 2, batch=64), "moe": moe, "resnet": resnet, "unet": unet, "lstm": lstm}
NO_LIMIT = 1e15  # bytes: what is compared here is what a strategy does, whether it fits or not
# For XLA:CPU, which moves bfloat16 as float32: float32, and small, since it compiles every matrix product itself.
SMALL: dict[str, Callable] = {
    "gpt": partial(gpt, 2, width=256, heads=8, vocabulary=1024, batch=16, length=64, dtype=jnp.float32),
    "moe": partial(moe, 2, width=256, heads=8, vocabulary=1024, batch=16, length=64, dtype=jnp.float32),
    "resnet": partial(resnet, channels=16, batch=32, side=64, dtype=jnp.float32),
    "unet": partial(unet, channels=16, batch=16, side=32, dtype=jnp.float32),
    "lstm": partial(lstm, width=128, vocabulary=512, batch=32, length=16, dtype=jnp.float32),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model under a strategy on a cluster."""

    model: str
    how: str
    cluster: str
    function: Callable
    args: tuple
    strategy: autoshard.Strategy

    @property
    def title(self) -> str:
        return f"{self.model}, {self.how}, {self.cluster}"


def cases(quick: bool) -> Iterator[Case]:
    """Every family under every strategy, on two slices and on CPU devices; quick: two families on the smaller slice and the CPU.

    What nothing was designed on comes last, on the smaller slice; quick: none of it.
    """
    for cluster in ("v5e:2x4", "cpu:8") if quick else tuple(MESHES):
        for model in ("gpt", "resnet") if quick else FAMILIES:
            for how in HOW:
                yield case(model, how, cluster)
    for model in () if quick else UNSEEN:
        for how in HOW_UNSEEN:
            yield case(model, how, "v5e:2x4")


def n_cases(quick: bool) -> int:
    return len(HOW) * 2 * 2 if quick else len(HOW) * len(MESHES) * len(FAMILIES) + len(HOW_UNSEEN) * len(UNSEEN)


def case(model: str, how: str, cluster: str) -> Case:
    """A model under data parallelism, fully sharded, its hand-written tensor parallelism, or a searcher's strategy."""
    function, args = (SMALL if cluster.startswith("cpu") else UNSEEN | FAMILIES)[model]()
    common: dict[str, Any] = {"cluster": cluster, "donate_argnums": 0}
    if how == "tensor_parallel":
        found = autoshard.evaluate(function, *args, mesh=MESHES[cluster], in_specs=MODELS[model].tensor_parallel, **common)
    else:
        mesh = {"data": 8 if cluster != "v5e:4x4" else 16} if how in ("data_parallel", "fully_sharded") else MESHES[cluster]
        found = autoshard.search(function, *args, mesh=mesh, searcher=how, memory_limit_bytes=NO_LIMIT, **common)
    return Case(model, how, cluster, function, args, found)


def compiled(case: Case, cycles: bool = False) -> Ahead:
    """What the compiler of the case's cluster makes of it; kept as `compiled_ahead` keeps it."""
    cpu = case.cluster.startswith("cpu")
    record = case.strategy.record
    mesh = jax_mesh(record.mesh, jax.devices("cpu")) if cpu else None
    platform = "cpu" if cpu else topology_of(Cluster.parse(case.cluster)).platform
    lowered = Step(case.function, record, mesh).lower(*case.args, platform=platform)
    return compiled_ahead(lowered, record.mesh, case.cluster, cycles)


def compiled_ahead(lowered: jax.stages.Lowered, mesh: Mesh, cluster: str, cycles: bool = False) -> Ahead:
    """What the compiler of a cluster makes of a program; kept in the run's folder, so that nobody need ask again."""
    key = hashlib.sha256(f"{lowered.as_text()} {mesh!r} {cluster} {cycles}".encode()).hexdigest()[:32]
    kept = Path(os.environ["AUTOSHARD_BENCHMARK_KEEP"]) / f"{key}.json.gz"
    if kept.exists():
        return kept_ahead(json.loads(gzip.decompress(kept.read_bytes())))
    found = _on_cpu(lowered) if cluster.startswith("cpu") else compile_ahead(lowered, mesh, topology_of(Cluster.parse(cluster)), cycles)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(gzip.compress(json.dumps(asdict(found)).encode()))
    return found


def _on_cpu(lowered: jax.stages.Lowered) -> Ahead:
    """XLA:CPU's program in the same record; on these virtual devices everything fits."""
    compiled = lowered.compile()
    held = peak_bytes_of(compiled)
    return Ahead(compiled.as_text() or "", held, held or 0.0, None, True, 0.0)


def kept_ahead(record: dict[str, Any]) -> Ahead:
    """What a compiler made of a program, from JSON."""
    return Ahead(**record | {"alive": tuple((name, nbytes) for name, nbytes in record.get("alive", ()))})
