"""Searches of pipelines: a number of stages that is given, and any."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoshard.api.full_plan import Searches, fullest
from autoshard.api.meshes import given_mesh, meshes_of, most_axes
from autoshard.api.microbatching import Microbatches
from autoshard.api.pipelining import Pipeline, pipelined
from autoshard.api.prepared import RESERVE, Prepared, cluster_of, limit_of, searched_on_meshes, traced_of
from autoshard.api.strategy import Strategy
from autoshard.api.user_pins import Asked, user_pins
from autoshard.budgets import BUDGETS
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.ir import Layout, Mesh
from autoshard.mesh_search.anytime import endings, timed
from autoshard.pipeline import Stage
from autoshard.pipeline.plan_search import Plans, search_plans
from autoshard.problem import Hints, Problem
from autoshard.progress import Progress, part, silent
from autoshard.rules import rules_of
from autoshard.search import DynamicProgramming, Searcher, Solution, solve
from autoshard.trace import Traced

_QUICK = DynamicProgramming(price_steps=5, second_opinion=False)
"""For programs of few layers, whose answers are estimates."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The arguments of a call of `autoshard.search` that is for pipelines; those not listed here are as there.

    Attributes:
        ends: the exceptions that end a search early.
        seconds: how long to search; None: without a limit.
    """

    fn: Callable
    args: tuple
    cluster: Cluster | str | Path | None
    searcher: Searcher
    mesh: Any
    asked: Asked
    memory_limit_bytes: float | None
    donate_argnums: int | Sequence[int]
    microbatches: Microbatches
    schedule: str
    ends: tuple[type[BaseException], ...]
    seconds: float | None
    progress: Progress

    @property
    def limit(self) -> float:
        """Bytes that a device may hold."""
        return limit_of(cluster_of(self.cluster), self.memory_limit_bytes) * (1 - RESERVE if self.memory_limit_bytes is None else 1)

    @property
    def number(self) -> int | None:
        """The number of microbatches; None for any."""
        return self.microbatches if isinstance(self.microbatches, int) else None


def in_stages(call: Call, n_stages: int) -> Strategy:
    """The best strategy as a pipeline of so many stages."""
    cluster, searcher, asked = cluster_of(call.cluster), call.searcher, call.asked
    given = None if call.mesh is None or isinstance(call.mesh, int) else given_mesh(call.mesh)
    part_of, most = cluster.part(n_stages), most_axes(call.mesh, searcher)
    if given is not None:
        part_of.check(given)
    axes = (*asked.axes, *(given.names if given else ()))
    traced, _, spent = traced_of(call.fn, call.args, call.donate_argnums, axes, cluster)
    asked.check(traced.graph.argument_paths)
    until = None if call.seconds is None else time.perf_counter() + call.seconds
    known: dict[tuple, Solution] = {}  # equal stages are searched once

    def searched(
        stage: Stage, mesh: Mesh | None, fixed: Mapping[int, Layout], limit: float, progress: Progress
    ) -> tuple[Strategy, Problem]:
        program = stage.traced
        facts = program_facts(program.graph, rules_of(program.graph), compiler_of(cluster))
        pins = user_pins(asked.among(program.graph.argument_paths), program.graph, [], mesh is None)
        first = len(stage.arguments)
        stacked = tuple(first + k for k, message in enumerate(stage.receives) if message.kind == "loop")
        pins = replace(pins, stacked=stacked, fixed=fixed)
        meshes, _ = meshes_of(part_of, pins, mesh, most)
        counts = {"trace_seconds": 0.0, "n_ops": len(program.graph.walk())}
        prepared = Prepared(program, facts, part_of, meshes, 0, pins, limit, counts)
        key = program.graph.fingerprint, program.graph.donated, tuple(pins.given.items()), stacked, mesh, tuple(fixed.items()), limit
        if key in known:
            problem = prepared.problem(known[key].assignment.mesh, limit, ())
            solution = replace(known[key], judgement=problem.evaluate(known[key].assignment), stats={})
            return prepared.strategy(problem.mesh, solution, searcher), problem
        left = None if until is None else max(0.0, until - time.perf_counter())
        solution, problem = searched_on_meshes(prepared, searcher, timed(progress, left), call.ends, 1, None, limit)
        known[key] = solution
        return prepared.strategy(problem.mesh, solution, searcher), problem

    pipeline = Pipeline(n_stages, call.schedule, call.number, given, call.limit)
    return pipelined(traced, cluster, pipeline, searched, searcher, spent, call.progress)


def full(call: Call, whole: Callable[..., Strategy]) -> Strategy:
    """The best strategy with stages or without; ``whole`` searches without stages."""
    cluster, asked = cluster_of(call.cluster), call.asked

    def alone(left: float | None) -> Strategy:
        return whole(progress=part(call.progress, 0.0, 0.4), time_limit_seconds=left)

    def few_layers(
        traced: Traced, cluster: Cluster, limit_bytes: float, mesh: Mesh | None, like: Problem | None, hints: Hints
    ) -> tuple[Solution, Problem]:
        if like is not None:
            problem = Problem(like.facts, like.model, like.pins, limit_bytes, like)
            return solve(_QUICK, problem, silent, hints), problem
        pins = user_pins(asked.among(traced.graph.argument_paths), traced.graph, [], mesh is None)
        meshes = meshes_of(cluster, pins, None, 2)[0] if mesh is None else (mesh,)
        facts = program_facts(traced.graph, rules_of(traced.graph), compiler_of(cluster))
        prepared = Prepared(traced, facts, cluster, meshes, 0, pins, limit_bytes, {})
        return searched_on_meshes(prepared, _QUICK, silent, (), 1, None, limit_bytes)

    def plans(until: float, best_seconds: float, progress: Progress) -> Plans | None:
        return search_plans(
            traced_of(call.fn, call.args, call.donate_argnums, asked.axes, cluster)[0],
            cluster,
            call.limit,
            few_layers,
            call.schedule,
            until=until,
            best_seconds=best_seconds,
            n_microbatches=call.number,
            least_gain=BUDGETS.least_gain,
            progress=progress,
        )

    def staged(n_stages: int, n_microbatches: int | None, left: float | None) -> Strategy:
        own = replace(call, ends=endings(left, False), seconds=left, progress=part(call.progress, 0.7, 0.3))
        return in_stages(own if n_microbatches is None else replace(own, microbatches=n_microbatches), n_stages)

    return fullest(Searches(alone, plans, staged), cluster, call.seconds, call.progress, call.ends)
