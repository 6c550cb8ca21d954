"""Step time and peak memory of published plans, as this library predicts them.

A plan without stages is an assignment that is found once and judged again on other figures of its devices; the searches of stages are
those of `benchmarks.plans`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax.sharding import PartitionSpec as P

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import ProgramFacts, program_facts
from autoshard.errors import InfeasibleError
from autoshard.ir import Assignment, Mesh
from autoshard.judge.evaluate import evaluate
from autoshard.judge.model import CostModel
from autoshard.pipeline.plan_search import search_plans
from autoshard.pipeline.plans import Asked
from autoshard.plan.forms import Form
from autoshard.plan.full_search import problems_on
from autoshard.plan.prepared import traced_of
from autoshard.plan.user_pins import Asked as Pins
from autoshard.plan.user_pins import user_pins
from autoshard.problem import Problem
from autoshard.rewrite import applied
from autoshard.rewrite.attention import proposals
from autoshard.rewrite.options import Rewriting
from autoshard.rules import rules_of
from autoshard.search import DynamicProgramming, FullySharded, solve
from autoshard.trace import Traced
from benchmarks.models import BF16, F32
from benchmarks.models.decoder import FP8, decoder
from benchmarks.published.runs import SIZES, Run

STAGES = {"zero1": 1, "zero2": 2, "fsdp": 3}
_MODEL = {
    "query": (None, "model"),
    "key": (None, "model"),
    "value": (None, "model"),
    "out": ("model",),
    "up": (None, "model"),
    "gate": (None, "model"),
    "down": ("model",),
}  # column, then row: Megatron-LM, arXiv 1909.08053


@dataclass(frozen=True, slots=True)
class Predicted:
    """A run's predicted figures: a step's seconds, and a device's peak."""

    seconds: float
    peak_bytes: float


@dataclass(frozen=True, slots=True)
class Planned:
    """A run's plan without stages, which is judged on any figures of its devices."""

    facts: ProgramFacts
    assignment: Assignment

    def on(self, cluster: Cluster) -> Predicted:
        """What is predicted on devices of these figures."""
        cost = evaluate(self.facts, CostModel(cluster, self.assignment.mesh), self.assignment).cost
        return Predicted(cost.makespan_seconds, cost.peak_bytes)


def predicted(run: Run, cluster: Cluster | None = None) -> Predicted:
    """A run's figures."""
    cluster = cluster or run.cluster
    return in_stages(run, cluster) if run.stages > 1 else planned(run, cluster).on(cluster)


def planned(run: Run, cluster: Cluster | None = None) -> Planned:
    """The plan of a run without stages."""
    cluster = cluster or run.cluster
    traced = _traced(run, cluster, run.microbatches, scan=True)
    facts = program_facts(traced.graph, rules_of(traced.graph), compiler_of(cluster))
    if run.tensor == 1 and run.state in STAGES:
        problem = Problem(facts, CostModel(cluster, Mesh.of({"data": cluster.n_devices})))
        return Planned(facts, FullySharded(STAGES[run.state]).solve(problem).assignment)
    mesh = Mesh.of(_mesh(run, cluster))
    pins = user_pins(Pins.of(_specs(run, stacked=1), None), traced.graph, [], False)
    problem = Problem(facts, CostModel(cluster, mesh), pins.on(mesh), cluster.memory_limit_bytes)
    searcher = DynamicProgramming(second_opinion=False)
    try:
        return Planned(facts, solve(searcher, problem).assignment)
    except InfeasibleError:  # by the prediction, and not on the machine: it may keep values in host memory
        return Planned(facts, solve(searcher, problem.within(None)).assignment)


def in_stages(run: Run, cluster: Cluster) -> Predicted:
    """A pipeline's figures: the best way to fill in what the plan leaves open."""
    traced = _traced(run, cluster, 1, scan=False)
    mesh = Mesh.of(_mesh(run, cluster))
    asked = Asked(math.inf, (run.schedule,), [run.stages], run.microbatches)
    pins = user_pins(Pins.of(_specs(run, stacked=0), None), traced.graph, [], False)
    plans = search_plans(traced, cluster, partial(problems_on, pins, mesh), asked)
    if plans is None or not plans.ranked:
        raise ValueError(f"a published plan with stages has equal layers that its stages can share; {run} has not.")
    best = plans.ranked[0]
    return Predicted(best.makespan_seconds, max(best.layering.peak_bytes))


def _traced(run: Run, cluster: Cluster, microbatches: int, scan: bool) -> Traced:
    traced = traced_of(*_program(run, scan), 0, (), cluster, Form(microbatches))[0]
    fused = proposals(traced, cluster, Rewriting(kernels="auto")) if run.attention != "plain" else ()
    return applied(fused[0], traced) if fused else traced


def _program(run: Run, scan: bool) -> tuple[Any, Any]:
    """The train step, of one slice's share of the batch; float16 takes as long as bfloat16."""
    eager = run.kernels == "eager"
    return decoder(
        **SIZES[run.model],
        batch=run.batch * run.cluster.n_devices // run.devices,
        length=run.length,
        keeps={"all": None, "none": ()}.get(run.keeps, tuple(run.keeps.split())),
        fuses=not eager,
        dropout=run.attention == "plain",
        products=FP8 if run.precision == "fp8" else None,
        params=BF16 if run.precision == "bf16 pure" else F32,
        scan=scan,
    )


def _mesh(run: Run, cluster: Cluster) -> dict[str, int]:
    n = cluster.n_devices // run.stages
    if run.state == "fsdp in hosts":
        per_host = cluster.topology[0]
        return {"host": n // per_host, "data": per_host}
    return {"data": n // run.tensor, "model": run.tensor}


def _specs(run: Run, stacked: int) -> Mapping[str, P]:
    """The specs of arguments: the batch over ``data``, weights over ``model``, and over ``data`` too where state is sharded.

    Args:
        stacked: dimensions of layers before those of a layer's weights.
    """
    sharded = "data" if run.state.startswith("fsdp") else None
    model = "model" if run.tensor > 1 else None
    where = "state" if run.state.startswith("fsdp") or run.state == "replicated" else "state['params']"

    def spec(of_model: tuple, rank: int, before: int) -> P:
        dims = [model if axis else None for axis in of_model] + [None] * (rank - len(of_model))
        if sharded:
            dims[dims.index(None)] = sharded
        return P(*[None] * before, *dims)

    ranks = dict.fromkeys(_MODEL, 2) | dict.fromkeys(("query", "key", "value", "out"), 3)
    found = {f"{where}*['{name}']": spec(axes, ranks[name], stacked) for name, axes in _MODEL.items() if name != "gate" or _is_gated(run)}
    found[f"{where}*['embed']"] = spec(("model",), 2, 0)
    if not SIZES[run.model].get("tied"):
        found[f"{where}*['head']"] = spec((None, "model"), 2, 0)
    return found | {"batch*": P(("host", "data") if run.state == "fsdp in hosts" else "data")}


def _is_gated(run: Run) -> bool:
    return bool(SIZES[run.model].get("gated"))
