"""Do published training runs of GPT on 64 to 512 A100 take as long as predicted, with the catalogue's constants and nothing fitted?

The runs are those that vTrain was validated on (Bang et al., MICRO 2024, arXiv 2312.12391: 3.6 to 175 billion parameters, tensor and data
parallel, many also in pipelines; Megatron-DeepSpeed, float16, activations computed again; DGX A100 with four 200 Gb/s cards, which is what
its configuration files say). The table is not part of this repository: give its path (``data/ground_truth_multi.csv`` of
github.com/VIA-Research/vTrain) with ``AUTOSHARD_PUBLISHED_TABLE``.

A run is predicted as the train step of one pipeline stage on the GPUs of one tensor-parallel group: a scan over micro-batches of a scan
over rematerialised layers with the weights split over ``model`` as Megatron does, then Adam; and one all_reduce of the gradients over
``data``, as Megatron does after the last micro-batch (a scan would do it in each). With ``p`` stages and ``m`` micro-batches
the micro-batches' share is multiplied by ``(m + p - 1) / m``, the bubble of 1F1B (Narayanan et al., SC 2021, section 2.2), and each of them
sends its activations on to the next host and gets their gradients back: each GPU of a tensor-parallel group its share, at its part of the
network cards, and the group then gathers the shares (Megatron's scatter and gather, section 4.1 there).

In the model: what a stage computes and keeps in memory, tensor-parallel collectives, the gradients' all_reduce, the bubble, sends between
stages. Not in it: stages of unequal work (every one has the embedding and the loss), sends that wait for each other, other jobs' traffic on
the network, hosts that launch kernels more slowly than small ones run, memory that the allocator gives back and takes again.
"""

from __future__ import annotations

import csv
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.cluster import Cluster
from autoshard.cluster.catalogue import CARD_EFFICIENCY
from autoshard.cost.collectives import Communication
from autoshard.ir import Mesh
from autoshard.render import Paragraph, Part, Table, format_percent, format_seconds
from benchmarks.cost_model.findings import Findings, Target, quantile, spearman

TABLE = Path(__file__).parents[2] / "../shared/data/vtrain_gpt_a100.csv"
VOCABULARY = 51_200  # Megatron's, as in SC 2021, section 5.1
CARDS = 4 * 25e9 / 8  # four cards of 200 Gb/s for eight GPUs: inter_node_bandwidth 800 in the runs' configuration files


@dataclass(frozen=True, slots=True)
class Run:
    """One published run.

    Attributes:
        batch, micro: sequences of a step, and of a micro-batch of one data-parallel group.
        tensor, data, stages: into how many the weights, the batch and the layers are split.
        seconds: measured, of one step.
    """

    billions: float
    batch: int
    micro: int
    width: int
    heads: int
    layers: int
    length: int
    tensor: int
    data: int
    stages: int
    seconds: float

    @property
    def micros(self) -> int:
        """Micro-batches of a step."""
        return self.batch // (self.micro * self.data)


def read(path: Path) -> list[Run]:
    """The runs of vTrain's table, whose columns stand in this order."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.reader(file))[1:]
    return [_run(row) for row in rows if any(row)]


def _run(row: list[str]) -> Run:
    billions, (_, batch, micro, width, heads, layers, length, tensor, data, stages) = float(row[0]), map(int, row[1:11])
    return Run(billions, batch, micro, width, heads, layers, length, tensor, data, stages, float(row[11]) / 1e3)


def predicted(run: Run) -> float:
    """Seconds of a step: micro-batches one after the other, the bubble, the mean of gradients, the optimizer."""
    one, two = (_seconds(replace(run, data=1, batch=run.micro * n)) for n in (1, 2))
    each = two - one  # of a micro-batch
    gradients = 2 * (VOCABULARY * run.width + 12 * run.width**2 * run.layers // run.stages) / run.tensor
    mean = Communication(_cluster(run).links(Mesh.of({"data": run.data, "model": run.tensor}))).seconds("all_reduce", gradients, (0,))
    sent = _sent_seconds(run) if run.stages > 1 else 0.0
    return one - each + mean + (each + sent) * (run.micros + run.stages - 1)


def _sent_seconds(run: Run) -> float:
    """Seconds that one micro-batch's activations take to the next stage, and their gradients back."""
    nbytes = 2 * run.micro * run.length * run.width
    gathered = Communication(_cluster(run).links(Mesh.of({"data": run.data, "model": run.tensor}))).seconds("all_gather", nbytes, (1,))
    return 2 * (nbytes / run.tensor / (CARDS * CARD_EFFICIENCY) + gathered)


