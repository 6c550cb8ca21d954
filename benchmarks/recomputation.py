"""How much memory does recomputation save on one chip, for how many products more, next to `jax.checkpoint` around each layer by hand?

A GPT's train step as traced, with each choice of what is kept, and with `jax.checkpoint` by hand is compiled ahead of time by XLA:TPU:
``python -m benchmarks.recomputation``; ``--scan`` with scanned layers. ``--offload`` compiles strategies with what is kept on the chip
and with some of it in the memory of its host, next to their predicted peaks.
"""

from __future__ import annotations

import argparse

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import autoshard
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.ir import Mesh
from autoshard.recompute import Options, rematerialised
from autoshard.render import format_bytes, format_seconds
from autoshard.rules import rules_of
from autoshard.trace import Traced, trace
from autoshard.verify import compile_ahead, topology_of
from benchmarks.models import gpt

CLUSTER = Cluster.parse("v5e:1x1")
PRODUCTS = ("dot_general", "conv_general_dilated")
UNLIMITED_BYTES = 1e12  # so that no choice is refused before it is compiled


def main() -> None:
    """Prints a line for each program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--scan", action="store_true")
    parser.add_argument("--offload", action="store_true")
    asked = parser.parse_args()
    sizes = {"batch": asked.batch, "length": asked.length, "scan": asked.scan, "vocabulary": asked.vocabulary}
    if asked.offload:
        for offload in (None, "activations"):
            _show_strategy(*gpt(asked.layers, asked.width, **sizes), offload)
        return
    plain, by_hand = (_traced(*gpt(asked.layers, asked.width, remat=remat, **sizes)) for remat in (False, True))
    options = Options(plain, program_facts(plain.graph, rules_of(plain.graph), compiler_of(CLUSTER)), CLUSTER.device)
    _show("as traced", plain, plain)
    for number, remat in enumerate(options.all):
        _show(f"choice {number}", rematerialised(plain, remat), plain)
    _show("by hand", by_hand, plain)


def _show_strategy(step, arguments, offload: str | None) -> None:
    common = {"cluster": CLUSTER, "mesh": {"data": 1}, "donate_argnums": 0, "microbatches": None, "memory_limit_bytes": UNLIMITED_BYTES}
    strategy = autoshard.search(step, *arguments, remat="full", offload=offload, **common)
    found = autoshard.verify(strategy, step, *arguments, target="tpu")
    compiled = "refused" if found.actual_peak_bytes is None else format_bytes(found.actual_peak_bytes)
    cost = strategy.cost
    predicted = f"predicted peak {format_bytes(cost.peak_bytes)}, step {format_seconds(cost.makespan_seconds)}"
    print(f"offload={offload!r:13}  {predicted}; compiled peak {compiled}", flush=True)


def _traced(function, arguments) -> Traced:
    return trace(function, *arguments, donate_argnums=0)


def _show(name: str, program: Traced, plain: Traced) -> None:
    mesh = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, PartitionSpec())
    types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=whole) for v in program.jaxpr.jaxpr.invars]
    jitted = jax.jit(jaxpr_as_fun(program.jaxpr), donate_argnums=program.graph.donated)
    lowered = jitted.trace(*types).lower(lowering_platforms=("tpu",))
    ahead = compile_ahead(lowered, Mesh.of({"data": 1}), topology_of(CLUSTER))
    peak = "refused" if ahead.peak_bytes is None else f"{ahead.peak_bytes / 1e6:,.0f} MB"
    more = _products(program) / _products(plain) - 1
    print(f"{name:10s}  {ahead.needed_bytes / 1e6:8,.0f} MB needed  peak {peak:>10s}  {more:6.1%} more products", flush=True)


def _products(program: Traced) -> float:
    facts = program_facts(program.graph, rules_of(program.graph), compiler_of(CLUSTER))
    return sum(facts.flops[op.index] * op.trips for op in program.graph.walk() if op.primitive in PRODUCTS)


if __name__ == "__main__":
    main()
