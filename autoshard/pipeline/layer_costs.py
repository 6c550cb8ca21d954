"""Costs of a layer and of all else in a step, from searches of two programs of few layers.

The costs of a step of equal layers on given devices are affine in the number of layers: each layer adds the same seconds and bytes. So two
searches, of the step with a few of its own layers (`autoshard.pipeline.repeats`) and with one less, give those of a stage with any number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from autoshard.compilers.program_facts import ProgramFacts
from autoshard.ir import Op, shards
from autoshard.pipeline.figures import spent_seconds
from autoshard.pipeline.micro import loop_of
from autoshard.problem import Problem
from autoshard.search import Solution


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one device, of a step in microbatches or of a part of it.

    Attributes:
        microbatch_seconds: forward and backward of one microbatch, as predicted.
        objective_seconds: the same without overlap, which searches minimise.
        bound_seconds: a lower bound of that.
        after_seconds: what runs once a step.
        state_bytes: what lives throughout: weights, optimizer state and accumulated gradients.
        residual_bytes: all other memory at the peak of one microbatch.
    """

    microbatch_seconds: float
    objective_seconds: float
    bound_seconds: float
    after_seconds: float
    state_bytes: float
    residual_bytes: float

    def plus(self, other: Costs, times: float = 1.0) -> Costs:
        """The sum with a multiple of other costs."""
        return Costs(*(getattr(self, f.name) + times * getattr(other, f.name) for f in fields(Costs)))


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """The costs of one layer, and of what is not in layers: embeddings, logits, the loss."""

    layer: Costs
    ends: Costs

    def of(self, n_layers: float, share: float = 1.0) -> Costs:
        """The costs of some layers and a share of the ends."""
        return Costs(*[0.0] * 6).plus(self.layer, n_layers).plus(self.ends, share)


def layer_costs(fewer: Costs, more: Costs, n_fewer: int) -> LayerCosts:
    """The costs of a layer, from those of a program with ``n_fewer`` layers and of one with a layer more; none is negative."""
    layer = _not_negative(more.plus(fewer, -1.0))
    return LayerCosts(layer, _not_negative(fewer.plus(layer, -n_fewer)))


def with_less_memory(costs: LayerCosts, found: Costs, state_share: float, n_layers: int) -> LayerCosts:
    """The costs of a layer of another solution, where all that is not in layers costs what it did.

    Args:
        costs: without a memory limit.
        found: a solution of the program with ``n_layers``.
        state_share: of the solution's state, what belongs to layers.
    """
    rest = replace(costs.ends, state_bytes=found.state_bytes * (1 - state_share))
    layers = _not_negative(found.plus(rest, -1.0))
    return LayerCosts(Costs(*([0.0] * 6)).plus(layers, 1 / n_layers), rest)


def _not_negative(costs: Costs) -> Costs:
    return Costs(*(max(getattr(costs, f.name), 0.0) for f in fields(Costs)))


def costs_of(problem: Problem, solution: Solution, n_microbatches: int) -> Costs:
    """The costs of a solution of a step that loops over microbatches."""
    judgement, facts = solution.judgement, problem.facts
    cost, loop = judgement.cost, _loop(facts, n_microbatches)
    after = once = 0.0
    if loop is not None:
        inside = dict.fromkeys((op.index for op in loop.walk()), "microbatches")
        after, once = spent_seconds(facts, problem.model, judgement, inside).get("", (0.0, 0.0))
    objective = max(cost.objective_seconds - once, 0.0) / n_microbatches
    state = sum(state_bytes(problem, solution, n_microbatches))
    return Costs(
        microbatch_seconds=max(cost.makespan_seconds - after, 0.0) / n_microbatches,
        objective_seconds=objective,
        bound_seconds=objective * min(solution.lower_bound_seconds / max(cost.objective_seconds, 1e-30), 1.0),
        after_seconds=after,
        state_bytes=state,
        residual_bytes=max(cost.peak_bytes - state, 0.0),
    )


def state_bytes(problem: Problem, solution: Solution, n_microbatches: int) -> list[float]:
    """Bytes of one device that live throughout: of each argument, then of each accumulator of the loop over microbatches."""
    graph, assignment = problem.facts.graph, solution.assignment
    values = (*graph.arguments, *_accumulators(problem, n_microbatches))
    return [graph.values[value].nbytes / shards(assignment.layout(value), problem.mesh.sizes) for value in values]


def layer_share(problem: Problem, solution: Solution, n_microbatches: int, is_layer: Callable[[str], bool]) -> float:
    """The share of the state that belongs to layers: arguments whose paths do, and accumulators of their shapes."""
    graph, nbytes = problem.facts.graph, state_bytes(problem, solution, n_microbatches)
    own = [is_layer(path) for path in graph.argument_paths]
    shapes = {graph.values[value].shape for value, belongs in zip(graph.arguments, own, strict=True) if belongs}
    own += [graph.values[value].shape in shapes for value in _accumulators(problem, n_microbatches)]
    return sum(n for n, belongs in zip(nbytes, own, strict=True) if belongs) / max(sum(nbytes), 1.0)


def _accumulators(problem: Problem, n_microbatches: int) -> tuple[int, ...]:
    """What the loop over microbatches adds up, such as gradients."""
    loop = _loop(problem.facts, n_microbatches)
    return () if loop is None else loop.results[: loop.params["num_carry"]]


def _loop(facts: ProgramFacts, n_microbatches: int) -> Op | None:
    """The loop over microbatches; None for one microbatch."""
    return loop_of(facts.graph, facts.rules, n_microbatches) if n_microbatches > 1 else None