def _cluster(run: Run) -> Cluster:
    """The GPUs of one stage, in hosts of eight."""
    gpus = run.tensor * run.data
    cluster = Cluster.parse(f"a100:8x{gpus // 8}" if gpus > 8 else f"a100:{gpus}")
    wires = replace(cluster.interconnect, network_bandwidth_bytes_per_second=CARDS * CARD_EFFICIENCY)
    return replace(cluster, interconnect=wires, overlap=False)  # Megatron's all_reduces wait for, and are waited for by, compute


def _seconds(run: Run) -> float:
    step, args, specs = stage(run)
    mesh = {"data": run.data, "model": run.tensor}
    return autoshard.evaluate(step, *args, cluster=_cluster(run), mesh=mesh, in_specs=specs, donate_argnums=0).cost.makespan_seconds


def stage(run: Run) -> tuple[Callable, tuple, tuple]:
    """The train step of one pipeline stage, its arguments and their specs; every stage has the embedding, as first and last ones do."""
    layers, head = run.layers // run.stages, run.width // run.heads
    half = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float16)  # noqa: E731
    params = {
        "embed": half(VOCABULARY, run.width),
        "layers": {
            "norm1": half(layers, run.width),
            "qkv": half(layers, run.width, 3, run.heads, head),
            "out": half(layers, run.heads, head, run.width),
            "norm2": half(layers, run.width),
            "up": half(layers, run.width, 4 * run.width),
            "down": half(layers, 4 * run.width, run.width),
        },
    }
    shards = {
        "embed": P("model", None),
        "layers": {
            "norm1": P(),
            "qkv": P(None, None, None, "model"),
            "out": P(None, "model"),
            "norm2": P(),
            "up": P(None, None, "model"),
            "down": P(None, "model"),
        },
    }
    optimizer = optax.adam(1e-4)
    master = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), params)
    moments = jax.eval_shape(optimizer.init, master)
    state = {"params": master, "moments": moments}
    state_specs = {"params": shards, "moments": (optax.ScaleByAdamState(P(), shards, shards), optax.EmptyState())}  # pyright: ignore[reportArgumentType]
    tokens = jax.ShapeDtypeStruct((run.micros, run.micro * run.data, run.length), jnp.int32)

    def train_step(state: Any, tokens: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
        weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), state["params"])

        def micro(total: Any, batch: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
            loss, gradients = jax.value_and_grad(_loss)(weights, *batch)
            return jax.tree.map(jnp.add, total, gradients), loss

        total, losses = jax.lax.scan(micro, jax.tree.map(jnp.zeros_like, weights), (tokens, targets))
        gradients = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), total)
        updates, moments = optimizer.update(gradients, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, losses.mean()

    batch = P(None, "data")
    return train_step, (state, tokens, tokens), (state_specs, batch, batch)


def _loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    x = params["embed"][tokens]
    x, _ = jax.lax.scan(lambda x, layer: (jax.checkpoint(_block)(x, layer), None), x, params["layers"])
    logits = (x @ params["embed"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def _block(x: jax.Array, layer: Any) -> jax.Array:
    """A layer in Megatron's kernels: products, layer norms, masked softmax, dropouts with the residual, GeLU (its ``model/fused_*.py``)."""
    seed = layer["norm1"][0]
    h = _kernel(_norm(x, layer["norm1"]))
    query, key, value = jnp.moveaxis(jnp.einsum("bsd,dchk->bschk", h, layer["qkv"]), 2, 0)
    scores = jnp.einsum("bqhk,bshk->bhqs", query, key)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = _kernel(jax.nn.softmax(jnp.where(causal, scores / query.shape[-1] ** 0.5, -1e4), axis=-1))
    context = jnp.einsum("bhqs,bshk->bqhk", _kernel(_dropout(weights, seed)), value)
    x = _kernel(x + _dropout(jnp.einsum("bqhk,hkd->bqd", context, layer["out"]), seed))
    h = _kernel(_norm(x, layer["norm2"]))
    h = _kernel(jax.nn.gelu(h @ layer["up"]))
    return _kernel(x + _dropout(h @ layer["down"], seed))


def _kernel(x: jax.Array) -> jax.Array:
    """The end of a kernel: Megatron's are not fused with each other."""
    return jax.lax.optimization_barrier(x)


def _dropout(x: jax.Array, seed: jax.Array) -> jax.Array:
    """What dropout moves: its mask, one byte an element, is written, and read again on the way back."""
    keep = _kernel(jnp.broadcast_to(seed, x.shape) > 0)
    return jnp.where(keep, x / 0.9, 0)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * (1 + scale)


def run(quick: bool, progress: Callable[[str, float], None]) -> Findings:
    """Errors and rank correlations over all runs, over those without pipelines, and within each model."""
    path = Path(os.environ.get("AUTOSHARD_PUBLISHED_TABLE", TABLE))
    if not path.exists():
        return Findings("published training runs", (Paragraph(f"The table of runs is not at {path}; see AUTOSHARD_PUBLISHED_TABLE."),))
    runs = read(path)[:: 6 if quick else 1]
    seconds = []
    for number, one in enumerate(runs):
        progress(f"run {number + 1} of {len(runs)}", number / len(runs))
        seconds.append(predicted(one))
    errors = [found / one.seconds - 1 for one, found in zip(runs, seconds, strict=True)]
    groups = {"all": list(range(len(runs))), "no pipeline": [i for i, one in enumerate(runs) if one.stages == 1]}
    groups |= {f"{size:g} B": [i for i, one in enumerate(runs) if one.billions == size] for size in sorted({one.billions for one in runs})}
    rows, ranks, medians = [], {}, {}
    for name, members in groups.items():
        ranks[name] = spearman([seconds[i] for i in members], [runs[i].seconds for i in members])
        medians[name] = statistics.median(abs(errors[i]) for i in members) if members else float("nan")
        worst, bias = quantile([abs(errors[i]) for i in members], 0.9), statistics.median(errors[i] for i in members) if members else 0.0
        rows.append((name, str(len(members)), *map(format_percent, (medians[name], worst, bias)), f"{ranks[name]:.3f}"))
    parts: list[Part] = [
        Table(("runs", ">n", ">median error", ">nine in ten within", ">bias", ">Spearman"), tuple(rows)),
        Table(
            ("run", ">measured", ">predicted", ">error"),
            tuple(
                (
                    f"{one.billions:g} B, tensor {one.tensor} x data {one.data} x stages {one.stages}, micro {one.micro}",
                    *map(format_seconds, (one.seconds, found)),
                    format_percent(error),
                )
                for one, found, error in zip(runs, seconds, errors, strict=True)
            ),
        ),
    ]
    within = [rank for name, rank in ranks.items() if name.endswith(" B")]
    targets = (
        Target("published runs, median error %", "<= 15", 100 * medians["all"], medians["all"] <= 0.15),
        Target("published runs, Spearman", ">= 0.95", ranks["all"], ranks["all"] >= 0.95),
        Target("published runs, Spearman within a model, least", ">= 0.8", min(within), min(within) >= 0.8),
    )
    return Findings("do published training runs take as long as predicted?", tuple(parts), targets, {"medians": medians, "ranks": ranks})
